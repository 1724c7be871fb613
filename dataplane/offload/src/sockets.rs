//! A namespace's open plaintext connections as the kernel lists them (sock_diag(7)), and their end. For connections that were made before
//! inbound capture was there; which of them must end, the caller decides.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use canal_abi::inbound::HBONE_PORT;
use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

use crate::OffloadError;
use crate::hook::within;

// linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h, net/tcp_states.h: fixed for good, like all of the kernel's interface.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const DUMP: u16 = 0x300;
const INET_DIAG_MARK: u16 = 15;
const INET_DIAG_CGROUP_ID: u16 = 21;
const IPPROTO_TCP: u8 = 6;
const HEADER: usize = 16;
/// Size of `struct inet_diag_sockid`, and of `struct inet_diag_msg`.
const SOCKET_ID: usize = 48;
const MESSAGE: usize = 72;
const ESTABLISHED: u32 = 1;
const LISTEN: u32 = 10;
const SYN_SENT: u32 = 1 << 2;
/// Established, SYN_RECV, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT: those that can still carry bytes.
const OPEN: u32 = 1 << ESTABLISHED | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8;
/// The kernel writes its answers in blocks of at most this.
const BLOCK: usize = 64 << 10;

/// One connection as its namespace sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    family: u8,
    state: u8,
    mark: u32,
    cgroup: u64,
    /// The kernel's own words for it, a cookie among them.
    id: [u8; SOCKET_ID],
}

/// Which connections [`inbound`] lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// All with somebody outside. Right where connections out of the pod lead to loopback, as capture by BPF has it.
    All,
    /// Those whose local port is listened to: where the pod's own connections out look alike.
    Listening,
}

/// Connections into the namespace at `netns` that no proxy is in: not on loopback, not HBONE, and not of a socket with `mark` outside the
/// pod's `cgroup`. Inside it the mark says nothing: the pod's processes may set it themselves.
pub fn inbound(netns: &Path, cgroup: &Path, mark: u32, which: Which) -> Result<Vec<Connection>, OffloadError> {
    let failed = |step| move |source| OffloadError::Sockets { netns: netns.to_path_buf(), step, source };
    let states = OPEN | 1 << LISTEN;
    let all = within(Some(netns), || dump(states))?.map_err(failed("listing"))?;
    Ok(select(all, mark, &cgroup_ids(cgroup), which))
}

/// Connections that processes in `cgroup` dialled to somebody outside the namespace at `netns`, for when capture was not there yet: not on
/// loopback, and not of a local port that is listened to.
pub fn dialled(netns: &Path, cgroup: &Path) -> Result<Vec<Connection>, OffloadError> {
    let failed = |step| move |source| OffloadError::Sockets { netns: netns.to_path_buf(), step, source };
    let all = within(Some(netns), || dump(OPEN | SYN_SENT | 1 << LISTEN))?.map_err(failed("listing"))?;
    let (pod, listening) = (cgroup_ids(cgroup), listening(&all));
    let dialled = |c: &Connection| {
        u32::from(c.state) != LISTEN
            && !c.local.ip().is_loopback()
            && c.local.ip() != c.remote.ip()
            && pod.contains(&c.cgroup)
            && !listening.contains(&c.local.port())
    };
    Ok(all.into_iter().filter(dialled).collect())
}

fn listening(all: &[Connection]) -> HashSet<u16> {
    all.iter().filter(|c| u32::from(c.state) == LISTEN).map(|c| c.local.port()).collect()
}

/// The kernel's numbers for a cgroup and all below it.
fn cgroup_ids(cgroup: &Path) -> HashSet<u64> {
    let mut ids = HashSet::new();
    let mut unread = vec![cgroup.to_path_buf()];
    while let Some(dir) = unread.pop() {
        ids.extend(std::fs::metadata(&dir).map(|m| m.ino()).ok());
        let below = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        unread.extend(below.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()));
    }
    ids
}

fn select(all: Vec<Connection>, mark: u32, pod: &HashSet<u64>, which: Which) -> Vec<Connection> {
    let listening = listening(&all);
    let wanted = |c: &Connection| {
        u32::from(c.state) != LISTEN
            && !c.local.ip().is_loopback()
            && c.local.ip() != c.remote.ip()
            && c.local.port() != HBONE_PORT
            && (c.mark != mark || pod.contains(&c.cgroup))
            && (which == Which::All || listening.contains(&c.local.port()))
    };
    all.into_iter().filter(wanted).collect()
}

/// Resets connections of the namespace at `netns`. Those that have ended meanwhile are fine. Says how many were reset.
pub fn reset(netns: &Path, connections: &[Connection]) -> Result<u64, OffloadError> {
    let failed = |step| move |source| OffloadError::Sockets { netns: netns.to_path_buf(), step, source };
    if connections.is_empty() {
        return Ok(0);
    }
    let ended = within(Some(netns), || -> io::Result<u64> {
        let socket = diag()?;
        let mut n = 0;
        for c in connections {
            ask(&socket, &request(SOCK_DESTROY, REQUEST | ACK, c.family, u32::MAX, &c.id))?;
            n += u64::from(acknowledged(&socket)?);
        }
        Ok(n)
    })?;
    ended.map_err(failed("resetting"))
}

/// Whether a TCP socket of this thread's own namespace has these two ends: then a process there speaks, not somebody who only looks like it.
/// An error of the kernel's is no.
pub fn is_here(local: SocketAddr, remote: SocketAddr) -> bool {
    let found = || -> io::Result<bool> {
        let (socket, mut found) = (diag()?, Vec::new());
        let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        ask(&socket, &request(SOCK_DIAG_BY_FAMILY, REQUEST, family as u8, u32::MAX, &id(local, remote)))?;
        let mut block = [0; 1024];
        let (_, n) = recv(&socket, &mut block, RecvFlags::empty())?;
        read(&block[..n.min(1024)], &mut found)?;
        // The kernel falls back on a listener where it finds no connection.
        Ok(found.iter().any(|c| c.remote == remote && c.local == local && OPEN & 1 << u32::from(c.state) != 0))
    };
    found().unwrap_or(false)
}

/// `struct inet_diag_sockid` of any socket with these ends.
fn id(local: SocketAddr, remote: SocketAddr) -> [u8; SOCKET_ID] {
    let mut id = [0; SOCKET_ID];
    for (end, port, ip) in [(local, 0, 4), (remote, 2, 20)] {
        id[port..port + 2].copy_from_slice(&end.port().to_be_bytes());
        match end.ip() {
            IpAddr::V4(v4) => id[ip..ip + 4].copy_from_slice(&v4.octets()),
            IpAddr::V6(v6) => id[ip..ip + 16].copy_from_slice(&v6.octets()),
        }
    }
    id[SOCKET_ID - 8..].fill(0xff);
    id
}

fn diag() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(SOCK_DIAG))?)
}

fn ask(socket: impl AsFd, request: &[u8]) -> io::Result<()> {
    sendto(socket, request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    Ok(())
}

/// `struct nlmsghdr` and `struct inet_diag_req_v2`.
fn request(kind: u16, flags: u16, family: u8, states: u32, id: &[u8; SOCKET_ID]) -> Vec<u8> {
    let length = (HEADER + 8 + SOCKET_ID) as u32;
    let mut r = Vec::with_capacity(length as usize);
    r.extend(length.to_ne_bytes());
    r.extend(kind.to_ne_bytes());
    r.extend(flags.to_ne_bytes());
    r.extend([0; 8]);
    r.extend([family, IPPROTO_TCP, 0, 0]);
    r.extend(states.to_ne_bytes());
    r.extend(id);
    r
}

fn dump(states: u32) -> io::Result<Vec<Connection>> {
    let mut all = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let socket = diag()?;
        ask(&socket, &request(SOCK_DIAG_BY_FAMILY, REQUEST | DUMP, family as u8, states, &[0; SOCKET_ID]))?;
        let mut block = vec![0; BLOCK];
        loop {
            let (_, n) = recv(&socket, &mut block, RecvFlags::empty())?;
            if read(&block[..n.min(BLOCK)], &mut all)? {
                break;
            }
        }
    }
    Ok(all)
}

/// Whether the kernel did it (`false`: the connection has ended already).
fn acknowledged(socket: impl AsFd) -> io::Result<bool> {
    let mut block = [0; 1024];
    let (_, n) = recv(socket, &mut block, RecvFlags::empty())?;
    match read(&block[..n.min(1024)], &mut Vec::new()) {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        done => done.map(|_| true),
    }
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// Adds what the block's messages list; `true`: that was the last. A message that is cut short ends the block.
fn read(mut block: &[u8], to: &mut Vec<Connection>) -> io::Result<bool> {
    while let (Some(length), Some(kind)) = (number(block, 0).map(u32::from_ne_bytes), number(block, 4).map(u16::from_ne_bytes)) {
        let length = length as usize;
        let Some(body) = block.get(HEADER..length) else { break };
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let code = number(body, 0).map_or(libc::EBADMSG, |b| -i32::from_ne_bytes(b));
                return if code == 0 { Ok(true) } else { Err(io::Error::from_raw_os_error(code)) };
            }
            SOCK_DIAG_BY_FAMILY => to.extend(connection(body)),
            _ => {}
        }
        block = block.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// `struct inet_diag_msg` and its attributes.
fn connection(body: &[u8]) -> Option<Connection> {
    let (family, state) = (*body.first()?, *body.get(1)?);
    let id: [u8; SOCKET_ID] = number(body, 4)?;
    let address = |ip: usize, port: usize| -> Option<SocketAddr> {
        let port = u16::from_be_bytes(number(&id, port)?);
        let ip: IpAddr = match i32::from(family) {
            libc::AF_INET => Ipv4Addr::from(number::<4>(&id, ip)?).into(),
            _ => Ipv6Addr::from(number::<16>(&id, ip)?).to_canonical(),
        };
        Some(SocketAddr::new(ip, port))
    };
    let (local, remote) = (address(4, 0)?, address(20, 2)?);
    let attributes = body.get(MESSAGE..)?;
    let mark = attribute(attributes, INET_DIAG_MARK).map(u32::from_ne_bytes).unwrap_or_default();
    let cgroup = attribute(attributes, INET_DIAG_CGROUP_ID).map(u64::from_ne_bytes).unwrap_or_default();
    Some(Connection { local, remote, family, state, mark, cgroup, id })
}

/// The value of one kind among a message's attributes.
fn attribute<const N: usize>(mut attributes: &[u8], wanted: u16) -> Option<[u8; N]> {
    while let (Some(length), Some(kind)) = (number(attributes, 0).map(u16::from_ne_bytes), number(attributes, 2).map(u16::from_ne_bytes)) {
        if kind == wanted {
            return number(attributes, 4);
        }
        attributes = attributes.get(usize::from(length).max(4).next_multiple_of(4)..).unwrap_or_default();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn c(local: &str, remote: &str, state: u32, mark: u32) -> Connection {
        Connection {
            local: local.parse().unwrap(),
            remote: remote.parse().unwrap(),
            family: 2,
            state: state as u8,
            mark,
            cgroup: 5,
            id: [0; 48],
        }
    }

    #[test]
    fn only_what_came_in_without_a_proxy_is_listed() {
        let all = || {
            vec![
                c("0.0.0.0:80", "0.0.0.0:0", LISTEN, 0),
                c("10.0.0.1:80", "10.0.0.9:1", ESTABLISHED, 0),
                c("10.0.0.1:80", "10.0.0.9:2", ESTABLISHED, 7),
                c("10.0.0.1:15008", "10.0.0.9:3", ESTABLISHED, 0),
                c("127.0.0.1:80", "127.0.0.1:4", ESTABLISHED, 0),
                c("10.0.0.1:80", "10.0.0.1:5", ESTABLISHED, 0),
                c("10.0.0.1:40000", "10.0.0.9:6", 8, 0),
            ]
        };
        let ports = |which| select(all(), 7, &HashSet::from([6]), which).iter().map(|c| c.remote.port()).collect::<Vec<_>>();
        assert_eq!((ports(Which::All), ports(Which::Listening)), (vec![1, 6], vec![1]));
        let marked = select(all(), 7, &HashSet::from([5]), Which::Listening);
        assert_eq!(marked.iter().map(|c| c.remote.port()).collect::<Vec<_>>(), [1, 2], "a pod's own socket is listed whatever its mark");
    }

    #[test]
    fn a_socket_is_found_by_its_two_ends() {
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let l = std::net::TcpListener::bind(at).unwrap();
            let client = std::net::TcpStream::connect(l.local_addr().unwrap()).unwrap();
            let (from, to) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            assert!(is_here(from, to) && is_here(to, from), "{at}");
            let other = SocketAddr::new(from.ip(), from.port() ^ 1);
            assert!(!is_here(other, to), "{at}: nobody's");
            assert!(!is_here(to, SocketAddr::new(from.ip(), 9)), "{at}: only a listener's");
        }
    }

    #[test]
    fn a_block_that_is_cut_short_is_read_as_far_as_it_goes() {
        let mut body = vec![2, 1, 0, 0];
        let mut id = [0; SOCKET_ID];
        id[..4].copy_from_slice(&[0, 80, 0x12, 0x34]);
        id[4..8].copy_from_slice(&[10, 0, 0, 1]);
        id[20..24].copy_from_slice(&[10, 0, 0, 9]);
        body.extend(id);
        body.extend([0; 20]);
        body.extend([8, 0, 15, 0, 7, 0, 0, 0]);
        let mut block = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
        block.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        block.extend([0; 10]);
        block.extend(&body);
        for cut in 0..block.len() {
            let mut none = Vec::new();
            assert!(!read(&block[..cut], &mut none).unwrap() && none.is_empty(), "{cut}");
        }
        let mut one = Vec::new();
        assert!(!read(&block, &mut one).unwrap());
        assert_eq!((one[0].local, one[0].remote, one[0].mark), ("10.0.0.1:80".parse().unwrap(), "10.0.0.9:4660".parse().unwrap(), 7));
        let mut error = 20u32.to_ne_bytes().to_vec();
        error.extend(NLMSG_ERROR.to_ne_bytes());
        error.extend([0; 10]);
        error.extend((-libc::EPERM).to_ne_bytes());
        assert_eq!(read(&error, &mut one).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }
}

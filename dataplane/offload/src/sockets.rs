//! Open plaintext connections of a namespace, as the kernel lists them (sock_diag(7)), and how to
//! reset them. It is for connections that were opened before inbound capture was installed. The
//! caller decides which of them must end. Start with [`inbound`].

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use canal_abi::inbound::HBONE_PORT;
use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

use crate::OffloadError;
use crate::tc_hook::within;

// Numbers of linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and net/tcp_states.h. They
// belong to the kernel's stable interface.
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
/// Size in bytes of `struct inet_diag_sockid`; the next constant is that of `struct inet_diag_msg`.
const SOCKET_ID: usize = 48;
const MESSAGE: usize = 72;
const ESTABLISHED: u32 = 1;
const LISTEN: u32 = 10;
const SYN_SENT: u32 = 1 << 2;
/// States in which a connection can still carry bytes: established, SYN_RECV, FIN_WAIT1, FIN_WAIT2,
/// CLOSE_WAIT.
const OPEN: u32 = 1 << ESTABLISHED | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8;
/// Size in bytes of the largest block in which the kernel writes its replies.
const BLOCK: usize = 64 << 10;

/// One connection as its namespace sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketInfo {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    family: u8,
    state: u8,
    mark: u32,
    cgroup: u64,
    /// Identification of the socket by the kernel (`struct inet_diag_sockid`), its cookie included.
    id: [u8; SOCKET_ID],
}

/// Selection of the connections that [`inbound`] lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionFilter {
    /// All connections with a peer outside. It is correct where connections out of the pod lead to
    /// loopback, as with capture by BPF.
    All,
    /// Connections whose local port has a listener. It is needed where the pod's own outbound
    /// connections look the same.
    Listening,
}

/// Lists the connections into the namespace at `netns` that no proxy handles. Excluded are
/// loopback, HBONE, and connections of the proxy. A connection is the proxy's if one of its ends is
/// a socket that has one of `marks` and is outside the pod's `cgroup`; both ends are then excluded.
/// Inside the cgroup a mark proves nothing, because the pod's processes may set it themselves.
///
/// # Errors
/// Fails if the namespace cannot be entered or the kernel does not list its connections.
pub fn inbound(
    netns: &Path,
    cgroup: &Path,
    marks: &[u32],
    which: ConnectionFilter,
) -> Result<Vec<SocketInfo>, OffloadError> {
    let failed = |step| {
        move |source| OffloadError::Sockets {
            netns: netns.to_path_buf(),
            step,
            source,
        }
    };
    let states = OPEN | 1 << LISTEN;
    let all = within(Some(netns), || dump(states))?.map_err(failed("listing"))?;
    Ok(select(all, marks, &cgroup_ids(cgroup), which))
}

/// Lists the connections that processes in `cgroup` opened to peers outside the namespace at
/// `netns` before capture was installed. Excluded are loopback and connections of a local port that
/// has a listener.
///
/// # Errors
/// Fails if the namespace cannot be entered or the kernel does not list its connections.
pub fn dialled(netns: &Path, cgroup: &Path) -> Result<Vec<SocketInfo>, OffloadError> {
    let failed = |step| {
        move |source| OffloadError::Sockets {
            netns: netns.to_path_buf(),
            step,
            source,
        }
    };
    let all =
        within(Some(netns), || dump(OPEN | SYN_SENT | 1 << LISTEN))?.map_err(failed("listing"))?;
    let (pod, listening) = (cgroup_ids(cgroup), listening(&all));
    let dialled = |c: &SocketInfo| {
        u32::from(c.state) != LISTEN
            && !is_inside(c)
            && c.local.ip() != c.remote.ip()
            && pod.contains(&c.cgroup)
            && !listening.contains(&c.local.port())
    };
    Ok(all.into_iter().filter(dialled).collect())
}

/// Returns true if the connection never leaves the namespace: on loopback, or from the pod's own
/// address to the proxy's.
fn is_inside(c: &SocketInfo) -> bool {
    canal_abi::capture::is_inside(c.local.ip()) || canal_abi::capture::is_inside(c.remote.ip())
}

fn listening(all: &[SocketInfo]) -> HashSet<u16> {
    all.iter()
        .filter(|c| u32::from(c.state) == LISTEN)
        .map(|c| c.local.port())
        .collect()
}

/// Returns the kernel's IDs of a cgroup and of all cgroups below it.
fn cgroup_ids(cgroup: &Path) -> HashSet<u64> {
    let mut ids = HashSet::new();
    let mut unread = vec![cgroup.to_path_buf()];
    while let Some(dir) = unread.pop() {
        ids.extend(std::fs::metadata(&dir).map(|m| m.ino()).ok());
        let below = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        unread.extend(
            below
                .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
                .map(|e| e.path()),
        );
    }
    ids
}

fn select(
    all: Vec<SocketInfo>,
    marks: &[u32],
    pod: &HashSet<u64>,
    which: ConnectionFilter,
) -> Vec<SocketInfo> {
    let listening = listening(&all);
    let is_proxys = |c: &SocketInfo| marks.contains(&c.mark) && !pod.contains(&c.cgroup);
    // Both ends of a connection that the proxy delivers are in this namespace, and the
    // application's end shows the client's address.
    let delivered: HashSet<(SocketAddr, SocketAddr)> = all
        .iter()
        .filter(|c| is_proxys(c))
        .map(|c| (c.remote, c.local))
        .collect();
    let wanted = |c: &SocketInfo| {
        u32::from(c.state) != LISTEN
            && !is_inside(c)
            && c.local.ip() != c.remote.ip()
            && c.local.port() != HBONE_PORT
            && !is_proxys(c)
            && !delivered.contains(&(c.local, c.remote))
            && (which == ConnectionFilter::All || listening.contains(&c.local.port()))
    };
    all.into_iter().filter(wanted).collect()
}

/// Resets connections of the namespace at `netns` and returns how many were reset. Connections that
/// have ended meanwhile are no error.
///
/// # Errors
/// Fails if the namespace cannot be entered or the kernel refuses to reset a connection.
pub fn reset(netns: &Path, connections: &[SocketInfo]) -> Result<u64, OffloadError> {
    let failed = |step| {
        move |source| OffloadError::Sockets {
            netns: netns.to_path_buf(),
            step,
            source,
        }
    };
    if connections.is_empty() {
        return Ok(0);
    }
    let ended = within(Some(netns), || -> io::Result<u64> {
        let socket = diag()?;
        let mut n = 0;
        for c in connections {
            send_request(
                &socket,
                &request(SOCK_DESTROY, REQUEST | ACK, c.family, u32::MAX, &c.id),
            )?;
            n += u64::from(acknowledged(&socket)?);
        }
        Ok(n)
    })?;
    ended.map_err(failed("resetting"))
}

/// Returns true if a TCP socket of this thread's own namespace has these two ends. Then the peer is
/// a process of this namespace, and not one that only uses its address. An error of the kernel
/// counts as false.
pub fn is_here(local: SocketAddr, remote: SocketAddr) -> bool {
    let found = || -> io::Result<bool> {
        let (socket, mut found) = (diag()?, Vec::new());
        let family = if local.is_ipv4() {
            libc::AF_INET
        } else {
            libc::AF_INET6
        };
        send_request(
            &socket,
            &request(
                SOCK_DIAG_BY_FAMILY,
                REQUEST,
                family as u8,
                u32::MAX,
                &id(local, remote),
            ),
        )?;
        let mut block = [0; 1024];
        let (_, n) = recv(&socket, &mut block, RecvFlags::empty())?;
        read(&block[..n.min(1024)], &mut found)?;
        // The kernel returns a listener where it finds no connection.
        Ok(found
            .iter()
            .any(|c| c.remote == remote && c.local == local && OPEN & 1 << u32::from(c.state) != 0))
    };
    found().unwrap_or(false)
}

/// Builds the `struct inet_diag_sockid` of any socket with these ends.
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
    Ok(socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(SOCK_DIAG),
    )?)
}

fn send_request(socket: impl AsFd, request: &[u8]) -> io::Result<()> {
    sendto(
        socket,
        request,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    Ok(())
}

/// Builds a `struct nlmsghdr` and a `struct inet_diag_req_v2`.
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

fn dump(states: u32) -> io::Result<Vec<SocketInfo>> {
    let mut all = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let socket = diag()?;
        send_request(
            &socket,
            &request(
                SOCK_DIAG_BY_FAMILY,
                REQUEST | DUMP,
                family as u8,
                states,
                &[0; SOCKET_ID],
            ),
        )?;
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

/// Reads the kernel's acknowledgment. Returns false if the connection had already ended.
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

/// Appends the connections that the block's messages list. Returns true if the list is complete. A
/// truncated message ends the block.
fn read(mut block: &[u8], to: &mut Vec<SocketInfo>) -> io::Result<bool> {
    while let (Some(length), Some(kind)) = (
        number(block, 0).map(u32::from_ne_bytes),
        number(block, 4).map(u16::from_ne_bytes),
    ) {
        let length = length as usize;
        let Some(body) = block.get(HEADER..length) else {
            break;
        };
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let code = number(body, 0).map_or(libc::EBADMSG, |b| -i32::from_ne_bytes(b));
                return if code == 0 {
                    Ok(true)
                } else {
                    Err(io::Error::from_raw_os_error(code))
                };
            }
            SOCK_DIAG_BY_FAMILY => to.extend(connection(body)),
            _ => {}
        }
        block = block.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// Parses a `struct inet_diag_msg` and its attributes.
fn connection(body: &[u8]) -> Option<SocketInfo> {
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
    let mark = attribute(attributes, INET_DIAG_MARK)
        .map(u32::from_ne_bytes)
        .unwrap_or_default();
    let cgroup = attribute(attributes, INET_DIAG_CGROUP_ID)
        .map(u64::from_ne_bytes)
        .unwrap_or_default();
    Some(SocketInfo {
        local,
        remote,
        family,
        state,
        mark,
        cgroup,
        id,
    })
}

/// Returns the value of one kind of attribute of a message.
fn attribute<const N: usize>(mut attributes: &[u8], wanted: u16) -> Option<[u8; N]> {
    while let (Some(length), Some(kind)) = (
        number(attributes, 0).map(u16::from_ne_bytes),
        number(attributes, 2).map(u16::from_ne_bytes),
    ) {
        if kind == wanted {
            return number(attributes, 4);
        }
        attributes = attributes
            .get(usize::from(length).max(4).next_multiple_of(4)..)
            .unwrap_or_default();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn c(local: &str, remote: &str, state: u32, mark: u32) -> SocketInfo {
        SocketInfo {
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
    fn only_inbound_connections_without_a_proxy_are_listed() {
        let all = || {
            vec![
                c("0.0.0.0:80", "0.0.0.0:0", LISTEN, 0),
                c("10.0.0.1:80", "10.0.0.9:1", ESTABLISHED, 0),
                c("10.0.0.1:80", "10.0.0.9:2", ESTABLISHED, 7),
                // HBONE, and loopback addresses of the pod, among them those of the capture.
                c("10.0.0.1:15008", "10.0.0.9:3", ESTABLISHED, 0),
                c("127.0.0.1:80", "127.0.0.1:4", ESTABLISHED, 0),
                c(
                    "[fd63:616e:616c:1:0:1::2]:15001",
                    "[fd00::1]:4",
                    ESTABLISHED,
                    0,
                ),
                c("10.0.0.1:4", "127.64.0.2:15001", ESTABLISHED, 0),
                c("10.0.0.1:80", "10.0.0.1:5", ESTABLISHED, 0),
                // CLOSE_WAIT: the peer has ended, and the application still may send.
                c("10.0.0.1:40000", "10.0.0.9:6", 8, 0),
            ]
        };
        // 7 is the proxy's mark. All sockets here have cgroup 5, so with 6 as the pod's cgroup none is
        // the pod's own.
        let ports = |which| {
            select(all(), &[7], &HashSet::from([6]), which)
                .iter()
                .map(|c| c.remote.port())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (
                ports(ConnectionFilter::All),
                ports(ConnectionFilter::Listening)
            ),
            (vec![1, 6], vec![1])
        );
        let marked = select(
            all(),
            &[7],
            &HashSet::from([5]),
            ConnectionFilter::Listening,
        );
        assert_eq!(
            marked.iter().map(|c| c.remote.port()).collect::<Vec<_>>(),
            [1, 2],
            "a pod's own socket is listed whatever its mark"
        );
    }

    #[test]
    fn both_ends_of_a_delivery_are_the_proxys() {
        let of_pod = |c: SocketInfo| SocketInfo { cgroup: 6, ..c };
        let all = vec![
            // The proxy delivered this connection with the client's address, which the
            // application's end shows.
            of_pod(c("10.0.0.1:80", "10.0.0.9:1", ESTABLISHED, 8)),
            c("10.0.0.9:1", "10.0.0.1:80", ESTABLISHED, 8),
            // This one comes from the client itself, although the pod's process set the mark on its
            // end.
            of_pod(c("10.0.0.1:80", "10.0.0.9:2", ESTABLISHED, 8)),
            // Both ends of this one belong to the pod's process.
            of_pod(c("10.0.0.1:80", "10.0.0.9:3", ESTABLISHED, 0)),
            of_pod(c("10.0.0.9:3", "10.0.0.1:80", ESTABLISHED, 8)),
        ];
        let left = select(all, &[7, 8], &HashSet::from([6]), ConnectionFilter::All);
        assert_eq!(
            left.iter().map(|c| c.remote.port()).collect::<Vec<_>>(),
            [2, 3, 80]
        );
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
            assert!(
                !is_here(to, SocketAddr::new(from.ip(), 9)),
                "{at}: only a listener's"
            );
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
            assert!(
                !read(&block[..cut], &mut none).unwrap() && none.is_empty(),
                "{cut}"
            );
        }
        let mut one = Vec::new();
        assert!(!read(&block, &mut one).unwrap());
        assert_eq!(
            (one[0].local, one[0].remote, one[0].mark),
            (
                "10.0.0.1:80".parse().unwrap(),
                "10.0.0.9:4660".parse().unwrap(),
                7
            )
        );
        let mut error = 20u32.to_ne_bytes().to_vec();
        error.extend(NLMSG_ERROR.to_ne_bytes());
        error.extend([0; 10]);
        error.extend((-libc::EPERM).to_ne_bytes());
        assert_eq!(
            read(&error, &mut one).unwrap_err().raw_os_error(),
            Some(libc::EPERM)
        );
    }
}

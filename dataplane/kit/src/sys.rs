//! Sockets with the options a proxy needs, opened in the namespace they belong to; thread pinning; cookies.
//! Nothing is read from or written to a connection here. The only module of the crate with `unsafe`.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CpuSet, LinkNameSpaceType};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpStream};

/// Pending connections a listener keeps; the kernel caps it at `net.core.somaxconn`.
pub const BACKLOG: i32 = 4096;
/// A TCP connect that takes longer has failed (ztunnel's value).
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Keepalive: first probe after, then every, then give up after so many unanswered (ztunnel's values).
pub const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(180), Duration::from_secs(180), 9);

/// A socket that could not be made, with what was tried and the mend.
#[derive(Debug, thiserror::Error)]
pub enum SysError {
    /// The namespace's file is missing or is not a network namespace.
    #[error("network namespace {path}: {source}; is the pod gone, or is the path not under /run/netns?")]
    Netns { path: PathBuf, source: io::Error },
    /// The thread could not enter the namespace.
    #[error("entering network namespace {path}: {source}; the process needs CAP_SYS_ADMIN")]
    Enter { path: PathBuf, source: io::Error },
    /// A socket option was refused.
    #[error("{what} for {address}: {source}{}", hint(.what, .source))]
    Socket { what: &'static str, address: SocketAddr, source: io::Error },
    /// The connection was not up in [`CONNECT_TIMEOUT`] or the caller's own limit.
    #[error("connect to {address}: no answer in {limit:?}; a network policy that drops the port looks like this")]
    Timeout { address: SocketAddr, limit: Duration },
}

fn hint(what: &str, source: &io::Error) -> &'static str {
    match (what, source.kind()) {
        ("SO_MARK" | "IP_FREEBIND" | "IP_TRANSPARENT", io::ErrorKind::PermissionDenied) => "; the process needs CAP_NET_ADMIN",
        ("bind", io::ErrorKind::AddrInUse) => "; another process listens there",
        ("bind", io::ErrorKind::AddrNotAvailable) => "; the address is not local in this namespace",
        ("connect", io::ErrorKind::AddrNotAvailable) => {
            "; all source ports towards it are taken: widen net.ipv4.ip_local_port_range, or add endpoints"
        }
        ("socket", _) if source.raw_os_error() == Some(libc::EMFILE) => "; the process has all the files that it may open (ulimit -n)",
        _ => "",
    }
}

impl SysError {
    /// What this machine lacks, if that is why; then the other side is not to blame.
    pub fn shortage(&self) -> Option<&'static str> {
        let SysError::Socket { what, source, .. } = self else { return None };
        match (*what, source.raw_os_error()?) {
            ("connect", libc::EADDRNOTAVAIL) => Some("source_ports"),
            (_, libc::EMFILE | libc::ENFILE) => Some("open_files"),
            (_, libc::ENOBUFS | libc::ENOMEM) => Some("memory"),
            _ => None,
        }
    }
}

/// Tells network namespaces apart for as long as one of them is held open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NetnsId {
    device: u64,
    inode: u64,
}

/// An open network namespace. Holding it keeps the namespace alive.
pub struct Netns {
    fd: OwnedFd,
    id: NetnsId,
    path: PathBuf,
}

impl fmt::Debug for Netns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Netns({})", self.path.display())
    }
}

impl Netns {
    /// Opens the namespace bound at `path`, e.g. `/run/netns/x` or `/proc/<pid>/ns/net`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, SysError> {
        let path = path.as_ref().to_path_buf();
        let open = || -> io::Result<(OwnedFd, NetnsId)> {
            let fd = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            let stat = rustix::fs::fstat(&fd)?;
            Ok((fd, NetnsId { device: stat.st_dev, inode: stat.st_ino }))
        };
        match open() {
            Ok((fd, id)) => Ok(Self { fd, id, path }),
            Err(source) => Err(SysError::Netns { path, source }),
        }
    }

    /// The calling thread's namespace.
    pub fn current() -> Result<Self, SysError> {
        Self::open("/proc/thread-self/ns/net")
    }

    /// The identity of the namespace, equal for every path that leads to it.
    pub fn id(&self) -> NetnsId {
        self.id
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `work` with the calling thread inside the namespace and returns home, also when `work` panics.
    ///
    /// The process is aborted if the thread cannot return: a proxy thread in the wrong namespace would send one tenant's
    /// traffic from another's address. `work` must not await; sockets opened inside stay in the namespace for life.
    pub fn enter<T>(&self, work: impl FnOnce() -> T) -> Result<T, SysError> {
        struct Home(OwnedFd);
        impl Drop for Home {
            fn drop(&mut self) {
                if rustix::thread::move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network)).is_err() {
                    std::process::abort();
                }
            }
        }
        let refused = |source: io::Error| SysError::Enter { path: self.path.clone(), source };
        // Opened per call, not cached per thread: a tokio blocking thread may be anywhere, and one open costs about 2 µs.
        let home =
            rustix::fs::open("/proc/thread-self/ns/net", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(|e| refused(e.into()))?;
        rustix::thread::move_into_link_name_space(self.fd.as_fd(), Some(LinkNameSpaceType::Network)).map_err(|e| refused(e.into()))?;
        let _home = Home(home);
        Ok(work())
    }
}

/// How a listener is opened. `Default` is a plain listener with `SO_REUSEADDR`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ListenOptions {
    /// `SO_REUSEPORT`: one listener per worker on the same address.
    pub reuse_port: bool,
    /// `SO_MARK` on the listener and so on every connection accepted from it.
    pub mark: Option<u32>,
    /// `IP_FREEBIND`: the address need not be local yet.
    pub freebind: bool,
    /// IPv6 only: do not take IPv4 as well on `[::]`.
    pub v6_only: bool,
}

/// How a connection is opened. `Default` adds keepalive and `TCP_NODELAY` only.
#[derive(Debug, Clone, Copy)]
pub struct ConnectOptions {
    /// Source address; the port may be 0.
    pub bind: Option<SocketAddr>,
    /// `SO_MARK`, e.g. [`canal_wire::hbone::PROXY_MARK`] or a tenant's.
    pub mark: Option<u32>,
    /// `IP_FREEBIND` for `bind`.
    pub freebind: bool,
    /// Give up after.
    pub timeout: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { bind: None, mark: None, freebind: false, timeout: CONNECT_TIMEOUT }
    }
}

/// The addresses that connections are opened from; `None` leaves it to the routing table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sources {
    pub v4: Option<Ipv4Addr>,
    pub v6: Option<Ipv6Addr>,
}

impl Sources {
    /// What to bind to before connecting to `to`; the kernel chooses the port when it connects.
    pub fn towards(&self, to: IpAddr) -> Option<SocketAddr> {
        match to.to_canonical() {
            IpAddr::V4(_) => self.v4.map(|own| SocketAddr::new(own.into(), 0)),
            IpAddr::V6(_) => self.v6.map(|own| SocketAddr::new(own.into(), 0)),
        }
    }
}

fn at<T>(what: &'static str, address: SocketAddr, r: io::Result<T>) -> Result<T, SysError> {
    r.map_err(|source| SysError::Socket { what, address, source })
}

fn inside<T>(netns: Option<&Netns>, work: impl FnOnce() -> Result<T, SysError>) -> Result<T, SysError> {
    match netns {
        Some(n) => n.enter(work)?,
        None => work(),
    }
}

fn socket(address: SocketAddr, mark: Option<u32>, freebind: bool) -> Result<Socket, SysError> {
    let s = at("socket", address, Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP)))?;
    at("O_NONBLOCK", address, s.set_nonblocking(true))?;
    if let Some(mark) = mark {
        at("SO_MARK", address, s.set_mark(mark))?;
    }
    if freebind {
        let set = if address.is_ipv4() { s.set_freebind_v4(true) } else { s.set_freebind_v6(true) };
        at("IP_FREEBIND", address, set)?;
    }
    Ok(s)
}

/// Opens a TCP listener at `address`, in `netns` if given, registered with the calling tokio runtime.
pub fn listen(netns: Option<&Netns>, address: SocketAddr, options: &ListenOptions) -> Result<TcpListener, SysError> {
    let s = inside(netns, || {
        let s = socket(address, options.mark, options.freebind)?;
        at("SO_REUSEADDR", address, s.set_reuse_address(true))?;
        if options.reuse_port {
            at("SO_REUSEPORT", address, s.set_reuse_port(true))?;
        }
        if address.is_ipv6() {
            at("IPV6_V6ONLY", address, s.set_only_v6(options.v6_only))?;
        }
        at("bind", address, s.bind(&address.into()))?;
        at("listen", address, s.listen(BACKLOG))?;
        Ok(s)
    })?;
    at("register", address, TcpListener::from_std(s.into()))
}

/// Connects to `address`, in `netns` if given, with keepalive and `TCP_NODELAY` set.
///
/// The socket is made and the connect started inside the namespace without awaiting; only the wait for the peer's answer awaits.
pub async fn connect(netns: Option<&Netns>, address: SocketAddr, options: &ConnectOptions) -> Result<TcpStream, SysError> {
    let s = inside(netns, || {
        let s = socket(address, options.mark, options.freebind)?;
        if let Some(source) = options.bind {
            if source.port() == 0 {
                at("IP_BIND_ADDRESS_NO_PORT", source, port_at_connect(&s))?;
            }
            at("bind", source, s.bind(&source.into()))?;
        }
        match s.connect(&address.into()) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(source) => return Err(SysError::Socket { what: "connect", address, source }),
        }
        Ok(s)
    })?;
    let stream = at("register", address, TcpStream::from_std(s.into()))?;
    match tokio::time::timeout(options.timeout, stream.writable()).await {
        Ok(ready) => at("connect", address, ready)?,
        Err(_) => return Err(SysError::Timeout { address, limit: options.timeout }),
    }
    if let Some(source) = at("connect", address, stream.take_error())? {
        return Err(SysError::Socket { what: "connect", address, source });
    }
    at("keepalive", address, tune(&stream))?;
    Ok(stream)
}

/// Sets `TCP_NODELAY` and [`KEEPALIVE`]; for accepted connections too.
pub fn tune(stream: &TcpStream) -> io::Result<()> {
    let (time, interval, retries) = KEEPALIVE;
    let s = SockRef::from(stream);
    s.set_tcp_nodelay(true)?;
    s.set_tcp_keepalive(&TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(retries))
}

/// Makes the coming close of `stream` a reset (RST) in place of an orderly end (FIN): how a reset is passed on.
pub fn reset_on_close(stream: &TcpStream) {
    // Best effort: the socket may be dead already, which is what is wanted.
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// Where a connection redirected by netfilter was going (`SO_ORIGINAL_DST`, `IP6T_SO_ORIGINAL_DST`).
pub fn original_destination(stream: &TcpStream) -> io::Result<SocketAddr> {
    let v4 = match stream.local_addr()?.ip() {
        IpAddr::V4(_) => true,
        IpAddr::V6(a) => a.to_ipv4_mapped().is_some(),
    };
    let s = SockRef::from(stream);
    let addr = if v4 { s.original_dst_v4()? } else { s.original_dst_v6()? };
    addr.as_socket().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the kernel gave an address that is not IP"))
}

/// Leaves the choice of the source port to the connect. A bind would take one that no other connection from this address may have,
/// whatever its destination: with one source address, that is all ports of the host for 28,000 connections.
fn port_at_connect(socket: &Socket) -> io::Result<()> {
    let on: libc::c_int = 1;
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the fd is open for the borrow's life; the kernel reads `len` = 4 bytes from `on`, which is 4 bytes long.
    let rc = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, (&raw const on).cast(), len) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The kernel's cookie of the socket's network namespace (`SO_NETNS_COOKIE`), the same number BPF's `bpf_get_netns_cookie` gives.
pub fn netns_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    // linux/uapi/asm-generic/socket.h; the libc crate lacks it on some targets.
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let mut cookie = 0u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the fd is open for the borrow's life; the kernel writes at most `len` = 8 bytes to `cookie`, which is 8 bytes long.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, (&raw mut cookie).cast(), &raw mut len) };
    if rc == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

/// The socket's own cookie (`SO_COOKIE`), unique while the machine runs; the same number as BPF's `bpf_get_socket_cookie`.
pub fn socket_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(rustix::net::sockopt::socket_cookie(socket)?)
}

/// The cores this process may run on, ascending.
pub fn cores() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return vec![0] };
    (0..CpuSet::MAX_CPU).filter(|c| set.is_set(*c)).collect()
}

/// Pins the calling thread to `core`.
pub fn pin_thread(core: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    if core >= CpuSet::MAX_CPU {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("core {core} is above {}", CpuSet::MAX_CPU - 1)));
    }
    set.set(core);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Raises the soft limit of open files to the hard one; a proxy holds two per connection. Returns the limit in force.
pub fn raise_file_limit() -> u64 {
    raise_file_limit_to(0)
}

/// The same, and before that the hard limit to `wanted` if it is less and this process may (CAP_SYS_RESOURCE).
pub fn raise_file_limit_to(wanted: u64) -> u64 {
    let have = rustix::process::getrlimit(Resource::Nofile);
    if have.maximum.is_some_and(|most| most < wanted) {
        // Refused without the capability, or above fs.nr_open; the caller learns it from what is in force.
        let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: Some(wanted) });
    }
    let have = rustix::process::getrlimit(Resource::Nofile);
    // Refused only in a sandbox; then the present limit stands.
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: have.maximum, maximum: have.maximum });
    rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;

//! System calls of a proxy: sockets in the namespace they belong to, kernel TLS, thread pinning,
//! cookies, a clock. The only module of the crate with `unsafe`. It makes no decision about the
//! data that is read or written. Start with [`listen`], [`connect`] and [`Netns`].

use std::cell::Cell;
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::BytesMut;
use rustix::fs::{Mode, OFlags};
use rustix::thread::{CpuSet, LinkNameSpaceType};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpStream};

mod delivery;
mod tls;

pub use delivery::{DeliveryOptions, connect_from};
pub use tls::{
    TlsDirection, TlsKeys, kernel_tls, tls_attach, tls_keys, tls_receive, tls_records, tls_send,
};

/// Length of a listener's accept queue. The kernel caps it at `net.core.somaxconn`. It is Linux's
/// default of that setting since 5.4.
pub const BACKLOG: i32 = 4096;
/// Timeout of a TCP connect (ztunnel's value).
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Keepalive of connections: idle time before the first probe, interval of the probes, and number
/// of unanswered probes (ztunnel's values).
pub const KEEPALIVE: (Duration, Duration, u32) =
    (Duration::from_secs(180), Duration::from_secs(180), 9);
/// Keepalive of connections whose peer is a socket of this kernel. Only a probe detects a peer that
/// has closed with bytes unread, or whose FIN waits behind unread bytes. No network in between can
/// lose the answers. A dead peer is found after 60 s.
pub const LOCAL_KEEPALIVE: (Duration, Duration, u32) =
    (Duration::from_secs(30), Duration::from_secs(10), 3);

/// A system call that failed. The message names the call, the object and the fix.
#[derive(Debug, thiserror::Error)]
pub enum SysError {
    /// The namespace's file is missing or is not a network namespace.
    #[error(
        "network namespace {path}: {source}; fix: check that the pod exists and that the path is below /run/netns"
    )]
    Netns { path: PathBuf, source: io::Error },
    /// The thread could not enter the namespace.
    #[error("entering network namespace {path}: {source}; fix: give the process CAP_SYS_ADMIN")]
    Enter { path: PathBuf, source: io::Error },
    /// A call on the socket was refused, for example a socket option.
    #[error("{what} for {address}: {source}{}", hint(.what, .source))]
    Socket {
        what: &'static str,
        address: SocketAddr,
        source: io::Error,
    },
    /// The connection was not established within [`CONNECT_TIMEOUT`] or the caller's own limit.
    #[error(
        "connect to {address}: no answer within {limit:?}; fix: check that the host is up and that no network policy drops the port"
    )]
    Timeout {
        address: SocketAddr,
        limit: Duration,
    },
    /// All source ports that were tried are in use towards the address.
    #[error(
        "connect to {address} from {source_ip}: {tried} source ports tried, all in use; fix: close idle connections, or add endpoints"
    )]
    SourcePorts {
        address: SocketAddr,
        source_ip: IpAddr,
        tried: usize,
    },
}

fn hint(what: &str, source: &io::Error) -> &'static str {
    match (what, source.kind()) {
        ("SO_MARK" | "IP_FREEBIND" | "IP_TRANSPARENT", io::ErrorKind::PermissionDenied) => {
            "; fix: give the process CAP_NET_ADMIN"
        }
        ("bind", io::ErrorKind::AddrInUse) => {
            "; another process listens there; fix: stop it, or configure another address"
        }
        ("bind", io::ErrorKind::AddrNotAvailable) => {
            "; the address is not local in this namespace; fix: configure one of its own addresses"
        }
        ("connect", io::ErrorKind::AddrNotAvailable) => {
            "; all source ports to the address are in use; fix: widen net.ipv4.ip_local_port_range, or add endpoints"
        }
        ("socket", _) if source.raw_os_error() == Some(libc::EMFILE) => {
            "; the process has reached its limit of open files; fix: raise it (ulimit -n, LimitNOFILE)"
        }
        _ => "",
    }
}

impl SysError {
    /// Returns the resource that this host lacks, if that is the cause. The peer is then not at
    /// fault.
    pub fn exhausted_resource(&self) -> Option<&'static str> {
        let (what, source) = match self {
            SysError::Socket { what, source, .. } => (what, source),
            SysError::SourcePorts { .. } => return Some("source_ports"),
            _ => return None,
        };
        match (*what, source.raw_os_error()?) {
            ("connect", libc::EADDRNOTAVAIL) => Some("source_ports"),
            (_, libc::EMFILE | libc::ENFILE) => Some("open_files"),
            (_, libc::ENOBUFS | libc::ENOMEM) => Some("memory"),
            _ => None,
        }
    }
}

/// Identifies a network namespace for as long as it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NetnsId {
    device: u64,
    inode: u64,
}

/// An open network namespace. It stays alive while this value exists.
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
    ///
    /// # Errors
    /// `path` is missing or cannot be opened.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, SysError> {
        let path = path.as_ref().to_path_buf();
        let open = || -> io::Result<(OwnedFd, NetnsId)> {
            let fd = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            let stat = rustix::fs::fstat(&fd)?;
            Ok((
                fd,
                NetnsId {
                    device: stat.st_dev,
                    inode: stat.st_ino,
                },
            ))
        };
        match open() {
            Ok((fd, id)) => Ok(Self { fd, id, path }),
            Err(source) => Err(SysError::Netns { path, source }),
        }
    }

    /// Opens the calling thread's namespace.
    ///
    /// # Errors
    /// `/proc` cannot be read, or no file descriptor is free.
    pub fn current() -> Result<Self, SysError> {
        Self::open("/proc/thread-self/ns/net")
    }

    /// Returns the identity of the namespace, which is equal for every path that leads to it.
    pub fn id(&self) -> NetnsId {
        self.id
    }

    /// Returns the path from which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `work` with the calling thread inside the namespace, and returns to the thread's own
    /// namespace, even if `work` panics.
    ///
    /// The process aborts if the thread cannot return: a proxy thread in the wrong namespace would
    /// send one tenant's traffic from another tenant's address. `work` must not await. Sockets that
    /// it opens stay in the namespace for life.
    ///
    /// # Errors
    /// The thread cannot enter the namespace.
    pub fn enter<T>(&self, work: impl FnOnce() -> T) -> Result<T, SysError> {
        let refused = |source: io::Error| SysError::Enter {
            path: self.path.clone(),
            source,
        };
        let _way_back = NetnsReturnGuard(Some(HomeNetns::of_this_thread().map_err(refused)?));
        rustix::thread::move_into_link_name_space(
            self.fd.as_fd(),
            Some(LinkNameSpaceType::Network),
        )
        .map_err(|e| refused(e.into()))?;
        Ok(work())
    }
}

thread_local! {
    /// Home namespace of a pinned thread, while no visit is in progress.
    static HOME: Cell<Option<HomeNetns>> = const { Cell::new(None) };
}

/// The network namespace to which a thread returns after a visit.
struct HomeNetns {
    fd: OwnedFd,
    /// The thread is pinned there, see [`pin_home_netns`].
    settled: bool,
}

impl HomeNetns {
    /// A pinned thread reuses its handle, because opening it takes as long as the rest of a visit.
    /// Another thread may be in any namespace.
    fn of_this_thread() -> io::Result<Self> {
        if let Some(home) = HOME.take() {
            return Ok(home);
        }
        let fd = rustix::fs::open(
            "/proc/thread-self/ns/net",
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(Self { fd, settled: false })
    }
}

/// Moves the thread back when it is dropped. A nested visit returns to the namespace in which it
/// began.
struct NetnsReturnGuard(Option<HomeNetns>);

impl Drop for NetnsReturnGuard {
    fn drop(&mut self) {
        let Some(home) = self.0.take() else { return };
        if rustix::thread::move_into_link_name_space(
            home.fd.as_fd(),
            Some(LinkNameSpaceType::Network),
        )
        .is_err()
        {
            std::process::abort();
        }
        if home.settled {
            HOME.set(Some(home));
        }
    }
}

/// Declares that the calling thread stays in its network namespace, except during [`Netns::enter`],
/// which then costs less.
///
/// # Errors
/// The namespace of the thread cannot be opened.
pub fn pin_home_netns() -> io::Result<()> {
    let here = HomeNetns::of_this_thread()?;
    HOME.set(Some(HomeNetns {
        settled: true,
        ..here
    }));
    Ok(())
}

/// Options of a listener. `Default` is a plain listener with `SO_REUSEADDR`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ListenOptions {
    /// `SO_REUSEPORT`: one listener per worker on the same address.
    pub reuse_port: bool,
    /// `SO_MARK` on the listener, and so on every connection accepted from it.
    pub mark: Option<u32>,
    /// `IP_FREEBIND`: the address need not be local yet.
    pub freebind: bool,
    /// IPv6 only: a listener on `[::]` does not accept IPv4.
    pub v6_only: bool,
    /// A filter drops packets that do not arrive by the loopback device. `SO_BINDTODEVICE` does not
    /// work here: answers to sockets bound to another interface's address could not leave. The
    /// peers are sockets of this kernel, so [`LOCAL_KEEPALIVE`] applies to them.
    pub loopback_only: bool,
}

/// Options of a connection. `Default` adds only keepalive and `TCP_NODELAY`.
#[derive(Debug, Clone, Copy)]
pub struct ConnectOptions {
    /// Source address; the port may be 0.
    pub bind: Option<SocketAddr>,
    /// `SO_MARK`, e.g. `canal_wire::hbone::PROXY_MARK` or a tenant's.
    pub mark: Option<u32>,
    /// Sets `IP_FREEBIND` for the address in `bind`.
    pub freebind: bool,
    /// Preferred source port, where the kernel supports it (Linux 6.3). Unlike a bound port, it can
    /// be shared with sockets that have another peer. A port outside the namespace's
    /// `ip_local_port_range` is not used. A port that is in use towards this peer fails the
    /// connect.
    pub source_port: Option<u16>,
    /// Time limit of the connect.
    pub timeout: Duration,
    /// The peer is a socket of this kernel, so [`LOCAL_KEEPALIVE`] applies.
    pub local: bool,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            bind: None,
            mark: None,
            freebind: false,
            source_port: None,
            timeout: CONNECT_TIMEOUT,
            local: false,
        }
    }
}

/// Source addresses of connections; `None` leaves the choice to the routing table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SourceAddresses {
    pub v4: Option<Ipv4Addr>,
    pub v6: Option<Ipv6Addr>,
}

impl SourceAddresses {
    /// Returns the address to bind to before a connect to `to`. The kernel chooses the port during
    /// the connect.
    pub fn source_for(&self, to: IpAddr) -> Option<SocketAddr> {
        match to.to_canonical() {
            IpAddr::V4(_) => self.v4.map(|own| SocketAddr::new(own.into(), 0)),
            IpAddr::V6(_) => self.v6.map(|own| SocketAddr::new(own.into(), 0)),
        }
    }
}

fn at<T>(what: &'static str, address: SocketAddr, r: io::Result<T>) -> Result<T, SysError> {
    r.map_err(|source| SysError::Socket {
        what,
        address,
        source,
    })
}

fn inside<T>(
    netns: Option<&Netns>,
    work: impl FnOnce() -> Result<T, SysError>,
) -> Result<T, SysError> {
    match netns {
        Some(n) => n.enter(work)?,
        None => work(),
    }
}

fn socket(address: SocketAddr, mark: Option<u32>, freebind: bool) -> Result<Socket, SysError> {
    let s = at(
        "socket",
        address,
        Socket::new(
            Domain::for_address(address),
            Type::STREAM.nonblocking(),
            Some(Protocol::TCP),
        ),
    )?;
    if let Some(mark) = mark {
        at("SO_MARK", address, s.set_mark(mark))?;
    }
    if freebind {
        let set = if address.is_ipv4() {
            s.set_freebind_v4(true)
        } else {
            s.set_freebind_v6(true)
        };
        at("IP_FREEBIND", address, set)?;
    }
    Ok(s)
}

fn bound(address: SocketAddr, options: &ListenOptions) -> Result<Socket, SysError> {
    let s = socket(address, options.mark, options.freebind)?;
    at("SO_REUSEADDR", address, s.set_reuse_address(true))?;
    if options.reuse_port {
        at("SO_REUSEPORT", address, s.set_reuse_port(true))?;
    }
    if address.is_ipv6() {
        at("IPV6_V6ONLY", address, s.set_only_v6(options.v6_only))?;
    }
    if options.loopback_only {
        at("SO_ATTACH_FILTER", address, filter_loopback(&s))?;
    }
    // Accepted connections inherit these options from the listener, which saves five system calls
    // per connection.
    let keepalive = if options.loopback_only {
        LOCAL_KEEPALIVE
    } else {
        KEEPALIVE
    };
    at(
        "keepalive",
        address,
        tune_socket(SockRef::from(&s), keepalive),
    )?;
    at("bind", address, s.bind(&address.into()))?;
    Ok(s)
}

/// Opens a TCP listener at `address`, in `netns` if given, registered with the calling tokio
/// runtime.
///
/// # Errors
/// The thread cannot enter `netns`, or a call on the socket fails.
pub fn listen(
    netns: Option<&Netns>,
    address: SocketAddr,
    options: &ListenOptions,
) -> Result<TcpListener, SysError> {
    let s = inside(netns, || {
        let s = bound(address, options)?;
        at("listen", address, s.listen(BACKLOG))?;
        Ok(s)
    })?;
    at("register", address, TcpListener::from_std(s.into()))
}

/// An address that is bound but not listened on. Other sockets with `SO_REUSEPORT` may listen
/// there. This socket gets none of their connections, which would be reset when it is dropped.
#[derive(Debug)]
pub struct ReservedAddress {
    _socket: Socket,
    /// The bound address, with the port that the kernel chose if the requested port was 0.
    pub address: SocketAddr,
}

/// Reserves `address` for later listeners, which need the same options.
///
/// # Errors
/// Another listener uses the address exclusively, or a call on the socket fails.
pub fn reserve_address(
    address: SocketAddr,
    options: &ListenOptions,
) -> Result<ReservedAddress, SysError> {
    let socket = bound(address, options)?;
    let own = at("getsockname", address, socket.local_addr())?;
    Ok(ReservedAddress {
        _socket: socket,
        address: own.as_socket().unwrap_or(address),
    })
}

/// Connects to `address`, in `netns` if given, with `TCP_NODELAY` and keepalive set.
///
/// The socket is created and the connect started inside the namespace without awaiting. Only the
/// wait for the peer's answer awaits.
///
/// # Errors
/// The thread cannot enter `netns`, a call on the socket fails, or the peer refuses or does not
/// answer in time.
pub async fn connect(
    netns: Option<&Netns>,
    address: SocketAddr,
    options: &ConnectOptions,
) -> Result<TcpStream, SysError> {
    let s = inside(netns, || {
        let s = socket(address, options.mark, options.freebind)?;
        if let Some(source) = options.bind {
            if source.port() == 0 {
                at("IP_BIND_ADDRESS_NO_PORT", source, port_at_connect(&s))?;
            }
            at("bind", source, s.bind(&source.into()))?;
        }
        if let Some(port) = options.source_port {
            at("IP_LOCAL_PORT_RANGE", address, limit_port_range(&s, port))?;
        }
        if options.local {
            at("keepalive", address, tune_local(SockRef::from(&s)))?;
        } else {
            at(
                "keepalive",
                address,
                tune_socket(SockRef::from(&s), KEEPALIVE),
            )?;
        }
        match s.connect(&address.into()) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(source) => {
                return Err(SysError::Socket {
                    what: "connect",
                    address,
                    source,
                });
            }
        }
        Ok(s)
    })?;
    established(s, address, options.timeout).await
}

/// Waits for the result of a connect that was started.
async fn established(
    s: Socket,
    address: SocketAddr,
    limit: Duration,
) -> Result<TcpStream, SysError> {
    // Within one kernel the peer has usually answered by now, although the connect returned
    // `EINPROGRESS`.
    let is_connected = s.peer_addr().is_ok();
    let stream = at("register", address, TcpStream::from_std(s.into()))?;
    if is_connected {
        return Ok(stream);
    }
    match tokio::time::timeout(limit, stream.writable()).await {
        Ok(ready) => at("connect", address, ready)?,
        Err(_) => return Err(SysError::Timeout { address, limit }),
    }
    if let Some(source) = at("connect", address, stream.take_error())? {
        return Err(SysError::Socket {
            what: "connect",
            address,
            source,
        });
    }
    Ok(stream)
}

fn set_option(
    socket: &impl AsRawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: &[u8],
) -> io::Result<()> {
    let length = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    // SAFETY: the fd is open for the borrow's life; the kernel reads `length` bytes from `value`,
    // which has that many.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            value.as_ptr().cast(),
            length,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// From linux/tcp.h: `recvmsg` reports the number of bytes left to read, and 1 if only the end is
/// left.
const TCP_INQ: libc::c_int = 36;

/// Leaves urgent bytes in line, because a normal read would skip them. Also makes [`receive`] learn
/// how many bytes it leaves.
fn keep_urgent(s: SockRef<'_>) -> io::Result<()> {
    s.set_out_of_band_inline(true)?;
    set_option(&*s, libc::SOL_TCP, TCP_INQ, &1i32.to_ne_bytes())
}

/// Reads into the spare capacity of `buffer`. Returns the number of bytes, and whether more bytes
/// or the end follow. A short read does not show that, because a read stops before an urgent byte.
/// For a socket that this module did not open, a full read is the only sign of more.
///
/// # Errors
/// The read fails, also with `WouldBlock`.
pub fn receive(stream: &TcpStream, buffer: &mut BytesMut) -> io::Result<(usize, bool)> {
    let free = buffer.spare_capacity_mut();
    let size = free.len();
    let (got, left) = receive_message(stream, free, (libc::SOL_TCP, TCP_INQ))?;
    // SAFETY: the kernel wrote the first `got` bytes of `free`.
    unsafe { buffer.set_len(buffer.len() + got) };
    Ok((
        got,
        left.map_or(got == size, |left| i32::from_ne_bytes(left) > 0),
    ))
}

/// Calls `recvmsg` once. Returns the number of bytes that the kernel wrote to the front of `free`.
/// Also returns the value of the control message of this level and type, if present. The value has
/// `N` bytes, at most 16.
fn receive_message<const N: usize>(
    stream: &TcpStream,
    free: &mut [MaybeUninit<u8>],
    (level, kind): (libc::c_int, libc::c_int),
) -> io::Result<(usize, Option<[u8; N]>)> {
    let mut control: OneControl = [0; 4];
    let mut part = libc::iovec {
        iov_base: free.as_mut_ptr().cast(),
        iov_len: free.len(),
    };
    // SAFETY: the structure consists of integers and pointers, all of which may be zero.
    let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
    (head.msg_iov, head.msg_iovlen) = (&raw mut part, 1);
    (head.msg_control, head.msg_controllen) = ((&raw mut control).cast(), size_of::<OneControl>());
    // SAFETY: the fd is open for the borrow's life; `head` points to `part` and `control`, which
    // live on, and `part` to `free`, with its length.
    let rc = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut head, 0) };
    let Ok(got) = usize::try_from(rc) else {
        return Err(io::Error::last_os_error());
    };
    // SAFETY: `head` is as the kernel left it, its pointers are valid, and a control message that
    // is long enough has `N` initialized bytes.
    let control = unsafe {
        let control = libc::CMSG_FIRSTHDR(&raw const head);
        let is_requested = !control.is_null()
            && ((*control).cmsg_level, (*control).cmsg_type) == (level, kind)
            && (*control).cmsg_len as usize >= libc::CMSG_LEN(N as u32) as usize;
        is_requested.then(|| libc::CMSG_DATA(control).cast::<[u8; N]>().read_unaligned())
    };
    Ok((got, control))
}

/// Drops packets that do not arrive by interface 1, the loopback device of every namespace. Not
/// even a handshake begins.
fn filter_loopback(socket: &impl AsRawFd) -> io::Result<()> {
    // linux/filter.h: load the word at SKF_AD_OFF + SKF_AD_IFINDEX, compare it, return how much of
    // the packet to accept.
    let instruction = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        instruction(0x20, 0, 0, 0xffff_f008),
        instruction(0x15, 0, 1, 1),
        instruction(0x06, 0, 0, u32::MAX),
        instruction(0x06, 0, 0, 0),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    let length = size_of::<libc::sock_fprog>() as libc::socklen_t;
    // SAFETY: the fd is open for the borrow's life; the kernel reads the structure and the
    // instructions it points to, which outlive the call.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            std::ptr::from_ref(&program).cast(),
            length,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Reads a socket option into the front of `value` and returns its length.
fn get_option(
    socket: &impl AsRawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: &mut [u8],
) -> io::Result<usize> {
    let mut length = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    // SAFETY: the fd is open for the borrow's life; the kernel writes at most `length` bytes to
    // `value`, which has that many.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            name,
            value.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if rc == 0 {
        Ok(length as usize)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Buffer for one control message of up to 16 bytes, aligned like its header.
type OneControl = [u64; 4];

/// State of a TCP connection that is closed (include/net/tcp_states.h).
const TCP_CLOSE: u8 = 7;

fn tcp_info(stream: &TcpStream) -> io::Result<libc::tcp_info> {
    let mut bytes = [0; size_of::<libc::tcp_info>()];
    get_option(stream, libc::SOL_TCP, libc::TCP_INFO, &mut bytes)?;
    // SAFETY: the structure consists of integers, for which all bytes are valid; the array is as
    // long as the structure.
    Ok(unsafe { bytes.as_ptr().cast::<libc::tcp_info>().read_unaligned() })
}

/// Returns the bytes that the peer's kernel has acknowledged, on a connection that this side
/// opened.
///
/// # Errors
/// The kernel refuses `TCP_INFO`.
pub fn tcp_acknowledged(stream: &TcpStream) -> io::Result<u64> {
    // The SYN counts as one byte.
    Ok(tcp_info(stream)?.tcpi_bytes_acked.saturating_sub(1))
}

/// Returns whether the peer's kernel has acknowledged all written bytes; also true once the
/// connection is closed.
///
/// # Errors
/// The kernel refuses `TCP_INFO`.
pub fn tcp_is_delivered(stream: &TcpStream) -> io::Result<bool> {
    let info = tcp_info(stream)?;
    Ok(info.tcpi_state == TCP_CLOSE || (info.tcpi_notsent_bytes == 0 && info.tcpi_unacked == 0))
}

/// Returns whether the connection is closed: the peer has reset it, or it was given up. Bytes that
/// came before may still be unread.
///
/// # Errors
/// The kernel refuses `TCP_INFO`.
pub fn tcp_is_closed(stream: &TcpStream) -> io::Result<bool> {
    Ok(tcp_info(stream)?.tcpi_state == TCP_CLOSE)
}

/// Returns the bytes passed to TCP so far, without those that kernel TLS still buffers; `None` once
/// the connection is closed.
///
/// # Errors
/// The kernel refuses `TCP_INFO`.
pub fn tcp_bytes_queued(stream: &TcpStream) -> io::Result<Option<u64>> {
    let info = tcp_info(stream)?;
    let given = info.tcpi_bytes_sent.saturating_sub(info.tcpi_bytes_retrans)
        + u64::from(info.tcpi_notsent_bytes);
    Ok((info.tcpi_state != TCP_CLOSE).then_some(given))
}

/// Unsent bytes that the kernel accepts for a connection (`TCP_NOTSENT_LOWAT`). Without it the
/// kernel would buffer up to 4 MiB for a peer that stalls after it was fast. As much as a stream of
/// HBONE buffers (`canal_wire::hbone::CLIENT_SEND_BUFFER`).
pub const UNSENT_BYTES_MAX: u32 = 256 << 10;

/// Sets `TCP_NODELAY`, [`UNSENT_BYTES_MAX`] and [`KEEPALIVE`]. Connections accepted from a listener
/// of [`listen`] have them already.
///
/// # Errors
/// The kernel refuses an option.
pub fn tune(stream: &TcpStream) -> io::Result<()> {
    tune_socket(SockRef::from(stream), KEEPALIVE)
}

fn tune_socket(s: SockRef<'_>, keepalive: (Duration, Duration, u32)) -> io::Result<()> {
    s.set_tcp_nodelay(true)?;
    keep_urgent(SockRef::from(&*s))?;
    s.set_tcp_notsent_lowat(UNSENT_BYTES_MAX)?;
    keep_alive(&s, keepalive)
}

/// Sets the options of a connection to a socket of this kernel.
fn tune_local(s: SockRef<'_>) -> io::Result<()> {
    s.set_tcp_nodelay(true)?;
    keep_urgent(SockRef::from(&*s))?;
    keep_alive(&s, LOCAL_KEEPALIVE)
}

fn keep_alive(s: &Socket, (time, interval, retries): (Duration, Duration, u32)) -> io::Result<()> {
    s.set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(time)
            .with_interval(interval)
            .with_retries(retries),
    )
}

/// While the guard lives, bytes that arrive on the connection wake no task. They stay in the kernel
/// and are reported after the drop.
#[derive(Debug)]
pub struct ReadWakeupGuard<'a>(&'a TcpStream);

impl<'a> ReadWakeupGuard<'a> {
    /// Sets `SO_RCVLOWAT`, which takes one short call each way, unlike removal from the poll set.
    /// `None` if the kernel refuses it.
    pub fn to(stream: &'a TcpStream) -> Option<Self> {
        set_option(
            stream,
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            &DEAF_BYTES.to_ne_bytes(),
        )
        .ok()
        .map(|()| Self(stream))
    }
}

impl Drop for ReadWakeupGuard<'_> {
    fn drop(&mut self) {
        // This succeeds wherever the first call did.
        let _ = set_option(
            self.0,
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            &1i32.to_ne_bytes(),
        );
    }
}

/// Bytes that wake the task in spite of the guard: less than any connection's receive buffer, which
/// would otherwise fill unnoticed. Linux's default buffer has 128 KiB (`net.ipv4.tcp_rmem`).
const DEAF_BYTES: i32 = 32 << 10;

/// Makes the next close of `stream` a reset (RST) instead of an orderly end (FIN). A proxy passes a
/// reset on in this way.
pub fn reset_on_close(stream: &TcpStream) {
    // Best effort: the socket may be closed already, which is the goal.
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// Returns the original destination of a connection that netfilter redirected (`SO_ORIGINAL_DST`,
/// `IP6T_SO_ORIGINAL_DST`).
///
/// # Errors
/// The connection was not redirected, or it is closed.
pub fn original_destination(stream: &TcpStream) -> io::Result<SocketAddr> {
    let v4 = match stream.local_addr()?.ip() {
        IpAddr::V4(_) => true,
        IpAddr::V6(a) => a.to_ipv4_mapped().is_some(),
    };
    let s = SockRef::from(stream);
    let addr = if v4 {
        s.original_dst_v4()?
    } else {
        s.original_dst_v6()?
    };
    addr.as_socket().ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "the kernel returned an address that is not IP",
        )
    })
}

/// Leaves the choice of the source port to the connect. A bind would take a port that no other
/// connection from this address may have, whatever its destination. With one source address, 28,000
/// connections would use all ports of the host.
fn port_at_connect(socket: &Socket) -> io::Result<()> {
    let on: libc::c_int = 1;
    set_option(
        socket,
        libc::IPPROTO_IP,
        libc::IP_BIND_ADDRESS_NO_PORT,
        &on.to_ne_bytes(),
    )
}

/// Limits the kernel's choice of the source port at the connect to one port.
fn limit_port_range(socket: &Socket, port: u16) -> io::Result<()> {
    // From linux/uapi/linux/in.h: the two halves are the low and the high end of the range.
    const IP_LOCAL_PORT_RANGE: libc::c_int = 51;
    let range = u32::from(port) << 16 | u32::from(port);
    set_option(
        socket,
        libc::IPPROTO_IP,
        IP_LOCAL_PORT_RANGE,
        &range.to_ne_bytes(),
    )
}

/// Returns the cookie of the socket's network namespace (`SO_NETNS_COOKIE`), the same number as
/// BPF's `bpf_get_netns_cookie`.
///
/// # Errors
/// The kernel has no such option.
pub fn netns_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    // From linux/uapi/asm-generic/socket.h; the libc crate lacks it on some targets.
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let mut cookie = 0u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the fd is open for the borrow's life; the kernel writes at most `len` = 8 bytes to
    // `cookie`, which is 8 bytes long.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    if rc == 0 {
        Ok(cookie)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns the socket's cookie (`SO_COOKIE`), unique until the host restarts; the same number as
/// BPF's `bpf_get_socket_cookie`.
///
/// # Errors
/// The kernel refuses the option.
pub fn socket_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(rustix::net::sockopt::socket_cookie(socket)?)
}

/// Returns the monotonic clock in nanoseconds, for use at every poll of a task: half the
/// instructions of two `Instant`s and their difference.
#[inline]
#[must_use]
pub fn monotonic_nanos() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is writable; CLOCK_MONOTONIC always exists on Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec
        .unsigned_abs()
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec.unsigned_abs())
}

/// Returns the cores that this process may run on, ascending.
pub fn cores() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else {
        return vec![0];
    };
    (0..CpuSet::MAX_CPU).filter(|c| set.is_set(*c)).collect()
}

/// Pins the calling thread to `core`.
///
/// # Errors
/// The core does not exist, or this process may not use it.
pub fn pin_thread(core: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    if core >= CpuSet::MAX_CPU {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("core {core} is above {}", CpuSet::MAX_CPU - 1),
        ));
    }
    set.set(core);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests;

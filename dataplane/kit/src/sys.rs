//! Sockets with the options a proxy needs, opened in the namespace they belong to; kernel TLS' calls; thread pinning; cookies; a clock.
//! Nothing is decided here about what is read or written. The only module of the crate with `unsafe`.

use std::cell::Cell;
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
use tokio::io::ReadBuf;
use tokio::net::{TcpListener, TcpStream};
use zeroize::Zeroizing;

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
    /// The unix socket for operators cannot be made.
    #[error("admin socket {}: {source}; fix: give the process a --data-dir that it can write", .path.display())]
    AdminSocket { path: PathBuf, source: io::Error },
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
        let refused = |source: io::Error| SysError::Enter { path: self.path.clone(), source };
        let _way_back = WayBack(Some(Home::of_this_thread().map_err(refused)?));
        rustix::thread::move_into_link_name_space(self.fd.as_fd(), Some(LinkNameSpaceType::Network)).map_err(|e| refused(e.into()))?;
        Ok(work())
    }
}

thread_local! {
    /// Of a thread that has settled, while it is at home.
    static HOME: Cell<Option<Home>> = const { Cell::new(None) };
}

/// The network namespace that a thread comes from.
struct Home {
    fd: OwnedFd,
    /// The thread has settled there.
    settled: bool,
}

impl Home {
    /// Who has settled need not look, which takes as long as the rest of a visit; a thread of a runtime's pool may be anywhere.
    fn of_this_thread() -> io::Result<Self> {
        if let Some(home) = HOME.take() {
            return Ok(home);
        }
        let fd = rustix::fs::open("/proc/thread-self/ns/net", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { fd, settled: false })
    }
}

/// Leads home when dropped. Visits inside visits lead to the one that they began in.
struct WayBack(Option<Home>);

impl Drop for WayBack {
    fn drop(&mut self) {
        let Some(home) = self.0.take() else { return };
        if rustix::thread::move_into_link_name_space(home.fd.as_fd(), Some(LinkNameSpaceType::Network)).is_err() {
            std::process::abort();
        }
        if home.settled {
            HOME.set(Some(home));
        }
    }
}

/// Says that the calling thread is in its network namespace for life, but for [`Netns::enter`], which then costs less.
pub fn settle() -> io::Result<()> {
    let here = Home::of_this_thread()?;
    HOME.set(Some(Home { settled: true, ..here }));
    Ok(())
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
    /// The peer is a socket of this kernel: no network between can fall silent, so there is no keepalive.
    pub local: bool,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { bind: None, mark: None, freebind: false, timeout: CONNECT_TIMEOUT, local: false }
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
    let s = at("socket", address, Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP)))?;
    if let Some(mark) = mark {
        at("SO_MARK", address, s.set_mark(mark))?;
    }
    if freebind {
        let set = if address.is_ipv4() { s.set_freebind_v4(true) } else { s.set_freebind_v6(true) };
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
    // Every accepted connection has what its listener has; said once here, it costs no connection five calls of the kernel.
    at("keepalive", address, tune_socket(SockRef::from(&s)))?;
    at("bind", address, s.bind(&address.into()))?;
    Ok(s)
}

/// Opens a TCP listener at `address`, in `netns` if given, registered with the calling tokio runtime.
pub fn listen(netns: Option<&Netns>, address: SocketAddr, options: &ListenOptions) -> Result<TcpListener, SysError> {
    let s = inside(netns, || {
        let s = bound(address, options)?;
        at("listen", address, s.listen(BACKLOG))?;
        Ok(s)
    })?;
    at("register", address, TcpListener::from_std(s.into()))
}

/// An address that is taken and not listened at: others with `SO_REUSEPORT` may listen there, and none of their connections come here,
/// to be reset when this is dropped.
#[derive(Debug)]
pub struct Held {
    _socket: Socket,
    /// With the port that the kernel chose, if 0 was asked for.
    pub address: SocketAddr,
}

/// Takes `address` for listeners to come, which need the same options. Fails where another listens alone already.
pub fn hold(address: SocketAddr, options: &ListenOptions) -> Result<Held, SysError> {
    let socket = bound(address, options)?;
    let own = at("getsockname", address, socket.local_addr())?;
    Ok(Held { _socket: socket, address: own.as_socket().unwrap_or(address) })
}

/// Connects to `address`, in `netns` if given, with `TCP_NODELAY` and, unless it is local, keepalive set.
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
        if options.local {
            at("TCP_NODELAY", address, s.set_tcp_nodelay(true))?;
        } else {
            at("keepalive", address, tune_socket(SockRef::from(&s)))?;
        }
        match s.connect(&address.into()) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(source) => return Err(SysError::Socket { what: "connect", address, source }),
        }
        Ok(s)
    })?;
    // Within one kernel the peer has answered by now, as a rule, although the call says that it goes on.
    let is_connected = s.peer_addr().is_ok();
    let stream = at("register", address, TcpStream::from_std(s.into()))?;
    if is_connected {
        return Ok(stream);
    }
    match tokio::time::timeout(options.timeout, stream.writable()).await {
        Ok(ready) => at("connect", address, ready)?,
        Err(_) => return Err(SysError::Timeout { address, limit: options.timeout }),
    }
    if let Some(source) = at("connect", address, stream.take_error())? {
        return Err(SysError::Socket { what: "connect", address, source });
    }
    Ok(stream)
}

/// Whether the kernel can seal and open TLS records itself (`TCP_ULP` "tls"). It says so before it looks at the connection, so one that is
/// not connected will do. The error is the probe's own.
pub fn kernel_tls() -> io::Result<bool> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    match set_option(&socket, libc::SOL_TCP, libc::TCP_ULP, TLS_ULP) {
        Ok(()) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOTCONN) => Ok(true),
            Some(libc::ENOENT | libc::ENOPROTOOPT) => Ok(false),
            _ => Err(error),
        },
    }
}

const TLS_ULP: &[u8] = b"tls";
// linux/tls.h; the libc crate has none of these.
const TLS_TX: libc::c_int = 1;
const TLS_RX: libc::c_int = 2;
const TLS_SET_RECORD_TYPE: libc::c_int = 1;
const TLS_GET_RECORD_TYPE: libc::c_int = 2;
const TLS_1_3: u16 = 0x0304;
const TLS_AES_GCM_128: u16 = 51;
const TLS_AES_GCM_256: u16 = 52;
/// `struct tls12_crypto_info_aes_gcm_256`, the longer one.
const TLS_KEYS_MAX: usize = 56;

fn set_option(socket: &impl AsRawFd, level: libc::c_int, name: libc::c_int, value: &[u8]) -> io::Result<()> {
    let length = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    // SAFETY: the fd is open for the borrow's life; the kernel reads `length` bytes from `value`, which has so many.
    let rc = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), length) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Fills the front of `value`; how much of it.
fn get_option(socket: &impl AsRawFd, level: libc::c_int, name: libc::c_int, value: &mut [u8]) -> io::Result<usize> {
    let mut length = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    // SAFETY: the fd is open for the borrow's life; the kernel writes at most `length` bytes to `value`, which has so many.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, value.as_mut_ptr().cast(), &raw mut length) };
    if rc == 0 { Ok(length as usize) } else { Err(io::Error::last_os_error()) }
}

/// Which records of a connection, as this end sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsWay {
    Out,
    In,
}

impl TlsWay {
    fn name(self) -> libc::c_int {
        match self {
            TlsWay::Out => TLS_TX,
            TlsWay::In => TLS_RX,
        }
    }
}

/// With what the kernel seals or opens the records of one direction: TLS 1.3, AES-GCM. Laid out as linux/tls.h has it, wiped when dropped.
pub struct TlsKeys {
    bytes: Zeroizing<[u8; TLS_KEYS_MAX]>,
    length: usize,
}

impl TlsKeys {
    /// `sequence` is the next record's. `None` if the key is not as long as one of AES-128 or AES-256.
    pub fn new(key: &[u8], iv: &[u8; 12], sequence: u64) -> Option<Self> {
        let cipher = match key.len() {
            16 => TLS_AES_GCM_128,
            32 => TLS_AES_GCM_256,
            _ => return None,
        };
        let mut bytes = Zeroizing::new([0; TLS_KEYS_MAX]);
        let mut length = 0;
        // The IV's first four bytes are the kernel's salt.
        for part in [&TLS_1_3.to_ne_bytes()[..], &cipher.to_ne_bytes(), &iv[4..], key, &iv[..4], &sequence.to_be_bytes()] {
            bytes[length..length + part.len()].copy_from_slice(part);
            length += part.len();
        }
        Some(Self { bytes, length })
    }
}

/// Gives the connection to kernel TLS. Until keys are given too, its bytes go as they did.
pub fn tls_attach(stream: &TcpStream) -> io::Result<()> {
    set_option(stream, libc::SOL_TCP, libc::TCP_ULP, TLS_ULP)
}

/// From here on the kernel seals what is written, or opens what is read; there is no way back. A second time only on Linux 6.14 and later.
pub fn tls_keys(stream: &TcpStream, way: TlsWay, keys: &TlsKeys) -> io::Result<()> {
    set_option(stream, libc::SOL_TLS, way.name(), &keys.bytes[..keys.length])
}

/// How many records the kernel sealed or opened under the present keys, which are those of AES-`bits`.
pub fn tls_records(stream: &TcpStream, way: TlsWay, bits: usize) -> io::Result<u64> {
    let mut bytes = Zeroizing::new([0; TLS_KEYS_MAX]);
    let length = get_option(stream, libc::SOL_TLS, way.name(), &mut bytes[..TLS_KEYS_MAX - 32 + bits / 8])?;
    let number = bytes[..length].last_chunk().ok_or(io::ErrorKind::InvalidData)?;
    Ok(u64::from_be_bytes(*number))
}

/// Room for one control message of a byte, aligned as its header.
type OneControl = [u64; 4];

/// Reads of one or more records of the same kind, no further than `buf` has room. How many bytes were put behind what is filled, which are
/// initialized but not yet filled in, and the records' kind: none at the transport's end.
pub fn tls_receive(stream: &TcpStream, buf: &mut ReadBuf<'_>) -> io::Result<(usize, Option<u8>)> {
    let mut control: OneControl = [0; 4];
    // SAFETY: what is uninitialized in the room is only written to, by the kernel.
    let room = unsafe { buf.unfilled_mut() };
    let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    // SAFETY: of integers and pointers, all of which may be zero.
    let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
    (head.msg_iov, head.msg_iovlen) = (&raw mut part, 1);
    (head.msg_control, head.msg_controllen) = ((&raw mut control).cast(), size_of::<OneControl>());
    // SAFETY: the fd is open for the borrow's life; `head` points to `part` and `control`, which live on, and `part` to `room`, with its length.
    let rc = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut head, 0) };
    let Ok(got) = usize::try_from(rc) else { return Err(io::Error::last_os_error()) };
    // SAFETY: the kernel wrote the first `got` bytes of the room.
    unsafe { buf.assume_init(got) };
    // SAFETY: `head` is as the kernel left it, and what it points to lives; a control message that says it is of this kind has a byte.
    let kind = unsafe {
        let said = libc::CMSG_FIRSTHDR(&raw const head);
        let is = !said.is_null() && (*said).cmsg_level == libc::SOL_TLS && (*said).cmsg_type == TLS_GET_RECORD_TYPE;
        is.then(|| *libc::CMSG_DATA(said))
    };
    Ok((got, kind))
}

/// Sends one record of `kind`, all of it or nothing.
pub fn tls_send(stream: &TcpStream, kind: u8, content: &[u8]) -> io::Result<()> {
    let mut control: OneControl = [0; 4];
    let mut part = libc::iovec { iov_base: content.as_ptr().cast_mut().cast(), iov_len: content.len() };
    // SAFETY: of integers and pointers, all of which may be zero.
    let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
    (head.msg_iov, head.msg_iovlen) = (&raw mut part, 1);
    // SAFETY: pure arithmetic.
    (head.msg_control, head.msg_controllen) = ((&raw mut control).cast(), unsafe { libc::CMSG_SPACE(1) } as usize);
    // SAFETY: `control` has room for a header and a byte, and is aligned for a header. The kernel only reads `content`, whose length `part` has.
    let rc = unsafe {
        let say = libc::CMSG_FIRSTHDR(&raw const head);
        ((*say).cmsg_level, (*say).cmsg_type, (*say).cmsg_len) = (libc::SOL_TLS, TLS_SET_RECORD_TYPE, libc::CMSG_LEN(1) as usize);
        *libc::CMSG_DATA(say) = kind;
        libc::sendmsg(stream.as_raw_fd(), &raw const head, libc::MSG_NOSIGNAL)
    };
    match usize::try_from(rc) {
        Ok(sent) if sent == content.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// How many bytes TCP was given so far, sent or not; `None` once the connection is gone. What kernel TLS still holds is not among them.
pub fn tcp_given(stream: &TcpStream) -> io::Result<Option<u64>> {
    // include/net/tcp_states.h
    const TCP_CLOSE: u8 = 7;
    let mut bytes = [0; size_of::<libc::tcp_info>()];
    get_option(stream, libc::SOL_TCP, libc::TCP_INFO, &mut bytes)?;
    // SAFETY: of integers, for which all bytes are good; the array is as long as it.
    let info: libc::tcp_info = unsafe { bytes.as_ptr().cast::<libc::tcp_info>().read_unaligned() };
    let given = info.tcpi_bytes_sent.saturating_sub(info.tcpi_bytes_retrans) + u64::from(info.tcpi_notsent_bytes);
    Ok((info.tcpi_state != TCP_CLOSE).then_some(given))
}

/// Bytes that the kernel takes of a connection before they can be sent (`TCP_NOTSENT_LOWAT`). Without it the kernel would hold up to 4 MiB for
/// a peer that stalls after it was fast.
pub const UNSENT_BYTES_MAX: u32 = 256 << 10;

/// Sets `TCP_NODELAY`, [`UNSENT_BYTES_MAX`] and [`KEEPALIVE`]. Connections that [`listen`]'s listeners accept have all of it already.
pub fn tune(stream: &TcpStream) -> io::Result<()> {
    tune_socket(SockRef::from(stream))
}

fn tune_socket(s: SockRef<'_>) -> io::Result<()> {
    let (time, interval, retries) = KEEPALIVE;
    s.set_tcp_nodelay(true)?;
    s.set_tcp_notsent_lowat(UNSENT_BYTES_MAX)?;
    s.set_tcp_keepalive(&TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(retries))
}

/// While it lives, bytes that come in on a connection wake nobody. They stay in the kernel, and are told of when it goes.
#[derive(Debug)]
pub struct Deaf<'a>(&'a TcpStream);

impl<'a> Deaf<'a> {
    /// `SO_RCVLOWAT`: unlike to take the socket out of the poll set, that is one short call each way. `None` where the kernel does not do it.
    pub fn to(stream: &'a TcpStream) -> Option<Self> {
        set_option(stream, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &DEAF_BYTES.to_ne_bytes()).ok().map(|()| Self(stream))
    }
}

impl Drop for Deaf<'_> {
    fn drop(&mut self) {
        // Fails on no socket on which the first call did not.
        let _ = set_option(self.0, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &1i32.to_ne_bytes());
    }
}

/// So many bytes are told of all the same: less than any connection's receive buffer, which would fill unseen.
const DEAF_BYTES: i32 = 32 << 10;

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
    set_option(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, &on.to_ne_bytes())
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

/// The monotonic clock in nanoseconds, for what is timed at every turn of a task: as one number it takes half the instructions of two `Instant`s
/// and what lies between them.
#[inline]
#[must_use]
pub fn monotonic_nanos() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is writable; CLOCK_MONOTONIC always exists on Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.unsigned_abs().wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec.unsigned_abs())
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

//! Listeners of admin pages: TCP, and a unix socket for what only the process's own user may do. They always accept: a new connection is
//! served, replaces one that asks nothing, or is told 503. A client that does not read is closed.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::Sleep;

use super::access::decide_head;
use super::body::{Body, Streamed, text};
use super::budget::{Activity, Admission, Budget};
use super::{Reach, Routes};
use crate::drain::{Drain, Watcher};
use crate::metrics::{Counters, Family, Registry};
use crate::sys::{self, ListenOptions, SysError};

/// A client that has not sent its request's head by then is dropped.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// A client that reads nothing of an answer for this long is dropped.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// The socket's name in the process's data directory.
pub const SOCKET_NAME: &str = "admin.sock";
/// The longest path that a unix socket can be bound to (`sun_path` of unix(7) without its last zero).
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Connections that wait in the socket's queue.
const SOCKET_BACKLOG: i32 = 64;

/// Where a process serves its operators.
#[derive(Debug, Clone)]
pub struct AdminAddresses {
    /// Pages that change nothing and show nothing of tenants' requests; loopback by default.
    pub admin: SocketAddr,
    /// `/metrics`; an address that only operators reach.
    pub metrics: SocketAddr,
    /// `/healthz/ready`.
    pub readiness: SocketAddr,
    /// The directory that [`SOCKET_NAME`] is made in, where all pages are served.
    pub data_dir: PathBuf,
}

/// Counters of what admin listeners refuse: `canal_admin_refused_total{listener,reason}`.
#[derive(Debug, Clone)]
struct AdminCounters {
    refused: Counters,
    listener: &'static str,
}

impl AdminCounters {
    fn new(registry: &Registry, listener: &'static str) -> Self {
        let help = "Connections and requests that an admin listener refused or ended, by reason.";
        Self { refused: registry.counters(Family::new("canal_admin_refused_total", help, &["listener", "reason"])), listener }
    }

    fn refused(&self, reason: &'static str) {
        self.refused.shared(&[self.listener, reason]).inc();
    }
}

/// Serves `admin` on loopback and on the socket, the metrics of `registry`, and `readiness`, each with connections of its own.
///
/// # Errors
/// An address or the socket's path cannot be listened at.
pub fn serve_all(
    addresses: &AdminAddresses,
    (admin, readiness): (Routes, Routes),
    registry: &Registry,
    drain: &Drain,
) -> Result<(), SysError> {
    let metrics = Routes::new().metrics(registry.clone());
    let socket = bind_socket(&addresses.data_dir).map_err(|source| SysError::AdminSocket { path: socket_path(addresses), source })?;
    tokio::spawn(serve_socket(socket, admin.clone(), registry.clone(), drain.clone()));
    let pages = [("admin", addresses.admin, admin), ("metrics", addresses.metrics, metrics), ("readiness", addresses.readiness, readiness)];
    for (name, address, routes) in pages {
        let listener = sys::listen(None, address, &ListenOptions::default())?;
        tokio::spawn(serve((name, listener), routes, registry.clone(), drain.clone()));
    }
    Ok(())
}

fn socket_path(addresses: &AdminAddresses) -> PathBuf {
    addresses.data_dir.join(SOCKET_NAME)
}

/// A socket in `folder` that only the process's own user can connect to, in place of one that an earlier process left.
fn bind_socket(folder: &Path) -> io::Result<UnixListener> {
    std::fs::create_dir_all(folder)?;
    let opened = std::fs::File::open(folder)?;
    let mut path = folder.join(SOCKET_NAME);
    // This one is short wherever the folder is, but a process that cannot be dumped may not use it.
    if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
        path = PathBuf::from(format!("/proc/self/fd/{}/{SOCKET_NAME}", opened.as_raw_fd()));
    }
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&SockAddr::unix(&path)?)?;
    // Before it listens: until then nobody can connect, whatever the mode.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    socket.listen(SOCKET_BACKLOG)?;
    socket.set_nonblocking(true)?;
    UnixListener::from_std(std::os::unix::net::UnixListener::from(std::os::fd::OwnedFd::from(socket)))
}

/// Serves `routes` on TCP until the drain is forced, without those that are for the socket; operators look on while it drains. The end of the
/// process does not wait for it. The listener's name is the metric label `listener`.
pub async fn serve((name, listener): (&'static str, TcpListener), routes: Routes, registry: Registry, drain: Drain) {
    accept_all(listener, routes, AdminCounters::new(&registry, name), drain).await;
}

/// Serves all of `routes` on a unix socket until the drain is forced, to the process's own user and to root.
pub async fn serve_socket(listener: UnixListener, routes: Routes, registry: Registry, drain: Drain) {
    accept_all(listener, routes, AdminCounters::new(&registry, "socket"), drain).await;
}

/// A listener of either kind.
trait AdminListener {
    type Io: AdminStream;
    fn accept_one(&self) -> impl Future<Output = io::Result<Self::Io>> + Send;
}

impl AdminListener for TcpListener {
    type Io = TcpStream;
    async fn accept_one(&self) -> io::Result<TcpStream> {
        self.accept().await.map(|(tcp, _)| tcp)
    }
}

impl AdminListener for UnixListener {
    type Io = UnixStream;
    async fn accept_one(&self) -> io::Result<UnixStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

async fn accept_all<L: AdminListener>(listener: L, routes: Routes, counters: AdminCounters, drain: Drain) {
    let routes = Arc::new(routes);
    let forced: Watcher = drain.watcher();
    drop(drain);
    let mut budget = Budget::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept_one() => accepted,
            () = forced.forced() => return,
        };
        let io = match accepted {
            Ok(io) => io,
            // Out of files: the next accept would fail at once as well.
            Err(error) => {
                tracing::warn!(%error, "admin accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if !io.is_permitted() {
            counters.refused("user");
            continue;
        }
        match budget.admit() {
            Admission::Room => {}
            Admission::GaveWay => counters.refused("gave_way"),
            Admission::Full => {
                counters.refused("full");
                io.refuse();
                continue;
            }
        }
        let (activity, forced) = (Activity::new(), forced.clone());
        let served = connection(io, routes.clone(), counters.clone(), activity.clone());
        let task = tokio::spawn(async move {
            tokio::select! {
                () = served => {}
                () = forced.forced() => {}
            }
        });
        budget.add(activity, task.abort_handle());
    }
}

/// A connection of either kind.
trait AdminStream: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Which routes it reaches.
    const REACH: Reach;
    /// Whether its peer may ask at all.
    fn is_permitted(&self) -> bool;
    /// Whether it came to a loopback address.
    fn is_loopback(&self) -> bool;
    /// Says 503 without waiting.
    fn refuse(self);
}

const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

impl AdminStream for TcpStream {
    const REACH: Reach = Reach::Anywhere;
    fn is_permitted(&self) -> bool {
        true
    }
    fn is_loopback(&self) -> bool {
        self.local_addr().is_ok_and(|a| a.ip().to_canonical().is_loopback())
    }
    fn refuse(self) {
        // An empty send buffer takes it; if not, the close says enough.
        let _ = self.try_write(BUSY);
    }
}

impl AdminStream for UnixStream {
    const REACH: Reach = Reach::Socket;
    fn is_permitted(&self) -> bool {
        // The socket's mode says the same; this holds if somebody changed it.
        let own = rustix::process::geteuid().as_raw();
        self.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own)
    }
    fn is_loopback(&self) -> bool {
        false
    }
    fn refuse(self) {
        let _ = self.try_write(BUSY);
    }
}

async fn connection<IO: AdminStream>(io: IO, routes: Arc<Routes>, counters: AdminCounters, activity: Arc<Activity>) {
    let is_loopback = io.is_loopback();
    let for_requests = counters.clone();
    let service = service_fn(move |r: Request<hyper::body::Incoming>| {
        activity.record_request();
        let head = if IO::REACH == Reach::Socket { Ok(()) } else { decide_head(r.uri(), r.headers(), is_loopback) };
        let answer = head.map(|()| routes.answer(r.map(drop), IO::REACH));
        let (counters, activity) = (for_requests.clone(), activity.clone());
        async move {
            let response: Response<Body> = match answer {
                Ok(answer) => answer.await,
                Err(refusal) => {
                    counters.refused(refusal.reason());
                    let fix = "only for operators on this host; fix: ask by address or as localhost, without Origin\n";
                    return Ok(text(StatusCode::FORBIDDEN, fix));
                }
            };
            if response.status() == StatusCode::FORBIDDEN {
                counters.refused("socket_only");
            }
            if response.extensions().get::<Streamed>().is_some() {
                activity.record_stream();
            }
            Ok::<Response<Body>, std::convert::Infallible>(response)
        }
    });
    let io = TokioIo::new(TimedWrites { io, stall: None });
    let served = http1::Builder::new().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).serve_connection(io, service);
    if let Err(error) = served.await {
        let stalled = std::error::Error::source(&error).and_then(|e| e.downcast_ref::<io::Error>()).map(io::Error::kind);
        if stalled == Some(io::ErrorKind::TimedOut) {
            counters.refused("write_timeout");
        }
        tracing::debug!(%error, "admin connection");
    }
}

/// A stream whose writes fail when none makes progress for [`WRITE_TIMEOUT`].
struct TimedWrites<IO> {
    io: IO,
    /// Runs while a write waits for the client.
    stall: Option<Pin<Box<Sleep>>>,
}

impl<IO: Unpin> TimedWrites<IO> {
    fn timed<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(Pin<&mut IO>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if let Poll::Ready(done) = poll(Pin::new(&mut self.io), cx) {
            self.stall = None;
            return Poll::Ready(done);
        }
        let stall = self.stall.get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_TIMEOUT)));
        match stall.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for TimedWrites<IO> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_read(cx, buffer)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for TimedWrites<IO> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().timed(cx, |io, cx| io.poll_write(cx, bytes))
    }
    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, parts: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.get_mut().timed(cx, |io, cx| io.poll_write_vectored(cx, parts))
    }
    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().timed(cx, |io, cx| io.poll_flush(cx))
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().timed(cx, |io, cx| io.poll_shutdown(cx))
    }
}

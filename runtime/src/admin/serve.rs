//! Listeners of the admin pages: TCP, and a unix socket for pages that only the process's own user
//! may use. They always accept. A new connection is served, replaces one without requests, or gets
//! 503. A client that does not read is closed.

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
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::Sleep;

use super::access::decide_head;
use super::body::{Body, Streamed, text};
use super::budget::{Activity, AdminAdmission, ConnectionBudget};
use super::{AdminRoutes, Reach};
use crate::drain::{DrainObserver, DrainWatcher};
use crate::metrics::{CounterFamily, MetricFamily, Registry};

/// A client that has not sent the head of its request within this time is closed.
/// Nobody measured this value; while all connections are in use, idle ones give way long before.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// A client that reads nothing of a response for this long is closed.
/// Nobody measured this value; it bounds how long a client that hangs keeps a response and its
/// connection.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// File name of the socket in the process's data directory.
pub const SOCKET_NAME: &str = "admin.sock";
/// Longest path that a unix socket can be bound to (`sun_path` of unix(7) without its terminating
/// zero).
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Connections that wait in the socket's accept queue.
/// As many as the connections that are served (`CONNECTIONS_MAX`). Connections on a unix socket
/// beyond it wait in connect(2).
const SOCKET_BACKLOG: i32 = 64;
/// Connections that wait in the accept queue of a TCP listener.
/// The kernel drops SYNs beyond it, which readiness probes would notice as a timeout. tokio uses
/// the same number by default.
const TCP_BACKLOG: i32 = 1024;

/// A listener of the admin pages that cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum AdminListenError {
    /// The TCP address cannot be bound.
    #[error(
        "cannot listen on {address}: {source}; fix: stop what listens there, or give the process another address"
    )]
    Address {
        address: SocketAddr,
        source: io::Error,
    },
    /// The unix socket for operators cannot be created.
    #[error("admin socket {}: {source}; fix: give the process a --data-dir that it can write", .path.display())]
    Socket { path: PathBuf, source: io::Error },
}

/// Addresses at which a process serves its operators.
#[derive(Debug, Clone)]
pub struct AdminAddresses {
    /// Address of pages that change nothing and show nothing of tenants' requests; loopback by
    /// default.
    pub admin: SocketAddr,
    /// Address of `/metrics`, which only operators should be able to reach.
    pub metrics: SocketAddr,
    /// Address at which `/healthz/ready` is served.
    pub readiness: SocketAddr,
    /// Directory in which [`SOCKET_NAME`] is created. All pages are served on that socket.
    pub data_dir: PathBuf,
}

/// Counter of connections and requests that an admin listener refuses:
/// `canal_admin_refused_total{listener,reason}`.
#[derive(Debug, Clone)]
struct AdminCounters {
    refused: CounterFamily,
    listener: &'static str,
}

impl AdminCounters {
    fn new(registry: &Registry, listener: &'static str) -> Self {
        let help = "Connections and requests that an admin listener refused or ended, by reason.";
        Self {
            refused: registry.counters(MetricFamily::new(
                "canal_admin_refused_total",
                help,
                &["listener", "reason"],
            )),
            listener,
        }
    }

    fn refused(&self, reason: &'static str) {
        self.refused.shared(&[self.listener, reason]).inc();
    }
}

/// Serves `admin` on its address and on the socket, the metrics of `registry`, and `readiness`.
/// Each listener has its own connection budget.
///
/// # Errors
/// It is not possible to listen on an address or on the path of the socket.
pub fn serve_all(
    addresses: &AdminAddresses,
    (admin, readiness): (AdminRoutes, AdminRoutes),
    registry: &Registry,
    drain: &DrainWatcher,
) -> Result<(), AdminListenError> {
    let metrics = AdminRoutes::new().metrics(registry.clone());
    let socket = bind_socket(&addresses.data_dir).map_err(|source| AdminListenError::Socket {
        path: addresses.data_dir.join(SOCKET_NAME),
        source,
    })?;
    tokio::spawn(serve_socket(
        socket,
        admin.clone(),
        registry.clone(),
        drain.clone(),
    ));
    for (name, address, routes) in [
        ("admin", addresses.admin, admin),
        ("metrics", addresses.metrics, metrics),
    ] {
        let listener =
            listen(address).map_err(|source| AdminListenError::Address { address, source })?;
        tokio::spawn(serve(
            (name, listener),
            routes,
            registry.clone(),
            drain.clone(),
        ));
    }
    serve_readiness(
        addresses.readiness,
        readiness,
        registry.clone(),
        drain.clone(),
    )
}

/// Serves readiness on a thread of its own. Edges treat a replica that misses two probes of 200 ms
/// as down, and its sessions are then reset. A large update, a report of thousands of sessions or a
/// scrape may keep the other threads for as long.
fn serve_readiness(
    address: SocketAddr,
    routes: AdminRoutes,
    registry: Registry,
    drain: DrainWatcher,
) -> Result<(), AdminListenError> {
    let failed = |source| AdminListenError::Address { address, source };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(failed)?;
    let listener = {
        let _registers_there = runtime.enter();
        listen(address).map_err(failed)?
    };
    let serve = move || runtime.block_on(serve(("readiness", listener), routes, registry, drain));
    let _detached = std::thread::Builder::new()
        .name("readiness".to_owned())
        .spawn(serve)
        .map_err(failed)?;
    Ok(())
}

/// Listens on TCP. Connections inherit the options of the listener.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM.nonblocking(),
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    // Pages are small responses, which must not wait for more.
    socket.set_tcp_nodelay(true)?;
    socket.bind(&address.into())?;
    socket.listen(TCP_BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// Binds the socket [`SOCKET_NAME`] in `folder`, to which only the process's own user can connect.
/// It replaces a socket that an earlier process left.
///
/// # Errors
/// The folder cannot be created or written, or is on a file system without sockets.
pub fn bind_socket(folder: &Path) -> io::Result<UnixListener> {
    std::fs::create_dir_all(folder)?;
    let opened = std::fs::File::open(folder)?;
    let mut path = folder.join(SOCKET_NAME);
    // The path through `/proc/self/fd` is short for every folder, but a process that is not
    // dumpable may not use it.
    if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
        path = PathBuf::from(format!(
            "/proc/self/fd/{}/{SOCKET_NAME}",
            opened.as_raw_fd()
        ));
    }
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&SockAddr::unix(&path)?)?;
    // The mode is set before `listen`, because until then no client can connect, whatever the mode.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    socket.listen(SOCKET_BACKLOG)?;
    socket.set_nonblocking(true)?;
    UnixListener::from_std(std::os::unix::net::UnixListener::from(
        std::os::fd::OwnedFd::from(socket),
    ))
}

/// Serves `routes` on TCP until the drain is forced, without the routes that are for the socket
/// only. It keeps serving during the drain, because operators watch it, and it does not delay the
/// end of the process. The name of the listener is the metric label `listener`.
pub async fn serve(
    (name, listener): (&'static str, TcpListener),
    routes: AdminRoutes,
    registry: Registry,
    drain: DrainWatcher,
) {
    accept_all(listener, routes, AdminCounters::new(&registry, name), drain).await;
}

/// Serves all of `routes` on a unix socket until the drain is forced, to the process's own user and
/// to root.
pub async fn serve_socket(
    listener: UnixListener,
    routes: AdminRoutes,
    registry: Registry,
    drain: DrainWatcher,
) {
    accept_all(
        listener,
        routes,
        AdminCounters::new(&registry, "socket"),
        drain,
    )
    .await;
}

/// A TCP or unix listener.
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

async fn accept_all<L: AdminListener>(
    listener: L,
    routes: AdminRoutes,
    counters: AdminCounters,
    drain: DrainWatcher,
) {
    let routes = Arc::new(routes);
    let forced: DrainObserver = drain.watcher();
    // Only an observer is left, so that this server does not delay the end of the process.
    drop(drain);
    let mut budget = ConnectionBudget::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept_one() => accepted,
            () = forced.forced() => return,
        };
        let io = match accepted {
            Ok(io) => io,
            // The process is out of file descriptors: the next accept would fail at once too.
            Err(error) => {
                tracing::warn!(%error, "admin port: accepting a connection failed; retrying");
                // Ten attempts per second cost nothing, and an operator does not notice the wait.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // The peer is another user than the process's own and root.
        if !io.is_permitted() {
            counters.refused("user");
            continue;
        }
        match budget.admit() {
            AdminAdmission::Admitted => {}
            // The new connection is served; the counter is about the idle one that was closed.
            AdminAdmission::Displaced => counters.refused("displaced"),
            AdminAdmission::Full => {
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

/// A TCP or unix connection.
trait AdminStream: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Routes that the connection may use.
    const REACH: Reach;
    /// Returns whether the peer may send requests at all.
    fn is_permitted(&self) -> bool;
    /// Returns whether the connection was made to a loopback address.
    fn is_loopback(&self) -> bool;
    /// Sends 503 without waiting for the client.
    fn refuse(self);
}

const BUSY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

impl AdminStream for TcpStream {
    const REACH: Reach = Reach::Anywhere;
    fn is_permitted(&self) -> bool {
        true
    }
    fn is_loopback(&self) -> bool {
        self.local_addr()
            .is_ok_and(|a| a.ip().to_canonical().is_loopback())
    }
    fn refuse(self) {
        // The send buffer is empty, so the response fits. If the write fails, the close is answer
        // enough.
        let _ = self.try_write(BUSY);
    }
}

impl AdminStream for UnixStream {
    const REACH: Reach = Reach::Socket;
    fn is_permitted(&self) -> bool {
        // The mode of the socket ensures this already; the check also protects if the mode was
        // changed.
        let own = rustix::process::geteuid().as_raw();
        self.peer_cred()
            .is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own)
    }
    fn is_loopback(&self) -> bool {
        false
    }
    fn refuse(self) {
        let _ = self.try_write(BUSY);
    }
}

async fn connection<IO: AdminStream>(
    io: IO,
    routes: Arc<AdminRoutes>,
    counters: AdminCounters,
    activity: Arc<Activity>,
) {
    let is_loopback = io.is_loopback();
    let for_requests = counters.clone();
    let service = service_fn(move |r: Request<hyper::body::Incoming>| {
        activity.record_request();
        // The checks against browsers apply to TCP only: a web page cannot reach a unix socket.
        let head = if IO::REACH == Reach::Socket {
            Ok(())
        } else {
            decide_head(r.uri(), r.headers(), is_loopback)
        };
        let answer = head.map(|()| routes.answer(r.map(drop), IO::REACH));
        let (counters, activity) = (for_requests.clone(), activity.clone());
        async move {
            let response: Response<Body> = match answer {
                Ok(answer) => answer.await,
                Err(refusal) => {
                    counters.refused(refusal.reason());
                    let fix = "only for operators on this host; fix: request it by address or as localhost, without Origin\n";
                    return Ok(text(StatusCode::FORBIDDEN, fix));
                }
            };
            // No handler answers 403: `AdminRoutes::answer` refused a socket-only route on TCP.
            if response.status() == StatusCode::FORBIDDEN {
                counters.refused("socket_only");
            }
            // A stream sends no further request, but must not count as idle and give way.
            if response.extensions().get::<Streamed>().is_some() {
                activity.record_stream();
            }
            Ok::<Response<Body>, std::convert::Infallible>(response)
        }
    });
    let io = TokioIo::new(TimedWrites { io, stall: None });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(io, service);
    if let Err(error) = served.await {
        let stalled = std::error::Error::source(&error)
            // hyper wraps the error of the stream.
            .and_then(|e| e.downcast_ref::<io::Error>())
            .map(io::Error::kind);
        if stalled == Some(io::ErrorKind::TimedOut) {
            counters.refused("write_timeout");
        }
        tracing::debug!(%error, "admin port: a connection failed and is closed");
    }
}

/// A stream whose writes fail when no write makes progress for [`WRITE_TIMEOUT`].
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
        let stall = self
            .stall
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_TIMEOUT)));
        match stall.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for TimedWrites<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_read(cx, buffer)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for TimedWrites<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().timed(cx, |io, cx| io.poll_write(cx, bytes))
    }
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut()
            .timed(cx, |io, cx| io.poll_write_vectored(cx, parts))
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

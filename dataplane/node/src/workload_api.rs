//! The SPIFFE Workload API for pods that ask for it: the application's own X.509-SVID with a key made for it, and whom it may believe. Served
//! inside the pod's network namespace alone, which is why there is no doubt who asks. It issues no JWTs.

mod answers;
mod keys;

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use canal_kit::backoff::Backoff;
use canal_kit::certs::Issuer;
use canal_kit::limits::{Limit, Permit};
use canal_kit::metrics::{Counters, Family, Registry};
use canal_kit::sys::{self, ListenOptions, Netns, SysError};
use canal_kit::tls::TrustView;
use canal_model::identity::Identity;
use canal_model::trust::{Bundle, KeyAlgorithm};
use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Server;
use tonic::transport::server::Connected;

use answers::Answers;
use generated::spiffe_workload_api_server::SpiffeWorkloadApiServer;
use keys::Keys;

pub use keys::Svid;

/// Generated from `proto/workload.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod generated {
    tonic::include_proto!("_");
}

/// On loopback in the pod's namespace: `SPIFFE_ENDPOINT_SOCKET=tcp://127.0.0.1:15010`.
pub const PORT: u16 = 15010;
/// The abstract unix socket with the same, in the pod's namespace.
pub const ABSTRACT_SOCKET: &str = "canal-workload";
/// Connections of one pod.
pub const CONNECTIONS_MAX: u64 = 64;
/// Streams under way of one pod, over all its connections.
pub const STREAMS_MAX: u64 = 64;
/// No request of this API holds anything worth more, bytes.
pub const REQUEST_BYTES_MAX: usize = 4 << 10;
/// PING interval and answer limit: applications that vanished do not keep their places.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

/// What all pods' APIs share.
#[derive(Clone)]
pub struct WorkloadApis {
    issuer: Arc<Issuer>,
    registry: Registry,
    requests: Counters,
    keys: Counters,
    listen_failures: Counters,
}

/// One pod's API; dropping it ends it.
pub struct WorkloadApi {
    identity: Identity,
    bundles: watch::Sender<Arc<[Bundle]>>,
    _end: DropGuard,
}

impl WorkloadApis {
    /// `issuer` has applications' keys signed. Registers the metrics.
    pub fn new(issuer: Issuer, registry: &Registry) -> Self {
        let family = |name, help, labels| registry.counters(Family::new(name, help, labels));
        Self {
            issuer: Arc::new(issuer),
            registry: registry.clone(),
            requests: family("canal_workload_api_requests_total", "Requests to the SPIFFE Workload API.", &["method", "result"]),
            keys: family("canal_workload_api_keys_total", "Keys made for applications, and why some were not certified.", &["result"]),
            listen_failures: family("canal_workload_api_listen_failures_total", "Sockets that could not be opened; tried again.", &[]),
        }
    }

    /// Serves `identity` in `netns` until what it returns is dropped. Call it on the control runtime.
    pub fn start(&self, netns: &Arc<Netns>, identity: Identity, algorithm: KeyAlgorithm, trust: TrustView) -> WorkloadApi {
        let end = CancellationToken::new();
        let (bundles, told) = watch::channel(Arc::from([]));
        let svid = Keys::new(self.issuer.clone(), self.keys.clone(), identity.clone(), algorithm, trust).follow(end.clone());
        let answers = Answers {
            svid,
            bundles: told,
            streams: Limit::new(&self.registry, "pod_workload_api_streams", STREAMS_MAX),
            requests: self.requests.clone(),
            end: end.clone(),
        };
        let connections = Limit::new(&self.registry, "pod_workload_api_connections", CONNECTIONS_MAX);
        for door in [Door::Tcp, Door::Abstract] {
            let (netns, answers, connections) = (netns.clone(), answers.clone(), connections.clone());
            let (failures, end) = (self.listen_failures.clone(), end.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = serve(door, &netns, answers, connections, failures) => {}
                    () = end.cancelled() => {}
                }
            });
        }
        WorkloadApi { identity, bundles, _end: end.drop_guard() }
    }
}

impl WorkloadApi {
    /// Whom it serves.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whom the application may believe from now on.
    pub fn tell(&self, bundles: &[Bundle]) {
        self.bundles.send_if_modified(|held| {
            let is_new = **held != *bundles;
            if is_new {
                *held = bundles.into();
            }
            is_new
        });
    }
}

#[derive(Debug, Clone, Copy)]
enum Door {
    Tcp,
    Abstract,
}

/// Never ends by itself: a socket that cannot be opened (an application may hold it) is tried again.
async fn serve(door: Door, netns: &Netns, answers: Answers, connections: Limit, failures: Counters) {
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
    loop {
        match listen(door, netns) {
            Ok(listener) => {
                let service = SpiffeWorkloadApiServer::new(answers.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
                let server = Server::builder()
                    .max_concurrent_streams(u32::try_from(STREAMS_MAX).ok())
                    .http2_keepalive_interval(Some(PING.0))
                    .http2_keepalive_timeout(Some(PING.1))
                    .add_service(service);
                let accepted = Accepted { listener, connections: connections.clone() };
                let end = answers.end.clone();
                if let Err(error) = server.serve_with_incoming_shutdown(accepted, end.cancelled_owned()).await {
                    tracing::warn!(?door, %error, "the Workload API's socket failed");
                }
            }
            Err(error) => {
                failures.shared(&[]).inc();
                tracing::warn!(?door, %error, "cannot serve the Workload API in the pod; trying again");
            }
        }
        tokio::time::sleep(backoff.next_wait()).await;
    }
}

#[derive(Debug)]
enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

fn listen(door: Door, netns: &Netns) -> Result<Listener, SysError> {
    match door {
        Door::Tcp => {
            let address = (std::net::Ipv4Addr::LOCALHOST, PORT).into();
            sys::listen(Some(netns), address, &ListenOptions::default()).map(Listener::Tcp)
        }
        Door::Abstract => {
            let address = (std::net::Ipv4Addr::LOCALHOST, 0).into();
            let failed = |source| SysError::Socket { what: "abstract unix socket", address, source };
            let opened = netns.enter(|| -> io::Result<_> {
                let name = std::os::unix::net::SocketAddr::from_abstract_name(ABSTRACT_SOCKET)?;
                let listener = std::os::unix::net::UnixListener::bind_addr(&name)?;
                listener.set_nonblocking(true)?;
                Ok(listener)
            })?;
            opened.and_then(UnixListener::from_std).map(Listener::Unix).map_err(failed)
        }
    }
}

/// What comes in, up to the limit; what is beyond it is closed and counted.
struct Accepted {
    listener: Listener,
    connections: Limit,
}

trait Bytes: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Bytes for T {}

/// A connection with its place among the pod's.
struct Connection {
    io: Pin<Box<dyn Bytes>>,
    _place: Permit,
}

impl Stream for Accepted {
    type Item = io::Result<Connection>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let accepted: Poll<io::Result<Pin<Box<dyn Bytes>>>> = match &self.listener {
                Listener::Tcp(l) => l.poll_accept(cx).map_ok(|(s, _)| Box::pin(s) as _),
                Listener::Unix(l) => l.poll_accept(cx).map_ok(|(s, _)| Box::pin(s) as _),
            };
            match std::task::ready!(accepted) {
                Ok(io) => {
                    if let Some(place) = self.connections.take() {
                        return Poll::Ready(Some(Ok(Connection { io, _place: place })));
                    }
                }
                Err(e) => return Poll::Ready(Some(Err(e))),
            }
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = ();
    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.io.as_mut().poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.io.as_mut().poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io.as_mut().poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io.as_mut().poll_shutdown(cx)
    }
}

//! SPIFFE Workload API for pods that request it: the application's own X.509-SVID with its own key,
//! and the trust bundles.
//!
//! The sockets are only inside the pod's network namespace, so every client belongs to the pod. The
//! API issues no JWTs.

mod answers;
mod keys;

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use canal_identity::certs::CertificateClient;
use canal_model::identity::Identity;
use canal_model::trust::{KeyAlgorithm, TrustBundle};
use canal_net::sys::{self, ListenOptions, Netns, SysError};
use canal_runtime::backoff::Backoff;
use canal_runtime::limits::{Limit, Permit};
use canal_runtime::metrics::{CounterFamily, MetricFamily, Registry};
use canal_tls::TrustView;
use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Server;
use tonic::transport::server::Connected;

use answers::WorkloadApiService;
use generated::spiffe_workload_api_server::SpiffeWorkloadApiServer;
use keys::SvidRenewer;

pub use keys::Svid;

/// Types generated from `proto/workload.proto`, the standard's definition.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod generated {
    tonic::include_proto!("_");
}

/// TCP port on loopback in the pod's namespace: `SPIFFE_ENDPOINT_SOCKET=tcp://127.0.0.1:15010`. Any
/// port would do that applications rarely use; the others of the mesh are near it.
pub const PORT: u16 = 15010;
/// Name of the abstract unix socket in the pod's namespace, which serves the same.
pub const ABSTRACT_SOCKET: &str = "canal-workload";
/// Connections of one pod, at most. A process of the pod needs one. Nobody measured the number; it
/// bounds what one pod costs the node.
pub const CONNECTIONS_MAX: u64 = 64;
/// Streams in progress of one pod over all its connections, at most. One for each connection, which
/// is what a client library opens to watch its certificate.
pub const STREAMS_MAX: u64 = 64;
/// Longest request in bytes; no request of this API contains anything that needs more.
pub const REQUEST_BYTES_MAX: usize = 4 << 10;
/// PING interval and timeout: connections of applications that vanished are closed. They are found
/// after 40 s. Nobody measured the values.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

/// Dependencies that the APIs of all pods share.
#[derive(Clone)]
pub struct WorkloadApis {
    issuer: Arc<CertificateClient>,
    registry: Registry,
    requests: CounterFamily,
    keys: CounterFamily,
    listen_failures: CounterFamily,
}

/// Workload API of one pod; dropping it ends the service.
pub struct WorkloadApi {
    identity: Identity,
    bundles: watch::Sender<Arc<[TrustBundle]>>,
    _end: DropGuard,
}

impl WorkloadApis {
    /// Registers the metrics. `issuer` gets applications' keys certified.
    pub fn new(issuer: CertificateClient, registry: &Registry) -> Self {
        let family = |name, help, labels| registry.counters(MetricFamily::new(name, help, labels));
        Self {
            issuer: Arc::new(issuer),
            registry: registry.clone(),
            requests: family(
                "canal_workload_api_requests_total",
                "Requests to the SPIFFE Workload API.",
                &["method", "result"],
            ),
            keys: family(
                "canal_workload_api_keys_total",
                "Keys created for applications, by outcome of their certification.",
                &["result"],
            ),
            listen_failures: family(
                "canal_workload_api_listen_failures_total",
                "Sockets that could not be opened; they are retried.",
                &[],
            ),
        }
    }

    /// Serves `identity` in `netns` until the returned value is dropped. Call it on the control
    /// runtime.
    pub fn start(
        &self,
        netns: &Arc<Netns>,
        identity: Identity,
        algorithm: KeyAlgorithm,
        trust: TrustView,
    ) -> WorkloadApi {
        let end = CancellationToken::new();
        let (bundles, updates) = watch::channel(Arc::from([]));
        let svid = SvidRenewer::new(
            self.issuer.clone(),
            self.keys.clone(),
            identity.clone(),
            algorithm,
            trust,
        )
        .follow(end.clone());
        let answers = WorkloadApiService {
            svid,
            bundles: updates,
            streams: Limit::new(&self.registry, "pod_workload_api_streams", STREAMS_MAX),
            requests: self.requests.clone(),
            end: end.clone(),
        };
        let connections = Limit::new(
            &self.registry,
            "pod_workload_api_connections",
            CONNECTIONS_MAX,
        );
        for socket in [ApiSocket::Tcp, ApiSocket::Abstract] {
            let (netns, answers, connections) =
                (netns.clone(), answers.clone(), connections.clone());
            let (failures, end) = (self.listen_failures.clone(), end.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = serve(socket, &netns, answers, connections, failures) => {}
                    () = end.cancelled() => {}
                }
            });
        }
        WorkloadApi {
            identity,
            bundles,
            _end: end.drop_guard(),
        }
    }
}

impl WorkloadApi {
    /// Returns the identity that is served.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Sets the trust bundles that the application gets from now on.
    pub fn notify(&self, bundles: &[TrustBundle]) {
        self.bundles.send_if_modified(|current| {
            let is_new = **current != *bundles;
            if is_new {
                *current = bundles.into();
            }
            is_new
        });
    }
}

#[derive(Debug, Clone, Copy)]
enum ApiSocket {
    Tcp,
    Abstract,
}

/// Serves one socket and never ends by itself. A socket that cannot be opened, because an
/// application may use the address, is retried.
async fn serve(
    socket: ApiSocket,
    netns: &Netns,
    answers: WorkloadApiService,
    connections: Limit,
    failures: CounterFamily,
) {
    // Only another process on the port keeps it from listening; nobody measured the waits.
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
    loop {
        match listen(socket, netns) {
            Ok(listener) => {
                let service = SpiffeWorkloadApiServer::new(answers.clone())
                    .max_decoding_message_size(REQUEST_BYTES_MAX);
                let server = Server::builder()
                    .max_concurrent_streams(u32::try_from(STREAMS_MAX).ok())
                    .http2_keepalive_interval(Some(PING.0))
                    .http2_keepalive_timeout(Some(PING.1))
                    .add_service(service);
                let accepted = AcceptedConnections {
                    listener,
                    connections: connections.clone(),
                };
                let end = answers.end.clone();
                if let Err(error) = server
                    .serve_with_incoming_shutdown(accepted, end.cancelled_owned())
                    .await
                {
                    tracing::warn!(?socket, %error, "workload API: the socket failed; the pod gets no updates from it");
                }
            }
            Err(error) => {
                failures.shared(&[]).inc();
                tracing::warn!(?socket, %error, "workload API: cannot serve the pod; retrying");
            }
        }
        tokio::time::sleep(backoff.next_wait()).await;
    }
}

#[derive(Debug)]
enum ApiListener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

fn listen(socket: ApiSocket, netns: &Netns) -> Result<ApiListener, SysError> {
    match socket {
        ApiSocket::Tcp => {
            let address = (std::net::Ipv4Addr::LOCALHOST, PORT).into();
            sys::listen(Some(netns), address, &ListenOptions::default()).map(ApiListener::Tcp)
        }
        ApiSocket::Abstract => {
            let address = (std::net::Ipv4Addr::LOCALHOST, 0).into();
            let failed = |source| SysError::Socket {
                what: "abstract unix socket",
                address,
                source,
            };
            let opened = netns.enter(|| -> io::Result<_> {
                let name = std::os::unix::net::SocketAddr::from_abstract_name(ABSTRACT_SOCKET)?;
                let listener = std::os::unix::net::UnixListener::bind_addr(&name)?;
                listener.set_nonblocking(true)?;
                Ok(listener)
            })?;
            opened
                .and_then(UnixListener::from_std)
                .map(ApiListener::Unix)
                .map_err(failed)
        }
    }
}

/// Accepted connections up to the limit; those above it are closed and counted.
struct AcceptedConnections {
    listener: ApiListener,
    connections: Limit,
}

trait ByteStream: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> ByteStream for T {}

/// A connection with its permit from the pod's limit.
struct ApiConnection {
    io: Pin<Box<dyn ByteStream>>,
    _place: Permit,
}

impl Stream for AcceptedConnections {
    type Item = io::Result<ApiConnection>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let accepted: Poll<io::Result<Pin<Box<dyn ByteStream>>>> = match &self.listener {
                ApiListener::Tcp(l) => l.poll_accept(cx).map_ok(|(s, _)| Box::pin(s) as _),
                ApiListener::Unix(l) => l.poll_accept(cx).map_ok(|(s, _)| Box::pin(s) as _),
            };
            match std::task::ready!(accepted) {
                Ok(io) => {
                    if let Some(place) = self.connections.take() {
                        return Poll::Ready(Some(Ok(ApiConnection { io, _place: place })));
                    }
                }
                Err(e) => return Poll::Ready(Some(Err(e))),
            }
        }
    }
}

impl Connected for ApiConnection {
    type ConnectInfo = ();
    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for ApiConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.io.as_mut().poll_read(cx, buf)
    }
}

impl AsyncWrite for ApiConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.io.as_mut().poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io.as_mut().poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io.as_mut().poll_shutdown(cx)
    }
}

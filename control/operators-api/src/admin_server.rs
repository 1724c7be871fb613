//! Plain read-only HTTP for operators and scrapers. `/metrics` and `/healthz/ready` are served on
//! TCP, on the admin port (localhost) and on the metrics port. `/config_dump`, which contains the
//! configuration of all tenants, is served only on a Unix socket of the controller's own user. No
//! request changes state. Start at [`serve`].

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use canal_access::{ListenError, TenantLimits, now_seconds};
use canal_catalog::Catalog;
use canal_controller_metrics::{self as metrics, ControllerMetrics, GaugeValues};
use canal_fleet::FleetHandle;
use canal_model::diagnostic::Severity;
use canal_policy_sources::SourceHealth;
use canal_runtime::admin::{self, HeadRefusal};
use canal_runtime::metrics::with_legacy_names;
use canal_southbound::Subscribers;
use canal_trust::TrustAuthorities;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::dump;

/// Maximum number of open connections per admin endpoint.
/// Data planes have the same limit (`canal_runtime::admin`). A scraper and some operators need a
/// few.
pub const ADMIN_CONNECTIONS_MAX: usize = 64;
/// Time within which a client must send a complete request head.
/// Data planes have the same timeout (`canal_runtime::admin`).
const HEAD: Duration = Duration::from_secs(10);

/// Kind of an admin endpoint: it decides which paths are served and which clients are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminEndpoint {
    /// Unix socket with all paths, for the process's own user and root.
    Socket,
    /// TCP listener on the admin port.
    Admin,
    /// TCP listener on the metrics port.
    Metrics,
}

/// Handles of the controller whose state the pages show.
pub struct PagesContext {
    pub catalog: watch::Receiver<Arc<Catalog>>,
    pub subscribers: Arc<Subscribers>,
    pub fleet: Arc<FleetHandle>,
    pub trust: Arc<TrustAuthorities>,
    pub health: Arc<SourceHealth>,
    pub limits: Arc<TenantLimits>,
    pub metrics: Arc<ControllerMetrics>,
    /// Canceled when the controller is to stop.
    pub stopping: CancellationToken,
}

/// Listening socket of an admin endpoint.
pub enum AdminAcceptor {
    Tcp(TcpListener),
    /// Unix socket, and the ID of the user that may connect besides root.
    Unix(UnixListener, u32),
}

/// Binds a TCP listener; `flag` is the option that names its address.
///
/// # Errors
/// The address cannot be bound.
pub async fn bind(address: SocketAddr, flag: &'static str) -> Result<TcpListener, ListenError> {
    TcpListener::bind(address)
        .await
        .map_err(|why| ListenError::Bind { address, why, flag })
}

/// Binds the admin socket in `folder`, replacing one that an earlier process left. No running
/// process uses that one: only one process at a time has the store in `folder` open.
///
/// # Errors
/// The socket cannot be created.
pub fn bind_socket(folder: &Path) -> Result<AdminAcceptor, ListenError> {
    let bound = admin::bind_socket(folder).map_err(|why| ListenError::Socket {
        path: folder.join(admin::SOCKET_NAME),
        why,
    })?;
    Ok(AdminAcceptor::Unix(
        bound,
        rustix::process::geteuid().as_raw(),
    ))
}

/// Serves the endpoint until the controller stops.
pub async fn serve(listener: AdminAcceptor, endpoint: AdminEndpoint, shared: Arc<PagesContext>) {
    let places = Arc::new(Semaphore::new(ADMIN_CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            () = shared.stopping.cancelled() => return,
            accepted = accept(&listener, &shared) => accepted,
        };
        // accept(2) usually fails because no file descriptor is free; wait instead of spinning.
        let Ok(stream) = accepted else {
            // Ten attempts a second cost nothing, and an operator does not notice the wait.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Some((stream, is_loopback)) = stream else {
            continue;
        };
        let Ok(place) = places.clone().try_acquire_owned() else {
            shared.metrics.refuse("admin_connections");
            continue;
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let response = answer(&request, endpoint, is_loopback, &shared);
                async move { Ok::<_, Infallible>(response) }
            });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD);
            if let Err(e) = http.serve_connection(TokioIo::new(stream), service).await {
                tracing::debug!(error = %e, "admin port: a connection failed and is closed");
            }
            drop(place);
        });
    }
}

/// Byte stream of a TCP or a Unix connection.
trait ListenerStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ListenerStream for T {}

/// Accepts the next connection; the flag is true if it arrived at a loopback address. `None` if the
/// peer's user may not connect.
async fn accept(
    listener: &AdminAcceptor,
    shared: &PagesContext,
) -> io::Result<Option<(Box<dyn ListenerStream>, bool)>> {
    match listener {
        AdminAcceptor::Tcp(listener) => {
            let (tcp, _) = listener.accept().await?;
            let is_loopback = tcp
                .local_addr()
                .is_ok_and(|address| address.ip().to_canonical().is_loopback());
            Ok(Some((Box::new(tcp), is_loopback)))
        }
        AdminAcceptor::Unix(listener, own) => {
            let (unix, _) = listener.accept().await?;
            // The socket's mode enforces the same rule; this check still holds if the mode was
            // changed.
            if unix
                .peer_cred()
                .is_ok_and(|peer| peer.uid() == 0 || peer.uid() == *own)
            {
                return Ok(Some((Box::new(unix), false)));
            }
            shared.metrics.refuse("admin_user");
            Ok(None)
        }
    }
}

/// Returns the reason to refuse a TCP request that a web page's script may have sent, or `None`.
/// Such a request has an `Origin` header, or reaches a loopback address under a name that is not
/// local (DNS rebinding).
fn refusal_by_head(uri: &Uri, headers: &HeaderMap, is_loopback: bool) -> Option<&'static str> {
    match admin::decide_head(uri, headers, is_loopback) {
        Ok(()) => None,
        Err(HeadRefusal::Origin) => Some("admin_origin"),
        Err(HeadRefusal::Host) => Some("admin_host"),
    }
}

fn answer(
    request: &Request<Incoming>,
    endpoint: AdminEndpoint,
    is_loopback: bool,
    shared: &PagesContext,
) -> Response<Full<Bytes>> {
    // Web pages cannot reach the Unix socket.
    if endpoint != AdminEndpoint::Socket
        && let Some(reason) = refusal_by_head(request.uri(), request.headers(), is_loopback)
    {
        shared.metrics.refuse(reason);
        let fix = "only for operators on this host; fix: request it by address or as localhost, without Origin\n";
        return text(StatusCode::FORBIDDEN, fix.into());
    }
    if request.method() != Method::GET {
        return text(
            StatusCode::METHOD_NOT_ALLOWED,
            "only GET is supported; fix: send GET\n".into(),
        );
    }
    match (request.uri().path(), endpoint) {
        ("/metrics" | "/stats/prometheus", _) => {
            let metrics = shared.metrics.render(&gauges(shared));
            text(StatusCode::OK, with_legacy_names(metrics))
        },
        // The controller serves only after it has read all its sources, so it is ready whenever it
        // responds.
        ("/healthz/ready", _) => text(StatusCode::OK, "ready\n".into()),
        ("/config_dump", AdminEndpoint::Socket) => {
            let catalog = shared.catalog.borrow().clone();
            // Names of tenants have no characters that a query would escape.
            let only = request.uri().query().and_then(|q| q.split('&').find_map(|p| p.strip_prefix("tenant=")));
            let subscribers = shared.subscribers.list(&catalog, |_| true);
            let mut response = text(StatusCode::OK, format!("{:#}\n", dump::catalog(&catalog, only, &subscribers)));
            response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
            response
        }
        // Every user of the host can connect by TCP, and the dump has the configuration of all
        // tenants.
        ("/config_dump", AdminEndpoint::Admin) => {
            shared.metrics.refuse("admin_socket_only");
            let fix = format!(
                "/config_dump is not served on TCP; fix: use the controller's unix socket, e.g. \
                 curl --unix-socket DATA-DIR/{} http://localhost/config_dump\n",
                admin::SOCKET_NAME
            );
            text(StatusCode::FORBIDDEN, fix)
        }
        ("/", AdminEndpoint::Socket | AdminEndpoint::Admin) => {
            text(StatusCode::OK, "canal-controller\n/config_dump[?tenant=NAME] (unix socket)\n/metrics\n/healthz/ready\n".into())
        }
        // The metrics port gets here with every other path: it serves only metrics and readiness.
        _ => text(StatusCode::NOT_FOUND, "this path does not exist; fix: see / for the paths\n".into()),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let kind = header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// Returns a severity as metric labels spell it.
fn severity_name(s: Severity) -> &'static str {
    match s {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}

/// Returns the current values of all gauges.
#[allow(
    clippy::cast_precision_loss,
    reason = "all of these are far below 2^52"
)]
fn gauges(shared: &PagesContext) -> GaugeValues {
    let catalog = shared.catalog.borrow().clone();
    let summary = shared.subscribers.summary(&catalog);
    let mut g = GaugeValues::default();
    // Prometheus has floating-point numbers, which are exact up to 2^53.
    g.set(metrics::GENERATION, &[], catalog.generation.0 as f64);
    // A kind without subscribers is shown as 0.
    for kind in ["node", "gateway", "edge", "keyserver"] {
        g.set(
            metrics::SUBSCRIBERS,
            &[("kind", kind)],
            summary.connected.get(kind).copied().unwrap_or(0) as f64,
        );
    }
    shared.fleet.gauges(&mut g);
    g.set(metrics::CONVERGED, &[], summary.converged as f64);
    g.set(metrics::UNACKED_SECONDS, &[], summary.unacked_seconds);
    g.set(metrics::SUBSCRIBERS_REFUSING, &[], summary.standing as f64);
    shared.limits.gauges(&mut g);
    let now = now_seconds();
    shared
        .trust
        .gauges(&canal_model::identity::components(), now, &mut g);
    for (name, view) in &catalog.tenants {
        let tenant = ("tenant", name.as_str());
        g.set(
            metrics::STALE_SECONDS,
            &[tenant],
            shared.health.stale(name).as_secs_f64(),
        );
        // A tenant without a valid Tenant object has no trust domain.
        if let Some(isolation) = &view.claims.isolation {
            let domain = (name.clone(), isolation.trust_domain.clone());
            shared.trust.gauges(&domain, now, &mut g);
        }
        for kind in canal_model::program::ResourceKind::ALL {
            g.set(
                metrics::RESOURCES,
                &[tenant, ("kind", kind.label())],
                view.count(kind) as f64,
            );
        }
        for severity in [Severity::Error, Severity::Warning] {
            let n = view
                .diagnostics
                .iter()
                .filter(|d| d.severity == severity)
                .count();
            g.set(
                metrics::FINDINGS,
                &[tenant, ("severity", severity_name(severity))],
                n as f64,
            );
        }
    }
    g
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_from_web_pages_are_refused_on_tcp() {
        let refusal = |host: &str, origin: bool, is_loopback| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().unwrap());
            if origin {
                headers.insert(header::ORIGIN, "http://evil.example".parse().unwrap());
            }
            refusal_by_head(&Uri::from_static("/metrics"), &headers, is_loopback)
        };
        assert_eq!(refusal("127.0.0.1:15000", false, true), None);
        assert_eq!(
            refusal("evil.example:15000", false, true),
            Some("admin_host")
        );
        assert_eq!(refusal("controller.example:15014", false, false), None);
        assert_eq!(refusal("localhost", true, true), Some("admin_origin"));
    }
}

//! Plain HTTP for people and scrapers, read only. `/metrics` and `/healthz/ready` are on TCP, on the admin port (localhost) and on the metrics
//! port; `/config_dump`, which shows what all tenants wrote, is on a unix socket of the controller's own user. It changes nothing.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use canal_runtime::is_local_name;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use crate::dump;
use crate::listener::ListenError;
use crate::metrics::{self, Gauges};
use crate::shared::Shared;
use crate::{kind_name, severity_name};

/// Open connections per door.
pub const DOOR_CONNECTIONS_MAX: usize = 64;
/// The socket's name in the controller's data directory, as in those of data planes.
pub const ADMIN_SOCKET_NAME: &str = "admin.sock";
/// The longest path that a unix socket can be bound to (`sun_path` of unix(7) without its last zero).
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// A request's head must be whole within this time.
const HEAD: Duration = Duration::from_secs(10);

/// Which paths a door has, and who may ask there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    /// All paths, for the process's own user and root.
    Socket,
    /// TCP on the admin port.
    Admin,
    /// TCP on the metrics port.
    Metrics,
}

/// Where a door listens.
pub(crate) enum DoorListener {
    Tcp(TcpListener),
    /// With the user that may connect beside root.
    Unix(UnixListener, u32),
}

pub(crate) async fn bind(address: SocketAddr, flag: &'static str) -> Result<TcpListener, ListenError> {
    TcpListener::bind(address).await.map_err(|why| ListenError::Bind { address, why, flag })
}

/// The socket in `folder`, in place of one that an earlier process left: who holds the store in the folder is alone there.
pub(crate) fn bind_socket(folder: &Path) -> Result<DoorListener, ListenError> {
    let path = folder.join(ADMIN_SOCKET_NAME);
    try_bind_socket(folder, path.clone()).map_err(|why| ListenError::Socket { path, why })
}

fn try_bind_socket(folder: &Path, mut path: PathBuf) -> io::Result<DoorListener> {
    let opened = std::fs::File::open(folder)?;
    if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
        // This path is short wherever the folder is.
        path = PathBuf::from(format!("/proc/self/fd/{}/{ADMIN_SOCKET_NAME}", opened.as_raw_fd()));
    }
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    // Whoever connects before this is asked who it is, as everybody.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    let own = std::fs::metadata(&path)?.uid();
    Ok(DoorListener::Unix(listener, own))
}

/// Serves until the controller stops.
pub(crate) async fn serve(listener: DoorListener, door: Door, shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(DOOR_CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            () = shared.stopping.cancelled() => return,
            accepted = accept(&listener, &shared) => accepted,
        };
        let Ok(stream) = accepted else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Some((stream, is_loopback)) = stream else { continue };
        let Ok(place) = places.clone().try_acquire_owned() else {
            shared.refuse("door_connections");
            continue;
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let response = answer(&request, door, is_loopback, &shared);
                async move { Ok::<_, Infallible>(response) }
            });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD);
            if let Err(e) = http.serve_connection(TokioIo::new(stream), service).await {
                tracing::debug!(error = %e, "a connection to the admin or metrics port broke");
            }
            drop(place);
        });
    }
}

/// A byte stream of either kind.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// The next connection, and whether it came to a loopback address; `None`: its user may not ask here.
async fn accept(listener: &DoorListener, shared: &Shared) -> io::Result<Option<(Box<dyn Duplex>, bool)>> {
    match listener {
        DoorListener::Tcp(listener) => {
            let (tcp, _) = listener.accept().await?;
            let is_loopback = tcp.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback());
            Ok(Some((Box::new(tcp), is_loopback)))
        }
        DoorListener::Unix(listener, own) => {
            let (unix, _) = listener.accept().await?;
            // The socket's mode says the same; this holds if somebody changed it.
            if unix.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == *own) {
                return Ok(Some((Box::new(unix), false)));
            }
            shared.refuse("door_user");
            Ok(None)
        }
    }
}

/// Whether a script of a web page may have sent a request over TCP; the reason of its refusal.
fn refusal_by_head(uri: &Uri, headers: &HeaderMap, is_loopback: bool) -> Option<&'static str> {
    if headers.contains_key(header::ORIGIN) {
        return Some("door_origin");
    }
    let named = headers.get_all(header::HOST).iter().map(|h| h.to_str().unwrap_or_default());
    let is_local = uri.authority().map(http::uri::Authority::as_str).into_iter().chain(named).all(is_local_name);
    (is_loopback && !is_local).then_some("door_host")
}

fn answer(request: &Request<Incoming>, door: Door, is_loopback: bool, shared: &Shared) -> Response<Full<Bytes>> {
    if door != Door::Socket
        && let Some(reason) = refusal_by_head(request.uri(), request.headers(), is_loopback)
    {
        shared.refuse(reason);
        let fix = "only for operators on this host; fix: ask by address or as localhost, without Origin\n";
        return text(StatusCode::FORBIDDEN, fix.into());
    }
    if request.method() != Method::GET {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET is answered here\n".into());
    }
    match (request.uri().path(), door) {
        ("/metrics" | "/stats/prometheus", _) => text(StatusCode::OK, shared.metrics.render(&gauges(shared))),
        // The controller listens only once all its sources were read.
        ("/healthz/ready", _) => text(StatusCode::OK, "ready\n".into()),
        ("/config_dump", Door::Socket) => {
            let catalog = shared.catalog.borrow().clone();
            let only = request.uri().query().and_then(|q| q.split('&').find_map(|p| p.strip_prefix("tenant=")));
            let subscribers = shared.subscribers.list(&catalog, |_| true);
            let mut response = text(StatusCode::OK, format!("{:#}\n", dump::catalog(&catalog, only, &subscribers)));
            response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
            response
        }
        ("/config_dump", Door::Admin) => {
            shared.refuse("door_socket_only");
            let fix = format!(
                "/config_dump is not served on TCP; fix: ask on the controller's unix socket, e.g. \
                 curl --unix-socket DATA-DIR/{ADMIN_SOCKET_NAME} http://localhost/config_dump\n"
            );
            text(StatusCode::FORBIDDEN, fix)
        }
        ("/", Door::Socket | Door::Admin) => {
            text(StatusCode::OK, "canal-controller\n/config_dump[?tenant=NAME] (unix socket)\n/metrics\n/healthz/ready\n".into())
        }
        _ => text(StatusCode::NOT_FOUND, "there is nothing here\n".into()),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let kind = header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[allow(clippy::cast_precision_loss, reason = "all of these are far below 2^52")]
fn fleet_gauges(shared: &Shared, g: &mut Gauges) {
    let (states, down, edges) = shared.fleet.roster().tally();
    for (state, n) in states {
        g.set(metrics::FLEET_REPLICAS, &[("state", state)], n as f64);
    }
    let (plan, counts) = (shared.fleet.plan(), shared.fleet.counts());
    g.set(metrics::FLEET_DOWN, &[], down as f64);
    g.set(metrics::FLEET_EDGES, &[], edges as f64);
    g.set(metrics::FLEET_PLAN, &[], f64::from(plan.number));
    g.set(metrics::FLEET_NOTES, &[], plan.notes.len() as f64);
    g.set(metrics::FLEET_CLOSED, &[], counts.closed as f64);
    g.set(metrics::FLEET_WAITING, &[], counts.waiting as f64);
}

#[allow(clippy::cast_precision_loss, reason = "all of these are far below 2^52")]
fn gauges(shared: &Shared) -> Gauges {
    let catalog = shared.catalog.borrow().clone();
    let summary = shared.subscribers.summary(&catalog);
    let mut g = Gauges::default();
    g.set(metrics::GENERATION, &[], catalog.generation.0 as f64);
    for kind in ["node", "gateway", "edge", "keyserver"] {
        g.set(metrics::SUBSCRIBERS, &[("kind", kind)], summary.connected.get(kind).copied().unwrap_or(0) as f64);
    }
    fleet_gauges(shared, &mut g);
    g.set(metrics::CONVERGED, &[], summary.converged as f64);
    g.set(metrics::UNACKED_SECONDS, &[], summary.unacked_seconds);
    g.set(metrics::NACKS_STANDING, &[], summary.standing as f64);
    shared.tenant_limits.gauges(&mut g);
    shared.trust.gauges(&canal_model::identity::components(), &mut g);
    let sources = shared.sources.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (name, view) in &catalog.tenants {
        let tenant = ("tenant", name.as_str());
        g.set(metrics::STALE_SECONDS, &[tenant], sources.stale.get(name).map_or(0.0, |since| since.elapsed().as_secs_f64()));
        if let Some(isolation) = &view.claims.isolation {
            shared.trust.gauges(&(name.clone(), isolation.trust_domain.clone()), &mut g);
        }
        for kind in canal_model::program::Kind::ALL {
            g.set(metrics::RESOURCES, &[tenant, ("kind", kind_name(kind))], view.count(kind) as f64);
        }
        for severity in [canal_model::diagnostic::Severity::Error, canal_model::diagnostic::Severity::Warning] {
            let n = view.diagnostics.iter().filter(|d| d.severity == severity).count();
            g.set(metrics::FINDINGS, &[tenant, ("severity", severity_name(severity))], n as f64);
        }
    }
    g
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_web_page_asks_nothing_on_tcp() {
        let refusal = |host: &str, origin: bool, is_loopback| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().unwrap());
            if origin {
                headers.insert(header::ORIGIN, "http://evil.example".parse().unwrap());
            }
            refusal_by_head(&Uri::from_static("/metrics"), &headers, is_loopback)
        };
        assert_eq!(refusal("127.0.0.1:15000", false, true), None);
        assert_eq!(refusal("evil.example:15000", false, true), Some("door_host"));
        assert_eq!(refusal("controller.example:15014", false, false), None);
        assert_eq!(refusal("localhost", true, true), Some("door_origin"));
    }
}

//! Plain HTTP for people and scrapers: `/config_dump`, `/metrics` and `/healthz/ready` on the admin port (localhost), `/metrics` and
//! `/healthz/ready` on the metrics port. Read only.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::dump;
use crate::listener::ListenError;
use crate::metrics::{self, Gauges};
use crate::shared::Shared;
use crate::{kind_name, severity_name};

/// Open connections per door.
pub const DOOR_CONNECTIONS_MAX: usize = 64;
/// A request's head must be whole within this time.
const HEAD: Duration = Duration::from_secs(10);

/// Which paths a door has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    Admin,
    Metrics,
}

pub(crate) async fn bind(address: SocketAddr, flag: &'static str) -> Result<TcpListener, ListenError> {
    TcpListener::bind(address).await.map_err(|why| ListenError::Bind { address, why, flag })
}

/// Serves until the controller stops.
pub(crate) async fn serve(listener: TcpListener, door: Door, shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(DOOR_CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            () = shared.stopping.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((tcp, _)) = accepted else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Ok(place) = places.clone().try_acquire_owned() else {
            shared.refuse("door_connections");
            continue;
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let response = answer(&request, door, &shared);
                async move { Ok::<_, Infallible>(response) }
            });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD);
            if let Err(e) = http.serve_connection(TokioIo::new(tcp), service).await {
                tracing::debug!(error = %e, "a connection to the admin or metrics port broke");
            }
            drop(place);
        });
    }
}

fn answer(request: &Request<Incoming>, door: Door, shared: &Shared) -> Response<Full<Bytes>> {
    if request.method() != Method::GET {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET is answered here\n".into());
    }
    match (request.uri().path(), door) {
        ("/metrics" | "/stats/prometheus", _) => text(StatusCode::OK, shared.metrics.render(&gauges(shared))),
        // The controller listens only once all its sources were read.
        ("/healthz/ready", _) => text(StatusCode::OK, "ready\n".into()),
        ("/config_dump", Door::Admin) => {
            let catalog = shared.catalog.borrow().clone();
            let only = request.uri().query().and_then(|q| q.split('&').find_map(|p| p.strip_prefix("tenant=")));
            let subscribers = shared.subscribers.list(&catalog, |_| true);
            let mut response = text(StatusCode::OK, format!("{:#}\n", dump::catalog(&catalog, only, &subscribers)));
            response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
            response
        }
        ("/", Door::Admin) => text(StatusCode::OK, "canal-controller\n/config_dump[?tenant=NAME]\n/metrics\n/healthz/ready\n".into()),
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

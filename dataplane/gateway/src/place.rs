//! Phase *place*: whether there is room for a request (or a connection) now, and where it goes: its places among those in flight, then the
//! endpoints that may serve it. Look-ups in one snapshot, inside one tenant; nothing is sent and no endpoint is chosen.

use std::rc::Rc;

use canal_model::program::Tunnel;
use canal_router::{Request, normalize_path};

use crate::account::Admission;
use crate::changes::Changes;
use crate::destination::Resolved;
use crate::endpoints::{SetView, Target};
use crate::fault::Fault;
use crate::finish::{Record, Texts};
use crate::session::Session;
use crate::snapshot::{PortView, Snapshot, TenantTls, Way};
use crate::worker::Worker;

/// What has its place: until it is dropped it counts among what its tenant and the worker have in flight.
pub(crate) struct Placed {
    pub(crate) view: Rc<SetView>,
    pub(crate) resolved: Rc<Resolved>,
    /// The gateway's identity in the tenant, where an endpoint is reached by tunnel.
    pub(crate) tls: Option<TenantTls>,
    /// Of the tenant's policies, not newer than those that judge it.
    pub(crate) version: u64,
    /// The path in its normal form, where a route looked at the path and it was sent in another form.
    pub(crate) normal: Option<Box<Changes>>,
    _admission: Admission,
}

impl Placed {
    fn new(session: &Session, snapshot: &Snapshot, view: Rc<SetView>, resolved: Rc<Resolved>, admission: Admission) -> Self {
        // Only new tunnels need it: cloned lazily would be cheaper still, but the snapshot must not be held.
        let tunnelled = view.set.endpoints.iter().any(|e| e.workload.tunnel == Tunnel::Hbone);
        let tls = if tunnelled { snapshot.tenant(session.account.tenant.as_str()).and_then(|t| t.tls.clone()) } else { None };
        Self { view, resolved, tls, version: session.account.policy_version.get(), normal: None, _admission: admission }
    }
}

/// Finds a request its place. Names the service in the record, also for what goes nowhere.
pub(crate) fn request<R: Request>(worker: &Worker, session: &Session, request: &R, record: &mut Record) -> Result<Placed, Fault> {
    if let Some(hook) = worker.shared.config.request_hook {
        hook(request.path());
    }
    let (snapshot, resolved) = session.resolve(worker)?;
    // Room first, so that a flood costs no look-ups among routes.
    let mut normal = None;
    let placed = session
        .throttle(worker)
        .and_then(|()| admit(worker, session, &resolved))
        .and_then(|admission| Ok((decide(worker, &snapshot, &resolved, request, record.texts.as_mut(), &mut normal)?, admission)));
    match placed {
        Ok((view, admission)) => {
            record.target = Some((view.clone(), None));
            Ok(Placed { normal, ..Placed::new(session, &snapshot, view, resolved, admission) })
        }
        Err(fault) => {
            record.target = resolved.own(&worker.upstreams, &snapshot).map(|view| (view, None));
            Err(fault)
        }
    }
}

/// Finds bytes that are not requests their place: at the destination's own endpoints. A fault comes with what counters name.
pub(crate) fn connection(worker: &Worker, session: &Session) -> Result<Placed, (Fault, Target)> {
    let (snapshot, resolved) = session.resolve(worker).map_err(|fault| (fault, None))?;
    let view = resolved.own(&worker.upstreams, &snapshot).ok_or((Fault::NoService, None))?;
    let admission = admit(worker, session, &resolved).map_err(|fault| (fault, Some((view.clone(), None))))?;
    Ok(Placed::new(session, &snapshot, view, resolved, admission))
}

/// The tenant check, and room among what the tenant and the worker have in flight.
fn admit(worker: &Worker, session: &Session, resolved: &Resolved) -> Result<Admission, Fault> {
    // Look-ups are made inside the tenant; this says so once more, where a mistake would otherwise become a leak.
    if resolved.tenant() != session.account.tenant.as_str() {
        return Err(Fault::NoService);
    }
    session.establish();
    worker.limits.request(&session.account)
}

/// A request with another path.
struct AtPath<'a, R> {
    request: &'a R,
    path: &'a str,
}

impl<R: Request> Request for AtPath<'_, R> {
    fn host(&self) -> &[u8] {
        self.request.host()
    }
    fn method(&self) -> &[u8] {
        self.request.method()
    }
    fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }
    fn query(&self) -> Option<&[u8]> {
        self.request.query()
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        self.request.header(name, visit);
    }
}

/// The endpoints for one request; `normal` is set to what becomes of its path where routes look at it.
fn decide<R: Request>(
    worker: &Worker,
    snapshot: &Snapshot,
    resolved: &Resolved,
    request: &R,
    texts: Option<&mut Box<Texts>>,
    normal: &mut Option<Box<Changes>>,
) -> Result<Rc<SetView>, Fault> {
    let Resolved::Service { service, port } = resolved else {
        return resolved.own(&worker.upstreams, snapshot).ok_or(Fault::NoService);
    };
    let port: &PortView = &service.ports[*port];
    let slot = match &service.routes {
        Some(routes) if port.routed => {
            // Two readings of one path must not lead to two places.
            if port.routed_by_path
                && let Some(path) = normalize_path(request.path()).map_err(|why| Fault::UnsafePath(why.name()))?
            {
                normal.get_or_insert_default().path = Some(path);
            }
            let (way, rule) = match normal.as_ref().and_then(|changes| changes.path.as_ref()) {
                None => routes.decide(port.port, request, worker.random()),
                Some(path) => routes.decide(port.port, &AtPath { request, path }, worker.random()),
            };
            if let (Some(texts), Some(rule)) = (texts, rule) {
                texts.route = rule.key.to_string();
            }
            match way {
                Way::Slot(slot) => slot,
                Way::Refuse { status, reason } => return Err(Fault::Route { status, reason }),
                Way::Nowhere => return Err(Fault::NoRoute),
            }
        }
        _ => port.slot,
    };
    worker.upstreams.view(snapshot, slot).ok_or(Fault::NoService)
}

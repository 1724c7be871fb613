//! A service's router, and where each backend of its rules goes. Decides per request; resolves names once, when it is built.

use std::sync::Arc;

use canal_model::ids::ServiceKey;
use canal_model::program::{BackendTarget, Labels, RouteAction, RouteRule};
use canal_router::{Action, Limits, Pick, Request, Router, pick};
use hashbrown::HashMap;
use smallvec::SmallVec;

use super::Slot;

/// Status for a backend that belongs to another tenant: the rule's writer could not have meant it.
const FOREIGN_STATUS: u16 = 500;

/// Gives endpoint sets their slots.
pub(super) trait Targets {
    fn slot(&mut self, service: &ServiceKey, port: u16, subset: &Labels) -> Slot;
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Routes {
    router: Router,
    /// By the rule's address, a slot per backend; `None` for one that must not be used.
    slots: HashMap<usize, SmallVec<[Option<Slot>; 2]>, foldhash::fast::RandomState>,
    any_port: bool,
    ports: SmallVec<[u16; 4]>,
}

/// Where a request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Way {
    /// To the endpoints behind the slot.
    Slot(Slot),
    /// Answered here.
    Refuse { status: u16, reason: String },
    /// No rule matches.
    Nowhere,
}

impl Routes {
    /// The routes of one service, and how many faults they have; each is logged and fails closed.
    pub(super) fn build(service: &ServiceKey, rules: &[Arc<RouteRule>], targets: &mut impl Targets) -> (Self, usize) {
        let (router, faults) = Router::build(rules, &Limits::DEFAULT);
        for fault in &faults {
            tracing::warn!(%service, %fault, "a route is broken and answers with an error");
        }
        let mut slots = HashMap::default();
        let (mut any_port, mut ports) = (false, SmallVec::new());
        for rule in router.rules() {
            match rule.parent_port {
                None => any_port = true,
                Some(port) => ports.push(port),
            }
            if let RouteAction::Split(backends) = &rule.action {
                let backends = backends.iter().map(|b| match &b.target {
                    BackendTarget::Service { service: target, port, subset } if target.tenant == service.tenant => {
                        Some(targets.slot(target, *port, subset))
                    }
                    _ => None,
                });
                slots.insert(Arc::as_ptr(rule) as usize, backends.collect());
            }
        }
        ports.sort_unstable();
        ports.dedup();
        (Self { router, slots, any_port, ports }, faults.len())
    }

    /// Whether any rule concerns this port; if not, requests go to the port's own endpoints.
    pub(crate) fn concern(&self, port: u16) -> bool {
        self.any_port || self.ports.binary_search(&port).is_ok()
    }

    /// Whether a rule for this port asks for more of the path than `/`.
    pub(crate) fn reads_path(&self, port: u16) -> bool {
        self.router.reads_path(port)
    }

    /// Where a request to this port goes, and by which rule. `random` shares out weights.
    pub(crate) fn decide<R: Request>(&self, port: u16, request: &R, random: u64) -> (Way, Option<&Arc<RouteRule>>) {
        let Some(found) = self.router.find(port, request) else { return (Way::Nowhere, None) };
        let refuse = |status: u16, reason: &str| Way::Refuse { status, reason: reason.to_string() };
        let way = match found.action() {
            Action::Refuse { status, reason } => refuse(status, reason),
            Action::Split(split) => match pick(split, random) {
                Pick::Refuse { status, reason } => refuse(status, reason),
                Pick::Backend { place, .. } => {
                    let known = self.slots.get(&(Arc::as_ptr(found.rule()) as usize)).and_then(|s| *s.get(place)?);
                    known.map_or_else(|| refuse(FOREIGN_STATUS, "the backend is another tenant's service"), Way::Slot)
                }
            },
        };
        (way, Some(found.rule()))
    }

    pub(crate) fn rule_count(&self) -> usize {
        self.router.rule_count()
    }
}

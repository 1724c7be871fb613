//! A service's router, with the endpoint set of each backend of its rules. It decides per request; names are resolved once, when it is
//! built.
//!
//! Start with [`ServiceRoutes::decide`].

use std::sync::Arc;

use canal_model::ids::ServiceKey;
use canal_model::program::{BackendTarget, Labels, RouteAction, RouteRule};
use canal_model::route_table::RouteTable;
use canal_router::{BackendChoice, RoutableRequest, RouteDecision, Router, RouterLimits, pick};
use hashbrown::HashMap;
use smallvec::SmallVec;

use super::EndpointSetId;

/// Status for a backend that belongs to another tenant, which the author of the rule cannot have intended.
const FOREIGN_STATUS: u16 = 500;

/// Assigns IDs to endpoint sets.
pub(super) trait TargetResolver {
    fn slot(&mut self, service: &ServiceKey, port: u16, subset: &Labels) -> EndpointSetId;
}

/// Routes of one service, resolved to endpoint sets.
#[derive(Debug)]
pub struct ServiceRoutes {
    router: Router,
    /// Endpoint set ID of each backend, by the rule's address; `None` for a backend that must not be used.
    slots: HashMap<usize, SmallVec<[Option<EndpointSetId>; 2]>, foldhash::fast::RandomState>,
    any_port: bool,
    ports: SmallVec<[u16; 4]>,
}

/// Result of routing a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteOutcome {
    /// The request goes to this endpoint set.
    Slot(EndpointSetId),
    /// The gateway responds with an error.
    Refuse { status: u16, reason: String },
    /// No rule matches the request.
    Nowhere,
}

impl ServiceRoutes {
    /// Builds the routes of one service. Also returns the number of broken matches; each is logged and fails closed.
    pub(super) fn build(service: &ServiceKey, rules: &RouteTable, targets: &mut impl TargetResolver) -> (Self, usize) {
        let (router, faults) = Router::build(rules, &RouterLimits::DEFAULT);
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
                    // A backend of another tenant gets no ID, so requests that select it are refused.
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

    /// True if a rule applies to this port; otherwise requests go to the port's own endpoints.
    pub fn concern(&self, port: u16) -> bool {
        self.any_port || self.ports.binary_search(&port).is_ok()
    }

    /// True if a rule for this port matches more of the path than `/`.
    pub fn reads_path(&self, port: u16) -> bool {
        self.router.reads_path(port)
    }

    /// Routes a request to this port, and returns the rule that matched. `random` selects among weighted backends.
    pub fn decide<R: RoutableRequest>(&self, port: u16, request: &R, random: u64) -> (RouteOutcome, Option<&Arc<RouteRule>>) {
        let Some(found) = self.router.find(port, request) else { return (RouteOutcome::Nowhere, None) };
        let refuse = |status: u16, reason: &str| RouteOutcome::Refuse { status, reason: reason.to_string() };
        let way = match found.action() {
            RouteDecision::Refuse { status, reason } => refuse(status, reason),
            RouteDecision::Split(split) => match pick(split, random) {
                BackendChoice::Refuse { status, reason } => refuse(status, reason),
                BackendChoice::Backend { place, .. } => {
                    let known = self.slots.get(&(Arc::as_ptr(found.rule()) as usize)).and_then(|s| *s.get(place)?);
                    known.map_or_else(|| refuse(FOREIGN_STATUS, "the backend is another tenant's service"), RouteOutcome::Slot)
                }
            },
        };
        (way, Some(found.rule()))
    }

    pub fn rule_count(&self) -> usize {
        self.router.rule_count()
    }
}

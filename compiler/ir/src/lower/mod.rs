//! Lowers the IR to the programs of data planes. [`tenant`] makes all resources of a tenant once,
//! and the controller keeps them encoded. [`gateway`], [`node`], [`edge`] and [`key_server`] return
//! what one subscriber is sent of them. The targets do not depend on each other.
//!
//! A program is `(IR, scope) → resources`. `scope` decides which resource a subscriber receives,
//! here and in the controller's streams, so that goldens and `tests/differential` test the shipped
//! decision; a test of the controller compares the two
//! (`control/southbound/src/subscriber_stream/tests/lowering.rs`). A program has only resources
//! that the compiler makes. The controller adds its own: addresses and bucket tables of the
//! planner, replicas, trust bundles, entitlements of gateways, and manifests.
//!
//! `target` is the interface by which a target refuses rules that it cannot run.

mod edge;
mod gateway;
mod key_server;
mod node;
mod target;
mod tenant;

pub use edge::edge;
pub use gateway::{GatewayRuleTarget, gateway};
pub use key_server::key_server;
pub use node::{NodeRuleTarget, node};
pub use target::{
    PlacementLimits, PortRule, RefusalReason, RuleTarget, TARGETS, TargetName, last_target,
};
pub use tenant::{precedes_routes, tenant};

use canal_model::ids::{BackendName, ReplicaName};
use canal_model::principal::Principal;
use canal_model::program::Resource;

use crate::ir::Ir;
use crate::scope::{self, BackendScope, TierPlacement};

/// Returns a placement with all services of the tenant on one backend, whose only replica is
/// `replica`: the scope of a program that is evaluated without a planner.
pub fn placement_on(ir: &Ir, replica: &ReplicaName, backend: &BackendName) -> TierPlacement {
    let services = ir.services.values().map(|service| service.service.id);
    let gateways = ir.ingress.iter().filter_map(|gateway| gateway.id);
    let scope = BackendScope {
        tenants: [ir.tenant.name.clone()].into(),
        services: services.chain(gateways).collect(),
    };
    TierPlacement {
        replicas: [(replica.clone(), backend.clone())].into(),
        backends: [(backend.clone(), scope)].into(),
    }
}

/// Returns what `principal` is sent of the tenant's resources: parents first, sorted by name within
/// a kind.
fn program(ir: &Ir, principal: &Principal, placement: &TierPlacement) -> Vec<Resource> {
    if !scope::admits(&ir.claims(), principal, placement) {
        return Vec::new();
    }
    let mut resources = tenant(ir.clone());
    resources.retain(|resource| scope::visible(resource, principal, placement));
    resources
}

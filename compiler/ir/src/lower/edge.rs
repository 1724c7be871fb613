//! Lowers the IR for edges. An edge finds the node behind a pod's address and, with the planner's
//! addresses and tables, the replica of a session. It runs no rule of a service port, so it is no
//! place for rules. It reports resources that do not fit into its maps itself.

use canal_model::ids::{AzName, EdgeName};
use canal_model::principal::Principal;
use canal_model::program::Resource;

use crate::ir::Ir;
use crate::scope::TierPlacement;

/// Returns what the edge `name` of an AZ is sent of the tenant.
pub fn edge(ir: &Ir, name: &EdgeName, az: &AzName, placement: &TierPlacement) -> Vec<Resource> {
    super::program(
        ir,
        &Principal::Edge {
            name: name.clone(),
            az: az.clone(),
        },
        placement,
    )
}

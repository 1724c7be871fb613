//! Lowers the IR for key servers. A key server uses keys for the nodes that run their identities,
//! and sees no traffic.

use canal_model::ids::{AzName, ObjectName};
use canal_model::principal::Principal;
use canal_model::program::Resource;

use crate::ir::Ir;
use crate::scope::TierPlacement;

/// Returns what a key server of the provider is sent of the tenant.
pub fn key_server(
    ir: &Ir,
    name: &ObjectName,
    az: &AzName,
    placement: &TierPlacement,
) -> Vec<Resource> {
    super::program(
        ir,
        &Principal::KeyServer {
            name: name.clone(),
            az: az.clone(),
            tenant: None,
        },
        placement,
    )
}

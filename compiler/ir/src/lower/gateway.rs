//! Lowers the IR for gateways. A gateway selects the service, the rule and the endpoint, and runs
//! every rule.

use canal_model::ids::{AzName, ReplicaName};
use canal_model::principal::Principal;
use canal_model::program::Resource;

use super::target::{PlacementLimits, PortRule, RefusalReason, RuleTarget, TargetName};
use crate::ir::Ir;
use crate::scope::TierPlacement;

/// Returns what the replica `name` is sent of the tenant. It is empty if the replica does not serve
/// the tenant.
pub fn gateway(
    ir: &Ir,
    name: &ReplicaName,
    az: &AzName,
    placement: &TierPlacement,
) -> Vec<Resource> {
    super::program(
        ir,
        &Principal::Gateway {
            name: name.clone(),
            az: az.clone(),
        },
        placement,
    )
}

/// The gateway as a place for rules: the last one, because it runs all of them.
#[derive(Debug, Clone, Copy)]
pub struct GatewayRuleTarget;

impl RuleTarget for GatewayRuleTarget {
    fn name(&self) -> TargetName {
        TargetName::Gateway
    }

    fn limits(&self) -> PlacementLimits {
        PlacementLimits::NONE
    }

    fn refusal(&self, _rule: &PortRule<'_>) -> Option<RefusalReason> {
        None
    }
}

//! Lowers the IR for node proxies.
//!
//! A node proxy sends a connection to a service to a gateway. If the port is direct and policies
//! admit a workload of the node, it sends the connection to a ready workload instead. Of other
//! workloads it receives nothing. It does not parse requests. It authorizes connections to its own
//! workloads as far as that is possible without HTTP.

use canal_model::authorization::{Attribute, Authorization, AuthorizationAction};
use canal_model::ids::{AzName, NodeName};
use canal_model::principal::Principal;
use canal_model::program::{AppProtocol, RateLimit, Resource, TunnelProtocol};

use super::target::{PlacementLimits, PortRule, RefusalReason, RuleTarget, TargetName};
use crate::ir::Ir;
use crate::limits::{
    DIRECT_ENDPOINTS_PER_SERVICE_MAX, DIRECT_ENDPOINTS_PER_TENANT_MAX,
    DIRECT_PORTS_PER_WORKLOAD_MAX,
};
use crate::scope::TierPlacement;

/// Returns what the tenant's node `name` is sent.
pub fn node(ir: &Ir, name: &NodeName, az: &AzName, placement: &TierPlacement) -> Vec<Resource> {
    super::program(
        ir,
        &Principal::Node {
            name: name.clone(),
            tenant: ir.tenant.name.clone(),
            az: az.clone(),
        },
        placement,
    )
}

/// The node proxies of client and server as a place for rules: the direct path between them.
#[derive(Debug, Clone, Copy)]
pub struct NodeRuleTarget;

impl RuleTarget for NodeRuleTarget {
    fn name(&self) -> TargetName {
        TargetName::Node
    }

    fn limits(&self) -> PlacementLimits {
        PlacementLimits {
            endpoints_per_service: DIRECT_ENDPOINTS_PER_SERVICE_MAX,
            endpoints_per_tenant: DIRECT_ENDPOINTS_PER_TENANT_MAX,
            ports_per_workload: DIRECT_PORTS_PER_WORKLOAD_MAX,
        }
    }

    fn refusal(&self, rule: &PortRule<'_>) -> Option<RefusalReason> {
        match rule {
            PortRule::Protocol {
                protocol,
                is_opaque,
            } => (!is_opaque).then_some(RefusalReason::Protocol(*protocol)),
            // Routes apply to HTTP only; on an opaque port they have no effect.
            PortRule::Route(_, AppProtocol::Tcp) => None,
            PortRule::Route(rule, _) => Some(RefusalReason::Route(rule.key.clone())),
            PortRule::Termination(_) => Some(RefusalReason::Termination),
            PortRule::Throttle(throttle) => {
                let limits = [throttle.sessions, throttle.packets, throttle.requests]
                    .iter()
                    .any(|rate| *rate != RateLimit::default());
                limits.then(|| RefusalReason::Throttle(throttle.service.clone()))
            }
            PortRule::LoadBalancer(_) => Some(RefusalReason::LoadBalancer),
            PortRule::Authorization(policy) => authorization_refusal(policy),
            PortRule::Authentication(policy) => {
                Some(RefusalReason::RequestAuthentication(policy.key.clone()))
            }
            PortRule::Endpoint(workload) => {
                let name = || format!("{}/{}", workload.namespace, workload.name);
                (workload.tunnel == TunnelProtocol::None).then(|| RefusalReason::Proxyless(name()))
            }
        }
    }
}

/// Returns whether a node observes the attribute of a connection, that is, whether it comes from
/// the certificate or the addresses.
fn is_seen_by_nodes(attribute: &Attribute) -> bool {
    matches!(
        attribute,
        Attribute::SourcePrincipal
            | Attribute::SourceNamespace
            | Attribute::SourceServiceAccount
            | Attribute::SourceAddress
            | Attribute::DestinationPort
            | Attribute::DestinationAddress
    )
}

/// Returns why nodes cannot evaluate the policy. They also refuse audits and dry runs that depend
/// on attributes which a node cannot observe, because these count their matches. They accept a
/// broken policy: any hop can deny.
fn authorization_refusal(policy: &Authorization) -> Option<RefusalReason> {
    if policy.broken.is_some() {
        return None;
    }
    if matches!(policy.action, AuthorizationAction::Custom(_)) {
        return Some(RefusalReason::Authorizer(policy.key.clone()));
    }
    let lists = policy
        .rules
        .iter()
        .flat_map(|rule| rule.from.iter().chain(&rule.to).chain([&rule.when]));
    let unseen = lists
        .flatten()
        .map(|clause| &clause.attribute)
        .find(|attribute| !is_seen_by_nodes(attribute));
    unseen.map(|attribute| RefusalReason::Attribute(policy.key.clone(), attribute.clone()))
}

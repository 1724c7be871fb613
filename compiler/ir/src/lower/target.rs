//! The interface of a target: a component that can run rules, such as a node or a gateway. It
//! states for each rule of a service port whether it can run the rule, and otherwise the reason. A
//! port goes to the first of [`TARGETS`] that refuses none of its rules (`crate::direct`). This
//! module decides nothing about a rule; the targets do.
//!
//! A further target, such as the kernel, a switch or a NIC, is a module beside `node` that
//! implements [`RuleTarget`]. It is a row of [`TARGETS`] before every target that it offloads. It
//! needs a variant of [`TargetName`], and of [`RefusalReason`] for each reason of its own. `canal
//! explain` then shows what it refuses without more code. A target refuses here what no data plane
//! of its kind can do. A single data plane that cannot store a resource at run time NACKs the
//! resource, or reports it as omitted: see `docs/how-to/add-a-southbound-kind.md`.

use std::fmt;

use canal_model::authorization::{Attribute, Authentication, Authorization, PolicyKey};
use canal_model::ids::ServiceKey;
use canal_model::load_balancing::PortLoadBalancer;
use canal_model::program::{AppProtocol, RouteKey, RouteRule, Throttle, Workload};
use canal_model::trust::Termination;

use super::{GatewayRuleTarget, NodeRuleTarget};
use crate::limits::{
    DIRECT_ENDPOINTS_PER_SERVICE_MAX, DIRECT_ENDPOINTS_PER_TENANT_MAX,
    DIRECT_PORTS_PER_WORKLOAD_MAX,
};
use crate::text_security;

/// All targets, the one nearest to the client first. The last one runs every rule.
pub const TARGETS: [&dyn RuleTarget; 2] = [&NodeRuleTarget, &GatewayRuleTarget];

/// Returns the name of the target that runs every rule.
pub fn last_target() -> TargetName {
    let [.., last] = TARGETS;
    last.name()
}

/// A place where rules of service ports can run.
pub trait RuleTarget {
    /// Returns the name of the target in explanations.
    fn name(&self) -> TargetName;

    /// Returns how much the target can hold.
    fn limits(&self) -> PlacementLimits;

    /// Returns the reason why the target cannot run the rule; `None` if it can.
    fn refusal(&self, rule: &PortRule<'_>) -> Option<RefusalReason>;
}

/// The name of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetName {
    /// The node proxies of client and server, without a gateway between them.
    Node,
    Gateway,
}

/// One rule of a service port, which the target that serves the port must run.
#[derive(Debug, Clone, Copy)]
pub enum PortRule<'a> {
    /// Connections are carried as the port's protocol requires. They are opaque if the port
    /// declares that or its Service requests it.
    Protocol {
        protocol: AppProtocol,
        is_opaque: bool,
    },
    /// Requests on a port of this protocol are routed.
    Route(&'a RouteRule, AppProtocol),
    /// TLS of clients ends before the workload.
    Termination(&'a Termination),
    /// Sessions, packets or requests are limited.
    Throttle(&'a Throttle),
    /// Endpoints are selected by this load balancer, which is not the default.
    LoadBalancer(&'a PortLoadBalancer),
    /// Connections or requests are authorized.
    Authorization(&'a Authorization),
    /// Tokens of requests are verified.
    Authentication(&'a Authentication),
    /// Connections reach this workload.
    Endpoint(&'a Workload),
}

/// Limits of a target. It refuses a port that exceeds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacementLimits {
    /// Maximum number of workloads behind one port.
    pub endpoints_per_service: usize,
    /// Maximum number of workloads with a port on the target.
    pub endpoints_per_tenant: usize,
    /// Maximum number of such ports of one workload.
    pub ports_per_workload: usize,
}

impl PlacementLimits {
    /// A target with these limits holds any number.
    pub const NONE: Self = Self {
        endpoints_per_service: usize::MAX,
        endpoints_per_tenant: usize::MAX,
        ports_per_workload: usize::MAX,
    };
}

/// The reason why a target cannot run a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RefusalReason {
    /// The port is declared HTTP, or not at all, and the Service does not request the direct path.
    Protocol(AppProtocol),
    Route(RouteKey),
    Termination,
    /// A Throttle limits the service, or the whole tenant (`None`).
    Throttle(Option<ServiceKey>),
    /// A DestinationRule sets a load balancer.
    LoadBalancer,
    /// The node of this workload runs no proxy.
    Proxyless(String),
    /// The policy depends on an attribute that the target does not observe.
    Attribute(PolicyKey, Attribute),
    Authorizer(PolicyKey),
    RequestAuthentication(PolicyKey),
    EndpointLimit,
    TenantLimit,
    WorkloadLimit(String),
}

impl TargetName {
    /// Returns the text of the path to a port that this target serves.
    pub fn path(self) -> &'static str {
        match self {
            TargetName::Node => "direct, node to node",
            TargetName::Gateway => "gateway",
        }
    }
}

impl fmt::Display for TargetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TargetName::Node => "node",
            TargetName::Gateway => "gateway",
        })
    }
}

impl fmt::Display for RefusalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RefusalReason::Protocol(AppProtocol::Detect) => {
                f.write_str("the port does not declare its protocol")
            }
            // A port of opaque TCP is never refused for its protocol, so HTTP is left.
            RefusalReason::Protocol(_) => f.write_str("the port is declared HTTP"),
            RefusalReason::Route(key) => {
                write!(f, "{} {}/{} routes it", key.kind, key.namespace, key.name)
            }
            RefusalReason::Termination => f.write_str("TLS ends at the gateway"),
            RefusalReason::Throttle(Some(service)) => write!(
                f,
                "a Throttle limits {}/{}",
                service.namespace, service.name
            ),
            RefusalReason::Throttle(None) => f.write_str("a Throttle limits the whole tenant"),
            RefusalReason::LoadBalancer => {
                f.write_str("a DestinationRule sets a load balancer, which a node does not have")
            }
            RefusalReason::Proxyless(workload) => write!(f, "the node of {workload} runs no proxy"),
            RefusalReason::Attribute(policy, attribute) => {
                write!(
                    f,
                    "{policy} depends on {}, which a node cannot observe",
                    text_security::attribute(attribute)
                )
            }
            RefusalReason::Authorizer(policy) => {
                write!(f, "{policy} calls an authorizer, which a node cannot do")
            }
            RefusalReason::RequestAuthentication(policy) => {
                write!(f, "RequestAuthentication {policy} reads tokens")
            }
            RefusalReason::EndpointLimit => write!(
                f,
                "it has more than {DIRECT_ENDPOINTS_PER_SERVICE_MAX} endpoints"
            ),
            RefusalReason::TenantLimit => write!(
                f,
                "the tenant has more than {DIRECT_ENDPOINTS_PER_TENANT_MAX} direct workloads"
            ),
            RefusalReason::WorkloadLimit(workload) => write!(
                f,
                "{workload} serves more than {DIRECT_PORTS_PER_WORKLOAD_MAX} direct ports"
            ),
        }
    }
}

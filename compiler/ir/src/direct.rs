//! Decides which target serves each service port: nodes without a gateway, or gateways. Pure; it
//! reads the IR. The resulting resources are the [`endpoints`]. The node selects an endpoint among
//! them.
//!
//! A port goes to the first target that refuses none of its rules; `crate::lower` has the targets
//! and their reasons. It is direct if nodes refuse nothing. (1) It is declared opaque, or its
//! Service requests the direct path. (2) Every workload that serves it runs on a node with a node
//! proxy. (3) No policy, limit or termination applies that a node cannot enforce. A client uses the
//! direct path if it is a workload of the tenant on a node, because all of them share one overlay.
//! All other clients use a gateway.

mod audience;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::ControlFlow;

use canal_model::authorization::PolicyTarget;
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::policy::kubernetes::DIRECT_ANNOTATION;
use canal_model::program::{
    AppProtocol, DirectEndpoint, DirectPort, Labels, ServicePort, Workload,
};

use self::audience::Audiences;
use crate::ir::{Ir, ServiceIr};
use crate::lower::{
    PlacementLimits, PortRule, RefusalReason, RuleTarget, TARGETS, TargetName, last_target,
};
use canal_oracle::authorization::{OracleDestination, is_for};

/// The tenant's settings of the direct path.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DirectSettings {
    /// True if the Tenant has `directPath: Off`.
    pub is_off: bool,
    /// Preferences of the Services that have the annotation.
    pub services: BTreeMap<ServiceKey, DirectPreference>,
}

impl DirectSettings {
    /// Returns whether the path to one of the Service's ports may depend on the Service's routes. Ports
    /// that are not opaque need a gateway even without routes, unless the Service requests the direct
    /// path; and opaque ports have no routes.
    pub fn depends_on_routes(&self, service: &ServiceKey) -> bool {
        !self.is_off && self.services.get(service) == Some(&DirectPreference::Wanted)
    }
}

/// A Service's preference for the direct path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectPreference {
    /// The Service requests the direct path, also for ports that are HTTP or undeclared.
    Wanted,
    Refused,
}

/// The path from nodes to a service port: the target that serves the port, and why none that is
/// nearer to the client does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortPath {
    pub target: TargetName,
    /// The first reason that holds; `None` if the target is the nearest one.
    pub reason: Option<PathReason>,
}

/// The reason why a nearer target does not serve a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathReason {
    TenantOff,
    ServiceRefuses,
    /// The nearest target refuses a rule of the port.
    Refusal(RefusalReason),
    /// Policies admit no workload of the client's node. This reason applies to one client, not to
    /// the port.
    NotAdmitted,
}

impl PortPath {
    /// Returns whether nodes serve the port without a gateway.
    pub fn is_direct(&self) -> bool {
        self.target == TargetName::Node
    }
}

impl fmt::Display for PortPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.target.path();
        match &self.reason {
            None => f.write_str(path),
            Some(reason) => write!(f, "{path}: {reason}"),
        }
    }
}

impl fmt::Display for PathReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathReason::TenantOff => f.write_str("the Tenant has directPath: Off"),
            PathReason::ServiceRefuses => write!(
                f,
                "the Service opts out of the direct path ({DIRECT_ANNOTATION})"
            ),
            PathReason::Refusal(reason) => reason.fmt(f),
            PathReason::NotAdmitted => {
                f.write_str("policies admit no workload of the client's node")
            }
        }
    }
}

/// A function that receives refusals one by one, and ends the search for more of them with `Break`.
type RefusalVisitor<'v> = dyn FnMut(RefusalReason) -> ControlFlow<()> + 'v;

/// One service port with the workloads behind it.
#[derive(Clone, Copy)]
struct PortRules<'a, 'w> {
    ir: &'a Ir,
    service: &'a ServiceIr,
    port: &'w ServicePort,
    workloads: &'w [&'a Workload],
}

/// The ports of one target, the policies that it refuses, and the capacity that is used so far.
struct TargetPorts<'a> {
    target: &'static dyn RuleTarget,
    limits: PlacementLimits,
    /// Targets of the policies that it refuses, with the reason.
    policies: Vec<(&'a PolicyTarget, RefusalReason)>,
    /// Indexes of those of them that target workloads of this namespace with these labels.
    refusals_by_labels: HashMap<(&'a Namespace, &'a Labels), Vec<usize>>,
    /// Number of ports of each workload, by uid.
    counts: BTreeMap<String, usize>,
}

impl<'a> TargetPorts<'a> {
    fn new(ir: &'a Ir, target: &'static dyn RuleTarget) -> Self {
        let security = &ir.security;
        let authorizations = security
            .authorizations
            .iter()
            .map(|policy| (&policy.target, PortRule::Authorization(policy)));
        let tokens = security
            .authentications
            .iter()
            .map(|policy| (&policy.target, PortRule::Authentication(policy)));
        let refused = authorizations
            .chain(tokens)
            .filter_map(|(applies, rule)| Some((applies, target.refusal(&rule)?)));
        Self {
            target,
            limits: target.limits(),
            policies: refused.collect(),
            refusals_by_labels: HashMap::new(),
            counts: BTreeMap::new(),
        }
    }

    /// Passes on why the target cannot run the port's rules. The order decides which reason is the
    /// first, which users see.
    fn visit(
        &mut self,
        rules: PortRules<'a, '_>,
        visitor: &mut RefusalVisitor<'_>,
    ) -> ControlFlow<()> {
        self.visit_service(rules, visitor)?;
        self.visit_workloads(rules.workloads, visitor)
    }

    fn first_refusal(&mut self, rules: PortRules<'a, '_>) -> Option<RefusalReason> {
        let mut first = None;
        let _ = self.visit(rules, &mut |reason| {
            first = Some(reason);
            ControlFlow::Break(())
        });
        first
    }

    fn visit_service(
        &self,
        rules: PortRules<'a, '_>,
        visitor: &mut RefusalVisitor<'_>,
    ) -> ControlFlow<()> {
        let PortRules {
            ir, service, port, ..
        } = rules;
        let key = &service.service.key;
        // The annotation requests the direct path for HTTP too, which then passes as opaque bytes.
        let is_opaque = port.protocol == AppProtocol::Tcp
            || ir.direct.services.get(key) == Some(&DirectPreference::Wanted);
        let protocol = PortRule::Protocol {
            protocol: port.protocol,
            is_opaque,
        };
        // A node does not distinguish clients by namespace, so the rules for some keep a gateway for
        // all.
        let routes = service
            .tables()
            .flat_map(|table| table.on_port(port.port))
            .map(|(rule, _)| PortRule::Route(rule, port.protocol));
        let terminations = ir
            .security
            .terminations
            .iter()
            .filter(|t| t.service == *key && t.port == port.port)
            .map(PortRule::Termination);
        let throttles = ir
            .throttles
            .iter()
            // A throttle without a service is one of the whole tenant.
            .filter(|t| t.service.as_ref().is_none_or(|of| of == key))
            .map(PortRule::Throttle);
        let load_balancers = service
            .service
            .load_balancers
            .iter()
            // Connections without a route use no subset, so a subset's load balancer does not
            // matter.
            .filter(|it| it.port == port.port && it.subset.is_empty())
            .map(PortRule::LoadBalancer);
        for rule in std::iter::once(protocol)
            .chain(routes)
            .chain(terminations)
            .chain(throttles)
            .chain(load_balancers)
        {
            self.target
                .refusal(&rule)
                .map_or(ControlFlow::Continue(()), &mut *visitor)?;
        }
        let of_service = OracleDestination {
            workload: None,
            service: Some(key),
        };
        let policies = self
            .policies
            .iter()
            .filter(|(target, _)| is_for(target, &of_service));
        policies
            .map(|(_, reason)| reason.clone())
            .try_for_each(visitor)
    }

    fn visit_workloads(
        &mut self,
        workloads: &[&'a Workload],
        visitor: &mut RefusalVisitor<'_>,
    ) -> ControlFlow<()> {
        if workloads.len() > self.limits.endpoints_per_service {
            visitor(RefusalReason::EndpointLimit)?;
        }
        let mut added = 0;
        for workload in workloads {
            self.target
                .refusal(&PortRule::Endpoint(workload))
                .map_or(ControlFlow::Continue(()), &mut *visitor)?;
            // The policy search is cached by namespace and labels, which many pods have in common.
            let policies = &self.policies;
            let policy_indices = self
                .refusals_by_labels
                .entry((&workload.namespace, &workload.labels))
                .or_insert_with(|| {
                    // `visit_service` has already visited the policies of the service.
                    let destination = OracleDestination {
                        workload: Some((&workload.namespace, &workload.labels)),
                        service: None,
                    };
                    let applies = |(_, (target, _)): &(usize, &(&PolicyTarget, _))| {
                        is_for(target, &destination)
                    };
                    policies
                        .iter()
                        .enumerate()
                        .filter(applies)
                        .map(|(index, _)| index)
                        .collect()
                });
            for index in policy_indices {
                visitor(policies[*index].1.clone())?;
            }
            // A target without limits counts nothing.
            if self.limits == PlacementLimits::NONE {
                continue;
            }
            match self.counts.get(&workload.uid()) {
                Some(count) if *count >= self.limits.ports_per_workload => {
                    visitor(RefusalReason::WorkloadLimit(format!(
                        "{}/{}",
                        workload.namespace, workload.name
                    )))?;
                }
                // A workload counts once against the tenant's limit.
                Some(_) => {}
                None => added += 1,
            }
        }
        if self.limits != PlacementLimits::NONE
            && self.counts.len() + added > self.limits.endpoints_per_tenant
        {
            visitor(RefusalReason::TenantLimit)?;
        }
        ControlFlow::Continue(())
    }

    /// Counts a port that the target serves.
    fn count_port(&mut self, workloads: &[&Workload]) {
        if self.limits != PlacementLimits::NONE {
            workloads
                .iter()
                .for_each(|workload| *self.counts.entry(workload.uid()).or_default() += 1);
        }
    }
}

/// Shared data of all decisions for one tenant.
struct PathDecider<'a> {
    ir: &'a Ir,
    served: HashMap<(&'a ServiceKey, u16), Vec<&'a Workload>>,
    targets: Vec<TargetPorts<'a>>,
}

impl<'a> PathDecider<'a> {
    fn new(ir: &'a Ir) -> Self {
        let mut served: HashMap<_, Vec<&Workload>> = HashMap::new();
        for workload in &ir.workloads {
            for endpoint in &workload.endpoints {
                served
                    .entry((&endpoint.service, endpoint.port))
                    .or_default()
                    .push(workload);
            }
        }
        Self {
            ir,
            served,
            targets: TARGETS
                .into_iter()
                .map(|target| TargetPorts::new(ir, target))
                .collect(),
        }
    }

    /// Places a port on the first target that refuses none of its rules.
    fn decide(&mut self, service: &'a ServiceIr, port: &ServicePort) -> PortPath {
        let key = &service.service.key;
        let mut reason = forbidden(self.ir, key);
        if reason.is_some() {
            return PortPath {
                target: last_target(),
                reason,
            };
        }
        let workloads = self
            .served
            .get(&(key, port.port))
            .map(Vec::as_slice)
            .unwrap_or_default();
        let rules = PortRules {
            ir: self.ir,
            service,
            port,
            workloads,
        };
        for target in &mut self.targets {
            match target.first_refusal(rules) {
                None => {
                    target.count_port(workloads);
                    return PortPath {
                        target: target.target.name(),
                        reason,
                    };
                }
                Some(refusal) => reason = reason.or(Some(PathReason::Refusal(refusal))),
            }
        }
        PortPath {
            target: last_target(),
            reason,
        }
    }
}

/// Returns the user's reason to keep a gateway on all ports of the service.
fn forbidden(ir: &Ir, service: &ServiceKey) -> Option<PathReason> {
    if ir.direct.is_off {
        return Some(PathReason::TenantOff);
    }
    (ir.direct.services.get(service) == Some(&DirectPreference::Refused))
        .then_some(PathReason::ServiceRefuses)
}

/// Returns the reasons for which targets that precede the port's own target refuse it: each reason
/// once, at most `max` of them. It returns none if the path of the port has another cause.
pub fn refusals(
    ir: &Ir,
    service: &ServiceKey,
    port: u16,
    max: usize,
) -> Vec<(TargetName, RefusalReason)> {
    let mut all = Vec::new();
    // An unknown service has no path, and a forbidden direct path is not a target's refusal.
    let Some(own) = ir
        .services
        .get(service)
        .filter(|_| forbidden(ir, service).is_none())
    else {
        return all;
    };
    // An unknown port has no path either.
    let Some(port) = own.service.ports.iter().find(|own| own.port == port) else {
        return all;
    };
    let mut decider = PathDecider::new(ir);
    // A port may have no workload.
    let workloads = decider
        .served
        .get(&(&own.service.key, port.port))
        .cloned()
        .unwrap_or_default();
    let rules = PortRules {
        ir,
        service: own,
        port,
        workloads: &workloads,
    };
    for target in &mut decider.targets {
        let name = target.target.name();
        let before = all.len();
        // Whether the search ended early does not matter: `all` has what it found.
        let _ = target.visit(rules, &mut |reason| {
            if !all.contains(&(name, reason.clone())) {
                all.push((name, reason));
            }
            if all.len() >= max {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        // This target refuses nothing, so it serves the port, and later ones do not matter.
        if all.len() == before {
            break;
        }
    }
    all
}

/// Returns the path of every service port, in order of services and ports.
pub fn paths(ir: &Ir) -> Vec<(ServiceKey, u16, PortPath)> {
    let mut decider = PathDecider::new(ir);
    let mut all = Vec::new();
    for (key, service) in &ir.services {
        for port in &service.service.ports {
            all.push((key.clone(), port.port, decider.decide(service, port)));
        }
    }
    all
}

/// Returns the direct endpoints, one for each ready workload with a direct port, sorted by
/// namespace and name.
pub fn endpoints(ir: &Ir) -> Vec<DirectEndpoint> {
    let direct: BTreeSet<(ServiceKey, u16)> = paths(ir)
        .into_iter()
        .filter(|(.., path)| path.is_direct())
        .map(|(service, port, _)| (service, port))
        .collect();
    if direct.is_empty() {
        return Vec::new();
    }
    let is_direct = |service: &ServiceKey, port: u16| direct.contains(&(service.clone(), port));
    let mut audiences = Audiences::new(ir);
    let ready = ir
        .workloads
        .iter()
        .filter(|workload| workload.ready && !workload.addresses.is_empty());
    ready
        .filter_map(|workload| endpoint(workload, &is_direct, &mut audiences))
        .collect()
}

fn endpoint(
    workload: &Workload,
    is_direct: &dyn Fn(&ServiceKey, u16) -> bool,
    audiences: &mut Audiences<'_>,
) -> Option<DirectEndpoint> {
    let (direct, others): (Vec<_>, Vec<_>) = workload
        .endpoints
        .iter()
        .partition(|e| is_direct(&e.service, e.port));
    // All ports of the workload are reached through gateways.
    if direct.is_empty() {
        return None;
    }
    let serves: BTreeSet<DirectPort> = direct
        .iter()
        .map(|e| DirectPort {
            service: e.service.clone(),
            port: e.port,
        })
        .collect();
    // A port that is also served through a gateway must not be dialled by the pod's address: that
    // would bypass the gateway.
    let guarded: BTreeSet<u16> = others.iter().map(|e| e.target_port).collect();
    let own_ports: BTreeSet<u16> = direct
        .iter()
        .map(|e| e.target_port)
        .filter(|port| !guarded.contains(port))
        .collect();
    let by_service = direct.iter().map(|e| (Some(&e.service), e.target_port));
    let access_paths: Vec<(Option<&ServiceKey>, u16)> = by_service
        .chain(own_ports.iter().map(|port| (None, *port)))
        .collect();
    Some(DirectEndpoint {
        tenant: workload.tenant.clone(),
        namespace: workload.namespace.clone(),
        name: workload.name.clone(),
        service_account: workload.service_account.clone(),
        az: workload.az.clone(),
        addresses: workload.addresses.clone(),
        serves: serves.into_iter().collect(),
        own_ports,
        audience: audiences.of(workload, &access_paths),
    })
}

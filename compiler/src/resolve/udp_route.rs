//! Resolves UDPRoutes on Services (Gateway API, mesh): the UDP ports of Services that they name.
//! The pods behind these ports then accept datagrams from the tier. `workload` selects the pods. A
//! route that cannot be parsed opens no port.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{ServiceKey, TenantName};
use canal_model::policy::Document;
use canal_model::policy::gateway_api::{BackendRef, ParentRef, UdpRoute};
use canal_model::policy::kubernetes::{self, Transport};
use canal_model::program::Service;

use super::destination::is_granted;
use super::route_fields::{FieldIssue, parent_service};
use super::tenant_objects::{Sourced, TenantObjects};
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{
    BACKENDS_PER_RULE_MAX, PORTS_PER_SERVICE_MAX, RULES_PER_ROUTE_MAX, WEIGHT_MAX,
};

/// A UDP port of a Service that a route names, with the position of the reference.
pub(crate) struct RoutedUdpPort<'a> {
    pub(crate) service: &'a Sourced<'a, kubernetes::Service>,
    pub(crate) written: &'a kubernetes::ServicePort,
    pub(crate) document: &'a Document,
    pub(crate) field: String,
}

/// The objects that UDPRoutes may refer to.
struct UdpReferences<'a> {
    tenant: &'a TenantName,
    corpus: &'a TenantObjects<'a>,
    /// Services that the mesh serves, by key.
    services: BTreeMap<ServiceKey, &'a Sourced<'a, kubernetes::Service>>,
}

/// Returns each port once; ports of older routes come first.
pub(crate) fn resolve<'a>(
    tenant: &'a TenantName,
    corpus: &'a TenantObjects<'a>,
    services: &BTreeMap<ServiceKey, Service>,
    report: &mut DiagnosticCollector,
) -> Vec<RoutedUdpPort<'a>> {
    let known = UdpReferences::new(tenant, corpus, services);
    let (mut named, mut seen) = (Vec::new(), BTreeSet::new());
    for route in &corpus.udp_routes {
        let found = ports(route, &known, report);
        if !found.is_empty() {
            let problem = "the cloud tier does not carry datagrams in this version; this route only opens the pods' ports to datagrams from the tier's addresses";
            report.warning(
                Code::DatagramsNotCarried,
                route.document,
                "spec.rules",
                problem,
                "let clients use TCP, or wait for a version that carries them",
            );
        }
        for (key, port) in found {
            if seen.insert((key, port.written.port)) {
                named.push(port);
            }
        }
    }
    named
}

/// Returns the ports of one route. There are none if the route has no valid parent or is broken as
/// a whole.
fn ports<'a>(
    route: &Sourced<'a, UdpRoute>,
    known: &UdpReferences<'a>,
    report: &mut DiagnosticCollector,
) -> Vec<(ServiceKey, RoutedUdpPort<'a>)> {
    let spec = &route.object.spec;
    let is_attached = is_attached(route, known, report);
    // A fault outside the rules may have restricted each of them, so the route opens no port.
    let is_broken = route
        .document
        .faults
        .iter()
        .any(|f| f.field.starts_with("spec") && !f.field.starts_with("spec.rules["));
    // Too many rules open no port: which ones are open must not depend on their order.
    if spec.rules.len() > RULES_PER_ROUTE_MAX {
        let problem = format!(
            "the route has {} rules, more than {RULES_PER_ROUTE_MAX}; it opens no port",
            spec.rules.len()
        );
        report.refuse_excess(route.document, "spec.rules", problem, "split the route");
        return Vec::new();
    }
    // If the field could not be parsed, its fault is reported already.
    if spec.rules.is_empty() && route.fault("spec.rules").is_none() {
        report.error(
            Code::RuleWithoutBackend,
            route.document,
            "spec.rules",
            "the route has no rule, so it opens no port",
            "write a rule with backendRefs",
        );
    }
    let mut found = Vec::new();
    for (at, rule) in spec.rules.iter().enumerate() {
        let field = format!("spec.rules[{at}]");
        let backends = &rule.backend_refs;
        let is_faulty = route
            .document
            .faults
            .iter()
            // The dot keeps `rules[1]` apart from `rules[10]`.
            .any(|f| f.field.starts_with(&format!("{field}.")) || f.field == field);
        if !has_fitting_backends(route, (&field, backends), is_faulty, report) {
            continue;
        }
        for (number, backend) in backends.iter().enumerate() {
            let field = format!("{field}.backendRefs[{number}]");
            // References are resolved even if the route is broken, so that all errors are reported.
            match known.backend(route, backend) {
                Ok(_) if is_faulty || is_broken || !is_attached => {}
                Ok((key, service, written)) => found.push((
                    key,
                    RoutedUdpPort {
                        service,
                        written,
                        document: route.document,
                        field,
                    },
                )),
                Err(issue) => {
                    report.error(
                        issue.code,
                        route.document,
                        format!("{field}.{}", issue.field),
                        issue.problem,
                        issue.fix,
                    );
                }
            }
        }
    }
    found
}

/// Checks the number of backends of the rule at `field`. Returns false if they are too many.
fn has_fitting_backends(
    route: &Sourced<'_, UdpRoute>,
    (field, backends): (&str, &[BackendRef]),
    is_faulty: bool,
    report: &mut DiagnosticCollector,
) -> bool {
    let field = format!("{field}.backendRefs");
    if backends.len() > BACKENDS_PER_RULE_MAX {
        let problem = format!(
            "the rule has {} backends, more than {BACKENDS_PER_RULE_MAX}; it opens no port",
            backends.len()
        );
        report.refuse_excess(route.document, field, problem, "split the rule");
        return false;
    }
    // The fault of a faulty rule is reported already.
    if backends.is_empty() && !is_faulty {
        let problem = "the rule has no backend, so it opens no port";
        let fix = "name a Service and its UDP port";
        report.error(
            Code::RuleWithoutBackend,
            route.document,
            field,
            problem,
            fix,
        );
    }
    true
}

fn is_attached(
    route: &Sourced<'_, UdpRoute>,
    known: &UdpReferences<'_>,
    report: &mut DiagnosticCollector,
) -> bool {
    let refs = &route.object.spec.parent_refs;
    if refs.is_empty() && route.fault("spec.parentRefs").is_none() {
        let fix = "name a Service with group: \"\" and kind: Service";
        report.error(
            Code::RouteWithoutParent,
            route.document,
            "spec.parentRefs",
            "the route is attached to no Service",
            fix,
        );
    }
    let mut is_attached = false;
    for (at, written) in refs.iter().enumerate() {
        match known.parent(route, written) {
            Ok(()) => is_attached = true,
            Err(issue) => {
                let field = format!("spec.parentRefs[{at}].{}", issue.field);
                report.error(issue.code, route.document, field, issue.problem, issue.fix);
            }
        }
    }
    is_attached
}

impl<'a> UdpReferences<'a> {
    fn new(
        tenant: &'a TenantName,
        corpus: &'a TenantObjects<'a>,
        services: &BTreeMap<ServiceKey, Service>,
    ) -> Self {
        let all = corpus.services.iter().map(|sourced| {
            let metadata = &sourced.object.metadata;
            (
                ServiceKey {
                    tenant: tenant.clone(),
                    namespace: metadata.namespace.clone(),
                    name: metadata.name.clone(),
                },
                sourced,
            )
        });
        Self {
            tenant,
            corpus,
            services: all.filter(|(key, _)| services.contains_key(key)).collect(),
        }
    }

    fn find(&self, key: &ServiceKey) -> Result<&'a Sourced<'a, kubernetes::Service>, FieldIssue> {
        self.services.get(key).copied().ok_or_else(|| {
            let problem = format!("there is no Service {}/{}", key.namespace, key.name);
            FieldIssue::new("name", problem, "create it or correct the name")
                .with_code(Code::UnresolvedBackend)
        })
    }

    fn parent(&self, route: &Sourced<'_, UdpRoute>, written: &ParentRef) -> Result<(), FieldIssue> {
        let own = &route.object.metadata.namespace;
        let key = parent_service(self.tenant, own, written)?;
        // The ports of pods are open to all clients or to none.
        if key.namespace != *own {
            let problem = format!(
                "a UDPRoute for clients of only one namespace (here {own}) is not supported in this version"
            );
            let fix = format!(
                "move the route to the Service's namespace {}; it then applies to all clients",
                key.namespace
            );
            return Err(FieldIssue::new("namespace", problem, fix).with_code(Code::OtherNamespace));
        }
        let service = self.find(&key)?;
        let number = written.port.map(std::num::NonZeroU16::get);
        let port = udp_port(&key, service, number)?;
        let Some(name) = &written.section_name else {
            return Ok(());
        };
        let mut ports = service.object.spec.ports.iter();
        let is_meant = |p: &kubernetes::ServicePort| {
            p.protocol == Transport::Udp && p.name == *name && (number.is_none() || p == port)
        };
        if ports.any(is_meant) {
            return Ok(());
        }
        let problem = format!(
            "Service {}/{} has no port named {name:?} that is UDP",
            key.namespace, key.name
        );
        Err(FieldIssue::new(
            "sectionName",
            problem,
            "name a UDP port of the Service, or remove the field",
        )
        .with_code(Code::ParentPortNotFound))
    }

    /// Resolves a backendRef to a Service and its port.
    fn backend(
        &self,
        route: &Sourced<'_, UdpRoute>,
        backend: &BackendRef,
    ) -> Result<
        (
            ServiceKey,
            &'a Sourced<'a, kubernetes::Service>,
            &'a kubernetes::ServicePort,
        ),
        FieldIssue,
    > {
        // Services are in Kubernetes' core group, whose name is empty.
        if !backend.group.is_empty() || backend.kind != "Service" {
            let problem = format!(
                "backends of kind {:?} are not supported in this version",
                backend.kind
            );
            return Err(FieldIssue::new("kind", problem, "refer to a Service")
                .with_code(Code::UnsupportedBackend));
        }
        let own = &route.object.metadata.namespace;
        let namespace = backend.namespace.as_ref().unwrap_or(own);
        let key = ServiceKey {
            tenant: self.tenant.clone(),
            namespace: namespace.clone(),
            name: backend.name.clone(),
        };
        // The grant is checked before the lookup: a namespace without a grant must not learn
        // whether the service exists.
        if namespace != own && !is_granted(&self.corpus.grants, "UDPRoute", own, &key) {
            let problem = format!(
                "namespace {namespace} does not allow UDPRoutes of {own} to refer to Service {}",
                backend.name
            );
            let fix = format!(
                "write a ReferenceGrant in {namespace} from UDPRoutes in {own} to that Service"
            );
            return Err(
                FieldIssue::new("namespace", problem, fix).with_code(Code::BackendNotPermitted)
            );
        }
        let service = self.find(&key)?;
        let Some(port) = backend.port else {
            return Err(FieldIssue::new(
                "port",
                "a Service backend needs a port",
                "write the Service's port",
            )
            .with_code(Code::MissingField));
        };
        // Weights choose nothing here. What Gateway API refuses is refused all the same.
        if backend.weight > WEIGHT_MAX {
            return Err(FieldIssue::new(
                "weight",
                format!("{} is more than {WEIGHT_MAX}", backend.weight),
                "use smaller shares",
            )
            .with_code(Code::LimitExceeded));
        }
        let written = udp_port(&key, service, Some(port.get()))?;
        Ok((key, service, written))
    }
}

/// Returns the Service's UDP port with this number, or its first one. A Service that cannot be
/// supported as written has no ports.
fn udp_port<'a>(
    key: &ServiceKey,
    service: &'a Sourced<'a, kubernetes::Service>,
    port: Option<u16>,
) -> Result<&'a kubernetes::ServicePort, FieldIssue> {
    let spec = &service.object.spec;
    let is_whole = service.fault("spec").is_none() && spec.ports.len() <= PORTS_PER_SERVICE_MAX;
    let mut all = spec
        .ports
        .iter()
        .filter(|p| is_whole && p.protocol == Transport::Udp);
    let known: Vec<String> = all.clone().map(|p| p.port.to_string()).collect();
    all.find(|p| port.is_none_or(|port| p.port.get() == port))
        .ok_or_else(|| {
            let number = port.map(|port| format!(" {port}")).unwrap_or_default();
            let problem = format!(
                "Service {}/{} has no UDP port{number}",
                key.namespace, key.name
            );
            let fix = match (is_whole, known.is_empty()) {
                (false, _) => "fix the Service".to_owned(),
                (true, true) => "write protocol: UDP at a port of the Service".to_owned(),
                (true, false) => format!("use {}", known.join(" or ")),
            };
            FieldIssue::new(if port.is_some() { "port" } else { "name" }, problem, fix)
                .with_code(Code::BackendPortNotFound)
        })
}

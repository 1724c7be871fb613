//! Resolves Services: virtual addresses, ports and their protocols. `workload` resolves the
//! endpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::ServiceKey;
use canal_model::policy::kubernetes::{
    self, ClusterIp, POLICY_PATHS_ANNOTATION, ServiceType, SessionAffinity, Transport,
    UPSTREAM_POOL_ANNOTATION,
};
use canal_model::program::{AppProtocol, PolicyPaths, Service, ServicePort, UpstreamPool};

use super::addresses::AddressOwners;
use super::tenant_objects::Sourced;
use crate::CompileInput;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::PORTS_PER_SERVICE_MAX;
use crate::names::hostname;
use crate::protocol::{DeclaredProtocol, declared_protocol};

pub(crate) fn resolve(
    input: &CompileInput<'_>,
    declared: &[Sourced<'_, kubernetes::Service>],
    addresses: &mut AddressOwners,
    report: &mut DiagnosticCollector,
) -> BTreeMap<ServiceKey, Service> {
    let mut services = BTreeMap::new();
    for service in declared {
        let metadata = &service.object.metadata;
        let key = ServiceKey {
            tenant: input.tenant.clone(),
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone(),
        };
        // With dots, the short name could be `name.namespace` of another Service.
        if !key.name.is_label() {
            report.error(
                Code::InvalidServiceName,
                service.document,
                "metadata.name",
                format!(
                    "{:?} cannot name a Service: it is not one label of a host name",
                    key.name.as_str()
                ),
                "use 1 to 63 lower-case letters, digits and '-', without dots",
            );
            continue;
        }
        if service.object.spec.kind == ServiceType::ExternalName {
            report.warning(
                Code::UnsupportedServiceType,
                service.document,
                "spec.type",
                "names outside the mesh are not supported in this version; routes to the Service answer 500",
                "use ClusterIP, or let clients dial the name itself",
            );
            continue;
        }
        let Some(id) = input.service_ids.get(&key).copied() else {
            let problem = "all 16,777,215 service IDs are taken, so the service has none";
            report.error(
                Code::ServiceIdsExhausted,
                service.document,
                "",
                problem,
                "remove services that are not needed",
            );
            continue;
        };
        // A Service that was left out above claims no address.
        let vips = vips(service, addresses, report);
        let ports = ports(service, report);
        let (upstream_pool, policy_paths) = (
            upstream_pool(service, report),
            policy_paths(service, report),
        );
        services.insert(
            key.clone(),
            Service {
                id,
                hostname: hostname(&key),
                key,
                vips,
                ports,
                upstream_pool,
                policy_paths,
                load_balancers: Vec::new(),
            },
        );
    }
    services
}

fn upstream_pool(
    service: &Sourced<'_, kubernetes::Service>,
    report: &mut DiagnosticCollector,
) -> UpstreamPool {
    let values = [
        ("shared", UpstreamPool::Shared),
        ("per-client", UpstreamPool::PerClient),
    ];
    annotated(
        service,
        UPSTREAM_POOL_ANNOTATION,
        values,
        "is not a valid pool mode; clients share connections",
        report,
    )
}

fn policy_paths(
    service: &Sourced<'_, kubernetes::Service>,
    report: &mut DiagnosticCollector,
) -> PolicyPaths {
    let values = [
        ("strict", PolicyPaths::Strict),
        ("legacy", PolicyPaths::Legacy),
    ];
    let problem =
        "is not a valid path mode; policies refuse path parameters and escapes that are not UTF-8";
    annotated(service, POLICY_PATHS_ANNOTATION, values, problem, report)
}

/// Returns the value of an annotation: the first one if it is not set, or set to something else,
/// which is a warning.
fn annotated<T>(
    service: &Sourced<'_, kubernetes::Service>,
    annotation: &str,
    [unset, other]: [(&str, T); 2],
    problem: &str,
    report: &mut DiagnosticCollector,
) -> T {
    match service.object.metadata.annotations.get(annotation) {
        Some(text) if text == other.0 => other.1,
        Some(text) if text != unset.0 => {
            let fix = format!("write {}, or {}", other.0, unset.0);
            report.warning(
                Code::InvalidAnnotation,
                service.document,
                format!("metadata.annotations[{annotation:?}]"),
                format!("{text:?} {problem}"),
                fix,
            );
            unset.1
        }
        _ => unset.1,
    }
}

fn vips(
    service: &Sourced<'_, kubernetes::Service>,
    addresses: &mut AddressOwners,
    report: &mut DiagnosticCollector,
) -> Vec<IpAddr> {
    let spec = &service.object.spec;
    let one = [spec.cluster_ip];
    let (field, written): (_, &[ClusterIp]) = if spec.cluster_ips.is_empty() {
        ("spec.clusterIP", &one)
    } else {
        ("spec.clusterIPs", &spec.cluster_ips)
    };
    let key = service.document.object.key();
    let mut vips = Vec::new();
    for (at, cluster_ip) in written.iter().enumerate() {
        // `None` and an unset address are handled below.
        let ClusterIp::Address(address) = cluster_ip else {
            continue;
        };
        let place = if spec.cluster_ips.is_empty() {
            field.to_owned()
        } else {
            format!("{field}[{at}]")
        };
        match addresses.claim(*address, &key) {
            // The same address twice in one Service is harmless.
            Ok(()) if vips.contains(address) => {}
            Ok(()) => vips.push(*address),
            Err(problem) => report.error(
                Code::AddressConflict,
                service.document,
                place,
                problem,
                "give every service an address of its own",
            ),
        }
    }
    // `None` is a headless Service, which needs no address.
    let is_unset = written
        .iter()
        .all(|cluster_ip| *cluster_ip == ClusterIp::Unset);
    // An address that could not be parsed has a diagnostic already.
    if is_unset && service.fault("spec.clusterIP").is_none() {
        let fix = "write spec.clusterIPs, or clusterIP: None if clients dial the pods themselves";
        report.warning(
            Code::ServiceWithoutAddress,
            service.document,
            "spec.clusterIPs",
            "the service has no address, so no client can dial it",
            fix,
        );
    }
    vips
}

/// Returns whether a fault leaves the port in the list. A port without a number is not in it, so
/// that the indexes of those behind it differ from the written ones.
fn is_within_port(field: &str) -> bool {
    field.starts_with("spec.ports[") && !field.ends_with(']') && !field.ends_with("].port")
}

/// Resolves the ports. A port that cannot be supported as written is left out: the address refuses
/// it. A fault outside the ports may concern all of them.
fn ports(
    service: &Sourced<'_, kubernetes::Service>,
    report: &mut DiagnosticCollector,
) -> Vec<ServicePort> {
    let spec = &service.object.spec;
    if spec.session_affinity == SessionAffinity::ClientIP {
        report.warning(
                Code::IgnoredField,
            service.document,
            "spec.sessionAffinity",
            "session affinity is not supported in this version; a client's connections are balanced like others",
            "keep it for a version that does it, or write None",
        );
    }
    let mut faults = service.document.faults.iter();
    if faults.any(|f| f.field.starts_with("spec") && !is_within_port(&f.field)) {
        return Vec::new();
    }
    if spec.ports.len() > PORTS_PER_SERVICE_MAX {
        let problem = format!(
            "the service has {} ports, more than {PORTS_PER_SERVICE_MAX}",
            spec.ports.len()
        );
        report.refuse_excess(service.document, "spec.ports", problem, "split the service");
        return Vec::new();
    }
    let mut seen = BTreeSet::new();
    let mut ports = Vec::new();
    for (at, written) in spec.ports.iter().enumerate() {
        let field = format!("spec.ports[{at}]");
        // The fault has been reported, and what the port would be is unknown.
        if service.fault(&field).is_some() {
            continue;
        }
        if written.protocol != Transport::Tcp {
            let problem = format!(
                "port {} is not TCP; the mesh does not carry it",
                written.port
            );
            report.warning(
                Code::PortNotCarried,
                service.document,
                format!("{field}.protocol"),
                problem,
                "write outboundTrafficPolicy: Passthrough, if clients may reach it past the mesh",
            );
            continue;
        }
        if !seen.insert(written.port) {
            report.error(
                Code::DuplicatePort,
                service.document,
                format!("{field}.port"),
                format!("port {} is given twice", written.port),
                "remove one of them",
            );
            continue;
        }
        let protocol = match declared_protocol(written.app_protocol.as_deref(), &written.name) {
            DeclaredProtocol::Known(protocol) => protocol,
            DeclaredProtocol::Unknown => {
                // Only `appProtocol` can be unknown: a port's name need not state a protocol.
                let protocol_name = written.app_protocol.as_deref().unwrap_or_default();
                let problem = format!(
                    "{protocol_name:?} is an unknown protocol; a connection's first bytes decide"
                );
                report.warning(
                    Code::UnknownAppProtocol,
                    service.document,
                    format!("{field}.appProtocol"),
                    problem,
                    "use http, http2, kubernetes.io/h2c, kubernetes.io/ws, grpc or tcp",
                );
                AppProtocol::Detect
            }
        };
        ports.push(ServicePort {
            port: written.port.get(),
            name: written.name.clone(),
            protocol,
        });
    }
    ports
}

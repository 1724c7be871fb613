//! Resolves Terminations: ports at which the gateway terminates TLS of clients without a node
//! proxy. A broken one refuses its port.

use std::collections::BTreeMap;

use canal_model::authorization::REASON_BYTES_MAX;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{ServiceKey, TenantName};
use canal_model::policy::canal::{CertificateSpec, Termination as Written};
use canal_model::program::Service;
use canal_model::trust::{KeyServer, Termination, TerminationCertificate};

use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;

/// Returns the terminations, sorted by service and port. If two are for one port, the older one is
/// used.
pub(crate) fn resolve(
    tenant: &TenantName,
    declared: &[Sourced<'_, Written>],
    services: &BTreeMap<ServiceKey, Service>,
    key_servers: &[KeyServer],
    report: &mut DiagnosticCollector,
) -> Vec<Termination> {
    let mut all: BTreeMap<(ServiceKey, u16), Termination> = BTreeMap::new();
    for sourced in declared {
        let Some((service, port)) = resolve_port(tenant, sourced, services, report) else {
            continue;
        };
        if all.contains_key(&(service.clone(), port)) {
            let problem = format!(
                "another Termination already terminates TLS to {}/{}:{port}; that one is used",
                service.namespace, service.name
            );
            report.error(
                Code::TargetConflict,
                sourced.document,
                "spec.port",
                problem,
                "remove one of them",
            );
            continue;
        }
        let termination = read(sourced, service.clone(), port, key_servers, report);
        all.insert((service, port), termination);
    }
    all.into_values().collect()
}

/// Resolves the port of a Termination; `None` if there is no such port, so that there is nothing to
/// refuse.
fn resolve_port(
    tenant: &TenantName,
    sourced: &Sourced<'_, Written>,
    services: &BTreeMap<ServiceKey, Service>,
    report: &mut DiagnosticCollector,
) -> Option<(ServiceKey, u16)> {
    let Written { metadata, spec } = sourced.object;
    let target = &spec.target_ref;
    // Services are in Kubernetes' core group, whose name is empty.
    if !target.group.is_empty() || target.kind != "Service" {
        let problem = format!(
            "a Termination cannot target a {:?} of group {:?}",
            target.kind, target.group
        );
        report.error(
            Code::UnsupportedTarget,
            sourced.document,
            "spec.targetRef.kind",
            problem,
            "write kind: Service",
        );
        return None;
    }
    let key = ServiceKey {
        tenant: tenant.clone(),
        namespace: metadata.namespace.clone(),
        name: target.name.clone(),
    };
    let Some(service) = services.get(&key) else {
        let problem = format!("there is no Service {}/{}", key.namespace, key.name);
        let fix = "create it, correct the name, or move the Termination into its namespace";
        report.error(
            Code::UnresolvedTarget,
            sourced.document,
            "spec.targetRef.name",
            problem,
            fix,
        );
        return None;
    };
    // Only TCP ports are in `service.ports`: TLS ends on no other transport.
    let port = spec.port.get();
    if !service.ports.iter().any(|p| p.port == port) {
        report.error(
            Code::UnresolvedTarget,
            sourced.document,
            "spec.port",
            format!("the Service has no TCP port {port}"),
            "write one of its ports",
        );
        return None;
    }
    Some((key, port))
}

fn read(
    sourced: &Sourced<'_, Written>,
    service: ServiceKey,
    port: u16,
    key_servers: &[KeyServer],
    report: &mut DiagnosticCollector,
) -> Termination {
    let spec = &sourced.object.spec;
    let mut broken = sourced
        .document
        .faults
        .iter()
        .find(|f| f.field.starts_with("spec"))
        .map(|f| format!("{}: {}", f.field, f.problem));
    let mut breaks = |code: Code, field: &str, problem: String, fix: &str| {
        broken.get_or_insert_with(|| format!("{field}: {problem}"));
        report.error(code, sourced.document, field, problem, fix);
    };
    // A broken Termination refuses every connection, so any certificate may stand for a wrong one.
    let certificate = match &spec.certificate {
        CertificateSpec {
            mesh: Some(_),
            key_server: None,
        } => TerminationCertificate::Mesh,
        CertificateSpec {
            mesh: None,
            key_server: Some(name),
        } => {
            if !key_servers.iter().any(|server| server.name == *name) {
                breaks(
                    Code::UnresolvedKeyServer,
                    "spec.certificate.keyServer",
                    format!("no valid KeyServer {name} exists"),
                    "create it or correct the name",
                );
            }
            TerminationCertificate::KeyServer(name.clone())
        }
        CertificateSpec {
            mesh: None,
            key_server: None,
        } => {
            // A certificate that could not be parsed has a diagnostic already.
            if sourced.fault("spec.certificate").is_none() {
                breaks(
                    Code::InvalidTermination,
                    "spec.certificate",
                    "the Termination names no certificate".into(),
                    "write mesh: {} or keyServer: NAME",
                );
            }
            TerminationCertificate::Mesh
        }
        CertificateSpec {
            mesh: Some(_),
            key_server: Some(_),
        } => {
            breaks(
                Code::InvalidTermination,
                "spec.certificate",
                "the Termination names two certificates".into(),
                "write mesh: {} or keyServer: NAME",
            );
            TerminationCertificate::Mesh
        }
    };
    // Every gateway and node of the tenant keeps the text, so it stays short.
    if let Some(reason) = &mut broken {
        reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
    }
    Termination {
        service,
        port,
        certificate,
        clients: spec.client_certificates,
        required: spec.required,
        broken,
    }
}

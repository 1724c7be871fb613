//! Finds ports of Services that do not declare their protocol, and ports of pods that Services
//! declare with different protocols.

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_ir::ir::Ir;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::ServiceKey;
use canal_model::policy::{Document, Object};
use canal_model::program::{AppProtocol, Workload};

use crate::AnalysisDiagnostics;

/// Reports ports whose protocol only the first bytes of a connection tell.
pub(crate) fn check(documents: &[Arc<Document>], ir: &Ir, report: &mut AnalysisDiagnostics) {
    for service in ir.services.values().map(|it| &it.service) {
        let Some(document) = document_of(documents, &service.key) else {
            continue;
        };
        let Object::Service(written) = &document.object else {
            continue;
        };
        let undeclared = service
            .ports
            .iter()
            .filter(|port| port.protocol == AppProtocol::Detect);
        for port in undeclared {
            let mut ports = written.spec.ports.iter().enumerate();
            let place = ports.find(|(_, it)| it.port.get() == port.port);
            // A protocol that is not known has a diagnostic of its own.
            let Some((at, _)) = place.filter(|(_, it)| it.app_protocol.is_none()) else {
                continue;
            };
            let name = match port.name.as_str() {
                "" => String::new(),
                name => format!("; its name {name:?} does not begin with one"),
            };
            let problem = format!("port {} declares no protocol{name}", port.port);
            let field = format!("spec.ports[{at}]");
            let fix =
                "write appProtocol, such as http or tcp, or name the port http-NAME or tcp-NAME";
            report.warn(Code::PortWithoutProtocol, document, field, problem, fix);
        }
    }
}

/// Reports Services that give a port of one pod another protocol than a Service before them does.
pub(crate) fn check_targets(
    documents: &[Arc<Document>],
    ir: &Ir,
    report: &mut AnalysisDiagnostics,
) {
    for workload in &ir.workloads {
        for (target, services) in protocols_of(workload, ir) {
            let Some((first, protocol, _)) = services.first() else {
                continue;
            };
            let others = services.iter().filter(|(_, other, _)| other != protocol);
            for (service, other, port) in others {
                let Some(document) = document_of(documents, service) else {
                    continue;
                };
                let problem = format!(
                    "port {port} is {other:?}, and {}/{} declares port {target} of the same pods as {protocol:?}",
                    first.namespace, first.name
                );
                let fix = "declare one protocol in both Services, or use ports of their own";
                let field = "spec.ports";
                report.warn(Code::ConflictingTargetPorts, document, field, problem, fix);
            }
        }
    }
}

/// A Service, and the protocol and number of its port.
type ServedPort<'a> = (&'a ServiceKey, AppProtocol, u16);

/// Returns the declared protocols of each port of a pod. A port without one conflicts with none.
fn protocols_of<'a>(workload: &'a Workload, ir: &Ir) -> BTreeMap<u16, Vec<ServedPort<'a>>> {
    let mut targets: BTreeMap<u16, Vec<ServedPort<'a>>> = BTreeMap::new();
    for endpoint in &workload.endpoints {
        let service = ir.services.get(&endpoint.service);
        let mut ports = service.iter().flat_map(|it| &it.service.ports);
        let port = ports.find(|port| port.port == endpoint.port);
        if let Some(port) = port.filter(|port| port.protocol != AppProtocol::Detect) {
            let served = (&endpoint.service, port.protocol, port.port);
            targets
                .entry(endpoint.target_port)
                .or_default()
                .push(served);
        }
    }
    targets
}

fn document_of<'a>(documents: &'a [Arc<Document>], key: &ServiceKey) -> Option<&'a Document> {
    let mut services = documents.iter().filter(|document| {
        let metadata = document.object.metadata();
        matches!(document.object, Object::Service(_))
            && (&metadata.namespace, &metadata.name) == (&key.namespace, &key.name)
    });
    services.next().map(AsRef::as_ref)
}

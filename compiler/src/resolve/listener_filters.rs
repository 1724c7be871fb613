//! Resolves the filters of listeners: the servers that authorize their requests. `canal-attachment` has
//! closed the listeners whose filters are not of a type that can run.

use std::sync::Arc;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName};
use canal_model::ingress::{Listener, ListenerFault, ListenerFaultReason};
use canal_model::listener_filters::ListenerFilter;
use canal_model::policy::listeners::GatewayListener;
use canal_model::policy::{Document, ObjectKind};

use super::destination::{DestinationIndex, RouteOrigin};
use super::ingress::{FAULT_CHARACTERS_MAX, Ingress};
use super::route_authorizers;
use super::tenant_objects::TenantObjects;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::resource_budget::ResourceBudget;

/// Sets the filters of the open listeners of Gateways and ListenerSets.
pub(super) fn resolve(
    corpus: &TenantObjects<'_>,
    destinations: &DestinationIndex<'_>,
    ingress: &mut Ingress,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) {
    let gateways = corpus.gateways.iter().map(|it| {
        let (metadata, spec) = (&it.object.metadata, &it.object.spec);
        (it.document, metadata, &spec.listeners)
    });
    let sets = corpus.listener_sets.iter().map(|it| {
        let (metadata, spec) = (&it.object.metadata, &it.object.spec);
        (it.document, metadata, &spec.listeners)
    });
    for (document, metadata, listeners) in gateways.chain(sets) {
        let object = ListenerObject {
            document,
            kind: document.object.kind(),
            namespace: &metadata.namespace,
            name: &metadata.name,
        };
        for (at, written) in listeners.iter().enumerate() {
            if written.filters.requests.is_empty() {
                continue;
            }
            let named = (object.namespace, object.name);
            let listeners = &mut ingress.listeners;
            // Nothing passes a closed listener, so its filters need no servers.
            let Some(listener) = listeners.open_listener_mut(object.kind, named, &written.name)
            else {
                continue;
            };
            object.resolve((at, written), listener, destinations, report);
            let mut filters = listener.filters.iter();
            // The caller discards the result of a tenant beyond its budget.
            if !filters.all(|filter| budget.add_listener_filter(filter)) {
                return;
            }
        }
    }
}

/// The object in which a listener is written.
struct ListenerObject<'a> {
    document: &'a Document,
    kind: ObjectKind,
    namespace: &'a Namespace,
    name: &'a ObjectName,
}

impl ListenerObject<'_> {
    fn resolve(
        &self,
        (at, written): (usize, &GatewayListener),
        listener: &mut Listener,
        destinations: &DestinationIndex<'_>,
        report: &mut DiagnosticCollector,
    ) {
        let mut is_resolved = true;
        for (number, filter) in written.filters.requests.iter().enumerate() {
            // A filter of another type has closed the listener.
            let Some(authorizer) = &filter.external_auth else {
                continue;
            };
            let origin = RouteOrigin {
                kind: self.kind,
                namespace: self.namespace,
                consumed: None,
            };
            let found = route_authorizers::read(authorizer, &|backend| {
                destinations.of_backend_ref(origin, backend)
            });
            let issue = match found {
                Ok(authorizer) => {
                    listener.filters.push(ListenerFilter::Authorize(authorizer));
                    continue;
                }
                Err(issue) => issue,
            };
            let field = format!("filters.requests[{number}].externalAuth.{}", issue.field);
            report.error(
                issue.code,
                self.document,
                format!("spec.listeners[{at}].{field}"),
                issue.problem.clone(),
                issue.fix,
            );
            if is_about_reference(issue.code) {
                is_resolved = false;
            } else {
                let problem = format!("{field}: {}", issue.problem);
                let fault = ListenerFault {
                    reason: ListenerFaultReason::InvalidFilter,
                    problem: problem.chars().take(FAULT_CHARACTERS_MAX).collect(),
                };
                listener.closed.get_or_insert_with(|| Arc::new(fault));
            }
        }
        // As for a rule whose authorizer cannot be found, no server is asked at all.
        if !is_resolved {
            listener.filters = vec![ListenerFilter::Refuse];
        }
    }
}

/// Returns whether a filter is right, and what it refers to is missing or not permitted.
fn is_about_reference(code: Code) -> bool {
    matches!(
        code,
        Code::UnresolvedBackend
            | Code::BackendPortNotFound
            | Code::UnsupportedBackend
            | Code::BackendNotPermitted
    )
}

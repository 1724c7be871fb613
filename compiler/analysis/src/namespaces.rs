//! Finds namespaces that do not exist. Only documents that define namespaces are checked, because
//! others leave their definition to somebody else.

use std::collections::BTreeSet;
use std::sync::Arc;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::Namespace;
use canal_model::policy::gateway_api::{ParentRef, RelayRule};
use canal_model::policy::istio_security::{AuthorizationPolicy, ROOT_NAMESPACES};
use canal_model::policy::{Document, Object, ObjectKind};

use crate::AnalysisDiagnostics;

/// Namespaces that every cluster has.
const OF_KUBERNETES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];

pub(crate) fn check(documents: &[Arc<Document>], report: &mut AnalysisDiagnostics) {
    let defined = documents
        .iter()
        .filter_map(|document| match &document.object {
            Object::Namespace(namespace) => Some(namespace.metadata.name.as_str()),
            _ => None,
        });
    let mut known: BTreeSet<&str> = defined.collect();
    if known.is_empty() {
        return;
    }
    known.extend(OF_KUBERNETES);
    known.extend(ROOT_NAMESPACES);
    for document in documents {
        let kind = document.object.kind();
        let own = document.object.metadata().namespace.as_str();
        if !is_cluster_scoped(kind) && !known.contains(own) {
            warn(document, "metadata.namespace".to_owned(), own, report);
        }
        for (field, namespace) in references(&document.object) {
            if !known.contains(namespace) {
                warn(document, field, namespace, report);
            }
        }
    }
}

fn warn(document: &Document, field: String, namespace: &str, report: &mut AnalysisDiagnostics) {
    let problem = format!("there is no Namespace {namespace}");
    let fix = "correct the name, or define the Namespace";
    report.warn(Code::UnknownNamespace, document, field, problem, fix);
}

fn is_cluster_scoped(kind: ObjectKind) -> bool {
    matches!(
        kind,
        ObjectKind::Namespace
            | ObjectKind::Node
            | ObjectKind::GatewayClass
            | ObjectKind::Tenant
            | ObjectKind::GatewayReplica
    )
}

/// Returns the namespaces that an object names, each with its field.
fn references(object: &Object) -> Vec<(String, &str)> {
    match object {
        Object::HttpRoute(route) => of_route(&route.spec.parent_refs, &route.spec.rules, |rule| {
            collect_namespaces(&rule.backend_refs, |it| &it.namespace)
        }),
        Object::GrpcRoute(route) => of_route(&route.spec.parent_refs, &route.spec.rules, |rule| {
            collect_namespaces(&rule.backend_refs, |it| &it.namespace)
        }),
        Object::TlsRoute(route) => of_relay_route(&route.spec.parent_refs, &route.spec.rules),
        Object::TcpRoute(route) => of_relay_route(&route.spec.parent_refs, &route.spec.rules),
        Object::UdpRoute(route) => of_route(&route.spec.parent_refs, &route.spec.rules, |rule| {
            collect_namespaces(&rule.backend_refs, |it| &it.namespace)
        }),
        Object::ReferenceGrant(grant) => {
            let from = grant.spec.from.iter().enumerate();
            from.map(|(at, from)| {
                (
                    format!("spec.from[{at}].namespace"),
                    from.namespace.as_str(),
                )
            })
            .collect()
        }
        Object::AuthorizationPolicy(policy) => of_policy(policy),
        _ => Vec::new(),
    }
}

/// Returns what the backends of a rule name as their namespaces, in order.
fn collect_namespaces<B>(
    backends: &[B],
    namespace_of: impl Fn(&B) -> &Option<Namespace>,
) -> Vec<Option<&Namespace>> {
    let backends = backends.iter();
    backends.map(|it| namespace_of(it).as_ref()).collect()
}

fn of_relay_route<'a>(parents: &'a [ParentRef], rules: &'a [RelayRule]) -> Vec<(String, &'a str)> {
    of_route(parents, rules, |rule| {
        collect_namespaces(&rule.backend_refs, |it| &it.namespace)
    })
}

/// Returns the namespaces that a route names; `backends_of` returns those of a rule's backends.
fn of_route<'a, R>(
    parents: &'a [ParentRef],
    rules: &'a [R],
    backends_of: impl Fn(&'a R) -> Vec<Option<&'a Namespace>>,
) -> Vec<(String, &'a str)> {
    let parents = parents.iter().enumerate().filter_map(|(at, parent)| {
        let namespace = parent.namespace.as_ref()?;
        Some((
            format!("spec.parentRefs[{at}].namespace"),
            namespace.as_str(),
        ))
    });
    let mut found: Vec<(String, &str)> = parents.collect();
    for (rule, backends) in rules.iter().map(backends_of).enumerate() {
        found.extend(backends.iter().enumerate().filter_map(|(at, namespace)| {
            let field = format!("spec.rules[{rule}].backendRefs[{at}].namespace");
            Some((field, (*namespace)?.as_str()))
        }));
    }
    found
}

/// Returns the whole names among the namespaces of clients; a prefix or suffix names none.
fn of_policy(policy: &AuthorizationPolicy) -> Vec<(String, &str)> {
    let mut found = Vec::new();
    for (rule, written) in policy.spec.rules.iter().enumerate() {
        for (from, clause) in written.from.iter().flatten().enumerate() {
            let Some(source) = &clause.source else {
                continue;
            };
            let field = format!("spec.rules[{rule}].from[{from}].source");
            let lists = [
                ("namespaces", &source.namespaces),
                ("notNamespaces", &source.not_namespaces),
            ];
            for (list, values) in lists {
                let values = values.iter().flatten().enumerate();
                let whole = values.filter(|(_, value)| !value.contains('*'));
                found.extend(
                    whole.map(|(at, value)| (format!("{field}.{list}[{at}]"), value.as_str())),
                );
            }
        }
    }
    found
}

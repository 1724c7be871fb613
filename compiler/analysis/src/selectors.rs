//! Finds selectors of Services and policies that select no pod. Only namespaces with pods in the
//! documents are checked: files of configuration alone do not say which pods exist. Also finds
//! policies that read claims of tokens which nothing verifies.

use std::collections::BTreeSet;
use std::sync::Arc;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::Namespace;
use canal_model::policy::istio_security::{AuthorizationPolicy, ROOT_NAMESPACES, WorkloadSelector};
use canal_model::policy::kubernetes::Pod;
use canal_model::policy::{Document, Object};
use canal_model::program::Labels;

use crate::AnalysisDiagnostics;

pub(crate) fn check(documents: &[Arc<Document>], report: &mut AnalysisDiagnostics) {
    let pods = Pods::new(documents);
    for document in documents {
        match &document.object {
            Object::Service(service) if !service.spec.selector.is_empty() => {
                let own = Some(&service.metadata.namespace);
                if pods.has_any(own) && !pods.has_selected(own, &service.spec.selector) {
                    let problem = format!(
                        "no pod of namespace {} has the labels {}",
                        service.metadata.namespace,
                        text_of(&service.spec.selector)
                    );
                    let fix = "correct the selector, or the labels of the pods";
                    let field = "spec.selector";
                    report.warn(Code::SelectorMatchesNoPod, document, field, problem, fix);
                }
            }
            Object::AuthorizationPolicy(policy) => {
                check_policy(document, policy.spec.selector.as_ref(), &pods, report);
                check_claims(document, policy, documents, report);
            }
            Object::RequestAuthentication(policy) => {
                check_policy(document, policy.spec.selector.as_ref(), &pods, report);
            }
            Object::PeerAuthentication(policy) => {
                check_policy(document, policy.spec.selector.as_ref(), &pods, report);
            }
            _ => {}
        }
    }
}

fn check_policy(
    document: &Document,
    selector: Option<&WorkloadSelector>,
    pods: &Pods<'_>,
    report: &mut AnalysisDiagnostics,
) {
    let Some(labels) = selector
        .map(|it| &it.match_labels)
        .filter(|it| !it.is_empty())
    else {
        return;
    };
    let own = &document.object.metadata().namespace;
    // A policy in a root namespace selects pods of all namespaces.
    let namespace = (!ROOT_NAMESPACES.contains(&own.as_str())).then_some(own);
    if pods.has_any(namespace) && !pods.has_selected(namespace, labels) {
        let place = namespace.map_or_else(
            || "of the tenant".to_owned(),
            |namespace| format!("of namespace {namespace}"),
        );
        let problem = format!("no pod {place} has the labels {}", text_of(labels));
        let fix = "correct the selector, or the labels of the pods";
        report.warn(
            Code::PolicyMatchesNoPod,
            document,
            "spec.selector",
            problem,
            fix,
        );
    }
}

/// Reports conditions on claims in a namespace for which no RequestAuthentication verifies tokens.
/// A token that nothing verifies has no claims.
fn check_claims(
    document: &Document,
    policy: &AuthorizationPolicy,
    documents: &[Arc<Document>],
    report: &mut AnalysisDiagnostics,
) {
    let own = &policy.metadata.namespace;
    let is_verified = documents.iter().any(|other| {
        let namespace = &other.object.metadata().namespace;
        matches!(other.object, Object::RequestAuthentication(_))
            && (namespace == own
                || ROOT_NAMESPACES.contains(&namespace.as_str())
                || ROOT_NAMESPACES.contains(&own.as_str()))
    });
    if is_verified {
        return;
    }
    for (at, rule) in policy.spec.rules.iter().enumerate() {
        let mut from = rule.from.iter().flatten();
        let mut when = rule.when.iter().flatten();
        let reads_principal = from.any(|clause| {
            let source = clause.source.as_ref();
            source.is_some_and(|source| source.request_principals.is_some())
        });
        if reads_principal || when.any(|condition| condition.key.starts_with("request.auth.")) {
            let problem = format!(
                "the rule reads claims of a token, and no RequestAuthentication of namespace {own} or of a root namespace verifies tokens"
            );
            let fix = "write a RequestAuthentication for the issuer of the tokens";
            let field = format!("spec.rules[{at}]");
            report.warn(
                Code::ClaimsWithoutAuthentication,
                document,
                field,
                problem,
                fix,
            );
        }
    }
}

/// The pods of the documents.
pub(crate) struct Pods<'a> {
    pods: Vec<&'a Pod>,
    namespaces: BTreeSet<&'a Namespace>,
}

impl<'a> Pods<'a> {
    pub(crate) fn new(documents: &'a [Arc<Document>]) -> Self {
        let pods = documents
            .iter()
            .filter_map(|document| match &document.object {
                Object::Pod(pod) => Some(pod),
                _ => None,
            });
        let pods: Vec<&Pod> = pods.collect();
        let namespaces = pods.iter().map(|pod| &pod.metadata.namespace).collect();
        Self { pods, namespaces }
    }

    /// Returns whether a namespace has pods; `None` means all namespaces together.
    pub(crate) fn has_any(&self, namespace: Option<&Namespace>) -> bool {
        namespace.map_or(!self.pods.is_empty(), |it| self.namespaces.contains(it))
    }

    /// Returns whether a pod carries all of the labels.
    pub(crate) fn has_selected(&self, namespace: Option<&Namespace>, labels: &Labels) -> bool {
        self.pods.iter().any(|pod| {
            namespace.is_none_or(|it| *it == pod.metadata.namespace)
                && labels
                    .iter()
                    .all(|(name, value)| pod.metadata.labels.get(name) == Some(value))
        })
    }
}

/// Returns labels as `a=b, c=d`.
pub(crate) fn text_of(labels: &Labels) -> String {
    let labels = labels.iter().map(|(name, value)| format!("{name}={value}"));
    labels.collect::<Vec<_>>().join(", ")
}

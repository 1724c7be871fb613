//! Finds subsets of DestinationRules that no VirtualService uses, and those whose labels no pod of
//! their Service carries.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::Namespace;
use canal_model::policy::istio::{DestinationRule, VirtualService};
use canal_model::policy::{Document, Object};
use canal_model::program::Labels;

use crate::AnalysisDiagnostics;
use crate::selectors::{Pods, text_of};

/// A Service by namespace and name.
type ServiceName = (String, String);

pub(crate) fn check(documents: &[Arc<Document>], report: &mut AnalysisDiagnostics) {
    let used = used_subsets(documents);
    let selectors = selectors_of(documents);
    let pods = Pods::new(documents);
    for document in documents {
        if let Object::DestinationRule(rule) = &document.object {
            check_rule(document, rule, (&used, &selectors, &pods), report);
        }
    }
}

fn check_rule(
    document: &Document,
    rule: &DestinationRule,
    (used, selectors, pods): (
        &BTreeSet<(ServiceName, &str)>,
        &BTreeMap<ServiceName, &Labels>,
        &Pods<'_>,
    ),
    report: &mut AnalysisDiagnostics,
) {
    let own = &rule.metadata.namespace;
    let service = service_name(&rule.spec.host, own);
    for (at, subset) in rule.spec.subsets.iter().enumerate() {
        let field = format!("spec.subsets[{at}]");
        let name = subset.name.as_str();
        // A subset without a name has an error of its own.
        if !name.is_empty() && !used.contains(&(service.clone(), name)) {
            let problem = format!("no VirtualService sends requests to subset {name:?}");
            let fix = "name it as the destination of a rule, or remove it";
            report.warn(
                Code::UnusedSubset,
                document,
                format!("{field}.name"),
                problem,
                fix,
            );
        }
        // An unknown service has another diagnostic, and one without a selector selects no pods.
        let Some(selector) = selectors.get(&service) else {
            continue;
        };
        let mut labels: Labels = (*selector).clone();
        labels.extend(subset.labels.clone());
        // A label of the subset that contradicts the selector selects nothing either.
        let is_contradiction = subset
            .labels
            .iter()
            .any(|(name, value)| selector.get(name).is_some_and(|other| other != value));
        let namespace = Some(own);
        // Without pods of the service at all, nothing shows which labels its pods have.
        if pods.has_any(namespace)
            && pods.has_selected(namespace, selector)
            && (is_contradiction || !pods.has_selected(namespace, &labels))
        {
            let problem = format!(
                "no pod of {} has the labels {}",
                rule.spec.host,
                text_of(&subset.labels)
            );
            let fix = "correct the labels of the subset, or those of the pods";
            report.warn(
                Code::SubsetMatchesNoPod,
                document,
                format!("{field}.labels"),
                problem,
                fix,
            );
        }
    }
}

/// Returns the subsets that destinations name.
fn used_subsets(documents: &[Arc<Document>]) -> BTreeSet<(ServiceName, &str)> {
    let mut used = BTreeSet::new();
    for document in documents {
        let Object::VirtualService(VirtualService { metadata, spec }) = &document.object else {
            continue;
        };
        for destination in spec.http.iter().flat_map(|rule| &rule.route) {
            let to = &destination.destination;
            if let Some(subset) = &to.subset {
                used.insert((service_name(&to.host, &metadata.namespace), subset.as_str()));
            }
        }
    }
    used
}

fn selectors_of(documents: &[Arc<Document>]) -> BTreeMap<ServiceName, &Labels> {
    let services = documents
        .iter()
        .filter_map(|document| match &document.object {
            Object::Service(service) if !service.spec.selector.is_empty() => {
                let metadata = &service.metadata;
                let name = (metadata.namespace.to_string(), metadata.name.to_string());
                Some((name, &service.spec.selector))
            }
            _ => None,
        });
    services.collect()
}

/// Returns the Service of a host: `name`, `name.namespace` or a longer name of it.
fn service_name(host: &str, own: &Namespace) -> ServiceName {
    let mut parts = host.split('.');
    let name = parts.next().unwrap_or_default().to_owned();
    let namespace = parts.next().map_or_else(|| own.to_string(), str::to_owned);
    (namespace, name)
}

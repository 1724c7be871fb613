//! Resolves DestinationRules: named subsets of a service's workloads. Several rules for one host
//! are merged; the oldest takes precedence.

use std::collections::BTreeMap;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{ServiceKey, TenantName};
use canal_model::policy::istio::DestinationRule;
use canal_model::program::{Labels, Service};

use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::names;

/// Labels of each subset of each service; `None` for a subset that is broken.
pub(crate) type Subsets = BTreeMap<ServiceKey, BTreeMap<String, Option<Labels>>>;

pub(crate) fn resolve(
    tenant: &TenantName,
    declared: &[Sourced<'_, DestinationRule>],
    services: &BTreeMap<ServiceKey, Service>,
    report: &mut DiagnosticCollector,
) -> Subsets {
    let mut subsets = Subsets::new();
    for rule in declared {
        let (host, namespace) = (&rule.object.spec.host, &rule.object.metadata.namespace);
        let Some(service) =
            names::service(tenant, namespace, host).filter(|key| services.contains_key(key))
        else {
            report.error(
                Code::UnresolvedHost,
                rule.document,
                "spec.host",
                format!("{host:?} is not a service of this tenant"),
                "write a Service's name, or name.namespace",
            );
            continue;
        };
        // In Istio such a rule concerns clients of its own namespace, which is not supported.
        if service.namespace != *namespace {
            let problem = format!(
                "subsets of {}/{} are defined in its own namespace only",
                service.namespace, service.name
            );
            report.error(
                Code::OtherNamespace,
                rule.document,
                "spec.host",
                problem,
                format!(
                    "move the DestinationRule to namespace {}",
                    service.namespace
                ),
            );
            continue;
        }
        let known = subsets.entry(service).or_default();
        // A fault outside the subsets may restrict who uses any of them, and how.
        let mut faults = rule.document.faults.iter();
        let is_restricted =
            faults.any(|f| f.field.starts_with("spec") && !f.field.starts_with("spec.subsets["));
        for (at, subset) in rule.object.spec.subsets.iter().enumerate() {
            let field = format!("spec.subsets[{at}]");
            // A subset with a fault is broken below, and its fault has been reported.
            if subset.name.is_empty() && rule.fault(&field).is_none() {
                report.error(
                    Code::MissingField,
                    rule.document,
                    format!("{field}.name"),
                    "the subset has no name",
                    "name it",
                );
            } else if known.contains_key(&subset.name) {
                let problem = format!(
                    "subset {:?} of {host} is defined twice; the older one is used",
                    subset.name
                );
                report.error(
                    Code::DuplicateSubset,
                    rule.document,
                    format!("{field}.name"),
                    problem,
                    "remove one of them",
                );
            } else {
                // A broken subset keeps its name: destinations that use it fail, even if a newer
                // rule defines the same name.
                let is_broken = is_restricted || rule.fault(&field).is_some();
                known.insert(
                    subset.name.clone(),
                    (!is_broken).then(|| subset.labels.clone()),
                );
            }
        }
    }
    subsets
}

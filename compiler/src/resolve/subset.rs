//! DestinationRules: named subsets of a service's workloads. Several rules for one host are merged, elders first.

use std::collections::BTreeMap;

use canal_model::ids::{ServiceKey, TenantName};
use canal_model::policy::istio::DestinationRule;
use canal_model::program::{Labels, Service};

use super::corpus::Said;
use crate::names;
use crate::report::Report;

/// The labels of each subset; `None` for a subset that is broken.
pub(crate) type Subsets = BTreeMap<ServiceKey, BTreeMap<String, Option<Labels>>>;

pub(crate) fn resolve(
    tenant: &TenantName,
    said: &[Said<'_, DestinationRule>],
    services: &BTreeMap<ServiceKey, Service>,
    report: &mut Report,
) -> Subsets {
    let mut subsets = Subsets::new();
    for rule in said {
        let (host, namespace) = (&rule.object.spec.host, &rule.object.metadata.namespace);
        let Some(service) = names::service(tenant, namespace, host).filter(|key| services.contains_key(key)) else {
            report.error(
                rule.document,
                "spec.host",
                format!("{host:?} is no service of this tenant"),
                "write a Service's name, or name.namespace",
            );
            continue;
        };
        if service.namespace != *namespace {
            let problem = format!("subsets of {}/{} are defined in its own namespace only", service.namespace, service.name);
            report.error(rule.document, "spec.host", problem, format!("move the DestinationRule to namespace {}", service.namespace));
            continue;
        }
        let known = subsets.entry(service).or_default();
        for (at, subset) in rule.object.spec.subsets.iter().enumerate() {
            let field = format!("spec.subsets[{at}]");
            if subset.name.is_empty() && rule.fault(&field).is_none() {
                report.error(rule.document, format!("{field}.name"), "the subset has no name", "name it");
            } else if known.contains_key(&subset.name) {
                let problem = format!("subset {:?} of {host} is defined twice; the older one is used", subset.name);
                report.error(rule.document, format!("{field}.name"), problem, "remove one of them");
            } else {
                let is_broken = rule.fault(&field).is_some();
                known.insert(subset.name.clone(), (!is_broken).then(|| subset.labels.clone()));
            }
        }
    }
    subsets
}

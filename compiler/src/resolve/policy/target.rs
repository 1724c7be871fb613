//! Whom a policy is for: all of the tenant, a namespace, workloads by label, or Services by name (Istio's selector and targetRefs).

use std::collections::{BTreeMap, BTreeSet};

use canal_model::authorization::{PolicyKey, PolicyTarget};
use canal_model::ids::{ObjectName, ServiceKey, TenantName};
use canal_model::policy::Metadata;
use canal_model::policy::security::{PolicyTargetRef, ROOT_NAMESPACES, WorkloadSelector};
use canal_model::program::{Labels, Service};

use super::Reading;
use crate::limits::TARGETS_PER_POLICY_MAX;

/// What a policy says about whom it is for.
pub(super) struct Written<'a> {
    pub(super) metadata: &'a Metadata,
    pub(super) selector: Option<&'a WorkloadSelector>,
    pub(super) target_ref: Option<&'a PolicyTargetRef>,
    pub(super) target_refs: Option<&'a [PolicyTargetRef]>,
}

/// The widest that a policy of this object could be for: what a broken selector stands for.
pub(super) fn widest(metadata: &Metadata) -> PolicyTarget {
    if is_root(metadata) { PolicyTarget::Tenant } else { PolicyTarget::Namespace(metadata.namespace.clone()) }
}

fn is_root(metadata: &Metadata) -> bool {
    ROOT_NAMESPACES.contains(&metadata.namespace.as_str())
}

/// The workloads that carry these labels.
pub(super) fn selected(metadata: &Metadata, labels: &Labels) -> PolicyTarget {
    if labels.is_empty() {
        return widest(metadata);
    }
    PolicyTarget::Workloads { namespace: (!is_root(metadata)).then(|| metadata.namespace.clone()), labels: labels.clone() }
}

/// Empty: the policy is for nothing that the mesh has.
pub(super) fn targets<T>(
    tenant: &TenantName,
    written: &Written<'_>,
    services: &BTreeMap<ServiceKey, Service>,
    reading: &mut Reading<'_, T>,
) -> Vec<PolicyTarget> {
    let Written { metadata, selector, target_ref, target_refs } = *written;
    let widest = || vec![widest(metadata)];
    if reading.said.fault("spec.selector").is_some() || reading.said.fault("spec.targetRef").is_some() {
        return widest();
    }
    let refs: Vec<(String, &PolicyTargetRef)> = match (target_ref, target_refs) {
        (Some(_), Some(_)) => {
            reading.breaks("spec.targetRefs", "targetRef is there too", "write targetRefs only");
            return widest();
        }
        (Some(one), None) => vec![("spec.targetRef".to_owned(), one)],
        (None, Some([])) => {
            reading.breaks("spec.targetRefs", "the list is empty", "write a target, or remove the field");
            return widest();
        }
        (None, Some(many)) => many.iter().enumerate().map(|(at, one)| (format!("spec.targetRefs[{at}]"), one)).collect(),
        (None, None) => return selector.map_or_else(widest, |selector| vec![selected(metadata, &selector.match_labels)]),
    };
    if selector.is_some() {
        reading.breaks("spec.selector", "targetRefs are there too", "write one of the two");
        return widest();
    }
    if refs.len() > TARGETS_PER_POLICY_MAX {
        let problem = format!("the policy has {} targets, more than {TARGETS_PER_POLICY_MAX}", refs.len());
        reading.breaks("spec.targetRefs", problem, "split the policy, or use a selector");
        return widest();
    }
    let mut found: Vec<ServiceKey> = Vec::new();
    for (field, target) in refs {
        let Some(service) = service(tenant, metadata, &field, target, services, reading) else { continue };
        if !found.contains(&service) {
            found.push(service);
        }
    }
    found.into_iter().map(PolicyTarget::Service).collect()
}

/// `None`: it is nothing that the mesh has, so there is nothing to keep closed either.
fn service<T>(
    tenant: &TenantName,
    metadata: &Metadata,
    field: &str,
    target: &PolicyTargetRef,
    services: &BTreeMap<ServiceKey, Service>,
    reading: &mut Reading<'_, T>,
) -> Option<ServiceKey> {
    if !(target.group.is_empty() || target.group == "core") || target.kind != "Service" {
        let problem = format!("a {:?} of group {:?} is nothing that the mesh has", target.kind, target.group);
        reading.error(format!("{field}.kind"), problem, "write kind: Service, or use a selector");
        return None;
    }
    if let Some(other) = target.namespace.as_ref().filter(|other| **other != metadata.namespace) {
        let problem = format!("{other} is another namespace than the policy's, which it has no say in");
        reading.error(format!("{field}.namespace"), problem, format!("write the policy in namespace {other}"));
        return None;
    }
    let key = ServiceKey { tenant: tenant.clone(), namespace: metadata.namespace.clone(), name: target.name.clone() };
    if !services.contains_key(&key) {
        let problem = format!("there is no Service {}/{} yet", key.namespace, key.name);
        reading.warning(format!("{field}.name"), problem, "create it, correct the name, or move the policy into its namespace");
    }
    Some(key)
}

/// A key for each target of a policy: its own, and for the others one of which no other policy has the name.
pub(super) fn keys(own: &PolicyKey, count: usize, taken: &BTreeSet<PolicyKey>) -> Vec<PolicyKey> {
    let named = |name: String| ObjectName::new(&name).ok().map(|name| PolicyKey { name, ..own.clone() });
    let free = (2..).filter_map(|n: usize| named(format!("{}.target-{n}", own.name)).or_else(|| named(format!("target-{n}.of-long-name"))));
    std::iter::once(own.clone()).chain(free.filter(|key| !taken.contains(key))).take(count).collect()
}

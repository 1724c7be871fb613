//! Resolves the target of a policy: the whole tenant, a namespace, workloads by label, Services or
//! Gateways by name, or the Gateways of a class (Istio's selector and targetRefs).

use std::collections::{BTreeMap, BTreeSet};

use canal_attachment::TenantListeners;
use canal_model::authorization::{PolicyKey, PolicyTarget};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{ObjectName, ServiceKey, TenantName};
use canal_model::ingress::gateway_service;
use canal_model::policy::Metadata;
use canal_model::policy::istio_security::{
    AuthorizationPolicy, PolicyTargetRef, ROOT_NAMESPACES, RequestAuthentication, WorkloadSelector,
};
use canal_model::program::{Labels, Service};

use crate::PolicyResolver;
use canal_ir::limits::TARGETS_PER_POLICY_MAX;

/// The fields of a policy object that define its target.
pub(crate) struct TargetSelector<'a> {
    pub(crate) metadata: &'a Metadata,
    pub(crate) selector: Option<&'a WorkloadSelector>,
    pub(crate) target_ref: Option<&'a PolicyTargetRef>,
    pub(crate) target_refs: Option<&'a [PolicyTargetRef]>,
}

impl<'a> From<&'a AuthorizationPolicy> for TargetSelector<'a> {
    fn from(policy: &'a AuthorizationPolicy) -> Self {
        let AuthorizationPolicy { metadata, spec } = policy;
        Self {
            metadata,
            selector: spec.selector.as_ref(),
            target_ref: spec.target_ref.as_ref(),
            target_refs: spec.target_refs.as_deref(),
        }
    }
}

impl<'a> From<&'a RequestAuthentication> for TargetSelector<'a> {
    fn from(policy: &'a RequestAuthentication) -> Self {
        let RequestAuthentication { metadata, spec } = policy;
        Self {
            metadata,
            selector: spec.selector.as_ref(),
            target_ref: spec.target_ref.as_ref(),
            target_refs: spec.target_refs.as_deref(),
        }
    }
}

/// What policies may name as their targets.
#[derive(Clone, Copy)]
pub struct PolicyTargets<'a> {
    pub services: &'a BTreeMap<ServiceKey, Service>,
    pub listeners: &'a TenantListeners,
}

/// API group of Gateways and their classes.
const GATEWAY_GROUP: &str = "gateway.networking.k8s.io";

/// Returns the widest target that the object could have. A broken selector is replaced by it.
pub(crate) fn widest(metadata: &Metadata) -> PolicyTarget {
    if is_root(metadata) {
        PolicyTarget::Tenant
    } else {
        PolicyTarget::Namespace(metadata.namespace.clone())
    }
}

fn is_root(metadata: &Metadata) -> bool {
    ROOT_NAMESPACES.contains(&metadata.namespace.as_str())
}

/// Returns the target for workloads that carry these labels.
pub(crate) fn selected(metadata: &Metadata, labels: &Labels) -> PolicyTarget {
    if labels.is_empty() {
        return widest(metadata);
    }
    PolicyTarget::Workloads {
        namespace: (!is_root(metadata)).then(|| metadata.namespace.clone()),
        labels: labels.clone(),
    }
}

/// Returns the targets of the policy. They are empty only if the policy names a class of which
/// there is no Gateway. A target that cannot be parsed or enforced breaks the policy and becomes
/// the widest target.
pub(crate) fn targets<T>(
    tenant: &TenantName,
    written: &TargetSelector<'_>,
    named: PolicyTargets<'_>,
    reading: &mut PolicyResolver<'_, T>,
) -> Vec<PolicyTarget> {
    let TargetSelector {
        metadata,
        selector,
        target_ref,
        target_refs,
    } = *written;
    let widest = || vec![widest(metadata)];
    // The fault has been reported, and it breaks the policy.
    if reading.source.fault("spec.selector").is_some()
        || reading.source.fault("spec.targetRef").is_some()
    {
        return widest();
    }
    let refs: Vec<(String, &PolicyTargetRef)> = match (target_ref, target_refs) {
        (Some(_), Some(_)) => {
            reading.breaks(
                Code::ConflictingFields,
                "spec.targetRefs",
                "targetRef is set too",
                "write targetRefs only",
            );
            return widest();
        }
        (Some(one), None) => vec![("spec.targetRef".to_owned(), one)],
        // It could mean no target or every one.
        (None, Some([])) => {
            reading.breaks(
                Code::MissingField,
                "spec.targetRefs",
                "the list is empty",
                "write a target, or remove the field",
            );
            return widest();
        }
        (None, Some(many)) => many
            .iter()
            .enumerate()
            .map(|(at, one)| (format!("spec.targetRefs[{at}]"), one))
            .collect(),
        // As in Istio, the selector decides, or else the namespace.
        (None, None) => {
            return selector.map_or_else(widest, |selector| {
                vec![selected(metadata, &selector.match_labels)]
            });
        }
    };
    if selector.is_some() {
        reading.breaks(
            Code::ConflictingFields,
            "spec.selector",
            "targetRefs are set too",
            "write one of the two",
        );
        return widest();
    }
    if refs.len() > TARGETS_PER_POLICY_MAX {
        let problem = format!(
            "the policy has {} targets, more than {TARGETS_PER_POLICY_MAX}",
            refs.len()
        );
        reading.breaks(
            Code::LimitExceeded,
            "spec.targetRefs",
            problem,
            "split the policy, or use a selector",
        );
        return widest();
    }
    match named_services(tenant, metadata, &refs, named, reading) {
        Some(found) => found.into_iter().map(PolicyTarget::Service).collect(),
        None => widest(),
    }
}

/// Resolves all targets of a policy. `None` means that they break it.
fn named_services<T>(
    tenant: &TenantName,
    metadata: &Metadata,
    refs: &[(String, &PolicyTargetRef)],
    named: PolicyTargets<'_>,
    reading: &mut PolicyResolver<'_, T>,
) -> Option<Vec<ServiceKey>> {
    // In the order as written, because the place of a target names its resource. The Gateways of a
    // class have no limit of their own: each target is a resource, and counts as one.
    let mut found: Vec<ServiceKey> = Vec::new();
    let mut known: BTreeSet<ServiceKey> = BTreeSet::new();
    for (field, target) in refs {
        // One target that cannot be enforced breaks the policy, because it is unknown how much
        // would be left unprotected.
        for service in services_of(tenant, metadata, field, target, named, reading)? {
            if known.insert(service.clone()) {
                found.push(service);
            }
        }
    }
    Some(found)
}

/// Resolves what a target names: a Service, or the services that stand for Gateways. `None` means
/// that no policy can be enforced at the target; it is reported and breaks the policy.
fn services_of<T>(
    tenant: &TenantName,
    metadata: &Metadata,
    field: &str,
    target: &PolicyTargetRef,
    named: PolicyTargets<'_>,
    reading: &mut PolicyResolver<'_, T>,
) -> Option<Vec<ServiceKey>> {
    let listeners = named.listeners;
    match (target.group.as_str(), target.kind.as_str()) {
        // A Gateway of another controller may be a waypoint, whose traffic Canal does not see.
        (GATEWAY_GROUP, "Gateway")
            if listeners.is_own(&metadata.namespace, &target.name)
                && is_in_own_namespace(metadata, target) =>
        {
            gateway_service(tenant, &metadata.namespace, &target.name).map(|key| vec![key])
        }
        // Istio accepts a class in the root namespace only: elsewhere the policy has no authority
        // over the Gateways of other namespaces.
        (GATEWAY_GROUP, "GatewayClass")
            if is_root(metadata) && listeners.is_own_class(&target.name) =>
        {
            let gateways = listeners
                .gateways()
                .filter(|it| it.class.as_ref() == Some(&target.name));
            let keys: Vec<ServiceKey> = gateways.map(|it| it.service.clone()).collect();
            if keys.is_empty() {
                let problem = format!("there is no Gateway of class {} yet", target.name);
                let fix = "create it, or correct the name";
                reading.warning(
                    Code::UnresolvedTarget,
                    format!("{field}.name"),
                    problem,
                    fix,
                );
            }
            Some(keys)
        }
        // Any other target must be a Service, or it is reported there.
        _ => service(tenant, metadata, field, target, named.services, reading).map(|key| vec![key]),
    }
}

fn is_in_own_namespace(metadata: &Metadata, target: &PolicyTargetRef) -> bool {
    let other = target.namespace.as_ref();
    other.is_none_or(|other| *other == metadata.namespace)
}

/// Resolves the Service that a target names. `None` means that no policy can be enforced at the
/// target; it is reported and breaks the policy.
fn service<T>(
    tenant: &TenantName,
    metadata: &Metadata,
    field: &str,
    target: &PolicyTargetRef,
    services: &BTreeMap<ServiceKey, Service>,
    reading: &mut PolicyResolver<'_, T>,
) -> Option<ServiceKey> {
    // Istio accepts `core` as another name of the core group, which Kubernetes writes as empty
    // text.
    if !(target.group.is_empty() || target.group == "core") || target.kind != "Service" {
        let problem = format!(
            "policies are not enforced at a {:?} of group {:?}, so this one denies all of {}",
            target.kind,
            target.group,
            extent(metadata)
        );
        let fix = "name a Service, or a Gateway of Canal's in the same namespace; in place of a waypoint use a selector, or omit both to cover the namespace";
        reading.breaks(
            Code::UnsupportedTarget,
            format!("{field}.kind"),
            problem,
            fix,
        );
        return None;
    }
    if let Some(other) = target
        .namespace
        .as_ref()
        .filter(|_| !is_in_own_namespace(metadata, target))
    {
        let problem = format!(
            "a policy has no effect in another namespace ({other}), so this one denies all of {}",
            extent(metadata)
        );
        reading.breaks(
            Code::OtherNamespace,
            format!("{field}.namespace"),
            problem,
            format!("write the policy in namespace {other}"),
        );
        return None;
    }
    let key = ServiceKey {
        tenant: tenant.clone(),
        namespace: metadata.namespace.clone(),
        name: target.name.clone(),
    };
    // Only a warning, because the Service may be created after its policy.
    if !services.contains_key(&key) {
        let problem = format!("there is no Service {}/{} yet", key.namespace, key.name);
        reading.warning(
            Code::UnresolvedTarget,
            format!("{field}.name"),
            problem,
            "create it, correct the name, or move the policy into its namespace",
        );
    }
    Some(key)
}

/// Describes the target that [`widest`] returns.
fn extent(metadata: &Metadata) -> String {
    if is_root(metadata) {
        "the tenant".to_owned()
    } else {
        format!("namespace {}", metadata.namespace)
    }
}

/// Returns a key for each target of a policy: its own key for the first, and keys that no other
/// policy has for the others.
pub(crate) fn keys(own: &PolicyKey, count: usize, taken: &BTreeSet<PolicyKey>) -> Vec<PolicyKey> {
    let named = |name: String| {
        ObjectName::new(&name).ok().map(|name| PolicyKey {
            name,
            ..own.clone()
        })
    };
    let free = (2..).filter_map(|n: usize| {
        named(format!("{}.target-{n}", own.name))
            .or_else(|| named(format!("target-{n}.of-long-name")))
    });
    std::iter::once(own.clone())
        .chain(free.filter(|key| !taken.contains(key)))
        .take(count)
        .collect()
}

//! Resolves AuthorizationPolicies with Istio's schema and semantics. A policy with an error
//! anywhere denies everything that it targets.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::authorization::{
    Authorization, AuthorizationAction, Authorizer, PolicyKey, PolicyTarget, RULES_MAX,
};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName};
use canal_model::policy::istio_security::{
    AuthorizationPolicy, DRY_RUN_ANNOTATION, PolicyAction, ROOT_NAMESPACES,
};
use canal_model::program::Tenant;

use crate::conditions;
use crate::observability_check::{ReachablePods, blind};
use crate::target::{PolicyTargets, TargetSelector, keys, targets};
use crate::values::ValueContext;
use crate::{PolicyResolver, key};
use canal_diagnostics::{DiagnosticCollector, Sourced};
use canal_ir::resource_budget::ResourceBudget;

/// The objects that policies may refer to.
pub struct PolicyReferences<'a> {
    pub tenant: &'a Tenant,
    pub targets: PolicyTargets<'a>,
    pub authorizers: &'a BTreeMap<PolicyKey, Authorizer>,
}

/// Returns the policies, sorted by key.
pub fn resolve(
    known: &PolicyReferences<'_>,
    declared: &[Sourced<'_, AuthorizationPolicy>],
    reachable: &ReachablePods<'_>,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) -> Vec<Authorization> {
    // A key made for a further target must not be that of an object that comes later in the list.
    let mut taken: BTreeSet<PolicyKey> = declared
        .iter()
        .map(|sourced| key(&known.tenant.name, &sourced.object.metadata))
        .collect();
    let mut policies: Vec<Authorization> = Vec::new();
    for sourced in declared {
        let (policy, targets) = read(known, sourced, report);
        for (key, target) in keys(&policy.key, targets.len(), &taken)
            .into_iter()
            .zip(targets)
        {
            taken.insert(key.clone());
            let policy = Authorization {
                key,
                target,
                ..policy.clone()
            };
            // The resources exceed their limit, so the rest is not compiled.
            if !budget.add_authorization(&policy) {
                return policies;
            }
            for blind in blind(&policy, reachable) {
                let (field, problem, fix) = blind.describe();
                report.warning(
                    Code::UnenforceableCondition,
                    sourced.document,
                    field,
                    problem,
                    fix,
                );
            }
            policies.push(policy);
        }
    }
    policies.sort_by(|a, b| a.key.cmp(&b.key));
    policies
}

fn read(
    known: &PolicyReferences<'_>,
    sourced: &Sourced<'_, AuthorizationPolicy>,
    report: &mut DiagnosticCollector,
) -> (Authorization, Vec<PolicyTarget>) {
    let AuthorizationPolicy { metadata, spec } = sourced.object;
    let mut reading = PolicyResolver::new(sourced, report);
    let written = TargetSelector::from(sourced.object);
    let targets = targets(&known.tenant.name, &written, known.targets, &mut reading);
    let dry_run = dry_run(&mut reading);
    let action = action(known, &mut reading);
    let mut rules = Vec::new();
    if spec.rules.len() > RULES_MAX {
        let problem = format!(
            "the policy has {} rules, more than {RULES_MAX}",
            spec.rules.len()
        );
        reading.breaks(
            Code::LimitExceeded,
            "spec.rules",
            problem,
            "write several policies",
        );
    } else {
        let context = ValueContext {
            namespace: &metadata.namespace,
            trust_domain: &known.tenant.trust_domain,
        };
        rules.extend(spec.rules.iter().enumerate().map(|(at, rule)| {
            conditions::rule(context, &format!("spec.rules[{at}]"), rule, &mut reading)
        }));
    }
    // The remaining rules of a broken policy do not have the meaning that its author intended.
    if reading.broken.is_some() {
        rules.clear();
    }
    let policy = Authorization {
        key: key(&known.tenant.name, metadata),
        // The caller replaces the target: each of the policy's targets gets a resource.
        target: PolicyTarget::Tenant,
        action,
        rules,
        dry_run,
        broken: reading.broken,
    };
    (policy, targets)
}

fn dry_run(reading: &mut PolicyResolver<'_, AuthorizationPolicy>) -> bool {
    match reading
        .source
        .object
        .metadata
        .annotations
        .get(DRY_RUN_ANNOTATION)
        .map(String::as_str)
    {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => {
            let field = format!("metadata.annotations[{DRY_RUN_ANNOTATION:?}]");
            reading.error(
                Code::InvalidAnnotation,
                field,
                format!("{other:?} is neither true nor false, so the policy is enforced"),
                "write \"true\" or \"false\"",
            );
            false
        }
    }
}

fn action(
    known: &PolicyReferences<'_>,
    reading: &mut PolicyResolver<'_, AuthorizationPolicy>,
) -> AuthorizationAction {
    let spec = &reading.source.object.spec;
    if spec.provider.is_some()
        && spec.action != PolicyAction::Custom
        && reading.source.fault("spec.action").is_none()
    {
        reading.breaks(
            Code::ConflictingFields,
            "spec.provider",
            "only `action: CUSTOM` has a provider",
            "remove it, or write the action",
        );
    }
    let never = spec.rules.is_empty() && reading.source.fault("spec.rules").is_none();
    if never && matches!(spec.action, PolicyAction::Deny | PolicyAction::Custom) {
        reading.breaks(
            Code::NeverMatches,
            "spec.rules",
            "without rules it never matches",
            "write the empty rule {} to match always, or remove the policy",
        );
    }
    match spec.action {
        PolicyAction::Allow => AuthorizationAction::Allow,
        PolicyAction::Deny => AuthorizationAction::Deny,
        PolicyAction::Audit => AuthorizationAction::Audit,
        PolicyAction::Custom => custom(known, reading),
    }
}

/// Resolves the authorizer of a CUSTOM policy. A policy without a valid authorizer becomes a broken
/// DENY.
fn custom(
    known: &PolicyReferences<'_>,
    reading: &mut PolicyResolver<'_, AuthorizationPolicy>,
) -> AuthorizationAction {
    let AuthorizationPolicy { metadata, spec } = reading.source.object;
    // The fault has been reported, and it breaks the policy.
    if reading.source.fault("spec.provider").is_some() {
        return AuthorizationAction::Deny;
    }
    // A missing provider is reported like one without a name.
    let name = spec
        .provider
        .as_ref()
        .map(|provider| provider.name.as_str())
        .unwrap_or_default();
    if name.is_empty() {
        reading.breaks(
            Code::MissingField,
            "spec.provider.name",
            "a CUSTOM policy needs a provider",
            "write the name of an ExternalAuthorizer",
        );
        return AuthorizationAction::Deny;
    }
    // A bare name is searched in the policy's own namespace first, then in the root namespaces.
    let candidates: Vec<(Namespace, &str)> = match name.split_once('/') {
        Some((namespace, name)) => Namespace::new(namespace)
            .map(|namespace| (namespace, name))
            .into_iter()
            .collect(),
        None => {
            let roots = ROOT_NAMESPACES
                .iter()
                .filter_map(|root| Namespace::new(root).ok());
            std::iter::once(metadata.namespace.clone())
                .chain(roots)
                .map(|namespace| (namespace, name))
                .collect()
        }
    };
    // An invalid namespace or name is reported below, as one that does not exist.
    let found = candidates.into_iter().find_map(|(namespace, name)| {
        let key = PolicyKey {
            tenant: known.tenant.name.clone(),
            namespace,
            name: ObjectName::new(name).ok()?,
        };
        known.authorizers.contains_key(&key).then_some(key)
    });
    match found {
        Some(key) => AuthorizationAction::Custom(key),
        None => {
            let problem = format!(
                "no valid ExternalAuthorizer {name:?} exists in this namespace or a root namespace"
            );
            reading.breaks(
                Code::UnresolvedAuthorizer,
                "spec.provider.name",
                problem,
                "create it, correct the name, or write namespace/name",
            );
            AuthorizationAction::Deny
        }
    }
}

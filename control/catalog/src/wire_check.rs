//! Makes sure that every data plane can decode what the controller accepts. Each compiled resource
//! is encoded, and decoded as a data plane does it, before anything is accepted. A resource that
//! does not survive is an error of its object, and fails closed. Pure. Start at [`enforce`].

use std::sync::Arc;

use canal_model::authorization::{
    Authentication, Authorization, AuthorizationAction, PeerAuthentication, PeerMode, PolicyKey,
    PolicyTarget,
};
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName};
use canal_model::policy::{ObjectKey, ObjectKind};
use canal_model::program::Resource;
use canal_model::trust::{ClientCertificates, Termination, TerminationCertificate};
use canal_wire::southbound::{decode, encode};

/// Maximum length of the reason that a broken resource carries, in characters. Data planes accept
/// more bytes than that.
/// 200 characters have at most 800 bytes in UTF-8, and data planes accept 1,024
/// (`REASON_BYTES_MAX`).
const REASON_MAX: usize = 200;

/// The resources that may be published.
pub struct EnforcedResources {
    pub resources: Vec<Arc<Resource>>,
    /// Bytes of the resources as data planes receive them.
    pub bytes: u64,
}

/// Checks that a data plane would read the resource as it was compiled, and returns the bytes that
/// it receives.
///
/// # Errors
/// The reason for which a data plane would refuse the resource or misread it.
fn check(resource: &Resource) -> Result<u64, String> {
    let encoded = encode(resource);
    match decode(resource.kind(), &resource.name(), &encoded) {
        Ok(read) if resource.reads_as(&read) => Ok(encoded.len() as u64),
        Ok(_) => Err("data planes would decode it differently".into()),
        Err(why) => Err(why.to_string()),
    }
}

/// Returns the bytes of resources as data planes receive them; `None` if data planes would refuse one
/// of them.
pub fn accepted_bytes<'r>(resources: impl IntoIterator<Item = &'r Arc<Resource>>) -> Option<u64> {
    let checked = resources.into_iter().map(|it| check(it).ok());
    checked.sum()
}

/// Replaces each resource that data planes would refuse by one that denies, where there is such a
/// resource, and leaves out the others. Each of them gets an error. It stops at the first resource
/// with which they have more than `bytes_max` bytes; the result then has that number.
pub fn enforce(
    resources: &[Arc<Resource>],
    bytes_max: u64,
    diagnostics: &mut Vec<Diagnostic>,
) -> EnforcedResources {
    let mut out = EnforcedResources {
        resources: Vec::with_capacity(resources.len()),
        bytes: 0,
    };
    for resource in resources {
        let checked = match check(resource) {
            Ok(bytes) => Some((resource.clone(), bytes)),
            Err(why) => {
                diagnostics.push(diagnostic(resource, &why));
                let denying = broken(resource, &why).into_iter();
                let mut checked = denying.filter_map(|it| check(&it).ok().map(|bytes| (it, bytes)));
                checked.next().map(|(it, bytes)| (Arc::new(it), bytes))
            }
        };
        let Some((resource, bytes)) = checked else {
            continue;
        };
        out.resources.push(resource);
        out.bytes += bytes;
        if out.bytes > bytes_max {
            break;
        }
    }
    out
}

/// Returns resources that deny in place of `resource`, the narrowest first.
fn broken(resource: &Resource, why: &str) -> Vec<Resource> {
    let reason: String = why.chars().take(REASON_MAX).collect();
    // A target that does not decode cannot be denied alone, but the namespace of its policy can.
    let targets = |target: &PolicyTarget, key: &PolicyKey| {
        [
            target.clone(),
            PolicyTarget::Namespace(key.namespace.clone()),
        ]
    };
    match resource {
        Resource::Authorization(a) => {
            let of = |target| Authorization {
                key: a.key.clone(),
                target,
                action: AuthorizationAction::Deny,
                rules: Vec::new(),
                dry_run: false,
                broken: Some(reason.clone()),
            };
            targets(&a.target, &a.key)
                .map(of)
                .map(Resource::Authorization)
                .into()
        }
        Resource::Authentication(a) => {
            let of = |target| Authentication {
                key: a.key.clone(),
                target,
                rules: Vec::new(),
                broken: Some(reason.clone()),
            };
            targets(&a.target, &a.key)
                .map(of)
                .map(Resource::Authentication)
                .into()
        }
        Resource::PeerAuthentication(p) => {
            let of = |target| PeerAuthentication {
                key: p.key.clone(),
                target,
                mode: Some(PeerMode::Strict),
                ports: Default::default(),
                created: p.created,
            };
            targets(&p.target, &p.key)
                .map(of)
                .map(Resource::PeerAuthentication)
                .into()
        }
        Resource::Termination(t) => vec![Resource::Termination(Termination {
            service: t.service.clone(),
            port: t.port,
            certificate: TerminationCertificate::Mesh,
            clients: ClientCertificates::Required,
            required: true,
            broken: Some(reason),
        })],
        // A CUSTOM policy denies without its authorizer. The other kinds grant something, or
        // restrict no access: a Throttle limits only rates.
        _ => Vec::new(),
    }
}

fn diagnostic(resource: &Resource, why: &str) -> Diagnostic {
    Diagnostic {
        severity: Severity::Error,
        code: Code::ResourceRefused,
        origin: None,
        object: object_of(resource),
        field: String::new(),
        problem: format!(
            "data planes would refuse {}: {}",
            resource.name(),
            why.chars().take(REASON_MAX).collect::<String>()
        ),
        fix: "make it smaller, or change the value that the text names".into(),
    }
}

/// Returns the object that a resource was compiled from, if it is a single one.
fn object_of(resource: &Resource) -> Option<ObjectKey> {
    let of = |kind, namespace: &Namespace, name: &ObjectName| {
        Some(ObjectKey {
            kind,
            namespace: namespace.clone(),
            name: name.clone(),
        })
    };
    match resource {
        Resource::Authorization(a) => of(
            ObjectKind::AuthorizationPolicy,
            &a.key.namespace,
            &a.key.name,
        ),
        Resource::Authentication(a) => of(
            ObjectKind::RequestAuthentication,
            &a.key.namespace,
            &a.key.name,
        ),
        Resource::PeerAuthentication(p) => of(
            ObjectKind::PeerAuthentication,
            &p.key.namespace,
            &p.key.name,
        ),
        Resource::Authorizer(a) => of(
            ObjectKind::ExternalAuthorizer,
            &a.key.namespace,
            &a.key.name,
        ),
        Resource::Route(r) => of(
            ObjectKind::from_word(&r.key.kind)?,
            &r.key.namespace,
            &r.key.name,
        ),
        Resource::Service(s) => of(ObjectKind::Service, &s.key.namespace, &s.key.name),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use canal_model::authorization::{Attribute, AttributeMatch, Clause, PolicyRule, VALUES_MAX};

    use super::*;

    fn policy(values: usize, target: PolicyTarget) -> Arc<Resource> {
        let clause = Clause {
            attribute: Attribute::Path,
            any: (0..values)
                .map(|n| AttributeMatch::Exact(format!("/{n}")))
                .collect(),
            none: vec![AttributeMatch::Exact("/other".into())],
        };
        Arc::new(Resource::Authorization(Authorization {
            key: PolicyKey {
                tenant: "alpha".parse().unwrap(),
                namespace: "shop".parse().unwrap(),
                name: "p".parse().unwrap(),
            },
            target,
            action: AuthorizationAction::Allow,
            rules: vec![PolicyRule {
                when: vec![clause],
                ..PolicyRule::default()
            }],
            dry_run: true,
            broken: None,
        }))
    }

    /// S3: a resource that a data plane would refuse is never accepted as it is, and denies until
    /// its object is fixed.
    #[test]
    fn policy_that_data_planes_refuse_denies_and_is_an_error() {
        let fine = policy(VALUES_MAX - 1, PolicyTarget::Tenant);
        let mut found = Vec::new();
        assert_eq!(
            (
                enforce(std::slice::from_ref(&fine), u64::MAX, &mut found).resources,
                found.len()
            ),
            (vec![fine], 0)
        );
        let other: canal_model::ids::ServiceKey = "beta/shop/a".parse().unwrap();
        let namespace = PolicyTarget::Namespace("shop".parse().unwrap());
        for (target, denied) in [
            (PolicyTarget::Tenant, PolicyTarget::Tenant),
            (PolicyTarget::Service(other), namespace),
        ] {
            let out = enforce(&[policy(VALUES_MAX, target)], u64::MAX, &mut found).resources;
            let [out] = &out[..] else { panic!("{out:?}") };
            let Resource::Authorization(a) = out.as_ref() else {
                panic!("{out:?}")
            };
            assert!(
                a.broken.is_some()
                    && a.action == AuthorizationAction::Deny
                    && !a.dry_run
                    && a.target == denied,
                "{a:?}"
            );
            assert!(check(out).is_ok());
        }
        let errors = found
            .iter()
            .filter(|d| d.severity == Severity::Error)
            .count();
        assert_eq!(
            (errors, found[0].object.as_ref().unwrap().to_string()),
            (2, "AuthorizationPolicy shop/p".to_string())
        );
    }

    /// N3: nothing is encoded and decoded that the tenant may not have anyway.
    #[test]
    fn resources_beyond_the_bytes_are_not_looked_at() {
        let all: Vec<Arc<Resource>> = (1..=50)
            .map(|values| policy(values, PolicyTarget::Tenant))
            .collect();
        let whole = enforce(&all, u64::MAX, &mut Vec::new());
        assert_eq!(whole.resources.len(), all.len());
        let half = enforce(&all, whole.bytes / 2, &mut Vec::new());
        assert!(
            half.bytes > whole.bytes / 2
                && half.bytes < whole.bytes
                && half.resources.len() < all.len(),
            "{}",
            half.bytes
        );
        assert_eq!(
            enforce(&all, whole.bytes, &mut Vec::new()).resources.len(),
            50
        );
    }
}

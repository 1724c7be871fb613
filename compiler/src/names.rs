//! Host names: resolves a name to a service relative to a namespace, and validates the hosts of
//! routes.

pub(crate) use canal_attachment::hostname::parse as host_match;
use canal_model::ids::{Namespace, ObjectName, ServiceKey, TenantName};

/// DNS domain of a tenant's services; the default of Kubernetes.
pub(crate) const CLUSTER_DOMAIN: &str = "cluster.local";

/// Returns the full host name of a service.
pub(crate) fn hostname(key: &ServiceKey) -> String {
    format!("{}.{}.svc.{CLUSTER_DOMAIN}", key.name, key.namespace)
}

/// Resolves `host` for an object in `namespace`. Accepts `name`, `name.namespace`,
/// `name.namespace.svc` and the full name.
pub(crate) fn service(
    tenant: &TenantName,
    namespace: &Namespace,
    host: &str,
) -> Option<ServiceKey> {
    let parts: Vec<&str> = host.split('.').collect();
    let (name, namespace) = match parts.as_slice() {
        [name] => (*name, namespace.clone()),
        [name, namespace]
        | [name, namespace, "svc"]
        | [name, namespace, "svc", "cluster", "local"] => (*name, Namespace::new(namespace).ok()?),
        _ => return None,
    };
    Some(ServiceKey {
        tenant: tenant.clone(),
        namespace,
        name: ObjectName::new(name).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_mean_the_own_namespace() {
        let tenant = TenantName::new("alpha").unwrap();
        let here = Namespace::new("here").unwrap();
        for (host, expected) in [
            ("reviews", Some("alpha/here/reviews")),
            ("reviews.there", Some("alpha/there/reviews")),
            ("reviews.there.svc", Some("alpha/there/reviews")),
            (
                "reviews.there.svc.cluster.local",
                Some("alpha/there/reviews"),
            ),
            ("reviews.there.svc.cluster", None),
            ("www.example.com", None),
            ("*", None),
            ("*.there", None),
            ("", None),
            ("reviews.there.svc.other.local", None),
        ] {
            assert_eq!(
                service(&tenant, &here, host)
                    .map(|key| key.to_string())
                    .as_deref(),
                expected,
                "{host:?}"
            );
        }
    }
}

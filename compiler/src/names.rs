//! Host names: resolves a name to a service relative to a namespace, and validates the hosts of
//! routes.

use canal_model::ids::{Namespace, ObjectName, ServiceKey, TenantName};
use canal_model::program::HostMatch;

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

/// Parses a host of a route: an exact name, or `*.` and a domain. The error is the problem, without
/// a full stop.
pub(crate) fn host_match(written: &str) -> Result<HostMatch, String> {
    let refuse = |why: &str| {
        Err(format!(
            "{:?} {why}",
            written.chars().take(80).collect::<String>()
        ))
    };
    if written.parse::<std::net::IpAddr>().is_ok() {
        return refuse("is an address, not a host name");
    }
    if written.contains(':') {
        return refuse("has a port, but hosts are compared without a port");
    }
    let (wildcard, name) = match written.strip_prefix("*.") {
        Some(domain) => (true, domain),
        None => (false, written),
    };
    if ObjectName::new(name).is_err() {
        return refuse("is not a lower-case host name, optionally with the prefix `*.`");
    }
    Ok(if wildcard {
        HostMatch::Suffix(format!(".{name}"))
    } else {
        HostMatch::Exact(name.to_owned())
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

    #[test]
    fn hosts_are_names() {
        for (written, expected) in [
            ("example.com", Some(HostMatch::Exact("example.com".into()))),
            (
                "*.example.com",
                Some(HostMatch::Suffix(".example.com".into())),
            ),
            ("*", None),
            ("a.*.com", None),
            ("Example.com", None),
            ("10.0.0.1", None),
            ("::1", None),
            ("example.com:80", None),
            ("", None),
        ] {
            assert_eq!(host_match(written).ok(), expected, "{written:?}");
        }
    }
}

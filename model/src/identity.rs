//! SPIFFE identities in Canal's form: `spiffe://<trust domain>/ns/<namespace>/sa/<service
//! account>`. Certificates are not handled here.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::{IdError, Namespace, ServiceAccount, TenantName, TrustDomain};
use crate::principal::Principal;

/// The identity that a workload proves with the URI SAN of its certificate (SPIFFE-ID §2; the path
/// has Istio's form).
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Identity {
    /// The trust domain of the workload's tenant.
    pub trust_domain: TrustDomain,
    /// The namespace that the workload is in.
    pub namespace: Namespace,
    /// The service account that the workload runs as.
    pub service_account: ServiceAccount,
}

/// Maximum length of a SPIFFE ID, in bytes (SPIFFE-ID §2.3).
pub const IDENTITY_BYTES_MAX: usize = 2048;

/// The namespace of Canal's own components. It replaces the tenant's name where the components are
/// meant, so no tenant may have this name.
pub const SYSTEM_NAMESPACE: &str = "canal-system";

/// Returns the identity of every gateway replica in the given tenant's trust domain:
/// `ns/canal-system/sa/gateway`.
pub fn gateway_identity(trust_domain: TrustDomain) -> Identity {
    let namespace = Namespace::new(SYSTEM_NAMESPACE);
    let service_account = ServiceAccount::new("gateway");
    match (namespace, service_account) {
        (Ok(namespace), Ok(service_account)) => Identity {
            trust_domain,
            namespace,
            service_account,
        },
        _ => unreachable!("the two constants are valid names; a test below verifies it"),
    }
}

/// The trust domain in which Canal's own components authenticate each other; no tenant may have it.
pub const COMPONENTS: &str = "components.canal";

/// Returns [`SYSTEM_NAMESPACE`] as the owner of Canal's components, and [`COMPONENTS`] as their
/// trust domain.
pub fn components() -> (TenantName, TrustDomain) {
    match (
        TenantName::new(SYSTEM_NAMESPACE),
        TrustDomain::new(COMPONENTS),
    ) {
        (Ok(owner), Ok(domain)) => (owner, domain),
        _ => unreachable!("the two constants are valid names; a test below verifies it"),
    }
}

/// Returns the identity that a component of Canal proves on the channel between requesters and key
/// servers.
///
/// The namespace is the owning tenant, or `canal-system` for the provider's components. The service
/// account is `node.NAME`, `gateway.NAME` or `keyserver.NAME`. `None` for principals that do not
/// use the channel.
pub fn component_identity(principal: &Principal) -> Option<Identity> {
    let (tenant, account) = match principal {
        Principal::Node { name, tenant, .. } => (Some(tenant), format!("node.{name}")),
        Principal::Gateway { name, .. } => (None, format!("gateway.{name}")),
        Principal::KeyServer { name, tenant, .. } => (tenant.as_ref(), format!("keyserver.{name}")),
        Principal::Edge { .. } | Principal::Operator { .. } => return None,
    };
    let namespace = tenant.map_or(SYSTEM_NAMESPACE, TenantName::as_str);
    Some(Identity {
        trust_domain: TrustDomain::new(COMPONENTS).ok()?,
        namespace: Namespace::new(namespace).ok()?,
        service_account: ServiceAccount::new(&account).ok()?,
    })
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "spiffe://{}/ns/{}/sa/{}",
            self.trust_domain, self.namespace, self.service_account
        )
    }
}
impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl FromStr for Identity {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let bad = || IdError::Form {
            what: "identity",
            value: s.chars().take(120).collect(),
            form: "spiffe://<trust domain>/ns/<namespace>/sa/<service account>",
        };
        if s.len() > IDENTITY_BYTES_MAX {
            return Err(bad());
        }
        let rest = s.strip_prefix("spiffe://").ok_or_else(bad)?;
        let parts: Vec<&str> = rest.split('/').collect();
        match parts.as_slice() {
            [td, "ns", ns, "sa", sa] => Ok(Self {
                trust_domain: TrustDomain::new(td)?,
                namespace: Namespace::new(ns)?,
                service_account: ServiceAccount::new(sa)?,
            }),
            _ => Err(bad()),
        }
    }
}

impl TryFrom<String> for Identity {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        text.parse()
    }
}
impl From<Identity> for String {
    fn from(identity: Identity) -> String {
        identity.to_string()
    }
}

/// The peer of a connection whose certificate was verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedPeer {
    /// The tenant whose trust domain verified the certificate.
    pub tenant: TenantName,
    /// The identity in the certificate.
    pub identity: Identity,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_round_trip_and_refuse_other_shapes() {
        let id: Identity = "spiffe://alpha.example/ns/bookinfo/sa/reviews"
            .parse()
            .unwrap();
        assert_eq!(
            id.to_string(),
            "spiffe://alpha.example/ns/bookinfo/sa/reviews"
        );
        for bad in [
            "",
            "spiffe://a",
            "https://a/ns/b/sa/c",
            "spiffe://a/ns/b/sa/c/d",
            "spiffe://a/ns//sa/c",
            "spiffe://A/ns/b/sa/c",
            "spiffe://a/sa/b/ns/c",
        ] {
            assert!(bad.parse::<Identity>().is_err(), "{bad:?}");
        }
        assert!(
            format!("spiffe://a/ns/b/sa/{}", "c".repeat(3000))
                .parse::<Identity>()
                .is_err()
        );
    }

    #[test]
    fn components_have_identities_of_their_own() {
        let az = || "az1".parse().unwrap();
        let node = |name: &str| Principal::Node {
            name: name.parse().unwrap(),
            tenant: "alpha".parse().unwrap(),
            az: az(),
        };
        let keys = |tenant: Option<&str>| Principal::KeyServer {
            name: "ks1".parse().unwrap(),
            az: az(),
            tenant: tenant.map(|t| t.parse().unwrap()),
        };
        let cases = [
            (
                node("n1"),
                Some("spiffe://components.canal/ns/alpha/sa/node.n1"),
            ),
            (
                node("n1.rack2"),
                Some("spiffe://components.canal/ns/alpha/sa/node.n1.rack2"),
            ),
            (
                Principal::Gateway {
                    name: "r1".parse().unwrap(),
                    az: az(),
                },
                Some("spiffe://components.canal/ns/canal-system/sa/gateway.r1"),
            ),
            (
                keys(None),
                Some("spiffe://components.canal/ns/canal-system/sa/keyserver.ks1"),
            ),
            (
                keys(Some("alpha")),
                Some("spiffe://components.canal/ns/alpha/sa/keyserver.ks1"),
            ),
            // Edges do not use the channel between requesters and key servers.
            (
                Principal::Edge {
                    name: "e1".parse().unwrap(),
                    az: az(),
                },
                None,
            ),
        ];
        for (principal, want) in cases {
            assert_eq!(
                component_identity(&principal)
                    .map(|id| id.to_string())
                    .as_deref(),
                want,
                "{principal}"
            );
        }
    }

    #[test]
    fn the_gateway_identity_is_valid() {
        let td = TrustDomain::new("alpha.example").unwrap();
        let id = gateway_identity(td);
        assert_eq!(id.to_string().parse::<Identity>().unwrap(), id);
    }

    #[test]
    fn canals_own_parts_have_an_owner_and_a_domain() {
        let (owner, domain) = components();
        assert_eq!(
            (owner.as_str(), domain.as_str()),
            ("canal-system", COMPONENTS)
        );
    }
}

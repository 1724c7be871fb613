//! SPIFFE identities as Canal uses them: `spiffe://<trust domain>/ns/<namespace>/sa/<service account>`. No certificates here.

use std::fmt;
use std::str::FromStr;

use crate::ids::{IdError, Namespace, ServiceAccount, TenantName, TrustDomain};
use crate::principal::Principal;

/// The identity a workload proves with its certificate's URI SAN (SPIFFE-ID §2; path form as in Istio).
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// The tenant's trust domain.
    pub trust_domain: TrustDomain,
    /// The workload's namespace.
    pub namespace: Namespace,
    /// The workload's service account.
    pub service_account: ServiceAccount,
}

/// Longest SPIFFE ID accepted, in bytes (SPIFFE-ID §2.3).
pub const IDENTITY_BYTES_MAX: usize = 2048;

/// The namespace of Canal's own parts, and what stands for a tenant where they are meant; no tenant may have the name.
pub const PROVIDER: &str = "canal-system";

/// The namespace and service account of every gateway replica, inside each tenant's trust domain: `ns/canal-system/sa/gateway`.
pub fn gateway_identity(trust_domain: TrustDomain) -> Identity {
    let namespace = Namespace::new(PROVIDER);
    let service_account = ServiceAccount::new("gateway");
    match (namespace, service_account) {
        (Ok(namespace), Ok(service_account)) => Identity { trust_domain, namespace, service_account },
        _ => unreachable!("the two constants are valid names; the test below holds them to it"),
    }
}

/// The trust domain of Canal's own parts among each other; no tenant may have it.
pub const COMPONENTS: &str = "components.canal";

/// [`PROVIDER`] and [`COMPONENTS`].
pub fn components() -> (TenantName, TrustDomain) {
    match (TenantName::new(PROVIDER), TrustDomain::new(COMPONENTS)) {
        (Ok(owner), Ok(domain)) => (owner, domain),
        _ => unreachable!("the two constants are valid names; the test below holds them to it"),
    }
}

/// The identity of a part of Canal: what it proves on the channel between requesters and key servers. The namespace is the owning tenant, or
/// `canal-system` for the provider's; the service account is `node.NAME`, `gateway.NAME` or `keyserver.NAME`. `None` for those who use no channel.
pub fn component_identity(principal: &Principal) -> Option<Identity> {
    let (tenant, account) = match principal {
        Principal::Node { name, tenant, .. } => (Some(tenant), format!("node.{name}")),
        Principal::Gateway { name, .. } => (None, format!("gateway.{name}")),
        Principal::KeyServer { name, tenant, .. } => (tenant.as_ref(), format!("keyserver.{name}")),
        Principal::Edge { .. } | Principal::Operator { .. } => return None,
    };
    let namespace = tenant.map_or(PROVIDER, TenantName::as_str);
    Some(Identity {
        trust_domain: TrustDomain::new(COMPONENTS).ok()?,
        namespace: Namespace::new(namespace).ok()?,
        service_account: ServiceAccount::new(&account).ok()?,
    })
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spiffe://{}/ns/{}/sa/{}", self.trust_domain, self.namespace, self.service_account)
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
            given: s.chars().take(120).collect(),
            form: "spiffe://<trust domain>/ns/<namespace>/sa/<service account>",
        };
        if s.len() > IDENTITY_BYTES_MAX {
            return Err(bad());
        }
        let rest = s.strip_prefix("spiffe://").ok_or_else(bad)?;
        let parts: Vec<&str> = rest.split('/').collect();
        match parts.as_slice() {
            [td, "ns", ns, "sa", sa] => {
                Ok(Self { trust_domain: TrustDomain::new(td)?, namespace: Namespace::new(ns)?, service_account: ServiceAccount::new(sa)? })
            }
            _ => Err(bad()),
        }
    }
}

/// Who a connection belongs to once its certificate was verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The tenant whose trust domain verified the certificate.
    pub tenant: TenantName,
    /// The identity in it.
    pub identity: Identity,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_round_trip_and_refuse_other_shapes() {
        let id: Identity = "spiffe://alpha.example/ns/bookinfo/sa/reviews".parse().unwrap();
        assert_eq!(id.to_string(), "spiffe://alpha.example/ns/bookinfo/sa/reviews");
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
        assert!(format!("spiffe://a/ns/b/sa/{}", "c".repeat(3000)).parse::<Identity>().is_err());
    }

    #[test]
    fn components_have_identities_of_their_own() {
        let az = || "az1".parse().unwrap();
        let node = |name: &str| Principal::Node { name: name.parse().unwrap(), tenant: "alpha".parse().unwrap(), az: az() };
        let keys = |tenant: Option<&str>| Principal::KeyServer {
            name: "ks1".parse().unwrap(),
            az: az(),
            tenant: tenant.map(|t| t.parse().unwrap()),
        };
        let cases = [
            (node("n1"), Some("spiffe://components.canal/ns/alpha/sa/node.n1")),
            (node("n1.rack2"), Some("spiffe://components.canal/ns/alpha/sa/node.n1.rack2")),
            (Principal::Gateway { name: "r1".parse().unwrap(), az: az() }, Some("spiffe://components.canal/ns/canal-system/sa/gateway.r1")),
            (keys(None), Some("spiffe://components.canal/ns/canal-system/sa/keyserver.ks1")),
            (keys(Some("alpha")), Some("spiffe://components.canal/ns/alpha/sa/keyserver.ks1")),
            (Principal::Edge { name: "e1".parse().unwrap(), az: az() }, None),
        ];
        for (principal, want) in cases {
            assert_eq!(component_identity(&principal).map(|id| id.to_string()).as_deref(), want, "{principal}");
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
        assert_eq!((owner.as_str(), domain.as_str()), ("canal-system", COMPONENTS));
    }
}

//! SPIFFE identities as Canal uses them: `spiffe://<trust domain>/ns/<namespace>/sa/<service account>`. No certificates here.

use std::fmt;
use std::str::FromStr;

use crate::ids::{IdError, Namespace, ServiceAccount, TenantName, TrustDomain};

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

/// The namespace and service account of every gateway replica, inside each tenant's trust domain: `ns/canal-system/sa/gateway`.
pub fn gateway_identity(trust_domain: TrustDomain) -> Identity {
    let namespace = Namespace::new("canal-system");
    let service_account = ServiceAccount::new("gateway");
    match (namespace, service_account) {
        (Ok(namespace), Ok(service_account)) => Identity { trust_domain, namespace, service_account },
        _ => unreachable!("the two constants are valid names; the test below holds them to it"),
    }
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
    fn the_gateway_identity_is_valid() {
        let td = TrustDomain::new("alpha.example").unwrap();
        let id = gateway_identity(td);
        assert_eq!(id.to_string().parse::<Identity>().unwrap(), id);
    }
}

//! Trust and keys as data planes and key servers are told of them: bundles, key policy, entitlements, key servers, TLS that ends at
//! gateways. Types only; no key is ever in here.

use std::fmt;
use std::net::SocketAddr;

use serde::Deserialize;

use crate::identity::Identity;
use crate::ids::{NodeName, ObjectName, ReplicaName, ServiceKey, TenantName, TrustDomain};

/// Roots of a bundle at most.
pub const ROOTS_MAX: usize = 16;
/// Revocation lists of a bundle at most.
pub const REVOKED_MAX: usize = 16;
/// Bytes of one PEM text at most: a list of some 100,000 revoked certificates.
pub const PEM_BYTES_MAX: usize = 4 << 20;
/// Addresses of a key server at most.
pub const KEY_SERVER_ADDRESSES_MAX: usize = 16;
/// Identities of an entitlement at most: pods of a node have far fewer.
pub const IDENTITIES_MAX: usize = 4096;

/// What vouches for a trust domain, as one tenant's data planes are told. Named `tenant/trust domain`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    pub tenant: TenantName,
    pub trust_domain: TrustDomain,
    /// PEM, one root each. While a root is replaced there are two.
    pub roots: Vec<String>,
    /// Certificate revocation lists (RFC 5280), PEM. A revoked peer's open connections are closed.
    pub revoked: Vec<String>,
    /// Of another tenant, with which this one federates: its members may connect, and nothing allows them anything but a policy that
    /// names them.
    pub federated: bool,
}

/// How a tenant's private keys are kept. Part of the tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyPolicy {
    pub place: KeyPlace,
    pub algorithm: KeyAlgorithm,
    /// With [`KeyPlace::KeyServer`]: whether a data plane may hold a key of its own and shake hands itself while no key server answers.
    pub local_fallback: bool,
}

/// Where private keys are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum KeyPlace {
    /// In the node's and the gateway's memory and 0600 files.
    #[default]
    Local,
    /// Only in key servers, which run handshakes for nodes and gateways.
    KeyServer,
}

/// Of keys that Canal makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize)]
pub enum KeyAlgorithm {
    #[default]
    EcdsaP256,
    Rsa2048,
}

/// Who asks a key server. Written `node/NAME` or `gateway/NAME`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Requester {
    Node(NodeName),
    Gateway(ReplicaName),
}

impl fmt::Display for Requester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Requester::Node(name) => write!(f, "node/{name}"),
            Requester::Gateway(name) => write!(f, "gateway/{name}"),
        }
    }
}

/// The identities of `tenant` that run on a requester, so that a key server may use their keys for it. Named `tenant/requester`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entitlement {
    pub tenant: TenantName,
    pub requester: Requester,
    /// Sorted, without duplicates.
    pub identities: Vec<Identity>,
}

/// A tenant's own key server (keyless). The provider's are told to data planes by their flags. Named `tenant/name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyServer {
    pub tenant: TenantName,
    pub name: ObjectName,
    /// Asked in this order.
    pub addresses: Vec<SocketAddr>,
}

/// TLS of clients without a node proxy ends at the gateway (Canal appendix B, semi-managed). Named as the service, then `:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Termination {
    pub service: ServiceKey,
    pub port: u16,
    pub certificate: TerminationCertificate,
    pub clients: ClientCertificates,
    /// Plain connections to this port are refused.
    pub required: bool,
    /// The source was broken: connections to this port are refused.
    pub broken: Option<String>,
}

/// Whose certificate the gateway shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminationCertificate {
    /// One of the tenant's trust domain, with the service's hostname; its key is where the tenant's keys are.
    Mesh,
    /// The tenant's own, whose key stays in the tenant's [`KeyServer`] of this name: it signs, and may refuse.
    KeyServer(ObjectName),
}

/// Whether clients show certificates of the tenant's trust domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum ClientCertificates {
    #[default]
    None,
    /// Verified if shown.
    Optional,
    Required,
}

//! Trust and keys as data planes and key servers receive them: trust bundles, key policy,
//! entitlements, key servers, TLS termination. Types only; no private key is ever in here.

use std::fmt;
use std::net::SocketAddr;

use serde::Deserialize;

use crate::identity::Identity;
use crate::ids::{NodeName, ObjectName, ReplicaName, ServiceKey, TenantName, TrustDomain};

/// Maximum number of roots in a bundle.
/// A file of roots has at most 8 (`FILE_CERTIFICATES_MAX` of `canal_ca`), and a rotation needs the
/// old ones and the new ones.
pub const ROOTS_MAX: usize = 16;
/// Maximum number of revocation lists in a bundle.
/// As many as there may be roots ([`ROOTS_MAX`]).
pub const REVOKED_MAX: usize = 16;
/// Maximum number of blocked identities of a trust domain.
/// As many as revoked certificates at the controller. Every data plane that trusts the domain holds
/// them.
pub const BLOCKED_IDENTITIES_MAX: usize = 10_000;
/// Maximum size of one PEM text: a list of about 100,000 revoked certificates.
/// A list of one own trust domain has at most 10,000; an external CA may have more.
pub const PEM_BYTES_MAX: usize = 4 << 20;
/// Maximum number of addresses of a key server.
/// Nobody measured this value.
pub const KEY_SERVER_ADDRESSES_MAX: usize = 16;
/// Maximum number of identities in an entitlement; the pods of a node have far fewer.
/// A full node has 1,000 pods.
pub const IDENTITIES_MAX: usize = 4096;

/// The trust bundle (SPIFFE) of a trust domain, as one tenant's data planes receive it. Named
/// `tenant/trust domain`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustBundle {
    pub tenant: TenantName,
    pub trust_domain: TrustDomain,
    /// Root certificates in PEM, one per entry. There are two during a root rotation.
    pub roots: Vec<String>,
    /// Certificate revocation lists (RFC 5280) in PEM. Open connections of a revoked peer are
    /// closed.
    pub revoked: Vec<String>,
    /// Identities that an operator revoked. All their certificates count as revoked, also those
    /// that are on no list because the controller has no record of them.
    pub blocked: Vec<Identity>,
    /// The trust domain is another tenant's, with which this one federates. Its members may
    /// connect, but only a policy that names them allows them anything.
    pub federated: bool,
}

/// The location and algorithm of a tenant's private keys. It is part of the tenant resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyPolicy {
    pub location: KeyLocation,
    pub algorithm: KeyAlgorithm,
    /// With [`KeyLocation::KeyServer`]: whether a data plane may have its own key and run
    /// handshakes itself while no key server answers.
    pub local_fallback: bool,
}

/// Location of a tenant's private keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum KeyLocation {
    /// Keys are in the memory of the node and the gateway, and in files of mode 0600.
    #[default]
    Local,
    /// Keys are only in key servers, which run handshakes for nodes and gateways.
    KeyServer,
}

/// Algorithm of the keys that Canal generates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize)]
pub enum KeyAlgorithm {
    #[default]
    EcdsaP256,
    Rsa2048,
}

/// A client of key servers: a node or a gateway replica. Written `node/NAME` or `gateway/NAME`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KeyRequester {
    Node(NodeName),
    Gateway(ReplicaName),
}

impl fmt::Display for KeyRequester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyRequester::Node(name) => write!(f, "node/{name}"),
            KeyRequester::Gateway(name) => write!(f, "gateway/{name}"),
        }
    }
}

/// The identities of `tenant` that run on a requester. A key server may use their keys for that
/// requester. Named `tenant/requester`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entitlement {
    pub tenant: TenantName,
    pub requester: KeyRequester,
    /// Sorted list of identities without duplicates.
    pub identities: Vec<Identity>,
}

/// A tenant's own key server (keyless). Data planes get the provider's key servers by command-line
/// flags. Named `tenant/name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyServer {
    pub tenant: TenantName,
    pub name: ObjectName,
    /// Addresses in the order in which requesters try them.
    pub addresses: Vec<SocketAddr>,
}

/// TLS termination at the gateway for clients without a node proxy (Canal appendix B,
/// semi-managed). Named as the service, then `:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Termination {
    pub service: ServiceKey,
    pub port: u16,
    pub certificate: TerminationCertificate,
    pub clients: ClientCertificates,
    /// If true, the gateway refuses plaintext connections to this port.
    pub required: bool,
    /// The reason why the source is broken. While it is set, the gateway refuses all connections to
    /// this port.
    pub broken: Option<String>,
}

/// The certificate that the gateway presents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminationCertificate {
    /// A certificate of the tenant's trust domain with the service's hostname. Its key is where the
    /// tenant's other keys are.
    Mesh,
    /// The tenant's own certificate. Its key stays in the tenant's [`KeyServer`] of this name,
    /// which signs and may refuse to.
    KeyServer(ObjectName),
}

/// Requirement on clients to present certificates of the tenant's trust domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum ClientCertificates {
    #[default]
    None,
    /// A certificate is verified if the client presents one.
    Optional,
    Required,
}

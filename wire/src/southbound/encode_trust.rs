//! Converts trust bundles, key servers, entitlements and TLS terminations to wire messages.

use canal_model::trust as t;

use super::encode::key;
use crate::program as w;

/// Encodes a key policy. The default is omitted, so that tenant resources from before this field
/// existed stay the same.
pub(super) fn key_policy(k: &t::KeyPolicy) -> Option<w::KeyPolicy> {
    let place = match k.location {
        t::KeyLocation::Local => w::key_policy::KeyLocation::Local,
        t::KeyLocation::KeyServer => w::key_policy::KeyLocation::KeyServer,
    };
    let algorithm = match k.algorithm {
        t::KeyAlgorithm::EcdsaP256 => w::key_policy::Algorithm::EcdsaP256,
        t::KeyAlgorithm::Rsa2048 => w::key_policy::Algorithm::Rsa2048,
    };
    (*k != t::KeyPolicy::default()).then(|| w::KeyPolicy {
        location: place.into(),
        algorithm: algorithm.into(),
        local_fallback: k.local_fallback,
    })
}

impl From<&t::TrustBundle> for w::Bundle {
    fn from(b: &t::TrustBundle) -> Self {
        Self {
            tenant: b.tenant.to_string(),
            trust_domain: b.trust_domain.to_string(),
            roots: b.roots.clone(),
            revoked: b.revoked.clone(),
            federated: b.federated,
            blocked: b.blocked.iter().map(ToString::to_string).collect(),
        }
    }
}

impl From<&t::KeyServer> for w::KeyServer {
    fn from(k: &t::KeyServer) -> Self {
        Self {
            tenant: k.tenant.to_string(),
            name: k.name.to_string(),
            addresses: k.addresses.iter().map(ToString::to_string).collect(),
        }
    }
}

impl From<&t::Termination> for w::Termination {
    fn from(x: &t::Termination) -> Self {
        use w::termination::{Certificate, ClientCertificates};
        let certificate = match &x.certificate {
            t::TerminationCertificate::Mesh => Certificate::Mesh(true),
            t::TerminationCertificate::KeyServer(name) => Certificate::KeyServer(name.to_string()),
        };
        let clients = match x.clients {
            t::ClientCertificates::None => ClientCertificates::None,
            t::ClientCertificates::Optional => ClientCertificates::Optional,
            t::ClientCertificates::Required => ClientCertificates::Required,
        };
        Self {
            service: key(&x.service),
            port: x.port.into(),
            certificate: Some(certificate),
            clients: clients.into(),
            required: x.required,
            broken: x.broken.clone(),
        }
    }
}

impl From<&t::Entitlement> for w::Entitlement {
    fn from(e: &t::Entitlement) -> Self {
        use w::entitlement::Requester;
        let requester = match &e.requester {
            t::KeyRequester::Node(name) => Requester::Node(name.to_string()),
            t::KeyRequester::Gateway(name) => Requester::Gateway(name.to_string()),
        };
        Self {
            tenant: e.tenant.to_string(),
            requester: Some(requester),
            identities: e.identities.iter().map(ToString::to_string).collect(),
        }
    }
}

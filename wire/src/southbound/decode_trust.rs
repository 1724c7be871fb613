//! Converts wire messages of trust, keys and TLS termination to `canal_model::trust`, with
//! validation. The content of PEM is not parsed here, but by the code that verifies with it.

use canal_model::identity::Identity;
use canal_model::trust as t;

use super::ResourceDecodeError;
use super::decode::DecodeContext;
use crate::program as w;

pub(super) fn key_policy(
    at: &DecodeContext<'_>,
    k: Option<w::KeyPolicy>,
) -> Result<t::KeyPolicy, ResourceDecodeError> {
    use w::key_policy::{Algorithm, KeyLocation};
    let Some(k) = k else {
        return Ok(t::KeyPolicy::default());
    };
    // An unknown location would read as the first one, and keys would be where they may not be.
    Ok(t::KeyPolicy {
        location: match KeyLocation::try_from(k.location) {
            Ok(KeyLocation::Local) => t::KeyLocation::Local,
            Ok(KeyLocation::KeyServer) => t::KeyLocation::KeyServer,
            Err(e) => return at.err("keys.location", e),
        },
        algorithm: match Algorithm::try_from(k.algorithm) {
            Ok(Algorithm::EcdsaP256) => t::KeyAlgorithm::EcdsaP256,
            Ok(Algorithm::Rsa2048) => t::KeyAlgorithm::Rsa2048,
            Err(e) => return at.err("keys.algorithm", e),
        },
        local_fallback: k.local_fallback,
    })
}

fn pem(
    at: &DecodeContext<'_>,
    field: &'static str,
    label: &str,
    texts: Vec<String>,
    most: usize,
) -> Result<Vec<String>, ResourceDecodeError> {
    at.at_most(field, texts.len(), most)?;
    for text in &texts {
        at.bytes(field, text, t::PEM_BYTES_MAX)?;
        if !text.contains(label) {
            return at.err(field, format!("contains no {label:?} in PEM"));
        }
    }
    Ok(texts)
}

pub(super) fn bundle(name: &str, b: w::Bundle) -> Result<t::TrustBundle, ResourceDecodeError> {
    let at = DecodeContext(name);
    if b.roots.is_empty() {
        return at.err("roots", "is empty: nothing would be trusted");
    }
    at.at_most("blocked", b.blocked.len(), t::BLOCKED_IDENTITIES_MAX)?;
    let identity = |text: &String| {
        text.parse()
            .or_else(|_| at.err("blocked", format!("{text:?} is not a SPIFFE ID")))
    };
    Ok(t::TrustBundle {
        tenant: at.name("tenant", &b.tenant)?,
        trust_domain: at.name("trust_domain", &b.trust_domain)?,
        roots: pem(&at, "roots", "BEGIN CERTIFICATE", b.roots, t::ROOTS_MAX)?,
        revoked: pem(&at, "revoked", "BEGIN X509 CRL", b.revoked, t::REVOKED_MAX)?,
        blocked: b.blocked.iter().map(identity).collect::<Result<_, _>>()?,
        federated: b.federated,
    })
}

pub(super) fn key_server(name: &str, k: w::KeyServer) -> Result<t::KeyServer, ResourceDecodeError> {
    let at = DecodeContext(name);
    at.at_most("addresses", k.addresses.len(), t::KEY_SERVER_ADDRESSES_MAX)?;
    let address = |text: &String| {
        text.parse()
            .or_else(|_| at.err("addresses", format!("{text:?} is not ip:port")))
    };
    Ok(t::KeyServer {
        tenant: at.name("tenant", &k.tenant)?,
        name: at.name("name", &k.name)?,
        addresses: k.addresses.iter().map(address).collect::<Result<_, _>>()?,
    })
}

pub(super) fn termination(
    name: &str,
    x: w::Termination,
) -> Result<t::Termination, ResourceDecodeError> {
    use w::termination::{Certificate, ClientCertificates};
    let at = DecodeContext(name);
    // An unknown number would read as the first one, which requires nothing of clients.
    let clients = match ClientCertificates::try_from(x.clients) {
        Ok(ClientCertificates::None) => t::ClientCertificates::None,
        Ok(ClientCertificates::Optional) => t::ClientCertificates::Optional,
        Ok(ClientCertificates::Required) => t::ClientCertificates::Required,
        Err(e) => return at.err("clients", e),
    };
    let certificate = match at.need("certificate", x.certificate)? {
        Certificate::Mesh(_) => t::TerminationCertificate::Mesh,
        Certificate::KeyServer(server) => {
            t::TerminationCertificate::KeyServer(at.name("certificate.key_server", &server)?)
        }
    };
    Ok(t::Termination {
        port: at.port("port", x.port)?,
        certificate,
        clients,
        required: x.required,
        broken: at.broken(x.broken)?,
        service: at.key("service", x.service)?,
    })
}

pub(super) fn entitlement(
    name: &str,
    e: w::Entitlement,
) -> Result<t::Entitlement, ResourceDecodeError> {
    use w::entitlement::Requester;
    let at = DecodeContext(name);
    let requester = match at.need("requester", e.requester)? {
        Requester::Node(node) => t::KeyRequester::Node(at.name("requester.node", &node)?),
        Requester::Gateway(gateway) => {
            t::KeyRequester::Gateway(at.name("requester.gateway", &gateway)?)
        }
    };
    at.at_most("identities", e.identities.len(), t::IDENTITIES_MAX)?;
    let identities: Vec<Identity> = e
        .identities
        .iter()
        .map(|id| at.name("identities", id))
        .collect::<Result<_, _>>()?;
    if !identities.is_sorted_by(|a, b| a < b) {
        return at.err("identities", "are not sorted and without duplicates");
    }
    if let Some(other) = identities
        .iter()
        .find(|id| id.trust_domain != identities[0].trust_domain)
    {
        return at.err(
            "identities",
            format!("{other} is of another trust domain than {}", identities[0]),
        );
    }
    Ok(t::Entitlement {
        tenant: at.name("tenant", &e.tenant)?,
        requester,
        identities,
    })
}

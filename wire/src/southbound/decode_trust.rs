//! Wire messages of trust, keys and TLS that ends at gateways to `canal_model::trust`. PEM is not opened here: those who verify with it do.

use canal_model::identity::Identity;
use canal_model::trust as t;

use super::WireError;
use super::decode::At;
use crate::program as w;

pub(super) fn key_policy(at: &At<'_>, k: Option<w::KeyPolicy>) -> Result<t::KeyPolicy, WireError> {
    use w::key_policy::{Algorithm, Place};
    let Some(k) = k else { return Ok(t::KeyPolicy::default()) };
    // A place that this build does not know would read as the first, and keys be where they may not be.
    Ok(t::KeyPolicy {
        place: match Place::try_from(k.place) {
            Ok(Place::Local) => t::KeyPlace::Local,
            Ok(Place::KeyServer) => t::KeyPlace::KeyServer,
            Err(e) => return at.err("keys.place", e),
        },
        algorithm: match Algorithm::try_from(k.algorithm) {
            Ok(Algorithm::EcdsaP256) => t::KeyAlgorithm::EcdsaP256,
            Ok(Algorithm::Rsa2048) => t::KeyAlgorithm::Rsa2048,
            Err(e) => return at.err("keys.algorithm", e),
        },
        local_fallback: k.local_fallback,
    })
}

fn pem(at: &At<'_>, field: &'static str, label: &str, texts: Vec<String>, most: usize) -> Result<Vec<String>, WireError> {
    at.at_most(field, texts.len(), most)?;
    for text in &texts {
        at.bytes(field, text, t::PEM_BYTES_MAX)?;
        if !text.contains(label) {
            return at.err(field, format!("holds no {label:?} in PEM"));
        }
    }
    Ok(texts)
}

pub(super) fn bundle(name: &str, b: w::Bundle) -> Result<t::Bundle, WireError> {
    let at = At(name);
    if b.roots.is_empty() {
        return at.err("roots", "is empty: nothing would be trusted");
    }
    Ok(t::Bundle {
        tenant: at.name("tenant", &b.tenant)?,
        trust_domain: at.name("trust_domain", &b.trust_domain)?,
        roots: pem(&at, "roots", "BEGIN CERTIFICATE", b.roots, t::ROOTS_MAX)?,
        revoked: pem(&at, "revoked", "BEGIN X509 CRL", b.revoked, t::REVOKED_MAX)?,
        federated: b.federated,
    })
}

pub(super) fn key_server(name: &str, k: w::KeyServer) -> Result<t::KeyServer, WireError> {
    let at = At(name);
    at.at_most("addresses", k.addresses.len(), t::KEY_SERVER_ADDRESSES_MAX)?;
    let address = |text: &String| text.parse().or_else(|_| at.err("addresses", format!("{text:?} is not ip:port")));
    Ok(t::KeyServer {
        tenant: at.name("tenant", &k.tenant)?,
        name: at.name("name", &k.name)?,
        addresses: k.addresses.iter().map(address).collect::<Result<_, _>>()?,
    })
}

pub(super) fn termination(name: &str, x: w::Termination) -> Result<t::Termination, WireError> {
    use w::termination::{Certificate, ClientCertificates};
    let at = At(name);
    // A number that this build does not know would read as the first, which asks nothing of clients.
    let clients = match ClientCertificates::try_from(x.clients) {
        Ok(ClientCertificates::None) => t::ClientCertificates::None,
        Ok(ClientCertificates::Optional) => t::ClientCertificates::Optional,
        Ok(ClientCertificates::Required) => t::ClientCertificates::Required,
        Err(e) => return at.err("clients", e),
    };
    let certificate = match at.need("certificate", x.certificate)? {
        Certificate::Mesh(_) => t::TerminationCertificate::Mesh,
        Certificate::KeyServer(server) => t::TerminationCertificate::KeyServer(at.name("certificate.key_server", &server)?),
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

pub(super) fn entitlement(name: &str, e: w::Entitlement) -> Result<t::Entitlement, WireError> {
    use w::entitlement::Requester;
    let at = At(name);
    let requester = match at.need("requester", e.requester)? {
        Requester::Node(node) => t::Requester::Node(at.name("requester.node", &node)?),
        Requester::Gateway(gateway) => t::Requester::Gateway(at.name("requester.gateway", &gateway)?),
    };
    at.at_most("identities", e.identities.len(), t::IDENTITIES_MAX)?;
    let identities: Vec<Identity> = e.identities.iter().map(|id| at.name("identities", id)).collect::<Result<_, _>>()?;
    if !identities.is_sorted_by(|a, b| a < b) {
        return at.err("identities", "are not sorted and without duplicates");
    }
    if let Some(other) = identities.iter().find(|id| id.trust_domain != identities[0].trust_domain) {
        return at.err("identities", format!("{other} is of another trust domain than {}", identities[0]));
    }
    Ok(t::Entitlement { tenant: at.name("tenant", &e.tenant)?, requester, identities })
}

//! A certificate that another authority made at the controller's request: nothing of it is believed before it was looked at. The request to
//! that authority is the hub's.

use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::files::{certificates, pem_of, verify};
use crate::issuer::{fingerprint, hex};
use crate::request::{self, Refusal};
use crate::revocation::trimmed;
use crate::tenant::{Asked, Issued};
use crate::{LIFETIME_SECONDS_MAX, SKEW_SECONDS};

/// Why an answer of an external authority is not passed on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnswerFault {
    /// Not certificates in PEM.
    #[error("its answer is not a certificate: {0}")]
    Form(String),
    /// Another name, or more names than were asked for.
    #[error(
        "its certificate names {seen:?}, asked was {asked:?}; it must take the names that it is sent as hosts, URIs too (CFSSL 1.4 or newer), and none else"
    )]
    Identity { seen: Vec<String>, asked: Vec<String> },
    /// Another key.
    #[error("its certificate is of another key than the request's")]
    Key,
    /// May sign others, or may not do what a workload does.
    #[error("its certificate {0}; give its profile the usages digital signature, server auth and client auth, and no authority")]
    Usage(&'static str),
    /// Does not chain to the configured roots.
    #[error("its certificate does not chain to root-cert.pem: {0}")]
    Chain(String),
    /// Lives too long or not now.
    #[error("its certificate lives {0} s, at most {LIFETIME_SECONDS_MAX} are taken; shorten its profile's expiry")]
    Lifetime(u64),
}

impl AnswerFault {
    /// The name of the refusal, for a counter.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Form(_) => "external_answer",
            Self::Identity { .. } => "external_identity",
            Self::Key => "external_key",
            Self::Usage(_) => "external_usage",
            Self::Chain(_) => "external_chain",
            Self::Lifetime(_) => "external_lifetime",
        }
    }
}

/// Checks a request before it is passed on: as an own authority would.
///
/// # Errors
/// A [`Refusal`].
pub fn check_request(asked: &Asked<'_>) -> Result<(), Refusal> {
    request::check(asked.csr, asked.identity, asked.rsa).map(|_| ())
}

/// Looks at the answer to `asked`: PEM, the leaf first. `roots` are those that were configured.
///
/// # Errors
/// An [`AnswerFault`]; such a certificate must not be used.
pub fn check_answer(pem: &str, asked: &Asked<'_>, roots: &[String], now: u64) -> Result<Issued, AnswerFault> {
    let chain = certificates("the answer", pem).map_err(|e| AnswerFault::Form(e.to_string()))?;
    let (_, leaf) = X509Certificate::from_der(&chain[0]).map_err(|e| AnswerFault::Form(e.to_string()))?;
    let want: Vec<String> = std::iter::once(asked.identity.to_string()).chain(asked.names.iter().cloned()).collect();
    let mut seen = names(&leaf);
    let mut sorted = want.clone();
    sorted.sort();
    seen.sort();
    if seen != sorted {
        return Err(AnswerFault::Identity { seen, asked: want });
    }
    let proved = request::check(asked.csr, asked.identity, asked.rsa).map_err(|_| AnswerFault::Key)?;
    if leaf.public_key().raw != proved.raw {
        return Err(AnswerFault::Key);
    }
    check_usage(&leaf)?;
    let (from, until) = (leaf.validity().not_before.timestamp(), leaf.validity().not_after.timestamp());
    let (from, until) = (u64::try_from(from).unwrap_or(0), u64::try_from(until).unwrap_or(0));
    let left = until.saturating_sub(now);
    if left > LIFETIME_SECONDS_MAX + SKEW_SECONDS {
        return Err(AnswerFault::Lifetime(left));
    }
    // Roots that it sends along vouch for nothing.
    let mut chain: Vec<String> = chain.iter().map(|der| pem_of(der)).filter(|pem| !roots.contains(pem)).collect();
    chain.dedup();
    verify(&chain, roots, now).map_err(AnswerFault::Chain)?;
    let root = roots.first().map(|r| root_fingerprint(r)).unwrap_or_default();
    Ok(Issued { serial: hex(&trimmed(leaf.raw_serial())), root, not_before: from, not_after: until, chain })
}

/// Fingerprint of a root in PEM.
pub fn root_fingerprint(pem: &str) -> String {
    certificates("root", pem).map(|c| fingerprint(&c[0])).unwrap_or_default()
}

/// Every name in the certificate, of whatever kind; those that are neither URI nor DNS name show as what they are.
fn names(leaf: &X509Certificate<'_>) -> Vec<String> {
    let extensions = leaf.extensions().iter().filter_map(|e| match e.parsed_extension() {
        ParsedExtension::SubjectAlternativeName(san) => Some(&san.general_names),
        _ => None,
    });
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::URI(uri) => uri.to_string(),
        GeneralName::DNSName(name) => name.to_string(),
        other => format!("{other:?}"),
    };
    extensions.flatten().map(text).collect()
}

fn check_usage(leaf: &X509Certificate<'_>) -> Result<(), AnswerFault> {
    if leaf.basic_constraints().ok().flatten().is_some_and(|c| c.value.ca) {
        return Err(AnswerFault::Usage("is an authority's"));
    }
    match leaf.key_usage().ok().flatten() {
        Some(usage) if usage.value.key_cert_sign() || usage.value.crl_sign() => return Err(AnswerFault::Usage("may sign others")),
        Some(usage) if !usage.value.digital_signature() => return Err(AnswerFault::Usage("may not sign handshakes")),
        _ => {}
    }
    match leaf.extended_key_usage().ok().flatten() {
        Some(usage) if usage.value.server_auth && usage.value.client_auth => Ok(()),
        _ => Err(AnswerFault::Usage("is not for servers and clients both")),
    }
}

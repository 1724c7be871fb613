//! Converts certificates of Gateways' listeners between `canal_model::program` and their wire form,
//! with validation. The content of PEM is not parsed here, but by the code that serves TLS with it.
//! No error quotes it.

use std::fmt;
use std::sync::Arc;

use canal_model::certificate::{PrivateKeyPem, ServingCertificate};
use canal_model::ids::ServiceId;
use canal_model::ingress::is_gateway_service;
use canal_model::limits::{SERVING_CERTIFICATE_BYTES_MAX, SERVING_NAMES_MAX};
use canal_model::program::ListenerCertificate;

use super::ResourceDecodeError;
use super::decode::DecodeContext;
use super::encode;
use super::ingress::{decode_secret, secret_ref};
use crate::program as w;

impl From<&ListenerCertificate> for w::ListenerCertificate {
    fn from(it: &ListenerCertificate) -> Self {
        let certificate = &it.certificate;
        Self {
            gateway: encode::key(&it.gateway),
            id: it.id.get(),
            secret: Some(secret_ref(&it.secret)),
            chain: certificate.chain.clone(),
            key: certificate.key.expose().to_owned(),
            names: certificate.names.clone(),
        }
    }
}

/// Shows nothing of the key.
impl fmt::Debug for w::ListenerCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ListenerCertificate")
            .field("gateway", &self.gateway)
            .field("secret", &self.secret)
            .finish_non_exhaustive()
    }
}

pub(super) fn decode(
    name: &str,
    written: w::ListenerCertificate,
) -> Result<ListenerCertificate, ResourceDecodeError> {
    let at = DecodeContext(name);
    let gateway = at.key("gateway", written.gateway)?;
    if !is_gateway_service(&gateway) {
        return at.err("gateway", format!("{gateway} does not stand for a Gateway"));
    }
    let bytes = written.chain.len() + written.key.len();
    at.at_most("chain and key", bytes, SERVING_CERTIFICATE_BYTES_MAX)?;
    at.at_most("names", written.names.len(), SERVING_NAMES_MAX)?;
    for (field, text, label) in [
        ("chain", &written.chain, "BEGIN CERTIFICATE"),
        ("key", &written.key, "PRIVATE KEY"),
    ] {
        if !text.contains(label) {
            return at.err(field, format!("contains no {label:?} in PEM"));
        }
    }
    let secret = at.need("secret", written.secret)?;
    Ok(ListenerCertificate {
        gateway,
        id: ServiceId::new(written.id).or_else(|e| at.err("id", e))?,
        secret: decode_secret(&at, "secret", &secret)?,
        certificate: Arc::new(ServingCertificate {
            names: written.names,
            chain: written.chain,
            key: PrivateKeyPem::new(written.key),
        }),
    })
}

#[cfg(test)]
pub(super) fn sample() -> ListenerCertificate {
    let pem = |label: &str| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
    ListenerCertificate {
        gateway: "alpha/infra/web.gateway".parse().unwrap(),
        id: ServiceId::new(9).unwrap(),
        secret: ("infra".parse().unwrap(), "cert".parse().unwrap()),
        certificate: Arc::new(ServingCertificate {
            chain: pem("CERTIFICATE"),
            key: PrivateKeyPem::new(pem("PRIVATE KEY")),
            names: vec!["www.example.com".into(), "*.example.com".into()],
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_certificate_is_refused_without_its_key() {
        let refused = |change: &dyn Fn(&mut w::ListenerCertificate)| {
            let mut written = w::ListenerCertificate::from(&sample());
            change(&mut written);
            let error = decode("alpha/infra/web.gateway/infra/cert", written).unwrap_err();
            let text = error.to_string();
            assert!(!text.contains("AAAA"), "{text}");
            text
        };
        for (change, field) in [
            (
                (&|it: &mut w::ListenerCertificate| {
                    it.gateway.as_mut().unwrap().name = "web".into()
                }) as &dyn Fn(&mut w::ListenerCertificate),
                "gateway",
            ),
            (&|it| it.id = 0, "id"),
            (&|it| it.secret = None, "secret"),
            (&|it| it.chain = "AAAA".into(), "chain"),
            (&|it| it.key = "AAAA".into(), "key"),
            (
                &|it| it.chain += &"A".repeat(SERVING_CERTIFICATE_BYTES_MAX),
                "chain and key",
            ),
            (
                &|it| it.names = vec![it.names[0].clone(); SERVING_NAMES_MAX + 1],
                "names",
            ),
        ] {
            let text = refused(change);
            assert!(text.contains(&format!("field {field}")), "{text}");
        }
    }
}

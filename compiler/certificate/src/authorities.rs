//! Reads certificates of authorities, with which certificates of clients are verified. It checks
//! that verification can use them, and not whether they have expired: trust in a root ends when its
//! owner removes it.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use canal_model::certificate::CaCertificates;
use canal_model::limits::{CLIENT_CA_BYTES_MAX, CLIENT_CA_CERTIFICATES_MAX};
use canal_model::policy::config_map::{CA_BUNDLE, ConfigMap};
use canal_model::policy::secret::SecretProblem;
use canal_model::policy::trust_bundle::ClusterTrustBundle;
use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use crate::problem;

/// Number of characters of base64 in a line of PEM (RFC 7468 §2).
const PEM_LINE_CHARACTERS: usize = 64;

/// Reads the certificates of authorities of a ConfigMap, if it has the entry for them.
pub fn read_config_map(mut map: ConfigMap) -> ConfigMap {
    let entry = map.data.get(CA_BUNDLE);
    map.ca = entry.map(|pem| parse_authorities(pem, CA_BUNDLE).map(Arc::new));
    map
}

/// Reads the certificates of a ClusterTrustBundle. Returns it without the text.
pub fn read_trust_bundle(mut bundle: ClusterTrustBundle) -> ClusterTrustBundle {
    let text = std::mem::take(&mut bundle.spec.trust_bundle);
    bundle.ca = Some(parse_authorities(&text, "spec.trustBundle").map(Arc::new));
    bundle
}

/// Parses certificates of authorities in PEM. The result contains no other text and no certificate
/// twice. `entry` names the text in problems.
///
/// # Errors
/// Fails if there is no certificate, if one of them cannot be used, or if there are too many.
pub fn parse_authorities(pem: &str, entry: &str) -> Result<CaCertificates, SecretProblem> {
    // The size comes first, so that a large text is not parsed.
    if pem.len() > CLIENT_CA_BYTES_MAX {
        return Err(problem(
            format!(
                "{entry} has {} bytes, more than {CLIENT_CA_BYTES_MAX}",
                pem.len()
            ),
            "keep the certificates of the authorities that issue to clients",
        ));
    }
    let mut certificates: Vec<CertificateDer<'static>> = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|_| {
            problem(
                format!("{entry} is not PEM"),
                "write certificates between BEGIN CERTIFICATE and END CERTIFICATE",
            )
        })?;
        if !certificates.contains(&certificate) {
            certificates.push(certificate);
        }
        // Checked for each one, so that few are compared above.
        if certificates.len() > CLIENT_CA_CERTIFICATES_MAX {
            return Err(problem(
                format!("{entry} has more than {CLIENT_CA_CERTIFICATES_MAX} certificates"),
                "keep the certificates of the authorities that issue to clients",
            ));
        }
    }
    if certificates.is_empty() {
        return Err(problem(
            format!("{entry} has no certificate"),
            "write certificates between BEGIN CERTIFICATE and END CERTIFICATE",
        ));
    }
    // The store is only filled to check that each certificate can be a trust anchor.
    let mut roots = RootCertStore::empty();
    for (number, certificate) in (1..).zip(&certificates) {
        roots.add(certificate.clone()).map_err(|_| {
            problem(
                format!("certificate {number} in {entry} is not one of an authority in X.509"),
                "replace it",
            )
        })?;
    }
    Ok(CaCertificates {
        pem: certificates.iter().map(|it| to_pem(it)).collect(),
        count: certificates.len(),
    })
}

fn to_pem(certificate: &[u8]) -> String {
    let mut pem = "-----BEGIN CERTIFICATE-----\n".to_owned();
    let base64 = STANDARD.encode(certificate);
    let mut rest = base64.as_str();
    while !rest.is_empty() {
        let (line, behind) = rest.split_at(rest.len().min(PEM_LINE_CHARACTERS));
        pem += line;
        pem.push('\n');
        rest = behind;
    }
    pem + "-----END CERTIFICATE-----\n"
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

    use super::*;

    fn authority() -> String {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .self_signed(&KeyPair::generate().unwrap())
            .unwrap()
            .pem()
    }

    #[test]
    fn only_the_certificates_are_kept_each_once() {
        let (one, other) = (authority(), authority());
        let key = KeyPair::generate().unwrap().serialize_pem();
        let text = format!("# ours\n{one}{key}theirs\n{other}{one}");
        let read = parse_authorities(&text, "ca.crt").unwrap();
        assert_eq!(read.count, 2);
        assert!(!read.pem.contains("ours") && !read.pem.contains("KEY"));
        assert_eq!(parse_authorities(&read.pem, "ca.crt").unwrap(), read);
        let ders = |pem: &str| -> Vec<CertificateDer<'static>> {
            let all = CertificateDer::pem_slice_iter(pem.as_bytes());
            all.collect::<Result<_, _>>().unwrap()
        };
        assert_eq!(ders(&read.pem), ders(&format!("{one}{other}")));
    }

    #[test]
    fn what_cannot_verify_a_client_is_refused() {
        let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let many: String = (0..=CLIENT_CA_CERTIFICATES_MAX)
            .map(|_| authority())
            .collect();
        let long = " ".repeat(CLIENT_CA_BYTES_MAX + 1);
        for (text, expected) in [
            ("", "ca.crt has no certificate"),
            (broken, "certificate 1 in ca.crt is not one of an authority"),
            ("-----BEGIN CERTIFICATE-----\nAAAA\n", "ca.crt "),
            (&many, "ca.crt has more than 64 certificates"),
            (&long, "ca.crt has 131073 bytes, more than 131072"),
        ] {
            let found = parse_authorities(text, "ca.crt").unwrap_err().problem;
            assert!(found.starts_with(expected), "{found}");
        }
    }
}

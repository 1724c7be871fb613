//! Reads the certificate and the key of a Secret, and checks that listeners
//! can serve TLS with them. Reads the certificates of authorities of a ConfigMap, and checks that
//! certificates of clients can be verified with them. Pure: it reads no clock, so an expired certificate is accepted; clients
//! refuse it. It neither shows nor quotes a key.
//!
//! Start at [`read`] and [`parse_authorities`].

#![forbid(unsafe_code)]

mod authorities;

use std::sync::Arc;

pub use authorities::{parse_authorities, read_config_map, read_trust_bundle};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use canal_model::certificate::{PrivateKeyPem, ServingCertificate};
use canal_model::limits::{
    SERVING_CERTIFICATE_BYTES_MAX, SERVING_CHAIN_CERTIFICATES_MAX, SERVING_NAMES_MAX,
    SERVING_RSA_BITS_MAX,
};
use canal_model::policy::config_map::CA_BUNDLE;
use canal_model::policy::secret::{
    GENERIC_CA_BUNDLE, GENERIC_CERTIFICATE, GENERIC_KEY, REVOCATION_LISTS, Secret, SecretProblem,
    TLS_CERTIFICATE, TLS_KEY,
};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::public_key::PublicKey;

/// Maximum length of a DNS name (RFC 1035 §2.3.4), in text form.
const NAME_BYTES_MAX: usize = 253;

/// Reads the certificate of a Secret, if it is of the type for that or has the entries for it, and
/// the certificates of authorities, if it has an entry for them. Returns the Secret without its
/// entries, so that the key is in no other place.
pub fn read(mut secret: Secret) -> Secret {
    let pairs = [SERVING_ENTRIES, GENERIC_ENTRIES];
    let has_pair = |names: &[&str; 2]| names.iter().all(|name| has_entry(&secret, name));
    let pair = if secret.is_tls() {
        Some(SERVING_ENTRIES)
    } else {
        // Istio prefers its own names.
        pairs.into_iter().rev().find(has_pair)
    };
    secret.certificate = pair.map(|names| certificate(&secret, names).map(Arc::new));
    let authorities = |name| {
        has_entry(&secret, name).then(|| {
            let pem = entry(&secret, name)?;
            parse_authorities(&pem, name).map(Arc::new)
        })
    };
    let (ca, generic_ca) = (authorities(CA_BUNDLE), authorities(GENERIC_CA_BUNDLE));
    let is_filled = |name: &&str| {
        let text = secret.string_data.get(*name);
        let text = text.or_else(|| secret.data.get(*name));
        text.is_some_and(|text| !text.0.is_empty())
    };
    secret.has_revocation_list = REVOCATION_LISTS.iter().any(is_filled);
    (secret.ca, secret.generic_ca) = (ca, generic_ca);
    secret.data.clear();
    secret.string_data.clear();
    secret
}

/// Names of the entries with a certificate and its key.
const SERVING_ENTRIES: [&str; 2] = [TLS_CERTIFICATE, TLS_KEY];
const GENERIC_ENTRIES: [&str; 2] = [GENERIC_CERTIFICATE, GENERIC_KEY];

fn has_entry(secret: &Secret, name: &str) -> bool {
    secret.string_data.contains_key(name) || secret.data.contains_key(name)
}

fn certificate(
    secret: &Secret,
    [chain, key]: [&str; 2],
) -> Result<ServingCertificate, SecretProblem> {
    let read = parse(&entry(secret, chain)?, &entry(secret, key)?);
    read.map_err(|found| SecretProblem {
        // The problem names the entries of a Secret for TLS.
        problem: found
            .problem
            .replace(TLS_CERTIFICATE, chain)
            .replace(TLS_KEY, key),
        fix: found.fix,
    })
}

fn problem(problem: impl Into<String>, fix: &'static str) -> SecretProblem {
    let problem = problem.into();
    SecretProblem { problem, fix }
}

/// Returns the text of an entry. The API server lets `stringData` replace `data`.
fn entry(secret: &Secret, name: &str) -> Result<String, SecretProblem> {
    if let Some(text) = secret.string_data.get(name) {
        return Ok(text.0.clone());
    }
    let Some(text) = secret.data.get(name) else {
        return Err(problem(
            format!("there is no entry {name}"),
            "write tls.crt and tls.key, as `kubectl create secret tls` does",
        ));
    };
    // YAML folds long texts, and base64 tools break their lines.
    let joined: String = text.0.split_ascii_whitespace().collect();
    let bytes = STANDARD.decode(joined).ok();
    let text = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
    text.ok_or_else(|| {
        problem(
            format!("the entry {name} is not PEM in base64"),
            "encode it with base64, or write it as PEM in stringData",
        )
    })
}

/// Parses a chain and its key, both PEM.
///
/// # Errors
/// Fails if one of them is malformed or exceeds a limit, or if they do not belong together.
pub fn parse(chain: &str, key: &str) -> Result<ServingCertificate, SecretProblem> {
    let bytes = chain.len() + key.len();
    // The size comes first, so that a large text is not parsed.
    if bytes > SERVING_CERTIFICATE_BYTES_MAX {
        return Err(problem(
            format!(
                "{TLS_CERTIFICATE} and {TLS_KEY} have {bytes} bytes, more than {SERVING_CERTIFICATE_BYTES_MAX}"
            ),
            "leave out certificates that clients do not need",
        ));
    }
    let certificates = CertificateDer::pem_slice_iter(chain.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| {
            problem(
                format!("{TLS_CERTIFICATE} is not PEM"),
                "write certificates between BEGIN CERTIFICATE and END CERTIFICATE",
            )
        })?;
    if certificates.len() > SERVING_CHAIN_CERTIFICATES_MAX {
        return Err(problem(
            format!(
                "{TLS_CERTIFICATE} has {} certificates, more than {SERVING_CHAIN_CERTIFICATES_MAX}",
                certificates.len()
            ),
            "keep the certificate and its intermediates only",
        ));
    }
    let names = names(&certificates)?;
    let private = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|_| {
        problem(
            format!("{TLS_KEY} has no private key in PEM"),
            "write the key as PKCS#8, PKCS#1 or SEC1, without a passphrase",
        )
    })?;
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    // The result is not kept: the call checks that the key is usable and belongs to the
    // certificate.
    CertifiedKey::from_der(certificates, private, &provider).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => problem(
            format!("{TLS_KEY} is not the key of the first certificate in {TLS_CERTIFICATE}"),
            "put the certificate of the key first, or replace one of the two",
        ),
        // All other errors are about the key alone, since the certificates were parsed above.
        _ => problem(
            format!("the key in {TLS_KEY} cannot be used"),
            "use an ECDSA key (P-256, P-384 or P-521), an RSA key of 2048 to 4096 bits, or Ed25519",
        ),
    })?;
    Ok(ServingCertificate {
        chain: chain.to_owned(),
        key: PrivateKeyPem::new(key.to_owned()),
        names,
    })
}

/// Checks that all certificates are X.509, and returns the host names of the first one: its DNS
/// names, or its common name if it has none.
fn names(certificates: &[CertificateDer<'_>]) -> Result<Vec<String>, SecretProblem> {
    let mut parsed = Vec::new();
    for (number, der) in (1..).zip(certificates) {
        let (_, certificate) = X509Certificate::from_der(der).map_err(|_| {
            problem(
                format!("certificate {number} in {TLS_CERTIFICATE} is not X.509"),
                "replace it",
            )
        })?;
        parsed.push(certificate);
    }
    let Some(first) = parsed.first() else {
        return Err(problem(
            format!("{TLS_CERTIFICATE} has no certificate"),
            "write certificates between BEGIN CERTIFICATE and END CERTIFICATE",
        ));
    };
    let bits = match first.public_key().parsed() {
        // The number is positive, so a zero may be in front of it.
        Ok(PublicKey::RSA(key)) => 8 * key.modulus.iter().skip_while(|byte| **byte == 0).count(),
        // Only the signatures of RSA become slow with the size of the key.
        _ => 0,
    };
    if bits > SERVING_RSA_BITS_MAX {
        return Err(problem(
            format!("the RSA key has {bits} bits, more than {SERVING_RSA_BITS_MAX}"),
            "use an ECDSA key, or an RSA key of 2048 to 4096 bits",
        ));
    }
    // A malformed or repeated extension counts as none, so that the common name decides.
    let alternative = first.subject_alternative_name().ok().flatten();
    let alternative = alternative.iter().flat_map(|it| &it.value.general_names);
    let mut texts: Vec<&str> = alternative
        .filter_map(|name| match name {
            GeneralName::DNSName(name) => Some(*name),
            // Clients of listeners send host names only, which are compared with DNS names.
            _ => None,
        })
        .collect();
    if texts.is_empty() {
        let common = first.subject().iter_common_name();
        texts.extend(common.filter_map(|name| name.as_str().ok()));
    }
    if texts.len() > SERVING_NAMES_MAX {
        return Err(problem(
            format!(
                "the first certificate in {TLS_CERTIFICATE} has {} names, more than {SERVING_NAMES_MAX}",
                texts.len()
            ),
            "use several certificates",
        ));
    }
    // Texts that are no host names match no server name, so they are left out.
    Ok(texts.into_iter().filter_map(host_name).collect())
}

/// Returns a name of a certificate in lower case; `None` if no host can have it.
fn host_name(written: &str) -> Option<String> {
    let name = written.to_ascii_lowercase();
    let domain = name.strip_prefix("*.").unwrap_or(&name);
    let is_plain = |text: &str| {
        let mut bytes = text.bytes();
        !text.is_empty()
            && text.len() <= NAME_BYTES_MAX
            && bytes.all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b))
    };
    is_plain(domain).then_some(name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use canal_model::policy::Metadata;
    use canal_model::policy::secret::SecretText;
    use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P384_SHA384, PKCS_RSA_SHA256, RsaKeySize};

    use super::*;

    #[test]
    fn rsa_keys_that_sign_slowly_are_refused() {
        // `openssl req -x509 -newkey rsa:8192 -subj /CN=large.example`
        let large = include_str!("rsa_8192.pem");
        let (_, key) = pair(&["large.example"]);
        let refused = parse(large, &key).unwrap_err();
        assert!(refused.problem.contains("8192 bits"), "{}", refused.problem);
        let rsa = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_4096).unwrap();
        let params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
        let chain = params.self_signed(&rsa).unwrap().pem();
        assert!(parse(&chain, &rsa.serialize_pem()).is_ok());
    }

    /// Returns a certificate for the names and its key, both PEM.
    fn pair(names: &[&str]) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        (signed(names, &key), key.serialize_pem())
    }

    fn signed(names: &[&str], key: &KeyPair) -> String {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let certificate = CertificateParams::new(names).unwrap().self_signed(key);
        certificate.unwrap().pem()
    }

    fn problem_of(chain: &str, key: &str) -> String {
        parse(chain, key).unwrap_err().problem
    }

    #[test]
    fn a_certificate_with_its_key_is_read_with_its_names() {
        let (chain, key) = pair(&["www.Example.com", "*.example.com"]);
        let (other, _) = pair(&["ca.example"]);
        let read = parse(&format!("{chain}{other}"), &key).unwrap();
        assert_eq!(read.names, ["www.example.com", "*.example.com"]);
        let larger = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap();
        assert!(parse(&signed(&["a.example"], &larger), &larger.serialize_pem()).is_ok());
    }

    #[test]
    fn a_problem_names_the_entry_and_quotes_no_key() {
        let (chain, key) = pair(&["a.example"]);
        let (other, _) = pair(&["b.example"]);
        let body = key.lines().nth(1).unwrap();
        for (chain, key, expected) in [
            ("", key.as_str(), "tls.crt has no certificate"),
            (&chain, "", "tls.key has no private key"),
            (&chain, &chain, "tls.key has no private key"),
            (&other, &key, "tls.key is not the key of the first"),
            (
                "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
                &key,
                "certificate 1 in tls.crt is not X.509",
            ),
        ] {
            let found = problem_of(chain, key);
            assert!(found.starts_with(expected), "{found}");
            assert!(!found.contains(body), "{found}");
        }
    }

    #[test]
    fn what_exceeds_a_limit_is_refused() {
        let (chain, key) = pair(&["a.example"]);
        let within = chain.repeat(SERVING_CHAIN_CERTIFICATES_MAX);
        assert!(parse(&within, &key).is_ok());
        let found = problem_of(&(within + &chain), &key);
        assert!(found.contains("more than 10"), "{found}");
        let long = format!("{chain}{}", "\n".repeat(SERVING_CERTIFICATE_BYTES_MAX));
        let found = problem_of(&long, &key);
        assert!(found.contains("more than 65536"), "{found}");
        let names: Vec<String> = (0..=SERVING_NAMES_MAX).map(|n| format!("n{n}.a")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert!(
            parse(&pair(&names[1..]).0, "")
                .unwrap_err()
                .problem
                .contains("private key")
        );
        let (chain, key) = pair(&names);
        let found = problem_of(&chain, &key);
        assert!(found.contains("more than 256"), "{found}");
    }

    #[test]
    fn a_secret_keeps_its_certificate_and_no_entry() {
        let (chain, key) = pair(&["a.example"]);
        let text = |text: &str| SecretText(text.to_owned());
        let base64 = |plain: &str| text(&STANDARD.encode(plain));
        let of = |kind: &str, data: Vec<(&str, SecretText)>, plain: Vec<(&str, SecretText)>| {
            let named = |list: Vec<(&str, SecretText)>| -> BTreeMap<String, SecretText> {
                let list = list.into_iter();
                list.map(|(name, text)| (name.to_owned(), text)).collect()
            };
            let secret = Secret {
                metadata: Metadata {
                    name: "a".parse().unwrap(),
                    namespace: "infra".parse().unwrap(),
                    labels: BTreeMap::new(),
                    annotations: BTreeMap::new(),
                    creation_timestamp: None,
                    deletion_timestamp: None,
                },
                kind: Some(kind.to_owned()),
                data: named(data),
                string_data: named(plain),
                certificate: None,
                ca: None,
                generic_ca: None,
                has_revocation_list: false,
            };
            let debug = format!("{secret:?}");
            let read = read(secret);
            assert!(read.data.is_empty() && read.string_data.is_empty());
            for shown in [debug, format!("{read:?}")] {
                // The second line of the PEM is the first of the key itself.
                assert!(!shown.contains(key.lines().nth(1).unwrap()), "{shown}");
            }
            read.certificate
        };
        let tls = "kubernetes.io/tls";
        let whole = || vec![("tls.crt", base64(&chain)), ("tls.key", base64(&key))];
        // stringData is plaintext, and data is base64.
        assert!(matches!(of(tls, whole(), vec![]), Some(Ok(_))));
        let plain = vec![("tls.crt", text(&chain)), ("tls.key", text(&key))];
        assert!(matches!(of(tls, vec![], plain), Some(Ok(_))));
        assert!(matches!(of("Opaque", whole(), vec![]), Some(Ok(_))));
        let generic = vec![("cert", base64(&chain)), ("key", base64(&key))];
        assert!(matches!(of("Opaque", generic, vec![]), Some(Ok(_))));
        let swapped = vec![("cert", base64(&key)), ("key", base64(&chain))];
        let found = of("Opaque", swapped, vec![]).unwrap().unwrap_err();
        assert_eq!(found.problem, "cert has no certificate");
        // An Opaque Secret without the pair may be for anything else, so that is no problem.
        assert!(of("Opaque", vec![whole().remove(0)], vec![]).is_none());
        let broken = vec![("tls.crt", text("?")), ("tls.key", base64(&key))];
        for (data, expected) in [
            (vec![whole().remove(0)], "there is no entry tls.key"),
            (broken, "the entry tls.crt is not PEM in base64"),
        ] {
            let found = of(tls, data, vec![]).unwrap().unwrap_err();
            assert_eq!(found.problem, expected);
        }
    }
}

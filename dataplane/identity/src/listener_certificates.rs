//! Certificates of a Gateway's listeners, and the choice of one for a client: by its server name,
//! then by the signature schemes that it accepts. Start at [`CertificateSelector`].

use std::sync::Arc;

use canal_model::certificate::ServingCertificate;
use rustls::SignatureAlgorithm;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// A certificate chain with its key, ready for TLS, and the names in it.
#[derive(Debug)]
pub struct ListenerKeyPair {
    names: Vec<String>,
    certified: Arc<CertifiedKey>,
}

impl ListenerKeyPair {
    /// Parses a certificate and its key.
    ///
    /// # Errors
    /// One of them is malformed, or they do not belong together. The error quotes neither.
    pub fn parse(certificate: &ServingCertificate) -> Result<Self, rustls::Error> {
        let malformed = |what: &str| rustls::Error::General(format!("the {what} is not PEM"));
        let chain = CertificateDer::pem_slice_iter(certificate.chain.as_bytes())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| malformed("certificate chain"))?;
        let key = PrivateKeyDer::from_pem_slice(certificate.key.expose().as_bytes())
            .map_err(|_| malformed("private key"))?;
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        Ok(Self {
            names: certificate.names.clone(),
            certified: Arc::new(CertifiedKey::from_der(chain, key, &provider)?),
        })
    }

    /// Returns the rank of the certificate for a server name: the best one has the lowest. An exact
    /// name comes before a wildcard, and both before a certificate for other names. Of two with the
    /// same rank otherwise, ECDSA comes before RSA, whose signatures cost more.
    fn rank(&self, server_name: Option<&str>) -> (u8, bool) {
        let of_name = |name: &String| {
            let server_name = server_name?;
            let is_wildcard = || {
                // A wildcard of a certificate stands for one label (RFC 6125 §6.4.3).
                let label = server_name.strip_suffix(name.strip_prefix('*')?)?;
                Some(!label.is_empty() && !label.contains('.'))
            };
            if name == server_name {
                Some(0)
            } else {
                is_wildcard().unwrap_or(false).then_some(1)
            }
        };
        let best = self.names.iter().filter_map(of_name).min();
        let is_rsa = self.certified.key.algorithm() == SignatureAlgorithm::RSA;
        (best.unwrap_or(2), is_rsa)
    }
}

/// The certificates of one listener, from which each handshake takes one.
#[derive(Debug)]
pub struct CertificateSelector(Vec<Arc<ListenerKeyPair>>);

impl CertificateSelector {
    /// Creates a selector; of equally good certificates it takes the first.
    pub fn new(certificates: Vec<Arc<ListenerKeyPair>>) -> Self {
        Self(certificates)
    }

    fn select(
        &self,
        server_name: Option<&str>,
        is_accepted: impl Fn(&CertifiedKey) -> bool,
    ) -> Option<&Arc<CertifiedKey>> {
        let usable = self.0.iter().filter(|pair| is_accepted(&pair.certified));
        usable
            .min_by_key(|pair| pair.rank(server_name))
            .map(|pair| &pair.certified)
    }
}

impl ResolvesServerCert for CertificateSelector {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let name = hello.server_name().map(str::to_ascii_lowercase);
        let schemes = hello.signature_schemes();
        let is_accepted = |pair: &CertifiedKey| pair.key.choose_scheme(schemes).is_some();
        self.select(name.as_deref(), is_accepted).cloned()
    }
}

#[cfg(test)]
mod tests {
    use canal_model::certificate::PrivateKeyPem;
    use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256};

    use super::*;

    fn pair(names: &[&str], is_rsa: bool) -> Arc<ListenerKeyPair> {
        let algorithm = if is_rsa {
            &PKCS_RSA_SHA256
        } else {
            &PKCS_ECDSA_P256_SHA256
        };
        let key = KeyPair::generate_for(algorithm).unwrap();
        let params = CertificateParams::new(Vec::new()).unwrap();
        let certificate = ServingCertificate {
            chain: params.self_signed(&key).unwrap().pem(),
            key: PrivateKeyPem::new(key.serialize_pem()),
            names: names.iter().map(ToString::to_string).collect(),
        };
        Arc::new(ListenerKeyPair::parse(&certificate).unwrap())
    }

    #[test]
    fn the_name_decides_before_the_type_of_the_key() {
        let all = [
            pair(&["other.test"], false),
            pair(&["*.example.com"], true),
            pair(&["*.example.com"], false),
            pair(&["www.example.com"], true),
        ];
        let selector = CertificateSelector::new(all.to_vec());
        let chosen = |name: Option<&str>, only_rsa: bool| {
            let is_accepted =
                |key: &CertifiedKey| !only_rsa || key.key.algorithm() == SignatureAlgorithm::RSA;
            let chosen = selector.select(name, is_accepted)?;
            all.iter().position(|it| Arc::ptr_eq(&it.certified, chosen))
        };
        for (name, only_rsa, expected) in [
            (Some("www.example.com"), false, 3),
            (Some("a.example.com"), false, 2),
            (Some("a.example.com"), true, 1),
            // A wildcard stands for one label.
            (Some("a.b.example.com"), false, 0),
            (Some("example.com"), false, 0),
            (Some("other.test"), true, 1),
            (None, false, 0),
        ] {
            assert_eq!(chosen(name, only_rsa), Some(expected), "{name:?}");
        }
        let none = CertificateSelector::new(Vec::new());
        assert!(none.select(None, |_| true).is_none());
    }

    #[test]
    fn a_certificate_with_the_key_of_another_one_is_refused() {
        let certificate = |chain: &KeyPair, key: &KeyPair| ServingCertificate {
            chain: CertificateParams::default()
                .self_signed(chain)
                .unwrap()
                .pem(),
            key: PrivateKeyPem::new(key.serialize_pem()),
            names: Vec::new(),
        };
        let (one, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        assert!(ListenerKeyPair::parse(&certificate(&one, &one)).is_ok());
        assert!(ListenerKeyPair::parse(&certificate(&one, &other)).is_err());
        let mut broken = certificate(&one, &one);
        broken.chain = broken.chain.replace("BEGIN", "BEGINS");
        assert!(ListenerKeyPair::parse(&broken).is_err());
    }
}

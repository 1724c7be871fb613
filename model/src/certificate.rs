//! Certificates of listeners with their private keys, as Secrets contain them. They are read once,
//! where they enter; [`PrivateKeyPem`] is shown nowhere. Start at [`ServingCertificate`].

use std::fmt;

/// A certificate chain with its private key, with which a listener serves TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServingCertificate {
    /// The certificates in PEM, that of the key first.
    pub chain: String,
    pub key: PrivateKeyPem,
    /// Host names for which the first certificate is valid, in lower case; `*.` and a domain stand for
    /// names with one more label.
    pub names: Vec<String>,
}

impl ServingCertificate {
    /// Returns the bytes that the certificate takes in a resource.
    pub fn bytes(&self) -> usize {
        let names = self.names.iter().map(String::len);
        self.chain.len() + self.key.expose().len() + names.sum::<usize>()
    }
}

/// A private key in PEM. Neither `Debug` nor a dump shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct PrivateKeyPem(String);

impl PrivateKeyPem {
    pub fn new(pem: String) -> Self {
        Self(pem)
    }

    /// Returns the key itself, for a codec or for TLS.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for PrivateKeyPem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKeyPem(hidden)")
    }
}

/// Certificates of authorities, with which certificates of clients are verified. There is at least
/// one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaCertificates {
    /// The certificates in PEM, and nothing else.
    pub pem: String,
    pub count: usize,
}

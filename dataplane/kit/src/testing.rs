//! For tests only (feature `testing`): certificate authorities that issue what a test asks for, right or wrong, and a controller that
//! plays what it is told. Never in a product build. It panics where it cannot go on, as tests do.

mod fake;
mod reports;

use canal_model::identity::Identity;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType, date_time_ymd,
};

use crate::tls::{Certificate, Credential};

pub use fake::{FakeController, FakeStream, TOKEN};
pub use reports::{Heard, Reports};

/// A CA of one trust domain.
pub struct TestCa {
    issuer: Issuer<'static, KeyPair>,
    root: String,
}

/// A key and a certificate as PEM, not checked.
#[derive(Debug, Clone)]
pub struct Issued {
    pub key: String,
    pub chain: String,
}

fn params() -> CertificateParams {
    let mut p = CertificateParams::default();
    p.distinguished_name = rcgen::DistinguishedName::new();
    // Wide, so that tests do not depend on the clock; those about time set their own.
    p.not_before = date_time_ymd(2020, 1, 1);
    p.not_after = date_time_ymd(2120, 1, 1);
    p
}

impl TestCa {
    /// A fresh self-signed CA.
    pub fn new(name: &str) -> Self {
        let key = KeyPair::generate().expect("P-256 keys can be made");
        let mut p = params();
        p.distinguished_name.push(DnType::CommonName, name);
        p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        p.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let root = p.self_signed(&key).expect("the parameters are complete").pem();
        Self { issuer: Issuer::new(p, key), root }
    }

    /// Its root, PEM.
    pub fn root_pem(&self) -> String {
        self.root.clone()
    }

    /// A certificate for `identity`, trusting this CA.
    pub fn issue(&self, identity: &Identity) -> Certificate {
        let i = self.issue_with(identity, |_| {});
        Certificate::from_pem(&i.key, &i.chain, &self.root).expect("what this CA issues is complete")
    }

    /// As [`TestCa::issue`], with the parameters changed by `change` before signing, as PEM.
    pub fn issue_with(&self, identity: &Identity, change: impl FnOnce(&mut CertificateParams)) -> Issued {
        let key = KeyPair::generate().expect("P-256 keys can be made");
        let mut p = params();
        p.subject_alt_names = vec![SanType::URI(identity.to_string().try_into().expect("identities are ASCII"))];
        p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        p.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        change(&mut p);
        let chain = p.signed_by(&key, &self.issuer).expect("the parameters are complete").pem();
        Issued { key: key.serialize_pem(), chain }
    }

    /// A TLS server's certificate for the DNS name `name`.
    pub fn server(&self, name: &str) -> Issued {
        let dns = SanType::DnsName(name.try_into().expect("DNS names are ASCII"));
        self.issue_with(&identity("spiffe://test/ns/test/sa/test"), |p| p.subject_alt_names = vec![dns])
    }

    /// Signs a certificate request (PEM) as an issuing controller would, with the SANs it asks for.
    pub fn sign_request(&self, csr: &str, change: impl FnOnce(&mut CertificateParams)) -> String {
        let mut csr = rcgen::CertificateSigningRequestParams::from_pem(csr).expect("a certificate request");
        let wide = params();
        (csr.params.not_before, csr.params.not_after) = (wide.not_before, wide.not_after);
        csr.params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut csr.params);
        csr.signed_by(&self.issuer).expect("the parameters are complete").pem()
    }

    /// [`TestCa::issue`] as a credential that stays.
    pub fn credential(&self, identity: &Identity) -> Credential {
        Credential::fixed(self.issue(identity))
    }
}

/// Reads an identity.
pub fn identity(s: &str) -> Identity {
    s.parse().expect("a SPIFFE identity")
}

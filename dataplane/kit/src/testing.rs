//! For tests only (feature `testing`): certificate authorities that issue what a test asks for, right or wrong, and a controller that
//! plays what it is told. Never in a product build. It panics where it cannot go on, as tests do.

mod fake;
mod keyserver;
mod reports;

use std::sync::Arc;

use canal_model::identity::Identity;
use canal_model::program::Resource;
use canal_model::trust::Bundle;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, RevokedCertParams, SanType, date_time_ymd,
};

use crate::tls::{Certificate, Credential};

pub use fake::{FakeController, FakeStream, TOKEN};
pub use keyserver::{FakeKeyServer, Mood};
pub use reports::{Heard, Reports};

/// A CA of one trust domain.
pub struct TestCa {
    issuer: Issuer<'static, KeyPair>,
    root: String,
    /// PEM of what is between.
    above: String,
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
        p.is_ca = IsCa::Ca(BasicConstraints::Constrained(1));
        p.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let root = p.self_signed(&key).expect("the parameters are complete").pem();
        Self { issuer: Issuer::new(p, key), root, above: String::new() }
    }

    /// Its root, PEM.
    pub fn root_pem(&self) -> String {
        self.root.clone()
    }

    /// An intermediate CA below this one, whose certificates show it in their chain. Its root is this CA's.
    pub fn intermediate(&self, name: &str, serial: u64) -> Self {
        let key = KeyPair::generate().expect("P-256 keys can be made");
        let mut p = params();
        p.distinguished_name.push(DnType::CommonName, name);
        p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        p.serial_number = Some(serial.into());
        p.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let above = p.signed_by(&key, &self.issuer).expect("the parameters are complete").pem() + &self.above;
        Self { issuer: Issuer::new(p, key), root: self.root.clone(), above }
    }

    /// A revocation list of this CA, PEM.
    pub fn revocations(&self, serials: &[u64]) -> String {
        let revoked = |s: &u64| RevokedCertParams {
            serial_number: (*s).into(),
            revocation_time: date_time_ymd(2021, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2021, 1, 1),
            next_update: date_time_ymd(2022, 1, 1),
            crl_number: 1.into(),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).expect("the parameters are complete").pem().expect("it can be written")
    }

    /// What data planes of `tenant` are told of this CA. `revoked` are revocation lists, PEM.
    pub fn bundle(&self, tenant: &str, trust_domain: &str, federated: bool, revoked: Vec<String>) -> Arc<Resource> {
        let (tenant, trust_domain) = (tenant.parse().expect("a tenant"), trust_domain.parse().expect("a trust domain"));
        Arc::new(Resource::Bundle(Bundle { tenant, trust_domain, roots: vec![self.root_pem()], revoked, federated }))
    }

    /// A certificate for `identity`, trusting this CA.
    pub fn issue(&self, identity: &Identity) -> Certificate {
        let i = self.issue_with(identity, |_| {});
        Certificate::from_pem(&i.key, &i.chain, &self.root).expect("what this CA issues is complete")
    }

    /// As [`TestCa::issue`], with the parameters changed by `change` before signing, as PEM.
    pub fn issue_with(&self, identity: &Identity, change: impl FnOnce(&mut CertificateParams)) -> Issued {
        self.issue_for(KeyPair::generate().expect("P-256 keys can be made"), identity, change)
    }

    /// As [`TestCa::issue_with`], with an RSA key.
    pub fn issue_rsa(&self, identity: &Identity, change: impl FnOnce(&mut CertificateParams)) -> Issued {
        let key = KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, rcgen::RsaKeySize::_2048).expect("RSA keys can be made");
        self.issue_for(key, identity, change)
    }

    fn issue_for(&self, key: KeyPair, identity: &Identity, change: impl FnOnce(&mut CertificateParams)) -> Issued {
        let mut p = params();
        p.subject_alt_names = vec![SanType::URI(identity.to_string().try_into().expect("identities are ASCII"))];
        p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        p.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        change(&mut p);
        let chain = p.signed_by(&key, &self.issuer).expect("the parameters are complete").pem() + &self.above;
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

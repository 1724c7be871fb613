//! Fakes for tests: certificate authorities that issue any certificate, valid or not; fakes of the
//! controller, the fleet service and the key server; addresses for the programs of a test
//! ([`loopback`]); network namespaces ([`netns`]); and another kernel to run in
//! ([`user_mode_linux`]). The crate is a dev-dependency only, and its functions panic on errors, as
//! tests do.

#![forbid(unsafe_code)]

mod fake_controller;
mod fake_fleet_service;
mod fake_keyserver;
pub mod loopback;
pub mod netns;
pub mod user_mode_linux;

use std::sync::Arc;

use canal_model::identity::Identity;
use canal_model::program::Resource;
use canal_model::trust::TrustBundle;
use canal_tls::{Certificate, Credential};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType,
    date_time_ymd,
};

pub use fake_controller::{FakeController, FakeObservation, FakeStream, TOKEN};
pub use fake_fleet_service::{FakeFleetService, ReportLog};
pub use fake_keyserver::{FakeBehavior, FakeKeyServer};

/// A CA of one trust domain, for tests.
pub struct TestCa {
    issuer: Issuer<'static, KeyPair>,
    root: String,
    /// PEM of the certificates between this CA and the root.
    above: String,
}

/// A key and a certificate as unchecked PEM.
#[derive(Debug, Clone)]
pub struct TestCertificate {
    pub key: String,
    pub chain: String,
}

fn params() -> CertificateParams {
    let mut p = CertificateParams::default();
    p.distinguished_name = rcgen::DistinguishedName::new();
    // The validity is long, so that tests do not depend on the clock. Tests about time set their
    // own.
    p.not_before = date_time_ymd(2020, 1, 1);
    p.not_after = date_time_ymd(2120, 1, 1);
    p
}

impl TestCa {
    /// Creates a new self-signed CA.
    pub fn new(name: &str) -> Self {
        let key = KeyPair::generate().expect("P-256 keys can be created");
        let mut p = params();
        p.distinguished_name.push(DnType::CommonName, name);
        p.is_ca = IsCa::Ca(BasicConstraints::Constrained(1));
        p.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let root = p
            .self_signed(&key)
            .expect("the parameters are complete")
            .pem();
        Self {
            issuer: Issuer::new(p, key),
            root,
            above: String::new(),
        }
    }

    /// Returns the root certificate in PEM.
    pub fn root_pem(&self) -> String {
        self.root.clone()
    }

    /// Creates an intermediate CA below this one. Chains of its certificates contain it, and its
    /// root is this CA's.
    pub fn intermediate(&self, name: &str, serial: u64) -> Self {
        let key = KeyPair::generate().expect("P-256 keys can be created");
        let mut p = params();
        p.distinguished_name.push(DnType::CommonName, name);
        p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        p.serial_number = Some(serial.into());
        p.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let above = p
            .signed_by(&key, &self.issuer)
            .expect("the parameters are complete")
            .pem()
            + &self.above;
        Self {
            issuer: Issuer::new(p, key),
            root: self.root.clone(),
            above,
        }
    }

    /// Returns a revocation list of this CA in PEM.
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
        list.signed_by(&self.issuer)
            .expect("the parameters are complete")
            .pem()
            .expect("it can be written")
    }

    /// Returns the Bundle resource of this CA for data planes of `tenant`. `revoked` are revocation
    /// lists in PEM.
    pub fn bundle(
        &self,
        tenant: &str,
        trust_domain: &str,
        federated: bool,
        revoked: Vec<String>,
    ) -> Arc<Resource> {
        let (tenant, trust_domain) = (
            tenant.parse().expect("a tenant"),
            trust_domain.parse().expect("a trust domain"),
        );
        Arc::new(Resource::Bundle(TrustBundle {
            tenant,
            trust_domain,
            roots: vec![self.root_pem()],
            revoked,
            blocked: vec![],
            federated,
        }))
    }

    /// Issues a certificate for `identity`, whose bundle is this CA's root.
    pub fn issue(&self, identity: &Identity) -> Certificate {
        let i = self.issue_with(identity, |_| {});
        Certificate::from_pem(&i.key, &i.chain, &self.root)
            .expect("what this CA issues is complete")
    }

    /// Issues like [`TestCa::issue`], as PEM, with the parameters modified by `change` before
    /// signing.
    pub fn issue_with(
        &self,
        identity: &Identity,
        change: impl FnOnce(&mut CertificateParams),
    ) -> TestCertificate {
        self.issue_for(
            KeyPair::generate().expect("P-256 keys can be created"),
            identity,
            change,
        )
    }

    /// Issues like [`TestCa::issue_with`], with an RSA key.
    pub fn issue_rsa(
        &self,
        identity: &Identity,
        change: impl FnOnce(&mut CertificateParams),
    ) -> TestCertificate {
        let key = KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, rcgen::RsaKeySize::_2048)
            .expect("RSA keys can be created");
        self.issue_for(key, identity, change)
    }

    fn issue_for(
        &self,
        key: KeyPair,
        identity: &Identity,
        change: impl FnOnce(&mut CertificateParams),
    ) -> TestCertificate {
        let mut p = params();
        p.subject_alt_names = vec![SanType::URI(
            identity
                .to_string()
                .try_into()
                .expect("identities are ASCII"),
        )];
        p.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        p.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        change(&mut p);
        let chain = p
            .signed_by(&key, &self.issuer)
            .expect("the parameters are complete")
            .pem()
            + &self.above;
        TestCertificate {
            key: key.serialize_pem(),
            chain,
        }
    }

    /// Issues a TLS server's certificate for the DNS name `name`.
    pub fn server(&self, name: &str) -> TestCertificate {
        let dns = SanType::DnsName(name.try_into().expect("DNS names are ASCII"));
        self.issue_with(&identity("spiffe://test/ns/test/sa/test"), |p| {
            p.subject_alt_names = vec![dns]
        })
    }

    /// Signs a CSR (PEM) like an issuing controller, with the SANs that it requests.
    pub fn sign_request(&self, csr: &str, change: impl FnOnce(&mut CertificateParams)) -> String {
        let mut csr =
            rcgen::CertificateSigningRequestParams::from_pem(csr).expect("a certificate request");
        let wide = params();
        (csr.params.not_before, csr.params.not_after) = (wide.not_before, wide.not_after);
        csr.params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        change(&mut csr.params);
        csr.signed_by(&self.issuer)
            .expect("the parameters are complete")
            .pem()
    }

    /// Issues like [`TestCa::issue`], as a credential that is never replaced.
    pub fn credential(&self, identity: &Identity) -> Credential {
        Credential::fixed(self.issue(identity))
    }
}

/// Parses a SPIFFE identity, and panics on an error.
pub fn identity(s: &str) -> Identity {
    s.parse().expect("a SPIFFE identity")
}

//! Certificates with their keys, as an attacker has them: stolen from files, issued by the
//! attacker's own CA, or none. It verifies nothing and trusts every server.

use std::path::Path;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
    CustomExtension, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyIdMethod,
    KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use serde_json::Value;
use time::{Duration, OffsetDateTime};

/// A chain and the key of its first certificate, PEM.
#[derive(Clone)]
pub struct PemCredential {
    /// Certificates in PEM, leaf first.
    pub chain: String,
    /// The private key, in PKCS#8 and PEM.
    pub key: String,
}

impl PemCredential {
    /// Steals the credential of an identity with this suffix from a data plane's directory.
    pub fn stolen(certs: &Path, identity_end: &str) -> Self {
        let entries =
            std::fs::read_dir(certs).unwrap_or_else(|e| panic!("{}: {e}", certs.display()));
        let stored = entries.filter_map(|entry| {
            serde_json::from_slice::<Value>(&std::fs::read(entry.ok()?.path()).ok()?).ok()
        });
        let found = stored
            .filter(|stored| {
                stored["identity"]
                    .as_str()
                    .is_some_and(|id| id.ends_with(identity_end))
            })
            .last();
        let found = found
            .unwrap_or_else(|| panic!("no certificate of …{identity_end} in {}", certs.display()));
        let text = |field: &str| {
            found[field]
                .as_str()
                .unwrap_or_else(|| panic!("{field} is missing"))
                .to_owned()
        };
        Self {
            chain: text("chain"),
            key: text("key"),
        }
    }

    fn parsed(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let chain = CertificateDer::pem_slice_iter(self.chain.as_bytes())
            .collect::<Result<Vec<_>, _>>()
            .expect("PEM certificates");
        (
            chain,
            PrivateKeyDer::from_pem_slice(self.key.as_bytes()).expect("a PEM key"),
        )
    }
}

/// Returns a TLS 1.3 client that trusts every server.
pub(crate) fn client(credential: Option<&PemCredential>, alpn: &[u8]) -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13]);
    let builder = builder
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(TrustAnyServer(provider)));
    let mut config = match credential.map(PemCredential::parsed) {
        Some((chain, key)) => builder
            .with_client_auth_cert(chain, key)
            .expect("the key of the certificate"),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    Arc::new(config)
}

#[derive(Debug)]
struct TrustAnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for TrustAnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Properties of a leaf certificate. The default is one that every member of the mesh would accept.
#[derive(Clone)]
pub struct Leaf {
    /// URI SANs of the certificate.
    pub identities: Vec<String>,
    /// DNS SANs of the certificate.
    pub names: Vec<String>,
    /// Start of validity in seconds from now.
    pub not_before: i64,
    /// End of validity in seconds from now.
    pub not_after: i64,
    /// True for a certificate of servers and clients; otherwise it is for code signing only.
    pub for_tls: bool,
    /// True if the certificate claims to be a CA.
    pub authority: bool,
    /// Bytes of an unknown extension, which makes the certificate large.
    pub padding: usize,
    /// Serial number, 1 to 127.
    pub serial: u8,
}

impl Leaf {
    /// Creates a valid leaf for this identity.
    pub fn of(identity: &str) -> Self {
        Self {
            identities: vec![identity.into()],
            names: Vec::new(),
            not_before: -60,
            not_after: 3600,
            for_tls: true,
            authority: false,
            padding: 0,
            serial: 1,
        }
    }

    /// Creates a valid leaf for a web server with this name.
    pub fn named(name: &str) -> Self {
        Self {
            identities: Vec::new(),
            names: vec![name.into()],
            ..Self::of("")
        }
    }
}

/// A test's own CA, as a tenant, another mesh or an attacker would have it.
pub struct TestAuthority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    /// Certificates above this CA, its own first; empty for a root.
    above: Vec<String>,
}

fn ca_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    params.distinguished_name = subject;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = OffsetDateTime::now_utc() - Duration::days(1);
    params.not_after = OffsetDateTime::now_utc() + Duration::days(30);
    params
}

fn pair() -> KeyPair {
    KeyPair::generate().expect("a key pair")
}

impl TestAuthority {
    /// Creates a new root certificate with its key.
    pub fn root(name: &str) -> Self {
        Self {
            issuer: CertifiedIssuer::self_signed(ca_params(name), pair()).expect("a root"),
            above: Vec::new(),
        }
    }

    /// Creates an intermediate below this CA.
    pub fn intermediate(&self, name: &str) -> Self {
        let issuer = CertifiedIssuer::signed_by(ca_params(name), pair(), &self.issuer)
            .expect("an intermediate");
        let above = std::iter::once(issuer.pem())
            .chain(self.above.clone())
            .collect();
        Self { issuer, above }
    }

    /// Returns the CA's own certificate, PEM.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Returns the CA's key, PEM.
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Issues a certificate, with the intermediates up to its root.
    pub fn issue(&self, leaf: &Leaf) -> PemCredential {
        let key = pair();
        let now = OffsetDateTime::now_utc();
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let identities = leaf
            .identities
            .iter()
            .map(|id| SanType::URI(id.as_str().try_into().expect("ASCII")));
        let names = leaf
            .names
            .iter()
            .map(|name| SanType::DnsName(name.as_str().try_into().expect("ASCII")));
        params.subject_alt_names = identities.chain(names).collect();
        params.not_before = now + Duration::seconds(leaf.not_before);
        params.not_after = now + Duration::seconds(leaf.not_after);
        params.serial_number = Some(SerialNumber::from(vec![leaf.serial]));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // A certificate for code signing only tests that peers check the extended key usage.
        params.extended_key_usages = match leaf.for_tls {
            true => vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ],
            false => vec![ExtendedKeyUsagePurpose::CodeSigning],
        };
        if leaf.authority {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        }
        // An unknown extension of a private enterprise number makes the certificate as large as
        // asked.
        if leaf.padding > 0 {
            params.custom_extensions = vec![CustomExtension::from_oid_content(
                &[1, 3, 6, 1, 4, 1, 99999, 1],
                vec![0; leaf.padding],
            )];
        }
        let own = params.signed_by(&key, &self.issuer).expect("a leaf").pem();
        let chain = std::iter::once(own).chain(self.above.clone()).collect();
        PemCredential {
            chain,
            key: key.serialize_pem(),
        }
    }

    /// Returns a CRL with these serials (RFC 5280 §5), PEM.
    pub fn revoke(&self, serials: &[u8], number: u64) -> String {
        let now = OffsetDateTime::now_utc();
        let revoked = |serial: &u8| RevokedCertParams {
            serial_number: SerialNumber::from(vec![*serial]),
            revocation_time: now,
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: now - Duration::minutes(1),
            next_update: now + Duration::days(1),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params
            .signed_by(&self.issuer)
            .expect("a list")
            .pem()
            .expect("PEM")
    }
}

/// Returns a certificate signing request (PKCS#10, PEM) with these identities.
pub fn request(identities: &[&str]) -> String {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = identities
        .iter()
        .map(|id| SanType::URI((*id).try_into().expect("ASCII")))
        .collect();
    params
        .serialize_request(&pair())
        .expect("a request")
        .pem()
        .expect("PEM")
}

/// Returns such a request together with its key.
pub fn request_with_key(identities: &[&str]) -> (String, String) {
    let key = pair();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = identities
        .iter()
        .map(|id| SanType::URI((*id).try_into().expect("ASCII")))
        .collect();
    (
        params
            .serialize_request(&key)
            .expect("a request")
            .pem()
            .expect("PEM"),
        key.serialize_pem(),
    )
}

//! Validation of the certificates of a listener's clients, who are outside the mesh: a certificate
//! is valid if one of the listener's authorities issued it for clients. It proves no identity of the
//! mesh, whatever names it has. Start at [`ListenerClientVerifier`].

use std::fmt::Write;
use std::sync::Arc;

use canal_model::client_validation::{ClientValidation, ClientValidationMode};
use canal_tls::{HandshakeFailure, PeerIdentityError, TlsError};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, UnixTime};
use sha2::{Digest, Sha256};

/// Maximum length of the names of authorities that a handshake tells clients, in bytes. A client
/// needs them only to select one of several certificates. With more, no name is told: TLS has room
/// for 64 KiB of them, and clients get them before they prove anything.
const HINT_BYTES_MAX: usize = 16 << 10;

/// Maximum length of a client's subject in `x-forwarded-client-cert`, in bytes. Subjects of a few
/// names have some hundred bytes; the header shares the 64 KiB of a head with others.
const SUBJECT_BYTES_MAX: usize = 1024;

/// What is known of the client of a listener that validates clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenerClient {
    /// The client's certificate is valid.
    Valid(ClientCertificate),
    /// The client has no valid certificate, for this reason. The listener accepts it all the same.
    Unvalidated(HandshakeFailure),
}

/// A valid certificate of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientCertificate {
    /// Value of `x-forwarded-client-cert`, as Envoy writes it: `Hash` is the SHA-256 of the
    /// certificate, and `Subject` its subject.
    pub forwarded: String,
    /// The leaf, and what the client presented above it.
    chain: Arc<[CertificateDer<'static>]>,
}

impl ClientCertificate {
    fn read(chain: &[CertificateDer<'static>], leaf: &CertificateDer<'_>) -> Self {
        let mut forwarded = "Hash=".to_owned();
        for byte in Sha256::digest(leaf) {
            let _ = write!(forwarded, "{byte:02x}");
        }
        let subject = canal_tls::subject_of(leaf).filter(|subject| {
            subject.len() <= SUBJECT_BYTES_MAX && subject.bytes().all(|b| matches!(b, b' '..=b'~'))
        });
        if let Some(subject) = subject {
            let escaped = subject.replace('\\', "\\\\").replace('"', "\\\"");
            let _ = write!(forwarded, ";Subject=\"{escaped}\"");
        }
        Self {
            forwarded,
            chain: chain.into(),
        }
    }
}

/// Verifies the clients of listeners with the same authorities.
#[derive(Debug)]
pub struct ListenerClientVerifier {
    authorities: Arc<dyn ClientCertVerifier>,
    mode: ClientValidationMode,
}

impl ListenerClientVerifier {
    /// Creates a verifier with the authorities of a validation.
    ///
    /// # Errors
    /// One of the authorities cannot be used.
    pub fn new(validation: &ClientValidation) -> Result<Self, Error> {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(validation.authorities.pem.as_bytes()) {
            let malformed = |_| Error::General("the authorities are not PEM".to_owned());
            roots.add(root.map_err(malformed)?)?;
        }
        let subjects = roots.subjects();
        let hint_bytes: usize = subjects.iter().map(|it| it.as_ref().len()).sum();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        if hint_bytes > HINT_BYTES_MAX {
            builder = builder.clear_root_hint_subjects();
        }
        let unusable = |error| Error::General(format!("the authorities cannot be used: {error}"));
        Ok(Self {
            authorities: builder.build().map_err(unusable)?,
            mode: validation.mode,
        })
    }

    /// Returns the clients that the verifier accepts.
    pub fn mode(&self) -> ClientValidationMode {
        self.mode
    }

    /// Returns what a finished handshake says of the client; `None` if it has no certificate and needs
    /// none.
    pub(crate) fn client(
        &self,
        chain: Option<&[CertificateDer<'static>]>,
    ) -> Option<ListenerClient> {
        let Some(chain @ [leaf, above @ ..]) = chain else {
            let is_expected = self.mode != ClientValidationMode::AllowValidOrNone;
            return is_expected
                .then_some(ListenerClient::Unvalidated(HandshakeFailure::NoCertificate));
        };
        // Where only valid certificates are accepted, the handshake has verified this one.
        if self.mode == ClientValidationMode::AllowInsecureFallback
            && let Err(error) = self.verify(leaf, above, UnixTime::now())
        {
            let why = TlsError::from(error).refusal();
            return Some(ListenerClient::Unvalidated(why));
        }
        let certificate = ClientCertificate::read(chain, leaf);
        Some(ListenerClient::Valid(certificate))
    }

    /// Returns whether a client whose handshake another verifier accepted may stay: with a
    /// certificate, if it is valid here too; without one, if none is demanded here.
    pub fn keeps(&self, client: Option<&ClientCertificate>) -> bool {
        let Some(certificate) = client else {
            return self.mode != ClientValidationMode::AllowValidOnly;
        };
        let [leaf, above @ ..] = &*certificate.chain else {
            return false;
        };
        self.verify(leaf, above, UnixTime::now()).is_ok()
    }

    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        PeerIdentityError::check_size(leaf, above)?;
        self.authorities.verify_client_cert(leaf, above, now)
    }
}

impl ClientCertVerifier for ListenerClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.mode == ClientValidationMode::AllowValidOnly
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.authorities.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match self.mode {
            ClientValidationMode::AllowValidOnly | ClientValidationMode::AllowValidOrNone => {
                self.verify(leaf, above, now)
            }
            // `client` verifies it after the handshake, which it does not end.
            ClientValidationMode::AllowInsecureFallback => Ok(ClientCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authorities
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authorities
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authorities.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use canal_model::certificate::CaCertificates;
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    };
    use rustls::CertificateError;

    use super::*;

    struct Authority {
        pem: String,
        issuer: Issuer<'static, KeyPair>,
    }

    impl Authority {
        fn new(name: &str) -> Self {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let pem = params.self_signed(&key).unwrap().pem();
            let issuer = Issuer::new(params, key);
            Self { pem, issuer }
        }

        fn issue(&self, change: impl FnOnce(&mut CertificateParams)) -> CertificateDer<'static> {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::default();
            params
                .distinguished_name
                .push(DnType::CommonName, "shop \"1\"");
            change(&mut params);
            params.signed_by(&key, &self.issuer).unwrap().der().clone()
        }
    }

    fn verifier(mode: ClientValidationMode, pem: String) -> Result<ListenerClientVerifier, Error> {
        ListenerClientVerifier::new(&ClientValidation {
            ports: [443].into(),
            listeners: BTreeSet::new(),
            mode,
            authorities: Arc::new(CaCertificates { pem, count: 1 }),
        })
    }

    #[test]
    fn only_a_certificate_that_an_authority_issued_for_clients_is_valid() {
        let (own, second, other) = (
            Authority::new("own"),
            Authority::new("second"),
            Authority::new("other"),
        );
        let pem = format!("{}{}", own.pem, second.pem);
        let strict = verifier(ClientValidationMode::AllowValidOnly, pem.clone()).unwrap();
        let lenient = verifier(ClientValidationMode::AllowInsecureFallback, pem.clone()).unwrap();
        let optional = verifier(ClientValidationMode::AllowValidOrNone, pem).unwrap();
        assert!(strict.client_auth_mandatory() && !lenient.client_auth_mandatory());
        assert!(!optional.client_auth_mandatory());
        let server_only = |it: &mut CertificateParams| {
            it.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]
        };
        let expired = |it: &mut CertificateParams| it.not_after = rcgen::date_time_ymd(2001, 1, 1);
        let early = |it: &mut CertificateParams| it.not_before = rcgen::date_time_ymd(4000, 1, 1);
        for (leaf, expected) in [
            (own.issue(|_| {}), None),
            (second.issue(|_| {}), None),
            (other.issue(|_| {}), Some(HandshakeFailure::UnknownIssuer)),
            (own.issue(server_only), Some(HandshakeFailure::WrongUsage)),
            (own.issue(expired), Some(HandshakeFailure::Expired)),
            (own.issue(early), Some(HandshakeFailure::NotYetValid)),
            (
                CertificateDer::from(vec![0]),
                Some(HandshakeFailure::BadEncoding),
            ),
        ] {
            let found = strict.verify_client_cert(&leaf, &[], UnixTime::now());
            let failure = found.err().map(|e| TlsError::from(e).refusal());
            assert_eq!(failure, expected);
            assert!(
                lenient
                    .verify_client_cert(&leaf, &[], UnixTime::now())
                    .is_ok()
            );
            let found = optional.verify_client_cert(&leaf, &[], UnixTime::now());
            assert_eq!(found.is_ok(), expected.is_none());
            let client = lenient.client(Some(&[leaf]));
            let unvalidated = match client.unwrap() {
                ListenerClient::Valid(_) => None,
                ListenerClient::Unvalidated(why) => Some(why),
            };
            assert_eq!(unvalidated, expected);
        }
        let absent = ListenerClient::Unvalidated(HandshakeFailure::NoCertificate);
        assert_eq!(lenient.client(None), Some(absent));
        assert_eq!(optional.client(None), None);
    }

    #[test]
    fn clients_are_told_names_of_authorities_only_if_they_are_short() {
        let strict = ClientValidationMode::AllowValidOnly;
        let long = "x".repeat(1024);
        for (count, expected) in [(1, 1), (20, 0)] {
            let authorities = (0..count).map(|n| Authority::new(&format!("{long}{n}")));
            let pem: Vec<String> = authorities.map(|it| it.pem).collect();
            let verifier = verifier(strict, pem.concat()).unwrap();
            assert_eq!(verifier.root_hint_subjects().len(), expected);
        }
    }

    #[test]
    fn a_client_stays_if_its_certificate_is_valid_for_the_next_verifier_too() {
        let (own, other) = (Authority::new("own"), Authority::new("other"));
        let (strict, lenient, optional) = (
            ClientValidationMode::AllowValidOnly,
            ClientValidationMode::AllowInsecureFallback,
            ClientValidationMode::AllowValidOrNone,
        );
        let verifier = |mode, pem: &str| verifier(mode, pem.to_owned()).unwrap();
        let client = verifier(strict, &own.pem).client(Some(&[own.issue(|_| {})]));
        let Some(ListenerClient::Valid(certificate)) = client else {
            panic!("{client:?}")
        };
        let both = format!("{}{}", other.pem, own.pem);
        for (mode, pem, with, without) in [
            (strict, &both, true, false),
            (strict, &other.pem, false, false),
            (lenient, &both, true, true),
            (lenient, &other.pem, false, true),
            (optional, &both, true, true),
            (optional, &other.pem, false, true),
        ] {
            let next = verifier(mode, pem);
            assert_eq!(next.keeps(Some(&certificate)), with, "{mode:?}");
            assert_eq!(next.keeps(None), without, "{mode:?}");
        }
    }

    #[test]
    fn a_chain_beyond_the_limits_is_refused_before_it_is_parsed() {
        let own = Authority::new("own");
        let strict = verifier(ClientValidationMode::AllowValidOnly, own.pem.clone()).unwrap();
        let leaf = own.issue(|_| {});
        let failure = |leaf: &CertificateDer<'_>, above: &[CertificateDer<'_>]| {
            let found = strict.verify_client_cert(leaf, above, UnixTime::now());
            TlsError::from(found.unwrap_err()).refusal()
        };
        let above = vec![leaf.clone(); canal_tls::CHAIN_CERTIFICATES_MAX];
        assert_eq!(failure(&leaf, &above), HandshakeFailure::ChainTooLong);
        let large = CertificateDer::from(vec![0; canal_tls::CHAIN_BYTES_MAX + 1]);
        assert_eq!(failure(&large, &[]), HandshakeFailure::ChainTooLarge);
    }

    #[test]
    fn the_subject_of_a_client_cannot_end_its_quotes() {
        let own = Authority::new("own");
        let forwarded = |leaf| ClientCertificate::read(&[], &leaf).forwarded;
        let shown = forwarded(own.issue(|_| {}));
        let (hash, subject) = shown.split_once(';').unwrap();
        assert_eq!(hash.len(), "Hash=".len() + 64);
        assert!(subject.ends_with("shop \\\"1\\\"\""), "{subject}");
        for name in ["a\r\nx: y", "é", &"a".repeat(SUBJECT_BYTES_MAX)] {
            let shown =
                forwarded(own.issue(|it| it.distinguished_name.push(DnType::CommonName, name)));
            assert!(!shown.contains(';'), "{shown}");
        }
    }

    #[test]
    fn authorities_that_are_no_certificates_are_refused() {
        let mode = ClientValidationMode::AllowValidOnly;
        assert!(verifier(mode, String::new()).is_err());
        let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let error = verifier(mode, broken.to_owned()).unwrap_err();
        assert!(
            matches!(
                error,
                Error::InvalidCertificate(CertificateError::BadEncoding)
            ),
            "{error}"
        );
    }
}

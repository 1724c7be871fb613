//! Who the peer must be. Chains are checked by webpki; this adds the SPIFFE rules and says what was expected and seen.

use std::sync::Arc;

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::provider;

/// Why a peer whose certificate chains to the bundle is still not the peer of this connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerRefused {
    /// The server is someone else.
    #[error("the peer is {seen:?}, expected one of {expected:?}; is the address taken by another workload?")]
    Identity { expected: Vec<Identity>, seen: Vec<String> },
    /// The client belongs to another tenant.
    #[error("the peer is {seen:?}, expected an identity of trust domain {expected}")]
    TrustDomain { expected: TrustDomain, seen: Vec<String> },
    /// The client's certificate names no or several identities, so who it is would be a guess (X509-SVID §2).
    #[error("the peer's certificate names {seen:?}, expected exactly one identity of trust domain {expected}")]
    Ambiguous { expected: TrustDomain, seen: Vec<String> },
}

impl PeerRefused {
    fn error(self) -> Error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(self))))
    }
}

/// The URI SANs of a certificate.
pub(super) fn uris(der: &CertificateDer<'_>) -> Result<Vec<String>, Error> {
    let bad = |_| Error::InvalidCertificate(CertificateError::BadEncoding);
    let (_, x) = X509Certificate::from_der(der).map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))?;
    let names = x.subject_alternative_name().map_err(bad)?;
    let uri = |n: &GeneralName<'_>| if let GeneralName::URI(u) = n { Some((*u).to_string()) } else { None };
    Ok(names.map(|n| n.value.general_names.iter().filter_map(uri).collect()).unwrap_or_default())
}

/// Whether one of `roots` vouches for `chain` (leaf first) as a server.
pub(super) fn chain(chain: &[CertificateDer<'_>], roots: &RootCertStore, now: UnixTime) -> Result<(), Error> {
    let [leaf, intermediates @ ..] = chain else { return Err(Error::NoCertificatesPresented) };
    let parsed = ParsedCertificate::try_from(leaf)?;
    verify_server_cert_signed_by_trust_anchor(&parsed, roots, intermediates, now, provider().signature_verification_algorithms.all)
}

/// Decides whether a client with these URI SANs may connect to a server of `own` trust domain.
pub(super) fn decide_client(own: &TrustDomain, uris: Vec<String>) -> Result<Identity, PeerRefused> {
    let expected = own.clone();
    let [one] = uris.as_slice() else { return Err(PeerRefused::Ambiguous { expected, seen: uris }) };
    match one.parse::<Identity>() {
        Ok(id) if id.trust_domain == *own => Ok(id),
        _ => Err(PeerRefused::TrustDomain { expected, seen: uris }),
    }
}

/// Decides whether a server with these URI SANs is one of `expected`: any match will do (features.md A.2).
pub(super) fn decide_server(expected: &[Identity], uris: Vec<String>) -> Result<Identity, PeerRefused> {
    let found = uris.iter().find_map(|u| u.parse::<Identity>().ok().filter(|id| expected.contains(id)));
    found.ok_or_else(|| PeerRefused::Identity { expected: expected.to_vec(), seen: uris })
}

/// Checks clients: the bundle's chain, then the trust domain.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    chain: Arc<dyn ClientCertVerifier>,
    own: TrustDomain,
}

impl ClientVerifier {
    pub(super) fn new(roots: Arc<RootCertStore>, own: TrustDomain) -> Result<Self, VerifierBuilderError> {
        // No hints: the names of the roots would grow the handshake and tell strangers whose port this is.
        let chain = WebPkiClientVerifier::builder_with_provider(roots, provider()).clear_root_hint_subjects().build()?;
        Ok(Self { chain, own })
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }
    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.chain.verify_client_cert(leaf, intermediates, now)?;
        decide_client(&self.own, uris(leaf)?).map_err(PeerRefused::error)?;
        Ok(verified)
    }
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, cert, dss)
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

/// Checks a server: the bundle's chain, then that it is one of those expected.
#[derive(Debug)]
pub(super) struct ServerVerifier {
    roots: Arc<RootCertStore>,
    expected: Arc<[Identity]>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerVerifier {
    pub(super) fn new(roots: Arc<RootCertStore>, expected: Arc<[Identity]>) -> Self {
        Self { roots, expected, algorithms: provider().signature_verification_algorithms }
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(leaf)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, self.algorithms.all)?;
        decide_server(&self.expected, uris(leaf)?).map_err(PeerRefused::error)?;
        Ok(ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.algorithms)
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

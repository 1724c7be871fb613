//! Verification of peers: the chain against the roots and revocation lists of its trust domain
//! (webpki), and the SPIFFE rules. Errors name the expected and the seen identities. Start with
//! [`PeerVerifier`].

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, ExtendedKeyPurpose,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use webpki::{
    EndEntityCert, ExpirationPolicy, KeyUsage, RevocationCheckDepth, RevocationOptionsBuilder,
    UnknownStatusPolicy,
};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::chain_cache::ChainKey;
use super::handshake_failure::PeerIdentityError;
use super::provider;
use super::trust::{PeerTrustWatch, TrustAnchors, TrustView};
use super::verified_chain::{PeerLeaf, PeerRole, VerifiedChain};

/// Peers that a handshake accepts.
#[derive(Debug, Clone)]
pub(super) enum ExpectedPeer {
    /// Any member of this trust domain, or of one that it federates with.
    Members(TrustDomain),
    OneOf(Arc<[Identity]>),
}

/// Verifier of peers. It uses the newest trust, and the bundle of this side's certificate while no
/// trust was received.
#[derive(Clone)]
pub struct PeerVerifier {
    pub(super) own: TrustDomain,
    pub(super) fallback: Arc<TrustAnchors>,
    pub(super) trust: TrustView,
}

impl std::fmt::Debug for PeerVerifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Judge({}, {:?})", self.own, self.trust)
    }
}

/// Returns the URI SANs of a certificate.
pub(super) fn uris(der: &CertificateDer<'_>) -> Result<Vec<String>, Error> {
    facts(der).map(|f| f.uris)
}

/// Returns the URI SANs of a certificate and the end of its validity.
pub(super) fn uris_and_end(der: &CertificateDer<'_>) -> Result<(Vec<String>, SystemTime), Error> {
    facts(der).map(|f| {
        (
            f.uris,
            SystemTime::UNIX_EPOCH + Duration::from_secs(f.life.1),
        )
    })
}

/// Returns the subject of a certificate as text; `None` if it cannot be read.
pub fn subject_of(der: &CertificateDer<'_>) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    Some(certificate.subject().to_string())
}

struct ChainFacts {
    uris: Vec<String>,
    life: (u64, u64),
}

fn facts(der: &CertificateDer<'_>) -> Result<ChainFacts, Error> {
    let bad = || Error::InvalidCertificate(CertificateError::BadEncoding);
    let (_, x) = X509Certificate::from_der(der).map_err(|_| bad())?;
    let names = x.subject_alternative_name().map_err(|_| bad())?;
    let uri = |n: &GeneralName<'_>| {
        if let GeneralName::URI(u) = n {
            Some((*u).to_string())
        } else {
            None
        }
    };
    let uris = names
        .map(|n| n.value.general_names.iter().filter_map(uri).collect())
        .unwrap_or_default();
    let secs = |t: i64| u64::try_from(t).unwrap_or(0);
    let life = (
        secs(x.validity().not_before.timestamp()),
        secs(x.validity().not_after.timestamp()),
    );
    Ok(ChainFacts { uris, life })
}

/// Decides whether a client with these URI SANs may connect to a server of `own` trust domain.
pub(super) fn decide_client(
    own: &TrustDomain,
    known: impl Fn(&TrustDomain) -> bool,
    uris: &[String],
) -> Result<Identity, PeerIdentityError> {
    let (expected, seen) = (own.clone(), uris.to_vec());
    let [one] = uris else {
        return Err(PeerIdentityError::Ambiguous {
            expected,
            names: seen,
        });
    };
    match one.parse::<Identity>() {
        Ok(id) if known(&id.trust_domain) => Ok(id),
        _ => Err(PeerIdentityError::TrustDomain {
            expected,
            names: seen,
        }),
    }
}

/// Decides whether a server with these URI SANs is one of `expected`. As in ztunnel, any match is
/// sufficient.
pub(super) fn decide_server(
    expected: &[Identity],
    uris: &[String],
) -> Result<Identity, PeerIdentityError> {
    let found = uris.iter().find_map(|u| {
        u.parse::<Identity>()
            .ok()
            .filter(|id| expected.contains(id))
    });
    found.ok_or_else(|| PeerIdentityError::Identity {
        expected: expected.to_vec(),
        names: uris.to_vec(),
    })
}

impl PeerVerifier {
    /// Creates a verifier for this side's trust domain `own`. `bundle` is used while `trust` has no
    /// bundle for it.
    ///
    /// # Errors
    /// A certificate of the bundle is unusable.
    pub fn new(
        own: TrustDomain,
        bundle: &[CertificateDer<'_>],
        trust: TrustView,
    ) -> Result<Self, String> {
        Ok(Self {
            own,
            fallback: Arc::new(TrustAnchors::of(bundle, &[])?),
            trust,
        })
    }

    /// Returns the identity of the peer of a finished handshake. `expected` lists the identities of
    /// a server; `None` accepts any member.
    ///
    /// # Errors
    /// The peer presented no certificate, or it is not one of those expected.
    pub fn peer(
        &self,
        role: PeerRole,
        expected: Option<&Arc<[Identity]>>,
        chain: Option<&[CertificateDer<'static>]>,
    ) -> Result<(Identity, Arc<PeerLeaf>), Error> {
        let members = || ExpectedPeer::Members(self.own.clone());
        self.verify_from_cache(
            role,
            &expected.map_or_else(members, |e| ExpectedPeer::OneOf(e.clone())),
            chain,
        )
    }

    /// Returns a watch that reports when the peer of a finished handshake loses trust.
    pub fn trust_watch(&self, leaf: Arc<PeerLeaf>) -> PeerTrustWatch {
        PeerTrustWatch::new(self.trust.clone(), leaf)
    }

    /// Returns the present trust anchors of `domain`.
    fn anchors(&self, domain: &TrustDomain) -> Option<Arc<TrustAnchors>> {
        let anchors = self.trust.current().anchors(domain).cloned();
        anchors.or_else(|| (*domain == self.own).then(|| self.fallback.clone()))
    }

    fn decide(
        &self,
        expected: &ExpectedPeer,
        uris: &[String],
    ) -> Result<Identity, PeerIdentityError> {
        match expected {
            ExpectedPeer::Members(own) => decide_client(own, |td| self.anchors(td).is_some(), uris),
            ExpectedPeer::OneOf(ids) => decide_server(ids, uris),
        }
    }

    /// Verifies the peer, and returns its identity and the data of its chain to retain. Signatures
    /// are checked once per chain and trust anchors.
    pub(super) fn verify_peer(
        &self,
        role: PeerRole,
        expected: &ExpectedPeer,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(Identity, Arc<PeerLeaf>), Error> {
        // The limits come before any parsing, because the peer is not known yet.
        PeerIdentityError::check_size(leaf, above)?;
        // webpki parses first, because it also checks the signatures.
        let parsed = EndEntityCert::try_from(leaf).map_err(of_webpki)?;
        let facts = facts(leaf)?;
        let identity = self
            .decide(expected, &facts.uris)
            .map_err(PeerIdentityError::error)?;
        let refused = || {
            PeerIdentityError::TrustDomain {
                expected: self.own.clone(),
                names: facts.uris.clone(),
            }
            .error()
        };
        // The trust domain is known before the chain is verified, so only its own roots are used.
        let anchors = self.anchors(&identity.trust_domain).ok_or_else(refused)?;
        // A blocked identity is refused before the cache, which may know its chain.
        if anchors.blocks(&identity) {
            return Err(Error::InvalidCertificate(CertificateError::Revoked));
        }
        // A view without bundles has no cache.
        let key = self
            .trust
            .shared
            .as_ref()
            .map(|s| (s, ChainKey::of(leaf, above, anchors.number, role)));
        if let Some((shared, key)) = &key {
            let known = shared.cache.get(key, now);
            shared.cache.count(known.is_some());
            if let Some(known) = known {
                return Ok((identity, known.leaf.clone()));
            }
        }
        verify(&parsed, &anchors, above, role, now)?;
        let verified = Arc::new(verified(&identity, facts, leaf, above)?);
        let leaf = verified.leaf.clone();
        if let Some((shared, key)) = key {
            shared.cache.put(key, verified);
        }
        Ok((identity, leaf))
    }

    /// Returns the identity of the peer of a finished handshake: repeats the decision of the
    /// verifier without checking signatures.
    pub(super) fn verify_from_cache(
        &self,
        role: PeerRole,
        expected: &ExpectedPeer,
        chain: Option<&[CertificateDer<'static>]>,
    ) -> Result<(Identity, Arc<PeerLeaf>), Error> {
        let Some([leaf, above @ ..]) = chain else {
            return Err(Error::NoCertificatesPresented);
        };
        if let Some(shared) = &self.trust.shared {
            for anchors in self.all() {
                if let Some(known) = shared.cache.get(
                    &ChainKey::of(leaf, above, anchors.number, role),
                    UnixTime::now(),
                ) {
                    let identity = self
                        .decide(expected, &known.uris)
                        .map_err(PeerIdentityError::error)?;
                    return Ok((identity, known.leaf.clone()));
                }
            }
        }
        let facts = facts(leaf)?;
        let identity = self
            .decide(expected, &facts.uris)
            .map_err(PeerIdentityError::error)?;
        Ok((
            identity.clone(),
            verified(&identity, facts, leaf, above)?.leaf,
        ))
    }

    /// Returns the anchors of this side's own domain, to which nearly every peer belongs.
    fn all(&self) -> impl Iterator<Item = Arc<TrustAnchors>> {
        self.anchors(&self.own).into_iter()
    }
}

fn verified(
    identity: &Identity,
    facts: ChainFacts,
    leaf: &CertificateDer<'_>,
    above: &[CertificateDer<'_>],
) -> Result<VerifiedChain, Error> {
    let mut life = facts.life;
    for c in above {
        let theirs = self::facts(c)?.life;
        life = (life.0.max(theirs.0), life.1.min(theirs.1));
    }
    let until = SystemTime::UNIX_EPOCH + Duration::from_secs(facts.life.1);
    let leaf = Arc::new(PeerLeaf::read(identity.clone(), leaf, above, until)?);
    Ok(VerifiedChain {
        uris: facts.uris,
        life,
        leaf,
    })
}

#[cfg(test)]
pub(super) fn verified_for_test(
    identity: &Identity,
    leaf: &CertificateDer<'_>,
) -> Arc<VerifiedChain> {
    Arc::new(verified(identity, facts(leaf).unwrap(), leaf, &[]).unwrap())
}

/// Verifies that the leaf chains to one of the roots, and that no revocation list names a
/// certificate of the chain.
fn verify(
    leaf: &EndEntityCert<'_>,
    anchors: &TrustAnchors,
    above: &[CertificateDer<'_>],
    role: PeerRole,
    now: UnixTime,
) -> Result<(), Error> {
    let lists: Vec<_> = anchors.revoked.iter().collect();
    // An outdated list still names revoked certificates, and a missing list must not stop the mesh.
    let revocation = RevocationOptionsBuilder::new(&lists).ok().map(|b| {
        b.with_depth(RevocationCheckDepth::Chain)
            .with_status_policy(UnknownStatusPolicy::Allow)
            .with_expiration_policy(ExpirationPolicy::Ignore)
            .build()
    });
    let usage = match role {
        PeerRole::Client => KeyUsage::client_auth(),
        PeerRole::Server => KeyUsage::server_auth(),
    };
    let algorithms = provider().signature_verification_algorithms.all;
    leaf.verify_for_usage(
        algorithms,
        &anchors.roots,
        above,
        now,
        usage,
        revocation,
        None,
    )
    .map(drop)
    .map_err(of_webpki)
}

/// Verifies that `chain` (leaf first) chains to one of `anchors` as a server.
pub(super) fn chain(
    chain: &[CertificateDer<'_>],
    anchors: &TrustAnchors,
    now: UnixTime,
) -> Result<(), Error> {
    let [leaf, above @ ..] = chain else {
        return Err(Error::NoCertificatesPresented);
    };
    verify(
        &EndEntityCert::try_from(leaf).map_err(of_webpki)?,
        anchors,
        above,
        PeerRole::Server,
        now,
    )
}

/// Converts a webpki error into the TLS error, and so the alert, that rustls' own verifiers use for
/// it.
fn of_webpki(e: webpki::Error) -> Error {
    use webpki::Error as W;
    let purpose = |oids: Vec<usize>| match &*oids {
        KeyUsage::CLIENT_AUTH_REPR => ExtendedKeyPurpose::ClientAuth,
        KeyUsage::SERVER_AUTH_REPR => ExtendedKeyPurpose::ServerAuth,
        _ => ExtendedKeyPurpose::Other(oids),
    };
    Error::InvalidCertificate(match e {
        W::BadDer
        | W::BadDerTime
        | W::TrailingData(_)
        | W::InvalidSerialNumber
        | W::MalformedExtensions => CertificateError::BadEncoding,
        W::CertNotValidYet { time, not_before } => {
            CertificateError::NotValidYetContext { time, not_before }
        }
        W::CertExpired { time, not_after } => CertificateError::ExpiredContext { time, not_after },
        W::InvalidCertValidity => CertificateError::Expired,
        W::UnknownIssuer => CertificateError::UnknownIssuer,
        W::CertRevoked => CertificateError::Revoked,
        W::InvalidSignatureForPublicKey => CertificateError::BadSignature,
        W::RequiredEkuNotFoundContext(c) => CertificateError::InvalidPurposeContext {
            required: purpose(c.required.oid_values().collect()),
            presented: c.present.into_iter().map(purpose).collect(),
        },
        W::UnsupportedSignatureAlgorithmContext(c) => {
            CertificateError::UnsupportedSignatureAlgorithmContext {
                signature_algorithm_id: c.signature_algorithm_id,
                supported_algorithms: c.supported_algorithms,
            }
        }
        W::UnsupportedSignatureAlgorithmForPublicKeyContext(c) => {
            CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext {
                signature_algorithm_id: c.signature_algorithm_id,
                public_key_algorithm_id: c.public_key_algorithm_id,
            }
        }
        // The fault is in the tenant's revocation list and not in the peer's chain.
        W::IssuerNotCrlSigner | W::InvalidCrlSignatureForPublicKey => {
            return PeerIdentityError::RevocationList(format!("{e:?}")).error();
        }
        other => return PeerIdentityError::Chain(format!("{other:?}")).error(),
    })
}

/// Verifies the certificates of clients.
#[derive(Debug)]
pub struct ClientVerifier {
    verifier: PeerVerifier,
    required: bool,
    expected: ExpectedPeer,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ClientVerifier {
    /// Creates a verifier that requires a certificate.
    pub fn new(verifier: PeerVerifier) -> Self {
        let expected = ExpectedPeer::Members(verifier.own.clone());
        Self {
            verifier,
            required: true,
            expected,
            algorithms: provider().signature_verification_algorithms,
        }
    }

    /// Sets whether a client must present a certificate.
    pub fn required(mut self, required: bool) -> Self {
        self.required = required;
        self
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.required
    }
    /// Sends no hints: the names of the roots would enlarge the handshake and reveal the tenant to
    /// unauthenticated peers.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }
    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verifier
            .verify_peer(PeerRole::Client, &self.expected, leaf, above, now)?;
        Ok(ClientCertVerified::assertion())
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

/// Verifies a server: its chain, and that it is one of the expected identities.
#[derive(Debug)]
pub struct ServerVerifier {
    verifier: PeerVerifier,
    expected: ExpectedPeer,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerVerifier {
    /// Creates a verifier that accepts one of `expected`.
    pub fn new(verifier: PeerVerifier, expected: Arc<[Identity]>) -> Self {
        Self {
            verifier,
            expected: ExpectedPeer::OneOf(expected),
            algorithms: provider().signature_verification_algorithms,
        }
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verifier
            .verify_peer(PeerRole::Server, &self.expected, leaf, above, now)?;
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

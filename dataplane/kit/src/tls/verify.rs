//! Who the peer must be: its chain against the roots and revocation lists of its trust domain (webpki), and the SPIFFE rules. Refusals say
//! what was expected and seen.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, ExtendedKeyPurpose, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use webpki::{EndEntityCert, ExpirationPolicy, KeyUsage, RevocationCheckDepth, RevocationOptionsBuilder, UnknownStatusPolicy};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::cache::ChainKey;
use super::refusal::PeerRefused;
use super::trust::{Anchors, PeerLeaf, Standing, TrustView};
use super::{CHAIN_BYTES_MAX, CHAIN_CERTIFICATES_MAX, provider};

/// Which side of TLS the peer is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    Client,
    Server,
}

/// A chain that a trust domain's roots vouch for.
#[derive(Debug)]
pub(super) struct Verified {
    uris: Vec<String>,
    /// From and until, over all certificates of the chain; seconds since 1970.
    life: (u64, u64),
    leaf: Arc<PeerLeaf>,
}

impl Verified {
    pub(super) fn valid_at(&self, now: UnixTime) -> bool {
        (self.life.0..=self.life.1).contains(&now.as_secs())
    }
}

/// Whom a handshake takes.
#[derive(Debug, Clone)]
pub(super) enum Expected {
    /// Any member of this trust domain, or of one that it federates with.
    Members(TrustDomain),
    OneOf(Arc<[Identity]>),
}

/// What a verifier goes by: the newest trust, and the bundle that came with the own certificate where nothing was told.
#[derive(Clone)]
pub struct Judge {
    pub(super) own: TrustDomain,
    pub(super) fallback: Arc<Anchors>,
    pub(super) trust: TrustView,
}

impl std::fmt::Debug for Judge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Judge({}, {:?})", self.own, self.trust)
    }
}

/// The URI SANs of a certificate.
pub(super) fn uris(der: &CertificateDer<'_>) -> Result<Vec<String>, Error> {
    facts(der).map(|f| f.uris)
}

/// The URI SANs of a certificate, and when its life ends.
pub(super) fn uris_and_end(der: &CertificateDer<'_>) -> Result<(Vec<String>, SystemTime), Error> {
    facts(der).map(|f| (f.uris, SystemTime::UNIX_EPOCH + Duration::from_secs(f.life.1)))
}

struct Facts {
    uris: Vec<String>,
    life: (u64, u64),
}

fn facts(der: &CertificateDer<'_>) -> Result<Facts, Error> {
    let bad = || Error::InvalidCertificate(CertificateError::BadEncoding);
    let (_, x) = X509Certificate::from_der(der).map_err(|_| bad())?;
    let names = x.subject_alternative_name().map_err(|_| bad())?;
    let uri = |n: &GeneralName<'_>| if let GeneralName::URI(u) = n { Some((*u).to_string()) } else { None };
    let uris = names.map(|n| n.value.general_names.iter().filter_map(uri).collect()).unwrap_or_default();
    let secs = |t: i64| u64::try_from(t).unwrap_or(0);
    let life = (secs(x.validity().not_before.timestamp()), secs(x.validity().not_after.timestamp()));
    Ok(Facts { uris, life })
}

/// Decides whether a client with these URI SANs may connect to a server of `own` trust domain.
pub(super) fn decide_client(own: &TrustDomain, known: impl Fn(&TrustDomain) -> bool, uris: &[String]) -> Result<Identity, PeerRefused> {
    let (expected, seen) = (own.clone(), uris.to_vec());
    let [one] = uris else { return Err(PeerRefused::Ambiguous { expected, seen }) };
    match one.parse::<Identity>() {
        Ok(id) if known(&id.trust_domain) => Ok(id),
        _ => Err(PeerRefused::TrustDomain { expected, seen }),
    }
}

/// Decides whether a server with these URI SANs is one of `expected`: any match will do (features.md A.2).
pub(super) fn decide_server(expected: &[Identity], uris: &[String]) -> Result<Identity, PeerRefused> {
    let found = uris.iter().find_map(|u| u.parse::<Identity>().ok().filter(|id| expected.contains(id)));
    found.ok_or_else(|| PeerRefused::Identity { expected: expected.to_vec(), seen: uris.to_vec() })
}

impl Judge {
    /// For one of the trust domain `own`, whose bundle vouches while `trust` says nothing of it. The error is the bundle's fault.
    pub fn new(own: TrustDomain, bundle: &[CertificateDer<'_>], trust: TrustView) -> Result<Self, String> {
        Ok(Self { own, fallback: Arc::new(Anchors::of(bundle, &[])?), trust })
    }

    /// Who the peer of a finished handshake is. `expected`: of a server; `None`: any member.
    pub fn peer(
        &self,
        role: Role,
        expected: Option<&Arc<[Identity]>>,
        chain: Option<&[CertificateDer<'static>]>,
    ) -> Result<(Identity, Arc<PeerLeaf>), Error> {
        let members = || Expected::Members(self.own.clone());
        self.recall(role, &expected.map_or_else(members, |e| Expected::OneOf(e.clone())), chain)
    }

    /// A peer of a finished handshake as it stands from now on.
    pub fn standing(&self, leaf: Arc<PeerLeaf>) -> Standing {
        Standing::new(self.trust.clone(), leaf)
    }

    /// What vouches for `domain` now.
    fn anchors(&self, domain: &TrustDomain) -> Option<Arc<Anchors>> {
        let told = self.trust.current().anchors(domain).cloned();
        told.or_else(|| (*domain == self.own).then(|| self.fallback.clone()))
    }

    fn decide(&self, expected: &Expected, uris: &[String]) -> Result<Identity, PeerRefused> {
        match expected {
            Expected::Members(own) => decide_client(own, |td| self.anchors(td).is_some(), uris),
            Expected::OneOf(ids) => decide_server(ids, uris),
        }
    }

    /// Who the peer is, and what of its chain is kept. Signatures are looked at once per chain and trust.
    pub(super) fn judge(
        &self,
        role: Role,
        expected: &Expected,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(Identity, Arc<PeerLeaf>), Error> {
        let size = leaf.len() + above.iter().map(|c| c.len()).sum::<usize>();
        if above.len() >= CHAIN_CERTIFICATES_MAX {
            return Err(PeerRefused::ChainTooLong(above.len() + 1).error());
        }
        if size > CHAIN_BYTES_MAX {
            return Err(PeerRefused::ChainTooLarge(size).error());
        }
        // webpki's reading first: it is the one that the signatures are checked by.
        let parsed = EndEntityCert::try_from(leaf).map_err(of_webpki)?;
        let facts = facts(leaf)?;
        let identity = self.decide(expected, &facts.uris).map_err(PeerRefused::error)?;
        let refused = || PeerRefused::TrustDomain { expected: self.own.clone(), seen: facts.uris.clone() }.error();
        let anchors = self.anchors(&identity.trust_domain).ok_or_else(refused)?;
        let key = self.trust.shared.as_ref().map(|s| (s, ChainKey::of(leaf, above, anchors.number, role)));
        if let Some((shared, key)) = &key {
            let known = shared.cache.get(key, now);
            shared.cache.count(known.is_some());
            if let Some(known) = known {
                return Ok((identity, known.leaf.clone()));
            }
        }
        verify(&parsed, &anchors, above, role, now)?;
        let verified = Arc::new(verified(&identity, facts, leaf, above)?);
        let kept = verified.leaf.clone();
        if let Some((shared, key)) = key {
            shared.cache.put(key, verified);
        }
        Ok((identity, kept))
    }

    /// Who the peer of a finished handshake is: the verifier's verdict again, without looking at signatures.
    pub(super) fn recall(
        &self,
        role: Role,
        expected: &Expected,
        chain: Option<&[CertificateDer<'static>]>,
    ) -> Result<(Identity, Arc<PeerLeaf>), Error> {
        let Some([leaf, above @ ..]) = chain else { return Err(Error::NoCertificatesPresented) };
        if let Some(shared) = &self.trust.shared {
            for anchors in self.all() {
                if let Some(known) = shared.cache.get(&ChainKey::of(leaf, above, anchors.number, role), UnixTime::now()) {
                    let identity = self.decide(expected, &known.uris).map_err(PeerRefused::error)?;
                    return Ok((identity, known.leaf.clone()));
                }
            }
        }
        let facts = facts(leaf)?;
        let identity = self.decide(expected, &facts.uris).map_err(PeerRefused::error)?;
        Ok((identity.clone(), verified(&identity, facts, leaf, above)?.leaf))
    }

    /// The own domain's, which nearly every peer is of.
    fn all(&self) -> impl Iterator<Item = Arc<Anchors>> {
        self.anchors(&self.own).into_iter()
    }
}

fn verified(identity: &Identity, facts: Facts, leaf: &CertificateDer<'_>, above: &[CertificateDer<'_>]) -> Result<Verified, Error> {
    let mut life = facts.life;
    for c in above {
        let theirs = self::facts(c)?.life;
        life = (life.0.max(theirs.0), life.1.min(theirs.1));
    }
    let until = SystemTime::UNIX_EPOCH + Duration::from_secs(facts.life.1);
    let leaf = Arc::new(PeerLeaf::read(identity.trust_domain.clone(), leaf, above, until)?);
    Ok(Verified { uris: facts.uris, life, leaf })
}

#[cfg(test)]
pub(super) fn verified_for_test(identity: &Identity, leaf: &CertificateDer<'_>) -> Arc<Verified> {
    Arc::new(verified(identity, facts(leaf).unwrap(), leaf, &[]).unwrap())
}

/// Whether one of the roots vouches for the leaf, and no revocation list names any of the chain.
fn verify(leaf: &EndEntityCert<'_>, anchors: &Anchors, above: &[CertificateDer<'_>], role: Role, now: UnixTime) -> Result<(), Error> {
    let lists: Vec<_> = anchors.revoked.iter().collect();
    // A list that is out of date still says who was revoked, and one that is missing must not stop the mesh.
    let revocation = RevocationOptionsBuilder::new(&lists).ok().map(|b| {
        b.with_depth(RevocationCheckDepth::Chain)
            .with_status_policy(UnknownStatusPolicy::Allow)
            .with_expiration_policy(ExpirationPolicy::Ignore)
            .build()
    });
    let usage = match role {
        Role::Client => KeyUsage::client_auth(),
        Role::Server => KeyUsage::server_auth(),
    };
    let algorithms = provider().signature_verification_algorithms.all;
    leaf.verify_for_usage(algorithms, &anchors.roots, above, now, usage, revocation, None).map(drop).map_err(of_webpki)
}

/// Whether one of `anchors` vouches for `chain` (leaf first) as a server.
pub(super) fn chain(chain: &[CertificateDer<'_>], anchors: &Anchors, now: UnixTime) -> Result<(), Error> {
    let [leaf, above @ ..] = chain else { return Err(Error::NoCertificatesPresented) };
    verify(&EndEntityCert::try_from(leaf).map_err(of_webpki)?, anchors, above, Role::Server, now)
}

/// The words, and so the alerts, that TLS has for what webpki found; as rustls' own verifiers say it.
fn of_webpki(e: webpki::Error) -> Error {
    use webpki::Error as W;
    let purpose = |oids: Vec<usize>| match &*oids {
        KeyUsage::CLIENT_AUTH_REPR => ExtendedKeyPurpose::ClientAuth,
        KeyUsage::SERVER_AUTH_REPR => ExtendedKeyPurpose::ServerAuth,
        _ => ExtendedKeyPurpose::Other(oids),
    };
    Error::InvalidCertificate(match e {
        W::BadDer | W::BadDerTime | W::TrailingData(_) | W::InvalidSerialNumber | W::MalformedExtensions => CertificateError::BadEncoding,
        W::CertNotValidYet { time, not_before } => CertificateError::NotValidYetContext { time, not_before },
        W::CertExpired { time, not_after } => CertificateError::ExpiredContext { time, not_after },
        W::InvalidCertValidity => CertificateError::Expired,
        W::UnknownIssuer => CertificateError::UnknownIssuer,
        W::CertRevoked => CertificateError::Revoked,
        W::InvalidSignatureForPublicKey => CertificateError::BadSignature,
        W::RequiredEkuNotFoundContext(c) => CertificateError::InvalidPurposeContext {
            required: purpose(c.required.oid_values().collect()),
            presented: c.present.into_iter().map(purpose).collect(),
        },
        W::UnsupportedSignatureAlgorithmContext(c) => CertificateError::UnsupportedSignatureAlgorithmContext {
            signature_algorithm_id: c.signature_algorithm_id,
            supported_algorithms: c.supported_algorithms,
        },
        W::UnsupportedSignatureAlgorithmForPublicKeyContext(c) => CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext {
            signature_algorithm_id: c.signature_algorithm_id,
            public_key_algorithm_id: c.public_key_algorithm_id,
        },
        W::IssuerNotCrlSigner | W::InvalidCrlSignatureForPublicKey => return PeerRefused::RevocationList(format!("{e:?}")).error(),
        other => return PeerRefused::Chain(format!("{other:?}")).error(),
    })
}

/// Checks clients.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    judge: Judge,
    required: bool,
    expected: Expected,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ClientVerifier {
    pub(super) fn new(judge: Judge) -> Self {
        let expected = Expected::Members(judge.own.clone());
        Self { judge, required: true, expected, algorithms: provider().signature_verification_algorithms }
    }

    pub(super) fn required(mut self, required: bool) -> Self {
        self.required = required;
        self
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.required
    }
    /// No hints: the names of the roots would grow the handshake and tell strangers whose port this is.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }
    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.judge.judge(Role::Client, &self.expected, leaf, above, now)?;
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

/// Checks a server: the chain, and that it is one of those expected.
#[derive(Debug)]
pub(super) struct ServerVerifier {
    judge: Judge,
    expected: Expected,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerVerifier {
    pub(super) fn new(judge: Judge, expected: Arc<[Identity]>) -> Self {
        Self { judge, expected: Expected::OneOf(expected), algorithms: provider().signature_verification_algorithms }
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
        self.judge.judge(Role::Server, &self.expected, leaf, above, now)?;
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

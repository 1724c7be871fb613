//! The two sides of mesh mTLS as callers have them: who they are, whom they take, and the handshake, with a key held here or by a key
//! server. Nothing is obtained or renewed.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use canal_model::identity::{Identity, Peer};
use canal_model::ids::TenantName;
use canal_wire::hbone::ALPN;
use rustls_pki_types::ServerName;
use tokio::time::Instant;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::certificate::{Certificate, Credential};
use super::config::ClientTemplate;
use super::record::{HandOver, RecordStream, Secrets, Side, hand_over};
use super::refusal::{Refusal, TlsError};
use super::stream::{Inner, Rewound, Stream, Transport};
use super::trust::{Standing, TrustView};
use super::verify::{Expected, Judge, Role};
use super::{FIRST_PATIENCE, HANDSHAKE_TIMEOUT, config};
use crate::keys::{self, KeyError, Requester, Shaken, Terms};

/// A connection whose handshake a key server did takes no new streams after this: by then the key server has another certificate.
pub const REMOTE_PROOF_LIFE: Duration = Duration::from_secs(6 * 3600);

/// Where the own key is.
#[derive(Debug, Clone)]
enum Own {
    Here(Credential),
    /// In a key server. Without a requester there is none to ask.
    There(Arc<There>),
}

#[derive(Debug)]
struct There {
    identity: Identity,
    requester: Option<Requester>,
    /// For the time when no key server answers, where policy allows it.
    fallback: Option<Credential>,
}

impl Own {
    fn there(identity: Identity, requester: Option<Requester>, fallback: Option<Credential>) -> Self {
        Own::There(Arc::new(There { identity, requester, fallback }))
    }

    fn identity(&self) -> &Identity {
        match self {
            Own::Here(credential) => credential.identity(),
            Own::There(there) => &there.identity,
        }
    }
}

impl There {
    fn requester(&self) -> Result<&Requester, TlsError> {
        let none = || TlsError::KeyServer(KeyError::NoKeyServer("this process has no --key-server".into()));
        self.requester.as_ref().ok_or_else(none)
    }

    fn terms(&self, expected: &Arc<[Identity]>) -> Terms {
        Terms { identity: self.identity.clone(), alpn: ALPN, expected: expected.clone() }
    }

    /// The local key to go on with, if no key server answered and there may be one.
    fn fall_back(&self, why: &TlsError) -> Option<&Credential> {
        let nobody = matches!(why, TlsError::KeyServer(KeyError::NoKeyServer(_)));
        let credential = self.fallback.as_ref().filter(|_| nobody)?;
        if let Some(requester) = &self.requester {
            requester.fell_back();
        }
        Some(credential)
    }
}

/// The accepting side: one tenant, one identity, always with the current certificate.
#[derive(Debug, Clone)]
pub struct ServerIdentity {
    tenant: TenantName,
    own: Own,
    trust: TrustView,
    made: Arc<ArcSwapOption<Made<Arc<rustls::ServerConfig>>>>,
}

/// What was made once for a certificate, and that certificate. A newest trust needs nothing anew: judges look at it with each handshake.
#[derive(Debug)]
struct Made<T> {
    certificate: Arc<Certificate>,
    config: T,
}

/// The connecting side: one identity, always with the current certificate.
#[derive(Debug, Clone)]
pub struct ClientIdentity {
    own: Own,
    calls: Calls,
}

/// What all handshakes of a connecting side go by.
#[derive(Debug, Clone)]
struct Calls {
    trust: TrustView,
    made: Arc<ArcSwapOption<Made<ClientTemplate>>>,
}

impl ServerIdentity {
    /// `tenant` is the owner of the credential's trust domain. Peers are verified with the bundle that came with the certificate:
    /// [`ServerIdentity::trusting`] gives the newest.
    pub fn new(tenant: TenantName, credential: Credential) -> Self {
        Self { tenant, own: Own::Here(credential), trust: TrustView::untold(), made: Arc::default() }
    }

    /// One whose key is in key servers, which shake hands for it. [`crate::keys::Keyring::pair`] chooses.
    pub fn remote(tenant: TenantName, identity: Identity, requester: Option<Requester>, fallback: Option<Credential>) -> Self {
        Self { tenant, own: Own::there(identity, requester, fallback), trust: TrustView::untold(), made: Arc::default() }
    }

    /// Verifies with the newest trust of `tenant`.
    pub fn trusting(mut self, trust: TrustView) -> Self {
        (self.trust, self.made) = (trust, Arc::default());
        self
    }

    /// Who it is.
    pub fn identity(&self) -> &Identity {
        self.own.identity()
    }

    /// Handshake as the server. The peer must prove a certificate that chains to the newest trust of its trust domain, which is the own or
    /// a federated one; who may do what is the caller's business, for foreigners above all. Waits for the own first certificate. Fails after
    /// [`HANDSHAKE_TIMEOUT`].
    pub async fn accept<IO: Transport>(&self, io: IO) -> Result<(Stream<IO>, Peer), TlsError> {
        let accepted = in_time(async {
            match &self.own {
                Own::Here(credential) => self.greet(credential, Rewound::new(Vec::new(), io)).await,
                Own::There(there) => self.have_greeted(there, io).await,
            }
        });
        counted(&self.trust, "server", accepted.await)
    }

    async fn greet<IO: Transport>(&self, credential: &Credential, io: Rewound<IO>) -> Result<(Stream<IO>, Peer), TlsError> {
        begun(credential).await;
        let own = usable(credential)?;
        let judge = judge(&own, &self.trust);
        let expected = Expected::Members(judge.own.clone());
        let stream = TlsAcceptor::from(self.config(&own, &judge)?).accept(io).await?;
        let (identity, leaf) = judge.recall(Role::Client, &expected, stream.get_ref().1.peer_certificates())?;
        let stream = Stream::new(Inner::Server(Box::new(stream)), Standing::new(self.trust.clone(), leaf));
        Ok((stream, Peer { tenant: self.tenant.clone(), identity }))
    }

    /// By a key server.
    async fn have_greeted<IO: Transport>(&self, there: &There, mut io: IO) -> Result<(Stream<IO>, Peer), TlsError> {
        let mut given = Vec::new();
        let shaken = match there.requester() {
            Ok(requester) => keys::as_server(&mut io, requester, &there.terms(&Arc::from([])), &mut given).await,
            Err(none) => Err(none),
        };
        match shaken {
            Ok(shaken) => {
                let identity = shaken.peer.clone();
                let stream = remote(io, shaken, Side::Server, &self.trust)?;
                Ok((stream, Peer { tenant: self.tenant.clone(), identity }))
            }
            Err(e) => match there.fall_back(&e) {
                // Nothing was said to the peer yet: what it said is read again.
                Some(credential) => self.greet(credential, Rewound::new(given, io)).await,
                None => {
                    if matches!(e, TlsError::KeyServer(KeyError::Peer(_))) {
                        keys::turn_away(&mut io).await;
                    }
                    Err(e)
                }
            },
        }
    }

    /// Made once per certificate.
    fn config(&self, own: &Arc<Certificate>, judge: &Judge) -> Result<Arc<rustls::ServerConfig>, TlsError> {
        if let Some(made) = &*self.made.load()
            && Arc::ptr_eq(&made.certificate, own)
        {
            return Ok(made.config.clone());
        }
        let config = Arc::new(config::server(own.signing().clone(), judge.clone(), &config::mesh_alpn())?);
        self.made.store(Some(Arc::new(Made { certificate: own.clone(), config: config.clone() })));
        Ok(config)
    }
}

impl ClientIdentity {
    /// A client that proves `credential`, and verifies with the bundle that came with it.
    pub fn new(credential: Credential) -> Self {
        Self { own: Own::Here(credential), calls: Calls::by(TrustView::untold()) }
    }

    /// One whose key is in key servers, which shake hands for it. [`crate::keys::Keyring::pair`] chooses.
    pub fn remote(identity: Identity, requester: Option<Requester>, fallback: Option<Credential>) -> Self {
        Self { own: Own::there(identity, requester, fallback), calls: Calls::by(TrustView::untold()) }
    }

    /// Verifies with the newest trust of the identity's tenant.
    pub fn trusting(mut self, trust: TrustView) -> Self {
        self.calls = Calls::by(trust);
        self
    }

    /// Who it is.
    pub fn identity(&self) -> &Identity {
        self.own.identity()
    }

    /// Waits for its first certificate, if none came yet, for [`FIRST_PATIENCE`] at most.
    pub async fn begun(&self) {
        if let Own::Here(credential) = &self.own {
            begun(credential).await;
        }
    }

    /// This identity with the certificate it has now, so that a caller knows which one a handshake proved.
    pub fn pinned(&self) -> Result<PinnedIdentity, TlsError> {
        let proof = match &self.own {
            Own::Here(credential) => Proof(Proven::Here(usable(credential)?)),
            Own::There(there) => Proof(Proven::There(there.clone(), Instant::now())),
        };
        Ok(PinnedIdentity { proof, calls: self.calls.clone() })
    }

    /// What a handshake would prove now, valid or not.
    pub fn proof(&self) -> Result<Proof, TlsError> {
        match &self.own {
            Own::Here(credential) => {
                let missing = || TlsError::NoCertificate(credential.identity().clone());
                credential.current().map(|c| Proof(Proven::Here(c))).ok_or_else(missing)
            }
            Own::There(there) => Ok(Proof(Proven::There(there.clone(), Instant::now()))),
        }
    }

    /// [`ClientIdentity::pinned`], then [`PinnedIdentity::connect`].
    pub async fn connect<IO: Transport>(&self, io: IO, expected: &Arc<[Identity]>) -> Result<(Stream<IO>, Identity), TlsError> {
        self.pinned()?.connect(io, expected).await
    }
}

/// What a client proves itself with: while two are the same, so is what a peer saw.
#[derive(Debug, Clone)]
pub struct Proof(Proven);

#[derive(Debug, Clone)]
enum Proven {
    Here(Arc<Certificate>),
    /// By a key server, at that time.
    There(Arc<There>, Instant),
}

impl Proof {
    /// Whether a handshake with one is as good as with the other.
    pub fn same(&self, other: &Proof) -> bool {
        match (&self.0, &other.0) {
            (Proven::Here(a), Proven::Here(b)) => Arc::ptr_eq(a, b),
            (Proven::There(_, a), Proven::There(_, b)) => a.max(b).duration_since(*a.min(b)) < REMOTE_PROOF_LIFE,
            _ => false,
        }
    }
}

/// A client with one certificate.
#[derive(Debug, Clone)]
pub struct PinnedIdentity {
    proof: Proof,
    calls: Calls,
}

impl PinnedIdentity {
    /// What it proves.
    pub fn proof(&self) -> &Proof {
        &self.proof
    }

    /// Handshake as the client. The peer must chain to the newest trust and hold any one of `expected`, of which it returns the
    /// one seen. DNS names are ignored. A refusal by the server shows only at the first read (TLS 1.3, RFC 8446 §4.4).
    pub async fn connect<IO: Transport>(&self, io: IO, expected: &Arc<[Identity]>) -> Result<(Stream<IO>, Identity), TlsError> {
        let connected = in_time(async {
            match &self.proof.0 {
                Proven::Here(own) => self.calls.greet(own, io, expected).await,
                Proven::There(there, _) => self.have_greeted(there, io, expected).await,
            }
        });
        counted(&self.calls.trust, "client", connected.await)
    }

    /// By a key server.
    async fn have_greeted<IO: Transport>(
        &self,
        there: &There,
        mut io: IO,
        expected: &Arc<[Identity]>,
    ) -> Result<(Stream<IO>, Identity), TlsError> {
        let shaken = match there.requester() {
            Ok(requester) => keys::as_client(&mut io, requester, &there.terms(expected)).await,
            Err(none) => Err(none),
        };
        match shaken {
            Ok(shaken) => {
                let identity = shaken.peer.clone();
                Ok((remote(io, shaken, Side::Client, &self.calls.trust)?, identity))
            }
            Err(e) => match there.fall_back(&e) {
                Some(credential) => self.calls.greet(&usable(credential)?, io, expected).await,
                None => Err(e),
            },
        }
    }
}

impl Calls {
    fn by(trust: TrustView) -> Self {
        Self { trust, made: Arc::default() }
    }

    /// With a key that is here.
    async fn greet<IO: Transport>(
        &self,
        own: &Arc<Certificate>,
        io: IO,
        expected: &Arc<[Identity]>,
    ) -> Result<(Stream<IO>, Identity), TlsError> {
        let judge = judge(own, &self.trust);
        // Never sent (SNI is off) nor compared (DNS is ignored), as in ztunnel.
        let no_name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
        let stream = TlsConnector::from(self.config(own, &judge, expected)?).connect(no_name, io).await?;
        let chain = stream.get_ref().1.peer_certificates();
        let (identity, leaf) = judge.recall(Role::Server, &Expected::OneOf(expected.clone()), chain)?;
        Ok((Stream::new(Inner::Client(Box::new(stream)), Standing::new(self.trust.clone(), leaf)), identity))
    }

    /// Made once per certificate, but for whom it takes.
    fn config(&self, own: &Arc<Certificate>, judge: &Judge, expected: &Arc<[Identity]>) -> Result<Arc<rustls::ClientConfig>, TlsError> {
        if let Some(made) = &*self.made.load()
            && Arc::ptr_eq(&made.certificate, own)
        {
            return Ok(made.config.towards(expected));
        }
        let template = ClientTemplate::new(own.signing().clone(), judge.clone(), expected.clone(), &config::mesh_alpn(), None)?;
        let config = template.towards(expected);
        self.made.store(Some(Arc::new(Made { certificate: own.clone(), config: template })));
        Ok(config)
    }
}

/// The connection whose handshake a key server did.
fn remote<IO: Transport>(io: IO, shaken: Shaken, side: Side, trust: &TrustView) -> Result<Stream<IO>, TlsError> {
    // The key server may not have heard yet.
    if trust.current().judge(&shaken.leaf).is_some() {
        return Err(TlsError::Protocol(rustls::Error::InvalidCertificate(rustls::CertificateError::Revoked)));
    }
    let secrets = Secrets { suite: shaken.suite, side, client: &shaken.client_traffic, server: &shaken.server_traffic };
    let inner = match by_kernel(io, &secrets, &shaken.early, trust)? {
        HandOver::Done(stream) => Inner::Kernel(stream, shaken.alpn),
        HandOver::Not(io, _) => {
            let failed = |e| TlsError::Io(io::Error::new(io::ErrorKind::InvalidData, e));
            Inner::Remote(Box::new(RecordStream::new(io, &secrets, &shaken.early).map_err(failed)?), shaken.alpn)
        }
    };
    Ok(Stream::new(inner, Standing::new(trust.clone(), shaken.leaf)))
}

/// Tries to hand the records to the kernel, if it has TLS.
fn by_kernel<IO: Transport>(io: IO, secrets: &Secrets<'_>, early: &[u8], trust: &TrustView) -> Result<HandOver<IO>, TlsError> {
    let Some(shared) = trust.shared.as_ref().filter(|shared| shared.kernel_tls && io.tcp().is_some()) else {
        return Ok(HandOver::Not(io, "unavailable"));
    };
    let tried = hand_over(io, secrets, early);
    shared.handed_over(match &tried {
        Ok(HandOver::Done(_)) => "kernel",
        Ok(HandOver::Not(_, why)) => why,
        Err(_) => "lost",
    });
    tried.map_err(TlsError::Io)
}

fn judge(own: &Certificate, trust: &TrustView) -> Judge {
    Judge { own: own.identity().trust_domain.clone(), fallback: own.anchors().clone(), trust: trust.clone() }
}

#[cfg(test)]
impl ClientIdentity {
    /// What the next handshake with one of `expected` would go by.
    pub(super) fn config(&self, expected: &Arc<[Identity]>) -> Arc<rustls::ClientConfig> {
        let Own::Here(credential) = &self.own else { panic!("its key is elsewhere") };
        let own = usable(credential).unwrap();
        self.calls.config(&own, &judge(&own, &self.calls.trust), expected).unwrap()
    }
}

fn counted<T>(trust: &TrustView, side: &'static str, done: Result<T, TlsError>) -> Result<T, TlsError> {
    if let (Err(e), Some(shared)) = (&done, &trust.shared) {
        let why: Refusal = e.refusal();
        shared.refused(side, why);
    }
    done
}

/// Waits for an identity's first certificate: a process serves before all have come.
async fn begun(credential: &Credential) {
    if !credential.has_begun() {
        // What has not come by then is missing.
        let _ = tokio::time::timeout(FIRST_PATIENCE, credential.first()).await;
    }
}

pub(super) fn usable(credential: &Credential) -> Result<Arc<Certificate>, TlsError> {
    let missing = || TlsError::NoCertificate(credential.identity().clone());
    credential.current().filter(|c| c.valid_at(SystemTime::now())).ok_or_else(missing)
}

pub(super) async fn in_time<T>(handshake: impl Future<Output = Result<T, TlsError>>) -> Result<T, TlsError> {
    tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await.unwrap_or(Err(TlsError::Timeout(HANDSHAKE_TIMEOUT)))
}

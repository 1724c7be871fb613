//! The two sides of mesh mTLS: their identity, the peers they accept, and the handshake, with a
//! local key or with one in a key server. Certificates are neither obtained nor renewed here. Start
//! with [`ServerIdentity::accept`] and [`ClientIdentity::connect`].

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use canal_keyserver_client::{KeyClient, RemoteHandshakeParams};
use canal_model::identity::{Identity, VerifiedPeer};
use canal_model::ids::TenantName;
use canal_tls::{
    Certificate, ClientTemplate, Credential, EndpointRole, FIRST_CERTIFICATE_TIMEOUT,
    HANDSHAKE_TIMEOUT, KeyServerError, MtlsStream, PeerRole, PeerTrustWatch, PeerVerifier,
    PrefixedStream, TlsError, Transport, TrustView, mesh_alpn, server_config,
};
use canal_wire::hbone::ALPN;
use rustls_pki_types::ServerName;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Time after which a connection with a remote handshake takes no new streams, because the key
/// server has another certificate by then. A certificate of 24 h is renewed after 12 h; this is
/// half of that.
pub const REMOTE_PROOF_LIFE: Duration = Duration::from_secs(6 * 3600);

/// Location of this side's key.
#[derive(Debug, Clone)]
enum KeySource {
    Local(Credential),
    /// The key is in a key server. Without a requester, there is no server to request it from.
    Remote(Arc<RemoteKeySource>),
}

#[derive(Debug)]
struct RemoteKeySource {
    identity: Identity,
    requester: Option<KeyClient>,
    /// Local credential for the time when no key server answers, if the policy permits it.
    fallback: Option<Credential>,
}

impl KeySource {
    fn remote(
        identity: Identity,
        requester: Option<KeyClient>,
        fallback: Option<Credential>,
    ) -> Self {
        KeySource::Remote(Arc::new(RemoteKeySource {
            identity,
            requester,
            fallback,
        }))
    }

    fn identity(&self) -> &Identity {
        match self {
            KeySource::Local(credential) => credential.identity(),
            KeySource::Remote(remote) => &remote.identity,
        }
    }
}

impl RemoteKeySource {
    fn requester(&self) -> Result<&KeyClient, TlsError> {
        let none = || {
            TlsError::KeyServer(KeyServerError::NoKeyServer(
                "this process has no --key-server".into(),
            ))
        };
        self.requester.as_ref().ok_or_else(none)
    }

    fn terms(&self, expected: &Arc<[Identity]>) -> RemoteHandshakeParams {
        RemoteHandshakeParams {
            identity: self.identity.clone(),
            alpn: ALPN,
            expected: expected.clone(),
        }
    }

    /// Returns the local key to continue with, if no key server answered and the policy permits a
    /// local key.
    fn fall_back(&self, why: &TlsError) -> Option<&Credential> {
        let no_key_server_answered =
            matches!(why, TlsError::KeyServer(KeyServerError::NoKeyServer(_)));
        let credential = self.fallback.as_ref().filter(|_| no_key_server_answered)?;
        if let Some(requester) = &self.requester {
            requester.record_fallback();
        }
        Some(credential)
    }
}

/// Accepting side: one tenant and one identity, always with the current certificate.
#[derive(Debug, Clone)]
pub struct ServerIdentity {
    tenant: TenantName,
    own: KeySource,
    trust: TrustView,
    cached: Arc<ArcSwapOption<CachedConfig<Arc<rustls::ServerConfig>>>>,
}

/// A configuration and the certificate for which it was built. New trust needs no new
/// configuration, because verifiers read the trust at each handshake.
#[derive(Debug)]
struct CachedConfig<T> {
    certificate: Arc<Certificate>,
    config: T,
}

/// Connecting side: one identity, always with the current certificate.
#[derive(Debug, Clone)]
pub struct ClientIdentity {
    own: KeySource,
    calls: ClientHandshakeContext,
}

/// State that all handshakes of a connecting side share.
#[derive(Debug, Clone)]
struct ClientHandshakeContext {
    trust: TrustView,
    cached: Arc<ArcSwapOption<CachedConfig<ClientTemplate>>>,
}

impl ServerIdentity {
    /// Creates an identity; `tenant` is the owner of the credential's trust domain. Peers are
    /// verified with the bundle of the certificate. [`ServerIdentity::trusting`] sets the newest
    /// trust.
    pub fn new(tenant: TenantName, credential: Credential) -> Self {
        Self {
            tenant,
            own: KeySource::Local(credential),
            trust: TrustView::without_bundles(),
            cached: Arc::default(),
        }
    }

    /// Creates an identity whose key is in key servers, which perform its handshakes.
    /// [`crate::ClientIdentityFactory::pair`] selects between the two.
    pub fn remote(
        tenant: TenantName,
        identity: Identity,
        requester: Option<KeyClient>,
        fallback: Option<Credential>,
    ) -> Self {
        Self {
            tenant,
            own: KeySource::remote(identity, requester, fallback),
            trust: TrustView::without_bundles(),
            cached: Arc::default(),
        }
    }

    /// Sets the trust view of `tenant`. Peers are verified with its newest snapshot.
    pub fn trusting(mut self, trust: TrustView) -> Self {
        (self.trust, self.cached) = (trust, Arc::default());
        self
    }

    /// Returns the identity of this side.
    pub fn identity(&self) -> &Identity {
        self.own.identity()
    }

    /// Performs the handshake as the server. The peer must present a certificate that chains to the
    /// newest trust of its trust domain, which is this side's or a federated one. Authorization is
    /// up to the caller, above all for federated peers. The call waits for this side's first
    /// certificate.
    ///
    /// # Errors
    /// The handshake fails, this side has no certificate or key server, or [`HANDSHAKE_TIMEOUT`]
    /// passes.
    pub async fn accept<IO: Transport>(
        &self,
        io: IO,
    ) -> Result<(MtlsStream<IO>, VerifiedPeer), TlsError> {
        self.accept_noting_hello(io, || {}).await
    }

    /// Performs the handshake like [`ServerIdentity::accept`], and calls `on_hello` when the peer's
    /// ClientHello is complete.
    ///
    /// # Errors
    /// The errors are those of [`ServerIdentity::accept`].
    pub async fn accept_noting_hello<IO: Transport>(
        &self,
        io: IO,
        on_hello: impl Fn(),
    ) -> Result<(MtlsStream<IO>, VerifiedPeer), TlsError> {
        let accepted = in_time(async {
            match &self.own {
                KeySource::Local(credential) => {
                    self.handshake(credential, PrefixedStream::new(Vec::new(), io), &on_hello)
                        .await
                }
                KeySource::Remote(remote) => {
                    self.handshake_with_remote_key(remote, io, &on_hello).await
                }
            }
        });
        counted(&self.trust, "server", accepted.await)
    }

    async fn handshake<IO: Transport>(
        &self,
        credential: &Credential,
        io: PrefixedStream<IO>,
        on_hello: impl Fn(),
    ) -> Result<(MtlsStream<IO>, VerifiedPeer), TlsError> {
        begun(credential).await;
        let own = usable(credential)?;
        let verifier = peer_verifier(&own, &self.trust);
        let stream = accept_tls(
            &TlsAcceptor::from(self.config(&own, &verifier)?),
            io,
            on_hello,
        )
        .await?;
        let (identity, leaf) = verifier.peer(
            PeerRole::Client,
            None,
            stream.get_ref().1.peer_certificates(),
        )?;
        let stream = MtlsStream::of_server(stream, PeerTrustWatch::new(self.trust.clone(), leaf));
        Ok((
            stream,
            VerifiedPeer {
                tenant: self.tenant.clone(),
                identity,
            },
        ))
    }

    /// Performs the handshake with a key server.
    async fn handshake_with_remote_key<IO: Transport>(
        &self,
        remote: &RemoteKeySource,
        mut io: IO,
        on_hello: impl Fn(),
    ) -> Result<(MtlsStream<IO>, VerifiedPeer), TlsError> {
        let mut received = Vec::new();
        let outcome = match remote.requester() {
            Ok(requester) => {
                // A server expects no particular client: policies decide after the handshake.
                let terms = remote.terms(&Arc::from([]));
                canal_keyserver_client::as_server(
                    &mut io,
                    requester,
                    &terms,
                    &mut received,
                    &on_hello,
                )
                .await
            }
            Err(no_key_server) => Err(no_key_server),
        };
        match outcome {
            Ok(result) => {
                let identity = result.peer.clone();
                let stream = MtlsStream::of_remote(io, result, EndpointRole::Server, &self.trust)?;
                Ok((
                    stream,
                    VerifiedPeer {
                        tenant: self.tenant.clone(),
                        identity,
                    },
                ))
            }
            Err(e) => match remote.fall_back(&e) {
                // Nothing was sent to the peer yet, so the local handshake reads the same bytes
                // again.
                Some(credential) => {
                    self.handshake(credential, PrefixedStream::new(received, io), on_hello)
                        .await
                }
                None => {
                    // These bytes reached no key server, so the alert is sent from here. `TooMuch`
                    // may follow the key server's ServerHello. From there on an alert must be
                    // encrypted, with keys that this process does not have (RFC 8446 §6).
                    if matches!(e, TlsError::KeyServer(KeyServerError::Peer(_))) {
                        canal_keyserver_client::turn_away(&mut io).await;
                    }
                    Err(e)
                }
            },
        }
    }

    /// Returns the rustls configuration, which is built once per certificate.
    fn config(
        &self,
        own: &Arc<Certificate>,
        verifier: &PeerVerifier,
    ) -> Result<Arc<rustls::ServerConfig>, TlsError> {
        if let Some(made) = &*self.cached.load()
            && Arc::ptr_eq(&made.certificate, own)
        {
            return Ok(made.config.clone());
        }
        let config = Arc::new(server_config(
            own.signing().clone(),
            verifier.clone(),
            &mesh_alpn(),
        )?);
        self.cached.store(Some(Arc::new(CachedConfig {
            certificate: own.clone(),
            config: config.clone(),
        })));
        Ok(config)
    }
}

impl ClientIdentity {
    /// Creates a client that presents `credential`, and verifies peers with the bundle of that
    /// certificate.
    pub fn new(credential: Credential) -> Self {
        Self {
            own: KeySource::Local(credential),
            calls: ClientHandshakeContext::by(TrustView::without_bundles()),
        }
    }

    /// Creates an identity whose key is in key servers, which perform its handshakes.
    /// [`crate::ClientIdentityFactory::pair`] selects between the two.
    pub fn remote(
        identity: Identity,
        requester: Option<KeyClient>,
        fallback: Option<Credential>,
    ) -> Self {
        Self {
            own: KeySource::remote(identity, requester, fallback),
            calls: ClientHandshakeContext::by(TrustView::without_bundles()),
        }
    }

    /// Sets the trust view of the identity's tenant. Peers are verified with its newest snapshot.
    pub fn trusting(mut self, trust: TrustView) -> Self {
        self.calls = ClientHandshakeContext::by(trust);
        self
    }

    /// Returns the identity of this side.
    pub fn identity(&self) -> &Identity {
        self.own.identity()
    }

    /// Waits for the first certificate if there is none yet, for at most
    /// [`FIRST_CERTIFICATE_TIMEOUT`].
    pub async fn wait_for_first_certificate(&self) {
        if let KeySource::Local(credential) = &self.own {
            begun(credential).await;
        }
    }

    /// Returns this identity with its present certificate, so that the caller knows which one a
    /// handshake presented.
    ///
    /// # Errors
    /// There is no valid certificate.
    pub fn pinned(&self) -> Result<PinnedIdentity, TlsError> {
        let proof = match &self.own {
            KeySource::Local(credential) => {
                CredentialId(CredentialIdKind::Local(usable(credential)?))
            }
            KeySource::Remote(remote) => {
                CredentialId(CredentialIdKind::Remote(remote.clone(), Instant::now()))
            }
        };
        Ok(PinnedIdentity {
            proof,
            calls: self.calls.clone(),
        })
    }

    /// Returns the credential that a handshake would present now, valid or not.
    ///
    /// # Errors
    /// There is no certificate.
    pub fn proof(&self) -> Result<CredentialId, TlsError> {
        match &self.own {
            KeySource::Local(credential) => {
                let missing = || TlsError::NoCertificate(credential.identity().clone());
                credential
                    .current()
                    .map(|c| CredentialId(CredentialIdKind::Local(c)))
                    .ok_or_else(missing)
            }
            KeySource::Remote(remote) => Ok(CredentialId(CredentialIdKind::Remote(
                remote.clone(),
                Instant::now(),
            ))),
        }
    }

    /// Calls [`ClientIdentity::pinned`] and then [`PinnedIdentity::connect`].
    ///
    /// # Errors
    /// The errors are those of the two functions.
    pub async fn connect<IO: Transport>(
        &self,
        io: IO,
        expected: &Arc<[Identity]>,
    ) -> Result<(MtlsStream<IO>, Identity), TlsError> {
        self.pinned()?.connect(io, expected).await
    }
}

/// Identifies the credential that a client presents: while it is the same, peers see the same
/// certificate.
#[derive(Debug, Clone)]
pub struct CredentialId(CredentialIdKind);

#[derive(Debug, Clone)]
enum CredentialIdKind {
    Local(Arc<Certificate>),
    /// A key server's credential, at that time.
    Remote(Arc<RemoteKeySource>, Instant),
}

impl CredentialId {
    /// Returns whether handshakes with the two are equivalent.
    pub fn same(&self, other: &CredentialId) -> bool {
        match (&self.0, &other.0) {
            (CredentialIdKind::Local(a), CredentialIdKind::Local(b)) => Arc::ptr_eq(a, b),
            (CredentialIdKind::Remote(_, a), CredentialIdKind::Remote(_, b)) => {
                a.max(b).duration_since(*a.min(b)) < REMOTE_PROOF_LIFE
            }
            _ => false,
        }
    }
}

/// A client with one fixed certificate.
#[derive(Debug, Clone)]
pub struct PinnedIdentity {
    proof: CredentialId,
    calls: ClientHandshakeContext,
}

impl PinnedIdentity {
    /// Returns the credential that it presents.
    pub fn proof(&self) -> &CredentialId {
        &self.proof
    }

    /// Performs the handshake as the client. The peer must chain to the newest trust and have one
    /// of `expected`, which is returned. DNS names are ignored. A refusal by the server shows only
    /// at the first read (TLS 1.3, RFC 8446 §4.4).
    ///
    /// # Errors
    /// The handshake fails, the peer is not expected, or [`HANDSHAKE_TIMEOUT`] passes.
    pub async fn connect<IO: Transport>(
        &self,
        io: IO,
        expected: &Arc<[Identity]>,
    ) -> Result<(MtlsStream<IO>, Identity), TlsError> {
        let connected = in_time(async {
            match &self.proof.0 {
                CredentialIdKind::Local(own) => {
                    self.calls.handshake_with_local_key(own, io, expected).await
                }
                CredentialIdKind::Remote(remote, _) => {
                    self.handshake_with_remote_key(remote, io, expected).await
                }
            }
        });
        counted(&self.calls.trust, "client", connected.await)
    }

    /// Performs the handshake with a key server.
    async fn handshake_with_remote_key<IO: Transport>(
        &self,
        remote: &RemoteKeySource,
        mut io: IO,
        expected: &Arc<[Identity]>,
    ) -> Result<(MtlsStream<IO>, Identity), TlsError> {
        let outcome = match remote.requester() {
            Ok(requester) => {
                canal_keyserver_client::as_client(&mut io, requester, &remote.terms(expected)).await
            }
            Err(no_key_server) => Err(no_key_server),
        };
        match outcome {
            Ok(result) => {
                let identity = result.peer.clone();
                Ok((
                    MtlsStream::of_remote(io, result, EndpointRole::Client, &self.calls.trust)?,
                    identity,
                ))
            }
            Err(e) => match remote.fall_back(&e) {
                // No key server has answered, so nothing was sent to the peer.
                Some(credential) => {
                    self.calls
                        .handshake_with_local_key(&usable(credential)?, io, expected)
                        .await
                }
                None => Err(e),
            },
        }
    }
}

impl ClientHandshakeContext {
    fn by(trust: TrustView) -> Self {
        Self {
            trust,
            cached: Arc::default(),
        }
    }

    /// Performs the handshake with a local key.
    async fn handshake_with_local_key<IO: Transport>(
        &self,
        own: &Arc<Certificate>,
        io: IO,
        expected: &Arc<[Identity]>,
    ) -> Result<(MtlsStream<IO>, Identity), TlsError> {
        let verifier = peer_verifier(own, &self.trust);
        // The name is neither sent (SNI is off) nor compared (DNS is ignored), as in ztunnel.
        let no_name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
        let stream = TlsConnector::from(self.config(own, &verifier, expected)?)
            .connect(no_name, io)
            .await?;
        let chain = stream.get_ref().1.peer_certificates();
        let (identity, leaf) = verifier.peer(PeerRole::Server, Some(expected), chain)?;
        Ok((
            MtlsStream::of_client(stream, PeerTrustWatch::new(self.trust.clone(), leaf)),
            identity,
        ))
    }

    /// Returns the rustls configuration. It is built once per certificate, except for the expected
    /// peers.
    fn config(
        &self,
        own: &Arc<Certificate>,
        verifier: &PeerVerifier,
        expected: &Arc<[Identity]>,
    ) -> Result<Arc<rustls::ClientConfig>, TlsError> {
        if let Some(made) = &*self.cached.load()
            && Arc::ptr_eq(&made.certificate, own)
        {
            return Ok(made.config.towards(expected));
        }
        let template = ClientTemplate::new(
            own.signing().clone(),
            verifier.clone(),
            expected.clone(),
            &mesh_alpn(),
            None,
        )?;
        let config = template.towards(expected);
        self.cached.store(Some(Arc::new(CachedConfig {
            certificate: own.clone(),
            config: template,
        })));
        Ok(config)
    }
}

fn peer_verifier(own: &Certificate, trust: &TrustView) -> PeerVerifier {
    own.verifier(own.identity().trust_domain.clone(), trust.clone())
}

#[cfg(test)]
impl ClientIdentity {
    /// Returns the configuration of the next handshake with one of `expected`.
    pub(super) fn config(&self, expected: &Arc<[Identity]>) -> Arc<rustls::ClientConfig> {
        let KeySource::Local(credential) = &self.own else {
            panic!("its key is in a key server")
        };
        let own = usable(credential).unwrap();
        self.calls
            .config(&own, &peer_verifier(&own, &self.calls.trust), expected)
            .unwrap()
    }
}

/// Performs the server's handshake and calls `on_hello` when the ClientHello is complete: the
/// server writes nothing before that. An alert about a broken ClientHello counts too, because the
/// handshake ends with it.
async fn accept_tls<IO: Transport>(
    acceptor: &TlsAcceptor,
    io: PrefixedStream<IO>,
    on_hello: impl Fn(),
) -> io::Result<TlsStream<PrefixedStream<IO>>> {
    let mut accepting = acceptor.accept(io);
    let mut has_hello = false;
    poll_fn(|cx| {
        let polled = Pin::new(&mut accepting).poll(cx);
        if !has_hello && accepting.get_ref().is_some_and(PrefixedStream::has_written) {
            has_hello = true;
            on_hello();
        }
        polled
    })
    .await
}

fn counted<T>(
    trust: &TrustView,
    side: &'static str,
    done: Result<T, TlsError>,
) -> Result<T, TlsError> {
    if let Err(e) = &done {
        trust.record_failure(side, e.refusal());
    }
    done
}

/// Waits for an identity's first certificate, because a process starts to serve before all have
/// arrived.
async fn begun(credential: &Credential) {
    if !credential.has_begun() {
        // A certificate that has not arrived by then counts as missing.
        let _ = tokio::time::timeout(FIRST_CERTIFICATE_TIMEOUT, credential.first()).await;
    }
}

pub(super) fn usable(credential: &Credential) -> Result<Arc<Certificate>, TlsError> {
    let missing = || TlsError::NoCertificate(credential.identity().clone());
    credential
        .current()
        .filter(|c| c.valid_at(SystemTime::now()))
        .ok_or_else(missing)
}

pub(super) async fn in_time<T>(
    handshake: impl Future<Output = Result<T, TlsError>>,
) -> Result<T, TlsError> {
    tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake)
        .await
        .unwrap_or(Err(TlsError::Timeout(HANDSHAKE_TIMEOUT)))
}

//! TLS termination for clients without a node proxy: a certificate with a service's host names,
//! with a local or remote key. Client certificates may be absent, optional or required. The callers
//! select the service and authorize the requests. Start with [`Terminator`].

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use canal_keyserver_client::{FixedCertResolver, RemoteKey};
use canal_model::identity::VerifiedPeer;
use canal_model::ids::{TenantName, TrustDomain};
use canal_model::trust::ClientCertificates;
use canal_tls::{
    Certificate, ClientVerifier, Credential, PeerRole, PeerTrustWatch, PeerVerifier, TlsError,
    TrustView, provider,
};
use rustls::ServerConfig;
use rustls::server::{Acceptor, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{LazyConfigAcceptor, StartHandshake};

use crate::client_hello::ReceivedHello;
use crate::handshake::{in_time, usable};
use crate::listener_certificates::CertificateSelector;
use crate::listener_clients::{ListenerClient, ListenerClientVerifier};

/// Connections that a terminator accepts.
#[derive(Debug, Clone)]
pub struct TerminationConfig {
    /// Tenant of which clients with certificates must be members, or of one that it federates with.
    pub tenant: TenantName,
    pub trust_domain: TrustDomain,
    pub clients: ClientCertificates,
    /// Application protocols in order of preference; if empty, none is negotiated.
    pub alpn: Vec<Vec<u8>>,
    /// Also accept TLS 1.2, for clients that are not part of the mesh. It must not be used with a
    /// mesh key in a key server, which signs TLS 1.3 only.
    pub tls12: bool,
}

/// Terminates TLS for one service.
#[derive(Debug)]
pub struct Terminator {
    terms: TerminationConfig,
    key: TerminationKey,
    trust: TrustView,
    cached: ArcSwapOption<CachedServerConfig>,
}

#[derive(Debug)]
enum TerminationKey {
    Local(Credential),
    Remote(RemoteKey),
    /// Certificates of a listener and the verifier of its clients, which never change: new ones make
    /// a new terminator.
    Listener(
        Arc<CertificateSelector>,
        Option<Arc<ListenerClientVerifier>>,
    ),
}

#[derive(Debug)]
struct CachedServerConfig {
    of: CachedKeyId,
    config: Arc<ServerConfig>,
}

#[derive(Debug)]
enum CachedKeyId {
    Local(Arc<Certificate>),
    Remote(Arc<CertifiedKey>),
    Listener,
}

/// A connection after TLS termination.
#[derive(Debug)]
pub struct TerminatedConnection<IO> {
    pub stream: TlsStream<IO>,
    /// Verified client, if it presented a certificate, and the watch of its trust while the
    /// connection is open.
    pub peer: Option<(VerifiedPeer, PeerTrustWatch)>,
    /// The client of a listener that validates clients.
    pub listener_client: Option<ListenerClient>,
    /// Server name (SNI) in lower case.
    pub server_name: Option<String>,
    /// Application protocol (ALPN) that was negotiated.
    pub alpn: Option<Vec<u8>>,
}

impl Terminator {
    /// Creates a terminator with a local key, as
    /// [`crate::certs::CertificateSource::service_credential`] returns it.
    pub fn new(terms: TerminationConfig, credential: Credential, trust: TrustView) -> Self {
        Self {
            terms,
            key: TerminationKey::Local(credential),
            trust,
            cached: ArcSwapOption::empty(),
        }
    }

    /// Creates a terminator with a key that signs remotely.
    pub fn signed(terms: TerminationConfig, key: RemoteKey, trust: TrustView) -> Self {
        Self {
            terms,
            key: TerminationKey::Remote(key),
            trust,
            cached: ArcSwapOption::empty(),
        }
    }

    /// Creates a terminator with the certificates of a listener, and with the verifier of its
    /// clients if it validates them.
    pub fn with_certificates(
        terms: TerminationConfig,
        certificates: CertificateSelector,
        clients: Option<Arc<ListenerClientVerifier>>,
        trust: TrustView,
    ) -> Self {
        Self {
            terms,
            key: TerminationKey::Listener(Arc::new(certificates), clients),
            trust,
            cached: ArcSwapOption::empty(),
        }
    }

    /// Performs the handshake as the server. `on_hello` is called when the client's ClientHello is
    /// complete.
    ///
    /// # Errors
    /// The handshake fails, there is no certificate or key server, or
    /// [`canal_tls::HANDSHAKE_TIMEOUT`] passes.
    pub async fn accept<IO>(
        &self,
        io: IO,
        on_hello: impl Fn(),
    ) -> Result<TerminatedConnection<IO>, TlsError>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let accepted = in_time(self.handshake(io, on_hello)).await;
        if let Err(e) = &accepted {
            self.trust.record_failure("termination", e.refusal());
        }
        accepted
    }

    async fn handshake<IO>(
        &self,
        io: IO,
        on_hello: impl Fn(),
    ) -> Result<TerminatedConnection<IO>, TlsError>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let start = LazyConfigAcceptor::new(Acceptor::default(), io).await?;
        on_hello();
        self.finish(start).await
    }

    /// Performs the handshake after the client's ClientHello.
    async fn finish<IO>(
        &self,
        start: StartHandshake<IO>,
    ) -> Result<TerminatedConnection<IO>, TlsError>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let server_name = server_name(&start);
        let stream = match &self.key {
            TerminationKey::Local(credential) => {
                start.into_stream(self.local_config(credential)?).await?
            }
            TerminationKey::Listener(selector, _) => {
                start.into_stream(self.listener(selector)?).await?
            }
            TerminationKey::Remote(signed) => {
                let config = self.remote_config(signed).await?;
                signed.handshake(start, config).await?
            }
        };
        let session = stream.get_ref().1;
        let chain = session.peer_certificates();
        let validated = self.listener_clients();
        let listener_client = validated.and_then(|clients| clients.client(chain));
        let peer = match chain {
            // A client of a listener has no identity of the mesh, whatever its certificate names.
            _ if matches!(self.key, TerminationKey::Listener(..)) => None,
            // Where a certificate is required, the handshake has failed without one.
            None => None,
            chain => {
                let (identity, leaf) = self.peer_verifier()?.peer(PeerRole::Client, None, chain)?;
                Some((
                    VerifiedPeer {
                        tenant: self.terms.tenant.clone(),
                        identity,
                    },
                    PeerTrustWatch::new(self.trust.clone(), leaf),
                ))
            }
        };
        let alpn = session.alpn_protocol().map(<[u8]>::to_vec);
        Ok(TerminatedConnection {
            stream,
            peer,
            listener_client,
            server_name,
            alpn,
        })
    }

    fn local_config(&self, credential: &Credential) -> Result<Arc<ServerConfig>, TlsError> {
        let own = usable(credential)?;
        if let Some(made) = &*self.cached.load()
            && matches!(&made.of, CachedKeyId::Local(c) if Arc::ptr_eq(c, &own))
        {
            return Ok(made.config.clone());
        }
        // Tickets contain no identity if clients have none, so they are safe then. They become
        // invalid with the certificate.
        let config = Arc::new(self.config(
            own.signing().clone(),
            self.terms.clients == ClientCertificates::None,
        )?);
        self.cached.store(Some(Arc::new(CachedServerConfig {
            of: CachedKeyId::Local(own),
            config: config.clone(),
        })));
        Ok(config)
    }

    /// Returns the verifier of a listener's clients, if it validates them.
    fn listener_clients(&self) -> Option<&Arc<ListenerClientVerifier>> {
        match &self.key {
            TerminationKey::Listener(_, clients) => clients.as_ref(),
            TerminationKey::Local(_) | TerminationKey::Remote(_) => None,
        }
    }

    fn listener(&self, selector: &Arc<CertificateSelector>) -> Result<Arc<ServerConfig>, TlsError> {
        if let Some(made) = &*self.cached.load() {
            return Ok(made.config.clone());
        }
        // A resumed session would not validate the client again.
        let tickets = self.listener_clients().is_none();
        let config = Arc::new(self.config(selector.clone(), tickets)?);
        self.cached.store(Some(Arc::new(CachedServerConfig {
            of: CachedKeyId::Listener,
            config: config.clone(),
        })));
        Ok(config)
    }

    async fn remote_config(&self, signed: &RemoteKey) -> Result<Arc<ServerConfig>, TlsError> {
        let key = signed.certified().await.map_err(TlsError::KeyServer)?;
        if let Some(made) = &*self.cached.load()
            && matches!(&made.of, CachedKeyId::Remote(k) if Arc::ptr_eq(k, &key))
        {
            return Ok(made.config.clone());
        }
        // No tickets are sent: a resumed session needs no signature, so the owner of the key could
        // not refuse it.
        let config = Arc::new(self.config(Arc::new(FixedCertResolver(key.clone())), false)?);
        self.cached.store(Some(Arc::new(CachedServerConfig {
            of: CachedKeyId::Remote(key),
            config: config.clone(),
        })));
        Ok(config)
    }

    fn peer_verifier(&self) -> Result<PeerVerifier, TlsError> {
        let domain = self.terms.trust_domain.clone();
        let trust = self.trust.clone();
        match &self.key {
            TerminationKey::Local(credential) => Ok(usable(credential)?.verifier(domain, trust)),
            TerminationKey::Remote(_) | TerminationKey::Listener(..) => {
                let unusable = |why: String| TlsError::Protocol(rustls::Error::General(why));
                PeerVerifier::new(domain, &[], trust).map_err(unusable)
            }
        }
    }

    fn config(
        &self,
        key: Arc<dyn ResolvesServerCert>,
        tickets: bool,
    ) -> Result<ServerConfig, TlsError> {
        let versions: &[_] = if self.terms.tls12 {
            &[&TLS13, &TLS12]
        } else {
            &[&TLS13]
        };
        // TLS 1.2 clients need other suites than those of the mesh.
        let provider = if self.terms.tls12 {
            Arc::new(rustls::crypto::aws_lc_rs::default_provider())
        } else {
            provider()
        };
        let builder =
            ServerConfig::builder_with_provider(provider).with_protocol_versions(versions)?;
        let verifier = |required| {
            self.peer_verifier()
                .map(|verifier| Arc::new(ClientVerifier::new(verifier).required(required)))
        };
        let mut config = match (self.listener_clients(), self.terms.clients) {
            // A listener validates its clients by its own authorities, and not by those of the
            // mesh.
            (Some(clients), _) => builder.with_client_cert_verifier(clients.clone()),
            (None, ClientCertificates::None) => builder.with_no_client_auth(),
            (None, ClientCertificates::Optional) => {
                builder.with_client_cert_verifier(verifier(false)?)
            }
            (None, ClientCertificates::Required) => {
                builder.with_client_cert_verifier(verifier(true)?)
            }
        }
        .with_cert_resolver(key);
        config.alpn_protocols = self.terms.alpn.clone();
        // rustls would otherwise resume sessions from memory, past the caller's decision about
        // tickets.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        if tickets {
            config.ticketer = rustls::crypto::aws_lc_rs::Ticketer::new()?;
            // One ticket resumes one connection, and a resumed connection gets the next. Nobody
            // measured more.
            config.send_tls13_tickets = 1;
        }
        Ok(config)
    }
}

/// Returns the server name (SNI) of a ClientHello in lower case.
fn server_name<IO>(start: &StartHandshake<IO>) -> Option<String>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let hello = start.client_hello();
    hello.server_name().map(str::to_ascii_lowercase)
}

/// The terminator of a listener that a server name selects.
#[derive(Debug, Clone, Copy)]
pub enum ListenerChoice<'t> {
    Terminator(&'t Terminator),
    /// The listener is closed, or its certificate has not arrived.
    NoCertificate,
    /// No listener is for the name.
    NoListener,
}

/// A fatal alert in a TLS record (RFC 8446 §6), with its code as the last byte. Before the
/// ServerHello, alerts are in plaintext.
const fn fatal_alert(code: u8) -> [u8; 7] {
    [0x15, 0x03, 0x03, 0x00, 0x02, 0x02, code]
}

/// The alert unrecognized_name (RFC 6066 §3).
const UNRECOGNIZED_NAME: [u8; 7] = fatal_alert(112);
/// The alert internal_error: the client can do nothing about it. Number 80 of RFC 8446 §6.2.
const INTERNAL_ERROR: [u8; 7] = fatal_alert(80);

/// Performs the handshake as the server, with the terminator that `choose` returns for the client's
/// server name in lower case. `on_hello` is called when the client's ClientHello is complete.
///
/// # Errors
/// There is no such terminator, which an alert tells the client; or the handshake fails, or
/// [`canal_tls::HANDSHAKE_TIMEOUT`] passes.
pub async fn accept_by_server_name<'t, IO>(
    io: IO,
    trust: &TrustView,
    on_hello: impl Fn(),
    choose: impl FnOnce(Option<&str>) -> ListenerChoice<'t>,
) -> Result<TerminatedConnection<IO>, TlsError>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let handshake = async {
        let start = LazyConfigAcceptor::new(Acceptor::default(), io).await?;
        on_hello();
        let name = server_name(&start);
        answer(start, choose(name.as_deref())).await
    };
    let accepted = in_time(handshake).await;
    if let Err(e) = &accepted {
        trust.record_failure("termination", e.refusal());
    }
    accepted
}

/// Performs the handshake as the server, with the terminator of the choice, for a client whose
/// ClientHello was read from `io`.
///
/// # Errors
/// As of [`accept_by_server_name`], and if the client has sent more than the ClientHello.
pub async fn accept_received_hello<IO>(
    io: IO,
    hello: ReceivedHello,
    trust: &TrustView,
    choice: ListenerChoice<'_>,
) -> Result<TerminatedConnection<IO>, TlsError>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let handshake = async {
        // Without early data, which no ticket allows, a client waits for the answer.
        if hello.is_followed {
            let problem = "bytes follow the ClientHello".to_owned();
            return Err(TlsError::Protocol(rustls::Error::General(problem)));
        }
        answer(StartHandshake::from_parts(hello.accepted, io), choice).await
    };
    let accepted = in_time(handshake).await;
    if let Err(e) = &accepted {
        trust.record_failure("termination", e.refusal());
    }
    accepted
}

/// Answers a ClientHello with the terminator of the choice, or with an alert if there is none.
async fn answer<IO>(
    mut start: StartHandshake<IO>,
    choice: ListenerChoice<'_>,
) -> Result<TerminatedConnection<IO>, TlsError>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (alert, error) = match choice {
        ListenerChoice::Terminator(terminator) => return terminator.finish(start).await,
        ListenerChoice::NoCertificate => (INTERNAL_ERROR, TlsError::NoListenerCertificate),
        ListenerChoice::NoListener => {
            let name = server_name(&start);
            (UNRECOGNIZED_NAME, TlsError::UnrecognizedName(name))
        }
    };
    // A client that does not read the alert is refused all the same.
    let _ = start.io.write_all(&alert).await;
    let _ = start.io.shutdown().await;
    Err(error)
}

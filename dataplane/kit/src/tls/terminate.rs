//! TLS of clients without a node proxy ends here: a certificate with a service's host names, whose key is here or elsewhere, and clients that
//! show none, may show one, or must. Which service it is, and what may be said there, is the callers' business.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use canal_model::identity::Peer;
use canal_model::ids::{TenantName, TrustDomain};
use canal_model::trust::ClientCertificates;
use rustls::ServerConfig;
use rustls::server::{Acceptor, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use super::certificate::{Certificate, Credential};
use super::identity::{in_time, usable};
use super::provider;
use super::refusal::TlsError;
use super::trust::{Anchors, Standing, TrustView};
use super::verify::{ClientVerifier, Expected, Judge, Role};
use crate::keys::{Always, Signed};

/// What is accepted.
#[derive(Debug, Clone)]
pub struct Terms {
    /// Clients that show certificates are members of this tenant, or of one that it federates with.
    pub tenant: TenantName,
    pub trust_domain: TrustDomain,
    pub clients: ClientCertificates,
    /// In order of preference; empty: none is agreed on.
    pub alpn: Vec<Vec<u8>>,
    /// TLS 1.2 as well: for clients that are not ours. Never with a key of the mesh that is in a key server, which signs TLS 1.3 only.
    pub tls12: bool,
}

/// Accepts TLS for one service.
#[derive(Debug)]
pub struct Terminator {
    terms: Terms,
    key: Key,
    trust: TrustView,
    made: ArcSwapOption<Made>,
}

#[derive(Debug)]
enum Key {
    Here(Credential),
    There(Signed),
}

#[derive(Debug)]
struct Made {
    of: Of,
    config: Arc<ServerConfig>,
}

#[derive(Debug)]
enum Of {
    Here(Arc<Certificate>),
    There(Arc<CertifiedKey>),
}

/// A connection whose TLS ends here.
#[derive(Debug)]
pub struct Terminated<IO> {
    pub stream: TlsStream<IO>,
    /// Who the client proved to be, if it showed a certificate, and what to watch while it is open.
    pub peer: Option<(Peer, Standing)>,
    /// SNI, lower case.
    pub server_name: Option<String>,
    /// Agreed on.
    pub alpn: Option<Vec<u8>>,
}

impl Terminator {
    /// With a key that is here, as [`crate::certs::CertificateSource::want_service`] gives it.
    pub fn new(terms: Terms, credential: Credential, trust: TrustView) -> Self {
        Self { terms, key: Key::Here(credential), trust, made: ArcSwapOption::empty() }
    }

    /// With a key that signs elsewhere.
    pub fn signed(terms: Terms, key: Signed, trust: TrustView) -> Self {
        Self { terms, key: Key::There(key), trust, made: ArcSwapOption::empty() }
    }

    /// Handshake as the server. Fails after [`super::HANDSHAKE_TIMEOUT`].
    pub async fn accept<IO>(&self, io: IO) -> Result<Terminated<IO>, TlsError>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let accepted = in_time(self.greet(io)).await;
        if let (Err(e), Some(shared)) = (&accepted, &self.trust.shared) {
            shared.refused("termination", e.refusal());
        }
        accepted
    }

    async fn greet<IO>(&self, io: IO) -> Result<Terminated<IO>, TlsError>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let start = LazyConfigAcceptor::new(Acceptor::default(), io).await?;
        let server_name = start.client_hello().server_name().map(str::to_ascii_lowercase);
        let stream = match &self.key {
            Key::Here(credential) => start.into_stream(self.here(credential)?).await?,
            Key::There(signed) => {
                let config = self.there(signed).await?;
                signed.shake(start, config).await?
            }
        };
        let session = stream.get_ref().1;
        let peer = match session.peer_certificates() {
            None => None,
            chain => {
                let expected = Expected::Members(self.terms.trust_domain.clone());
                let (identity, leaf) = self.judge()?.recall(Role::Client, &expected, chain)?;
                Some((Peer { tenant: self.terms.tenant.clone(), identity }, Standing::new(self.trust.clone(), leaf)))
            }
        };
        let alpn = session.alpn_protocol().map(<[u8]>::to_vec);
        Ok(Terminated { stream, peer, server_name, alpn })
    }

    fn here(&self, credential: &Credential) -> Result<Arc<ServerConfig>, TlsError> {
        let own = usable(credential)?;
        if let Some(made) = &*self.made.load()
            && matches!(&made.of, Of::Here(c) if Arc::ptr_eq(c, &own))
        {
            return Ok(made.config.clone());
        }
        // Tickets hold no identity where clients have none, so they are safe there; all is forgotten with the certificate.
        let config = Arc::new(self.config(own.signing().clone(), self.terms.clients == ClientCertificates::None)?);
        self.made.store(Some(Arc::new(Made { of: Of::Here(own), config: config.clone() })));
        Ok(config)
    }

    async fn there(&self, signed: &Signed) -> Result<Arc<ServerConfig>, TlsError> {
        let key = signed.certified().await.map_err(TlsError::KeyServer)?;
        if let Some(made) = &*self.made.load()
            && matches!(&made.of, Of::There(k) if Arc::ptr_eq(k, &key))
        {
            return Ok(made.config.clone());
        }
        // No tickets: who resumes needs no signature, and the key's owner could not refuse.
        let config = Arc::new(self.config(Arc::new(Always(key.clone())), false)?);
        self.made.store(Some(Arc::new(Made { of: Of::There(key), config: config.clone() })));
        Ok(config)
    }

    fn judge(&self) -> Result<Judge, TlsError> {
        let none = |why: String| TlsError::Protocol(rustls::Error::General(why));
        let fallback = match &self.key {
            Key::Here(credential) => usable(credential)?.anchors().clone(),
            Key::There(_) => Arc::new(Anchors::of(&[], &[]).map_err(none)?),
        };
        Ok(Judge { own: self.terms.trust_domain.clone(), fallback, trust: self.trust.clone() })
    }

    fn config(&self, key: Arc<dyn ResolvesServerCert>, tickets: bool) -> Result<ServerConfig, TlsError> {
        let versions: &[_] = if self.terms.tls12 { &[&TLS13, &TLS12] } else { &[&TLS13] };
        // Beside the mesh's suites those that clients of TLS 1.2 have.
        let provider = if self.terms.tls12 { Arc::new(rustls::crypto::aws_lc_rs::default_provider()) } else { provider() };
        let builder = ServerConfig::builder_with_provider(provider).with_protocol_versions(versions)?;
        let verifier = |required| self.judge().map(|judge| Arc::new(ClientVerifier::new(judge).required(required)));
        let mut config = match self.terms.clients {
            ClientCertificates::None => builder.with_no_client_auth(),
            ClientCertificates::Optional => builder.with_client_cert_verifier(verifier(false)?),
            ClientCertificates::Required => builder.with_client_cert_verifier(verifier(true)?),
        }
        .with_cert_resolver(key);
        config.alpn_protocols = self.terms.alpn.clone();
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        if tickets {
            config.ticketer = rustls::crypto::aws_lc_rs::Ticketer::new()?;
            config.send_tls13_tickets = 1;
        }
        Ok(config)
    }
}

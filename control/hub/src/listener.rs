//! The TLS listener: TLS 1.3 with ALPN h2, each handshake in its own task, the certificate renewed at half its life. A connection that has
//! proved nothing counts for its source, and has until a deadline to send a request with a valid token.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use canal_authority::{Infra, InfraError, ServerCertificate};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::admission::{Admission, Sources};
use crate::connection::Connection;
use crate::hub::Limits;
use crate::metrics::{self, Metrics};
use crate::shared::now_seconds;
use crate::shares::TenantLimits;

/// Open connections on which a request had a valid token.
pub const CONNECTIONS_MAX: usize = 25_000;
/// Open connections that have not sent a valid token.
pub const UNAUTHENTICATED_MAX: usize = 5_000;
/// File descriptors that connections leave to the store, to files of tenants and to what the controller itself opens.
pub const FILES_RESERVED: u64 = 256;
/// A connection without a request that has a valid token is cut after so long; TLS and the HTTP/2 preface are in it.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// After accept(2) failed (usually: no file descriptors left) the listener rests this long instead of spinning.
const REST: Duration = Duration::from_millis(100);
/// How often the server certificate's age is looked at.
const RENEWAL_LOOK: Duration = Duration::from_secs(3600);

/// The certificate in use.
#[derive(Debug)]
struct Current(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// A bound listener with its certificate.
pub(crate) struct Listener {
    tcp: TcpListener,
    tls: TlsAcceptor,
    current: Arc<Current>,
    infra: Arc<Infra>,
    name: &'static str,
    not_after: u64,
    handshake: Duration,
}

/// Why the controller cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {why}; choose another {flag}, or stop what uses it")]
    Bind { address: SocketAddr, why: io::Error, flag: &'static str },
    /// The admin socket cannot be made.
    #[error("cannot listen on the unix socket {path}: {why}; see that --data-dir is writable and on a file system that has sockets")]
    Socket { path: std::path::PathBuf, why: io::Error },
    /// No certificate.
    #[error(transparent)]
    Infra(#[from] InfraError),
    /// The TLS library refused the certificate.
    #[error("the controller's certificate cannot be used: {0}")]
    Tls(#[from] rustls::Error),
}

impl Listener {
    pub(crate) async fn bind(address: SocketAddr, infra: Arc<Infra>, limits: &Limits) -> Result<Self, ListenError> {
        let tcp = TcpListener::bind(address).await.map_err(|why| ListenError::Bind { address, why, flag: "--listen" })?;
        let name = canal_wire::CONTROLLER_NAME;
        let certificate = infra.server_certificate(name, now_seconds())?;
        let not_after = certificate.not_after;
        let current = Arc::new(Current(RwLock::new(certified(certificate)?)));
        let provider = Arc::new(aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_no_client_auth()
            .with_cert_resolver(current.clone());
        config.alpn_protocols = vec![b"h2".to_vec()];
        let tls = TlsAcceptor::from(Arc::new(config));
        Ok(Self { tcp, tls, current, infra, name, not_after, handshake: limits.handshake })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Accepts until `stopping`; what passed its handshake goes to `connections`.
    pub(crate) async fn run(
        mut self,
        connections: mpsc::Sender<io::Result<Connection>>,
        metrics: Arc<Metrics>,
        (limits, sources): (Arc<TenantLimits>, watch::Receiver<Arc<Sources>>),
        stopping: CancellationToken,
    ) {
        let mut look = tokio::time::interval(RENEWAL_LOOK);
        loop {
            let accepted = tokio::select! {
                () = stopping.cancelled() => return,
                _ = look.tick() => {
                    self.renew();
                    continue;
                }
                accepted = self.tcp.accept() => accepted,
            };
            let (tcp, source) = match accepted {
                Ok(accepted) => accepted,
                Err(e) => {
                    metrics.count(metrics::REFUSED, &[("reason", "accept")]);
                    tracing::error!(error = %e, "accepting a connection failed");
                    tokio::time::sleep(REST).await;
                    continue;
                }
            };
            let deadline = Instant::now() + self.handshake;
            let holder = sources.borrow().holder(source);
            let Ok(permit) = limits.unauthenticated.take_replacing(&holder, 1) else {
                metrics.count(metrics::REFUSED, &[("reason", "unauthenticated_connections")]);
                continue;
            };
            let admission = Admission::new(permit, limits.connections.clone());
            // Responses are small and wait for nothing; a failure to set the option costs latency only.
            let _ = tcp.set_nodelay(true);
            let handshake = self.tls.accept(tcp);
            let (connections, metrics) = (connections.clone(), metrics.clone());
            tokio::spawn(async move {
                let revoked = admission.revoked();
                let stream = tokio::select! {
                    done = handshake => done.map_err(|e| {
                        tracing::debug!(error = %e, "a TLS handshake failed");
                        "handshake"
                    }),
                    () = tokio::time::sleep_until(deadline) => Err("handshake_deadline"),
                    () = revoked => Err("unauthenticated_revoked"),
                };
                match stream {
                    // The receiver is gone only when the controller ends.
                    Ok(stream) => _ = connections.send(Ok(Connection::new(stream, admission, deadline, metrics))).await,
                    Err(reason) => metrics.count(metrics::REFUSED, &[("reason", reason)]),
                }
            });
        }
    }

    fn renew(&mut self) {
        let now = now_seconds();
        if self.not_after.saturating_sub(now) > canal_authority::SERVER_LIFETIME_SECONDS / 2 {
            return;
        }
        let renewed = self.infra.server_certificate(self.name, now).map_err(ListenError::from);
        match renewed.and_then(|c| Ok((c.not_after, certified(c)?))) {
            Ok((not_after, key)) => {
                *self.current.0.write().unwrap_or_else(PoisonError::into_inner) = key;
                self.not_after = not_after;
                tracing::info!(not_after, "renewed the server certificate");
            }
            Err(e) => tracing::error!(error = %e, "the server certificate was not renewed; the old one stays in use"),
        }
    }
}

fn certified(certificate: ServerCertificate) -> Result<Arc<CertifiedKey>, rustls::Error> {
    let key = aws_lc_rs::sign::any_supported_type(&certificate.key)?;
    Ok(Arc::new(CertifiedKey::new(certificate.chain, key)))
}

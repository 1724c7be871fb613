//! The TLS listener for data planes and operators: TLS 1.3 with ALPN `h2`. Each handshake runs in
//! its own task. The server certificate is renewed at half its lifetime. An unauthenticated
//! connection counts against its source, and has until a deadline to send a request with a valid
//! token. Start at [`ControlListener::run`].

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use canal_ca::{ControllerCa, ControllerCaError, ServerCertificate};
use canal_controller_metrics::{self as metrics, ControllerMetrics};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::admission::{ConnectionAdmission, Sources};
use crate::connection::CountedConnection;
use crate::now_seconds;
use crate::shares::TenantLimits;

/// Maximum number of open connections on which a request had a valid token.
/// Above the 20,000 streams of data planes (`STREAMS_MAX`), so that operators can connect beside as
/// many data planes with a connection each.
pub const CONNECTIONS_MAX: usize = 25_000;
/// Maximum number of open connections that have not sent a valid token.
/// Clients that never authenticate fill it at 1,000 new connections a second, because each is
/// closed after [`HANDSHAKE_TIMEOUT`]. Then the oldest connection of the source with the most gives
/// way.
pub const UNAUTHENTICATED_MAX: usize = 5_000;
/// File descriptors that connections leave for the store, the tenants' files, and other files that
/// the controller opens.
/// The two admin ports and the admin socket may use 192 of them (`ADMIN_CONNECTIONS_MAX` each),
/// which leaves 64 for the rest. Nobody measured this value.
pub const FILES_RESERVED: u64 = 256;
/// Time after which a connection without a request that has a valid token is closed. It includes
/// TLS and the HTTP/2 preface.
/// Data planes wait for 10 s, so that the controller decides first and counts it.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after accept(2) failed, so that the listener does not spin. The usual reason is that no
/// file descriptors are left.
/// It limits the failing calls to ten a second.
const ACCEPT_ERROR_PAUSE: Duration = Duration::from_millis(100);
/// Interval between checks of the server certificate's age.
/// The certificate lives for thirty days and is renewed at half, so that an hour more does no harm.
const RENEWAL_CHECK_INTERVAL: Duration = Duration::from_secs(3600);

/// The server certificate that new handshakes use.
#[derive(Debug)]
struct Current(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(
            self.0
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
        )
    }
}

/// A bound TLS listener with its server certificate.
pub struct ControlListener {
    tcp: TcpListener,
    tls: TlsAcceptor,
    current: Arc<Current>,
    infra: Arc<ControllerCa>,
    name: &'static str,
    not_after: u64,
    handshake: Duration,
}

/// Reason why the controller cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {why}; fix: choose another {flag}, or stop what uses it")]
    Bind {
        address: SocketAddr,
        why: io::Error,
        flag: &'static str,
    },
    /// The admin socket cannot be created.
    #[error(
        "cannot listen on the unix socket {path}: {why}; fix: check that --data-dir is writable and on a file system that supports sockets"
    )]
    Socket {
        path: std::path::PathBuf,
        why: io::Error,
    },
    /// The CA could not issue a server certificate.
    #[error(transparent)]
    Infra(#[from] ControllerCaError),
    /// The TLS library refused the certificate.
    #[error(
        "the controller's certificate cannot be used: {0}; fix: remove root.key and root.pem from --infra-dir, and give the new root.pem to every client"
    )]
    Tls(#[from] rustls::Error),
}

impl ControlListener {
    /// Binds the address and has the CA issue a server certificate. A connection has the time
    /// `handshake` for its first valid token.
    ///
    /// # Errors
    /// A [`ListenError`] that names the address, or what is wrong with the certificate.
    pub async fn bind(
        address: SocketAddr,
        infra: Arc<ControllerCa>,
        handshake: Duration,
    ) -> Result<Self, ListenError> {
        let tcp = TcpListener::bind(address)
            .await
            .map_err(|why| ListenError::Bind {
                address,
                why,
                flag: "--listen",
            })?;
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
        Ok(Self {
            tcp,
            tls,
            current,
            infra,
            name,
            not_after,
            handshake,
        })
    }

    /// Returns the address on which the listener accepts connections.
    ///
    /// # Errors
    /// The operating system does not tell the address.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Accepts connections until `stopping`. Those that complete their handshake go to
    /// `connections`.
    pub async fn run(
        mut self,
        connections: mpsc::Sender<io::Result<CountedConnection>>,
        metrics: Arc<ControllerMetrics>,
        (limits, sources): (Arc<TenantLimits>, watch::Receiver<Arc<Sources>>),
        stopping: CancellationToken,
    ) {
        let mut renewal = tokio::time::interval(RENEWAL_CHECK_INTERVAL);
        loop {
            let accepted = tokio::select! {
                () = stopping.cancelled() => return,
                _ = renewal.tick() => {
                    self.renew();
                    continue;
                }
                accepted = self.tcp.accept() => accepted,
            };
            let (tcp, source) = match accepted {
                Ok(accepted) => accepted,
                // Without the pause, a process that is out of file descriptors would try endlessly.
                Err(e) => {
                    metrics.count(metrics::REFUSED, &[("reason", "accept")]);
                    tracing::error!(error = %e, "listener: accepting a connection failed; retrying");
                    tokio::time::sleep(ACCEPT_ERROR_PAUSE).await;
                    continue;
                }
            };
            let deadline = Instant::now() + self.handshake;
            let holder = sources.borrow().holder(source);
            // A holder that has its whole share gives up its oldest unauthenticated connection for
            // the new one.
            let Ok(permit) = limits.unauthenticated.take_replacing(&holder, 1) else {
                metrics.count(
                    metrics::REFUSED,
                    &[("reason", "unauthenticated_connections")],
                );
                // The connection is closed when its socket is dropped here.
                continue;
            };
            let admission = ConnectionAdmission::new(permit, limits.connections.clone());
            // Small responses must not be delayed; if the option cannot be set, that costs latency
            // only.
            let _ = tcp.set_nodelay(true);
            let handshake = self.tls.accept(tcp);
            let (connections, metrics) = (connections.clone(), metrics.clone());
            tokio::spawn(async move {
                let revoked = admission.revoked();
                let stream = tokio::select! {
                    done = handshake => done.map_err(|e| {
                        tracing::debug!(error = %e, "listener: a TLS handshake failed, the connection is closed");
                        "handshake"
                    }),
                    () = tokio::time::sleep_until(deadline) => Err("handshake_deadline"),
                    // Its permit went to a newer connection.
                    () = revoked => Err("unauthenticated_revoked"),
                };
                match stream {
                    // Sending fails only when the controller stops.
                    Ok(stream) => {
                        _ = connections
                            .send(Ok(CountedConnection::new(
                                stream, admission, deadline, metrics,
                            )))
                            .await
                    }
                    Err(reason) => metrics.count(metrics::REFUSED, &[("reason", reason)]),
                }
            });
        }
    }

    /// Replaces the server certificate once half of its lifetime is over.
    fn renew(&mut self) {
        let now = now_seconds();
        if self.not_after.saturating_sub(now) > canal_ca::SERVER_LIFETIME_SECONDS / 2 {
            return;
        }
        let renewed = self
            .infra
            .server_certificate(self.name, now)
            .map_err(ListenError::from);
        match renewed.and_then(|c| Ok((c.not_after, certified(c)?))) {
            Ok((not_after, key)) => {
                *self
                    .current
                    .0
                    .write()
                    .unwrap_or_else(PoisonError::into_inner) = key;
                self.not_after = not_after;
                tracing::info!(not_after, "listener: renewed the server certificate");
            }
            Err(e) => {
                tracing::error!(error = %e, "listener: could not renew the server certificate; the old one stays in use")
            }
        }
    }
}

fn certified(certificate: ServerCertificate) -> Result<Arc<CertifiedKey>, rustls::Error> {
    let key = aws_lc_rs::sign::any_supported_type(&certificate.key)?;
    Ok(Arc::new(CertifiedKey::new(certificate.chain, key)))
}

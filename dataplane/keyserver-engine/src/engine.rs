//! [`KeyServerEngine`]: accepts channels, reads and writes their frames, and connects the other modules. Its process passes the
//! configuration.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use bytes::{Buf, BytesMut};
use canal_model::identity::{component_identity, components};
use canal_model::ids::TenantName;
use canal_model::principal::Principal;
use canal_model::program::{Resource, ResourceKind};
use canal_model::trust::KeyAlgorithm;
use canal_net::sys;
use canal_runtime::drain::{DrainObserver, DrainWatcher};
use canal_runtime::limits::show_shares_of;
use canal_runtime::metrics::Registry;
use canal_southbound_client::{RefusedResource, ResourceState};
use canal_tls::SecretBuffer;
use canal_tls::{HANDSHAKE_TIMEOUT, PeerRole, TrustStore};
use canal_wire::keyrpc::{ALPN, split};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::channel::{EngineContext, RequesterChannel};
use crate::counts::{ChannelEndReason, KeyServerCounters};
use crate::entitlements::{ChannelPeer, EntitlementIndex, KeyClaim};
use crate::hardware;
use crate::key::OperationQueue;
use crate::limits::{FIRST_BYTE_TIMEOUT, QuotaShares};
use crate::operation_pool::{OperationPool, OperationPoolConfig};
use crate::provision::{CertificateIssuer, Provisioner};
use crate::quotas::Quotas;
use crate::tenant_key_files::{self, TenantKeyFiles};
use crate::unauthenticated::Unauthenticated;
use crate::vault::{Vault, VaultError};

/// Interval at which a channel checks for handshakes whose time has run out. A handshake has 10 s
/// at most, so this delay of its end is small.
const SWEEP_INTERVAL: Duration = Duration::from_millis(50);
/// Minimum capacity for one read in bytes. Nobody measured the value; a frame of a handshake has a
/// few KiB.
const READ_BYTES_MIN: usize = 8 << 10;
/// Timeout of one write to a requester. A requester's handshakes have timed out by then
/// (`HANDSHAKE_TIME`), so no answer is worth more.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Configuration of the key server engine.
#[derive(Debug, Clone)]
pub struct KeyServerConfig {
    /// Name of the key server; a [`Principal::KeyServer`].
    pub principal: Principal,
    pub pool: OperationPoolConfig,
    pub shares: QuotaShares,
    /// Directory of the tenant's keyless keys; `None`: there are none.
    pub tls_dir: Option<PathBuf>,
}

/// Reason why the engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum KeyServerEngineError {
    #[error("{0} is not a key server; fix: start the process with a key server's token")]
    Principal(Principal),
    #[error("keys from files belong to one tenant; fix: set --tenant with --tls-dir")]
    Tenant,
    #[error("reading {0}: {1}; fix: name a directory in --tls-dir that this process may read")]
    Folder(PathBuf, std::io::Error),
    #[error("starting worker threads: {0}; fix: raise the limit of threads (ulimit -u)")]
    Threads(std::io::Error),
    #[error(transparent)]
    Vault(#[from] VaultError),
}

/// State that all connections share, before and after they become channels.
struct ListenerState {
    core: Arc<EngineContext>,
    /// Quotas of channels. All gateways together count as one tenant, the provider.
    channel_quotas: Quotas,
    provider: TenantName,
    /// Connections that have not authenticated yet.
    unauthenticated: Unauthenticated,
    trust: TrustStore,
    registry: Registry,
}

/// A running key server. Clones share it.
#[derive(Clone)]
pub struct KeyServerEngine {
    listener_state: Arc<ListenerState>,
}

impl KeyServerEngine {
    /// Starts the threads, and requests the key server's own certificate, on the calling runtime.
    /// It accepts no channels before [`KeyServerEngine::serve`].
    ///
    /// # Errors
    /// The configuration is not a key server's, its directory of keys is unreadable, or threads or
    /// random bytes are not available.
    pub fn start(
        config: KeyServerConfig,
        issue: Arc<dyn CertificateIssuer>,
        registry: &Registry,
        drain: DrainObserver,
    ) -> Result<Self, KeyServerEngineError> {
        let Principal::KeyServer { name, tenant, .. } = &config.principal else {
            return Err(KeyServerEngineError::Principal(config.principal));
        };
        let Some(identity) = component_identity(&config.principal) else {
            return Err(KeyServerEngineError::Principal(config.principal));
        };
        let vault = Arc::new(Vault::new()?);
        let files = match (&config.tls_dir, tenant) {
            (None, _) => None,
            // Only a tenant's own key server serves keys from files.
            (Some(_), None) => return Err(KeyServerEngineError::Tenant),
            (Some(folder), Some(tenant)) => {
                let opened =
                    TenantKeyFiles::open(folder.clone(), tenant.clone(), vault.clone(), registry);
                Some(opened.map_err(|e| KeyServerEngineError::Folder(folder.clone(), e))?)
            }
        };
        let (provider, domain) = components();
        let own = KeyClaim {
            tenant: provider.clone(),
            trust_domain: domain,
            // Like every certificate for which nothing else is configured.
            algorithm: KeyAlgorithm::EcdsaP256,
        };
        let trust = TrustStore::new(registry);
        let provisioner = Provisioner::start(
            issue,
            vault,
            trust.clone(),
            (identity, own),
            registry,
            drain.clone(),
        );
        let core = Arc::new(EngineContext {
            rights: ArcSwap::default(),
            provisioner,
            files,
            pool: OperationPool::start(config.pool, registry)
                .map_err(KeyServerEngineError::Threads)?,
            quotas: Quotas::new(config.shares),
            counts: KeyServerCounters::new(registry, config.shares),
        });
        show(&core, registry);
        let quotas = core.quotas.clone();
        show_shares_of(registry, move || quotas.usage());
        // Only a tenant's own key server has a key folder to poll.
        if core.files.is_some() {
            tokio::spawn(watch(Arc::downgrade(&core), drain));
        }
        tracing::info!(%name, features = ?hardware::features(), "key server: started");
        let per_channel = Quotas::of_channels(config.shares.channels);
        let unauthenticated = Unauthenticated::new(registry);
        Ok(Self {
            listener_state: Arc::new(ListenerState {
                core,
                channel_quotas: per_channel,
                provider,
                unauthenticated,
                trust,
                registry: registry.clone(),
            }),
        })
    }

    /// Applies a complete state of tenants, bundles and entitlements. Returns the resources that
    /// cannot be used. A closed tenant has no entitlements.
    pub fn apply(&self, state: &ResourceState) -> Vec<RefusedResource> {
        let refused = canal_identity::apply_bundles(&self.listener_state.trust, state);
        let is_open = |r: &&Arc<Resource>| {
            r.tenant()
                .is_none_or(|tenant| !state.closed().contains_key(tenant))
        };
        self.set_shares(state.of(ResourceKind::Tenant));
        self.take(EntitlementIndex::of(
            EntitlementIndex::KINDS
                .iter()
                .flat_map(|k| state.of(*k))
                .filter(is_open),
        ));
        refused
    }

    /// Applies resources like [`KeyServerEngine::apply`], with no tenant closed.
    ///
    /// # Errors
    /// A trust bundle cannot be used.
    pub fn replace(&self, all: &[Arc<Resource>]) -> Result<(), String> {
        self.listener_state.trust.replace(all.iter().cloned())?;
        self.set_shares(all);
        self.take(EntitlementIndex::of(all));
        Ok(())
    }

    /// Applies the provider's shares of all tenants, including closed ones, because their
    /// operations in progress still count.
    fn set_shares<'a>(&self, all: impl IntoIterator<Item = &'a Arc<Resource>>) {
        let shares_of = |resource: &'a Arc<Resource>| match &**resource {
            Resource::Tenant(tenant) => Some((&tenant.name, &tenant.shares)),
            _ => None,
        };
        let tenants: Vec<_> = all.into_iter().filter_map(shares_of).collect();
        self.listener_state
            .registry
            .set_shares(tenants.iter().copied());
        self.listener_state.core.quotas.set_shares(tenants);
    }

    fn take(&self, rights: EntitlementIndex) {
        let rights = Arc::new(rights);
        self.listener_state.core.rights.store(rights.clone());
        self.listener_state.core.provisioner.follow(&rights);
    }

    /// Reports readiness: the key server can authenticate to requesters.
    ///
    /// # Errors
    /// The key server has no certificate of its own yet.
    pub fn ready(&self) -> Result<(), String> {
        self.listener_state
            .core
            .provisioner
            .own_certificate()
            .map(drop)
            .ok_or_else(|| "the key server has no certificate of its own yet".into())
    }

    /// Returns the content of `/config_dump`, which contains no key, sealed or not.
    pub fn dump(&self) -> serde_json::Value {
        serde_json::json!({
            "hardware": hardware::features(),
            "tenants": self.listener_state.core.rights.load().dump(),
            "keys": self.listener_state.core.provisioner.status(),
            "files": self.listener_state.core.files.as_ref().map(TenantKeyFiles::status),
            "under_way": self.listener_state.core.quotas.total(),
            "queued": { "ecdsa": self.listener_state.core.pool.depth(OperationQueue::Ecdsa), "rsa": self.listener_state.core.pool.depth(OperationQueue::Rsa) },
        })
    }

    /// Accepts channels until `drain` starts. Requests in progress may then end, and their channels
    /// with them.
    pub async fn serve(&self, listener: TcpListener, drain: DrainWatcher) {
        loop {
            let accepted = tokio::select! {
                biased;
                () = drain.draining() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, from)) => {
                    let (listener_state, drain) = (self.listener_state.clone(), drain.clone());
                    tokio::spawn(async move {
                        start_channel(listener_state, stream, from, drain).await
                    });
                }
                Err(error) => {
                    self.listener_state.core.counts.unauthenticated("accept");
                    tracing::warn!(%error, "key server: accepting a connection failed; retrying");
                    // The process is out of files or memory: a late accept is better than a busy
                    // loop.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
}

fn show(core: &Arc<EngineContext>, registry: &Registry) {
    let (a, b) = (Arc::downgrade(core), Arc::downgrade(core));
    registry.probe(
        "canal_key_file_keys",
        "Keys from files in use.",
        move || {
            a.upgrade()
                .and_then(|c| c.files.as_ref().map(TenantKeyFiles::count))
                .unwrap_or_default() as f64
        },
    );
    registry.probe(
        "canal_key_requests_in_flight",
        "Requests in progress, including handshakes that wait for their peers.",
        move || b.upgrade().map_or(0.0, |c| c.quotas.total() as f64),
    );
}

/// Scans the directory of keys periodically.
async fn watch(core: std::sync::Weak<EngineContext>, drain: DrainObserver) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(tenant_key_files::POLL_INTERVAL) => {}
            () = drain.forced() => return,
        }
        let Some(core) = core.upgrade() else { return };
        let polled =
            tokio::task::spawn_blocking(move || core.files.as_ref().map(TenantKeyFiles::poll))
                .await;
        if polled.is_err() {
            tracing::error!(
                "key server: reading the key folder panicked, which is a bug; the previous keys stay in use"
            );
        }
    }
}

/// Performs TLS on a connection that sends its first byte in time.
async fn accept_tls(
    stream: TcpStream,
    config: Arc<rustls::ServerConfig>,
) -> Result<TlsStream<TcpStream>, &'static str> {
    // Silent connections are the cheapest to make, and are recognized without the time of a
    // handshake.
    match tokio::time::timeout(FIRST_BYTE_TIMEOUT, stream.peek(&mut [0])).await {
        Ok(Ok(n)) if n > 0 => {}
        Ok(_) => return Err("handshake"),
        Err(_) => return Err("silent"),
    }
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(config).accept(stream)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => {
            tracing::info!(%error, "key server: a connection did not authenticate and is closed");
            Err("handshake")
        }
        Err(_) => Err("timeout"),
    }
}

/// Authenticates the requester of a connection, and serves its channel until the end.
async fn start_channel(
    listener_state: Arc<ListenerState>,
    stream: TcpStream,
    from: SocketAddr,
    drain: DrainWatcher,
) {
    let core = &listener_state.core;
    let Ok(permit) = listener_state.unauthenticated.take(from.ip()) else {
        return core.counts.unauthenticated("limit");
    };
    let Some(own) = core.provisioner.own_certificate() else {
        return core.counts.unauthenticated("no_certificate");
    };
    // A failure costs latency and nothing else.
    let _ = sys::tune(&stream);
    let (Ok(config), Some(verifier)) =
        (own.own_server_config(&[ALPN.to_vec()]), own.peer_verifier())
    else {
        return core.counts.unauthenticated("no_certificate");
    };
    let authenticated = tokio::select! {
        authenticated = accept_tls(stream, config) => authenticated,
        // A connection that has not authenticated gives way to newer ones.
        () = permit.revoked() => Err("displaced"),
    };
    let stream = match authenticated {
        Ok(stream) => stream,
        Err(reason) => return core.counts.unauthenticated(reason),
    };
    let peer = verifier.peer(
        PeerRole::Client,
        None,
        stream.get_ref().1.peer_certificates(),
    );
    let Some((caller, leaf)) = peer
        .ok()
        .and_then(|(identity, leaf)| Some((ChannelPeer::of(&identity)?, leaf)))
    else {
        return core.counts.unauthenticated("not_a_requester");
    };
    // A gateway belongs to no tenant, so it counts for the provider.
    let tenant = caller.tenant.as_ref().unwrap_or(&listener_state.provider);
    let (Some(_channel), Ok(_quota)) = (
        core.counts.channels.take(),
        listener_state
            .channel_quotas
            .take(tenant, &caller.requester, false),
    ) else {
        return core.counts.unauthenticated("limit");
    };
    // Further connections from this address no longer compete with those of unknown addresses.
    listener_state.unauthenticated.record_proof(from.ip());
    drop(permit);
    tracing::info!(requester = %caller.requester, %from, "key server: a requester opened a channel");
    let channel = RequesterChannel::new(core.clone(), caller.clone());
    let (until, mut trust_watch) = (leaf.not_after(), verifier.trust_watch(leaf));
    let (read, write) = tokio::io::split(stream);
    let writer = tokio::spawn(write_out(channel.clone(), write));
    let ended = tokio::select! {
        biased;
        // First, so that no further request of a revoked requester is processed.
        _ = trust_watch.wait_for_loss() => ChannelEndReason::Revoked,
        ended = read_in(&channel, read, until, &drain) => ended,
        () = drain.forced() => ChannelEndReason::Forced,
    };
    channel.clear();
    // The requester is gone or not trusted any more, so answers that are still queued have no
    // reader.
    writer.abort();
    core.counts.count_channel_end(ended);
    tracing::info!(requester = %caller.requester, reason = ?ended, "key server: a channel ended");
}

async fn read_in<IO: AsyncRead + AsyncWrite + Unpin>(
    channel: &Arc<RequesterChannel>,
    mut read: ReadHalf<IO>,
    not_after: SystemTime,
    drain: &DrainWatcher,
) -> ChannelEndReason {
    let mut buffer = BytesMut::with_capacity(READ_BYTES_MIN);
    let (mut drained, mut expired) = (false, false);
    let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
    // One sweep ends everything that is due, so sweeps that a stall delayed are not repeated.
    sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            read = read.read_buf(&mut buffer) => match read {
                Ok(n) if n > 0 => {}
                _ => return ChannelEndReason::Requester,
            },
            // Without open requests no deadline can pass. While the channel closes, each tick
            // checks below whether it is idle.
            _ = sweep.tick(), if channel.waits() => channel.sweep(),
            () = drain.draining(), if !drained => {
                drained = true;
                channel.close();
            }
            // An expired requester gets answers to open requests, but may not send new ones.
            () = until(not_after), if !expired => {
                expired = true;
                channel.close();
            }
        }
        loop {
            match split(&buffer) {
                Ok(Some((frame, length))) => {
                    channel.receive(frame);
                    buffer.advance(length);
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(%error, "key server: received a malformed frame; the channel is closed");
                    return ChannelEndReason::Malformed;
                }
            }
        }
        // Answers that the requester does not read would grow without a bound.
        if channel.full() {
            return ChannelEndReason::SlowReader;
        }
        // A channel that accepts nothing new ends once its requests have ended.
        if (drained || expired) && channel.idle() {
            return if drained {
                ChannelEndReason::Drained
            } else {
                ChannelEndReason::Expired
            };
        }
        // The buffer grows for a longer frame.
        buffer.reserve(READ_BYTES_MIN);
    }
}

/// Resolves at `time` by the wall clock, which may be set meanwhile.
async fn until(time: SystemTime) {
    while let Ok(left) = time.duration_since(SystemTime::now()) {
        if left.is_zero() {
            return;
        }
        // A clock that is set is noticed within a minute.
        tokio::time::sleep(left.min(Duration::from_secs(60))).await;
    }
}

/// Writes the responses. All that accumulate during one write go out together in the next.
async fn write_out<IO: AsyncRead + AsyncWrite + Unpin>(
    channel: Arc<RequesterChannel>,
    mut write: WriteHalf<IO>,
) {
    let mut bytes = SecretBuffer::new();
    loop {
        bytes = channel.take(bytes);
        if bytes.is_empty() {
            channel.wake.notified().await;
            continue;
        }
        let written = tokio::time::timeout(WRITE_TIMEOUT, async {
            write.write_all(&bytes).await?;
            write.flush().await
        });
        match written.await {
            Ok(Ok(())) => {}
            // The reader sees the end of the connection.
            _ => {
                let _ = write.shutdown().await;
                return;
            }
        }
    }
}

//! The key server: accepts channels, reads and writes their frames, and holds the parts together. It reads no configuration: its process feeds it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use bytes::{Buf, BytesMut};
use canal_kit::drain::{Drain, Watcher};
use canal_kit::keys::SecretBuffer;
use canal_kit::limits::show_shares_of;
use canal_kit::metrics::Registry;
use canal_kit::southbound::{RefusedResource, State};
use canal_kit::sys;
use canal_kit::tls::{HANDSHAKE_TIMEOUT, Role, TrustStore};
use canal_model::identity::{component_identity, components};
use canal_model::ids::TenantName;
use canal_model::principal::Principal;
use canal_model::program::{Kind, Resource};
use canal_model::trust::KeyAlgorithm;
use canal_wire::keyrpc::{ALPN, split};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::channel::{Channel, Core};
use crate::counts::{Counts, Ended};
use crate::files::{self, Files};
use crate::hardware;
use crate::key::Lane;
use crate::lanes::{LaneConfig, Lanes};
use crate::ledger::Ledger;
use crate::limits::{FIRST_BYTE_TIMEOUT, Shares};
use crate::provision::{Issue, Provisioner};
use crate::rights::{Caller, Claim, Rights};
use crate::unauthenticated::Unauthenticated;
use crate::vault::{Vault, VaultError};

/// How often a channel looks for handshakes whose time has run out.
const SWEEP: Duration = Duration::from_millis(50);
/// Bytes that are read at once, at least.
const READ: usize = 8 << 10;
/// What is written at once to a requester that reads.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// What the engine needs to know.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Who it is; a [`Principal::KeyServer`].
    pub principal: Principal,
    pub lanes: LaneConfig,
    pub shares: Shares,
    /// Keyless: the tenant's folder of keys.
    pub tls_dir: Option<PathBuf>,
}

/// Why the engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("{0} is no key server")]
    Principal(Principal),
    #[error("keys from files are a tenant's: give --tenant with --tls-dir")]
    Tenant,
    #[error("reading {0}: {1}")]
    Folder(PathBuf, std::io::Error),
    #[error("starting worker threads: {0}")]
    Threads(std::io::Error),
    #[error(transparent)]
    Vault(#[from] VaultError),
}

/// What channels share, and what those that are not yet one are held against.
struct Hall {
    core: Arc<Core>,
    /// Of channels. Gateways are the provider's, as one.
    doors: Ledger,
    provider: TenantName,
    /// Connections that have not proved who they are.
    unauthenticated: Unauthenticated,
    trust: TrustStore,
    registry: Registry,
}

/// A running key server. Clones share it.
#[derive(Clone)]
pub struct Engine {
    hall: Arc<Hall>,
}

impl Engine {
    /// Starts the threads and asks for the key server's own certificate, on the calling runtime. It takes no channels before [`Engine::serve`].
    pub fn start(config: EngineConfig, issue: Arc<dyn Issue>, registry: &Registry, drain: Watcher) -> Result<Self, EngineError> {
        let Principal::KeyServer { name, tenant, .. } = &config.principal else { return Err(EngineError::Principal(config.principal)) };
        let Some(identity) = component_identity(&config.principal) else { return Err(EngineError::Principal(config.principal)) };
        let vault = Arc::new(Vault::new()?);
        let files = match (&config.tls_dir, tenant) {
            (None, _) => None,
            (Some(_), None) => return Err(EngineError::Tenant),
            (Some(folder), Some(tenant)) => {
                let opened = Files::open(folder.clone(), tenant.clone(), vault.clone(), registry);
                Some(opened.map_err(|e| EngineError::Folder(folder.clone(), e))?)
            }
        };
        let (provider, domain) = components();
        let own = Claim { tenant: provider.clone(), trust_domain: domain, algorithm: KeyAlgorithm::EcdsaP256 };
        let trust = TrustStore::new(registry);
        let provisioner = Provisioner::start(issue, vault, trust.clone(), (identity, own), registry, drain.clone());
        let core = Arc::new(Core {
            rights: ArcSwap::default(),
            provisioner,
            files,
            lanes: Lanes::start(config.lanes, registry).map_err(EngineError::Threads)?,
            ledger: Ledger::new(config.shares),
            counts: Counts::new(registry, config.shares),
        });
        show(&core, registry);
        let ledger = core.ledger.clone();
        show_shares_of(registry, move || ledger.usage());
        if core.files.is_some() {
            tokio::spawn(watch(Arc::downgrade(&core), drain));
        }
        tracing::info!(%name, features = ?hardware::features(), "key server");
        let doors = Ledger::of_channels(config.shares.channels);
        let unauthenticated = Unauthenticated::new(registry);
        Ok(Self { hall: Arc::new(Hall { core, doors, provider, unauthenticated, trust, registry: registry.clone() }) })
    }

    /// Takes a whole state of tenants, bundles and entitlements; gives those that cannot be used. A closed tenant has no rights.
    pub fn apply(&self, state: &State) -> Vec<RefusedResource> {
        let refused = self.hall.trust.apply(state);
        let is_open = |r: &&Arc<Resource>| r.tenant().is_none_or(|tenant| !state.closed().contains_key(tenant));
        self.set_shares(state.of(Kind::Tenant));
        self.take(Rights::of(Rights::KINDS.iter().flat_map(|k| state.of(*k)).filter(is_open)));
        refused
    }

    /// [`Engine::apply`] with the resources alone.
    pub fn replace(&self, all: &[Arc<Resource>]) -> Result<(), String> {
        self.hall.trust.replace(all.iter().cloned())?;
        self.set_shares(all);
        self.take(Rights::of(all));
        Ok(())
    }

    /// Takes over what the provider wrote for tenants, closed ones among them: what they have under way still counts.
    fn set_shares<'a>(&self, all: impl IntoIterator<Item = &'a Arc<Resource>>) {
        let shares_of = |resource: &'a Arc<Resource>| match &**resource {
            Resource::Tenant(tenant) => Some((&tenant.name, &tenant.shares)),
            _ => None,
        };
        let tenants: Vec<_> = all.into_iter().filter_map(shares_of).collect();
        self.hall.registry.set_shares(tenants.iter().copied());
        self.hall.core.ledger.set_shares(tenants);
    }

    fn take(&self, rights: Rights) {
        let rights = Arc::new(rights);
        self.hall.core.rights.store(rights.clone());
        self.hall.core.provisioner.follow(&rights);
    }

    /// Whether requesters can be served: it can prove who it is.
    pub fn ready(&self) -> Result<(), String> {
        self.hall.core.provisioner.own().map(drop).ok_or_else(|| "no certificate of its own yet".into())
    }

    /// For `/config_dump`. No key, sealed or not, is in it.
    pub fn dump(&self) -> serde_json::Value {
        serde_json::json!({
            "hardware": hardware::features(),
            "tenants": self.hall.core.rights.load().dump(),
            "keys": self.hall.core.provisioner.status(),
            "files": self.hall.core.files.as_ref().map(Files::status),
            "under_way": self.hall.core.ledger.total(),
            "queued": { "ecdsa": self.hall.core.lanes.depth(Lane::Ecdsa), "rsa": self.hall.core.lanes.depth(Lane::Rsa) },
        })
    }

    /// Accepts channels until `drain` says so; what is under way on them then may end, and they with it.
    pub async fn serve(&self, listener: TcpListener, drain: Drain) {
        loop {
            let accepted = tokio::select! {
                biased;
                () = drain.draining() => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, from)) => {
                    let (hall, drain) = (self.hall.clone(), drain.clone());
                    tokio::spawn(async move { welcome(hall, stream, from, drain).await });
                }
                Err(error) => {
                    self.hall.core.counts.stranger("accept");
                    tracing::warn!(%error, "accepting a channel");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
}

fn show(core: &Arc<Core>, registry: &Registry) {
    let (a, b) = (Arc::downgrade(core), Arc::downgrade(core));
    registry.probe("canal_key_files_held", "Keys from files in use.", move || {
        a.upgrade().and_then(|c| c.files.as_ref().map(Files::count)).unwrap_or_default() as f64
    });
    registry.probe("canal_key_under_way", "Requests under way, handshakes that wait for their peers included.", move || {
        b.upgrade().map_or(0.0, |c| c.ledger.total() as f64)
    });
}

/// Looks at the folder of keys again and again.
async fn watch(core: std::sync::Weak<Core>, drain: Watcher) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(files::LOOK) => {}
            () = drain.forced() => return,
        }
        let Some(core) = core.upgrade() else { return };
        let looked = tokio::task::spawn_blocking(move || core.files.as_ref().map(Files::look)).await;
        if looked.is_err() {
            tracing::error!("looking at the folder of keys failed");
        }
    }
}

/// TLS on a connection that says something in time.
async fn greet(stream: TcpStream, config: Arc<rustls::ServerConfig>) -> Result<TlsStream<TcpStream>, &'static str> {
    // The silent are the cheapest to make, and need no handshake's time to be known.
    match tokio::time::timeout(FIRST_BYTE_TIMEOUT, stream.peek(&mut [0])).await {
        Ok(Ok(n)) if n > 0 => {}
        Ok(_) => return Err("handshake"),
        Err(_) => return Err("silent"),
    }
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(config).accept(stream)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => {
            tracing::info!(%error, "a connection proved nothing");
            Err("handshake")
        }
        Err(_) => Err("timeout"),
    }
}

/// A connection proves whose channel it is.
async fn welcome(hall: Arc<Hall>, stream: TcpStream, from: SocketAddr, drain: Drain) {
    let core = &hall.core;
    let Ok(permit) = hall.unauthenticated.take(from.ip()) else { return core.counts.stranger("limit") };
    let Some(own) = core.provisioner.own() else { return core.counts.stranger("no_certificate") };
    // Costs latency and nothing else.
    let _ = sys::tune(&stream);
    let (Ok(config), Some(judge)) = (own.own_server_config(&[ALPN.to_vec()]), own.judge()) else {
        return core.counts.stranger("no_certificate");
    };
    let greeted = tokio::select! {
        greeted = greet(stream, config) => greeted,
        () = permit.revoked() => Err("gave_way"),
    };
    let stream = match greeted {
        Ok(stream) => stream,
        Err(reason) => return core.counts.stranger(reason),
    };
    let peer = judge.peer(Role::Client, None, stream.get_ref().1.peer_certificates());
    let Some((caller, leaf)) = peer.ok().and_then(|(identity, leaf)| Some((Caller::of(&identity)?, leaf))) else {
        return core.counts.stranger("not_a_requester");
    };
    let tenant = caller.tenant.as_ref().unwrap_or(&hall.provider);
    let (Some(_held), Ok(_door)) = (core.counts.channels.take(), hall.doors.take(tenant, &caller.requester, false)) else {
        return core.counts.stranger("limit");
    };
    hall.unauthenticated.record_proof(from.ip());
    drop(permit);
    tracing::info!(requester = %caller.requester, %from, "channel open");
    let channel = Channel::new(core.clone(), caller.clone());
    let (until, mut standing) = (leaf.not_after(), judge.standing(leaf));
    let (read, write) = tokio::io::split(stream);
    let writer = tokio::spawn(write_out(channel.clone(), write));
    let ended = tokio::select! {
        biased;
        // Before another request of theirs.
        _ = standing.fallen() => Ended::Revoked,
        ended = read_in(&channel, read, until, &drain) => ended,
        () = drain.forced() => Ended::Forced,
    };
    channel.clear();
    writer.abort();
    core.counts.ended(ended);
    tracing::info!(requester = %caller.requester, reason = ?ended, "channel closed");
}

async fn read_in<IO: AsyncRead + AsyncWrite + Unpin>(
    channel: &Arc<Channel>,
    mut read: ReadHalf<IO>,
    not_after: SystemTime,
    drain: &Drain,
) -> Ended {
    let mut buffer = BytesMut::with_capacity(READ);
    let (mut drained, mut expired) = (false, false);
    let mut sweep = tokio::time::interval(SWEEP);
    sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            read = read.read_buf(&mut buffer) => match read {
                Ok(n) if n > 0 => {}
                _ => return Ended::Requester,
            },
            _ = sweep.tick(), if channel.waits() => channel.sweep(),
            () = drain.draining(), if !drained => {
                drained = true;
                channel.close();
            }
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
                    tracing::warn!(%error, "the channel is closed");
                    return Ended::Malformed;
                }
            }
        }
        if channel.full() {
            return Ended::SlowReader;
        }
        if (drained || expired) && channel.idle() {
            return if drained { Ended::Drained } else { Ended::Expired };
        }
        // A frame that is longer has the buffer grow.
        buffer.reserve(READ);
    }
}

/// Resolves at `time` by the wall clock, which may be set while one waits.
async fn until(time: SystemTime) {
    while let Ok(left) = time.duration_since(SystemTime::now()) {
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(Duration::from_secs(60))).await;
    }
}

/// Writes what is to be said, all that gathered during the last write at once.
async fn write_out<IO: AsyncRead + AsyncWrite + Unpin>(channel: Arc<Channel>, mut write: WriteHalf<IO>) {
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

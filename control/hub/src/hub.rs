//! Puts the controller together: opens what must be open, reads all sources once, and only then listens.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use canal_authority::{Infra, InfraError};
use canal_model::share::Shares;
use canal_sources::{Watch, WatchError};
use canal_store::{Store, StoreError, StoreKey};
use canal_wire::api::admin_server::AdminServer;
use canal_wire::citadel::istio_certificate_service_server::IstioCertificateServiceServer;
use canal_wire::discovery::aggregated_discovery_service_server::AggregatedDiscoveryServiceServer;
use canal_wire::fleet::fleet_server::FleetServer;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;

use crate::admin::AdminService;
use crate::admission::{self, Sources};
use crate::catalog::Catalog;
use crate::certificates::Certificates;
use crate::changes::Changes;
use crate::doors::{self, Door, DoorListener};
use crate::fetch::Client;
use crate::files::{self, Reading};
use crate::fleet::{Fleet, FleetService, FleetTimes, Keeper};
use crate::jwks::{self, JwksOptions, Origin};
use crate::listener::{CONNECTIONS_MAX, FILES_RESERVED, HANDSHAKE, ListenError, Listener, UNAUTHENTICATED_MAX};
use crate::metrics::Metrics;
use crate::prepare::{Basis, Preparer};
use crate::principals::{self, Principals, PrincipalsError};
use crate::session::SessionLimits;
use crate::shared::{ServiceLimits, Shared, now_seconds};
use crate::shares::{COMPILED_BYTES_MAX, CONFIGURATION_BYTES_MAX, QUEUED_CHANGE_BYTES_MAX, QUEUED_CHANGES_MAX, TenantLimits};
use crate::southbound::Southbound;
use crate::subscribers::{self, STREAMS_MAX, Subscribers};
use crate::trust::{self, CertificateRate, ISSUED_MAX, PROVIDER_RATE, TENANT_RATE, Trust, TrustOptions};
use crate::writer::{COMMANDS_MAX, Command, Commit, Voice, Writer};

/// See [`Limits::request_bytes`].
pub const REQUEST_BYTES_MAX: usize = 64 << 20;
/// PING to a silent client, and how long its answer may take: a half-open connection is found within half a minute.
const PING: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(20));
/// Roots for https, where Debian and most others keep them.
const TLS_ROOTS: &str = "/etc/ssl/certs/ca-certificates.crt";
/// How often what the store refused is tried again.
const RETRY_EVERY: Duration = Duration::from_secs(5);
/// How long open requests get when the controller stops.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// How the controller is to run.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where data planes and operators connect; port 0 chooses one.
    pub listen: SocketAddr,
    /// The admin port; keep it on localhost. `/config_dump` is on [`crate::ADMIN_SOCKET_NAME`] in the store's folder only.
    pub admin: Option<SocketAddr>,
    /// The metrics port.
    pub metrics: Option<SocketAddr>,
    /// The store's folder.
    pub data_dir: PathBuf,
    /// One folder per tenant with its YAML; `None`: only the API is a source.
    pub config_dir: Option<PathBuf>,
    /// Who may connect.
    pub principals: PathBuf,
    /// The controller's own authority.
    pub infra_dir: PathBuf,
    /// Life of workload certificates, seconds.
    pub svid_seconds: u64,
    /// Of tenants' authorities.
    pub trust: TrustOptions,
    /// Of key sets.
    pub jwks: JwksOptions,
    /// How much of everything.
    pub limits: Limits,
}

/// The hub's limits; the defaults are the constants of this crate and of the store.
#[derive(Debug, Clone)]
pub struct Limits {
    /// See [`canal_store::Limits`].
    pub store: canal_store::Limits,
    /// See [`crate::STREAMS_MAX`].
    pub streams: usize,
    /// See [`crate::CONNECTIONS_MAX`].
    pub connections: usize,
    /// See [`crate::NAMES_MAX`].
    pub names: usize,
    /// See [`crate::RESPONSE_BYTES_MAX`].
    pub response_bytes: usize,
    /// See [`crate::NACK_SPLITS_MAX`].
    pub nack_splits: usize,
    /// Bytes of one request: an Apply with many files, or a first request of a subscriber that holds a great deal.
    pub request_bytes: usize,
    /// A connection without a request that has a valid token is cut after so long.
    pub handshake: Duration,
    /// See [`crate::ISSUED_MAX`].
    pub issued: usize,
    /// How long silence of edges and replicas is borne.
    pub fleet: FleetTimes,
    /// The most changes of all tenants that wait; the default is [`crate::QUEUED_CHANGES_MAX`].
    pub queued_changes: u64,
    /// The most bytes of changes that wait; the default is [`crate::QUEUED_CHANGE_BYTES_MAX`].
    pub queued_change_bytes: u64,
    /// The most bytes of objects in the store; the default is [`crate::CONFIGURATION_BYTES_MAX`].
    pub configuration_bytes: u64,
    /// The most bytes of compiled resources; the default is [`crate::COMPILED_BYTES_MAX`].
    pub compiled_bytes: u64,
    /// So many changes are compiled at once, and as many dry runs, each of another tenant.
    pub compile_workers: usize,
    /// The shares of tenants for which the provider wrote none.
    pub shares: Shares,
    /// The most connections that have not sent a valid token; the default is [`crate::UNAUTHENTICATED_MAX`].
    pub unauthenticated: usize,
    /// How fast one data plane of a tenant may ask for certificates; the default is [`crate::TENANT_RATE`].
    pub tenant_rate: CertificateRate,
    /// How fast one component of the provider may ask for certificates; the default is [`crate::PROVIDER_RATE`].
    pub provider_rate: CertificateRate,
    /// An HTTP/2 PING goes to a silent client so often, and must be answered within so long.
    pub ping: (Duration, Duration),
}

impl Default for Limits {
    fn default() -> Self {
        let session = SessionLimits::default();
        Self {
            store: canal_store::Limits::default(),
            streams: STREAMS_MAX,
            connections: CONNECTIONS_MAX,
            names: session.names,
            response_bytes: session.response_bytes,
            nack_splits: session.nack_splits,
            request_bytes: REQUEST_BYTES_MAX,
            handshake: HANDSHAKE,
            issued: ISSUED_MAX,
            fleet: FleetTimes::default(),
            ping: PING,
            queued_changes: QUEUED_CHANGES_MAX,
            queued_change_bytes: QUEUED_CHANGE_BYTES_MAX,
            configuration_bytes: CONFIGURATION_BYTES_MAX,
            compiled_bytes: COMPILED_BYTES_MAX,
            // Two at least, so that one tenant's never holds up all others.
            compile_workers: std::thread::available_parallelism().map_or(2, |n| n.get().max(2)),
            shares: Shares::default(),
            unauthenticated: UNAUTHENTICATED_MAX,
            tenant_rate: TENANT_RATE,
            provider_rate: PROVIDER_RATE,
        }
    }
}

impl Limits {
    /// The same limits for a process that may have `files` open files: connections leave [`FILES_RESERVED`] of them alone.
    pub fn within(mut self, files: u64) -> Self {
        let most = usize::try_from(files.saturating_sub(FILES_RESERVED)).unwrap_or(usize::MAX).max(2);
        if self.connections.saturating_add(self.unauthenticated) > most {
            self.unauthenticated = self.unauthenticated.min(most / 4).max(1);
            self.connections = most - self.unauthenticated;
        }
        self
    }
}

/// Why the controller did not start.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The controller's own certificate.
    #[error(transparent)]
    Infra(#[from] InfraError),
    /// Roots for https.
    #[error("--tls-roots: {0}")]
    Tls(#[from] rustls::Error),
    /// A port.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Who may connect.
    #[error(transparent)]
    Principals(#[from] PrincipalsError),
    /// The configuration directory.
    #[error("--config-dir: {0}")]
    Sources(#[from] WatchError),
    /// The operating system refused something small.
    #[error("the controller cannot start: {0}")]
    Io(#[from] io::Error),
}

/// A running controller.
pub struct Hub {
    shared: Arc<Shared>,
    tasks: TaskTracker,
    writer: Option<JoinHandle<()>>,
    address: SocketAddr,
    admin: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
}

/// Seals the controller's own root as the store's keys are sealed.
struct InfraSealer<'k>(&'k StoreKey);

/// Where the root's key belongs: a sealed key opens in its own place only.
const INFRA_PLACE: &str = "infra/root.key";

impl canal_authority::KeySealer for InfraSealer<'_> {
    fn seal(&self, plain: &[u8]) -> Result<Vec<u8>, String> {
        self.0.seal(plain, INFRA_PLACE).map_err(|e| e.to_string())
    }
    fn unseal(&self, sealed: &[u8]) -> Result<zeroize::Zeroizing<Vec<u8>>, String> {
        self.0.unseal(sealed, INFRA_PLACE).map_err(|e| e.to_string())
    }
}

/// The periodic work that needs nothing but the shared state.
fn own_work(shared: &Arc<Shared>) -> Vec<Task> {
    vec![
        Box::pin(subscribers::follow(shared.subscribers.clone(), shared.principals.clone())),
        Box::pin(retry(shared.clone())),
        Box::pin(trust::turn(shared.clone())),
        Box::pin(tell_trust(shared.clone())),
    ]
}

/// Opens the root of Canal's own components, sealed where the store has a key.
fn open_infra(config: &Config, key: Option<&StoreKey>) -> Result<Infra, InfraError> {
    let sealer = key.map(InfraSealer);
    let sealer = sealer.as_ref().map(|sealer| sealer as &dyn canal_authority::KeySealer);
    Infra::open_sealed(&config.infra_dir, now_seconds(), sealer)
}

impl Hub {
    /// Starts on the calling runtime. When it returns, all sources were read and the ports are open.
    ///
    /// # Errors
    /// A [`HubError`] that says what to change.
    pub async fn start(config: Config) -> Result<Self, HubError> {
        let key = config.trust.key_file.as_deref().map(StoreKey::read).transpose()?;
        let infra = Arc::new(open_infra(&config, key.as_ref())?);
        let store = Arc::new(Store::open_with(&config.data_dir, config.limits.store, key)?);
        let parts = infra.of_components().map_err(|e| InfraError::Signing(e.to_string()))?;
        let first = first_principals(&config.principals)?;
        let listener = Listener::bind(config.listen, infra, &config.limits).await?;
        let socket = doors::bind_socket(&config.data_dir)?;
        let admin = door(config.admin, "--admin-addr").await?;
        let metrics_door = door(config.metrics, "--metrics-addr").await?;

        let metrics = Arc::new(Metrics::default());
        let fleet = Fleet::open(&store, config.limits.fleet)?;
        let client = Client::of_file(config.trust.tls_roots.as_deref().unwrap_or(Path::new(TLS_ROOTS)))?;
        let tenant_limits = Arc::new(TenantLimits::new(&config.limits));
        let trust =
            Arc::new(Trust::open(store.clone(), metrics.clone(), parts, &config.trust, &client, tenant_limits.certificates.clone())?);
        let (publish, _) = watch::channel(Arc::new(Catalog::default()));
        let (commands, queue) = mpsc::channel(COMMANDS_MAX);
        let (commits, ready) = mpsc::channel(COMMANDS_MAX);
        let preparer = Arc::new(Preparer { store: store.clone(), metrics: metrics.clone(), limits: tenant_limits.clone() });
        let (basis, prepared_against) = watch::channel(Arc::new(Basis::default()));
        let (principals_now, principals) = watch::channel(Arc::new(first));
        let (watch, reading) = first_reading(config.config_dir.as_deref()).await?;
        let shared = Arc::new(Shared {
            catalog: publish,
            principals,
            store,
            trust,
            subscribers: Subscribers::new(tenant_limits.streams.clone()),
            fleet,
            metrics,
            changes: Changes::new(preparer.clone(), prepared_against, commits, config.limits.compile_workers),
            tenant_limits,
            commands,
            limits: service_limits(&config),
            sources: Mutex::default(),
            stopping: CancellationToken::new(),
        });
        shared.note_findings(&reading);
        let (writer, had) = start_writer(&shared, &preparer, basis, reading, (queue, ready))?;
        let keeper = first_plan(&shared).await;
        let origin = Origin { client, options: Arc::new(config.jwks), config_dir: config.config_dir.clone().map(Arc::new) };
        let mut work = own_work(&shared);
        work.push(Box::pin(principals::follow(config.principals.clone(), principals_now)));
        work.push(Box::pin(keeper.run()));
        work.push(Box::pin(jwks::follow(shared.clone(), origin, had)));
        if let (Some(watch), Some(root)) = (watch, config.config_dir) {
            work.push(Box::pin(files::follow(watch, root, shared.clone())));
        }
        let tasks = spawned(&shared, work);
        let hub = Self {
            address: listener.address()?,
            admin: admin.as_ref().map(TcpListener::local_addr).transpose()?,
            metrics: metrics_door.as_ref().map(TcpListener::local_addr).transpose()?,
            shared: shared.clone(),
            tasks: tasks.clone(),
            writer: Some(writer),
        };
        tasks.spawn(doors::serve(socket, Door::Socket, shared.clone()));
        for (door, which) in [(admin, Door::Admin), (metrics_door, Door::Metrics)] {
            door.map(|door| tasks.spawn(doors::serve(DoorListener::Tcp(door), which, shared.clone())));
        }
        tasks.spawn(serve(listener, shared, config.limits));
        Ok(hub)
    }

    /// Where data planes and operators connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The admin port.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin
    }

    /// The metrics port.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics
    }

    /// Ends all streams, lets open requests finish for a moment, and settles the store.
    pub async fn stop(mut self) {
        self.shared.stopping.cancel();
        self.tasks.close();
        if tokio::time::timeout(STOP_GRACE, self.tasks.wait()).await.is_err() {
            tracing::warn!("some connections did not end in time and are cut");
        }
        if let Err(e) = self.shared.store.settle() {
            tracing::warn!(error = %e, "the generation counter will have a gap");
        }
        let writer = self.writer.take();
        // The last sender goes with `shared`; a request still open holds one more until the runtime ends.
        drop(self.shared);
        if let Some(writer) = writer.filter(JoinHandle::is_finished)
            && writer.join().is_err()
        {
            tracing::error!("the writer had ended by a panic");
        }
    }
}

fn first_principals(path: &Path) -> Result<Principals, PrincipalsError> {
    let first = Principals::read(path)?;
    if first.is_empty() {
        tracing::warn!(path = %path.display(), "the principals file is empty, so nobody can connect");
    }
    Ok(first)
}

/// The fleet's task, after its first plan was told.
async fn first_plan(shared: &Arc<Shared>) -> Keeper {
    let mut keeper = Keeper::new(shared.clone());
    if !keeper.begin().await {
        tracing::warn!("the fleet's tables are not in force yet; they are tried again");
    }
    keeper
}

/// Starts the one writer; the key sets that it took up from the store.
fn start_writer(
    shared: &Arc<Shared>,
    preparer: &Preparer,
    basis: watch::Sender<Arc<Basis>>,
    reading: Reading,
    (commands, commits): (mpsc::Receiver<Command>, mpsc::Receiver<Commit>),
) -> Result<(JoinHandle<()>, BTreeSet<jwks::Place>), HubError> {
    let sets = shared.store.jwks()?;
    let had = sets.iter().map(|(tenant, uri, _)| (tenant.clone(), uri.clone())).collect();
    let voice = Voice { publish: shared.catalog.clone(), basis, trust: shared.trust.clone() };
    let writer = Writer::start(preparer, voice, reading, sets)?;
    let thread = std::thread::Builder::new().name("canal-writer".into()).spawn(move || {
        if let Err(e) = writer.run(commands, commits) {
            tracing::error!(error = %e, "the writer could not begin");
        }
    })?;
    Ok((thread, had))
}

/// All of `work`, each until the controller stops.
fn spawned(shared: &Shared, work: Vec<Task>) -> TaskTracker {
    let tasks = TaskTracker::new();
    for task in work {
        tasks.spawn(shared.stopping.clone().run_until_cancelled_owned(task));
    }
    tasks
}

/// Reads all files once, before anyone can connect.
async fn first_reading(root: Option<&Path>) -> Result<(Option<Watch>, Reading), HubError> {
    let Some(root) = root else { return Ok((None, Reading::default())) };
    let mut watch = Watch::open(root)?;
    let scan = watch.next().await.unwrap_or_default();
    Ok((Some(watch), Reading::of(scan, root)))
}

type Task = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

async fn door(address: Option<SocketAddr>, flag: &'static str) -> Result<Option<TcpListener>, ListenError> {
    match address {
        Some(address) => Ok(Some(doors::bind(address, flag).await?)),
        None => Ok(None),
    }
}

fn service_limits(config: &Config) -> ServiceLimits {
    let Limits { names, response_bytes, nack_splits, tenant_rate, provider_rate, .. } = config.limits;
    let session = SessionLimits { names, response_bytes, nack_splits, ..SessionLimits::default() };
    ServiceLimits { session, svid_seconds: config.svid_seconds, tenant_rate, provider_rate }
}

/// Has the writer say what changed of the tenants' trust.
async fn tell_trust(shared: Arc<Shared>) {
    loop {
        shared.trust.changed().await;
        if shared.commands.send(Command::Trust).await.is_err() {
            return;
        }
    }
}

async fn retry(shared: Arc<Shared>) {
    loop {
        tokio::time::sleep(RETRY_EVERY).await;
        shared.changes.try_again(None);
        if shared.commands.send(Command::Retry).await.is_err() {
            return;
        }
    }
}

async fn serve(listener: Listener, shared: Arc<Shared>, limits: Limits) {
    let (sender, connections) = mpsc::channel(1);
    // Built once before the first connection is accepted.
    let catalogs = shared.catalog.subscribe();
    let (sources_now, sources) = watch::channel(Arc::new(Sources::of(&catalogs.borrow().clone())));
    tokio::spawn(admission::follow(catalogs, sources_now));
    let accounts = (shared.tenant_limits.clone(), sources);
    tokio::spawn(listener.run(sender, shared.metrics.clone(), accounts, shared.stopping.clone()));
    let admin = AdminServer::new(AdminService { shared: shared.clone() })
        .max_decoding_message_size(limits.request_bytes)
        .max_encoding_message_size(canal_wire::MESSAGE_BYTES_MAX);
    let southbound = AggregatedDiscoveryServiceServer::new(Southbound { shared: shared.clone() })
        .max_decoding_message_size(limits.request_bytes)
        .max_encoding_message_size(canal_wire::MESSAGE_BYTES_MAX);
    let certificates = IstioCertificateServiceServer::new(Certificates { shared: shared.clone() });
    let fleet = FleetServer::new(FleetService { shared: shared.clone() }).max_decoding_message_size(limits.request_bytes);
    let server = Server::builder()
        .http2_keepalive_interval(Some(limits.ping.0))
        .http2_keepalive_timeout(Some(limits.ping.1))
        .add_service(InterceptedService::new(southbound, shared.door()))
        .add_service(InterceptedService::new(certificates, shared.door()))
        .add_service(InterceptedService::new(fleet, shared.door()))
        .add_service(InterceptedService::new(admin, shared.door()));
    let stopping = shared.stopping.clone();
    let done = server.serve_with_incoming_shutdown(ReceiverStream::new(connections), async move { stopping.cancelled().await });
    if let Err(e) = done.await {
        tracing::error!(error = %e, "the server ended");
    }
}

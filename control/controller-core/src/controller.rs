//! Starts the controller: it binds the ports, reads all sources once, and only then serves. It
//! decides nothing about policy. Start at [`Controller::start`].

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use canal_access::Principals;
use canal_access::principals::{self, PrincipalsError};
use canal_catalog::{Catalog, PolicyOrigin};
use canal_fleet::{FleetReconciler, ReconcilerContext, TierUpdate};
use canal_policy_sources::{Basis, Commit, PendingChanges, Preparer, SourceUpdate, files};
use canal_sources::DirectoryWatch;
use canal_southbound::subscribers;
use canal_store::Store;
use canal_trust::jwks::{self, JwksContext, JwksRef, JwksSource, KeySetUpdate};
use canal_trust::{MaintenanceContext, TrustAuthorities, run_maintenance};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{ControllerConfig, ControllerError};
use crate::parts::{ControllerParts, OpenedFiles};
use crate::servers::{self, ControllerPorts};
use crate::writer::{CatalogPublisher, CatalogWriter, QUEUE_MAX, WriterCommand, WriterQueues};

/// Interval between retries of what the store refused.
/// What the store refused waits in memory meanwhile. A full disk lasts longer than that. Nobody
/// measured this value.
const RETRY_EVERY: Duration = Duration::from_secs(5);
/// Time that open requests get to finish when the controller stops.
/// Streams end at once when the controller stops, so that only single requests need it.
/// A change that is still being compiled then ends without an acknowledgment, so that its client
/// has to repeat it.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// Maximum number of fetched key sets that wait to be taken over.
/// `take_key_sets` hands each to a task of its own, so that few ever wait.
const KEY_SETS_WAITING_MAX: usize = 64;

/// The queues to the catalog writer, and its publications.
struct WriterChannels {
    publish: watch::Sender<Arc<Catalog>>,
    basis: watch::Sender<Arc<Basis>>,
    commands: mpsc::Sender<WriterCommand>,
    tiers: mpsc::Sender<TierUpdate>,
    queues: WriterQueues,
}

impl WriterChannels {
    /// Creates the channels. The other two are for the change queue: what changes are prepared
    /// against, and where they are committed.
    fn new() -> (Self, watch::Receiver<Arc<Basis>>, mpsc::Sender<Commit>) {
        let (publish, _) = watch::channel(Arc::new(Catalog::default()));
        let (basis, prepared_against) = watch::channel(Arc::new(Basis::default()));
        let (commands, waiting_commands) = mpsc::channel(QUEUE_MAX);
        let (tiers, waiting_tiers) = mpsc::channel(QUEUE_MAX);
        let (commits, waiting_commits) = mpsc::channel(QUEUE_MAX);
        let queues = WriterQueues {
            commands: waiting_commands,
            tiers: waiting_tiers,
            commits: waiting_commits,
        };
        (
            Self {
                publish,
                basis,
                commands,
                tiers,
                queues,
            },
            prepared_against,
            commits,
        )
    }
}

/// A running controller; [`Controller::stop`] ends it.
pub struct Controller {
    store: Arc<Store>,
    stopping: CancellationToken,
    tasks: TaskTracker,
    writer: Option<JoinHandle<()>>,
    /// Keeps the last catalog readable, should the writer end by a fault.
    _publish: watch::Sender<Arc<Catalog>>,
    address: SocketAddr,
    admin: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
}

impl Controller {
    /// Starts the controller on the calling runtime. When it returns, all sources have been read
    /// and the ports are open.
    ///
    /// # Errors
    /// A [`ControllerError`] that states what to change.
    pub async fn start(config: ControllerConfig) -> Result<Self, ControllerError> {
        let opened = OpenedFiles::open(&config)?;
        let (principals_now, principals) =
            watch::channel(Arc::new(first_principals(&config.principals)?));
        // The ports are only bound here. They are served last, when the catalog has all sources.
        let ports = ControllerPorts::bind(&config, opened.infra.clone()).await?;
        let (channels, basis, commits) = WriterChannels::new();
        let WriterChannels {
            publish,
            basis: basis_now,
            commands,
            tiers,
            queues,
        } = channels;
        let (parts, preparer) = ControllerParts::build(
            &config,
            &opened,
            publish.subscribe(),
            principals,
            (basis, commits),
        )?;
        let (watch, first) = first_reading(config.config_dir.as_deref()).await?;
        parts.health.record(&first);
        let publisher = CatalogPublisher {
            publish: publish.clone(),
            basis: basis_now,
            trust: parts.trust.clone(),
        };
        let workers = config.limits.compile_workers;
        let (writer, stored_sets) = start_writer(&preparer, publisher, first, queues, workers)?;
        // After the writer, because this waits until the writer has published the first plan.
        let reconciler = first_plan(&parts, tiers).await;

        let (updates, key_sets) = mpsc::channel(KEY_SETS_WAITING_MAX);
        let jwks_context = JwksContext {
            catalog: parts.catalog.clone(),
            store: parts.store.clone(),
            metrics: parts.metrics.clone(),
            updates,
        };
        let jwks_source = JwksSource {
            client: opened.client,
            options: Arc::new(config.jwks),
            config_dir: config.config_dir.clone().map(Arc::new),
        };
        let mut work = own_work(&parts, commands);
        work.push(Box::pin(principals::follow(
            config.principals,
            principals_now,
        )));
        work.push(Box::pin(reconciler.run()));
        work.push(Box::pin(jwks::follow(
            jwks_context,
            jwks_source,
            stored_sets,
        )));
        work.push(Box::pin(take_key_sets(parts.changes.clone(), key_sets)));
        // Without a configuration directory, all objects are applied ones.
        if let Some((watch, root)) = watch.zip(config.config_dir) {
            let (changes, health, metrics) = (
                parts.changes.clone(),
                parts.health.clone(),
                parts.metrics.clone(),
            );
            work.push(Box::pin(files::follow(
                watch, root, changes, health, metrics,
            )));
        }
        let tasks = TaskTracker::new();
        for task in work {
            tasks.spawn(parts.stopping.clone().run_until_cancelled_owned(task));
        }
        let controller = Self {
            store: parts.store.clone(),
            stopping: parts.stopping.clone(),
            tasks: tasks.clone(),
            writer: Some(writer),
            _publish: publish,
            address: ports.address()?,
            admin: ports.admin_address()?,
            metrics: ports.metrics_address()?,
        };
        servers::spawn(&tasks, ports, parts, &config.limits, config.svid_seconds);
        Ok(controller)
    }

    /// Returns the address to which data planes and operators connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the address of the admin port, if there is one.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin
    }

    /// Returns the address of the metrics port, if there is one.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics
    }

    /// Ends all streams, gives open requests a moment to finish, and settles the store.
    pub async fn stop(mut self) {
        self.stopping.cancel();
        self.tasks.close();
        if tokio::time::timeout(STOP_GRACE, self.tasks.wait())
            .await
            .is_err()
        {
            tracing::warn!("controller: some connections did not end in time; closing them");
        }
        if let Err(e) = self.store.settle() {
            tracing::warn!(error = %e, "controller: could not release the unused generations; the generation counter will have a gap");
        }
        // The writer ends when the last sender is dropped. An open request holds one until the
        // runtime ends.
        let writer = self.writer.take();
        if let Some(writer) = writer.filter(JoinHandle::is_finished)
            && writer.join().is_err()
        {
            tracing::error!(
                "controller: the catalog writer panicked, which is a bug; fix: report it"
            );
        }
    }
}

type Task = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

/// Returns the background tasks that need only [`ControllerParts`], and the queue of commands to
/// the writer.
fn own_work(parts: &ControllerParts, commands: mpsc::Sender<WriterCommand>) -> Vec<Task> {
    let maintenance = MaintenanceContext {
        trust: parts.trust.clone(),
        catalog: parts.catalog.clone(),
        principals: parts.clients.principals(),
        subscribers: parts.subscribers.clone(),
        metrics: parts.metrics.clone(),
    };
    vec![
        Box::pin(subscribers::follow(
            parts.subscribers.clone(),
            parts.clients.principals(),
        )),
        Box::pin(retry(parts.changes.clone(), commands.clone())),
        Box::pin(run_maintenance(Arc::new(maintenance))),
        Box::pin(publish_trust(parts.trust.clone(), commands)),
    ]
}

fn first_principals(path: &Path) -> Result<Principals, PrincipalsError> {
    let first = Principals::read(path)?;
    if first.is_empty() {
        tracing::warn!(path = %path.display(), "controller: the principals file is empty, so every connection is refused; fix: add the data planes and operators to it");
    }
    Ok(first)
}

/// Creates the fleet reconciler and publishes its first plan.
async fn first_plan(parts: &ControllerParts, tiers: mpsc::Sender<TierUpdate>) -> FleetReconciler {
    let context = ReconcilerContext {
        fleet: parts.fleet.clone(),
        catalog: parts.catalog.clone(),
        store: parts.store.clone(),
        metrics: parts.metrics.clone(),
        updates: tiers,
    };
    let mut reconciler = FleetReconciler::new(context);
    if !reconciler.begin().await {
        tracing::warn!("controller: the first plan of the fleet is not in force yet; retrying");
    }
    reconciler
}

/// Starts the catalog writer's thread. Returns it together with the key sets that the writer loaded
/// from the store.
fn start_writer(
    preparer: &Arc<Preparer>,
    publisher: CatalogPublisher,
    first: SourceUpdate,
    queues: WriterQueues,
    workers: usize,
) -> Result<(JoinHandle<()>, BTreeSet<JwksRef>), ControllerError> {
    let sets = preparer.store.jwks()?;
    let stored = sets
        .iter()
        .map(|(tenant, uri, _)| (tenant.clone(), uri.clone()))
        .collect();
    let writer = CatalogWriter::start(preparer, publisher, first, sets, workers)?;
    let thread = std::thread::Builder::new()
        .name("canal-writer".into())
        .spawn(move || {
            if let Err(e) = writer.run(queues) {
                tracing::error!(error = %e, "controller: the catalog writer could not start, so no change is applied; fix: repair the cause and restart the controller");
            }
        })?;
    Ok((thread, stored))
}

/// Reads all files once, before any client can connect.
async fn first_reading(
    root: Option<&Path>,
) -> Result<(Option<DirectoryWatch>, SourceUpdate), ControllerError> {
    let Some(root) = root else {
        return Ok((None, SourceUpdate::nothing(PolicyOrigin::Files)));
    };
    let mut watch = DirectoryWatch::open(root)?;
    let scan = watch.next().await.unwrap_or_default();
    Ok((Some(watch), files::update_of(scan, root)))
}

/// Has the catalog writer publish changes of the tenants' trust.
async fn publish_trust(trust: Arc<TrustAuthorities>, commands: mpsc::Sender<WriterCommand>) {
    loop {
        trust.changed().await;
        if commands.send(WriterCommand::Trust).await.is_err() {
            return;
        }
    }
}

/// Periodically retries what the store refused.
async fn retry(changes: Arc<PendingChanges>, commands: mpsc::Sender<WriterCommand>) {
    loop {
        tokio::time::sleep(RETRY_EVERY).await;
        changes.try_again(None);
        if commands.send(WriterCommand::Retry).await.is_err() {
            return;
        }
    }
}

/// Passes fetched key sets to the change queue.
async fn take_key_sets(changes: Arc<PendingChanges>, mut key_sets: mpsc::Receiver<KeySetUpdate>) {
    while let Some(KeySetUpdate {
        tenant,
        uri,
        set,
        fault,
    }) = key_sets.recv().await
    {
        let changes = changes.clone();
        // Waiting for one tenant's turn must not delay the key sets of others.
        tokio::spawn(async move { changes.take_key_set(&tenant, uri, set, fault).await });
    }
}

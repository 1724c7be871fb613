//! Subscriber of the delta xDS stream: it connects, validates responses, passes changes to the data
//! plane, and answers with ACK or NACK by resource name. It stores the last good state in a state
//! file and boots from it. It decides which tenants must not be served, and never mixes the states
//! of two stores of the controller. It does not interpret resources; the data plane's [`ApplyFn`]
//! does. Start with [`Subscriber::start`].

#![forbid(unsafe_code)]

pub mod controller_client;
mod counts;
mod session;
mod share_report;
mod state;
pub mod state_file;
mod state_owner;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use canal_model::ids::Generation;
use canal_model::program::{Resource, ResourceKind};
use canal_runtime::backoff::Backoff;
use canal_runtime::drain::{DrainObserver, DrainWatcher};
use canal_runtime::metrics::Registry;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::controller_client::{ControllerConnection, ControllerEndpoint};
use counts::SubscriptionCounters;
use session::StreamTiming;
use share_report::ShareReporter;
use state_owner::StateOwner;

pub use state::{ClosedTenants, Closure, ClosureCause, ResourceState, VersionedResource};

/// Configuration of a subscriber, given at its start.
#[derive(Debug, Clone)]
pub struct SubscriberConfig {
    /// Controller that the subscriber connects to.
    pub controller: ControllerEndpoint,
    /// Node ID: `node~<node name>` or `gateway~<replica name>`.
    pub node: String,
    /// Version of the build, shown in `canal status`.
    pub version: String,
    /// Kinds to subscribe to. Each is a wildcard subscription, which the controller narrows to this
    /// subscriber's scope.
    pub kinds: Vec<ResourceKind>,
    /// Path of the state file, `<data-dir>/snapshot`.
    pub snapshot: PathBuf,
}

/// Source from which an update comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdateSource {
    /// The state file of an earlier run.
    Snapshot,
    /// The controller, in this run.
    Controller,
}

/// One change: the accepted part of a controller's response, or the whole state.
#[derive(Debug, Clone)]
pub struct Update {
    pub origin: UpdateSource,
    pub generation: Generation,
    /// New or changed resources in the order received, without two of one name. Unchanged versions
    /// are left out, except in a whole state that replaces that of another store.
    pub upserts: Vec<Arc<Resource>>,
    /// Removed resources; each was in the state before.
    pub removals: Vec<(ResourceKind, String)>,
}

/// Label of a resource that does not fit into the data plane.
const OMITTED: &str = "no_room";

/// A refused resource and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedResource {
    pub kind: ResourceKind,
    /// Name of the resource on the wire.
    pub name: String,
    /// Value of the metric label `reason`.
    pub(crate) label: &'static str,
    pub why: String,
}

impl RefusedResource {
    /// Reports a resource of the state that does not fit into the data plane. It is not a refusal:
    /// the resource stays in the state, takes effect when it fits, and is named in the next report
    /// to the controller.
    pub fn for_want_of_room(kind: ResourceKind, name: impl Into<String>, why: &str) -> Self {
        Self {
            kind,
            name: name.into(),
            label: OMITTED,
            why: why.into(),
        }
    }

    /// Reports a resource that the data plane cannot use.
    pub fn by_caller(kind: ResourceKind, name: impl Into<String>, why: &str) -> Self {
        Self {
            kind,
            name: name.into(),
            label: "refused",
            why: why.into(),
        }
    }
}

/// Callback of the data plane. It gets each change and the state after it; the first call has a
/// whole state. The data plane must serve nothing of tenants in [`ResourceState::closed`].
///
/// `Ok` names the resources that the data plane cannot use; it must continue as if they had not
/// arrived. They are NACKed by name and removed from the state. If they are security resources,
/// their tenants are closed, which one more call announces. Resources that do not fit
/// ([`RefusedResource::for_want_of_room`]) are named at each call and only reported. `Err` and a
/// panic refuse everything. The change is then repeated tenant by tenant, so that one tenant's
/// resource does not block another tenant's.
///
/// The callback runs on the subscriber's task, so it should take milliseconds. A state file of
/// which no tenant is accepted counts as corrupt.
pub type ApplyFn =
    Box<dyn FnMut(&Update, &ResourceState) -> Result<Vec<RefusedResource>, String> + Send>;

/// Status of the subscription, for `/config_dump`, readiness and alarms.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct SubscriptionStatus {
    pub connected: bool,
    /// Address of the controller in use, or last used.
    pub controller: String,
    pub generation: u64,
    /// Store of the controller to which the state in use belongs; empty if no store is known yet.
    pub store: String,
    /// Store that the controller announces, if it is another one.
    pub other_store: String,
    /// A full state was accepted, from disk or from the controller.
    pub ready: bool,
    /// The state in use came from the controller in this run.
    pub live: bool,
    /// Number of resources in the state, by kind.
    pub resources: BTreeMap<String, usize>,
    /// Text of the last NACK, until a later response of the kind is accepted completely.
    pub nack: BTreeMap<String, String>,
    /// Tenants of which nothing is served, and the reasons.
    pub closed: ClosedTenants,
    /// Reason why the last connection ended.
    pub error: String,
    pub reconnects: u64,
}

/// A running subscription. Dropping it ends the subscription without the last write to disk, which
/// [`Subscriber::stop`] makes.
pub struct Subscriber {
    state: Arc<Mutex<ResourceState>>,
    status: watch::Receiver<SubscriptionStatus>,
    connections: watch::Receiver<Option<ControllerConnection>>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Subscriber {
    /// Boots from the state file (calling `apply` before it returns), then follows the controller
    /// on the calling runtime until `drain` is forced. The runtime should have two or more threads,
    /// because the state file is written on it. If the file is missing, torn, corrupt or refused,
    /// the subscription is not ready until the first full state. The drain waits until the newest
    /// state is on disk. It does not wait for the subscription.
    ///
    /// Metrics: `canal_southbound_connected`, `_generation`, `_updates_total{kind}`,
    /// `_nacks_total{kind,reason}`, `_refused_resources_total{kind,reason}`, `_closed_tenants`,
    /// `_other_store`, `_stores_replaced_total`, `_reconnects_total{reason}` (`stale` is a
    /// controller that stopped answering), `_state_file_rejected_total{reason}`,
    /// `_state_file_writes_total{result}`.
    pub fn start(
        config: SubscriberConfig,
        registry: &Registry,
        drain: DrainWatcher,
        apply: ApplyFn,
    ) -> Self {
        Self::start_with(config, registry, drain, apply, StreamTiming::default())
    }

    fn start_with(
        config: SubscriberConfig,
        registry: &Registry,
        drain: DrainWatcher,
        apply: ApplyFn,
        timing: StreamTiming,
    ) -> Self {
        let watcher = drain.watcher();
        let reporter = ShareReporter::new(registry.clone());
        let apply = reporter.collect_omissions(apply);
        let mut holder = StateOwner::new(
            &config,
            apply,
            SubscriptionCounters::new(registry),
            timing.write,
            drain,
        );
        holder.boot();
        let (state, status) = holder.shared();
        let (stop, stopped) = watch::channel(false);
        let (connection, connections) = watch::channel(None);
        let task = tokio::spawn(run(
            config,
            timing,
            holder,
            (reporter, connection),
            watcher,
            stopped,
        ));
        Self {
            state,
            status,
            connections,
            stop,
            task,
        }
    }

    /// Returns whether a full state is in use, so that the process may serve.
    pub fn ready(&self) -> bool {
        self.status.borrow().ready
    }

    /// Waits until [`Subscriber::ready`] returns true.
    pub async fn until_ready(&self) {
        // An error means that the subscription has ended and will never be ready.
        if self.status.clone().wait_for(|s| s.ready).await.is_err() {
            std::future::pending().await
        }
    }

    /// Returns the current status of the subscription.
    pub fn status(&self) -> SubscriptionStatus {
        self.status.borrow().clone()
    }

    /// Returns a cheap handle to the status for other tasks, such as the admin server.
    pub fn watch(&self) -> watch::Receiver<SubscriptionStatus> {
        self.status.clone()
    }

    /// Returns the subscription's connection to the controller, while there is one, for other
    /// services of the controller.
    pub fn connections(&self) -> watch::Receiver<Option<ControllerConnection>> {
        self.connections.clone()
    }

    /// Returns a copy of the whole state, for `/config_dump`.
    pub fn state(&self) -> ResourceState {
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Ends the subscription. The newest state is on disk when it returns.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        // A subscription that panicked has nothing to write.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Connects, follows the stream, waits, and repeats. It writes the last state before it ends.
async fn run(
    config: SubscriberConfig,
    timing: StreamTiming,
    mut holder: StateOwner,
    (reporter, connection): (ShareReporter, watch::Sender<Option<ControllerConnection>>),
    watcher: DrainObserver,
    mut stopped: watch::Receiver<bool>,
) {
    let mut backoff = Backoff::new(timing.backoff.0, timing.backoff.1);
    for attempt in 0.. {
        let ended = tokio::select! {
            biased;
            _ = stopped.wait_for(|s| *s) => break,
            () = watcher.forced() => break,
            ended = session::follow(&config, &timing, attempt, &mut holder, (&reporter, &connection)) => ended,
        };
        connection.send_replace(None);
        tracing::info!(
            reason = ended.reason,
            why = ended.why,
            "subscriber: the stream to the controller ended; reconnecting"
        );
        // A stream that brought a good response shows that the controller works, so the next wait
        // is short.
        if holder.disconnected(ended.reason, &ended.why) {
            backoff.reset();
        }
        let wait = tokio::time::sleep(backoff.next_wait());
        tokio::select! {
            biased;
            _ = stopped.wait_for(|s| *s) => break,
            () = watcher.forced() => break,
            () = holder.persist_while(wait) => {}
        }
    }
    holder.write();
}

#[cfg(test)]
mod tests;

//! The delta xDS subscription: connects, checks, hands changes to the caller, acks or nacks by name, keeps the last good state on disk
//! and boots from it, says which tenants must not be served, and never mixes the states of two stores of the controller. It does not know what a resource means.

mod closure;
mod counts;
mod held;
mod intake;
mod session;
mod share_report;
pub mod snapshot;
mod state;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use canal_model::ids::Generation;
use canal_model::program::{Kind, Resource};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::backoff::Backoff;
use crate::controller::Controller;
use crate::drain::{Drain, Watcher};
use crate::metrics::Registry;
use counts::Counts;
use held::Holder;
use session::Timing;
use share_report::ShareReporter;

pub use closure::{ClosedTenants, Closure, ClosureCause};
pub use state::{Held, State};

/// What to subscribe to, as whom.
#[derive(Debug, Clone)]
pub struct SubscriberConfig {
    /// Where.
    pub controller: Controller,
    /// `node~<node name>` or `gateway~<replica name>`.
    pub node: String,
    /// The build's version, shown in `canal status`.
    pub version: String,
    /// Every kind is a wildcard subscription; the controller narrows it to what this subscriber may see.
    pub kinds: Vec<Kind>,
    /// `<data-dir>/snapshot`.
    pub snapshot: PathBuf,
}

/// Where an update comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The last good state of an earlier run.
    Snapshot,
    /// The controller.
    Controller,
}

/// One change: what is good of one response of the controller, or a whole snapshot.
#[derive(Debug, Clone)]
pub struct Update {
    pub origin: Origin,
    pub generation: Generation,
    /// New or changed, in the order received; never two of one name. Unchanged versions are left out, but for a whole state in place of that
    /// of another store.
    pub upserts: Vec<Arc<Resource>>,
    /// Gone; each was held before.
    pub removals: Vec<(Kind, String)>,
}

/// The label of a resource that the data plane has no room for.
const OMITTED: &str = "no_room";

/// A resource that was refused, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedResource {
    pub kind: Kind,
    /// The name on the wire.
    pub name: String,
    /// The label `reason`.
    pub(crate) label: &'static str,
    pub why: String,
}

impl RefusedResource {
    /// A resource that is held and that the data plane has no room for. It is no refusal: it stays in the state, comes into force when there
    /// is room, and is named in the next report to the controller.
    pub fn for_want_of_room(kind: Kind, name: impl Into<String>, why: &str) -> Self {
        Self { kind, name: name.into(), label: OMITTED, why: why.into() }
    }

    /// A resource that the data plane cannot use.
    pub fn by_caller(kind: Kind, name: impl Into<String>, why: &str) -> Self {
        Self { kind, name: name.into(), label: "refused", why: why.into() }
    }
}

/// Called with each change and the state as it will be, the first time with a whole state. Of tenants in [`State::closed`] nothing may be
/// served.
///
/// `Ok` names the resources that the data plane cannot use; it must go on without them as if they had not come. They are nacked by name and
/// taken back, and if they are security resources their tenants are closed, which is told by one more call. Those that it has no room for
/// ([`RefusedResource::for_want_of_room`]) are named at each call, and only reported. `Err` and a panic refuse
/// everything: the change is told again tenant by tenant, so that one tenant's resource does not veto another's.
///
/// Runs on the subscriber's task, so it should take milliseconds. A snapshot of which no tenant is accepted counts as corrupt.
pub type Apply = Box<dyn FnMut(&Update, &State) -> Result<Vec<RefusedResource>, String> + Send>;

/// How the subscription stands, for `/config_dump`, readiness and alarms.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct Status {
    pub connected: bool,
    /// Address of the controller in use, or last used.
    pub controller: String,
    pub generation: u64,
    /// The controller's store that the state in use is of; empty: none is named yet.
    pub store: String,
    /// The store that the controller shows, where it is another one.
    pub other_store: String,
    /// A full state was accepted, from disk or from the controller.
    pub ready: bool,
    /// The state in use came from the controller in this run.
    pub live: bool,
    /// Resources held, by kind.
    pub resources: BTreeMap<String, usize>,
    /// Text of the last nack, until a later response of the kind is accepted whole.
    pub nack: BTreeMap<String, String>,
    /// Tenants of which nothing is served, and why.
    pub closed: ClosedTenants,
    /// Why the last connection ended.
    pub error: String,
    pub reconnects: u64,
}

/// A running subscription; dropping it ends it without the last write to disk ([`Subscriber::stop`] does that).
pub struct Subscriber {
    state: Arc<Mutex<State>>,
    status: watch::Receiver<Status>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Subscriber {
    /// Boots from the snapshot (calling `apply` before it returns), then follows the controller on the calling runtime until
    /// `drain` is forced. That runtime should have two threads or more: snapshots are written on it. A snapshot that is missing, torn, corrupt or refused leaves it not ready until the first full state.
    /// The drain waits for the newest state to be on disk, not for the subscription.
    ///
    /// Metrics: `canal_southbound_connected`, `_generation`, `_updates_total{kind}`, `_nacks_total{kind,reason}`, `_refused_resources_total{kind,reason}`,
    /// `_closed_tenants`, `_other_store`, `_stores_replaced_total`, `_reconnects_total{reason}` (`stale` = mute controller), `_snapshot_refused_total{reason}`, `_snapshot_writes_total{result}`.
    pub fn start(config: SubscriberConfig, registry: &Registry, drain: Drain, apply: Apply) -> Self {
        Self::start_with(config, registry, drain, apply, Timing::default())
    }

    fn start_with(config: SubscriberConfig, registry: &Registry, drain: Drain, apply: Apply, timing: Timing) -> Self {
        let watcher = drain.watcher();
        let reporter = ShareReporter::new(registry.clone());
        let apply = reporter.collect_omissions(apply);
        let mut holder = Holder::new(&config, apply, Counts::new(registry), timing.write, drain);
        holder.boot();
        let (state, status) = holder.shared();
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(run(config, timing, holder, reporter, watcher, stopped));
        Self { state, status, stop, task }
    }

    /// A full state is in use: the process may serve.
    pub fn ready(&self) -> bool {
        self.status.borrow().ready
    }

    /// Waits until [`Subscriber::ready`].
    pub async fn until_ready(&self) {
        // An error means that the subscription has ended, and then it will never be.
        if self.status.clone().wait_for(|s| s.ready).await.is_err() {
            std::future::pending().await
        }
    }

    /// How it stands.
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// A cheap handle for [`Subscriber::status`] from elsewhere (admin).
    pub fn watch(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// A copy of the full view, for `/config_dump`.
    pub fn state(&self) -> State {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the subscription; the newest state is on disk when it returns.
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

/// Connects, follows, waits, again; writes the last state before it ends.
async fn run(
    config: SubscriberConfig,
    timing: Timing,
    mut holder: Holder,
    reporter: ShareReporter,
    watcher: Watcher,
    mut stopped: watch::Receiver<bool>,
) {
    let mut backoff = Backoff::new(timing.backoff.0, timing.backoff.1);
    for attempt in 0.. {
        let ended = tokio::select! {
            biased;
            _ = stopped.wait_for(|s| *s) => break,
            () = watcher.forced() => break,
            ended = session::follow(&config, &timing, attempt, &mut holder, &reporter) => ended,
        };
        tracing::info!(reason = ended.reason, why = ended.why, "the controller's stream ended");
        if holder.disconnected(ended.reason, &ended.why) {
            backoff.reset();
        }
        let wait = tokio::time::sleep(backoff.next_wait());
        tokio::select! {
            biased;
            _ = stopped.wait_for(|s| *s) => break,
            () = watcher.forced() => break,
            () = holder.meanwhile(wait) => {}
        }
    }
    holder.write();
}

/// The kind's name in labels and dumps.
pub fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Tenant => "tenant",
        Kind::Gateway => "gateway",
        Kind::Service => "service",
        Kind::Workload => "workload",
        Kind::Route => "route",
        Kind::Node => "node",
        Kind::Replica => "replica",
        Kind::Address => "gateway address",
        Kind::Table => "bucket table",
        Kind::Throttle => "throttle",
        Kind::Bundle => "bundle",
        Kind::KeyServer => "key server",
        Kind::Authorizer => "authorizer",
        Kind::Authorization => "authorization",
        Kind::Authentication => "authentication",
        Kind::PeerAuthentication => "peer authentication",
        Kind::Termination => "termination",
        Kind::Entitlement => "entitlement",
        Kind::Manifest => "manifest",
    }
}

#[cfg(test)]
mod tests;

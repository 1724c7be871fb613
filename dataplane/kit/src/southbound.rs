//! The delta xDS subscription: connects, checks, hands whole responses to the caller, acks or nacks, keeps the last good state on disk
//! and boots from it. It does not know what a resource means.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use canal_model::ids::Generation;
use canal_model::program::{Kind, Resource};

use crate::controller::Controller;
use crate::drain::Drain;
use crate::metrics::Registry;

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

/// One accepted-or-refused-whole change: one response of the controller, or a whole snapshot.
#[derive(Debug, Clone)]
pub struct Update {
    pub origin: Origin,
    pub generation: Generation,
    /// New or changed, in the order received; never two of one name. Unchanged versions are left out.
    pub upserts: Vec<Arc<Resource>>,
    /// Gone; each was held before.
    pub removals: Vec<(Kind, String)>,
}

/// The full view: every resource held, by kind and name, with its version.
#[derive(Debug, Clone, Default)]
pub struct State {
    generation: Generation,
    kinds: BTreeMap<Kind, HashMap<String, Held>>,
}

/// A resource with its version.
#[derive(Debug, Clone)]
pub struct Held {
    pub version: String,
    pub resource: Arc<Resource>,
}

impl State {
    /// The newest generation accepted.
    pub fn generation(&self) -> Generation {
        self.generation
    }
    /// All of a kind, in no order.
    pub fn of(&self, kind: Kind) -> impl Iterator<Item = &Arc<Resource>> {
        self.kinds.get(&kind).into_iter().flat_map(|m| m.values().map(|h| &h.resource))
    }
    /// One by its wire name.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        self.kinds.get(&kind)?.get(name).map(|h| &h.resource)
    }
    /// How many of a kind.
    pub fn count(&self, kind: Kind) -> usize {
        self.kinds.get(&kind).map_or(0, HashMap::len)
    }
}

/// Called with each change and the state as it will be; `Err` refuses the whole of it: it is nacked with the reason and the last good
/// state stays. Runs on the subscriber's task, so it should take milliseconds; a snapshot that is refused counts as corrupt.
pub type Apply = Box<dyn FnMut(&Update, &State) -> Result<(), String> + Send>;

/// How the subscription stands, for `/config_dump`, readiness and alarms.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct Status {
    pub connected: bool,
    /// Address of the controller in use, or last used.
    pub controller: String,
    pub generation: u64,
    /// A full state was accepted, from disk or from the controller.
    pub ready: bool,
    /// The state in use came from the controller in this run.
    pub live: bool,
    /// Resources held, by kind.
    pub resources: BTreeMap<String, usize>,
    /// Text of the last nack, until a later response of the kind is accepted.
    pub nack: BTreeMap<String, String>,
    /// Why the last connection ended.
    pub error: String,
    pub reconnects: u64,
}

/// A running subscription; dropping it ends it.
pub struct Subscriber {}

impl Subscriber {
    /// Boots from the snapshot (calling `apply` before it returns), then follows the controller on the calling runtime until
    /// `drain` is forced. A snapshot that is missing, torn, corrupt or refused leaves it not ready until the first full state.
    ///
    /// Metrics: `canal_southbound_connected`, `_generation`, `_updates_total{kind}`, `_nacks_total{kind,reason}`,
    /// `_reconnects_total{reason}` (`stale` = mute controller), `_snapshot_refused_total{reason}`, `_snapshot_writes_total{result}`.
    pub fn start(config: SubscriberConfig, registry: &Registry, drain: Drain, apply: Apply) -> Self {
        let _ = (config, registry, drain, apply);
        unreachable!("body lands in the next commit")
    }
    /// A full state is in use: the process may serve.
    pub fn ready(&self) -> bool {
        unreachable!("body lands in the next commit")
    }
    /// Waits until [`Subscriber::ready`].
    pub async fn until_ready(&self) {
        unreachable!("body lands in the next commit")
    }
    /// How it stands.
    pub fn status(&self) -> Status {
        unreachable!("body lands in the next commit")
    }
    /// A cheap handle for [`Subscriber::status`] from elsewhere (admin).
    pub fn watch(&self) -> tokio::sync::watch::Receiver<Status> {
        unreachable!("body lands in the next commit")
    }
    /// Ends the subscription; the newest state is on disk when it returns.
    pub async fn stop(self) {
        unreachable!("body lands in the next commit")
    }
}

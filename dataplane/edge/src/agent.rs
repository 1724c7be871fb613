//! The process: what is started, in which order, and how it ends. Decisions are in [`crate::maps`], [`crate::health`] and
//! [`decide_guard`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use canal_interfaces::Interfaces;
use canal_kit::admin::{self, AdminAddresses, Routes};
use canal_kit::diagnostics::Level;
use canal_kit::drain::{self, Drain, Trigger, Watcher};
use canal_kit::metrics::{Family, Registry};
use canal_kit::southbound::{RefusedResource, State, Status, Subscriber, SubscriberConfig, Update};
use canal_kit::sys::{self, SysError};
use canal_model::program::Kind;
use canal_offload::OffloadError;
use canal_wire::fleet::{EdgeState, Seen};
use tokio::sync::{oneshot, watch};

use crate::config::{EdgeConfig, GUARD_PAUSE, PROBE_PAUSE, PROBE_TIMEOUT, READINESS_PORT};
use crate::counts::Counts;
use crate::dump::Board;
use crate::keeper::{Keeper, Target};
use crate::kernel::Kernel;
use crate::probe::{Ear, Outcome, Prober, Rhythm};
use crate::report::{self, Desk};

/// What an edge is told of.
pub const KINDS: [Kind; 5] = [Kind::Tenant, Kind::Node, Kind::Replica, Kind::Address, Kind::Table];
/// Nothing of the agent's lasts longer than a report.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// What tasks may take beyond the drain's deadline.
const GRACE: Duration = Duration::from_secs(2);
/// Looking through all maps may take at most this share of the time; large ones are looked at less often.
const GUARD_SHARE: u32 = 20;

/// Why the edge could not be started.
#[derive(Debug, thiserror::Error)]
pub enum EdgeError {
    /// The kernel refused program, maps or device.
    #[error("{0}")]
    Kernel(#[from] OffloadError),
    /// The maps of an earlier process cannot be read.
    #[error("the maps under {dir} cannot be read: {why}; `canal-edge --detach` removes them, and with them all that is forwarded")]
    Maps { dir: std::path::PathBuf, why: String },
    /// An admin, metrics or readiness address cannot be listened on.
    #[error("{0}")]
    Listen(#[from] SysError),
    /// A directory, a thread or a signal could not be had.
    #[error("{what}: {source}")]
    Start { what: &'static str, source: std::io::Error },
    /// A part of the agent panicked. An agent that has silently lost one would be a grey failure.
    #[error("{0} of the agent panicked; the process ends so that its supervisor starts a whole one, and packets go on meanwhile")]
    Lost(&'static str),
}

fn start<T>(what: &'static str, r: std::io::Result<T>) -> Result<T, EdgeError> {
    r.map_err(|source| EdgeError::Start { what, source })
}

/// What all tasks share.
#[derive(Clone)]
struct Shared {
    keeper: Arc<Mutex<Keeper<Kernel>>>,
    counts: Counts,
    /// Counts findings; touched when a replica's state changed, so that a report goes out.
    news: Arc<watch::Sender<u64>>,
    targets: Arc<watch::Sender<BTreeMap<Target, bool>>>,
}

impl Shared {
    fn keeper(&self) -> MutexGuard<'_, Keeper<Kernel>> {
        // The keeper's own state is whole between its calls.
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show_replicas(&self, targets: &BTreeMap<Target, bool>) {
        let up = targets.values().filter(|up| **up).count();
        self.counts.replicas(up, targets.len() - up);
    }

    /// After a new state: the prober's list, and the program on the device if it waited for this.
    fn told(&self) {
        let mut keeper = self.keeper();
        let targets = keeper.targets().clone();
        if keeper.standing().told && !keeper.tables().is_live() {
            // The maps are filled now: an earlier program, if there is one, is replaced by one that knows as much.
            match keeper.tables().go_live() {
                Ok(()) => self.counts.attached(true),
                Err(error) => tracing::error!(%error, "the program could not be put on the device; tried again within seconds"),
            }
        }
        drop(keeper);
        self.show_replicas(&targets);
        self.targets.send_if_modified(|now| {
            let same = now.keys().eq(targets.keys());
            *now = targets;
            !same
        });
        self.news.send_modify(|n| *n += 1);
    }
}

impl Ear for Shared {
    fn heard(&self, target: &Target, outcome: Outcome, changed: Option<bool>) {
        self.counts.probe(outcome.name());
        let Some(up) = changed else { return };
        let mut keeper = self.keeper();
        if !keeper.found(target, up) {
            return;
        }
        let targets = keeper.targets().clone();
        drop(keeper);
        self.counts.change(up);
        self.show_replicas(&targets);
        // A probe that is begun again starts from here.
        self.targets.send_if_modified(|now| {
            *now = targets;
            false
        });
        tracing::warn!(replica = %target.name, address = %target.address, up, last = outcome.name(), "a replica changed");
        self.news.send_modify(|n| *n += 1);
    }
}

/// Makes reports of what the keeper holds.
struct Reporter {
    shared: Shared,
    config: EdgeConfig,
    southbound: watch::Receiver<Status>,
}

impl Desk for Reporter {
    fn report(&self) -> Option<EdgeState> {
        let mut keeper = self.shared.keeper();
        let forwards = keeper.standing().told && keeper.tables().is_attached();
        let seen = keeper.targets().iter().map(|(t, up)| Seen { replica: t.name.to_string(), up: *up }).collect();
        drop(keeper);
        forwards.then(|| EdgeState {
            az: self.config.az.to_string(),
            underlay: self.config.place.address.to_string(),
            generation: self.southbound.borrow().generation,
            seen,
            version: env!("CARGO_PKG_VERSION").into(),
        })
    }

    fn orders(&self, hosts: BTreeSet<Ipv4Addr>) {
        self.shared.keeper().tell_hosts(hosts);
    }
}

/// Runs the agent until SIGTERM, SIGINT or `/quitquitquit`. Program and maps stay. `false`: something had to be cut off.
pub async fn run(config: EdgeConfig, level: Level) -> Result<bool, EdgeError> {
    sys::raise_file_limit();
    start("making the data directory (--data-dir)", std::fs::create_dir_all(&config.data_dir))?;
    let (process, whole) = drain::tree();
    let process = Arc::new(process);
    let (trigger, traffic) = whole.branch();
    let registry = Registry::new();
    let shared = begin(&config, &registry)?;
    let subscriber = subscribe(&config, &shared, &registry, whole.clone());
    let watcher = traffic.watcher();
    drop(traffic);
    let board = Board { config: config.clone(), keeper: shared.keeper.clone(), southbound: subscriber.watch(), traffic: watcher };
    serve_operators(&config, Arc::new(board), &registry, level, &process, &whole)?;
    let (prober, mut lost) = spawn_prober(shared.clone(), whole.watcher())?;
    let reporter = Reporter { shared: shared.clone(), config: config.clone(), southbound: subscriber.watch() };
    let news = shared.news.subscribe();
    let reports = tokio::spawn(report::run(config.controller.clone(), reporter, news, shared.counts.clone(), whole.watcher()));
    let guard = tokio::spawn(guard(shared.clone(), whole.watcher()));
    let interfaces = Interfaces { bindings: config.interface_bindings.clone(), pin_dir: config.place.pin_dir.clone() };
    let interfaces = tokio::spawn(canal_interfaces::run(interfaces, registry.clone(), whole.watcher()));
    // None of them ends before the process does.
    let clean = tokio::select! {
        ended = drain::on_signals(trigger, DRAIN_LIMIT, GRACE) => start("catching signals", ended)?,
        _ = reports => return Err(EdgeError::Lost("the reporter")),
        _ = guard => return Err(EdgeError::Lost("the guard")),
        _ = interfaces => return Err(EdgeError::Lost("the interface guard's agent")),
        _ = &mut lost => return Err(EdgeError::Lost("the prober")),
    };
    tracing::info!(clean, "ending; the program stays on the device and forwards by the maps as they are");
    subscriber.stop().await;
    process.force();
    drop(whole);
    let _ = tokio::task::spawn_blocking(move || prober.join()).await;
    Ok(clean)
}

/// Program and maps, before anybody is asked.
fn begin(config: &EdgeConfig, registry: &Registry) -> Result<Shared, EdgeError> {
    let build = Family::new("istio_build", "What runs here.", &["component", "tag"]);
    registry.gauges(build).shared(&["canal-edge", env!("CARGO_PKG_VERSION")]).set(1);
    let counts = Counts::new(registry);
    let mut kernel = Kernel::load(&config.place)?;
    counts.verified("canal_edge", kernel.verified_instructions()?);
    if !kernel.is_durable() {
        tracing::warn!(pins = %config.place.pin_dir.display(), "maps go with this process's mount namespace; an agent started again begins with empty ones");
    }
    if kernel.is_adopted() {
        // They hold what an earlier agent knew; with them the program is as good at once.
        kernel.go_live()?;
        counts.attached(true);
    }
    let room = kernel.room();
    let keeper = Keeper::adopt(kernel, config.az.clone(), config.place.address, room, counts.clone());
    let keeper = keeper.map_err(|why| EdgeError::Maps { dir: config.place.pin_dir.clone(), why })?;
    Ok(Shared {
        keeper: Arc::new(Mutex::new(keeper)),
        counts,
        news: Arc::new(watch::channel(0).0),
        targets: Arc::new(watch::channel(BTreeMap::new()).0),
    })
}

fn subscribe(config: &EdgeConfig, shared: &Shared, registry: &Registry, drain: Drain) -> Subscriber {
    let settings = SubscriberConfig {
        controller: config.controller.clone(),
        node: format!("edge~{}", config.edge),
        version: env!("CARGO_PKG_VERSION").into(),
        kinds: KINDS.to_vec(),
        snapshot: config.data_dir.join("snapshot"),
    };
    let shared = shared.clone();
    let apply = move |_: &Update, state: &State| {
        let resources = KINDS.iter().flat_map(|k| state.of(*k).cloned()).collect();
        // What does not fit stays in the state, since it comes into force when there is room; the controller is told its names.
        let omitted = shared.keeper().tell(resources);
        shared.told();
        Ok(omitted.iter().map(|(kind, name, why)| RefusedResource::for_want_of_room(*kind, name, why)).collect())
    };
    Subscriber::start(settings, registry, drain, Box::new(apply))
}

/// Probes on a thread of their own: a large update must not make replicas look late. The receiver resolves when the thread ends.
fn spawn_prober(shared: Shared, end: Watcher) -> Result<(std::thread::JoinHandle<()>, oneshot::Receiver<()>), EdgeError> {
    let runtime = start("making the prober's runtime", tokio::runtime::Builder::new_current_thread().enable_all().build())?;
    let rhythm = Rhythm { port: READINESS_PORT, pause: PROBE_PAUSE, timeout: PROBE_TIMEOUT };
    let mut targets = shared.targets.subscribe();
    let (alive, lost) = oneshot::channel::<()>();
    let probing = async move {
        let mut prober = Prober::new(rhythm, shared);
        loop {
            let now = targets.borrow_and_update().clone();
            prober.follow(&now);
            tokio::select! {
                () = end.forced() => return,
                // A probe that panicked is begun again.
                () = tokio::time::sleep(GUARD_PAUSE) => {}
                news = targets.changed() => if news.is_err() {
                    return;
                },
            }
        }
    };
    let run = move || {
        let _alive = alive;
        runtime.block_on(probing);
    };
    let thread = std::thread::Builder::new().name("edge-prober".into()).spawn(run);
    Ok((start("starting the prober's thread", thread)?, lost))
}

/// What the guard saw of program and pins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    pub live: bool,
    pub attached: bool,
    pub pinned: bool,
    /// A first state was told, so that maps can be filled.
    pub told: bool,
}

/// What the guard does about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mend {
    /// All is in place, or there is nothing to forward by yet.
    Nothing,
    /// Put the program on the device.
    Attach,
    /// Load anew, fill the maps, put the program on the device.
    Reload,
}

/// How what somebody removed is put again.
pub fn decide_guard(look: Look) -> Mend {
    match look {
        Look { told: false, live: false, .. } => Mend::Nothing,
        // Without a state new maps would stay empty; the old ones, held by the program, are better.
        Look { pinned: false, told: true, .. } => Mend::Reload,
        Look { attached: false, .. } => Mend::Attach,
        _ => Mend::Nothing,
    }
}

/// Whether the maps are to be read through again, so long after the last time, which took so long.
fn is_audit_due(rested: Duration, took: Duration) -> bool {
    rested >= took * GUARD_SHARE
}

/// Looks every two seconds whether program and maps are what this agent made of them (somebody may have flushed them), and mends; and reads the
/// kernel's counters. Only the reading of all elements waits longer where it takes long, or took long because the machine stood still.
async fn guard(shared: Shared, end: Watcher) {
    let (mut ended, mut took) = (Instant::now(), Duration::ZERO);
    loop {
        tokio::select! {
            () = end.forced() => return,
            () = tokio::time::sleep(GUARD_PAUSE) => {}
        }
        let (shared, started) = (shared.clone(), Instant::now());
        let audits = is_audit_due(ended.elapsed(), took);
        // Thousands of system calls when the maps are large.
        let _ = tokio::task::spawn_blocking(move || look_after(&shared, audits)).await;
        if audits {
            (ended, took) = (Instant::now(), started.elapsed());
        }
    }
}

/// `audits`: all elements are read and compared too. New maps are filled in any case.
fn look_after(shared: &Shared, audits: bool) {
    let mut keeper = shared.keeper();
    let told = keeper.standing().told;
    let kernel = keeper.tables();
    let look = Look { live: kernel.is_live(), attached: kernel.is_attached(), pinned: kernel.is_pinned(), told };
    shared.counts.attached(look.attached);
    let (mended, what) = match decide_guard(look) {
        Mend::Nothing => (Ok(()), None),
        Mend::Attach => (kernel.go_live(), look.live.then_some("attachment")),
        Mend::Reload => (kernel.reload(), Some("pins")),
    };
    if let Err(error) = &mended {
        tracing::error!(%error, ?look, "program or maps are gone and cannot be put again; tried again within seconds");
        return;
    }
    let audited = if audits || what.is_some() || !look.live { keeper.audit() } else { Ok(0) };
    match audited {
        Ok(0) => {}
        // New maps are empty: that is the reload itself, not what somebody did to elements.
        Ok(_) if what == Some("pins") => {}
        Ok(n) => {
            shared.counts.repair("elements", n);
            tracing::error!(elements = n, "SOMEBODY CHANGED THE EDGE'S MAPS; mended");
        }
        Err(error) => tracing::error!(error, "the maps cannot be read"),
    }
    let kernel = keeper.tables();
    if !kernel.is_live()
        && told
        && let Err(error) = kernel.go_live()
    {
        tracing::error!(%error, "the program could not be put on the device; tried again within seconds");
        return;
    }
    if let Some(what) = what {
        shared.counts.repair(what, 1);
        tracing::error!(what, "SOMEBODY REMOVED THE EDGE'S PROGRAM OR MAPS; put again");
    }
    shared.counts.attached(kernel.is_attached());
    match kernel.counts() {
        Ok(now) => shared.counts.packets(&now),
        Err(error) => tracing::error!(%error, "the program's counters cannot be read"),
    }
}

/// Admin on localhost and on a unix socket, metrics and readiness where the operator says; each its own port, as in Istio.
fn serve_operators(
    config: &EdgeConfig,
    board: Arc<Board>,
    registry: &Registry,
    level: Level,
    process: &Arc<Trigger>,
    drain: &Drain,
) -> Result<(), EdgeError> {
    let (for_dump, for_ready) = (board.clone(), board);
    let admin = Routes::new()
        .config_dump(move || for_dump.json())
        .metrics(registry.clone())
        .logging(level)
        .quit(process.clone(), DRAIN_LIMIT)
        .version(env!("CARGO_PKG_VERSION"));
    let readiness = Routes::new().ready(move || for_ready.ready());
    let addresses =
        AdminAddresses { admin: config.admin, metrics: config.metrics, readiness: config.readiness, data_dir: config.data_dir.clone() };
    Ok(admin::serve_all(&addresses, (admin, readiness), registry, drain)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_through_for_a_twentieth_of_the_time() {
        let ms = Duration::from_millis;
        for (rested, took, want) in [(2000, 0, true), (2000, 100, true), (1999, 100, false), (11_999, 600, false), (12_000, 600, true)] {
            assert_eq!(is_audit_due(ms(rested), ms(took)), want, "{rested} ms after one of {took} ms");
        }
    }

    #[test]
    fn what_is_gone_is_put_again_when_there_is_something_to_put() {
        let fine = Look { live: true, attached: true, pinned: true, told: true };
        for (name, look, want) in [
            ("all in place", fine, Mend::Nothing),
            ("filters flushed", Look { attached: false, ..fine }, Mend::Attach),
            ("filters flushed before the first state", Look { attached: false, told: false, ..fine }, Mend::Attach),
            ("pins removed", Look { pinned: false, ..fine }, Mend::Reload),
            ("pins removed before the first state", Look { pinned: false, told: false, ..fine }, Mend::Nothing),
            ("both", Look { pinned: false, attached: false, ..fine }, Mend::Reload),
            ("waiting for the first state", Look { live: false, attached: false, pinned: true, told: false }, Mend::Nothing),
            ("told, but the device was not there", Look { live: false, attached: false, ..fine }, Mend::Attach),
        ] {
            assert_eq!(decide_guard(look), want, "{name}");
        }
    }
}

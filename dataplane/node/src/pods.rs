//! Follows the pods directory: captures and serves pods that appear, drains and lets go of those that went, dresses all of them with
//! identities. What has to change is a pure decision ([`decide_changes`]); the rest carries it out.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use canal_kit::drain::{Drain, Trigger};
use canal_kit::metrics::{Counters, Family, SharedCounter, SharedGauge};
use canal_kit::worker::Workers;
use canal_model::ids::Generation;
use canal_model::program::{OutsideMesh, Tenant};
use futures::StreamExt;
use tokio::sync::watch;

use crate::accept;
use crate::authorization::{Basis, PodPolicy};
use crate::capture::{Capture, Mode, Taken};
use crate::config::{NodeConfig, PODS_MAX};
use crate::guard::Guards;
use crate::identities::Identities;
use crate::packets::PodPackets;
use crate::pod::{Pod, PodError};
use crate::room::Room;
use crate::telemetry::Party;
use crate::view::TenantView;
use crate::worker::{self, Shared};
use crate::workload_api::{WorkloadApi, WorkloadApis};

/// The directory is read anew at least so often, whatever inotify says; then, too, gone pods are let go and counters are read.
const RESCAN: Duration = Duration::from_secs(2);
/// What a drained pod's tasks may take beyond their deadline.
const GRACE: Duration = Duration::from_secs(2);

/// A namespace file's device and inode: a pod made again under its old name has another.
type Inode = (u64, u64);

/// What the directory says now.
#[derive(Debug, Default)]
pub struct Scan {
    /// File name, pod, and its namespace's inode if that is there.
    pub pods: Vec<(String, Pod, Option<Inode>)>,
    /// File name and why it was not taken.
    pub broken: Vec<(String, String)>,
}

/// Reads the directory. Files that do not end in `.json` are not pods.
pub fn scan(dir: &Path) -> std::io::Result<Scan> {
    let mut names: Vec<String> = std::fs::read_dir(dir)?
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|n| n.ends_with(".json") && !n.starts_with('.'))
        .collect();
    names.sort();
    let mut found = Scan::default();
    for name in names {
        match Pod::read(&dir.join(&name)) {
            Ok(pod) => {
                let inode = std::fs::metadata(&pod.netns).ok().map(|m| (m.dev(), m.ino()));
                found.pods.push((name, pod, inode));
            }
            // Removed between the listing and the reading.
            Err(PodError::File { .. }) if !dir.join(&name).exists() => {}
            Err(e) => found.broken.push((name, e.to_string())),
        }
    }
    Ok(found)
}

/// A pod that is served.
#[derive(Debug, Clone)]
pub struct Standing {
    pub file: String,
    pub pod: Arc<Pod>,
    pub netns: Inode,
}

/// What has to be done, in this order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    pub remove: Vec<String>,
    pub relabel: Vec<Pod>,
    pub add: Vec<(String, Pod)>,
    /// uid or file, and why.
    pub refused: Vec<(String, String)>,
}

/// Compares what stands with what was scanned. A file that cannot be read now keeps its pod: half a write must not cut connections.
pub fn decide_changes(standing: &HashMap<String, Standing>, found: Scan) -> Changes {
    let mut c = Changes { refused: found.broken, ..Changes::default() };
    let unreadable: BTreeSet<String> = c.refused.iter().map(|(file, _)| file.clone()).collect();
    let mut seen = BTreeSet::new();
    for (file, pod, inode) in found.pods {
        if !seen.insert(pod.uid.clone()) {
            c.refused.push((file, format!("another file already holds pod {}; remove one", pod.uid)));
            continue;
        }
        match standing.get(&pod.uid) {
            Some(s) if s.pod.same_place(&pod) && inode.is_none_or(|i| i == s.netns) => {
                if *s.pod != pod {
                    c.relabel.push(pod);
                }
            }
            Some(_) => {
                c.remove.push(pod.uid.clone());
                c.add.push((file, pod));
            }
            None => c.add.push((file, pod)),
        }
    }
    c.remove.extend(standing.iter().filter(|(uid, s)| !seen.contains(*uid) && !unreadable.contains(&s.file)).map(|(uid, _)| uid.clone()));
    c.remove.sort();
    let room = (PODS_MAX as usize).saturating_sub(standing.len() - c.remove.len());
    for (_, pod) in c.add.drain(c.add.len().min(room)..) {
        c.refused.push((pod.uid, format!("the node holds {PODS_MAX} pods, its limit")));
    }
    c
}

/// What others may look at: the pods served and those that are not.
#[derive(Debug, Default)]
pub struct Board {
    pub rooms: ArcSwap<Vec<Arc<Room>>>,
    /// uid or file, and why.
    pub refused: ArcSwap<Vec<(String, String)>>,
    /// The directory was read once: readiness.
    pub scanned: std::sync::atomic::AtomicBool,
}

struct Kept {
    standing: Standing,
    room: Arc<Room>,
    taken: Taken,
    packets: PodPackets,
    /// Of pods that ask for it, once their tenant is known.
    api: Option<WorkloadApi>,
    // Dropping it would cut the pod's connections.
    trigger: Trigger,
}

struct Gauges {
    served: SharedGauge,
    refused: SharedGauge,
    leaving: SharedGauge,
    modes: [(Mode, SharedGauge); 2],
    refusals: SharedCounter,
    verdicts: Counters,
    inbound_verdicts: Counters,
    packets: Counters,
}

/// The task that follows the directory.
pub struct Pods {
    config: Arc<NodeConfig>,
    capture: Capture,
    shared: Arc<Shared>,
    identities: Identities,
    apis: WorkloadApis,
    workers: Workers,
    board: Arc<Board>,
    kept: HashMap<String, Kept>,
    /// Gone, but with processes that still run: they stay captured.
    leaving: Vec<(Arc<Pod>, Taken, PodPackets)>,
    guards: Guards,
    gauges: Gauges,
    verdicts_seen: BTreeMap<String, u64>,
    inbound_verdicts_seen: BTreeMap<String, u64>,
}

impl Pods {
    /// Nothing is captured yet.
    pub fn new(
        config: Arc<NodeConfig>,
        capture: Capture,
        shared: Arc<Shared>,
        identities: Identities,
        apis: WorkloadApis,
        workers: Workers,
        board: Arc<Board>,
    ) -> Self {
        let r = &shared.registry;
        let pods = r.gauges(Family::new("canal_node_pods", "Pods of this node, by state.", &["state"]));
        let modes = r.gauges(Family::new("canal_node_capture_mode", "1 for each way in which pods are captured.", &["mode"]));
        let gauges = Gauges {
            served: pods.shared(&["served"]),
            refused: pods.shared(&["refused"]),
            leaving: pods.shared(&["leaving"]),
            modes: [Mode::Bpf, Mode::Nft].map(|m| (m, modes.shared(&[m.name()]))),
            refusals: r.counters(Family::new("canal_node_pod_refusals_total", "Pod files that were newly refused.", &[])).shared(&[]),
            verdicts: r.counters(Family::new("canal_capture_verdicts_total", "Ways out of the capture programs.", &["verdict"])),
            inbound_verdicts: r.counters(Family::new(
                "canal_inbound_verdicts_total",
                "Ways out of the program that takes plaintext into pods.",
                &["verdict"],
            )),
            packets: r.counters(Family::new(
                "canal_pod_guard_packets_total",
                "Packets that the pod guards judged.",
                &["tenant", "verdict"],
            )),
        };
        let guards = Guards::new(r, config.trusts_node);
        Self {
            config,
            capture,
            shared,
            identities,
            apis,
            workers,
            board,
            kept: HashMap::new(),
            leaving: Vec::new(),
            guards,
            gauges,
            verdicts_seen: BTreeMap::new(),
            inbound_verdicts_seen: BTreeMap::new(),
        }
    }

    /// Follows until `traffic` drains, then keeps what the drain needs until `process` is forced.
    pub async fn run(mut self, mut generations: watch::Receiver<Generation>, traffic: Drain, process: Drain) {
        let mut events = watch_directory(&self.config.pods_dir);
        let mut tick = tokio::time::interval(RESCAN);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut settled = false;
        loop {
            tokio::select! {
                () = traffic.draining() => break,
                // Several events at once are one reason to look.
                _ = events.next() => {
                    let changed = self.rescan(&traffic);
                    self.guard(&changed).await;
                }
                _ = tick.tick() => {
                    let changed = self.rescan(&traffic);
                    self.guard(&changed).await;
                    if !std::mem::replace(&mut settled, true) {
                        self.capture.settled();
                    }
                    self.keep_house();
                }
                changed = generations.changed() => {
                    if changed.is_err() {
                        break;
                    }
                    let changed = self.dress_all();
                    worker::forget_gateways(&self.workers);
                    self.guard(&changed).await;
                }
            }
        }
        drop(traffic);
        self.kept.values_mut().for_each(|k| k.api = None);
        process.forced().await;
    }

    /// Brings the directory's changes about. Says which pods have other policies now.
    fn rescan(&mut self, traffic: &Drain) -> Vec<Arc<Room>> {
        let found = match tokio::task::block_in_place(|| scan(&self.config.pods_dir)) {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(dir = %self.config.pods_dir.display(), %error, "cannot read the pods directory; keeping what there is");
                return Vec::new();
            }
        };
        let mut changed = Vec::new();
        let standing = self.kept.iter().map(|(uid, k)| (uid.clone(), k.standing.clone())).collect();
        let Changes { remove, relabel, add, mut refused } = decide_changes(&standing, found);
        for uid in remove {
            self.remove(&uid);
        }
        for pod in relabel {
            if let Some(k) = self.kept.get_mut(&pod.uid) {
                k.standing.pod = Arc::new(pod.clone());
                k.room.pod.store(Arc::new(pod));
                if dress(&self.shared, &self.config, &self.identities, &k.room) {
                    changed.push(k.room.clone());
                }
            }
        }
        for (file, pod) in add {
            let uid = pod.uid.clone();
            if let Err(why) = tokio::task::block_in_place(|| self.add(file, pod, traffic)) {
                refused.push((uid, why));
            }
        }
        self.publish(refused);
        changed
    }

    /// What was let in and may not stay is ended; then plaintext connections are taken, or left alone, as policies want it now.
    async fn guard(&self, changed: &[Arc<Room>]) {
        if !changed.is_empty() {
            worker::reconsider(&self.workers);
        }
        let rooms: Vec<&Room> = self.kept.values().map(|k| &*k.room).collect();
        let changed: Vec<&Room> = changed.iter().map(|r| &**r).collect();
        self.guards.follow(&self.capture, &rooms, &changed).await;
    }

    fn add(&mut self, file: String, pod: Pod, traffic: &Drain) -> Result<(), String> {
        let netns = std::fs::metadata(&pod.netns).map_err(|e| format!("network namespace {}: {e}", pod.netns.display()))?;
        // Capture first: from here on nothing leaves in the clear, and what dials before the listeners are open is refused.
        let (taken, origins) = self.capture.take(&pod).map_err(|e| e.to_string())?;
        let mut packets = self.capture.guard_packets(&pod, &taken).map_err(|e| e.to_string())?;
        packets.follow(&pod, self.shared.view.load().tenant(&pod.tenant));
        if taken.is_new() && !self.passes_outside(&pod) {
            self.guards.end_dialled(&pod);
        }
        self.leaving.retain(|(p, ..)| p.uid != pod.uid);
        let party = Party::of_pod(&pod, &self.config.cluster, self.config.az.as_str(), None);
        let standing = Standing { file, pod: Arc::new(pod.clone()), netns: (netns.dev(), netns.ino()) };
        let mut room =
            Room::new(pod, party, taken.mode(), origins, &self.config.limits, &self.shared.registry).map_err(|e| e.to_string())?;
        room.packets = packets.counts();
        let room = Arc::new(room);
        dress(&self.shared, &self.config, &self.identities, &room);
        self.guards.begin(&self.capture, &room);
        let (trigger, drain) = traffic.branch();
        accept::open(&self.workers, &room, &drain);
        tracing::info!(pod = standing.pod.uid, mode = taken.mode().name(), "pod served");
        let mut kept = Kept { standing, room, taken, packets, api: None, trigger };
        serve_api(&self.shared, &self.apis, &mut kept);
        self.kept.insert(kept.standing.pod.uid.clone(), kept);
        Ok(())
    }

    /// Whether the pod's tenant is known to let its connections leave the mesh.
    fn passes_outside(&self, pod: &Pod) -> bool {
        self.shared.view.load().tenant(&pod.tenant).is_some_and(|t| t.tenant.outside == OutsideMesh::Passthrough)
    }

    /// Stops listening at once; what is open may finish. The pod stays captured while a process of it lives.
    fn remove(&mut self, uid: &str) {
        let Some(Kept { standing, room, taken, packets, mut trigger, .. }) = self.kept.remove(uid) else { return };
        tracing::info!(pod = uid, "pod gone; draining");
        trigger.drain(self.config.drain_limit);
        let workers = self.workers.clone();
        tokio::spawn(async move {
            trigger.finished(GRACE).await;
            worker::retire(&workers, room.netns.id());
        });
        self.leaving.push((standing.pod, taken, packets));
        self.let_go();
    }

    fn let_go(&mut self) {
        for (pod, taken, packets) in std::mem::take(&mut self.leaving) {
            if Capture::may_release(&pod) {
                self.capture.release(&pod, taken, packets);
            } else {
                self.leaving.push((pod, taken, packets));
            }
        }
        self.gauges.leaving.set(self.leaving.len() as i64);
    }

    fn keep_house(&mut self) {
        self.let_go();
        let (kept, leaving) = (&self.kept, &self.leaving);
        self.capture.sweep(|uid| kept.contains_key(uid) || leaving.iter().any(|(p, ..)| p.uid == uid));
        let show = |counters: &Counters, seen: &mut BTreeMap<String, u64>, now: Vec<(String, u64)>| {
            for (name, now) in now {
                let seen = seen.entry(name.clone()).or_default();
                counters.shared(&[&name]).add(now.saturating_sub(*seen));
                *seen = now;
            }
        };
        show(&self.gauges.verdicts, &mut self.verdicts_seen, self.capture.counters());
        show(&self.gauges.inbound_verdicts, &mut self.inbound_verdicts_seen, self.capture.inbound_counters());
        let view = self.shared.view.load();
        for kept in self.kept.values_mut() {
            kept.packets.follow(&kept.standing.pod, view.tenant(&kept.standing.pod.tenant));
            kept.packets.read(&kept.standing.pod, &self.gauges.packets);
        }
        for (pod, _, packets) in &mut self.leaving {
            packets.read(pod, &self.gauges.packets);
        }
    }

    /// Says which pods have other policies now.
    fn dress_all(&mut self) -> Vec<Arc<Room>> {
        let view = self.shared.view.load_full();
        for kept in self.kept.values_mut() {
            serve_api(&self.shared, &self.apis, kept);
            kept.packets.follow(&kept.standing.pod, view.tenant(&kept.standing.pod.tenant));
        }
        let dressed = self.kept.values().filter(|k| dress(&self.shared, &self.config, &self.identities, &k.room));
        dressed.map(|k| k.room.clone()).collect()
    }

    fn publish(&self, refused: Vec<(String, String)>) {
        let known = self.board.refused.load();
        for (what, why) in refused.iter().filter(|r| !known.contains(r)) {
            self.gauges.refusals.inc();
            tracing::warn!(what, why, "pod not served");
        }
        let mut rooms: Vec<Arc<Room>> = self.kept.values().map(|k| k.room.clone()).collect();
        rooms.sort_by(|a, b| a.pod.load().uid.cmp(&b.pod.load().uid));
        for (mode, gauge) in &self.gauges.modes {
            let used = self.capture.mode() == *mode || rooms.iter().any(|r| r.mode == *mode);
            gauge.set(i64::from(used));
        }
        self.gauges.served.set(rooms.len() as i64);
        self.gauges.refused.set(refused.len() as i64);
        self.board.rooms.store(Arc::new(rooms));
        self.board.refused.store(Arc::new(refused));
        self.board.scanned.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Gives a room the identity its pod has in the present view, its policies and its names. Keeps the identity it has if that is still
/// right, so that live credentials go on renewing. Whether its policies are others now.
fn dress(shared: &Shared, config: &NodeConfig, identities: &Identities, room: &Room) -> bool {
    let pod = room.pod.load_full();
    let view = shared.view.load();
    let held = room.identity.load_full();
    let is_right = |wanted: &Tenant| held.as_ref().is_some_and(|i| i.trust_domain == wanted.trust_domain && i.keys == wanted.keys);
    let wanted = view.tenant(&pod.tenant).map(|t| &*t.tenant).filter(|wanted| !is_right(wanted));
    let fresh = wanted.map(|wanted| Arc::new(identities.of(&pod, wanted)));
    let principal = fresh.as_ref().or(held.as_ref()).map(|i| &i.identity);
    room.party.store(Arc::new(Party::of_pod(&pod, &config.cluster, config.az.as_str(), principal)));
    let is_changed = view.tenant(&pod.tenant).is_some_and(|tenant| renew_policy(room, tenant, &pod));
    // Last: connections wait for it, and for nothing else.
    fresh.into_iter().for_each(|identity| room.identify(identity));
    is_changed
}

/// Gives a room the policies that its tenant has for it now. Whether they are others than before.
pub fn renew_policy(room: &Room, tenant: &TenantView, pod: &Pod) -> bool {
    let basis = Basis::new(tenant, pod);
    if room.basis.load().as_ref().is_some_and(|held| held.is_same(&basis)) {
        return false;
    }
    let renewed = PodPolicy::renew(&room.policy.load(), Some(tenant), pod);
    room.basis.store(Some(Arc::new(basis)));
    let is_new = renewed.is_some();
    renewed.into_iter().for_each(|policy| room.policy.store(Arc::new(policy)));
    is_new
}

/// Serves the Workload API to a pod that asks for it, as the identity it has now, and tells it whom its tenant believes.
fn serve_api(shared: &Shared, apis: &WorkloadApis, kept: &mut Kept) {
    let (pod, view) = (kept.room.pod.load(), shared.view.load());
    let Some(tenant) = view.tenant(&pod.tenant).filter(|_| pod.workload_api) else { return };
    let identity = pod.identity(tenant.tenant.trust_domain.clone());
    if kept.api.as_ref().is_none_or(|api| *api.identity() != identity) {
        // The old one's sockets close with it.
        kept.api = None;
        let trust = shared.trust.view(&pod.tenant);
        kept.api = Some(apis.start(&kept.room.netns, identity, tenant.tenant.keys.algorithm, trust));
    }
    if let Some(api) = &kept.api {
        api.tell(&tenant.bundles);
    }
}

/// A stream that yields whenever the directory may have changed; never ends. Without inotify it never yields, and the clock does the work.
fn watch_directory(dir: &Path) -> std::pin::Pin<Box<dyn futures::Stream<Item = ()> + Send>> {
    use inotify::{Inotify, WatchMask};
    let watch = || -> std::io::Result<_> {
        let inotify = Inotify::init()?;
        let mask = WatchMask::CLOSE_WRITE | WatchMask::MOVED_TO | WatchMask::MOVED_FROM | WatchMask::DELETE;
        inotify.watches().add(dir, mask)?;
        inotify.into_event_stream([0u8; 4096])
    };
    match watch() {
        Ok(events) => Box::pin(events.ready_chunks(64).map(|_| ()).chain(futures::stream::pending())),
        Err(error) => {
            tracing::warn!(dir = %dir.display(), %error, every = ?RESCAN, "cannot watch the pods directory; reading it by the clock");
            Box::pin(futures::stream::pending())
        }
    }
}

#[cfg(test)]
mod tests;

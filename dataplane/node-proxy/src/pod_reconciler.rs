//! Reconciles the served pods with the pods directory: captures and serves new pods, drains and
//! releases pods that are gone, assigns identities.
//!
//! [`decide_changes`] compares, without IO; the rest executes its result.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use canal_model::ids::Generation;
use canal_model::program::{OutboundTrafficPolicy, Tenant};
use canal_net::worker::Workers;
use canal_offload::connect_tables::ConnectRefusals;
use canal_runtime::drain::{DrainTrigger, DrainWatcher};
use canal_runtime::metrics::{CounterFamily, MetricFamily, SharedCounter, SharedGauge};
use futures::StreamExt;
use tokio::sync::watch;

use crate::accept;
use crate::authorization::{PodPolicy, PolicySources};
use crate::capture::{CaptureBackend, CaptureMode, CapturedPod};
use crate::config::{NodeConfig, PODS_MAX};
use crate::connect_policies::{ConnectPolicies, decide_refusals};
use crate::identities::PodIdentityFactory;
use crate::packets::PodPackets;
use crate::plaintext_capture::PlaintextCapture;
use crate::pod::{LocalPod, PodError};
use crate::pod_context::PodContext;
use crate::snapshot::NodeTenantView;
use crate::telemetry::EndpointLabels;
use crate::worker::{self, NodeShared};
use crate::workload_api::{WorkloadApi, WorkloadApis};

/// Interval of scans, whether or not inotify reports changes. Releasing pods that are gone and
/// reading counters happen at the same interval. A lost inotify event delays a pod by that. The
/// kernel's counters appear in metrics as late.
const RESCAN_INTERVAL: Duration = Duration::from_secs(2);
/// Time that a drained pod's tasks may take beyond their deadline. As the node's own.
const GRACE: Duration = Duration::from_secs(2);

/// Device and inode of a namespace file; a pod that is recreated under its old name has another.
type Inode = (u64, u64);

/// Contents of the pods directory at one scan.
#[derive(Debug, Default)]
pub struct PodScan {
    /// File name, pod, and the inode of its namespace if that exists.
    pub pods: Vec<(String, LocalPod, Option<Inode>)>,
    /// File name, and the reason why it was rejected.
    pub broken: Vec<(String, String)>,
}

/// Reads all pod files of a directory. Files that do not end in `.json`, or that begin with a dot,
/// are not pods.
///
/// # Errors
/// The directory cannot be listed.
pub fn scan(dir: &Path) -> std::io::Result<PodScan> {
    let mut names: Vec<String> = std::fs::read_dir(dir)?
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|n| n.ends_with(".json") && !n.starts_with('.'))
        .collect();
    names.sort();
    let mut found = PodScan::default();
    for name in names {
        match LocalPod::read(&dir.join(&name)) {
            Ok(pod) => {
                let inode = std::fs::metadata(&pod.netns)
                    .ok()
                    .map(|m| (m.dev(), m.ino()));
                found.pods.push((name, pod, inode));
            }
            // The file was removed between the listing and the reading.
            Err(PodError::File { .. }) if !dir.join(&name).exists() => {}
            Err(e) => found.broken.push((name, e.to_string())),
        }
    }
    Ok(found)
}

/// A served pod with its file and the inode of its namespace.
#[derive(Debug, Clone)]
pub struct ServedPod {
    pub file: String,
    pub pod: Arc<LocalPod>,
    pub netns: Inode,
}

/// Changes to make, in the order of the fields.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PodChanges {
    pub remove: Vec<String>,
    pub relabel: Vec<LocalPod>,
    pub add: Vec<(String, LocalPod)>,
    /// Uid or file name, and the reason.
    pub refused: Vec<(String, String)>,
}

/// Compares the served pods with a scan. A file that is unreadable now does not remove its pod: a
/// half-written file must not cut connections.
pub fn decide_changes(served_pods: &HashMap<String, ServedPod>, found: PodScan) -> PodChanges {
    let mut c = PodChanges {
        refused: found.broken,
        ..PodChanges::default()
    };
    let unreadable: BTreeSet<String> = c.refused.iter().map(|(file, _)| file.clone()).collect();
    let mut seen = BTreeSet::new();
    for (file, pod, inode) in found.pods {
        // The first file keeps the pod, so that a second one changes nothing that is served.
        if !seen.insert(pod.uid.clone()) {
            c.refused.push((
                file,
                format!(
                    "another file already defines pod {}; fix: remove one of them",
                    pod.uid
                ),
            ));
            continue;
        }
        match served_pods.get(&pod.uid) {
            // A namespace that is gone before its file does not remove the pod either.
            Some(s) if s.pod.same_place(&pod) && inode.is_none_or(|i| i == s.netns) => {
                if *s.pod != pod {
                    c.relabel.push(pod);
                }
            }
            // Sockets and capture depend on everything but labels and probe ports, so they are
            // replaced.
            Some(_) => {
                c.remove.push(pod.uid.clone());
                c.add.push((file, pod));
            }
            None => c.add.push((file, pod)),
        }
    }
    c.remove.extend(
        served_pods
            .iter()
            .filter(|(uid, s)| !seen.contains(*uid) && !unreadable.contains(&s.file))
            .map(|(uid, _)| uid.clone()),
    );
    // A hash map has no order; sorted, equal scans lead to equal steps.
    c.remove.sort();
    // Removed pods make room before new ones are added.
    let capacity = (PODS_MAX as usize).saturating_sub(served_pods.len() - c.remove.len());
    for (_, pod) in c.add.drain(c.add.len().min(capacity)..) {
        c.refused
            .push((pod.uid, format!("the node has {PODS_MAX} pods, its limit")));
    }
    c
}

/// Served and rejected pods, for readers such as the dump.
#[derive(Debug, Default)]
pub struct PodRegistry {
    pub contexts: ArcSwap<Vec<Arc<PodContext>>>,
    /// Uid or file name, and the reason.
    pub refused: ArcSwap<Vec<(String, String)>>,
    /// True if the directory was read once, which readiness requires.
    pub scanned: std::sync::atomic::AtomicBool,
}

struct PodEntry {
    served_pod: ServedPod,
    context: Arc<PodContext>,
    captured: CapturedPod,
    packets: PodPackets,
    /// Workload API of a pod that requests it, once the tenant is known.
    api: Option<WorkloadApi>,
    /// Refusals of the connect hook that are already recorded.
    refused_at_connect: ConnectRefusals,
    // Dropping the trigger would cut the pod's connections.
    trigger: DrainTrigger,
}

struct Gauges {
    served: SharedGauge,
    refused: SharedGauge,
    leaving: SharedGauge,
    substituted: SharedGauge,
    modes: [(CaptureMode, SharedGauge); 2],
    refusals: SharedCounter,
    verdicts: CounterFamily,
    inbound_verdicts: CounterFamily,
    packets: CounterFamily,
}

/// Task that reconciles the served pods with the directory.
pub struct PodReconciler {
    config: Arc<NodeConfig>,
    capture: CaptureBackend,
    shared: Arc<NodeShared>,
    identities: PodIdentityFactory,
    apis: WorkloadApis,
    workers: Workers,
    pod_registry: Arc<PodRegistry>,
    entries: HashMap<String, PodEntry>,
    /// Pods that are gone but still have processes; they stay captured.
    leaving: Vec<(Arc<LocalPod>, CapturedPod, PodPackets)>,
    guards: PlaintextCapture,
    connect_policies: ConnectPolicies,
    gauges: Gauges,
    verdicts_seen: BTreeMap<String, u64>,
    inbound_verdicts_seen: BTreeMap<String, u64>,
}

impl PodReconciler {
    /// Registers the metrics. No pod is captured yet.
    pub fn new(
        config: Arc<NodeConfig>,
        capture: CaptureBackend,
        shared: Arc<NodeShared>,
        identities: PodIdentityFactory,
        apis: WorkloadApis,
        workers: Workers,
        pod_registry: Arc<PodRegistry>,
    ) -> Self {
        let r = &shared.registry;
        let pods = r.gauges(MetricFamily::new(
            "canal_node_pods",
            "Pods of this node, by state.",
            &["state"],
        ));
        let substituted = MetricFamily::new(
            "canal_node_substituted_pods",
            "Pods whose applications see a substitute for every client.",
            &[],
        );
        let modes = r.gauges(MetricFamily::new(
            "canal_node_capture_mode",
            "1 for each capture mechanism in use.",
            &["mode"],
        ));
        let gauges = Gauges {
            served: pods.shared(&["served"]),
            refused: pods.shared(&["refused"]),
            leaving: pods.shared(&["leaving"]),
            substituted: r.gauges(substituted).shared(&[]),
            modes: [CaptureMode::Bpf, CaptureMode::Nft].map(|m| (m, modes.shared(&[m.name()]))),
            refusals: r.counters(MetricFamily::new("canal_node_pod_refusals_total", "Pod files that were newly refused.", &[])).shared(&[]),
            verdicts: r.counters(MetricFamily::new(
                "canal_capture_verdicts_total",
                "Connections, by the verdict of the capture programs.",
                &["verdict"],
            )),
            inbound_verdicts: r.counters(MetricFamily::new(
                "canal_inbound_verdicts_total",
                "Connections of plaintext into pods, by the verdict of the program that captures them.",
                &["verdict"],
            )),
            packets: r.counters(MetricFamily::new(
                "canal_pod_guard_packets_total",
                "Packets that the pod guards evaluated.",
                &["tenant", "verdict"],
            )),
        };
        let guards = PlaintextCapture::new(r, config.trusts_node);
        let connect_policies = ConnectPolicies::new(r);
        Self {
            config,
            capture,
            shared,
            identities,
            apis,
            workers,
            pod_registry,
            entries: HashMap::new(),
            leaving: Vec::new(),
            guards,
            connect_policies,
            gauges,
            verdicts_seen: BTreeMap::new(),
            inbound_verdicts_seen: BTreeMap::new(),
        }
    }

    /// Follows the directory until `traffic` drains, then retains what the drain needs until
    /// `process` is forced.
    pub async fn run(
        mut self,
        mut generations: watch::Receiver<Generation>,
        traffic: DrainWatcher,
        process: DrainWatcher,
    ) {
        let mut events = watch_directory(&self.config.pods_dir);
        let mut tick = tokio::time::interval(RESCAN_INTERVAL);
        // One scan sees all changes, so scans that a stall delayed are not repeated.
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut settled = false;
        loop {
            tokio::select! {
                () = traffic.draining() => break,
                // Several events at once cause one scan.
                _ = events.next() => {
                    let changed = self.rescan(&traffic);
                    self.guard(&changed).await;
                }
                _ = tick.tick() => {
                    let changed = self.rescan(&traffic);
                    self.guard(&changed).await;
                    // The first scan has attached all pods, so nothing uses the maps of older
                    // versions.
                    if !std::mem::replace(&mut settled, true) {
                        self.capture.settled();
                    }
                    // No event tells when maintenance is due, so it follows the interval.
                    self.run_maintenance();
                }
                changed = generations.changed() => {
                    // The subscriber ends only with the process.
                    if changed.is_err() {
                        break;
                    }
                    let changed = self.assign_identities();
                    // Gateways that the new snapshot lacks need no record of their health.
                    worker::forget_gateways(&self.workers);
                    self.guard(&changed).await;
                }
            }
        }
        // The drain ends when the last watcher of it is dropped.
        drop(traffic);
        // Dropping an API ends its streams and sockets, for which no drain waits.
        self.entries.values_mut().for_each(|k| k.api = None);
        process.forced().await;
    }

    /// Applies the directory's changes. Returns the pods whose policies changed.
    fn rescan(&mut self, traffic: &DrainWatcher) -> Vec<Arc<PodContext>> {
        // Reading a directory blocks, so other tasks of this thread move on.
        let found = match tokio::task::block_in_place(|| scan(&self.config.pods_dir)) {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(dir = %self.config.pods_dir.display(), %error, "node: cannot read the pods directory; keeping the known pods");
                return Vec::new();
            }
        };
        let mut changed = Vec::new();
        let served_pods = self
            .entries
            .iter()
            .map(|(uid, k)| (uid.clone(), k.served_pod.clone()))
            .collect();
        let PodChanges {
            remove,
            relabel,
            add,
            mut refused,
        } = decide_changes(&served_pods, found);
        // Removals come first, because a replaced pod is in both lists.
        for uid in remove {
            self.remove(&uid);
        }
        for pod in relabel {
            // `decide_changes` relabels pods that are served.
            if let Some(k) = self.entries.get_mut(&pod.uid) {
                k.served_pod.pod = Arc::new(pod.clone());
                k.context.pod.store(Arc::new(pod));
                if assign_identity(&self.shared, &self.config, &self.identities, &k.context) {
                    changed.push(k.context.clone());
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

    /// Ends open connections that policies no longer allow, then starts or stops redirecting
    /// plaintext as the policies require.
    async fn guard(&self, changed: &[Arc<PodContext>]) {
        if !changed.is_empty() {
            worker::reauthorize_open(&self.workers);
        }
        let contexts: Vec<&PodContext> = self.entries.values().map(|k| &*k.context).collect();
        let changed: Vec<&PodContext> = changed.iter().map(|r| &**r).collect();
        self.guards.follow(&self.capture, &contexts, &changed).await;
    }

    fn add(&mut self, file: String, pod: LocalPod, traffic: &DrainWatcher) -> Result<(), String> {
        let netns = std::fs::metadata(&pod.netns)
            .map_err(|e| format!("network namespace {}: {e}", pod.netns.display()))?;
        // Capture first: from here on nothing leaves unencrypted, and connections are refused until
        // the listeners are open.
        let (taken, origins) = self.capture.take(&pod).map_err(|e| e.to_string())?;
        // Connections from before the capture would go on unencrypted, which only a tenant with
        // passthrough permits. They end before anything can fail: a second attempt would adopt the
        // capture of this one, which is not new then.
        if taken.is_new() && !self.passes_outside(&pod) {
            self.guards.end_dialled(&pod);
        }
        let mut packets = self
            .capture
            .guard_packets(&pod, &taken)
            .map_err(|e| e.to_string())?;
        packets.follow(&pod, self.shared.view.load().tenant(&pod.tenant));
        // A pod that returns before its last process ended must not be released any more.
        self.leaving.retain(|(p, ..)| p.uid != pod.uid);
        let labels =
            EndpointLabels::of_pod(&pod, &self.config.cluster, self.config.az.as_str(), None);
        let served_pod = ServedPod {
            file,
            pod: Arc::new(pod.clone()),
            netns: (netns.dev(), netns.ino()),
        };
        let mut context = PodContext::new(
            pod,
            labels,
            taken.mode(),
            origins,
            &self.config.limits,
            &self.shared.registry,
        )
        .map_err(|e| e.to_string())?;
        context.packets = packets.counts();
        context.delivery = CaptureBackend::prepare_delivery(&served_pod.pod);
        let context = Arc::new(context);
        // Its result does not matter: a new pod has no open connections to reauthorize.
        assign_identity(&self.shared, &self.config, &self.identities, &context);
        self.guards.begin(&self.capture, &context);
        let (trigger, drain) = traffic.branch();
        accept::open(&self.workers, &context, &drain);
        tracing::info!(
            pod = served_pod.pod.uid,
            mode = taken.mode().name(),
            "node: serving a pod"
        );
        let refused_at_connect = ConnectRefusals::default();
        let mut entry = PodEntry {
            served_pod,
            context,
            captured: taken,
            packets,
            api: None,
            refused_at_connect,
            trigger,
        };
        serve_api(&self.shared, &self.apis, &mut entry);
        self.entries.insert(entry.served_pod.pod.uid.clone(), entry);
        Ok(())
    }

    /// Returns whether the pod's tenant is known and permits connections that leave the mesh.
    fn passes_outside(&self, pod: &LocalPod) -> bool {
        self.shared
            .view
            .load()
            .tenant(&pod.tenant)
            .is_some_and(|t| t.tenant.outbound_traffic_policy == OutboundTrafficPolicy::Passthrough)
    }

    /// Stops listening at once; open connections may finish. The pod stays captured while one of
    /// its processes lives.
    fn remove(&mut self, uid: &str) {
        let Some(PodEntry {
            served_pod,
            context,
            captured: taken,
            packets,
            mut trigger,
            ..
        }) = self.entries.remove(uid)
        else {
            return;
        };
        tracing::info!(pod = uid, "node: a pod was removed; draining it");
        trigger.drain(self.config.drain_limit);
        let workers = self.workers.clone();
        tokio::spawn(async move {
            trigger.finished(GRACE).await;
            worker::retire(&workers, context.netns.id());
        });
        self.leaving.push((served_pod.pod, taken, packets));
        self.let_go();
    }

    fn let_go(&mut self) {
        for (pod, taken, packets) in std::mem::take(&mut self.leaving) {
            if CaptureBackend::may_release(&pod) {
                self.capture.release(&pod, taken, packets);
            } else {
                self.leaving.push((pod, taken, packets));
            }
        }
        self.gauges.leaving.set(self.leaving.len() as i64);
    }

    fn run_maintenance(&mut self) {
        self.let_go();
        let (entries, leaving) = (&self.entries, &self.leaving);
        self.capture
            .sweep(|uid| entries.contains_key(uid) || leaving.iter().any(|(p, ..)| p.uid == uid));
        let show = |counters: &CounterFamily,
                    seen: &mut BTreeMap<String, u64>,
                    now: Vec<(String, u64)>| {
            for (name, now) in now {
                let seen = seen.entry(name.clone()).or_default();
                counters.shared(&[&name]).add(now.saturating_sub(*seen));
                *seen = now;
            }
        };
        show(
            &self.gauges.verdicts,
            &mut self.verdicts_seen,
            self.capture.counters(),
        );
        show(
            &self.gauges.inbound_verdicts,
            &mut self.inbound_verdicts_seen,
            self.capture.inbound_counters(),
        );
        self.record_connect_refusals();
        let view = self.shared.view.load();
        for entry in self.entries.values_mut() {
            entry.packets.follow(
                &entry.served_pod.pod,
                view.tenant(&entry.served_pod.pod.tenant),
            );
            entry
                .packets
                .read(&entry.served_pod.pod, &self.gauges.packets);
        }
        for (pod, _, packets) in &mut self.leaving {
            packets.read(pod, &self.gauges.packets);
        }
    }

    /// Records the refusals of the connect hook since the last call in the metrics and the access
    /// log.
    fn record_connect_refusals(&mut self) {
        let Some(tables) = self.capture.connect_tables() else {
            return;
        };
        for entry in self.entries.values_mut() {
            let Some(Ok(now)) = entry
                .captured
                .netns_cookie()
                .map(|cookie| tables.refusals(cookie))
            else {
                continue;
            };
            let refusals =
                decide_refusals(&std::mem::replace(&mut entry.refused_at_connect, now), &now);
            if !refusals.is_empty() {
                worker::record_connect_refusals(
                    &self.workers,
                    entry.context.pod.load_full(),
                    entry.context.labels.load_full(),
                    refusals,
                );
            }
        }
    }

    /// Applies the present snapshot to all pods. Returns the pods whose policies changed.
    fn assign_identities(&mut self) -> Vec<Arc<PodContext>> {
        let view = self.shared.view.load_full();
        tokio::task::block_in_place(|| self.connect_policies.follow(&self.capture, &view));
        for entry in self.entries.values_mut() {
            serve_api(&self.shared, &self.apis, entry);
            entry.packets.follow(
                &entry.served_pod.pod,
                view.tenant(&entry.served_pod.pod.tenant),
            );
        }
        let identified = self
            .entries
            .values()
            .filter(|k| assign_identity(&self.shared, &self.config, &self.identities, &k.context));
        identified.map(|k| k.context.clone()).collect()
    }

    fn publish(&self, refused: Vec<(String, String)>) {
        let known = self.pod_registry.refused.load();
        for (what, why) in refused.iter().filter(|r| !known.contains(r)) {
            self.gauges.refusals.inc();
            tracing::warn!(what, why, "node: a pod is not served");
        }
        let mut contexts: Vec<Arc<PodContext>> =
            self.entries.values().map(|k| k.context.clone()).collect();
        contexts.sort_by(|a, b| a.pod.load().uid.cmp(&b.pod.load().uid));
        for (mode, gauge) in &self.gauges.modes {
            let used = self.capture.mode() == *mode || contexts.iter().any(|r| r.mode == *mode);
            gauge.set(i64::from(used));
        }
        self.gauges.substituted.set(
            contexts
                .iter()
                .filter(|r| !r.delivery.is_transparent)
                .count() as i64,
        );
        self.gauges.served.set(contexts.len() as i64);
        self.gauges.refused.set(refused.len() as i64);
        self.pod_registry.contexts.store(Arc::new(contexts));
        self.pod_registry.refused.store(Arc::new(refused));
        self.pod_registry
            .scanned
            .store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Assigns to a pod the identity, policies and labels of the present snapshot. An identity that is
/// still right stays, so that its credentials go on renewing. Returns whether the policies changed.
fn assign_identity(
    shared: &NodeShared,
    config: &NodeConfig,
    identities: &PodIdentityFactory,
    context: &PodContext,
) -> bool {
    let pod = context.pod.load_full();
    let view = shared.view.load();
    let current = context.identity.load_full();
    let is_right = |wanted: &Tenant| {
        current
            .as_ref()
            .is_some_and(|i| i.trust_domain == wanted.trust_domain && i.keys == wanted.keys)
    };
    let wanted = view
        .tenant(&pod.tenant)
        .map(|t| &*t.tenant)
        .filter(|wanted| !is_right(wanted));
    let fresh = wanted.map(|wanted| Arc::new(identities.of(&pod, wanted)));
    let principal = fresh.as_ref().or(current.as_ref()).map(|i| &i.identity);
    context.labels.store(Arc::new(EndpointLabels::of_pod(
        &pod,
        &config.cluster,
        config.az.as_str(),
        principal,
    )));
    let is_changed = view
        .tenant(&pod.tenant)
        .is_some_and(|tenant| renew_policy(context, tenant, &pod));
    // Last, because connections wait for the identity and for nothing else.
    fresh
        .into_iter()
        .for_each(|identity| context.identify(identity));
    is_changed
}

/// Assigns to a pod the policies that its tenant has for it now. Returns whether they changed.
pub fn renew_policy(context: &PodContext, tenant: &NodeTenantView, pod: &LocalPod) -> bool {
    let basis = PolicySources::new(tenant, pod);
    if context
        .basis
        .load()
        .as_ref()
        .is_some_and(|current| current.is_same(&basis))
    {
        return false;
    }
    let renewed = PodPolicy::renew(&context.policy.load(), Some(tenant), pod);
    context.basis.store(Some(Arc::new(basis)));
    let is_new = renewed.is_some();
    renewed
        .into_iter()
        .for_each(|policy| context.policy.store(Arc::new(policy)));
    is_new
}

/// Serves the Workload API to a pod that requests it, with the pod's present identity, and updates
/// its trust bundles.
fn serve_api(shared: &NodeShared, apis: &WorkloadApis, entry: &mut PodEntry) {
    let (pod, view) = (entry.context.pod.load(), shared.view.load());
    let Some(tenant) = view.tenant(&pod.tenant).filter(|_| pod.workload_api) else {
        return;
    };
    let identity = pod.identity(tenant.tenant.trust_domain.clone());
    if entry
        .api
        .as_ref()
        .is_none_or(|api| *api.identity() != identity)
    {
        // Dropping the old API closes its sockets.
        entry.api = None;
        let trust = shared.trust.view(&pod.tenant);
        entry.api = Some(apis.start(
            &entry.context.netns,
            identity,
            tenant.tenant.keys.algorithm,
            trust,
        ));
    }
    if let Some(api) = &entry.api {
        api.notify(&tenant.bundles);
    }
}

/// Returns a stream that yields whenever the directory may have changed, and never ends. Without
/// inotify it never yields; scans by interval remain.
fn watch_directory(dir: &Path) -> std::pin::Pin<Box<dyn futures::Stream<Item = ()> + Send>> {
    use inotify::{Inotify, WatchMask};
    let watch = || -> std::io::Result<_> {
        let inotify = Inotify::init()?;
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE;
        inotify.watches().add(dir, mask)?;
        // An event has 16 bytes and a name of 256 at most; more events wait in the kernel.
        inotify.into_event_stream([0u8; 4096])
    };
    match watch() {
        Ok(events) => Box::pin(
            events
                .ready_chunks(64)
                .map(|_| ())
                .chain(futures::stream::pending()),
        ),
        Err(error) => {
            tracing::warn!(dir = %dir.display(), %error, every = ?RESCAN_INTERVAL, "node: cannot watch the pods directory; reading it at intervals");
            Box::pin(futures::stream::pending())
        }
    }
}

#[cfg(test)]
mod tests;

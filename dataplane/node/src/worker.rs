//! What one worker thread owns: its tunnels, its memory of gateways, its records. Nothing here is shared; what is shared is [`Shared`].

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use arc_swap::ArcSwap;
use canal_kit::drain::Drain;
use canal_kit::hbone::{HboneCounters, Pool, PoolConfig};
use canal_kit::log::AccessLog;
use canal_kit::metrics::{Counter, Counters, Family, Registry};
use canal_kit::sys::NetnsId;
use canal_kit::tls::TrustStore;
use canal_kit::worker::{Worker, WorkerConfig, Workers};
use canal_model::ids::AzName;
use tokio_util::task::TaskTracker;

use crate::gateways::Gateways;
use crate::open::Open;
use crate::telemetry::{Families, Records};
use crate::view::View;

/// What all workers and the control tasks share: read by connections, written rarely.
pub struct Shared {
    pub az: AzName,
    pub view: ArcSwap<View>,
    /// Whom tenants believe.
    pub trust: TrustStore,
    /// Whether the node's own processes (a kubelet's probes) reach pods in plaintext whatever policies say.
    pub trusts_node: bool,
    pub registry: Registry,
    families: Families,
    listen_failures: Counters,
    accept_failures: Counters,
    log: AccessLog,
}

impl Shared {
    /// Registers the metrics.
    pub fn new(az: AzName, registry: Registry, log: AccessLog, trusts_node: bool) -> Self {
        let counters = |name, help| registry.counters(Family::new(name, help, &[]));
        Self {
            az,
            view: ArcSwap::default(),
            trust: TrustStore::new(&registry),
            trusts_node,
            families: Families::new(&registry),
            listen_failures: counters("canal_node_listen_failures_total", "Listeners in pods that could not be opened; tried again."),
            accept_failures: counters("canal_node_accept_failures_total", "Failures of accept, e.g. out of file descriptors."),
            registry,
            log,
        }
    }

    /// Takes a view into force, and with it what the provider wrote for its tenants.
    pub fn take(&self, view: View) {
        self.registry.set_shares(view.tenants().map(|tenant| (&tenant.tenant.name, &tenant.tenant.shares)));
        self.view.store(Arc::new(view));
    }
}

/// One worker's own things.
pub struct Local {
    pub shared: Arc<Shared>,
    pub pool: Pool,
    pub hbone: HboneCounters,
    pub gateways: Gateways,
    /// What was let in.
    pub open: Rc<Open>,
    pub records: Records,
    pub listen_failures: Counter,
    pub accept_failures: Counter,
    tasks: TaskTracker,
}

thread_local! {
    static HERE: RefCell<Option<Rc<Local>>> = const { RefCell::new(None) };
}

impl Local {
    fn new(shared: Arc<Shared>) -> Self {
        let shard = shared.registry.shard();
        let log = shared.log.worker(&shard);
        let hbone = HboneCounters::new(&shared.registry, &shard);
        Self {
            pool: Pool::new(PoolConfig::default(), hbone.clone()),
            hbone,
            gateways: Gateways::default(),
            open: Rc::default(),
            listen_failures: shard.counter(&shared.listen_failures, &[]),
            accept_failures: shard.counter(&shared.accept_failures, &[]),
            records: Records::new(shared.families.clone(), shard, log),
            tasks: TaskTracker::new(),
            shared,
        }
    }

    /// Runs a task of this worker; the worker ends after it.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        self.tasks.spawn_local(task);
    }
}

/// Starts the workers. They end when `drain` does and all their tasks have.
pub fn start(count: usize, shared: &Arc<Shared>, drain: Drain) -> std::io::Result<Workers> {
    let shared = shared.clone();
    let config = WorkerConfig { count, name: "canal-worker", pin: false };
    Workers::start(config, drain, move |worker: Worker| {
        let local = Rc::new(Local::new(shared.clone()));
        HERE.set(Some(local.clone()));
        live(local, worker.drain)
    })
}

async fn live(local: Rc<Local>, drain: Drain) {
    drain.draining().await;
    local.tasks.close();
    tokio::select! {
        () = local.tasks.wait() => {}
        () = drain.forced() => {}
    }
    HERE.set(None);
}

/// The one of the worker that runs this.
pub(crate) fn here() -> Option<Rc<Local>> {
    HERE.with_borrow(Clone::clone)
}

/// Has every worker close its idle tunnels of a namespace that is gone.
pub fn retire(workers: &Workers, netns: NetnsId) {
    for k in 0..workers.count() {
        workers.spawn(k, move || async move {
            if let Some(local) = here() {
                local.pool.retire(Some(netns));
            }
        });
    }
}

/// Has every worker ask again whether what it let in may stay.
pub fn reconsider(workers: &Workers) {
    for k in 0..workers.count() {
        workers.spawn(k, move || async move {
            if let Some(local) = here() {
                local.open.reconsider();
            }
        });
    }
}

/// Has every worker forget gateways that the present view does not know.
pub fn forget_gateways(workers: &Workers) {
    for k in 0..workers.count() {
        workers.spawn(k, move || async move {
            let Some(local) = here() else { return };
            let view = local.shared.view.load_full();
            local.gateways.keep_only(|a| view.tenants().any(|t| t.is_entrance(a.ip())));
        });
    }
}

#[cfg(test)]
mod tests {
    use canal_kit::log::Sink;
    use canal_model::ids::{Generation, Vni};
    use canal_model::program::{OutsideMesh, Resource, Tenant};
    use canal_model::share::{ShareKind, Shares};

    use super::*;

    #[test]
    fn a_tenants_share_of_metric_series_is_what_the_provider_wrote() {
        let (registry, folder) = (Registry::new(), tempfile::tempdir().unwrap());
        let log = AccessLog::start(Sink::File(folder.path().join("log")), &registry).unwrap();
        let shared = Shared::new("az1".parse().unwrap(), registry.clone(), log, false);
        registry.counters(Family::new("stopped_total", "Packets.", &["tenant"])).shared(&["alpha"]).inc();
        let told = |share: Option<&str>| {
            let mut shares = Shares::default();
            share.into_iter().for_each(|share| shares.set(ShareKind::MetricSeries, share.parse().unwrap()));
            let tenant = Resource::Tenant(Tenant {
                name: "alpha".parse().unwrap(),
                vni: Vni::new(101).unwrap(),
                trust_domain: "alpha.example".parse().unwrap(),
                pod_cidrs: Vec::new(),
                gateway_cidrs: Vec::new(),
                outside: OutsideMesh::Deny,
                resolvers: Vec::new(),
                keys: Default::default(),
                shares,
            });
            shared.take(View::from_resources(Generation(1), [&tenant].into_iter(), &"n1".parse().unwrap()));
            let text = registry.render();
            let line = text.lines().find(|l| l.starts_with("canal_share_max{limit=\"metric_series\",tenant=\"alpha\"}"));
            line.and_then(|l| l.rsplit(' ').next()?.parse::<u64>().ok())
        };
        assert_eq!((told(Some("7")), told(None)), (Some(7), Some(1000)));
    }
}

//! State of one worker thread: its HBONE pool, its gateway health table, its metrics. Workers share
//! only [`NodeShared`].

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use arc_swap::ArcSwap;
use canal_hbone::{
    BufferBudget, ConnectionHost, HboneCounters, HbonePool, PoolConfig, SpreadConfig,
};
use canal_model::identity::Identity;
use canal_model::ids::{AzName, TenantName};
use canal_model::share::ShareKind;
use canal_net::sys::NetnsId;
use canal_net::worker::{WorkerConfig, WorkerHandle, Workers};
use canal_runtime::drain::DrainWatcher;
use canal_runtime::limits::show_shares;
use canal_runtime::metrics::{Counter, CounterFamily, MetricFamily, Registry};
use canal_runtime::{RevocationOrder, ShareHolder, TenantLimit, TenantLimitConfig};
use canal_telemetry::access_log::AccessLog;
use canal_tls::TrustStore;
use futures::future::LocalBoxFuture;
use tokio_util::task::TaskTracker;

use crate::gateways::{AttemptTimeouts, GatewayHealthTable};
use crate::open_connections::OpenConnections;
use crate::pod::LocalPod;
use crate::snapshot::NodeSnapshot;
use crate::telemetry::{
    ConnectRefusal, ConnectionMetricFamilies, ConnectionRecorder, EndpointLabels,
};

/// State that all workers and the control tasks share. Connections read it; it is written rarely.
pub struct NodeShared {
    pub az: AzName,
    pub view: ArcSwap<NodeSnapshot>,
    /// Trust bundles of the tenants.
    pub trust: TrustStore,
    /// True if the node's own processes (a kubelet's probes) may reach pods' declared probe ports
    /// in plaintext regardless of policy.
    pub allow_node_probes: bool,
    pub attempt_timeouts: AttemptTimeouts,
    pub registry: Registry,
    /// Bytes held for readers that do not read.
    buffer_bytes: TenantLimit,
    families: ConnectionMetricFamilies,
    listen_failures: CounterFamily,
    accept_failures: CounterFamily,
    log: AccessLog,
}

impl NodeShared {
    /// Registers the metrics and starts with an empty snapshot. The tunnels of all tenants together
    /// hold at most `buffer_bytes`.
    pub fn new(
        az: AzName,
        registry: Registry,
        log: AccessLog,
        trusts_node: bool,
        buffer_bytes: u64,
    ) -> Self {
        let counters = |name, help| registry.counters(MetricFamily::new(name, help, &[]));
        let (kind, capacity) = (ShareKind::NodeBufferBytes, buffer_bytes);
        let buffer_bytes = TenantLimit::new(TenantLimitConfig {
            kind,
            capacity,
            reserve: 0,
            revocation_order: RevocationOrder::OldestFirst,
        });
        show_shares(&registry, &buffer_bytes);
        Self {
            buffer_bytes,
            az,
            view: ArcSwap::default(),
            trust: TrustStore::new(&registry),
            allow_node_probes: trusts_node,
            attempt_timeouts: AttemptTimeouts::default(),
            families: ConnectionMetricFamilies::new(&registry),
            listen_failures: counters(
                "canal_node_listen_failures_total",
                "Listeners in pods that could not be opened; they are retried.",
            ),
            accept_failures: counters(
                "canal_node_accept_failures_total",
                "Failures of accept, e.g. out of file descriptors.",
            ),
            registry,
            log,
        }
    }

    /// Publishes a new snapshot, and the shares that the provider configured for its tenants.
    pub fn take(&self, view: NodeSnapshot) {
        self.registry.set_shares(
            view.tenants()
                .map(|tenant| (&tenant.tenant.name, &tenant.tenant.shares)),
        );
        self.buffer_bytes.set_shares(
            view.tenants()
                .map(|tenant| (&tenant.tenant.name, &tenant.tenant.shares)),
        );
        self.view.store(Arc::new(view));
    }

    /// Returns the budget of the bytes that a tenant's tunnels hold for their readers.
    pub fn buffer_budget(&self, tenant: &TenantName) -> BufferBudget {
        BufferBudget {
            limit: self.buffer_bytes.clone(),
            holder: ShareHolder::Tenant(tenant.clone()),
        }
    }
}

/// Charges what the pool's connections hold to the tenants of their sources.
struct PodsHost(Arc<NodeShared>);

impl ConnectionHost for PodsHost {
    fn spawn(&self, _: &Identity, driver: LocalBoxFuture<'static, ()>) {
        tokio::task::spawn_local(driver);
    }
    fn buffer_budget(&self, source: &Identity) -> Option<BufferBudget> {
        let view = self.0.view.load();
        let tenant = view
            .tenants()
            .find(|view| view.tenant.trust_domain == source.trust_domain)?;
        Some(self.0.buffer_budget(&tenant.tenant.name))
    }
}

/// State of one worker, which no other thread uses.
pub struct WorkerLocal {
    pub shared: Arc<NodeShared>,
    pub pool: HbonePool,
    pub hbone: HboneCounters,
    pub gateways: GatewayHealthTable,
    /// Inbound connections that policies admitted.
    pub open: Rc<OpenConnections>,
    pub records: ConnectionRecorder,
    pub listen_failures: Counter,
    pub accept_failures: Counter,
    tasks: TaskTracker,
}

thread_local! {
    static HERE: RefCell<Option<Rc<WorkerLocal>>> = const { RefCell::new(None) };
}

impl WorkerLocal {
    fn new(shared: Arc<NodeShared>, index: usize, count: usize) -> Self {
        let worker = (
            u32::try_from(index).unwrap_or(0),
            u32::try_from(count).unwrap_or(1),
        );
        let pool = PoolConfig {
            spread: SpreadConfig {
                worker,
                ..SpreadConfig::default()
            },
            ..PoolConfig::default()
        };
        let shard = shared.registry.shard();
        let log = shared.log.worker(&shard);
        let hbone = HboneCounters::new(&shared.registry, &shard);
        Self {
            pool: HbonePool::with_host(pool, hbone.clone(), Rc::new(PodsHost(shared.clone()))),
            hbone,
            gateways: GatewayHealthTable::new(shared.attempt_timeouts),
            open: Rc::default(),
            listen_failures: shard.counter(&shared.listen_failures, &[]),
            accept_failures: shard.counter(&shared.accept_failures, &[]),
            records: ConnectionRecorder::new(shared.families.clone(), shard, log),
            tasks: TaskTracker::new(),
            shared,
        }
    }

    /// Spawns a task on this worker; the worker ends only after it.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        // The state of a connection takes several KiB, which tokio would copy ten times.
        self.tasks.spawn_local(Box::pin(task));
    }
}

/// Starts the workers. They end when `drain` has drained and all their tasks have ended.
///
/// # Errors
/// A thread or its runtime could not be created.
pub fn start(
    count: usize,
    shared: &Arc<NodeShared>,
    drain: DrainWatcher,
) -> std::io::Result<Workers> {
    let shared = shared.clone();
    let config = WorkerConfig {
        count,
        name: "canal-worker",
        pin: false,
    };
    Workers::start(config, drain, move |worker: WorkerHandle| {
        let local = Rc::new(WorkerLocal::new(shared.clone(), worker.index, worker.count));
        HERE.set(Some(local.clone()));
        live(local, worker.drain)
    })
}

async fn live(local: Rc<WorkerLocal>, drain: DrainWatcher) {
    drain.draining().await;
    local.tasks.close();
    tokio::select! {
        () = local.tasks.wait() => {}
        () = drain.forced() => {}
    }
    HERE.set(None);
}

/// Returns the state of the worker that runs this task; `None` on any other thread.
pub(crate) fn here() -> Option<Rc<WorkerLocal>> {
    HERE.with_borrow(Clone::clone)
}

/// Makes every worker close its idle tunnels of a namespace that is gone.
pub fn retire(workers: &Workers, netns: NetnsId) {
    for k in 0..workers.count() {
        workers.spawn(k, move || async move {
            if let Some(local) = here() {
                local.pool.retire(Some(netns));
            }
        });
    }
}

/// Makes every worker reauthorize its open inbound connections.
pub fn reauthorize_open(workers: &Workers) {
    for k in 0..workers.count() {
        workers.spawn(k, move || async move {
            if let Some(local) = here() {
                local.open.reauthorize();
            }
        });
    }
}

/// Makes every worker forget the health of gateways that are not in the present snapshot.
pub fn forget_gateways(workers: &Workers) {
    for k in 0..workers.count() {
        workers.spawn(k, move || async move {
            let Some(local) = here() else { return };
            let view = local.shared.view.load_full();
            local.gateways.keep_only(|a| {
                view.tenants()
                    .any(|t| t.is_entrance(a.ip()) || t.is_direct_pod(a.ip()))
            });
        });
    }
}

/// Makes the first worker record the refusals of the connect hook, because no worker has seen those
/// connections.
pub fn record_connect_refusals(
    workers: &Workers,
    pod: Arc<LocalPod>,
    labels: Arc<EndpointLabels>,
    refusals: Vec<ConnectRefusal>,
) {
    workers.spawn(0, move || async move {
        let Some(local) = here() else { return };
        refusals
            .iter()
            .for_each(|refusal| local.records.refused_at_connect(refusal, &pod, &labels));
    });
}

#[cfg(test)]
mod tests {
    use canal_model::ids::{Generation, Vni};
    use canal_model::program::{OutboundTrafficPolicy, Resource, Tenant};
    use canal_model::share::{ShareKind, Shares};
    use canal_telemetry::access_log::LogSink;

    use super::*;

    #[test]
    fn the_operators_budget_limits_stalled_bytes_of_tenants() {
        let (registry, folder) = (Registry::new(), tempfile::tempdir().unwrap());
        let log = AccessLog::start(LogSink::File(folder.path().join("log")), &registry).unwrap();
        let shared = NodeShared::new("az1".parse().unwrap(), registry, log, false, 3 << 20);
        let BufferBudget { limit, holder } = shared.buffer_budget(&"alpha".parse().unwrap());
        let taken = limit.take_replacing(&holder, 3 << 20);
        assert!(
            taken.is_ok() && limit.take(&holder, 1).is_err(),
            "{:?}",
            limit.usage()
        );
    }

    #[test]
    fn a_tenants_share_of_metric_series_follows_its_tenant_object() {
        let (registry, folder) = (Registry::new(), tempfile::tempdir().unwrap());
        let log = AccessLog::start(LogSink::File(folder.path().join("log")), &registry).unwrap();
        let shared = NodeShared::new(
            "az1".parse().unwrap(),
            registry.clone(),
            log,
            // Probes of the node play no part here.
            false,
            // Any number of bytes for buffers.
            3 << 20,
        );
        registry
            .counters(MetricFamily::new("stopped_total", "Packets.", &["tenant"]))
            .shared(&["alpha"])
            .inc();
        let apply = |share: Option<&str>| {
            let mut shares = Shares::default();
            share
                .into_iter()
                .for_each(|share| shares.set(ShareKind::MetricSeries, share.parse().unwrap()));
            let tenant = Resource::Tenant(Tenant {
                name: "alpha".parse().unwrap(),
                vni: Vni::new(101).unwrap(),
                trust_domain: "alpha.example".parse().unwrap(),
                pod_cidrs: Vec::new(),
                gateway_cidrs: Vec::new(),
                outbound_traffic_policy: OutboundTrafficPolicy::Deny,
                resolvers: Vec::new(),
                keys: Default::default(),
                shares,
            });
            shared.take(NodeSnapshot::from_resources(
                Generation(1),
                [&tenant].into_iter(),
                &"n1".parse().unwrap(),
            ));
            let text = registry.render();
            let line = text.lines().find(|l| {
                l.starts_with("canal_share_max{limit=\"metric_series\",tenant=\"alpha\"}")
            });
            line.and_then(|l| l.rsplit(' ').next()?.parse::<u64>().ok())
        };
        // 1000 series are a tenant's share unless its object names another.
        assert_eq!((apply(Some("7")), apply(None)), (Some(7), Some(1000)));
    }
}

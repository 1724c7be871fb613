//! The additional parts of a replica of the cloud tier: the redirector's programs, their agent, and
//! the DNS server. This module starts and connects them; it does none of their work. Start at
//! [`start`].

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::Context;
use canal_gateway_engine::{GatewayEngine, Handover};
use canal_model::ids::{AzName, BackendName};
use canal_redirector_agent::dns::DnsServer;
use canal_redirector_agent::kernel::{AttachMode, GatewaySockets, TierPrograms};
use canal_redirector_agent::{RedirectorAgent, ReplicaConfig};
use canal_runtime::drain::{DrainObserver, DrainWatcher};
use canal_runtime::metrics::Registry;
use canal_southbound_client::controller_client::ControllerEndpoint;
use canal_southbound_client::{RefusedResource, ResourceState, Update};

/// Interval between two readiness checks of a replica that is not ready yet.
/// A quarter of the interval between an edge's probes (200 ms), so that a ready replica is not late
/// by a probe.
const READY_PAUSE: Duration = Duration::from_millis(50);

/// Settings of a replica of the tier.
#[derive(Debug, Clone)]
pub(crate) struct TierConfig {
    pub(crate) backend: BackendName,
    pub(crate) az: AzName,
    pub(crate) underlay: Ipv4Addr,
    pub(crate) device: String,
    pub(crate) sysfs: PathBuf,
    pub(crate) pin_dir: PathBuf,
    /// Number of shared tunnels; with 0 each flow has its own source port.
    pub(crate) tunnels: u16,
    pub(crate) mtu: u32,
    pub(crate) dns: SocketAddr,
    pub(crate) grace: Duration,
}

/// Parts of the replica beside the engine.
pub(crate) struct ReplicaTasks {
    pub(crate) agent: RedirectorAgent,
    pub(crate) dns: DnsServer,
}

/// Starts the DNS server, which the engine needs at its start.
pub(crate) fn names(
    config: &TierConfig,
    registry: &Registry,
    drain: &DrainWatcher,
    traffic: DrainObserver,
) -> anyhow::Result<DnsServer> {
    DnsServer::start(config.dns, config.az.clone(), registry, drain, traffic).context("--dns-addr")
}

/// Returns the function with which the engine hands connections to the DNS server.
pub(crate) fn handover(dns: &DnsServer) -> Handover {
    let dns = dns.clone();
    Arc::new(move |stream, tenant| Box::pin(dns.take(stream, tenant)))
}

/// Attaches the redirector's programs and starts their agent. Socket steering stays off until
/// [`open_when_ready`].
pub(crate) fn start(
    config: &TierConfig,
    controller: &ControllerEndpoint,
    data_dir: &std::path::Path,
    engine: &Arc<GatewayEngine>,
    dns: DnsServer,
    registry: &Registry,
    drain: &DrainWatcher,
) -> anyhow::Result<ReplicaTasks> {
    // The redirector steers sessions to the engine's own listening sockets.
    let listeners = engine.take_listeners();
    let sockets = GatewaySockets {
        hbone: listeners.hbone,
        plain: listeners.plain,
        dns: Some(dns.socket_fd().context("the DNS socket")?),
    };
    let orders = data_dir.join("orders.json");
    let attach = AttachMode {
        device: config.device.clone(),
        sysfs: config.sysfs.clone(),
        pin_dir: config.pin_dir.clone(),
        address: config.underlay,
        mtu: config.mtu,
        tunnels: config.tunnels,
    };
    let programs = TierPrograms::attach(&attach, &orders, sockets)
        .context("the redirector (--device, --pin-dir)")?;
    let counted = engine.clone();
    let settings = ReplicaConfig {
        az: config.az.clone(),
        backend: config.backend.clone(),
        underlay: config.underlay,
        version: env!("CARGO_PKG_VERSION").into(),
        controller: Some(controller.clone()),
        orders,
        sockets: canal_redirector_agent::session_scan::SessionScanner::kernel(),
    };
    let agent = RedirectorAgent::start(
        settings,
        Box::new(programs),
        Box::new(move || counted.sessions()),
        registry,
        drain,
    )
    .map_err(anyhow::Error::msg)
    .context("reading the redirector's maps")?;
    // A weak reference, because the agent must not keep the engine alive.
    let rebalanced = Arc::downgrade(engine);
    agent.rebalance_with(Box::new(move |service, change| {
        if let Some(engine) = rebalanced.upgrade() {
            engine.rebalance(service, change.left, change.returned);
        }
    }));
    Ok(ReplicaTasks { agent, dns })
}

impl ReplicaTasks {
    /// Applies a state that the engine already uses. Returns the resources that do not fit into the
    /// redirector's maps.
    pub(crate) fn apply(&self, update: &Update, state: &ResourceState) -> Vec<RefusedResource> {
        self.dns.apply(update, state);
        let omitted = self.agent.apply(update, state);
        omitted
            .iter()
            .map(|(kind, name, why)| RefusedResource::for_want_of_room(*kind, name, why))
            .collect()
    }
}

/// Starts socket steering once `ready` succeeds. Until then the redirector passes new sessions on
/// to other replicas. If a drain begins earlier, steering is never started.
pub(crate) async fn open_when_ready(
    agent: RedirectorAgent,
    ready: impl Fn() -> Result<(), String>,
    drain: DrainObserver,
) {
    let waiting = async {
        while ready().is_err() {
            tokio::time::sleep(READY_PAUSE).await;
        }
    };
    tokio::select! {
        biased;
        () = drain.draining() => agent.stop_steering(),
        () = waiting => match agent.start_steering() {
            Ok(()) => tracing::info!("gateway: opened the service listeners"),
            Err(error) => tracing::error!(error, "gateway: cannot open the service listeners, so no session can arrive"),
        },
    }
}

/// Starts and ends the engine's soft drain when the agent requests it.
pub(crate) async fn follow_soft_drain(agent: RedirectorAgent, engine: Weak<GatewayEngine>) {
    let mut drain_requests = agent.soft_drain();
    loop {
        let parts = *drain_requests.borrow_and_update();
        let Some(engine) = engine.upgrade() else {
            return;
        };
        engine.set_soft_drain(parts);
        drop(engine);
        tracing::info!(parts, "gateway: soft drain changed");
        if drain_requests.changed().await.is_err() {
            return;
        }
    }
}

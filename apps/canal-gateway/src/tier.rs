//! What makes this process a replica of the cloud tier: the redirector's programs, their agent, the name service. Starts and joins them; none
//! of their work is here.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::Context;
use canal_gateway_engine::{Engine, Handover};
use canal_kit::controller::Controller;
use canal_kit::drain::Drain;
use canal_kit::metrics::Registry;
use canal_kit::southbound::{RefusedResource, State, Update};
use canal_model::ids::{AzName, BackendName};
use canal_redirector::dns::Dns;
use canal_redirector::kernel::{Attach, Programs, Sockets};
use canal_redirector::{Agent, Config};

/// How often a replica that is not ready yet is looked at.
const READY_PAUSE: Duration = Duration::from_millis(50);

/// The replica's settings.
#[derive(Debug, Clone)]
pub(crate) struct TierConfig {
    pub(crate) backend: BackendName,
    pub(crate) az: AzName,
    pub(crate) underlay: Ipv4Addr,
    pub(crate) device: String,
    pub(crate) pin_dir: PathBuf,
    /// 0: each flow its own.
    pub(crate) tunnels: u16,
    pub(crate) mtu: u32,
    pub(crate) dns: SocketAddr,
    pub(crate) grace: Duration,
}

/// The replica's parts beside the engine.
pub(crate) struct Replica {
    pub(crate) agent: Agent,
    pub(crate) dns: Dns,
}

/// Opens the name service, which the engine must know before it starts.
pub(crate) fn names(config: &TierConfig, registry: &Registry, drain: &Drain) -> anyhow::Result<Dns> {
    Dns::start(config.dns, config.az.clone(), registry, drain).context("--dns-addr")
}

/// How the engine hands connections to the name service.
pub(crate) fn handover(dns: &Dns) -> Handover {
    let dns = dns.clone();
    Arc::new(move |stream| dns.take(stream))
}

/// Puts the redirector's programs in place and starts their agent. The doors stay shut until [`open_when_ready`].
pub(crate) fn start(
    config: &TierConfig,
    controller: &Controller,
    data_dir: &std::path::Path,
    engine: &Arc<Engine>,
    dns: Dns,
    registry: &Registry,
    drain: &Drain,
) -> anyhow::Result<Replica> {
    let doors = engine.take_doors();
    let sockets = Sockets { hbone: doors.hbone, plain: doors.plain, dns: Some(dns.door().context("the DNS socket")?) };
    let orders = data_dir.join("orders.json");
    let attach = Attach {
        device: config.device.clone(),
        pin_dir: config.pin_dir.clone(),
        address: config.underlay,
        mtu: config.mtu,
        tunnels: config.tunnels,
    };
    let programs = Programs::attach(&attach, &orders, sockets).context("the redirector (--device, --pin-dir)")?;
    let counted = engine.clone();
    let settings = Config {
        az: config.az.clone(),
        backend: config.backend.clone(),
        underlay: config.underlay,
        version: env!("CARGO_PKG_VERSION").into(),
        controller: Some(controller.clone()),
        orders,
        sockets: canal_redirector::sockets::Sockets::kernel(),
    };
    let agent = Agent::start(settings, Box::new(programs), Box::new(move || counted.sessions()), registry, drain)
        .map_err(anyhow::Error::msg)
        .context("reading the redirector's maps")?;
    Ok(Replica { agent, dns })
}

impl Replica {
    /// Takes a state that the engine serves by already.
    /// Gives the resources that the redirector's maps have no room for.
    pub(crate) fn apply(&self, update: &Update, state: &State) -> Vec<RefusedResource> {
        self.dns.apply(update, state);
        let omitted = self.agent.apply(update, state);
        omitted.iter().map(|(kind, name, why)| RefusedResource::for_want_of_room(*kind, name, why)).collect()
    }
}

/// Opens the doors once `ready` says so: until then the redirector passes new sessions on to other replicas. A drain that begins
/// before leaves them shut.
pub(crate) async fn open_when_ready(agent: Agent, ready: impl Fn() -> Result<(), String>, drain: canal_kit::drain::Watcher) {
    let waiting = async {
        while ready().is_err() {
            tokio::time::sleep(READY_PAUSE).await;
        }
    };
    tokio::select! {
        biased;
        () = drain.draining() => agent.forget_doors(),
        () = waiting => match agent.open_doors() {
            Ok(()) => tracing::info!("the doors are open"),
            Err(error) => tracing::error!(error, "the doors cannot be opened: no session can come"),
        },
    }
}

/// Has the engine ask its clients to leave while the agent says so.
pub(crate) async fn part_when_told(agent: Agent, engine: Weak<Engine>) {
    let mut parting = agent.parting();
    loop {
        let parts = *parting.borrow_and_update();
        let Some(engine) = engine.upgrade() else { return };
        engine.part(parts);
        drop(engine);
        tracing::info!(parts, "whether clients are asked to take their sessions elsewhere");
        if parting.changed().await.is_err() {
            return;
        }
    }
}

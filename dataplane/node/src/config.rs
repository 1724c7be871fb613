//! Everything an operator may set, with its defaults. Reading flags is `apps/canal-node`'s business.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use canal_kit::controller::Controller;
use canal_kit::keys::ServerAddress;
use canal_kit::log::Sink;
use canal_model::ids::{AzName, NodeName};

/// How pods are captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CaptureChoice {
    /// BPF; nftables, loudly, where the kernel refuses BPF.
    #[default]
    Auto,
    /// BPF or nothing.
    Bpf,
    /// nftables.
    Nft,
}

/// The node proxy's settings.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// This node's name.
    pub node: NodeName,
    pub az: AzName,
    /// Named in `baggage` and labels.
    pub cluster: String,
    pub controller: Controller,
    /// The provider's key servers, for tenants whose keys are there.
    pub key_servers: Vec<ServerAddress>,
    /// Snapshot, certificates and, without a machine-wide one, a bpffs.
    pub data_dir: PathBuf,
    /// One file per pod of this node.
    pub pods_dir: PathBuf,
    pub capture: CaptureChoice,
    /// Where capture is kept while no proxy runs; `None`: see `canal_offload::default_pin_dir`.
    pub pin_dir: Option<PathBuf>,
    /// Worker threads; 0 is one per core.
    pub workers: usize,
    pub admin: SocketAddr,
    pub metrics: SocketAddr,
    pub readiness: SocketAddr,
    pub access_log: Sink,
    /// Whether this node's own processes reach pods' declared probe ports in plaintext whatever policies say, as a kubelet's probes must.
    pub trusts_node: bool,
    /// File with the containers of this host that have an interface of their own and no node proxy; `None`: none is guarded.
    pub interface_bindings: Option<PathBuf>,
    /// What is open may finish for so long after SIGTERM, or after its pod is gone.
    pub drain_limit: Duration,
    pub limits: Limits,
}

/// Named limits, each per pod.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Captured connections.
    pub outbound: u64,
    /// Tunnels that came in.
    pub inbound: u64,
    /// HBONE connections (each carries up to 200 tunnels).
    pub hbone: u64,
}

impl Limits {
    /// HBONE connections whose peer has not authenticated: a quarter, so that they never fill a pod's.
    pub fn unauthenticated(&self) -> usize {
        usize::try_from(self.hbone / 4).unwrap_or(usize::MAX)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self { outbound: 16_384, inbound: 16_384, hbone: 1_024 }
    }
}

/// Pods of one node at most (Kubernetes' own limit is 110, the largest supported setting 500).
pub const PODS_MAX: u64 = 1_000;

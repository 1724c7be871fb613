//! The operator's settings with their defaults. `apps/canal-node` parses the command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use canal_hbone::BUFFER_BYTES_MIN;
use canal_keyserver_client::ServerAddress;
use canal_model::ids::{AzName, NodeName};
use canal_southbound_client::controller_client::ControllerEndpoint;
use canal_telemetry::access_log::LogSink;

/// Mechanism that captures pods' connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CaptureChoice {
    /// BPF; if the kernel refuses BPF, nftables with a loud warning.
    #[default]
    Auto,
    /// BPF only; start-up fails if the kernel refuses it.
    Bpf,
    /// nftables only; BPF is not tried.
    Nft,
}

/// Settings of the node proxy.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Name of this node in the mesh.
    pub node: NodeName,
    pub az: AzName,
    /// Cluster name in `baggage` and in metric labels.
    pub cluster: String,
    pub controller: ControllerEndpoint,
    /// The provider's key servers, for tenants whose private keys are stored there.
    pub key_servers: Vec<ServerAddress>,
    /// Directory of the southbound state file, of certificates and, if the machine has none, of a
    /// bpffs.
    pub data_dir: PathBuf,
    /// Directory with one file per pod of this node.
    pub pods_dir: PathBuf,
    pub capture: CaptureChoice,
    /// Directory of the pins that keep pods captured while no proxy runs; `None`:
    /// `canal_offload::default_pin_dir`.
    pub pin_dir: Option<PathBuf>,
    /// Number of worker threads; 0 means one per core.
    pub workers: usize,
    pub admin: SocketAddr,
    pub metrics: SocketAddr,
    pub readiness: SocketAddr,
    pub access_log: LogSink,
    /// True if this node's own processes may reach pods' declared probe ports in plaintext
    /// regardless of policy, as a kubelet's probes must.
    pub trusts_node: bool,
    /// File that lists the containers of this host with an interface of their own and no node
    /// proxy; `None`: no interface is guarded.
    pub interface_bindings: Option<PathBuf>,
    /// Time for which open connections may continue after SIGTERM, or after their pod is gone.
    pub drain_limit: Duration,
    pub limits: PodLimits,
    /// Bytes that all tunnels of the node together hold for readers that do not read.
    pub buffer_bytes: u64,
}

/// A node holds this many bytes for readers that do not read, unless the operator sets
/// [`NodeConfig::buffer_bytes`]. Half of a gateway's, because a node serves fewer connections.
/// Nobody measured the value.
pub const BUFFER_BYTES: u64 = 512 << 20;

/// Connection limits of each pod.
#[derive(Debug, Clone, Copy)]
pub struct PodLimits {
    /// Captured outbound connections, at most.
    pub outbound: u64,
    /// Inbound HBONE tunnels, at most.
    pub inbound: u64,
    /// Inbound HBONE connections, at most; each carries up to 200 tunnels.
    pub hbone: u64,
}

impl PodLimits {
    /// Returns the limit of HBONE connections whose peer has not authenticated. It is a quarter of
    /// all, so that they never exhaust the pod's limit.
    pub fn unauthenticated(&self) -> usize {
        usize::try_from(self.hbone / 4).unwrap_or(usize::MAX)
    }
}

impl Default for PodLimits {
    fn default() -> Self {
        Self {
            // Below the 28,232 ephemeral ports of a pod (Linux's default), so that a refusal has
            // this limit's name.
            outbound: 16_384,
            // As many as out of the pod.
            inbound: 16_384,
            // At 200 tunnels each they carry more tunnels than `inbound` permits; a peer that
            // spreads its streams has 16 for each of its workers.
            hbone: 1_024,
        }
    }
}

/// Pods of one node, at most. Kubernetes' own limit is 110, the largest supported setting 500. So
/// the limit has room for twice as many.
pub const PODS_MAX: u64 = 1_000;

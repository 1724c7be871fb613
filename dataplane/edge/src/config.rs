//! The edge's settings.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use canal_kit::controller::Controller;
use canal_model::ids::{AzName, EdgeName};

/// Where a replica answers health probes, on its underlay address.
pub const READINESS_PORT: u16 = 15021;
/// Between two probes of one replica.
pub const PROBE_PAUSE: Duration = Duration::from_millis(200);
/// A probe that has no answer by then has failed.
pub const PROBE_TIMEOUT: Duration = Duration::from_millis(200);
/// Between two reports if nothing changes and the controller wishes nothing else.
pub const REPORT_PAUSE: Duration = Duration::from_millis(500);
/// A report that has no answer by then has failed.
pub const REPORT_TIMEOUT: Duration = Duration::from_millis(1000);
/// Between two looks at whether program and maps are still in place.
pub const GUARD_PAUSE: Duration = Duration::from_secs(2);
/// The underlay's part of a packet: outer IPv4, UDP, VXLAN and the inner Ethernet header (RFC 7348 §4.3).
pub const VXLAN_OVERHEAD: u32 = 50;
/// Source ports per core, towards each replica (Canal §4.4).
pub const TUNNELS_PER_CORE: u16 = 10;

/// Where the edge is and how it treats packets.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Place {
    /// The device that the program is on.
    pub device: String,
    /// Where program and maps are kept while no agent runs.
    pub pin_dir: PathBuf,
    /// The edge's underlay address.
    pub address: Ipv4Addr,
    /// Source ports per replica.
    pub tunnels: u16,
    /// False: each flow has a source port of its own.
    pub aggregate: bool,
    /// Largest inner packet.
    pub mtu: u32,
}

/// All settings.
#[derive(Debug, Clone)]
pub struct EdgeConfig {
    pub edge: EdgeName,
    pub az: AzName,
    pub place: Place,
    pub controller: Controller,
    pub data_dir: PathBuf,
    pub admin: SocketAddr,
    pub metrics: SocketAddr,
    pub readiness: SocketAddr,
    /// File with the containers of this host that have an interface of their own; `None`: none is guarded.
    pub interface_bindings: Option<PathBuf>,
}

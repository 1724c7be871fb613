//! The settings of the edge, and its fixed intervals and timeouts.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use canal_model::ids::{AzName, EdgeName};
use canal_southbound_client::controller_client::ControllerEndpoint;

/// Port of a replica's readiness endpoint, on its underlay address. Istio's number for health
/// checks.
pub const READINESS_PORT: u16 = 15021;
/// Interval between two probes of one replica.
/// Two failed probes mark a replica down, so that connections which begin a second after its end
/// work.
pub const PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// A probe without an answer after this time has failed.
/// It is not longer than the interval, because the next probe waits for it.
pub const PROBE_TIMEOUT: Duration = Duration::from_millis(200);
/// Interval between two reports if nothing changes and the controller requests no other interval.
/// The controller may order 100 ms while buckets move, and 1 s at most. A change of health is
/// reported at once, so the interval bounds only how old counters and loads are.
pub const REPORT_INTERVAL: Duration = Duration::from_millis(500);
/// A report without an answer after this time has failed. It is the longest interval that the
/// controller orders, so an answer that is later would meet the next report.
pub const REPORT_TIMEOUT: Duration = Duration::from_millis(1000);
/// Interval between two checks that program and maps are in place. Traffic that a removed program
/// no longer forwards stops for as long. A check reads the kernel's lists, so it is not made with
/// every report.
pub const PROGRAM_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Bytes that the underlay adds to a packet: outer IPv4, UDP, VXLAN and the inner Ethernet header
/// (RFC 7348 §4.3).
pub const VXLAN_OVERHEAD: u32 = 50;
/// Source ports per core toward each replica (Canal §4.4).
pub const TUNNELS_PER_CORE: u16 = 10;

/// The edge's device, its tunnel end, and how it encapsulates packets.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct EdgeDeviceConfig {
    /// The device to which the program is attached.
    pub device: String,
    /// Directory in which program and maps are pinned while no agent runs.
    pub pin_dir: PathBuf,
    /// The tunnel end: the edge's underlay address, or the address that the edges of its AZ share.
    pub address: Ipv4Addr,
    /// Source ports to a replica that has reported none.
    pub tunnels: u16,
    /// If false, each flow has its own source port.
    pub aggregate: bool,
    /// Size of the largest inner packet, in bytes.
    pub mtu: u32,
}

/// All settings of an edge.
#[derive(Debug, Clone)]
pub struct EdgeConfig {
    pub edge: EdgeName,
    pub az: AzName,
    pub device: EdgeDeviceConfig,
    /// The host's own underlay address, the source of its control traffic.
    pub underlay: Ipv4Addr,
    /// The operator configured the number of tunnels, so the numbers that replicas report do not
    /// count.
    pub has_own_tunnels: bool,
    pub controller: ControllerEndpoint,
    pub data_dir: PathBuf,
    pub admin: SocketAddr,
    pub metrics: SocketAddr,
    pub readiness: SocketAddr,
    /// File that lists the containers of this host that have an interface of their own; `None` if
    /// none is guarded.
    pub interface_bindings: Option<PathBuf>,
}

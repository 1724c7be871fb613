//! The edge's program (`bpf/edge.bpf.c`): loads it, keeps it on the device when this process dies, and gives its maps as typed entries.
//! Decides nothing about what they hold. Start at [`Edge::attach`].
//!
//! Maps are pinned, and the next process finds them with their contents; the program, whose settings are compiled in, is loaded anew
//! and replaces the old one between two packets. So an agent may be killed and started at any time, also with other settings.

use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use canal_abi::tier::{
    Address, AddressKey, EDGE_COUNTS, EdgeSettings, NodeKey, Prefix, PrefixKey, Replica, Return, Table, address_be, edge_count_name,
};
use canal_abi::to_bytes;
use libbpf_rs::{MapHandle, Object, ProgramInput};

use crate::entries::Entries;
use crate::hook::{Direction, Hook};
use crate::origins::sum_counter;
use crate::tier::{self, TierPins};
use crate::{OffloadError, sys};

/// Aligned as ELF wants it.
#[repr(C, align(8))]
struct Embedded<B: ?Sized>(B);
static OBJECT: &Embedded<[u8]> = &Embedded(*include_bytes!(concat!(env!("OUT_DIR"), "/edge.bpf.o")));

/// The compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

const PROGRAM: &str = "canal_edge";
const SETTINGS: &str = ".rodata.settings";
const MAPS: &[&str] = &[
    "canal_addresses",
    "canal_returns",
    "canal_prefixes",
    "canal_nodes",
    "canal_tables",
    "canal_replicas",
    "canal_hosts",
    "canal_edge_counts",
];

/// What the program is told at load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The edge's underlay address.
    pub address: Ipv4Addr,
    /// Source ports, and so tunnels, per replica; at least 1.
    pub tunnels: u16,
    /// Whether flows share the tunnels; else each flow's hash is the source port (RFC 7348 5).
    pub aggregate: bool,
    /// First source port of the shared tunnels; `tunnel_port + tunnels` is at most 65536.
    pub tunnel_port: u16,
    /// Bytes: the largest inner packet, with its IP header, that goes into the tier. Larger ones are answered by ICMP. At least 1280.
    pub mtu: u32,
}

impl Settings {
    fn plain(&self) -> EdgeSettings {
        // What the program cannot take is brought to what it can: it never divides by zero and never wraps a port.
        let tunnels = u32::from(self.tunnels).clamp(1, 65_536 - u32::from(self.tunnel_port));
        EdgeSettings {
            address_be: address_be(self.address),
            tunnels,
            aggregate: self.aggregate.into(),
            tunnel_port: self.tunnel_port.into(),
            mtu: self.mtu.max(1280),
        }
    }
}

/// How to load and where to attach.
#[derive(Debug, Clone)]
pub struct Options {
    /// Path of a network namespace; `None`: this thread's.
    pub netns: Option<PathBuf>,
    /// The edge's only device.
    pub device: String,
    /// Where to keep maps; `None`: they go with the last program that uses them, and a new process starts with empty ones.
    pub pin_dir: Option<PathBuf>,
    pub settings: Settings,
}

/// The loaded program and its maps. Dropping it changes nothing on the device.
#[derive(Debug)]
pub struct Edge {
    object: Object,
    hook: Option<Hook>,
    pins: Option<TierPins>,
    adopted: bool,
    addresses: Entries<AddressKey, Address>,
    returns: Entries<u32, Return>,
    prefixes: Entries<PrefixKey, Prefix>,
    nodes: Entries<NodeKey, u32>,
    tables: Entries<u32, Table>,
    replicas: Entries<u32, Replica>,
    hosts: Entries<u32, u32>,
    counts: MapHandle,
}

/// How a device received the frame of an [`Edge::trial_as`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Received {
    /// Bytes of payload of each of the segments that make up the packet (GSO); 0: it is one packet.
    pub segment: u16,
    /// Whether the device summed the packet up (CHECKSUM_COMPLETE): the kernel verifies that the program kept the sum true.
    pub is_summed: bool,
}

/// What the program made of one frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    /// `TC_ACT_*`: 0 to the host's stack, 2 dropped, 7 sent.
    pub verdict: u32,
    /// The frame as it would leave.
    pub frame: Vec<u8>,
}

impl Edge {
    /// Loads the program, takes over pinned maps, and puts it on the device's ingress, where it replaces an earlier one without a gap.
    pub fn attach(options: &Options) -> Result<Self, OffloadError> {
        let mut edge = Self::load(&options.settings, options.pin_dir.as_deref())?;
        edge.go_live(options.netns.as_deref(), &options.device)?;
        Ok(edge)
    }

    /// Loads without attaching, so that new maps can be filled before [`Edge::go_live`].
    pub fn load(settings: &Settings, pin_dir: Option<&Path>) -> Result<Self, OffloadError> {
        let pins = pin_dir.map(|d| TierPins::open(d, "edge")).transpose()?;
        let found = pins.as_ref().and_then(TierPins::found);
        let object = tier::load("bpf/edge.bpf.c", object_bytes(), MAPS, pins.as_ref(), Some((SETTINGS, to_bytes(&settings.plain()))))?;
        let adopted = found.is_some() && pins.as_ref().and_then(TierPins::found) == found;
        let counts = tier::map(&object, "canal_edge_counts")?;
        Ok(Self {
            hook: None,
            pins,
            adopted,
            addresses: Entries::of(&object, "canal_addresses")?,
            returns: Entries::of(&object, "canal_returns")?,
            prefixes: Entries::of(&object, "canal_prefixes")?,
            nodes: Entries::of(&object, "canal_nodes")?,
            tables: Entries::of(&object, "canal_tables")?,
            replicas: Entries::of(&object, "canal_replicas")?,
            hosts: Entries::of(&object, "canal_hosts")?,
            counts,
            object,
        })
    }

    /// Puts the loaded program on `device`, in the place of an earlier process's. Maps of other versions are let go.
    pub fn go_live(&mut self, netns: Option<&Path>, device: &str) -> Result<(), OffloadError> {
        let hook = Hook { netns: netns.map(Path::to_path_buf), device: device.to_string(), direction: Direction::Ingress };
        hook.attach(tier::program(&self.object, PROGRAM)?.as_fd())?;
        self.hook = Some(hook);
        if let Some(p) = &self.pins {
            p.forget_other_versions();
        }
        Ok(())
    }

    /// Takes the program off the device and removes the pins: the edge forwards nothing any more.
    pub fn remove(self) -> Result<(), OffloadError> {
        if let Some(hook) = &self.hook {
            hook.detach(tier::program(&self.object, PROGRAM)?.as_fd())?;
        }
        self.pins.map_or(Ok(()), |p| p.remove())
    }

    /// Whether the maps are an earlier process's, with their contents.
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Whether maps outlive this process: they are pinned, and not only in a mount that goes with this process's own mount namespace.
    pub fn is_durable(&self) -> bool {
        self.pins.as_ref().is_some_and(TierPins::is_durable)
    }

    /// Whether this process's program is the one on the device (somebody may have flushed the device's filters).
    pub fn is_attached(&self) -> bool {
        let Ok(program) = tier::program(&self.object, PROGRAM) else { return false };
        let own = sys::program_id(program.as_fd()).ok();
        own.is_some() && self.hook.as_ref().and_then(|h| h.program_id(program.as_fd())) == own
    }

    /// Gateway addresses of this edge's AZ, by tenant, and their services.
    pub fn addresses(&self) -> &Entries<AddressKey, Address> {
        &self.addresses
    }

    /// By service ID: the tenant and the addresses that answers carry.
    pub fn returns(&self) -> &Entries<u32, Return> {
        &self.returns
    }

    /// Which node has a tenant's pod address.
    pub fn prefixes(&self) -> &Entries<PrefixKey, Prefix> {
        &self.prefixes
    }

    /// Who may send with a tenant's VNI; the value is always 1.
    pub fn nodes(&self) -> &Entries<NodeKey, u32> {
        &self.nodes
    }

    /// Bucket tables by service ID.
    pub fn tables(&self) -> &Entries<u32, Table> {
        &self.tables
    }

    /// Replicas by number; an array, so that removing one empties its slot.
    pub fn replicas(&self) -> &Entries<u32, Replica> {
        &self.replicas
    }

    /// Edges and replicas by underlay address as [`address_be`] gives it; the value is a replica's number, or 0.
    pub fn hosts(&self) -> &Entries<u32, u32> {
        &self.hosts
    }

    /// Every counter's name and its count since the maps were made.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        EDGE_COUNTS.into_iter().map(|c| Ok((edge_count_name(c), sum_counter(&self.counts, c as u32)?))).collect()
    }

    /// How many instructions the verifier walked: the budget that a test holds.
    pub fn verified_insns(&self) -> Result<u32, OffloadError> {
        tier::verified_insns(&self.object, "bpf/edge.bpf.c", PROGRAM)
    }

    /// Runs the program over one frame, without a device; counters count it. For tests and for the question "why is this dropped".
    pub fn trial(&self, frame: &[u8]) -> Result<Trial, OffloadError> {
        self.trial_as(frame, &Received::default())
    }

    /// The same over a frame as a device would have received it. Errors: [`OffloadError::Trial`], also if the program made a sum false
    /// that the device had reported.
    pub fn trial_as(&self, frame: &[u8], received: &Received) -> Result<Trial, OffloadError> {
        let mut out = vec![0; frame.len() + 256];
        let mut context = tier::context(received.segment);
        let input = ProgramInput {
            data_in: Some(frame),
            data_out: Some(&mut out),
            context_in: Some(&mut context),
            flags: if received.is_summed { libbpf_sys::BPF_F_TEST_SKB_CHECKSUM_COMPLETE } else { 0 },
            ..ProgramInput::default()
        };
        let program = tier::program(&self.object, PROGRAM)?;
        let ran = program.test_run(input).map_err(|source| OffloadError::Trial { program: PROGRAM, source })?;
        let frame = ran.data.map(|d| d.to_vec()).unwrap_or_default();
        Ok(Trial { verdict: ran.return_value, frame })
    }
}

/// Removes what an earlier process left: the program on the device, and the pins. Nothing there is fine.
pub fn remove(netns: Option<&Path>, device: &str, pin_dir: Option<&Path>) -> Result<(), OffloadError> {
    let hook = Hook { netns: netns.map(Path::to_path_buf), device: device.to_string(), direction: Direction::Ingress };
    // Any descriptor does: detaching names the filter, not the program.
    let any = std::fs::File::open("/dev/null").map_err(|source| OffloadError::Netns { netns: "/dev/null".into(), source })?;
    hook.detach(any.as_fd())?;
    match pin_dir {
        Some(d) if d.exists() => TierPins::open(d, "edge")?.remove(),
        _ => Ok(()),
    }
}

//! The edge's program (`bpf/edge.bpf.c`): loads it, keeps it on the device when this process dies,
//! and provides its maps as typed entries. Does not decide what the maps contain. Start with
//! [`EdgeProgram::attach`].
//!
//! The maps are pinned, and the next process finds them with their contents. The program, whose
//! settings are constants in the object, is loaded again and replaces the old one between two
//! packets. An agent may therefore be killed and started at any time, also with other settings.

use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use canal_abi::tier::{
    Address, AddressKey, EDGE_COUNTS, EdgeSettings, NodeKey, Prefix, PrefixKey, Replica, Return,
    Table, Tunnels, address_be, edge_count_name,
};
use canal_abi::to_bytes;
use libbpf_rs::{MapHandle, Object, ProgramInput};

use crate::embedded::EmbeddedObject;
use crate::entries::Entries;
use crate::origins::sum_counter;
use crate::tc_hook::{Direction, Hook};
use crate::tier::{self, TierPins};
use crate::{OffloadError, sys};

static OBJECT: &EmbeddedObject<[u8]> =
    &EmbeddedObject(*include_bytes!(concat!(env!("OUT_DIR"), "/edge.bpf.o")));

/// Returns the compiled object, for tests of its layout.
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
    "canal_tunnels",
    "canal_edge_counts",
];

/// Settings of the program, which are fixed at load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EdgeProgramSettings {
    /// Address of the tunnel's end: the edge's underlay address, or the one that all edges of its
    /// AZ share.
    pub address: Ipv4Addr,
    /// Number of source ports, and so of tunnels, to a replica that [`EdgeProgram::tunnels`] does
    /// not list; at least 1.
    pub tunnels: u16,
    /// True if flows share the tunnels. Otherwise each flow's hash is its source port (RFC 7348
    /// §5).
    pub aggregate: bool,
    /// First source port of the shared tunnels; `tunnel_port + tunnels` is at most 65536.
    pub tunnel_port: u16,
    /// Size in bytes of the largest inner packet, with its IP header, that enters the tier; at
    /// least 1280. Larger packets are answered by ICMP.
    pub mtu: u32,
}

impl EdgeProgramSettings {
    fn plain(&self) -> EdgeSettings {
        // Values that the program cannot handle are clamped: it must never divide by zero or wrap a
        // port.
        let tunnels = u32::from(self.tunnels).clamp(1, 65_536 - u32::from(self.tunnel_port));
        EdgeSettings {
            address_be: address_be(self.address),
            tunnels,
            aggregate: self.aggregate.into(),
            tunnel_port: self.tunnel_port.into(),
            // IPv6 needs no less (RFC 8200 §5).
            mtu: self.mtu.max(1280),
        }
    }
}

/// Options for loading and attaching the program.
#[derive(Debug, Clone)]
pub struct EdgeOptions {
    /// Path of a network namespace; `None` stands for this thread's.
    pub netns: Option<PathBuf>,
    /// Name of the edge's only device.
    pub device: String,
    /// Directory of the maps' pins. With `None` the maps end with the last program that uses them,
    /// and a new process starts with empty ones.
    pub pin_dir: Option<PathBuf>,
    pub settings: EdgeProgramSettings,
}

/// Loaded program with its maps. Dropping it changes nothing on the device.
#[derive(Debug)]
pub struct EdgeProgram {
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
    tunnels: Entries<u32, Tunnels>,
    counts: MapHandle,
}

/// Properties of the frame of an [`EdgeProgram::test_run_as`], as if a device had received it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TestFrameOptions {
    /// Bytes of payload in each segment of the packet (GSO); 0 means that it is a single packet.
    pub segment: u16,
    /// True if the device calculated the packet's sum (CHECKSUM_COMPLETE). The kernel then verifies
    /// that the program kept the sum correct.
    pub is_summed: bool,
}

/// Result of running the program over one frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EdgeTestRun {
    /// Verdict as `TC_ACT_*`: 0 is delivery to the host's stack, 2 is a drop, 7 is a redirect to a
    /// device.
    pub verdict: u32,
    /// Frame in the form in which it would leave.
    pub frame: Vec<u8>,
}

impl EdgeProgram {
    /// Loads the program, adopts pinned maps, and attaches the program to the device's ingress,
    /// where it replaces an earlier one without a gap.
    ///
    /// # Errors
    /// Fails if the pin directory cannot be used, or if the kernel refuses the program or its
    /// attachment.
    pub fn attach(options: &EdgeOptions) -> Result<Self, OffloadError> {
        let mut edge = Self::load(&options.settings, options.pin_dir.as_deref())?;
        edge.go_live(options.netns.as_deref(), &options.device)?;
        Ok(edge)
    }

    /// Loads the program without attaching it, so that new maps can be filled before
    /// [`EdgeProgram::go_live`].
    ///
    /// # Errors
    /// Fails if the pin directory cannot be used or the kernel refuses the program.
    pub fn load(
        settings: &EdgeProgramSettings,
        pin_dir: Option<&Path>,
    ) -> Result<Self, OffloadError> {
        let pins = pin_dir.map(|d| TierPins::open(d, "edge")).transpose()?;
        // Loading replaces pinned maps that do not fit, so the pins are compared before and after.
        let found = pins.as_ref().and_then(TierPins::maps_inode);
        let object = tier::load(
            "bpf/edge.bpf.c",
            object_bytes(),
            MAPS,
            pins.as_ref(),
            Some((SETTINGS, to_bytes(&settings.plain()))),
        )?;
        let adopted = found.is_some() && pins.as_ref().and_then(TierPins::maps_inode) == found;
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
            tunnels: Entries::of(&object, "canal_tunnels")?,
            counts,
            object,
        })
    }

    /// Attaches the loaded program to `device`, where it replaces that of an earlier process.
    /// Removes the maps of other versions.
    ///
    /// # Errors
    /// Fails if the program cannot be attached to the device.
    pub fn go_live(&mut self, netns: Option<&Path>, device: &str) -> Result<(), OffloadError> {
        let hook = Hook {
            netns: netns.map(Path::to_path_buf),
            device: device.to_string(),
            direction: Direction::Ingress,
        };
        hook.attach(tier::program(&self.object, PROGRAM)?.as_fd())?;
        self.hook = Some(hook);
        if let Some(p) = &self.pins {
            p.forget_other_versions();
        }
        Ok(())
    }

    /// Detaches the program and removes the pins: the edge forwards nothing any more.
    ///
    /// # Errors
    /// Fails if the program cannot be detached or a pin cannot be removed.
    pub fn remove(self) -> Result<(), OffloadError> {
        if let Some(hook) = &self.hook {
            hook.detach(tier::program(&self.object, PROGRAM)?.as_fd())?;
        }
        self.pins.map_or(Ok(()), |p| p.remove())
    }

    /// Returns true if the maps are those of an earlier process, with their contents.
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Returns true if the maps outlive this process: they are pinned, and not only in a mount that
    /// ends with this process's own mount namespace.
    pub fn is_durable(&self) -> bool {
        self.pins.as_ref().is_some_and(TierPins::is_durable)
    }

    /// Returns true if this process's program is on the device. Another process may have flushed
    /// the device's filters.
    pub fn is_attached(&self) -> bool {
        let Ok(program) = tier::program(&self.object, PROGRAM) else {
            return false;
        };
        let own = sys::program_id(program.as_fd()).ok();
        own.is_some()
            && self
                .hook
                .as_ref()
                .and_then(|h| h.program_id(program.as_fd()))
                == own
    }

    /// Returns the map of the gateway addresses of this edge's AZ, by tenant, to their services.
    pub fn addresses(&self) -> &Entries<AddressKey, Address> {
        &self.addresses
    }

    /// Returns the map from a service ID to the tenant and to the source addresses of the service's
    /// packets to that tenant.
    pub fn returns(&self) -> &Entries<u32, Return> {
        &self.returns
    }

    /// Returns the map from a tenant's pod addresses to the node that has them.
    pub fn prefixes(&self) -> &Entries<PrefixKey, Prefix> {
        &self.prefixes
    }

    /// Returns the set of nodes that may send with a tenant's VNI; the value is always 1.
    pub fn nodes(&self) -> &Entries<NodeKey, u32> {
        &self.nodes
    }

    /// Returns the bucket tables by service ID.
    pub fn tables(&self) -> &Entries<u32, Table> {
        &self.tables
    }

    /// Returns the replicas by number. The map is an array, so removing a replica empties its slot.
    pub fn replicas(&self) -> &Entries<u32, Replica> {
        &self.replicas
    }

    /// Returns the underlay addresses of edges and replicas, in the form of [`address_be`]. The
    /// value is a replica's number, or 0.
    pub fn hosts(&self) -> &Entries<u32, u32> {
        &self.hosts
    }

    /// Returns the source ports towards each replica, by its underlay address in the form of
    /// [`address_be`]. A replica that is not listed gets those of the settings.
    pub fn tunnels(&self) -> &Entries<u32, Tunnels> {
        &self.tunnels
    }

    /// Returns every counter's name and its count since the maps were created.
    ///
    /// # Errors
    /// Fails if the counter map cannot be read.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        EDGE_COUNTS
            .into_iter()
            .map(|c| Ok((edge_count_name(c), sum_counter(&self.counts, c as u32)?)))
            .collect()
    }

    /// Returns the number of instructions that the verifier walked, which a test compares with a
    /// budget.
    ///
    /// # Errors
    /// Fails if the kernel gives no information about the program.
    pub fn verified_insns(&self) -> Result<u32, OffloadError> {
        tier::verified_insns(&self.object, "bpf/edge.bpf.c", PROGRAM)
    }

    /// Runs the program over one frame, without a device; the counters count the frame. It is for
    /// tests and for finding out why a frame is dropped.
    ///
    /// # Errors
    /// Fails if the kernel cannot run the program.
    pub fn test_run(&self, frame: &[u8]) -> Result<EdgeTestRun, OffloadError> {
        self.test_run_as(frame, &TestFrameOptions::default())
    }

    /// Runs the program over a frame with the properties that `received` describes.
    ///
    /// # Errors
    /// Returns [`OffloadError::Trial`] if the kernel cannot run the program, or if the program
    /// invalidated a sum that the device had reported.
    pub fn test_run_as(
        &self,
        frame: &[u8],
        received: &TestFrameOptions,
    ) -> Result<EdgeTestRun, OffloadError> {
        let mut out = vec![0; frame.len() + 256];
        let mut context = tier::context(received.segment);
        let input = ProgramInput {
            data_in: Some(frame),
            data_out: Some(&mut out),
            context_in: Some(&mut context),
            flags: if received.is_summed {
                libbpf_sys::BPF_F_TEST_SKB_CHECKSUM_COMPLETE
            } else {
                0
            },
            ..ProgramInput::default()
        };
        let program = tier::program(&self.object, PROGRAM)?;
        let ran = program
            .test_run(input)
            .map_err(|source| OffloadError::Trial {
                program: PROGRAM,
                source,
            })?;
        let frame = ran.data.map(|d| d.to_vec()).unwrap_or_default();
        Ok(EdgeTestRun {
            verdict: ran.return_value,
            frame,
        })
    }
}

/// Removes what an earlier process left: the program on the device, and the pins. It is no error if
/// there is nothing.
///
/// # Errors
/// Fails if the program cannot be detached or a pin cannot be removed.
pub fn remove(
    netns: Option<&Path>,
    device: &str,
    pin_dir: Option<&Path>,
) -> Result<(), OffloadError> {
    let hook = Hook {
        netns: netns.map(Path::to_path_buf),
        device: device.to_string(),
        direction: Direction::Ingress,
    };
    // Any descriptor will do: detaching names the filter, not the program.
    let any = std::fs::File::open("/dev/null").map_err(|source| OffloadError::Netns {
        netns: "/dev/null".into(),
        source,
    })?;
    hook.detach(any.as_fd())?;
    match pin_dir {
        Some(d) if d.exists() => TierPins::open(d, "edge")?.remove(),
        _ => Ok(()),
    }
}

//! Pod guard (`bpf/pod.bpf.c`): packets that the mesh does not carry neither leave nor enter a pod,
//! or are counted. The caller decides which of the two. Start with [`PodGuards::load`].
//!
//! Everything stays when this process dies. The cgroup's programs are pinned links, and those of
//! the interface are filters on the node's end of it. Their maps are pinned, so the next process
//! finds each pod's mode, resolvers and UDP ports and takes over without a gap.

use std::collections::BTreeSet;
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use canal_abi::capture::address_bytes;
use canal_abi::pod::{ABI, RESOLVERS_MAX, Range, STOP, TIER_RANGES_MAX, VERDICTS, WATCH};
pub use canal_abi::pod::{StoppedPacket, UDP_PORTS_MAX, Verdict, is_stopped, verdict_name};
use canal_abi::{from_bytes, to_bytes};
use ipnet::IpNet;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder};

use crate::capture::adopt;
use crate::embedded::EmbeddedObject;
use crate::entries::replace_set;
use crate::origins::sum_counter;
use crate::peer::{self, OtherEnd};
use crate::pins::{self, PinDirectory};
use crate::tc_hook::{Direction, Hook};
use crate::{OffloadError, journal, sys, tier};

static OBJECT: &EmbeddedObject<[u8]> =
    &EmbeddedObject(*include_bytes!(concat!(env!("OUT_DIR"), "/pod.bpf.o")));

/// Returns the compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

const SOURCE: &str = "bpf/pod.bpf.c";
const OF_CGROUP: [&str; 2] = ["canal_pod_egress", "canal_pod_ingress"];
const OUT: &str = "canal_pod_out";
const IN: &str = "canal_pod_in";
const MODE: &str = "canal_pod_mode";
const RESOLVERS: &str = "canal_pod_resolvers";
const UDP_PORTS: &str = "canal_pod_udp_ports";
const TIER: &str = "canal_pod_tier";
const COUNTS: &str = "canal_pod_counts";
const LAST: &str = "canal_pod_last";
const MAPS: [&str; 6] = [MODE, RESOLVERS, UDP_PORTS, TIER, COUNTS, LAST];
const ZERO: [u8; 4] = [0; 4];

/// Treatment of packets that the mesh does not carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutsidePackets {
    /// The packets are dropped.
    #[default]
    Stop,
    /// The packets pass unencrypted and are counted.
    Watch,
}

/// Datagrams that pass in any mode: those between the tier's addresses and the pod's own ports that
/// UDPRoutes name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UdpFromTier {
    pub ports: BTreeSet<u16>,
    pub tier: BTreeSet<IpNet>,
}

/// Numbers of ports and ranges beyond the guard's capacity. They stay closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UdpExcess {
    pub ports: usize,
    pub ranges: usize,
}

impl UdpFromTier {
    /// Returns the ports and ranges that fit into a guard, and how many do not. Without an open
    /// port there are no ranges.
    pub(crate) fn split_at_capacity(&self) -> (BTreeSet<u16>, BTreeSet<IpNet>, UdpExcess) {
        let ports: BTreeSet<u16> = self.ports.iter().copied().take(UDP_PORTS_MAX).collect();
        let wanted = if ports.is_empty() { 0 } else { self.tier.len() };
        let tier: BTreeSet<IpNet> = self
            .tier
            .iter()
            .map(IpNet::trunc)
            .take(wanted.min(TIER_RANGES_MAX))
            .collect();
        let left_out = UdpExcess {
            ports: self.ports.len() - ports.len(),
            ranges: wanted.saturating_sub(TIER_RANGES_MAX),
        };
        (ports, tier, left_out)
    }
}

/// Node-wide part of the guards: the directory of the pods' pins.
#[derive(Debug)]
pub struct PodGuards {
    pins: Option<PinDirectory>,
}

/// Guard of one pod. Dropping it detaches the cgroup's programs only if nothing is pinned. The
/// interface's programs stay until [`PodGuard::release`], or until the interface is removed.
#[derive(Debug)]
pub struct PodGuard {
    object: Object,
    mode: MapHandle,
    resolvers: MapHandle,
    udp_ports: MapHandle,
    tier: MapHandle,
    counts: MapHandle,
    last: MapHandle,
    links: Vec<Link>,
    hooks: Vec<Hook>,
    /// Interfaces whose other end is not on this node.
    exposed: Vec<String>,
}

fn refused(step: &str) -> impl Fn(libbpf_rs::Error) -> OffloadError {
    move |source| OffloadError::Refused {
        object: SOURCE,
        source,
        journal: format!("{step}: {}", journal::last_words()),
    }
}

/// Loads the object. Its maps are adopted from `dir` if they are pinned there, else they are pinned
/// there.
fn load(dir: Option<&Path>) -> Result<Object, OffloadError> {
    journal::install();
    let _ = journal::last_words();
    let mut open = ObjectBuilder::default()
        .open_memory(object_bytes())
        .map_err(refused("opening"))?;
    for mut map in open.maps_mut() {
        if let (Some(dir), Some(name)) = (dir, MAPS.into_iter().find(|n| map.name() == *n)) {
            map.set_pin_path(map_pin(dir, name))
                .map_err(refused("pinning"))?;
        }
    }
    open.load().map_err(refused("loading"))
}

fn map_pin(dir: &Path, map: &str) -> PathBuf {
    dir.join(format!("{map}_{ABI}"))
}

impl PodGuards {
    /// Tests whether the kernel accepts the programs. Without `pin_dir` the cgroup's programs do
    /// not outlive the process.
    ///
    /// # Errors
    /// Fails if the pin directory cannot be used or the kernel refuses the object.
    pub fn load(pin_dir: Option<&Path>) -> Result<Self, OffloadError> {
        let pins = pin_dir.map(PinDirectory::open).transpose()?;
        load(None)?;
        Ok(Self { pins })
    }

    /// Guards the pod whose processes are in `cgroup` and whose network namespace is at `netns`. A
    /// new pod is in mode *stop* until [`PodGuard::set`] changes it. A pod that an earlier process
    /// guarded keeps its state.
    ///
    /// # Errors
    /// Fails if the cgroup or the namespace cannot be opened, or if the kernel refuses a program or
    /// its attachment.
    pub fn attach(&self, pod: &str, cgroup: &Path, netns: &Path) -> Result<PodGuard, OffloadError> {
        let dir = self.pins.as_ref().map(|p| p.make_pod(pod)).transpose()?;
        let object = match load(dir.as_deref()) {
            // The pinned maps have the same ABI number but another shape: the pod is in mode stop
            // until it is set again.
            Err(error)
                if dir
                    .as_deref()
                    .is_some_and(|d| MAPS.iter().any(|m| map_pin(d, m).exists())) =>
            {
                tracing::warn!(pod, %error, "pod guard: the pinned maps have another layout; starting with new maps");
                for map in MAPS
                    .iter()
                    .filter_map(|m| dir.as_deref().map(|d| map_pin(d, m)))
                {
                    pins::remove_file(&map).map_err(|source| OffloadError::Pins {
                        dir: map,
                        step: "removing a map",
                        source,
                    })?;
                }
                load(dir.as_deref())?
            }
            loaded => loaded?,
        };
        let mut guard = PodGuard {
            mode: tier::map(&object, MODE)?,
            resolvers: tier::map(&object, RESOLVERS)?,
            udp_ports: tier::map(&object, UDP_PORTS)?,
            tier: tier::map(&object, TIER)?,
            counts: tier::map(&object, COUNTS)?,
            last: tier::map(&object, LAST)?,
            object,
            links: Vec::new(),
            hooks: Vec::new(),
            exposed: Vec::new(),
        };
        guard.attach_to_interfaces(netns)?;
        guard.attach_to_cgroup(cgroup, dir.as_deref())?;
        Ok(guard)
    }
}

impl PodGuard {
    fn attach_to_cgroup(&mut self, cgroup: &Path, pins: Option<&Path>) -> Result<(), OffloadError> {
        let bad_cgroup = |source| OffloadError::Cgroup {
            cgroup: cgroup.to_path_buf(),
            source,
        };
        let dir = File::open(cgroup).map_err(bad_cgroup)?;
        let id = dir.metadata().map_err(bad_cgroup)?.ino();
        for name in OF_CGROUP {
            let err = |source| OffloadError::Attach {
                program: name,
                cgroup: cgroup.to_path_buf(),
                source,
            };
            let program = tier::program(&self.object, name)?;
            let pin = pins.map(|d| d.join(name));
            let link = match pin.as_deref().and_then(|p| adopt(p, id, &program)) {
                Some(link) => link,
                None => {
                    let mut link = program.attach_cgroup(dir.as_raw_fd()).map_err(err)?;
                    if let Some(pin) = &pin {
                        link.pin(pin).map_err(err)?;
                    }
                    link
                }
            };
            self.links.push(link);
        }
        Ok(())
    }

    /// Attaches the programs to the node's end of each interface that has one: what arrives there
    /// has left the pod. If the other end is out of reach (a physical device, another machine's),
    /// they are attached to the pod's own end. There a process with CAP_NET_ADMIN in the pod could
    /// remove them.
    fn attach_to_interfaces(&mut self, netns: &Path) -> Result<(), OffloadError> {
        let of_node = |index| {
            peer::name_of(index).map_err(|source| OffloadError::Netns {
                netns: netns.to_path_buf(),
                source,
            })
        };
        for device in peer::devices(netns)? {
            let (place, name, leaving, entering) = match device.other_end {
                OtherEnd::Inside => continue,
                OtherEnd::Here(index) => {
                    (None, of_node(index)?, Direction::Ingress, Direction::Egress)
                }
                OtherEnd::Outside => {
                    self.exposed.push(device.name.clone());
                    (
                        Some(netns.to_path_buf()),
                        device.name,
                        Direction::Egress,
                        Direction::Ingress,
                    )
                }
            };
            for (program, direction) in [(OUT, leaving), (IN, entering)] {
                let hook = Hook {
                    netns: place.clone(),
                    device: name.clone(),
                    direction,
                };
                hook.attach(tier::program(&self.object, program)?.as_fd())?;
                self.hooks.push(hook);
            }
        }
        Ok(())
    }

    /// Sets the treatment of packets that the mesh does not carry, and the resolvers to which DNS
    /// passes in any mode. Returns how many resolvers beyond [`RESOLVERS_MAX`] were omitted.
    ///
    /// # Errors
    /// Returns [`OffloadError::Map`] if a map cannot be written.
    pub fn set(
        &self,
        outside: OutsidePackets,
        resolvers: &[IpAddr],
    ) -> Result<usize, OffloadError> {
        let wanted = resolvers
            .iter()
            .take(RESOLVERS_MAX)
            .map(|ip| address_bytes(*ip).to_vec())
            .collect();
        replace_set(&self.resolvers, RESOLVERS, &wanted)?;
        let mode = if outside == OutsidePackets::Watch {
            WATCH
        } else {
            STOP
        };
        self.mode
            .update(&ZERO, to_bytes(&mode), MapFlags::ANY)
            .map_err(|source| OffloadError::Map { map: MODE, source })?;
        Ok(resolvers.len().saturating_sub(RESOLVERS_MAX))
    }

    /// Sets the pod's ports at which datagrams from the tier pass, and their replies. At all other
    /// ports they are stopped. Returns what did not fit.
    ///
    /// # Errors
    /// Returns [`OffloadError::Map`] if a map cannot be written.
    pub fn set_udp(&self, udp: &UdpFromTier) -> Result<UdpExcess, OffloadError> {
        let (ports, ranges, left_out) = udp.split_at_capacity();
        replace_set(
            &self.udp_ports,
            UDP_PORTS,
            &ports
                .iter()
                .map(|port| to_bytes(&u32::from(*port)).to_vec())
                .collect(),
        )?;
        let ranges = ranges
            .iter()
            .map(|range| to_bytes(&Range::new(range.network(), range.prefix_len())).to_vec());
        replace_set(&self.tier, TIER, &ranges.collect())?;
        Ok(left_out)
    }

    /// Returns every verdict and its count since the pod was first guarded.
    ///
    /// # Errors
    /// Fails if the counter map cannot be read.
    pub fn counters(&self) -> Result<Vec<(Verdict, u64)>, OffloadError> {
        VERDICTS
            .into_iter()
            .map(|v| Ok((v, sum_counter(&self.counts, v as u32)?)))
            .collect()
    }

    /// Returns the packet that was stopped last.
    ///
    /// # Errors
    /// Fails if the map cannot be read.
    pub fn last_stopped(&self) -> Result<StoppedPacket, OffloadError> {
        let found = self
            .last
            .lookup(&ZERO, MapFlags::ANY)
            .map_err(|source| OffloadError::Map { map: LAST, source })?;
        Ok(found.and_then(|b| from_bytes(&b)).unwrap_or_default())
    }

    /// Returns the pod's interfaces whose other end is not on this node. A pod with CAP_NET_ADMIN
    /// could remove the guard from them.
    pub fn exposed_interfaces(&self) -> &[String] {
        &self.exposed
    }

    /// Returns each program's name and the number of instructions that the verifier walked for it,
    /// which a test compares with a budget.
    ///
    /// # Errors
    /// Fails if the kernel gives no information about a program.
    pub fn verified_instructions(&self) -> Result<Vec<(&'static str, u32)>, OffloadError> {
        let all = OF_CGROUP.into_iter().chain([OUT, IN]);
        all.map(|name| Ok((name, tier::verified_insns(&self.object, SOURCE, name)?)))
            .collect()
    }

    /// Removes the guard: the pod's packets pass from now on. The pins of the pod are removed
    /// together with its capture's.
    ///
    /// # Errors
    /// Fails if a program cannot be detached.
    pub fn release(self) -> Result<(), OffloadError> {
        for link in &self.links {
            link.detach().map_err(refused("detaching"))?;
        }
        let id = |name| -> Result<u32, OffloadError> {
            Ok(sys::program_id(tier::program(&self.object, name)?.as_fd()).unwrap_or_default())
        };
        let own: [u32; 2] = [id(OUT)?, id(IN)?];
        for hook in &self.hooks {
            let any = tier::program(&self.object, OUT)?;
            // The interface's name may belong to another pod by now. That pod's program stays.
            if !hook
                .program_id(any.as_fd())
                .is_some_and(|id| own.contains(&id))
            {
                continue;
            }
            match hook.detach(any.as_fd()) {
                // The interface was removed with its namespace, and the filter with it.
                Err(OffloadError::Hook { source, .. }) => {
                    tracing::debug!(device = hook.device, %source, "pod guard: the interface was removed")
                }
                Err(OffloadError::Netns { .. }) => {}
                done => done?,
            }
        }
        Ok(())
    }
}

/// Removes the guard from the interfaces of the namespace at `netns`, even if another process
/// attached it. `canal-node --release` uses it; the cgroup's links end with their pins. It is no
/// error if an interface does not exist.
///
/// # Errors
/// Fails if the namespace cannot be entered or a program cannot be detached.
pub fn release_interfaces(netns: &Path) -> Result<(), OffloadError> {
    let object = load(None)?;
    let any = tier::program(&object, OUT)?;
    for device in peer::devices(netns)? {
        let (place, name) = match device.other_end {
            OtherEnd::Inside => continue,
            OtherEnd::Here(index) => match peer::name_of(index) {
                Ok(name) => (None, name),
                Err(_) => continue,
            },
            OtherEnd::Outside => (Some(netns.to_path_buf()), device.name),
        };
        for direction in [Direction::Egress, Direction::Ingress] {
            Hook {
                netns: place.clone(),
                device: name.clone(),
                direction,
            }
            .detach(any.as_fd())?;
        }
    }
    Ok(())
}

//! The replica's redirector (`bpf/redirector.bpf.c`) and the program of its tunnel device
//! (`bpf/tunnel.bpf.c`). Loads them, keeps them on their devices when this process dies, and
//! provides their maps as typed entries. Does not decide what the maps contain. Start with
//! [`RedirectorPrograms::attach`].
//!
//! The maps are pinned, and the next process finds them with their contents. The programs are
//! loaded again and replace the old ones between two packets. After a gateway was killed, its
//! redirector passes new sessions to the other replicas.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use canal_abi::tier::{
    REDIRECTOR_COUNTS, RedirectorCount, RedirectorSettings, Replica, TUNNEL_COUNTS, Table,
    Throttle, ThrottleKey, address_be, address_of_be, redirector_count_name, tunnel_count_name,
};
use canal_abi::{from_bytes, to_bytes};
use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ProgramInput};

use crate::embedded::EmbeddedObject;
use crate::entries::Entries;
use crate::origins::{counter_by_core, sum_counter};
use crate::tc_hook::{Direction, Hook, within};
use crate::tier::{self, TierPins};
use crate::tunnel::{self, TUNNEL_DEVICE, TunnelDevice};
use crate::{OffloadError, sys};

pub use crate::throttle::{ThrottleLimit, ThrottleLimits};

static REDIRECTOR: &EmbeddedObject<[u8]> = &EmbeddedObject(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/redirector.bpf.o"
)));
static TUNNEL: &EmbeddedObject<[u8]> =
    &EmbeddedObject(*include_bytes!(concat!(env!("OUT_DIR"), "/tunnel.bpf.o")));

/// Returns the compiled objects, for tests of their layout.
pub fn object_bytes() -> [&'static [u8]; 2] {
    [&REDIRECTOR.0, &TUNNEL.0]
}

const PROGRAM: &str = "canal_redirector";
const TUNNEL_PROGRAM: &str = "canal_tunnel";
const SOURCE: &str = "bpf/redirector.bpf.c";
const TUNNEL_SOURCE: &str = "bpf/tunnel.bpf.c";
const MAPS: &[&str] = &[
    "canal_self",
    "canal_tables",
    "canal_replicas",
    "canal_hosts",
    "canal_throttles",
    "canal_redirector_counts",
];
const TUNNEL_MAPS: &[&str] = &["canal_tunnel_counts"];
const THROTTLES: &str = "canal_throttles";

/// Options for loading and attaching the programs.
#[derive(Debug, Clone)]
pub struct RedirectorOptions {
    /// Path of a network namespace; `None` stands for this thread's.
    pub netns: Option<PathBuf>,
    /// Name of the replica's underlay device, e.g. `eth0`.
    pub device: String,
    /// Directory of the maps' pins. With `None` the maps end with the last program that uses them,
    /// and a new process starts with empty ones.
    pub pin_dir: Option<PathBuf>,
    /// Underlay address of the replica.
    pub address: Ipv4Addr,
    /// Number of the replica in bucket tables. 0 means that it is not known yet; that of an earlier
    /// process stays in force.
    pub number: u16,
    /// Address of the edge of the replica's AZ. 0.0.0.0 means that it is not known yet; that of an
    /// earlier process stays in force.
    pub edge: Ipv4Addr,
    /// Size in bytes of the largest inner packet, with its IP header, that the tier accepts.
    pub mtu: u32,
    /// First source port of the tunnels to the edge.
    pub tunnel_port: u16,
    /// Number of source ports, and so of tunnels, to the edge. With 0 each flow has its own source
    /// port (RFC 7348 §5).
    pub tunnels: u16,
}

/// Loaded programs with their maps. Dropping them changes nothing on the devices.
#[derive(Debug)]
pub struct RedirectorPrograms {
    object: Object,
    tunnel: Object,
    hook: Hook,
    tunnel_hook: Hook,
    pins: Option<(TierPins, TierPins)>,
    adopted: bool,
    address: Ipv4Addr,
    mtu: u32,
    own: [Entries<u32, RedirectorSettings>; 2],
    tables: Entries<u32, Table>,
    replicas: Entries<u32, Replica>,
    hosts: Entries<u32, u32>,
    throttles: MapHandle,
    counts: MapHandle,
    tunnel_counts: MapHandle,
}

/// Result of running the redirector over one frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedirectorTestRun {
    /// Verdict as `TC_ACT_*`: 0 is delivery to the host's stack, 2 is a drop, 7 is a redirect to a
    /// device.
    pub verdict: u32,
    /// Mark that the host's stack sees.
    pub mark: u32,
    /// Frame in the form in which it continues.
    pub frame: Vec<u8>,
}

impl RedirectorPrograms {
    /// Loads the programs, adopts pinned maps, creates the tunnel device with its routes, and
    /// attaches the programs to both devices. They replace earlier programs without a gap. It may
    /// be repeated at any time.
    ///
    /// # Errors
    /// Fails if the pin directory cannot be used, the tunnel device cannot be created, or the
    /// kernel refuses a program or its attachment.
    pub fn attach(options: &RedirectorOptions) -> Result<Self, OffloadError> {
        let redirector = Self::load(options)?;
        redirector.go_live(options)?;
        Ok(redirector)
    }

    /// Loads the programs without touching devices, so that new maps can be filled before
    /// [`RedirectorPrograms::go_live`].
    ///
    /// # Errors
    /// Fails if the pin directory cannot be used or the kernel refuses a program.
    pub fn load(options: &RedirectorOptions) -> Result<Self, OffloadError> {
        let dir = options.pin_dir.as_deref();
        let pins = dir
            .map(|d| {
                Ok::<_, OffloadError>((
                    TierPins::open(d, "redirector")?,
                    TierPins::open(d, "tunnel")?,
                ))
            })
            .transpose()?;
        // Looked up before the programs are loaded, because loading pins new maps.
        let adopted = pins.as_ref().is_some_and(|(p, _)| p.has_maps());
        let object = tier::load(
            SOURCE,
            &REDIRECTOR.0,
            MAPS,
            pins.as_ref().map(|p| &p.0),
            None,
        )?;
        let tunnel = tier::load(
            TUNNEL_SOURCE,
            &TUNNEL.0,
            TUNNEL_MAPS,
            pins.as_ref().map(|p| &p.1),
            None,
        )?;
        let hook = |device: &str, direction| Hook {
            netns: options.netns.clone(),
            device: device.to_string(),
            direction,
        };
        let redirector = Self {
            hook: hook(&options.device, Direction::Ingress),
            tunnel_hook: hook(TUNNEL_DEVICE, Direction::Egress),
            pins,
            adopted,
            address: options.address,
            mtu: options.mtu,
            own: [
                Entries::of(&object, "canal_self")?,
                Entries::of(&tunnel, "canal_self")?,
            ],
            tables: Entries::of(&object, "canal_tables")?,
            replicas: Entries::of(&object, "canal_replicas")?,
            hosts: Entries::of(&object, "canal_hosts")?,
            throttles: tier::map(&object, THROTTLES)?,
            counts: tier::map(&object, "canal_redirector_counts")?,
            tunnel_counts: tier::map(&tunnel, "canal_tunnel_counts")?,
            object,
            tunnel,
        };
        // Values that are not known yet stay those of an earlier process.
        let (number, edge) = redirector.own()?;
        redirector.set_self(
            if options.number == 0 {
                number
            } else {
                options.number
            },
            if options.edge.is_unspecified() {
                edge
            } else {
                options.edge
            },
        )?;
        Ok(redirector)
    }

    /// Creates the tunnel device with its routes, and attaches the loaded programs, which replace
    /// those of an earlier process.
    ///
    /// # Errors
    /// Fails if the tunnel device cannot be created or a program cannot be attached.
    pub fn go_live(&self, options: &RedirectorOptions) -> Result<(), OffloadError> {
        let tunnel = TunnelDevice {
            address: options.address,
            mtu: options.mtu,
            port: options.tunnel_port,
            ports: options.tunnels,
        };
        within(options.netns.as_deref(), || tunnel::make(&tunnel))??;
        self.tunnel_hook
            .attach(tier::program(&self.tunnel, TUNNEL_PROGRAM)?.as_fd())?;
        self.hook
            .attach(tier::program(&self.object, PROGRAM)?.as_fd())?;
        if let Some((a, b)) = &self.pins {
            a.forget_other_versions();
            b.forget_other_versions();
        }
        Ok(())
    }

    /// Detaches the programs and removes the tunnel device, its routes and the pins: the host is no
    /// replica any more.
    ///
    /// # Errors
    /// Fails if a program cannot be detached, or the tunnel device or a pin cannot be removed.
    pub fn remove(self) -> Result<(), OffloadError> {
        self.hook
            .detach(tier::program(&self.object, PROGRAM)?.as_fd())?;
        within(self.hook.netns.as_deref(), tunnel::remove)??;
        self.pins
            .map_or(Ok(()), |(a, b)| a.remove().and_then(|()| b.remove()))
    }

    /// Returns the replica's number in bucket tables and the edge of its AZ, as the programs know
    /// them; 0 and 0.0.0.0 if they are unknown.
    ///
    /// # Errors
    /// Fails if the map cannot be read.
    pub fn own(&self) -> Result<(u16, Ipv4Addr), OffloadError> {
        let own = self.own[0].get(&0)?.unwrap_or_default();
        Ok((own.number as u16, address_of_be(own.edge_be)))
    }

    /// Sets the replica's number in bucket tables and the edge to which the programs send.
    ///
    /// # Errors
    /// Fails if a map cannot be written.
    pub fn set_self(&self, number: u16, edge: Ipv4Addr) -> Result<(), OffloadError> {
        let settings = RedirectorSettings {
            address_be: address_be(self.address),
            number: number.into(),
            edge_be: address_be(edge),
            mtu: self.mtu,
        };
        self.own.iter().try_for_each(|map| map.put(&0, &settings))
    }

    /// Returns true if the maps are those of an earlier process, with their contents.
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Returns true if the maps outlive this process: they are pinned, and not only in a mount that
    /// ends with this process's own mount namespace.
    pub fn is_durable(&self) -> bool {
        self.pins.as_ref().is_some_and(|(p, _)| p.is_durable())
    }

    /// Returns true if this process's programs are on the devices. Another process may have flushed
    /// their filters, or a device may be a new one.
    pub fn is_attached(&self) -> bool {
        let is_there = |hook: &Hook, object, name| {
            let Ok(program) = tier::program(object, name) else {
                return false;
            };
            let own = sys::program_id(program.as_fd()).ok();
            own.is_some() && hook.program_id(program.as_fd()) == own
        };
        is_there(&self.hook, &self.object, PROGRAM)
            && is_there(&self.tunnel_hook, &self.tunnel, TUNNEL_PROGRAM)
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

    fn throttle(&self, key: &ThrottleKey) -> Result<Option<Throttle>, OffloadError> {
        let err = |source| OffloadError::Map {
            map: THROTTLES,
            source,
        };
        Ok(self
            .throttles
            .lookup(to_bytes(key), MapFlags::LOCK)
            .map_err(err)?
            .and_then(|v| from_bytes(&v)))
    }

    /// Sets early limits. Limits that do not change keep their tokens, new ones start full.
    ///
    /// # Errors
    /// Returns [`OffloadError::Full`] if the map has no capacity left, and [`OffloadError::Map`]
    /// for any other failure.
    pub fn set_throttle(
        &self,
        key: &ThrottleKey,
        limits: &ThrottleLimits,
    ) -> Result<(), OffloadError> {
        let old = self.throttle(key)?;
        let new = limits.applied_to(old.as_ref(), sys::ktime_ns());
        if old.is_some_and(|o| limits.are_in(&o)) {
            return Ok(());
        }
        self.throttles
            .update(to_bytes(key), to_bytes(&new), MapFlags::LOCK)
            .map_err(|source| {
                let is_full = source.kind() == libbpf_rs::ErrorKind::TooBig;
                let capacity = self.throttles.max_entries();
                if is_full {
                    OffloadError::Full {
                        map: THROTTLES,
                        capacity,
                    }
                } else {
                    OffloadError::Map {
                        map: THROTTLES,
                        source,
                    }
                }
            })
    }

    /// Removes early limits. It is no error if there are none.
    ///
    /// # Errors
    /// Returns [`OffloadError::Map`] if the kernel refuses the removal.
    pub fn remove_throttle(&self, key: &ThrottleKey) -> Result<(), OffloadError> {
        match self.throttles.delete(to_bytes(key)) {
            Err(source) if source.kind() != libbpf_rs::ErrorKind::NotFound => {
                Err(OffloadError::Map {
                    map: THROTTLES,
                    source,
                })
            }
            _ => Ok(()),
        }
    }

    /// Returns all early limits with their state: the remaining tokens, and how many packets were
    /// refused.
    ///
    /// # Errors
    /// Fails if the map cannot be read.
    pub fn throttles(&self) -> Result<HashMap<ThrottleKey, Throttle>, OffloadError> {
        let mut all = HashMap::new();
        for key in self
            .throttles
            .keys()
            .filter_map(|k| from_bytes::<ThrottleKey>(&k))
        {
            if let Some(t) = self.throttle(&key)? {
                all.insert(key, t);
            }
        }
        Ok(all)
    }

    /// Returns every counter's name and its count since the maps were created.
    ///
    /// # Errors
    /// Fails if the counter map cannot be read.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        REDIRECTOR_COUNTS
            .into_iter()
            .map(|c| {
                Ok((
                    redirector_count_name(c),
                    sum_counter(&self.counts, c as u32)?,
                ))
            })
            .collect()
    }

    /// Returns how many packets of the tier each core received, by the core's number.
    ///
    /// # Errors
    /// Fails if the counter map cannot be read.
    pub fn received_by_core(&self) -> Result<Vec<u64>, OffloadError> {
        let mut cores = Vec::new();
        for count in REDIRECTOR_COUNTS
            .into_iter()
            .filter(|count| *count != RedirectorCount::CANAL_REDIRECTOR_PASSED)
        {
            let of_count = counter_by_core(&self.counts, count as u32)?;
            cores.resize(of_count.len().max(cores.len()), 0);
            cores
                .iter_mut()
                .zip(of_count)
                .for_each(|(all, one)| *all += one);
        }
        Ok(cores)
    }

    /// Returns every counter's name and its count for the tunnel device's program.
    ///
    /// # Errors
    /// Fails if the counter map cannot be read.
    pub fn tunnel_counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        TUNNEL_COUNTS
            .into_iter()
            .map(|c| {
                Ok((
                    tunnel_count_name(c),
                    sum_counter(&self.tunnel_counts, c as u32)?,
                ))
            })
            .collect()
    }

    /// Returns each program's name and the number of instructions that the verifier walked, which a
    /// test compares with a budget.
    ///
    /// # Errors
    /// Fails if the kernel gives no information about a program.
    pub fn verified_insns(&self) -> Result<[(&'static str, u32); 2], OffloadError> {
        Ok([
            (
                PROGRAM,
                tier::verified_insns(&self.object, SOURCE, PROGRAM)?,
            ),
            (
                TUNNEL_PROGRAM,
                tier::verified_insns(&self.tunnel, TUNNEL_SOURCE, TUNNEL_PROGRAM)?,
            ),
        ])
    }

    /// Runs the redirector over one frame as if it had arrived in this thread's network namespace;
    /// the counters count the frame. It is for tests and for finding out why a frame is dropped.
    ///
    /// # Errors
    /// Fails if the kernel cannot run the program.
    pub fn test_run(&self, frame: &[u8]) -> Result<RedirectorTestRun, OffloadError> {
        // The context is `struct __sk_buff` up to its `hwtstamp`; the mark is its third word
        // (linux/bpf.h).
        let mut context = [0u8; 192];
        let mut out = vec![0; frame.len() + 256];
        let input = ProgramInput {
            data_in: Some(frame),
            data_out: Some(&mut out),
            context_out: Some(&mut context),
            ..ProgramInput::default()
        };
        let program = tier::program(&self.object, PROGRAM)?;
        let ran = program
            .test_run(input)
            .map_err(|source| OffloadError::Trial {
                program: PROGRAM,
                source,
            })?;
        let mark = ran
            .context
            .and_then(|c| c.get(8..12))
            .and_then(|m| m.try_into().ok())
            .map_or(0, u32::from_ne_bytes);
        Ok(RedirectorTestRun {
            verdict: ran.return_value,
            mark,
            frame: ran.data.map(|d| d.to_vec()).unwrap_or_default(),
        })
    }
}

/// Removes what an earlier process left: programs, tunnel device, routes, pins. It is no error if
/// there is nothing.
///
/// # Errors
/// Fails if a program cannot be detached, or the tunnel device or a pin cannot be removed.
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
    within(netns, tunnel::remove)??;
    match pin_dir {
        Some(d) if d.exists() => ["redirector", "tunnel"].into_iter().try_for_each(|what| {
            if d.exists() {
                TierPins::open(d, what)?.remove()
            } else {
                Ok(())
            }
        }),
        _ => Ok(()),
    }
}

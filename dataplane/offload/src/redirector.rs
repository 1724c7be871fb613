//! The replica's redirector (`bpf/redirector.bpf.c`) and the program of its tunnel device (`bpf/tunnel.bpf.c`): loads them, keeps them on
//! their devices when this process dies, and gives their maps as typed entries. Decides nothing about what they hold. Start at
//! [`Redirector::attach`].
//!
//! Maps are pinned, and the next process finds them with their contents; the programs are loaded anew and replace the old ones between
//! two packets. A gateway that was killed leaves its redirector passing new sessions to the other replicas.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use canal_abi::tier::{
    REDIRECTOR_COUNTS, RedirectorSettings, Replica, TUNNEL_COUNTS, Table, Throttle, ThrottleKey, address_be, address_of_be,
    redirector_count_name, tunnel_count_name,
};
use canal_abi::{from_bytes, to_bytes};
use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ProgramInput};

use crate::entries::{Entries, Replaced};
use crate::hook::{Direction, Hook, within};
use crate::origins::sum_counter;
use crate::tier::{self, TierPins};
use crate::tunnel::{self, TUNNEL_DEVICE, Tunnel};
use crate::{OffloadError, sys};

pub use crate::throttle::{Limit, Limits};

/// Aligned as ELF wants it.
#[repr(C, align(8))]
struct Embedded<B: ?Sized>(B);
static REDIRECTOR: &Embedded<[u8]> = &Embedded(*include_bytes!(concat!(env!("OUT_DIR"), "/redirector.bpf.o")));
static TUNNEL: &Embedded<[u8]> = &Embedded(*include_bytes!(concat!(env!("OUT_DIR"), "/tunnel.bpf.o")));

/// The compiled objects, for tests of their layout.
pub fn object_bytes() -> [&'static [u8]; 2] {
    [&REDIRECTOR.0, &TUNNEL.0]
}

const PROGRAM: &str = "canal_redirector";
const TUNNEL_PROGRAM: &str = "canal_tunnel";
const SOURCE: &str = "bpf/redirector.bpf.c";
const TUNNEL_SOURCE: &str = "bpf/tunnel.bpf.c";
const MAPS: &[&str] = &["canal_self", "canal_tables", "canal_replicas", "canal_hosts", "canal_throttles", "canal_redirector_counts"];
const TUNNEL_MAPS: &[&str] = &["canal_tunnel_counts"];
const THROTTLES: &str = "canal_throttles";

/// How to load and where to attach.
#[derive(Debug, Clone)]
pub struct Options {
    /// Path of a network namespace; `None`: this thread's.
    pub netns: Option<PathBuf>,
    /// The replica's underlay device, e.g. `eth0`.
    pub device: String,
    /// Where to keep maps; `None`: they go with the last program that uses them, and a new process starts with empty ones.
    pub pin_dir: Option<PathBuf>,
    /// The replica's underlay address.
    pub address: Ipv4Addr,
    /// The replica's number in bucket tables; 0: not known yet, and an earlier process's stays in force.
    pub number: u16,
    /// The edge of the replica's AZ; 0.0.0.0: not known yet, and an earlier process's stays in force.
    pub edge: Ipv4Addr,
    /// Bytes: the largest inner packet, with its IP header, that the tier takes.
    pub mtu: u32,
    /// First source port of the tunnels to the edge.
    pub tunnel_port: u16,
    /// Source ports, and so tunnels, to the edge; 0: each flow has its own (RFC 7348 5).
    pub tunnels: u16,
}

/// The loaded programs and their maps. Dropping it changes nothing on the devices.
#[derive(Debug)]
pub struct Redirector {
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

/// What the redirector made of one frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    /// `TC_ACT_*`: 0 to the host's stack, 2 dropped, 7 sent.
    pub verdict: u32,
    /// The mark that the host's stack sees.
    pub mark: u32,
    /// The frame as it goes on.
    pub frame: Vec<u8>,
}

impl Redirector {
    /// Loads the programs, takes over pinned maps, makes the tunnel device with its routes, and puts the programs on both devices, where
    /// they replace earlier ones without a gap. May be called as often as one likes.
    pub fn attach(options: &Options) -> Result<Self, OffloadError> {
        let redirector = Self::load(options)?;
        redirector.go_live(options)?;
        Ok(redirector)
    }

    /// Loads without touching devices, so that new maps can be filled before [`Redirector::go_live`].
    pub fn load(options: &Options) -> Result<Self, OffloadError> {
        let dir = options.pin_dir.as_deref();
        let pins = dir.map(|d| Ok::<_, OffloadError>((TierPins::open(d, "redirector")?, TierPins::open(d, "tunnel")?))).transpose()?;
        let adopted = pins.as_ref().is_some_and(|(p, _)| p.has_maps());
        let object = tier::load(SOURCE, &REDIRECTOR.0, MAPS, pins.as_ref().map(|p| &p.0), None)?;
        let tunnel = tier::load(TUNNEL_SOURCE, &TUNNEL.0, TUNNEL_MAPS, pins.as_ref().map(|p| &p.1), None)?;
        let hook = |device: &str, direction| Hook { netns: options.netns.clone(), device: device.to_string(), direction };
        let redirector = Self {
            hook: hook(&options.device, Direction::Ingress),
            tunnel_hook: hook(TUNNEL_DEVICE, Direction::Egress),
            pins,
            adopted,
            address: options.address,
            mtu: options.mtu,
            own: [Entries::of(&object, "canal_self")?, Entries::of(&tunnel, "canal_self")?],
            tables: Entries::of(&object, "canal_tables")?,
            replicas: Entries::of(&object, "canal_replicas")?,
            hosts: Entries::of(&object, "canal_hosts")?,
            throttles: tier::map(&object, THROTTLES)?,
            counts: tier::map(&object, "canal_redirector_counts")?,
            tunnel_counts: tier::map(&tunnel, "canal_tunnel_counts")?,
            object,
            tunnel,
        };
        let (number, edge) = redirector.own()?;
        redirector.set_self(
            if options.number == 0 { number } else { options.number },
            if options.edge.is_unspecified() { edge } else { options.edge },
        )?;
        Ok(redirector)
    }

    /// Makes the tunnel device with its routes, and puts the loaded programs in the place of an earlier process's.
    pub fn go_live(&self, options: &Options) -> Result<(), OffloadError> {
        let tunnel = Tunnel { address: options.address, mtu: options.mtu, port: options.tunnel_port, ports: options.tunnels };
        within(options.netns.as_deref(), || tunnel::make(&tunnel))??;
        self.tunnel_hook.attach(tier::program(&self.tunnel, TUNNEL_PROGRAM)?.as_fd())?;
        self.hook.attach(tier::program(&self.object, PROGRAM)?.as_fd())?;
        if let Some((a, b)) = &self.pins {
            a.forget_other_versions();
            b.forget_other_versions();
        }
        Ok(())
    }

    /// Takes the programs off their devices, and the tunnel device and its routes away, and removes the pins: the replica is no replica any more.
    pub fn remove(self) -> Result<(), OffloadError> {
        self.hook.detach(tier::program(&self.object, PROGRAM)?.as_fd())?;
        within(self.hook.netns.as_deref(), tunnel::remove)??;
        self.pins.map_or(Ok(()), |(a, b)| a.remove().and_then(|()| b.remove()))
    }

    /// The replica's number in bucket tables and the edge of its AZ, as the programs know them; 0 and 0.0.0.0: not known.
    pub fn own(&self) -> Result<(u16, Ipv4Addr), OffloadError> {
        let held = self.own[0].get(&0)?.unwrap_or_default();
        Ok((held.number as u16, address_of_be(held.edge_be)))
    }

    /// Tells the programs the replica's number in bucket tables, and the edge that they send to.
    pub fn set_self(&self, number: u16, edge: Ipv4Addr) -> Result<(), OffloadError> {
        let settings =
            RedirectorSettings { address_be: address_be(self.address), number: number.into(), edge_be: address_be(edge), mtu: self.mtu };
        self.own.iter().try_for_each(|map| map.put(&0, &settings))
    }

    /// Whether the maps are an earlier process's, with their contents.
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Whether maps outlive this process: they are pinned, and not only in a mount that goes with this process's own mount namespace.
    pub fn is_durable(&self) -> bool {
        self.pins.as_ref().is_some_and(|(p, _)| p.is_durable())
    }

    /// Whether this process's programs are the ones on the devices (somebody may have flushed their filters, or made a device anew).
    pub fn is_attached(&self) -> bool {
        let is_there = |hook: &Hook, object, name| {
            let Ok(program) = tier::program(object, name) else { return false };
            let own = sys::program_id(program.as_fd()).ok();
            own.is_some() && hook.program_id(program.as_fd()) == own
        };
        is_there(&self.hook, &self.object, PROGRAM) && is_there(&self.tunnel_hook, &self.tunnel, TUNNEL_PROGRAM)
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

    fn throttle(&self, key: &ThrottleKey) -> Result<Option<Throttle>, OffloadError> {
        let err = |source| OffloadError::Map { map: THROTTLES, source };
        Ok(self.throttles.lookup(to_bytes(key), MapFlags::LOCK).map_err(err)?.and_then(|v| from_bytes(&v)))
    }

    /// Sets early limits. Ones that do not change keep their tokens, new ones start full. Errors: [`OffloadError::Full`].
    pub fn set_throttle(&self, key: &ThrottleKey, limits: &Limits) -> Result<(), OffloadError> {
        let old = self.throttle(key)?;
        let new = limits.applied_to(old.as_ref(), sys::ktime_ns());
        if old.is_some_and(|o| limits.are_in(&o)) {
            return Ok(());
        }
        self.throttles.update(to_bytes(key), to_bytes(&new), MapFlags::LOCK).map_err(|source| {
            let is_full = source.kind() == libbpf_rs::ErrorKind::TooBig;
            let capacity = self.throttles.max_entries();
            if is_full { OffloadError::Full { map: THROTTLES, capacity } } else { OffloadError::Map { map: THROTTLES, source } }
        })
    }

    /// Lifts early limits. None there is fine.
    pub fn remove_throttle(&self, key: &ThrottleKey) -> Result<(), OffloadError> {
        match self.throttles.delete(to_bytes(key)) {
            Err(source) if source.kind() != libbpf_rs::ErrorKind::NotFound => Err(OffloadError::Map { map: THROTTLES, source }),
            _ => Ok(()),
        }
    }

    /// All early limits with their state: the tokens left, and how many packets were refused.
    pub fn throttles(&self) -> Result<HashMap<ThrottleKey, Throttle>, OffloadError> {
        let mut all = HashMap::new();
        for key in self.throttles.keys().filter_map(|k| from_bytes::<ThrottleKey>(&k)) {
            if let Some(t) = self.throttle(&key)? {
                all.insert(key, t);
            }
        }
        Ok(all)
    }

    /// Makes the early limits `wanted` and no others.
    pub fn replace_throttles(&self, wanted: &HashMap<ThrottleKey, Limits>) -> Result<Replaced, OffloadError> {
        let have = self.throttles()?;
        let mut replaced = Replaced::default();
        for key in have.keys().filter(|k| !wanted.contains_key(k)) {
            self.remove_throttle(key)?;
            replaced.removed += 1;
        }
        for (key, limits) in wanted.iter().filter(|(k, l)| !have.get(k).is_some_and(|t| l.are_in(t))) {
            self.set_throttle(key, limits)?;
            replaced.put += 1;
        }
        Ok(replaced)
    }

    /// Every counter's name and its count since the maps were made.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        REDIRECTOR_COUNTS.into_iter().map(|c| Ok((redirector_count_name(c), sum_counter(&self.counts, c as u32)?))).collect()
    }

    /// The same of the tunnel's program.
    pub fn tunnel_counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        TUNNEL_COUNTS.into_iter().map(|c| Ok((tunnel_count_name(c), sum_counter(&self.tunnel_counts, c as u32)?))).collect()
    }

    /// Each program's name and how many instructions the verifier walked: the budget that a test holds.
    pub fn verified_insns(&self) -> Result<[(&'static str, u32); 2], OffloadError> {
        Ok([
            (PROGRAM, tier::verified_insns(&self.object, SOURCE, PROGRAM)?),
            (TUNNEL_PROGRAM, tier::verified_insns(&self.tunnel, TUNNEL_SOURCE, TUNNEL_PROGRAM)?),
        ])
    }

    /// Runs the redirector over one frame as if it came to this thread's network namespace; counters count it. For tests and for the
    /// question "why is this dropped".
    pub fn trial(&self, frame: &[u8]) -> Result<Trial, OffloadError> {
        // `struct __sk_buff` up to its `hwtstamp`; the mark is its third word (linux/bpf.h).
        let mut context = [0u8; 192];
        let mut out = vec![0; frame.len() + 256];
        let input =
            ProgramInput { data_in: Some(frame), data_out: Some(&mut out), context_out: Some(&mut context), ..ProgramInput::default() };
        let program = tier::program(&self.object, PROGRAM)?;
        let ran = program.test_run(input).map_err(|source| OffloadError::Trial { program: PROGRAM, source })?;
        let mark = ran.context.and_then(|c| c.get(8..12)).and_then(|m| m.try_into().ok()).map_or(0, u32::from_ne_bytes);
        Ok(Trial { verdict: ran.return_value, mark, frame: ran.data.map(|d| d.to_vec()).unwrap_or_default() })
    }
}

/// Removes what an earlier process left: programs, tunnel device, routes, pins. Nothing there is fine.
pub fn remove(netns: Option<&Path>, device: &str, pin_dir: Option<&Path>) -> Result<(), OffloadError> {
    let hook = Hook { netns: netns.map(Path::to_path_buf), device: device.to_string(), direction: Direction::Ingress };
    // Any descriptor does: detaching names the filter, not the program.
    let any = std::fs::File::open("/dev/null").map_err(|source| OffloadError::Netns { netns: "/dev/null".into(), source })?;
    hook.detach(any.as_fd())?;
    within(netns, tunnel::remove)??;
    match pin_dir {
        Some(d) if d.exists() => {
            ["redirector", "tunnel"].into_iter().try_for_each(|what| if d.exists() { TierPins::open(d, what)?.remove() } else { Ok(()) })
        }
        _ => Ok(()),
    }
}

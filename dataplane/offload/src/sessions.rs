//! The underlay's session table of one link (`bpf/sessions.bpf.c`): how many sessions a virtual switch would keep for it, outside and
//! inside of its tunnels. Measures only; nothing is dropped, and nothing stays when it is dropped. Start at [`Sessions::attach`].

use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use canal_abi::tier::{SESSIONS_COUNTS, SESSIONS_MAX, Session, SessionKey, SessionsCount, sessions_count_name};
use canal_abi::{from_bytes, to_bytes};
use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramInput};

use crate::OffloadError;
use crate::hook::{Direction, Hook};
use crate::origins::sum_counter;
use crate::sys::ktime_ns;
use crate::{journal, tier};

/// Aligned as ELF wants it.
#[repr(C, align(8))]
struct Embedded<B: ?Sized>(B);
static OBJECT: &Embedded<[u8]> = &Embedded(*include_bytes!(concat!(env!("OUT_DIR"), "/sessions.bpf.o")));

/// The compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

const PROGRAM: &str = "canal_sessions";
const SOURCE: &str = "bpf/sessions.bpf.c";
const OUTER: &str = "canal_sessions_outer";
const INNER: &str = "canal_sessions_inner";

/// A session by its outer headers. Both directions are one: which end is first says nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OuterSession {
    /// IP protocol number.
    pub protocol: u8,
    pub ends: [SocketAddr; 2],
}

/// A session table on one device.
#[derive(Debug)]
pub struct Sessions {
    object: Object,
    hooks: [Hook; 2],
    outer: (MapHandle, AtomicU64),
    inner: (MapHandle, AtomicU64),
    counts: MapHandle,
}

impl Sessions {
    /// Watches both directions of `device` in the network namespace at the path `netns`, or in this thread's. Not for a device that
    /// has an edge's or a redirector's program: theirs is the same place.
    pub fn attach(netns: Option<&Path>, device: &str) -> Result<Self, OffloadError> {
        Self::attach_sized(netns, device, SESSIONS_MAX)
    }

    /// The same with tables of `max` sessions each.
    pub fn attach_sized(netns: Option<&Path>, device: &str, max: u32) -> Result<Self, OffloadError> {
        let object = load(max)?;
        let hook = |direction| Hook { netns: netns.map(Path::to_path_buf), device: device.to_string(), direction };
        let sessions = Self {
            outer: (tier::map(&object, OUTER)?, AtomicU64::new(0)),
            inner: (tier::map(&object, INNER)?, AtomicU64::new(0)),
            counts: tier::map(&object, "canal_sessions_counts")?,
            hooks: [hook(Direction::Ingress), hook(Direction::Egress)],
            object,
        };
        let program = tier::program(&sessions.object, PROGRAM)?;
        sessions.hooks.iter().try_for_each(|h| h.attach(program.as_fd()))?;
        Ok(sessions)
    }

    /// Sessions in the tables: by outer headers, and inside of tunnels. Does not read the tables.
    pub fn sessions(&self) -> Result<(u64, u64), OffloadError> {
        let now = |count: SessionsCount, gone: &AtomicU64| {
            Ok::<_, OffloadError>(sum_counter(&self.counts, count as u32)?.saturating_sub(gone.load(Ordering::Relaxed)))
        };
        Ok((now(SessionsCount::CANAL_SESSIONS_OUTER, &self.outer.1)?, now(SessionsCount::CANAL_SESSIONS_INNER, &self.inner.1)?))
    }

    /// What the outer table holds. Reads it.
    pub fn outer(&self) -> Vec<OuterSession> {
        let end = |address: [u8; 16], port_be: u16| SocketAddr::new(Ipv6Addr::from(address).to_canonical(), u16::from_be(port_be));
        let session = |key: SessionKey| OuterSession {
            protocol: key.protocol,
            ends: [end(key.source, key.source_port_be), end(key.destination, key.destination_port_be)],
        };
        self.outer.0.keys().filter_map(|key| from_bytes(&key)).map(session).collect()
    }

    /// Every counter's name and its count.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        SESSIONS_COUNTS.into_iter().map(|c| Ok((sessions_count_name(c), sum_counter(&self.counts, c as u32)?))).collect()
    }

    /// Forgets sessions without a packet for `idle`, as a switch ages its table; says how many there were in the outer and in the inner one. Reads both.
    pub fn sweep(&self, idle: Duration) -> Result<(u64, u64), OffloadError> {
        let oldest = ktime_ns().saturating_sub(idle.as_nanos().try_into().unwrap_or(u64::MAX));
        Ok((sweep(&self.outer, oldest)?, sweep(&self.inner, oldest)?))
    }

    /// Runs the program over one frame, without a device; tables and counters see it. For tests.
    pub fn trial(&self, frame: &[u8]) -> Result<(), OffloadError> {
        let input = ProgramInput { data_in: Some(frame), ..ProgramInput::default() };
        let program = tier::program(&self.object, PROGRAM)?;
        program.test_run(input).map_err(|source| OffloadError::Trial { program: PROGRAM, source }).map(drop)
    }

    /// The program's name and how many instructions the verifier walked: the budget that a test holds.
    pub fn verified_insns(&self) -> Result<(&'static str, u32), OffloadError> {
        Ok((PROGRAM, tier::verified_insns(&self.object, SOURCE, PROGRAM)?))
    }
}

fn load(max: u32) -> Result<Object, OffloadError> {
    journal::install();
    let _ = journal::last_words();
    let err = |source| OffloadError::Refused { object: SOURCE, source, journal: journal::last_words() };
    let mut open = ObjectBuilder::default().open_memory(object_bytes()).map_err(err)?;
    for mut map in open.maps_mut() {
        if map.name() == OUTER || map.name() == INNER {
            map.set_max_entries(max).map_err(err)?;
        }
    }
    open.load().map_err(err)
}

fn sweep((map, gone): &(MapHandle, AtomicU64), oldest: u64) -> Result<u64, OffloadError> {
    let err = |source| OffloadError::Map { map: "canal_sessions", source };
    let mut swept = 0;
    for key in map.keys().filter_map(|k| from_bytes::<SessionKey>(&k)).collect::<Vec<_>>() {
        let held = map.lookup(to_bytes(&key), MapFlags::ANY).map_err(err)?.and_then(|v| from_bytes::<Session>(&v));
        if held.is_some_and(|s| s.last_ns <= oldest) && map.delete(to_bytes(&key)).is_ok() {
            swept += 1;
        }
    }
    gone.fetch_add(swept, Ordering::Relaxed);
    Ok(swept)
}

impl Drop for Sessions {
    fn drop(&mut self) {
        let Ok(program) = tier::program(&self.object, PROGRAM) else { return };
        for hook in &self.hooks {
            if let Err(e) = hook.detach(program.as_fd()) {
                tracing::warn!(%e, "the session table's program stays on its device; tc filter del takes it away");
            }
        }
    }
}

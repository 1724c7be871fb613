//! Session tables of one underlay link (`bpf/session_count.bpf.c`). They show how many sessions a
//! virtual switch would store for the link, outside and inside of its tunnels. Only measures: it
//! drops no packet and leaves nothing behind. Start with [`SessionTable::attach`].

use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use canal_abi::tier::{
    SESSIONS_COUNTS, SESSIONS_MAX, Session, SessionKey, SessionsCount, sessions_count_name,
};
use canal_abi::{from_bytes, to_bytes};
use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramInput};

use crate::OffloadError;
use crate::embedded::EmbeddedObject;
use crate::origins::sum_counter;
use crate::sys::ktime_ns;
use crate::tc_hook::{Direction, Hook};
use crate::{journal, tier};

static OBJECT: &EmbeddedObject<[u8]> = &EmbeddedObject(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/session_count.bpf.o"
)));

/// Returns the compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

const PROGRAM: &str = "canal_sessions";
const SOURCE: &str = "bpf/session_count.bpf.c";
const OUTER: &str = "canal_sessions_outer";
const INNER: &str = "canal_sessions_inner";

/// Session by its outer headers. Both directions are one session, so the order of the ends has no
/// meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OuterSession {
    /// IP protocol number of the session.
    pub protocol: u8,
    pub ends: [SocketAddr; 2],
}

/// Session tables of one device. Dropping them detaches the program.
#[derive(Debug)]
pub struct SessionTable {
    object: Object,
    hooks: [Hook; 2],
    outer: (MapHandle, AtomicU64),
    inner: (MapHandle, AtomicU64),
    counts: MapHandle,
}

impl SessionTable {
    /// Counts the sessions of both directions of `device`, in the network namespace at the path
    /// `netns` or in this thread's. Not for a device with an edge's or a redirector's program,
    /// because that one uses the same filter.
    ///
    /// # Errors
    /// Fails if the kernel refuses the program or its attachment.
    pub fn attach(netns: Option<&Path>, device: &str) -> Result<Self, OffloadError> {
        Self::attach_sized(netns, device, SESSIONS_MAX)
    }

    /// Does the work of [`SessionTable::attach`] with tables of `max` sessions each.
    ///
    /// # Errors
    /// Fails if the kernel refuses the program or its attachment.
    pub fn attach_sized(
        netns: Option<&Path>,
        device: &str,
        max: u32,
    ) -> Result<Self, OffloadError> {
        let object = load(max)?;
        let hook = |direction| Hook {
            netns: netns.map(Path::to_path_buf),
            device: device.to_string(),
            direction,
        };
        let sessions = Self {
            outer: (tier::map(&object, OUTER)?, AtomicU64::new(0)),
            inner: (tier::map(&object, INNER)?, AtomicU64::new(0)),
            counts: tier::map(&object, "canal_sessions_counts")?,
            hooks: [hook(Direction::Ingress), hook(Direction::Egress)],
            object,
        };
        let program = tier::program(&sessions.object, PROGRAM)?;
        sessions
            .hooks
            .iter()
            .try_for_each(|h| h.attach(program.as_fd()))?;
        Ok(sessions)
    }

    /// Returns the number of sessions by outer headers and inside of tunnels. It does not read the
    /// tables.
    ///
    /// # Errors
    /// Fails if the counter map cannot be read.
    pub fn sessions(&self) -> Result<(u64, u64), OffloadError> {
        let now = |count: SessionsCount, gone: &AtomicU64| {
            Ok::<_, OffloadError>(
                sum_counter(&self.counts, count as u32)?
                    .saturating_sub(gone.load(Ordering::Relaxed)),
            )
        };
        Ok((
            now(SessionsCount::CANAL_SESSIONS_OUTER, &self.outer.1)?,
            now(SessionsCount::CANAL_SESSIONS_INNER, &self.inner.1)?,
        ))
    }

    /// Returns the sessions of the outer table, which it reads.
    pub fn outer(&self) -> Vec<OuterSession> {
        let end = |address: [u8; 16], port_be: u16| {
            SocketAddr::new(
                Ipv6Addr::from(address).to_canonical(),
                u16::from_be(port_be),
            )
        };
        let session = |key: SessionKey| OuterSession {
            protocol: key.protocol,
            ends: [
                end(key.source, key.source_port_be),
                end(key.destination, key.destination_port_be),
            ],
        };
        self.outer
            .0
            .keys()
            .filter_map(|key| from_bytes(&key))
            .map(session)
            .collect()
    }

    /// Returns every counter's name and its count.
    ///
    /// # Errors
    /// Fails if the counter map cannot be read.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        SESSIONS_COUNTS
            .into_iter()
            .map(|c| Ok((sessions_count_name(c), sum_counter(&self.counts, c as u32)?)))
            .collect()
    }

    /// Removes sessions without a packet for `idle`, as a switch ages its table. Returns how many
    /// were removed from the outer and from the inner table. It reads both.
    ///
    /// # Errors
    /// Fails if a table cannot be read.
    pub fn sweep(&self, idle: Duration) -> Result<(u64, u64), OffloadError> {
        let oldest = ktime_ns().saturating_sub(idle.as_nanos().try_into().unwrap_or(u64::MAX));
        Ok((sweep(&self.outer, oldest)?, sweep(&self.inner, oldest)?))
    }

    /// Runs the program over one frame, without a device; tables and counters record it. It is for
    /// tests.
    ///
    /// # Errors
    /// Fails if the kernel cannot run the program.
    pub fn test_run(&self, frame: &[u8]) -> Result<(), OffloadError> {
        let input = ProgramInput {
            data_in: Some(frame),
            ..ProgramInput::default()
        };
        let program = tier::program(&self.object, PROGRAM)?;
        program
            .test_run(input)
            .map_err(|source| OffloadError::Trial {
                program: PROGRAM,
                source,
            })
            .map(drop)
    }

    /// Returns the program's name and the number of instructions that the verifier walked, which a
    /// test compares with a budget.
    ///
    /// # Errors
    /// Fails if the kernel gives no information about the program.
    pub fn verified_insns(&self) -> Result<(&'static str, u32), OffloadError> {
        Ok((
            PROGRAM,
            tier::verified_insns(&self.object, SOURCE, PROGRAM)?,
        ))
    }
}

fn load(max: u32) -> Result<Object, OffloadError> {
    journal::install();
    let _ = journal::last_words();
    let err = |source| OffloadError::Refused {
        object: SOURCE,
        source,
        journal: journal::last_words(),
    };
    let mut open = ObjectBuilder::default()
        .open_memory(object_bytes())
        .map_err(err)?;
    for mut map in open.maps_mut() {
        if map.name() == OUTER || map.name() == INNER {
            map.set_max_entries(max).map_err(err)?;
        }
    }
    open.load().map_err(err)
}

fn sweep((map, gone): &(MapHandle, AtomicU64), oldest: u64) -> Result<u64, OffloadError> {
    let err = |source| OffloadError::Map {
        map: "canal_sessions",
        source,
    };
    let mut swept = 0;
    for key in map
        .keys()
        .filter_map(|k| from_bytes::<SessionKey>(&k))
        .collect::<Vec<_>>()
    {
        let entry = map
            .lookup(to_bytes(&key), MapFlags::ANY)
            .map_err(err)?
            .and_then(|v| from_bytes::<Session>(&v));
        if entry.is_some_and(|s| s.last_ns <= oldest) && map.delete(to_bytes(&key)).is_ok() {
            swept += 1;
        }
    }
    gone.fetch_add(swept, Ordering::Relaxed);
    Ok(swept)
}

impl Drop for SessionTable {
    fn drop(&mut self) {
        let Ok(program) = tier::program(&self.object, PROGRAM) else {
            return;
        };
        for hook in &self.hooks {
            if let Err(e) = hook.detach(program.as_fd()) {
                tracing::warn!(%e, "session table: cannot detach the program from its device; fix: remove it with tc filter del");
            }
        }
    }
}

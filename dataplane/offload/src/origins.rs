//! Where captured connections were going: the proxy's side of the `canal_origins` map. Entries are taken once and swept by age.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use canal_abi::capture::{Origin, OriginKey};
use canal_abi::{from_bytes, to_bytes};
use libbpf_rs::{MapCore, MapHandle};

use crate::OffloadError;
use crate::sys::ktime_ns;

/// An origin that the proxy did not ask for within this time never will be: its connection died between the kernel's accept queue and
/// the proxy. Longer than any accept can wait (the client's own connect time-out is 127 s at most with Linux's defaults, and its entry
/// is withdrawn by then).
pub const ORIGIN_AGE_MAX: Duration = Duration::from_secs(180);

/// Shared by all workers; look-ups do not lock.
#[derive(Debug, Clone)]
pub struct Origins {
    map: Arc<MapHandle>,
    swept: Arc<AtomicU64>,
}

impl Origins {
    pub(crate) fn new(map: MapHandle) -> Self {
        Self { map: Arc::new(map), swept: Arc::default() }
    }

    /// The original destination of the connection whose client end is `peer` in the namespace with this cookie, and forgets it.
    /// `None`: it was not captured (somebody dialled the proxy's port), or the table was full. The caller resets it either way.
    pub fn take(&self, netns_cookie: u64, peer: SocketAddr) -> Option<SocketAddr> {
        let key = OriginKey::new(netns_cookie, peer);
        let found = self.map.lookup_and_delete(to_bytes(&key)).ok().flatten()?;
        from_bytes::<Origin>(&found).map(|o| o.destination())
    }

    /// Forgets origins older than `age`; says how many. Reads the whole table: once in half a minute is enough.
    pub fn sweep(&self, age: Duration) -> u64 {
        let oldest = ktime_ns().saturating_sub(age.as_nanos().try_into().unwrap_or(u64::MAX));
        let mut gone = 0;
        for key in self.map.keys() {
            let Ok(Some(found)) = self.map.lookup(&key, libbpf_rs::MapFlags::ANY) else { continue };
            if from_bytes::<Origin>(&found).is_some_and(|o| o.published_ns <= oldest) && self.map.delete(&key).is_ok() {
                gone += 1;
            }
        }
        self.swept.fetch_add(gone, Ordering::Relaxed);
        gone
    }

    /// How many origins [`Origins::sweep`] has forgotten since the start.
    pub fn swept(&self) -> u64 {
        self.swept.load(Ordering::Relaxed)
    }

    /// How many origins wait now.
    pub fn waiting(&self) -> usize {
        self.map.keys().count()
    }
}

/// Sums a per-CPU counter map's values for `index`.
pub(crate) fn sum_counter(map: &MapHandle, index: u32) -> Result<u64, OffloadError> {
    let err = |source| OffloadError::Map { map: "canal_counts", source };
    let per_cpu = map.lookup_percpu(&index.to_ne_bytes(), libbpf_rs::MapFlags::ANY).map_err(err)?.unwrap_or_default();
    Ok(per_cpu.iter().filter_map(|v| v.as_slice().try_into().ok().map(u64::from_ne_bytes)).sum())
}

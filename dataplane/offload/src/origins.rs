//! Where captured connections were going: the proxy's side of the `canal_origins` map. Entries are taken once and swept by age.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use canal_abi::capture::{Origin, OriginKey, OriginPod};
use canal_abi::{from_bytes, to_bytes};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::OffloadError;
use crate::sys::ktime_ns;

/// An origin that the proxy did not ask for within this time never will be: its connection died between the kernel's accept queue and
/// the proxy. Longer than any accept can wait (the client's own connect time-out is 127 s at most with Linux's defaults, and its entry
/// is withdrawn by then).
pub const ORIGIN_AGE_MAX: Duration = Duration::from_secs(180);

/// The proxy tells the kernel of so many taken origins at once; the kernel's count of those that wait lags behind by as many.
const TAKEN_STEP: u64 = 64;

/// Shared by all workers; look-ups do not lock.
#[derive(Debug, Clone)]
pub struct Origins {
    map: Arc<MapHandle>,
    /// What the programs count, by network namespace, and what the proxy does: each pod has a share of the map.
    pods: Arc<MapHandle>,
    taken: Arc<MapHandle>,
    untold: Arc<AtomicU64>,
    swept: Arc<AtomicU64>,
}

impl Origins {
    pub(crate) fn new(map: MapHandle, pods: MapHandle, taken: MapHandle) -> Self {
        Self { map: Arc::new(map), pods: Arc::new(pods), taken: Arc::new(taken), untold: Arc::default(), swept: Arc::default() }
    }

    /// The same origins, for one pod: what is taken by this handle counts as that pod's.
    #[must_use]
    pub fn of_pod(&self) -> Self {
        Self { untold: Arc::default(), ..self.clone() }
    }

    /// The original destination of the connection whose client end is `peer` in the namespace with this cookie, and forgets it.
    /// `None`: it was not captured (somebody dialled the proxy's port), or the table was full. The caller resets it either way.
    pub fn take(&self, netns_cookie: u64, peer: SocketAddr) -> Option<SocketAddr> {
        let key = OriginKey::new(netns_cookie, peer);
        let found = self.map.lookup_and_delete(to_bytes(&key)).ok().flatten()?;
        if self.untold.fetch_add(1, Ordering::Relaxed) % TAKEN_STEP == TAKEN_STEP - 1 {
            // Two workers at once may lose one step: the next sweep counts anew.
            let before = number(&self.taken, netns_cookie);
            self.put_taken(netns_cookie, before.wrapping_add(TAKEN_STEP));
        }
        from_bytes::<Origin>(&found).map(|o| o.destination())
    }

    fn put_taken(&self, netns_cookie: u64, taken: u64) {
        if let Err(error) = self.taken.update(&netns_cookie.to_ne_bytes(), &taken.to_ne_bytes(), MapFlags::ANY) {
            tracing::debug!(%error, "cannot tell the kernel what was taken; the next sweep does");
        }
    }

    /// Forgets origins older than `age`; says how many. Reads the whole table, and counts by it anew what waits of each pod.
    pub fn sweep(&self, age: Duration) -> u64 {
        let oldest = ktime_ns().saturating_sub(age.as_nanos().try_into().unwrap_or(u64::MAX));
        let mut gone = 0;
        let mut waiting = HashMap::<u64, u64>::new();
        for key in self.map.keys() {
            let Ok(Some(found)) = self.map.lookup(&key, MapFlags::ANY) else { continue };
            if from_bytes::<Origin>(&found).is_some_and(|o| o.published_ns <= oldest) && self.map.delete(&key).is_ok() {
                gone += 1;
            } else if let Some(key) = from_bytes::<OriginKey>(&key) {
                *waiting.entry(key.netns_cookie).or_default() += 1;
            }
        }
        self.swept.fetch_add(gone, Ordering::Relaxed);
        self.recount(&waiting);
        gone
    }

    /// Makes the kernel's counts say that so many wait. A namespace of which none does is forgotten: it may be gone.
    fn recount(&self, waiting: &HashMap<u64, u64>) {
        for key in self.pods.keys().collect::<Vec<_>>() {
            let cookie = key.as_slice().try_into().map(u64::from_ne_bytes).unwrap_or_default();
            let Some(waits) = waiting.get(&cookie) else {
                // A connection that is published between the two is not counted: the limit is one higher for its time.
                let _ = self.pods.delete(&key);
                let _ = self.taken.delete(&key);
                continue;
            };
            let Ok(Some(found)) = self.pods.lookup(&key, MapFlags::ANY) else { continue };
            if let Some(pod) = from_bytes::<OriginPod>(&found) {
                self.put_taken(cookie, pod.published.wrapping_sub(pod.withdrawn).wrapping_sub(*waits));
            }
        }
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

fn number(map: &MapHandle, key: u64) -> u64 {
    let found = map.lookup(&key.to_ne_bytes(), MapFlags::ANY).ok().flatten();
    found.and_then(|v| v.as_slice().try_into().ok().map(u64::from_ne_bytes)).unwrap_or_default()
}

/// Sums a per-CPU counter map's values for `index`.
pub(crate) fn sum_counter(map: &MapHandle, index: u32) -> Result<u64, OffloadError> {
    let err = |source| OffloadError::Map { map: "canal_counts", source };
    let per_cpu = map.lookup_percpu(&index.to_ne_bytes(), MapFlags::ANY).map_err(err)?.unwrap_or_default();
    Ok(per_cpu.iter().filter_map(|v| v.as_slice().try_into().ok().map(u64::from_ne_bytes)).sum())
}

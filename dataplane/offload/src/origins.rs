//! Original destinations of captured connections: the proxy's side of the `canal_origins` map. The
//! proxy takes each entry once; old entries are removed by age. Start with [`Origins::take`].

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use canal_abi::capture::{Origin, OriginKey, OriginPod};
use canal_abi::{from_bytes, to_bytes};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::OffloadError;
use crate::sys::ktime_ns;

/// Age after which an origin that the proxy did not take is removed: its connection died between
/// the kernel's accept queue and the proxy. No accept can wait longer. The client's own connect
/// timeout is at most 127 s with Linux's defaults, and its entry is withdrawn by then.
pub const ORIGIN_AGE_MAX: Duration = Duration::from_secs(180);

/// Number of taken origins that the proxy reports to the kernel at once. The kernel's count of
/// waiting origins lags behind by up to this number. Against the pod's share of 8,192 that does not
/// matter; it saves a system call for 63 of 64 connections.
const TAKEN_STEP: u64 = 64;

/// Handle to the origins that all workers share. Lookups do not lock.
#[derive(Debug, Clone)]
pub struct Origins {
    map: Arc<MapHandle>,
    /// Counts by network namespace: those of the programs here, those of the proxy in
    /// `taken_by_proxy`. They limit each pod to a share of the map.
    pods: Arc<MapHandle>,
    taken_by_proxy: Arc<MapHandle>,
    untold: Arc<AtomicU64>,
    swept: Arc<AtomicU64>,
}

impl Origins {
    pub(crate) fn new(map: MapHandle, pods: MapHandle, taken: MapHandle) -> Self {
        Self {
            map: Arc::new(map),
            pods: Arc::new(pods),
            taken_by_proxy: Arc::new(taken),
            untold: Arc::default(),
            swept: Arc::default(),
        }
    }

    /// Returns a handle for one pod. Entries taken through it are counted for that pod.
    #[must_use]
    pub fn of_pod(&self) -> Self {
        Self {
            untold: Arc::default(),
            ..self.clone()
        }
    }

    /// Removes and returns the original destination of the connection from `peer` to the proxy's
    /// address `proxy` in the namespace with this cookie. Returns `None` if the connection was not
    /// captured (its client dialed the proxy's port) or if the table was full. The caller resets it
    /// in both cases.
    pub fn take(&self, netns_cookie: u64, peer: SocketAddr, proxy: IpAddr) -> Option<SocketAddr> {
        let key = OriginKey::new(netns_cookie, peer, proxy);
        let found = self.map.lookup_and_delete(to_bytes(&key)).ok().flatten()?;
        if self.untold.fetch_add(1, Ordering::Relaxed) % TAKEN_STEP == TAKEN_STEP - 1 {
            // Two workers at once may lose one step; the next sweep counts again.
            let before = number(&self.taken_by_proxy, netns_cookie);
            self.put_taken(netns_cookie, before.wrapping_add(TAKEN_STEP));
        }
        from_bytes::<Origin>(&found).map(|o| o.destination())
    }

    fn put_taken(&self, netns_cookie: u64, taken: u64) {
        if let Err(error) = self.taken_by_proxy.update(
            &netns_cookie.to_ne_bytes(),
            &taken.to_ne_bytes(),
            MapFlags::ANY,
        ) {
            tracing::debug!(%error, "capture: could not remove a stored destination from the kernel; the next sweep removes it");
        }
    }

    /// Removes origins older than `age` and returns their number. It reads the whole table and
    /// recounts from it how many connections of each pod wait.
    pub fn sweep(&self, age: Duration) -> u64 {
        let oldest = ktime_ns().saturating_sub(age.as_nanos().try_into().unwrap_or(u64::MAX));
        let mut gone = 0;
        let mut waiting = HashMap::<u64, u64>::new();
        for key in self.map.keys() {
            let Ok(Some(found)) = self.map.lookup(&key, MapFlags::ANY) else {
                continue;
            };
            if from_bytes::<Origin>(&found).is_some_and(|o| o.published_ns <= oldest)
                && self.map.delete(&key).is_ok()
            {
                gone += 1;
            } else if let Some(key) = from_bytes::<OriginKey>(&key) {
                *waiting.entry(key.netns_cookie).or_default() += 1;
            }
        }
        self.swept.fetch_add(gone, Ordering::Relaxed);
        self.recount(&waiting);
        gone
    }

    /// Corrects the kernel's counts to these numbers of waiting connections. A namespace without
    /// waiting connections is removed, because it may not exist any more.
    fn recount(&self, waiting: &HashMap<u64, u64>) {
        for key in self.pods.keys().collect::<Vec<_>>() {
            let cookie = key
                .as_slice()
                .try_into()
                .map(u64::from_ne_bytes)
                .unwrap_or_default();
            let Some(waits) = waiting.get(&cookie) else {
                // A connection that is published in between is not counted, which raises the pod's
                // limit by one while it waits.
                let _ = self.pods.delete(&key);
                let _ = self.taken_by_proxy.delete(&key);
                continue;
            };
            let Ok(Some(found)) = self.pods.lookup(&key, MapFlags::ANY) else {
                continue;
            };
            if let Some(pod) = from_bytes::<OriginPod>(&found) {
                self.put_taken(
                    cookie,
                    pod.published
                        .wrapping_sub(pod.withdrawn)
                        .wrapping_sub(*waits),
                );
            }
        }
    }

    /// Returns how many origins [`Origins::sweep`] has removed since the start.
    pub fn swept(&self) -> u64 {
        self.swept.load(Ordering::Relaxed)
    }

    /// Returns how many origins wait now.
    pub fn waiting(&self) -> usize {
        self.map.keys().count()
    }
}

fn number(map: &MapHandle, key: u64) -> u64 {
    let found = map.lookup(&key.to_ne_bytes(), MapFlags::ANY).ok().flatten();
    found
        .and_then(|v| v.as_slice().try_into().ok().map(u64::from_ne_bytes))
        .unwrap_or_default()
}

/// Sums the values of a per-CPU counter map for `index`.
pub(crate) fn sum_counter(map: &MapHandle, index: u32) -> Result<u64, OffloadError> {
    Ok(counter_by_core(map, index)?.into_iter().sum())
}

/// Returns the values of a per-CPU counter map for `index`, by the number of the core.
pub(crate) fn counter_by_core(map: &MapHandle, index: u32) -> Result<Vec<u64>, OffloadError> {
    let err = |source| OffloadError::Map {
        map: "canal_counts",
        source,
    };
    let per_cpu = map
        .lookup_percpu(&index.to_ne_bytes(), MapFlags::ANY)
        .map_err(err)?
        .unwrap_or_default();
    Ok(per_cpu
        .iter()
        .filter_map(|v| v.as_slice().try_into().ok().map(u64::from_ne_bytes))
        .collect())
}

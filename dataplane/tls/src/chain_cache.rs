//! Cache of verified chains, so that a returning peer costs a hash and not two signature checks.
//! Entries are bound to one set of trust anchors (`trust::TrustAnchors`): any change of roots or
//! revocation lists invalidates all of them at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use canal_runtime::metrics::{MetricFamily, Registry, SharedCounter};
use rustls_pki_types::{CertificateDer, UnixTime};
use sha2::{Digest, Sha256};

use super::verified_chain::{PeerRole, VerifiedChain};

/// Maximum number of cached chains. When the cache is full, the older half is dropped. Nobody
/// measured how many peers a gateway has; one more costs two signature checks.
pub const CHAINS_MAX: usize = 8192;

/// Inputs of a verification, except the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ChainKey {
    digest: [u8; 32],
    anchors: u64,
    role: PeerRole,
}

impl ChainKey {
    /// Computes the key; `anchors` is the number of the trust anchors.
    pub(super) fn of(
        leaf: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        anchors: u64,
        role: PeerRole,
    ) -> Self {
        let mut hash = Sha256::new();
        for c in std::iter::once(leaf).chain(above) {
            hash.update((c.len() as u64).to_be_bytes());
            hash.update(c);
        }
        Self {
            digest: hash.finalize().into(),
            anchors,
            role,
        }
    }
}

type CacheGeneration = HashMap<ChainKey, Arc<VerifiedChain>>;

/// A bounded cache. Entries that are looked up stay longest.
pub(super) struct ChainCache {
    halves: Mutex<(CacheGeneration, CacheGeneration)>,
    hits: SharedCounter,
    misses: SharedCounter,
}

impl ChainCache {
    pub(super) fn new(registry: &Registry) -> Self {
        let results = registry.counters(MetricFamily::new(
            "canal_tls_chains_total",
            "Certificate chains of peers, by result: verified now, or cached from an earlier handshake.",
            &["result"],
        ));
        Self {
            halves: Mutex::default(),
            hits: results.shared(&["known"]),
            misses: results.shared(&["verified"]),
        }
    }

    pub(super) fn get(&self, key: &ChainKey, now: UnixTime) -> Option<Arc<VerifiedChain>> {
        let mut halves = self.halves.lock().unwrap_or_else(PoisonError::into_inner);
        let (young, old) = &mut *halves;
        if let Some(found) = young.get(key) {
            return found.valid_at(now).then(|| found.clone());
        }
        let found = old.remove(key)?;
        // A hit in the old half moves the entry to the young half, so it survives the next drop.
        keep(young, old, *key, found.clone());
        found.valid_at(now).then_some(found)
    }

    pub(super) fn put(&self, key: ChainKey, verified: Arc<VerifiedChain>) {
        let mut halves = self.halves.lock().unwrap_or_else(PoisonError::into_inner);
        let (young, old) = &mut *halves;
        keep(young, old, key, verified);
    }

    pub(super) fn count(&self, hit: bool) {
        if hit {
            self.hits.inc()
        } else {
            self.misses.inc()
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let halves = self.halves.lock().unwrap();
        halves.0.len() + halves.1.len()
    }
}

fn keep(
    young: &mut CacheGeneration,
    old: &mut CacheGeneration,
    key: ChainKey,
    verified: Arc<VerifiedChain>,
) {
    if young.len() >= CHAINS_MAX / 2 {
        *old = std::mem::take(young);
    }
    young.insert(key, verified);
}

#[cfg(test)]
mod tests;

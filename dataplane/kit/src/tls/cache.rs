//! Chains that were verified already, so that a peer that comes again costs a hash and not two signatures. What is remembered is bound to
//! one [`super::Trust`]: any change of roots or revocation lists makes all of it worthless at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use rustls_pki_types::{CertificateDer, UnixTime};
use sha2::{Digest, Sha256};

use super::verify::{Role, Verified};
use crate::metrics::{Family, Registry, SharedCounter};

/// Chains remembered, at most; half of them are forgotten when it is full.
pub const CHAINS_MAX: usize = 8192;

/// What a verdict depends on, but for time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ChainKey {
    digest: [u8; 32],
    anchors: u64,
    role: Role,
}

impl ChainKey {
    /// `anchors` is the number of what vouches.
    pub(super) fn of(leaf: &CertificateDer<'_>, above: &[CertificateDer<'_>], anchors: u64, role: Role) -> Self {
        let mut hash = Sha256::new();
        for c in std::iter::once(leaf).chain(above) {
            hash.update((c.len() as u64).to_be_bytes());
            hash.update(c);
        }
        Self { digest: hash.finalize().into(), anchors, role }
    }
}

type Half = HashMap<ChainKey, Arc<Verified>>;

/// Bounded; what is asked for stays longest.
pub(super) struct ChainCache {
    halves: Mutex<(Half, Half)>,
    hits: SharedCounter,
    misses: SharedCounter,
}

impl ChainCache {
    pub(super) fn new(registry: &Registry) -> Self {
        let results = registry.counters(Family::new(
            "canal_tls_chains_total",
            "Peers' chains: verified anew, or known from an earlier handshake.",
            &["result"],
        ));
        Self { halves: Mutex::default(), hits: results.shared(&["known"]), misses: results.shared(&["verified"]) }
    }

    pub(super) fn get(&self, key: &ChainKey, now: UnixTime) -> Option<Arc<Verified>> {
        let mut halves = self.halves.lock().unwrap_or_else(PoisonError::into_inner);
        let (young, old) = &mut *halves;
        if let Some(found) = young.get(key) {
            return found.valid_at(now).then(|| found.clone());
        }
        let found = old.remove(key)?;
        keep(young, old, *key, found.clone());
        found.valid_at(now).then_some(found)
    }

    pub(super) fn put(&self, key: ChainKey, verified: Arc<Verified>) {
        let mut halves = self.halves.lock().unwrap_or_else(PoisonError::into_inner);
        let (young, old) = &mut *halves;
        keep(young, old, key, verified);
    }

    pub(super) fn count(&self, hit: bool) {
        if hit { self.hits.inc() } else { self.misses.inc() }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let halves = self.halves.lock().unwrap();
        halves.0.len() + halves.1.len()
    }
}

fn keep(young: &mut Half, old: &mut Half, key: ChainKey, verified: Arc<Verified>) {
    if young.len() >= CHAINS_MAX / 2 {
        *old = std::mem::take(young);
    }
    young.insert(key, verified);
}

//! Cache of the tokens that a worker has accepted, until they expire, and per tenant the results of
//! signature verifications.
//!
//! Its keys are hashes of the token and of the requirements that accepted it. It verifies nothing.
//! Start with [`TokenCache::of`].

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA256};
use hashbrown::HashMap;
use tokio::sync::Semaphore;

use super::jws::{Token, TokenDigest, TokenError};
use super::keys::KeyDigest;

/// Most accepted tokens that a worker caches. At the limit it drops expired tokens, or all if none
/// has expired; that costs new signature checks. Nobody measured this value.
pub(crate) const ENTRIES_MAX: usize = 4096;
/// Seconds after which a token without an expiry is validated again. Keys that change make a new
/// cache key, so this bounds only how long an unused entry takes memory.
const UNLIMITED_SECONDS: u64 = 300;

/// Most verification results that a worker caches for one tenant: this many of valid signatures,
/// and as many of invalid ones. They are separate, so that a flood of invalid tokens evicts no
/// valid one. Nobody measured this value. A tenant with more tokens in use verifies those again
/// that were evicted, at its own share of the CPU.
pub(crate) const VERIFICATIONS_MAX: usize = 1024;
/// Seconds for which a verification result is cached. As long as a token without an expiry stays
/// accepted. A result depends on token and key alone and never becomes wrong; the time only frees
/// memory.
const VERIFICATION_SECONDS: u64 = 300;
/// Most refused tokens that a worker caches for one tenant. As many as verification results, for
/// the same reason.
pub(crate) const REFUSED_MAX: usize = 1024;
/// Seconds for which a refusal is cached. The time is short, because the cause may be a mistake of
/// the tenant that its next keys fix.
const REFUSED_SECONDS: u64 = 10;

/// Hash of a token and of the keys and rules that it was validated with.
pub(crate) type TokenCacheKey = [u8; 32];

#[derive(Debug)]
struct CacheEntry {
    token: Arc<Token>,
    rule: usize,
    until: u64,
}

/// One worker's cache of tokens, with a [`TokenMemory`] for each tenant.
#[derive(Debug, Default)]
pub struct TokenCache {
    entries: RefCell<HashMap<TokenCacheKey, CacheEntry>>,
    tenants: RefCell<HashMap<u32, Rc<TokenMemory>>>,
}

/// One tenant's verification results on this worker.
#[derive(Debug)]
pub struct TokenMemory {
    good: RefCell<HashMap<(TokenDigest, KeyDigest), u64>>,
    bad: RefCell<HashMap<(TokenDigest, KeyDigest), u64>>,
    refused: RefCell<HashMap<TokenCacheKey, (TokenError, u64)>>,
    /// Permits one verification of the tenant at a time. A task releases it only after all other
    /// ready connections have run.
    pub(crate) turn: Arc<Semaphore>,
}

impl Default for TokenMemory {
    fn default() -> Self {
        Self {
            good: RefCell::default(),
            bad: RefCell::default(),
            refused: RefCell::default(),
            turn: Arc::new(Semaphore::new(1)),
        }
    }
}

/// Inserts into a map of at most `max` entries. A full map first drops its expired entries, then
/// all.
fn insert_bounded<K: std::hash::Hash + Eq, V>(
    map: &mut HashMap<K, V>,
    max: usize,
    is_live: impl Fn(&V) -> bool,
    key: K,
    value: V,
) {
    if map.len() >= max {
        map.retain(|_, value| is_live(value));
        if map.len() >= max {
            map.clear();
        }
    }
    map.insert(key, value);
}

impl TokenMemory {
    /// Returns the cached result of verifying this token with this key.
    pub(crate) fn is_signed(&self, token: &TokenDigest, key: &KeyDigest, now: u64) -> Option<bool> {
        let has = |map: &RefCell<HashMap<_, u64>>| {
            map.borrow()
                .get(&(*token, *key))
                .is_some_and(|until| now < *until)
        };
        if has(&self.good) {
            return Some(true);
        }
        has(&self.bad).then_some(false)
    }

    pub(crate) fn remember(&self, token: TokenDigest, key: KeyDigest, signed: bool, now: u64) {
        let mut map = if signed { &self.good } else { &self.bad }.borrow_mut();
        insert_bounded(
            &mut map,
            VERIFICATIONS_MAX,
            |until| now < *until,
            (token, key),
            now + VERIFICATION_SECONDS,
        );
    }

    /// Returns the reason if this token was refused recently.
    pub(crate) fn refusal(&self, name: &TokenCacheKey, now: u64) -> Option<TokenError> {
        self.refused
            .borrow()
            .get(name)
            .filter(|(_, until)| now < *until)
            .map(|(bad, _)| *bad)
    }

    pub(crate) fn refuse(&self, name: TokenCacheKey, bad: TokenError, now: u64) {
        let entry = (bad, now + REFUSED_SECONDS);
        insert_bounded(
            &mut self.refused.borrow_mut(),
            REFUSED_MAX,
            |(_, until)| now < *until,
            name,
            entry,
        );
    }

    #[cfg(test)]
    pub(crate) fn sizes(&self) -> [usize; 3] {
        [
            self.good.borrow().len(),
            self.bad.borrow().len(),
            self.refused.borrow().len(),
        ]
    }
}

impl TokenCache {
    /// Returns the verification results of the tenant with this number.
    pub fn of(&self, tenant: u32) -> Rc<TokenMemory> {
        self.tenants.borrow_mut().entry(tenant).or_default().clone()
    }

    /// Drops a tenant's verification results.
    pub fn forget(&self, tenant: u32) {
        self.tenants.borrow_mut().remove(&tenant);
    }

    /// Returns the number of tenants with verification results.
    #[cfg(any(test, feature = "testing"))]
    pub fn tenants(&self) -> usize {
        self.tenants.borrow().len()
    }

    /// Hashes a token by its text alone.
    pub(crate) fn digest(&self, token: &[u8]) -> TokenDigest {
        self.name(u64::MAX, token)
    }

    /// Hashes a token together with `with`, the ID of the requirements.
    pub(crate) fn name(&self, with: u64, token: &[u8]) -> TokenCacheKey {
        let mut context = Context::new(&SHA256);
        context.update(&with.to_be_bytes());
        context.update(token);
        let mut name = [0; 32];
        name.copy_from_slice(context.finish().as_ref());
        name
    }

    pub(crate) fn get(&self, name: &TokenCacheKey, now: u64) -> Option<(Arc<Token>, usize)> {
        let known = self.entries.borrow();
        known
            .get(name)
            .filter(|entry| now < entry.until)
            .map(|entry| (entry.token.clone(), entry.rule))
    }

    pub(crate) fn put(&self, name: TokenCacheKey, token: Arc<Token>, rule: usize, now: u64) {
        let until = token.until.unwrap_or(now + UNLIMITED_SECONDS);
        let mut known = self.entries.borrow_mut();
        insert_bounded(
            &mut known,
            ENTRIES_MAX,
            |entry| now < entry.until,
            name,
            CacheEntry { token, rule, until },
        );
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.entries.borrow().len()
    }
}

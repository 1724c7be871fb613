//! Tokens that this worker has accepted, by a hash of the token and of what it was accepted with, until they expire; and for each tenant
//! which key made which signature. It verifies nothing. Start with [`Cache::of`].

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA256};
use hashbrown::HashMap;
use tokio::sync::Semaphore;

use super::jws::{BadToken, Token, TokenDigest};
use super::keys::KeyDigest;

/// Verified tokens that a worker remembers; reaching it forgets those that expired, and if there are none all, which costs signature checks.
pub(crate) const ENTRIES_MAX: usize = 4096;
/// A token without an expiry is checked again after so many seconds.
const UNLIMITED_SECONDS: u64 = 300;

/// Verifications whose result a worker remembers for one tenant: of signatures that are good, and of those that are not. Kept apart, so
/// that a flood of bad tokens drives out no good one.
pub(crate) const VERIFICATIONS_MAX: usize = 1024;
/// For how long, seconds.
const VERIFICATION_SECONDS: u64 = 300;
/// Refused tokens that a worker remembers for one tenant.
pub(crate) const REFUSED_MAX: usize = 1024;
/// For how long, seconds. Short: the refusal may be the tenant's own mistake, mended by the next keys.
const REFUSED_SECONDS: u64 = 10;

/// Names a token verified with certain keys and rules.
pub(crate) type Name = [u8; 32];

#[derive(Debug)]
struct Entry {
    token: Arc<Token>,
    rule: usize,
    until: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    known: RefCell<HashMap<Name, Entry>>,
    tenants: RefCell<HashMap<u32, Rc<TokenMemory>>>,
}

/// What a worker remembers of one tenant's verifications.
#[derive(Debug)]
pub(crate) struct TokenMemory {
    good: RefCell<HashMap<(TokenDigest, KeyDigest), u64>>,
    bad: RefCell<HashMap<(TokenDigest, KeyDigest), u64>>,
    refused: RefCell<HashMap<Name, (BadToken, u64)>>,
    /// One verification of the tenant at a time; whoever has verified gives its turn back after all other connections had theirs.
    pub(crate) turn: Arc<Semaphore>,
}

impl Default for TokenMemory {
    fn default() -> Self {
        Self { good: RefCell::default(), bad: RefCell::default(), refused: RefCell::default(), turn: Arc::new(Semaphore::new(1)) }
    }
}

/// Inserts into a map of so many entries at most: the expired ones go first, then all.
fn insert_bounded<K: std::hash::Hash + Eq, V>(map: &mut HashMap<K, V>, max: usize, is_live: impl Fn(&V) -> bool, key: K, value: V) {
    if map.len() >= max {
        map.retain(|_, value| is_live(value));
        if map.len() >= max {
            map.clear();
        }
    }
    map.insert(key, value);
}

impl TokenMemory {
    /// What a verification of this token with this key found.
    pub(crate) fn is_signed(&self, token: &TokenDigest, key: &KeyDigest, now: u64) -> Option<bool> {
        let has = |map: &RefCell<HashMap<_, u64>>| map.borrow().get(&(*token, *key)).is_some_and(|until| now < *until);
        if has(&self.good) {
            return Some(true);
        }
        has(&self.bad).then_some(false)
    }

    pub(crate) fn remember(&self, token: TokenDigest, key: KeyDigest, signed: bool, now: u64) {
        let mut map = if signed { &self.good } else { &self.bad }.borrow_mut();
        insert_bounded(&mut map, VERIFICATIONS_MAX, |until| now < *until, (token, key), now + VERIFICATION_SECONDS);
    }

    /// Why this token was refused a moment ago.
    pub(crate) fn refusal(&self, name: &Name, now: u64) -> Option<BadToken> {
        self.refused.borrow().get(name).filter(|(_, until)| now < *until).map(|(bad, _)| *bad)
    }

    pub(crate) fn refuse(&self, name: Name, bad: BadToken, now: u64) {
        let entry = (bad, now + REFUSED_SECONDS);
        insert_bounded(&mut self.refused.borrow_mut(), REFUSED_MAX, |(_, until)| now < *until, name, entry);
    }

    #[cfg(test)]
    pub(crate) fn sizes(&self) -> [usize; 3] {
        [self.good.borrow().len(), self.bad.borrow().len(), self.refused.borrow().len()]
    }
}

impl Cache {
    /// The memory of a tenant's verifications, by the tenant's number.
    pub(crate) fn of(&self, tenant: u32) -> Rc<TokenMemory> {
        self.tenants.borrow_mut().entry(tenant).or_default().clone()
    }

    /// Drops the memory of a tenant's verifications.
    pub(crate) fn forget(&self, tenant: u32) {
        self.tenants.borrow_mut().remove(&tenant);
    }

    /// Tenants whose verifications are remembered.
    #[cfg(test)]
    pub(crate) fn tenants(&self) -> usize {
        self.tenants.borrow().len()
    }

    /// Names a token by its text alone.
    pub(crate) fn digest(&self, token: &[u8]) -> TokenDigest {
        self.name(u64::MAX, token)
    }

    pub(crate) fn name(&self, with: u64, token: &[u8]) -> Name {
        let mut context = Context::new(&SHA256);
        context.update(&with.to_be_bytes());
        context.update(token);
        let mut name = [0; 32];
        name.copy_from_slice(context.finish().as_ref());
        name
    }

    pub(crate) fn get(&self, name: &Name, now: u64) -> Option<(Arc<Token>, usize)> {
        let known = self.known.borrow();
        known.get(name).filter(|entry| now < entry.until).map(|entry| (entry.token.clone(), entry.rule))
    }

    pub(crate) fn put(&self, name: Name, token: Arc<Token>, rule: usize, now: u64) {
        let until = token.until.unwrap_or(now + UNLIMITED_SECONDS);
        let mut known = self.known.borrow_mut();
        insert_bounded(&mut known, ENTRIES_MAX, |entry| now < entry.until, name, Entry { token, rule, until });
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.known.borrow().len()
    }
}

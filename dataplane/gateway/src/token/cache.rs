//! Tokens that this worker has verified, by a hash of the token and of what it was verified with, until they expire. It verifies nothing.

use std::cell::RefCell;
use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA256};
use hashbrown::HashMap;

use super::jws::Token;

/// Verified tokens that a worker remembers; reaching it forgets those that expired, and if there are none all, which costs signature checks.
pub(crate) const ENTRIES_MAX: usize = 4096;
/// A token without an expiry is checked again after so many seconds.
const UNLIMITED_SECONDS: u64 = 300;

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
}

impl Cache {
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
        if known.len() >= ENTRIES_MAX {
            known.retain(|_, entry| now < entry.until);
            if known.len() >= ENTRIES_MAX {
                known.clear();
            }
        }
        known.insert(name, Entry { token, rule, until });
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.known.borrow().len()
    }
}

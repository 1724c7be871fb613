//! One worker's look-up table from labels to numbers, which needs no lock. It shares nothing with
//! other workers.

use std::cell::{Cell, RefCell};
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hashbrown::HashTable;
use tokio::time::Instant;

use super::cells::{Arena, CellRange, WeakSlots};
use super::series::{FamilyCore, LabelValues, SEARCH_INTERVAL};

/// Minimum table size at which ended entries are searched for.
/// A search costs a pass over the table. Above it, the table must double between two searches, so
/// that a look-up pays a constant part. Nobody measured this value.
const ENTRIES_MIN: usize = 1024;

struct CachedSeries {
    core: Arc<FamilyCore>,
    labels: LabelValues,
    slots: WeakSlots,
}

/// An owner whose share was used up at the last look-up.
struct Full {
    core: Arc<FamilyCore>,
    owner: Box<str>,
    slots: WeakSlots,
    /// Until this time, new labels of the owner go to `slots` without a lock on the table.
    until: Instant,
}

/// One worker's look-up table, and the arena of its numbers.
pub(super) struct SeriesCache {
    hasher: foldhash::fast::RandomState,
    entries: RefCell<HashTable<CachedSeries>>,
    full: RefCell<HashTable<Full>>,
    arena: RefCell<Arena>,
    /// Table size at which ended entries are removed.
    clean_at: Cell<usize>,
    /// Size of `full` at which ended entries are removed.
    clean_full_at: Cell<usize>,
    generation: Arc<AtomicU64>,
}

impl SeriesCache {
    pub(super) fn new(generation: Arc<AtomicU64>) -> Self {
        Self {
            hasher: foldhash::fast::RandomState::default(),
            entries: RefCell::default(),
            full: RefCell::default(),
            arena: RefCell::default(),
            clean_at: Cell::new(ENTRIES_MIN),
            clean_full_at: Cell::new(ENTRIES_MIN),
            generation,
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// Returns this worker's numbers of a series. It needs no allocation and no lock if the series
    /// was looked up before, or if the share of its owner was used up a moment ago.
    pub(super) fn slots(&self, core: &Arc<FamilyCore>, labels: &[&str]) -> CellRange {
        let hash = self.hash(core, labels.iter().copied());
        let same = |e: &CachedSeries| {
            Arc::ptr_eq(&e.core, core) && e.labels.iter().map(|l| &**l).eq(labels.iter().copied())
        };
        if let Some(slots) = self
            .entries
            .borrow()
            .find(hash, same)
            .and_then(|e| e.slots.upgrade())
        {
            return slots;
        }
        let owner = core.owner_name(labels);
        let full_hash = self.hash(core, std::iter::once(owner));
        let same_full = |f: &Full| Arc::ptr_eq(&f.core, core) && *f.owner == *owner;
        let now = Instant::now();
        let full = self.full.borrow();
        let rest = full.find(full_hash, same_full);
        let is_fresh = rest.is_some_and(|f| now < f.until);
        let rest = rest.and_then(|f| f.slots.upgrade());
        drop(full);
        // A flood of new label sets of one owner must not lock the table each time.
        if let Some(slots) = rest.clone().filter(|_| is_fresh) {
            core.folded.fetch_add(1, Relaxed);
            return slots;
        }
        let found = core.add_part(labels, rest, &mut self.arena.borrow_mut());
        // Any worker may have a handle of the series that gave way, so all look theirs up again.
        if found.moved_one {
            self.generation.fetch_add(1, Relaxed);
        }
        // The owner's share is used up, so the value is counted in the owner's `other` series.
        if !found.is_own {
            return self.remember_full(core, owner, full_hash, found.slots, now);
        }
        let mut entries = self.entries.borrow_mut();
        // An old entry refers to numbers that have ended.
        if let Ok(old) = entries.find_entry(hash, same) {
            old.remove();
        }
        // The threshold grows with the table, so that an insertion costs little on average.
        if entries.len() >= self.clean_at.get() {
            entries.retain(|e| !e.slots.is_ended());
            self.clean_at.set(ENTRIES_MIN.max(entries.len() * 2));
        }
        let entry = CachedSeries {
            core: core.clone(),
            labels: found.labels,
            slots: found.slots.downgrade(),
        };
        entries.insert_unique(hash, entry, |e| {
            self.hash(&e.core, e.labels.iter().map(|l| &**l))
        });
        found.slots
    }

    /// Remembers for [`SEARCH_INTERVAL`] that an owner's share is used up, and which numbers count
    /// the overflow.
    fn remember_full(
        &self,
        core: &Arc<FamilyCore>,
        owner: &str,
        hash: u64,
        rest: CellRange,
        now: Instant,
    ) -> CellRange {
        let mut full = self.full.borrow_mut();
        let until = now + SEARCH_INTERVAL;
        match full.find_mut(hash, |f| Arc::ptr_eq(&f.core, core) && *f.owner == *owner) {
            Some(f) => {
                f.until = until;
                f.slots = rest.downgrade();
            }
            None => {
                // An entry has ended if nothing counted in its `other` series for an hour.
                if full.len() >= self.clean_full_at.get() {
                    full.retain(|f| !f.slots.is_ended());
                    self.clean_full_at.set(ENTRIES_MIN.max(full.len() * 2));
                }
                let entry = Full {
                    core: core.clone(),
                    owner: owner.into(),
                    slots: rest.downgrade(),
                    until,
                };
                full.insert_unique(hash, entry, |f| {
                    self.hash(&f.core, std::iter::once(&*f.owner))
                });
            }
        }
        rest
    }

    fn hash<'a>(&self, core: &Arc<FamilyCore>, labels: impl Iterator<Item = &'a str>) -> u64 {
        let mut h = self.hasher.build_hasher();
        Arc::as_ptr(core).hash(&mut h);
        labels.for_each(|l| l.hash(&mut h));
        h.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::metrics::{MetricFamily, Registry, SERIES_IDLE_TIMEOUT};

    #[test]
    fn owners_beyond_their_share_are_forgotten_once_their_rest_ended() {
        let registry = Registry::new();
        let family = registry.counters(MetricFamily {
            series_max: 1,
            ..MetricFamily::new("requests_total", "Requests.", &["tenant", "code"])
        });
        let shard = registry.shard();
        let count = |tenants: std::ops::Range<usize>| {
            tenants.for_each(|n| shard.counter(&family, &[&format!("t{n}"), "200"]).inc())
        };
        let start = Instant::now();
        let scrape = |after: Duration| registry.exposition_at(start + after).for_each(drop);
        count(0..3 * ENTRIES_MIN);
        assert!(
            shard.cache.full.borrow().len() >= 3 * ENTRIES_MIN - 1,
            "each has a rest in which it counts"
        );
        scrape(Duration::from_secs(1));
        scrape(2 * SERIES_IDLE_TIMEOUT);
        count(3 * ENTRIES_MIN..5 * ENTRIES_MIN);
        let left = shard.cache.full.borrow().len();
        assert!(left <= 2 * ENTRIES_MIN, "{left} owners are remembered");
    }
}

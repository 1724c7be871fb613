//! Label sets and where their numbers are: one table per family (locked, for registration and scrapes), one per worker (not locked).

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use hashbrown::HashTable;

use super::cells::{Arena, Slots};
use super::{Family, Shape, lock};

/// The label value of what no longer fits a family.
pub(super) const OTHER: &str = "other";

pub(super) type Labels = Arc<[Box<str>]>;

#[derive(Debug, Default)]
struct Table {
    places: HashMap<Labels, usize>,
    list: Vec<Series>,
    other: Option<usize>,
}

#[derive(Debug)]
struct Series {
    labels: Labels,
    parts: Vec<Slots>,
    shared: Option<Slots>,
}

/// A family with its series.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) family: Family,
    pub(super) shape: Shape,
    /// Look-ups that went to [`OTHER`].
    pub(super) folded: AtomicU64,
    table: Mutex<Table>,
}

/// A series' place, and whether it is the one that its labels name.
struct Place {
    at: usize,
    labels: Labels,
    own: bool,
}

impl Core {
    pub(super) fn new(family: Family, shape: Shape) -> Self {
        Self { family, shape, folded: AtomicU64::new(0), table: Mutex::default() }
    }

    fn place(&self, table: &mut Table, labels: &[&str]) -> Place {
        debug_assert_eq!(labels.len(), self.family.labels.len(), "metric {}: wrong number of labels", self.family.name);
        let wanted: Labels = labels.iter().map(|l| Box::from(*l)).collect();
        if let Some(at) = table.places.get(&wanted) {
            return Place { at: *at, labels: table.list[*at].labels.clone(), own: true };
        }
        if table.places.len() < self.family.series_max {
            let at = table.list.len();
            table.list.push(Series { labels: wanted.clone(), parts: Vec::new(), shared: None });
            table.places.insert(wanted.clone(), at);
            return Place { at, labels: wanted, own: true };
        }
        self.folded.fetch_add(1, Relaxed);
        let at = *table.other.get_or_insert_with(|| {
            let labels: Labels = self.family.labels.iter().map(|_| Box::from(OTHER)).collect();
            table.list.push(Series { labels, parts: Vec::new(), shared: None });
            table.list.len() - 1
        });
        Place { at, labels: table.list[at].labels.clone(), own: false }
    }

    /// The series' part that every thread may write.
    pub(super) fn shared(&self, labels: &[&str], arena: &mut Arena) -> Slots {
        let mut table = lock(&self.table);
        let place = self.place(&mut table, labels);
        let series = &mut table.list[place.at];
        series.shared.get_or_insert_with(|| arena.take(self.shape.slots())).clone()
    }

    /// Calls `each` with the labels and the summed numbers of every series, in order of registration.
    pub(super) fn sums(&self, mut each: impl FnMut(&[Box<str>], &[u64])) {
        let table = lock(&self.table);
        let mut sum = vec![0u64; self.shape.slots()];
        for s in &table.list {
            sum.fill(0);
            for part in s.parts.iter().chain(&s.shared) {
                for (i, n) in sum.iter_mut().enumerate() {
                    *n = n.wrapping_add(part.get(i));
                }
            }
            each(&s.labels, &sum);
        }
    }
}

struct Entry {
    core: Arc<Core>,
    labels: Labels,
    slots: Slots,
}

/// What one worker has looked up before, and the arena of its numbers.
#[derive(Default)]
pub(super) struct Known {
    hasher: foldhash::fast::RandomState,
    entries: RefCell<HashTable<Entry>>,
    others: RefCell<Vec<(Arc<Core>, Slots)>>,
    arena: RefCell<Arena>,
}

impl Known {
    /// This worker's numbers of a series; no allocation when it was asked for before.
    pub(super) fn slots(&self, core: &Arc<Core>, labels: &[&str]) -> Slots {
        let hash = self.hash(core, labels.iter().copied());
        let same = |e: &Entry| Arc::ptr_eq(&e.core, core) && e.labels.iter().map(|l| &**l).eq(labels.iter().copied());
        if let Some(e) = self.entries.borrow().find(hash, same) {
            return e.slots.clone();
        }
        let mut table = lock(&core.table);
        let place = core.place(&mut table, labels);
        if !place.own
            && let Some((_, slots)) = self.others.borrow().iter().find(|(c, _)| Arc::ptr_eq(c, core))
        {
            return slots.clone();
        }
        let slots = self.arena.borrow_mut().take(core.shape.slots());
        table.list[place.at].parts.push(slots.clone());
        if place.own {
            let entry = Entry { core: core.clone(), labels: place.labels, slots: slots.clone() };
            let rehash = |e: &Entry| self.hash(&e.core, e.labels.iter().map(|l| &**l));
            self.entries.borrow_mut().insert_unique(hash, entry, rehash);
        } else {
            self.others.borrow_mut().push((core.clone(), slots.clone()));
        }
        slots
    }

    fn hash<'a>(&self, core: &Arc<Core>, labels: impl Iterator<Item = &'a str>) -> u64 {
        let mut h = self.hasher.build_hasher();
        Arc::as_ptr(core).hash(&mut h);
        labels.for_each(|l| l.hash(&mut h));
        h.finish()
    }
}

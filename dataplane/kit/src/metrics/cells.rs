//! Pages of atomic numbers. A page belongs to one writer (a worker's shard, or everyone's shared arena), so workers share no cache line.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

const LINE_SLOTS: usize = 8;
const PAGE_LINES: usize = 64;
/// Numbers in one page.
pub(super) const PAGE_SLOTS: usize = LINE_SLOTS * PAGE_LINES;

#[derive(Debug, Default)]
#[repr(align(64))]
struct Line([AtomicU64; LINE_SLOTS]);

#[derive(Debug)]
struct Page([Line; PAGE_LINES]);

/// Shared by everything that refers to one run of numbers: as long as another reference exists, somebody may still write them.
#[derive(Debug, Default)]
struct Life {
    /// The numbers belong to their owner's `other` series now; whoever looks up the labels again gets new ones.
    is_moved: AtomicBool,
}

/// A run of numbers in one page.
#[derive(Debug, Clone)]
pub(super) struct Slots {
    page: Arc<Page>,
    first: u16,
    life: Arc<Life>,
}

/// [`Slots`] that do not keep their series.
#[derive(Debug)]
pub(super) struct WeakSlots {
    page: Arc<Page>,
    first: u16,
    life: Weak<Life>,
}

impl Slots {
    #[inline]
    fn at(&self, i: usize) -> &AtomicU64 {
        let n = usize::from(self.first) + i;
        &self.page.0[n / LINE_SLOTS].0[n % LINE_SLOTS]
    }
    pub(super) fn get(&self, i: usize) -> u64 {
        self.at(i).load(Relaxed)
    }
    /// For the page's only writer: no locked instruction.
    #[inline]
    pub(super) fn add_alone(&self, i: usize, n: u64) {
        let cell = self.at(i);
        cell.store(cell.load(Relaxed).wrapping_add(n), Relaxed);
    }
    pub(super) fn add_shared(&self, n: u64) {
        self.at(0).fetch_add(n, Relaxed);
    }
    pub(super) fn set(&self, n: u64) {
        self.at(0).store(n, Relaxed);
    }

    pub(super) fn downgrade(&self) -> WeakSlots {
        WeakSlots { page: self.page.clone(), first: self.first, life: Arc::downgrade(&self.life) }
    }

    /// No other reference exists, unless a [`WeakSlots`] becomes one at this moment.
    pub(super) fn is_unused(&self) -> bool {
        Arc::strong_count(&self.life) == 1
    }

    /// Ends the run, and adds its numbers to `sum`, if nobody can write them any more.
    ///
    /// # Errors
    /// Somebody can; the run goes on.
    pub(super) fn release(self, sum: &mut [u64]) -> Result<(), Self> {
        let Self { page, first, life } = self;
        // Decides together with `WeakSlots::upgrade`: one of the two wins, and all earlier writes are seen here.
        match Arc::try_unwrap(life) {
            Ok(_) => {
                for (i, total) in sum.iter_mut().enumerate() {
                    let n = usize::from(first) + i;
                    *total = total.wrapping_add(page.0[n / LINE_SLOTS].0[n % LINE_SLOTS].load(Relaxed));
                }
                Ok(())
            }
            Err(life) => Err(Self { page, first, life }),
        }
    }

    /// From now on look-ups do not find the run by its labels.
    pub(super) fn mark_moved(&self) {
        self.life.is_moved.store(true, Relaxed);
    }
}

impl WeakSlots {
    /// The run, if it still belongs to the labels for which it was taken.
    pub(super) fn upgrade(&self) -> Option<Slots> {
        let life = self.life.upgrade().filter(|life| !life.is_moved.load(Relaxed))?;
        Some(Slots { page: self.page.clone(), first: self.first, life })
    }

    pub(super) fn is_ended(&self) -> bool {
        self.life.strong_count() == 0
    }
}

/// Hands out runs of numbers; a page lives as long as a handle or a series refers to it.
#[derive(Debug, Default)]
pub(super) struct Arena {
    page: Option<Arc<Page>>,
    used: usize,
}

impl Arena {
    /// `width` (at most [`PAGE_SLOTS`]) zeros in a row.
    pub(super) fn take(&mut self, width: usize) -> Slots {
        let page = match &self.page {
            Some(p) if self.used + width <= PAGE_SLOTS => p.clone(),
            _ => {
                self.used = 0;
                self.page.insert(Arc::new(Page(std::array::from_fn(|_| Line::default())))).clone()
            }
        };
        // Below PAGE_SLOTS = 512, so it fits.
        let first = self.used as u16;
        self.used += width;
        Slots { page, first, life: Arc::default() }
    }
}

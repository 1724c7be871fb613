//! Pages of atomic numbers. A page has one writer (a worker's shard, or the arena that all threads
//! share), so workers share no cache line.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

/// Numbers of 8 bytes in one cache line of 64 bytes.
const LINE_SLOTS: usize = 8;
/// Cache lines in one page: 4 KiB, a page of the kernel.
const PAGE_LINES: usize = 64;
/// Maximum number of values in one page.
pub(super) const PAGE_SLOTS: usize = LINE_SLOTS * PAGE_LINES;

#[derive(Debug, Default)]
#[repr(align(64))]
struct CacheLine([AtomicU64; LINE_SLOTS]);

#[derive(Debug)]
struct CellPage([CacheLine; PAGE_LINES]);

/// Liveness of one run of numbers. As long as another reference exists, a thread may still write
/// them.
#[derive(Debug, Default)]
struct Life {
    /// The numbers belong to the `other` series of their owner now. A new look-up of the labels
    /// gets new numbers.
    is_moved: AtomicBool,
}

/// A run of numbers in one page.
#[derive(Debug, Clone)]
pub(super) struct CellRange {
    page: Arc<CellPage>,
    first: u16,
    life: Arc<Life>,
}

/// A reference to a [`CellRange`] that does not keep its series alive.
#[derive(Debug)]
pub(super) struct WeakSlots {
    page: Arc<CellPage>,
    first: u16,
    life: Weak<Life>,
}

impl CellRange {
    #[inline]
    fn at(&self, i: usize) -> &AtomicU64 {
        let n = usize::from(self.first) + i;
        &self.page.0[n / LINE_SLOTS].0[n % LINE_SLOTS]
    }
    pub(super) fn get(&self, i: usize) -> u64 {
        self.at(i).load(Relaxed)
    }
    /// Adds `n` without a locked instruction. Only the page's single writer may call it.
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
        WeakSlots {
            page: self.page.clone(),
            first: self.first,
            life: Arc::downgrade(&self.life),
        }
    }

    /// Returns whether no other reference exists. A [`WeakSlots`] may still become one at the same
    /// moment.
    pub(super) fn is_unused(&self) -> bool {
        Arc::strong_count(&self.life) == 1
    }

    /// Ends the run and adds its numbers to `sum`, if no thread can write them any more.
    ///
    /// # Errors
    /// Another reference exists; the run continues and is returned.
    pub(super) fn release(self, sum: &mut [u64]) -> Result<(), Self> {
        let Self { page, first, life } = self;
        // This races with `WeakSlots::upgrade`: one of the two wins, and if it is this call, all
        // earlier writes are visible here.
        match Arc::try_unwrap(life) {
            Ok(_) => {
                for (i, total) in sum.iter_mut().enumerate() {
                    let n = usize::from(first) + i;
                    *total =
                        total.wrapping_add(page.0[n / LINE_SLOTS].0[n % LINE_SLOTS].load(Relaxed));
                }
                Ok(())
            }
            Err(life) => Err(Self { page, first, life }),
        }
    }

    /// Makes look-ups by label no longer find the run.
    pub(super) fn mark_moved(&self) {
        self.life.is_moved.store(true, Relaxed);
    }
}

impl WeakSlots {
    /// Returns the run if it still belongs to the labels for which it was taken.
    pub(super) fn upgrade(&self) -> Option<CellRange> {
        let life = self
            .life
            .upgrade()
            .filter(|life| !life.is_moved.load(Relaxed))?;
        Some(CellRange {
            page: self.page.clone(),
            first: self.first,
            life,
        })
    }

    pub(super) fn is_ended(&self) -> bool {
        self.life.strong_count() == 0
    }
}

/// Allocates runs of numbers. A page lives as long as a handle or a series refers to it.
#[derive(Debug, Default)]
pub(super) struct Arena {
    page: Option<Arc<CellPage>>,
    used: usize,
}

impl Arena {
    /// Returns `width` (at most [`PAGE_SLOTS`]) consecutive zeros.
    pub(super) fn take(&mut self, width: usize) -> CellRange {
        let page = match &self.page {
            Some(p) if self.used + width <= PAGE_SLOTS => p.clone(),
            _ => {
                self.used = 0;
                self.page
                    .insert(Arc::new(CellPage(std::array::from_fn(|_| {
                        CacheLine::default()
                    }))))
                    .clone()
            }
        };
        // The value is below PAGE_SLOTS = 512, so it fits.
        let first = self.used as u16;
        self.used += width;
        CellRange {
            page,
            first,
            life: Arc::default(),
        }
    }
}

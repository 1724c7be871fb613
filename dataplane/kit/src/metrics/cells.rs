//! Pages of atomic numbers. A page belongs to one writer (a worker's shard, or everyone's shared arena), so workers share no cache line.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const LINE_SLOTS: usize = 8;
const PAGE_LINES: usize = 64;
/// Numbers in one page.
pub(super) const PAGE_SLOTS: usize = LINE_SLOTS * PAGE_LINES;

#[derive(Debug, Default)]
#[repr(align(64))]
struct Line([AtomicU64; LINE_SLOTS]);

#[derive(Debug)]
struct Page([Line; PAGE_LINES]);

/// A run of numbers in one page.
#[derive(Debug, Clone)]
pub(super) struct Slots {
    page: Arc<Page>,
    first: u16,
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
        Slots { page, first }
    }
}

//! The text form of all families, piece by piece: memory for one piece, and no table is locked for longer than one piece takes.

use std::sync::Arc;

use tokio::time::Instant;

use super::series::Core;
use super::{Registry, text};

/// A piece ends with the series that makes it longer than this.
pub(super) const PIECE_BYTES: usize = 64 << 10;

/// A scrape under way: an iterator over the text's pieces.
#[derive(Debug)]
pub struct Exposition {
    registry: Registry,
    families: Vec<Arc<Core>>,
    family: usize,
    /// The place among the family's series to go on from.
    series: usize,
    is_over: bool,
    started: Instant,
}

impl Exposition {
    pub(super) fn new(registry: Registry, families: Vec<Arc<Core>>, started: Instant) -> Self {
        Self { registry, families, family: 0, series: 0, is_over: false, started }
    }
}

impl Iterator for Exposition {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        if self.is_over {
            return None;
        }
        let mut out = String::with_capacity(PIECE_BYTES + PIECE_BYTES / 4);
        while let Some(core) = self.families.get(self.family) {
            match text::family(&mut out, core, self.series, self.started, PIECE_BYTES) {
                Some(next) => {
                    self.series = next;
                    return Some(out);
                }
                None => {
                    self.series = 0;
                    self.family += 1;
                }
            }
        }
        self.is_over = true;
        self.registry.write_rest(&mut out, &self.families);
        Some(out)
    }
}

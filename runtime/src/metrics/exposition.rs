//! Text form of all families in pieces. It needs memory for one piece, and locks no table for longer than one piece takes.

use std::sync::Arc;

use tokio::time::Instant;

use super::series::FamilyCore;
use super::{Registry, text};

/// Size in bytes at which a piece ends, after the series that exceeds it.
pub(super) const PIECE_BYTES: usize = 64 << 10;

/// A scrape in progress: an iterator over the pieces of the text.
#[derive(Debug)]
pub struct Exposition {
    registry: Registry,
    families: Vec<Arc<FamilyCore>>,
    /// If set, only this owner's series are written.
    owner: Option<Box<str>>,
    family: usize,
    /// Index of the family's series to continue from.
    series: usize,
    is_over: bool,
    started: Instant,
}

impl Exposition {
    pub(super) fn new(
        registry: Registry,
        families: Vec<Arc<FamilyCore>>,
        started: Instant,
    ) -> Self {
        Self {
            registry,
            families,
            owner: None,
            family: 0,
            series: 0,
            is_over: false,
            started,
        }
    }

    /// Restricts the exposition to one owner's series, without series that have no owner.
    pub(super) fn of(mut self, owner: &str) -> Self {
        self.families.retain(|core| core.owner_place().is_some());
        self.owner = Some(owner.into());
        self
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
            match text::family(
                &mut out,
                core,
                self.owner.as_deref(),
                (self.series, self.started, PIECE_BYTES),
            ) {
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
        if self.owner.is_none() {
            self.registry.write_rest(&mut out, &self.families);
        }
        Some(out)
    }
}

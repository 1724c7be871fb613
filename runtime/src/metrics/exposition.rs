//! Text form of all families in pieces. It needs memory for one piece, and locks no table for
//! longer than one piece takes.

use std::sync::Arc;

use tokio::time::Instant;

use super::series::FamilyCore;
use super::{Registry, legacy_names, text};

/// Size in bytes at which a piece ends, after the series that exceeds it.
/// It bounds the memory of a scrape whose client reads slowly, and is large enough for few writes.
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
    /// ExpositionPass over the families that is in progress. The second one, if any, writes renamed
    /// metrics under their old names.
    pass: ExpositionPass,
    has_second_pass: bool,
    started: Instant,
}

/// A pass over all families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpositionPass {
    Present,
    Legacy,
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
            pass: ExpositionPass::Present,
            has_second_pass: legacy_names::are_shown(),
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

impl Exposition {
    /// Adds the metrics' old names, as `--legacy-metric-names` does.
    #[cfg(test)]
    pub(super) fn with_legacy_names(mut self) -> Self {
        self.has_second_pass = true;
        self
    }

    /// Returns the next piece of the pass that is in progress.
    fn next_piece(&mut self) -> Option<String> {
        if self.is_over {
            return None;
        }
        let mut out = String::with_capacity(PIECE_BYTES + PIECE_BYTES / 4);
        while let Some(core) = self.families.get(self.family) {
            let is_left_out = self.pass == ExpositionPass::Legacy
                && legacy_names::old_name(core.family.name).is_none();
            if is_left_out {
                self.family += 1;
                continue;
            }
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

impl Iterator for Exposition {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        loop {
            let piece = self.next_piece();
            match (piece, self.pass) {
                (Some(piece), ExpositionPass::Present) => return Some(piece),
                (Some(piece), ExpositionPass::Legacy) => {
                    let piece = legacy_names::translate(&piece);
                    // The last piece may have no renamed metric.
                    if !piece.is_empty() {
                        return Some(piece);
                    }
                }
                (None, ExpositionPass::Present) if self.has_second_pass => {
                    (self.family, self.series, self.is_over) = (0, 0, false);
                    self.pass = ExpositionPass::Legacy;
                }
                (None, _) => return None,
            }
        }
    }
}

//! Results of runs of the load, round by round, and their summary: the median with the minimum and
//! the maximum. It measures nothing.

use std::fmt;

/// The figures of one run of the load.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LoadFigures {
    pub(crate) per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p90_ms: f64,
    /// CPU time of the node proxy per flow.
    pub(crate) node_us: f64,
    /// Part of it outside the kernel.
    pub(crate) user_us: f64,
    /// CPU time of the key server per flow.
    pub(crate) keys_us: f64,
    pub(crate) completed: f64,
    pub(crate) failed: f64,
}

/// Results of the same run in several rounds.
#[derive(Debug, Default)]
pub(crate) struct Rounds(Vec<LoadFigures>);

impl Rounds {
    pub(crate) fn add(&mut self, measured: LoadFigures) {
        self.0.push(measured);
    }

    /// Returns the spread of one figure over all rounds.
    pub(crate) fn of(&self, figure: impl Fn(&LoadFigures) -> f64) -> FigureSpread {
        FigureSpread::of(self.0.iter().map(figure).collect())
    }

    pub(crate) fn sum(&self, figure: impl Fn(&LoadFigures) -> f64) -> f64 {
        self.0.iter().map(figure).sum()
    }
}

/// Spread of a figure over rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct FigureSpread {
    pub(crate) least: f64,
    pub(crate) median: f64,
    pub(crate) most: f64,
}

impl FigureSpread {
    /// Returns the spread of the values; 0 if there are none.
    pub(crate) fn of(mut all: Vec<f64>) -> Self {
        all.sort_by(f64::total_cmp);
        let at = |n: usize| all.get(n).copied().unwrap_or_default();
        let middle = all.len() / 2;
        let median = if all.len().is_multiple_of(2) {
            (at(middle.saturating_sub(1)) + at(middle)) / 2.0
        } else {
            at(middle)
        };
        Self {
            least: at(0),
            median,
            most: at(all.len().saturating_sub(1)),
        }
    }
}

/// With a precision, prints the median alone: `{:.0}`; the alternate form adds the minimum and the
/// maximum: `{:#.0}`.
impl fmt::Display for FigureSpread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(1);
        write!(f, "{:.digits$}", self.median)?;
        if f.alternate() {
            write!(f, " ({:.digits$}–{:.digits$})", self.least, self.most)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_its_median_between_the_ends() {
        for (all, shown) in [
            (vec![], "0 (0–0)"),
            (vec![3.0], "3 (3–3)"),
            (vec![9.0, 1.0, 2.0], "2 (1–9)"),
            (vec![4.0, 1.0, 2.0, 9.0], "3 (1–9)"),
        ] {
            assert_eq!(format!("{:#.0}", FigureSpread::of(all)), shown);
        }
    }
}

//! The bars of an experiment: each measured figure beside its bound, and whether it holds. It
//! measures nothing.

use std::fmt::Write as _;

/// Bound that a figure must meet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bound {
    AtMost(f64),
    AtLeast(f64),
    Within(f64, f64),
}

/// A figure with its bound.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bar {
    name: String,
    figure: f64,
    bound: Bound,
}

impl Bar {
    pub(crate) fn new(name: impl Into<String>, figure: f64, bound: Bound) -> Self {
        Self {
            name: name.into(),
            figure,
            bound,
        }
    }

    /// Returns whether the figure meets its bound. A figure that is not a number misses every
    /// bound.
    fn holds(&self) -> bool {
        match self.bound {
            Bound::AtMost(most) => self.figure <= most,
            Bound::AtLeast(least) => self.figure >= least,
            Bound::Within(low, high) => (low..=high).contains(&self.figure),
        }
    }

    fn row(&self) -> String {
        let must = match self.bound {
            Bound::AtMost(most) => format!("at most {}", short(most)),
            Bound::AtLeast(least) => format!("at least {}", short(least)),
            Bound::Within(low, high) => format!("{} to {}", short(low), short(high)),
        };
        format!(
            "| {} | {} | {must} | {} |",
            self.name,
            short(self.figure),
            if self.holds() { "holds" } else { "**missed**" }
        )
    }
}

/// Returns the number with at most two digits after the point.
fn short(number: f64) -> String {
    if number.fract() == 0.0 {
        format!("{number:.0}")
    } else {
        format!("{number:.2}")
    }
}

/// Returns the table of the bars, and whether all hold. An empty table counts as a failure.
pub(crate) fn table(bars: &[Bar]) -> (String, bool) {
    let mut text = String::from("| bar | figure | must be | |\n|---|---|---|---|\n");
    for bar in bars {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{}", bar.row());
    }
    (text, !bars.is_empty() && bars.iter().all(Bar::holds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_hold_at_their_bounds() {
        for (figure, bound, holds) in [
            (1.2, Bound::AtMost(1.2), true),
            (1.21, Bound::AtMost(1.2), false),
            (2000.0, Bound::AtLeast(2000.0), true),
            (1946.0, Bound::AtLeast(2000.0), false),
            (0.75, Bound::Within(0.75, 1.25), true),
            (1.3, Bound::Within(0.75, 1.25), false),
            (f64::NAN, Bound::AtMost(1.0), false),
            (f64::NAN, Bound::AtLeast(1.0), false),
        ] {
            assert_eq!(
                Bar::new("a", figure, bound).holds(),
                holds,
                "{figure} {bound:?}"
            );
        }
    }

    #[test]
    fn a_miss_is_shown_and_no_bar_is_no_success() {
        let (text, is_well) = table(&[
            Bar::new("failed", 0.0, Bound::AtMost(0.0)),
            Bar::new("rate", 1946.25, Bound::AtLeast(2000.0)),
        ]);
        assert!(
            text.ends_with("| failed | 0 | at most 0 | holds |\n| rate | 1946.25 | at least 2000 | **missed** |\n") && !is_well,
            "{text}"
        );
        assert!(!table(&[]).1);
    }
}

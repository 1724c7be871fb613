//! Median, minimum and maximum of a measurement's rounds, and the rule by which two of them are
//! equal.

use std::fmt::{Display, Formatter};

/// Spread of the values of all rounds.
#[derive(Clone, Copy, Debug)]
pub struct RoundSpread {
    pub low: f64,
    pub median: f64,
    pub high: f64,
}

impl RoundSpread {
    /// Returns the spread of at least one value.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut all: Vec<f64> = values.collect();
        all.sort_by(f64::total_cmp);
        Self {
            low: all[0],
            median: all[all.len() / 2],
            high: all[all.len() - 1],
        }
    }

    /// Returns whether the median of each lies between the other's minimum and maximum.
    pub fn equals(&self, other: &Self) -> bool {
        let holds = |one: &Self, median: f64| (one.low..=one.high).contains(&median);
        holds(self, other.median) && holds(other, self.median)
    }

    /// Returns the ratio to `other`, or a text if the two are equal.
    pub fn beside(&self, other: &Self) -> String {
        let ratio = self.median / other.median;
        if self.equals(other) {
            format!("{ratio:.2} (equal)")
        } else {
            format!("{ratio:.2}")
        }
    }
}

/// Prints `median (lowest–highest)`, with the digits that the caller requests by `{:.N}`.
impl Display for RoundSpread {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        let digits = out.precision().unwrap_or(1);
        write!(
            out,
            "{:.digits$} ({:.digits$}–{:.digits$})",
            self.median, self.low, self.high
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_are_equal_where_each_holds_the_others_median() {
        let of = |values: [f64; 3]| RoundSpread::of(values.into_iter());
        assert_eq!(format!("{:.1}", of([3.0, 1.0, 2.0])), "2.0 (1.0–3.0)");
        assert!(of([1.0, 2.0, 3.0]).equals(&of([2.0, 3.0, 9.0])));
        assert!(
            !of([1.0, 2.0, 3.0]).equals(&of([2.5, 3.5, 9.0])),
            "one's median lies in the other, not the other's in the one"
        );
        assert_eq!(of([1.0, 2.0, 2.5]).beside(&of([4.0, 4.0, 4.0])), "0.50");
        assert_eq!(
            of([1.0, 2.0, 4.0]).beside(&of([2.0, 2.0, 4.0])),
            "1.00 (equal)"
        );
    }
}

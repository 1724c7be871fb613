//! Median, quartiles and extremes of a few measured values. It does not interpret them.

/// Distribution of the values of several rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub min: f64,
    pub lower: f64,
    pub median: f64,
    pub upper: f64,
    pub max: f64,
}

/// Returns the value below which `part` of the sorted `values` lie; NaN if there are none.
pub fn quantile(values: &[f64], part: f64) -> f64 {
    let last = values.len().saturating_sub(1);
    let at = part * last as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    match (values.get(low), values.get(high)) {
        (Some(a), Some(b)) => a + (b - a) * (at - at.floor()),
        _ => f64::NAN,
    }
}

impl Spread {
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let at = |part| quantile(&values, part);
        Self {
            min: at(0.0),
            lower: at(0.25),
            median: at(0.5),
            upper: at(0.75),
            max: at(1.0),
        }
    }

    /// Returns whether each median lies between the other's extremes.
    pub fn is_equal_within(&self, other: &Self) -> bool {
        (other.min..=other.max).contains(&self.median)
            && (self.min..=self.max).contains(&other.median)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_neighbours() {
        let spread = Spread::of([4.0, 1.0, 3.0, 2.0, 5.0]);
        assert_eq!(
            spread,
            Spread {
                min: 1.0,
                lower: 2.0,
                median: 3.0,
                upper: 4.0,
                max: 5.0
            }
        );
        assert_eq!(Spread::of([1.0, 2.0]).median, 1.5);
        assert!(Spread::of([]).median.is_nan());
    }

    #[test]
    fn spreads_are_equal_only_if_both_medians_lie_in_the_other() {
        let (a, b, c) = (
            Spread::of([1.0, 2.0, 3.0]),
            Spread::of([2.0, 2.5, 9.0]),
            Spread::of([2.9, 3.5, 4.0]),
        );
        assert!(a.is_equal_within(&b) && b.is_equal_within(&a));
        assert!(!a.is_equal_within(&c));
    }
}

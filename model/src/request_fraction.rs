//! A part of a rule's requests, to which an effect of the rule applies, and how a request is drawn
//! into it.
//!
//! Istio: `percentage`, `mirrorPercentage`. Gateway API: `percent` and `fraction` of a mirror.

/// A part of all requests, in millionths, as Envoy's `FractionalPercent` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestFraction(u32);

impl RequestFraction {
    pub const ALL: Self = Self(Self::MILLION);
    pub const NONE: Self = Self(0);
    /// Envoy's `FractionalPercent` has no finer denominator.
    const MILLION: u32 = 1_000_000;

    /// Returns the fraction of this many millionths; `None` if there are more than a million.
    pub fn of_millionths(millionths: u32) -> Option<Self> {
        (millionths <= Self::MILLION).then_some(Self(millionths))
    }

    /// Returns the fraction of this percentage, rounded down as Istio does; `None` if it is not
    /// from 0 to 100.
    pub fn of_percent(percent: f64) -> Option<Self> {
        (0.0..=100.0)
            .contains(&percent)
            .then_some(Self((percent * 10_000.0) as u32))
    }

    pub fn millionths(self) -> u32 {
        self.0
    }

    /// Returns whether the fraction contains a request with this random number.
    pub fn contains(self, random: u32) -> bool {
        // The product is less than 2^52.
        (u64::from(random) * u64::from(Self::MILLION)) >> 32 < u64::from(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fraction_contains_its_part_of_the_random_numbers() {
        for (percent, contained, beyond) in [
            (0.0, None, Some(0)),
            (100.0, Some(u32::MAX), None),
            (50.0, Some(u32::MAX / 2), Some(u32::MAX / 2 + 1)),
            (0.0001, Some(4294), Some(4295)),
        ] {
            let fraction = RequestFraction::of_percent(percent).unwrap();
            assert!(
                contained.is_none_or(|random| fraction.contains(random)),
                "{percent}"
            );
            assert!(
                beyond.is_none_or(|random| !fraction.contains(random)),
                "{percent}"
            );
        }
        for bad in [-0.1, 100.1, f64::NAN, f64::INFINITY] {
            assert_eq!(RequestFraction::of_percent(bad), None, "{bad}");
        }
    }
}

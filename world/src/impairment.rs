//! [`Impairment`]: the delay, jitter and loss that a relay applies to the frames of a link, and their syntax in a topology. This module
//! carries no frames; `relay` does.

use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Impairment of a link. It applies to each direction separately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Impairment {
    /// Time that a frame spends on the link in one direction, at most 10 s.
    pub delay: Duration,
    /// Maximum deviation from `delay` in either direction, uniformly distributed; at most `delay`.
    /// Frames stay in order.
    pub jitter: Duration,
    /// Share of frames that are dropped at random, in parts per million.
    pub loss_ppm: u32,
}

impl Impairment {
    /// Returns an impairment that delays each direction by this time and drops nothing.
    pub fn delay(delay: Duration) -> Self {
        Self {
            delay,
            ..Self::default()
        }
    }
}

/// A time on a link, written `500us`, `0.5ms` or `1s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Delay(pub(crate) Duration);

impl Delay {
    /// Maximum: longer than any path on Earth, and short enough that a world still comes up.
    pub(crate) const MAX: Duration = Duration::from_secs(10);
}

impl FromStr for Delay {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let unit_at = text
            .find(|letter: char| letter.is_ascii_alphabetic())
            .ok_or(())?;
        let (number, unit) = text.split_at(unit_at);
        let nanoseconds = match unit {
            "us" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            _ => return Err(()),
        };
        let delay = Duration::from_nanos(decimal(number, nanoseconds).ok_or(())?);
        (delay <= Self::MAX).then_some(Self(delay)).ok_or(())
    }
}

/// A share of frames, written `1%` or `0.05%`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LossRate {
    pub(crate) parts_per_million: u32,
}

impl FromStr for LossRate {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let number = text.strip_suffix('%').ok_or(())?;
        let parts = decimal(number, 10_000)
            .and_then(|parts| u32::try_from(parts).ok())
            .ok_or(())?;
        (parts <= 1_000_000)
            .then_some(Self {
                parts_per_million: parts,
            })
            .ok_or(())
    }
}

/// Multiplies an unsigned decimal number by `scale`, exactly. Returns `None` for other text, and
/// for numbers that are too large or finer than one part of `scale`.
fn decimal(text: &str, scale: u64) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_digits = |part: &str| {
        !part.is_empty() && part.len() <= 9 && part.bytes().all(|byte| byte.is_ascii_digit())
    };
    if !is_digits(whole) || !is_digits(fraction) {
        return None;
    }
    let divisor = 10_u64.pow(fraction.len() as u32);
    let parts = fraction.parse::<u64>().ok()?.checked_mul(scale)?;
    if !parts.is_multiple_of(divisor) {
        return None;
    }
    whole
        .parse::<u64>()
        .ok()?
        .checked_mul(scale)?
        .checked_add(parts / divisor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_and_losses_are_read_exactly_or_refused() {
        for (text, microseconds) in [
            ("500us", Some(500)),
            ("0.5ms", Some(500)),
            ("20ms", Some(20_000)),
            ("1s", Some(1_000_000)),
            ("0ms", Some(0)),
            // Ten seconds and 100 % are the limits; each has a case just beyond it.
            ("10s", Some(10_000_000)),
            ("10.001s", None),
            ("5", None),
            ("ms", None),
            ("-1ms", None),
            ("1 ms", None),
            ("1.ms", None),
            ("1h", None),
            ("9999999999s", None),
        ] {
            assert_eq!(
                text.parse::<Delay>().ok().map(|delay| delay.0),
                microseconds.map(Duration::from_micros),
                "{text}"
            );
        }
        for (text, parts) in [
            ("1%", Some(10_000)),
            ("0.05%", Some(500)),
            ("0%", Some(0)),
            ("100%", Some(1_000_000)),
            // Losses are parts per million, so 0.0001 % is the smallest.
            ("0.0001%", Some(1)),
            ("0.00001%", None),
            ("100.1%", None),
            ("1", None),
            ("%", None),
        ] {
            assert_eq!(
                text.parse::<LossRate>()
                    .ok()
                    .map(|loss| loss.parts_per_million),
                parts,
                "{text}"
            );
        }
    }
}

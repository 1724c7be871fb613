//! Timeouts and retries as HTTPRoutes (`gateway.networking.k8s.io`) and VirtualServices
//! (`networking.istio.io`) write them. The structs mirror the YAML; the compiler validates and
//! interprets them.

use std::time::Duration;

use serde::Deserialize;

use super::canal::Timeout;
use crate::ids::IdError;

/// Timeouts of an HTTPRoute's rule (GEP-1742). Zero means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRouteTimeouts {
    /// Time in which the gateway must have responded.
    pub request: Option<Timeout>,
    /// Time for one request of the gateway to a backend.
    pub backend_request: Option<Timeout>,
}

/// Retries of an HTTPRoute's rule (GEP-1731).
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct HttpRouteRetry {
    /// Statuses, 400 to 599, after which a request is sent again.
    pub codes: Vec<u16>,
    /// Most retries; `None` leaves the number to the implementation.
    pub attempts: Option<i64>,
    /// Shortest time before a retry.
    pub backoff: Option<Timeout>,
}

/// Retries of a VirtualService's rule.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRetry {
    /// Most retries; 0 disables them.
    pub attempts: i32,
    pub per_try_timeout: Option<IstioDuration>,
    /// Names of conditions and statuses, separated by commas. Empty means Istio's default.
    pub retry_on: String,
    pub retry_remote_localities: Option<bool>,
    pub retry_ignore_previous_hosts: Option<bool>,
    pub backoff: Option<IstioDuration>,
}

/// A duration in Go's form, as Istio reads it: `1h`, `1.5s`, `100ms`. Istio accepts whole
/// milliseconds, and at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct IstioDuration(pub Duration);

impl TryFrom<String> for IstioDuration {
    type Error = IdError;

    fn try_from(text: String) -> Result<Self, IdError> {
        let nanoseconds = go_duration(&text).ok_or_else(|| IdError::Form {
            what: "time",
            value: text.chars().take(40).collect(),
            form: "1h, 1m, 1.5s or 100ms",
        })?;
        if nanoseconds == 0 || nanoseconds % NANOSECONDS_PER_MILLISECOND != 0 {
            return Err(IdError::Form {
                what: "time",
                value: text.chars().take(40).collect(),
                form: "whole milliseconds, at least 1ms",
            });
        }
        Ok(Self(Duration::from_nanos(nanoseconds)))
    }
}

/// A duration in Go's form that may be zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct GoDuration(pub Duration);

impl TryFrom<String> for GoDuration {
    type Error = IdError;

    fn try_from(text: String) -> Result<Self, IdError> {
        let nanoseconds = go_duration(&text).ok_or_else(|| IdError::Form {
            what: "time",
            value: text.chars().take(40).collect(),
            form: "0s, 1h, 1m or 1.5s",
        })?;
        Ok(Self(Duration::from_nanos(nanoseconds)))
    }
}

const NANOSECONDS_PER_MILLISECOND: u64 = 1_000_000;

/// Units of Go's `time.ParseDuration`, with their nanoseconds. A unit precedes its own beginnings.
const GO_UNITS: [(&str, u64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("\u{b5}s", 1_000),
    ("\u{3bc}s", 1_000),
    ("ms", NANOSECONDS_PER_MILLISECOND),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// Returns the nanoseconds of a duration in Go's form that is not negative.
fn go_duration(text: &str) -> Option<u64> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(0);
    }
    let mut sum = (!rest.is_empty()).then_some(0u64)?;
    while !rest.is_empty() {
        let (whole, after) = split_digits(rest);
        let (fraction, after) = match after.strip_prefix('.') {
            Some(after) => split_digits(after),
            None => ("", after),
        };
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let (unit, nanoseconds) = GO_UNITS
            .into_iter()
            .find(|(unit, _)| after.starts_with(unit))?;
        let whole = if whole.is_empty() {
            0
        } else {
            whole.parse::<u64>().ok()?
        };
        sum = sum.checked_add(whole.checked_mul(nanoseconds)?)?;
        let mut scale = nanoseconds;
        for digit in fraction.bytes() {
            scale /= 10;
            sum = sum.checked_add(u64::from(digit - b'0') * scale)?;
        }
        rest = &after[unit.len()..];
    }
    // Go's durations are signed.
    i64::try_from(sum).is_ok().then_some(sum)
}

/// Splits the digits at the beginning from the rest.
fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_istio_reads_them() {
        for (text, millis) in [
            ("1ms", Some(1)),
            ("1.5s", Some(1500)),
            (".5s", Some(500)),
            ("1h30m", Some(5_400_000)),
            ("2m", Some(120_000)),
            ("+1s", Some(1000)),
            ("1000us", Some(1)),
            ("0s", None),
            ("0", None),
            ("-1s", None),
            ("1", None),
            ("", None),
            ("s", None),
            ("1.0001s", None),
            ("1d", None),
            ("9999999999999h", None),
        ] {
            let read = IstioDuration::try_from(text.to_owned()).ok();
            let want = millis.map(Duration::from_millis);
            assert_eq!(read.map(|read| read.0), want, "{text:?}");
        }
    }
}

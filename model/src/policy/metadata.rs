//! What every object carries: name, namespace, labels, age. Fields that only an API server cares about are not kept.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

use super::kubernetes::{AZ_ANNOTATION, TUNNEL_ANNOTATION, VTEP_MAC_ANNOTATION};
use super::mesh::HOME_AZ_ANNOTATION;
use super::security::DRY_RUN_ANNOTATION;
use crate::ids::{IdError, Namespace, ObjectName};
use crate::program::Labels;

/// The annotations that some part of Canal reads. Others are not kept where they stand on lines of their own.
pub const READ_ANNOTATIONS: [&str; 5] = [AZ_ANNOTATION, TUNNEL_ANNOTATION, VTEP_MAC_ANNOTATION, HOME_AZ_ANNOTATION, DRY_RUN_ANNOTATION];

/// `metadata:` of an object.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    pub name: ObjectName,
    #[serde(default = "default_namespace")]
    pub namespace: Namespace,
    #[serde(default)]
    pub labels: Labels,
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
    /// Decides which of two conflicting objects is the older; objects without it are the oldest.
    #[serde(default)]
    pub creation_timestamp: Option<Timestamp>,
    /// Set while Kubernetes takes the object away.
    #[serde(default)]
    pub deletion_timestamp: Option<Timestamp>,
}

/// The namespace of an object that names none.
pub(crate) fn default_namespace() -> Namespace {
    match Namespace::new("default") {
        Ok(namespace) => namespace,
        Err(_) => unreachable!("the constant is a valid name; the test below holds it to it"),
    }
}

/// A point in time in whole seconds since 1970-01-01T00:00:00Z; written as RFC 3339 §5.6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Deserialize)]
#[serde(try_from = "String")]
pub struct Timestamp(pub u64);

impl TryFrom<String> for Timestamp {
    type Error = IdError;
    fn try_from(s: String) -> Result<Self, IdError> {
        s.parse()
    }
}

impl FromStr for Timestamp {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        seconds_since_1970(s).map(Self).ok_or_else(|| IdError::Form {
            what: "time",
            given: s.chars().take(80).collect(),
            form: "2026-01-31T23:59:59Z (RFC 3339)",
        })
    }
}

/// The RFC 3339 form `YYYY-MM-DDThh:mm:ss[.fraction](Z|±hh:mm)`; `None` for anything else and for times before 1970.
fn seconds_since_1970(s: &str) -> Option<u64> {
    let digits = |range: std::ops::Range<usize>| -> Option<i64> {
        let part = s.get(range)?;
        part.bytes().all(|c| c.is_ascii_digit()).then(|| part.parse().ok())?
    };
    let sign_at = |at: usize, sign: &[u8]| s.as_bytes().get(at).is_some_and(|c| sign.contains(c));
    if !(sign_at(4, b"-") && sign_at(7, b"-") && sign_at(10, b"Tt") && sign_at(13, b":") && sign_at(16, b":")) {
        return None;
    }
    let (year, month, day) = (digits(0..4)?, digits(5..7)?, digits(8..10)?);
    let (hour, minute, second) = (digits(11..13)?, digits(14..16)?, digits(17..19)?);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days_in_month = match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if !(1..=days_in_month).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let mut zone = s.get(19..)?;
    if let Some(fraction) = zone.strip_prefix('.') {
        let rest = fraction.trim_start_matches(|c: char| c.is_ascii_digit());
        if rest.len() == fraction.len() {
            return None;
        }
        zone = rest;
    }
    let offset_seconds = zone_seconds(zone)?;
    // Days from civil: years begin in March, so that the leap day is the last of its year.
    let (shifted_year, shifted_month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let era_days = 365 * shifted_year + shifted_year.div_euclid(4) - shifted_year.div_euclid(100) + shifted_year.div_euclid(400);
    let days = era_days + (153 * shifted_month + 2) / 5 + day - 1 - 719_468;
    u64::try_from(days * 86_400 + hour * 3_600 + minute * 60 + second - offset_seconds).ok()
}

/// `Z`, `+hh:mm` or `-hh:mm` in seconds east of UTC.
fn zone_seconds(zone: &str) -> Option<i64> {
    if matches!(zone, "Z" | "z") {
        return Some(0);
    }
    let sign = match zone.as_bytes().first()? {
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    let (hours, minutes) = zone.get(1..)?.split_once(':')?;
    let two_digits = |part: &str, max: i64| -> Option<i64> {
        let fits = part.len() == 2 && part.bytes().all(|c| c.is_ascii_digit());
        fits.then(|| part.parse().ok())?.filter(|n| *n <= max)
    };
    Some(sign * (two_digits(hours, 23)? * 3_600 + two_digits(minutes, 59)? * 60))
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} s since 1970", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_namespace_is_valid() {
        assert_eq!(default_namespace().as_str(), "default");
    }

    #[test]
    fn times_are_read_as_rfc_3339() {
        for (given, expected) in [
            ("1970-01-01T00:00:00Z", Some(0)),
            ("2000-03-01T00:00:00Z", Some(951_868_800)),
            ("2024-02-29T12:34:56Z", Some(1_709_210_096)),
            ("2024-02-29T12:34:56.789Z", Some(1_709_210_096)),
            ("2024-02-29T14:34:56+02:00", Some(1_709_210_096)),
            ("2024-02-29t12:34:56z", Some(1_709_210_096)),
            ("2023-02-29T12:34:56Z", None),
            ("2024-13-01T00:00:00Z", None),
            ("2024-01-01T24:00:00Z", None),
            ("2024-01-01 00:00:00Z", None),
            ("2024-01-01T00:00:00", None),
            ("2024-01-01T00:00:00.Z", None),
            ("2024-01-01T00:00:00+2:00", None),
            ("1969-12-31T23:59:59Z", None),
            ("2024-01-0é:00:00:00Z", None),
            ("", None),
        ] {
            assert_eq!(given.parse::<Timestamp>().ok(), expected.map(Timestamp), "{given:?}");
        }
    }
}

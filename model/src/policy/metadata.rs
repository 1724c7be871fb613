//! Metadata that every object carries: name, namespace, labels, age. Fields that only an API server
//! uses are not read.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::canal::HOME_AZ_ANNOTATION;
use super::istio_security::DRY_RUN_ANNOTATION;
use super::kubernetes::{
    AZ_ANNOTATION, DIRECT_ANNOTATION, POLICY_PATHS_ANNOTATION, TUNNEL_ANNOTATION,
    UPSTREAM_POOL_ANNOTATION, VTEP_MAC_ANNOTATION,
};
use super::listeners::{PROXY_PROTOCOL_ANNOTATION, TRUSTED_PROXIES_ANNOTATION};
use crate::ids::{IdError, Namespace, ObjectName};
use crate::program::Labels;

/// The annotations that some part of Canal reads. `control/sources` removes other annotations whose
/// lines contain nothing else.
pub const READ_ANNOTATIONS: [&str; 10] = [
    AZ_ANNOTATION,
    TUNNEL_ANNOTATION,
    VTEP_MAC_ANNOTATION,
    HOME_AZ_ANNOTATION,
    DRY_RUN_ANNOTATION,
    UPSTREAM_POOL_ANNOTATION,
    POLICY_PATHS_ANNOTATION,
    DIRECT_ANNOTATION,
    TRUSTED_PROXIES_ANNOTATION,
    PROXY_PROTOCOL_ANNOTATION,
];

/// The content of `metadata:` in an object.
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
    /// Creation time; it decides which of two conflicting objects is older. Objects without it
    /// count as the oldest.
    #[serde(default)]
    pub creation_timestamp: Option<Timestamp>,
    /// Deletion time; set while Kubernetes is removing the object.
    #[serde(default)]
    pub deletion_timestamp: Option<Timestamp>,
}

/// Returns the namespace of an object that does not name one.
pub(crate) fn default_namespace() -> Namespace {
    match Namespace::new("default") {
        Ok(namespace) => namespace,
        Err(_) => unreachable!("the constant is a valid name; a test below verifies it"),
    }
}

/// A point in time in whole seconds since 1970-01-01T00:00:00Z; written as in RFC 3339 §5.6.
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
        seconds_since_1970(s)
            .map(Self)
            .ok_or_else(|| IdError::Form {
                what: "time",
                value: s.chars().take(80).collect(),
                form: "2026-01-31T23:59:59Z (RFC 3339)",
            })
    }
}

/// Parses an RFC 3339 time. Returns `None` for anything else and for times before 1970.
fn seconds_since_1970(s: &str) -> Option<u64> {
    // The crate accepts any separator of date and time; RFC 3339 §5.6 has only T, in either case.
    s.as_bytes()
        .get(10)
        .filter(|separator| matches!(separator, b'T' | b't'))?;
    let time = OffsetDateTime::parse(s, &Rfc3339).ok()?;
    u64::try_from(time.unix_timestamp()).ok()
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
            assert_eq!(
                given.parse::<Timestamp>().ok(),
                expected.map(Timestamp),
                "{given:?}"
            );
        }
    }
}

//! Rewrites serde's error messages for the author of the YAML: the problem, and what to write
//! instead.

use std::fmt;

use serde::de::{self, Expected, Unexpected};

use crate::tree::{Position, YamlNode};

/// The reason that a value could not be decoded. The decoder sets the location, as near to the
/// value as it knows.
#[derive(Debug)]
pub(crate) struct DecodeError {
    pub(crate) location: Option<ErrorLocation>,
    /// The name of the field, if the error is that a field is missing.
    pub(crate) missing: Option<&'static str>,
    pub(crate) problem: String,
    pub(crate) fix: String,
}

/// The value that an error is about.
#[derive(Debug, Clone)]
pub(crate) struct ErrorLocation {
    pub(crate) id: u32,
    pub(crate) spot: Position,
    pub(crate) path: String,
}

impl DecodeError {
    fn new(problem: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            location: None,
            missing: None,
            problem: problem.into(),
            fix: fix.into(),
        }
    }

    /// Sets the location, unless a nested value has already set it.
    pub(crate) fn at(mut self, node: &YamlNode, path: impl FnOnce() -> String) -> Self {
        if self.location.is_none() {
            self.location = Some(ErrorLocation {
                id: node.id,
                spot: node.spot,
                path: path(),
            });
        }
        self
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; fix: {}", self.problem, self.fix)
    }
}
impl std::error::Error for DecodeError {}

impl de::Error for DecodeError {
    /// Splits the message of Canal's own types, which have the form "problem; fix: step".
    fn custom<T: fmt::Display>(message: T) -> Self {
        let message = message.to_string();
        if message.contains("socket address syntax") {
            return Self::new(
                "this is not an address with a port",
                "write ip:port, as 192.0.2.1:15013 or [2001:db8::1]:15013",
            );
        }
        if message.contains("IP address syntax") {
            return Self::new(
                "this is not an address",
                "write an IPv4 or IPv6 address; for a range, an address with a prefix as in 10.1.0.0/16",
            );
        }
        match message.rsplit_once("; fix: ") {
            Some((problem, fix)) => Self::new(problem, fix),
            None => Self::new(message, "write a value that fits"),
        }
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let wanted = describe_expected(&expected.to_string());
        let is_scalar = matches!(
            found,
            Unexpected::Bool(_)
                | Unexpected::Unsigned(_)
                | Unexpected::Signed(_)
                | Unexpected::Float(_)
        );
        if wanted == "a text" && is_scalar {
            return Self::new(
                format!("{} is not a text", describe_unexpected(found)),
                "put it in quotes",
            );
        }
        Self::new(
            format!(
                "this is {}, but {wanted} is expected here",
                describe_unexpected(found)
            ),
            format!("write {wanted}"),
        )
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let wanted = describe_expected(&expected.to_string());
        Self::new(
            format!("{} is not {wanted}", describe_unexpected(found)),
            format!("write {wanted}"),
        )
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        let short: String = variant.chars().take(80).collect();
        Self::new(
            format!("{short:?} is not a valid value here"),
            format!("write {}", expected.join(", ").replace_last(", ", " or ")),
        )
    }

    fn missing_field(field: &'static str) -> Self {
        let mut error = Self::new("the field is missing", "add it");
        error.missing = Some(field);
        error
    }

    fn duplicate_field(field: &'static str) -> Self {
        Self::new(
            format!("the field {field:?} is given twice"),
            "keep one of them",
        )
    }
}

trait ReplaceLast {
    fn replace_last(&self, from: &str, to: &str) -> String;
}
impl ReplaceLast for String {
    fn replace_last(&self, from: &str, to: &str) -> String {
        self.rsplit_once(from).map_or_else(
            || self.clone(),
            |(before, after)| format!("{before}{to}{after}"),
        )
    }
}

fn describe_unexpected(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        Unexpected::Float(value) => value.to_string(),
        Unexpected::Str(text) => format!("{:?}", text.chars().take(80).collect::<String>()),
        Unexpected::Unit | Unexpected::Option => "empty".to_owned(),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Map => "a mapping".to_owned(),
        other => other.to_string(),
    }
}

/// Translates serde's names of Rust types into YAML terms.
fn describe_expected(expected: &str) -> String {
    match expected {
        "a string" => "a text",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" | "map" => "a mapping",
        "a nonzero u16" | "u16" => "a number from 1 to 65535",
        "u32" => "a number from 0 to 4294967295",
        "a nonzero u32" => "a number from 1 to 4294967295",
        "u64" => "a number, zero or more",
        "IpAddr" | "IP address" => "an IPv4 or IPv6 address",
        other if other.starts_with("struct ") => "a mapping",
        other if other.contains("CIDR") || other.contains("IP network address") => {
            "a range of addresses such as 10.1.0.0/16"
        }
        other if other.starts_with("enum ") || other.contains("identifier") => "one word",
        other => other,
    }
    .to_owned()
}

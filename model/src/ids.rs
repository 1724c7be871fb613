//! Newtypes for every id and name in Canal. Each is validated once, where it enters the system.
//! They carry no meaning beyond their spelling.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The reason why a name was refused. The error text states what is allowed and can be displayed to
/// the author unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdError {
    /// The string is not an RFC 1123 label (or a subdomain where dots are allowed).
    Name {
        what: &'static str,
        value: String,
        max: usize,
        dots: &'static str,
    },
    /// The number does not fit the field's width.
    Range {
        what: &'static str,
        value: u64,
        min: u64,
        max: u64,
    },
    /// A composed key lacks one of its parts.
    Form {
        what: &'static str,
        value: String,
        form: &'static str,
    },
}

impl IdError {
    /// Returns what is wrong, without the fix.
    pub fn problem(&self) -> String {
        match self {
            Self::Name { what, value, .. } | Self::Form { what, value, .. } => {
                format!("{what} {value:?} is not valid")
            }
            Self::Range { what, value, .. } => format!("{what} {value} is out of range"),
        }
    }

    /// Returns the step that corrects the name.
    pub fn fix(&self) -> String {
        match self {
            Self::Name { max, dots, .. } => format!(
                "use 1 to {max} lower-case letters, digits and '-'{dots}, starting and ending with a letter or digit"
            ),
            Self::Range { min, max, .. } => format!("use {min} to {max}"),
            Self::Form { form, .. } => format!("write it as {form}"),
        }
    }
}

impl fmt::Display for IdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; fix: {}", self.problem(), self.fix())
    }
}

impl std::error::Error for IdError {}

fn is_label(s: &str, max: usize) -> bool {
    let b = s.as_bytes();
    !b.is_empty()
        && b.len() <= max
        && b.iter()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == b'-')
        && b[0] != b'-'
        && b[b.len() - 1] != b'-'
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $what:literal, $max:literal, $dots:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(std::sync::Arc<str>);

        impl $name {
            /// Validates the spelling and wraps it.
            ///
            /// # Errors
            /// Fails with [`IdError::Name`] if the text is too long or is not an RFC 1123 name.
            pub fn new(s: &str) -> Result<Self, IdError> {
                // As in Kubernetes, the parts of a subdomain have no limit of their own.
                let ok = if $dots { s.len() <= $max && s.split('.').all(|l| is_label(l, $max)) } else { is_label(s, $max) };
                if ok {
                    Ok(Self(s.into()))
                } else {
                    Err(IdError::Name { what: $what, value: s.chars().take(80).collect(), max: $max, dots: if $dots { " in parts joined by '.'" } else { "" } })
                }
            }
            /// Returns the name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl FromStr for $name {
            type Err = IdError;
            fn from_str(s: &str) -> Result<Self, IdError> {
                Self::new(s)
            }
        }
        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(s: String) -> Result<Self, IdError> {
                Self::new(&s)
            }
        }
        impl From<$name> for String {
            fn from(n: $name) -> String {
                n.0.to_string()
            }
        }
        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

name_type!(/// A tenant: an isolation unit with its own VNI, trust domain and address space.
    TenantName, "tenant name", 63, false);
name_type!(/// A namespace inside a tenant.
    Namespace, "namespace", 63, false);
name_type!(/// The name of an object (Service, Pod, route …) inside a namespace: an RFC 1123 subdomain.
    ObjectName, "name", 253, true);

impl ObjectName {
    /// Returns true if the name is a single RFC 1123 label of at most 63 bytes, so that it can be
    /// one element of a host name.
    pub fn is_label(&self) -> bool {
        is_label(self.as_str(), 63)
    }
}

name_type!(/// A Kubernetes service account.
    ServiceAccount, "service account", 253, true);
name_type!(/// The name of a tenant's node.
    NodeName, "node name", 253, true);
name_type!(/// An availability zone.
    AzName, "AZ name", 63, false);
name_type!(/// The name of one gateway replica.
    ReplicaName, "replica name", 63, false);
name_type!(/// A gateway backend: a group of replicas with one configuration.
    BackendName, "backend name", 63, false);
name_type!(/// The name of an edge.
    EdgeName, "edge name", 63, false);
name_type!(/// A SPIFFE trust domain (SPIFFE-ID §2.1, restricted to lower-case DNS names).
    TrustDomain, "trust domain", 253, true);

/// A VXLAN network identifier, 24 bits (RFC 7348 §5). Each tenant has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Vni(u32);

impl Vni {
    /// Creates a VNI from 1 to 2^24 - 1. 0 is excluded because Linux treats it as "no VNI" in
    /// metadata mode.
    ///
    /// # Errors
    /// Fails with [`IdError::Range`] if the number is outside that range.
    pub fn new(n: u32) -> Result<Self, IdError> {
        if (1..1 << 24).contains(&n) {
            Ok(Self(n))
        } else {
            Err(IdError::Range {
                what: "VNI",
                value: n.into(),
                min: 1,
                max: (1 << 24) - 1,
            })
        }
    }
    /// Returns the VNI as a number.
    pub fn get(self) -> u32 {
        self.0
    }
}
impl TryFrom<u32> for Vni {
    type Error = IdError;
    fn try_from(n: u32) -> Result<Self, IdError> {
        Self::new(n)
    }
}
impl From<Vni> for u32 {
    fn from(v: Vni) -> u32 {
        v.0
    }
}

/// Identifies a controller's store: 128 random bits, generated when the store is created. Ids that
/// a controller assigns, such as [`ServiceId`], are valid within one store only. Its text form is
/// 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreId(u128);

impl StoreId {
    /// Creates an id from random bits.
    pub fn from_bits(bits: u128) -> Self {
        Self(bits)
    }
    /// Returns the 128 bits of the id.
    pub fn bits(self) -> u128 {
        self.0
    }
}
impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
impl FromStr for StoreId {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let is_hex =
            text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let bits = u128::from_str_radix(text, 16).ok().filter(|_| is_hex);
        bits.map(Self).ok_or_else(|| IdError::Form {
            what: "store ID",
            value: text.chars().take(80).collect(),
            form: "32 hexadecimal digits in lower case",
        })
    }
}

/// A service's id, unique across tenants. It has 24 bits so that it fits a VXLAN VNI and the low
/// part of `240.0.0.0/8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct ServiceId(u32);

impl ServiceId {
    /// Creates an id from 1 to 2^24 - 1.
    ///
    /// # Errors
    /// Fails with [`IdError::Range`] if the number is outside that range.
    pub fn new(n: u32) -> Result<Self, IdError> {
        if (1..1 << 24).contains(&n) {
            Ok(Self(n))
        } else {
            Err(IdError::Range {
                what: "service ID",
                value: n.into(),
                min: 1,
                max: (1 << 24) - 1,
            })
        }
    }
    /// Returns the id as a number.
    pub fn get(self) -> u32 {
        self.0
    }
}
impl TryFrom<u32> for ServiceId {
    type Error = IdError;
    fn try_from(n: u32) -> Result<Self, IdError> {
        Self::new(n)
    }
}
impl From<ServiceId> for u32 {
    fn from(v: ServiceId) -> u32 {
        v.0
    }
}

/// A replica's number in bucket tables, 1 to 4095. It is assigned at registration, and reassigned
/// only after the replica was forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct ReplicaNumber(u16);

impl ReplicaNumber {
    /// Largest replica number: `CANAL_REPLICAS_MAX` of `bpf/abi/tier.h`, minus one.
    pub const MAX: u16 = 4095;
    /// Creates a number from 1 to [`ReplicaNumber::MAX`].
    ///
    /// # Errors
    /// Fails with [`IdError::Range`] if the number is outside that range.
    pub fn new(n: u32) -> Result<Self, IdError> {
        match u16::try_from(n) {
            Ok(n) if (1..=Self::MAX).contains(&n) => Ok(Self(n)),
            _ => Err(IdError::Range {
                what: "replica number",
                value: n.into(),
                min: 1,
                max: Self::MAX.into(),
            }),
        }
    }
    /// Returns the number as an integer.
    pub fn get(self) -> u16 {
        self.0
    }
}
impl TryFrom<u32> for ReplicaNumber {
    type Error = IdError;
    fn try_from(n: u32) -> Result<Self, IdError> {
        Self::new(n)
    }
}
impl From<ReplicaNumber> for u32 {
    fn from(n: ReplicaNumber) -> u32 {
        n.0.into()
    }
}

/// A counter of the states of something that a single writer changes. A larger one is newer; a
/// receiver never goes back to a smaller one.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
pub struct Generation(pub u64);

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Namespace and name of a Secret.
pub type SecretKey = (Namespace, ObjectName);

/// Identifies one service across tenants; written `tenant/namespace/name`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ServiceKey {
    /// Tenant that owns the service.
    pub tenant: TenantName,
    /// The service's namespace inside the tenant.
    pub namespace: Namespace,
    /// Name of the service in its namespace.
    pub name: ObjectName,
}

impl fmt::Display for ServiceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.tenant, self.namespace, self.name)
    }
}
impl fmt::Debug for ServiceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl FromStr for ServiceKey {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let mut it = s.splitn(3, '/');
        let (Some(t), Some(ns), Some(n)) = (it.next(), it.next(), it.next()) else {
            return Err(IdError::Form {
                what: "service",
                value: s.chars().take(80).collect(),
                form: "tenant/namespace/name",
            });
        };
        Ok(Self {
            tenant: TenantName::new(t)?,
            namespace: Namespace::new(ns)?,
            name: ObjectName::new(n)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_once() {
        for (given, ok) in [
            ("a", true),
            ("a-1", true),
            ("", false),
            ("-a", false),
            ("a-", false),
            ("A", false),
            ("a.b", false),
            ("a_b", false),
        ] {
            assert_eq!(TenantName::new(given).is_ok(), ok, "{given:?}");
        }
        assert!(TrustDomain::new("alpha.example").is_ok());
        assert!(TrustDomain::new("alpha..example").is_err());
        assert!(TenantName::new(&"a".repeat(64)).is_err());
    }

    #[test]
    fn numbers_stay_in_24_bits() {
        for (n, ok) in [
            (0, false),
            (1, true),
            (0xff_ffff, true),
            (0x100_0000, false),
        ] {
            assert_eq!(Vni::new(n).is_ok(), ok, "{n}");
            assert_eq!(ServiceId::new(n).is_ok(), ok, "{n}");
        }
    }

    #[test]
    fn a_store_id_is_32_digits() {
        for (text, ok) in [
            ("0123456789abcdef0123456789abcdef", true),
            ("0123456789ABCDEF0123456789abcdef", false),
            ("+123456789abcdef0123456789abcdef", false),
            ("0123456789abcdef", false),
            ("", false),
        ] {
            assert_eq!(text.parse::<StoreId>().is_ok(), ok, "{text:?}");
        }
        let id = StoreId::from_bits(0x7f);
        assert_eq!(id.to_string().parse::<StoreId>().unwrap(), id);
    }

    #[test]
    fn service_key_round_trips() {
        let k: ServiceKey = "alpha/bookinfo/reviews".parse().unwrap();
        assert_eq!(k.to_string().parse::<ServiceKey>().unwrap(), k);
        assert!("alpha/reviews".parse::<ServiceKey>().is_err());
    }
}

//! How gateways select endpoints of a service: the load balancer of each port and subset. It is
//! about quality of service: a data plane that does not know a load balancer uses the default. Start
//! at [`PortLoadBalancer`].

use std::collections::BTreeMap;

/// Maximum number of [`PortLoadBalancer`]s of one service.
/// These are four for each of 256 ports (`PORTS_PER_SERVICE_MAX`). Nobody measured this value.
pub const LOAD_BALANCERS_PER_SERVICE_MAX: usize = 1024;
/// Maximum number of entries of the hash tables of one service, over its ports and subsets.
/// With 10 bytes for an entry of a ring they take 5 MiB in a gateway. They are 512 rings, or 7
/// Maglev tables, of default size.
pub const HASH_ENTRIES_PER_SERVICE_MAX: u32 = 524_288;
/// Minimum size of a ring that asks for none (Envoy's default).
pub const RING_SIZE_DEFAULT: u32 = 1024;
/// Size of a Maglev table that asks for none (Envoy's default).
pub const MAGLEV_SIZE_DEFAULT: u32 = 65_537;

/// The load balancer of one port of a service, for one subset of its workloads. A port and subset
/// without one has the default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortLoadBalancer {
    pub port: u16,
    /// Labels of the subset; empty for all workloads of the service.
    pub subset: BTreeMap<String, String>,
    pub load_balancer: LoadBalancer,
}

/// A way to select one of several endpoints.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LoadBalancer {
    /// The one of two random endpoints that has fewer requests in flight.
    #[default]
    LeastRequest,
    /// The endpoints in turn.
    RoundRobin,
    /// A random endpoint.
    Random,
    /// The endpoint to which a table maps the hash of a part of the request.
    ConsistentHash(Box<ConsistentHash>),
}

/// What is hashed, and the table that maps hashes to endpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsistentHash {
    pub key: HashKey,
    pub table: HashTableKind,
}

/// The part of a request that is hashed. A request without it goes to a random endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HashKey {
    /// Value of the header with this name, which is in lower case.
    Header(String),
    Cookie(HashCookie),
    /// Address of the client, of connections that are no requests too.
    SourceIp,
    /// Value of the query parameter with this name, as sent.
    QueryParameter(String),
}

/// The cookie whose value is hashed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashCookie {
    /// A token (RFC 6265 §4.1.1).
    pub name: String,
    /// Path of a cookie that the gateway generates; empty for none. It has no `;` and no control
    /// characters.
    pub path: String,
    /// Lifetime of a cookie that the gateway generates for a request without one; 0 is until the
    /// browser closes. `None` generates none.
    pub ttl_seconds: Option<u64>,
}

/// The kind of a hash table, with its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HashTableKind {
    /// A ring (ketama) with at least this number of entries.
    Ring { size_min: u32 },
    /// A table of Maglev with this number of entries, which is a prime.
    Maglev { size: u32 },
}

impl HashTableKind {
    /// Returns the number of entries that the table takes, apart from those by which a ring is
    /// larger because each endpoint has the same number of entries.
    pub fn entries(self) -> u32 {
        match self {
            HashTableKind::Ring { size_min } => size_min,
            HashTableKind::Maglev { size } => size,
        }
    }

    /// Returns whether the size is one that a service may have.
    pub fn is_valid(self) -> bool {
        let is_within = (1..=HASH_ENTRIES_PER_SERVICE_MAX).contains(&self.entries());
        match self {
            HashTableKind::Ring { .. } => is_within,
            HashTableKind::Maglev { size } => is_within && is_prime(size),
        }
    }
}

/// Returns whether `number` is a prime.
pub fn is_prime(number: u32) -> bool {
    let divisors = (2..).take_while(|divisor| u64::from(*divisor).pow(2) <= u64::from(number));
    number >= 2
        && divisors
            .into_iter()
            .all(|divisor: u32| !number.is_multiple_of(divisor))
}

impl HashKey {
    /// Returns whether names and paths have the form that headers allow.
    pub fn is_valid(&self) -> bool {
        match self {
            HashKey::Header(name) => is_token(name) && name.to_ascii_lowercase() == *name,
            HashKey::Cookie(cookie) => {
                let is_plain = |c: char| c.is_ascii_graphic() && c != ';';
                is_token(&cookie.name) && cookie.path.chars().all(is_plain)
            }
            HashKey::SourceIp => true,
            HashKey::QueryParameter(name) => !name.is_empty(),
        }
    }
}

/// Returns whether the text is a token of RFC 9110 §5.6.2.
fn is_token(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    !text.is_empty() && text.chars().all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primes_are_distinguished_from_other_numbers() {
        for (number, expected) in [
            (0, false),
            (1, false),
            (2, true),
            (3, true),
            (9, false),
            (65_537, true),
            (65_536, false),
            (524_287, true),
            (u32::MAX, false),
        ] {
            assert_eq!(is_prime(number), expected, "{number}");
        }
    }

    #[test]
    fn keys_that_no_header_can_carry_are_not_valid() {
        let cookie = |name: &str, path: &str| {
            HashKey::Cookie(HashCookie {
                name: name.into(),
                path: path.into(),
                ttl_seconds: None,
            })
        };
        for (key, expected) in [
            (HashKey::Header("x-user".into()), true),
            (HashKey::Header("X-User".into()), false),
            (HashKey::Header(String::new()), false),
            (HashKey::QueryParameter("user".into()), true),
            (HashKey::QueryParameter(String::new()), false),
            (HashKey::SourceIp, true),
            (cookie("user", "/a"), true),
            (cookie("user", ""), true),
            (cookie("a=b", "/"), false),
            (cookie("user", "/; Secure"), false),
            (cookie("user", "/\r\nx: y"), false),
        ] {
            assert_eq!(key.is_valid(), expected, "{key:?}");
        }
    }

    #[test]
    fn sizes_beyond_the_limit_and_tables_that_are_no_prime_are_not_valid() {
        let ring = |size_min| HashTableKind::Ring { size_min };
        let maglev = |size| HashTableKind::Maglev { size };
        for (table, expected) in [
            (ring(1), true),
            (ring(0), false),
            (ring(HASH_ENTRIES_PER_SERVICE_MAX), true),
            (ring(HASH_ENTRIES_PER_SERVICE_MAX + 1), false),
            (maglev(MAGLEV_SIZE_DEFAULT), true),
            (maglev(65_536), false),
            (maglev(5_000_011), false),
        ] {
            assert_eq!(table.is_valid(), expected, "{table:?}");
        }
    }
}

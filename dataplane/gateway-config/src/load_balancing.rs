//! The load balancer of an endpoint set, with the table of one that hashes. Tables are built with
//! the set or after it, never for a request. The engine selects the endpoint. Start with [`LoadBalancing`].

use std::net::SocketAddr;
use std::sync::Arc;

use canal_model::load_balancing::{
    ConsistentHash, HashCookie, HashKey, HashTableKind, LoadBalancer,
};
use canal_router::RoutableRequest;
use hashbrown::HashMap;
use smallvec::SmallVec;

use super::{Endpoint, EndpointSet};
use crate::hash_table::{HASHED_ENDPOINTS_MAX, HashTable, hash_of, hash_of_all};

/// The load balancer of an endpoint set.
#[derive(Debug, Clone, Default)]
pub enum LoadBalancing {
    #[default]
    LeastRequest,
    RoundRobin,
    Random,
    ConsistentHash(Arc<HashBalancer>),
}

/// A load balancer that hashes a part of the request.
#[derive(Debug)]
pub struct HashBalancer {
    pub key: HashKey,
    kind: HashTableKind,
    table: Arc<AddressTable>,
    /// For each position of the table that of the endpoint in the set, or [`GONE`]; `None` if they
    /// are the same.
    moved: Option<Box<[u16]>>,
}

/// Stands for an endpoint that a set has no longer. Positions end below it
/// (`HASHED_ENDPOINTS_MAX`).
const GONE: u16 = u16::MAX;

/// A hash table, and the endpoints of which it was built.
#[derive(Debug)]
pub(crate) struct AddressTable {
    table: HashTable,
    addresses: Box<[SocketAddr]>,
}

impl AddressTable {
    /// Builds the table of the endpoints with these addresses. Returns `None` without endpoints, or
    /// with more than fit.
    pub(crate) fn build(kind: HashTableKind, addresses: Box<[SocketAddr]>) -> Option<Self> {
        let keys: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let table = HashTable::build(kind, &keys)?;
        Some(Self { table, addresses })
    }

    fn is_of(&self, endpoints: &[Endpoint]) -> bool {
        let addresses = endpoints.iter().map(|endpoint| &endpoint.address);
        self.addresses.iter().eq(addresses)
    }
}

impl HashBalancer {
    fn new(hash: ConsistentHash, table: Arc<AddressTable>, endpoints: &[Endpoint]) -> Self {
        let moved = (!table.is_of(endpoints)).then(|| {
            let now: HashMap<SocketAddr, u16> =
                endpoints.iter().map(|it| it.address).zip(0..).collect();
            let moved = table.addresses.iter();
            moved
                .map(|address| now.get(address).copied().unwrap_or(GONE))
                .collect()
        });
        Self {
            key: hash.key,
            kind: hash.table,
            table,
            moved,
        }
    }

    /// Returns positions of endpoints in the order in which they take a hash, some several times.
    /// They are those of the first `entries_max` entries.
    pub fn positions(&self, hash: u64, entries_max: usize) -> impl Iterator<Item = usize> {
        let entries = self.table.table.positions(hash).take(entries_max);
        entries.filter_map(|at| match &self.moved {
            None => Some(at),
            Some(moved) => moved
                .get(at)
                .filter(|at| **at != GONE)
                .map(|at| usize::from(*at)),
        })
    }
}

impl LoadBalancing {
    /// Builds the load balancer of a set. It takes the table of the set before if that is the same:
    /// sets change for other reasons than their endpoints. A table with more entries than are left
    /// must be built later, which the second value says; until then, the set has the table before,
    /// or the default.
    pub(crate) fn build(
        policy: LoadBalancer,
        endpoints: &[Endpoint],
        before: Option<&EndpointSet>,
        entries_left: &mut usize,
    ) -> (Self, bool) {
        let hash = match policy {
            LoadBalancer::LeastRequest => return (Self::LeastRequest, false),
            LoadBalancer::RoundRobin => return (Self::RoundRobin, false),
            LoadBalancer::Random => return (Self::Random, false),
            LoadBalancer::ConsistentHash(hash) => *hash,
        };
        if !has_table(endpoints) {
            return (Self::LeastRequest, false);
        }
        // Sets can share a table only if they hash the same part of requests into the same kind.
        let before = match before.map(|set| &set.load_balancing) {
            Some(Self::ConsistentHash(it)) if (&it.key, it.kind) == (&hash.key, hash.table) => {
                Some(it)
            }
            _ => None,
        };
        if let Some(before) = before.filter(|it| it.table.is_of(endpoints)) {
            let balancer = match before.moved {
                // Its positions are those of these endpoints.
                None => before.clone(),
                Some(_) => Arc::new(HashBalancer::new(hash, before.table.clone(), endpoints)),
            };
            return (Self::ConsistentHash(balancer), false);
        }
        // A ring has at least one entry per endpoint, even if its minimum is lower.
        let entries = (hash.table.entries() as usize).max(endpoints.len());
        if let Some(left) = entries_left.checked_sub(entries) {
            *entries_left = left;
            let addresses = endpoints.iter().map(|it| it.address).collect();
            let built = AddressTable::build(hash.table, addresses);
            let built = built.map(|table| Self::of_table(hash, table, endpoints));
            // More endpoints than fit into a table have the default.
            return (built.unwrap_or_default(), false);
        }
        // The budget of this change is used up: the table before serves until the build's turn.
        let table = before.map(|it| it.table.clone());
        let stale = table.map(|table| HashBalancer::new(hash, table, endpoints));
        let stale = stale.map(|it| Self::ConsistentHash(Arc::new(it)));
        (stale.unwrap_or_default(), true)
    }

    /// Returns the load balancer of a set with a table that may be of other endpoints.
    pub(crate) fn of_table(
        hash: ConsistentHash,
        table: AddressTable,
        endpoints: &[Endpoint],
    ) -> Self {
        Self::ConsistentHash(Arc::new(HashBalancer::new(
            hash,
            Arc::new(table),
            endpoints,
        )))
    }

    /// Returns whether it hashes this part of requests with a table of just these endpoints.
    pub(crate) fn is_built_of(&self, hash: &ConsistentHash, endpoints: &[Endpoint]) -> bool {
        match self {
            Self::ConsistentHash(it) => {
                (&it.key, it.kind) == (&hash.key, hash.table) && it.table.is_of(endpoints)
            }
            _ => false,
        }
    }
}

/// Returns whether a table can be built of the endpoints. A set with more than a table has room for
/// has the default load balancer.
pub(crate) fn has_table(endpoints: &[Endpoint]) -> bool {
    (1..=HASHED_ENDPOINTS_MAX).contains(&endpoints.len())
}

/// Returns the hash of the part of a request that the key names; `None` if the request lacks it.
/// `client` is the address of the client as text.
pub fn hash_of_request<R: RoutableRequest>(
    key: &HashKey,
    client: &str,
    request: &R,
) -> Option<u64> {
    match key {
        HashKey::Header(name) => {
            let mut values: SmallVec<[SmallVec<[u8; 64]>; 1]> = SmallVec::new();
            request.header(name, &mut |value| values.push(value.into()));
            // The order of the lines does not count.
            values.sort_unstable();
            (!values.is_empty()).then(|| hash_of_all(values.iter().map(|value| &value[..])))
        }
        HashKey::Cookie(cookie) => {
            let mut hash = None;
            request.header("cookie", &mut |line| {
                let value = || cookie_value(line, cookie.name.as_bytes());
                hash = hash.or_else(|| value().map(hash_of));
            });
            hash
        }
        HashKey::SourceIp => Some(hash_of(client.as_bytes())),
        HashKey::QueryParameter(name) => {
            let query = request.query()?;
            query_value(query, name.as_bytes()).map(hash_of)
        }
    }
}

/// Returns the value of a cookie without quotes; `None` if it is absent or empty.
fn cookie_value<'l>(line: &'l [u8], name: &[u8]) -> Option<&'l [u8]> {
    let mut pairs = line.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
    let value = pairs.find_map(|pair| pair.strip_prefix(name)?.strip_prefix(b"="))?;
    let unquoted = value
        .strip_prefix(b"\"")
        .and_then(|it| it.strip_suffix(b"\""));
    Some(unquoted.unwrap_or(value)).filter(|value| !value.is_empty())
}

fn query_value<'q>(query: &'q [u8], name: &[u8]) -> Option<&'q [u8]> {
    let mut pairs = query.split(|byte| *byte == b'&');
    pairs.find_map(|pair| match pair.strip_prefix(name)? {
        [] => Some(&[][..]),
        [b'=', value @ ..] => Some(value),
        _ => None,
    })
}

/// A cookie that the gateway generates for a request without one.
#[derive(Debug, PartialEq, Eq)]
pub struct GeneratedCookie {
    /// Hash of the cookie's value.
    pub hash: u64,
    /// Value of `set-cookie`, as Envoy writes it.
    pub set_cookie: String,
}

impl GeneratedCookie {
    /// Generates a cookie, if the settings ask for one. `connection` names the client's connection;
    /// requests that race on it get the same cookie.
    pub fn new(cookie: &HashCookie, connection: &str) -> Option<Self> {
        let ttl_seconds = cookie.ttl_seconds?;
        let value = format!("{:016x}", hash_of(connection.as_bytes()));
        let mut set_cookie = format!("{}=\"{value}\"", cookie.name);
        if ttl_seconds > 0 {
            set_cookie += &format!("; Max-Age={ttl_seconds}");
        }
        if !cookie.path.is_empty() {
            set_cookie += &format!("; Path={}", cookie.path);
        }
        set_cookie += "; HttpOnly";
        Some(Self {
            hash: hash_of(value.as_bytes()),
            set_cookie,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::set_of;

    /// A request with a query and headers.
    struct HashedRequest {
        query: &'static str,
        headers: &'static [(&'static str, &'static str)],
    }

    impl RoutableRequest for HashedRequest {
        fn host(&self) -> &[u8] {
            b"s"
        }
        fn method(&self) -> &[u8] {
            b"GET"
        }
        fn path(&self) -> &[u8] {
            b"/"
        }
        fn query(&self) -> Option<&[u8]> {
            (!self.query.is_empty()).then_some(self.query.as_bytes())
        }
        fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
            let values = self.headers.iter().filter(|(sent, _)| *sent == name);
            values.for_each(|(_, value)| visit(value.as_bytes()));
        }
    }

    fn cookie(ttl_seconds: Option<u64>, path: &str) -> HashCookie {
        HashCookie {
            name: "user".into(),
            path: path.into(),
            ttl_seconds,
        }
    }

    #[test]
    fn the_part_that_the_key_names_is_hashed() {
        let header = HashKey::Header("x-user".into());
        let query = HashKey::QueryParameter("user".into());
        let cookies = HashKey::Cookie(cookie(None, ""));
        let hash = |text: &str| Some(hash_of(text.as_bytes()));
        let with = |headers| HashedRequest { query: "", headers };
        let asks = |query| HashedRequest {
            query,
            headers: &[],
        };
        for (key, request, expected) in [
            (&header, with(&[("x-user", "a")]), hash("a")),
            (&header, with(&[("x-user", "")]), hash("")),
            (&header, with(&[("user", "a")]), None),
            (&query, asks("user=a&user=b"), hash("a")),
            (&query, asks("users=b&user=%61"), hash("%61")),
            (&query, asks("user"), hash("")),
            (&query, asks("other=a"), None),
            (&query, asks(""), None),
            (&cookies, with(&[("cookie", "a=1; user=x; b=2")]), hash("x")),
            (&cookies, with(&[("cookie", "user=\"x\"")]), hash("x")),
            (&cookies, with(&[("cookie", "superuser=x")]), None),
            (&cookies, with(&[("cookie", "user=")]), None),
            (&cookies, with(&[]), None),
            (&HashKey::SourceIp, with(&[]), hash("10.1.1.1")),
        ] {
            assert_eq!(hash_of_request(key, "10.1.1.1", &request), expected);
        }
        let lines = [
            with(&[("x-user", "a"), ("x-user", "b")]),
            with(&[("x-user", "b"), ("x-user", "a")]),
        ];
        let [one, other] = lines.map(|request| hash_of_request(&header, "", &request));
        assert!(one.is_some() && one == other && one != hash("a"));
    }

    #[test]
    fn cookies_are_generated_as_envoy_does() {
        let generated = |ttl, path| {
            let cookie = GeneratedCookie::new(&cookie(ttl, path), "10.0.0.1:5")?;
            let value = format!("{:016x}", hash_of(b"10.0.0.1:5"));
            assert_eq!(cookie.hash, hash_of(value.as_bytes()));
            Some(cookie.set_cookie.replace(&value, "V"))
        };
        for (ttl, path, expected) in [
            (None, "/", None),
            (Some(0), "", Some("user=\"V\"; HttpOnly")),
            (
                Some(60),
                "/a",
                Some("user=\"V\"; Max-Age=60; Path=/a; HttpOnly"),
            ),
        ] {
            assert_eq!(generated(ttl, path).as_deref(), expected);
        }
    }

    fn policy(size_min: u32) -> LoadBalancer {
        LoadBalancer::ConsistentHash(Box::new(ConsistentHash {
            key: HashKey::SourceIp,
            table: HashTableKind::Ring { size_min },
        }))
    }

    #[test]
    fn a_table_is_built_again_only_if_endpoints_or_settings_change() {
        let table = |built: &LoadBalancing| match built {
            LoadBalancing::ConsistentHash(balancer) => Arc::as_ptr(balancer),
            other => panic!("{other:?}"),
        };
        let build = |policy, endpoints: &[Endpoint], before: Option<&EndpointSet>| {
            let mut unlimited = usize::MAX;
            let (built, is_pending) =
                LoadBalancing::build(policy, endpoints, before, &mut unlimited);
            assert!(!is_pending);
            built
        };
        let mut before = set_of(4);
        before.load_balancing = build(policy(64), &before.endpoints, None);
        let first = table(&before.load_balancing);
        let again =
            |policy, endpoints: &[Endpoint]| table(&build(policy, endpoints, Some(&before)));
        assert_eq!(again(policy(64), &set_of(4).endpoints), first);
        assert_ne!(again(policy(65), &before.endpoints), first);
        assert_ne!(again(policy(64), &set_of(5).endpoints), first);
        let empty = build(policy(64), &[], None);
        assert!(matches!(empty, LoadBalancing::LeastRequest));
    }

    #[test]
    fn a_set_has_the_table_before_while_another_one_is_pending() {
        let (mut before, mut after) = (set_of(4), set_of(5));
        let mut left = 100;
        let (built, is_pending) =
            LoadBalancing::build(policy(64), &before.endpoints, None, &mut left);
        assert_eq!((is_pending, left), (false, 36));
        before.load_balancing = built;
        // The first endpoint is gone, and there is another one behind the others.
        after.endpoints = after.endpoints.iter().skip(1).cloned().collect();
        let (stale, is_pending) =
            LoadBalancing::build(policy(64), &after.endpoints, Some(&before), &mut left);
        assert_eq!((is_pending, left), (true, 36));
        let positions = |built: &LoadBalancing, hash| match built {
            LoadBalancing::ConsistentHash(it) => it.positions(hash, 64).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        for n in 0..100u64 {
            let hash = hash_of(&n.to_le_bytes());
            let kept = positions(&before.load_balancing, hash);
            let kept: Vec<usize> = kept
                .into_iter()
                .filter(|at| *at != 0)
                .map(|at| at - 1)
                .collect();
            assert_eq!(positions(&stale, hash), kept);
        }
        // Back to the endpoints of which the table was built: nothing is pending.
        after.load_balancing = stale;
        let (back, is_pending) =
            LoadBalancing::build(policy(64), &before.endpoints, Some(&after), &mut left);
        assert!(!is_pending);
        assert_eq!(positions(&back, 7), positions(&before.load_balancing, 7));
        // Without a table before, the set has the default.
        let (none, is_pending) =
            LoadBalancing::build(policy(65), &before.endpoints, Some(&before), &mut left);
        assert!(is_pending && matches!(none, LoadBalancing::LeastRequest));
    }
}

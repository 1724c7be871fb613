//! The load balancer of an endpoint set, with the table of one that hashes. Tables are built with
//! the set, never for a request. The engine selects the endpoint. Start with [`LoadBalancing`].

use std::sync::Arc;

use canal_model::load_balancing::{HashCookie, HashKey, HashTableKind, LoadBalancer};
use canal_router::RoutableRequest;
use smallvec::SmallVec;

use super::{Endpoint, EndpointSet};
use crate::hash_table::{HashTable, hash_of, hash_of_all};

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
    table: HashTable,
}

impl HashBalancer {
    /// Returns positions of endpoints in the order in which they take a hash, some several times.
    pub fn positions(&self, hash: u64) -> impl Iterator<Item = usize> {
        self.table.positions(hash)
    }
}

impl LoadBalancing {
    /// Builds the load balancer of a set. It takes the table of the set before if that is the same:
    /// sets change for other reasons than their endpoints.
    pub(crate) fn build(
        policy: LoadBalancer,
        endpoints: &[Endpoint],
        before: Option<&EndpointSet>,
    ) -> Self {
        let hash = match policy {
            LoadBalancer::LeastRequest => return Self::LeastRequest,
            LoadBalancer::RoundRobin => return Self::RoundRobin,
            LoadBalancer::Random => return Self::Random,
            LoadBalancer::ConsistentHash(hash) => *hash,
        };
        if let Some(before) = before
            && let Self::ConsistentHash(balancer) = &before.load_balancing
            && (&balancer.key, balancer.kind) == (&hash.key, hash.table)
            && addresses(&before.endpoints).eq(addresses(endpoints))
        {
            return Self::ConsistentHash(balancer.clone());
        }
        let keys: Vec<String> = addresses(endpoints).map(|it| it.to_string()).collect();
        match HashTable::build(hash.table, &keys) {
            Some(table) => Self::ConsistentHash(Arc::new(HashBalancer {
                key: hash.key,
                kind: hash.table,
                table,
            })),
            // A set with more endpoints than a table has room for has the default.
            None => Self::LeastRequest,
        }
    }
}

fn addresses(endpoints: &[Endpoint]) -> impl Iterator<Item = &std::net::SocketAddr> {
    endpoints.iter().map(|endpoint| &endpoint.address)
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

    #[test]
    fn a_table_is_built_again_only_if_endpoints_or_settings_change() {
        let policy = |size_min| {
            LoadBalancer::ConsistentHash(Box::new(canal_model::load_balancing::ConsistentHash {
                key: HashKey::SourceIp,
                table: HashTableKind::Ring { size_min },
            }))
        };
        let table = |built: &LoadBalancing| match built {
            LoadBalancing::ConsistentHash(balancer) => Arc::as_ptr(balancer),
            other => panic!("{other:?}"),
        };
        let mut before = set_of(4);
        before.load_balancing = LoadBalancing::build(policy(64), &before.endpoints, None);
        let first = table(&before.load_balancing);
        let again = |policy, endpoints: &[Endpoint]| {
            table(&LoadBalancing::build(policy, endpoints, Some(&before)))
        };
        assert_eq!(again(policy(64), &set_of(4).endpoints), first);
        assert_ne!(again(policy(65), &before.endpoints), first);
        assert_ne!(again(policy(64), &set_of(5).endpoints), first);
        let empty = LoadBalancing::build(policy(64), &[], None);
        assert!(matches!(empty, LoadBalancing::LeastRequest));
    }
}

//! Defines to which endpoints a load balancer may send a request. It has its own xxHash64, and looks
//! at every entry of a table.

use canal_model::load_balancing::{ConsistentHash, HashKey, HashTableKind, LoadBalancer};

/// The parts of a request that a load balancer may hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OracleHashedRequest {
    /// Headers as they were sent, with names in lower case.
    pub headers: Vec<(String, String)>,
    pub query: Option<String>,
    /// Address of the client as text, without its port.
    pub client: String,
}

/// Returns the one of these endpoints (`address:port`) that must get the request, if all of them can
/// be reached; `None` if each of them may.
pub fn endpoint<'a>(
    load_balancer: &LoadBalancer,
    endpoints: &[&'a str],
    request: &OracleHashedRequest,
) -> Option<&'a str> {
    let LoadBalancer::ConsistentHash(hash) = load_balancer else {
        return None;
    };
    let ConsistentHash { key, table } = &**hash;
    let hash = hash_of(key, request)?;
    let mut endpoints = endpoints.to_vec();
    endpoints.sort_unstable();
    match *table {
        HashTableKind::Ring { size_min } => on_ring(&endpoints, u64::from(size_min), hash),
        HashTableKind::Maglev { size } => in_maglev(&endpoints, u64::from(size), hash),
    }
}

fn hash_of(key: &HashKey, request: &OracleHashedRequest) -> Option<u64> {
    let values_of = |name: &str| -> Vec<&str> {
        let sent = request.headers.iter().filter(|(sent, _)| sent == name);
        sent.map(|(_, value)| value.as_str()).collect()
    };
    match key {
        HashKey::Header(name) => {
            let mut values = values_of(name);
            values.sort_unstable();
            let hash_next = |seed, value: &&str| xxhash64(seed, value.as_bytes());
            (!values.is_empty()).then(|| values.iter().fold(0, hash_next))
        }
        HashKey::Cookie(cookie) => {
            let line = values_of("cookie").join("; ");
            let mut pairs = line
                .split(';')
                .filter_map(|pair| pair.trim().split_once('='));
            let (_, value) = pairs.find(|(name, _)| *name == cookie.name)?;
            let is_quoted = value.len() > 1 && value.starts_with('"') && value.ends_with('"');
            let value = if is_quoted {
                &value[1..value.len() - 1]
            } else {
                value
            };
            (!value.is_empty()).then(|| xxhash64(0, value.as_bytes()))
        }
        HashKey::SourceIp => Some(xxhash64(0, request.client.as_bytes())),
        HashKey::QueryParameter(name) => {
            let mut parameters = request.query.as_deref()?.split('&');
            let value = parameters.find_map(|parameter| {
                let (sent, value) = parameter.split_once('=').unwrap_or((parameter, ""));
                (sent == name).then_some(value)
            })?;
            Some(xxhash64(0, value.as_bytes()))
        }
    }
}

/// Each endpoint has the same number of entries, `address:port_NUMBER`. The entry with the smallest
/// hash that is not smaller than the request's has it, else the one with the smallest hash.
fn on_ring<'a>(endpoints: &[&'a str], size_min: u64, hash: u64) -> Option<&'a str> {
    let of_each = size_min.div_ceil(endpoints.len().max(1) as u64).max(1);
    let entries = endpoints.iter().flat_map(|endpoint| {
        (0..of_each).map(move |n| (xxhash64(0, format!("{endpoint}_{n}").as_bytes()), *endpoint))
    });
    let (from, before): (Vec<_>, Vec<_>) = entries.partition(|(entry, _)| *entry >= hash);
    let (_, endpoint) = from.iter().min().or(before.iter().min())?;
    Some(endpoint)
}

/// Maglev, listing 1: the endpoints take turns, and each takes the next free entry of its own
/// permutation.
fn in_maglev<'a>(endpoints: &[&'a str], size: u64, hash: u64) -> Option<&'a str> {
    let mut table: Vec<Option<&str>> = vec![None; usize::try_from(size).ok()?];
    let mut next = vec![0u64; endpoints.len()];
    while !endpoints.is_empty() && table.contains(&None) {
        for (endpoint, next) in endpoints.iter().zip(&mut next) {
            if !table.contains(&None) {
                break;
            }
            let offset = xxhash64(0, endpoint.as_bytes()) % size;
            let skip = xxhash64(1, endpoint.as_bytes()) % (size - 1) + 1;
            loop {
                let entry = (offset + *next * skip) % size;
                *next += 1;
                let entry = &mut table[usize::try_from(entry).ok()?];
                if entry.is_none() {
                    *entry = Some(endpoint);
                    break;
                }
            }
        }
    }
    table[usize::try_from(hash % size).ok()?]
}

// The primes of xxHash64, as its specification has them.
const PRIMES: [u64; 5] = [
    0x9e37_79b1_85eb_ca87,
    0xc2b2_ae3d_27d4_eb4f,
    0x1656_67b1_9e37_79f9,
    0x85eb_ca77_c2b2_ae63,
    0x27d4_eb2f_1656_67c5,
];

/// Returns the hash as the specification of XXH64 describes it.
fn xxhash64(seed: u64, input: &[u8]) -> u64 {
    let [p1, p2, p3, p4, p5] = PRIMES;
    // XXH64 reads words in little-endian order.
    let word = |bytes: &[u8]| {
        let bytes = bytes.iter().rev();
        bytes.fold(0u64, |word, byte| word << 8 | u64::from(*byte))
    };
    let round = |lane: u64, input: u64| {
        let lane = lane.wrapping_add(input.wrapping_mul(p2));
        lane.rotate_left(31).wrapping_mul(p1)
    };
    // All constants, and the order of the steps from here on, are those of XXH64's specification.
    let mut stripes = input.chunks_exact(32);
    let mut hash = if input.len() < 32 {
        seed.wrapping_add(p5)
    } else {
        let mut lanes = [
            seed.wrapping_add(p1).wrapping_add(p2),
            seed.wrapping_add(p2),
            seed,
            seed.wrapping_sub(p1),
        ];
        for stripe in stripes.by_ref() {
            for (lane, bytes) in lanes.iter_mut().zip(stripe.chunks(8)) {
                *lane = round(*lane, word(bytes));
            }
        }
        let rotated = lanes.iter().zip([1, 7, 12, 18]);
        let sum = rotated.fold(0u64, |sum, (lane, by)| {
            sum.wrapping_add(lane.rotate_left(by))
        });
        lanes.iter().fold(sum, |hash, lane| {
            let hash = hash ^ round(0, *lane);
            hash.wrapping_mul(p1).wrapping_add(p4)
        })
    };
    hash = hash.wrapping_add(input.len() as u64);
    let mut rest = stripes.remainder();
    while let Some((bytes, after)) = rest.split_at_checked(8) {
        hash ^= round(0, word(bytes));
        hash = hash.rotate_left(27).wrapping_mul(p1).wrapping_add(p4);
        rest = after;
    }
    if let Some((bytes, after)) = rest.split_at_checked(4) {
        hash ^= word(bytes).wrapping_mul(p1);
        hash = hash.rotate_left(23).wrapping_mul(p2).wrapping_add(p3);
        rest = after;
    }
    for byte in rest {
        hash ^= u64::from(*byte).wrapping_mul(p5);
        hash = hash.rotate_left(11).wrapping_mul(p1);
    }
    hash = (hash ^ hash >> 33).wrapping_mul(p2);
    hash = (hash ^ hash >> 29).wrapping_mul(p3);
    hash ^ hash >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_specification() {
        for (seed, text, expected) in [
            (0, "", 0xef46_db37_51d8_e999),
            (0, "a", 0xd24e_c4f1_a98c_6e5b),
            (0, "abc", 0x44bc_2cf5_ad77_0999),
            (
                0,
                "Nobody inspects the spammish repetition",
                0xfbce_a83c_8a37_8bf1,
            ),
        ] {
            assert_eq!(xxhash64(seed, text.as_bytes()), expected, "{text:?}");
        }
    }

    #[test]
    fn only_hashes_determine_the_endpoint() {
        let request = OracleHashedRequest {
            headers: vec![("x-user".into(), "a".into())],
            query: None,
            client: "10.1.1.1".into(),
        };
        let hashed = |key| {
            let table = HashTableKind::Ring { size_min: 16 };
            let hash = LoadBalancer::ConsistentHash(Box::new(ConsistentHash { key, table }));
            endpoint(&hash, &["10.1.0.1:80", "10.1.0.2:80"], &request)
        };
        assert!(hashed(HashKey::Header("x-user".into())).is_some());
        assert_eq!(hashed(HashKey::Header("other".into())), None);
        let random = endpoint(&LoadBalancer::Random, &["10.1.0.1:80"], &request);
        assert_eq!(random, None);
    }
}

//! Wire form of a service's load balancers. What a newer controller may have added is left out, so
//! that the port has the default: it is about quality of service.

use canal_model::load_balancing as m;

use super::ResourceDecodeError;
use super::decode::DecodeContext;
use crate::program as w;

impl From<&m::PortLoadBalancer> for w::PortLoadBalancer {
    fn from(it: &m::PortLoadBalancer) -> Self {
        use w::port_load_balancer::LoadBalancer as Wire;
        let load_balancer = match &it.load_balancer {
            m::LoadBalancer::LeastRequest => None,
            m::LoadBalancer::RoundRobin => Some(Wire::RoundRobin(true)),
            m::LoadBalancer::Random => Some(Wire::Random(true)),
            m::LoadBalancer::ConsistentHash(hash) => Some(Wire::ConsistentHash((&**hash).into())),
        };
        Self {
            port: it.port.into(),
            subset: it.subset.clone(),
            load_balancer,
        }
    }
}

impl From<&m::ConsistentHash> for w::ConsistentHash {
    fn from(hash: &m::ConsistentHash) -> Self {
        use w::consistent_hash::{Key, Table};
        let key = match &hash.key {
            m::HashKey::Header(name) => Key::Header(name.clone()),
            m::HashKey::Cookie(cookie) => Key::Cookie(w::HashCookie {
                name: cookie.name.clone(),
                path: cookie.path.clone(),
                ttl_seconds: cookie.ttl_seconds,
            }),
            m::HashKey::SourceIp => Key::SourceIp(true),
            m::HashKey::QueryParameter(name) => Key::QueryParameter(name.clone()),
        };
        let table = match hash.table {
            m::HashTableKind::Ring { size_min } => Table::Ring(size_min),
            m::HashTableKind::Maglev { size } => Table::Maglev(size),
        };
        Self {
            key: Some(key),
            table: Some(table),
        }
    }
}

pub(super) fn decode(
    at: &DecodeContext<'_>,
    received: &[w::PortLoadBalancer],
) -> Result<Vec<m::PortLoadBalancer>, ResourceDecodeError> {
    const FIELD: &str = "load_balancers";
    if received.len() > m::LOAD_BALANCERS_PER_SERVICE_MAX {
        let max = m::LOAD_BALANCERS_PER_SERVICE_MAX;
        return at.err(FIELD, format!("has {}, more than {max}", received.len()));
    }
    let mut decoded = Vec::with_capacity(received.len());
    let mut entries = 0u32;
    for it in received {
        let port = at.port("load_balancers.port", it.port)?;
        let Some(load_balancer) = load_balancer(it) else {
            continue;
        };
        if let m::LoadBalancer::ConsistentHash(hash) = &load_balancer {
            if !hash.key.is_valid() || !hash.table.is_valid() {
                return at.err(FIELD, format!("{hash:?} is not valid"));
            }
            entries = entries.saturating_add(hash.table.entries());
        }
        decoded.push(m::PortLoadBalancer {
            port,
            subset: it.subset.clone(),
            load_balancer,
        });
    }
    if entries > m::HASH_ENTRIES_PER_SERVICE_MAX {
        let max = m::HASH_ENTRIES_PER_SERVICE_MAX;
        return at.err(
            FIELD,
            format!("have {entries} entries of tables, more than {max}"),
        );
    }
    Ok(decoded)
}

/// Returns the load balancer; `None` for one that this version does not know.
fn load_balancer(received: &w::PortLoadBalancer) -> Option<m::LoadBalancer> {
    use w::port_load_balancer::LoadBalancer as Wire;
    Some(match received.load_balancer.as_ref()? {
        Wire::RoundRobin(_) => m::LoadBalancer::RoundRobin,
        Wire::Random(_) => m::LoadBalancer::Random,
        Wire::ConsistentHash(hash) => {
            m::LoadBalancer::ConsistentHash(Box::new(consistent_hash(hash)?))
        }
    })
}

fn consistent_hash(received: &w::ConsistentHash) -> Option<m::ConsistentHash> {
    use w::consistent_hash::{Key, Table};
    let key = match received.key.as_ref()? {
        Key::Header(name) => m::HashKey::Header(name.clone()),
        Key::Cookie(cookie) => m::HashKey::Cookie(m::HashCookie {
            name: cookie.name.clone(),
            path: cookie.path.clone(),
            ttl_seconds: cookie.ttl_seconds,
        }),
        Key::SourceIp(_) => m::HashKey::SourceIp,
        Key::QueryParameter(name) => m::HashKey::QueryParameter(name.clone()),
    };
    let table = match *received.table.as_ref()? {
        Table::Ring(size_min) => m::HashTableKind::Ring { size_min },
        Table::Maglev(size) => m::HashTableKind::Maglev { size },
    };
    Some(m::ConsistentHash { key, table })
}

/// Returns load balancers of every kind, for the tests of all resources.
#[cfg(test)]
pub(super) fn samples() -> Vec<m::PortLoadBalancer> {
    let hash =
        |key, table| m::LoadBalancer::ConsistentHash(Box::new(m::ConsistentHash { key, table }));
    let cookie = |ttl_seconds| {
        m::HashKey::Cookie(m::HashCookie {
            name: "user".into(),
            path: "/a".into(),
            ttl_seconds,
        })
    };
    let ring = m::HashTableKind::Ring { size_min: 1024 };
    let maglev = m::HashTableKind::Maglev { size: 65_537 };
    let all = [
        m::LoadBalancer::RoundRobin,
        m::LoadBalancer::Random,
        hash(m::HashKey::Header("x-user".into()), ring),
        hash(m::HashKey::SourceIp, maglev),
        hash(m::HashKey::QueryParameter("user".into()), ring),
        hash(cookie(None), ring),
        hash(cookie(Some(0)), ring),
    ];
    let numbered = all.into_iter().zip(9080..);
    let numbered = numbered.map(|(load_balancer, port)| m::PortLoadBalancer {
        port,
        subset: [("version".to_owned(), "v1".to_owned())].into(),
        load_balancer,
    });
    numbered.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(received: Vec<w::PortLoadBalancer>) -> Result<usize, String> {
        decode(&DecodeContext("alpha/b/reviews"), &received)
            .map(|all| all.len())
            .map_err(|error| error.to_string())
    }

    fn hashed(
        key: w::consistent_hash::Key,
        table: w::consistent_hash::Table,
    ) -> w::PortLoadBalancer {
        let hash = w::ConsistentHash {
            key: Some(key),
            table: Some(table),
        };
        w::PortLoadBalancer {
            port: 80,
            subset: Default::default(),
            load_balancer: Some(w::port_load_balancer::LoadBalancer::ConsistentHash(hash)),
        }
    }

    #[test]
    fn unknown_load_balancers_are_the_default_and_invalid_ones_are_refused() {
        use w::consistent_hash::{Key, Table};
        let unknown = w::PortLoadBalancer {
            port: 80,
            subset: Default::default(),
            load_balancer: None,
        };
        assert_eq!(decoded(vec![unknown]), Ok(0));
        let source = || Key::SourceIp(true);
        assert_eq!(decoded(vec![hashed(source(), Table::Ring(8))]), Ok(1));
        for refused in [
            vec![hashed(source(), Table::Ring(0))],
            vec![hashed(source(), Table::Maglev(8))],
            vec![hashed(Key::Header("X y".into()), Table::Ring(8))],
            vec![hashed(source(), Table::Ring(m::HASH_ENTRIES_PER_SERVICE_MAX)); 2],
            vec![hashed(source(), Table::Ring(1)); m::LOAD_BALANCERS_PER_SERVICE_MAX + 1],
        ] {
            let error = decoded(refused).unwrap_err();
            assert!(error.contains("load_balancers"), "{error}");
        }
    }
}

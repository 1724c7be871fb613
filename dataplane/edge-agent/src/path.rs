//! Computes where this edge sends a session, for an operator's query, by the same tables as the
//! program. Pure.

use std::net::SocketAddr;

use canal_model::ids::{ReplicaNumber, ServiceId};
use canal_model::program::BUCKETS;
use canal_wire::fleet::{SessionPath, SessionQuery};
use canal_wire::tier::{TUNNEL_PORT, flow_hash};

use crate::config::EdgeDeviceConfig;
use crate::desired_maps::EdgeMapContent;

/// Returns the path of a session, or `None` if the query cannot be parsed.
pub(crate) fn decide_path(
    content: &EdgeMapContent,
    place: &EdgeDeviceConfig,
    query: &SessionQuery,
) -> Option<SessionPath> {
    let client: SocketAddr = query.client.parse().ok()?;
    let service = ServiceId::new(query.service).ok()?;
    let hash = flow_hash(client, u16::try_from(query.port).ok()?, service);
    let bucket = hash as usize % BUCKETS;
    let mut path = SessionPath {
        query: query.id,
        bucket: bucket as u32,
        ..SessionPath::default()
    };
    // Without a table the service has no chains, so the path ends here.
    let Some(table) = content.tables.get(&service) else {
        return Some(path);
    };
    path.table_version = table.version;
    // 0 marks the first empty place of a chain.
    let numbers = table.chains[bucket]
        .iter()
        .copied()
        .take_while(|number| *number != 0);
    path.chain = numbers.map(u32::from).collect();
    // The program skips a replica that is not in the map, too.
    let slots = path.chain.iter().filter_map(|number| {
        Some((
            *number,
            content.replicas.get(&ReplicaNumber::new(*number).ok()?)?,
        ))
    });
    let Some((number, slot)) = slots.into_iter().find(|(_, slot)| slot.up) else {
        // No replica of the chain is up: the edge drops the packets of the session. Only the first
        // packet of a new one goes to the chain's first replica.
        return Some(path);
    };
    // The program uses the low bits of the hash for the bucket and the high half for the tunnel.
    let upper = (hash >> 16) as usize;
    path.tunnel_port = match content.tunnels.get(&slot.address) {
        // Without aggregation each flow has a tunnel of its own.
        // As the program, the edge uses the dynamic ports from 49152 on, which RFC 7348 §5
        // recommends.
        _ if !place.aggregate => 0xc000 | hash >> 16,
        Some(ports) if !ports.is_empty() => ports[upper % ports.len()].into(),
        // `--tunnels` is at least 1; the maximum keeps other callers from a division by 0.
        _ => u32::from(TUNNEL_PORT) + (upper % usize::from(place.tunnels.max(1))) as u32,
    };
    path.replica = number;
    Some(path)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    use canal_model::ids::Vni;
    use canal_model::program::CHAIN_LENGTH_MAX;

    use super::*;
    use crate::desired_maps::{ChainTable, ReplicaEntry};

    fn number(n: u32) -> ReplicaNumber {
        ReplicaNumber::new(n).unwrap()
    }

    fn address(n: u8) -> Ipv4Addr {
        Ipv4Addr::new(250, 1, 0, n)
    }

    /// Returns maps with a service 7, whose chains are all replica 2 and then replica 1. Only
    /// replica 2 has tunnels of its own.
    fn content_of_two_replicas() -> EdgeMapContent {
        let mut chains = [[0; CHAIN_LENGTH_MAX]; BUCKETS];
        chains
            .iter_mut()
            .for_each(|chain| chain[..2].copy_from_slice(&[2, 1]));
        EdgeMapContent {
            tables: [(
                ServiceId::new(7).unwrap(),
                Arc::new(ChainTable {
                    vni: Vni::new(101).unwrap(),
                    version: 5,
                    chains,
                }),
            )]
            .into(),
            replicas: [1, 2]
                .map(|n| {
                    (
                        number(n),
                        ReplicaEntry {
                            address: address(n as u8),
                            up: true,
                        },
                    )
                })
                .into(),
            tunnels: [(address(2), Arc::new(vec![41_000]))].into(),
            ..EdgeMapContent::default()
        }
    }

    #[test]
    fn a_path_names_the_first_replica_that_is_up_and_its_tunnel() {
        let mut content = content_of_two_replicas();
        let mut place = EdgeDeviceConfig {
            device: String::new(),
            pin_dir: "/".into(),
            address: address(254),
            tunnels: 1,
            aggregate: true,
            mtu: 1500,
        };
        let query = SessionQuery {
            id: 9,
            client: "[fd00::9]:4000".into(),
            service: 7,
            port: 80,
        };
        let path = decide_path(&content, &place, &query).unwrap();
        assert_eq!(
            (
                path.query,
                path.table_version,
                &path.chain[..],
                path.replica,
                path.tunnel_port
            ),
            (9, 5, &[2, 1][..], 2, 41_000)
        );
        assert_eq!(
            path.bucket as usize,
            canal_wire::tier::bucket(
                "[fd00::9]:4000".parse().unwrap(),
                80,
                ServiceId::new(7).unwrap()
            )
        );
        content.replicas.get_mut(&number(2)).unwrap().up = false;
        let skipped = decide_path(&content, &place, &query).unwrap();
        assert_eq!(
            (skipped.replica, skipped.tunnel_port),
            (1, u32::from(TUNNEL_PORT)),
            "the settings' tunnels"
        );
        // Without aggregation the port is derived from the flow, within the upper quarter of all
        // ports.
        place.aggregate = false;
        assert!(decide_path(&content, &place, &query).unwrap().tunnel_port >= 0xc000);
        content.replicas.clear();
        // Without any replica the path ends at the chain, and 0 stands for none.
        assert_eq!(decide_path(&content, &place, &query).unwrap().replica, 0);
        let other = SessionQuery {
            service: 8,
            ..query.clone()
        };
        // Service 8 has no table, so the path ends before the chain.
        assert!(
            decide_path(&content, &place, &other)
                .unwrap()
                .chain
                .is_empty()
        );
        // An address without a port is no client.
        assert_eq!(
            decide_path(
                &content,
                &place,
                &SessionQuery {
                    client: "10.1.1.9".into(),
                    ..query
                }
            ),
            None
        );
    }
}

//! Decides the writes from the actual to the desired content of the maps, in an order in which no
//! packet meets half a change. Pure.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use canal_model::ids::{ReplicaNumber, ServiceId, Vni};
use canal_offload::reconcile::{ReconcilerPass, reconcile};
use ipnet::IpNet;

use crate::desired_maps::{ChainTable, EdgeMapContent, NodeNextHop, ReplicaEntry, ReturnEntry};

/// One write: an element to put, or to remove (`None`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MapWrite {
    Replica(ReplicaNumber, Option<ReplicaEntry>),
    Host(Ipv4Addr, Option<u16>),
    Table(ServiceId, Option<Arc<ChainTable>>),
    Return(ServiceId, Option<ReturnEntry>),
    Prefix((Vni, IpNet), Option<NodeNextHop>),
    Node((Vni, Ipv4Addr), Option<()>),
    Address((Vni, IpAddr), Option<ServiceId>),
    Tunnels(Ipv4Addr, Option<Arc<Vec<u16>>>),
}

/// Writes what turns `have` into `want`, and applies each successful write to `have`. An element is
/// added before those that refer to it and removed after them; all additions come before all
/// removals.
pub fn write_differences(
    pass: &mut ReconcilerPass<String>,
    want: &EdgeMapContent,
    have: &mut EdgeMapContent,
    write: &mut dyn FnMut(MapWrite) -> Result<(), String>,
) {
    use MapWrite::{Address, Host, Node, Prefix, Replica, Return, Table, Tunnels};
    pass.put_missing("canal_tunnels", &want.tunnels, &mut have.tunnels, |k, v| {
        write(Tunnels(*k, Some(v.clone())))
    });
    pass.put_missing(
        "canal_replicas",
        &want.replicas,
        &mut have.replicas,
        |k, v| write(Replica(*k, Some(*v))),
    );
    pass.put_missing("canal_hosts", &want.hosts, &mut have.hosts, |k, v| {
        write(Host(*k, Some(*v)))
    });
    pass.put_missing(
        "canal_prefixes",
        &want.prefixes,
        &mut have.prefixes,
        |k, v| write(Prefix(*k, Some(*v))),
    );
    pass.put_missing("canal_returns", &want.returns, &mut have.returns, |k, v| {
        write(Return(*k, Some(*v)))
    });
    pass.put_missing("canal_tables", &want.tables, &mut have.tables, |k, v| {
        write(Table(*k, Some(v.clone())))
    });
    pass.put_missing("canal_nodes", &want.nodes, &mut have.nodes, |k, ()| {
        write(Node(*k, Some(())))
    });
    pass.put_missing(
        "canal_addresses",
        &want.addresses,
        &mut have.addresses,
        |k, v| write(Address(*k, Some(*v))),
    );

    pass.remove_stale(
        "canal_addresses",
        &want.addresses,
        &mut have.addresses,
        |k| write(Address(*k, None)),
    );
    pass.remove_stale("canal_nodes", &want.nodes, &mut have.nodes, |k| {
        write(Node(*k, None))
    });
    pass.remove_stale("canal_tables", &want.tables, &mut have.tables, |k| {
        write(Table(*k, None))
    });
    pass.remove_stale("canal_returns", &want.returns, &mut have.returns, |k| {
        write(Return(*k, None))
    });
    pass.remove_stale("canal_prefixes", &want.prefixes, &mut have.prefixes, |k| {
        write(Prefix(*k, None))
    });
    pass.remove_stale("canal_hosts", &want.hosts, &mut have.hosts, |k| {
        write(Host(*k, None))
    });
    pass.remove_stale("canal_replicas", &want.replicas, &mut have.replicas, |k| {
        write(Replica(*k, None))
    });
    pass.remove_stale("canal_tunnels", &want.tunnels, &mut have.tunnels, |k| {
        write(Tunnels(*k, None))
    });
}

/// Returns the number of elements in which `actual` differs from `expected`.
pub fn count_differences(actual: &EdgeMapContent, expected: &EdgeMapContent) -> usize {
    let mut content = actual.clone();
    let total =
        reconcile(|pass| write_differences(pass, expected, &mut content, &mut |_| Ok(()))).total();
    total.put + total.removed
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use super::*;

    impl MapWrite {
        /// Returns the name of the map, and whether the write puts an element.
        fn label(&self) -> (&'static str, bool) {
            match self {
                MapWrite::Replica(_, v) => ("canal_replicas", v.is_some()),
                MapWrite::Host(_, v) => ("canal_hosts", v.is_some()),
                MapWrite::Table(_, v) => ("canal_tables", v.is_some()),
                MapWrite::Return(_, v) => ("canal_returns", v.is_some()),
                MapWrite::Prefix(_, v) => ("canal_prefixes", v.is_some()),
                MapWrite::Node(_, v) => ("canal_nodes", v.is_some()),
                MapWrite::Address(_, v) => ("canal_addresses", v.is_some()),
                MapWrite::Tunnels(_, v) => ("canal_tunnels", v.is_some()),
            }
        }
    }

    /// Returns the writes that turn `have` into `want`.
    pub(crate) fn decide_steps(have: &EdgeMapContent, want: &EdgeMapContent) -> Vec<MapWrite> {
        let mut content = have.clone();
        let mut steps = Vec::new();
        reconcile(|pass| {
            write_differences(pass, want, &mut content, &mut |write| {
                steps.push(write);
                Ok(())
            });
        });
        assert_eq!(content, *want);
        steps
    }

    /// Applies a write to `content`, as the kernel does.
    pub(crate) fn take(content: &mut EdgeMapContent, step: &MapWrite) {
        fn set<K: Ord + Clone, V: Clone>(map: &mut BTreeMap<K, V>, key: &K, value: &Option<V>) {
            match value {
                Some(v) => drop(map.insert(key.clone(), v.clone())),
                None => drop(map.remove(key)),
            }
        }
        match step {
            MapWrite::Replica(k, v) => set(&mut content.replicas, k, v),
            MapWrite::Host(k, v) => set(&mut content.hosts, k, v),
            MapWrite::Table(k, v) => set(&mut content.tables, k, v),
            MapWrite::Return(k, v) => set(&mut content.returns, k, v),
            MapWrite::Prefix(k, v) => set(&mut content.prefixes, k, v),
            MapWrite::Node(k, v) => set(&mut content.nodes, k, v),
            MapWrite::Address(k, v) => set(&mut content.addresses, k, v),
            MapWrite::Tunnels(k, v) => set(&mut content.tunnels, k, v),
        }
    }

    fn vni(n: u32) -> Vni {
        Vni::new(n).unwrap()
    }
    fn id(n: u32) -> ServiceId {
        ServiceId::new(n).unwrap()
    }
    fn number(n: u32) -> ReplicaNumber {
        ReplicaNumber::new(n).unwrap()
    }

    /// Returns the maps of one service `n` with everything it needs.
    fn service(n: u8) -> EdgeMapContent {
        let (v, s, host) = (vni(101), id(n.into()), Ipv4Addr::new(250, 1, 0, n));
        let v4 = Ipv4Addr::new(10, 255, 0, n);
        let table = ChainTable {
            vni: v,
            version: 1,
            chains: [[n.into(); canal_model::program::CHAIN_LENGTH_MAX];
                canal_model::program::BUCKETS],
        };
        let node = Ipv4Addr::new(172, 16, 0, n);
        EdgeMapContent {
            addresses: [((v, IpAddr::V4(v4)), s)].into(),
            returns: [(
                s,
                ReturnEntry {
                    vni: v,
                    v4: Some(v4),
                    v6: None,
                },
            )]
            .into(),
            prefixes: [(
                (
                    v,
                    IpNet::new(IpAddr::V4(Ipv4Addr::new(10, 1, n, 0)), 24).unwrap(),
                ),
                NodeNextHop { node, mac: [2; 6] },
            )]
            .into(),
            nodes: [((v, node), ())].into(),
            tables: [(s, Arc::new(table))].into(),
            replicas: [(
                number(n.into()),
                ReplicaEntry {
                    address: host,
                    up: true,
                },
            )]
            .into(),
            hosts: [(host, n.into())].into(),
            tunnels: [(host, Arc::new(vec![40_000, 40_000 + u16::from(n)]))].into(),
        }
    }

    fn order(steps: &[MapWrite]) -> Vec<(&'static str, bool)> {
        steps.iter().map(MapWrite::label).collect()
    }

    #[test]
    fn referenced_entries_are_added_first_and_removed_last() {
        let coming = [
            "canal_tunnels",
            "canal_replicas",
            "canal_hosts",
            "canal_prefixes",
            "canal_returns",
            "canal_tables",
            "canal_nodes",
            "canal_addresses",
        ];
        let coming: Vec<_> = coming.into_iter().map(|m| (m, true)).collect();
        let going = [
            "canal_addresses",
            "canal_nodes",
            "canal_tables",
            "canal_returns",
            "canal_prefixes",
            "canal_hosts",
            "canal_replicas",
            "canal_tunnels",
        ];
        let going: Vec<_> = going.into_iter().map(|m| (m, false)).collect();
        let (none, one, two) = (EdgeMapContent::default(), service(1), service(2));
        assert_eq!(order(&decide_steps(&none, &one)), coming);
        assert_eq!(order(&decide_steps(&one, &none)), going);
        assert_eq!(order(&decide_steps(&one, &two)), [coming, going].concat());
        assert_eq!(decide_steps(&one, &one), []);
    }

    #[test]
    fn a_change_is_one_put_and_the_steps_lead_there() {
        let have = service(1);
        let mut want = have.clone();
        let mut table = ChainTable::clone(&want.tables[&id(1)]);
        table.version = 2;
        want.tables.insert(id(1), Arc::new(table));
        want.replicas.insert(
            number(1),
            ReplicaEntry {
                address: Ipv4Addr::new(250, 1, 0, 1),
                up: false,
            },
        );
        let steps = decide_steps(&have, &want);
        assert_eq!(
            order(&steps),
            [("canal_replicas", true), ("canal_tables", true)]
        );
        for (from, to) in [
            (&have, &want),
            (&service(1), &service(2)),
            (&EdgeMapContent::default(), &want),
            (&want, &EdgeMapContent::default()),
        ] {
            let mut content = from.clone();
            decide_steps(from, to)
                .iter()
                .for_each(|s| take(&mut content, s));
            assert_eq!(content, *to);
        }
    }
}

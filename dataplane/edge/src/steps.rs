//! From what the maps hold to what they should hold, element by element, in an order in which no packet meets half a change. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use canal_model::ids::{ReplicaNumber, ServiceId, Vni};
use ipnet::IpNet;

use crate::maps::{Content, Return, Slot, Table, Via};

/// One write: an element put, or (`None`) removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Replica(ReplicaNumber, Option<Slot>),
    Host(Ipv4Addr, Option<u16>),
    Table(ServiceId, Option<Arc<Table>>),
    Return(ServiceId, Option<Return>),
    Prefix((Vni, IpNet), Option<Via>),
    Node((Vni, Ipv4Addr), Option<()>),
    Address((Vni, IpAddr), Option<ServiceId>),
}

impl Step {
    /// The map's name.
    pub fn map(&self) -> &'static str {
        match self {
            Step::Replica(..) => "canal_replicas",
            Step::Host(..) => "canal_hosts",
            Step::Table(..) => "canal_tables",
            Step::Return(..) => "canal_returns",
            Step::Prefix(..) => "canal_prefixes",
            Step::Node(..) => "canal_nodes",
            Step::Address(..) => "canal_addresses",
        }
    }
}

/// Both maps are sorted, and are walked side by side: all of it is looked at with each change.
fn puts<K: Ord + Clone, V: PartialEq + Clone>(have: &BTreeMap<K, V>, want: &BTreeMap<K, V>) -> Vec<(K, Option<V>)> {
    let mut there = have.iter().peekable();
    let mut fresh = Vec::new();
    for (key, value) in want {
        while there.next_if(|(other, _)| *other < key).is_some() {}
        if there.peek().is_none_or(|(other, old)| *other != key || *old != value) {
            fresh.push((key.clone(), Some(value.clone())));
        }
    }
    fresh
}

fn removals<K: Ord + Clone, V>(have: &BTreeMap<K, V>, want: &BTreeMap<K, V>) -> Vec<(K, Option<V>)> {
    let mut there = want.keys().peekable();
    let mut gone = Vec::new();
    for key in have.keys() {
        while there.next_if(|other| *other < key).is_some() {}
        if there.peek().is_none_or(|other| *other != key) {
            gone.push((key.clone(), None));
        }
    }
    gone
}

fn only_in<K: Ord + Copy>(a: &BTreeSet<K>, b: &BTreeSet<K>) -> Vec<K> {
    a.difference(b).copied().collect()
}

/// The writes that turn `have` into `want`: what is pointed at comes before what points at it, and goes after it; everything comes
/// before anything goes.
pub fn decide_steps(have: &Content, want: &Content) -> Vec<Step> {
    let mut steps = Vec::new();
    steps.extend(puts(&have.replicas, &want.replicas).into_iter().map(|(k, v)| Step::Replica(k, v)));
    steps.extend(puts(&have.hosts, &want.hosts).into_iter().map(|(k, v)| Step::Host(k, v)));
    steps.extend(puts(&have.prefixes, &want.prefixes).into_iter().map(|(k, v)| Step::Prefix(k, v)));
    steps.extend(puts(&have.returns, &want.returns).into_iter().map(|(k, v)| Step::Return(k, v)));
    steps.extend(puts(&have.tables, &want.tables).into_iter().map(|(k, v)| Step::Table(k, v)));
    steps.extend(only_in(&want.nodes, &have.nodes).into_iter().map(|k| Step::Node(k, Some(()))));
    steps.extend(puts(&have.addresses, &want.addresses).into_iter().map(|(k, v)| Step::Address(k, v)));

    steps.extend(removals(&have.addresses, &want.addresses).into_iter().map(|(k, v)| Step::Address(k, v)));
    steps.extend(only_in(&have.nodes, &want.nodes).into_iter().map(|k| Step::Node(k, None)));
    steps.extend(removals(&have.tables, &want.tables).into_iter().map(|(k, v)| Step::Table(k, v)));
    steps.extend(removals(&have.returns, &want.returns).into_iter().map(|(k, v)| Step::Return(k, v)));
    steps.extend(removals(&have.prefixes, &want.prefixes).into_iter().map(|(k, v)| Step::Prefix(k, v)));
    steps.extend(removals(&have.hosts, &want.hosts).into_iter().map(|(k, v)| Step::Host(k, v)));
    steps.extend(removals(&have.replicas, &want.replicas).into_iter().map(|(k, v)| Step::Replica(k, v)));
    steps
}

/// `content` after a step.
pub fn take(content: &mut Content, step: &Step) {
    fn set<K: Ord + Clone, V: Clone>(map: &mut BTreeMap<K, V>, key: &K, value: &Option<V>) {
        match value {
            Some(v) => drop(map.insert(key.clone(), v.clone())),
            None => drop(map.remove(key)),
        }
    }
    match step {
        Step::Replica(k, v) => set(&mut content.replicas, k, v),
        Step::Host(k, v) => set(&mut content.hosts, k, v),
        Step::Table(k, v) => set(&mut content.tables, k, v),
        Step::Return(k, v) => set(&mut content.returns, k, v),
        Step::Prefix(k, v) => set(&mut content.prefixes, k, v),
        Step::Node(k, Some(())) => drop(content.nodes.insert(*k)),
        Step::Node(k, None) => drop(content.nodes.remove(k)),
        Step::Address(k, v) => set(&mut content.addresses, k, v),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vni(n: u32) -> Vni {
        Vni::new(n).unwrap()
    }
    fn id(n: u32) -> ServiceId {
        ServiceId::new(n).unwrap()
    }
    fn number(n: u32) -> ReplicaNumber {
        ReplicaNumber::new(n).unwrap()
    }

    /// One service `n` with everything it needs.
    fn service(n: u8) -> Content {
        let (v, s, host) = (vni(101), id(n.into()), Ipv4Addr::new(250, 1, 0, n));
        let v4 = Ipv4Addr::new(10, 255, 0, n);
        let table = Table { vni: v, version: 1, chains: [[n.into(); canal_model::program::CHAIN]; canal_model::program::BUCKETS] };
        let node = Ipv4Addr::new(172, 16, 0, n);
        Content {
            addresses: [((v, IpAddr::V4(v4)), s)].into(),
            returns: [(s, Return { vni: v, v4: Some(v4), v6: None })].into(),
            prefixes: [((v, IpNet::new(IpAddr::V4(Ipv4Addr::new(10, 1, n, 0)), 24).unwrap()), Via { node, mac: [2; 6] })].into(),
            nodes: [(v, node)].into(),
            tables: [(s, Arc::new(table))].into(),
            replicas: [(number(n.into()), Slot { address: host, up: true })].into(),
            hosts: [(host, n.into())].into(),
        }
    }

    fn order(steps: &[Step]) -> Vec<(&'static str, bool)> {
        steps
            .iter()
            .map(|s| {
                let put = match s {
                    Step::Replica(_, v) => v.is_some(),
                    Step::Host(_, v) => v.is_some(),
                    Step::Table(_, v) => v.is_some(),
                    Step::Return(_, v) => v.is_some(),
                    Step::Prefix(_, v) => v.is_some(),
                    Step::Node(_, v) => v.is_some(),
                    Step::Address(_, v) => v.is_some(),
                };
                (s.map(), put)
            })
            .collect()
    }

    #[test]
    fn what_is_pointed_at_comes_first_and_goes_last_and_all_comes_before_any_goes() {
        let coming = ["canal_replicas", "canal_hosts", "canal_prefixes", "canal_returns", "canal_tables", "canal_nodes", "canal_addresses"];
        let coming: Vec<_> = coming.into_iter().map(|m| (m, true)).collect();
        let going = ["canal_addresses", "canal_nodes", "canal_tables", "canal_returns", "canal_prefixes", "canal_hosts", "canal_replicas"];
        let going: Vec<_> = going.into_iter().map(|m| (m, false)).collect();
        let (none, one, two) = (Content::default(), service(1), service(2));
        assert_eq!(order(&decide_steps(&none, &one)), coming);
        assert_eq!(order(&decide_steps(&one, &none)), going);
        assert_eq!(order(&decide_steps(&one, &two)), [coming, going].concat());
        assert_eq!(decide_steps(&one, &one), []);
    }

    #[test]
    fn a_change_is_one_put_and_the_steps_lead_there() {
        let have = service(1);
        let mut want = have.clone();
        let mut table = Table::clone(&want.tables[&id(1)]);
        table.version = 2;
        want.tables.insert(id(1), Arc::new(table));
        want.replicas.insert(number(1), Slot { address: Ipv4Addr::new(250, 1, 0, 1), up: false });
        let steps = decide_steps(&have, &want);
        assert_eq!(order(&steps), [("canal_replicas", true), ("canal_tables", true)]);
        for (from, to) in [(&have, &want), (&service(1), &service(2)), (&Content::default(), &want), (&want, &Content::default())] {
            let mut content = from.clone();
            decide_steps(from, to).iter().for_each(|s| take(&mut content, s));
            assert_eq!(content, *to);
        }
    }
}

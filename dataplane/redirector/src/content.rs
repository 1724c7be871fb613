//! From all that the controller said to what the redirector's maps should hold. Pure; nothing is written here.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use canal_model::ids::AzName;
use canal_model::program::{BucketTable, Rate, Resource, Throttle};

/// Whose limits, with the service's ID or the tenant's VNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    Service(u32),
    Tenant(u32),
}

/// Early limits; a rate of 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rates {
    pub sessions: Rate,
    pub packets: Rate,
}

/// A replica's slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    pub address: Ipv4Addr,
    pub up: bool,
}

/// What the controller ordered this replica itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Orders {
    /// Its number in bucket tables.
    pub number: u16,
    /// Its AZ's edge, once one is known.
    pub edge: Option<Ipv4Addr>,
    /// Who may speak with the tier's VNI.
    pub hosts: BTreeSet<Ipv4Addr>,
    pub drain: bool,
}

/// What is, or should be, in the maps. Tables stay what the controller sent, so that an unchanged one is told by its pointer.
#[derive(Debug, Clone, Default)]
pub struct Content {
    pub tables: BTreeMap<u32, Arc<Resource>>,
    pub replicas: BTreeMap<u16, Slot>,
    /// 0: a host of the tier that is no replica.
    pub hosts: BTreeMap<Ipv4Addr, u16>,
    pub throttles: BTreeMap<Scope, Rates>,
    /// Of the orders: number and edge; `None` while there were none.
    pub own: Option<(u16, Option<Ipv4Addr>)>,
}

/// The table in a resource.
pub fn table(resource: &Resource) -> Option<&BucketTable> {
    if let Resource::Table(table) = resource { Some(table) } else { None }
}

/// What the maps of a replica in `az` should hold. Two that claim one place: the lesser name has it.
pub fn decide_content<'a>(resources: impl Iterator<Item = &'a Arc<Resource>>, az: &AzName, orders: Option<&Orders>) -> Content {
    let mut content = Content::default();
    for resource in resources {
        match &**resource {
            Resource::Table(table) if table.az == *az => {
                let held = content.tables.entry(table.id.get()).or_insert_with(|| resource.clone());
                if resource.name() < held.name() {
                    *held = resource.clone();
                }
            }
            Resource::Replica(replica) => {
                content.replicas.insert(replica.number.get(), Slot { address: replica.underlay, up: replica.up });
            }
            Resource::Throttle(throttle) => {
                if let Some(scope) = scope(throttle) {
                    content.throttles.insert(scope, Rates { sessions: throttle.sessions, packets: throttle.packets });
                }
            }
            _ => {}
        }
    }
    if let Some(orders) = orders {
        content.own = Some((orders.number, orders.edge));
        content.hosts = orders.hosts.iter().chain(&orders.edge).map(|host| (*host, 0)).collect();
        // Only hosts that the controller names may speak: a replica that it has forgotten may not.
        for (number, slot) in &content.replicas {
            if let Some(known) = content.hosts.get_mut(&slot.address) {
                *known = *number;
            }
        }
    }
    content
}

fn scope(throttle: &Throttle) -> Option<Scope> {
    match (&throttle.service, throttle.id) {
        (Some(_), Some(id)) => Some(Scope::Service(id.get())),
        // A service that has no ID yet has no sessions either.
        (Some(_), None) => None,
        (None, _) => Some(Scope::Tenant(throttle.vni.get())),
    }
}

/// Whether a replica may own sessions of the table although it is not the head of their bucket: only then does anybody need to know.
pub fn decide_behind(table: &BucketTable, number: u16) -> bool {
    table.chains.iter().any(|chain| chain.iter().skip(1).any(|member| member.get() == number))
}

/// A replica that drains waits so long for all buckets to lead elsewhere; some may be held by the sessions of others.
pub const PARTING_PATIENCE: Duration = Duration::from_secs(5);

/// Whether a replica that drains (for so long) should ask its clients to leave: once all buckets lead new sessions to others, or they would be
/// back at once. After a while it is enough that more than half of each service's do; where there is nobody else, they never do.
pub fn decide_parting<'a>(drains: Option<Duration>, number: u16, mut tables: impl Iterator<Item = &'a BucketTable>) -> bool {
    let Some(drains) = drains.filter(|_| number != 0) else { return false };
    let heads = |table: &BucketTable| table.chains.iter().filter(|chain| chain.first().is_some_and(|head| head.get() == number)).count();
    tables.all(|table| heads(table) == 0 || (drains >= PARTING_PATIENCE && heads(table) * 2 < table.chains.len()))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use canal_model::ids::{ReplicaNumber, ServiceId, Vni};
    use canal_model::program::{BUCKETS, Replica};

    pub(crate) fn table_of(service: &str, id: u32, az: &str, version: u32, chain: &[u32]) -> Arc<Resource> {
        let chain: Vec<_> = chain.iter().map(|n| ReplicaNumber::new(*n).unwrap()).collect();
        Arc::new(Resource::Table(BucketTable {
            service: service.parse().unwrap(),
            id: ServiceId::new(id).unwrap(),
            az: az.parse().unwrap(),
            vni: Vni::new(101).unwrap(),
            version,
            chains: vec![chain; BUCKETS],
        }))
    }

    pub(crate) fn replica(name: &str, number: u32, underlay: &str, up: bool) -> Arc<Resource> {
        Arc::new(Resource::Replica(Replica {
            name: name.parse().unwrap(),
            number: ReplicaNumber::new(number).unwrap(),
            backend: "b1".parse().unwrap(),
            az: "az1".parse().unwrap(),
            underlay: underlay.parse().unwrap(),
            up,
        }))
    }

    pub(crate) fn throttle(service: Option<&str>, id: Option<u32>, per_second: u32) -> Arc<Resource> {
        Arc::new(Resource::Throttle(Throttle {
            tenant: "alpha".parse().unwrap(),
            vni: Vni::new(101).unwrap(),
            service: service.map(|s| s.parse().unwrap()),
            id: id.map(|id| ServiceId::new(id).unwrap()),
            sessions: Rate { per_second, burst: 1 },
            packets: Rate::default(),
            requests: Rate::default(),
        }))
    }

    #[test]
    fn maps_hold_what_is_of_this_az_and_ordered() {
        let all = [
            table_of("alpha/default/web", 7, "az1", 3, &[1, 2]),
            table_of("alpha/default/web", 7, "az2", 9, &[5]),
            replica("gw-1", 1, "250.1.0.1", true),
            replica("gw-2", 2, "250.1.0.2", false),
            throttle(Some("alpha/default/web"), Some(7), 10),
            throttle(Some("alpha/default/new"), None, 11),
            throttle(None, None, 12),
        ];
        let az = "az1".parse().unwrap();
        let before = decide_content(all.iter(), &az, None);
        assert!(before.own.is_none() && before.hosts.is_empty());
        let hosts = ["250.1.0.1", "250.2.0.9"].iter().map(|h| h.parse().unwrap()).collect();
        let edge: Ipv4Addr = "250.1.0.200".parse().unwrap();
        let content = decide_content(all.iter(), &az, Some(&Orders { number: 1, edge: Some(edge), hosts, drain: false }));
        assert_eq!(table(&content.tables[&7]).unwrap().version, 3);
        assert_eq!(content.replicas[&2], Slot { address: "250.1.0.2".parse().unwrap(), up: false });
        let host = |h: &str| content.hosts.get(&h.parse::<Ipv4Addr>().unwrap()).copied();
        assert_eq!([host("250.1.0.1"), host("250.2.0.9"), host("250.1.0.200"), host("250.1.0.2")], [Some(1), Some(0), Some(0), None]);
        assert_eq!(content.throttles.keys().collect::<Vec<_>>(), [&Scope::Service(7), &Scope::Tenant(101)]);
        assert_eq!(content.own, Some((1, Some(edge))));
    }

    #[test]
    fn only_members_behind_a_head_are_asked_for_their_sessions() {
        for (chain, number, want) in [(&[1, 2][..], 1, false), (&[1, 2], 2, true), (&[1, 2], 3, false), (&[], 1, false)] {
            let resource = table_of("alpha/default/web", 7, "az1", 1, chain);
            assert_eq!(decide_behind(table(&resource).unwrap(), number), want, "{chain:?} {number}");
        }
    }

    #[test]
    fn clients_are_asked_to_leave_when_no_bucket_leads_here() {
        let of = |heads_here: usize| {
            let Resource::Table(mut table) = Arc::unwrap_or_clone(table_of("alpha/b/c", 7, "az1", 1, &[3, 2])) else { unreachable!() };
            table.chains.iter_mut().take(heads_here).for_each(|chain| chain.reverse());
            table
        };
        let (none, some, half, all) = (of(0), of(BUCKETS / 2 - 1), of(BUCKETS / 2), of(BUCKETS));
        let (at_once, late) = (Some(Duration::ZERO), Some(PARTING_PATIENCE));
        for (what, drains, number, tables, want) in [
            ("serving", None, 2, vec![&none], false),
            ("all buckets moved", at_once, 2, vec![&none], true),
            ("no service", at_once, 2, vec![], true),
            ("one service not moved", at_once, 2, vec![&none, &some], false),
            ("some are held for long", late, 2, vec![&none, &some], true),
            ("half are held for long", late, 2, vec![&none, &half], false),
            ("nobody else", late, 2, vec![&none, &all], false),
            ("before any orders", late, 0, vec![&none], false),
        ] {
            assert_eq!(decide_parting(drains, number, tables.into_iter()), want, "{what}");
        }
    }
}

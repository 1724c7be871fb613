//! From all that the controller said to what the redirector's maps should hold: which tables and early limits, as far as tenants' shares
//! go, and which part of each limit is this replica's. Pure; nothing is written here. Start at [`decide_content`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use canal_abi::tier::{SERVICES_MAX, THROTTLES_MAX};
use canal_model::ids::{AzName, TenantName};
use canal_model::program::{BUCKETS, BucketTable, Kind, Rate, Resource, Tenant, Throttle};
use canal_model::share::{MapDemand, Omission, ShareKind, decide_omitted};

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
    /// How much of them is this replica's, in 1/[`BUCKETS`].
    pub part: u32,
}

/// What the content depends on besides what the controller said.
#[derive(Default)]
pub struct ContentRules<'a> {
    /// What the maps hold already, which stays where not all of a tenant's entries fit.
    pub held: Option<&'a dyn HeldEntries>,
}

/// Which entries the maps hold.
pub trait HeldEntries {
    fn has_table(&self, service: u32) -> bool;
    fn has_throttle(&self, scope: Scope) -> bool;
}

/// A resource that is not in the maps, because its tenant has used up its share of one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct OmittedEntry {
    pub map: &'static str,
    pub tenant: TenantName,
    pub kind: Kind,
    pub name: String,
    pub why: String,
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
    /// What the controller said that is beyond a tenant's share.
    pub omitted: BTreeSet<OmittedEntry>,
}

/// The table in a resource.
pub fn table(resource: &Resource) -> Option<&BucketTable> {
    if let Resource::Table(table) = resource { Some(table) } else { None }
}

/// What the maps of a replica in `az` should hold. Two that claim one place: the lesser name has it. No tenant has more of a map than its
/// share, and what one leaves out is no other's.
pub fn decide_content<'a>(
    resources: impl Iterator<Item = &'a Arc<Resource>>,
    az: &AzName,
    orders: Option<&Orders>,
    rules: &ContentRules<'_>,
) -> Content {
    let mut content = Content::default();
    let mut tenants: BTreeMap<&TenantName, &Tenant> = BTreeMap::new();
    let mut throttles: BTreeMap<Scope, &Throttle> = BTreeMap::new();
    for resource in resources {
        match &**resource {
            Resource::Tenant(tenant) => drop(tenants.insert(&tenant.name, tenant)),
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
                    throttles.insert(scope, throttle);
                }
            }
            _ => {}
        }
    }
    omit_tables(&mut content, &tenants, rules);
    omit_throttles(&mut throttles, &mut content.omitted, &tenants, rules);
    content.throttles = decide_rates(&content, orders.map_or(0, |orders| orders.number), &throttles);
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

fn share_of(capacity: u32, tenants: &BTreeMap<&TenantName, &Tenant>, tenant: &TenantName) -> usize {
    let kind = ShareKind::EdgeMapEntries;
    let share = tenants.get(tenant).map_or_else(|| kind.default_share(), |tenant| tenant.shares.get(kind));
    usize::try_from(share.of(capacity.into())).unwrap_or(usize::MAX)
}

fn why(map: &str, omission: Omission) -> String {
    let key = ShareKind::EdgeMapEntries.key();
    match omission {
        Omission::Share(most) => {
            format!("its tenant's share of {map} is {most} entries; fix: use fewer, or raise spec.shares.{key} of the Tenant")
        }
        Omission::Full(most) => {
            format!("{map} holds {most} entries, and its tenant is among the largest holders; fix: move tenants to another AZ")
        }
    }
}

fn omit_tables(content: &mut Content, tenants: &BTreeMap<&TenantName, &Tenant>, rules: &ContentRules<'_>) {
    let is_held = |id: u32| rules.held.is_some_and(|held| held.has_table(id));
    let of = content.tables.iter().filter_map(|(id, resource)| Some((*id, &table(resource)?.service.tenant)));
    let demands: Vec<_> = of.map(|(id, tenant)| MapDemand { tenant, key: id, is_held: is_held(id) }).collect();
    let share = |tenant: &TenantName| share_of(SERVICES_MAX, tenants, tenant);
    let omitted = decide_omitted(SERVICES_MAX as usize, &demands, share);
    for (id, omission) in omitted {
        let Some(resource) = content.tables.remove(&id) else { continue };
        let Some(tenant) = resource.tenant().cloned() else { continue };
        let (map, name) = ("canal_tables", resource.name());
        content.omitted.insert(OmittedEntry { map, tenant, kind: Kind::Table, name, why: why(map, omission) });
    }
}

fn omit_throttles(
    throttles: &mut BTreeMap<Scope, &Throttle>,
    omitted: &mut BTreeSet<OmittedEntry>,
    tenants: &BTreeMap<&TenantName, &Tenant>,
    rules: &ContentRules<'_>,
) {
    let is_held = |scope: Scope| rules.held.is_some_and(|held| held.has_throttle(scope));
    // The whole tenant's limit is the last to be left out.
    let demands: Vec<_> = throttles
        .iter()
        .map(|(scope, throttle)| MapDemand {
            tenant: &throttle.tenant,
            key: (matches!(scope, Scope::Service(_)), *scope),
            is_held: is_held(*scope),
        })
        .collect();
    let share = |tenant: &TenantName| share_of(THROTTLES_MAX, tenants, tenant);
    for ((_, scope), omission) in decide_omitted(THROTTLES_MAX as usize, &demands, share) {
        if let Some(throttle) = throttles.remove(&scope) {
            let (map, tenant) = ("canal_throttles", throttle.tenant.clone());
            let name = throttle.service.as_ref().map_or_else(|| tenant.to_string(), ToString::to_string);
            omitted.insert(OmittedEntry { map, tenant, kind: Kind::Throttle, name, why: why(map, omission) });
        }
    }
}

/// The limits with this replica's part of each. The provider's default for a tenant comes as a Throttle of the whole tenant.
fn decide_rates(content: &Content, number: u16, throttles: &BTreeMap<Scope, &Throttle>) -> BTreeMap<Scope, Rates> {
    let all: Vec<_> = throttles.iter().map(|(scope, throttle)| (*scope, throttle.sessions, throttle.packets)).collect();
    if all.is_empty() {
        return BTreeMap::new();
    }
    // A tenant's limit must let through what its busiest service may use, wherever that lives: the largest part of any service counts.
    let mut parts: BTreeMap<Scope, u32> = BTreeMap::new();
    for (id, table) in content.tables.iter().filter_map(|(id, resource)| Some((*id, table(resource)?))) {
        let part = decide_part(table, number, &content.replicas);
        parts.insert(Scope::Service(id), part);
        let whole = parts.entry(Scope::Tenant(table.vni.get())).or_default();
        *whole = part.max(*whole);
    }
    let part = |scope: &Scope| parts.get(scope).copied().unwrap_or(BUCKETS as u32);
    all.into_iter().map(|(scope, sessions, packets)| (scope, Rates { sessions, packets, part: part(&scope) })).collect()
}

/// How much of a service's limit is replica `number`'s, in 1/[`BUCKETS`]: as many buckets as an edge sends to it, each to the first of its
/// chain that is up. A replica that gets none by this table may still get some by an edge's, while tables change: it has an equal part, of
/// which it uses nothing otherwise.
pub fn decide_part(table: &BucketTable, number: u16, replicas: &BTreeMap<u16, Slot>) -> u32 {
    let is_up = |member: &u16| replicas.get(member).is_none_or(|slot| slot.up);
    let entry = |chain: &Vec<canal_model::ids::ReplicaNumber>| chain.iter().map(|member| member.get()).find(is_up);
    let mut buckets: BTreeMap<u16, u32> = BTreeMap::new();
    for number in table.chains.iter().filter_map(entry) {
        *buckets.entry(number).or_default() += 1;
    }
    match (number, buckets.get(&number)) {
        (0, _) => BUCKETS as u32,
        (_, Some(own)) => *own,
        (_, None) => (BUCKETS / buckets.len().max(1)) as u32,
    }
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
        let rules = ContentRules::default();
        let before = decide_content(all.iter(), &az, None, &rules);
        assert!(before.own.is_none() && before.hosts.is_empty());
        let hosts = ["250.1.0.1", "250.2.0.9"].iter().map(|h| h.parse().unwrap()).collect();
        let edge: Ipv4Addr = "250.1.0.200".parse().unwrap();
        let orders = Orders { number: 1, edge: Some(edge), hosts, drain: false };
        let content = decide_content(all.iter(), &az, Some(&orders), &rules);
        assert_eq!(table(&content.tables[&7]).unwrap().version, 3);
        assert_eq!(content.replicas[&2], Slot { address: "250.1.0.2".parse().unwrap(), up: false });
        let host = |h: &str| content.hosts.get(&h.parse::<Ipv4Addr>().unwrap()).copied();
        assert_eq!([host("250.1.0.1"), host("250.2.0.9"), host("250.1.0.200"), host("250.1.0.2")], [Some(1), Some(0), Some(0), None]);
        assert_eq!(content.throttles.keys().collect::<Vec<_>>(), [&Scope::Service(7), &Scope::Tenant(101)]);
        assert_eq!(content.own, Some((1, Some(edge))));
    }

    fn tenant(name: &str, vni: u32, share: &str) -> Arc<Resource> {
        let mut shares = canal_model::share::Shares::default();
        shares.set(ShareKind::EdgeMapEntries, share.parse().unwrap());
        Arc::new(Resource::Tenant(Tenant {
            name: name.parse().unwrap(),
            vni: Vni::new(vni).unwrap(),
            trust_domain: "example".parse().unwrap(),
            pod_cidrs: Vec::new(),
            gateway_cidrs: Vec::new(),
            outside: Default::default(),
            keys: Default::default(),
            resolvers: Vec::new(),
            shares,
        }))
    }

    fn orders(number: u16) -> Orders {
        Orders { number, ..Orders::default() }
    }

    /// Heads by bucket as the planner spreads them, some down: the parts of all replicas make the whole limit.
    #[test]
    fn parts_of_a_limit_are_by_the_buckets_that_enter_here_and_make_the_whole() {
        let members =
            |replicas: u32| -> Vec<_> { (1..=replicas).map(|n| replica(&format!("g{n}"), n, &format!("250.1.0.{n}"), n != 2)).collect() };
        for replicas in 1..=8u32 {
            let mut table = table_of("alpha/default/web", 7, "az1", 1, &[1]);
            if let Resource::Table(table) = Arc::make_mut(&mut table) {
                for (bucket, chain) in table.chains.iter_mut().enumerate() {
                    let at = |place: u32| ReplicaNumber::new((bucket as u32 + place) % replicas + 1).unwrap();
                    *chain = (0..replicas).map(at).collect();
                }
            }
            let all: Vec<_> = [table, throttle(Some("alpha/default/web"), Some(7), 100), throttle(None, None, 100)]
                .into_iter()
                .chain(members(replicas))
                .collect();
            let az = "az1".parse().unwrap();
            let part = |number: u16, scope| {
                decide_content(all.iter(), &az, Some(&orders(number)), &ContentRules::default()).throttles[&scope].part
            };
            for scope in [Scope::Service(7), Scope::Tenant(101)] {
                let parts: Vec<u32> = (1..=replicas as u16).filter(|n| *n != 2).map(|n| part(n, scope)).collect();
                assert_eq!(parts.iter().sum::<u32>(), BUCKETS as u32, "{replicas} replicas: {parts:?}");
            }
            // The one that is down, and one that is in no chain, get nothing by this table; an older one of an edge may lead there yet.
            assert_eq!(part(9, Scope::Service(7)), BUCKETS as u32 / (replicas - u32::from(replicas > 1)));
        }
        assert_eq!(decide_part(table(&table_of("a/b/c", 7, "az1", 1, &[1, 2])).unwrap(), 0, &BTreeMap::new()), BUCKETS as u32);
    }

    #[test]
    fn a_tenants_limit_lets_its_busiest_service_use_all_of_it() {
        // On two shards of two replicas each.
        let all =
            [table_of("alpha/default/web", 7, "az1", 1, &[1]), table_of("alpha/default/db", 8, "az1", 1, &[2]), throttle(None, None, 100)];
        let az = "az1".parse().unwrap();
        for number in [1, 2] {
            let content = decide_content(all.iter(), &az, Some(&orders(number)), &ContentRules::default());
            assert_eq!(content.throttles[&Scope::Tenant(101)].part, BUCKETS as u32);
        }
    }

    #[test]
    fn a_tenant_beyond_its_share_loses_its_newest_entries_and_nobody_elses() {
        /// Alpha's service 9 was there before.
        struct Nine;
        impl HeldEntries for Nine {
            fn has_table(&self, service: u32) -> bool {
                service == 9
            }
            fn has_throttle(&self, _: Scope) -> bool {
                false
            }
        }
        let alphas = [1, 2, 3, 9].map(|id| table_of(&format!("alpha/default/s{id}"), id, "az1", 1, &[1]));
        let limits = [1, 2, 3].map(|id| throttle(Some(&format!("alpha/default/s{id}")), Some(id), 1));
        let all: Vec<_> = [tenant("alpha", 101, "2"), tenant("beta", 102, "2"), table_of("beta/default/web", 900, "az1", 1, &[1])]
            .into_iter()
            .chain(alphas)
            .chain(limits)
            .chain([throttle(None, None, 1)])
            .collect();
        let rules = ContentRules { held: Some(&Nine) };
        let content = decide_content(all.iter(), &"az1".parse().unwrap(), None, &rules);
        assert_eq!(content.tables.keys().copied().collect::<Vec<_>>(), [1, 9, 900]);
        assert_eq!(content.throttles.keys().copied().collect::<Vec<_>>(), [Scope::Service(1), Scope::Tenant(101)]);
        let names: Vec<_> = content.omitted.iter().map(|e| (e.kind, e.name.as_str(), e.tenant.as_str())).collect();
        let expected = [
            (Kind::Table, "alpha/default/s2@az1", "alpha"),
            (Kind::Table, "alpha/default/s3@az1", "alpha"),
            (Kind::Throttle, "alpha/default/s2", "alpha"),
            (Kind::Throttle, "alpha/default/s3", "alpha"),
        ];
        assert_eq!(names, expected);
        assert!(content.omitted.iter().all(|e| e.why.contains("share") && e.why.contains("fix: ")));
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

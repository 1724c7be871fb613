//! Desired content of the redirector's maps, derived from the controller's resources: tables and
//! throttles within the tenants' shares.
//!
//! It also decides which part of each throttle is this replica's. Pure; nothing is written here.
//! Start at [`decide_content`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use canal_abi::tier::{SERVICES_MAX, THROTTLES_MAX};
use canal_model::ids::{AzName, TenantName};
use canal_model::program::{
    BUCKETS, BucketTable, RateLimit, Resource, ResourceKind, Tenant, Throttle,
};
use canal_model::share::{MapDemand, Omission, ShareKind, decide_omitted};

/// Scope of a throttle: a service by its ID, or a tenant by its VNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ThrottleScope {
    Service(u32),
    Tenant(u32),
}

/// Rates of a throttle; a rate of 0 is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThrottleRates {
    pub sessions: RateLimit,
    pub packets: RateLimit,
    /// Part of the rates that is this replica's, in 1/[`BUCKETS`].
    pub part: u32,
}

/// Inputs of the content besides the controller's resources and orders.
#[derive(Default)]
pub struct ContentRules<'a> {
    /// Entries that the maps contain already; they stay where not all entries of a tenant fit.
    pub present: Option<&'a dyn HeldEntries>,
}

/// Reports which entries the maps contain.
pub trait HeldEntries {
    fn has_table(&self, service: u32) -> bool;
    fn has_throttle(&self, scope: ThrottleScope) -> bool;
}

/// A resource that is not in its map, because its tenant has used up its share, or because the map
/// is full.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct OmittedByShare {
    pub map: &'static str,
    pub tenant: TenantName,
    pub kind: ResourceKind,
    pub name: String,
    pub why: String,
}

/// Address and state of a replica in the maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RedirectorReplica {
    pub address: Ipv4Addr,
    pub up: bool,
}

/// The controller's orders to this replica.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ControllerOrders {
    /// Number of this replica in bucket tables.
    pub number: u16,
    /// Edge of this replica's AZ, once one is known.
    pub edge: Option<Ipv4Addr>,
    /// Hosts that may send with the tier's VNI.
    pub hosts: BTreeSet<Ipv4Addr>,
    pub drain: bool,
}

/// Actual or desired content of the maps. Tables are the controller's resources, so that an
/// unchanged one is recognized by its pointer.
#[derive(Debug, Clone, Default)]
pub struct RedirectorMapContent {
    pub tables: BTreeMap<u32, Arc<Resource>>,
    pub replicas: BTreeMap<u16, RedirectorReplica>,
    /// Number of the replica on each host of the tier; 0: the host is not a replica.
    pub hosts: BTreeMap<Ipv4Addr, u16>,
    pub throttles: BTreeMap<ThrottleScope, ThrottleRates>,
    /// Number and edge from the orders; `None` as long as there were none.
    pub own: Option<(u16, Option<Ipv4Addr>)>,
    /// Resources of the controller that are not in the maps.
    pub omitted: BTreeSet<OmittedByShare>,
}

/// Returns the bucket table in a resource.
pub fn table(resource: &Resource) -> Option<&BucketTable> {
    if let Resource::Table(table) = resource {
        Some(table)
    } else {
        None
    }
}

/// Returns the content that the maps of a replica in `az` should have. If two tables have the same
/// service ID, the one with the smaller name is used. Of two replicas with one number, and of two
/// throttles with one scope, the last one is used. No tenant has more of a map than its share, and
/// a tenant beyond it loses only entries of its own.
pub fn decide_content<'a>(
    resources: impl Iterator<Item = &'a Arc<Resource>>,
    az: &AzName,
    orders: Option<&ControllerOrders>,
    rules: &ContentRules<'_>,
) -> RedirectorMapContent {
    let mut content = RedirectorMapContent::default();
    let mut tenants: BTreeMap<&TenantName, &Tenant> = BTreeMap::new();
    let mut throttles: BTreeMap<ThrottleScope, &Throttle> = BTreeMap::new();
    for resource in resources {
        match &**resource {
            Resource::Tenant(tenant) => drop(tenants.insert(&tenant.name, tenant)),
            Resource::Table(table) if table.az == *az => {
                let kept_resource = content
                    .tables
                    .entry(table.id.get())
                    .or_insert_with(|| resource.clone());
                // The names decide, so that the order of the resources does not matter.
                if resource.name() < kept_resource.name() {
                    *kept_resource = resource.clone();
                }
            }
            Resource::Replica(replica) => {
                content.replicas.insert(
                    replica.number.get(),
                    RedirectorReplica {
                        address: replica.underlay,
                        up: replica.up,
                    },
                );
            }
            Resource::Throttle(throttle) => {
                // A service without an ID has no sessions to throttle, so it has no scope.
                if let Some(scope) = scope(throttle) {
                    throttles.insert(scope, throttle);
                }
            }
            // Tables of other AZs, and kinds that have no map here.
            _ => {}
        }
    }
    omit_tables(&mut content, &tenants, rules);
    omit_throttles(&mut throttles, &mut content.omitted, &tenants, rules);
    content.throttles = decide_rates(
        &content,
        // Number 0 is that of no replica: without orders the own part is unknown.
        orders.map_or(0, |orders| orders.number),
        &throttles,
    );
    // Without orders the own number and the hosts of an earlier process stay in force.
    if let Some(orders) = orders {
        content.own = Some((orders.number, orders.edge));
        content.hosts = orders
            .hosts
            .iter()
            .chain(&orders.edge)
            .map(|host| (*host, 0))
            .collect();
        // Only hosts that the controller names may send: a replica that it no longer names may not.
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
    let share = tenants
        .get(tenant)
        .map_or_else(|| kind.default_share(), |tenant| tenant.shares.get(kind));
    usize::try_from(share.of(capacity.into())).unwrap_or(usize::MAX)
}

fn why(map: &str, omission: Omission) -> String {
    let key = ShareKind::EdgeMapEntries.key();
    match omission {
        Omission::Share(most) => {
            format!(
                "its tenant's share of {map} is {most} entries; fix: use fewer, or raise spec.shares.{key} of the Tenant"
            )
        }
        Omission::Full(most) => {
            format!(
                "{map} has space for {most} entries, and its tenant has the largest share; fix: move tenants to another AZ"
            )
        }
    }
}

fn omit_tables(
    content: &mut RedirectorMapContent,
    tenants: &BTreeMap<&TenantName, &Tenant>,
    rules: &ContentRules<'_>,
) {
    let is_held = |id: u32| rules.present.is_some_and(|present| present.has_table(id));
    let of = content
        .tables
        .iter()
        .filter_map(|(id, resource)| Some((*id, &table(resource)?.service.tenant)));
    let demands: Vec<_> = of
        .map(|(id, tenant)| MapDemand {
            tenant,
            key: id,
            is_held: is_held(id),
        })
        .collect();
    let share = |tenant: &TenantName| share_of(SERVICES_MAX, tenants, tenant);
    let omitted = decide_omitted(SERVICES_MAX as usize, &demands, share);
    for (id, omission) in omitted {
        let Some(resource) = content.tables.remove(&id) else {
            continue;
        };
        let Some(tenant) = resource.tenant().cloned() else {
            continue;
        };
        let (map, name) = ("canal_tables", resource.name());
        content.omitted.insert(OmittedByShare {
            map,
            tenant,
            kind: ResourceKind::Table,
            name,
            why: why(map, omission),
        });
    }
}

fn omit_throttles(
    throttles: &mut BTreeMap<ThrottleScope, &Throttle>,
    omitted: &mut BTreeSet<OmittedByShare>,
    tenants: &BTreeMap<&TenantName, &Tenant>,
    rules: &ContentRules<'_>,
) {
    let is_held = |scope: ThrottleScope| {
        rules
            .present
            .is_some_and(|present| present.has_throttle(scope))
    };
    // The limit of the whole tenant is the last one to be left out.
    let demands: Vec<_> = throttles
        .iter()
        .map(|(scope, throttle)| MapDemand {
            tenant: &throttle.tenant,
            key: (matches!(scope, ThrottleScope::Service(_)), *scope),
            is_held: is_held(*scope),
        })
        .collect();
    let share = |tenant: &TenantName| share_of(THROTTLES_MAX, tenants, tenant);
    for ((_, scope), omission) in decide_omitted(THROTTLES_MAX as usize, &demands, share) {
        if let Some(throttle) = throttles.remove(&scope) {
            let (map, tenant) = ("canal_throttles", throttle.tenant.clone());
            let name = throttle
                .service
                .as_ref()
                .map_or_else(|| tenant.to_string(), ToString::to_string);
            omitted.insert(OmittedByShare {
                map,
                tenant,
                kind: ResourceKind::Throttle,
                name,
                why: why(map, omission),
            });
        }
    }
}

/// Returns the rates with this replica's part of each. The provider's default for a tenant arrives
/// as a Throttle of the whole tenant.
fn decide_rates(
    content: &RedirectorMapContent,
    number: u16,
    throttles: &BTreeMap<ThrottleScope, &Throttle>,
) -> BTreeMap<ThrottleScope, ThrottleRates> {
    let all: Vec<_> = throttles
        .iter()
        .map(|(scope, throttle)| (*scope, throttle.sessions, throttle.packets))
        .collect();
    // Without limits the buckets need not be counted.
    if all.is_empty() {
        return BTreeMap::new();
    }
    // A tenant's limit must admit what its busiest service may use, wherever that is: the largest
    // part of any service counts.
    let mut parts: BTreeMap<ThrottleScope, u32> = BTreeMap::new();
    for (id, table) in content
        .tables
        .iter()
        .filter_map(|(id, resource)| Some((*id, table(resource)?)))
    {
        let part = decide_part(table, number, &content.replicas);
        parts.insert(ThrottleScope::Service(id), part);
        let whole = parts
            .entry(ThrottleScope::Tenant(table.vni.get()))
            .or_default();
        *whole = part.max(*whole);
    }
    // Without a bucket table there are no buckets to divide the limit by.
    let part = |scope: &ThrottleScope| parts.get(scope).copied().unwrap_or(BUCKETS as u32);
    all.into_iter()
        .map(|(scope, sessions, packets)| {
            (
                scope,
                ThrottleRates {
                    sessions,
                    packets,
                    part: part(&scope),
                },
            )
        })
        .collect()
}

/// Returns replica `number`'s part of a service's limit, in 1/[`BUCKETS`]. It is the number of
/// buckets that an edge sends to the replica: each bucket goes to the first member of its chain
/// that is up. A replica without a bucket in this table may still get some by an edge's table while
/// tables change. It has an equal part, which it does not use otherwise.
pub fn decide_part(
    table: &BucketTable,
    number: u16,
    replicas: &BTreeMap<u16, RedirectorReplica>,
) -> u32 {
    let is_up = |member: &u16| replicas.get(member).is_none_or(|slot| slot.up);
    let entry = |chain: &Vec<canal_model::ids::ReplicaNumber>| {
        chain.iter().map(|member| member.get()).find(is_up)
    };
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

fn scope(throttle: &Throttle) -> Option<ThrottleScope> {
    match (&throttle.service, throttle.id) {
        (Some(_), Some(id)) => Some(ThrottleScope::Service(id.get())),
        // A service without an ID has no sessions either.
        (Some(_), None) => None,
        (None, _) => Some(ThrottleScope::Tenant(throttle.vni.get())),
    }
}

/// Returns whether a replica may own sessions of the table without being the head of their bucket.
/// Only such sessions must be reported.
pub fn decide_behind(table: &BucketTable, number: u16) -> bool {
    table
        .chains
        .iter()
        .any(|chain| chain.iter().skip(1).any(|member| member.get() == number))
}

/// Time that a draining replica waits until all buckets lead elsewhere; sessions of other replicas
/// may delay some. Nobody measured this value. It is far below the 30 s that a drain has by
/// default, so that clients still have time to leave.
pub const SOFT_DRAIN_DELAY: Duration = Duration::from_secs(5);

/// Returns whether a replica that has been draining for `drains` should start its soft drain. It
/// should once all buckets lead new sessions to other replicas, because its clients would be back
/// at once before. After [`SOFT_DRAIN_DELAY`] it suffices that more than half of each service's
/// buckets do; without another replica they never do.
pub fn decide_soft_drain<'a>(
    drains: Option<Duration>,
    number: u16,
    mut tables: impl Iterator<Item = &'a BucketTable>,
) -> bool {
    let Some(drains) = drains.filter(|_| number != 0) else {
        return false;
    };
    let heads = |table: &BucketTable| {
        table
            .chains
            .iter()
            .filter(|chain| chain.first().is_some_and(|head| head.get() == number))
            .count()
    };
    tables.all(|table| {
        heads(table) == 0 || (drains >= SOFT_DRAIN_DELAY && heads(table) * 2 < table.chains.len())
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use canal_model::ids::{ReplicaNumber, ServiceId, Vni};
    use canal_model::program::{BUCKETS, Replica};

    pub(crate) fn table_of(
        service: &str,
        id: u32,
        az: &str,
        version: u32,
        chain: &[u32],
    ) -> Arc<Resource> {
        let chain: Vec<_> = chain
            .iter()
            .map(|n| ReplicaNumber::new(*n).unwrap())
            .collect();
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

    pub(crate) fn throttle(
        service: Option<&str>,
        id: Option<u32>,
        per_second: u32,
    ) -> Arc<Resource> {
        Arc::new(Resource::Throttle(Throttle {
            tenant: "alpha".parse().unwrap(),
            vni: Vni::new(101).unwrap(),
            service: service.map(|s| s.parse().unwrap()),
            id: id.map(|id| ServiceId::new(id).unwrap()),
            sessions: RateLimit {
                per_second,
                burst: 1,
            },
            packets: RateLimit::default(),
            requests: RateLimit::default(),
        }))
    }

    #[test]
    fn maps_hold_the_ordered_entries_of_this_az() {
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
        let hosts = ["250.1.0.1", "250.2.0.9"]
            .iter()
            .map(|h| h.parse().unwrap())
            .collect();
        let edge: Ipv4Addr = "250.1.0.200".parse().unwrap();
        let orders = ControllerOrders {
            number: 1,
            edge: Some(edge),
            hosts,
            drain: false,
        };
        let content = decide_content(all.iter(), &az, Some(&orders), &rules);
        assert_eq!(table(&content.tables[&7]).unwrap().version, 3);
        assert_eq!(
            content.replicas[&2],
            RedirectorReplica {
                address: "250.1.0.2".parse().unwrap(),
                up: false
            }
        );
        let host = |h: &str| content.hosts.get(&h.parse::<Ipv4Addr>().unwrap()).copied();
        // A host that is no replica has number 0. A replica that the orders do not name is no host.
        assert_eq!(
            [
                host("250.1.0.1"),
                host("250.2.0.9"),
                host("250.1.0.200"),
                host("250.1.0.2")
            ],
            [Some(1), Some(0), Some(0), None]
        );
        // A service without a number has no key in the map yet.
        assert_eq!(
            content.throttles.keys().collect::<Vec<_>>(),
            [&ThrottleScope::Service(7), &ThrottleScope::Tenant(101)]
        );
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
            outbound_traffic_policy: Default::default(),
            keys: Default::default(),
            resolvers: Vec::new(),
            shares,
        }))
    }

    fn orders(number: u16) -> ControllerOrders {
        ControllerOrders {
            number,
            ..ControllerOrders::default()
        }
    }

    /// Heads are spread over the buckets as the planner does, with one replica down. The parts of
    /// all replicas make up the whole limit.
    #[test]
    fn parts_of_a_limit_are_by_the_buckets_that_enter_here_and_make_the_whole() {
        let members = |replicas: u32| -> Vec<_> {
            (1..=replicas)
                .map(|n| replica(&format!("g{n}"), n, &format!("250.1.0.{n}"), n != 2))
                .collect()
        };
        // Eight is the length of the longest chain.
        for replicas in 1..=8u32 {
            let mut table = table_of("alpha/default/web", 7, "az1", 1, &[1]);
            if let Resource::Table(table) = Arc::make_mut(&mut table) {
                for (bucket, chain) in table.chains.iter_mut().enumerate() {
                    let at = |place: u32| {
                        ReplicaNumber::new((bucket as u32 + place) % replicas + 1).unwrap()
                    };
                    *chain = (0..replicas).map(at).collect();
                }
            }
            let all: Vec<_> = [
                table,
                throttle(Some("alpha/default/web"), Some(7), 100),
                throttle(None, None, 100),
            ]
            .into_iter()
            .chain(members(replicas))
            .collect();
            let az = "az1".parse().unwrap();
            let part = |number: u16, scope| {
                decide_content(
                    all.iter(),
                    &az,
                    Some(&orders(number)),
                    &ContentRules::default(),
                )
                .throttles[&scope]
                    .part
            };
            for scope in [ThrottleScope::Service(7), ThrottleScope::Tenant(101)] {
                let parts: Vec<u32> = (1..=replicas as u16)
                    .filter(|n| *n != 2)
                    .map(|n| part(n, scope))
                    .collect();
                assert_eq!(
                    parts.iter().sum::<u32>(),
                    BUCKETS as u32,
                    "{replicas} replicas: {parts:?}"
                );
            }
            // By this table, a replica that is down or in no chain gets no session, but an edge's
            // older table may still lead there.
            assert_eq!(
                part(9, ThrottleScope::Service(7)),
                // Replica 2 is down if there is more than one.
                BUCKETS as u32 / (replicas - u32::from(replicas > 1))
            );
        }
        // A replica without a number cannot know its buckets, so it has the whole limit.
        assert_eq!(
            decide_part(
                table(&table_of("a/b/c", 7, "az1", 1, &[1, 2])).unwrap(),
                0,
                &BTreeMap::new()
            ),
            BUCKETS as u32
        );
    }

    #[test]
    fn a_tenants_limit_is_fully_usable_by_its_busiest_service() {
        // The services are on two shards.
        let all = [
            table_of("alpha/default/web", 7, "az1", 1, &[1]),
            table_of("alpha/default/db", 8, "az1", 1, &[2]),
            throttle(None, None, 100),
        ];
        let az = "az1".parse().unwrap();
        for number in [1, 2] {
            let content = decide_content(
                all.iter(),
                &az,
                Some(&orders(number)),
                &ContentRules::default(),
            );
            assert_eq!(
                content.throttles[&ThrottleScope::Tenant(101)].part,
                BUCKETS as u32
            );
        }
    }

    #[test]
    fn a_tenant_beyond_its_share_loses_only_its_newest_entries() {
        /// Maps that contain service 9 of alpha already.
        struct Nine;
        impl HeldEntries for Nine {
            fn has_table(&self, service: u32) -> bool {
                service == 9
            }
            fn has_throttle(&self, _: ThrottleScope) -> bool {
                false
            }
        }
        let alphas =
            [1, 2, 3, 9].map(|id| table_of(&format!("alpha/default/s{id}"), id, "az1", 1, &[1]));
        let limits =
            [1, 2, 3].map(|id| throttle(Some(&format!("alpha/default/s{id}")), Some(id), 1));
        let all: Vec<_> = [
            tenant("alpha", 101, "2"),
            tenant("beta", 102, "2"),
            table_of("beta/default/web", 900, "az1", 1, &[1]),
        ]
        .into_iter()
        .chain(alphas)
        .chain(limits)
        .chain([throttle(None, None, 1)])
        .collect();
        let rules = ContentRules {
            present: Some(&Nine),
        };
        let content = decide_content(all.iter(), &"az1".parse().unwrap(), None, &rules);
        assert_eq!(
            content.tables.keys().copied().collect::<Vec<_>>(),
            // Two tables are alpha's share. The maps have 9 already, so only one of the others
            // fits.
            [1, 9, 900]
        );
        assert_eq!(
            content.throttles.keys().copied().collect::<Vec<_>>(),
            // The limit of the whole tenant comes before those of its services.
            [ThrottleScope::Service(1), ThrottleScope::Tenant(101)]
        );
        let names: Vec<_> = content
            .omitted
            .iter()
            .map(|e| (e.kind, e.name.as_str(), e.tenant.as_str()))
            .collect();
        let expected = [
            (ResourceKind::Table, "alpha/default/s2@az1", "alpha"),
            (ResourceKind::Table, "alpha/default/s3@az1", "alpha"),
            (ResourceKind::Throttle, "alpha/default/s2", "alpha"),
            (ResourceKind::Throttle, "alpha/default/s3", "alpha"),
        ];
        assert_eq!(names, expected);
        assert!(
            content
                .omitted
                .iter()
                .all(|e| e.why.contains("share") && e.why.contains("fix: "))
        );
    }

    #[test]
    fn only_members_behind_a_head_report_their_sessions() {
        for (chain, number, want) in [
            (&[1, 2][..], 1, false),
            (&[1, 2], 2, true),
            (&[1, 2], 3, false),
            (&[], 1, false),
        ] {
            let resource = table_of("alpha/default/web", 7, "az1", 1, chain);
            assert_eq!(
                decide_behind(table(&resource).unwrap(), number),
                want,
                "{chain:?} {number}"
            );
        }
    }

    #[test]
    fn a_soft_drain_starts_when_no_bucket_leads_here() {
        let of = |heads_here: usize| {
            let Resource::Table(mut table) =
                Arc::unwrap_or_clone(table_of("alpha/b/c", 7, "az1", 1, &[3, 2]))
            else {
                unreachable!()
            };
            table
                .chains
                .iter_mut()
                .take(heads_here)
                .for_each(|chain| chain.reverse());
            table
        };
        let (none, some, half, all) = (of(0), of(BUCKETS / 2 - 1), of(BUCKETS / 2), of(BUCKETS));
        let (at_once, late) = (Some(Duration::ZERO), Some(SOFT_DRAIN_DELAY));
        for (what, drains, number, tables, want) in [
            ("serving", None, 2, vec![&none], false),
            ("all buckets moved", at_once, 2, vec![&none], true),
            ("no service", at_once, 2, vec![], true),
            (
                "one service not moved",
                at_once,
                2,
                vec![&none, &some],
                false,
            ),
            ("some are held for long", late, 2, vec![&none, &some], true),
            ("half are held for long", late, 2, vec![&none, &half], false),
            ("nobody else", late, 2, vec![&none, &all], false),
            ("before any orders", late, 0, vec![&none], false),
        ] {
            assert_eq!(
                decide_soft_drain(drains, number, tables.into_iter()),
                want,
                "{what}"
            );
        }
    }
}

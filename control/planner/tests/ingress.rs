//! Addresses of Gateways: which each gets, what it keeps, and what a refusal leaves alone.

use std::collections::BTreeMap;
use std::net::IpAddr;

use canal_model::fleet::{Demand, Demands, Fleet, FleetReplica, Ownership, ReplicaState};
use canal_model::ids::{ReplicaNumber, ServiceId, ServiceKey, TenantName, Vni};
use canal_model::plan::{Plan, UnmetConstraint};
use canal_model::share::Share;
use canal_planner::address::addresses;
use canal_planner::plan;

/// The fleet's only AZ, whose part of 198.51.100.0/24 is 198.51.100.33 to .62.
fn fleet() -> Fleet {
    let replica = FleetReplica {
        name: "r1".parse().unwrap(),
        number: ReplicaNumber::new(1).unwrap(),
        backend: "b1".parse().unwrap(),
        az: "az1".parse().unwrap(),
        underlay: [250, 1, 0, 3].into(),
        state: ReplicaState::Active,
        up: true,
    };
    Fleet::of([("az1".parse().unwrap(), 1)].into(), [replica])
}

/// Returns the demands of these Gateways, each an id, a tenant and the addresses that it requests.
/// A tenant has at most three addresses.
fn demands(network: Option<&str>, gateways: &[(u32, &str, &[&str])]) -> Demands {
    let mut demands = Demands::default();
    if let Some(range) = network {
        let network = || "clients".parse().unwrap();
        demands
            .ranges
            .insert(network(), vec![range.parse().unwrap()]);
        let vni = Vni::new(700).unwrap();
        demands.ingress.networks.insert(network(), vni);
    }
    for (id, tenant, requested) in gateways {
        let id = ServiceId::new(*id).unwrap();
        let key = format!("{tenant}/shop/g{}.gateway", id.get());
        let demand = Demand {
            key: key.parse().unwrap(),
            vni: Vni::new(1).unwrap(),
            weight: 1,
            home: None,
        };
        let tenant = demand.key.tenant.clone();
        demands.services.insert(id, demand);
        demands
            .ranges
            .insert(tenant.clone(), vec!["10.1.0.0/18".parse().unwrap()]);
        demands.ingress.max.insert(tenant, Share::Amount(3));
        let requested = requested.iter().map(|it| it.parse().unwrap());
        demands.ingress.requested.insert(id, requested.collect());
    }
    demands
}

fn next(demands: &Demands, parent: Option<&Plan>) -> Plan {
    let next = plan(&fleet(), demands, &Ownership::default(), parent);
    let mut findings = canal_planlint::check(&fleet(), demands, &next);
    if let Some(parent) = parent {
        findings.extend(canal_planlint::step(&canal_planlint::PlanTransition {
            fleet: &fleet(),
            demands,
            ownership: &Ownership::default(),
            before: parent,
            after: &next,
        }));
    }
    assert!(findings.is_empty(), "{findings:?}");
    next
}

/// Returns the IPv4 address of each Gateway, or the reason why it has none.
fn list_addresses(demands: &Demands, plan: &Plan) -> BTreeMap<u32, String> {
    let reason = |key: &ServiceKey| {
        let notes = plan.notes.iter();
        notes.into_iter().find_map(|note| match note {
            UnmetConstraint::NoAddress { service, why, .. } if service == key => Some(why.clone()),
            _ => None,
        })
    };
    let address = |(id, service): (&ServiceId, &canal_model::plan::PlannedService)| {
        let ranges = service.ranges(demands);
        let given: Vec<IpAddr> = addresses(ranges, 1, service.number)
            .map(|pair| pair.assigned)
            .unwrap_or_default();
        let text = match given.first() {
            Some(address) => address.to_string(),
            None => reason(&service.key).unwrap_or_else(|| "no reason".to_owned()),
        };
        (id.get(), text)
    };
    plan.services.iter().map(address).collect()
}

#[test]
fn each_gateway_has_an_address_of_its_own_and_keeps_it() {
    let pool = Some("198.51.100.0/24");
    let first = demands(
        pool,
        &[
            (1, "alpha", &[]),
            (2, "beta", &["198.51.100.40"]),
            (5, "alpha", &[]),
        ],
    );
    let plan = next(&first, None);
    let want = |list: &[(u32, &str)]| -> BTreeMap<u32, String> {
        list.iter()
            .map(|(id, text)| (*id, (*text).to_owned()))
            .collect()
    };
    // az1 has the second eighth of the pool, from .32 on, whose first address is not used.
    let got = list_addresses(&first, &plan);
    assert_eq!(
        got,
        want(&[
            (1, "198.51.100.33"),
            (2, "198.51.100.40"),
            (5, "198.51.100.34")
        ])
    );
    // The first goes, another comes with a lower id than the third.
    let second = demands(
        pool,
        &[
            (2, "beta", &["198.51.100.40"]),
            (3, "beta", &[]),
            (5, "alpha", &[]),
        ],
    );
    let after = next(&second, Some(&plan));
    let got = list_addresses(&second, &after);
    assert_eq!(
        got,
        want(&[
            (2, "198.51.100.40"),
            (3, "198.51.100.33"),
            (5, "198.51.100.34")
        ])
    );
    assert_eq!(
        next(&second, Some(&after)),
        after,
        "the same question has the same answer"
    );
    // A request moves a Gateway, and nothing else.
    let third = demands(
        pool,
        &[
            (2, "beta", &["198.51.100.41"]),
            (3, "beta", &[]),
            (5, "alpha", &[]),
        ],
    );
    let got = list_addresses(&third, &next(&third, Some(&after)));
    assert_eq!(
        got,
        want(&[
            (2, "198.51.100.41"),
            (3, "198.51.100.33"),
            (5, "198.51.100.34")
        ])
    );
}

#[test]
fn a_gateway_without_an_address_says_why_and_changes_no_other() {
    let check = |pool: Option<&str>, gateways: &[(u32, &str, &[&str])], id: u32, why: &str| {
        let mut others = gateways.to_vec();
        let demands_before = {
            others.retain(|(other, ..)| *other != id);
            demands(pool, &others)
        };
        let before = next(&demands_before, None);
        let after_demands = demands(pool, gateways);
        let after = next(&after_demands, Some(&before));
        let mut got = list_addresses(&after_demands, &after);
        let reason = got.remove(&id).unwrap();
        assert!(reason.contains(why), "{reason}");
        assert_eq!(got, list_addresses(&demands_before, &before), "{why}");
    };
    check(None, &[(1, "alpha", &[])], 1, "no ingress network");
    let pool = Some("198.51.100.0/24");
    check(
        pool,
        &[(1, "alpha", &["203.0.113.1"])],
        1,
        "no ingress network has the address",
    );
    // Another AZ's part of the pool, and the unused address of this one.
    check(
        pool,
        &[(1, "alpha", &["198.51.100.65"])],
        1,
        "no ingress network has the address",
    );
    check(
        pool,
        &[(1, "alpha", &["198.51.100.32"])],
        1,
        "no ingress network has the address",
    );
    check(
        pool,
        &[(1, "alpha", &["198.51.100.33", "198.51.100.34"])],
        1,
        "do not belong together",
    );
    check(
        pool,
        &[
            (1, "alpha", &["198.51.100.40"]),
            (2, "beta", &["198.51.100.40"]),
        ],
        1,
        "another Gateway has the address",
    );
    let four: [(u32, &str, &[&str]); 4] = [
        (1, "alpha", &[]),
        (2, "alpha", &[]),
        (3, "alpha", &[]),
        (4, "alpha", &[]),
    ];
    // `demands` gives alpha this share.
    check(pool, &four, 4, "the tenant's share is 3 addresses");
    // An eighth of a /27 has two addresses that can be given out.
    let three: [(u32, &str, &[&str]); 3] = [(1, "alpha", &[]), (2, "beta", &[]), (3, "gamma", &[])];
    check(
        Some("198.51.100.0/27"),
        &three,
        3,
        "all addresses of the ingress networks are taken",
    );
}

#[test]
fn an_address_that_is_free_again_goes_to_a_gateway_that_waits() {
    let pool = Some("198.51.100.0/27");
    let all: [(u32, &str, &[&str]); 3] = [(1, "alpha", &[]), (2, "beta", &[]), (3, "gamma", &[])];
    let first = demands(pool, &all);
    let plan = next(&first, None);
    assert!(list_addresses(&first, &plan)[&3].contains("are taken"));
    let second = demands(pool, &all[1..]);
    let after = list_addresses(&second, &next(&second, Some(&plan)));
    assert_eq!(
        (after[&2].as_str(), after[&3].as_str()),
        ("198.51.100.6", "198.51.100.5")
    );
}

/// The tenant that is the network has services of its own, whose numbers are of the same ranges.
#[test]
fn a_service_of_the_ingress_network_keeps_its_number_when_a_gateway_comes() {
    let with_own_service = |gateways: &[(u32, &str, &[&str])]| {
        let mut all = demands(Some("198.51.100.0/24"), gateways);
        let demand = Demand {
            key: "clients/border/dns".parse().unwrap(),
            vni: Vni::new(700).unwrap(),
            weight: 1,
            home: None,
        };
        all.services.insert(ServiceId::new(9).unwrap(), demand);
        all
    };
    let before = next(&with_own_service(&[]), None);
    let after = next(&with_own_service(&[(1, "alpha", &[])]), Some(&before));
    let numbers: Vec<u32> = after.services.values().map(|it| it.number).collect();
    assert_eq!(numbers, [2, 1]);
    let requested = with_own_service(&[(1, "alpha", &["198.51.100.33"])]);
    let refused = next(&requested, Some(&before));
    assert!(list_addresses(&requested, &refused)[&1].contains("has the address"));
}

/// An AZ's part of the /24 has 30 addresses, and that of the IPv6 range far more.
#[test]
fn a_share_in_percent_is_a_part_of_the_pool() {
    let gateways: Vec<(u32, &str, &[&str])> = (1..=4).map(|id| (id, "alpha", &[][..])).collect();
    let mut all = demands(Some("198.51.100.0/24"), &gateways);
    let clients: TenantName = "clients".parse().unwrap();
    let ranges = all.ranges.get_mut(&clients).unwrap();
    ranges.push("2001:db8:100::/64".parse().unwrap());
    let share = Share::Percent(10);
    all.ingress.max.insert("alpha".parse().unwrap(), share);
    let plan = next(&all, None);
    let reason = list_addresses(&all, &plan).remove(&4).unwrap();
    assert!(
        reason.contains("the tenant's share is 3 addresses"),
        "{reason}"
    );
}

const TWO_GATEWAYS: [(u32, &str, &[&str]); 2] = [(1, "alpha", &[]), (2, "beta", &[])];

/// Returns a plan in which the Gateways have swapped the addresses of their ids' order: 1 has .34.
fn plan_with_two_gateways(pool: &str) -> Plan {
    let second = next(&demands(Some(pool), &TWO_GATEWAYS[1..]), None);
    next(&demands(Some(pool), &TWO_GATEWAYS), Some(&second))
}

#[test]
fn addresses_are_reserved_while_their_network_is_absent() {
    let pool = "198.51.100.0/24";
    let with_network = demands(Some(pool), &TWO_GATEWAYS);
    let before = plan_with_two_gateways(pool);
    let expected = list_addresses(&with_network, &before);
    assert_eq!(expected[&1], "198.51.100.34");
    let without = demands(None, &TWO_GATEWAYS);
    let absent = next(&without, Some(&before));
    assert!(list_addresses(&without, &absent)[&1].contains("is reserved"));
    // The tenant may also stay and no longer be an ingress network.
    let mut only_tenant = with_network.clone();
    only_tenant.ingress.networks.clear();
    let closed = next(&only_tenant, Some(&absent));
    assert!(list_addresses(&only_tenant, &closed)[&2].contains("is reserved"));
    // It comes back with another VNI.
    let mut back = with_network;
    let vni = Vni::new(701).unwrap();
    back.ingress
        .networks
        .insert("clients".parse().unwrap(), vni);
    let after = next(&back, Some(&closed));
    assert_eq!(list_addresses(&back, &after), expected);
    let networks = after.services.values().map(|it| it.network.as_ref());
    assert!(networks.into_iter().all(|it| it.unwrap().vni == vni));
}

#[test]
fn requested_addresses_are_assigned_before_others() {
    let both: [(u32, &str, &[&str]); 2] = [(1, "alpha", &[]), (2, "beta", &["198.51.100.33"])];
    let all = demands(Some("198.51.100.0/24"), &both);
    let got = list_addresses(&all, &next(&all, None));
    assert_eq!(
        (got[&1].as_str(), got[&2].as_str()),
        ("198.51.100.34", "198.51.100.33")
    );
}

#[test]
fn gateways_keep_their_addresses_when_the_ranges_are_edited() {
    let pool = "198.51.100.0/24";
    let before = plan_with_two_gateways(pool);
    let with_ranges = |ranges: &[&str]| {
        let mut all = demands(Some(pool), &TWO_GATEWAYS);
        let ranges = ranges.iter().map(|it| it.parse().unwrap()).collect();
        all.ranges.insert("clients".parse().unwrap(), ranges);
        all
    };
    let expected = list_addresses(&with_ranges(&[pool]), &before);
    let prepended = with_ranges(&["203.0.113.0/24", pool]);
    let after = next(&prepended, Some(&before));
    assert_eq!(list_addresses(&prepended, &after), expected);
    let reordered = with_ranges(&[pool, "203.0.113.0/24"]);
    let again = next(&reordered, Some(&after));
    assert_eq!(list_addresses(&reordered, &again), expected);
    // Their addresses no longer exist, so they get others.
    let removed = with_ranges(&["203.0.113.0/24"]);
    let others = next(&removed, Some(&again));
    let got = list_addresses(&removed, &others);
    assert_eq!(
        (got[&1].as_str(), got[&2].as_str()),
        ("203.0.113.33", "203.0.113.34")
    );
    // IPv6 addresses keep their order here and IPv4 addresses do not, so the number that has the
    // IPv4 address of one Gateway may have the IPv6 address of the other. `next` checks that.
    let dual = with_ranges(&[pool, "2001:db8:100::/64"]);
    let dual_before = next(&dual, Some(&before));
    let shifted = with_ranges(&["203.0.113.0/27", pool, "2001:db8:100::/64"]);
    next(&shifted, Some(&dual_before));
}

/// A row of an older version has no addresses.
#[test]
fn a_plan_without_addresses_keeps_its_numbers() {
    let pool = "198.51.100.0/24";
    let mut old = plan_with_two_gateways(pool);
    for service in old.services.values_mut() {
        let text = r#"{"tenant":"clients","vni":700}"#;
        service.network = Some(serde_json::from_str(text).unwrap());
    }
    let all = demands(Some(pool), &TWO_GATEWAYS);
    let after = next(&all, Some(&old));
    assert_eq!(list_addresses(&all, &after), list_addresses(&all, &old));
    assert_eq!(after.services[&ServiceId::new(1).unwrap()].number, 2);
    assert!(
        after
            .services
            .values()
            .all(|it| !it.network.as_ref().unwrap().addresses.is_empty())
    );
}

//! Tests of bucket tables, one change at a time: which heads move, which stay, and when a version
//! increases. The linter must find broken plans.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::sim::{SimTier, az, id, number};
use canal_model::fleet::{OwnerReport, ReplicaState};
use canal_model::ids::AzName;
use canal_model::plan::{Plan, PlannedTable, UnmetConstraint};
use canal_model::program::CHAIN_LENGTH_MAX;

/// Returns a tier with one service at home in AZ a, which has two backends.
fn tier(first: usize, second: usize) -> SimTier {
    let mut tier = SimTier::new(&[("a1", first), ("a2", second), ("b1", 1)], 1);
    tier.demands.services.get_mut(&id(1)).unwrap().home = Some(az("a"));
    tier.settle();
    tier
}

fn table(tier: &SimTier) -> &PlannedTable {
    &tier.newest().services[&id(1)].tables[&az("a")]
}

fn heads(tier: &SimTier) -> BTreeMap<u16, usize> {
    let mut heads = BTreeMap::new();
    for chain in &table(tier).chains {
        *heads.entry(chain[0].replica.get()).or_default() += 1;
    }
    heads
}

fn state(tier: &mut SimTier, replica: u32, state: ReplicaState) {
    tier.replicas.get_mut(&number(replica)).unwrap().state = state;
}

/// Counts the buckets whose heads differ between the two tables.
fn moved(before: &PlannedTable, after: &PlannedTable) -> usize {
    before
        .chains
        .iter()
        .zip(&after.chains)
        .filter(|(before, after)| before[0].replica != after[0].replica)
        .count()
}

#[test]
fn heads_are_even_by_backend_then_by_replica() {
    for (first, second, expected) in [
        (1, 1, &[(1, 64), (2, 64)][..]),
        (2, 2, &[(1, 32), (2, 32), (3, 32), (4, 32)]),
        (3, 1, &[(1, 21), (2, 21), (3, 22), (4, 64)]),
        (0, 2, &[(1, 64), (2, 64)]),
    ] {
        let heads = heads(&tier(first, second));
        let mut counts: Vec<usize> = heads.values().copied().collect();
        let mut wanted: Vec<usize> = expected.iter().map(|(_, count)| *count).collect();
        counts.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(counts, wanted, "{first} + {second}: {heads:?}");
    }
}

#[test]
fn a_new_replica_gets_its_share_and_a_drain_moves_only_its_own_buckets() {
    let mut tier = tier(2, 2);
    let before = table(&tier).clone();
    tier.join("a1", ReplicaState::Joining);
    tier.plan();
    assert_eq!(*table(&tier), before, "one that is joining is no head");
    state(&mut tier, 6, ReplicaState::Active);
    tier.plan();
    // A third of the 64 buckets of its backend.
    assert_eq!(heads(&tier)[&6], 21);
    assert_eq!(moved(&before, table(&tier)), 21);
    assert_eq!(table(&tier).version, tier.newest().number);
    for chain in table(&tier)
        .chains
        .iter()
        .filter(|chain| chain[0].replica == number(6))
    {
        assert!(
            chain[1].is_owner(),
            "the old head stays as an owner: {chain:?}"
        );
    }
    tier.settle();
    let before = table(&tier).clone();
    assert!(
        before
            .chains
            .iter()
            .flatten()
            .all(|member| !member.is_owner()),
        "all reported that they own no sessions"
    );
    state(&mut tier, 6, ReplicaState::Draining);
    tier.plan();
    assert_eq!(moved(&before, table(&tier)), 21);
    assert!(tier.newest().members(number(6)) > 0);
    tier.settle();
    assert_eq!(tier.newest().members(number(6)), 0, "it may leave");
}

#[test]
fn an_owner_stays_until_all_confirmed_the_table_and_it_reported() {
    let mut tier = tier(1, 1);
    state(&mut tier, 1, ReplicaState::Draining);
    tier.plan();
    let number_of = tier.newest().number;
    let report = |plan, scanned_after| OwnerReport {
        plan,
        scanned_after,
        ..OwnerReport::default()
    };
    let is_there = |tier: &mut SimTier| {
        tier.plan();
        tier.newest().members(number(1)) > 0
    };
    tier.ownership
        .record_report(number(1), report(number_of, 1));
    assert!(is_there(&mut tier), "replica 2 may still forward to it");
    tier.ownership
        .record_report(number(2), report(number_of, 1));
    assert!(is_there(&mut tier), "so may the edge");
    tier.ownership.record_edge_report(az("a"), number_of);
    assert!(is_there(&mut tier), "its report is older than that");
    let confirmed = tier.ownership.last_report_number();
    tier.ownership
        .record_report(number(1), report(number_of, confirmed - 1));
    assert!(
        is_there(&mut tier),
        "a later report of an earlier scan proves nothing"
    );
    tier.ownership
        .record_report(number(1), report(number_of - 1, confirmed));
    assert!(is_there(&mut tier), "its report is about an older table");
    tier.ownership
        .record_report(number(1), report(number_of, confirmed));
    assert!(!is_there(&mut tier));
}

#[test]
fn a_flapping_replica_keeps_its_chain_place_and_a_forgotten_one_does_not() {
    let mut tier = tier(2, 2);
    let before = table(&tier).clone();
    tier.replicas.get_mut(&number(1)).unwrap().up = false;
    tier.plan();
    assert!(!heads(&tier).contains_key(&1));
    assert_eq!(moved(&before, table(&tier)), 32);
    for (old, new) in before
        .chains
        .iter()
        .zip(&table(&tier).chains)
        .filter(|(old, _)| old[0].replica == number(1))
    {
        assert!(
            new.iter()
                .any(|member| member.replica == number(1) && member.is_owner()),
            "{old:?} {new:?}"
        );
        assert!(
            new.iter().any(|member| member.replica == old[1].replica
                && (member.is_owner() || *member == new[0])),
            "who got SYNs meanwhile: {new:?}"
        );
    }
    tier.replicas.get_mut(&number(1)).unwrap().up = true;
    tier.plan();
    assert_eq!(heads(&tier)[&1], 32);
    tier.forget(number(1));
    tier.plan();
    assert_eq!(tier.newest().members(number(1)), 0);
}

#[test]
fn a_head_moves_once_a_full_chain_has_a_free_slot() {
    let mut tier = tier(1, 0);
    // One replica after the other drains, and none reports that it owns nothing.
    // Each drained replica stays in the chain as an owner, so the chain grows by one per round.
    for n in 0..CHAIN_LENGTH_MAX as u32 {
        assert!(
            tier.newest()
                .notes
                .iter()
                .all(|note| !matches!(note, UnmetConstraint::Held { .. })),
            "{:?}",
            tier.newest().notes
        );
        let last = *heads(&tier).keys().next().unwrap();
        tier.join("a1", ReplicaState::Active);
        state(&mut tier, last.into(), ReplicaState::Draining);
        tier.plan();
        assert_eq!(heads(&tier).len(), 1, "{n}");
    }
    let [
        UnmetConstraint::Held {
            buckets, owners, ..
        },
        ..,
    ] = &tier
        .newest()
        .notes
        .iter()
        .filter(|n| matches!(n, UnmetConstraint::Held { .. }))
        .collect::<Vec<_>>()[..]
    else {
        panic!("{:?}", tier.newest().notes)
    };
    // All 128 buckets wait, and the chain has its head and CHAIN_LENGTH_MAX - 1 owners.
    assert_eq!((buckets.len(), owners.len()), (128, CHAIN_LENGTH_MAX - 1));
    assert_eq!(
        canal_planlint::check(&tier.fleet(), &tier.demands, tier.newest()),
        []
    );
    // A dead owner can be removed, so the chains are no longer full.
    tier.replicas.get_mut(&number(1)).unwrap().up = false;
    tier.plan();
    assert!(
        !tier
            .newest()
            .notes
            .iter()
            .any(|note| matches!(note, UnmetConstraint::Held { .. })),
        "{:?}",
        tier.newest().notes
    );
    assert_eq!(tier.newest().members(number(1)), 0);
}

type Break = fn(&mut Plan);

fn change(plan: &mut Plan, how: impl FnOnce(&mut PlannedTable)) {
    let tables = &mut plan.services.get_mut(&id(1)).unwrap().tables;
    how(Arc::make_mut(tables.get_mut(&az("a")).unwrap()));
}

fn backends(plan: &mut Plan, az_name: &str, names: &[&str]) {
    let placement = plan
        .services
        .get_mut(&id(1))
        .unwrap()
        .placement
        .as_mut()
        .unwrap();
    placement.backends.insert(
        AzName::new(az_name).unwrap(),
        names.iter().map(|name| name.parse().unwrap()).collect(),
    );
}

/// The name of a finding, and the change of a valid plan that causes it.
const BROKEN_PLANS: &[(&str, Break)] = &[
    ("Missing", |plan| _ = plan.services.remove(&id(1))),
    ("Unplaced", |plan| {
        plan.services.get_mut(&id(1)).unwrap().placement = None
    }),
    ("UnknownBackend", |plan| backends(plan, "b", &["b9"])),
    ("FewAtHome", |plan| backends(plan, "a", &["a1"])),
    ("FewAway", |plan| backends(plan, "b", &[])),
    ("Shared", |plan| {
        let placement = plan.services[&id(2)].placement.clone();
        plan.services.get_mut(&id(1)).unwrap().placement = placement;
    }),
    ("Home", |plan| {
        plan.services
            .get_mut(&id(1))
            .unwrap()
            .placement
            .as_mut()
            .unwrap()
            .home = az("b")
    }),
    ("Number", |plan| {
        plan.services.get_mut(&id(1)).unwrap().number = 0
    }),
    ("NoTable", |plan| {
        _ = plan
            .services
            .get_mut(&id(1))
            .unwrap()
            .tables
            .remove(&az("a"))
    }),
    ("Shape", |plan| change(plan, |table| _ = table.chains.pop())),
    ("Empty", |plan| {
        change(plan, |table| table.chains[3].clear())
    }),
    ("Twice", |plan| {
        change(plan, |table| {
            let head = table.chains[3][0];
            table.chains[3].push(head);
        })
    }),
    ("Head", |plan| {
        change(plan, |table| table.chains[3][0].replica = number(40))
    }),
    ("UnknownReplica", |plan| {
        change(plan, |table| table.chains[3][1].replica = number(41))
    }),
    ("Uneven", |plan| {
        change(plan, |table| {
            (0..9).for_each(|bucket| table.chains[bucket] = table.chains[0].clone())
        })
    }),
    ("Standby", |plan| {
        change(plan, |table| table.chains[3].truncate(1))
    }),
    ("Version", |plan| {
        change(plan, |table| table.version += 1000)
    }),
];

/// The name of a finding, and the change between two plans that causes it.
const BROKEN_STEPS: &[(&str, Break)] = &[
    ("OwnerDropped", |plan| {
        change(plan, |table| _ = table.chains[3].remove(0))
    }),
    ("StaleVersion", |plan| {
        change(plan, |table| table.chains[3].swap(1, 2))
    }),
    ("Reordered", |plan| {
        change(plan, |table| table.chains[3].swap(1, 2))
    }),
    ("Moved", |plan| {
        change(plan, |table| {
            (0..9).for_each(|bucket| table.chains[bucket].swap(0, 1))
        })
    }),
    ("Left", |plan| backends(plan, "b", &[])),
    ("Unstable", |plan| {
        plan.services.get_mut(&id(1)).unwrap().number = 77
    }),
    ("Parent", |plan| plan.number += 5),
];

/// Breaks a valid plan in one aspect at a time; the linter must report the finding with the given
/// name.
#[test]
fn the_linter_sees_each_broken_rule() {
    let mut tier = SimTier::new(&[("a1", 2), ("a2", 2), ("a3", 1), ("b1", 1), ("b2", 1)], 2);
    tier.demands.services.get_mut(&id(1)).unwrap().home = Some(az("a"));
    tier.demands.services.get_mut(&id(2)).unwrap().home = Some(az("a"));
    tier.settle();
    for (name, broken) in BROKEN_PLANS {
        let mut plan = tier.newest().clone();
        broken(&mut plan);
        let findings = canal_planlint::check(&tier.fleet(), &tier.demands, &plan);
        assert!(
            findings
                .iter()
                .any(|finding| finding.to_string().starts_with(name)),
            "{name}: {findings:?}"
        );
    }
    for (name, broken) in BROKEN_STEPS {
        let (before, fleet) = (tier.newest(), tier.fleet());
        let mut after = before.clone();
        broken(&mut after);
        let step = canal_planlint::PlanTransition {
            fleet: &fleet,
            demands: &tier.demands,
            ownership: &tier.ownership,
            before,
            after: &after,
        };
        let findings = canal_planlint::step(&step);
        assert!(
            findings
                .iter()
                .any(|finding| finding.to_string().starts_with(name)),
            "{name}: {findings:?}"
        );
    }
}

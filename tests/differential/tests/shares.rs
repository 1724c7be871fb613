//! Weighted splits: compares the results of `canal_router::pick` over many numbers with the weights
//! of compiled splits. It does not test which endpoint serves a share.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use canal_compiler::oracle::RoutingVerdict;
use canal_differential::policy::{Policy, files};
use canal_differential::probe::probes;
use canal_differential::{RoutingComparison, RoutingTally};
use canal_generated_policies::routing::cases;
use canal_model::program::{Backend, BackendTarget, Labels};
use canal_router::{BackendChoice, NO_WEIGHT_STATUS, pick};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

/// Result of a weighted split: a service's port and subset, or a refusal.
type SplitOutcome = Result<(String, u16, Labels), (u16, String)>;

fn share(target: &BackendTarget) -> SplitOutcome {
    match target {
        BackendTarget::Service {
            service,
            port,
            subset,
        } => Ok((service.to_string(), *port, subset.clone())),
        BackendTarget::Refuse { status, reason } => Err((*status, reason.clone())),
    }
}

fn picked(split: &[Backend], random: u64) -> SplitOutcome {
    match pick(split, random) {
        BackendChoice::Backend {
            index: place,
            backend,
        } => {
            assert_eq!(&split[place], backend, "the place is the backend's");
            share(&backend.target)
        }
        BackendChoice::Refuse { status, reason } => Err((status, reason.to_owned())),
    }
}

/// Returns the weights by destination; two backends may have the same destination.
fn weights(split: &[Backend]) -> BTreeMap<SplitOutcome, u64> {
    let mut weights = BTreeMap::new();
    for backend in split.iter().filter(|backend| backend.weight > 0) {
        *weights.entry(share(&backend.target)).or_default() += u64::from(backend.weight);
    }
    weights
}

/// Over one full cycle (the `total` numbers that are spread evenly over all 64 bits) every share
/// equals its weight exactly.
fn check_cycle(split: &[Backend]) {
    let expected = weights(split);
    let total: u64 = expected.values().sum();
    let mut counts: BTreeMap<SplitOutcome, u64> = BTreeMap::new();
    for turn in 0..total {
        let random = (u128::from(turn) << 64).div_ceil(u128::from(total));
        *counts
            .entry(picked(
                split,
                u64::try_from(random).expect("less than 2^64"),
            ))
            .or_default() += 1;
    }
    assert_eq!(counts, expected, "{split:?}");
}

/// A splitmix64 generator (Steele, Lea, Flood). It is deterministic, and good enough for a
/// chi-square test.
struct PickRandom(u64);

impl PickRandom {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// Chi-square test over random numbers. The mean is the degrees of freedom `k`, the deviation
/// `sqrt(2k)`. More than seven deviations are never chance, and a share that is wrong by a few per
/// cent is far beyond that.
fn check_chi_square(split: &[Backend], draws: u64) {
    let expected = weights(split);
    let total: u64 = expected.values().sum();
    let mut numbers = PickRandom(total);
    let mut counts: BTreeMap<SplitOutcome, u64> = BTreeMap::new();
    for _ in 0..draws {
        *counts.entry(picked(split, numbers.next())).or_default() += 1;
    }
    assert!(
        counts.keys().all(|key| expected.contains_key(key)),
        "a share without weight was picked: {counts:?}"
    );
    let chi_square: f64 = expected
        .iter()
        .map(|(key, weight)| {
            let wanted = draws as f64 * *weight as f64 / total as f64;
            (counts.get(key).copied().unwrap_or(0) as f64 - wanted).powi(2) / wanted
        })
        .sum();
    let freedom = (expected.len() - 1) as f64;
    assert!(
        chi_square <= freedom + 7.0 * (2.0 * freedom).sqrt() + 10.0,
        "{chi_square} for {freedom} degrees: {counts:?} of {split:?}"
    );
}

/// Returns all splits that requests to these tenants meet.
fn compiled_splits() -> BTreeSet<String> {
    let mut seen = BTreeSet::new();
    let mut meet = |comparison: &RoutingComparison| {
        let mut tally = RoutingTally::default();
        for request in probes(&comparison.ir) {
            let Ok(RoutingVerdict::Split { backends, .. }) =
                comparison.compare(&request, &mut tally)
            else {
                continue;
            };
            if seen.insert(format!("{backends:?}")) {
                check_cycle(&backends);
            }
        }
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for path in files(&root.join("../golden/compiler"))
        .into_iter()
        .chain(files(&root.join("cases")))
    {
        RoutingComparison::of(&Policy::read(&path).input())
            .iter()
            .for_each(&mut meet);
    }
    let mut runner = TestRunner::deterministic();
    for _ in 0..40 {
        let case = cases().new_tree(&mut runner).expect("a tenant").current();
        RoutingComparison::of(&case.input())
            .iter()
            .for_each(&mut meet);
    }
    seen
}

#[test]
fn compiled_splits_are_shared_out_exactly() {
    let seen = compiled_splits();
    assert!(seen.len() >= 30, "only {} splits", seen.len());
    assert!(
        seen.iter().any(|split| split.contains("Refuse")),
        "a broken backend keeps its share"
    );
    assert!(
        seen.iter().any(|split| split.contains("weight: 0")),
        "a backend without a share"
    );
}

fn split(weights: &[u32]) -> Vec<Backend> {
    let target = |at: usize| BackendTarget::Service {
        service: format!("t/ns/svc-{at}").parse().unwrap(),
        port: 80,
        subset: Labels::new(),
    };
    weights
        .iter()
        .enumerate()
        .map(|(at, &weight)| Backend {
            weight,
            target: target(at),
        })
        .collect()
}

#[test]
fn random_numbers_give_the_weights_shares() {
    let many: Vec<u32> = (0..256).collect();
    for weights in [
        &[1][..],
        &[1, 1],
        &[90, 10],
        &[0, 1, 0, 2],
        &[1, 0],
        &[1, 2, 3, 4, 5, 6, 7],
        &[1_000_000, 1_000_000],
        &[999_999, 1, 1_000_000],
        &many,
    ] {
        check_chi_square(&split(weights), 200_000);
    }
}

#[test]
fn cycles_are_exact_at_the_edges() {
    // One share, equal ones, ones without weight, the largest weight, and coprime ones.
    for weights in [
        &[1][..],
        &[1, 1, 1],
        &[0, 0, 5, 0],
        &[1_000_000, 1],
        &[1, 1_000_000, 0],
        &[3, 7, 11, 13],
    ] {
        check_cycle(&split(weights));
    }
    // The smallest and the largest number select the first and the last share, never one without
    // weight.
    for (weights, first, last) in [
        (&[0, 2, 0][..], 1, 1),
        (&[5, 1, 0], 0, 1),
        (&[0, 1, 1_000_000], 1, 2),
    ] {
        let split = split(weights);
        assert_eq!(
            picked(&split, 0),
            share(&split[first].target),
            "{weights:?}"
        );
        assert_eq!(
            picked(&split, u64::MAX),
            share(&split[last].target),
            "{weights:?}"
        );
    }
    // Backends that all have weight 0 are valid configuration, so requests get a status.
    for nothing in [&[][..], &[0], &[0, 0]] {
        assert!(
            matches!(
                pick(&split(nothing), 1),
                BackendChoice::Refuse {
                    status: NO_WEIGHT_STATUS,
                    ..
                }
            ),
            "{nothing:?}"
        );
    }
}

//! Generated tenants on every target. Every tenant has its own seed. A failure prints the seed
//! after it has shrunk the tenant: `CANAL_SEED=<seed>` starts there, `CANAL_TENANTS=<count>` sets
//! the number of tenants. A tenant that fails becomes a case in `cases/`.

use std::cell::RefCell;
use std::collections::BTreeSet;

use canal_compiler::oracle::OracleRequest;
use canal_differential::probe::probes;
use canal_differential::{RoutingComparison, RoutingTally};
use canal_generated_policies::routing::{GeneratedRouting, cases};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// `make soak PART=compare` builds for release and runs the full number.
const TENANTS: u64 = if cfg!(debug_assertions) { 300 } else { 9_000 };
const COMPARISONS_LEAST: usize = if cfg!(debug_assertions) {
    20_000
} else {
    1_000_000
};
/// Maximum number of requests made from one tenant's rules. Each request is one more call of the
/// reference; more tenants show more than more requests of one.
const PROBES_MAX: usize = 64;

pub(crate) fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text}: a number is needed"))
    })
}

/// Returns a runner that gives the same cases for the same seed, independent of earlier cases.
pub(crate) fn runner(seed: u64) -> TestRunner {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config {
        failure_persistence: None,
        max_shrink_iters: 4_000,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

/// Returns the case's own requests, and some of those made from its rules, spread over all of them.
fn requests(case: &GeneratedRouting, comparison: &RoutingComparison) -> Vec<OracleRequest> {
    let made = probes(&comparison.ir);
    let step = made.len().div_ceil(PROBES_MAX).max(1);
    case.requests
        .iter()
        .cloned()
        .chain(made.into_iter().step_by(step))
        .collect()
}

fn check(case: &GeneratedRouting, tally: &RefCell<RoutingTally>) -> Result<(), TestCaseError> {
    let comparison = RoutingComparison::of(&case.input())
        .ok_or_else(|| TestCaseError::fail("the tenant is not valid"))?;
    for request in requests(case, &comparison) {
        comparison
            .compare(&request, &mut tally.borrow_mut())
            .map_err(TestCaseError::fail)?;
    }
    Ok(())
}

#[test]
fn generated_tenants_mean_the_same_everywhere() {
    let first = from_environment("CANAL_SEED").unwrap_or(1);
    let count = from_environment("CANAL_TENANTS").unwrap_or(TENANTS);
    let tally = RefCell::new(RoutingTally::default());
    for seed in (first..).take(usize::try_from(count).expect("a count")) {
        let mut runner = runner(seed);
        let tree = cases().new_tree(&mut runner).expect("a tenant");
        if let Err(error) = runner.run_one(tree, |case| check(&case, &tally)) {
            let why = match error {
                TestError::Fail(why, _) => why.to_string(),
                TestError::Abort(why) => format!("aborted: {why}"),
            };
            panic!("seed {seed} (CANAL_SEED={seed} CANAL_TENANTS=1 repeats it): {why}");
        }
    }
    let tally = tally.into_inner();
    println!("{count} tenants from seed {first}: {tally:?}");
    if count >= TENANTS {
        assert!(tally.comparisons >= COMPARISONS_LEAST, "{tally:?}");
        assert!(tally.filtered * 100 > tally.comparisons, "{tally:?}");
        assert!(tally.backend_filters * 200 > tally.comparisons, "{tally:?}");
        let all: usize = tally.verdicts.values().sum();
        assert!(
            tally.verdicts.len() == 6 && tally.verdicts.values().all(|count| count * 50 > all),
            "{tally:?}"
        );
    }
}

/// A printed seed must reproduce the same tenant.
#[test]
fn a_seed_names_a_tenant() {
    let made = |seed| {
        format!(
            "{:?}",
            cases()
                .new_tree(&mut runner(seed))
                .expect("a tenant")
                .current()
        )
    };
    assert_eq!(made(7), made(7));
    assert_eq!(
        (1..20).map(made).collect::<BTreeSet<String>>().len(),
        19,
        "every seed its own tenant"
    );
}

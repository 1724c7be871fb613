//! Compares the policy sets of data planes with the oracle, for generated policies and for those of
//! the golden files. Every tenant has its own seed, which a failure prints: `CANAL_SEED=<seed>`
//! starts there, `CANAL_TENANTS=<count>` sets the number of tenants.

use std::cell::RefCell;
use std::path::Path;

use canal_differential::authorization::{AuthorizationTally, PolicyComparison};
use canal_differential::policy::{Policy, files, name_of};
use canal_generated_policies::authorization::{facts, policies};
use proptest::collection::vec;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// `make soak PART=compare` builds for release and runs the full number.
const TENANTS: u64 = if cfg!(debug_assertions) { 600 } else { 4_000 };
const COMPARISONS_LEAST: usize = if cfg!(debug_assertions) {
    50_000
} else {
    300_000
};
/// Number of attribute sets that are tried on each golden policy. Nobody measured how many are
/// enough.
const FACTS: usize = 200;

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text}: a number is needed"))
    })
}

fn runner(seed: u64) -> TestRunner {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config {
        failure_persistence: None,
        max_shrink_iters: 4_000,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

#[test]
fn generated_policies_mean_the_same_to_the_guard() {
    let first = from_environment("CANAL_SEED").unwrap_or(1);
    let count = from_environment("CANAL_TENANTS").unwrap_or(TENANTS);
    let tally = RefCell::new(AuthorizationTally::default());
    for seed in (first..).take(usize::try_from(count).expect("a count")) {
        let mut runner = runner(seed);
        let tree = policies().new_tree(&mut runner).expect("a tenant");
        let outcome = runner.run_one(tree, |made| {
            PolicyComparison::of(&made.case.input())
                .compare(&made.facts, &mut tally.borrow_mut())
                .map_err(TestCaseError::fail)
        });
        if let Err(error) = outcome {
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
        assert!(
            tally.verdicts.len() == 6
                && tally.verdicts.values().all(|n| n * 100 > tally.comparisons),
            "{tally:?}"
        );
        assert!(
            tally.hits * 100 > tally.comparisons && tally.modes.len() == 3,
            "{tally:?}"
        );
    }
}

#[test]
fn golden_policies_mean_the_same_to_the_guard() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/compiler");
    let mut tally = AuthorizationTally::default();
    for (seed, path) in (1..).zip(files(&folder)) {
        let policy = Policy::read_only(&path);
        let facts = vec(facts(), FACTS)
            .new_tree(&mut runner(seed))
            .expect("facts")
            .current();
        let compared = PolicyComparison::of(&policy.input()).compare(&facts, &mut tally);
        compared.unwrap_or_else(|why| panic!("{}: {why}", name_of(&path)));
    }
    println!("{tally:?}");
    assert!(tally.comparisons >= 5_000, "{tally:?}");
}

/// Returns a golden policy with some lines removed, doubled, swapped or altered.
fn bent(text: &str, seed: u64) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let mut state = seed;
    let mut next = |below: usize| {
        // A simple generator is enough to choose lines.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap_or_default() % below
    };
    for _ in 0..=next(4) {
        let (at, other) = (next(lines.len()), next(lines.len()));
        match next(6) {
            0 if lines.len() > 1 => drop(lines.remove(at)),
            1 => lines.insert(other, lines[at].clone()),
            2 => lines.swap(at, other),
            3 => lines[at].insert_str(0, "  "),
            4 => lines[at] = lines[at].replacen(['*', 's', 'e'], "", 1),
            _ => lines[at] = lines[at].replacen([':', '[', '{', '"'], "!", 1),
        }
    }
    lines.join("\n")
}

/// Whatever the compiler makes of a broken policy, the wire format accepts it, and the policy set
/// and the oracle interpret it alike.
#[test]
fn bent_policies_travel_and_mean_the_same_to_the_guard() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/compiler");
    let read = |name: &str| {
        std::fs::read_to_string(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    let shop = read("_shop.yaml");
    let mut tally = AuthorizationTally::default();
    for name in [
        "authorization",
        "authorization-keys",
        "authorization-broken",
        "authentication",
        "peers",
        "trust",
    ] {
        let own = read(&format!("{name}.yaml"));
        for seed in 0..if cfg!(debug_assertions) { 150 } else { 1_000 } {
            let texts = [
                ("_shop.yaml".to_owned(), shop.clone()),
                (format!("{name}.yaml"), bent(&own, seed)),
            ];
            let policy = Policy::of(&texts);
            let facts = vec(facts(), 4)
                .new_tree(&mut runner(seed))
                .expect("facts")
                .current();
            let compared = PolicyComparison::of(&policy.input()).compare(&facts, &mut tally);
            compared.unwrap_or_else(|why| panic!("{name}, seed {seed}: {why}\n{}", texts[1].1));
        }
    }
    println!("{tally:?}");
    assert!(
        tally.comparisons >= 10_000 && tally.verdicts.len() >= 5,
        "{tally:?}"
    );
}

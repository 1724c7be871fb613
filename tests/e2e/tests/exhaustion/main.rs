//! One tenant exhausts each limit that tenants share, by connections, bytes, requests,
//! configuration and work. Meanwhile the test measures another tenant's goodput, 99th percentile
//! and errors, and the memory of every process. Start at [`run_case`]. The gate runs `limits.rs`
//! instead, which only counts.

mod configuration;
mod control;
mod exhaustion_world;
mod full_shares;
mod gateway;
mod keys;
mod limits;
mod sums;
mod traffic;
mod victim;

use std::time::Duration;

use canal_timing::{assert_time, timed};
use exhaustion_world::{ExhaustionWorld, setup};
use victim::{P99_MAX, VictimWatch};

/// Minimum number of cases. It finds a list that lost cases by mistake.
const CASES_MIN: usize = 30;

/// Returns the duration of each case: short in `make test-timing`, full in `make soak`.
fn lasts() -> Duration {
    Duration::from_secs(if std::env::var_os("CANAL_SOAK").is_some() {
        15
    } else {
        3
    })
}

/// Executes alpha's attack for this long.
type AttackFn = Box<dyn Fn(&ExhaustionWorld, Duration) -> u64 + Send + Sync>;

/// An attack of alpha's, and its minimum extent for the case to count.
struct ExhaustionCase {
    name: &'static str,
    /// Returns the number of attempts: connections, requests, bytes.
    attack: AttackFn,
    /// Minimum number of attempts.
    tries_min: u64,
    /// Undoes the attack, so that the next case starts from the same state.
    restore: Option<fn(&ExhaustionWorld)>,
}

impl ExhaustionCase {
    fn new(
        name: &'static str,
        tries_min: u64,
        attack: impl Fn(&ExhaustionWorld, Duration) -> u64 + Send + Sync + 'static,
    ) -> Self {
        Self {
            name,
            attack: Box::new(attack),
            tries_min,
            restore: None,
        }
    }

    fn restored_by(mut self, restore: fn(&ExhaustionWorld)) -> Self {
        self.restore = Some(restore);
        self
    }
}

fn groups() -> [(&'static str, Vec<ExhaustionCase>); 5] {
    [
        ("gateway", gateway::cases()),
        ("traffic", traffic::cases()),
        ("control", control::cases()),
        ("configuration", configuration::cases()),
        ("keys", keys::cases()),
    ]
}

/// Runs one case while beta's clients are measured. Checks the harm to beta, and that the attack
/// took place. Returns an error that names a process which exceeds its memory.
fn run_case(setup: &ExhaustionWorld, case: &ExhaustionCase) -> Result<(), String> {
    let lasts = lasts();
    let (tries, seen) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| VictimWatch::run(setup, lasts));
        // The victim's load runs before the attack starts.
        std::thread::sleep(Duration::from_millis(200));
        let tries = (case.attack)(setup, lasts.saturating_sub(Duration::from_millis(400)));
        (tries, watch.join().expect("the watch ends"))
    });
    if let Some(restore) = case.restore {
        restore(setup);
    }
    println!("{}: {tries} tries; {seen}", case.name);
    timed!(tries >= case.tries_min, "enough attempts, {}", case.name);
    assert_no_harm(&seen, case.name);
    setup.memory_complaint().map_or(Ok(()), Err)
}

/// Checks the harm to beta.
fn assert_no_harm(seen: &VictimWatch, attack: &str) {
    let complaint = seen.complaint();
    if let Some(complaint) = &complaint {
        println!("{attack}: {complaint}");
    }
    timed!(complaint.is_none(), "another tenant is served, {attack}");
    assert_time(
        &format!("99th percentile of another tenant, {attack}"),
        seen.p99(),
        P99_MAX,
    );
}

fn run(group: &str) {
    let setup = setup();
    let quiet = VictimWatch::run(setup, lasts());
    println!("quiet: {quiet}");
    assert_no_harm(&quiet, "without an attack");
    let mut wrong = Vec::new();
    for case in groups()
        .into_iter()
        .filter(|(name, _)| *name == group)
        .flat_map(|(_, cases)| cases)
    {
        if let Err(complaint) = run_case(setup, &case) {
            wrong.push(format!("{}: {complaint}", case.name));
        }
    }
    println!("{}", setup.memory());
    if !wrong.is_empty() {
        // The logs come before the failures, which would otherwise be hard to find.
        println!("{}", setup.mesh.logs());
    }
    assert!(
        wrong.is_empty(),
        "{} of {group}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn connections_and_streams_of_one_tenant_leave_the_gateway_to_others() {
    run("gateway");
}

#[test]
fn requests_and_packets_of_one_tenant_leave_the_gateway_to_others() {
    run("traffic");
}

#[test]
fn one_tenants_configuration_at_its_shares_leaves_memory_for_others() {
    run("configuration");
}

#[test]
fn one_tenants_tokens_and_objects_do_not_block_the_controller() {
    run("control");
}

#[test]
fn one_tenants_requesters_do_not_block_the_key_server() {
    run("keys");
}

#[test]
fn there_are_enough_cases_and_each_name_is_there_once() {
    let mut names: Vec<&str> = groups()
        .iter()
        .flat_map(|(_, cases)| cases.iter().map(|case| case.name))
        .collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert!(
        all >= CASES_MIN && names.len() == all,
        "{all} cases, {} names",
        names.len()
    );
    println!("{all} cases");
}

//! One tenant takes each limit that tenants share, by connections, bytes, requests, configuration and work, while another tenant is watched: its
//! goodput, its 99th percentile and its errors, and the memory of every process. Start at [`judge`].

mod control;
mod gateway;
mod keys;
mod stage;
mod traffic;
mod victim;

use std::time::Duration;

use canal_e2e::measure;
use stage::{Stage, stage};
use victim::Watch;

/// Cases that there must be.
const CASES_MIN: usize = 30;

/// How long each case lasts: `make test` runs it shortened, `make soak` whole.
fn lasts() -> Duration {
    Duration::from_secs(if std::env::var_os("CANAL_SOAK").is_some() { 15 } else { 3 })
}

/// Does what alpha does for so long.
type Attack = Box<dyn Fn(&Stage, Duration) -> u64 + Send + Sync>;

/// What alpha does, and how much of it there must have been for the case to count.
struct Case {
    name: &'static str,
    /// Returns how many times it was tried: connections, requests, bytes.
    attack: Attack,
    /// The least number of tries that makes it an attack.
    tries_min: u64,
    /// What takes alpha's doings back, so that the next case begins as this one.
    restore: Option<fn(&Stage)>,
}

impl Case {
    fn new(name: &'static str, tries_min: u64, attack: impl Fn(&Stage, Duration) -> u64 + Send + Sync + 'static) -> Self {
        Self { name, attack: Box::new(attack), tries_min, restore: None }
    }

    fn restored_by(mut self, restore: fn(&Stage)) -> Self {
        self.restore = Some(restore);
        self
    }
}

fn groups() -> [(&'static str, Vec<Case>); 4] {
    [("gateway", gateway::cases()), ("traffic", traffic::cases()), ("control", control::cases()), ("keys", keys::cases())]
}

/// Runs one case while beta is watched. The error says what of beta suffered, or that there was no attack.
fn judge(stage: &Stage, case: &Case) -> Result<String, String> {
    let lasts = lasts();
    let (tries, seen) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| Watch::run(stage, lasts));
        // The victim's load runs before the attack begins.
        std::thread::sleep(Duration::from_millis(200));
        let tries = (case.attack)(stage, lasts.saturating_sub(Duration::from_millis(400)));
        (tries, watch.join().expect("the watch ends"))
    });
    if let Some(restore) = case.restore {
        restore(stage);
    }
    if tries < case.tries_min {
        return Err(format!("there was no attack: {tries} tries, fewer than {}", case.tries_min));
    }
    let line = format!("{tries} tries; {seen}");
    match seen.complaint().or_else(|| stage.memory_complaint()) {
        None => Ok(line),
        Some(complaint) => Err(format!("{complaint} ({line})")),
    }
}

fn run(group: &str) {
    let stage = stage();
    let quiet = Watch::run(stage, lasts());
    println!("quiet: {quiet}");
    assert!(quiet.complaint().is_none(), "beta is not served even without an attack: {quiet}");
    let mut wrong = Vec::new();
    for case in groups().into_iter().filter(|(name, _)| *name == group).flat_map(|(_, cases)| cases) {
        match measure(case.name, || judge(stage, &case)) {
            Ok(line) => println!("{}: {line}", case.name),
            Err(complaint) => wrong.push(format!("{}: {complaint}", case.name)),
        }
    }
    println!("{}", stage.memory());
    if !wrong.is_empty() {
        // Before what was wrong, which nobody would find below so much.
        println!("{}", stage.mesh.logs());
    }
    assert!(wrong.is_empty(), "{} of {group}:\n{}", wrong.len(), wrong.join("\n"));
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
fn one_tenants_tokens_and_objects_leave_the_controller_to_others() {
    run("control");
}

#[test]
fn one_tenants_requesters_leave_the_key_server_to_others() {
    run("keys");
}

#[test]
fn there_are_enough_cases_and_each_name_is_there_once() {
    let mut names: Vec<&str> = groups().iter().flat_map(|(_, cases)| cases.iter().map(|case| case.name)).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert!(all >= CASES_MIN && names.len() == all, "{all} cases, {} names", names.len());
    println!("{all} cases");
}

//! Runs the suites: checks the rules, builds everything once, and runs the programs and cargo's own checks side by side. Then it reports seconds
//! and counts. It decides nothing about a test, and does not know how programs share the machine.

use std::time::Instant;

use crate::failures::Failures;
use crate::jobs::{Job, cargo_job};
use crate::programs;
use crate::report::{Count, Report};
use crate::schedule;
use crate::supply;
use crate::tree::Tree;

/// A suite: its name and what it is for.
const SUITES: [(&str, &str); 6] = [
    ("tidy", "the rules of the house"),
    ("supply", "licences, sources and known vulnerabilities of dependencies"),
    ("lint", "compiler and clippy warnings"),
    ("plain", "the programs as they are delivered, without the features that tests add"),
    ("unit", "crates: units, layouts, goldens, packet and netns tests"),
    (programs::E2E_SUITE, "whole meshes in worlds, faults, and the third-party judges"),
];

/// Everything that tests need, in the profile of tests and in one go: the programs alone would have other features, and half of all would be built
/// twice.
const BUILD: [&str; 6] = ["build", "--workspace", "--bins", "--tests", "--locked", "--message-format=json-render-diagnostics"];
const LINT: [&str; 7] = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
const PLAIN: [&str; 3] = ["check", "--workspace", "--locked"];

/// Where the whole output of each program stays until the next run.
const LOGS: &str = "target/test-logs";

/// Runs the named suites, or all when none is named. True when nothing failed.
pub(crate) fn run(wanted: &[&str]) -> anyhow::Result<bool> {
    if let Some(bad) = wanted.iter().find(|w| !SUITES.iter().any(|(name, _)| name == *w)) {
        anyhow::bail!("no suite {bad:?}; there are {}", SUITES.map(|s| s.0).join(", "));
    }
    let is_wanted = |name: &str| wanted.is_empty() || wanted.contains(&name);
    let tree = Tree::read()?;
    let (mut report, mut failures) = (Report::default(), Failures::default());
    for (name, what) in SUITES.iter().filter(|(name, _)| is_wanted(name)) {
        println!("== {name}: {what}");
    }
    if is_wanted("tidy") {
        let started = Instant::now();
        let ok = super::tidy(false)?;
        report.add("tidy", "tidy", started.elapsed(), Count::of(ok));
    }
    if is_wanted("supply") {
        supply::run(&tree, &mut report)?;
    }
    let mut jobs = Vec::new();
    if is_wanted("unit") || is_wanted("e2e") {
        println!("== build: everything that tests need");
        let started = Instant::now();
        let built = programs::build(&tree.root, &BUILD)?;
        let count = if built.is_some() { Count::default() } else { Count::of(false) };
        report.add("build", "build", started.elapsed(), count);
        let all = programs::jobs(&tree, &built.unwrap_or_default())?;
        let tests: u64 = all.iter().filter_map(|job| job.listed).sum();
        println!("== {tests} tests are listed by {} programs", all.len());
        jobs.extend(all.into_iter().filter(|job| is_wanted(job.suite)));
    }
    let beside = !jobs.is_empty();
    jobs.extend(checks(&tree, beside).into_iter().filter(|job| is_wanted(job.suite)));
    let logs = tree.root.join(LOGS);
    schedule::run(jobs, &logs, &mut report, &mut failures)?;
    report.print();
    println!("== all that the programs printed is in {LOGS}");
    failures.told().iter().for_each(|line| println!("{line}"));
    let total = report.total();
    println!("{} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped);
    Ok(total.failed == 0)
}

/// What cargo checks by itself. Beside programs, it leaves them the cores that they want.
fn checks(tree: &Tree, beside: bool) -> Vec<Job> {
    let documented = programs::documented(tree);
    let mut doc = vec!["test", "--doc", "--locked"];
    documented.iter().for_each(|package| doc.extend(["--package", package]));
    let mut jobs = vec![cargo_job(&tree.root, "lint", "lint", &LINT, beside), cargo_job(&tree.root, "plain", "plain", &PLAIN, beside)];
    if !documented.is_empty() {
        jobs.push(Job { counts_tests: true, listed: Some(1), ..cargo_job(&tree.root, "unit", "doc tests", &doc, beside) });
    }
    jobs
}

//! Runs the suites: installs what they need and builds what all of them use, then runs the programs, the rest of the build and cargo's own checks
//! side by side. Then it reports seconds and counts. It decides nothing about a test, and does not know how programs share the machine.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::failures::Failures;
use crate::jobs::{E2E_SUITE, Job, JobOutput, cargo_job};
use crate::programs::{self, LINTED};
use crate::report::{Count, Report};
use crate::schedule::JobSchedule;
use crate::supply;
use crate::timings;
use crate::tree::SourceTree;

/// Name and purpose of each suite.
const SUITES: [(&str, &str); 6] = [
    ("tidy", "the rules of the house"),
    ("supply", "licences, sources and known vulnerabilities of dependencies"),
    ("lint", "compiler and clippy warnings, of the same compilation as the programs"),
    ("plain", "the programs as they are delivered, without the features that tests add"),
    ("unit", "crates: units, layouts, goldens, packet and netns tests"),
    (E2E_SUITE, "whole meshes in worlds, faults, and the third-party checkers"),
];

/// What worlds run and what runs worlds, first and alone: then programs that mostly wait run beside the rest of the build. All of it is built as
/// one workspace, because parts of it alone would have other features, and half of all would be built twice.
const PROGRAMS: [&str; 8] =
    ["build", "--workspace", "--bins", "--test", "meshes", "--locked", "--timings", "--message-format=json-render-diagnostics"];
/// Everything else.
const TESTS: [&str; 6] = ["build", "--workspace", "--all-targets", "--locked", "--timings", "--message-format=json"];
/// The lints, when nothing else is asked for.
const LINT: [&str; 5] = ["check", "--workspace", "--all-targets", "--locked", "--message-format=json"];
const PLAIN: [&str; 3] = ["check", "--workspace", "--locked"];
/// Installs what tests need that the build does not.
const INSTALL: [&str; 2] = ["setup/install", "test"];
/// The flag that asks for that.
const WITH_INSTALL: &str = "--install";

/// Where the whole output of each program stays until the next run, and the table of the last run.
const LOGS: &str = "target/test-logs";
const TABLE: &str = "target/test-times.md";

/// Runs the named suites, or all when none is named. True when nothing failed.
pub(crate) fn run(words: &[&str]) -> anyhow::Result<bool> {
    let (flags, wanted): (Vec<&str>, Vec<&str>) = words.iter().copied().partition(|word| *word == WITH_INSTALL);
    if let Some(bad) = wanted.iter().find(|w| !SUITES.iter().any(|(name, _)| name == *w)) {
        anyhow::bail!("no suite {bad:?}; there are {}", SUITES.map(|s| s.0).join(", "));
    }
    let is_wanted = |name: &str| wanted.is_empty() || wanted.contains(&name);
    let tree = SourceTree::read()?;
    // The build replaces this program's file by an equal one.
    let own = std::env::current_exe()?;
    let (mut report, mut failures) = (Report::default(), Failures::default());
    for (name, what) in SUITES.iter().filter(|(name, _)| is_wanted(name)) {
        println!("== {name}: {what}");
    }
    let is_built = is_wanted("unit") || is_wanted("e2e");
    let programs = prepare(&tree.root, !flags.is_empty(), is_built, &mut report)?;
    let mut compiled = timings::take(&tree.root);
    let root = tree.root.clone();
    let supply = is_wanted("supply").then(|| std::thread::spawn(move || supply::run(&root)));
    let logs = tree.root.join(LOGS);
    let is_job_wanted = |suite: &str| suite == "build" || is_wanted(suite);
    let mut schedule = JobSchedule::new(&tree.root, &logs, &is_job_wanted)?;
    for program in &programs {
        schedule.add(programs::jobs(&tree.root, program)?)?;
    }
    let has_tests = is_wanted("unit") || is_wanted("lint");
    schedule.add(checks(&tree, &own, is_built && has_tests))?;
    schedule.run(&mut report, &mut failures)?;
    if let Some(supply) = supply {
        let results = supply.join().map_err(|_| anyhow::anyhow!("the checks of the supply panicked"))??;
        results.into_iter().for_each(|(name, took, count)| report.add("supply", name, took, count));
    }
    compiled.extend(timings::take(&tree.root));
    timings::add_to(&mut report, &compiled, &programs::packages(&tree)?);
    report.print();
    std::fs::write(tree.root.join(TABLE), report.markdown())?;
    println!("== all that the programs printed is in {LOGS}, this table in {TABLE}");
    failures.print_failures().iter().for_each(|line| println!("{line}"));
    let total = report.total();
    println!("{} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped);
    Ok(total.failed == 0)
}

/// Installs what is missing beside the build of the programs, and gives the test programs among these.
fn prepare(root: &Path, installs: bool, builds: bool, report: &mut Report) -> anyhow::Result<Vec<programs::TestProgram>> {
    let started = Instant::now();
    // Of an earlier build.
    drop(timings::take(root));
    let install = if installs { Some(Command::new(INSTALL[0]).args(&INSTALL[1..]).current_dir(root).spawn()?) } else { None };
    let mut built = Vec::new();
    if builds {
        println!("== build: what worlds run, and what runs worlds");
        let programs = programs::build(root, &PROGRAMS)?;
        report.add("build", "programs", started.elapsed(), programs.as_ref().map_or(Count::of(false), |_| Count::default()));
        built = programs.unwrap_or_default();
    }
    if let Some(mut install) = install {
        anyhow::ensure!(install.wait()?.success(), "{} failed", INSTALL.join(" "));
        report.add("build", "installation, beside the programs", started.elapsed(), Count::default());
    }
    Ok(built)
}

/// The rest of the build, which has the lints, what cargo checks by itself, and the rules of the house.
fn checks(tree: &SourceTree, own: &Path, builds_tests: bool) -> Vec<Job> {
    let linted = |job: Job| Job { output: JobOutput::Artifacts, environment: vec![(LINTED.0, LINTED.1.into())], ..job };
    let documented = programs::documented(tree);
    let mut doc = vec!["test", "--doc", "--locked"];
    documented.iter().for_each(|package| doc.extend(["--package", package]));
    let mut jobs = vec![cargo_job(&tree.root, "plain", "plain", &PLAIN)];
    if builds_tests {
        jobs.push(linted(cargo_job(&tree.root, "build", "tests", &TESTS)));
    } else {
        jobs.push(linted(cargo_job(&tree.root, "lint", "lint", &LINT)));
    }
    if !documented.is_empty() {
        jobs.push(Job { output: JobOutput::Tests, listed: Some(1), ..cargo_job(&tree.root, "unit", "doc tests", &doc) });
    }
    let tidy = vec![own.into(), "tidy".into()];
    let folder = tree.root.clone();
    jobs.push(Job { suite: "tidy", name: "tidy".into(), command: tidy, folder, output: JobOutput::Text, ..Job::default() });
    jobs
}

//! The timing tier: `cargo xtask timing [JOB…] [--tries N]` builds the release profile and runs
//! each timed test alone in a process of its own, several times. Meanwhile it watches the machine.
//! It decides no verdict.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::compile;
use crate::host;
use crate::jobs::Job;
use crate::outcomes::TIMED;
use crate::process::{self, ProcessEnd, TimeLimit};
use crate::programs;
use crate::report::RunClock;
use crate::standstill::{Quiet, Watch};
use crate::suites::RUN_ID;
use crate::tiers::TimedTests;
use crate::timing_table::{self, TimingRow, TimingRun};
use crate::timing_verdict::{JudgedFigure, Try, VOID_MAX, Verdict, decide_figures, read_try};
use crate::tree::SourceTree;

const BUILD: [&str; 9] = [
    "build",
    "--release",
    "--workspace",
    "--exclude=canal-bench-micro",
    "--bins",
    "--tests",
    "--locked",
    "--message-format=json",
    "--color=never",
];
/// Duration of a cold build on two cores.
/// It only serves the display of progress.
const BUILD_EXPECTED: Duration = Duration::from_secs(1_600);
const LOGS: &str = "target/timing-logs";
/// The environment variable that selects the tier, and its value with which figures are reported
/// and not asserted (`canal_timing`).
const TIER: (&str, &str) = ("CANAL_TIMING", "report");
/// Tries of each test. Four of five may decide, so that one bad moment of the machine does not
/// (docs/testing.md).
const TRIES: usize = 5;
/// Time limit of one try.
/// As long as the longest job of the gate may take (`LIMIT_MAX`).
const TRY_MAX: Duration = Duration::from_secs(900);
/// Exit status if the machine was too busy for a verdict.
/// It differs from 1, which means that a bound does not hold, and from 2, a wrong command.
const NO_VERDICT: u8 = 3;

/// A test, and the job that runs its program.
#[derive(Debug, Clone)]
struct TimedTest {
    job: Job,
    test: String,
}

/// Runs the timed tests of the named jobs, or all.
pub(crate) fn run(words: &[&str]) -> anyhow::Result<ExitCode> {
    let (wanted, tries) = read_words(words)?;
    let tree = SourceTree::read()?;
    let table = TimedTests::of(&tree.root)?;
    let logs = tree.root.join(LOGS);
    std::fs::create_dir_all(&logs)?;
    let clock = RunClock::new(BUILD_EXPECTED);
    // Times of unoptimized programs would say nothing.
    println!("== build: the release profile of all programs and tests");
    let build = compile::run(&tree.root, &BUILD, &[], &logs.join("build.log"), clock)?;
    if let Some(why) = build.failure() {
        why.iter().for_each(|line| println!("{line}"));
        anyhow::bail!("the build failed; its log is {LOGS}/build.log");
    }
    let jobs = programs::jobs(&tree.root, &build.programs)?;
    // A renamed test would run in no tier, so the table is checked first.
    let unknown = table.unknown(&jobs);
    anyhow::ensure!(unknown.is_empty(), "{}", unknown.join("\n"));
    let tests = choose(&jobs, &table, &wanted)?;
    let (commit, is_dirty) = host::commit(&tree.root)?;
    // Ten digits are enough to find the commit.
    let short: String = commit.chars().take(10).collect();
    // Figures of a changed tree are no figures of the commit.
    let commit = if is_dirty {
        format!("{short} with changes")
    } else {
        short
    };
    let of_run = TimingRun {
        commit,
        day: host::day()?,
        machine: host::machine()?,
    };
    let is_listed = |job: &str, test: &str| table.lists(job, test);
    let (mut rows, mut verdicts) = (Vec::new(), Vec::new());
    let started = Instant::now();
    for (n, timed) in tests.iter().enumerate() {
        println!(
            "== {} of {}, {} s: {} {}",
            n + 1,
            tests.len(),
            started.elapsed().as_secs(),
            timed.job.name,
            timed.test
        );
        let judged = run_test(timed, tries, &logs)?;
        judged
            .iter()
            .for_each(|figure| println!("    {}", describe(figure)));
        rows.extend(
            judged
                .iter()
                .map(|figure| TimingRow::of(&timed.job.name, &timed.test, figure, &of_run)),
        );
        verdicts.extend(
            judged
                .into_iter()
                .map(|figure| (format!("{} {}", timed.job.name, timed.test), figure)),
        );
        // The table is written after each test, so that an interrupted run keeps its figures.
        timing_table::write(&tree.root, &rows, &is_listed)?;
    }
    Ok(close(&verdicts))
}

fn read_words<'a>(words: &[&'a str]) -> anyhow::Result<(Vec<&'a str>, usize)> {
    let (mut wanted, mut tries) = (Vec::new(), TRIES);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if *word == "--tries" {
            let number = words.next().context("--tries needs a number")?;
            tries = number
                .parse::<usize>()
                .ok()
                .filter(|tries| *tries > 0)
                .with_context(|| format!("--tries {number}: not a number of tries"))?;
        } else {
            wanted.push(*word);
        }
    }
    Ok((wanted, tries))
}

/// Returns the timed tests of the selected jobs. A job is selected by its name, its package or its
/// module.
fn choose(jobs: &[Job], table: &TimedTests, wanted: &[&str]) -> anyhow::Result<Vec<TimedTest>> {
    let is_named =
        |job: &Job, word: &str| job.name == word || job.name.split(' ').any(|part| part == word);
    if let Some(bad) = wanted.iter().find(|word| {
        !jobs
            .iter()
            .any(|job| is_named(job, word) && !table.timing(job).is_empty())
    }) {
        anyhow::bail!(
            "no job {bad:?} has timed tests; testing/timed-tests.tsv lists those that do"
        );
    }
    let is_wanted = |job: &&Job| wanted.is_empty() || wanted.iter().any(|word| is_named(job, word));
    let tests = jobs
        .iter()
        .filter(is_wanted)
        .flat_map(|job| table.timing(job).into_iter().map(move |test| (job, test)));
    Ok(tests
        .map(|(job, test)| TimedTest {
            job: job.clone(),
            test,
        })
        .collect())
}

/// Runs one test until it has enough valid tries, or too many void ones.
fn run_test(timed: &TimedTest, wanted: usize, logs: &Path) -> anyhow::Result<Vec<JudgedFigure>> {
    let (mut tries, mut voids) = (Vec::new(), 0);
    while tries.len() < wanted && voids <= VOID_MAX {
        let watch = Watch::begin()?;
        let one = run_try(timed, tries.len() + voids + 1, logs)?;
        let quiet = watch.end()?;
        take(one, quiet, &mut tries, &mut voids);
    }
    Ok(decide_figures(&tries, voids))
}

/// Adds a valid try, or counts a void one.
fn take(one: Try, quiet: Quiet, tries: &mut Vec<Try>, voids: &mut usize) {
    if quiet.is_void() {
        *voids += 1;
        println!(
            "    void: a core stood still for {} ms, the host took {:.1} %",
            quiet.stall.as_millis(),
            quiet.steal_percent
        );
    } else {
        tries.push(one);
    }
}

/// Runs one test in a process of its own. The world of an end-to-end test is its own too.
fn run_try(timed: &TimedTest, n: usize, logs: &Path) -> anyhow::Result<Try> {
    let job = &timed.job;
    let mut words = job.command.clone();
    // The job's own flags set the number of test threads, which a single test does not need.
    words.retain(|word| !word.to_string_lossy().starts_with("--"));
    words.extend(["--exact", &timed.test, "--nocapture", "--test-threads=1"].map(Into::into));
    let log: PathBuf = logs.join(format!(
        "{} {} {n}.log",
        job.name,
        timed.test.replace("::", ".")
    ));
    let environment = [(TIER.0, TIER.1.into()), (RUN_ID, host::run_id().into())];
    let ended = process::run(
        &words,
        &job.folder,
        &environment,
        &log,
        TimeLimit::of(TRY_MAX),
    );
    if ended.end != ProcessEnd::Exited(true) {
        println!("    try {n} did not pass: {}", log.display());
    }
    let lines = ended
        .lines
        .iter()
        .filter_map(|line| line.strip_prefix(TIMED));
    read_try(lines, ended.end == ProcessEnd::Exited(true))
        .with_context(|| log.display().to_string())
}

fn describe(figure: &JudgedFigure) -> String {
    let JudgedFigure {
        name,
        bound,
        tries,
        result,
        verdict,
        ..
    } = figure;
    format!(
        "{}: {name}: {tries}; {result}, bound {bound}",
        verdict.name()
    )
}

/// Prints the failures and the counts, and returns the exit status.
fn close(verdicts: &[(String, JudgedFigure)]) -> ExitCode {
    let of = |wanted: Verdict| {
        verdicts
            .iter()
            .filter(move |(_, figure)| figure.verdict == wanted)
    };
    for (test, figure) in of(Verdict::Failed).chain(of(Verdict::Undecided)) {
        println!("{test}: {}", describe(figure));
    }
    println!(
        "== the table is {}, what the tests printed is in {LOGS}",
        timing_table::FILE
    );
    let (passed, failed, none) = (
        of(Verdict::Passed).count(),
        of(Verdict::Failed).count(),
        of(Verdict::Undecided).count(),
    );
    println!("{passed} figures passed, {failed} failed, {none} without a verdict");
    ExitCode::from(status(failed, none))
}

fn status(failed: usize, none: usize) -> u8 {
    match (failed, none) {
        (0, 0) => 0,
        (0, _) => NO_VERDICT,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str, tests: &[&str]) -> Job {
        Job {
            name: name.into(),
            tests: tests.iter().map(|test| (*test).to_owned()).collect(),
            folder: "/".into(),
            ..Job::default()
        }
    }

    #[test]
    fn jobs_are_chosen_by_name_package_or_module() {
        let table = TimedTests::read("a\tone\tboth\tx\nb tier\ttwo\ttiming\tx\n").unwrap();
        let jobs = [
            job("a", &["one", "other"]),
            job("b tier", &["two"]),
            job("b dns", &["three"]),
        ];
        let chosen = |wanted: &[&str]| -> Vec<String> {
            choose(&jobs, &table, wanted)
                .unwrap()
                .into_iter()
                .map(|timed| timed.test)
                .collect()
        };
        assert_eq!(chosen(&[]), ["one", "two"]);
        for word in ["b tier", "tier", "b"] {
            assert_eq!(chosen(&[word]), ["two"], "{word}");
        }
        assert!(
            choose(&jobs, &table, &["dns"]).is_err() && choose(&jobs, &table, &["none"]).is_err()
        );
        assert_eq!(read_words(&["a", "--tries", "3"]).unwrap(), (vec!["a"], 3));
        assert!(read_words(&["--tries", "0"]).is_err() && read_words(&["--tries"]).is_err());
    }

    #[test]
    fn a_failed_bound_takes_precedence_over_a_missing_verdict() {
        assert_eq!(
            [status(0, 0), status(0, 1), status(1, 0), status(1, 1)],
            [0, NO_VERDICT, 1, 1]
        );
    }

    /// Runs a fake test several times. The gate's machine may be busy, so no try is void here.
    fn verdicts(name: &str, script: &str) -> Vec<Verdict> {
        let logs =
            std::env::temp_dir().join(format!("canal-xtask-timing-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&logs).unwrap();
        let program = logs.join("program");
        std::fs::write(&program, script).unwrap();
        let job = Job {
            command: vec!["sh".into(), program.into(), "--show-output".into()],
            ..job(name, &["one"])
        };
        let timed = TimedTest {
            job,
            test: "one".into(),
        };
        let mut tries = Vec::new();
        for n in 1..=TRIES {
            let one = run_try(&timed, n, &logs).unwrap();
            take(one, Quiet::default(), &mut tries, &mut 0);
        }
        std::fs::remove_dir_all(logs).unwrap();
        decide_figures(&tries, 0)
            .into_iter()
            .map(|figure| figure.verdict)
            .collect()
    }

    #[test]
    fn a_planted_slow_test_fails_and_a_quick_one_passes() {
        let speaks = |figure: &str| {
            let ours = r#"[ "$*" = "--exact one --nocapture --test-threads=1" ] && [ "$CANAL_TIMING" = report ] || exit 1"#;
            format!("{ours}\nprintf 'test one ... \\nTIMED\\tseconds\\tend\\t{figure}\\t1\\nok\\n'")
        };
        assert_eq!(verdicts("quick", &speaks("0.2")), [Verdict::Passed; 2]);
        assert_eq!(
            verdicts("slow", &speaks("1.2")),
            [Verdict::Failed, Verdict::Passed]
        );
        assert_eq!(verdicts("fails", "exit 101"), [Verdict::Failed]);
    }
}

//! Runs the suites in stages. First the build, the checks of `xtask tidy` and the installation of
//! packages run in parallel. Then all programs run side by side, and failed ones run once more. At
//! the end it reports. It decides no verdict; [`crate::schedule`] shares the machine among the
//! programs.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::compile;
use crate::count::Count;
use crate::durations::{BUILD, Durations};
use crate::host;
use crate::jobs::{E2E_SUITE, Job, JobOutput, capacity, cargo_job};
use crate::programs::{self, LINTED, TestProgram};
use crate::report::Report;
use crate::schedule::{self, RunContext};
use crate::supply::{self, SupplyResult};
use crate::tiers::TimedTests;
use crate::timings;
use crate::tree::SourceTree;
use crate::verdict::{FIRST_FAILURES_MAX, JobResult, decide_second_pass, join};

/// Name and purpose of each suite.
const SUITES: [(&str, &str); 6] = [
    ("tidy", "the rules of the house"),
    (
        "supply",
        "licences, sources and known vulnerabilities of dependencies",
    ),
    (
        "lint",
        "compiler and clippy warnings, of the same compilation as the programs",
    ),
    (
        "plain",
        "the programs as they are delivered, without the features that tests add",
    ),
    (
        "unit",
        "crates: units, layouts, goldens, packet and netns tests",
    ),
    (
        E2E_SUITE,
        "whole meshes in worlds, faults, and the third-party checkers",
    ),
];

/// Arguments of the build of all programs and tests. The micro-benchmarks are no tests and have
/// dependencies of their own.
const TESTS: [&str; 9] = [
    "build",
    "--workspace",
    "--exclude=canal-bench-micro",
    "--bins",
    "--tests",
    "--locked",
    "--timings",
    "--message-format=json",
    "--color=never",
];
/// Arguments of the lints of the targets that the build of the tests leaves out.
const BENCHES: [&str; 6] = [
    "check",
    "--package=canal-bench-micro",
    "--package=canal-keyserver-engine",
    "--benches",
    "--locked",
    "--message-format=json",
];
/// Arguments of the lints if no tests are built.
const LINT: [&str; 5] = [
    "check",
    "--workspace",
    "--all-targets",
    "--locked",
    "--message-format=json",
];
/// Arguments of the check of the shipped programs, with their features alone.
const PLAIN: [&str; 8] = [
    "check",
    "--package=canal",
    "--package=canal-controller",
    "--package=canal-edge",
    "--package=canal-gateway",
    "--package=canal-keyserver",
    "--package=canal-node",
    "--locked",
];
/// Command that installs the packages that only tests need.
const INSTALL: [&str; 2] = ["setup/install", "test"];
/// Flag that runs [`INSTALL`] first, and flag that leaves out programs with namespaces or worlds.
const WITH_INSTALL: &str = "--install";
const WITHOUT_WORLDS: &str = "--no-worlds";

/// Folder of the whole output of each program, kept until the next run; files of the last run's
/// tables; and file of the unstable tests of all runs.
const LOGS: &str = "target/test-logs";
const TABLE: &str = "target/test-times.md";
const REPORT: &str = "target/test-report.json";
const UNSTABLE: &str = "target/unstable.jsonl";
/// Environment variable with the name of this run, which the jobs use in the names of their worlds.
pub(crate) const RUN_ID: &str = "CANAL_RUN_ID";

/// Suites and options of the command line.
struct SuiteSelection<'a> {
    suites: Vec<&'a str>,
    installs: bool,
    has_worlds: bool,
}

impl<'a> SuiteSelection<'a> {
    fn of(words: &[&'a str]) -> anyhow::Result<Self> {
        let (flags, suites): (Vec<&str>, Vec<&str>) = words
            .iter()
            .copied()
            .partition(|word| word.starts_with("--"));
        if let Some(bad) = suites
            .iter()
            .find(|w| !SUITES.iter().any(|(name, _)| name == *w))
        {
            anyhow::bail!(
                "no suite {bad:?}; there are {}",
                SUITES.map(|s| s.0).join(", ")
            );
        }
        if let Some(bad) = flags
            .iter()
            .find(|flag| ![WITH_INSTALL, WITHOUT_WORLDS].contains(flag))
        {
            anyhow::bail!("no flag {bad:?}; there are {WITH_INSTALL} and {WITHOUT_WORLDS}");
        }
        Ok(Self {
            suites,
            installs: flags.contains(&WITH_INSTALL),
            has_worlds: !flags.contains(&WITHOUT_WORLDS),
        })
    }

    fn has(&self, suite: &str) -> bool {
        self.suites.is_empty() || self.suites.contains(&suite)
    }

    /// Returns true if tests run, so that they must be built.
    fn builds(&self) -> bool {
        self.has("unit") || self.has(E2E_SUITE)
    }

    fn runs(&self, job: &Job) -> bool {
        self.has(job.suite) && (self.has_worlds || !job.needs_worlds())
    }
}

/// A run of the suites.
struct SuiteRun<'a> {
    selection: SuiteSelection<'a>,
    tree: SourceTree,
    /// Path of this program. The build replaces the file by an equal one.
    own: PathBuf,
    logs: PathBuf,
    timed: TimedTests,
    durations: Durations,
    report: Report,
    run_id: String,
}

/// Runs the named suites, or all if none is named. Returns true if the run passed.
pub(crate) fn run(words: &[&str]) -> anyhow::Result<bool> {
    let wanted = SuiteSelection::of(words)?;
    let tree = SourceTree::read()?;
    let logs = tree.root.join(LOGS);
    if logs.exists() {
        std::fs::remove_dir_all(&logs)?;
    }
    std::fs::create_dir_all(&logs).with_context(|| logs.display().to_string())?;
    let durations = Durations::read(&tree.root);
    let key = run_key(words);
    let report = Report::new(
        host::commit(&tree.root)?,
        host::moment()?,
        durations.expected(&key),
    );
    let timed = TimedTests::of(&tree.root)?;
    let run_id = host::run_id();
    let mut run = SuiteRun {
        selection: wanted,
        own: std::env::current_exe()?,
        tree,
        logs,
        timed,
        durations,
        report,
        run_id,
    };
    // A run that fails in any stage still prints its report.
    if let Err(e) = run.stages() {
        run.report
            .fail("run", "run", Duration::ZERO, vec![format!("{e:#}")]);
    } else if run.report.is_well() {
        run.durations.record(&key, run.report.clock.elapsed());
    }
    run.close()
}

/// Returns the key of such a run in the table of durations.
fn run_key(words: &[&str]) -> String {
    let suites: Vec<&str> = words
        .iter()
        .copied()
        .filter(|word| *word != WITH_INSTALL)
        .collect();
    format!("run {}", suites.join(" ")).trim_end().to_owned()
}

impl SuiteRun<'_> {
    /// Runs the stages. A failed build ends the run, because no test can begin.
    fn stages(&mut self) -> anyhow::Result<()> {
        for (name, what) in SUITES.iter().filter(|(name, _)| self.selection.has(name)) {
            println!("== {name}: {what}");
        }
        println!(
            "== elapsed and expected time stand before each line; run {}",
            self.run_id
        );
        let tidy = self.begin_tidy();
        let before = self.prepare();
        let built = self.build()?;
        self.receive(before)?;
        if let Some(tidy) = tidy {
            self.receive_tidy(tidy)?;
        }
        let Some(programs) = built else { return Ok(()) };
        let all = programs::jobs(&self.tree.root, &programs)?;
        let mut jobs: Vec<Job> = all
            .iter()
            .filter(|job| self.selection.runs(job))
            .filter_map(|job| self.timed.gate(job))
            .collect();
        if self.selection.builds() {
            self.check_tiers(&all);
        }
        jobs.extend(self.checks());
        self.pass("tests", jobs)
    }

    /// Starts the checks of `xtask tidy`, which use one core while the build runs.
    fn begin_tidy(&self) -> Option<JoinHandle<JobResult>> {
        let command = vec![self.own.clone().into(), "tidy".into()];
        let folder = self.tree.root.clone();
        let job = Job {
            suite: "tidy",
            name: "tidy".into(),
            command,
            folder,
            output: JobOutput::Text,
            ..Job::default()
        };
        let (logs, clock) = (self.logs.clone(), self.report.clock);
        let (expected, limit) = (
            self.durations.expected(&job.name),
            self.durations.limit(&job.name),
        );
        self.selection.has("tidy").then(|| {
            std::thread::spawn(move || schedule::run_check(job, &logs, clock, expected, limit))
        })
    }

    fn receive_tidy(&mut self, tidy: JoinHandle<JobResult>) -> anyhow::Result<()> {
        let result = tidy
            .join()
            .map_err(|_| anyhow::anyhow!("the rules of the house panicked"))?;
        self.durations.record(&result.job.name, result.counted);
        self.report.add_stage("tidy, beside the build", result.took);
        self.report.add_job(result);
        Ok(())
    }

    /// Starts to install the packages that tests need, and then checks the dependencies with the
    /// installed cargo-deny.
    fn prepare(&self) -> JoinHandle<anyhow::Result<(Duration, Vec<SupplyResult>)>> {
        let (root, log) = (self.tree.root.clone(), self.logs.join("installation.log"));
        let (installs, checks) = (self.selection.installs, self.selection.has("supply"));
        std::thread::spawn(move || {
            let started = Instant::now();
            if installs {
                let output = std::fs::File::create(&log)?;
                let errors = output.try_clone()?;
                let done = Command::new(INSTALL[0])
                    .args(&INSTALL[1..])
                    .current_dir(&root)
                    .stdout(output)
                    .stderr(errors)
                    .status()?;
                let printed = || std::fs::read_to_string(&log).unwrap_or_default();
                anyhow::ensure!(
                    done.success(),
                    "{} failed: {}",
                    INSTALL.join(" "),
                    printed().trim_end()
                );
            }
            let installed = started.elapsed();
            Ok((
                installed,
                if checks {
                    supply::run(&root)?
                } else {
                    Vec::new()
                },
            ))
        })
    }

    fn receive(
        &mut self,
        before: JoinHandle<anyhow::Result<(Duration, Vec<SupplyResult>)>>,
    ) -> anyhow::Result<()> {
        let (installed, checks) = before
            .join()
            .map_err(|_| anyhow::anyhow!("the checks of the supply panicked"))??;
        self.report
            .add_stage("installation, beside the build", installed);
        for SupplyResult {
            name,
            took,
            count,
            lines,
        } in checks
        {
            std::fs::write(
                self.logs.join(format!("{name}.log")),
                lines.join("\n") + "\n",
            )?;
            if count.failed > 0 {
                self.report.fail("supply", name, took, lines);
            } else {
                self.report.add("supply", name, took, count);
            }
        }
        Ok(())
    }

    /// Builds all programs and tests. Returns `None` if that failed, with the reason in the report.
    /// Findings of the lints fail the run but do not end it.
    fn build(&mut self) -> anyhow::Result<Option<Vec<TestProgram>>> {
        if !self.selection.builds() {
            return Ok(Some(Vec::new()));
        }
        // Discards the timings of an earlier build.
        drop(timings::take(&self.tree.root));
        let (started, clock) = (Instant::now(), self.report.clock);
        println!(
            "{} build begins, {} s expected",
            clock.stamp(),
            self.durations.expected(BUILD).as_secs()
        );
        let build = compile::run(
            &self.tree.root,
            &TESTS,
            &[LINTED],
            &self.logs.join("build.log"),
            clock,
        )?;
        let took = started.elapsed();
        println!(
            "{} build, {} s: {} test programs, {} findings",
            clock.stamp(),
            took.as_secs(),
            build.programs.len(),
            build.findings.len()
        );
        self.report.add_stage("build", took);
        if let Some(why) = build.failure() {
            self.report.fail("build", BUILD, took, why);
            return Ok(None);
        }
        self.durations.record(BUILD, took);
        // Timings of single crates are added to the report, so that slow ones are found.
        timings::add_to(
            &mut self.report,
            &timings::take(&self.tree.root),
            &programs::packages(&self.tree)?,
        );
        // A build is no test, so it counts as none.
        self.report.add("build", BUILD, took, Count::default());
        // The build compiles with clippy, so its findings are those of the lint.
        if self.selection.has("lint") {
            std::fs::copy(self.logs.join("build.log"), self.logs.join("lint.log"))?;
            let findings: Vec<String> = build
                .findings
                .iter()
                .flat_map(|text| text.lines())
                .map(str::to_owned)
                .collect();
            if findings.is_empty() {
                self.report
                    .add("lint", "lint", Duration::ZERO, Count::of(true));
            } else {
                findings.iter().for_each(|line| println!("    {line}"));
                self.report.fail("lint", "lint", Duration::ZERO, findings);
            }
        }
        Ok(Some(build.programs))
    }

    /// Counts the tests of both tiers, and reports each row of the table that names no test: no
    /// tier would run that test.
    fn check_tiers(&mut self, all: &[Job]) {
        println!("== {}", self.timed.count(all).line());
        let unknown = self.timed.unknown(all);
        if unknown.is_empty() {
            self.report
                .add("unit", "tiers", Duration::ZERO, Count::of(true));
        } else {
            let _ = std::fs::write(self.logs.join("tiers.log"), unknown.join("\n") + "\n");
            self.report.fail("unit", "tiers", Duration::ZERO, unknown);
        }
    }

    /// Returns the jobs of cargo's own checks, besides the tests.
    fn checks(&self) -> Vec<Job> {
        let root = &self.tree.root;
        let linted = |job: Job, output| Job {
            output,
            environment: vec![(LINTED.0, LINTED.1.into())],
            ..job
        };
        let mut jobs = vec![cargo_job(root, "plain", "plain", &PLAIN)];
        if !self.selection.builds() {
            jobs.push(linted(
                cargo_job(root, "lint", "lint", &LINT),
                JobOutput::Artifacts,
            ));
        } else if !self.selection.has_worlds {
            jobs.push(linted(
                cargo_job(root, "lint", "benches", &BENCHES),
                JobOutput::Artifacts,
            ));
        }
        let documented = programs::documented(&self.tree);
        let mut doc = vec!["test", "--doc", "--locked"];
        documented
            .iter()
            .for_each(|package| doc.extend(["--package", package]));
        if !documented.is_empty() {
            jobs.push(linted(
                cargo_job(root, "unit", "doc tests", &doc),
                JobOutput::Tests,
            ));
        }
        jobs.retain(|job| self.selection.has(job.suite));
        jobs
    }

    /// Runs jobs side by side, and then the failed ones once more.
    fn pass(&mut self, stage: &'static str, jobs: Vec<Job>) -> anyhow::Result<()> {
        if jobs.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        let cores = host::cores();
        let context = RunContext {
            logs: &self.logs,
            clock: self.report.clock,
            timed: &self.timed,
            environment: vec![(RUN_ID, self.run_id.clone().into())],
            capacity: capacity(cores),
            cores,
        };
        let expected = schedule::expected(&jobs, &self.durations, context.capacity);
        println!(
            "{} {stage}: {} jobs, {} s expected",
            context.clock.stamp(),
            jobs.len(),
            expected.as_secs()
        );
        let results = schedule::run(jobs, &context, &mut self.durations)?;
        self.report.add_stage(stage, started.elapsed());
        let again = decide_second_pass(&results);
        if again.is_empty()
            // With many failures the change is the cause, and a second pass would only take time.
            && results.iter().filter(|result| result.is_failed()).count() >= FIRST_FAILURES_MAX
        {
            println!(
                "{} no second pass: {FIRST_FAILURES_MAX} jobs failed or more",
                context.clock.stamp()
            );
        }
        let begun = Instant::now();
        let (mut ends, mut unstable): (Vec<JobResult>, Vec<_>) = (Vec::new(), Vec::new());
        for (n, first) in results.into_iter().enumerate() {
            if again.contains(&n) {
                // Alone, so that a second failure cannot come from the load of other jobs.
                let second = schedule::run_alone(
                    first.retry(),
                    &context,
                    self.durations.limit(&first.job.name),
                );
                let (joined, only_first) = join(first, second);
                ends.push(joined);
                unstable.extend(only_first);
            } else {
                ends.push(first);
            }
        }
        if !again.is_empty() {
            self.report.add_stage("second pass", begun.elapsed());
        }
        ends.into_iter().for_each(|end| self.report.add_job(end));
        self.report.add_unstable(unstable);
        Ok(())
    }

    /// Writes all reports and prints the last lines.
    fn close(self) -> anyhow::Result<bool> {
        let root: &Path = &self.tree.root;
        self.durations.write(root)?;
        self.report.print();
        std::fs::write(root.join(TABLE), self.report.markdown())?;
        std::fs::write(
            root.join(REPORT),
            serde_json::to_string_pretty(&self.report.json(LOGS))? + "\n",
        )?;
        let mut unstable = OpenOptions::new()
            .create(true)
            .append(true)
            .open(root.join(UNSTABLE))?;
        unstable.write_all(self.report.unstable_lines(host::load()).as_bytes())?;
        println!(
            "== all that the programs printed is in {LOGS}, the report in {REPORT}, a table of seconds in {TABLE}"
        );
        self.report
            .closing(LOGS)
            .iter()
            .for_each(|line| println!("{line}"));
        Ok(self.report.is_well())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_choose_suites_and_programs() {
        let job = |suite, name: &str| Job {
            suite,
            name: name.into(),
            ..Job::default()
        };
        let check = SuiteSelection::of(&["tidy", "lint", "unit", WITHOUT_WORLDS]).unwrap();
        assert!(check.has("lint") && !check.has("supply") && check.builds() && !check.installs);
        assert!(
            check.runs(&job("unit", "canal-model"))
                && !check.runs(&job("unit", "canal-world"))
                && !check.runs(&job(E2E_SUITE, "canal-e2e"))
        );
        let all = SuiteSelection::of(&[WITH_INSTALL]).unwrap();
        assert!(all.has("supply") && all.installs && all.runs(&job(E2E_SUITE, "canal-e2e tier")));
        assert!(SuiteSelection::of(&["none"]).is_err() && SuiteSelection::of(&["--none"]).is_err());
        assert_eq!(
            (run_key(&[WITH_INSTALL]), run_key(&["unit", WITHOUT_WORLDS])),
            ("run".into(), "run unit --no-worlds".into())
        );
    }
}

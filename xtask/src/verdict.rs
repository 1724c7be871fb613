//! The verdict on a job: derives counts and failures from the exit and the output of its process,
//! in one pass or two. It runs nothing.

use std::time::Duration;

use crate::count::Count;
use crate::jobs::{E2E_SUITE, Job, JobOutput};
use crate::outcomes::{self, Outcomes};
use crate::process::{EndedProcess, ProcessEnd};
use crate::programs::{self, CargoMessage};
use crate::tiers::TimedTests;

/// Lines of a check's output that a failure repeats.
/// They are the last ones, which name the cause; the log has the whole output.
const TEXT_LINES_MAX: usize = 30;
/// Names of tests that one failure lists.
/// The log has all of them.
const NAMES_MAX: usize = 5;
/// With this many failed jobs in the first pass, there is no second pass: the change is the cause,
/// not a busy machine.
/// The number was chosen (docs/testing.md).
pub(crate) const FIRST_FAILURES_MAX: usize = 5;
/// Maximum number of unstable jobs; with more, the run fails.
/// More suggest a defect of the change and not of the machine. The number was chosen
/// (docs/testing.md).
pub(crate) const UNSTABLE_MAX: usize = 2;

/// A failure with its job, its test and its reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) job: String,
    /// Empty if the job failed as a whole.
    pub(crate) test: String,
    pub(crate) message: Vec<String>,
}

/// A job that ended, with its verdict.
#[derive(Debug, Clone, Default)]
pub(crate) struct JobResult {
    pub(crate) job: Job,
    pub(crate) count: Count,
    pub(crate) failures: Vec<Failure>,
    /// Reasons that skipped tests printed.
    pub(crate) skips: Vec<String>,
    pub(crate) took: Duration,
    pub(crate) counted: Duration,
    /// True if the job's tests ended by themselves, so that the failed ones can run again without
    /// the others.
    pub(crate) is_complete: bool,
    /// True if a second run would fail in the same way.
    pub(crate) is_final: bool,
    pub(crate) first_pass_failures: usize,
}

impl Failure {
    /// Returns the failure in one line: the position of the panic, and the first line of its
    /// message.
    pub(crate) fn line(&self) -> String {
        let lines = self.message.iter().take(2).map(|line| {
            let place = line
                .strip_prefix("thread '")
                .and_then(|line| line.split_once("panicked at "));
            place.map_or(line.as_str(), |(_, place)| place).trim()
        });
        let text: Vec<&str> = lines.collect();
        if text.is_empty() {
            "without a word".to_owned()
        } else {
            text.join(" ")
        }
    }
}

impl JobResult {
    pub(crate) fn is_failed(&self) -> bool {
        self.count.failed > 0
    }

    pub(crate) fn may_retry(&self) -> bool {
        self.is_failed() && !self.is_final && self.job.may_retry()
    }

    /// Returns the job for the second pass. In a suite with worlds it is the whole module, because
    /// its tests share a world. In others it is the failed tests.
    pub(crate) fn retry(&self) -> Job {
        let failed: Vec<String> = self
            .failures
            .iter()
            .map(|failure| failure.test.clone())
            .collect();
        let is_named = self.is_complete
            && !failed.is_empty()
            && failed.iter().all(|test| self.job.tests.contains(test));
        if self.job.suite == E2E_SUITE || !is_named {
            self.job.clone()
        } else {
            self.job.only(failed)
        }
    }
}

/// Decides the verdict on a job that ended.
pub(crate) fn decide_result(job: Job, ended: &EndedProcess, timed: &TimedTests) -> JobResult {
    let (took, counted) = (ended.took, ended.counted);
    let skips = ended
        .lines
        .iter()
        .filter(|line| line.contains("SKIPPED:"))
        .cloned()
        .collect();
    let (count, failures, is_complete, is_final) = match job.output {
        JobOutput::Tests => decide_tests(&job, ended, timed),
        JobOutput::Text | JobOutput::Artifacts => decide_check(&job, ended),
    };
    let first_pass_failures = failures.len();
    JobResult {
        job,
        count,
        failures,
        skips,
        took,
        counted,
        is_complete,
        is_final,
        first_pass_failures,
    }
}

/// Returns the reason for a failed process by its exit alone; `None` if it succeeded.
fn why(end: &ProcessEnd) -> Option<String> {
    match end {
        ProcessEnd::Exited(true) => None,
        ProcessEnd::Exited(false) => Some("ended with an error".to_owned()),
        ProcessEnd::Killed(limit) => Some(format!("killed after {} s", limit.as_secs())),
        ProcessEnd::NotStarted(why) => Some(format!("did not start: {why}")),
    }
}

fn decide_check(job: &Job, ended: &EndedProcess) -> (Count, Vec<Failure>, bool, bool) {
    let mut lines = Vec::new();
    let mut findings = 0;
    for line in &ended.lines {
        match programs::read_message(line) {
            CargoMessage::Finding { text, .. } => {
                findings += 1;
                lines.extend(text.lines().map(str::to_owned));
            }
            CargoMessage::Words => lines.push(line.clone()),
            CargoMessage::Built(_) | CargoMessage::Other => {}
        }
    }
    let is_well = ended.end == ProcessEnd::Exited(true) && findings == 0;
    let mut message: Vec<String> = why(&ended.end).into_iter().collect();
    // The lines of a check give the reason. Its exit matters only if there are none.
    if !lines.is_empty() && ended.end == ProcessEnd::Exited(false) {
        message.clear();
    }
    message.extend(
        lines
            .iter()
            .skip(lines.len().saturating_sub(TEXT_LINES_MAX))
            .cloned(),
    );
    let failure = Failure {
        job: job.name.clone(),
        test: String::new(),
        message,
    };
    (
        Count::of(is_well),
        Vec::from_iter((!is_well).then_some(failure)),
        true,
        true,
    )
}

fn decide_tests(
    job: &Job,
    ended: &EndedProcess,
    timed: &TimedTests,
) -> (Count, Vec<Failure>, bool, bool) {
    let Outcomes {
        mut count,
        failed,
        unfinished,
        timed: figures,
    } = outcomes::read(&ended.lines, &job.tests);
    let failure = |test: &str, message: Vec<String>| Failure {
        job: job.name.clone(),
        test: test.to_owned(),
        message,
    };
    let mut failures: Vec<Failure> = failed
        .into_iter()
        .map(|failed| failure(&failed.test, failed.message))
        .collect();
    let is_complete =
        // A program that exits early could report some tests and hide the rest.
        matches!(ended.end, ProcessEnd::Exited(_)) && count.reported >= job.tests.len() as u64;
    match why(&ended.end) {
        // A failed test explains the exit status.
        Some(_) if is_complete && !failures.is_empty() => {}
        Some(why) => failures.push(failure(&names(&unfinished), vec![why])),
        None if !is_complete => {
            let why = format!("{} of {} tests ended", count.reported, job.tests.len());
            failures.push(failure(&names(&unfinished), vec![why]));
        }
        // The program ended well and reported every test.
        None => {}
    }
    // A program that crashes reports no failed test, but must not pass.
    count.failed = count.failed.max(failures.len() as u64);
    let mut unlisted: Vec<&str> = figures
        .iter()
        .map(|(test, _)| test.as_str())
        .filter(|test| !timed.lists(&job.name, test))
        .collect();
    // One test may report several figures.
    unlisted.dedup();
    for test in &unlisted {
        let why = "reports a time, so testing/timed-tests.tsv needs a row for it: tier `both` or `timing`";
        failures.push(failure(test, vec![why.to_owned()]));
        count.failed += 1;
    }
    (count, failures, is_complete, !unlisted.is_empty())
}

/// Returns the names of tests for one cell of a report.
fn names(tests: &[String]) -> String {
    let mut text = tests
        .iter()
        .take(NAMES_MAX)
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ");
    if tests.len() > NAMES_MAX {
        text += &format!(" and {} others", tests.len() - NAMES_MAX);
    }
    text
}

/// Returns the jobs that run once more: those that failed and may pass in a second run, if few
/// failed.
pub(crate) fn decide_second_pass(results: &[JobResult]) -> Vec<usize> {
    if results.iter().filter(|result| result.is_failed()).count() >= FIRST_FAILURES_MAX {
        return Vec::new();
    }
    (0..results.len())
        .filter(|n| results[*n].may_retry())
        .collect()
}

/// Joins the two runs of a job. The result has the verdict of the second run; failures of the first
/// run alone are returned beside it.
pub(crate) fn join(first: JobResult, second: JobResult) -> (JobResult, Vec<Failure>) {
    let is_whole = second.job.tests.len() == first.job.tests.len();
    let mut count = second.count;
    if !is_whole {
        count.passed += first.count.passed;
        count.skipped += first.count.skipped;
    }
    let fails_again = |failure: &Failure| {
        second
            .failures
            .iter()
            .any(|again| again.test == failure.test)
    };
    let unstable: Vec<Failure> = first
        .failures
        .into_iter()
        .filter(|failure| !second.is_failed() || !fails_again(failure))
        .collect();
    // A job that failed again counts as failed, not as unstable.
    let unstable = if second.is_failed() {
        Vec::new()
    } else {
        unstable
    };
    let joined = JobResult {
        job: first.job,
        count,
        failures: second.failures,
        skips: second.skips,
        took: first.took + second.took,
        counted: first.counted,
        is_complete: second.is_complete,
        is_final: second.is_final,
        first_pass_failures: first.first_pass_failures,
    };
    (joined, unstable)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended_process(lines: &[&str], end: ProcessEnd) -> EndedProcess {
        let lines = lines
            .iter()
            .flat_map(|line| line.lines())
            .map(str::to_owned)
            .collect();
        EndedProcess {
            end,
            lines,
            took: Duration::ZERO,
            counted: Duration::ZERO,
        }
    }

    fn job(suite: &'static str, tests: &[&str]) -> Job {
        Job {
            suite,
            name: "canal-hbone".into(),
            tests: tests.iter().map(|test| (*test).to_owned()).collect(),
            ..Job::default()
        }
    }

    fn decide_all(tests: &[&str], lines: &[&str], end: ProcessEnd) -> JobResult {
        decide_result(
            job("unit", tests),
            &ended_process(lines, end),
            &TimedTests::default(),
        )
    }

    const WELL: ProcessEnd = ProcessEnd::Exited(true);
    const GOOD: &str =
        "test a ... ok\ntest b ... ok\ntest result: ok. 2 passed; 0 failed; 0 ignored;";
    const BAD: &str = "test a ... FAILED\ntest b ... ok\n\nfailures:\n\n---- a stdout ----\n\nthread 'a' (8) panicked at c.rs:3:3:\nlost\n\n\
        failures:\n    a\n\ntest result: FAILED. 1 passed; 1 failed; 0 ignored;";

    #[test]
    fn a_job_that_dies_silently_has_failed() {
        // Any time limit will do; the message repeats it.
        let killed = ProcessEnd::Killed(Duration::from_secs(300));
        for (what, lines, end, tests, expected, why) in [
            ("well", GOOD, WELL, &["a", "b"][..], (2, 0), ""),
            (
                "an error at its end",
                GOOD,
                ProcessEnd::Exited(false),
                &["a", "b"],
                (2, 1),
                "ended with an error",
            ),
            (
                "killed",
                "test b ... \n",
                killed,
                &["a", "b"],
                (0, 1),
                "killed after 300 s",
            ),
            (
                "never started",
                "",
                ProcessEnd::NotStarted("none".into()),
                &["a"],
                (0, 1),
                "did not start: none",
            ),
            (
                "a test did not run",
                GOOD,
                WELL,
                &["a", "b", "c"],
                (2, 1),
                "2 of 3 tests ended",
            ),
            (
                "a test failed",
                BAD,
                ProcessEnd::Exited(false),
                &["a", "b"],
                (1, 1),
                "c.rs:3:3: lost",
            ),
        ] {
            let result = decide_all(tests, &[lines], end);
            assert_eq!(
                (result.count.passed, result.count.failed),
                expected,
                "{what}"
            );
            assert_eq!(
                result
                    .failures
                    .first()
                    .map(Failure::line)
                    // A job that went well has no failure.
                    .unwrap_or_default(),
                why,
                "{what}"
            );
        }
        let result = decide_all(
            &["a", "b"],
            &["test b ... \n"],
            ProcessEnd::Killed(Duration::from_secs(300)),
        );
        // The second test began and did not end, so it is named.
        assert_eq!(result.failures[0].test, "b", "the one that was running");
    }

    #[test]
    fn a_check_with_findings_has_failed() {
        let finding = r#"{"reason":"compiler-message","message":{"level":"warning","spans":[{}],"rendered":"warning: unused\n"}}"#;
        let lint = Job {
            output: JobOutput::Artifacts,
            ..Job::default()
        };
        let failed = |lines: &[&str], end| {
            decide_result(
                lint.clone(),
                &ended_process(lines, end),
                &TimedTests::default(),
            )
            .count
            .failed
        };
        assert_eq!(failed(&["words"], WELL), 0);
        assert_eq!(failed(&[finding], WELL), 1);
        assert_eq!(failed(&[], ProcessEnd::Exited(false)), 1);
    }

    #[test]
    fn a_time_that_no_row_lists_is_a_failure_that_is_final() {
        let lines = [
            "test a ... ok\nsuccesses:\n---- a stdout ----\nTIMED\tseconds\tend\t0.5\t1\ntest result: ok. 1 passed; 0 failed;",
        ];
        let unlisted = decide_all(&["a"], &lines, WELL);
        assert!(
            unlisted.failures[0].line().contains("timed-tests.tsv") && !unlisted.may_retry(),
            "{:?}",
            unlisted.failures
        );
        let table = TimedTests::read("canal-hbone\ta\tboth\tthe end\n").unwrap();
        assert!(
            !decide_result(job("unit", &["a"]), &ended_process(&lines, WELL), &table).is_failed()
        );
    }

    #[test]
    fn only_failed_tests_run_again_but_of_a_world_the_module() {
        let tests = ["a", "b"];
        assert_eq!(
            decide_all(&tests, &[BAD], ProcessEnd::Exited(false))
                .retry()
                .tests,
            ["a"]
        );
        let e2e = decide_result(
            job(E2E_SUITE, &tests),
            &ended_process(&[BAD], ProcessEnd::Exited(false)),
            &TimedTests::default(),
        );
        assert_eq!(e2e.retry().tests, tests);
        let hung = decide_all(
            &tests,
            &["test a ... FAILED\ntest b ... \n"],
            ProcessEnd::Killed(Duration::from_secs(300)),
        );
        assert_eq!(hung.retry().tests, tests, "one that was killed runs whole");
    }

    #[test]
    fn the_second_pass_is_for_few_failures_that_may_end_otherwise() {
        let bad = || decide_all(&["a", "b"], &[BAD], ProcessEnd::Exited(false));
        let good = || decide_all(&["a", "b"], &[GOOD], WELL);
        assert_eq!(
            decide_second_pass(&[bad(), good(), bad(), bad(), bad()]),
            [0, 2, 3, 4]
        );
        assert_eq!(
            decide_second_pass(&[bad(), bad(), bad(), bad(), bad()]),
            Vec::<usize>::new()
        );
        let pure = JobResult {
            job: Job {
                name: "canal-compiler".into(),
                ..job("unit", &["a", "b"])
            },
            ..bad()
        };
        assert_eq!(decide_second_pass(&[pure, bad()]), [1]);
    }

    #[test]
    fn a_test_that_passes_at_the_second_try_counts_once() {
        let first = || decide_all(&["a", "b"], &[BAD], ProcessEnd::Exited(false));
        let again = |lines: &str, end| {
            decide_result(
                first().retry(),
                &ended_process(&[lines], end),
                &TimedTests::default(),
            )
        };
        let good = again(
            "test a ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored;",
            WELL,
        );
        let (joined, unstable) = join(first(), good);
        assert_eq!(
            (
                joined.count.passed,
                joined.count.failed,
                joined.first_pass_failures
            ),
            (2, 0, 1)
        );
        assert_eq!(
            unstable.iter().map(Failure::line).collect::<Vec<_>>(),
            ["c.rs:3:3: lost"]
        );
        let bad = "test a ... FAILED\nfailures:\n    a\n\ntest result: FAILED. 0 passed; 1 failed; 0 ignored;";
        let (joined, unstable) = join(first(), again(bad, ProcessEnd::Exited(false)));
        assert_eq!(
            (joined.count.passed, joined.count.failed, unstable.len()),
            (1, 1, 0)
        );
    }
}

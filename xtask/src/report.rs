//! Report of a run: the counts of the suites, the time of each program, and the failures. It is
//! written to the terminal, as a table and as JSON. It decides no verdict.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::count::Count;
use crate::verdict::{Failure, JobResult, UNSTABLE_MAX};

/// The suite of rows that are units of the build.
pub(crate) const COMPILED: &str = "compile";

#[derive(Debug, Clone, Default)]
struct ReportRow {
    suite: &'static str,
    name: String,
    took: Duration,
    count: Count,
    first_pass_failures: usize,
}

/// Start of the run, and its expected duration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunClock {
    started: Instant,
    expected: Duration,
}

impl RunClock {
    pub(crate) fn new(expected: Duration) -> Self {
        Self {
            started: Instant::now(),
            expected,
        }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the elapsed and the expected time, with which each line of progress begins.
    pub(crate) fn stamp(&self) -> String {
        let text = |time: Duration| format!("{}:{:02}", time.as_secs() / 60, time.as_secs() % 60);
        format!("[{} / {}]", text(self.elapsed()), text(self.expected))
    }
}

/// The rows of a run, one for each program, and the failures.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) clock: RunClock,
    commit: String,
    is_dirty: bool,
    began: String,
    stages: Vec<(&'static str, Duration)>,
    rows: Vec<ReportRow>,
    failures: Vec<Failure>,
    unstable: Vec<Failure>,
}

impl Report {
    pub(crate) fn new(commit: (String, bool), began: String, expected: Duration) -> Self {
        let (stages, rows, failures, unstable) = Default::default();
        Self {
            clock: RunClock::new(expected),
            commit: commit.0,
            is_dirty: commit.1,
            began,
            stages,
            rows,
            failures,
            unstable,
        }
    }

    pub(crate) fn add(&mut self, suite: &'static str, name: &str, took: Duration, count: Count) {
        self.rows.push(ReportRow {
            suite,
            name: name.to_owned(),
            took,
            count,
            first_pass_failures: 0,
        });
    }

    pub(crate) fn add_stage(&mut self, name: &'static str, took: Duration) {
        self.stages.push((name, took));
    }

    /// Adds a job that ended, after its second pass if it has one.
    pub(crate) fn add_job(&mut self, result: JobResult) {
        let JobResult {
            job,
            count,
            failures,
            took,
            first_pass_failures,
            ..
        } = result;
        self.rows.push(ReportRow {
            suite: job.suite,
            name: job.name,
            took,
            count,
            first_pass_failures,
        });
        self.failures.extend(failures);
    }

    /// Adds a failure outside a test program.
    pub(crate) fn fail(
        &mut self,
        suite: &'static str,
        name: &str,
        took: Duration,
        message: Vec<String>,
    ) {
        self.rows.push(ReportRow {
            suite,
            name: name.to_owned(),
            took,
            count: Count::of(false),
            first_pass_failures: 1,
        });
        self.failures.push(Failure {
            job: name.to_owned(),
            test: String::new(),
            message,
        });
    }

    pub(crate) fn add_unstable(&mut self, unstable: Vec<Failure>) {
        self.unstable.extend(unstable);
    }

    pub(crate) fn total(&self) -> Count {
        let mut total = Count::default();
        self.rows.iter().for_each(|row| total.add(row.count));
        total
    }

    /// Returns the number of jobs that failed in the first pass and passed in the second.
    fn unstable_jobs(&self) -> usize {
        self.unstable
            .iter()
            .map(|failure| failure.job.as_str())
            .collect::<BTreeSet<_>>()
            .len()
    }

    /// Returns whether the run passed.
    pub(crate) fn is_well(&self) -> bool {
        self.total().failed == 0 && self.unstable_jobs() <= UNSTABLE_MAX
    }

    /// Prints the suites and their programs, longest first.
    pub(crate) fn print(&self) {
        println!("== seconds, passed, failed, skipped: by suite and by program");
        for (row, indent) in self.table() {
            let Count {
                passed,
                failed,
                skipped,
                ..
            } = row.count;
            println!(
                "{:>7} {passed:>6} {failed:>4} {skipped:>4}  {indent}{}",
                seconds(row.took),
                row.name
            );
        }
        for (stage, took) in &self.stages {
            println!("{:>7}  {stage}", seconds(*took));
        }
        println!(
            "== {} s from begin to end; programs of one suite, and suites, run side by side",
            self.clock.elapsed().as_secs()
        );
    }

    /// Returns the last lines of the output: failures with reasons, unstable jobs, and the counts
    /// on the last line.
    pub(crate) fn closing(&self, logs: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for failure in &self.failures {
            let test = if failure.test.is_empty() {
                String::new()
            } else {
                format!(": {}", failure.test)
            };
            lines.push(format!("FAILED: {}{test}: {}", failure.job, failure.line()));
            lines.extend(failure.message.iter().map(|line| format!("    {line}")));
            lines.push(format!("    log: {logs}/{}.log", failure.job));
        }
        if self.unstable_jobs() > UNSTABLE_MAX {
            lines.push(format!(
                "FAILED: the run: more than {UNSTABLE_MAX} jobs passed only at their second try"
            ));
        }
        for failure in &self.unstable {
            lines.push(format!(
                "UNSTABLE: {}: {}: {}",
                failure.job,
                failure.test,
                failure.line()
            ));
        }
        let total = self.total();
        lines.push(format!("{} unstable", self.unstable_jobs()));
        lines.push(format!(
            "{} passed, {} failed, {} skipped",
            total.passed, total.failed, total.skipped
        ));
        lines
    }

    /// Returns the whole report as JSON. Only the run's own keys are named `passed`, `failed` and
    /// `skipped`, so that a search for one of them finds the right one.
    pub(crate) fn json(&self, logs: &str) -> Value {
        let tenths = |time: Duration| (time.as_secs_f64() * 10.0).round() / 10.0;
        let stages: Vec<Value> = self
            .stages
            .iter()
            .map(|(name, took)| json!({"stage": name, "seconds": tenths(*took)}))
            .collect();
        let job = |row: &ReportRow| {
            json!({
                "suite": row.suite, "job": row.name, "seconds": tenths(row.took), "tests": row.count.reported,
                "first_pass_failures": row.first_pass_failures, "log": format!("{logs}/{}.log", row.name),
            })
        };
        let jobs: Vec<Value> = self
            .rows
            .iter()
            .filter(|row| row.suite != COMPILED)
            .map(job)
            .collect();
        let failure = |failure: &Failure| json!({"job": failure.job, "test": failure.test, "message": failure.message.join("\n")});
        let total = self.total();
        json!({
            "commit": self.commit, "dirty": self.is_dirty, "began": self.began, "seconds": tenths(self.clock.elapsed()),
            "verdict": if self.is_well() { "good" } else { "bad" },
            "passed": total.passed, "failed": total.failed, "skipped": total.skipped,
            "failures": self.failures.iter().map(failure).collect::<Vec<_>>(),
            "unstable": self.unstable.iter().map(failure).collect::<Vec<_>>(),
            "stages": stages, "jobs": jobs,
        })
    }

    /// Returns a line of JSON for each unstable test. These lines are kept from run to run.
    pub(crate) fn unstable_lines(&self, load: f64) -> String {
        let line = |failure: &Failure| {
            json!({
                "commit": self.commit, "dirty": self.is_dirty, "job": failure.job, "test": failure.test, "message": failure.line(),
                "load": load, "when": self.began,
            })
        };
        self.unstable
            .iter()
            .map(|failure| format!("{}\n", line(failure)))
            .collect()
    }

    /// Returns the table as Markdown.
    pub(crate) fn markdown(&self) -> String {
        let mut text =
            "| suite and program | seconds | passed | failed | skipped |\n|---|---|---|---|---|\n"
                .to_owned();
        for (row, indent) in self.table() {
            let name = if indent.is_empty() {
                format!("**{}**", row.name)
            } else {
                row.name
            };
            let Count {
                passed,
                failed,
                skipped,
                ..
            } = row.count;
            let _ = writeln!(
                text,
                "| {name} | {} | {passed} | {failed} | {skipped} |",
                seconds(row.took)
            );
        }
        let _ = writeln!(
            text,
            "| **from begin to end** | {} | | | |",
            self.clock.elapsed().as_secs()
        );
        text
    }

    /// Returns a row for each suite with the sums of its programs, followed by a row for each
    /// program, indented.
    fn table(&self) -> Vec<(ReportRow, &'static str)> {
        let mut suites: Vec<&'static str> = Vec::new();
        self.rows
            .iter()
            .for_each(|row| suites.extend(Some(row.suite).filter(|suite| !suites.contains(suite))));
        let mut table = Vec::new();
        for suite in suites {
            let mut rows: Vec<&ReportRow> =
                self.rows.iter().filter(|row| row.suite == suite).collect();
            rows.sort_by_key(|row| std::cmp::Reverse(row.took));
            let mut sum = ReportRow {
                suite,
                name: format!("{suite}, {} programs", rows.len()),
                ..ReportRow::default()
            };
            for row in &rows {
                sum.count.add(row.count);
                sum.took += row.took;
            }
            table.push((sum, ""));
            table.extend(
                rows.iter()
                    .filter(|row| row.name != suite)
                    .map(|row| ((*row).clone(), "    ")),
            );
        }
        table
    }
}

fn seconds(time: Duration) -> u64 {
    time.as_secs_f64().round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::Job;

    fn empty() -> Report {
        Report::new(
            ("abc".into(), true),
            "2026-01-01T00:00:00Z".into(),
            Duration::from_secs(61),
        )
    }

    fn failure(job: &str, test: &str) -> Failure {
        Failure {
            job: job.into(),
            test: test.into(),
            message: vec!["thread 'a' (8) panicked at c.rs:3:3:".into(), "lost".into()],
        }
    }

    #[test]
    fn the_summary_lists_failures_with_reasons_and_ends_with_counts() {
        let mut report = empty();
        report.add(
            "unit",
            "a",
            Duration::ZERO,
            Count {
                passed: 3,
                ..Count::default()
            },
        );
        let job = Job {
            suite: "unit",
            name: "b".into(),
            ..Job::default()
        };
        let failures = vec![failure("b", "one")];
        report.add_job(JobResult {
            job,
            count: Count {
                passed: 1,
                failed: 1,
                ..Count::default()
            },
            failures,
            ..JobResult::default()
        });
        report.add_unstable(vec![failure("c", "two")]);
        let expected = [
            "FAILED: b: one: c.rs:3:3: lost",
            "    thread 'a' (8) panicked at c.rs:3:3:",
            "    lost",
            "    log: logs/b.log",
            "UNSTABLE: c: two: c.rs:3:3: lost",
            "1 unstable",
            "4 passed, 1 failed, 0 skipped",
        ];
        assert_eq!(report.closing("logs"), expected);
        // The report expects a run of 61 s, and its clock has just begun.
        assert!(
            report.clock.stamp().starts_with("[0:00 / 1:01]"),
            "{}",
            report.clock.stamp()
        );
    }

    #[test]
    fn the_report_has_the_numbers_of_the_run_once() {
        let mut report = empty();
        report.fail(
            "lint",
            "lint",
            Duration::from_millis(1_240),
            vec!["unused".into()],
        );
        report.add("compile", "a unit", Duration::ZERO, Count::default());
        report.add_stage("build", Duration::from_secs(2));
        report.add_unstable(vec![failure("c", "two")]);
        let json = report.json("logs");
        for key in ["passed", "failed", "skipped"] {
            assert_eq!(
                json.to_string().matches(&format!("\"{key}\":")).count(),
                1,
                "{key}"
            );
        }
        assert_eq!(
            (&json["failed"], &json["dirty"], &json["commit"]),
            (&json!(1), &json!(true), &json!("abc"))
        );
        assert_eq!(
            json["jobs"],
            json!([{"suite": "lint", "job": "lint", "seconds": 1.2, "tests": 0, "first_pass_failures": 1, "log": "logs/lint.log"}])
        );
        assert_eq!(json["stages"], json!([{"stage": "build", "seconds": 2.0}]));
        assert_eq!(json["unstable"][0]["test"], "two");
        let line: Value = serde_json::from_str(report.unstable_lines(1.5).trim_end()).unwrap();
        assert_eq!(
            (&line["job"], &line["message"], &line["load"]),
            (&json!("c"), &json!("c.rs:3:3: lost"), &json!(1.5))
        );
    }

    #[test]
    fn few_unstable_jobs_are_the_weather() {
        let mut report = empty();
        report.add_unstable(vec![
            failure("a", "one"),
            failure("a", "two"),
            failure("b", "one"),
        ]);
        assert!(report.is_well(), "two jobs");
        report.add_unstable(vec![failure("c", "one")]);
        assert!(!report.is_well(), "three jobs");
        assert!(report.closing("logs")[0].starts_with("FAILED: the run: more than 2 jobs"));
        let mut failed = empty();
        failed.fail("lint", "lint", Duration::ZERO, Vec::new());
        assert!(!failed.is_well());
    }

    #[test]
    fn rows_stand_under_their_suite_longest_first() {
        let mut report = empty();
        let count = |passed| Count {
            passed,
            ..Count::default()
        };
        report.add("lint", "lint", Duration::from_secs(9), Count::of(true));
        report.add("unit", "a", Duration::from_secs(2), count(3));
        report.add("e2e", "c", Duration::from_secs(1), count(1));
        report.add("unit", "b", Duration::from_secs(5), count(4));
        let expected = [
            "| **lint, 1 programs** | 9 | 1 | 0 | 0 |",
            "| **unit, 2 programs** | 7 | 7 | 0 | 0 |",
            "| b | 5 | 4 | 0 | 0 |",
            "| a | 2 | 3 | 0 | 0 |",
            "| **e2e, 1 programs** | 1 | 1 | 0 | 0 |",
            "| c | 1 | 1 | 0 | 0 |",
            "| **from begin to end** | 0 | | | |",
        ];
        assert_eq!(
            report.markdown().lines().skip(2).collect::<Vec<_>>(),
            expected
        );
        assert_eq!(report.total(), count(9));
    }
}

//! Parser of a test program's output: counts, failed tests with their panics, tests that did not
//! end, and tests that reported a time. It reads libtest's output and decides no verdict. Start at
//! [`read`].

use std::collections::{BTreeMap, BTreeSet};

use crate::count::{Count, read_line};

/// Limits on the repeated part of one panic: lines, and characters per line.
/// The log has the whole text.
const LINES_MAX: usize = 10;
/// An assertion that prints two large values must not fill the report.
const CHARS_MAX: usize = 400;
/// Prefix of a line that reports a time, a rate or a loss (`canal_timing::LINE`).
pub(crate) const TIMED: &str = "TIMED\t";

/// A test that failed, with the panic message of its thread.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FailedTest {
    pub(crate) test: String,
    pub(crate) message: Vec<String>,
}

/// Results that a program's output contains.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    pub(crate) count: Count,
    pub(crate) failed: Vec<FailedTest>,
    /// Tests that did not end. If tests run one by one, only the one that had begun.
    pub(crate) unfinished: Vec<String>,
    /// Lines of figures, after [`TIMED`], by the test that printed them.
    pub(crate) timed: Vec<(String, String)>,
}

/// Reads the output of a program that runs these tests.
pub(crate) fn read(lines: &[String], tests: &[String]) -> Outcomes {
    let mut reader = OutcomeReader::default();
    lines.iter().for_each(|line| reader.read_line(line));
    let unfinished = match reader.running {
        Some(running) => vec![running],
        None => tests
            .iter()
            .filter(|test| !reader.finished.contains(*test))
            .cloned()
            .collect(),
    };
    let mut failed: BTreeMap<String, Vec<String>> = reader
        .failed
        .into_iter()
        .map(|test| (test, Vec::new()))
        .collect();
    for (thread, message) in reader.panics {
        failed
            .entry(thread)
            .and_modify(|lines| lines.extend(message));
    }
    let failed = failed
        .into_iter()
        .map(|(test, message)| FailedTest { test, message })
        .collect();
    Outcomes {
        count: reader.count,
        failed,
        unfinished,
        timed: reader.timed,
    }
}

#[derive(Default)]
struct OutcomeReader {
    count: Count,
    /// Panics: the thread's name and the lines of its message.
    panics: Vec<(String, Vec<String>)>,
    is_panicking: bool,
    lists_failed: bool,
    failed: BTreeSet<String>,
    finished: BTreeSet<String>,
    /// The test whose line has no result yet.
    running: Option<String>,
    /// The test whose output this is.
    speaks: String,
    timed: Vec<(String, String)>,
}

impl OutcomeReader {
    fn read_line(&mut self, line: &str) {
        self.count.add(read_line(line));
        self.read_state(line);
        self.read_panic(line);
        if let Some(figure) = line.strip_prefix(TIMED) {
            self.timed.push((self.speaks.clone(), figure.to_owned()));
        }
        if line == "failures:" {
            // libtest prints the list of names last, under this heading.
            self.lists_failed = true;
        } else if self.lists_failed && line.starts_with("    ") {
            self.failed.insert(line.trim().to_owned());
        } else if line.starts_with("---- ") {
            self.lists_failed = false;
        }
        if line.starts_with("test result: ") {
            self.lists_failed = false;
        }
    }

    /// Reads the begin and the result of a test: `test NAME ... ok`, or the result on a later line
    /// if tests run one by one.
    fn read_state(&mut self, line: &str) {
        let is_result = |word: &str| matches!(word, "ok" | "FAILED") || word.starts_with("ignored");
        if let Some((name, rest)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "))
        {
            let name = name
                .strip_suffix(" - should panic")
                .unwrap_or(name)
                .to_owned();
            self.end_running("");
            self.speaks.clone_from(&name);
            self.running = Some(name);
            if is_result(rest.trim()) {
                self.end_running(rest);
            }
        } else if is_result(line) {
            self.end_running(line);
        } else if let Some(name) = line
            .strip_prefix("---- ")
            .and_then(|rest| rest.strip_suffix(" stdout ----"))
        {
            name.clone_into(&mut self.speaks);
        } else if line.starts_with("test result: ") || line == "failures:" || line == "successes:" {
            self.end_running("");
        }
    }

    fn end_running(&mut self, result: &str) {
        let Some(name) = self.running.take() else {
            return;
        };
        if result.trim() == "FAILED" {
            self.failed.insert(name.clone());
        }
        self.finished.insert(name);
    }

    fn read_panic(&mut self, line: &str) {
        if let Some(name) = line
            .strip_prefix("thread '")
            .filter(|l| l.contains("panicked at"))
            .and_then(|l| l.split('\'').next())
        {
            self.panics.push((name.to_owned(), Vec::new()));
            self.is_panicking = true;
        } else if line.starts_with("Error: ") && !self.speaks.is_empty() {
            // The error that a test returned, which is no panic.
            self.panics.push((self.speaks.clone(), Vec::new()));
            self.is_panicking = true;
        }
        self.is_panicking &= !["note: ", "test ", "---- "]
            .iter()
            .any(|start| line.starts_with(start))
            && !line.starts_with(TIMED);
        self.is_panicking &= !matches!(line, "FAILED" | "ok" | "failures:" | "stack backtrace:");
        if let Some((_, output)) = self
            .panics
            .last_mut()
            .filter(|(_, output)| self.is_panicking && output.len() < LINES_MAX)
            && !line.is_empty()
        {
            output.push(line.chars().take(CHARS_MAX).collect());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str, tests: &[&str]) -> Outcomes {
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        read(
            &lines,
            &tests
                .iter()
                .map(|test| (*test).to_owned())
                .collect::<Vec<_>>(),
        )
    }

    fn failed(test: &str, message: &[&str]) -> FailedTest {
        FailedTest {
            test: test.into(),
            message: message.iter().map(|line| (*line).to_owned()).collect(),
        }
    }

    #[test]
    fn only_panics_of_failed_tests_are_reported() {
        // With one thread, panics are printed inside; a panic that a passed test caught must not be
        // reported.
        let one_by_one = read_text(
            "running 2 tests\ntest that_passes ... \nthread 'that_passes' (6) panicked at a.rs:1:1:\ncaught\nok\n\
            test that_fails ... \nthread 'that_fails' (7) panicked at b.rs:2:2:\nnot within 20s: peace\nnote: run with `RUST_BACKTRACE=1`\nFAILED\n\n\
            failures:\n\nfailures:\n    that_fails\n\ntest result: FAILED. 1 passed; 1 failed;",
            &["that_passes", "that_fails"],
        );
        assert_eq!(
            one_by_one.failed,
            [failed(
                "that_fails",
                &[
                    "thread 'that_fails' (7) panicked at b.rs:2:2:",
                    "not within 20s: peace"
                ]
            )]
        );
        assert_eq!(
            (
                one_by_one.count.passed,
                one_by_one.count.failed,
                one_by_one.unfinished
            ),
            (1, 1, Vec::new())
        );
        // With captured output, libtest prints panics of failed tests at the end.
        let captured = read_text(
            "test a::b ... FAILED\ntest c ... ok\n\nsuccesses:\n\n---- c stdout ----\nwords\n\nsuccesses:\n    c\n\nfailures:\n\n---- a::b stdout ----\n\n\
            thread 'a::b' (8) panicked at c.rs:3:3:\n    left: 1\n   right: 2\nnote: run with\n\n\nfailures:\n    a::b\n\n\
            test result: FAILED. 1 passed; 1 failed;",
            &["a::b", "c"],
        );
        assert_eq!(
            captured.failed,
            [failed(
                "a::b",
                &[
                    "thread 'a::b' (8) panicked at c.rs:3:3:",
                    "    left: 1",
                    "   right: 2"
                ]
            )]
        );
        // A test may fail without a panic, by returning an error.
        let returned = read_text(
            "test a ... FAILED\nfailures:\n\n---- a stdout ----\nError: \"none\"\n\nfailures:\n    a\n",
            &["a"],
        );
        assert_eq!(returned.failed, [failed("a", &["Error: \"none\""])]);
    }

    #[test]
    fn the_test_that_hangs_is_named() {
        let all = ["a", "b", "c"];
        assert_eq!(
            read_text("test a ... words\nok\ntest b ... \nwords\n", &all).unfinished,
            ["b"],
            "one by one"
        );
        assert_eq!(
            read_text("test b ... ok\n", &all).unfinished,
            ["a", "c"],
            "side by side"
        );
        assert_eq!(read_text("", &all).unfinished, all, "at its begin");
        assert_eq!(
            read_text("test a - should panic ... ok\n", &["a"]).unfinished,
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_test_that_fails_before_a_kill_is_reported() {
        let killed = read_text(
            "test a ... \nthread 'a' (7) panicked at b.rs:2:2:\nlost\nFAILED\ntest b ... \n",
            &["a", "b"],
        );
        assert_eq!(
            killed.failed,
            [failed(
                "a",
                &["thread 'a' (7) panicked at b.rs:2:2:", "lost"]
            )]
        );
        assert_eq!(killed.unfinished, ["b"]);
    }

    #[test]
    fn a_figure_belongs_to_the_test_that_prints_it() {
        let pairs = |test: &str, figure: &str| (test.to_owned(), figure.to_owned());
        let one_by_one = "test a ... \nTIMED\tseconds\tend\t0.5\t1\nok\ntest b ... ok\n";
        assert_eq!(
            read_text(one_by_one, &["a", "b"]).timed,
            [pairs("a", "seconds\tend\t0.5\t1")]
        );
        let captured = "test a ... ok\ntest b ... ok\n\nsuccesses:\n\n---- a stdout ----\n\nTIMED\tholds\tpace\ttrue\ttrue\n\nsuccesses:\n    a\n";
        assert_eq!(
            read_text(captured, &["a", "b"]).timed,
            [pairs("a", "holds\tpace\ttrue\ttrue")]
        );
    }
}

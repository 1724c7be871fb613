//! What the suites counted and how long each program took, as a table on the terminal and as one in a file. It reads libtest's counts and decides
//! nothing about a test.

use std::fmt::Write as _;
use std::time::Duration;

/// Numbers of tests by outcome.
#[derive(Default, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
    /// Number of tests whose outcome libtest reported, ignored ones included.
    pub(crate) reported: u64,
}

impl Count {
    /// Returns the count of one check.
    pub(crate) fn of(is_well: bool) -> Self {
        Self { passed: is_well.into(), failed: (!is_well).into(), ..Self::default() }
    }

    pub(crate) fn add(&mut self, more: Self) {
        self.passed += more.passed;
        self.failed += more.failed;
        self.skipped += more.skipped;
        self.reported += more.reported;
    }
}

/// Reads `test result: ok. 5 passed; 0 failed; 0 ignored; …` and our own `SKIPPED: why` lines.
pub(crate) fn read_line(line: &str) -> Count {
    let mut c = Count::default();
    // If tests run one by one, the first output of a test follows its name on the same line.
    let text = line.split_once(" ... ").filter(|_| line.starts_with("test ")).map_or(line, |(_, text)| text);
    if text.trim_start().starts_with("SKIPPED:") {
        c.skipped = 1;
    }
    let Some(rest) = line.strip_prefix("test result: ") else { return c };
    for part in rest.split(['.', ';']) {
        let mut words = part.split_whitespace();
        let (Some(n), Some(what)) = (words.next().and_then(|n| n.parse::<u64>().ok()), words.next()) else { continue };
        match what {
            "passed" => c.passed = n,
            "failed" => c.failed = n,
            "ignored" => c.skipped += n,
            _ => continue,
        }
        c.reported += n;
    }
    c
}

#[derive(Debug, Clone, Default)]
struct ReportRow {
    suite: &'static str,
    name: String,
    took: Duration,
    count: Count,
}

/// The rows of a run, one for each program.
#[derive(Debug)]
pub(crate) struct Report {
    started: std::time::Instant,
    rows: Vec<ReportRow>,
}

impl Default for Report {
    fn default() -> Self {
        Self { started: std::time::Instant::now(), rows: Vec::new() }
    }
}

impl Report {
    pub(crate) fn add(&mut self, suite: &'static str, name: &str, took: Duration, count: Count) {
        self.rows.push(ReportRow { suite, name: name.to_owned(), took, count });
    }

    pub(crate) fn total(&self) -> Count {
        let mut total = Count::default();
        self.rows.iter().for_each(|row| total.add(row.count));
        total
    }

    /// Prints the suites and their programs, longest first.
    pub(crate) fn print(&self) {
        println!("== seconds, passed, failed, skipped: by suite and by program");
        for (row, indent) in self.table() {
            let Count { passed, failed, skipped, .. } = row.count;
            println!("{:>7} {passed:>6} {failed:>4} {skipped:>4}  {indent}{}", seconds(row.took), row.name);
        }
        println!("== {} s from begin to end; programs of one suite, and suites, run side by side", self.started.elapsed().as_secs());
    }

    /// The same as a table in Markdown, for docs/testing.md.
    pub(crate) fn markdown(&self) -> String {
        let mut text = "| suite and program | seconds | passed | failed | skipped |\n|---|---|---|---|---|\n".to_owned();
        for (row, indent) in self.table() {
            let name = if indent.is_empty() { format!("**{}**", row.name) } else { row.name };
            let Count { passed, failed, skipped, .. } = row.count;
            let _ = writeln!(text, "| {name} | {} | {passed} | {failed} | {skipped} |", seconds(row.took));
        }
        let _ = writeln!(text, "| **from begin to end** | {} | | | |", self.started.elapsed().as_secs());
        text
    }

    /// A row for each suite with the sums of its programs, and its programs under it, indented.
    fn table(&self) -> Vec<(ReportRow, &'static str)> {
        let mut suites: Vec<&'static str> = Vec::new();
        self.rows.iter().for_each(|row| suites.extend(Some(row.suite).filter(|suite| !suites.contains(suite))));
        let mut table = Vec::new();
        for suite in suites {
            let mut rows: Vec<&ReportRow> = self.rows.iter().filter(|row| row.suite == suite).collect();
            rows.sort_by_key(|row| std::cmp::Reverse(row.took));
            let mut sum = ReportRow { suite, name: format!("{suite}, {} programs", rows.len()), ..ReportRow::default() };
            for row in &rows {
                sum.count.add(row.count);
                sum.took += row.took;
            }
            table.push((sum, ""));
            table.extend(rows.iter().filter(|row| row.name != suite).map(|row| ((*row).clone(), "    ")));
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

    #[test]
    fn result_lines_are_counted() {
        let counted = |line: &str| {
            let c = read_line(line);
            (c.passed, c.failed, c.skipped, c.reported)
        };
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.10s";
        assert_eq!(counted(line), (12, 3, 1, 16));
        assert_eq!(counted("SKIPPED: no BPF here"), (0, 0, 1, 0));
        assert_eq!(counted("test a_world ... SKIPPED: no root"), (0, 0, 1, 0));
        assert_eq!(counted("running 5 tests"), (0, 0, 0, 0));
    }

    #[test]
    fn rows_stand_under_their_suite_longest_first() {
        let mut report = Report::default();
        let count = |passed| Count { passed, ..Count::default() };
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
        assert_eq!(report.markdown().lines().skip(2).collect::<Vec<_>>(), expected);
        assert_eq!(report.total(), count(9));
    }
}

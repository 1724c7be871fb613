//! What the suites counted and how long each program took, as a table. It reads libtest's counts and decides nothing about a test.

use std::time::Duration;

/// Tests by their outcome.
#[derive(Default, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
    /// Tests of which libtest said how they ended, ignored ones included.
    pub(crate) reported: u64,
}

impl Count {
    /// The count of one check.
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

/// `test result: ok. 5 passed; 0 failed; 0 ignored; …` and our own `SKIPPED: why` lines.
pub(crate) fn read_line(line: &str) -> Count {
    let mut c = Count::default();
    // What a test says first stands behind its name when tests go one by one.
    let said = line.split_once(" ... ").filter(|_| line.starts_with("test ")).map_or(line, |(_, said)| said);
    if said.trim_start().starts_with("SKIPPED:") {
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

#[derive(Debug)]
struct Row {
    suite: &'static str,
    name: String,
    seconds: u64,
    count: Count,
}

/// The rows of a run, one for each program.
#[derive(Debug)]
pub(crate) struct Report {
    started: std::time::Instant,
    rows: Vec<Row>,
}

impl Default for Report {
    fn default() -> Self {
        Self { started: std::time::Instant::now(), rows: Vec::new() }
    }
}

impl Report {
    pub(crate) fn add(&mut self, suite: &'static str, name: &str, took: Duration, count: Count) {
        self.rows.push(Row { suite, name: name.to_owned(), seconds: took.as_secs(), count });
    }

    pub(crate) fn total(&self) -> Count {
        let mut total = Count::default();
        self.rows.iter().for_each(|row| total.add(row.count));
        total
    }

    /// Prints the suites and their programs, those that took longest first.
    pub(crate) fn print(&self) {
        self.lines().iter().for_each(|line| println!("{line}"));
        println!("== {} s from begin to end; programs of one suite, and suites, run side by side", self.started.elapsed().as_secs());
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = vec!["== seconds, passed, failed, skipped: by suite and by program".to_owned()];
        let mut suites: Vec<&str> = self.rows.iter().map(|row| row.suite).collect();
        suites.dedup();
        suites.sort_by_key(|suite| self.rows.iter().position(|row| row.suite == *suite));
        suites.dedup();
        for suite in suites {
            let mut rows: Vec<&Row> = self.rows.iter().filter(|row| row.suite == suite).collect();
            rows.sort_by_key(|row| std::cmp::Reverse(row.seconds));
            let mut sum = Count::default();
            rows.iter().for_each(|row| sum.add(row.count));
            lines.push(line(rows.iter().map(|row| row.seconds).sum(), sum, &format!("{suite}, {} programs", rows.len())));
            lines.extend(rows.iter().filter(|row| row.name != suite).map(|row| line(row.seconds, row.count, &format!("    {}", row.name))));
        }
        lines
    }
}

fn line(seconds: u64, count: Count, name: &str) -> String {
    format!("{seconds:>7} {:>6} {:>4} {:>4}  {name}", count.passed, count.failed, count.skipped)
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
            "      9      1    0    0  lint, 1 programs",
            "      7      7    0    0  unit, 2 programs",
            "      5      4    0    0      b",
            "      2      3    0    0      a",
            "      1      1    0    0  e2e, 1 programs",
            "      1      1    0    0      c",
        ];
        assert_eq!(report.lines()[1..], expected);
        assert_eq!(report.total(), count(9));
    }
}

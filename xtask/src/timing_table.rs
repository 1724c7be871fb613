//! `docs/timing.md`: a row for each figure of each timed test. A run replaces the rows of its own
//! tests. It decides no verdict.

use std::collections::BTreeSet;
use std::path::Path;

use crate::timing_verdict::JudgedFigure;

pub(crate) const FILE: &str = "docs/timing.md";
const COLUMNS: &str =
    "| job | test | figure | kind | bound | tries | result | verdict | commit | day | machine |";

/// Columns that are the same in all rows of a run.
#[derive(Debug, Clone)]
pub(crate) struct TimingRun {
    pub(crate) commit: String,
    pub(crate) day: String,
    pub(crate) machine: String,
}

/// A row: its job and test, and the whole line.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TimingRow {
    job: String,
    test: String,
    line: String,
}

impl TimingRow {
    pub(crate) fn of(job: &str, test: &str, figure: &JudgedFigure, run: &TimingRun) -> Self {
        let JudgedFigure {
            name,
            kind,
            bound,
            tries,
            result,
            verdict,
        } = figure;
        let cells = [
            job,
            test,
            name,
            kind.name(),
            bound,
            tries,
            result,
            verdict.name(),
            &run.commit,
            &run.day,
            &run.machine,
        ];
        // A `|` in a value would end the cell.
        let line = format!(
            "| {} |",
            cells.map(|cell| cell.replace('|', "/")).join(" | ")
        );
        Self {
            job: job.to_owned(),
            test: test.to_owned(),
            line,
        }
    }

    fn read(line: &str) -> Option<Self> {
        let cells: Vec<&str> = line.strip_prefix("| ")?.split(" | ").collect();
        let is_row = cells.len() == COLUMNS.split(" | ").count() && cells[0] != "job";
        is_row.then(|| Self {
            job: cells[0].to_owned(),
            test: cells[1].to_owned(),
            line: line.to_owned(),
        })
    }
}

/// Writes the rows. They replace the rows of the same tests; rows of tests that are not listed any
/// more are removed.
pub(crate) fn write(
    root: &Path,
    new: &[TimingRow],
    is_listed: &dyn Fn(&str, &str) -> bool,
) -> anyhow::Result<()> {
    let old = std::fs::read_to_string(root.join(FILE)).unwrap_or_default();
    std::fs::write(root.join(FILE), render(&old, new, is_listed))?;
    Ok(())
}

fn render(old: &str, new: &[TimingRow], is_listed: &dyn Fn(&str, &str) -> bool) -> String {
    let replaced: BTreeSet<(&str, &str)> = new
        .iter()
        .map(|row| (row.job.as_str(), row.test.as_str()))
        .collect();
    let is_kept = |row: &TimingRow| {
        !replaced.contains(&(row.job.as_str(), row.test.as_str())) && is_listed(&row.job, &row.test)
    };
    let mut rows: Vec<TimingRow> = old
        .lines()
        .filter_map(TimingRow::read)
        .filter(is_kept)
        .collect();
    rows.extend(new.iter().cloned());
    rows.sort();
    let mut text = "# Times, rates and losses\n\n`make test-timing` writes this file: each timed test alone on the machine, five tries. A run of a part \
        replaces the rows\nof that part only, so each row has its own commit, day and machine. docs/testing.md has the rules of the verdicts.\n\n"
        .to_owned();
    text += COLUMNS;
    text += &format!("\n{}|\n", "|---".repeat(COLUMNS.split(" | ").count()));
    rows.iter()
        .for_each(|row| text += &format!("{}\n", row.line));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timing_verdict::{FigureKind, Verdict};

    fn row(job: &str, test: &str, result: &str) -> TimingRow {
        let figure = JudgedFigure {
            name: "gap | of all".into(),
            kind: FigureKind::Seconds,
            bound: "1".into(),
            tries: "0.1, 0.2".into(),
            result: result.into(),
            verdict: Verdict::Passed,
        };
        let run = TimingRun {
            commit: "abc".into(),
            day: "2026-01-01".into(),
            machine: "2 × x".into(),
        };
        TimingRow::of(job, test, &figure, &run)
    }

    #[test]
    fn a_partial_run_replaces_its_own_rows_only() {
        let all = |_: &str, _: &str| true;
        let first = render("", &[row("b", "two", "old"), row("a", "one", "old")], &all);
        let lines: Vec<&str> = first.lines().skip(7).collect();
        assert_eq!(
            lines[0],
            "| a | one | gap / of all | seconds | 1 | 0.1, 0.2 | old | passed | abc | 2026-01-01 | 2 × x |"
        );
        assert_eq!(lines.len(), 2, "{first}");
        let second = render(&first, &[row("a", "one", "new")], &all);
        assert!(
            second.contains("| a | one | gap / of all | seconds | 1 | 0.1, 0.2 | new |")
                && second.contains("| old |"),
            "{second}"
        );
        assert_eq!(second.lines().count(), first.lines().count());
        let renamed = render(&second, &[], &|job, _| job == "a");
        assert!(!renamed.contains("| b |"), "{renamed}");
    }
}

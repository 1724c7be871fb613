//! The table of timed tests, `testing/timed-tests.tsv`: which tests the gate runs and which `make
//! test-timing` runs. It runs nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, ensure};

use crate::jobs::Job;

const TABLE: &str = "testing/timed-tests.tsv";
/// Wildcard for all tests of a job.
const ALL: &str = "*";

/// Tiers in which a timed test runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tier {
    /// Only `make test-timing` runs the test.
    Timing,
    /// The gate runs the test too, without its assertions on time.
    Both,
}

/// The rows of the table, by job and test.
#[derive(Debug, Default)]
pub(crate) struct TimedTests {
    rows: BTreeMap<(String, String), Tier>,
}

/// Number of tests that each tier runs.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TierCounts {
    listed_tests: usize,
    gate: usize,
    timing: usize,
    both: usize,
}

impl TierCounts {
    pub(crate) fn line(self) -> String {
        let Self {
            listed_tests: listed,
            gate,
            timing,
            both,
        } = self;
        format!("{listed} listed: {gate} in the gate, {timing} in test-timing, {both} in both")
    }
}

impl TimedTests {
    pub(crate) fn of(root: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(root.join(TABLE)).context(TABLE)?;
        Self::read(&text).context(TABLE)
    }

    /// Reads a table: four columns, sorted by job and test, none twice.
    pub(crate) fn read(text: &str) -> anyhow::Result<Self> {
        let mut rows = BTreeMap::new();
        let mut last = None;
        for (n, line) in text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.starts_with('#') && !line.is_empty())
        {
            let at = n + 1;
            let columns: Vec<&str> = line.split('\t').collect();
            let [job, test, tier, what] = columns[..] else {
                anyhow::bail!(
                    "line {at}: {} columns; write job, test, tier and what the clock decides, separated by tabs",
                    columns.len()
                );
            };
            ensure!(
                !what.trim().is_empty(),
                "line {at}: say what the clock decides"
            );
            let tier = match tier {
                "timing" => Tier::Timing,
                "both" => Tier::Both,
                _ => anyhow::bail!("line {at}: no tier {tier:?}; write `timing` or `both`"),
            };
            let key = (job.to_owned(), test.to_owned());
            ensure!(
                last.is_none_or(|last| last < key),
                "line {at}: sort the rows by job and test, each once"
            );
            last = Some(key.clone());
            rows.insert(key, tier);
        }
        Ok(Self { rows })
    }

    fn tier(&self, job: &str, test: &str) -> Option<Tier> {
        let row = |test: &str| self.rows.get(&(job.to_owned(), test.to_owned()));
        row(test).or_else(|| row(ALL)).copied()
    }

    pub(crate) fn lists(&self, job: &str, test: &str) -> bool {
        self.tier(job, test).is_some()
    }

    /// Returns the part of a job that the gate runs; `None` if only the timing tier runs its tests.
    pub(crate) fn gate(&self, job: &Job) -> Option<Job> {
        let kept: Vec<String> = job
            .tests
            .iter()
            .filter(|test| self.tier(&job.name, test) != Some(Tier::Timing))
            .cloned()
            .collect();
        if kept.is_empty() && !job.tests.is_empty() {
            None
        } else {
            Some(job.only(kept))
        }
    }

    /// Returns the tests of a job that the timing tier runs.
    pub(crate) fn timing(&self, job: &Job) -> Vec<String> {
        job.tests
            .iter()
            .filter(|test| self.lists(&job.name, test))
            .cloned()
            .collect()
    }

    /// Counts the tests of the jobs. The jobs must contain all of their tests.
    pub(crate) fn count(&self, jobs: &[Job]) -> TierCounts {
        let mut counts = TierCounts::default();
        for (job, test) in jobs
            .iter()
            .flat_map(|job| job.tests.iter().map(move |test| (job, test)))
        {
            let tier = self.tier(&job.name, test);
            counts.listed_tests += 1;
            counts.gate += usize::from(tier != Some(Tier::Timing));
            counts.timing += usize::from(tier.is_some());
            counts.both += usize::from(tier == Some(Tier::Both));
        }
        counts
    }

    /// Returns the rows that name a job or a test which no program lists. Such a test was renamed,
    /// and no tier would run it.
    pub(crate) fn unknown(&self, jobs: &[Job]) -> Vec<String> {
        let listed: BTreeMap<&str, BTreeSet<&str>> = jobs
            .iter()
            .map(|job| {
                (
                    job.name.as_str(),
                    job.tests.iter().map(String::as_str).collect(),
                )
            })
            .collect();
        let explain = |(job, test): &(String, String)| match listed.get(job.as_str()) {
            None => Some(format!(
                "a timed test was renamed: {TABLE} names the job `{job}`, which no program is"
            )),
            Some(tests) if test != ALL && !tests.contains(test.as_str()) => Some(format!(
                "a timed test was renamed: {TABLE} names `{test}` of `{job}`, which that does not list"
            )),
            Some(_) => None,
        };
        self.rows.keys().filter_map(explain).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::SourceTree;

    fn job(name: &str, tests: &[&str]) -> Job {
        Job {
            name: name.into(),
            tests: tests.iter().map(|test| (*test).to_owned()).collect(),
            ..Job::default()
        }
    }

    const ROWS: &str =
        "# a comment\na\tone\ttiming\tits end\na\ttwo\tboth\tits end\nb\t*\ttiming\tall\n";

    #[test]
    fn each_test_is_in_a_tier() {
        let table = TimedTests::read(ROWS).unwrap();
        // `one` is of the timing tier, `two` of both, and `b` of timing as a whole.
        let jobs = [
            job("a", &["one", "two", "three"]),
            job("b", &["four"]),
            job("c", &["five"]),
        ];
        let gate: Vec<Job> = jobs.iter().filter_map(|job| table.gate(job)).collect();
        assert_eq!(
            gate.iter()
                .map(|job| (job.tests.len(), job.is_part))
                .collect::<Vec<_>>(),
            [(2, true), (1, false)]
        );
        let timing: usize = jobs.iter().map(|job| table.timing(job).len()).sum();
        let counts = table.count(&jobs);
        assert_eq!(
            counts,
            TierCounts {
                listed_tests: 5,
                // Every listed test is in one of the tiers, and no test is counted twice.
                gate: 3,
                timing: 3,
                both: 1
            }
        );
        assert_eq!(
            (
                gate.iter().map(|job| job.tests.len()).sum::<usize>(),
                timing
            ),
            (counts.gate, counts.timing)
        );
        assert_eq!(
            counts.gate + counts.timing - counts.both,
            counts.listed_tests
        );
        assert_eq!(
            counts.line(),
            "5 listed: 3 in the gate, 3 in test-timing, 1 in both"
        );
    }

    #[test]
    fn a_name_that_nothing_lists_is_refused() {
        let table = TimedTests::read(ROWS).unwrap();
        assert_eq!(
            table.unknown(&[job("a", &["one", "two"]), job("b", &["x"])]),
            Vec::<String>::new()
        );
        let unknown = table.unknown(&[job("a", &["one", "renamed"])]);
        assert!(
            unknown.len() == 2
                && unknown[0].contains("`two` of `a`")
                && unknown[1].contains("the job `b`"),
            "{unknown:?}"
        );
    }

    #[test]
    fn a_table_is_sorted_and_names_each_test_once() {
        for (text, expected) in [
            ("a\ttwo\tboth\tx\na\tone\tboth\tx\n", "sort the rows"),
            ("a\tone\tboth\tx\na\tone\ttiming\tx\n", "each once"),
            ("a\tone\tgate\tx\n", "no tier"),
            ("a\tone\tboth\n", "3 columns"),
            ("a\tone\tboth\t \n", "what the clock decides"),
        ] {
            let refused = TimedTests::read(text).unwrap_err().to_string();
            assert!(refused.contains(expected), "{refused}");
        }
    }

    #[test]
    fn the_table_of_this_tree_can_be_read() {
        TimedTests::of(&SourceTree::read().unwrap().root).unwrap();
    }
}

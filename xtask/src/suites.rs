//! Runs the test suites one after another, passes their output through, adds up what they counted. It decides nothing about a test, and does
//! not know how the programs of one are run.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::failures::Failures;
use crate::programs;
use crate::tree::Tree;

#[derive(Default, Clone, Copy)]
pub(crate) struct Count {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Count {
    pub(crate) fn add(&mut self, more: Self) {
        self.passed += more.passed;
        self.failed += more.failed;
        self.skipped += more.skipped;
    }
}

/// Whose test programs `e2e` runs.
const E2E: &str = "tests/e2e";

/// A suite: its name, the command, and what it is for. The one of `e2e` only builds: of the whole workspace, as `unit` does, because crates that
/// are built for other crates would be built with other features, a second time.
const SUITES: [(&str, &[&str], &str); 4] = [
    (
        "lint",
        &["cargo", "clippy", "--release", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"],
        "compiler and clippy warnings",
    ),
    (
        "plain",
        &["cargo", "check", "--release", "--workspace", "--locked"],
        "the programs as they are delivered, without the features that tests add",
    ),
    (
        "unit",
        // What passing tests say is shown, or a `SKIPPED:` would be heard by nobody.
        &["cargo", "test", "--release", "--workspace", "--locked", "--no-fail-fast", "--exclude", "canal-e2e", "--", "--show-output"],
        "crates: units, layouts, goldens, packet and netns tests",
    ),
    (
        "e2e",
        &["cargo", "test", "--release", "--workspace", "--locked", "--no-run", "--message-format=json-render-diagnostics"],
        "whole meshes in worlds, faults, and the third-party judges",
    ),
];

pub(crate) fn run(wanted: &[&str]) -> anyhow::Result<bool> {
    let tree = Tree::read()?;
    if let Some(bad) = wanted.iter().find(|w| **w != "tidy" && !SUITES.iter().any(|(n, ..)| n == *w)) {
        anyhow::bail!("no suite {bad:?}; there are tidy, {}", SUITES.map(|s| s.0).join(", "));
    }
    let (mut total, mut failures) = (Count::default(), Failures::default());
    let mut all_ended_well = true;
    if wanted.is_empty() || wanted.contains(&"tidy") {
        println!("== tidy: the rules of the house");
        let ok = super::tidy(false)?;
        total.add(Count { passed: ok.into(), failed: (!ok).into(), skipped: 0 });
    }
    for (name, command, what) in SUITES {
        if !wanted.is_empty() && !wanted.contains(&name) {
            continue;
        }
        println!("== {name}: {what}");
        let started = std::time::Instant::now();
        let (ok, mut count) =
            if name == "e2e" { programs::run(&tree.root, command, E2E, &mut failures)? } else { one(&tree, command, &mut failures)? };
        if matches!(name, "lint" | "plain") {
            count = Count { passed: ok.into(), failed: (!ok).into(), skipped: 0 };
        }
        all_ended_well &= ok;
        println!(
            "== {name}: {} passed, {} failed, {} skipped in {} s",
            count.passed,
            count.failed,
            count.skipped,
            started.elapsed().as_secs()
        );
        total.add(count);
    }
    if !all_ended_well && total.failed == 0 {
        // A suite that died without counting its failure must not look green.
        total.failed = 1;
    }
    failures.told().iter().for_each(|line| println!("{line}"));
    println!("{} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped);
    Ok(total.failed == 0)
}

fn one(tree: &Tree, command: &[&str], failures: &mut Failures) -> anyhow::Result<(bool, Count)> {
    let mut child = Command::new(command[0]).args(&command[1..]).current_dir(&tree.root).stdout(Stdio::piped()).spawn()?;
    let mut count = Count::default();
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines() {
            let line = line?;
            println!("{line}");
            count.add(read_line(&line));
            failures.hear(&line);
        }
    }
    Ok((child.wait()?.success(), count))
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
            _ => {}
        }
    }
    c
}

#[cfg(test)]
mod tests {
    use super::read_line;

    #[test]
    fn result_lines_are_counted() {
        let c = read_line("test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.10s");
        assert_eq!((c.passed, c.failed, c.skipped), (12, 3, 1));
        let c = read_line("SKIPPED: no BPF here");
        assert_eq!((c.passed, c.failed, c.skipped), (0, 0, 1));
        let c = read_line("test a_world ... SKIPPED: no root");
        assert_eq!((c.passed, c.failed, c.skipped), (0, 0, 1));
        assert_eq!(read_line("running 5 tests").passed, 0);
    }
}

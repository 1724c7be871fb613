//! The suite `supply`: what dependencies may be, by `deny.toml` and cargo-deny. Licences, sources and bans are always checked; known
//! vulnerabilities where the advisory database can be had, and a counted `SKIPPED:` says so where it cannot.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use crate::report::{Count, Report};
use crate::tree::Tree;

/// Where `setup/install` puts cargo-deny.
const INSTALLED: &str = ".tools/deny/bin/cargo-deny";
/// What cargo-deny prints when it cannot reach the advisory database.
const UNREACHABLE: &str = "failed to fetch advisory database";
/// Seconds for fetching the database and for the check.
const ADVISORIES_TIMEOUT: &str = "120";

/// What came of a run of cargo-deny.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    Skipped,
}

/// Runs both checks and adds them to the report.
pub(crate) fn run(tree: &Tree, report: &mut Report) -> anyhow::Result<()> {
    let program = program(tree);
    for (name, check, may_skip) in
        [("licences, bans, sources", &["licenses", "bans", "sources"][..], false), ("advisories", &["advisories"][..], true)]
    {
        let started = Instant::now();
        let mut command = Command::new("timeout");
        command.arg(ADVISORIES_TIMEOUT).arg(&program).args(["--locked", "check"]).args(check).current_dir(&tree.root);
        let out = command.output()?;
        let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        let outcome = decide_outcome(out.status.success(), &text, may_skip);
        if outcome != Outcome::Passed {
            println!("{text}");
        }
        if outcome == Outcome::Skipped {
            println!("SKIPPED: supply, {name}: {UNREACHABLE}; known vulnerabilities of dependencies are not checked in this run");
        }
        if !program.exists() && outcome == Outcome::Failed {
            println!("supply: {} is missing; fix: run setup/install test", program.display());
        }
        let count = Count {
            passed: (outcome == Outcome::Passed).into(),
            failed: (outcome == Outcome::Failed).into(),
            skipped: (outcome == Outcome::Skipped).into(),
            ..Count::default()
        };
        report.add("supply", name, started.elapsed(), count);
    }
    Ok(())
}

fn program(tree: &Tree) -> PathBuf {
    tree.root.join(INSTALLED)
}

/// Only a check that needs the network may be skipped, and only because the network did not give it.
fn decide_outcome(is_success: bool, text: &str, may_skip: bool) -> Outcome {
    match (is_success, may_skip && text.contains(UNREACHABLE)) {
        (true, _) => Outcome::Passed,
        (false, true) => Outcome::Skipped,
        (false, false) => Outcome::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_database_is_skipped() {
        let unreachable = format!("[ERROR] {UNREACHABLE} with cli");
        for (is_success, text, may_skip, expected) in [
            (true, "advisories ok", true, Outcome::Passed),
            (false, unreachable.as_str(), true, Outcome::Skipped),
            (false, unreachable.as_str(), false, Outcome::Failed),
            (false, "error[vulnerability]: in a", true, Outcome::Failed),
            (false, "", true, Outcome::Failed),
        ] {
            assert_eq!(decide_outcome(is_success, text, may_skip), expected, "{text}");
        }
    }
}

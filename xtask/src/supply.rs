//! The suite `supply`: rules on dependencies, by `deny.toml` and cargo-deny. Licenses, sources and
//! bans are always checked. Known vulnerabilities are checked if the advisory database is
//! reachable; otherwise a counted `SKIPPED:` reports it.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::count::Count;

/// Path where `setup/install` installs cargo-deny.
const INSTALLED: &str = ".tools/deny/bin/cargo-deny";
/// Message of cargo-deny when it cannot reach the advisory database.
const UNREACHABLE: &str = "failed to fetch advisory database";
/// Seconds for fetching the database and for the check.
/// Nobody measured this value; it ends a fetch without a network, so that the gate does not wait
/// for its own limit.
const ADVISORIES_TIMEOUT: &str = "120";

/// Outcome of a run of cargo-deny.
#[derive(Debug, PartialEq, Eq)]
enum DenyOutcome {
    Passed,
    Failed,
    Skipped,
}

/// A check with its duration and its count, and with its output if it did not pass.
#[derive(Debug)]
pub(crate) struct SupplyResult {
    pub(crate) name: &'static str,
    pub(crate) took: Duration,
    pub(crate) count: Count,
    pub(crate) lines: Vec<String>,
}

/// Runs both checks of the dependencies.
pub(crate) fn run(root: &Path) -> anyhow::Result<Vec<SupplyResult>> {
    let program = root.join(INSTALLED);
    let mut results = Vec::new();
    for (name, check, may_skip) in [
        (
            "licences, bans, sources",
            &["licenses", "bans", "sources"][..],
            false,
        ),
        // A machine without network cannot fetch advisories, which is no fault of the change.
        ("advisories", &["advisories"][..], true),
    ] {
        let started = Instant::now();
        let mut command = Command::new("timeout");
        command
            .arg(ADVISORIES_TIMEOUT)
            .arg(&program)
            .args(["--locked", "check"])
            .args(check)
            .current_dir(root);
        let out = command.output()?;
        let text = format!(
            "{}{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
        let outcome = decide_outcome(out.status.success(), &text, may_skip);
        let mut lines: Vec<String> = if outcome == DenyOutcome::Passed {
            Vec::new()
        } else {
            text.lines().map(str::to_owned).collect()
        };
        if outcome == DenyOutcome::Skipped {
            println!(
                "SKIPPED: supply, {name}: {UNREACHABLE}; known vulnerabilities of dependencies are not checked in this run"
            );
        }
        // `timeout` reports the missing program, but not how to install it.
        if !program.exists() && outcome == DenyOutcome::Failed {
            lines.insert(
                0,
                format!(
                    "{} is missing; fix: run setup/install test",
                    program.display()
                ),
            );
        }
        let count = Count {
            passed: (outcome == DenyOutcome::Passed).into(),
            failed: (outcome == DenyOutcome::Failed).into(),
            skipped: (outcome == DenyOutcome::Skipped).into(),
            ..Count::default()
        };
        results.push(SupplyResult {
            name,
            took: started.elapsed(),
            count,
            lines,
        });
    }
    Ok(results)
}

/// Returns the outcome of a check. Only a check that needs the network may be skipped, and only if
/// the network failed.
fn decide_outcome(is_success: bool, text: &str, may_skip: bool) -> DenyOutcome {
    match (is_success, may_skip && text.contains(UNREACHABLE)) {
        (true, _) => DenyOutcome::Passed,
        (false, true) => DenyOutcome::Skipped,
        (false, false) => DenyOutcome::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_database_is_skipped() {
        let unreachable = format!("[ERROR] {UNREACHABLE} with cli");
        for (is_success, text, may_skip, expected) in [
            (true, "advisories ok", true, DenyOutcome::Passed),
            (false, unreachable.as_str(), true, DenyOutcome::Skipped),
            (false, unreachable.as_str(), false, DenyOutcome::Failed),
            (
                false,
                "error[vulnerability]: in a",
                true,
                DenyOutcome::Failed,
            ),
            (false, "", true, DenyOutcome::Failed),
        ] {
            assert_eq!(
                decide_outcome(is_success, text, may_skip),
                expected,
                "{text}"
            );
        }
    }
}

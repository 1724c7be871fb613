//! The build of all programs and tests: one cargo command, with the lints in the same compilation.
//! It prints progress, collects programs and findings, and runs no test.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::programs::{self, CargoMessage, TestProgram};
use crate::report::RunClock;

/// Time limit of a build; a cold build takes about ten minutes.
const LIMIT: &str = "60m";
/// Interval between two lines of progress.
/// Shorter than the minute or more after which a silent build looks like one that hangs.
const PROGRESS: Duration = Duration::from_secs(30);
/// Maximum number of compiler errors that are shown, or of cargo's own lines if there is no error.
/// Later errors mostly follow from the first, and the log has all.
const ERRORS_MAX: usize = 3;
/// Maximum number of cargo's own lines that are kept. They are its last, which name the cause.
const WORDS_MAX: usize = 20;

/// The programs, warnings and errors of one build.
#[derive(Debug, Default)]
pub(crate) struct ProgramBuild {
    pub(crate) programs: Vec<TestProgram>,
    /// Warnings of the compiler and of clippy.
    pub(crate) findings: Vec<String>,
    errors: Vec<String>,
    /// Cargo's own lines, which describe failures outside the compiler.
    words: Vec<String>,
    is_well: bool,
}

impl ProgramBuild {
    fn read_line(&mut self, line: &str) -> bool {
        match programs::read_message(line) {
            CargoMessage::Built(program) => self.programs.push(program),
            CargoMessage::Finding {
                text,
                is_error: true,
            } => self.errors.push(text),
            CargoMessage::Finding {
                text,
                is_error: false,
            } => self.findings.push(text),
            CargoMessage::Words => self.words.push(line.to_owned()),
            CargoMessage::Other => {}
        }
        line.contains(r#""reason":"compiler-artifact""#)
    }

    /// Returns the reason for a failed build: the compiler's errors, or cargo's last lines. `None`
    /// if the build succeeded.
    pub(crate) fn failure(&self) -> Option<Vec<String>> {
        if self.is_well {
            return None;
        }
        if self.errors.is_empty() {
            return Some(self.words[self.words.len().saturating_sub(WORDS_MAX)..].to_vec());
        }
        let mut lines: Vec<String> = self
            .errors
            .iter()
            .take(ERRORS_MAX)
            .flat_map(|text| text.lines())
            .map(str::to_owned)
            .collect();
        if self.errors.len() > ERRORS_MAX {
            lines.push(format!(
                "and {} errors more",
                self.errors.len() - ERRORS_MAX
            ));
        }
        Some(lines)
    }
}

/// Runs cargo with the arguments. Writes its output except its JSON messages, and the findings, to
/// the file `log`.
pub(crate) fn run(
    root: &Path,
    arguments: &[&str],
    environment: &[(&str, &str)],
    log: &Path,
    clock: RunClock,
) -> anyhow::Result<ProgramBuild> {
    let words = std::fs::File::create(log).with_context(|| log.display().to_string())?;
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=30", LIMIT, "cargo"])
        .args(arguments)
        .envs(environment.iter().copied())
        .current_dir(root);
    let mut cargo = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(words)
        .spawn()?;
    let mut build = ProgramBuild::default();
    let (mut units, mut last_report) = (0, Instant::now());
    for line in BufReader::new(cargo.stdout.take().context("cargo has no output")?).lines() {
        units += usize::from(build.read_line(&line?));
        if last_report.elapsed() >= PROGRESS {
            println!("{} build: {units} units are there", clock.stamp());
            last_report = Instant::now();
        }
    }
    build.is_well = cargo.wait()?.success();
    let mut text = std::fs::read_to_string(log).unwrap_or_default();
    build.words.extend(text.lines().map(str::to_owned));
    for found in build.findings.iter().chain(&build.errors) {
        text += &format!("{found}\n\n");
    }
    std::fs::write(log, text)?;
    Ok(build)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(level: &str, text: &str) -> String {
        format!(
            r#"{{"reason":"compiler-message","message":{{"level":"{level}","spans":[{{}}],"rendered":"{text}\n"}}}}"#
        )
    }

    #[test]
    fn a_failed_build_reports_its_errors() {
        let mut build = ProgramBuild::default();
        for n in 0..5 {
            build.read_line(&message("error", &format!("error: {n}")));
        }
        build.read_line(&message("warning", "warning: unused"));
        assert_eq!(
            build.failure().unwrap(),
            ["error: 0", "error: 1", "error: 2", "and 2 errors more"]
        );
        let mut unresolved = ProgramBuild::default();
        unresolved.read_line("error: failed to select a version");
        assert_eq!(
            unresolved.failure().unwrap(),
            ["error: failed to select a version"]
        );
    }

    #[test]
    fn a_build_with_warnings_goes_on() {
        let mut build = ProgramBuild {
            is_well: true,
            ..ProgramBuild::default()
        };
        build.read_line(&message("warning", "warning: unused"));
        assert_eq!((build.failure(), build.findings.len()), (None, 1));
        assert!(
            build.read_line(r#"{"reason":"compiler-artifact","profile":{"test":false}}"#),
            "a unit"
        );
    }
}

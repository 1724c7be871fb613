//! Exit codes and errors: the contract with scripts. Every error contains the subject, what is
//! wrong, and how to fix it.

use std::fmt;
use std::process::ExitCode;

/// Exit code of `canal`. Scripts may rely on these numbers; `canal help` lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ExitStatus {
    /// All was done, and every expectation passed.
    Done = 0,
    /// Refused or failed; nothing was half done.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The controller, world or host could not be reached.
    Unreachable = 3,
    /// Done in part: some data planes lag, or some hosts did not answer.
    Partial = 4,
    /// The object, world or host that was named does not exist.
    Missing = 5,
    /// `canal diff --exit-code` found differences.
    Differs = 6,
    /// Ended by ctrl-c or SIGTERM, after cleaning up.
    Interrupted = 130,
}

/// Text at the end of `canal --help`.
pub(crate) const EXIT_CODES: &str = "Exit codes:
  0  done
  1  refused or failed; nothing was changed in part
  2  the command line is wrong; canal analyze: or a file could not be read
  3  the controller, world or host could not be reached
  4  done in part (data planes lag, hosts did not answer)
  5  the named object does not exist
  6  canal diff --exit-code: there are differences
  130  interrupted, after cleaning up";

impl From<ExitStatus> for ExitCode {
    fn from(exit: ExitStatus) -> Self {
        ExitCode::from(exit as u8)
    }
}

/// Reason why a verb did not end with [`ExitStatus::Done`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) struct VerbError {
    pub(crate) exit: ExitStatus,
    /// File, host, address or option.
    pub(crate) subject: String,
    pub(crate) what: String,
    /// Empty if nothing can be done, or if the text already contains it.
    pub(crate) fix: String,
}

impl fmt::Display for VerbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.subject.is_empty() {
            true => write!(f, "{}", self.what)?,
            false => write!(f, "{}: {}", self.subject, self.what)?,
        }
        match self.fix.is_empty() {
            true => Ok(()),
            false => write!(f, "\n  fix: {}", self.fix),
        }
    }
}

impl VerbError {
    pub(crate) fn new(
        exit: ExitStatus,
        place: impl Into<String>,
        what: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            exit,
            subject: place.into(),
            what: what.into(),
            fix: fix.into(),
        }
    }

    /// Returns the failure of one step.
    pub(crate) fn failed(
        place: impl Into<String>,
        what: impl fmt::Display,
        fix: impl Into<String>,
    ) -> Self {
        Self::new(ExitStatus::Failed, place, what.to_string(), fix)
    }

    /// Returns an error that contains only the exit code, because all messages (diagnostics, a
    /// table) were printed already.
    pub(crate) fn already_printed(exit: ExitStatus) -> Self {
        Self::new(exit, "", "", "")
    }

    /// Returns whether there is nothing more to print.
    pub(crate) fn is_already_printed(&self) -> bool {
        self.what.is_empty()
    }
}

/// Result that every verb returns.
pub(crate) type VerbResult<T = ()> = Result<T, VerbError>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_every_code() {
        let all = [
            ExitStatus::Done,
            ExitStatus::Failed,
            ExitStatus::Usage,
            ExitStatus::Unreachable,
            ExitStatus::Partial,
            ExitStatus::Missing,
            ExitStatus::Differs,
            ExitStatus::Interrupted,
        ];
        for exit in all {
            assert!(
                EXIT_CODES.contains(&format!("\n  {}  ", exit as u8)),
                "{exit:?}"
            );
        }
    }

    #[test]
    fn a_failure_has_subject_problem_and_fix() {
        let failure = VerbError::failed("a.yaml:3:1", "no such kind", "write HTTPRoute");
        assert_eq!(
            failure.to_string(),
            "a.yaml:3:1: no such kind\n  fix: write HTTPRoute"
        );
        assert!(VerbError::already_printed(ExitStatus::Partial).is_already_printed());
    }
}

//! Exit codes and failures: the contract with scripts. Every failure says where, what, and how to mend it.

use std::fmt;
use std::process::ExitCode;

/// How `canal` ends. Scripts may rely on these numbers; `canal help` lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// All was done; every promise held.
    Done = 0,
    /// Refused, or failed; nothing was half done.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The controller, world or host could not be reached.
    Unreachable = 3,
    /// Done in part: some data planes lag, some hosts did not answer.
    Partial = 4,
    /// The object, world or host that was named does not exist.
    Missing = 5,
    /// `canal diff --exit-code`: there are differences.
    Differs = 6,
    /// Ended by ctrl-c or SIGTERM, after cleaning up.
    Interrupted = 130,
}

/// Shown at the end of `canal --help`.
pub(crate) const EXIT_CODES: &str = "Exit codes:
  0  done
  1  refused or failed; nothing was half done
  2  the command line is wrong
  3  the controller, world or host could not be reached
  4  done in part (data planes lag, hosts did not answer)
  5  what was named does not exist
  6  canal diff --exit-code: there are differences
  130  interrupted, after cleaning up";

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit as u8)
    }
}

/// Why a verb did not end with [`Exit::Done`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    /// A file, host, address or option.
    pub(crate) place: String,
    pub(crate) what: String,
    /// Empty where nothing can be done, or the text already says it.
    pub(crate) mend: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place.is_empty() {
            true => write!(f, "{}", self.what)?,
            false => write!(f, "{}: {}", self.place, self.what)?,
        }
        match self.mend.is_empty() {
            true => Ok(()),
            false => write!(f, "\n  mend: {}", self.mend),
        }
    }
}

impl Failure {
    pub(crate) fn new(exit: Exit, place: impl Into<String>, what: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { exit, place: place.into(), what: what.into(), mend: mend.into() }
    }

    /// A failure of one step.
    pub(crate) fn failed(place: impl Into<String>, what: impl fmt::Display, mend: impl Into<String>) -> Self {
        Self::new(Exit::Failed, place, what.to_string(), mend)
    }

    /// All was told already (diagnostics, a table): only the exit code is left to say.
    pub(crate) fn told(exit: Exit) -> Self {
        Self::new(exit, "", "", "")
    }

    /// Nothing more to print.
    pub(crate) fn is_told(&self) -> bool {
        self.what.is_empty()
    }
}

/// What every verb returns.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_every_code() {
        let all =
            [Exit::Done, Exit::Failed, Exit::Usage, Exit::Unreachable, Exit::Partial, Exit::Missing, Exit::Differs, Exit::Interrupted];
        for exit in all {
            assert!(EXIT_CODES.contains(&format!("\n  {}  ", exit as u8)), "{exit:?}");
        }
    }

    #[test]
    fn a_failure_reads_where_what_mend() {
        let failure = Failure::failed("a.yaml:3:1", "no such kind", "write HTTPRoute");
        assert_eq!(failure.to_string(), "a.yaml:3:1: no such kind\n  mend: write HTTPRoute");
        assert!(Failure::told(Exit::Partial).is_told());
    }
}

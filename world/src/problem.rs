//! [`TopologyProblem`]: a mistake in a topology file, with position, description and fix. This module collects problems and prints nothing.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A position in a YAML file. Lines and columns start at 1; 0 stands for the file as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePosition {
    /// Line number, which starts at 1.
    pub line: u64,
    /// Column number, which starts at 1.
    pub column: u64,
}

/// One mistake in a topology file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyProblem {
    /// The file with the mistake.
    pub file: PathBuf,
    /// Position of the mistake in the file.
    pub spot: FilePosition,
    /// Description of the mistake in the words of the file.
    pub what: String,
    /// One imperative step that corrects the mistake.
    pub fix: String,
}

impl fmt::Display for TopologyProblem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.file.display())?;
        if self.spot.line > 0 {
            write!(out, ":{}:{}", self.spot.line, self.spot.column)?;
        }
        write!(out, ": {}; fix: {}", self.what, self.fix)
    }
}

impl std::error::Error for TopologyProblem {}

/// Collects the problems of one file, so that the user sees all of them at once.
#[derive(Debug)]
pub(crate) struct TopologyProblems {
    file: PathBuf,
    list: Vec<TopologyProblem>,
}

impl TopologyProblems {
    pub(crate) fn of(file: PathBuf) -> Self {
        Self {
            file,
            list: Vec::new(),
        }
    }

    pub(crate) fn add(
        &mut self,
        spot: impl Into<FilePosition>,
        what: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.list.push(TopologyProblem {
            file: self.file.clone(),
            spot: spot.into(),
            what: what.into(),
            fix: fix.into(),
        });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the problems in the order of their lines.
    pub(crate) fn into_sorted(mut self) -> Vec<TopologyProblem> {
        self.list
            .sort_by_key(|problem| (problem.spot.line, problem.spot.column));
        self.list
    }
}

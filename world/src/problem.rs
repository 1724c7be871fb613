//! What is wrong with a topology file: where, what, and the mend. Collects, never prints.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A place in a YAML file. Lines and columns count from 1; 0 means "the file as a whole".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spot {
    /// Line, from 1.
    pub line: u64,
    /// Column, from 1.
    pub column: u64,
}

/// One mistake in a topology file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file that holds the mistake.
    pub file: PathBuf,
    /// Where in the file.
    pub spot: Spot,
    /// What is wrong, in the words of the file.
    pub what: String,
    /// What to write instead.
    pub mend: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.file.display())?;
        if self.spot.line > 0 {
            write!(out, ":{}:{}", self.spot.line, self.spot.column)?;
        }
        write!(out, ": {}; {}", self.what, self.mend)
    }
}

impl std::error::Error for Problem {}

/// Gathers problems of one file, so that a reader sees them all at once.
#[derive(Debug)]
pub(crate) struct Findings {
    file: PathBuf,
    list: Vec<Problem>,
}

impl Findings {
    pub(crate) fn of(file: PathBuf) -> Self {
        Self { file, list: Vec::new() }
    }

    pub(crate) fn add(&mut self, spot: Spot, what: impl Into<String>, mend: impl Into<String>) {
        self.list.push(Problem { file: self.file.clone(), spot, what: what.into(), mend: mend.into() });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The problems in the order of their lines.
    pub(crate) fn into_sorted(mut self) -> Vec<Problem> {
        self.list.sort_by_key(|problem| (problem.spot.line, problem.spot.column));
        self.list
    }
}

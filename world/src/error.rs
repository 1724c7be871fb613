//! What can go wrong with a living world: where, what, and the mend.

use std::io;
use std::path::{Path, PathBuf};

use crate::problem::Problem;

/// A failure while building, steering or removing a world.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not root.
    #[error(
        "worlds need root: network namespaces, routes, cgroups and capture programs can only be made with CAP_NET_ADMIN and CAP_SYS_ADMIN; run the same command with sudo"
    )]
    NotRoot,
    /// The machine lacks something.
    #[error("this machine lacks {what}; {mend}")]
    Machine {
        /// What is missing.
        what: String,
        /// How to get it.
        mend: String,
    },
    /// The topology cannot be built here.
    #[error("{}", problems(.0))]
    Topology(Vec<Problem>),
    /// No such world.
    #[error("there is no world {name:?}; `canal world list` shows those that are up")]
    NoWorld {
        /// The name asked for.
        name: String,
    },
    /// The name is taken.
    #[error("world {name:?} is already up {how}; take it down first with `canal world down {name}`, or give this one another name")]
    AlreadyUp {
        /// Its name.
        name: String,
        /// In which way it differs.
        how: String,
    },
    /// No such host or pod.
    #[error("world {world:?} has no host {host:?}{hint}")]
    NoHost {
        /// Name of the world.
        world: String,
        /// The name asked for.
        host: String,
        /// A suggestion, or nothing.
        hint: String,
    },
    /// A command of `ip`, `tc`, … failed.
    #[error("{tool} refused in {netns}: {message}")]
    Tool {
        /// The program.
        tool: &'static str,
        /// The namespace it ran in.
        netns: String,
        /// Its words, with the line it stumbled over.
        message: String,
    },
    /// A file or kernel object could not be used.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The supervisor said no, or is gone.
    #[error("world {world:?}: {message}")]
    Supervisor {
        /// Name of the world.
        world: String,
        /// Its words.
        message: String,
    },
    /// Something took longer than it may.
    #[error("world {world:?}: {what} did not happen within {seconds} s{detail}")]
    Timeout {
        /// Name of the world.
        world: String,
        /// What was awaited.
        what: String,
        /// The limit.
        seconds: u64,
        /// What is known about it, one line each; or nothing.
        detail: String,
    },
}

/// Shorthand.
pub type Result<T> = std::result::Result<T, Error>;

fn problems(list: &[Problem]) -> String {
    let lines: Vec<String> = list.iter().map(Problem::to_string).collect();
    lines.join("\n")
}

/// Adds what was tried, and where, to an IO error.
pub(crate) trait Tried<T> {
    fn tried(self, what: &'static str, path: impl AsRef<Path>) -> Result<T>;
}

impl<T> Tried<T> for io::Result<T> {
    fn tried(self, what: &'static str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|source| Error::Io { what, path: path.as_ref().to_owned(), source })
    }
}

impl<T> Tried<T> for rustix::io::Result<T> {
    fn tried(self, what: &'static str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(io::Error::from).tried(what, path)
    }
}

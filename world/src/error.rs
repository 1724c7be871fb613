//! [`Error`]: what can go wrong with a running world. Each message contains the subject, what is wrong, and the fix.

use std::io;
use std::path::{Path, PathBuf};

use crate::problem::TopologyProblem;

/// A failure while building, controlling or removing a world.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller is not root.
    #[error(
        "worlds need root: network namespaces, routes, cgroups and capture programs can be created only with CAP_NET_ADMIN and CAP_SYS_ADMIN; fix: run the same command with sudo"
    )]
    NotRoot,
    /// The machine lacks a program or a kernel feature.
    #[error("this machine lacks {what}; fix: {fix}")]
    Machine {
        /// The missing program or feature.
        what: String,
        /// One imperative step that provides it.
        fix: String,
    },
    /// The topology cannot be built on this machine.
    #[error("{}", problems(.0))]
    Topology(Vec<TopologyProblem>),
    /// The named world does not exist or is not up.
    #[error("there is no world {name:?}; fix: name one that `canal world list` shows")]
    NoWorld {
        /// Name of the requested world.
        name: String,
    },
    /// A running world already has the name.
    #[error(
        "world {name:?} is already up {how}; fix: take it down first with `canal world down {name}`, or give this one another name"
    )]
    AlreadyUp {
        name: String,
        /// The difference between the running world and the requested one.
        how: String,
    },
    /// The world has no such host or pod.
    #[error("world {world:?} has no host {host:?}{hint}")]
    NoHost {
        world: String,
        host: String,
        /// A suggestion, or an empty text.
        hint: String,
    },
    /// A command of `ip`, `bridge`, `tc` or `nft` failed.
    #[error(
        "{tool} refused in {netns}: {message}; fix: check that the kernel has the feature, and remove leftovers with `canal world gc`"
    )]
    Tool {
        tool: &'static str,
        /// Namespace in which the program ran.
        netns: String,
        /// The program's message, with the line at which it stopped.
        message: String,
    },
    /// A file or kernel object could not be used.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// The operation that was tried.
        what: &'static str,
        /// Path on which it was tried.
        path: PathBuf,
        source: io::Error,
    },
    /// The supervisor refused a request, or is gone.
    #[error("world {world:?}: {message}")]
    Supervisor {
        /// Name of the supervisor's world.
        world: String,
        /// Message of the world's supervisor.
        message: String,
    },
    /// An operation took longer than its timeout.
    #[error("world {world:?}: {what} did not happen within {seconds} s{detail}")]
    Timeout {
        world: String,
        /// The event that did not happen.
        what: String,
        /// The timeout that expired, in seconds.
        seconds: u64,
        /// Details, one line each; or an empty text.
        detail: String,
    },
}

/// Result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

fn problems(list: &[TopologyProblem]) -> String {
    let lines: Vec<String> = list.iter().map(TopologyProblem::to_string).collect();
    lines.join("\n")
}

/// Adds the operation and its path to an IO error.
pub(crate) trait IoContext<T> {
    fn tried(self, what: &'static str, path: impl AsRef<Path>) -> Result<T>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn tried(self, what: &'static str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|source| Error::Io {
            what,
            path: path.as_ref().to_owned(),
            source,
        })
    }
}

impl<T> IoContext<T> for rustix::io::Result<T> {
    fn tried(self, what: &'static str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(io::Error::from).tried(what, path)
    }
}

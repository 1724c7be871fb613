//! The process's own messages (tracing) on stderr, with a level that can be changed while it runs. Access logs are [`crate::log`].

/// Changes the level of a running process.
#[derive(Clone)]
pub struct Level {}

/// The filter is not one that `tracing_subscriber::EnvFilter` reads.
#[derive(Debug, Clone, thiserror::Error)]
#[error("log level {given:?}: {why}; write e.g. info or info,canal_kit=debug")]
pub struct BadLevel {
    pub given: String,
    pub why: String,
}

/// Installs the process's subscriber: one line per message on stderr. Once per process; a second call changes nothing and errors.
pub fn start(filter: &str) -> Result<Level, BadLevel> {
    let _ = filter;
    unreachable!("body lands in the next commit")
}

impl Level {
    /// The filter now.
    pub fn get(&self) -> String {
        unreachable!("body lands in the next commit")
    }
    /// Replaces it.
    pub fn set(&self, filter: &str) -> Result<(), BadLevel> {
        let _ = filter;
        unreachable!("body lands in the next commit")
    }
}

//! The process's own messages (tracing) on stderr, with a level that can be changed while it runs. Access logs are [`crate::log`].

use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

/// Changes the level of a running process.
#[derive(Clone)]
pub struct Level {
    handle: reload::Handle<EnvFilter, Registry>,
    current: Arc<Mutex<String>>,
}

/// The filter is not one that `tracing_subscriber::EnvFilter` reads, or messages are set up already.
#[derive(Debug, Clone, thiserror::Error)]
#[error("log level {given:?}: {why}; write e.g. info or info,canal_kit=debug")]
pub struct BadLevel {
    pub given: String,
    pub why: String,
}

fn filter(given: &str) -> Result<EnvFilter, BadLevel> {
    EnvFilter::try_new(given).map_err(|e| BadLevel { given: given.into(), why: e.to_string() })
}

/// Installs the process's subscriber: one line per message on stderr. Once per process; a second call changes nothing and errors.
pub fn start(given: &str) -> Result<Level, BadLevel> {
    let (filter, handle) = reload::Layer::new(filter(given)?);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).with_filter(filter);
    tracing::subscriber::set_global_default(Registry::default().with(lines))
        .map_err(|e| BadLevel { given: given.into(), why: e.to_string() })?;
    Ok(Level { handle, current: Arc::new(Mutex::new(given.into())) })
}

impl Level {
    /// The filter now.
    pub fn get(&self) -> String {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces it.
    pub fn set(&self, given: &str) -> Result<(), BadLevel> {
        self.handle.reload(filter(given)?).map_err(|e| BadLevel { given: given.into(), why: e.to_string() })?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = given.into();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_is_set_once_and_changed_later() {
        let level = start("info").unwrap();
        assert!(!tracing::enabled!(tracing::Level::DEBUG));
        level.set("info,canal_kit=debug").unwrap();
        assert!(tracing::enabled!(tracing::Level::DEBUG));
        let error = level.set("canal_kit=loud").unwrap_err().to_string();
        assert!(error.contains("canal_kit=loud") && error.contains("write e.g."), "{error}");
        assert_eq!(level.get(), "info,canal_kit=debug");
        assert!(start("debug").is_err());
    }
}

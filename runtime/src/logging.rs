//! Log messages of the process (`tracing`) on stderr, with a level that can change at run time. Access logs are elsewhere.

use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

/// A handle that changes the log level of the running process.
#[derive(Clone)]
pub struct LogLevelHandle {
    handle: reload::Handle<EnvFilter, Registry>,
    current: Arc<Mutex<String>>,
}

/// The filter is not valid for `tracing_subscriber::EnvFilter`, or the subscriber is already installed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("log level {given:?}: {why}; write e.g. info or info,canal_hbone=debug")]
pub struct InvalidLogFilter {
    pub given: String,
    pub why: String,
}

fn filter(given: &str) -> Result<EnvFilter, InvalidLogFilter> {
    EnvFilter::try_new(given).map_err(|e| InvalidLogFilter { given: given.into(), why: e.to_string() })
}

/// Installs the process's subscriber, which writes one line per message to stderr. It works once per process.
///
/// # Errors
/// The filter is invalid, or a subscriber is already installed; a second call changes nothing.
pub fn start(given: &str) -> Result<LogLevelHandle, InvalidLogFilter> {
    let (filter, handle) = reload::Layer::new(filter(given)?);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).with_filter(filter);
    tracing::subscriber::set_global_default(Registry::default().with(lines))
        .map_err(|e| InvalidLogFilter { given: given.into(), why: e.to_string() })?;
    Ok(LogLevelHandle { handle, current: Arc::new(Mutex::new(given.into())) })
}

impl LogLevelHandle {
    /// Returns the filter that is in use.
    pub fn get(&self) -> String {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the filter.
    ///
    /// # Errors
    /// The filter is invalid; the current one stays in use.
    pub fn set(&self, given: &str) -> Result<(), InvalidLogFilter> {
        self.handle.reload(filter(given)?).map_err(|e| InvalidLogFilter { given: given.into(), why: e.to_string() })?;
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
        level.set("info,canal_hbone=debug").unwrap();
        assert!(tracing::enabled!(tracing::Level::DEBUG));
        let error = level.set("canal_hbone=loud").unwrap_err().to_string();
        assert!(error.contains("canal_hbone=loud") && error.contains("write e.g."), "{error}");
        assert_eq!(level.get(), "info,canal_hbone=debug");
        assert!(start("debug").is_err());
    }
}

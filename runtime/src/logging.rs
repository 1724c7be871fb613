//! Log messages of the process (`tracing`) on stderr, with a level that can change at run time.
//! Access logs are elsewhere.

use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

/// A handle that changes the log level of the running process.
#[derive(Clone)]
pub struct LogLevelHandle {
    handle: reload::Handle<EnvFilter, Registry>,
    current: Arc<Mutex<String>>,
}

/// The filter is not valid for `tracing_subscriber::EnvFilter`, or the subscriber is already
/// installed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("log level {filter:?}: {why}; fix: write a filter such as info or info,canal_hbone=debug")]
pub struct InvalidLogFilter {
    pub filter: String,
    pub why: String,
}

fn filter(given: &str) -> Result<EnvFilter, InvalidLogFilter> {
    EnvFilter::try_new(given).map_err(|e| InvalidLogFilter {
        filter: given.into(),
        why: e.to_string(),
    })
}

/// Installs the process's subscriber, which writes one line per message to stderr. It works once
/// per process.
///
/// # Errors
/// The filter is invalid, or a subscriber is already installed; a second call changes nothing.
pub fn start(given: &str) -> Result<LogLevelHandle, InvalidLogFilter> {
    let (subscriber, level) = subscriber(given, std::io::stderr)?;
    tracing::subscriber::set_global_default(subscriber).map_err(|e| InvalidLogFilter {
        filter: given.into(),
        why: e.to_string(),
    })?;
    Ok(level)
}

fn subscriber<W>(
    given: &str,
    writer: W,
) -> Result<
    (
        impl tracing::Subscriber + Send + Sync + use<W>,
        LogLevelHandle,
    ),
    InvalidLogFilter,
>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let (filter, handle) = reload::Layer::new(filter(given)?);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(writer)
        .with_ansi(false)
        .with_filter(filter);
    Ok((
        Registry::default().with(lines),
        LogLevelHandle {
            handle,
            current: Arc::new(Mutex::new(given.into())),
        },
    ))
}

impl LogLevelHandle {
    /// Returns the filter that is in use.
    pub fn get(&self) -> String {
        self.current
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Replaces the filter.
    ///
    /// # Errors
    /// The filter is invalid; the current one stays in use.
    pub fn set(&self, given: &str) -> Result<(), InvalidLogFilter> {
        self.handle
            .reload(filter(given)?)
            .map_err(|e| InvalidLogFilter {
                filter: given.into(),
                why: e.to_string(),
            })?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = given.into();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A writer that keeps the lines for the test.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Lines {
        /// Logs one debug message and returns whether it was written.
        fn take_debug(&self) -> bool {
            tracing::debug!(target: "canal_hbone", "a message");
            !std::mem::take(&mut *self.0.lock().unwrap()).is_empty()
        }
    }

    /// The subscriber is this thread's own, because other tests of the process log as well.
    #[test]
    fn the_level_changes_at_run_time() {
        let lines = Lines::default();
        let writer = lines.clone();
        let (subscriber, level) = subscriber("info", move || writer.clone()).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            assert!(!lines.take_debug());
            level.set("info,canal_hbone=debug").unwrap();
            assert!(lines.take_debug());
            let error = level.set("canal_hbone=loud").unwrap_err().to_string();
            assert!(
                error.contains("canal_hbone=loud") && error.contains("; fix: write a filter"),
                "{error}"
            );
            assert_eq!(level.get(), "info,canal_hbone=debug");
            assert!(lines.take_debug());
        });
    }

    #[test]
    fn a_process_has_one_subscriber() {
        start("error").unwrap();
        assert!(start("debug").is_err());
    }
}

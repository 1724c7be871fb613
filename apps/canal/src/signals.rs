//! Ctrl-c and SIGTERM as an event that a verb can wait for. The signals never end the process, so
//! that cleaning up is not interrupted.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::exit::{VerbError, VerbResult};

/// Waits for a signal to stop.
#[derive(Debug, Clone)]
pub(crate) struct StopSignal(watch::Receiver<bool>);

/// Handles SIGINT, SIGTERM and SIGHUP until the process ends.
pub(crate) fn watch() -> VerbResult<StopSignal> {
    let failed = |problem: std::io::Error| VerbError::failed("signals", problem, "");
    let mut int = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(failed)?;
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        loop {
            tokio::select! { _ = int.recv() => {}, _ = term.recv() => {}, _ = hangup.recv() => {} }
            sender.send_replace(true);
        }
    });
    Ok(StopSignal(receiver))
}

impl StopSignal {
    /// Resolves when a signal has arrived.
    pub(crate) async fn wait(&mut self) {
        if self.0.wait_for(|stop| *stop).await.is_err() {
            // The sender exists as long as the runtime.
            std::future::pending::<()>().await;
        }
    }
}

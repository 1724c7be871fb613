//! Ctrl-c and SIGTERM as something a verb can wait for; never the process's end, so that cleaning up is not cut short.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::exit::{Failure, Outcome};

/// Waits for the wish to stop.
#[derive(Debug, Clone)]
pub(crate) struct Stop(watch::Receiver<bool>);

/// Takes over SIGINT, SIGTERM and SIGHUP for the rest of the process's life.
pub(crate) fn watch() -> Outcome<Stop> {
    let failed = |problem: std::io::Error| Failure::failed("signals", problem, "");
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
    Ok(Stop(receiver))
}

impl Stop {
    /// Resolves when a signal came.
    pub(crate) async fn wait(&mut self) {
        if self.0.wait_for(|stop| *stop).await.is_err() {
            // The sender lives as long as the runtime.
            std::future::pending::<()>().await;
        }
    }
}

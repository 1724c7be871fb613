//! Ends a client at the moment that a test chooses, so that no test guesses how long an event
//! takes. It does not check the results.

use std::process::Child;
use std::time::Duration;

use canal_timing::deadline;
use rustix::process::{Pid, Signal, kill_process};

use crate::{ClientOutcome, Mesh, until};

/// `timeout`, under which every client of a mesh runs, starts it within this time. It only has to
/// exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STARTED_WITHIN: Duration = Duration::from_secs(5);

impl Mesh {
    /// Sends SIGTERM to a client that was started with [`Mesh::spawn`], and waits for it.
    /// `canal-samples load` and `sessions` then end with their report.
    pub fn stop(&self, what: &str, child: Child) -> ClientOutcome {
        self.signal(what, child, Signal::TERM)
    }

    /// Sends a signal to a client that was started with [`Mesh::spawn`], and waits for it.
    pub fn signal(&self, what: &str, mut child: Child, signal: Signal) -> ClientOutcome {
        // A signal to `timeout` would start its own limit for the client's end, so the client
        // itself gets the signal.
        let children = format!("/proc/{pid}/task/{pid}/children", pid = child.id());
        let mut client = None;
        until(
            deadline(STARTED_WITHIN),
            &format!("{what}: the client runs"),
            || {
                let text = std::fs::read_to_string(&children).unwrap_or_default();
                client = text
                    .split_whitespace()
                    .next()
                    .and_then(|pid| pid.parse().ok())
                    .and_then(Pid::from_raw);
                client.is_some() || child.try_wait().is_ok_and(|status| status.is_some())
            },
        );
        if let Some(client) = client {
            // It may have ended by itself; its report shows how.
            let _ = kill_process(client, signal);
        }
        self.end(what, child)
    }
}

//! Connection budget of one admin listener: how many connections there are, and which one gives way
//! to a new one. Each listener has its own budget, so that readers of metrics cannot block
//! readiness probes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

/// Connections of one listener at the same time. If all are in use, the connection that has been
/// without a request for longest gives way.
/// Scrapers, probes and operators need a few. Nobody measured this value.
pub const CONNECTIONS_MAX: usize = 64;
/// Time that a connection has for its next request before it may give way to a new one.
/// It is a tenth of the time for a head (`HEAD_TIMEOUT`): clients send a request at once, and only
/// idle or hostile ones wait.
const REQUEST_GRACE: Duration = Duration::from_secs(1);

/// Activity of a connection, recorded by its task.
#[derive(Debug)]
pub(super) struct Activity {
    started: Instant,
    /// Milliseconds from `started` to the last request.
    last: AtomicU64,
    is_streaming: AtomicBool,
}

impl Activity {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            started: Instant::now(),
            last: AtomicU64::new(0),
            is_streaming: AtomicBool::new(false),
        })
    }

    /// Records that a request has arrived.
    pub(super) fn record_request(&self) {
        self.last.store(
            u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            Relaxed,
        );
    }

    /// Records that the response is a stream.
    pub(super) fn record_stream(&self) {
        self.is_streaming.store(true, Relaxed);
    }

    fn last(&self) -> Instant {
        self.started + Duration::from_millis(self.last.load(Relaxed))
    }
}

/// The open connections of a listener.
#[derive(Debug, Default)]
pub(super) struct ConnectionBudget {
    open: Vec<(Arc<Activity>, AbortHandle)>,
}

/// Result of the admission of a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AdminAdmission {
    Admitted,
    /// An idle connection was closed to admit it.
    Displaced,
    /// All other connections are active.
    Full,
}

impl ConnectionBudget {
    pub(super) fn admit(&mut self) -> AdminAdmission {
        self.open.retain(|(_, task)| !task.is_finished());
        if self.open.len() < CONNECTIONS_MAX {
            return AdminAdmission::Admitted;
        }
        let idle =
            |a: &Activity| !a.is_streaming.load(Relaxed) && a.last().elapsed() >= REQUEST_GRACE;
        let oldest = self
            .open
            .iter()
            .enumerate()
            .filter(|(_, (a, _))| idle(a))
            .min_by_key(|(_, (a, _))| a.last())
            .map(|(at, _)| at);
        let Some(at) = oldest else {
            return AdminAdmission::Full;
        };
        self.open.swap_remove(at).1.abort();
        AdminAdmission::Displaced
    }

    pub(super) fn add(&mut self, activity: Arc<Activity>, task: AbortHandle) {
        self.open.push((activity, task));
    }
}

//! Connections of one admin listener: how many there are, and which gives way to a new one. Each listener has its own, so that readers of
//! metrics cannot take readiness away.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

/// Connections of one listener at once. When there are more, the one that has been without a request for longest gives way.
pub const CONNECTIONS_MAX: usize = 64;
/// A connection has this long for its next request before it may give way to a new one.
const REQUEST_GRACE: Duration = Duration::from_secs(1);

/// What the task of a connection says about it.
#[derive(Debug)]
pub(super) struct Activity {
    started: Instant,
    /// Milliseconds from `started` to the last request.
    last: AtomicU64,
    is_streaming: AtomicBool,
}

impl Activity {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { started: Instant::now(), last: AtomicU64::new(0), is_streaming: AtomicBool::new(false) })
    }

    /// A request has come.
    pub(super) fn record_request(&self) {
        self.last.store(u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Its answer goes on for a while.
    pub(super) fn record_stream(&self) {
        self.is_streaming.store(true, Relaxed);
    }

    fn last(&self) -> Instant {
        self.started + Duration::from_millis(self.last.load(Relaxed))
    }
}

/// The open connections of a listener.
#[derive(Debug, Default)]
pub(super) struct Budget {
    open: Vec<(Arc<Activity>, AbortHandle)>,
}

/// Whether a new connection is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    Room,
    /// Another one was ended for it.
    GaveWay,
    /// All others are at work.
    Full,
}

impl Budget {
    pub(super) fn admit(&mut self) -> Admission {
        self.open.retain(|(_, task)| !task.is_finished());
        if self.open.len() < CONNECTIONS_MAX {
            return Admission::Room;
        }
        let idle = |a: &Activity| !a.is_streaming.load(Relaxed) && a.last().elapsed() >= REQUEST_GRACE;
        let oldest = self.open.iter().enumerate().filter(|(_, (a, _))| idle(a)).min_by_key(|(_, (a, _))| a.last()).map(|(at, _)| at);
        let Some(at) = oldest else { return Admission::Full };
        self.open.swap_remove(at).1.abort();
        Admission::GaveWay
    }

    pub(super) fn add(&mut self, activity: Arc<Activity>, task: AbortHandle) {
        self.open.push((activity, task));
    }
}

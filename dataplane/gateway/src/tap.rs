//! Live requests for whoever listens on the admin port: filtered here, bounded, never waited for. With no listener it costs one load per request.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use canal_kit::metrics::{Family, Registry, SharedCounter};
use tokio::sync::mpsc;

/// Lines a slow listener may leave unread; more are dropped and counted.
pub(crate) const LINES_MAX: usize = 1024;
/// Listeners at once.
pub(crate) const LISTENERS_MAX: usize = 16;

/// Which requests a listener wants; empty fields match all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    pub tenant: Option<String>,
    /// `namespace/name`.
    pub service: Option<String>,
    /// A prefix.
    pub path: Option<String>,
    /// `503` or `5xx`.
    pub status: Option<String>,
}

/// What filters look at.
pub(crate) struct Seen<'a> {
    pub(crate) tenant: &'a str,
    pub(crate) service: &'a str,
    pub(crate) path: &'a str,
    pub(crate) status: u16,
}

impl Filter {
    fn takes(&self, seen: &Seen<'_>) -> bool {
        let same = |wanted: &Option<String>, has: &str| wanted.as_deref().is_none_or(|w| w == has);
        let status = || {
            let text = seen.status.to_string();
            self.status.as_deref().is_none_or(|w| w.len() == text.len() && w.bytes().zip(text.bytes()).all(|(w, s)| w == s || w == b'x'))
        };
        same(&self.tenant, seen.tenant)
            && same(&self.service, seen.service)
            && self.path.as_deref().is_none_or(|p| seen.path.starts_with(p))
            && status()
    }
}

#[derive(Debug)]
struct Listener {
    filter: Filter,
    lines: mpsc::Sender<Bytes>,
}

/// All listeners of an engine. Clones share them.
#[derive(Debug, Clone)]
pub struct Hub {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    count: AtomicUsize,
    listeners: Mutex<Vec<Listener>>,
    dropped: SharedCounter,
}

impl Hub {
    pub(crate) fn new(registry: &Registry) -> Self {
        let dropped = registry
            .counters(Family::new("canal_gateway_tap_dropped_total", "Tap lines dropped because a listener was slow.", &[]))
            .shared(&[]);
        Self { inner: Arc::new(Inner { count: AtomicUsize::new(0), listeners: Mutex::default(), dropped }) }
    }

    /// A new listener: JSON, one request per line. `None` if there are too many.
    pub fn listen(&self, filter: Filter) -> Option<mpsc::Receiver<Bytes>> {
        let mut listeners = self.inner.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|l| !l.lines.is_closed());
        if listeners.len() >= LISTENERS_MAX {
            return None;
        }
        let (lines, receiver) = mpsc::channel(LINES_MAX);
        listeners.push(Listener { filter, lines });
        self.inner.count.store(listeners.len(), Relaxed);
        Some(receiver)
    }

    /// Whether anyone listens.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.inner.count.load(Relaxed) > 0
    }

    /// Tells those who want it; the line is made once, if anyone does.
    pub(crate) fn tell(&self, seen: &Seen<'_>, line: impl FnOnce() -> String) {
        let mut listeners = self.inner.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        let mut line = Some(line);
        let mut text = Bytes::new();
        let mut gone = false;
        for listener in listeners.iter().filter(|l| l.filter.takes(seen)) {
            if let Some(line) = line.take() {
                text = Bytes::from(line() + "\n");
            }
            match listener.lines.try_send(text.clone()) {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Full(_)) => self.inner.dropped.inc(),
                Err(mpsc::error::TrySendError::Closed(_)) => gone = true,
            }
        }
        // Listeners whose filter takes nothing are found out when another comes.
        if gone {
            listeners.retain(|l| !l.lines.is_closed());
            self.inner.count.store(listeners.len(), Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters() {
        let seen = Seen { tenant: "alpha", service: "bookinfo/reviews", path: "/a/b", status: 503 };
        let some = |s: &str| Some(s.to_string());
        for (filter, want) in [
            (Filter::default(), true),
            (Filter { tenant: some("alpha"), status: some("5xx"), ..Filter::default() }, true),
            (Filter { tenant: some("beta"), ..Filter::default() }, false),
            (Filter { service: some("bookinfo/reviews"), path: some("/a"), ..Filter::default() }, true),
            (Filter { path: some("/b"), ..Filter::default() }, false),
            (Filter { status: some("503"), ..Filter::default() }, true),
            (Filter { status: some("4xx"), ..Filter::default() }, false),
            (Filter { status: some("5"), ..Filter::default() }, false),
        ] {
            assert_eq!(filter.takes(&seen), want, "{filter:?}");
        }
    }

    #[test]
    fn slow_listeners_lose_lines_and_gone_ones_are_forgotten() {
        let registry = Registry::new();
        let hub = Hub::new(&registry);
        assert!(!hub.is_on());
        let mut receiver = hub.listen(Filter::default()).unwrap();
        let seen = Seen { tenant: "a", service: "b/c", path: "/", status: 200 };
        for _ in 0..LINES_MAX + 3 {
            hub.tell(&seen, || "{}".into());
        }
        assert_eq!(receiver.try_recv().unwrap(), "{}\n");
        assert!(registry.render().contains("canal_gateway_tap_dropped_total 3"));
        drop(receiver);
        hub.tell(&seen, || "{}".into());
        assert!(!hub.is_on());
        let all: Vec<_> = (0..LISTENERS_MAX).map(|_| hub.listen(Filter::default())).collect();
        assert!(all.iter().all(Option::is_some) && hub.listen(Filter::default()).is_none());
    }
}

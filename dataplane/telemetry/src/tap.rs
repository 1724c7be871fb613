//! Live view of requests for listeners on the admin port. Lines are filtered here, the queues are
//! bounded, and requests never wait for a listener. Without a listener, it costs one load per
//! request.
//!
//! Start with [`TapBroker`].

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use canal_runtime::metrics::{MetricFamily, Registry, SharedCounter};

use crate::observe::{LineSender, Lines, TapFilter as Filter, line_queue};

/// Most concurrent listeners: as many as there may be observations, and some on the process's own
/// socket.
pub const LISTENERS_MAX: usize = 80;

/// Fields of a request that filters read.
pub struct TapFields<'a> {
    pub tenant: &'a str,
    pub service: &'a str,
    pub path: &'a str,
    pub status: u16,
}

/// True if the filter matches a request.
fn takes(filter: &Filter, seen: &TapFields<'_>) -> bool {
    let same = |wanted: &Option<String>, has: &str| wanted.as_deref().is_none_or(|w| w == has);
    let status = || {
        let text = seen.status.to_string();
        filter.status.as_deref().is_none_or(|w| {
            w.len() == text.len()
                && w.bytes()
                    .zip(text.bytes())
                    .all(|(w, s)| w == s || w == b'x')
        })
    };
    same(&filter.tenant, seen.tenant)
        && same(&filter.service, seen.service)
        && filter
            .path
            .as_deref()
            .is_none_or(|p| seen.path.starts_with(p))
        && status()
}

#[derive(Debug)]
struct TapListener {
    filter: Filter,
    lines: LineSender,
}

/// All listeners of an engine. Clones share them.
#[derive(Debug, Clone)]
pub struct TapBroker {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// One bit for each tenant with a listener; all bits for a listener to all tenants. Two tenants
    /// may share a bit.
    tenants: AtomicU64,
    listeners: Mutex<Vec<TapListener>>,
    dropped: SharedCounter,
}

impl TapBroker {
    pub fn new(registry: &Registry) -> Self {
        let dropped = registry
            .counters(MetricFamily::new(
                "canal_gateway_tap_dropped_total",
                "Tap lines dropped because a listener was slow.",
                &[],
            ))
            .shared(&[]);
        Self {
            inner: Arc::new(Inner {
                tenants: AtomicU64::new(0),
                listeners: Mutex::default(),
                dropped,
            }),
        }
    }

    /// Adds a listener, which receives one line of JSON per request; `None` if there are too many.
    pub fn listen(&self, filter: Filter) -> Option<Lines> {
        let mut listeners = self
            .inner
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|l| !l.lines.is_closed());
        if listeners.len() >= LISTENERS_MAX {
            return None;
        }
        let (lines, receiver) = line_queue();
        // A listener that has left must cost requests nothing, even if its filter matches none.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (hub, lines) = (self.clone(), lines.clone());
            runtime.spawn(async move {
                lines.closed().await;
                hub.inner.prune(
                    &mut hub
                        .inner
                        .listeners
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner),
                );
            });
        }
        listeners.push(TapListener { filter, lines });
        self.inner.prune(&mut listeners);
        Some(receiver)
    }

    /// True if a listener wants requests of this tenant, or of one that shares its bit.
    #[inline]
    pub fn is_on(&self, tenant: &str) -> bool {
        let tenants = self.inner.tenants.load(Relaxed);
        tenants != 0 && tenants & bit_of(tenant) != 0
    }

    /// Sends the request to the listeners whose filter matches. The line is built once, and only if
    /// there is one.
    pub fn publish(&self, seen: &TapFields<'_>, line: impl FnOnce() -> String) {
        let mut listeners = self
            .inner
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut line = Some(line);
        let mut text = Bytes::new();
        let mut gone = false;
        for listener in listeners.iter().filter(|l| takes(&l.filter, seen)) {
            if let Some(line) = line.take() {
                text = Bytes::from(line() + "\n");
            }
            if !listener.lines.send(text.clone()) {
                match listener.lines.is_closed() {
                    true => gone = true,
                    false => self.inner.dropped.inc(),
                }
            }
        }
        if gone {
            self.inner.prune(&mut listeners);
        }
    }
}

impl Inner {
    /// Removes listeners that have left, and recomputes the bits of the tenants with listeners.
    fn prune(&self, listeners: &mut Vec<TapListener>) {
        listeners.retain(|l| !l.lines.is_closed());
        let bits = listeners
            .iter()
            .map(|l| l.filter.tenant.as_deref().map_or(u64::MAX, bit_of));
        self.tenants
            .store(bits.fold(0, |all, bit| all | bit), Relaxed);
    }
}

/// Maps a tenant to one of 64 bits (FNV-1a), so that a tap of one tenant affects the requests of
/// few others.
fn bit_of(tenant: &str) -> u64 {
    let hash = tenant
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
    1 << (hash % 64)
}

#[cfg(test)]
mod tests {
    use crate::observe::QUEUE_BYTES_MAX;

    use super::*;

    #[test]
    fn filters() {
        let seen = TapFields {
            tenant: "alpha",
            service: "bookinfo/reviews",
            path: "/a/b",
            status: 503,
        };
        let some = |s: &str| Some(s.to_string());
        for (filter, want) in [
            (Filter::default(), true),
            (
                Filter {
                    tenant: some("alpha"),
                    status: some("5xx"),
                    ..Filter::default()
                },
                true,
            ),
            (
                Filter {
                    tenant: some("beta"),
                    ..Filter::default()
                },
                false,
            ),
            (
                Filter {
                    service: some("bookinfo/reviews"),
                    // A path is a prefix; the other fields are compared whole.
                    path: some("/a"),
                    ..Filter::default()
                },
                true,
            ),
            (
                Filter {
                    path: some("/b"),
                    ..Filter::default()
                },
                false,
            ),
            (
                Filter {
                    status: some("503"),
                    ..Filter::default()
                },
                true,
            ),
            (
                Filter {
                    status: some("4xx"),
                    ..Filter::default()
                },
                false,
            ),
            (
                Filter {
                    // A class is written `5xx`, so one digit matches no status.
                    status: some("5"),
                    ..Filter::default()
                },
                false,
            ),
        ] {
            assert_eq!(takes(&filter, &seen), want, "{filter:?}");
        }
    }

    #[tokio::test]
    async fn a_tap_of_one_tenant_does_not_affect_others_and_ends_without_cost() {
        let hub = TapBroker::new(&Registry::new());
        let of_alpha = hub
            .listen(Filter {
                tenant: Some("alpha".into()),
                path: Some("/never".into()),
                ..Filter::default()
            })
            .unwrap();
        assert!(hub.is_on("alpha") && !hub.is_on("beta"));
        let of_all = hub.listen(Filter::default()).unwrap();
        assert!(hub.is_on("alpha") && hub.is_on("beta"));
        drop((of_alpha, of_all));
        let gone = async {
            while hub.is_on("alpha") || hub.is_on("beta") {
                tokio::task::yield_now().await
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(5), gone)
            .await
            .expect("no tap is open");
    }

    #[test]
    fn slow_readers_lose_lines_and_disconnected_readers_are_removed() {
        let registry = Registry::new();
        let hub = TapBroker::new(&registry);
        assert!(!hub.is_on("a"));
        let mut receiver = hub.listen(Filter::default()).unwrap();
        let seen = TapFields {
            tenant: "a",
            service: "b/c",
            path: "/",
            status: 200,
        };
        let line = "x".repeat(QUEUE_BYTES_MAX / 10);
        for _ in 0..12 {
            hub.publish(&seen, || line.clone());
        }
        assert_eq!(receiver.try_recv().unwrap().len(), line.len() + 1);
        assert_eq!(receiver.take_dropped(), 3);
        assert!(
            registry
                .render()
                .contains("canal_gateway_tap_dropped_total 3")
        );
        drop(receiver);
        hub.publish(&seen, || "{}".into());
        assert!(!hub.is_on("a"));
        let all: Vec<_> = (0..LISTENERS_MAX)
            .map(|_| hub.listen(Filter::default()))
            .collect();
        assert!(all.iter().all(Option::is_some) && hub.listen(Filter::default()).is_none());
    }
}

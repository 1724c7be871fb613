//! HBONE connections into a pod whose peer has not authenticated yet: how many may wait, and which
//! gives way. It handles no certificates.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_runtime::metrics::{MetricFamily, Registry, SharedCounter};
use tokio::sync::Notify;

#[derive(Debug)]
struct WaitingConnection {
    displaced: Notify,
}

#[derive(Debug)]
struct Inner {
    max: usize,
    waiting: Mutex<VecDeque<Arc<WaitingConnection>>>,
    displaced: SharedCounter,
}

/// The unauthenticated connections of one pod. Above the limit the oldest gives way to the new one.
/// A peer that only opens connections displaces itself; a peer that authenticates at once succeeds
/// however many others wait.
#[derive(Debug, Clone)]
pub struct UnauthenticatedConnections {
    inner: Arc<Inner>,
}

/// Registration of one connection, dropped when its peer has authenticated or is gone.
#[derive(Debug)]
pub struct UnauthenticatedGuard {
    of: UnauthenticatedConnections,
    own: Arc<WaitingConnection>,
}

impl UnauthenticatedConnections {
    /// Permits at most `max` connections at once, and at least one.
    pub fn new(registry: &Registry, max: usize) -> Self {
        let family = MetricFamily::new(
            "canal_node_unauthenticated_displaced_total",
            "HBONE connections closed because newer ones arrived before their peers had authenticated.",
            &[],
        );
        let displaced = registry.counters(family).shared(&[]);
        Self {
            inner: Arc::new(Inner {
                max: max.max(1),
                waiting: Mutex::default(),
                displaced,
            }),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Arc<WaitingConnection>>> {
        self.inner
            .waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a connection; at the limit the oldest is displaced.
    pub fn enter(&self) -> UnauthenticatedGuard {
        let own = Arc::new(WaitingConnection {
            displaced: Notify::new(),
        });
        let mut waiting = self.waiting();
        if waiting.len() >= self.inner.max
            && let Some(oldest) = waiting.pop_front()
        {
            self.inner.displaced.inc();
            oldest.displaced.notify_one();
        }
        waiting.push_back(own.clone());
        drop(waiting);
        UnauthenticatedGuard {
            of: self.clone(),
            own,
        }
    }

    /// Returns the number of waiting connections.
    pub fn count(&self) -> usize {
        self.waiting().len()
    }
}

impl UnauthenticatedGuard {
    /// Resolves when this connection has to give way.
    pub async fn displaced(&self) {
        self.own.displaced.notified().await;
    }
}

impl Drop for UnauthenticatedGuard {
    fn drop(&mut self) {
        self.of.waiting().retain(|w| !Arc::ptr_eq(w, &self.own));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn the_oldest_unauthenticated_connection_is_closed_at_the_limit() {
        let connections = UnauthenticatedConnections::new(&Registry::new(), 2);
        let (first, second) = (connections.enter(), connections.enter());
        let is_displaced = async |c: &UnauthenticatedGuard| {
            tokio::time::timeout(Duration::from_millis(20), c.displaced())
                .await
                .is_ok()
        };
        assert!(
            !is_displaced(&first).await && !is_displaced(&second).await,
            "there is room for two"
        );
        let third = connections.enter();
        assert!(
            is_displaced(&first).await
                && !is_displaced(&second).await
                && !is_displaced(&third).await
        );
        drop(second);
        let fourth = connections.enter();
        assert!(
            !is_displaced(&third).await,
            "a connection that authenticated has returned its permit"
        );
        drop((first, third, fourth));
        assert_eq!(connections.count(), 0);
    }
}

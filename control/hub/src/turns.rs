//! Whose change is worked on next: one at a time for each tenant, so many in all, and tenants one after the other. It knows nothing of
//! what a change is.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_model::ids::TenantName;
use tokio::sync::oneshot;

/// What of one tenant waits for its turn.
#[derive(Debug)]
struct Lane<T> {
    urgent: VecDeque<T>,
    ordinary: VecDeque<T>,
}

/// The order of turns. Pure: `T` is whatever waits.
#[derive(Debug)]
pub(crate) struct TurnOrder<T> {
    workers: usize,
    /// Ordinary turns that are under way.
    running: usize,
    lanes: BTreeMap<TenantName, Lane<T>>,
    /// Tenants of which something waits; the first comes next.
    ring: VecDeque<TenantName>,
    busy: BTreeSet<TenantName>,
}

impl<T> TurnOrder<T> {
    /// `workers`: so many ordinary turns at once, of different tenants.
    pub(crate) fn new(workers: usize) -> Self {
        Self { workers: workers.max(1), running: 0, lanes: BTreeMap::new(), ring: VecDeque::new(), busy: BTreeSet::new() }
    }

    /// Puts something at the end of its tenant's lane. What is urgent passes what is not, and needs no worker's place.
    pub(crate) fn push(&mut self, tenant: &TenantName, is_urgent: bool, item: T) {
        let lane = self.lanes.entry(tenant.clone()).or_insert_with(|| {
            self.ring.push_back(tenant.clone());
            Lane { urgent: VecDeque::new(), ordinary: VecDeque::new() }
        });
        if is_urgent { lane.urgent.push_back(item) } else { lane.ordinary.push_back(item) }
    }

    /// What begins now, if anything may.
    pub(crate) fn begin(&mut self) -> Option<(TenantName, bool, T)> {
        let is_idle = |tenant: &&TenantName| !self.busy.contains(*tenant);
        let has_urgent = |tenant: &&TenantName| self.lanes.get(*tenant).is_some_and(|lane| !lane.urgent.is_empty());
        let urgent = self.ring.iter().filter(is_idle).find(has_urgent);
        let next = urgent.or_else(|| self.ring.iter().find(is_idle).filter(|_| self.running < self.workers));
        let tenant = next?.clone();
        let lane = self.lanes.get_mut(&tenant)?;
        let is_urgent = !lane.urgent.is_empty();
        let item = if is_urgent { lane.urgent.pop_front() } else { lane.ordinary.pop_front() };
        let is_done = lane.urgent.is_empty() && lane.ordinary.is_empty();
        self.ring.retain(|name| *name != tenant);
        if is_done {
            self.lanes.remove(&tenant);
        } else {
            self.ring.push_back(tenant.clone());
        }
        self.busy.insert(tenant.clone());
        self.running += usize::from(!is_urgent);
        item.map(|item| (tenant, is_urgent, item))
    }

    /// A turn is over.
    pub(crate) fn end(&mut self, tenant: &TenantName, is_urgent: bool) {
        self.busy.remove(tenant);
        self.running -= usize::from(!is_urgent);
    }
}

/// A queue of those who wait for their turn.
pub(crate) struct TurnQueue {
    order: Mutex<TurnOrder<oneshot::Sender<Turn>>>,
}

/// The right to work on a tenant's change; over when it is dropped.
pub(crate) struct Turn {
    queue: Arc<TurnQueue>,
    tenant: TenantName,
    is_urgent: bool,
}

impl TurnQueue {
    pub(crate) fn new(workers: usize) -> Arc<Self> {
        Arc::new(Self { order: Mutex::new(TurnOrder::new(workers)) })
    }

    fn order(&self) -> MutexGuard<'_, TurnOrder<oneshot::Sender<Turn>>> {
        // Nothing in there panics between two writes.
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn of `tenant`. Who stops waiting loses nothing but its place.
    pub(crate) async fn turn(self: &Arc<Self>, tenant: &TenantName, is_urgent: bool) -> Turn {
        let (grant, granted) = oneshot::channel();
        self.order().push(tenant, is_urgent, grant);
        self.begin_all();
        match granted.await {
            Ok(turn) => turn,
            // A grant is dropped only with the whole queue, which `self` holds.
            Err(_) => std::future::pending().await,
        }
    }

    fn begin_all(self: &Arc<Self>) {
        loop {
            let next = self.order().begin();
            let Some((tenant, is_urgent, grant)) = next else { return };
            // Whoever stopped waiting gives the turn back at once, by its drop.
            let _ = grant.send(Turn { queue: self.clone(), tenant, is_urgent });
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.queue.order().end(&self.tenant, self.is_urgent);
        self.queue.begin_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> TenantName {
        text.parse().unwrap()
    }

    fn begun(order: &mut TurnOrder<u32>) -> Vec<(String, u32)> {
        std::iter::from_fn(|| order.begin()).map(|(tenant, _, item)| (tenant.to_string(), item)).collect()
    }

    #[test]
    fn tenants_take_turns_and_each_has_one_change_under_way() {
        let mut order = TurnOrder::new(2);
        let [a, b, c] = ["alpha", "beta", "gamma"].map(name);
        (0..100).for_each(|i| order.push(&a, false, i));
        order.push(&b, false, 200);
        order.push(&c, false, 300);
        assert_eq!(begun(&mut order), [("alpha".into(), 0), ("beta".into(), 200)], "two workers, two tenants");
        order.end(&a, false);
        assert_eq!(begun(&mut order), [("gamma".into(), 300)], "alpha has had its turn");
        order.end(&b, false);
        assert_eq!(begun(&mut order), [("alpha".into(), 1)], "and has the free worker when nobody else waits");
        order.end(&c, false);
        assert_eq!(begun(&mut order), [], "but never two");
    }

    #[test]
    fn what_is_urgent_passes_and_needs_no_worker() {
        let mut order = TurnOrder::new(1);
        let [a, b] = ["alpha", "beta"].map(name);
        order.push(&a, false, 1);
        assert_eq!(begun(&mut order), [("alpha".into(), 1)]);
        order.push(&b, false, 2);
        order.push(&b, true, 3);
        order.push(&a, true, 4);
        assert_eq!(begun(&mut order), [("beta".into(), 3)], "the only worker is taken, and alpha is busy");
        order.end(&a, false);
        assert_eq!(begun(&mut order), [("alpha".into(), 4)]);
        order.end(&b, true);
        assert_eq!(begun(&mut order), [("beta".into(), 2)]);
    }

    #[tokio::test]
    async fn who_stops_waiting_holds_up_nobody() {
        let queue = TurnQueue::new(1);
        let [a, b] = ["alpha", "beta"].map(name);
        let first = queue.turn(&a, false).await;
        for _ in 0..50 {
            assert!(tokio::time::timeout(std::time::Duration::ZERO, queue.turn(&a, false)).await.is_err());
        }
        drop(first);
        drop(queue.turn(&b, false).await);
        drop(queue.turn(&a, false).await);
        assert!(queue.order().lanes.is_empty() && queue.order().busy.is_empty() && queue.order().running == 0);
    }
}

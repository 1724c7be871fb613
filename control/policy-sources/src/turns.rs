//! Decides whose change is processed next: one at a time for each tenant, a limited number in
//! total, and tenants in turn. It does not know what a change is. Start at [`TurnQueue::turn`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_model::ids::TenantName;
use tokio::sync::oneshot;

/// Items of one tenant that wait for their turn.
#[derive(Debug)]
struct TenantTurns<T> {
    urgent: VecDeque<T>,
    ordinary: VecDeque<T>,
}

/// The order of turns among tenants. Pure: `T` is the type of what waits.
#[derive(Debug)]
pub(crate) struct TurnOrder<T> {
    workers: usize,
    /// Number of ordinary turns that have begun and not ended.
    running: usize,
    lanes: BTreeMap<TenantName, TenantTurns<T>>,
    /// Tenants of which something waits; the first comes next.
    ring: VecDeque<TenantName>,
    /// Tenants that have a turn now.
    busy: BTreeSet<TenantName>,
}

impl<T> TurnOrder<T> {
    /// Creates an order with at most `workers` ordinary turns at once, of different tenants.
    pub(crate) fn new(workers: usize) -> Self {
        Self {
            workers: workers.max(1),
            running: 0,
            lanes: BTreeMap::new(),
            ring: VecDeque::new(),
            busy: BTreeSet::new(),
        }
    }

    /// Adds an item behind those of its tenant. Urgent items go ahead of ordinary ones, and need no
    /// free worker.
    pub(crate) fn push(&mut self, tenant: &TenantName, is_urgent: bool, item: T) {
        let lane = self.lanes.entry(tenant.clone()).or_insert_with(|| {
            self.ring.push_back(tenant.clone());
            TenantTurns {
                urgent: VecDeque::new(),
                ordinary: VecDeque::new(),
            }
        });
        if is_urgent {
            lane.urgent.push_back(item)
        } else {
            lane.ordinary.push_back(item)
        }
    }

    /// Begins the next turn, if one may begin. Returns its tenant, whether it is urgent, and its
    /// item.
    pub(crate) fn begin(&mut self) -> Option<(TenantName, bool, T)> {
        let is_idle = |tenant: &&TenantName| !self.busy.contains(*tenant);
        let has_urgent = |tenant: &&TenantName| {
            self.lanes
                .get(*tenant)
                .is_some_and(|lane| !lane.urgent.is_empty())
        };
        let urgent = self.ring.iter().filter(is_idle).find(has_urgent);
        let next = urgent.or_else(|| {
            self.ring
                .iter()
                .find(is_idle)
                .filter(|_| self.running < self.workers)
        });
        let tenant = next?.clone();
        let lane = self.lanes.get_mut(&tenant)?;
        let is_urgent = !lane.urgent.is_empty();
        let item = if is_urgent {
            lane.urgent.pop_front()
        } else {
            lane.ordinary.pop_front()
        };
        let is_done = lane.urgent.is_empty() && lane.ordinary.is_empty();
        // The tenant goes to the end, so that all tenants take turns.
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

    /// Records that a turn is over.
    pub(crate) fn end(&mut self, tenant: &TenantName, is_urgent: bool) {
        self.busy.remove(tenant);
        self.running -= usize::from(!is_urgent);
    }
}

/// A queue of tasks that wait for their turn.
pub(crate) struct TurnQueue {
    order: Mutex<TurnOrder<oneshot::Sender<Turn>>>,
}

/// The right to process a tenant's change; it ends when it is dropped.
pub(crate) struct Turn {
    queue: Arc<TurnQueue>,
    tenant: TenantName,
    is_urgent: bool,
}

impl TurnQueue {
    pub(crate) fn new(workers: usize) -> Arc<Self> {
        Arc::new(Self {
            order: Mutex::new(TurnOrder::new(workers)),
        })
    }

    fn order(&self) -> MutexGuard<'_, TurnOrder<oneshot::Sender<Turn>>> {
        // No code panics between two writes to the order.
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn of `tenant`. A task that stops waiting loses only its position.
    pub(crate) async fn turn(self: &Arc<Self>, tenant: &TenantName, is_urgent: bool) -> Turn {
        let (begin, begun) = oneshot::channel();
        self.order().push(tenant, is_urgent, begin);
        self.begin_all();
        match begun.await {
            Ok(turn) => turn,
            // The sender is dropped only with the whole queue, which `self` holds.
            Err(_) => std::future::pending().await,
        }
    }

    /// Begins every turn that may begin now.
    fn begin_all(self: &Arc<Self>) {
        loop {
            let next = self.order().begin();
            let Some((tenant, is_urgent, begin)) = next else {
                return;
            };
            // If the task stopped waiting, the turn is dropped here, which ends it.
            let _ = begin.send(Turn {
                queue: self.clone(),
                tenant,
                is_urgent,
            });
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
        std::iter::from_fn(|| order.begin())
            .map(|(tenant, _, item)| (tenant.to_string(), item))
            .collect()
    }

    #[test]
    fn tenants_take_turns_and_each_has_one_change_under_way() {
        let mut order = TurnOrder::new(2);
        let [a, b, c] = ["alpha", "beta", "gamma"].map(name);
        (0..100).for_each(|i| order.push(&a, false, i));
        order.push(&b, false, 200);
        order.push(&c, false, 300);
        assert_eq!(
            begun(&mut order),
            [("alpha".into(), 0), ("beta".into(), 200)],
            "two workers, two tenants"
        );
        order.end(&a, false);
        assert_eq!(
            begun(&mut order),
            [("gamma".into(), 300)],
            "alpha has had its turn"
        );
        order.end(&b, false);
        assert_eq!(
            begun(&mut order),
            [("alpha".into(), 1)],
            "alpha uses the free worker if no other tenant waits"
        );
        order.end(&c, false);
        assert_eq!(begun(&mut order), [], "but never two");
    }

    #[test]
    fn urgent_changes_overtake_and_need_no_worker() {
        let mut order = TurnOrder::new(1);
        let [a, b] = ["alpha", "beta"].map(name);
        order.push(&a, false, 1);
        assert_eq!(begun(&mut order), [("alpha".into(), 1)]);
        order.push(&b, false, 2);
        order.push(&b, true, 3);
        order.push(&a, true, 4);
        assert_eq!(
            begun(&mut order),
            [("beta".into(), 3)],
            "the only worker is in use, and alpha has a change in progress"
        );
        order.end(&a, false);
        assert_eq!(begun(&mut order), [("alpha".into(), 4)]);
        order.end(&b, true);
        assert_eq!(begun(&mut order), [("beta".into(), 2)]);
    }

    #[tokio::test]
    async fn a_cancelled_waiter_blocks_no_other() {
        let queue = TurnQueue::new(1);
        let [a, b] = ["alpha", "beta"].map(name);
        let first = queue.turn(&a, false).await;
        for _ in 0..50 {
            assert!(
                tokio::time::timeout(std::time::Duration::ZERO, queue.turn(&a, false))
                    .await
                    .is_err()
            );
        }
        drop(first);
        drop(queue.turn(&b, false).await);
        drop(queue.turn(&a, false).await);
        assert!(
            queue.order().lanes.is_empty()
                && queue.order().busy.is_empty()
                && queue.order().running == 0
        );
    }
}

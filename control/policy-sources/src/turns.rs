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

    /// Removes the items of a tenant that no longer wait.
    pub(crate) fn remove(&mut self, tenant: &TenantName, is_gone: impl Fn(&T) -> bool) {
        let Some(lane) = self.lanes.get_mut(tenant) else {
            return;
        };
        lane.urgent.retain(|item| !is_gone(item));
        lane.ordinary.retain(|item| !is_gone(item));
        if lane.urgent.is_empty() && lane.ordinary.is_empty() {
            self.lanes.remove(tenant);
            self.ring.retain(|name| name != tenant);
        }
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
    /// `None` once the turn is over.
    queue: Option<Arc<TurnQueue>>,
    tenant: TenantName,
    is_urgent: bool,
}

/// A task that waits for its turn. When it stops waiting, it leaves the queue: a client that sends
/// requests and resets them must not fill the memory.
struct WaitingTask<'q> {
    queue: &'q TurnQueue,
    tenant: &'q TenantName,
    begun: oneshot::Receiver<Turn>,
}

impl Drop for WaitingTask<'_> {
    fn drop(&mut self) {
        self.begun.close();
        let is_gone = oneshot::Sender::is_closed;
        self.queue.order().remove(self.tenant, is_gone);
    }
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
        let mut waiting = WaitingTask {
            queue: self,
            tenant,
            begun,
        };
        self.begin_all();
        match (&mut waiting.begun).await {
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
            let turn = Turn {
                queue: Some(self.clone()),
                tenant,
                is_urgent,
            };
            if let Err(mut unused) = begin.send(turn) {
                // The task stopped waiting. Dropping the turn would begin the next one from here, so
                // that many such tasks would need a deep stack.
                unused.end();
            }
        }
    }
}

impl Turn {
    /// Ends the turn, if it is not over. Returns the queue, in which other turns may begin now.
    fn end(&mut self) -> Option<Arc<TurnQueue>> {
        let queue = self.queue.take()?;
        queue.order().end(&self.tenant, self.is_urgent);
        Some(queue)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(queue) = self.end() {
            queue.begin_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

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
        // As many turns that begin one inside the other would overflow the stack.
        for n in 0..100_000 {
            let (tenant, is_urgent) = ([&a, &b][n % 2], n % 3 == 0);
            let mut turn = std::pin::pin!(queue.turn(tenant, is_urgent && tenant == &a));
            let polled = std::future::poll_fn(|context| Poll::Ready(turn.as_mut().poll(context)));
            assert!(polled.await.is_pending());
        }
        let lanes = queue.order().lanes.len();
        assert_eq!(lanes, 0, "those that stopped waiting left the queue");
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

//! [`FairQueue`]: a queue that serves tenants round robin. Pure: no threads, no clock.

use std::collections::{HashMap, VecDeque};

use canal_model::ids::TenantName;

/// Queue that is first in, first out for each tenant, and round robin between tenants.
#[derive(Debug)]
pub(crate) struct FairQueue<T> {
    waiting: HashMap<TenantName, VecDeque<T>>,
    /// Tenants with queued items, the next one first.
    turns: VecDeque<TenantName>,
    length: usize,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self {
            waiting: HashMap::new(),
            turns: VecDeque::new(),
            length: 0,
        }
    }
}

impl<T> FairQueue<T> {
    /// Appends an item to its tenant's queue.
    pub(crate) fn push(&mut self, tenant: &TenantName, item: T) {
        self.length += 1;
        if let Some(line) = self.waiting.get_mut(tenant) {
            line.push_back(item);
            return;
        }
        self.waiting.insert(tenant.clone(), VecDeque::from([item]));
        self.turns.push_back(tenant.clone());
    }

    /// Takes up to `most` items, one of each tenant in turn.
    pub(crate) fn take(&mut self, most: usize) -> Vec<T> {
        let mut taken = Vec::with_capacity(most.min(self.length));
        while taken.len() < most
            && let Some(tenant) = self.turns.pop_front()
        {
            let Some(line) = self.waiting.get_mut(&tenant) else {
                continue;
            };
            taken.extend(line.pop_front());
            if line.is_empty() {
                self.waiting.remove(&tenant);
            } else {
                self.turns.push_back(tenant);
            }
        }
        self.length -= taken.len();
        taken
    }

    /// Returns the number of queued items.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Returns whether no item is queued.
    pub(crate) fn is_empty(&self) -> bool {
        self.length == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tenant(name: &str) -> TenantName {
        name.parse().unwrap()
    }

    #[test]
    fn tenants_take_turns_and_keep_their_own_order() {
        let mut queue = FairQueue::default();
        for n in 0..5 {
            queue.push(&tenant("loud"), ("loud", n));
        }
        queue.push(&tenant("quiet"), ("quiet", 0));
        queue.push(&tenant("third"), ("third", 0));
        assert_eq!(queue.take(2), [("loud", 0), ("quiet", 0)]);
        // A tenant that comes back waits for the others' turns.
        queue.push(&tenant("quiet"), ("quiet", 1));
        assert_eq!(queue.take(3), [("third", 0), ("loud", 1), ("quiet", 1)]);
        assert_eq!(queue.take(9), [("loud", 2), ("loud", 3), ("loud", 4)]);
        assert!(queue.is_empty() && queue.take(1).is_empty() && queue.waiting.is_empty());
    }

    proptest! {
        #[test]
        fn no_operation_is_lost_and_no_tenant_is_skipped(steps in prop::collection::vec((0u8..5, 0usize..4), 0..60)) {
            let mut queue = FairQueue::default();
            let (mut pushed, mut taken) = (0usize, Vec::new());
            for (n, take) in steps {
                queue.push(&tenant(&format!("t{n}")), (n, pushed));
                pushed += 1;
                let waiting = |queue: &FairQueue<(u8, usize)>| -> Vec<TenantName> { queue.waiting.keys().cloned().collect() };
                let before = waiting(&queue);
                let batch = queue.take(take);
                // While another tenant waits that had nothing in this batch, no tenant has two
                // turns in it.
                let served = |name: &TenantName| batch.iter().filter(|(t, _)| tenant(&format!("t{t}")) == *name).count();
                let passed_over = before.iter().any(|name| served(name) == 0);
                prop_assert!(!passed_over || before.iter().all(|name| served(name) <= 1), "{batch:?} of {before:?}");
                taken.extend(batch);
                prop_assert_eq!(queue.len(), pushed - taken.len());
            }
            taken.extend(queue.take(usize::MAX));
            prop_assert_eq!(taken.len(), pushed);
            for n in 0..5 {
                prop_assert!(taken.iter().filter(|(t, _)| *t == n).map(|(_, at)| at).is_sorted());
            }
        }
    }
}

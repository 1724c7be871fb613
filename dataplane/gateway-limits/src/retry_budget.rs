//! Limits the retries of one endpoint set that are in progress on a worker, so that retries do not
//! multiply the load of a service that fails.
//!
//! Only retries that a rule asks for count: a request that reached no application adds no load.
//! Start with [`RetryBudget::take`].

use std::cell::Cell;
use std::rc::Rc;

/// Most retries in progress, in percent of the requests in flight (Envoy's default).
pub const RETRIES_PERCENT_MAX: u64 = 20;
/// Retries in progress that a replica always permits a set (Envoy's default), divided among its
/// workers.
pub const RETRIES_MIN: u64 = 3;

/// Requests and retries in progress to one endpoint set on one worker.
#[derive(Debug, Default)]
pub struct RetryBudget {
    requests: Cell<u64>,
    retries: Cell<u64>,
}

impl RetryBudget {
    /// Counts a request that has an endpoint of the set.
    #[inline]
    pub fn begin_request(&self) {
        self.requests.set(self.requests.get() + 1);
    }

    /// Ends a request that [`RetryBudget::begin_request`] counted.
    #[inline]
    pub fn end_request(&self) {
        self.requests.set(self.requests.get() - 1);
    }

    /// Counts a retry as in progress until the permit is dropped. `None` if the budget is used up.
    pub fn take(self: &Rc<Self>, workers: usize) -> Option<RetryPermit> {
        let max = decide_max(self.requests.get(), workers as u64);
        if self.retries.get() >= max {
            return None;
        }
        self.retries.set(self.retries.get() + 1);
        Some(RetryPermit(self.clone()))
    }

    /// Returns the number of retries in progress.
    pub fn retries(&self) -> u64 {
        self.retries.get()
    }
}

fn decide_max(requests: u64, workers: u64) -> u64 {
    let least = RETRIES_MIN.div_ceil(workers.max(1));
    least.max(requests * RETRIES_PERCENT_MAX / 100)
}

/// A retry that is in progress until the permit is dropped.
#[derive(Debug)]
pub struct RetryPermit(Rc<RetryBudget>);

impl Drop for RetryPermit {
    fn drop(&mut self) {
        self.0.retries.set(self.0.retries.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifth_of_the_requests_may_be_retries_and_few_always() {
        for (requests, workers, max) in [
            (0, 1, 3),
            (0, 2, 2),
            (0, 64, 1),
            (15, 1, 3),
            (20, 1, 4),
            (1000, 4, 200),
        ] {
            assert_eq!(decide_max(requests, workers), max, "{requests} {workers}");
        }
        let budget = Rc::new(RetryBudget::default());
        let mut permits: Vec<_> = (0..3).map(|_| budget.take(1).unwrap()).collect();
        assert!(budget.take(1).is_none());
        (0..20).for_each(|_| budget.begin_request());
        permits.push(budget.take(1).unwrap());
        assert!(budget.take(1).is_none());
        permits.pop();
        permits.push(budget.take(1).unwrap());
        (0..20).for_each(|_| budget.end_request());
        drop(permits);
        assert_eq!((budget.retries(), budget.requests.get()), (0, 0));
    }
}

//! What each tenant uses of one worker, and how much it may: requests and connections in flight, questions to authorizers. It counts and
//! says when there is no more room; whom that concerns is the phases' business.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use canal_kit::metrics::Counter;
use canal_model::ids::TenantName;
use tokio::sync::Notify;

use crate::config::Limits;
use crate::fault::Fault;
use crate::snapshot::{Snapshot, TenantView};

/// Questions of one tenant to its external authorizers under way at once, per worker; above, a question counts as failed.
const QUESTIONS_MAX: u64 = 256;

/// What one tenant uses of one worker.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) tenant: TenantName,
    pub(crate) number: u32,
    requests: Rc<Cell<u64>>,
    connections: Rc<Cell<u64>>,
    /// Questions to external authorizers that are under way.
    questions: Rc<Cell<u64>>,
    allowed: OnceCell<Counter>,
    /// What is open and was judged before policies changed is judged again.
    pub(crate) changed: Rc<Notify>,
    /// The policies' version that [`Account::changed`] was last told of.
    pub(crate) policy_version: Cell<u64>,
}

impl Account {
    fn new(tenant: &TenantView) -> Self {
        Self {
            tenant: tenant.name.clone(),
            number: tenant.number,
            requests: Rc::default(),
            connections: Rc::default(),
            questions: Rc::default(),
            allowed: OnceCell::new(),
            changed: Rc::default(),
            policy_version: Cell::new(tenant.policy_version),
        }
    }

    /// Counts one that policies allowed.
    pub(crate) fn allowed(&self, make: impl FnOnce() -> Counter) {
        self.allowed.get_or_init(make).inc();
    }

    /// Room for a question to an external authorizer.
    pub(crate) fn question(&self) -> Option<Held> {
        Held::take(&self.questions, QUESTIONS_MAX)
    }
}

/// A worker's share of the process's limits. A tenant whose connections all landed on one worker has only that worker's share; the kernel
/// spreads connections by hash, so that shares are as good as the whole from a few connections on.
#[derive(Debug)]
pub(crate) struct Shares {
    requests: Rc<Cell<u64>>,
    requests_max: u64,
    tenant_requests_max: u64,
    tenant_connections_max: u64,
}

impl Shares {
    pub(crate) fn of(limits: &Limits, workers: usize) -> Self {
        let share = |n: u64| n.div_ceil(workers.max(1) as u64);
        Self {
            requests: Rc::default(),
            requests_max: share(limits.requests),
            tenant_requests_max: share(limits.tenant_requests),
            tenant_connections_max: share(limits.tenant_connections),
        }
    }
}

impl Shares {
    /// A connection or tunnel of this tenant; `None` if it has as many as it may.
    pub(crate) fn connection(&self, account: &Account) -> Option<Held> {
        Held::take(&account.connections, self.tenant_connections_max)
    }

    /// A request of this tenant.
    pub(crate) fn request(&self, account: &Account) -> Result<Admission, Fault> {
        let tenant = Held::take(&account.requests, self.tenant_requests_max).ok_or(Fault::TenantBusy)?;
        let all = Held::take(&self.requests, self.requests_max).ok_or(Fault::Overload)?;
        Ok(Admission { _worker: all, _tenant: tenant })
    }
}

/// The accounts of a worker, by the tenants' numbers.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    all: RefCell<Vec<Option<Rc<Account>>>>,
}

impl Accounts {
    /// A tenant's; opened when it is met first.
    pub(crate) fn of(&self, tenant: &TenantView) -> Rc<Account> {
        let mut all = self.all.borrow_mut();
        let at = tenant.number as usize;
        if all.len() <= at {
            all.resize(at + 1, None);
        }
        all[at].get_or_insert_with(|| Rc::new(Account::new(tenant))).clone()
    }

    /// Takes over the policies' versions of `snapshot`; gives each account whose version was another one to `changed`.
    pub(crate) fn update(&self, snapshot: &Snapshot, mut changed: impl FnMut(&Account)) {
        for account in self.all.borrow().iter().flatten() {
            let version = snapshot.tenant(account.tenant.as_str()).map_or(0, |tenant| tenant.policy_version);
            if account.policy_version.replace(version) != version {
                changed(account);
            }
        }
    }
}

/// One counted in `of` until dropped.
#[derive(Debug)]
pub(crate) struct Held {
    of: Rc<Cell<u64>>,
}

impl Held {
    /// One more, if `max` allows.
    fn take(of: &Rc<Cell<u64>>, max: u64) -> Option<Self> {
        (of.get() < max).then(|| {
            of.set(of.get() + 1);
            Self { of: of.clone() }
        })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.of.set(self.of.get() - 1);
    }
}

/// A request's places among those in flight; given back when dropped.
#[derive(Debug)]
pub(crate) struct Admission {
    _worker: Held,
    _tenant: Held,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_taken_up_to_the_maximum_and_given_back() {
        let of = Rc::new(Cell::new(0));
        let (a, b) = (Held::take(&of, 2), Held::take(&of, 2));
        assert!(a.is_some() && b.is_some() && Held::take(&of, 2).is_none());
        drop(a);
        assert!(Held::take(&of, 2).is_some());
        assert_eq!(of.get(), 1);
    }

    #[test]
    fn shares_cover_the_whole() {
        let limits = Limits { requests: 10, tenant_requests: 3, tenant_connections: 1, ..Limits::default() };
        let shares = Shares::of(&limits, 4);
        assert_eq!((shares.requests_max, shares.tenant_requests_max, shares.tenant_connections_max), (3, 1, 1));
    }
}

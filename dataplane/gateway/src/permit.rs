//! Phase *permit*: may this request (or connection) be served now? The tenant check, and the limits per tenant and per worker.
//! Authorization policies will be asked here too.

use std::cell::Cell;
use std::rc::Rc;

use canal_model::ids::TenantName;

use crate::config::Limits;
use crate::fault::Fault;
use crate::greet::Session;
use crate::place::Resolved;
use crate::snapshot::TenantView;
use crate::worker::Worker;

/// What one tenant uses of one worker.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) tenant: TenantName,
    pub(crate) number: u32,
    requests: Rc<Cell<u64>>,
    connections: Rc<Cell<u64>>,
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

/// A request that may run; gives its places back when dropped.
#[derive(Debug)]
pub(crate) struct Admission {
    _worker: Held,
    _tenant: Held,
}

/// The account of a tenant on this worker.
pub(crate) fn account(worker: &Worker, tenant: &TenantView) -> Rc<Account> {
    let mut accounts = worker.accounts.borrow_mut();
    let at = tenant.number as usize;
    if accounts.len() <= at {
        accounts.resize(at + 1, None);
    }
    let fresh =
        || Rc::new(Account { tenant: tenant.name.clone(), number: tenant.number, requests: Rc::default(), connections: Rc::default() });
    accounts[at].get_or_insert_with(fresh).clone()
}

/// A connection or tunnel of this tenant; `None` if it has as many as it may.
pub(crate) fn connection(worker: &Worker, account: &Account) -> Option<Held> {
    Held::take(&account.connections, worker.shares.tenant_connections_max)
}

/// A request of this session to what it was resolved to.
pub(crate) fn request(worker: &Worker, session: &Session, resolved: &Resolved) -> Result<Admission, Fault> {
    // Look-ups are made inside the tenant; this says so once more, where a mistake would otherwise become a leak.
    if resolved.tenant() != session.account.tenant.as_str() {
        return Err(Fault::NoService);
    }
    let tenant = Held::take(&session.account.requests, worker.shares.tenant_requests_max).ok_or(Fault::TenantBusy)?;
    let all = Held::take(&worker.shares.requests, worker.shares.requests_max).ok_or(Fault::Overload)?;
    Ok(Admission { _worker: all, _tenant: tenant })
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

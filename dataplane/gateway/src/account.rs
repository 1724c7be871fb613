//! What each tenant uses of one worker, and how much it may: requests and connections in flight, questions to authorizers. It counts and
//! says when there is no more room; whom that concerns is the phases' business.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use canal_kit::log::TenantLogQueue;
use canal_kit::metrics::Counter;
use canal_model::ids::TenantName;
use canal_model::share::{ShareKind, Shares};
use tokio::sync::Notify;

use crate::config::Limits;
use crate::counts::Counts;
use crate::fault::Fault;
use crate::scheduler::{Scheduler, TenantQueue};
use crate::snapshot::{Snapshot, TenantView};

/// Questions of one tenant to its external authorizers under way at once, per worker; above, a question counts as failed.
const QUESTIONS_MAX: u64 = 256;
/// A tenant beside others may have this many times as many requests in flight as there are places free.
const FREE_FACTOR: u64 = 2;

/// What one tenant uses of one worker.
pub(crate) struct Account {
    pub(crate) tenant: TenantName,
    pub(crate) number: u32,
    requests: Rc<Cell<u64>>,
    tunnels: Rc<Cell<u64>>,
    maxima: Cell<TenantMaxima>,
    /// Its tasks' turns on this worker.
    pub(crate) queue: Rc<TenantQueue>,
    /// Its lines in the access log that wait for the disk.
    pub(crate) log: TenantLogQueue,
    /// Questions to external authorizers that are under way.
    questions: Rc<Cell<u64>>,
    allowed: OnceCell<Counter>,
    /// What is open and was judged before policies changed is judged again.
    pub(crate) changed: Rc<Notify>,
    /// The policies' version that [`Account::changed`] was last told of.
    pub(crate) policy_version: Cell<u64>,
}

/// What one tenant may have on one worker.
#[derive(Debug, Clone, Copy)]
struct TenantMaxima {
    requests: u64,
    tunnels: u64,
    body_bytes: u64,
}

impl Account {
    fn new(tenant: &TenantView, limits: &WorkerLimits, queue: Rc<TenantQueue>) -> Self {
        Self {
            tenant: tenant.name.clone(),
            number: tenant.number,
            requests: Rc::default(),
            tunnels: Rc::default(),
            maxima: Cell::new(limits.maxima(&tenant.shares)),
            queue,
            log: TenantLogQueue::new(&tenant.name, &tenant.shares),
            questions: Rc::default(),
            allowed: OnceCell::new(),
            changed: Rc::default(),
            policy_version: Cell::new(tenant.policy_version),
        }
    }

    /// Something of the tenant is open or in flight, or somebody has its account or its queue.
    fn is_open(self: &Rc<Self>) -> bool {
        let counts = [&self.requests, &self.tunnels, &self.questions];
        counts.iter().any(|count| count.get() > 0)
            || Rc::strong_count(self) > 1
            || Rc::strong_count(&self.queue) > 1
            || self.log.is_waiting()
    }

    /// Counts one that policies allowed.
    pub(crate) fn allowed(&self, make: impl FnOnce() -> Counter) {
        self.allowed.get_or_init(make).inc();
    }

    /// Bytes of bodies that the worker may hold for the tenant's authorizers.
    pub(crate) fn body_bytes_max(&self) -> u64 {
        self.maxima.get().body_bytes
    }

    /// Room for a question to an external authorizer.
    pub(crate) fn question(&self) -> Option<Held> {
        Held::take(&self.questions, QUESTIONS_MAX)
    }
}

/// A worker's part of the process's limits. A tenant whose connections all landed on one worker has only that worker's part; the kernel
/// spreads connections by hash, so that parts are as good as the whole from a few connections on.
#[derive(Debug)]
pub(crate) struct WorkerLimits {
    requests: Rc<Cell<u64>>,
    requests_max: u64,
    /// The whole limits, and for tenants that the provider wrote no share for.
    limits: Limits,
    workers: u64,
}

impl WorkerLimits {
    pub(crate) fn of(limits: &Limits, workers: usize) -> Self {
        let workers = workers.max(1) as u64;
        Self { requests: Rc::default(), requests_max: limits.requests.div_ceil(workers), limits: limits.clone(), workers }
    }

    /// What a tenant may have on this worker.
    fn maxima(&self, shares: &Shares) -> TenantMaxima {
        let max = |kind, whole: u64, default: u64| {
            let written = shares.iter().find(|(k, _)| *k == kind).map(|(_, share)| share.of(whole));
            written.unwrap_or(default).div_ceil(self.workers)
        };
        TenantMaxima {
            requests: max(ShareKind::GatewayRequests, self.limits.requests, self.limits.tenant_requests),
            tunnels: max(ShareKind::GatewayConnections, self.limits.connections, self.limits.tenant_connections),
            body_bytes: shares.get(ShareKind::GatewayBodyBytes).of(self.limits.body_bytes).div_ceil(self.workers),
        }
    }

    /// Takes over what the provider wrote for a tenant.
    pub(crate) fn set_shares(&self, account: &Account, shares: &Shares) {
        account.maxima.set(self.maxima(shares));
        account.queue.set_shares(shares);
        account.log.set_shares(shares);
    }

    /// A tunnel of this tenant; `None` if it has as many as it may.
    pub(crate) fn tunnel(&self, account: &Account) -> Option<Held> {
        Held::take(&account.tunnels, account.maxima.get().tunnels)
    }

    /// A request of this tenant.
    pub(crate) fn request(&self, account: &Account) -> Result<Admission, Fault> {
        decide_request(account.requests.get(), account.maxima.get().requests, self.requests.get(), self.requests_max)?;
        Ok(Admission { _worker: Held::add(&self.requests), _tenant: Held::add(&account.requests) })
    }
}

/// Whether a tenant that has `held` of a worker's `used` requests in flight may have one more. Requests do not give way, so tenants that fill
/// their shares would keep out all others: beside others, a tenant may have at most twice what is still free. That is the dynamic threshold of
/// shared switch buffers (Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998), which always leaves room for one more tenant.
fn decide_request(held: u64, tenant_max: u64, used: u64, max: u64) -> Result<(), Fault> {
    let free = max.saturating_sub(used);
    let has_others = used > held;
    match (free, held) {
        (0, _) => Err(Fault::Overload),
        (_, held) if held >= tenant_max || (has_others && held > FREE_FACTOR * free) => Err(Fault::TenantBusy),
        _ => Ok(()),
    }
}

/// The accounts of a worker, by the tenants' numbers.
pub(crate) struct Accounts {
    all: RefCell<Vec<Option<Rc<Account>>>>,
    /// Some may be of tenants that are gone.
    has_gone: Cell<bool>,
    scheduler: Scheduler,
    counts: Rc<Counts>,
}

impl Accounts {
    pub(crate) fn new(scheduler: Scheduler, counts: Rc<Counts>) -> Self {
        Self { all: RefCell::default(), has_gone: Cell::new(false), scheduler, counts }
    }

    /// A tenant's; opened when it is met first.
    pub(crate) fn of(&self, tenant: &TenantView, limits: &WorkerLimits) -> Rc<Account> {
        let mut all = self.all.borrow_mut();
        let at = tenant.number as usize;
        if all.len() <= at {
            all.resize(at + 1, None);
        }
        all[at]
            .get_or_insert_with(|| {
                self.has_gone.set(self.has_gone.get() || tenant.is_gone());
                let queue = self.scheduler.queue(&tenant.shares, self.counts.cpu(&tenant.name));
                Rc::new(Account::new(tenant, limits, queue))
            })
            .clone()
    }

    /// Takes over the shares and the policies' versions of `snapshot`; gives each account whose version was another one to `changed`.
    pub(crate) fn update(&self, snapshot: &Snapshot, limits: &WorkerLimits, mut changed: impl FnMut(&Account)) {
        for account in self.all.borrow().iter().flatten() {
            let tenant = snapshot.tenant(account.tenant.as_str());
            if let Some(tenant) = tenant {
                limits.set_shares(account, &tenant.shares);
            }
            self.has_gone.set(self.has_gone.get() || tenant.is_none_or(|tenant| tenant.is_gone()));
            let version = tenant.map_or(0, |tenant| tenant.policy_version);
            if account.policy_version.replace(version) != version {
                changed(account);
            }
        }
    }

    /// Drops the accounts of tenants that are gone, each once nothing of it is open any more: until then what is in flight counts, also for a
    /// tenant that comes back. `dropped` is given their numbers. To be called again and again; it costs a comparison if there are none.
    pub(crate) fn forget_gone(&self, snapshot: &Snapshot, dropped: impl Fn(u32)) {
        if !self.has_gone.get() {
            return;
        }
        let mut is_one_open = false;
        for place in self.all.borrow_mut().iter_mut() {
            let is_gone = |account: &Rc<Account>| snapshot.tenant(account.tenant.as_str()).is_none_or(|tenant| tenant.is_gone());
            let Some(account) = place.as_ref().filter(|account| is_gone(account)) else { continue };
            if account.is_open() {
                is_one_open = true;
                continue;
            }
            dropped(account.number);
            *place = None;
        }
        self.has_gone.set(is_one_open);
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
        (of.get() < max).then(|| Self::add(of))
    }

    fn add(of: &Rc<Cell<u64>>) -> Self {
        of.set(of.get() + 1);
        Self { of: of.clone() }
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
    use canal_model::share::Share;

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
    fn a_tenant_that_is_gone_leaves_nothing_once_nothing_of_it_is_open() {
        use crate::snapshot::build::Builder;
        use crate::snapshot::build::tests::tenant;
        use canal_model::ids::Generation;
        use canal_model::program::Kind;

        let registry = canal_kit::metrics::Registry::new();
        let counts = Rc::new(Counts::new(&registry, &registry.shard()));
        let (accounts, tokens) = (Accounts::new(Scheduler::new(), counts), crate::token::Cache::default());
        let limits = WorkerLimits::of(&Limits::default(), 1);
        let mut builder = Builder::new("gw", None, None);
        let next = |builder: &mut Builder, is_there: bool, n| {
            let (upserts, removals) = if is_there { (vec![tenant()], vec![]) } else { (vec![], vec![(Kind::Tenant, "t".to_string())]) };
            let snapshot = builder.apply(&upserts, &removals, Generation(n));
            accounts.update(&snapshot, &limits, |_| {});
            snapshot
        };
        let held = || (accounts.all.borrow().iter().flatten().count(), tokens.tenants());
        let forget = |snapshot: &Snapshot| accounts.forget_gone(snapshot, |number| tokens.forget(number));

        let there = next(&mut builder, true, 1);
        let account = accounts.of(there.tenant("t").unwrap(), &limits);
        tokens.of(account.number);
        let request = limits.request(&account).unwrap();
        forget(&there);
        drop(account);
        forget(&next(&mut builder, false, 2));
        assert_eq!(held(), (1, 1), "a request is in flight");
        let back = next(&mut builder, true, 3);
        assert_eq!(accounts.of(back.tenant("t").unwrap(), &limits).requests.get(), 1, "it counts for the tenant that came back");
        forget(&back);
        let gone = next(&mut builder, false, 4);
        forget(&gone);
        assert_eq!(held(), (1, 1));
        drop(request);
        forget(&gone);
        assert_eq!(held(), (0, 0));
        assert!(!accounts.has_gone.get());
        // Back with the same number, and a fresh account.
        let again = next(&mut builder, true, 5);
        assert_eq!(accounts.of(again.tenant("t").unwrap(), &limits).requests.get(), 0);
        forget(&again);
        assert_eq!(held(), (1, 0), "and whoever is there stays");
    }

    /// Tenants with slow endpoints fill what they may, one after the other; one more finds a place all the same.
    #[test]
    fn tenants_that_fill_their_shares_leave_places_for_others() {
        let (mut used, max, tenant_max) = (0, 1000, 400);
        let counts: Vec<u64> = (0..5)
            .map(|_| {
                let held = (0..max).take_while(|held| decide_request(*held, tenant_max, used + held, max).is_ok()).count() as u64;
                used += held;
                held
            })
            .collect();
        assert_eq!(counts, [400, 400, 134, 45, 15]);
        assert_eq!(decide_request(134, tenant_max, used, max), Err(Fault::TenantBusy));
        assert_eq!(decide_request(0, tenant_max, max, max), Err(Fault::Overload));
        assert!(decide_request(399, tenant_max, 399, 400).is_ok(), "nobody else is there");
    }

    #[test]
    fn workers_parts_cover_the_whole_and_written_shares_replace_the_default() {
        let limits = Limits { connections: 8, requests: 10, tenant_requests: 3, tenant_connections: 1, ..Limits::default() };
        let parts = WorkerLimits::of(&limits, 4);
        let mut shares = Shares::default();
        let maxima = parts.maxima(&shares);
        assert_eq!((parts.requests_max, maxima.requests, maxima.tunnels), (3, 1, 1));
        assert_eq!(maxima.body_bytes, 16 << 20, "a quarter of 256 MiB, on four workers");
        shares.set(ShareKind::GatewayRequests, Share::Percent(80));
        shares.set(ShareKind::GatewayConnections, Share::Amount(8));
        shares.set(ShareKind::GatewayBodyBytes, Share::Amount(4 << 20));
        let maxima = parts.maxima(&shares);
        assert_eq!((maxima.requests, maxima.tunnels, maxima.body_bytes), (2, 2, 1 << 20));
    }
}

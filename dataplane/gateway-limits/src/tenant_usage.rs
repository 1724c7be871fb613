//! Usage and limits of each tenant on one worker: requests and tunnels in flight, ext_authz checks.
//!
//! It counts and refuses; the phases decide what follows from a refusal. Start with
//! [`TenantUsageTable::of`].

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use canal_gateway_config::{Snapshot, TenantView};
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_io::scheduler::{Scheduler, TenantQueue};
use canal_model::ids::TenantName;
use canal_model::share::{ShareKind, Shares};
use canal_runtime::metrics::Counter;
use canal_runtime::share::decide_free_needed;
use canal_telemetry::access_log::TenantLogQueue;
use tokio::sync::Notify;

use crate::limits::GatewayLimits;
use crate::worker_counters::WorkerCounters;

/// Most concurrent ext_authz checks of one tenant per worker. A further check counts as failed.
/// Four workers together permit as many as Envoy does by default for a cluster (`max_requests`,
/// 1,024).
const EXT_AUTHZ_IN_FLIGHT_MAX: u64 = 256;

/// Usage of one worker by one tenant.
pub struct TenantUsage {
    pub tenant: TenantName,
    pub number: u32,
    requests: Rc<Cell<u64>>,
    tunnels: Rc<Cell<u64>>,
    maxima: Cell<TenantMaxima>,
    /// Scheduler queue of the tenant's tasks on this worker.
    pub queue: Rc<TenantQueue>,
    /// Access log lines of the tenant that wait for the disk.
    pub log: TenantLogQueue,
    /// Number of ext_authz checks in progress.
    ext_authz_in_flight: Rc<Cell<u64>>,
    /// Number of requests that faults delay.
    delayed: Rc<Cell<u64>>,
    /// Number of copies of requests in progress.
    mirrored: Rc<Cell<u64>>,
    /// Bytes that are reserved for the bodies of these copies.
    pub copied_body_bytes: Rc<Cell<u64>>,
    allowed: OnceCell<Counter>,
    /// Notifies open work that was authorized before the policies changed, so that it is authorized
    /// again.
    pub changed: Rc<Notify>,
    /// Version of the policies for which [`TenantUsage::changed`] was last notified.
    pub policy_version: Cell<u64>,
}

/// Limits of one tenant on one worker.
#[derive(Debug, Clone, Copy)]
struct TenantMaxima {
    requests: u64,
    tunnels: u64,
    body_bytes: u64,
    delayed: u64,
    mirrored: u64,
}

impl TenantUsage {
    fn new(tenant: &TenantView, limits: &WorkerLimits, queue: Rc<TenantQueue>) -> Self {
        Self {
            tenant: tenant.name.clone(),
            number: tenant.number,
            requests: Rc::default(),
            tunnels: Rc::default(),
            maxima: Cell::new(limits.maxima(&tenant.shares)),
            queue,
            log: TenantLogQueue::new(&tenant.name, &tenant.shares),
            ext_authz_in_flight: Rc::default(),
            delayed: Rc::default(),
            mirrored: Rc::default(),
            copied_body_bytes: Rc::default(),
            allowed: OnceCell::new(),
            changed: Rc::default(),
            policy_version: Cell::new(tenant.policy_version),
        }
    }

    /// True if something of the tenant is open or in flight, or something else still references its
    /// usage or its queue.
    fn is_open(self: &Rc<Self>) -> bool {
        let counts = [
            &self.requests,
            &self.tunnels,
            &self.ext_authz_in_flight,
            &self.mirrored,
        ];
        counts.iter().any(|count| count.get() > 0)
            || Rc::strong_count(self) > 1
            || Rc::strong_count(&self.queue) > 1
            || self.log.is_waiting()
    }

    /// Counts a request or connection that the policies allowed.
    pub fn allowed(&self, make: impl FnOnce() -> Counter) {
        self.allowed.get_or_init(make).inc();
    }

    /// Returns the most body bytes that the worker may buffer for the tenant's authorizers.
    #[inline]
    pub fn body_bytes_max(&self) -> u64 {
        self.maxima.get().body_bytes
    }

    /// Counts a request as delayed by a fault; `None` if there are too many. Delayed requests are in
    /// flight too, so their limit needs no threshold of its own.
    pub fn begin_delay(&self) -> Option<CountGuard> {
        CountGuard::take(&self.delayed, self.maxima.get().delayed)
    }

    /// Counts an ext_authz check as in progress; `None` if there are too many.
    pub fn begin_ext_authz(&self) -> Option<CountGuard> {
        CountGuard::take(&self.ext_authz_in_flight, EXT_AUTHZ_IN_FLIGHT_MAX)
    }
}

/// A worker's part of the process's limits. A tenant whose connections are all on one worker can
/// use only that worker's part. The kernel distributes connections by hash, so from a few
/// connections on the parts add up to the process's limits.
#[derive(Debug)]
pub struct WorkerLimits {
    requests: Rc<Cell<u64>>,
    requests_max: u64,
    /// Number of copies of requests in progress.
    mirrored: Rc<Cell<u64>>,
    mirrored_max: u64,
    /// Limits of the entire process, with the defaults for tenants for which the provider set no
    /// share.
    limits: GatewayLimits,
    workers: u64,
}

impl WorkerLimits {
    pub fn of(limits: &GatewayLimits, workers: usize) -> Self {
        let workers = workers.max(1) as u64;
        Self {
            requests: Rc::default(),
            requests_max: limits.requests.div_ceil(workers),
            mirrored: Rc::default(),
            mirrored_max: limits.mirrored_requests().div_ceil(workers),
            limits: limits.clone(),
            workers,
        }
    }

    /// Returns the limits of a tenant on this worker.
    fn maxima(&self, shares: &Shares) -> TenantMaxima {
        let max = |kind, whole: u64, default: u64| {
            let written = shares
                .iter()
                .find(|(k, _)| *k == kind)
                .map(|(_, share)| share.of(whole));
            written.unwrap_or(default).div_ceil(self.workers)
        };
        TenantMaxima {
            requests: max(
                ShareKind::GatewayRequests,
                self.limits.requests,
                self.limits.tenant_requests,
            ),
            tunnels: max(
                ShareKind::GatewayConnections,
                self.limits.connections,
                self.limits.tenant_connections,
            ),
            body_bytes: shares
                .get(ShareKind::GatewayBodyBytes)
                .of(self.limits.body_bytes)
                .div_ceil(self.workers),
            mirrored: shares
                .get(ShareKind::GatewayMirroredRequests)
                .of(self.limits.mirrored_requests())
                .div_ceil(self.workers),
            delayed: shares
                .get(ShareKind::GatewayDelayedRequests)
                .of(self.limits.requests)
                .div_ceil(self.workers),
        }
    }

    /// Applies the shares that the provider set for a tenant.
    pub fn set_shares(&self, account: &TenantUsage, shares: &Shares) {
        account.maxima.set(self.maxima(shares));
        account.queue.set_shares(shares);
        account.log.set_shares(shares);
    }

    /// Counts a tunnel of this tenant; `None` if the tenant has reached its limit.
    pub fn tunnel(&self, account: &TenantUsage) -> Option<CountGuard> {
        CountGuard::take(&account.tunnels, account.maxima.get().tunnels)
    }

    /// Admits a request of this tenant.
    ///
    /// # Errors
    /// The worker or the tenant has reached its limit of requests in flight.
    #[inline]
    pub fn request(&self, account: &TenantUsage) -> Result<RequestPermit, ProxyError> {
        decide_request(
            account.requests.get(),
            account.maxima.get().requests,
            self.requests.get(),
            self.requests_max,
        )?;
        Ok(RequestPermit {
            _worker: CountGuard::add(&self.requests),
            _tenant: CountGuard::add(&account.requests),
        })
    }

    /// Admits a copy of a request of this tenant to a mirror. It takes no request's place.
    ///
    /// # Errors
    /// The name of the limit that the tenant or the worker has reached.
    pub fn mirror(&self, account: &TenantUsage) -> Result<RequestPermit, &'static str> {
        decide_request(
            account.mirrored.get(),
            account.maxima.get().mirrored,
            self.mirrored.get(),
            self.mirrored_max,
        )
        .map_err(|error| match error {
            ProxyError::Overload => "mirrored_requests",
            _ => "tenant_mirrored_requests",
        })?;
        Ok(RequestPermit {
            _worker: CountGuard::add(&self.mirrored),
            _tenant: CountGuard::add(&account.mirrored),
        })
    }
}

/// Decides whether a tenant that has `of_tenant` of a worker's `used` requests in flight may have
/// one more. Requests are not revoked, so tenants that use their full shares would block all
/// others. The threshold of [`decide_free_needed`] prevents that.
#[inline]
fn decide_request(of_tenant: u64, tenant_max: u64, used: u64, max: u64) -> Result<(), ProxyError> {
    let free = max.saturating_sub(used);
    let has_others = used > of_tenant;
    match free.checked_sub(1) {
        None => Err(ProxyError::Overload),
        Some(left)
            if of_tenant >= tenant_max
                || (has_others && decide_free_needed(of_tenant + 1, max) > left) =>
        {
            Err(ProxyError::TenantBusy)
        }
        Some(_) => Ok(()),
    }
}

/// Usage of all tenants on a worker, indexed by tenant number.
pub struct TenantUsageTable {
    all: RefCell<Vec<Option<Rc<TenantUsage>>>>,
    /// True if the table may contain deleted tenants.
    has_gone: Cell<bool>,
    scheduler: Scheduler,
    counts: Rc<WorkerCounters>,
}

impl TenantUsageTable {
    pub fn new(scheduler: Scheduler, counts: Rc<WorkerCounters>) -> Self {
        Self {
            all: RefCell::default(),
            has_gone: Cell::new(false),
            scheduler,
            counts,
        }
    }

    /// Returns a tenant's usage, created at first use.
    pub fn of(&self, tenant: &TenantView, limits: &WorkerLimits) -> Rc<TenantUsage> {
        let mut all = self.all.borrow_mut();
        let at = tenant.number as usize;
        if all.len() <= at {
            all.resize(at + 1, None);
        }
        all[at]
            .get_or_insert_with(|| {
                self.has_gone.set(self.has_gone.get() || tenant.is_gone());
                let queue = self
                    .scheduler
                    .queue(&tenant.shares, self.counts.cpu(&tenant.name));
                Rc::new(TenantUsage::new(tenant, limits, queue))
            })
            .clone()
    }

    /// Applies the shares and policy versions of `snapshot`. Calls `changed` for each tenant whose
    /// policy version changed.
    pub fn update(
        &self,
        snapshot: &Snapshot,
        limits: &WorkerLimits,
        mut changed: impl FnMut(&TenantUsage),
    ) {
        for account in self.all.borrow().iter().flatten() {
            let tenant = snapshot.tenant(account.tenant.as_str());
            if let Some(tenant) = tenant {
                limits.set_shares(account, &tenant.shares);
            }
            self.has_gone
                .set(self.has_gone.get() || tenant.is_none_or(|tenant| tenant.is_gone()));
            let version = tenant.map_or(0, |tenant| tenant.policy_version);
            if account.policy_version.replace(version) != version {
                changed(account);
            }
        }
    }

    /// Drops the usage of deleted tenants, each once nothing of it is open. Until then its work in
    /// flight counts, also for a tenant that is created again. `dropped` gets the numbers of the
    /// dropped tenants. Call it repeatedly; it costs one comparison if there are no deleted
    /// tenants.
    pub fn forget_gone(&self, snapshot: &Snapshot, dropped: impl Fn(u32)) {
        if !self.has_gone.get() {
            return;
        }
        let mut is_one_open = false;
        for place in self.all.borrow_mut().iter_mut() {
            let is_gone = |account: &Rc<TenantUsage>| {
                snapshot
                    .tenant(account.tenant.as_str())
                    .is_none_or(|tenant| tenant.is_gone())
            };
            let Some(account) = place.as_ref().filter(|account| is_gone(account)) else {
                continue;
            };
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

/// Counts one in `of` until dropped.
#[derive(Debug)]
pub struct CountGuard {
    of: Rc<Cell<u64>>,
}

impl CountGuard {
    /// Counts one more, unless `max` is reached.
    #[inline]
    fn take(of: &Rc<Cell<u64>>, max: u64) -> Option<Self> {
        (of.get() < max).then(|| Self::add(of))
    }

    #[inline]
    fn add(of: &Rc<Cell<u64>>) -> Self {
        of.set(of.get() + 1);
        Self { of: of.clone() }
    }
}

impl Drop for CountGuard {
    #[inline]
    fn drop(&mut self) {
        self.of.set(self.of.get() - 1);
    }
}

/// Counts a request in flight, or a copy of one, of its tenant and of the worker until dropped.
#[derive(Debug)]
pub struct RequestPermit {
    _worker: CountGuard,
    _tenant: CountGuard,
}

#[cfg(test)]
mod tests {
    use canal_model::share::Share;

    use super::*;

    #[test]
    fn permits_are_granted_up_to_the_maximum_and_returned() {
        let of = Rc::new(Cell::new(0));
        let (a, b) = (CountGuard::take(&of, 2), CountGuard::take(&of, 2));
        assert!(a.is_some() && b.is_some() && CountGuard::take(&of, 2).is_none());
        drop(a);
        assert!(CountGuard::take(&of, 2).is_some());
        assert_eq!(of.get(), 1);
    }

    #[test]
    fn a_removed_tenant_leaves_no_state_once_its_connections_ended() {
        use canal_gateway_config::SnapshotBuilder;
        use canal_gateway_config::testing::tenant;
        use canal_model::ids::Generation;
        use canal_model::program::ResourceKind;

        let registry = canal_runtime::metrics::Registry::new();
        let counts = Rc::new(WorkerCounters::new(&registry, &registry.shard()));
        let (accounts, tokens) = (
            TenantUsageTable::new(Scheduler::new(), counts),
            canal_gateway_config::jwt::TokenCache::default(),
        );
        let limits = WorkerLimits::of(&GatewayLimits::default(), 1);
        let mut builder = SnapshotBuilder::new("gw", None, None);
        let next = |builder: &mut SnapshotBuilder, is_there: bool, n| {
            let (upserts, removals) = if is_there {
                (vec![tenant()], vec![])
            } else {
                (vec![], vec![(ResourceKind::Tenant, "t".to_string())])
            };
            let snapshot = builder.apply(&upserts, &removals, Generation(n));
            accounts.update(&snapshot, &limits, |_| {});
            snapshot
        };
        let accounts_and_caches = || {
            (
                accounts.all.borrow().iter().flatten().count(),
                tokens.tenants(),
            )
        };
        let forget =
            |snapshot: &Snapshot| accounts.forget_gone(snapshot, |number| tokens.forget(number));

        let there = next(&mut builder, true, 1);
        let account = accounts.of(there.tenant("t").unwrap(), &limits);
        tokens.of(account.number);
        let request = limits.request(&account).unwrap();
        forget(&there);
        drop(account);
        forget(&next(&mut builder, false, 2));
        assert_eq!(accounts_and_caches(), (1, 1), "a request is in flight");
        let back = next(&mut builder, true, 3);
        assert_eq!(
            accounts
                .of(back.tenant("t").unwrap(), &limits)
                .requests
                .get(),
            1,
            "the request counts for the tenant that was added again"
        );
        forget(&back);
        let gone = next(&mut builder, false, 4);
        forget(&gone);
        assert_eq!(accounts_and_caches(), (1, 1));
        drop(request);
        forget(&gone);
        assert_eq!(accounts_and_caches(), (0, 0));
        assert!(!accounts.has_gone.get());
        // The tenant is back with the same number and new usage.
        let again = next(&mut builder, true, 5);
        assert_eq!(
            accounts
                .of(again.tenant("t").unwrap(), &limits)
                .requests
                .get(),
            0
        );
        forget(&again);
        // Nothing has asked for the token cache since it was dropped.
        assert_eq!(
            accounts_and_caches(),
            (1, 0),
            "the usage of a tenant that exists stays"
        );
    }

    #[test]
    fn copies_of_requests_have_limits_of_their_own() {
        use canal_gateway_config::SnapshotBuilder;
        use canal_gateway_config::testing::tenant;
        use canal_model::ids::Generation;

        let registry = canal_runtime::metrics::Registry::new();
        let counts = Rc::new(WorkerCounters::new(&registry, &registry.shard()));
        let accounts = TenantUsageTable::new(Scheduler::new(), counts);
        let few = GatewayLimits {
            requests: 100,
            ..GatewayLimits::default()
        };
        let limits = WorkerLimits::of(&few, 1);
        let mut builder = SnapshotBuilder::new("gw", None, None);
        let snapshot = builder.apply(&[tenant()], &[], Generation(1));
        let account = accounts.of(snapshot.tenant("t").unwrap(), &limits);
        let copies: Vec<_> = (0..2).map(|_| limits.mirror(&account).unwrap()).collect();
        let refused = limits.mirror(&account).err();
        assert_eq!(refused, Some("tenant_mirrored_requests"), "a quarter of 10");
        assert!(account.is_open() && limits.request(&account).is_ok());
        drop(copies);
        let mut shares = Shares::default();
        shares.set(ShareKind::GatewayMirroredRequests, Share::Percent(100));
        limits.set_shares(&account, &shares);
        let copies: Vec<_> = (0..10).map(|_| limits.mirror(&account).unwrap()).collect();
        let refused = limits.mirror(&account).err();
        assert_eq!(refused, Some("mirrored_requests"));
        drop(copies);
        assert!(limits.mirror(&account).is_ok());
    }

    /// Tenants with slow endpoints use up their limits one after another; a further tenant is still
    /// admitted.
    #[test]
    fn tenants_that_fill_their_shares_do_not_block_others() {
        for (max, tenant_max) in [(1000, 400), (60, 24)] {
            let mut used = 0;
            let counts: Vec<u64> = (0..10)
                .map(|_| {
                    let admitted = (0..max)
                        .take_while(|admitted| {
                            decide_request(*admitted, tenant_max, used + admitted, max).is_ok()
                        })
                        .count() as u64;
                    used += admitted;
                    admitted
                })
                .collect();
            assert!(
                counts[0] == tenant_max && counts.is_sorted_by(|a, b| a >= b) && counts[9] > 0,
                "{counts:?}"
            );
            assert_eq!(
                decide_request(0, tenant_max, used, max),
                Ok(()),
                "an eleventh tenant is admitted: {counts:?}"
            );
            assert_eq!(
                decide_request(counts[1], tenant_max, used, max),
                Err(ProxyError::TenantBusy)
            );
            assert_eq!(
                decide_request(0, tenant_max, max, max),
                Err(ProxyError::Overload)
            );
        }
        assert!(
            decide_request(399, 400, 399, 400).is_ok(),
            "no other tenant has requests"
        );
    }

    #[test]
    fn workers_parts_cover_the_whole_and_written_shares_replace_the_default() {
        let limits = GatewayLimits {
            connections: 8,
            requests: 10,
            tenant_requests: 3,
            tenant_connections: 1,
            ..GatewayLimits::default()
        };
        let parts = WorkerLimits::of(&limits, 4);
        let mut shares = Shares::default();
        let maxima = parts.maxima(&shares);
        assert_eq!(
            (parts.requests_max, maxima.requests, maxima.tunnels),
            (3, 1, 1)
        );
        assert_eq!(
            maxima.body_bytes,
            16 << 20,
            "a quarter of 256 MiB, on four workers"
        );
        shares.set(ShareKind::GatewayRequests, Share::Percent(80));
        shares.set(ShareKind::GatewayConnections, Share::Amount(8));
        shares.set(ShareKind::GatewayBodyBytes, Share::Amount(4 << 20));
        let maxima = parts.maxima(&shares);
        assert_eq!(
            (maxima.requests, maxima.tunnels, maxima.body_bytes),
            (2, 2, 1 << 20)
        );
    }
}

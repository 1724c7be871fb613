//! The thread that builds tenants' tables step by step, and the one place that publishes snapshots.
//! It decides no order; `TenantBuilds` does.
//!
//! A step runs without the lock, so a change of the configuration waits at most for a publication
//! and never for a step. Start with [`TableBuilds::start`].

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use canal_gateway_config::{BuildStep, FinishedStep, IMMEDIATE_BYTES_MAX, Snapshot, TenantBuilds};
use canal_model::ids::{Generation, TenantName};
use canal_model::program::{Resource, ResourceKind};
use canal_runtime::metrics::{MetricFamily, Registry, SharedGauge};

use crate::worker::EngineShared;

/// Interval at which the idle thread gives back memory that it allocated. The workers free the
/// snapshots that it builds, which leaves the pages with this thread. Nobody measured this value; a
/// build that follows within it uses the memory again.
const COLLECT_INTERVAL: Duration = Duration::from_secs(2);
/// Bytes of tables that the first state may compile before the engine returns from it. It is more
/// than for a change, because a replica should be ready with the tables of nearly all tenants. It
/// is bounded so that one tenant cannot delay readiness for long. Four times
/// [`IMMEDIATE_BYTES_MAX`]; nobody measured which value is best.
const FIRST_BYTES_MAX: usize = 32 << 20;

struct BuildGauges {
    generation: SharedGauge,
    services: SharedGauge,
    workloads: SharedGauge,
    faults: SharedGauge,
    waiting: SharedGauge,
}

impl BuildGauges {
    fn new(registry: &Registry) -> Self {
        let gauge = |name, help| {
            registry
                .gauges(MetricFamily::new(name, help, &[]))
                .shared(&[])
        };
        Self {
            generation: gauge(
                "canal_gateway_generation",
                "Generation of the configuration that new requests use.",
            ),
            services: gauge("canal_gateway_services", "Services known."),
            workloads: gauge(
                "canal_gateway_workload_addresses",
                "Known workload addresses.",
            ),
            faults: gauge(
                "canal_gateway_broken_route_matches",
                "Broken matches in routes; each fails closed.",
            ),
            waiting: gauge(
                "canal_gateway_tenants_building",
                "Tenants whose newest routes are not in force yet.",
            ),
        }
    }
}

/// State under the lock.
struct Work {
    builds: TenantBuilds,
    /// A state was applied.
    has_state: bool,
    /// The engine is gone, so the thread ends.
    is_ended: bool,
}

/// Builds of all tenants, and the publication of their snapshots.
pub(crate) struct TableBuilds {
    shared: Arc<EngineShared>,
    gauges: BuildGauges,
    work: Mutex<Work>,
    woken: Condvar,
}

impl TableBuilds {
    /// Starts the thread. It ends after [`TableBuilds::end`].
    ///
    /// # Errors
    /// The thread cannot be created.
    pub(crate) fn start(
        shared: Arc<EngineShared>,
        builds: TenantBuilds,
        registry: &Registry,
    ) -> std::io::Result<Arc<Self>> {
        let work = Mutex::new(Work {
            builds,
            has_state: false,
            is_ended: false,
        });
        let all = Arc::new(Self {
            shared,
            gauges: BuildGauges::new(registry),
            work,
            woken: Condvar::new(),
        });
        let own = all.clone();
        std::thread::Builder::new()
            .name("gateway-tables".into())
            .spawn(move || own.run())?;
        Ok(all)
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn close_tenants(&self, closed: BTreeSet<TenantName>) {
        self.lock().builds.close_tenants(closed);
    }

    /// Applies a change. Tables that are not built at once are built by the thread.
    pub(crate) fn apply(
        &self,
        upserts: &[Arc<Resource>],
        removals: &[(ResourceKind, String)],
        generation: Generation,
    ) {
        let has_tenants = upserts
            .iter()
            .any(|resource| resource.kind() == ResourceKind::Tenant)
            || removals
                .iter()
                .any(|(kind, _)| *kind == ResourceKind::Tenant);
        self.take(has_tenants, |builds, bytes_max| {
            builds.apply(upserts, removals, generation, bytes_max)
        });
    }

    /// Applies a whole state in place of the present one.
    pub(crate) fn replace(&self, state: &[Arc<Resource>], generation: Generation) {
        self.take(true, |builds, bytes_max| {
            builds.replace(state, generation, bytes_max)
        });
    }

    /// Applies a whole state, however long that takes.
    pub(crate) fn load(&self, state: &[Arc<Resource>], generation: Generation) {
        self.take(true, |builds, _| {
            builds.replace(state, generation, usize::MAX)
        });
    }

    fn take(
        &self,
        has_tenants: bool,
        change: impl FnOnce(&mut TenantBuilds, usize) -> Arc<Snapshot>,
    ) {
        let mut work = self.lock();
        let bytes_max = if work.has_state {
            IMMEDIATE_BYTES_MAX
        } else {
            FIRST_BYTES_MAX
        };
        let snapshot = change(&mut work.builds, bytes_max);
        work.has_state = true;
        self.publish(snapshot, &work.builds, has_tenants);
        self.woken.notify_all();
    }

    /// Returns the tenants whose newest changes are not in force yet.
    pub(crate) fn waiting(&self) -> Vec<TenantName> {
        self.lock().builds.waiting().cloned().collect()
    }

    /// Ends the thread. What waits is not built.
    pub(crate) fn end(&self) {
        self.lock().is_ended = true;
        self.woken.notify_all();
    }

    fn run(&self) {
        while let Some(step) = self.next_step() {
            let tenant = step.tenant().clone();
            self.finish(step.run(), &tenant);
        }
    }

    /// Waits for a step. Returns `None` at the end of the engine.
    fn next_step(&self) -> Option<BuildStep> {
        let mut work = self.lock();
        loop {
            if work.is_ended {
                return None;
            }
            if let Some(step) = work.builds.next_step() {
                return Some(step);
            }
            let (still_locked, waited) = self
                .woken
                .wait_timeout(work, COLLECT_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner);
            work = still_locked;
            if waited.timed_out() {
                // A change must not wait for the collection.
                drop(work);
                canal_allocator::collect();
                work = self.lock();
            }
        }
    }

    fn finish(&self, step: FinishedStep, tenant: &TenantName) {
        let is_of_change = step.is_of_change();
        let mut work = self.lock();
        // A configuration that triggers a bug must stop neither the thread nor other tenants. The step
        // has caught a panic of its own.
        let snapshot = catch_unwind(AssertUnwindSafe(|| work.builds.finish(step)))
            .unwrap_or_else(|_| Some(work.builds.fail(tenant)));
        if let Some(snapshot) = snapshot {
            if is_of_change {
                tracing::info!(%tenant, "gateway: the tenant's tables are built and in force");
            }
            // A hash table changes no tenant.
            self.publish(snapshot, &work.builds, is_of_change);
        }
    }

    /// Publishes a snapshot. The caller holds the lock, so snapshots are published in the order in
    /// which they were built.
    fn publish(&self, snapshot: Arc<Snapshot>, builds: &TenantBuilds, has_tenants: bool) {
        let counts = snapshot
            .tenants()
            .map(|t| t.counts())
            .fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        let set = |gauge: &SharedGauge, n: usize| gauge.set(i64::try_from(n).unwrap_or(i64::MAX));
        self.gauges
            .generation
            .set(i64::try_from(snapshot.generation.0).unwrap_or(i64::MAX));
        set(&self.gauges.services, counts.0);
        set(&self.gauges.workloads, counts.1);
        set(&self.gauges.faults, builds.route_faults());
        set(&self.gauges.waiting, builds.waiting().count());
        // The shares are set before the snapshot is published, so that a new tenant's first
        // connections are counted against its own shares.
        if has_tenants {
            self.shared
                .limits
                .set_shares(&snapshot, &self.shared.registry);
        }
        self.shared.publisher.publish(snapshot);
    }
}

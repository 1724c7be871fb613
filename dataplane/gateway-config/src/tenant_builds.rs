//! Applies changes tenant by tenant: a change whose tables are quickly built is in the next
//! snapshot. One that takes longer waits and is built in steps, while the changes of other tenants
//! continue. It has no thread and no clock of its own.
//!
//! A tenant's changes of its traffic stay in order: as long as one of them waits, so do all later
//! ones, and the tenant is routed as before the first. Each is published whole. Hash tables of load
//! balancers hold up no change: an endpoint set gets its table in a step of its own. Security resources
//! of a tenant that is served never wait; a tenant that is not served yet appears with its security
//! resources or not at all. Start with [`TenantBuilds::apply`] and [`TenantBuilds::next_step`].

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use canal_model::ids::{Generation, TenantName};
use canal_model::program::{Resource, ResourceKind};

use crate::Snapshot;
use crate::build::{CompileJob, FinishedHashTable, HashTableJob, SnapshotBuilder};
use crate::routes::CompiledRoutes;
use crate::turns::BuildTurns;

/// Bytes of tables that one change of the configuration may compile at once, for all tenants
/// together; the rest is compiled in steps. One step may exceed it by the tables of one service.
/// The thread compiles them before it takes the next change, so the limit bounds how long another
/// tenant's change waits. Nobody measured which value is best.
pub const IMMEDIATE_BYTES_MAX: usize = 8 << 20;

/// Bytes of [`IMMEDIATE_BYTES_MAX`] that stand for one entry of a hash table, which takes much
/// longer to build than its size suggests: a change may build 131,072 entries at once.
const BYTES_OF_HASH_ENTRY: usize = 64;

/// Resources of a change that have one owner.
#[derive(Debug, Default)]
struct TenantChange {
    upserts: Vec<Arc<Resource>>,
    removals: Vec<(ResourceKind, String)>,
}

impl TenantChange {
    fn add(&mut self, other: TenantChange) {
        self.upserts.extend(other.upserts);
        self.removals.extend(other.removals);
    }

    /// Splits off the security resources.
    fn split_security(self) -> (TenantChange, TenantChange) {
        let (security, traffic) = self
            .upserts
            .into_iter()
            .partition(|resource| resource.kind().is_security());
        let (no_security, no_traffic) = self
            .removals
            .into_iter()
            .partition(|(kind, _)| kind.is_security());
        (
            TenantChange {
                upserts: security,
                removals: no_security,
            },
            TenantChange {
                upserts: traffic,
                removals: no_traffic,
            },
        )
    }

    /// Adds later changes, which replace those of the same names.
    fn add_later(&mut self, later: LaterChanges) {
        self.upserts
            .retain(|resource| !later.contains_key(&(resource.kind(), resource.name())));
        self.removals.retain(|removal| !later.contains_key(removal));
        self.add(of_later(later));
    }

    /// Adds the security resources of later changes, and returns what is left of the later changes.
    fn take_security(&mut self, mut later: LaterChanges) -> LaterChanges {
        let traffic = later
            .extract_if(.., |(kind, _), _| !kind.is_security())
            .collect();
        self.add_later(later);
        traffic
    }
}

/// Changes that arrived while an earlier one of the same tenant waits: the newest of each resource,
/// or its removal.
type LaterChanges = BTreeMap<(ResourceKind, String), Option<Arc<Resource>>>;

/// A change whose tables are being compiled.
struct TenantBuild {
    /// Generation of the change. All responses of one batch have the same.
    generation: Generation,
    /// Number of the build in this process; a step of a build that was dropped is recognized by it.
    number: u64,
    change: TenantChange,
    jobs: Vec<CompileJob>,
    compiled: Vec<CompiledRoutes>,
}

/// One tenant whose newest changes are not in force yet.
struct WaitingTenant {
    build: TenantBuild,
    /// Later changes in the same batch. They are published together with the build.
    rest: LaterChanges,
    /// Changes in later batches.
    later: LaterChanges,
    later_generation: Generation,
}

/// A step of a build. It is run without access to [`TenantBuilds`], which stays usable meanwhile.
pub struct BuildStep {
    tenant: TenantName,
    work: StepWork,
}

/// What a step does.
enum StepWork {
    /// Compiles the routes of one service, for the build with this number.
    Routes {
        number: u64,
        job: Option<CompileJob>,
    },
    /// Builds the hash table of one endpoint set.
    HashTable(HashTableJob),
}

impl BuildStep {
    /// Returns the tenant whose tables are built.
    pub fn tenant(&self) -> &TenantName {
        &self.tenant
    }

    /// Compiles the routes of one service, or builds a hash table. A panic ends only the tenant's
    /// build: its configuration must not stop the builds of others.
    pub fn run(self) -> FinishedStep {
        let work = catch_panic(|| match self.work {
            StepWork::Routes { number, job } => FinishedWork::Routes {
                number,
                compiled: job.map(CompileJob::run),
            },
            StepWork::HashTable(job) => FinishedWork::HashTable(job.run()),
        });
        FinishedStep {
            tenant: self.tenant,
            work: work.unwrap_or(FinishedWork::Panicked),
        }
    }
}

/// Runs a part of a tenant's build that has no access to what others use. Returns `None` if it
/// panics.
fn catch_panic<T>(build: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(build)).ok()
}

/// Result of a step, for [`TenantBuilds::finish`].
pub struct FinishedStep {
    tenant: TenantName,
    work: FinishedWork,
}

/// What a step has made.
enum FinishedWork {
    Routes {
        number: u64,
        compiled: Option<CompiledRoutes>,
    },
    HashTable(FinishedHashTable),
    /// Nothing: it panicked.
    Panicked,
}

impl FinishedStep {
    /// Returns whether the step belongs to a change that waits for its tables. A hash table does
    /// not: what came with it is in force already.
    pub fn is_of_change(&self) -> bool {
        matches!(self.work, FinishedWork::Routes { .. })
    }
}

/// The builder of snapshots, and what waits for it.
pub struct TenantBuilds {
    builder: SnapshotBuilder,
    waiting: BTreeMap<TenantName, WaitingTenant>,
    turns: BuildTurns,
    generation: Generation,
    /// Tenants that the caller closed.
    closed: BTreeSet<TenantName>,
    /// Tenants that the caller opened, and that stay closed until nothing of them waits.
    closed_until_built: BTreeSet<TenantName>,
    /// Tenants whose tables could not be built or put in force because of a fault in this program.
    /// They are closed until a whole state arrives.
    failed: BTreeSet<TenantName>,
    last_number: u64,
    /// True if the last step built a hash table. Then the next one compiles routes, if some wait.
    last_was_hash_table: bool,
}

impl TenantBuilds {
    pub fn new(builder: SnapshotBuilder) -> Self {
        Self {
            builder,
            waiting: BTreeMap::new(),
            turns: BuildTurns::default(),
            generation: Generation::default(),
            closed: BTreeSet::new(),
            closed_until_built: BTreeSet::new(),
            failed: BTreeSet::new(),
            last_number: 0,
            last_was_hash_table: false,
        }
    }

    /// Sets the tenants of which nothing is served from the next snapshot on. A tenant that is
    /// closed now and no longer in the list is opened when nothing of it waits: a new tenant must
    /// not be served without its routes.
    pub fn close_tenants(&mut self, closed: BTreeSet<TenantName>) {
        self.closed_until_built
            .extend(self.closed.difference(&closed).cloned());
        self.closed = closed;
    }

    /// Applies a change and returns the next snapshot. Of tenants without waiting changes, it
    /// contains those changes whose tables need no compilation or fit into `bytes_max`. Tenants
    /// with the fewest regexes come first. It also contains security resources of all tenants that
    /// are served. Everything else waits for [`TenantBuilds::next_step`].
    pub fn apply(
        &mut self,
        upserts: &[Arc<Resource>],
        removals: &[(ResourceKind, String)],
        generation: Generation,
        bytes_max: usize,
    ) -> Arc<Snapshot> {
        self.generation = generation;
        self.builder
            .limit_hash_entries(bytes_max / BYTES_OF_HASH_ENTRY);
        let (mut now, by_tenant) = split(upserts, removals);
        let mut builds = Vec::new();
        for (tenant, change) in by_tenant {
            // A change of a tenant must not overtake that tenant's earlier changes.
            match self.waiting.contains_key(&tenant) {
                true => now.add(self.add_later(&tenant, change)),
                false => builds.push((
                    self.builder.compile_jobs(&change.upserts, &change.removals),
                    tenant,
                    change,
                )),
            }
        }
        // The cheapest come first, so that one large change delays the fewest tenants.
        builds.sort_by_key(|(jobs, ..)| {
            (
                jobs.iter().map(CompileJob::regexes).sum::<usize>(),
                jobs.len(),
            )
        });
        let (mut ready, mut spent) = (Vec::new(), 0);
        for (mut jobs, tenant, change) in builds {
            // What is compiled of a tenant that does not fit is kept for its later build.
            let (mut compiled, mut has_panicked) = (Vec::new(), false);
            // The cost of a job is known only after it ran, so the last one may exceed the limit.
            while spent < bytes_max
                && !has_panicked
                && let Some(job) = jobs.pop()
            {
                // A panic concerns this tenant only; the builds of other tenants go on.
                match catch_panic(|| job.run()) {
                    Some(routes) => {
                        spent += routes.cost_bytes();
                        compiled.push(routes);
                    }
                    None => has_panicked = true,
                }
            }
            if has_panicked {
                self.mark_failed(&tenant);
            } else if jobs.is_empty() {
                now.add(change);
                ready.extend(compiled);
            } else {
                tracing::info!(%tenant, services = jobs.len(), "gateway: building the tenant's tables in steps; the previous tables serve it meanwhile");
                now.add(self.wait(tenant, change, generation, (jobs, compiled)));
            }
        }
        // A change may have removed the last table for which a closed tenant waited.
        self.open_built();
        self.publish(&now, ready)
    }

    /// Applies a whole state; resources that it does not contain are removed. What waits is
    /// dropped, because the state is newer.
    pub fn replace(
        &mut self,
        state: &[Arc<Resource>],
        generation: Generation,
        bytes_max: usize,
    ) -> Arc<Snapshot> {
        for (tenant, _) in std::mem::take(&mut self.waiting) {
            self.turns.end(&tenant);
        }
        self.failed.clear();
        self.builder.release(|_| true);
        let gone = self.builder.names_beside(state);
        self.apply(state, &gone, generation, bytes_max)
    }

    /// Returns the next step to run, if something waits. One step runs at a time;
    /// [`TenantBuilds::finish`] takes its result.
    pub fn next_step(&mut self) -> Option<BuildStep> {
        let first = if self.last_was_hash_table {
            self.next_routes()
        } else {
            self.next_hash_table()
        };
        let step = first
            .or_else(|| self.next_routes())
            .or_else(|| self.next_hash_table())?;
        self.last_was_hash_table = matches!(step.work, StepWork::HashTable(_));
        Some(step)
    }

    fn next_routes(&mut self) -> Option<BuildStep> {
        let tenant = self.turns.next()?.clone();
        self.turns.step(&tenant);
        let build = &mut self.waiting.get_mut(&tenant)?.build;
        let work = StepWork::Routes {
            number: build.number,
            job: build.jobs.pop(),
        };
        Some(BuildStep { tenant, work })
    }

    fn next_hash_table(&mut self) -> Option<BuildStep> {
        let job = self.builder.next_hash_table()?;
        Some(BuildStep {
            tenant: job.tenant().clone(),
            work: StepWork::HashTable(job),
        })
    }

    /// Takes the result of a step. Returns the next snapshot if a tenant's tables are complete with
    /// it.
    pub fn finish(&mut self, step: FinishedStep) -> Option<Arc<Snapshot>> {
        let FinishedStep { tenant, work } = step;
        self.builder
            .limit_hash_entries(IMMEDIATE_BYTES_MAX / BYTES_OF_HASH_ENTRY);
        match work {
            FinishedWork::Routes { number, compiled } => {
                self.finish_routes(tenant, number, compiled)
            }
            FinishedWork::HashTable(built) => {
                self.builder.put_hash_table(built);
                Some(self.publish(&TenantChange::default(), Vec::new()))
            }
            FinishedWork::Panicked => Some(self.fail(&tenant)),
        }
    }

    fn finish_routes(
        &mut self,
        tenant: TenantName,
        number: u64,
        compiled: Option<CompiledRoutes>,
    ) -> Option<Arc<Snapshot>> {
        // While the step ran, a whole state may have dropped or replaced its build.
        let waiting = self
            .waiting
            .get_mut(&tenant)
            .filter(|waiting| waiting.build.number == number)?;
        let build = &mut waiting.build;
        build.compiled.extend(compiled);
        // Further steps run the other jobs; the change is applied once all are done.
        if !build.jobs.is_empty() {
            return None;
        }
        // Later parts of the batch may replace rules that are compiled already.
        if !waiting.rest.is_empty() {
            build.change.add_later(std::mem::take(&mut waiting.rest));
            let jobs = self
                .builder
                .compile_jobs(&build.change.upserts, &build.change.removals);
            build.jobs = jobs
                .into_iter()
                .filter(|job| {
                    !build
                        .compiled
                        .iter()
                        .any(|compiled| job.is_done_by(compiled))
                })
                .collect();
            // Routes of a service that is compiled again are outdated.
            build.compiled.retain(|compiled| {
                !build
                    .jobs
                    .iter()
                    .any(|job| *job.service() == compiled.service)
            });
            if !build.jobs.is_empty() {
                self.turns.extend(&tenant, build.jobs.len() as u64);
                return None;
            }
        }
        self.turns.end(&tenant);
        let WaitingTenant {
            mut build,
            later,
            later_generation,
            ..
        } = self.waiting.remove(&tenant)?;
        // Security resources of later batches do not wait for the tables of those batches.
        let later = build.change.take_security(later);
        // The tenant has left `waiting`, but with later changes it must stay closed.
        if later.is_empty() {
            self.open_built();
        }
        // The routes without which these services were withheld are complete now.
        self.builder.release(|service| service.tenant == tenant);
        let snapshot = self.publish(&build.change, build.compiled);
        if !later.is_empty() {
            // After the publication, because the jobs build on the rules that are in use.
            let change = of_later(later);
            let jobs = self.builder.compile_jobs(&change.upserts, &change.removals);
            self.wait(tenant, change, later_generation, (jobs, Vec::new()));
        }
        Some(snapshot)
    }

    /// Discards a tenant's waiting changes because a step or [`TenantBuilds::finish`] panicked. It
    /// closes the tenant until [`TenantBuilds::replace`], because changes that the gateway
    /// acknowledged may not be in force.
    pub fn fail(&mut self, tenant: &TenantName) -> Arc<Snapshot> {
        self.turns.end(tenant);
        self.waiting.remove(tenant);
        self.mark_failed(tenant);
        self.publish(&TenantChange::default(), Vec::new())
    }

    /// Lets the next snapshot close a tenant until a whole state arrives, which is at the start of
    /// the process.
    fn mark_failed(&mut self, tenant: &TenantName) {
        tracing::error!(%tenant, "gateway: building the tenant's tables panicked; nothing of the tenant is served until the gateway restarts");
        self.failed.insert(tenant.clone());
    }

    /// Returns the tenants whose newest changes are not in force yet.
    pub fn waiting(&self) -> impl Iterator<Item = &TenantName> {
        self.waiting.keys()
    }

    /// Returns the number of broken route matches of all services.
    pub fn route_faults(&self) -> usize {
        self.builder.route_faults()
    }

    /// Lets a tenant's change wait, and returns the part of it that does not wait. Services that
    /// came with the change are withheld, because without their routes they would be reachable in
    /// an unintended way.
    fn wait(
        &mut self,
        tenant: TenantName,
        change: TenantChange,
        generation: Generation,
        (jobs, compiled): (Vec<CompileJob>, Vec<CompiledRoutes>),
    ) -> TenantChange {
        let (now, change) = self.split_waiting(&tenant, change);
        for service in jobs
            .iter()
            .map(CompileJob::service)
            .chain(compiled.iter().map(|routes| &routes.service))
        {
            self.builder.withhold_new(service, generation);
        }
        self.last_number += 1;
        // A change without jobs takes one step as well: its publication.
        self.turns.add(tenant.clone(), jobs.len().max(1) as u64);
        let build = TenantBuild {
            generation,
            number: self.last_number,
            change,
            jobs,
            compiled,
        };
        let (rest, later) = (LaterChanges::new(), LaterChanges::new());
        self.waiting.insert(
            tenant,
            WaitingTenant {
                build,
                rest,
                later,
                later_generation: generation,
            },
        );
        now
    }

    /// Lets a change wait behind an earlier one of its tenant, and returns the part of it that does
    /// not wait.
    fn add_later(&mut self, tenant: &TenantName, change: TenantChange) -> TenantChange {
        let (now, change) = self.split_waiting(tenant, change);
        if let Some(waiting) = self.waiting.get_mut(tenant) {
            let list = if waiting.build.generation == self.generation {
                &mut waiting.rest
            } else {
                waiting.later_generation = self.generation;
                &mut waiting.later
            };
            list.extend(change.removals.into_iter().map(|removal| (removal, None)));
            list.extend(
                change
                    .upserts
                    .into_iter()
                    .map(|resource| ((resource.kind(), resource.name()), Some(resource))),
            );
        }
        now
    }

    /// Splits a change into the part that takes effect at once and the part that waits. Of a tenant
    /// that is not served yet all waits, because its security resources alone would let it be
    /// served without its routes.
    fn split_waiting(
        &self,
        tenant: &TenantName,
        change: TenantChange,
    ) -> (TenantChange, TenantChange) {
        match self.builder.is_served(tenant) {
            true => change.split_security(),
            false => (TenantChange::default(), change),
        }
    }

    /// Lets the tenants open that were to stay closed until nothing of them waits.
    fn open_built(&mut self) {
        let waiting = &self.waiting;
        self.closed_until_built
            .retain(|tenant| waiting.contains_key(tenant));
    }

    fn publish(&mut self, change: &TenantChange, compiled: Vec<CompiledRoutes>) -> Arc<Snapshot> {
        let closed = self
            .closed
            .iter()
            .chain(&self.closed_until_built)
            .chain(&self.failed);
        self.builder.close_tenants(closed.cloned().collect());
        self.builder
            .apply_compiled(&change.upserts, &change.removals, compiled, self.generation)
    }
}

/// Splits a change into the part that is applied at once and the parts of the tenants. The
/// provider's resources are applied at once. So are Gateways: their addresses may have been another
/// tenant's, and an address leads nowhere without its tenant.
fn split(
    upserts: &[Arc<Resource>],
    removals: &[(ResourceKind, String)],
) -> (TenantChange, BTreeMap<TenantName, TenantChange>) {
    let (mut now, mut by_tenant) = (
        TenantChange::default(),
        BTreeMap::<TenantName, TenantChange>::new(),
    );
    for resource in upserts {
        let part = match resource
            .tenant()
            .filter(|_| resource.kind() != ResourceKind::GatewayReplica)
        {
            Some(tenant) => by_tenant.entry(tenant.clone()).or_default(),
            None => &mut now,
        };
        part.upserts.push(resource.clone());
    }
    for (kind, name) in removals {
        let part = match kind
            .owner_of(name)
            .filter(|_| *kind != ResourceKind::GatewayReplica)
        {
            Some(tenant) => by_tenant.entry(tenant).or_default(),
            None => &mut now,
        };
        part.removals.push((*kind, name.clone()));
    }
    (now, by_tenant)
}

fn of_later(later: LaterChanges) -> TenantChange {
    let mut change = TenantChange::default();
    for (name, resource) in later {
        match resource {
            Some(resource) => change.upserts.push(resource),
            None => change.removals.push(name),
        }
    }
    change
}

#[cfg(test)]
mod tests;

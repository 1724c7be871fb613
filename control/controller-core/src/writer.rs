//! The catalog writer: every change of the published state goes through its one thread, one after
//! the other. It checks tenants against each other, writes the store, and only then publishes. It
//! reads, compiles and compares nothing: `prepare` does that beforehand on other threads.
//! Revocations and changes of the cloud tier go ahead of all waiting changes. Readers never wait
//! for the writer. Start at [`CatalogWriter::run`].

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use canal_access::shares::TenantAmounts;
use canal_access::{TenantLimits, now_seconds};
use canal_catalog::{
    Catalog, CompiledTenant, PolicyOrigin, TenantCatalog, TenantPlacement, WithheldChange,
    is_of_controller, is_planned,
};
use canal_compiler::claims::TenantClaims;
use canal_compiler::resource_budget::CompiledSize;
use canal_controller_metrics::{self as metrics, ControllerMetrics};
use canal_fleet::{TierState, TierUpdate};
use canal_model::identity::{components, gateway_identity};
use canal_model::ids::{Generation, ReplicaName, ServiceId, ServiceKey, TenantName};
use canal_model::policy::Object;
use canal_model::program::{Resource, ResourceKind};
use canal_model::share::Shares;
use canal_model::trust::{Entitlement, KeyLocation, KeyRequester};
use canal_policy_sources::applied::AppliedObjects;
use canal_policy_sources::{
    Basis, Commit, Committed, Objection, PolicySource, Prepared, Preparer, SourceState,
    SourceUpdate, TenantSources, ValidatedTenant, WithheldReason, WriteEdits, clashes,
};
use canal_sources::parse;
use canal_store::{DomainName, Store, StoreError};
use canal_trust::{NewRootError, TrustAuthorities, key_policy};
use tokio::sync::{mpsc, watch};

/// Maximum number of entries in each queue of the writer.
/// As many changes may wait or be prepared at once (`QUEUED_CHANGES_MAX`), so that commits fit.
pub(crate) const QUEUE_MAX: usize = 256;

/// Time within which a tenant is compiled when the controller starts. After it the controller serves
/// the others, and compiles the tenant again.
/// A tenant within the default shares takes a few seconds without optimization. Nobody measured this
/// value.
const FIRST_COMPILE_TIMEOUT: Duration = Duration::from_secs(60);

/// A command to the writer, besides changes of tenants and of the cloud tier. Commands go ahead of
/// all of those.
pub(crate) enum WriterCommand {
    /// Retries the changes of trust that the store refused.
    Retry,
    /// Publishes the trust of tenants, which may have changed.
    Trust,
}

/// The queues that the writer serves, the most urgent first.
pub(crate) struct WriterQueues {
    pub(crate) commands: mpsc::Receiver<WriterCommand>,
    /// States of the cloud tier to publish.
    pub(crate) tiers: mpsc::Receiver<TierUpdate>,
    /// Tenants' changes that are prepared and wait for the writer.
    pub(crate) commits: mpsc::Receiver<Commit>,
}

/// Channels of the writer: to readers, to the threads that prepare changes, and for the tenants'
/// trust.
pub(crate) struct CatalogPublisher {
    pub(crate) publish: watch::Sender<Arc<Catalog>>,
    pub(crate) basis: watch::Sender<Arc<Basis>>,
    pub(crate) trust: Arc<TrustAuthorities>,
}

/// The next thing that the writer does.
enum WriterWork {
    Command(WriterCommand),
    Tier(TierUpdate),
    // Boxed, because it is far larger than the others.
    Commit(Box<Commit>),
}

impl WriterQueues {
    /// Returns the most urgent work; `None` once all senders are gone.
    async fn next(&mut self) -> Option<WriterWork> {
        tokio::select! {
            biased;
            Some(command) = self.commands.recv() => Some(WriterWork::Command(command)),
            Some(tier) = self.tiers.recv() => Some(WriterWork::Tier(tier)),
            Some(commit) = self.commits.recv() => Some(WriterWork::Commit(Box::new(commit))),
            else => None,
        }
    }
}

/// State of the catalog writer's thread.
pub(crate) struct CatalogWriter {
    store: Arc<Store>,
    metrics: Arc<ControllerMetrics>,
    limits: Arc<TenantLimits>,
    publish: watch::Sender<Arc<Catalog>>,
    basis: watch::Sender<Arc<Basis>>,
    trust: Arc<TrustAuthorities>,
    /// True if some tenant's current trust is not published, because the store refused.
    is_trust_behind: bool,
    catalog: Catalog,
    tenants: BTreeMap<TenantName, Arc<TenantSources>>,
    /// Tenants in the order in which the controller first saw them.
    order: Vec<TenantName>,
    /// Tenants whose newest state is not in force because it conflicts with another tenant's
    /// claims, or exceeds a limit.
    withheld: BTreeSet<TenantName>,
    /// Tenants whose newest state is not in force because the store refused.
    behind: BTreeSet<TenantName>,
    /// Services of each tenant that have IDs.
    services: BTreeMap<TenantName, BTreeSet<ServiceKey>>,
    /// State of the cloud tier that was last published.
    tier: TierState,
}

impl CatalogWriter {
    /// Loads the store and the first reading of the files, compiles all tenants on so many threads,
    /// and publishes the result.
    pub(crate) fn start(
        preparer: &Arc<Preparer>,
        CatalogPublisher {
            publish,
            basis,
            trust,
        }: CatalogPublisher,
        files: SourceUpdate,
        key_sets: Vec<(TenantName, String, String)>,
        workers: usize,
    ) -> Result<Self, StoreError> {
        let store = preparer.store.clone();
        let catalog = Catalog {
            generation: store.generation(),
            ..Catalog::default()
        };
        let mut writer = Self {
            order: store.tenants()?,
            store,
            metrics: preparer.metrics.clone(),
            limits: preparer.limits.clone(),
            publish,
            basis,
            trust,
            is_trust_behind: false,
            catalog,
            tenants: BTreeMap::new(),
            withheld: BTreeSet::new(),
            behind: BTreeSet::new(),
            services: BTreeMap::new(),
            tier: TierState::default(),
        };
        let mut tenants = writer.read_store(&files)?;
        for name in &writer.order {
            // Until the tenant's files are read, its data planes must keep what they hold.
            if writer.store.has_files(name)? {
                sources_mut(&mut tenants, name).expect(PolicyOrigin::Files);
            }
        }
        let mut all = writer.order.clone();
        for (name, state) in files.tenants {
            sources_mut(&mut tenants, &name).take_state(state);
        }
        for (name, uri, set) in key_sets {
            // A tenant that is gone has no sources; the fetcher deletes its key sets at its first
            // check.
            if let Some(sources) = tenants.get_mut(&name) {
                sources.load_key_set(uri, set);
            }
        }
        // New tenants come after those of the store, whose claims are older.
        all.extend(
            tenants
                .keys()
                .filter(|name| !writer.order.contains(name))
                .cloned(),
        );
        let all = all.iter().filter_map(|name| tenants.remove(name)).collect();
        writer.begin(preparer.first_sources(all, workers, FIRST_COMPILE_TIMEOUT))?;
        Ok(writer)
    }

    /// Loads the stored objects of each tenant. A tenant that has more than its share is set aside
    /// without being loaded, and costs the others nothing.
    fn read_store(
        &self,
        files: &SourceUpdate,
    ) -> Result<BTreeMap<TenantName, TenantSources>, StoreError> {
        let mut bytes: BTreeMap<TenantName, u64> = BTreeMap::new();
        let mut shares: BTreeMap<TenantName, Shares> = BTreeMap::new();
        // The first pass only counts bytes and reads the shares, so that nothing too large is
        // loaded.
        self.store.for_each_object(|object| {
            *bytes.entry(object.key.tenant.clone()).or_default() += object.yaml.len() as u64;
            if object.key.kind == "Tenant" {
                let parsed = parse("api", &object.yaml).documents.into_iter().next();
                shares.extend(parsed.and_then(|document| {
                    Some((object.key.tenant, written_shares(&document.object)?))
                }));
            }
        })?;
        let contents = files
            .tenants
            .iter()
            .filter_map(|(name, state)| match state {
                SourceState::Read(content) => Some((name, content)),
                SourceState::Gone { .. } => None,
            });
        // Files come second, because their objects take precedence over applied ones.
        for (name, content) in contents {
            shares.extend(
                content
                    .documents()
                    .find_map(|d| Some((name.clone(), written_shares(&d.object)?))),
            );
        }
        self.limits.set_shares(shares.iter());
        let mut tenants = BTreeMap::new();
        for (name, bytes) in &bytes {
            // Setting it aside keeps the tenant's data planes as they are, and its operator can
            // still delete it.
            if let Err(mut excess) = self.limits.configuration.set(name, *bytes) {
                excess.fix = format!(
                    "have the provider set the share higher and restart, or run `canal delete --tenant {name} --all`"
                );
                self.metrics
                    .count(metrics::WITHHELD, &[("reason", "configuration_bytes")]);
                tracing::error!(tenant = %name, finding = %excess, "controller: the tenant's applied objects exceed its share and are not compiled");
                sources_mut(&mut tenants, name).set_applied(AppliedObjects::set_aside(*excess));
            }
        }
        let mut moves = Vec::new();
        self.store.for_each_object(|object| {
            let sources = sources_mut(&mut tenants, &object.key.tenant);
            if sources.applied().is_read() {
                moves.extend(sources.applied_mut().load(object));
            }
        })?;
        // A store of an earlier release may have kinds by their old names. Later edits name the
        // rows by the new ones.
        self.store.move_objects(&moves)?;
        if !moves.is_empty() {
            tracing::info!(
                objects = moves.len(),
                "moved stored objects to the new names of their kinds"
            );
        }
        Ok(tenants)
    }

    /// Publishes those of all tenants that may go live in one generation. The first of them have
    /// precedence, so that none can be published before all of them are compiled.
    fn begin(&mut self, all: Vec<Prepared>) -> Result<(), StoreError> {
        let mut staged = BTreeMap::new();
        let mut next = Vec::new();
        for prepared in all {
            let name = prepared.name.clone();
            if let Some(compiled) = self.settle_sources(prepared, &staged)? {
                staged.insert(name.clone(), compiled.claims.clone());
                next.push((name, compiled));
            }
        }
        if !next.is_empty() {
            let generation = self.store.next_generation()?;
            self.publish_all(next, generation);
        }
        self.publish_basis();
        Ok(())
    }

    /// Serves until all senders are gone. Commands and the cloud tier go ahead of commits.
    pub(crate) fn run(mut self, mut queues: WriterQueues) -> io::Result<()> {
        // The runtime only waits for the queues; it has no other task.
        let waiting = tokio::runtime::Builder::new_current_thread().build()?;
        while let Some(work) = waiting.block_on(queues.next()) {
            match work {
                WriterWork::Command(WriterCommand::Retry) if !self.is_trust_behind => {}
                WriterWork::Command(WriterCommand::Retry | WriterCommand::Trust) => {
                    self.apply_trust_change()
                }
                WriterWork::Tier(TierUpdate { tier, reply }) => {
                    // The reconciler may have ended with the controller.
                    let _ = reply.send(self.apply_tier_state(tier));
                }
                WriterWork::Commit(commit) => {
                    let Commit { prepared, reply } = *commit;
                    let done = self.commit(prepared);
                    if let Err(e) = &done {
                        self.metrics
                            .count(metrics::STORE_ERRORS, &[("reason", e.name())]);
                    }
                    self.publish_basis();
                    // The requester may be gone; the commit stays in force.
                    let _ = reply.send(done);
                }
            }
        }
        Ok(())
    }

    /// Publishes the state against which changes are prepared.
    fn publish_basis(&self) {
        let unsettled = self.behind.union(&self.withheld).cloned().collect();
        let catalog = Arc::new(self.catalog.clone());
        let basis = Basis {
            catalog,
            tenants: self.tenants.clone(),
            order: self.order.clone(),
            unsettled,
        };
        self.basis.send_replace(Arc::new(basis));
    }

    /// Publishes the state of the cloud tier in one generation.
    fn apply_tier_state(&mut self, tier: TierState) -> Result<Generation, StoreError> {
        let generation = self.store.next_generation()?;
        let none = TenantPlacement::default();
        for (name, view) in &mut self.catalog.tenants {
            let planned = tier.tenants.get(name).unwrap_or(&none);
            if let Some(next) = view.with_tier(planned, self.tier.tenants.get(name), generation) {
                *view = Arc::new(next);
            }
        }
        let before = self.catalog.provider.as_deref();
        // The controller's own resources stay as they were; `publish_now` updates them.
        let own = before
            .into_iter()
            .flat_map(|b| b.of_controller())
            .map(|e| e.resource.as_ref().clone());
        let provider =
            CompiledTenant::of_provider(tier.provider.iter().cloned().chain(own).collect());
        self.catalog.provider = Some(Arc::new(TenantCatalog::next(before, provider, generation)));
        self.catalog.placement = tier.placement.clone();
        self.tier = tier;
        self.publish_now(generation);
        Ok(generation)
    }

    /// Publishes what changed in the tenants' trust, if anything did.
    fn apply_trust_change(&mut self) {
        let generation = match self.store.next_generation() {
            Ok(generation) => generation,
            Err(e) => {
                self.metrics
                    .count(metrics::STORE_ERRORS, &[("reason", e.name())]);
                self.is_trust_behind = true;
                return;
            }
        };
        if self.publish_trust(generation) {
            self.catalog.generation = generation;
            self.publish.send_replace(Arc::new(self.catalog.clone()));
        }
    }

    /// Puts the controller's own resources into every state: a tenant's trust into the tenant's,
    /// and that of Canal's components into the provider's. Returns false if nothing differs.
    fn publish_trust(&mut self, generation: Generation) -> bool {
        let names: Vec<DomainName> = self
            .catalog
            .tenants
            .iter()
            .filter_map(|(name, view)| domain_of(name, view))
            .collect();
        // A root that is not on disk must not be published; certificates of its tenant wait for it
        // too.
        self.is_trust_behind = self
            .trust
            .ensure(names.iter())
            .inspect_err(|e| {
                if let NewRootError::Store(e) = e {
                    self.metrics
                        .count(metrics::STORE_ERRORS, &[("reason", e.name())]);
                }
                tracing::error!(error = %e, "controller: a trust domain has no new root; retrying");
            })
            .is_err();
        let trust = trust_resources(&self.catalog, &self.trust);
        let own: Vec<Resource> = self
            .trust
            .bundle(&components())
            .map(Resource::Bundle)
            .into_iter()
            .collect();
        // At the first publication the provider has no state yet.
        let provider = self.catalog.provider.take().unwrap_or_else(|| {
            let nothing = CompiledTenant::of_provider(Vec::new());
            Arc::new(TenantCatalog::next(None, nothing, generation))
        });
        let next = provider.with_trust(&own, generation).map(Arc::new);
        let mut differs = next.is_some();
        self.catalog.provider = Some(next.unwrap_or(provider));
        for (name, view) in &mut self.catalog.tenants {
            // A tenant without a valid Tenant object has no trust domain.
            let resources = trust.get(name).map_or(&[][..], Vec::as_slice);
            if let Some(next) = view.with_trust(resources, generation) {
                *view = Arc::new(next);
                differs = true;
            }
        }
        differs
    }

    /// Publishes the catalog as this generation, with the current trust.
    fn publish_now(&mut self, generation: Generation) {
        self.publish_trust(generation);
        self.catalog.generation = generation;
        self.publish.send_replace(Arc::new(self.catalog.clone()));
    }

    /// Assigns IDs to all services of a tenant, and releases those of services that are gone.
    fn bind(
        &mut self,
        sources: &TenantSources,
        now: u64,
    ) -> Result<BTreeMap<ServiceKey, ServiceId>, StoreError> {
        let keys = sources.service_keys();
        let wanted: Vec<ServiceKey> = keys.iter().cloned().collect();
        let ids = self.store.service_ids(&wanted, now)?;
        // A service of an unread source is not gone, so it must keep its ID.
        let is_certain = sources.is_complete() && !sources.applied().has_unreadable();
        if is_certain
            && self
                .services
                .get(&sources.name)
                .is_none_or(|before| !before.is_subset(&keys))
        {
            self.store
                .release_service_ids(|key| key.tenant != sources.name || keys.contains(key), now)?;
        }
        self.services.insert(sources.name.clone(), keys);
        Ok(ids)
    }

    /// Records a new tenant in the store, and whether the tenant has files.
    fn admit(&mut self, sources: &TenantSources) -> Result<(), StoreError> {
        let has_files = sources.has(PolicyOrigin::Files);
        if !self.order.contains(&sources.name) || self.store.has_files(&sources.name)? != has_files
        {
            self.store.admit_tenant(&sources.name, has_files)?;
        }
        if !self.order.contains(&sources.name) {
            self.order.push(sources.name.clone());
        }
        Ok(())
    }

    /// Removes a tenant from the store and from the catalog.
    fn forget(&mut self, name: &TenantName) -> Result<(), StoreError> {
        self.store.forget_tenant(name)?;
        self.store
            .release_service_ids(|key| key.tenant != *name, now_seconds())?;
        let generation = self.store.next_generation()?;
        self.tenants.remove(name);
        self.order.retain(|n| n != name);
        self.withheld.remove(name);
        self.services.remove(name);
        self.give_back(name, [0; 4]);
        if self.catalog.tenants.remove(name).is_some() {
            self.publish_now(generation);
            tracing::info!(tenant = %name, %generation, "controller: removed the tenant");
        }
        Ok(())
    }

    /// Puts a change into force, if it was prepared against the sources that are still the
    /// tenant's.
    fn commit(&mut self, mut prepared: Prepared) -> Result<Committed, StoreError> {
        let holds = match (self.tenants.get(&prepared.name), &prepared.before) {
            (Some(now), Some(then)) => Arc::ptr_eq(now, then),
            (None, None) => true,
            _ => false,
        };
        if !holds {
            return Ok(Committed::Moved);
        }
        if let Some(write) = prepared.write.take() {
            return self.commit_write(prepared, &write);
        }
        let name = prepared.name.clone();
        // The change is retried until it is in force.
        self.behind.insert(name.clone());
        if let Some(compiled) = self.settle_sources(prepared, &BTreeMap::new())? {
            let generation = self.store.next_generation()?;
            self.publish_all(vec![(name.clone(), compiled)], generation);
        }
        self.behind.remove(&name);
        Ok(Committed::Done(self.catalog.generation))
    }

    /// Records a tenant's sources, and returns what to publish of them, if anything differs.
    /// `staged` are claims that go live together with them.
    fn settle_sources(
        &mut self,
        prepared: Prepared,
        staged: &BTreeMap<TenantName, TenantClaims>,
    ) -> Result<Option<CompiledTenant>, StoreError> {
        let Prepared {
            name,
            after,
            validated,
            ..
        } = prepared;
        self.tenants.insert(name.clone(), after.clone());
        if after.is_gone() {
            self.forget(&name)?;
            return Ok(None);
        }
        let ValidatedTenant {
            compiled,
            size,
            mut objections,
        } = validated?;
        self.admit(&after)?;
        self.bind(&after, now_seconds())?;
        if objections.is_empty() {
            objections.extend(
                self.take_shares(&after, size)
                    .err()
                    .map(|objection| *objection),
            );
        }
        objections.extend(self.clashes(staged, &compiled.claims));
        let compiled = self.accept_or_retain(&name, compiled, objections);
        // A withheld state whose diagnostics are published already needs no new generation.
        let is_published = self
            .catalog
            .tenants
            .get(&name)
            .is_some_and(|v| *v.diagnostics == *compiled.diagnostics);
        Ok(Some(compiled).filter(|_| !(self.withheld.contains(&name) && is_published)))
    }

    /// Returns the conflicts of claims with those that are in force or staged.
    fn clashes(
        &self,
        staged: &BTreeMap<TenantName, TenantClaims>,
        claims: &TenantClaims,
    ) -> Vec<Objection> {
        let live = |name: &TenantName| {
            staged
                .get(name)
                .or_else(|| Some(&self.catalog.tenants.get(name)?.claims))
        };
        clashes(&self.order, live, claims)
            .into_iter()
            .map(|finding| Objection::new(WithheldReason::Clash, finding))
            .collect()
    }

    /// Takes what a tenant's next state needs from its shares.
    ///
    /// # Errors
    /// A share or a whole limit does not allow it; the tenant keeps the amounts that it had.
    fn take_shares(&self, after: &TenantSources, size: CompiledSize) -> Result<(), Box<Objection>> {
        // The stored objects of such a tenant exceed its share already, and were not loaded.
        if !after.applied().is_read() {
            return Ok(());
        }
        let before = self.taken_by(&after.name);
        let [configuration, compiled, resources, route_tables] = self.tenant_amounts();
        let takes = [
            (
                WithheldReason::ConfigurationBytes,
                configuration,
                after.bytes(),
            ),
            (WithheldReason::CompiledBytes, compiled, size.bytes),
            (WithheldReason::CompiledResources, resources, size.resources),
            (
                WithheldReason::RouteTableBytes,
                route_tables,
                size.route_table_bytes,
            ),
        ];
        for (reason, limit, amount) in takes {
            if let Err(excess) = limit.set(&after.name, amount) {
                self.give_back(&after.name, before);
                return Err(Box::new(Objection::new(reason, *excess)));
            }
        }
        Ok(())
    }

    /// Returns the limits of which each tenant's state takes an amount.
    fn tenant_amounts(&self) -> [&TenantAmounts; 4] {
        [
            &self.limits.configuration,
            &self.limits.compiled,
            &self.limits.compiled_resources,
            &self.limits.route_tables,
        ]
    }

    /// Returns what the tenant's state has taken of each limit of `tenant_amounts`.
    fn taken_by(&self, tenant: &TenantName) -> [u64; 4] {
        self.tenant_amounts().map(|limit| limit.get(tenant))
    }

    /// Restores the tenant's previous amounts. This cannot fail: it returns an increase, or takes
    /// again what a delete of this tenant has just freed.
    fn give_back(&self, tenant: &TenantName, before: [u64; 4]) {
        for (limit, amount) in self.tenant_amounts().into_iter().zip(before) {
            let _ = limit.set(tenant, amount);
        }
    }

    /// Executes a write request, unless it conflicts with a change that went live after its
    /// preparation.
    fn commit_write(
        &mut self,
        prepared: Prepared,
        write: &WriteEdits,
    ) -> Result<Committed, StoreError> {
        let Prepared {
            after, validated, ..
        } = prepared;
        let ValidatedTenant {
            compiled,
            size,
            mut objections,
        } = validated?;
        objections.extend(self.clashes(&BTreeMap::new(), &compiled.claims));
        let before = self.taken_by(&after.name);
        if objections.is_empty() {
            objections.extend(
                self.take_shares(&after, size)
                    .err()
                    .map(|objection| *objection),
            );
        }
        // A delete is not refused, whatever is left.
        if !objections.is_empty() && !write.is_delete {
            return Ok(Committed::Refused(
                objections
                    .into_iter()
                    .map(|objection| objection.finding)
                    .collect(),
            ));
        }
        let done = self.carry_out(&after, write, compiled, objections);
        if done.is_err() {
            self.give_back(&after.name, before);
        }
        done.map(|()| Committed::Done(self.catalog.generation))
    }

    /// Writes the change to disk, then publishes it: once the operator receives "accepted", a kill
    /// cannot undo the change.
    fn carry_out(
        &mut self,
        after: &Arc<TenantSources>,
        write: &WriteEdits,
        compiled: CompiledTenant,
        objections: Vec<Objection>,
    ) -> Result<(), StoreError> {
        let (name, now) = (after.name.clone(), now_seconds());
        self.admit(after)?;
        self.bind(after, now)?;
        let generation = self.store.next_generation()?;
        // Only the deletion of all objects takes several transactions. If the disk fails between
        // them, the deleted objects stay deleted, which was the request.
        let step = if write.is_in_steps {
            self.store.edits_max()
        } else {
            write.edits.len()
        };
        for edits in write.edits.chunks(step.max(1)) {
            self.store.apply(edits, generation, now)?;
        }
        self.metrics
            .count(metrics::CHANGES, &[("from", PolicyOrigin::Api.label())]);
        self.tenants.insert(name.clone(), after.clone());
        if after.is_gone() {
            if let Err(e) = self.forget(&name) {
                // The change is on disk and stands; only the empty tenant remains to be removed.
                tracing::warn!(tenant = %name, error = %e, "controller: could not remove the empty tenant; retrying later");
                self.behind.insert(name);
            }
        } else {
            let compiled = self.accept_or_retain(&name, compiled, objections);
            self.publish_all(vec![(name, compiled)], generation);
        }
        Ok(())
    }

    /// Returns the state of a tenant that goes live: the next state, or with objections the present
    /// live state and the objections.
    fn accept_or_retain(
        &mut self,
        name: &TenantName,
        mut compiled: CompiledTenant,
        objections: Vec<Objection>,
    ) -> CompiledTenant {
        if objections.is_empty() {
            self.withheld.remove(name);
            return compiled;
        }
        let has = |is: fn(WithheldReason) -> bool| objections.iter().any(|it| is(it.reason));
        let (may_have_been_in_force, is_clash) = (
            has(WithheldReason::may_have_been_in_force),
            has(|reason| reason == WithheldReason::Clash),
        );
        // Every later change is objected to again; only the first is logged.
        if self.withheld.insert(name.clone()) {
            let reasons: BTreeSet<WithheldReason> = objections
                .iter()
                .map(|objection| objection.reason)
                .collect();
            for reason in reasons {
                self.metrics
                    .count(metrics::WITHHELD, &[("reason", reason.label())]);
            }
            for Objection { finding, .. } in &objections {
                tracing::error!(tenant = %name, %finding, "controller: withheld the tenant's newest configuration; the last accepted one stays in force");
            }
        }
        let reasons: Vec<_> = objections.into_iter().map(|it| it.finding).collect();
        compiled.diagnostics.extend(reasons.iter().cloned());
        let before = self.catalog.tenants.get(name);
        compiled.withheld = Some(Arc::new(WithheldChange {
            // A tenant that was never published by this controller has nothing in force.
            objects_in_force: before.map_or_else(Arc::default, |b| b.objects_in_force().clone()),
            reasons,
        }));
        // After a start the controller does not know which state was in force, so data planes must
        // keep theirs. A reduced share therefore removes nothing from them.
        compiled.complete &= before.is_some() || !may_have_been_in_force;
        // `publish_all` adds the planner's and the controller's own resources.
        let own_resources = |b: &Arc<TenantCatalog>| {
            b.entries
                .values()
                .map(|e| e.resource.clone())
                .filter(|r| !is_planned(r.kind()) && !is_of_controller(r))
                .collect()
        };
        compiled.resources = before.map(own_resources).unwrap_or_default();
        compiled.claims = match before {
            Some(b) => b.claims.clone(),
            // The state in force before the start may be this one, so no other tenant may take its
            // claims.
            None if may_have_been_in_force && !is_clash => compiled.claims,
            None => TenantClaims {
                tenant: name.clone(),
                isolation: None,
                gateways: Vec::new(),
            },
        };
        // The tier places services and Gateways by these two, so they belong to the resources.
        compiled.home_azs = before.map(|b| b.homes.clone()).unwrap_or_default();
        compiled.ingress = before.map(|b| b.ingress.clone()).unwrap_or_default();
        compiled.federations = before.map(|b| b.federations.clone()).unwrap_or_default();
        compiled.jwks = before.map(|b| b.jwks.as_ref().clone()).unwrap_or_default();
        compiled
    }

    /// Publishes the compiled states of tenants in one generation.
    fn publish_all(&mut self, next: Vec<(TenantName, CompiledTenant)>, generation: Generation) {
        for (name, mut compiled) in next {
            let planned = self.tier.tenants.get(&name);
            let planned = planned.into_iter().flat_map(TenantPlacement::resources);
            compiled.resources.extend(planned.map(Arc::new));
            let before = self.catalog.tenants.get(&name);
            // The controller's own resources stay as they were; `publish_now` updates them once all
            // tenants' claims are in.
            compiled.resources.extend(
                before
                    .into_iter()
                    .flat_map(|b| b.of_controller())
                    .map(|e| e.resource.clone()),
            );
            let view = TenantCatalog::next(before.map(Arc::as_ref), compiled, generation);
            self.catalog.tenants.insert(name, Arc::new(view));
        }
        self.limits.follow(&self.catalog);
        self.publish_now(generation);
    }
}

fn domain_of(tenant: &TenantName, view: &TenantCatalog) -> Option<DomainName> {
    view.claims
        .isolation
        .as_ref()
        .map(|i| (tenant.clone(), i.trust_domain.clone()))
}

/// Returns the controller's own resources of each tenant: its trust bundle, those of tenants with
/// which it federates mutually, and the entitlements of gateways to use its keys.
fn trust_resources(
    catalog: &Catalog,
    trust: &TrustAuthorities,
) -> BTreeMap<TenantName, Vec<Resource>> {
    let mut serving: BTreeMap<&TenantName, BTreeSet<&ReplicaName>> = BTreeMap::new();
    for (tenant, view) in &catalog.tenants {
        serving
            .entry(tenant)
            .or_default()
            .extend(view.claims.gateways.iter().map(|g| &g.replica));
    }
    // In the cloud tier, a replica serves the tenants that are placed on its backend.
    for replica in catalog.placement.replicas.keys() {
        for tenant in catalog
            .placement
            .of(replica)
            .iter()
            .flat_map(|scope| &scope.tenants)
        {
            serving.entry(tenant).or_default().insert(replica);
        }
    }
    let mut out = BTreeMap::new();
    for (tenant, view) in &catalog.tenants {
        // A tenant without a valid Tenant object gets no resources.
        let Some(own) = domain_of(tenant, view) else {
            continue;
        };
        // A federation needs the declarations of both tenants.
        let is_mutual = |other: &&DomainName| {
            let theirs = catalog
                .tenants
                .get(&other.0)
                .filter(|theirs| domain_of(&other.0, theirs).as_ref() == Some(*other));
            theirs.is_some_and(|theirs| other.0 != *tenant && theirs.federations.contains(&own))
        };
        let mut resources = trust.bundle_resources(&own, view.federations.iter().filter(is_mutual));
        // A tenant with local keys may have its own key server, which its Terminations use.
        let wants_key_servers = key_policy(view).location == KeyLocation::KeyServer
            || view.of(ResourceKind::KeyServer).next().is_some();
        let gateways = serving
            .get(tenant)
            .into_iter()
            .flatten()
            .filter(|_| wants_key_servers);
        resources.extend(gateways.map(|replica| {
            let (requester, identities) = (
                KeyRequester::Gateway((*replica).clone()),
                vec![gateway_identity(own.1.clone())],
            );
            Resource::Entitlement(Entitlement {
                tenant: tenant.clone(),
                requester,
                identities,
            })
        }));
        out.insert(tenant.clone(), resources);
    }
    out
}

/// Returns the sources of a tenant; they are empty at first.
fn sources_mut<'a>(
    tenants: &'a mut BTreeMap<TenantName, TenantSources>,
    name: &TenantName,
) -> &'a mut TenantSources {
    tenants
        .entry(name.clone())
        .or_insert_with(|| TenantSources::new(name.clone()))
}

fn written_shares(object: &Object) -> Option<Shares> {
    match object {
        Object::Tenant(tenant) => Some(tenant.spec.shares.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;

//! The one writer: every change of what the controller says goes through here, one after the other. It checks tenants against each other,
//! writes the store, and only then publishes. It reads, compiles and compares nothing: `prepare` does that beforehand, on other threads, and
//! what was revoked or became of the cloud tier passes all that waits. Readers never wait for it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use canal_compiler::claims::Claims;
use canal_compiler::scope::Whereabouts;
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::identity::{components, gateway_identity};
use canal_model::ids::{Generation, ReplicaName, ServiceId, ServiceKey, TenantName};
use canal_model::policy::Object;
use canal_model::program::{Kind, Resource};
use canal_model::share::Shares;
use canal_model::trust::{Entitlement, KeyPlace, Requester};
use canal_sources::parse;
use canal_store::{DomainName, Store, StoreError, StoredObject};
use tokio::sync::{mpsc, oneshot, watch};

use crate::catalog::{Catalog, Compiled, Planned, TenantView, is_of_hub, is_planned};
use crate::certificates::key_policy;
use crate::files::{Found, Reading};
use crate::metrics::{self, Metrics};
use crate::prepare::{Basis, Judged, Prepared, Preparer, WishEdits, clashes};
use crate::shared::now_seconds;
use crate::shares::TenantLimits;
use crate::tenant::{Applied, TenantSources};
use crate::trust::Trust;

/// Commands, and changes ready to be committed, that may wait for the writer.
pub(crate) const COMMANDS_MAX: usize = 256;

/// What the writer is told beside changes of tenants. It passes all of them.
pub(crate) enum Command {
    /// Try again what the store refused of trust.
    Retry,
    /// What is told of tenants' trust may differ.
    Trust,
    /// What the planner gives the data planes now.
    Tier { tier: Tier, reply: oneshot::Sender<Result<Generation, StoreError>> },
}

/// A change that is ready.
pub(crate) struct Commit {
    pub(crate) prepared: Prepared,
    pub(crate) reply: oneshot::Sender<Result<Committed, StoreError>>,
}

/// What became of a change that was ready.
#[derive(Debug)]
pub(crate) enum Committed {
    /// It is in force, or withheld with its reasons told, since this generation.
    Done(Generation),
    /// Others stand against it: a claim that went live meanwhile, or a limit that is full.
    Refused(Vec<Diagnostic>),
    /// The tenant's sources are others now; it must be prepared again.
    Moved,
}

/// All that the planner has to say to data planes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Tier {
    /// Gateway addresses and bucket tables.
    pub(crate) tenants: BTreeMap<TenantName, Planned>,
    /// Replicas.
    pub(crate) provider: Vec<Resource>,
    pub(crate) whereabouts: Arc<Whereabouts>,
}

/// Through what the writer speaks: to readers, to those who prepare changes, and of tenants' trust.
pub(crate) struct Voice {
    pub(crate) publish: watch::Sender<Arc<Catalog>>,
    pub(crate) basis: watch::Sender<Arc<Basis>>,
    pub(crate) trust: Arc<Trust>,
}

pub(crate) struct Writer {
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    limits: Arc<TenantLimits>,
    publish: watch::Sender<Arc<Catalog>>,
    basis: watch::Sender<Arc<Basis>>,
    trust: Arc<Trust>,
    /// Some tenant's trust is not told as it is, since the store refused.
    untold: bool,
    catalog: Catalog,
    tenants: BTreeMap<TenantName, Arc<TenantSources>>,
    /// In the order in which they were first seen.
    order: Vec<TenantName>,
    /// Tenants whose newest files are not in force because they clash with another tenant's claims.
    withheld: BTreeSet<TenantName>,
    /// Tenants whose newest files are not in force because the store refused.
    behind: BTreeSet<TenantName>,
    /// The services of each tenant that hold ids.
    services: BTreeMap<TenantName, BTreeSet<ServiceKey>>,
    /// What the planner said last.
    tier: Tier,
}

impl Writer {
    /// Takes up what the store and the first reading of the files say, and publishes it.
    pub(crate) fn start(
        preparer: &Preparer,
        Voice { publish, basis, trust }: Voice,
        files: Reading,
        key_sets: Vec<(TenantName, String, String)>,
    ) -> Result<Self, StoreError> {
        let store = preparer.store.clone();
        let catalog = Catalog { generation: store.generation(), ..Catalog::default() };
        let mut writer = Self {
            order: store.tenants()?,
            store,
            metrics: preparer.metrics.clone(),
            limits: preparer.limits.clone(),
            publish,
            basis,
            trust,
            untold: false,
            catalog,
            tenants: BTreeMap::new(),
            withheld: BTreeSet::new(),
            behind: BTreeSet::new(),
            services: BTreeMap::new(),
            tier: Tier::default(),
        };
        let mut tenants = writer.read_store(&files)?;
        for name in &writer.order {
            // Until its files are read, what its data planes hold is not to be taken away.
            sources_mut(&mut tenants, name).is_partial = writer.store.has_files(name)?;
        }
        let mut all = writer.order.clone();
        for (name, found) in files.tenants {
            sources_mut(&mut tenants, &name).take_files(found);
        }
        for (name, uri, set) in key_sets {
            // Of a tenant that is gone nothing is left; its sets go with the first look.
            if let Some(sources) = tenants.get_mut(&name) {
                sources.jwks.insert(uri, set);
            }
        }
        all.extend(tenants.keys().filter(|name| !writer.order.contains(name)).cloned());
        writer.begin(preparer, all, tenants)?;
        Ok(writer)
    }

    /// Reads what the store has of each tenant. Who has more than its share is set aside unread, and costs nobody else anything.
    fn read_store(&self, files: &Reading) -> Result<BTreeMap<TenantName, TenantSources>, StoreError> {
        let mut bytes: BTreeMap<TenantName, u64> = BTreeMap::new();
        let mut shares: BTreeMap<TenantName, Shares> = BTreeMap::new();
        self.store.for_each_object(|object| {
            *bytes.entry(object.key.tenant.clone()).or_default() += object.yaml.len() as u64;
            if object.key.kind == "Tenant" {
                let parsed = parse("api", &object.yaml).documents.into_iter().next();
                shares.extend(parsed.and_then(|document| Some((object.key.tenant, written_shares(&document.object)?))));
            }
        })?;
        let documents = files.tenants.iter().filter_map(|(name, found)| match found {
            Found::Read(files) => Some((name, files)),
            Found::Gone => None,
        });
        for (name, files) in documents {
            shares.extend(files.documents.iter().find_map(|d| Some((name.clone(), written_shares(&d.object)?))));
        }
        self.limits.set_shares(shares.iter());
        let mut tenants = BTreeMap::new();
        for (name, bytes) in &bytes {
            if let Err(mut excess) = self.limits.configuration.set(name, *bytes) {
                excess.mend = format!("have the provider set the share higher and restart, or run `canal delete --tenant {name} --all`");
                self.metrics.count(metrics::WITHHELD, &[("reason", "configuration_bytes")]);
                tracing::error!(tenant = %name, finding = %excess, "the tenant's applied objects are set aside");
                sources_mut(&mut tenants, name).set_aside = Some(*excess);
            }
        }
        self.store.for_each_object(|object| {
            if tenants.get(&object.key.tenant).is_none_or(|sources: &TenantSources| sources.set_aside.is_none()) {
                Self::take_up(&mut tenants, object);
            }
        })?;
        Ok(tenants)
    }

    /// Compiles everybody and publishes those that may go live, all in one generation.
    fn begin(
        &mut self,
        preparer: &Preparer,
        names: Vec<TenantName>,
        mut tenants: BTreeMap<TenantName, TenantSources>,
    ) -> Result<(), StoreError> {
        let mut staged = BTreeMap::new();
        let mut next = Vec::new();
        for name in names {
            let Some(sources) = tenants.remove(&name) else { continue };
            let prepared = preparer.sources_after(None, sources);
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

    fn take_up(tenants: &mut BTreeMap<TenantName, TenantSources>, object: StoredObject) {
        let StoredObject { key, yaml, created, .. } = object;
        let sources = sources_mut(tenants, &key.tenant);
        let parsed = parse("api", &yaml);
        let fault = parsed.diagnostics.into_iter().find(|d| d.severity == Severity::Error);
        match parsed.documents.into_iter().next() {
            Some(document) => {
                sources.applied.insert(document.object.key(), Applied::new(document, created));
                sources.unreadable.extend(fault.map(|f| (key, f)));
            }
            None => {
                let problem = format!("the applied object {key} cannot be read by this build, so it is not in force");
                let mend = "apply it again in a form that this build reads, or delete it".into();
                let finding = Diagnostic { severity: Severity::Error, origin: None, object: None, field: String::new(), problem, mend };
                sources.unreadable.insert(key, finding);
            }
        }
    }

    /// Serves until all senders are gone. Commands pass commits.
    pub(crate) fn run(mut self, mut commands: mpsc::Receiver<Command>, mut commits: mpsc::Receiver<Commit>) -> io::Result<()> {
        enum Next {
            Command(Command),
            // Boxed, because it is far larger than a command.
            Commit(Box<Commit>),
        }
        // Only to wait for two channels at once; it has no other task.
        let waiting = tokio::runtime::Builder::new_current_thread().build()?;
        loop {
            let next = waiting.block_on(async {
                tokio::select! {
                    biased;
                    Some(command) = commands.recv() => Some(Next::Command(command)),
                    Some(commit) = commits.recv() => Some(Next::Commit(Box::new(commit))),
                    else => None,
                }
            });
            match next {
                Some(Next::Command(Command::Retry)) if !self.untold => {}
                Some(Next::Command(Command::Retry | Command::Trust)) => self.take_trust(),
                Some(Next::Command(Command::Tier { tier, reply })) => {
                    // The fleet's task may have ended with the controller.
                    let _ = reply.send(self.take_tier(tier));
                }
                Some(Next::Commit(commit)) => {
                    let Commit { prepared, reply } = *commit;
                    let done = self.commit(prepared);
                    if let Err(e) = &done {
                        self.metrics.count(metrics::STORE_ERRORS, &[("reason", e.name())]);
                    }
                    self.publish_basis();
                    // Whoever asked may have gone away; what was done stays done.
                    let _ = reply.send(done);
                }
                None => return Ok(()),
            }
        }
    }

    fn publish_basis(&self) {
        let unsettled = self.behind.union(&self.withheld).cloned().collect();
        let catalog = Arc::new(self.catalog.clone());
        let basis = Basis { catalog, tenants: self.tenants.clone(), order: self.order.clone(), unsettled };
        self.basis.send_replace(Arc::new(basis));
    }

    /// Takes over what the planner says, in one generation.
    fn take_tier(&mut self, tier: Tier) -> Result<Generation, StoreError> {
        let generation = self.store.next_generation()?;
        let none = Planned::default();
        for (name, view) in &mut self.catalog.tenants {
            let planned = tier.tenants.get(name).unwrap_or(&none);
            if let Some(next) = view.with_tier(planned, self.tier.tenants.get(name), generation) {
                *view = Arc::new(next);
            }
        }
        let before = self.catalog.provider.as_deref();
        // As it was; what differs is told below.
        let own = before.into_iter().flat_map(|b| b.of_hub()).map(|e| e.resource.clone());
        let provider = Compiled::of_provider(tier.provider.iter().cloned().chain(own).collect());
        self.catalog.provider = Some(Arc::new(TenantView::next(before, provider, generation)));
        self.catalog.whereabouts = tier.whereabouts.clone();
        self.tier = tier;
        self.publish_now(generation);
        Ok(generation)
    }

    /// Tells what changed of tenants' trust, if anything did.
    fn take_trust(&mut self) {
        let generation = match self.store.next_generation() {
            Ok(generation) => generation,
            Err(e) => {
                self.metrics.count(metrics::STORE_ERRORS, &[("reason", e.name())]);
                self.untold = true;
                return;
            }
        };
        if self.tell_trust(generation) {
            self.catalog.generation = generation;
            self.publish.send_replace(Arc::new(self.catalog.clone()));
        }
    }

    /// Puts into every view what the hub itself says of trust: into tenants' of theirs, into the provider's of Canal's own parts. False:
    /// nothing differs.
    fn tell_trust(&mut self, generation: Generation) -> bool {
        let names: Vec<DomainName> = self.catalog.tenants.iter().filter_map(|(name, view)| domain_of(name, view)).collect();
        // A root that cannot be kept must not be told; the tenant's own certificates wait with it.
        self.untold = self
            .trust
            .ensure(names.iter())
            .inspect_err(|e| {
                self.metrics.count(metrics::STORE_ERRORS, &[("reason", e.name())]);
                tracing::error!(error = %e, "a new root could not be kept; it is tried again");
            })
            .is_err();
        let told = trust_told(&self.catalog, &self.trust);
        let own: Vec<Resource> = self.trust.bundle(&components()).map(Resource::Bundle).into_iter().collect();
        let provider = self.catalog.provider.take().unwrap_or_else(|| {
            let nothing = Compiled::of_provider(Vec::new());
            Arc::new(TenantView::next(None, nothing, generation))
        });
        let next = provider.with_trust(&own, generation).map(Arc::new);
        let mut differs = next.is_some();
        self.catalog.provider = Some(next.unwrap_or(provider));
        for (name, view) in &mut self.catalog.tenants {
            let resources = told.get(name).map_or(&[][..], Vec::as_slice);
            if let Some(next) = view.with_trust(resources, generation) {
                *view = Arc::new(next);
                differs = true;
            }
        }
        differs
    }

    fn publish_now(&mut self, generation: Generation) {
        self.tell_trust(generation);
        self.catalog.generation = generation;
        self.publish.send_replace(Arc::new(self.catalog.clone()));
    }

    /// Ids for all services of a tenant; those of services that are gone are let go.
    fn bind(&mut self, sources: &TenantSources, now: u64) -> Result<BTreeMap<ServiceKey, ServiceId>, StoreError> {
        let keys = sources.service_keys();
        let wanted: Vec<ServiceKey> = keys.iter().cloned().collect();
        let ids = self.store.service_ids(&wanted, now)?;
        let is_certain = sources.is_complete() && sources.unreadable.is_empty();
        if is_certain && self.services.get(&sources.name).is_none_or(|before| !before.is_subset(&keys)) {
            self.store.release_service_ids(|key| key.tenant != sources.name || keys.contains(key), now)?;
        }
        self.services.insert(sources.name.clone(), keys);
        Ok(ids)
    }

    fn admit(&mut self, sources: &TenantSources) -> Result<(), StoreError> {
        let has_files = sources.is_partial || sources.files.as_ref().is_some_and(|f| !f.say_nothing());
        if !self.order.contains(&sources.name) || self.store.has_files(&sources.name)? != has_files {
            self.store.admit_tenant(&sources.name, has_files)?;
        }
        if !self.order.contains(&sources.name) {
            self.order.push(sources.name.clone());
        }
        Ok(())
    }

    fn forget(&mut self, name: &TenantName) -> Result<(), StoreError> {
        self.store.forget_tenant(name)?;
        self.store.release_service_ids(|key| key.tenant != *name, now_seconds())?;
        let generation = self.store.next_generation()?;
        self.tenants.remove(name);
        self.order.retain(|n| n != name);
        self.withheld.remove(name);
        self.services.remove(name);
        if self.catalog.tenants.remove(name).is_some() {
            self.publish_now(generation);
            tracing::info!(tenant = %name, %generation, "the tenant is gone");
        }
        Ok(())
    }

    /// Brings a change into force, if it was prepared against what still holds.
    fn commit(&mut self, mut prepared: Prepared) -> Result<Committed, StoreError> {
        let holds = match (self.tenants.get(&prepared.name), &prepared.before) {
            (Some(now), Some(then)) => Arc::ptr_eq(now, then),
            (None, None) => true,
            _ => false,
        };
        if !holds {
            return Ok(Committed::Moved);
        }
        if let Some(wish) = prepared.wish.take() {
            return self.commit_wish(prepared, &wish);
        }
        let name = prepared.name.clone();
        // Until it is in force, it is tried again.
        self.behind.insert(name.clone());
        if let Some(compiled) = self.settle_sources(prepared, &BTreeMap::new())? {
            let generation = self.store.next_generation()?;
            self.publish_all(vec![(name.clone(), compiled)], generation);
        }
        self.behind.remove(&name);
        Ok(Committed::Done(self.catalog.generation))
    }

    /// Takes over a tenant's sources. What is to be published of them, if anything differs. `staged`: claims that go live with them.
    fn settle_sources(&mut self, prepared: Prepared, staged: &BTreeMap<TenantName, Claims>) -> Result<Option<Compiled>, StoreError> {
        let Prepared { name, after, judged, .. } = prepared;
        self.tenants.insert(name.clone(), after.clone());
        if after.is_gone() {
            self.forget(&name)?;
            return Ok(None);
        }
        let Judged { compiled, bytes, mut faults } = judged?;
        self.admit(&after)?;
        self.bind(&after, now_seconds())?;
        if faults.is_empty() {
            faults.extend(self.hold(&after, bytes).err().map(|excess| *excess));
        }
        faults.extend(self.clashes(staged, &compiled.claims));
        let compiled = self.settle(&name, compiled, faults);
        let is_told = self.catalog.tenants.get(&name).is_some_and(|v| *v.diagnostics == *compiled.diagnostics);
        Ok(Some(compiled).filter(|_| !(self.withheld.contains(&name) && is_told)))
    }

    fn clashes(&self, staged: &BTreeMap<TenantName, Claims>, claims: &Claims) -> Vec<Diagnostic> {
        let live = |name: &TenantName| staged.get(name).or_else(|| Some(&self.catalog.tenants.get(name)?.claims));
        clashes(&self.order, live, claims)
    }

    /// Takes what a tenant's next state has in bytes from its shares.
    fn hold(&self, after: &TenantSources, compiled: u64) -> Result<(), Box<Diagnostic>> {
        if after.set_aside.is_some() {
            return Ok(());
        }
        let before = self.limits.configuration.get(&after.name);
        self.limits.configuration.set(&after.name, after.bytes())?;
        let done = self.limits.compiled.set(&after.name, compiled);
        if done.is_err() {
            // Less, or what it was: never refused.
            let _ = self.limits.configuration.set(&after.name, before);
        }
        done
    }

    /// Carries out an operator's wish, unless something went live meanwhile that stands against it.
    fn commit_wish(&mut self, prepared: Prepared, wish: &WishEdits) -> Result<Committed, StoreError> {
        let Prepared { after, judged, .. } = prepared;
        let Judged { compiled, bytes, mut faults } = judged?;
        faults.extend(self.clashes(&BTreeMap::new(), &compiled.claims));
        let held = (self.limits.configuration.get(&after.name), self.limits.compiled.get(&after.name));
        if faults.is_empty() {
            faults.extend(self.hold(&after, bytes).err().map(|excess| *excess));
        }
        // An object that is to go may go, whatever is left.
        if !faults.is_empty() && !wish.is_delete {
            return Ok(Committed::Refused(faults));
        }
        let done = self.carry_out(&after, wish, compiled, faults);
        if done.is_err() {
            // What it was: what grew shrinks, and what a deletion had freed was this tenant's a moment ago.
            let _ = self.limits.configuration.set(&after.name, held.0);
            let _ = self.limits.compiled.set(&after.name, held.1);
        }
        done.map(|()| Committed::Done(self.catalog.generation))
    }

    /// Disk first: once the operator hears "accepted", a kill cannot take it back.
    fn carry_out(
        &mut self,
        after: &Arc<TenantSources>,
        wish: &WishEdits,
        compiled: Compiled,
        faults: Vec<Diagnostic>,
    ) -> Result<(), StoreError> {
        let (name, now) = (after.name.clone(), now_seconds());
        self.admit(after)?;
        self.bind(after, now)?;
        let generation = self.store.next_generation()?;
        // In steps only where all goes: what is gone of it when the disk refuses was to go.
        let step = if wish.is_in_steps { self.store.edits_max() } else { wish.edits.len() };
        for edits in wish.edits.chunks(step.max(1)) {
            self.store.apply(edits, generation, now)?;
        }
        self.metrics.count(metrics::CHANGES, &[("from", "api")]);
        self.tenants.insert(name.clone(), after.clone());
        if after.is_gone() {
            if let Err(e) = self.forget(&name) {
                // The wish is on disk and stands; only the tenant's empty place is left to clear.
                tracing::warn!(tenant = %name, error = %e, "the tenant's place is cleared later");
                self.behind.insert(name);
            }
        } else {
            let compiled = self.settle(&name, compiled, faults);
            self.publish_all(vec![(name, compiled)], generation);
        }
        Ok(())
    }

    /// What goes live of a tenant's next state: itself, or, where something stands against it, what was live before with the reasons told.
    fn settle(&mut self, name: &TenantName, mut compiled: Compiled, clashes: Vec<Diagnostic>) -> Compiled {
        if clashes.is_empty() {
            self.withheld.remove(name);
            return compiled;
        }
        if self.withheld.insert(name.clone()) {
            self.metrics.count(metrics::WITHHELD, &[("reason", "clash")]);
            for d in &clashes {
                tracing::error!(tenant = %name, finding = %d, "the tenant's newest state is withheld");
            }
        }
        compiled.diagnostics.extend(clashes);
        let before = self.catalog.tenants.get(name);
        let said = |b: &Arc<TenantView>| {
            b.entries.values().map(|e| e.resource.clone()).filter(|r| !is_planned(r.kind()) && !is_of_hub(r)).collect()
        };
        compiled.resources = before.map(said).unwrap_or_default();
        compiled.claims = match before {
            Some(b) => b.claims.clone(),
            None => Claims { tenant: name.clone(), isolation: None, gateways: Vec::new() },
        };
        compiled.federations = before.map(|b| b.federations.clone()).unwrap_or_default();
        compiled.jwks = before.map(|b| b.jwks.as_ref().clone()).unwrap_or_default();
        compiled
    }

    fn publish_all(&mut self, next: Vec<(TenantName, Compiled)>, generation: Generation) {
        for (name, mut compiled) in next {
            compiled.resources.extend(self.tier.tenants.get(&name).into_iter().flat_map(Planned::resources));
            let before = self.catalog.tenants.get(&name);
            // As it was; what differs is told below, once all tenants' claims are in.
            compiled.resources.extend(before.into_iter().flat_map(|b| b.of_hub()).map(|e| e.resource.clone()));
            let view = TenantView::next(before.map(Arc::as_ref), compiled, generation);
            self.catalog.tenants.insert(name, Arc::new(view));
        }
        self.limits.follow(&self.catalog);
        self.publish_now(generation);
    }
}

fn domain_of(tenant: &TenantName, view: &TenantView) -> Option<DomainName> {
    view.claims.isolation.as_ref().map(|i| (tenant.clone(), i.trust_domain.clone()))
}

/// What the hub itself says to each tenant: its own bundle and those of tenants that federate with it as it does with them, and which
/// gateways may use its keys.
fn trust_told(catalog: &Catalog, trust: &Trust) -> BTreeMap<TenantName, Vec<Resource>> {
    let mut serving: BTreeMap<&TenantName, BTreeSet<&ReplicaName>> = BTreeMap::new();
    for (tenant, view) in &catalog.tenants {
        serving.entry(tenant).or_default().extend(view.claims.gateways.iter().map(|g| &g.replica));
    }
    for replica in catalog.whereabouts.replicas.keys() {
        for tenant in catalog.whereabouts.of(replica).iter().flat_map(|held| &held.tenants) {
            serving.entry(tenant).or_default().insert(replica);
        }
    }
    let mut out = BTreeMap::new();
    for (tenant, view) in &catalog.tenants {
        let Some(own) = domain_of(tenant, view) else { continue };
        let says_back = |other: &&DomainName| {
            let theirs = catalog.tenants.get(&other.0).filter(|theirs| domain_of(&other.0, theirs).as_ref() == Some(*other));
            theirs.is_some_and(|theirs| other.0 != *tenant && theirs.federations.contains(&own))
        };
        let mut told = trust.told(&own, view.federations.iter().filter(says_back));
        let wants_key_servers = key_policy(view).place == KeyPlace::KeyServer || view.of(Kind::KeyServer).next().is_some();
        let gateways = serving.get(tenant).into_iter().flatten().filter(|_| wants_key_servers);
        told.extend(gateways.map(|replica| {
            let (requester, identities) = (Requester::Gateway((*replica).clone()), vec![gateway_identity(own.1.clone())]);
            Resource::Entitlement(Entitlement { tenant: tenant.clone(), requester, identities })
        }));
        out.insert(tenant.clone(), told);
    }
    out
}

fn sources_mut<'a>(tenants: &'a mut BTreeMap<TenantName, TenantSources>, name: &TenantName) -> &'a mut TenantSources {
    tenants.entry(name.clone()).or_insert_with(|| TenantSources::new(name.clone()))
}

fn written_shares(object: &Object) -> Option<Shares> {
    match object {
        Object::Tenant(tenant) => Some(tenant.spec.shares.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::Limits;

    #[test]
    fn the_cloud_tier_and_trust_pass_all_changes_that_wait() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::open(dir.path(), canal_store::Limits::default()).unwrap());
        let (publish, catalogs) = watch::channel(Arc::new(Catalog::default()));
        let (basis, _) = watch::channel(Arc::new(Basis::default()));
        let client = crate::fetch::Client::new(b"").unwrap();
        let infra = canal_authority::Infra::open(&dir.path().join("infra"), now_seconds()).unwrap().of_components().unwrap();
        let limits = Arc::new(TenantLimits::new(&Limits::default()));
        let certificates = limits.certificates.clone();
        let trust = Arc::new(Trust::open(store.clone(), Arc::default(), infra, &Default::default(), &client, certificates).unwrap());
        let preparer = Preparer { store, metrics: Arc::default(), limits };
        let writer = Writer::start(&preparer, Voice { publish, basis, trust }, Reading::default(), Vec::new()).unwrap();
        let (commands, queue) = mpsc::channel(COMMANDS_MAX);
        let (commits, ready) = mpsc::channel(COMMANDS_MAX);
        let commit = |name: &str| {
            let mut sources = TenantSources::new(name.parse().unwrap());
            sources.is_partial = true;
            let prepared = preparer.sources_after(None, sources);
            let (reply, answer) = oneshot::channel();
            commits.blocking_send(Commit { prepared, reply }).unwrap();
            answer
        };
        let mut changes = [commit("alpha"), commit("beta"), commit("alpha")];
        let (reply, mut told) = oneshot::channel();
        commands.blocking_send(Command::Tier { tier: Tier::default(), reply }).unwrap();
        commands.blocking_send(Command::Trust).unwrap();
        drop((commands, commits));
        writer.run(queue, ready).unwrap();
        let told = told.try_recv().unwrap().unwrap();
        let [alpha, beta, again] = &mut changes;
        let generation = |answer: &mut oneshot::Receiver<_>| match answer.try_recv() {
            Ok(Ok(Committed::Done(generation))) => generation,
            other => panic!("{other:?}"),
        };
        assert!(told < generation(alpha) && told < generation(beta), "what came last was told first");
        assert!(matches!(again.try_recv(), Ok(Ok(Committed::Moved))), "it was prepared before the first of alpha's was in force");
        assert_eq!(catalogs.borrow().tenants.len(), 2);
    }
}

//! The one writer: every change of what the controller says goes through here, one after the other. It reads sources, compiles,
//! checks tenants against each other, writes the store, and only then publishes. Readers never wait for it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_compiler::claims::{Claims, collisions};
use canal_compiler::scope::Whereabouts;
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::identity::{components, gateway_identity};
use canal_model::ids::{Generation, ReplicaName, ServiceId, ServiceKey, TenantName};
use canal_model::program::{Kind, Resource};
use canal_model::trust::{Entitlement, KeyPlace, Requester};
use canal_sources::parse;
use canal_store::{DomainName, Store, StoreError, StoredObject};
use canal_wire::api;
use tokio::sync::{mpsc, oneshot, watch};

use crate::apply::{Plan, Wish, decide};
use crate::catalog::{Catalog, Compiled, Planned, TenantView, is_of_hub, is_planned};
use crate::certificates::key_policy;
use crate::files::{Found, Reading, is_unread};
use crate::metrics::{self, Metrics};
use crate::shared::now_seconds;
use crate::tenant::{Applied, TenantSources};
use crate::trust::Trust;

/// Requests that may wait for the writer.
pub(crate) const COMMANDS_MAX: usize = 256;
/// While a tenant is compiled, what the planner says is looked for so often.
const TIER_EVERY: Duration = Duration::from_millis(5);

/// What the writer is asked.
pub(crate) enum Command {
    /// The files of some tenants, read anew.
    Files(Reading),
    /// Try again what the store refused.
    Retry,
    /// What is told of tenants' trust may differ.
    Trust,
    /// A key set was fetched, or could not be.
    Jwks { tenant: TenantName, uri: String, set: Option<String>, fault: Option<String> },
    /// What the planner gives the data planes now.
    Tier { tier: Tier, reply: oneshot::Sender<Result<Generation, StoreError>> },
    /// An operator's wish.
    Wish { tenant: TenantName, wish: Wish, is_provider: bool, dry_run: bool, reply: oneshot::Sender<Result<Outcome, StoreError>> },
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

/// What came of a wish.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) accepted: bool,
    pub(crate) generation: Generation,
    pub(crate) changes: Vec<api::Change>,
    pub(crate) diagnostics: Vec<Diagnostic>,
}

/// Through what the writer speaks: to readers, and of tenants' trust.
pub(crate) struct Voice {
    pub(crate) publish: watch::Sender<Arc<Catalog>>,
    pub(crate) trust: Arc<Trust>,
}

pub(crate) struct Writer {
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    publish: watch::Sender<Arc<Catalog>>,
    trust: Arc<Trust>,
    /// Some tenant's trust is not told as it is, since the store refused.
    untold: bool,
    catalog: Catalog,
    tenants: BTreeMap<TenantName, TenantSources>,
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
    /// What it is asked; `None` until it runs.
    queue: Option<mpsc::Receiver<Command>>,
    /// What was asked during a compilation, in order. At most [`COMMANDS_MAX`].
    waiting: VecDeque<Command>,
}

/// A tenant's next state, compiled and found acceptable or not.
struct Judged {
    compiled: Compiled,
    /// Errors that stand between the tenant and the others; empty: it may go live.
    clashes: Vec<Diagnostic>,
}

impl Writer {
    /// Takes up what the store and the first reading of the files say, and publishes it.
    pub(crate) fn start(
        store: Arc<Store>,
        metrics: Arc<Metrics>,
        Voice { publish, trust }: Voice,
        files: Reading,
        key_sets: Vec<(TenantName, String, String)>,
    ) -> Result<Self, StoreError> {
        let order = store.tenants()?;
        let catalog = Catalog { generation: store.generation(), ..Catalog::default() };
        let mut writer = Self {
            store,
            metrics,
            publish,
            trust,
            untold: false,
            catalog,
            tenants: BTreeMap::new(),
            order,
            withheld: BTreeSet::new(),
            behind: BTreeSet::new(),
            services: BTreeMap::new(),
            tier: Tier::default(),
            queue: None,
            waiting: VecDeque::new(),
        };
        for object in writer.store.objects()? {
            writer.take_up(object);
        }
        for name in writer.order.clone() {
            // Until its files are read, what its data planes hold is not to be taken away.
            writer.tenant_mut(&name).is_partial = writer.store.has_files(&name)?;
        }
        for (name, found) in files.tenants {
            writer.tenant_mut(&name).take_files(found);
        }
        for (name, uri, set) in key_sets {
            // Of a tenant that is gone nothing is left; its sets go with the first look.
            if let Some(sources) = writer.tenants.get_mut(&name) {
                sources.jwks.insert(uri, set);
            }
        }
        let elders = writer.order.clone();
        let newcomers = writer.tenants.keys().filter(|n| !elders.contains(n)).cloned();
        let all: Vec<TenantName> = elders.iter().cloned().chain(newcomers).collect();
        writer.refresh(all)?;
        Ok(writer)
    }

    fn take_up(&mut self, object: StoredObject) {
        let StoredObject { key, yaml, created, .. } = object;
        let sources = self.tenant_mut(&key.tenant);
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

    fn tenant_mut(&mut self, name: &TenantName) -> &mut TenantSources {
        self.tenants.entry(name.clone()).or_insert_with(|| TenantSources::new(name.clone()))
    }

    /// Serves commands until all senders are gone.
    pub(crate) fn run(mut self, commands: mpsc::Receiver<Command>) {
        self.queue = Some(commands);
        while let Some(command) = self.waiting.pop_front().or_else(|| self.queue.as_mut()?.blocking_recv()) {
            match command {
                Command::Files(reading) => self.take_reading(reading),
                Command::Retry => {
                    self.catch_up();
                    if self.untold {
                        self.take_trust();
                    }
                }
                Command::Trust => self.take_trust(),
                Command::Jwks { tenant, uri, set, fault } => self.take_key_set(tenant, uri, set, fault),
                Command::Tier { tier, reply } => {
                    // The fleet's task may have ended with the controller.
                    let _ = reply.send(self.take_tier(tier));
                }
                Command::Wish { tenant, wish, is_provider, dry_run, reply } => {
                    let outcome = self.grant(&tenant, wish, is_provider, dry_run);
                    if let Err(e) = &outcome {
                        self.metrics.count(metrics::STORE_ERRORS, &[("reason", e.name())]);
                    }
                    // The operator may have gone away; what was done stays done.
                    let _ = reply.send(outcome);
                }
            }
        }
    }

    /// Does a compilation. What the planner says does not wait for it, however large the tenant: it may be that an AZ is closed. All others
    /// keep their order.
    fn meanwhile<T: Send>(&mut self, work: impl FnOnce() -> T + Send) -> T {
        if self.queue.is_none() {
            return work();
        }
        let writer = std::thread::current();
        std::thread::scope(|scope| {
            let at_work = scope.spawn(move || {
                let done = work();
                writer.unpark();
                done
            });
            while !at_work.is_finished() {
                self.take_urgent();
                std::thread::park_timeout(TIER_EVERY);
            }
            at_work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn take_urgent(&mut self) {
        while self.waiting.len() < COMMANDS_MAX
            && let Some(command) = self.queue.as_mut().and_then(|queue| queue.try_recv().ok())
        {
            match command {
                Command::Tier { tier, reply } => _ = reply.send(self.take_tier(tier)),
                other => self.waiting.push_back(other),
            }
        }
    }

    /// Takes over what changed in the files.
    fn take_reading(&mut self, reading: Reading) {
        for (name, found) in reading.tenants {
            if self.tenant_mut(&name).take_files(found) {
                self.metrics.count(metrics::CHANGES, &[("from", "files")]);
                self.behind.insert(name);
            }
        }
        self.catch_up();
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

    fn take_key_set(&mut self, tenant: TenantName, uri: String, set: Option<String>, fault: Option<String>) {
        let Some(sources) = self.tenants.get_mut(&tenant) else { return };
        let is_new = set.as_ref().is_some_and(|set| sources.jwks.get(&uri) != Some(set));
        let is_told = sources.jwks_faults.get(&uri) == fault.as_ref();
        match fault {
            Some(fault) => _ = sources.jwks_faults.insert(uri.clone(), fault),
            None => _ = sources.jwks_faults.remove(&uri),
        }
        // Those that are wanted no more go, else a tenant that renames them could fill the memory.
        let wanted = self.catalog.tenants.get(&tenant).map(|view| view.jwks.clone()).unwrap_or_default();
        sources.jwks.retain(|uri, _| wanted.contains(uri));
        sources.jwks_faults.retain(|uri, _| wanted.contains(uri));
        sources.jwks.extend(set.map(|set| (uri, set)));
        if is_new || !is_told {
            self.metrics.count(metrics::CHANGES, &[("from", "jwks")]);
            self.behind.insert(tenant);
            self.catch_up();
        }
    }

    /// Brings into force what is not yet. What the store cannot follow stays behind for the next try.
    fn catch_up(&mut self) {
        if self.behind.is_empty() && self.withheld.is_empty() {
            return;
        }
        // A clash may end with somebody else's change, so those who wait for that come last.
        let waiting = self.withheld.difference(&self.behind);
        let names: Vec<TenantName> = self.behind.iter().chain(waiting).cloned().collect();
        match self.refresh(names) {
            Ok(()) => self.behind.clear(),
            Err(e) => {
                self.metrics.count(metrics::STORE_ERRORS, &[("reason", e.name())]);
                tracing::error!(error = %e, "a change of the files is not in force yet; it is tried again");
            }
        }
    }

    /// Compiles `names` and publishes those that may go live, all in one generation.
    fn refresh(&mut self, names: Vec<TenantName>) -> Result<(), StoreError> {
        let now = now_seconds();
        let mut next: Vec<(TenantName, Compiled)> = Vec::new();
        let mut staged = self.catalog.tenants.iter().map(|(n, v)| (n.clone(), v.claims.clone())).collect::<BTreeMap<_, _>>();
        for name in names {
            let Some(sources) = self.tenants.get(&name).cloned() else { continue };
            if sources.is_gone() {
                staged.remove(&name);
                self.forget(&name)?;
                continue;
            }
            self.admit(&sources)?;
            let ids = self.bind(&sources, now)?;
            let judged = self.judge(&sources, &ids, &staged);
            let compiled = self.settle(&name, judged);
            let live = self.catalog.tenants.get(&name);
            if self.withheld.contains(&name) && live.is_some_and(|v| *v.diagnostics == *compiled.diagnostics) {
                continue;
            }
            staged.insert(name.clone(), compiled.claims.clone());
            next.push((name, compiled));
        }
        if next.is_empty() {
            return Ok(());
        }
        let generation = self.store.next_generation()?;
        self.publish_all(next, generation);
        Ok(())
    }

    /// Ids for all services of a tenant; those of services that are gone are let go.
    fn bind(&mut self, sources: &TenantSources, now: u64) -> Result<BTreeMap<ServiceKey, ServiceId>, StoreError> {
        let keys = sources.service_keys();
        let wanted: Vec<ServiceKey> = keys.iter().cloned().collect();
        let ids = self.store.service_ids(&wanted, now)?;
        let is_certain = !sources.is_partial && sources.unreadable.is_empty();
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

    /// Compiles a tenant and compares its claims with everybody's that are live. Whoever changes is the newcomer: an edit can
    /// never push another tenant out.
    fn judge(&mut self, sources: &TenantSources, ids: &BTreeMap<ServiceKey, ServiceId>, live: &BTreeMap<TenantName, Claims>) -> Judged {
        let begun = Instant::now();
        let compiled = guarded(|| self.meanwhile(|| sources.compile(ids)));
        self.metrics.count(metrics::COMPILES, &[]);
        self.metrics.add(metrics::COMPILE_SECONDS, &[], begun.elapsed().as_secs_f64());
        let compiled = match compiled {
            Ok(compiled) => compiled,
            Err(fault) => return Judged { compiled: sources.uncompiled(), clashes: vec![*fault] },
        };
        let elders = self.order.iter().filter(|n| **n != sources.name).filter_map(|n| live.get(n));
        let found = collisions(elders.chain(std::iter::once(&compiled.claims)));
        let clashes = if found.withheld.contains(&sources.name) {
            found.diagnostics.into_iter().filter(|(tenant, _)| *tenant == sources.name).map(|(_, d)| d).collect()
        } else {
            Vec::new()
        };
        Judged { compiled, clashes }
    }

    /// What goes live of a judged tenant: itself, or, where it clashes, what was live before with the clash told.
    fn settle(&mut self, name: &TenantName, judged: Judged) -> Compiled {
        let Judged { mut compiled, clashes } = judged;
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
        self.publish_now(generation);
    }

    /// Carries out a wish, or says all that is wrong with it.
    fn grant(&mut self, tenant: &TenantName, wish: Wish, is_provider: bool, dry_run: bool) -> Result<Outcome, StoreError> {
        let now = now_seconds();
        let is_delete = matches!(wish, Wish::Delete { .. });
        let before = self.tenants.get(tenant).cloned().unwrap_or_else(|| TenantSources::new(tenant.clone()));
        let mut plan = guarded(|| decide(&before, wish, is_provider, now)).unwrap_or_else(|fault| Plan::refused(&before, *fault));
        let keys: Vec<ServiceKey> = plan.after.service_keys().into_iter().collect();
        let ids = self.store.preview_service_ids(&keys, now)?;
        let live = self.catalog.tenants.iter().map(|(n, v)| (n.clone(), v.claims.clone())).collect();
        let judged = self.judge(&plan.after, &ids, &live);
        let was = self.catalog.tenants.get(tenant).map(|v| v.diagnostics.clone()).unwrap_or_default();
        plan.judge(&was, &judged.compiled.diagnostics, is_delete);
        if !is_delete {
            plan.diagnostics.extend(judged.clashes.iter().cloned());
        }
        let accepted = !plan.is_refused();
        if accepted && !dry_run && !plan.edits.is_empty() {
            self.carry_out(&plan, judged, now)?;
        }
        let generation = self.catalog.generation;
        Ok(Outcome { accepted, generation, changes: plan.changes, diagnostics: plan.diagnostics })
    }

    /// Disk first: once the operator hears "accepted", a kill cannot take it back.
    fn carry_out(&mut self, plan: &Plan, judged: Judged, now: u64) -> Result<(), StoreError> {
        let name = plan.after.name.clone();
        self.admit(&plan.after)?;
        self.bind(&plan.after, now)?;
        let generation = self.store.next_generation()?;
        self.store.apply(&plan.edits, generation, now)?;
        self.metrics.count(metrics::CHANGES, &[("from", "api")]);
        self.tenants.insert(name.clone(), plan.after.clone());
        if plan.after.is_gone() {
            if let Err(e) = self.forget(&name) {
                // The wish is on disk and stands; only the tenant's empty place is left to clear.
                tracing::warn!(tenant = %name, error = %e, "the tenant's place is cleared later");
                self.behind.insert(name);
            }
        } else {
            let compiled = self.settle(&name, judged);
            self.publish_all(vec![(name, compiled)], generation);
        }
        Ok(())
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

/// Runs pure code on what tenants wrote. Should it panic, that is our fault and one tenant's misfortune, not the end of the writer.
fn guarded<T>(f: impl FnOnce() -> T) -> Result<T, Box<Diagnostic>> {
    let fault = || Diagnostic {
        severity: Severity::Error,
        origin: None,
        object: None,
        field: String::new(),
        problem: "the controller failed on this input, which is a fault of the controller; what was in force stays".into(),
        mend: "report it with the input; take the newest change back meanwhile".into(),
    };
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).map_err(|_| Box::new(fault()))
}

impl TenantSources {
    /// Takes over what was found in the tenant's directory. False: nothing differs.
    fn take_files(&mut self, found: Found) -> bool {
        match found {
            Found::Read(files) => {
                let was_partial = self.is_partial;
                self.is_partial &= is_unread(&files.diagnostics);
                let differs = was_partial != self.is_partial || self.files.as_ref().is_none_or(|f| !f.is_same(&files));
                self.files = Some(Arc::new(files));
                differs
            }
            Found::Gone => {
                // An empty folder that is taken away says that the tenant is to go; a full one that vanishes is an accident.
                let is_meant = self.files.as_ref().is_some_and(|f| f.say_nothing());
                self.files = self.files.take().filter(|_| !is_meant).map(|f| Arc::new(f.vanished(&self.name)));
                is_meant || self.files.is_some()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_planner_says_does_not_wait_for_a_compilation_and_others_keep_their_order() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::open(dir.path(), canal_store::Limits::default()).unwrap());
        let (publish, catalogs) = watch::channel(Arc::new(Catalog::default()));
        let client = crate::fetch::Client::new(b"").unwrap();
        let infra = canal_authority::Infra::open(&dir.path().join("infra"), now_seconds()).unwrap().of_components().unwrap();
        let trust = Arc::new(Trust::open(store.clone(), Arc::default(), infra, &Default::default(), &client, 1).unwrap());
        let mut writer = Writer::start(store, Arc::default(), Voice { publish, trust }, Reading::default(), Vec::new()).unwrap();
        let (commands, queue) = mpsc::channel(2 * COMMANDS_MAX);
        writer.queue = Some(queue);
        let tier = || {
            let (reply, answer) = oneshot::channel();
            commands.blocking_send(Command::Tier { tier: Tier::default(), reply }).unwrap();
            answer
        };
        // This is the compilation: it ends when the planner was heard.
        let told = writer.meanwhile(|| {
            commands.blocking_send(Command::Retry).unwrap();
            tier().blocking_recv().unwrap().unwrap()
        });
        assert_eq!((told, catalogs.borrow().generation), (writer.catalog.generation, told));
        assert!(matches!(writer.waiting.make_contiguous(), [Command::Retry]));
        // So many wait at most; all that come after them, the planner as well, stay in the queue, which has a bound of its own.
        (0..COMMANDS_MAX).for_each(|_| commands.blocking_send(Command::Retry).unwrap());
        let mut answer = tier();
        writer.meanwhile(|| std::thread::sleep(4 * TIER_EVERY));
        assert_eq!(writer.waiting.len(), COMMANDS_MAX);
        assert!(answer.try_recv().is_err());
        drop(commands);
        let queue = writer.queue.take().unwrap();
        writer.run(queue);
        assert!(answer.try_recv().unwrap().unwrap() > told);
    }

    #[test]
    fn a_panic_in_pure_code_becomes_a_finding() {
        assert_eq!(guarded(|| 7).ok(), Some(7));
        let fault = guarded(|| -> u8 { panic!("expected in this test") }).unwrap_err();
        assert!(fault.problem.contains("a fault of the controller"), "{fault}");
    }
}

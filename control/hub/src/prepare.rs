//! Works out what a change of one tenant comes to: reads, compiles and compares it with an immutable view, on any thread. Nobody else sees
//! anything of it until the writer commits it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use canal_compiler::claims::{Claims, collisions};
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_store::{Edit, Store, StoreError};
use canal_wire::southbound;

use crate::apply::{Plan, Wish, decide};
use crate::catalog::{Catalog, Compiled};
use crate::files::{Found, is_unread};
use crate::metrics::{self, Metrics};
use crate::shared::now_seconds;
use crate::shares::TenantLimits;
use crate::tenant::TenantSources;

/// What changes are prepared against: everything as the writer last committed it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Basis {
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) tenants: BTreeMap<TenantName, Arc<TenantSources>>,
    /// In the order in which they were first seen.
    pub(crate) order: Vec<TenantName>,
    /// Tenants whose newest state is not in force and is tried again.
    pub(crate) unsettled: BTreeSet<TenantName>,
}

impl Basis {
    /// What stands between a tenant's claims and those of others that are live. Whoever changes is the newcomer: an edit can never push
    /// another tenant out.
    pub(crate) fn clashes(&self, claims: &Claims) -> Vec<Diagnostic> {
        clashes(&self.order, |name| self.catalog.tenants.get(name).map(|view| &view.claims), claims)
    }
}

/// See [`Basis::clashes`].
pub(crate) fn clashes<'a>(
    order: &'a [TenantName],
    live: impl Fn(&TenantName) -> Option<&'a Claims>,
    claims: &'a Claims,
) -> Vec<Diagnostic> {
    let elders = order.iter().filter(|name| **name != claims.tenant).filter_map(live);
    let found = collisions(elders.chain(std::iter::once(claims)));
    if !found.withheld.contains(&claims.tenant) {
        return Vec::new();
    }
    found.diagnostics.into_iter().filter(|(tenant, _)| *tenant == claims.tenant).map(|(_, d)| d).collect()
}

/// A change of a tenant's sources that no operator wished for.
#[derive(Debug)]
pub(crate) enum SourceChange {
    /// What was found in its directory.
    Files(Found),
    /// A key set was fetched, or could not be.
    KeySet { uri: String, set: Option<String>, fault: Option<String> },
    /// What is not in force is tried again.
    Again,
}

impl SourceChange {
    /// The value of the metric label `from`.
    pub(crate) fn from(&self) -> &'static str {
        match self {
            Self::Files(_) => "files",
            Self::KeySet { .. } => "jwks",
            Self::Again => "retry",
        }
    }
}

/// A tenant's next state, compiled.
#[derive(Debug)]
pub(crate) struct Judged {
    pub(crate) compiled: Compiled,
    /// Bytes of its resources as data planes get them.
    pub(crate) bytes: u64,
    /// Why it may not go live, whatever other tenants say.
    pub(crate) faults: Vec<Diagnostic>,
}

/// The edits of a wish.
#[derive(Debug)]
pub(crate) struct WishEdits {
    pub(crate) edits: Vec<Edit>,
    pub(crate) is_delete: bool,
    /// All goes, in more than one transaction if it must.
    pub(crate) is_in_steps: bool,
}

/// A change that the writer can commit.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) name: TenantName,
    /// What it was prepared against; it holds only while the tenant's sources are still these.
    pub(crate) before: Option<Arc<TenantSources>>,
    pub(crate) after: Arc<TenantSources>,
    /// An error: the store gave no ids.
    pub(crate) judged: Result<Judged, StoreError>,
    /// `None`: no operator's wish, so that nothing is to be written.
    pub(crate) wish: Option<WishEdits>,
}

/// What came of preparing a wish.
pub(crate) struct PreparedWish {
    pub(crate) plan: Plan,
    /// `None`: it is refused, a dry run, or changes nothing.
    pub(crate) commit: Option<Prepared>,
}

/// Prepares changes. All methods take as long as the tenant is large.
pub(crate) struct Preparer {
    pub(crate) store: Arc<Store>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) limits: Arc<TenantLimits>,
}

impl Preparer {
    /// What an operator's wish comes to, or all that is wrong with it.
    pub(crate) fn wish(
        &self,
        basis: &Basis,
        tenant: &TenantName,
        wish: Wish,
        is_provider: bool,
        dry_run: bool,
    ) -> Result<PreparedWish, StoreError> {
        let now = now_seconds();
        let is_in_steps = matches!(wish, Wish::DeleteAll);
        let is_delete = is_in_steps || matches!(wish, Wish::Delete { .. });
        let before = basis.tenants.get(tenant).cloned();
        let sources = before.clone().unwrap_or_else(|| Arc::new(TenantSources::new(tenant.clone())));
        let rows = if is_in_steps { self.store.object_keys(tenant)? } else { Vec::new() };
        let mut plan = guarded(|| decide(&sources, wish, rows, is_provider, now)).unwrap_or_else(|fault| Plan::refused(&sources, *fault));
        if let Err(excess) = self.limits.configuration.check(tenant, plan.after.bytes()) {
            // Not compiled: what is too large to keep is too large to work on.
            plan.diagnostics.push(*excess);
            return Ok(PreparedWish { plan, commit: None });
        }
        let keys: Vec<ServiceKey> = plan.after.service_keys().into_iter().collect();
        let ids = self.store.preview_service_ids(&keys, now)?;
        let mut judged = self.judge(&plan.after, &ids);
        let was = basis.catalog.tenants.get(tenant).map(|v| v.diagnostics.clone()).unwrap_or_default();
        plan.judge(&was, &judged.compiled.diagnostics, is_delete);
        if !is_delete {
            plan.diagnostics.extend(judged.faults.iter().cloned());
            plan.diagnostics.extend(basis.clashes(&judged.compiled.claims));
        }
        if plan.is_refused() || dry_run || plan.edits.is_empty() {
            return Ok(PreparedWish { plan, commit: None });
        }
        // Other tenants may have taken the ids that the preview named. These are the tenant's for good.
        let bound = self.store.service_ids(&keys, now)?;
        if bound != ids {
            judged = self.judge(&plan.after, &bound);
        }
        let edits = WishEdits { edits: std::mem::take(&mut plan.edits), is_delete, is_in_steps };
        let after = Arc::new(plan.after.clone());
        Ok(PreparedWish { plan, commit: Some(Prepared { name: tenant.clone(), before, after, judged: Ok(judged), wish: Some(edits) }) })
    }

    /// What a change of a tenant's sources comes to. `None`: nothing differs.
    pub(crate) fn sources(&self, basis: &Basis, tenant: &TenantName, change: &SourceChange) -> Option<Prepared> {
        let before = basis.tenants.get(tenant).cloned();
        let mut after = before.as_ref().map_or_else(|| TenantSources::new(tenant.clone()), |b| b.as_ref().clone());
        let differs = match change {
            SourceChange::Files(found) => after.take_files(found.clone()),
            SourceChange::KeySet { uri, set, fault } => {
                let wanted = basis.catalog.tenants.get(tenant).map(|view| view.jwks.clone()).unwrap_or_default();
                before.is_some() && after.take_key_set(&wanted, uri, set.as_deref(), fault.as_deref())
            }
            SourceChange::Again => before.is_some(),
        };
        if differs && !matches!(change, SourceChange::Again) {
            self.metrics.count(metrics::CHANGES, &[("from", change.from())]);
        }
        differs.then(|| self.sources_after(before, after))
    }

    /// Compiles a tenant's sources for good: its services get their ids.
    pub(crate) fn sources_after(&self, before: Option<Arc<TenantSources>>, mut after: TenantSources) -> Prepared {
        if let Err(excess) = self.limits.configuration.check(&after.name, after.bytes()) {
            let kept = before.as_ref().map(|b| b.as_ref());
            after.refuse_files(kept, *excess);
        }
        let keys: Vec<ServiceKey> = after.service_keys().into_iter().collect();
        let judged = self.store.service_ids(&keys, now_seconds()).map(|ids| self.judge(&after, &ids));
        Prepared { name: after.name.clone(), before, after: Arc::new(after), judged, wish: None }
    }

    fn judge(&self, sources: &TenantSources, ids: &BTreeMap<ServiceKey, ServiceId>) -> Judged {
        let begun = Instant::now();
        let compiled = guarded(|| sources.compile(ids));
        self.metrics.count(metrics::COMPILES, &[]);
        self.metrics.add(metrics::COMPILE_SECONDS, &[], begun.elapsed().as_secs_f64());
        let compiled = match compiled {
            Ok(compiled) => compiled,
            Err(fault) => return Judged { compiled: sources.uncompiled(), bytes: 0, faults: vec![*fault] },
        };
        let bytes = compiled.resources.iter().map(|r| southbound::encode(r).len() as u64).sum();
        let excess = self.limits.compiled.check(&sources.name, bytes).err();
        Judged { compiled, bytes, faults: excess.map(|excess| *excess).into_iter().collect() }
    }
}

/// Runs pure code on what tenants wrote. Should it panic, that is our fault and one tenant's misfortune, not the end of the controller.
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
    pub(crate) fn take_files(&mut self, found: Found) -> bool {
        match found {
            Found::Read(files) => {
                let was_partial = self.is_partial;
                self.is_partial &= is_unread(&files.diagnostics);
                let differs = was_partial != self.is_partial || self.files.as_ref().is_none_or(|f| !f.is_same(&files));
                self.files = Some(files);
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

    /// Takes over a key set, or why there is none. False: nothing differs.
    fn take_key_set(&mut self, wanted: &BTreeSet<String>, uri: &str, set: Option<&str>, fault: Option<&str>) -> bool {
        let is_new = set.is_some_and(|set| self.jwks.get(uri).map(String::as_str) != Some(set));
        let is_told = self.jwks_faults.get(uri).map(String::as_str) == fault;
        match fault {
            Some(fault) => _ = self.jwks_faults.insert(uri.into(), fault.into()),
            None => _ = self.jwks_faults.remove(uri),
        }
        // Those that are wanted no more go, else a tenant that renames them could fill the memory.
        self.jwks.retain(|uri, _| wanted.contains(uri));
        self.jwks_faults.retain(|uri, _| wanted.contains(uri));
        self.jwks.extend(set.map(|set| (uri.to_string(), set.to_string())));
        is_new || !is_told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_in_pure_code_becomes_a_finding() {
        assert_eq!(guarded(|| 7).ok(), Some(7));
        let fault = guarded(|| -> u8 { panic!("expected in this test") }).unwrap_err();
        assert!(fault.problem.contains("a fault of the controller"), "{fault}");
    }
}

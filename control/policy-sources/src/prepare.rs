//! Prepares the change of one tenant on any thread: reads and compiles it, and compares the result
//! with an immutable [`Basis`]. The result has no effect until the catalog writer commits it. Start
//! at [`Preparer::write`] and [`Preparer::sources`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_access::{TenantLimits, now_seconds};
use canal_catalog::{Catalog, CompiledTenant};
use canal_compiler::claims::{TenantClaims, collisions};
use canal_compiler::resource_budget::CompiledSize;
use canal_controller_metrics::{self as metrics, ControllerMetrics};
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Generation, ServiceId, ServiceKey, TenantName};
use canal_store::{ObjectEdit, Store, StoreError};
use tokio::sync::oneshot;

use crate::parallel;
use crate::plan_apply::{ApplyPlan, WritePermission, WriteRequest, decide};
use crate::source::SourceState;
use crate::tenant_compiler::{TenantCompiler, TenantCompilers};
use crate::tenant_sources::TenantSources;

/// The state against which changes are prepared: everything as the catalog writer last committed
/// it.
#[derive(Debug, Clone, Default)]
pub struct Basis {
    pub catalog: Arc<Catalog>,
    pub tenants: BTreeMap<TenantName, Arc<TenantSources>>,
    /// Tenants in the order in which the controller first saw them.
    pub order: Vec<TenantName>,
    /// Tenants whose newest state is not in force and is retried.
    pub unsettled: BTreeSet<TenantName>,
}

impl Basis {
    /// Returns the conflicts of a tenant's claims with claims of other tenants that are in force.
    /// The tenant that changes yields: an edit can never push another tenant out.
    pub(crate) fn clashes(&self, claims: &TenantClaims) -> Vec<Diagnostic> {
        clashes(
            &self.order,
            |name| self.catalog.tenants.get(name).map(|view| &view.claims),
            claims,
        )
    }
}

/// Implements [`Basis::clashes`]. `live` returns the claims of a tenant that are in force.
pub fn clashes<'a>(
    order: &'a [TenantName],
    live: impl Fn(&TenantName) -> Option<&'a TenantClaims>,
    claims: &'a TenantClaims,
) -> Vec<Diagnostic> {
    let older = order
        .iter()
        .filter(|name| **name != claims.tenant)
        .filter_map(live);
    // Later claims yield to earlier ones, so the tenant that changes comes last.
    let found = collisions(older.chain(std::iter::once(claims)));
    if !found.withheld.contains(&claims.tenant) {
        return Vec::new();
    }
    found
        .diagnostics
        .into_iter()
        .filter(|(tenant, _)| *tenant == claims.tenant)
        .map(|(_, d)| d)
        .collect()
}

/// A change of a tenant's sources that no operator requested.
#[derive(Debug)]
pub(crate) enum SourceChange {
    /// New state of the tenant in a source that is read.
    State(SourceState),
    /// A key set was fetched, or could not be fetched.
    KeySet {
        uri: String,
        set: Option<String>,
        fault: Option<String>,
    },
    /// Retry of a state that is not in force.
    Again,
}

impl SourceChange {
    /// Returns the value of the metric label `from`.
    pub(crate) fn from(&self) -> &'static str {
        match self {
            Self::State(state) => state.origin().label(),
            Self::KeySet { .. } => "jwks",
            Self::Again => "retry",
        }
    }
}

/// Reason why the newest state of a tenant is not in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WithheldReason {
    /// The state conflicts with claims of another tenant that are in force.
    Clash,
    /// The objects have more bytes than the tenant's share.
    ConfigurationBytes,
    /// The compiled resources have more bytes than the tenant's share.
    CompiledBytes,
    /// The number of compiled resources exceeds the tenant's share.
    CompiledResources,
    /// The route tables that gateways build of its resources have more bytes than the tenant's
    /// share.
    RouteTableBytes,
    /// Compiling it took too long when the controller started.
    CompileTime,
    /// The controller failed on it, which is a bug in the controller.
    Panic,
}

impl WithheldReason {
    /// Returns whether the state may have been in force before the controller started: it exceeds a
    /// share of the tenant or a whole limit, or this version of the controller fails on it.
    pub fn may_have_been_in_force(self) -> bool {
        match self {
            Self::ConfigurationBytes
            | Self::CompiledBytes
            | Self::CompiledResources
            | Self::RouteTableBytes
            | Self::CompileTime
            | Self::Panic => true,
            Self::Clash => false,
        }
    }

    /// Returns the label `reason` of `canal_controller_changes_withheld_total`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Clash => "clash",
            Self::ConfigurationBytes => "configuration_bytes",
            Self::CompiledBytes => "compiled_bytes",
            Self::CompiledResources => "compiled_resources",
            Self::RouteTableBytes => "route_table_bytes",
            Self::CompileTime => "compile_time",
            Self::Panic => "panic",
        }
    }
}

/// One reason against putting a state into force, and its text for operators.
#[derive(Debug)]
pub struct Objection {
    pub reason: WithheldReason,
    pub finding: Diagnostic,
}

impl Objection {
    /// Creates an objection from a diagnostic.
    pub fn new(reason: WithheldReason, finding: Diagnostic) -> Self {
        Self { reason, finding }
    }
}

/// The compiled next state of a tenant.
#[derive(Debug)]
pub struct ValidatedTenant {
    pub compiled: CompiledTenant,
    /// Bytes and resources that the state takes of the tenant's shares.
    pub size: CompiledSize,
    /// Reasons why the state may not go live, independent of other tenants.
    pub objections: Vec<Objection>,
}

/// The edits of the store that a write request makes.
#[derive(Debug)]
pub struct WriteEdits {
    pub edits: Vec<ObjectEdit>,
    pub is_delete: bool,
    /// True if everything is deleted, if necessary in more than one transaction.
    pub is_in_steps: bool,
}

/// A change that the catalog writer can commit.
#[derive(Debug)]
pub struct Prepared {
    pub name: TenantName,
    /// Sources that the change was prepared against; it is valid only while they are still the
    /// tenant's sources.
    pub before: Option<Arc<TenantSources>>,
    pub after: Arc<TenantSources>,
    /// The compiled state, or the error if the store assigned no service IDs.
    pub validated: Result<ValidatedTenant, StoreError>,
    /// Edits to write; `None` if no operator requested the change, so that nothing is written.
    pub write: Option<WriteEdits>,
}

/// A prepared change, and where its result goes.
pub struct Commit {
    pub prepared: Prepared,
    pub reply: oneshot::Sender<Result<Committed, StoreError>>,
}

/// The result of committing a prepared change.
#[derive(Debug)]
pub enum Committed {
    /// The change is in force since this generation, or withheld with its reasons published.
    Done(Generation),
    /// The change conflicts with a claim that went live meanwhile, or a limit is full.
    Refused(Vec<Diagnostic>),
    /// The tenant's sources changed, so the change must be prepared again.
    Moved,
}

/// The result of preparing a write request.
pub(crate) struct PreparedWrite {
    pub(crate) plan: ApplyPlan,
    /// Change to commit; `None` if the request is refused, is a dry run, or changes nothing.
    pub(crate) commit: Option<Prepared>,
}

/// A tenant's sources, and the IDs of its services or the error if the store assigned none.
type BoundSources = (
    TenantSources,
    Result<BTreeMap<ServiceKey, ServiceId>, StoreError>,
);

/// Prepares changes. All methods block for a time that grows with the size of the tenant.
pub struct Preparer {
    pub store: Arc<Store>,
    pub metrics: Arc<ControllerMetrics>,
    pub limits: Arc<TenantLimits>,
    pub compilers: TenantCompilers,
}

impl Preparer {
    /// Prepares an operator's write request, or finds everything that is wrong with it.
    pub(crate) fn write(
        &self,
        basis: &Basis,
        tenant: &TenantName,
        request: &WriteRequest,
        is_provider: bool,
        dry_run: bool,
    ) -> Result<PreparedWrite, StoreError> {
        let now = now_seconds();
        let is_in_steps = matches!(request, WriteRequest::DeleteAll);
        let is_delete = is_in_steps || matches!(request, WriteRequest::Delete { .. });
        let before = basis.tenants.get(tenant).cloned();
        // The first request for a new tenant finds no sources.
        let sources = before
            .clone()
            .unwrap_or_else(|| Arc::new(TenantSources::new(tenant.clone())));
        // Only DeleteAll needs the stored keys, because it also removes rows that are not loaded.
        let rows = if is_in_steps {
            self.store.object_keys(tenant)?
        } else {
            Vec::new()
        };
        let may = WritePermission {
            is_provider,
            bytes_max: self.limits.configuration.allowance(tenant),
        };
        // A panic on the tenant's input refuses this request only.
        let mut plan = catch_panic(|| decide(&sources, request, rows, may, now))
            .unwrap_or_else(|fault| ApplyPlan::refused(&sources, *fault));
        let checked = match plan.excess_bytes {
            Some(bytes) => Err(self.limits.configuration.refuse(tenant, bytes)),
            None => self.limits.configuration.check(tenant, plan.after.bytes()),
        };
        if let Err(excess) = checked {
            // Sources that are too large to store are too large to compile.
            plan.diagnostics.push(*excess);
            return Ok(PreparedWrite { plan, commit: None });
        }
        let keys: Vec<ServiceKey> = plan.after.service_keys().into_iter().collect();
        let ids = self.store.preview_service_ids(&keys, now)?; // A refusal uses up no IDs.
        let mut validated = self.validate(&plan.after, &ids, dry_run);
        // A new tenant had no findings before.
        let was = basis
            .catalog
            .tenants
            .get(tenant)
            .map(|v| v.diagnostics.clone())
            .unwrap_or_default();
        plan.add_findings(&was, &validated.compiled.diagnostics, is_delete);
        // No objection refuses a delete, because what remains fails closed.
        if !is_delete {
            plan.diagnostics.extend(
                validated
                    .objections
                    .iter()
                    .map(|objection| objection.finding.clone()),
            );
            plan.diagnostics
                .extend(basis.clashes(&validated.compiled.claims));
        }
        if plan.is_refused() || dry_run || plan.edits.is_empty() {
            // A tenant that does not come into being must not leave a compiler.
            if before.is_none() {
                self.compilers.forget(tenant);
            }
            return Ok(PreparedWrite { plan, commit: None });
        }
        // Others may have taken the previewed IDs meanwhile. These are the tenant's permanently.
        let bound = self.store.service_ids(&keys, now)?;
        if bound != ids {
            validated = self.validate(&plan.after, &bound, dry_run);
        }
        let edits = WriteEdits {
            edits: std::mem::take(&mut plan.edits),
            is_delete,
            is_in_steps,
        };
        let after = Arc::new(plan.after.clone());
        Ok(PreparedWrite {
            plan,
            commit: Some(Prepared {
                name: tenant.clone(),
                before,
                after,
                validated: Ok(validated),
                write: Some(edits),
            }),
        })
    }

    /// Prepares a change of a tenant's sources; `None` if nothing differs.
    pub(crate) fn sources(
        &self,
        basis: &Basis,
        tenant: &TenantName,
        change: &SourceChange,
    ) -> Option<Prepared> {
        let before = basis.tenants.get(tenant).cloned();
        let mut after = before.as_ref().map_or_else(
            || TenantSources::new(tenant.clone()),
            |b| b.as_ref().clone(),
        );
        let differs = match change {
            SourceChange::State(state) => after.take_state(state.clone()),
            SourceChange::KeySet { uri, set, fault } => {
                let wanted = basis
                    .catalog
                    .tenants
                    .get(tenant)
                    .map(|view| view.jwks.clone())
                    .unwrap_or_default();
                before.is_some()
                    && after.take_key_set(&wanted, uri, set.as_deref(), fault.as_deref())
            }
            SourceChange::Again => before.is_some(),
        };
        if differs && !matches!(change, SourceChange::Again) {
            self.metrics
                .count(metrics::CHANGES, &[("from", change.from())]);
        }
        differs.then(|| self.sources_after(before, after))
    }

    /// Compiles the first sources of many tenants as [`Preparer::sources_after`] does, at most
    /// `workers` at the same time. A tenant that takes longer than `timeout` is withheld, so that it
    /// does not delay the start for all others. IDs are assigned in the order of the tenants.
    pub fn first_sources(
        self: &Arc<Self>,
        all: Vec<TenantSources>,
        workers: usize,
        timeout: Duration,
    ) -> Vec<Prepared> {
        let bound = all.into_iter().map(|sources| self.bind(None, sources));
        let (all, ids): (Vec<_>, Vec<_>) = bound.unzip();
        let all: Vec<_> = all.into_iter().map(Arc::new).collect();
        let (ids, errors): (Vec<_>, Vec<_>) = ids
            .into_iter()
            .map(|ids| ids.map_or_else(|e| (None, Some(e)), |ids| (Some(ids), None)))
            .unzip();
        let preparer = self.clone();
        let compiled = parallel::map_within(
            all.iter().cloned().zip(ids).collect(),
            workers,
            timeout,
            move |(sources, ids)| Some(preparer.validate(sources, ids.as_ref()?, false)),
        );
        let all = all.into_iter().zip(errors).zip(compiled);
        all.map(|((after, error), compiled)| Prepared {
            name: after.name.clone(),
            before: None,
            validated: match error {
                Some(error) => Err(error),
                None => {
                    let validated = compiled.flatten();
                    Ok(validated.unwrap_or_else(|| self.give_up(&after, timeout)))
                }
            },
            after,
            write: None,
        })
        .collect()
    }

    /// Returns the state of a tenant whose first compilation takes too long: its claims, which no
    /// other tenant may take before it is compiled, and nothing else.
    fn give_up(&self, sources: &TenantSources, timeout: Duration) -> ValidatedTenant {
        let finding = Diagnostic {
            severity: Severity::Error,
            code: Code::LimitExceeded,
            origin: None,
            object: None,
            field: String::new(),
            problem: format!(
                "compiling tenant {} took longer than {} s when the controller started; its data planes keep what they hold, and it is compiled again",
                sources.name,
                timeout.as_secs()
            ),
            fix: "if that lasts, delete or shorten objects".into(),
        };
        self.uncompiled(
            sources,
            Objection::new(WithheldReason::CompileTime, finding),
        )
    }

    /// Returns the state of a tenant that was not compiled: its claims, and nothing else.
    fn uncompiled(&self, sources: &TenantSources, objection: Objection) -> ValidatedTenant {
        let max = compile_allowance(&self.limits, &sources.name);
        let mut compiled = sources.uncompiled();
        // What the controller failed on may be the claims themselves; then there are none.
        if let Ok(claims) = catch_panic(|| sources.claims(max)) {
            compiled.claims = claims;
        }
        ValidatedTenant {
            compiled,
            size: CompiledSize::default(),
            objections: vec![objection],
        }
    }

    /// Compiles a tenant's changed sources and assigns IDs to its services permanently.
    pub fn sources_after(
        &self,
        before: Option<Arc<TenantSources>>,
        after: TenantSources,
    ) -> Prepared {
        let (after, ids) = self.bind(before.as_deref(), after);
        Prepared {
            name: after.name.clone(),
            before,
            validated: ids.map(|ids| self.validate(&after, &ids, false)),
            after: Arc::new(after),
            write: None,
        }
    }

    /// Checks the bytes of a tenant's changed sources and assigns IDs to its services permanently.
    fn bind(&self, before: Option<&TenantSources>, mut after: TenantSources) -> BoundSources {
        if let Err(excess) = self.limits.configuration.check(&after.name, after.bytes()) {
            // A source that is read cannot be refused like a request, so its earlier content stays
            // in force.
            tracing::warn!(tenant = %after.name, why = %excess, "sources: refused the content of a tenant's files; its earlier content stays in force");
            after.refuse_growth(before, &excess);
        }
        let keys: Vec<ServiceKey> = after.service_keys().into_iter().collect();
        let ids = self.store.service_ids(&keys, now_seconds());
        (after, ids)
    }

    /// Compiles the sources, and checks the size of the result. The work stops at the tenant's
    /// shares. A dry run has a compiler of its own: no change of the tenant waits for it, and the next
    /// change is compared with the last one and not with the dry run.
    fn validate(
        &self,
        sources: &TenantSources,
        ids: &BTreeMap<ServiceKey, ServiceId>,
        is_dry_run: bool,
    ) -> ValidatedTenant {
        let begun = Instant::now();
        let max = compile_allowance(&self.limits, &sources.name);
        let compile = |compiler: &mut TenantCompiler| sources.compile(compiler, ids, max);
        let compiled = catch_panic(|| match is_dry_run {
            true => compile(&mut TenantCompiler::default()),
            false => self.compilers.with(&sources.name, compile),
        });
        // A tenant without sources is compiled no more, so its compiler's memory is given back.
        if sources.is_gone() && !is_dry_run {
            self.compilers.forget(&sources.name);
        }
        self.metrics.count(metrics::COMPILES, &[]);
        self.metrics
            .add(metrics::COMPILE_SECONDS, &[], begun.elapsed().as_secs_f64());
        let (mut compiled, size) = match compiled {
            Ok(compiled) => compiled,
            // The fault keeps the earlier state in force.
            Err(fault) => {
                return self.uncompiled(sources, Objection::new(WithheldReason::Panic, *fault));
            }
        };
        let excess = excesses(&self.limits, &sources.name, size, max);
        // The compiler stopped at the share, so what it made is only a part.
        if !excess.is_empty() {
            compiled.resources = Vec::new();
        }
        ValidatedTenant {
            compiled,
            size,
            objections: excess,
        }
    }
}

/// Returns the size of compiled resources that a tenant's shares allow now.
pub fn compile_allowance(limits: &TenantLimits, tenant: &TenantName) -> CompiledSize {
    CompiledSize {
        bytes: limits.compiled.allowance(tenant),
        resources: limits.compiled_resources.allowance(tenant),
        route_table_bytes: limits.route_tables.allowance(tenant),
    }
}

/// Returns an objection for each share that a compilation within `max` exceeded, and counts the
/// refusals. A share that grew while the compiler worked does not help: the resources are
/// not complete.
pub fn excesses(
    limits: &TenantLimits,
    tenant: &TenantName,
    size: CompiledSize,
    max: CompiledSize,
) -> Vec<Objection> {
    let checks = [
        (
            WithheldReason::CompiledBytes,
            &limits.compiled,
            size.bytes,
            max.bytes,
        ),
        (
            WithheldReason::CompiledResources,
            &limits.compiled_resources,
            size.resources,
            max.resources,
        ),
        (
            WithheldReason::RouteTableBytes,
            &limits.route_tables,
            size.route_table_bytes,
            max.route_table_bytes,
        ),
    ];
    let exceeded = checks
        .into_iter()
        .filter(|(_, _, amount, max)| amount > max);
    exceeded
        .map(|(reason, limit, amount, _)| Objection::new(reason, *limit.refuse(tenant, amount)))
        .collect()
}

/// Runs pure code on tenants' input. A panic is a bug of the controller, but affects only that
/// tenant and does not end the controller.
fn catch_panic<T>(f: impl FnOnce() -> T) -> Result<T, Box<Diagnostic>> {
    let fault = || {
        Diagnostic {
        severity: Severity::Error,
        code: Code::InternalError,
        origin: None,
        object: None,
        field: String::new(),
        problem: "the controller failed on this input, which is a bug in the controller; the previous configuration stays in force".into(),
        fix: "report it with the input; meanwhile revert the newest change".into(),
    }
    };
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).map_err(|_| Box::new(fault()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_in_pure_code_becomes_a_finding() {
        assert_eq!(catch_panic(|| 7).ok(), Some(7));
        let fault = catch_panic(|| -> u8 { panic!("expected in this test") }).unwrap_err();
        assert!(fault.problem.contains("a bug in the controller"), "{fault}");
    }
}

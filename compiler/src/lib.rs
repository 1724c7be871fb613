//! Compiles a tenant's objects to the resources that data planes run. Pure: no files, no sockets,
//! no clock; equal input gives equal output.
//!
//! Stages: `resolve` (names, merging, conflicts) → checked → `build` (precedence) → [`ir`] →
//! [`lower`] for each target. [`oracle`] defines what the IR means. The last three are modules of
//! `canal-ir`. Broken input never fails a compile: it becomes an entry that fails closed, and a
//! diagnostic. Start at [`compile()`].

#![forbid(unsafe_code)]

mod build;
mod incremental;
mod names;
mod protocol;
mod resolve;

pub(crate) use canal_attachment::precedence;
pub(crate) use canal_diagnostics as diagnostic_collector;
pub use canal_ir::oracle_relay;
pub use canal_ir::{direct, ir, ir_ingress, limits, lower, oracle, oracle_ingress};
pub use canal_ir::{resource_budget, route_weight};
pub use canal_ir::{text, text_security};
pub use canal_scope::{claims, scope};
pub use incremental::{IncrementalCompiler, Recompiled, ResourceChanges};

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::diagnostic::Diagnostic;
use canal_model::ids::{AzName, ServiceId, ServiceKey, TenantName, TrustDomain};
use canal_model::ingress::{IngressRequests, gateway_service, istio_gateway_service};
use canal_model::policy::canal::TenantSpec;
use canal_model::policy::{Document, Object};
use canal_model::program::Resource;
use canal_model::tier::tier_service;

use claims::TenantClaims;
use diagnostic_collector::DiagnosticCollector;
use ir::Ir;
use resource_budget::{CompiledSize, ResourceBudget};

/// All input of one tenant. Tenants are compiled one by one and never see each other; see
/// [`claims::collisions`].
#[derive(Debug, Clone, Copy)]
pub struct CompileInput<'a> {
    pub tenant: &'a TenantName,
    /// Parsed documents in any order.
    pub documents: &'a [Arc<Document>],
    /// Ids of [`service_keys`]. A key must always have the same id. A service without an id is left
    /// out.
    pub service_ids: &'a BTreeMap<ServiceKey, ServiceId>,
    /// Key sets (RFC 7517, JSON) for the URIs in [`CompileOutput::jwks`], as far as they could be
    /// fetched.
    pub jwks: &'a BTreeMap<String, String>,
}

/// The result of compiling one tenant. [`IncrementalCompiler`] shares the resources with its later
/// results.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompileOutput<R = Resource> {
    /// Resources with parents first, sorted by name within a kind. Empty without a valid Tenant
    /// object.
    pub resources: Vec<R>,
    /// Diagnostics sorted by severity, errors first, then by object. Their positions are those of
    /// the objects; `canal_sources::pinpoint` finds the position of the field.
    pub diagnostics: Vec<Diagnostic>,
    pub claims: TenantClaims,
    /// Home AZs of services on the cloud tier, as far as the service or its tenant requests one.
    pub homes: BTreeMap<ServiceKey, AzName>,
    /// What the tenant asks of the tier's ingress.
    pub ingress: IngressRequests,
    /// Tenants and trust domains with which this tenant declares a federation. It takes effect once
    /// the other tenant declares it too.
    pub federations: BTreeSet<(TenantName, TrustDomain)>,
    /// URIs of the key sets that are needed: `https://`, `http://`, or `file:` and a path relative
    /// to the tenant's source folder.
    pub jwks: BTreeSet<String>,
    /// Size of the resources. The bytes are a lower bound, because the compiler encodes nothing.
    pub size: CompiledSize,
    /// True if the resources exceed their limit. Compiling stopped there, and `resources` is empty.
    pub is_stopped: bool,
}

impl CompileOutput {
    /// Returns the same result with resources that can be shared.
    fn into_shared(self) -> CompileOutput<Arc<Resource>> {
        CompileOutput {
            resources: self.resources.into_iter().map(Arc::new).collect(),
            diagnostics: self.diagnostics,
            claims: self.claims,
            homes: self.homes,
            ingress: self.ingress,
            federations: self.federations,
            jwks: self.jwks,
            size: self.size,
            is_stopped: self.is_stopped,
        }
    }
}

/// Returns the services for which [`compile()`] needs ids. They include those that stand for
/// Gateways, and the tier's own service if the tenant is on the cloud tier.
pub fn service_keys(tenant: &TenantName, documents: &[Arc<Document>]) -> BTreeSet<ServiceKey> {
    let keys = documents
        .iter()
        .filter_map(|document| match &document.object {
            Object::Service(service) => {
                let metadata = &service.metadata;
                Some(ServiceKey {
                    tenant: tenant.clone(),
                    namespace: metadata.namespace.clone(),
                    name: metadata.name.clone(),
                })
            }
            Object::Gateway(gateway) => {
                let metadata = &gateway.metadata;
                gateway_service(tenant, &metadata.namespace, &metadata.name)
            }
            Object::IstioGateway(gateway) => {
                let metadata = &gateway.metadata;
                istio_gateway_service(tenant, &metadata.namespace, &metadata.name)
            }
            Object::Tenant(own) if has_tier_service(&own.spec) => Some(tier_service(tenant)),
            _ => None,
        });
    keys.collect()
}

/// Returns whether the tier has a service of its own in a tenant. Clients of an ingress network are
/// outside the mesh: they dial no pods, and ask other name servers.
pub(crate) fn has_tier_service(spec: &TenantSpec) -> bool {
    !spec.gateway_cidrs.is_empty() && !spec.ingress_network
}

/// Builds the IR of a tenant as [`build_ir`] does, and stops as soon as its resources exceed `max`,
/// as [`compile_within`] does. With the same `max` both close the same listeners.
///
/// # Errors
/// The resources exceed `max`. The error is their size when the work stopped.
pub fn build_ir_within(
    input: &CompileInput<'_>,
    max: CompiledSize,
) -> Result<(Option<Ir>, Vec<Diagnostic>), CompiledSize> {
    let mut report = DiagnosticCollector::default();
    let mut budget = ResourceBudget::new(max);
    let checked = resolve::resolve(input, &mut budget, &mut report);
    let ir = build::build(checked, &mut budget, &mut report);
    match budget.is_exceeded() {
        true => Err(budget.used()),
        false => Ok((ir, report.into_sorted())),
    }
}

/// Compiles one tenant. Compiling never fails: broken input becomes an entry that fails closed, and
/// a diagnostic.
pub fn compile(input: &CompileInput<'_>) -> CompileOutput {
    compile_within(input, CompiledSize::UNLIMITED)
}

/// Compiles one tenant as [`compile()`] does, and stops as soon as its resources exceed `max`. The
/// memory that it used until then is a small multiple of `max` and of the size of the objects,
/// regardless of their content.
pub fn compile_within(input: &CompileInput<'_>, max: CompiledSize) -> CompileOutput {
    let (ir, budget, report) = ir_within(input, max);
    output_of(input, ir, &budget, report)
}

/// Builds the IR, and stops as soon as its resources exceed `max`.
fn ir_within(
    input: &CompileInput<'_>,
    max: CompiledSize,
) -> (Option<Ir>, ResourceBudget, DiagnosticCollector) {
    let mut report = DiagnosticCollector::default();
    let mut budget = ResourceBudget::new(max);
    let checked = resolve::resolve(input, &mut budget, &mut report);
    let ir = build::build(checked, &mut budget, &mut report);
    (ir, budget, report)
}

/// Lowers the IR.
fn output_of(
    input: &CompileInput<'_>,
    ir: Option<Ir>,
    budget: &ResourceBudget,
    report: DiagnosticCollector,
) -> CompileOutput {
    let diagnostics = report.into_sorted();
    let claims = ir.as_ref().map_or_else(
        || TenantClaims {
            tenant: input.tenant.clone(),
            isolation: None,
            gateways: Vec::new(),
        },
        Ir::claims,
    );
    let homes = ir.as_ref().map(|ir| ir.homes.clone()).unwrap_or_default();
    let ingress = ir
        .as_ref()
        .map(|ir| ingress_of(input, ir))
        .unwrap_or_default();
    let (federations, jwks) = ir
        .as_ref()
        .map(|ir| (ir.security.federations.clone(), ir.security.jwks.clone()))
        .unwrap_or_default();
    let mut resources = ir.map(lower::tenant).unwrap_or_default();
    let size = size_of(budget.used(), resources.len());
    let is_stopped = size.exceeds(&budget.limit());
    if is_stopped {
        resources = Vec::new();
    }
    CompileOutput {
        resources,
        diagnostics,
        claims,
        homes,
        ingress,
        federations,
        jwks,
        size,
        is_stopped,
    }
}

/// Returns the size of so many resources, of which `used` was counted. Not every kind of resource is
/// counted while it is made; those that are not grow with the objects only.
fn size_of(used: CompiledSize, resources: usize) -> CompiledSize {
    CompiledSize {
        resources: used.resources.max(resources as u64),
        ..used
    }
}

/// Builds the IR of a tenant, for the oracle and for golden tests; `None` without a valid Tenant
/// object.
pub fn build_ir(input: &CompileInput<'_>) -> (Option<Ir>, Vec<Diagnostic>) {
    let (ir, _, report) = ir_within(input, CompiledSize::UNLIMITED);
    (ir, report.into_sorted())
}

fn ingress_of(input: &CompileInput<'_>, ir: &Ir) -> IngressRequests {
    let is_network = |document: &Arc<Document>| match &document.object {
        Object::Tenant(own) => {
            own.metadata.name.as_str() == input.tenant.as_str() && own.spec.ingress_network
        }
        _ => false,
    };
    let gateways = ir.ingress.iter();
    IngressRequests {
        is_network: input.documents.iter().any(is_network),
        addresses: gateways
            .map(|gateway| (gateway.service.clone(), gateway.addresses.clone()))
            .collect(),
    }
}

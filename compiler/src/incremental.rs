//! Compiles a tenant again after a change, and compiles only what depends on the change. The result
//! is equal to that of [`compile_within`]. Changed routes of Services are compiled with the routes
//! that are connected with them ([`RouteGraph`]); after every other change the whole tenant is
//! compiled. Start at [`IncrementalCompiler::compile`]; `docs/design/0012-incremental-compile.md`
//! says why the results are equal.
//!
//! [`compile_within`]: crate::compile_within

mod document_changes;
mod route_change;
mod route_graph;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::Document;
use canal_model::program::Resource;

use crate::limits::{DIAGNOSTICS_OF_SEVERITY_MAX, OBJECTS_PER_TENANT_MAX};
use crate::resolve::RouteReferences;
use crate::resource_budget::CompiledSize;
use crate::{CompileInput, CompileOutput, ir_within, lower, output_of};
use document_changes::DocumentChanges;
use route_change::{RouteBasis, RouteChange, route_of};
use route_graph::RouteGraph;

/// Compiles one tenant again and again, and reuses what did not change.
#[derive(Default)]
pub struct IncrementalCompiler {
    last: Option<LastCompile>,
}

/// A result, and how it differs from the one before.
#[derive(Debug)]
pub enum Recompiled<'c> {
    /// The whole tenant was compiled, so every resource may differ.
    Everything(&'c CompileOutput<Arc<Resource>>),
    /// Only routes were compiled. Nothing changed but these resources, the size and the diagnostics.
    Routes(&'c CompileOutput<Arc<Resource>>, ResourceChanges),
}

/// The resources in which a result differs from the one before.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ResourceChanges {
    /// Resources that are gone or were replaced.
    pub removed: Vec<Arc<Resource>>,
    /// Resources that are new or replace others.
    pub added: Vec<Arc<Resource>>,
}

impl<'c> Recompiled<'c> {
    /// Returns the result of this compile.
    pub fn output(&self) -> &'c CompileOutput<Arc<Resource>> {
        match self {
            Self::Everything(output) | Self::Routes(output, _) => output,
        }
    }
}

/// The last compile: its input, its result, and what of it later compiles need.
struct LastCompile {
    tenant: TenantName,
    documents: Vec<Arc<Document>>,
    service_ids: BTreeMap<ServiceKey, ServiceId>,
    jwks: BTreeMap<String, String>,
    max: CompiledSize,
    output: CompileOutput<Arc<Resource>>,
    /// `None` if the next compile must be one of the whole tenant.
    basis: Option<RouteBasis>,
}

impl IncrementalCompiler {
    /// Compiles a tenant as [`compile_within`](crate::compile_within) does. The documents are compared
    /// with those of the last call: a document that is the same allocation did not change.
    pub fn compile(&mut self, input: &CompileInput<'_>, max: CompiledSize) -> Recompiled<'_> {
        // If compiling panics, the next call begins anew.
        let mut last = self.last.take();
        let changes = last.as_mut().and_then(|last| last.change(input, max));
        let next = match (last, &changes) {
            (Some(last), Some(_)) => last,
            _ => LastCompile::new(input, max),
        };
        let output = &self.last.insert(next).output;
        match changes {
            None => Recompiled::Everything(output),
            Some(changes) => Recompiled::Routes(output, changes),
        }
    }
}

impl LastCompile {
    /// Compiles the whole tenant.
    fn new(input: &CompileInput<'_>, max: CompiledSize) -> Self {
        let (ir, budget, report) = ir_within(input, max);
        let parts = ir.as_ref().map(|ir| {
            let services = ir.services.iter();
            let services = services.map(|(key, it)| (key.clone(), it.service.clone()));
            (services.collect(), ir.direct.clone())
        });
        let mut last = Self {
            tenant: input.tenant.clone(),
            documents: input.documents.to_vec(),
            service_ids: input.service_ids.clone(),
            jwks: input.jwks.clone(),
            max,
            output: output_of(input, ir, &budget, report).into_shared(),
            basis: None,
        };
        let is_reusable = !budget.has_refused() && last.is_reusable();
        last.basis = parts
            .filter(|_| is_reusable)
            .and_then(|(services, direct)| {
                let graph = RouteGraph::new(input.tenant, input.documents)?;
                let resources = &last.output.resources;
                let begin = resources.partition_point(|it| lower::precedes_routes(it));
                let count = resources[begin..].partition_point(|it| route_of(it).is_some());
                Some(RouteBasis {
                    references: RouteReferences::new(input, services),
                    graph,
                    direct,
                    used: budget.used(),
                    comparisons: budget.comparisons(),
                    routes: begin..begin + count,
                })
            });
        last
    }

    /// Returns whether nothing was left out because of a limit, or of another object with the same
    /// key. What is left out depends on all objects.
    fn is_reusable(&self) -> bool {
        let keys = self.documents.iter().map(|document| {
            let metadata = document.object.metadata();
            (document.object.kind(), &metadata.namespace, &metadata.name)
        });
        let keys: HashSet<_> = keys.collect();
        !self.output.is_stopped
            && keys.len() == self.documents.len()
            && self.documents.len() <= OBJECTS_PER_TENANT_MAX
            && are_all_listed(&self.output.diagnostics)
    }

    /// Compiles what depends on the differences to the last input. Returns `None`, and changes
    /// nothing, if the whole tenant must be compiled.
    fn change(&mut self, input: &CompileInput<'_>, max: CompiledSize) -> Option<ResourceChanges> {
        let basis = self.basis.as_mut()?;
        let is_same = self.tenant == *input.tenant
            && self.max == max
            && self.jwks == *input.jwks
            && self.service_ids == *input.service_ids;
        if !is_same || input.documents.len() > OBJECTS_PER_TENANT_MAX {
            return None;
        }
        let documents = DocumentChanges::between(&self.documents, input.documents)?;
        let mut changes = ResourceChanges::default();
        if !documents.changed.is_empty() {
            let change = RouteChange::new(basis, input.tenant, &documents, &self.output, max)?;
            let diagnostics = change.diagnostics(&self.output.diagnostics);
            if diagnostics.as_deref().is_some_and(|it| !are_all_listed(it)) {
                return None;
            }
            self.output.size = change.size;
            if let Some(diagnostics) = diagnostics {
                self.output.diagnostics = diagnostics;
            }
            changes = change.apply(basis, &mut self.output.resources);
            basis.graph.apply(input.tenant, &documents);
        }
        documents.apply(&mut self.documents, input.documents);
        Some(changes)
    }
}

/// Returns whether no diagnostic can have been left out because of their number.
fn are_all_listed(diagnostics: &[Diagnostic]) -> bool {
    [Severity::Error, Severity::Warning]
        .into_iter()
        .all(|severity| {
            let own = diagnostics.iter().filter(|it| it.severity == severity);
            own.count() < DIAGNOSTICS_OF_SEVERITY_MAX
        })
}

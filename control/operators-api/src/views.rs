//! The messages of the operators' API that show state: objects, diagnostics and tenants. Nothing is
//! decided here, and nothing is hidden: the caller passes only what the operator may see.

use canal_catalog::{CatalogObject, TenantCatalog};
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::ids::TenantName;
use canal_model::program::{OutboundTrafficPolicy, Resource, ResourceKind};
use canal_wire::api;

/// Returns an object as written, with its origin and its diagnostics.
pub(crate) fn object(l: &CatalogObject, view: &TenantCatalog) -> api::Object {
    let key = l.document.object.key();
    api::Object {
        api_version: api_version(l),
        kind: key.kind.to_string(),
        namespace: key.namespace.to_string(),
        name: key.name.to_string(),
        origin: l.location().into(),
        yaml: l.document.shown_text().to_owned(),
        diagnostics: view.status_of(&key).map(diagnostic).collect(),
    }
}

/// Returns `apiVersion` as written in the object's text, because the typed object does not store
/// it. The fallback is the first version of the kind.
fn api_version(l: &CatalogObject) -> String {
    let written = l
        .document
        .text
        .lines()
        .find_map(|line| line.strip_prefix("apiVersion:"));
    let written = written
        .map(|v| v.trim().trim_matches(['"', '\'']).to_string())
        .filter(|v| !v.is_empty());
    written.unwrap_or_else(|| l.document.object.kind().api_versions()[0].into())
}

/// Converts a diagnostic to its form in the operators' API.
pub(crate) fn diagnostic(d: &Diagnostic) -> api::Diagnostic {
    let (file, line, column) = d
        .origin
        .as_ref()
        .map(|o| (o.file.to_string(), o.line, o.column))
        .unwrap_or_default();
    api::Diagnostic {
        severity: match d.severity {
            Severity::Error => api::Severity::Error,
            Severity::Warning => api::Severity::Warning,
        }
        .into(),
        file,
        line,
        column,
        object: d
            .object
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
        field: d.field.clone(),
        problem: d.problem.clone(),
        fix: d.fix.clone(),
        code: d.code.to_string(),
    }
}

/// Returns the numbers of one tenant.
pub(crate) fn tenant_status(name: &TenantName, view: &TenantCatalog) -> api::TenantStatus {
    let ready = view
        .of(ResourceKind::Workload)
        .filter(|e| matches!(e.resource.as_ref(), Resource::Workload(w) if w.ready))
        .count();
    let findings = |severity| {
        view.diagnostics
            .iter()
            .filter(|d| d.severity == severity)
            .count() as u64
    };
    api::TenantStatus {
        tenant: name.to_string(),
        services: view.count(ResourceKind::Service) as u64,
        workloads: view.count(ResourceKind::Workload) as u64,
        workloads_ready: ready as u64,
        routes: view.count(ResourceKind::Route) as u64,
        errors: findings(Severity::Error),
        warnings: findings(Severity::Warning),
        outside_passes: view
            .of(ResourceKind::Tenant)
            .any(|e| matches!(e.resource.as_ref(), Resource::Tenant(t) if t.outbound_traffic_policy == OutboundTrafficPolicy::Passthrough)),
    }
}

//! From what tenants say to what data planes run. Pure: no files, no sockets, no clock; the same input gives the same output.

#![forbid(unsafe_code)]

pub mod claims;
pub mod scope;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::diagnostic::Diagnostic;
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::{Document, Object};
use canal_model::program::Resource;

use claims::Claims;

/// Everything one tenant says. Tenants are compiled one by one and never see each other; see [`claims::collisions`].
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    pub tenant: &'a TenantName,
    /// In any order.
    pub documents: &'a [Arc<Document>],
    /// An id for each of [`service_keys`], always the same for the same key.
    pub service_ids: &'a BTreeMap<ServiceKey, ServiceId>,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Parents first, sorted by name within a kind.
    pub resources: Vec<Resource>,
    /// Sorted; origins are those of the objects (see `canal_sources::pinpoint` for the field's own).
    pub diagnostics: Vec<Diagnostic>,
    pub claims: Claims,
}

/// The services for which `compile` needs ids.
pub fn service_keys(tenant: &TenantName, documents: &[Arc<Document>]) -> BTreeSet<ServiceKey> {
    let services = documents.iter().filter(|document| matches!(document.object, Object::Service(_)));
    services
        .map(|document| {
            let metadata = document.object.metadata();
            ServiceKey { tenant: tenant.clone(), namespace: metadata.namespace.clone(), name: metadata.name.clone() }
        })
        .collect()
}

/// Compiles one tenant. Never fails: what is broken becomes an entry that fails closed, and a diagnostic.
pub fn compile(input: &Input<'_>) -> Output {
    Output {
        resources: Vec::new(),
        diagnostics: Vec::new(),
        claims: Claims { tenant: input.tenant.clone(), isolation: None, gateways: Vec::new() },
    }
}

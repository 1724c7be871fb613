//! From what tenants say to what data planes run. Pure: no files, no sockets, no clock; the same input gives the same output.
//!
//! `resolve` (names, merging, conflicts) → checked → `build` (precedence) → [`ir`] → [`lower`] for each target; [`oracle`] says
//! what the IR means. Broken input never fails a compile: it becomes an entry that refuses, and a diagnostic.

#![forbid(unsafe_code)]

mod build;
pub mod claims;
#[cfg(feature = "generate")]
pub mod generate;
#[cfg(feature = "generate")]
pub mod generate_authorization;
pub mod ir;
pub mod limits;
pub mod lower;
mod names;
pub mod oracle;
pub mod oracle_authorization;
pub mod oracle_journey;
mod pattern;
mod precedence;
mod protocol;
mod report;
mod resolve;
pub mod scope;
pub mod text;
pub mod text_security;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::diagnostic::Diagnostic;
use canal_model::ids::{AzName, ServiceId, ServiceKey, TenantName, TrustDomain};
use canal_model::policy::{Document, Object};
use canal_model::program::Resource;
use canal_model::tier::tier_service;

use claims::{Claims, GatewayClaim, Isolation};
use ir::Ir;
use report::Report;

/// Everything one tenant says. Tenants are compiled one by one and never see each other; see [`claims::collisions`].
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    pub tenant: &'a TenantName,
    /// In any order.
    pub documents: &'a [Arc<Document>],
    /// An id for each of [`service_keys`], always the same for the same key. A service without one is left out.
    pub service_ids: &'a BTreeMap<ServiceKey, ServiceId>,
    /// The key sets (RFC 7517, JSON) of [`Output::jwks`], by URI, as far as they could be had.
    pub jwks: &'a BTreeMap<String, String>,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Parents first, sorted by name within a kind. Empty without a valid Tenant object.
    pub resources: Vec<Resource>,
    /// Errors first, then by object. Origins are those of the objects; `canal_sources::pinpoint` finds the field's own.
    pub diagnostics: Vec<Diagnostic>,
    pub claims: Claims,
    /// The AZs in which services of the cloud tier want to live: those that say so, or whose tenant does.
    pub homes: BTreeMap<ServiceKey, AzName>,
    /// The tenants and trust domains with which this one says that it federates. It is in force once the other says so too.
    pub federations: BTreeSet<(TenantName, TrustDomain)>,
    /// The URIs whose key sets are needed: `https://`, `http://`, or `file:` and a path relative to the tenant's source folder.
    pub jwks: BTreeSet<String>,
}

/// The services for which [`compile`] needs ids; the tier's own service too, where the tenant is on the cloud tier.
pub fn service_keys(tenant: &TenantName, documents: &[Arc<Document>]) -> BTreeSet<ServiceKey> {
    let keys = documents.iter().filter_map(|document| match &document.object {
        Object::Service(service) => {
            let metadata = &service.metadata;
            Some(ServiceKey { tenant: tenant.clone(), namespace: metadata.namespace.clone(), name: metadata.name.clone() })
        }
        Object::Tenant(own) if !own.spec.gateway_cidrs.is_empty() => Some(tier_service(tenant)),
        _ => None,
    });
    keys.collect()
}

/// Compiles one tenant. Never fails: what is broken becomes an entry that fails closed, and a diagnostic.
pub fn compile(input: &Input<'_>) -> Output {
    let (ir, diagnostics) = build_ir(input);
    let claims = claims_of(input.tenant, ir.as_ref());
    let homes = ir.as_ref().map(|ir| ir.homes.clone()).unwrap_or_default();
    let (federations, jwks) = ir.as_ref().map(|ir| (ir.security.federations.clone(), ir.security.jwks.clone())).unwrap_or_default();
    Output { resources: ir.map(lower::gateway).unwrap_or_default(), diagnostics, claims, homes, federations, jwks }
}

/// The tenant before it is lowered, for the oracle and for golden tests; `None` without a valid Tenant object.
pub fn build_ir(input: &Input<'_>) -> (Option<Ir>, Vec<Diagnostic>) {
    let mut report = Report::default();
    let checked = resolve::resolve(input, &mut report);
    (build::build(checked), report.into_sorted())
}

fn claims_of(tenant: &TenantName, ir: Option<&Ir>) -> Claims {
    let isolation = ir.map(|ir| Isolation {
        vni: ir.tenant.vni,
        trust_domain: ir.tenant.trust_domain.clone(),
        pod_cidrs: ir.tenant.pod_cidrs.clone(),
        gateway_cidrs: ir.tenant.gateway_cidrs.clone(),
    });
    let gateways = ir.map(|ir| ir.gateways.as_slice()).unwrap_or_default();
    let gateways = gateways.iter().map(|g| GatewayClaim { replica: g.replica.clone(), addresses: g.addresses.clone() }).collect();
    Claims { tenant: tenant.clone(), isolation, gateways }
}

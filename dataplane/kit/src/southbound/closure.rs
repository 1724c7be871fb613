//! Which tenants a data plane must not serve: those whose security resources are not exactly what the controller's manifest says. Pure; the
//! data plane itself refuses by [`State::closed`](super::State::closed).
//!
//! A tenant is closed at once when one of its security resources is refused, and it opens only when a manifest arrives that what is held
//! agrees with. Between the responses of one batch nothing is compared, so that an ordinary change closes nobody.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::identity::PROVIDER;
use canal_model::ids::TenantName;
use canal_model::program::{Kind, Manifest, Resource};
use canal_wire::southbound::manifest;
use serde::Serialize;

use super::state::State;

/// Why a data plane serves nothing of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Closure {
    pub cause: ClosureCause,
    /// Names what is refused or how much is missing, for operators.
    pub detail: String,
}

/// The kinds of [`Closure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ClosureCause {
    /// The controller has not sealed the tenant's security resources yet.
    NoManifest,
    /// What is held is not what the manifest seals.
    ManifestMismatch,
    /// A security resource of the tenant was refused.
    RefusedResource,
}

impl ClosureCause {
    /// The label `cause`.
    pub fn name(self) -> &'static str {
        match self {
            ClosureCause::NoManifest => "no_manifest",
            ClosureCause::ManifestMismatch => "manifest_mismatch",
            ClosureCause::RefusedResource => "refused_resource",
        }
    }
}

/// Closed tenants with the reason.
pub type ClosedTenants = BTreeMap<TenantName, Closure>;

/// The tenant that a security resource of this name is of; `None`: it is the provider's.
pub(super) fn tenant_of(name: &str) -> Option<TenantName> {
    let first = name.split('/').next().filter(|first| *first != PROVIDER)?;
    TenantName::new(first).ok()
}

impl State {
    /// Tenants of which this data plane must serve nothing, with the reason. Empty where no manifests are subscribed to.
    pub fn closed(&self) -> &std::sync::Arc<ClosedTenants> {
        &self.closed
    }

    fn manifest(&self, tenant: &TenantName) -> Option<&Manifest> {
        match self.get(Kind::Manifest, tenant.as_str()).map(|r| &**r) {
            Some(Resource::Manifest(m)) => Some(m),
            _ => None,
        }
    }

    fn has_manifest(&self, tenant: &TenantName) -> bool {
        self.manifest(tenant).is_some()
    }

    fn close(&mut self, tenant: TenantName, cause: ClosureCause, detail: String) {
        std::sync::Arc::make_mut(&mut self.closed).insert(tenant, Closure { cause, detail });
    }

    fn open(&mut self, tenant: &TenantName) {
        if self.closed.contains_key(tenant) {
            std::sync::Arc::make_mut(&mut self.closed).remove(tenant);
        }
    }

    /// Closes the tenant of a refused security resource.
    pub(super) fn close_refused(&mut self, kind: Kind, name: &str, why: &str) {
        if kind.is_security()
            && let Some(tenant) = tenant_of(name)
        {
            self.close(tenant, ClosureCause::RefusedResource, format!("{} {name} is refused: {why}", super::kind_name(kind)));
        }
    }

    /// Draws the conclusions from a response of `kind` that named `tenants`.
    pub(super) fn review(&mut self, kind: Kind, tenants: &BTreeSet<TenantName>, subscribed: &[Kind]) {
        match kind {
            Kind::Manifest => self.compare(tenants, subscribed),
            // A tenant without manifest is closed until its first one comes; one that is gone is not closed but unknown.
            Kind::Tenant => {
                for tenant in tenants.iter().filter(|tenant| !self.has_manifest(tenant)).cloned().collect::<Vec<_>>() {
                    let is_known = self.get(Kind::Tenant, tenant.as_str()).is_some();
                    match is_known {
                        true if self.closed.contains_key(&tenant) => {}
                        true => self.close_without_manifest(tenant),
                        false => self.open(&tenant),
                    }
                }
            }
            _ => {}
        }
    }

    /// Compares everything, as is needed after a boot from disk.
    pub(super) fn review_all(&mut self, subscribed: &[Kind]) {
        let named = [Kind::Tenant, Kind::Manifest].into_iter().flat_map(|kind| self.of(kind));
        let tenants = named.filter_map(|r| r.tenant().cloned()).collect();
        self.compare(&tenants, subscribed);
    }

    fn close_without_manifest(&mut self, tenant: TenantName) {
        self.close(tenant, ClosureCause::NoManifest, "the controller has sent no manifest of the tenant yet".into());
    }

    /// Opens tenants of which is held exactly what their manifests seal, and closes the others.
    fn compare(&mut self, tenants: &BTreeSet<TenantName>, subscribed: &[Kind]) {
        let held = self.sealed(tenants, subscribed);
        for tenant in tenants {
            let Some(wanted) = self.manifest(tenant).cloned() else {
                match self.get(Kind::Tenant, tenant.as_str()).is_some() {
                    true => self.close_without_manifest(tenant.clone()),
                    false => self.open(tenant),
                }
                continue;
            };
            let has = held.get(tenant).cloned().unwrap_or_else(|| manifest::compute(tenant, []));
            if has == wanted {
                self.open(tenant);
            } else if self.closed.get(tenant).is_none_or(|c| c.cause != ClosureCause::RefusedResource) {
                let detail = format!("holds {} security resources, and the manifest seals {} or others", has.count, wanted.count);
                self.close(tenant.clone(), ClosureCause::ManifestMismatch, detail);
            }
        }
    }

    /// The manifests of what is held of `tenants`.
    fn sealed(&self, tenants: &BTreeSet<TenantName>, subscribed: &[Kind]) -> BTreeMap<TenantName, Manifest> {
        let mut held: BTreeMap<&TenantName, Vec<(Kind, &str, &str)>> = BTreeMap::new();
        for kind in Kind::SECURITY.into_iter().filter(|kind| subscribed.contains(kind)) {
            for (name, h) in self.held(kind) {
                if let Some(tenant) = h.resource.tenant().filter(|t| tenants.contains(*t)) {
                    held.entry(tenant).or_default().push((kind, name, &h.version));
                }
            }
        }
        held.into_iter().map(|(tenant, list)| (tenant.clone(), manifest::compute(tenant, list))).collect()
    }
}

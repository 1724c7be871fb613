//! Closed tenants: a data plane must not serve a tenant whose security resources differ from the
//! controller's manifest. The code is pure. The data plane itself refuses traffic according to
//! [`ResourceState::closed`].
//!
//! A tenant is closed at once when one of its security resources is refused. It opens only when a
//! manifest arrives that matches the state. Nothing is compared between the responses of one batch,
//! so that an ordinary change closes no tenant.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::ids::TenantName;
use canal_model::program::{Manifest, Resource, ResourceKind};
use canal_wire::southbound::manifest;
use serde::Serialize;

use super::ResourceState;

/// Reason why a data plane serves nothing of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Closure {
    pub cause: ClosureCause,
    /// Names the refused resource or the number of missing ones, for operators.
    pub detail: String,
}

/// Possible causes of a [`Closure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ClosureCause {
    /// The controller has not sent a manifest of the tenant's security resources yet.
    NoManifest,
    /// The state differs from the manifest.
    ManifestMismatch,
    /// A security resource of the tenant was refused.
    RefusedResource,
}

impl ClosureCause {
    /// Returns the label value of `cause`.
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

impl ResourceState {
    /// Returns the tenants of which this data plane must serve nothing, with the reason. It is
    /// empty if manifests are not subscribed to.
    pub fn closed(&self) -> &std::sync::Arc<ClosedTenants> {
        &self.closed
    }

    fn manifest(&self, tenant: &TenantName) -> Option<&Manifest> {
        match self
            .get(ResourceKind::Manifest, tenant.as_str())
            .map(|r| &**r)
        {
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
    pub(crate) fn close_refused(&mut self, kind: ResourceKind, name: &str, why: &str) {
        if kind.is_security()
            && let Some(tenant) = kind.owner_of(name)
        {
            self.close(
                tenant,
                ClosureCause::RefusedResource,
                format!("{} {name} is refused: {why}", kind.label()),
            );
        }
    }

    /// Updates the closed tenants after a response of `kind` that named `tenants`.
    pub(crate) fn review(
        &mut self,
        kind: ResourceKind,
        tenants: &BTreeSet<TenantName>,
        subscribed: &[ResourceKind],
    ) {
        match kind {
            ResourceKind::Manifest => self.compare(tenants, subscribed),
            // A tenant without a manifest is closed until its first one arrives. A removed tenant
            // is not closed but unknown.
            ResourceKind::Tenant => {
                for tenant in tenants
                    .iter()
                    .filter(|tenant| !self.has_manifest(tenant))
                    .cloned()
                    .collect::<Vec<_>>()
                {
                    let is_known = self.get(ResourceKind::Tenant, tenant.as_str()).is_some();
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

    /// Compares all tenants, which is necessary after a boot from disk.
    pub(crate) fn review_all(&mut self, subscribed: &[ResourceKind]) {
        let named = [ResourceKind::Tenant, ResourceKind::Manifest]
            .into_iter()
            .flat_map(|kind| self.of(kind));
        let tenants = named.filter_map(|r| r.tenant().cloned()).collect();
        self.compare(&tenants, subscribed);
    }

    fn close_without_manifest(&mut self, tenant: TenantName) {
        self.close(
            tenant,
            ClosureCause::NoManifest,
            "the controller has sent no manifest of the tenant yet".into(),
        );
    }

    /// Opens the tenants whose resources match their manifests exactly, and closes the others.
    fn compare(&mut self, tenants: &BTreeSet<TenantName>, subscribed: &[ResourceKind]) {
        let sealed = self.sealed(tenants, subscribed);
        for tenant in tenants {
            let Some(wanted) = self.manifest(tenant).cloned() else {
                match self.get(ResourceKind::Tenant, tenant.as_str()).is_some() {
                    true => self.close_without_manifest(tenant.clone()),
                    false => self.open(tenant),
                }
                continue;
            };
            let has = sealed
                .get(tenant)
                .cloned()
                .unwrap_or_else(|| manifest::compute(tenant, []));
            if has == wanted {
                self.open(tenant);
            // A refused resource is the more precise cause, so it is not overwritten.
            } else if self
                .closed
                .get(tenant)
                .is_none_or(|c| c.cause != ClosureCause::RefusedResource)
            {
                let detail = format!(
                    "has {} security resources, but the manifest lists {} or others",
                    has.count, wanted.count
                );
                self.close(tenant.clone(), ClosureCause::ManifestMismatch, detail);
            }
        }
    }

    /// Computes the manifests of the present resources of `tenants`.
    fn sealed(
        &self,
        tenants: &BTreeSet<TenantName>,
        subscribed: &[ResourceKind],
    ) -> BTreeMap<TenantName, Manifest> {
        let mut by_tenant: BTreeMap<&TenantName, Vec<(ResourceKind, &str, &str)>> = BTreeMap::new();
        for kind in ResourceKind::security().filter(|kind| subscribed.contains(kind)) {
            for (name, h) in self.resources_of(kind) {
                if let Some(tenant) = h.resource.tenant().filter(|t| tenants.contains(*t)) {
                    by_tenant
                        .entry(tenant)
                        .or_default()
                        .push((kind, name, &h.version));
                }
            }
        }
        by_tenant
            .into_iter()
            .map(|(tenant, list)| (tenant.clone(), manifest::compute(tenant, list)))
            .collect()
    }
}

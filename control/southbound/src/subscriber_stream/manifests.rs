//! Manifests that seal a batch: one per tenant, over the security resources in the subscriber's
//! scope. They are sent last, so that a data plane compares only when it has everything.

use std::collections::BTreeSet;
use std::sync::Arc;

use canal_catalog::{Catalog, EncodedResource, ResourceId, ResourceOwner};
use canal_compiler::scope;
use canal_model::ids::{Generation, TenantName};
use canal_model::program::{Resource, ResourceKind};
use canal_wire::southbound::manifest;

use super::{Item, SubscriberStream};

impl SubscriberStream {
    /// Returns the manifests of the tenants `resealed`, whose security resources were compared, and
    /// of tenants that are new in scope or have refused resources. The first batch of a stream, and
    /// the first after a change of its subscriptions, has the manifests of all tenants: the
    /// subscriber then compares all its resources again, whatever has changed.
    pub(super) fn manifests(
        &mut self,
        items: &[Item],
        resealed: BTreeSet<TenantName>,
        admitted: &BTreeSet<ResourceOwner>,
        catalog: &Catalog,
    ) -> Vec<Item> {
        // A subscriber that does not subscribe to manifests does not compare its resources.
        if !self.kinds[ResourceKind::Manifest as usize].open {
            return Vec::new();
        }
        let concerned: BTreeSet<TenantName> = match self.manifests_due {
            true => admitted.iter().flatten().cloned().collect(),
            false => {
                let newcomers = admitted.difference(&self.admitted).flatten().cloned();
                resealed
                    .into_iter()
                    .chain(newcomers)
                    .chain(self.refused_tenants())
                    .collect()
            }
        };
        let mut out = Vec::new();
        for tenant in concerned
            .iter()
            .filter(|t| admitted.contains(&Some((*t).clone())))
        {
            out.extend(self.manifest(tenant, catalog, items));
        }
        // Manifests of tenants that left the subscriber's scope are removed.
        let held_names = self
            .held_resources
            .owners()
            .filter(|owner| !admitted.contains(*owner))
            .flat_map(|owner| self.held_resources.of(owner));
        let gone: Vec<ResourceId> = held_names
            .filter(|(kind, _)| *kind == ResourceKind::Manifest)
            .cloned()
            .collect();
        out.extend(gone.into_iter().map(Item::Remove));
        self.manifests_due = false;
        out
    }

    /// Returns the manifest of one tenant. `None` if the tenant's sources could not be read, so
    /// that its content is unknown. Also `None` if the subscriber has the manifest, and nothing
    /// that it seals was sent.
    fn manifest(&self, tenant: &TenantName, catalog: &Catalog, items: &[Item]) -> Option<Item> {
        let owner: ResourceOwner = Some(tenant.clone());
        let view = catalog.view(&owner).filter(|view| view.complete)?;
        if !self.kinds[ResourceKind::Manifest as usize].covers(tenant.as_str()) {
            return None;
        }
        let visible = ResourceKind::security()
            .flat_map(|kind| view.of(kind))
            .filter(|e| {
                let kind = e.resource.kind();
                self.kinds[kind as usize].covers(&e.name)
                    && scope::visible(&e.resource, &self.principal, &self.placement)
            });
        let versions: Vec<(ResourceKind, &Arc<str>, String)> = visible
            .map(|e| (e.resource.kind(), &e.name, e.version.to_string()))
            .collect();
        let sealed = manifest::compute(
            tenant,
            versions
                .iter()
                .map(|(kind, name, version)| (*kind, &***name, version.as_str())),
        );
        let entry = EncodedResource::new(Resource::Manifest(sealed), Generation(0));
        let is_held = self.held_resources.version(&owner, &entry.key()) == Some(entry.version);
        let is_sealed = |item: &Item| {
            let key = item.key();
            key.0.is_security() && super::owner_of(&key).as_ref() == Some(tenant)
        };
        (!is_held || self.manifests_due || items.iter().any(is_sealed))
            .then(|| Item::Put(Arc::new(entry)))
    }
}

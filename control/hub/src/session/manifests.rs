//! The manifests that seal a batch: one per tenant, over the security resources that this subscriber is told. They are sent last, so that
//! a data plane compares only when it has everything.

use std::collections::BTreeSet;
use std::sync::Arc;

use canal_compiler::scope;
use canal_model::ids::{Generation, TenantName};
use canal_model::program::{Kind, Resource};
use canal_wire::southbound::manifest;

use super::{Item, Session};
use crate::catalog::{Catalog, Entry, Key, Owner};

impl Session {
    /// The manifests of the tenants `resealed`, whose security resources were looked at, and of all tenants in the first batch of a stream:
    /// then the subscriber compares again what it holds, whatever happened since the last.
    pub(super) fn manifests(
        &mut self,
        items: &[Item],
        resealed: BTreeSet<TenantName>,
        admitted: &BTreeSet<Owner>,
        catalog: &Catalog,
    ) -> Vec<Item> {
        if !self.kinds[Kind::Manifest as usize].open {
            return Vec::new();
        }
        let concerned: BTreeSet<TenantName> = match self.manifests_due {
            true => admitted.iter().flatten().cloned().collect(),
            false => {
                let newcomers = admitted.difference(&self.admitted).flatten().cloned();
                resealed.into_iter().chain(newcomers).chain(self.refused_tenants()).collect()
            }
        };
        let mut out = Vec::new();
        for tenant in concerned.iter().filter(|t| admitted.contains(&Some((*t).clone()))) {
            out.extend(self.manifest(tenant, catalog, items));
        }
        // Of tenants that this subscriber is no longer told of.
        let held = self.held.iter().filter(|(owner, _)| !admitted.contains(*owner)).flat_map(|(_, held)| held.keys());
        let gone: Vec<Key> = held.filter(|(kind, _)| *kind == Kind::Manifest).cloned().collect();
        out.extend(gone.into_iter().map(Item::Remove));
        self.manifests_due = false;
        out
    }

    /// `None`: the tenant's sources could not be read, so that nobody knows what it should be; or the subscriber has it, and nothing
    /// that it seals was sent.
    fn manifest(&self, tenant: &TenantName, catalog: &Catalog, items: &[Item]) -> Option<Item> {
        let owner: Owner = Some(tenant.clone());
        let view = catalog.view(&owner).filter(|view| view.complete)?;
        if !self.kinds[Kind::Manifest as usize].covers(tenant.as_str()) {
            return None;
        }
        let told = Kind::SECURITY.into_iter().flat_map(|kind| view.of(kind)).filter(|e| {
            let kind = e.resource.kind();
            self.kinds[kind as usize].covers(&e.name) && scope::visible(&e.resource, &self.principal, &self.whereabouts)
        });
        let versions: Vec<(Kind, &Arc<str>, String)> = told.map(|e| (e.resource.kind(), &e.name, e.version.to_string())).collect();
        let sealed = manifest::compute(tenant, versions.iter().map(|(kind, name, version)| (*kind, &***name, version.as_str())));
        let entry = Entry::new(Resource::Manifest(sealed), Generation(0));
        let is_held = self.held.get(&owner).and_then(|held| held.get(&entry.key())) == Some(&entry.version);
        let is_sealed = |item: &Item| {
            let key = item.key();
            key.0.is_security() && super::owner_of(&key).as_ref() == Some(tenant)
        };
        (!is_held || self.manifests_due || items.iter().any(is_sealed)).then(|| Item::Put(Arc::new(entry)))
    }
}

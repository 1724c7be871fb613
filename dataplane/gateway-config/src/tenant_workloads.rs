//! The workloads of the builder by tenant, so that a change of one tenant looks at its own workloads
//! only. It decides nothing about them.

use std::sync::Arc;

use canal_model::ids::TenantName;
use hashbrown::HashMap;

use crate::WorkloadView;

/// The workloads of all tenants by their UIDs, which begin with the tenant's name.
#[derive(Default)]
pub(crate) struct TenantWorkloads {
    /// No tenant is in it without a workload: tenants come and go.
    tenants: HashMap<TenantName, HashMap<String, Arc<WorkloadView>>>,
}

impl TenantWorkloads {
    pub(crate) fn get(&self, tenant: &TenantName, uid: &str) -> Option<&Arc<WorkloadView>> {
        self.tenants.get(tenant)?.get(uid)
    }

    pub(crate) fn insert(&mut self, tenant: &TenantName, view: Arc<WorkloadView>) {
        let own = self.tenants.entry_ref(tenant).or_default();
        own.insert(view.uid.clone(), view);
    }

    /// Removes a workload of a tenant and returns it.
    pub(crate) fn remove(&mut self, tenant: &TenantName, uid: &str) -> Option<Arc<WorkloadView>> {
        let own = self.tenants.get_mut(tenant)?;
        let removed = own.remove(uid);
        if own.is_empty() {
            self.tenants.remove(tenant);
        }
        removed
    }

    /// Iterates over the workloads of a tenant.
    pub(crate) fn of<'a>(
        &'a self,
        tenant: &TenantName,
    ) -> impl Iterator<Item = &'a Arc<WorkloadView>> + use<'a> {
        self.tenants
            .get(tenant)
            .into_iter()
            .flat_map(HashMap::values)
    }

    /// Iterates over the UIDs of all workloads.
    pub(crate) fn uids(&self) -> impl Iterator<Item = &String> {
        self.tenants.values().flat_map(HashMap::keys)
    }
}

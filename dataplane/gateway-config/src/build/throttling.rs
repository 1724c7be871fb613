//! Throttles in the builder: assigns them to services and tenants, and computes this replica's part
//! of each from bucket tables and gateway addresses.

use std::sync::Arc;

use canal_model::ids::{ServiceKey, TenantName};
use canal_model::program::{Resource, Throttle};

use super::super::throttle::{RequestThrottle, decide_part};
use super::SnapshotBuilder;

impl SnapshotBuilder {
    pub(super) fn upsert_throttle(&mut self, name: String, throttle: &Throttle) {
        self.touch_throttled(throttle);
        let known = self
            .throttles
            .remove(&name)
            .map(|(_, enforced)| enforced)
            .unwrap_or_default();
        self.throttles.insert(name, (throttle.clone(), known));
    }

    pub(super) fn remove_throttle(&mut self, name: &str) {
        if let Some((gone, _)) = self.throttles.remove(name) {
            self.touch_throttled(&gone);
        }
    }

    fn touch_throttled(&mut self, throttle: &Throttle) {
        self.touched.throttles = true;
        match &throttle.service {
            Some(service) => {
                self.touched.views.insert(service.clone());
            }
            None => {
                self.touched.tenants.insert(throttle.tenant.clone());
            }
        }
    }

    /// Stores tables and this replica's number. Here they matter only for throttles.
    pub(super) fn upsert_tier(&mut self, resource: &Arc<Resource>) {
        match &**resource {
            Resource::Replica(replica) if replica.name.as_str() == self.replica => {
                self.number = Some(replica.number)
            }
            Resource::Table(_) => {
                self.tables.insert(resource.name(), resource.clone());
            }
            _ => return,
        }
        self.touched.throttles = true;
    }

    pub(super) fn remove_table(&mut self, name: &str) {
        self.tables.remove(name);
        self.touched.throttles = true;
    }

    /// Returns the throttle of a service.
    pub(super) fn throttle_of(&self, service: &ServiceKey) -> Option<Arc<RequestThrottle>> {
        self.throttles
            .get(&service.to_string())
            .filter(|(t, _)| t.requests.per_second > 0)
            .map(|(_, enforced)| enforced.clone())
    }

    /// Sets this replica's part of every throttle, and assigns tenants theirs. Requests in progress
    /// see the change immediately.
    pub(super) fn settle_throttles(&mut self) {
        for (throttle, enforced) in self.throttles.values() {
            enforced.set(throttle.requests, self.part_of(throttle));
        }
        let names: Vec<_> = self.touched.tenants.iter().cloned().collect();
        for name in names {
            let throttle = self
                .throttles
                .get(name.as_str())
                .filter(|(t, _)| t.requests.per_second > 0);
            let throttle = throttle.map(|(_, enforced)| enforced.clone());
            if let Some(view) = self.tenants.get_mut(&name) {
                view.throttle = throttle;
            }
        }
    }

    /// Returns this replica's part of a throttle: the part of each service's sessions in each AZ by
    /// its bucket table, where all of them count as equally busy.
    fn part_of(&self, throttle: &Throttle) -> f64 {
        let prefix = throttle.service.as_ref().map_or_else(
            || format!("{}/", throttle.tenant),
            |service| format!("{service}@"),
        );
        let addresses = self
            .addresses
            .range(prefix.clone()..)
            .take_while(|(name, _)| name.starts_with(&prefix))
            .count();
        let Some(number) = self.number.filter(|_| addresses > 0) else {
            // Outside the tier, clients choose among the tenant's replicas.
            return 1.0 / self.replicas_of(&throttle.tenant).max(1) as f64;
        };
        let tables = self
            .tables
            .range(prefix.clone()..)
            .take_while(|(name, _)| name.starts_with(&prefix));
        let parts = tables.filter_map(|(_, resource)| match &**resource {
            Resource::Table(table) => Some(decide_part(table, number)),
            _ => None,
        });
        parts.sum::<f64>() / addresses as f64
    }

    fn replicas_of(&self, tenant: &TenantName) -> usize {
        self.gateway_replicas
            .values()
            .filter(|replica| replica.tenant == *tenant && !replica.draining)
            .count()
    }
}

//! Policies in the builder: marks what a change of a policy affects. `canal_authorization` decides
//! which policies apply to a destination.

use std::sync::Arc;

use canal_authorization::{PolicyDestination, applies};
use canal_model::authorization::PolicyTarget;
use canal_model::ids::{Namespace, TenantName, TrustDomain};
use canal_model::ingress::gateway_labels;
use canal_model::program::{Labels, Resource, ResourceKind};
use canal_model::trust::TrustBundle;

use super::{DirtySet, SnapshotBuilder};
use crate::WorkloadView;
use crate::policies::TenantPolicies;

/// Number of changed targets above which everything of a tenant is rebuilt, because comparing each
/// workload with each target would cost more. Nobody measured where the two cost the same.
const TARGETS_MAX: usize = 64;

impl SnapshotBuilder {
    fn policies(&mut self, tenant: &TenantName) -> &mut TenantPolicies {
        self.policies.entry_ref(tenant).or_default()
    }

    /// Records that the tenant's policies or their targets changed.
    pub(super) fn touch_policies(
        &mut self,
        tenant: &TenantName,
        targets: impl IntoIterator<Item = PolicyTarget>,
    ) {
        self.touched
            .policies
            .entry(tenant.clone())
            .or_default()
            .extend(targets);
    }

    pub(super) fn upsert_policy(&mut self, resource: &Resource) {
        match resource {
            Resource::Authorization(policy) => {
                let before = self.policies(&policy.key.tenant).authorize(policy);
                self.touch_policies(
                    &policy.key.tenant,
                    before.into_iter().chain([policy.target.clone()]),
                );
            }
            Resource::Authentication(one) => {
                let before = self.policies(&one.key.tenant).authenticate(one);
                self.touch_policies(
                    &one.key.tenant,
                    before.into_iter().chain([one.target.clone()]),
                );
            }
            Resource::Authorizer(authorizer) => {
                self.policies(&authorizer.key.tenant)
                    .name_authorizer(authorizer);
                self.touch_policies(&authorizer.key.tenant, []);
            }
            _ => {}
        }
    }

    pub(super) fn remove_policy(&mut self, kind: ResourceKind, name: &str) {
        let Some(tenant) = name
            .split('/')
            .next()
            .and_then(|tenant| TenantName::new(tenant).ok())
        else {
            return;
        };
        let policies = self.policies(&tenant);
        let before = match kind {
            ResourceKind::Authorization => policies.forget_authorization(name),
            ResourceKind::Authentication => policies.forget_authentication(name),
            _ => {
                policies.forget_authorizer(name);
                None
            }
        };
        self.touch_policies(&tenant, before);
    }

    /// Marks the services whose endpoints, or own policies, are targets of the changed policies.
    pub(super) fn spread_policies(&mut self, touched: &mut DirtySet) {
        for (tenant, targets) in &touched.policies {
            self.touched.tenants.insert(tenant.clone());
            // Without targets all endpoints keep their policies, and the scan below is saved.
            if targets.is_empty() {
                continue;
            }
            // A policy must not touch another tenant's service.
            let services = targets.iter().filter_map(|target| match target {
                PolicyTarget::Service(service) if service.tenant == *tenant => {
                    Some(service.clone())
                }
                _ => None,
            });
            for service in services {
                touched.views.insert(service.clone());
                touched.members.insert(service);
            }
            let all = targets.len() > TARGETS_MAX;
            let is_target = |namespace: &Namespace, labels: &Labels| {
                let place = PolicyDestination::workload(namespace, labels);
                all || targets.iter().any(|target| applies(target, &place))
            };
            let gateways = self.services.iter().filter(|(key, state)| {
                state.gateway.is_some()
                    && key.tenant == *tenant
                    && gateway_labels(key).is_some_and(|own| is_target(&key.namespace, &own))
            });
            for (gateway, _) in gateways {
                touched.views.insert(gateway.clone());
                touched.members.insert(gateway.clone());
            }
            let concerned = |w: &WorkloadView| is_target(&w.namespace, &w.labels);
            for workload in self.workloads.of(tenant).filter(|w| concerned(w)) {
                touched
                    .members
                    .extend(workload.serves.iter().map(|(service, ..)| service.clone()));
            }
        }
    }

    /// Publishes the tenants' current policies in their views, with a new version.
    pub(super) fn publish_policies(&mut self, touched: &DirtySet) {
        for tenant in touched.policies.keys() {
            self.last_id += 1;
            let version = self.last_id;
            let policies = self.policies.get(tenant).cloned().unwrap_or_default();
            let view = self.tenant(tenant);
            view.policies = Arc::new(policies);
            view.policy_version = version;
        }
    }

    pub(super) fn upsert_bundle(&mut self, bundle: &TrustBundle) {
        if bundle.federated {
            Arc::make_mut(&mut self.tenant(&bundle.tenant).federated)
                .insert(bundle.trust_domain.clone());
        } else {
            self.remove_bundle(&format!("{}/{}", bundle.tenant, bundle.trust_domain));
        }
    }

    pub(super) fn remove_bundle(&mut self, name: &str) {
        let Some((tenant, domain)) = name.split_once('/') else {
            return;
        };
        // Bundles of Canal's own components belong to no tenant.
        if let (Ok(tenant), Ok(domain)) = (TenantName::new(tenant), TrustDomain::new(domain))
            && self
                .tenants
                .get(&tenant)
                .is_some_and(|view| view.federated.contains(&domain))
        {
            Arc::make_mut(&mut self.tenant(&tenant).federated).remove(&domain);
            self.touch_policies(&tenant, []);
        }
    }

    pub(super) fn bundle_names(&self) -> impl Iterator<Item = (ResourceKind, String)> {
        self.tenants.values().flat_map(|t| {
            t.federated
                .iter()
                .map(|domain| (ResourceKind::Bundle, format!("{}/{domain}", t.name)))
        })
    }

    /// Returns the stored policies by kind and name.
    pub(super) fn policy_names(&self) -> impl Iterator<Item = (ResourceKind, String)> {
        const KINDS: [ResourceKind; 3] = [
            ResourceKind::Authorization,
            ResourceKind::Authentication,
            ResourceKind::Authorizer,
        ];
        self.policies.values().flat_map(|policies| {
            KINDS
                .into_iter()
                .zip(policies.names())
                .flat_map(|(kind, names)| names.into_iter().map(move |name| (kind, name)))
        })
    }
}

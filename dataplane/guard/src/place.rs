//! Which policies are a destination's. Policies of other tenants must not come here: namespaces and labels of tenants look alike.

use canal_model::authorization::PolicyTarget;
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::program::Labels;

/// A destination: a workload, a service, or a workload that serves a service.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The workload's namespace and labels; `None`: only what targets the service itself is asked for.
    pub workload: Option<(&'a Namespace, &'a Labels)>,
    pub service: Option<&'a ServiceKey>,
}

impl<'a> Place<'a> {
    pub fn workload(namespace: &'a Namespace, labels: &'a Labels) -> Self {
        Self { workload: Some((namespace, labels)), service: None }
    }

    pub fn service(service: &'a ServiceKey) -> Self {
        Self { workload: None, service: Some(service) }
    }

    pub fn serving(self, service: Option<&'a ServiceKey>) -> Self {
        Self { service, ..self }
    }
}

/// Whether a policy with this target is for that destination.
pub fn applies(target: &PolicyTarget, place: &Place<'_>) -> bool {
    match (target, place.workload) {
        (PolicyTarget::Service(key), _) => place.service == Some(key),
        (_, None) => false,
        (PolicyTarget::Tenant, Some(_)) => true,
        (PolicyTarget::Namespace(wanted), Some((namespace, _))) => wanted == namespace,
        (PolicyTarget::Workloads { namespace: wanted, labels: wanted_labels }, Some((namespace, labels))) => {
            wanted.as_ref().is_none_or(|wanted| wanted == namespace)
                && wanted_labels.iter().all(|(name, value)| labels.get(name) == Some(value))
        }
    }
}

//! Decides which policies apply to a destination. The caller must not pass policies of other
//! tenants, because namespaces and labels of different tenants can be equal.

use canal_model::authorization::PolicyTarget;
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::program::Labels;

/// Destination of a request: a workload, a service, or a workload that serves a service.
#[derive(Debug, Clone, Copy)]
pub struct PolicyDestination<'a> {
    /// Namespace and labels of the workload. With `None`, only policies that target the service
    /// itself apply.
    pub workload: Option<(&'a Namespace, &'a Labels)>,
    pub service: Option<&'a ServiceKey>,
}

impl<'a> PolicyDestination<'a> {
    pub fn workload(namespace: &'a Namespace, labels: &'a Labels) -> Self {
        Self {
            workload: Some((namespace, labels)),
            service: None,
        }
    }

    pub fn service(service: &'a ServiceKey) -> Self {
        Self {
            workload: None,
            service: Some(service),
        }
    }

    pub fn serving(self, service: Option<&'a ServiceKey>) -> Self {
        Self { service, ..self }
    }
}

/// Returns true if a policy with this target authorizes the requests to a service that a gateway
/// answers itself: if it applies to one of the service's endpoints, of which these are the labels.
/// Without endpoints nobody knows which policies would apply to one, so all those that select
/// workloads of the namespace do.
pub fn applies_to_answers(
    target: &PolicyTarget,
    service: &ServiceKey,
    endpoints: &[&Labels],
) -> bool {
    let applies_to = |labels: &Labels| {
        let place = PolicyDestination::workload(&service.namespace, labels).serving(Some(service));
        applies(target, &place)
    };
    if !endpoints.is_empty() {
        return endpoints.iter().any(|labels| applies_to(labels));
    }
    match target {
        PolicyTarget::Workloads { namespace, .. } => namespace
            .as_ref()
            .is_none_or(|namespace| *namespace == service.namespace),
        _ => applies_to(&Labels::new()),
    }
}

/// Returns true if a policy with this target applies to the destination.
pub fn applies(target: &PolicyTarget, place: &PolicyDestination<'_>) -> bool {
    match (target, place.workload) {
        (PolicyTarget::Service(key), _) => place.service == Some(key),
        (_, None) => false,
        (PolicyTarget::Tenant, Some(_)) => true,
        (PolicyTarget::Namespace(wanted), Some((namespace, _))) => wanted == namespace,
        (
            PolicyTarget::Workloads {
                namespace: wanted,
                labels: wanted_labels,
            },
            Some((namespace, labels)),
        ) => {
            wanted.as_ref().is_none_or(|wanted| wanted == namespace)
                && wanted_labels
                    .iter()
                    .all(|(name, value)| labels.get(name) == Some(value))
        }
    }
}

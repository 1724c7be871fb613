//! A workload as metrics and logs name it, at either end of a request. Made from the registry or from a verified identity; it decides nothing.

use canal_model::identity::Identity;
use canal_model::program::{Labels, Workload};
use canal_wire::hbone::Baggage;

/// What Istio's metrics say of a source or a destination.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Party {
    pub(crate) workload: String,
    pub(crate) namespace: String,
    /// `spiffe://…` of a verified certificate; empty for plain text.
    pub(crate) principal: String,
    pub(crate) app: String,
    pub(crate) version: String,
    pub(crate) service: String,
    pub(crate) revision: String,
    pub(crate) cluster: String,
    /// The pod's own name; for logs only, it has no bound.
    pub(crate) pod: String,
}

/// Istio's word for what is not known.
pub(crate) const UNKNOWN: &str = "unknown";

impl Party {
    /// Nothing is known.
    pub(crate) fn unknown() -> Self {
        let u = || UNKNOWN.to_string();
        Self {
            workload: u(),
            namespace: u(),
            app: u(),
            version: u(),
            service: u(),
            revision: "latest".into(),
            cluster: u(),
            ..Self::default()
        }
    }

    /// From the registry.
    pub(crate) fn of_workload(w: &Workload, identity: &Identity) -> Self {
        let label = |names: &[&str]| names.iter().find_map(|n| w.labels.get(*n)).cloned();
        let workload = owner_name(w.name.as_str(), &w.labels);
        let app = label(&["app", "app.kubernetes.io/name"]);
        Self {
            namespace: w.namespace.to_string(),
            principal: identity.to_string(),
            service: label(&["service.istio.io/canonical-name", "app.kubernetes.io/name", "app"]).unwrap_or_else(|| workload.clone()),
            app: app.unwrap_or_else(|| UNKNOWN.into()),
            version: label(&["version", "app.kubernetes.io/version"]).unwrap_or_else(|| UNKNOWN.into()),
            revision: label(&["service.istio.io/canonical-revision", "app.kubernetes.io/version", "version"])
                .unwrap_or_else(|| "latest".into()),
            cluster: UNKNOWN.into(),
            pod: w.name.to_string(),
            workload,
        }
    }

    /// From a verified identity and what its node says of it; used where the registry does not know the address.
    pub(crate) fn of_identity(identity: &Identity, said: &Baggage) -> Self {
        let or = |s: &str, otherwise: &str| if s.is_empty() { otherwise.to_string() } else { s.to_string() };
        let account = identity.service_account.as_str();
        Self {
            // The account, not the pod that the baggage names: the name must be bounded, and the account is verified.
            workload: account.to_string(),
            namespace: identity.namespace.to_string(),
            principal: identity.to_string(),
            app: or(&said.service, account),
            version: or(&said.version, UNKNOWN),
            service: or(&said.service, account),
            revision: or(&said.version, "latest"),
            cluster: or(&said.cluster, UNKNOWN),
            pod: said.pod.clone(),
        }
    }
}

/// The name of what owns a pod: without the parts that a Deployment or StatefulSet adds, so that it stays when pods are replaced.
fn owner_name(pod: &str, labels: &Labels) -> String {
    if let Some(hash) = labels.get("pod-template-hash")
        && let Some((owner, _)) = pod.rsplit_once(&format!("-{hash}-"))
    {
        return owner.to_string();
    }
    match pod.rsplit_once('-') {
        Some((owner, ordinal)) if !owner.is_empty() && ordinal.bytes().all(|b| b.is_ascii_digit()) => owner.to_string(),
        _ => pod.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_of_pods() {
        let hashed: Labels = [("pod-template-hash".to_string(), "5d4f".to_string())].into();
        for (pod, labels, want) in [
            ("reviews-v1-0", &Labels::new(), "reviews-v1"),
            ("reviews-v1-5d4f-x7k2p", &hashed, "reviews-v1"),
            ("reviews-v1", &Labels::new(), "reviews-v1"),
            ("redis", &Labels::new(), "redis"),
            ("5", &Labels::new(), "5"),
        ] {
            assert_eq!(owner_name(pod, labels), want);
        }
    }
}

//! Names of a workload for metrics and logs, at either end of a request. They come from the
//! registry or from a verified identity.
//!
//! Start with [`WorkloadLabels`].

use canal_model::identity::Identity;
use canal_model::program::{Labels, Workload};
use canal_wire::hbone::Baggage;

/// Labels of a source or a destination in Istio's metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct WorkloadLabels {
    pub workload: String,
    pub namespace: String,
    /// `spiffe://…` of a verified certificate; empty for plaintext.
    pub principal: String,
    pub app: String,
    pub version: String,
    pub service: String,
    pub revision: String,
    pub cluster: String,
    /// Name of the pod. It appears in logs only, because the number of names has no bound.
    pub pod: String,
}

/// Istio's value for an unknown label.
pub const UNKNOWN: &str = "unknown";

impl WorkloadLabels {
    /// Returns the labels of an unknown workload.
    pub fn unknown() -> Self {
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

    /// Builds the labels of a workload in the registry.
    pub fn of_workload(w: &Workload, identity: &Identity) -> Self {
        let label = |names: &[&str]| names.iter().find_map(|n| w.labels.get(*n)).cloned();
        let workload = owner_name(w.name.as_str(), &w.labels);
        let app = label(&["app", "app.kubernetes.io/name"]);
        Self {
            namespace: w.namespace.to_string(),
            principal: identity.to_string(),
            service: label(&[
                "service.istio.io/canonical-name",
                "app.kubernetes.io/name",
                "app",
            ])
            .unwrap_or_else(|| workload.clone()),
            app: app.unwrap_or_else(|| UNKNOWN.into()),
            version: label(&["version", "app.kubernetes.io/version"])
                .unwrap_or_else(|| UNKNOWN.into()),
            revision: label(&[
                "service.istio.io/canonical-revision",
                "app.kubernetes.io/version",
                "version",
            ])
            .unwrap_or_else(|| "latest".into()),
            cluster: UNKNOWN.into(),
            pod: w.name.to_string(),
            workload,
        }
    }

    /// Builds the labels from a verified identity and the baggage of its node, for an address that
    /// the registry does not contain.
    pub fn of_identity(identity: &Identity, baggage: &Baggage) -> Self {
        let or = |s: &str, otherwise: &str| {
            if s.is_empty() {
                otherwise.to_string()
            } else {
                s.to_string()
            }
        };
        let account = identity.service_account.as_str();
        Self {
            // The service account, not the pod in the baggage: the number of names must be bounded,
            // and the account is verified.
            workload: account.to_string(),
            namespace: identity.namespace.to_string(),
            principal: identity.to_string(),
            app: or(&baggage.service, account),
            version: or(&baggage.version, UNKNOWN),
            service: or(&baggage.service, account),
            revision: or(&baggage.version, "latest"),
            cluster: or(&baggage.cluster, UNKNOWN),
            pod: baggage.pod.clone(),
        }
    }
}

/// Returns the name of a pod's owner: the pod's name without the parts that a Deployment or
/// StatefulSet adds, so that it stays the same when pods are replaced.
fn owner_name(pod: &str, labels: &Labels) -> String {
    if let Some(hash) = labels.get("pod-template-hash")
        && let Some((owner, _)) = pod.rsplit_once(&format!("-{hash}-"))
    {
        return owner.to_string();
    }
    match pod.rsplit_once('-') {
        Some((owner, ordinal))
            if !owner.is_empty() && ordinal.bytes().all(|b| b.is_ascii_digit()) =>
        {
            owner.to_string()
        }
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

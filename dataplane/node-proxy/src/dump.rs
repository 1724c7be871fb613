//! `/config_dump`: configuration and state of this node as JSON, for operators and `canal config
//! dump`. It changes nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use canal_identity::certs::CertificateSource;
use canal_southbound_client::SubscriptionStatus;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::config::NodeConfig;
use crate::gateways::{GatewayEndpoint, GatewayEndpointKind};
use crate::pod_reconciler::PodRegistry;
use crate::snapshot::{NodeSnapshot, NodeTenantView};
use crate::worker::NodeShared;

/// Sources of the configuration dump.
pub struct Dump {
    pub config: Arc<NodeConfig>,
    pub shared: Arc<NodeShared>,
    pub pod_registry: Arc<PodRegistry>,
    pub certificates: CertificateSource,
    pub southbound: watch::Receiver<SubscriptionStatus>,
    /// Reason why nftables capture although BPF was configured; `None` if BPF works or was not
    /// configured.
    pub fallback: Option<String>,
}

impl Dump {
    /// Returns the whole dump as one JSON object.
    pub fn json(&self) -> Value {
        let view = self.shared.view.load_full();
        let mut tenants: Vec<Value> = view.tenants().map(tenant).collect();
        tenants.sort_by_key(|t| t["name"].to_string());
        let refused: Vec<Value> = self
            .pod_registry
            .refused
            .load()
            .iter()
            .map(|(what, why)| json!({"what": what, "why": why}))
            .collect();
        json!({
            "node": self.config.node.as_str(),
            "az": self.config.az.as_str(),
            "version": env!("CARGO_PKG_VERSION"),
            "generation": view.generation.0,
            "southbound": &*self.southbound.borrow(),
            "captureFallback": self.fallback,
            "pods": self.pods(&view),
            "rejectedPods": refused,
            "tenants": tenants,
            "certificates": self.certificates.status(),
        })
    }

    fn pods(&self, view: &NodeSnapshot) -> Vec<Value> {
        let contexts = self.pod_registry.contexts.load_full();
        contexts
            .iter()
            .map(|r| {
                let (pod, identity, policy) = (r.pod.load(), r.identity.load(), r.policy.load());
                json!({
                    "uid": pod.uid,
                    "ips": pod.ips,
                    "labels": pod.labels,
                    "workloadApi": pod.workload_api,
                    "identity": identity.as_ref().map(|i| i.identity.to_string()),
                    "capture": r.mode.name(),
                    "listeners": r.listeners(),
                    "plaintext": r.plaintext.describe(),
                    "clientAddresses": if r.delivery.is_transparent { "preserved" } else { "substituted" },
                    "clientAddressesMissing": r.delivery.missing,
                    "packets": &**r.packets.load(),
                    "udpPorts": view.tenant(&pod.tenant).map(|t| t.udp_ports(&pod.uid)),
                    "peerAuthentication": format!("{:?}", policy.mode(0)),
                    "authorizationPolicies": policy.names().map(ToString::to_string).collect::<Vec<_>>(),
                    "connections": {"outbound": r.outbound.used(), "inbound": r.inbound.used(), "hbone": r.hbone.used(), "plaintext": r.plain.used()},
                })
            })
            .collect()
    }

    /// Reports readiness: southbound state is present and the pods directory was read once.
    ///
    /// # Errors
    /// Returns the missing condition as text for the operator.
    pub fn ready(&self) -> Result<(), String> {
        if !self.southbound.borrow().ready {
            return Err(
                "no southbound state yet, neither from the controller nor from a snapshot".into(),
            );
        }
        if !self.pod_registry.scanned.load(Relaxed) {
            return Err("the pods directory was not read yet".into());
        }
        Ok(())
    }
}

fn tenant(t: &NodeTenantView) -> Value {
    let draining = |e: &GatewayEndpoint| e.kind == GatewayEndpointKind::Replica { draining: true };
    let gateways: Vec<Value> = t
        .replicas
        .iter()
        .map(|e| json!({"replica": e.label, "az": e.az.as_str(), "addresses": e.addresses, "draining": draining(e)}))
        .collect();
    let mut closed: Vec<String> = t
        .addresses()
        .filter(|(_, e)| e.kind == GatewayEndpointKind::Address { open: false })
        .map(|(key, e)| format!("{}/{}@{}", key.namespace, key.name, e.az))
        .collect();
    // The tables are hash maps; sorted, two dumps of one state are equal.
    closed.sort();
    let tier: Vec<Value> = t
        .entrances(None)
        .iter()
        .map(|e| json!({"az": e.az.as_str(), "addresses": e.addresses}))
        .collect();
    let mut direct: Vec<String> = t
        .direct_ports()
        .map(|(key, port, peers)| {
            format!(
                "{}/{}:{port} to {}",
                key.namespace,
                key.name,
                peers.peers.len()
            )
        })
        .collect();
    direct.sort();
    json!({
        "name": t.tenant.name.as_str(),
        "trustDomain": t.tenant.trust_domain.as_str(),
        "vni": t.tenant.vni.get(),
        "outside": format!("{:?}", t.tenant.outbound_traffic_policy),
        "resolvers": t.resolvers(),
        "podCidrs": t.tenant.pod_cidrs.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "services": t.service_count(),
        "directPorts": direct,
        "gateways": gateways,
        "gatewayCidrs": t.tenant.gateway_cidrs.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "gatewayAddresses": {"known": t.addresses().count(), "closed": closed, "forPods": tier},
    })
}

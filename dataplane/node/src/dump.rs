//! `/config_dump`: what this node knows and does, as JSON for operators and `canal config dump`. Reads only.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use canal_kit::certs::CertificateSource;
use canal_kit::southbound::Status;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::config::NodeConfig;
use crate::gateways::{Entrance, EntranceKind};
use crate::pods::Board;
use crate::view::{TenantView, View};
use crate::worker::Shared;

/// What the dump reads.
pub struct Dump {
    pub config: Arc<NodeConfig>,
    pub shared: Arc<Shared>,
    pub board: Arc<Board>,
    pub certificates: CertificateSource,
    pub southbound: watch::Receiver<Status>,
    /// Why BPF is not used although it was wanted.
    pub fallback: Option<String>,
}

impl Dump {
    /// Everything.
    pub fn json(&self) -> Value {
        let view = self.shared.view.load_full();
        let mut tenants: Vec<Value> = view.tenants().map(tenant).collect();
        tenants.sort_by_key(|t| t["name"].to_string());
        let refused: Vec<Value> = self.board.refused.load().iter().map(|(what, why)| json!({"what": what, "why": why})).collect();
        json!({
            "node": self.config.node.as_str(),
            "az": self.config.az.as_str(),
            "version": env!("CARGO_PKG_VERSION"),
            "generation": view.generation.0,
            "southbound": &*self.southbound.borrow(),
            "captureFallback": self.fallback,
            "pods": self.pods(&view),
            "podsRefused": refused,
            "tenants": tenants,
            "certificates": self.certificates.status(),
        })
    }

    fn pods(&self, view: &View) -> Vec<Value> {
        let rooms = self.board.rooms.load_full();
        rooms
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
                    "packets": &**r.packets.load(),
                    "udpPorts": view.tenant(&pod.tenant).map(|t| t.udp_ports(&pod.uid)),
                    "peerAuthentication": format!("{:?}", policy.mode(0)),
                    "authorizationPolicies": policy.names().map(ToString::to_string).collect::<Vec<_>>(),
                    "connections": {"outbound": r.outbound.used(), "inbound": r.inbound.used(), "hbone": r.hbone.used(), "plaintext": r.plain.used()},
                })
            })
            .collect()
    }

    /// Whether the node may be called ready, and if not, why.
    pub fn ready(&self) -> Result<(), String> {
        if !self.southbound.borrow().ready {
            return Err("no southbound state yet, neither from the controller nor from a snapshot".into());
        }
        if !self.board.scanned.load(Relaxed) {
            return Err("the pods directory was not read yet".into());
        }
        Ok(())
    }
}

fn tenant(t: &TenantView) -> Value {
    let draining = |e: &Entrance| e.kind == EntranceKind::Replica { draining: true };
    let gateways: Vec<Value> = t
        .replicas
        .iter()
        .map(|e| json!({"replica": e.label, "az": e.az.as_str(), "addresses": e.addresses, "draining": draining(e)}))
        .collect();
    let mut closed: Vec<String> = t
        .addresses()
        .filter(|(_, e)| e.kind == EntranceKind::Address { open: false })
        .map(|(key, e)| format!("{}/{}@{}", key.namespace, key.name, e.az))
        .collect();
    closed.sort();
    let tier: Vec<Value> = t.entrances(None).iter().map(|e| json!({"az": e.az.as_str(), "addresses": e.addresses})).collect();
    json!({
        "name": t.tenant.name.as_str(),
        "trustDomain": t.tenant.trust_domain.as_str(),
        "vni": t.tenant.vni.get(),
        "outside": format!("{:?}", t.tenant.outside),
        "resolvers": t.resolvers(),
        "podCidrs": t.tenant.pod_cidrs.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "services": t.service_count(),
        "gateways": gateways,
        "gatewayCidrs": t.tenant.gateway_cidrs.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "gatewayAddresses": {"known": t.addresses().count(), "closed": closed, "forPods": tier},
    })
}

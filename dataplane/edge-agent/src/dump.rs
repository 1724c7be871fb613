//! The state of the edge on one page, for `/config_dump`, and its readiness.

use std::sync::{Arc, Mutex, PoisonError};

use canal_runtime::drain::{DrainObserver, DrainPhase};
use canal_southbound_client::SubscriptionStatus;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::config::EdgeConfig;
use crate::kernel::KernelMaps;
use crate::map_reconciler::MapReconciler;

/// Omitted entries that the dump names, at most. The metric `canal_edge_map_entries_omitted` counts
/// all of them; the names are examples for a reader.
const LEFT_OUT_SHOWN: usize = 100;

/// The sources of the dump and of readiness.
pub(crate) struct EdgeDump {
    pub(crate) config: EdgeConfig,
    pub(crate) reconciler: Arc<Mutex<MapReconciler<KernelMaps>>>,
    pub(crate) southbound: watch::Receiver<SubscriptionStatus>,
    pub(crate) traffic: DrainObserver,
}

impl EdgeDump {
    pub(crate) fn json(&self) -> Value {
        let mut reconciler = self
            .reconciler
            .lock()
            // The reconciler's state is consistent between its calls, so a panic elsewhere does not
            // harm it.
            .unwrap_or_else(PoisonError::into_inner);
        let (attached, pinned) = (
            reconciler.tables().is_attached(),
            reconciler.tables().is_pinned(),
        );
        let (content, maps) = (reconciler.content(), reconciler.maps());
        let replicas: Vec<Value> = maps
            .members
            .iter()
            .map(|(n, m)| {
                let up = content.replicas.get(n).map(|s| s.up);
                json!({"name": m.name.as_str(), "number": n.get(), "address": m.address, "own": m.own, "up": up, "controllerUp": m.up})
            })
            .collect();
        let address = |((vni, ip), id): (
            &(canal_model::ids::Vni, std::net::IpAddr),
            &canal_model::ids::ServiceId,
        )| json!({"vni": vni.get(), "address": ip, "service": id.get()});
        let table = |(id, t): (
            &canal_model::ids::ServiceId,
            &Arc<crate::desired_maps::ChainTable>,
        )| json!({"service": id.get(), "vni": t.vni.get(), "version": t.version});
        json!({
            "edge": self.config.edge.as_str(),
            "az": self.config.az.as_str(),
            "version": env!("CARGO_PKG_VERSION"),
            "device": self.config.device,
            "program": {"attached": attached, "pinned": pinned},
            "southbound": *self.southbound.borrow(),
            "pendingEntries": reconciler.status().pending_entries,
            "omittedEntries": maps.left_out.iter().take(LEFT_OUT_SHOWN).map(ToString::to_string).collect::<Vec<_>>(),
            "omittedCount": maps.left_out.len(),
            "replicas": replicas,
            "addresses": content.addresses.iter().map(address).collect::<Vec<_>>(),
            "tables": content.tables.iter().map(table).collect::<Vec<_>>(),
            "prefixes": content.prefixes.iter().map(|((v, net), via)| json!({"vni": v.get(), "prefix": net, "node": via.node})).collect::<Vec<_>>(),
            "tunnels": content.tunnels.iter().map(|(replica, ports)| json!({"address": replica, "ports": ports.as_slice()})).collect::<Vec<_>>(),
            "hosts": content.hosts.iter().map(|(h, n)| json!({"address": h, "replica": n})).collect::<Vec<_>>(),
        })
    }

    pub(crate) fn ready(&self) -> Result<(), String> {
        if self.traffic.phase() != DrainPhase::Running {
            return Err("draining".into());
        }
        if !self.southbound.borrow().ready {
            return Err(
                "no southbound state yet, neither from the controller nor from a snapshot".into(),
            );
        }
        let mut reconciler = self
            .reconciler
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !reconciler.tables().is_attached() {
            return Err(format!(
                "the program is not attached to {}; the agent attaches it again within seconds",
                self.config.device.device
            ));
        }
        match reconciler.status().pending_entries {
            0 => Ok(()),
            n => Err(format!("{n} elements of the maps could not be written yet")),
        }
    }
}

//! The edge on one page, for `/config_dump` and readiness.

use std::sync::{Arc, Mutex, PoisonError};

use canal_kit::drain::{Phase, Watcher};
use canal_kit::southbound::Status;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::config::EdgeConfig;
use crate::keeper::Keeper;
use crate::kernel::Kernel;

/// Of what the controller said and is not in the maps, so much is shown.
const LEFT_OUT_SHOWN: usize = 100;

/// What operators look at.
pub(crate) struct Board {
    pub(crate) config: EdgeConfig,
    pub(crate) keeper: Arc<Mutex<Keeper<Kernel>>>,
    pub(crate) southbound: watch::Receiver<Status>,
    pub(crate) traffic: Watcher,
}

impl Board {
    pub(crate) fn json(&self) -> Value {
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        let (attached, pinned) = (keeper.tables().is_attached(), keeper.tables().is_pinned());
        let (content, maps) = (keeper.content(), keeper.maps());
        let replicas: Vec<Value> = maps
            .members
            .iter()
            .map(|(n, m)| {
                let up = content.replicas.get(n).map(|s| s.up);
                json!({"name": m.name.as_str(), "number": n.get(), "address": m.address, "own": m.own, "up": up, "controllerSays": m.up})
            })
            .collect();
        let address = |((vni, ip), id): (&(canal_model::ids::Vni, std::net::IpAddr), &canal_model::ids::ServiceId)| json!({"vni": vni.get(), "address": ip, "service": id.get()});
        let table = |(id, t): (&canal_model::ids::ServiceId, &Arc<crate::maps::Table>)| json!({"service": id.get(), "vni": t.vni.get(), "version": t.version});
        json!({
            "edge": self.config.edge.as_str(),
            "az": self.config.az.as_str(),
            "version": env!("CARGO_PKG_VERSION"),
            "place": self.config.place,
            "program": {"attached": attached, "pinned": pinned},
            "southbound": *self.southbound.borrow(),
            "behind": keeper.standing().behind,
            "leftOut": maps.left_out.iter().take(LEFT_OUT_SHOWN).map(ToString::to_string).collect::<Vec<_>>(),
            "leftOutCount": maps.left_out.len(),
            "replicas": replicas,
            "addresses": content.addresses.iter().map(address).collect::<Vec<_>>(),
            "tables": content.tables.iter().map(table).collect::<Vec<_>>(),
            "prefixes": content.prefixes.iter().map(|((v, net), via)| json!({"vni": v.get(), "prefix": net, "node": via.node})).collect::<Vec<_>>(),
            "hosts": content.hosts.iter().map(|(h, n)| json!({"address": h, "replica": n})).collect::<Vec<_>>(),
        })
    }

    pub(crate) fn ready(&self) -> Result<(), String> {
        if self.traffic.phase() != Phase::Running {
            return Err("draining".into());
        }
        if !self.southbound.borrow().ready {
            return Err("no southbound state yet, neither from the controller nor from a snapshot".into());
        }
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        if !keeper.tables().is_attached() {
            return Err(format!("the program is not on {}; it is put there again within seconds", self.config.place.device));
        }
        match keeper.standing().behind {
            0 => Ok(()),
            n => Err(format!("{n} elements of the maps could not be written yet")),
        }
    }
}

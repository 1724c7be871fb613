//! What is known by name: for each tenant its services' gateway addresses. Pure; a name is looked up in one tenant's zone, and there is no
//! way from one to another.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use canal_model::ids::{AzName, ServiceId, ServiceKey, TenantName};
use canal_model::program::{GatewayAddress, Resource};
use canal_wire::tier::{self, TIER_SERVICE};

/// All zones.
#[derive(Debug, Default)]
pub struct Zones {
    /// Of which tenant a local address is.
    homes: HashMap<ServiceId, TenantName>,
    tenants: HashMap<TenantName, Zone>,
    /// Of the state that this is made of; the serial number of all zones.
    pub generation: u64,
}

/// One tenant's names.
#[derive(Debug, Default)]
pub struct Zone {
    /// By `service.namespace`.
    services: HashMap<String, Vec<Place>>,
    namespaces: HashSet<String>,
}

#[derive(Debug)]
struct Place {
    az: AzName,
    open: bool,
    addresses: Vec<IpAddr>,
}

/// What a name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A service; its addresses, of both families.
    Service(Vec<IpAddr>),
    /// Nothing by itself, but there are names below (RFC 8020).
    Between,
    /// There is no such name below `cluster.local`.
    Unknown,
    /// Nobody here answers for such names.
    Foreign,
}

fn is_tier(key: &ServiceKey) -> bool {
    (key.namespace.as_str(), key.name.as_str()) == TIER_SERVICE
}

/// Whether zones change with this resource.
pub fn concerns(resource: &Resource) -> bool {
    match resource {
        Resource::Address(_) => true,
        Resource::Service(service) => is_tier(&service.key),
        Resource::Table(table) => is_tier(&table.service),
        _ => false,
    }
}

/// The zones of a state.
pub fn decide_zones<'a>(resources: impl Iterator<Item = &'a Arc<Resource>>, generation: u64) -> Zones {
    let mut zones = Zones { generation, ..Zones::default() };
    for resource in resources {
        let (id, key) = match &**resource {
            Resource::Address(address) => {
                zones.add(address);
                (address.id, &address.service)
            }
            Resource::Service(service) => (service.id, &service.key),
            Resource::Table(table) => (table.id, &table.service),
            _ => continue,
        };
        if is_tier(key) {
            zones.homes.insert(id, key.tenant.clone());
        }
    }
    for zone in zones.tenants.values_mut() {
        // The order of arrival must not show.
        zone.services.values_mut().for_each(|places| places.sort_by(|a, b| a.az.cmp(&b.az)));
    }
    zones
}

impl Zones {
    fn add(&mut self, address: &GatewayAddress) {
        let zone = self.tenants.entry(address.service.tenant.clone()).or_default();
        let namespace = address.service.namespace.as_str().to_ascii_lowercase();
        let name = format!("{}.{namespace}", address.service.name.as_str().to_ascii_lowercase());
        let place = Place { az: address.az.clone(), open: address.open, addresses: address.addresses.clone() };
        zone.services.entry(name).or_default().push(place);
        zone.namespaces.insert(namespace);
    }

    /// The tenant whose queries come to this address.
    pub fn home(&self, local: IpAddr) -> Option<&TenantName> {
        self.homes.get(&tier::service_of(local)?)
    }

    /// A tenant's zone.
    pub fn of(&self, tenant: &TenantName) -> Option<&Zone> {
        self.tenants.get(tenant)
    }
}

impl Zone {
    /// What the labels of a name, in lower case, stand for to clients of a replica in `az`.
    pub fn find(&self, labels: &[&str], az: &AzName) -> Found {
        let inside = labels.strip_suffix(&["cluster", "local"]);
        match (inside, inside.unwrap_or(labels)) {
            (Some(_), [] | ["svc"]) => Found::Between,
            (Some(_), [namespace, "svc"]) if self.namespaces.contains(*namespace) => Found::Between,
            (Some(_), [name, namespace, "svc"]) => self.service(name, namespace, az).map_or(Found::Unknown, Found::Service),
            (Some(_), _) => Found::Unknown,
            (None, [name, namespace] | [name, namespace, "svc"]) => {
                self.service(name, namespace, az).map_or(Found::Foreign, Found::Service)
            }
            (None, _) => Found::Foreign,
        }
    }

    fn service(&self, name: &str, namespace: &str, az: &AzName) -> Option<Vec<IpAddr>> {
        let places = self.services.get(&format!("{name}.{namespace}"))?;
        Some(decide_places(places, az))
    }
}

/// The own AZ if it is open, else all others that are, else the own: a client that must wait for someone waits for the nearest.
fn decide_places(places: &[Place], az: &AzName) -> Vec<IpAddr> {
    let own = || places.iter().filter(|p| p.az == *az);
    let open = || places.iter().filter(|p| p.open);
    let addresses = |chosen: &mut dyn Iterator<Item = &Place>| chosen.flat_map(|p| p.addresses.iter().copied()).collect::<Vec<_>>();
    if own().any(|p| p.open && !p.addresses.is_empty()) {
        addresses(&mut own())
    } else if open().any(|p| !p.addresses.is_empty()) {
        addresses(&mut open())
    } else if own().next().is_some() {
        addresses(&mut own())
    } else {
        addresses(&mut places.iter())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn address(service: &str, id: u32, az: &str, addresses: &[&str], open: bool) -> Arc<Resource> {
        Arc::new(Resource::Address(GatewayAddress {
            service: service.parse().unwrap(),
            id: ServiceId::new(id).unwrap(),
            az: az.parse().unwrap(),
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            open,
        }))
    }

    #[test]
    fn the_nearest_open_az_answers() {
        for (case, open, want) in [
            ("own", [true, true, true], &["10.0.1.1"][..]),
            ("others", [false, true, true], &["10.0.2.1", "10.0.3.1"]),
            ("other", [false, false, true], &["10.0.3.1"]),
            ("none", [false, false, false], &["10.0.1.1"]),
        ] {
            let all: Vec<_> =
                (1..=3).rev().map(|n| address("alpha/default/web", 7, &format!("az{n}"), &[&format!("10.0.{n}.1")], open[n - 1])).collect();
            let zones = decide_zones(all.iter(), 1);
            let found = zones.of(&"alpha".parse().unwrap()).unwrap().find(&["web", "default"], &"az1".parse().unwrap());
            assert_eq!(found, Found::Service(want.iter().map(|a| a.parse().unwrap()).collect()), "{case}");
        }
    }

    #[test]
    fn names_are_known_in_three_spellings_and_only_in_their_tenant() {
        let all = [
            address("alpha/default/web", 7, "az1", &["10.0.1.1", "fd00::1"], true),
            address("alpha/canal-system/gateway", 5, "az1", &["10.0.1.5"], true),
            address("beta/default/db", 8, "az1", &["10.0.1.1"], true),
            address("beta/canal-system/gateway", 6, "az1", &["10.0.1.5"], true),
        ];
        let zones = decide_zones(all.iter(), 1);
        for (local, tenant) in [("240.0.0.5", Some("alpha")), ("fdca:a1:0:240::6", Some("beta")), ("240.0.0.7", None), ("10.0.1.5", None)] {
            assert_eq!(zones.home(local.parse().unwrap()).map(TenantName::as_str), tenant, "{local}");
        }
        let (alpha, az) = (zones.of(&"alpha".parse().unwrap()).unwrap(), "az1".parse().unwrap());
        let web = Found::Service(vec!["10.0.1.1".parse().unwrap(), "fd00::1".parse().unwrap()]);
        for (name, want) in [
            ("web.default.svc.cluster.local", &web),
            ("web.default.svc", &web),
            ("web.default", &web),
            ("db.default.svc.cluster.local", &Found::Unknown),
            ("db.default", &Found::Foreign),
            ("web.default.cluster.local", &Found::Unknown),
            ("x.web.default.svc.cluster.local", &Found::Unknown),
            ("default.svc.cluster.local", &Found::Between),
            ("other.svc.cluster.local", &Found::Unknown),
            ("svc.cluster.local", &Found::Between),
            ("cluster.local", &Found::Between),
            ("local", &Found::Foreign),
            ("web", &Found::Foreign),
            ("www.example.com", &Found::Foreign),
        ] {
            assert_eq!(alpha.find(&name.split('.').collect::<Vec<_>>(), &az), *want, "{name}");
        }
        assert_eq!(alpha.find(&[], &az), Found::Foreign);
    }
}

//! DNS zones: for each tenant, the gateway addresses of its services by name. Pure.
//!
//! A name is looked up in one tenant's zone, and no lookup leads to another zone.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use canal_model::ids::{AzName, ServiceId, ServiceKey, TenantName};
use canal_model::program::{GatewayAddress, Resource};
use canal_wire::tier::{self, TIER_SERVICE};

/// The zones of all tenants.
#[derive(Debug, Default)]
pub struct DnsZones {
    /// The tenant of each tier service, to whose address its queries come.
    homes: HashMap<ServiceId, TenantName>,
    tenants: HashMap<TenantName, DnsZone>,
    /// Generation of the state from which the zones are made; it is the serial number of all zones.
    pub generation: u64,
}

/// Names of one tenant's services.
#[derive(Debug, Default)]
pub struct DnsZone {
    /// Addresses by `service.namespace`, one element per AZ.
    services: HashMap<String, Vec<ZoneAddresses>>,
    namespaces: HashSet<String>,
}

#[derive(Debug)]
struct ZoneAddresses {
    az: AzName,
    open: bool,
    addresses: Vec<IpAddr>,
}

/// Result of looking up a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ZoneLookup {
    /// The name is a service's, which has these addresses of both families.
    Service(Vec<IpAddr>),
    /// The name has no data, but there are names below it (RFC 8020).
    Between,
    /// The name does not exist: it is below `cluster.local`, or it is a short form of a name there
    /// that no other server has.
    Unknown,
    /// This server is not responsible for such names.
    Foreign,
}

fn is_tier(key: &ServiceKey) -> bool {
    (key.namespace.as_str(), key.name.as_str()) == TIER_SERVICE
}

/// Returns whether the zones depend on this resource.
pub fn concerns(resource: &Resource) -> bool {
    match resource {
        Resource::Address(_) => true,
        Resource::Service(service) => is_tier(&service.key),
        Resource::Table(table) => is_tier(&table.service),
        _ => false,
    }
}

/// Builds the zones of a state.
pub fn decide_zones<'a>(
    resources: impl Iterator<Item = &'a Arc<Resource>>,
    generation: u64,
) -> DnsZones {
    let mut zones = DnsZones {
        generation,
        ..DnsZones::default()
    };
    for resource in resources {
        let (id, key) = match &**resource {
            // Clients outside the mesh ask other name servers.
            Resource::Address(address) if address.network.is_some() => continue,
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
        // Sorted, so that the order of arrival has no effect.
        zone.services
            .values_mut()
            .for_each(|places| places.sort_by(|a, b| a.az.cmp(&b.az)));
    }
    zones
}

impl DnsZones {
    fn add(&mut self, address: &GatewayAddress) {
        let zone = self
            .tenants
            .entry(address.service.tenant.clone())
            .or_default();
        let namespace = address.service.namespace.as_str().to_ascii_lowercase();
        let name = format!(
            "{}.{namespace}",
            address.service.name.as_str().to_ascii_lowercase()
        );
        let place = ZoneAddresses {
            az: address.az.clone(),
            open: address.open,
            addresses: address.addresses.clone(),
        };
        zone.services.entry(name).or_default().push(place);
        zone.namespaces.insert(namespace);
    }

    /// Returns the tenant whose queries arrive at this address.
    pub fn home(&self, local: IpAddr) -> Option<&TenantName> {
        self.tenant(tier::service_of(local)?)
    }

    /// Returns the tenant of a tier service.
    pub fn tenant(&self, service: ServiceId) -> Option<&TenantName> {
        self.homes.get(&service)
    }

    /// Returns the zone of a tenant.
    pub fn of(&self, tenant: &TenantName) -> Option<&DnsZone> {
        self.tenants.get(tenant)
    }
}

impl DnsZone {
    /// Looks up a name for clients of a replica in `az`. The labels are in lower case.
    pub fn find(&self, labels: &[&str], az: &AzName) -> ZoneLookup {
        let inside = labels.strip_suffix(&["cluster", "local"]);
        match (inside, inside.unwrap_or(labels)) {
            (Some(_), [] | ["svc"]) => ZoneLookup::Between,
            (Some(_), [namespace, "svc"]) if self.namespaces.contains(*namespace) => {
                ZoneLookup::Between
            }
            (Some(_), [name, namespace, "svc"]) => self
                .service(name, namespace, az)
                .map_or(ZoneLookup::Unknown, ZoneLookup::Service),
            (Some(_), _) => ZoneLookup::Unknown,
            (None, ["local"]) => ZoneLookup::Foreign,
            (None, ["svc"]) => ZoneLookup::Between,
            (None, [namespace] | [namespace, "svc"]) if self.namespaces.contains(*namespace) => {
                ZoneLookup::Between
            }
            (None, [name, namespace] | [name, namespace, "svc"]) => {
                match self.service(name, namespace, az) {
                    Some(addresses) => ZoneLookup::Service(addresses),
                    None if self.namespaces.contains(*namespace) || labels.ends_with(&["svc"]) => {
                        ZoneLookup::Unknown
                    }
                    // Any domain has two labels, too.
                    None => ZoneLookup::Foreign,
                }
            }
            (None, [_] | [.., "svc"]) => ZoneLookup::Unknown,
            (None, _) => ZoneLookup::Foreign,
        }
    }

    fn service(&self, name: &str, namespace: &str, az: &AzName) -> Option<Vec<IpAddr>> {
        let places = self.services.get(&format!("{name}.{namespace}"))?;
        Some(decide_places(places, az))
    }
}

/// Returns the addresses of the own AZ if it is open, else of all open AZs, else of the own AZ: a
/// client that must wait waits for the nearest.
fn decide_places(places: &[ZoneAddresses], az: &AzName) -> Vec<IpAddr> {
    let own = || places.iter().filter(|p| p.az == *az);
    let open = || places.iter().filter(|p| p.open);
    let addresses = |chosen: &mut dyn Iterator<Item = &ZoneAddresses>| {
        chosen
            .flat_map(|p| p.addresses.iter().copied())
            .collect::<Vec<_>>()
    };
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

    pub(crate) fn address(
        service: &str,
        id: u32,
        az: &str,
        addresses: &[&str],
        open: bool,
    ) -> Arc<Resource> {
        Arc::new(Resource::Address(GatewayAddress {
            service: service.parse().unwrap(),
            id: ServiceId::new(id).unwrap(),
            az: az.parse().unwrap(),
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
            network: None,
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
            let all: Vec<_> = (1..=3)
                .rev()
                .map(|n| {
                    address(
                        "alpha/default/web",
                        7,
                        &format!("az{n}"),
                        &[&format!("10.0.{n}.1")],
                        open[n - 1],
                    )
                })
                .collect();
            let zones = decide_zones(all.iter(), 1);
            let found = zones
                .of(&"alpha".parse().unwrap())
                .unwrap()
                .find(&["web", "default"], &"az1".parse().unwrap());
            assert_eq!(
                found,
                ZoneLookup::Service(want.iter().map(|a| a.parse().unwrap()).collect()),
                "{case}"
            );
        }
    }

    #[test]
    fn names_are_known_in_three_spellings_and_only_in_their_tenant() {
        let all = [
            address(
                "alpha/default/web",
                7,
                "az1",
                &["10.0.1.1", "fd00::1"],
                true,
            ),
            address("alpha/canal-system/gateway", 5, "az1", &["10.0.1.5"], true),
            address("beta/default/db", 8, "az1", &["10.0.1.1"], true),
            address("beta/canal-system/gateway", 6, "az1", &["10.0.1.5"], true),
        ];
        let zones = decide_zones(all.iter(), 1);
        // The address of a service inside the tier contains its number. Only that of a tenant's
        // gateway service determines whose queries arrive there; 7 is an application.
        for (local, tenant) in [
            ("240.0.0.5", Some("alpha")),
            ("fdca:a1:0:240::6", Some("beta")),
            ("240.0.0.7", None),
            ("10.0.1.5", None),
        ] {
            assert_eq!(
                zones.home(local.parse().unwrap()).map(TenantName::as_str),
                tenant,
                "{local}"
            );
        }
        let (alpha, az) = (
            zones.of(&"alpha".parse().unwrap()).unwrap(),
            "az1".parse().unwrap(),
        );
        let web = ZoneLookup::Service(vec![
            "10.0.1.1".parse().unwrap(),
            "fd00::1".parse().unwrap(),
        ]);
        for (name, want) in [
            ("web.default.svc.cluster.local", &web),
            ("web.default.svc", &web),
            ("web.default", &web),
            ("db.default.svc.cluster.local", &ZoneLookup::Unknown),
            ("db.default", &ZoneLookup::Unknown),
            ("db.default.svc", &ZoneLookup::Unknown),
            // Nobody else has names below `svc`, but `db.other` may be a domain of the Internet.
            ("db.other.svc", &ZoneLookup::Unknown),
            ("a.b.c.svc", &ZoneLookup::Unknown),
            ("db.other", &ZoneLookup::Foreign),
            ("default", &ZoneLookup::Between),
            ("default.svc", &ZoneLookup::Between),
            ("svc", &ZoneLookup::Between),
            ("web.default.cluster.local", &ZoneLookup::Unknown),
            ("x.web.default.svc.cluster.local", &ZoneLookup::Unknown),
            ("default.svc.cluster.local", &ZoneLookup::Between),
            ("other.svc.cluster.local", &ZoneLookup::Unknown),
            ("svc.cluster.local", &ZoneLookup::Between),
            ("cluster.local", &ZoneLookup::Between),
            // The zone begins at `cluster.local`; its parent is not this server's.
            ("local", &ZoneLookup::Foreign),
            ("web", &ZoneLookup::Unknown),
            ("example.com", &ZoneLookup::Foreign),
            ("www.example.com", &ZoneLookup::Foreign),
        ] {
            assert_eq!(
                alpha.find(&name.split('.').collect::<Vec<_>>(), &az),
                *want,
                "{name}"
            );
        }
        assert_eq!(alpha.find(&[], &az), ZoneLookup::Foreign);
    }
}

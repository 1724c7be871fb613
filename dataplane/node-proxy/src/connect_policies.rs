//! Refusals at `connect()`: loads the refusals of [`decide_outbound`] into the tables of the
//! connect hook. Applications then get ECONNREFUSED from `connect()`.
//!
//! Only refusals that depend on the snapshot alone are loaded. Those that depend on certificates,
//! gateways or limits stay with the proxy. So does a tenant that is unknown or does not fit into
//! the tables. Start at [`decide_destinations`].
//!
//! [`decide_outbound`]: crate::routing::decide_outbound

use std::collections::{HashMap, HashSet};

use canal_model::ids::TenantName;
use canal_model::program::{OutboundTrafficPolicy, Service};
use canal_offload::connect_tables::{
    CONNECT_REFUSALS, ConnectRefusals, ConnectTables, Destination, TenantDestinations, Verdict,
};
use canal_runtime::metrics::{GaugeFamily, MetricFamily, Registry, SharedCounter};
use canal_wire::tier::DNS_PORT;

use crate::capture::CaptureBackend;
use crate::refusal::NodeRefusal;
use crate::snapshot::{GatewayAddressTarget, NodeSnapshot, NodeTenantView};
use crate::telemetry::ConnectRefusal;

/// The refusals that the connect hook counts, in the order of [`CONNECT_REFUSALS`].
const REASONS: [NodeRefusal; CONNECT_REFUSALS.len()] = [
    NodeRefusal::UnknownPort,
    NodeRefusal::OutsideMesh,
    NodeRefusal::ReservedPort,
    NodeRefusal::GatewayAddress,
    NodeRefusal::TenantClosed,
];

const UNKNOWN_PORT: Verdict = Verdict::CANAL_CAPTURE_REFUSED_UNKNOWN_PORT;
const OUTSIDE_MESH: Verdict = Verdict::CANAL_CAPTURE_REFUSED_OUTSIDE_MESH;
const GATEWAY_ADDRESS: Verdict = Verdict::CANAL_CAPTURE_REFUSED_GATEWAY_ADDRESS;
const TENANT_CLOSED: Verdict = Verdict::CANAL_CAPTURE_REFUSED_TENANT_CLOSED;

/// Derives the verdicts for all destinations of the tenant's pods. The hook itself knows each pod's
/// own addresses and the reserved ports.
pub fn decide_destinations(tenant: &NodeTenantView) -> TenantDestinations {
    let outside = (tenant.tenant.outbound_traffic_policy == OutboundTrafficPolicy::Deny)
        .then_some(OUTSIDE_MESH);
    let mut destinations = TenantDestinations {
        all: tenant.rules.closed.then_some(TENANT_CLOSED),
        outside,
        ..TenantDestinations::default()
    };
    // From the lowest precedence to the highest: a later entry replaces an earlier one.
    if outside.is_some() {
        // A resolver outside the mesh is reachable for DNS only.
        let outside = tenant
            .tenant
            .resolvers
            .iter()
            .filter(|ip| !tenant.is_pod(**ip) && !tenant.is_gateway(**ip));
        destinations
            .addresses
            .extend(outside.map(|ip| (*ip, Destination::new(OUTSIDE_MESH, &[DNS_PORT]))));
    }
    destinations
        .addresses
        .extend(tenant.entrance_addresses().map(|ip| {
            let destination = match tenant.gateway_address_target(ip) {
                Some(GatewayAddressTarget::Service(service)) => of_service(service),
                // Pods may use only the DNS of the tier there, as in `decide_outbound`.
                Some(GatewayAddressTarget::Tier) => Destination::new(GATEWAY_ADDRESS, &[DNS_PORT]),
                // No service has the address yet, so it must not be dialled past the mesh.
                None => Destination::new(GATEWAY_ADDRESS, &[]),
            };
            (ip, destination)
        }));
    destinations.addresses.extend(
        tenant
            .service_addresses()
            .map(|(ip, service)| (*ip, of_service(service))),
    );
    // A gateway range takes precedence over pod ranges, also over those with a longer prefix; both
    // take precedence over the outside.
    let gateways = &tenant.tenant.gateway_cidrs;
    let pods = tenant.tenant.pod_cidrs.iter().map(|pods| {
        let is_of_gateways = gateways.iter().any(|range| range.contains(pods));
        (*pods, is_of_gateways.then_some(GATEWAY_ADDRESS))
    });
    destinations.ranges.extend(pods);
    destinations
        .ranges
        .extend(gateways.iter().map(|range| (*range, Some(GATEWAY_ADDRESS))));
    destinations
}

fn of_service(service: &Service) -> Destination {
    let ports: Vec<u16> = service.ports.iter().map(|p| p.port).collect();
    Destination::new(UNKNOWN_PORT, &ports)
}

/// Returns the refusals between two readings of a pod's counters.
pub fn decide_refusals(before: &ConnectRefusals, now: &ConnectRefusals) -> Vec<ConnectRefusal> {
    let all = REASONS
        .into_iter()
        .zip(before.count)
        .zip(now.count)
        .zip(now.last);
    all.map(|(((reason, before), now), last)| ConnectRefusal {
        reason,
        count: now.saturating_sub(before),
        destination: last.destination(),
    })
    .filter(|refusal| refusal.count > 0)
    .collect()
}

/// Contents of the connect hook's tables by tenant.
#[derive(Debug)]
pub struct ConnectPolicies {
    tenants: HashMap<TenantName, TenantDestinations>,
    /// Tenants that do not fit into the tables.
    omitted: HashSet<TenantName>,
    destinations: GaugeFamily,
    writes: SharedCounter,
}

impl ConnectPolicies {
    /// Registers the metrics. The tables are empty, so `connect()` refuses nothing yet.
    pub fn new(registry: &Registry) -> Self {
        let destinations = MetricFamily::new(
            "canal_node_connect_destinations",
            "Addresses and ranges that are evaluated at connect(), or by the proxy alone because the tables have no capacity for the tenant.",
            &["tenant", "state"],
        );
        let writes = MetricFamily::new(
            "canal_node_connect_table_writes_total",
            "Elements written to or removed from the connect tables.",
            &[],
        );
        Self {
            tenants: HashMap::new(),
            omitted: HashSet::new(),
            destinations: registry.gauges(destinations),
            writes: registry.counters(writes).shared(&[]),
        }
    }

    /// Updates the tables to the snapshot by writing only the differences.
    pub fn follow(&mut self, capture: &CaptureBackend, view: &NodeSnapshot) {
        let Some(tables) = capture.connect_tables() else {
            return;
        };
        let gone: Vec<TenantName> = self
            .tenants
            .keys()
            .filter(|name| view.tenant(name).is_none())
            .cloned()
            .collect();
        for name in gone {
            self.remove(capture, tables, &name);
        }
        self.omitted.retain(|name| view.tenant(name).is_some());
        for tenant in view.tenants() {
            let name = &tenant.tenant.name;
            let wanted = decide_destinations(tenant);
            if self.tenants.get(name) != Some(&wanted) {
                self.update(capture, tables, name, wanted);
            }
        }
    }

    fn update(
        &mut self,
        capture: &CaptureBackend,
        tables: &ConnectTables,
        name: &TenantName,
        wanted: TenantDestinations,
    ) {
        if !wanted.fits() {
            self.remove(capture, tables, name);
            return self.omit(name, &wanted, "its destinations exceed a tenant's share");
        }
        let before = self.tenants.remove(name).unwrap_or_default();
        match tables.update_tenant(capture.tenant_number(name), &before, &wanted) {
            Ok(writes) => {
                self.writes.add((writes.put + writes.removed) as u64);
                self.omitted.remove(name);
                self.show(name, &wanted, true);
                self.tenants.insert(name.clone(), wanted);
            }
            Err(error) => self.omit(name, &wanted, &error.to_string()),
        }
    }

    fn omit(&mut self, name: &TenantName, wanted: &TenantDestinations, why: &str) {
        self.show(name, wanted, false);
        if self.omitted.insert(name.clone()) {
            tracing::warn!(tenant = %name, why, "capture: connect() refuses nothing for the tenant; only the proxy decides");
        }
    }

    fn remove(&mut self, capture: &CaptureBackend, tables: &ConnectTables, name: &TenantName) {
        let Some(destinations) = self.tenants.remove(name) else {
            return;
        };
        if let Err(error) = tables.remove_tenant(capture.tenant_number(name), &destinations) {
            tracing::warn!(tenant = %name, %error, "capture: cannot withdraw the destinations of a removed tenant");
        }
        self.show(name, &TenantDestinations::default(), true);
    }

    fn show(&self, name: &TenantName, of: &TenantDestinations, is_loaded: bool) {
        let count = (of.addresses.len() + of.ranges.len()) as i64;
        for (state, holds) in [("loaded", is_loaded), ("omitted", !is_loaded)] {
            self.destinations
                .shared(&[name.as_str(), state])
                .set(if holds { count } else { 0 });
        }
    }
}

#[cfg(test)]
mod tests;

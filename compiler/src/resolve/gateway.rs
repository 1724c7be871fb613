//! Gateway objects: the replicas that serve the tenant, and their addresses in its overlay.

use canal_model::ids::{ReplicaName, TenantName};
use canal_model::policy::mesh;
use canal_model::program::Gateway;

use super::addresses::Addresses;
use super::corpus::Said;
use crate::report::Report;

pub(crate) fn resolve(
    tenant: &TenantName,
    said: &[Said<'_, mesh::Gateway>],
    addresses: &mut Addresses,
    report: &mut Report,
) -> Vec<Gateway> {
    let mut gateways: Vec<Gateway> = said.iter().filter_map(|gateway| replica(tenant, gateway, addresses, report)).collect();
    gateways.sort_by(|a, b| a.replica.cmp(&b.replica));
    gateways
}

fn replica(tenant: &TenantName, gateway: &Said<'_, mesh::Gateway>, addresses: &mut Addresses, report: &mut Report) -> Option<Gateway> {
    let name = gateway.object.metadata.name.as_str();
    let replica = match ReplicaName::new(name) {
        Ok(replica) => replica,
        Err(_) => {
            report.error(
                gateway.document,
                "metadata.name",
                format!("{name:?} cannot name a replica"),
                "use up to 63 lower-case letters, digits and '-'",
            );
            return None;
        }
    };
    let key = gateway.document.object.key();
    let mut own = Vec::new();
    for (at, address) in gateway.object.spec.addresses.iter().enumerate() {
        match addresses.claim(*address, &key) {
            Ok(()) if own.contains(address) => {}
            Ok(()) => own.push(*address),
            Err(problem) => {
                report.error(gateway.document, format!("spec.addresses[{at}]"), problem, "give every replica an address of its own")
            }
        }
    }
    if own.is_empty() {
        report.error(
            gateway.document,
            "spec.addresses",
            "the replica has no address by which the tenant can reach it",
            "write its address in the tenant's overlay",
        );
        return None;
    }
    let az = gateway.object.spec.az.clone();
    Some(Gateway { tenant: tenant.clone(), replica, az, addresses: own, draining: gateway.object.spec.draining })
}

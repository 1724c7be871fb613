//! Resolves GatewayReplica objects: the replicas that serve the tenant, and their addresses in its
//! overlay. The planner makes bucket tables.

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{ReplicaName, TenantName};
use canal_model::policy::canal;
use canal_model::program::GatewayReplica;

use super::addresses::AddressOwners;
use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;

pub(crate) fn resolve(
    tenant: &TenantName,
    declared: &[Sourced<'_, canal::GatewayReplica>],
    addresses: &mut AddressOwners,
    report: &mut DiagnosticCollector,
) -> Vec<GatewayReplica> {
    let mut replicas: Vec<GatewayReplica> = declared
        .iter()
        .filter_map(|declared| replica(tenant, declared, addresses, report))
        .collect();
    replicas.sort_by(|a, b| a.replica.cmp(&b.replica));
    replicas
}

fn replica(
    tenant: &TenantName,
    declared: &Sourced<'_, canal::GatewayReplica>,
    addresses: &mut AddressOwners,
    report: &mut DiagnosticCollector,
) -> Option<GatewayReplica> {
    let name = declared.object.metadata.name.as_str();
    let replica = match ReplicaName::new(name) {
        Ok(replica) => replica,
        Err(_) => {
            report.error(
                Code::InvalidReplica,
                declared.document,
                "metadata.name",
                format!("{name:?} is not a valid replica name"),
                "use up to 63 lower-case letters, digits and '-'",
            );
            return None;
        }
    };
    let key = declared.document.object.key();
    let mut own = Vec::new();
    for (at, address) in declared.object.spec.addresses.iter().enumerate() {
        match addresses.claim(*address, &key) {
            // An address that is listed twice counts once.
            Ok(()) if own.contains(address) => {}
            Ok(()) => own.push(*address),
            Err(problem) => report.error(
                Code::AddressConflict,
                declared.document,
                format!("spec.addresses[{at}]"),
                problem,
                "give every replica an address of its own",
            ),
        }
    }
    if own.is_empty() {
        report.error(
            Code::InvalidReplica,
            declared.document,
            "spec.addresses",
            "the replica has no address by which the tenant can reach it",
            "write its address in the tenant's overlay",
        );
        return None;
    }
    let az = declared.object.spec.az.clone();
    Some(GatewayReplica {
        tenant: tenant.clone(),
        replica,
        az,
        addresses: own,
        draining: declared.object.spec.draining,
    })
}

//! The Tenant object. Without a valid one the tenant's isolation is not certain, and nothing of it is sent out.

use canal_model::ids::TenantName;
use canal_model::policy::mesh;
use canal_model::program::Tenant;
use canal_model::tier::{TIER_VNI, has_room, overlap, room};
use ipnet::IpNet;

use super::addresses::reserved_range;
use super::corpus::Said;
use crate::report::Report;

pub(crate) fn resolve(name: &TenantName, said: &[Said<'_, mesh::Tenant>], report: &mut Report) -> Option<Tenant> {
    let mut own = None;
    for tenant in said {
        if tenant.object.metadata.name.as_str() == name.as_str() {
            own = Some(tenant);
        } else {
            report.error(tenant.document, "metadata.name", format!("this is the configuration of tenant {name}"), format!("write {name}"));
        }
    }
    let Some(tenant) = own else {
        let mend = format!("write an object with apiVersion: canal.mesh/v1, kind: Tenant and metadata.name: {name}");
        report.general(format!("tenant {name} has no Tenant object, so nothing of it is served"), mend);
        return None;
    };
    let spec = &tenant.object.spec;
    let pod_cidrs = ranges(tenant, "podCidrs", &spec.pod_cidrs, report);
    if pod_cidrs.is_empty() {
        report.error(tenant.document, "spec.podCidrs", "the tenant has no range for its pods", "write the ranges of its pods' addresses");
    }
    let service_cidrs = ranges(tenant, "serviceCidrs", &spec.service_cidrs, report);
    for (at, net) in service_cidrs.iter().enumerate() {
        if let Some(pods) = pod_cidrs.iter().find(|pods| overlap(pods, net)) {
            let problem = format!("{net} overlaps the pods' range {pods}");
            report.error(tenant.document, format!("spec.serviceCidrs[{at}]"), problem, "choose ranges that do not overlap");
        }
    }
    let gateway_cidrs = gateway_ranges(tenant, &pod_cidrs, &service_cidrs, report);
    if spec.vni.get() == TIER_VNI {
        let problem = format!("VNI {TIER_VNI} is the provider's own, between edges and gateways; nothing of the tenant is served");
        report.error(tenant.document, "spec.vni", problem, "choose another number");
        return None;
    }
    Some(Tenant {
        name: name.clone(),
        vni: spec.vni,
        trust_domain: spec.trust_domain.clone(),
        pod_cidrs,
        gateway_cidrs,
        outside: spec.outside,
    })
}

/// The ranges of gateway addresses: at most one of each family, apart from all others, and large enough for all AZs.
fn gateway_ranges(tenant: &Said<'_, mesh::Tenant>, pods: &[IpNet], services: &[IpNet], report: &mut Report) -> Vec<IpNet> {
    let mut good: Vec<IpNet> = Vec::new();
    for (at, written) in tenant.object.spec.gateway_cidrs.iter().enumerate() {
        let net = written.trunc();
        let (problem, mend) = if let Some(reason) = reserved_range(&net) {
            (format!("{net} {reason}"), "choose a private range such as 10.101.0.0/16")
        } else if let Some(pods) = pods.iter().find(|pods| overlap(pods, &net)) {
            (format!("{net} overlaps the pods' range {pods}"), "choose ranges that do not overlap")
        } else if let Some(services) = services.iter().find(|services| overlap(services, &net)) {
            (format!("{net} overlaps the services' range {services}"), "choose ranges that do not overlap")
        } else if !has_room(&net) {
            let mend = if net.addr().is_ipv4() { "write a prefix length up to 27" } else { "write a prefix length up to 123" };
            (
                format!(
                    "{net} is too small: each AZ has an eighth of it, with room for {} of the 3 services there must be room for",
                    room(&net)
                ),
                mend,
            )
        } else if let Some(other) = good.iter().find(|other| other.addr().is_ipv4() == net.addr().is_ipv4()) {
            (format!("{other} is of the same family"), "write one IPv4 range and one IPv6 range")
        } else {
            good.push(net);
            continue;
        };
        report.error(tenant.document, format!("spec.gatewayCidrs[{at}]"), problem, mend);
    }
    good
}

/// The ranges a tenant may have, with their host bits cleared.
fn ranges(tenant: &Said<'_, mesh::Tenant>, field: &str, written: &[IpNet], report: &mut Report) -> Vec<IpNet> {
    let mut good = Vec::new();
    for (at, net) in written.iter().enumerate() {
        match reserved_range(net) {
            Some(reason) => {
                report.error(
                    tenant.document,
                    format!("spec.{field}[{at}]"),
                    format!("{net} {reason}"),
                    "choose a private range such as 10.1.0.0/16",
                );
            }
            None => good.push(net.trunc()),
        }
    }
    good
}

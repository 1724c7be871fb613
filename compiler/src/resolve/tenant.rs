//! The Tenant object. Without a valid one the tenant's isolation is not certain, and nothing of it is sent out.

use canal_model::ids::TenantName;
use canal_model::policy::mesh;
use canal_model::program::Tenant;
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
        if let Some(pods) = pod_cidrs.iter().find(|pods| pods.contains(&net.network()) || net.contains(&pods.network())) {
            let problem = format!("{net} overlaps the pods' range {pods}");
            report.error(tenant.document, format!("spec.serviceCidrs[{at}]"), problem, "choose ranges that do not overlap");
        }
    }
    Some(Tenant { name: name.clone(), vni: spec.vni, trust_domain: spec.trust_domain.clone(), pod_cidrs, outside: spec.outside })
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

//! Resolves the Tenant object. Without a valid one the tenant's isolation is not certain, and none
//! of its resources are published.

use std::net::IpAddr;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::identity::{COMPONENTS, SYSTEM_NAMESPACE};
use canal_model::ids::TenantName;
use canal_model::policy::canal::{self, KeyFallback, KeysSpec};
use canal_model::program::Tenant;
use canal_model::tier::{TIER_VNI, has_room, overlap};
use canal_model::trust::{KeyLocation, KeyPolicy};
use ipnet::IpNet;

use super::addresses::reserved_range;
use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{GATEWAY_RANGES_MAX, RESOLVERS_MAX};

pub(crate) fn resolve(
    name: &TenantName,
    declared: &[Sourced<'_, canal::Tenant>],
    report: &mut DiagnosticCollector,
) -> Option<Tenant> {
    let tenant = own_object(name, declared, report)?;
    let spec = &tenant.object.spec;
    if !has_own_names(name, tenant, report) {
        return None;
    }
    let pod_cidrs = ranges(tenant, "podCidrs", &spec.pod_cidrs, report);
    // The tenant is still served: without ranges, `workload` refuses each pod address outside the
    // host network.
    if pod_cidrs.is_empty() {
        report.error(
            Code::MissingRange,
            tenant.document,
            "spec.podCidrs",
            "the tenant has no range for its pods",
            "write the ranges of its pods' addresses",
        );
    }
    let service_cidrs = ranges(tenant, "serviceCidrs", &spec.service_cidrs, report);
    for (at, net) in service_cidrs.iter().enumerate() {
        // The tenant is still served: no data plane receives service ranges. They only exclude gateway
        // ranges below.
        if let Some(pods) = pod_cidrs.iter().find(|pods| overlap(pods, net)) {
            let problem = format!("{net} overlaps the pods' range {pods}");
            report.error(
                Code::OverlappingRanges,
                tenant.document,
                format!("spec.serviceCidrs[{at}]"),
                problem,
                "choose ranges that do not overlap",
            );
        }
    }
    let gateway_cidrs = gateway_ranges(tenant, &pod_cidrs, &service_cidrs, report);
    // The tenant's packets would mix with those of the tier itself.
    if spec.vni.get() == TIER_VNI {
        let problem = format!(
            "VNI {TIER_VNI} is reserved for traffic between edges and gateways; the tenant is not served"
        );
        report.error(
            Code::ReservedName,
            tenant.document,
            "spec.vni",
            problem,
            "choose another number",
        );
        return None;
    }
    Some(Tenant {
        name: name.clone(),
        vni: spec.vni,
        trust_domain: spec.trust_domain.clone(),
        pod_cidrs,
        gateway_cidrs,
        outbound_traffic_policy: spec.outbound_traffic_policy,
        keys: keys(tenant),
        shares: spec.shares.clone(),
        resolvers: resolvers(tenant, report),
    })
}

/// Returns the Tenant object of this name. It reports those of other tenants, and the absence of
/// the own one.
fn own_object<'s, 'o>(
    name: &TenantName,
    declared: &'s [Sourced<'o, canal::Tenant>],
    report: &mut DiagnosticCollector,
) -> Option<&'s Sourced<'o, canal::Tenant>> {
    let mut own = None;
    for tenant in declared {
        if tenant.object.metadata.name.as_str() == name.as_str() {
            own = Some(tenant);
        } else {
            report.error(
                Code::OtherTenant,
                tenant.document,
                "metadata.name",
                format!("this is the configuration of tenant {name}"),
                format!("write {name}"),
            );
        }
    }
    if own.is_none() {
        let fix = format!(
            "write an object with apiVersion: canal.mesh/v1, kind: Tenant and metadata.name: {name}"
        );
        report.general(
            Code::MissingTenant,
            format!("tenant {name} has no Tenant object, so it is not served"),
            fix,
        );
    }
    own
}

/// Returns whether neither the name of the tenant nor its trust domain is the provider's, and
/// reports the one that is.
fn has_own_names(
    name: &TenantName,
    tenant: &Sourced<'_, canal::Tenant>,
    report: &mut DiagnosticCollector,
) -> bool {
    // A tenant with the provider's own name, trust domain or VNI would not be isolated from Canal's
    // components.
    if name.as_str() == SYSTEM_NAMESPACE {
        let problem =
            format!("{SYSTEM_NAMESPACE} is reserved for the provider; the tenant is not served");
        report.error(
            Code::ReservedName,
            tenant.document,
            "metadata.name",
            problem,
            "choose another name",
        );
        return false;
    }
    if tenant.object.spec.trust_domain.as_str() == COMPONENTS {
        let problem = format!(
            "{COMPONENTS} is the trust domain of Canal's components; the tenant is not served"
        );
        report.error(
            Code::ReservedName,
            tenant.document,
            "spec.trustDomain",
            problem,
            "choose another trust domain",
        );
        return false;
    }
    true
}

/// Resolves the location of the keys. If the field cannot be parsed, keys are only allowed in key
/// servers, so that they are never elsewhere.
fn keys(tenant: &Sourced<'_, canal::Tenant>) -> KeyPolicy {
    let KeysSpec {
        location: place,
        algorithm,
        fallback,
    } = tenant.object.spec.keys;
    if tenant.fault("spec.keys").is_some() {
        return KeyPolicy {
            location: KeyLocation::KeyServer,
            algorithm,
            local_fallback: false,
        };
    }
    KeyPolicy {
        location: place,
        algorithm,
        local_fallback: place == KeyLocation::KeyServer && fallback == KeyFallback::Local,
    }
}

/// Resolves name servers outside the mesh. An invalid one is left out: its pods then reach fewer
/// name servers, never more.
fn resolvers(tenant: &Sourced<'_, canal::Tenant>, report: &mut DiagnosticCollector) -> Vec<IpAddr> {
    let written = &tenant.object.spec.resolvers;
    let mut good = Vec::new();
    for (at, ip) in written.iter().map(IpAddr::to_canonical).enumerate() {
        let (code, problem, fix) = if at >= RESOLVERS_MAX {
            (
                Code::LimitExceeded,
                format!(
                    "the tenant names {} resolvers, more than {RESOLVERS_MAX}; the rest is left out",
                    written.len()
                ),
                "name fewer",
            )
        } else if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() {
            (
                Code::ReservedAddress,
                format!("pods cannot reach resolver {ip} over the network"),
                "write the resolver's own address",
            )
        } else {
            good.push(ip);
            continue;
        };
        report.error(
            code,
            tenant.document,
            format!("spec.resolvers[{at}]"),
            problem,
            fix,
        );
        if at >= RESOLVERS_MAX {
            break;
        }
    }
    good
}

/// Resolves the ranges of gateway addresses. They overlap no other range, and each is large enough
/// for all AZs.
fn gateway_ranges(
    tenant: &Sourced<'_, canal::Tenant>,
    pods: &[IpNet],
    services: &[IpNet],
    report: &mut DiagnosticCollector,
) -> Vec<IpNet> {
    let written = &tenant.object.spec.gateway_cidrs;
    if written.len() > GATEWAY_RANGES_MAX {
        let problem = format!(
            "the tenant has {} ranges, more than {GATEWAY_RANGES_MAX}; the rest is left out",
            written.len()
        );
        report.refuse_excess(
            tenant.document,
            format!("spec.gatewayCidrs[{GATEWAY_RANGES_MAX}]"),
            problem,
            "write fewer and larger ranges",
        );
    }
    let mut good: Vec<IpNet> = Vec::new();
    // Each range is compared with valid ranges only, so that one mistake causes one diagnostic.
    for (at, net) in written
        .iter()
        .map(IpNet::trunc)
        .enumerate()
        .take(GATEWAY_RANGES_MAX)
    {
        let overlapped =
            |ranges: &[IpNet]| ranges.iter().find(|other| overlap(other, &net)).copied();
        let apart = "choose ranges that do not overlap";
        let (code, problem, fix) = if let Some(reason) = reserved_range(&net) {
            (
                Code::ReservedAddress,
                format!("{net} {reason}"),
                "choose a private range such as 10.101.0.0/16",
            )
        } else if let Some(pods) = overlapped(pods) {
            let problem = format!("{net} overlaps the pods' range {pods}");
            (Code::OverlappingRanges, problem, apart)
        } else if let Some(services) = overlapped(services) {
            let problem = format!("{net} overlaps the services' range {services}");
            (Code::OverlappingRanges, problem, apart)
        } else if let Some(other) = overlapped(&good) {
            let problem = format!("{net} overlaps {other}");
            (Code::OverlappingRanges, problem, apart)
        } else if !has_room(&net) {
            // Both leave the 5 bits that `has_room` needs.
            let fix = if net.addr().is_ipv4() {
                "write a prefix length up to 27"
            } else {
                "write a prefix length up to 123"
            };
            (
                Code::RangeTooSmall,
                format!(
                    "{net} is too small: each AZ gets one eighth of it, which must hold the tier's own service and one more"
                ),
                fix,
            )
        } else {
            good.push(net);
            continue;
        };
        report.error(
            code,
            tenant.document,
            format!("spec.gatewayCidrs[{at}]"),
            problem,
            fix,
        );
    }
    good
}

/// Returns the ranges that a tenant may have, with their host bits cleared.
fn ranges(
    tenant: &Sourced<'_, canal::Tenant>,
    field: &str,
    written: &[IpNet],
    report: &mut DiagnosticCollector,
) -> Vec<IpNet> {
    let mut good = Vec::new();
    for (at, net) in written.iter().enumerate() {
        match reserved_range(net) {
            Some(reason) => {
                report.error(
                    Code::ReservedAddress,
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

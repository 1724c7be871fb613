//! Resolves EndpointSlices and Endpoints: the pods that serve Services without a selector. A
//! Service with a selector is served by the pods that it selects alone.
//!
//! An endpoint is an address of a pod in the object's own namespace: only pods have an identity,
//! and whoever writes objects in one namespace must not reach pods of another one past its
//! ReferenceGrants.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName, ServiceKey, TenantName};
use canal_model::policy::Document;
use canal_model::policy::endpoints::{SERVICE_NAME_LABEL, SlicePort, WrittenEndpoints};
use canal_model::policy::kubernetes::{Pod, Transport};
use canal_model::program::{EndpointPort, Service, Workload};

use super::tenant_objects::{Sourced, TenantObjects};
use super::workload::EndpointLists;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{ENDPOINT_ADDRESSES_MAX, ENDPOINT_PORTS_MAX, PORTS_PER_SERVICE_MAX};

/// The endpoints of each Service as objects write them.
type ByService<'a> = BTreeMap<ServiceKey, Vec<(&'a Document, WrittenEndpoints<'a>)>>;

/// The pods by namespace and address.
type PodAddresses<'a> = HashMap<(&'a Namespace, IpAddr), usize>;

/// Adds the endpoints of all Services without a selector.
pub(super) fn serve(
    tenant: &TenantName,
    corpus: &TenantObjects<'_>,
    services: &BTreeMap<ServiceKey, Service>,
    living: &[(&Sourced<'_, Pod>, Workload)],
    endpoints: &mut EndpointLists,
    report: &mut DiagnosticCollector,
) {
    let mut written = collect(tenant, corpus, report);
    let pods: PodAddresses<'_> = living
        .iter()
        .enumerate()
        // Most tenants write no endpoints, and then the table is not needed.
        .filter(|_| !written.is_empty())
        .flat_map(|(at, (_, pod))| {
            let addresses = pod.addresses.iter();
            addresses.map(move |address| ((&pod.namespace, *address), at))
        })
        .collect();
    for declared in &corpus.services {
        let metadata = &declared.object.metadata;
        let key = service_key(tenant, &metadata.namespace, metadata.name.clone());
        let own = written.remove(&key).unwrap_or_default();
        // A Service that was left out has a diagnostic already.
        let Some(service) = services.get(&key) else {
            continue;
        };
        if declared.object.spec.selector.is_empty() && own.is_empty() {
            report.warning(
                Code::ServiceWithoutEndpoints,
                declared.document,
                "spec.selector",
                "the service has no selector and no EndpointSlice, so it has no endpoints",
                "write the labels of its pods, or an EndpointSlice with their addresses",
            );
        }
        for (document, _) in own
            .iter()
            .filter(|_| !declared.object.spec.selector.is_empty())
        {
            let problem = format!(
                "Service {}/{} has a selector, which alone decides about its endpoints; these are left out",
                key.namespace, key.name
            );
            let fix = "remove the Service's selector, or this object";
            report.warning(Code::EndpointsIgnored, document, "metadata", problem, fix);
        }
        if declared.object.spec.selector.is_empty() {
            add(service, &own, &pods, endpoints, report);
        }
    }
    // What is left belongs to no Service.
    for (key, orphans) in &written {
        for (document, _) in orphans {
            let problem = format!("there is no Service {}/{}", key.namespace, key.name);
            report.warning(
                Code::EndpointsWithoutService,
                document,
                "metadata",
                problem,
                "create it or correct the name",
            );
        }
    }
}

fn service_key(tenant: &TenantName, namespace: &Namespace, name: ObjectName) -> ServiceKey {
    ServiceKey {
        tenant: tenant.clone(),
        namespace: namespace.clone(),
        name,
    }
}

/// Collects the endpoints of all objects. An object with a fault has none: the fault may restrict
/// them.
fn collect<'a>(
    tenant: &TenantName,
    corpus: &TenantObjects<'a>,
    report: &mut DiagnosticCollector,
) -> ByService<'a> {
    let mut written = ByService::new();
    for slice in &corpus.endpoint_slices {
        if slice.object.repeats_selector() || !slice.document.faults.is_empty() {
            continue;
        }
        let Some(name) = slice.object.service() else {
            let problem = format!(
                "the label {SERVICE_NAME_LABEL} names no Service, so the slice has no effect"
            );
            let fix = "write the name of its Service there";
            report.warning(
                Code::EndpointsWithoutService,
                slice.document,
                "metadata.labels",
                problem,
                fix,
            );
            continue;
        };
        let key = service_key(tenant, &slice.object.metadata.namespace, name);
        let own = (slice.document, slice.object.written());
        written.entry(key).or_default().push(own);
    }
    for object in &corpus.endpoints {
        let metadata = &object.object.metadata;
        let key = service_key(tenant, &metadata.namespace, metadata.name.clone());
        if object.document.faults.is_empty() {
            let own = object.object.written().map(|own| (object.document, own));
            written.entry(key).or_default().extend(own);
        }
    }
    written
}

/// Adds the endpoints of one Service, each port of a pod once.
fn add(
    service: &Service,
    own: &[(&Document, WrittenEndpoints<'_>)],
    pods: &PodAddresses<'_>,
    endpoints: &mut EndpointLists,
    report: &mut DiagnosticCollector,
) {
    let mut seen = BTreeSet::new();
    for (document, written) in own {
        let (addresses, ports) = (written.addresses.len(), written.ports.len());
        if addresses > ENDPOINT_ADDRESSES_MAX || ports > ENDPOINT_PORTS_MAX {
            let problem = format!(
                "the object has {addresses} addresses and {ports} ports, and may have {ENDPOINT_ADDRESSES_MAX} and {ENDPOINT_PORTS_MAX}; it has no effect"
            );
            let fix = "split it into several EndpointSlices";
            report.refuse_excess(document, "", problem, fix);
            continue;
        }
        // Each port of a Service meets all written ports of its name, so their number multiplies.
        let served: BTreeSet<(u16, u16)> = served_ports(service, written.ports)
            .take(PORTS_PER_SERVICE_MAX)
            .collect();
        for (field, address) in &written.addresses {
            // A text that is no address is reported as one that no Pod has.
            let parsed = address.parse::<IpAddr>().ok();
            let pod = parsed.and_then(|ip| pods.get(&(&service.key.namespace, ip)));
            let Some(&at) = pod else {
                let problem = format!(
                    "no Pod of namespace {} has the address {address:?}; endpoints that are not Pods are not supported in this version",
                    service.key.namespace
                );
                let fix = "write the address of a Pod, or let clients dial the address itself";
                report.warning(Code::EndpointNotPod, document, field.clone(), problem, fix);
                continue;
            };
            for &(port, target_port) in &served {
                // The tenant's resources are full, so the rest is not compiled.
                if endpoints.is_full() {
                    return;
                }
                // EndpointSlices of one Service may list the same pod.
                if !seen.insert((at, (port, target_port))) {
                    continue;
                }
                let service = service.key.clone();
                endpoints.push(
                    at,
                    EndpointPort {
                        service,
                        port,
                        target_port,
                    },
                );
            }
        }
    }
}

/// Returns the Service's ports that the object's ports serve, by name, each with the endpoints' own
/// port.
fn served_ports<'a>(
    service: &'a Service,
    ports: &'a [SlicePort],
) -> impl Iterator<Item = (u16, u16)> + 'a {
    let tcp = ports.iter().filter(|port| port.protocol == Transport::Tcp);
    tcp.flat_map(move |own| {
        let named = service
            .ports
            .iter()
            .filter(move |port| port.name == own.name);
        named.filter_map(move |port| Some((port.port, own.port?.get())))
    })
}

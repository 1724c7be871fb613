//! Resolves Pods to workloads with the service ports that they serve. Kubernetes has not finished
//! to start a pod without a node or an address, so the compiler leaves it out without a diagnostic.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{AzName, Namespace, NodeName, ServiceAccount, ServiceKey, TenantName};
use canal_model::policy::kubernetes::{
    self, AZ_ANNOTATION, Pod, PodPhase, TUNNEL_ANNOTATION, TargetPort, Transport, ZONE_LABEL,
};
use canal_model::program::{EndpointPort, Service, Tenant, TunnelProtocol, Workload};

use super::addresses::AddressOwners;
use super::manual_endpoints;
use super::tenant_objects::{Sourced, TenantObjects};
use super::udp_route::RoutedUdpPort;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::UDP_PORTS_PER_WORKLOAD_MAX;
use crate::resource_budget::endpoint_bytes;

/// Zone of a pod that names none.
const ZONE_UNKNOWN: &str = "unknown";
/// Service account that Kubernetes gives a pod that names none.
const ACCOUNT_DEFAULT: &str = "default";

/// The ports that pods may serve.
pub(crate) struct ServedPorts<'a> {
    pub(crate) services: &'a BTreeMap<ServiceKey, Service>,
    pub(crate) named: &'a [RoutedUdpPort<'a>],
    /// Bytes that the served ports of all workloads may take together. One more than fits is
    /// resolved.
    pub(crate) bytes_max: u64,
}

/// The service ports that each pod serves. Their number is the product of pods and services, so it
/// is bounded while they are added.
pub(super) struct EndpointLists {
    lists: Vec<Vec<EndpointPort>>,
    bytes: u64,
    bytes_max: u64,
}

impl EndpointLists {
    /// Returns whether the endpoints exceed the bytes that the tenant may have.
    pub(super) fn is_full(&self) -> bool {
        self.bytes > self.bytes_max
    }

    pub(super) fn push(&mut self, at: usize, endpoint: EndpointPort) {
        if let Some(list) = self
            .lists
            .get_mut(at)
            .filter(|_| self.bytes <= self.bytes_max)
        {
            self.bytes += endpoint_bytes(&endpoint) as u64;
            list.push(endpoint);
        }
    }
}

pub(crate) fn resolve(
    name: &TenantName,
    tenant: Option<&Tenant>,
    corpus: &TenantObjects<'_>,
    ports: &ServedPorts<'_>,
    addresses: &mut AddressOwners,
    report: &mut DiagnosticCollector,
) -> Vec<Workload> {
    let mut living: Vec<(&Sourced<'_, Pod>, Workload)> = Vec::new();
    let mut pods: Vec<&Sourced<'_, Pod>> = corpus.pods.iter().collect();
    // Pods that are being deleted come last, so that their address goes to the successor.
    pods.sort_by_key(|pod| pod.object.metadata.deletion_timestamp.is_some());
    for pod in pods {
        if let Some(workload) = workload(name, tenant, pod, addresses, report) {
            living.push((pod, workload));
        }
    }
    let index = PodLabelIndex::new(&living);
    let mut endpoints = EndpointLists {
        lists: vec![Vec::new(); living.len()],
        bytes: 0,
        bytes_max: ports.bytes_max,
    };
    for service in &corpus.services {
        serve(
            name,
            service,
            ports.services,
            &living,
            &index,
            &mut endpoints,
            report,
        );
    }
    manual_endpoints::serve(
        name,
        corpus,
        ports.services,
        &living,
        &mut endpoints,
        report,
    );
    let mut udp_ports: Vec<BTreeSet<u16>> = vec![BTreeSet::new(); living.len()];
    for port in ports.named {
        open(port, &living, &index, &mut udp_ports, report);
    }
    let served = living.into_iter().zip(endpoints.lists).zip(udp_ports);
    let mut workloads: Vec<Workload> = served
        .map(|(((_, workload), endpoints), udp_ports)| Workload {
            endpoints,
            udp_ports,
            ..workload
        })
        .collect();
    workloads.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    workloads
}

fn workload(
    name: &TenantName,
    tenant: Option<&Tenant>,
    pod: &Sourced<'_, Pod>,
    addresses: &mut AddressOwners,
    report: &mut DiagnosticCollector,
) -> Option<Workload> {
    let Pod {
        metadata,
        spec,
        status,
    } = pod.object;
    // The containers of such a pod have ended, and its address may be another pod's by now.
    if matches!(status.phase, PodPhase::Succeeded | PodPhase::Failed) {
        return None;
    }
    // A pod without a node is not scheduled yet.
    let node: NodeName = spec.node_name.clone()?;
    let own = pod_addresses(tenant, pod, addresses, report);
    // The pod has no address yet, its successor has it, or each address has a diagnostic.
    if own.is_empty() {
        return None;
    }
    if spec.host_network {
        let problem = "the pod uses its node's network, so the mesh cannot distinguish it from other processes of the node and leaves it out";
        report.warning(
            Code::HostNetworkPod,
            pod.document,
            "spec.hostNetwork",
            problem,
            "give it its own network to include it in the mesh",
        );
        return None;
    }
    let is_ready = status
        .conditions
        .iter()
        .any(|condition| condition.kind == "Ready" && condition.status == "True");
    Some(Workload {
        tenant: name.clone(),
        namespace: metadata.namespace.clone(),
        name: metadata.name.clone(),
        service_account: spec
            .service_account_name
            .clone()
            .or_else(|| ServiceAccount::new(ACCOUNT_DEFAULT).ok())?,
        node,
        az: zone(pod, report)?,
        addresses: own,
        labels: metadata.labels.clone(),
        // A pod that is being deleted gets no new connections, although it may still be ready.
        ready: is_ready && metadata.deletion_timestamp.is_none(),
        tunnel: tunnel(pod, report),
        endpoints: Vec::new(),
        udp_ports: BTreeSet::new(),
    })
}

fn pod_addresses(
    tenant: Option<&Tenant>,
    pod: &Sourced<'_, Pod>,
    addresses: &mut AddressOwners,
    report: &mut DiagnosticCollector,
) -> Vec<IpAddr> {
    let status = &pod.object.status;
    let mut written: Vec<(String, IpAddr)> = status
        .pod_ips
        .iter()
        .enumerate()
        .map(|(at, pod_ip)| (format!("status.podIPs[{at}].ip"), pod_ip.ip))
        .collect();
    // As in Kubernetes, `podIP` repeats the first of `podIPs`.
    if let Some(address) = status.pod_ip.filter(|_| written.is_empty()) {
        written.push(("status.podIP".to_owned(), address));
    }
    let key = pod.document.object.key();
    let mut own = Vec::new();
    for (field, address) in written {
        let ranges = tenant
            .map(|tenant| tenant.pod_cidrs.as_slice())
            .unwrap_or_default();
        if tenant.is_some()
            && !pod.object.spec.host_network
            && !ranges.iter().any(|range| range.contains(&address))
        {
            let problem = format!(
                "{address} is in none of the tenant's pod ranges, so no traffic would be sent to it"
            );
            report.error(
                Code::AddressOutsideRanges,
                pod.document,
                field,
                problem,
                "add its range to the Tenant's spec.podCidrs",
            );
        // The address is the node's, which many pods share, so no pod claims it.
        } else if pod.object.spec.host_network {
            own.push(address);
        } else {
            match addresses.claim(address, &key) {
                // An address that is listed twice counts once.
                Ok(()) if own.contains(&address) => {}
                Ok(()) => own.push(address),
                // The successor of a pod that is being deleted may already have its address.
                Err(_) if pod.object.metadata.deletion_timestamp.is_some() => {}
                Err(problem) => report.error(
                    Code::AddressConflict,
                    pod.document,
                    field,
                    problem,
                    "give every pod an address of its own",
                ),
            }
        }
    }
    own
}

fn zone(pod: &Sourced<'_, Pod>, report: &mut DiagnosticCollector) -> Option<AzName> {
    let metadata = &pod.object.metadata;
    let written = metadata
        .annotations
        .get(AZ_ANNOTATION)
        .or_else(|| metadata.labels.get(ZONE_LABEL));
    let field = format!("metadata.annotations[{AZ_ANNOTATION:?}]");
    match written.map(|zone| AzName::new(zone)) {
        Some(Ok(zone)) => return Some(zone),
        Some(Err(error)) => report.warning(
            Code::UnknownZone,
            pod.document,
            field,
            format!("the zone is not known: {}", error.problem()),
            error.fix(),
        ),
        None => report.warning(
            Code::UnknownZone,
            pod.document,
            field,
            "the pod does not name its zone",
            "annotate it with the zone's name",
        ),
    }
    AzName::new(ZONE_UNKNOWN).ok()
}

fn tunnel(pod: &Sourced<'_, Pod>, report: &mut DiagnosticCollector) -> TunnelProtocol {
    match pod
        .object
        .metadata
        .annotations
        .get(TUNNEL_ANNOTATION)
        .map(String::as_str)
    {
        None | Some("hbone") => TunnelProtocol::Hbone,
        Some("none") => TunnelProtocol::None,
        Some(other) => {
            let problem = format!("{other:?} is not a valid way to reach a pod; HBONE is used");
            report.error(
                Code::InvalidAnnotation,
                pod.document,
                format!("metadata.annotations[{TUNNEL_ANNOTATION:?}]"),
                problem,
                "write none or hbone",
            );
            TunnelProtocol::Hbone
        }
    }
}

/// Index of pods by namespace and label, so that a selector visits only pods that carry its rarest
/// label.
struct PodLabelIndex<'a> {
    by_label: HashMap<(&'a Namespace, &'a str, &'a str), Vec<usize>>,
}

impl<'a> PodLabelIndex<'a> {
    fn new(living: &'a [(&Sourced<'_, Pod>, Workload)]) -> Self {
        let mut by_label: HashMap<_, Vec<usize>> = HashMap::new();
        for (at, (_, workload)) in living.iter().enumerate() {
            for (label, value) in &workload.labels {
                by_label
                    .entry((&workload.namespace, label.as_str(), value.as_str()))
                    .or_default()
                    .push(at);
            }
        }
        Self { by_label }
    }

    /// Returns the pods that carry the rarest label of the selector; none for an empty selector.
    fn candidates<'s>(
        &'s self,
        namespace: &'s Namespace,
        service: &'s kubernetes::Service,
    ) -> &'s [usize] {
        let lists = service.spec.selector.iter().map(|(label, value)| {
            self.by_label
                .get(&(namespace, label.as_str(), value.as_str()))
                .map(Vec::as_slice)
                .unwrap_or_default()
        });
        lists.min_by_key(|list| list.len()).unwrap_or_default()
    }

    /// Returns the pods that carry all labels of the selector.
    fn selected(
        &self,
        namespace: &Namespace,
        service: &kubernetes::Service,
        living: &[(&Sourced<'_, Pod>, Workload)],
    ) -> Vec<usize> {
        let has_all = |pod: &Workload| {
            service
                .spec
                .selector
                .iter()
                .all(|(k, v)| pod.labels.get(k) == Some(v))
        };
        let candidates = self.candidates(namespace, service).iter().copied();
        candidates
            .filter(|at| living.get(*at).is_some_and(|(_, pod)| has_all(pod)))
            .collect()
    }
}

fn serve(
    name: &TenantName,
    sourced: &Sourced<'_, kubernetes::Service>,
    services: &BTreeMap<ServiceKey, Service>,
    living: &[(&Sourced<'_, Pod>, Workload)],
    index: &PodLabelIndex<'_>,
    endpoints: &mut EndpointLists,
    report: &mut DiagnosticCollector,
) {
    let metadata = &sourced.object.metadata;
    let key = ServiceKey {
        tenant: name.clone(),
        namespace: metadata.namespace.clone(),
        name: metadata.name.clone(),
    };
    // A Service that was left out has a diagnostic already.
    let Some(service) = services.get(&key) else {
        return;
    };
    let spec = &sourced.object.spec;
    let selected = index.selected(&metadata.namespace, sourced.object, living);
    for port in &service.ports {
        let Some((place, written)) = spec
            .ports
            .iter()
            .enumerate()
            .find(|(_, written)| written.port.get() == port.port)
        else {
            // Not reached: each port of the service was made of one of these.
            continue;
        };
        let mut served = 0;
        for &at in &selected {
            let target = living
                .get(at)
                .and_then(|(pod, _)| target_port(written, pod.object, Transport::Tcp));
            if let Some(target_port) = target {
                endpoints.push(
                    at,
                    EndpointPort {
                        service: key.clone(),
                        port: port.port,
                        target_port,
                    },
                );
                served += 1;
            }
        }
        // Pods without the named port are normal during a rollout; none with it is a mistake.
        if let (0, false, Some(TargetPort::Name(target))) =
            (served, selected.is_empty(), &written.target_port)
        {
            let problem = format!("no selected pod has a container port named {target:?}");
            report.warning(
                Code::UnresolvedTargetPort,
                sourced.document,
                format!("spec.ports[{place}].targetPort"),
                problem,
                "name a port of the pods' containers, or write its number",
            );
        }
    }
}

/// Opens the port at the pods that its Service selects. A pod at its maximum number of ports keeps
/// those of the oldest routes.
fn open(
    port: &RoutedUdpPort<'_>,
    living: &[(&Sourced<'_, Pod>, Workload)],
    index: &PodLabelIndex<'_>,
    udp_ports: &mut [BTreeSet<u16>],
    report: &mut DiagnosticCollector,
) {
    let selected = index.selected(
        &port.service.object.metadata.namespace,
        port.service.object,
        living,
    );
    let (mut opened, mut full) = (0, Vec::new());
    for at in &selected {
        // Both lists have an item for each index.
        let Some(((pod, workload), ports)) = living.get(*at).zip(udp_ports.get_mut(*at)) else {
            continue;
        };
        // Pods without the named port are normal during a rollout.
        let Some(target) = target_port(port.written, pod.object, Transport::Udp) else {
            continue;
        };
        // Counted even if the pod is full: the port exists, and the limit has its own diagnostic.
        opened += 1;
        if ports.len() >= UDP_PORTS_PER_WORKLOAD_MAX && !ports.contains(&target) {
            full.push(workload);
        } else {
            ports.insert(target);
        }
    }
    if let Some(pod) = full.first() {
        let problem = format!(
            "Pod {}/{} has more than {UDP_PORTS_PER_WORKLOAD_MAX} UDP ports that routes name; this one stays closed at {} of {} pods",
            pod.namespace,
            pod.name,
            full.len(),
            selected.len()
        );
        report.refuse_excess(
            port.document,
            port.field.clone(),
            problem,
            "name fewer ports, or share them out among pods",
        );
    }
    // No pod with the named port is a mistake.
    if let (0, false, Some(TargetPort::Name(target))) =
        (opened, selected.is_empty(), &port.written.target_port)
    {
        let problem = format!("no pod of the Service has a UDP container port named {target:?}");
        report.warning(
            Code::UnresolvedTargetPort,
            port.document,
            port.field.clone(),
            problem,
            "name a port of the pods' containers, or write its number",
        );
    }
}

fn target_port(written: &kubernetes::ServicePort, pod: &Pod, transport: Transport) -> Option<u16> {
    match &written.target_port {
        None => Some(written.port.get()),
        Some(TargetPort::Number(number)) => Some(number.get()),
        Some(TargetPort::Name(name)) => pod
            .spec
            .ports()
            .find(|port| port.name == *name && port.protocol == transport)
            .map(|port| port.container_port.get()),
    }
}

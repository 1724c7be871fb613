//! Cross-checks of a topology: names, references, overlaps, capacities. Pure. `read` has already
//! checked each field alone. Start at [`topology`].

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};

use crate::plan::{
    AZS_MAX, NODES_UNDERLAY, PODS_PER_NODE_MAX, PROVIDERS, RELAY_PREFIX, REPLICAS_MAX, node_slots,
};
use crate::problem::{FilePosition, TopologyProblems};
use crate::tier::{TIER_RANGE4, TIER_RANGE6, TIER_VNI};
use crate::topology::{Component, PodTemplate, TenantTopology, Topology, TopologyKeyLocation};

/// Maximum length of a world's name, which is part of cgroup and namespace names and of the paths
/// of sockets. A socket's path has 108 bytes at most (unix(7)).
pub(crate) const WORLD_NAME_MAX: usize = 20;
/// Maximum length of an AZ's name, which is part of interface names (`x` + name, at most 15 bytes).
const AZ_NAME_MAX: usize = 10;
/// Maximum length of a DNS label (RFC 1035 §2.3.4).
const NAME_MAX: usize = 63;
/// Maximum number of hosts of one world. It bounds what `up` tries to build. Nobody measured how
/// many a machine can carry.
pub(crate) const HOSTS_MAX: usize = 2_000;

/// A mistake without its position: description and fix.
type CheckError = (String, String);

pub(crate) fn world_name(name: &str) -> Result<(), CheckError> {
    label(name, "world", WORLD_NAME_MAX)
}

/// Returns whether a world can have this name. Programs may use longer names than files.
pub(crate) fn may_be_world_name(name: &str) -> bool {
    label(name, "world", NAME_MAX).is_ok()
}

/// Checks for a lower-case DNS label of at most `max` bytes.
fn label(name: &str, what: &str, max: usize) -> Result<(), CheckError> {
    let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let good = !name.is_empty()
        && name.len() <= max
        && name.bytes().all(legal)
        && !name.starts_with('-')
        && !name.ends_with('-');
    if good {
        return Ok(());
    }
    let fix = format!("use 1 to {max} of a-z, 0-9 and -, not - at an end");
    Err((format!("{what}: {name:?} is not a name"), fix))
}

pub(crate) fn topology(topology: &Topology, findings: &mut TopologyProblems) {
    azs(topology, findings);
    host_names(topology, findings);
    for component in underlay_components(topology) {
        az_exists(topology, &component.az, component.spot, findings);
    }
    if !topology.is_tier() && topology.gateways.len() > REPLICAS_MAX {
        let what = format!(
            "{} gateways are more than {REPLICAS_MAX}",
            topology.gateways.len()
        );
        findings.add(
            topology.gateways[REPLICAS_MAX].spot,
            what,
            "remove some: a tenant's gateway range is one /24",
        );
    }
    for tenant in &topology.tenants {
        tenant_alone(topology, tenant, findings);
    }
    tenants_together(topology, findings);
    tier(topology, findings);
    keys(topology, findings);
    mesh_parts(topology, findings);
    size(topology, findings);
}

fn underlay_components(topology: &Topology) -> impl Iterator<Item = &Component> {
    let controller = topology.controller.iter();
    controller
        .chain(&topology.edges)
        .chain(&topology.gateways)
        .chain(&topology.key_servers)
        .chain(&topology.hosts)
}

fn azs(topology: &Topology, findings: &mut TopologyProblems) {
    let mut seen: BTreeMap<&str, FilePosition> = BTreeMap::new();
    for az in &topology.azs {
        if let Err((what, fix)) = label(&az.name, "az", AZ_NAME_MAX) {
            findings.add(az.spot, what, fix);
        }
        if let Some(first) = seen.insert(&az.name, az.spot) {
            findings.add(
                az.spot,
                format!("az {:?} is already on line {}", az.name, first.line),
                "give it another name",
            );
        }
    }
    if let Some(az) = topology.azs.get(AZS_MAX) {
        findings.add(
            az.spot,
            format!("more than {AZS_MAX} AZs"),
            format!("keep at most {AZS_MAX}"),
        );
    }
}

/// Checks that all hosts of a world have different names, because `exec`, `logs` and faults address
/// hosts by name.
fn host_names(topology: &Topology, findings: &mut TopologyProblems) {
    let mut seen: BTreeMap<String, FilePosition> = BTreeMap::new();
    for az in &topology.azs {
        seen.insert(crate::plan::router_name(&az.name), az.spot);
    }
    let components =
        underlay_components(topology).map(|component| (&component.name, component.spot));
    let nodes = topology
        .tenants
        .iter()
        .flat_map(|tenant| &tenant.nodes)
        .map(|node| (&node.name, node.spot));
    for (name, spot) in components.chain(nodes) {
        if let Err((what, fix)) = label(name, "name", NAME_MAX) {
            findings.add(spot, what, fix);
        }
        if name.starts_with(RELAY_PREFIX) {
            findings.add(
                spot,
                format!("the name {name:?} begins with the prefix of relays"),
                format!("choose one without {RELAY_PREFIX:?}"),
            );
        }
        if let Some(first) = seen.insert(name.clone(), spot) {
            findings.add(
                spot,
                format!("the name {name:?} is already taken on line {}", first.line),
                "give it another name",
            );
        }
    }
}

fn az_exists(topology: &Topology, name: &str, spot: FilePosition, findings: &mut TopologyProblems) {
    if topology.azs.iter().any(|az| az.name == name) {
        return;
    }
    let names: Vec<&str> = topology.azs.iter().map(|az| az.name.as_str()).collect();
    findings.add(
        spot,
        format!("there is no AZ {name:?}"),
        format!("use one of: {}", names.join(", ")),
    );
}

fn tenant_alone(topology: &Topology, tenant: &TenantTopology, findings: &mut TopologyProblems) {
    if let Err((what, fix)) = label(&tenant.name, "tenant", NAME_MAX) {
        findings.add(tenant.spots.tenant, what, fix);
    }
    let domain = &tenant.trust_domain;
    let legal =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-._".contains(&byte);
    if domain.is_empty() || domain.len() > 255 || !domain.bytes().all(legal) {
        findings.add(
            tenant.spots.trust_domain,
            format!("trustDomain: {domain:?} is not a SPIFFE trust domain"),
            "use a-z, 0-9, '.', '-' and '_' only",
        );
    }
    for node in &tenant.nodes {
        az_exists(topology, &node.az, node.spot, findings);
    }
    let slots = node_slots(tenant.pods4);
    if tenant.nodes.len() > slots {
        let what = format!(
            "{} nodes do not fit into {}",
            tenant.nodes.len(),
            tenant.pods4
        );
        findings.add(
            tenant.nodes[slots].spot,
            what,
            format!("keep {slots} nodes, or write a shorter prefix"),
        );
    }
    pods(tenant, findings);
    service_objects(tenant, findings);
}

fn pods(tenant: &TenantTopology, findings: &mut TopologyProblems) {
    let mut on_node: BTreeMap<&str, usize> = BTreeMap::new();
    let mut seen: BTreeMap<String, FilePosition> = BTreeMap::new();
    for pod in &tenant.pods {
        pod_names(pod, findings);
        for name in &pod.nodes {
            if !tenant.nodes.iter().any(|node| node.name == *name) {
                let names: Vec<&str> = tenant.nodes.iter().map(|node| node.name.as_str()).collect();
                findings.add(
                    pod.nodes_spot,
                    format!("tenant {:?} has no node {name:?}", tenant.name),
                    format!("use one of: {}", names.join(", ")),
                );
            }
        }
        for replica in 0..pod.replicas {
            let node = &pod.nodes[usize::from(replica) % pod.nodes.len()];
            let count = on_node.entry(node).or_default();
            *count += 1;
            if *count == PODS_PER_NODE_MAX + 1 {
                findings.add(
                    pod.spot,
                    format!("node {node:?} has more than {PODS_PER_NODE_MAX} pods"),
                    "spread them over more nodes",
                );
            }
            let full = format!("{}/{}-{replica}", pod.namespace, pod.name);
            if let Some(first) = seen.insert(full.clone(), pod.spot) {
                findings.add(
                    pod.spot,
                    format!("pod {full} is already on line {}", first.line),
                    "give it another name or namespace",
                );
            }
        }
    }
}

pub(crate) fn pod_names(pod: &PodTemplate, findings: &mut TopologyProblems) {
    // "-999" must still fit into the label.
    for (name, what, max) in [
        (&pod.name, "pod", NAME_MAX - 4),
        (&pod.namespace, "namespace", NAME_MAX),
        (&pod.service_account, "serviceAccount", NAME_MAX),
    ] {
        if let Err((what, fix)) = label(name, what, max) {
            findings.add(pod.spot, what, fix);
        }
    }
}

/// Checks that the VIPs of the tenant's own Service objects are inside its service ranges.
fn service_objects(tenant: &TenantTopology, findings: &mut TopologyProblems) {
    for service in crate::services::in_files(&tenant.config) {
        for address in &service.addresses {
            let inside = tenant
                .service_cidrs
                .iter()
                .any(|cidr| cidr.contains(address));
            if !inside {
                let what = format!(
                    "service {}/{} has {address}, which is in no serviceCidrs range of {:?}",
                    service.namespace, service.name, tenant.name
                );
                findings.add(
                    tenant.spots.services,
                    what,
                    "add its range to serviceCidrs, or choose another clusterIP",
                );
            }
        }
    }
}

/// Returns the ranges that are routed in the underlay, which no tenant may use.
fn reserved(tier: bool) -> Vec<(IpNet, String)> {
    let net = |a, b, prefix| Ipv4Net::new_assert(Ipv4Addr::new(a, b, 0, 0), prefix).into();
    let mut ranges = vec![
        (NODES_UNDERLAY.into(), "the nodes' underlay"),
        (PROVIDERS.into(), "the provider's hosts"),
        (net(127, 0, 8), "loopback"),
        (net(169, 254, 16), "link-local gateways"),
    ];
    if tier {
        ranges.extend([
            (TIER_RANGE4.into(), "the cloud tier"),
            (TIER_RANGE6.into(), "the cloud tier"),
        ]);
    }
    ranges
        .into_iter()
        .map(|(range, owner)| (range, owner.to_owned()))
        .collect()
}

fn tenants_together(topology: &Topology, findings: &mut TopologyProblems) {
    let mut ranges = reserved(topology.is_tier());
    let reserved = ranges.len();
    let (mut names, mut vnis, mut domains) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for tenant in &topology.tenants {
        if let Some(first) = names.insert(tenant.name.clone(), tenant.spots.tenant.line) {
            findings.add(
                tenant.spots.tenant,
                format!("tenant {:?} is already on line {first}", tenant.name),
                "give it another name",
            );
        }
        // The VNI separates the tenants' packets.
        if let Some(first) = vnis.insert(tenant.vni, tenant.spots.vni.line) {
            findings.add(
                tenant.spots.vni,
                format!("vni {} is already used on line {first}", tenant.vni),
                "choose another vni",
            );
        }
        // The trust domain of an identity names its tenant.
        if let Some(first) =
            domains.insert(tenant.trust_domain.clone(), tenant.spots.trust_domain.line)
        {
            findings.add(
                tenant.spots.trust_domain,
                format!(
                    "trustDomain {:?} is already used on line {first}",
                    tenant.trust_domain
                ),
                "choose another one",
            );
        }
        let pods = [IpNet::V4(tenant.pods4), IpNet::V6(tenant.pods6)]
            .map(|cidr| (cidr, tenant.spots.pods));
        let services = tenant
            .service_cidrs
            .iter()
            .map(|cidr| (*cidr, tenant.spots.services));
        let gateways = tenant
            .gateway_cidrs
            .iter()
            .flat_map(|(four, six)| [IpNet::V4(*four), IpNet::V6(*six)]);
        let gateways = gateways.map(|cidr| (cidr, tenant.spots.gateways));
        if topology.is_tier() {
            // Tenants of a tier world may use the same addresses. Only the tier's ranges and the
            // tenant's own other ranges are reserved.
            ranges.truncate(reserved);
        }
        for (cidr, spot) in pods.into_iter().chain(services).chain(gateways) {
            if let Some((other, owner)) = ranges.iter().find(|(range, _)| overlap(range, &cidr)) {
                findings.add(
                    spot,
                    format!("{cidr} overlaps {other} of {owner}"),
                    "choose a range that is not in use",
                );
            }
            ranges.push((cidr, format!("tenant {:?}", tenant.name)));
        }
    }
}

fn overlap(left: &IpNet, right: &IpNet) -> bool {
    left.contains(&right.network()) || right.contains(&left.network())
}

/// Maximum number of edges in one AZ: the controller (`EDGES_MAX` of `control/fleet/src/report.rs`)
/// refuses the reports of further ones, so such a world would never be ready.
const EDGES_MAX: usize = 16;

/// Checks the requirements of a tier world, and that other worlds have no settings of tier worlds.
fn tier(topology: &Topology, findings: &mut TopologyProblems) {
    let mut edges: BTreeMap<&str, usize> = BTreeMap::new();
    for edge in &topology.edges {
        let of_az = edges.entry(&edge.az).or_insert(0);
        *of_az += 1;
        if *of_az > EDGES_MAX {
            findings.add(
                edge.spot,
                format!("AZ {:?} has {EDGES_MAX} edges already", edge.az),
                "remove this one",
            );
        }
    }
    for gateway in &topology.gateways {
        match (&gateway.backend, topology.is_tier()) {
            (None, true) => findings.add(
                gateway.spot,
                format!("gateway {:?} has no `backend`", gateway.name),
                "add `backend: …`",
            ),
            // Settings that would be ignored are mistakes, because their author expects an effect.
            (None, false) if gateway.receive_cores > 0 => {
                findings.add(
                    gateway.spot,
                    "`receiveCores` has no effect without edges",
                    "remove it, or add `edges`",
                );
            }
            (Some(_), false) => findings.add(
                gateway.spot,
                "`backend` has no effect without edges",
                "remove it, or add `edges`",
            ),
            (Some(backend), true) => {
                if let Err((what, fix)) = label(backend, "backend", NAME_MAX) {
                    findings.add(gateway.spot, what, fix);
                }
            }
            (None, false) => {}
        }
        // Packets reach a gateway only through an edge of its AZ.
        if topology.is_tier() && !edges.contains_key(gateway.az.as_str()) {
            let what = format!("AZ {:?} has gateways and no edge", gateway.az);
            findings.add(
                gateway.spot,
                what,
                format!(
                    "add an edge to `edges`: {{name: edge-…, az: {}}}",
                    gateway.az
                ),
            );
        }
    }
    for tenant in &topology.tenants {
        tier_tenant(topology, tenant, findings);
    }
}

fn tier_tenant(topology: &Topology, tenant: &TenantTopology, findings: &mut TopologyProblems) {
    let name = &tenant.name;
    if !topology.is_tier() {
        // Each setting that would be ignored is a mistake, because its author expects an effect.
        if tenant.gateway_cidrs.is_some() {
            findings.add(
                tenant.spots.gateways,
                "`gatewayCidrs` have no effect without edges",
                "remove them, or add `edges`",
            );
        }
        if tenant.home_az.is_some() {
            findings.add(
                tenant.spots.home_az,
                "`homeAz` has no effect without edges",
                "remove it, or add `edges`",
            );
        }
        if tenant.dns {
            findings.add(
                tenant.spots.dns,
                "`dns` has no effect without edges",
                "remove it, or add `edges`",
            );
        }
        return;
    }
    if tenant.gateway_cidrs.is_none() {
        let fix = "add e.g. `gatewayCidrs: [10.1.192.0/18, \"fd00:101:0:c::/64\"]`, which its pods and services do not use";
        findings.add(
            tenant.spots.tenant,
            format!("tenant {name:?} has no `gatewayCidrs`"),
            fix,
        );
    }
    if let Some(az) = &tenant.home_az {
        az_exists(topology, az, tenant.spots.home_az, findings);
    }
    if tenant.vni == TIER_VNI {
        findings.add(
            tenant.spots.vni,
            format!("vni {TIER_VNI} is reserved for the cloud tier"),
            "choose another vni",
        );
    }
}

/// Checks the names of a gateway that joins a running world. The caller checks that they are free.
pub(crate) fn gateway_names(name: &str, backend: &str) -> Result<(), CheckError> {
    label(name, "name", NAME_MAX)?;
    label(backend, "backend", NAME_MAX)
}

/// Checks the owners of key servers, and that the provider has one if a tenant's keys are in key
/// servers.
fn keys(topology: &Topology, findings: &mut TopologyProblems) {
    for key_server in &topology.key_servers {
        let name = &key_server.name;
        match &key_server.tenant {
            Some(tenant) if !topology.tenants.iter().any(|other| other.name == *tenant) => {
                let names: Vec<&str> = topology
                    .tenants
                    .iter()
                    .map(|tenant| tenant.name.as_str())
                    .collect();
                findings.add(
                    key_server.spot,
                    format!("key server {name:?}: there is no tenant {tenant:?}"),
                    format!("use one of: {}", names.join(", ")),
                );
            }
            // The provider's key servers create all of their keys, so files would never be used.
            None if key_server.tls_dir.is_some() => findings.add(
                key_server.spot,
                format!("key server {name:?} has `tlsDir` and no `tenant`"),
                "add `tenant: …`, or remove it: the provider's key server has only keys that it creates",
            ),
            // A tenant's own server, or one of the provider's without files: both are right.
            _ => {}
        }
    }
    // A tenant's own key server has only keys of its files; keys that Canal creates need the
    // provider's.
    let are_there = topology
        .key_servers
        .iter()
        .any(|key_server| key_server.tenant.is_none());
    for tenant in &topology.tenants {
        if tenant
            .keys
            .is_some_and(|keys| keys.location == TopologyKeyLocation::KeyServer)
            && !are_there
        {
            findings.add(
                tenant.spots.keys,
                format!(
                    "the keys of tenant {:?} are in key servers, but the provider has no key server",
                    tenant.name
                ),
                "add one without `tenant` to `keyServers`: {name: ks-1, az: …}",
            );
        }
    }
}

/// Checks that there is a controller if node proxies, gateways, edges or key servers need one.
fn mesh_parts(topology: &Topology, findings: &mut TopologyProblems) {
    if topology.controller.is_some() {
        return;
    }
    let fix = "add `controller: {az: …}`";
    let edges = topology.edges.iter().map(|edge| (edge, "edge"));
    let key_servers = topology
        .key_servers
        .iter()
        .map(|key_server| (key_server, "key server"));
    for (component, kind) in edges
        .chain(key_servers)
        .chain(topology.gateways.iter().map(|gateway| (gateway, "gateway")))
    {
        if component
            .process
            .as_ref()
            .is_some_and(|process| process.command.is_empty())
        {
            findings.add(
                component.spot,
                format!("{kind} {:?} needs a controller", component.name),
                fix,
            );
        }
    }
    for node in topology.tenants.iter().flat_map(|tenant| &tenant.nodes) {
        if node
            .proxy
            .as_ref()
            .is_some_and(|process| process.command.is_empty())
        {
            findings.add(
                node.spot,
                format!("the proxy of node {:?} needs a controller", node.name),
                format!("{fix}, or write `proxy: false`"),
            );
        }
    }
}

fn size(topology: &Topology, findings: &mut TopologyProblems) {
    let pods: usize = topology
        .tenants
        .iter()
        .flat_map(|tenant| &tenant.pods)
        .map(|pod| usize::from(pod.replicas))
        .sum();
    let nodes: usize = topology
        .tenants
        .iter()
        .map(|tenant| tenant.nodes.len())
        .sum();
    let hosts = pods + nodes + underlay_components(topology).count() + topology.azs.len();
    if hosts > HOSTS_MAX {
        findings.add(
            FilePosition::default(),
            format!("the world has {hosts} hosts, more than {HOSTS_MAX}"),
            "make it smaller, or split it",
        );
    }
}

/// Returns whether an address can be a VIP at all, for callers that read Service objects.
pub(crate) fn is_vip(address: &IpAddr) -> bool {
    !address.is_unspecified() && !address.is_loopback() && !address.is_multicast()
}

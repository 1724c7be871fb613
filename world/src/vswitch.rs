//! The checks of a cloud's virtual switch for its tier, as nft lines for routers. A tenant's node
//! may tunnel only with its own underlay address, in its own VNI, to its own peers and to edges. It
//! may dial the controller and key servers. All else is dropped and counted.
//!
//! In front of key servers, in any world, the lines also limit the clients. Pure. Start at
//! [`refusals`] and [`key_servers`].

use crate::host_environment::{CONTROLLER_PORT, KEYS_PORT};
use crate::plan::{HostKind, HostPlan, NODES_UNDERLAY, PROVIDERS, TenantPlan, WorldPlan};
use crate::tool_batch::{REFUSALS, Tool, ToolBatch};

/// VXLAN's UDP port (RFC 7348 §5).
const VXLAN_PORT: u16 = 4789;
/// Counters of refused packets, one for each reason.
const COUNTERS: [&str; 5] = [
    "refused_source",
    "refused_fragment",
    "refused_vni",
    "refused_peer",
    "refused_provider",
];

/// Returns the rules of the router of the `az`-th AZ.
pub(crate) fn refusals(plan: &WorldPlan, az: usize) -> ToolBatch {
    let mut lines = vec![format!("add table {REFUSALS}")];
    lines.extend(
        COUNTERS
            .iter()
            .map(|counter| format!("add counter {REFUSALS} {counter}")),
    );
    let nodes: Vec<(&HostPlan, usize)> = plan
        .hosts
        .iter()
        .filter(|host| host.az == az)
        .filter_map(|host| match host.kind {
            HostKind::Node { tenant, .. } => Some((host, tenant)),
            _ => None,
        })
        .collect();
    if !nodes.is_empty() {
        for (index, tenant) in plan.tenants.iter().enumerate() {
            if nodes.iter().any(|(_, owner)| *owner == index) {
                lines.extend(tenant_chains(plan, tenant));
            }
        }
        lines.extend(from_nodes(plan, az, &nodes));
    }
    ToolBatch {
        netns: Some(plan.routers[az].netns.clone()),
        tool: Tool::Nft,
        lines,
    }
}

/// Returns the chains that allow the tenant's VNI only, and tunnels only to the tenant's nodes and
/// to edges.
fn tenant_chains(plan: &WorldPlan, tenant: &TenantPlan) -> Vec<String> {
    let vni = tenant.vni;
    let nodes = tenant.nodes.iter().map(|node| node.underlay);
    let ends = list(
        nodes
            .chain(plan.edges.iter().map(|edge| edge.underlay))
            .map(|end| end.to_string()),
    );
    vec![
        format!("add chain {REFUSALS} peers_{vni}"),
        format!("add rule {REFUSALS} peers_{vni} ip daddr {{ {ends} }} accept"),
        format!("add rule {REFUSALS} peers_{vni} counter name refused_peer drop"),
        format!("add chain {REFUSALS} tenant_{vni}"),
        // The expression reads bits 96 to 119 after the start of the UDP header, which are VXLAN's
        // VNI. Packets that are too short are dropped with the others.
        format!("add rule {REFUSALS} tenant_{vni} @th,96,24 {vni} goto peers_{vni}"),
        format!("add rule {REFUSALS} tenant_{vni} counter name refused_vni drop"),
    ]
}

fn from_nodes(plan: &WorldPlan, az: usize, nodes: &[(&HostPlan, usize)]) -> Vec<String> {
    // A tenant controls its key server too, so that is checked like the tenant's nodes.
    let servers = plan.hosts.iter().filter(|host| {
        host.az == az && matches!(host.kind, HostKind::KeyServer { tenant: Some(_) })
    });
    let servers: Vec<&HostPlan> = servers.collect();
    let hosts: Vec<&HostPlan> = nodes
        .iter()
        .map(|(host, _)| *host)
        .chain(servers.iter().copied())
        .collect();
    let devices = list(
        hosts
            .iter()
            .map(|host| format!("\"{}\"", host.router_device())),
    );
    let sources = list(
        hosts
            .iter()
            .map(|host| format!("\"{}\" . {}", host.router_device(), host.ip4)),
    );
    let server_devices = list(
        servers
            .iter()
            .map(|host| format!("\"{}\"", host.router_device())),
    );
    let jumps = list(nodes.iter().map(|(host, tenant)| {
        format!(
            "\"{}\" : goto tenant_{}",
            host.router_device(),
            plan.tenants[*tenant].vni
        )
    }));
    // Order matters: sources and tunnels are checked before any port is accepted.
    let rules = [
        format!("iifname != {{ {devices} }} accept"),
        format!(
            "meta nfproto ipv4 iifname . ip saddr != {{ {sources} }} counter name refused_source drop"
        ),
        // A fragment can hide its VNI from this switch, and the underlay's MTU is large enough for
        // every tunnel.
        // The mask covers the bit for more fragments and the offset.
        "ip frag-off & 0x3fff != 0 counter name refused_fragment drop".to_owned(),
        format!("udp dport {VXLAN_PORT} iifname vmap {{ {jumps} }}"),
    ];
    // Metrics, admin ports and all other ports of the provider's hosts are closed to tenants'
    // nodes.
    let own =
        allowed_ports(plan).map(|allowed| format!("ip daddr . tcp dport {{ {allowed} }} accept"));
    let outside = list(
        plan.hosts
            .iter()
            .filter(|host| is_outside(host))
            .map(|host| host.ip4.to_string()),
    );
    let outside = (!outside.is_empty()).then(|| format!("ip daddr {{ {outside} }} accept"));
    // Of TCP only SYNs are refused, so that nodes can answer connections of the provider's hosts.
    let closed = [
        format!(
            "ip daddr {PROVIDERS} tcp flags & (syn | ack) == syn counter name refused_provider drop"
        ),
        format!("ip daddr {PROVIDERS} meta l4proto udp counter name refused_provider drop"),
    ];
    // A tenant's key server may dial only what a rule above accepts.
    let servers = (!server_devices.is_empty()).then(|| {
        let dialled = format!(
            "iifname {{ {server_devices} }} tcp flags & (syn | ack) == syn counter name refused_provider drop"
        );
        [
            dialled,
            format!("iifname {{ {server_devices} }} meta l4proto udp counter name refused_provider drop"),
        ]
    });
    let rules = rules
        .into_iter()
        .chain(own)
        .chain(outside)
        .chain(closed)
        .chain(servers.into_iter().flatten());
    let chain =
        format!("add chain {REFUSALS} from_nodes {{ type filter hook prerouting priority raw; }}");
    std::iter::once(chain)
        .chain(rules.map(|rule| format!("add rule {REFUSALS} from_nodes {rule}")))
        .collect()
}

/// Returns the provider's addresses and ports that a tenant's node may dial: the controller and key
/// servers.
fn allowed_ports(plan: &WorldPlan) -> impl Iterator<Item = String> {
    let allowed_ports = plan.hosts.iter().filter_map(|host| match host.kind {
        HostKind::Controller => Some(format!("{} . {CONTROLLER_PORT}", host.ip4)),
        HostKind::KeyServer { .. } => Some(format!("{} . {KEYS_PORT}", host.ip4)),
        _ => None,
    });
    let allowed_ports = list(allowed_ports);
    (!allowed_ports.is_empty())
        .then_some(allowed_ports)
        .into_iter()
}

fn is_outside(host: &HostPlan) -> bool {
    host.kind == HostKind::Host { outside: true }
}

/// Returns the rules that limit the clients of the key servers of the `az`-th AZ. Nodes and
/// gateways may connect; to a tenant's own key server only that tenant's nodes and gateways. The
/// rules are on the key servers' router, the last hop before them. Gateways may be added later, so
/// the rules refuse hosts that are known to be neither.
pub(crate) fn key_servers(plan: &WorldPlan, az: usize) -> Option<ToolBatch> {
    let here: Vec<(&HostPlan, Option<usize>)> = plan
        .hosts
        .iter()
        .filter(|host| host.az == az)
        .filter_map(|host| match host.kind {
            HostKind::KeyServer { tenant } => Some((host, tenant)),
            _ => None,
        })
        .collect();
    if here.is_empty() {
        return None;
    }
    let mut lines = vec![
        format!("add table {REFUSALS}"),
        format!("add counter {REFUSALS} refused_keys"),
        format!(
            "add chain {REFUSALS} to_key_servers {{ type filter hook forward priority filter; }}"
        ),
    ];
    for (host, tenant) in here {
        let to = format!(
            "add rule {REFUSALS} to_key_servers oifname \"{}\" tcp dport {KEYS_PORT}",
            host.router_device()
        );
        let others = plan
            .hosts
            .iter()
            .filter(|other| other.name != host.name && !may_query(other))
            .map(|other| other.ip4.to_string());
        lines.push(format!(
            "{to} ip saddr {{ {} }} counter name refused_keys drop",
            list(others)
        ));
        if let Some(owner) = tenant.and_then(|index| plan.tenants.get(index)) {
            // The first rule that matches decides, so the owner's nodes come before all nodes.
            let own = list(owner.nodes.iter().map(|node| node.underlay.to_string()));
            lines.extend((!own.is_empty()).then(|| format!("{to} ip saddr {{ {own} }} accept")));
            lines.push(format!(
                "{to} ip saddr {NODES_UNDERLAY} counter name refused_keys drop"
            ));
        }
    }
    // nft does not accept an empty set.
    lines.retain(|line| !line.contains("{  }"));
    Some(ToolBatch {
        netns: Some(plan.routers[az].netns.clone()),
        tool: Tool::Nft,
        lines,
    })
}

fn may_query(host: &HostPlan) -> bool {
    matches!(host.kind, HostKind::Node { .. } | HostKind::Gateway(_))
}

fn list(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

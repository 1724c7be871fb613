//! What a cloud's virtual switch does for its tier, as nft lines for routers: a tenant's node tunnels with its own underlay address,
//! in its own VNI, to its own peers and to edges; all else is dropped and counted. Pure.

use crate::plan::{HostKind, HostPlan, Plan, TenantPlan};
use crate::script::{Batch, REFUSALS, Tool};

/// VXLAN's port (RFC 7348 §5).
const VXLAN_PORT: u16 = 4789;
/// What is counted, one counter each.
const COUNTERS: [&str; 4] = ["refused_source", "refused_fragment", "refused_vni", "refused_peer"];

/// The rules of the router of the `az`-th AZ.
pub(crate) fn refusals(plan: &Plan, az: usize) -> Batch {
    let mut lines = vec![format!("add table {REFUSALS}")];
    lines.extend(COUNTERS.iter().map(|counter| format!("add counter {REFUSALS} {counter}")));
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
        lines.extend(from_nodes(plan, &nodes));
    }
    Batch { netns: Some(plan.routers[az].netns.clone()), tool: Tool::Nft, lines }
}

/// Where the tenant's tunnels may end, and the one VNI they may have.
fn tenant_chains(plan: &Plan, tenant: &TenantPlan) -> Vec<String> {
    let vni = tenant.vni;
    let nodes = tenant.nodes.iter().map(|node| node.underlay);
    let ends = list(nodes.chain(plan.edges.iter().map(|edge| edge.underlay)).map(|end| end.to_string()));
    vec![
        format!("add chain {REFUSALS} peers_{vni}"),
        format!("add rule {REFUSALS} peers_{vni} ip daddr {{ {ends} }} accept"),
        format!("add rule {REFUSALS} peers_{vni} counter name refused_peer drop"),
        format!("add chain {REFUSALS} tenant_{vni}"),
        // Bits 96 to 119 of the UDP header and what follows. What is too short to have them is dropped with the others.
        format!("add rule {REFUSALS} tenant_{vni} @th,96,24 {vni} goto peers_{vni}"),
        format!("add rule {REFUSALS} tenant_{vni} counter name refused_vni drop"),
    ]
}

fn from_nodes(plan: &Plan, nodes: &[(&HostPlan, usize)]) -> Vec<String> {
    let devices = list(nodes.iter().map(|(host, _)| format!("\"{}\"", host.router_device())));
    let sources = list(nodes.iter().map(|(host, _)| format!("\"{}\" . {}", host.router_device(), host.ip4)));
    let jumps =
        list(nodes.iter().map(|(host, tenant)| format!("\"{}\" : goto tenant_{}", host.router_device(), plan.tenants[*tenant].vni)));
    let rules = [
        format!("iifname != {{ {devices} }} accept"),
        format!("meta nfproto ipv4 iifname . ip saddr != {{ {sources} }} counter name refused_source drop"),
        // A fragment can hide its VNI from this switch, and the underlay is wide enough for every tunnel.
        "ip frag-off & 0x3fff != 0 counter name refused_fragment drop".to_owned(),
        format!("udp dport {VXLAN_PORT} iifname vmap {{ {jumps} }}"),
    ];
    let chain = format!("add chain {REFUSALS} from_nodes {{ type filter hook prerouting priority raw; }}");
    std::iter::once(chain).chain(rules.iter().map(|rule| format!("add rule {REFUSALS} from_nodes {rule}"))).collect()
}

fn list(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

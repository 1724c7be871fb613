//! Turns a plan into commands: the input of `ip`, `bridge`, `tc` and `nft` in each namespace. Pure;
//! `net` runs the batches.
//!
//! The order matters between the stages (spaces, wires, configuration) and between the batches of
//! one namespace. The namespaces of one stage can be configured in any order and in parallel. Start
//! at [`spaces`], [`wires`] and [`configuration`].

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::plan::{
    HostKind, HostPlan, NEXT_HOP4, NEXT_HOP6, NODES_UNDERLAY, PROVIDERS, PodPlan, RelayPlan,
    RouterPlan, TenantPlan, Vtep, WorldPlan,
};
use crate::relay::DEVICES;
use crate::tier::{EdgePlan, REPLICAS6, part4, part6};
use crate::topology::{LinkRate, Vswitch};
use crate::vswitch;

/// Lowest priority of a route, so that "unreachable" applies when nothing else matches.
const LAST: &str = "metric 4278198272";
/// Routing table with the underlay's routes on nodes. Only packets that the node itself sends use
/// it. Any number that no other table of the node has.
const UNDERLAY_TABLE: u32 = 100;

/// nftables table with the counters of refused packets: on nodes those of pods, on gateways those
/// of tenants, on a tier world's routers those of nodes.
pub(crate) const REFUSALS: &str = "inet canal_refuse";

/// A program that reads batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tool {
    Ip,
    Bridge,
    Tc,
    Nft,
}

/// Lines for one program in one namespace. Without a namespace they run in the caller's, which only
/// `netns add` and `netns delete` need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ToolBatch {
    pub(crate) netns: Option<String>,
    pub(crate) tool: Tool,
    pub(crate) lines: Vec<String>,
}

impl ToolBatch {
    fn of(netns: &str, tool: Tool, lines: Vec<String>) -> Self {
        Self {
            netns: Some(netns.to_owned()),
            tool,
            lines,
        }
    }
}

/// Kernel settings of a namespace: paths under /proc/sys, and values.
pub(crate) type Sysctls = Vec<(&'static str, &'static str)>;

/// Treatment of packets that are not addressed to the namespace itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forwarding {
    Never,
    Always,
    /// Does not forward. Devices that the host's own programs create decide themselves which
    /// sources they accept, as on any tier host.
    Tier,
}

/// Returns the settings to write before any device exists, so that every device inherits them.
pub(crate) fn settings(forwarding: Forwarding) -> Sysctls {
    let mut settings = vec![
        // Addresses and neighbors are planned: no duplicate detection, no autoconfiguration, no
        // link-local traffic. Links also have multicast off, because nothing listens.
        ("net/ipv6/conf/all/accept_ra", "0"),
        ("net/ipv6/conf/default/accept_ra", "0"),
        ("net/ipv6/conf/default/accept_dad", "0"),
        ("net/ipv6/conf/default/dad_transmits", "0"),
        ("net/ipv6/conf/default/addr_gen_mode", "1"),
        // Strict mode: a source to which the kernel would not route back over the same device is
        // forged. The stricter value of "all" and of the device applies, and devices start with
        // "default". On a tier host, "all" is 0, because a program of the host may turn the check
        // off for its own device.
        (
            "net/ipv4/conf/all/rp_filter",
            if forwarding == Forwarding::Tier {
                "0"
            } else {
                "1"
            },
        ),
        ("net/ipv4/conf/default/rp_filter", "1"),
        // Routes are planned too, so no host sends or follows ICMP redirects.
        ("net/ipv4/conf/all/accept_redirects", "0"),
        ("net/ipv4/conf/default/accept_redirects", "0"),
        ("net/ipv4/conf/all/send_redirects", "0"),
        ("net/ipv4/conf/default/send_redirects", "0"),
    ];
    // A replica's kernel must not forward: its own programs do that.
    let (four, six) = match forwarding {
        Forwarding::Never | Forwarding::Tier => ("0", "0"),
        Forwarding::Always => ("1", "1"),
    };
    settings.push(("net/ipv4/ip_forward", four));
    settings.push(("net/ipv6/conf/all/forwarding", six));
    if forwarding == Forwarding::Always {
        // With several paths to one tunnel end, each flow uses one, selected by addresses and
        // ports. The kernel excludes a path whose own device is set down. A path without a carrier
        // is not excluded, because a cut between routers must stay a black hole.
        settings.push(("net/ipv4/fib_multipath_hash_policy", "1"));
        // Every "unreachable" error must be sent, so that an application that dials an uncaptured
        // VIP fails at once and not after a timeout.
        settings.push(("net/ipv4/icmp_ratelimit", "0"));
        settings.push(("net/ipv4/icmp_msgs_per_sec", "1000000"));
        settings.push(("net/ipv6/icmp/ratelimit", "0"));
    }
    settings
}

/// Returns every namespace of the plan with its forwarding mode.
pub(crate) fn spaces(plan: &WorldPlan) -> Vec<(&str, Forwarding)> {
    let routers = plan
        .routers
        .iter()
        .map(|router| (router.netns.as_str(), Forwarding::Always));
    let hosts = plan.hosts.iter().map(|host| match host.kind {
        HostKind::Node { .. } => (host.netns.as_str(), Forwarding::Always),
        HostKind::Edge => (host.netns.as_str(), Forwarding::Tier),
        HostKind::Gateway(_) if plan.is_tier() => (host.netns.as_str(), Forwarding::Tier),
        // A gateway must not forward packets between the overlays of two tenants. An edge's program
        // needs no forwarding stack, and without one no packet gets past the program.
        _ => (host.netns.as_str(), Forwarding::Never),
    });
    let pods = plan
        .pods
        .iter()
        .map(|pod| (pod.netns.as_str(), Forwarding::Never));
    routers.chain(hosts).chain(pods).collect()
}

/// Returns every namespace of a relay. The kernel there answers nothing, because its devices have
/// no address.
pub(crate) fn relay_spaces(relays: &[RelayPlan]) -> Vec<(&str, Forwarding)> {
    relays
        .iter()
        .map(|relay| (relay.netns.as_str(), Forwarding::Never))
        .collect()
}

/// Returns `netns add` for all these names.
pub(crate) fn make_spaces<'n>(names: impl Iterator<Item = &'n str>) -> ToolBatch {
    ToolBatch {
        netns: None,
        tool: Tool::Ip,
        lines: names.map(|name| format!("netns add {name}")).collect(),
    }
}

/// Returns `netns delete` for all these names.
pub(crate) fn remove_spaces<'n>(names: impl Iterator<Item = &'n str>) -> ToolBatch {
    ToolBatch {
        netns: None,
        tool: Tool::Ip,
        lines: names.map(|name| format!("netns delete {name}")).collect(),
    }
}

/// Returns the commands for all veth pairs. Each pair is created in one namespace with its peer in
/// another, so no end is ever outside.
pub(crate) fn wires(plan: &WorldPlan) -> Vec<ToolBatch> {
    let mut batches = Vec::new();
    for (az, router) in plan.routers.iter().enumerate() {
        let mut wires: Vec<LinkSpec> = plan
            .hosts
            .iter()
            .filter(|host| host.az == az)
            .map(|host| host_wire(plan, host))
            .collect();
        wires.extend(
            plan.routers[az + 1..]
                .iter()
                .map(|other| inter_az_wire(plan, router, other)),
        );
        batches.push(ToolBatch::of(
            &router.netns,
            Tool::Ip,
            wires.iter().map(|wire| wire.near.clone()).collect(),
        ));
        batches.extend(wires.into_iter().filter_map(|wire| wire.far));
    }
    for host in &plan.hosts {
        let HostKind::Node { tenant, node } = host.kind else {
            continue;
        };
        let pods = plan
            .pods
            .iter()
            .filter(|pod| (pod.tenant, pod.node) == (tenant, node));
        batches.push(ToolBatch::of(
            &host.netns,
            Tool::Ip,
            pods.map(|pod| pod_wire(plan, pod)).collect(),
        ));
    }
    batches
}

/// Commands that create a link.
#[derive(Clone, Debug)]
pub(crate) struct LinkSpec {
    /// Line for the router's namespace.
    pub(crate) near: String,
    /// Commands for the relay's namespace, if the link has a relay.
    pub(crate) far: Option<ToolBatch>,
}

/// One end of a link.
struct LinkEnd<'e, M> {
    device: &'e str,
    mac: M,
    netns: &'e str,
}

/// Returns the commands for a link between two ends. With a relay they create two links, which end
/// at the relay's devices.
fn wire<M: std::fmt::Display>(
    mtu: u32,
    near: &LinkEnd<'_, M>,
    far: &LinkEnd<'_, M>,
    relay: Option<&RelayPlan>,
) -> LinkSpec {
    let Some(relay) = relay else {
        return LinkSpec {
            near: veth(mtu, near.device, &near.mac, far.device, &far.mac, far.netns),
            far: None,
        };
    };
    let [a, b] = DEVICES;
    // The ends have the link's MTU; the relay's devices accept any size that those accept. A relay
    // cannot carry unsplit segments, because the kernel does not hand over those of tunnels. So
    // each end splits them before sending.
    let near = format!(
        "link add {} mtu {mtu} address {} gso_max_segs 1 type veth peer name {a} mtu {RELAY_MTU} netns {}",
        near.device, near.mac, relay.netns
    );
    let line = format!(
        "link add {b} mtu {RELAY_MTU} type veth peer name {} mtu {mtu} address {} gso_max_segs 1 netns {}",
        far.device, far.mac, far.netns
    );
    LinkSpec {
        near,
        far: Some(ToolBatch::of(&relay.netns, Tool::Ip, vec![line])),
    }
}

/// MTU of a relay's own devices: above every link's MTU, even if a fault changes it.
const RELAY_MTU: u32 = 9_500;

fn veth(
    mtu: u32,
    device: &str,
    mac: impl std::fmt::Display,
    peer: &str,
    peer_mac: impl std::fmt::Display,
    peer_netns: &str,
) -> String {
    format!(
        "link add {device} mtu {mtu} address {mac} type veth peer name {peer} mtu {mtu} address {peer_mac} netns {peer_netns}"
    )
}

/// Returns the commands for the link between a host and its router.
pub(crate) fn host_wire(plan: &WorldPlan, host: &HostPlan) -> LinkSpec {
    let router = &plan.routers[host.az];
    let device = host.router_device();
    let near = LinkEnd {
        device: &device,
        mac: host.router_mac(),
        netns: &router.netns,
    };
    let far = LinkEnd {
        device: "eth0",
        mac: host.mac(),
        netns: &host.netns,
    };
    wire(
        host.mtu.unwrap_or(plan.links.underlay_mtu()),
        &near,
        &far,
        plan.relay(host).as_ref(),
    )
}

fn inter_az_wire(plan: &WorldPlan, router: &RouterPlan, other: &RouterPlan) -> LinkSpec {
    let (here, there) = (router.device_to(other), other.device_to(router));
    let near = LinkEnd {
        device: &here,
        mac: router.mac_to(other),
        netns: &router.netns,
    };
    let far = LinkEnd {
        device: &there,
        mac: other.mac_to(router),
        netns: &other.netns,
    };
    wire(
        plan.links.underlay_mtu(),
        &near,
        &far,
        plan.az_relay(router, other).as_ref(),
    )
}

/// Brings a relay's devices up. They need no address, because the relay reads raw frames.
pub(crate) fn relay_configuration(relay: &RelayPlan) -> ToolBatch {
    ToolBatch::of(
        &relay.netns,
        Tool::Ip,
        DEVICES
            .iter()
            .map(|device| relay_device(device, true))
            .collect(),
    )
}

/// Returns the line for a relay's namespace that takes a device up or down.
pub(crate) fn relay_device(device: &str, up: bool) -> String {
    if up {
        format!("link set {device} multicast off up")
    } else {
        format!("link set {device} down")
    }
}

/// Returns the line for the node's namespace that creates a pod's link.
pub(crate) fn pod_wire(plan: &WorldPlan, pod: &PodPlan) -> String {
    veth(
        pod.mtu.unwrap_or(plan.links.mtu),
        &pod.node_device(),
        pod.node_mac(),
        "eth0",
        pod.mac(),
        &pod.netns,
    )
}

/// Returns addresses, routes, neighbors, tunnels and rates: one list of batches per namespace.
pub(crate) fn configuration(plan: &WorldPlan) -> Vec<Vec<ToolBatch>> {
    let routers = plan
        .routers
        .iter()
        .enumerate()
        .map(|(az, router)| router_configuration(plan, az, router));
    let hosts = plan.hosts.iter().map(|host| {
        let mut batches = match host.kind {
            HostKind::Node { tenant, node } => node_configuration(plan, host, tenant, node),
            HostKind::Gateway(replica) if !plan.is_tier() => {
                gateway_configuration(plan, host, replica)
            }
            HostKind::Edge => return edge_configuration(plan, host),
            _ => return plain_configuration(host),
        };
        batches.extend(shape_uplink(host));
        batches
    });
    let relays = plan
        .relays()
        .into_iter()
        .map(|relay| vec![relay_configuration(&relay)]);
    routers
        .chain(hosts)
        .chain(plan.pods.iter().map(pod_configuration))
        .chain(relays)
        .collect()
}

/// Configures a host that has only its uplink. In a tier world this includes gateways and edges;
/// their own programs do the rest.
pub(crate) fn plain_configuration(host: &HostPlan) -> Vec<ToolBatch> {
    std::iter::once(ToolBatch::of(&host.netns, Tool::Ip, uplink(host, None)))
        .chain(shape_uplink(host))
        .collect()
}

/// Configures an edge. If its AZ has several edges, it also gets the shared tunnel end as an
/// address.
fn edge_configuration(plan: &WorldPlan, host: &HostPlan) -> Vec<ToolBatch> {
    let mut batches = plain_configuration(host);
    batches.extend(plan.anycast(host).map(|end| {
        ToolBatch::of(
            &host.netns,
            Tool::Ip,
            vec![format!("addr add {end}/32 dev lo")],
        )
    }));
    batches
}

fn shape_uplink(host: &HostPlan) -> Option<ToolBatch> {
    shape(&host.netns, host.rate.map(|rate| ("eth0".to_owned(), rate)))
}

fn unreachable() -> [String; 2] {
    [
        format!("route add unreachable 0.0.0.0/0 {LAST}"),
        format!("route add unreachable ::/0 {LAST}"),
    ]
}

fn neighbour(address: impl Into<IpAddr>, mac: impl std::fmt::Display, device: &str) -> String {
    format!(
        "neigh replace {} lladdr {mac} dev {device} nud permanent",
        address.into()
    )
}

fn router_configuration(plan: &WorldPlan, az: usize, router: &RouterPlan) -> Vec<ToolBatch> {
    let mut lines = vec![
        "link set lo up".to_owned(),
        format!("addr add {}/32 dev lo", router.ip4),
    ];
    lines.extend(unreachable());
    let mut rates = Vec::new();
    for host in plan.hosts.iter().filter(|host| host.az == az) {
        lines.extend(router_to_host(host));
        rates.extend(host.rate.map(|rate| (host.router_device(), rate)));
    }
    lines.extend(router_to_edges(plan, az, &BTreeSet::new()));
    for other in plan
        .routers
        .iter()
        .filter(|other| other.number != router.number)
    {
        lines.extend(router_to_az(router, other));
        rates.extend(
            plan.links
                .inter_az
                .map(|rate| (router.device_to(other), rate)),
        );
    }
    let mut batches = vec![ToolBatch::of(&router.netns, Tool::Ip, lines)];
    batches.extend(shape(&router.netns, rates));
    if plan.vswitch == Vswitch::Checked {
        batches.extend(plan.is_tier().then(|| vswitch::refusals(plan, az)));
        batches.extend(vswitch::key_servers(plan, az));
    }
    batches
}

/// Returns the commands for the router's end of a host's link. They are complete: setting a link
/// down deletes its routes, and these lines restore them.
pub(crate) fn router_to_host(host: &HostPlan) -> Vec<String> {
    let device = host.router_device();
    vec![
        format!("link set {device} multicast off up"),
        neighbour(host.ip4, host.mac(), &device),
        format!("route replace {}/32 dev {device}", host.ip4),
    ]
}

/// Returns the router's route to the tunnel end that the edges of its AZ share. It has a nexthop
/// for each edge that is not in `dead`, and flows are spread by their outer ports. Any edge handles
/// any packet, so nothing is lost when the kernel excludes the nexthop of a link that is down.
pub(crate) fn router_to_edges(plan: &WorldPlan, az: usize, dead: &BTreeSet<String>) -> Vec<String> {
    let number = plan.routers[az].number;
    let Some(end) = plan
        .edges
        .iter()
        .find(|edges| edges.az == number)
        .and_then(EdgePlan::anycast)
    else {
        return Vec::new();
    };
    let hosts = plan
        .hosts
        .iter()
        .filter(|host| host.kind == HostKind::Edge && host.az == az && !dead.contains(&host.name));
    let hops: String = hosts
        .map(|host| {
            format!(
                " nexthop via {} dev {} onlink",
                host.ip4,
                host.router_device()
            )
        })
        .collect();
    if hops.is_empty() {
        Vec::new()
    } else {
        vec![format!("route replace {end}/32{hops}")]
    }
}

/// Returns the commands for the router's end of the link to another AZ. They can
/// be run again at any time, as those of [`router_to_host`] can.
pub(crate) fn router_to_az(router: &RouterPlan, other: &RouterPlan) -> Vec<String> {
    let device = router.device_to(other);
    let mut lines = vec![
        format!("link set {device} multicast off up"),
        neighbour(NEXT_HOP4, other.mac_to(router), &device),
    ];
    for range in [other.nodes(), other.providers()] {
        lines.push(format!(
            "route replace {range} via {NEXT_HOP4} dev {device} onlink src {}",
            router.ip4
        ));
    }
    lines
}

/// Configures `eth0` of an underlay host, with routes to the underlay in `table`.
fn uplink(host: &HostPlan, table: Option<u32>) -> Vec<String> {
    let table = table
        .map(|table| format!(" table {table}"))
        .unwrap_or_default();
    let mut lines = vec![
        "link set lo up".to_owned(),
        format!("addr add {}/32 dev eth0", host.ip4),
        "link set eth0 multicast off up".to_owned(),
        neighbour(NEXT_HOP4, host.router_mac(), "eth0"),
    ];
    for range in [NODES_UNDERLAY, PROVIDERS] {
        lines.push(format!(
            "route add {range} via {NEXT_HOP4} dev eth0 onlink src {}{table}",
            host.ip4
        ));
    }
    lines.extend(unreachable());
    lines
}

fn tunnel(plan: &WorldPlan, tenant: &TenantPlan, own: &Vtep) -> Vec<String> {
    let device = tenant.device();
    vec![
        // No learning and no flooding: every remote is configured explicitly, because no other host
        // may answer.
        format!(
            "link add {device} mtu {} address {} type vxlan id {} local {} dstport 4789 nolearning",
            plan.links.mtu, own.mac, tenant.vni, own.underlay
        ),
        format!("addr add {}/32 dev {device}", own.ip4),
        format!("addr add {}/128 dev {device} nodad", own.ip6),
        format!("link set {device} multicast off up"),
    ]
}

/// Returns the neighbors and routes (for `ip`) and the forwarding entries (for `bridge`) from `own`
/// to other tunnel ends.
fn remotes<'v>(
    tenant: &TenantPlan,
    own: &Vtep,
    others: impl Iterator<Item = &'v Vtep>,
) -> (Vec<String>, Vec<String>) {
    let device = tenant.device();
    let (mut ip, mut bridge) = (Vec::new(), Vec::new());
    for other in others {
        bridge.push(format!(
            "fdb append {} dev {device} dst {}",
            other.mac, other.underlay
        ));
        ip.push(neighbour(other.ip4, other.mac, &device));
        ip.push(neighbour(other.ip6, other.mac, &device));
        let (mut hop4, mut hop6) = (String::new(), String::new());
        if other.net4.prefix_len() < 32 {
            hop4 = format!("via {} onlink ", other.ip4);
            hop6 = format!("via {} onlink ", other.ip6);
        }
        ip.push(format!(
            "route add {} {hop4}dev {device} src {}",
            other.net4, own.ip4
        ));
        ip.push(format!(
            "route add {} {hop6}dev {device} src {}",
            other.net6, own.ip6
        ));
    }
    (ip, bridge)
}

/// Returns the neighbors, routes and forwarding entries from a node to the edges. Behind each edge
/// are its AZ's part of the tenant's gateway addresses and its AZ's replicas.
fn edge_remotes(plan: &WorldPlan, tenant: &TenantPlan, own: &Vtep) -> (Vec<String>, Vec<String>) {
    let device = tenant.device();
    let (mut ip, mut bridge) = (Vec::new(), Vec::new());
    if plan.is_tier() {
        // The node's own answers from its overlay address must not leave through the underlay.
        ip.push(format!(
            "rule add pref 90 iif lo from {} lookup main",
            own.ip4
        ));
    }
    for edge in &plan.edges {
        bridge.push(format!(
            "fdb append {} dev {device} dst {}",
            edge.mac, edge.underlay
        ));
        ip.push(neighbour(edge.hop4, edge.mac, &device));
        ip.push(neighbour(edge.hop6, edge.mac, &device));
        let parts = tenant
            .gateway_cidrs
            .map(|(four, six)| (part4(four, edge.az), part6(six, edge.az)));
        for (four, six) in parts
            .into_iter()
            .chain([(edge.replicas4(), edge.replicas6())])
        {
            ip.push(format!(
                "route add {four} via {} onlink dev {device} src {}",
                edge.hop4, own.ip4
            ));
            ip.push(format!(
                "route add {six} via {} onlink dev {device} src {}",
                edge.hop6, own.ip6
            ));
        }
    }
    (ip, bridge)
}

fn node_configuration(
    plan: &WorldPlan,
    host: &HostPlan,
    tenant: usize,
    node: usize,
) -> Vec<ToolBatch> {
    let owner = &plan.tenants[tenant];
    let own = &owner.nodes[node];
    // Packets that the node itself sends use the underlay's routes. Forwarded packets never see
    // those routes, so a pod's packet cannot leave its overlay.
    let mut lines = vec![format!("rule add pref 100 iif lo lookup {UNDERLAY_TABLE}")];
    lines.extend(uplink(host, Some(UNDERLAY_TABLE)));
    lines.extend(tunnel(plan, owner, own));
    let others = owner.nodes.iter().filter(|other| other.host != own.host);
    let (ip, mut bridge) = remotes(owner, own, others.chain(&owner.gateways));
    lines.extend(ip);
    let (ip, fdb) = edge_remotes(plan, owner, own);
    lines.extend(ip);
    bridge.extend(fdb);
    let mut rates = Vec::new();
    for pod in plan
        .pods
        .iter()
        .filter(|pod| (pod.tenant, pod.node) == (tenant, node))
    {
        lines.extend(node_to_pod(plan, pod));
        rates.extend(pod.rate.map(|rate| (pod.node_device(), rate)));
    }
    lines.extend(outside_routes(plan, owner));
    let mut batches = vec![
        ToolBatch::of(&host.netns, Tool::Ip, lines),
        ToolBatch::of(&host.netns, Tool::Bridge, bridge),
    ];
    batches.extend(shape(&host.netns, rates));
    batches.push(ToolBatch::of(&host.netns, Tool::Nft, refusals(plan, owner)));
    batches.extend(outside_address(plan, host, owner));
    batches
}

/// Rules that refuse and count on a pod's node the packets to destinations that the pod may not
/// reach. The routes alone would refuse them too, but only by ICMP, to which TCP may react a second
/// later.
fn refusals(plan: &WorldPlan, tenant: &TenantPlan) -> Vec<String> {
    let outside = outside_hosts(plan, tenant)
        .map(|host| format!(", {}", host.ip4))
        .collect::<String>();
    let (mut gateways4, mut answers) = (String::new(), Vec::new());
    if let Some((four, six)) = tenant.gateway_cidrs {
        gateways4 = format!(", {four}");
        // Replicas dial pods, but pods do not dial replicas.
        answers = vec![
            format!("ip6 daddr {six} accept"),
            format!("ip daddr {PROVIDERS} tcp flags & (syn | ack) != syn accept"),
            format!("ip6 daddr {REPLICAS6} tcp flags & (syn | ack) != syn accept"),
            format!("ip daddr {PROVIDERS} meta l4proto icmp accept"),
            format!("ip6 daddr {REPLICAS6} meta l4proto ipv6-icmp accept"),
        ];
    }
    let accepted = [
        "iifname != \"p*\" accept".to_owned(),
        format!("ip daddr {{ {}{gateways4}{outside} }} accept", tenant.pods4),
        format!("ip6 daddr {} accept", tenant.pods6),
    ];
    let refused = [
        "meta pkttype { broadcast, multicast } drop".to_owned(),
        "meta l4proto tcp counter name refused_tcp reject with tcp reset".to_owned(),
        "counter name refused_other reject".to_owned(),
    ];
    let mut lines = vec![
        format!("add table {REFUSALS}"),
        format!("add counter {REFUSALS} refused_tcp"),
        format!("add counter {REFUSALS} refused_other"),
        format!(
            "add chain {REFUSALS} from_pods {{ type filter hook prerouting priority filter; }}"
        ),
    ];
    let rules = accepted.into_iter().chain(answers).chain(refused);
    lines.extend(rules.map(|rule| format!("add rule {REFUSALS} from_pods {rule}")));
    lines
}

/// Returns the hosts that pods of a Passthrough tenant may reach in plaintext.
fn outside_hosts<'p>(
    plan: &'p WorldPlan,
    tenant: &TenantPlan,
) -> impl Iterator<Item = &'p HostPlan> {
    let allowed = tenant.passthrough;
    plan.hosts
        .iter()
        .filter(move |host| allowed && host.kind == HostKind::Host { outside: true })
}

fn outside_routes(plan: &WorldPlan, tenant: &TenantPlan) -> Vec<String> {
    outside_hosts(plan, tenant)
        .map(|host| format!("route add {}/32 via {NEXT_HOP4} dev eth0 onlink", host.ip4))
        .collect()
}

/// Masquerades packets to outside hosts with the node's address, because the underlay has no route
/// to pods.
fn outside_address(plan: &WorldPlan, host: &HostPlan, tenant: &TenantPlan) -> Option<ToolBatch> {
    outside_hosts(plan, tenant).next()?;
    let lines = vec![
        "add table ip canal_outside".to_owned(),
        "add chain ip canal_outside leave { type nat hook postrouting priority srcnat; }"
            .to_owned(),
        format!(
            "add rule ip canal_outside leave ip saddr {} oifname eth0 counter masquerade",
            tenant.pods4
        ),
    ];
    Some(ToolBatch::of(&host.netns, Tool::Nft, lines))
}

/// Returns the commands for the node's end of a pod's link. They are complete like those of
/// [`router_to_host`].
pub(crate) fn node_to_pod(plan: &WorldPlan, pod: &PodPlan) -> Vec<String> {
    let device = pod.node_device();
    let own = &plan.tenants[pod.tenant].nodes[pod.node];
    vec![
        format!("link set {device} multicast off up"),
        neighbour(pod.ip4, pod.mac(), &device),
        neighbour(pod.ip6, pod.mac(), &device),
        format!("route replace {}/32 dev {device} src {}", pod.ip4, own.ip4),
        format!("route replace {}/128 dev {device} src {}", pod.ip6, own.ip6),
    ]
}

/// Configures the pod's own namespace.
pub(crate) fn pod_configuration(pod: &PodPlan) -> Vec<ToolBatch> {
    let lines = vec![
        "link set lo up".to_owned(),
        format!("addr add {}/32 dev eth0", pod.ip4),
        format!("addr add {}/128 dev eth0 nodad", pod.ip6),
        "link set eth0 multicast off up".to_owned(),
        neighbour(NEXT_HOP4, pod.node_mac(), "eth0"),
        neighbour(NEXT_HOP6, pod.node_mac(), "eth0"),
        format!(
            "route add 0.0.0.0/0 via {NEXT_HOP4} dev eth0 onlink src {}",
            pod.ip4
        ),
        format!("route add ::/0 via {NEXT_HOP6} dev eth0 src {}", pod.ip6),
    ];
    let mut batches = vec![ToolBatch::of(&pod.netns, Tool::Ip, lines)];
    batches.extend(shape(
        &pod.netns,
        pod.rate.map(|rate| ("eth0".to_owned(), rate)),
    ));
    batches
}

fn gateway_configuration(plan: &WorldPlan, host: &HostPlan, replica: usize) -> Vec<ToolBatch> {
    let mut lines = uplink(host, None);
    let mut bridge = Vec::new();
    for tenant in &plan.tenants {
        let own = &tenant.gateways[replica];
        lines.extend(tunnel(plan, tenant, own));
        let (ip, fdb) = remotes(tenant, own, tenant.nodes.iter());
        lines.extend(ip);
        bridge.extend(fdb);
    }
    let mut batches = vec![
        ToolBatch::of(&host.netns, Tool::Ip, lines),
        ToolBatch::of(&host.netns, Tool::Bridge, bridge),
    ];
    if !plan.tenants.is_empty() {
        batches.push(ToolBatch::of(
            &host.netns,
            Tool::Nft,
            gateway_refusals(plan, replica),
        ));
    }
    batches
}

/// Rules that accept packets of a tenant only for the tenant's own gateway address, from its own
/// overlay and addresses. Linux would accept a packet for any local address on any interface, and a
/// tenant controls its nodes.
fn gateway_refusals(plan: &WorldPlan, replica: usize) -> Vec<String> {
    let own = |address: &dyn Fn(&Vtep) -> IpAddr| {
        let pairs = plan.tenants.iter().map(|tenant| {
            format!(
                "\"{}\" . {}",
                tenant.device(),
                address(&tenant.gateways[replica])
            )
        });
        pairs.collect::<Vec<_>>().join(", ")
    };
    // The device of a tenant's overlay begins with `vx`; all other packets are not a tenant's.
    let rules = [
        "iifname != \"vx*\" accept",
        // For IPv4, rp_filter checks the sources; IPv6 has no such setting.
        // Only SYNs are looked up, because a forged packet of no connection opens nothing.
        "meta nfproto ipv6 tcp flags & (syn | ack) == syn fib saddr . iif oif missing counter name refused_foreign drop",
        "iifname . ip daddr @own4 accept",
        "iifname . ip6 daddr @own6 accept",
        "counter name refused_foreign drop",
    ];
    let mut lines = vec![
        format!("add table {REFUSALS}"),
        format!("add counter {REFUSALS} refused_foreign"),
        format!(
            "add set {REFUSALS} own4 {{ type ifname . ipv4_addr; elements = {{ {} }}; }}",
            own(&|vtep| vtep.ip4.into())
        ),
        format!(
            "add set {REFUSALS} own6 {{ type ifname . ipv6_addr; elements = {{ {} }}; }}",
            own(&|vtep| vtep.ip6.into())
        ),
        format!(
            "add chain {REFUSALS} from_tenants {{ type filter hook prerouting priority filter; }}"
        ),
    ];
    lines.extend(
        rules
            .iter()
            .map(|rule| format!("add rule {REFUSALS} from_tenants {rule}")),
    );
    lines
}

/// Returns token buckets for these devices, or `None` if there are no rates.
pub(crate) fn shape(
    netns: &str,
    rates: impl IntoIterator<Item = (String, LinkRate)>,
) -> Option<ToolBatch> {
    let lines: Vec<String> = rates
        .into_iter()
        .map(|(device, rate)| bucket(&device, rate))
        .collect();
    (!lines.is_empty()).then(|| ToolBatch::of(netns, Tool::Tc, lines))
}

/// Returns the command for a bucket of 4 ms at full rate (one tick at HZ=250), but at least a few
/// packets. Its queue holds 50 ms.
fn bucket(device: &str, rate: LinkRate) -> String {
    let burst = (rate.bits / 8 / 250).max(32 * 1024);
    format!(
        "qdisc replace dev {device} root tbf rate {}bit burst {burst} latency 50ms",
        rate.bits
    )
}

//! From plan to commands: the text that `ip`, `bridge`, `tc` and `nft` read in each namespace.
//! Pure. Order matters between the stages (spaces, wires, configuration) and between the batches of
//! one namespace; namespaces of one stage may be done in any order, and side by side.

use std::net::IpAddr;

use crate::plan::{HostKind, HostPlan, NEXT_HOP4, NEXT_HOP6, NODES_UNDERLAY, PROVIDERS, Plan, PodPlan, RouterPlan, TenantPlan, Vtep};
use crate::tier::{REPLICAS6, part4, part6};
use crate::topology::{Rate, Vswitch};
use crate::vswitch;

/// Lowest priority of a route, so that "unreachable" is what remains when nothing else matches.
const LAST: &str = "metric 4278198272";
/// Table with the underlay's routes on nodes; only the node's own packets look into it.
const UNDERLAY_TABLE: u32 = 100;

/// nftables table in which nodes count what they refused of their pods, gateways of tenants, and a tier world's routers of nodes.
pub(crate) const REFUSALS: &str = "inet canal_refuse";

/// The programs that read batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tool {
    Ip,
    Bridge,
    Tc,
    Nft,
}

/// Lines for one program in one namespace (`None`: the caller's, for `netns add` only).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) netns: Option<String>,
    pub(crate) tool: Tool,
    pub(crate) lines: Vec<String>,
}

impl Batch {
    fn of(netns: &str, tool: Tool, lines: Vec<String>) -> Self {
        Self { netns: Some(netns.to_owned()), tool, lines }
    }
}

/// Kernel settings of a namespace, by path under /proc/sys.
pub(crate) type Settings = Vec<(&'static str, &'static str)>;

/// What a namespace does with packets that are not its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forwarding {
    Never,
    Always,
    /// Never; and devices that its own programs make decide for themselves which sources they take, as on any tier host.
    Tier,
}

/// Settings before any device exists, so that every device inherits them.
pub(crate) fn settings(forwarding: Forwarding) -> Settings {
    let mut settings = vec![
        // Addresses and neighbours are planned: no duplicate detection, no autoconfiguration, no
        // link-local noise. (Links also have multicast off: nobody listens.)
        ("net/ipv6/conf/all/accept_ra", "0"),
        ("net/ipv6/conf/default/accept_ra", "0"),
        ("net/ipv6/conf/default/accept_dad", "0"),
        ("net/ipv6/conf/default/dad_transmits", "0"),
        ("net/ipv6/conf/default/addr_gen_mode", "1"),
        // Strict: a source that would not be routed back the same way is forged.
        // The stricter of "all" and the device's own counts; devices begin with the default.
        ("net/ipv4/conf/all/rp_filter", if forwarding == Forwarding::Tier { "0" } else { "1" }),
        ("net/ipv4/conf/default/rp_filter", "1"),
        ("net/ipv4/conf/all/accept_redirects", "0"),
        ("net/ipv4/conf/default/accept_redirects", "0"),
        ("net/ipv4/conf/all/send_redirects", "0"),
        ("net/ipv4/conf/default/send_redirects", "0"),
    ];
    let (four, six) = match forwarding {
        Forwarding::Never | Forwarding::Tier => ("0", "0"),
        Forwarding::Always => ("1", "1"),
    };
    settings.push(("net/ipv4/ip_forward", four));
    settings.push(("net/ipv6/conf/all/forwarding", six));
    if forwarding == Forwarding::Always {
        // "Unreachable" must be told every time: an application that dials an uncaptured VIP
        // learns it at once instead of waiting for a timeout.
        settings.push(("net/ipv4/icmp_ratelimit", "0"));
        settings.push(("net/ipv4/icmp_msgs_per_sec", "1000000"));
        settings.push(("net/ipv6/icmp/ratelimit", "0"));
    }
    settings
}

/// Every namespace of the plan with what it does with foreign packets.
pub(crate) fn spaces(plan: &Plan) -> Vec<(&str, Forwarding)> {
    let routers = plan.routers.iter().map(|router| (router.netns.as_str(), Forwarding::Always));
    let hosts = plan.hosts.iter().map(|host| match host.kind {
        HostKind::Node { .. } => (host.netns.as_str(), Forwarding::Always),
        HostKind::Edge => (host.netns.as_str(), Forwarding::Tier),
        HostKind::Gateway(_) if plan.is_tier() => (host.netns.as_str(), Forwarding::Tier),
        // Gateways above all: a packet must not get from one tenant's overlay into another's. An edge's program needs no
        // forwarding stack, and without one nothing gets past it.
        _ => (host.netns.as_str(), Forwarding::Never),
    });
    let pods = plan.pods.iter().map(|pod| (pod.netns.as_str(), Forwarding::Never));
    routers.chain(hosts).chain(pods).collect()
}

/// `netns add` for all of these.
pub(crate) fn make_spaces<'n>(names: impl Iterator<Item = &'n str>) -> Batch {
    Batch { netns: None, tool: Tool::Ip, lines: names.map(|name| format!("netns add {name}")).collect() }
}

/// `netns delete` for all of these.
pub(crate) fn remove_spaces<'n>(names: impl Iterator<Item = &'n str>) -> Batch {
    Batch { netns: None, tool: Tool::Ip, lines: names.map(|name| format!("netns delete {name}")).collect() }
}

/// All veth pairs. Each is made inside a namespace with its peer in another: none is ever outside.
pub(crate) fn wires(plan: &Plan) -> Vec<Batch> {
    let mut batches = Vec::new();
    for (az, router) in plan.routers.iter().enumerate() {
        let mut lines: Vec<String> = plan.hosts.iter().filter(|host| host.az == az).map(|host| host_wire(plan, host)).collect();
        lines.extend(plan.routers[az + 1..].iter().map(|other| inter_az_wire(plan, router, other)));
        batches.push(Batch::of(&router.netns, Tool::Ip, lines));
    }
    for host in &plan.hosts {
        let HostKind::Node { tenant, node } = host.kind else { continue };
        let pods = plan.pods.iter().filter(|pod| (pod.tenant, pod.node) == (tenant, node));
        batches.push(Batch::of(&host.netns, Tool::Ip, pods.map(|pod| pod_wire(plan, pod)).collect()));
    }
    batches
}

fn veth(mtu: u32, device: &str, mac: impl std::fmt::Display, peer: &str, peer_mac: impl std::fmt::Display, peer_netns: &str) -> String {
    format!("link add {device} mtu {mtu} address {mac} type veth peer name {peer} mtu {mtu} address {peer_mac} netns {peer_netns}")
}

/// Line for the router's namespace that makes a host's link.
pub(crate) fn host_wire(plan: &Plan, host: &HostPlan) -> String {
    veth(host.mtu.unwrap_or(plan.links.underlay_mtu()), &host.router_device(), host.router_mac(), "eth0", host.mac(), &host.netns)
}

fn inter_az_wire(plan: &Plan, router: &RouterPlan, other: &RouterPlan) -> String {
    let (here, there) = (router.device_to(other), other.device_to(router));
    veth(plan.links.underlay_mtu(), &here, router.mac_to(other), &there, other.mac_to(router), &other.netns)
}

/// Line for the node's namespace that makes a pod's link.
pub(crate) fn pod_wire(plan: &Plan, pod: &PodPlan) -> String {
    veth(pod.mtu.unwrap_or(plan.links.mtu), &pod.node_device(), pod.node_mac(), "eth0", pod.mac(), &pod.netns)
}

/// Addresses, routes, neighbours, tunnels and rates: one list of batches per namespace.
pub(crate) fn configuration(plan: &Plan) -> Vec<Vec<Batch>> {
    let routers = plan.routers.iter().enumerate().map(|(az, router)| router_configuration(plan, az, router));
    let hosts = plan.hosts.iter().map(|host| {
        let mut batches = match host.kind {
            HostKind::Node { tenant, node } => node_configuration(plan, host, tenant, node),
            HostKind::Gateway(replica) if !plan.is_tier() => gateway_configuration(plan, host, replica),
            _ => return plain_configuration(host),
        };
        batches.extend(shape_uplink(host));
        batches
    });
    routers.chain(hosts).chain(plan.pods.iter().map(pod_configuration)).collect()
}

/// A host that has only its uplink. In a tier world gateways are such, and edges: their own programs do the rest.
pub(crate) fn plain_configuration(host: &HostPlan) -> Vec<Batch> {
    std::iter::once(Batch::of(&host.netns, Tool::Ip, uplink(host, None))).chain(shape_uplink(host)).collect()
}

fn shape_uplink(host: &HostPlan) -> Option<Batch> {
    shape(&host.netns, host.rate.map(|rate| ("eth0".to_owned(), rate)))
}

fn unreachable() -> [String; 2] {
    [format!("route add unreachable 0.0.0.0/0 {LAST}"), format!("route add unreachable ::/0 {LAST}")]
}

fn neighbour(address: impl Into<IpAddr>, mac: impl std::fmt::Display, device: &str) -> String {
    format!("neigh replace {} lladdr {mac} dev {device} nud permanent", address.into())
}

fn router_configuration(plan: &Plan, az: usize, router: &RouterPlan) -> Vec<Batch> {
    let mut lines = vec!["link set lo up".to_owned(), format!("addr add {}/32 dev lo", router.ip4)];
    lines.extend(unreachable());
    let mut rates = Vec::new();
    for host in plan.hosts.iter().filter(|host| host.az == az) {
        lines.extend(router_to_host(host));
        rates.extend(host.rate.map(|rate| (host.router_device(), rate)));
    }
    for other in plan.routers.iter().filter(|other| other.number != router.number) {
        lines.extend(router_to_az(router, other));
        rates.extend(plan.links.inter_az.map(|rate| (router.device_to(other), rate)));
    }
    let mut batches = vec![Batch::of(&router.netns, Tool::Ip, lines)];
    batches.extend(shape(&router.netns, rates));
    if plan.vswitch == Vswitch::Checked {
        batches.extend(plan.is_tier().then(|| vswitch::refusals(plan, az)));
        batches.extend(vswitch::key_servers(plan, az));
    }
    batches
}

/// The router's end of a host's link. Complete in itself: setting a link down loses its routes,
/// and these lines bring them back.
pub(crate) fn router_to_host(host: &HostPlan) -> Vec<String> {
    let device = host.router_device();
    vec![
        format!("link set {device} multicast off up"),
        neighbour(host.ip4, host.mac(), &device),
        format!("route replace {}/32 dev {device}", host.ip4),
    ]
}

/// The router's end of the link to another AZ, complete in itself like [`router_to_host`].
pub(crate) fn router_to_az(router: &RouterPlan, other: &RouterPlan) -> Vec<String> {
    let device = router.device_to(other);
    let mut lines = vec![format!("link set {device} multicast off up"), neighbour(NEXT_HOP4, other.mac_to(router), &device)];
    for range in [other.nodes(), other.providers()] {
        lines.push(format!("route replace {range} via {NEXT_HOP4} dev {device} onlink src {}", router.ip4));
    }
    lines
}

/// `eth0` of an underlay host, with routes to the underlay in `table`.
fn uplink(host: &HostPlan, table: Option<u32>) -> Vec<String> {
    let table = table.map(|table| format!(" table {table}")).unwrap_or_default();
    let mut lines = vec![
        "link set lo up".to_owned(),
        format!("addr add {}/32 dev eth0", host.ip4),
        "link set eth0 multicast off up".to_owned(),
        neighbour(NEXT_HOP4, host.router_mac(), "eth0"),
    ];
    for range in [NODES_UNDERLAY, PROVIDERS] {
        lines.push(format!("route add {range} via {NEXT_HOP4} dev eth0 onlink src {}{table}", host.ip4));
    }
    lines.extend(unreachable());
    lines
}

fn tunnel(plan: &Plan, tenant: &TenantPlan, own: &Vtep) -> Vec<String> {
    let device = tenant.device();
    vec![
        // No learning, no flooding: every remote is written below, as nothing else may answer.
        format!(
            "link add {device} mtu {} address {} type vxlan id {} local {} dstport 4789 nolearning",
            plan.links.mtu, own.mac, tenant.vni, own.underlay
        ),
        format!("addr add {}/32 dev {device}", own.ip4),
        format!("addr add {}/128 dev {device} nodad", own.ip6),
        format!("link set {device} multicast off up"),
    ]
}

/// Neighbours and routes from `own` to the other tunnel ends it talks to.
fn remotes<'v>(tenant: &TenantPlan, own: &Vtep, others: impl Iterator<Item = &'v Vtep>) -> (Vec<String>, Vec<String>) {
    let device = tenant.device();
    let (mut ip, mut bridge) = (Vec::new(), Vec::new());
    for other in others {
        bridge.push(format!("fdb append {} dev {device} dst {}", other.mac, other.underlay));
        ip.push(neighbour(other.ip4, other.mac, &device));
        ip.push(neighbour(other.ip6, other.mac, &device));
        let (mut hop4, mut hop6) = (String::new(), String::new());
        if other.net4.prefix_len() < 32 {
            hop4 = format!("via {} onlink ", other.ip4);
            hop6 = format!("via {} onlink ", other.ip6);
        }
        ip.push(format!("route add {} {hop4}dev {device} src {}", other.net4, own.ip4));
        ip.push(format!("route add {} {hop6}dev {device} src {}", other.net6, own.ip6));
    }
    (ip, bridge)
}

/// Neighbours and routes from a node to the edges: each has its AZ's part of the tenant's gateway addresses behind it, and its
/// AZ's replicas.
fn edge_remotes(plan: &Plan, tenant: &TenantPlan, own: &Vtep) -> (Vec<String>, Vec<String>) {
    let device = tenant.device();
    let (mut ip, mut bridge) = (Vec::new(), Vec::new());
    if plan.is_tier() {
        // What the node itself answers from its overlay address must not leave by the underlay.
        ip.push(format!("rule add pref 90 iif lo from {} lookup main", own.ip4));
    }
    for edge in &plan.edges {
        bridge.push(format!("fdb append {} dev {device} dst {}", edge.mac, edge.underlay));
        ip.push(neighbour(edge.hop4, edge.mac, &device));
        ip.push(neighbour(edge.hop6, edge.mac, &device));
        let parts = tenant.gateway_cidrs.map(|(four, six)| (part4(four, edge.az), part6(six, edge.az)));
        for (four, six) in parts.into_iter().chain([(edge.replicas4(), edge.replicas6())]) {
            ip.push(format!("route add {four} via {} onlink dev {device} src {}", edge.hop4, own.ip4));
            ip.push(format!("route add {six} via {} onlink dev {device} src {}", edge.hop6, own.ip6));
        }
    }
    (ip, bridge)
}

fn node_configuration(plan: &Plan, host: &HostPlan, tenant: usize, node: usize) -> Vec<Batch> {
    let owner = &plan.tenants[tenant];
    let own = &owner.nodes[node];
    // What the node itself says goes by the underlay; what it forwards never sees those routes,
    // so a pod's packet cannot leave its overlay.
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
    for pod in plan.pods.iter().filter(|pod| (pod.tenant, pod.node) == (tenant, node)) {
        lines.extend(node_to_pod(plan, pod));
        rates.extend(pod.rate.map(|rate| (pod.node_device(), rate)));
    }
    lines.extend(outside_routes(plan, owner));
    let mut batches = vec![Batch::of(&host.netns, Tool::Ip, lines), Batch::of(&host.netns, Tool::Bridge, bridge)];
    batches.extend(shape(&host.netns, rates));
    batches.push(Batch::of(&host.netns, Tool::Nft, refusals(plan, owner)));
    batches.extend(outside_address(plan, host, owner));
    batches
}

/// What a pod may not reach is refused on its node, at once and counted. Without these rules the
/// routes would refuse it too, but only by ICMP, which TCP may notice a second later.
fn refusals(plan: &Plan, tenant: &TenantPlan) -> Vec<String> {
    let outside = outside_hosts(plan, tenant).map(|host| format!(", {}", host.ip4)).collect::<String>();
    let (mut gateways4, mut answers) = (String::new(), Vec::new());
    if let Some((four, six)) = tenant.gateway_cidrs {
        gateways4 = format!(", {four}");
        // Replicas dial pods, and pods do not dial replicas.
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
        format!("add chain {REFUSALS} from_pods {{ type filter hook prerouting priority filter; }}"),
    ];
    let rules = accepted.into_iter().chain(answers).chain(refused);
    lines.extend(rules.map(|rule| format!("add rule {REFUSALS} from_pods {rule}")));
    lines
}

/// Hosts that pods of a Passthrough tenant may reach in plaintext.
fn outside_hosts<'p>(plan: &'p Plan, tenant: &TenantPlan) -> impl Iterator<Item = &'p HostPlan> {
    let allowed = tenant.passthrough;
    plan.hosts.iter().filter(move |host| allowed && host.kind == HostKind::Host { outside: true })
}

fn outside_routes(plan: &Plan, tenant: &TenantPlan) -> Vec<String> {
    outside_hosts(plan, tenant).map(|host| format!("route add {}/32 via {NEXT_HOP4} dev eth0 onlink", host.ip4)).collect()
}

/// Pods leave with the node's address: the underlay knows no pod.
fn outside_address(plan: &Plan, host: &HostPlan, tenant: &TenantPlan) -> Option<Batch> {
    outside_hosts(plan, tenant).next()?;
    let lines = vec![
        "add table ip canal_outside".to_owned(),
        "add chain ip canal_outside leave { type nat hook postrouting priority srcnat; }".to_owned(),
        format!("add rule ip canal_outside leave ip saddr {} oifname eth0 counter masquerade", tenant.pods4),
    ];
    Some(Batch::of(&host.netns, Tool::Nft, lines))
}

/// The node's end of a pod's link, complete in itself.
pub(crate) fn node_to_pod(plan: &Plan, pod: &PodPlan) -> Vec<String> {
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

/// The pod's own namespace.
pub(crate) fn pod_configuration(pod: &PodPlan) -> Vec<Batch> {
    let lines = vec![
        "link set lo up".to_owned(),
        format!("addr add {}/32 dev eth0", pod.ip4),
        format!("addr add {}/128 dev eth0 nodad", pod.ip6),
        "link set eth0 multicast off up".to_owned(),
        neighbour(NEXT_HOP4, pod.node_mac(), "eth0"),
        neighbour(NEXT_HOP6, pod.node_mac(), "eth0"),
        format!("route add 0.0.0.0/0 via {NEXT_HOP4} dev eth0 onlink src {}", pod.ip4),
        format!("route add ::/0 via {NEXT_HOP6} dev eth0 src {}", pod.ip6),
    ];
    let mut batches = vec![Batch::of(&pod.netns, Tool::Ip, lines)];
    batches.extend(shape(&pod.netns, pod.rate.map(|rate| ("eth0".to_owned(), rate))));
    batches
}

fn gateway_configuration(plan: &Plan, host: &HostPlan, replica: usize) -> Vec<Batch> {
    let mut lines = uplink(host, None);
    let mut bridge = Vec::new();
    for tenant in &plan.tenants {
        let own = &tenant.gateways[replica];
        lines.extend(tunnel(plan, tenant, own));
        let (ip, fdb) = remotes(tenant, own, tenant.nodes.iter());
        lines.extend(ip);
        bridge.extend(fdb);
    }
    let mut batches = vec![Batch::of(&host.netns, Tool::Ip, lines), Batch::of(&host.netns, Tool::Bridge, bridge)];
    if !plan.tenants.is_empty() {
        batches.push(Batch::of(&host.netns, Tool::Nft, gateway_refusals(plan, replica)));
    }
    batches
}

/// A tenant reaches its own gateway address, by its own overlay, from its own addresses. Linux
/// would take a packet for any local address from any interface; a tenant's node is the tenant's.
fn gateway_refusals(plan: &Plan, replica: usize) -> Vec<String> {
    let own = |address: &dyn Fn(&Vtep) -> IpAddr| {
        let pairs = plan.tenants.iter().map(|tenant| format!("\"{}\" . {}", tenant.device(), address(&tenant.gateways[replica])));
        pairs.collect::<Vec<_>>().join(", ")
    };
    let rules = [
        "iifname != \"vx*\" accept",
        // IPv4 sources are judged by rp_filter, which IPv6 does not have.
        "meta nfproto ipv6 tcp flags & (syn | ack) == syn fib saddr . iif oif missing counter name refused_foreign drop",
        "iifname . ip daddr @own4 accept",
        "iifname . ip6 daddr @own6 accept",
        "counter name refused_foreign drop",
    ];
    let mut lines = vec![
        format!("add table {REFUSALS}"),
        format!("add counter {REFUSALS} refused_foreign"),
        format!("add set {REFUSALS} own4 {{ type ifname . ipv4_addr; elements = {{ {} }}; }}", own(&|vtep| vtep.ip4.into())),
        format!("add set {REFUSALS} own6 {{ type ifname . ipv6_addr; elements = {{ {} }}; }}", own(&|vtep| vtep.ip6.into())),
        format!("add chain {REFUSALS} from_tenants {{ type filter hook prerouting priority filter; }}"),
    ];
    lines.extend(rules.iter().map(|rule| format!("add rule {REFUSALS} from_tenants {rule}")));
    lines
}

/// Token buckets on these devices.
pub(crate) fn shape(netns: &str, rates: impl IntoIterator<Item = (String, Rate)>) -> Option<Batch> {
    let lines: Vec<String> = rates.into_iter().map(|(device, rate)| bucket(&device, rate)).collect();
    (!lines.is_empty()).then(|| Batch::of(netns, Tool::Tc, lines))
}

/// A bucket that holds 4 ms at full rate (one tick at HZ=250) and never less than some packets;
/// the queue behind it holds 50 ms.
fn bucket(device: &str, rate: Rate) -> String {
    let burst = (rate.bits / 8 / 250).max(32 * 1024);
    format!("qdisc replace dev {device} root tbf rate {}bit burst {burst} latency 50ms", rate.bits)
}

//! The address plan: every namespace, interface, address and MAC of a world, decided before
//! anything is built. Pure and deterministic: the same topology always has the same plan.
//!
//! Underlay (IPv4, one /32 per host, no ARP: all neighbours are static):
//!   nodes, and tenants' own key servers 10.(200+az).0.0/16 · provider hosts 250.(az).0.0/16 (class E works as unicast on Linux)
//! Overlay of a tenant (dual stack): slot s of its pod ranges is one /24 and one /112:
//!   node k owns slot k, its own address is .1, its pods .2 to .254; the top slot is the gateways'.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

use crate::tier::{self, EdgePlan};
use crate::topology::{Component, Links, Node, Pod, Rate, Tenant, Topology, Vswitch};

/// Underlay of the nodes: one /16 per AZ.
pub const NODES_UNDERLAY: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 200, 0, 0), 13);
/// Addresses of the provider's hosts: one /16 per AZ.
pub const PROVIDERS: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(250, 0, 0, 0), 8);
/// AZs of one world: [`NODES_UNDERLAY`] has room for 10.201 to 10.207.
pub const AZS_MAX: usize = 7;
/// Gateway replicas: .1 to .254 of a tenant's top slot.
pub const REPLICAS_MAX: usize = 254;
/// Pods on one node: .2 to .254 of the node's slot.
pub const PODS_PER_NODE_MAX: usize = 253;
/// The first pod of a node; .1 is the node itself.
pub const POD_NUMBER_FIRST: u8 = 2;
/// Next hop that every host's routes name; it only ever exists as a static neighbour.
pub const NEXT_HOP4: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 1);
/// The same for IPv6.
pub const NEXT_HOP6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Hosts of one AZ that ever were: the router's address is above, and device names stay short.
pub const HOST_NUMBER_MAX: u16 = 65_000;

/// How many nodes fit into a pod range: slot 0 is unused, the top one is the gateways'.
pub fn node_slots(pods4: Ipv4Net) -> usize {
    (1 << (24 - pods4.prefix_len())) - 2
}

/// Name of an AZ's router.
pub fn router_name(az: &str) -> String {
    format!("router-{az}")
}

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac([u8; 6]);

impl Mac {
    /// A locally administered unicast address; `family` keeps the uses of this module apart.
    fn of(family: u8, number: u32) -> Self {
        let [a, b, c, d] = number.to_be_bytes();
        Self([0x02, family, a, b, c, d])
    }

    /// The MAC under which the edge of an AZ stands in nodes' forwarding tables, one per AZ: a table has one remote for each.
    pub(crate) fn of_edge(az: u8) -> Self {
        Self([0x02, 0xca, 0x0a, 0x01, 0x01, az])
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(out, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

/// MAC families: the second byte tells who owns the address.
mod family {
    pub(super) const HOST: u8 = 1;
    pub(super) const ROUTER: u8 = 2;
    pub(super) const INTER_AZ: u8 = 3;
    pub(super) const NODE_VTEP: u8 = 4;
    pub(super) const GATEWAY_VTEP: u8 = 5;
    pub(super) const POD: u8 = 6;
    pub(super) const NODE_OF_POD: u8 = 7;
}

/// The whole plan.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Name of the world.
    pub world: String,
    /// Link properties.
    pub links: Links,
    /// Whether routers check what tenants' nodes send.
    pub vswitch: Vswitch,
    /// One per AZ, in order.
    pub routers: Vec<RouterPlan>,
    /// All underlay hosts: controller, edges, gateways, key servers, plain hosts, nodes.
    pub hosts: Vec<HostPlan>,
    /// The edges as tunnel ends; with any, this is a tier world.
    pub edges: Vec<EdgePlan>,
    /// Overlays.
    pub tenants: Vec<TenantPlan>,
    /// Pods, in the order of the file.
    pub pods: Vec<PodPlan>,
}

/// The underlay router of an AZ.
#[derive(Clone, Debug)]
pub struct RouterPlan {
    /// Name of the host, `router-AZ`.
    pub name: String,
    /// Name of the AZ.
    pub az: String,
    /// Number of the AZ, from 1.
    pub number: u8,
    /// Network namespace.
    pub netns: String,
    /// Its address, for errors it sends.
    pub ip4: Ipv4Addr,
}

impl RouterPlan {
    /// The /16 of this AZ's nodes.
    pub fn nodes(&self) -> Ipv4Net {
        Ipv4Net::new_assert(Ipv4Addr::new(10, 200 + self.number, 0, 0), 16)
    }

    /// The /16 of this AZ's provider hosts.
    pub fn providers(&self) -> Ipv4Net {
        Ipv4Net::new_assert(Ipv4Addr::new(250, self.number, 0, 0), 16)
    }

    /// Interface towards another AZ's router.
    pub fn device_to(&self, other: &RouterPlan) -> String {
        format!("x{}", other.az)
    }

    /// MAC of the interface towards another AZ's router.
    pub fn mac_to(&self, other: &RouterPlan) -> Mac {
        Mac::of(family::INTER_AZ, u32::from(self.number) << 8 | u32::from(other.number))
    }
}

/// What an underlay host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostKind {
    /// The controller.
    Controller,
    /// An edge of the cloud tier.
    Edge,
    /// The n-th gateway replica, from 0.
    Gateway(usize),
    /// A key server.
    KeyServer {
        /// Index of the tenant whose own it is; `None`: the provider's.
        tenant: Option<usize>,
    },
    /// A plain host; `outside` when Passthrough tenants may reach it.
    Host {
        /// Reachable from pods of Passthrough tenants.
        outside: bool,
    },
    /// The node of a tenant, by indexes into [`Plan::tenants`] and its `nodes`.
    Node {
        /// Index of the tenant.
        tenant: usize,
        /// Index of the node within the tenant.
        node: usize,
    },
}

/// A host on the underlay.
#[derive(Clone, Debug)]
pub struct HostPlan {
    /// Unique name.
    pub name: String,
    /// What it is.
    pub kind: HostKind,
    /// Network namespace.
    pub netns: String,
    /// Index of its router.
    pub az: usize,
    /// Number within the AZ, from 1.
    pub number: u16,
    /// Underlay address.
    pub ip4: Ipv4Addr,
    /// Rate of its uplink, each direction.
    pub rate: Option<Rate>,
    /// MTU of its uplink, if not the underlay's.
    pub mtu: Option<u32>,
    /// Backend of a gateway in a tier world.
    pub backend: Option<String>,
}

impl HostPlan {
    /// The router's interface towards this host.
    pub fn router_device(&self) -> String {
        format!("h{}", self.number)
    }

    /// MAC of the host's `eth0`.
    pub fn mac(&self) -> Mac {
        Mac::of(family::HOST, self.wire_number())
    }

    /// MAC of the router's end.
    pub fn router_mac(&self) -> Mac {
        Mac::of(family::ROUTER, self.wire_number())
    }

    /// Takes over what the file says of its link and backend.
    fn fit(&mut self, component: &Component) {
        self.rate = component.rate.or(self.rate);
        self.mtu = component.mtu;
        self.backend.clone_from(&component.backend);
    }

    fn wire_number(&self) -> u32 {
        (self.az as u32) << 16 | u32::from(self.number)
    }
}

/// A tunnel end of a tenant's overlay.
#[derive(Clone, Debug)]
pub struct Vtep {
    /// Name of its host.
    pub host: String,
    /// Where tunnel packets go.
    pub underlay: Ipv4Addr,
    /// MAC of the VXLAN device.
    pub mac: Mac,
    /// Its own overlay address.
    pub ip4: Ipv4Addr,
    /// Its own overlay address.
    pub ip6: Ipv6Addr,
    /// What lies behind it: a node's slot, or just a gateway's address.
    pub net4: Ipv4Net,
    /// The same for IPv6.
    pub net6: Ipv6Net,
}

/// A tenant's overlay.
#[derive(Clone, Debug)]
pub struct TenantPlan {
    /// Name.
    pub name: String,
    /// VXLAN network identifier.
    pub vni: u32,
    /// Pods' whole IPv4 range.
    pub pods4: Ipv4Net,
    /// Pods' whole IPv6 range.
    pub pods6: Ipv6Net,
    /// Its nodes' tunnel ends; node k has slot k + 1.
    pub nodes: Vec<Vtep>,
    /// The gateway replicas' tunnel ends: their addresses are the tenant's gateway addresses. None in tier worlds, whose
    /// replicas no node knows.
    pub gateways: Vec<Vtep>,
    /// Ranges of its gateway addresses in a tier world.
    pub gateway_cidrs: Option<(Ipv4Net, Ipv6Net)>,
    /// Pods may reach hosts marked `outside`.
    pub passthrough: bool,
}

impl TenantPlan {
    /// The VXLAN interface, the same name on every host.
    pub fn device(&self) -> String {
        format!("vx{}", self.vni)
    }
}

/// A pod.
#[derive(Clone, Debug)]
pub struct PodPlan {
    /// `TENANT/NAMESPACE/NAME`, its name in the world.
    pub uid: String,
    /// Index of the tenant.
    pub tenant: usize,
    /// Index of the node within the tenant.
    pub node: usize,
    /// Name of the node.
    pub node_name: String,
    /// Kubernetes namespace.
    pub namespace: String,
    /// Name with the replica number.
    pub name: String,
    /// Last byte of its addresses.
    pub number: u8,
    /// Network namespace.
    pub netns: String,
    /// Address.
    pub ip4: Ipv4Addr,
    /// Address.
    pub ip6: Ipv6Addr,
    /// Rate of its link, each direction.
    pub rate: Option<Rate>,
    /// MTU of its link, if not the overlays'.
    pub mtu: Option<u32>,
}

impl PodPlan {
    /// The node's interface towards this pod.
    pub fn node_device(&self) -> String {
        node_device(self.number)
    }

    /// MAC of the pod's `eth0`. Pods of one node differ; a pod's link has no other members.
    pub fn mac(&self) -> Mac {
        Mac::of(family::POD, u32::from(self.number))
    }

    /// MAC of the node's end.
    pub fn node_mac(&self) -> Mac {
        Mac::of(family::NODE_OF_POD, u32::from(self.number))
    }
}

/// A node's interface towards its pod with this number.
pub(crate) fn node_device(number: u8) -> String {
    format!("p{number}")
}

/// Address `number` of slot `slot`.
fn address4(range: Ipv4Net, slot: u32, number: u8) -> Ipv4Addr {
    Ipv4Addr::from_bits(range.network().to_bits() | slot << 8 | u32::from(number))
}

fn address6(range: Ipv6Net, slot: u32, number: u8) -> Ipv6Addr {
    Ipv6Addr::from_bits(range.network().to_bits() | u128::from(slot) << 16 | u128::from(number))
}

/// Namespace of an underlay host. World names hold no dot, so no world's prefix is another's.
fn netns(world: &str, host: &str) -> String {
    format!("{}{host}", netns_prefix(world))
}

/// What the names of all namespaces of a world begin with.
pub fn netns_prefix(world: &str) -> String {
    format!("cnl-{world}.")
}

impl Plan {
    /// Plans a checked topology.
    pub fn of(topology: &Topology) -> Self {
        let mut plan = Self {
            world: topology.name.clone(),
            links: topology.links,
            vswitch: topology.vswitch,
            routers: routers(topology),
            hosts: Vec::new(),
            edges: Vec::new(),
            tenants: Vec::new(),
            pods: Vec::new(),
        };
        plan.add_components(topology);
        for tenant in &topology.tenants {
            plan.add_tenant(tenant);
        }
        for (index, tenant) in topology.tenants.iter().enumerate() {
            plan.add_pods(index, tenant);
        }
        plan
    }

    /// The pod of a template's replica as it would be with this number on its node.
    pub fn pod(&self, tenant: usize, node: usize, number: u8, pod: &Pod, replica: u16) -> PodPlan {
        let owner = &self.tenants[tenant];
        let name = format!("{}-{replica}", pod.name);
        let slot = node_slot(node);
        PodPlan {
            uid: format!("{}/{}/{name}", owner.name, pod.namespace),
            tenant,
            node,
            node_name: owner.nodes[node].host.clone(),
            namespace: pod.namespace.clone(),
            number,
            netns: netns(&self.world, &format!("{}.{}.{name}", owner.name, pod.namespace)),
            ip4: address4(owner.pods4, slot, number),
            ip6: address6(owner.pods6, slot, number),
            rate: pod.rate.or(self.links.pod),
            mtu: pod.mtu,
            name,
        }
    }

    /// The underlay host of this name.
    pub fn host(&self, name: &str) -> Option<&HostPlan> {
        self.hosts.iter().find(|host| host.name == name)
    }

    /// A tenant's own key servers.
    pub(crate) fn key_servers_of(&self, tenant: &str) -> impl Iterator<Item = &HostPlan> {
        let index = self.tenants.iter().position(|plan| plan.name == tenant);
        self.hosts.iter().filter(move |host| index.is_some() && host.kind == HostKind::KeyServer { tenant: index })
    }

    /// Whether gateways are reached through edges.
    pub fn is_tier(&self) -> bool {
        !self.edges.is_empty()
    }

    fn az_index(&self, az: &str) -> usize {
        // Checked topologies name existing AZs only; the first is a harmless answer otherwise.
        self.routers.iter().position(|router| router.az == az).unwrap_or(0)
    }

    /// Adds a host with the next number of its AZ.
    fn add_host(&mut self, name: &str, az: &str, kind: HostKind) -> &mut HostPlan {
        let az = self.az_index(az);
        let number = 1 + self.hosts.iter().filter(|host| host.az == az).count() as u16;
        self.add_host_as(name, az, kind, number)
    }

    fn add_host_as(&mut self, name: &str, az: usize, kind: HostKind, number: u16) -> &mut HostPlan {
        let router = &self.routers[az];
        // A tenant's own key server is the tenant's machine, like its nodes.
        let is_tenants = matches!(kind, HostKind::Node { .. } | HostKind::KeyServer { tenant: Some(_) });
        let range = if is_tenants { router.nodes() } else { router.providers() };
        let ip4 = Ipv4Addr::from_bits(range.network().to_bits() | u32::from(number));
        let rate = match kind {
            HostKind::Node { .. } => self.links.node,
            HostKind::Gateway(_) => self.links.gateway,
            HostKind::Controller | HostKind::Edge | HostKind::KeyServer { .. } | HostKind::Host { .. } => self.links.host,
        };
        let netns = netns(&self.world, name);
        let at = self.hosts.len();
        self.hosts.push(HostPlan { name: name.to_owned(), kind, netns, az, number, ip4, rate, mtu: None, backend: None });
        &mut self.hosts[at]
    }

    fn add_component(&mut self, component: &Component, kind: HostKind) {
        self.add_host(&component.name, &component.az, kind).fit(component);
    }

    fn add_components(&mut self, topology: &Topology) {
        if let Some(controller) = &topology.controller {
            self.add_component(controller, HostKind::Controller);
        }
        for edge in &topology.edges {
            self.add_component(edge, HostKind::Edge);
        }
        self.edges = tier::edges(self);
        for (index, gateway) in topology.gateways.iter().enumerate() {
            self.add_component(gateway, HostKind::Gateway(index));
        }
        for key_server in &topology.key_servers {
            let tenant = topology.tenants.iter().position(|tenant| Some(&tenant.name) == key_server.tenant.as_ref());
            self.add_component(key_server, HostKind::KeyServer { tenant });
        }
        for host in &topology.hosts {
            self.add_component(host, HostKind::Host { outside: host.outside });
        }
    }

    /// Plans one more gateway of a tier world, beside those that are there. `last` is the number given last in its AZ: a new host
    /// gets one that was not in use lately, so that nobody takes it for the one before. None: no number is free.
    pub(crate) fn add_gateway(&mut self, gateway: &Component, last: u16) -> Option<HostPlan> {
        let az = self.az_index(&gateway.az);
        let taken: Vec<u16> = self.hosts.iter().filter(|host| host.az == az).map(|host| host.number).collect();
        let number = next_number(last, &taken)?;
        let index = self.hosts.iter().filter(|host| matches!(host.kind, HostKind::Gateway(_))).count();
        let host = self.add_host_as(&gateway.name, az, HostKind::Gateway(index), number);
        host.fit(gateway);
        Some(host.clone())
    }

    /// The largest number of an AZ's hosts.
    pub(crate) fn last_number(&self, az: usize) -> u16 {
        self.hosts.iter().filter(|host| host.az == az).map(|host| host.number).max().unwrap_or(0)
    }

    fn add_tenant(&mut self, tenant: &Tenant) {
        let index = self.tenants.len();
        let nodes = tenant.nodes.iter().enumerate().map(|(node, host)| self.node_vtep(tenant, index, node, host)).collect();
        let gateways = self.hosts.iter().filter_map(|host| match host.kind {
            HostKind::Gateway(replica) if !self.is_tier() => Some(gateway_vtep(tenant, host, replica)),
            _ => None,
        });
        self.tenants.push(TenantPlan {
            name: tenant.name.clone(),
            vni: tenant.vni,
            pods4: tenant.pods4,
            pods6: tenant.pods6,
            nodes,
            gateways: gateways.collect(),
            gateway_cidrs: tenant.gateway_cidrs,
            passthrough: tenant.outside == crate::topology::Outside::Passthrough,
        });
    }

    fn node_vtep(&mut self, tenant: &Tenant, index: usize, node: usize, host: &Node) -> Vtep {
        let planned = self.add_host(&host.name, &host.az, HostKind::Node { tenant: index, node });
        planned.rate = host.rate.or(planned.rate);
        let underlay = planned.ip4;
        let slot = node_slot(node);
        Vtep {
            host: host.name.clone(),
            underlay,
            mac: Mac::of(family::NODE_VTEP, slot),
            ip4: address4(tenant.pods4, slot, 1),
            ip6: address6(tenant.pods6, slot, 1),
            net4: Ipv4Net::new_assert(address4(tenant.pods4, slot, 0), 24),
            net6: Ipv6Net::new_assert(address6(tenant.pods6, slot, 0), 112),
        }
    }

    fn add_pods(&mut self, tenant: usize, owner: &Tenant) {
        let mut next = vec![POD_NUMBER_FIRST; owner.nodes.len()];
        for pod in &owner.pods {
            for replica in 0..pod.replicas {
                let name = &pod.nodes[usize::from(replica) % pod.nodes.len()];
                let Some(node) = owner.nodes.iter().position(|node| node.name == *name) else { continue };
                self.pods.push(self.pod(tenant, node, next[node], pod, replica));
                next[node] = next[node].saturating_add(1);
            }
        }
    }
}

fn routers(topology: &Topology) -> Vec<RouterPlan> {
    let plan = |(index, az): (usize, &crate::topology::Az)| {
        let number = index as u8 + 1;
        let name = router_name(&az.name);
        RouterPlan { netns: netns(&topology.name, &name), name, az: az.name.clone(), number, ip4: Ipv4Addr::new(250, number, 255, 254) }
    };
    topology.azs.iter().enumerate().map(plan).collect()
}

/// The first number after `last` that nobody has, from 1 again after [`HOST_NUMBER_MAX`].
fn next_number(last: u16, taken: &[u16]) -> Option<u16> {
    (last + 1..=HOST_NUMBER_MAX).chain(1..=last.min(HOST_NUMBER_MAX)).find(|number| !taken.contains(number))
}

fn node_slot(node: usize) -> u32 {
    node as u32 + 1
}

/// A gateway's tunnel end; its address is the (replica + 1)-th of the tenant's top slot.
fn gateway_vtep(tenant: &Tenant, host: &HostPlan, replica: usize) -> Vtep {
    let slot = node_slots(tenant.pods4) as u32 + 1;
    let number = replica as u8 + 1;
    let (ip4, ip6) = (address4(tenant.pods4, slot, number), address6(tenant.pods6, slot, number));
    Vtep {
        host: host.name.clone(),
        underlay: host.ip4,
        mac: Mac::of(family::GATEWAY_VTEP, u32::from(number)),
        ip4,
        ip6,
        net4: Ipv4Net::new_assert(ip4, 32),
        net6: Ipv6Net::new_assert(ip6, 128),
    }
}

impl fmt::Display for Plan {
    /// The plan as text, one line per fact; golden tests and `canal world check` show it.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "world {} mtu {} underlay {}", self.world, self.links.mtu, self.links.underlay_mtu())?;
        for router in &self.routers {
            writeln!(out, "router {} {} nodes {} providers {}", router.name, router.ip4, router.nodes(), router.providers())?;
        }
        for host in &self.hosts {
            let router = &self.routers[host.az];
            let rate = host.rate.map(|rate| format!(" {}bit", rate.bits)).unwrap_or_default();
            let mtu = host.mtu.map(|mtu| format!(" mtu {mtu}")).unwrap_or_default();
            let backend = host.backend.as_ref().map(|backend| format!(" backend {backend}")).unwrap_or_default();
            write!(out, "host {} {} {} {}/{} {}", host.name, host.ip4, host.mac(), router.name, host.router_device(), host.netns)?;
            writeln!(out, "{rate}{mtu}{backend}")?;
        }
        for edge in &self.edges {
            let (four, six) = (edge.replicas4(), edge.replicas6());
            writeln!(out, "edge {} {} {} via {} {} to {four} {six}", edge.host, edge.underlay, edge.mac, edge.hop4, edge.hop6)?;
        }
        for tenant in &self.tenants {
            writeln!(out, "tenant {} vni {} {} {}", tenant.name, tenant.vni, tenant.pods4, tenant.pods6)?;
            for vtep in tenant.nodes.iter().chain(&tenant.gateways) {
                writeln!(out, "  vtep {} {} {} {} {} {} {}", vtep.host, vtep.underlay, vtep.mac, vtep.ip4, vtep.ip6, vtep.net4, vtep.net6)?;
            }
            for (edge, (four, six)) in self.edges.iter().filter_map(|edge| Some((edge, tenant.gateway_cidrs?))) {
                writeln!(out, "  gateway addresses {} {} by {}", tier::part4(four, edge.az), tier::part6(six, edge.az), edge.host)?;
            }
        }
        for pod in &self.pods {
            let mtu = pod.mtu.map(|mtu| format!(" mtu {mtu}")).unwrap_or_default();
            writeln!(out, "pod {} {}/{} {} {} {}{mtu}", pod.uid, pod.node_name, pod.node_device(), pod.ip4, pod.ip6, pod.netns)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_not_given_again_at_once() {
        for (name, last, taken, expected) in [
            ("the first", 0, &[][..], Some(1)),
            ("after the last", 7, &[1, 2], Some(8)),
            ("not one in use", 7, &[8, 9], Some(10)),
            ("from the start again", HOST_NUMBER_MAX, &[1, 2], Some(3)),
        ] {
            assert_eq!(next_number(last, taken), expected, "{name}");
        }
        let all: Vec<u16> = (1..=HOST_NUMBER_MAX).collect();
        assert_eq!(next_number(3, &all), None);
    }
}

//! [`WorldPlan`]: the address plan. It assigns every namespace, interface, address and MAC of a world before anything is built. Pure and
//! deterministic: a topology always has the same plan. Start at [`WorldPlan::of`].
//!
//! Underlay (IPv4, one /32 per host, no ARP: all neighbors are static):
//!   nodes, and tenants' own key servers 10.(200+az).0.0/16 · provider hosts 250.(az).0.0/16 (class
//!   E works as unicast on Linux)
//! Overlay of a tenant (dual stack): slot s of its pod ranges is one /24 and one /112:
//!   node k owns slot k, its own address is .1, its pods .2 to .254; the top slot is the gateways'.

use std::collections::HashSet;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

use crate::impairment::Impairment;
use crate::tier::{self, EdgePlan};
use crate::topology::{
    Component, LinkRate, Links, NodeTopology, PodTemplate, TenantTopology, Topology, Vswitch,
};

/// Underlay of the nodes: one /16 per AZ. A /13 has eight, of which the first, 10.200, belongs to
/// no AZ.
pub const NODES_UNDERLAY: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 200, 0, 0), 13);
/// Addresses of the provider's hosts: one /16 per AZ. It is the tier's network of hosts
/// (`TIER_NET4` of `canal-abi`), which is in class E, so that it is in no tenant's range.
pub const PROVIDERS: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(250, 0, 0, 0), 8);
/// Maximum number of AZs: [`NODES_UNDERLAY`] contains 10.201 to 10.207.
pub const AZS_MAX: usize = 7;
/// Maximum number of gateway replicas: .1 to .254 of a tenant's top slot.
pub const REPLICAS_MAX: usize = 254;
/// Maximum number of pods on one node: .2 to .254 of the node's slot.
pub const PODS_PER_NODE_MAX: usize = 253;
/// Number of a node's first pod; .1 is the node itself.
pub const POD_NUMBER_FIRST: u8 = 2;
/// Next hop in every host's routes. It exists only as a static neighbor.
pub const NEXT_HOP4: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 1);
/// Next hop in every host's IPv6 routes. It exists only as a static neighbor.
pub const NEXT_HOP6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Highest host number in an AZ. Higher ones would reach the router's address and make device names
/// longer.
pub const HOST_NUMBER_MAX: u16 = 65_000;

/// Returns how many nodes fit into a pod range. Slot 0 is unused, and the top slot is the
/// gateways'.
pub fn node_slots(pods4: Ipv4Net) -> usize {
    (1 << (24 - pods4.prefix_len())) - 2
}

/// Returns the name of an AZ's router.
pub fn router_name(az: &str) -> String {
    format!("router-{az}")
}

/// Returns the name of the relay in a link. `link` is the name of a host, or `AZ-AZ` between two
/// AZs.
pub(crate) fn relay_name(link: &str) -> String {
    format!("{RELAY_PREFIX}{link}")
}

/// Prefix of the names of all relays.
pub(crate) const RELAY_PREFIX: &str = "relay-";

/// An Ethernet address, written `02:01:00:00:00:01`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac([u8; 6]);

impl Mac {
    /// Returns a locally administered unicast address. `family` separates the uses of this module.
    fn of(family: u8, number: u32) -> Self {
        let [a, b, c, d] = number.to_be_bytes();
        Self([0x02, family, a, b, c, d])
    }

    /// Returns the MAC of an AZ's edge in the forwarding tables of nodes. It is one per AZ, because
    /// a table has one remote per AZ.
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

/// MAC families. The second byte of an address shows the kind of its owner.
mod family {
    pub(super) const HOST: u8 = 1;
    pub(super) const ROUTER: u8 = 2;
    pub(super) const INTER_AZ: u8 = 3;
    pub(super) const NODE_VTEP: u8 = 4;
    pub(super) const GATEWAY_VTEP: u8 = 5;
    pub(super) const POD: u8 = 6;
    pub(super) const NODE_OF_POD: u8 = 7;
}

/// The addresses of a whole world.
#[derive(Clone, Debug)]
pub struct WorldPlan {
    pub world: String,
    /// Rates, MTU and impairments of the links.
    pub links: Links,
    /// Check that routers apply to the packets of tenants' nodes.
    pub vswitch: Vswitch,
    /// Underlay routers, one per AZ in order.
    pub routers: Vec<RouterPlan>,
    /// All underlay hosts: controller, edges, gateways, key servers, plain hosts, nodes.
    pub hosts: Vec<HostPlan>,
    /// The edges as tunnel ends. If there are any, this is a tier world.
    pub edges: Vec<EdgePlan>,
    /// The tenants' overlays, in the order of the file.
    pub tenants: Vec<TenantPlan>,
    /// Pods, in the order of the file.
    pub pods: Vec<PodPlan>,
}

/// The underlay router of an AZ.
#[derive(Clone, Debug)]
pub struct RouterPlan {
    /// Name of the host, `router-AZ`.
    pub name: String,
    pub az: String,
    /// Number of the AZ, from 1.
    pub number: u8,
    pub netns: String,
    /// Source address of the errors that the router sends.
    pub ip4: Ipv4Addr,
}

impl RouterPlan {
    /// Returns the /16 of this AZ's nodes.
    pub fn nodes(&self) -> Ipv4Net {
        Ipv4Net::new_assert(Ipv4Addr::new(10, 200 + self.number, 0, 0), 16)
    }

    /// Returns the /16 of this AZ's provider hosts.
    pub fn providers(&self) -> Ipv4Net {
        Ipv4Net::new_assert(Ipv4Addr::new(250, self.number, 0, 0), 16)
    }

    /// Returns the interface toward another AZ's router.
    pub fn device_to(&self, other: &RouterPlan) -> String {
        format!("x{}", other.az)
    }

    /// Returns the MAC of the interface toward another AZ's router.
    pub fn mac_to(&self, other: &RouterPlan) -> Mac {
        Mac::of(
            family::INTER_AZ,
            u32::from(self.number) << 8 | u32::from(other.number),
        )
    }
}

/// A relay: it is inserted into a link, and delays or drops the link's frames.
#[derive(Clone, Debug)]
pub struct RelayPlan {
    /// Name of the host, `relay-HOST` or `relay-AZ-AZ`.
    pub name: String,
    /// Network namespace. It contains the relay's ends of the link and nothing else.
    pub netns: String,
    /// Index of the AZ. A link between AZs has the index of the first.
    pub az: usize,
    /// Delay, jitter and loss of the frames.
    pub impairment: Impairment,
    /// Seed that determines which frames are lost.
    pub seed: u64,
}

/// Kind of an underlay host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostKind {
    Controller,
    /// An edge of the cloud tier.
    Edge,
    /// The n-th gateway replica, from 0.
    Gateway(usize),
    KeyServer {
        /// Index of the tenant that owns the key server; `None` for the provider's.
        tenant: Option<usize>,
    },
    /// A plain host, such as a load generator.
    Host {
        /// Pods of Passthrough tenants may reach the host.
        outside: bool,
    },
    /// The node of a tenant, by indexes into [`WorldPlan::tenants`] and its `nodes`.
    Node {
        tenant: usize,
        /// Index of the node within the tenant.
        node: usize,
    },
}

/// A host on the underlay.
#[derive(Clone, Debug)]
pub struct HostPlan {
    /// Name, which is unique in the world.
    pub name: String,
    /// Kind of component, or node.
    pub kind: HostKind,
    pub netns: String,
    /// Index of the host's AZ and router.
    pub az: usize,
    /// Number within the AZ, from 1.
    pub number: u16,
    pub ip4: Ipv4Addr,
    /// Rate of the uplink, per direction.
    pub rate: Option<LinkRate>,
    /// Delay, jitter and loss of the uplink. If set, the uplink has a relay.
    pub impairment: Option<Impairment>,
    /// MTU of the uplink in bytes, if it differs from the underlay's.
    pub mtu: Option<u32>,
    /// Backend of a gateway in a tier world.
    pub backend: Option<String>,
    /// Number of cores over which a gateway's packets are spread in a tier world. 0 turns receive
    /// packet steering off.
    pub receive_cores: u16,
}

impl HostPlan {
    /// Returns the router's interface toward this host.
    pub fn router_device(&self) -> String {
        format!("h{}", self.number)
    }

    /// Returns the MAC of the host's `eth0`.
    pub fn mac(&self) -> Mac {
        Mac::of(family::HOST, self.wire_number())
    }

    /// Returns the MAC of the router's end of the link.
    pub fn router_mac(&self) -> Mac {
        Mac::of(family::ROUTER, self.wire_number())
    }

    /// Copies the link and backend settings of the topology.
    fn fit(&mut self, component: &Component) {
        self.rate = component.rate.or(self.rate);
        self.impairment = component.impairment.or(self.impairment);
        self.mtu = component.mtu;
        self.backend.clone_from(&component.backend);
        self.receive_cores = component.receive_cores;
    }

    fn wire_number(&self) -> u32 {
        (self.az as u32) << 16 | u32::from(self.number)
    }
}

/// A tunnel end of a tenant's overlay.
#[derive(Clone, Debug)]
pub struct Vtep {
    /// Name of the tunnel end's host.
    pub host: String,
    /// Underlay address to which tunnel packets are sent.
    pub underlay: Ipv4Addr,
    /// MAC of the VXLAN device.
    pub mac: Mac,
    /// The tunnel end's own IPv4 overlay address.
    pub ip4: Ipv4Addr,
    /// The tunnel end's own IPv6 overlay address.
    pub ip6: Ipv6Addr,
    /// IPv4 range behind the tunnel end: a node's slot, or only a gateway's address.
    pub net4: Ipv4Net,
    /// IPv6 range behind the tunnel end: a node's slot, or only a gateway's address.
    pub net6: Ipv6Net,
}

/// The overlay of a tenant.
#[derive(Clone, Debug)]
pub struct TenantPlan {
    pub name: String,
    /// VXLAN network identifier of the overlay.
    pub vni: u32,
    /// IPv4 range of all pods.
    pub pods4: Ipv4Net,
    /// IPv6 range of all pods.
    pub pods6: Ipv6Net,
    /// Tunnel ends of the tenant's nodes. Node k has slot k + 1.
    pub nodes: Vec<Vtep>,
    /// Tunnel ends of the gateway replicas, with the tenant's gateway addresses. The list is empty
    /// in tier worlds, where nodes have no tunnels to replicas.
    pub gateways: Vec<Vtep>,
    /// Ranges of the tenant's gateway addresses in a tier world.
    pub gateway_cidrs: Option<(Ipv4Net, Ipv6Net)>,
    /// Pods may reach hosts marked `outside`.
    pub passthrough: bool,
}

impl TenantPlan {
    /// Returns the name of the VXLAN interface, which is the same on every host.
    pub fn device(&self) -> String {
        format!("vx{}", self.vni)
    }
}

/// Addresses and names of a pod.
#[derive(Clone, Debug)]
pub struct PodPlan {
    /// Name in the world: `TENANT/NAMESPACE/NAME`.
    pub uid: String,
    pub tenant: usize,
    /// Index of the node within the tenant.
    pub node: usize,
    /// Name of the pod's node.
    pub node_name: String,
    pub namespace: String,
    /// Name with the replica number.
    pub name: String,
    /// Last byte of the pod's addresses.
    pub number: u8,
    pub netns: String,
    pub ip4: Ipv4Addr,
    pub ip6: Ipv6Addr,
    /// Rate of the pod's link, per direction.
    pub rate: Option<LinkRate>,
    /// MTU of the pod's link in bytes, if it differs from the overlays'.
    pub mtu: Option<u32>,
}

impl PodPlan {
    /// Returns the node's interface toward this pod.
    pub fn node_device(&self) -> String {
        node_device(self.number)
    }

    /// Returns the MAC of the pod's `eth0`. It is unique on the node only, because a pod's link has
    /// no other members.
    pub fn mac(&self) -> Mac {
        Mac::of(family::POD, u32::from(self.number))
    }

    /// Returns the MAC of the node's end of the link.
    pub fn node_mac(&self) -> Mac {
        Mac::of(family::NODE_OF_POD, u32::from(self.number))
    }
}

/// Returns a node's interface toward its pod with this number.
pub(crate) fn node_device(number: u8) -> String {
    format!("p{number}")
}

/// Returns address `number` of slot `slot`.
fn address4(range: Ipv4Net, slot: u32, number: u8) -> Ipv4Addr {
    Ipv4Addr::from_bits(range.network().to_bits() | slot << 8 | u32::from(number))
}

fn address6(range: Ipv6Net, slot: u32, number: u8) -> Ipv6Addr {
    Ipv6Addr::from_bits(range.network().to_bits() | u128::from(slot) << 16 | u128::from(number))
}

/// Returns the namespace of an underlay host. World names contain no dot, so no world's prefix is a
/// prefix of another's.
fn netns(world: &str, host: &str) -> String {
    format!("{}{host}", netns_prefix(world))
}

/// Returns the prefix of the names of all namespaces of a world.
pub fn netns_prefix(world: &str) -> String {
    format!("cnl-{world}.")
}

impl WorldPlan {
    /// Assigns all addresses of a checked topology.
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
        // Gateways must exist before tenants, because every tenant has a tunnel end on each.
        plan.add_components(topology);
        for tenant in &topology.tenants {
            plan.add_tenant(tenant);
        }
        for (index, tenant) in topology.tenants.iter().enumerate() {
            plan.add_pods(index, tenant);
        }
        plan
    }

    /// Returns the pod of a template's replica under the given number on its node, without adding
    /// it to the plan.
    pub fn pod(
        &self,
        tenant: usize,
        node: usize,
        number: u8,
        pod: &PodTemplate,
        replica: u16,
    ) -> PodPlan {
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
            netns: netns(
                &self.world,
                &format!("{}.{}.{name}", owner.name, pod.namespace),
            ),
            ip4: address4(owner.pods4, slot, number),
            ip6: address6(owner.pods6, slot, number),
            rate: pod.rate.or(self.links.pod),
            mtu: pod.mtu,
            name,
        }
    }

    /// Returns the underlay host of this name.
    pub fn host(&self, name: &str) -> Option<&HostPlan> {
        self.hosts.iter().find(|host| host.name == name)
    }

    /// Returns a tenant's own key servers.
    pub(crate) fn key_servers_of(&self, tenant: &str) -> impl Iterator<Item = &HostPlan> {
        let index = self.tenants.iter().position(|plan| plan.name == tenant);
        self.hosts.iter().filter(move |host| {
            index.is_some() && host.kind == HostKind::KeyServer { tenant: index }
        })
    }

    /// Returns the tunnel end that an edge shares with the other edges of its AZ.
    pub(crate) fn anycast(&self, edge: &HostPlan) -> Option<Ipv4Addr> {
        self.edges
            .iter()
            .find(|edges| edges.hosts.contains(&edge.name))
            .and_then(EdgePlan::anycast)
    }

    /// Returns the relay in a host's link, if it has one.
    pub fn relay(&self, host: &HostPlan) -> Option<RelayPlan> {
        Some(self.relay_of_link(&host.name, host.az, host.impairment?))
    }

    /// Returns the relay in the link between two AZs, if it has one.
    pub fn az_relay(&self, one: &RouterPlan, other: &RouterPlan) -> Option<RelayPlan> {
        let (first, second) = if one.number < other.number {
            (one, other)
        } else {
            (other, one)
        };
        let impairment = self.links.impaired.inter_az?;
        Some(self.relay_of_link(
            &format!("{}-{}", first.az, second.az),
            usize::from(first.number) - 1,
            impairment,
        ))
    }

    fn relay_of_link(&self, link: &str, az: usize, impairment: Impairment) -> RelayPlan {
        let name = relay_name(link);
        RelayPlan {
            netns: netns(&self.world, &name),
            az,
            impairment,
            seed: link_seed(self.links.seed, link),
            name,
        }
    }

    /// Returns all relays, those of hosts first.
    pub fn relays(&self) -> Vec<RelayPlan> {
        let pairs = self
            .routers
            .iter()
            .enumerate()
            .flat_map(|(at, one)| self.routers[at + 1..].iter().map(move |other| (one, other)));
        let between = pairs.filter_map(|(one, other)| self.az_relay(one, other));
        self.hosts
            .iter()
            .filter_map(|host| self.relay(host))
            .chain(between)
            .collect()
    }

    /// Returns whether gateways are reached through edges.
    pub fn is_tier(&self) -> bool {
        !self.edges.is_empty()
    }

    fn az_index(&self, az: &str) -> usize {
        // Checked topologies name existing AZs only; otherwise the first AZ is a harmless result.
        self.routers
            .iter()
            .position(|router| router.az == az)
            .unwrap_or(0)
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
        let is_tenants = matches!(
            kind,
            HostKind::Node { .. } | HostKind::KeyServer { tenant: Some(_) }
        );
        let range = if is_tenants {
            router.nodes()
        } else {
            router.providers()
        };
        let ip4 = Ipv4Addr::from_bits(range.network().to_bits() | u32::from(number));
        let (rate, impairment) = match kind {
            HostKind::Node { .. } => (self.links.node, self.links.impaired.node),
            HostKind::Gateway(_) => (self.links.gateway, self.links.impaired.gateway),
            HostKind::Controller
            | HostKind::Edge
            | HostKind::KeyServer { .. }
            | HostKind::Host { .. } => (self.links.host, self.links.impaired.host),
        };
        let netns = netns(&self.world, name);
        let at = self.hosts.len();
        self.hosts.push(HostPlan {
            name: name.to_owned(),
            kind,
            netns,
            az,
            number,
            ip4,
            rate,
            impairment,
            mtu: None,
            backend: None,
            receive_cores: 0,
        });
        &mut self.hosts[at]
    }

    fn add_component(&mut self, component: &Component, kind: HostKind) {
        self.add_host(&component.name, &component.az, kind)
            .fit(component);
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
            let tenant = topology
                .tenants
                .iter()
                .position(|tenant| Some(&tenant.name) == key_server.tenant.as_ref());
            self.add_component(key_server, HostKind::KeyServer { tenant });
        }
        for host in &topology.hosts {
            self.add_component(
                host,
                HostKind::Host {
                    outside: host.outside,
                },
            );
        }
    }

    /// Plans one more gateway of a tier world beside the existing ones. `last` is the number
    /// assigned last in its AZ. The new host gets a number that was not in use recently, so that it
    /// is not mistaken for its predecessor. Returns `None` if no number is free.
    pub(crate) fn add_gateway(&mut self, gateway: &Component, last: u16) -> Option<HostPlan> {
        let az = self.az_index(&gateway.az);
        let taken: HashSet<u16> = self
            .hosts
            .iter()
            .filter(|host| host.az == az)
            .map(|host| host.number)
            .collect();
        let number = next_number(last, &taken)?;
        let index = self
            .hosts
            .iter()
            .filter(|host| matches!(host.kind, HostKind::Gateway(_)))
            .count();
        let host = self.add_host_as(&gateway.name, az, HostKind::Gateway(index), number);
        host.fit(gateway);
        Some(host.clone())
    }

    /// Returns the largest number of an AZ's hosts.
    pub(crate) fn last_number(&self, az: usize) -> u16 {
        self.hosts
            .iter()
            .filter(|host| host.az == az)
            .map(|host| host.number)
            .max()
            .unwrap_or(0)
    }

    fn add_tenant(&mut self, tenant: &TenantTopology) {
        let index = self.tenants.len();
        let nodes = tenant
            .nodes
            .iter()
            .enumerate()
            .map(|(node, host)| self.node_vtep(tenant, index, node, host))
            .collect();
        let gateways = self.hosts.iter().filter_map(|host| match host.kind {
            HostKind::Gateway(replica) if !self.is_tier() => {
                Some(gateway_vtep(tenant, host, replica))
            }
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
            passthrough: tenant.outside == crate::topology::OutsideTraffic::Passthrough,
        });
    }

    fn node_vtep(
        &mut self,
        tenant: &TenantTopology,
        index: usize,
        node: usize,
        host: &NodeTopology,
    ) -> Vtep {
        let planned = self.add_host(
            &host.name,
            &host.az,
            HostKind::Node {
                tenant: index,
                node,
            },
        );
        planned.rate = host.rate.or(planned.rate);
        planned.impairment = host.impairment.or(planned.impairment);
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

    fn add_pods(&mut self, tenant: usize, owner: &TenantTopology) {
        let mut next = vec![POD_NUMBER_FIRST; owner.nodes.len()];
        for pod in &owner.pods {
            for replica in 0..pod.replicas {
                let name = &pod.nodes[usize::from(replica) % pod.nodes.len()];
                let Some(node) = owner.nodes.iter().position(|node| node.name == *name) else {
                    continue;
                };
                self.pods
                    .push(self.pod(tenant, node, next[node], pod, replica));
                next[node] = next[node].saturating_add(1);
            }
        }
    }
}

fn routers(topology: &Topology) -> Vec<RouterPlan> {
    let plan = |(index, az): (usize, &crate::topology::Az)| {
        let number = index as u8 + 1;
        let name = router_name(&az.name);
        RouterPlan {
            netns: netns(&topology.name, &name),
            name,
            az: az.name.clone(),
            number,
            ip4: Ipv4Addr::new(250, number, 255, 254),
        }
    };
    topology.azs.iter().enumerate().map(plan).collect()
}

/// Returns the first unused number after `last`. After [`HOST_NUMBER_MAX`] the numbers start at 1
/// again.
fn next_number(last: u16, taken: &HashSet<u16>) -> Option<u16> {
    (last + 1..=HOST_NUMBER_MAX)
        .chain(1..=last.min(HOST_NUMBER_MAX))
        .find(|number| !taken.contains(number))
}

/// Returns a seed for each link (FNV-1a over its name), so that different links lose different
/// frames. The lowest bit is left for the direction.
fn link_seed(seed: u64, link: &str) -> u64 {
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    seed.to_be_bytes()
        .into_iter()
        .chain(link.bytes())
        .fold(0xcbf2_9ce4_8422_2325, hash)
        << 1
}

fn node_slot(node: usize) -> u32 {
    node as u32 + 1
}

/// Returns a gateway's tunnel end. Its address is the (replica + 1)-th of the tenant's top slot.
fn gateway_vtep(tenant: &TenantTopology, host: &HostPlan, replica: usize) -> Vtep {
    let slot = node_slots(tenant.pods4) as u32 + 1;
    let number = replica as u8 + 1;
    let (ip4, ip6) = (
        address4(tenant.pods4, slot, number),
        address6(tenant.pods6, slot, number),
    );
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

impl fmt::Display for WorldPlan {
    /// Writes the plan as text, one line per fact. Golden tests and `canal world check` show it.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "world {} mtu {} underlay {}",
            self.world,
            self.links.mtu,
            self.links.underlay_mtu()
        )?;
        for router in &self.routers {
            writeln!(
                out,
                "router {} {} nodes {} providers {}",
                router.name,
                router.ip4,
                router.nodes(),
                router.providers()
            )?;
        }
        self.write_hosts(out)?;
        for relay in self.relays() {
            let Impairment {
                delay,
                jitter,
                loss_ppm,
            } = relay.impairment;
            let router = &self.routers[relay.az].name;
            writeln!(
                out,
                "relay {} {router} delay {delay:?} jitter {jitter:?} loss {loss_ppm}ppm {}",
                relay.name, relay.netns
            )?;
        }
        for edge in &self.edges {
            let (four, six) = (edge.replicas4(), edge.replicas6());
            writeln!(
                out,
                "edge {} {} {} via {} {} to {four} {six}",
                edge.hosts.join("+"),
                edge.underlay,
                edge.mac,
                edge.hop4,
                edge.hop6
            )?;
        }
        self.write_tenants(out)?;
        for pod in &self.pods {
            let mtu = pod.mtu.map(|mtu| format!(" mtu {mtu}")).unwrap_or_default();
            writeln!(
                out,
                "pod {} {}/{} {} {} {}{mtu}",
                pod.uid,
                pod.node_name,
                pod.node_device(),
                pod.ip4,
                pod.ip6,
                pod.netns
            )?;
        }
        Ok(())
    }
}

impl WorldPlan {
    /// Writes a line per host.
    fn write_hosts(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for host in &self.hosts {
            let router = &self.routers[host.az];
            let rate = host
                .rate
                .map(|rate| format!(" {}bit", rate.bits))
                .unwrap_or_default();
            let mtu = host
                .mtu
                .map(|mtu| format!(" mtu {mtu}"))
                .unwrap_or_default();
            let backend = host
                .backend
                .as_ref()
                .map(|backend| format!(" backend {backend}"))
                .unwrap_or_default();
            write!(
                out,
                "host {} {} {} {}/{} {}",
                host.name,
                host.ip4,
                host.mac(),
                router.name,
                host.router_device(),
                host.netns
            )?;
            writeln!(out, "{rate}{mtu}{backend}")?;
        }
        Ok(())
    }

    /// Writes a line per tenant, and one for each of its tunnel ends and ranges of gateway
    /// addresses.
    fn write_tenants(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for tenant in &self.tenants {
            writeln!(
                out,
                "tenant {} vni {} {} {}",
                tenant.name, tenant.vni, tenant.pods4, tenant.pods6
            )?;
            for vtep in tenant.nodes.iter().chain(&tenant.gateways) {
                writeln!(
                    out,
                    "  vtep {} {} {} {} {} {} {}",
                    vtep.host, vtep.underlay, vtep.mac, vtep.ip4, vtep.ip6, vtep.net4, vtep.net6
                )?;
            }
            for (edge, (four, six)) in self
                .edges
                .iter()
                .filter_map(|edge| Some((edge, tenant.gateway_cidrs?)))
            {
                writeln!(
                    out,
                    "  gateway addresses {} {} by {}",
                    tier::part4(four, edge.az),
                    tier::part6(six, edge.az),
                    edge.hosts.join("+")
                )?;
            }
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
            assert_eq!(
                next_number(last, &taken.iter().copied().collect()),
                expected,
                "{name}"
            );
        }
        let all: HashSet<u16> = (1..=HOST_NUMBER_MAX).collect();
        assert_eq!(next_number(3, &all), None);
    }
}

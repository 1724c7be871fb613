//! Decides the desired content of the kernel's maps from the controller's input. Pure: the order of
//! the input does not matter.
//!
//! Each tenant has a share of each map; entries beyond it are omitted by name. Nothing is written
//! here. Start at [`decide_maps`].

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use canal_model::ids::{
    AzName, ReplicaName, ReplicaNumber, ServiceId, ServiceKey, TenantName, Vni,
};
use canal_model::program::{
    BUCKETS, BucketTable, CHAIN_LENGTH_MAX, GatewayAddress, Node, Replica, Resource, ResourceKind,
    Tenant,
};
use canal_model::share::{MapDemand, Omission, ShareKind, decide_omitted};
use ipnet::IpNet;

/// The controller's input: the subscribed resources and the orders in report responses.
#[derive(Debug, Clone, Default)]
pub struct ControllerInput {
    /// All subscribed resources, in any order.
    pub resources: Vec<Arc<Resource>>,
    /// Underlay addresses of all edges and replicas of the tier.
    pub hosts: BTreeSet<Ipv4Addr>,
    /// Source ports of tunnels to the replicas of this AZ, spread over their cores; `None` if the
    /// controller has not sent them yet.
    pub tunnels: Option<Tunnels>,
}

/// Source ports of tunnels, by the replica's underlay address.
pub type Tunnels = BTreeMap<Ipv4Addr, Arc<Vec<u16>>>;

/// Capacities of the maps: the sizes with which they were created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct MapCapacity {
    pub addresses: usize,
    /// Capacity of `canal_tables` and of `canal_returns`.
    pub services: usize,
    pub prefixes: usize,
    pub nodes: usize,
    pub hosts: usize,
}

/// A service's VNI and gateway addresses, which the program restores in packets from a replica to a
/// client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReturnEntry {
    pub vni: Vni,
    pub v4: Option<Ipv4Addr>,
    pub v6: Option<Ipv6Addr>,
}

/// The node that has a pod address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeNextHop {
    pub node: Ipv4Addr,
    pub mac: [u8; 6],
}

/// A service's chains in the kernel's format: 0 ends a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainTable {
    pub vni: Vni,
    pub version: u32,
    pub chains: [[u16; CHAIN_LENGTH_MAX]; BUCKETS],
}

/// The entry of one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaEntry {
    pub address: Ipv4Addr,
    pub up: bool,
}

/// The content of all maps, actual or desired.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EdgeMapContent {
    pub addresses: BTreeMap<(Vni, IpAddr), ServiceId>,
    pub returns: BTreeMap<ServiceId, ReturnEntry>,
    pub prefixes: BTreeMap<(Vni, IpNet), NodeNextHop>,
    pub nodes: BTreeMap<(Vni, Ipv4Addr), ()>,
    pub tables: BTreeMap<ServiceId, Arc<ChainTable>>,
    pub replicas: BTreeMap<ReplicaNumber, ReplicaEntry>,
    /// The replica number of each host; 0 for a host of the tier that is not a replica.
    pub hosts: BTreeMap<Ipv4Addr, u16>,
    /// A replica that is not listed gets the number of tunnels from the settings.
    pub tunnels: Tunnels,
}

/// The reason that an entry is not in the maps.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum OmissionReason {
    /// The map is full at this many entries, and the tenant is among the largest holders.
    Full(usize),
    /// The tenant's share of the map is this many entries.
    Share(usize),
    /// Another resource has the same key. This may be half of a move, so the resource is not
    /// refused.
    Taken(String),
    /// The tenant is not known (yet).
    Tenant,
}

impl OmissionReason {
    /// Returns the value of the label `reason`.
    pub fn name(&self) -> &'static str {
        match self {
            OmissionReason::Full(_) => "full",
            OmissionReason::Share(_) => "share",
            OmissionReason::Taken(_) => "taken",
            OmissionReason::Tenant => "no_tenant",
        }
    }
}

/// An entry that the controller sent but that is not in the maps.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct OmittedEntry {
    /// The name of the map.
    pub map: &'static str,
    /// The resource's name, and the part of it that is omitted.
    pub name: String,
    pub reason: OmissionReason,
    /// The tenant that owns the entry; `None` if it is the provider's.
    pub tenant: Option<TenantName>,
    /// Kind and name of the resource that contains the entry; `None` if it comes from an order.
    pub resource: Option<(ResourceKind, String)>,
}

impl OmittedEntry {
    /// Returns true if the resource is refused for lack of space. An entry whose key is taken or
    /// whose tenant is not known may be half of a move, so it is not refused.
    pub fn is_refused(&self) -> bool {
        matches!(
            self.reason,
            OmissionReason::Full(_) | OmissionReason::Share(_)
        )
    }
}

/// The resource that an entry comes from.
struct EntryOrigin<'a> {
    kind: ResourceKind,
    resource: String,
    tenant: &'a TenantName,
}

impl<'a> EntryOrigin<'a> {
    fn service(kind: ResourceKind, key: &'a ServiceKey, az: &AzName) -> Self {
        Self {
            kind,
            resource: format!("{key}@{az}"),
            tenant: &key.tenant,
        }
    }

    fn node(node: &'a Node) -> Self {
        Self {
            kind: ResourceKind::Node,
            resource: format!("{}/{}", node.tenant, node.name),
            tenant: &node.tenant,
        }
    }

    fn left_out(
        self,
        map: &'static str,
        part: Option<String>,
        reason: OmissionReason,
    ) -> OmittedEntry {
        let name = part.map_or_else(
            || self.resource.clone(),
            |part| format!("{} {part}", self.resource),
        );
        OmittedEntry {
            map,
            name,
            reason,
            tenant: Some(self.tenant.clone()),
            resource: Some((self.kind, self.resource)),
        }
    }
}

impl std::fmt::Display for OmittedEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            map, name, reason, ..
        } = self;
        match reason {
            OmissionReason::Full(most) => write!(
                f,
                "{name} does not fit {map}, which has space for {most} entries, and its tenant has the largest share; fix: give another edge or AZ a part of the tenants"
            ),
            OmissionReason::Share(most) => write!(
                f,
                "{name} does not fit {map}: its tenant's share is {most} entries; fix: use fewer, or raise spec.shares.{} of the Tenant",
                ShareKind::EdgeMapEntries.key()
            ),
            OmissionReason::Taken(by) => {
                write!(f, "{name} is not in {map}: {by} uses the same key")
            }
            OmissionReason::Tenant => write!(f, "{name} is not in {map}: its tenant is unknown"),
        }
    }
}

/// A replica as the controller describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaTarget {
    pub name: ReplicaName,
    pub address: Ipv4Addr,
    /// The replica is in this edge's AZ, so this edge probes it.
    pub own: bool,
    /// The replica's state as the controller reports it.
    pub up: bool,
}

/// The desired content of the maps.
#[derive(Debug, Clone, Default)]
pub struct DesiredMaps {
    /// The content, with replicas in the state that the controller reports.
    pub content: EdgeMapContent,
    pub members: BTreeMap<ReplicaNumber, ReplicaTarget>,
    pub left_out: BTreeSet<OmittedEntry>,
    made_of: MapInputs,
}

/// The inputs by kind, so that unchanged kinds are not decided again. Resources count as equal if
/// they are the same allocation.
#[derive(Debug, Clone, Default)]
struct MapInputs {
    tenants: Vec<Arc<Resource>>,
    addresses: Vec<Arc<Resource>>,
    tables: Vec<Arc<Resource>>,
    nodes: Vec<Arc<Resource>>,
    replicas: Vec<Arc<Resource>>,
    /// Tables of this edge, as far as they fit.
    table_of: BTreeMap<ServiceId, Arc<Resource>>,
}

impl MapInputs {
    fn of(input: &ControllerInput) -> Self {
        let mut inputs = Self::default();
        for resource in &input.resources {
            let of_kind = match &**resource {
                Resource::Tenant(_) => &mut inputs.tenants,
                Resource::Address(_) => &mut inputs.addresses,
                Resource::Table(_) => &mut inputs.tables,
                Resource::Node(_) => &mut inputs.nodes,
                Resource::Replica(_) => &mut inputs.replicas,
                _ => continue,
            };
            of_kind.push(resource.clone());
        }
        inputs
    }

    fn tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.iter().filter_map(|r| {
            if let Resource::Tenant(t) = &**r {
                Some(t)
            } else {
                None
            }
        })
    }

    fn gateway_addresses(&self) -> impl Iterator<Item = &GatewayAddress> {
        self.addresses.iter().filter_map(|r| {
            if let Resource::Address(a) = &**r {
                Some(a)
            } else {
                None
            }
        })
    }

    fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter_map(|r| {
            if let Resource::Node(n) = &**r {
                Some(n)
            } else {
                None
            }
        })
    }

    fn replicas(&self) -> impl Iterator<Item = &Replica> {
        self.replicas.iter().filter_map(|r| {
            if let Resource::Replica(r) = &**r {
                Some(r)
            } else {
                None
            }
        })
    }
}

fn is_same(one: &[Arc<Resource>], other: &[Arc<Resource>]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| Arc::ptr_eq(a, b))
}

/// Returns the desired maps of the edge of `az` at `address`.
///
/// `before` is the last decision for the same edge, or empty. It only saves work: while all entries
/// fit, it does not affect the result. `have` is the content of the kernel's maps: if not all
/// entries of a tenant fit, those already there stay.
pub fn decide_maps(
    input: &ControllerInput,
    az: &AzName,
    address: Ipv4Addr,
    capacity: &MapCapacity,
    before: &DesiredMaps,
    have: &EdgeMapContent,
) -> DesiredMaps {
    let (inputs, old) = (MapInputs::of(input), &before.made_of);
    let mut maps = DesiredMaps::default();
    let by = MapContext {
        tenants: inputs.tenants().map(|t| (&t.name, t)).collect(),
        az,
        capacity,
        have,
    };
    // A kind whose resources did not change is copied. Tenants count for every kind, because
    // entries depend on their VNIs and shares.
    let same_tenants = is_same(&inputs.tenants, &old.tenants);
    if same_tenants && is_same(&inputs.addresses, &old.addresses) {
        maps.content.addresses = before.content.addresses.clone();
        maps.content.returns = before.content.returns.clone();
        maps.keep_left_out(before, &["canal_addresses", "canal_returns"]);
    } else {
        by.services(inputs.gateway_addresses(), &mut maps);
    }
    if same_tenants && is_same(&inputs.tables, &old.tables) {
        maps.content.tables = before.content.tables.clone();
        maps.made_of.table_of = old.table_of.clone();
        maps.keep_left_out(before, &["canal_tables"]);
    } else {
        by.tables(&inputs.tables, before, &mut maps);
    }
    if same_tenants && is_same(&inputs.nodes, &old.nodes) {
        maps.content.prefixes = before.content.prefixes.clone();
        maps.content.nodes = before.content.nodes.clone();
        maps.keep_left_out(before, &["canal_prefixes", "canal_nodes"]);
    } else {
        by.nodes(inputs.nodes(), &mut maps);
    }
    // After both `services` and `tables`, because it compares tables with addresses.
    maps.expect_clients();
    // Replicas and hosts are few, so they are decided anew each time.
    by.replicas(inputs.replicas(), &mut maps);
    by.hosts(&input.hosts, address, &mut maps);
    maps.content.tunnels = match &input.tunnels {
        // Tunnels of an earlier agent are better than none.
        None => have.tunnels.clone(),
        Some(tunnels) => maps.own_tunnels(tunnels),
    };
    maps.made_of = MapInputs {
        table_of: maps.made_of.table_of,
        ..inputs
    };
    maps
}

impl DesiredMaps {
    /// Gives each table the VNI with which clients' packets arrive: that of its service's address.
    /// Only a Gateway's differs from the VNI of the tenant.
    fn expect_clients(&mut self) {
        let EdgeMapContent {
            tables, returns, ..
        } = &mut self.content;
        for (id, table) in tables {
            let address = returns.get(id).map(|address| address.vni);
            let of_tenant = match self.made_of.table_of.get(id).map(Arc::as_ref) {
                Some(Resource::Table(table)) => Some(table.vni),
                _ => None,
            };
            let vni = address.or(of_tenant);
            if let Some(vni) = vni.filter(|vni| *vni != table.vni) {
                Arc::make_mut(table).vni = vni;
            }
        }
    }

    /// Returns the resources that are refused for lack of space: kind, name, and reason.
    pub fn refused(&self) -> impl Iterator<Item = (ResourceKind, String, String)> {
        let mut refused: BTreeMap<(ResourceKind, String), String> = BTreeMap::new();
        for left_out in self
            .left_out
            .iter()
            .filter(|left_out| left_out.is_refused())
        {
            if let Some(resource) = &left_out.resource {
                refused
                    .entry(resource.clone())
                    .or_insert_with(|| left_out.to_string());
            }
        }
        refused
            .into_iter()
            .map(|((kind, name), why)| (kind, name, why))
    }

    /// Returns the tunnels to the replicas of this edge's AZ.
    fn own_tunnels(&self, tunnels: &Tunnels) -> Tunnels {
        let own: BTreeSet<Ipv4Addr> = self
            .members
            .values()
            .filter(|member| member.own)
            .map(|member| member.address)
            .collect();
        let tunnels = tunnels
            .iter()
            .filter(|(replica, ports)| !ports.is_empty() && own.contains(replica));
        tunnels
            .map(|(replica, ports)| (*replica, ports.clone()))
            .collect()
    }

    fn keep_left_out(&mut self, before: &DesiredMaps, of: &[&'static str]) {
        self.left_out.extend(
            before
                .left_out
                .iter()
                .filter(|left_out| of.contains(&left_out.map))
                .cloned(),
        );
    }
}

/// Inputs that all kinds of entries need.
struct MapContext<'a> {
    tenants: BTreeMap<&'a TenantName, &'a Tenant>,
    az: &'a AzName,
    capacity: &'a MapCapacity,
    have: &'a EdgeMapContent,
}

impl MapContext<'_> {
    fn vni<'o>(
        &self,
        tenant: &TenantName,
        map: &'static str,
        origin: impl Fn() -> EntryOrigin<'o>,
        out: &mut BTreeSet<OmittedEntry>,
    ) -> Option<Vni> {
        let vni = self.tenants.get(tenant).map(|tenant| tenant.vni);
        if vni.is_none() {
            out.insert(origin().left_out(map, None, OmissionReason::Tenant));
        }
        vni
    }

    /// Omits the entries beyond tenants' shares of the map or beyond its capacity. `origin` returns
    /// an entry's resource and the part of it that the entry is.
    fn fit<'o, K: Ord + Copy, V>(
        &self,
        all: &mut BTreeMap<K, V>,
        (map, capacity): (&'static str, usize),
        is_held: impl Fn(&K) -> bool,
        origin: impl Fn(&K, &V) -> (EntryOrigin<'o>, Option<String>),
        tenant: impl Fn(&V) -> &'o TenantName,
        out: &mut BTreeSet<OmittedEntry>,
    ) {
        let demands: Vec<_> = all
            .iter()
            .map(|(key, value)| MapDemand {
                tenant: tenant(value),
                key: *key,
                is_held: is_held(key),
            })
            .collect();
        let share = |tenant: &TenantName| {
            let kind = ShareKind::EdgeMapEntries;
            let share = self
                .tenants
                .get(tenant)
                .map_or_else(|| kind.default_share(), |tenant| tenant.shares.get(kind));
            usize::try_from(share.of(capacity as u64)).unwrap_or(capacity)
        };
        for (key, why) in decide_omitted(capacity, &demands, share) {
            let reason = match why {
                Omission::Share(most) => OmissionReason::Share(most),
                Omission::Full(most) => OmissionReason::Full(most),
            };
            if let Some(value) = all.remove(&key) {
                let (origin, part) = origin(&key, &value);
                out.insert(origin.left_out(map, part, reason));
            }
        }
    }

    fn services<'a>(
        &self,
        gateway_addresses: impl Iterator<Item = &'a GatewayAddress>,
        maps: &mut DesiredMaps,
    ) {
        let mut addresses: BTreeMap<(Vni, IpAddr), &GatewayAddress> = BTreeMap::new();
        let mut returns: BTreeMap<ServiceId, (ReturnEntry, &GatewayAddress)> = BTreeMap::new();
        let origin =
            |a: &'a GatewayAddress| EntryOrigin::service(ResourceKind::Address, &a.service, &a.az);
        // An edge serves the addresses of its own AZ alone.
        for a in in_order(gateway_addresses.filter(|a| a.az == *self.az), |a| a.id) {
            // Without its tenant the address has no VNI; `vni` has listed it among the omitted
            // entries.
            let Some(own) = self.vni(
                &a.service.tenant,
                "canal_addresses",
                || origin(a),
                &mut maps.left_out,
            ) else {
                continue;
            };
            // Clients of a Gateway are on another network than its endpoints.
            let vni = a.network.unwrap_or(own);
            // IPv4 packets match only IPv4 keys, so a mapped address loses its prefix.
            for ip in a.addresses.iter().map(IpAddr::to_canonical) {
                // The older service keeps an address that two services claim.
                if let Err(by) = claim(&mut addresses, (vni, ip), a) {
                    let reason = OmissionReason::Taken(format!("{}@{} {ip}", by.service, by.az));
                    maps.left_out.insert(origin(a).left_out(
                        "canal_addresses",
                        Some(ip.to_string()),
                        reason,
                    ));
                }
            }
            // The program restores one source address per family in replies, so the first of each
            // counts.
            let v4 = a.addresses.iter().find_map(|ip| {
                if let IpAddr::V4(v4) = ip.to_canonical() {
                    Some(v4)
                } else {
                    None
                }
            });
            let v6 = a.addresses.iter().find_map(|ip| {
                if let IpAddr::V6(v6) = ip.to_canonical() {
                    Some(v6)
                } else {
                    None
                }
            });
            returns.insert(a.id, (ReturnEntry { vni, v4, v6 }, a));
        }
        // Sorted by service, the oldest first, so that omissions affect whole services where
        // possible.
        let mut by_service: BTreeMap<(ServiceId, Vni, IpAddr), &GatewayAddress> = addresses
            .into_iter()
            .map(|((vni, ip), a)| ((a.id, vni, ip), a))
            .collect();
        let have = self.have;
        let is_held =
            |(id, vni, ip): &(ServiceId, Vni, IpAddr)| have.addresses.get(&(*vni, *ip)) == Some(id);
        let part = |key: &(ServiceId, Vni, IpAddr), a: &&'a GatewayAddress| {
            (origin(a), Some(key.2.to_string()))
        };
        let map = ("canal_addresses", self.capacity.addresses);
        self.fit(
            &mut by_service,
            map,
            is_held,
            part,
            |a| &a.service.tenant,
            &mut maps.left_out,
        );
        let is_held = |id: &ServiceId| have.returns.contains_key(id);
        let map = ("canal_returns", self.capacity.services);
        self.fit(
            &mut returns,
            map,
            is_held,
            |_, (_, a)| (origin(a), None),
            |(_, a)| &a.service.tenant,
            &mut maps.left_out,
        );
        maps.content.addresses = by_service
            .into_iter()
            .map(|((id, vni, ip), _)| ((vni, ip), id))
            .collect();
        maps.content.returns = returns.into_iter().map(|(id, (r, _))| (id, r)).collect();
    }

    /// Decides the tables. A table has thousands of bytes and most do not change, so unchanged ones
    /// are reused.
    fn tables<'a>(
        &self,
        tables: &'a [Arc<Resource>],
        before: &DesiredMaps,
        maps: &mut DesiredMaps,
    ) {
        let own = tables.iter().filter_map(|resource| match &**resource {
            Resource::Table(t) if t.az == *self.az => Some((t.id, (t, resource))),
            // An edge forwards sessions to replicas of its own AZ only.
            _ => None,
        });
        let mut tables: BTreeMap<ServiceId, (&'a BucketTable, &'a Arc<Resource>)> = own.collect();
        let is_held = |id: &ServiceId| self.have.tables.contains_key(id);
        let origin = |_: &ServiceId, (t, _): &(&'a BucketTable, &'a Arc<Resource>)| {
            (
                EntryOrigin::service(ResourceKind::Table, &t.service, &t.az),
                None,
            )
        };
        let map = ("canal_tables", self.capacity.services);
        self.fit(
            &mut tables,
            map,
            is_held,
            origin,
            |(t, _)| &t.service.tenant,
            &mut maps.left_out,
        );
        // Both iterators are sorted by id, so one pass finds the reusable tables.
        let mut known = before
            .made_of
            .table_of
            .iter()
            .zip(before.content.tables.values())
            .peekable();
        let mut known = |id: &ServiceId, resource: &Arc<Resource>| {
            while known.next_if(|((other, _), _)| *other < id).is_some() {}
            let ((other, made_of), table) = known.peek()?;
            (*other == id && Arc::ptr_eq(made_of, resource)).then(|| (*table).clone())
        };
        let table = |(id, (table, resource)): (&ServiceId, &(&BucketTable, &Arc<Resource>))| {
            (
                *id,
                known(id, resource).unwrap_or_else(|| Arc::new(ChainTable::of(table))),
            )
        };
        maps.content.tables = tables.iter().map(table).collect();
        maps.made_of.table_of = tables
            .into_iter()
            .map(|(id, (_, resource))| (id, resource.clone()))
            .collect();
    }

    fn nodes<'a>(&self, all: impl Iterator<Item = &'a Node>, maps: &mut DesiredMaps) {
        let mut prefixes: BTreeMap<(Vni, IpNet), &Node> = BTreeMap::new();
        let mut nodes: BTreeMap<(Vni, Ipv4Addr), &Node> = BTreeMap::new();
        for n in in_order(all, |n| (&n.tenant, &n.name)) {
            // As for addresses, a node whose tenant is unknown is omitted.
            let Some(vni) = self.vni(
                &n.tenant,
                "canal_nodes",
                || EntryOrigin::node(n),
                &mut maps.left_out,
            ) else {
                continue;
            };
            // The map is a set of addresses, so of two nodes with one address either may own the
            // entry.
            nodes.insert((vni, n.underlay), n);
            for net in n.pod_cidrs.iter().map(IpNet::trunc) {
                if let Err(by) = claim(&mut prefixes, (vni, net), n)
                    // A node may list one prefix twice, for example as `10.1.0.1/24` and as
                    // `10.1.0.0/24`.
                    && by.name != n.name
                {
                    let reason = OmissionReason::Taken(format!("{}/{}", by.tenant, by.name));
                    maps.left_out.insert(EntryOrigin::node(n).left_out(
                        "canal_prefixes",
                        Some(net.to_string()),
                        reason,
                    ));
                }
            }
        }
        let part =
            |key: &(Vni, IpNet), n: &&'a Node| (EntryOrigin::node(n), Some(key.1.to_string()));
        let (have, map) = (self.have, ("canal_prefixes", self.capacity.prefixes));
        self.fit(
            &mut prefixes,
            map,
            |key| have.prefixes.contains_key(key),
            part,
            |n| &n.tenant,
            &mut maps.left_out,
        );
        let map = ("canal_nodes", self.capacity.nodes);
        self.fit(
            &mut nodes,
            map,
            |key| have.nodes.contains_key(key),
            |_, n| (EntryOrigin::node(n), None),
            |n| &n.tenant,
            &mut maps.left_out,
        );
        maps.content.prefixes = prefixes
            .into_iter()
            .map(|(k, n)| {
                (
                    k,
                    NodeNextHop {
                        node: n.underlay,
                        mac: n.mac,
                    },
                )
            })
            .collect();
        maps.content.nodes = nodes.into_keys().map(|key| (key, ())).collect();
    }

    /// Decides the replicas. Replica numbers end at the array's last index, so all of them fit.
    fn replicas<'a>(&self, replicas: impl Iterator<Item = &'a Replica>, maps: &mut DesiredMaps) {
        let mut members: BTreeMap<ReplicaNumber, &Replica> = BTreeMap::new();
        for r in in_order(replicas, |r| &r.name) {
            if let Err(by) = claim(&mut members, r.number, r) {
                let (reason, resource) = (
                    OmissionReason::Taken(by.name.to_string()),
                    Some((ResourceKind::Replica, r.name.to_string())),
                );
                maps.left_out.insert(OmittedEntry {
                    map: "canal_replicas",
                    name: r.name.to_string(),
                    reason,
                    tenant: None,
                    resource,
                });
            }
        }
        maps.content.replicas = members
            .iter()
            .map(|(n, r)| {
                (
                    *n,
                    ReplicaEntry {
                        address: r.underlay,
                        up: r.up,
                    },
                )
            })
            .collect();
        let member = |r: &Replica| ReplicaTarget {
            name: r.name.clone(),
            address: r.underlay,
            own: r.az == *self.az,
            up: r.up,
        };
        maps.members = members.into_iter().map(|(n, r)| (n, member(r))).collect();
    }

    fn hosts(&self, desired: &BTreeSet<Ipv4Addr>, own: Ipv4Addr, maps: &mut DesiredMaps) {
        let mut hosts: BTreeMap<Ipv4Addr, u16> =
            desired.iter().chain([&own]).map(|h| (*h, 0)).collect();
        // The iteration is reversed, so the smaller number wins if two replicas claim the same
        // address.
        hosts.extend(maps.members.iter().rev().map(|(n, m)| (m.address, n.get())));
        // This map only contains the tier's own hosts, so no tenant's share applies.
        let present = |host: &Ipv4Addr| self.have.hosts.contains_key(host);
        let demands: Vec<_> = hosts
            .keys()
            .map(|host| MapDemand {
                tenant: (),
                key: *host,
                is_held: present(host),
            })
            .collect();
        for host in decide_omitted(self.capacity.hosts, &demands, |()| usize::MAX).into_keys() {
            hosts.remove(&host);
            let reason = OmissionReason::Full(self.capacity.hosts);
            maps.left_out.insert(OmittedEntry {
                map: "canal_hosts",
                name: host.to_string(),
                reason,
                tenant: None,
                resource: None,
            });
        }
        maps.content.hosts = hosts;
    }
}

impl ChainTable {
    fn of(t: &BucketTable) -> Self {
        let mut chains = [[0; CHAIN_LENGTH_MAX]; BUCKETS];
        for (row, chain) in chains.iter_mut().zip(&t.chains) {
            for (place, number) in row.iter_mut().zip(chain) {
                *place = number.get();
            }
        }
        Self {
            vni: t.vni,
            version: t.version,
            chains,
        }
    }
}

/// Sorts the resources, so that of two that claim the same key always the same one gets it.
fn in_order<'a, T, K: Ord + 'a>(
    sorted: impl Iterator<Item = &'a T>,
    by: impl Fn(&'a T) -> K,
) -> Vec<&'a T> {
    let mut sorted: Vec<&T> = sorted.collect();
    sorted.sort_by_key(|t| by(t));
    sorted
}

/// Claims a key, or returns the resource that already has it.
fn claim<'a, K: Ord, T>(
    places: &mut BTreeMap<K, &'a T>,
    key: K,
    value: &'a T,
) -> Result<(), &'a T> {
    match places.entry(key) {
        Entry::Vacant(place) => {
            place.insert(value);
            Ok(())
        }
        Entry::Occupied(place) => Err(place.get()),
    }
}

#[cfg(test)]
mod tests;

//! From all that the controller said to what the kernel's maps should hold. Pure: the same words in any order give the same maps. Each
//! tenant has a share of each map, and what is beyond it is left out by name. Nothing is written here. Start at [`decide_maps`].

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use canal_model::ids::{AzName, ReplicaName, ReplicaNumber, ServiceId, ServiceKey, TenantName, Vni};
use canal_model::program::{BUCKETS, BucketTable, CHAIN, GatewayAddress, Kind, Node, Replica, Resource, Tenant};
use canal_model::share::{MapDemand, Omission, ShareKind, decide_omitted};
use ipnet::IpNet;

/// What the controller said, southbound and as orders.
#[derive(Debug, Clone, Default)]
pub struct Told {
    /// Everything held, in any order.
    pub resources: Vec<Arc<Resource>>,
    /// Underlay addresses of all edges and replicas of the tier.
    pub hosts: BTreeSet<Ipv4Addr>,
}

/// How many elements each map holds at most: the sizes that the maps were made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Room {
    pub addresses: usize,
    /// Of `canal_tables` and of `canal_returns`.
    pub services: usize,
    pub prefixes: usize,
    pub nodes: usize,
    pub hosts: usize,
}

/// What the way back restores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Return {
    pub vni: Vni,
    pub v4: Option<Ipv4Addr>,
    pub v6: Option<Ipv6Addr>,
}

/// The node that has a pod address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Via {
    pub node: Ipv4Addr,
    pub mac: [u8; 6],
}

/// A service's chains as the kernel holds them: 0 ends a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    pub vni: Vni,
    pub version: u32,
    pub chains: [[u16; CHAIN]; BUCKETS],
}

/// A replica's slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    pub address: Ipv4Addr,
    pub up: bool,
}

/// What is, or should be, in the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    pub addresses: BTreeMap<(Vni, IpAddr), ServiceId>,
    pub returns: BTreeMap<ServiceId, Return>,
    pub prefixes: BTreeMap<(Vni, IpNet), Via>,
    pub nodes: BTreeSet<(Vni, Ipv4Addr)>,
    pub tables: BTreeMap<ServiceId, Arc<Table>>,
    pub replicas: BTreeMap<ReplicaNumber, Slot>,
    /// 0: a host of the tier that is no replica.
    pub hosts: BTreeMap<Ipv4Addr, u16>,
}

/// Why something said is not in the maps.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The map holds so many entries, and its tenant is among the largest holders.
    Full(usize),
    /// Its tenant's share of the map is so many entries.
    Share(usize),
    /// Another has the same key; may be half of a move, so it is not refused.
    Taken(String),
    /// Its tenant was not told of (yet).
    Tenant,
}

impl Reason {
    /// The label.
    pub fn name(&self) -> &'static str {
        match self {
            Reason::Full(_) => "full",
            Reason::Share(_) => "share",
            Reason::Taken(_) => "taken",
            Reason::Tenant => "no_tenant",
        }
    }
}

/// Something said that is not in the maps.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeftOut {
    /// The map's name.
    pub map: &'static str,
    /// The resource's name, and its part.
    pub name: String,
    pub reason: Reason,
    /// Whose it is; `None`: the provider's.
    pub tenant: Option<TenantName>,
    /// Kind and name of the resource that it is of; `None`: an order's.
    pub resource: Option<(Kind, String)>,
}

impl LeftOut {
    /// Whether the resource is refused for want of room. What another has the place of, or whose tenant is not known, may be half of a move
    /// and is not.
    pub fn is_refused(&self) -> bool {
        matches!(self.reason, Reason::Full(_) | Reason::Share(_))
    }
}

/// Where an entry comes from.
struct Origin<'a> {
    kind: Kind,
    resource: String,
    tenant: &'a TenantName,
}

impl<'a> Origin<'a> {
    fn service(kind: Kind, key: &'a ServiceKey, az: &AzName) -> Self {
        Self { kind, resource: format!("{key}@{az}"), tenant: &key.tenant }
    }

    fn node(node: &'a Node) -> Self {
        Self { kind: Kind::Node, resource: format!("{}/{}", node.tenant, node.name), tenant: &node.tenant }
    }

    fn left_out(self, map: &'static str, part: Option<String>, reason: Reason) -> LeftOut {
        let name = part.map_or_else(|| self.resource.clone(), |part| format!("{} {part}", self.resource));
        LeftOut { map, name, reason, tenant: Some(self.tenant.clone()), resource: Some((self.kind, self.resource)) }
    }
}

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { map, name, reason, .. } = self;
        match reason {
            Reason::Full(most) => write!(
                f,
                "{name} does not fit {map}, which holds {most}, and its tenant is among the largest holders; fix: give another edge or AZ a part \
                 of the tenants"
            ),
            Reason::Share(most) => write!(
                f,
                "{name} does not fit {map}: its tenant's share is {most} entries; fix: use fewer, or raise spec.shares.{} of the Tenant",
                ShareKind::EdgeMapEntries.key()
            ),
            Reason::Taken(by) => write!(f, "{name} is not in {map}: {by} has its place"),
            Reason::Tenant => write!(f, "{name} is not in {map}: its tenant is not known"),
        }
    }
}

/// A replica as the edge looks after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub name: ReplicaName,
    pub address: Ipv4Addr,
    /// Of this edge's AZ: probed by it.
    pub own: bool,
    /// What the controller holds of it.
    pub up: bool,
}

/// What the maps should hold.
#[derive(Debug, Clone, Default)]
pub struct Maps {
    /// With replicas as the controller sees them.
    pub content: Content,
    pub members: BTreeMap<ReplicaNumber, Member>,
    pub left_out: BTreeSet<LeftOut>,
    made_of: MadeOf,
}

/// What was said, by kind; so that what did not change is not decided again. Resources are the same if they are one in memory.
#[derive(Debug, Clone, Default)]
struct MadeOf {
    tenants: Vec<Arc<Resource>>,
    addresses: Vec<Arc<Resource>>,
    tables: Vec<Arc<Resource>>,
    nodes: Vec<Arc<Resource>>,
    replicas: Vec<Arc<Resource>>,
    /// This edge's tables, as far as they fit.
    table_of: BTreeMap<ServiceId, Arc<Resource>>,
}

impl MadeOf {
    fn of(told: &Told) -> Self {
        let mut said = Self::default();
        for resource in &told.resources {
            let of_kind = match &**resource {
                Resource::Tenant(_) => &mut said.tenants,
                Resource::Address(_) => &mut said.addresses,
                Resource::Table(_) => &mut said.tables,
                Resource::Node(_) => &mut said.nodes,
                Resource::Replica(_) => &mut said.replicas,
                _ => continue,
            };
            of_kind.push(resource.clone());
        }
        said
    }
}

fn is_same(one: &[Arc<Resource>], other: &[Arc<Resource>]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| Arc::ptr_eq(a, b))
}

/// The maps of the edge of `az` at `address`. `before` are those of the same edge that were decided last, or none: as long as all fits,
/// whatever they are, the result is the same. `have` is what the kernel holds: where not all of a tenant's entries fit, those stay.
pub fn decide_maps(told: &Told, az: &AzName, address: Ipv4Addr, room: &Room, before: &Maps, have: &Content) -> Maps {
    let (said, old) = (MadeOf::of(told), &before.made_of);
    let mut maps = Maps::default();
    let tenants = said.tenants.iter().filter_map(|r| if let Resource::Tenant(t) = &**r { Some((&t.name, t)) } else { None });
    let by = By { tenants: tenants.collect(), az, room, have };
    let same_tenants = is_same(&said.tenants, &old.tenants);
    if same_tenants && is_same(&said.addresses, &old.addresses) {
        maps.content.addresses = before.content.addresses.clone();
        maps.content.returns = before.content.returns.clone();
        maps.keep_left_out(before, &["canal_addresses", "canal_returns"]);
    } else {
        by.services(said.addresses.iter().filter_map(|r| if let Resource::Address(a) = &**r { Some(a) } else { None }), &mut maps);
    }
    if same_tenants && is_same(&said.tables, &old.tables) {
        maps.content.tables = before.content.tables.clone();
        maps.made_of.table_of = old.table_of.clone();
        maps.keep_left_out(before, &["canal_tables"]);
    } else {
        by.tables(&said.tables, before, &mut maps);
    }
    if same_tenants && is_same(&said.nodes, &old.nodes) {
        maps.content.prefixes = before.content.prefixes.clone();
        maps.content.nodes = before.content.nodes.clone();
        maps.keep_left_out(before, &["canal_prefixes", "canal_nodes"]);
    } else {
        by.nodes(said.nodes.iter().filter_map(|r| if let Resource::Node(n) = &**r { Some(n) } else { None }), &mut maps);
    }
    by.replicas(said.replicas.iter().filter_map(|r| if let Resource::Replica(r) = &**r { Some(r) } else { None }), &mut maps);
    by.hosts(&told.hosts, address, &mut maps);
    maps.made_of = MadeOf { table_of: maps.made_of.table_of, ..said };
    maps
}

impl Maps {
    /// The resources that are refused for want of room: kind, name, and why.
    pub fn refused(&self) -> impl Iterator<Item = (Kind, String, String)> {
        let mut refused: BTreeMap<(Kind, String), String> = BTreeMap::new();
        for left_out in self.left_out.iter().filter(|left_out| left_out.is_refused()) {
            if let Some(resource) = &left_out.resource {
                refused.entry(resource.clone()).or_insert_with(|| left_out.to_string());
            }
        }
        refused.into_iter().map(|((kind, name), why)| (kind, name, why))
    }

    fn keep_left_out(&mut self, before: &Maps, of: &[&'static str]) {
        self.left_out.extend(before.left_out.iter().filter(|left_out| of.contains(&left_out.map)).cloned());
    }
}

/// What all parts go by.
struct By<'a> {
    tenants: BTreeMap<&'a TenantName, &'a Tenant>,
    az: &'a AzName,
    room: &'a Room,
    have: &'a Content,
}

impl By<'_> {
    fn vni<'o>(&self, tenant: &TenantName, map: &'static str, origin: impl Fn() -> Origin<'o>, out: &mut BTreeSet<LeftOut>) -> Option<Vni> {
        let vni = self.tenants.get(tenant).map(|tenant| tenant.vni);
        if vni.is_none() {
            out.insert(origin().left_out(map, None, Reason::Tenant));
        }
        vni
    }

    /// Leaves out what is beyond tenants' shares of the map, or beyond the map. `origin` gives an entry's resource and which part of it
    /// the entry is.
    fn fit<'o, K: Ord + Copy, V>(
        &self,
        all: &mut BTreeMap<K, V>,
        (map, capacity): (&'static str, usize),
        is_held: impl Fn(&K) -> bool,
        origin: impl Fn(&K, &V) -> (Origin<'o>, Option<String>),
        tenant: impl Fn(&V) -> &'o TenantName,
        out: &mut BTreeSet<LeftOut>,
    ) {
        let demands: Vec<_> =
            all.iter().map(|(key, value)| MapDemand { tenant: tenant(value), key: *key, is_held: is_held(key) }).collect();
        let share = |tenant: &TenantName| {
            let kind = ShareKind::EdgeMapEntries;
            let share = self.tenants.get(tenant).map_or_else(|| kind.default_share(), |tenant| tenant.shares.get(kind));
            usize::try_from(share.of(capacity as u64)).unwrap_or(capacity)
        };
        for (key, why) in decide_omitted(capacity, &demands, share) {
            let reason = match why {
                Omission::Share(most) => Reason::Share(most),
                Omission::Full(most) => Reason::Full(most),
            };
            if let Some(value) = all.remove(&key) {
                let (origin, part) = origin(&key, &value);
                out.insert(origin.left_out(map, part, reason));
            }
        }
    }

    fn services<'a>(&self, said: impl Iterator<Item = &'a GatewayAddress>, maps: &mut Maps) {
        let mut addresses: BTreeMap<(Vni, IpAddr), &GatewayAddress> = BTreeMap::new();
        let mut returns: BTreeMap<ServiceId, (Return, &GatewayAddress)> = BTreeMap::new();
        let origin = |a: &'a GatewayAddress| Origin::service(Kind::Address, &a.service, &a.az);
        for a in in_order(said.filter(|a| a.az == *self.az), |a| a.id) {
            let Some(vni) = self.vni(&a.service.tenant, "canal_addresses", || origin(a), &mut maps.left_out) else { continue };
            for ip in a.addresses.iter().map(IpAddr::to_canonical) {
                if let Err(by) = claim(&mut addresses, (vni, ip), a) {
                    let reason = Reason::Taken(format!("{}@{} {ip}", by.service, by.az));
                    maps.left_out.insert(origin(a).left_out("canal_addresses", Some(ip.to_string()), reason));
                }
            }
            let v4 = a.addresses.iter().find_map(|ip| if let IpAddr::V4(v4) = ip.to_canonical() { Some(v4) } else { None });
            let v6 = a.addresses.iter().find_map(|ip| if let IpAddr::V6(v6) = ip.to_canonical() { Some(v6) } else { None });
            returns.insert(a.id, (Return { vni, v4, v6 }, a));
        }
        // By service, the oldest first, so that what is left out is whole services where that is possible.
        let mut by_service: BTreeMap<(ServiceId, Vni, IpAddr), &GatewayAddress> =
            addresses.into_iter().map(|((vni, ip), a)| ((a.id, vni, ip), a)).collect();
        let have = self.have;
        let is_held = |(id, vni, ip): &(ServiceId, Vni, IpAddr)| have.addresses.get(&(*vni, *ip)) == Some(id);
        let part = |key: &(ServiceId, Vni, IpAddr), a: &&'a GatewayAddress| (origin(a), Some(key.2.to_string()));
        let map = ("canal_addresses", self.room.addresses);
        self.fit(&mut by_service, map, is_held, part, |a| &a.service.tenant, &mut maps.left_out);
        let is_held = |id: &ServiceId| have.returns.contains_key(id);
        let map = ("canal_returns", self.room.services);
        self.fit(&mut returns, map, is_held, |_, (_, a)| (origin(a), None), |(_, a)| &a.service.tenant, &mut maps.left_out);
        maps.content.addresses = by_service.into_iter().map(|((id, vni, ip), _)| ((vni, ip), id)).collect();
        maps.content.returns = returns.into_iter().map(|(id, (r, _))| (id, r)).collect();
    }

    /// A table is thousands of bytes, and most of them stay.
    fn tables<'a>(&self, said: &'a [Arc<Resource>], before: &Maps, maps: &mut Maps) {
        let own = said.iter().filter_map(|resource| match &**resource {
            Resource::Table(t) if t.az == *self.az => Some((t.id, (t, resource))),
            _ => None,
        });
        let mut tables: BTreeMap<ServiceId, (&'a BucketTable, &'a Arc<Resource>)> = own.collect();
        let is_held = |id: &ServiceId| self.have.tables.contains_key(id);
        let origin = |_: &ServiceId, (t, _): &(&'a BucketTable, &'a Arc<Resource>)| (Origin::service(Kind::Table, &t.service, &t.az), None);
        let map = ("canal_tables", self.room.services);
        self.fit(&mut tables, map, is_held, origin, |(t, _)| &t.service.tenant, &mut maps.left_out);
        // Both are sorted.
        let mut known = before.made_of.table_of.iter().zip(before.content.tables.values()).peekable();
        let mut known = |id: &ServiceId, resource: &Arc<Resource>| {
            while known.next_if(|((other, _), _)| *other < id).is_some() {}
            let ((other, made_of), table) = known.peek()?;
            (*other == id && Arc::ptr_eq(made_of, resource)).then(|| (*table).clone())
        };
        let table = |(id, (table, resource)): (&ServiceId, &(&BucketTable, &Arc<Resource>))| {
            (*id, known(id, resource).unwrap_or_else(|| Arc::new(Table::of(table))))
        };
        maps.content.tables = tables.iter().map(table).collect();
        maps.made_of.table_of = tables.into_iter().map(|(id, (_, resource))| (id, resource.clone())).collect();
    }

    fn nodes<'a>(&self, said: impl Iterator<Item = &'a Node>, maps: &mut Maps) {
        let mut prefixes: BTreeMap<(Vni, IpNet), &Node> = BTreeMap::new();
        let mut nodes: BTreeMap<(Vni, Ipv4Addr), &Node> = BTreeMap::new();
        for n in in_order(said, |n| (&n.tenant, &n.name)) {
            let Some(vni) = self.vni(&n.tenant, "canal_nodes", || Origin::node(n), &mut maps.left_out) else { continue };
            nodes.insert((vni, n.underlay), n);
            for net in n.pod_cidrs.iter().map(IpNet::trunc) {
                if let Err(by) = claim(&mut prefixes, (vni, net), n)
                    && by.name != n.name
                {
                    let reason = Reason::Taken(format!("{}/{}", by.tenant, by.name));
                    maps.left_out.insert(Origin::node(n).left_out("canal_prefixes", Some(net.to_string()), reason));
                }
            }
        }
        let part = |key: &(Vni, IpNet), n: &&'a Node| (Origin::node(n), Some(key.1.to_string()));
        let (have, map) = (self.have, ("canal_prefixes", self.room.prefixes));
        self.fit(&mut prefixes, map, |key| have.prefixes.contains_key(key), part, |n| &n.tenant, &mut maps.left_out);
        let map = ("canal_nodes", self.room.nodes);
        self.fit(&mut nodes, map, |key| have.nodes.contains(key), |_, n| (Origin::node(n), None), |n| &n.tenant, &mut maps.left_out);
        maps.content.prefixes = prefixes.into_iter().map(|(k, n)| (k, Via { node: n.underlay, mac: n.mac })).collect();
        maps.content.nodes = nodes.into_keys().collect();
    }

    /// Numbers end at the array's last index, so there is always room.
    fn replicas<'a>(&self, said: impl Iterator<Item = &'a Replica>, maps: &mut Maps) {
        let mut members: BTreeMap<ReplicaNumber, &Replica> = BTreeMap::new();
        for r in in_order(said, |r| &r.name) {
            if let Err(by) = claim(&mut members, r.number, r) {
                let (reason, resource) = (Reason::Taken(by.name.to_string()), Some((Kind::Replica, r.name.to_string())));
                maps.left_out.insert(LeftOut { map: "canal_replicas", name: r.name.to_string(), reason, tenant: None, resource });
            }
        }
        maps.content.replicas = members.iter().map(|(n, r)| (*n, Slot { address: r.underlay, up: r.up })).collect();
        let member = |r: &Replica| Member { name: r.name.clone(), address: r.underlay, own: r.az == *self.az, up: r.up };
        maps.members = members.into_iter().map(|(n, r)| (n, member(r))).collect();
    }

    fn hosts(&self, said: &BTreeSet<Ipv4Addr>, own: Ipv4Addr, maps: &mut Maps) {
        let mut hosts: BTreeMap<Ipv4Addr, u16> = said.iter().chain([&own]).map(|h| (*h, 0)).collect();
        // The smaller number wins where two replicas claim one address.
        hosts.extend(maps.members.iter().rev().map(|(n, m)| (m.address, n.get())));
        // The tier's own hosts: a map that no tenant's entries are in.
        let held = |host: &Ipv4Addr| self.have.hosts.contains_key(host);
        let demands: Vec<_> = hosts.keys().map(|host| MapDemand { tenant: (), key: *host, is_held: held(host) }).collect();
        for host in decide_omitted(self.room.hosts, &demands, |()| usize::MAX).into_keys() {
            hosts.remove(&host);
            let reason = Reason::Full(self.room.hosts);
            maps.left_out.insert(LeftOut { map: "canal_hosts", name: host.to_string(), reason, tenant: None, resource: None });
        }
        maps.content.hosts = hosts;
    }
}

impl Table {
    fn of(t: &BucketTable) -> Self {
        let mut chains = [[0; CHAIN]; BUCKETS];
        for (row, chain) in chains.iter_mut().zip(&t.chains) {
            for (place, number) in row.iter_mut().zip(chain) {
                *place = number.get();
            }
        }
        Self { vni: t.vni, version: t.version, chains }
    }
}

/// So that of two that claim one place always the same gets it.
fn in_order<'a, T, K: Ord + 'a>(said: impl Iterator<Item = &'a T>, by: impl Fn(&'a T) -> K) -> Vec<&'a T> {
    let mut said: Vec<&T> = said.collect();
    said.sort_by_key(|t| by(t));
    said
}

/// Takes a place, or tells who has it.
fn claim<'a, K: Ord, T>(places: &mut BTreeMap<K, &'a T>, key: K, value: &'a T) -> Result<(), &'a T> {
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

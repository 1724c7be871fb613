//! From all that the controller said to what the kernel's maps should hold. Pure: the same words in any order give the same maps, and
//! what does not fit is left out by name. Nothing is written here.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use canal_model::ids::{AzName, ReplicaName, ReplicaNumber, ServiceId, TenantName, Vni};
use canal_model::program::{BUCKETS, BucketTable, CHAIN, GatewayAddress, Node, Replica, Resource};
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
    /// The map has no room for it.
    Full(usize),
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
}

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { map, name, reason } = self;
        match reason {
            Reason::Full(most) => write!(f, "{name} does not fit {map}, which holds {most}; give another edge or AZ a part of the tenants"),
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

/// The maps of the edge of `az` at `address`. `before` are those of the same edge that were decided last, or none: whatever they are, the
/// result is the same.
pub fn decide_maps(told: &Told, az: &AzName, address: Ipv4Addr, room: &Room, before: &Maps) -> Maps {
    let (said, old) = (MadeOf::of(told), &before.made_of);
    let mut maps = Maps::default();
    let vnis = said.tenants.iter().filter_map(|r| if let Resource::Tenant(t) = &**r { Some((&t.name, t.vni)) } else { None });
    let by = By { vnis: vnis.collect(), az, room };
    let same_tenants = is_same(&said.tenants, &old.tenants);
    if same_tenants && is_same(&said.addresses, &old.addresses) {
        maps.content.addresses = before.content.addresses.clone();
        maps.content.returns = before.content.returns.clone();
        maps.keep_left_out(before, &["canal_addresses", "canal_returns"]);
    } else {
        by.services(said.addresses.iter().filter_map(|r| if let Resource::Address(a) = &**r { Some(a) } else { None }), &mut maps);
    }
    if is_same(&said.tables, &old.tables) {
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
    fn keep_left_out(&mut self, before: &Maps, of: &[&'static str]) {
        self.left_out.extend(before.left_out.iter().filter(|left_out| of.contains(&left_out.map)).cloned());
    }
}

/// What all parts go by.
struct By<'a> {
    vnis: BTreeMap<&'a TenantName, Vni>,
    az: &'a AzName,
    room: &'a Room,
}

impl By<'_> {
    fn vni(&self, tenant: &TenantName, map: &'static str, name: &dyn Fn() -> String, out: &mut BTreeSet<LeftOut>) -> Option<Vni> {
        let vni = self.vnis.get(tenant).copied();
        if vni.is_none() {
            out.insert(LeftOut { map, name: name(), reason: Reason::Tenant });
        }
        vni
    }

    fn services<'a>(&self, said: impl Iterator<Item = &'a GatewayAddress>, maps: &mut Maps) {
        let mut addresses: BTreeMap<(Vni, IpAddr), &GatewayAddress> = BTreeMap::new();
        let mut returns: BTreeMap<ServiceId, (Return, &GatewayAddress)> = BTreeMap::new();
        let name = |a: &GatewayAddress, ip: IpAddr| format!("{}@{} {ip}", a.service, a.az);
        for a in in_order(said.filter(|a| a.az == *self.az), |a| a.id) {
            let whole = || format!("{}@{}", a.service, a.az);
            let Some(vni) = self.vni(&a.service.tenant, "canal_addresses", &whole, &mut maps.left_out) else { continue };
            for ip in a.addresses.iter().map(IpAddr::to_canonical) {
                if let Err(by) = claim(&mut addresses, (vni, ip), a) {
                    let reason = Reason::Taken(name(by, ip));
                    maps.left_out.insert(LeftOut { map: "canal_addresses", name: name(a, ip), reason });
                }
            }
            let v4 = a.addresses.iter().find_map(|ip| if let IpAddr::V4(v4) = ip.to_canonical() { Some(v4) } else { None });
            let v6 = a.addresses.iter().find_map(|ip| if let IpAddr::V6(v6) = ip.to_canonical() { Some(v6) } else { None });
            returns.insert(a.id, (Return { vni, v4, v6 }, a));
        }
        cut(&mut addresses, self.room.addresses, "canal_addresses", |k, a| name(a, k.1), &mut maps.left_out);
        cut(&mut returns, self.room.services, "canal_returns", |_, (_, a)| format!("{}@{}", a.service, a.az), &mut maps.left_out);
        maps.content.addresses = addresses.into_iter().map(|(k, a)| (k, a.id)).collect();
        maps.content.returns = returns.into_iter().map(|(id, (r, _))| (id, r)).collect();
    }

    /// A table is thousands of bytes, and most of them stay.
    fn tables(&self, said: &[Arc<Resource>], before: &Maps, maps: &mut Maps) {
        let own = said.iter().filter_map(|resource| match &**resource {
            Resource::Table(t) if t.az == *self.az => Some((t.id, (t, resource))),
            _ => None,
        });
        let mut tables: BTreeMap<ServiceId, (&BucketTable, &Arc<Resource>)> = own.collect();
        cut(&mut tables, self.room.services, "canal_tables", |_, (t, _)| format!("{}@{}", t.service, t.az), &mut maps.left_out);
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
        let name = |n: &Node| format!("{}/{}", n.tenant, n.name);
        for n in in_order(said, |n| (&n.tenant, &n.name)) {
            let Some(vni) = self.vni(&n.tenant, "canal_nodes", &|| name(n), &mut maps.left_out) else { continue };
            nodes.insert((vni, n.underlay), n);
            for net in n.pod_cidrs.iter().map(IpNet::trunc) {
                if let Err(by) = claim(&mut prefixes, (vni, net), n)
                    && by.name != n.name
                {
                    let reason = Reason::Taken(name(by));
                    maps.left_out.insert(LeftOut { map: "canal_prefixes", name: format!("{} {net}", name(n)), reason });
                }
            }
        }
        cut(&mut prefixes, self.room.prefixes, "canal_prefixes", |k, n| format!("{} {}", name(n), k.1), &mut maps.left_out);
        cut(&mut nodes, self.room.nodes, "canal_nodes", |_, n| name(n), &mut maps.left_out);
        maps.content.prefixes = prefixes.into_iter().map(|(k, n)| (k, Via { node: n.underlay, mac: n.mac })).collect();
        maps.content.nodes = nodes.into_keys().collect();
    }

    /// Numbers end at the array's last index, so there is always room.
    fn replicas<'a>(&self, said: impl Iterator<Item = &'a Replica>, maps: &mut Maps) {
        let mut members: BTreeMap<ReplicaNumber, &Replica> = BTreeMap::new();
        for r in in_order(said, |r| &r.name) {
            if let Err(by) = claim(&mut members, r.number, r) {
                let reason = Reason::Taken(by.name.to_string());
                maps.left_out.insert(LeftOut { map: "canal_replicas", name: r.name.to_string(), reason });
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
        cut(&mut hosts, self.room.hosts, "canal_hosts", |h, _| h.to_string(), &mut maps.left_out);
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

/// Leaves out the elements with the largest keys until the rest fit.
fn cut<K: Ord, V>(all: &mut BTreeMap<K, V>, most: usize, map: &'static str, name: impl Fn(&K, &V) -> String, out: &mut BTreeSet<LeftOut>) {
    while all.len() > most
        && let Some((k, v)) = all.pop_last()
    {
        out.insert(LeftOut { map, name: name(&k, &v), reason: Reason::Full(most) });
    }
}

/// Whether an update may be taken, by what it would newly leave out for want of room. `Err` is the nack.
pub fn decide_fit(before: &BTreeSet<LeftOut>, after: &BTreeSet<LeftOut>) -> Result<(), String> {
    const TOLD: usize = 8;
    let mut fresh = after.difference(before).filter(|l| matches!(l.reason, Reason::Full(_)));
    let told: Vec<String> = fresh.by_ref().take(TOLD).map(ToString::to_string).collect();
    match (told.is_empty(), fresh.count()) {
        (true, _) => Ok(()),
        (false, 0) => Err(told.join("; ")),
        (false, more) => Err(format!("{}; and {more} more", told.join("; "))),
    }
}

#[cfg(test)]
mod tests;

//! The edge's maps and program in the kernel, converted to the types of this crate. It decides
//! nothing.

use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::Arc;

use canal_abi::tier::{
    ABI, Address, AddressKey, NodeKey, Prefix, PrefixKey, Replica, ReplicaState, Table as Chains,
    Tunnels, address_be, address_of_be,
};
use canal_model::ids::{ReplicaNumber, ServiceId, Vni};
use canal_offload::OffloadError;
use canal_offload::edge::{EdgeProgram, EdgeProgramSettings};
use canal_offload::entries::Entries;
use canal_wire::tier::TUNNEL_PORT;
use ipnet::IpNet;

use crate::config::EdgeDeviceConfig;
use crate::desired_maps::{
    ChainTable, EdgeMapContent, MapCapacity, NodeNextHop, ReplicaEntry, ReturnEntry,
};
use crate::map_reconciler::MapStore;
use crate::map_writes::MapWrite;

const MAPS: [&str; 8] = [
    "canal_replicas",
    "canal_hosts",
    "canal_tables",
    "canal_returns",
    "canal_prefixes",
    "canal_nodes",
    "canal_addresses",
    "canal_tunnels",
];

/// The loaded program with its maps.
pub struct KernelMaps {
    edge: EdgeProgram,
    device: EdgeDeviceConfig,
    live: bool,
}

impl KernelMaps {
    /// Loads the program, and opens or creates the maps. The program of an earlier process stays on
    /// the device until [`KernelMaps::attach`].
    ///
    /// # Errors
    /// Returns the [`OffloadError`] if the kernel rejects the program or its maps.
    pub fn load(place: &EdgeDeviceConfig) -> Result<Self, OffloadError> {
        Ok(Self {
            edge: load(place)?,
            device: place.clone(),
            live: false,
        })
    }

    /// Returns true if the maps were adopted from an earlier process, with their content.
    pub fn is_adopted(&self) -> bool {
        self.edge.is_adopted()
    }

    /// Returns true if program and maps stay together when this process ends.
    pub fn is_durable(&self) -> bool {
        self.edge.is_durable()
    }

    /// Attaches the program to the device in place of an earlier one.
    ///
    /// # Errors
    /// Returns the [`OffloadError`] if the program cannot be attached.
    pub fn attach(&mut self) -> Result<(), OffloadError> {
        self.edge.go_live(None, &self.device.device)?;
        self.live = true;
        Ok(())
    }

    /// Returns true if this process has attached the program by [`KernelMaps::attach`].
    pub fn is_live(&self) -> bool {
        self.live
    }

    /// Returns true if this program is the one on the device.
    pub fn is_attached(&self) -> bool {
        self.edge.is_attached()
    }

    /// Returns true if the pins exist, so that the next process would find the maps.
    pub fn is_pinned(&self) -> bool {
        // This repeats the choice of path that canal-offload makes.
        MAPS.iter().all(|map| self.pins().join(map).exists())
    }

    fn pins(&self) -> PathBuf {
        self.device.pin_dir.join(format!("edge-v{ABI}"))
    }

    /// Loads the program again, with new maps for those whose pins are gone. It does not attach it.
    ///
    /// # Errors
    /// Returns the [`OffloadError`] if the kernel rejects the program or its maps.
    pub fn reload(&mut self) -> Result<(), OffloadError> {
        self.edge = load(&self.device)?;
        self.live = false;
        Ok(())
    }

    /// Returns the capacities of the maps.
    pub fn capacity(&self) -> MapCapacity {
        let most = |n: u32| n as usize;
        let e = &self.edge;
        MapCapacity {
            addresses: most(e.addresses().capacity()),
            services: most(e.tables().capacity().min(e.returns().capacity())),
            prefixes: most(e.prefixes().capacity()),
            nodes: most(e.nodes().capacity()),
            hosts: most(e.hosts().capacity()),
        }
    }

    /// Reads the program's counters.
    ///
    /// # Errors
    /// Returns the [`OffloadError`] if the counters cannot be read.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        self.edge.counts()
    }

    /// Returns the number of instructions that the verifier processed.
    ///
    /// # Errors
    /// Returns the [`OffloadError`] if the kernel does not report it.
    pub fn verified_instructions(&self) -> Result<u32, OffloadError> {
        self.edge.verified_insns()
    }
}

fn load(place: &EdgeDeviceConfig) -> Result<EdgeProgram, OffloadError> {
    let settings = EdgeProgramSettings {
        address: place.address,
        tunnels: place.tunnels,
        aggregate: place.aggregate,
        tunnel_port: TUNNEL_PORT,
        mtu: place.mtu,
    };
    EdgeProgram::load(&settings, Some(&place.pin_dir))
}

/// Removes programs and pins: the edge then forwards nothing and guards no interface. It succeeds
/// if there are none.
///
/// # Errors
/// Returns the [`OffloadError`] if a program or pin cannot be removed.
pub fn detach(place: &EdgeDeviceConfig) -> Result<(), OffloadError> {
    canal_offload::interface_guard::remove(None, &place.pin_dir)?;
    canal_offload::edge::remove(None, &place.device, Some(&place.pin_dir))
}

fn set<K, V>(map: &Entries<K, V>, key: &K, value: Option<V>) -> Result<(), String>
where
    K: canal_abi::Plain + Eq + std::hash::Hash,
    V: canal_abi::Plain + PartialEq,
{
    match value {
        Some(v) => map.put(key, &v),
        None => map.remove(key),
    }
    .map_err(|e| e.to_string())
}

/// Reads a whole map. Elements that this agent cannot have written are removed.
fn get<K, V, T>(
    map: &Entries<K, V>,
    understand: impl Fn(&K, &V) -> Option<T>,
) -> Result<Vec<T>, String>
where
    K: canal_abi::Plain + Eq + std::hash::Hash,
    V: canal_abi::Plain + PartialEq,
{
    let mut all = Vec::new();
    for (k, v) in map.all().map_err(|e| e.to_string())? {
        match understand(&k, &v) {
            Some(t) => all.push(t),
            None => {
                tracing::warn!(
                    map = map.name(),
                    "edge: removed an invalid element of a map"
                );
                map.remove(&k).map_err(|e| e.to_string())?;
            }
        }
    }
    Ok(all)
}

fn prefix_key((vni, net): &(Vni, IpNet)) -> PrefixKey {
    PrefixKey::new(vni.get(), net.addr(), net.prefix_len())
}

fn chains(t: &ChainTable) -> Chains {
    Chains {
        vni: t.vni.get(),
        version: t.version,
        chain: t.chains,
    }
}

impl MapStore for KernelMaps {
    fn write(&mut self, step: &MapWrite) -> Result<(), String> {
        let e = &self.edge;
        match step {
            MapWrite::Replica(n, v) => set(
                e.replicas(),
                &u32::from(*n),
                v.map(|s| Replica::new(s.address, s.up)),
            ),
            MapWrite::Host(h, v) => set(e.hosts(), &address_be(*h), v.map(u32::from)),
            MapWrite::Table(id, v) => set(e.tables(), &id.get(), v.as_deref().map(chains)),
            MapWrite::Return(id, v) => set(
                e.returns(),
                &id.get(),
                v.map(|r| canal_abi::tier::Return::new(r.vni.get(), r.v4, r.v6)),
            ),
            MapWrite::Prefix(k, v) => set(
                e.prefixes(),
                &prefix_key(k),
                v.map(|v| Prefix::new(v.node, v.mac)),
            ),
            MapWrite::Node((vni, ip), v) => {
                set(e.nodes(), &NodeKey::new(vni.get(), *ip), v.map(|()| 1))
            }
            MapWrite::Address((vni, ip), v) => set(
                e.addresses(),
                &AddressKey::new(vni.get(), *ip),
                v.map(|id| Address { service: id.get() }),
            ),
            MapWrite::Tunnels(ip, v) => set(
                e.tunnels(),
                &address_be(*ip),
                v.as_ref().and_then(|ports| Tunnels::new(ports)),
            ),
        }
    }

    fn read(&mut self) -> Result<EdgeMapContent, String> {
        let e = &self.edge;
        Ok(EdgeMapContent {
            addresses: get(e.addresses(), |k, v| {
                Some(((vni(k.vni)?, ip(k.address)), id(v.service)?))
            })?
            .into_iter()
            .collect(),
            returns: get(e.returns(), |k, v| Some((id(*k)?, read_return(v)?)))?
                .into_iter()
                .collect(),
            prefixes: get(e.prefixes(), |k, v| {
                let via = NodeNextHop {
                    node: address_of_be(v.node_be),
                    mac: v.mac,
                };
                Some(((vni(u32::from_be(k.vni_be))?, net(k)?), via))
            })?
            .into_iter()
            .collect(),
            nodes: get(e.nodes(), |k, v| {
                // The map is a set: this agent writes no other value than 1.
                (*v == 1).then_some(((vni(k.vni)?, address_of_be(k.address_be)), ()))
            })?
            .into_iter()
            .collect(),
            tables: get(e.tables(), |k, v| {
                let table = ChainTable {
                    vni: vni(v.vni)?,
                    version: v.version,
                    chains: v.chain,
                };
                Some((id(*k)?, Arc::new(table)))
            })?
            .into_iter()
            .collect(),
            replicas: get(e.replicas(), |k, v| {
                Some((ReplicaNumber::new(*k).ok()?, slot(v)?))
            })?
            .into_iter()
            .collect(),
            hosts: get(e.hosts(), |k, v| {
                Some((address_of_be(*k), u16::try_from(*v).ok()?))
            })?
            .into_iter()
            .collect(),
            tunnels: get(e.tunnels(), |k, v| {
                // An element without ports would leave the edge no tunnel to choose, so this agent
                // never writes one.
                (!v.used().is_empty()).then(|| (address_of_be(*k), Arc::new(v.used().to_vec())))
            })?
            .into_iter()
            .collect(),
        })
    }
}

fn vni(n: u32) -> Option<Vni> {
    Vni::new(n).ok()
}

fn id(n: u32) -> Option<ServiceId> {
    ServiceId::new(n).ok()
}

fn ip(bytes: [u8; 16]) -> IpAddr {
    IpAddr::from(Ipv6Addr::from(bytes)).to_canonical()
}

fn net(k: &PrefixKey) -> Option<IpNet> {
    let bits = k.prefixlen.checked_sub(32)?;
    let (address, bits) = match ip(k.address) {
        IpAddr::V4(v4) if bits >= 96 => (IpAddr::V4(v4), bits - 96),
        _ => (IpAddr::V6(k.address.into()), bits),
    };
    IpNet::new(address, u8::try_from(bits).ok()?).ok()
}

fn slot(r: &Replica) -> Option<ReplicaEntry> {
    let up = match r.state {
        s if s == ReplicaState::CANAL_REPLICA_UP as u32 => true,
        s if s == ReplicaState::CANAL_REPLICA_DOWN as u32 => false,
        _ => return None,
    };
    Some(ReplicaEntry {
        address: address_of_be(r.address_be),
        up,
    })
}

fn read_return(r: &canal_abi::tier::Return) -> Option<ReturnEntry> {
    let v4 = match ip(r.address4) {
        IpAddr::V4(v4) => Some(v4),
        IpAddr::V6(v6) if v6.is_unspecified() => None,
        IpAddr::V6(_) => return None,
    };
    let v6 = Ipv6Addr::from(r.address6);
    Some(ReturnEntry {
        vni: vni(r.vni)?,
        v4,
        v6: (!v6.is_unspecified()).then_some(v6),
    })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn keys_and_values_read_back_as_they_were_written() {
        for text in [
            "10.1.2.0/24",
            "10.1.2.3/32",
            "0.0.0.0/0",
            "fd00::/64",
            "fd00::1/128",
            "::/0",
        ] {
            let net_written: IpNet = text.parse().unwrap();
            assert_eq!(
                net(&prefix_key(&(Vni::new(7).unwrap(), net_written))),
                Some(net_written),
                "{text}"
            );
        }
        assert_eq!(
            // A key begins with 32 bits of VNI, so a shorter one is not an edge's.
            net(&PrefixKey {
                prefixlen: 31,
                ..PrefixKey::default()
            }),
            None
        );
        for (v4, v6) in [
            (Some(Ipv4Addr::new(10, 0, 0, 1)), None),
            (None, Some("fd00::1".parse().unwrap())),
            (None, None),
        ] {
            let r = ReturnEntry {
                vni: Vni::new(7).unwrap(),
                v4,
                v6,
            };
            assert_eq!(
                read_return(&canal_abi::tier::Return::new(7, v4, v6)),
                Some(r)
            );
        }
        for up in [true, false] {
            let address = Ipv4Addr::new(250, 1, 0, 3);
            assert_eq!(
                slot(&Replica::new(address, up)),
                Some(ReplicaEntry { address, up })
            );
        }
        assert_eq!(
            slot(&Replica::default()),
            None,
            "an empty slot is no replica"
        );
    }
}

//! Rust view of `bpf/abi/interface_guard.h`: keys and values of the interface guard's maps, and the
//! names of its counters. Loads no BPF program.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

#[allow(
    non_camel_case_types,
    non_upper_case_globals,
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    reason = "generated from the header"
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/interface_guard.rs"));
}

pub use generated::{
    canal_guarded_interface as GuardedInterface,
    canal_interface_address_key as InterfaceAddressKey,
    canal_interface_guard_count as InterfaceGuardCount,
};

/// Containers with an interface of their own on one host.
pub const GUARDED_INTERFACES_MAX: u32 = generated::CANAL_GUARDED_INTERFACES_MAX;
/// Addresses of all guarded interfaces of one host together.
pub const INTERFACE_ADDRESSES_MAX: u32 = generated::CANAL_INTERFACE_ADDRESSES_MAX;

crate::plain::plain_types! {
    GuardedInterface = canal_guarded_interface { vni, mac, zero, refused, last_address },
    InterfaceAddressKey = canal_interface_address_key { interface, address },
}

impl InterfaceAddressKey {
    /// Returns the key of an address at the interface with this index.
    pub fn new(interface: u32, address: IpAddr) -> Self {
        let address = match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        Self {
            interface,
            address: address.octets(),
        }
    }
}

impl GuardedInterface {
    /// Returns the source address of the last frame that was refused because of its source address;
    /// `None` if there was no such frame.
    pub fn last_refused(&self) -> Option<IpAddr> {
        let last = Ipv6Addr::from(self.last_address).to_canonical();
        (last != IpAddr::V6(Ipv6Addr::UNSPECIFIED) && last != IpAddr::V4(Ipv4Addr::UNSPECIFIED))
            .then_some(last)
    }
}

/// Every counter, in the order of its map, with its name in metrics.
pub const INTERFACE_GUARD_COUNTS: [(InterfaceGuardCount, &str);
    InterfaceGuardCount::CANAL_INTERFACE_GUARD_COUNTS as usize] = [
    (
        InterfaceGuardCount::CANAL_INTERFACE_GUARD_PASSED_V4,
        "passed_v4",
    ),
    (
        InterfaceGuardCount::CANAL_INTERFACE_GUARD_PASSED_V6,
        "passed_v6",
    ),
    (
        InterfaceGuardCount::CANAL_INTERFACE_GUARD_PASSED_ARP,
        "passed_arp",
    ),
    (
        InterfaceGuardCount::CANAL_INTERFACE_GUARD_PASSED_DISCOVERY,
        "passed_discovery",
    ),
    (
        InterfaceGuardCount::CANAL_INTERFACE_GUARD_DROP_UNBOUND,
        "drop_unbound",
    ),
    (
        InterfaceGuardCount::CANAL_INTERFACE_GUARD_DROP_MAC,
        "drop_mac",
    ),
    (
        InterfaceGuardCount::CANAL_INTERFACE_GUARD_DROP_ADDRESS,
        "drop_address",
    ),
    (
        InterfaceGuardCount::CANAL_INTERFACE_GUARD_DROP_ARP,
        "drop_arp",
    ),
    (
        InterfaceGuardCount::CANAL_INTERFACE_GUARD_DROP_DISCOVERY,
        "drop_discovery",
    ),
    (
        InterfaceGuardCount::CANAL_INTERFACE_GUARD_DROP_PROTOCOL,
        "drop_protocol",
    ),
    (
        InterfaceGuardCount::CANAL_INTERFACE_GUARD_DROP_MALFORMED,
        "drop_malformed",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_in_the_order_of_the_map_and_named_as_in_the_header() {
        for (place, (count, name)) in INTERFACE_GUARD_COUNTS.into_iter().enumerate() {
            assert_eq!(count as usize, place, "{name}");
            assert_eq!(
                format!("{count:?}"),
                format!("CANAL_INTERFACE_GUARD_{}", name.to_ascii_uppercase())
            );
        }
    }
}

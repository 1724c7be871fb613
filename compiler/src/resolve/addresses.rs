//! Ownership of addresses inside a tenant. Gateways take precedence over services, services over
//! pods, and older objects over newer ones.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use canal_model::policy::ObjectKey;

/// Claimed addresses with their owners.
#[derive(Default)]
pub(crate) struct AddressOwners {
    owners: HashMap<IpAddr, ObjectKey>,
}

impl AddressOwners {
    /// Assigns `address` to `owner`. The error is the problem, without a full stop.
    pub(crate) fn claim(&mut self, address: IpAddr, owner: &ObjectKey) -> Result<(), String> {
        if let Some(reason) = reserved(address) {
            return Err(format!("{address} {reason}"));
        }
        match self.owners.get(&address) {
            Some(other) if other == owner => Ok(()),
            Some(other) => Err(format!("{address} is already the address of {other}")),
            None => {
                self.owners.insert(address, owner.clone());
                Ok(())
            }
        }
    }
}

/// Returns the reason why no tenant may use the address.
pub(crate) fn reserved(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(v4) if v4.octets()[0] >= 240 => {
            Some("is in 240.0.0.0/4, which is reserved for the provider")
        }
        IpAddr::V4(v4)
            if v4.octets()[0] == 0
                || v4.is_loopback()
                || v4.is_multicast()
                || v4.is_link_local() =>
        {
            Some("is not an address that a host can have on a network")
        }
        IpAddr::V6(v6)
            if v6.is_unspecified()
                || v6.is_loopback()
                || v6.is_multicast()
                || v6.is_unicast_link_local() =>
        {
            Some("is not an address that a host can have on a network")
        }
        IpAddr::V6(v6) if is_tiers(v6) => {
            Some("is in fdca:a1::/48, which is reserved for the provider")
        }
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => {
            Some("is an IPv4-mapped IPv6 address; write it as IPv4")
        }
        IpAddr::V4(_) | IpAddr::V6(_) => None,
    }
}

/// Returns whether the address is one of the tier's own addresses outside 240.0.0.0/4.
fn is_tiers(address: Ipv6Addr) -> bool {
    canal_model::tier::reserved()
        .iter()
        .any(|range| range.contains(&IpAddr::V6(address)))
}

/// Returns the reason why no tenant may use the range: a reserved address at one of its ends, or a
/// reserved range inside.
pub(crate) fn reserved_range(net: &ipnet::IpNet) -> Option<&'static str> {
    let inside = [
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V4(Ipv4Addr::new(224, 0, 0, 1)),
        IpAddr::V4(Ipv4Addr::new(240, 0, 0, 1)),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::new(0xfdca, 0xa1, 0, 0, 0, 0, 0, 1)),
    ];
    let ends = reserved(net.network()).or_else(|| reserved(net.broadcast()));
    ends.or_else(|| {
        inside
            .iter()
            .any(|address| net.contains(address))
            .then_some("contains addresses that no tenant may use")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_cannot_take_reserved_addresses() {
        // Private, shared and documentation addresses are fine; those of no single host and the
        // tier's are not.
        for (address, fine) in [
            ("10.0.0.1", true),
            ("100.64.0.1", true),
            ("fd00::1", true),
            ("2001:db8::1", true),
            ("250.1.0.1", false),
            ("240.0.0.7", false),
            ("255.255.255.255", false),
            ("127.0.0.1", false),
            ("0.0.0.0", false),
            ("224.0.0.1", false),
            ("169.254.1.1", false),
            ("::", false),
            ("::1", false),
            ("fe80::1", false),
            ("ff02::1", false),
            // An IPv4 address must be written as one.
            ("::ffff:10.0.0.1", false),
            // fdca:a1::/48 is Canal's own range, and fdca:a2::/48 is not.
            ("fdca:a1:0:240::7", false),
            ("fdca:a2::7", true),
        ] {
            assert_eq!(
                reserved(address.parse().unwrap()).is_none(),
                fine,
                "{address}"
            );
        }
        for (net, fine) in [
            ("10.0.0.0/8", true),
            ("0.0.0.0/0", false),
            // This range contains 127.0.0.0/8.
            ("126.0.0.0/7", false),
            ("250.0.0.0/8", false),
            // A range may not even contain a reserved address, as this one contains 240.0.0.0/4.
            ("128.0.0.0/1", false),
            ("fd00::/16", true),
            // It contains fdca:a1::/48.
            ("fd00::/8", false),
            ("fdca:a1:0:1::/64", false),
            ("::/0", false),
        ] {
            assert_eq!(
                reserved_range(&net.parse().unwrap()).is_none(),
                fine,
                "{net}"
            );
        }
    }
}

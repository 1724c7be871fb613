//! The cloud tier's addresses and its bucket function, on which the edge, the redirector, the
//! gateway and the controller must agree. `bpf/abi/tier.h` defines the same in C;
//! `dataplane/offload` tests that both give the same results. Bucket tables are not here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use canal_model::ids::ServiceId;
use canal_model::program::BUCKETS;
pub use canal_model::tier::{TIER_SERVICE, TIER_VNI, reserved};

/// Port of the tenant's DNS at the tier's own service.
pub const DNS_PORT: u16 = 53;
/// First UDP source port of aggregated tunnels.
/// With the 25,000 that an edge's `--tunnels` allows at most, the last port is 64,999. Otherwise
/// the number is arbitrary.
pub const TUNNEL_PORT: u16 = 40_000;

/// Maximum number of source ports, and so tunnels, from an edge to one replica.
/// These are 10 for each of 64 cores.
pub const TUNNELS_MAX: usize = 640;
/// Maximum number of concurrent session queries of all operators.
/// Each makes every replica search its sockets, for up to 2 s. Nobody measured this value.
pub const SESSION_QUERIES_MAX: usize = 16;

const SERVICE_NET4: u32 = 0xF000_0000;
const SERVICE_NET6: u128 = 0xFDCA_00A1_0000_0240 << 64;
const TIER_NET6: u128 = 0xFDCA_00A1_0000_0250 << 64;

/// Returns the IPv4 address of a service inside the tier.
pub fn service_address4(id: ServiceId) -> Ipv4Addr {
    Ipv4Addr::from_bits(SERVICE_NET4 | id.get())
}

/// Returns the IPv6 address of a service inside the tier.
pub fn service_address6(id: ServiceId) -> Ipv6Addr {
    Ipv6Addr::from_bits(SERVICE_NET6 | u128::from(id.get()))
}

/// Returns the service that has this address inside the tier. IPv4-mapped addresses count as IPv4.
pub fn service_of(address: IpAddr) -> Option<ServiceId> {
    let number = match address.to_canonical() {
        IpAddr::V4(v4) if v4.octets()[0] == 240 => v4.to_bits() & 0xff_ffff,
        IpAddr::V6(v6) if v6.to_bits() >> 24 == SERVICE_NET6 >> 24 => {
            v6.to_bits() as u32 & 0xff_ffff
        }
        _ => return None,
    };
    ServiceId::new(number).ok()
}

/// Returns the IPv6 address from which the replica with this underlay address connects to
/// endpoints.
pub fn replica_address6(underlay: Ipv4Addr) -> Ipv6Addr {
    Ipv6Addr::from_bits(TIER_NET6 | u128::from(underlay.to_bits()))
}

/// Returns the bucket of a session: MurmurHash3 (32 bits) over the client's address (IPv4-mapped),
/// the two ports and the service id, modulo [`BUCKETS`].
pub fn bucket(client: SocketAddr, port: u16, service: ServiceId) -> usize {
    flow_hash(client, port, service) as usize % BUCKETS
}

/// Returns the hash that [`bucket`] reduces. The edge selects the tunnel's source port with its
/// upper half.
pub fn flow_hash(client: SocketAddr, port: u16, service: ServiceId) -> u32 {
    let address = match client.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let word = |at: usize| {
        u32::from_be_bytes([
            address[at],
            address[at + 1],
            address[at + 2],
            address[at + 3],
        ])
    };
    let ports = u32::from(client.port()) << 16 | u32::from(port);
    let mut hash = 0xCA0A_1000;
    for word in [word(0), word(4), word(8), word(12), ports, service.get()] {
        let mixed = word
            .wrapping_mul(0xcc9e_2d51)
            .rotate_left(15)
            .wrapping_mul(0x1b87_3593);
        hash = (hash ^ mixed)
            .rotate_left(13)
            .wrapping_mul(5)
            .wrapping_add(0xe654_6b64);
    }
    // MurmurHash3 finalization; 24 is the number of hashed bytes.
    hash ^= 24;
    hash = (hash ^ hash >> 16).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ hash >> 13).wrapping_mul(0xc2b2_ae35);
    hash ^ hash >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_found_by_its_address_inside_the_tier() {
        let id = ServiceId::new(0x01_0203).unwrap();
        assert_eq!(service_address4(id), Ipv4Addr::new(240, 1, 2, 3));
        assert_eq!(service_address6(id).to_string(), "fdca:a1:0:240::1:203");
        for address in ["240.1.2.3", "::ffff:240.1.2.3", "fdca:a1:0:240::1:203"] {
            assert_eq!(service_of(address.parse().unwrap()), Some(id), "{address}");
        }
        for address in [
            "240.0.0.0",
            "250.1.2.3",
            "10.1.2.3",
            "fdca:a1:0:250::1:203",
            "fdca:a1:0:240:0:1:1:203",
            "fdca:a1:0:240::100:203",
        ] {
            assert_eq!(service_of(address.parse().unwrap()), None, "{address}");
        }
        assert_eq!(
            replica_address6(Ipv4Addr::new(250, 1, 0, 3)).to_string(),
            "fdca:a1:0:250::fa01:3"
        );
    }

    #[test]
    fn buckets_are_even_and_one_for_both_spellings_of_an_address() {
        let id = ServiceId::new(7).unwrap();
        let mut full = [0u32; BUCKETS];
        for port in 1024..33792u16 {
            full[bucket(
                SocketAddr::new("10.1.1.2".parse().unwrap(), port),
                15008,
                id,
            )] += 1;
        }
        assert!(full.iter().all(|n| (180..340).contains(n)), "{full:?}");
        let mapped = bucket("[::ffff:10.1.1.2]:4711".parse().unwrap(), 80, id);
        assert_eq!(bucket("10.1.1.2:4711".parse().unwrap(), 80, id), mapped);
    }
}

//! `bpf/abi/capture.h`: keys and values of the capture maps, their limits, and the names of the verdicts.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

#[allow(non_camel_case_types, non_upper_case_globals, missing_docs, unreachable_pub, clippy::all, reason = "generated from the header")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/capture.rs"));
}

pub use generated::{
    canal_capture_verdict as Verdict, canal_origin as Origin, canal_origin_key as OriginKey, canal_origin_pod as OriginPod,
    canal_socket as CapturedSocket,
};

/// Raised with any change of layout; part of the pin path.
pub const ABI: u32 = generated::CANAL_CAPTURE_ABI;
/// Where captured connections are sent, on loopback in the pod's network namespace.
pub const OUTBOUND_PORT: u16 = generated::CANAL_OUTBOUND_PORT as u16;
/// Captured connections that the proxy has not accepted yet, per node.
pub const ORIGINS_MAX: u32 = generated::CANAL_ORIGINS_MAX;

/// The same of one pod.
pub const ORIGINS_POD_MAX: u32 = generated::CANAL_ORIGINS_POD_MAX;

/// Pods of which waiting connections are counted.
pub const ORIGIN_PODS_MAX: u32 = generated::CANAL_ORIGIN_PODS_MAX;

crate::plain::plain_types! {
    OriginKey = canal_origin_key { netns_cookie, source_ip, source_port_be, zero },
    Origin = canal_origin { destination_ip, destination_port_be, zero, published_ns },
    OriginPod = canal_origin_pod { published, withdrawn },
    CapturedSocket = canal_socket { key, origin },
}

/// Every verdict, in the order of the counter map.
pub const VERDICTS: [Verdict; Verdict::CANAL_CAPTURE_VERDICTS as usize] = [
    Verdict::CANAL_CAPTURE_LEFT_NOT_TCP,
    Verdict::CANAL_CAPTURE_LEFT_LOOPBACK,
    Verdict::CANAL_CAPTURE_LEFT_FAMILY,
    Verdict::CANAL_CAPTURE_TAKEN_V4,
    Verdict::CANAL_CAPTURE_TAKEN_V6,
    Verdict::CANAL_CAPTURE_TAKEN_MAPPED,
    Verdict::CANAL_CAPTURE_REFUSED_STORAGE,
    Verdict::CANAL_CAPTURE_REFUSED_DEVICE,
    Verdict::CANAL_CAPTURE_PUBLISHED,
    Verdict::CANAL_CAPTURE_PUBLISH_FULL,
    Verdict::CANAL_CAPTURE_WITHDRAWN,
    Verdict::CANAL_CAPTURE_PEER_RESTORED,
    Verdict::CANAL_CAPTURE_REFUSED_SHARE,
];

/// The verdict's name as metrics and logs show it: the header's, without prefix, in lower case.
pub fn verdict_name(v: Verdict) -> String {
    format!("{v:?}").trim_start_matches("CANAL_CAPTURE_").to_ascii_lowercase()
}

/// An address in the header's one form: 16 bytes, network order, IPv4 as `::ffff:a.b.c.d`.
pub fn address_bytes(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

impl OriginKey {
    /// The key under which the connection whose client end is `source` was published.
    pub fn new(netns_cookie: u64, source: SocketAddr) -> Self {
        Self { netns_cookie, source_ip: address_bytes(source.ip()), source_port_be: source.port().to_be(), zero: [0; 6] }
    }
}

impl Origin {
    /// Where the application meant to go. A mapped address comes back as IPv4: that is what travels.
    pub fn destination(&self) -> SocketAddr {
        SocketAddr::new(Ipv6Addr::from(self.destination_ip).to_canonical(), u16::from_be(self.destination_port_be))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{from_bytes, to_bytes};

    #[test]
    fn one_key_for_one_client_end_whatever_family_the_socket_is_of() {
        let v4 = OriginKey::new(7, "10.1.2.3:4711".parse().unwrap());
        let mapped = OriginKey::new(7, "[::ffff:10.1.2.3]:4711".parse().unwrap());
        assert_eq!(v4, mapped);
        assert_ne!(v4, OriginKey::new(8, "10.1.2.3:4711".parse().unwrap()), "another namespace");
        assert_ne!(v4, OriginKey::new(7, "10.1.2.4:4711".parse().unwrap()), "another source address with the same port");
        assert_eq!(to_bytes(&v4)[24..26], 4711u16.to_be_bytes(), "network order");
    }

    #[test]
    fn destinations_come_back_as_they_travel() {
        for (dialled, seen) in
            [("10.96.0.1:80", "10.96.0.1:80"), ("[fd00::1]:80", "[fd00::1]:80"), ("[::ffff:10.96.0.1]:80", "10.96.0.1:80")]
        {
            let d: SocketAddr = dialled.parse().unwrap();
            let o = Origin { destination_ip: address_bytes(d.ip()), destination_port_be: d.port().to_be(), ..Origin::default() };
            let back: Origin = from_bytes(to_bytes(&o)).unwrap();
            assert_eq!(back.destination(), seen.parse().unwrap());
        }
        assert!(from_bytes::<Origin>(&[0; 31]).is_none());
    }

    #[test]
    fn verdicts_are_complete_and_in_the_order_of_the_map() {
        for (i, v) in VERDICTS.into_iter().enumerate() {
            assert_eq!(v as usize, i, "{v:?}");
        }
        assert_eq!(verdict_name(Verdict::CANAL_CAPTURE_TAKEN_V4), "taken_v4");
    }
}

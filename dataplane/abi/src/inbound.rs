//! Rust view of `bpf/abi/inbound.h`: ports, listener indices, and the names of the verdicts on
//! connections into a pod. Loads no BPF program.

#[allow(
    non_camel_case_types,
    non_upper_case_globals,
    missing_docs,
    unreachable_pub,
    clippy::all,
    reason = "generated from the header"
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/inbound.rs"));
}

pub use generated::canal_inbound_verdict as Verdict;

/// Version of the ABI: raised with every change of a map's meaning, and part of the pin's name.
pub const ABI: u32 = generated::CANAL_INBOUND_ABI;
/// Port in the pod's network namespace where the node proxy accepts captured plaintext connections.
pub const INBOUND_PORT: u16 = generated::CANAL_INBOUND_PORT as u16;
/// HBONE port of the proxy in a pod. Connections to it are never captured.
pub const HBONE_PORT: u16 = generated::CANAL_INBOUND_HBONE_PORT as u16;
/// Index of the IPv4 listener in the map `canal_inbound_listeners`.
pub const LISTENER4: u32 = generated::CANAL_INBOUND_LISTENER4;
/// Index of the IPv6 listener in the map `canal_inbound_listeners`.
pub const LISTENER6: u32 = generated::CANAL_INBOUND_LISTENER6;
/// Number of elements of the map `canal_inbound_listeners`.
pub const LISTENERS: u32 = generated::CANAL_INBOUND_LISTENERS;

/// Every verdict, in the order of the counter map.
pub const VERDICTS: [Verdict; Verdict::CANAL_INBOUND_VERDICTS as usize] = [
    Verdict::CANAL_INBOUND_LEFT_INSIDE,
    Verdict::CANAL_INBOUND_LEFT_HBONE,
    Verdict::CANAL_INBOUND_TAKEN_V4,
    Verdict::CANAL_INBOUND_TAKEN_V6,
    Verdict::CANAL_INBOUND_REFUSED_NO_LISTENER,
    Verdict::CANAL_INBOUND_REFUSED_ASSIGN,
];

/// Returns the verdict's name as metrics show it: the header's name without prefix, in lower case.
pub fn verdict_name(v: Verdict) -> String {
    format!("{v:?}")
        .trim_start_matches("CANAL_INBOUND_")
        .to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_complete_and_in_the_order_of_the_map() {
        for (i, v) in VERDICTS.into_iter().enumerate() {
            assert_eq!(v as usize, i, "{v:?}");
        }
        assert_eq!(verdict_name(Verdict::CANAL_INBOUND_TAKEN_V4), "taken_v4");
    }
}

//! `bpf/abi/inbound.h`: ports, listeners and the names of the verdicts on what comes into a pod. Loads nothing.

#[allow(non_camel_case_types, non_upper_case_globals, missing_docs, unreachable_pub, clippy::all, reason = "generated from the header")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/inbound.rs"));
}

pub use generated::canal_inbound_verdict as Verdict;

/// Raised with any change of meaning; part of the pin's name.
pub const ABI: u32 = generated::CANAL_INBOUND_ABI;
/// Where the node proxy takes plaintext connections, inside the pod's network namespace.
pub const INBOUND_PORT: u16 = generated::CANAL_INBOUND_PORT as u16;
/// Never taken.
pub const HBONE_PORT: u16 = generated::CANAL_INBOUND_HBONE_PORT as u16;
/// Index in `canal_inbound_listeners`.
pub const LISTENER4: u32 = generated::CANAL_INBOUND_LISTENER4;
/// Index in `canal_inbound_listeners`.
pub const LISTENER6: u32 = generated::CANAL_INBOUND_LISTENER6;
/// Size of `canal_inbound_listeners`.
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

/// The verdict's name as metrics show it: the header's, without prefix, in lower case.
pub fn verdict_name(v: Verdict) -> String {
    format!("{v:?}").trim_start_matches("CANAL_INBOUND_").to_ascii_lowercase()
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

//! The one table of limits that the compiler and the wire share: what the compiler accepts at a limit, every data plane decodes. Limits that
//! only one side knows stay there. Tests of the compiler decode all that it makes at each limit.

pub use crate::authorization::{
    ALTERNATIVES_MAX, AUTHORIZER_BODY_BYTES_MAX, AUTHORIZER_TIMEOUT_MAX, CLAIM_DEPTH_MAX, CLAUSES_MAX, JWT_RULES_MAX, KEYS_BYTES_MAX,
    REASON_BYTES_MAX, RULES_MAX, VALUE_BYTES_MAX, VALUES_MAX,
};
pub use crate::trust::{IDENTITIES_MAX, KEY_SERVER_ADDRESSES_MAX, PEM_BYTES_MAX, REVOKED_MAX, ROOTS_MAX};

/// UDP ports of one pod at which datagrams from the tier pass its guard; as many as the guard holds (`bpf/abi/pod.h`).
pub const UDP_PORTS_PER_WORKLOAD_MAX: usize = 64;
/// Largest share of a backend (Gateway API BackendRef.weight).
pub const WEIGHT_MAX: u32 = 1_000_000;

//! The one table of limits that the compiler and the wire share. Everything that the compiler
//! accepts at a limit, every data plane decodes. Limits that only one side applies are defined on
//! that side. Tests of the compiler decode everything that it generates at each limit.

pub use crate::authorization::{
    ALTERNATIVES_MAX, AUTHORIZER_BODY_BYTES_MAX, AUTHORIZER_TIMEOUT_MAX, CLAIM_DEPTH_MAX,
    CLAUSES_MAX, JWT_RULES_MAX, KEYS_BYTES_MAX, REASON_BYTES_MAX, RULES_MAX, VALUE_BYTES_MAX,
    VALUES_MAX,
};
pub use crate::trust::{
    BLOCKED_IDENTITIES_MAX, IDENTITIES_MAX, KEY_SERVER_ADDRESSES_MAX, PEM_BYTES_MAX, REVOKED_MAX,
    ROOTS_MAX,
};

/// Maximum number of UDP ports of one pod that accept datagrams from the tier: the capacity of the
/// pod's BPF map (`bpf/abi/pod.h`).
pub const UDP_PORTS_PER_WORKLOAD_MAX: usize = 64;
/// Maximum number of direct service ports of one workload, and of its own ports that clients dial
/// directly.
/// As many as [`UDP_PORTS_PER_WORKLOAD_MAX`]; nobody measured this value.
pub const DIRECT_PORTS_PER_WORKLOAD_MAX: usize = 64;
/// Largest weight of a backend (Gateway API BackendRef.weight).
pub const WEIGHT_MAX: u32 = 1_000_000;
/// Maximum length of each list of a CORS policy in bytes, as it stands in a header: each preflight
/// gets a copy of it.
/// As long as the longest value of a header in a route.
pub const CORS_LIST_BYTES_MAX: usize = 4096;
/// Maximum number of groups of a regular expression that rewrites paths: `\9` is the last one that
/// a substitution can name (RE2).
pub const SUBSTITUTION_GROUPS_MAX: usize = 9;
/// Maximum length in bytes of a path that a regular expression rewrites, before and after. Finding
/// all matches may take time that grows with the square of it.
pub const SUBSTITUTED_PATH_BYTES_MAX: usize = 8192;
/// Maximum number of matches in one path that a regular expression rewrites.
pub const SUBSTITUTIONS_PER_PATH_MAX: usize = 256;
/// Maximum number of proxies between clients and a Gateway.
/// Nobody measured this value; requests pass through a few proxies.
pub const TRUSTED_PROXIES_MAX: u8 = 16;
/// Maximum number of listeners of one Gateway, those of its ListenerSets included (Gateway API
/// allows 64 in each of these objects).
/// These are a Gateway and seven full ListenerSets.
pub const LISTENERS_PER_GATEWAY_MAX: usize = 512;
/// Maximum number of certificates of one listener (Gateway API's TLSConfig.certificateRefs).
pub const CERTIFICATES_PER_LISTENER_MAX: usize = 64;
/// Maximum number of certificates in the chain of a listener's certificate.
/// As many as a key server sends in a chain (`canal_wire::keyrpc::CHAIN_MAX`).
pub const SERVING_CHAIN_CERTIFICATES_MAX: usize = 10;
/// Maximum size of an RSA key of a listener, in bits. A signature with 4,096 bits takes a gateway 3
/// ms, and one with 8,192 bits 30 ms, in which the worker serves nobody else.
pub const SERVING_RSA_BITS_MAX: usize = 4096;
/// Maximum length of a listener's certificate chain and key together, in bytes of PEM.
/// A chain of ten certificates of 2 KiB has 20 KiB, and an RSA key of 4,096 bits 3 KiB.
pub const SERVING_CERTIFICATE_BYTES_MAX: usize = 64 << 10;
/// Maximum number of certificates of authorities with which one validation of clients is done. Each
/// handshake names all of them to the client.
/// Nobody measured this value.
pub const CLIENT_CA_CERTIFICATES_MAX: usize = 64;
/// Maximum length of those certificates together, in bytes of PEM.
/// These are 2 KiB for each of [`CLIENT_CA_CERTIFICATES_MAX`].
pub const CLIENT_CA_BYTES_MAX: usize = 128 << 10;
/// Maximum number of host names of a listener's certificate.
/// Nobody measured this value; Let's Encrypt issues certificates with at most 100.
pub const SERVING_NAMES_MAX: usize = 256;

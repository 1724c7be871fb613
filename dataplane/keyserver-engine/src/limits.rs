//! The key server's limits. Each is counted where it is reached.

use std::time::Duration;

use canal_tls::{CHAIN_BYTES_MAX, HANDSHAKE_TIMEOUT};
use canal_wire::keyrpc::CHAIN_LIFE;

/// Channels of one requester, which has one per worker. That is enough for machines of 128 cores.
pub const REQUESTER_CHANNELS_MAX: usize = 128;
/// Divisor of all channels. One tenant's nodes, or all gateways together, may have one such part.
/// So four of them have to be at their limit before others find no channel.
pub const TENANT_CHANNELS_PART: usize = 4;
/// Connections that have not authenticated yet, from addresses where none ever did. Above the
/// limit, the oldest of the network with the most gives way. Each takes a socket and 64 KiB at most
/// (`HANDSHAKE_BYTES_MAX`): 32 MiB together. Nobody measured the value.
pub const UNPROVED_MAX: u64 = 512;
/// Connections that have not authenticated yet, from addresses where one did before. Connections
/// from other addresses do not affect them. As many as of the others, with the same cost.
pub const RETURNING_MAX: u64 = 512;
/// Unauthenticated connections per source address. Further ones replace the oldest of the address.
/// An eighth of all.
pub const UNAUTHENTICATED_PER_IP_MAX: u64 = 64;
/// Addresses that are stored because a requester authenticated there once. Above it the oldest
/// counts as an address that never authenticated. Nobody measured the value.
pub const PROVED_ADDRESSES_MAX: usize = 4096;
/// Time within which a connection must send its first byte. A requester sends its ClientHello right
/// after the connect, so this is a lost packet and its repetition.
pub const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time of a handshake, whatever deadline the requester names. The requesters' own limit
/// (`HANDSHAKE_TIMEOUT`).
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Maximum time of a signature, whatever deadline the requester names. Half of the handshake that
/// needs it; a later signature would be for a peer that is gone.
pub const SIGN_TIME: Duration = Duration::from_secs(5);
/// Time for which a replaced key keeps signing. Requesters may present its certificates for
/// [`CHAIN_LIFE`], plus the time of one handshake.
pub const PREDECESSOR_RETENTION: Duration = Duration::from_secs(90);
const _: () = assert!(
    PREDECESSOR_RETENTION.as_secs() > CHAIN_LIFE.as_secs() + HANDSHAKE_TIMEOUT.as_secs(),
    "no handshake is lost"
);
/// Bytes that a peer may send before its handshake has ended. Twice the longest chain.
pub const HANDSHAKE_BYTES_MAX: usize = 64 << 10;
const _: () = assert!(
    HANDSHAKE_BYTES_MAX > CHAIN_BYTES_MAX,
    "a chain that may be shown must be sent before"
);
/// Bytes of responses that wait for a requester which does not read; above this the channel is
/// closed. Nobody measured the value; a response has a few KiB, so some hundred wait.
pub const OUTBOX_MAX: usize = 1 << 20;
/// Operations that one worker takes at once: so few that no other tenant waits long behind them.
/// Nobody measured which number is best.
pub const ECDSA_BATCH_MAX: usize = 32;
/// RSA operations that one worker takes at once: an RSA signature takes ten times as long as an
/// ECDSA signature. Nobody measured which number is best.
pub const RSA_BATCH_MAX: usize = 8;
/// Certificate requests in progress at once. A node makes as many to the same controller. Nobody
/// measured the value.
pub const CERTIFICATE_REQUESTS_MAX: usize = 8;
/// Keys that are generated at once: an RSA key costs a tenth of a second of CPU. More at once would
/// take cores from handshakes.
pub const GENERATIONS_MAX: usize = 1;
/// Services per tenant whose termination certificates are stored. Each is a sealed key, its chain
/// and its renewal. Nobody measured the value; a further service is refused (`no_certificate`).
pub const SERVICES_MAX: usize = 1024;
/// Keyless keys that are read from files. Each scan of the directory reads the state of all, twice
/// a second (`POLL_INTERVAL`).
pub const FILES_MAX: usize = 1024;
/// Longest allow list, certificate or key file in bytes. Kubernetes permits as much for a Secret.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// Limits of channels, and of the operations in progress of one requester and of one tenant.
/// Operations are signatures and handshakes, including handshakes that wait for their peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaShares {
    pub requester: usize,
    pub tenant: usize,
    /// Channels of all requesters together.
    pub channels: u64,
}

impl Default for QuotaShares {
    /// The requester's limit is larger than the tenant's, so that no tenant alone uses up a
    /// gateway's.
    fn default() -> Self {
        Self {
            // A gateway's handshakes in progress have the same limit (`GatewayLimits::handshakes`).
            requester: 8192,
            // A quarter of the requester's.
            tenant: 2048,
            // Those of 128 requesters with as many workers each (`REQUESTER_CHANNELS_MAX`).
            channels: 16_384,
        }
    }
}

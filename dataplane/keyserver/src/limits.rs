//! The key server's limits: how much of everything there may be at once. Each is counted where it is reached.

use std::time::Duration;

use canal_kit::keys::CHAIN_LIFE;
use canal_kit::tls::{CHAIN_BYTES_MAX, HANDSHAKE_TIMEOUT};

/// Channels of one requester: one per worker of it.
pub const REQUESTER_CHANNELS_MAX: usize = 128;
/// The part of all channels that one tenant's nodes may have, or all gateways: one in so many.
pub const TENANT_CHANNELS_PART: usize = 4;
/// Connections that have not proved yet who they are, from addresses that never did. When there are more, the oldest of the network with the
/// most gives way.
pub const UNPROVED_MAX: u64 = 512;
/// As [`UNPROVED_MAX`], from addresses that have proved before who is there: what strangers do does not concern them.
pub const RETURNING_MAX: u64 = 512;
/// Connections that have not proved yet who they are, from one address. Further ones replace its oldest.
pub const UNAUTHENTICATED_PER_IP_MAX: u64 = 64;
/// Addresses that are remembered because they proved once who is there.
pub const PROVED_ADDRESSES_MAX: usize = 4096;
/// A connection's first byte must come within.
pub const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(2);
/// A handshake's end must come within, whatever the requester says.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// A signature's end must come within, whatever the requester says.
pub const SIGN_TIME: Duration = Duration::from_secs(5);
/// A key that was replaced signs so long for peers that are shown its certificates: requesters show them for [`CHAIN_LIFE`], and the last
/// handshake takes its time.
pub const REPLACED_TIME: Duration = Duration::from_secs(90);
const _: () = assert!(REPLACED_TIME.as_secs() > CHAIN_LIFE.as_secs() + HANDSHAKE_TIMEOUT.as_secs(), "no handshake is lost");
/// Bytes of a peer before its handshake has ended.
pub const HANDSHAKE_BYTES_MAX: usize = 64 << 10;
const _: () = assert!(HANDSHAKE_BYTES_MAX > CHAIN_BYTES_MAX, "a chain that may be shown must be sent before");
/// Answers waiting for a requester that does not read, bytes; beyond it the channel is closed.
pub const OUTBOX_MAX: usize = 1 << 20;
/// Operations that one worker takes at once. Small enough that no other tenant waits long behind it.
pub const ECDSA_BATCH_MAX: usize = 32;
/// As [`ECDSA_BATCH_MAX`]; an RSA signature takes ten times as long.
pub const RSA_BATCH_MAX: usize = 8;
/// Certificate requests under way at once.
pub const ISSUES_MAX: usize = 8;
/// Keys that are made at once: RSA keys cost a tenth of a second of CPU each.
pub const GENERATIONS_MAX: usize = 1;
/// Services whose termination certificates are kept per tenant.
pub const SERVICES_MAX: usize = 1024;
/// Files of keyless keys.
pub const FILES_MAX: usize = 1024;
/// Longest allow list or certificate file, bytes.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// What may be at once: channels, and what one requester and one tenant may have under way: signatures and handshakes, waiting peers included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shares {
    pub requester: usize,
    pub tenant: usize,
    /// Channels of requesters.
    pub channels: u64,
}

impl Default for Shares {
    /// A requester's is larger than a tenant's, so that no tenant alone takes a gateway's.
    fn default() -> Self {
        Self { requester: 8192, tenant: 2048, channels: 16_384 }
    }
}

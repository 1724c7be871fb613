//! Limits of one subscriber's stream, and the errors when it exceeds them. The state machine
//! counts; nothing is decided here.

/// Maximum number of names that one stream may subscribe to. What a subscriber holds does not
/// count.
/// These are 16 times the resources of a tenant with the default share (30,000), which is what a
/// node can name.
pub const NAMES_MAX: usize = 500_000;
/// Maximum bytes of one resource's name. The longest name that Canal makes, of a route's rule,
/// stays far below.
pub const NAME_BYTES_MAX: usize = 1024;
/// Bytes that a name is charged beyond its own length, where the controller does not have the name
/// itself: its entries in the tables of a stream, and the copy of the request that brought it.
/// It must not be less than what they take; nobody measured it exactly.
pub(super) const NAME_OVERHEAD_BYTES: usize = 256;
/// Maximum bytes that one stream is charged for names that the controller does not have itself. It
/// suffices for a node that holds all resources of a tenant with the default share which was
/// deleted while the node was disconnected.
pub const STREAM_NAME_BYTES_MAX: usize = 64 << 20;
/// Maximum bytes of the listed names outside a data plane's scope that one response removes, with
/// [`NAME_OVERHEAD_BYTES`] for each.
/// Half of a part ([`PART_BYTES_MAX`]), so that removals do not make a message large.
pub(super) const OUT_OF_SCOPE_BYTES_MAX: usize = 256 << 10;
/// Maximum number of responses of one stream that wait for an ACK or NACK, and of responses to
/// unknown types that wait to be sent.
/// A data plane that does not answer gets nothing more then. Nobody measured this value; it bounds
/// what a data plane that never answers makes the controller keep.
pub const PENDING_MAX: usize = 64;
/// Approximate maximum bytes of one response. It is above the default share of a tenant's resources
/// (`compiledBytes`), so that a data plane applies a change of one tenant's kind as a whole.
pub const RESPONSE_BYTES_MAX: usize = 48 << 20;
/// Approximate maximum bytes of one part of a response, which is one message. A larger resource is
/// a part of its own. A message must not grow with a tenant's configuration, because both ends of a
/// stream keep the buffer of their largest message while the stream is open.
pub const PART_BYTES_MAX: usize = 512 << 10;
/// Maximum number of refused responses of one tenant that are split in one batch, where the NACK
/// does not name the faulty resource. After that the rest of the tenant's resources in the response
/// is set aside.
/// A response of 30,000 resources is halved 15 times until one faulty resource is alone, so that at
/// least 17 are found.
pub const NACK_SPLITS_MAX: usize = 256;

/// Limits that apply to one stream.
#[derive(Debug, Clone, Copy)]
pub struct SessionLimits {
    pub names: usize,
    pub name_bytes: usize,
    pub stream_name_bytes: usize,
    pub pending: usize,
    pub response_bytes: usize,
    pub part_bytes: usize,
    pub nack_splits: usize,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            names: NAMES_MAX,
            name_bytes: NAME_BYTES_MAX,
            stream_name_bytes: STREAM_NAME_BYTES_MAX,
            pending: PENDING_MAX,
            response_bytes: RESPONSE_BYTES_MAX,
            part_bytes: PART_BYTES_MAX,
            nack_splits: NACK_SPLITS_MAX,
        }
    }
}

/// The stream exceeded a limit, and is ended.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StreamLimitError {
    #[error(
        "the stream subscribes to {named} names; at most {limit} are allowed; fix: subscribe to fewer, or by wildcard"
    )]
    TooManyNames { named: usize, limit: usize },
    #[error(
        "the stream names a resource with {bytes} bytes; at most {limit} are allowed; fix: use the controller's names of resources"
    )]
    NameTooLong { bytes: usize, limit: usize },
    #[error(
        "the names that only this stream knows are charged {bytes} bytes; at most {limit} are allowed; fix: subscribe by wildcard, and list no resources as held"
    )]
    TooManyNameBytes { bytes: usize, limit: usize },
    #[error(
        "more than {limit} requests for unknown types wait for their answer; fix: wait for answers before the next request"
    )]
    TooManyUnknownTypes { limit: usize },
}

impl StreamLimitError {
    /// Returns the label `reason` of `canal_controller_refused_total`.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            StreamLimitError::TooManyNames { .. } => "names",
            StreamLimitError::NameTooLong { .. } => "name_too_long",
            StreamLimitError::TooManyNameBytes { .. } => "name_bytes",
            StreamLimitError::TooManyUnknownTypes { .. } => "unknown_types_pending",
        }
    }
}

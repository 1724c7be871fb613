//! What one subscriber's stream may ask for and hold, and how it is refused. The state machine counts; nothing is decided here.

/// Resources and names one stream may name or hold.
pub const NAMES_MAX: usize = 500_000;
/// Bytes of one resource's name. The longest that Canal makes, of a route's rule, stays far below.
pub const NAME_BYTES_MAX: usize = 1024;
/// Bytes of the names that one stream brings and the controller does not have itself; names that it has cost nothing.
pub const STREAM_NAME_BYTES_MAX: usize = 16 << 20;
/// Responses of one stream that wait for their answer, and answers to unknown types that wait to be sent.
pub const PENDING_MAX: usize = 64;
/// Bytes of one response, roughly: far below what a receiver takes, so that one stream never needs a huge buffer.
pub const RESPONSE_BYTES_MAX: usize = 48 << 20;
/// Refused responses of one tenant that are split in one batch, where the nack does not name the resource at fault. After that the rest of
/// the tenant's resources in the response is set aside.
pub const NACK_SPLITS_MAX: usize = 256;

/// Limits of one stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SessionLimits {
    pub(crate) names: usize,
    pub(crate) name_bytes: usize,
    pub(crate) stream_name_bytes: usize,
    pub(crate) pending: usize,
    pub(crate) response_bytes: usize,
    pub(crate) nack_splits: usize,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            names: NAMES_MAX,
            name_bytes: NAME_BYTES_MAX,
            stream_name_bytes: STREAM_NAME_BYTES_MAX,
            pending: PENDING_MAX,
            response_bytes: RESPONSE_BYTES_MAX,
            nack_splits: NACK_SPLITS_MAX,
        }
    }
}

/// The stream asks for more than it may, and is ended.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SessionError {
    #[error("the stream names {named} resources and may name {limit}; fix: subscribe to less, or by wildcard")]
    TooManyNames { named: usize, limit: usize },
    #[error("the stream names a resource with {bytes} bytes and may use {limit}; fix: name resources as the controller does")]
    NameTooLong { bytes: usize, limit: usize },
    #[error("the names that only this stream knows have {bytes} bytes and may have {limit}; fix: subscribe by wildcard")]
    TooManyNameBytes { bytes: usize, limit: usize },
    #[error("more than {limit} requests for unknown types wait for their answer; fix: wait for answers before the next request")]
    TooManyUnknownTypes { limit: usize },
}

impl SessionError {
    /// The label `reason` of `canal_controller_refused_total`.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            SessionError::TooManyNames { .. } => "names",
            SessionError::NameTooLong { .. } => "name_too_long",
            SessionError::TooManyNameBytes { .. } => "name_bytes",
            SessionError::TooManyUnknownTypes { .. } => "unknown_types_pending",
        }
    }
}

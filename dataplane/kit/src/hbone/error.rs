//! Why a tunnel did not come up or broke, and whether trying again is safe.

use std::net::SocketAddr;
use std::time::Duration;

use crate::sys::SysError;
use crate::tls::TlsError;

/// A tunnel's failure. Cloneable, because one handshake's failure is everyone's who waited for it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HboneError {
    /// TCP to the peer's HBONE port failed.
    #[error("HBONE: {0}")]
    Connect(std::sync::Arc<SysError>),
    /// mTLS failed.
    #[error("HBONE to {address}: {source}")]
    Tls { address: SocketAddr, source: std::sync::Arc<TlsError> },
    /// HTTP/2 failed as a whole: preface, settings, GOAWAY, PING unanswered.
    #[error("HBONE to {address}: HTTP/2: {why}")]
    Http2 { address: SocketAddr, why: String },
    /// The peer answered CONNECT with something else than 200.
    #[error("HBONE to {address}: CONNECT {authority} refused with status {status}")]
    Refused { address: SocketAddr, authority: String, status: u16 },
    /// The peer reset the stream before an answer.
    #[error("HBONE to {address}: CONNECT {authority} reset: {reason}")]
    Reset { address: SocketAddr, authority: String, reason: h2::Reason },
    /// No answer to CONNECT in time.
    #[error("HBONE to {address}: CONNECT {authority}: no answer in {limit:?}")]
    Timeout { address: SocketAddr, authority: String, limit: Duration },
    /// The request cannot be written as HTTP/2.
    #[error("HBONE: bad CONNECT: {0}")]
    Request(String),
    /// A named limit is reached.
    #[error("HBONE: limit {0} reached")]
    Limit(&'static str),
}

impl HboneError {
    /// The `response_flags` of `istio_tcp_*` (features.md A.7).
    pub fn flag(&self) -> &'static str {
        match self {
            HboneError::Connect(_) | HboneError::Timeout { .. } | HboneError::Limit(_) => "CONNECT",
            HboneError::Tls { .. } => "TLS_FAILURE",
            HboneError::Http2 { .. } | HboneError::Reset { .. } | HboneError::Request(_) => "H2_HANDSHAKE_FAILURE",
            HboneError::Refused { status, .. } if *status == canal_wire::hbone::STATUS_DENIED => "DENY",
            HboneError::Refused { .. } => "CONNECT",
        }
    }
}

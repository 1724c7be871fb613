//! Why a tunnel did not come up or broke, and whether trying again is safe.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::sys::SysError;
use crate::tls::TlsError;

/// A tunnel's failure. Cloneable, because one handshake's failure is everyone's who waited for it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HboneError {
    /// TCP to the peer's HBONE port failed.
    #[error("HBONE: {0}")]
    Connect(Arc<SysError>),
    /// mTLS failed.
    #[error("HBONE to {address}: {source}")]
    Tls { address: SocketAddr, source: Arc<TlsError> },
    /// The peer ended the new connection with a TLS alert: in TLS 1.3 its verdict on the own certificate comes after the handshake.
    #[error("HBONE to {address}: the peer refused this side's certificate: {why}")]
    RefusedByPeer { address: SocketAddr, why: String },
    /// HTTP/2 failed as a whole: preface, settings, GOAWAY, PING unanswered, connection lost.
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
    /// The accepted connection is not HTTP/2, or broke.
    #[error("HBONE server: {0}")]
    Server(String),
}

impl HboneError {
    /// The `response_flags` of `istio_tcp_*` (features.md A.7).
    pub fn flag(&self) -> &'static str {
        match self {
            HboneError::Connect(_) | HboneError::Timeout { .. } => "CONNECT",
            HboneError::Tls { .. } | HboneError::RefusedByPeer { .. } => "TLS_FAILURE",
            HboneError::Http2 { .. } | HboneError::Reset { .. } | HboneError::Request(_) | HboneError::Server(_) => "H2_HANDSHAKE_FAILURE",
            HboneError::Refused { status, .. } if *status == canal_wire::hbone::STATUS_DENIED => "DENY",
            HboneError::Refused { .. } => "CONNECT",
        }
    }

    /// What the peer answered, if it answered.
    pub fn status(&self) -> Option<u16> {
        if let HboneError::Refused { status, .. } = self { Some(*status) } else { None }
    }
}

/// An h2 error on a connection or before the answer to CONNECT.
pub(super) fn of_h2(address: SocketAddr, authority: &str, e: &h2::Error) -> HboneError {
    let why = e.to_string();
    if e.is_reset()
        && let Some(reason) = e.reason()
    {
        return HboneError::Reset { address, authority: authority.into(), reason };
    }
    // h2 keeps an IO error's kind and text only; rustls names alerts so.
    if why.contains("received fatal alert") { HboneError::RefusedByPeer { address, why } } else { HboneError::Http2 { address, why } }
}

/// Whether another connection may be asked after a failure: the peer surely did nothing for this CONNECT, or at least no payload was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Again {
    No,
    /// The connection is dead, or has no room.
    Dead,
    /// The peer takes no new streams on it, in order: it is well, and so is a new connection.
    Closing,
}

pub(super) fn decide_again(e: &h2::Error) -> Again {
    match () {
        () if e.is_go_away() && e.is_remote() && e.reason() == Some(h2::Reason::NO_ERROR) => Again::Closing,
        () if e.is_io() || e.is_go_away() || e.is_library() || e.reason() == Some(h2::Reason::REFUSED_STREAM) => Again::Dead,
        () => Again::No,
    }
}

//! Errors of tunnels: why a tunnel was not established or broke, and whether another attempt is
//! safe.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use canal_net::sys::SysError;
use canal_tls::TlsError;

/// Failure of a tunnel. It is cloneable, because every stream that waits for a handshake gets its
/// failure.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HboneError {
    /// The TCP connection to the peer's HBONE port failed.
    #[error("HBONE: {0}")]
    Connect(Arc<SysError>),
    /// The TLS handshake or the verification of the peer failed.
    #[error("HBONE to {address}: {source}")]
    Tls {
        address: SocketAddr,
        source: Arc<TlsError>,
    },
    /// The peer ended the new connection with a TLS alert. In TLS 1.3 its decision on this side's
    /// certificate arrives after the handshake.
    #[error("HBONE to {address}: the peer refused this side's certificate: {why}")]
    RefusedByPeer { address: SocketAddr, why: String },
    /// HTTP/2 failed for the whole connection: preface, settings, GOAWAY, unanswered PING, or
    /// connection lost.
    #[error("HBONE to {address}: HTTP/2: {why}")]
    Http2 { address: SocketAddr, why: String },
    /// The peer answered CONNECT with a status other than 200.
    #[error("HBONE to {address}: CONNECT {authority} refused with status {status}")]
    Refused {
        address: SocketAddr,
        authority: String,
        status: u16,
    },
    /// The peer reset the stream before a response.
    #[error("HBONE to {address}: CONNECT {authority} reset: {reason}")]
    Reset {
        address: SocketAddr,
        authority: String,
        reason: h2::Reason,
    },
    /// The response to CONNECT did not arrive in time.
    #[error("HBONE to {address}: CONNECT {authority}: no answer within {limit:?}")]
    Timeout {
        address: SocketAddr,
        authority: String,
        limit: Duration,
    },
    /// The request cannot be encoded as HTTP/2.
    #[error("HBONE: bad CONNECT: {0}")]
    Request(String),
    /// The accepted connection is not HTTP/2, or it broke.
    #[error("HBONE server: {0}")]
    Server(String),
}

impl HboneError {
    /// Returns the value of `response_flags` of `istio_tcp_*`, as in ztunnel.
    pub fn flag(&self) -> &'static str {
        match self {
            HboneError::Connect(_) | HboneError::Timeout { .. } => "CONNECT",
            HboneError::Tls { .. } | HboneError::RefusedByPeer { .. } => "TLS_FAILURE",
            HboneError::Http2 { .. }
            | HboneError::Reset { .. }
            | HboneError::Request(_)
            | HboneError::Server(_) => "H2_HANDSHAKE_FAILURE",
            HboneError::Refused { status, .. } if *status == canal_wire::hbone::STATUS_DENIED => {
                "DENY"
            }
            HboneError::Refused { .. } => "CONNECT",
        }
    }

    /// Returns the status of the peer's response, if there was one.
    pub fn status(&self) -> Option<u16> {
        if let HboneError::Refused { status, .. } = self {
            Some(*status)
        } else {
            None
        }
    }
}

/// Converts an h2 error of the connection, or one before the response to CONNECT.
pub(super) fn of_h2(address: SocketAddr, authority: &str, e: &h2::Error) -> HboneError {
    let why = e.to_string();
    if e.is_reset()
        && let Some(reason) = e.reason()
    {
        return HboneError::Reset {
            address,
            authority: authority.into(),
            reason,
        };
    }
    // h2 retains only kind and text of an IO error; rustls names alerts in this text.
    if why.contains("received fatal alert") {
        HboneError::RefusedByPeer { address, why }
    } else {
        HboneError::Http2 { address, why }
    }
}

/// Decision whether another connection may be tried after a failure. It may if the peer certainly
/// did nothing for this CONNECT, or if at least no payload was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReconnectDecision {
    No,
    /// The connection is dead or has no capacity.
    Dead,
    /// The peer accepts no new streams on it and closes it in order. The peer itself is healthy, so
    /// a new connection is worth an attempt.
    Closing,
}

pub(super) fn decide_again(e: &h2::Error) -> ReconnectDecision {
    match () {
        () if e.is_go_away() && e.is_remote() && e.reason() == Some(h2::Reason::NO_ERROR) => {
            ReconnectDecision::Closing
        }
        () if e.is_io()
            || e.is_go_away()
            || e.is_library()
            || e.reason() == Some(h2::Reason::REFUSED_STREAM) =>
        {
            ReconnectDecision::Dead
        }
        () => ReconnectDecision::No,
    }
}

//! Reasons for which the node refuses a connection: name (metric and log), `response_flags` of
//! `istio_tcp_*`, and status on HBONE.
//!
//! Nothing is decided here.

/// Reason why a connection or a tunnel is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeRefusal {
    /// The connection was accepted as captured but has no known destination: the proxy's port was
    /// dialed directly, or the origin table was full.
    OriginUnknown,
    /// The pod's tenant is unknown: there is no southbound state yet, or the pod file names a
    /// tenant that does not exist.
    TenantUnknown,
    /// A security resource of the pod's tenant is refused or missing, so nothing of the tenant is
    /// served.
    TenantClosed,
    /// The pod's identity has no certificate in time.
    NoIdentity,
    /// The destination is one of the proxy's own ports in a pod (ztunnel's `SelfCall`).
    ReservedPort,
    /// The destination is a gateway's address, which applications may not dial.
    GatewayAddress,
    /// The service has no such port.
    UnknownPort,
    /// The destination is neither a service nor a pod, and the tenant denies all others.
    OutsideMesh,
    /// The tenant has no gateway that could be tried.
    NoGateway,
    /// Gateways were tried, and none of them opened the tunnel.
    GatewayFailed,
    /// The gateway or the destination's node refused the tunnel.
    TunnelRefused,
    /// A plain TCP connection, to the pod itself or by passthrough, failed.
    ConnectFailed,
    /// The pod is at its limit of connections.
    ConnectionLimit,
    /// The HBONE peer's handshake failed or took too long.
    HandshakeFailed,
    /// The request is not CONNECT, or its authority is neither `ip:port` nor `host:port`.
    BadRequest,
    /// The authority's address differs from the one that was dialed.
    DestinationMismatch,
    /// The authority's host name is not a service that this pod serves.
    UnknownHost,
    /// Authorization denied it: by policy, or because the trust domain is neither the tenant's nor
    /// federated with it.
    Denied,
    /// A policy depends on attributes that only a gateway sees, and no gateway has authorized the
    /// connection.
    Undecided,
    /// The connection has no mTLS, and PeerAuthentication requires it at the port.
    StrictPlaintext,
    /// A gateway names a source that is not a SPIFFE identity.
    BadSource,
    /// The application did not accept the connection.
    ApplicationDown,
    /// No source port is free from the client's address to the application, or only the pod's own
    /// address could be used.
    SourceUnavailable,
}

/// All refusals, for the metrics and the tests.
pub const REFUSALS: [NodeRefusal; 23] = [
    NodeRefusal::OriginUnknown,
    NodeRefusal::TenantUnknown,
    NodeRefusal::TenantClosed,
    NodeRefusal::NoIdentity,
    NodeRefusal::ReservedPort,
    NodeRefusal::GatewayAddress,
    NodeRefusal::UnknownPort,
    NodeRefusal::OutsideMesh,
    NodeRefusal::NoGateway,
    NodeRefusal::GatewayFailed,
    NodeRefusal::TunnelRefused,
    NodeRefusal::ConnectFailed,
    NodeRefusal::ConnectionLimit,
    NodeRefusal::HandshakeFailed,
    NodeRefusal::BadRequest,
    NodeRefusal::DestinationMismatch,
    NodeRefusal::UnknownHost,
    NodeRefusal::Denied,
    NodeRefusal::Undecided,
    NodeRefusal::StrictPlaintext,
    NodeRefusal::BadSource,
    NodeRefusal::ApplicationDown,
    NodeRefusal::SourceUnavailable,
];

impl NodeRefusal {
    /// Returns the name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            NodeRefusal::OriginUnknown => "origin_unknown",
            NodeRefusal::TenantUnknown => "tenant_unknown",
            NodeRefusal::TenantClosed => "tenant_closed",
            NodeRefusal::NoIdentity => "no_identity",
            NodeRefusal::ReservedPort => "reserved_port",
            NodeRefusal::GatewayAddress => "gateway_address",
            NodeRefusal::UnknownPort => "unknown_port",
            NodeRefusal::OutsideMesh => "outside_mesh",
            NodeRefusal::NoGateway => "no_gateway",
            NodeRefusal::GatewayFailed => "gateway_failed",
            NodeRefusal::TunnelRefused => "tunnel_refused",
            NodeRefusal::ConnectFailed => "connect_failed",
            NodeRefusal::ConnectionLimit => "connection_limit",
            NodeRefusal::HandshakeFailed => "handshake_failed",
            NodeRefusal::BadRequest => "bad_request",
            NodeRefusal::DestinationMismatch => "destination_mismatch",
            NodeRefusal::UnknownHost => "unknown_host",
            NodeRefusal::Denied => "denied",
            NodeRefusal::Undecided => "undecided",
            NodeRefusal::StrictPlaintext => "strict_plaintext",
            NodeRefusal::BadSource => "bad_source",
            NodeRefusal::ApplicationDown => "application_down",
            NodeRefusal::SourceUnavailable => "source_unavailable",
        }
    }

    /// Returns the value of `response_flags`.
    pub fn flag(self) -> &'static str {
        match self {
            NodeRefusal::Denied
            | NodeRefusal::Undecided
            | NodeRefusal::StrictPlaintext
            | NodeRefusal::TenantClosed
            | NodeRefusal::OutsideMesh
            | NodeRefusal::ReservedPort
            | NodeRefusal::GatewayAddress => "DENY",
            NodeRefusal::NoIdentity | NodeRefusal::TenantUnknown => "IDENTITY_ERROR",
            NodeRefusal::HandshakeFailed => "TLS_FAILURE",
            NodeRefusal::BadRequest
            | NodeRefusal::DestinationMismatch
            | NodeRefusal::UnknownHost
            | NodeRefusal::BadSource => "H2_HANDSHAKE_FAILURE",
            NodeRefusal::OriginUnknown
            | NodeRefusal::UnknownPort
            | NodeRefusal::NoGateway
            | NodeRefusal::GatewayFailed
            | NodeRefusal::TunnelRefused
            | NodeRefusal::ConnectFailed
            | NodeRefusal::ConnectionLimit
            | NodeRefusal::ApplicationDown
            | NodeRefusal::SourceUnavailable => "CONNECT",
        }
    }

    /// Returns the status of the response to a CONNECT, as ztunnel does: 400 malformed or
    /// mismatched, 401 denied, 503 everything that a retry might fix.
    pub fn status(self) -> u16 {
        match self {
            NodeRefusal::BadRequest | NodeRefusal::DestinationMismatch | NodeRefusal::BadSource => {
                canal_wire::hbone::STATUS_BAD
            }
            NodeRefusal::Denied | NodeRefusal::Undecided | NodeRefusal::StrictPlaintext => {
                canal_wire::hbone::STATUS_DENIED
            }
            _ => canal_wire::hbone::STATUS_UNAVAILABLE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_and_are_complete() {
        let names: std::collections::BTreeSet<_> = REFUSALS.iter().map(|r| r.name()).collect();
        assert_eq!(names.len(), REFUSALS.len());
    }
}

//! Every way the node says no, once: its name (metric and log), the `response_flags` of `istio_tcp_*`, and the status on HBONE.
//! Nothing is decided here.

/// Why a connection or a tunnel was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Captured, but nobody knows where it was going: the proxy's port was dialled by hand, or the origin table was full.
    OriginUnknown,
    /// The pod's tenant was never heard of: no southbound state yet, or a pod file that names a stranger.
    TenantUnknown,
    /// A security resource of the pod's tenant is refused or missing: nothing of the tenant is served.
    TenantClosed,
    /// No certificate for the pod's identity in time.
    NoIdentity,
    /// The proxy's own ports in a pod may not be dialled (ztunnel's `SelfCall`).
    ReservedPort,
    /// A gateway's address is not a destination for applications.
    GatewayAddress,
    /// The service has no such port.
    UnknownPort,
    /// Neither a service nor a pod, and the tenant denies the rest.
    OutsideMesh,
    /// The tenant has no gateway that could be asked.
    NoGateway,
    /// Gateways were asked; none opened the tunnel.
    GatewayFailed,
    /// The gateway or the destination's node refused the tunnel.
    TunnelRefused,
    /// A plain connection (the pod itself, or passthrough) failed.
    ConnectFailed,
    /// The pod has as many connections as it may have.
    ConnectionLimit,
    /// The HBONE peer's handshake failed or took too long.
    HandshakeFailed,
    /// Not CONNECT, or an authority that is neither `ip:port` nor `host:port`.
    BadRequest,
    /// The authority's address is not the one that was dialled.
    DestinationMismatch,
    /// The authority's host name is no service that this pod serves.
    UnknownHost,
    /// Authorization said no: a policy, or a trust domain that is neither the tenant's nor federated with it.
    Denied,
    /// A policy depends on what only a gateway knows, and no gateway has judged.
    Undecided,
    /// Without mTLS, to a port where PeerAuthentication wants it.
    StrictPlaintext,
    /// A gateway names a source that is no identity.
    BadSource,
    /// The application did not take the connection.
    ApplicationDown,
}

/// All of them, for the metrics page and the tests.
pub const REFUSALS: [Refusal; 22] = [
    Refusal::OriginUnknown,
    Refusal::TenantUnknown,
    Refusal::TenantClosed,
    Refusal::NoIdentity,
    Refusal::ReservedPort,
    Refusal::GatewayAddress,
    Refusal::UnknownPort,
    Refusal::OutsideMesh,
    Refusal::NoGateway,
    Refusal::GatewayFailed,
    Refusal::TunnelRefused,
    Refusal::ConnectFailed,
    Refusal::ConnectionLimit,
    Refusal::HandshakeFailed,
    Refusal::BadRequest,
    Refusal::DestinationMismatch,
    Refusal::UnknownHost,
    Refusal::Denied,
    Refusal::Undecided,
    Refusal::StrictPlaintext,
    Refusal::BadSource,
    Refusal::ApplicationDown,
];

impl Refusal {
    /// As metrics and logs show it.
    pub fn name(self) -> &'static str {
        match self {
            Refusal::OriginUnknown => "origin_unknown",
            Refusal::TenantUnknown => "tenant_unknown",
            Refusal::TenantClosed => "tenant_closed",
            Refusal::NoIdentity => "no_identity",
            Refusal::ReservedPort => "reserved_port",
            Refusal::GatewayAddress => "gateway_address",
            Refusal::UnknownPort => "unknown_port",
            Refusal::OutsideMesh => "outside_mesh",
            Refusal::NoGateway => "no_gateway",
            Refusal::GatewayFailed => "gateway_failed",
            Refusal::TunnelRefused => "tunnel_refused",
            Refusal::ConnectFailed => "connect_failed",
            Refusal::ConnectionLimit => "connection_limit",
            Refusal::HandshakeFailed => "handshake_failed",
            Refusal::BadRequest => "bad_request",
            Refusal::DestinationMismatch => "destination_mismatch",
            Refusal::UnknownHost => "unknown_host",
            Refusal::Denied => "denied",
            Refusal::Undecided => "undecided",
            Refusal::StrictPlaintext => "strict_plaintext",
            Refusal::BadSource => "bad_source",
            Refusal::ApplicationDown => "application_down",
        }
    }

    /// `response_flags` (features.md A.7).
    pub fn flag(self) -> &'static str {
        match self {
            Refusal::Denied
            | Refusal::Undecided
            | Refusal::StrictPlaintext
            | Refusal::TenantClosed
            | Refusal::OutsideMesh
            | Refusal::ReservedPort
            | Refusal::GatewayAddress => "DENY",
            Refusal::NoIdentity | Refusal::TenantUnknown => "IDENTITY_ERROR",
            Refusal::HandshakeFailed => "TLS_FAILURE",
            Refusal::BadRequest | Refusal::DestinationMismatch | Refusal::UnknownHost | Refusal::BadSource => "H2_HANDSHAKE_FAILURE",
            Refusal::OriginUnknown
            | Refusal::UnknownPort
            | Refusal::NoGateway
            | Refusal::GatewayFailed
            | Refusal::TunnelRefused
            | Refusal::ConnectFailed
            | Refusal::ConnectionLimit
            | Refusal::ApplicationDown => "CONNECT",
        }
    }

    /// The answer to a CONNECT (ztunnel's: 400 malformed or mismatched, 401 denied, 503 everything that another try might mend).
    pub fn status(self) -> u16 {
        match self {
            Refusal::BadRequest | Refusal::DestinationMismatch | Refusal::BadSource => canal_wire::hbone::STATUS_BAD,
            Refusal::Denied | Refusal::Undecided | Refusal::StrictPlaintext => canal_wire::hbone::STATUS_DENIED,
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

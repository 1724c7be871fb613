//! An arrival at a Gateway as an operator describes it. It decides nothing. Start at
//! [`ArrivalDescription`].

use std::net::IpAddr;

use canal_compiler::oracle::OracleRequest;
use canal_compiler::oracle_ingress::ArrivalTransport;
use canal_model::ids::ServiceKey;
use serde_json::Value as Json;

/// A request of a client outside the mesh, or a connection that a Gateway relays, as an operator
/// describes it.
#[derive(Debug, Clone)]
pub struct ArrivalDescription {
    /// The service that stands for the Gateway.
    pub gateway: ServiceKey,
    pub port: u16,
    /// Address of the client's connection, as the gateway observes it.
    pub address: Option<IpAddr>,
    /// True if the client begins with a TLS handshake.
    pub is_tls: bool,
    /// Server name of the handshake (SNI), if the client sends one.
    pub server_name: Option<String>,
    /// True if the client presents a certificate that the listener's authorities issued for clients.
    pub has_certificate: bool,
    /// The request; `None` for bytes that are not HTTP. Its service and port are not used.
    pub request: Option<OracleRequest>,
    /// Claims of a token with a valid signature of some issuer.
    pub claims: Option<Json>,
}

impl ArrivalDescription {
    pub(super) fn transport(&self) -> ArrivalTransport<'_> {
        match self.is_tls {
            true => ArrivalTransport::Tls(self.server_name.as_deref()),
            false => ArrivalTransport::Plaintext,
        }
    }
}

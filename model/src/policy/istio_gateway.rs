//! Gateway (`networking.istio.io`): the servers of a tenant for clients outside the mesh, as Istio
//! writes them. The structs mirror the YAML; `canal-attachment` validates and interprets them. A
//! Gateway of Gateway API is in `listeners`.

use std::num::NonZeroU16;

use serde::Deserialize;

use super::Metadata;
use crate::program::Labels;

/// An object of kind Gateway (`networking.istio.io`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct IstioGateway {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: IstioGatewaySpec,
}

/// The content of `spec:` in a Gateway of Istio.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct IstioGatewaySpec {
    pub servers: Vec<GatewayServer>,
    /// Labels of the gateways that serve the object; an empty map selects all.
    pub selector: Labels,
}

/// A port with the hosts for which it is open.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct GatewayServer {
    pub name: Option<String>,
    pub port: ServerPort,
    /// Hosts, each optionally with the namespace of the VirtualServices that it takes, as in
    /// `shop/*.example.com`.
    pub hosts: Vec<String>,
    pub tls: Option<ServerTls>,
}

/// The port of a server.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct ServerPort {
    pub number: Option<NonZeroU16>,
    /// `HTTP`, `HTTP2`, `GRPC`, `HTTPS`, `TLS`, `TCP`, or a name of another protocol.
    pub protocol: String,
    /// Name of the port, unique in the object.
    pub name: String,
}

/// The TLS settings of a server.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServerTls {
    /// Whether a server for HTTP sends its clients to HTTPS.
    pub https_redirect: bool,
    /// `SIMPLE`, `MUTUAL`, `OPTIONAL_MUTUAL`, `PASSTHROUGH` (also if it is missing), or another
    /// mode.
    pub mode: Option<String>,
    /// Name of a Secret in the Gateway's namespace.
    pub credential_name: Option<String>,
    pub credential_names: Vec<String>,
    /// Name of the Secret with the authorities of clients. Without it, they are in the Secret with
    /// the name of the first credential and `-cacert`, or in that of the credential itself.
    pub ca_cert_credential_name: Option<String>,
}

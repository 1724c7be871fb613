//! `spec.tls` of a Gateway: how its listeners for HTTPS validate clients. The structs mirror the
//! YAML; the compiler validates and interprets them.

use std::num::NonZeroU16;

use serde::Deserialize;

use crate::ids::{Namespace, ObjectName};

/// The content of `spec.tls` in a Gateway.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct GatewayTls {
    pub frontend: Option<FrontendTls>,
}

/// How listeners for HTTPS use TLS with clients.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendTls {
    /// Settings of the ports without their own.
    pub default: FrontendTlsConfig,
    #[serde(default)]
    pub per_port: Vec<PortTlsConfig>,
}

/// The settings of one port, which replace all those of `default`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PortTlsConfig {
    pub port: NonZeroU16,
    pub tls: FrontendTlsConfig,
}

/// TLS settings of listeners for HTTPS.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct FrontendTlsConfig {
    /// Without it, clients are not asked for a certificate.
    pub validation: Option<FrontendTlsValidation>,
}

/// Validation of the certificates of clients.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendTlsValidation {
    pub ca_certificate_refs: Vec<CaCertificateReference>,
    /// `AllowValidOnly` (also if it is missing) or `AllowInsecureFallback`.
    #[serde(default)]
    pub mode: Option<String>,
}

/// A reference to an object with certificates of authorities.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct CaCertificateReference {
    pub group: String,
    pub kind: String,
    pub name: ObjectName,
    #[serde(default)]
    pub namespace: Option<Namespace>,
}

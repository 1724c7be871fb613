//! GatewayClass, Gateway and ListenerSet (`gateway.networking.k8s.io`): the listeners of a tenant
//! for clients outside the mesh. The structs mirror the YAML; the compiler validates and interprets
//! them.

use std::num::NonZeroU16;

use serde::Deserialize;

use super::Metadata;
use super::external_auth::HttpExternalAuthFilter;
use super::frontend_tls::GatewayTls;
use crate::ids::{Namespace, ObjectName};
use crate::program::Labels;

/// Annotation of a Gateway: the number of proxies between its clients and it that append to
/// `x-forwarded-for`, such as load balancers of HTTP. Istio calls it `numTrustedProxies`.
pub const TRUSTED_PROXIES_ANNOTATION: &str = "canal.mesh/trusted-proxies";

/// Annotation of a Gateway: the ports at which connections begin with a header of the PROXY protocol,
/// because a load balancer is before them; `*` means all ports.
pub const PROXY_PROTOCOL_ANNOTATION: &str = "canal.mesh/proxy-protocol";

/// An object of kind GatewayClass (`gateway.networking.k8s.io/v1`). It has no namespace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GatewayClass {
    pub metadata: Metadata,
    pub spec: GatewayClassSpec,
}

/// The content of `spec:` in a GatewayClass.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayClassSpec {
    pub controller_name: String,
    #[serde(default)]
    pub parameters_ref: Option<ParametersReference>,
}

/// A reference to parameters of an implementation; Canal has none.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ParametersReference {
    #[serde(default)]
    pub group: String,
    pub kind: String,
    pub name: String,
    #[serde(default)]
    pub namespace: Option<Namespace>,
}

/// An object of kind Gateway (`gateway.networking.k8s.io/v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Gateway {
    pub metadata: Metadata,
    pub spec: GatewaySpec,
}

/// The content of `spec:` in a Gateway.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewaySpec {
    pub gateway_class_name: ObjectName,
    #[serde(default)]
    pub listeners: Vec<GatewayListener>,
    #[serde(default)]
    pub addresses: Vec<GatewaySpecAddress>,
    #[serde(default)]
    pub infrastructure: GatewayInfrastructure,
    #[serde(default)]
    pub allowed_listeners: AllowedListeners,
    /// TLS of the listeners of the Gateway and of its ListenerSets.
    #[serde(default)]
    pub tls: GatewayTls,
}

/// An address that a Gateway requests.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct GatewaySpecAddress {
    /// `IPAddress` (also if it is missing), `Hostname`, or a name of an implementation.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub value: String,
}

/// Properties of what an implementation makes for a Gateway. Canal makes no objects, so that labels
/// and annotations have no effect.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GatewayInfrastructure {
    pub parameters_ref: Option<ParametersReference>,
}

/// The ListenerSets that may add listeners to a Gateway.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct AllowedListeners {
    /// Their namespaces; without the field, none may.
    pub namespaces: NamespaceChoice,
}

/// A listener of a Gateway or of a ListenerSet.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayListener {
    pub name: ObjectName,
    /// Host names of requests; `None` and the empty text mean all.
    #[serde(default)]
    pub hostname: Option<String>,
    pub port: NonZeroU16,
    /// `HTTP`, `HTTPS`, `TLS`, `TCP`, `UDP`, or a name of an implementation.
    pub protocol: String,
    #[serde(default)]
    pub tls: Option<ListenerTls>,
    #[serde(default)]
    pub allowed_routes: AllowedRoutes,
    #[serde(default)]
    pub filters: GatewayListenerFilters,
}

/// Filters of a listener, which run before a route is selected.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct GatewayListenerFilters {
    /// Filters of requests, in the order in which they run.
    pub requests: Vec<GatewayListenerFilter>,
}

/// A filter of a listener, of which the `type` and the field of that type must agree.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GatewayListenerFilter {
    /// Type of the filter: `ExternalAuth` or `ExtensionRef`.
    #[serde(rename = "type")]
    pub kind: String,
    pub external_auth: Option<HttpExternalAuthFilter>,
    pub extension_ref: Option<ExtensionReference>,
}

/// A reference to an object of an implementation.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct ExtensionReference {
    pub group: String,
    pub kind: String,
    pub name: String,
}

/// The TLS settings of a listener.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListenerTls {
    /// `Terminate` (also if it is missing) or `Passthrough`.
    pub mode: Option<String>,
    pub certificate_refs: Vec<SecretReference>,
}

/// A reference to a Secret with a certificate.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct SecretReference {
    #[serde(default)]
    pub group: String,
    #[serde(default = "secret_kind")]
    pub kind: String,
    pub name: ObjectName,
    #[serde(default)]
    pub namespace: Option<Namespace>,
}

fn secret_kind() -> String {
    "Secret".to_owned()
}

/// The routes that may attach to a listener.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct AllowedRoutes {
    /// Their namespaces; without the field, that of the listener's object.
    pub namespaces: NamespaceChoice,
    /// Their kinds; an empty list means all that the listener's protocol serves.
    pub kinds: Vec<RouteGroupKind>,
}

/// A choice of namespaces, by name or by their labels.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct NamespaceChoice {
    /// `All`, `Same`, `Selector` or `None`.
    pub from: Option<String>,
    pub selector: Option<LabelSelector>,
}

/// A selector of objects by their labels, as Kubernetes defines it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LabelSelector {
    pub match_labels: Labels,
    pub match_expressions: Vec<LabelExpression>,
}

/// A condition on one label.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct LabelExpression {
    pub key: String,
    /// `In`, `NotIn`, `Exists` or `DoesNotExist`.
    pub operator: String,
    #[serde(default)]
    pub values: Vec<String>,
}

/// A kind of route, with its group.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RouteGroupKind {
    #[serde(default = "super::gateway_api::gateway_group")]
    pub group: String,
    pub kind: String,
}

/// An object of kind ListenerSet (`gateway.networking.k8s.io/v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ListenerSet {
    pub metadata: Metadata,
    pub spec: ListenerSetSpec,
}

/// The content of `spec:` in a ListenerSet.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListenerSetSpec {
    pub parent_ref: ParentGateway,
    #[serde(default)]
    pub listeners: Vec<GatewayListener>,
}

/// The Gateway to which a ListenerSet adds its listeners.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ParentGateway {
    #[serde(default = "super::gateway_api::gateway_group")]
    pub group: String,
    #[serde(default = "super::gateway_api::gateway_kind")]
    pub kind: String,
    pub name: ObjectName,
    #[serde(default)]
    pub namespace: Option<Namespace>,
}

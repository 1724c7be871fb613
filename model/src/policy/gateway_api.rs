//! HTTPRoute, GRPCRoute, UDPRoute and ReferenceGrant (`gateway.networking.k8s.io`): the part of
//! Gateway API that the mesh supports. The structs mirror the YAML; the compiler validates and interprets them.

use std::fmt;
use std::num::NonZeroU16;

use serde::Deserialize;
use serde::de::{self, Deserializer, Unexpected, Visitor};

use super::Metadata;
use super::attempts::{HttpRouteRetry, HttpRouteTimeouts};
use super::cors::HttpCorsFilter;
use super::external_auth::HttpExternalAuthFilter;
use super::mirrors::HttpRequestMirrorFilter;
use crate::ids::{Namespace, ObjectName};
use crate::limits::WEIGHT_MAX;

/// An object of kind HTTPRoute (`gateway.networking.k8s.io/v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct HttpRoute {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: HttpRouteSpec,
}

/// The content of `spec:` in an HTTPRoute.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRouteSpec {
    pub parent_refs: Vec<ParentRef>,
    /// Hosts that the route applies to; an empty list means any host.
    pub hostnames: Vec<String>,
    pub rules: Vec<HttpRule>,
}

/// The object that the route is attached to. The mesh attaches routes to Services.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ParentRef {
    #[serde(default = "gateway_group")]
    pub group: String,
    #[serde(default = "gateway_kind")]
    pub kind: String,
    pub name: ObjectName,
    /// Namespace of the parent; `None` means the route's own.
    #[serde(default)]
    pub namespace: Option<Namespace>,
    /// Port of the parent; `None` means all ports.
    #[serde(default)]
    pub port: Option<NonZeroU16>,
    /// Name of the parent's port; `None` means all ports.
    #[serde(default)]
    pub section_name: Option<String>,
}

pub(super) fn gateway_group() -> String {
    "gateway.networking.k8s.io".to_owned()
}
pub(super) fn gateway_kind() -> String {
    "Gateway".to_owned()
}

/// One rule: if any match holds, the request goes to the backends.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRule {
    pub name: Option<String>,
    /// Alternative matches; an empty list matches everything.
    pub matches: Vec<HttpRouteMatch>,
    pub filters: Vec<HttpRouteFilter>,
    pub backend_refs: Vec<RouteBackendRef<HttpRouteFilter>>,
    pub timeouts: Option<HttpRouteTimeouts>,
    pub retry: Option<HttpRouteRetry>,
}

/// A change of the requests that a rule matches, or of their responses. `kind` names the one field
/// that is set.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRouteFilter {
    #[serde(rename = "type")]
    pub kind: String,
    pub request_header_modifier: Option<HttpHeaderFilter>,
    pub response_header_modifier: Option<HttpHeaderFilter>,
    pub url_rewrite: Option<HttpUrlRewriteFilter>,
    pub request_redirect: Option<HttpRequestRedirectFilter>,
    pub cors: Option<HttpCorsFilter>,
    pub request_mirror: Option<HttpRequestMirrorFilter>,
    pub external_auth: Option<HttpExternalAuthFilter>,
}

/// Changes of the headers of a request or of a response.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct HttpHeaderFilter {
    pub set: Vec<HttpHeader>,
    pub add: Vec<HttpHeader>,
    pub remove: Vec<String>,
}

/// A header with its value.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct HttpHeader {
    pub name: String,
    pub value: String,
}

/// Changes of the URL of a request.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct HttpUrlRewriteFilter {
    pub hostname: Option<String>,
    pub path: Option<HttpPathModifier>,
}

/// A response that sends the client to another URL.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRequestRedirectFilter {
    pub scheme: Option<String>,
    pub hostname: Option<String>,
    pub path: Option<HttpPathModifier>,
    pub port: Option<NonZeroU16>,
    /// Status of the response; `None` means 302.
    pub status_code: Option<u16>,
}

/// Change of a path: `kind` names the one other field that is set.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpPathModifier {
    #[serde(rename = "type")]
    pub kind: String,
    pub replace_full_path: Option<String>,
    pub replace_prefix_match: Option<String>,
}

/// A set of conditions that must all hold.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRouteMatch {
    pub path: Option<PathCondition>,
    pub method: Option<Method>,
    pub headers: Vec<ValueCondition>,
    pub query_params: Vec<ValueCondition>,
}

/// A condition on the path.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PathCondition {
    #[serde(rename = "type", default)]
    pub kind: PathConditionType,
    #[serde(default = "root_path")]
    pub value: String,
}

fn root_path() -> String {
    "/".to_owned()
}

/// The comparison that a path condition uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum PathConditionType {
    Exact,
    #[default]
    PathPrefix,
    RegularExpression,
}

/// The methods that Gateway API defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Method {
    Get,
    Head,
    Post,
    Put,
    Delete,
    Connect,
    Options,
    Trace,
    Patch,
}

impl Method {
    /// Returns the method as it is on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Method::Get => "GET",
            Method::Head => "HEAD",
            Method::Post => "POST",
            Method::Put => "PUT",
            Method::Delete => "DELETE",
            Method::Connect => "CONNECT",
            Method::Options => "OPTIONS",
            Method::Trace => "TRACE",
            Method::Patch => "PATCH",
        }
    }
}

/// A condition on a header or a query parameter.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ValueCondition {
    #[serde(rename = "type", default)]
    pub kind: ValueConditionType,
    pub name: String,
    pub value: String,
}

/// The comparison that a value condition uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum ValueConditionType {
    #[default]
    Exact,
    RegularExpression,
}

/// An object of kind GRPCRoute (`gateway.networking.k8s.io/v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GrpcRoute {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: GrpcRouteSpec,
}

/// The content of `spec:` in a GRPCRoute.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GrpcRouteSpec {
    pub parent_refs: Vec<ParentRef>,
    /// Hosts that the route applies to; an empty list means any host.
    pub hostnames: Vec<String>,
    pub rules: Vec<GrpcRule>,
}

/// One rule of a GRPCRoute: if any match holds, the request goes to the backends.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GrpcRule {
    pub name: Option<String>,
    /// Alternative matches; an empty list matches every gRPC request.
    pub matches: Vec<GrpcRouteMatch>,
    pub filters: Vec<GrpcRouteFilter>,
    pub backend_refs: Vec<RouteBackendRef<GrpcRouteFilter>>,
}

/// A set of conditions on a gRPC request that must all hold.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct GrpcRouteMatch {
    pub method: Option<GrpcMethodMatch>,
    pub headers: Vec<ValueCondition>,
}

/// A condition on the gRPC service and method. One that is missing or empty may be anything.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct GrpcMethodMatch {
    #[serde(rename = "type")]
    pub kind: ValueConditionType,
    /// Name of the service with its package, as in `shop.Cart`.
    pub service: Option<String>,
    pub method: Option<String>,
}

/// A change of the requests that a rule of a GRPCRoute matches, or of their responses. `kind` names
/// the one field that is set.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GrpcRouteFilter {
    #[serde(rename = "type")]
    pub kind: String,
    pub request_header_modifier: Option<HttpHeaderFilter>,
    pub response_header_modifier: Option<HttpHeaderFilter>,
    pub request_mirror: Option<HttpRequestMirrorFilter>,
}

/// One backend of a rule of an HTTPRoute or GRPCRoute: the fields of [`BackendRef`], and changes of
/// the requests that it gets.
// The fields are written out again: with serde's `flatten`, an unknown field would not be reported.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(bound(deserialize = "F: Deserialize<'de>"))]
pub struct RouteBackendRef<F> {
    #[serde(default)]
    pub group: String,
    #[serde(default = "service_kind")]
    pub kind: String,
    pub name: ObjectName,
    #[serde(default)]
    pub namespace: Option<Namespace>,
    #[serde(default)]
    pub port: Option<NonZeroU16>,
    #[serde(default = "one", deserialize_with = "weight")]
    pub weight: u32,
    #[serde(default = "Vec::new")]
    pub filters: Vec<F>,
}

impl<F> RouteBackendRef<F> {
    /// Returns the backend without its filters.
    pub fn reference(&self) -> BackendRef {
        BackendRef {
            group: self.group.clone(),
            kind: self.kind.clone(),
            name: self.name.clone(),
            namespace: self.namespace.clone(),
            port: self.port,
            weight: self.weight,
        }
    }
}

impl<F> From<BackendRef> for RouteBackendRef<F> {
    fn from(backend: BackendRef) -> Self {
        let BackendRef {
            group,
            kind,
            name,
            namespace,
            port,
            weight,
        } = backend;
        Self {
            group,
            kind,
            name,
            namespace,
            port,
            weight,
            filters: Vec::new(),
        }
    }
}

/// One backend and its weight.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct BackendRef {
    /// API group; empty means the core group.
    #[serde(default)]
    pub group: String,
    #[serde(default = "service_kind")]
    pub kind: String,
    pub name: ObjectName,
    /// Namespace of the backend; `None` means the route's own.
    #[serde(default)]
    pub namespace: Option<Namespace>,
    /// Port of the backend; required for a Service.
    #[serde(default)]
    pub port: Option<NonZeroU16>,
    /// Relative weight, 0 to 1,000,000.
    #[serde(default = "one", deserialize_with = "weight")]
    pub weight: u32,
}

fn service_kind() -> String {
    "Service".to_owned()
}
fn one() -> u32 {
    1
}

/// Deserializes a weight. An error states which numbers a weight can be. The compiler refuses
/// weights above [`WEIGHT_MAX`], so that the rule's other backends keep their shares.
pub(super) fn weight<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    deserializer.deserialize_u32(WeightVisitor)
}

struct WeightVisitor;

impl Visitor<'_> for WeightVisitor {
    type Value = u32;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a number from 0 to {WEIGHT_MAX}")
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<u32, E> {
        u32::try_from(value).map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<u32, E> {
        u32::try_from(value).map_err(|_| E::invalid_value(Unexpected::Signed(value), &self))
    }
}

/// An object of kind UDPRoute (`gateway.networking.k8s.io/v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct UdpRoute {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: UdpRouteSpec,
}

/// The content of `spec:` in a UDPRoute.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UdpRouteSpec {
    pub parent_refs: Vec<ParentRef>,
    pub rules: Vec<UdpRule>,
}

/// One rule: all datagrams go to the backends.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UdpRule {
    pub name: Option<String>,
    pub backend_refs: Vec<BackendRef>,
}

/// An object of kind TLSRoute (`gateway.networking.k8s.io/v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TlsRoute {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: TlsRouteSpec,
}

/// The content of `spec:` in a TLSRoute.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TlsRouteSpec {
    pub parent_refs: Vec<ParentRef>,
    /// Server names of clients; an empty list means any.
    pub hostnames: Vec<String>,
    pub rules: Vec<RelayRule>,
}

/// An object of kind TCPRoute (`gateway.networking.k8s.io/v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TcpRoute {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: TcpRouteSpec,
}

/// The content of `spec:` in a TCPRoute.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TcpRouteSpec {
    pub parent_refs: Vec<ParentRef>,
    pub rules: Vec<RelayRule>,
}

/// A rule about connections that are relayed as they are: all go to the backends.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RelayRule {
    pub name: Option<String>,
    pub backend_refs: Vec<BackendRef>,
}

/// `gateway.networking.k8s.io/v1 ReferenceGrant`: objects of `from` may refer to objects of `to` in
/// the grant's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ReferenceGrant {
    pub metadata: Metadata,
    pub spec: ReferenceGrantSpec,
}

/// The content of `spec:` in a ReferenceGrant.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ReferenceGrantSpec {
    pub from: Vec<GrantFrom>,
    pub to: Vec<GrantTo>,
}

/// The objects that may refer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GrantFrom {
    pub group: String,
    pub kind: String,
    pub namespace: Namespace,
}

/// The objects that may be referred to.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GrantTo {
    pub group: String,
    pub kind: String,
    /// Name of one object; `None` means all objects of the kind.
    #[serde(default)]
    pub name: Option<ObjectName>,
}

//! HTTPRoute, UDPRoute and ReferenceGrant (`gateway.networking.k8s.io`): the part of Gateway API
//! that the mesh supports. The structs mirror the YAML; the compiler validates and interprets them.

use std::num::NonZeroU16;

use serde::Deserialize;

use super::Metadata;
use crate::ids::{Namespace, ObjectName};

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

fn gateway_group() -> String {
    "gateway.networking.k8s.io".to_owned()
}
fn gateway_kind() -> String {
    "Gateway".to_owned()
}

/// One rule: if any match holds, the request goes to the backends.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRule {
    pub name: Option<String>,
    /// Alternative matches; an empty list matches everything.
    pub matches: Vec<HttpRouteMatch>,
    pub backend_refs: Vec<BackendRef>,
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
    #[serde(default = "one")]
    pub weight: u32,
}

fn service_kind() -> String {
    "Service".to_owned()
}
fn one() -> u32 {
    1
}

/// An object of kind UDPRoute (`gateway.networking.k8s.io/v1alpha2`).
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

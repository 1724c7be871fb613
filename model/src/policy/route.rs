//! HTTPRoute, UDPRoute and ReferenceGrant (`gateway.networking.k8s.io`), the part of Gateway API that the mesh follows today.

use std::num::NonZeroU16;

use serde::Deserialize;

use super::Metadata;
use crate::ids::{Namespace, ObjectName};

/// `gateway.networking.k8s.io/v1 HTTPRoute`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct HttpRoute {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: HttpRouteSpec,
}

/// `spec:` of an HTTPRoute.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRouteSpec {
    pub parent_refs: Vec<ParentRef>,
    /// Empty: any host.
    pub hostnames: Vec<String>,
    pub rules: Vec<HttpRule>,
}

/// What the route is attached to. The mesh attaches routes to Services.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ParentRef {
    #[serde(default = "gateway_group")]
    pub group: String,
    #[serde(default = "gateway_kind")]
    pub kind: String,
    pub name: ObjectName,
    /// `None`: the route's own.
    #[serde(default)]
    pub namespace: Option<Namespace>,
    /// `None`: all ports.
    #[serde(default)]
    pub port: Option<NonZeroU16>,
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
    /// Empty: everything matches.
    pub matches: Vec<HttpRouteMatch>,
    pub backend_refs: Vec<BackendRef>,
}

/// All given conditions must hold.
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

/// How a path is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum PathConditionType {
    Exact,
    #[default]
    PathPrefix,
    RegularExpression,
}

/// The methods that Gateway API knows.
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
    /// As on the wire.
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

/// How a value is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum ValueConditionType {
    #[default]
    Exact,
    RegularExpression,
}

/// One backend and its share.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct BackendRef {
    /// Empty for the core group.
    #[serde(default)]
    pub group: String,
    #[serde(default = "service_kind")]
    pub kind: String,
    pub name: ObjectName,
    /// `None`: the route's own.
    #[serde(default)]
    pub namespace: Option<Namespace>,
    /// Must be given for a Service.
    #[serde(default)]
    pub port: Option<NonZeroU16>,
    /// 0 to 1,000,000.
    #[serde(default = "one")]
    pub weight: u32,
}

fn service_kind() -> String {
    "Service".to_owned()
}
fn one() -> u32 {
    1
}

/// `gateway.networking.k8s.io/v1alpha2 UDPRoute`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct UdpRoute {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: UdpRouteSpec,
}

/// `spec:` of a UDPRoute.
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

/// `gateway.networking.k8s.io/v1 ReferenceGrant`: objects of `from` may refer to objects of `to` in the grant's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ReferenceGrant {
    pub metadata: Metadata,
    pub spec: ReferenceGrantSpec,
}

/// `spec:` of a ReferenceGrant.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ReferenceGrantSpec {
    pub from: Vec<GrantFrom>,
    pub to: Vec<GrantTo>,
}

/// Who may refer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GrantFrom {
    pub group: String,
    pub kind: String,
    pub namespace: Namespace,
}

/// To what.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GrantTo {
    pub group: String,
    pub kind: String,
    /// `None`: all objects of the kind.
    #[serde(default)]
    pub name: Option<ObjectName>,
}

//! VirtualService and DestinationRule (`networking.istio.io`): the part of Istio's traffic API that
//! the mesh supports. The structs mirror the YAML; the compiler validates and interprets them.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use serde::{Deserialize, Deserializer};

use super::attempts::{HttpRetry, IstioDuration};
use super::cors::CorsPolicy;
use super::faults::{HttpFaultInjection, Percent};
use super::load_balancing::TrafficPolicy;
use super::mirrors::HttpMirrorPolicy;
use super::{Metadata, gateway_api};
use crate::ids::{Namespace, ObjectName};
use crate::program::Labels;

/// An object of kind VirtualService (`networking.istio.io`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct VirtualService {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: VirtualServiceSpec,
}

/// The content of `spec:` in a VirtualService.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VirtualServiceSpec {
    /// Hosts whose requests the object routes. In the mesh they are services: `reviews`,
    /// `reviews.ns` or `reviews.ns.svc.cluster.local`. An object without hosts is for others to
    /// delegate to.
    pub hosts: Vec<String>,
    /// Gateways that apply the object: Gateways of Istio, as `name` or `namespace/name`, and `mesh`
    /// for all clients in the mesh. An empty list means `mesh`.
    pub gateways: Vec<String>,
    /// Namespaces whose clients and Gateways apply the object; `.` is its own one. An empty list
    /// means all, as `*` does.
    pub export_to: Vec<String>,
    pub http: Vec<VirtualServiceRoute>,
    /// Rules for connections with TLS that Gateways pass through.
    pub tls: Vec<ConnectionRule>,
    /// Rules for other connections that Gateways relay, with TLS that they terminate or without it.
    pub tcp: Vec<ConnectionRule>,
}

/// One rule for connections whose bytes are relayed; rules are tried in the order written.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct ConnectionRule {
    /// Alternative matches. A rule of `tls` has at least one; of `tcp`, an empty list matches
    /// everything.
    #[serde(rename = "match")]
    pub matches: Vec<ConnectionMatch>,
    pub route: Vec<ConnectionDestination>,
}

/// A set of conditions on a connection that must all hold.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConnectionMatch {
    /// Server names, with or without a wildcard; of rules of `tls` only.
    pub sni_hosts: Vec<String>,
    /// Port that the client dialled.
    pub port: Option<NonZeroU16>,
    /// Gateways at which the match holds; an empty list means those of the object.
    pub gateways: Vec<String>,
}

/// One destination of connections and its weight.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ConnectionDestination {
    pub destination: Destination,
    /// Relative weight, as that of a destination of requests.
    #[serde(default, deserialize_with = "weight")]
    pub weight: Option<u32>,
}

/// One rule; rules are tried in the order written.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VirtualServiceRoute {
    pub name: Option<String>,
    /// Alternative matches; an empty list matches everything.
    #[serde(rename = "match")]
    pub matches: Vec<HttpMatchRequest>,
    pub route: Vec<HttpRouteDestination>,
    pub headers: Option<Headers>,
    pub rewrite: Option<HttpRewrite>,
    pub redirect: Option<HttpRedirect>,
    pub direct_response: Option<HttpDirectResponse>,
    pub timeout: Option<IstioDuration>,
    pub retries: Option<HttpRetry>,
    pub fault: Option<HttpFaultInjection>,
    pub cors_policy: Option<CorsPolicy>,
    pub mirror: Option<Destination>,
    pub mirror_percentage: Option<Percent>,
    /// The deprecated form of `mirror_percentage`.
    #[serde(alias = "mirror_percent")]
    pub mirror_percent: Option<i64>,
    pub mirrors: Vec<HttpMirrorPolicy>,
    /// Object whose rules apply to the requests of this one.
    pub delegate: Option<Delegate>,
}

/// Names a VirtualService without hosts.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Delegate {
    pub name: ObjectName,
    /// Namespace of the object; `None` means that of the rule.
    #[serde(default)]
    pub namespace: Option<Namespace>,
}

/// A response that sends the client to another URL.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRedirect {
    /// Path that takes the place of the request's, with a query that takes the place of the request's
    /// if one is written.
    pub uri: Option<String>,
    pub authority: Option<String>,
    pub port: Option<NonZeroU16>,
    /// How the port follows from the request: `FROM_PROTOCOL_DEFAULT` or `FROM_REQUEST_PORT`.
    pub derive_port: Option<String>,
    pub scheme: Option<String>,
    /// Status of the response; `None` means 301.
    pub redirect_code: Option<u16>,
}

/// A response with a fixed body.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct HttpDirectResponse {
    pub status: u16,
    pub body: Option<HttpBody>,
}

/// The body of a direct response, in one of two forms.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct HttpBody {
    pub string: Option<String>,
    /// The body as bytes, in base64.
    pub bytes: Option<String>,
}

/// Changes of the headers of requests and responses.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Headers {
    pub request: HeaderOperations,
    pub response: HeaderOperations,
}

/// Changes of headers, by header name.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct HeaderOperations {
    pub set: BTreeMap<String, String>,
    pub add: BTreeMap<String, String>,
    pub remove: Vec<String>,
}

/// Changes of the URL of a request.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpRewrite {
    /// New path, or what takes the place of the prefix that the match names.
    pub uri: Option<String>,
    /// Host that takes the place of the request's.
    pub authority: Option<String>,
    /// Replacement of parts of the path, in place of `uri`.
    pub uri_regex_rewrite: Option<UriRegexRewrite>,
}

/// Replaces all texts in a path that a regular expression matches.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct UriRegexRewrite {
    /// RE2 syntax. It may match any part of the path.
    #[serde(rename = "match")]
    pub pattern: String,
    /// Text that takes the place of each match, in which `\1` is the first group.
    pub rewrite: String,
}

/// A set of conditions that must all hold.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpMatchRequest {
    pub name: Option<String>,
    pub uri: Option<StringMatch>,
    /// Scheme that the client uses with the gateway.
    pub scheme: Option<StringMatch>,
    /// Exact and prefix conditions on the path hold in any case.
    pub ignore_uri_case: bool,
    pub method: Option<StringMatch>,
    pub authority: Option<StringMatch>,
    /// Conditions on headers. An empty match only requires that the header is present.
    pub headers: BTreeMap<String, StringMatch>,
    /// Conditions that must not hold for a header.
    pub without_headers: BTreeMap<String, StringMatch>,
    pub query_params: BTreeMap<String, StringMatch>,
    /// Port that the client dialled.
    pub port: Option<NonZeroU16>,
    /// Gateways at which the match holds; an empty list means those of the object.
    pub gateways: Vec<String>,
    /// Labels of the client's workload.
    pub source_labels: BTreeMap<String, String>,
    /// Namespace of the client's workload; an empty text means any.
    pub source_namespace: String,
}

/// A condition on a text. At most one of the three fields is set; none only requires presence.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct StringMatch {
    pub exact: Option<String>,
    pub prefix: Option<String>,
    /// RE2 syntax; the whole text must match.
    pub regex: Option<String>,
}

/// One destination and its weight.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct HttpRouteDestination {
    pub destination: Destination,
    /// Relative weight. `None` means everything for a single destination, and nothing if there are
    /// others.
    #[serde(default, deserialize_with = "weight")]
    pub weight: Option<u32>,
    /// Changes of the requests to this destination, and of their responses.
    #[serde(default)]
    pub headers: Option<Headers>,
}

fn weight<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    gateway_api::weight(deserializer).map(Some)
}

/// A service, or a subset of it that a DestinationRule names.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Destination {
    pub host: String,
    #[serde(default)]
    pub subset: Option<String>,
    #[serde(default)]
    pub port: Option<PortSelector>,
}

/// A port, selected by its number.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PortSelector {
    pub number: NonZeroU16,
}

/// An object of kind DestinationRule (`networking.istio.io`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DestinationRule {
    pub metadata: Metadata,
    pub spec: DestinationRuleSpec,
}

/// The content of `spec:` in a DestinationRule.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DestinationRuleSpec {
    pub host: String,
    #[serde(default)]
    pub traffic_policy: Option<TrafficPolicy>,
    #[serde(default)]
    pub subsets: Vec<Subset>,
}

/// A named subset of a service's workloads.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Subset {
    pub name: String,
    pub labels: Labels,
    /// Settings of the subset; each takes the place of the service's.
    pub traffic_policy: Option<TrafficPolicy>,
}

//! VirtualService and DestinationRule (`networking.istio.io`), the part of Istio's traffic API that the mesh follows today.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use serde::Deserialize;

use super::Metadata;
use crate::program::Labels;

/// `networking.istio.io VirtualService`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct VirtualService {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: VirtualServiceSpec,
}

/// `spec:` of a VirtualService.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct VirtualServiceSpec {
    /// Services whose requests this routes: `reviews`, `reviews.ns` or `reviews.ns.svc.cluster.local`.
    pub hosts: Vec<String>,
    /// Empty is `mesh`, the only one there is.
    pub gateways: Vec<String>,
    pub http: Vec<HttpRoute>,
}

/// One rule, tried in the order written.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct HttpRoute {
    pub name: Option<String>,
    /// Empty: everything matches.
    #[serde(rename = "match")]
    pub matches: Vec<HttpMatchRequest>,
    pub route: Vec<HttpRouteDestination>,
}

/// All given conditions must hold.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpMatchRequest {
    pub name: Option<String>,
    pub uri: Option<StringMatch>,
    pub method: Option<StringMatch>,
    pub authority: Option<StringMatch>,
    /// An empty match asks only that the header be there.
    pub headers: BTreeMap<String, StringMatch>,
    pub query_params: BTreeMap<String, StringMatch>,
    /// The port the client dialled.
    pub port: Option<NonZeroU16>,
}

/// At most one of the three; none asks only for presence.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct StringMatch {
    pub exact: Option<String>,
    pub prefix: Option<String>,
    /// RE2 syntax; the whole text must match.
    pub regex: Option<String>,
}

/// One destination and its share.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct HttpRouteDestination {
    pub destination: Destination,
    /// `None`: all of it for a single destination, nothing beside others.
    #[serde(default)]
    pub weight: Option<u32>,
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

/// A port by number.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PortSelector {
    pub number: NonZeroU16,
}

/// `networking.istio.io DestinationRule`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DestinationRule {
    pub metadata: Metadata,
    pub spec: DestinationRuleSpec,
}

/// `spec:` of a DestinationRule.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DestinationRuleSpec {
    pub host: String,
    #[serde(default)]
    pub subsets: Vec<Subset>,
}

/// A named part of a service's workloads.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Subset {
    pub name: String,
    pub labels: Labels,
}

//! Mirrors as HTTPRoutes and GRPCRoutes (`gateway.networking.k8s.io`) and VirtualServices
//! (`networking.istio.io`) write them. The structs mirror the YAML; the compiler validates and interprets them.

use serde::Deserialize;

use super::faults::Percent;
use super::gateway_api::BackendRef;
use super::istio::Destination;

/// A filter of an HTTPRoute's or GRPCRoute's rule that copies requests.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HttpRequestMirrorFilter {
    pub backend_ref: BackendRef,
    /// Part of the requests, from 0 to 100; `None` means all, unless `fraction` is written.
    #[serde(default)]
    pub percent: Option<i64>,
    #[serde(default)]
    pub fraction: Option<MirrorFraction>,
}

/// A part of the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct MirrorFraction {
    pub numerator: i64,
    /// The whole; `None` means 100.
    #[serde(default)]
    pub denominator: Option<i64>,
}

/// One of several mirrors of a VirtualService's rule.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct HttpMirrorPolicy {
    pub destination: Destination,
    /// Part of the requests; `None` means all.
    #[serde(default)]
    pub percentage: Option<Percent>,
}

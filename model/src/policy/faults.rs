//! Faults that a VirtualService injects (`networking.istio.io`), and the percentages of Istio. The
//! structs mirror the YAML; the compiler validates and interprets them.

use serde::Deserialize;

use super::attempts::IstioDuration;
use crate::request_fraction::RequestFraction;

/// Faults of the requests of a VirtualService's rule.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct HttpFaultInjection {
    pub delay: Option<HttpFaultDelay>,
    pub abort: Option<HttpFaultAbort>,
}

/// A delay of requests before they are forwarded.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpFaultDelay {
    pub fixed_delay: Option<IstioDuration>,
    /// Part of the requests; `None` means no request.
    pub percentage: Option<Percent>,
    /// The deprecated form of `percentage`.
    pub percent: Option<i64>,
}

/// A response in place of the endpoint's.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpFaultAbort {
    pub http_status: Option<i64>,
    /// Name of a gRPC status, such as `UNAVAILABLE`.
    pub grpc_status: Option<String>,
    /// Part of the requests; `None` means no request.
    pub percentage: Option<Percent>,
}

/// A percentage from 0 to 100 that may have a fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Percent {
    pub value: PercentValue,
}

impl Default for Percent {
    fn default() -> Self {
        Self {
            value: PercentValue(RequestFraction::NONE),
        }
    }
}

/// The number of a [`Percent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "f64")]
pub struct PercentValue(pub RequestFraction);

impl TryFrom<f64> for PercentValue {
    type Error = String;

    fn try_from(percent: f64) -> Result<Self, String> {
        RequestFraction::of_percent(percent)
            .map(Self)
            .ok_or_else(|| {
                format!("{percent} is not a percentage; fix: write a number from 0 to 100")
            })
    }
}

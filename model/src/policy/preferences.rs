//! Canal's objects about where and in which order traffic is handled: OffloadPreference and
//! TrafficPriority. They change no answer: without them traffic takes the usual path, in one class.

use std::num::{NonZeroU8, NonZeroU16, NonZeroU32};

use serde::Deserialize;

use super::Metadata;
use super::gateway_api::{HttpRouteMatch, Method, PathCondition, ValueCondition};
use super::istio_security::WorkloadSelector;
use crate::ids::{Namespace, ObjectName};

/// `canal.mesh/v1 OffloadPreference`: which faster targets may handle traffic in place of node proxy
/// and gateway, and how much traffic its owner expects.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct OffloadPreference {
    pub metadata: Metadata,
    pub spec: OffloadPreferenceSpec,
}

/// `spec:` of an OffloadPreference. Exactly one of `selector`, `servicePort` and `listener` is set.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OffloadPreferenceSpec {
    /// Workloads of the object's namespace.
    #[serde(default)]
    pub selector: Option<WorkloadSelector>,
    #[serde(default)]
    pub service_port: Option<ServicePortRef>,
    #[serde(default)]
    pub listener: Option<ListenerRef>,
    #[serde(default)]
    pub targets: OffloadTargets,
    /// Whether a target may decide once for a whole connection, where a gateway decides for each
    /// request.
    #[serde(default)]
    pub per_connection: bool,
    /// Number of concurrent sessions that the owner expects.
    #[serde(default)]
    pub expected_sessions: Option<NonZeroU32>,
    /// Requests per second that the owner expects.
    #[serde(default)]
    pub expected_rate: Option<NonZeroU32>,
}

/// A port of a Service in the object's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ServicePortRef {
    pub name: ObjectName,
    pub port: NonZeroU16,
}

/// Listeners of a Gateway of Gateway API in the object's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListenerRef {
    pub gateway: ObjectName,
    /// Name of one listener; `None` means all listeners.
    #[serde(default)]
    pub section_name: Option<String>,
}

/// What an OffloadPreference says about each target. A target that it does not name is left to the
/// others; a target that none allows is never used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OffloadTargets {
    pub kernel_path: Option<OffloadPermission>,
    pub shortcut: Option<OffloadPermission>,
    pub switch: Option<OffloadPermission>,
    pub nic: Option<OffloadPermission>,
}

impl OffloadTargets {
    /// Returns the targets with their names in YAML.
    pub fn named(self) -> [(&'static str, Option<OffloadPermission>); 4] {
        [
            ("kernelPath", self.kernel_path),
            ("shortcut", self.shortcut),
            ("switch", self.switch),
            ("nic", self.nic),
        ]
    }
}

/// Whether a target may handle traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum OffloadPermission {
    Never,
    Allowed,
}

/// `canal.mesh/v1 TrafficPriority`: the priority class of requests of one tenant. Classes order the
/// tenant's own traffic only.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TrafficPriority {
    pub metadata: Metadata,
    pub spec: TrafficPrioritySpec,
}

/// `spec:` of a TrafficPriority; an empty one changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrafficPrioritySpec {
    /// The first rule that matches decides; requests that none matches are `normal`.
    #[serde(default)]
    pub rules: Vec<PriorityRule>,
    /// Principals whose requests may name their own class, as in an AuthorizationPolicy.
    #[serde(default)]
    pub asserted_by: Vec<String>,
    /// Percentage of the tenant's requests that may be `high`; `None` means 30.
    #[serde(default)]
    pub high_share: Option<NonZeroU8>,
}

/// A rule of a TrafficPriority. Without `matches` it matches all requests.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct PriorityRule {
    pub matches: Vec<PriorityMatch>,
    pub class: PriorityClass,
}

/// Conditions that must all hold.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PriorityMatch {
    /// Host of the request; `*.example.com` matches all names below it.
    pub host: Option<String>,
    pub path: Option<PathCondition>,
    pub method: Option<Method>,
    pub headers: Vec<ValueCondition>,
    /// Source workloads in the object's namespace.
    pub selector: Option<WorkloadSelector>,
    /// Principal of the client, as in an AuthorizationPolicy.
    pub principal: Option<String>,
    pub listener: Option<ListenerRef>,
    /// Service that the request is for.
    pub service: Option<ServiceRef>,
}

impl PriorityMatch {
    /// Returns the conditions that routes have too.
    pub fn of_route(&self) -> HttpRouteMatch {
        HttpRouteMatch {
            path: self.path.clone(),
            method: self.method,
            headers: self.headers.clone(),
            query_params: Vec::new(),
        }
    }
}

/// A Service, by default in the object's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ServiceRef {
    pub name: ObjectName,
    #[serde(default)]
    pub namespace: Option<Namespace>,
}

/// The priority class of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PriorityClass {
    /// The mesh may measure the route and lower it to `low`; it never raises it to `high`.
    Auto,
    /// Requests may wait without limit, but they do not starve.
    Low,
    #[default]
    Normal,
    High,
}

impl PriorityClass {
    /// Returns the value of `class:` in YAML.
    pub fn as_str(self) -> &'static str {
        match self {
            PriorityClass::Auto => "auto",
            PriorityClass::Low => "low",
            PriorityClass::Normal => "normal",
            PriorityClass::High => "high",
        }
    }
}

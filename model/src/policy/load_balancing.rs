//! The load balancer of a DestinationRule's traffic policy (`networking.istio.io`). The structs
//! mirror the YAML; the compiler validates and interprets them.

use serde::Deserialize;

use super::attempts::GoDuration;
use super::istio::PortSelector;

/// How requests to a service, or to a subset of it, are spread.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TrafficPolicy {
    pub load_balancer: Option<LoadBalancerSettings>,
    /// Settings of single ports, each in the place of all settings of the service or subset.
    pub port_level_settings: Vec<PortTrafficPolicy>,
}

impl TrafficPolicy {
    /// Returns the position of the settings of this port, with the settings, if it has its own.
    pub fn of_port(&self, port: u16) -> Option<(usize, &PortTrafficPolicy)> {
        let is_of =
            |it: &PortTrafficPolicy| it.port.as_ref().map(|it| it.number.get()) == Some(port);
        let mut settings = self.port_level_settings.iter().enumerate();
        settings.find(|(_, settings)| is_of(settings))
    }
}

/// The traffic policy of one port.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PortTrafficPolicy {
    pub port: Option<PortSelector>,
    pub load_balancer: Option<LoadBalancerSettings>,
}

/// A load balancer: one of the two fields.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LoadBalancerSettings {
    /// Name of a load balancer without settings, such as `ROUND_ROBIN`.
    pub simple: Option<String>,
    pub consistent_hash: Option<ConsistentHashLb>,
}

/// A load balancer that hashes a part of the request: one of the first four fields.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConsistentHashLb {
    pub http_header_name: Option<String>,
    pub http_cookie: Option<HttpCookie>,
    pub use_source_ip: bool,
    pub http_query_parameter_name: Option<String>,
    pub ring_hash: Option<RingHash>,
    pub maglev: Option<Maglev>,
    /// Deprecated form of `ring_hash`; 0 means the default.
    pub minimum_ring_size: u64,
}

/// A cookie, whose value is hashed for the load balancer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct HttpCookie {
    pub name: String,
    pub path: String,
    /// Lifetime of a cookie that the gateway generates; `None` generates none.
    pub ttl: Option<GoDuration>,
}

/// Settings of a ring. Zero means the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RingHash {
    pub minimum_ring_size: u64,
}

/// Settings of a Maglev table. Zero means the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Maglev {
    pub table_size: u64,
}

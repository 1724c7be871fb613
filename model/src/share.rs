//! Limits that tenants share, and each tenant's part of them: one table of names, units, defaults
//! and bounds. It contains no counter; `canal_runtime::TenantLimit` does the counting. Start at
//! [`ShareKind`].

mod fit;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

pub use fit::{MapDemand, Omission, decide_omitted};

/// One tenant's part of a limit: an amount, or a percentage of the whole limit. Written like
/// Kubernetes' `maxSurge`: `4096` or `"25%"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Share {
    /// An amount in the unit of the limit, such as a count or bytes.
    Amount(u64),
    /// A percentage of the whole limit, 1 to 100.
    Percent(u8),
}

/// The error for a text or number that is not a valid share.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "share {text:?} is neither a whole number of at least 1 nor a percentage from 1% to 100%; fix: write for example 4096 or \"25%\""
)]
pub struct ShareFormatError {
    text: String,
}

impl Share {
    /// The largest amount that may be written: 2^53, which every YAML and JSON parser represents
    /// exactly.
    pub const AMOUNT_MAX: u64 = 1 << 53;

    /// Returns the part of a limit of `whole`. A percentage gives at least 1, so that a small limit
    /// does not exclude a tenant.
    pub fn of(self, whole: u64) -> u64 {
        match self {
            Self::Amount(amount) => amount.min(whole),
            // Whole and remainder are multiplied separately, because `whole * percent` may
            // overflow.
            Self::Percent(percent) => {
                (whole / 100 * u64::from(percent) + whole % 100 * u64::from(percent) / 100).max(1)
            }
        }
    }
}

impl FromStr for Share {
    type Err = ShareFormatError;

    fn from_str(text: &str) -> Result<Self, ShareFormatError> {
        let share = match text.strip_suffix('%') {
            Some(percent) => percent
                .parse()
                .ok()
                .filter(|p| (1..=100).contains(p))
                .map(Self::Percent),
            None => text
                .parse()
                .ok()
                .filter(|a| (1..=Self::AMOUNT_MAX).contains(a))
                .map(Self::Amount),
        };
        share.ok_or_else(|| ShareFormatError {
            text: text.chars().take(64).collect(),
        })
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Amount(amount) => write!(f, "{amount}"),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

impl<'de> serde::Deserialize<'de> for Share {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// Accepts a number or a text, like Kubernetes' IntOrString.
        struct IntOrString;
        impl serde::de::Visitor<'_> for IntOrString {
            type Value = Share;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, or a percentage such as \"25%\"")
            }
            fn visit_u64<E: serde::de::Error>(self, n: u64) -> Result<Share, E> {
                n.to_string().parse().map_err(E::custom)
            }
            fn visit_i64<E: serde::de::Error>(self, n: i64) -> Result<Share, E> {
                n.to_string().parse().map_err(E::custom)
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Share, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(IntOrString)
    }
}

/// Defines [`ShareKind`] from the table. Columns: variant, YAML key (only for limits that tenants
/// share), metric label, unit, default share, description.
macro_rules! share_kinds {
    (
        tenants { $($variant:ident, $key:literal, $label:literal, $unit:literal, $default:expr, $what:literal;)* }
        networks { $($network:ident, $network_label:literal, $network_unit:literal, $network_default:expr, $network_what:literal;)* }
    ) => {
        /// A limit that tenants share. The YAML key is used under `spec.shares` of a Tenant, the
        /// label in metrics and in `canal status`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum ShareKind {
            $(#[doc = $what] $variant,)*
            $(#[doc = $network_what] $network,)*
        }

        impl ShareKind {
            /// All kinds that a Tenant may list under `spec.shares`, in the order of the table.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];
            /// The kinds that ranges of source addresses share; no Tenant can list them.
            pub const OF_NETWORKS: &[Self] = &[$(Self::$network,)*];

            /// Returns the key under `spec.shares` of a Tenant, which is also the name on the wire.
            /// It is empty for limits that networks share.
            pub fn key(self) -> &'static str {
                match self { $(Self::$variant => $key,)* $(Self::$network => "",)* }
            }

            /// Returns the value of the metric label `limit`.
            pub fn label(self) -> &'static str {
                match self { $(Self::$variant => $label,)* $(Self::$network => $network_label,)* }
            }

            /// Returns the unit of amounts.
            pub fn unit(self) -> &'static str {
                match self { $(Self::$variant => $unit,)* $(Self::$network => $network_unit,)* }
            }

            /// Returns the share of a tenant whose Tenant object does not list one.
            pub fn default_share(self) -> Share {
                match self { $(Self::$variant => $default,)* $(Self::$network => $network_default,)* }
            }

            /// Returns a description of the shared limit.
            pub fn description(self) -> &'static str {
                match self { $(Self::$variant => $what,)* $(Self::$network => $network_what,)* }
            }
        }
    };
}

// Default shares are chosen, and nobody measured them. With 25 %, three tenants can have all of
// their shares at once and a fourth a third of it (docs/design/0007-fairness.md). One tenant may
// have more where it alone is often busy: connections and requests of a gateway, streams of its
// nodes. It has less where permits last long (certificates, series) or many tenants are served at
// once (key servers: an eighth). A node belongs to one tenant, so that its buffers have 100 %.
// Stored state has amounts: a percentage would change with the provider's flags.
share_kinds! {
    tenants {
        GatewayConnections, "gatewayConnections", "gateway_connections", "connections", Share::Percent(50),
            "Connections that a gateway process has accepted.";
        GatewayUnauthenticated, "gatewayUnauthenticated", "gateway_unauthenticated_connections", "connections", Share::Percent(25),
            "Connections of a gateway process that have neither authenticated nor sent a complete request head.";
        GatewayHandshakes, "gatewayHandshakes", "gateway_handshakes", "handshakes", Share::Percent(25),
            "TLS handshakes in progress in a gateway process.";
        GatewayRequests, "gatewayRequests", "gateway_requests", "requests", Share::Percent(40),
            "Requests and tunnels in flight in a gateway process.";
        GatewayDelayedRequests, "gatewayDelayedRequests", "gateway_delayed_requests", "requests", Share::Percent(10),
            "Requests in flight in a gateway process that faults of rules delay.";
        GatewayMirroredRequests, "gatewayMirroredRequests", "gateway_mirrored_requests", "requests", Share::Percent(25),
            "Copies of requests that a gateway process sends to mirrors at the same time.";
        GatewayBufferBytes, "gatewayBufferBytes", "gateway_buffer_bytes", "bytes", Share::Percent(25),
            "Bytes that a gateway process holds for readers that do not read.";
        GatewayBodyBytes, "gatewayBodyBytes", "gateway_body_bytes", "bytes", Share::Percent(25),
            "Bytes of request bodies that a gateway process holds for external authorizers.";
        NodeBufferBytes, "nodeBufferBytes", "node_buffer_bytes", "bytes", Share::Percent(100),
            "Bytes that a node's proxy holds for readers that do not read.";
        DnsConnections, "dnsConnections", "dns_connections", "connections", Share::Percent(25),
            "TCP connections of DNS clients to a gateway process.";
        GatewayCpu, "gatewayCpu", "gateway_cpu", "weight", Share::Amount(100),
            "The weight of a tenant's ready connections in the deficit round robin of a gateway worker.";
        AccessLogBytes, "accessLogBytes", "access_log_bytes", "bytes", Share::Percent(25),
            "Bytes of access log lines that wait for the disk at one worker of a data plane.";
        MetricSeries, "metricSeries", "metric_series", "series", Share::Percent(10),
            "Series of one metric family of a process.";
        Certificates, "certificates", "certificates", "certificates", Share::Percent(10),
            "Unexpired certificates on record at the controller.";
        ControllerConnections, "controllerConnections", "controller_connections", "connections", Share::Percent(25),
            "Connections to the controller.";
        ControllerUnauthenticated, "controllerUnauthenticated", "controller_unauthenticated_connections", "connections", Share::Percent(10),
            "Connections to the controller that have not sent a valid token.";
        ControllerStreams, "controllerStreams", "controller_streams", "streams", Share::Percent(40),
            "Streams that a tenant's data planes have open at the controller.";
        SubscriptionBytes, "subscriptionBytes", "subscription_bytes", "bytes", Share::Percent(25),
            "Bytes that a tenant's data planes are charged for resource names that the controller does not have.";
        ConfigurationBytes, "configurationBytes", "configuration_bytes", "bytes", Share::Amount(8 << 20),
            "Bytes of a tenant's objects in the controller's store.";
        CompiledBytes, "compiledBytes", "compiled_bytes", "bytes", Share::Amount(24 << 20),
            "Bytes of the resources that are compiled from a tenant's objects.";
        CompiledResources, "compiledResources", "compiled_resources", "resources", Share::Amount(30_000),
            "Resources that are compiled from a tenant's objects; each rule of a route is one.";
        RouteTableBytes, "routeTableBytes", "route_table_bytes", "bytes", Share::Amount(128 << 20),
            "Bytes that the route tables of a tenant's services take in each gateway, with their regular expressions.";
        QueuedChanges, "queuedChanges", "queued_changes", "changes", Share::Percent(10),
            "Changes that wait for the controller's writer or are being compiled for it.";
        QueuedChangeBytes, "queuedChangeBytes", "queued_change_bytes", "bytes", Share::Percent(25),
            "Bytes of the changes that wait for the controller's writer.";
        IngressAddresses, "ingressAddresses", "ingress_addresses", "addresses", Share::Amount(16),
            "Gateways of a tenant that have an address on a network of clients outside the mesh.";
        EdgeMapEntries, "edgeMapEntries", "edge_map_entries", "entries", Share::Percent(25),
            "Entries of one BPF map of an edge or a redirector.";
        KeyServerRequests, "keyServerRequests", "key_server_requests", "requests", Share::Percent(13),
            "Handshakes and signatures that one gateway has in progress at a key server.";
        Observations, "observations", "observations", "observations", Share::Percent(25),
            "Taps, logs, metrics and dumps that operators read at once, at the controller and at one data plane.";
    }
    networks {
        KeyServerUnauthenticated, "key_server_unauthenticated_connections", "connections", Share::Percent(50),
            "Connections to a key server whose requester has not authenticated, by source network.";
    }
}

/// The shares that the provider wrote for one tenant. Limits that are not listed have the default
/// share.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Shares(BTreeMap<ShareKind, Share>);

impl Shares {
    /// Returns the share of one limit: the tenant's own, else the default.
    pub fn get(&self, kind: ShareKind) -> Share {
        self.0
            .get(&kind)
            .copied()
            .unwrap_or_else(|| kind.default_share())
    }

    /// Sets the share of one limit.
    pub fn set(&mut self, kind: ShareKind, share: Share) {
        self.0.insert(kind, share);
    }

    /// Iterates over the shares that are listed, in the order of the table.
    pub fn iter(&self) -> impl Iterator<Item = (ShareKind, Share)> {
        self.0.iter().map(|(kind, share)| (*kind, *share))
    }

    /// Returns the kind with the given key of `spec.shares`.
    pub fn kind(key: &str) -> Option<ShareKind> {
        ShareKind::ALL
            .iter()
            .copied()
            .find(|kind| kind.key() == key)
    }
}

impl<'de> serde::Deserialize<'de> for Shares {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let written = BTreeMap::<String, Share>::deserialize(deserializer)?;
        let mut shares = Self::default();
        for (key, share) in written {
            let kind = Self::kind(&key).ok_or_else(|| {
                let known: Vec<_> = ShareKind::ALL.iter().map(|kind| kind.key()).collect();
                D::Error::custom(format!(
                    "{key:?} is not a limit that tenants share; fix: write one of {}",
                    known.join(", ")
                ))
            })?;
            shares.set(kind, share);
        }
        Ok(shares)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_read_and_written_alike_and_bad_ones_are_refused() {
        for (text, share) in [
            ("1", Share::Amount(1)),
            ("4096", Share::Amount(4096)),
            ("25%", Share::Percent(25)),
            ("100%", Share::Percent(100)),
        ] {
            assert_eq!(text.parse(), Ok(share));
            assert_eq!(share.to_string(), text);
        }
        for bad in [
            "",
            "0",
            "-1",
            "0%",
            "101%",
            "25 %",
            "2.5%",
            "%",
            "many",
            "9007199254740993",
        ] {
            let error = bad.parse::<Share>().unwrap_err().to_string();
            assert!(error.contains("fix: write"), "{bad}: {error}");
        }
    }

    #[test]
    fn a_share_of_a_limit_is_between_one_and_the_whole() {
        for (share, whole, expected) in [
            (Share::Percent(25), 1000, 250),
            (Share::Percent(1), 10, 1),
            (Share::Percent(100), u64::MAX, u64::MAX),
            (Share::Percent(50), 3, 1),
            (Share::Amount(10), 5, 5),
            (Share::Amount(10), 50, 10),
        ] {
            assert_eq!(share.of(whole), expected, "{share} of {whole}");
        }
    }

    #[test]
    fn keys_and_labels_of_limits_are_unique() {
        let all = || ShareKind::ALL.iter().chain(ShareKind::OF_NETWORKS);
        for name in [ShareKind::key, ShareKind::label] {
            let names: std::collections::BTreeSet<_> =
                ShareKind::ALL.iter().map(|kind| name(*kind)).collect();
            assert_eq!(names.len(), ShareKind::ALL.len());
        }
        let labels: std::collections::BTreeSet<_> = all().map(|kind| kind.label()).collect();
        assert_eq!(labels.len(), all().count());
    }

    #[test]
    fn limits_without_tenant_shares_cannot_be_configured() {
        for key in ["nodeConnections", "keyServerUnauthenticated", ""] {
            assert_eq!(Shares::kind(key), None, "{key}");
        }
        assert_eq!(
            Shares::kind("keyServerRequests"),
            Some(ShareKind::KeyServerRequests)
        );
    }
}

//! Limits of the process that tenants share: their configuration and their metrics.
//!
//! The engine takes the permits: at accept, when a connection authenticates, and where windows grow. Start with
//! [`SharedLimits`].

use canal_gateway_config::Snapshot;
use canal_model::share::{Share, ShareKind};
use canal_runtime::limits::show_shares;
use canal_runtime::metrics::{MetricFamily, Registry, SharedCounter, SharedGauge};
use canal_runtime::{RevocationOrder, TenantLimit, TenantLimitConfig};

use crate::limits::GatewayLimits;

/// Limits that all workers share. Each is locked when a connection begins, authenticates and ends,
/// never per request.
pub struct SharedLimits {
    pub connections: TenantLimit,
    pub unauthenticated: TenantLimit,
    pub handshakes: TenantLimit,
    pub buffer_bytes: TenantLimit,
    /// The gauge `canal_limit_used{limit="connections"}`, which counts all tenants together.
    used: SharedGauge,
    refused: SharedCounter,
}

impl SharedLimits {
    pub fn new(limits: &GatewayLimits, registry: &Registry) -> Self {
        // There is no reserve: readiness probes and admin requests have listeners of their own, and
        // `GatewayLimits::within` leaves files for them.
        let limit = |kind, capacity| {
            TenantLimit::new(TenantLimitConfig {
                kind,
                capacity,
                reserve: 0,
                revocation_order: RevocationOrder::OldestFirst,
            })
        };
        let connections = limit(ShareKind::GatewayConnections, limits.connections);
        connections.set_default_share(Share::Amount(limits.tenant_connections));
        let labels = &["limit"];
        let gauge = |name, help| {
            registry
                .gauges(MetricFamily::new(name, help, labels))
                .shared(&["connections"])
        };
        gauge("canal_limit_max", "Maximum of a named limit.")
            .set(i64::try_from(limits.connections).unwrap_or(i64::MAX));
        let refused = MetricFamily::new(
            "canal_limit_refused_total",
            "Refusals because a named limit was reached.",
            labels,
        );
        let shared = Self {
            connections,
            unauthenticated: limit(ShareKind::GatewayUnauthenticated, limits.unauthenticated),
            handshakes: limit(ShareKind::GatewayHandshakes, limits.handshakes),
            buffer_bytes: limit(ShareKind::GatewayBufferBytes, limits.buffer_bytes),
            used: gauge("canal_limit_used", "Amount of a named limit in use."),
            refused: registry.counters(refused).shared(&["connections"]),
        };
        shared
            .all()
            .into_iter()
            .for_each(|limit| show_shares(registry, limit));
        shared
    }

    fn all(&self) -> [&TenantLimit; 4] {
        [
            &self.connections,
            &self.unauthenticated,
            &self.handshakes,
            &self.buffer_bytes,
        ]
    }

    /// Applies the shares that the provider set for tenants.
    pub fn set_shares(&self, snapshot: &Snapshot, registry: &Registry) {
        registry.set_shares(
            snapshot
                .tenants()
                .map(|tenant| (&tenant.name, &*tenant.shares)),
        );
        for limit in self.all() {
            limit.set_shares(
                snapshot
                    .tenants()
                    .map(|tenant| (&tenant.name, &*tenant.shares)),
            );
        }
    }

    /// Counts a connection that was refused by the limit of all tenants together.
    pub fn refused(&self) {
        self.refused.inc();
    }

    /// Updates the metrics; called once per second.
    pub fn show(&self) {
        self.used
            .set(i64::try_from(self.connections.used()).unwrap_or(i64::MAX));
    }
}

//! The limits of the process that tenants share, how they are set up, and what of them is shown. Who takes from them, and when, is decided
//! in [`crate::accept`], [`crate::permit`] and where windows grow.

use canal_kit::limits::show_shares;
use canal_kit::metrics::{Family, Registry, SharedCounter, SharedGauge};
use canal_model::share::{Share, ShareKind};
use canal_runtime::{GiveWay, TenantLimit, TenantLimitConfig};

use crate::config::Limits;
use crate::snapshot::Snapshot;

/// The limits that all workers share. Each is locked when a connection begins, proves itself and ends, never per request.
pub(crate) struct SharedLimits {
    pub(crate) connections: TenantLimit,
    pub(crate) unauthenticated: TenantLimit,
    pub(crate) handshakes: TenantLimit,
    pub(crate) buffer_bytes: TenantLimit,
    /// `canal_limit_*{limit="connections"}`, which counts all tenants together.
    used: SharedGauge,
    refused: SharedCounter,
}

impl SharedLimits {
    pub(crate) fn new(limits: &Limits, registry: &Registry) -> Self {
        // The reserve is not in here: probes and admin requests come in on listeners of their own, and `Limits::within` leaves them files.
        let limit = |kind, capacity| TenantLimit::new(TenantLimitConfig { kind, capacity, reserve: 0, give_way: GiveWay::Oldest });
        let connections = limit(ShareKind::GatewayConnections, limits.connections);
        connections.set_default_share(Share::Amount(limits.tenant_connections));
        let labels = &["limit"];
        let gauge = |name, help| registry.gauges(Family::new(name, help, labels)).shared(&["connections"]);
        gauge("canal_limit_max", "The most a named limit allows.").set(i64::try_from(limits.connections).unwrap_or(i64::MAX));
        let refused = Family::new("canal_limit_refused_total", "Refusals because a named limit was reached.", labels);
        let shared = Self {
            connections,
            unauthenticated: limit(ShareKind::GatewayUnauthenticated, limits.unauthenticated),
            handshakes: limit(ShareKind::GatewayHandshakes, limits.handshakes),
            buffer_bytes: limit(ShareKind::GatewayBufferBytes, limits.buffer_bytes),
            used: gauge("canal_limit_used", "How much of a named limit is taken."),
            refused: registry.counters(refused).shared(&["connections"]),
        };
        shared.all().into_iter().for_each(|limit| show_shares(registry, limit));
        shared
    }

    fn all(&self) -> [&TenantLimit; 4] {
        [&self.connections, &self.unauthenticated, &self.handshakes, &self.buffer_bytes]
    }

    /// Takes over what the provider wrote for tenants.
    pub(crate) fn set_shares(&self, snapshot: &Snapshot, registry: &Registry) {
        registry.set_shares(snapshot.tenants().map(|tenant| (&tenant.name, &*tenant.shares)));
        for limit in self.all() {
            limit.set_shares(snapshot.tenants().map(|tenant| (&tenant.name, &*tenant.shares)));
        }
    }

    /// Counts a connection that the limit of all tenants together refused.
    pub(crate) fn refused(&self) {
        self.refused.inc();
    }

    /// Brings the metrics up to date; called once a second.
    pub(crate) fn show(&self) {
        self.used.set(i64::try_from(self.connections.used()).unwrap_or(i64::MAX));
    }
}

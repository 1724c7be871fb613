//! The limits of the process that tenants share, how they are set up, and what of them is shown. Who takes from them, and when, is decided
//! in [`crate::accept`], [`crate::permit`] and where windows grow.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use canal_kit::metrics::{Counters, Family, Gauges, Registry, SharedCounter, SharedGauge};
use canal_model::share::{Share, ShareKind};
use canal_runtime::{GiveWay, ShareHolder, ShareUsage, TenantLimit, TenantLimitConfig};

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
    shown: ShareMetrics,
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
        Self {
            connections,
            unauthenticated: limit(ShareKind::GatewayUnauthenticated, limits.unauthenticated),
            handshakes: limit(ShareKind::GatewayHandshakes, limits.handshakes),
            buffer_bytes: limit(ShareKind::GatewayBufferBytes, limits.buffer_bytes),
            used: gauge("canal_limit_used", "How much of a named limit is taken."),
            refused: registry.counters(refused).shared(&["connections"]),
            shown: ShareMetrics::new(registry),
        }
    }

    fn all(&self) -> [&TenantLimit; 4] {
        [&self.connections, &self.unauthenticated, &self.handshakes, &self.buffer_bytes]
    }

    /// Takes over what the provider wrote for tenants.
    pub(crate) fn set_shares(&self, snapshot: &Snapshot) {
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
        self.all().into_iter().for_each(|limit| self.shown.show(limit));
    }
}

/// What each tenant uses of each limit, as metrics.
struct ShareMetrics {
    used: Gauges,
    max: Gauges,
    refused: Counters,
    revoked: Counters,
    shown: Mutex<HashMap<(ShareKind, ShareHolder), ShownShare>>,
}

/// The handles of one holder's share of one limit.
struct ShownShare {
    used: SharedGauge,
    max: SharedGauge,
    refused: SharedCounter,
    revoked: SharedCounter,
    /// The totals that were added to the counters so far.
    totals: (u64, u64),
}

impl ShareMetrics {
    fn new(registry: &Registry) -> Self {
        let family = |name, help| Family::new(name, help, &["limit", "tenant"]);
        Self {
            used: registry.gauges(family("canal_share_used", "How much of a shared limit a tenant has taken.")),
            max: registry.gauges(family("canal_share_max", "The most that a tenant may take of a shared limit.")),
            refused: registry.counters(family("canal_share_refused_total", "What a shared limit refused a tenant.")),
            revoked: registry.counters(family("canal_share_revoked_total", "What a tenant had to give back of a shared limit.")),
            shown: Mutex::default(),
        }
    }

    fn show(&self, limit: &TenantLimit) {
        let usage = limit.usage();
        let label = usage.kind.label();
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        for ((_, holder), share) in shown.iter().filter(|((kind, _), _)| *kind == usage.kind) {
            if !usage.holders.iter().any(|u| u.holder == *holder) {
                share.used.set(0);
            }
        }
        for u in &usage.holders {
            let holder = u.holder.to_string();
            let labels = [label, &holder];
            let made = || ShownShare {
                used: self.used.shared(&labels),
                max: self.max.shared(&labels),
                refused: self.refused.shared(&labels),
                revoked: self.revoked.shared(&labels),
                totals: (0, 0),
            };
            shown.entry((usage.kind, u.holder.clone())).or_insert_with(made).set(u);
        }
    }
}

impl ShownShare {
    fn set(&mut self, usage: &ShareUsage) {
        let amount = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        self.used.set(amount(usage.used));
        self.max.set(amount(usage.max));
        // A holder that was forgotten begins at nothing again; its counters go on.
        self.refused.add(usage.refused.checked_sub(self.totals.0).unwrap_or(usage.refused));
        self.revoked.add(usage.revoked.checked_sub(self.totals.1).unwrap_or(usage.revoked));
        self.totals = (usage.refused, usage.revoked);
    }
}

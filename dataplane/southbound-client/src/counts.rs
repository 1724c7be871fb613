//! Metrics of the subscription, with their names and help texts.

use canal_runtime::metrics::{CounterFamily, MetricFamily, Registry, SharedCounter, SharedGauge};

/// Reason of a stream that the controller ended because a limit is full.
pub(super) const EXHAUSTED: &str = "exhausted";

pub(super) struct SubscriptionCounters {
    connected: SharedGauge,
    generation: SharedGauge,
    updates: CounterFamily,
    nacks: CounterFamily,
    refused: CounterFamily,
    closed: SharedGauge,
    other_store: SharedGauge,
    stores_replaced: SharedCounter,
    reconnects: CounterFamily,
    snapshot_refused: CounterFamily,
    snapshot_writes: CounterFamily,
}

impl SubscriptionCounters {
    pub(super) fn new(r: &Registry) -> Self {
        let gauge = |name, help| r.gauges(MetricFamily::new(name, help, &[])).shared(&[]);
        let counters = |name, help, labels| r.counters(MetricFamily::new(name, help, labels));
        Self {
            connected: gauge(
                "canal_southbound_connected",
                "1 while a controller's stream is open.",
            ),
            generation: gauge(
                "canal_southbound_generation",
                "The newest generation accepted.",
            ),
            updates: counters(
                "canal_southbound_updates_total",
                "Responses accepted.",
                &["kind"],
            ),
            nacks: counters(
                "canal_southbound_nacks_total",
                "Responses refused completely or in part.",
                &["kind", "reason"],
            ),
            refused: counters(
                "canal_southbound_refused_resources_total",
                "Resources refused by name.",
                &["kind", "reason"],
            ),
            closed: gauge(
                "canal_southbound_closed_tenants",
                "Tenants that are not served because a security resource is refused or missing.",
            ),
            other_store: gauge(
                "canal_southbound_other_store",
                "1 while the controller has another store than the one that the state in force is from.",
            ),
            stores_replaced: counters(
                "canal_southbound_stores_replaced_total",
                "States that were replaced completely by the state of another store of the controller.",
                &[],
            )
            .shared(&[]),
            reconnects: counters(
                "canal_southbound_reconnects_total",
                "Streams that ended, by reason; stale: the controller sent nothing for too long.",
                &["reason"],
            ),
            snapshot_refused: counters(
                "canal_southbound_state_file_rejected_total",
                "Snapshots that were not used at start, by reason.",
                &["reason"],
            ),
            snapshot_writes: counters(
                "canal_southbound_state_file_writes_total",
                "Snapshots written.",
                &["result"],
            ),
        }
    }
    pub(super) fn connected(&self, up: bool) {
        self.connected.set(up.into());
    }
    pub(super) fn generation(&self, n: u64) {
        self.generation.set(i64::try_from(n).unwrap_or(i64::MAX));
    }
    pub(super) fn update(&self, kind: &str) {
        self.updates.shared(&[kind]).inc();
    }
    pub(super) fn nack(&self, kind: &str, reason: &str) {
        self.nacks.shared(&[kind, reason]).inc();
    }
    pub(super) fn refused(&self, kind: &str, reason: &str) {
        self.refused.shared(&[kind, reason]).inc();
    }
    pub(super) fn closed(&self, tenants: usize) {
        self.closed.set(i64::try_from(tenants).unwrap_or(i64::MAX));
    }
    pub(super) fn other_store(&self, is_other: bool) {
        self.other_store.set(is_other.into());
    }
    pub(super) fn store_replaced(&self) {
        self.stores_replaced.inc();
    }
    pub(super) fn reconnect(&self, reason: &str) {
        self.reconnects.shared(&[reason]).inc();
    }
    pub(super) fn snapshot_refused(&self, reason: &str) {
        self.snapshot_refused.shared(&[reason]).inc();
    }
    pub(super) fn snapshot_written(&self, ok: bool) {
        self.snapshot_writes
            .shared(&[if ok { "ok" } else { "error" }])
            .inc();
    }
}

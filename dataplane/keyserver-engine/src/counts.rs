//! The key server's metrics. docs/operations/counters.md defines each of them; no decision depends
//! on them.

use canal_model::ids::TenantName;
use canal_runtime::limits::Limit;
use canal_runtime::metrics::{CounterFamily, MetricFamily, Registry, SharedGauge};
use canal_wire::keyrpc::KeyRefusal;

use crate::hardware;
use crate::key::OperationQueue;
use crate::limits::QuotaShares;

/// Kind of an operation in the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyOperation {
    ClientHandshake,
    ServerHandshake,
    Signature,
    Chain,
}

impl KeyOperation {
    fn name(self) -> &'static str {
        match self {
            KeyOperation::ClientHandshake => "handshake_client",
            KeyOperation::ServerHandshake => "handshake_server",
            KeyOperation::Signature => "sign",
            KeyOperation::Chain => "chain",
        }
    }
}

/// Reason why a channel ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChannelEndReason {
    /// The requester closed the channel, or the connection broke.
    Requester,
    /// The requester sent bytes that are no frame.
    Malformed,
    /// The requester does not read its responses.
    SlowReader,
    /// The requester's certificate has expired.
    Expired,
    /// The requester's certificate was revoked.
    Revoked,
    /// The key server drains, and the channel is idle.
    Drained,
    Forced,
}

impl ChannelEndReason {
    fn name(self) -> &'static str {
        match self {
            ChannelEndReason::Requester => "requester",
            ChannelEndReason::Malformed => "malformed",
            ChannelEndReason::SlowReader => "slow_reader",
            ChannelEndReason::Expired => "expired",
            ChannelEndReason::Revoked => "revoked",
            ChannelEndReason::Drained => "drained",
            ChannelEndReason::Forced => "forced",
        }
    }
}

/// Handles of all metrics; see [`KeyServerCounters::new`].
#[derive(Debug)]
pub(crate) struct KeyServerCounters {
    operations: CounterFamily,
    refusals: CounterFamily,
    unauthenticated: CounterFamily,
    channel_ends: CounterFamily,
    pub(crate) handshakes: SharedGauge,
    pub(crate) channels: Limit,
}

impl KeyServerCounters {
    /// Registers the metrics: `canal_key_operations_total{kind,algorithm,tenant}`,
    /// `canal_key_refusals_total{name,tenant}`,
    /// `canal_key_unauthenticated_connections_total{reason}`,
    /// `canal_key_channels_ended_total{reason}`, `canal_key_handshakes_in_flight`,
    /// `canal_key_hardware{feature,used}`, and the limit `key_channels`.
    pub(crate) fn new(registry: &Registry, shares: QuotaShares) -> Self {
        let counters =
            |name, help, labels| registry.counters(MetricFamily::new(name, help, labels));
        let handshakes_help = "Handshakes in progress, including those that wait for their peers.";
        let hardware = registry.gauges(MetricFamily::new(
            "canal_key_hardware",
            "Whether this machine has a feature (1), and whether the crypto library uses it.",
            &["feature", "used"],
        ));
        for feature in hardware::features() {
            hardware
                .shared(&[feature.name, if feature.used { "yes" } else { "no" }])
                .set(feature.present.into());
        }
        Self {
            operations: counters(
                "canal_key_operations_total",
                "Completed operations: successful handshakes, signatures, chains sent.",
                &["kind", "algorithm", "tenant"],
            ),
            refusals: counters(
                "canal_key_refusals_total",
                "Refusals sent to requesters.",
                &["name", "tenant"],
            ),
            unauthenticated: counters(
                "canal_key_unauthenticated_connections_total",
                "Connections that did not become channels.",
                &["reason"],
            ),
            channel_ends: counters(
                "canal_key_channels_ended_total",
                "Channels that ended.",
                &["reason"],
            ),
            handshakes: registry
                .gauges(MetricFamily::new(
                    "canal_key_handshakes_in_flight",
                    handshakes_help,
                    &[],
                ))
                .shared(&[]),
            channels: Limit::new(registry, "key_channels", shares.channels),
        }
    }

    pub(crate) fn count_operation(
        &self,
        kind: KeyOperation,
        queue: OperationQueue,
        tenant: &TenantName,
    ) {
        self.operations
            .shared(&[kind.name(), queue.name(), tenant.as_str()])
            .inc();
    }

    /// Counts a refusal. `tenant` is the owner of the key, as far as it is known.
    pub(crate) fn refused(&self, name: KeyRefusal, tenant: Option<&TenantName>) {
        self.refusals
            .shared(&[name.name(), tenant.map_or("-", TenantName::as_str)])
            .inc();
    }

    pub(crate) fn unauthenticated(&self, reason: &'static str) {
        self.unauthenticated.shared(&[reason]).inc();
    }

    pub(crate) fn count_channel_end(&self, reason: ChannelEndReason) {
        self.channel_ends.shared(&[reason.name()]).inc();
    }
}

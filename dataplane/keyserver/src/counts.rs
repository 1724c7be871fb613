//! What the key server counts, made once. What it means is in docs/operations/counters.md; nothing is decided by it.

use canal_kit::limits::Limit;
use canal_kit::metrics::{Counters, Family, Registry, SharedGauge};
use canal_model::ids::TenantName;
use canal_wire::keyrpc::Refusal;

use crate::hardware;
use crate::key::Lane;
use crate::limits::Shares;

/// What an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    ClientHandshake,
    ServerHandshake,
    Signature,
    Chain,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Operation::ClientHandshake => "handshake_client",
            Operation::ServerHandshake => "handshake_server",
            Operation::Signature => "sign",
            Operation::Chain => "chain",
        }
    }
}

/// Why a channel ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The requester closed it, or it broke.
    Requester,
    /// The requester sent what is no frame.
    Malformed,
    /// The requester does not read its answers.
    SlowReader,
    /// The requester's certificate has ended.
    Expired,
    /// It was revoked.
    Revoked,
    /// The key server ends.
    Drained,
    Forced,
}

impl Ended {
    fn name(self) -> &'static str {
        match self {
            Ended::Requester => "requester",
            Ended::Malformed => "malformed",
            Ended::SlowReader => "slow_reader",
            Ended::Expired => "expired",
            Ended::Revoked => "revoked",
            Ended::Drained => "drained",
            Ended::Forced => "forced",
        }
    }
}

/// All of them; see [`Counts::new`].
#[derive(Debug)]
pub(crate) struct Counts {
    operations: Counters,
    refusals: Counters,
    strangers: Counters,
    ended: Counters,
    pub(crate) handshakes: SharedGauge,
    pub(crate) channels: Limit,
}

impl Counts {
    /// Metrics: `canal_key_operations_total{kind,algorithm,tenant}`, `canal_key_refusals_total{name,tenant}`,
    /// `canal_key_strangers_total{reason}`, `canal_key_channels_ended_total{reason}`, `canal_key_handshakes_under_way`,
    /// `canal_key_hardware{feature,used}`, and the limit `key_channels`.
    pub(crate) fn new(registry: &Registry, shares: Shares) -> Self {
        let counters = |name, help, labels| registry.counters(Family::new(name, help, labels));
        let under_way = "Handshakes begun and not ended, those that wait for their peers included.";
        let hardware = registry.gauges(Family::new(
            "canal_key_hardware",
            "Whether this machine has a feature (1), and whether the crypto library uses it.",
            &["feature", "used"],
        ));
        for feature in hardware::features() {
            hardware.shared(&[feature.name, if feature.used { "yes" } else { "no" }]).set(feature.present.into());
        }
        Self {
            operations: counters(
                "canal_key_operations_total",
                "Operations done: handshakes that ended well, signatures, chains told.",
                &["kind", "algorithm", "tenant"],
            ),
            refusals: counters("canal_key_refusals_total", "Refusals told to requesters.", &["name", "tenant"]),
            strangers: counters("canal_key_strangers_total", "Connections that did not become channels.", &["reason"]),
            ended: counters("canal_key_channels_ended_total", "Channels that ended.", &["reason"]),
            handshakes: registry.gauges(Family::new("canal_key_handshakes_under_way", under_way, &[])).shared(&[]),
            channels: Limit::new(registry, "key_channels", shares.channels),
        }
    }

    pub(crate) fn done(&self, kind: Operation, lane: Lane, tenant: &TenantName) {
        self.operations.shared(&[kind.name(), lane.name(), tenant.as_str()]).inc();
    }

    /// `tenant`: whose key it was about, as far as that is known.
    pub(crate) fn refused(&self, name: Refusal, tenant: Option<&TenantName>) {
        self.refusals.shared(&[name.name(), tenant.map_or("-", TenantName::as_str)]).inc();
    }

    pub(crate) fn stranger(&self, reason: &'static str) {
        self.strangers.shared(&[reason]).inc();
    }

    pub(crate) fn ended(&self, reason: Ended) {
        self.ended.shared(&[reason.name()]).inc();
    }
}

//! Counters of requests to key servers.

use canal_runtime::metrics::{
    CounterFamily, GaugeFamily, MetricFamily, Registry, SharedCounter, SharedGauge,
};
use canal_wire::keyrpc;

/// Reason why a key server was given up for one request; the label `reason` of
/// `canal_keys_failures_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyServerFailure {
    /// This component has no certificate yet.
    NoCertificate,
    /// TCP or TLS to the key server failed.
    Connect,
    /// The answer did not arrive in time.
    Deadline,
    /// The channel broke before an answer.
    Lost,
    /// The key server's certificate was revoked while the channel was open.
    Revoked,
    /// The key server violated the protocol.
    Malformed,
    /// The circuit breaker was open.
    CircuitOpen,
    /// The channel had its maximum number of requests in flight.
    Busy,
}

impl KeyServerFailure {
    pub(super) fn name(self) -> &'static str {
        match self {
            KeyServerFailure::NoCertificate => "no_certificate",
            KeyServerFailure::Connect => "connect",
            KeyServerFailure::Deadline => "deadline",
            KeyServerFailure::Lost => "lost",
            KeyServerFailure::Revoked => "revoked",
            KeyServerFailure::Malformed => "malformed",
            KeyServerFailure::CircuitOpen => "circuit_open",
            KeyServerFailure::Busy => "busy",
        }
    }
}

/// Key client counters of one process.
pub(super) struct KeyClientCounters {
    failures: CounterFamily,
    refused: CounterFamily,
    answers: CounterFamily,
    trips: CounterFamily,
    waited: CounterFamily,
    channels: GaugeFamily,
    frames: SharedCounter,
    writes: SharedCounter,
    fallbacks: SharedCounter,
    none: SharedCounter,
    busy: SharedCounter,
}

impl KeyClientCounters {
    pub(super) fn new(registry: &Registry) -> Self {
        let family = |name, help, labels| registry.counters(MetricFamily::new(name, help, labels));
        Self {
            failures: family(
                "canal_keys_failures_total",
                "Requests that a key server did not answer.",
                &["server", "reason"],
            ),
            refused: family(
                "canal_keys_refused_total",
                "Requests that a key server refused.",
                &["server", "reason"],
            ),
            answers: family(
                "canal_keys_answers_total",
                "Handshakes and signatures by key servers.",
                &["server", "what"],
            ),
            trips: family(
                "canal_keys_round_trips_total",
                "First answers of key servers.",
                &["server"],
            ),
            waited: registry.seconds(MetricFamily::new(
                "canal_keys_round_trip_seconds_total",
                "Time until the first answers of key servers.",
                &["server"],
            )),
            channels: registry.gauges(MetricFamily::new(
                "canal_keys_channels",
                "Open channels to key servers.",
                &["server"],
            )),
            frames: family(
                "canal_keys_frames_total",
                "Frames sent to key servers.",
                &[],
            )
            .shared(&[]),
            writes: family(
                "canal_keys_writes_total",
                "Writes to key servers; frames over writes is the batch.",
                &[],
            )
            .shared(&[]),
            fallbacks: family(
                "canal_keys_fallbacks_total",
                "Handshakes with a local key because no key server answered.",
                &[],
            )
            .shared(&[]),
            none: family(
                "canal_keys_unavailable_total",
                "Handshakes and signatures that no key server performed.",
                &[],
            )
            .shared(&[]),
            busy: family(
                "canal_keys_handshakes_busy_total",
                "Handshakes refused because all signing threads were busy.",
                &[],
            )
            .shared(&[]),
        }
    }

    pub(super) fn failed(&self, server: &str, why: KeyServerFailure) {
        self.failures.shared(&[server, why.name()]).inc();
    }

    pub(super) fn refused(&self, server: &str, why: keyrpc::KeyRefusal) {
        self.refused.shared(&[server, why.name()]).inc();
    }

    /// Returns the success counters of one key server; the caller looks them up once.
    pub(super) fn tally(&self, server: &str) -> HandshakeCounters {
        HandshakeCounters {
            handshakes: self.answers.shared(&[server, "handshake"]),
            signatures: self.answers.shared(&[server, "signature"]),
            trips: self.trips.shared(&[server]),
            waited: self.waited.shared(&[server]),
        }
    }

    pub(super) fn channel(&self, server: &str) -> OpenChannel {
        let gauge = self.channels.shared(&[server]);
        gauge.add(1);
        OpenChannel(gauge)
    }

    pub(super) fn wrote(&self, frames: u64) {
        self.frames.add(frames);
        self.writes.inc();
    }

    pub(super) fn fell_back(&self) {
        self.fallbacks.inc();
    }

    pub(super) fn busy(&self) {
        self.busy.inc();
    }

    pub(super) fn record_unavailable(&self) {
        self.none.inc();
    }
}

/// Counters that every handshake increments.
#[derive(Debug)]
pub(super) struct HandshakeCounters {
    pub(super) handshakes: SharedCounter,
    pub(super) signatures: SharedCounter,
    trips: SharedCounter,
    waited: SharedCounter,
}

impl HandshakeCounters {
    pub(super) fn trip(&self, waited: std::time::Duration) {
        self.trips.inc();
        self.waited
            .add(u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX));
    }
}

/// Decrements the gauge when it is dropped.
pub(super) struct OpenChannel(SharedGauge);

impl Drop for OpenChannel {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

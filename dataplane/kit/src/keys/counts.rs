//! What became of requests to key servers, by name.

use canal_wire::keyrpc;

use crate::metrics::{Counters, Family, Gauges, Registry, SharedCounter, SharedGauge};

/// Why a key server was given up for one request; the label `reason` of `canal_keys_failures_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// No certificate of the own component yet.
    NoCertificate,
    /// TCP or TLS to it failed.
    Connect,
    /// No answer in time.
    Deadline,
    /// The channel broke.
    Lost,
    /// Its certificate was revoked while the channel was open.
    Revoked,
    /// It said what is not of the protocol.
    Malformed,
    /// It was left alone.
    CircuitOpen,
    /// As many requests as may be are under way on the channel.
    Busy,
}

impl Failure {
    pub(super) fn name(self) -> &'static str {
        match self {
            Failure::NoCertificate => "no_certificate",
            Failure::Connect => "connect",
            Failure::Deadline => "deadline",
            Failure::Lost => "lost",
            Failure::Revoked => "revoked",
            Failure::Malformed => "malformed",
            Failure::CircuitOpen => "circuit_open",
            Failure::Busy => "busy",
        }
    }
}

/// Of one process.
pub(super) struct Counts {
    failures: Counters,
    refused: Counters,
    answers: Counters,
    trips: Counters,
    waited: Counters,
    channels: Gauges,
    frames: SharedCounter,
    writes: SharedCounter,
    fallbacks: SharedCounter,
    none: SharedCounter,
    busy: SharedCounter,
}

impl Counts {
    pub(super) fn new(registry: &Registry) -> Self {
        let family = |name, help, labels| registry.counters(Family::new(name, help, labels));
        Self {
            failures: family("canal_keys_failures_total", "Requests that a key server did not answer.", &["server", "reason"]),
            refused: family("canal_keys_refused_total", "Requests that a key server refused.", &["server", "reason"]),
            answers: family("canal_keys_answers_total", "Handshakes and signatures by key servers.", &["server", "what"]),
            trips: family("canal_keys_trips_total", "First answers of key servers.", &["server"]),
            waited: family("canal_keys_trip_microseconds_total", "Waiting for first answers of key servers.", &["server"]),
            channels: registry.gauges(Family::new("canal_keys_channels", "Open channels to key servers.", &["server"])),
            frames: family("canal_keys_frames_total", "Frames sent to key servers.", &[]).shared(&[]),
            writes: family("canal_keys_writes_total", "Writes to key servers; frames over writes is the batch.", &[]).shared(&[]),
            fallbacks: family("canal_keys_fallbacks_total", "Handshakes with a local key because no key server answered.", &[]).shared(&[]),
            none: family("canal_keys_none_total", "Handshakes and signatures that no key server did.", &[]).shared(&[]),
            busy: family("canal_keys_handshakes_busy_total", "Handshakes refused because all threads for signing were taken.", &[])
                .shared(&[]),
        }
    }

    pub(super) fn failed(&self, server: &str, why: Failure) {
        self.failures.shared(&[server, why.name()]).inc();
    }

    pub(super) fn refused(&self, server: &str, why: keyrpc::Refusal) {
        self.refused.shared(&[server, why.name()]).inc();
    }

    /// What one key server did well; looked up once.
    pub(super) fn tally(&self, server: &str) -> Tally {
        Tally {
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

    pub(super) fn nobody(&self) {
        self.none.inc();
    }
}

/// The counters that every handshake moves.
#[derive(Debug)]
pub(super) struct Tally {
    pub(super) handshakes: SharedCounter,
    pub(super) signatures: SharedCounter,
    trips: SharedCounter,
    waited: SharedCounter,
}

impl Tally {
    pub(super) fn trip(&self, waited: std::time::Duration) {
        self.trips.inc();
        self.waited.add(u64::try_from(waited.as_micros()).unwrap_or(u64::MAX));
    }
}

/// Takes one from the gauge when dropped.
pub(super) struct OpenChannel(SharedGauge);

impl Drop for OpenChannel {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

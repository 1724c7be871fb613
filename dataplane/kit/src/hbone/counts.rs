//! What happened to HBONE connections and streams, by name.

use crate::metrics::{Counter, Counters, Family, Gauge, Registry, Shard};
use crate::tls::Fallen;

/// How a connection ended; the label `reason` of `canal_hbone_closed_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// By the peer, or by both in order.
    Closed,
    /// No streams for too long.
    Idle,
    /// No answer to a PING.
    Ping,
    /// The own certificate was renewed, or the owner retired it.
    Retired,
    /// A protocol or transport error.
    Error,
    /// The process drains or was forced.
    Drained,
    /// The peer's certificate was revoked.
    Revoked,
    /// The peer's trust domain is federated no more.
    Unfederated,
    /// The peer's certificate ended, and its last streams did not end in time.
    Expired,
}

impl From<Fallen> for Ended {
    fn from(why: Fallen) -> Self {
        match why {
            Fallen::Revoked => Ended::Revoked,
            Fallen::Unfederated => Ended::Unfederated,
            Fallen::Expired => Ended::Expired,
        }
    }
}

impl Ended {
    fn label(self) -> &'static str {
        match self {
            Ended::Closed => "closed",
            Ended::Idle => "idle",
            Ended::Ping => "ping_timeout",
            Ended::Retired => "retired",
            Ended::Error => "error",
            Ended::Drained => "drained",
            Ended::Revoked => Fallen::Revoked.name(),
            Ended::Unfederated => Fallen::Unfederated.name(),
            Ended::Expired => Fallen::Expired.name(),
        }
    }
}

/// One worker's HBONE counters, both sides. Cheap to clone.
#[derive(Debug, Clone)]
pub struct HboneCounters {
    shard: Shard,
    closed: Counters,
    refused: Counters,
    pub(super) client_open: Gauge,
    pub(super) server_open: Gauge,
    pub(super) handshakes: Counter,
    pub(super) handshake_failures: Counter,
    pub(super) retries: Counter,
}

impl HboneCounters {
    /// `canal_hbone_connections{side}`, `canal_hbone_closed_total{side,reason}`, `canal_hbone_handshakes_total`,
    /// `canal_hbone_handshake_failures_total`, `canal_hbone_retries_total`, `canal_hbone_refused_total{reason}`.
    pub fn new(registry: &Registry, shard: &Shard) -> Self {
        let open = registry.gauges(Family::new("canal_hbone_connections", "Open HBONE connections.", &["side"]));
        let plain = |name, help| shard.counter(&registry.counters(Family::new(name, help, &[])), &[]);
        Self {
            shard: shard.clone(),
            closed: registry.counters(Family::new("canal_hbone_closed_total", "HBONE connections that ended.", &["side", "reason"])),
            refused: registry.counters(Family::new(
                "canal_hbone_refused_total",
                "Requests answered 400 without asking the caller.",
                &["reason"],
            )),
            client_open: shard.gauge(&open, &["client"]),
            server_open: shard.gauge(&open, &["server"]),
            handshakes: plain("canal_hbone_handshakes_total", "HBONE connections opened as client."),
            handshake_failures: plain("canal_hbone_handshake_failures_total", "HBONE connections that did not come up as client."),
            retries: plain("canal_hbone_retries_total", "Tunnels opened anew because a pooled connection had died."),
        }
    }

    pub(super) fn closed(&self, side: &'static str, ended: Ended) {
        self.shard.counter(&self.closed, &[side, ended.label()]).inc();
    }

    pub(super) fn refused(&self, reason: &'static str) {
        self.shard.counter(&self.refused, &[reason]).inc();
    }
}

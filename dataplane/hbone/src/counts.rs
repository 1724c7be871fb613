//! Counters of HBONE connections and streams.

use std::rc::Rc;

use canal_runtime::metrics::{Counter, CounterFamily, Gauge, MetricFamily, MetricsShard, Registry};
use canal_tls::TrustLoss;

use crate::credit::SendCredit;
use crate::flow::{BufferBudget, FlowAccount};

/// Reason why a connection ended; the label `reason` of `canal_hbone_closed_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HboneCloseReason {
    /// The peer closed it, or both sides did in order.
    Closed,
    /// The connection had no streams for too long.
    Idle,
    /// A PING was not answered.
    Ping,
    /// This side's certificate was renewed, or the owner retired the connection.
    Retired,
    /// The connection reached the maximum age or number of streams of a spread connection, and
    /// another one replaced it.
    Aged,
    /// The protocol or the transport failed.
    Error,
    /// The process is draining, or the drain was forced.
    Drained,
    /// The peer's certificate was revoked.
    Revoked,
    /// The peer's trust domain is no longer federated.
    Unfederated,
    /// The peer's certificate expired, and its last streams did not end in time.
    Expired,
}

impl From<TrustLoss> for HboneCloseReason {
    fn from(why: TrustLoss) -> Self {
        match why {
            TrustLoss::Revoked => HboneCloseReason::Revoked,
            TrustLoss::Unfederated => HboneCloseReason::Unfederated,
            TrustLoss::Expired => HboneCloseReason::Expired,
        }
    }
}

impl HboneCloseReason {
    fn label(self) -> &'static str {
        match self {
            HboneCloseReason::Closed => "closed",
            HboneCloseReason::Idle => "idle",
            HboneCloseReason::Ping => "ping_timeout",
            HboneCloseReason::Retired => "retired",
            HboneCloseReason::Aged => "aged",
            HboneCloseReason::Error => "error",
            HboneCloseReason::Drained => "drained",
            HboneCloseReason::Revoked => TrustLoss::Revoked.name(),
            HboneCloseReason::Unfederated => TrustLoss::Unfederated.name(),
            HboneCloseReason::Expired => TrustLoss::Expired.name(),
        }
    }
}

/// One worker's HBONE counters of both sides. It is cheap to clone.
#[derive(Debug, Clone)]
pub struct HboneCounters {
    shard: MetricsShard,
    closed: CounterFamily,
    refused: CounterFamily,
    pub(super) client_open: Gauge,
    pub(super) server_open: Gauge,
    pub(super) handshakes: Counter,
    pub(super) handshake_failures: Counter,
    pub(super) retries: Counter,
    pub(super) unsteered: Counter,
    stalled_streams: Gauge,
    withheld_connections: Gauge,
    withheld_streams: Counter,
}

impl HboneCounters {
    /// Registers `canal_hbone_connections{side}`, `canal_hbone_closed_total{side,reason}`,
    /// `canal_hbone_handshakes_total`, `canal_hbone_handshake_failures_total`,
    /// `canal_hbone_retries_total`, `canal_hbone_unsteered_total`,
    /// `canal_hbone_refused_total{reason}`, `canal_hbone_stalled_streams`,
    /// `canal_hbone_connections_without_credit`, `canal_hbone_streams_without_credit_total`.
    pub fn new(registry: &Registry, shard: &MetricsShard) -> Self {
        let open = registry.gauges(MetricFamily::new(
            "canal_hbone_connections",
            "Open HBONE connections.",
            &["side"],
        ));
        let stalled = MetricFamily::new(
            "canal_hbone_stalled_streams",
            "Streams of HBONE and HTTP/2 connections whose bytes wait for a reader that accepts none.",
            &[],
        );
        let withheld = MetricFamily::new(
            "canal_hbone_connections_without_credit",
            "HBONE and HTTP/2 connections on which a stream has waited for its first credit to send for more than a second.",
            &[],
        );
        let plain =
            |name, help| shard.counter(&registry.counters(MetricFamily::new(name, help, &[])), &[]);
        Self {
            shard: shard.clone(),
            stalled_streams: shard.gauge(&registry.gauges(stalled), &[]),
            withheld_connections: shard.gauge(&registry.gauges(withheld), &[]),
            withheld_streams: plain(
                "canal_hbone_streams_without_credit_total",
                "Streams placed on a connection without credit, because its peer has the maximum number of such connections.",
            ),
            unsteered: plain(
                "canal_hbone_unsteered_total",
                "HBONE connections opened as client whose bucket could not be chosen.",
            ),
            closed: registry.counters(MetricFamily::new(
                "canal_hbone_closed_total",
                "HBONE connections that ended.",
                &["side", "reason"],
            )),
            refused: registry.counters(MetricFamily::new(
                "canal_hbone_refused_total",
                "Requests answered with status 400 before the handler saw them.",
                &["reason"],
            )),
            client_open: shard.gauge(&open, &["client"]),
            server_open: shard.gauge(&open, &["server"]),
            handshakes: plain(
                "canal_hbone_handshakes_total",
                "HBONE connections opened as client.",
            ),
            handshake_failures: plain(
                "canal_hbone_handshake_failures_total",
                "HBONE connections that failed to open as client.",
            ),
            retries: plain(
                "canal_hbone_retries_total",
                "Tunnels opened again because a pooled connection had died.",
            ),
        }
    }

    /// Creates the account of a new connection, whose stalled streams are counted.
    pub fn account(&self, budget: Option<BufferBudget>) -> Rc<FlowAccount> {
        FlowAccount::counted(
            budget,
            self.stalled_streams.clone(),
            SendCredit::counted(self.withheld_connections.clone()),
        )
    }

    /// Counts a stream that was placed on a connection without credit.
    pub fn placed_without_credit(&self) {
        self.withheld_streams.inc();
    }

    pub(super) fn closed(&self, side: &'static str, ended: HboneCloseReason) {
        self.shard
            .counter(&self.closed, &[side, ended.label()])
            .inc();
    }

    pub(super) fn refused(&self, reason: &'static str) {
        self.shard.counter(&self.refused, &[reason]).inc();
    }
}

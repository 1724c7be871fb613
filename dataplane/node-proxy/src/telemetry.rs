//! Telemetry of a connection: `istio_tcp_*` with Istio's labels, refusals by name, and one access
//! log line at its end. The labels and the fields of the line are in `connection_fields`.

use std::net::SocketAddr;

use canal_model::authorization::PolicyKey;
use canal_net::copy::Meter;
use canal_runtime::metrics::{Counter, CounterFamily, MetricFamily, MetricsShard, Registry};
use canal_telemetry::access_log::WorkerLog;

use crate::authorization::{AuthorizationQuery, AuthorizationRefusal, ConnectionSource, PodPolicy};
pub use crate::connection_fields::{EndpointLabels, FlowRecord, Reporter};
use crate::connection_fields::{LABELS, ReportedConnection, label_values, write_log};
use crate::pod::LocalPod;
use crate::refusal::{NodeRefusal, REFUSALS};

/// Value of `response_flags` without a flag.
const FLAG_NONE: &str = "-";

/// Connections of one pod that the kernel refused at `connect()` for one reason, with the
/// destination of the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectRefusal {
    pub reason: NodeRefusal,
    pub count: u64,
    pub destination: SocketAddr,
}

/// Metric families of connections, registered once per process.
#[derive(Debug, Clone)]
pub struct ConnectionMetricFamilies {
    opened_connections: CounterFamily,
    closed: CounterFamily,
    sent: CounterFamily,
    received: CounterFamily,
    refused: CounterFamily,
    /// Tunnels that a gateway did not open: `canal_node_gateway_failures_total{gateway,cause}`.
    gateway_failures: CounterFamily,
    /// Direct tunnels that a pod's node did not open: `canal_node_direct_failures_total{cause}`.
    direct_failures: CounterFamily,
    /// Connections that took a gateway because no direct tunnel opened:
    /// `canal_node_direct_fallbacks_total`.
    direct_fallbacks: CounterFamily,
    /// Decisions of authorization policies: `canal_authorization_total{tenant,action,policy}`.
    authorization: CounterFamily,
    closed_early: CounterFamily,
}

/// Returns the family of admitted connections that the node ended early, by reason.
pub fn closed_family() -> MetricFamily {
    MetricFamily::new(
        "canal_node_closed_total",
        "Open connections into pods that were ended, by reason.",
        &["reason"],
    )
}

impl ConnectionMetricFamilies {
    /// Registers all families in `r`.
    pub fn new(r: &Registry) -> Self {
        let tcp = |name, help| r.counters(MetricFamily::new(name, help, &LABELS));
        let refused = MetricFamily::new(
            "canal_node_refused_total",
            "Connections and tunnels refused, by reason.",
            &["direction", "reason"],
        );
        let failures = MetricFamily::new(
            "canal_node_gateway_failures_total",
            "Tunnels that a gateway did not open.",
            &["gateway", "cause"],
        );
        Self {
            opened_connections: tcp("istio_tcp_connections_opened_total", "The total number of TCP connections opened."),
            closed: tcp("istio_tcp_connections_closed_total", "The total number of TCP connections closed."),
            sent: tcp("istio_tcp_sent_bytes_total", "The size of total bytes sent during response in case of a TCP connection."),
            received: tcp("istio_tcp_received_bytes_total", "The size of total bytes received during request in case of a TCP connection."),
            refused: r.counters(refused),
            gateway_failures: r.counters(failures),
            direct_failures: r.counters(MetricFamily::new(
                "canal_node_direct_failures_total",
                "Direct tunnels that a pod's node did not open, by cause.",
                &["cause"],
            )),
            direct_fallbacks: r.counters(MetricFamily::new(
                "canal_node_direct_fallbacks_total",
                "Connections that used a gateway because no pod's node opened a direct tunnel.",
                &[],
            )),
            authorization: r.counters(MetricFamily::new(
                "canal_authorization_total",
                "Decisions of policies on connections into pods, and audits and dry runs that matched.",
                &["tenant", "action", "policy"],
            )),
            closed_early: r.counters(closed_family()),
        }
    }
}

/// Records the connections of one worker.
pub struct ConnectionRecorder {
    families: ConnectionMetricFamilies,
    shard: MetricsShard,
    log: WorkerLog,
    refused: [[Counter; REFUSALS.len()]; 2],
}

impl ConnectionRecorder {
    /// Creates the recorder of the worker that owns `shard` and `log`.
    pub fn new(families: ConnectionMetricFamilies, shard: MetricsShard, log: WorkerLog) -> Self {
        let refused = [Reporter::Source, Reporter::Destination].map(|r| {
            REFUSALS.map(|x| shard.counter(&families.refused, &[r.direction(), x.name()]))
        });
        Self {
            families,
            shard,
            log,
            refused,
        }
    }

    /// Counts and logs a refusal from before there is a flow record, with the facts that are known.
    pub fn refused(
        &self,
        reporter: Reporter,
        reason: NodeRefusal,
        source: SocketAddr,
        destination: Option<SocketAddr>,
        pod: &EndpointLabels,
        why: &str,
    ) {
        self.count_refused(reporter, reason);
        let (end, of) = match reporter {
            Reporter::Source => ("src.workload", "src.namespace"),
            Reporter::Destination => ("dst.workload", "dst.namespace"),
        };
        let line = self
            .log
            .line()
            .str("direction", reporter.direction())
            .str("result", reason.name());
        let line = line
            .str("response_flags", reason.flag())
            .display("src.addr", source);
        let line = match destination {
            Some(d) => line.display("dst.addr", d),
            None => line,
        };
        line.str(end, &pod.workload)
            .str(of, &pod.namespace)
            .some("error", why)
            .end();
    }

    /// Counts and logs what the kernel refused a pod at `connect()` since the last call, in one
    /// line with the last destination.
    pub fn refused_at_connect(
        &self,
        refusal: &ConnectRefusal,
        pod: &LocalPod,
        endpoint_labels: &EndpointLabels,
    ) {
        self.add_refused(Reporter::Source, refusal.reason, refusal.count);
        let line = self
            .log
            .line()
            .str("direction", Reporter::Source.direction())
            .str("result", refusal.reason.name());
        let line = line
            .str("response_flags", refusal.reason.flag())
            .str("refused_at", "connect")
            .u64("count", refusal.count);
        let own = pod
            .ips
            .iter()
            .find(|ip| ip.is_ipv4() == refusal.destination.is_ipv4());
        let line = match own {
            Some(own) => line.display("src.addr", own),
            None => line,
        };
        let line = line
            .display("dst.addr", refusal.destination)
            .str("src.workload", &endpoint_labels.workload);
        line.str("src.namespace", &endpoint_labels.namespace)
            .some("src.pod", &endpoint_labels.pod)
            .end();
    }

    /// Counts a refusal that is logged elsewhere.
    fn count_refused(&self, reporter: Reporter, reason: NodeRefusal) {
        self.add_refused(reporter, reason, 1);
    }

    fn add_refused(&self, reporter: Reporter, reason: NodeRefusal, count: u64) {
        let side = usize::from(reporter == Reporter::Destination);
        if let Some(i) = REFUSALS.iter().position(|x| *x == reason) {
            self.refused[side][i].add(count);
        }
    }

    /// Counts a tunnel that a gateway did not open.
    pub fn gateway_failed(&self, label: &str, cause: &str) {
        self.shard
            .counter(&self.families.gateway_failures, &[label, cause])
            .inc();
    }

    /// Counts a direct tunnel that a pod's node did not open.
    pub fn direct_failed(&self, cause: &str) {
        self.shard
            .counter(&self.families.direct_failures, &[cause])
            .inc();
    }

    /// Counts a connection that takes a gateway instead of the direct path.
    pub fn direct_fallback(&self) {
        self.shard
            .counter(&self.families.direct_fallbacks, &[])
            .inc();
    }

    /// Counts the decision of the pod's policies: on `query` if it was allowed, else the refusal
    /// `no`. For pods without policies only refusals are counted. Names are the same as in
    /// gateways.
    pub fn record_authorization(
        &self,
        pod: &LocalPod,
        policy: &PodPolicy,
        query: Option<&AuthorizationQuery>,
        no: Option<&AuthorizationRefusal>,
    ) {
        let count = |action: &str, policy: Option<&PolicyKey>| {
            let policy = policy
                .map(|key| format!("{}/{}", key.namespace, key.name))
                .unwrap_or_default();
            self.shard
                .counter(
                    &self.families.authorization,
                    &[pod.tenant.as_str(), action, &policy],
                )
                .inc();
        };
        match no {
            Some(AuthorizationRefusal {
                refusal, policy, ..
            }) => match refusal {
                NodeRefusal::Denied => count("deny", policy.as_ref()),
                NodeRefusal::Undecided | NodeRefusal::StrictPlaintext => {
                    count(refusal.name(), policy.as_ref())
                }
                _ => {}
            },
            None if query.is_some_and(|q| q.source == ConnectionSource::Node) => {
                count("node", None)
            }
            None if policy.is_empty() => {}
            None => count("allow", None),
        }
        if let Some(query) = query {
            policy.observe(query, &mut |key, kind| count(kind.name(), Some(key)));
        }
    }

    /// Counts an open connection that policies end. Returns its failure and the log's text.
    pub fn cut(&self, no: &AuthorizationRefusal) -> (ConnectionFailure, String) {
        self.shard
            .counter(&self.families.closed_early, &[no.refusal.name()])
            .inc();
        (
            ConnectionFailure {
                refusal: None,
                ..no.refusal.into()
            },
            format!("policies have changed: {}", no.why),
        )
    }

    /// Counts a connection that is about to be dialed, and returns its byte meter.
    pub fn count_opened(&self, flow: &FlowRecord) -> Meter {
        let labels = label_values(&ReportedConnection::before_dial(flow, FLAG_NONE));
        self.shard
            .counter(&self.families.opened_connections, &labels)
            .inc();
        Meter::with(
            self.shard.counter(&self.families.received, &labels),
            self.shard.counter(&self.families.sent, &labels),
        )
    }

    /// Counts and logs the end of a connection; `fault` is `None` if it ended normally.
    pub fn closed(
        &self,
        flow: &FlowRecord,
        meter: &Meter,
        fault: Option<(&ConnectionFailure, &str)>,
    ) {
        let closed = ReportedConnection {
            flow,
            flag: fault.map_or(FLAG_NONE, |(f, _)| f.flag),
            result: fault.map_or("complete", |(f, _)| f.name),
            error: fault.map_or("", |(_, why)| why),
            bytes_sent: meter.b_to_a(),
            bytes_received: meter.a_to_b(),
            took: flow.started.elapsed(),
        };
        self.shard
            .counter(&self.families.closed, &label_values(&closed))
            .inc();
        if let Some((
            ConnectionFailure {
                refusal: Some(r), ..
            },
            _,
        )) = fault
        {
            self.count_refused(flow.reporter, *r);
        }
        write_log(&self.log, &closed);
    }
}

/// Reason why a routed connection did not end normally.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionFailure {
    /// Value of `result` in the log.
    pub name: &'static str,
    /// Value of the label `response_flags`.
    pub flag: &'static str,
    /// Refusal to count as well, if the connection was never established.
    pub refusal: Option<NodeRefusal>,
}

impl From<NodeRefusal> for ConnectionFailure {
    fn from(r: NodeRefusal) -> Self {
        Self {
            name: r.name(),
            flag: r.flag(),
            refusal: Some(r),
        }
    }
}

/// One side reset the connection.
pub const RESET: ConnectionFailure = ConnectionFailure {
    name: "reset",
    flag: FLAG_NONE,
    refusal: None,
};
/// This process closed the connection: at the drain's deadline, or because the pod is gone.
pub const CUT: ConnectionFailure = ConnectionFailure {
    name: "cut",
    flag: FLAG_NONE,
    refusal: None,
};

//! The fields of a connection: one row each, read by the access log and the metric labels.
//!
//! A row says under which name each output shows the field and how its value is read; a new field
//! is one row. Start with [`FIELDS`].

use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use canal_model::identity::Identity;
use canal_model::program::Service;
use canal_telemetry::access_log::WorkerLog;
use canal_wire::hbone::Baggage;
use smallvec::SmallVec;

use crate::pod::{LocalPod, workload_name};

/// Istio's value for an unknown label.
const UNKNOWN: &str = "unknown";

/// Labels of one end of a connection. Empty fields are unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EndpointLabels {
    pub workload: String,
    pub pod: String,
    pub namespace: String,
    pub service: String,
    pub revision: String,
    pub principal: String,
    pub cluster: String,
    pub zone: String,
    /// Labels as `key=value,…`, for the log only.
    pub labels: String,
}

impl EndpointLabels {
    /// Returns the labels of a pod of this node.
    pub fn of_pod(pod: &LocalPod, cluster: &str, az: &str, principal: Option<&Identity>) -> Self {
        let label = |keys: &[&str]| keys.iter().find_map(|k| pod.labels.get(*k)).cloned();
        let workload = workload_name(pod.name.as_str()).to_string();
        Self {
            service: label(&[
                "service.istio.io/canonical-name",
                "app.kubernetes.io/name",
                "app",
            ])
            .unwrap_or_else(|| workload.clone()),
            revision: label(&[
                "service.istio.io/canonical-revision",
                "app.kubernetes.io/version",
                "version",
            ])
            .unwrap_or_else(|| "latest".into()),
            workload,
            pod: pod.name.to_string(),
            namespace: pod.namespace.to_string(),
            principal: principal.map(Identity::to_string).unwrap_or_default(),
            cluster: cluster.into(),
            zone: az.into(),
            labels: pod
                .labels
                .iter()
                .map(|(k, v)| format!("{k}={v}"))
                .collect::<Vec<_>>()
                .join(","),
        }
    }

    /// Returns the labels that a peer states in its baggage, with the identity that it proved.
    pub fn of_baggage(b: Baggage, principal: &Identity) -> Self {
        Self {
            workload: workload_name(&b.pod).to_string(),
            pod: b.pod,
            namespace: b.namespace,
            service: b.service,
            revision: b.version,
            principal: principal.to_string(),
            cluster: b.cluster,
            zone: b.az,
            labels: String::new(),
        }
    }

    /// Returns the `baggage` header of this end.
    pub fn baggage(&self) -> Baggage {
        Baggage {
            cluster: self.cluster.clone(),
            namespace: self.namespace.clone(),
            pod: self.pod.clone(),
            service: self.service.clone(),
            version: self.revision.clone(),
            az: self.zone.clone(),
        }
    }
}

/// Side of a connection on which this node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reporter {
    Source,
    Destination,
}

impl Reporter {
    fn label(self) -> &'static str {
        match self {
            Reporter::Source => "source",
            Reporter::Destination => "destination",
        }
    }
    /// Returns `outbound` or `inbound`, as in ztunnel's log.
    pub fn direction(self) -> &'static str {
        match self {
            Reporter::Source => "outbound",
            Reporter::Destination => "inbound",
        }
    }
}

/// Facts about a connection once its route is decided.
#[derive(Debug, Clone)]
pub struct FlowRecord {
    pub reporter: Reporter,
    pub source: Arc<EndpointLabels>,
    pub destination: Arc<EndpointLabels>,
    pub service: Option<Arc<Service>>,
    /// True if this node's leg towards the other node or gateway is mutual TLS.
    pub mutual_tls: bool,
    pub source_address: SocketAddr,
    pub destination_address: SocketAddr,
    /// The `:authority` of the tunnel; empty if there is none.
    pub authority: String,
    /// True if the tunnel leads to the pod's node without a gateway.
    pub is_direct: bool,
    pub started: Instant,
}

/// A connection that is over, or about to be dialed.
pub(crate) struct ReportedConnection<'a> {
    pub(crate) flow: &'a FlowRecord,
    /// Value of the label `response_flags`.
    pub(crate) flag: &'a str,
    /// Name of the way in which the connection ended.
    pub(crate) result: &'a str,
    /// Details of the end; empty if there are none.
    pub(crate) error: &'a str,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
    pub(crate) took: Duration,
}

impl<'a> ReportedConnection<'a> {
    /// Returns the fields of a connection that is about to be dialed.
    pub(crate) fn before_dial(flow: &'a FlowRecord, flag: &'a str) -> Self {
        Self {
            flow,
            flag,
            result: "",
            error: "",
            bytes_sent: 0,
            bytes_received: 0,
            took: Duration::ZERO,
        }
    }
}

/// Value of a field.
enum ConnectionValue<'a> {
    Text(&'a str),
    /// A text that is empty if it is not known.
    Known(&'a str),
    Number(u64),
    Duration(Duration),
    Address(SocketAddr),
}

use ConnectionValue::{Address, Known, Number, Text};

/// Function that reads the value of a field.
type ReadField = for<'a> fn(&ReportedConnection<'a>) -> ConnectionValue<'a>;

/// One field. A name is empty where the output does not show it.
struct ConnectionField {
    /// Name in the access log.
    log: &'static str,
    /// Metric label.
    label: &'static str,
    read: ReadField,
}

const fn field(log: &'static str, label: &'static str, read: ReadField) -> ConnectionField {
    ConnectionField { log, label, read }
}

/// All fields, in the order in which the access log and the metrics show them. A row is: name in
/// the access log, metric label, value. Names in the access log are ztunnel's.
static FIELDS: &[ConnectionField] = &[
    field("", "reporter", |c| Text(c.flow.reporter.label())),
    field("direction", "", |c| Text(c.flow.reporter.direction())),
    field("result", "", |c| Text(c.result)),
    field("response_flags", "response_flags", |c| Text(c.flag)),
    field("src.addr", "", |c| Address(c.flow.source_address)),
    field("src.workload", "source_workload", |c| {
        Known(&c.flow.source.workload)
    }),
    field("src.pod", "", |c| Known(&c.flow.source.pod)),
    field("src.namespace", "source_workload_namespace", |c| {
        Known(&c.flow.source.namespace)
    }),
    field("src.identity", "source_principal", |c| {
        Known(&c.flow.source.principal)
    }),
    field("src.labels", "", |c| Known(&c.flow.source.labels)),
    field("", "source_canonical_service", |c| {
        Known(&c.flow.source.service)
    }),
    field("", "source_canonical_revision", |c| {
        Known(&c.flow.source.revision)
    }),
    field("", "source_app", |c| Known(&c.flow.source.service)),
    field("", "source_version", |c| Known(&c.flow.source.revision)),
    field("", "source_cluster", |c| Known(&c.flow.source.cluster)),
    field("", "source_region", |_| Known("")),
    field("", "source_zone", |c| Known(&c.flow.source.zone)),
    field("dst.addr", "", |c| Address(c.flow.destination_address)),
    field("dst.hbone_addr", "", |c| Known(&c.flow.authority)),
    field("path", "", |c| {
        Known(if c.flow.is_direct { "direct" } else { "" })
    }),
    field("dst.service", "destination_service", |c| {
        service(c, |service| &service.hostname)
    }),
    field("", "destination_service_name", |c| {
        service(c, |service| service.key.name.as_str())
    }),
    field("", "destination_service_namespace", |c| {
        service(c, |service| service.key.namespace.as_str())
    }),
    field("dst.workload", "destination_workload", |c| {
        Known(&c.flow.destination.workload)
    }),
    field("dst.pod", "", |c| Known(&c.flow.destination.pod)),
    field("dst.namespace", "destination_workload_namespace", |c| {
        Known(&c.flow.destination.namespace)
    }),
    field("dst.identity", "destination_principal", |c| {
        Known(&c.flow.destination.principal)
    }),
    field("dst.labels", "", |c| Known(&c.flow.destination.labels)),
    field("", "destination_canonical_service", |c| {
        Known(&c.flow.destination.service)
    }),
    field("", "destination_canonical_revision", |c| {
        Known(&c.flow.destination.revision)
    }),
    field("", "destination_app", |c| {
        Known(&c.flow.destination.service)
    }),
    field("", "destination_version", |c| {
        Known(&c.flow.destination.revision)
    }),
    field("", "destination_cluster", |c| {
        Known(&c.flow.destination.cluster)
    }),
    field("", "destination_region", |_| Known("")),
    field("", "destination_zone", |c| Known(&c.flow.destination.zone)),
    field("", "request_protocol", |_| Text("tcp")),
    field("", "connection_security_policy", |c| {
        match (c.flow.mutual_tls, c.flow.reporter) {
            (true, _) => Text("mutual_tls"),
            (false, Reporter::Destination) => Text("none"),
            (false, Reporter::Source) => Known(""),
        }
    }),
    field("bytes_sent", "", |c| Number(c.bytes_sent)),
    field("bytes_recv", "", |c| Number(c.bytes_received)),
    field("duration", "", |c| ConnectionValue::Duration(c.took)),
    field("error", "", |c| Known(c.error)),
];

fn service<'a>(
    connection: &ReportedConnection<'a>,
    read: impl FnOnce(&'a Service) -> &'a str,
) -> ConnectionValue<'a> {
    Known(connection.flow.service.as_deref().map_or("", read))
}

/// Labels of all `istio_tcp_*` families, in the order of [`label_values`].
pub(crate) static LABELS: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| labels().map(|field| field.label).collect());

fn labels() -> impl Iterator<Item = &'static ConnectionField> {
    FIELDS.iter().filter(|field| !field.label.is_empty())
}

/// Returns the label values of a connection, in the order of [`LABELS`].
pub(crate) fn label_values<'a>(connection: &ReportedConnection<'a>) -> SmallVec<[&'a str; 28]> {
    let value = |field: &ConnectionField| match (field.read)(connection) {
        Text(text) | Known(text) if !text.is_empty() => text,
        // Numbers and addresses have no bound, so no label has them.
        _ => UNKNOWN,
    };
    labels().map(value).collect()
}

/// Writes a line of the access log with all its fields.
pub(crate) fn write_log(log: &WorkerLog, connection: &ReportedConnection<'_>) {
    let mut line = log.line();
    for field in FIELDS.iter().filter(|field| !field.log.is_empty()) {
        line = match (field.read)(connection) {
            Text(text) => line.str(field.log, text),
            Known(text) => line.some(field.log, text),
            Number(number) => line.u64(field.log, number),
            ConnectionValue::Duration(duration) => line.millis(field.log, duration),
            Address(address) => line.display(field.log, address),
        };
    }
    line.end();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(labels: &str) -> LocalPod {
        let text = format!(
            r#"{{"uid":"alpha/b/reviews-v1-0","namespace":"b","name":"reviews-v1-0","serviceAccount":"c","netns":"/n","cgroup":"/c","ips":["10.0.0.1"],"labels":{{{labels}}}}}"#
        );
        LocalPod::parse("f", text.as_bytes()).unwrap()
    }

    #[test]
    fn a_pods_labels_name_it_as_istio_would() {
        for (labels, service, revision) in [
            ("", "reviews-v1", "latest"),
            (r#""app":"reviews","version":"v1""#, "reviews", "v1"),
            (
                r#""app":"x","app.kubernetes.io/name":"y","app.kubernetes.io/version":"2""#,
                "y",
                "2",
            ),
            (
                r#""app":"x","service.istio.io/canonical-name":"z","service.istio.io/canonical-revision":"3""#,
                "z",
                "3",
            ),
        ] {
            let p = EndpointLabels::of_pod(&pod(labels), "c1", "az1", None);
            assert_eq!(
                (p.service.as_str(), p.revision.as_str(), p.workload.as_str()),
                (service, revision, "reviews-v1"),
                "{labels}"
            );
        }
    }

    #[test]
    fn baggage_transfers_workload_labels() {
        let id = "spiffe://alpha.example/ns/b/sa/c".parse().unwrap();
        let here = EndpointLabels::of_pod(&pod(r#""app":"reviews""#), "c1", "az1", Some(&id));
        let there = EndpointLabels::of_baggage(Baggage::decode(&here.baggage().encode()), &id);
        assert_eq!(
            there,
            EndpointLabels {
                labels: String::new(),
                ..here
            }
        );
    }

    #[test]
    fn labels_stand_under_their_names() {
        let id: Identity = "spiffe://alpha.example/ns/b/sa/c".parse().unwrap();
        let flow = FlowRecord {
            reporter: Reporter::Source,
            source: Arc::new(EndpointLabels::of_pod(
                &pod(r#""app":"reviews","version":"v1""#),
                "c1",
                "az1",
                Some(&id),
            )),
            destination: Arc::default(),
            service: None,
            mutual_tls: true,
            source_address: "10.0.0.1:1".parse().unwrap(),
            destination_address: "10.0.0.2:2".parse().unwrap(),
            authority: String::new(),
            is_direct: false,
            started: Instant::now(),
        };
        let values = label_values(&ReportedConnection::before_dial(&flow, "CONNECT"));
        let value = |name: &str| values[LABELS.iter().position(|l| *l == name).unwrap()];
        for (name, want) in [
            ("reporter", "source"),
            ("source_workload", "reviews-v1"),
            ("source_canonical_service", "reviews"),
            ("source_canonical_revision", "v1"),
            ("source_app", "reviews"),
            ("source_version", "v1"),
            ("source_principal", "spiffe://alpha.example/ns/b/sa/c"),
            ("source_cluster", "c1"),
            ("source_zone", "az1"),
            ("source_region", "unknown"),
            ("destination_workload", "unknown"),
            ("destination_service", "unknown"),
            ("request_protocol", "tcp"),
            ("response_flags", "CONNECT"),
            ("connection_security_policy", "mutual_tls"),
        ] {
            assert_eq!(value(name), want, "{name}");
        }
    }
}

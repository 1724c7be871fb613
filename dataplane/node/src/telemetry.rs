//! What is recorded of a connection: `istio_tcp_*` with Istio's labels, refusals by name, and one access log line at its end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use canal_kit::copy::Meter;
use canal_kit::log::WorkerLog;
use canal_kit::metrics::{Counter, Counters, Family, Registry, Shard};
use canal_model::authorization::PolicyKey;
use canal_model::identity::Identity;
use canal_model::program::Service;
use canal_wire::hbone::Baggage;

use crate::authorization::{PodPolicy, Question, Refused, Source};
use crate::pod::{Pod, workload_name};
use crate::refusal::{REFUSALS, Refusal};

/// Labels of all `istio_tcp_*` families, in the order of [`labels`].
pub const LABELS: [&str; 27] = [
    "reporter",
    "source_workload",
    "source_canonical_service",
    "source_canonical_revision",
    "source_workload_namespace",
    "source_principal",
    "source_app",
    "source_version",
    "source_cluster",
    "source_region",
    "source_zone",
    "destination_workload",
    "destination_canonical_service",
    "destination_canonical_revision",
    "destination_workload_namespace",
    "destination_principal",
    "destination_app",
    "destination_version",
    "destination_cluster",
    "destination_region",
    "destination_zone",
    "destination_service",
    "destination_service_name",
    "destination_service_namespace",
    "request_protocol",
    "response_flags",
    "connection_security_policy",
];

/// No flag.
const FLAG_NONE: &str = "-";
/// Istio's word for what is not known.
const UNKNOWN: &str = "unknown";

/// One end of a connection as the records name it. Empty fields are not known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Party {
    pub workload: String,
    pub pod: String,
    pub namespace: String,
    pub service: String,
    pub revision: String,
    pub principal: String,
    pub cluster: String,
    pub zone: String,
    /// `key=value,…`, for the log only.
    pub labels: String,
}

impl Party {
    /// A pod of this node.
    pub fn of_pod(pod: &Pod, cluster: &str, az: &str, principal: Option<&Identity>) -> Self {
        let label = |keys: &[&str]| keys.iter().find_map(|k| pod.labels.get(*k)).cloned();
        let workload = workload_name(pod.name.as_str()).to_string();
        Self {
            service: label(&["service.istio.io/canonical-name", "app.kubernetes.io/name", "app"]).unwrap_or_else(|| workload.clone()),
            revision: label(&["service.istio.io/canonical-revision", "app.kubernetes.io/version", "version"])
                .unwrap_or_else(|| "latest".into()),
            workload,
            pod: pod.name.to_string(),
            namespace: pod.namespace.to_string(),
            principal: principal.map(Identity::to_string).unwrap_or_default(),
            cluster: cluster.into(),
            zone: az.into(),
            labels: pod.labels.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(","),
        }
    }

    /// What a peer says of itself, and the identity it proved.
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

    /// As this party's `baggage` header says it.
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

/// Which side of a connection this node stands on.
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
    /// `outbound` or `inbound`, as ztunnel's log says.
    pub fn direction(self) -> &'static str {
        match self {
            Reporter::Source => "outbound",
            Reporter::Destination => "inbound",
        }
    }
}

/// What is known of a connection once it was decided where it goes.
#[derive(Debug, Clone)]
pub struct Flow {
    pub reporter: Reporter,
    pub source: Arc<Party>,
    pub destination: Arc<Party>,
    pub service: Option<Arc<Service>>,
    /// Whether this node's leg towards the other node or gateway is mutual TLS.
    pub mutual_tls: bool,
    pub source_address: SocketAddr,
    pub destination_address: SocketAddr,
    /// The `:authority`, if there is a tunnel.
    pub authority: String,
    pub started: Instant,
}

/// The label values of `flow` with `flag`, in the order of [`LABELS`].
pub fn labels<'a>(flow: &'a Flow, flag: &'a str) -> [&'a str; 27] {
    let known = |s: &'a str| if s.is_empty() { UNKNOWN } else { s };
    let (s, d) = (&flow.source, &flow.destination);
    let service = flow.service.as_deref();
    [
        flow.reporter.label(),
        known(&s.workload),
        known(&s.service),
        known(&s.revision),
        known(&s.namespace),
        known(&s.principal),
        known(&s.service),
        known(&s.revision),
        known(&s.cluster),
        UNKNOWN,
        known(&s.zone),
        known(&d.workload),
        known(&d.service),
        known(&d.revision),
        known(&d.namespace),
        known(&d.principal),
        known(&d.service),
        known(&d.revision),
        known(&d.cluster),
        UNKNOWN,
        known(&d.zone),
        service.map_or(UNKNOWN, |s| &s.hostname),
        service.map_or(UNKNOWN, |s| s.key.name.as_str()),
        service.map_or(UNKNOWN, |s| s.key.namespace.as_str()),
        "tcp",
        flag,
        match (flow.mutual_tls, flow.reporter) {
            (true, _) => "mutual_tls",
            (false, Reporter::Destination) => "none",
            (false, Reporter::Source) => UNKNOWN,
        },
    ]
}

/// The families, registered once per process.
#[derive(Debug, Clone)]
pub struct Families {
    opened: Counters,
    closed: Counters,
    sent: Counters,
    received: Counters,
    refused: Counters,
    /// `canal_node_gateway_failures_total{gateway,blame}`.
    gateway_failures: Counters,
    /// `canal_authorization_total{tenant,action,policy}`.
    authorization: Counters,
    closed_early: Counters,
}

/// Connections that were let in and ended before their time.
pub fn closed_family() -> Family {
    Family::new("canal_node_closed_total", "Open connections into pods that were ended, by reason.", &["reason"])
}

impl Families {
    /// Registers them.
    pub fn new(r: &Registry) -> Self {
        let tcp = |name, help| r.counters(Family::new(name, help, &LABELS));
        let refused = Family::new("canal_node_refused_total", "Connections and tunnels refused, by reason.", &["direction", "reason"]);
        let failures = Family::new("canal_node_gateway_failures_total", "Tunnels that a gateway did not open.", &["gateway", "blame"]);
        Self {
            opened: tcp("istio_tcp_connections_opened_total", "The total number of TCP connections opened."),
            closed: tcp("istio_tcp_connections_closed_total", "The total number of TCP connections closed."),
            sent: tcp("istio_tcp_sent_bytes_total", "The size of total bytes sent during response in case of a TCP connection."),
            received: tcp("istio_tcp_received_bytes_total", "The size of total bytes received during request in case of a TCP connection."),
            refused: r.counters(refused),
            gateway_failures: r.counters(failures),
            authorization: r.counters(Family::new(
                "canal_authorization_total",
                "Answers of policies to who wants into pods, and audits and dry runs that matched.",
                &["tenant", "action", "policy"],
            )),
            closed_early: r.counters(closed_family()),
        }
    }
}

/// One worker's records.
pub struct Records {
    families: Families,
    shard: Shard,
    log: WorkerLog,
    refused: [[Counter; REFUSALS.len()]; 2],
}

impl Records {
    /// `shard` and `log` are the worker's own.
    pub fn new(families: Families, shard: Shard, log: WorkerLog) -> Self {
        let refused = [Reporter::Source, Reporter::Destination]
            .map(|r| REFUSALS.map(|x| shard.counter(&families.refused, &[r.direction(), x.name()])));
        Self { families, shard, log, refused }
    }

    /// A refusal before anything was known: counted and logged with what there is.
    pub fn refused(
        &self,
        reporter: Reporter,
        reason: Refusal,
        source: SocketAddr,
        destination: Option<SocketAddr>,
        pod: &Party,
        why: &str,
    ) {
        self.count_refused(reporter, reason);
        let (end, of) = match reporter {
            Reporter::Source => ("src.workload", "src.namespace"),
            Reporter::Destination => ("dst.workload", "dst.namespace"),
        };
        let line = self.log.line().str("direction", reporter.direction()).str("result", reason.name());
        let line = line.str("response_flags", reason.flag()).display("src.addr", source);
        let line = match destination {
            Some(d) => line.display("dst.addr", d),
            None => line,
        };
        line.str(end, &pod.workload).str(of, &pod.namespace).some("error", why).end();
    }

    /// Counts a refusal that is logged elsewhere.
    fn count_refused(&self, reporter: Reporter, reason: Refusal) {
        let side = usize::from(reporter == Reporter::Destination);
        if let Some(i) = REFUSALS.iter().position(|x| *x == reason) {
            self.refused[side][i].inc();
        }
    }

    /// A gateway that did not open a tunnel.
    pub fn gateway_failed(&self, label: &str, blame: &str) {
        self.shard.counter(&self.families.gateway_failures, &[label, blame]).inc();
    }

    /// What policies of `pod` said: to `question`, if it was allowed, else that `no`. Pods without policies are not counted, unless they refuse.
    /// Names are as in gateways.
    pub fn judged(&self, pod: &Pod, policy: &PodPolicy, question: Option<&Question>, no: Option<&Refused>) {
        let count = |action: &str, policy: Option<&PolicyKey>| {
            let policy = policy.map(|key| format!("{}/{}", key.namespace, key.name)).unwrap_or_default();
            self.shard.counter(&self.families.authorization, &[pod.tenant.as_str(), action, &policy]).inc();
        };
        match no {
            Some(Refused { refusal, policy, .. }) => match refusal {
                Refusal::Denied => count("deny", policy.as_ref()),
                Refusal::Undecided | Refusal::StrictPlaintext => count(refusal.name(), policy.as_ref()),
                _ => {}
            },
            None if question.is_some_and(|q| q.source == Source::Node) => count("node", None),
            None if policy.is_empty() => {}
            None => count("allow", None),
        }
        if let Some(question) = question {
            policy.observe(question, &mut |key, kind| count(kind.name(), Some(key)));
        }
    }

    /// An open connection that policies end: counted, and as the log says it.
    pub fn cut(&self, no: &Refused) -> (Fault, String) {
        self.shard.counter(&self.families.closed_early, &[no.refusal.name()]).inc();
        (Fault { refusal: None, ..no.refusal.into() }, format!("policies have changed: {}", no.why))
    }

    /// The connection is about to be made.
    pub fn opened(&self, flow: &Flow) -> Meter {
        let labels = labels(flow, FLAG_NONE);
        self.shard.counter(&self.families.opened, &labels).inc();
        Meter::with(self.shard.counter(&self.families.received, &labels), self.shard.counter(&self.families.sent, &labels))
    }

    /// The connection has ended, well (`None`) or not.
    pub fn closed(&self, flow: &Flow, meter: &Meter, fault: Option<(&Fault, &str)>) {
        let flag = fault.map_or(FLAG_NONE, |(f, _)| f.flag);
        self.shard.counter(&self.families.closed, &labels(flow, flag)).inc();
        if let Some((Fault { refusal: Some(r), .. }, _)) = fault {
            self.count_refused(flow.reporter, *r);
        }
        let service = flow.service.as_deref();
        let line = self.log.line().str("direction", flow.reporter.direction());
        let line = line.str("result", fault.map_or("complete", |(f, _)| f.name)).str("response_flags", flag);
        let line = line.display("src.addr", flow.source_address).some("src.workload", &flow.source.workload);
        let line = line.some("src.pod", &flow.source.pod).some("src.namespace", &flow.source.namespace);
        let line = line.some("src.identity", &flow.source.principal).some("src.labels", &flow.source.labels);
        let line = line.display("dst.addr", flow.destination_address).some("dst.hbone_addr", &flow.authority);
        let line = line.some("dst.service", service.map_or("", |s| &s.hostname)).some("dst.workload", &flow.destination.workload);
        let line = line.some("dst.pod", &flow.destination.pod).some("dst.namespace", &flow.destination.namespace);
        let line = line.some("dst.identity", &flow.destination.principal).some("dst.labels", &flow.destination.labels);
        let line = line.u64("bytes_sent", meter.b_to_a()).u64("bytes_recv", meter.a_to_b());
        line.millis("duration", flow.started.elapsed()).some("error", fault.map_or("", |(_, why)| why)).end();
    }
}

/// Why a connection that was decided on did not end well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// For the log.
    pub name: &'static str,
    /// `response_flags`.
    pub flag: &'static str,
    /// Counted as a refusal too, if it never came up.
    pub refusal: Option<Refusal>,
}

impl From<Refusal> for Fault {
    fn from(r: Refusal) -> Self {
        Self { name: r.name(), flag: r.flag(), refusal: Some(r) }
    }
}

/// One side reset it.
pub const RESET: Fault = Fault { name: "reset", flag: FLAG_NONE, refusal: None };
/// This process closed it: drain deadline, or the pod is gone.
pub const CUT: Fault = Fault { name: "cut", flag: FLAG_NONE, refusal: None };

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(labels: &str) -> Pod {
        let text = format!(
            r#"{{"uid":"alpha/b/reviews-v1-0","namespace":"b","name":"reviews-v1-0","serviceAccount":"c","netns":"/n","cgroup":"/c","ips":["10.0.0.1"],"labels":{{{labels}}}}}"#
        );
        Pod::parse("f", text.as_bytes()).unwrap()
    }

    #[test]
    fn a_pods_labels_name_it_as_istio_would() {
        for (labels, service, revision) in [
            ("", "reviews-v1", "latest"),
            (r#""app":"reviews","version":"v1""#, "reviews", "v1"),
            (r#""app":"x","app.kubernetes.io/name":"y","app.kubernetes.io/version":"2""#, "y", "2"),
            (r#""app":"x","service.istio.io/canonical-name":"z","service.istio.io/canonical-revision":"3""#, "z", "3"),
        ] {
            let p = Party::of_pod(&pod(labels), "c1", "az1", None);
            assert_eq!((p.service.as_str(), p.revision.as_str(), p.workload.as_str()), (service, revision, "reviews-v1"), "{labels}");
        }
    }

    #[test]
    fn baggage_brings_a_party_across() {
        let id = "spiffe://alpha.example/ns/b/sa/c".parse().unwrap();
        let here = Party::of_pod(&pod(r#""app":"reviews""#), "c1", "az1", Some(&id));
        let there = Party::of_baggage(Baggage::decode(&here.baggage().encode()), &id);
        assert_eq!(there, Party { labels: String::new(), ..here });
    }

    #[test]
    fn labels_stand_under_their_names() {
        let id: Identity = "spiffe://alpha.example/ns/b/sa/c".parse().unwrap();
        let flow = Flow {
            reporter: Reporter::Source,
            source: Arc::new(Party::of_pod(&pod(r#""app":"reviews","version":"v1""#), "c1", "az1", Some(&id))),
            destination: Arc::default(),
            service: None,
            mutual_tls: true,
            source_address: "10.0.0.1:1".parse().unwrap(),
            destination_address: "10.0.0.2:2".parse().unwrap(),
            authority: String::new(),
            started: Instant::now(),
        };
        let values = labels(&flow, "CONNECT");
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

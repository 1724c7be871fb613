//! Istio's metric families, and the worker's short way from a request to its counters: by numbers, not by strings.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use canal_kit::metrics::{Counter, Counters, Family, Histogram, Histograms, Registry, Shard};
use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::account::Account;
use crate::endpoints::SetView;
use crate::fault::Flag;
use crate::snapshot::Party;
use crate::snapshot::party::UNKNOWN;
use crate::source::Source;

/// Series a worker finds by number; reaching it forgets them all, which costs look-ups and nothing else.
const SERIES_MAX: usize = 8192;

macro_rules! labels {
    ($($own:literal),*) => {
        &[
            "tenant", "reporter",
            "source_workload", "source_workload_namespace", "source_principal", "source_app", "source_version", "source_cluster",
            "source_canonical_service", "source_canonical_revision",
            "destination_workload", "destination_workload_namespace", "destination_principal", "destination_app", "destination_version",
            "destination_cluster", "destination_canonical_service", "destination_canonical_revision",
            "destination_service", "destination_service_name", "destination_service_namespace",
            "connection_security_policy", "request_protocol", "response_flags" $(, $own)*
        ]
    };
}

const REQUEST: &[&str] = labels!("response_code", "grpc_response_status");
const TCP: &[&str] = labels!();

/// Envoy's and Istio's buckets: microseconds here, milliseconds outside.
const MICROS: &[u64] = &[
    500,
    1_000,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    30_000_000,
    60_000_000,
    300_000_000,
    600_000_000,
    1_800_000_000,
    3_600_000_000,
];
const BYTES: &[u64] =
    &[1, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000, 600_000, 1_800_000, 3_600_000];

/// The families, registered once per process.
#[derive(Debug, Clone)]
pub(crate) struct Families {
    requests: Counters,
    duration: Histograms,
    bytes_in: Histograms,
    bytes_out: Histograms,
    tcp_opened: Counters,
    tcp_closed: Counters,
    tcp_received: Counters,
    tcp_sent: Counters,
}

impl Families {
    pub(crate) fn new(registry: &Registry) -> Self {
        let counter = |name, help, labels| registry.counters(Family::new(name, help, labels));
        let histogram = |name, help, bounds, scale| registry.histograms(Family::new(name, help, REQUEST), bounds, scale);
        Self {
            requests: counter("istio_requests_total", "Requests.", REQUEST),
            duration: histogram("istio_request_duration_milliseconds", "Time from a request's head to its answer's end.", MICROS, 0.001),
            bytes_in: histogram("istio_request_bytes", "Payload of requests.", BYTES, 1.0),
            bytes_out: histogram("istio_response_bytes", "Payload of answers.", BYTES, 1.0),
            tcp_opened: counter("istio_tcp_connections_opened_total", "Relayed connections opened.", TCP),
            tcp_closed: counter("istio_tcp_connections_closed_total", "Relayed connections closed.", TCP),
            tcp_received: counter("istio_tcp_received_bytes_total", "Bytes from clients on relayed connections.", TCP),
            tcp_sent: counter("istio_tcp_sent_bytes_total", "Bytes to clients on relayed connections.", TCP),
        }
    }
}

/// From where to where, as labels say it.
#[derive(Clone, Copy)]
pub(crate) struct Ends<'a> {
    pub(crate) account: &'a Account,
    pub(crate) source: &'a Source,
    /// The source proved its identity.
    pub(crate) secured: bool,
    /// The set, and the endpoint in it once one was chosen.
    pub(crate) target: Option<(&'a SetView, Option<usize>)>,
}

/// What is counted of one request.
#[derive(Debug)]
pub(crate) struct Observed {
    pub(crate) status: u16,
    pub(crate) flag: Flag,
    pub(crate) grpc: bool,
    pub(crate) grpc_status: Option<u8>,
    pub(crate) micros: u64,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    source: u32,
    /// Unique per set, which names service and endpoints.
    set: u64,
    endpoint: u32,
    status: u16,
    flag: Flag,
    grpc: Option<Option<u8>>,
}

#[derive(Debug)]
struct OfRequest {
    requests: Counter,
    duration: Histogram,
    bytes_in: Histogram,
    bytes_out: Histogram,
}

/// A relayed connection's counters.
#[derive(Debug)]
pub(crate) struct Relay {
    pub(crate) received: Counter,
    pub(crate) sent: Counter,
}

/// The worker's series.
#[derive(Debug)]
pub(crate) struct Series {
    families: Families,
    shard: Shard,
    known: RefCell<HashMap<Key, Rc<OfRequest>, foldhash::fast::RandomState>>,
    /// Of the registry, when `known` was begun: handles that are kept for ever keep series from ending.
    generation: Cell<u64>,
}

/// Codes that are shown as their class: an endpoint chooses its codes, and each would be a series.
const CLASSES: [&str; 10] = ["0xx", "1xx", "2xx", "3xx", "4xx", "5xx", "6xx", "7xx", "8xx", "9xx"];

/// The code of an answer as metrics know it: one that is registered (IANA, HTTP Status Code Registry; 499 is the gateway's own), else its class.
fn decide_code(status: u16) -> u16 {
    match status {
        100..=104 | 200..=208 | 226 | 300..=308 | 400..=418 | 421..=426 | 428 | 429 | 431 | 451 | 499 | 500..=508 | 510 | 511 => status,
        _ => status / 100 % 10,
    }
}

/// The status of a gRPC answer as metrics know it; what gRPC does not define is UNKNOWN, as it is for clients.
fn decide_grpc(status: u8) -> u8 {
    if status <= 16 { status } else { 2 }
}

type Values<'a> = SmallVec<[&'a str; 28]>;

impl Series {
    pub(crate) fn new(families: &Families, shard: &Shard) -> Self {
        Self { families: families.clone(), shard: shard.clone(), known: RefCell::default(), generation: Cell::new(0) }
    }

    /// Counts one request.
    pub(crate) fn request(&self, ends: &Ends<'_>, seen: &Observed) {
        let key = Key {
            source: ends.source.number,
            // 0 is no set's.
            set: ends.target.map_or(u64::from(ends.account.number) << 40, |(view, _)| view.set.id),
            endpoint: ends.target.and_then(|(_, at)| at).map_or(u32::MAX, |at| at as u32),
            status: decide_code(seen.status),
            flag: seen.flag,
            grpc: seen.grpc.then_some(seen.grpc_status.map(decide_grpc)),
        };
        let generation = self.shard.generation();
        if generation != self.generation.replace(generation) {
            self.known.borrow_mut().clear();
        }
        let known = self.known.borrow().get(&key).cloned();
        let series = known.unwrap_or_else(|| {
            let made = Rc::new(self.make(ends, seen, &key));
            let mut known = self.known.borrow_mut();
            if known.len() >= SERIES_MAX {
                known.clear();
            }
            known.insert(key, made.clone());
            made
        });
        series.requests.inc();
        series.duration.observe(seen.micros);
        series.bytes_in.observe(seen.bytes_in);
        series.bytes_out.observe(seen.bytes_out);
    }

    fn make(&self, ends: &Ends<'_>, seen: &Observed, key: &Key) -> OfRequest {
        let unknown = Party::unknown();
        let (mut code, mut grpc) = (itoa::Buffer::new(), itoa::Buffer::new());
        let mut values = label_values(ends, &unknown, if seen.grpc { "grpc" } else { "http" }, seen.flag);
        values.push(CLASSES.get(usize::from(key.status)).copied().unwrap_or_else(|| code.format(key.status)));
        values.push(key.grpc.flatten().map_or("", |s| grpc.format(s)));
        OfRequest {
            requests: self.shard.counter(&self.families.requests, &values),
            duration: self.shard.histogram(&self.families.duration, &values),
            bytes_in: self.shard.histogram(&self.families.bytes_in, &values),
            bytes_out: self.shard.histogram(&self.families.bytes_out, &values),
        }
    }

    /// Counts a relayed connection as opened, and gives the counters of its bytes.
    pub(crate) fn relay_opened(&self, ends: &Ends<'_>) -> Relay {
        let unknown = Party::unknown();
        let values = label_values(ends, &unknown, "tcp", Flag::None);
        self.shard.counter(&self.families.tcp_opened, &values).inc();
        Relay {
            received: self.shard.counter(&self.families.tcp_received, &values),
            sent: self.shard.counter(&self.families.tcp_sent, &values),
        }
    }

    /// Counts a relayed connection as closed, or as one that never came up.
    pub(crate) fn relay_closed(&self, ends: &Ends<'_>, flag: Flag) {
        let unknown = Party::unknown();
        self.shard.counter(&self.families.tcp_closed, &label_values(ends, &unknown, "tcp", flag)).inc();
    }
}

fn label_values<'a>(ends: &Ends<'a>, unknown: &'a Party, protocol: &'a str, flag: Flag) -> Values<'a> {
    let endpoint = ends.target.and_then(|(view, at)| view.set.endpoints.get(at?));
    let service = ends.target.and_then(|(view, _)| view.set.service.as_deref());
    let mut values: Values<'a> = SmallVec::new();
    // "waypoint" is Istio's word for a proxy between the two nodes, as dashboards of ambient meshes know it.
    values.extend([ends.account.tenant.as_str(), "waypoint"]);
    for party in [&ends.source.party, endpoint.map_or(unknown, |e| &*e.workload.party)] {
        let principal = if party.principal.is_empty() { UNKNOWN } else { &party.principal };
        values.extend([party.workload.as_str(), &party.namespace, principal, &party.app, &party.version, &party.cluster]);
        values.extend([party.service.as_str(), &party.revision]);
    }
    match service {
        Some(names) => values.extend([names.hostname.as_str(), names.key.name.as_str(), names.key.namespace.as_str()]),
        None => values.extend([UNKNOWN; 3]),
    }
    values.extend([if ends.secured { "mutual_tls" } else { "none" }, protocol, flag.text()]);
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_that_endpoints_invent_make_no_series_of_their_own() {
        for (status, label) in
            [(200, None), (404, None), (499, None), (511, None), (299, Some("2xx")), (777, Some("7xx")), (999, Some("9xx"))]
        {
            let code = decide_code(status);
            assert_eq!(CLASSES.get(usize::from(code)).copied(), label, "{status}");
            assert!(label.is_some() || code == status);
        }
        let codes: std::collections::BTreeSet<_> = (100..1000).map(decide_code).collect();
        assert!(codes.len() < 90, "{}", codes.len());
        let statuses: std::collections::BTreeSet<_> = (0..=u8::MAX).map(decide_grpc).collect();
        assert_eq!(statuses.len(), 17);
    }
}

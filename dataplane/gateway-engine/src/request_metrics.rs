//! Istio's metric families, and a per-worker table that finds a request's counters by numbers
//! instead of strings. The labels are those of `request_fields`.
//!
//! Start with [`RequestSeries::request`].

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::LazyLock;

use canal_gateway_config::UNKNOWN;
use canal_gateway_http::proxy_error::ResponseFlag;
use canal_runtime::metrics::{
    Counter, CounterFamily, Histogram, HistogramFamily, MetricFamily, MetricsShard, Registry,
};
use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::request_fields::{FIELDS, FieldValue, FinishedTraffic, RequestField};

/// Most series that a worker finds by number. At the limit it forgets all of them, which costs only
/// new lookups. It is near the 10,000 label sets that a metric family may have; further ones are
/// counted under `other`.
const SERIES_MAX: usize = 8192;

/// Labels of requests, in the order of their fields.
static REQUEST: LazyLock<Vec<&str>> =
    LazyLock::new(|| labels(true).map(|field| field.label).collect());
/// Labels of relayed connections.
static TCP: LazyLock<Vec<&str>> =
    LazyLock::new(|| labels(false).map(|field| field.label).collect());

/// Returns the fields that are labels, with or without those that only requests have.
fn labels(is_request: bool) -> impl Iterator<Item = &'static RequestField> {
    FIELDS
        .iter()
        .filter(move |field| !field.label.is_empty() && (is_request || !field.is_of_request))
}

/// Buckets of Envoy and Istio, in microseconds here and in milliseconds in the output.
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
// The same numbers as milliseconds, because Istio uses one list for both.
const BYTES: &[u64] = &[
    1, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000, 600_000,
    1_800_000, 3_600_000,
];

/// Metric families, registered once per process.
#[derive(Debug, Clone)]
pub(crate) struct RequestMetricFamilies {
    requests: CounterFamily,
    duration: HistogramFamily,
    bytes_in: HistogramFamily,
    bytes_out: HistogramFamily,
    tcp_opened: CounterFamily,
    tcp_closed: CounterFamily,
    tcp_received: CounterFamily,
    tcp_sent: CounterFamily,
}

impl RequestMetricFamilies {
    pub(crate) fn new(registry: &Registry) -> Self {
        let counter = |name, help, labels| registry.counters(MetricFamily::new(name, help, labels));
        let histogram = |name, help, bounds, scale| {
            registry.histograms(MetricFamily::new(name, help, &REQUEST), bounds, scale)
        };
        Self {
            requests: counter("istio_requests_total", "Requests.", &REQUEST),
            duration: histogram(
                "istio_request_duration_milliseconds",
                "Time from a request's head to the end of its response.",
                MICROS,
                0.001,
            ),
            bytes_in: histogram("istio_request_bytes", "Payload of requests.", BYTES, 1.0),
            bytes_out: histogram("istio_response_bytes", "Payload of responses.", BYTES, 1.0),
            tcp_opened: counter(
                "istio_tcp_connections_opened_total",
                "Relayed connections opened.",
                &TCP,
            ),
            tcp_closed: counter(
                "istio_tcp_connections_closed_total",
                "Relayed connections closed.",
                &TCP,
            ),
            tcp_received: counter(
                "istio_tcp_received_bytes_total",
                "Bytes from clients on relayed connections.",
                &TCP,
            ),
            tcp_sent: counter(
                "istio_tcp_sent_bytes_total",
                "Bytes to clients on relayed connections.",
                &TCP,
            ),
        }
    }
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct SeriesKey {
    source: u32,
    /// Unique per set; a set determines the service and the endpoints.
    set: u64,
    endpoint: u32,
    status: u16,
    flag: ResponseFlag,
    grpc: Option<Option<u8>>,
}

#[derive(Debug)]
struct RequestHandles {
    requests: Counter,
    duration: Histogram,
    bytes_in: Histogram,
    bytes_out: Histogram,
}

/// Counters of one relayed connection.
#[derive(Debug)]
pub(crate) struct RelayCounters {
    pub(crate) received: Counter,
    pub(crate) sent: Counter,
}

/// Metric series of one worker, found by number.
#[derive(Debug)]
pub(crate) struct RequestSeries {
    families: RequestMetricFamilies,
    shard: MetricsShard,
    handles: RefCell<HashMap<SeriesKey, Rc<RequestHandles>, foldhash::fast::RandomState>>,
    /// Generation of the registry when `handles` was started. Handles must be dropped with a
    /// generation, because a handle keeps its series from expiring.
    generation: Cell<u64>,
}

/// Classes that replace unregistered status codes: the endpoint chooses its codes, and each would
/// become a series.
const CLASSES: [&str; 10] = [
    "0xx", "1xx", "2xx", "3xx", "4xx", "5xx", "6xx", "7xx", "8xx", "9xx",
];

/// Returns the status code for metrics: a registered one (IANA, HTTP Status Code Registry; 499 is
/// the gateway's own), otherwise its class.
fn decide_code(status: u16) -> u16 {
    match status {
        100..=104
        | 200..=208
        | 226
        | 300..=308
        | 400..=418
        | 421..=426
        | 428
        | 429
        | 431
        | 451
        | 499
        | 500..=508
        | 510
        | 511 => status,
        _ => status / 100 % 10,
    }
}

/// Returns the gRPC status for metrics. A status that gRPC does not define becomes UNKNOWN, as it
/// does for clients.
fn decide_grpc(status: u8) -> u8 {
    if status <= 16 { status } else { 2 }
}

impl RequestSeries {
    pub(crate) fn new(families: &RequestMetricFamilies, shard: &MetricsShard) -> Self {
        Self {
            families: families.clone(),
            shard: shard.clone(),
            handles: RefCell::default(),
            generation: Cell::new(0),
        }
    }

    /// Counts one request in all request metrics.
    pub(crate) fn request(&self, finished: &FinishedTraffic<'_>) {
        let Some(request) = &finished.request else {
            return;
        };
        let key = SeriesKey {
            source: finished.source.number,
            // Without a set, the tenant's number separates the series. Shifted, it does not meet the
            // IDs of sets, which count from 1.
            set: finished
                .target
                .map_or(u64::from(finished.account.number) << 40, |(view, _)| {
                    view.set.id
                }),
            endpoint: finished
                .target
                .and_then(|(_, at)| at)
                // No set has so many endpoints, so this number means that none was selected.
                .map_or(u32::MAX, |at| at as u32),
            status: decide_code(request.status),
            flag: finished.flag,
            grpc: request.grpc.then_some(request.grpc_status.map(decide_grpc)),
        };
        let generation = self.shard.generation();
        // A handle of an earlier generation may belong to a series that gave way.
        if generation != self.generation.replace(generation) {
            self.handles.borrow_mut().clear();
        }
        let known = self.handles.borrow().get(&key).cloned();
        let series = known.unwrap_or_else(|| {
            let made = Rc::new(self.make(finished));
            let mut known = self.handles.borrow_mut();
            // The handles only save look-ups in the registry, so any of them may be dropped.
            if known.len() >= SERIES_MAX {
                known.clear();
            }
            known.insert(key, made.clone());
            made
        });
        series.requests.inc();
        series
            .duration
            .observe(u64::try_from(finished.took.as_micros()).unwrap_or(u64::MAX));
        series.bytes_in.observe(finished.bytes_in);
        series.bytes_out.observe(finished.bytes_out);
    }

    fn make(&self, finished: &FinishedTraffic<'_>) -> RequestHandles {
        let values = RequestLabels::of(finished);
        RequestHandles {
            requests: self.shard.counter(&self.families.requests, &values.texts()),
            duration: self
                .shard
                .histogram(&self.families.duration, &values.texts()),
            bytes_in: self
                .shard
                .histogram(&self.families.bytes_in, &values.texts()),
            bytes_out: self
                .shard
                .histogram(&self.families.bytes_out, &values.texts()),
        }
    }

    /// Counts a relayed connection as opened, and returns the counters of its bytes.
    pub(crate) fn relay_opened(&self, begun: &FinishedTraffic<'_>) -> RelayCounters {
        let values = RequestLabels::of(begun);
        self.shard
            .counter(&self.families.tcp_opened, &values.texts())
            .inc();
        RelayCounters {
            received: self
                .shard
                .counter(&self.families.tcp_received, &values.texts()),
            sent: self.shard.counter(&self.families.tcp_sent, &values.texts()),
        }
    }

    /// Counts a relayed connection as closed, or as failed to open.
    pub(crate) fn relay_closed(&self, finished: &FinishedTraffic<'_>) {
        self.shard
            .counter(
                &self.families.tcp_closed,
                &RequestLabels::of(finished).texts(),
            )
            .inc();
    }
}

/// Values of all labels, in the order of [`labels`].
struct RequestLabels<'a>(Vec<Cow<'a, str>>);

impl<'a> RequestLabels<'a> {
    fn of(finished: &FinishedTraffic<'a>) -> Self {
        Self(
            labels(finished.request.is_some())
                .map(|field| label_value((field.read)(finished)))
                .collect(),
        )
    }

    fn texts(&self) -> SmallVec<[&str; 28]> {
        self.0.iter().map(|value| &**value).collect()
    }
}

fn label_value(value: FieldValue<'_>) -> Cow<'_, str> {
    match value {
        FieldValue::Absent => UNKNOWN.into(),
        FieldValue::Known(text) if text.is_empty() => UNKNOWN.into(),
        FieldValue::Text(text) | FieldValue::Known(text) => text,
        FieldValue::Number(number) => number.to_string().into(),
        FieldValue::Status(status) => {
            let code = decide_code(status);
            CLASSES
                .get(usize::from(code))
                .map_or_else(|| code.to_string().into(), |class| Cow::Borrowed(*class))
        }
        // Istio leaves the label of a response without a gRPC status empty.
        FieldValue::GrpcStatus(status) => status
            .map(|status| decide_grpc(status).to_string())
            .unwrap_or_default()
            .into(),
        FieldValue::Duration(duration) => duration.as_millis().to_string().into(),
        FieldValue::Address(address) => address.to_string().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_that_endpoints_invent_make_no_series_of_their_own() {
        for (status, label) in [
            (200, None),
            (404, None),
            (499, None),
            (511, None),
            (299, Some("2xx")),
            (777, Some("7xx")),
            (999, Some("9xx")),
        ] {
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

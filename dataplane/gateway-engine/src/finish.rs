//! Phase *finish*: reports a finished request in Istio's metrics, one access log line, and the tap.
//! The fields that they show are in `request_fields`.
//!
//! It runs when the request's [`RequestRecord`] is dropped. That happens exactly once, however the
//! request ended.

use std::rc::Rc;
use std::time::{Duration, Instant};

use canal_gateway_http::head::ClientProtocol;
use canal_gateway_http::interim::InterimResponses;
use canal_gateway_http::proxy_error::{ProxyError, ResponseFlag};
use canal_h1::FieldName;
use canal_telemetry::access_log::WorkerLog;
use canal_telemetry::tap::TapFields;

use crate::endpoints::RequestTarget;
pub(crate) use crate::request_fields::{AuthzRecord, LogFields};
use crate::request_fields::{FIELDS, FieldValue, FinishedRequest, FinishedTraffic};
use crate::request_metrics::RelayCounters;
use crate::session::ClientSession;
use crate::worker::Worker;

/// Writes a line of the access log with all its fields.
fn write_log(log: &WorkerLog, finished: &FinishedTraffic<'_>) {
    let mut line = log.line_of(&finished.account.log);
    for field in FIELDS.iter().filter(|field| !field.log.is_empty()) {
        line = match (field.read)(finished) {
            FieldValue::Absent | FieldValue::GrpcStatus(None) => line,
            FieldValue::Text(text) => line.str(field.log, &text),
            FieldValue::Known(text) => line.some(field.log, &text),
            FieldValue::Number(number) => line.u64(field.log, number),
            FieldValue::Status(status) => line.u64(field.log, status.into()),
            FieldValue::GrpcStatus(Some(status)) => line.u64(field.log, status.into()),
            FieldValue::Duration(duration) => line.millis(field.log, duration),
            FieldValue::Address(address) => line.display(field.log, address),
        };
    }
    line.end();
}

/// Returns a line of the tap with all its fields.
fn tap_line(finished: &FinishedTraffic<'_>) -> String {
    let mut line = serde_json::Map::new();
    line.insert(
        "time".into(),
        canal_runtime::Rfc3339Time(std::time::SystemTime::now())
            .to_string()
            .into(),
    );
    for field in FIELDS.iter().filter(|field| !field.tap.is_empty()) {
        let value: serde_json::Value = match (field.read)(finished) {
            FieldValue::GrpcStatus(None) => continue,
            FieldValue::Absent => serde_json::Value::Null,
            FieldValue::Text(text) | FieldValue::Known(text) => text.into(),
            FieldValue::Number(number) => number.into(),
            FieldValue::Status(status) => status.into(),
            FieldValue::GrpcStatus(Some(status)) => status.into(),
            FieldValue::Duration(duration) => ((duration.as_secs_f64() * 1e6).round() / 1e3).into(),
            FieldValue::Address(address) => address.to_string().into(),
        };
        line.insert(field.tap.into(), value);
    }
    serde_json::Value::Object(line).to_string()
}

impl LogFields {
    /// Copies the request's log fields, with tokens redacted.
    pub(crate) fn of(
        worker: &Worker,
        session: &ClientSession,
        request: &impl canal_router::RoutableRequest,
        authority: &[u8],
    ) -> Box<Self> {
        let snapshot = worker.snapshot();
        let names = snapshot
            .tenant(session.account.tenant.as_str())
            .map(|tenant| tenant.policies.token_names());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let field = |name: FieldName| {
            let mut found = String::new();
            request.header(name.text(), &mut |value| found = text(value));
            names
                .map(|names| names.redact_header(name.text(), found))
                .unwrap_or_default()
        };
        let mut path = text(request.path());
        if let Some(query) = request.query() {
            path.push('?');
            path.push_str(
                &names
                    .map(|names| names.redact_query(query))
                    .unwrap_or_default(),
            );
        }
        Box::new(Self {
            method: text(request.method()),
            path,
            authority: text(authority),
            user_agent: field(FieldName::UserAgent),
            request_id: field(FieldName::XRequestId),
            forwarded_for: field(FieldName::XForwardedFor),
            route: String::new(),
            authorization: AuthzRecord::default(),
        })
    }
}

/// Record of one request from its first byte to its last.
pub(crate) struct RequestRecord {
    worker: Rc<Worker>,
    session: Rc<ClientSession>,
    started: Instant,
    client_protocol: ClientProtocol,
    /// Status of the response; 0 until it is known.
    pub(crate) status: u16,
    pub(crate) flag: ResponseFlag,
    detail: String,
    /// Payload bytes from the client.
    pub(crate) bytes_in: u64,
    /// Payload bytes to the client.
    pub(crate) bytes_out: u64,
    answered: Option<Instant>,
    pub(crate) interim: InterimResponses,
    /// The endpoint set, and the position of the endpoint in it once one is selected.
    pub(crate) target: RequestTarget,
    pub(crate) grpc: bool,
    pub(crate) grpc_status: Option<u8>,
    pub(crate) texts: Option<Box<LogFields>>,
}

impl RequestRecord {
    /// True while responses should announce that the client's connection closes.
    #[inline]
    pub(crate) fn keeps_no_client(&self) -> bool {
        self.worker.keeps_no_client() || self.session.drain().is_draining()
    }

    pub(crate) fn begin(
        worker: &Rc<Worker>,
        session: &Rc<ClientSession>,
        client_protocol: ClientProtocol,
    ) -> Self {
        Self {
            worker: worker.clone(),
            session: session.clone(),
            started: Instant::now(),
            client_protocol,
            status: 0,
            flag: ResponseFlag::None,
            detail: String::new(),
            bytes_in: 0,
            bytes_out: 0,
            answered: None,
            interim: InterimResponses::default(),
            target: None,
            grpc: false,
            grpc_status: None,
            texts: None,
        }
    }

    /// Returns the name of the client protocol.
    pub(crate) fn protocol_text(&self) -> &'static str {
        self.client_protocol.text()
    }

    /// True if a log or a tap would read [`RequestRecord::texts`].
    pub(crate) fn wants_texts(worker: &Worker, session: &ClientSession) -> bool {
        worker.log.is_some() || worker.shared.tap.is_on(session.account.tenant.as_str())
    }

    /// Records that the upstream's response began.
    pub(crate) fn answered(&mut self, status: u16) {
        self.status = status;
        self.answered = Some(Instant::now());
    }

    /// Records that the request ends with `fault`, and counts it unless it is the answer of a rule.
    /// A response that has already begun keeps its status.
    pub(crate) fn fault(&mut self, fault: &ProxyError) {
        if self.answered.is_none() {
            self.status = fault.status();
        }
        self.flag = fault.flag();
        self.detail = fault.detail().to_string();
        if !matches!(fault, ProxyError::Answered(_)) {
            self.worker.counts.refused_request(fault);
        }
    }

    /// Returns the fields of the request, which took `took`.
    fn finished(&self, took: Duration) -> FinishedTraffic<'_> {
        FinishedTraffic {
            flag: self.flag,
            detail: &self.detail,
            authorization: self.texts.as_ref().map(|texts| &texts.authorization),
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
            took,
            request: Some(FinishedRequest {
                protocol: self.client_protocol.text(),
                status: self.status,
                grpc: self.grpc,
                grpc_status: self.grpc_status,
                answered: self
                    .answered
                    .map(|answered| answered.duration_since(self.started)),
                texts: self.texts.as_deref(),
            }),
            ..begun(&self.session, &self.target)
        }
    }

    /// Shows the request in the access log and the tap.
    fn show(&self, finished: &FinishedTraffic<'_>, texts: &LogFields) {
        if let Some(log) = &self.worker.log {
            write_log(log, finished);
        }
        let (tap, tenant) = (
            &self.worker.shared.tap,
            self.session.account.tenant.as_str(),
        );
        if tap.is_on(tenant) {
            let service = finished.service_name();
            let seen = TapFields {
                tenant,
                service: &service,
                path: &texts.path,
                status: self.status,
            };
            tap.publish(&seen, || tap_line(finished));
        }
    }
}

/// Returns the fields that are known when traffic begins.
fn begun<'a>(session: &'a ClientSession, target: &'a RequestTarget) -> FinishedTraffic<'a> {
    FinishedTraffic {
        account: &session.account,
        source: &session.source,
        pod: &session.pod,
        client: session.client,
        secured: session.secured,
        target: target.as_ref().map(|(view, at)| (&**view, *at)),
        flag: ResponseFlag::None,
        detail: "",
        authorization: None,
        bytes_in: 0,
        bytes_out: 0,
        took: Duration::ZERO,
        request: None,
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        let has_failed = !matches!(self.flag, ResponseFlag::None | ResponseFlag::DelayInjected);
        if self.status == 0 && !has_failed {
            // The task was dropped midway: the process was forced to end, or the client's
            // connection failed.
            self.fault(&ProxyError::ClientGone);
        }
        let finished = self.finished(self.started.elapsed());
        self.worker.series.request(&finished);
        if let Some(texts) = &self.texts {
            self.show(&finished, texts);
        }
    }
}

/// Record of one relayed connection from its accept to its end.
pub(crate) struct ConnectionRecord {
    worker: Rc<Worker>,
    session: Rc<ClientSession>,
    started: Instant,
    reported: bool,
    pub(crate) authorization: AuthzRecord,
    /// Detail for the log, in addition to the response flag.
    pub(crate) detail: String,
}

impl ConnectionRecord {
    pub(crate) fn begin(worker: &Rc<Worker>, session: &Rc<ClientSession>) -> Self {
        Self {
            worker: worker.clone(),
            session: session.clone(),
            started: Instant::now(),
            reported: false,
            authorization: AuthzRecord::default(),
            detail: String::new(),
        }
    }

    /// Counts an established connection to the endpoint. Returns the counters of its bytes.
    pub(crate) fn count_opened(&self, target: &RequestTarget) -> RelayCounters {
        self.worker
            .series
            .relay_opened(&begun(&self.session, target))
    }

    /// Reports the connection's end. The last argument is the bytes from the client and those to
    /// it.
    pub(crate) fn end(
        &mut self,
        target: RequestTarget,
        flag: ResponseFlag,
        (received, sent): (u64, u64),
    ) {
        self.reported = true;
        let finished = FinishedTraffic {
            flag,
            detail: &self.detail,
            authorization: Some(&self.authorization),
            bytes_in: received,
            bytes_out: sent,
            took: self.started.elapsed(),
            ..begun(&self.session, &target)
        };
        self.worker.series.relay_closed(&finished);
        if let Some(log) = &self.worker.log {
            write_log(log, &finished);
        }
    }
}

impl Drop for ConnectionRecord {
    fn drop(&mut self) {
        if !self.reported {
            self.end(None, ResponseFlag::Overload, (0, 0));
        }
    }
}

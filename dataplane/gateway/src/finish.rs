//! Phase *finish*: what is said of a request once it is over: metrics with Istio's names, one line in the access log, the tap. Whatever
//! happened to the request, its [`Record`] is dropped exactly once, and that is when this runs.

use std::rc::Rc;
use std::time::{Duration, Instant};

use canal_h1::Name;

use crate::endpoints::Target;
use crate::fault::{Fault, Flag};
use crate::head::Spoken;
use crate::series::{Ends, Observed, Relay};
use crate::session::Session;
use crate::snapshot::Endpoint;
use crate::tap::Seen;
use crate::worker::Worker;

fn ends<'a>(session: &'a Session, target: &'a Target) -> Ends<'a> {
    let target = target.as_ref().map(|(view, at)| (&**view, *at));
    Ends { account: &session.account, source: &session.source, secured: session.secured, target }
}

/// Parts of the request that logs show; copied only if someone reads them.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) authority: String,
    pub(crate) user_agent: String,
    pub(crate) request_id: String,
    pub(crate) forwarded_for: String,
    pub(crate) route: String,
    pub(crate) judged: Judged,
}

/// What policies made of it.
#[derive(Debug, Default)]
pub(crate) struct Judged {
    /// `namespace/name` of the one that forbade it.
    pub(crate) policy: String,
    /// Audits and dry runs that matched: what they are, and which policy.
    pub(crate) hits: Vec<String>,
}

impl Texts {
    /// Copies what there is of a request, without the tokens in it.
    pub(crate) fn of(worker: &Worker, session: &Session, request: &impl canal_router::Request, authority: &[u8]) -> Box<Self> {
        let snapshot = worker.snapshot();
        let names = snapshot.tenant(session.account.tenant.as_str()).map(|tenant| tenant.policies.token_names());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let field = |name: Name| {
            let mut found = String::new();
            request.header(name.text(), &mut |value| found = text(value));
            names.map(|names| names.redact_header(name.text(), found)).unwrap_or_default()
        };
        let mut path = text(request.path());
        if let Some(query) = request.query() {
            path.push('?');
            path.push_str(&names.map(|names| names.redact_query(query)).unwrap_or_default());
        }
        Box::new(Self {
            method: text(request.method()),
            path,
            authority: text(authority),
            user_agent: field(Name::UserAgent),
            request_id: field(Name::XRequestId),
            forwarded_for: field(Name::XForwardedFor),
            route: String::new(),
            judged: Judged::default(),
        })
    }
}

/// Interim (1xx) responses that an endpoint may send for one request.
pub(crate) const INTERIM_RESPONSES_MAX: u32 = 16;
/// Bytes of their heads.
pub(crate) const INTERIM_BYTES_MAX: usize = 64 << 10;

/// The interim responses of one request, over all its attempts.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct InterimResponses {
    responses: u32,
    bytes: usize,
    /// The client has seen `100 Continue`.
    pub(crate) continued: bool,
}

impl InterimResponses {
    /// Counts one of so many bytes; true if it is a `100` after the first. No flow control holds them back in HTTP/2, and a client need
    /// not read them: so they are few.
    pub(crate) fn count(&mut self, bytes: usize, is_continue: bool) -> Result<bool, Fault> {
        self.responses += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        if self.responses > INTERIM_RESPONSES_MAX {
            return Err(Fault::InterimResponses("too_many_interim_responses"));
        }
        if self.bytes > INTERIM_BYTES_MAX {
            return Err(Fault::InterimResponses("interim_responses_too_large"));
        }
        Ok(is_continue && std::mem::replace(&mut self.continued, true))
    }
}

/// One request from its first byte to its last.
pub(crate) struct Record {
    worker: Rc<Worker>,
    session: Rc<Session>,
    started: Instant,
    spoken: Spoken,
    /// 0 until one is known.
    pub(crate) status: u16,
    pub(crate) flag: Flag,
    detail: String,
    /// Payload from the client.
    pub(crate) bytes_in: u64,
    /// Payload to the client.
    pub(crate) bytes_out: u64,
    answered: Option<Instant>,
    pub(crate) interim: InterimResponses,
    /// The set, and the endpoint in it once one was chosen.
    pub(crate) target: Target,
    pub(crate) grpc: bool,
    pub(crate) grpc_status: Option<u8>,
    pub(crate) texts: Option<Box<Texts>>,
}

impl Record {
    pub(crate) fn begin(worker: &Rc<Worker>, session: &Rc<Session>, spoken: Spoken) -> Self {
        Self {
            worker: worker.clone(),
            session: session.clone(),
            started: Instant::now(),
            spoken,
            status: 0,
            flag: Flag::None,
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

    /// The protocol's name.
    pub(crate) fn spoken_text(&self) -> &'static str {
        self.spoken.text()
    }

    /// Whether [`Record::texts`] would be read by anyone.
    pub(crate) fn wants_texts(worker: &Worker) -> bool {
        worker.log.is_some() || worker.shared.tap.is_on()
    }

    /// The upstream's answer began.
    pub(crate) fn answered(&mut self, status: u16) {
        self.status = status;
        self.answered = Some(Instant::now());
    }

    /// The request ends with a fault. An answer that was under way keeps its status.
    pub(crate) fn fault(&mut self, fault: &Fault) {
        if self.answered.is_none() {
            self.status = fault.status();
        }
        self.flag = fault.flag();
        self.detail = fault.detail().to_string();
        self.worker.counts.refused_request(fault);
    }

    /// `namespace/name`, and `host:port`; empty where there is no service.
    fn service(&self) -> (String, String) {
        let set = self.target.as_ref().map(|(view, _)| &view.set);
        match set.and_then(|set| Some((set.service.as_ref()?, set.port))) {
            Some((n, port)) => (format!("{}/{}", n.key.namespace, n.key.name), format!("{}:{port}", n.hostname)),
            None => Default::default(),
        }
    }

    fn upstream(&self) -> Option<&Endpoint> {
        let (view, at) = self.target.as_ref()?;
        view.set.endpoints.get((*at)?)
    }

    fn log(&self, took: Duration) {
        let (Some(log), Some(texts)) = (&self.worker.log, &self.texts) else { return };
        let (source, (service, host)) = (&self.session.source.party, self.service());
        let mut line = log
            .line_of(&self.session.account.log)
            .str("tenant", self.session.account.tenant.as_str())
            .str("method", &texts.method)
            .str("path", &texts.path)
            .str("protocol", self.spoken.text())
            .str("authority", &texts.authority)
            .u64("response_code", self.status.into())
            .str("response_flags", self.flag.text())
            .some("response_code_details", &self.detail)
            .u64("bytes_received", self.bytes_in)
            .u64("bytes_sent", self.bytes_out)
            .millis("duration_ms", took);
        if let Some(answered) = self.answered {
            line = line.millis("upstream_service_time_ms", answered.duration_since(self.started));
        }
        line = line
            .some("x_forwarded_for", &texts.forwarded_for)
            .some("user_agent", &texts.user_agent)
            .some("request_id", &texts.request_id)
            .some("service", &service)
            .some("service_host", &host)
            .some("route_name", &texts.route)
            .some("authorization_policy", &texts.judged.policy)
            .some("authorization_hits", &texts.judged.hits.join(", "))
            .display("downstream_remote_address", self.session.client)
            .str("source_workload", &source.workload)
            .str("source_namespace", &source.namespace)
            .some("source_pod", &self.session.pod)
            .some("source_principal", &source.principal);
        if let Some(status) = self.grpc_status {
            line = line.u64("grpc_status", status.into());
        }
        if let Some(endpoint) = self.upstream() {
            line = line
                .display("upstream_host", endpoint.address)
                .str("upstream_workload", &endpoint.workload.party.workload)
                .str("upstream_pod", &endpoint.workload.party.pod);
        }
        line.end();
    }

    fn tell(&self, took: Duration) {
        let Some(texts) = &self.texts else { return };
        let (service, _) = self.service();
        let tenant = self.session.account.tenant.as_str();
        let seen = Seen { tenant, service: &service, path: &texts.path, status: self.status };
        self.worker.shared.tap.tell(&seen, || {
            let source = &self.session.source.party;
            let from = if self.session.pod.is_empty() { &source.workload } else { &self.session.pod };
            let mut line = serde_json::json!({
                "time": crate::time::rfc3339(std::time::SystemTime::now()),
                "tenant": tenant,
                "service": service,
                "status": self.status,
                "flags": self.flag.text(),
                "duration_ms": (took.as_secs_f64() * 1e6).round() / 1e3,
                "method": texts.method,
                "path": texts.path,
                "authority": texts.authority,
                "protocol": self.spoken.text(),
                "source": format!("{}/{from}", source.namespace),
                "upstream": self.upstream().map(|e| format!("{} ({})", e.workload.party.pod, e.address)),
                "route": texts.route,
                "request_id": texts.request_id,
                "bytes_received": self.bytes_in,
                "bytes_sent": self.bytes_out,
            });
            if let (Some(status), Some(map)) = (self.grpc_status, line.as_object_mut()) {
                map.insert("grpc_status".into(), status.into());
            }
            line.to_string()
        });
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if self.status == 0 && self.flag == Flag::None {
            // The task was dropped in the middle: the process was forced to end, or the client's connection died.
            self.fault(&Fault::ClientGone);
        }
        let took = self.started.elapsed();
        let observed = Observed {
            status: self.status,
            flag: self.flag,
            grpc: self.grpc,
            grpc_status: self.grpc_status,
            micros: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
        };
        self.worker.series.request(&ends(&self.session, &self.target), &observed);
        if self.texts.is_some() {
            self.log(took);
            if self.worker.shared.tap.is_on() {
                self.tell(took);
            }
        }
    }
}

/// One relayed connection from its accept to its end.
pub(crate) struct Relayed {
    worker: Rc<Worker>,
    session: Rc<Session>,
    started: Instant,
    ended: bool,
    pub(crate) judged: Judged,
    /// What the log says beside the flag.
    pub(crate) detail: String,
}

impl Relayed {
    pub(crate) fn begin(worker: &Rc<Worker>, session: &Rc<Session>) -> Self {
        Self {
            worker: worker.clone(),
            session: session.clone(),
            started: Instant::now(),
            ended: false,
            judged: Judged::default(),
            detail: String::new(),
        }
    }

    /// A connection to the endpoint is up: the counters of its bytes.
    pub(crate) fn opened(&self, target: &Target) -> Relay {
        self.worker.series.relay_opened(&ends(&self.session, target))
    }

    /// It is over; `bytes` are those from the client and those to it.
    pub(crate) fn end(mut self, target: Target, flag: Flag, bytes: (u64, u64)) {
        self.tell(target, flag, bytes);
    }

    fn tell(&mut self, target: Target, flag: Flag, (received, sent): (u64, u64)) {
        self.ended = true;
        self.worker.series.relay_closed(&ends(&self.session, &target), flag);
        let Some(log) = &self.worker.log else { return };
        let source = &self.session.source.party;
        let mut line = log
            .line_of(&self.session.account.log)
            .str("tenant", self.session.account.tenant.as_str())
            .str("protocol", "TCP")
            .str("response_flags", flag.text())
            .some("response_code_details", &self.detail)
            .some("authorization_policy", &self.judged.policy)
            .some("authorization_hits", &self.judged.hits.join(", "))
            .u64("bytes_received", received)
            .u64("bytes_sent", sent)
            .millis("duration_ms", self.started.elapsed())
            .display("downstream_remote_address", self.session.client)
            .str("source_workload", &source.workload)
            .str("source_namespace", &source.namespace)
            .some("source_pod", &self.session.pod)
            .some("source_principal", &source.principal);
        if let Some((view, at)) = &target {
            line = line.some("service_host", view.set.service.as_ref().map_or("", |names| &names.hostname));
            if let Some(endpoint) = at.and_then(|at| view.set.endpoints.get(at)) {
                line = line.display("upstream_host", endpoint.address).str("upstream_pod", &endpoint.workload.party.pod);
            }
        }
        line.end();
    }
}

impl Drop for Relayed {
    fn drop(&mut self) {
        if !self.ended {
            self.tell(None, Flag::Overload, (0, 0));
        }
    }
}

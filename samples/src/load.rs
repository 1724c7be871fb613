//! The load client, with a closed loop or with an open loop at a fixed rate, over N connections. It
//! counts every failure and does not retry. In the open loop, latency starts when a request is due,
//! so that a stall does not hide the delay of later requests. Start at [`run`].

pub mod connection;
pub mod histogram;
pub mod tally;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use clap::Args;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header};
use http_body_util::{BodyExt, Full};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::answer;
use crate::listen::stopped;
use connection::{DialError, Dialed, Protocol, dial};
use tally::{LoadTally, RequestOutcome};

/// Maximum number of connections of a run. Below the 28,232 ephemeral ports of one address (Linux's
/// default), so that a failure is the mesh's.
const CONNECTIONS_MAX: usize = 10_000;
/// Duration of runs without --count and --duration. Long enough to read a rate, short enough to
/// wait for.
const DURATION_DEFAULT: Duration = Duration::from_secs(10);

/// Target, amount and rate of the load.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Where to send requests; several URLs are used in turn (for example an IPv4 and an IPv6 one)
    #[arg(required = true)]
    pub urls: Vec<String>,
    /// Connections, each with one request at a time
    #[arg(short, long, default_value_t = 8)]
    pub connections: usize,
    /// Stop after this many requests
    #[arg(short = 'n', long)]
    pub count: Option<u64>,
    /// Stop after this many seconds
    #[arg(short, long)]
    pub duration: Option<f64>,
    /// Requests per second over all connections (open loop); without it, each connection sends as
    /// fast as it is answered
    #[arg(short, long)]
    pub rate: Option<f64>,
    /// HTTP version that the client speaks
    #[arg(long, value_enum, default_value = "h1")]
    pub protocol: Protocol,
    /// Open a new connection for every request
    #[arg(long)]
    pub no_keepalive: bool,
    /// Request header, as "name: value"; Host too
    #[arg(short = 'H', long = "header")]
    pub headers: Vec<String>,
    /// Method of the HTTP requests
    #[arg(short = 'X', long, default_value = "GET")]
    pub method: String,
    /// Bytes in each request's body
    #[arg(long, default_value_t = 0)]
    pub body_size: usize,
    /// Maximum wait for one whole answer, in milliseconds
    #[arg(long, default_value_t = 10_000)]
    pub timeout_ms: u64,
    /// Response header whose values are counted
    #[arg(long, default_value = "x-served-by")]
    pub served_by: String,
    /// Also print counts per second
    #[arg(long)]
    pub timeline: bool,
}

/// A URL with its authority.
#[derive(Debug, Clone)]
struct LoadTarget {
    authority: String,
    uri: Uri,
}

/// Validated settings of a connection.
#[derive(Debug)]
struct LoadPlan {
    targets: Vec<LoadTarget>,
    method: Method,
    headers: HeaderMap,
    body: Bytes,
    protocol: Protocol,
    keepalive: bool,
    timeout: Duration,
    served_by: HeaderName,
    tickets: RequestSchedule,
}

/// Assigns requests: each has a number and a time at which it is due.
#[derive(Debug)]
pub(crate) struct RequestSchedule {
    next: AtomicU64,
    count_max: u64,
    pub(crate) started: Instant,
    duration_max: Duration,
    rate: Option<f64>,
}

impl RequestSchedule {
    /// Creates a schedule of at most `count_max` requests and at most `duration_max`, at `rate` per
    /// second or as fast as [`Self::take`] is called.
    pub(crate) fn new(count_max: u64, duration_max: Duration, rate: Option<f64>) -> Self {
        Self {
            next: AtomicU64::new(0),
            count_max,
            started: Instant::now(),
            duration_max,
            rate,
        }
    }

    /// Returns the next request's number and due time, or `None` when the run is over.
    pub(crate) fn take(&self) -> Option<(u64, Instant)> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let due = match self.rate {
            Some(rate) => self.started + Duration::from_secs_f64(number as f64 / rate),
            None => Instant::now(),
        };
        (number < self.count_max && due.duration_since(self.started) < self.duration_max)
            .then_some((number, due))
    }
}

/// Runs the load. The JSON's `ok` is true if no request failed.
///
/// # Errors
///
/// An argument is wrong, or a connection's task failed.
pub async fn run(args: &LoadArgs) -> anyhow::Result<Value> {
    // The sender lives until the run ends, so nothing stops it.
    let (_unused, stop) = watch::channel(false);
    run_until(args, stop).await
}

/// Runs the load until its count or duration is over or `stop` is true. Requests that are under way
/// then are answered first.
///
/// # Errors
///
/// An argument is wrong, or a connection's task failed.
pub async fn run_until(args: &LoadArgs, stop: watch::Receiver<bool>) -> anyhow::Result<Value> {
    let connections = args.connections;
    let plan = Arc::new(decide_plan(args)?);
    let mut workers = tokio::task::JoinSet::new();
    for number in 0..connections {
        workers.spawn(work(plan.clone(), number, args.timeline, stop.clone()));
    }
    let mut total = LoadTally::new(plan.tickets.started, args.timeline);
    while let Some(worker) = workers.join_next().await {
        total.merge(worker.context("a connection's task failed")?);
    }
    Ok(total.report(plan.tickets.started.elapsed()))
}

fn decide_plan(args: &LoadArgs) -> anyhow::Result<LoadPlan> {
    if args.connections == 0 || args.connections > CONNECTIONS_MAX {
        bail!(
            "--connections {} is out of range; fix: use 1 to {CONNECTIONS_MAX}",
            args.connections
        );
    }
    if args
        .rate
        .is_some_and(|rate| !(rate > 0.0 && rate.is_finite()))
    {
        bail!("--rate must be more than 0");
    }
    let duration = match (args.duration, args.count) {
        // With a count too, the limit that is reached first ends the run.
        (Some(seconds), _) => {
            Duration::try_from_secs_f64(seconds).context("--duration is not a number of seconds")?
        }
        // A day stands for no limit, since the count ends the run.
        (None, Some(_)) => Duration::from_secs(24 * 3600),
        (None, None) => DURATION_DEFAULT,
    };
    Ok(LoadPlan {
        targets: args
            .urls
            .iter()
            .map(|url| target(url))
            .collect::<anyhow::Result<_>>()?,
        method: args
            .method
            .parse()
            .with_context(|| format!("--method {:?}", args.method))?,
        headers: headers(&args.headers)?,
        body: canal_byte_pattern::fill(0, 0, args.body_size),
        protocol: args.protocol,
        keepalive: !args.no_keepalive,
        timeout: Duration::from_millis(args.timeout_ms),
        served_by: args
            .served_by
            .parse()
            .with_context(|| format!("--served-by {:?} is not a header name", args.served_by))?,
        // Without a count, the duration ends the run.
        tickets: RequestSchedule::new(args.count.unwrap_or(u64::MAX), duration, args.rate),
    })
}

fn target(url: &str) -> anyhow::Result<LoadTarget> {
    let uri: Uri = url.parse().with_context(|| {
        format!("{url:?} is not a URL; fix: write it like http://10.96.0.10:9080/productpage")
    })?;
    match (uri.scheme_str(), uri.authority()) {
        (Some("http"), Some(authority)) => Ok(LoadTarget {
            authority: authority.to_string(),
            uri,
        }),
        _ => bail!(
            "{url:?} is not a plain http URL; fix: write it like http://10.96.0.10:9080/productpage"
        ),
    }
}

fn headers(given: &[String]) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for line in given {
        let (name, value) = line.split_once(':').with_context(|| {
            format!("--header {line:?} is not a header; fix: write it as \"name: value\"")
        })?;
        let name: HeaderName = name
            .trim()
            .parse()
            .with_context(|| format!("--header {line:?}: not a header name"))?;
        let value = HeaderValue::from_str(value.trim())
            .with_context(|| format!("--header {line:?}: not a header value"))?;
        headers.append(name, value);
    }
    Ok(headers)
}

/// Runs one connection: sends requests until the schedule ends.
async fn work(
    plan: Arc<LoadPlan>,
    number: usize,
    timeline: bool,
    mut stop: watch::Receiver<bool>,
) -> LoadTally {
    let mut tally = LoadTally::new(plan.tickets.started, timeline);
    // Each target has its own connection, so that using them in turn does not reconnect every time.
    let mut open: Vec<Option<KeptConnection>> = plan.targets.iter().map(|_| None).collect();
    // Each worker uses its targets in turn, so that none of its connections is idle for long. A
    // server may close an idle connection while a request is sent on it. That request has no answer
    // (RFC 9112 §9.5).
    let mut turns = (0..plan.targets.len())
        .cycle()
        .skip(number % plan.targets.len());
    while let (Some((_, due)), Some(which)) = (plan.tickets.take(), turns.next()) {
        if due > Instant::now() {
            let _ = tokio::time::timeout_at(due, stopped(&mut stop)).await;
        }
        if *stop.borrow() {
            break;
        }
        let attempt = attempt(&plan, &plan.targets[which], &mut open[which]);
        let outcome = match tokio::time::timeout(plan.timeout, attempt).await {
            Ok(outcome) => outcome,
            Err(_) => RequestOutcome::failed(
                "timeout",
                format!("no whole answer in {} ms", plan.timeout.as_millis()),
            ),
        };
        // After a failure the state of the connection is unknown.
        if outcome.failure.is_some() || !plan.keepalive {
            open[which] = None;
        }
        tally.count(due, outcome);
    }
    tally
}

/// Sends one request, on the open connection if it can take the request.
async fn attempt(
    plan: &LoadPlan,
    target: &LoadTarget,
    open: &mut Option<KeptConnection>,
) -> RequestOutcome {
    // The idle time explains a failure on a connection that the server was closing.
    let idle = open
        .as_ref()
        .map_or(Duration::ZERO, |kept| kept.since.elapsed());
    let mut connection = match reuse_or_dial(plan, target, open).await {
        Ok(connection) => connection,
        Err(problem) => return RequestOutcome::failed("connect", problem.to_string()),
    };
    let request = match request(plan, target) {
        Ok(request) => request,
        Err(problem) => return RequestOutcome::failed("request", problem.to_string()),
    };
    let response = match connection.send(request).await {
        Ok(response) => response,
        Err(problem) => {
            let detail = format!(
                "{}, {} ms after the answer before",
                connection::chain(&problem),
                idle.as_millis()
            );
            return RequestOutcome::failed(connection::kind_of(&problem), detail);
        }
    };
    let (head, mut body) = response.into_parts();
    // A request succeeds only if the whole body arrives.
    while let Some(frame) = body.frame().await {
        if let Err(problem) = frame {
            return RequestOutcome::failed("body", connection::chain(&problem));
        }
    }
    let text = |name| {
        head.headers
            .get(name)
            .and_then(|v: &HeaderValue| v.to_str().ok())
            .map(str::to_owned)
    };
    let mut outcome = RequestOutcome::answered(
        text(&plan.served_by),
        text(&HeaderName::from_static(crate::pod::POD)),
    );
    // Only a success keeps the connection: after another status it may be in any state.
    if head.status.is_success() {
        *open = Some(KeptConnection {
            connection,
            since: Instant::now(),
        });
    } else {
        outcome.failure = Some((
            format!("status_{}", head.status.as_u16()),
            format!("{} {}", target.uri, head.status),
        ));
    }
    outcome
}

/// A connection without a request, since its last answer.
struct KeptConnection {
    connection: Dialed,
    since: Instant,
}

async fn reuse_or_dial(
    plan: &LoadPlan,
    target: &LoadTarget,
    open: &mut Option<KeptConnection>,
) -> Result<Dialed, DialError> {
    if let Some(KeptConnection { mut connection, .. }) = open.take()
        && connection.ready().await
    {
        return Ok(connection);
    }
    dial(&target.authority, plan.protocol).await
}

fn request(
    plan: &LoadPlan,
    target: &LoadTarget,
) -> Result<Request<answer::SampleBody>, http::Error> {
    let uri = match plan.protocol {
        Protocol::H1 => target
            .uri
            .path_and_query()
            .map_or("/", |p| p.as_str())
            .parse()?,
        Protocol::H2 => target.uri.clone(),
    };
    let mut request = Request::new(answer::boxed(Full::new(plan.body.clone())));
    *request.method_mut() = plan.method.clone();
    *request.headers_mut() = plan.headers.clone();
    if plan.protocol == Protocol::H1 && !plan.headers.contains_key(header::HOST) {
        request
            .headers_mut()
            .insert(header::HOST, HeaderValue::from_str(&target.authority)?);
    }
    if plan.protocol == Protocol::H1 && !plan.keepalive {
        request
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    *request.uri_mut() = uri;
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_end_by_count_or_time() {
        let tickets =
            |count_max, rate| RequestSchedule::new(count_max, Duration::from_secs(1), rate);
        let all = |t: RequestSchedule| std::iter::from_fn(|| t.take()).take(1000).count();
        for (name, count_max, rate, want) in [
            ("count ends a closed loop", 5, None, 5),
            ("time ends an open loop", u64::MAX, Some(100.0), 100),
            ("count ends an open loop", 7, Some(100.0), 7),
        ] {
            assert_eq!(all(tickets(count_max, rate)), want, "{name}");
        }
    }

    #[test]
    fn bad_input_is_refused_with_a_fix() {
        for (given, want) in [
            ("10.0.0.1:80", "write it like"),
            ("https://10.0.0.1/", "plain http"),
            ("http://", "not a URL"),
        ] {
            let problem = format!("{:#}", target(given).unwrap_err());
            assert!(problem.contains(want), "{given}: {problem}");
        }
        assert!(headers(&["no colon".to_owned()]).is_err());
    }
}

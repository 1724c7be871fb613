//! A running gateway beside the oracle: generated tenants, requests over real HTTP/1.1 connections,
//! endpoints that report what they received. What depends on time or chance is left out here; the
//! other modules and the gateway's own tests compare that.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use canal_compiler::ir::Ir;
use canal_compiler::oracle::{
    OracleClient, OracleRequest, RoutingVerdict, cors, decide, deciding_rule, endpoints, forwarded,
    returned,
};
use canal_compiler::{build_ir, lower};
use canal_differential::probe::probes;
use canal_differential::target::{http1, received};
use canal_gateway_engine::{EngineDependencies, GatewayConfig, GatewayEngine, PlainListener};
use canal_generated_policies::routing::{GeneratedRouting, cases};
use canal_model::ids::Generation;
use canal_model::program::{Backend, BackendTarget, Resource, TunnelProtocol};
use canal_model::request_fraction::RequestFraction;
use canal_model::route_attempts::AttemptPolicy;
use canal_model::route_faults::{AbortStatus, FaultPolicy};
use canal_oracle::answers::OracleAnswer;
use canal_oracle::cors::OracleCors;
use canal_oracle::filters::ForwardedRequest;
use canal_runtime::drain::{self, DrainTrigger};
use canal_runtime::metrics::Registry;
use futures::future::join_all;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use proptest::strategy::{Strategy, ValueTree};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::generated::{from_environment, runner};

/// Least number of requests that are compared. `make soak PART=compare` builds for release.
const CASES_LEAST: usize = if cfg!(debug_assertions) {
    2_000
} else {
    50_000
};
/// Maximum number of requests made from one tenant's rules: more tenants show more than more
/// requests of one.
const PROBES_MAX: usize = 32;
/// A rule with a shorter timeout than this can end a request on a busy machine.
const TIMEOUT_LEAST: Duration = Duration::from_secs(60);
/// Name and ports of the pods that `canal_generated_policies` makes.
const PODS: [(&str, u8, &[u16]); 4] = [
    ("pod-1", 1, &[80, 81]),
    ("pod-2", 2, &[80, 81]),
    ("pod-3", 3, &[80, 81]),
    ("pod-4", 4, &[80]),
];
/// Services of the generated tenants that speak HTTP, with their ports.
const DIALLED: [(&str, u16); 3] = [("web", 80), ("web", 81), ("api", 80)];
/// Headers of an endpoint's response, which filters can change.
const RESPONSE_HEADERS: [(&str, &str); 2] = [("x-a", "1"), ("x-b", "2")];
/// Headers that the gateway itself adds to each request.
const ADDED: [&str; 4] = [
    "host",
    "x-forwarded-for",
    "x-forwarded-proto",
    "x-request-id",
];

/// Endpoint as a workload's name and target port.
type EndpointName = (String, u16);

/// Request as an endpoint received it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct ReceivedRequest {
    endpoint: EndpointName,
    method: String,
    host: String,
    target: String,
    /// Headers sorted by name, without those that the gateway adds.
    headers: Vec<(String, String)>,
}

/// Response as a client received it.
#[derive(Debug)]
struct ReceivedResponse {
    status: u16,
    /// Headers in the order received, names in lower case.
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl ReceivedResponse {
    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let own = self.headers.iter().filter(move |(n, _)| n == name);
        own.map(|(_, value)| value.as_str())
    }
}

/// Starts the endpoints. Returns their addresses.
async fn start_endpoints() -> BTreeMap<EndpointName, SocketAddr> {
    let mut all = BTreeMap::new();
    for (pod, number, ports) in PODS {
        for port in ports {
            let address = SocketAddr::from((pod_address(number), 0));
            let listener = TcpListener::bind(address).await.unwrap();
            let name = (pod.to_owned(), *port);
            all.insert(name.clone(), listener.local_addr().unwrap());
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(serve(stream, name.clone()));
                }
            });
        }
    }
    all
}

/// Each pod has an address of its own on loopback.
fn pod_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(127, 0, 1, number)
}

/// Serves a connection of either version of HTTP: the answer to each request is the request.
async fn serve(stream: TcpStream, endpoint: EndpointName) {
    let service = service_fn(move |request: http::Request<Incoming>| {
        let body = serde_json::to_vec(&describe(&request, &endpoint)).unwrap();
        let mut response = http::Response::new(Full::new(Bytes::from(body)));
        for (name, value) in RESPONSE_HEADERS {
            let value = http::HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        }
        std::future::ready(Ok::<_, std::convert::Infallible>(response))
    });
    let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
    // The gateway may close a pooled connection at any time.
    let _ = server.serve_connection(TokioIo::new(stream), service).await;
}

fn describe(request: &http::Request<Incoming>, endpoint: &EndpointName) -> ReceivedRequest {
    let text = |value: &http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let headers = request.headers().iter();
    let mut headers: Vec<_> = headers
        .filter(|(name, _)| !ADDED.contains(&name.as_str()))
        .map(|(name, value)| (name.as_str().to_owned(), text(value)))
        .collect();
    headers.sort_by(|a, b| a.0.cmp(&b.0));
    let uri = request.uri();
    let host = match uri.authority() {
        Some(authority) => authority.to_string(),
        None => request.headers().get("host").map(text).unwrap_or_default(),
    };
    ReceivedRequest {
        endpoint: endpoint.clone(),
        method: request.method().to_string(),
        host,
        target: uri
            .path_and_query()
            .map(ToString::to_string)
            .unwrap_or_default(),
        headers,
    }
}

/// A gateway with a listener for each HTTP port of the generated tenants.
struct RunningGateway {
    engine: GatewayEngine,
    _trigger: DrainTrigger,
    endpoints: BTreeMap<EndpointName, SocketAddr>,
    generation: u64,
}

impl RunningGateway {
    async fn start(case: &GeneratedRouting) -> Self {
        let registry = Registry::new();
        let (trigger, drain) = drain::tree();
        let listener = |(service, port): (&str, u16)| PlainListener {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            service: format!("{}/shop/{service}", case.tenant).parse().unwrap(),
            port,
        };
        let config = GatewayConfig {
            replica: "gw-all".into(),
            workers: 1,
            // Engines of tests that run in parallel would all be pinned to the same core.
            pin: false,
            plain: DIALLED.into_iter().map(listener).collect(),
            ..GatewayConfig::default()
        };
        let dependencies = EngineDependencies {
            registry,
            drain,
            identities: None,
            certificates: None,
            log: None,
            dns: None,
        };
        Self {
            engine: GatewayEngine::start(config, dependencies).unwrap(),
            _trigger: trigger,
            endpoints: start_endpoints().await,
            generation: 0,
        }
    }

    /// Makes the gateway run a tenant, whose endpoints are those on loopback. Requests that begin
    /// later are served by it.
    fn run(&mut self, ir: &Ir) {
        let (replica, az) = ("gw-all".parse().unwrap(), "az1".parse().unwrap());
        let placement = lower::placement_on(ir, &replica, &"b1".parse().unwrap());
        let mut resources = received(&lower::gateway(ir, &replica, &az, &placement));
        for resource in &mut resources {
            if let Resource::Workload(workload) = resource {
                let name = workload.name.to_string();
                // The endpoints are no members of the mesh.
                workload.tunnel = TunnelProtocol::None;
                for endpoint in &mut workload.endpoints {
                    let address = self.endpoints[&(name.clone(), endpoint.target_port)];
                    workload.addresses = vec![address.ip()];
                    endpoint.target_port = address.port();
                }
            }
        }
        let resources: Vec<_> = resources.into_iter().map(Arc::new).collect();
        self.generation += 1;
        self.engine.replace(&resources, Generation(self.generation));
    }

    /// Returns the address of the listener for the request's destination; `None` if it has none.
    fn address(&self, request: &OracleRequest) -> Option<SocketAddr> {
        let dialled = (request.service.name.as_str(), request.port);
        let at = DIALLED.iter().position(|own| *own == dialled)?;
        Some(self.engine.plain_addresses()[at])
    }
}

/// Sends a request as it is on a connection of its own, and reads the response.
async fn exchange(
    address: SocketAddr,
    request: &OracleRequest,
) -> Result<ReceivedResponse, String> {
    let failed = |e: std::io::Error| format!("the connection fails: {e}");
    let mut bytes = http1(request);
    // The end of the connection is the end of the response.
    bytes.truncate(bytes.len() - 2);
    bytes.extend_from_slice(b"Connection: close\r\n\r\n");
    let mut stream = TcpStream::connect(address).await.map_err(failed)?;
    stream.write_all(&bytes).await.map_err(failed)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.map_err(failed)?;
    let torn = || {
        format!(
            "the answer is no response: {:?}",
            String::from_utf8_lossy(&answer)
        )
    };
    let end = answer
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .ok_or_else(torn)?;
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .and_then(|line| line.split(' ').nth(1)?.parse().ok());
    let headers = lines.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    });
    Ok(ReceivedResponse {
        status: status.ok_or_else(torn)?,
        headers: headers.collect(),
        body: answer[end + 4..].to_vec(),
    })
}

/// Returns whether the outcome of a request depends on time or chance.
fn is_random(attempts: Option<&AttemptPolicy>, faults: Option<&FaultPolicy>) -> bool {
    let is_timed = attempts.is_some_and(|policy| {
        let times = [policy.timeouts.request, policy.timeouts.attempt];
        let is_short = times.iter().flatten().any(|time| *time < TIMEOUT_LEAST);
        // A retry waits, and another endpoint may answer.
        is_short
            || policy
                .retries
                .as_ref()
                .is_some_and(|retries| retries.max > 0)
    });
    let is_faulty = faults.is_some_and(|policy| {
        policy.delay.is_some()
            || policy
                .abort
                .is_some_and(|abort| abort.fraction != RequestFraction::ALL)
    });
    is_timed || is_faulty
}

/// Compares a response with what the oracle says of the request.
fn compare(
    ir: &Ir,
    request: &OracleRequest,
    verdict: &RoutingVerdict,
    response: &ReceivedResponse,
) -> Result<(), String> {
    let of_status = |expected: u16| match response.status == expected {
        true => Ok(()),
        false => Err(format!("status {expected}")),
    };
    // A message without a host is not valid (RFC 9112 §3.2), so it is refused before it is routed.
    if request.host.is_empty() {
        return of_status(400);
    }
    match verdict {
        RoutingVerdict::NoService => Err("no listener".to_owned()),
        RoutingVerdict::NoRule => of_status(404),
        RoutingVerdict::Refuse { status, .. } => of_status(*status),
        RoutingVerdict::Answer { answer: None, .. } => of_status(400),
        RoutingVerdict::Answer {
            answer: Some(answer),
            ..
        } => compare_answer(answer, response),
        RoutingVerdict::Service { service, port } => {
            let target = BackendTarget::Service {
                service: service.clone(),
                port: *port,
                subset: Default::default(),
            };
            let backend = Backend {
                weight: 1,
                filters: None,
                target,
            };
            let as_sent = canal_compiler::oracle::sent(request);
            compare_backend(ir, request, (&backend, Some(as_sent)), None, response)
        }
        RoutingVerdict::Split {
            backends, faults, ..
        } => {
            let cross_origin = cors(ir, request);
            if let Some(OracleCors::Preflight(answer)) = &cross_origin {
                return compare_answer(answer, response);
            }
            if let Some(abort) = faults.as_ref().and_then(|policy| policy.abort) {
                return match abort.status {
                    AbortStatus::Http(status) => of_status(status),
                    // A client that does not call gRPC gets a status of HTTP by Envoy's table.
                    AbortStatus::Grpc(_) => Ok(()),
                };
            }
            let mut reasons = Vec::new();
            for (at, backend) in backends
                .iter()
                .enumerate()
                .filter(|(_, own)| own.weight > 0)
            {
                let wanted = forwarded(ir, request, at);
                match compare_backend(ir, request, (backend, wanted), Some(at), response) {
                    // Which backend gets the request is chance.
                    Ok(()) => return Ok(()),
                    Err(reason) => reasons.push(reason),
                }
            }
            Err(reasons.join("; or "))
        }
    }
}

/// Compares a response with one that the gateway makes itself.
fn compare_answer(answer: &OracleAnswer, response: &ReceivedResponse) -> Result<(), String> {
    let has = |(name, value): &(String, String)| response.values(name).any(|own| own == value);
    let is_same = response.status == answer.status
        && answer.headers.iter().all(has)
        && response.body == answer.body;
    is_same.then_some(()).ok_or_else(|| format!("{answer:?}"))
}

/// Compares a response with that of one backend, to which the request is sent as `wanted`; `None`: it
/// is answered with 400. `at` is the backend's index in its rule.
fn compare_backend(
    ir: &Ir,
    request: &OracleRequest,
    (backend, wanted): (&Backend, Option<ForwardedRequest>),
    at: Option<usize>,
    response: &ReceivedResponse,
) -> Result<(), String> {
    let of_status = |expected: u16| match response.status == expected {
        true => Ok(()),
        false => Err(format!("status {expected}")),
    };
    if let BackendTarget::Refuse { status, .. } = &backend.target {
        return of_status(*status);
    }
    let able: BTreeSet<EndpointName> = endpoints(ir, &backend.target)
        .into_iter()
        .map(|(workload, port)| (workload.name.to_string(), port))
        .collect();
    let Some(wanted) = wanted else {
        return of_status(400);
    };
    if able.is_empty() {
        return of_status(503);
    }
    of_status(200)?;
    let got: ReceivedRequest = serde_json::from_slice(&response.body)
        .map_err(|e| format!("an endpoint's answer, not {e}"))?;
    if !able.contains(&got.endpoint) {
        return Err(format!("an endpoint of {able:?}"));
    }
    // Names have no letter case, and HTTP/2 writes them in lower case.
    let lower = |(name, value): &(String, String)| (name.to_ascii_lowercase(), value.clone());
    let mut headers: Vec<_> = wanted.headers.iter().map(lower).collect();
    headers.retain(|(name, _)| !ADDED.contains(&name.as_str()));
    headers.sort_by(|a, b| a.0.cmp(&b.0));
    let expected = ReceivedRequest {
        endpoint: got.endpoint.clone(),
        method: request.method.clone(),
        host: wanted.host,
        target: wanted.target,
        headers,
    };
    if got != expected {
        return Err(format!("{expected:?}"));
    }
    let Some(at) = at else { return Ok(()) };
    let sent = RESPONSE_HEADERS.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let wanted = returned(ir, request, at, &sent).unwrap_or_default();
    // Headers that no filter names, such as Date, do not count.
    let is_named = |(name, _): &&(String, String)| name.starts_with("x-");
    let mut own: Vec<_> = response.headers.iter().filter(is_named).collect();
    own.sort();
    let mut expected: Vec<_> = wanted.iter().filter(is_named).collect();
    expected.sort();
    if own != expected {
        return Err(format!("the response's headers {expected:?}"));
    }
    match cors(ir, request) {
        Some(OracleCors::Response { headers, .. }) => {
            let has =
                |(name, value): &(String, String)| response.values(name).any(|own| own == value);
            let missing = headers.iter().find(|header| !has(header));
            missing.map_or(Ok(()), |header| {
                Err(format!("the response's header {header:?}"))
            })
        }
        _ => Ok(()),
    }
}

/// Numbers of requests by what the oracle says of them.
type Tally = BTreeMap<&'static str, usize>;

fn kind(verdict: &RoutingVerdict) -> &'static str {
    match verdict {
        RoutingVerdict::NoService => "no service",
        RoutingVerdict::Service { .. } => "itself",
        RoutingVerdict::Split { .. } => "split",
        RoutingVerdict::Answer { .. } => "answer",
        RoutingVerdict::Refuse { .. } => "refuse",
        RoutingVerdict::NoRule => "404",
    }
}

/// Sends a tenant's requests and compares each answer.
async fn check(
    gateway: &mut RunningGateway,
    case: &GeneratedRouting,
    tally: &RefCell<Tally>,
) -> Result<(), String> {
    let ir = build_ir(&case.input()).0.ok_or("the tenant is not valid")?;
    gateway.run(&ir);
    let made = probes(&ir);
    let step = made.len().div_ceil(PROBES_MAX).max(1);
    let requests = case
        .requests
        .iter()
        .cloned()
        .chain(made.into_iter().step_by(step));
    let (gateway, ir) = (&*gateway, &ir);
    let sent = requests.filter_map(|mut request| {
        // The clients of this test prove no identity, and none of them speaks TLS.
        request.client = OracleClient::default();
        let address = gateway.address(&request)?;
        let verdict = decide(ir, &request);
        // The answer is an authorizer's, and the endpoints are none.
        let filters = deciding_rule(ir, &request).and_then(|rule| rule.filters.as_ref());
        if filters.is_some_and(|filters| filters.authorizer.is_some()) {
            return None;
        }
        if let RoutingVerdict::Split { attempts, faults, .. } = &verdict
            && is_random(attempts.as_deref(), faults.as_deref())
        {
            return None;
        }
        Some(async move {
            let exchange = tokio::time::timeout(canal_timing::deadline(Duration::from_secs(20)), exchange(address, &request));
            let response = exchange.await.map_err(|_| format!("no answer\n{request:?}"))?;
            let response = response.map_err(|e| format!("{e}\n{request:?}"))?;
            *tally.borrow_mut().entry(kind(&verdict)).or_default() += 1;
            compare(ir, &request, &verdict, &response).map_err(|expected| {
                let body = String::from_utf8_lossy(&response.body);
                format!("expected: {expected}\ngot: {} {:?} {body}\n{request:?}\noracle: {verdict:?}\n{ir}", response.status, response.headers)
            })
        })
    });
    // Requests wait for each other's connections only on the client's side.
    join_all(sent).await.into_iter().collect()
}

#[tokio::test]
async fn a_running_gateway_serves_generated_requests_as_the_oracle_says() {
    let first = from_environment("CANAL_SEED").unwrap_or(1);
    let count = from_environment("CANAL_TENANTS").unwrap_or(u64::MAX);
    let tally = RefCell::new(Tally::new());
    let mut gateway = None;
    let compared = || tally.borrow().values().sum::<usize>();
    let mut tenants = 0;
    while compared() < CASES_LEAST && tenants < count {
        let seed = first + tenants;
        let case = cases()
            .new_tree(&mut runner(seed))
            .expect("a tenant")
            .current();
        if gateway.is_none() {
            gateway = Some(RunningGateway::start(&case).await);
        }
        let running = gateway.as_mut().expect("it was started");
        if let Err(why) = check(running, &case, &tally).await {
            panic!("seed {seed} (CANAL_SEED={seed} CANAL_TENANTS=1 repeats it): {why}");
        }
        tenants += 1;
        assert!(
            tenants < CASES_LEAST as u64,
            "tenants have requests that can be sent"
        );
    }
    let tally = tally.into_inner();
    println!("{tenants} tenants from seed {first}, requests: {tally:?}");
    if count == u64::MAX {
        let all: usize = tally.values().sum();
        // A kind that hardly occurs would prove nothing.
        assert!(
            tally.len() == 5 && tally.values().all(|own| own * 100 > all),
            "{tally:?}"
        );
    }
}

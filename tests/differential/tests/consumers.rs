//! Routes for the clients of one namespace in the configuration that gateways serve with: which rule of
//! which namespace decides equals the oracle's, for clients of every namespace and of none.

use std::sync::Arc;

use canal_compiler::oracle::{OracleRequest, RoutingVerdict, decide};
use canal_compiler::{build_ir, lower};
use canal_differential::probe::probes;
use canal_differential::target::received;
use canal_gateway_config::{ConsumerPort, RouteOutcome, Snapshot, SnapshotBuilder};
use canal_generated_policies::routing::cases;
use canal_model::ids::{Generation, Namespace};
use canal_model::program::{AppProtocol, RouteKey};
use canal_router::{RoutableRequest, routing_path};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

/// Tenants in the gate, of which each asks at most this many requests.
const TENANTS: usize = 150;
const REQUESTS_MAX: usize = 48;

/// A request as a gateway reads it.
struct SentRequest<'a> {
    request: &'a OracleRequest,
    host: String,
    path: String,
}

impl RoutableRequest for SentRequest<'_> {
    fn host(&self) -> &[u8] {
        self.host.as_bytes()
    }
    fn method(&self) -> &[u8] {
        self.request.method.as_bytes()
    }
    fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }
    fn query(&self) -> Option<&[u8]> {
        let (_, query) = self.request.target.split_once('?')?;
        Some(query.as_bytes())
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        let lines = self.request.headers.iter();
        let own = lines.filter(|(sent, _)| sent.eq_ignore_ascii_case(name));
        own.for_each(|(_, value)| visit(value.as_bytes()));
    }
    fn client_attribute(&self, name: &str) -> Option<&[u8]> {
        self.request.client.attribute(name).map(str::as_bytes)
    }
}

/// What a gateway does: the rule that decides, or nothing.
#[derive(Debug, PartialEq, Eq)]
enum ServedRoute {
    NoService,
    Itself,
    Rule(RouteKey),
    NoRule,
}

fn expected(verdict: RoutingVerdict) -> ServedRoute {
    match verdict {
        RoutingVerdict::NoService => ServedRoute::NoService,
        RoutingVerdict::Service { .. } => ServedRoute::Itself,
        RoutingVerdict::NoRule => ServedRoute::NoRule,
        RoutingVerdict::Split { rule, .. }
        | RoutingVerdict::Answer { rule, .. }
        | RoutingVerdict::Refuse { rule, .. } => ServedRoute::Rule(rule),
    }
}

fn served(snapshot: &Snapshot, request: &OracleRequest) -> ServedRoute {
    let tenant = snapshot.tenant("alpha").expect("the tenant");
    let Some(service) = tenant.service(&request.service) else {
        return ServedRoute::NoService;
    };
    let Some(port) = service.port(request.port) else {
        return ServedRoute::NoService;
    };
    let client = request.client.namespace.as_ref().map(Namespace::as_str);
    let consumer = client.and_then(|client| ConsumerPort::find(&port.consumers, client));
    let (is_routed, by_path) = match consumer {
        None => (port.routed, port.routed_by_path),
        Some(consumer) => (true, consumer.routed_by_path),
    };
    let routes = service.routes.as_ref().filter(|_| is_routed);
    let Some(routes) = routes.filter(|_| port.protocol != AppProtocol::Tcp) else {
        return ServedRoute::Itself;
    };
    let path = request.target.split('?').next().unwrap_or_default();
    let normal = routing_path(path.as_bytes()).filter(|_| by_path);
    let sent = SentRequest {
        request,
        host: canal_compiler::oracle::normal_host(&request.host),
        path: normal.map_or_else(|| path.to_owned(), Into::into),
    };
    match routes.decide_for(consumer, request.port, &sent, 0) {
        (RouteOutcome::Nowhere, _) => ServedRoute::NoRule,
        (_, rule) => ServedRoute::Rule(rule.expect("a rule decides").rule.key.clone()),
    }
}

#[test]
fn clients_are_routed_by_the_rules_of_their_own_namespace() {
    let mut runner = TestRunner::deterministic();
    let (mut compared, mut replaced) = (0, 0);
    for _ in 0..TENANTS {
        let case = cases().new_tree(&mut runner).expect("a tenant").current();
        let ir = build_ir(&case.input()).0.expect("the tenant is valid");
        let (replica, az) = ("gw".parse().unwrap(), "az1".parse().unwrap());
        let placement = lower::placement_on(&ir, &replica, &"b1".parse().unwrap());
        let resources = received(&lower::gateway(&ir, &replica, &az, &placement));
        let resources: Vec<_> = resources.into_iter().map(Arc::new).collect();
        let snapshot = SnapshotBuilder::new("gw", None, None).apply(&resources, &[], Generation(1));
        let made = probes(&ir);
        let step = made.len().div_ceil(REQUESTS_MAX).max(1);
        for request in case.requests.iter().chain(made.iter().step_by(step)) {
            for client in [None, Some("front"), Some("back"), Some("shop")] {
                let mut request = request.clone();
                request.client.namespace = client.map(|client| client.parse().expect("a name"));
                let verdict = expected(decide(&ir, &request));
                let mut unnamed = request.clone();
                unnamed.client.namespace = None;
                replaced += usize::from(verdict != expected(decide(&ir, &unnamed)));
                compared += 1;
                assert_eq!(served(&snapshot, &request), verdict, "{request:?}\n{ir}");
            }
        }
    }
    println!("{compared} requests, of which {replaced} have another route than for all clients");
    assert!(
        compared > 10_000 && replaced * 50 > compared,
        "{replaced} of {compared}"
    );
}

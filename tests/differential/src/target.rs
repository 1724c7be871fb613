//! The targets as data planes run them, from resources that passed through the wire format. They do
//! not select endpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_compiler::ir::Ir;
use canal_compiler::oracle::{self, OracleClient, RoutingVerdict};
use canal_compiler::{build_ir, lower};
use canal_gateway_config::{
    AnsweredRequest, MatchedFilters, Snapshot, SnapshotBuilder, backend_filters, edit_response,
};
use canal_h1::{MessageLimits as HeadLimits, RequestHead, RequestView, split_authority};
use canal_identity::ClientIdentityFactory;
use canal_model::ids::{Generation, Namespace, ServiceKey};
use canal_model::program::{AppProtocol, Resource, RouteRule, Service};
use canal_model::route_table::RouteTable;
use canal_oracle::answers::OracleAnswer;
use canal_oracle::filters::ForwardedRequest;
use canal_router::{
    PathSubstitution, RoutableRequest, RouteDecision, RouteMatch, Router, RouterLimits,
    routing_path,
};
use canal_wire::southbound;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::policy::Policy;

/// Returns the state of a data plane after it received these resources. Panics if one of them is
/// refused or changes on the way.
pub fn received(sent: &[Resource]) -> Vec<Resource> {
    let through = |resource: &Resource| {
        let (kind, name) = (resource.kind(), resource.name());
        let kind = southbound::kind_of(kind.type_url()).expect("its own type URL");
        let arrived = southbound::decode(kind, &name, &southbound::encode(resource))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(
            resource.reads_as(&arrived),
            "{name} arrives as it was sent, not as {arrived:?}"
        );
        arrived
    };
    sent.iter().map(through).collect()
}

/// Compiles a tenant's only document, and returns its IR with what a gateway replica serves of it.
/// Panics if the tenant is invalid, or a resource of its is refused on the way.
pub fn served_by_replica(text: &str, keyring: &ClientIdentityFactory) -> (Ir, Arc<Snapshot>) {
    let policy = Policy::of(&[("tenant.yaml".to_owned(), text.to_owned())]);
    let ir = build_ir(&policy.input()).0.expect("the tenant is valid");
    let (replica, az) = ("gw".parse().unwrap(), "az1".parse().unwrap());
    let placement = lower::placement_on(&ir, &replica, &"b1".parse().unwrap());
    let resources = received(&lower::gateway(&ir, &replica, &az, &placement));
    let resources: Vec<_> = resources.into_iter().map(Arc::new).collect();
    let mut builder = SnapshotBuilder::new("gw", Some(keyring.clone()), None);
    let snapshot = builder.apply(&resources, &[], Generation(1));
    (ir, snapshot)
}

/// A gateway: routers for each service.
pub struct GatewayTarget {
    services: BTreeMap<ServiceKey, ServedService>,
}

/// A service with its tables and their routers: that for all clients (`None`), and those of namespaces.
struct ServedService {
    service: Service,
    tables: BTreeMap<Option<Namespace>, (RouteTable, Router)>,
}

impl GatewayTarget {
    /// Creates the routers. They get the rules from the last to the first, because the order of
    /// arrival must not matter.
    ///
    /// Panics if a router refuses a rule: the compiler must have refused such a rule and reported
    /// it.
    pub fn new(resources: &[Resource]) -> Self {
        let mut rules: BTreeMap<&ServiceKey, Vec<Arc<RouteRule>>> = BTreeMap::new();
        for resource in resources.iter().rev() {
            if let Resource::Route(rule) = resource {
                rules
                    .entry(&rule.parent)
                    .or_default()
                    .push(Arc::new(rule.clone()));
            }
        }
        let services = resources.iter().filter_map(|resource| match resource {
            Resource::Service(service) => Some(service),
            _ => None,
        });
        let built = services.map(|service| {
            let mut of_clients: BTreeMap<_, Vec<_>> = BTreeMap::from([(None, Vec::new())]);
            for rule in rules.remove(&service.key).unwrap_or_default() {
                of_clients
                    .entry(rule.consumer.clone())
                    .or_default()
                    .push(rule);
            }
            let tables = of_clients.into_iter().map(|(client, rules)| {
                let own = RouteTable::new(rules);
                let (router, faults) = Router::build(&own, &RouterLimits::DEFAULT);
                assert_eq!(
                    faults,
                    [],
                    "the compiler let through what the router of {} refuses",
                    service.key
                );
                (client, (own, router))
            });
            let own = ServedService {
                service: service.clone(),
                tables: tables.collect(),
            };
            (service.key.clone(), own)
        });
        Self {
            services: built.collect(),
        }
    }

    /// Returns the rules of a service in match order: those for all clients, or for the clients of a
    /// namespace.
    pub fn routes(&self, service: &ServiceKey, client: Option<&Namespace>) -> Option<&RouteTable> {
        let tables = &self.services.get(service)?.tables;
        tables.get(&client.cloned()).map(|(routes, _)| routes)
    }

    /// Returns the verdict on a request whose parts are given as they are.
    pub fn decide(&self, request: &oracle::OracleRequest) -> RoutingVerdict {
        self.verdict(request, &RequestParts::of(request))
    }

    /// Returns the verdict on a request read from its HTTP/1.1 head, or `None` if HTTP/1.1 cannot
    /// express the request.
    pub fn decide_http1(&self, request: &oracle::OracleRequest) -> Option<RoutingVerdict> {
        let bytes = http1(request);
        let mut head = RequestHead::new();
        let read = head.parse(&bytes, &HeadLimits::DEFAULT).ok()??;
        assert_eq!(read, bytes.len(), "one head: {request:?}");
        Some(self.verdict(request, &Read(head.view(&bytes), &request.client)))
    }

    /// Returns the filters of a request to the backend with this index; `None` if no rule sends it to
    /// one.
    fn filters(&self, request: &oracle::OracleRequest, backend: usize) -> Option<MatchedFilters> {
        let parts = RequestParts::of(request);
        let found = self.find(request, &parts).ok()?;
        let RouteDecision::Split(_) = found.action() else {
            return None;
        };
        let of_backend = backend_filters::of_backend(found.rule(), backend).map(Arc::new);
        let filters = MatchedFilters::new(found.rule(), found.match_index);
        let written = found.rule().filters.as_deref();
        let regex = written.and_then(|filters| filters.rewrite.path_regex.as_ref());
        let compiled =
            regex.and_then(|regex| PathSubstitution::compile(regex, &RouterLimits::DEFAULT));
        let filters = match compiled {
            Some(compiled) => filters.with_substitution(Arc::new(compiled)),
            None => filters,
        };
        Some(filters.with_backend(of_backend))
    }

    /// Returns the headers of a response that the client receives from the backend with this index,
    /// which has those of the request.
    pub fn returned(
        &self,
        request: &oracle::OracleRequest,
        backend: usize,
    ) -> Option<Vec<(String, String)>> {
        let filters = self.filters(request, backend)?;
        let mut headers = header_map(request);
        edit_response(filters.response_headers(), &mut headers);
        Some(header_list(&headers))
    }

    /// Returns the request that an endpoint of the backend with this index receives; `None` if no
    /// rule sends it to one.
    pub fn forwarded(
        &self,
        request: &oracle::OracleRequest,
        backend: usize,
    ) -> Option<ForwardedRequest> {
        let parts = RequestParts::of(request);
        let filters = self.filters(request, backend)?;
        let normal = routing_path(parts.path());
        let path = normal.map_or_else(|| String::from_utf8_lossy(parts.path()), Into::into);
        let changes = filters.request(None, &path).ok()?;
        let mut headers = header_map(request);
        changes.apply(&mut headers);
        let headers = header_list(&headers);
        let target = changes.target(parts.path(), parts.query());
        Some(ForwardedRequest {
            host: changes.host.unwrap_or_else(|| request.host.clone()),
            target: target.map_or_else(
                || request.target.clone(),
                |target| String::from_utf8_lossy(&target).into_owned(),
            ),
            headers,
        })
    }

    /// Returns the match that holds for a request.
    ///
    /// # Errors
    /// No rule decides; the verdict says what happens instead.
    fn find<R: RoutableRequest>(
        &self,
        original: &oracle::OracleRequest,
        request: &R,
    ) -> Result<RouteMatch<'_>, Box<RoutingVerdict>> {
        let Some(ServedService { service, tables }) = self.services.get(&original.service) else {
            return Err(Box::new(RoutingVerdict::NoService));
        };
        let Some(port) = service.ports.iter().find(|port| port.port == original.port) else {
            return Err(Box::new(RoutingVerdict::NoService));
        };
        let routed_by = |client: &Option<Namespace>| {
            let (_, router) = tables.get(client)?;
            let mut rules = router.rules().iter();
            let is_routed = rules.any(|rule| rule.parent_port.is_none_or(|own| own == port.port));
            is_routed.then_some(router)
        };
        let router = routed_by(&original.client.namespace).or_else(|| routed_by(&None));
        let Some(router) = router.filter(|_| port.protocol != AppProtocol::Tcp) else {
            return Err(Box::new(RoutingVerdict::Service {
                service: service.key.clone(),
                port: port.port,
            }));
        };
        let normal = if router.reads_path(port.port) {
            routing_path(request.path())
        } else {
            None
        };
        let found = match &normal {
            Some(path) => router.find(port.port, &Normal { request, path }),
            None => router.find(port.port, request),
        };
        found.ok_or_else(|| Box::new(RoutingVerdict::NoRule))
    }

    fn verdict<R: RoutableRequest>(
        &self,
        original: &oracle::OracleRequest,
        request: &R,
    ) -> RoutingVerdict {
        let found = match self.find(original, request) {
            Ok(found) => found,
            Err(verdict) => return *verdict,
        };
        let rule = found.rule().key.clone();
        match found.action() {
            RouteDecision::Split(backends) => {
                let matched = MatchedFilters::new(found.rule(), found.match_index);
                RoutingVerdict::Split {
                    rule,
                    backends: backends.to_vec(),
                    attempts: matched.attempts().cloned().map(Box::new),
                    faults: matched.faults().copied().map(Box::new),
                    cors: matched.rule().cors.clone(),
                    mirrors: matched.rule().mirrors.clone(),
                }
            }
            RouteDecision::Answer(_) => RoutingVerdict::Answer {
                rule,
                answer: answer(&found, original, request).map(Box::new),
            },
            RouteDecision::Refuse { status, reason } => RoutingVerdict::Refuse {
                rule,
                status,
                reason: reason.to_owned(),
            },
        }
    }
}

fn header_map(request: &oracle::OracleRequest) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in &request.headers {
        headers.append(
            HeaderName::from_bytes(name.as_bytes()).expect("a name"),
            HeaderValue::from_str(value).expect("a value"),
        );
    }
    headers
}

/// Returns headers sorted by name.
fn header_list(headers: &HeaderMap) -> Vec<(String, String)> {
    let mut headers: Vec<_> = headers
        .iter()
        .map(|(name, value)| {
            let value = String::from_utf8_lossy(value.as_bytes());
            (name.as_str().to_owned(), value.into_owned())
        })
        .collect();
    headers.sort_by(|a, b| a.0.cmp(&b.0));
    headers
}

/// Returns the answer that the gateway makes; `None` means 400.
fn answer<R: RoutableRequest>(
    found: &RouteMatch<'_>,
    original: &oracle::OracleRequest,
    request: &R,
) -> Option<OracleAnswer> {
    let normal = routing_path(request.path());
    let normal = normal.map_or_else(|| String::from_utf8_lossy(request.path()), Into::into);
    let matched = MatchedFilters::new(found.rule(), found.match_index);
    let reply = matched.answer(&AnsweredRequest {
        scheme: original.client.scheme(),
        authority: original.host.as_bytes(),
        port: original.port,
        path: request.path(),
        query: request.query(),
        normal_path: &normal,
    })?;
    let headers = reply.headers.into_iter();
    let mut headers: Vec<_> = headers
        .map(|(name, value)| (name, String::from_utf8_lossy(&value).into_owned()))
        .collect();
    headers.sort_by(|a, b| a.0.cmp(&b.0));
    Some(OracleAnswer {
        status: reply.status,
        headers,
        body: reply.body,
    })
}

/// A node: it knows which destinations are services, and reads no request.
pub struct NodeTarget {
    ports: BTreeMap<ServiceKey, BTreeSet<u16>>,
}

impl NodeTarget {
    /// Creates the node from the resources that it receives.
    pub fn new(resources: &[Resource]) -> Self {
        let services = resources.iter().filter_map(|resource| match resource {
            Resource::Service(service) => Some((
                service.key.clone(),
                service.ports.iter().map(|port| port.port).collect(),
            )),
            _ => None,
        });
        Self {
            ports: services.collect(),
        }
    }

    /// Returns whether the node sends a connection to this port of the service to a gateway.
    pub fn knows(&self, service: &ServiceKey, port: u16) -> bool {
        self.ports
            .get(service)
            .is_some_and(|ports| ports.contains(&port))
    }
}

/// A request whose path is normalized.
struct Normal<'a, R> {
    request: &'a R,
    path: &'a str,
}

impl<R: RoutableRequest> RoutableRequest for Normal<'_, R> {
    fn host(&self) -> &[u8] {
        self.request.host()
    }
    fn method(&self) -> &[u8] {
        self.request.method()
    }
    fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }
    fn query(&self) -> Option<&[u8]> {
        self.request.query()
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        self.request.header(name, visit);
    }
    fn client_attribute(&self, name: &str) -> Option<&[u8]> {
        self.request.client_attribute(name)
    }
}

/// A request as its parts.
struct RequestParts<'a> {
    original: &'a oracle::OracleRequest,
    path: &'a str,
    query: Option<&'a str>,
}

impl<'a> RequestParts<'a> {
    fn of(original: &'a oracle::OracleRequest) -> Self {
        match original.target.split_once('?') {
            Some((path, query)) => RequestParts {
                original,
                path,
                query: Some(query),
            },
            None => RequestParts {
                original,
                path: &original.target,
                query: None,
            },
        }
    }
}

impl RoutableRequest for RequestParts<'_> {
    fn host(&self) -> &[u8] {
        host_of(self.original.host.as_bytes())
    }
    fn method(&self) -> &[u8] {
        self.original.method.as_bytes()
    }
    fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }
    fn query(&self) -> Option<&[u8]> {
        self.query.map(str::as_bytes)
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        let own = self
            .original
            .headers
            .iter()
            .filter(|(sent, _)| sent.eq_ignore_ascii_case(name));
        own.for_each(|(_, value)| visit(value.as_bytes()));
    }
    fn client_attribute(&self, name: &str) -> Option<&[u8]> {
        self.original.client.attribute(name).map(str::as_bytes)
    }
}

/// A request as the codec reads it, and its client.
struct Read<'a>(RequestView<'a>, &'a OracleClient);

impl RoutableRequest for Read<'_> {
    fn host(&self) -> &[u8] {
        host_of(self.0.authority())
    }
    fn method(&self) -> &[u8] {
        self.0.method()
    }
    fn path(&self) -> &[u8] {
        self.0.path()
    }
    fn query(&self) -> Option<&[u8]> {
        self.0.query()
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        self.0.fields().named(name.as_bytes()).for_each(visit);
    }
    fn client_attribute(&self, name: &str) -> Option<&[u8]> {
        self.1.attribute(name).map(str::as_bytes)
    }
}

fn host_of(authority: &[u8]) -> &[u8] {
    let Some((host, _)) = split_authority(authority) else {
        return authority;
    };
    host.strip_prefix(b"[")
        .and_then(|host| host.strip_suffix(b"]"))
        .unwrap_or(host)
}

/// Returns the head of a request as HTTP/1.1 writes it.
pub fn http1(request: &oracle::OracleRequest) -> Vec<u8> {
    let mut text = format!(
        "{} {} HTTP/1.1\r\nHost: {}\r\n",
        request.method, request.target, request.host
    );
    for (name, value) in &request.headers {
        text += &format!("{name}: {value}\r\n");
    }
    (text + "\r\n").into_bytes()
}

//! The targets as data planes run them, from resources that went over the wire form. They do not choose endpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_compiler::oracle::{self, Verdict};
use canal_h1::{Limits as HeadLimits, RequestHead, RequestView, split_authority};
use canal_model::ids::ServiceKey;
use canal_model::program::{AppProtocol, Resource, RouteRule, Service};
use canal_router::{Action, Limits, Request, Router, normalize_path};
use canal_wire::southbound;

/// What a data plane has after it received these resources. Panics if one of them is refused or arrives as another.
pub fn received(sent: &[Resource]) -> Vec<Resource> {
    let through = |resource: &Resource| {
        let (kind, name) = (resource.kind(), resource.name());
        let kind = southbound::kind_of(southbound::type_url(kind)).expect("its own type URL");
        let arrived = southbound::decode(kind, &name, &southbound::encode(resource)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(arrived, *resource, "{name} arrives as it was sent");
        arrived
    };
    sent.iter().map(through).collect()
}

/// A gateway: a router for each service that has rules.
pub struct Gateway {
    services: BTreeMap<ServiceKey, (Service, Router)>,
}

impl Gateway {
    /// Rules are given to the routers from the last to the first: the order in which they arrive must not matter.
    ///
    /// Panics if a router finds fault with a rule: whatever a gateway would refuse, the compiler must have refused and told of.
    pub fn new(resources: &[Resource]) -> Self {
        let mut rules: BTreeMap<&ServiceKey, Vec<Arc<RouteRule>>> = BTreeMap::new();
        for resource in resources.iter().rev() {
            if let Resource::Route(rule) = resource {
                rules.entry(&rule.parent).or_default().push(Arc::new(rule.clone()));
            }
        }
        let services = resources.iter().filter_map(|resource| match resource {
            Resource::Service(service) => Some(service),
            _ => None,
        });
        let built = services.map(|service| {
            let own = rules.get(&service.key).map(Vec::as_slice).unwrap_or_default();
            let (router, faults) = Router::build(own, &Limits::DEFAULT);
            assert_eq!(faults, [], "the compiler let through what the router of {} refuses", service.key);
            (service.key.clone(), (service.clone(), router))
        });
        Self { services: built.collect() }
    }

    /// The verdict on a request whose parts are given as they are.
    pub fn decide(&self, request: &oracle::Request) -> Verdict {
        self.verdict(request, &Plain::of(request))
    }

    /// The verdict on a request read from its HTTP/1.1 head; `None` if the request cannot be said in HTTP/1.1.
    pub fn decide_http1(&self, request: &oracle::Request) -> Option<Verdict> {
        let bytes = http1(request);
        let mut head = RequestHead::new();
        let read = head.parse(&bytes, &HeadLimits::DEFAULT).ok()??;
        assert_eq!(read, bytes.len(), "one head: {request:?}");
        Some(self.verdict(request, &Read(head.view(&bytes))))
    }

    fn verdict<R: Request>(&self, asked: &oracle::Request, request: &R) -> Verdict {
        let Some((service, router)) = self.services.get(&asked.service) else { return Verdict::NoService };
        let Some(port) = service.ports.iter().find(|port| port.port == asked.port) else { return Verdict::NoService };
        let is_routed = router.rules().iter().any(|rule| rule.parent_port.is_none_or(|own| own == port.port));
        if port.protocol == AppProtocol::Tcp || !is_routed {
            return Verdict::Service { service: service.key.clone(), port: port.port };
        }
        let normal = match router.reads_path(port.port).then(|| normalize_path(request.path())).transpose() {
            Ok(normal) => normal.flatten(),
            Err(_) => return Verdict::AmbiguousPath,
        };
        let found = match &normal {
            Some(path) => router.find(port.port, &Normal { request, path }),
            None => router.find(port.port, request),
        };
        let Some(found) = found else { return Verdict::NoRule };
        let rule = found.rule().key.clone();
        match found.action() {
            Action::Split(backends) => Verdict::Split { rule, backends: backends.to_vec() },
            Action::Refuse { status, reason } => Verdict::Refuse { rule, status, reason: reason.to_owned() },
        }
    }
}

/// A node: it knows which destinations are services' and looks at no request.
pub struct Node {
    ports: BTreeMap<ServiceKey, BTreeSet<u16>>,
}

impl Node {
    /// From what a node receives.
    pub fn new(resources: &[Resource]) -> Self {
        let services = resources.iter().filter_map(|resource| match resource {
            Resource::Service(service) => Some((service.key.clone(), service.ports.iter().map(|port| port.port).collect())),
            _ => None,
        });
        Self { ports: services.collect() }
    }

    /// Whether it takes a connection to this port of the service to a gateway.
    pub fn knows(&self, service: &ServiceKey, port: u16) -> bool {
        self.ports.get(service).is_some_and(|ports| ports.contains(&port))
    }
}

/// A request whose path is in its normal form.
struct Normal<'a, R> {
    request: &'a R,
    path: &'a str,
}

impl<R: Request> Request for Normal<'_, R> {
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
}

/// A request as its parts.
struct Plain<'a> {
    asked: &'a oracle::Request,
    path: &'a str,
    query: Option<&'a str>,
}

impl<'a> Plain<'a> {
    fn of(asked: &'a oracle::Request) -> Self {
        match asked.target.split_once('?') {
            Some((path, query)) => Plain { asked, path, query: Some(query) },
            None => Plain { asked, path: &asked.target, query: None },
        }
    }
}

impl Request for Plain<'_> {
    fn host(&self) -> &[u8] {
        host_of(self.asked.host.as_bytes())
    }
    fn method(&self) -> &[u8] {
        self.asked.method.as_bytes()
    }
    fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }
    fn query(&self) -> Option<&[u8]> {
        self.query.map(str::as_bytes)
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        let own = self.asked.headers.iter().filter(|(sent, _)| sent.eq_ignore_ascii_case(name));
        own.for_each(|(_, value)| visit(value.as_bytes()));
    }
}

/// A request as the codec reads it.
struct Read<'a>(RequestView<'a>);

impl Request for Read<'_> {
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
}

fn host_of(authority: &[u8]) -> &[u8] {
    let Some((host, _)) = split_authority(authority) else { return authority };
    host.strip_prefix(b"[").and_then(|host| host.strip_suffix(b"]")).unwrap_or(host)
}

fn http1(request: &oracle::Request) -> Vec<u8> {
    let mut text = format!("{} {} HTTP/1.1\r\nHost: {}\r\n", request.method, request.target, request.host);
    for (name, value) in &request.headers {
        text += &format!("{name}: {value}\r\n");
    }
    (text + "\r\n").into_bytes()
}

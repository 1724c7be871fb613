//! Generates policies, and requests that are likely to match them. The vocabulary is small, so that
//! paths, hosts and values collide.
//!
//! Implementations of routing compare themselves with [`canal_compiler::oracle`] on these cases.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;

use canal_compiler::oracle::{OracleClient, OracleRequest};
use canal_compiler::{CompileInput, service_keys};
use canal_model::diagnostic::SourceLocation;
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::canal::{Tenant, TenantSpec};
use canal_model::policy::gateway_api::{
    self, BackendRef, GrantFrom, GrantTo, HttpRouteMatch, HttpRule, Method, ParentRef,
    PathCondition, ReferenceGrant, ReferenceGrantSpec, ValueCondition,
};
use canal_model::policy::istio::{
    self, Destination, HttpMatchRequest, HttpRouteDestination, PortSelector, StringMatch,
};
use canal_model::policy::kubernetes::{
    ClusterIp, Pod, PodCondition, PodSpec, PodStatus, Service, ServicePort, ServiceSpec, Transport,
};
use canal_model::policy::{Document, Metadata, Object, ObjectKind, Timestamp};
use canal_model::program::{Labels, OutboundTrafficPolicy};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use crate::vocabulary::{HOSTS, NAMES, PATHS, VALUES, words};
use crate::{attempts, consumers, cors, faults, filters, grpc, mirrors};

/// A generated tenant, and requests to its services.
#[derive(Debug, Clone)]
pub struct GeneratedRouting {
    pub tenant: TenantName,
    pub documents: Vec<Arc<Document>>,
    pub service_ids: BTreeMap<ServiceKey, ServiceId>,
    /// JWT key sets by URI.
    pub jwks: BTreeMap<String, String>,
    pub requests: Vec<OracleRequest>,
}

impl GeneratedRouting {
    /// Returns the input for the compiler.
    pub fn input(&self) -> CompileInput<'_> {
        CompileInput {
            tenant: &self.tenant,
            documents: &self.documents,
            service_ids: &self.service_ids,
            jwks: &self.jwks,
        }
    }
}

const NAMESPACE: &str = "shop";
/// Services and their ports; `cache` is opaque.
const SERVICES: [(&str, &[(u16, &str)]); 3] = [
    ("web", &[(80, "http"), (81, "any")]),
    ("api", &[(80, "grpc")]),
    ("cache", &[(6379, "redis")]),
];
const PATH_PATTERNS: [&str; 6] = ["/a.*", "/[ab]+", "/(a|ab)/?b?", ".*b", "/a/[^/]+", ""];
const SENT_HOSTS: [&str; 7] = [
    "web",
    "Web:80",
    "a.example.com",
    "B.A.example.com.",
    "example.com",
    "b.example.com:81",
    "",
];
const VALUE_PATTERNS: [&str; 4] = ["1.*", "[12]", "", "2|1,2"];
const HOST_PATTERNS: [&str; 3] = ["[a-z.]+", "web|a.*", ".*example.*"];
const METHOD_PATTERNS: [&str; 3] = ["P.*", "GET|PURGE", "get"];
const SCHEMES: [&str; 4] = ["http", "https", "HTTP", "h"];
const SCHEME_PATTERNS: [&str; 2] = ["https?", "http"];
const CLIENT_NAMESPACES: [&str; 3] = ["shop", "front", "back"];
const METHODS: [&str; 4] = ["GET", "POST", "get", "PURGE"];

/// Generates complete tenants with 16 requests each. All names in them are valid, and most
/// references are.
pub fn cases() -> impl Strategy<Value = GeneratedRouting> {
    // GRPCRoutes take ports from HTTPRoutes, so most tenants have none.
    let grpc_routes = prop_oneof![7 => Just(Vec::new()), 1 => vec(grpc_route(), 1..3)];
    let routes = (vec(http_route(), 0..4), grpc_routes);
    let virtual_services = vec(virtual_service(), 0..3);
    let udp_routes = vec(udp_route(), 0..3);
    // Of the routes in the order of their numbers, HTTPRoutes and GRPCRoutes each.
    let consumers = vec(consumers::consumer(), 4);
    let others = (udp_routes, consumers);
    (routes, virtual_services, vec(request(), 16), others).prop_map(
        |((routes, grpc_routes), virtual_services, requests, (udp_routes, consumers))| {
            let mut objects = vec![tenant(), destination_rule(), grant()];
            objects.extend(
                SERVICES
                    .iter()
                    .enumerate()
                    .map(|(at, (name, ports))| service(at, name, ports)),
            );
            objects.push(udp_service());
            objects.extend((1..=4).map(pod));
            objects.extend(numbered("udp", udp_routes).map(|(metadata, spec)| {
                Object::UdpRoute(gateway_api::UdpRoute { metadata, spec })
            }));
            objects.extend(numbered("route", routes).map(|(metadata, spec)| {
                Object::HttpRoute(gateway_api::HttpRoute { metadata, spec })
            }));
            objects.extend(numbered("grpc", grpc_routes).map(|(metadata, spec)| {
                Object::GrpcRoute(gateway_api::GrpcRoute { metadata, spec })
            }));
            move_to_consumers(&mut objects, &consumers);
            let virtual_services = numbered("vs", virtual_services);
            objects.extend(virtual_services.map(|(metadata, spec)| {
                Object::VirtualService(istio::VirtualService { metadata, spec })
            }));
            case(objects, requests)
        },
    )
}

/// Returns the grant for routes of the first consumer.
fn grant() -> Object {
    let from = ["HTTPRoute", "GRPCRoute"].map(|kind| GrantFrom {
        group: "gateway.networking.k8s.io".to_owned(),
        kind: kind.to_owned(),
        namespace: name(consumers::CONSUMERS[0]),
    });
    let to = GrantTo {
        group: String::new(),
        kind: "Service".to_owned(),
        name: None,
    };
    Object::ReferenceGrant(ReferenceGrant {
        metadata: metadata("consumers", None),
        spec: ReferenceGrantSpec {
            from: from.into(),
            to: vec![to],
        },
    })
}

/// Moves the routes of each kind to these namespaces.
fn move_to_consumers(objects: &mut [Object], consumers: &[Option<&'static str>]) {
    for kind in [ObjectKind::HttpRoute, ObjectKind::GrpcRoute] {
        let routes = objects.iter_mut().filter(|it| it.kind() == kind);
        for (route, consumer) in routes.zip(consumers) {
            if let Some(consumer) = consumer {
                consumers::move_route(route, name(consumer));
            }
        }
    }
}

pub(crate) fn case(objects: Vec<Object>, requests: Vec<OracleRequest>) -> GeneratedRouting {
    let documents: Vec<Arc<Document>> = (1..)
        .zip(objects)
        .map(|(line, object)| Document {
            object,
            origin: SourceLocation {
                file: "generated".into(),
                line,
                column: 1,
            },
            text: "".into(),
            faults: Vec::new(),
        })
        .map(Arc::new)
        .collect();
    let tenant: TenantName = name("alpha");
    let keys = service_keys(&tenant, &documents);
    let service_ids = keys
        .into_iter()
        .zip(1..)
        .filter_map(|(key, id)| Some((key, ServiceId::new(id).ok()?)))
        .collect();
    GeneratedRouting {
        tenant,
        documents,
        service_ids,
        jwks: BTreeMap::new(),
        requests,
    }
}

/// Parses a constant of this module. The constants are valid; otherwise every test that uses them
/// would fail at once.
pub(crate) fn name<T: std::str::FromStr>(text: &str) -> T {
    match text.parse() {
        Ok(name) => name,
        Err(_) => unreachable!("{text:?} is a constant of this module"),
    }
}

pub(crate) fn port(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).unwrap_or(NonZeroU16::MIN)
}

pub(crate) fn metadata(own: &str, created: Option<u64>) -> Metadata {
    Metadata {
        name: name(own),
        namespace: name(NAMESPACE),
        labels: Labels::new(),
        annotations: BTreeMap::new(),
        creation_timestamp: created.map(Timestamp),
        deletion_timestamp: None,
    }
}

fn numbered<T>(
    what: &'static str,
    specs: Vec<(Option<u64>, T)>,
) -> impl Iterator<Item = (Metadata, T)> {
    specs
        .into_iter()
        .enumerate()
        .map(move |(at, (created, spec))| (metadata(&format!("{what}-{at}"), created), spec))
}

pub(crate) fn tenant() -> Object {
    let pod_cidrs = "10.1.0.0/16".parse().into_iter().collect();
    let spec = TenantSpec {
        vni: vni(),
        trust_domain: name("alpha.example"),
        pod_cidrs,
        service_cidrs: Vec::new(),
        gateway_cidrs: Vec::new(),
        ingress_network: false,
        home_az: None,
        outbound_traffic_policy: OutboundTrafficPolicy::Deny,
        resolvers: Vec::new(),
        keys: Default::default(),
        shares: Default::default(),
        default_throttle: Default::default(),
        direct_path: Default::default(),
    };
    Object::Tenant(Tenant {
        metadata: metadata("alpha", None),
        spec,
    })
}

fn vni() -> canal_model::ids::Vni {
    match canal_model::ids::Vni::new(7) {
        Ok(vni) => vni,
        Err(_) => unreachable!("7 is a VNI"),
    }
}

pub(crate) fn service(at: usize, own: &str, ports: &[(u16, &str)]) -> Object {
    let ports = ports.iter().map(|(number, protocol)| ServicePort {
        name: (*protocol).to_owned(),
        port: port(*number),
        target_port: None,
        protocol: Default::default(),
        app_protocol: None,
    });
    let address = std::net::Ipv4Addr::new(10, 96, 0, u8::try_from(at + 1).unwrap_or(1));
    let selector = Labels::from([("app".to_owned(), own.to_owned())]);
    let spec = ServiceSpec {
        cluster_ip: ClusterIp::Address(address.into()),
        ports: ports.collect(),
        selector,
        ..ServiceSpec::default()
    };
    Object::Service(Service {
        metadata: metadata(own, None),
        spec,
    })
}

pub(crate) fn pod(number: u8) -> Object {
    let app = if number <= 3 { "web" } else { "api" };
    let version = if number.is_multiple_of(2) { "v2" } else { "v1" };
    let mut own = metadata(&format!("pod-{number}"), None);
    own.labels = Labels::from([
        ("app".to_owned(), app.to_owned()),
        ("version".to_owned(), version.to_owned()),
    ]);
    let ready = PodCondition {
        kind: "Ready".to_owned(),
        status: "True".to_owned(),
    };
    let address = std::net::Ipv4Addr::new(10, 1, 0, number);
    let status = PodStatus {
        pod_ip: Some(address.into()),
        conditions: vec![ready],
        ..PodStatus::default()
    };
    Object::Pod(Pod {
        metadata: own,
        spec: PodSpec {
            node_name: Some(name("node")),
            ..PodSpec::default()
        },
        status,
    })
}

fn destination_rule() -> Object {
    let subset = |version: &str| istio::Subset {
        name: version.to_owned(),
        labels: Labels::from([("version".to_owned(), version.to_owned())]),
        traffic_policy: None,
    };
    let spec = istio::DestinationRuleSpec {
        host: "web".to_owned(),
        traffic_policy: None,
        subsets: vec![subset("v1"), subset("v2")],
    };
    Object::DestinationRule(istio::DestinationRule {
        metadata: metadata("web", None),
        spec,
    })
}

fn some_service() -> impl Strategy<Value = &'static str> + Clone {
    prop_oneof![4 => Just("web"), 2 => Just("api"), 1 => Just("cache"), 1 => Just("nowhere")]
}

fn some_port() -> impl Strategy<Value = NonZeroU16> + Clone {
    prop_oneof![6 => Just(80), 2 => Just(81), 1 => Just(6379), 1 => Just(9)].prop_map(port)
}

fn parent_ref() -> impl Strategy<Value = ParentRef> {
    let section = option::weighted(0.1, words(&["http", "tcp", "nowhere"]));
    (some_service(), option::of(some_port()), section).prop_map(|(service, port, section_name)| {
        ParentRef {
            group: String::new(),
            kind: "Service".to_owned(),
            name: name(service),
            namespace: None,
            port,
            section_name,
        }
    })
}

fn http_route() -> impl Strategy<Value = (Option<u64>, gateway_api::HttpRouteSpec)> {
    let rule = (
        vec(route_match(), 0..3),
        filters::of_http_route(backend_ref()),
        vec(filters::of_http_backend(backend_ref()), 0..3),
        attempts::of_http_route(),
    );
    let rule = rule.prop_map(|(matches, filters, mut backend_refs, (timeouts, retry))| {
        // A rule with a redirect can have no backends; those with two are seen refused.
        if backend_refs.len() < 2 && filters.iter().any(|f| f.request_redirect.is_some()) {
            backend_refs.clear();
        }
        HttpRule {
            name: None,
            matches,
            filters,
            backend_refs,
            timeouts,
            retry,
        }
    });
    let spec = (
        vec(parent_ref(), 1..3),
        vec(words(&HOSTS), 0..3),
        vec(rule, 0..4),
    );
    let spec = spec.prop_map(
        |(parent_refs, hostnames, rules)| gateway_api::HttpRouteSpec {
            parent_refs,
            hostnames,
            rules,
        },
    );
    (option::of(0..3u64), spec)
}

fn grpc_route() -> impl Strategy<Value = (Option<u64>, gateway_api::GrpcRouteSpec)> {
    let spec = grpc::route(parent_ref(), value_condition(), backend_ref());
    (option::of(0..3u64), spec)
}

/// Returns a Service that selects the web pods and has 80 UDP ports, more than a pod may have open.
fn udp_service() -> Object {
    let port = |number: u16| ServicePort {
        name: format!("p{number}"),
        port: port(number),
        target_port: None,
        protocol: Transport::Udp,
        app_protocol: None,
    };
    let selector = Labels::from([("app".to_owned(), "web".to_owned())]);
    let spec = ServiceSpec {
        cluster_ip: ClusterIp::Headless,
        ports: (1..=80).map(port).collect(),
        selector,
        ..ServiceSpec::default()
    };
    Object::Service(Service {
        metadata: metadata("datagrams", None),
        spec,
    })
}

fn udp_route() -> impl Strategy<Value = (Option<u64>, gateway_api::UdpRouteSpec)> {
    let parent = ParentRef {
        group: String::new(),
        kind: "Service".to_owned(),
        name: name("datagrams"),
        namespace: None,
        port: None,
        section_name: None,
    };
    let backend = prop_oneof![9 => 1..=80u16, 1 => Just(81)].prop_map(|number| BackendRef {
        group: String::new(),
        kind: "Service".to_owned(),
        name: name("datagrams"),
        namespace: None,
        port: Some(port(number)),
        weight: 1,
    });
    let rule = vec(backend, 0..60).prop_map(|backend_refs| gateway_api::UdpRule {
        name: None,
        backend_refs,
    });
    let spec = vec(rule, 0..3).prop_map(move |rules| gateway_api::UdpRouteSpec {
        parent_refs: vec![parent.clone()],
        rules,
    });
    (option::of(0..3u64), spec)
}

fn route_match() -> impl Strategy<Value = HttpRouteMatch> {
    let text = prop_oneof![
        (
            words(&PATHS),
            select(vec![
                gateway_api::PathConditionType::Exact,
                gateway_api::PathConditionType::PathPrefix
            ])
        ),
        (
            words(&PATH_PATTERNS),
            Just(gateway_api::PathConditionType::RegularExpression)
        ),
    ];
    let path = option::of(text.prop_map(|(value, kind)| PathCondition { kind, value }));
    let method = option::weighted(0.2, select(vec![Method::Get, Method::Post]));
    (
        path,
        method,
        vec(value_condition(), 0..2),
        vec(value_condition(), 0..2),
    )
        .prop_map(|(path, method, headers, query_params)| HttpRouteMatch {
            path,
            method,
            headers,
            query_params,
        })
}

fn value_condition() -> impl Strategy<Value = ValueCondition> {
    let text = prop_oneof![
        (words(&VALUES), Just(gateway_api::ValueConditionType::Exact)),
        (
            words(&VALUE_PATTERNS),
            Just(gateway_api::ValueConditionType::RegularExpression)
        ),
    ];
    (words(&NAMES), text).prop_map(|(name, (value, kind))| ValueCondition { kind, name, value })
}

fn backend_ref() -> impl Strategy<Value = BackendRef> + Clone {
    (some_service(), option::weighted(0.9, some_port()), 0..4u32).prop_map(
        |(service, port, weight)| BackendRef {
            group: String::new(),
            kind: "Service".to_owned(),
            name: name(service),
            namespace: None,
            port,
            weight,
        },
    )
}

fn virtual_service() -> impl Strategy<Value = (Option<u64>, istio::VirtualServiceSpec)> {
    // Small numbers make rules of one service meet, and keep a failing case readable.
    let rule = (
        vec(match_request(), 0..3),
        vec(destination(), 0..3),
        filters::of_virtual_service(),
        filters::answer_of_virtual_service(),
        (
            attempts::of_virtual_service(),
            faults::of_virtual_service(),
            cors::of_virtual_service(),
            mirrors::of_virtual_service(destination()),
        ),
    );
    let rule = rule.prop_map(
        |(matches, mut route, (headers, mut rewrite), answer, attempts)| {
            let ((timeout, retries), mut fault, cors_policy, mirrors) = attempts;
            let (redirect, direct_response) = answer;
            // A rule with its own answer must have no route, rewrite or fault. Two destinations stay,
            // because such a rule must be refused.
            if redirect.is_some() || direct_response.is_some() {
                rewrite = None;
                fault = None;
                if route.len() < 2 {
                    route.clear();
                }
            }
            istio::VirtualServiceRoute {
                name: None,
                matches,
                route,
                headers,
                rewrite,
                redirect,
                direct_response,
                timeout,
                retries,
                fault,
                cors_policy,
                delegate: None,
                ..mirrors
            }
        },
    );
    let hosts = vec(some_service().prop_map(str::to_owned), 1..3);
    let spec = (hosts, vec(rule, 0..4)).prop_map(|(hosts, http)| istio::VirtualServiceSpec {
        hosts,
        gateways: Vec::new(),
        export_to: Vec::new(),
        http,
        ..istio::VirtualServiceSpec::default()
    });
    // Creation times repeat and may be missing, because the older object wins and ties exist.
    (option::of(0..3u64), spec)
}

fn string_match(
    texts: &'static [&'static str],
    patterns: &'static [&'static str],
) -> impl Strategy<Value = StringMatch> {
    prop_oneof![
        words(texts).prop_map(|text| StringMatch {
            exact: Some(text),
            ..StringMatch::default()
        }),
        words(texts).prop_map(|text| StringMatch {
            prefix: Some(text),
            ..StringMatch::default()
        }),
        words(patterns).prop_map(|text| StringMatch {
            regex: Some(text),
            ..StringMatch::default()
        }),
        Just(StringMatch::default()),
    ]
}

fn match_request() -> impl Strategy<Value = HttpMatchRequest> {
    let exact = |words: &'static [&'static str]| {
        option::weighted(
            0.2,
            select(words).prop_map(|word: &str| StringMatch {
                exact: Some(word.to_owned()),
                ..StringMatch::default()
            }),
        )
    };
    let conditions = || btree_map(words(&NAMES), string_match(&VALUES, &VALUE_PATTERNS), 0..2);
    let uri = option::of(string_match(&PATHS, &PATH_PATTERNS));
    let condition = |texts, patterns| {
        let pattern = option::weighted(0.1, string_match(texts, patterns));
        (exact(texts), pattern).prop_map(|(exact, pattern)| exact.or(pattern))
    };
    // Most conditions are absent, so that a request meets several rules. Nobody measured the
    // weights.
    let parts = (
        uri,
        condition(&METHODS, &METHOD_PATTERNS),
        condition(&SENT_HOSTS, &HOST_PATTERNS),
        (conditions(), conditions()),
        (
            conditions(),
            option::weighted(0.1, string_match(&SCHEMES, &SCHEME_PATTERNS)),
        ),
        option::weighted(0.2, some_port()),
        (
            // A match that names only an ingress gateway holds for no request inside the mesh.
            vec(words(&["mesh", "ingress"]), 0..2),
            // Most rules are for all clients, so that requests reach the other conditions.
            option::weighted(0.1, labels()),
            option::weighted(0.1, words(&CLIENT_NAMESPACES)),
        ),
        any::<bool>(),
    );
    parts.prop_map(
        |(
            uri,
            method,
            authority,
            headers,
            (query_params, scheme),
            port,
            clients,
            ignore_uri_case,
        )| {
            let (headers, without_headers) = headers;
            let (gateways, source_labels, source_namespace) = clients;
            HttpMatchRequest {
                name: None,
                uri,
                scheme,
                ignore_uri_case,
                method,
                authority,
                headers,
                without_headers,
                query_params,
                port,
                gateways,
                source_labels: source_labels.unwrap_or_default(),
                source_namespace: source_namespace.unwrap_or_default(),
            }
        },
    )
}

fn destination() -> impl Strategy<Value = HttpRouteDestination> + Clone {
    let subset = option::weighted(0.3, select(&["v1", "v2", "v3"][..]).prop_map(str::to_owned));
    let port = option::of(some_port().prop_map(|number| PortSelector { number }));
    let headers = filters::of_destination();
    (some_service(), subset, port, option::of(0..4u32), headers).prop_map(
        |(service, subset, port, weight, headers)| HttpRouteDestination {
            destination: Destination {
                host: service.to_owned(),
                subset,
                port,
            },
            weight,
            headers,
        },
    )
}

/// Generates what a gateway knows of a client; namespaces and labels collide with those of matches.
fn client() -> impl Strategy<Value = OracleClient> {
    let namespace = option::of(select(&CLIENT_NAMESPACES[..]).prop_map(name));
    (any::<bool>(), namespace, labels()).prop_map(|(is_tls, namespace, labels)| OracleClient {
        is_tls,
        namespace,
        labels,
    })
}

fn labels() -> impl Strategy<Value = Labels> {
    btree_map(words(&NAMES), words(&VALUES), 0..2)
}

fn request() -> impl Strategy<Value = OracleRequest> {
    let query = vec((words(&NAMES), words(&VALUES)), 0..3);
    let headers = vec((words(&NAMES), words(&VALUES)), 0..3);
    (
        some_service(),
        some_port(),
        words(&SENT_HOSTS),
        words(&METHODS),
        words(&PATHS),
        query,
        headers,
        client(),
    )
        .prop_map(
            |(service, port, host, method, path, query, headers, client)| {
                let parameters: Vec<String> = query
                    .iter()
                    .map(|(name, value)| format!("{name}={value}"))
                    .collect();
                let target = if parameters.is_empty() {
                    path
                } else {
                    format!("{path}?{}", parameters.join("&"))
                };
                let service = ServiceKey {
                    tenant: name("alpha"),
                    namespace: name(NAMESPACE),
                    name: name(service),
                };
                OracleRequest {
                    service,
                    port: port.get(),
                    host,
                    method,
                    target,
                    headers,
                    client,
                }
            },
        )
}

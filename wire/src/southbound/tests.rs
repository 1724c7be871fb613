//! Tests of the wire form: every kind of resource round-trips unchanged, and broken ones are
//! refused with the field and the reason.

use canal_model::client_attributes;
use canal_model::ids::{ServiceId, Vni};
use canal_model::program as p;
use prost::Message;

use super::*;

mod trust;

fn key(s: &str) -> canal_model::ids::ServiceKey {
    s.parse().unwrap()
}

fn matches() -> Vec<p::HttpMatch> {
    let precedence = p::Precedence {
        class: 1,
        specificity: [1, 2, 3, 4, 5],
        created: 7,
        object: "HTTPRoute/a/b".into(),
        indexes: [8, 9],
    };
    vec![
        p::HttpMatch {
            precedence: precedence.clone(),
            path: p::PathMatch::Exact("/x".into()),
            method: Some("GET".into()),
            headers: vec![
                p::ValueMatch {
                    name: "h".into(),
                    value: p::TextMatch::Exact("v".into()),
                },
                p::ValueMatch {
                    name: "h".into(),
                    value: p::TextMatch::Not(Box::new(p::TextMatch::Prefix("w".into()))),
                },
                p::ValueMatch {
                    name: client_attributes::SCHEME.into(),
                    value: p::TextMatch::Exact("https".into()),
                },
                p::ValueMatch {
                    name: client_attributes::SOURCE_NAMESPACE.into(),
                    value: p::TextMatch::Exact("b".into()),
                },
                p::ValueMatch {
                    name: format!("{}app", client_attributes::SOURCE_LABEL),
                    value: p::TextMatch::Exact("client".into()),
                },
            ],
            query: vec![p::ValueMatch {
                name: "q".into(),
                value: p::TextMatch::Regex("a.*".into()),
            }],
        },
        p::HttpMatch {
            precedence,
            path: p::PathMatch::StringPrefix("/".into()),
            method: None,
            headers: vec![],
            query: vec![],
        },
    ]
}

fn routes() -> Vec<Resource> {
    let split = p::RouteAction::Split(vec![
        p::Backend {
            weight: 90,
            filters: Some(Box::new(super::route_filters::sample())),
            target: p::BackendTarget::Service {
                service: key("alpha/b/reviews"),
                port: 9080,
                subset: [("version".into(), "v1".into())].into(),
            },
        },
        p::Backend {
            weight: 10,
            filters: None,
            target: p::BackendTarget::Refuse {
                status: 500,
                reason: "no such service".into(),
            },
        },
    ]);
    let rule = |action| p::RouteRule {
        key: p::RouteKey {
            tenant: "alpha".parse().unwrap(),
            kind: "HTTPRoute".into(),
            namespace: "b".parse().unwrap(),
            name: "reviews".parse().unwrap(),
            rule: "0".into(),
        },
        parent: key("alpha/b/reviews"),
        parent_port: Some(9080),
        consumer: None,
        hosts: vec![
            p::HostMatch::Exact("a.b".into()),
            p::HostMatch::Suffix(".c".into()),
        ],
        matches: matches(),
        filters: None,
        attempts: None,
        faults: None,
        cors: None,
        mirrors: Vec::new(),
        action,
    };
    let attempts = super::route_attempts::samples().into_iter();
    let attempted = attempts.map(|attempts| p::RouteRule {
        attempts: Some(Box::new(attempts)),
        ..rule(split.clone())
    });
    let attempted: Vec<_> = attempted.map(Resource::Route).collect();
    let faults = super::route_faults::samples().into_iter();
    // A sample with a delay has filters too, since both change the same rule.
    let faulted = faults.map(|faults| p::RouteRule {
        faults: Some(Box::new(faults)),
        filters: faults
            .delay
            .map(|_| Box::new(super::route_filters::sample())),
        ..rule(split.clone())
    });
    let faulted: Vec<_> = faulted.map(Resource::Route).collect();
    let shared = super::route_cors::samples().into_iter();
    let shared = shared.map(|cors| p::RouteRule {
        cors: Some(Box::new(cors)),
        ..rule(split.clone())
    });
    let shared: Vec<_> = shared.map(Resource::Route).collect();
    let filtered = super::route_filters::samples().map(|filters| p::RouteRule {
        filters: Some(Box::new(filters)),
        ..rule(split.clone())
    });
    let answers = super::route_answers::samples().into_iter();
    let answered = answers.map(|answer| rule(p::RouteAction::Answer(Box::new(answer))));
    let mut all = vec![
        Resource::Route(rule(split.clone())),
        Resource::Route(rule(p::RouteAction::Refuse {
            status: 500,
            reason: "broken".into(),
        })),
    ];
    all.extend(filtered.map(Resource::Route));
    all.extend(answered.map(Resource::Route));
    all.extend(attempted);
    all.extend(faulted);
    all.extend(shared);
    all.push(of_consumer(rule(split.clone())));
    all.push(Resource::Route(p::RouteRule {
        mirrors: super::route_mirrors::samples(),
        ..rule(split)
    }));
    all
}

/// Returns the rule with filters, for the clients of one namespace.
fn of_consumer(rule: p::RouteRule) -> Resource {
    Resource::Route(p::RouteRule {
        consumer: Some("front".parse().unwrap()),
        filters: Some(Box::new(super::route_filters::sample())),
        ..rule
    })
}

fn samples() -> Vec<Resource> {
    let mut all = parents();
    all.extend(routes());
    all.extend(trust::samples());
    all.push(Resource::Manifest(manifest::compute(
        &"alpha".parse().unwrap(),
        [(ResourceKind::Bundle, "alpha/a.example", "v1")],
    )));
    all
}

/// A data plane that does not know rules for the clients of one namespace reads one that refuses every
/// request of the port before all other rules.
#[test]
fn an_older_data_plane_refuses_where_a_rule_is_for_some_clients() {
    let is_for_some =
        |it: &Resource| matches!(it, Resource::Route(rule) if rule.consumer.is_some());
    let rule = routes().into_iter().find(is_for_some).expect("a sample");
    let mut older = wire::Route::decode(&encode(&rule)[..]).unwrap();
    older.consumer = None;
    let read = decode(ResourceKind::Route, &rule.name(), &older.encode_to_vec()).unwrap();
    let (Resource::Route(rule), Resource::Route(read)) = (rule, read) else {
        panic!("a route")
    };
    assert_eq!(
        (&read.parent, read.parent_port),
        (&rule.parent, rule.parent_port)
    );
    let status = match &read.action {
        p::RouteAction::Refuse { status, .. } => *status,
        other => panic!("{other:?}"),
    };
    let everything = p::PathMatch::StringPrefix(String::new());
    let [http] = &read.matches[..] else {
        panic!("{read:?}")
    };
    assert_eq!(
        (status, &http.path, read.hosts.len()),
        (503, &everything, 0)
    );
    assert!(http.method.is_none() && http.headers.is_empty() && http.query.is_empty());
    assert!(
        rule.matches
            .iter()
            .all(|it| http.precedence < it.precedence)
    );
}

/// The order of resources does not matter; every kind, name, version and their number does.
#[test]
fn a_manifest_differs_with_everything_it_seals() {
    let alpha = "alpha".parse().unwrap();
    let of = |list: &[(ResourceKind, &str, &str)]| manifest::compute(&alpha, list.iter().copied());
    let base = [
        (ResourceKind::Bundle, "a", "1"),
        (ResourceKind::Authorization, "b", "2"),
    ];
    assert_eq!(of(&base), of(&[base[1], base[0]]));
    assert_eq!((of(&base).count, of(&[]).count), (2, 0));
    let others: [&[(ResourceKind, &str, &str)]; 6] = [
        &[],
        &base[..1],
        &[
            (ResourceKind::Bundle, "a", "1"),
            (ResourceKind::Authentication, "b", "2"),
        ],
        &[
            (ResourceKind::Bundle, "a", "1"),
            (ResourceKind::Authorization, "c", "2"),
        ],
        &[
            (ResourceKind::Bundle, "a", "1"),
            (ResourceKind::Authorization, "b", "3"),
        ],
        &[
            (ResourceKind::Bundle, "a", "1"),
            (ResourceKind::Authorization, "b2", ""),
        ],
    ];
    assert!(
        others
            .iter()
            .all(|other| of(other).digest != of(&base).digest)
    );
}

#[test]
fn a_nack_names_every_refused_resource_and_reasons_are_bounded() {
    let many: Vec<_> = (0..2 * refused::REASONS_MAX)
        .map(|n| (format!("alpha/shop/{n}"), "ü".repeat(500)))
        .collect();
    let status = |details| crate::discovery::Status {
        code: 3,
        message: "no".into(),
        details,
    };
    let read = refused::unpack(&status(vec![refused::pack(many.clone())]));
    assert!(
        read.iter()
            .map(|(name, _)| name)
            .eq(many.iter().map(|(name, _)| name)),
        "names are complete"
    );
    assert_eq!(
        (read[0].1.len(), read.last().unwrap().1.len()),
        (refused::REASON_BYTES_MAX, 0)
    );
    assert!(refused::unpack(&status(vec![])).is_empty());
    let foreign = prost_types::Any {
        type_url: "type.googleapis.com/google.rpc.DebugInfo".into(),
        value: vec![1, 2],
    };
    assert!(refused::unpack(&status(vec![foreign])).is_empty());
}

fn parents() -> Vec<Resource> {
    vec![
        Resource::Tenant(p::Tenant {
            name: "alpha".parse().unwrap(),
            vni: Vni::new(101).unwrap(),
            trust_domain: "alpha.example".parse().unwrap(),
            pod_cidrs: vec![
                "10.1.0.0/16".parse().unwrap(),
                "fd00:1::/64".parse().unwrap(),
            ],
            gateway_cidrs: vec![
                "10.101.0.0/20".parse().unwrap(),
                "fd00:101::/64".parse().unwrap(),
            ],
            outbound_traffic_policy: p::OutboundTrafficPolicy::Passthrough,
            resolvers: vec!["10.96.0.10".parse().unwrap(), "fd00::53".parse().unwrap()],
            keys: Default::default(),
            shares: Default::default(),
        }),
        Resource::GatewayReplica(p::GatewayReplica {
            tenant: "alpha".parse().unwrap(),
            replica: "gw1".parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec!["10.1.255.1".parse().unwrap(), "fd00:1::ff".parse().unwrap()],
            draining: true,
        }),
        Resource::Service(p::Service {
            key: key("alpha/b/reviews"),
            id: ServiceId::new(5).unwrap(),
            hostname: "reviews.b.svc.cluster.local".into(),
            vips: vec!["10.96.0.1".parse().unwrap()],
            ports: vec![p::ServicePort {
                // Ports and ids differ from each other, so that swapped fields are noticed.
                port: 9080,
                name: "http".into(),
                protocol: p::AppProtocol::Http1,
            }],
            upstream_pool: p::UpstreamPool::PerClient,
            policy_paths: p::PolicyPaths::Legacy,
            load_balancers: super::load_balancers::samples(),
        }),
        Resource::Ingress(super::ingress::sample()),
        Resource::ListenerCertificate(super::listener_certificate::sample()),
        Resource::Workload(p::Workload {
            tenant: "alpha".parse().unwrap(),
            namespace: "b".parse().unwrap(),
            name: "reviews-v1-0".parse().unwrap(),
            service_account: "reviews".parse().unwrap(),
            node: "n1".parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec!["10.1.0.2".parse().unwrap()],
            labels: [("app".into(), "reviews".into())].into(),
            ready: true,
            tunnel: p::TunnelProtocol::None,
            endpoints: vec![p::EndpointPort {
                service: key("alpha/b/reviews"),
                port: 9080,
                target_port: 8080,
            }],
            udp_ports: [53, 65535].into(),
        }),
        Resource::DirectEndpoint(p::DirectEndpoint {
            tenant: "alpha".parse().unwrap(),
            namespace: "b".parse().unwrap(),
            name: "redis-0".parse().unwrap(),
            service_account: "redis".parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec!["10.1.0.3".parse().unwrap(), "fd00:1::3".parse().unwrap()],
            serves: vec![p::DirectPort {
                service: key("alpha/b/redis"),
                port: 6379,
            }],
            own_ports: [6380].into(),
            audience: Default::default(),
        }),
    ]
    .into_iter()
    .chain(tier_samples())
    .collect()
}

fn tier_samples() -> Vec<Resource> {
    let az = || "az1".parse().unwrap();
    let number = |n| canal_model::ids::ReplicaNumber::new(n).unwrap();
    // A burst that differs from the rate, so that swapped fields are noticed.
    let rate = |per_second| p::RateLimit {
        per_second,
        burst: 2 * per_second,
    };
    let throttle = |service: Option<&str>| p::Throttle {
        tenant: "alpha".parse().unwrap(),
        vni: Vni::new(101).unwrap(),
        service: service.map(key),
        id: service.map(|_| ServiceId::new(5).unwrap()),
        sessions: rate(100),
        packets: rate(0),
        requests: rate(7),
    };
    vec![
        Resource::Node(p::Node {
            tenant: "alpha".parse().unwrap(),
            name: "n1".parse().unwrap(),
            az: az(),
            underlay: "10.201.0.7".parse().unwrap(),
            mac: [2, 4, 0, 0, 0, 1],
            pod_cidrs: vec![
                "10.1.1.0/24".parse().unwrap(),
                "fd00:1::1:0/112".parse().unwrap(),
            ],
        }),
        Resource::Replica(p::Replica {
            name: "gw-1".parse().unwrap(),
            number: number(3),
            backend: "b1".parse().unwrap(),
            az: az(),
            underlay: "250.1.0.3".parse().unwrap(),
            up: true,
        }),
        Resource::Address(p::GatewayAddress {
            service: key("alpha/b/reviews"),
            id: ServiceId::new(5).unwrap(),
            az: az(),
            addresses: vec![
                "10.1.224.5".parse().unwrap(),
                "fd00:1:0:1::5".parse().unwrap(),
            ],
            network: None,
            open: true,
        }),
        Resource::Address(p::GatewayAddress {
            service: key("alpha/infra/web.gateway"),
            id: ServiceId::new(9).unwrap(),
            az: az(),
            addresses: vec!["198.51.100.33".parse().unwrap()],
            network: Some(Vni::new(700).unwrap()),
            open: true,
        }),
        Resource::Table(p::BucketTable {
            service: key("alpha/b/reviews"),
            id: ServiceId::new(5).unwrap(),
            az: az(),
            vni: Vni::new(101).unwrap(),
            version: 9,
            // Chains of every length from none to eight.
            chains: (0..p::BUCKETS)
                .map(|b| (1..=b as u32 % 9).map(number).collect())
                .collect(),
        }),
        Resource::Throttle(throttle(None)),
        Resource::Throttle(throttle(Some("alpha/b/reviews"))),
    ]
}

#[test]
fn every_kind_survives_the_wire() {
    for r in samples() {
        let bytes = encode(&r);
        assert_eq!(decode(r.kind(), &r.name(), &bytes).unwrap(), r);
        assert_eq!(
            encode(&decode(r.kind(), &r.name(), &bytes).unwrap()),
            bytes,
            "encoding is stable"
        );
        assert_eq!(kind_of(r.kind().type_url()).unwrap(), r.kind());
    }
}

/// When an AZ closes, every node receives the change for every service, so each resource must be
/// small.
#[test]
fn a_gateway_address_is_small() {
    let samples = samples();
    let address = samples
        .iter()
        .find(|r| r.kind() == ResourceKind::Address)
        .unwrap();
    let bytes = encode(address).len() + address.name().len();
    assert!(bytes <= 100, "{bytes}");
}

/// Returns the kind, the name and the bytes of a Route that `f` breaks.
fn broken_route(f: fn(&mut wire::Route)) -> (ResourceKind, String, Vec<u8>) {
    let Some(Resource::Route(r)) = samples()
        .into_iter()
        .find(|r| r.kind() == ResourceKind::Route)
    else {
        unreachable!()
    };
    let mut m = wire::Route::from(&r);
    f(&mut m);
    (ResourceKind::Route, r.key.to_string(), m.encode_to_vec())
}

/// Returns the kind, the name and the bytes of a Workload with these UDP ports.
fn workload_with_udp_ports(ports: Vec<u32>) -> (ResourceKind, String, Vec<u8>) {
    let Some(Resource::Workload(w)) = samples()
        .into_iter()
        .find(|r| r.kind() == ResourceKind::Workload)
    else {
        unreachable!()
    };
    (
        ResourceKind::Workload,
        w.uid(),
        wire::Workload {
            udp_ports: ports,
            ..wire::Workload::from(&w)
        }
        .encode_to_vec(),
    )
}

/// A case's name, a broken message, and a part of the text that the NACK must contain.
type BrokenCase = (&'static str, (ResourceKind, String, Vec<u8>), &'static str);

fn broken_consumers() -> Vec<BrokenCase> {
    let route = broken_route;
    vec![
        (
            "no namespace of clients",
            route(|m| m.consumer = Some(Box::default())),
            "field consumer.namespace",
        ),
        (
            "no rule for the clients",
            route(|m| {
                m.consumer = Some(Box::new(wire::ConsumerRule {
                    namespace: "front".into(),
                    rule: None,
                }))
            }),
            "field consumer.rule: is missing",
        ),
        (
            "a rule for the clients of two namespaces",
            route(|m| {
                let inner = wire::Route {
                    consumer: Some(Box::default()),
                    ..wire::Route::default()
                };
                m.consumer = Some(Box::new(wire::ConsumerRule {
                    namespace: "front".into(),
                    rule: Some(Box::new(inner)),
                }))
            }),
            "has a rule for clients in it",
        ),
    ]
}

fn broken_matches() -> Vec<BrokenCase> {
    let route = broken_route;
    vec![
        (
            "no match",
            route(|m| m.matches.clear()),
            "field matches: is empty",
        ),
        (
            "unknown kind of path match",
            route(|m| m.matches[0].path = None),
            "field matches.path: is missing",
        ),
        (
            "unknown kind of header match",
            route(|m| m.matches[0].headers[0].value = None),
            "field matches.headers: is missing",
        ),
        (
            // As a data plane sees an attribute that only later versions know.
            "unknown attribute of the client",
            route(|m| m.matches[0].headers[2].name = ":later".into()),
            "has the unknown attribute \":later\"",
        ),
        (
            "attribute of the client as a header",
            route(|m| m.matches[0].headers[0].name = ":scheme".into()),
            "has the unknown attribute \":scheme\"",
        ),
        (
            "attribute of the client in the query",
            route(|m| m.matches[0].query[0].value = m.matches[0].headers[2].value.clone()),
            "field matches.query: is inside",
        ),
    ]
}

fn broken_resources() -> Vec<BrokenCase> {
    let route = broken_route;
    let workload = workload_with_udp_ports;
    vec![
        (
            "too many UDP ports",
            // One port more than the 64 of the limit.
            workload((1..=65).collect()),
            "has 65 ports, more than 64",
        ),
        (
            "UDP port",
            workload(vec![53, 0]),
            "field udp_ports: 0 is not a port",
        ),
        (
            "weight",
            route(|m| {
                if let Some(wire::route::Action::Split(s)) = &mut m.action {
                    s.backends[0].weight = 1_000_001
                }
            }),
            "above 1000000",
        ),
        (
            "no action",
            route(|m| m.action = None),
            "field action: is missing",
        ),
        (
            "short precedence",
            route(|m| m.matches[0].precedence.as_mut().unwrap().position.clear()),
            "needs five",
        ),
        (
            "port",
            route(|m| m.parent_port = 65536),
            "65536 is not a port",
        ),
        (
            "blank tenant",
            route(|m| m.parent.as_mut().unwrap().tenant.clear()),
            "field parent: tenant name",
        ),
        (
            "status",
            route(|m| {
                m.action = Some(wire::route::Action::Refuse(wire::Refuse {
                    status: 200,
                    reason: String::new(),
                }))
            }),
            "200 is not an error",
        ),
        (
            // Bytes that are no protobuf message.
            "garbage",
            (ResourceKind::Service, "a/b/c".into(), vec![0xff; 9]),
            "not a Service message",
        ),
        (
            "blank",
            (ResourceKind::Tenant, "a".into(), vec![]),
            "field name",
        ),
    ]
}

/// Each case is one broken message: what is sent, and a part of the text that the NACK must
/// contain.
#[test]
fn broken_resources_are_refused_with_where_and_why() {
    let cases = broken_resources().into_iter().chain(broken_matches());
    for (case, (kind, name, bytes), text) in cases.chain(broken_consumers()) {
        let e = decode(kind, &name, &bytes).unwrap_err().to_string();
        assert!(e.contains(text), "{case}: {e}");
    }
    let t = samples().remove(0);
    assert!(matches!(
        decode(ResourceKind::Tenant, "beta", &encode(&t)),
        Err(ResourceDecodeError::Name { .. })
    ));
    assert!(kind_of("type.googleapis.com/x").is_err());
}

fn head() -> state_file::Head {
    state_file::Head {
        generation: canal_model::ids::Generation(7),
        store: Some("0123456789abcdef0123456789abcdef".parse().unwrap()),
    }
}

#[test]
fn a_snapshot_is_used_whole_or_not_at_all() {
    let all = samples();
    let versions: Vec<String> = all.iter().map(state_file::version).collect();
    let bytes = state_file::encode(head(), versions.iter().map(String::as_str).zip(&all));
    let (found, entries) = state_file::decode(&bytes, &ResourceKind::ALL).unwrap();
    assert_eq!((found, entries.len()), (head(), all.len()));
    let nameless = state_file::Head {
        store: None,
        ..head()
    };
    assert_eq!(
        state_file::decode(&state_file::encode(nameless, []), &ResourceKind::ALL),
        Ok((nameless, Vec::new())),
        "of a controller that names no store"
    );
    assert!(
        entries
            .iter()
            .zip(all.iter().zip(&versions))
            .all(|(e, (r, v))| e.resource == *r && e.version == *v)
    );
    // A data plane that knows only Tenant skips the other kinds.
    assert_eq!(
        state_file::decode(&bytes, &[ResourceKind::Tenant])
            .unwrap()
            .1
            .len(),
        1
    );
    // The header, the body and the digest at the end.
    for at in [0, bytes.len() / 2, bytes.len() - 1] {
        let mut torn = bytes.clone();
        torn[at] ^= 1;
        assert_eq!(
            state_file::decode(&torn, &ResourceKind::ALL),
            Err(state_file::StateFileFormatError::Digest),
            "byte {at}"
        );
        assert_eq!(
            state_file::decode(&bytes[..at], &ResourceKind::ALL),
            Err(state_file::StateFileFormatError::Digest),
            "cut at {at}"
        );
    }
}

/// A new kind needs a new format, unless it refuses nothing: this number is changed together with
/// [`state_file::FORMAT`].
#[test]
fn a_snapshots_format_is_of_these_kinds() {
    assert_eq!((state_file::FORMAT, ResourceKind::ALL.len()), (3, 22));
}

#[test]
fn a_snapshot_of_another_format_is_refused_by_name() {
    use prost::Message;
    use sha2::{Digest, Sha256};
    let all = samples();
    let versions: Vec<String> = all.iter().map(state_file::version).collect();
    let bytes = state_file::encode(
        state_file::Head {
            store: None,
            ..head()
        },
        versions.iter().map(String::as_str).zip(&all),
    );
    let whole = crate::program::StateFile::decode(&bytes[..]).unwrap();
    for format in [0, 1, 2, state_file::FORMAT + 1] {
        let mut other = crate::program::StateFile {
            format,
            digest: Vec::new(),
            ..whole.clone()
        };
        other.digest = Sha256::digest(other.encode_to_vec()).to_vec();
        let refused = state_file::decode(&other.encode_to_vec(), &ResourceKind::ALL).unwrap_err();
        assert_eq!(refused, state_file::StateFileFormatError::Format(format));
        assert!(
            refused
                .to_string()
                .contains(&format!("has format {format}")),
            "{refused}"
        );
    }
}

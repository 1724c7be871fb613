//! Tests of snapshots built from changes: what is rebuilt, what is shared, and that the order of
//! arrival does not matter.

use super::*;
use crate::testing::{
    PlainRequest, first_precedence, forward_to, key, route, service, tenant, workload,
};
use crate::{PortTermination, RouteOutcome};
use canal_identity::ListenerChoice;
use canal_model::authorization::{Authorization, AuthorizationAction, PolicyKey};
use canal_model::ids::{ServiceId, Vni};
use canal_model::program::*;

/// Of two addresses of one IP family, an endpoint has the first (`Endpoint::address`).
#[test]
fn a_pod_of_both_families_is_reached_in_the_clients_and_another_in_its_own() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let with = |name: &str, n: u8, addresses: &[&str]| {
        let Resource::Workload(mut pod) = workload(name, n, "s").as_ref().clone() else {
            panic!("not a workload")
        };
        pod.addresses = addresses.iter().map(|a| a.parse().unwrap()).collect();
        Arc::new(Resource::Workload(pod))
    };
    let all = [
        service("s", &[80]),
        with("w-0", 0, &["10.0.0.1", "10.0.0.2", "fd00::1"]),
        with("w-1", 1, &["10.0.0.3"]),
    ];
    let snapshot = builder.apply(&all, &[], Generation(1));
    let slot = snapshot
        .tenant("t")
        .unwrap()
        .service(&key("s"))
        .unwrap()
        .port(80)
        .unwrap()
        .slot;
    let reached = |client: &str| {
        let endpoints = snapshot.set(slot).unwrap().endpoints.iter();
        endpoints
            .map(|e| e.address_towards(client.parse().unwrap()).ip().to_string())
            .collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(
        reached("10.1.0.9"),
        ["10.0.0.1", "10.0.0.3"].map(String::from).into()
    );
    assert_eq!(
        reached("fd00::9"),
        ["fd00::1", "10.0.0.3"].map(String::from).into()
    );
    assert_eq!(
        reached("::ffff:10.1.0.9"),
        ["10.0.0.1", "10.0.0.3"].map(String::from).into(),
        "IPv4 in IPv6 form is IPv4"
    );
}

#[test]
fn a_trust_domain_is_found_by_its_name_as_tenants_come_change_and_go() {
    let named = |name: &str, domain: &str| {
        let Resource::Tenant(tenant) = &*tenant() else {
            panic!("a tenant")
        };
        let (name, trust_domain) = (name.parse().unwrap(), domain.parse().unwrap());
        Arc::new(Resource::Tenant(Tenant {
            name,
            trust_domain,
            ..tenant.clone()
        }))
    };
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let owner = |snapshot: &Snapshot, domain: &str| {
        snapshot
            .tenant_of(&domain.parse().unwrap())
            .map(|t| t.name.to_string())
    };
    let first = builder.apply(
        &[named("a", "a.example"), named("b", "b.example")],
        &[],
        Generation(1),
    );
    assert_eq!(
        (
            owner(&first, "a.example").as_deref(),
            owner(&first, "b.example").as_deref()
        ),
        (Some("a"), Some("b"))
    );
    // The two tenants swap their trust domains in one step.
    let second = builder.apply(
        &[named("a", "b.example"), named("b", "a.example")],
        &[],
        Generation(2),
    );
    assert_eq!(
        (
            owner(&second, "a.example").as_deref(),
            owner(&second, "b.example").as_deref()
        ),
        (Some("b"), Some("a"))
    );
    let third = builder.apply(
        &[named("a", "c.example")],
        &[(ResourceKind::Tenant, "b".into())],
        Generation(3),
    );
    assert_eq!(
        [owner(&third, "a.example"), owner(&third, "b.example")],
        [None, None]
    );
    assert_eq!(owner(&third, "c.example").as_deref(), Some("a"));
}

fn rule(name: &str, of: &str, to: &str, subset: &str) -> Arc<Resource> {
    let matched = (first_precedence(), PathMatch::StringPrefix("/".into()));
    Arc::new(Resource::Route(RouteRule {
        parent_port: Some(80),
        ..route(key(of), name, matched, forward_to(to, subset))
    }))
}

/// Formats the content of a snapshot as text, to compare snapshots that were built differently.
fn describe(snapshot: &Snapshot) -> String {
    let mut lines = Vec::new();
    for tenant in snapshot.tenants() {
        for s in tenant.services() {
            for p in s.ports.iter() {
                let set = snapshot.set(p.slot).unwrap();
                let endpoints: Vec<_> = set
                    .endpoints
                    .iter()
                    .map(|e| {
                        format!(
                            "{}@{} as {:?}",
                            e.workload.uid, e.address, e.workload.identity
                        )
                    })
                    .collect();
                lines.push(format!(
                    "{}:{} routed={} {endpoints:?}",
                    s.names.key, p.port, p.routed
                ));
            }
        }
    }
    lines.sort();
    lines.join("\n")
}

#[test]
fn the_order_of_arrival_does_not_matter() {
    let all = [
        tenant(),
        service("a", &[80, 81]),
        service("b", &[80]),
        workload("a-0", 1, "a"),
        workload("b-0", 2, "b"),
        rule("r", "a", "b", ""),
    ];
    let at_once = describe(&SnapshotBuilder::new("gw", None, None).apply(&all, &[], Generation(1)));
    assert!(
        at_once.contains("t/ns/a:80 routed=true") && at_once.contains("t/ns/a:81 routed=false"),
        "{at_once}"
    );
    assert!(
        at_once.contains("spiffe://t.example/ns/ns/sa/sa"),
        "{at_once}"
    );
    let mut backwards = SnapshotBuilder::new("gw", None, None);
    let mut last = None;
    for resource in all.iter().rev() {
        last = Some(backwards.apply(std::slice::from_ref(resource), &[], Generation(1)));
    }
    assert_eq!(describe(&last.unwrap()), at_once);
}

#[test]
fn a_change_rebuilds_its_service_and_shares_the_rest() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let first = builder.apply(
        &[
            service("a", &[80]),
            service("b", &[80]),
            workload("a-0", 1, "a"),
            workload("b-0", 2, "b"),
        ],
        &[],
        Generation(1),
    );
    let second = builder.apply(&[workload("a-1", 3, "a")], &[], Generation(2));
    let set = |snapshot: &Snapshot, name: &str| {
        let slot = snapshot
            .tenant("t")
            .unwrap()
            .service(&key(name))
            .unwrap()
            .port(80)
            .unwrap()
            .slot;
        snapshot.set(slot).unwrap().clone()
    };
    assert!(Arc::ptr_eq(&set(&first, "b"), &set(&second, "b")));
    assert_eq!(
        (
            set(&first, "a").endpoints.len(),
            set(&second, "a").endpoints.len()
        ),
        (1, 2)
    );
    assert_eq!(
        set(&first, "a").endpoints[0].id,
        set(&second, "a").endpoints[0].id,
        "an endpoint keeps its number"
    );
    let view = |snapshot: &Snapshot, name: &str| {
        snapshot
            .tenant("t")
            .unwrap()
            .service(&key(name))
            .unwrap()
            .clone()
    };
    assert!(
        Arc::ptr_eq(&view(&first, "a"), &view(&second, "a")),
        "endpoints are not part of the view"
    );
    assert_eq!((second.generation, second.sequence), (Generation(2), 2));
}

#[test]
fn a_removal_uncovers_the_hidden_resource() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let both = [
        service("a", &[80]),
        workload("a-0", 1, "a"),
        rule("r", "a", "a", "a-0"),
    ];
    let with = builder.apply(&both, &[], Generation(1));
    let a = |snapshot: &Snapshot| snapshot.tenant("t").unwrap().service(&key("a")).cloned();
    assert!(a(&with).unwrap().routes.is_some());
    let without = builder.apply(
        &[],
        &[(ResourceKind::Route, "t/HTTPRoute/ns/r/0".into())],
        Generation(2),
    );
    assert!(a(&without).unwrap().routes.is_none());
    let empty = builder.apply(
        &[],
        &[
            (ResourceKind::Service, "t/ns/a".into()),
            (ResourceKind::Workload, "t/ns/a-0".into()),
        ],
        Generation(3),
    );
    let tenant = empty.tenant("t").unwrap();
    assert!(a(&empty).is_none() && tenant.service_at("10.96.0.97".parse().unwrap()).is_none());
    assert!(
        tenant.workload_at("10.1.0.1".parse().unwrap()).is_none()
            && tenant.service_named("a.ns").is_none()
    );
    let back = builder.apply(&both, &[], Generation(4));
    assert_eq!(describe(&back), describe(&with));
    assert_eq!(builder.snapshot.sets.len(), 2, "slots are found again");
}

#[test]
fn sets_that_no_route_names_any_more_are_freed() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    builder.apply(
        &[
            service("a", &[80]),
            service("b", &[80]),
            workload("b-0", 1, "b"),
        ],
        &[],
        Generation(1),
    );
    let target = |snapshot: &Snapshot| {
        let service = snapshot.tenant("t").unwrap().service(&key("a"));
        let routes = service.unwrap().routes.as_ref().unwrap();
        routes.endpoint_sets().next().unwrap()
    };
    let mut snapshots = Vec::new();
    for n in 0..50 {
        let rule = rule("r", "a", "b", &format!("b-{n}"));
        snapshots.push(builder.apply(&[rule], &[], Generation(n + 2)));
    }
    // Those of the two ports, and of the subsets before and after a change.
    assert_eq!(builder.snapshot.sets.len(), 4);
    let (first, last) = (&snapshots[0], &snapshots[49]);
    let endpoints = |snapshot: &Snapshot| snapshot.set(target(snapshot)).unwrap().endpoints.len();
    assert_eq!((endpoints(first), endpoints(last)), (1, 0));
    // Another service keeps what it names while its route and the service itself change.
    let kept = rule("other", "b", "b", "b-49");
    let both = builder.apply(&[kept, workload("b-49", 2, "b")], &[], Generation(60));
    let gone = [(ResourceKind::Route, "t/HTTPRoute/ns/r/0".to_owned())];
    let after = builder.apply(&[], &gone, Generation(61));
    assert!(after.set(target(&both)).unwrap().exists);
    let gone = [(ResourceKind::Route, "t/HTTPRoute/ns/other/0".to_owned())];
    let after = builder.apply(&[], &gone, Generation(62));
    assert!(after.set(target(&both)).is_none());
    // A snapshot in use keeps its own.
    assert_eq!(endpoints(&both), 1);
}

#[test]
fn a_complete_state_removes_resources_that_it_lacks() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    builder.apply(
        &[
            tenant(),
            service("a", &[80]),
            service("b", &[80]),
            workload("b-0", 1, "b"),
            rule("r", "a", "b", ""),
        ],
        &[],
        Generation(1),
    );
    let mut gone: Vec<_> = builder.names_beside(&[tenant(), service("a", &[80])]);
    gone.sort();
    let names: Vec<_> = gone
        .iter()
        .map(|(kind, name)| (*kind, name.as_str()))
        .collect();
    assert_eq!(
        names,
        [
            (ResourceKind::Service, "t/ns/b"),
            (ResourceKind::Workload, "t/ns/b-0"),
            (ResourceKind::Route, "t/HTTPRoute/ns/r/0")
        ]
    );
}

#[test]
fn only_this_replicas_addresses_are_listeners() {
    let gateway = |replica: &str, address: &str| {
        Arc::new(Resource::GatewayReplica(GatewayReplica {
            tenant: "t".parse().unwrap(),
            replica: replica.parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec![address.parse().unwrap()],
            draining: false,
        }))
    };
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let snapshot = builder.apply(
        &[
            tenant(),
            gateway("gw", "10.0.0.1"),
            gateway("other", "10.0.0.2"),
        ],
        &[],
        Generation(1),
    );
    assert_eq!(
        snapshot
            .tenant_at("10.0.0.1".parse().unwrap())
            .unwrap()
            .name
            .as_str(),
        "t"
    );
    assert!(snapshot.tenant_at("10.0.0.2".parse().unwrap()).is_none());
}

#[test]
fn ten_thousand_services_load_fast_and_a_change_is_small() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let all: Vec<_> = (0..10_000)
        .flat_map(|n| {
            [
                service(&format!("s{n}"), &[80]),
                rule(&format!("r{n}"), &format!("s{n}"), &format!("s{n}"), ""),
            ]
        })
        .collect();
    let start = std::time::Instant::now();
    builder.apply(&all, &[], Generation(1));
    let load = start.elapsed();
    let start = std::time::Instant::now();
    for n in 0..100 {
        builder.apply(
            &[rule("r7", "s7", &format!("s{n}"), "")],
            &[],
            Generation(2),
        );
    }
    let change = start.elapsed() / 100;
    // The bounds are generous, because this runs unoptimized on a shared machine. A change must not
    // cost as much as a load.
    canal_timing::assert_time(
        "time to apply one change to 10,000 services",
        change,
        std::time::Duration::from_millis(20),
    );
    canal_timing::timed!(
        change < load / 50,
        "a change costs less than a fiftieth of a load"
    );
}

#[test]
fn a_service_is_reachable_while_any_resource_has_its_number() {
    let numbered = |number: u32, of: &str| {
        let mut service = (*service(of, &[80])).clone();
        if let Resource::Service(service) = &mut service {
            service.id = ServiceId::new(number).unwrap();
        }
        Arc::new(service)
    };
    let address = |az: &str, ip: &str| {
        let (service, id) = (key("s"), ServiceId::new(7).unwrap());
        Arc::new(Resource::Address(GatewayAddress {
            service,
            id,
            az: az.parse().unwrap(),
            addresses: vec![ip.parse().unwrap()],
            network: None,
            open: true,
        }))
    };
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let inside = |snapshot: &Snapshot, number: u32| {
        let found = snapshot.service_inside(ServiceId::new(number).unwrap());
        found.map(|(tenant, key)| (tenant.name.to_string(), key.name.to_string()))
    };
    let found = Some(("t".to_string(), "s".to_string()));
    let first = builder.apply(
        &[
            tenant(),
            numbered(7, "s"),
            address("az1", "10.9.0.1"),
            address("az2", "10.9.0.2"),
        ],
        &[],
        Generation(1),
    );
    let of = |snapshot: &Snapshot, ip: &str| {
        snapshot
            .tenant("t")
            .unwrap()
            .gateway_of(ip.parse().unwrap())
            .cloned()
    };
    assert_eq!(
        (inside(&first, 7), of(&first, "10.9.0.2")),
        (found.clone(), Some(key("s")))
    );
    let gone = |kind, name: &str| vec![(kind, name.to_string())];
    let second = builder.apply(&[], &gone(ResourceKind::Service, "t/ns/s"), Generation(2));
    assert_eq!(inside(&second, 7), found, "its addresses still name it");
    let third = builder.apply(
        &[],
        &gone(ResourceKind::Address, "t/ns/s@az2"),
        Generation(3),
    );
    assert_eq!(
        (inside(&third, 7), of(&third, "10.9.0.2")),
        (found.clone(), None)
    );
    let fourth = builder.apply(
        &[],
        &gone(ResourceKind::Address, "t/ns/s@az1"),
        Generation(4),
    );
    assert_eq!(inside(&fourth, 7), None);
    // A service that changes its number is no longer found by the old one.
    let fifth = builder.apply(&[numbered(7, "s")], &[], Generation(5));
    let sixth = builder.apply(&[numbered(8, "s")], &[], Generation(6));
    assert_eq!(
        (inside(&fifth, 7), inside(&sixth, 7), inside(&sixth, 8)),
        (found.clone(), None, found)
    );
}

#[test]
fn an_endpoint_is_another_one_at_another_address_or_in_another_network() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let id = |snapshot: &Snapshot| {
        let port = snapshot
            .tenant("t")
            .unwrap()
            .service(&key("s"))
            .unwrap()
            .port(80)
            .unwrap()
            .slot;
        snapshot.set(port).unwrap().endpoints[0].id
    };
    let first = builder.apply(
        &[tenant(), service("s", &[80]), workload("w", 1, "s")],
        &[],
        Generation(1),
    );
    let same = builder.apply(&[workload("w", 1, "s")], &[], Generation(2));
    assert_eq!(id(&first), id(&same));
    let moved = builder.apply(&[workload("w", 2, "s")], &[], Generation(3)); // 10.1.0.2
    assert_ne!(
        id(&moved),
        id(&same),
        "connections to the old address reach its present owner"
    );
    let mut elsewhere = (*tenant()).clone();
    if let Resource::Tenant(tenant) = &mut elsewhere {
        tenant.vni = Vni::new(2).unwrap();
    }
    let renumbered = builder.apply(&[Arc::new(elsewhere)], &[], Generation(4));
    assert_ne!(id(&renumbered), id(&moved));
    assert_eq!(
        renumbered
            .tenant("t")
            .unwrap()
            .workload_at("10.1.0.2".parse().unwrap())
            .unwrap()
            .vni,
        Some(Vni::new(2).unwrap())
    );
}

/// The request that the tests of filters route.
const REQUEST: PlainRequest = PlainRequest {
    host: "a.ns",
    method: "GET",
    path: "/",
};

/// Returns a policy of a service, whose authorizer `asked` decides if there is one.
fn policy(of: &str, asked: Option<&str>) -> Arc<Resource> {
    let named = |name: &str| PolicyKey {
        tenant: "t".parse().unwrap(),
        namespace: "ns".parse().unwrap(),
        name: name.parse().unwrap(),
    };
    Arc::new(Resource::Authorization(Authorization {
        key: named(of),
        target: PolicyTarget::Service(key(of)),
        action: asked.map_or(AuthorizationAction::Deny, |asked| {
            AuthorizationAction::Custom(named(asked))
        }),
        rules: vec![],
        dry_run: false,
        broken: None,
    }))
}

#[test]
fn service_filters_apply_only_when_a_rule_routes_to_another_service() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let all = [
        tenant(),
        service("a", &[80]),
        service("b", &[80]),
        workload("a-0", 1, "a"),
        workload("b-0", 2, "b"),
        rule("away", "a", "b", ""),
        rule("home", "b", "b", ""),
    ];
    let routes = |snapshot: &Snapshot, name: &str| {
        let service = snapshot.tenant("t").unwrap().service(&key(name)).unwrap();
        service.routes.clone().unwrap()
    };
    // Whether the body is buffered: by the rule, and by the endpoints to which it leads.
    let filters = |snapshot: &Snapshot, name: &str| {
        let RouteOutcome::Target(target) = routes(snapshot, name).decide(80, &REQUEST, 0).0 else {
            panic!("not routed")
        };
        let endpoints = snapshot.set(target.slot).unwrap().filters;
        [target.filters, endpoints].map(FilterChain::buffers_body)
    };
    let (none, asked) = (false, true);
    let first = builder.apply(&all, &[], Generation(1));
    assert_eq!(filters(&first, "a"), [none, none]);
    assert_eq!(filters(&first, "b"), [none, none]);
    // A DENY policy without conditions on the body reads none of it; an authorizer may.
    let second = builder.apply(&[policy("a", None)], &[], Generation(2));
    assert_eq!(filters(&second, "a"), [none, none]);
    assert_eq!(filters(&second, "b"), [none, none]);
    let third = builder.apply(&[policy("a", Some("z"))], &[], Generation(3));
    assert_eq!(filters(&third, "a"), [asked, none]);
    // b's endpoint has b's policies on both ways to it.
    let fourth = builder.apply(&[policy("b", Some("z"))], &[], Generation(4));
    assert_eq!(filters(&fourth, "a"), [asked, asked]);
    assert_eq!(filters(&fourth, "b"), [none, asked]);
    assert!(Arc::ptr_eq(&routes(&first, "b"), &routes(&third, "b")));
    assert!(
        Arc::ptr_eq(
            routes(&first, "a").compiled(),
            routes(&fourth, "a").compiled()
        ),
        "a policy compiles no rules"
    );
    let gone = ["a", "b"].map(|of| {
        let resource = policy(of, None);
        (resource.kind(), resource.name())
    });
    let fifth = builder.apply(&[], &gone, Generation(5));
    assert_eq!(filters(&fifth, "a"), [none, none]);
    assert_eq!(filters(&fifth, "b"), [none, none]);
}

/// The listeners of a Gateway for two hosts, of which one is closed.
fn gateway(hosts: &[(&str, bool)]) -> Arc<Resource> {
    let listener = |(host, is_open): &(&str, bool)| IngressListener {
        filters: Vec::new(),
        name: (*host).to_owned(),
        port: 80,
        host: Some(HostMatch::Exact((*host).to_owned())),
        is_open: *is_open,
        relay: None,
        certificates: None,
        virtual_hosts: vec![VirtualHost {
            host: None,
            routes: [RouteObject {
                namespace: "ns".parse().unwrap(),
                name: "r".parse().unwrap(),
                kind: "HTTPRoute".into(),
            }]
            .into(),
        }],
    };
    Arc::new(Resource::Ingress(IngressGateway {
        trusted_proxies: 0,
        proxied_ports: BTreeSet::new(),
        key: key("web.gateway"),
        id: ServiceId::new(40).unwrap(),
        client_validations: Vec::new(),
        listeners: hosts.iter().map(listener).collect(),
    }))
}

#[test]
fn a_gateway_is_a_service_with_listeners_until_it_is_removed() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let rule = rule("r", "web.gateway", "s", "");
    let open = gateway(&[("a.example", true), ("b.example", false)]);
    let all = [tenant(), service("s", &[80]), rule.clone(), open.clone()];
    let snapshot = builder.apply(&all, &[], Generation(1));
    let routed = |snapshot: &Snapshot, host| {
        let service = snapshot.tenant("t").unwrap().service(&key("web.gateway"));
        let routes = service.unwrap().routes.as_ref().unwrap();
        let request = PlainRequest {
            host,
            method: "GET",
            path: "/",
        };
        matches!(routes.decide(80, &request, 0).0, RouteOutcome::Target(_))
    };
    let hosts = ["a.example", "b.example", "c.example"];
    assert_eq!(
        hosts.map(|host| routed(&snapshot, host)),
        [true, false, false]
    );
    // The ID of the resource that `gateway` returns.
    let id = ServiceId::new(40).unwrap();
    assert!(snapshot.service_inside(id).is_some());
    // Clients reach a Gateway at its addresses only; the hostname of its service is made up.
    let named = snapshot.tenant("t").unwrap();
    assert!(
        named
            .service_named("web.gateway.ns.svc.cluster.local")
            .is_none()
    );
    assert!(
        builder.names_beside(&all).is_empty(),
        "a whole state keeps it"
    );
    // An edit of the listeners alone takes effect.
    let snapshot = builder.apply(&[gateway(&[("b.example", true)])], &[], Generation(2));
    assert_eq!(
        hosts.map(|host| routed(&snapshot, host)),
        [false, true, false]
    );
    let gone = builder.names_beside(&all[..3]); // All but the Gateway.
    assert_eq!(
        gone,
        [(ResourceKind::Ingress, "t/ns/web.gateway".to_owned())]
    );
    let snapshot = builder.apply(&[], &gone, Generation(3));
    assert!(
        snapshot
            .tenant("t")
            .unwrap()
            .service(&key("web.gateway"))
            .is_none()
    );
    assert!(snapshot.service_inside(id).is_none());
}

#[test]
fn an_https_port_refuses_all_handshakes_without_a_keyring() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let Resource::Ingress(mut https) = (*gateway(&[("a.example", true)])).clone() else {
        unreachable!("it is a Gateway")
    };
    https.listeners[0].certificates = Some(vec![(
        "ns".parse().unwrap(),
        "web-certificate".parse().unwrap(),
    )]);
    let all = [tenant(), Arc::new(Resource::Ingress(https))];
    let snapshot = builder.apply(&all, &[], Generation(1));
    let service = snapshot.tenant("t").unwrap().service(&key("web.gateway"));
    let port = service.unwrap().port(80).unwrap();
    let Some(PortTermination::Gateway(listeners)) = port.termination.as_deref() else {
        panic!("the port is served without TLS: {:?}", port.termination)
    };
    for (name, is_listed) in [(Some("a.example"), true), (Some("b.example"), false)] {
        let choice = listeners.choose(name);
        assert_eq!(matches!(choice, ListenerChoice::NoCertificate), is_listed);
        assert_eq!(matches!(choice, ListenerChoice::NoListener), !is_listed);
    }
}

//! Tables of the node's routing decisions.

use canal_model::ids::{Generation, ServiceId, Vni};
use canal_model::program as p;

use super::*;

/// Returns a ready pod of `tenant` that serves redis, and a service that is unknown, on direct
/// ports.
fn direct(tenant: &str, name: &str, at: &str) -> p::Resource {
    let port = |service: &str| p::DirectPort {
        service: format!("{tenant}/b/{service}").parse().unwrap(),
        port: 6379,
    };
    p::Resource::DirectEndpoint(p::DirectEndpoint {
        tenant: tenant.parse().unwrap(),
        namespace: "b".parse().unwrap(),
        name: name.parse().unwrap(),
        service_account: "redis".parse().unwrap(),
        az: "az1".parse().unwrap(),
        addresses: vec![at.parse().unwrap()],
        serves: ["redis", "gone"].map(port).into(),
        own_ports: [6380].into(),
        audience: Default::default(),
    })
}

/// Returns the workload of the pod that the tests are about.
fn reviews_pod() -> p::Resource {
    p::Resource::Workload(p::Workload {
        tenant: "alpha".parse().unwrap(),
        namespace: "b".parse().unwrap(),
        name: "reviews-0".parse().unwrap(),
        service_account: "reviews".parse().unwrap(),
        node: node_name(),
        az: "az1".parse().unwrap(),
        addresses: vec![],
        labels: p::Labels::new(),
        ready: true,
        tunnel: p::TunnelProtocol::Hbone,
        endpoints: vec![
            p::EndpointPort {
                service: "alpha/b/reviews".parse().unwrap(),
                port: 9080,
                target_port: 8080,
            },
            p::EndpointPort {
                service: "alpha/b/proxyish".parse().unwrap(),
                port: 15008,
                target_port: 15008,
            },
        ],
        udp_ports: [5353, 53].into(),
    })
}

/// Returns the resources of tenant alpha, and some of tenant beta.
fn state(outside: p::OutboundTrafficPolicy) -> Vec<p::Resource> {
    let key = |n: &str| n.parse::<canal_model::ids::ServiceKey>().unwrap();
    let service = |k: &str, vips: &[&str], port| {
        p::Resource::Service(p::Service {
            key: key(k),
            id: ServiceId::new(7).unwrap(),
            hostname: format!("{}.b.svc.cluster.local", k.rsplit('/').next().unwrap()),
            vips: vips.iter().map(|v| v.parse().unwrap()).collect(),
            ports: vec![p::ServicePort {
                port,
                name: "http".into(),
                protocol: p::AppProtocol::Http1,
            }],
            upstream_pool: Default::default(),
            policy_paths: Default::default(),
            load_balancers: Vec::new(),
        })
    };
    let address = |k: &str, az: &str, at: &[&str]| {
        p::Resource::Address(p::GatewayAddress {
            service: key(k),
            id: ServiceId::new(7).unwrap(),
            az: az.parse().unwrap(),
            addresses: at.iter().map(|a| a.parse().unwrap()).collect(),
            network: None,
            open: true,
        })
    };
    vec![
        p::Resource::Tenant(p::Tenant {
            name: "alpha".parse().unwrap(),
            vni: Vni::new(1).unwrap(),
            trust_domain: "alpha.example".parse().unwrap(),
            pod_cidrs: vec!["10.1.0.0/16".parse().unwrap(), "fd01::/64".parse().unwrap()],
            gateway_cidrs: vec!["10.9.0.0/16".parse().unwrap()],
            outbound_traffic_policy: outside,
            keys: Default::default(),
            resolvers: vec!["192.0.2.53".parse().unwrap()],
            shares: Default::default(),
        }),
        p::Resource::GatewayReplica(p::GatewayReplica {
            tenant: "alpha".parse().unwrap(),
            replica: "gw1".parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec!["10.1.255.1".parse().unwrap()],
            draining: false,
        }),
        service("alpha/b/reviews", &["10.96.0.1", "fd96::1"], 9080),
        // `zz-late` also claims the first address of `reviews`; the service whose name is first
        // has it.
        service("alpha/b/zz-late", &["10.96.0.1", "10.96.0.9"], 1),
        // A service at the port of the proxies.
        service("alpha/b/proxyish", &["10.96.0.2"], 15008),
        service("beta/b/other", &["10.96.7.7"], 80),
        service("alpha/b/redis", &["10.96.0.6"], 6379),
        direct("alpha", "redis-0", "10.1.8.8"),
        direct("beta", "other-0", "10.1.8.9"),
        address("alpha/b/reviews", "az1", &["10.9.1.2", "fd09::2"]),
        address("alpha/b/reviews", "az2", &["10.9.2.2"]),
        address("alpha/canal-system/gateway", "az2", &["10.9.2.1"]),
        address("alpha/canal-system/gateway", "az1", &["10.9.1.1"]),
        // The service of this gateway address does not exist.
        address("alpha/b/unheard-of", "az1", &["10.9.1.4"]),
        address("beta/b/other", "az1", &["10.8.1.2"]),
        reviews_pod(),
    ]
}

/// Returns the snapshot of tenant alpha, and one of its pods.
pub(crate) fn pod(outside: p::OutboundTrafficPolicy) -> (NodeSnapshot, LocalPod) {
    let view = NodeSnapshot::from_resources(Generation(3), state(outside).iter(), &node_name());
    let text = r#"{"uid":"alpha/b/reviews-0","namespace":"b","name":"reviews-0","serviceAccount":"reviews","netns":"/n","cgroup":"/c",
        "ips":["10.1.1.2","fd01::2"]}"#;
    (view, LocalPod::parse("f", text.as_bytes()).unwrap())
}

fn node_name() -> canal_model::ids::NodeName {
    "n1".parse().unwrap()
}

const REVIEWS: Option<&str> = Some("alpha/b/reviews");
const REDIS: Option<&str> = Some("alpha/b/redis");

/// A case's name, the policy for destinations outside the mesh, the dialled address, and the way
/// with its service. No policy means that the node has no southbound state.
type OutboundCase = (
    &'static str,
    Option<p::OutboundTrafficPolicy>,
    &'static str,
    Result<(&'static str, Option<&'static str>), NodeRefusal>,
);

/// Connections of the pod, and the way that each goes.
const OUTBOUND_CASES: [OutboundCase; 36] = [
    (
        "a service's address",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.96.0.1:9080",
        Ok(("mesh 10.96.0.1:9080", REVIEWS)),
    ),
    (
        "a service's IPv6 address",
        Some(p::OutboundTrafficPolicy::Deny),
        "[fd96::1]:9080",
        Ok(("mesh [fd96::1]:9080", REVIEWS)),
    ),
    (
        "a mapped address is IPv4",
        Some(p::OutboundTrafficPolicy::Deny),
        "[::ffff:10.96.0.1]:9080",
        Ok(("mesh 10.96.0.1:9080", REVIEWS)),
    ),
    (
        "a port it does not have",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.96.0.1:1",
        Err(NodeRefusal::UnknownPort),
    ),
    (
        "a service may use a pod's illegal port",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.96.0.2:15008",
        Ok(("mesh 10.96.0.2:15008", Some("alpha/b/proxyish"))),
    ),
    (
        "a pod",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.1.7.7:80",
        Ok(("mesh 10.1.7.7:80", None)),
    ),
    (
        "an IPv6 pod",
        Some(p::OutboundTrafficPolicy::Deny),
        "[fd01::7]:80",
        Ok(("mesh [fd01::7]:80", None)),
    ),
    (
        "a direct port",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.96.0.6:6379",
        Ok(("direct redis.b.svc.cluster.local:6379", REDIS)),
    ),
    (
        "a pod's own direct port",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.1.8.8:6380",
        Ok(("direct 10.1.8.8:6380", None)),
    ),
    (
        "another port of that pod",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.1.8.8:6379",
        Ok(("mesh 10.1.8.8:6379", None)),
    ),
    (
        "another tenant's direct pod",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.1.8.9:6380",
        Ok(("mesh 10.1.8.9:6380", None)),
    ),
    (
        "a pod's HBONE port",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.1.7.7:15008",
        Err(NodeRefusal::ReservedPort),
    ),
    (
        "a pod's capture port",
        Some(p::OutboundTrafficPolicy::Passthrough),
        "10.1.7.7:15001",
        Err(NodeRefusal::ReservedPort),
    ),
    (
        "itself",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.1.1.2:80",
        Ok(("own 10.1.1.2:80", None)),
    ),
    (
        "itself, IPv6",
        Some(p::OutboundTrafficPolicy::Deny),
        "[fd01::2]:80",
        Ok(("own [fd01::2]:80", None)),
    ),
    (
        "its own HBONE port",
        Some(p::OutboundTrafficPolicy::Passthrough),
        "10.1.1.2:15008",
        Err(NodeRefusal::ReservedPort),
    ),
    (
        "a gateway",
        Some(p::OutboundTrafficPolicy::Passthrough),
        "10.1.255.1:15008",
        Err(NodeRefusal::GatewayAddress),
    ),
    (
        "a gateway, another port",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.1.255.1:80",
        Err(NodeRefusal::GatewayAddress),
    ),
    (
        "a service's gateway address",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.9.1.2:9080",
        Ok(("mesh 10.9.1.2:9080", REVIEWS)),
    ),
    (
        "in another AZ",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.9.2.2:9080",
        Ok(("mesh 10.9.2.2:9080", REVIEWS)),
    ),
    (
        "the IPv6 one",
        Some(p::OutboundTrafficPolicy::Deny),
        "[fd09::2]:9080",
        Ok(("mesh [fd09::2]:9080", REVIEWS)),
    ),
    (
        "a port that the service there does not have",
        Some(p::OutboundTrafficPolicy::Passthrough),
        "10.9.1.2:15008",
        Err(NodeRefusal::UnknownPort),
    ),
    (
        "a gateway address of a service that is not known",
        Some(p::OutboundTrafficPolicy::Passthrough),
        "10.9.1.4:80",
        Err(NodeRefusal::GatewayAddress),
    ),
    (
        "pooled for a gateway",
        Some(p::OutboundTrafficPolicy::Passthrough),
        "10.9.7.7:80",
        Err(NodeRefusal::GatewayAddress),
    ),
    (
        "the tier's own service",
        Some(p::OutboundTrafficPolicy::Passthrough),
        "10.9.1.1:15008",
        Err(NodeRefusal::GatewayAddress),
    ),
    (
        "the tier's DNS",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.9.1.1:53",
        Ok(("passthrough 10.9.1.1:53", None)),
    ),
    (
        "another tenant's gateway address is the outside",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.8.1.2:80",
        Err(NodeRefusal::OutsideMesh),
    ),
    (
        "outside, denied",
        Some(p::OutboundTrafficPolicy::Deny),
        "192.0.2.1:443",
        Err(NodeRefusal::OutsideMesh),
    ),
    (
        "a resolver that the tenant names, by TCP",
        Some(p::OutboundTrafficPolicy::Deny),
        "192.0.2.53:53",
        Ok(("passthrough 192.0.2.53:53", None)),
    ),
    (
        "another port of it",
        Some(p::OutboundTrafficPolicy::Deny),
        "192.0.2.53:443",
        Err(NodeRefusal::OutsideMesh),
    ),
    (
        "another resolver",
        Some(p::OutboundTrafficPolicy::Deny),
        "192.0.2.54:53",
        Err(NodeRefusal::OutsideMesh),
    ),
    (
        "outside, passed",
        Some(p::OutboundTrafficPolicy::Passthrough),
        "192.0.2.1:443",
        Ok(("passthrough 192.0.2.1:443", None)),
    ),
    (
        "outside on an HBONE port, passed",
        Some(p::OutboundTrafficPolicy::Passthrough),
        "192.0.2.1:15008",
        Ok(("passthrough 192.0.2.1:15008", None)),
    ),
    (
        "another tenant's service is the outside",
        Some(p::OutboundTrafficPolicy::Deny),
        "10.96.7.7:80",
        Err(NodeRefusal::OutsideMesh),
    ),
    (
        "before any southbound state",
        None,
        "10.96.0.1:9080",
        Err(NodeRefusal::TenantUnknown),
    ),
    (
        "itself, before any southbound state",
        None,
        "10.1.1.2:80",
        Ok(("own 10.1.1.2:80", None)),
    ),
];

#[test]
fn a_captured_connection_has_exactly_one_route() {
    let (deny, pod_) = pod(p::OutboundTrafficPolicy::Deny);
    let (pass, _) = pod(p::OutboundTrafficPolicy::Passthrough);
    let empty = NodeSnapshot::default();
    let check = |case: &str,
                 view: &NodeSnapshot,
                 to: &str,
                 want: Result<(&str, Option<&str>), NodeRefusal>| {
        let to: SocketAddr = to.parse().unwrap();
        let got = decide_outbound(view, &pod_, to);
        let want = want.map(|(way, service)| (way.to_string(), service.map(str::to_string)));
        let got = got.map(|w| match w {
            OutboundRoute::Mesh { authority, service } => (
                format!("mesh {authority}"),
                service.map(|s| s.key.to_string()),
            ),
            OutboundRoute::Direct { peers, service, .. } => (
                format!("direct {}", peers.authority),
                service.map(|s| s.key.to_string()),
            ),
            OutboundRoute::Own(a) => (format!("own {a}"), None),
            OutboundRoute::Passthrough(a) => (format!("passthrough {a}"), None),
        });
        assert_eq!(got, want, "{case}: {to}");
    };
    for (case, policy, to, want) in OUTBOUND_CASES {
        let view = match policy {
            Some(p::OutboundTrafficPolicy::Deny) => &deny,
            Some(p::OutboundTrafficPolicy::Passthrough) => &pass,
            None => &empty,
        };
        check(case, view, to, want);
    }
}

const OURS: &str = "spiffe://alpha.example/ns/canal-system/sa/gateway";
const THEIRS: &str = "spiffe://beta.example/ns/x/sa/y";
const APP: &str = "spiffe://alpha.example/ns/b/sa/c";

/// A case's name, the dialled address, the authority of the CONNECT, the peer, and the target of
/// the tunnel.
type InboundCase = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    Result<&'static str, NodeRefusal>,
);

/// Tunnels to the pod, and where each leads.
const INBOUND_CASES: [InboundCase; 14] = [
    (
        "its address",
        "10.1.1.2",
        "10.1.1.2:8080",
        OURS,
        Ok("10.1.1.2:8080"),
    ),
    (
        "its IPv6 address",
        "fd01::2",
        "[fd01::2]:8080",
        OURS,
        Ok("[fd01::2]:8080"),
    ),
    (
        "dialled as mapped",
        "::ffff:10.1.1.2",
        "10.1.1.2:8080",
        OURS,
        Ok("10.1.1.2:8080"),
    ),
    (
        "another address",
        "10.1.1.2",
        "10.1.1.3:8080",
        OURS,
        Err(NodeRefusal::DestinationMismatch),
    ),
    (
        "its other address",
        "10.1.1.2",
        "[fd01::2]:8080",
        OURS,
        Err(NodeRefusal::DestinationMismatch),
    ),
    (
        "a mismatch is reported before a reserved port",
        "10.1.1.2",
        "10.1.1.3:15008",
        OURS,
        Err(NodeRefusal::DestinationMismatch),
    ),
    (
        "a reserved port is reported before the authorization",
        "10.1.1.2",
        "10.1.1.2:15008",
        THEIRS,
        Err(NodeRefusal::ReservedPort),
    ),
    (
        "another trust domain",
        "10.1.1.2",
        "10.1.1.2:8080",
        THEIRS,
        Err(NodeRefusal::Denied),
    ),
    (
        "its service by name",
        "10.1.1.2",
        "reviews.b.svc.cluster.local:9080",
        OURS,
        Ok("10.1.1.2:8080"),
    ),
    (
        "a name, in capitals",
        "fd01::2",
        "Reviews.b.svc.cluster.local:9080",
        OURS,
        Ok("[fd01::2]:8080"),
    ),
    (
        "a port the service does not have",
        "10.1.1.2",
        "reviews.b.svc.cluster.local:1",
        OURS,
        Err(NodeRefusal::UnknownHost),
    ),
    (
        "a service it does not serve",
        "10.1.1.2",
        "zz-late.b.svc.cluster.local:1",
        OURS,
        Err(NodeRefusal::UnknownHost),
    ),
    (
        "an unknown name",
        "10.1.1.2",
        "example.com:80",
        OURS,
        Err(NodeRefusal::UnknownHost),
    ),
    (
        "a name that leads to a reserved port",
        "10.1.1.2",
        "proxyish.b.svc.cluster.local:15008",
        OURS,
        Err(NodeRefusal::ReservedPort),
    ),
];

/// A case's name, the peer, the source that it names, and the source and address that policies see.
type TunnelSourceCase = (
    &'static str,
    Identity,
    Option<&'static str>,
    Result<(ConnectionSource, Option<String>), NodeRefusal>,
);

fn identity(text: &str) -> Identity {
    text.parse().unwrap()
}

fn source_cases() -> Vec<TunnelSourceCase> {
    let named =
        |text: &str| std::rc::Rc::new(crate::authorization::PrincipalNames::new(identity(text)));
    vec![
        (
            "a gateway, for many",
            identity(OURS),
            None,
            Ok((ConnectionSource::Gateway, None)),
        ),
        (
            "a gateway, for one",
            identity(OURS),
            Some(APP),
            Ok((
                ConnectionSource::Forwarded(named(APP)),
                Some("10.1.9.9".to_string()),
            )),
        ),
        (
            "a gateway that names no source",
            identity(OURS),
            Some("spiffe://x"),
            Err(NodeRefusal::BadSource),
        ),
        (
            "no statement of a pod about a source is accepted",
            identity(APP),
            Some("spiffe://alpha.example/ns/b/sa/admin"),
            Ok((
                ConnectionSource::Proven(named(APP)),
                Some("10.7.7.7".to_string()),
            )),
        ),
        (
            "another tenant's gateway",
            identity("spiffe://beta.example/ns/canal-system/sa/gateway"),
            Some(APP),
            Err(NodeRefusal::Denied),
        ),
    ]
}

#[test]
fn an_inbound_tunnel_is_checked_in_the_order_of_ztunnel() {
    let (view, pod) = pod(p::OutboundTrafficPolicy::Deny);
    let policy = PodPolicy::renew(&PodPolicy::default(), view.tenant(&pod.tenant), &pod).unwrap();
    let decide = |view: &NodeSnapshot,
                  dialled: &str,
                  authority: &str,
                  peer: &Identity,
                  forwarded: Option<&str>| {
        let caller = TunnelClient {
            peer,
            // Neither the pod's nor the forwarded client's address.
            address: "10.7.7.7".parse().unwrap(),
            forwarded: (forwarded, Some("10.1.9.9:4711".parse().unwrap())),
        };
        decide_inbound(
            view,
            &pod,
            &policy,
            dialled.parse().unwrap(),
            &authority.parse().unwrap(),
            &caller,
        )
    };
    let check = |case: &str,
                 dialled: &str,
                 authority: &str,
                 peer: &Identity,
                 want: Result<&str, NodeRefusal>| {
        let got = decide(&view, dialled, authority, peer, None);
        assert_eq!(
            got.map(|a| a.target.to_string()).map_err(|no| no.refusal),
            want.map(str::to_string),
            "{case}"
        );
    };
    let ours = identity(OURS);
    for (case, dialled, authority, peer, want) in INBOUND_CASES {
        check(case, dialled, authority, &identity(peer), want);
    }
    for port in ILLEGAL_PORTS {
        check(
            "a reserved port",
            "10.1.1.2",
            &format!("10.1.1.2:{port}"),
            &ours,
            Err(NodeRefusal::ReservedPort),
        );
    }
    let none = decide(
        &NodeSnapshot::default(),
        "10.1.1.2",
        "10.1.1.2:80",
        &ours,
        None,
    );
    assert_eq!(
        none.map_err(|no| no.refusal),
        Err(NodeRefusal::TenantUnknown)
    );

    let asked = |peer: &Identity, forwarded: Option<&str>| {
        let got =
            decide(&view, "10.1.1.2", "10.1.1.2:8080", peer, forwarded).map_err(|no| no.refusal)?;
        Ok((got.query.source, got.query.address.map(|a| a.to_string())))
    };
    for (case, peer, forwarded, want) in source_cases() {
        assert_eq!(asked(&peer, forwarded), want, "{case}");
    }
}

/// Pods of a closed tenant neither connect nor accept connections, and pods of other tenants are
/// not affected.
#[test]
fn closed_tenant_is_refused_in_both_directions() {
    use canal_southbound_client::{Closure, ClosureCause, ResourceState};
    let (alpha, beta) = (
        "alpha".parse().unwrap(),
        "beta".parse::<canal_model::ids::TenantName>().unwrap(),
    );
    let pod_of = pod(p::OutboundTrafficPolicy::Passthrough).1;
    let resources: Vec<_> = state(p::OutboundTrafficPolicy::Passthrough)
        .into_iter()
        .map(std::sync::Arc::new)
        .collect();
    let closure = || Closure {
        cause: ClosureCause::ManifestMismatch,
        detail: String::new(),
    };
    for (closed, open) in [(beta, true), (alpha, false)] {
        let state = ResourceState::of_resources(resources.clone(), canal_model::ids::Generation(1))
            .closing([(closed.clone(), closure())].into());
        let view = NodeSnapshot::new(&state, &"n1".parse().unwrap());
        let policy =
            PodPolicy::renew(&PodPolicy::default(), view.tenant(&pod_of.tenant), &pod_of).unwrap();
        // A service, a pod, and an address outside the mesh.
        for to in ["10.96.0.1:9080", "10.1.7.7:80", "192.0.2.1:443"] {
            let decided = decide_outbound(&view, &pod_of, to.parse().unwrap());
            assert_eq!(
                decided.err(),
                (!open).then_some(NodeRefusal::TenantClosed),
                "to {to} with {closed} closed"
            );
        }
        let peer: Identity = "spiffe://alpha.example/ns/b/sa/c".parse().unwrap();
        let caller = TunnelClient {
            peer: &peer,
            address: "10.7.7.7".parse().unwrap(),
            forwarded: (None, None),
        };
        let authority = "10.1.1.2:8080".parse().unwrap();
        let tunnel = decide_inbound(
            &view,
            &pod_of,
            &policy,
            "10.1.1.2".parse().unwrap(),
            &authority,
            &caller,
        );
        assert_eq!(
            tunnel.err().map(|no| no.refusal),
            (!open).then_some(NodeRefusal::TenantClosed),
            "in with {closed} closed"
        );
        let plain = decide_plain(
            &policy,
            "10.1.1.2:80".parse().unwrap(),
            "10.7.7.7:1".parse().unwrap(),
            // No probe of the node.
            |_, _| false,
        );
        assert_eq!(
            plain.err().map(|no| no.refusal),
            (!open).then_some(NodeRefusal::TenantClosed),
            "plain with {closed} closed"
        );
        assert!(
            open || policy.guards_plaintext(),
            "connections without mTLS are looked at"
        );
    }
}

#[test]
fn plaintext_is_accepted_on_all_ports_except_the_proxys() {
    let (view, pod) = pod(p::OutboundTrafficPolicy::Deny);
    let policy = PodPolicy::renew(&PodPolicy::default(), view.tenant(&pod.tenant), &pod).unwrap();
    let decide = |policy: &PodPolicy, to: &str| {
        let got = decide_plain(
            policy,
            to.parse().unwrap(),
            "10.7.7.7:1".parse().unwrap(),
            |_, _| false,
        );
        got.map(|a| a.target.to_string()).map_err(|no| no.refusal)
    };
    assert_eq!(decide(&policy, "10.1.1.2:80"), Ok("10.1.1.2:80".into()));
    assert_eq!(
        // A dual-stack listener reports an IPv4 destination so.
        decide(&policy, "[::ffff:10.1.1.2]:80"),
        Ok("10.1.1.2:80".into())
    );
    for port in ILLEGAL_PORTS {
        assert_eq!(
            decide(&policy, &format!("10.1.1.2:{port}")),
            Err(NodeRefusal::ReservedPort)
        );
    }
    assert_eq!(
        decide(&PodPolicy::default(), "10.1.1.2:80"),
        Err(NodeRefusal::TenantUnknown)
    );
    // A connection that the kernel reports as the node's own probe.
    let probed = |to: &str| {
        let ends = |peer: SocketAddr, to: SocketAddr| {
            (peer.to_string(), to.to_string()) == ("10.7.7.7:1".into(), "10.1.1.2:80".into())
        };
        decide_plain(
            &PodPolicy::default(),
            to.parse().unwrap(),
            "[::ffff:10.7.7.7]:1".parse().unwrap(),
            ends,
        )
        .map(|a| a.query.source)
    };
    assert_eq!(
        probed("10.1.1.2:80"),
        Ok(ConnectionSource::Node),
        "a probe of the node needs no policies"
    );
    assert_eq!(
        probed("10.1.1.2:15001").map_err(|no| no.refusal),
        Err(NodeRefusal::ReservedPort)
    );
}

#[test]
fn of_two_claims_to_an_address_the_smaller_key_wins() {
    let (view, _) = pod(p::OutboundTrafficPolicy::Deny);
    let alpha = view.tenant(&"alpha".parse().unwrap()).unwrap();
    assert_eq!(
        alpha
            .service("10.96.0.1".parse().unwrap())
            .unwrap()
            .key
            .to_string(),
        "alpha/b/reviews"
    );
    assert_eq!(
        alpha
            .service("10.96.0.9".parse().unwrap())
            .unwrap()
            .key
            .to_string(),
        "alpha/b/zz-late"
    );
    assert!(
        view.tenant(&"beta".parse().unwrap()).is_none(),
        "a service of an unknown tenant is left out"
    );
    assert_eq!((alpha.service_count(), view.tenants().count()), (4, 1));
}

#[test]
fn a_service_with_gateway_addresses_is_reached_by_them_and_pods_by_the_tiers_own() {
    let (view, _) = pod(p::OutboundTrafficPolicy::Deny);
    let alpha = view.tenant(&"alpha".parse().unwrap()).unwrap();
    let check = |service: Option<&str>, want: &str| {
        let key = service.map(|s| s.parse().unwrap());
        let at: Vec<String> = alpha
            .entrances(key.as_ref())
            .iter()
            .map(|e| format!("{}={}", e.label, e.addresses[0]))
            .collect();
        assert_eq!(at.join(" "), want, "{service:?}");
    };
    check(Some("alpha/b/reviews"), "az1=10.9.1.2 az2=10.9.2.2");
    check(None, "az1=10.9.1.1 az2=10.9.2.1");
    check(Some("alpha/b/zz-late"), "gw1=10.1.255.1");
    for (ip, entrance, gateway) in [
        ("10.9.1.2", true, true),
        ("10.9.2.1", true, true),
        ("10.1.255.1", true, true),
        ("10.9.7.7", false, true),
        ("10.8.1.2", false, false),
    ] {
        let ip = ip.parse().unwrap();
        assert_eq!(
            (alpha.is_entrance(ip), alpha.is_gateway(ip)),
            (entrance, gateway),
            "{ip}"
        );
    }
}

//! A replica of the cloud tier: a connection belongs to the service whose address accepted it, and
//! endpoints are dialled with the tenant's mark.
//!
//! The tests need root for their network namespaces: one for the replica, and one for the pods of
//! each of two tenants. The two tenants' pods have the same addresses. There is no redirector: the
//! replica has the services' addresses itself.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use canal_gateway_engine::CloudTierConfig;
use canal_hbone::{
    HboneCounters, HboneError, HbonePool, HboneStream, OpenTunnel, PoolConfig, ServerConfig,
    TunnelTarget, serve,
};
use canal_identity::{ClientIdentity, ClientIdentityFactory, ServerIdentity};
use canal_model::authorization::{
    Attribute, AttributeMatch, AuthorizationAction, Clause, PolicyTarget,
};
use canal_model::ids::ServiceId;
use canal_model::program::*;
use canal_net::copy::{Meter, both};
use canal_net::sys::{self, ConnectOptions, ListenOptions, Netns, SourceAddresses};
use canal_runtime::drain;
use canal_runtime::metrics::Registry;
use canal_testing::netns::ProcessNetns;
use canal_testing::{TestCa, identity};
use canal_tls::TrustStore;
use canal_wire::tier;
use http::HeaderMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::LocalSet;

use crate::client::HttpClient;
use crate::fixture::{
    EngineSetup, GatewayFixture, TENANT, key, pod, prefix, route, service_with_id, tenant,
};
use crate::http2;
use crate::origin::{OriginServer, Peer};
use crate::policies::{clause, policy, rule};

/// The replica's underlay address, and its source address for IPv6.
const OWN: Ipv4Addr = Ipv4Addr::new(250, 1, 0, 1);
const OWN6: &str = "fdca:a1:0:250::fa01:1";
/// Address of a pod in each tenant, and of the client.
const POD: &str = "10.1.1.2";
const POD6: &str = "fd77::2";
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 1, 1, 9);
const BETA: &str = "beta";
/// Service IDs: alpha's web, beta's web, alpha's other, the tier's own service in alpha, alpha's
/// Gateway. The ID 77 belongs to no service.
const WEB: [u32; 2] = [7, 8];
const OTHER: u32 = 9;
const TIER: u32 = 5;
const GATEWAY: u32 = 11;

/// Three network namespaces: the replica's, and one for the pods of each tenant.
struct TierNetns {
    replica: ProcessNetns,
    pods: [ProcessNetns; 2],
}

impl TierNetns {
    fn new() -> Self {
        let net = Self {
            replica: ProcessNetns::new(),
            pods: [ProcessNetns::new(), ProcessNetns::new()],
        };
        let replica = &net.replica;
        // The client's socket is opened in the replica's namespace, so its address is there too.
        for own in [format!("{OWN}/32"), format!("{CLIENT}/32")] {
            replica.ip(&format!("addr add {own} dev lo"));
        }
        replica.ip(&format!("addr add {OWN6}/128 dev lo nodad"));
        // 77 is an ID that no service has.
        for id in [WEB[0], WEB[1], OTHER, TIER, GATEWAY, 77] {
            replica.ip(&format!("addr add 240.0.0.{id}/32 dev lo"));
            replica.ip(&format!("addr add fdca:a1:0:240::{id}/128 dev lo nodad"));
        }
        for (n, (part, pods)) in ["a", "b"].into_iter().zip(&net.pods).enumerate() {
            replica.ip(&format!(
                "link add {part}0 type veth peer name {part}1 netns {}",
                pods.pid()
            ));
            replica.ip(&format!("link set {part}0 up"));
            pods.ip(&format!("link set {part}1 up"));
            pods.ip(&format!("addr add {POD}/32 dev {part}1"));
            pods.ip(&format!("addr add {POD6}/128 dev {part}1 nodad"));
            pods.ip(&format!("route add {OWN}/32 dev {part}1"));
            // Unlike ARP, neighbor discovery responds only for addresses of the interface that
            // received the query.
            replica.ip(&format!("addr add fe80::1/64 dev {part}0 nodad"));
            pods.ip(&format!("route add {OWN6}/128 via fe80::1 dev {part}1"));
            // The replica marks a connection to an endpoint with the tenant's VNI; the mark
            // selects the table, because both tenants use the same pod address.
            let vni = n + 1;
            // Each VNI has a routing table of its own; 101 and 102 are in no other use.
            replica.ip(&format!("rule add fwmark {vni} lookup {}", 100 + vni));
            replica.ip(&format!("-6 rule add fwmark {vni} lookup {}", 100 + vni));
            replica.ip(&format!(
                "route add {POD}/32 dev {part}0 table {}",
                100 + vni
            ));
            replica.ip(&format!(
                "route add {POD6}/128 dev {part}0 table {}",
                100 + vni
            ));
        }
        net
    }

    /// Opens the namespace of a tenant's pods.
    fn open_pods(&self, tenant: usize) -> Netns {
        Netns::open(self.pods[tenant].path()).unwrap()
    }

    /// Runs a test in the replica's namespace; threads that it creates stay in it.
    fn run<F: Future<Output = ()>>(&self, test: impl FnOnce() -> F) {
        let run = || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap();
            let _inside = runtime.enter();
            LocalSet::new().block_on(&runtime, test());
        };
        Netns::open(self.replica.path())
            .unwrap()
            .enter(run)
            .unwrap();
    }
}

/// The replica with the configuration of both tenants.
struct ReplicaFixture {
    fixture: GatewayFixture,
    ca: Arc<[TestCa; 2]>,
}

fn service_address(id: u32, port: u16) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::new(240, 0, 0, id as u8).into(), port)
}

fn tunnelled(mut workload: Workload, tunnel: TunnelProtocol) -> Resource {
    workload.tunnel = tunnel;
    Resource::Workload(workload)
}

impl ReplicaFixture {
    /// Starts the replica; both tenants' pods have the address `pod_at`.
    fn new(tunnel: TunnelProtocol, pod_at: SocketAddr) -> Self {
        let ca = Arc::new([TestCa::new(TENANT), TestCa::new(BETA)]);
        let issuers = ca.clone();
        let issue = move |id: &canal_model::identity::Identity| {
            issuers[usize::from(id.trust_domain.as_str() == "beta.example")].credential(id)
        };
        let keyring =
            ClientIdentityFactory::of(Arc::new(issue), None, TrustStore::new(&Registry::new()));
        let sources = SourceAddresses {
            v4: Some(OWN),
            v6: Some(OWN6.parse().unwrap()),
        };
        let tier = CloudTierConfig {
            // The services' own port: the tests have no program that steers sessions to port
            // 15009.
            plain: "[::]:80".parse().unwrap(),
            sources,
        };
        let hbone = vec!["[::]:15008".parse().unwrap()];
        let fixture = GatewayFixture::new(
            EngineSetup {
                hbone,
                keyring: Some(keyring),
                tier: Some(tier),
                ..EngineSetup::default()
            },
            &[],
        );
        let http = |port| [(port, AppProtocol::Http1)];
        // The tier's service in the tenant, at whose address a node reaches pods without a
        // service.
        let mut own = service_with_id(TENANT, "gateway", TIER, "10.96.0.5", &[]);
        if let Resource::Service(service) = &mut own {
            service.key = "alpha/canal-system/gateway".parse().unwrap();
        }
        let address = GatewayAddress {
            service: key(TENANT, "web"),
            id: ServiceId::new(WEB[0]).unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec!["10.250.32.1".parse().unwrap()],
            network: None,
            open: true,
        };
        fixture.apply(vec![
            tenant(BETA, 2),
            service_with_id(TENANT, "web", WEB[0], "10.96.0.1", &http(80)),
            service_with_id(BETA, "web", WEB[1], "10.96.0.1", &http(80)),
            service_with_id(TENANT, "other", OTHER, "10.96.0.2", &http(90)),
            own,
            Resource::Address(address),
            tunnelled(pod(TENANT, "web-0", pod_at, "web"), tunnel),
            tunnelled(pod(BETA, "web-0", pod_at, "web"), tunnel),
            // Makes the client's address known as a workload; the gateway connects to no port of
            // it.
            Resource::Workload(pod(
                TENANT,
                "client",
                SocketAddr::new(CLIENT.into(), 1),
                "other",
            )),
        ]);
        Self { fixture, ca }
    }

    /// Opens a tunnel through a service's address, as a pod of `own`, to a gateway of `tenant`.
    async fn open(
        &self,
        own: &str,
        tenant: &str,
        id: u32,
        authority: &str,
    ) -> Result<OpenTunnel, HboneError> {
        let me = identity(&format!("spiffe://{own}.example/ns/default/sa/client"));
        let gateway = identity(&format!(
            "spiffe://{tenant}.example/ns/canal-system/sa/gateway"
        ));
        let target = TunnelTarget {
            source: ClientIdentity::new(self.ca[usize::from(own == BETA)].credential(&me)),
            expected: Arc::new([gateway]),
            address: service_address(id, 15008),
            netns: None,
            mark: None,
        };
        let registry = Registry::new();
        let pool = HbonePool::new(
            PoolConfig::default(),
            HboneCounters::new(&registry, &registry.shard()),
        );
        pool.open(&target, &authority.parse().unwrap(), HeaderMap::new())
            .await
    }

    async fn get(&self, own: &str, id: u32, authority: &str) -> Result<String, HboneError> {
        let stream: HboneStream = self.open(own, own, id, authority).await?.stream;
        let mut client = HttpClient {
            stream,
            buffer: Vec::new(),
        };
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        Ok(client
            .answer()
            .await
            .map_or_else(|| "no answer".into(), |a| a.text()))
    }
}

/// Starts a pod in each tenant's namespace that responds with the tenant's name and the address
/// from which it is dialled.
async fn origins(net: &TierNetns, at: SocketAddr) -> [OriginServer; 2] {
    let answer = |name: &'static str| {
        move |mut peer: Peer| async move {
            let from = peer.stream.peer_addr().unwrap().ip();
            while peer.request().await.is_some() {
                let text = format!("{name} {from}");
                peer.write(
                    format!(
                        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}",
                        text.len()
                    )
                    .as_bytes(),
                )
                .await;
            }
        }
    };
    let listen =
        |tenant| sys::listen(Some(&net.open_pods(tenant)), at, &ListenOptions::default()).unwrap();
    [
        OriginServer::on(listen(0), answer(TENANT)),
        OriginServer::on(listen(1), answer(BETA)),
    ]
}

/// Sends a GET over a plain connection to a service's address, from the client's address.
async fn plain(to: SocketAddr) -> std::io::Result<String> {
    let answer = plain_answer(to, "web").await?;
    Ok(answer.rsplit("\r\n").next().unwrap_or("").to_string())
}

/// Sends a GET for a host, and returns the whole answer.
async fn plain_answer(to: SocketAddr, host: &str) -> std::io::Result<String> {
    answer_with_headers(to, host, "").await
}

/// `headers` are whole lines.
async fn answer_with_headers(to: SocketAddr, host: &str, headers: &str) -> std::io::Result<String> {
    let options = ConnectOptions {
        bind: Some(SocketAddr::new(CLIENT.into(), 0)),
        ..ConnectOptions::default()
    };
    let options = if to.is_ipv4() {
        options
    } else {
        ConnectOptions::default()
    };
    let mut stream = sys::connect(None, to, &options)
        .await
        .map_err(|e| std::io::Error::other(e.to_string()))?;
    // A reset is reported only once, by the write if it came before the write.
    let head = format!("GET / HTTP/1.1\r\nHost: {host}\r\n{headers}Connection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text).await?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Alpha's Gateway: a host with a route to alpha's web, and a closed listener.
fn gateway() -> Vec<Resource> {
    let listener = |name: &str, host: &str, is_open| IngressListener {
        filters: Vec::new(),
        name: name.to_owned(),
        port: 80,
        host: Some(HostMatch::Suffix(host.to_owned())),
        is_open,
        relay: None,
        certificates: None,
        virtual_hosts: vec![VirtualHost {
            host: Some(HostMatch::Exact("shop.example.com".to_owned())),
            routes: [RouteObject {
                namespace: "default".parse().unwrap(),
                name: "shop".parse().unwrap(),
                kind: "VirtualService".into(),
            }]
            .into(),
        }],
    };
    let backend = Backend {
        weight: 1,
        filters: None,
        target: BackendTarget::Service {
            service: key(TENANT, "web"),
            port: 80,
            subset: Labels::new(),
        },
    };
    let to_web = RouteAction::Split(vec![backend]);
    vec![
        Resource::Ingress(IngressGateway {
            trusted_proxies: 0,
            proxied_ports: BTreeSet::new(),
            key: key(TENANT, "public.gateway"),
            id: ServiceId::new(GATEWAY).unwrap(),
            client_validations: Vec::new(),
            listeners: vec![
                listener("open", ".example.com", true),
                listener("closed", ".closed.example.com", false),
            ],
        }),
        route("public.gateway", "shop", 0, prefix("/"), to_web),
    ]
}

#[test]
fn clients_of_a_gateway_are_routed_by_host_and_have_no_name() {
    let net = TierNetns::new();
    net.run(|| async {
        let at = SocketAddr::new(POD.parse().unwrap(), 8080);
        let _origins = origins(&net, at).await;
        let replica = ReplicaFixture::new(TunnelProtocol::None, at);
        replica.fixture.apply(gateway());
        let to = service_address(GATEWAY, 80);
        let answer = plain_answer(to, "SHOP.example.com:80").await.unwrap();
        assert!(answer.ends_with(&format!("{TENANT} {OWN}")), "{answer}");
        for host in [
            "other.example.com",
            "shop.closed.example.com",
            "shop.test",
            "web",
        ] {
            let answer = plain_answer(to, host).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 404 "), "{host}: {answer}");
        }
        // The client has the address of a pod, but is on another network.
        let labels = [
            "tenant=\"alpha\"",
            "source_workload=\"unknown\"",
            "response_code=\"200\"",
        ];
        let fixture = &replica.fixture;
        fixture.until("istio_requests_total", &labels, 1.0).await;
        let named = ["source_workload=\"client\""];
        assert_eq!(fixture.metric("istio_requests_total", &named), 0.0);
        // A tunnel would reach it from inside the tenant.
        assert!(replica.get(TENANT, GATEWAY, "10.96.0.1:80").await.is_err());
        let reason = ["reason=\"hbone_from_outside\""];
        fixture
            .until("canal_gateway_refused_connections_total", &reason, 1.0)
            .await;
    });
}

/// Gateway API: a listener for HTTP takes gRPC clients, which begin with HTTP/2 at once.
#[test]
fn grpc_clients_of_a_gateway_are_routed_and_refused_by_host() {
    let net = TierNetns::new();
    net.run(|| async {
        let at = SocketAddr::new(POD.parse().unwrap(), 8080);
        let _origins = origins(&net, at).await;
        let replica = ReplicaFixture::new(TunnelProtocol::None, at);
        replica.fixture.apply(gateway());
        let client = http2::connect_to(service_address(GATEWAY, 80)).await;
        for (host, expected) in [
            ("shop.example.com", None),
            ("other.example.com", Some("12")),
            ("shop.closed.example.com", Some("12")),
        ] {
            let request = http::Request::builder()
                .method("POST")
                .uri(format!("http://{host}/shop.Cart/Add"))
                .header("content-type", "application/grpc")
                .body(())
                .unwrap();
            let mut client = client.clone().ready().await.unwrap();
            let (response, _) = client.send_request(request, true).unwrap();
            let (parts, body) = response.await.unwrap().into_parts();
            let status = parts.headers.get("grpc-status");
            let status = status.map(|status| status.to_str().unwrap());
            assert_eq!((parts.status.as_u16(), status), (200, expected), "{host}");
            assert_eq!(body.is_end_stream(), expected.is_some(), "{host}");
        }
    });
}

#[test]
fn policies_that_select_a_gateway_or_its_namespace_apply_at_it() {
    let net = TierNetns::new();
    net.run(|| async {
        let at = SocketAddr::new(POD.parse().unwrap(), 8080);
        let _origins = origins(&net, at).await;
        let replica = ReplicaFixture::new(TunnelProtocol::None, at);
        let fixture = &replica.fixture;
        fixture.apply(gateway());
        let to = service_address(GATEWAY, 80);
        let denies = |namespace: &str, gateway: Option<&str>| {
            let all = vec![rule(vec![clause(Attribute::Path, &["/*"])])];
            let mut denies = policy("gate", AuthorizationAction::Deny, all);
            let name = "gateway.networking.k8s.io/gateway-name";
            if let Resource::Authorization(policy) = &mut denies {
                let labels = gateway.map(|gateway| (name.to_owned(), gateway.to_owned()));
                policy.target = PolicyTarget::Workloads {
                    namespace: Some(namespace.parse().unwrap()),
                    labels: labels.into_iter().collect(),
                };
            }
            denies
        };
        for (namespace, gateway, want) in [
            ("default", Some("public"), "HTTP/1.1 403 "),
            ("default", Some("other"), "HTTP/1.1 200 "),
            ("shop", Some("public"), "HTTP/1.1 200 "),
            ("default", None, "HTTP/1.1 403 "),
            ("shop", None, "HTTP/1.1 200 "),
        ] {
            fixture.apply(vec![denies(namespace, gateway)]);
            let answer = plain_answer(to, "shop.example.com").await.unwrap();
            assert!(
                answer.starts_with(want),
                "{namespace} {gateway:?}: {answer}"
            );
        }
        // A policy of a root namespace names the Gateways of a class one by one.
        for (name, want) in [
            ("public.gateway", "HTTP/1.1 403 "),
            ("other.gateway", "HTTP/1.1 200 "),
        ] {
            let mut of_gateway = denies("default", None);
            if let Resource::Authorization(policy) = &mut of_gateway {
                policy.target = PolicyTarget::Service(key(TENANT, name));
            }
            fixture.apply(vec![of_gateway]);
            let answer = plain_answer(to, "shop.example.com").await.unwrap();
            assert!(answer.starts_with(want), "{name}: {answer}");
        }
    });
}

#[test]
fn remote_addresses_are_those_before_trusted_proxies() {
    let net = TierNetns::new();
    net.run(|| async {
        let at = SocketAddr::new(POD.parse().unwrap(), 8080);
        let _origins = origins(&net, at).await;
        let replica = ReplicaFixture::new(TunnelProtocol::None, at);
        let to = service_address(GATEWAY, 80);
        let offices = Clause {
            attribute: Attribute::RemoteAddress,
            any: vec![AttributeMatch::Network("203.0.113.0/24".parse().unwrap())],
            none: vec![],
        };
        let mut allows = policy(
            "offices",
            AuthorizationAction::Allow,
            vec![rule(vec![offices])],
        );
        if let Resource::Authorization(policy) = &mut allows {
            policy.target = PolicyTarget::Service(key(TENANT, "public.gateway"));
        }
        let office = "203.0.113.9";
        // The client claims to be in the office, and its proxy appends its true address.
        let forged = "203.0.113.9, 198.51.100.4";
        // With n trusted proxies the n-th value from the end counts. If there is no such address,
        // it is unknown, and the policy allows nothing.
        for (proxies, values, want) in [
            (0, &[office][..], 403),
            (1, &[office], 200),
            (1, &[forged], 403),
            (1, &["nobody"], 403),
            (1, &[], 403),
            (2, &[forged], 200),
            (2, &[office], 403),
            // Several lines are one list.
            (1, &[office, "198.51.100.4"], 403),
            (2, &[office, "198.51.100.4"], 200),
        ] {
            let mut resources = gateway();
            for resource in &mut resources {
                if let Resource::Ingress(gateway) = resource {
                    gateway.trusted_proxies = proxies;
                }
            }
            resources.push(allows.clone());
            replica.fixture.apply(resources);
            let lines = values.iter().map(|it| format!("X-Forwarded-For: {it}\r\n"));
            let lines: String = lines.collect();
            let answer = answer_with_headers(to, "shop.example.com", &lines).await;
            let answer = answer.unwrap();
            let expected = format!("HTTP/1.1 {want} ");
            assert!(answer.starts_with(&expected), "{proxies} {lines}: {answer}");
            let mut request = http::Request::get("http://shop.example.com/");
            for value in values {
                request = request.header("x-forwarded-for", *value);
            }
            let client = http2::connect_to(to).await;
            let mut client = client.ready().await.unwrap();
            let sent = client.send_request(request.body(()).unwrap(), true);
            let status = sent.unwrap().0.await.unwrap().status();
            assert_eq!(status.as_u16(), want, "HTTP/2: {proxies} {lines}");
        }
    });
}

#[test]
fn marks_distinguish_overlapping_endpoints_of_plain_connections() {
    for (at, own) in [(POD, OWN.to_string()), (POD6, OWN6.to_string())] {
        let net = TierNetns::new();
        net.run(|| async {
            let at = SocketAddr::new(at.parse().unwrap(), 8080);
            let origins = origins(&net, at).await;
            let replica = ReplicaFixture::new(TunnelProtocol::None, at);
            for _ in 0..20 {
                for (n, name) in [TENANT, BETA].into_iter().enumerate() {
                    assert_eq!(
                        plain(service_address(WEB[n], 80)).await.unwrap(),
                        format!("{name} {own}")
                    );
                    let v6 = format!("[fdca:a1:0:240::{}]:80", WEB[n]).parse().unwrap();
                    assert_eq!(plain(v6).await.unwrap(), format!("{name} {own}"));
                }
            }
            assert_eq!(
                origins.map(|o| o.connections()),
                [1, 1],
                "connections are pooled by tenant"
            );
            let labels = [
                "tenant=\"alpha\"",
                "source_workload=\"client\"",
                "connection_security_policy=\"none\"",
            ];
            replica
                .fixture
                .until("istio_requests_total", &labels, 20.0)
                .await;
        });
    }
}

#[test]
fn plain_connections_that_are_no_services_are_reset_and_counted() {
    let net = TierNetns::new();
    net.run(|| async {
        let replica = ReplicaFixture::new(
            TunnelProtocol::None,
            SocketAddr::new(POD.parse().unwrap(), 8080),
        );
        for (to, reason) in [
            (service_address(OTHER, 80), "unknown_port"),
            (service_address(TIER, 80), "unknown_port"),
            (service_address(77, 80), "unknown_service"),
            (SocketAddr::new(OWN.into(), 80), "no_service_address"),
        ] {
            // The reset may overtake the end of the connect, and the request.
            let error = plain(to).await.expect_err(reason);
            assert!(
                error.to_string().contains("reset by peer"),
                "{reason}: {error}"
            );
            replica
                .fixture
                .until(
                    "canal_gateway_refused_connections_total",
                    &[&format!("reason=\"{reason}\"")],
                    1.0,
                )
                .await;
        }
        assert_eq!(replica.fixture.metric("istio_requests_total", &[]), 0.0);
    });
}

#[test]
fn tunnels_reach_only_the_service_of_their_listener() {
    let net = TierNetns::new();
    net.run(|| async {
        let at = SocketAddr::new(POD.parse().unwrap(), 8080);
        let _origins = origins(&net, at).await;
        let replica = ReplicaFixture::new(TunnelProtocol::None, at);
        // By address, name, gateway address and pod: all of them lead to the same service.
        for (id, authority) in [
            (WEB[0], "10.96.0.1:80"),
            (WEB[0], "web.default.svc.cluster.local:80"),
            (WEB[0], "10.250.32.1:80"),
            (WEB[0], "10.1.1.2:8080"),
            (TIER, "10.1.1.2:8080"),
        ] {
            assert_eq!(
                replica.get(TENANT, id, authority).await.unwrap(),
                format!("{TENANT} {OWN}"),
                "{authority}"
            );
        }
        assert_eq!(
            replica.get(BETA, WEB[1], "10.96.0.1:80").await.unwrap(),
            format!("{BETA} {OWN}")
        );
        // The counters are cumulative, hence the running numbers.
        for (id, authority, status, reason, count) in [
            (WEB[0], "10.96.0.2:90", 400, "wrong_service", 1.0),
            (
                WEB[0],
                "other.default.svc.cluster.local:90",
                400,
                "wrong_service",
                2.0,
            ),
            (WEB[0], "10.1.1.9:1", 400, "wrong_service", 3.0),
            (WEB[0], "10.1.1.2:9090", 400, "wrong_service", 4.0),
            (WEB[0], "192.0.2.1:80", 400, "wrong_service", 5.0),
            (OTHER, "10.96.0.1:80", 400, "wrong_service", 6.0),
            (OTHER, "10.250.32.1:80", 400, "wrong_service", 7.0),
            (TIER, "10.96.0.1:80", 400, "wrong_service", 8.0),
            (
                TIER,
                "web.default.svc.cluster.local:80",
                400,
                "wrong_service",
                9.0,
            ),
            (WEB[0], "10.96.0.1:81", 503, "unknown_port", 1.0),
        ] {
            match replica.get(TENANT, id, authority).await {
                Err(HboneError::Refused { status: actual, .. }) => {
                    assert_eq!(actual, status, "{authority}")
                }
                other => panic!("{authority}: {other:?}"),
            }
            replica
                .fixture
                .until(
                    "canal_gateway_refused_connects_total",
                    &[&format!("reason=\"{reason}\"")],
                    count,
                )
                .await;
        }
    });
}

#[test]
fn a_foreign_tenant_is_refused_at_the_right_address_whatever_it_expects() {
    let net = TierNetns::new();
    net.run(|| async {
        let replica = ReplicaFixture::new(
            TunnelProtocol::None,
            SocketAddr::new(POD.parse().unwrap(), 8080),
        );
        // A client that expects its own tenant's gateway refuses alpha's; one that expects alpha's
        // gateway does not trust its CA. Neither is served.
        for expected in [TENANT, BETA] {
            let error = replica
                .open(BETA, expected, WEB[0], "10.96.0.1:80")
                .await
                .expect_err(expected);
            assert!(
                matches!(error, HboneError::Tls { .. } | HboneError::Http2 { .. }),
                "{error}"
            );
        }
        replica
            .fixture
            // A prefix: which side refuses first decides the rest of the label.
            .until(
                "canal_gateway_refused_connections_total",
                &["reason=\"tls"],
                2.0,
            )
            .await;
        // The address of ID 77 exists, but no service has it.
        let error = replica.open(TENANT, TENANT, 77, "10.96.0.1:80").await;
        assert!(error.is_err());
        replica
            .fixture
            .until(
                "canal_gateway_refused_connections_total",
                &["reason=\"unknown_service\""],
                1.0,
            )
            .await;
        assert_eq!(
            replica
                .fixture
                .metric("canal_gateway_refused_connects_total", &[]),
            0.0,
            "no CONNECT was refused"
        );
    });
}

/// Starts a node's HBONE server in a tenant's namespace, for the pod there.
fn node(net: &TierNetns, tenant: usize, ca: &TestCa, name: &str, origin: SocketAddr) {
    let inside = Arc::new(net.open_pods(tenant));
    let listener = sys::listen(
        Some(&inside),
        SocketAddr::new(origin.ip(), 15008),
        &ListenOptions::default(),
    )
    .unwrap();
    let id = identity(&format!("spiffe://{name}.example/ns/default/sa/web"));
    let server = ServerIdentity::new(name.parse().unwrap(), ca.credential(&id));
    let registry = Registry::new();
    let counters = HboneCounters::new(&registry, &registry.shard());
    tokio::task::spawn_local(async move {
        // The trigger is held, because its drop forces the drain.
        let (_trigger, drain) = drain::tree();
        while let Ok((stream, _)) = listener.accept().await {
            let (server, counters, drain, inside) = (
                server.clone(),
                counters.clone(),
                drain.clone(),
                inside.clone(),
            );
            tokio::task::spawn_local(async move {
                // The replica's side reports a failed handshake.
                let Ok((stream, peer)) = server.accept(stream).await else {
                    return;
                };
                let connect = move |asked: canal_hbone::ConnectResult| {
                    let incoming = asked.unwrap();
                    let inside = inside.clone();
                    tokio::task::spawn_local(async move {
                        let up: Result<TcpStream, _> =
                            sys::connect(Some(&inside), origin, &ConnectOptions::default()).await;
                        let Ok(mut up) = up else {
                            return incoming.refuse(503);
                        };
                        let mut down = incoming.accept(HeaderMap::new()).unwrap();
                        both(&mut down, &mut up, &Meter::default(), None).await;
                    });
                };
                // The tests see the end of a connection at their own side.
                let _ = serve(
                    stream,
                    peer,
                    &ServerConfig::default(),
                    &counters,
                    drain,
                    connect,
                )
                .await;
            });
        }
    });
}

#[test]
fn marks_distinguish_tunnels_to_overlapping_nodes() {
    let net = TierNetns::new();
    net.run(|| async {
        let at = SocketAddr::new(POD.parse().unwrap(), 8080);
        let origins = origins(&net, at).await;
        let replica = ReplicaFixture::new(TunnelProtocol::Hbone, at);
        node(&net, 0, &replica.ca[0], TENANT, at);
        node(&net, 1, &replica.ca[1], BETA, at);
        for _ in 0..5 {
            for (n, name) in [TENANT, BETA].into_iter().enumerate() {
                // The origin is dialled by its own node, so it sees the pod's address.
                assert_eq!(
                    replica.get(name, WEB[n], "10.96.0.1:80").await.unwrap(),
                    format!("{name} {POD}")
                );
            }
        }
        assert_eq!(
            origins.map(|o| o.connections()),
            [1, 1],
            "tunnels are pooled by tenant"
        );
    });
}

/// Checks that a client that is drained because its buckets move, and because the replica drains,
/// loses no request. Streams of a tunnel are drained together with its connection.
async fn drain_for_both_reasons(replica: &ReplicaFixture, web: ServiceId) {
    let request = b"GET / HTTP/1.1\r\nHost: web\r\n\r\n";
    let tunnel = replica
        .open(TENANT, TENANT, WEB[0], "10.96.0.1:80")
        .await
        .unwrap()
        .stream;
    let mut tunnel = HttpClient {
        stream: tunnel,
        buffer: Vec::new(),
    };
    tunnel.send(request).await;
    assert_eq!(
        tunnel.answer().await.unwrap().field("connection"),
        None,
        "it was accepted after the move"
    );
    replica.fixture.engine.set_soft_drain(true);
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    replica.fixture.engine.rebalance(web, u128::MAX, 0);
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    tunnel.send(request).await;
    let answer = tunnel.answer().await.unwrap();
    assert_eq!(
        (answer.status, answer.field("connection")),
        (200, Some("close")),
        "the tunnel stays open until it ends"
    );
}

/// When another replica becomes the head of some buckets, only connections of those buckets are
/// drained, and no request is lost.
#[test]
fn only_connections_of_moved_buckets_are_asked_to_leave() {
    let net = TierNetns::new();
    net.run(|| async {
        let at = SocketAddr::new(POD.parse().unwrap(), 8080);
        let _origins = origins(&net, at).await;
        let replica = ReplicaFixture::new(TunnelProtocol::None, at);
        let (web, to) = (ServiceId::new(WEB[0]).unwrap(), service_address(WEB[0], 80));
        let request = b"GET / HTTP/1.1\r\nHost: web\r\n\r\n";
        let mut clients = Vec::new();
        for n in 0..24 {
            // 16 connections to the service that moves, and 8 to one that does not.
            let (address, port) = if n < 16 {
                (to, 80)
            } else {
                (service_address(WEB[1], 80), 80)
            };
            let options = ConnectOptions {
                bind: Some(SocketAddr::new(CLIENT.into(), 0)),
                ..ConnectOptions::default()
            };
            let stream = sys::connect(None, address, &options).await.unwrap();
            let bucket = tier::bucket(stream.local_addr().unwrap(), port, web);
            // The call of `rebalance` below moves buckets 0 to 63 of WEB[0], one by each bit.
            clients.push((
                n < 16 && bucket < 64,
                HttpClient {
                    stream,
                    buffer: Vec::new(),
                },
            ));
        }
        let tunnel = replica
            .open(TENANT, TENANT, WEB[0], "10.96.0.1:80")
            .await
            .unwrap()
            .stream;
        let mut tunnel = HttpClient {
            stream: tunnel,
            buffer: Vec::new(),
        };
        for (_, client) in &mut clients {
            client.send(request).await;
            assert_eq!(client.answer().await.unwrap().field("connection"), None);
        }
        tunnel.send(request).await;
        assert_eq!(tunnel.answer().await.unwrap().field("connection"), None);
        replica
            .fixture
            .engine
            .rebalance(web, u128::from(u64::MAX), 0);
        let moved = clients.iter().filter(|(moves, _)| *moves).count();
        // The client ports decide the buckets, so a test with all or none of them would show
        // nothing.
        assert!(moved > 0 && moved < 16, "{moved}");
        replica
            .fixture
            .until(
                "canal_gateway_rebalanced_connections_total",
                &[],
                moved as f64,
            )
            .await;
        // Another connection that is drained by mistake would be counted within this time.
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        let asked = replica
            .fixture
            .metric("canal_gateway_rebalanced_connections_total", &[])
            - moved as f64;
        assert!(
            asked == 0.0 || asked == 1.0,
            "the tunnel's connection may be among them: {asked}"
        );
        for (moves, client) in &mut clients {
            client.send(request).await;
            let answer = client.answer().await.unwrap();
            assert_eq!(
                (answer.status, answer.field("connection")),
                (200, moves.then_some("close"))
            );
        }
        // A draining replica loses its buckets at the same moment. A client that is drained for
        // both reasons loses no request either. Streams of a tunnel are drained together with its
        // connection.
        drop((clients, tunnel));
        drain_for_both_reasons(&replica, web).await;
    });
}

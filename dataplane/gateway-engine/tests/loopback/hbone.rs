//! The mesh's own path: a node's tunnel into the gateway and a tunnel to a node, both over mTLS,
//! with `canal_hbone` at the other ends.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use canal_gateway_engine::GatewayTimeouts;
use canal_hbone::exchanges::reporting;
use canal_hbone::{
    CloseReport, ConnectAuthority, HboneCounters, HboneError, HbonePool, HboneStream, OpenTunnel,
    PoolConfig, ServerConfig, TunnelTarget, serve,
};
use canal_identity::{ClientIdentity, ClientIdentityFactory, ServerIdentity};
use canal_model::program::*;
use canal_net::copy::{Meter, both};
use canal_net::sys::SourceAddresses;
use canal_runtime::drain;
use canal_runtime::metrics::Registry;
use canal_testing::{TestCa, identity};
use canal_timing::timed;
use canal_tls::TrustStore;
use http::HeaderMap;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::LocalSet;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, TENANT, pod, service, tenant, until};
use crate::http2;
use crate::origin::{OriginServer, Peer, pattern};

/// Returns a loopback network for this test alone: 127.a.b.0/24.
fn network() -> [u8; 3] {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = std::process::id()
        .wrapping_mul(31)
        .wrapping_add(NEXT.fetch_add(1, Ordering::SeqCst));
    [127, 64 + (n >> 8) as u8 % 128, n as u8]
}

/// Host number of the clients.
pub(crate) const CLIENT: u8 = 99;

/// Two tenants with a gateway address and a CA each, and ten with a gateway address.
pub(crate) struct LoopbackMesh {
    pub(crate) fixture: GatewayFixture,
    pub(crate) trust: TrustStore,
    net: [u8; 3],
    ca: Arc<[TestCa; 2]>,
    pub(crate) gateway: [SocketAddr; 2],
    /// Gateway addresses of ten further tenants, at which connections are accepted.
    pub(crate) others: Vec<SocketAddr>,
    pub(crate) pool: HbonePool,
}

impl LoopbackMesh {
    pub(crate) fn address(&self, host: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(self.net[0], self.net[1], self.net[2], host))
    }

    pub(crate) fn new(setup: EngineSetup) -> Self {
        let net = network();
        let at = |host| IpAddr::V4(Ipv4Addr::new(net[0], net[1], net[2], host));
        let ca = Arc::new([TestCa::new("alpha"), TestCa::new("beta")]);
        let issuers = ca.clone();
        let trust = TrustStore::new(&Registry::new());
        let issue = move |id: &canal_model::identity::Identity| {
            issuers[usize::from(id.trust_domain.as_str() == "beta.example")].credential(id)
        };
        let keyring = ClientIdentityFactory::of(Arc::new(issue), None, trust.clone());
        // The third address is no tenant's. Those from 101 on belong to ten further tenants.
        let hbone = [1, 2, 3]
            .into_iter()
            .chain(101..=110)
            .map(|host| SocketAddr::new(at(host), 0))
            .collect();
        let fixture = GatewayFixture::new(
            EngineSetup {
                hbone,
                keyring: Some(keyring),
                ..setup
            },
            &[],
        );
        let bound = fixture.engine.hbone_addresses();
        let gateway = |tenant: &str, host| {
            Resource::GatewayReplica(GatewayReplica {
                tenant: tenant.parse().unwrap(),
                replica: "gw-1".parse().unwrap(),
                az: "az1".parse().unwrap(),
                addresses: vec![at(host)],
                draining: false,
            })
        };
        let others = (101..=110).flat_map(|host| {
            let name = format!("t{host}");
            [tenant(&name, host.into()), gateway(&name, host)]
        });
        let resources = [tenant("beta", 2), gateway(TENANT, 1), gateway("beta", 2)]
            .into_iter()
            .chain(others);
        fixture.apply(resources.collect());
        let registry = Registry::new();
        let sources = SourceAddresses {
            v4: Some(Ipv4Addr::new(net[0], net[1], net[2], CLIENT)),
            v6: None,
        };
        let config = PoolConfig {
            sources,
            ..PoolConfig::default()
        };
        let pool = HbonePool::new(config, HboneCounters::new(&registry, &registry.shard()));
        Self {
            fixture,
            trust,
            net,
            ca,
            gateway: [bound[0], bound[1]],
            others: bound[3..].to_vec(),
            pool,
        }
    }

    /// Creates counters for a separate pool.
    pub(crate) fn counters(&self) -> HboneCounters {
        let registry = Registry::new();
        HboneCounters::new(&registry, &registry.shard())
    }

    pub(crate) fn ca(&self, tenant: &str) -> &TestCa {
        &self.ca[usize::from(tenant == "beta")]
    }

    /// Returns the target of `tenant`'s gateway address, for the pod `client` of tenant `own`.
    pub(crate) fn target(&self, own: &str, tenant: &str) -> TunnelTarget {
        let id = identity(&format!("spiffe://{own}.example/ns/default/sa/client"));
        let gateway = identity(&format!(
            "spiffe://{tenant}.example/ns/canal-system/sa/gateway"
        ));
        TunnelTarget {
            source: ClientIdentity::new(self.ca(own).credential(&id)),
            expected: Arc::new([gateway]),
            address: self.gateway[usize::from(tenant == "beta")],
            netns: None,
            mark: None,
        }
    }

    /// Creates a connection pool of another client host.
    fn client_at(&self, host: u8) -> HbonePool {
        let sources = SourceAddresses {
            v4: Some(Ipv4Addr::new(self.net[0], self.net[1], self.net[2], host)),
            v6: None,
        };
        HbonePool::new(
            PoolConfig {
                sources,
                ..PoolConfig::default()
            },
            self.counters(),
        )
    }

    pub(crate) async fn open(&self, authority: &str) -> Result<OpenTunnel, HboneError> {
        self.open_as(TENANT, authority).await
    }

    /// Opens a tunnel as a member of `own`.
    pub(crate) async fn open_as(
        &self,
        own: &str,
        authority: &str,
    ) -> Result<OpenTunnel, HboneError> {
        let mut headers = HeaderMap::new();
        headers.insert(
            "forwarded",
            format!("for=\"{}:4711\"", self.address(CLIENT))
                .parse()
                .unwrap(),
        );
        headers.insert(
            "baggage",
            "k8s.namespace.name=default,service.name=client,service.version=v7"
                .parse()
                .unwrap(),
        );
        let mut target = self.target(own, TENANT);
        if own != TENANT {
            // The tenant's own data planes have these bundles if the two tenants federate.
            let trust_store = TrustStore::new(&Registry::new());
            let bundles = [
                self.ca(own).bundle(own, "beta.example", false, vec![]),
                self.ca(TENANT).bundle(own, "alpha.example", true, vec![]),
            ];
            trust_store.replace(bundles).unwrap();
            target.source = target
                .source
                .trusting(trust_store.view(&own.parse().unwrap()));
        }
        self.pool
            .open(&target, &authority.parse().unwrap(), headers)
            .await
    }

    pub(crate) async fn client(&self, authority: &str) -> HttpClient<HboneStream> {
        HttpClient {
            stream: self.open(authority).await.unwrap().stream,
            buffer: Vec::new(),
        }
    }

    /// Starts a pod on host number `host` that serves `web` with `origin`, behind a node's HBONE
    /// server.
    pub(crate) async fn pod(&self, host: u8, name: &str, origin: &OriginServer) -> FakeNode {
        let node = FakeNode::start(self, host, "web", origin.address).await;
        let mut workload = pod(
            TENANT,
            name,
            SocketAddr::new(self.address(host), origin.address.port()),
            "web",
        );
        workload.tunnel = TunnelProtocol::Hbone;
        self.fixture.apply(vec![Resource::Workload(workload)]);
        node
    }
}

/// HBONE server of a node for one pod. It relays to the origin, whatever address the CONNECT names.
pub(crate) struct FakeNode {
    pub(crate) connects: Rc<std::cell::RefCell<Vec<(ConnectAuthority, HeaderMap, String)>>>,
}

impl FakeNode {
    async fn start(mesh: &LoopbackMesh, host: u8, account: &str, origin: SocketAddr) -> Self {
        let listener = TcpListener::bind(SocketAddr::new(mesh.address(host), 15008))
            .await
            .unwrap();
        let id = identity(&format!("spiffe://alpha.example/ns/default/sa/{account}"));
        let server = ServerIdentity::new(TENANT.parse().unwrap(), mesh.ca(TENANT).credential(&id));
        let registry = Registry::new();
        let counters = HboneCounters::new(&registry, &registry.shard());
        let seen = Rc::new(std::cell::RefCell::new(Vec::new()));
        let recorded = seen.clone();
        tokio::task::spawn_local(async move {
            // The trigger is held, because its drop forces the drain.
            let (_trigger, drain) = drain::tree();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (server, counters, recorded, drain) = (
                    server.clone(),
                    counters.clone(),
                    recorded.clone(),
                    drain.clone(),
                );
                tokio::task::spawn_local(async move {
                    // The client's side reports a failed handshake.
                    let Ok((stream, peer)) = server.accept(stream).await else {
                        return;
                    };
                    let connect = move |asked: canal_hbone::ConnectResult| {
                        let incoming = asked.unwrap();
                        let identity = incoming.peer.identity.to_string();
                        recorded.borrow_mut().push((
                            incoming.authority.clone(),
                            incoming.headers.clone(),
                            identity,
                        ));
                        tokio::task::spawn_local(async move {
                            let Ok(mut up) = TcpStream::connect(origin).await else {
                                return incoming.refuse(503);
                            };
                            let reports = CloseReport::is_requested(&incoming.headers);
                            let mut down = incoming.accept(HeaderMap::new()).unwrap();
                            // A client gets a close report only if it requests one.
                            if reports {
                                let (mut down, mut up) = reporting(down, up);
                                both(&mut down, &mut up, &Meter::default(), None).await;
                                return;
                            }
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
        Self { connects: seen }
    }
}

/// Runs a test whose clients use a `LocalSet`.
pub(crate) fn local<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let _inside = runtime.enter();
    LocalSet::new().block_on(&runtime, test());
}

#[test]
fn requests_pass_from_node_to_node() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let node = mesh.pod(10, "web-0", &origin).await;
        for authority in ["10.96.0.1:80", "web.default.svc.cluster.local:80"] {
            let mut client = mesh.client(authority).await;
            // Several, so that the number of tunnels below shows their reuse.
            for _ in 0..3 {
                client
                    .send(b"POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello")
                    .await;
                let answer = client.answer().await.unwrap();
                let forwarded = format!("x-forwarded-for: {}\r\n", mesh.address(CLIENT));
                assert!(
                    answer.status == 200 && answer.text().contains(&forwarded),
                    "{}",
                    answer.text()
                );
            }
        }
        // Each authority has a client of its own.
        let seen = node.connects.take();
        assert_eq!(
            seen.len(),
            2,
            "one tunnel carries all requests of a client that sends a POST first"
        );
        let (authority, headers, peer) = &seen[0];
        assert_eq!(
            authority.to_string(),
            format!("{}:{}", mesh.address(10), origin.address.port())
        );
        assert_eq!(peer, "spiffe://alpha.example/ns/canal-system/sa/gateway");
        assert!(
            headers.get("forwarded").is_none(),
            "a shared tunnel speaks for no client"
        );
        let labels = [
            "source_principal=\"spiffe://alpha.example/ns/default/sa/client\"",
            "source_canonical_service=\"client\"",
            "source_version=\"v7\"",
            "destination_principal=\"spiffe://alpha.example/ns/default/sa/web\"",
            "destination_service=\"web.default.svc.cluster.local\"",
            "connection_security_policy=\"mutual_tls\"",
            "destination_workload=\"web\"",
        ];
        // Two clients with three requests each.
        mesh.fixture
            .until("istio_requests_total", &labels, 6.0)
            .await;
    });
}

/// Opens a tunnel from host [`CLIENT`] whose `forwarded` names `address`, and returns the client
/// address that the origin sees.
async fn requested_as(mesh: &LoopbackMesh, address: &str) -> String {
    let mut headers = HeaderMap::new();
    headers.insert("forwarded", format!("for=\"{address}\"").parse().unwrap());
    let target = mesh.target(TENANT, TENANT);
    let opened = mesh
        .pool
        .open(&target, &"10.96.0.1:80".parse().unwrap(), headers)
        .await
        .unwrap();
    let mut client = HttpClient {
        stream: opened.stream,
        buffer: Vec::new(),
    };
    client.send(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await;
    let answer = client.answer().await.unwrap();
    assert_eq!(answer.status, 200);
    let line = answer
        .text()
        .lines()
        .find_map(|l| l.strip_prefix("x-forwarded-for: ").map(str::to_string));
    line.unwrap_or_default()
}

/// A pod with its own certificate can send any `forwarded`; the address of its connection
/// identifies it.
#[test]
fn a_source_address_that_is_not_the_connections_own_is_refused() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        let own = mesh.address(CLIENT).to_string();
        assert_eq!(requested_as(&mesh, &format!("{own}:4711")).await, own);
        for lie in ["10.1.1.9:4711", "0.0.0.0:1", "[fd00::9]:4711"] {
            assert_eq!(requested_as(&mesh, lie).await, own, "{lie}");
        }
        mesh.fixture
            .until("canal_gateway_false_sources_total", &[], 3.0)
            .await;
        // The client's address of the other family counts as its own too.
        let mut workload = pod(
            TENANT,
            "client-0",
            SocketAddr::new(mesh.address(CLIENT), 1),
            "client",
        );
        workload.addresses.push("fd00::9".parse().unwrap());
        workload.endpoints.clear();
        mesh.fixture.apply(vec![Resource::Workload(workload)]);
        assert_eq!(requested_as(&mesh, "[fd00::9]:4711").await, "fd00::9");
    });
}

fn per_client() -> Resource {
    let Resource::Service(mut web) =
        service(TENANT, "web", "10.96.0.1", &[(80, AppProtocol::Http1)])
    else {
        unreachable!()
    };
    web.upstream_pool = UpstreamPool::PerClient;
    Resource::Service(web)
}

/// With a pool per client, each client has its own connections, and the endpoint's node learns the
/// client of each.
#[test]
fn pool_per_client_keeps_clients_apart_and_names_them() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        mesh.fixture.apply(vec![per_client()]);
        let node = mesh.pod(10, "web-0", &origin).await;
        let other = mesh.client_at(98);
        // The second round reuses the connections of the first.
        for _ in 0..2 {
            for pool in [&mesh.pool, &other] {
                let opened = pool
                    .open(
                        &mesh.target(TENANT, TENANT),
                        &"10.96.0.1:80".parse().unwrap(),
                        HeaderMap::new(),
                    )
                    .await
                    .unwrap();
                let mut client = HttpClient {
                    stream: opened.stream,
                    buffer: Vec::new(),
                };
                for _ in 0..3 {
                    client.send(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await;
                    assert_eq!(client.answer().await.unwrap().status, 200);
                }
            }
        }
        let seen = node.connects.take();
        let sources: Vec<String> = seen
            .iter()
            .map(|(_, headers, _)| headers["forwarded"].to_str().unwrap().to_string())
            .collect();
        assert_eq!(
            seen.len(),
            2,
            "one connection for each client, kept: {sources:?}"
        );
        for (host, source) in [CLIENT, 98].into_iter().zip(&sources) {
            assert!(
                source.starts_with(&format!("for=\"{}:", mesh.address(host))),
                "{source}"
            );
        }
        assert!(seen.iter().all(|(_, headers, _)| headers["canal-source"]
            == "spiffe://alpha.example/ns/default/sa/client"));
        // Connections that belong to single clients are not used for others.
        mesh.fixture.apply(vec![service(
            TENANT,
            "web",
            "10.96.0.1",
            &[(80, AppProtocol::Http1)],
        )]);
        let mut client = mesh.client("10.96.0.1:80").await;
        client.send(b"GET /x HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().status, 200);
        let seen = node.connects.take();
        assert!(
            seen.len() == 1 && seen[0].1.get("forwarded").is_none(),
            "{}",
            seen.len()
        );
    });
}

#[test]
fn large_bodies_pass_through_tunnels_byte_exact() {
    // Far more than all windows and buffers, so that they are refilled many times.
    const TOTAL: usize = 20 << 20;
    local(|| async {
        let origin = OriginServer::each(|mut peer: Peer| async move {
            peer.head().await.unwrap();
            let body = peer.exactly(TOTAL).await.unwrap();
            assert!(body == pattern(0, TOTAL));
            peer.write(format!("HTTP/1.1 200 OK\r\ncontent-length: {TOTAL}\r\n\r\n").as_bytes())
                .await;
            peer.write(&body).await;
        })
        .await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        let client = mesh.client("10.96.0.1:80").await;
        let (read, mut write) = tokio::io::split(client.stream);
        let sending = tokio::task::spawn_local(async move {
            write
                .write_all(
                    format!("POST / HTTP/1.1\r\nHost: web\r\nContent-Length: {TOTAL}\r\n\r\n")
                        .as_bytes(),
                )
                .await
                .unwrap();
            write.write_all(&pattern(0, TOTAL)).await.unwrap();
            write
        });
        let mut client = HttpClient {
            stream: tokio::io::join(read, tokio::io::sink()),
            buffer: Vec::new(),
        };
        let answer = client.answer().await.unwrap();
        assert!(answer.body == pattern(0, TOTAL));
        drop(sending);
    });
}

#[test]
fn http2_and_upgrades_pass_through_tunnels() {
    local(|| async {
        let grpc = http2::origin(http2::echo).await;
        let mesh = LoopbackMesh::new(EngineSetup {
            protocol: AppProtocol::Grpc,
            ..EngineSetup::default()
        });
        let _node = mesh.pod(10, "web-0", &grpc).await;
        let stream = mesh.open("10.96.0.1:80").await.unwrap().stream;
        let (send, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::task::spawn_local(connection);
        for _ in 0..3 {
            let request = http::Request::post("http://web/s/M")
                .header("content-type", "application/grpc")
                .body(())
                .unwrap();
            let (response, mut body) = send
                .clone()
                .ready()
                .await
                .unwrap()
                .send_request(request, false)
                .unwrap();
            // More than HTTP/2's first window of 65,535 bytes, so that window updates must pass
            // as well.
            let data = pattern(0, 200_000);
            http2::send_all(&mut body, data.clone().into(), false)
                .await
                .unwrap();
            body.send_trailers(
                [("x-sum".parse().unwrap(), "1".parse().unwrap())]
                    .into_iter()
                    .collect(),
            )
            .unwrap();
            let (got, trailers) = http2::read_all(response.await.unwrap().into_body())
                .await
                .unwrap();
            assert!(got.ends_with(&data) && trailers.unwrap()["x-sum"] == "1");
        }
        assert_eq!(grpc.connections(), 1, "one tunnel, many streams");
        let ws = OriginServer::each(|mut peer: Peer| async move {
            peer.head().await.unwrap();
            peer.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n").await;
            while let Some(line) = peer.line().await {
                peer.write(format!("{line}!\r\n").as_bytes()).await;
            }
        })
        .await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &ws).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        client
            .send(
                b"GET / HTTP/1.1\r\nHost: web\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
            )
            .await;
        assert_eq!(client.answer().await.unwrap().status, 101);
        for _ in 0..3 {
            client.send(b"hello\r\n").await;
            assert_eq!(client.line().await, "hello!");
        }
        client.stream.shutdown().await.unwrap();
        assert!(client.closed().await);
    });
}

#[test]
fn connects_that_lead_nowhere_are_refused_as_ztunnel_would() {
    local(|| async {
        let mesh = LoopbackMesh::new(EngineSetup::default());
        // A service of another tenant is unknown to alpha's client, by name and by address.
        mesh.fixture.apply(vec![service(
            "beta",
            "secret",
            "10.97.0.1",
            &[(80, AppProtocol::Tcp)],
        )]);
        for (authority, status, reason) in [
            ("10.96.0.9:80", 503, "unknown_destination"),
            ("10.96.0.1:81", 503, "unknown_destination"),
            (
                "nobody.default.svc.cluster.local:80",
                503,
                "unknown_destination",
            ),
            ("10.97.0.1:80", 503, "unknown_destination"),
            (
                "secret.default.svc.cluster.local:80",
                503,
                "unknown_destination",
            ),
            // Ports of the mesh itself, at which a tunnel would lead back into a proxy.
            ("10.96.0.1:15008", 400, "illegal_port"),
            ("10.96.0.1:15001", 400, "illegal_port"),
        ] {
            let before = mesh
                .fixture
                .metric("canal_gateway_refused_connects_total", &[reason]);
            match mesh.open(authority).await {
                Err(HboneError::Refused { status: got, .. }) => {
                    assert_eq!(got, status, "{authority}")
                }
                other => panic!("{authority}: {other:?}"),
            }
            assert_eq!(
                mesh.fixture
                    .metric("canal_gateway_refused_connects_total", &[reason]),
                before + 1.0,
                "{authority}"
            );
        }
    });
}

#[test]
fn a_tenant_is_refused_at_anothers_address() {
    local(|| async {
        let mesh = LoopbackMesh::new(EngineSetup::default());
        // The certificate is alpha's, the address beta's. In TLS 1.3 the client learns of the
        // refusal only when it reads.
        let mut target = mesh.target(TENANT, "beta");
        target.expected = Arc::new([identity("spiffe://beta.example/ns/canal-system/sa/gateway")]);
        let opened = mesh
            .pool
            .open(&target, &"10.96.0.1:80".parse().unwrap(), HeaderMap::new())
            .await;
        assert!(opened.is_err());
        // Plaintext is refused too.
        let mut plain = HttpClient::connect(mesh.gateway[0]).await;
        plain.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        plain.closed().await;
        mesh.fixture
            .until(
                "canal_gateway_refused_connections_total",
                &["reason=\"tls_"],
                1.0,
            )
            .await;
        // This address belongs to no gateway.
        let mut lost = HttpClient::connect(SocketAddr::new(
            mesh.address(3),
            mesh.fixture.engine.hbone_addresses()[2].port(),
        ))
        .await;
        assert!(!lost.more().await);
        mesh.fixture
            .until(
                "canal_gateway_refused_connections_total",
                &["no_gateway_address"],
                1.0,
            )
            .await;
        assert_eq!(mesh.fixture.metric("istio_requests_total", &[]), 0.0);
    });
}

#[test]
fn tcp_is_relayed_with_the_clients_name_and_its_half_close() {
    local(|| async {
        let origin = OriginServer::each(|mut peer: Peer| async move {
            peer.write(b"+hello\r\n").await;
            let mut all = Vec::new();
            while let Some(line) = peer.line().await {
                all.push(line);
            }
            // The client has half-closed; the response still passes.
            peer.write(all.join(",").as_bytes()).await;
        })
        .await;
        let mesh = LoopbackMesh::new(EngineSetup {
            protocol: AppProtocol::Tcp,
            ..EngineSetup::default()
        });
        let node = mesh.pod(10, "web-0", &origin).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        assert_eq!(client.line().await, "+hello");
        client.send(b"a\r\nb\r\n").await;
        client.stream.shutdown().await.unwrap();
        assert!(client.closed().await);
        assert_eq!(client.buffer, b"a,b");
        let (_, headers, _) = node.connects.borrow()[0].clone();
        // 4711 is the client port that `LoopbackMesh::open` declares.
        let forwarded = format!(
            "for=\"{}:4711\";host=web.default.svc.cluster.local",
            mesh.address(CLIENT)
        );
        assert_eq!(headers["forwarded"], forwarded.as_str());
        assert!(
            headers["baggage"]
                .to_str()
                .unwrap()
                .contains("service.name=client"),
            "{headers:?}"
        );
        mesh.fixture
            .until(
                "istio_tcp_connections_closed_total",
                &["tenant=\"alpha\"", "response_flags=\"-\""],
                1.0,
            )
            .await;
        // The client sent `a` and `b`, each with CRLF; the origin `+hello` with CRLF and `a,b`.
        assert_eq!(
            mesh.fixture.metric("istio_tcp_received_bytes_total", &[]),
            6.0
        );
        assert_eq!(mesh.fixture.metric("istio_tcp_sent_bytes_total", &[]), 11.0);
    });
}

#[test]
fn tcp_without_an_endpoint_is_a_refused_connect() {
    local(|| async {
        let mesh = LoopbackMesh::new(EngineSetup {
            protocol: AppProtocol::Tcp,
            ..EngineSetup::default()
        });
        assert!(matches!(
            mesh.open("10.96.0.1:80").await,
            Err(HboneError::Refused { status: 503, .. })
        ));
        mesh.fixture
            .until(
                "istio_tcp_connections_closed_total",
                &["response_flags=\"UH\""],
                1.0,
            )
            .await;
    });
}

#[test]
fn pods_may_be_dialled_by_their_own_address_inside_the_tenant_only() {
    local(|| async {
        let origin = OriginServer::named("web-0").await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        mesh.fixture.apply(vec![Resource::Workload(pod(
            "beta",
            "b-0",
            "10.99.0.1:80".parse().unwrap(),
            "web",
        ))]);
        let mut client = mesh
            .client(&format!("{}:{}", mesh.address(10), origin.address.port()))
            .await;
        client.send(b"GET / HTTP/1.1\r\nHost: pod\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().text(), "web-0");
        assert!(matches!(
            mesh.open("10.99.0.1:80").await,
            Err(HboneError::Refused { status: 503, .. })
        ));
    });
}

#[test]
fn unknown_protocols_are_detected_by_first_bytes_or_silence() {
    // Where the client sends first, the gateway waits for its bytes however slow the machine is.
    let detecting = |sniff| EngineSetup {
        protocol: AppProtocol::Detect,
        times: GatewayTimeouts {
            sniff,
            ..GatewayTimeouts::default()
        },
        ..EngineSetup::default()
    };
    local(move || async move {
        let http = OriginServer::named("http").await;
        // Longer than the test, so that only the first bytes decide.
        let mesh = LoopbackMesh::new(detecting(Duration::from_secs(60)));
        let _node = mesh.pod(10, "web-0", &http).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().text(), "http");
        mesh.fixture
            .until("istio_requests_total", &["request_protocol=\"http\""], 1.0)
            .await;
        // Opaque bytes reach the endpoint unchanged.
        let redis = OriginServer::each(|mut peer: Peer| async move {
            assert_eq!(peer.line().await.unwrap(), "*1");
            peer.write(b"+PONG\r\n").await;
        })
        .await;
        let mesh = LoopbackMesh::new(detecting(Duration::from_secs(60)));
        let _node = mesh.pod(10, "web-0", &redis).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        client.send(b"*1\r\n$4\r\nPING\r\n").await;
        assert_eq!(client.line().await, "+PONG");
        // In this protocol the server sends first.
        let mysql = OriginServer::each(|mut peer: Peer| async move {
            peer.write(b"greeting\r\n").await;
            let line = peer.line().await.unwrap();
            peer.write(format!("{line}!\r\n").as_bytes()).await;
        })
        .await;
        // The client stays silent, so this server is only reached after the default time.
        let mesh = LoopbackMesh::new(detecting(GatewayTimeouts::default().sniff));
        let _node = mesh.pod(10, "web-0", &mysql).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        assert_eq!(client.line().await, "greeting");
        client.send(b"login\r\n").await;
        assert_eq!(client.line().await, "login!");
        assert_eq!(
            mesh.fixture
                .metric("canal_gateway_sniffed_server_first_total", &[]),
            1.0
        );
    });
}

#[test]
fn draining_sends_goaway_and_loses_nothing() {
    local(|| async {
        let (origin, release) = OriginServer::gated().await;
        let mut mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        until("the request", || origin.requests() == 1).await;
        mesh.fixture
            .drain(canal_timing::deadline(Duration::from_secs(10)));
        until("the listener closes", || {
            std::net::TcpStream::connect(mesh.gateway[0]).is_err()
        })
        .await;
        release.send_replace(true);
        let answer = client.answer().await.unwrap();
        assert_eq!(
            (answer.text().as_str(), answer.field("connection")),
            ("ok", Some("close"))
        );
        assert!(client.closed().await, "an orderly end");
        drop(client);
        assert!(mesh.fixture.join_workers(Duration::from_secs(8)).await);
    });
}

/// A reset would reach an application that has done nothing wrong, and its node would report it as
/// one.
#[test]
fn tunnels_of_http1_end_in_order() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let times = GatewayTimeouts {
            idle: Duration::from_millis(300) * canal_timing::slack(),
            ..GatewayTimeouts::default()
        };
        let mesh = LoopbackMesh::new(EngineSetup {
            times,
            ..EngineSetup::default()
        });
        let _node = mesh.pod(10, "web-0", &origin).await;
        let request = b"POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello";
        for (what, leaves) in [("the client's end", true), ("idle for too long", false)] {
            let mut client = mesh.client("10.96.0.1:80").await;
            client.send(request).await;
            assert_eq!(client.answer().await.unwrap().status, 200, "{what}");
            if leaves {
                client.stream.shutdown().await.unwrap();
            }
            assert!(client.closed().await, "{what}");
        }
        assert_eq!(
            mesh.fixture
                .metric("canal_gateway_timeouts_total", &["what=\"idle\""]),
            1.0
        );
    });
}

/// Soft drain: the existing tunnel continues, the next tunnel gets a new connection, and a
/// connection closes with its last stream.
#[test]
fn a_node_that_gets_goaway_opens_its_next_tunnel_on_a_new_connection() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let times = GatewayTimeouts {
            // The drain must not close the old tunnel as idle before its last request.
            drain_idle: Duration::from_secs(20),
            ..GatewayTimeouts::default()
        };
        let mesh = LoopbackMesh::new(EngineSetup {
            times,
            ..EngineSetup::default()
        });
        let _node = mesh.pod(10, "web-0", &origin).await;
        let request = b"POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello";
        // All tunnels use one certificate, because a renewed one would get its own connection.
        let (target, authority) = (mesh.target(TENANT, TENANT), "10.96.0.1:80".parse().unwrap());
        let open = async || {
            mesh.pool
                .open(&target, &authority, HeaderMap::new())
                .await
                .unwrap()
        };
        let tunnel = async || HttpClient {
            stream: open().await.stream,
            buffer: Vec::new(),
        };
        let mut stays = tunnel().await;
        stays.send(request).await;
        assert_eq!(stays.answer().await.unwrap().field("connection"), None);
        assert_eq!(mesh.fixture.engine.sessions(), (1, 1));
        // The second call repeats the state, which must change nothing.
        mesh.fixture.engine.set_soft_drain(true);
        mesh.fixture.engine.set_soft_drain(true);
        let begun = Instant::now();
        // Each tunnel may meet a GOAWAY at any moment, even as the first on its connection.
        // Two seconds in steps of 50 ms, which are about two intervals of the soft drain.
        for _ in 0..40 {
            let mut client = tunnel().await;
            client.send(request).await;
            let answer = client.answer().await.unwrap();
            assert_eq!(
                (answer.status, answer.field("connection")),
                (200, Some("close"))
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let (_, accepted) = mesh.fixture.engine.sessions();
        // An interval of the soft drain takes 1 s; the bound allows two.
        let turns = 2 * begun.elapsed().as_secs();
        assert!(
            // The 4 are the connection from before, that of the first interval, and those of two
            // intervals in a second that has begun.
            (2..=4 + turns).contains(&accepted),
            "one connection per turn, not per tunnel: {accepted}"
        );
        timed!(
            accepted <= 6,
            "40 tunnels in two seconds of a soft drain use at most six connections"
        );
        stays.send(request).await;
        let answer = stays.answer().await.unwrap();
        assert_eq!(
            (answer.status, answer.field("connection")),
            (200, Some("close")),
            "the tunnel from before lives"
        );
        // This is the last tunnel of a drained connection.
        drop(stays);
        until_sessions(&mesh.fixture, 0).await;
        mesh.fixture.engine.set_soft_drain(false);
        let mut back = tunnel().await;
        // This is longer than an interval of a drain, so a drain that still runs would be noticed.
        tokio::time::sleep(Duration::from_millis(1500)).await;
        back.send(request).await;
        assert_eq!(back.answer().await.unwrap().field("connection"), None);
        assert!(open().await.reused, "the drain has ended");
    });
}

async fn until_sessions(fixture: &GatewayFixture, wanted: u64) {
    until(&format!("{wanted} sessions"), || {
        fixture.engine.sessions().0 == wanted
    })
    .await;
}

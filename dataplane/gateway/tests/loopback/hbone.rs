//! The mesh's own path: a node's tunnel in, a node's tunnel out, both over mTLS with the kit's implementation on the other ends.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use canal_gateway_engine::Times;
use canal_kit::copy::{Meter, both};
use canal_kit::drain;
use canal_kit::hbone::{Authority, HboneCounters, HboneError, HboneStream, Opened, Pool, PoolConfig, ServerConfig, Target, serve};
use canal_kit::keys::Keyring;
use canal_kit::metrics::Registry;
use canal_kit::testing::{TestCa, identity};
use canal_kit::tls::{ClientIdentity, ServerIdentity, TrustStore};
use canal_model::program::*;
use http::HeaderMap;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::LocalSet;

use crate::client::Client;
use crate::http2;
use crate::origin::{Origin, Peer, pattern};
use crate::rig::{Plot, Rig, TENANT, pod, service, tenant};

/// A loopback network of this test's own: 127.a.b.0/24.
fn network() -> [u8; 3] {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = std::process::id().wrapping_mul(31).wrapping_add(NEXT.fetch_add(1, Ordering::SeqCst));
    [127, 64 + (n >> 8) as u8 % 128, n as u8]
}

/// Two tenants, the gateway's address for each, and one CA each.
pub(crate) struct Mesh {
    pub(crate) rig: Rig,
    pub(crate) trust: TrustStore,
    net: [u8; 3],
    ca: Arc<[TestCa; 2]>,
    pub(crate) gateway: [SocketAddr; 2],
    pub(crate) pool: Pool,
}

impl Mesh {
    fn address(&self, host: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(self.net[0], self.net[1], self.net[2], host))
    }

    pub(crate) fn new(plot: Plot) -> Self {
        let net = network();
        let at = |host| IpAddr::V4(Ipv4Addr::new(net[0], net[1], net[2], host));
        let ca = Arc::new([TestCa::new("alpha"), TestCa::new("beta")]);
        let issuers = ca.clone();
        let trust = TrustStore::new(&Registry::new());
        let issue =
            move |id: &canal_model::identity::Identity| issuers[usize::from(id.trust_domain.as_str() == "beta.example")].credential(id);
        let keyring = Keyring::of(Arc::new(issue), None, trust.clone());
        let hbone = vec![SocketAddr::new(at(1), 0), SocketAddr::new(at(2), 0), SocketAddr::new(at(3), 0)];
        let rig = Rig::new(Plot { hbone, keyring: Some(keyring), ..plot }, &[]);
        let bound = rig.engine.hbone_addresses();
        let gateway = |tenant: &str, host| {
            Resource::Gateway(Gateway {
                tenant: tenant.parse().unwrap(),
                replica: "gw-1".parse().unwrap(),
                az: "az1".parse().unwrap(),
                addresses: vec![at(host)],
                draining: false,
            })
        };
        rig.apply(vec![tenant("beta", 2), gateway(TENANT, 1), gateway("beta", 2)]);
        let registry = Registry::new();
        let pool = Pool::new(PoolConfig::default(), HboneCounters::new(&registry, &registry.shard()));
        Self { rig, trust, net, ca, gateway: [bound[0], bound[1]], pool }
    }

    /// Counters of a pool of its own.
    pub(crate) fn counters(&self) -> HboneCounters {
        let registry = Registry::new();
        HboneCounters::new(&registry, &registry.shard())
    }

    pub(crate) fn ca(&self, tenant: &str) -> &TestCa {
        &self.ca[usize::from(tenant == "beta")]
    }

    /// A target at `tenant`'s gateway address, as the pod `client` of `own`.
    pub(crate) fn target(&self, own: &str, tenant: &str) -> Target {
        let id = identity(&format!("spiffe://{own}.example/ns/default/sa/client"));
        let gateway = identity(&format!("spiffe://{tenant}.example/ns/canal-system/sa/gateway"));
        Target {
            source: ClientIdentity::new(self.ca(own).credential(&id)),
            expected: Arc::new([gateway]),
            address: self.gateway[usize::from(tenant == "beta")],
            netns: None,
            mark: None,
        }
    }

    pub(crate) async fn open(&self, authority: &str) -> Result<Opened, HboneError> {
        self.open_as(TENANT, authority).await
    }

    /// The same as a member of `own`.
    pub(crate) async fn open_as(&self, own: &str, authority: &str) -> Result<Opened, HboneError> {
        let mut headers = HeaderMap::new();
        headers.insert("forwarded", "for=\"10.1.1.9:4711\"".parse().unwrap());
        headers.insert("baggage", "k8s.namespace.name=default,service.name=client,service.version=v7".parse().unwrap());
        let mut target = self.target(own, TENANT);
        if own != TENANT {
            // What its own data planes are told where the two tenants federate.
            let told = TrustStore::new(&Registry::new());
            let bundles =
                [self.ca(own).bundle(own, "beta.example", false, vec![]), self.ca(TENANT).bundle(own, "alpha.example", true, vec![])];
            told.replace(bundles).unwrap();
            target.source = target.source.trusting(told.view(&own.parse().unwrap()));
        }
        self.pool.open(&target, &authority.parse().unwrap(), headers).await
    }

    pub(crate) async fn client(&self, authority: &str) -> Client<HboneStream> {
        Client { stream: self.open(authority).await.unwrap().stream, buffer: Vec::new() }
    }

    /// A pod at host `host` that serves `web` with `serve`, behind a node's HBONE server.
    pub(crate) async fn pod(&self, host: u8, name: &str, origin: &Origin) -> Node {
        let node = Node::start(self, host, "web", origin.address).await;
        let mut workload = pod(TENANT, name, SocketAddr::new(self.address(host), origin.address.port()), "web");
        workload.tunnel = Tunnel::Hbone;
        self.rig.apply(vec![Resource::Workload(workload)]);
        node
    }
}

/// A node's HBONE server for one pod: relays to `origin` whatever address the CONNECT names.
pub(crate) struct Node {
    pub(crate) seen: Rc<std::cell::RefCell<Vec<(Authority, HeaderMap, String)>>>,
}

impl Node {
    async fn start(mesh: &Mesh, host: u8, account: &str, origin: SocketAddr) -> Self {
        let listener = TcpListener::bind(SocketAddr::new(mesh.address(host), 15008)).await.unwrap();
        let id = identity(&format!("spiffe://alpha.example/ns/default/sa/{account}"));
        let server = ServerIdentity::new(TENANT.parse().unwrap(), mesh.ca(TENANT).credential(&id));
        let registry = Registry::new();
        let counters = HboneCounters::new(&registry, &registry.shard());
        let seen = Rc::new(std::cell::RefCell::new(Vec::new()));
        let told = seen.clone();
        tokio::task::spawn_local(async move {
            let (_trigger, drain) = drain::tree();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (server, counters, told, drain) = (server.clone(), counters.clone(), told.clone(), drain.clone());
                tokio::task::spawn_local(async move {
                    let Ok((stream, peer)) = server.accept(stream).await else { return };
                    let connect = move |asked: canal_kit::hbone::Asked| {
                        let incoming = asked.unwrap();
                        let identity = incoming.peer.identity.to_string();
                        told.borrow_mut().push((incoming.authority.clone(), incoming.headers.clone(), identity));
                        tokio::task::spawn_local(async move {
                            let Ok(mut up) = TcpStream::connect(origin).await else { return incoming.refuse(503) };
                            let mut down = incoming.accept(HeaderMap::new()).unwrap();
                            both(&mut down, &mut up, &Meter::default(), None).await;
                        });
                    };
                    let _ = serve(stream, peer, &ServerConfig::default(), &counters, drain, connect).await;
                });
            }
        });
        Self { seen }
    }
}

/// Runs a test whose clients live on a `LocalSet`.
pub(crate) fn local<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let _inside = runtime.enter();
    LocalSet::new().block_on(&runtime, test());
}

#[test]
fn requests_pass_from_node_to_node() {
    local(|| async {
        let origin = Origin::echo().await;
        let mesh = Mesh::new(Plot::default());
        let node = mesh.pod(10, "web-0", &origin).await;
        for authority in ["10.96.0.1:80", "web.default.svc.cluster.local:80"] {
            let mut client = mesh.client(authority).await;
            for _ in 0..3 {
                client.send(b"POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello").await;
                let answer = client.answer().await.unwrap();
                assert!(answer.status == 200 && answer.text().contains("x-forwarded-for: 10.1.1.9\r\n"), "{}", answer.text());
            }
        }
        let seen = node.seen.take();
        assert_eq!(seen.len(), 1, "one tunnel carries all requests");
        let (authority, headers, peer) = &seen[0];
        assert_eq!(authority.to_string(), format!("{}:{}", mesh.address(10), origin.address.port()));
        assert_eq!(peer, "spiffe://alpha.example/ns/canal-system/sa/gateway");
        assert!(headers.get("forwarded").is_none(), "a shared tunnel speaks for no client");
        let labels = [
            "source_principal=\"spiffe://alpha.example/ns/default/sa/client\"",
            "source_canonical_service=\"client\"",
            "source_version=\"v7\"",
            "destination_principal=\"spiffe://alpha.example/ns/default/sa/web\"",
            "destination_service=\"web.default.svc.cluster.local\"",
            "connection_security_policy=\"mutual_tls\"",
            "destination_workload=\"web\"",
        ];
        mesh.rig.until("istio_requests_total", &labels, 6.0).await;
    });
}

#[test]
fn large_bodies_pass_through_tunnels_byte_exact() {
    const TOTAL: usize = 20 << 20;
    local(|| async {
        let origin = Origin::each(|mut peer: Peer| async move {
            peer.head().await.unwrap();
            let body = peer.exactly(TOTAL).await.unwrap();
            assert!(body == pattern(0, TOTAL));
            peer.write(format!("HTTP/1.1 200 OK\r\ncontent-length: {TOTAL}\r\n\r\n").as_bytes()).await;
            peer.write(&body).await;
        })
        .await;
        let mesh = Mesh::new(Plot::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        let client = mesh.client("10.96.0.1:80").await;
        let (read, mut write) = tokio::io::split(client.stream);
        let sending = tokio::task::spawn_local(async move {
            write.write_all(format!("POST / HTTP/1.1\r\nHost: web\r\nContent-Length: {TOTAL}\r\n\r\n").as_bytes()).await.unwrap();
            write.write_all(&pattern(0, TOTAL)).await.unwrap();
            write
        });
        let mut client = Client { stream: tokio::io::join(read, tokio::io::sink()), buffer: Vec::new() };
        let answer = client.answer().await.unwrap();
        assert!(answer.body == pattern(0, TOTAL));
        drop(sending);
    });
}

#[test]
fn http2_and_upgrades_pass_through_tunnels() {
    local(|| async {
        let grpc = http2::origin(http2::echo).await;
        let mesh = Mesh::new(Plot { protocol: AppProtocol::Grpc, ..Plot::default() });
        let _node = mesh.pod(10, "web-0", &grpc).await;
        let stream = mesh.open("10.96.0.1:80").await.unwrap().stream;
        let (send, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::task::spawn_local(connection);
        for _ in 0..3 {
            let request = http::Request::post("http://web/s/M").header("content-type", "application/grpc").body(()).unwrap();
            let (response, mut body) = send.clone().ready().await.unwrap().send_request(request, false).unwrap();
            let data = pattern(0, 200_000);
            http2::send_all(&mut body, data.clone().into(), false).await.unwrap();
            body.send_trailers([("x-sum".parse().unwrap(), "1".parse().unwrap())].into_iter().collect()).unwrap();
            let (got, trailers) = http2::read_all(response.await.unwrap().into_body()).await.unwrap();
            assert!(got.ends_with(&data) && trailers.unwrap()["x-sum"] == "1");
        }
        assert_eq!(grpc.connections(), 1, "one tunnel, many streams");
        let ws = Origin::each(|mut peer: Peer| async move {
            peer.head().await.unwrap();
            peer.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n").await;
            while let Some(line) = peer.line().await {
                peer.write(format!("{line}!\r\n").as_bytes()).await;
            }
        })
        .await;
        let mesh = Mesh::new(Plot::default());
        let _node = mesh.pod(10, "web-0", &ws).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n").await;
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
        let mesh = Mesh::new(Plot::default());
        mesh.rig.apply(vec![service("beta", "secret", "10.97.0.1", &[(80, AppProtocol::Tcp)])]);
        for (authority, status, reason) in [
            ("10.96.0.9:80", 503, "unknown_destination"),
            ("10.96.0.1:81", 503, "unknown_destination"),
            ("nobody.default.svc.cluster.local:80", 503, "unknown_destination"),
            ("10.97.0.1:80", 503, "unknown_destination"),
            ("secret.default.svc.cluster.local:80", 503, "unknown_destination"),
            ("10.96.0.1:15008", 400, "illegal_port"),
            ("10.96.0.1:15001", 400, "illegal_port"),
        ] {
            let before = mesh.rig.metric("canal_gateway_refused_connects_total", &[reason]);
            match mesh.open(authority).await {
                Err(HboneError::Refused { status: got, .. }) => assert_eq!(got, status, "{authority}"),
                other => panic!("{authority}: {other:?}"),
            }
            assert_eq!(mesh.rig.metric("canal_gateway_refused_connects_total", &[reason]), before + 1.0, "{authority}");
        }
    });
}

#[test]
fn a_tenant_is_refused_at_anothers_door() {
    local(|| async {
        let mesh = Mesh::new(Plot::default());
        // The certificate is alpha's, the address beta's. TLS 1.3 tells the client only when it reads.
        let mut target = mesh.target(TENANT, "beta");
        target.expected = Arc::new([identity("spiffe://beta.example/ns/canal-system/sa/gateway")]);
        let opened = mesh.pool.open(&target, &"10.96.0.1:80".parse().unwrap(), HeaderMap::new()).await;
        assert!(opened.is_err());
        // And in plain bytes.
        let mut plain = Client::connect(mesh.gateway[0]).await;
        plain.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        plain.closed().await;
        mesh.rig.until("canal_gateway_refused_connections_total", &["reason=\"tls_"], 1.0).await;
        // An address that is no gateway's.
        let mut lost = Client::connect(SocketAddr::new(mesh.address(3), mesh.rig.engine.hbone_addresses()[2].port())).await;
        assert!(!lost.more().await);
        mesh.rig.until("canal_gateway_refused_connections_total", &["no_gateway_address"], 1.0).await;
        assert_eq!(mesh.rig.metric("istio_requests_total", &[]), 0.0);
    });
}

#[test]
fn tcp_is_relayed_with_the_clients_name_and_its_half_close() {
    local(|| async {
        let origin = Origin::each(|mut peer: Peer| async move {
            peer.write(b"+hello\r\n").await;
            let mut all = Vec::new();
            while let Some(line) = peer.line().await {
                all.push(line);
            }
            // The client has closed its half; the answer still passes.
            peer.write(all.join(",").as_bytes()).await;
        })
        .await;
        let mesh = Mesh::new(Plot { protocol: AppProtocol::Tcp, ..Plot::default() });
        let node = mesh.pod(10, "web-0", &origin).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        assert_eq!(client.line().await, "+hello");
        client.send(b"a\r\nb\r\n").await;
        client.stream.shutdown().await.unwrap();
        assert!(client.closed().await);
        assert_eq!(client.buffer, b"a,b");
        let (_, headers, _) = node.seen.borrow()[0].clone();
        assert_eq!(headers["forwarded"], "for=\"10.1.1.9:4711\";host=web.default.svc.cluster.local");
        assert!(headers["baggage"].to_str().unwrap().contains("service.name=client"), "{headers:?}");
        mesh.rig.until("istio_tcp_connections_closed_total", &["tenant=\"alpha\"", "response_flags=\"-\""], 1.0).await;
        assert_eq!(mesh.rig.metric("istio_tcp_received_bytes_total", &[]), 6.0);
        assert_eq!(mesh.rig.metric("istio_tcp_sent_bytes_total", &[]), 11.0);
    });
}

#[test]
fn tcp_without_an_endpoint_is_a_refused_connect() {
    local(|| async {
        let mesh = Mesh::new(Plot { protocol: AppProtocol::Tcp, ..Plot::default() });
        assert!(matches!(mesh.open("10.96.0.1:80").await, Err(HboneError::Refused { status: 503, .. })));
        mesh.rig.until("istio_tcp_connections_closed_total", &["response_flags=\"UH\""], 1.0).await;
    });
}

#[test]
fn pods_may_be_dialled_by_their_own_address_inside_the_tenant_only() {
    local(|| async {
        let origin = Origin::named("web-0").await;
        let mesh = Mesh::new(Plot::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        mesh.rig.apply(vec![Resource::Workload(pod("beta", "b-0", "10.99.0.1:80".parse().unwrap(), "web"))]);
        let mut client = mesh.client(&format!("{}:{}", mesh.address(10), origin.address.port())).await;
        client.send(b"GET / HTTP/1.1\r\nHost: pod\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().text(), "web-0");
        assert!(matches!(mesh.open("10.99.0.1:80").await, Err(HboneError::Refused { status: 503, .. })));
    });
}

#[test]
fn unknown_protocols_are_told_by_first_bytes_or_silence() {
    local(|| async {
        let http = Origin::named("http").await;
        let mesh = Mesh::new(Plot { protocol: AppProtocol::Detect, ..Plot::default() });
        let _node = mesh.pod(10, "web-0", &http).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        assert_eq!(client.answer().await.unwrap().text(), "http");
        mesh.rig.until("istio_requests_total", &["request_protocol=\"http\""], 1.0).await;
        // Opaque bytes reach the endpoint as they are.
        let redis = Origin::each(|mut peer: Peer| async move {
            assert_eq!(peer.line().await.unwrap(), "*1");
            peer.write(b"+PONG\r\n").await;
        })
        .await;
        let mesh = Mesh::new(Plot { protocol: AppProtocol::Detect, ..Plot::default() });
        let _node = mesh.pod(10, "web-0", &redis).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        client.send(b"*1\r\n$4\r\nPING\r\n").await;
        assert_eq!(client.line().await, "+PONG");
        // A server that speaks first.
        let mysql = Origin::each(|mut peer: Peer| async move {
            peer.write(b"greeting\r\n").await;
            let line = peer.line().await.unwrap();
            peer.write(format!("{line}!\r\n").as_bytes()).await;
        })
        .await;
        let mesh = Mesh::new(Plot { protocol: AppProtocol::Detect, ..Plot::default() });
        let _node = mesh.pod(10, "web-0", &mysql).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        assert_eq!(client.line().await, "greeting");
        client.send(b"login\r\n").await;
        assert_eq!(client.line().await, "login!");
        assert_eq!(mesh.rig.metric("canal_gateway_sniffed_server_first_total", &[]), 1.0);
    });
}

#[test]
fn draining_says_goaway_and_loses_nothing() {
    local(|| async {
        let origin = Origin::each(|mut peer: Peer| async move {
            while peer.request().await.is_some() {
                tokio::time::sleep(Duration::from_millis(300)).await;
                peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            }
        })
        .await;
        let mut mesh = Mesh::new(Plot::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        mesh.rig.drain(Duration::from_secs(10));
        let answer = client.answer().await.unwrap();
        assert_eq!((answer.text().as_str(), answer.field("connection")), ("ok", Some("close")));
        assert!(client.closed().await, "an orderly end");
        drop(client);
        assert!(mesh.rig.ended(Duration::from_secs(8)).await);
    });
}

/// A reset would reach an application that has done nothing, and be told as one by its node.
#[test]
fn tunnels_of_http1_end_in_order() {
    local(|| async {
        let origin = Origin::echo().await;
        let times = Times { idle: Duration::from_millis(300), ..Times::default() };
        let mesh = Mesh::new(Plot { times, ..Plot::default() });
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
        assert_eq!(mesh.rig.metric("canal_gateway_timeouts_total", &["what=\"idle\""]), 1.0);
    });
}

/// Asked to leave: the tunnel that is up goes on, the next one has a connection of its own, and connections go with their last stream.
#[test]
fn a_node_that_is_asked_to_leave_opens_its_next_tunnel_anew_and_loses_none() {
    local(|| async {
        let origin = Origin::echo().await;
        let times = Times { drain_idle: Duration::from_secs(20), ..Times::default() };
        let mesh = Mesh::new(Plot { times, ..Plot::default() });
        let _node = mesh.pod(10, "web-0", &origin).await;
        let request = b"POST /x HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\nhello";
        // One certificate: a renewed one would have a connection of its own.
        let (target, authority) = (mesh.target(TENANT, TENANT), "10.96.0.1:80".parse().unwrap());
        let open = async || mesh.pool.open(&target, &authority, HeaderMap::new()).await.unwrap();
        let tunnel = async || Client { stream: open().await.stream, buffer: Vec::new() };
        let mut stays = tunnel().await;
        stays.send(request).await;
        assert_eq!(stays.answer().await.unwrap().field("connection"), None);
        assert_eq!(mesh.rig.engine.sessions(), (1, 1));
        mesh.rig.engine.part(true);
        mesh.rig.engine.part(true);
        // Each of these may meet a GOAWAY at any moment of its life, also a connection's first.
        for _ in 0..40 {
            let mut client = tunnel().await;
            client.send(request).await;
            let answer = client.answer().await.unwrap();
            assert_eq!((answer.status, answer.field("connection")), (200, Some("close")));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let (_, accepted) = mesh.rig.engine.sessions();
        assert!((2..=6).contains(&accepted), "one connection per turn, not per tunnel: {accepted}");
        stays.send(request).await;
        let answer = stays.answer().await.unwrap();
        assert_eq!((answer.status, answer.field("connection")), (200, Some("close")), "the tunnel from before lives");
        drop(stays);
        until_sessions(&mesh.rig, 0).await;
        mesh.rig.engine.part(false);
        let mut back = tunnel().await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        back.send(request).await;
        assert_eq!(back.answer().await.unwrap().field("connection"), None);
        assert!(open().await.reused, "nobody is asked any more");
    });
}

async fn until_sessions(rig: &Rig, wanted: u64) {
    for _ in 0..1000 {
        if rig.engine.sessions().0 == wanted {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{} sessions, not {wanted}", rig.engine.sessions().0);
}

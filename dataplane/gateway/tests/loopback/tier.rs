//! A replica of the cloud tier: connections belong to the service whose address they came in on, endpoints are dialled with the tenant's
//! mark. In network namespaces of its own (needs root): one for the replica, one for the pods of each of two tenants, which have the
//! same addresses. No redirector: the replica has the services' addresses itself.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use canal_gateway_engine::Tier;
use canal_kit::copy::{Meter, both};
use canal_kit::drain;
use canal_kit::hbone::{HboneCounters, HboneError, HboneStream, Opened, Pool, PoolConfig, ServerConfig, Target, serve};
use canal_kit::keys::Keyring;
use canal_kit::metrics::Registry;
use canal_kit::sys::{self, ConnectOptions, ListenOptions, Netns, Sources};
use canal_kit::testing::{TestCa, identity};
use canal_kit::tls::{ClientIdentity, ServerIdentity, TrustStore};
use canal_model::ids::ServiceId;
use canal_model::program::*;
use http::HeaderMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::LocalSet;

use crate::client::Client;
use crate::origin::{Origin, Peer};
use crate::rig::{Plot, Rig, TENANT, key, pod, service_with_id, tenant};

/// The replica's underlay address, and what it dials IPv6 from.
const OWN: Ipv4Addr = Ipv4Addr::new(250, 1, 0, 1);
const OWN6: &str = "fdca:a1:0:250::fa01:1";
/// Where both tenants have a pod, and where the client is.
const POD: &str = "10.1.1.2";
const POD6: &str = "fd77::2";
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 1, 1, 9);
const BETA: &str = "beta";
/// Service IDs: alpha's web, beta's web, alpha's other, the tier's own in alpha; 77 is nobody's.
const WEB: [u32; 2] = [7, 8];
const OTHER: u32 = 9;
const TIER: u32 = 5;

fn ip(args: &str) {
    let made = Command::new("ip").args(args.split(' ')).output().expect("these tests need root and iproute2");
    assert!(made.status.success(), "ip {args}: {}", String::from_utf8_lossy(&made.stderr));
}

/// Three namespaces; removed on drop.
struct Net {
    name: String,
}

impl Net {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let net = Self { name: format!("canal-gwt-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::SeqCst)) };
        let replica = net.part("r");
        ip(&format!("netns add {replica}"));
        ip(&format!("-n {replica} link set lo up"));
        for own in [format!("{OWN}/32"), format!("{CLIENT}/32")] {
            ip(&format!("-n {replica} addr add {own} dev lo"));
        }
        ip(&format!("-n {replica} addr add {OWN6}/128 dev lo nodad"));
        for id in [WEB[0], WEB[1], OTHER, TIER, 77] {
            ip(&format!("-n {replica} addr add 240.0.0.{id}/32 dev lo"));
            ip(&format!("-n {replica} addr add fdca:a1:0:240::{id}/128 dev lo nodad"));
        }
        for (n, part) in ["a", "b"].into_iter().enumerate() {
            let pods = net.part(part);
            ip(&format!("netns add {pods}"));
            ip(&format!("-n {replica} link add {part}0 type veth peer name {part}1 netns {pods}"));
            ip(&format!("-n {replica} link set {part}0 up"));
            for up in [format!("{part}1"), "lo".to_string()] {
                ip(&format!("-n {pods} link set {up} up"));
            }
            ip(&format!("-n {pods} addr add {POD}/32 dev {part}1"));
            ip(&format!("-n {pods} addr add {POD6}/128 dev {part}1 nodad"));
            ip(&format!("-n {pods} route add {OWN}/32 dev {part}1"));
            // Unlike ARP, neighbour discovery answers only for addresses of the interface it is asked on.
            ip(&format!("-n {replica} addr add fe80::1/64 dev {part}0 nodad"));
            ip(&format!("-n {pods} route add {OWN6}/128 via fe80::1 dev {part}1"));
            let vni = n + 1;
            ip(&format!("-n {replica} rule add fwmark {vni} lookup {}", 100 + vni));
            ip(&format!("-n {replica} -6 rule add fwmark {vni} lookup {}", 100 + vni));
            ip(&format!("-n {replica} route add {POD}/32 dev {part}0 table {}", 100 + vni));
            ip(&format!("-n {replica} route add {POD6}/128 dev {part}0 table {}", 100 + vni));
        }
        net
    }

    fn part(&self, part: &str) -> String {
        format!("{}-{part}", self.name)
    }

    fn open(&self, part: &str) -> Netns {
        Netns::open(format!("/run/netns/{}", self.part(part))).unwrap()
    }

    /// Runs a test in the replica's namespace; threads that are made there stay there.
    fn run<F: Future<Output = ()>>(&self, test: impl FnOnce() -> F) {
        let inside = self.open("r");
        let run = || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            let _inside = runtime.enter();
            LocalSet::new().block_on(&runtime, test());
        };
        inside.enter(run).unwrap();
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for part in ["r", "a", "b"] {
            let _ = Command::new("ip").args(["netns", "del", &self.part(part)]).output();
        }
    }
}

/// The replica and both tenants' configuration.
struct Replica {
    rig: Rig,
    ca: Arc<[TestCa; 2]>,
}

fn service_address(id: u32, port: u16) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::new(240, 0, 0, id as u8).into(), port)
}

fn tunnelled(mut workload: Workload, tunnel: Tunnel) -> Resource {
    workload.tunnel = tunnel;
    Resource::Workload(workload)
}

impl Replica {
    /// Both tenants' pods are at `pod_at`.
    fn new(tunnel: Tunnel, pod_at: SocketAddr) -> Self {
        let ca = Arc::new([TestCa::new(TENANT), TestCa::new(BETA)]);
        let issuers = ca.clone();
        let issue =
            move |id: &canal_model::identity::Identity| issuers[usize::from(id.trust_domain.as_str() == "beta.example")].credential(id);
        let keyring = Keyring::of(Arc::new(issue), None, TrustStore::new(&Registry::new()));
        let sources = Sources { v4: Some(OWN), v6: Some(OWN6.parse().unwrap()) };
        let tier = Tier { plain: "[::]:80".parse().unwrap(), sources };
        let hbone = vec!["[::]:15008".parse().unwrap()];
        let rig = Rig::new(Plot { hbone, keyring: Some(keyring), tier: Some(tier), ..Plot::default() }, &[]);
        let http = |port| [(port, AppProtocol::Http1)];
        let mut own = service_with_id(TENANT, "gateway", TIER, "10.96.0.5", &[]);
        if let Resource::Service(service) = &mut own {
            service.key = "alpha/canal-system/gateway".parse().unwrap();
        }
        let address = GatewayAddress {
            service: key(TENANT, "web"),
            id: ServiceId::new(WEB[0]).unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec!["10.250.32.1".parse().unwrap()],
            open: true,
        };
        rig.apply(vec![
            tenant(BETA, 2),
            service_with_id(TENANT, "web", WEB[0], "10.96.0.1", &http(80)),
            service_with_id(BETA, "web", WEB[1], "10.96.0.1", &http(80)),
            service_with_id(TENANT, "other", OTHER, "10.96.0.2", &http(90)),
            own,
            Resource::Address(address),
            tunnelled(pod(TENANT, "web-0", pod_at, "web"), tunnel),
            tunnelled(pod(BETA, "web-0", pod_at, "web"), tunnel),
            Resource::Workload(pod(TENANT, "client", SocketAddr::new(CLIENT.into(), 1), "other")),
        ]);
        Self { rig, ca }
    }

    /// A tunnel through a service's address, as a pod of `own`, to a gateway of `tenant`.
    async fn open(&self, own: &str, tenant: &str, id: u32, authority: &str) -> Result<Opened, HboneError> {
        let me = identity(&format!("spiffe://{own}.example/ns/default/sa/client"));
        let gateway = identity(&format!("spiffe://{tenant}.example/ns/canal-system/sa/gateway"));
        let target = Target {
            source: ClientIdentity::new(self.ca[usize::from(own == BETA)].credential(&me)),
            expected: Arc::new([gateway]),
            address: service_address(id, 15008),
            netns: None,
            mark: None,
        };
        let registry = Registry::new();
        let pool = Pool::new(PoolConfig::default(), HboneCounters::new(&registry, &registry.shard()));
        pool.open(&target, &authority.parse().unwrap(), HeaderMap::new()).await
    }

    async fn get(&self, own: &str, id: u32, authority: &str) -> Result<String, HboneError> {
        let stream: HboneStream = self.open(own, own, id, authority).await?.stream;
        let mut client = Client { stream, buffer: Vec::new() };
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        Ok(client.answer().await.map_or_else(|| "no answer".into(), |a| a.text()))
    }
}

/// A pod in each tenant's namespace that answers with its tenant's name and the address it is dialled from.
async fn origins(net: &Net, at: SocketAddr) -> [Origin; 2] {
    let answer = |name: &'static str| {
        move |mut peer: Peer| async move {
            let from = peer.stream.peer_addr().unwrap().ip();
            while peer.request().await.is_some() {
                let text = format!("{name} {from}");
                peer.write(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}", text.len()).as_bytes()).await;
            }
        }
    };
    let listen = |part| sys::listen(Some(&net.open(part)), at, &ListenOptions::default()).unwrap();
    [Origin::on(listen("a"), answer(TENANT)), Origin::on(listen("b"), answer(BETA))]
}

/// GET over a plain connection to a service's address, from the client's own.
async fn plain(to: SocketAddr) -> std::io::Result<String> {
    let options = ConnectOptions { bind: Some(SocketAddr::new(CLIENT.into(), 0)), ..ConnectOptions::default() };
    let options = if to.is_ipv4() { options } else { ConnectOptions::default() };
    let mut stream = sys::connect(None, to, &options).await.map_err(|e| std::io::Error::other(e.to_string()))?;
    // A reset is told once, by the write if it came before it.
    stream.write_all(b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n").await?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text).await?;
    let text = String::from_utf8_lossy(&text).into_owned();
    Ok(text.rsplit("\r\n").next().unwrap_or("").to_string())
}

#[test]
fn plain_connections_are_their_services_and_overlapping_endpoints_are_told_apart_by_mark() {
    for (at, own) in [(POD, OWN.to_string()), (POD6, OWN6.to_string())] {
        let net = Net::new();
        net.run(|| async {
            let at = SocketAddr::new(at.parse().unwrap(), 8080);
            let origins = origins(&net, at).await;
            let replica = Replica::new(Tunnel::None, at);
            for _ in 0..20 {
                for (n, name) in [TENANT, BETA].into_iter().enumerate() {
                    assert_eq!(plain(service_address(WEB[n], 80)).await.unwrap(), format!("{name} {own}"));
                    let v6 = format!("[fdca:a1:0:240::{}]:80", WEB[n]).parse().unwrap();
                    assert_eq!(plain(v6).await.unwrap(), format!("{name} {own}"));
                }
            }
            assert_eq!(origins.map(|o| o.connections()), [1, 1], "connections are kept, by tenant");
            let labels = ["tenant=\"alpha\"", "source_workload=\"client\"", "connection_security_policy=\"none\""];
            replica.rig.until("istio_requests_total", &labels, 20.0).await;
        });
    }
}

#[test]
fn plain_connections_that_are_no_services_are_reset_and_counted() {
    let net = Net::new();
    net.run(|| async {
        let replica = Replica::new(Tunnel::None, SocketAddr::new(POD.parse().unwrap(), 8080));
        for (to, reason) in [
            (service_address(OTHER, 80), "unknown_port"),
            (service_address(TIER, 80), "unknown_port"),
            (service_address(77, 80), "unknown_service"),
            (SocketAddr::new(OWN.into(), 80), "no_service_address"),
        ] {
            // The reset may overtake the end of the connect, and the request.
            let error = plain(to).await.expect_err(reason);
            assert!(error.to_string().contains("reset by peer"), "{reason}: {error}");
            replica.rig.until("canal_gateway_refused_connections_total", &[&format!("reason=\"{reason}\"")], 1.0).await;
        }
        assert_eq!(replica.rig.metric("istio_requests_total", &[]), 0.0);
    });
}

#[test]
fn tunnels_lead_to_the_service_they_came_in_on_and_nowhere_else() {
    let net = Net::new();
    net.run(|| async {
        let at = SocketAddr::new(POD.parse().unwrap(), 8080);
        let _origins = origins(&net, at).await;
        let replica = Replica::new(Tunnel::None, at);
        for (id, authority) in [
            (WEB[0], "10.96.0.1:80"),
            (WEB[0], "web.default.svc.cluster.local:80"),
            (WEB[0], "10.250.32.1:80"),
            (WEB[0], "10.1.1.2:8080"),
            (TIER, "10.1.1.2:8080"),
        ] {
            assert_eq!(replica.get(TENANT, id, authority).await.unwrap(), format!("{TENANT} {OWN}"), "{authority}");
        }
        assert_eq!(replica.get(BETA, WEB[1], "10.96.0.1:80").await.unwrap(), format!("{BETA} {OWN}"));
        for (id, authority, status, reason, count) in [
            (WEB[0], "10.96.0.2:90", 400, "wrong_service", 1.0),
            (WEB[0], "other.default.svc.cluster.local:90", 400, "wrong_service", 2.0),
            (WEB[0], "10.1.1.9:1", 400, "wrong_service", 3.0),
            (WEB[0], "10.1.1.2:9090", 400, "wrong_service", 4.0),
            (WEB[0], "192.0.2.1:80", 400, "wrong_service", 5.0),
            (OTHER, "10.96.0.1:80", 400, "wrong_service", 6.0),
            (OTHER, "10.250.32.1:80", 400, "wrong_service", 7.0),
            (TIER, "10.96.0.1:80", 400, "wrong_service", 8.0),
            (TIER, "web.default.svc.cluster.local:80", 400, "wrong_service", 9.0),
            (WEB[0], "10.96.0.1:81", 503, "unknown_port", 1.0),
        ] {
            match replica.get(TENANT, id, authority).await {
                Err(HboneError::Refused { status: given, .. }) => assert_eq!(given, status, "{authority}"),
                other => panic!("{authority}: {other:?}"),
            }
            replica.rig.until("canal_gateway_refused_connects_total", &[&format!("reason=\"{reason}\"")], count).await;
        }
    });
}

#[test]
fn a_foreign_tenant_is_refused_at_the_right_address_whatever_it_expects() {
    let net = Net::new();
    net.run(|| async {
        let replica = Replica::new(Tunnel::None, SocketAddr::new(POD.parse().unwrap(), 8080));
        // Expecting its own tenant's gateway it refuses alpha's; expecting alpha's it trusts no such CA. Either way nothing is served.
        for expected in [TENANT, BETA] {
            let error = replica.open(BETA, expected, WEB[0], "10.96.0.1:80").await.expect_err(expected);
            assert!(matches!(error, HboneError::Tls { .. } | HboneError::Http2 { .. }), "{error}");
        }
        replica.rig.until("canal_gateway_refused_connections_total", &["reason=\"tls"], 2.0).await;
        let error = replica.open(TENANT, TENANT, 77, "10.96.0.1:80").await;
        assert!(error.is_err());
        replica.rig.until("canal_gateway_refused_connections_total", &["reason=\"unknown_service\""], 1.0).await;
        assert_eq!(replica.rig.metric("canal_gateway_refused_connects_total", &[]), 0.0, "no CONNECT was heard");
    });
}

/// A node's HBONE server in a tenant's namespace, for the pod there.
fn node(net: &Net, part: &str, ca: &TestCa, name: &str, origin: SocketAddr) {
    let inside = Arc::new(net.open(part));
    let listener = sys::listen(Some(&inside), SocketAddr::new(origin.ip(), 15008), &ListenOptions::default()).unwrap();
    let id = identity(&format!("spiffe://{name}.example/ns/default/sa/web"));
    let server = ServerIdentity::new(name.parse().unwrap(), ca.credential(&id));
    let registry = Registry::new();
    let counters = HboneCounters::new(&registry, &registry.shard());
    tokio::task::spawn_local(async move {
        let (_trigger, drain) = drain::tree();
        while let Ok((stream, _)) = listener.accept().await {
            let (server, counters, drain, inside) = (server.clone(), counters.clone(), drain.clone(), inside.clone());
            tokio::task::spawn_local(async move {
                let Ok((stream, peer)) = server.accept(stream).await else { return };
                let connect = move |asked: canal_kit::hbone::Asked| {
                    let incoming = asked.unwrap();
                    let inside = inside.clone();
                    tokio::task::spawn_local(async move {
                        let up: Result<TcpStream, _> = sys::connect(Some(&inside), origin, &ConnectOptions::default()).await;
                        let Ok(mut up) = up else { return incoming.refuse(503) };
                        let mut down = incoming.accept(HeaderMap::new()).unwrap();
                        both(&mut down, &mut up, &Meter::default(), None).await;
                    });
                };
                let _ = serve(stream, peer, &ServerConfig::default(), &counters, drain, connect).await;
            });
        }
    });
}

#[test]
fn tunnels_to_overlapping_nodes_are_told_apart_by_mark() {
    let net = Net::new();
    net.run(|| async {
        let at = SocketAddr::new(POD.parse().unwrap(), 8080);
        let origins = origins(&net, at).await;
        let replica = Replica::new(Tunnel::Hbone, at);
        node(&net, "a", &replica.ca[0], TENANT, at);
        node(&net, "b", &replica.ca[1], BETA, at);
        for _ in 0..5 {
            for (n, name) in [TENANT, BETA].into_iter().enumerate() {
                // The origin is dialled by its own node.
                assert_eq!(replica.get(name, WEB[n], "10.96.0.1:80").await.unwrap(), format!("{name} {POD}"));
            }
        }
        assert_eq!(origins.map(|o| o.connections()), [1, 1], "tunnels are kept, by tenant");
    });
}

/// Runs in a process of its own: this binary again, for this test alone.
#[test]
fn a_query_of_death_ends_the_process_and_no_other_request_does() {
    use std::os::unix::process::ExitStatusExt;
    const CHILD: &str = "CANAL_QUERY_OF_DEATH";
    const NAME: &str = "tier::a_query_of_death_ends_the_process_and_no_other_request_does";
    if std::env::var_os(CHILD).is_none() {
        let child = Command::new(std::env::current_exe().unwrap()).args([NAME, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&child.stdout).into_owned();
        assert!(said.contains("alive: 200") && !said.contains("still alive"), "{said}");
        assert_eq!(child.status.signal(), Some(6), "SIGABRT");
        return;
    }
    fn die(path: &[u8]) {
        if path == b"/die" {
            std::process::abort();
        }
    }
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
        let origin = Origin::named("web").await;
        let rig = Rig::new(Plot { request_hook: Some(die), ..Plot::default() }, &[origin.address]);
        println!("alive: {}", Client::get(rig.web, "/die/not").await.status);
        let _ = Client::get(rig.web, "/die").await;
        println!("still alive");
    });
}

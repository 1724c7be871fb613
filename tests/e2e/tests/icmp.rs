//! ICMP through the whole tier: echoes to gateway addresses, errors about sessions with them. Whatever a tenant hears is from and about its own
//! addresses, never the tier's; whatever a replica is told of an endpoint reaches the connection that it is about.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{Heard, Icmp, Mesh};
use canal_world::topology::{Outside, Topology};
use socket2::{Domain, Socket, Type};

const TENANTS: [&str; 2] = ["alpha", "beta"];
const PATIENCE: Duration = Duration::from_secs(2);
const UDP: u8 = 17;
/// A port at which no service is asked by datagrams.
const NOBODY: u16 = 33_434;
const REPLICAS: [&str; 6] = ["gw-1", "gw-2", "gw-3", "gw-4", "gw-5", "gw-6"];

/// Echoes and datagrams of captured pods are outside the mesh, where `outside: Deny` stops them.
fn let_packets_pass(topology: &mut Topology) {
    topology.tenants.iter_mut().for_each(|tenant| tenant.outside = Outside::Passthrough);
}

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up_with("tier.yaml", "e2e-icmp", let_packets_pass);
        // A datagram that comes while its bucket moves may be lost, and nothing here sends one twice.
        mesh.rest(Duration::from_secs(60));
        mesh
    })
}

/// Both gateway addresses of `tcp` in both AZs, which are the same for both tenants if their services got their numbers in the same order.
fn gateway_addresses() -> Vec<IpAddr> {
    let mesh = mesh();
    let of = |pod: &str| mesh.resolve(pod, "tcp.default.svc.cluster.local");
    let all = [of("beta/default/client-0"), of("beta/default/client-far-0")].concat();
    assert_eq!(all.len(), 4, "tcp has both families in both AZs: {all:?}");
    all
}

/// The pod's own addresses, and its node's in the overlay, of one family.
fn ends(tenant: &str, is_v6: bool) -> (String, IpAddr, IpAddr) {
    let pod = format!("{tenant}/default/client-0");
    let seat = mesh().world.host(&pod).unwrap().seat;
    let node = mesh().world.host(&format!("{tenant}-n1")).unwrap().seat.overlay[tenant];
    if is_v6 { (pod, seat.ip6.unwrap().into(), node.1.into()) } else { (pod, seat.ip4.unwrap().into(), node.0.into()) }
}

#[test]
fn gateway_addresses_answer_echoes() {
    let mesh = mesh();
    for tenant in TENANTS {
        for address in gateway_addresses() {
            let (pod, ..) = ends(tenant, address.is_ipv6());
            let icmp = Icmp::open(&mesh.world, &pod, address.is_ipv6());
            let reply = if address.is_ipv6() { (129, 0) } else { (0, 0) };
            for sequence in 0..3 {
                icmp.echo(address, sequence).unwrap();
                let heard = icmp.hear_one(PATIENCE, |h| h.kind == reply || h.about.is_some());
                assert_eq!(heard.map(|h| (h.from, h.kind)), Some((address, reply)), "{pod} pings {address}");
            }
        }
    }
}

/// A datagram with so many hops to live; what the pod hears about it.
fn probe(pod: &str, own: IpAddr, to: SocketAddr, hops: u32) -> (SocketAddr, Option<Heard>) {
    let mesh = mesh();
    let icmp = Icmp::open(&mesh.world, pod, to.is_ipv6());
    let socket = mesh.world.inside(pod, || Socket::new(Domain::for_address(to), Type::DGRAM, None)).unwrap().unwrap();
    socket.bind(&SocketAddr::from((own, 0)).into()).unwrap();
    if to.is_ipv6() { socket.set_unicast_hops_v6(hops) } else { socket.set_ttl_v4(hops) }.unwrap();
    socket.send_to(b"probe", &to.into()).unwrap();
    let source = socket.local_addr().unwrap().as_socket().unwrap();
    (source, icmp.hear_one(PATIENCE, |h| h.about.is_some_and(|(about, ..)| about == source)))
}

/// As traceroute does it: the way to a service has two hops, the node and the gateway address itself. Nothing of the tier shows.
#[test]
fn the_way_to_a_service_is_the_node_and_the_service() {
    for tenant in TENANTS {
        for address in gateway_addresses() {
            let is_v6 = address.is_ipv6();
            let (pod, own, node) = ends(tenant, is_v6);
            let to = SocketAddr::from((address, NOBODY));
            let (expired, unreachable) = if is_v6 { ((3, 0), (1, 4)) } else { ((11, 0), (3, 3)) };
            for (hops, from, kind) in [(1, node, expired), (2, address, unreachable)] {
                let (source, heard) = probe(&pod, own, to, hops);
                let heard = heard.unwrap_or_else(|| panic!("{pod} to {address} with {hops} hops: nothing is heard"));
                assert_eq!((heard.from, heard.kind, heard.about), (from, kind, Some((source, to, UDP))), "{pod} to {address}, {hops} hops");
            }
        }
    }
}

/// The application's own view: its socket fails, at once and with the right error.
#[test]
fn a_datagram_to_a_closed_port_is_refused() {
    let mesh = mesh();
    for tenant in TENANTS {
        for address in gateway_addresses() {
            let (pod, own, _) = ends(tenant, address.is_ipv6());
            let socket = mesh.world.inside(&pod, || UdpSocket::bind((own, 0))).unwrap().unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            socket.connect((address, NOBODY)).unwrap();
            socket.send(b"one").unwrap();
            let error = socket.recv(&mut [0; 16]).expect_err("nobody answers");
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{pod} to {address}: {error}");
        }
    }
}

fn unreachables() -> u64 {
    let names = ["IcmpInDestUnreachs", "Icmp6InDestUnreachs"];
    let of = |replica: &&str| {
        let said = mesh().run(replica, &["nstat", "-asz", names[0], names[1]]).ok();
        let counts = said.lines().filter(|l| names.iter().any(|n| l.starts_with(n)));
        counts.filter_map(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok()).sum::<u64>()
    };
    REPLICAS.iter().map(of).sum()
}

/// A tenant's node says that an endpoint cannot be reached: the replica that dialled it hears so by the edge, at once, and takes another
/// endpoint. Without the error it would wait for its connect to time out (5 s).
#[test]
fn a_replica_hears_that_an_endpoint_cannot_be_reached() {
    let mesh = mesh();
    let before = unreachables();
    let rules = "add table inet e2e; add chain inet e2e no { type filter hook forward priority 0; }; \
                 add rule inet e2e no tcp dport 7000 reject with icmpx host-unreachable";
    mesh.run("beta-n1", &["nft", rules]).ok();
    for tenant in ["beta", "alpha"] {
        let (pod, target) = (format!("{tenant}/default/client-far-0"), "tcp.default.svc.cluster.local:7000");
        let argv = ["canal-samples", "sessions", target, "-n", "60", "--open-rate", "100", "--interval-ms", "200", "-d", "2"];
        let report = mesh.run(&pod, &argv).json();
        println!("{tenant}: {} of 60 sessions opened, {} ms to the first answer at most", report["opened"], report["gap_ms_max"]);
        assert_eq!(report["ok"], true, "{tenant}: {report}");
        assert!(report["gap_ms_max"].as_f64().is_some_and(|ms| ms < 1000.0), "{tenant}: {report}");
    }
    let heard = unreachables() - before;
    mesh.run("beta-n1", &["nft", "delete table inet e2e"]).ok();
    assert!(heard > 0, "no replica heard of it: were all sessions with the other endpoint?");
}

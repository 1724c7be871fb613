//! ICMP through the whole tier: echo requests to gateway addresses, errors about sessions with
//! them. A tenant receives only errors from and about its own addresses, never the tier's. An error
//! about an endpoint that a replica receives reaches the connection concerned.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use canal_e2e::{Icmp, IcmpPacket, Mesh, deadline_ms};
use canal_timing::{assert_time, deadline, is_timed};
use canal_world::topology::{OutsideTraffic, Topology};
use socket2::{Domain, Socket, Type};

const TENANTS: [&str; 2] = ["alpha", "beta"];
/// A packet without an answer for this long is sent again: hosts limit the ICMP errors that they
/// send.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Buckets have stopped moving this long after the world is up. It only has to exceed what a quiet
/// machine needs: in the gate, `deadline` waits a minute or more.
const RESTED_WITHIN: Duration = Duration::from_secs(60);
/// A session is answered within this time. It only has to exceed what a quiet machine needs: in the
/// gate, `deadline` waits a minute or more.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// IANA's protocol number.
const UDP: u8 = 17;
/// A port without a UDP service.
const UNUSED_PORT: u16 = 33_434;
const REPLICAS: [&str; 6] = ["gw-1", "gw-2", "gw-3", "gw-4", "gw-5", "gw-6"];

/// Echo requests and datagrams of captured pods are outside the mesh, where `outboundTrafficPolicy:
/// Deny` stops them.
fn let_packets_pass(topology: &mut Topology) {
    topology
        .tenants
        .iter_mut()
        .for_each(|tenant| tenant.outside = OutsideTraffic::Passthrough);
}

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up_with("tier.yaml", "e2e-icmp", let_packets_pass);
        // A datagram that arrives while its bucket moves may be lost, and nothing here retransmits.
        mesh.rest(deadline(RESTED_WITHIN));
        mesh
    })
}

/// Returns both gateway addresses of `tcp` in both AZs. They are the same for both tenants if their
/// services got their numbers in the same order.
fn gateway_addresses() -> Vec<IpAddr> {
    let mesh = mesh();
    let of = |pod: &str| mesh.resolve(pod, "tcp.default.svc.cluster.local");
    let all = [of("beta/default/client-0"), of("beta/default/client-far-0")].concat();
    assert_eq!(all.len(), 4, "tcp has both families in both AZs: {all:?}");
    all
}

/// Returns the pod's own addresses, and its node's in the overlay, of one family.
fn ends(tenant: &str, is_v6: bool) -> (String, IpAddr, IpAddr) {
    let pod = format!("{tenant}/default/client-0");
    let environment = mesh().world.host(&pod).unwrap().environment;
    let node = mesh()
        .world
        .host(&format!("{tenant}-n1"))
        .unwrap()
        .environment
        .overlay[tenant];
    if is_v6 {
        (pod, environment.ip6.unwrap().into(), node.1.into())
    } else {
        (pod, environment.ip4.unwrap().into(), node.0.into())
    }
}

/// Sends again what `attempt` sends until there is an answer.
fn repeated<T>(mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let started = Instant::now();
    loop {
        let answer = attempt();
        if answer.is_some() || started.elapsed() >= deadline(TIMEOUT) {
            return answer;
        }
    }
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
                let received = repeated(|| {
                    icmp.echo(address, sequence).unwrap();
                    icmp.receive_one(TIMEOUT, |h| h.kind == reply || h.about.is_some())
                });
                assert_eq!(
                    received.map(|h| (h.from, h.kind)),
                    Some((address, reply)),
                    "{pod} pings {address}"
                );
            }
        }
    }
}

/// Sends a datagram with this hop limit until the pod receives an ICMP packet about it, which it
/// returns.
fn probe(pod: &str, own: IpAddr, to: SocketAddr, hops: u32) -> (SocketAddr, Option<IcmpPacket>) {
    let mesh = mesh();
    let icmp = Icmp::open(&mesh.world, pod, to.is_ipv6());
    let socket = mesh
        .world
        .inside(pod, || {
            Socket::new(Domain::for_address(to), Type::DGRAM, None)
        })
        .unwrap()
        .unwrap();
    socket.bind(&SocketAddr::from((own, 0)).into()).unwrap();
    if to.is_ipv6() {
        socket.set_unicast_hops_v6(hops)
    } else {
        socket.set_ttl_v4(hops)
    }
    .unwrap();
    let attempt = || {
        // A late error about an earlier datagram fails this call instead of sending. The next
        // attempt sends the datagram.
        let _ = socket.send_to(b"probe", &to.into());
        let source = socket.local_addr().ok()?.as_socket()?;
        icmp.receive_one(TIMEOUT, |h| {
            h.about.is_some_and(|(about, ..)| about == source)
        })
    };
    let received = repeated(attempt);
    (socket.local_addr().unwrap().as_socket().unwrap(), received)
}

/// Traceroute: the path to a service has two hops, the node and the gateway address itself. Nothing
/// of the tier is visible.
#[test]
fn a_traceroute_to_a_service_shows_only_the_node_and_the_service() {
    for tenant in TENANTS {
        for address in gateway_addresses() {
            let is_v6 = address.is_ipv6();
            let (pod, own, node) = ends(tenant, is_v6);
            let to = SocketAddr::from((address, UNUSED_PORT));
            let (expired, unreachable) = if is_v6 {
                ((3, 0), (1, 4))
            } else {
                ((11, 0), (3, 3))
            };
            for (hops, from, kind) in [(1, node, expired), (2, address, unreachable)] {
                let (source, received) = probe(&pod, own, to, hops);
                let received = received.unwrap_or_else(|| {
                    panic!("{pod} to {address} with {hops} hops: nothing is heard")
                });
                assert_eq!(
                    (received.from, received.kind, received.about),
                    (from, kind, Some((source, to, UDP))),
                    "{pod} to {address}, {hops} hops"
                );
            }
        }
    }
}

/// The application's view: its socket fails, at once and with the right error.
#[test]
fn a_datagram_to_a_closed_port_is_refused() {
    let mesh = mesh();
    for tenant in TENANTS {
        for address in gateway_addresses() {
            let (pod, own, _) = ends(tenant, address.is_ipv6());
            let socket = mesh
                .world
                .inside(&pod, || UdpSocket::bind((own, 0)))
                .unwrap()
                .unwrap();
            socket.set_read_timeout(Some(TIMEOUT)).unwrap();
            socket.connect((address, UNUSED_PORT)).unwrap();
            let error = repeated(|| {
                let error = socket
                    .send(b"one")
                    .and_then(|_| socket.recv(&mut [0; 16]))
                    .expect_err("nobody answers");
                (!matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
                    .then_some(error)
            });
            assert_eq!(
                error.map(|e| e.kind()),
                Some(ErrorKind::ConnectionRefused),
                "{pod} to {address}"
            );
        }
    }
}

fn unreachables() -> u64 {
    let names = ["IcmpInDestUnreachs", "Icmp6InDestUnreachs"];
    let of = |replica: &&str| {
        let output = mesh()
            .run(replica, &["nstat", "-asz", names[0], names[1]])
            .expect_success();
        let counts = output
            .lines()
            .filter(|l| names.iter().any(|n| l.starts_with(n)));
        counts
            .filter_map(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok())
            .sum::<u64>()
    };
    REPLICAS.iter().map(of).sum()
}

/// A tenant's node reports that an endpoint is unreachable: the replica that dialed it receives the
/// error through the edge, at once, and selects another endpoint. Without the error it would wait
/// for its connect to time out (5 s).
#[test]
fn a_replica_learns_that_an_endpoint_is_unreachable() {
    let mesh = mesh();
    let before = unreachables();
    let rules = "add table inet e2e; add chain inet e2e no { type filter hook forward priority 0; }; \
                 add rule inet e2e no tcp dport 7000 reject with icmpx host-unreachable";
    // The node rejects what it forwards to its endpoint; the other AZ's endpoint stays reachable.
    mesh.run("beta-n1", &["nft", rules]).expect_success();
    // In the gate a session may wait for its answer until the end.
    let (seconds, timeout_ms) = (
        if is_timed() { "2" } else { "20" },
        deadline_ms(ANSWERED_WITHIN),
    );
    let mut clients = Vec::new();
    // Alpha has the same addresses, and no broken endpoint: its sessions must not notice.
    for tenant in ["beta", "alpha"] {
        let pod = format!("{tenant}/default/client-far-0");
        for address in mesh.resolve(&pod, "tcp.default.svc.cluster.local") {
            let target = SocketAddr::new(address, 7000).to_string();
            let argv = [
                "canal-samples",
                "sessions",
                &target,
                // 60 sessions, so that some of them surely meet the unreachable endpoint first.
                "-n",
                "60",
                // All are opened in less than a second of the run.
                "--open-rate",
                "100",
                "--interval-ms",
                "200",
                "-d",
                seconds,
            ];
            let client = mesh.spawn(&pod, &[&argv[..], &["--patience-ms", &timeout_ms]].concat());
            clients.push((format!("{pod} to {target}"), address, client));
        }
    }
    for (what, address, client) in clients {
        let report = mesh.end(&what, client).json();
        println!(
            "{what}: {} of 60 sessions, {} ms to the first answer at most",
            report["opened"], report["gap_ms_max"]
        );
        assert_eq!(report["ok"], true, "{what}: {report}");
        // Endpoints are dialed in the client's family. Over IPv6 the error for the first SYN
        // arrives and does not end the connect; the error for the SYN that is retransmitted after a
        // second does. Between two plain namespaces it is the same: the error arrives while
        // `connect` still locks the socket, and the kernel drops errors for a locked socket
        // (`LockDroppedIcmps` of /proc/net/netstat counts them).
        let (family, bound) = if address.is_ipv4() {
            ("IPv4", 1)
        } else {
            ("IPv6", 2)
        };
        let gap = Duration::from_secs_f64(report["gap_ms_max"].as_f64().expect("a time") / 1000.0);
        assert_time(
            &format!("time until a session opens beside an unreachable endpoint, {family}"),
            gap,
            Duration::from_secs(bound),
        );
    }
    let received = unreachables() - before;
    mesh.run("beta-n1", &["nft", "delete table inet e2e"])
        .expect_success();
    // Without such an error the sessions opened at the other endpoint at once, and prove nothing.
    assert!(
        received > 0,
        "no replica heard of it: were all sessions with the other endpoint?"
    );
}

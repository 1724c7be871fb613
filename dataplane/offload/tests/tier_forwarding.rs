//! Tests the whole path of a service's session in the kernel, with real devices. The path is a pod
//! behind its node's VXLAN device, a router, an edge, and two replicas with their programs. Covers
//! chains, bulk transfers with checksums that receivers verify, errors, dials, and a dead gateway.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::lab::LabNetns;
use canal_abi::tier::{
    Address, AddressKey, BUCKETS, CHAIN, EDGE_MAC, NodeKey, Prefix, PrefixKey, Replica, Return,
    Table, address_be,
};
use canal_offload::edge::{self, EdgeProgram, EdgeProgramSettings};
use canal_offload::redirector::{self, RedirectorPrograms};
use canal_offload::socket_steering::{ServiceListener, SocketSteering};
use socket2::{Domain, Socket, Type};

const EDGE: Ipv4Addr = Ipv4Addr::new(250, 1, 0, 1);
const NODE: Ipv4Addr = Ipv4Addr::new(172, 20, 0, 11);
const NODE_MAC: [u8; 6] = [2, 2, 2, 2, 2, 0xa0];
const TENANT: u32 = 0x70;
const SERVICE: u32 = 0x01_0203;
const V4: &str = "10.9.0.1:80";
const V6: &str = "[fd09::1]:80";

fn wait() -> Duration {
    canal_timing::deadline(Duration::from_secs(5))
}

fn mac(m: [u8; 6]) -> String {
    m.map(|b| format!("{b:02x}")).join(":")
}

/// Returns the underlay address of replica 1 or 2.
fn replica(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(250, 1, 0, 1 + 2 * n)
}

struct ChainEnd {
    netns: LabNetns,
    redirector: RedirectorPrograms,
    steering: SocketSteering,
}

struct TierForwardingFixture {
    pod: LabNetns,
    edge: EdgeProgram,
    members: Vec<ChainEnd>,
    router: LabNetns,
    _hosts: [LabNetns; 2],
}

/// Links a host's `eth0` to the router, which has the even address below the host's.
fn link(router: &LabNetns, device: &str, host: &LabNetns, address: Ipv4Addr) {
    let gateway = Ipv4Addr::from_bits(address.to_bits() - 1);
    router.ip(&format!(
        "link add {device} type veth peer name eth0 netns {}",
        host.name()
    ));
    router.ip(&format!("addr add {gateway}/31 dev {device}"));
    router.ip(&format!("link set {device} up"));
    host.ip(&format!("addr add {address}/31 dev eth0"));
    host.ip("link set eth0 up");
    host.ip(&format!("route add default via {gateway}"));
}

fn member(router: &LabNetns, n: u8) -> ChainEnd {
    let netns = LabNetns::bare();
    link(router, &format!("replica{n}"), &netns, replica(n));
    let redirector = RedirectorPrograms::attach(&redirector::RedirectorOptions {
        netns: Some(netns.path()),
        device: "eth0".into(),
        pin_dir: None,
        address: replica(n),
        number: n.into(),
        edge: EDGE,
        mtu: 1400,
        tunnel_port: 40_000,
        tunnels: 4,
    })
    .unwrap();
    redirector.hosts().put(&address_be(EDGE), &0).unwrap();
    let steering = SocketSteering::attach(Some(&netns.path()), None).unwrap();
    let listener = netns.listen("[::]:20000");
    steering.set(ServiceListener::Plain, &listener).unwrap();
    serve(listener, n);
    ChainEnd {
        netns,
        redirector,
        steering,
    }
}

fn pod(node: &LabNetns) -> LabNetns {
    let pod = LabNetns::bare();
    node.ip(&format!(
        "link add vx mtu 1400 address {} type vxlan id {TENANT} local {NODE} remote {EDGE} dstport 4789 nolearning",
        mac(NODE_MAC)
    ));
    node.ip(&format!("link set vx netns {}", pod.name()));
    pod.ip("link set vx up");
    for (own, length) in [("10.1.1.2", 32), ("fd01:1::2", 128)] {
        pod.ip(&format!(
            "addr add {own}/{length} dev vx{}",
            if length == 128 { " nodad" } else { "" }
        ));
    }
    for to in ["10.9.0.1", "250.1.0.3", "250.1.0.5"] {
        pod.ip(&format!("route add {to}/32 dev vx src 10.1.1.2"));
        pod.ip(&format!(
            "neigh add {to} lladdr {} dev vx nud permanent",
            mac(EDGE_MAC)
        ));
    }
    for to in ["fd09::1", "fdca:a1:0:250::fa01:3", "fdca:a1:0:250::fa01:5"] {
        pod.ip(&format!("route add {to}/128 dev vx src fd01:1::2"));
        pod.ip(&format!(
            "neigh add {to} lladdr {} dev vx nud permanent",
            mac(EDGE_MAC)
        ));
    }
    pod
}

fn fill_edge(e: &EdgeProgram) {
    let a = |s: &str| -> IpAddr { s.parse().unwrap() };
    e.hosts().put(&address_be(EDGE), &0).unwrap();
    let returned_addresses = Return::new(
        TENANT,
        Some("10.9.0.1".parse().unwrap()),
        Some("fd09::1".parse().unwrap()),
    );
    e.returns().put(&SERVICE, &returned_addresses).unwrap();
    e.nodes().put(&NodeKey::new(TENANT, NODE), &1).unwrap();
    for at in ["10.9.0.1", "fd09::1"] {
        e.addresses()
            .put(
                &AddressKey::new(TENANT, a(at)),
                &Address { service: SERVICE },
            )
            .unwrap();
    }
    for (pods, length) in [("10.1.1.0", 24), ("fd01:1::", 64)] {
        e.prefixes()
            .put(
                &PrefixKey::new(TENANT, a(pods), length),
                &Prefix::new(NODE, NODE_MAC),
            )
            .unwrap();
    }
}

impl TierForwardingFixture {
    fn new() -> Self {
        let [router, node, host] = [(); 3].map(|()| LabNetns::bare());
        router.within(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
        link(&router, "node", &node, NODE);
        link(&router, "edge", &host, EDGE);
        let pod = pod(&node);
        let members = vec![member(&router, 1), member(&router, 2)];
        let edge = EdgeProgram::attach(&edge::EdgeOptions {
            netns: Some(host.path()),
            device: "eth0".into(),
            pin_dir: None,
            settings: EdgeProgramSettings {
                address: EDGE,
                // The numbers of tunnels and their first port are arbitrary; the MTU is that of the
                // pod's device.
                tunnels: 4,
                aggregate: true,
                tunnel_port: 40_000,
                mtu: 1400,
            },
        })
        .unwrap();
        fill_edge(&edge);
        let net = Self {
            pod,
            edge,
            members,
            router,
            _hosts: [node, host],
        };
        for n in 1..=2u8 {
            net.edge
                .hosts()
                .put(&address_be(replica(n)), &n.into())
                .unwrap();
            net.members.iter().for_each(|m| {
                m.redirector
                    .hosts()
                    .put(&address_be(replica(n)), &n.into())
                    .unwrap()
            });
            net.set_replica(n, true);
        }
        net.configure_edge(&[1, 2]);
        net.configure_replicas(&[1, 2]);
        net
    }

    fn set_replica(&self, n: u8, up: bool) {
        self.edge
            .replicas()
            .put(&n.into(), &Replica::new(replica(n), up))
            .unwrap();
        self.members.iter().for_each(|m| {
            m.redirector
                .replicas()
                .put(&n.into(), &Replica::new(replica(n), up))
                .unwrap()
        });
    }

    fn configure_edge(&self, chain: &[u16]) {
        self.edge.tables().put(&SERVICE, &table(chain)).unwrap();
    }

    fn configure_replicas(&self, chain: &[u16]) {
        self.members
            .iter()
            .for_each(|m| m.redirector.tables().put(&SERVICE, &table(chain)).unwrap());
    }

    fn dial(&self, to: &str) -> TcpStream {
        let to: SocketAddr = to.parse().unwrap();
        let s = self
            .pod
            .within(|| TcpStream::connect_timeout(&to, wait()))
            .unwrap_or_else(|e| panic!("{to}: {e}: {:?}", self.drops()));
        s.set_read_timeout(Some(wait())).unwrap();
        s
    }

    /// Returns the counters of dropped packets of all programs. Devices that come up solicit
    /// routers and report multicast groups, which the tier does not carry; these are left out.
    fn drops(&self) -> Vec<(&'static str, u64)> {
        let edge = self.edge.counts().unwrap();
        let replicas = self
            .members
            .iter()
            .flat_map(|m| m.redirector.counts().unwrap());
        edge.into_iter()
            .chain(replicas)
            .filter(|(n, c)| *c > 0 && n.starts_with("drop_") && *n != "drop_protocol")
            .collect()
    }

    fn count(&self, n: usize, name: &str) -> u64 {
        self.members[n - 1]
            .redirector
            .counts()
            .unwrap()
            .into_iter()
            .collect::<HashMap<_, _>>()[name]
    }
}

fn table(chain: &[u16]) -> Table {
    let mut whole = [0; CHAIN];
    whole[..chain.len()].copy_from_slice(chain);
    Table {
        vni: TENANT,
        version: 1,
        chain: [whole; BUCKETS],
    }
}

/// Serves any number of connections and answers every line with `name` in front of it.
fn serve(listener: TcpListener, name: u8) {
    std::thread::spawn(move || {
        while let Ok((s, _)) = listener.accept() {
            std::thread::spawn(move || {
                let mut out = s.try_clone().unwrap();
                for line in BufReader::new(s).lines().map_while(Result::ok) {
                    let _ = out.write_all(format!("{name}: {line}\n").as_bytes());
                }
            });
        }
    });
}

fn exchange(s: &mut TcpStream) -> String {
    s.write_all(b"who\n").unwrap();
    let mut answer = [0; 7];
    s.read_exact(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

fn bulk(s: &TcpStream, name: u8) {
    let line: Vec<u8> = (0..150_000u32)
        .map(|i| b'a' + (i % 26) as u8)
        .chain([b'\n'])
        .collect();
    let (mut writer, sent) = (s.try_clone().unwrap(), line.clone());
    let w = std::thread::spawn(move || (0..8).for_each(|_| writer.write_all(&sent).unwrap()));
    let mut r = BufReader::new(s);
    for _ in 0..8 {
        let mut got = Vec::new();
        r.read_until(b'\n', &mut got).unwrap();
        assert!(
            got == [format!("{name}: ").as_bytes(), &line].concat(),
            "bytes are lost or changed"
        );
    }
    w.join().unwrap();
}

#[test]
fn sessions_stay_at_their_replica_on_any_link() {
    // GSO packets are segmented where the offload is missing.
    for without in [&[][..], &["pod"], &["replicas"], &["router"]] {
        let r = TierForwardingFixture::new();
        for which in without {
            match *which {
                "pod" => r.pod.without_offload("vx"),
                "replicas" => r
                    .members
                    .iter()
                    .for_each(|m| m.netns.without_offload("tier0")),
                // This is `router`, which has a device for each host.
                _ => ["node", "edge", "replica1", "replica2"]
                    .iter()
                    .for_each(|device| r.router.without_offload(device)),
            }
        }
        for to in [V4, V6] {
            r.configure_edge(&[1, 2]);
            r.configure_replicas(&[1, 2]);
            let mut first = r.dial(to);
            assert_eq!(exchange(&mut first), "1: who\n", "{to} {without:?}");
            bulk(&first, 1);
            // The edge gets the new table before the replicas do.
            r.configure_edge(&[2, 1]);
            let mut early = r.dial(to);
            assert_eq!(
                exchange(&mut early),
                "1: who\n",
                "{to} {without:?}: sent to 2, which still knows 1 as the head"
            );
            r.configure_replicas(&[2, 1]);
            let mut second = r.dial(to);
            assert_eq!(exchange(&mut second), "2: who\n", "{to} {without:?}");
            for s in [&mut first, &mut early] {
                assert_eq!(exchange(s), "1: who\n", "{to} {without:?}");
            }
            bulk(&first, 1);
            bulk(&second, 2);
        }
        // At least one new session in each family.
        assert!(r.count(2, "forwarded") > 0 && r.count(2, "forwarded_new") >= 2);
        assert_eq!(r.drops(), [], "{without:?}");
    }
}

#[test]
fn a_dead_replica_and_a_dead_gateway_are_stepped_over() {
    let r = TierForwardingFixture::new();
    r.members[0]
        .steering
        .clear_sockets(ServiceListener::Plain)
        .unwrap();
    assert_eq!(
        exchange(&mut r.dial(V4)),
        "2: who\n",
        "the gateway of replica 1 has ended"
    );
    assert!(r.count(1, "not_listening") > 0);
    r.router.ip("link set replica1 down");
    r.set_replica(1, false);
    let mut second = r.dial(V6);
    assert_eq!(
        exchange(&mut second),
        "2: who\n",
        "1 is down: the edge skips it"
    );
    r.members[1]
        .steering
        .clear_sockets(ServiceListener::Plain)
        .unwrap();
    let to: SocketAddr = V4.parse().unwrap();
    let e = r
        .pod
        .within(|| TcpStream::connect_timeout(&to, wait()))
        .unwrap_err();
    assert_eq!(
        e.kind(),
        std::io::ErrorKind::ConnectionRefused,
        "no replica is left: the answer is an immediate reset"
    );
    assert_eq!(
        exchange(&mut second),
        "2: who\n",
        "a session needs no listener"
    );
    assert_eq!(r.drops(), []);
}

#[test]
fn the_gateway_dials_through_the_edge() {
    let r = TierForwardingFixture::new();
    serve(r.pod.listen("[::]:8080"), 9);
    let own6 = ["fdca:a1:0:250::fa01:3", "fdca:a1:0:250::fa01:5"];
    for (n, m) in r.members.iter().enumerate() {
        for (to, from) in [
            ("10.1.1.2:8080", IpAddr::from(replica(n as u8 + 1))),
            ("[fd01:1::2]:8080", own6[n].parse().unwrap()),
        ] {
            let to: SocketAddr = to.parse().unwrap();
            let s: TcpStream = m.netns.within(|| {
                let s = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
                s.set_mark(TENANT).unwrap();
                s.bind(&SocketAddr::new(from, 0).into()).unwrap();
                s.connect_timeout(&to.into(), wait())
                    .unwrap_or_else(|e| panic!("{to} from {from}: {e}: {:?}", r.drops()));
                s.into()
            });
            s.set_read_timeout(Some(wait())).unwrap();
            bulk(&s, 9);
        }
    }
    assert_eq!(r.drops(), []);
}

/// Opens a connection from a replica to the endpoint in the pod, which answers as 9.
fn dial_pod(r: &TierForwardingFixture, n: u8, to: &str, from: &str) -> TcpStream {
    let (to, from): (SocketAddr, SocketAddr) = (to.parse().unwrap(), from.parse().unwrap());
    let s: TcpStream = r.members[usize::from(n) - 1].netns.within(|| {
        let s = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
        s.set_mark(TENANT).unwrap();
        s.bind(&from.into()).unwrap();
        s.connect_timeout(&to.into(), wait())
            .unwrap_or_else(|e| panic!("{to} from {from}: {e}: {:?}", r.drops()));
        s.into()
    });
    s.set_read_timeout(Some(wait())).unwrap();
    s
}

/// A link gets a smaller MTU than the hosts know. Routers fragment the datagrams, and the host that
/// receives the fragments reports it to the inner packet's sender.
#[test]
fn sessions_go_on_when_a_link_narrows() {
    for (link, address) in [("edge", EDGE), ("replica1", replica(1)), ("node", NODE)] {
        let r = TierForwardingFixture::new();
        serve(r.pod.listen("[::]:8080"), 9);
        let sessions = [
            (r.dial(V4), 1),
            (r.dial(V6), 1),
            (dial_pod(&r, 1, "10.1.1.2:8080", "250.1.0.3:0"), 9),
            (
                dial_pod(&r, 1, "[fd01:1::2]:8080", "[fdca:a1:0:250::fa01:3]:0"),
                9,
            ),
        ];
        sessions.iter().for_each(|(s, name)| bulk(s, *name));
        assert_eq!(r.drops(), [], "{link}");
        r.router
            .ip(&format!("route add {address}/32 dev {link} mtu 1400"));
        sessions.iter().for_each(|(s, name)| bulk(s, *name));
        // No session waits for a second: only later fragments are dropped without a reply.
        assert!(
            r.drops().iter().all(|(what, _)| *what == "drop_fragment"),
            "{link}: {:?}",
            r.drops()
        );
        let too_big = r.count(1, "too_big")
            + r.edge
                .counts()
                .unwrap()
                .into_iter()
                .find(|(name, _)| *name == "too_big")
                .unwrap()
                .1;
        // A node's kernel reassembles fragments.
        assert_eq!(too_big > 0, link != "node", "{link}");
    }
}

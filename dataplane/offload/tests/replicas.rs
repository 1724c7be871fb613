//! Tests redirector, tunnel device and socket steering on replicas in namespaces, with real
//! connections through a simulated edge. Sessions must start at the right replica and stay there
//! while tables change and gateways die.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::frames;
use crate::lab::{
    CaseProcess, LISTEN, LabNetns, LabPins, TIME_WAIT, case, pause, print_line, until,
};
use canal_abi::tier::{BUCKETS, CHAIN, Replica, Table, address_be};
use canal_offload::redirector::{self, RedirectorOptions, RedirectorPrograms};
use canal_offload::sessions::SessionTable;
use canal_offload::socket_steering::{ServiceListener, SocketSteering};
use socket2::{Domain, Protocol, Socket, Type};

const TENANT: u32 = 0x70;
const OTHER: u32 = 0x71;
const SERVICE: u32 = 7;
const V4: &str = "240.0.0.7:80";
const V6: &str = "[fdca:a1:0:240::7]:80";

fn wait() -> Duration {
    canal_timing::deadline(Duration::from_secs(5))
}

fn underlay(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(250, 1, 0, 1 + n)
}

fn options(
    netns: Option<&LabNetns>,
    n: u8,
    pin_dir: Option<&std::path::Path>,
) -> RedirectorOptions {
    RedirectorOptions {
        netns: netns.map(LabNetns::path),
        device: "eth0".into(),
        pin_dir: pin_dir.map(Into::into),
        address: underlay(n),
        number: n.into(),
        edge: underlay(0),
        mtu: 1400,
        tunnel_port: 40_000,
        tunnels: 4,
    }
}

/// Writes a redirector's maps: one chain for every bucket, and three replicas of which `down` is
/// down (0 for none).
fn fill(r: &RedirectorPrograms, chain: &[u16], down: u8) {
    let mut whole = [0; CHAIN];
    whole[..chain.len()].copy_from_slice(chain);
    r.hosts().put(&address_be(underlay(0)), &0).unwrap();
    for n in 1..=3u8 {
        r.hosts().put(&address_be(underlay(n)), &n.into()).unwrap();
        r.replicas()
            .put(&n.into(), &Replica::new(underlay(n), n != down))
            .unwrap();
    }
    r.tables()
        .put(
            &SERVICE,
            &Table {
                vni: TENANT,
                version: 1,
                chain: [whole; BUCKETS],
            },
        )
        .unwrap();
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

struct ReplicaMember {
    netns: LabNetns,
    redirector: RedirectorPrograms,
    steering: SocketSteering,
}

/// Simulated edge, which also is the router and has the clients. It sends everything for the tier
/// to the replica that [`TestTier::steer`] names, with hop 0.
struct TestTier {
    edge: LabNetns,
    members: Vec<ReplicaMember>,
}

fn bridge(netns: &LabNetns, args: &str) {
    let all: Vec<&str> = ["-n", netns.name()]
        .into_iter()
        .chain(args.split(' '))
        .collect();
    let o = Command::new("bridge").args(&all).output().unwrap();
    assert!(
        o.status.success(),
        "bridge {all:?}: {}",
        String::from_utf8_lossy(&o.stderr)
    );
}

fn sysctl(netns: &LabNetns, name: &str, value: &str) {
    netns
        .within(|| std::fs::write(format!("/proc/sys/net/{name}"), value))
        .unwrap();
}

fn make_edge() -> LabNetns {
    let edge = LabNetns::bare();
    sysctl(&edge, "ipv4/ip_forward", "1");
    edge.ip("addr add 250.1.0.1/32 dev lo");
    for (dev, vni, v4, v6) in [
        ("vxtier", 0xca0a1, "10.1.1.2", "fd01::2"),
        ("vxone", TENANT, "10.1.2.2", "fd02::2"),
        ("vxtwo", OTHER, "10.1.3.2", "fd03::2"),
    ] {
        edge.ip(&format!("link add {dev} address 02:ca:0a:01:00:02 mtu 1400 type vxlan id {vni} dstport 4789 local 250.1.0.1 nolearning"));
        edge.ip(&format!("link set {dev} up"));
        edge.ip(&format!("addr add {v4}/32 dev {dev}"));
        edge.ip(&format!("-6 addr add {v6}/128 dev {dev} nodad"));
    }
    edge.ip("route add 240.0.0.0/8 dev vxtier src 10.1.1.2");
    edge.ip("-6 route add fdca:a1:0:240::/96 dev vxtier src fd01::2");
    edge.ip("neigh add 240.0.0.7 lladdr 02:ca:0a:01:00:01 dev vxtier nud permanent");
    edge.ip("-6 neigh add fdca:a1:0:240::7 lladdr 02:ca:0a:01:00:01 dev vxtier nud permanent");
    edge
}

/// Creates a namespace that is linked to the edge, without programs.
fn make_replica(edge: &LabNetns, n: u8) -> LabNetns {
    let netns = LabNetns::bare();
    edge.ip(&format!(
        "link add e{n} type veth peer name eth0 netns {}",
        netns.name()
    ));
    edge.ip(&format!("link set e{n} up"));
    edge.ip(&format!(
        "route add {}/32 dev e{n} src 250.1.0.1",
        underlay(n)
    ));
    netns.ip("link set eth0 up");
    netns.ip(&format!("addr add {}/32 dev eth0", underlay(n)));
    netns.ip("route add 250.1.0.1/32 dev eth0");
    netns.ip("route add default via 250.1.0.1");
    netns
}

impl TestTier {
    fn new(count: u8, chain: &[u16]) -> Self {
        let edge = make_edge();
        let members = (1..=count)
            .map(|n| {
                let netns = make_replica(&edge, n);
                let redirector =
                    RedirectorPrograms::attach(&options(Some(&netns), n, None)).unwrap();
                let steering = SocketSteering::attach(Some(&netns.path()), None).unwrap();
                let listener = netns.listen("[::]:20000");
                steering.set(ServiceListener::Plain, &listener).unwrap();
                serve(listener, n);
                fill(&redirector, chain, 0);
                ReplicaMember {
                    netns,
                    redirector,
                    steering,
                }
            })
            .collect();
        let tier = Self { edge, members };
        tier.steer(1);
        tier
    }

    fn steer(&self, n: u8) {
        bridge(
            &self.edge,
            &format!(
                "fdb replace 02:ca:0a:01:00:01 dev vxtier dst {} self permanent",
                underlay(n)
            ),
        );
    }

    fn fill(&self, chain: &[u16]) {
        for m in &self.members {
            fill(&m.redirector, chain, 0);
        }
    }

    fn dial(&self, to: &str) -> std::io::Result<TcpStream> {
        dial(&self.edge, to)
    }

    fn count(&self, n: usize, name: &str) -> u64 {
        counts(&self.members[n - 1].redirector)[name]
    }
}

fn dial(edge: &LabNetns, to: &str) -> std::io::Result<TcpStream> {
    let to: SocketAddr = to.parse().unwrap();
    let s = edge.within(|| TcpStream::connect_timeout(&to, wait()))?;
    s.set_read_timeout(Some(wait())).unwrap();
    Ok(s)
}

fn counts(r: &RedirectorPrograms) -> HashMap<&'static str, u64> {
    r.counts().unwrap().into_iter().collect()
}

/// Returns the reply on this connection, which names the replica.
fn exchange(s: &mut TcpStream) -> String {
    s.write_all(b"who\n").unwrap();
    let mut answer = [0; 7];
    s.read_exact(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn a_session_begins_at_the_head_and_stays_where_it_began() {
    // `fill` sets the chain of all buckets, which begins with the head; `steer` selects the replica
    // to which the edge sends.
    let t = TestTier::new(3, &[1, 2, 3]);
    for to in [V4, V6] {
        t.fill(&[1, 2, 3]);
        t.steer(2);
        let mut first = t.dial(to).unwrap();
        assert_eq!(
            exchange(&mut first),
            "1: who\n",
            "{to}: dialled at 2, which is not the head"
        );
        t.steer(1);
        assert_eq!(exchange(&mut first), "1: who\n", "{to}: at its owner");
        t.fill(&[2, 1]);
        t.steer(2);
        assert_eq!(
            exchange(&mut first),
            "1: who\n",
            "{to}: an old session when the head is another"
        );
        let mut second = t.dial(to).unwrap();
        assert_eq!(exchange(&mut second), "2: who\n", "{to}: a new one");
        t.fill(&[3, 2, 1]);
        t.steer(3);
        let mut third = t.dial(to).unwrap();
        for (s, who) in [
            (&mut first, "1: who\n"),
            (&mut second, "2: who\n"),
            (&mut third, "3: who\n"),
        ] {
            assert_eq!(exchange(s), who, "{to}: along the chain");
        }
    }
    // Once in each family.
    assert_eq!(
        (
            t.count(2, "forwarded_new"),
            t.count(1, "new"),
            t.count(2, "new"),
            t.count(3, "new")
        ),
        (2, 2, 2, 2)
    );
    assert!(t.count(2, "forwarded") > 0 && t.count(3, "forwarded") > 0 && t.count(1, "owned") > 0);
    for n in 1..=3 {
        assert_eq!(
            (t.count(n, "unowned"), t.count(n, "drop_unknown_source")),
            (0, 0),
            "{n}"
        );
    }
}

#[test]
fn bulk_data_passes_the_chain_unchanged() {
    let t = TestTier::new(2, &[1, 2]);
    let mut s = t.dial(V4).unwrap();
    assert_eq!(exchange(&mut s), "1: who\n");
    t.fill(&[2, 1]);
    t.steer(2);
    let line: Vec<u8> = (0..200_000u32)
        .map(|i| b'a' + (i % 26) as u8)
        .chain([b'\n'])
        .collect();
    let mut writer = s.try_clone().unwrap();
    let sent = line.clone();
    let w = std::thread::spawn(move || (0..20).for_each(|_| writer.write_all(&sent).unwrap()));
    let mut r = BufReader::new(s);
    for _ in 0..20 {
        let mut got = Vec::new();
        r.read_until(b'\n', &mut got).unwrap();
        assert!(
            got == [b"1: ".as_slice(), &line].concat(),
            "bytes are lost or changed"
        );
    }
    w.join().unwrap();
}

#[test]
fn syn_cookies_are_owned_by_their_issuer() {
    let t = TestTier::new(2, &[1, 2]);
    for m in &t.members {
        sysctl(&m.netns, "ipv4/tcp_syncookies", "2");
    }
    for (to, steered) in [(V4, 1), (V4, 2), (V6, 1), (V6, 2)] {
        t.steer(steered);
        let before = t.count(1, "cookie");
        let mut s = t.dial(to).unwrap();
        assert_eq!(exchange(&mut s), "1: who\n", "{to} at {steered}");
        assert!(t.count(1, "cookie") > before, "{to} at {steered}");
    }
    assert_eq!(t.count(2, "cookie"), 0, "with a cookie of another replica");
}

#[test]
fn a_dead_gateway_leaves_a_working_redirector() {
    let t = TestTier::new(1, &[1, 2]);
    let second = make_replica(&t.edge, 2);
    let pins = LabPins::new();
    let dir = pins.path();
    let mut gateway = CaseProcess::start(&second, None, "gateway", &[dir.to_str().unwrap()]);
    assert_eq!(gateway.line(), "attached: new");
    t.fill(&[2, 1]);
    t.steer(2);
    let mut s = t.dial(V4).unwrap();
    assert_eq!(exchange(&mut s), "2: who\n");
    gateway.kill();
    let mut after = t.dial(V4).unwrap();
    assert_eq!(
        exchange(&mut after),
        "1: who\n",
        "the map is unchanged, but the SYN was forwarded"
    );
    assert_eq!(exchange(&mut after), "1: who\n");
    // The next process finds the tables and takes over without a gap.
    let mut gateway = CaseProcess::start(
        &second,
        None,
        "gateway",
        &[dir.to_str().unwrap(), "no tables"],
    );
    let line = gateway.line();
    assert!(line.starts_with("attached: adopted"), "{line}");
    let mut s = t.dial(V6).unwrap();
    assert_eq!(exchange(&mut s), "2: who\n");
    assert_eq!(
        exchange(&mut after),
        "1: who\n",
        "a session of the time between"
    );
    gateway.go_on();
    assert_eq!(gateway.line(), "removed");
    let links = second.within(|| {
        Command::new("sh")
            .args(["-c", "ip link; ip rule; ip route show table all"])
            .output()
            .unwrap()
            .stdout
    });
    let left = String::from_utf8_lossy(&links).into_owned();
    // Rules, the table and the addresses of services; the namespace's name may have any digits.
    let is_tiers = |word: &str| word.starts_with("240") || word.starts_with("fdca:a1:0:240");
    assert!(
        !left.contains("tier0") && !left.split_whitespace().any(is_tiers),
        "{left}"
    );
}

#[test]
fn programs_are_replaced_under_load_without_losing_a_byte() {
    let mut t = TestTier::new(2, &[1, 2]);
    let mut s = t.dial(V4).unwrap();
    assert_eq!(exchange(&mut s), "1: who\n");
    t.fill(&[2, 1]);
    t.steer(2);
    let done = Arc::new(AtomicBool::new(false));
    let asking = {
        let done = Arc::clone(&done);
        std::thread::spawn(move || {
            let mut asked = 0u32;
            while !done.load(Ordering::Relaxed) {
                assert_eq!(exchange(&mut s), "1: who\n");
                asked += 1;
            }
            asked
        })
    };
    for _ in 0..10 {
        for (i, n) in [(0, 1), (1, 2)] {
            // A process that finds no pins also loads and fills first.
            let o = options(Some(&t.members[i].netns), n, None);
            let next = RedirectorPrograms::load(&o).unwrap();
            fill(&next, &[2, 1], 0);
            next.go_live(&o).unwrap();
            assert!(next.is_attached() && !t.members[i].redirector.is_attached());
            t.members[i].redirector = next;
        }
    }
    done.store(true, Ordering::Relaxed);
    // Without a program, even for one segment, replica 2 would reset the session instead of passing
    // it on to 1.
    assert!(asking.join().unwrap() > 50);
}

#[test]
fn the_tunnel_device_is_recreated_only_if_necessary() {
    let edge = make_edge();
    let netns = make_replica(&edge, 1);
    let index = || {
        let shown = Command::new("ip")
            .args([
                "-n",
                netns.name(),
                "-oneline",
                "link",
                "show",
                "dev",
                "tier0",
            ])
            .output()
            .unwrap()
            .stdout;
        String::from_utf8(shown)
            .unwrap()
            .split(':')
            .next()
            .unwrap()
            .to_string()
    };
    let mut o = options(Some(&netns), 1, None);
    let first = RedirectorPrograms::attach(&o).unwrap();
    let made = index();
    let second = RedirectorPrograms::attach(&o).unwrap();
    assert_eq!(index(), made);
    assert!(second.is_attached() && !first.is_attached());
    o.mtu = 1300;
    RedirectorPrograms::attach(&o).unwrap();
    assert_eq!(index(), made, "the size of packets can change");
    (o.tunnels, o.tunnel_port) = (0, 0);
    let third = RedirectorPrograms::attach(&o).unwrap();
    assert_ne!(index(), made, "source ports cannot");
    assert!(third.is_attached());
    netns.ip("link del tier0");
    assert!(!third.is_attached());
    third.go_live(&o).unwrap();
    assert!(third.is_attached(), "repaired");
    third.remove().unwrap();
    // Nothing is left to remove, which is no error.
    redirector::remove(Some(&netns.path()), "eth0", None).unwrap();
    let e = RedirectorPrograms::attach(&RedirectorOptions {
        device: "eth9".into(),
        ..options(Some(&netns), 1, None)
    })
    .unwrap_err()
    .to_string();
    assert!(e.contains("eth9"), "{e}");
}

/// No device has a service's address. The kernel's errors must nevertheless have the service as
/// their source, in both families.
#[test]
fn packets_without_a_listener_are_refused_from_the_service_address() {
    let t = TestTier::new(1, &[1]);
    // The last column is the type of Destination Unreachable in ICMP and ICMPv6.
    for (own, service, domain, protocol, unreachable) in [
        (
            "10.1.1.2:0",
            "240.0.0.7:9",
            Domain::IPV4,
            Protocol::ICMPV4,
            3,
        ),
        (
            "[fd01::2]:0",
            "[fdca:a1:0:240::7]:9",
            Domain::IPV6,
            Protocol::ICMPV6,
            1,
        ),
    ] {
        let service: SocketAddr = service.parse().unwrap();
        let raw: UdpSocket = t
            .edge
            .within(|| Socket::new(domain, Type::RAW, Some(protocol)).unwrap())
            .into();
        raw.set_read_timeout(Some(wait())).unwrap();
        let client = t.edge.within(|| UdpSocket::bind(own).unwrap());
        client.set_read_timeout(Some(wait())).unwrap();
        client.connect(service).unwrap();
        client.send(b"anybody?").unwrap();
        let error = client.recv(&mut [0; 16]).unwrap_err();
        assert_eq!(
            error.kind(),
            std::io::ErrorKind::ConnectionRefused,
            "{service}: {error}"
        );
        // No packet of this link is longer.
        let mut packet = [0; 1500];
        // Raw IPv4 sockets deliver the IP header too, raw IPv6 sockets do not (RFC 3542 §3).
        let header = if service.is_ipv6() { 0 } else { 20 };
        let from = loop {
            let (length, from) = raw.recv_from(&mut packet).unwrap();
            // Other packets of ICMP are passed over, for example neighbor discovery.
            if length > header && packet[header] == unreachable {
                break from.ip();
            }
        };
        assert_eq!(from, service.ip());
    }
    // The tunnel device's program has sent one error in each family as a response of the service.
    assert_eq!(
        t.members[0]
            .redirector
            .tunnel_counts()
            .unwrap()
            .into_iter()
            .find(|(name, _)| *name == "service")
            .unwrap()
            .1,
        2
    );
}

/// Waits for the kernel's own first packets on a new device, which are multicast reports (RFC 3810
/// §6.1: two, at most a second apart). The tunnel's program refuses and counts them like other
/// packets.
fn at_rest(redirector: &RedirectorPrograms) {
    let counts = || {
        redirector
            .tunnel_counts()
            .unwrap()
            .into_iter()
            .collect::<HashMap<_, _>>()
    };
    let until = Instant::now() + canal_timing::deadline(Duration::from_secs(20));
    let (mut last, mut since) = (counts(), Instant::now());
    while since.elapsed() < Duration::from_millis(1500) {
        assert!(
            Instant::now() < until,
            "the tunnel is never at rest: {last:?}"
        );
        std::thread::sleep(Duration::from_millis(50));
        let now = counts();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
}

#[test]
fn nothing_leaves_by_the_tunnel_but_services_and_dials() {
    let t = TestTier::new(1, &[1]);
    let r = &t.members[0];
    let send = |from: &str, to: &str, mark: u32| {
        let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
        r.netns.within(|| {
            let s = Socket::new(Domain::for_address(to), Type::DGRAM, None).unwrap();
            s.bind(&from.into()).unwrap();
            s.set_mark(mark).unwrap();
            s.send_to(b"hello", &to.into()).unwrap()
        });
    };
    // This route leads into the tunnel without the mark of a dial.
    r.netns
        .ip("route add 10.9.9.9/32 via 169.254.202.1 dev tier0 onlink");
    // Neighbour discovery of the new devices would count too.
    at_rest(&r.redirector);
    for (case, from, to, mark, counter) in [
        ("the service", "240.0.0.7:9", "10.1.1.2:9", 0, "service"),
        (
            "the service v6",
            "[fdca:a1:0:240::7]:9",
            "[fd01::2]:9",
            0,
            "service",
        ),
        ("a dial", "250.1.0.2:9", "10.1.2.2:9", TENANT, "dialled"),
        (
            "a dial v6",
            "[fdca:a1:0:250::fa01:2]:9",
            "[fd02::2]:9",
            TENANT,
            "dialled",
        ),
        (
            "a service with a mark",
            "240.0.0.7:9",
            "10.1.1.2:9",
            TENANT,
            "drop_source",
        ),
        (
            "the replica without a mark",
            "250.1.0.2:9",
            "10.9.9.9:9",
            0,
            "drop_source",
        ),
        (
            "the tier's own VNI as a mark",
            "250.1.0.2:9",
            "10.1.2.2:9",
            0xca0a1,
            "drop_mark",
        ),
        (
            "a mark that is not a VNI",
            "250.1.0.2:9",
            "10.1.2.2:9",
            0x0100_0000,
            "drop_mark",
        ),
    ] {
        let had: HashMap<_, _> = r.redirector.tunnel_counts().unwrap().into_iter().collect();
        send(from, to, mark);
        let has: HashMap<_, _> = r.redirector.tunnel_counts().unwrap().into_iter().collect();
        assert_eq!(has[counter] - had[counter], 1, "{case}: {has:?}");
    }
    // The kernel counts here if it has no memory for a tunnel key. No case can cause that.
    let after: HashMap<_, _> = r.redirector.tunnel_counts().unwrap().into_iter().collect();
    assert_eq!(after["drop_key"], 0);
}

#[test]
fn the_sessions_of_a_replica_are_few_outside_and_many_inside() {
    let t = TestTier::new(1, &[1]);
    let table = SessionTable::attach(Some(&t.edge.path()), "e1").unwrap();
    let mut all: Vec<TcpStream> = (0..40).map(|_| t.dial(V4).unwrap()).collect();
    all.iter_mut()
        .for_each(|s| assert_eq!(exchange(s), "1: who\n"));
    let (outer, inner) = table.sessions().unwrap();
    // The simulated edge uses a port for each flow, the replica four ports for all.
    assert!(
        inner == 40 && outer <= 44,
        "{outer} outside, {inner} inside"
    );
    let of_replica = outer.saturating_sub(40);
    assert!(of_replica <= 4, "{of_replica}");
}

/// The child's part of a test above: a gateway process with everything that it installs in the
/// kernel.
fn gateway(dir: &str, with_tables: bool) {
    let dir = std::path::Path::new(dir);
    let mut options = options(None, 2, Some(dir));
    if !with_tables {
        (options.number, options.edge) = (0, Ipv4Addr::UNSPECIFIED);
    }
    let redirector = RedirectorPrograms::attach(&options).unwrap();
    let steering = SocketSteering::attach(None, Some(dir)).unwrap();
    if with_tables {
        fill(&redirector, &[2, 1], 0);
    }
    let listener = TcpListener::bind("[::]:20000").unwrap();
    steering.set(ServiceListener::Plain, &listener).unwrap();
    serve(listener, 2);
    assert_eq!(
        (redirector.own().unwrap(), redirector.is_attached()),
        ((2, underlay(0)), true)
    );
    assert_eq!(redirector.is_adopted(), steering.is_adopted());
    print_line(if redirector.is_adopted() {
        "attached: adopted"
    } else {
        "attached: new"
    });
    pause();
    steering.remove().unwrap();
    redirector.remove().unwrap();
    print_line("removed");
}

#[test]
fn the_client() {
    let Some(case) = case() else { return };
    let case: Vec<&str> = case.iter().map(String::as_str).collect();
    match case[..] {
        ["gateway", dir] => gateway(dir, true),
        ["gateway", dir, "no tables"] => gateway(dir, false),
        _ => panic!("{case:?}"),
    }
}

/// Dials `to` as the gateway does for the tenant `vni`.
fn dial_for(
    replica: &ReplicaMember,
    vni: u32,
    to: &str,
    from: IpAddr,
    limit: Duration,
) -> std::io::Result<TcpStream> {
    let to: SocketAddr = to.parse().unwrap();
    replica.netns.within(|| {
        let s = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
        s.set_mark(vni)?;
        s.bind(&SocketAddr::new(from, 0).into())?;
        s.connect_timeout(&to.into(), limit)?;
        Ok(s.into())
    })
}

/// Adds routes and neighbours to the edge, so that the two tenants' answers return in their own
/// tunnels.
fn lead_tenants_back(t: &TestTier) {
    for dev in ["vxone", "vxtwo"] {
        t.edge.ip(&format!(
            "route add 250.1.0.2/32 dev {dev} table {}",
            if dev == "vxone" { 112 } else { 113 }
        ));
        t.edge.ip(&format!(
            "-6 route add fdca:a1:0:250::fa01:2/128 dev {dev} table {}",
            if dev == "vxone" { 112 } else { 113 }
        ));
        t.edge.ip(&format!(
            "neigh add 250.1.0.2 lladdr 02:ca:0a:01:00:01 dev {dev} nud permanent"
        ));
        t.edge.ip(&format!(
            "-6 neigh add fdca:a1:0:250::fa01:2 lladdr 02:ca:0a:01:00:01 dev {dev} nud permanent"
        ));
        bridge(
            &t.edge,
            &format!("fdb add 02:ca:0a:01:00:01 dev {dev} dst 250.1.0.2 self permanent"),
        );
    }
    for (net4, net6, table) in [("10.1.2.2", "fd02::2", 112), ("10.1.3.2", "fd03::2", 113)] {
        t.edge.ip(&format!("rule add from {net4} lookup {table}"));
        t.edge
            .ip(&format!("-6 rule add from {net6} lookup {table}"));
    }
}

/// Checks that no client of a tenant can dial a replica, even if the replica has a listener.
fn refuse_dials_of_clients(t: &TestTier, r: &ReplicaMember) {
    let _admin = r.netns.listen("0.0.0.0:15021");
    t.edge.ip("rule del from 10.1.2.2 lookup 113");
    t.edge.ip("rule add from 10.1.2.2 lookup 112");
    let crossed = t.count(1, "drop_crossed");
    let dialled = t.edge.within(|| {
        let s = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        s.bind(&"10.1.2.2:0".parse::<SocketAddr>().unwrap().into())
            .unwrap();
        s.connect_timeout(
            &"250.1.0.2:15021".parse::<SocketAddr>().unwrap().into(),
            Duration::from_millis(500),
        )
    });
    assert!(dialled.is_err() && t.count(1, "drop_crossed") > crossed);
}

#[test]
fn the_gateway_dials_tenants_by_mark_and_receives_only_from_them() {
    let t = TestTier::new(1, &[1]);
    let r = &t.members[0];
    lead_tenants_back(&t);
    serve(t.edge.listen("[::]:8080"), 9);
    let own4: IpAddr = "250.1.0.2".parse().unwrap();
    let own6: IpAddr = "fdca:a1:0:250::fa01:2".parse().unwrap();
    for (vni, to, from) in [
        (TENANT, "10.1.2.2:8080", own4),
        (OTHER, "10.1.3.2:8080", own4),
        (TENANT, "[fd02::2]:8080", own6),
        (OTHER, "[fd03::2]:8080", own6),
    ] {
        let mut s = dial_for(r, vni, to, from, wait()).unwrap_or_else(|e| panic!("{to}: {e}"));
        s.set_read_timeout(Some(wait())).unwrap();
        assert_eq!(exchange(&mut s), "9: who\n", "{to}");
    }
    assert!(t.count(1, "answer") > 0);
    assert_eq!(t.count(1, "drop_crossed"), 0);
    // A packet of a connection that no longer exists here is reset, with the tenant's own VNI.
    let reset = |from: &str, to: &str| {
        let dialled = || {
            r.redirector
                .tunnel_counts()
                .unwrap()
                .into_iter()
                .find(|(n, _)| *n == "dialled")
                .unwrap()
                .1
        };
        // Earlier connections are still closing.
        until("no connection is open", || {
            r.netns
                .tcp_sockets()
                .iter()
                .all(|socket| [TIME_WAIT, LISTEN].contains(&socket.state))
        });
        let before = dialled();
        t.edge.within(|| {
            let (source, to_ip): (SocketAddr, SocketAddr) =
                (from.parse().unwrap(), to.parse().unwrap());
            // 255 is IPPROTO_RAW: the packet brings its own IP header.
            let raw = Socket::new(
                Domain::for_address(source),
                Type::RAW,
                Some(Protocol::from(255)),
            )
            .unwrap();
            raw.bind(&SocketAddr::new(source.ip(), 0).into()).unwrap();
            raw.send_to(
                &frames::tcp(from, to, frames::ACK, b"late"),
                &SocketAddr::new(to_ip.ip(), 0).into(),
            )
            .unwrap();
        });
        until("the reset", || dialled() > before);
        assert_eq!(dialled() - before, 1, "{from}");
    };
    // No connection has these ports.
    reset("10.1.2.2:8081", "250.1.0.2:999");
    reset("[fd02::2]:8081", "[fdca:a1:0:250::fa01:2]:999");
    // The routes of table 113 lead into another tenant's tunnel, so the endpoint replies with that
    // tenant's VNI. Nothing of that may arrive.
    t.edge.ip("rule del from 10.1.2.2 lookup 112");
    t.edge.ip("rule add from 10.1.2.2 lookup 113");
    // No response may come, and nothing announces that, so the time is short.
    let e = dial_for(
        r,
        TENANT,
        "10.1.2.2:8080",
        own4,
        // A SYN and one repetition after a second stay unanswered.
        Duration::from_millis(1500),
    )
    .unwrap_err();
    assert_eq!(e.kind(), std::io::ErrorKind::TimedOut);
    assert!(t.count(1, "drop_crossed") > 0);
    refuse_dials_of_clients(&t, r);
    let tunnel: HashMap<_, _> = r.redirector.tunnel_counts().unwrap().into_iter().collect();
    assert!(tunnel["dialled"] > 0, "{tunnel:?}");
}

/// Checks that the server for names answers datagrams from the address that was asked.
fn ask_by_datagram(t: &TestTier) {
    for to in ["240.0.0.7:53", "[fdca:a1:0:240::7]:53"] {
        let s = t.edge.within(|| {
            UdpSocket::bind(if to.starts_with('[') {
                "[::]:0"
            } else {
                "0.0.0.0:0"
            })
            .unwrap()
        });
        s.set_read_timeout(Some(wait())).unwrap();
        s.send_to(b"question", to).unwrap();
        let mut b = [0; 64];
        let (n, from) = s.recv_from(&mut b).unwrap_or_else(|e| panic!("{to}: {e}"));
        assert_eq!((&b[..n], from), (&b"question"[..], to.parse().unwrap()));
    }
}

#[test]
fn the_three_listeners_leave_the_map_when_they_close() {
    let t = TestTier::new(1, &[1]);
    let r = &t.members[0];
    let dns = r.netns.within(|| UdpSocket::bind("[::]:20053").unwrap());
    let hbone = r.netns.listen("[::]:20008");
    r.steering.set(ServiceListener::Dns, &dns).unwrap();
    r.steering.set(ServiceListener::Hbone, &hbone).unwrap();
    serve(hbone, 8);
    // The replies have the destination of the request as their source, as a server does it with
    // IP_PKTINFO.
    let answers = r.netns.within(|| {
        ["240.0.0.7:53", "[fdca:a1:0:240::7]:53"].map(|at| UdpSocket::bind(at).unwrap())
    });
    std::thread::spawn(move || {
        let mut b = [0; 64];
        while let Ok((n, from)) = dns.recv_from(&mut b) {
            let from = SocketAddr::new(from.ip().to_canonical(), from.port());
            // A client without a reply fails the test.
            let _ = answers[usize::from(from.is_ipv6())].send_to(&b[..n], from);
        }
    });
    for (to, who) in [
        ("240.0.0.7:15008", "8: who\n"),
        ("[fdca:a1:0:240::7]:15008", "8: who\n"),
        ("240.0.0.7:53", "1: who\n"),
        (V6, "1: who\n"),
    ] {
        assert_eq!(exchange(&mut t.dial(to).unwrap()), who, "{to}");
    }
    ask_by_datagram(&t);
    assert!(
        [
            ServiceListener::Hbone,
            ServiceListener::Plain,
            ServiceListener::Dns
        ]
        .into_iter()
        .all(|d| r.steering.is_open(d))
    );
    let group = [0; 2].map(|_| {
        r.netns.within(|| {
            let s = Socket::new(Domain::IPV6, Type::STREAM, None).unwrap();
            s.set_reuse_port(true).unwrap();
            s.bind(&"[::]:20080".parse::<SocketAddr>().unwrap().into())
                .unwrap();
            // Any backlog would do: the test dials one connection after the other.
            s.listen(128).unwrap();
            TcpListener::from(s)
        })
    });
    r.steering.set(ServiceListener::Plain, &group[0]).unwrap();
    for (n, listener) in group.into_iter().enumerate() {
        serve(listener, 3 + n as u8);
    }
    // Forty connections reach both sockets of the SO_REUSEPORT group.
    let answers: HashSet<String> = (0..40)
        .map(|_| exchange(&mut t.dial(V4).unwrap()))
        .collect();
    assert_eq!(
        answers,
        HashSet::from(["3: who\n".into(), "4: who\n".into()]),
        "both of the group"
    );
    r.steering.clear_sockets(ServiceListener::Hbone).unwrap();
    // A listener that is already removed is no error.
    r.steering.clear_sockets(ServiceListener::Hbone).unwrap();
    let _own = r.netns.listen("[::]:15008");
    let e = t.dial("240.0.0.7:15008").unwrap_err();
    assert_eq!(
        e.kind(),
        std::io::ErrorKind::ConnectionRefused,
        "the kernel resets, and no other listener is used"
    );
    assert_eq!(
        (
            t.count(1, "unowned"),
            r.steering.is_open(ServiceListener::Hbone)
        ),
        (1, false)
    );
    // Each verdict of the program has occurred.
    let counted: HashMap<_, _> = r.steering.counts().unwrap().into_iter().collect();
    assert!(counted.values().all(|c| *c > 0), "{counted:?}");
}

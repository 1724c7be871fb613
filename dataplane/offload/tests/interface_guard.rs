//! Tests the interface guard on interfaces of namespaces that are made for it, and frame by frame.
//! A container can send with its own MAC and addresses only, also while no agent runs.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use crate::frames::{icmp, udp};
use crate::lab::{LabNetns, LabPins};
use canal_offload::interface_guard::{self, InterfaceBinding, InterfaceGuard};

/// Time that the tests wait for a packet that is stopped. Every such wait takes all of it, so it is
/// short.
const NEVER: Duration = Duration::from_millis(500);
/// Verdict TC_ACT_SHOT.
const DROPPED: u32 = 2;
/// Verdict TC_ACT_UNSPEC: other filters follow, then the stack.
const PASSED: u32 = u32::MAX;
const MAC_A: [u8; 6] = [2, 0, 0, 0, 0, 0xa];
const MAC_B: [u8; 6] = [2, 0, 0, 0, 0, 0xb];
const A4: &str = "10.88.0.10";
const B4: &str = "10.88.0.11";
const A6: &str = "fd88::a";
const B6: &str = "fd88::b";
const HOST4: &str = "10.88.0.1";
const HOST6: &str = "fd88::1";
/// Link-local addresses that result from the MAC addresses.
const A_LOCAL: &str = "fe80::ff:fe00:a";
const B_LOCAL: &str = "fe80::ff:fe00:b";

/// Host with two containers, each in a namespace of its own.
struct GuardedHost {
    host: LabNetns,
    containers: [LabNetns; 2],
}

fn scene() -> GuardedHost {
    let (host, containers) = (LabNetns::bare(), [LabNetns::bare(), LabNetns::bare()]);
    // Otherwise the kernel itself would drop some of the packets that the guard must drop.
    host.within(|| {
        ["all", "default"].map(|of| {
            std::fs::write(format!("/proc/sys/net/ipv4/conf/{of}/rp_filter"), "0").unwrap()
        })
    });
    for (container, (name, mac)) in containers.iter().zip([("a", MAC_A), ("b", MAC_B)]) {
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        host.ip(&format!(
            "link add to-{name} type veth peer name eth0 address {mac} netns {}",
            container.name()
        ));
        host.ip(&format!("link set to-{name} up"));
        host.ip(&format!("addr add {HOST4}/32 dev to-{name}"));
        host.ip(&format!("addr add {HOST6}/128 dev to-{name} nodad"));
        let (own4, own6) = if name == "a" { (A4, A6) } else { (B4, B6) };
        host.ip(&format!("route add {own4}/32 dev to-{name}"));
        host.ip(&format!("-6 route add {own6}/128 dev to-{name}"));
        container.ip("link set eth0 up");
        container.ip(&format!("addr add {own4}/24 dev eth0"));
        container.ip(&format!("addr add {own6}/64 dev eth0 nodad"));
    }
    GuardedHost { host, containers }
}

fn binding(device: &str, mac: [u8; 6], addresses: &[&str]) -> InterfaceBinding {
    InterfaceBinding {
        device: device.into(),
        vni: 101,
        mac,
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
    }
}

fn both() -> [InterfaceBinding; 2] {
    [
        binding("to-a", MAC_A, &[A4, A6]),
        binding("to-b", MAC_B, &[B4, B6]),
    ]
}

fn count(guard: &InterfaceGuard, name: &str) -> u64 {
    guard
        .counts()
        .unwrap()
        .into_iter()
        .find(|(n, _)| *n == name)
        .unwrap_or_else(|| panic!("no counter {name}"))
        .1
}

impl GuardedHost {
    /// Returns true if the host receives what container `index` sends from `from`.
    fn receives(&self, index: usize, from: &str, to: &str) -> bool {
        self.receives_within(canal_timing::deadline(NEVER), index, from, to)
    }

    /// Returns true if the host does not receive what container `index` sends from `from`.
    fn never_receives(&self, index: usize, from: &str, to: &str) -> bool {
        !self.receives_within(NEVER, index, from, to)
    }

    fn receives_within(&self, limit: Duration, index: usize, from: &str, to: &str) -> bool {
        let to: IpAddr = to.parse().unwrap();
        let heard = self
            .host
            .within(|| UdpSocket::bind(SocketAddr::new(to, 0)).unwrap());
        heard
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        let at = heard.local_addr().unwrap();
        let from: IpAddr = from.parse().unwrap();
        let socket =
            self.containers[index].within(|| UdpSocket::bind(SocketAddr::new(from, 0)).unwrap());
        let (started, mut sent) = (Instant::now(), 0);
        while sent < 3 || started.elapsed() < limit {
            // If the neighbor is not found, a later send returns the error.
            let _ = socket.send_to(b"hello", at);
            sent += 1;
            if heard
                .recv_from(&mut [0; 16])
                .is_ok_and(|(_, who)| who.ip() == from)
            {
                return true;
            }
        }
        false
    }

    fn index(&self, device: &str) -> u32 {
        let out = std::process::Command::new("ip")
            .args(["-n", self.host.name(), "-o", "link", "show", device])
            .output()
            .unwrap();
        String::from_utf8(out.stdout)
            .unwrap()
            .split(':')
            .next()
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }
}

#[test]
fn a_container_sends_by_its_own_addresses_and_no_others() {
    let s = scene();
    // 10.88.0.99 is bound to no container.
    for container in &s.containers {
        container.ip("addr add 10.88.0.99/24 dev eth0");
    }
    // Container 0 also has the addresses of container 1; without the guard all of it arrives.
    s.containers[0].ip(&format!("addr add {B4}/24 dev eth0"));
    s.containers[0].ip(&format!("addr add {B6}/64 dev eth0 nodad"));
    assert!(
        s.receives(0, A4, HOST4) && s.receives(0, B4, HOST4) && s.receives(0, B6, HOST6),
        "nothing guards yet"
    );
    let guard = InterfaceGuard::load(Some(&s.host.path()), None).unwrap();
    assert!(guard.apply(&both()).unwrap().is_empty());
    for (container, from, to) in [
        (0, A4, HOST4),
        (0, A6, HOST6),
        (1, B4, HOST4),
        (1, B6, HOST6),
    ] {
        assert!(
            s.receives(container, from, to),
            "{from} is the container's own"
        );
    }
    assert_eq!(count(&guard, "drop_address"), 0);
    for (container, from, to) in [(0, B4, HOST4), (0, B6, HOST6), (1, "10.88.0.99", HOST4)] {
        // The kernel may first ask for the receiver's MAC, so the guard may drop the ARP or
        // neighbour discovery packet.
        let before = count(&guard, "drop_address")
            + count(&guard, "drop_arp")
            + count(&guard, "drop_discovery");
        assert!(
            s.never_receives(container, from, to),
            "{from} is not the container's"
        );
        assert!(
            count(&guard, "drop_address")
                + count(&guard, "drop_arp")
                + count(&guard, "drop_discovery")
                > before,
            "{from}: counted"
        );
    }
    let refused = guard.refused().unwrap();
    assert_eq!(
        refused
            .iter()
            .map(|r| (r.device.as_str(), r.vni))
            .collect::<Vec<_>>(),
        [("to-a", 101), ("to-b", 101)]
    );
    assert!(refused.iter().all(|r| r.frames > 0));
    assert_eq!(refused[1].last_address, Some("10.88.0.99".parse().unwrap()));
    // The container uses another MAC, then its own again.
    s.containers[0].ip("link set eth0 address 02:00:00:00:00:0b");
    assert!(s.never_receives(0, A4, HOST4));
    assert!(count(&guard, "drop_mac") > 0);
    s.containers[0].ip("link set eth0 address 02:00:00:00:00:0a");
    assert!(s.receives(0, A4, HOST4));
}

/// Builds an Ethernet frame.
fn eth(mac: [u8; 6], kind: u16, inside: &[u8]) -> Vec<u8> {
    [&[0xff; 6][..], &mac, &kind.to_be_bytes(), inside].concat()
}

fn packet(mac: [u8; 6], inside: &[u8]) -> Vec<u8> {
    eth(
        mac,
        if inside[0] >> 4 == 6 { 0x86dd } else { 0x800 },
        inside,
    )
}

fn arp(operation: u8, mac: [u8; 6], sender: &str, target: &str) -> Vec<u8> {
    let ip = |text: &str| text.parse::<std::net::Ipv4Addr>().unwrap().octets();
    let head = [0, 1, 8, 0, 6, 4, 0, operation];
    eth(
        MAC_A,
        0x806,
        &[&head[..], &mac, &ip(sender), &[0; 6], &ip(target)].concat(),
    )
}

/// Builds a neighbor discovery message with one option; 0 stands for none.
fn discovery(from: &str, kind: u8, target: &str, option: u8, mac: [u8; 6]) -> Vec<u8> {
    let target: std::net::Ipv6Addr = target.parse().unwrap();
    let mut rest = target.octets().to_vec();
    if option > 0 {
        rest.extend([option, 1]);
        rest.extend(mac);
    }
    packet(MAC_A, &icmp(from, "ff02::1", kind, 0, [0; 4], &rest))
}

/// A case's name, the frame, the verdict, and the counter.
type GuardCase = (&'static str, Vec<u8>, u32, &'static str);

fn from(source: &str, to: &str) -> Vec<u8> {
    udp(&format!("{source}:1000"), &format!("{to}:53"), b"x")
}

/// Returns frames with own and foreign addresses, MACs and protocols. The first is one that passes.
fn address_cases() -> Vec<GuardCase> {
    let (from6, to6) = (format!("[{A6}]:1000"), format!("[{HOST6}]:53"));
    let udp6 = |source: &str| udp(&format!("[{source}]:1000"), &to6, b"x");
    // 0x8100 is a VLAN tag, here of VLAN 7 with an IPv4 packet behind it.
    let vlan = eth(
        MAC_A,
        0x8100,
        &[&[0, 7, 8, 0][..], &from(A4, HOST4)].concat(),
    );
    vec![
        (
            "own IPv4",
            packet(MAC_A, &from(A4, HOST4)),
            PASSED,
            "passed_v4",
        ),
        (
            "own IPv6",
            packet(MAC_A, &udp(&from6, &to6, b"x")),
            PASSED,
            "passed_v6",
        ),
        (
            "another's IPv4",
            packet(MAC_A, &from(B4, HOST4)),
            DROPPED,
            "drop_address",
        ),
        (
            "another's IPv6",
            packet(MAC_A, &udp6(B6)),
            DROPPED,
            "drop_address",
        ),
        (
            "nobody's IPv4",
            packet(MAC_A, &from("0.0.0.0", HOST4)),
            DROPPED,
            "drop_address",
        ),
        (
            "an IPv4-mapped IPv6 address",
            packet(MAC_A, &udp6(&format!("::ffff:{A4}"))),
            DROPPED,
            "drop_address",
        ),
        (
            "another's link-local address",
            packet(MAC_A, &udp6(B_LOCAL)),
            DROPPED,
            "drop_address",
        ),
        (
            "own link-local address",
            packet(MAC_A, &udp6(A_LOCAL)),
            PASSED,
            "passed_v6",
        ),
        (
            "another MAC",
            packet(MAC_B, &from(A4, HOST4)),
            DROPPED,
            "drop_mac",
        ),
        ("a VLAN", vlan, DROPPED, "drop_protocol"),
        (
            // 0x88cc is LLDP.
            "no IP",
            eth(MAC_A, 0x88cc, &[0; 40]),
            DROPPED,
            "drop_protocol",
        ),
        (
            "cut short",
            // A whole ARP frame has 42 bytes.
            arp(1, MAC_A, A4, HOST4)[..30].to_vec(),
            DROPPED,
            "drop_malformed",
        ),
    ]
}

fn arp_cases() -> Vec<GuardCase> {
    // The operations of ARP: 1 is a request, 2 a reply.
    vec![
        (
            "ARP for the gateway",
            arp(1, MAC_A, A4, HOST4),
            PASSED,
            "passed_arp",
        ),
        (
            "an ARP probe",
            arp(1, MAC_A, "0.0.0.0", A4),
            PASSED,
            "passed_arp",
        ),
        (
            "an ARP answer",
            arp(2, MAC_A, A4, HOST4),
            PASSED,
            "passed_arp",
        ),
        (
            "an ARP answer for another",
            arp(2, MAC_A, B4, HOST4),
            DROPPED,
            "drop_arp",
        ),
        (
            "gratuitous ARP for the gateway",
            arp(1, MAC_A, HOST4, HOST4),
            DROPPED,
            "drop_arp",
        ),
        (
            "ARP that names another MAC",
            arp(2, MAC_B, A4, HOST4),
            DROPPED,
            "drop_arp",
        ),
        (
            "an answer of an unknown host",
            arp(2, MAC_A, "0.0.0.0", HOST4),
            DROPPED,
            "drop_arp",
        ),
    ]
}

fn solicitation_cases() -> Vec<GuardCase> {
    vec![
        (
            "solicitation",
            discovery(A6, 135, HOST6, 1, MAC_A),
            PASSED,
            "passed_discovery",
        ),
        (
            "solicitation by the link-local address",
            discovery(A_LOCAL, 135, HOST6, 1, MAC_A),
            PASSED,
            "passed_discovery",
        ),
        (
            "solicitation with another's MAC",
            discovery(A6, 135, HOST6, 1, MAC_B),
            DROPPED,
            "drop_discovery",
        ),
        (
            "solicitation as another",
            discovery(B6, 135, HOST6, 1, MAC_A),
            DROPPED,
            "drop_discovery",
        ),
        (
            "search for a duplicate of the own",
            discovery("::", 135, A6, 0, MAC_A),
            PASSED,
            "passed_discovery",
        ),
        (
            "search for a duplicate of another's",
            discovery("::", 135, B6, 0, MAC_A),
            DROPPED,
            "drop_discovery",
        ),
    ]
}

/// Returns advertisements, and other messages of ICMPv6.
fn advertisement_cases() -> Vec<GuardCase> {
    // ICMPv6 types: 134 router advertisement, 136 neighbour advertisement, 137 redirect, 143
    // listener report, 128 echo. The IPv6 header takes bytes 14 to 53 of the frame.
    // Options: 1 is the sender's link-layer address, 2 the target's. Next headers: 58 is ICMPv6, 60
    // destination options.
    let mut hidden = discovery(A6, 136, B6, 2, MAC_A);
    // This is the same advertisement behind a destination options header that contains only
    // padding.
    hidden[14 + 6] = 60;
    let length = u16::from_be_bytes([hidden[18], hidden[19]]) + 8;
    hidden[18..20].copy_from_slice(&length.to_be_bytes());
    hidden.splice(54..54, [58, 0, 1, 4, 0, 0, 0, 0]);
    vec![
        (
            "advertisement",
            discovery(A6, 136, A6, 2, MAC_A),
            PASSED,
            "passed_discovery",
        ),
        (
            "advertisement of the link-local address",
            discovery(A_LOCAL, 136, A_LOCAL, 2, MAC_A),
            PASSED,
            "passed_discovery",
        ),
        (
            "advertisement of another's",
            discovery(A6, 136, B6, 2, MAC_A),
            DROPPED,
            "drop_discovery",
        ),
        (
            "advertisement of the gateway",
            discovery(A_LOCAL, 136, "fe80::1", 2, MAC_A),
            DROPPED,
            "drop_discovery",
        ),
        (
            "advertisement with another's MAC",
            discovery(A6, 136, A6, 2, MAC_B),
            DROPPED,
            "drop_discovery",
        ),
        (
            "advertisement behind an extension header",
            hidden,
            DROPPED,
            "drop_discovery",
        ),
        (
            "a router's advertisement",
            discovery(A_LOCAL, 134, A6, 1, MAC_A),
            DROPPED,
            "drop_discovery",
        ),
        (
            "a redirect",
            discovery(A_LOCAL, 137, A6, 2, MAC_A),
            DROPPED,
            "drop_discovery",
        ),
        (
            "listener report",
            packet(MAC_A, &icmp(A_LOCAL, "ff02::16", 143, 0, [0; 4], &[])),
            PASSED,
            "passed_discovery",
        ),
        (
            "echo",
            packet(MAC_A, &icmp(A6, HOST6, 128, 0, [0; 4], b"x")),
            PASSED,
            "passed_v6",
        ),
        (
            "echo as another",
            packet(MAC_A, &icmp(B6, HOST6, 128, 0, [0; 4], b"x")),
            DROPPED,
            "drop_address",
        ),
    ]
}

#[test]
fn every_frame_with_a_foreign_address_is_refused_and_counted() {
    let s = scene();
    let guard = InterfaceGuard::load(Some(&s.host.path()), None).unwrap();
    guard.apply(&[binding("to-a", MAC_A, &[A4, A6])]).unwrap();
    let (a, b) = (s.index("to-a"), s.index("to-b"));
    let cases = [
        address_cases(),
        arp_cases(),
        solicitation_cases(),
        advertisement_cases(),
    ]
    .concat();
    for (case, frame, verdict, counter) in &cases {
        let before = count(&guard, counter);
        let ran = s
            .host
            .within(|| guard.test_frame(a, frame))
            .unwrap_or_else(|e| panic!("{case}: {e}"));
        assert_eq!(ran, *verdict, "{case}");
        assert_eq!(count(&guard, counter), before + 1, "{case}");
    }
    // The program refuses everything from an interface that is not bound, even frames that would be
    // correct for another one.
    assert_eq!(
        s.host.within(|| guard.test_frame(b, &cases[0].1)).unwrap(),
        DROPPED
    );
    assert_eq!(count(&guard, "drop_unbound"), 1);
}

#[test]
fn interfaces_stay_guarded_over_an_agents_restart_until_they_are_released() {
    let (s, pins) = (scene(), LabPins::new());
    s.containers[0].ip(&format!("addr add {B4}/24 dev eth0"));
    let load = || InterfaceGuard::load(Some(&s.host.path()), Some(pins.path())).unwrap();
    let first = load();
    let missing = binding("to-nowhere", MAC_B, &[B4]);
    let failed = first.apply(&[&both()[..], &[missing]].concat()).unwrap();
    assert_eq!(
        failed.keys().collect::<Vec<_>>(),
        ["to-nowhere"],
        "only the interface that does not exist"
    );
    drop(first);
    assert!(
        s.receives(0, A4, HOST4) && s.never_receives(0, B4, HOST4),
        "no agent runs"
    );
    let second = load();
    assert!(
        !second.is_guarded("to-a"),
        "the earlier program is there yet"
    );
    assert!(second.apply(&both()).unwrap().is_empty());
    assert!(second.is_guarded("to-a") && second.is_guarded("to-b"));
    assert!(s.receives(0, A4, HOST4) && s.never_receives(0, B4, HOST4));
    assert!(
        count(&second, "drop_arp") + count(&second, "drop_address") > 0,
        "the counters are the earlier agent's too"
    );
    // An address moves from b to a, and b is not bound any more.
    second.apply(&[binding("to-a", MAC_A, &[A4, B4])]).unwrap();
    assert!(s.receives(0, B4, HOST4) && !second.is_guarded("to-b"));
    drop(second);
    interface_guard::remove(Some(&s.host.path()), pins.path()).unwrap();
    assert!(!pins.path().exists(), "nothing stays");
    s.containers[0].ip("addr add 10.88.0.77/24 dev eth0");
    assert!(
        s.receives(0, "10.88.0.77", HOST4),
        "nothing guards any more"
    );
}

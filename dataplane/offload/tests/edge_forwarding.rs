//! Tests the edge between real devices: a pod behind its node's VXLAN device, a router, the edge,
//! and a replica behind its own VXLAN device. TCP carries some megabytes both ways while agents
//! stop and start. Also tests errors and packet sizes.
//!
//! The replica here is a plain VXLAN device with the tier's VNI. What a redirector adds is tested
//! in the redirector's tests.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::lab::{LabNetns, LabPins, until};
use canal_abi::tier::{
    Address, AddressKey, BUCKETS, CHAIN, EDGE_MAC, NodeKey, Prefix, PrefixKey, REPLICA_MAC,
    Replica, Return, TIER_VNI, Table, address_be,
};
use canal_offload::edge::{self, EdgeOptions, EdgeProgram, EdgeProgramSettings};

const EDGE: Ipv4Addr = Ipv4Addr::new(250, 1, 0, 1);
const REPLICA: Ipv4Addr = Ipv4Addr::new(250, 1, 0, 3);
const NODE: Ipv4Addr = Ipv4Addr::new(172, 20, 0, 11);
const TENANT: u32 = 0x70;
const SERVICE: u32 = 0x01_0203;
const NODE_MAC: [u8; 6] = [2, 2, 2, 2, 2, 0xa0];

fn mac(m: [u8; 6]) -> String {
    m.map(|b| format!("{b:02x}")).join(":")
}

struct EdgeForwardingFixture {
    pod: LabNetns,
    replica: LabNetns,
    edge: LabNetns,
    router: LabNetns,
    _node: LabNetns,
}

/// Creates the path. `sums` says whether the outer UDP headers have checksums.
fn create_path(sums: &str) -> EdgeForwardingFixture {
    let [router, node, pod, edge, replica] = [(); 5].map(|()| LabNetns::bare());
    // The router connects three subnets.
    router.within(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
    for (device, host, gateway, address) in [
        ("node", &node, "172.20.0.10", NODE),
        ("edge", &edge, "250.1.0.0", EDGE),
        ("replica", &replica, "250.1.0.2", REPLICA),
    ] {
        router.ip(&format!(
            "link add {device} type veth peer name eth0 netns {}",
            host.name()
        ));
        router.ip(&format!("addr add {gateway}/31 dev {device}"));
        router.ip(&format!("link set {device} up"));
        host.ip(&format!("addr add {address}/31 dev eth0"));
        host.ip("link set eth0 up");
        // All paths between two hosts cross the router.
        host.ip(&format!("route add default via {gateway}"));
    }
    let vxlan = |at: &LabNetns, name: &str, id: u32, mac: &str, local: Ipv4Addr| {
        // At the device's MTU of 1450, the 50 bytes of outer headers still fit into 1500.
        let tunnel = format!(
            "type vxlan id {id} local {local} remote {EDGE} dstport 4789 nolearning {sums}"
        );
        at.ip(&format!("link add {name} mtu 1450 address {mac} {tunnel}"));
    };
    // The device is in the pod's namespace; its tunnel stays in the node's.
    vxlan(&node, "vx", TENANT, &mac(NODE_MAC), NODE);
    node.ip(&format!("link set vx netns {}", pod.name()));
    vxlan(&replica, "tier", TIER_VNI, &mac(REPLICA_MAC), REPLICA);
    vxlan(&replica, "dial", TENANT, &mac(REPLICA_MAC), REPLICA);
    let join = |at: &LabNetns, device: &str, own: [&str; 2], peers: [&str; 2]| {
        at.ip(&format!("link set {device} up"));
        for (own, peer) in own.into_iter().zip(peers) {
            // Duplicate address detection would delay the use of an IPv6 address.
            let (length, nodad) = if own.contains(':') {
                (128, " nodad")
            } else {
                (32, "")
            };
            // The replica dials from its underlay address, which `eth0` has already.
            if own != "250.1.0.3" {
                at.ip(&format!("addr add {own}/{length} dev {device}{nodad}"));
            }
            at.ip(&format!("route add {peer}/{length} dev {device} src {own}"));
            at.ip(&format!(
                "neigh add {peer} lladdr {} dev {device} nud permanent",
                mac(EDGE_MAC)
            ));
        }
    };
    join(
        &pod,
        "vx",
        ["10.1.1.2", "fd01:1::2"],
        ["10.9.0.1", "fd09::1"],
    );
    join(
        &pod,
        "vx",
        ["10.1.1.3", "fd01:1::3"],
        ["250.1.0.3", "fdca:a1:0:250::fa01:3"],
    );
    join(
        &replica,
        "tier",
        ["240.1.2.3", "fdca:a1:0:240::1:203"],
        ["10.1.1.2", "fd01:1::2"],
    );
    join(
        &replica,
        "dial",
        ["250.1.0.3", "fdca:a1:0:250::fa01:3"],
        ["10.1.1.3", "fd01:1::3"],
    );
    EdgeForwardingFixture {
        router,
        pod,
        replica,
        edge,
        _node: node,
    }
}

/// Point at which packets get the form of a real wire: cut into segments with complete checksums,
/// which the receiver verifies. A veth passes pending checksums on, so a wrong one would never be
/// noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WireOffload {
    /// Packets never get that form.
    None,
    /// Packets get that form in front of the edge.
    Ends,
    /// Packets get that form behind the edge, so the edge handles GSO packets and pending
    /// checksums.
    Router,
}

const WIRES: [(&str, WireOffload); 6] = [
    ("noudpcsum", WireOffload::None),
    ("udpcsum", WireOffload::None),
    ("noudpcsum", WireOffload::Ends),
    ("udpcsum", WireOffload::Ends),
    ("noudpcsum", WireOffload::Router),
    ("udpcsum", WireOffload::Router),
];

impl EdgeForwardingFixture {
    fn real(&self, wire: WireOffload) {
        let devices: &[(&LabNetns, &str)] = match wire {
            WireOffload::None => &[],
            WireOffload::Ends => &[
                (&self.pod, "vx"),
                (&self.replica, "tier"),
                (&self.replica, "dial"),
            ],
            WireOffload::Router => &[(&self.router, "node"), (&self.router, "replica")],
        };
        devices
            .iter()
            .for_each(|(at, device)| at.without_offload(device));
    }

    fn options(&self, pins: &Path, mtu: u32) -> EdgeOptions {
        EdgeOptions {
            netns: Some(self.edge.path()),
            device: "eth0".into(),
            pin_dir: Some(pins.to_path_buf()),
            settings: EdgeProgramSettings {
                address: EDGE,
                tunnels: 4,
                aggregate: true,
                tunnel_port: 40_000,
                mtu,
            },
        }
    }
}

fn fill(e: &EdgeProgram) {
    let a = |s: &str| -> IpAddr { s.parse().unwrap() };
    let mut chain = [0; CHAIN];
    chain[0] = 1;
    e.replicas().put(&1, &Replica::new(REPLICA, true)).unwrap();
    e.hosts()
        .replace_all(&HashMap::from([
            // Replicas have numbers from 1; 0 marks an edge.
            (address_be(REPLICA), 1),
            (address_be(EDGE), 0),
        ]))
        .unwrap();
    // Version 0 leaves no stamp. There is no redirector here to clear one, and Linux does not know
    // it.
    e.tables()
        .put(
            &SERVICE,
            &Table {
                vni: TENANT,
                version: 0,
                chain: [chain; BUCKETS],
            },
        )
        .unwrap();
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

/// Addresses of a service's listeners, each with the address that the other end dials, in both
/// families; then those of endpoints that a replica dials.
const SERVED: [(&str, &str); 2] = [
    ("240.1.2.3:80", "10.9.0.1:80"),
    ("[fdca:a1:0:240::1:203]:80", "[fd09::1]:80"),
];
const DIALLED: [&str; 2] = ["10.1.1.3:8080", "[fd01:1::3]:8080"];

fn connect(from: &LabNetns, listener: &TcpListener, to: &str) -> (TcpStream, TcpStream) {
    let to: SocketAddr = to.parse().unwrap();
    let client = from
        .within(|| TcpStream::connect_timeout(&to, canal_timing::deadline(Duration::from_secs(10))))
        .unwrap_or_else(|e| panic!("{to}: {e}"));
    (client, listener.accept().unwrap().0)
}

const CHUNK: usize = 64 * 1024;

fn pattern(i: usize) -> Vec<u8> {
    (0..CHUNK)
        .map(|at| (at.wrapping_mul(31) + i * 7) as u8)
        .collect()
}

/// Sends this many chunks in each direction at once and compares every byte.
fn exchange(pair: &(TcpStream, TcpStream), chunks: usize, what: &str) {
    std::thread::scope(|s| {
        for (from, to) in [(&pair.0, &pair.1), (&pair.1, &pair.0)] {
            s.spawn(move || (0..chunks).for_each(|i| (&*from).write_all(&pattern(i)).unwrap()));
            s.spawn(move || {
                to.set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(20))))
                    .unwrap();
                let mut got = vec![0; CHUNK];
                for i in 0..chunks {
                    (&*to)
                        .read_exact(&mut got)
                        .unwrap_or_else(|e| panic!("{what}, chunk {i}: {e}"));
                    assert!(got == pattern(i), "{what}, chunk {i}");
                }
            });
        }
    });
}

fn count(e: &EdgeProgram, name: &str) -> u64 {
    e.counts()
        .unwrap()
        .into_iter()
        .find(|(n, _)| *n == name)
        .unwrap()
        .1
}

/// Returns the counters of dropped packets. Devices that come up solicit routers and report
/// multicast groups, which the tier does not carry; these are left out.
fn drops(e: &EdgeProgram) -> Vec<(&'static str, u64)> {
    let wrong =
        |name: &str| name == "too_big" || (name.starts_with("drop_") && name != "drop_protocol");
    e.counts()
        .unwrap()
        .into_iter()
        .filter(|(n, c)| *c > 0 && wrong(n))
        .collect()
}

#[test]
fn sessions_cross_the_edge_and_outlive_its_agent() {
    for (sums, wire) in WIRES {
        let case = &format!("{sums}, {wire:?}");
        let (net, pins) = (create_path(sums), LabPins::new());
        net.real(wire);
        let options = net.options(pins.path(), 1450);
        let e = EdgeProgram::attach(&options).unwrap();
        assert!(!e.is_adopted() && e.is_attached());
        fill(&e);
        let mut sessions = Vec::new();
        for (listen, dial) in SERVED {
            sessions.push((dial, connect(&net.pod, &net.replica.listen(listen), dial)));
        }
        for at in DIALLED {
            sessions.push((at, connect(&net.replica, &net.pod.listen(at), at)));
        }
        // 1.5 MiB in each direction, more than a thousand segments of the wire's size.
        const CHUNKS: usize = 24;
        for (what, pair) in &sessions {
            exchange(pair, CHUNKS, &format!("{case}: {what}"));
        }
        assert_eq!(drops(&e), [], "{case}");
        let packets = count(&e, "to_replica");
        // With `Ends` the GSO packets are cut into segments before they reach the edge.
        if wire != WireOffload::Ends {
            // Segments of both families in one direction, of 1,448 bytes at an MTU of 1500. At the
            // tunnel's 1450 there are more.
            let segments = (2 * CHUNKS * CHUNK / 1448) as u64;
            assert!(
                packets < segments,
                "{case}: {packets} packets for {segments} segments: GSO packets go as one"
            );
        }
        drop(e);
        std::thread::scope(|s| {
            let running: Vec<_> = sessions
                .iter()
                .map(|(what, pair)| {
                    s.spawn(move || exchange(pair, CHUNKS, &format!("{case}, no agent: {what}")))
                })
                .collect();
            // Agents stop and start while bytes flow, also with other settings.
            for mtu in [1450, 1449, 1450] {
                let next = EdgeProgram::attach(&EdgeOptions {
                    settings: EdgeProgramSettings {
                        mtu,
                        tunnels: 7,
                        ..options.settings
                    },
                    ..options.clone()
                })
                .unwrap();
                assert!(next.is_adopted() && next.is_attached(), "{case}");
                assert_eq!(
                    next.tables().all().unwrap().len(),
                    1,
                    "{case}: the maps have their contents"
                );
                assert!(
                    count(&next, "to_replica") >= packets,
                    "{case}: and the counters theirs"
                );
            }
            running.into_iter().for_each(|t| t.join().unwrap());
        });
        let e = EdgeProgram::attach(&options).unwrap();
        let mut lost = drops(&e);
        // While the MTU was 1449, the edge refused larger packets and told their senders so.
        lost.retain(|(name, _)| *name != "too_big");
        assert_eq!(lost, [], "{case}");
        e.remove().unwrap();
        let mut late = sessions[0].1.0.try_clone().unwrap();
        late.write_all(b"into nothing").unwrap();
        sessions[0]
            .1
            .1
            // Nothing announces that no byte comes, so the test can only wait a moment.
            .set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        let stopped = (&sessions[0].1.1).read(&mut [0; 8]).unwrap_err().kind();
        assert!(
            [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&stopped),
            "{case}: removed is removed: {stopped}"
        );
        assert!(!pins.path().exists(), "{case}: and its pins");
        // Nothing is left to remove, which is no error.
        edge::remove(options.netns.as_deref(), "eth0", options.pin_dir.as_deref()).unwrap();
    }
}

#[test]
fn errors_return_to_the_packets_sender() {
    for (sums, wire) in WIRES {
        let (net, pins) = (create_path(sums), LabPins::new());
        net.real(wire);
        let e = EdgeProgram::attach(&net.options(pins.path(), 1450)).unwrap();
        fill(&e);
        // These ports have no listener.
        for (at, from, to) in [
            (&net.pod, "10.1.1.2:0", "10.9.0.1:9"),
            (&net.pod, "[fd01:1::2]:0", "[fd09::1]:9"),
            (&net.replica, "250.1.0.3:0", "10.1.1.3:9"),
            (&net.replica, "[fdca:a1:0:250::fa01:3]:0", "[fd01:1::3]:9"),
        ] {
            let socket = at.within(|| UdpSocket::bind(from).unwrap());
            socket.connect(to).unwrap();
            socket.send(b"anybody?").unwrap();
            socket
                .set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(3))))
                .unwrap();
            assert_eq!(
                socket.recv(&mut [0; 9]).unwrap_err().kind(),
                ErrorKind::ConnectionRefused,
                "{sums}, {wire:?}: {to}"
            );
        }
        assert_eq!(
            (count(&e, "icmp_translated"), drops(&e)),
            (2, vec![]),
            "{sums}, {wire:?}: the dialler's need no translation"
        );
        e.remove().unwrap();
    }
}

#[test]
fn packets_that_are_too_big_for_the_tier_get_smaller() {
    for (sums, wire) in WIRES {
        let (net, pins) = (create_path(sums), LabPins::new());
        net.real(wire);
        let e = EdgeProgram::attach(&net.options(pins.path(), 1400)).unwrap();
        fill(&e);
        for (from, to) in [
            ("10.1.1.2:0", "10.9.0.1:9"),
            ("[fd01:1::2]:0", "[fd09::1]:9"),
        ] {
            let socket = net.pod.within(|| UdpSocket::bind(from).unwrap());
            let to: SocketAddr = to.parse().unwrap();
            socket.connect(to).unwrap();
            socket.send(&[0; 1402]).unwrap();
            let route = || {
                let o = Command::new("ip")
                    .args(["-n", net.pod.name(), "route", "get", &to.ip().to_string()])
                    .output()
                    .unwrap();
                String::from_utf8(o.stdout).unwrap()
            };
            until(
                &format!("{sums}, {wire:?}: the route to {to} has learned the MTU"),
                || route().contains("mtu 1400"),
            );
        }
        assert_eq!(drops(&e), [("too_big", 2)], "{sums}, {wire:?}");
        e.remove().unwrap();
    }
}

#[test]
fn a_session_whose_segments_have_become_too_big_goes_on() {
    let (net, pins) = (create_path("udpcsum"), LabPins::new());
    net.real(WireOffload::Router);
    let options = net.options(pins.path(), 1450);
    let e = EdgeProgram::attach(&options).unwrap();
    fill(&e);
    let sessions: Vec<_> = SERVED
        .iter()
        .map(|(listen, dial)| (dial, connect(&net.pod, &net.replica.listen(listen), dial)))
        .collect();
    sessions
        .iter()
        .for_each(|(what, pair)| exchange(pair, 4, what));
    let e = EdgeProgram::attach(&EdgeOptions {
        settings: EdgeProgramSettings {
            mtu: 1380,
            ..options.settings
        },
        ..options
    })
    .unwrap();
    sessions
        .iter()
        .for_each(|(what, pair)| exchange(pair, 8, &format!("smaller: {what}")));
    assert!(
        count(&e, "too_big") >= 2,
        "GSO packets are dropped, single segments are answered"
    );
    e.remove().unwrap();
}

#[test]
fn errors_name_their_subject() {
    let nowhere = EdgeOptions {
        netns: Some("/run/netns/canal-offload-none".into()),
        device: "eth0".into(),
        pin_dir: None,
        settings: EdgeProgramSettings {
            address: EDGE,
            tunnels: 1,
            aggregate: false,
            tunnel_port: 1,
            mtu: 1500,
        },
    };
    let e = EdgeProgram::attach(&nowhere).unwrap_err().to_string();
    assert!(e.contains("/run/netns/canal-offload-none"), "{e}");
    let ns = LabNetns::bare();
    let e = EdgeProgram::attach(&EdgeOptions {
        netns: Some(ns.path()),
        device: "eth7".into(),
        ..nowhere
    })
    .unwrap_err()
    .to_string();
    assert!(e.contains("eth7") && e.contains(ns.name()), "{e}");
    edge::remove(Some(&ns.path()), "lo", None).unwrap();
}

//! Tests the pod guard of the nftables fallback against real sockets, without any BPF: which
//! packets leave a pod, enter it, and are counted. The second namespace plays the node, which has
//! the other end of the pod's interface.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use crate::lab;
use crate::lab::CaseProcess;
use crate::lab::packets::{RESET_PAYLOAD_BYTES, TEXT, protocol};
use crate::pod_guard::{EPERM, KINDS, Lab, NEVER, arrives_within, check_udp_route, targets};
use canal_offload::nft::Redirect;
use canal_offload::nft_guard::{self, NftPodGuard};
use canal_offload::pod_guard::{OutsidePackets, UdpExcess, verdict_name};

/// The proxy's socket mark (`canal_wire::hbone::PROXY_MARK`).
const MARK: u32 = 0x539;

fn guard(lab: &Lab) -> NftPodGuard {
    lab.node
        .within(|| NftPodGuard::attach(&lab.pod.path()).unwrap())
}

fn set(lab: &Lab, guard: &NftPodGuard, outside: OutsidePackets, resolvers: &[&str]) {
    let resolvers: Vec<IpAddr> = resolvers.iter().map(|ip| ip.parse().unwrap()).collect();
    assert_eq!(
        lab.node.within(|| guard.set(outside, &resolvers)).unwrap(),
        0
    );
}

fn count(lab: &Lab, guard: &NftPodGuard, name: &str) -> u64 {
    let all = lab.node.within(|| guard.counters()).unwrap();
    all.into_iter()
        .find(|(v, _)| verdict_name(*v) == name)
        .unwrap_or_else(|| panic!("no counter {name}"))
        .1
}

/// The packets are of every protocol in both families, from sockets opened before and after the
/// guard was attached. Frames that are written past the pod's rules are included.
#[test]
fn deny_drops_packets_that_nft_sees() {
    let lab = Lab::new();
    // Captured connections do not concern the guard: TCP of raw sockets goes where all TCP goes.
    Redirect::apply(&lab.pod.path(), &lab.cgroup.dir, &[MARK]).unwrap();
    for (kind, reason) in KINDS.into_iter().filter(|(kind, _)| *kind != "tcp") {
        for to in targets() {
            let receiver = lab.receiver(to, protocol(kind, to));
            let mut older = lab.sender(kind, to);
            let pod_guard = guard(&lab);
            for client in [&mut older, &mut lab.sender(kind, to)] {
                let before = count(&lab, &pod_guard, &format!("stopped_{reason}"));
                client.go_on();
                // A frame is stopped at the other end of the interface, so its sender gets no
                // error.
                assert_eq!(
                    client.line(),
                    if kind == "frame" { "sent" } else { EPERM },
                    "{kind} to {to}"
                );
                assert!(!receiver.receives(NEVER), "{kind} to {to}: it left the pod");
                assert_eq!(
                    count(&lab, &pod_guard, &format!("stopped_{reason}")),
                    before + 1,
                    "{kind} to {to}"
                );
            }
            assert!(pod_guard.exposed_interfaces().is_empty());
            lab.node.within(|| pod_guard.release()).unwrap();
            let mut released = lab.sender(kind, to);
            released.go_on();
            assert_eq!(
                (
                    released.line().as_str(),
                    receiver.receives(arrives_within())
                ),
                ("sent", true),
                "{kind} to {to}: let go"
            );
        }
    }
    for to in targets() {
        let (receiver, pod_guard) = (lab.receiver(to, protocol("tcp", to)), guard(&lab));
        let mut client = lab.sender("tcp", to);
        client.go_on();
        client.line();
        assert!(
            !receiver.receives(NEVER),
            "a raw socket's TCP to {to} left the pod"
        );
        drop(pod_guard);
    }
}

/// Conntrack knows none of these resets' connections: the redirection would otherwise keep them in
/// the pod, whatever the guard does.
#[test]
fn a_raw_sockets_reset_leaves_the_pod_without_a_payload_only() {
    let lab = Lab::new();
    Redirect::apply(&lab.pod.path(), &lab.cgroup.dir, &[MARK]).unwrap();
    for to in targets() {
        let (receiver, pod_guard) = (lab.receiver(to, protocol("tcp", to)), guard(&lab));
        let before = count(&lab, &pod_guard, "stopped_tcp");
        let [with_payload, bare] = ["reset", "bare reset"].map(|kind| {
            let mut client = lab.sender(kind, to);
            client.go_on();
            client.line()
        });
        // The interface keeps the order, so a reset with a payload would arrive first.
        let arrived = receiver.receive(arrives_within()).unwrap();
        assert!(
            arrived.len() < RESET_PAYLOAD_BYTES,
            "a RST with {} bytes to {to} left the pod",
            arrived.len()
        );
        assert_eq!((with_payload.as_str(), bare.as_str()), (EPERM, "sent"));
        assert_eq!(count(&lab, &pod_guard, "stopped_tcp"), before + 1, "{to}");
        drop(pod_guard);
    }
}

#[test]
fn passthrough_counts_unencrypted_packets_on_the_nodes_end() {
    let lab = Lab::new();
    let pod_guard = guard(&lab);
    set(&lab, &pod_guard, OutsidePackets::Watch, &[]);
    // TCP is not among these, because the guard passes it to the capture's rules.
    for (kind, reason) in [
        ("udp", "udp"),
        ("echo", "icmp"),
        ("sctp", "sctp"),
        ("frame", "udp"),
    ] {
        for to in targets() {
            let (receiver, counter) = (
                lab.receiver(to, protocol(kind, to)),
                format!("clear_{reason}"),
            );
            let (mut client, before) = (lab.sender(kind, to), count(&lab, &pod_guard, &counter));
            client.go_on();
            assert_eq!(
                (client.line().as_str(), receiver.receives(arrives_within())),
                ("sent", true),
                "{kind} to {to}"
            );
            assert!(
                count(&lab, &pod_guard, &counter) > before,
                "{kind} to {to}: {counter}"
            );
        }
    }
    // Three kinds to two targets: the pod's rules do not see frames.
    assert!(count(&lab, &pod_guard, "left_watched") >= 6);
    // The next process finds the pod's mode and counts. Then the guard stops the pod's packets, and
    // is removed.
    drop(pod_guard);
    let next = guard(&lab);
    // Datagrams of UDP sockets and of frames, to two targets each.
    assert!(count(&lab, &next, "clear_udp") >= 4);
    let mut client = lab.sender("udp", targets()[0]);
    client.go_on();
    assert_eq!(client.line(), "sent", "adopted unchanged");
    set(&lab, &next, OutsidePackets::Stop, &[]);
    let mut client = lab.sender("udp", targets()[0]);
    client.go_on();
    assert_eq!(client.line(), EPERM);
    lab.node
        .within(|| nft_guard::remove(&lab.pod.path()))
        .unwrap();
    let mut client = lab.sender("udp", targets()[0]);
    client.go_on();
    assert_eq!(client.line(), "sent", "removed by name");
}

#[test]
fn dns_reaches_the_named_resolvers_and_no_others() {
    let lab = Lab::new();
    let pod_guard = guard(&lab);
    lab.answer_questions();
    let ask = |to: &str| CaseProcess::start(&lab.pod, None, "ask", &[to]).line();
    assert_eq!(ask("10.77.0.9:53"), EPERM, "no resolver is named yet");
    set(
        &lab,
        &pod_guard,
        OutsidePackets::Stop,
        &["10.77.0.9", "fd77::9"],
    );
    for (case, to, answer) in [
        ("named", "10.77.0.9:53", "answer from 10.77.0.9"),
        ("named, IPv6", "[fd77::9]:53", "answer from fd77::9"),
        ("not named", "10.77.0.8:53", EPERM),
        ("another port of a named one", "10.77.0.9:5353", EPERM),
    ] {
        assert_eq!(ask(to), answer, "{case}");
    }
    assert!(
        count(&lab, &pod_guard, "passed_resolver") >= 4,
        "question and answer"
    );
    set(&lab, &pod_guard, OutsidePackets::Stop, &["10.77.0.8"]);
    assert_eq!(
        (ask("10.77.0.9:53").as_str(), ask("10.77.0.8:53").as_str()),
        (EPERM, "answer from 10.77.0.8"),
        "another is named"
    );
    lab.node.within(|| pod_guard.release()).unwrap();
}

/// The neighbor tables are empty, so ARP and neighbor discovery must work. Nothing else may enter.
#[test]
fn tcp_and_link_protocols_pass_and_nothing_else_enters() {
    let lab = Lab::new();
    let pod_guard = guard(&lab);
    for (from, to, dial) in [
        (&lab.pod, &lab.node, "10.77.0.9:80"),
        (&lab.pod, &lab.node, "[fd77::9]:80"),
        (&lab.node, &lab.pod, "10.77.0.2:81"),
        (&lab.node, &lab.pod, "[fd77::2]:81"),
    ] {
        let at: SocketAddr = dial.parse().unwrap();
        let listener = to.listen(&format!(
            "{}:{}",
            if at.is_ipv4() { "0.0.0.0" } else { "[::]" },
            at.port()
        ));
        let mut client = from
            .within(|| {
                TcpStream::connect_timeout(&at, canal_timing::deadline(Duration::from_secs(5)))
            })
            .unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(TEXT).unwrap();
        server.read_exact(&mut [0; TEXT.len()]).unwrap();
        lab::close(listener);
    }
    // The pod's kernel refuses a port without a listener.
    for closed in ["10.77.0.2:82", "[fd77::2]:82"] {
        let at: SocketAddr = closed.parse().unwrap();
        let dialled = lab.node.within(|| {
            TcpStream::connect_timeout(&at, canal_timing::deadline(Duration::from_secs(5)))
        });
        assert_eq!(
            dialled.map_err(|e| e.kind()).err(),
            Some(std::io::ErrorKind::ConnectionRefused),
            "{closed}"
        );
    }
    for (at, to) in [("0.0.0.0:99", "10.77.0.2:99"), ("[::]:99", "[fd77::2]:99")] {
        let mut client = CaseProcess::start(&lab.pod, None, "receive", &[at]);
        assert_eq!(client.line(), "open");
        client.go_on();
        let to: SocketAddr = to.parse().unwrap();
        let from = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        lab.node
            .within(|| UdpSocket::bind(from).unwrap().send_to(TEXT, to))
            .unwrap();
        assert_eq!(client.line(), "nothing", "{to}");
    }
    // One datagram in each family.
    assert_eq!(count(&lab, &pod_guard, "stopped_udp"), 2);
    assert!(
        count(&lab, &pod_guard, "passed_tcp") > 0
            && count(&lab, &pod_guard, "passed_neighbour") > 0
    );
    lab.node.within(|| pod_guard.release()).unwrap();
}

#[test]
fn datagrams_from_the_tier_pass_to_the_ports_of_udp_routes_and_back() {
    let lab = Lab::new();
    let pod_guard = guard(&lab);
    check_udp_route(&lab, |udp| {
        assert_eq!(
            lab.node.within(|| pod_guard.set_udp(udp)).unwrap(),
            UdpExcess::default()
        )
    });
    assert_eq!(count(&lab, &pod_guard, "passed_udp_route"), 2 * 3 + 2);
    lab.node.within(|| pod_guard.release()).unwrap();
}

/// Entry of the child process.
#[test]
fn the_client() {
    if let Some(c) = lab::case() {
        lab::client::run(&c);
    }
}

//! What an application's connection meets on its way out: captured by the kernel, decided, carried to a gateway, and recorded.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::rig::gateway::{Does, Saw};
use crate::rig::{FAR, FOR_PODS, NEAR, POD_V4, POD_V6, Rig, Setup, identity};
use canal_model::program::OutsideMesh;
use canal_node_proxy::config::{CaptureChoice, Limits};

const VIP: &str = "10.96.0.1:80";

fn through_the_mesh(capture: CaptureChoice) {
    let rig = Rig::new(&Setup { capture, workers: 2, ..Setup::default() });
    if capture == CaptureChoice::Nft {
        // NAT comes after routing: without a route connect() fails before nft is asked.
        rig.ns.ip("route add default dev pod0");
        rig.ns.ip("-6 route add default dev pod0");
    }
    let gateway = rig.gateway(NEAR, Does::Tell);
    for (dial, authority) in [
        (VIP, VIP),
        ("[fd96::1]:80", "[fd96::1]:80"),
        ("[::ffff:10.96.0.1]:80", VIP),
        ("10.77.0.9:8080", "10.77.0.9:8080"),
        ("[fd77::9]:8080", "[fd77::9]:8080"),
    ] {
        let mut app = rig.app("dial", &[dial]);
        let said = app.line();
        assert!(said.starts_with(&format!("peer={dial} ")) && said.ends_with(&format!("reply={authority}")), "{dial}: {said}");
        let Saw::Connect { authority: asked, headers, peer, source } = gateway.next() else { panic!("no CONNECT") };
        assert_eq!((asked.as_str(), peer), (authority, identity("ns/b/sa/app")));
        assert!(source.starts_with(POD_V4), "the tunnel comes from the pod's own address: {source}");
        assert_eq!(headers["baggage"].to_str().unwrap().split(',').next(), Some("k8s.cluster.name=c1"));
        let forwarded = headers["forwarded"].to_str().unwrap();
        let from = if authority.starts_with('[') { format!("for=\"[{POD_V6}]:") } else { format!("for=\"{POD_V4}:") };
        assert!(forwarded.starts_with(&from), "{forwarded}");
        assert_eq!(forwarded.contains(";host=shop.b.svc.cluster.local"), authority.ends_with(":80"), "{forwarded}");
        assert_eq!(headers["traceparent"].len(), 55);
        assert_eq!(gateway.ended(), "end after 2");
    }
    let labels = [
        "reporter=\"source\"",
        "source_workload=\"app\"",
        "source_app=\"app\"",
        "source_version=\"v1\"",
        "source_principal=\"spiffe://alpha.example/ns/b/sa/app\"",
        "destination_service=\"shop.b.svc.cluster.local\"",
        "destination_service_name=\"shop\"",
        "response_flags=\"-\"",
        "connection_security_policy=\"mutual_tls\"",
    ];
    rig.until("closed", || rig.metric("istio_tcp_connections_closed_total", &labels) == 3.0);
    assert_eq!(rig.metric("istio_tcp_connections_opened_total", &labels), 3.0);
    assert_eq!(rig.metric("istio_tcp_received_bytes_total", &labels), 6.0, "what the applications sent");
    assert_eq!(rig.metric("istio_tcp_sent_bytes_total", &labels), 2.0 * 12.0 + 12.0);
    let line = rig.logged(|l| l["dst.service"] == "shop.b.svc.cluster.local" && l["dst.addr"] == VIP);
    for (field, want) in [
        ("direction", "outbound"),
        ("result", "complete"),
        ("src.pod", "app-0"),
        ("src.identity", "spiffe://alpha.example/ns/b/sa/app"),
        ("src.labels", "app=app,version=v1"),
        ("dst.hbone_addr", VIP),
    ] {
        assert_eq!(line[field], want, "{field} in {line}");
    }
    assert_eq!((line["bytes_sent"].as_u64(), line["bytes_recv"].as_u64()), (Some(12), Some(2)));
}

#[test]
fn services_and_pods_are_reached_through_a_gateway_with_the_pods_own_identity() {
    through_the_mesh(CaptureChoice::Bpf);
}

#[test]
fn nftables_carries_the_same() {
    through_the_mesh(CaptureChoice::Nft);
}

#[test]
fn every_refusal_is_a_reset_with_a_name() {
    let rig = Rig::new(&Setup::default());
    let _gateway = rig.gateway(NEAR, Does::Tell);
    for (dial, reason) in [
        ("192.0.2.1:443", "outside_mesh"),
        ("10.96.0.1:81", "unknown_port"),
        ("10.77.0.9:15008", "reserved_port"),
        ("10.77.0.2:15008", "reserved_port"),
        ("[fd77::2]:15001", "reserved_port"),
        ("10.77.255.1:15008", "gateway_address"),
        ("127.0.0.1:15001", "origin_unknown"),
        ("[::1]:15001", "origin_unknown"),
        ("10.77.0.2:9", "connect_failed"),
    ] {
        let before = rig.refused("outbound", reason);
        let said = rig.app("read_end", &[dial]).line();
        assert!(said == "ConnectionReset" || said == "write ConnectionReset" || said == "write BrokenPipe", "{dial}: {said}");
        rig.until(dial, || rig.refused("outbound", reason) == before + 1.0);
        rig.logged(|l| l["result"] == reason);
    }
}

#[test]
fn the_pod_itself_and_the_allowed_outside_are_reached_in_plain_tcp() {
    let rig = Rig::new(&Setup { outside: OutsideMesh::Passthrough, ..Setup::default() });
    for (ns, at) in
        [(&rig.ns, format!("{POD_V4}:8080")), (&rig.ns, format!("[{POD_V6}]:8080")), (&rig.outside, "192.0.2.1:443".to_string())]
    {
        let l = ns.listen(&at);
        let mut app = rig.app("dial", &[&at]);
        let (mut s, _) = l.accept().unwrap();
        let mut hi = [0; 2];
        s.read_exact(&mut hi).unwrap();
        s.write_all(b"plain").unwrap();
        drop(s);
        assert!(app.line().ends_with("reply=plain"), "{at}");
        let line = rig.logged(|l| l["dst.addr"] == at.as_str());
        assert_eq!((line["result"].as_str(), line.get("dst.hbone_addr")), (Some("complete"), None), "{line}");
    }
}

#[test]
fn bytes_half_closes_and_sizes_come_through_unchanged() {
    let rig = Rig::new(&Setup { workers: 2, ..Setup::default() });
    let gateway = rig.gateway(NEAR, Does::Echo);
    for n in [0u64, 1, 1024, 200_000, 30 << 20] {
        let said = rig.app("echo", &[VIP, &n.to_string()]).line();
        assert_eq!(said, format!("{n} right=true"));
        assert_eq!((gateway.authority().as_str(), gateway.ended()), (VIP, format!("Ok({n})")));
    }
}

#[test]
fn two_thousand_short_connections_all_come_back_and_leave_nothing_behind() {
    let rig = Rig::new(&Setup { workers: 2, ..Setup::default() });
    let gateway = rig.gateway(NEAR, Does::Echo);
    assert_eq!(rig.app("many", &[VIP, "500"]).line(), "2000");
    rig.until("all closed", || rig.metric("istio_tcp_connections_closed_total", &["response_flags=\"-\""]) == 2000.0);
    assert_eq!(rig.metric("canal_node_refused_total", &[]), 0.0);
    assert_eq!(rig.metric("canal_limit_used", &[]), 0.0);
    assert_eq!(rig.metric("istio_tcp_sent_bytes_total", &[]), 16_000.0);
    assert!(gateway.connections.load(Relaxed) <= 4, "two workers, one or two connections each");
}

#[test]
fn resets_are_carried_both_ways() {
    let rig = Rig::new(&Setup { gateways: &[("near", NEAR)], ..Setup::default() });
    {
        let gateway = rig.gateway(NEAR, Does::Watch);
        let mut app = rig.app("reset", &[VIP]);
        assert_eq!((app.line().as_str(), gateway.authority().as_str()), ("up", VIP));
        app.go_on();
        let ended = gateway.ended();
        assert!(ended.starts_with("ConnectionReset"), "RST becomes RST_STREAM: {ended}");
        rig.logged(|l| l["result"] == "reset");
    }
    let gateway = rig.gateway(NEAR, Does::Reset);
    assert_eq!(rig.app("read_end", &[VIP]).line(), "ConnectionReset", "RST_STREAM becomes RST");
    assert_eq!(gateway.authority(), VIP);
}

#[test]
fn a_reader_that_stalls_stops_the_writer() {
    let rig = Rig::new(&Setup::default());
    let _gateway = rig.gateway(NEAR, Does::Stall);
    let sent: u64 = rig.app("flood", &[VIP]).line().parse().unwrap();
    // Two socket buffers, the node's own and the stream's window; without back-pressure it would be all that a second can carry.
    assert!(sent < 40 << 20, "{sent} bytes were taken");
}

#[test]
fn streams_share_connections_and_a_draining_gateway_is_left_in_peace() {
    let rig = Rig::new(&Setup { gateways: &[("near", NEAR), ("far", FAR)], ..Setup::default() });
    let near = rig.gateway(NEAR, Does::Echo);
    let far = rig.gateway(FAR, Does::Tell);
    for _ in 0..10 {
        assert_eq!(rig.app("echo", &[VIP, "10"]).line(), "10 right=true");
    }
    assert_eq!((near.connections.load(Relaxed), far.connections.load(Relaxed)), (1, 0), "own AZ, one connection");
    let mut open = rig.app("stay", &[VIP]);
    assert_eq!(open.line(), "up");
    rig.until("the eleventh tunnel", || rig.metric("istio_tcp_received_bytes_total", &[]) == 101.0);
    near.drain();
    // An echo of nothing is nothing; the far gateway tells the authority's 12 bytes.
    rig.until("GOAWAY", || rig.app("echo", &[VIP, "0"]).line() == "12 right=false");
    assert!(far.connections.load(Relaxed) > 0);
    open.go_on();
    let line = rig.logged(|l| l["bytes_recv"] == 1);
    assert_eq!(line["result"], "complete", "what was open has finished: {line}");
}

#[test]
fn a_gateway_that_fails_is_passed_over_and_avoided() {
    let rig = Rig::new(&Setup { gateways: &[("near", NEAR), ("far", FAR)], ..Setup::default() });
    let far = rig.gateway(FAR, Does::Tell);
    let dial = |limit: u64| {
        let start = Instant::now();
        assert!(rig.app("dial", &[VIP]).line().ends_with(&format!("reply={VIP}")));
        assert!(start.elapsed() < Duration::from_millis(limit), "{:?}", start.elapsed());
    };
    dial(5_000);
    let failures = |blame: &str| rig.metric("canal_node_gateway_failures_total", &["gateway=\"near\"", &format!("blame=\"{blame}\"")]);
    assert_eq!(failures("gateway"), 1.0, "nobody listens there");
    dial(5_000);
    assert_eq!(failures("gateway"), 1.0, "avoided");
    assert_eq!(far.connections.load(Relaxed), 1);

    let mute = rig.gateway(NEAR, Does::Mute);
    std::thread::sleep(canal_node_proxy::gateways::AVOID.0);
    let before = Instant::now();
    dial(6_000);
    assert!(mute.connections.load(Relaxed) == 1 && before.elapsed() >= canal_node_proxy::gateways::ATTEMPT_PATIENCE, "tried, not for long");
    assert_eq!(failures("gateway"), 2.0);
}

#[test]
fn an_answer_is_final_and_an_impostor_is_no_gateway() {
    for (status, flag) in [(503, "CONNECT"), (401, "DENY"), (400, "CONNECT")] {
        let rig = Rig::new(&Setup { gateways: &[("near", NEAR), ("far", FAR)], ..Setup::default() });
        let (_near, far) = (rig.gateway(NEAR, Does::Refuse(status)), rig.gateway(FAR, Does::Tell));
        assert_eq!(rig.app("read_end", &[VIP]).line(), "ConnectionReset", "{status}");
        assert_eq!(rig.logged(|l| l["result"] == "tunnel_refused")["response_flags"], flag, "{status}");
        assert_eq!(far.connections.load(Relaxed), 0, "{status}: no other gateway is asked");
    }
    let rig = Rig::new(&Setup::default());
    let _impostor = rig.impostor(NEAR, Does::Tell, &identity("ns/b/sa/app"));
    rig.app("read_end", &[VIP]).line();
    let line = rig.logged(|l| l["result"] == "gateway_failed");
    assert_eq!(line["response_flags"], "TLS_FAILURE", "{line}");
}

#[test]
fn a_pods_connections_are_limited_by_name() {
    let rig = Rig::new(&Setup { limits: Limits { outbound: 1, ..Limits::default() }, ..Setup::default() });
    let _gateway = rig.gateway(NEAR, Does::Watch);
    let mut first = rig.app("stay", &[VIP]);
    assert_eq!(first.line(), "up");
    rig.until("the first", || rig.metric("canal_limit_used", &["limit=\"pod_outbound_connections\""]) == 1.0);
    rig.app("read_end", &[VIP]).line();
    rig.until("refused", || rig.refused("outbound", "connection_limit") == 1.0);
    assert_eq!(rig.metric("canal_limit_refused_total", &["limit=\"pod_outbound_connections\""]), 1.0);
    first.go_on();
    rig.until("given back", || rig.metric("canal_limit_used", &["limit=\"pod_outbound_connections\""]) == 0.0);
}

#[test]
fn a_connection_waits_for_the_pods_first_certificate() {
    let rig = Rig::new(&Setup { certificate: false, ..Setup::default() });
    let _gateway = rig.gateway(NEAR, Does::Tell);
    let mut app = rig.app("dial", &[VIP]);
    rig.until("dialled", || rig.metric("istio_tcp_connections_opened_total", &[]) == 1.0);
    std::thread::sleep(Duration::from_millis(100));
    rig.credential.replace(rig.ca.issue(&identity("ns/b/sa/app")));
    assert!(app.line().ends_with(&format!("reply={VIP}")));
}

#[test]
fn no_certificate_is_not_waited_for_for_ever() {
    let rig = Rig::new(&Setup { certificate: false, ..Setup::default() });
    let said = rig.app("read_end", &[VIP]).line();
    assert_eq!(said, "ConnectionReset");
    rig.until("refused", || rig.refused("outbound", "no_identity") == 1.0);
    assert_eq!(rig.logged(|l| l["result"] == "no_identity")["response_flags"], "IDENTITY_ERROR");
}

#[test]
fn a_connection_waits_for_what_the_node_starts_from() {
    let rig = Rig::new(&Setup::default());
    let _gateway = rig.gateway(NEAR, Does::Tell);
    let (view, identity) = (rig.shared.view.swap(Arc::default()), rig.room.identity.swap(None));
    let mut app = rig.app("dial", &[VIP]);
    rig.until("taken", || rig.metric("canal_limit_used", &["limit=\"pod_outbound_connections\""]) == 1.0);
    std::thread::sleep(Duration::from_millis(100));
    // In this order, and not at once.
    rig.shared.view.store(view);
    std::thread::sleep(Duration::from_millis(100));
    rig.room.identify(identity.unwrap());
    assert!(app.line().ends_with(&format!("reply={VIP}")));
}

#[test]
fn what_the_node_starts_from_is_not_waited_for_for_ever() {
    let rig = Rig::new(&Setup::default());
    rig.shared.view.store(Arc::default());
    rig.room.identity.store(None);
    assert_eq!(rig.app("read_end", &[VIP]).line(), "ConnectionReset");
    rig.until("refused", || rig.refused("outbound", "tenant_unknown") == 1.0);
}

#[test]
fn only_so_many_gateways_are_asked() {
    let dead = &[("near", NEAR), ("b", "10.77.255.3"), ("c", "10.77.255.4"), ("far", FAR)];
    let rig = Rig::new(&Setup { gateways: dead, ..Setup::default() });
    rig.app("read_end", &[VIP]).line();
    rig.until("refused", || rig.refused("outbound", "gateway_failed") == 1.0);
    let asked = canal_node_proxy::gateways::ATTEMPTS_MAX as f64;
    assert_eq!(rig.metric("canal_node_gateway_failures_total", &[]), asked);
}

#[test]
fn without_a_gateway_it_is_refused_by_name() {
    let rig = Rig::new(&Setup { gateways: &[], ..Setup::default() });
    rig.app("read_end", &[VIP]).line();
    rig.until("refused", || rig.refused("outbound", "no_gateway") == 1.0);
}

#[test]
fn what_is_open_finishes_and_nothing_new_begins_when_it_drains() {
    let rig = Rig::new(&Setup::default());
    let gateway = rig.gateway(NEAR, Does::Watch);
    let mut open = rig.app("stay", &[VIP]);
    assert_eq!((open.line().as_str(), gateway.authority().as_str()), ("up", VIP));
    rig.trigger.drain(Duration::from_secs(20));
    rig.until("closed listeners", || rig.room.listeners() == 0);
    assert_eq!(rig.app("dial", &[VIP]).line(), "error ConnectionRefused Some(111)");
    open.go_on();
    assert_eq!(gateway.ended(), "end after 1");
    rig.logged(|l| l["result"] == "complete");
}

/// On the cloud tier: the service's gateway addresses in this node's AZ and in another.
fn on_tier(near_open: bool) -> Setup {
    let addresses: &'static [_] = match near_open {
        true => &[("az1", NEAR, true), ("az2", FAR, true)],
        false => &[("az1", NEAR, false), ("az2", FAR, true)],
    };
    Setup { gateways: &[], addresses, ..Setup::default() }
}

#[test]
fn on_the_cloud_tier_services_are_reached_at_their_gateway_addresses_and_pods_at_the_tiers() {
    let rig = Rig::new(&on_tier(true));
    let (near, far, for_pods) = (rig.gateway(NEAR, Does::Tell), rig.gateway(FAR, Does::Tell), rig.gateway(FOR_PODS, Does::Tell));
    // Whether the application dials the virtual address or what the tier's DNS says, in whichever AZ, the near entrance is asked.
    for (dial, at) in
        [(VIP, &near), ("10.77.255.1:80", &near), ("10.77.255.2:80", &near), ("10.77.0.9:8080", &for_pods), ("[fd77::9]:8080", &for_pods)]
    {
        assert!(rig.app("dial", &[dial]).line().ends_with(&format!("reply={dial}")), "{dial}");
        assert_eq!((at.authority().as_str(), at.ended()), (dial, "end after 2".to_string()));
    }
    let connections = [&near, &far, &for_pods].map(|g| g.connections.load(Relaxed));
    assert_eq!(connections, [1, 0, 1], "one HBONE connection for each address");
    let of_service = ["destination_service=\"shop.b.svc.cluster.local\""];
    rig.until("closed", || rig.metric("istio_tcp_connections_closed_total", &of_service) == 3.0);
}

#[test]
fn an_az_that_is_closed_or_dead_is_left_within_a_second() {
    let rig = Rig::new(&on_tier(false));
    let (near, far) = (rig.gateway(NEAR, Does::Mute), rig.gateway(FAR, Does::Tell));
    assert!(rig.app("dial", &[VIP]).line().ends_with(&format!("reply={VIP}")));
    assert_eq!((near.connections.load(Relaxed), far.connections.load(Relaxed)), (0, 1), "closed: not asked");
    drop(rig);

    let rig = Rig::new(&on_tier(true));
    let (near, far) = (rig.gateway(NEAR, Does::Mute), rig.gateway(FAR, Does::Tell));
    let timed = || {
        let start = Instant::now();
        assert!(rig.app("dial", &[VIP]).line().ends_with(&format!("reply={VIP}")));
        start.elapsed()
    };
    let took = timed();
    let bounds = canal_node_proxy::gateways::ATTEMPT_PATIENCE..Duration::from_millis(2_000);
    assert!(bounds.contains(&took), "{took:?} with the start of a process and two handshakes");
    // It is avoided now, so it is not asked, and fails no second time.
    timed();
    assert_eq!((near.connections.load(Relaxed), far.connections.load(Relaxed)), (1, 1));
    assert_eq!(rig.metric("canal_node_gateway_failures_total", &["gateway=\"az1\"", "blame=\"gateway\""]), 1.0);
}

/// The AZ goes while its connection is in use: nothing answers, not even with a reset.
#[test]
fn an_az_that_dies_under_its_connection_is_left_within_a_second() {
    let rig = Rig::new(&on_tier(true));
    let (near, far) = (rig.gateway(NEAR, Does::Tell), rig.gateway(FAR, Does::Tell));
    let dial = || {
        let start = Instant::now();
        assert!(rig.app("dial", &[VIP]).line().ends_with(&format!("reply={VIP}")));
        start.elapsed()
    };
    dial();
    rig.outside.ip(&format!("addr del {NEAR}/32 dev out0"));
    let took = dial();
    assert!(took < Duration::from_millis(1_500), "{took:?} with the start of a process and a handshake");
    // It is avoided now, so it is not asked, and fails no second time.
    dial();
    assert_eq!((near.connections.load(Relaxed), far.connections.load(Relaxed)), (1, 1));
    assert_eq!(rig.metric("canal_node_gateway_failures_total", &["gateway=\"az1\"", "blame=\"gateway\""]), 1.0);
    // Back, on the connection that it had: TCP sends again what was lost.
    rig.outside.ip(&format!("addr add {NEAR}/32 dev out0"));
    std::thread::sleep(canal_node_proxy::gateways::AVOID.0);
    while near.saw.try_recv().is_ok() {}
    rig.until("the near one again", || {
        dial();
        near.saw.try_recv().is_ok()
    });
}

/// A draining replica says GOAWAY, and the same address leads to another one: the next stream is there, and nothing is counted a failure.
#[test]
fn a_goaway_moves_the_next_stream_to_whoever_is_at_the_address_now() {
    let rig = Rig::new(&on_tier(true));
    let leaving = rig.gateway(NEAR, Does::Watch);
    let far = rig.gateway(FAR, Does::Tell);
    let mut open = rig.app("stay", &[VIP]);
    assert_eq!((open.line().as_str(), leaving.authority().as_str()), ("up", VIP));
    leaving.drain();
    std::thread::sleep(Duration::from_millis(200));
    let next = rig.gateway(NEAR, Does::Tell);
    for _ in 0..3 {
        assert!(rig.app("dial", &[VIP]).line().ends_with(&format!("reply={VIP}")));
        assert_eq!(next.authority(), VIP);
        next.ended();
    }
    let connections = [&leaving, &next, &far].map(|g| g.connections.load(Relaxed));
    assert_eq!(connections, [1, 1, 0]);
    assert_eq!(rig.metric("canal_node_gateway_failures_total", &[]), 0.0);
    open.go_on();
    assert_eq!(leaving.ended(), "end after 1", "what was open finishes where it is");
}

/// A replica that is drained by an order sends GOAWAY while connections come and go, again and again: none of them fails.
#[test]
fn goaways_under_load_fail_no_connection() {
    let rig = Rig::new(&Setup { workers: 2, ..on_tier(true) });
    let gateway = rig.gateway(NEAR, Does::Echo);
    let mut app = rig.app("many", &[VIP, "500"]);
    let said = std::thread::scope(|s| {
        let loading = s.spawn(|| app.line());
        while !loading.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
            gateway.part();
        }
        loading.join().unwrap()
    });
    assert_eq!(said, "2000");
    rig.until("all closed", || rig.metric("istio_tcp_connections_closed_total", &["response_flags=\"-\""]) == 2000.0);
    assert!(gateway.connections.load(Relaxed) > 10, "GOAWAY came often: {}", gateway.connections.load(Relaxed));
    assert_eq!(rig.metric("canal_node_gateway_failures_total", &[]), 0.0);
    assert_eq!(rig.metric("canal_node_refused_total", &[]), 0.0);
}

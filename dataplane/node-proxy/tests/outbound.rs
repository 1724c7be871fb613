//! Outbound path: an application's connection is captured by the kernel, routed, carried to a
//! gateway, and recorded.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::fixture::gateway::{GatewayBehavior, GatewayLog};
use crate::fixture::{
    FAR, FOR_PODS, NEAR, NodeFixture, NodeSetup, POD_V4, POD_V6, attempt_timeouts, identity,
};
use canal_model::program::OutboundTrafficPolicy;
use canal_node_proxy::config::{CaptureChoice, PodLimits};
use canal_node_proxy::connect_policies::{ConnectPolicies, decide_refusals};
use canal_node_proxy::worker;
use canal_offload::connect_tables::ConnectRefusals;
use canal_timing::assert_time;

const VIP: &str = "10.96.0.1:80";

/// Checks the metrics and the log of the connections to the service.
fn check_reports(fixture: &NodeFixture) {
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
    // Three of the five dials go to the service; the others go to a pod.
    fixture.until("closed", || {
        fixture.metric("istio_tcp_connections_closed_total", &labels) == 3.0
    });
    assert_eq!(
        fixture.metric("istio_tcp_connections_opened_total", &labels),
        3.0
    );
    assert_eq!(
        // Three connections of two bytes each.
        fixture.metric("istio_tcp_received_bytes_total", &labels),
        6.0,
        "what the applications sent"
    );
    assert_eq!(
        fixture.metric("istio_tcp_sent_bytes_total", &labels),
        // The gateway sends the authority, which has 12 bytes for each of the three addresses.
        2.0 * 12.0 + 12.0
    );
    let line =
        fixture.logged(|l| l["dst.service"] == "shop.b.svc.cluster.local" && l["dst.addr"] == VIP);
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
    assert_eq!(
        (line["bytes_sent"].as_u64(), line["bytes_recv"].as_u64()),
        (Some(12), Some(2))
    );
}

fn through_the_mesh(capture: CaptureChoice) {
    let fixture = NodeFixture::new(&NodeSetup {
        capture,
        workers: 2,
        ..NodeSetup::default()
    });
    if capture == CaptureChoice::Nft {
        // NAT comes after routing: without a route, connect() fails before nftables see the packet.
        fixture.ns.ip("route add default dev pod0");
        fixture.ns.ip("-6 route add default dev pod0");
    }
    let gateway = fixture.gateway(NEAR, GatewayBehavior::SendAuthority);
    // A service over IPv4, IPv6 and as a mapped address, and a pod over both.
    for (dial, authority) in [
        (VIP, VIP),
        ("[fd96::1]:80", "[fd96::1]:80"),
        ("[::ffff:10.96.0.1]:80", VIP),
        ("10.77.0.9:8080", "10.77.0.9:8080"),
        ("[fd77::9]:8080", "[fd77::9]:8080"),
    ] {
        let mut app = fixture.app("dial", &[dial]);
        let printed = app.line();
        assert!(
            printed.starts_with(&format!("peer={dial} "))
                && printed.ends_with(&format!("reply={authority}")),
            "{dial}: {printed}"
        );
        let GatewayLog::Connect {
            authority: asked,
            headers,
            peer,
            source,
        } = gateway.next()
        else {
            panic!("no CONNECT")
        };
        assert_eq!((asked.as_str(), peer), (authority, identity("ns/b/sa/app")));
        assert!(
            source.starts_with(POD_V4),
            "the tunnel comes from the pod's own address: {source}"
        );
        assert_eq!(
            headers["baggage"].to_str().unwrap().split(',').next(),
            Some("k8s.cluster.name=c1")
        );
        let forwarded = headers["forwarded"].to_str().unwrap();
        let from = if authority.starts_with('[') {
            format!("for=\"[{POD_V6}]:")
        } else {
            format!("for=\"{POD_V4}:")
        };
        assert!(forwarded.starts_with(&from), "{forwarded}");
        assert_eq!(
            forwarded.contains(";host=shop.b.svc.cluster.local"),
            authority.ends_with(":80"),
            "{forwarded}"
        );
        // The length of a W3C trace context.
        assert_eq!(headers["traceparent"].len(), 55);
        // The application sends two bytes.
        assert_eq!(gateway.tunnel_end(), "end after 2");
    }
    check_reports(&fixture);
}

#[test]
fn services_and_pods_are_reached_through_a_gateway_with_the_pods_own_identity() {
    through_the_mesh(CaptureChoice::Bpf);
}

#[test]
fn nftables_carries_the_same() {
    through_the_mesh(CaptureChoice::Nft);
}

/// The tables of the connect hook do not contain the tenant in this test.
#[test]
fn every_refusal_is_a_reset_with_a_name() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let _gateway = fixture.gateway(NEAR, GatewayBehavior::SendAuthority);
    for (dial, reason) in [
        ("192.0.2.1:443", "outside_mesh"),
        ("10.96.0.1:81", "unknown_port"),
        ("10.77.0.9:15008", "reserved_port"),
        ("10.77.255.1:15008", "gateway_address"),
        ("127.0.0.1:15001", "origin_unknown"),
        ("[::1]:15001", "origin_unknown"),
        ("10.77.0.2:9", "connect_failed"),
    ] {
        let before = fixture.refused("outbound", reason);
        assert_eq!(
            fixture.app("read_end", &[dial]).line(),
            "ConnectionReset",
            "{dial}"
        );
        fixture.until(dial, || fixture.refused("outbound", reason) == before + 1.0);
        fixture.logged(|l| l["result"] == reason);
    }
}

/// Does what the node does when its snapshot changes, and then records new refusals of the connect
/// hook.
fn follow_and_record(
    fixture: &NodeFixture,
    policies: &mut ConnectPolicies,
    seen: &mut ConnectRefusals,
) {
    let (capture, taken) = fixture.captured();
    policies.follow(capture, &fixture.shared.view.load());
    let now = capture
        .connect_tables()
        .unwrap()
        .refusals(taken.netns_cookie().unwrap())
        .unwrap();
    let refusals = decide_refusals(&std::mem::replace(seen, now), &now);
    worker::record_connect_refusals(
        &fixture.workers,
        fixture.context.pod.load_full(),
        fixture.context.labels.load_full(),
        refusals,
    );
}

/// The kernel knows the same destinations as before: connect() refuses them, and the node still
/// counts and logs them as its refusals.
#[test]
fn connect_refuses_known_destinations_and_counts_them_by_name() {
    const REFUSED: &str = "error ConnectionRefused Some(111)";
    let fixture = NodeFixture::new(&NodeSetup::default());
    let _gateway = fixture.gateway(NEAR, GatewayBehavior::SendAuthority);
    let (mut policies, mut seen) = (
        ConnectPolicies::new(&fixture.registry),
        ConnectRefusals::default(),
    );
    follow_and_record(&fixture, &mut policies, &mut seen);
    for (dial, reason) in [
        ("192.0.2.1:443", "outside_mesh"),
        ("10.96.0.1:81", "unknown_port"),
        ("10.77.0.9:15008", "reserved_port"),
        ("10.77.0.2:15008", "reserved_port"),
        ("[fd77::2]:15001", "reserved_port"),
        ("10.77.255.1:15008", "gateway_address"),
    ] {
        let before = fixture.refused("outbound", reason);
        assert_eq!(fixture.app("dial", &[dial]).line(), REFUSED, "{dial}");
        follow_and_record(&fixture, &mut policies, &mut seen);
        fixture.until(dial, || fixture.refused("outbound", reason) == before + 1.0);
        let line = fixture.logged(|l| l["result"] == reason && l["dst.addr"] == dial);
        assert_eq!(
            (line["refused_at"].as_str(), line["count"].as_u64()),
            (Some("connect"), Some(1)),
            "{line}"
        );
    }
    for dial in [VIP, "[fd96::1]:80", "10.77.0.9:8080"] {
        assert!(
            fixture
                .app("dial", &[dial])
                .line()
                .ends_with(&format!("reply={dial}")),
            "{dial}"
        );
    }
    // Two addresses of the service, two ranges of pods, and the address of the gateway.
    assert!(
        fixture.metric(
            "canal_node_connect_destinations",
            &["tenant=\"alpha\"", "state=\"loaded\""]
        ) >= 5.0
    );
    let writes = fixture.metric("canal_node_connect_table_writes_total", &[]);
    follow_and_record(&fixture, &mut policies, &mut seen);
    assert_eq!(
        fixture.metric("canal_node_connect_table_writes_total", &[]),
        writes,
        "nothing changed, nothing is written"
    );
    fixture.shared.view.store(Arc::default());
    follow_and_record(&fixture, &mut policies, &mut seen);
    fixture.app("dial", &["10.96.0.1:81"]).line();
    assert_eq!(
        fixture
            .captured()
            .0
            .connect_tables()
            .unwrap()
            .refusals(fixture.captured().1.netns_cookie().unwrap())
            .unwrap(),
        seen,
        "the tenant was removed, and the proxy decides"
    );
}

#[test]
fn nothing_from_outside_reaches_the_listener_for_the_pods_own_connections() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    for at in [format!("{POD_V4}:15001"), format!("[{POD_V6}]:15001")] {
        let at: SocketAddr = at.parse().unwrap();
        let dialled = fixture
            .outside
            .within(|| TcpStream::connect_timeout(&at, Duration::from_millis(500)));
        assert_eq!(
            dialled.err().map(|e| e.kind()),
            Some(ErrorKind::TimedOut),
            "{at}: no handshake begins"
        );
        let inside = fixture.ns.within(|| {
            TcpStream::connect_timeout(&at, canal_timing::deadline(Duration::from_secs(5)))
        });
        // The proxy finds no original destination and resets, possibly before connect_timeout
        // checks.
        let is_reached = inside
            .as_ref()
            .map_or_else(|e| e.kind() == ErrorKind::ConnectionReset, |_| true);
        assert!(is_reached, "{at}: {inside:?}");
    }
    // From outside to addresses that are local by a route: a packet that arrives by the interface
    // is dropped.
    fixture
        .outside
        .ip("-6 route add fd63:616e:616c:1:0:1::/96 dev out0");
    let at: SocketAddr = "[fd63:616e:616c:1:0:1::7]:15001".parse().unwrap();
    let dialled = fixture
        .outside
        .within(|| TcpStream::connect_timeout(&at, Duration::from_millis(500)));
    assert!(dialled.is_err(), "{dialled:?}");
}

#[test]
fn the_pod_itself_and_the_allowed_outside_are_reached_in_plain_tcp() {
    let fixture = NodeFixture::new(&NodeSetup {
        outside: OutboundTrafficPolicy::Passthrough,
        ..NodeSetup::default()
    });
    for (ns, at) in [
        (&fixture.ns, format!("{POD_V4}:8080")),
        (&fixture.ns, format!("[{POD_V6}]:8080")),
        (&fixture.outside, "192.0.2.1:443".to_string()),
    ] {
        let l = ns.listen(&at);
        let mut app = fixture.app("dial", &[&at]);
        let (mut s, _) = l.accept().unwrap();
        let mut hi = [0; 2];
        s.read_exact(&mut hi).unwrap();
        s.write_all(b"plain").unwrap();
        drop(s);
        assert!(app.line().ends_with("reply=plain"), "{at}");
        let line = fixture.logged(|l| l["dst.addr"] == at.as_str());
        assert_eq!(
            (line["result"].as_str(), line.get("dst.hbone_addr")),
            (Some("complete"), None),
            "{line}"
        );
    }
}

#[test]
fn bytes_half_closes_and_sizes_come_through_unchanged() {
    let fixture = NodeFixture::new(&NodeSetup {
        workers: 2,
        ..NodeSetup::default()
    });
    let gateway = fixture.gateway(NEAR, GatewayBehavior::Echo);
    for n in [0u64, 1, 1024, 200_000, 30 << 20] {
        let printed = fixture.app("echo", &[VIP, &n.to_string()]).line();
        assert_eq!(printed, format!("{n} right=true"));
        assert_eq!(
            (gateway.authority().as_str(), gateway.tunnel_end()),
            (VIP, format!("Ok({n})"))
        );
    }
}

#[test]
fn two_thousand_short_connections_all_come_back_and_leave_nothing_behind() {
    let fixture = NodeFixture::new(&NodeSetup {
        workers: 2,
        ..NodeSetup::default()
    });
    let gateway = fixture.gateway(NEAR, GatewayBehavior::Echo);
    assert_eq!(fixture.app("many", &[VIP, "500"]).line(), "2000");
    fixture.until("all closed", || {
        fixture.metric(
            "istio_tcp_connections_closed_total",
            &["response_flags=\"-\""],
        ) == 2000.0
    });
    assert_eq!(fixture.metric("canal_node_refused_total", &[]), 0.0);
    assert_eq!(fixture.metric("canal_limit_used", &[]), 0.0);
    assert_eq!(fixture.metric("istio_tcp_sent_bytes_total", &[]), 16_000.0);
    assert!(
        gateway.connections.load(Relaxed) <= 32,
        "two workers, at most sixteen connections each"
    );
}

#[test]
fn resets_are_carried_both_ways() {
    let fixture = NodeFixture::new(&NodeSetup {
        gateways: &[("near", NEAR)],
        ..NodeSetup::default()
    });
    {
        let gateway = fixture.gateway(NEAR, GatewayBehavior::Watch);
        let mut app = fixture.app("reset", &[VIP]);
        assert_eq!(
            (app.line().as_str(), gateway.authority().as_str()),
            ("up", VIP)
        );
        app.go_on();
        let ended = gateway.tunnel_end();
        assert!(
            ended.starts_with("ConnectionReset"),
            "RST becomes RST_STREAM: {ended}"
        );
        fixture.logged(|l| l["result"] == "reset");
    }
    let gateway = fixture.gateway(NEAR, GatewayBehavior::Reset);
    assert_eq!(
        fixture.app("read_end", &[VIP]).line(),
        "ConnectionReset",
        "RST_STREAM becomes RST"
    );
    assert_eq!(gateway.authority(), VIP);
}

#[test]
fn a_reader_that_stalls_stops_the_writer() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let _gateway = fixture.gateway(NEAR, GatewayBehavior::Stall);
    let sent: u64 = fixture.app("flood", &[VIP]).line().parse().unwrap();
    // The bound covers two socket buffers, the node's own and the stream's window. Without
    // back-pressure, it would be all that a second can carry.
    assert!(sent < 40 << 20, "{sent} bytes were taken");
}

#[test]
fn streams_share_connections_and_a_draining_gateway_is_left_in_peace() {
    let fixture = NodeFixture::new(&NodeSetup {
        gateways: &[("near", NEAR), ("far", FAR)],
        ..NodeSetup::default()
    });
    let near = fixture.gateway(NEAR, GatewayBehavior::Echo);
    let far = fixture.gateway(FAR, GatewayBehavior::SendAuthority);
    for _ in 0..10 {
        assert_eq!(fixture.app("echo", &[VIP, "10"]).line(), "10 right=true");
    }
    assert_eq!(
        (
            near.connections.load(Relaxed),
            far.connections.load(Relaxed)
        ),
        (1, 0),
        "own AZ, one connection"
    );
    let mut open = fixture.app("stay", &[VIP]);
    assert_eq!(open.line(), "up");
    fixture.until("the eleventh tunnel", || {
        fixture.metric("istio_tcp_received_bytes_total", &[]) == 101.0
    });
    near.drain();
    // An echo of nothing is empty; the far gateway sends the authority's 12 bytes.
    fixture.until("GOAWAY", || {
        fixture.app("echo", &[VIP, "0"]).line() == "12 right=false"
    });
    assert!(far.connections.load(Relaxed) > 0);
    open.go_on();
    let line = fixture.logged(|l| l["bytes_recv"] == 1);
    assert_eq!(
        line["result"], "complete",
        "what was open has finished: {line}"
    );
}

#[test]
fn a_gateway_that_fails_is_passed_over_and_avoided() {
    let fixture = NodeFixture::new(&NodeSetup {
        gateways: &[("near", NEAR), ("far", FAR)],
        ..NodeSetup::default()
    });
    let far = fixture.gateway(FAR, GatewayBehavior::SendAuthority);
    let dial = |gateway: &str, limit: u64| {
        let start = Instant::now();
        assert!(
            fixture
                .app("dial", &[VIP])
                .line()
                .ends_with(&format!("reply={VIP}"))
        );
        let waited = start.elapsed();
        assert_time(
            &format!("time of a connection while the first gateway is {gateway}"),
            waited,
            Duration::from_millis(limit),
        );
        waited
    };
    // The limits allow for the start of a process; a mute gateway may also cost one attempt.
    dial("not there", 5_000);
    let failures = |cause: &str| {
        fixture.metric(
            "canal_node_gateway_failures_total",
            &["gateway=\"near\"", &format!("cause=\"{cause}\"")],
        )
    };
    assert_eq!(failures("gateway"), 1.0, "no socket listens there");
    dial("ejected", 5_000);
    assert_eq!(failures("gateway"), 1.0, "avoided");
    // Both connections are streams of one HBONE connection.
    assert_eq!(far.connections.load(Relaxed), 1);

    let mute = fixture.gateway(NEAR, GatewayBehavior::Mute);
    // The near gateway is tried again when its ejection has ended.
    std::thread::sleep(attempt_timeouts().ejection.0);
    let waited = dial("mute", 6_000);
    assert!(
        mute.connections.load(Relaxed) == 1 && waited >= attempt_timeouts().attempt,
        "tried, for {waited:?}"
    );
    assert_eq!(failures("gateway"), 2.0);
}

/// A gateway that is alive may be dialing the application, so the application would see a second
/// connection from another gateway.
#[test]
fn a_gateway_that_answers_pings_has_time_for_its_response() {
    let fixture = NodeFixture::new(&NodeSetup {
        gateways: &[("near", NEAR), ("far", FAR)],
        ..NodeSetup::default()
    });
    let late = GatewayBehavior::Late(attempt_timeouts().attempt * 3 / 2);
    let (near, far) = (fixture.gateway(NEAR, late), fixture.gateway(FAR, late));
    assert!(
        fixture
            .app("dial", &[VIP])
            .line()
            .ends_with(&format!("reply={VIP}"))
    );
    let asked = [&near, &far].map(|gateway| gateway.connections.load(Relaxed));
    assert_eq!(
        asked.iter().sum::<usize>(),
        1,
        "one gateway is asked: {asked:?}"
    );
    assert_eq!(
        fixture.metric("canal_node_gateway_failures_total", &[]),
        0.0
    );
}

#[test]
fn an_answer_is_final_and_an_impostor_is_no_gateway() {
    for (status, flag) in [(503, "CONNECT"), (401, "DENY"), (400, "CONNECT")] {
        let fixture = NodeFixture::new(&NodeSetup {
            gateways: &[("near", NEAR), ("far", FAR)],
            ..NodeSetup::default()
        });
        let (_near, far) = (
            fixture.gateway(NEAR, GatewayBehavior::Refuse(status)),
            fixture.gateway(FAR, GatewayBehavior::SendAuthority),
        );
        assert_eq!(
            fixture.app("read_end", &[VIP]).line(),
            "ConnectionReset",
            "{status}"
        );
        assert_eq!(
            fixture.logged(|l| l["result"] == "tunnel_refused")["response_flags"],
            flag,
            "{status}"
        );
        assert_eq!(
            far.connections.load(Relaxed),
            0,
            "{status}: no other gateway is asked"
        );
    }
    let fixture = NodeFixture::new(&NodeSetup::default());
    let _impostor = fixture.impostor(
        NEAR,
        GatewayBehavior::SendAuthority,
        &identity("ns/b/sa/app"),
    );
    fixture.app("read_end", &[VIP]).line();
    let line = fixture.logged(|l| l["result"] == "gateway_failed");
    assert_eq!(line["response_flags"], "TLS_FAILURE", "{line}");
}

#[test]
fn a_pods_connections_are_limited_by_name() {
    let fixture = NodeFixture::new(&NodeSetup {
        limits: PodLimits {
            outbound: 1,
            ..PodLimits::default()
        },
        ..NodeSetup::default()
    });
    let _gateway = fixture.gateway(NEAR, GatewayBehavior::Watch);
    let mut first = fixture.app("stay", &[VIP]);
    assert_eq!(first.line(), "up");
    fixture.until("the first", || {
        fixture.metric("canal_limit_used", &["limit=\"pod_outbound_connections\""]) == 1.0
    });
    fixture.app("read_end", &[VIP]).line();
    fixture.until("refused", || {
        fixture.refused("outbound", "connection_limit") == 1.0
    });
    assert_eq!(
        fixture.metric(
            "canal_limit_refused_total",
            &["limit=\"pod_outbound_connections\""]
        ),
        1.0
    );
    first.go_on();
    fixture.until("given back", || {
        fixture.metric("canal_limit_used", &["limit=\"pod_outbound_connections\""]) == 0.0
    });
}

#[test]
fn a_connection_waits_for_the_pods_first_certificate() {
    let fixture = NodeFixture::new(&NodeSetup {
        certificate: false,
        ..NodeSetup::default()
    });
    let _gateway = fixture.gateway(NEAR, GatewayBehavior::SendAuthority);
    let mut app = fixture.app("dial", &[VIP]);
    fixture.until("dialled", || {
        fixture.metric("istio_tcp_connections_opened_total", &[]) == 1.0
    });
    std::thread::sleep(Duration::from_millis(100));
    fixture
        .credential
        .replace(fixture.ca.issue(&identity("ns/b/sa/app")));
    assert!(app.line().ends_with(&format!("reply={VIP}")));
}

#[test]
fn no_certificate_is_not_waited_for_for_ever() {
    let fixture = NodeFixture::new(&NodeSetup {
        certificate: false,
        ..NodeSetup::default()
    });
    let printed = fixture.app("read_end", &[VIP]).line();
    assert_eq!(printed, "ConnectionReset");
    fixture.until("refused", || {
        fixture.refused("outbound", "no_identity") == 1.0
    });
    assert_eq!(
        fixture.logged(|l| l["result"] == "no_identity")["response_flags"],
        "IDENTITY_ERROR"
    );
}

#[test]
fn a_connection_waits_for_the_nodes_first_configuration() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let _gateway = fixture.gateway(NEAR, GatewayBehavior::SendAuthority);
    let (view, identity) = (
        fixture.shared.view.swap(Arc::default()),
        fixture.context.identity.swap(None),
    );
    let mut app = fixture.app("dial", &[VIP]);
    fixture.until("taken", || {
        fixture.metric("canal_limit_used", &["limit=\"pod_outbound_connections\""]) == 1.0
    });
    std::thread::sleep(Duration::from_millis(100));
    // The snapshot arrives before the identity, with time in between.
    fixture.shared.view.store(view);
    std::thread::sleep(Duration::from_millis(100));
    fixture.context.identify(identity.unwrap());
    assert!(app.line().ends_with(&format!("reply={VIP}")));
}

#[test]
fn waiting_for_the_nodes_first_configuration_times_out() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    fixture.shared.view.store(Arc::default());
    fixture.context.identity.store(None);
    assert_eq!(fixture.app("read_end", &[VIP]).line(), "ConnectionReset");
    fixture.until("refused", || {
        fixture.refused("outbound", "tenant_unknown") == 1.0
    });
}

#[test]
fn the_number_of_tried_gateways_is_limited() {
    let dead = &[
        ("near", NEAR),
        ("b", "10.77.255.3"),
        ("c", "10.77.255.4"),
        ("far", FAR),
    ];
    let fixture = NodeFixture::new(&NodeSetup {
        gateways: dead,
        ..NodeSetup::default()
    });
    fixture.app("read_end", &[VIP]).line();
    fixture.until("refused", || {
        fixture.refused("outbound", "gateway_failed") == 1.0
    });
    let asked = canal_node_proxy::gateways::ATTEMPTS_MAX as f64;
    assert_eq!(
        fixture.metric("canal_node_gateway_failures_total", &[]),
        asked
    );
}

#[test]
fn a_connection_without_a_gateway_is_refused_by_name() {
    let fixture = NodeFixture::new(&NodeSetup {
        gateways: &[],
        ..NodeSetup::default()
    });
    fixture.app("read_end", &[VIP]).line();
    fixture.until("refused", || {
        fixture.refused("outbound", "no_gateway") == 1.0
    });
}

#[test]
fn a_drain_finishes_open_connections_and_accepts_no_new_ones() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let gateway = fixture.gateway(NEAR, GatewayBehavior::Watch);
    let mut open = fixture.app("stay", &[VIP]);
    assert_eq!(
        (open.line().as_str(), gateway.authority().as_str()),
        ("up", VIP)
    );
    fixture.trigger.drain(Duration::from_secs(20));
    fixture.until("closed listeners", || fixture.context.listeners() == 0);
    assert_eq!(
        fixture.app("dial", &[VIP]).line(),
        "error ConnectionRefused Some(111)"
    );
    open.go_on();
    assert_eq!(gateway.tunnel_end(), "end after 1");
    fixture.logged(|l| l["result"] == "complete");
}

/// Returns a setup on the cloud tier: gateway addresses of the service in this node's AZ and in
/// another.
fn on_tier(near_open: bool) -> NodeSetup {
    let addresses: &'static [_] = match near_open {
        true => &[("az1", NEAR, true), ("az2", FAR, true)],
        false => &[("az1", NEAR, false), ("az2", FAR, true)],
    };
    NodeSetup {
        gateways: &[],
        addresses,
        ..NodeSetup::default()
    }
}

#[test]
fn on_the_cloud_tier_services_are_reached_at_their_gateway_addresses_and_pods_at_the_tiers() {
    let fixture = NodeFixture::new(&on_tier(true));
    let (near, far, for_pods) = (
        fixture.gateway(NEAR, GatewayBehavior::SendAuthority),
        fixture.gateway(FAR, GatewayBehavior::SendAuthority),
        fixture.gateway(FOR_PODS, GatewayBehavior::SendAuthority),
    );
    // The gateway address in the own AZ is used for the service's virtual address. It is also used
    // for the address of any AZ that the tier's DNS returns.
    for (dial, at) in [
        (VIP, &near),
        ("10.77.255.1:80", &near),
        ("10.77.255.2:80", &near),
        ("10.77.0.9:8080", &for_pods),
        ("[fd77::9]:8080", &for_pods),
    ] {
        assert!(
            fixture
                .app("dial", &[dial])
                .line()
                .ends_with(&format!("reply={dial}")),
            "{dial}"
        );
        assert_eq!(
            (at.authority().as_str(), at.tunnel_end()),
            (dial, "end after 2".to_string())
        );
    }
    let connections = [&near, &far, &for_pods].map(|g| g.connections.load(Relaxed));
    assert_eq!(
        connections,
        [1, 0, 1],
        "one HBONE connection for each address"
    );
    let of_service = ["destination_service=\"shop.b.svc.cluster.local\""];
    fixture.until("closed", || {
        fixture.metric("istio_tcp_connections_closed_total", &of_service) == 3.0
    });
}

#[test]
fn an_az_that_is_closed_or_dead_is_left_within_a_second() {
    let fixture = NodeFixture::new(&on_tier(false));
    let (near, far) = (
        fixture.gateway(NEAR, GatewayBehavior::Mute),
        fixture.gateway(FAR, GatewayBehavior::SendAuthority),
    );
    assert!(
        fixture
            .app("dial", &[VIP])
            .line()
            .ends_with(&format!("reply={VIP}"))
    );
    assert_eq!(
        (
            near.connections.load(Relaxed),
            far.connections.load(Relaxed)
        ),
        (0, 1),
        "the closed AZ is not tried"
    );
    drop(fixture);

    let fixture = NodeFixture::new(&on_tier(true));
    let (near, far) = (
        fixture.gateway(NEAR, GatewayBehavior::Mute),
        fixture.gateway(FAR, GatewayBehavior::SendAuthority),
    );
    let timed = || {
        let start = Instant::now();
        assert!(
            fixture
                .app("dial", &[VIP])
                .line()
                .ends_with(&format!("reply={VIP}"))
        );
        start.elapsed()
    };
    let took = timed();
    assert!(took >= attempt_timeouts().attempt, "{took:?}");
    // This includes the start of a process and two handshakes.
    assert_time(
        "time of a connection while the near AZ is mute",
        took,
        // The attempt at the mute AZ takes `attempt_timeouts().attempt` of it.
        Duration::from_millis(2_000),
    );
    // The gateway is ejected now, so it is not tried and does not fail a second time.
    timed();
    assert_eq!(
        (
            near.connections.load(Relaxed),
            far.connections.load(Relaxed)
        ),
        (1, 1)
    );
    assert_eq!(
        fixture.metric(
            "canal_node_gateway_failures_total",
            &["gateway=\"az1\"", "cause=\"gateway\""]
        ),
        1.0
    );
}

/// The AZ disappears while its connection is in use: there is no answer, not even a reset.
#[test]
fn an_az_that_dies_under_its_connection_is_left_within_a_second() {
    let fixture = NodeFixture::new(&on_tier(true));
    let (near, far) = (
        fixture.gateway(NEAR, GatewayBehavior::SendAuthority),
        fixture.gateway(FAR, GatewayBehavior::SendAuthority),
    );
    let dial = || {
        let start = Instant::now();
        assert!(
            fixture
                .app("dial", &[VIP])
                .line()
                .ends_with(&format!("reply={VIP}"))
        );
        start.elapsed()
    };
    dial();
    fixture.outside.ip(&format!("addr del {NEAR}/32 dev out0"));
    let took = dial();
    // This includes the start of a process and a handshake.
    assert_time(
        "time of a connection after the near AZ died under its connection",
        took,
        // The attempt on the dead connection takes `attempt_timeouts().attempt` of it.
        Duration::from_millis(1_500),
    );
    // The gateway is ejected now, so it is not tried and does not fail a second time.
    dial();
    assert_eq!(
        (
            near.connections.load(Relaxed),
            far.connections.load(Relaxed)
        ),
        (1, 1)
    );
    assert_eq!(
        fixture.metric(
            "canal_node_gateway_failures_total",
            &["gateway=\"az1\"", "cause=\"gateway\""]
        ),
        1.0
    );
    // The AZ is reachable again, and so is the old connection: TCP retransmits the lost segments.
    fixture.outside.ip(&format!("addr add {NEAR}/32 dev out0"));
    // Until its ejection has ended, the near gateway is tried last.
    std::thread::sleep(attempt_timeouts().ejection.0);
    // Only later reports count.
    while near.saw.try_recv().is_ok() {}
    fixture.until("the near one again", || {
        dial();
        near.saw.try_recv().is_ok()
    });
}

/// A draining replica sends GOAWAY, and its address leads to another replica. The next stream goes
/// there, and no failure is counted.
#[test]
fn a_goaway_moves_the_next_stream_to_whoever_is_at_the_address_now() {
    let fixture = NodeFixture::new(&on_tier(true));
    let leaving = fixture.gateway(NEAR, GatewayBehavior::Watch);
    let far = fixture.gateway(FAR, GatewayBehavior::SendAuthority);
    let mut open = fixture.app("stay", &[VIP]);
    assert_eq!(
        (open.line().as_str(), leaving.authority().as_str()),
        ("up", VIP)
    );
    leaving.stop_listening();
    let next = fixture.gateway(NEAR, GatewayBehavior::SendAuthority);
    leaving.part();
    // A stream that is opened before GOAWAY arrives goes to the old replica.
    fixture.until(
        "the node has received GOAWAY and is connected to the next replica",
        || next.connections.load(Relaxed) == 1,
    );
    for _ in 0..3 {
        assert!(
            fixture
                .app("dial", &[VIP])
                .line()
                .ends_with(&format!("reply={VIP}"))
        );
        assert_eq!(next.authority(), VIP);
        next.tunnel_end();
    }
    let connections = [&leaving, &next, &far].map(|g| g.connections.load(Relaxed));
    assert_eq!(connections, [1, 1, 0]);
    assert_eq!(
        fixture.metric("canal_node_gateway_failures_total", &[]),
        0.0
    );
    open.go_on();
    assert_eq!(
        leaving.tunnel_end(),
        "end after 1",
        "open tunnels finish on their connection"
    );
}

/// A replica that is drained by an operator sends GOAWAY repeatedly while connections come and go:
/// none of them fails.
#[test]
fn goaways_under_load_fail_no_connection() {
    let fixture = NodeFixture::new(&NodeSetup {
        workers: 2,
        ..on_tier(true)
    });
    let gateway = fixture.gateway(NEAR, GatewayBehavior::Echo);
    let mut app = fixture.app("many", &[VIP, "500"]);
    let printed = std::thread::scope(|s| {
        let loading = s.spawn(|| app.line());
        while !loading.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
            gateway.part();
        }
        loading.join().unwrap()
    });
    assert_eq!(printed, "2000");
    fixture.until("all closed", || {
        fixture.metric(
            "istio_tcp_connections_closed_total",
            &["response_flags=\"-\""],
        ) == 2000.0
    });
    assert!(
        gateway.connections.load(Relaxed) > 10,
        "GOAWAY came often: {}",
        gateway.connections.load(Relaxed)
    );
    assert_eq!(
        fixture.metric("canal_node_gateway_failures_total", &[]),
        0.0
    );
    assert_eq!(fixture.metric("canal_node_refused_total", &[]), 0.0);
}

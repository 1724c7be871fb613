//! Client address that an application sees: over tunnels of gateways and of other peers, in
//! plaintext, in both families, and where the kernel cannot preserve it.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::fixture::raw::{self, PeerHello, connect};
use crate::fixture::{NodeFixture, NodeSetup, POD_V4, POD_V6};
use canal_model::authorization::{PeerAuthentication, PeerMode, PolicyKey, PolicyTarget};
use canal_model::program::Resource;
use canal_node_proxy::config::CaptureChoice;

/// Per family: the pod's HBONE address, the address of its application, and that of the gateway.
const V4: (&str, &str, &str) = ("10.77.0.2:15008", "10.77.0.2:8080", "192.0.2.1");
const V6: (&str, &str, &str) = ("[fd77::2]:15008", "[fd77::2]:8080", "fd77::9");
const FRONT: &str = "spiffe://alpha.example/ns/web/sa/front";

fn run<T>(f: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
        .block_on(f)
}

/// Starts an application that sends each client its address, and then sends back what it receives.
fn serve_peer_address(listener: TcpListener) {
    std::thread::spawn(move || {
        for mut s in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let peer = s.peer_addr().unwrap();
                let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                s.write_all(format!("{peer}\n").as_bytes()).unwrap();
                let _ = std::io::copy(&mut &s, &mut &s);
            });
        }
    });
}

/// Returns the address that the application sends over a tunnel from outside, from the family's
/// gateway address.
fn connect_and_report(
    fixture: &NodeFixture,
    (hbone, app, hop): (&str, &str, &str),
    hello: &PeerHello,
    headers: &[(&'static str, &str)],
) -> Result<SocketAddr, u16> {
    let hop: IpAddr = hop.parse().unwrap();
    run(async {
        let tls = raw::tls_in(&fixture.outside_netns(), Some(hop), hbone, hello)
            .await
            .unwrap();
        let mut tunnel = connect(&raw::h2_on(tls).await, app, headers).await?;
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            let chunk = tokio::time::timeout(
                canal_timing::deadline(Duration::from_secs(10)),
                tunnel.recv.data(),
            )
            .await
            .expect("a line in time");
            line.extend_from_slice(&chunk.unwrap().unwrap());
        }
        Ok(String::from_utf8(line).unwrap().trim().parse().unwrap())
    })
}

fn strict(mode: PeerMode) -> Resource {
    let key = PolicyKey {
        tenant: "alpha".parse().unwrap(),
        namespace: "b".parse().unwrap(),
        name: "peer".parse().unwrap(),
    };
    Resource::PeerAuthentication(PeerAuthentication {
        key,
        target: PolicyTarget::Tenant,
        mode: Some(mode),
        ports: [].into(),
        created: 1,
    })
}

fn at(address: &str) -> SocketAddr {
    address.parse().unwrap()
}

fn clients_are_seen(setup: &NodeSetup) {
    let fixture = NodeFixture::new(setup);
    for app in [V4.1, V6.1] {
        serve_peer_address(fixture.ns.listen(app));
    }
    let (gateway, front) = (
        PeerHello::gateway(&fixture),
        PeerHello::of(&fixture.ca, "ns/web/sa/front"),
    );
    let of_front = ("canal-source", FRONT);
    let (v4, v6) = (
        ("forwarded", "for=\"10.1.2.3:40123\""),
        ("forwarded", "for=\"[fd01::3]:40124\""),
    );
    assert_eq!(
        connect_and_report(&fixture, V4, &gateway, &[of_front, v4]),
        Ok(at("10.1.2.3:40123")),
        "a client, its own port"
    );
    assert_eq!(
        connect_and_report(&fixture, V6, &gateway, &[of_front, v6]),
        Ok(at("[fd01::3]:40124")),
        "the same over IPv6"
    );
    let ip = |of, hello: &PeerHello, headers: &[(&'static str, &str)]| {
        connect_and_report(&fixture, of, hello, headers).map(|a| a.ip().to_string())
    };
    assert_eq!(
        ip(V4, &gateway, &[v4]),
        Ok("192.0.2.1".into()),
        "many clients: the gateway"
    );
    assert_eq!(
        ip(V6, &gateway, &[v6]),
        Ok("fd77::9".into()),
        "many clients over IPv6"
    );
    assert_eq!(
        ip(V4, &gateway, &[of_front, v6]),
        Ok("192.0.2.1".into()),
        "a client of the other family: the gateway"
    );
    assert_eq!(
        ip(V4, &gateway, &[of_front]),
        Ok("192.0.2.1".into()),
        "a client without an address: the gateway"
    );
    assert_eq!(
        ip(
            V4,
            &gateway,
            &[of_front, ("forwarded", "for=\"127.0.0.1:5\"")]
        ),
        Ok("192.0.2.1".into()),
        "an address that no host can have"
    );
    assert_eq!(
        ip(V4, &front, &[of_front, v4]),
        Ok("192.0.2.1".into()),
        "a pod that claims to be another: its own address"
    );
    let own = ("forwarded", "for=\"10.77.0.2:40125\"");
    assert_eq!(
        ip(V4, &gateway, &[of_front, own]),
        Ok(POD_V4.into()),
        "the pod is its own client"
    );
    // A port that only root may use is replaced by a random one. Root's ports end at 1023.
    let low = connect_and_report(
        &fixture,
        V4,
        &gateway,
        &[of_front, ("forwarded", "for=\"10.1.2.3:99\"")],
    )
    .unwrap();
    assert!(
        low.ip() == at("10.1.2.3:0").ip() && low.port() > 1023,
        "{low}"
    );
}

#[test]
fn application_sees_its_client_or_the_gateway_of_many() {
    clients_are_seen(&NodeSetup::default());
}

#[test]
fn application_of_guarded_pod_sees_its_client_over_tunnels() {
    clients_are_seen(&NodeSetup {
        policies: vec![strict(PeerMode::Strict)],
        ..NodeSetup::default()
    });
}

#[test]
fn application_sees_its_client_where_nftables_capture() {
    clients_are_seen(&NodeSetup {
        capture: CaptureChoice::Nft,
        policies: vec![strict(PeerMode::Strict)],
        ..NodeSetup::default()
    });
}

/// A member of another tenant may have the address of a pod of this tenant: the application sees
/// the gateway.
#[test]
fn client_of_another_tenant_is_seen_as_the_gateway() {
    use canal_model::authorization::{
        Attribute, AttributeMatch, Authorization, AuthorizationAction, Clause, PolicyRule,
    };
    let friends = canal_testing::TestCa::new("friends");
    let fixture = NodeFixture::new(&NodeSetup::default());
    serve_peer_address(fixture.ns.listen(V4.1));
    let bundles = [
        fixture.ca.bundle("alpha", "alpha.example", false, vec![]),
        friends.bundle("alpha", "friend.example", true, vec![]),
    ];
    let key = PolicyKey {
        tenant: "alpha".parse().unwrap(),
        namespace: "b".parse().unwrap(),
        name: "guests".parse().unwrap(),
    };
    let named = [
        "friend.example/ns/web/sa/front",
        "alpha.example/ns/web/sa/front",
    ]
    .map(|peer_id| AttributeMatch::Exact(peer_id.into()));
    let when = vec![Clause {
        attribute: Attribute::SourcePrincipal,
        any: named.into(),
        none: vec![],
    }];
    let rules = vec![PolicyRule {
        when,
        ..PolicyRule::default()
    }];
    let guests = Authorization {
        key,
        target: PolicyTarget::Tenant,
        action: AuthorizationAction::Allow,
        rules,
        dry_run: false,
        broken: None,
    };
    let policies = bundles
        .iter()
        .map(|b| (**b).clone())
        .chain([Resource::Authorization(guests)])
        .collect();
    fixture.apply(&NodeSetup {
        policies,
        ..NodeSetup::default()
    });
    let of = |peer_id: &str| {
        let headers = [
            ("canal-source", peer_id),
            ("forwarded", "for=\"10.1.2.3:40123\""),
        ];
        connect_and_report(&fixture, V4, &PeerHello::gateway(&fixture), &headers)
            .map(|a| a.ip().to_string())
    };
    // The gateway's own address, because the client's may also be that of a pod of this tenant.
    assert_eq!(
        of("spiffe://friend.example/ns/web/sa/front"),
        Ok("192.0.2.1".into())
    );
    assert_eq!(of(FRONT), Ok("10.1.2.3".into()));
}

#[test]
fn ports_in_use_are_skipped_and_time_wait_does_not_count() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    serve_peer_address(fixture.ns.listen(V4.1));
    let headers = [
        ("canal-source", FRONT),
        ("forwarded", "for=\"10.1.2.3:40123\""),
    ];
    run(async {
        let tls = raw::tls_in(
            &fixture.outside_netns(),
            None,
            V4.0,
            &PeerHello::gateway(&fixture),
        )
        .await
        .unwrap();
        let h2 = raw::h2_on(tls).await;
        let mut open = Vec::new();
        for n in 0..3 {
            let mut tunnel = connect(&h2, V4.1, &headers).await.unwrap();
            let line = tunnel.recv.data().await.unwrap().unwrap();
            let seen = at(std::str::from_utf8(&line).unwrap().trim());
            // The first connection occupies the client's own port, so the others have random ones.
            assert_eq!(
                (seen.ip(), seen.port() == 40123),
                (at("10.1.2.3:0").ip(), n == 0),
                "{seen}"
            );
            open.push(tunnel);
        }
        // The client ends first, so that its side is in TIME_WAIT: the same port is usable again at
        // once.
        // Each round would have to wait for a minute if TIME_WAIT counted.
        for _ in 0..20 {
            for mut tunnel in open.drain(..) {
                tunnel.send(b"", true);
                tunnel.rest().await.unwrap();
            }
            let end = Instant::now() + canal_timing::deadline(Duration::from_secs(5));
            loop {
                let mut tunnel = connect(&h2, V4.1, &headers).await.unwrap();
                let line = tunnel.recv.data().await.unwrap().unwrap();
                open.push(tunnel);
                // Until the node has closed its side of the last connection, it takes other ports.
                if line.ends_with(b":40123\n") {
                    break;
                }
                assert!(Instant::now() < end, "the port stays in use");
            }
        }
    });
}

#[test]
fn application_without_listener_refuses_at_once() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let headers = [
        ("canal-source", FRONT),
        ("forwarded", "for=\"10.1.2.3:40123\""),
    ];
    let start = Instant::now();
    assert_eq!(
        connect_and_report(&fixture, V4, &PeerHello::gateway(&fixture), &headers),
        Err(503)
    );
    let headers = [
        ("canal-source", FRONT),
        ("forwarded", "for=\"[fd01::3]:40124\""),
    ];
    assert_eq!(
        connect_and_report(&fixture, V6, &PeerHello::gateway(&fixture), &headers),
        Err(503)
    );
    // Resets stay inside as well.
    canal_timing::assert_time(
        "time of two refusals without a listener",
        start.elapsed(),
        Duration::from_secs(5),
    );
    fixture.until("refused", || {
        fixture.metric(
            "istio_tcp_connections_closed_total",
            &["response_flags=\"CONNECT\""],
        ) == 2.0
    });
}

/// An application's rules for its own host admit no remote client, whatever the kernel permits the
/// proxy.
#[test]
fn a_substitute_address_is_seen_if_the_clients_cannot_be_preserved() {
    for policies in [vec![], vec![strict(PeerMode::Strict)]] {
        let fixture = NodeFixture::new(&NodeSetup {
            marks_answers: false,
            policies,
            ..NodeSetup::default()
        });
        serve_peer_address(fixture.ns.listen(V4.1));
        let headers = [
            ("canal-source", FRONT),
            ("forwarded", "for=\"10.1.2.3:40123\""),
        ];
        let seen =
            connect_and_report(&fixture, V4, &PeerHello::gateway(&fixture), &headers).unwrap();
        assert_eq!(seen.ip().to_string(), "127.0.0.6");
        let refused = connect_and_report(
            &fixture,
            V6,
            &PeerHello::gateway(&fixture),
            &[("canal-source", FRONT)],
        );
        assert_eq!(refused, Err(503), "no address of the family is there");
        fixture.until("named", || {
            fixture.metric(
                "istio_tcp_connections_closed_total",
                &["response_flags=\"CONNECT\""],
            ) == 1.0
        });
    }
}

#[test]
fn plaintext_client_is_seen_through_the_guard() {
    for capture in [CaptureChoice::Bpf, CaptureChoice::Nft] {
        let fixture = NodeFixture::new(&NodeSetup {
            capture,
            ..NodeSetup::default()
        });
        serve_peer_address(fixture.ns.listen("0.0.0.0:8080"));
        serve_peer_address(fixture.ns.listen(&format!("[{POD_V6}]:8080")));
        // A policy observes the identities of members and admits all others, so plaintext passes
        // through the proxy.
        fixture.apply(&NodeSetup {
            capture,
            policies: vec![watch()],
            ..NodeSetup::default()
        });
        fixture.until("listeners", || fixture.context.plaintext.listeners() == 2);
        assert_ne!(fixture.context.plaintext.describe(), "open");
        for (app, hop) in [(V4.1, V4.2), (V6.1, V6.2)] {
            let mut s = fixture.outside.within(|| dial_from(hop, app));
            s.set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(10))))
                .unwrap();
            let own = s.local_addr().unwrap();
            let mut line = [0; 64];
            let n = s.read(&mut line).unwrap();
            let seen = at(std::str::from_utf8(&line[..n]).unwrap().trim());
            assert_eq!(seen.ip(), own.ip(), "{capture:?}");
            assert_ne!(seen.port(), own.port(), "its own connection has the port");
        }
    }
}

/// Returns a policy that observes all connections and refuses none.
fn watch() -> Resource {
    use canal_model::authorization::{Authorization, AuthorizationAction, PolicyRule};
    let key = PolicyKey {
        tenant: "alpha".parse().unwrap(),
        namespace: "b".parse().unwrap(),
        name: "watch".parse().unwrap(),
    };
    let rules = vec![PolicyRule::default()];
    Resource::Authorization(Authorization {
        key,
        target: PolicyTarget::Tenant,
        action: AuthorizationAction::Audit,
        rules,
        dry_run: false,
        broken: None,
    })
}

fn dial_from(hop: &str, to: &str) -> TcpStream {
    let to: SocketAddr = to.parse().unwrap();
    let s = socket2::Socket::new(
        socket2::Domain::for_address(to),
        socket2::Type::STREAM,
        None,
    )
    .unwrap();
    s.bind(&SocketAddr::new(hop.parse().unwrap(), 0).into())
        .unwrap();
    s.connect(&to.into()).unwrap();
    s.into()
}

/// In the kernel's connection list a delivery looks like plaintext from the client; a change of
/// policies must not end it.
#[test]
fn change_of_policies_leaves_deliveries_alone() {
    // Each backend finds the connections to end in its own way.
    for capture in [CaptureChoice::Bpf, CaptureChoice::Nft] {
        let fixture = NodeFixture::new(&NodeSetup {
            capture,
            ..NodeSetup::default()
        });
        serve_peer_address(fixture.ns.listen(V4.1));
        run(async {
            let tls = raw::tls_in(
                &fixture.outside_netns(),
                None,
                V4.0,
                &PeerHello::gateway(&fixture),
            )
            .await
            .unwrap();
            let headers = [
                ("canal-source", FRONT),
                ("forwarded", "for=\"10.1.2.3:40123\""),
            ];
            let mut tunnel = connect(&raw::h2_on(tls).await, V4.1, &headers)
                .await
                .unwrap();
            tunnel.recv.data().await.unwrap().unwrap();
            // `apply` runs a runtime of its own, which is not possible within one.
            tokio::task::block_in_place(|| {
                std::thread::scope(|s| {
                    s.spawn(|| {
                        fixture.apply(&NodeSetup {
                            capture,
                            policies: vec![strict(PeerMode::Strict)],
                            ..NodeSetup::default()
                        })
                    });
                });
            });
            tunnel.send(b"still here", true);
            assert_eq!(tunnel.rest().await.unwrap(), b"still here");
        });
        assert_eq!(fixture.metric("canal_node_closed_total", &[]), 0.0);
    }
}

/// An application that sets the proxy's mark cannot send past the mesh.
#[test]
fn mark_gives_applications_nothing() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let outside = fixture
        .outside
        .within(|| std::net::UdpSocket::bind("192.0.2.1:53").unwrap());
    outside
        .set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(2))))
        .unwrap();
    let send = |mark: u32, text: &[u8]| {
        fixture.ns.within(|| {
            let s =
                socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None).unwrap();
            s.set_mark(mark).unwrap();
            let _ = s.send_to(text, &at("192.0.2.1:53").into());
        });
    };
    send(canal_wire::hbone::DELIVERY_MARK, b"marked");
    send(0, b"unmarked");
    let mut got = [0; 16];
    let n = outside.recv(&mut got).unwrap();
    assert_eq!(&got[..n], b"unmarked", "a marked datagram left the pod");
}

//! Inbound path at a pod's HBONE port, with a hand-made client: TLS, settings, every status, bytes,
//! resets, limits, drain and rotation.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use crate::fixture::raw::{self, PeerHello, connect};
use crate::fixture::{NodeFixture, NodeSetup, POD_V4, POD_V6, identity};
use canal_node_proxy::config::PodLimits;
use canal_testing::TestCa;
use http::{Method, Request};
use socket2::SockRef;

const HBONE: &str = "10.77.0.2:15008";
const APP: &str = "10.77.0.2:8080";

/// Runs beside the runtime's own thread, so that blocking here does not stop the driver of HTTP/2.
fn run<T>(f: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
        .block_on(f)
}

/// Starts an application that sends back what it receives, and ends when that ends.
fn echo(l: TcpListener) {
    std::thread::spawn(move || {
        for s in l.incoming().flatten() {
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut &s, &mut &s);
                let _ = s.shutdown(std::net::Shutdown::Write);
            });
        }
    });
}

#[test]
fn settings_on_the_wire_are_ztunnels_but_for_windows() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let (settings, window) = run(raw::settings(
        &fixture,
        HBONE,
        &PeerHello::gateway(&fixture),
    ));
    for (id, name, want) in [
        (3, "max concurrent streams", 200),
        // Windows start small and grow with use, under the tenant's budget; ztunnel's start at 4
        // and 16 MiB.
        (4, "initial window", canal_wire::hbone::STREAM_WINDOW),
        (5, "max frame size", 1 << 20),
        (6, "max header list", 64 << 10),
    ] {
        assert_eq!(
            settings.iter().find(|(i, _)| *i == id).map(|(_, v)| *v),
            Some(want),
            "{name} in {settings:?}"
        );
    }
    assert!(settings.iter().all(|(i, v)| *i != 2 || *v == 0), "no push");
    assert_eq!(
        window,
        Some(canal_wire::hbone::CONNECTION_WINDOW - 65_535),
        "connection window"
    );
}

#[test]
fn every_request_gets_ztunnels_status() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    echo(fixture.ns.listen(APP));
    echo(fixture.ns.listen(&format!("[{POD_V6}]:8080")));
    let check = |case: &str, to: &str, authority: &str, want: Result<(), u16>| {
        let got = run(async {
            let h2 = raw::h2(&fixture, to, &PeerHello::gateway(&fixture)).await;
            connect(&h2, authority, &[]).await.map(drop)
        });
        assert_eq!(got, want, "{case}");
    };
    let v6 = format!("[{POD_V6}]:15008");
    check("its address", HBONE, APP, Ok(()));
    check("its IPv6 address", &v6, &format!("[{POD_V6}]:8080"), Ok(()));
    check(
        "its service by name",
        HBONE,
        "shop.b.svc.cluster.local:80",
        Ok(()),
    );
    check("no port", HBONE, POD_V4, Err(400));
    check("another address", HBONE, "10.77.0.3:8080", Err(400));
    check(
        "its other address",
        HBONE,
        &format!("[{POD_V6}]:8080"),
        Err(400),
    );
    for port in canal_wire::hbone::ILLEGAL_PORTS {
        check(
            "a reserved port",
            HBONE,
            &format!("{POD_V4}:{port}"),
            Err(503),
        );
    }
    check("an unknown name", HBONE, "example.com:80", Err(503));
    check("nobody listens", HBONE, "10.77.0.2:9", Err(503));
    let get = |method| {
        Request::builder()
            .method(method)
            .uri("https://10.77.0.2:8080/")
            .body(())
            .unwrap()
    };
    for method in [Method::GET, Method::POST, Method::OPTIONS] {
        let status = run(async {
            let h2 = raw::h2(&fixture, HBONE, &PeerHello::gateway(&fixture)).await;
            raw::send_request(&h2, get(method.clone())).await.err()
        });
        assert_eq!(status, Some(400), "{method}");
    }
    // Four bad requests: the authority without a port, and the three methods. Two
    // destinations are not the address that the tunnel came to, and three ports are reserved.
    for (reason, n) in [
        ("bad_request", 4.0),
        ("destination_mismatch", 2.0),
        ("reserved_port", 3.0),
        ("unknown_host", 1.0),
        ("application_down", 1.0),
    ] {
        fixture.until(reason, || fixture.refused("inbound", reason) == n);
    }
}

#[test]
fn a_bad_request_is_counted_and_logged_while_its_connection_lives() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    echo(fixture.ns.listen(APP));
    run(async {
        let h2 = raw::h2(&fixture, HBONE, &PeerHello::gateway(&fixture)).await;
        assert_eq!(connect(&h2, POD_V4, &[]).await.err(), Some(400), "no port");
        fixture.until("counted", || {
            fixture.refused("inbound", "bad_request") == 1.0
        });
        let line = fixture.logged(|l| l["result"] == "bad_request");
        assert_eq!(
            (&line["dst.addr"], &line["error"]),
            (&HBONE.into(), &"bad_authority".into()),
            "{line}"
        );
        assert!(
            connect(&h2, APP, &[]).await.is_ok(),
            "the connection serves on"
        );
    });
}

#[test]
fn a_tunnel_waits_for_the_nodes_first_configuration() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    echo(fixture.ns.listen(APP));
    // The client has no name (`canal-source`), so the application sees the hop, which dials from
    // the pod itself.
    let identity = fixture.context.identity.swap(None).unwrap();
    let opened = run(async {
        let later = async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            fixture.context.identify(identity);
        };
        let hello = PeerHello::gateway(&fixture);
        let tunnel = async {
            connect(&raw::h2(&fixture, HBONE, &hello).await, APP, &[])
                .await
                .map(drop)
        };
        tokio::join!(later, tunnel).1
    });
    assert_eq!(
        (opened, fixture.refused("inbound", "tenant_unknown")),
        (Ok(()), 0.0)
    );
}

#[test]
fn waiting_for_the_nodes_first_configuration_times_out() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    fixture.context.identity.store(None);
    let greeted = run(async {
        raw::tls(&fixture, HBONE, &PeerHello::gateway(&fixture))
            .await
            .map(drop)
    });
    assert!(greeted.is_err());
    fixture.until("refused", || {
        fixture.refused("inbound", "tenant_unknown") == 1.0
    });
}

#[test]
fn authorization_answers_401() {
    // The tenant's trust domain has changed; the pod still proves the old one, and so does its
    // peer.
    let fixture = NodeFixture::new(&NodeSetup {
        trust_domain: "new.example",
        ..NodeSetup::default()
    });
    echo(fixture.ns.listen(APP));
    let status = run(async {
        let h2 = raw::h2(&fixture, HBONE, &PeerHello::gateway(&fixture)).await;
        connect(&h2, APP, &[]).await.err()
    });
    assert_eq!(status, Some(401));
    fixture.until("denied", || fixture.refused("inbound", "denied") == 1.0);
    assert_eq!(
        fixture.logged(|l| l["result"] == "denied")["response_flags"],
        "DENY"
    );
}

#[test]
fn foreign_identities_fail_the_handshake() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let foreign = TestCa::new("beta");
    let cases: [(&str, PeerHello); 5] = [
        (
            "no certificate",
            PeerHello {
                certificate: None,
                ..PeerHello::gateway(&fixture)
            },
        ),
        (
            "another CA, the right name",
            PeerHello::of(&foreign, "ns/canal-system/sa/gateway"),
        ),
        (
            "our CA, another trust domain",
            PeerHello {
                certificate: Some(
                    fixture
                        .ca
                        .issue_with(&"spiffe://beta.example/ns/b/sa/c".parse().unwrap(), |_| {}),
                ),
                ..PeerHello::gateway(&fixture)
            },
        ),
        (
            "TLS 1.2",
            PeerHello {
                versions: raw::TLS12,
                ..PeerHello::gateway(&fixture)
            },
        ),
        (
            "not h2",
            PeerHello {
                alpn: &[b"http/1.1"],
                ..PeerHello::gateway(&fixture)
            },
        ),
    ];
    for (n, (case, hello)) in cases.into_iter().enumerate() {
        run(async {
            // In TLS 1.3 the server verifies the client's certificate after the client has finished
            // its handshake.
            if let Ok(mut tls) = raw::tls(&fixture, HBONE, &hello).await {
                let mut byte = [0];
                let read = tokio::io::AsyncReadExt::read(&mut tls, &mut byte).await;
                assert!(
                    !matches!(read, Ok(n) if n > 0),
                    "{case}: the server spoke HTTP/2 to it"
                );
            }
        });
        fixture.until(case, || {
            fixture.refused("inbound", "handshake_failed") == (n + 1) as f64
        });
    }
    fixture.logged(|l| l["response_flags"] == "TLS_FAILURE");
}

#[test]
fn a_silent_peer_is_dropped_after_the_timeout() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let mut mute = fixture
        .ns
        .within(|| std::net::TcpStream::connect(HBONE).unwrap());
    let start = std::time::Instant::now();
    let _ = mute.read(&mut [0]);
    canal_timing::assert_time(
        "time until a silent peer is dropped",
        start.elapsed(),
        canal_tls::HANDSHAKE_TIMEOUT + Duration::from_secs(2),
    );
    fixture.until("refused", || {
        fixture.refused("inbound", "handshake_failed") == 1.0
    });
}

#[test]
fn headers_beyond_the_limit_are_refused_and_the_connection_lives() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    echo(fixture.ns.listen(APP));
    run(async {
        let h2 = raw::h2(&fixture, HBONE, &PeerHello::gateway(&fixture)).await;
        let long = "x".repeat(70 << 10);
        assert_eq!(
            connect(&h2, APP, &[("baggage", &long)]).await.err(),
            Some(431)
        );
        assert!(
            connect(&h2, APP, &[("baggage", &long[..60 << 10])])
                .await
                .is_ok(),
            "below it the source is only ignored"
        );
    });
}

#[test]
fn a_tunnel_opens_after_the_application_accepts_with_its_baggage() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let app = fixture.ns.listen(APP);
    run(async {
        let h2 = raw::h2(&fixture, HBONE, &PeerHello::gateway(&fixture)).await;
        let headers = [
            ("forwarded", "for=\"10.77.0.77:4711\""),
            (
                "baggage",
                "k8s.namespace.name=web,k8s.pod.name=front-0,service.name=front,service.version=v3,cloud.availability_zone=az9",
            ),
            (
                "traceparent",
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
            ),
        ];
        let mut t = connect(&h2, APP, &headers)
            .await
            .map_err(|s| s.to_string())
            .unwrap();
        assert_eq!(
            t.headers["baggage"],
            "k8s.cluster.name=c1,k8s.namespace.name=b,k8s.pod.name=app-0,service.name=app,service.version=v1,cloud.availability_zone=az1"
        );
        let (mut s, from) = app.accept().unwrap();
        // The test's gateway connects from the pod's own namespace.
        assert_eq!(from.ip().to_string(), POD_V4);
        t.send(b"hello", false);
        let mut got = [0; 5];
        s.read_exact(&mut got).unwrap();
        // The application closes its half first; the other half stays open.
        s.write_all(b"bye").unwrap();
        s.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(t.rest().await.unwrap(), b"bye");
        t.send(b" more", true);
        let mut rest = String::new();
        s.read_to_string(&mut rest).unwrap();
        assert_eq!((&got, rest.as_str()), (b"hello", " more"));
    });
    let line = fixture.logged(|l| l["direction"] == "inbound" && l["result"] == "complete");
    for (field, want) in [
        ("src.addr", "10.77.0.77:4711"),
        ("src.workload", "front"),
        ("src.namespace", "web"),
        (
            "src.identity",
            "spiffe://alpha.example/ns/canal-system/sa/gateway",
        ),
        ("dst.addr", HBONE),
        ("dst.hbone_addr", APP),
        ("dst.workload", "app"),
        ("dst.labels", "app=app,version=v1"),
    ] {
        assert_eq!(line[field], want, "{field} in {line}");
    }
    let labels = [
        "reporter=\"destination\"",
        "source_workload=\"front\"",
        "source_version=\"v3\"",
        "source_zone=\"az9\"",
        "destination_workload=\"app\"",
    ];
    assert_eq!(
        fixture.metric("istio_tcp_connections_closed_total", &labels),
        1.0
    );
    assert_eq!(
        (
            fixture.metric("istio_tcp_received_bytes_total", &labels),
            fixture.metric("istio_tcp_sent_bytes_total", &labels)
        ),
        // The client sent `hello` and ` more`, the application `bye`.
        (10.0, 3.0)
    );
}

#[test]
fn resets_are_carried_both_ways() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    let app = fixture.ns.listen(APP);
    run(async {
        let h2 = raw::h2(&fixture, HBONE, &PeerHello::gateway(&fixture)).await;
        let mut t = connect(&h2, APP, &[])
            .await
            .map_err(|s| s.to_string())
            .unwrap();
        let (mut s, _) = app.accept().unwrap();
        s.set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(20))))
            .unwrap();
        t.send(b"x", false);
        s.read_exact(&mut [0]).unwrap();
        t.send.send_reset(h2::Reason::CANCEL);
        let e = s.read(&mut [0]).unwrap_err();
        assert_eq!(
            e.kind(),
            std::io::ErrorKind::ConnectionReset,
            "RST_STREAM becomes RST"
        );

        let mut t = connect(&h2, APP, &[])
            .await
            .map_err(|s| s.to_string())
            .unwrap();
        let (s, _) = app.accept().unwrap();
        SockRef::from(&s).set_linger(Some(Duration::ZERO)).unwrap();
        drop(s);
        assert!(t.rest().await.is_err(), "RST becomes RST_STREAM");
    });
    fixture.logged(|l| l["result"] == "reset");
}

#[test]
fn tunnels_and_connections_are_limited_by_name() {
    let fixture = NodeFixture::new(&NodeSetup {
        limits: PodLimits {
            inbound: 1,
            hbone: 1,
            ..PodLimits::default()
        },
        ..NodeSetup::default()
    });
    echo(fixture.ns.listen(APP));
    run(async {
        let h2 = raw::h2(&fixture, HBONE, &PeerHello::gateway(&fixture)).await;
        let first = connect(&h2, APP, &[])
            .await
            .map_err(|s| s.to_string())
            .unwrap();
        assert_eq!(
            connect(&h2, APP, &[]).await.err(),
            Some(503),
            "the second tunnel"
        );
        assert!(
            raw::tls(&fixture, HBONE, &PeerHello::gateway(&fixture))
                .await
                .is_err(),
            "the second connection"
        );
        drop(first);
    });
    fixture.until("both", || {
        fixture.refused("inbound", "connection_limit") == 2.0
    });
}

/// Silent connections occupy no capacity that peers which authenticate need.
#[test]
fn silent_connections_are_closed_in_favour_of_newer_ones() {
    let fixture = NodeFixture::new(&NodeSetup {
        limits: PodLimits {
            hbone: 8,
            ..PodLimits::default()
        },
        ..NodeSetup::default()
    });
    echo(fixture.ns.listen(APP));
    let dial = || {
        fixture
            .outside
            .within(|| std::net::TcpStream::connect(HBONE).unwrap())
    };
    let begun = std::time::Instant::now();
    // A quarter of eight, that is two, may be unauthenticated.
    let mut silent: Vec<_> = (0..3).map(|_| dial()).collect();
    silent[0]
        .set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(5))))
        .unwrap();
    assert!(
        !matches!(silent[0].read(&mut [0]), Ok(1..)),
        "a quarter of eight may wait: the oldest is closed"
    );
    canal_timing::assert_time(
        "time until the oldest silent connection gives way",
        begun.elapsed(),
        // It is closed at once; the rest is for a slow start of the test's threads.
        Duration::from_secs(5),
    );
    fixture.until("counted", || {
        fixture.metric("canal_node_unauthenticated_displaced_total", &[]) == 1.0
    });
    run(async {
        let h2 = raw::h2(&fixture, HBONE, &PeerHello::gateway(&fixture)).await;
        assert!(
            connect(&h2, APP, &[]).await.is_ok(),
            "a peer that authenticates is accepted beside them"
        );
    });
    assert_eq!(
        fixture.refused("inbound", "connection_limit"),
        2.0,
        "the second has given way to the peer"
    );
}

#[test]
fn a_drain_sends_goaway_and_lets_tunnels_finish() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    echo(fixture.ns.listen(APP));
    run(async {
        let h2 = raw::h2(&fixture, HBONE, &PeerHello::gateway(&fixture)).await;
        let mut t = connect(&h2, APP, &[])
            .await
            .map_err(|s| s.to_string())
            .unwrap();
        t.send(b"before ", false);
        fixture.trigger.drain(Duration::from_secs(20));
        let refused = async {
            while h2.clone().ready().await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), refused)
            .await
            .expect("GOAWAY: no new tunnels");
        t.send(b"and after", true);
        assert_eq!(t.rest().await.unwrap(), b"before and after");
    });
    assert_eq!(fixture.context.listeners(), 0);
}

#[test]
fn a_certificate_rotates_under_a_streaming_tunnel() {
    let fixture = NodeFixture::new(&NodeSetup::default());
    echo(fixture.ns.listen(APP));
    let serial = |tls: &tokio_rustls::client::TlsStream<tokio::net::TcpStream>| {
        tls.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    };
    run(async {
        let before = serial(
            &raw::tls(&fixture, HBONE, &PeerHello::gateway(&fixture))
                .await
                .unwrap(),
        );
        let h2 = raw::h2(&fixture, HBONE, &PeerHello::gateway(&fixture)).await;
        let mut t = connect(&h2, APP, &[])
            .await
            .map_err(|s| s.to_string())
            .unwrap();
        t.send(b"old ", false);
        fixture
            .credential
            .replace(fixture.ca.issue(&identity("ns/b/sa/app")));
        let after = serial(
            &raw::tls(&fixture, HBONE, &PeerHello::gateway(&fixture))
                .await
                .unwrap(),
        );
        assert_ne!(before, after, "new handshakes see the new certificate");
        t.send(b"and new", true);
        assert_eq!(t.rest().await.unwrap(), b"old and new");
    });
}

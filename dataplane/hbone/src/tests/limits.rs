//! Events that end or multiply connections: pool limits, concurrent streams, GOAWAY, PING, idle
//! timeouts, refusals.

use std::rc::Rc;

use canal_identity::{ClientIdentity, ServerIdentity};
use canal_runtime::drain;
use canal_testing::{TestCa, identity};
use canal_tls::TrustStore;
use futures::future::join_all;
use http::HeaderMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::fixture::{
    ALICE, BOB, HboneFixture, authority, echo, hold, listen_again, ms, run, until,
};
use crate::{ConnectResult, HboneError, IncomingConnect, PoolConfig, ServerConfig, serve};

#[test]
fn a_crowd_waits_for_one_handshake() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let opened = join_all((0..80).map(|_| fixture.open())).await;
        assert!(opened.iter().all(|o| o.as_ref().is_ok_and(|o| !o.reused)));
        assert_eq!(fixture.metric("canal_hbone_handshakes_total"), 1);
        assert_eq!(fixture.pool.size(), (1, 80));
        drop(opened);
        assert_eq!(fixture.pool.size(), (1, 0));
        assert!(fixture.open().await.unwrap().reused);
    });
}

#[test]
fn the_hundred_and_first_stream_opens_a_second_connection() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let opened = join_all((0..101).map(|_| fixture.open())).await;
        assert!(opened.iter().all(Result::is_ok));
        assert_eq!(fixture.pool.size(), (2, 101));
    });
}

#[test]
fn the_peers_own_limit_counts_too() {
    run(async {
        let server = ServerConfig {
            streams_max: 2,
            ..ServerConfig::default()
        };
        let (fixture, _t) = HboneFixture::new(PoolConfig::default(), server, hold).await;
        let mut opened = Vec::new();
        for _ in 0..5 {
            opened.push(fixture.open().await.unwrap());
        }
        assert_eq!(fixture.pool.size(), (3, 5));
    });
}

#[test]
fn a_peer_that_allows_no_stream_is_given_up() {
    run(async {
        let server = ServerConfig {
            streams_max: 0,
            ..ServerConfig::default()
        };
        let config = PoolConfig {
            answer_timeout: ms(300),
            ..PoolConfig::default()
        };
        let (fixture, _t) = HboneFixture::new(config, server, hold).await;
        // The first stream is sent before the peer's settings are known, and is refused or never
        // sent.
        for _ in 0..4 {
            assert!(fixture.open().await.is_err());
        }
        assert!(fixture.metric("canal_hbone_handshakes_total") <= 16);
    });
}

/// A peer that answers PINGs has longer for its response than one that accepts only TCP, and than
/// one that stops with the connection up.
#[test]
fn a_limit_for_dead_peers_ends_no_attempt_at_a_peer_that_answers_pings() {
    run(async {
        // Short, because the silent peer is waited for; the gate makes it ten times as long.
        let limit = ms(100) * canal_timing::slack();
        let (fixture, _t) = HboneFixture::new(
            PoolConfig::default(),
            ServerConfig::default(),
            move |incoming: IncomingConnect| async move {
                // Longer than the limit, while the connection answers PINGs.
                tokio::time::sleep(limit * 5 / 2).await;
                hold(incoming).await;
            },
        )
        .await;
        let opened = fixture
            .pool
            .open_unless_dead(&fixture.target, &authority(), HeaderMap::new(), limit)
            .await;
        assert!(opened.is_ok(), "{opened:?}");
        assert_eq!(fixture.metric("canal_hbone_handshakes_total"), 1);

        for is_established in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let fixture =
                HboneFixture::towards(listener.local_addr().unwrap(), PoolConfig::default());
            // The kernel completes TCP's handshake on a listener although the process accepts
            // nothing.
            let mut listener = Some(listener);
            if is_established {
                tokio::task::spawn_local(stopping_peer(&fixture, listener.take().unwrap(), false));
            }
            let opened = fixture
                .pool
                .open_unless_dead(&fixture.target, &authority(), HeaderMap::new(), limit)
                .await;
            assert!(
                matches!(opened, Err(HboneError::Timeout { limit: after, .. }) if after == limit),
                "{opened:?}"
            );
            assert_eq!(fixture.pool.size().0, usize::from(is_established));
        }
    });
}

#[test]
fn a_failed_handshake_fails_the_whole_crowd_and_leaves_nothing() {
    run(async {
        let (mut fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        fixture.target.expected =
            std::sync::Arc::from([identity("spiffe://alpha.example/ns/shop/sa/carol")]);
        let opened = join_all((0..10).map(|_| fixture.open())).await;
        for o in &opened {
            let e = o.as_ref().unwrap_err();
            assert!(
                matches!(e, HboneError::Tls { .. })
                    && e.flag() == "TLS_FAILURE"
                    && e.to_string().contains(BOB),
                "{e}"
            );
        }
        assert_eq!(fixture.metric("canal_hbone_handshake_failures_total"), 1);
        assert_eq!(fixture.pool.size(), (0, 0));
        // No process listens on this address.
        let free = TcpListener::bind("127.0.0.1:0")
            .await
            .unwrap()
            .local_addr()
            .unwrap();
        fixture.target.address = free;
        let e = fixture.open().await.unwrap_err();
        assert!(
            matches!(e, HboneError::Connect(_)) && e.flag() == "CONNECT",
            "{e}"
        );
    });
}

#[test]
fn the_first_of_a_crowd_may_leave() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        // After one poll the stream has started to connect, and it leaves before the handshake has
        // finished.
        let mut first = Box::pin(fixture.open());
        assert!(futures::poll!(&mut first).is_pending());
        drop(first);
        assert!(fixture.open().await.is_ok());
        assert_eq!(fixture.metric("canal_hbone_handshakes_total"), 1);
    });
}

#[test]
fn a_server_that_refuses_the_clients_certificate_is_named() {
    run(async {
        let (mut fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let foreign = identity("spiffe://beta.example/ns/shop/sa/alice");
        // The foreign client's domain trusts the server's domain; the server's domain trusts only
        // itself.
        let store = TrustStore::new(&fixture.registry);
        store
            .replace([fixture.ca.bundle("beta", "alpha.example", true, vec![])])
            .unwrap();
        fixture.target.source = ClientIdentity::new(fixture.ca.credential(&foreign))
            .trusting(store.view(&"beta".parse().unwrap()));
        let e = fixture.open().await.unwrap_err();
        assert!(
            matches!(e, HboneError::RefusedByPeer { .. }) && e.flag() == "TLS_FAILURE",
            "{e:?}"
        );
        until("the server says why", || {
            !fixture.served.borrow().is_empty()
        })
        .await;
        let why = fixture.served.borrow()[0].clone().unwrap_err();
        assert!(
            why.contains("expected an identity of trust domain alpha.example"),
            "{why}"
        );
    });
}

#[test]
fn only_exactly_200_is_a_tunnel() {
    run(async {
        let (fixture, _t) = HboneFixture::new(
            PoolConfig::default(),
            ServerConfig::default(),
            |incoming: IncomingConnect| async move {
                let status = incoming.headers["want"].to_str().unwrap().parse().unwrap();
                incoming.refuse(status);
            },
        )
        .await;
        for (status, flag) in [
            (400, "CONNECT"),
            (401, "DENY"),
            (503, "CONNECT"),
            (201, "CONNECT"),
            (204, "CONNECT"),
            (302, "CONNECT"),
        ] {
            let headers =
                HeaderMap::from_iter([(http::HeaderName::from_static("want"), status.into())]);
            let e = fixture
                .pool
                .open(&fixture.target, &authority(), headers)
                .await
                .unwrap_err();
            assert_eq!((e.status(), e.flag()), (Some(status), flag), "{e}");
        }
        assert_eq!(fixture.pool.size(), (1, 0));
    });
}

#[test]
fn an_answer_that_never_comes_is_a_timeout() {
    run(async {
        let config = PoolConfig {
            answer_timeout: ms(100),
            ..PoolConfig::default()
        };
        let abandoned = Rc::new(tokio::sync::Notify::new());
        let seen = abandoned.clone();
        let (fixture, _t) = HboneFixture::new(
            config,
            ServerConfig::default(),
            move |mut incoming: IncomingConnect| {
                let seen = seen.clone();
                async move {
                    std::future::poll_fn(|cx| incoming.poll_abandoned(cx)).await;
                    seen.notify_one();
                }
            },
        )
        .await;
        let e = fixture.open().await.unwrap_err();
        assert!(matches!(e, HboneError::Timeout { .. }), "{e}");
        abandoned.notified().await;
        assert_eq!(fixture.pool.size(), (1, 0));
    });
}

#[test]
fn goaway_lets_streams_finish_and_new_ones_use_another_connection() {
    run(async {
        let (fixture, trigger) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), echo).await;
        let mut old = fixture.open().await.unwrap().stream;
        old.write_all(b"begun").await.unwrap();
        trigger.drain(ms(5000) * canal_timing::slack());
        // The next process takes over the address.
        let listener = listen_again(fixture.target.address).await;
        let (_next, drain) = drain::tree();
        fixture.listen(listener, ServerConfig::default(), drain, echo);
        // GOAWAY may arrive after the listener has closed.
        let mut new = fixture.open().await.unwrap();
        while new.reused {
            tokio::time::sleep(ms(5)).await;
            new = fixture.open().await.unwrap();
        }
        old.write_all(b" and done").await.unwrap();
        old.shutdown().await.unwrap();
        let mut got = String::new();
        old.read_to_string(&mut got).await.unwrap();
        assert_eq!(got, "begun and done");
        drop(old);
        until("the old connection ends in order", || {
            fixture.served.borrow().first().is_some_and(Result::is_ok)
        })
        .await;
        until("on both sides", || fixture.pool.size() == (1, 1)).await;
        assert_eq!(
            fixture.metric("canal_hbone_closed_total{side=\"server\",reason=\"drained\"}"),
            1
        );
    });
}

/// A peer may send GOAWAY at any moment of a connection's lifetime, including the first: a CONNECT
/// that was not processed is sent again.
#[test]
fn no_tunnel_is_lost_to_a_peer_that_closes_every_connection_in_order() {
    run(async {
        let (fixture, trigger) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), echo).await;
        // Some of the tunnels that are opened together share a connection that closes.
        for n in 0..40 {
            if n == 20 {
                // From now on GOAWAY is the first frame that each connection receives. No drain is
                // forced while the test runs.
                trigger.drain(ms(60_000));
                let listener = listen_again(fixture.target.address).await;
                let (leaving, drain) = drain::tree();
                leaving.drain(ms(60_000));
                let (server, counters) = (
                    ServerIdentity::new(
                        "alpha".parse().unwrap(),
                        fixture.ca.credential(&identity(BOB)),
                    ),
                    fixture.counters.clone(),
                );
                tokio::task::spawn_local(async move {
                    let _leaving = leaving;
                    loop {
                        let Ok((tcp, _)) = listener.accept().await else {
                            return;
                        };
                        let (server, counters, drain) =
                            (server.clone(), counters.clone(), drain.clone());
                        tokio::task::spawn_local(async move {
                            let (tls, peer) = server.accept(tcp).await.unwrap();
                            let connect = |asked: ConnectResult| {
                                drop(tokio::task::spawn_local(echo(asked.unwrap())))
                            };
                            // The tunnels below show whether the connection served them.
                            let _ = serve(
                                tls,
                                peer,
                                &ServerConfig::default(),
                                &counters,
                                drain,
                                connect,
                            )
                            .await;
                        });
                    }
                });
            }
            // Some at a time, so that they meet a connection that is just closing.
            let crowd = join_all((0..5).map(|_| fixture.open())).await;
            for opened in crowd {
                let mut stream = opened.unwrap_or_else(|e| panic!("{n}: {e}")).stream;
                stream.write_all(b"hello").await.unwrap();
                stream.shutdown().await.unwrap();
                let mut got = String::new();
                stream.read_to_string(&mut got).await.unwrap();
                assert_eq!(got, "hello");
            }
        }
    });
}

#[test]
fn a_forced_drain_resets_open_streams() {
    run(async {
        let (fixture, trigger) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let mut s = fixture.open().await.unwrap().stream;
        trigger.drain(ms(100));
        assert_eq!(
            s.read_u8().await.unwrap_err().kind(),
            std::io::ErrorKind::ConnectionReset
        );
    });
}

#[test]
fn a_pooled_connection_that_died_is_replaced_once_for_everyone() {
    run(async {
        let (fixture, trigger) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        drop(fixture.open().await.unwrap());
        trigger.force();
        tokio::task::yield_now().await;
        let listener = listen_again(fixture.target.address).await;
        let (_next, drain) = drain::tree();
        fixture.listen(listener, ServerConfig::default(), drain, hold);
        let opened = join_all((0..20).map(|_| fixture.open())).await;
        assert!(opened.iter().all(Result::is_ok), "{opened:?}");
        assert_eq!(fixture.metric("canal_hbone_handshakes_total"), 2);
    });
}

/// Accepts a connection, responds to its CONNECT or not, and sends nothing after 50 ms, as if it
/// were stopped.
fn stopping_peer(
    fixture: &HboneFixture,
    listener: TcpListener,
    responds: bool,
) -> impl Future<Output = ()> + use<> {
    let server = ServerIdentity::new(
        "alpha".parse().unwrap(),
        fixture.ca.credential(&identity(BOB)),
    );
    async move {
        let (io, _) = server
            .accept(listener.accept().await.unwrap().0)
            .await
            .unwrap();
        let mut h2 = h2::server::handshake(io).await.unwrap();
        let (_, mut respond) = h2.accept().await.unwrap().unwrap();
        let _stream = responds.then(|| {
            respond
                .send_response(http::Response::new(()), false)
                .unwrap()
        });
        let _ = tokio::time::timeout(ms(50), h2.accept()).await;
        std::future::pending::<()>().await;
    }
}

#[test]
fn a_mute_peer_is_found_by_ping_on_the_client() {
    run(async {
        let config = PoolConfig {
            ping: (
                ms(50) * canal_timing::slack(),
                ms(150) * canal_timing::slack(),
            ),
            ..PoolConfig::default()
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let fixture = HboneFixture::towards(listener.local_addr().unwrap(), config);
        tokio::task::spawn_local(stopping_peer(&fixture, listener, true));
        let mut s = fixture.open().await.unwrap().stream;
        assert_eq!(
            s.read_u8().await.unwrap_err().kind(),
            std::io::ErrorKind::ConnectionReset
        );
        until("it leaves the pool", || fixture.pool.size().0 == 0).await;
        assert_eq!(
            fixture.metric("canal_hbone_closed_total{side=\"client\",reason=\"ping_timeout\"}"),
            1
        );
    });
}

#[test]
fn a_mute_peer_is_found_by_ping_on_the_server() {
    run(async {
        let server = ServerConfig {
            ping: (
                ms(50) * canal_timing::slack(),
                ms(150) * canal_timing::slack(),
            ),
            ..ServerConfig::default()
        };
        let (fixture, _t) = HboneFixture::new(PoolConfig::default(), server, hold).await;
        let tcp = tokio::net::TcpStream::connect(fixture.target.address)
            .await
            .unwrap();
        let (io, _) = fixture
            .target
            .source
            .connect(tcp, &fixture.target.expected)
            .await
            .unwrap();
        let (_send, _h2) = h2::client::handshake(io).await.unwrap();
        until("the server gives up", || {
            !fixture.served.borrow().is_empty()
        })
        .await;
        assert!(
            fixture.served.borrow()[0]
                .clone()
                .unwrap_err()
                .contains("PING")
        );
        assert_eq!(
            fixture.metric("canal_hbone_closed_total{side=\"server\",reason=\"ping_timeout\"}"),
            1
        );
    });
}

#[test]
fn unused_connections_are_released_and_used_ones_are_not() {
    run(async {
        let idle = ms(300) * canal_timing::slack();
        let config = PoolConfig {
            idle,
            ..PoolConfig::default()
        };
        let (fixture, _t) = HboneFixture::new(config, ServerConfig::default(), echo).await;
        let s = fixture.open().await.unwrap();
        tokio::time::sleep(idle * 2).await;
        assert_eq!(fixture.pool.size(), (1, 1));
        drop(s);
        until("its stream ends first", || fixture.pool.size() == (1, 0)).await;
        until("idle connections go", || fixture.pool.size() == (0, 0)).await;
        until("the server sees an orderly end", || {
            fixture.served.borrow().first().is_some_and(Result::is_ok)
        })
        .await;
        assert_eq!(
            fixture.metric("canal_hbone_closed_total{side=\"client\",reason=\"idle\"}"),
            1
        );
        assert!(!fixture.open().await.unwrap().reused);
    });
}

#[test]
fn targets_that_differ_in_anything_share_nothing() {
    run(async {
        let (mut fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let mut opened = vec![fixture.open().await.unwrap()];
        fixture.target.expected = std::sync::Arc::from([identity(BOB), identity(BOB)]);
        opened.push(fixture.open().await.unwrap());
        fixture.target.source = ClientIdentity::new(
            fixture
                .ca
                .credential(&identity("spiffe://alpha.example/ns/shop/sa/dave")),
        );
        opened.push(fixture.open().await.unwrap());
        assert!(opened.iter().all(|o| !o.reused));
        assert_eq!(fixture.pool.size(), (3, 3));
        fixture.pool.retire(None);
        drop(opened);
        until("retired connections close", || {
            fixture.pool.size() == (0, 0)
        })
        .await;
    });
}

#[test]
fn an_authority_that_cannot_be_written_is_refused_before_any_connection() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let bad = crate::ConnectAuthority::Name("not a host".into(), 80);
        let e = fixture
            .pool
            .open(&fixture.target, &bad, HeaderMap::new())
            .await
            .unwrap_err();
        assert!(matches!(e, HboneError::Request(_)), "{e}");
    });
}

#[test]
fn no_certificate_is_an_error_without_a_connection() {
    run(async {
        let ca = TestCa::new("alpha");
        let (mut fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let (writer, empty) = canal_tls::Credential::empty(identity(BOB));
        drop(writer);
        fixture.target.source = ClientIdentity::new(empty);
        assert!(matches!(fixture.open().await, Err(HboneError::Tls { .. })));
        assert_eq!(fixture.metric("canal_hbone_handshakes_total"), 0);
        drop(ca);
    });
}

#[test]
fn the_first_certificate_is_waited_for() {
    run(async {
        let (mut fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let (writer, empty) = canal_tls::Credential::empty(identity(ALICE));
        fixture.target.source =
            ClientIdentity::new(empty).trusting(fixture.store.view(&"alpha".parse().unwrap()));
        let late = async {
            tokio::time::sleep(ms(100)).await;
            writer.replace(fixture.ca.issue(&identity(ALICE)));
        };
        let (opened, ()) = tokio::join!(fixture.open(), late);
        opened.unwrap();
    });
}

#[test]
fn targets_that_differ_in_their_mark_share_no_connection() {
    run(async {
        let (mut fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let mut held = Vec::new();
        // Marks need CAP_NET_ADMIN, which the gateway has.
        for (mark, handshakes) in [(Some(101), 1), (Some(102), 2), (Some(101), 2), (None, 3)] {
            fixture.target.mark = mark;
            held.push(fixture.open().await.unwrap());
            assert_eq!(
                fixture.metric("canal_hbone_handshakes_total"),
                handshakes,
                "{mark:?}"
            );
        }
    });
}

//! Streams spread over several connections: their number, the buckets they lead to, and their
//! replacement.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::rc::Rc;

use canal_identity::ServerIdentity;
use canal_model::ids::ServiceId;
use canal_runtime::drain;
use canal_testing::identity;
use canal_wire::tier;
use futures::future::join_all;
use http::HeaderMap;
use tokio::net::TcpListener;

use super::fixture::{BOB, HboneFixture, authority, hold, ms, run, until};
use crate::{
    ConnectResult, HboneError, IncomingConnect, OpenTunnel, PoolConfig, ServerConfig, SpreadConfig,
    Steering, serve,
};

impl HboneFixture {
    async fn open_spread(&self) -> Result<OpenTunnel, HboneError> {
        self.pool
            .open_spread(&self.target, None, &authority(), HeaderMap::new(), None)
            .await
    }
}

/// Returns a spread with fixed numbers, because the defaults may change.
fn fours() -> SpreadConfig {
    SpreadConfig {
        streams_per_connection: 4,
        rate_per_connection: 5,
        ..SpreadConfig::default()
    }
}

fn with(spread: SpreadConfig) -> PoolConfig {
    PoolConfig {
        spread,
        ..PoolConfig::default()
    }
}

#[test]
fn a_stream_now_and_then_keeps_to_one_connection() {
    run(async {
        let (fixture, _t) = HboneFixture::new(with(fours()), ServerConfig::default(), hold).await;
        for _ in 0..20 {
            assert!(fixture.open_spread().await.is_ok());
        }
        assert_eq!(
            (
                fixture.pool.size(),
                fixture.metric("canal_hbone_handshakes_total")
            ),
            ((1, 0), 1)
        );
    });
}

#[test]
fn many_streams_are_spread_evenly_and_over_no_more_connections_than_the_limit() {
    run(async {
        let (fixture, _t) = HboneFixture::new(with(fours()), ServerConfig::default(), hold).await;
        let crowd: Vec<_> = join_all((0..16).map(|_| fixture.open_spread())).await;
        assert!(crowd.iter().all(Result::is_ok));
        assert_eq!(
            fixture.pool.size(),
            (4, 16),
            "a crowd waits for the connections that it justifies"
        );
        let mut opened = Vec::new();
        for _ in 0..240 {
            opened.push(fixture.open_spread().await.unwrap());
        }
        assert_eq!(fixture.pool.size(), (16, 256));
        let more: Vec<_> = join_all((0..16 * 100 - 256).map(|_| fixture.open_spread())).await;
        assert!(more.iter().all(Result::is_ok));
        assert_eq!(fixture.pool.size(), (16, 1600), "all are full");
        opened.push(fixture.open_spread().await.unwrap());
        assert_eq!(
            fixture.pool.size(),
            (17, 1601),
            "a stream that has no room opens a connection all the same"
        );
    });
}

#[test]
fn excess_pooled_connections_are_closed_and_the_first_stays() {
    run(async {
        let config = with(SpreadConfig {
            idle: ms(300) * canal_timing::slack(),
            rate_per_connection: 1000,
            ..fours()
        });
        let (fixture, _t) = HboneFixture::new(config, ServerConfig::default(), hold).await;
        let crowd: Vec<_> = join_all((0..16).map(|_| fixture.open_spread())).await;
        assert_eq!(fixture.pool.size(), (4, 16));
        drop(crowd);
        // The first connection is in use while the others are not.
        while fixture.pool.size() != (1, 0) {
            assert!(fixture.open_spread().await.is_ok());
            tokio::time::sleep(ms(10)).await;
        }
        assert_eq!(
            fixture.metric("canal_hbone_closed_total{side=\"client\",reason=\"idle\"}"),
            3
        );
    });
}

#[test]
fn an_old_connection_serves_until_another_took_its_place() {
    run(async {
        let age = ms(300) * canal_timing::slack();
        let config = with(SpreadConfig { age, ..fours() });
        let (fixture, _t) = HboneFixture::new(config, ServerConfig::default(), hold).await;
        let kept = fixture.open_spread().await.unwrap();
        tokio::time::sleep(age * 3 / 2).await;
        assert!(
            fixture.open_spread().await.unwrap().reused,
            "no stream waits for the new connection"
        );
        until("the new one is up", || fixture.pool.size().0 == 2).await;
        assert!(fixture.open_spread().await.unwrap().reused);
        assert_eq!(fixture.pool.size(), (2, 1), "its stream continues");
        drop(kept);
        until("it closes with its last stream", || {
            fixture.pool.size().0 == 1
        })
        .await;
        assert_eq!(
            fixture.metric("canal_hbone_closed_total{side=\"client\",reason=\"aged\"}"),
            1
        );
    });
}

#[test]
fn a_connection_that_carried_enough_streams_is_replaced() {
    run(async {
        let config = with(SpreadConfig {
            lifetime_streams_max: 5,
            rate_per_connection: 1000,
            ..fours()
        });
        let (fixture, _t) = HboneFixture::new(config, ServerConfig::default(), hold).await;
        // The next connection is established in the background, so its predecessor may carry some
        // streams more than its limit.
        let mut opened = 0;
        while fixture.metric("canal_hbone_handshakes_total") < 4 {
            assert!(fixture.open_spread().await.is_ok());
            opened += 1;
            tokio::time::sleep(ms(20)).await;
        }
        assert!(opened >= 12, "{opened} streams over four connections");
        canal_timing::timed!(
            opened <= 27,
            "a connection is replaced soon after it carried enough streams"
        );
    });
}

/// One of the replicas behind an address may hang while the others serve.
#[test]
fn a_connection_that_answers_nothing_is_left_for_another() {
    run(async {
        let first: Rc<RefCell<Option<usize>>> = Rc::default();
        let mute = first.clone();
        let (fixture, _t) = HboneFixture::new(
            with(fours()),
            ServerConfig::default(),
            move |incoming: IncomingConnect| {
                let peer = Rc::as_ptr(&incoming.peer) as usize;
                let is_mute = *mute.borrow_mut().get_or_insert(peer) == peer;
                async move {
                    if is_mute {
                        let _held = incoming;
                        return std::future::pending().await;
                    }
                    hold(incoming).await;
                }
            },
        )
        .await;
        assert!(
            tokio::time::timeout(ms(600), fixture.open_spread())
                .await
                .is_err()
        );
        for _ in 0..10 {
            let opened =
                tokio::time::timeout(canal_timing::deadline(ms(600)), fixture.open_spread()).await;
            assert!(
                opened.is_ok_and(|opened| opened.is_ok()),
                "the others serve"
            );
        }
        assert_eq!(fixture.metric("canal_hbone_handshakes_total"), 2);
    });
}

/// Starts a server that records the source of each connection, and can drain the newest connection.
async fn steered(
    fixture: &HboneFixture,
    listener: TcpListener,
) -> (
    Rc<RefCell<Vec<SocketAddr>>>,
    Rc<Cell<Option<drain::DrainTrigger>>>,
) {
    let (seen, trigger) = (
        Rc::<RefCell<Vec<SocketAddr>>>::default(),
        Rc::<Cell<Option<drain::DrainTrigger>>>::default(),
    );
    let server = ServerIdentity::new(
        "alpha".parse().unwrap(),
        fixture.ca.credential(&identity(BOB)),
    );
    let (counters, from, newest) = (fixture.counters.clone(), seen.clone(), trigger.clone());
    tokio::task::spawn_local(async move {
        while let Ok((tcp, peer)) = listener.accept().await {
            from.borrow_mut().push(peer);
            let (server, counters) = (server.clone(), counters.clone());
            let (trigger, drain) = drain::tree();
            // Only the trigger of the newest connection is used. The earlier connections stay, so
            // their triggers are not dropped: that would force their drains.
            if let Some(before) = newest.replace(Some(trigger)) {
                std::mem::forget(before);
            }
            tokio::task::spawn_local(async move {
                let (tls, peer) = server.accept(tcp).await.unwrap();
                let connect =
                    |asked: ConnectResult| drop(tokio::task::spawn_local(hold(asked.unwrap())));
                // The connection ends with the test, whose own checks are at the client's side.
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
    (seen, trigger)
}

#[test]
fn each_connection_and_its_successor_use_the_same_bucket() {
    run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let fixture = HboneFixture::towards(address, with(fours()));
        let (seen, trigger) = steered(&fixture, listener).await;
        let steering = Steering {
            source: "127.0.0.1".parse().unwrap(),
            service: ServiceId::new(7).unwrap(),
        };
        let open = || async {
            let opened = fixture
                .pool
                .open_spread(
                    &fixture.target,
                    Some(steering),
                    &authority(),
                    HeaderMap::new(),
                    None,
                )
                .await;
            opened.unwrap_or_else(|e| panic!("{e}"))
        };
        let mut opened = Vec::new();
        for _ in 0..40 {
            opened.push(open().await);
        }
        let count = fixture.pool.size().0;
        let buckets = |seen: &[SocketAddr]| -> Vec<usize> {
            seen.iter()
                .map(|peer| tier::bucket(*peer, address.port(), steering.service))
                .collect()
        };
        let planned: BTreeSet<usize> = (0..count as u32)
            // `fours` changes nothing that selects the buckets.
            .map(|nth| steering.bucket(&SpreadConfig::default(), nth))
            .collect();
        // Ten connections have the forty streams; some may still be opening.
        assert!(count >= 8 && planned.len() == count, "{count} connections");
        assert_eq!(
            buckets(&seen.borrow()).into_iter().collect::<BTreeSet<_>>(),
            planned
        );
        assert_eq!(fixture.metric("canal_hbone_unsteered_total"), 0);
        let last = buckets(&seen.borrow()).pop().unwrap();
        let asked = trigger.take().unwrap();
        // So long that the drain forces nothing while the test runs.
        asked.drain(ms(60_000));
        until(
            "another connection replaces it before a stream needs it",
            || buckets(&seen.borrow()[count..]).contains(&last),
        )
        .await;
        assert_eq!(fixture.metric("canal_hbone_retries_total"), 0);
        drop(asked);
    });
}

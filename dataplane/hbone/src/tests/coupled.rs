//! A peer that couples its windows: while it does not read one stream, it gives no credit to the
//! others of the connection. New streams use another connection.

use std::rc::Rc;

use bytes::Bytes;
use canal_identity::ServerIdentity;
use canal_testing::identity;
use h2::server::SendResponse;
use http::{HeaderMap, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::fixture::{BOB, HboneFixture, ms, run, until};
use crate::{ConnectAuthority, HboneStream, PoolConfig, SpreadConfig, WITHHELD_CONNECTIONS_MAX};

/// Ports of the peer; each selects what it does with a tunnel. This one echoes.
const ECHO: u16 = 1;
const READS_LATER: u16 = 2;
/// Window of each stream of the peer, and of each of its connections. HTTP/2's default (RFC 9113
/// §6.9.2).
const WINDOW: usize = 65_535;
const GAUGE: &str = "canal_hbone_connections_without_credit ";
const COUNTER: &str = "canal_hbone_streams_without_credit_total ";

/// Answers a CONNECT. A tunnel to `READS_LATER` is read from the moment at which the sender has
/// `true`.
async fn serve(
    request: Request<h2::RecvStream>,
    mut respond: SendResponse<Bytes>,
    mut reads: watch::Receiver<bool>,
) {
    let mut send = respond.send_response(Response::new(()), false).unwrap();
    if request.uri().port_u16() == Some(READS_LATER)
        && reads.wait_for(|reads| *reads).await.is_err()
    {
        return;
    }
    let mut body = request.into_body();
    while let Some(Ok(data)) = body.data().await {
        let _ = body.flow_control().release_capacity(data.len());
        if send.send_data(data, false).is_err() {
            return;
        }
    }
    let _ = send.send_data(Bytes::new(), true);
}

/// Starts the peer, and a pool that leads to it.
async fn coupled(config: PoolConfig) -> (Rc<HboneFixture>, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let fixture = HboneFixture::towards(listener.local_addr().unwrap(), config);
    let server = ServerIdentity::new(
        "alpha".parse().unwrap(),
        fixture.ca.credential(&identity(BOB)),
    );
    let (read_now, reads) = watch::channel(false);
    tokio::task::spawn_local(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let (server, reads) = (server.clone(), reads.clone());
            tokio::task::spawn_local(async move {
                let (tls, _) = server.accept(tcp).await.unwrap();
                let mut windows = h2::server::Builder::new();
                windows
                    .initial_window_size(WINDOW as u32)
                    .initial_connection_window_size(WINDOW as u32);
                let mut connection = windows.handshake::<_, Bytes>(tls).await.unwrap();
                while let Some(Ok((request, respond))) = connection.accept().await {
                    tokio::task::spawn_local(serve(request, respond, reads.clone()));
                }
            });
        }
    });
    (Rc::new(fixture), read_now)
}

async fn open(fixture: &HboneFixture, is_spread: bool, port: u16) -> HboneStream {
    let to = ConnectAuthority::Name("app.example".into(), port);
    let opened = match is_spread {
        true => {
            fixture
                .pool
                .open_spread(&fixture.target, None, &to, HeaderMap::new(), None)
                .await
        }
        false => {
            fixture
                .pool
                .open(&fixture.target, &to, HeaderMap::new())
                .await
        }
    };
    opened.unwrap().stream
}

/// Opens a tunnel that the peer does not read, and fills its window, which is the connection's too.
async fn stall(fixture: &HboneFixture, is_spread: bool) -> HboneStream {
    let mut stream = open(fixture, is_spread, READS_LATER).await;
    stream.write_all(&[7; WINDOW]).await.unwrap();
    stream
}

async fn exchange(fixture: &HboneFixture, is_spread: bool) {
    let (mut stream, mut got) = (open(fixture, is_spread, ECHO).await, Vec::new());
    stream.write_all(b"question").await.unwrap();
    stream.shutdown().await.unwrap();
    stream.read_to_end(&mut got).await.unwrap();
    assert_eq!(got, b"question");
}

fn begin_exchange(fixture: &Rc<HboneFixture>, is_spread: bool) -> JoinHandle<()> {
    let fixture = fixture.clone();
    tokio::task::spawn_local(async move { exchange(&fixture, is_spread).await })
}

async fn finish_in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(canal_timing::deadline(ms(2_000)), work)
        .await
        .unwrap_or_else(|_| panic!("it waits for ever: {what}"))
}

/// Returns a configuration whose spread opens one connection for these few streams.
fn one_connection() -> PoolConfig {
    let spread = SpreadConfig {
        streams_per_connection: 100,
        rate_per_connection: 1_000,
        ..SpreadConfig::default()
    };
    PoolConfig {
        spread,
        ..PoolConfig::default()
    }
}

#[test]
fn a_connection_without_credit_is_passed_by_until_credit_comes() {
    for is_spread in [false, true] {
        run(async {
            let (fixture, read_now) = coupled(one_connection()).await;
            let stalled = stall(&fixture, is_spread).await;
            let waiting = begin_exchange(&fixture, is_spread);
            until("the connection is counted", || fixture.metric(GAUGE) == 1).await;
            // One connection with two streams: the one that is not read, and the one that waits.
            assert_eq!(
                (fixture.pool.size(), waiting.is_finished()),
                ((1, 2), false)
            );
            finish_in_time(
                "a new stream, on another connection",
                exchange(&fixture, is_spread),
            )
            .await;
            assert_eq!(fixture.pool.size().0, 2);
            read_now.send(true).unwrap();
            finish_in_time("the stream that waited", waiting)
                .await
                .unwrap();
            until("the connection is no longer counted", || {
                fixture.metric(GAUGE) == 0
            })
            .await;
            finish_in_time(
                "a stream on either connection",
                exchange(&fixture, is_spread),
            )
            .await;
            assert_eq!(
                (
                    fixture.pool.size().0,
                    fixture.metric("canal_hbone_handshakes_total"),
                    fixture.metric(COUNTER)
                ),
                // No third connection, and no stream on the one without credit.
                (2, 2, 0)
            );
            drop(stalled);
        });
    }
}

#[test]
fn a_peer_gets_no_more_connections_when_four_have_no_credit() {
    for is_spread in [false, true] {
        run(async {
            let (fixture, read_now) = coupled(one_connection()).await;
            let (mut stalled, mut waiting) = (Vec::new(), Vec::new());
            for n in 1..=WITHHELD_CONNECTIONS_MAX {
                stalled.push(
                    finish_in_time("a tunnel on a new connection", stall(&fixture, is_spread))
                        .await,
                );
                waiting.push(begin_exchange(&fixture, is_spread));
                until("the connection is counted", || {
                    fixture.metric(GAUGE) == n as u64
                })
                .await;
                assert_eq!((fixture.pool.size().0, fixture.metric(COUNTER)), (n, 0));
            }
            waiting.push(begin_exchange(&fixture, is_spread));
            until("it is placed on one of the four", || {
                fixture.metric(COUNTER) == 1
            })
            .await;
            assert_eq!(fixture.pool.size().0, WITHHELD_CONNECTIONS_MAX);
            read_now.send(true).unwrap();
            for waiting in waiting {
                finish_in_time("a stream that waited", waiting)
                    .await
                    .unwrap();
            }
        });
    }
}

/// Streams that gave up leave nothing to wait for credit, so the connection is closed instead of
/// being kept.
#[test]
fn a_connection_without_credit_and_streams_is_closed() {
    run(async {
        let (fixture, _read_now) = coupled(one_connection()).await;
        let stalled = stall(&fixture, false).await;
        let waiting = begin_exchange(&fixture, false);
        until("the connection is counted", || fixture.metric(GAUGE) == 1).await;
        waiting.abort();
        drop(stalled);
        until("its streams have ended", || fixture.pool.size().1 == 0).await;
        finish_in_time("a new stream", exchange(&fixture, false)).await;
        until("only the new connection is left", || {
            fixture.pool.size().0 == 1
        })
        .await;
        assert_eq!(fixture.metric("canal_hbone_handshakes_total"), 2);
    });
}

/// The peer has too many connections without credit to get another one. Those that have credit are
/// still preferred.
#[test]
fn spread_streams_use_the_connection_that_has_credit_while_four_have_none() {
    run(async {
        let most = WITHHELD_CONNECTIONS_MAX + 1;
        // Each stream needs a connection of its own, and the rate never asks for more.
        let spread = SpreadConfig {
            streams_per_connection: 1,
            rate_per_connection: 1_000,
            connections_max: most as u32,
            ..SpreadConfig::default()
        };
        let (fixture, read_now) = coupled(PoolConfig {
            spread,
            ..PoolConfig::default()
        })
        .await;
        let mut first = Vec::new();
        while fixture.pool.size().0 < most {
            first.push(open(&fixture, true, ECHO).await);
            tokio::task::yield_now().await;
        }
        drop(first);
        until("no stream is left", || fixture.pool.size().1 == 0).await;
        // One of each connection, in turns: four that are not read, and one that is idle.
        let mut held = Vec::new();
        for _ in 0..WITHHELD_CONNECTIONS_MAX {
            held.push(stall(&fixture, true).await);
        }
        held.push(open(&fixture, true, ECHO).await);
        let waiting: Vec<_> = (0..WITHHELD_CONNECTIONS_MAX)
            .map(|_| begin_exchange(&fixture, true))
            .collect();
        until("four are counted", || {
            fixture.metric(GAUGE) == WITHHELD_CONNECTIONS_MAX as u64
        })
        .await;
        for _ in 0..WITHHELD_CONNECTIONS_MAX {
            held.push(open(&fixture, true, ECHO).await);
            finish_in_time(
                "a new stream, on the connection that has credit",
                exchange(&fixture, true),
            )
            .await;
        }
        assert_eq!((fixture.pool.size().0, fixture.metric(COUNTER)), (most, 0));
        read_now.send(true).unwrap();
        for waiting in waiting {
            finish_in_time("a stream that waited", waiting)
                .await
                .unwrap();
        }
    });
}

//! Bytes through a tunnel: complete, in both directions, at the reader's pace, and how each side
//! learns of the other side's end.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use canal_net::copy::{self, CopyEnd, Meter};
use http::HeaderMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::fixture::{HboneFixture, echo, hold, ms, run, until};
use crate::{HboneStream, PoolConfig, ServerConfig};

/// More than all windows between both ends.
const BIG: usize = 10 << 20;

/// Returns byte `i` of a pattern in which a lost, doubled or swapped block shows.
fn pattern(seed: u8, i: usize) -> u8 {
    ((i >> 16) as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ (i as u8).wrapping_add(seed)
}

fn block(seed: u8, at: usize, len: usize) -> Bytes {
    (at..at + len).map(|i| pattern(seed, i)).collect()
}

async fn send_pattern(w: &mut (impl AsyncWriteExt + Unpin), seed: u8, total: usize) {
    let (mut at, sizes) = (0, [1, 70_000, 16 << 10, 1 << 20, 333]);
    for size in sizes.iter().cycle() {
        if at == total {
            break;
        }
        let len = (*size).min(total - at);
        w.write_all(&block(seed, at, len)).await.unwrap();
        at += len;
    }
    w.shutdown().await.unwrap();
}

async fn check_pattern(r: &mut (impl AsyncReadExt + Unpin), seed: u8, total: usize) {
    let (mut buffer, mut at) = (vec![0; 256 << 10], 0);
    loop {
        let n = r.read(&mut buffer).await.unwrap();
        if n == 0 {
            break;
        }
        assert!(
            buffer[..n]
                .iter()
                .enumerate()
                .all(|(i, b)| *b == pattern(seed, at + i)),
            "differs within {n} bytes at {at}"
        );
        at += n;
    }
    assert_eq!(at, total);
}

#[test]
fn a_hundred_megabytes_each_way_at_once_are_exact() {
    run(async {
        let (fixture, _t) = HboneFixture::new(
            PoolConfig::default(),
            ServerConfig::default(),
            |incoming| async move {
                let (mut r, mut w) = tokio::io::split(incoming.accept(HeaderMap::new()).unwrap());
                tokio::join!(send_pattern(&mut w, 7, BIG), check_pattern(&mut r, 1, BIG));
            },
        )
        .await;
        let (mut r, mut w) = tokio::io::split(fixture.open().await.unwrap().stream);
        tokio::join!(send_pattern(&mut w, 1, BIG), check_pattern(&mut r, 7, BIG));
    });
}

/// Relays TCP → copy → tunnel → copy → TCP, as node and gateway do.
async fn relayed(
    streams: impl Fn(TcpStream) + Clone + 'static,
) -> (
    HboneFixture,
    TcpStream,
    Rc<Cell<Option<CopyEnd>>>,
    canal_runtime::drain::DrainTrigger,
) {
    let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let app_address = app.local_addr().unwrap();
    tokio::task::spawn_local(async move { streams(app.accept().await.unwrap().0) });
    let (fixture, trigger) = HboneFixture::new(
        PoolConfig::default(),
        ServerConfig::default(),
        move |incoming| async move {
            let mut tcp = TcpStream::connect(app_address).await.unwrap();
            let mut tunnel = incoming.accept(HeaderMap::new()).unwrap();
            copy::both(&mut tunnel, &mut tcp, &Meter::default(), None).await;
        },
    )
    .await;
    let captured = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(captured.local_addr().unwrap())
        .await
        .unwrap();
    let mut near = captured.accept().await.unwrap().0;
    let mut tunnel = fixture.open().await.unwrap().stream;
    let end = Rc::new(Cell::new(None));
    let ended = end.clone();
    tokio::task::spawn_local(async move {
        ended.set(Some(
            copy::both(&mut near, &mut tunnel, &Meter::default(), None).await,
        ));
    });
    (fixture, client, end, trigger)
}

#[test]
fn a_hundred_megabytes_through_tcp_and_tunnel_are_exact() {
    run(async {
        let (_fixture, client, end, _t) = relayed(|tcp| {
            tokio::task::spawn_local(async move {
                let (mut r, mut w) = tcp.into_split();
                tokio::join!(
                    check_pattern(&mut r, 3, BIG),
                    send_pattern(&mut w, 5, 1 << 20)
                );
            });
        })
        .await;
        let (mut r, mut w) = client.into_split();
        tokio::join!(
            send_pattern(&mut w, 3, BIG),
            check_pattern(&mut r, 5, 1 << 20)
        );
        until("the copy ends", || {
            matches!(end.take(), Some(CopyEnd::Complete))
        })
        .await;
    });
}

#[test]
fn a_reset_by_the_far_application_reaches_the_near_one_and_back() {
    run(async {
        for near_resets in [false, true] {
            let (seen, has_all) = (Rc::new(Cell::new(None)), Rc::new(Cell::new(false)));
            let (far_seen, far_has_all) = (seen.clone(), has_all.clone());
            let (_fixture, mut client, end, _t) = relayed(move |mut tcp: TcpStream| {
                let (seen, has_all) = (far_seen.clone(), far_has_all.clone());
                tokio::task::spawn_local(async move {
                    tcp.write_all(b"hi").await.unwrap();
                    let mut b = [0; 2];
                    tcp.read_exact(&mut b).await.unwrap();
                    has_all.set(true);
                    if near_resets {
                        seen.set(Some(tcp.read(&mut b).await.unwrap_err().kind()));
                    } else {
                        canal_net::sys::reset_on_close(&tcp);
                    }
                });
            })
            .await;
            let mut b = [0; 2];
            client.read_exact(&mut b).await.unwrap();
            client.write_all(b"ho").await.unwrap();
            if near_resets {
                // A reset would discard what the far side has not read.
                until("the far side has all bytes", || has_all.get()).await;
                canal_net::sys::reset_on_close(&client);
                drop(client);
                until("the far side sees a reset", || {
                    seen.get() == Some(io::ErrorKind::ConnectionReset)
                })
                .await;
            } else {
                assert_eq!(
                    client.read(&mut b).await.unwrap_err().kind(),
                    io::ErrorKind::ConnectionReset
                );
            }
            until("the copy is broken", || {
                matches!(end.take(), Some(CopyEnd::Broken { .. }))
            })
            .await;
        }
    });
}

#[test]
fn half_close_works_in_both_orders() {
    run(async {
        let (fixture, _t) = HboneFixture::new(
            PoolConfig::default(),
            ServerConfig::default(),
            |incoming| async move {
                let first = incoming.headers.contains_key("server-first");
                let mut s = incoming.accept(HeaderMap::new()).unwrap();
                let mut got = Vec::new();
                if first {
                    s.write_all(b"over").await.unwrap();
                    s.shutdown().await.unwrap();
                    s.read_to_end(&mut got).await.unwrap();
                    assert_eq!(got, b"after the end of the other direction");
                } else {
                    s.read_to_end(&mut got).await.unwrap();
                    s.write_all(&[b"got ", &got[..]].concat()).await.unwrap();
                    s.shutdown().await.unwrap();
                }
            },
        )
        .await;
        let mut got = Vec::new();
        let mut s = fixture.open().await.unwrap().stream;
        s.write_all(b"all").await.unwrap();
        s.shutdown().await.unwrap();
        s.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"got all");
        assert_eq!(
            s.write(b"x").await.unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
        drop(s);

        let headers = HeaderMap::from_iter([(
            http::HeaderName::from_static("server-first"),
            http::HeaderValue::from_static("1"),
        )]);
        let mut s = fixture
            .pool
            .open(&fixture.target, &super::fixture::authority(), headers)
            .await
            .unwrap()
            .stream;
        got.clear();
        s.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"over");
        s.write_all(b"after the end of the other direction")
            .await
            .unwrap();
        s.shutdown().await.unwrap();
        drop(s);
        until("streams are given back", || fixture.pool.size() == (1, 0)).await;
    });
}

#[test]
fn resets_are_errors_on_the_other_side_whether_it_reads_writes_or_waits() {
    run(async {
        let seen: Rc<Cell<Option<io::ErrorKind>>> = Rc::default();
        let handler_seen = seen.clone();
        let (fixture, _t) = HboneFixture::new(
            PoolConfig::default(),
            ServerConfig::default(),
            move |incoming| {
                let seen = handler_seen.clone();
                async move {
                    let mode = incoming.headers.get("mode").map(|m| m.as_bytes().to_vec());
                    let mut s = incoming.accept(HeaderMap::new()).unwrap();
                    match mode.as_deref() {
                        Some(b"read") => seen.set(s.read_u8().await.err().map(|e| e.kind())),
                        Some(b"write") => loop {
                            // Any size; the peer resets while the windows fill.
                            if let Err(e) = s.write_all(&[0; 1024]).await {
                                return seen.set(Some(e.kind()));
                            }
                        },
                        Some(b"wait") => {
                            let e = std::future::poll_fn(|cx| s.poll_reset(cx)).await;
                            seen.set(Some(e.kind()));
                        }
                        _ => {
                            // A reset overtakes queued data, as in TCP, so the 200 must have left
                            // first.
                            s.read_u8().await.unwrap();
                            s.reset(h2::Reason::CANCEL);
                        }
                    }
                }
            },
        )
        .await;
        let open = |mode: &'static str| {
            let headers = HeaderMap::from_iter([(
                http::HeaderName::from_static("mode"),
                http::HeaderValue::from_static(mode),
            )]);
            let fixture = &fixture;
            async move {
                fixture
                    .pool
                    .open(&fixture.target, &super::fixture::authority(), headers)
                    .await
                    .unwrap()
                    .stream
            }
        };
        for mode in ["read", "write", "wait"] {
            seen.set(None);
            drop(open(mode).await);
            until(mode, || seen.get() == Some(io::ErrorKind::ConnectionReset)).await;
        }
        let mut s = open("reset").await;
        s.write_all(b"x").await.unwrap();
        assert_eq!(
            s.read_u8().await.unwrap_err().kind(),
            io::ErrorKind::ConnectionReset
        );
        let write = async { while s.write_all(b"x").await.is_ok() {} };
        write.await;
    });
}

/// Time without progress after which a writer counts as blocked. It is longer than a stall of the
/// machine.
const STUCK_AFTER: Duration = Duration::from_secs(3);

async fn write_until_stuck(s: &mut HboneStream) -> usize {
    let (mut sent, piece) = (0, vec![1; 64 << 10]);
    while let Ok(n) = tokio::time::timeout(STUCK_AFTER, s.write(&piece)).await {
        sent += n.unwrap();
    }
    sent
}

#[test]
fn a_reader_that_stops_stops_the_writer_within_window_and_buffer() {
    run(async {
        // It is closed once the handlers may read; that reaches also those that do not wait yet.
        let go = Rc::new(tokio::sync::Semaphore::new(0));
        let wait = go.clone();
        let (fixture, _t) = HboneFixture::new(
            PoolConfig::default(),
            ServerConfig::default(),
            move |incoming| {
                let wait = wait.clone();
                async move {
                    let mut s = incoming.accept(HeaderMap::new()).unwrap();
                    assert!(wait.acquire().await.is_err(), "it has no permits");
                    let n = tokio::io::copy(&mut s, &mut tokio::io::sink())
                        .await
                        .unwrap();
                    s.write_u64(n).await.unwrap();
                    s.shutdown().await.unwrap();
                }
            },
        )
        .await;
        let mut s = fixture.open().await.unwrap().stream;
        let sent = write_until_stuck(&mut s).await;
        let (window, buffer) = (
            canal_wire::hbone::STREAM_WINDOW as usize,
            canal_wire::hbone::CLIENT_SEND_BUFFER,
        );
        // The window of a reader that takes nothing never grows.
        assert!((window..=window + buffer).contains(&sent), "{sent}");
        // Another stream on the same connection is not held up.
        let mut other = fixture.open().await.unwrap();
        assert!(other.reused);
        other.stream.write_all(b"neighbour").await.unwrap();
        other.stream.shutdown().await.unwrap();
        go.close();
        // The length of `neighbour`.
        assert_eq!(other.stream.read_u64().await.unwrap(), 9);
        s.shutdown().await.unwrap();
        assert_eq!(s.read_u64().await.unwrap(), sent as u64);
    });
}

#[test]
fn data_of_a_sender_that_closed_is_delivered_completely() {
    run(async {
        let (fixture, _t) = HboneFixture::new(
            PoolConfig::default(),
            ServerConfig::default(),
            |incoming| async move {
                let mut s = incoming.accept(HeaderMap::new()).unwrap();
                send_pattern(&mut s, 9, 3 << 20).await;
            },
        )
        .await;
        let mut s = fixture.open().await.unwrap().stream;
        tokio::time::sleep(ms(50)).await;
        check_pattern(&mut s, 9, 3 << 20).await;
        assert!(s.write_all(b"nobody reads").await.is_err());
    });
}

#[test]
fn a_chunk_in_use_keeps_its_window() {
    run(async {
        let (fixture, _t) = HboneFixture::new(
            PoolConfig::default(),
            ServerConfig::default(),
            |incoming| async move {
                let mut s = incoming.accept(HeaderMap::new()).unwrap();
                let sent = write_until_stuck(&mut s).await;
                assert!(
                    sent <= (canal_wire::hbone::STREAM_WINDOW as usize)
                        + canal_wire::hbone::SERVER_SEND_BUFFER,
                    "{sent}"
                );
                s.shutdown().await.unwrap();
            },
        )
        .await;
        let mut s = fixture.open().await.unwrap().stream;
        let first = std::future::poll_fn(|cx| s.poll_chunk(cx))
            .await
            .unwrap()
            .unwrap();
        tokio::time::sleep(STUCK_AFTER * 2).await;
        let mut total = first.len();
        while let Some(c) = std::future::poll_fn(|cx| s.poll_chunk(cx)).await.unwrap() {
            total += c.len();
        }
        assert!(total >= canal_wire::hbone::STREAM_WINDOW as usize);
    });
}

#[test]
fn replayed_bytes_are_read_first() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), echo).await;
        let mut s = fixture.open().await.unwrap().stream;
        s.write_all(b"PRI * HTTP").await.unwrap();
        s.shutdown().await.unwrap();
        let mut head = [0; 3];
        s.read_exact(&mut head).await.unwrap();
        s.unread(Bytes::copy_from_slice(&head[1..]));
        s.unread(Bytes::copy_from_slice(&head[..1]));
        let mut all = String::new();
        s.read_to_string(&mut all).await.unwrap();
        assert_eq!(all, "PRI * HTTP");
    });
}

#[test]
fn a_certificate_is_renewed_while_a_tunnel_streams() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), echo).await;
        let mut old = fixture.open().await.unwrap().stream;
        old.write_all(b"before").await.unwrap();
        fixture
            .renew
            .replace(fixture.ca.issue(fixture.target.source.identity()));
        let new = fixture.open().await.unwrap();
        assert!(!new.reused);
        assert_eq!(fixture.pool.size(), (2, 2));
        old.write_all(b" and after").await.unwrap();
        old.shutdown().await.unwrap();
        let mut got = String::new();
        old.read_to_string(&mut got).await.unwrap();
        assert_eq!(got, "before and after");
        drop(old);
        until("the old connection is closed", || {
            fixture.pool.size() == (1, 1)
        })
        .await;
        until("and counted", || {
            fixture.metric("canal_hbone_closed_total{side=\"client\",reason=\"retired\"}") == 1
        })
        .await;
    });
}

#[test]
fn both_sides_see_the_peers_identity_and_headers() {
    run(async {
        let (fixture, _t) = HboneFixture::new(
            PoolConfig::default(),
            ServerConfig::default(),
            |incoming| async move {
                assert_eq!(incoming.peer.identity.to_string(), super::fixture::ALICE);
                assert_eq!(incoming.authority.to_string(), "10.1.1.2:80");
                let headers = incoming.headers.clone();
                hold_with(incoming, headers).await;
            },
        )
        .await;
        let sent = HeaderMap::from_iter([(
            http::HeaderName::from_static("baggage"),
            http::HeaderValue::from_static("k8s.pod.name=a"),
        )]);
        let opened = fixture
            .pool
            .open(&fixture.target, &super::fixture::authority(), sent)
            .await
            .unwrap();
        assert_eq!(opened.headers["baggage"], "k8s.pod.name=a");
        assert_eq!(opened.peer.to_string(), super::fixture::BOB);
    });
}

async fn hold_with(incoming: crate::IncomingConnect, headers: HeaderMap) {
    let mut s = incoming.accept(headers).unwrap();
    let _ = tokio::io::copy(&mut s, &mut tokio::io::sink()).await;
}

#[test]
fn an_idle_tunnel_under_copy_is_ended() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let mut tunnel = fixture.open().await.unwrap().stream;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let mut near = listener.accept().await.unwrap().0;
        let meter = Meter::default();
        client.write_all(b"one").await.unwrap();
        let end = copy::both(&mut near, &mut tunnel, &meter, Some(ms(200))).await;
        assert!(matches!(end, CopyEnd::Idle(_)));
        assert_eq!((meter.a_to_b(), meter.b_to_a()), (3, 0));
        drop((near, tunnel));
        assert_eq!(
            client.read_u8().await.unwrap_err().kind(),
            io::ErrorKind::ConnectionReset
        );
    });
}

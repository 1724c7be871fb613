//! Peers that stall, trickle, do not read, or leave at any step: the handshake ends within its time
//! limit, with the right reason.

use std::time::Duration;

use canal_tls::{HANDSHAKE_TIMEOUT, HandshakeFailure};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::Instant;

use super::attacker::{MessageFlight, Opening, ambush, attack};
use super::craft::{HANDSHAKE, record};
use super::fixture::{FIXTURE, call, expected, runtime, serve};
use super::man_in_the_middle::{ByteChange, handshake_through, recorded};

/// Sends one byte per interval `every`, and reads nothing.
async fn trickle(mut io: DuplexStream, bytes: Vec<u8>, every: Duration) {
    for b in bytes {
        tokio::time::sleep(every).await;
        if io.write_all(&[b]).await.is_err() {
            return;
        }
    }
    std::future::pending().await
}

/// Checks the result of both sides under test, and its time, against `attacker` at the
/// other end of the connection.
fn check(
    name: &str,
    capacity: usize,
    wanted: HandshakeFailure,
    attacker: impl AsyncFn(DuplexStream, bool),
) {
    for as_server in [true, false] {
        runtime().block_on(async {
            let (server, client) = FIXTURE.pair();
            let (near, far) = tokio::io::duplex(capacity);
            let began = Instant::now();
            let honest = async {
                let came = if as_server { serve(server, far).await } else { call(client, far).await };
                (came, began.elapsed())
            };
            let ((came, took), ()) = tokio::select! {
                done = honest => (done, ()),
                () = async { attacker(near, as_server).await; std::future::pending().await } => unreachable!(),
            };
            assert_eq!(came, Err(wanted), "{name}, against a server: {as_server}");
            assert!(took <= HANDSHAKE_TIMEOUT + Duration::from_millis(2), "{name}: {took:?}");
            assert!(wanted != HandshakeFailure::Timeout || took >= HANDSHAKE_TIMEOUT, "{name}: {took:?} is too early");
        });
    }
}

/// Returns the honest first flight of a client, or a record with which a server may begin.
fn first(as_server: bool) -> Vec<u8> {
    if as_server {
        Opening::of(&FIXTURE.hello()).wire
    } else {
        record(HANDSHAKE, &[2, 0, 0, 118, 3, 3])
    }
}

#[test]
fn slow_handshakes_time_out() {
    check(
        // A buffer of 64 KiB takes every flight, so that only the pace decides.
        "says nothing",
        64 << 10,
        HandshakeFailure::Timeout,
        async |_io, _| std::future::pending().await,
    );
    check(
        "a byte every nine seconds",
        64 << 10,
        HandshakeFailure::Timeout,
        // Less than the timeout of 10 s, which no byte may restart.
        async |io, s| trickle(io, first(s), Duration::from_secs(9)).await,
    );
    check(
        // The first flight alone does not end the handshake, and nothing follows it.
        "a byte every tenth of a second",
        64 << 10,
        HandshakeFailure::Timeout,
        async |io, s| {
            trickle(io, first(s), Duration::from_millis(100)).await;
        },
    );
    check(
        "a first flight, then nothing",
        64 << 10,
        HandshakeFailure::Timeout,
        async |io, s| trickle(io, first(s), Duration::ZERO).await,
    );
    check(
        "does not listen",
        // Smaller than a flight, so that the side under test blocks when it writes.
        16,
        HandshakeFailure::Timeout,
        async |io, s| trickle(io, first(s), Duration::from_millis(1)).await,
    );
    check(
        "closes at once",
        64 << 10,
        HandshakeFailure::Io,
        async |io, _| drop(io),
    );
    check(
        "closes within a record",
        64 << 10,
        HandshakeFailure::Io,
        // The record's header of five bytes is complete, and its content is not.
        async |mut io, s| io.write_all(&first(s)[..9]).await.unwrap(),
    );
    check(
        "listens, then closes",
        64 << 10,
        HandshakeFailure::Io,
        async |mut io, as_server| {
            // A server sends nothing before the hello, so there is nothing to read from it.
            if !as_server {
                io.read_exact(&mut [0; 64]).await.unwrap();
            }
        },
    );
}

#[test]
fn slow_handshakes_within_the_timeout_succeed() {
    runtime().block_on(async {
        let (server, _) = FIXTURE.pair();
        let (mut near, far) = tokio::io::duplex(64 << 10);
        let opening = Opening::of(&FIXTURE.hello());
        let task = tokio::spawn(serve(server, far));
        for chunk in opening.wire.chunks(16) {
            near.write_all(chunk).await.unwrap();
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let rest = Opening {
            wire: Vec::new(),
            ..opening
        };
        attack(&FIXTURE, near, &rest, super::hellos::honest).await;
        assert_eq!(task.await.unwrap(), Ok(Ok(b"ping".to_vec())));
    });
}

/// Ends the transport in the peer's bytes, at every record's edge and at odd positions between.
#[test]
fn peers_that_go_away_at_any_byte() {
    let (client, server) = recorded();
    for (of_client, stream) in [(true, client), (false, server)] {
        for n in places(&stream) {
            let (by_server, by_client) = handshake_through(&ByteChange::cut(of_client, n));
            let came = if of_client { by_server } else { by_client };
            assert_eq!(
                came,
                Err(HandshakeFailure::Io),
                "gone after {n} of {} bytes, the client: {of_client}",
                stream.len()
            );
        }
    }
}

/// Returns positions around every record's edge and at every 61st byte. It stops shortly before the
/// end, because signatures, and so flights, differ by some bytes.
fn places(stream: &[u8]) -> Vec<usize> {
    let (mut places, mut at) = ((0..stream.len()).step_by(61).collect::<Vec<_>>(), 0);
    while at < stream.len() {
        places.extend([at, at + 1, at + 4, at + 5, at + 6]);
        at += 5 + usize::from(u16::from_be_bytes([stream[at + 3], stream[at + 4]]));
    }
    places.retain(|n| *n < stream.len() - 8);
    places
}

/// A recorded flight of an honest client proves nothing on another connection.
#[test]
fn a_recorded_flight_is_worthless() {
    let (client, server) = recorded();
    runtime().block_on(async {
        let (honest, _) = FIXTURE.pair();
        let (mut near, far) = tokio::io::duplex(64 << 10);
        near.write_all(&client).await.unwrap();
        assert_eq!(serve(honest, far).await, Err(HandshakeFailure::Protocol));
    });
    runtime().block_on(async {
        let (_, honest) = FIXTURE.pair();
        let (mut near, far) = tokio::io::duplex(64 << 10);
        near.write_all(&server).await.unwrap();
        assert_eq!(call(honest, far).await, Err(HandshakeFailure::Protocol));
    });
}

/// Hundreds of concurrent refused handshakes do not affect honest ones.
#[test]
fn a_crowd_of_hostile_peers_does_not_keep_others_out() {
    runtime().block_on(async {
        let (server, client) = FIXTURE.pair();
        let stalled: Vec<_> = (0..500)
            .map(|n| {
                let (mut near, far) = tokio::io::duplex(4096);
                let task = tokio::spawn(serve(server.clone(), far));
                let said = &Opening::of(&FIXTURE.hello()).wire[..n % 150];
                let said = said.to_vec();
                tokio::spawn(async move {
                    let _ = near.write_all(&said).await;
                    task.await.expect("no panic")
                })
            })
            .collect();
        let (near, far) = tokio::io::duplex(64 << 10);
        let honest = tokio::spawn(serve(server.clone(), far));
        let (mut stream, peer) = client.connect(near, &expected()).await.unwrap();
        assert_eq!(peer, *server.identity());
        stream.write_all(b"ping").await.unwrap();
        stream.read_exact(&mut [0; 4]).await.unwrap();
        stream.shutdown().await.unwrap();
        drop(stream);
        assert_eq!(honest.await.unwrap(), Ok(Ok(b"ping".to_vec())));
        for one in stalled {
            assert_eq!(
                one.await.unwrap(),
                Err(HandshakeFailure::Timeout),
                "the peer has stalled"
            );
        }
    });
}

#[test]
fn a_server_that_only_listens_is_left() {
    runtime().block_on(async {
        let (_, client) = FIXTURE.pair();
        let (near, far) = tokio::io::duplex(64 << 10);
        let attacker = tokio::spawn(ambush(&FIXTURE, near, |_, s: &mut MessageFlight| s.wait()));
        assert_eq!(call(client, far).await, Err(HandshakeFailure::Timeout));
        attacker.await.unwrap();
    });
}

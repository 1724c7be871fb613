//! Exchanges through a tunnel with an application that closes, responds early or half-closes. The
//! client observes the same as without a mesh.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use canal_model::program::AppProtocol;
use canal_timing::timed;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture};
use crate::hbone::{LoopbackMesh, local};
use crate::origin::{OriginServer, Peer, pattern};

/// Counts how often an application has read each request.
type ReadCounts = Arc<Mutex<HashMap<String, usize>>>;

/// Starts an application that closes a connection if no request follows within `idle` after a
/// response, and then notifies the test.
async fn impatient(idle: Duration) -> (OriginServer, ReadCounts, UnboundedReceiver<()>) {
    let seen = ReadCounts::default();
    let (to_test, closed) = unbounded_channel();
    let counted = seen.clone();
    let origin = OriginServer::each(move |mut peer: Peer| {
        let (counted, to_test) = (counted.clone(), to_test.clone());
        async move {
            let mut next = peer.request().await;
            while let Some((_, body)) = next {
                *counted
                    .lock()
                    .unwrap()
                    .entry(String::from_utf8(body).unwrap())
                    .or_default() += 1;
                peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                    .await;
                next = tokio::time::timeout(idle, peer.request())
                    .await
                    .unwrap_or_default();
            }
            drop(peer);
            let _ = to_test.send(());
        }
    })
    .await;
    (origin, seen, closed)
}

/// No request sent after the close fails, and no request is read twice. A request sent at the same
/// moment may have reached the application's kernel: whether it was read is unknown, and a few such
/// requests fail without a mesh too.
#[test]
fn a_post_that_meets_a_close_is_sent_again_and_none_twice() {
    // Enough that some meet the close, which takes a fraction of the 4 ms around it.
    const REQUESTS: u64 = 300;
    local(|| async {
        // Short, so that 300 rounds end soon, but much longer than the 2 ms around the close.
        let idle = Duration::from_millis(20);
        let (origin, seen, mut closed) = impatient(idle).await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        let (mut failed_after, mut failed_beside) = (Vec::new(), Vec::new());
        // After a failed request no connection is open, so no close is reported.
        let mut is_open = false;
        for n in 0..REQUESTS {
            // The first request opens the connection, so no close precedes it.
            let is_after = n % 2 == 0 && n > 0;
            if is_after {
                // These reports are of earlier closes.
                while closed.try_recv().is_ok() {}
                if is_open {
                    // Half a second is far longer than the application's `idle`.
                    // The close may have been reported before this.
                    let _ = tokio::time::timeout(
                        Duration::from_millis(500) * canal_timing::slack(),
                        closed.recv(),
                    )
                    .await;
                }
            } else {
                // The requests are sent from 2 ms before the application closes to 2 ms after it.
                tokio::time::sleep(
                    idle - Duration::from_millis(2) + Duration::from_micros(n * 4000 / REQUESTS),
                )
                .await;
            }
            client
                .send(
                    format!("POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 5\r\n\r\n{n:05}")
                        .as_bytes(),
                )
                .await;
            let answer = client.answer().await.unwrap();
            is_open = answer.status == 200;
            if !is_open {
                let failed = if is_after {
                    &mut failed_after
                } else {
                    &mut failed_beside
                };
                failed.push((n, answer.text()));
                client = mesh.client("10.96.0.1:80").await;
            }
        }
        // Label of a retry whose first attempt provably did not reach the application.
        let again = mesh
            .fixture
            .metric("canal_gateway_retries_total", &["upstream_undelivered"]);
        let failed = (failed_after.len(), failed_beside.len());
        println!(
            "{REQUESTS} POSTs: {failed:?} failed after and beside a close, {again} sent again, {} connections",
            origin.connections()
        );
        assert!(
            failed_after.is_empty(),
            "{failed_after:?} {failed_beside:?}"
        );
        // A tenth of the 150 POSTs that are sent around the close; without a mesh a few fail too.
        timed!(
            failed_beside.len() < 15,
            "few POSTs fail that are sent beside a close"
        );
        assert!(again > 0.0, "no POST met a close");
        let seen = seen.lock().unwrap();
        // A POST that failed beside a close may or may not have been read.
        assert!(
            seen.len() + failed_beside.len() >= REQUESTS as usize,
            "{}",
            seen.len()
        );
        assert!(seen.values().all(|n| *n == 1), "a request was read twice");
    });
}

#[test]
fn an_answer_before_a_close_with_unread_bytes_reaches_the_client() {
    local(|| async {
        let origin = OriginServer::each(|mut peer: Peer| async move {
            peer.head().await;
            peer.write(b"HTTP/1.1 413 Content Too Large\r\nconnection: close\r\ncontent-length: 3\r\n\r\nbig").await;
        })
        .await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        for n in 0..30 {
            let client = mesh.client("10.96.0.1:80").await;
            let (read, mut write) = tokio::io::split(client.stream);
            let sending = tokio::task::spawn_local(async move {
                write
                    .write_all(b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 5000000\r\n\r\n")
                    .await?;
                write.write_all(&pattern(0, 5_000_000)).await
            });
            // The client reads nothing before it has sent everything.
            assert!(sending.await.unwrap().is_ok(), "{n}: the upload was cut");
            let mut client = HttpClient {
                stream: tokio::io::join(read, tokio::io::sink()),
                buffer: Vec::new(),
            };
            let answer = client.answer().await.unwrap();
            assert_eq!(
                (
                    answer.status,
                    answer.text().as_str(),
                    answer.field("connection")
                ),
                (413, "big", Some("close")),
                "{n}"
            );
        }
    });
}

#[test]
fn an_early_success_does_not_cut_the_upload() {
    local(|| async {
        let origin = OriginServer::each(|mut peer: Peer| async move {
            while peer.head().await.is_some() {
                peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nstored")
                    .await;
                let Some(body) = peer.exactly(400_000).await else {
                    return;
                };
                assert!(body == pattern(0, 400_000));
            }
        })
        .await;
        let mesh = LoopbackMesh::new(EngineSetup::default());
        let _node = mesh.pod(10, "web-0", &origin).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        for _ in 0..2 {
            client
                .send(b"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 400000\r\n\r\n")
                .await;
            for part in pattern(0, 400_000).chunks(100_000) {
                client.send(part).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            let answer = client.answer().await.unwrap();
            assert_eq!((answer.status, answer.text().as_str()), (200, "stored"));
        }
        assert_eq!(
            (origin.connections(), origin.requests()),
            (1, 2),
            "both connections are kept"
        );
    });
}

#[test]
fn bytes_before_a_reset_arrive_through_tunnels() {
    // Fits into the buffers between origin and client, because the client reads only after the
    // reset.
    const SENT: usize = 100_000;
    local(|| async {
        let (to_test, mut from_origin) = unbounded_channel();
        let origin = OriginServer::each(move |mut peer: Peer| {
            let to_test = to_test.clone();
            async move {
                match peer.exactly(1).await.as_deref() {
                    // The origin sends much data and then resets.
                    Some(b"!") => {
                        peer.write(&pattern(0, SENT)).await;
                        // A reset would discard the data that is still in the origin's own kernel.
                        canal_net::copy::depart(
                            &mut peer.stream,
                            // Far longer than these bytes take over loopback.
                            canal_timing::deadline(Duration::from_secs(5)),
                        )
                        .await;
                        peer.stream.set_zero_linger().unwrap();
                    }
                    first => {
                        let mut rest = Vec::new();
                        let end = peer.stream.read_to_end(&mut rest).await;
                        // The test may have ended.
                        let _ = to_test.send((
                            first.map(<[u8]>::to_vec),
                            [peer.buffer.clone(), rest].concat(),
                            end.is_err(),
                        ));
                    }
                }
            }
        })
        .await;
        let mesh = LoopbackMesh::new(EngineSetup {
            protocol: AppProtocol::Tcp,
            ..EngineSetup::default()
        });
        let _node = mesh.pod(10, "web-0", &origin).await;
        // Each round races the reset against the bytes once more, in both directions.
        for _ in 0..4 {
            let mut client = mesh.client("10.96.0.1:80").await;
            client.send(b"!").await;
            // The client reads late, so that the reset reaches the node while the bytes are still
            // unread.
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert!(!client.closed().await, "a reset");
            assert!(
                client.buffer == pattern(0, SENT),
                "{} of {SENT} bytes",
                client.buffer.len()
            );
            let mut client = mesh.client("10.96.0.1:80").await;
            client.send(b"abc").await;
            canal_net::copy::depart(
                &mut client.stream,
                // Far longer than three bytes take over loopback.
                canal_timing::deadline(Duration::from_secs(1)),
            )
            .await;
            client.stream.reset(h2::Reason::CANCEL);
            assert_eq!(
                from_origin.recv().await.unwrap(),
                (Some(b"a".to_vec()), b"bc".to_vec(), true)
            );
        }
    });
}

/// A peer ends a connection with many empty frames, and every tunnel on it.
#[test]
fn many_resets_cost_no_other_tunnel_its_connection() {
    local(|| async {
        let origin = OriginServer::each(|mut peer: Peer| async move {
            while let Some(bytes) = peer.exactly(3).await {
                peer.write(&bytes).await;
            }
        })
        .await;
        let mesh = LoopbackMesh::new(EngineSetup {
            protocol: AppProtocol::Tcp,
            ..EngineSetup::default()
        });
        let _node = mesh.pod(10, "web-0", &origin).await;
        let mut held = mesh.client("10.96.0.1:80").await;
        for n in 0..150 {
            let mut client = mesh.client("10.96.0.1:80").await;
            client.send(b"abc").await;
            assert_eq!(client.exactly(3).await, b"abc", "{n}");
            client.send(b"d").await;
            canal_net::copy::depart(
                &mut client.stream,
                canal_timing::deadline(Duration::from_secs(1)),
            )
            .await;
            client.stream.reset(h2::Reason::CANCEL);
        }
        held.send(b"abc").await;
        assert_eq!(held.exactly(3).await, b"abc");
    });
}

#[tokio::test]
async fn answers_with_bare_lf_or_equal_lengths_pass() {
    for (said, head) in [
        (
            "HTTP/1.1 200 OK\nX-A: b\nContent-Length: 2\n\nok",
            "HTTP/1.1 200 OK\r\nX-A: b\r\n",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\nContent-Length: 2\r\n\r\nok",
            "HTTP/1.1 200 OK\r\nX-A: b\r\n",
        ),
    ] {
        let origin = OriginServer::fixed(said).await;
        let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
        let mut client = HttpClient::connect(fixture.web).await;
        for _ in 0..2 {
            client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
            let answer = client.answer().await.unwrap();
            assert_eq!(
                (answer.status, answer.text().as_str()),
                (200, "ok"),
                "{said}"
            );
            assert!(
                answer.head.starts_with(head) && !answer.head.replace("\r\n", "").contains('\n'),
                "{}",
                answer.head
            );
            assert_eq!(
                answer.head.to_lowercase().matches("content-length").count(),
                1,
                "{}",
                answer.head
            );
        }
        assert_eq!(origin.connections(), 1, "it is kept");
    }
}

#[tokio::test]
async fn bytes_like_a_method_on_an_undeclared_port_do_not_wait_long() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        if peer.exactly(4).await.as_deref() == Some(b"ruok") {
            peer.write(b"imok\r\n").await;
        }
    })
    .await;
    let fixture = GatewayFixture::new(
        EngineSetup {
            protocol: AppProtocol::Detect,
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(b"ruok").await;
    let answered = tokio::time::timeout(
        canal_timing::deadline(Duration::from_secs(5)),
        client.line(),
    )
    .await;
    assert_eq!(answered.expect("an answer within 5 s"), "imok");
}

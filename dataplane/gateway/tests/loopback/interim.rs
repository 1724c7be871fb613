//! Interim (1xx) responses: passed on in every pairing of versions, few for each request, and never a way to fill the gateway's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use canal_gateway_engine::Times;
use canal_model::program::AppProtocol;
use http::{Request, Response, StatusCode};
use tokio::io::AsyncWriteExt;

use crate::client::Client;
use crate::http2;
use crate::origin::{Origin, Peer};
use crate::rig::{Plot, Rig};

const HINTS: &str = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n";

/// An HTTP/1.1 endpoint that sends `hint` for ever, `pause` between two, and counts the bytes.
async fn flood_1(hint: String, pause: Duration) -> (Origin, Arc<AtomicU64>) {
    let sent = Arc::<AtomicU64>::default();
    let count = sent.clone();
    let origin = Origin::each(move |mut peer: Peer| {
        let (hint, count) = (hint.clone(), count.clone());
        async move {
            if peer.head().await.is_none() {
                return;
            }
            while peer.stream.write_all(hint.as_bytes()).await.is_ok() {
                count.fetch_add(hint.len() as u64, SeqCst);
                tokio::time::sleep(pause).await;
            }
        }
    })
    .await;
    (origin, sent)
}

/// The same in HTTP/2, with a value of so many bytes in each.
async fn flood_2(bytes: usize, pause: Duration) -> Origin {
    http2::origin(move |_, mut respond| async move {
        loop {
            let hint = Response::builder().status(StatusCode::EARLY_HINTS).header("link", "x".repeat(bytes)).body(()).unwrap();
            if respond.send_informational(hint).is_err() {
                return;
            }
            tokio::time::sleep(pause).await;
        }
    })
    .await
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn rig(protocol: AppProtocol, origin: &Origin, times: Times) -> Rig {
    Rig::new(Plot { protocol, times, ..Plot::default() }, &[origin.address])
}

/// The final status that a client of either version is given.
async fn final_status(rig: &Rig, over_http2: bool) -> u16 {
    if over_http2 {
        let client = http2::connect(rig).await;
        let request = Request::get("http://web/").body(()).unwrap();
        let (response, _) = client.ready().await.unwrap().send_request(request, true).unwrap();
        return tokio::time::timeout(Duration::from_secs(20), response).await.unwrap().unwrap().status().as_u16();
    }
    let mut client = Client::connect(rig.web).await;
    client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
    loop {
        let answer = client.answer().await.unwrap();
        if answer.status >= 200 {
            return answer.status;
        }
    }
}

#[tokio::test]
async fn interim_flood_ends_by_name_in_every_pairing() {
    let (one, _) = flood_1(HINTS.into(), Duration::ZERO).await;
    let two = flood_2(4, Duration::ZERO).await;
    for (protocol, origin) in [(AppProtocol::Http1, &one), (AppProtocol::Http2, &two)] {
        let rig = rig(protocol, origin, Times::default());
        for over_http2 in [false, true] {
            assert_eq!(final_status(&rig, over_http2).await, 502, "{protocol:?}, HTTP/2 client: {over_http2}");
        }
        let refused = rig.metric("canal_gateway_refused_requests_total", &["reason=\"interim_responses\"", "side=\"upstream\""]);
        assert_eq!(refused, 2.0, "{protocol:?}");
    }
}

#[tokio::test]
async fn interim_bytes_are_bounded_beside_their_number() {
    // Nine of 8 KiB: more than 64 KiB, fewer than sixteen.
    let (one, _) = flood_1(format!("HTTP/1.1 103 Early Hints\r\nlink: {}\r\n\r\n", "x".repeat(8 << 10)), Duration::ZERO).await;
    let two = flood_2(8 << 10, Duration::ZERO).await;
    for (protocol, origin) in [(AppProtocol::Http1, &one), (AppProtocol::Http2, &two)] {
        let rig = rig(protocol, origin, Times::default());
        let mut client = Client::connect(rig.web).await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        let mut interim = 0;
        while client.answer().await.unwrap().status == 103 {
            interim += 1;
        }
        assert!((7..=8).contains(&interim), "{protocol:?}: {interim}");
        assert_eq!(rig.metric("canal_gateway_refused_requests_total", &["reason=\"interim_responses\""]), 1.0);
    }
}

/// The flood that filled a gateway with 240 MiB a second: the client reads nothing, the endpoint writes as fast as it can.
#[tokio::test]
async fn interim_flood_to_a_client_that_does_not_read_stays_bounded() {
    let (one, sent) = flood_1(HINTS.repeat(1000), Duration::ZERO).await;
    let two = flood_2(1 << 10, Duration::ZERO).await;
    let before = resident_bytes();
    for (protocol, origin) in [(AppProtocol::Http1, &one), (AppProtocol::Http2, &two)] {
        let rig = rig(protocol, origin, Times { client: Duration::from_secs(1), ..Times::default() });
        let mut clients = Vec::new();
        for _ in 0..20 {
            let mut client = Client::connect(rig.web).await;
            client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
            clients.push(client);
        }
        rig.until("canal_gateway_refused_requests_total", &["reason=\"interim_responses\""], 20.0).await;
    }
    // What sockets take of their own accord on both sides, for twenty connections; without a bound it was this in each second.
    assert!(sent.load(SeqCst) < 20 * (16 << 20), "{} bytes were taken from the endpoint", sent.load(SeqCst));
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "the process has grown by {grown} bytes");
}

#[tokio::test]
async fn interim_responses_do_not_put_off_the_final_head() {
    let (one, _) = flood_1(HINTS.into(), Duration::from_millis(300)).await;
    let two = flood_2(4, Duration::from_millis(300)).await;
    let times = || Times { upstream: Duration::from_secs(1), ..Times::default() };
    for (protocol, origin) in [(AppProtocol::Http1, &one), (AppProtocol::Http2, &two)] {
        let rig = rig(protocol, origin, times());
        for over_http2 in [false, true] {
            let began = Instant::now();
            // Sixteen of them would take 4.8 s, and end as a flood.
            assert_eq!(final_status(&rig, over_http2).await, 504, "{protocol:?}, HTTP/2 client: {over_http2}");
            assert!(began.elapsed() >= Duration::from_millis(900));
        }
        assert_eq!(rig.metric("canal_gateway_timeouts_total", &["what=\"upstream_stalled\""]), 2.0, "{protocol:?}");
    }
}

#[tokio::test]
async fn continue_is_passed_on_once() {
    let origin = Origin::each(|mut peer: Peer| async move {
        while peer.head().await.is_some() {
            peer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n").await;
            peer.exactly(5).await;
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
        }
    })
    .await;
    let rig = rig(AppProtocol::Http1, &origin, Times::default());
    let mut client = Client::connect(rig.web).await;
    client.send(b"POST / HTTP/1.1\r\nHost: web\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n").await;
    assert_eq!(client.answer().await.unwrap().status, 100);
    client.send(b"hello").await;
    assert_eq!(client.answer().await.unwrap().status, 200);
}

/// An HTTP/2 endpoint that sends `101` as an interim response, byte by byte: the h2 crate's server would not.
async fn switching() -> Origin {
    Origin::each(|mut peer: Peer| async move {
        let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
            let length = (payload.len() as u32).to_be_bytes();
            [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
        };
        peer.exactly(24).await;
        peer.write(&frame(4, 0, 0, &[])).await;
        loop {
            let Some(head) = peer.exactly(9).await else { return };
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let Some(_) = peer.exactly(length).await else { return };
            match (head[3], head[4]) {
                (4, 0) => peer.write(&frame(4, 1, 0, &[])).await,
                (1, _) => {
                    let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
                    // HPACK: a literal value for the indexed name `:status`.
                    peer.write(&frame(1, 4, stream, b"\x08\x03101")).await;
                    peer.write(&frame(1, 5, stream, b"\x88")).await;
                }
                _ => {}
            }
        }
    })
    .await
}

/// RFC 9113 §8.6: a front proxy that believed such a `101` would take what follows for another protocol.
#[tokio::test]
async fn switching_protocols_from_http2_is_a_fault_of_the_endpoint() {
    let origin = switching().await;
    let rig = rig(AppProtocol::Http2, &origin, Times::default());
    for over_http2 in [false, true] {
        assert_eq!(final_status(&rig, over_http2).await, 502, "HTTP/2 client: {over_http2}");
    }
    let upgrade = "GET / HTTP/1.1\r\nHost: web\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
    assert_eq!(Client::once(rig.web, upgrade).await.status, 502);
    assert_eq!(rig.metric("canal_gateway_refused_requests_total", &["reason=\"upstream_protocol\"", "side=\"upstream\""]), 3.0);
}

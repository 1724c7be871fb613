//! HTTP/2 endpoints that couple their windows: while one stream is not read, the endpoint gives no
//! credit to the others of the connection. New requests use another connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use bytes::Bytes;
use canal_hbone::WITHHELD_CONNECTIONS_MAX;
use canal_model::program::AppProtocol;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{Request, Response};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, until};
use crate::http2;
use crate::origin::{OriginServer, Peer};

/// Window of each stream of the endpoint, and of each of its connections. HTTP/2's default (RFC
/// 9113 §6.9.2).
const WINDOW: usize = 65_535;
const GAUGE: &str = "canal_hbone_connections_without_credit";
const COUNTER: &str = "canal_hbone_streams_without_credit_total";

/// An endpoint that couples its windows.
struct CoupledOrigin {
    origin: OriginServer,
    /// Number of streams whose window is full.
    full: Arc<AtomicUsize>,
    /// True once all streams are read.
    read_now: watch::Sender<bool>,
}

/// Echoes a body. One that is sent to `/later` is counted in `full` when it fills its window, and
/// read when `reads` has `true`.
async fn serve(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    full: Arc<AtomicUsize>,
    mut reads: watch::Receiver<bool>,
) {
    let is_read_later = request.uri().path() == "/later";
    let mut body = request.into_body();
    if is_read_later {
        while body.flow_control().used_capacity() < WINDOW {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        full.fetch_add(1, SeqCst);
        if reads.wait_for(|reads| *reads).await.is_err() {
            return;
        }
    }
    let Ok((body, _)) = http2::read_all(body).await else {
        return;
    };
    let mut send = respond.send_response(Response::new(()), false).unwrap();
    let _ = http2::send_all(&mut send, body.into(), true).await;
}

async fn coupled() -> CoupledOrigin {
    let (read_now, reads) = watch::channel(false);
    let full = Arc::<AtomicUsize>::default();
    let counted = full.clone();
    let origin = OriginServer::each(move |peer: Peer| {
        let (full, reads) = (counted.clone(), reads.clone());
        async move {
            let mut windows = h2::server::Builder::new();
            windows
                .initial_window_size(WINDOW as u32)
                .initial_connection_window_size(WINDOW as u32);
            let mut connection = windows.handshake::<_, Bytes>(peer.stream).await.unwrap();
            while let Some(Ok((request, respond))) = connection.accept().await {
                tokio::spawn(serve(request, respond, full.clone(), reads.clone()));
            }
        }
    })
    .await;
    CoupledOrigin {
        origin,
        full,
        read_now,
    }
}

/// Begins a POST whose body fills the window of its stream, which is the connection's too.
async fn stall(
    fixture: &GatewayFixture,
    to: &CoupledOrigin,
    over_http2: bool,
) -> JoinHandle<usize> {
    let before = to.full.load(SeqCst);
    let stalled = post(fixture, over_http2, "/later", vec![7; WINDOW]);
    until("the window is full", || to.full.load(SeqCst) > before).await;
    stalled
}

fn fixture(to: &CoupledOrigin) -> GatewayFixture {
    GatewayFixture::new(
        EngineSetup {
            protocol: AppProtocol::Http2,
            ..EngineSetup::default()
        },
        &[to.origin.address],
    )
}

/// Sends a POST of a client of its own, and returns the length of the body that comes back.
fn post(
    fixture: &GatewayFixture,
    over_http2: bool,
    path: &'static str,
    body: Vec<u8>,
) -> JoinHandle<usize> {
    let web = fixture.web;
    tokio::spawn(async move {
        if over_http2 {
            let client = http2::connect_to(web).await;
            let request = Request::post(format!("http://web{path}")).body(()).unwrap();
            let (response, mut send) = client
                .ready()
                .await
                .unwrap()
                .send_request(request, false)
                .unwrap();
            http2::send_all(&mut send, body.into(), true).await.unwrap();
            return http2::read_all(response.await.unwrap().into_body())
                .await
                .unwrap()
                .0
                .len();
        }
        let mut client = HttpClient::connect(web).await;
        client
            .send(
                format!(
                    "POST {path} HTTP/1.1\r\nHost: web\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                )
                .as_bytes(),
            )
            .await;
        client.send(&body).await;
        client.answer().await.unwrap().body.len()
    })
}

async fn finish_in_time(what: &str, work: JoinHandle<usize>) -> usize {
    let ended = tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), work).await;
    ended
        .unwrap_or_else(|_| panic!("it waits for ever: {what}"))
        .unwrap()
}

#[tokio::test]
async fn a_stream_that_an_endpoint_does_not_read_leaves_others_another_connection() {
    for over_http2 in [false, true] {
        let to = coupled().await;
        let fixture = fixture(&to);
        let stalled = stall(&fixture, &to, over_http2).await;
        let waiting = post(&fixture, over_http2, "/", b"second".to_vec());
        fixture.until(GAUGE, &[], 1.0).await;
        assert_eq!((to.origin.connections(), waiting.is_finished()), (1, false));
        assert_eq!(
            finish_in_time(
                "the next request",
                post(&fixture, over_http2, "/", b"third".to_vec())
            )
            .await,
            5
        );
        assert_eq!(to.origin.connections(), 2);
        to.read_now.send(true).unwrap();
        assert_eq!(finish_in_time("the stalled request", stalled).await, WINDOW);
        assert_eq!(finish_in_time("the request that waited", waiting).await, 6);
        until("the connection is no longer counted", || {
            fixture.metric(GAUGE, &[]) == 0.0
        })
        .await;
        assert_eq!(
            finish_in_time(
                "a request on either connection",
                post(&fixture, over_http2, "/", b"fourth".to_vec())
            )
            .await,
            6
        );
        assert_eq!(
            (to.origin.connections(), fixture.metric(COUNTER, &[])),
            (2, 0.0)
        );
    }
}

#[tokio::test]
async fn an_endpoint_gets_no_more_connections_when_four_give_no_credit() {
    let to = coupled().await;
    let fixture = fixture(&to);
    let mut all = Vec::new();
    for n in 1..=WITHHELD_CONNECTIONS_MAX {
        all.push(stall(&fixture, &to, false).await);
        all.push(post(&fixture, false, "/", b"next".to_vec()));
        fixture.until(GAUGE, &[], n as f64).await;
        assert_eq!(
            (to.origin.connections(), fixture.metric(COUNTER, &[])),
            (n, 0.0)
        );
    }
    all.push(post(&fixture, false, "/", b"last".to_vec()));
    fixture.until(COUNTER, &[], 1.0).await;
    assert_eq!(to.origin.connections(), WITHHELD_CONNECTIONS_MAX);
    to.read_now.send(true).unwrap();
    for request in all {
        assert!(finish_in_time("a request that waited", request).await > 0);
    }
}

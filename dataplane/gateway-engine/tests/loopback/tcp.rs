//! Relayed bytes on plain listeners: half-close, reset, back-pressure, retry.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use canal_model::program::AppProtocol;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, LOCALHOST};
use crate::http1::settled;
use crate::origin::{OriginServer, Peer, pattern};

fn setup() -> EngineSetup {
    EngineSetup {
        protocol: AppProtocol::Tcp,
        ..EngineSetup::default()
    }
}

#[tokio::test]
async fn bytes_pass_both_ways_and_each_half_ends_by_itself() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        let got = peer.exactly(1 << 20).await.unwrap();
        assert!(got == pattern(0, 1 << 20));
        assert!(peer.line().await.is_none(), "the client's half is over");
        peer.write(&got).await;
    })
    .await;
    let fixture = GatewayFixture::new(setup(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(&pattern(0, 1 << 20)).await;
    client.stream.shutdown().await.unwrap();
    assert!(client.closed().await);
    assert!(client.buffer == pattern(0, 1 << 20));
    fixture
        .until(
            "istio_tcp_connections_closed_total",
            &["response_flags=\"-\""],
            1.0,
        )
        .await;
    assert_eq!(
        fixture.metric(
            "istio_tcp_connections_opened_total",
            &["destination_service_name=\"web\""]
        ),
        1.0
    );
}

#[tokio::test]
async fn a_reset_is_a_reset_on_the_other_side() {
    let origin = OriginServer::each(|mut peer: Peer| async move {
        peer.exactly(1).await;
        peer.stream.set_zero_linger().unwrap();
    })
    .await;
    let fixture = GatewayFixture::new(setup(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    client.send(b"x").await;
    assert!(!client.closed().await, "not an orderly end");
    fixture
        .until(
            "istio_tcp_connections_closed_total",
            &["response_flags=\"UC\""],
            1.0,
        )
        .await;
}

#[tokio::test]
async fn a_reader_that_stops_stops_the_writer() {
    let origin = OriginServer::each(|peer: Peer| async move {
        let _held = peer;
        std::future::pending::<()>().await;
    })
    .await;
    let fixture = GatewayFixture::new(setup(), &[origin.address]);
    let mut client = HttpClient::connect(fixture.web).await;
    let sent = Arc::new(AtomicU64::new(0));
    let counted = sent.clone();
    tokio::spawn(async move {
        let part = pattern(0, 64 << 10);
        while client.stream.write_all(&part).await.is_ok() {
            counted.fetch_add(part.len() as u64, Ordering::SeqCst);
        }
    });
    assert!(settled(&sent).await < 32 << 20);
}

#[tokio::test]
async fn a_dead_endpoint_is_passed_over_and_none_is_a_reset() {
    let dead = TcpListener::bind(LOCALHOST)
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let good =
        OriginServer::each(|mut peer: Peer| async move { peer.write(b"hi\r\n").await }).await;
    let fixture = GatewayFixture::new(setup(), &[dead, good.address]);
    for _ in 0..20 {
        assert_eq!(HttpClient::connect(fixture.web).await.line().await, "hi");
    }
    let none = GatewayFixture::new(setup(), &[dead]);
    // The reset may arrive before the client sees that its connect succeeded.
    if let Ok(stream) = TcpStream::connect(none.web).await {
        assert!(
            !HttpClient {
                stream,
                buffer: Vec::new()
            }
            .closed()
            .await
        );
    }
    none.until(
        "istio_tcp_connections_closed_total",
        &["response_flags=\"UF\""],
        1.0,
    )
    .await;
    tokio::time::sleep(Duration::from_millis(1)).await;
}

//! Limits at the controller's doors: each is reached, refuses what is over it, and counts that.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::rig::{PATIENCE, Rig, Subscriber, service, tenant_object};
use canal_hub::{DOOR_CONNECTIONS_MAX, Limits, TOKEN_BYTES_MAX};
use canal_model::program::Kind;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tonic::Code;

fn alpha(config: &std::path::Path) {
    std::fs::create_dir(config.join("alpha")).unwrap();
    std::fs::write(config.join("alpha/t.yaml"), tenant_object("alpha", 1)).unwrap();
}

async fn refused(rig: &Rig, reason: &str) {
    assert!(rig.metric(&format!("canal_controller_refused_total{{reason=\"{reason}\"}}")).await >= 1.0, "{reason}");
}

#[tokio::test]
async fn streams_and_names() {
    let rig = Rig::with(Limits { streams: 2, names: 4, ..Limits::default() }, alpha).await;
    let mut first = rig.subscribe("n1").await;
    first.settle().await;
    let second = rig.subscribe("n2").await;
    let Err(over) = Subscriber::try_open(rig.channel().await, "g1", BTreeMap::new()).await else { panic!("a third was let in") };
    assert_eq!(over.code(), Code::ResourceExhausted, "{over}");
    drop(second);
    let until = Instant::now() + PATIENCE;
    while rig.metric("canal_controller_subscribers{kind=\"node\"}").await > 1.0 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let resource = first.held.values().next().unwrap().1.clone();
    let claims_much = (0..5).map(|i| ((Kind::Service, format!("alpha/shop/s{i}")), ("v".to_string(), resource.clone()))).collect();
    let mut greedy = Subscriber::open(rig.channel().await, "n2", claims_much).await;
    assert_eq!(greedy.end().await.code(), Code::ResourceExhausted);
    refused(&rig, "streams").await;
    refused(&rig, "names").await;
}

#[tokio::test]
async fn connections() {
    let rig = Rig::with(Limits { connections: 1, ..Limits::default() }, |_| {}).await;
    let one = rig.channel().await;
    let mut two = TcpStream::connect(rig.hub().address()).await.unwrap();
    assert_eq!(two.read(&mut [0; 1]).await.unwrap_or(0), 0, "closed at once");
    refused(&rig, "connections").await;
    assert!((rig.metric("canal_controller_connections").await - 1.0).abs() < f64::EPSILON);
    drop(one);
    let until = Instant::now() + PATIENCE;
    while rig.metric("canal_controller_connections").await > 0.0 {
        assert!(Instant::now() < until);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    rig.channel().await;
}

#[tokio::test]
async fn handshakes() {
    let rig = Rig::with(Limits { handshake: Duration::from_millis(100), ..Limits::default() }, |_| {}).await;
    let mut idle = TcpStream::connect(rig.hub().address()).await.unwrap();
    assert_eq!(idle.read(&mut [0; 1]).await.unwrap_or(0), 0, "one that says nothing is let go");
    refused(&rig, "handshake_deadline").await;
    let mut rude = TcpStream::connect(rig.hub().address()).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut rude, b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let _ = rude.read_to_end(&mut Vec::new()).await;
    refused(&rig, "handshake").await;
}

#[tokio::test]
async fn tokens_and_requests() {
    let rig = Rig::with(Limits { request_bytes: 10_000, ..Limits::default() }, alpha).await;
    let long = "x".repeat(TOKEN_BYTES_MAX + 1);
    let Err(over) = Subscriber::try_open(rig.channel().await, &long, BTreeMap::new()).await else { panic!("it was let in") };
    assert_eq!(over.code(), Code::Unauthenticated, "{over}");
    refused(&rig, "token_form").await;
    let mut ann = rig.admin("ann").await;
    let large = service(1, "a", 1) + &"# more\n".repeat(2000);
    assert_eq!(ann.apply("alpha", &[&large]).await.unwrap_err().code(), Code::OutOfRange);
    ann.must_apply("alpha", &[&service(1, "a", 1)]).await;
}

#[tokio::test]
async fn doors() {
    let rig = Rig::empty().await;
    let address = rig.hub().admin_address().unwrap();
    let mut open = Vec::new();
    for _ in 0..DOOR_CONNECTIONS_MAX {
        open.push(TcpStream::connect(address).await.unwrap());
    }
    let mut over = TcpStream::connect(address).await.unwrap();
    assert_eq!(over.read(&mut [0; 1]).await.unwrap_or(0), 0);
    refused(&rig, "door_connections").await;
    drop(open);
    let until = Instant::now() + PATIENCE;
    loop {
        let mut tcp = TcpStream::connect(address).await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut tcp, b"GET /healthz/ready HTTP/1.1\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut text = String::new();
        if tcp.read_to_string(&mut text).await.is_ok() && text.starts_with("HTTP/1.1 200") {
            return;
        }
        assert!(Instant::now() < until, "the door stays shut");
    }
}

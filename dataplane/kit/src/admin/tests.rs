//! Requests over a socket, and what comes back.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::drain;
use crate::metrics::Family;

async fn ask(address: std::net::SocketAddr, line: &str) -> (u16, String) {
    let mut tcp = TcpStream::connect(address).await.unwrap();
    tcp.write_all(format!("{line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut all = String::new();
    tcp.read_to_string(&mut all).await.unwrap();
    let (head, body) = all.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_string())
}

#[tokio::test]
async fn every_path_answers() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (trigger, drain) = drain::tree();
    let trigger = Arc::new(trigger);
    let up = Arc::new(AtomicBool::new(false));
    let (registry, is_up) = (Registry::new(), up.clone());
    registry.counters(Family::new("things_total", "Things.", &[])).shared(&[]).add(3);
    let routes = Routes::new()
        .config_dump(|| serde_json::json!({"generation": 7}))
        .metrics(registry)
        .ready(move || if is_up.load(Relaxed) { Ok(()) } else { Err("no configuration yet".into()) })
        .quit(trigger.clone(), Duration::from_secs(60))
        .version("1.2.3")
        .route(Method::GET, "/echo", |r| ready(text(StatusCode::OK, query(&r, "q").unwrap_or_default())));
    tokio::spawn(serve(listener, routes, drain.clone()));
    for (line, status, part) in [
        ("GET /", 200, "POST /quitquitquit"),
        ("GET /config_dump", 200, "\"generation\": 7"),
        ("GET /metrics", 200, "things_total 3"),
        ("GET /stats/prometheus", 200, "# TYPE things_total counter"),
        ("GET /healthz/ready", 503, "no configuration yet"),
        ("GET /version", 200, "1.2.3"),
        ("GET /nothing", 404, "GET /version"),
        ("GET /quitquitquit", 405, "use POST"),
        ("GET /echo?x=1&q=a%20b%2Bc+d%zz%4", 200, "a b+c d%zz%4"),
    ] {
        let (got, body) = ask(address, line).await;
        assert!(got == status && body.contains(part), "{line}: {got} {body}");
    }
    up.store(true, Relaxed);
    assert_eq!(ask(address, "GET /healthz/ready").await.0, 200);
    assert_eq!(drain.phase(), drain::Phase::Running);
    assert_eq!(ask(address, "POST /quitquitquit").await.0, 200);
    assert!(matches!(drain.phase(), drain::Phase::Draining { .. }));
    // Operators look on while it drains.
    assert_eq!(ask(address, "GET /version").await.0, 200);
    trigger.force();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_stream_ends_when_the_client_leaves() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_trigger, drain) = drain::tree();
    let (tell, mut told) = tokio::sync::mpsc::channel(1);
    let routes = Routes::new().route(Method::GET, "/tap", move |_| {
        let (lines, body) = tokio::sync::mpsc::channel(4);
        let tell = tell.clone();
        tokio::spawn(async move {
            while lines.send(Bytes::from_static(b"{\"line\":1}\n")).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            tell.send(()).await.unwrap();
        });
        ready(stream("application/x-ndjson", body))
    });
    tokio::spawn(serve(listener, routes, drain));
    let mut tcp = TcpStream::connect(address).await.unwrap();
    tcp.write_all(b"GET /tap HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut seen = String::new();
    while seen.matches("{\"line\":1}").count() < 5 {
        let mut b = [0; 256];
        let n = tcp.read(&mut b).await.unwrap();
        seen.push_str(std::str::from_utf8(&b[..n]).unwrap());
    }
    drop(tcp);
    tokio::time::timeout(Duration::from_secs(5), told.recv()).await.unwrap().unwrap();
}

#[tokio::test]
async fn the_sixty_fifth_connection_waits_its_turn() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_trigger, drain) = drain::tree();
    tokio::spawn(serve(listener, Routes::new().version("1"), drain));
    let mut idle = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    let waiting = tokio::spawn(async move { ask(address, "GET /version").await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished());
    idle.pop();
    assert_eq!(waiting.await.unwrap().0, 200);
}

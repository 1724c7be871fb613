//! The engine's life: before its first configuration, many workers, draining with nothing lost, the end by force.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use canal_gateway_engine::Times;
use canal_model::program::{AppProtocol, Kind};
use http::Request;
use tokio::net::TcpStream;

use crate::client::Client;
use crate::http2::connect;
use crate::origin::{Origin, Peer};
use crate::rig::{Plot, Rig};

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: web\r\n\r\n";

async fn slow(delay: Duration) -> Origin {
    Origin::each(move |mut peer: Peer| async move {
        while peer.request().await.is_some() {
            tokio::time::sleep(delay).await;
            peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
        }
    })
    .await
}

#[tokio::test]
async fn a_service_that_goes_away_is_a_503_on_open_connections() {
    let origin = Origin::named("x").await;
    let rig = Rig::new(Plot::default(), &[origin.address]);
    let mut client = Client::connect(rig.web).await;
    client.send(GET).await;
    assert_eq!(client.answer().await.unwrap().status, 200);
    rig.change(vec![], &[(Kind::Service, "alpha/default/web")]);
    client.send(GET).await;
    assert_eq!(client.answer().await.unwrap().status, 503);
    rig.until("istio_requests_total", &["response_flags=\"NC\""], 1.0).await;
}

#[tokio::test]
async fn draining_answers_what_is_in_flight_and_closes_what_is_idle() {
    let origin = slow(Duration::from_millis(300)).await;
    let times = Times { drain_idle: Duration::from_millis(500), ..Times::default() };
    let mut rig = Rig::new(Plot { times, ..Plot::default() }, &[origin.address]);
    let mut busy = Client::connect(rig.web).await;
    let mut idle = Client::connect(rig.web).await;
    idle.send(GET).await;
    assert_eq!(idle.answer().await.unwrap().field("connection"), None);
    busy.send(GET).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    rig.drain(Duration::from_secs(10));
    let answer = busy.answer().await.unwrap();
    assert_eq!((answer.status, answer.field("connection")), (200, Some("close")));
    assert!(busy.closed().await && idle.closed().await);
    rig.until("canal_gateway_timeouts_total", &["what=\"drain\""], 1.0).await;
    assert!(rig.ended(Duration::from_secs(5)).await);
    assert!(TcpStream::connect(rig.web).await.is_err(), "nobody listens");
}

#[tokio::test]
async fn no_request_is_lost_when_draining_under_load() {
    let origin = slow(Duration::from_millis(2)).await;
    let mut rig = Rig::new(Plot::default(), &[origin.address]);
    let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let (web, stop, answered) = (rig.web, stop.clone(), answered.clone());
            tokio::spawn(async move {
                // As a client with a connection pool: a closed connection is replaced, a refused connect ends the test.
                while !stop.load(Ordering::SeqCst) {
                    let Ok(stream) = TcpStream::connect(web).await else { return };
                    let mut client = Client { stream, buffer: Vec::new() };
                    loop {
                        client.send(GET).await;
                        let answer = client.answer().await.expect("every request that was sent is answered");
                        assert_eq!(answer.status, 200);
                        answered.fetch_add(1, Ordering::SeqCst);
                        if answer.field("connection") == Some("close") {
                            break;
                        }
                    }
                }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    rig.drain(Duration::from_secs(10));
    assert!(rig.ended(Duration::from_secs(8)).await);
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.unwrap();
    }
    assert!(answered.load(Ordering::SeqCst) > 100);
}

#[tokio::test]
async fn http2_clients_are_told_to_go_and_their_streams_finish() {
    let origin = slow(Duration::from_millis(300)).await;
    let mut rig = Rig::new(Plot { protocol: AppProtocol::Http1, ..Plot::default() }, &[origin.address]);
    let client = connect(&rig).await;
    let get = || Request::builder().uri("http://web/").body(()).unwrap();
    let (response, _) = client.clone().ready().await.unwrap().send_request(get(), true).unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    rig.drain(Duration::from_secs(10));
    let answer = response.await.unwrap();
    assert_eq!(answer.status(), 200);
    let mut body = answer.into_body();
    assert_eq!(body.data().await.unwrap().unwrap(), "ok");
    // After GOAWAY no stream can be opened.
    let gone = async {
        loop {
            let Ok(mut send) = client.clone().ready().await else { return };
            if send.send_request(get(), true).is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), gone).await.unwrap();
    drop((client, body));
    assert!(rig.ended(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn what_does_not_end_in_time_is_forced() {
    let origin = slow(Duration::from_secs(60)).await;
    let mut rig = Rig::new(Plot::default(), &[origin.address]);
    let mut client = Client::connect(rig.web).await;
    client.send(GET).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    rig.drain(Duration::from_millis(300));
    assert!(rig.ended(Duration::from_secs(3)).await);
    assert!(client.answer().await.is_none());
}

#[tokio::test]
async fn clients_that_are_asked_to_leave_lose_no_request_and_are_welcome_again() {
    let origin = slow(Duration::from_millis(2)).await;
    let times = Times { drain_idle: Duration::from_millis(700), ..Times::default() };
    let rig = Rig::new(Plot { times, ..Plot::default() }, &[origin.address]);
    let mut idle = Client::connect(rig.web).await;
    idle.send(GET).await;
    assert_eq!(idle.answer().await.unwrap().field("connection"), None);
    let (stop, closed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (web, stop, closed) = (rig.web, stop.clone(), closed.clone());
            tokio::spawn(async move {
                let mut client = Client::connect(web).await;
                while !stop.load(Ordering::SeqCst) {
                    client.send(GET).await;
                    let answer = client.answer().await.expect("every request that was sent is answered");
                    assert_eq!(answer.status, 200);
                    if answer.field("connection") == Some("close") {
                        closed.fetch_add(1, Ordering::SeqCst);
                        client = Client::connect(web).await;
                    }
                }
                client
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(closed.load(Ordering::SeqCst), 0);
    rig.engine.part(true);
    assert!(idle.closed().await, "an idle connection is closed in order");
    rig.until("canal_gateway_timeouts_total", &["what=\"drain\""], 1.0).await;
    assert!(closed.load(Ordering::SeqCst) > 10);
    rig.engine.part(false);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let before = closed.load(Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(closed.load(Ordering::SeqCst), before, "nobody is asked any more");
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        let mut client = client.await.unwrap();
        client.send(GET).await;
        assert_eq!(client.answer().await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn http2_clients_that_are_asked_to_leave_finish_their_streams_and_come_back() {
    let origin = slow(Duration::from_millis(300)).await;
    let rig = Rig::new(Plot::default(), &[origin.address]);
    let client = connect(&rig).await;
    let get = || Request::builder().uri("http://web/").body(()).unwrap();
    let (response, _) = client.clone().ready().await.unwrap().send_request(get(), true).unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    rig.engine.part(true);
    let mut body = response.await.unwrap().into_body();
    assert_eq!(body.data().await.unwrap().unwrap(), "ok");
    drop(body);
    let gone = async {
        while rig.engine.sessions().0 > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), gone).await.expect("the connection ends though its client keeps it");
    assert!(client.ready().await.is_err());
    rig.engine.part(false);
    let client = connect(&rig).await;
    for _ in 0..3 {
        let (response, _) = client.clone().ready().await.unwrap().send_request(get(), true).unwrap();
        assert_eq!(response.await.unwrap().status(), 200);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert_eq!(rig.engine.sessions(), (1, 2));
}

/// Waits until exactly these workers are stuck; panics after 10 s.
async fn until_stuck(rig: &Rig, workers: &[usize]) {
    for _ in 0..1000 {
        if rig.engine.stuck_workers() == workers {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{:?} are stuck, and not {workers:?}", rig.engine.stuck_workers());
}

#[tokio::test]
async fn worker_that_stands_still_is_reported_until_it_turns_again() {
    let origin = Origin::named("x").await;
    let mut rig = Rig::new(Plot { workers: 2, ..Plot::default() }, &[origin.address]);
    let (release, held) = std::sync::mpsc::channel::<()>();
    // The worker's thread itself, and with it everything that its kernel queues hold.
    assert!(rig.engine.workers().spawn(1, move || async move {
        let _ = held.recv();
    }));
    until_stuck(&rig, &[1]).await;
    rig.until("canal_gateway_workers_stuck", &[], 1.0).await;
    drop(release);
    until_stuck(&rig, &[]).await;
    assert!(rig.metric("canal_gateway_worker_stalls_total", &[]) >= 1.0);
    // Workers that end in good order are not missed.
    rig.drain(Duration::from_secs(1));
    assert!(rig.ended(Duration::from_secs(5)).await);
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert!(rig.engine.stuck_workers().is_empty());
}

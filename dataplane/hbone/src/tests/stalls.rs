//! Streams that are not read: they hold up no other stream of their connection, whatever their
//! number, and relays whose client is gone end.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use canal_model::share::Share;
use canal_net::copy::{self, Leg, Meter};
use futures::future::join_all;
use http::HeaderMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::fixture::{HboneFixture, echo, ms, run, until};
use crate::flow::tests::budget;
use crate::{ConnectAuthority, HboneStream, IncomingConnect, PoolConfig, ServerConfig};

/// Ports of the server; each selects what it does with a tunnel. This one echoes.
const ECHO: u16 = 1;
const WRITES: u16 = 2;
const WRITES_PIECES: u16 = 3;
const READS_NOTHING: u16 = 4;
/// Size of pieces that are small for HTTP/2. As `DATA_FRAME_BUDGET` names them.
const PIECE: usize = 50;

fn to(port: u16) -> ConnectAuthority {
    ConnectAuthority::Name("app.example".into(), port)
}

/// Serves a tunnel; `written` counts the bytes that the server could send.
async fn serve(incoming: IncomingConnect, written: Rc<Cell<usize>>) {
    match incoming.authority.port() {
        ECHO => echo(incoming).await,
        READS_NOTHING => {
            let _held = incoming.accept(HeaderMap::new()).unwrap();
            std::future::pending().await
        }
        port => {
            let mut stream = incoming.accept(HeaderMap::new()).unwrap();
            let piece = vec![
                7;
                if port == WRITES_PIECES {
                    PIECE
                } else {
                    16 << 10
                }
            ];
            while let Ok(n) = stream.write(&piece).await {
                written.set(written.get() + n);
            }
        }
    }
}

async fn start_fixture(
    server: ServerConfig,
) -> (
    HboneFixture,
    Rc<Cell<usize>>,
    canal_runtime::drain::DrainTrigger,
) {
    let written = Rc::<Cell<usize>>::default();
    let counted = written.clone();
    let (fixture, trigger) = HboneFixture::new(PoolConfig::default(), server, move |incoming| {
        serve(incoming, counted.clone())
    })
    .await;
    (fixture, written, trigger)
}

async fn open(fixture: &HboneFixture, port: u16) -> HboneStream {
    fixture
        .pool
        .open(&fixture.target, &to(port), HeaderMap::new())
        .await
        .unwrap()
        .stream
}

async fn open_all(fixture: &HboneFixture, port: u16, count: usize) -> Vec<HboneStream> {
    join_all((0..count).map(|_| open(fixture, port))).await
}

/// Exchanges bytes on a new stream of the one connection.
async fn exchange(fixture: &HboneFixture) {
    let exchanged = async {
        let opened = fixture
            .pool
            .open(&fixture.target, &to(ECHO), HeaderMap::new())
            .await
            .unwrap();
        assert!(opened.reused);
        let (mut stream, mut got) = (opened.stream, Vec::new());
        stream.write_all(b"question").await.unwrap();
        stream.shutdown().await.unwrap();
        stream.read_to_end(&mut got).await.unwrap();
        got
    };
    let got = tokio::time::timeout(canal_timing::deadline(ms(1_000)), exchanged)
        .await
        .expect("it is delayed");
    assert_eq!(got, b"question");
}

#[test]
fn streams_that_the_client_does_not_read_hold_up_no_other() {
    for (port, window) in [(WRITES, 64 << 10), (WRITES_PIECES, 60 << 10)] {
        for count in [3, 4, 8, 99] {
            run(async {
                let (fixture, written, _trigger) = start_fixture(ServerConfig::default()).await;
                let unread = open_all(&fixture, port, count).await;
                until("their windows are full", || written.get() >= count * window).await;
                exchange(&fixture).await;
                assert_eq!(fixture.pool.size(), (1, count), "{count}");
                drop(unread);
                exchange(&fixture).await;
            });
        }
    }
}

#[test]
fn streams_that_the_server_does_not_read_hold_up_no_other() {
    for count in [3, 4, 8, 99] {
        run(async {
            let (fixture, _written, _trigger) = start_fixture(ServerConfig::default()).await;
            let mut unread = open_all(&fixture, READS_NOTHING, count).await;
            for stream in &mut unread {
                stream.write_all(&[7; 64 << 10]).await.unwrap();
            }
            exchange(&fixture).await;
            drop(unread);
            exchange(&fixture).await;
        });
    }
}

/// Polls a stream as a copy does whose sink stalls, and returns how it is broken.
fn poll_stalled(stream: &mut HboneStream) -> Option<std::io::ErrorKind> {
    match stream.poll_stalled(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(e) => Some(e.kind()),
        Poll::Pending => None,
    }
}

async fn read_chunk(stream: &mut HboneStream) -> std::io::Result<Option<Bytes>> {
    std::future::poll_fn(|cx| stream.poll_chunk(cx)).await
}

#[test]
fn bytes_of_a_stalled_stream_are_kept_in_order_and_their_window_is_returned_when_they_are_read() {
    run(async {
        let (fixture, written, _trigger) = start_fixture(ServerConfig::default()).await;
        let mut stream = open(&fixture, WRITES_PIECES).await;
        let first = read_chunk(&mut stream).await.unwrap().unwrap();
        until("the window is full", || written.get() >= 60 << 10).await;
        assert_eq!(poll_stalled(&mut stream), None);
        let before = written.get();
        tokio::time::sleep(ms(20)).await;
        assert_eq!(
            written.get(),
            before,
            "bytes that are only buffered return no window"
        );
        let mut got = first.len();
        let merged = read_chunk(&mut stream).await.unwrap().unwrap();
        assert!(merged.len() > 100 * PIECE, "{}", merged.len());
        assert!(first.iter().chain(&merged).all(|byte| *byte == 7));
        got += merged.len();
        while got < 1 << 20 {
            got += read_chunk(&mut stream).await.unwrap().unwrap().len();
        }
    });
}

#[test]
fn a_reset_by_the_peer_follows_the_bytes_that_came_before_it() {
    run(async {
        let go = Rc::new(tokio::sync::Notify::new());
        let wait = go.clone();
        let (fixture, _trigger) = HboneFixture::new(
            PoolConfig::default(),
            ServerConfig::default(),
            move |incoming| {
                let wait = wait.clone();
                async move {
                    let mut stream = incoming.accept(HeaderMap::new()).unwrap();
                    stream.write_all(b"last words").await.unwrap();
                    wait.notified().await;
                    Leg::abort(&mut stream);
                }
            },
        )
        .await;
        let stream = RefCell::new(open(&fixture, ECHO).await);
        until("it learns of the reset", || {
            go.notify_waiters();
            poll_stalled(&mut stream.borrow_mut()).is_some()
        })
        .await;
        let mut stream = stream.into_inner();
        assert_eq!(
            read_chunk(&mut stream).await.unwrap().as_deref(),
            Some(&b"last words"[..])
        );
        assert_eq!(
            read_chunk(&mut stream).await.unwrap_err().kind(),
            std::io::ErrorKind::ConnectionReset
        );
    });
}

/// A tenant that holds its whole share loses the stream that has stalled for the longest time, and
/// no other.
#[test]
fn the_budget_ends_the_longest_stalled_stream() {
    run(async {
        // Alpha's half of it is 256 KiB, which four stalled streams of 64 KiB fill.
        let alpha = budget(512 << 10, Share::Percent(50), "alpha");
        let server = ServerConfig {
            buffer_budget: Some(alpha.clone()),
            ..ServerConfig::default()
        };
        let streams = Rc::new(RefCell::new(Vec::new()));
        let kept = streams.clone();
        let (fixture, _trigger) = HboneFixture::new(
            PoolConfig::default(),
            server,
            move |incoming: IncomingConnect| {
                kept.borrow_mut()
                    .push(incoming.accept(HeaderMap::new()).unwrap());
                std::future::ready(())
            },
        )
        .await;
        // Polls all streams as a stalled copy does, and returns how each ended.
        let poll_all = || {
            streams
                .borrow_mut()
                .iter_mut()
                .map(poll_stalled)
                .collect::<Vec<_>>()
        };
        let mut clients = Vec::new();
        // A stalled stream is charged in units of 64 KiB, and the share is 256 KiB.
        for n in 1..=4 {
            let mut client = open(&fixture, ECHO).await;
            // Any size up to 64 KiB is charged as 64 KiB.
            client.write_all(&[7; 1 << 10]).await.unwrap();
            clients.push(client);
            until("its bytes are charged", || {
                assert!(
                    poll_all().iter().all(Option::is_none),
                    "{n}: the share suffices"
                );
                streams.borrow().len() == n && alpha.limit.used() >= (n as u64) << 16
            })
            .await;
        }
        let mut client = open(&fixture, ECHO).await;
        client.write_all(&[7; 1 << 10]).await.unwrap();
        let ended = RefCell::new(Vec::new());
        until("one is reset", || {
            *ended.borrow_mut() = poll_all();
            ended.borrow().iter().any(Option::is_some)
        })
        .await;
        let ended = ended.into_inner();
        assert_eq!(ended[0], Some(std::io::ErrorKind::QuotaExceeded));
        assert!(ended[1..].iter().all(Option::is_none), "{ended:?}");
        let mut first = streams.borrow_mut().remove(0);
        assert_eq!(
            read_chunk(&mut first).await.unwrap_err().kind(),
            std::io::ErrorKind::QuotaExceeded,
            "it is not the end of the stream"
        );
        assert!(
            read_chunk(&mut clients[0]).await.is_err(),
            "the peer learns of it"
        );
        streams.borrow_mut().clear();
        drop(first);
        assert_eq!(alpha.limit.used(), 0);
    });
}

/// Relays each accepted connection to a tunnel, and counts those that run.
async fn relay(listener: TcpListener, fixture: Rc<HboneFixture>, running: Rc<Cell<usize>>) {
    loop {
        let mut near = listener.accept().await.unwrap().0;
        let (fixture, running) = (fixture.clone(), running.clone());
        running.set(running.get() + 1);
        tokio::task::spawn_local(async move {
            let mut tunnel = open(&fixture, ECHO).await;
            let _ = copy::both(&mut near, &mut tunnel, &Meter::default(), None).await;
            running.set(running.get() - 1);
        });
    }
}

/// Serves a tunnel by an application's connection.
async fn deliver(
    incoming: IncomingConnect,
    application: std::net::SocketAddr,
    running: Rc<Cell<usize>>,
) {
    let mut tcp = TcpStream::connect(application).await.unwrap();
    let mut tunnel = incoming.accept(HeaderMap::new()).unwrap();
    running.set(running.get() + 1);
    let _ = copy::both(&mut tunnel, &mut tcp, &Meter::default(), None).await;
    running.set(running.get() - 1);
}

/// Clients that write and never read, of an application that answers what it reads: when they
/// close, both relays of each client end, and their buffered bytes are released.
#[test]
fn relays_of_clients_that_never_read_end_with_them() {
    for is_reset in [true, false] {
        run(async {
            let application = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = application.local_addr().unwrap();
            tokio::task::spawn_local(async move {
                loop {
                    let mut tcp = application.accept().await.unwrap().0;
                    tokio::task::spawn_local(async move {
                        let (mut r, mut w) = tcp.split();
                        // A client that resets its connection ends the copy with an error.
                        let _ = tokio::io::copy(&mut r, &mut w).await;
                    });
                }
            });
            let running = [(); 2].map(|()| Rc::<Cell<usize>>::default());
            let far = running[1].clone();
            let (fixture, _trigger) = HboneFixture::new(
                PoolConfig::default(),
                ServerConfig::default(),
                move |incoming| deliver(incoming, address, far.clone()),
            )
            .await;
            let (fixture, front) = (
                Rc::new(fixture),
                TcpListener::bind("127.0.0.1:0").await.unwrap(),
            );
            let near = front.local_addr().unwrap();
            tokio::task::spawn_local(relay(front, fixture.clone(), running[0].clone()));
            // Several, so that one that ends by chance does not pass.
            let clients = join_all((0..8).map(|_| async {
                let mut client = TcpStream::connect(near).await.unwrap();
                // As large as a stream's first window.
                let piece = vec![7; 64 << 10];
                // Nothing is read, so a write that takes this long is blocked for good.
                while tokio::time::timeout(Duration::from_millis(300), client.write(&piece))
                    .await
                    .is_ok()
                {}
                client
            }))
            .await;
            assert_eq!(running.each_ref().map(|count| count.get()), [8, 8]);
            for client in clients {
                if is_reset {
                    canal_net::sys::reset_on_close(&client);
                }
                drop(client);
            }
            until("all relays have ended", || {
                running.iter().all(|count| count.get() == 0)
            })
            .await;
            let mut client = TcpStream::connect(near).await.unwrap();
            client.write_all(b"question").await.unwrap();
            let mut got = [0; 8];
            tokio::time::timeout(
                canal_timing::deadline(ms(1_000)),
                client.read_exact(&mut got),
            )
            .await
            .expect("it is delayed")
            .unwrap();
            assert_eq!(&got, b"question");
        });
    }
}

/// A client that pauses is not reset, regardless of the length of the pause: it costs only its
/// window.
#[test]
fn a_client_that_pauses_goes_on_where_it_stopped() {
    run(async {
        let (fixture, written, _trigger) = start_fixture(ServerConfig::default()).await;
        let mut tunnel = open(&fixture, WRITES).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let mut near = listener.accept().await.unwrap().0;
        let meter = Meter::default();
        let pausing = async {
            // Longer than a broken leg would have.
            tokio::time::sleep(copy::stall::STALL_TICK * 8).await;
            let paused_at = written.get();
            let mut got = vec![0; 64 << 10];
            while written.get() < paused_at + (16 << 20) {
                let n = client.read(&mut got).await.unwrap();
                assert!(n > 0 && got[..n].iter().all(|byte| *byte == 7));
            }
        };
        tokio::select! {
            end = copy::both(&mut near, &mut tunnel, &meter, None) => panic!("{end:?}"),
            () = pausing => {}
        }
    });
}

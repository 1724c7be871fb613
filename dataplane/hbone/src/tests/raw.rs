//! Bytes on the wire, against a peer that is not this implementation: settings, form of CONNECT,
//! refusals.

use canal_identity::ServerIdentity;
use canal_testing::identity;
use http::{HeaderMap, Method, Request};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::fixture::{BOB, HboneFixture, hold, run};
use crate::{PoolConfig, ServerConfig};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

struct RawFrame {
    kind: u8,
    stream: u32,
    payload: Vec<u8>,
}

async fn frame(io: &mut (impl AsyncRead + Unpin)) -> RawFrame {
    let mut head = [0; 9];
    io.read_exact(&mut head).await.unwrap();
    let len = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
    let mut payload = vec![0; len];
    io.read_exact(&mut payload).await.unwrap();
    RawFrame {
        kind: head[3],
        stream: u32::from_be_bytes([head[5], head[6], head[7], head[8]]),
        payload,
    }
}

/// Returns the (identifier, value) pairs of a SETTINGS frame, sorted by identifier.
fn settings(f: &RawFrame) -> Vec<(u16, u32)> {
    assert_eq!((f.kind, f.stream), (4, 0));
    let mut list: Vec<_> = f
        .payload
        .chunks(6)
        .map(|c| {
            (
                u16::from_be_bytes([c[0], c[1]]),
                u32::from_be_bytes([c[2], c[3], c[4], c[5]]),
            )
        })
        .collect();
    list.sort_unstable();
    list
}

/// Returns the connection window after a WINDOW_UPDATE on stream 0.
fn connection_window(f: &RawFrame) -> u32 {
    assert_eq!((f.kind, f.stream), (8, 0));
    65_535 + u32::from_be_bytes([f.payload[0], f.payload[1], f.payload[2], f.payload[3]])
}

#[test]
fn the_server_announces_ztunnels_settings_and_small_windows() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let tcp = TcpStream::connect(fixture.target.address).await.unwrap();
        let (mut io, _) = fixture
            .target
            .source
            .connect(tcp, &fixture.target.expected)
            .await
            .unwrap();
        io.write_all(PREFACE).await.unwrap();
        io.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        io.flush().await.unwrap();
        let first = frame(&mut io).await;
        // The settings are MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE and
        // MAX_HEADER_LIST_SIZE.
        assert_eq!(
            settings(&first),
            [(3, 200), (4, 64 << 10), (5, 1 << 20), (6, 64 << 10)]
        );
        let mut window = None;
        for _ in 0..2 {
            let f = frame(&mut io).await;
            if f.kind == 8 {
                window = Some(connection_window(&f));
            }
        }
        assert_eq!(window, Some(canal_wire::hbone::CONNECTION_WINDOW));
    });
}

#[test]
fn the_client_announces_ztunnels_settings_small_windows_and_a_plain_connect() {
    run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let fixture = HboneFixture::towards(listener.local_addr().unwrap(), PoolConfig::default());
        let server = ServerIdentity::new(
            "alpha".parse().unwrap(),
            fixture.ca.credential(&identity(BOB)),
        );
        let served = async {
            let (mut io, _) = server
                .accept(listener.accept().await.unwrap().0)
                .await
                .unwrap();
            let mut preface = [0; 24];
            io.read_exact(&mut preface).await.unwrap();
            assert_eq!(preface, PREFACE);
            // HEADER_TABLE_SIZE has its default value, and ENABLE_PUSH is 0.
            let got = settings(&frame(&mut io).await);
            assert_eq!(
                got,
                [(2, 0), (3, 100), (4, 64 << 10), (5, 1 << 20), (6, 16 << 10)]
            );
            assert_eq!(
                connection_window(&frame(&mut io).await),
                canal_wire::hbone::CONNECTION_WINDOW
            );
            let headers = frame(&mut io).await;
            assert_eq!((headers.kind, headers.stream), (1, 1));
            // The request has only :method CONNECT and :authority (RFC 9113 §8.5). Both are
            // literals here, so the bytes show what is sent.
            let text = String::from_utf8_lossy(&headers.payload).into_owned();
            assert!(!text.contains("https") && !text.contains('/'), "{text:?}");
        };
        tokio::select! {
            opened = fixture.open() => panic!("{opened:?}, but the server answers nothing"),
            () = served => {}
        }
    });
}

#[test]
fn requests_that_are_not_connects_get_400_and_a_named_counter() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let tcp = TcpStream::connect(fixture.target.address).await.unwrap();
        let (io, _) = fixture
            .target
            .source
            .connect(tcp, &fixture.target.expected)
            .await
            .unwrap();
        let (mut send, h2) = h2::client::handshake(io).await.unwrap();
        tokio::task::spawn_local(h2);
        for (method, uri, status) in [
            (Method::GET, "https://10.1.1.2:80/", 400),
            (Method::CONNECT, "10.1.1.2:0", 400),
            (Method::CONNECT, "nowhere", 400),
            (Method::CONNECT, "10.1.1.2:80", 200),
            (
                Method::CONNECT,
                "reviews.bookinfo.svc.cluster.local:9080",
                200,
            ),
        ] {
            let mut request = Request::new(());
            *request.method_mut() = method.clone();
            *request.uri_mut() = uri.parse().unwrap();
            *request.headers_mut() = HeaderMap::new();
            send = send.ready().await.unwrap();
            let (response, _stream) = send.send_request(request, false).unwrap();
            assert_eq!(
                response.await.unwrap().status().as_u16(),
                status,
                "{method} {uri}"
            );
        }
        assert_eq!(
            fixture.metric("canal_hbone_refused_total{reason=\"not_connect\"}"),
            1
        );
        // Port 0, and the name without a port.
        assert_eq!(
            fixture.metric("canal_hbone_refused_total{reason=\"bad_authority\"}"),
            2
        );
    });
}

#[test]
fn a_connection_that_is_not_http2_ends_alone() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        let tcp = TcpStream::connect(fixture.target.address).await.unwrap();
        let (mut io, _) = fixture
            .target
            .source
            .connect(tcp, &fixture.target.expected)
            .await
            .unwrap();
        io.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        io.flush().await.unwrap();
        super::fixture::until("it is ended", || {
            fixture.served.borrow().first().is_some_and(Result::is_err)
        })
        .await;
        assert!(fixture.open().await.is_ok());
    });
}

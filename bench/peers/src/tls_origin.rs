//! The origin behind mTLS: 23 bytes to each HTTP/2 request, and to each HTTP/1.1 request inside a
//! CONNECT, as a node proxy and its application would respond. It is a thread of the bench on the
//! load's core and is not measured.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::Context;
use bytes::Bytes;
use h2::server::SendResponse;
use http::{Method, Request, Response};
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{LocalSet, spawn_local};
use tokio_rustls::TlsAcceptor;

use canal_bench_peers::process::pin_to_load;

/// Address of the listener: the port of node proxies, at a pod other than the plain origin.
pub(crate) const ADDRESS: SocketAddr = SocketAddr::new(
    std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 99, 1, 2)),
    15_008,
);

const BODY: &[u8] = b"0123456789012345678901\n";
/// One HTTP/1.1 response.
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 23\r\n\r\n0123456789012345678901\n";
/// Maximum number of simultaneous streams on a connection.
/// Above what any case has in progress on one connection, so that the origin never limits.
const STREAMS_MAX: u32 = 1000;

/// Serves until the process ends.
pub(crate) fn start(config: Arc<ServerConfig>) -> anyhow::Result<()> {
    let listener = std::net::TcpListener::bind(ADDRESS)
        .with_context(|| format!("the origin cannot listen on {ADDRESS}"))?;
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::spawn(move || {
        if let Err(error) = pin_to_load() {
            eprintln!("the origin's thread is not on the load's core: {error:#}");
        }
        runtime.block_on(LocalSet::new().run_until(accept(listener, TlsAcceptor::from(config))))
    });
    Ok(())
}

async fn accept(listener: std::net::TcpListener, acceptor: TlsAcceptor) {
    let Ok(listener) = TcpListener::from_std(listener) else {
        return;
    };
    let acceptor = Rc::new(acceptor);
    loop {
        // A connection that closes before it is accepted is the proxy's to report.
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        let acceptor = acceptor.clone();
        spawn_local(async move {
            if let Err(error) = connection(&acceptor, stream).await {
                eprintln!("the origin's connection ended: {error:#}");
            }
        });
    }
}

async fn connection(acceptor: &TlsAcceptor, stream: TcpStream) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let tls = acceptor.accept(stream).await.context("TLS")?;
    let mut h2 = h2::server::Builder::new()
        // Above every body of the bench, so that flow control delays nothing.
        .initial_window_size(1 << 20)
        .initial_connection_window_size(16 << 20)
        .max_concurrent_streams(STREAMS_MAX)
        .handshake::<_, Bytes>(tls)
        .await?;
    // A proxy that is killed may end its connections in any way.
    while let Some(Ok((request, respond))) = h2.accept().await {
        if request.method() == Method::CONNECT {
            spawn_local(tunnel(request, respond));
        } else {
            answer(respond)?;
        }
    }
    Ok(())
}

fn answer(mut respond: SendResponse<Bytes>) -> anyhow::Result<()> {
    let head = Response::builder()
        .header("content-type", "text/plain")
        .header("content-length", BODY.len())
        .body(())?;
    respond
        .send_response(head, false)?
        .send_data(Bytes::from_static(BODY), true)?;
    Ok(())
}

/// Serves requests without bodies: one response for each empty line.
async fn tunnel(
    request: Request<h2::RecvStream>,
    mut respond: SendResponse<Bytes>,
) -> Result<(), h2::Error> {
    let mut send = respond.send_response(Response::new(()), false)?;
    let mut read = request.into_body();
    let mut rest = Vec::new();
    while let Some(chunk) = read.data().await {
        let chunk = chunk?;
        read.flow_control().release_capacity(chunk.len())?;
        rest.extend_from_slice(&chunk);
        while let Some(end) = rest.windows(4).position(|four| four == b"\r\n\r\n") {
            rest.drain(..end + 4);
            send.send_data(Bytes::from_static(ANSWER), false)?;
        }
    }
    send.send_data(Bytes::new(), true)
}

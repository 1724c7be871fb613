//! Floods from a host's network namespace: many connections that are opened and then held in one of
//! the states in which a connection can be left. Each flood is bounded in number and time. It does
//! not check the results.

use std::net::SocketAddr;
use std::time::Duration;

use canal_world::World;
use http::Request;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_rustls::TlsConnector;

use crate::credential::{self, PemCredential};

/// Maximum number of connections that open at the same time. More would fill the accept queue of a
/// busy server, whose lost SYNs only cost time.
const OPENING_MAX: usize = 64;
/// Timeout for opening one connection. A lost SYN is repeated once within it, after 1 s; a
/// connection that does not open counts as refused.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// State in which each connection stays once TCP is open.
#[derive(Clone)]
pub enum Hold<'f> {
    /// Sends nothing.
    Silent,
    /// Sends these bytes and no more.
    Bytes(Vec<u8>),
    /// Sends these bytes one by one, with this interval.
    Drip(Vec<u8>, Duration),
    /// Sends these bytes repeatedly, as fast as they are accepted, and reads nothing.
    Flood(Vec<u8>),
    /// Completes the TLS handshake (ALPN `h2`) and sends nothing more.
    Tls(Option<&'f PemCredential>),
    /// Completes TLS and HTTP/2, and opens `streams` CONNECT streams to this authority. Each stream
    /// offers `payload` bytes; no response is read.
    Streams {
        credential: &'f PemCredential,
        authority: &'f str,
        streams: usize,
        payload: usize,
    },
    /// Completes TLS and HTTP/2, then opens CONNECT streams and resets them at once until the time
    /// is over.
    Resets {
        credential: &'f PemCredential,
        authority: &'f str,
    },
}

/// Connections that are opened and held.
#[derive(Clone)]
pub struct ConnectionFlood<'f> {
    /// Host whose network namespace is used.
    pub host: &'f str,
    pub to: SocketAddr,
    pub connections: usize,
    pub hold: Hold<'f>,
    /// Duration of the flood. A connection that the other side closes earlier is opened again.
    pub lasts: Duration,
}

/// Numbers of connections that a flood opened and could not open.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct FloodReport {
    /// Number of TCP connections that were opened, repeated ones included.
    pub connections_opened: u64,
    /// Number of connections that could not be opened, or not brought into their state.
    pub refused: u64,
}

impl ConnectionFlood<'_> {
    /// Opens the connections, holds them until the time is over, and closes them.
    pub fn run(&self, world: &World) -> FloodReport {
        let all = || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let ends = Instant::now() + self.lasts;
                let opening = tokio::sync::Semaphore::new(OPENING_MAX);
                let reports = (0..self.connections).map(|_| self.one(&opening, ends));
                futures::future::join_all(reports).await
            })
        };
        let reports = world
            .inside(self.host, all)
            .unwrap_or_else(|e| panic!("{}: {e}", self.host));
        reports
            .into_iter()
            .fold(FloodReport::default(), |sum, one| FloodReport {
                connections_opened: sum.connections_opened + one.connections_opened,
                refused: sum.refused + one.refused,
            })
    }

    async fn one(&self, opening: &tokio::sync::Semaphore, ends: Instant) -> FloodReport {
        let mut report = FloodReport::default();
        while Instant::now() < ends {
            let Ok(Ok(permit)) = timeout_at(ends, opening.acquire()).await else {
                break;
            };
            let opened = timeout(OPEN_TIMEOUT, TcpStream::connect(self.to)).await;
            let Ok(Ok(tcp)) = opened else {
                report.refused += 1;
                drop(permit);
                // The pause avoids a busy loop if everything is refused.
                sleep(Duration::from_millis(100)).await;
                continue;
            };
            report.connections_opened += 1;
            let ended = timeout_at(ends, hold(&self.hold, tcp, permit)).await;
            if let Ok(Err(_)) = ended {
                report.refused += 1;
                sleep(Duration::from_millis(50)).await;
            }
        }
        report
    }
}

/// Brings a connection into its state and waits until the other side ends it. An error means that
/// the state was not reached.
async fn hold(
    hold: &Hold<'_>,
    mut tcp: TcpStream,
    opening: tokio::sync::SemaphorePermit<'_>,
) -> std::io::Result<()> {
    // The permit limits how many connections are being opened, so each arm drops it once the
    // connection is in its state.
    match hold {
        Hold::Silent => drop(opening),
        Hold::Bytes(bytes) => {
            tcp.write_all(bytes).await?;
            drop(opening);
        }
        // A drip may take the whole flood, so it must not keep other connections from opening.
        Hold::Drip(bytes, apart) => {
            drop(opening);
            for byte in bytes {
                tcp.write_all(&[*byte]).await?;
                sleep(*apart).await;
            }
        }
        Hold::Flood(bytes) => {
            // The peer or the end of the flood stops the loop: both make the write fail or cancel
            // it.
            drop(opening);
            loop {
                tcp.write_all(bytes).await?;
            }
        }
        Hold::Tls(credential) => {
            let tls = TlsConnector::from(credential::client(*credential, b"h2"))
                .connect(hbone(), tcp)
                .await?;
            drop(opening);
            return until_closed(tls).await;
        }
        Hold::Streams {
            credential,
            authority,
            streams,
            payload,
        } => {
            let client = establish(tcp, credential, opening).await?;
            return open_streams(client, authority, *streams, *payload).await;
        }
        Hold::Resets {
            credential,
            authority,
        } => {
            let client = establish(tcp, credential, opening).await?;
            return reset_streams(client, authority).await;
        }
    }
    until_closed(tcp).await
}

fn hbone() -> ServerName<'static> {
    ServerName::try_from("hbone").expect("a name")
}

async fn until_closed(mut stream: impl tokio::io::AsyncRead + Unpin) -> std::io::Result<()> {
    let mut some = [0; 4096];
    while stream.read(&mut some).await? > 0 {}
    Ok(())
}

async fn establish(
    tcp: TcpStream,
    credential: &PemCredential,
    opening: tokio::sync::SemaphorePermit<'_>,
) -> std::io::Result<h2::client::SendRequest<bytes::Bytes>> {
    let tls = TlsConnector::from(credential::client(Some(credential), b"h2"))
        .connect(hbone(), tcp)
        .await?;
    let (client, connection) = h2::client::handshake(tls)
        .await
        .map_err(std::io::Error::other)?;
    tokio::spawn(async move {
        // The streams show how the connection ended.
        let _ = connection.await;
    });
    drop(opening);
    Ok(client)
}

fn connect(authority: &str) -> Request<()> {
    Request::builder()
        .method("CONNECT")
        .uri(authority)
        .body(())
        .unwrap_or_else(|e| panic!("{authority}: {e}"))
}

async fn open_streams(
    mut client: h2::client::SendRequest<bytes::Bytes>,
    authority: &str,
    streams: usize,
    payload: usize,
) -> std::io::Result<()> {
    let mut held = Vec::new();
    for _ in 0..streams {
        client = client.ready().await.map_err(std::io::Error::other)?;
        let (response, mut into) = client
            .send_request(connect(authority), false)
            .map_err(std::io::Error::other)?;
        if payload > 0 {
            into.reserve_capacity(payload);
            // More than the window is queued here, and no response data is read.
            let _ = into.send_data(vec![b'x'; payload].into(), false);
        }
        held.push((response, into));
    }
    // The connection ends with this stream.
    let (response, _into) = held
        .pop()
        .ok_or_else(|| std::io::Error::other("no stream"))?;
    let mut body = response.await.map_err(std::io::Error::other)?.into_body();
    while body.data().await.is_some_and(|data| data.is_ok()) {
        // Without `release_capacity` the window stays closed.
    }
    Ok(())
}

async fn reset_streams(
    mut client: h2::client::SendRequest<bytes::Bytes>,
    authority: &str,
) -> std::io::Result<()> {
    loop {
        client = client.ready().await.map_err(std::io::Error::other)?;
        let (_response, mut into) = client
            .send_request(connect(authority), false)
            .map_err(std::io::Error::other)?;
        into.send_reset(h2::Reason::CANCEL);
        tokio::task::yield_now().await;
    }
}

/// Opens and closes connections as fast as one thread can, until the time is over.
pub fn churn(world: &World, host: &str, to: SocketAddr, lasts: Duration) -> FloodReport {
    let all = || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let ends = Instant::now() + lasts;
            let clients = (0..OPENING_MAX).map(|_| async {
                let mut report = FloodReport::default();
                while Instant::now() < ends {
                    match timeout(OPEN_TIMEOUT, TcpStream::connect(to)).await {
                        Ok(Ok(tcp)) => {
                            report.connections_opened += 1;
                            // A reset instead of a close prevents ports from running out in
                            // TIME_WAIT.
                            let _ = tcp.set_zero_linger();
                        }
                        _ => report.refused += 1,
                    }
                }
                report
            });
            let reports = futures::future::join_all(clients).await;
            sleep_until(ends).await;
            reports
        })
    };
    let reports = world
        .inside(host, all)
        .unwrap_or_else(|e| panic!("{host}: {e}"));
    reports
        .into_iter()
        .fold(FloodReport::default(), |sum, one| FloodReport {
            connections_opened: sum.connections_opened + one.connections_opened,
            refused: sum.refused + one.refused,
        })
}

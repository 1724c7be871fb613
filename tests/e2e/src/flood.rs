//! Floods by hand, from a host's network namespace: many connections that are opened and held, in each state in which a connection can be left.
//! Each is bounded in count and time. Judges nothing.

use std::net::SocketAddr;
use std::time::Duration;

use canal_world::World;
use http::Request;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_rustls::TlsConnector;

use crate::credential::{self, Credential};

/// Connections that are being opened at the same time.
const OPENING_MAX: usize = 64;
/// How long one connection may take to be opened.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// What is done with each connection once TCP is open.
#[derive(Clone)]
pub enum Hold<'f> {
    /// Nothing is sent.
    Silent,
    /// These bytes are sent, and no more.
    Bytes(Vec<u8>),
    /// These bytes are sent one by one, this long apart.
    Drip(Vec<u8>, Duration),
    /// These bytes are sent again and again, as fast as they are taken, and nothing is read.
    Flood(Vec<u8>),
    /// TLS is established (ALPN `h2`), and nothing follows.
    Tls(Option<&'f Credential>),
    /// TLS and HTTP/2 are established, and so many CONNECT streams are opened to this authority, each with this many bytes of payload offered;
    /// nothing of the answers is read.
    Streams { credential: &'f Credential, authority: &'f str, streams: usize, payload: usize },
    /// TLS and HTTP/2 are established, and CONNECT streams are opened and reset at once until the time is over.
    Resets { credential: &'f Credential, authority: &'f str },
}

/// Connections to be opened and held.
#[derive(Clone)]
pub struct Flood<'f> {
    /// From whose network namespace.
    pub host: &'f str,
    pub to: SocketAddr,
    pub connections: usize,
    pub hold: Hold<'f>,
    /// When it ends; a connection that the other side closed before is opened anew.
    pub lasts: Duration,
}

/// What came of a flood.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct FloodReport {
    /// TCP connections that were opened, those that were opened anew among them.
    pub opened: u64,
    /// Connections that could not be opened, or not brought into the state to be held.
    pub refused: u64,
}

impl Flood<'_> {
    /// Opens the connections, holds them until the time is over, and closes them.
    pub fn run(&self, world: &World) -> FloodReport {
        let all = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let ends = Instant::now() + self.lasts;
                let opening = tokio::sync::Semaphore::new(OPENING_MAX);
                let reports = (0..self.connections).map(|_| self.one(&opening, ends));
                futures::future::join_all(reports).await
            })
        };
        let reports = world.inside(self.host, all).unwrap_or_else(|e| panic!("{}: {e}", self.host));
        reports
            .into_iter()
            .fold(FloodReport::default(), |sum, one| FloodReport { opened: sum.opened + one.opened, refused: sum.refused + one.refused })
    }

    async fn one(&self, opening: &tokio::sync::Semaphore, ends: Instant) -> FloodReport {
        let mut report = FloodReport::default();
        while Instant::now() < ends {
            let Ok(Ok(permit)) = timeout_at(ends, opening.acquire()).await else { break };
            let opened = timeout(OPEN_TIMEOUT, TcpStream::connect(self.to)).await;
            let Ok(Ok(tcp)) = opened else {
                report.refused += 1;
                drop(permit);
                // Not a busy loop where everything is refused.
                sleep(Duration::from_millis(100)).await;
                continue;
            };
            report.opened += 1;
            let held = timeout_at(ends, hold(&self.hold, tcp, permit)).await;
            if let Ok(Err(_)) = held {
                report.refused += 1;
                sleep(Duration::from_millis(50)).await;
            }
        }
        report
    }
}

/// Brings a connection into its state and stays until the other side ends it; an error is one before the state was reached.
async fn hold(hold: &Hold<'_>, mut tcp: TcpStream, opening: tokio::sync::SemaphorePermit<'_>) -> std::io::Result<()> {
    match hold {
        Hold::Silent => drop(opening),
        Hold::Bytes(bytes) => {
            tcp.write_all(bytes).await?;
            drop(opening);
        }
        Hold::Drip(bytes, apart) => {
            drop(opening);
            for byte in bytes {
                tcp.write_all(&[*byte]).await?;
                sleep(*apart).await;
            }
        }
        Hold::Flood(bytes) => {
            drop(opening);
            loop {
                tcp.write_all(bytes).await?;
            }
        }
        Hold::Tls(credential) => {
            let tls = TlsConnector::from(credential::client(*credential, b"h2")).connect(hbone(), tcp).await?;
            drop(opening);
            return until_closed(tls).await;
        }
        Hold::Streams { credential, authority, streams, payload } => {
            let client = establish(tcp, credential, opening).await?;
            return open_streams(client, authority, *streams, *payload).await;
        }
        Hold::Resets { credential, authority } => {
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
    credential: &Credential,
    opening: tokio::sync::SemaphorePermit<'_>,
) -> std::io::Result<h2::client::SendRequest<bytes::Bytes>> {
    let tls = TlsConnector::from(credential::client(Some(credential), b"h2")).connect(hbone(), tcp).await?;
    let (client, connection) = h2::client::handshake(tls).await.map_err(std::io::Error::other)?;
    tokio::spawn(async move {
        // How it ends shows at its streams.
        let _ = connection.await;
    });
    drop(opening);
    Ok(client)
}

fn connect(authority: &str) -> Request<()> {
    Request::builder().method("CONNECT").uri(authority).body(()).unwrap_or_else(|e| panic!("{authority}: {e}"))
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
        let (response, mut into) = client.send_request(connect(authority), false).map_err(std::io::Error::other)?;
        if payload > 0 {
            into.reserve_capacity(payload);
            // More than the window is queued here, and nothing of what comes back is read.
            let _ = into.send_data(vec![b'x'; payload].into(), false);
        }
        held.push((response, into));
    }
    // Ends with the connection.
    let (response, _into) = held.pop().ok_or_else(|| std::io::Error::other("no stream"))?;
    let mut body = response.await.map_err(std::io::Error::other)?.into_body();
    while body.data().await.is_some_and(|data| data.is_ok()) {
        // Without `release_capacity` the window stays closed.
    }
    Ok(())
}

async fn reset_streams(mut client: h2::client::SendRequest<bytes::Bytes>, authority: &str) -> std::io::Result<()> {
    loop {
        client = client.ready().await.map_err(std::io::Error::other)?;
        let (_response, mut into) = client.send_request(connect(authority), false).map_err(std::io::Error::other)?;
        into.send_reset(h2::Reason::CANCEL);
        tokio::task::yield_now().await;
    }
}

/// Opens and closes connections as fast as one thread can, until the time is over.
pub fn churn(world: &World, host: &str, to: SocketAddr, lasts: Duration) -> FloodReport {
    let all = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let ends = Instant::now() + lasts;
            let clients = (0..OPENING_MAX).map(|_| async {
                let mut report = FloodReport::default();
                while Instant::now() < ends {
                    match timeout(OPEN_TIMEOUT, TcpStream::connect(to)).await {
                        Ok(Ok(tcp)) => {
                            report.opened += 1;
                            // A reset instead of a close, so that ports do not run out in TIME_WAIT.
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
    let reports = world.inside(host, all).unwrap_or_else(|e| panic!("{host}: {e}"));
    reports
        .into_iter()
        .fold(FloodReport::default(), |sum, one| FloodReport { opened: sum.opened + one.opened, refused: sum.refused + one.refused })
}

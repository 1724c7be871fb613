//! An HBONE client in a host's network namespace: any certificate, any CONNECT, any headers. It is
//! never captured. It does not check the results.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use canal_timing::deadline;
use canal_world::World;
use http::Request;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::credential::{self, PemCredential};

/// Timeout of each step. It only has to exceed what a quiet machine needs: in the gate, `deadline`
/// waits a minute or more.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum bytes of a response that are read. No test has a longer response; it only ends a peer
/// that never stops.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// A tunnel that is to be opened.
#[derive(Clone)]
pub struct TunnelRequest<'t> {
    /// Host whose network namespace is used.
    pub host: &'t str,
    /// Address of the HBONE listener.
    pub to: SocketAddr,
    /// Client certificate; `None`: no certificate.
    pub credential: Option<&'t PemCredential>,
    /// Method of the request. Only CONNECT is served.
    pub method: &'t str,
    /// Authority of the CONNECT request.
    pub authority: &'t str,
    /// Headers beside those that HBONE needs.
    pub headers: Vec<(&'t str, &'t str)>,
    /// Bytes that are sent into the tunnel.
    pub send: &'t [u8],
}

impl<'t> TunnelRequest<'t> {
    /// Creates a valid request that fetches a page through the tunnel.
    pub fn new(
        host: &'t str,
        to: SocketAddr,
        credential: Option<&'t PemCredential>,
        authority: &'t str,
    ) -> Self {
        let send = b"GET /blob?size=1 HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n";
        Self {
            host,
            to,
            credential,
            method: "CONNECT",
            authority,
            headers: Vec::new(),
            send,
        }
    }

    /// Returns the tunnel request with one more header.
    pub fn with(mut self, name: &'t str, value: &'t str) -> Self {
        self.headers.push((name, value));
        self
    }
}

/// Result of a tunnel attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TunnelAttempt {
    /// The TCP connection failed.
    Unreachable(String),
    /// TLS or HTTP/2 ended before a response.
    Refused(String),
    /// CONNECT got this status.
    Status(u16),
    /// CONNECT got 200, and the tunnel returned this text.
    Open(String),
}

impl TunnelAttempt {
    /// Returns whether an application responded.
    pub fn reached(&self) -> bool {
        matches!(self, Self::Open(answer) if answer.starts_with("HTTP/1.1 2"))
    }
}

/// Opens a tunnel and returns the result.
pub fn tunnel(world: &World, tunnel: &TunnelRequest<'_>) -> TunnelAttempt {
    let attempt = || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async { tokio::time::timeout(deadline(TIMEOUT), open(tunnel)).await })
    };
    match world
        .inside(tunnel.host, attempt)
        .unwrap_or_else(|e| panic!("{}: {e}", tunnel.host))
    {
        Ok(opened) => opened,
        Err(_) => TunnelAttempt::Refused("no answer in time".into()),
    }
}

/// Result of many tunnels, each on its own connection.
#[derive(Debug, Default)]
pub struct TunnelLoad {
    /// Number of tunnels that reached an application.
    pub reached: u64,
    /// Number of immediate second attempts, which clients with a connection pool make too.
    pub again: u64,
    /// Results of the other tunnels.
    pub failed: Vec<TunnelAttempt>,
    /// Time of the slowest tunnel that reached an application.
    pub slowest: Duration,
}

/// Opens tunnels repeatedly from this many clients at once for `seconds`. Each is a new connection
/// with a new handshake.
pub fn load(world: &World, tunnel: &TunnelRequest<'_>, clients: usize, seconds: u64) -> TunnelLoad {
    let until = Instant::now() + Duration::from_secs(seconds);
    let client = async || {
        let mut load = TunnelLoad::default();
        while Instant::now() < until {
            let started = Instant::now();
            let attempt = async || {
                let late = |_| TunnelAttempt::Refused("no answer in time".into());
                tokio::time::timeout(deadline(TIMEOUT), open(tunnel))
                    .await
                    .unwrap_or_else(late)
            };
            let mut opened = attempt().await;
            // A client with a connection pool also tries a refused tunnel once more.
            if !opened.reached() {
                load.again += 1;
                opened = attempt().await;
            }
            if opened.reached() {
                load.reached += 1;
                load.slowest = load.slowest.max(started.elapsed());
            } else {
                load.failed.push(opened);
            }
        }
        load
    };
    // All clients share one thread, which runs in the host's network namespace.
    let all = || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(futures::future::join_all((0..clients).map(|_| client())))
    };
    let loads = world
        .inside(tunnel.host, all)
        .unwrap_or_else(|e| panic!("{}: {e}", tunnel.host));
    loads
        .into_iter()
        .fold(TunnelLoad::default(), |sum, one| TunnelLoad {
            reached: sum.reached + one.reached,
            again: sum.again + one.again,
            failed: sum.failed.into_iter().chain(one.failed).collect(),
            slowest: sum.slowest.max(one.slowest),
        })
}

async fn open(tunnel: &TunnelRequest<'_>) -> TunnelAttempt {
    let tcp = match TcpStream::connect(tunnel.to).await {
        Ok(tcp) => tcp,
        Err(e) => return TunnelAttempt::Unreachable(e.to_string()),
    };
    let name = ServerName::try_from("hbone").expect("a name");
    let tls = match TlsConnector::from(credential::client(tunnel.credential, b"h2"))
        .connect(name, tcp)
        .await
    {
        Ok(tls) => tls,
        Err(e) => return TunnelAttempt::Refused(format!("TLS: {e}")),
    };
    let (client, connection) = match h2::client::handshake(tls).await {
        Ok(both) => both,
        Err(e) => return TunnelAttempt::Refused(format!("HTTP/2: {e}")),
    };
    let driver = tokio::spawn(connection);
    match send_request(tunnel, client).await {
        Ok(opened) => opened,
        // The connection knows the reason of a failed stream better: TLS 1.3 reports a refused
        // client certificate late.
        Err(e) => match tokio::time::timeout(Duration::from_millis(200), driver).await {
            Ok(Ok(Err(why))) => TunnelAttempt::Refused(format!("{e}: {why:?}")),
            _ => TunnelAttempt::Refused(e.to_string()),
        },
    }
}

async fn send_request(
    tunnel: &TunnelRequest<'_>,
    client: h2::client::SendRequest<Bytes>,
) -> Result<TunnelAttempt, h2::Error> {
    let mut request = Request::builder()
        .method(tunnel.method)
        .uri(tunnel.authority);
    for (name, value) in &tunnel.headers {
        request = request.header(*name, *value);
    }
    let request = request
        .body(())
        .unwrap_or_else(|e| panic!("{}: {e}", tunnel.authority));
    let mut client = client.ready().await?;
    let (response, mut into) = client.send_request(request, false)?;
    let response = response.await?;
    if response.status() != 200 {
        return Ok(TunnelAttempt::Status(response.status().as_u16()));
    }
    // The stream may be reset meanwhile; the output of the tunnel shows the result.
    let _ = into.send_data(Bytes::copy_from_slice(tunnel.send), false);
    let mut out = response.into_body();
    let mut answer = Vec::new();
    while let Some(Ok(chunk)) = out.data().await {
        let _ = out.flow_control().release_capacity(chunk.len());
        answer.extend_from_slice(&chunk);
        if answer.len() > ANSWER_BYTES_MAX {
            break;
        }
    }
    Ok(TunnelAttempt::Open(
        String::from_utf8_lossy(&answer).into_owned(),
    ))
}

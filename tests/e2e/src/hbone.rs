//! HBONE by hand, from a host's network namespace: any certificate, any CONNECT, any headers. Never by way of capture. Judges nothing.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use canal_world::World;
use http::Request;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::credential::{self, Credential};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// So much of an answer is read.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// A tunnel to be opened.
#[derive(Clone)]
pub struct Tunnel<'t> {
    /// From whose network namespace.
    pub host: &'t str,
    /// The HBONE listener.
    pub to: SocketAddr,
    /// What is shown; `None`: no certificate.
    pub credential: Option<&'t Credential>,
    /// The method; CONNECT is what is served.
    pub method: &'t str,
    /// What CONNECT names.
    pub authority: &'t str,
    /// Further headers.
    pub headers: Vec<(&'t str, &'t str)>,
    /// What is sent into the tunnel.
    pub send: &'t [u8],
}

impl<'t> Tunnel<'t> {
    /// A well-formed one that asks for a page in the tunnel.
    pub fn new(host: &'t str, to: SocketAddr, credential: Option<&'t Credential>, authority: &'t str) -> Self {
        let send = b"GET /blob?size=1 HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n";
        Self { host, to, credential, method: "CONNECT", authority, headers: Vec::new(), send }
    }

    /// With a header.
    pub fn with(mut self, name: &'t str, value: &'t str) -> Self {
        self.headers.push((name, value));
        self
    }
}

/// What came of a tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opened {
    /// TCP did not get there.
    Unreachable(String),
    /// TLS or HTTP/2 ended before an answer.
    Refused(String),
    /// CONNECT was answered so.
    Status(u16),
    /// CONNECT was answered with 200, and this came out of the tunnel.
    Open(String),
}

impl Opened {
    /// Whether an application answered.
    pub fn reached(&self) -> bool {
        matches!(self, Self::Open(answer) if answer.starts_with("HTTP/1.1 2"))
    }
}

/// Opens a tunnel and says what came of it.
pub fn tunnel(world: &World, tunnel: &Tunnel<'_>) -> Opened {
    let attempt = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async { tokio::time::timeout(PATIENCE, open(tunnel)).await })
    };
    match world.inside(tunnel.host, attempt).unwrap_or_else(|e| panic!("{}: {e}", tunnel.host)) {
        Ok(opened) => opened,
        Err(_) => Opened::Refused("no answer in time".into()),
    }
}

/// What came of many tunnels, each on a connection of its own.
#[derive(Debug, Default)]
pub struct Load {
    /// So many reached an application.
    pub reached: u64,
    /// So many only when they were tried once more, at once, as everybody does who keeps connections in a pool.
    pub again: u64,
    /// What came of the others.
    pub failed: Vec<Opened>,
    /// The slowest that reached one.
    pub slowest: Duration,
}

/// Opens tunnels from so many clients at once, again and again, for so long. Each is a new connection with a new handshake.
pub fn load(world: &World, tunnel: &Tunnel<'_>, clients: usize, seconds: u64) -> Load {
    let until = Instant::now() + Duration::from_secs(seconds);
    let client = async || {
        let mut load = Load::default();
        while Instant::now() < until {
            let started = Instant::now();
            let attempt = async || {
                let late = |_| Opened::Refused("no answer in time".into());
                tokio::time::timeout(PATIENCE, open(tunnel)).await.unwrap_or_else(late)
            };
            let mut opened = attempt().await;
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
    let all = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(futures::future::join_all((0..clients).map(|_| client())))
    };
    let loads = world.inside(tunnel.host, all).unwrap_or_else(|e| panic!("{}: {e}", tunnel.host));
    loads.into_iter().fold(Load::default(), |sum, one| Load {
        reached: sum.reached + one.reached,
        again: sum.again + one.again,
        failed: sum.failed.into_iter().chain(one.failed).collect(),
        slowest: sum.slowest.max(one.slowest),
    })
}

async fn open(tunnel: &Tunnel<'_>) -> Opened {
    let tcp = match TcpStream::connect(tunnel.to).await {
        Ok(tcp) => tcp,
        Err(e) => return Opened::Unreachable(e.to_string()),
    };
    let name = ServerName::try_from("hbone").expect("a name");
    let tls = match TlsConnector::from(credential::client(tunnel.credential, b"h2")).connect(name, tcp).await {
        Ok(tls) => tls,
        Err(e) => return Opened::Refused(format!("TLS: {e}")),
    };
    let (client, connection) = match h2::client::handshake(tls).await {
        Ok(both) => both,
        Err(e) => return Opened::Refused(format!("HTTP/2: {e}")),
    };
    let driver = tokio::spawn(connection);
    match ask(tunnel, client).await {
        Ok(opened) => opened,
        // The connection knows better why a stream failed: TLS tells a client of its certificate late.
        Err(e) => match tokio::time::timeout(Duration::from_millis(200), driver).await {
            Ok(Ok(Err(why))) => Opened::Refused(format!("{e}: {why:?}")),
            _ => Opened::Refused(e.to_string()),
        },
    }
}

async fn ask(tunnel: &Tunnel<'_>, client: h2::client::SendRequest<Bytes>) -> Result<Opened, h2::Error> {
    let mut request = Request::builder().method(tunnel.method).uri(tunnel.authority);
    for (name, value) in &tunnel.headers {
        request = request.header(*name, *value);
    }
    let request = request.body(()).unwrap_or_else(|e| panic!("{}: {e}", tunnel.authority));
    let mut client = client.ready().await?;
    let (response, mut into) = client.send_request(request, false)?;
    let response = response.await?;
    if response.status() != 200 {
        return Ok(Opened::Status(response.status().as_u16()));
    }
    // The stream may be reset meanwhile; what came out of it tells.
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
    Ok(Opened::Open(String::from_utf8_lossy(&answer).into_owned()))
}

//! A data plane's pages for operators: its admin socket, and its metrics port, which is asked inside its host's namespace.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;

use crate::admin::chain;
use crate::exit::{Exit, Failure, Outcome};
use crate::realm::Realm;

/// Where a page is served.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Page {
    /// `/config_dump`, `/tap`, `/logging`: the unix socket in the process's data directory.
    Admin,
    /// `/metrics`: TCP.
    Metrics,
}

const METRICS_PORT: u16 = 15020;
/// Largest answer taken whole.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// The head of an answer must come in this time.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// GETs `path` and gives the answer's body as it comes.
pub(crate) async fn stream(realm: &Realm, host: &str, page: Page, path: &str) -> Outcome<Response<Incoming>> {
    ask(realm, host, page, Method::GET, path).await
}

/// What messages call a page.
fn place(realm: &Realm, host: &str, page: Page, path: &str) -> Outcome<String> {
    Ok(match page {
        Page::Admin => format!("{host} {} {path}", realm.admin_socket(host)?.display()),
        Page::Metrics => format!("{host} port {METRICS_PORT} {path}"),
    })
}

/// A connection to a page's server.
async fn dial(realm: &Realm, host: &str, page: Page) -> std::io::Result<Box<dyn Duplex>> {
    match page {
        Page::Admin => {
            let socket: PathBuf = realm.admin_socket(host).map_err(|failure| std::io::Error::other(failure.to_string()))?;
            Ok(Box::new(tokio::net::UnixStream::connect(socket).await?))
        }
        Page::Metrics => Ok(Box::new(realm.dial(host, SocketAddr::from((Ipv4Addr::LOCALHOST, METRICS_PORT))).await?)),
    }
}

/// A byte stream of either kind.
trait Duplex: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin {}
impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin> Duplex for T {}

async fn ask(realm: &Realm, host: &str, page: Page, method: Method, path: &str) -> Outcome<Response<Incoming>> {
    let place = place(realm, host, page, path)?;
    let unreachable = |what: String| {
        Failure::new(Exit::Unreachable, place.clone(), what, format!("does it run? `canal world list` and `canal logs {host}` tell"))
    };
    let work = async {
        let stream = dial(realm, host, page).await.map_err(|problem| problem.to_string())?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|problem| chain(&problem))?;
        // It ends with the answer; what goes wrong in it is told to whoever reads the answer.
        tokio::spawn(connection);
        let request = Request::builder().method(method).uri(path).header(header::HOST, "localhost").body(Empty::<Bytes>::new());
        let request = request.map_err(|problem| problem.to_string())?;
        sender.send_request(request).await.map_err(|problem| chain(&problem))
    };
    let response = match tokio::time::timeout(HEAD_TIMEOUT, work).await {
        Ok(response) => response.map_err(unreachable)?,
        Err(_) => return Err(unreachable(format!("no answer in {} s", HEAD_TIMEOUT.as_secs()))),
    };
    match response.status() {
        StatusCode::OK => Ok(response),
        status => Err(Failure::failed(place, format!("answered {status}"), "")),
    }
}

/// GETs `path` whole.
pub(crate) async fn get(realm: &Realm, host: &str, page: Page, path: &str) -> Outcome<Bytes> {
    whole(realm, host, page, Method::GET, path).await
}

/// POSTs to `path` without a body.
pub(crate) async fn post(realm: &Realm, host: &str, page: Page, path: &str) -> Outcome<Bytes> {
    whole(realm, host, page, Method::POST, path).await
}

async fn whole(realm: &Realm, host: &str, page: Page, method: Method, path: &str) -> Outcome<Bytes> {
    let response = ask(realm, host, page, method, path).await?;
    match Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(problem) => Err(Failure::new(Exit::Unreachable, place(realm, host, page, path)?, problem.to_string(), "")),
    }
}

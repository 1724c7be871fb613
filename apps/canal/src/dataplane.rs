//! A data plane's admin and metrics ports, which listen on loopback of its own host: requests are made inside that host's namespace.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;

use crate::admin::chain;
use crate::exit::{Exit, Failure, Outcome};
use crate::realm::Realm;

/// `/config_dump`, `/tap`, `/logging`.
pub(crate) const ADMIN_PORT: u16 = 15000;
/// `/metrics`.
pub(crate) const METRICS_PORT: u16 = 15020;
/// Largest answer taken whole.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// The head of an answer must come in this time.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// GETs `path` and gives the answer's body as it comes.
pub(crate) async fn stream(realm: &Realm, host: &str, port: u16, path: &str) -> Outcome<Response<Incoming>> {
    ask(realm, host, port, Method::GET, path).await
}

async fn ask(realm: &Realm, host: &str, port: u16, method: Method, path: &str) -> Outcome<Response<Incoming>> {
    let place = format!("{host} port {port} {path}");
    let unreachable = |what: String| {
        Failure::new(Exit::Unreachable, place.clone(), what, format!("does it run? `canal world list` and `canal logs {host}` tell"))
    };
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let work = async {
        let stream = realm.dial(host, address).await.map_err(|problem| problem.to_string())?;
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
pub(crate) async fn get(realm: &Realm, host: &str, port: u16, path: &str) -> Outcome<Bytes> {
    whole(realm, host, port, Method::GET, path).await
}

/// POSTs to `path` without a body.
pub(crate) async fn post(realm: &Realm, host: &str, port: u16, path: &str) -> Outcome<Bytes> {
    whole(realm, host, port, Method::POST, path).await
}

async fn whole(realm: &Realm, host: &str, port: u16, method: Method, path: &str) -> Outcome<Bytes> {
    let response = ask(realm, host, port, method, path).await?;
    match Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(problem) => Err(Failure::new(Exit::Unreachable, format!("{host} port {port} {path}"), problem.to_string(), "")),
    }
}

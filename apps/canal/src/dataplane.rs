//! A data plane's endpoints for operators: its admin socket, and its metrics port, which is reached
//! inside its host's namespace.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Collected, Empty, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;

use crate::admin::chain;
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::running_world::RunningWorld;

/// Endpoint that serves a page.
#[derive(Debug, Clone, Copy)]
pub(crate) enum AdminPage {
    /// `/config_dump`, `/tap` and `/logging` on the unix socket in the process's data directory.
    Admin,
    /// `/metrics` on a TCP port.
    Metrics,
}

/// The default port of `--metrics-addr`, which Istio uses too.
const METRICS_PORT: u16 = 15020;
/// Maximum size of an answer that is read completely.
/// It only bounds the memory that a broken answer can take. Through the controller, a dump has at
/// most 32 MiB.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// Maximum size of the text of an answer other than 200; such texts are a line.
const REFUSAL_BYTES_MAX: usize = 4 << 10;
/// Timeout for the head of an answer.
/// Nobody measured this value; it ends a wait for a data plane that hangs.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends GET for `path`, and returns the response, whose body can be streamed.
pub(crate) async fn stream(
    running: &RunningWorld,
    host: &str,
    page: AdminPage,
    path: &str,
) -> VerbResult<Response<Incoming>> {
    send(running, host, page, Method::GET, path).await
}

/// Returns the name of a page for messages.
fn page_name(
    running: &RunningWorld,
    host: &str,
    page: AdminPage,
    path: &str,
) -> VerbResult<String> {
    Ok(match page {
        AdminPage::Admin => format!("{host} {} {path}", running.admin_socket(host)?.display()),
        AdminPage::Metrics => format!("{host} port {METRICS_PORT} {path}"),
    })
}

/// Connects to a page's server.
async fn dial(
    running: &RunningWorld,
    host: &str,
    page: AdminPage,
) -> std::io::Result<Box<dyn AdminByteStream>> {
    match page {
        AdminPage::Admin => {
            let socket: PathBuf = running
                .admin_socket(host)
                .map_err(|failure| std::io::Error::other(failure.to_string()))?;
            Ok(Box::new(tokio::net::UnixStream::connect(socket).await?))
        }
        AdminPage::Metrics => Ok(Box::new(
            running
                .dial(host, SocketAddr::from((Ipv4Addr::LOCALHOST, METRICS_PORT)))
                .await?,
        )),
    }
}

/// A byte stream over TCP or a unix socket.
trait AdminByteStream: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin {}
impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin> AdminByteStream for T {}

async fn send(
    running: &RunningWorld,
    host: &str,
    page: AdminPage,
    method: Method,
    path: &str,
) -> VerbResult<Response<Incoming>> {
    let location = page_name(running, host, page, path)?;
    let unreachable = |what: String| {
        VerbError::new(
            ExitStatus::Unreachable,
            location.clone(),
            what,
            format!("check that it runs (`canal world list`, `canal logs {host}`)"),
        )
    };
    let work = async {
        let stream = dial(running, host, page)
            .await
            .map_err(|problem| problem.to_string())?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|problem| chain(&problem))?;
        // The task ends with the answer. Its errors reach the reader of the answer.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            // The admin server accepts only names of its own host (DNS rebinding).
            .header(header::HOST, "localhost")
            .body(Empty::<Bytes>::new());
        let request = request.map_err(|problem| problem.to_string())?;
        sender
            .send_request(request)
            .await
            .map_err(|problem| chain(&problem))
    };
    let response = match tokio::time::timeout(HEAD_TIMEOUT, work).await {
        Ok(response) => response.map_err(unreachable)?,
        Err(_) => {
            return Err(unreachable(format!(
                "no answer within {} s",
                HEAD_TIMEOUT.as_secs()
            )));
        }
    };
    match response.status() {
        StatusCode::OK => Ok(response),
        status => {
            // A body that cannot be read leaves the status alone in the message.
            let body = Limited::new(response.into_body(), REFUSAL_BYTES_MAX);
            let read = tokio::time::timeout(HEAD_TIMEOUT, body.collect()).await;
            let body = read.ok().and_then(Result::ok).map(Collected::to_bytes);
            Err(refusal(location, status, &body.unwrap_or_default()))
        }
    }
}

/// Returns the error for an answer other than 200. The data plane's own text says what is wrong, and
/// has the fix.
fn refusal(location: String, status: StatusCode, body: &[u8]) -> VerbError {
    let text = String::from_utf8_lossy(body);
    let (problem, own_fix) = match text.trim().split_once("; fix: ") {
        Some((problem, fix)) => (problem, Some(fix)),
        None => (text.trim(), None),
    };
    let what = if problem.is_empty() {
        format!("answered {status}")
    } else {
        format!("answered {status}: {problem}")
    };
    let fix = match status {
        // A data plane of this version serves every page that a verb requests.
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
            "use a `canal` of the data plane's version"
        }
        _ => own_fix.unwrap_or("read the host's log with `canal logs`"),
    };
    VerbError::failed(location, what, fix)
}

/// Sends GET for `path`, and returns the complete answer.
pub(crate) async fn get(
    running: &RunningWorld,
    host: &str,
    page: AdminPage,
    path: &str,
) -> VerbResult<Bytes> {
    send_and_collect(running, host, page, Method::GET, path).await
}

/// Sends POST to `path` without a body, and returns the complete answer.
pub(crate) async fn post(
    running: &RunningWorld,
    host: &str,
    page: AdminPage,
    path: &str,
) -> VerbResult<Bytes> {
    send_and_collect(running, host, page, Method::POST, path).await
}

async fn send_and_collect(
    running: &RunningWorld,
    host: &str,
    page: AdminPage,
    method: Method,
    path: &str,
) -> VerbResult<Bytes> {
    let response = send(running, host, page, method, path).await?;
    match Limited::new(response.into_body(), ANSWER_BYTES_MAX)
        .collect()
        .await
    {
        Ok(body) => Ok(body.to_bytes()),
        Err(problem) => Err(VerbError::new(
            ExitStatus::Unreachable,
            page_name(running, host, page, path)?,
            problem.to_string(),
            "try again, and read the host's log with `canal logs` if it happens again",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_the_data_planes_text_and_its_fix() {
        let shown =
            |status, body: &str| refusal("gw-1 /tap".into(), status, body.as_bytes()).to_string();
        let busy = "too many clients read the tap; fix: close one of them\n";
        let full = shown(StatusCode::SERVICE_UNAVAILABLE, busy);
        assert!(
            full.contains("503 Service Unavailable: too many clients read the tap"),
            "{full}"
        );
        assert!(
            full.contains("close one of them") && !full.contains("version"),
            "{full}"
        );
        for status in [StatusCode::NOT_FOUND, StatusCode::METHOD_NOT_ALLOWED] {
            assert!(shown(status, "").contains("use a `canal` of the data plane's version"));
        }
        let bare = shown(StatusCode::INTERNAL_SERVER_ERROR, "");
        assert!(
            bare.contains("answered 500") && bare.contains("canal logs"),
            "{bare}"
        );
    }
}

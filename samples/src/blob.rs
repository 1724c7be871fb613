//! A web server for tests. It serves byte-exact bodies of any size, digests uploads while they
//! stream, and mirrors requests. Start at [`answer()`].
//!
//! - `GET /blob?size=N[&seed=S][&chunked][&trailers]` returns a body.
//! - `PUT|POST /blob[?seed=S]` digests an upload.
//! - `POST /echo` streams the body back with its trailers.
//! - `/headers` shows the request. Others are `/status/CODE`, `/delay?ms=N` and `/health`.

use std::net::SocketAddr;
use std::time::Duration;

use http::header::{HeaderValue, TRAILER, TRANSFER_ENCODING};
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Map, Value, json};

use crate::answer::{self, SampleResponse, query};
use crate::pod::PodName;
use canal_byte_pattern::{Checker, PatternBody};

/// Maximum size of a body, in bytes: 16 GiB. It only refuses a mistyped size; the bytes are
/// produced while they are sent.
const SIZE_MAX: u64 = 16 << 30;
/// Maximum delay of an answer. As long as a gateway waits for an endpoint by default, so that this
/// timeout can be tested.
const DELAY_MAX: Duration = Duration::from_secs(300);

/// Answers one request and adds the pod's headers.
pub async fn answer(pod: PodName, request: Request<Incoming>, peer: SocketAddr) -> SampleResponse {
    let mut answer = route(&pod, request, peer)
        .await
        .unwrap_or_else(|problem| answer::refuse(StatusCode::BAD_REQUEST, &problem));
    pod.sign(answer.headers_mut());
    answer
}

async fn route(
    pod: &PodName,
    request: Request<Incoming>,
    peer: SocketAddr,
) -> Result<SampleResponse, String> {
    let path = request.uri().path();
    let upload = matches!(*request.method(), Method::PUT | Method::POST);
    match path {
        "/health" => Ok(answer::json(StatusCode::OK, &json!({ "status": "ok" }))),
        "/blob" if upload => digest(request).await,
        "/blob" => blob(&request),
        "/echo" => Ok(Response::new(answer::boxed(request.into_body()))),
        "/headers" => Ok(answer::json(StatusCode::OK, &mirror(pod, &request, peer))),
        "/delay" => delay(&request).await,
        _ => match path.strip_prefix("/status/") {
            Some(code) => status(code),
            None => Ok(answer::refuse(
                StatusCode::NOT_FOUND,
                &format!("no {path} here"),
            )),
        },
    }
}

/// Returns a number from the query, or `default` if it is absent.
fn number<B>(request: &Request<B>, name: &str, default: Option<u64>) -> Result<u64, String> {
    match (query(request.uri(), name), default) {
        (Some(text), _) => text.parse().map_err(|_| {
            format!("?{name}={text}: it is not a whole number; fix: give a whole number")
        }),
        (None, Some(default)) => Ok(default),
        (None, None) => Err(format!("?{name}= is missing; fix: give a whole number")),
    }
}

fn blob<B>(request: &Request<B>) -> Result<SampleResponse, String> {
    let size = number(request, "size", None)?;
    if size > SIZE_MAX {
        return Err(format!("?size={size} is more than {SIZE_MAX}"));
    }
    let seed = number(request, "seed", Some(0))?;
    let has = |name| query(request.uri(), name).is_some();
    let body = match (has("trailers"), has("chunked")) {
        (true, _) => PatternBody::with_trailers(seed, size),
        (false, true) => PatternBody::chunked(seed, size),
        (false, false) => PatternBody::sized(seed, size),
    };
    let mut answer = Response::new(answer::boxed(body));
    answer.headers_mut().insert(
        http::header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    if has("trailers") {
        answer
            .headers_mut()
            .insert(TRAILER, HeaderValue::from_static("x-length, x-sha256"));
    }
    Ok(answer)
}

async fn digest(request: Request<Incoming>) -> Result<SampleResponse, String> {
    let mut checker = Checker::new(number(&request, "seed", Some(0))?);
    let chunked = request.headers().contains_key(TRANSFER_ENCODING);
    let mut trailers = Map::new();
    let mut body = request.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|problem| {
            format!(
                "the body broke off after {} bytes: {problem}",
                checker.length
            )
        })?;
        match frame.into_data() {
            Ok(piece) => checker.take(&piece),
            Err(frame) => {
                for (name, value) in frame.trailers_ref().into_iter().flatten() {
                    trailers.insert(name.to_string(), Value::from(value.to_str().unwrap_or("?")));
                }
            }
        }
    }
    let (length, differs_at) = (checker.length, checker.differs_at);
    let report = json!({
        "length": length, "sha256": checker.sha256(), "chunked": chunked,
        "as_pattern": differs_at.is_none(), "differs_at": differs_at, "trailers": trailers,
    });
    Ok(answer::json(StatusCode::OK, &report))
}

fn mirror<B>(pod: &PodName, request: &Request<B>, peer: SocketAddr) -> Value {
    let headers: Vec<Value> = request
        .headers()
        .iter()
        .map(|(name, value)| json!([name.as_str(), String::from_utf8_lossy(value.as_bytes())]))
        .collect();
    json!({
        "service": pod.service, "version": pod.version, "pod": pod.name, "method": request.method().as_str(),
        "uri": request.uri().to_string(), "http": format!("{:?}", request.version()),
        "peer": SocketAddr::new(peer.ip().to_canonical(), peer.port()).to_string(), "headers": headers,
    })
}

async fn delay<B>(request: &Request<B>) -> Result<SampleResponse, String> {
    let pause = Duration::from_millis(number(request, "ms", None)?);
    if pause > DELAY_MAX {
        return Err(format!("?ms= is more than {}", DELAY_MAX.as_millis()));
    }
    tokio::time::sleep(pause).await;
    Ok(answer::json(
        StatusCode::OK,
        &json!({ "slept_ms": pause.as_millis() as u64 }),
    ))
}

fn status(code: &str) -> Result<SampleResponse, String> {
    let code = code
        .parse()
        .ok()
        .filter(|c: &u16| *c >= 200)
        .and_then(|c| StatusCode::from_u16(c).ok());
    let code =
        code.ok_or("/status/CODE: the code is not valid; fix: give a number from 200 to 599")?;
    // 204 and 304 have no body (RFC 9110 §6.4.1).
    match code {
        StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED => {
            let mut answer = Response::new(answer::boxed(http_body_util::Empty::new()));
            *answer.status_mut() = code;
            Ok(answer)
        }
        _ => Ok(answer::json(code, &json!({ "status": code.as_u16() }))),
    }
}

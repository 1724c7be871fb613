//! A WebSocket echo server (RFC 6455) at any path, and `/health`. It returns text and binary
//! messages unchanged. Start at [`answer()`].

use futures::{SinkExt, StreamExt};
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use crate::answer::{self, SampleResponse};
use crate::pod::PodName;

/// Maximum size of a message that is echoed, in bytes. The default of the library, so that this
/// server refuses nothing that others accept.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Returns the limits of client and server.
pub fn limits() -> WebSocketConfig {
    WebSocketConfig::default()
        .max_message_size(Some(MESSAGE_BYTES_MAX))
        .max_frame_size(Some(MESSAGE_BYTES_MAX))
}

/// Answers one request: an upgrade, or `/health`.
pub async fn answer(pod: PodName, mut request: Request<Incoming>) -> SampleResponse {
    let mut answer = match decide_accept(&request) {
        Ok(None) => answer::json(
            StatusCode::OK,
            &serde_json::json!({ "status": "ok", "pod": pod.name }),
        ),
        Err(problem) => answer::refuse(StatusCode::BAD_REQUEST, problem),
        Ok(Some(accept)) => {
            tokio::spawn(echo(hyper::upgrade::on(&mut request)));
            switching(accept)
        }
    };
    pod.sign(answer.headers_mut());
    answer
}

/// Returns the value for Sec-WebSocket-Accept (RFC 6455 §4.2.1), or `None` for `/health`.
fn decide_accept<B>(request: &Request<B>) -> Result<Option<HeaderValue>, &'static str> {
    if request.uri().path() == "/health" {
        return Ok(None);
    }
    let names = |name, token: &str| {
        let all = request
            .headers()
            .get_all(name)
            .into_iter()
            .filter_map(|v: &HeaderValue| v.to_str().ok());
        all.flat_map(|v| v.split(','))
            .any(|v| v.trim().eq_ignore_ascii_case(token))
    };
    if !names(header::UPGRADE, "websocket") || !names(header::CONNECTION, "upgrade") {
        return Err(
            "this is a WebSocket server; fix: send Connection: upgrade and Upgrade: websocket",
        );
    }
    if !names(header::SEC_WEBSOCKET_VERSION, "13") {
        return Err("send Sec-WebSocket-Version: 13");
    }
    let key = request
        .headers()
        .get(header::SEC_WEBSOCKET_KEY)
        .ok_or("Sec-WebSocket-Key is missing")?;
    // Base64 text is always a valid header value.
    Ok(HeaderValue::from_str(&derive_accept_key(key.as_bytes())).ok())
}

fn switching(accept: HeaderValue) -> SampleResponse {
    let mut answer = Response::new(answer::boxed(Empty::new()));
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = answer.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
    answer
}

async fn echo(upgrade: OnUpgrade) {
    let Ok(upgraded) = upgrade.await else { return };
    let mut socket =
        WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, Some(limits()))
            .await;
    while let Some(Ok(message)) = socket.next().await {
        // The library answers pings and closes while it reads.
        if (message.is_text() || message.is_binary()) && socket.send(message).await.is_err() {
            return;
        }
    }
}

//! The operators' HTTP on localhost: config dump, metrics, readiness, log level, quit, version, and whatever the caller adds.
//! It serves operators, not traffic; hyper does the protocol.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_stream::wrappers::ReceiverStream;

use crate::diagnostics::Level;
use crate::drain::{Drain, Trigger};
use crate::metrics::Registry;

/// Connections served at once; more wait in the listener's queue.
pub const CONNECTIONS_MAX: usize = 64;
/// A client that has not sent its request's head by then is dropped.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// A response's body: whole or streamed.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;
type Answer = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;
type Handler = Arc<dyn Fn(Request<()>) -> Answer + Send + Sync>;

/// Paths and what answers them. `/` lists them.
#[derive(Clone, Default)]
pub struct Routes {
    list: Vec<(Method, &'static str, Handler)>,
}

impl Routes {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a path. The request's body is not read.
    pub fn route<F, A>(mut self, method: Method, path: &'static str, answer: F) -> Self
    where
        F: Fn(Request<()>) -> A + Send + Sync + 'static,
        A: Future<Output = Response<Body>> + Send + 'static,
    {
        self.list.push((method, path, Arc::new(move |r| Box::pin(answer(r)))));
        self
    }

    /// `GET /config_dump`: JSON.
    pub fn config_dump(self, dump: impl Fn() -> serde_json::Value + Send + Sync + 'static) -> Self {
        self.route(Method::GET, "/config_dump", move |_| ready(json(StatusCode::OK, &dump())))
    }

    /// `GET /metrics` and `/stats/prometheus`.
    pub fn metrics(self, registry: Registry) -> Self {
        let again = registry.clone();
        self.route(Method::GET, "/metrics", move |_| ready(exposition(&registry)))
            .route(Method::GET, "/stats/prometheus", move |_| ready(exposition(&again)))
    }

    /// `GET /healthz/ready`: 200 or 503 with the reason.
    pub fn ready(self, check: impl Fn() -> Result<(), String> + Send + Sync + 'static) -> Self {
        self.route(Method::GET, "/healthz/ready", move |_| {
            ready(match check() {
                Ok(()) => text(StatusCode::OK, "ready\n"),
                Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
            })
        })
    }

    /// `GET /logging` shows, `POST /logging?level=…` sets.
    pub fn logging(self, level: Level) -> Self {
        let show = level.clone();
        self.route(Method::GET, "/logging", move |_| ready(text(StatusCode::OK, format!("{}\n", show.get())))).route(
            Method::POST,
            "/logging",
            move |r| {
                ready(match query(&r, "level").map(|l| level.set(&l)) {
                    Some(Ok(())) => text(StatusCode::OK, format!("{}\n", level.get())),
                    Some(Err(e)) => text(StatusCode::BAD_REQUEST, format!("{e}\n")),
                    None => text(StatusCode::BAD_REQUEST, "add ?level=, e.g. ?level=debug\n"),
                })
            },
        )
    }

    /// `POST /quitquitquit` starts the drain with `limit`.
    pub fn quit(self, trigger: Arc<Trigger>, limit: Duration) -> Self {
        self.route(Method::POST, "/quitquitquit", move |_| {
            trigger.drain(limit);
            ready(text(StatusCode::OK, "draining\n"))
        })
    }

    /// `GET /version`.
    pub fn version(self, version: &'static str) -> Self {
        self.route(Method::GET, "/version", move |_| ready(text(StatusCode::OK, format!("{version}\n"))))
    }

    fn answer(&self, request: Request<()>) -> Answer {
        let path = request.uri().path().to_string();
        let here: Vec<_> = self.list.iter().filter(|(_, p, _)| *p == path).collect();
        if let Some((_, _, handler)) = here.iter().find(|(m, _, _)| m == request.method()) {
            return handler(request);
        }
        let answer = if here.is_empty() {
            let status = if path == "/" { StatusCode::OK } else { StatusCode::NOT_FOUND };
            text(status, self.list.iter().map(|(m, p, _)| format!("{m} {p}\n")).collect::<String>())
        } else {
            let methods: Vec<_> = here.iter().map(|(m, _, _)| m.as_str()).collect();
            let mut r = text(StatusCode::METHOD_NOT_ALLOWED, format!("use {}\n", methods.join(", ")));
            if let Ok(allow) = HeaderValue::from_str(&methods.join(", ")) {
                r.headers_mut().insert(ALLOW, allow);
            }
            r
        };
        Box::pin(ready(answer))
    }
}

/// The query parameter `name` of a request, percent-decoded.
pub fn query(request: &Request<()>, name: &str) -> Option<String> {
    let pairs = request.uri().query()?.split('&').map(|p| p.split_once('=').unwrap_or((p, "")));
    pairs.into_iter().find(|(k, _)| *k == name).map(|(_, v)| decode(v))
}

/// RFC 3986 §2.1, and `+` for a space as forms write it. What is not an escape stays as it is.
fn decode(s: &str) -> String {
    let mut out = Vec::with_capacity(s.len());
    let mut rest = s.as_bytes();
    while let [c, tail @ ..] = rest {
        let escape = match (c, tail) {
            (b'%', [h, l, ..]) => (*h as char).to_digit(16).zip((*l as char).to_digit(16)),
            _ => None,
        };
        rest = match escape {
            Some((h, l)) => {
                // Two hexadecimal digits fit a byte.
                out.push((h * 16 + l) as u8);
                &tail[2..]
            }
            None => {
                out.push(if *c == b'+' { b' ' } else { *c });
                tail
            }
        };
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn whole(status: StatusCode, content_type: &'static str, body: Bytes) -> Response<Body> {
    let mut r = Response::new(Full::new(body).boxed_unsync());
    *r.status_mut() = status;
    r.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    r
}

/// A plain text answer.
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    whole(status, "text/plain; charset=utf-8", body.into())
}

/// A JSON answer.
pub fn json(status: StatusCode, value: &serde_json::Value) -> Response<Body> {
    whole(status, "application/json", format!("{value:#}\n").into())
}

fn exposition(registry: &Registry) -> Response<Body> {
    whole(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", registry.render().into())
}

/// An answer that goes on for as long as the sender of `lines` lives (`/tap`). The receiver is dropped when the client leaves.
pub fn stream(content_type: &'static str, lines: tokio::sync::mpsc::Receiver<Bytes>) -> Response<Body> {
    let frames = ReceiverStream::new(lines).map(|b| Ok(Frame::data(b)));
    let mut r = Response::new(StreamBody::new(frames).boxed_unsync());
    r.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    r
}

/// Serves `routes` until the drain is forced; operators look on while it drains. The end of the process does not wait for it.
pub async fn serve(listener: TcpListener, routes: Routes, drain: Drain) {
    let (routes, room) = (Arc::new(routes), Arc::new(Semaphore::new(CONNECTIONS_MAX)));
    let forced = drain.watcher();
    drop(drain);
    loop {
        let Ok(permit) = room.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            a = listener.accept() => a,
            () = forced.forced() => return,
        };
        match accepted {
            Ok((tcp, _)) => {
                let (routes, forced) = (routes.clone(), forced.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        () = connection(tcp, routes) => {}
                        () = forced.forced() => {}
                    }
                    drop(permit);
                });
            }
            // Out of files: the next accept would fail at once as well.
            Err(error) => {
                tracing::warn!(%error, "admin accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(tcp: TcpStream, routes: Arc<Routes>) {
    let service = service_fn(move |r: Request<hyper::body::Incoming>| {
        let answer = routes.answer(r.map(drop));
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let served =
        http1::Builder::new().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).serve_connection(TokioIo::new(tcp), service);
    if let Err(error) = served.await {
        tracing::debug!(%error, "admin connection");
    }
}

#[cfg(test)]
mod tests;

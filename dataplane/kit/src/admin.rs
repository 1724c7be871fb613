//! The operators' HTTP on localhost: config dump, metrics, readiness, log level, quit, version, and whatever the caller adds.
//! It serves operators, not traffic; hyper does the protocol.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use tokio::net::TcpListener;

use crate::diagnostics::Level;
use crate::drain::{Drain, Trigger};
use crate::metrics::Registry;

/// A response's body: whole or streamed.
pub type Body = UnsyncBoxBody<Bytes, std::convert::Infallible>;
type Answer = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// Paths and what answers them. `/` lists them.
#[derive(Clone, Default)]
pub struct Routes {
    list: Vec<(Method, &'static str, Arc<dyn Fn(Request<()>) -> Answer + Send + Sync>)>,
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
        let _ = dump;
        unreachable!("body lands in the next commit")
    }
    /// `GET /metrics` and `/stats/prometheus`.
    pub fn metrics(self, registry: Registry) -> Self {
        let _ = registry;
        unreachable!("body lands in the next commit")
    }
    /// `GET /healthz/ready`: 200 or 503 with the reason.
    pub fn ready(self, ready: impl Fn() -> Result<(), String> + Send + Sync + 'static) -> Self {
        let _ = ready;
        unreachable!("body lands in the next commit")
    }
    /// `GET /logging` shows, `POST /logging?level=…` sets.
    pub fn logging(self, level: Level) -> Self {
        let _ = level;
        unreachable!("body lands in the next commit")
    }
    /// `POST /quitquitquit` starts the drain with `limit`.
    pub fn quit(self, trigger: Arc<Trigger>, limit: std::time::Duration) -> Self {
        let _ = (trigger, limit);
        unreachable!("body lands in the next commit")
    }
    /// `GET /version`.
    pub fn version(self, version: &'static str) -> Self {
        let _ = version;
        unreachable!("body lands in the next commit")
    }
}

/// The query parameter `name` of a request, percent-decoded.
pub fn query(request: &Request<()>, name: &str) -> Option<String> {
    let _ = (request, name);
    unreachable!("body lands in the next commit")
}
/// A plain text answer.
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    let _ = (status, body.into());
    unreachable!("body lands in the next commit")
}
/// A JSON answer.
pub fn json(status: StatusCode, value: &serde_json::Value) -> Response<Body> {
    let _ = (status, value);
    unreachable!("body lands in the next commit")
}
/// An answer that goes on for as long as the sender of `lines` lives (`/tap`). The receiver is dropped when the client leaves.
pub fn stream(content_type: &'static str, lines: tokio::sync::mpsc::Receiver<Bytes>) -> Response<Body> {
    let _ = (content_type, lines);
    unreachable!("body lands in the next commit")
}

/// Serves `routes` until the drain is forced; admin must answer while draining.
pub async fn serve(listener: TcpListener, routes: Routes, drain: Drain) {
    let _ = (listener, routes, drain);
    unreachable!("body lands in the next commit")
}

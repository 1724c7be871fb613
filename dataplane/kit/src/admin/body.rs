//! Bodies of admin responses: whole ones, streams of lines, and scrapes. How they are sent is `serve`'s business.

use std::io;

use bytes::Bytes;
use futures::StreamExt;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use tokio_stream::wrappers::ReceiverStream;

use crate::metrics::Registry;

/// A response's body: whole or streamed.
pub type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Marks a response that goes on after its head: its connection does not give way to a new one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streamed;

fn whole(status: StatusCode, content_type: &'static str, body: Bytes) -> Response<Body> {
    let mut r = Response::new(Full::new(body).map_err(|never| match never {}).boxed_unsync());
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

fn streamed(content_type: &'static str, body: Body) -> Response<Body> {
    let mut r = Response::new(body);
    r.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    r.extensions_mut().insert(Streamed);
    r
}

/// The metrics in pieces, each made when the client has read the ones before; 503 while [`crate::metrics::SCRAPES_MAX`] others are under way.
pub(super) fn exposition(registry: &Registry) -> Response<Body> {
    let Some(scrape) = registry.begin_scrape() else {
        let why = "two scrapes are under way; fix: scrape from one place, and not more often than a scrape takes\n";
        return text(StatusCode::SERVICE_UNAVAILABLE, why);
    };
    let pieces = futures::stream::iter(scrape).map(|piece| piece.map(|text| Frame::data(Bytes::from(text))));
    streamed("text/plain; version=0.0.4; charset=utf-8", StreamBody::new(pieces).boxed_unsync())
}

/// An answer that goes on for as long as the sender of `lines` lives (`/tap`). The receiver is dropped when the client leaves.
pub fn stream(content_type: &'static str, lines: tokio::sync::mpsc::Receiver<Bytes>) -> Response<Body> {
    let frames = ReceiverStream::new(lines).map(|b| Ok(Frame::data(b)));
    streamed(content_type, StreamBody::new(frames).boxed_unsync())
}

//! Bodies of admin responses: complete ones, streams of lines, and scrapes. `serve` sends them.

use std::io;

use bytes::Bytes;
use futures::StreamExt;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};

use crate::metrics::Registry;

/// Body of a response, complete or streamed.
pub type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Marks a streamed response: its connection does not give way to a new one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streamed;

fn build_response(status: StatusCode, content_type: &'static str, body: Bytes) -> Response<Body> {
    let mut r = Response::new(
        Full::new(body)
            .map_err(|never| match never {})
            .boxed_unsync(),
    );
    *r.status_mut() = status;
    r.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    r
}

/// Builds a plain text response.
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    build_response(status, "text/plain; charset=utf-8", body.into())
}

/// Builds a response of indented JSON.
pub fn json(status: StatusCode, value: &serde_json::Value) -> Response<Body> {
    build_response(status, "application/json", format!("{value:#}\n").into())
}

fn streamed(content_type: &'static str, body: Body) -> Response<Body> {
    let mut r = Response::new(body);
    r.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    r.extensions_mut().insert(Streamed);
    r
}

/// Builds the response to a scrape. Each piece is rendered after the client has read the earlier
/// ones. Returns 503 while [`crate::metrics::SCRAPES_MAX`] other scrapes are in progress.
pub(super) fn exposition(registry: &Registry) -> Response<Body> {
    let Some(scrape) = registry.begin_scrape() else {
        let why = "two scrapes are in progress; fix: use one scraper, with an interval longer than a scrape takes\n";
        return text(StatusCode::SERVICE_UNAVAILABLE, why);
    };
    let pieces =
        futures::stream::iter(scrape).map(|piece| piece.map(|text| Frame::data(Bytes::from(text))));
    streamed(
        "text/plain; version=0.0.4; charset=utf-8",
        StreamBody::new(pieces).boxed_unsync(),
    )
}

/// Builds a response that lasts as long as the stream `lines` (`/tap`). The stream is dropped when
/// the client disconnects.
pub fn stream(
    content_type: &'static str,
    lines: impl futures::Stream<Item = Bytes> + Send + 'static,
) -> Response<Body> {
    let frames = lines.map(|b| Ok(Frame::data(b)));
    streamed(content_type, StreamBody::new(frames).boxed_unsync())
}

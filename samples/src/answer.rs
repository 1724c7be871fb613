//! The response bodies all samples share, and the few shapes of answers. No routing.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Body;

/// Any error a streamed body may end with.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body of every answer.
pub type AnswerBody = UnsyncBoxBody<Bytes, BoxError>;
/// An answer.
pub type Answer = Response<AnswerBody>;

/// Boxes any body.
pub fn boxed<B>(body: B) -> AnswerBody
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(Into::into).boxed_unsync()
}

/// A whole body with its type.
pub fn whole(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(boxed(Full::new(body.into())));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}

/// A JSON answer.
pub fn json(status: StatusCode, value: &serde_json::Value) -> Answer {
    whole(status, "application/json", value.to_string())
}

/// A small HTML page; `body` must already be escaped.
pub fn html(status: StatusCode, title: &str, body: &str) -> Answer {
    let page = format!("<!doctype html><html><head><title>{title}</title></head><body>{body}</body></html>\n");
    whole(status, "text/html; charset=utf-8", page)
}

/// A refusal that names what was wrong.
pub fn refuse(status: StatusCode, problem: &str) -> Answer {
    json(status, &serde_json::json!({ "error": problem }))
}

/// Escapes text for HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The value of one query parameter, undecoded; `None` where it is absent.
pub fn query<'a>(uri: &'a http::Uri, name: &str) -> Option<&'a str> {
    uri.query()?.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key == name).then_some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_parameters_are_found_by_name() {
        let uri: http::Uri = "/blob?size=10&chunked&seed=7".parse().unwrap();
        for (name, want) in [("size", Some("10")), ("chunked", Some("")), ("seed", Some("7")), ("siz", None)] {
            assert_eq!(query(&uri, name), want, "{name}");
        }
    }
}

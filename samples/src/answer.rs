//! The response type that all samples share, and constructors for the few kinds of responses. It
//! contains no routing.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Body;

/// Any error with which a streamed body can end.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// Body of every sample's responses.
pub type SampleBody = UnsyncBoxBody<Bytes, BoxError>;
/// Response with a sample's body.
pub type SampleResponse = Response<SampleBody>;

/// Boxes a body of any type.
pub fn boxed<B>(body: B) -> SampleBody
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(Into::into).boxed_unsync()
}

/// Returns a response with a complete body and its content type.
pub fn build_response(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> SampleResponse {
    let mut answer = Response::new(boxed(Full::new(body.into())));
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}

/// Returns a response with a JSON body.
pub fn json(status: StatusCode, value: &serde_json::Value) -> SampleResponse {
    build_response(status, "application/json", value.to_string())
}

/// Returns a small HTML page. `body` must already be escaped.
pub fn html(status: StatusCode, title: &str, body: &str) -> SampleResponse {
    let page = format!(
        "<!doctype html><html><head><title>{title}</title></head><body>{body}</body></html>\n"
    );
    build_response(status, "text/html; charset=utf-8", page)
}

/// Returns an error response with a description of the problem.
pub fn refuse(status: StatusCode, problem: &str) -> SampleResponse {
    json(status, &serde_json::json!({ "error": problem }))
}

/// Escapes text for use in HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// Returns the value of one query parameter, without decoding it, or `None` if it is absent.
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
        for (name, want) in [
            ("size", Some("10")),
            ("chunked", Some("")),
            ("seed", Some("7")),
            ("siz", None),
        ] {
            assert_eq!(query(&uri, name), want, "{name}");
        }
    }
}

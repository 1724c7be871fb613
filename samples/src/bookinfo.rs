//! A bookinfo-like application: `productpage` calls `details` and `reviews`; reviews v2 and v3 call
//! `ratings`. Each service answers JSON (or HTML for browsers) that contains its version and pod. A
//! failed call to another service becomes a 502. Start at `productpage`.

pub mod details;
pub mod productpage;
pub mod ratings;
pub mod reviews;

use http::header::ACCEPT;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use crate::answer::{self, SampleResponse};
use crate::outbound::UpstreamReply;
use crate::pod::PodName;

/// Returns whether the client prefers HTML (a browser) over JSON.
fn wants_html(headers: &HeaderMap) -> bool {
    headers
        .get(ACCEPT)
        .and_then(|v| v.to_str().ok())
        .is_some_and(|accept| accept.contains("text/html"))
}

/// Adds the three fields with which all answers begin.
fn signed(pod: &PodName, rest: Value) -> Value {
    let mut all = json!({ "service": pod.service, "version": pod.version, "pod": pod.name });
    if let (Value::Object(all), Value::Object(rest)) = (&mut all, rest) {
        all.extend(rest);
    }
    all
}

/// Returns the number in `/details/7`, or `None` for any other path.
fn item(path: &str, prefix: &str) -> Option<u64> {
    path.strip_prefix(prefix)?.strip_prefix('/')?.parse().ok()
}

/// Answers `/health`, in the same form in every service.
fn health(pod: &PodName) -> SampleResponse {
    answer::json(StatusCode::OK, &signed(pod, json!({ "status": "ok" })))
}

/// Answers a path that the service does not have.
fn unknown(pod: &PodName, path: &str) -> SampleResponse {
    answer::refuse(
        StatusCode::NOT_FOUND,
        &format!("{} has no {path}", pod.service),
    )
}

/// Returns the other service's reply if its status is 200, else a description of the failure.
fn accepted(reply: anyhow::Result<UpstreamReply>) -> Result<UpstreamReply, String> {
    match reply {
        Ok(reply) if reply.status == StatusCode::OK => Ok(reply),
        Ok(reply) => Err(format!("answered {}: {}", reply.status, reply.json)),
        Err(problem) => Err(format!("{problem:#}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_whole_numbers_after_the_prefix() {
        for (path, want) in [
            ("/details/7", Some(7)),
            ("/details", None),
            ("/details/", None),
            ("/details/7x", None),
            ("/detail/7", None),
        ] {
            assert_eq!(item(path, "/details"), want, "{path}");
        }
    }
}

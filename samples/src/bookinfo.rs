//! A bookinfo-like application: `productpage` calls `details` and `reviews`; reviews v2 and v3 call `ratings`.
//! Each service answers JSON (or HTML where a browser asks) that names its version and pod. A call that fails below is a 502 above.

pub mod details;
pub mod productpage;
pub mod ratings;
pub mod reviews;

use http::header::ACCEPT;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use crate::answer::{self, Answer};
use crate::outbound::Said;
use crate::pod::Pod;

/// Whether the client prefers HTML (a browser) over JSON.
fn wants_html(headers: &HeaderMap) -> bool {
    headers.get(ACCEPT).and_then(|v| v.to_str().ok()).is_some_and(|accept| accept.contains("text/html"))
}

/// The three fields that all answers begin with.
fn signed(pod: &Pod, rest: Value) -> Value {
    let mut all = json!({ "service": pod.service, "version": pod.version, "pod": pod.name });
    if let (Value::Object(all), Value::Object(rest)) = (&mut all, rest) {
        all.extend(rest);
    }
    all
}

/// The number in `/details/7`; `None` where the path is another one.
fn item(path: &str, prefix: &str) -> Option<u64> {
    path.strip_prefix(prefix)?.strip_prefix('/')?.parse().ok()
}

/// `/health` answers alike in every service.
fn health(pod: &Pod) -> Answer {
    answer::json(StatusCode::OK, &signed(pod, json!({ "status": "ok" })))
}

/// A path nobody serves.
fn unknown(pod: &Pod, path: &str) -> Answer {
    answer::refuse(StatusCode::NOT_FOUND, &format!("{} has no {path}", pod.service))
}

/// The other service's JSON when it said 200, else the text of what went wrong.
fn accepted(said: anyhow::Result<Said>) -> Result<Said, String> {
    match said {
        Ok(said) if said.status == StatusCode::OK => Ok(said),
        Ok(said) => Err(format!("answered {}: {}", said.status, said.json)),
        Err(problem) => Err(format!("{problem:#}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_whole_numbers_after_the_prefix() {
        for (path, want) in [("/details/7", Some(7)), ("/details", None), ("/details/", None), ("/details/7x", None), ("/detail/7", None)] {
            assert_eq!(item(path, "/details"), want, "{path}");
        }
    }
}

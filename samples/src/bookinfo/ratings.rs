//! `ratings`: stars per reviewer. Calls nobody.

use http::{Request, StatusCode};
use serde_json::json;

use super::{health, item, signed, unknown};
use crate::answer::{self, Answer};
use crate::pod::Pod;

/// `GET /ratings/ID` and `/health`.
pub fn answer<B>(pod: &Pod, request: &Request<B>) -> Answer {
    let path = request.uri().path();
    if path == "/health" {
        return health(pod);
    }
    let Some(id) = item(path, "/ratings") else { return unknown(pod, path) };
    answer::json(StatusCode::OK, &signed(pod, json!({ "id": id, "ratings": { "Reviewer1": 5, "Reviewer2": 4 } })))
}

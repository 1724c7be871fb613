//! `ratings`: stars per reviewer. It calls no other service.

use http::{Request, StatusCode};
use serde_json::json;

use super::{health, item, signed, unknown};
use crate::answer::{self, SampleResponse};
use crate::pod::PodName;

/// Answers `GET /ratings/ID` and `/health`.
pub fn answer<B>(pod: &PodName, request: &Request<B>) -> SampleResponse {
    let path = request.uri().path();
    if path == "/health" {
        return health(pod);
    }
    let Some(id) = item(path, "/ratings") else {
        return unknown(pod, path);
    };
    answer::json(
        StatusCode::OK,
        &signed(
            pod,
            json!({ "id": id, "ratings": { "Reviewer1": 5, "Reviewer2": 4 } }),
        ),
    )
}

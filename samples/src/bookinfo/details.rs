//! `details`: facts about a book. It calls no other service.

use http::{Request, StatusCode};
use serde_json::json;

use super::{health, item, signed, unknown};
use crate::answer::{self, SampleResponse};
use crate::pod::PodName;

/// Answers `GET /details/ID` and `/health`.
pub fn answer<B>(pod: &PodName, request: &Request<B>) -> SampleResponse {
    let path = request.uri().path();
    if path == "/health" {
        return health(pod);
    }
    let Some(id) = item(path, "/details") else {
        return unknown(pod, path);
    };
    let facts = json!({
        "id": id, "title": "The Comedy of Errors", "author": "William Shakespeare", "year": 1595, "pages": 200,
        "language": "English", "isbn10": "1234567890",
    });
    answer::json(StatusCode::OK, &signed(pod, facts))
}

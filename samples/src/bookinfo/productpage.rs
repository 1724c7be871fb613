//! `productpage`: calls details and reviews at the same time and shows both. The version of reviews that answered is also in
//! the header `x-reviews-served-by`, so that a split of reviews can be measured from outside.

use http::{HeaderValue, Request, StatusCode};
use serde_json::{Value, json};

use super::{accepted, health, signed, unknown, wants_html};
use crate::answer::{self, Answer, escape};
use crate::outbound::{Said, Upstream};
use crate::pod::Pod;

/// Response header with the `x-served-by` of the reviews pod.
pub const REVIEWS_SERVED_BY: &str = "x-reviews-served-by";

/// One productpage pod.
#[derive(Debug, Clone)]
pub struct ProductPage {
    pub pod: Pod,
    pub details: Upstream,
    pub reviews: Upstream,
}

impl ProductPage {
    /// Needs `$DETAILS_URL` and `$REVIEWS_URL`.
    pub fn from_env(pod: Pod) -> anyhow::Result<Self> {
        Ok(Self { pod, details: Upstream::from_env("DETAILS")?, reviews: Upstream::from_env("REVIEWS")? })
    }

    /// `GET /productpage` (also `/`) and `/health`.
    pub async fn answer<B>(&self, request: Request<B>) -> Answer {
        match request.uri().path() {
            "/health" => return health(&self.pod),
            "/" | "/productpage" => {}
            path => return unknown(&self.pod, path),
        }
        let (details, reviews) =
            tokio::join!(self.details.get("/details/0", request.headers()), self.reviews.get("/reviews/0", request.headers()));
        match (accepted(details), accepted(reviews)) {
            (Ok(details), Ok(reviews)) => self.page(wants_html(request.headers()), &details, &reviews),
            (details, reviews) => {
                let problems: Vec<String> = [("details", details), ("reviews", reviews)]
                    .into_iter()
                    .filter_map(|(name, said)| said.err().map(|problem| format!("{name}: {problem}")))
                    .collect();
                answer::refuse(StatusCode::BAD_GATEWAY, &problems.join("; "))
            }
        }
    }

    fn page(&self, html: bool, details: &Said, reviews: &Said) -> Answer {
        let mut answer = if html {
            answer::html(StatusCode::OK, "Bookinfo", &self.body(&details.json, &reviews.json))
        } else {
            let whole = json!({ "details": details.json, "reviews": reviews.json });
            answer::json(StatusCode::OK, &signed(&self.pod, whole))
        };
        let served_by = reviews.served_by.as_deref().and_then(|v| HeaderValue::from_str(v).ok());
        if let Some(value) = served_by {
            answer.headers_mut().insert(REVIEWS_SERVED_BY, value);
        }
        answer
    }

    fn body(&self, details: &Value, reviews: &Value) -> String {
        let text = |value: &Value| escape(value.as_str().unwrap_or("?"));
        let mut lines = String::new();
        for review in reviews["reviews"].as_array().into_iter().flatten() {
            let stars = match review["rating"]["stars"].as_u64() {
                Some(n) => format!(" <b>{n} {} stars</b>", text(&review["rating"]["color"])),
                None => String::new(),
            };
            lines.push_str(&format!("<li>{}: {}{stars}</li>", text(&review["reviewer"]), text(&review["text"])));
        }
        format!(
            "<h1>{}</h1><p>by {}</p><ul>{lines}</ul><hr><p>productpage {} on {}, details {} on {}, reviews {} on {}</p>",
            text(&details["title"]),
            text(&details["author"]),
            escape(&self.pod.version),
            escape(&self.pod.name),
            text(&details["version"]),
            text(&details["pod"]),
            text(&reviews["version"]),
            text(&reviews["pod"]),
        )
    }
}

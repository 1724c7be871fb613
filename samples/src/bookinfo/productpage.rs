//! `productpage`: calls details and reviews at the same time and shows both. The header
//! `x-reviews-served-by` contains the version of reviews that answered, so that a weighted split of
//! reviews can be measured from outside.

use http::{HeaderValue, Request, StatusCode};
use serde_json::{Value, json};

use super::{accepted, health, signed, unknown, wants_html};
use crate::answer::{self, SampleResponse, escape};
use crate::outbound::{UpstreamReply, UpstreamService};
use crate::pod::PodName;

/// Response header with the `x-served-by` of the reviews pod.
pub const REVIEWS_SERVED_BY: &str = "x-reviews-served-by";

/// The service of one productpage pod.
#[derive(Debug, Clone)]
pub struct ProductPage {
    pub pod: PodName,
    pub details: UpstreamService,
    pub reviews: UpstreamService,
}

impl ProductPage {
    /// Reads the URLs of the other services from `$DETAILS_URL` and `$REVIEWS_URL`.
    ///
    /// # Errors
    ///
    /// A variable is missing or is not a URL.
    pub fn from_env(pod: PodName) -> anyhow::Result<Self> {
        Ok(Self {
            pod,
            details: UpstreamService::from_env("DETAILS")?,
            reviews: UpstreamService::from_env("REVIEWS")?,
        })
    }

    /// Answers `GET /productpage` (also `/`) and `/health`.
    pub async fn answer<B>(&self, request: Request<B>) -> SampleResponse {
        match request.uri().path() {
            "/health" => return health(&self.pod),
            "/" | "/productpage" => {}
            path => return unknown(&self.pod, path),
        }
        let (details, reviews) = tokio::join!(
            self.details.get("/details/0", request.headers()),
            self.reviews.get("/reviews/0", request.headers())
        );
        match (accepted(details), accepted(reviews)) {
            (Ok(details), Ok(reviews)) => {
                self.page(wants_html(request.headers()), &details, &reviews)
            }
            (details, reviews) => {
                let problems: Vec<String> = [("details", details), ("reviews", reviews)]
                    .into_iter()
                    .filter_map(|(name, reply)| {
                        reply.err().map(|problem| format!("{name}: {problem}"))
                    })
                    .collect();
                answer::refuse(StatusCode::BAD_GATEWAY, &problems.join("; "))
            }
        }
    }

    fn page(&self, html: bool, details: &UpstreamReply, reviews: &UpstreamReply) -> SampleResponse {
        let mut answer = if html {
            answer::html(
                StatusCode::OK,
                "Bookinfo",
                &self.body(&details.json, &reviews.json),
            )
        } else {
            let page_json = json!({ "details": details.json, "reviews": reviews.json });
            answer::json(StatusCode::OK, &signed(&self.pod, page_json))
        };
        let served_by = reviews
            .served_by
            .as_deref()
            .and_then(|v| HeaderValue::from_str(v).ok());
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
            lines.push_str(&format!(
                "<li>{}: {}{stars}</li>",
                text(&review["reviewer"]),
                text(&review["text"])
            ));
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

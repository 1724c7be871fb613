//! `reviews`: v1 has no stars; v2 has black stars and v3 red ones, from `ratings`.

use http::{Request, StatusCode};
use serde_json::{Value, json};

use super::{accepted, health, item, signed, unknown};
use crate::answer::{self, SampleResponse};
use crate::outbound::UpstreamService;
use crate::pod::PodName;

/// The service of one reviews pod.
#[derive(Debug, Clone)]
pub struct Reviews {
    pod: PodName,
    stars: Option<Stars>,
}

#[derive(Debug, Clone)]
struct Stars {
    color: &'static str,
    ratings: UpstreamService,
}

impl Reviews {
    /// Reads `$RATINGS_URL` if the version needs it: v1 has no stars, v3 has red ones, all others
    /// have black ones.
    ///
    /// # Errors
    ///
    /// `$RATINGS_URL` is needed, but it is missing or is not a URL.
    pub fn from_env(pod: PodName) -> anyhow::Result<Self> {
        let ratings = if pod.version == "v1" {
            None
        } else {
            Some(UpstreamService::from_env("RATINGS")?)
        };
        Ok(Self::new(pod, ratings))
    }

    /// Creates the service, with stars if `ratings` is given.
    pub fn new(pod: PodName, ratings: Option<UpstreamService>) -> Self {
        let color = if pod.version == "v3" { "red" } else { "black" };
        Self {
            pod,
            stars: ratings.map(|ratings| Stars { color, ratings }),
        }
    }

    /// Answers `GET /reviews/ID` and `/health`.
    pub async fn answer<B>(&self, request: Request<B>) -> SampleResponse {
        let path = request.uri().path();
        if path == "/health" {
            return health(&self.pod);
        }
        let Some(id) = item(path, "/reviews") else {
            return unknown(&self.pod, path);
        };
        let mut reviews = vec![
            json!({ "reviewer": "Reviewer1", "text": "An extremely entertaining play by Shakespeare." }),
            json!({ "reviewer": "Reviewer2", "text": "Absolutely fun and entertaining." }),
        ];
        let Some(stars) = &self.stars else {
            return answer::json(
                StatusCode::OK,
                &signed(&self.pod, json!({ "id": id, "reviews": reviews })),
            );
        };
        let reply = match accepted(
            stars
                .ratings
                .get(&format!("/ratings/{id}"), request.headers())
                .await,
        ) {
            Ok(reply) => reply,
            Err(problem) => {
                return answer::refuse(StatusCode::BAD_GATEWAY, &format!("ratings: {problem}"));
            }
        };
        for review in &mut reviews {
            let reviewer = review["reviewer"].as_str().unwrap_or_default().to_owned();
            let count: &Value = &reply.json["ratings"][reviewer.as_str()];
            review["rating"] = json!({ "stars": count, "color": stars.color });
        }
        let body_json = json!({ "id": id, "reviews": reviews, "ratings": reply.json });
        answer::json(StatusCode::OK, &signed(&self.pod, body_json))
    }
}

//! `reviews`: v1 without stars, v2 with black and v3 with red stars from `ratings`.

use http::{Request, StatusCode};
use serde_json::{Value, json};

use super::{accepted, health, item, signed, unknown};
use crate::answer::{self, Answer};
use crate::outbound::Upstream;
use crate::pod::Pod;

/// One reviews pod.
#[derive(Debug, Clone)]
pub struct Reviews {
    pod: Pod,
    stars: Option<Stars>,
}

#[derive(Debug, Clone)]
struct Stars {
    color: &'static str,
    ratings: Upstream,
}

impl Reviews {
    /// The version decides whether `$RATINGS_URL` is needed: v1 has no stars, v3 has red ones, all others black ones.
    pub fn from_env(pod: Pod) -> anyhow::Result<Self> {
        let ratings = if pod.version == "v1" { None } else { Some(Upstream::from_env("RATINGS")?) };
        Ok(Self::new(pod, ratings))
    }

    /// With stars where `ratings` is given.
    pub fn new(pod: Pod, ratings: Option<Upstream>) -> Self {
        let color = if pod.version == "v3" { "red" } else { "black" };
        Self { pod, stars: ratings.map(|ratings| Stars { color, ratings }) }
    }

    /// `GET /reviews/ID` and `/health`.
    pub async fn answer<B>(&self, request: Request<B>) -> Answer {
        let path = request.uri().path();
        if path == "/health" {
            return health(&self.pod);
        }
        let Some(id) = item(path, "/reviews") else { return unknown(&self.pod, path) };
        let mut reviews = vec![
            json!({ "reviewer": "Reviewer1", "text": "An extremely entertaining play by Shakespeare." }),
            json!({ "reviewer": "Reviewer2", "text": "Absolutely fun and entertaining." }),
        ];
        let Some(stars) = &self.stars else {
            return answer::json(StatusCode::OK, &signed(&self.pod, json!({ "id": id, "reviews": reviews })));
        };
        let said = match accepted(stars.ratings.get(&format!("/ratings/{id}"), request.headers()).await) {
            Ok(said) => said,
            Err(problem) => return answer::refuse(StatusCode::BAD_GATEWAY, &format!("ratings: {problem}")),
        };
        for review in &mut reviews {
            let reviewer = review["reviewer"].as_str().unwrap_or_default().to_owned();
            let count: &Value = &said.json["ratings"][reviewer.as_str()];
            review["rating"] = json!({ "stars": count, "color": stars.color });
        }
        let whole = json!({ "id": id, "reviews": reviews, "ratings": said.json });
        answer::json(StatusCode::OK, &signed(&self.pod, whole))
    }
}

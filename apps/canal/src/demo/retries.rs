//! Step: a new version of reviews fails every request, because a service that it calls does not
//! exist. Retries of a route hide it from clients.

use serde_json::Value;

use crate::demo::canary::counts;
use crate::demo::demo_world::{DemoWorld, client};
use crate::demo::screen::Expectation;
use crate::exit::VerbResult;

/// Service of all versions, which has no route: a quarter of its pods fail.
const SERVICE: &str = "---
apiVersion: v1
kind: Service
metadata: {name: all-reviews, namespace: bookinfo}
spec:
  clusterIP: 10.101.0.25
  selector: {app: reviews}
  ports: [{name: http, port: 9080, targetPort: 9080}]
";

/// A retry goes to another pod, so that one is enough; the second is for a pod that ends meanwhile.
const ROUTE: &str = "---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: all-reviews, namespace: bookinfo}
spec:
  parentRefs: [{group: \"\", kind: Service, name: all-reviews, port: 9080}]
  rules:
  - backendRefs: [{name: all-reviews, port: 9080}]
    retry: {codes: [502], attempts: 2}
";

/// Number of requests. A load that met none of the failing quarter would be one of 10^49.
const REQUESTS: u64 = 400;
/// Number of connections. Retries have a budget of 20 % of the requests in flight and at least two
/// at once per worker of a gateway, which two connections never exceed.
const CONNECTIONS: &str = "2";

pub(crate) async fn run(world: &DemoWorld) -> VerbResult<Vec<Expectation>> {
    world
        .apply("alpha", "demo/alpha/retries.yaml", SERVICE.to_owned())
        .await?;
    let failing = load(world).await?;
    world
        .apply("alpha", "demo/alpha/retries.yaml", ROUTE.to_owned())
        .await?;
    let hidden = load(world).await?;
    let failed = |report: &Value| report["failed"].as_u64().unwrap_or(0);
    Ok(vec![
        Expectation::new(
            failed(&failing) > 0 && failing["succeeded"].as_u64() > Some(0),
            "alpha: reviews-v4 fails without retries, and the other versions answer",
            counts(&failing),
        ),
        Expectation::new(
            failed(&hidden) == 0 && hidden["succeeded"] == REQUESTS,
            format!("with retries in an HTTPRoute, none of {REQUESTS} requests fails"),
            counts(&hidden),
        ),
    ])
}

async fn load(world: &DemoWorld) -> VerbResult<Value> {
    let count = REQUESTS.to_string();
    let argv = [
        "canal-samples",
        "load",
        "http://10.101.0.25:9080/reviews/0",
        "-n",
        &count,
        "-c",
        CONNECTIONS,
        "--served-by",
        "x-served-by",
    ];
    world.report(&client("alpha"), &argv).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_and_the_route_are_read_as_they_are_written() {
        let parsed = canal_sources::parse("retries.yaml", &format!("{SERVICE}{ROUTE}"));
        assert_eq!(parsed.diagnostics, []);
        assert_eq!(parsed.documents.len(), 2);
    }
}

//! Tests of the HTTP/JSON face of the operators' API: it shows what the gRPC API shows, to the same
//! operators, and refuses the same.

use crate::fixture::{ControllerFixture, service};
use bytes::Bytes;
use canal_controller_core::ControllerLimits;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::transport::Channel;

/// Sends one request, and returns the status and the body.
async fn send(
    channel: &mut Channel,
    method: Method,
    path: &str,
    token: Option<&str>,
    body: &str,
) -> (StatusCode, Value) {
    let mut request = Request::builder().method(method).uri(path);
    if let Some(token) = token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    let request = request
        .body(Body::new(Full::new(Bytes::from(body.to_owned()))))
        .unwrap();
    std::future::poll_fn(|context| Service::<Request<Body>>::poll_ready(channel, context))
        .await
        .unwrap();
    let response = channel.call(request).await.unwrap();
    let status = response.status();
    assert_eq!(
        response.headers()[header::CONTENT_TYPE],
        "application/json",
        "{path}"
    );
    assert_eq!(
        response.headers().contains_key(header::WWW_AUTHENTICATE),
        status == StatusCode::UNAUTHORIZED,
        "{path}"
    );
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let value: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(value["api_version"], "v1", "{path}");
    (status, value)
}

#[tokio::test]
async fn the_json_api_and_grpc_return_the_same_to_operators() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut channel = fixture.channel().await;
    let mut get =
        async |path: &str, token| send(&mut channel, Method::GET, path, Some(token), "").await;
    let tenants = |status: &Value| {
        status["tenants"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tenant| tenant["tenant"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let (code, status) = get("/api/v1/status", "root").await;
    assert_eq!(
        (code, tenants(&status)),
        (StatusCode::OK, vec!["alpha".into(), "beta".into()])
    );
    assert_eq!(tenants(&get("/api/v1/status", "ann").await.1), ["alpha"]);
    let (code, objects) = get("/api/v1/objects?kind=service&namespace=shop&name=a", "ann").await;
    let found = &objects["objects"][0];
    assert!(
        code == StatusCode::OK
            && found["origin"]
                .as_str()
                .is_some_and(|origin| origin.ends_with("mesh.yaml")),
        "{found}"
    );
    assert_eq!(found["object"]["spec"]["ports"][0]["port"], 80);
    assert_eq!(get("/api/v1/fleet", "ann").await.0, StatusCode::OK);
    assert_eq!(
        get("/api/v1/trust?tenant=alpha&certificates=true", "ann")
            .await
            .1["domains"][0]["trust_domain"],
        "alpha.example"
    );
    assert_eq!(
        get("/api/v1/fleet/services/alpha/shop/a", "ann").await.0,
        StatusCode::NOT_FOUND,
        "there is no cloud tier"
    );
}

#[tokio::test]
async fn writes_by_json_are_those_of_grpc() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut channel = fixture.channel().await;
    let mut post = async |path: &str, body: Value| {
        send(
            &mut channel,
            Method::POST,
            path,
            Some("ann"),
            &body.to_string(),
        )
        .await
    };
    let files = json!([{ "path": "c.yaml", "yaml": service(1, "c", 3) }]);
    let diff = post("/api/v1/diff", json!({ "files": files })).await.1;
    assert!(
        diff["changes"][0]["diff"]
            .as_str()
            .unwrap()
            .contains("clusterIP"),
        "{diff}"
    );
    let dry = post("/api/v1/apply", json!({ "files": files, "dry_run": true }))
        .await
        .1;
    assert_eq!(
        (
            &dry["accepted"],
            &dry["dry_run"],
            &dry["changes"][0]["change"]
        ),
        (&json!(true), &json!(true), &json!("created"))
    );
    let (code, applied) = post(
        "/api/v1/apply",
        json!({ "tenant": "alpha", "files": files }),
    )
    .await;
    assert_eq!(
        (code, &applied["accepted"]),
        (StatusCode::OK, &json!(true)),
        "{applied}"
    );
    let object = json!({ "kind": "service", "namespace": "shop", "name": "c" });
    let deleted = post("/api/v1/delete", json!({ "objects": [object] }))
        .await
        .1;
    assert_eq!(
        (&deleted["accepted"], &deleted["changes"][0]["change"]),
        (&json!(true), &json!("deleted")),
        "{deleted}"
    );
    // The dry run counts as well.
    assert!(
        fixture
            .metric("canal_controller_api_requests_total{verb=\"apply\",outcome=\"accepted\"}")
            .await
            >= 2.0
    );
}

/// Method, path, token and body of a request, and status, code and counter of its refusal.
type RefusalCase<'a> = (
    Method,
    &'a str,
    Option<&'a str>,
    &'a str,
    u16,
    &'a str,
    &'a str,
);

const REFUSAL_CASES: [RefusalCase<'static>; 10] = [
    (
        Method::GET,
        "/api/v1/status",
        None,
        "",
        401,
        "unauthenticated",
        "no_token",
    ),
    (
        Method::GET,
        "/api/v1/status",
        Some("nobody"),
        "",
        401,
        "unauthenticated",
        "unknown_token",
    ),
    (
        Method::GET,
        "/api/v1/status",
        Some("n1"),
        "",
        403,
        "permission_denied",
        "not_an_operator",
    ),
    (
        Method::GET,
        "/api/v1/objects?tenant=beta",
        Some("ann"),
        "",
        403,
        "permission_denied",
        "foreign_tenant",
    ),
    (
        Method::POST,
        "/api/v1/fleet/replicas/gw-1/drain",
        Some("ann"),
        "",
        403,
        "permission_denied",
        "not_the_provider",
    ),
    (
        Method::GET,
        "/api/v1/nowhere",
        Some("ann"),
        "",
        404,
        "not_found",
        "json_path",
    ),
    (
        Method::GET,
        "/api/v2/status",
        Some("ann"),
        "",
        404,
        "not_found",
        "json_path",
    ),
    (
        Method::GET,
        "/api/v1/apply",
        Some("ann"),
        "",
        405,
        "unimplemented",
        "json_method",
    ),
    (
        Method::GET,
        "/api/v1/objects?tenat=alpha",
        Some("ann"),
        "",
        400,
        "invalid_argument",
        "json_form",
    ),
    (
        Method::POST,
        "/api/v1/apply",
        Some("ann"),
        "{\"filez\": []}",
        400,
        "invalid_argument",
        "json_form",
    ),
];

#[tokio::test]
async fn refusals_by_json_have_a_status_a_reason_and_a_counter() {
    // Below the default, so that a short request exceeds it.
    let limits = ControllerLimits {
        request_bytes: 4096,
        ..ControllerLimits::default()
    };
    let fixture = ControllerFixture::with(limits, |config| {
        crate::fixture::write(
            config,
            "alpha/mesh.yaml",
            &crate::fixture::tenant("alpha", 1),
        );
    })
    .await;
    let mut channel = fixture.channel().await;
    // 8,192 bytes are twice the limit.
    let long = json!({ "files": [{ "path": "x", "yaml": "#".repeat(8192) }] }).to_string();
    let too_long = (
        Method::POST,
        "/api/v1/apply",
        Some("ann"),
        long.as_str(),
        413,
        "resource_exhausted",
        "json_request_bytes",
    );
    for (method, path, token, body, status, code, counter) in
        REFUSAL_CASES.into_iter().chain([too_long])
    {
        let line = format!("canal_controller_refused_total{{reason=\"{counter}\"}}");
        let before = fixture.metric(&line).await;
        let (got, view) = send(&mut channel, method, path, token, body).await;
        assert_eq!(
            (got.as_u16(), view["error"]["code"].as_str()),
            (status, Some(code)),
            "{path} {view}"
        );
        assert!(
            !view["error"]["message"].as_str().unwrap().is_empty(),
            "{path}"
        );
        assert!(
            (fixture.metric(&line).await - before - 1.0).abs() < f64::EPSILON,
            "{path}: {line}"
        );
    }
}

//! Rules of GRPCRoutes, as the compiler makes them, over real HTTP/2: which rule a gRPC request
//! reaches, and the statuses that gRPC clients receive from the gateway.

use bytes::Bytes;
use canal_model::program::{
    AppProtocol, BackendTarget, HttpMatch, PathMatch, Resource, RouteAction, TextMatch, ValueMatch,
};
use h2::client::SendRequest;
use http::{HeaderMap, Request, Response};

use crate::fixture::{EngineSetup, GatewayFixture, prefix, route, to};
use crate::http2;

const UNIMPLEMENTED: &str = "12";
const UNAVAILABLE: &str = "14";

/// Builds the match of a GRPCRoute on this path.
fn post(path: PathMatch) -> HttpMatch {
    HttpMatch {
        path,
        method: Some("POST".into()),
        ..prefix("/")
    }
}

fn refusal() -> BackendTarget {
    BackendTarget::Refuse {
        status: 503,
        reason: "there is no Service shop/cart".into(),
    }
}

/// Returns the rules, the most specific first.
fn rules() -> Vec<Resource> {
    let to_web = || RouteAction::Split(vec![to("web", &[], 1)]);
    let exact = |path: &str| post(PathMatch::Exact(path.into()));
    let mut half = to("web", &[], 1);
    half.target = refusal();
    let mut internal = exact("/shop.Cart/Add");
    internal.headers = vec![ValueMatch {
        name: "x-internal".into(),
        value: TextMatch::Exact("1".into()),
    }];
    let broken = RouteAction::Refuse {
        status: 503,
        reason: "filters are not supported".into(),
    };
    let service = post(PathMatch::StringPrefix("/shop.Cart/".into()));
    let method = post(PathMatch::Regex("/[^/]+/Check".into()));
    vec![
        route("web", "internal", 0, internal, broken.clone()),
        route("web", "add", 1, exact("/shop.Cart/Add"), to_web()),
        route(
            "web",
            "half",
            2,
            exact("/shop.Cart/Half"),
            RouteAction::Split(vec![to("web", &[], 1), half.clone()]),
        ),
        route(
            "web",
            "lost",
            3,
            exact("/shop.Cart/Lost"),
            RouteAction::Split(vec![half]),
        ),
        route("web", "service", 4, service, to_web()),
        route("web", "method", 5, method, to_web()),
    ]
}

/// Serves gRPC: repeats the path and the message, and ends with a status in trailers.
async fn serve(request: Request<h2::RecvStream>, mut respond: h2::server::SendResponse<Bytes>) {
    let path = request.uri().path().to_owned();
    let (message, _) = http2::read_all(request.into_body()).await.unwrap();
    let response = Response::builder()
        .header("content-type", "application/grpc")
        .header("x-path", path)
        .body(())
        .unwrap();
    let mut send = respond.send_response(response, false).unwrap();
    send.send_data(message.into(), false).unwrap();
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    send.send_trailers(trailers).unwrap();
}

/// The result of one call: status of HTTP, headers, message and trailers.
struct CallResult {
    status: u16,
    headers: HeaderMap,
    message: Vec<u8>,
    trailers: Option<HeaderMap>,
}

impl CallResult {
    /// Returns the status of a response that consists of headers only.
    fn trailers_only(&self) -> &str {
        assert!(self.message.is_empty() && self.trailers.is_none());
        assert_eq!(self.status, 200);
        assert_eq!(self.headers["content-type"], "application/grpc");
        self.headers["grpc-status"].to_str().unwrap()
    }

    fn has_succeeded(&self) -> bool {
        let trailers = self.trailers.as_ref();
        trailers.is_some_and(|it| it["grpc-status"] == "0") && self.message == MESSAGE
    }
}

const MESSAGE: &[u8] = b"\0\0\0\0\x02hi";

async fn call(client: &SendRequest<Bytes>, path: &str, fields: &[(&str, &str)]) -> CallResult {
    let mut request = Request::builder()
        .method("POST")
        .uri(format!("http://web{path}"));
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    let mut client = client.clone().ready().await.unwrap();
    let (response, mut body) = client
        .send_request(request.body(()).unwrap(), false)
        .unwrap();
    // A response that ends early resets the stream.
    let _ = body.send_data(Bytes::from_static(MESSAGE), true);
    let (parts, body) = response.await.unwrap().into_parts();
    let (message, trailers) = http2::read_all(body).await.unwrap();
    CallResult {
        status: parts.status.as_u16(),
        headers: parts.headers,
        message,
        trailers,
    }
}

#[tokio::test]
async fn grpc_requests_reach_the_rule_of_their_method() {
    let origin = http2::origin(serve).await;
    let setup = EngineSetup {
        protocol: AppProtocol::Grpc,
        ..EngineSetup::default()
    };
    let fixture = GatewayFixture::new(setup, &[origin.address]);
    fixture.apply(rules());
    let client = http2::connect(&fixture).await;
    let grpc = ("content-type", "application/grpc+proto");
    for path in ["/shop.Cart/Add", "/shop.Cart/Other", "/any.Service/Check"] {
        let result = call(&client, path, &[grpc]).await;
        assert!(result.has_succeeded(), "{path}");
        assert_eq!(result.headers["x-path"], path);
    }
    for (path, fields, expected) in [
        (
            "/shop.Cart/Add",
            &[grpc, ("x-internal", "1")][..],
            UNAVAILABLE,
        ),
        ("/shop.Cart/Lost", &[grpc], UNAVAILABLE),
        ("/shop.Wish/Add", &[grpc], UNIMPLEMENTED),
        ("/shop.Wish/Check/More", &[grpc], UNIMPLEMENTED),
        ("/", &[grpc], UNIMPLEMENTED),
    ] {
        let result = call(&client, path, fields).await;
        assert_eq!(result.trailers_only(), expected, "{path} {fields:?}");
    }
    // Other clients receive the statuses of HTTP.
    let plain = [("content-type", "text/plain")];
    for (path, expected) in [("/shop.Cart/Lost", 503), ("/shop.Wish/Add", 404)] {
        let result = call(&client, path, &plain).await;
        assert_eq!(result.status, expected, "{path}");
        assert!(!result.headers.contains_key("grpc-status"));
    }
}

#[tokio::test]
async fn an_unresolved_backend_refuses_its_share_of_grpc_requests() {
    let origin = http2::origin(serve).await;
    let setup = EngineSetup {
        protocol: AppProtocol::Grpc,
        ..EngineSetup::default()
    };
    let fixture = GatewayFixture::new(setup, &[origin.address]);
    fixture.apply(rules());
    let client = http2::connect(&fixture).await;
    let mut refused = 0;
    for _ in 0..200 {
        let result = call(
            &client,
            "/shop.Cart/Half",
            &[("content-type", "application/grpc")],
        )
        .await;
        if !result.has_succeeded() {
            assert_eq!(result.trailers_only(), UNAVAILABLE);
            refused += 1;
        }
    }
    assert!((50..150).contains(&refused), "{refused} of 200");
}

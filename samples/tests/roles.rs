//! Tests every role against its counterpart on loopback. Servers run in the test's runtime; clients
//! run like in the binary.

use std::future::Future;
use std::net::SocketAddr;

use canal_samples::answer::SampleResponse;
use canal_samples::bookinfo::{details, productpage::ProductPage, ratings, reviews::Reviews};
use canal_samples::listen::{bind, serve};
use canal_samples::outbound::UpstreamService;
use canal_samples::pod::PodName;
use canal_samples::{
    blob, blob_client, echo_rpc, grpc_client, load, tcp, tcp_client, ws, ws_client,
};
use clap::{Args, FromArgMatches};
use http::Request;
use hyper::body::Incoming;
use serde_json::Value;
use tokio::sync::watch;

/// The servers of a test. They end when this value is dropped.
struct Servers(watch::Sender<bool>);

impl Servers {
    fn new() -> Self {
        Self(watch::channel(false).0)
    }
    /// Serves on a free port, and returns the port.
    fn start<F, Fut>(&self, handler: F) -> u16
    where
        F: Fn(Request<Incoming>, SocketAddr) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = SampleResponse> + Send + 'static,
    {
        let listener = bind(0).unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(serve(listener, self.0.subscribe(), handler));
        port
    }
}

fn pod(service: &str, version: &str) -> PodName {
    PodName {
        service: service.into(),
        version: version.into(),
        name: format!("{service}-{version}-0"),
    }
}

/// Parses a role's arguments as the command line does.
fn args<A: Args + FromArgMatches>(line: &str) -> A {
    let command = A::augment_args(clap::Command::new("role")).no_binary_name(true);
    A::from_arg_matches(&command.get_matches_from(line.split_whitespace())).unwrap()
}

fn check(name: &str, report: anyhow::Result<Value>) -> Value {
    let report = report.unwrap_or_else(|problem| panic!("{name}: {problem:#}"));
    assert_eq!(report["ok"], true, "{name}: {report:#}");
    report
}

fn upstream(port: u16) -> UpstreamService {
    UpstreamService::new(&format!("http://127.0.0.1:{port}"), None).unwrap()
}

/// Starts the four services, and returns the port of the page.
fn bookinfo(servers: &Servers, version: &'static str) -> u16 {
    let ratings =
        servers.start(|r, _| std::future::ready(ratings::answer(&pod("ratings", "v1"), &r)));
    let details =
        servers.start(|r, _| std::future::ready(details::answer(&pod("details", "v1"), &r)));
    let reviews = Reviews::new(
        pod("reviews", version),
        (version != "v1").then(|| upstream(ratings)),
    );
    let reviews = servers.start(move |r, _| {
        let reviews = reviews.clone();
        async move { pod("reviews", version).signed(reviews.answer(r).await) }
    });
    let page = ProductPage {
        pod: pod("productpage", "v1"),
        details: upstream(details),
        reviews: upstream(reviews),
    };
    servers.start(move |r, _| {
        let page = page.clone();
        async move { page.pod.signed(page.answer(r).await) }
    })
}

#[tokio::test]
async fn bookinfo_calls_through_all_four_services() {
    let servers = Servers::new();
    for (version, stars) in [
        ("v1", Value::Null),
        ("v2", "black".into()),
        ("v3", "red".into()),
    ] {
        let page = upstream(bookinfo(&servers, version));
        let reply = page
            .get("/productpage", &http::HeaderMap::new())
            .await
            .unwrap();
        assert_eq!(reply.status, 200, "{version}: {}", reply.json);
        assert_eq!(reply.served_by.as_deref(), Some("productpage-v1"));
        assert_eq!(reply.json["reviews"]["version"], version);
        assert_eq!(
            reply.json["reviews"]["reviews"][0]["rating"]["color"], stars,
            "{version}"
        );
        assert_eq!(reply.json["details"]["pod"], "details-v1-0");
    }
}

#[tokio::test]
async fn a_removed_service_yields_502_upstream() {
    let servers = Servers::new();
    let details =
        servers.start(|r, _| std::future::ready(details::answer(&pod("details", "v1"), &r)));
    let page = ProductPage {
        pod: pod("productpage", "v1"),
        details: upstream(details),
        reviews: upstream(1),
    };
    let answer = page
        .answer(Request::get("/productpage").body(()).unwrap())
        .await;
    assert_eq!(answer.status(), 502);
}

#[tokio::test]
async fn load_counts_successes_by_version_over_both_families() {
    let servers = Servers::new();
    let port = bookinfo(&servers, "v2");
    for (name, line, want) in [
        (
            "closed loop",
            format!(
                "http://127.0.0.1:{port}/productpage http://[::1]:{port}/productpage -n 200 -c 4"
            ),
            200,
        ),
        (
            "open loop",
            format!("http://127.0.0.1:{port}/productpage -r 200 -d 0.5 -c 4 --timeline"),
            100,
        ),
        (
            "http2",
            format!("http://127.0.0.1:{port}/productpage -n 50 --protocol h2"),
            50,
        ),
        (
            "no keep-alive",
            format!("http://127.0.0.1:{port}/productpage -n 20 --no-keepalive"),
            20,
        ),
    ] {
        let line = format!("{line} --served-by x-reviews-served-by");
        let report = check(name, load::run(&args(&line)).await);
        assert_eq!(report["succeeded"], want, "{name}: {report:#}");
        assert_eq!(
            report["served_by"]["reviews-v2"], want,
            "{name}: {report:#}"
        );
    }
}

#[tokio::test]
async fn load_counts_every_failure_by_kind() {
    let servers = Servers::new();
    let blob = servers.start(|r, p| blob::answer(pod("blob", "v1"), r, p));
    let reset = bind(0).unwrap();
    let reset_port = reset.local_addr().unwrap().port();
    tokio::spawn(tcp::serve(
        reset,
        tcp::TcpServerMode::Reset,
        servers.0.subscribe(),
    ));
    for (line, kind) in [
        (
            format!("http://127.0.0.1:{blob}/status/503 -n 10"),
            "status_503",
        ),
        ("http://127.0.0.1:1/ -n 10".to_owned(), "connect"),
        (format!("http://127.0.0.1:{reset_port}/ -n 10"), "reset"),
        (
            format!("http://127.0.0.1:{blob}/delay?ms=5000 -n 4 --timeout-ms 100"),
            "timeout",
        ),
    ] {
        let report = load::run(&args(&line)).await.unwrap();
        let wanted = report["requests"].as_u64().unwrap();
        assert_eq!(report["ok"], false, "{line}");
        assert_eq!(report["failed_by_kind"][kind], wanted, "{line}: {report:#}");
    }
}

#[tokio::test]
async fn grpc_carries_all_shapes_statuses_and_metadata() {
    let servers = Servers::new();
    let service = echo_rpc::EchoService::new(pod("echo", "v1"));
    let port = servers.start(move |r, _| service.clone().answer(r));
    for line in [
        "--mode unary --count 3",
        "--mode unary --size 3000000",
        "--mode server-stream --count 20 --size 1000",
        "--mode client-stream --count 20 --size 100000",
        "--mode bidi --count 50 --size 10000",
        "--mode unary --status 5",
        "--mode server-stream --count 3 --status 13",
        "--mode client-stream --count 3 --status 8",
        "--mode bidi --count 3 --status 10",
    ] {
        check(
            line,
            grpc_client::run(&args(&format!("127.0.0.1:{port} {line}"))).await,
        );
    }
    let report = check(
        "metadata",
        grpc_client::run(&args(&format!("[::1]:{port} --metadata x-echo-a=b"))).await,
    );
    assert_eq!(report["headers"]["x-echo-a"], "b");
    let late = grpc_client::run(&args(&format!(
        "127.0.0.1:{port} --delay-ms 5000 --timeout-ms 100 --status 4"
    )))
    .await
    .unwrap();
    assert_eq!(late["status"], 4, "{late:#}");
}

#[tokio::test]
async fn websocket_echoes_both_kinds_and_closes_cleanly() {
    let servers = Servers::new();
    let port = servers.start(|r, _| ws::answer(pod("ws", "v1"), r));
    for line in [
        "--count 20",
        "--count 3 --size 0",
        "--count 4 --size 2000000",
    ] {
        let report = check(
            line,
            ws_client::run(&args(&format!("ws://127.0.0.1:{port}/chat {line}"))).await,
        );
        assert_eq!(report["served_by"], "ws-v1");
    }
    let health = upstream(port)
        .get("/health", &http::HeaderMap::new())
        .await
        .unwrap();
    assert_eq!(health.status, 200);
}

#[tokio::test]
async fn blobs_are_byte_exact_in_every_framing() {
    let servers = Servers::new();
    let port = servers.start(|r, p| blob::answer(pod("blob", "v1"), r, p));
    for protocol in ["h1", "h2"] {
        for mode in ["get", "put", "echo"] {
            for framing in ["length", "chunked", "trailers"] {
                for size in [0, 1, 3_000_001] {
                    let line = format!(
                        "http://127.0.0.1:{port} --protocol {protocol} --mode {mode} --framing {framing} --size {size} --seed 9"
                    );
                    check(&line, blob_client::run(&args(&line)).await);
                }
            }
        }
    }
}

#[tokio::test]
async fn tcp_streams_end_in_every_way() {
    let servers = Servers::new();
    for mode in ["echo", "drain", "greet", "source", "reset"] {
        let listener = bind(0).unwrap();
        let port = listener.local_addr().unwrap().port();
        let mode_value = <tcp::TcpServerMode as clap::ValueEnum>::from_str(mode, false).unwrap();
        tokio::spawn(tcp::serve(listener, mode_value, servers.0.subscribe()));
        for (host, size) in [("127.0.0.1", 0), ("[::1]", 5_000_000)] {
            let line = format!("{host}:{port} --mode {mode} --size {size}");
            check(&line, tcp_client::run(&args(&line)).await);
        }
    }
}

#[tokio::test]
async fn a_server_that_does_not_read_stops_its_client() {
    let servers = Servers::new();
    let listener = bind(0).unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(tcp::serve(
        listener,
        tcp::TcpServerMode::Stall,
        servers.0.subscribe(),
    ));
    let line = format!("127.0.0.1:{port} --mode stall --size 1000000000");
    check(&line, tcp_client::run(&args(&line)).await);
}

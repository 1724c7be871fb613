//! The step of the demo in which real clients of every protocol send requests over both IP
//! families. It changes nothing in the mesh.

use crate::demo::demo_world::{DemoWorld, client};
use crate::demo::screen::Expectation;
use crate::exit::VerbResult;

/// Returns a service's address in `demo/`, which is the same in all tenants: `[fd00:101::10]:9080`
/// or `10.101.0.10:9080`.
pub(crate) fn at(v6: bool, service: u8, port: u16) -> String {
    if v6 {
        format!("[{}]:{port}", host(v6, service))
    } else {
        format!("{}:{port}", host(v6, service))
    }
}

fn host(v6: bool, service: u8) -> String {
    if v6 {
        format!("fd00:101::{service}")
    } else {
        format!("10.101.0.{service}")
    }
}

/// Numbers of the services in `demo/*/services.yaml`.
pub(crate) const PAGE: u8 = 10;
/// Number of a service that calls no other one, and names its tenant in `x-served-by`.
pub(crate) const DETAILS: u8 = 11;
/// Number of the service that calls `ratings`.
pub(crate) const REVIEWS: u8 = 12;
/// Number of the service that echoes gRPC.
const ECHO: u8 = 31;
/// Number of the service for WebSockets.
const WS: u8 = 32;
/// Number of the service that speaks Redis' protocol, which is plain TCP for the mesh.
const REDIS: u8 = 33;

/// Returns the name of the IP family for messages.
pub(crate) fn family(v6: bool) -> &'static str {
    if v6 { "IPv6" } else { "IPv4" }
}

pub(crate) async fn run(world: &DemoWorld) -> VerbResult<Vec<Expectation>> {
    let mut expectations = Vec::new();
    for (tenant, v6) in [
        ("alpha", false),
        ("alpha", true),
        ("beta", false),
        ("beta", true),
    ] {
        expectations.push(page(world, tenant, v6).await?);
    }
    for (tenant, v6) in [("alpha", false), ("beta", true)] {
        expectations.push(grpc(world, tenant, v6).await?);
        expectations.push(websocket(world, tenant, v6).await?);
        expectations.push(redis(world, tenant, v6).await?);
    }
    Ok(expectations)
}

async fn page(world: &DemoWorld, tenant: &str, v6: bool) -> VerbResult<Expectation> {
    let url = format!("http://{}/productpage", at(v6, PAGE, 9080));
    let argv = [
        "curl",
        "-sS",
        "--fail-with-body",
        "--max-time",
        "10",
        "-g",
        &url,
    ];
    let output = world.run(&client(tenant), &argv).await?;
    let page: serde_json::Value = serde_json::from_str(&output.stdout).unwrap_or_default();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or("?").to_owned();
    let own = page["details"]["version"] == tenant;
    let is_met = output.code == Some(0)
        && own
        && page["details"]["title"].is_string()
        && page["reviews"]["reviews"].is_array();
    let seen = match is_met {
        true => format!(
            "page by {}, details by {} of {}, reviews by {}",
            text(&page["pod"]),
            text(&page["details"]["pod"]),
            text(&page["details"]["version"]),
            text(&page["reviews"]["pod"])
        ),
        false => output.brief(),
    };
    Ok(Expectation::new(
        is_met,
        format!(
            "{tenant}: curl gets its own book's page at {}",
            at(v6, PAGE, 9080)
        ),
        seen,
    ))
}

async fn grpc(world: &DemoWorld, tenant: &str, v6: bool) -> VerbResult<Expectation> {
    let address = at(v6, ECHO, 9000);
    let mut seen = Vec::new();
    let mut is_met = true;
    for (mode, extra) in [
        // A stream carries several messages; unary makes several calls. The numbers were chosen.
        ("unary", ["--count", "5"]),
        ("server-stream", ["--count", "20"]),
        ("client-stream", ["--count", "20"]),
        ("bidi", ["--count", "20"]),
        // Status 9 (FAILED_PRECONDITION) shows that trailers pass unchanged.
        ("unary", ["--status", "9"]),
    ] {
        let argv = [
            "canal-samples",
            "grpc-client",
            &address,
            "--mode",
            mode,
            extra[0],
            extra[1],
        ];
        let report = world.report(&client(tenant), &argv).await?;
        is_met &= report["ok"] == true;
        let outcome = if report["ok"] == true {
            format!("{} messages", report["messages"])
        } else {
            report["message"].to_string()
        };
        seen.push(if extra[0] == "--status" {
            format!("status {} in trailers", report["status"])
        } else {
            format!("{mode} {outcome}")
        });
    }
    Ok(Expectation::new(
        is_met,
        format!(
            "{tenant}: gRPC of all four shapes, and a status code, over {}",
            family(v6)
        ),
        seen.join(", "),
    ))
}

async fn websocket(world: &DemoWorld, tenant: &str, v6: bool) -> VerbResult<Expectation> {
    let url = format!("ws://{}/chat", at(v6, WS, 8081));
    let argv = ["canal-samples", "ws-client", &url, "--count", "50"];
    let report = world.report(&client(tenant), &argv).await?;
    let seen = format!(
        "{} of 50 echoed, pong {}, closed with {}",
        report["echoed"], report["pong"], report["close_code"]
    );
    Ok(Expectation::new(
        report["ok"] == true,
        format!(
            "{tenant}: a WebSocket echoes 50 messages and closes cleanly over {}",
            family(v6)
        ),
        seen,
    ))
}

async fn redis(world: &DemoWorld, tenant: &str, v6: bool) -> VerbResult<Expectation> {
    let host = host(v6, REDIS);
    let redis = |words: &[&str]| {
        let argv: Vec<String> = ["redis-cli", "-h", &host, "-p", "6379"]
            .iter()
            .chain(words)
            .map(|w| (*w).to_owned())
            .collect();
        async move {
            let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
            world.run(&client(tenant), &argv).await
        }
    };
    let set = redis(&["SET", "book", "The Comedy of Errors"]).await?;
    let got = redis(&["GET", "book"]).await?;
    let is_met = set.stdout.trim() == "OK" && got.stdout.trim() == "The Comedy of Errors";
    Ok(Expectation::new(
        is_met,
        format!(
            "{tenant}: redis-cli sets and gets a value over {}",
            family(v6)
        ),
        format!("SET: {}, GET: {}", set.brief(), got.brief()),
    ))
}

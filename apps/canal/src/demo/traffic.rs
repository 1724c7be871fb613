//! Step: real clients of every protocol, over both IP families.

use crate::demo::screen::Promise;
use crate::demo::stage::{Stage, client};
use crate::exit::Outcome;

/// Service addresses of a tenant in `demo/`: both end alike.
pub(crate) struct Addresses {
    v4: String,
    v6: String,
}

/// Of `alpha` or `beta`.
pub(crate) fn addresses(tenant: &str) -> Addresses {
    let number = if tenant == "alpha" { 101 } else { 102 };
    Addresses { v4: format!("10.{number}.0."), v6: format!("fd00:{number}::") }
}

impl Addresses {
    /// `[fd00:101::10]:9080` or `10.101.0.10:9080`.
    pub(crate) fn at(&self, v6: bool, service: u8, port: u16) -> String {
        let Self { v4, v6: prefix } = self;
        if v6 { format!("[{prefix}{service}]:{port}") } else { format!("{v4}{service}:{port}") }
    }

    fn host(&self, v6: bool, service: u8) -> String {
        if v6 { format!("{}{service}", self.v6) } else { format!("{}{service}", self.v4) }
    }
}

/// Numbers of the services in `demo/*/services.yaml`.
pub(crate) const PAGE: u8 = 10;
pub(crate) const REVIEWS: u8 = 12;
const ECHO: u8 = 31;
const WS: u8 = 32;
const REDIS: u8 = 33;

fn family(v6: bool) -> &'static str {
    if v6 { "IPv6" } else { "IPv4" }
}

pub(crate) async fn run(stage: &Stage) -> Outcome<Vec<Promise>> {
    let mut promises = Vec::new();
    for (tenant, v6) in [("alpha", false), ("alpha", true), ("beta", false), ("beta", true)] {
        promises.push(page(stage, tenant, v6).await?);
    }
    for (tenant, v6) in [("alpha", false), ("beta", true)] {
        promises.push(grpc(stage, tenant, v6).await?);
        promises.push(websocket(stage, tenant, v6).await?);
        promises.push(redis(stage, tenant, v6).await?);
    }
    Ok(promises)
}

async fn page(stage: &Stage, tenant: &str, v6: bool) -> Outcome<Promise> {
    let url = format!("http://{}/productpage", addresses(tenant).at(v6, PAGE, 9080));
    let argv = ["curl", "-sS", "--fail-with-body", "--max-time", "10", "-g", &url];
    let said = stage.run(&client(tenant), &argv).await?;
    let page: serde_json::Value = serde_json::from_str(&said.stdout).unwrap_or_default();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or("?").to_owned();
    let held = said.code == Some(0) && page["details"]["title"].is_string() && page["reviews"]["reviews"].is_array();
    let seen = match held {
        true => format!(
            "page by {}, details by {}, reviews by {}",
            text(&page["pod"]),
            text(&page["details"]["pod"]),
            text(&page["reviews"]["pod"])
        ),
        false => said.brief(),
    };
    Ok(Promise::new(held, format!("{tenant}: curl gets the book's page over {}", family(v6)), seen))
}

async fn grpc(stage: &Stage, tenant: &str, v6: bool) -> Outcome<Promise> {
    let address = addresses(tenant).at(v6, ECHO, 9000);
    let mut seen = Vec::new();
    let mut held = true;
    for (mode, extra) in [
        ("unary", ["--count", "5"]),
        ("server-stream", ["--count", "20"]),
        ("client-stream", ["--count", "20"]),
        ("bidi", ["--count", "20"]),
        ("unary", ["--status", "9"]),
    ] {
        let argv = ["canal-samples", "grpc-client", &address, "--mode", mode, extra[0], extra[1]];
        let report = stage.report(&client(tenant), &argv).await?;
        held &= report["ok"] == true;
        let outcome = if report["ok"] == true { format!("{} messages", report["messages"]) } else { report["message"].to_string() };
        seen.push(if extra[0] == "--status" { format!("status {} in trailers", report["status"]) } else { format!("{mode} {outcome}") });
    }
    Ok(Promise::new(held, format!("{tenant}: gRPC of all four shapes, and a status code, over {}", family(v6)), seen.join(", ")))
}

async fn websocket(stage: &Stage, tenant: &str, v6: bool) -> Outcome<Promise> {
    let url = format!("ws://{}/chat", addresses(tenant).at(v6, WS, 8081));
    let argv = ["canal-samples", "ws-client", &url, "--count", "50"];
    let report = stage.report(&client(tenant), &argv).await?;
    let seen = format!("{} of 50 echoed, pong {}, closed with {}", report["echoed"], report["pong"], report["close_code"]);
    Ok(Promise::new(report["ok"] == true, format!("{tenant}: a WebSocket echoes 50 messages and closes cleanly over {}", family(v6)), seen))
}

async fn redis(stage: &Stage, tenant: &str, v6: bool) -> Outcome<Promise> {
    let host = addresses(tenant).host(v6, REDIS);
    let redis = |words: &[&str]| {
        let argv: Vec<String> = ["redis-cli", "-h", &host, "-p", "6379"].iter().chain(words).map(|w| (*w).to_owned()).collect();
        async move {
            let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
            stage.run(&client(tenant), &argv).await
        }
    };
    let set = redis(&["SET", "book", "The Comedy of Errors"]).await?;
    let got = redis(&["GET", "book"]).await?;
    let held = set.stdout.trim() == "OK" && got.stdout.trim() == "The Comedy of Errors";
    Ok(Promise::new(
        held,
        format!("{tenant}: redis-cli sets and gets a value over {}", family(v6)),
        format!("SET: {}, GET: {}", set.brief(), got.brief()),
    ))
}

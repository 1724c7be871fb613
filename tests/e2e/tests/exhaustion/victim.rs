//! Beta, watched: requests on kept connections, new connections with a new handshake each, and its data planes' calls of the controller.

use std::fmt;
use std::time::{Duration, Instant};

use canal_e2e::controller::Caller;
use canal_e2e::credential::request;
use canal_e2e::hbone::{Tunnel, load};

use super::stage::{BETA, BETA_NODE, BETA_OPERATOR, BETA_WEB, GATEWAY, Stage};

/// Requests per second on kept connections.
const RATE: u32 = 60;
/// A request that takes longer has failed.
const REQUEST_TIMEOUT_MS: u32 = 2000;
/// The 99th percentile of beta's requests stays under this. Attackers and victim share two cores here, so it is a bound against starvation;
/// the ratio to quiet is measured by a bench with cores of its own.
const P99_MAX: Duration = Duration::from_millis(1000);
/// A call of the controller that takes longer has failed.
const CALL_MAX: Duration = Duration::from_secs(4);
/// Between two calls of the controller.
const CALL_INTERVAL: Duration = Duration::from_millis(700);

/// What beta saw.
#[derive(Debug, Clone)]
pub(super) struct Watch {
    requests: u64,
    failed_requests: u64,
    p50: Duration,
    p99: Duration,
    handshakes: u64,
    failed_handshakes: Vec<String>,
    calls: u64,
    failed_calls: Vec<String>,
}

impl Watch {
    /// Watches beta for this long.
    pub(super) fn run(stage: &Stage, lasts: Duration) -> Self {
        std::thread::scope(|scope| {
            let requests = scope.spawn(|| requests(stage, lasts));
            let handshakes = scope.spawn(|| handshakes(stage, lasts));
            let calls = scope.spawn(|| calls(stage, lasts));
            let (all, failed_requests, p50, p99) = requests.join().expect("the requests end");
            let (reached, failed_handshakes) = handshakes.join().expect("the handshakes end");
            let (calls, failed_calls) = calls.join().expect("the calls end");
            let handshakes = reached + failed_handshakes.len() as u64;
            Self { requests: all, failed_requests, p50, p99, handshakes, failed_handshakes, calls, failed_calls }
        })
    }

    /// What beta suffered, if it did.
    pub(super) fn complaint(&self) -> Option<String> {
        let lost = |failed: u64, all: u64| failed * 100 > all;
        if self.requests == 0 || self.handshakes == 0 || self.calls == 0 {
            return Some("beta's own load did not run".to_owned());
        }
        if lost(self.failed_requests, self.requests) {
            return Some("more than 1 % of beta's requests failed".to_owned());
        }
        if self.p99 > P99_MAX {
            return Some(format!("beta's 99th percentile is over {P99_MAX:?}"));
        }
        if lost(self.failed_handshakes.len() as u64, self.handshakes) {
            return Some(format!("more than 1 % of beta's new connections failed: {:?}", self.failed_handshakes.first()));
        }
        (!self.failed_calls.is_empty()).then(|| format!("beta's calls of the controller failed: {:?}", self.failed_calls))
    }
}

impl fmt::Display for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "beta: {} of {} requests failed, p50 {:?}, p99 {:?}; {} of {} handshakes failed; {} of {} calls failed",
            self.failed_requests,
            self.requests,
            self.p50,
            self.p99,
            self.failed_handshakes.len(),
            self.handshakes,
            self.failed_calls.len(),
            self.calls
        )
    }
}

fn requests(stage: &Stage, lasts: Duration) -> (u64, u64, Duration, Duration) {
    let url = format!("http://{BETA_WEB}/blob?size=100");
    let (rate, seconds, timeout) = (RATE.to_string(), lasts.as_secs_f64().to_string(), REQUEST_TIMEOUT_MS.to_string());
    let argv = ["canal-samples", "load", &url, "-c", "4", "--rate", &rate, "--duration", &seconds, "--timeout-ms", &timeout];
    let report = stage.mesh.run(BETA, &argv).json();
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or(f64::NAN);
    let ms = |name: &str| Duration::from_secs_f64((number(&report["latency_ms"][name]) / 1000.0).max(0.0));
    (report["requests"].as_u64().unwrap_or(0), report["failed"].as_u64().unwrap_or(0), ms("p50"), ms("p99"))
}

fn handshakes(stage: &Stage, lasts: Duration) -> (u64, Vec<String>) {
    let credential = stage.member("beta", "client");
    let gateway = GATEWAY.parse().expect("an address");
    let web = stage.web("beta");
    let tunnel = Tunnel::new(BETA, gateway, Some(&credential), &web);
    let load = load(&stage.mesh.world, &tunnel, 1, lasts.as_secs().max(1));
    (load.reached, load.failed.iter().map(|failed| format!("{failed:?}")).collect())
}

/// A certificate for beta's node, and a look of beta's operator, in turn.
fn calls(stage: &Stage, lasts: Duration) -> (u64, Vec<String>) {
    let (began, mut calls, mut failed) = (Instant::now(), 0, Vec::new());
    let node = Caller::as_itself(&stage.mesh.world, "beta-n1");
    let operator = Caller::with_token(&stage.mesh.world, "beta-n1", BETA_OPERATOR);
    while began.elapsed() < lasts {
        let started = Instant::now();
        let answer = if calls % 2 == 0 {
            node.certificate(BETA_NODE, &request(&[BETA_NODE]), None).map(drop)
        } else {
            operator.get("beta").map(drop)
        };
        calls += 1;
        match answer {
            Err(status) => failed.push(status.to_string()),
            Ok(()) if started.elapsed() > CALL_MAX => failed.push(format!("took {:?}", started.elapsed())),
            Ok(()) => {}
        }
        std::thread::sleep(CALL_INTERVAL);
    }
    (calls, failed)
}

//! Watches beta: requests on persistent connections, new connections with a new handshake each, and
//! its data planes' calls of the controller.

use std::fmt;
use std::time::{Duration, Instant};

use canal_e2e::controller::Caller;
use canal_e2e::credential::request;
use canal_e2e::deadline_ms;
use canal_e2e::hbone::{TunnelRequest, load, tunnel};

use super::exhaustion_world::{BETA, BETA_NODE, BETA_OPERATOR, BETA_WEB, ExhaustionWorld, GATEWAY};

/// Requests per second on persistent connections. Enough for a 99th percentile of some seconds, and
/// little beside an attacker on two cores.
const RATE: u32 = 60;
/// A request that takes longer has failed. Twice `P99_MAX`, so that a request that failed is one
/// that starved.
const REQUEST_TIMEOUT_MS: u32 = 2000;
/// Maximum of the 99th percentile of beta's requests. Attacker and victim share two cores here, so
/// this detects starvation only; a bench with its own cores measures the ratio to an idle machine.
pub(super) const P99_MAX: Duration = Duration::from_millis(1000);
/// A call of the controller that takes longer has failed. The caller's own timeout is longer, so
/// that a slow call is found by name. Nobody measured the value.
const CALL_MAX: Duration = Duration::from_secs(4);
/// Interval between two calls of the controller. Below the second that the shortest case lasts, so
/// that each has at least one call.
const CALL_INTERVAL: Duration = Duration::from_millis(700);

/// Observations of the victim, tenant beta, during the attack.
#[derive(Debug, Clone)]
pub(super) struct VictimWatch {
    requests: u64,
    failed_requests: u64,
    p50: Duration,
    p99: Duration,
    handshakes: u64,
    failed_handshakes: Vec<String>,
    calls: u64,
    failed_calls: Vec<String>,
}

impl VictimWatch {
    /// Watches beta for this long.
    pub(super) fn run(setup: &ExhaustionWorld, lasts: Duration) -> Self {
        std::thread::scope(|scope| {
            let requests = scope.spawn(|| requests(setup, lasts));
            let handshakes = scope.spawn(|| handshakes(setup, lasts));
            let calls = scope.spawn(|| calls(setup, lasts));
            let (all, failed_requests, p50, p99) = requests.join().expect("the requests end");
            let (reached, failed_handshakes) = handshakes.join().expect("the handshakes end");
            let (calls, failed_calls) = calls.join().expect("the calls end");
            let handshakes = reached + failed_handshakes.len() as u64;
            Self {
                requests: all,
                failed_requests,
                p50,
                p99,
                handshakes,
                failed_handshakes,
                calls,
                failed_calls,
            }
        })
    }

    /// Returns the 99th percentile of beta's requests.
    pub(super) fn p99(&self) -> Duration {
        self.p99
    }

    /// Returns the harm to beta, if any, apart from [`Self::p99`].
    pub(super) fn complaint(&self) -> Option<String> {
        let lost = |failed: u64, all: u64| failed * 100 > all;
        if self.requests == 0 || self.handshakes == 0 || self.calls == 0 {
            return Some("beta's own load did not run".to_owned());
        }
        if lost(self.failed_requests, self.requests) {
            return Some("more than 1 % of beta's requests failed".to_owned());
        }
        if lost(self.failed_handshakes.len() as u64, self.handshakes) {
            return Some(format!(
                "more than 1 % of beta's new connections failed: {:?}",
                self.failed_handshakes.first()
            ));
        }
        (!self.failed_calls.is_empty()).then(|| {
            format!(
                "beta's calls of the controller failed: {:?}",
                self.failed_calls
            )
        })
    }
}

/// Asserts that all of beta's clients get their responses within long timeouts: requests on
/// persistent connections, new connections with a handshake each, and calls of the controller.
pub(super) fn assert_served(setup: &ExhaustionWorld, attack: &str) {
    let (url, timeout) = (
        format!("http://{BETA_WEB}/blob?size=100"),
        deadline_ms(CALL_MAX),
    );
    let argv = [
        "canal-samples",
        "load",
        &url,
        "-c",
        "2",
        "-n",
        "20",
        "--timeout-ms",
        &timeout,
    ];
    // Few requests on two connections: the test asks if anyone is starved, not how fast beta is.
    let report = setup.mesh.run(BETA, &argv).json();
    assert_eq!(
        (&report["succeeded"], &report["failed"]),
        (&20.into(), &0.into()),
        "{attack}: beta's requests: {report}"
    );
    // Each of these is a handshake, of which an unoptimized build makes few.
    let (credential, web) = (setup.member("beta", "client"), setup.web("beta"));
    for _ in 0..3 {
        let opened = tunnel(
            &setup.mesh.world,
            &TunnelRequest::new(BETA, setup.gateway(), Some(&credential), &web),
        );
        assert!(
            opened.reached(),
            "{attack}: a new connection of beta's: {opened:?}"
        );
    }
    // The controller must serve beta's nodes and operators too.
    let node = Caller::as_itself(&setup.mesh.world, "beta-n1");
    let issued = node.certificate(BETA_NODE, &request(&[BETA_NODE]), None);
    assert!(
        issued.is_ok(),
        "{attack}: a certificate of beta's: {issued:?}"
    );
    let read = Caller::with_token(&setup.mesh.world, "beta-n1", BETA_OPERATOR).get("beta");
    assert!(read.is_ok(), "{attack}: beta's operator: {read:?}");
}

impl fmt::Display for VictimWatch {
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

fn requests(setup: &ExhaustionWorld, lasts: Duration) -> (u64, u64, Duration, Duration) {
    let url = format!("http://{BETA_WEB}/blob?size=100");
    let (rate, seconds, timeout) = (
        RATE.to_string(),
        lasts.as_secs_f64().to_string(),
        REQUEST_TIMEOUT_MS.to_string(),
    );
    let argv = [
        "canal-samples",
        "load",
        &url,
        "-c",
        "4",
        "--rate",
        &rate,
        "--duration",
        &seconds,
        "--timeout-ms",
        &timeout,
    ];
    let report = setup.mesh.run(BETA, &argv).json();
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or(f64::NAN);
    let ms = |name: &str| {
        Duration::from_secs_f64((number(&report["latency_ms"][name]) / 1000.0).max(0.0))
    };
    (
        report["requests"].as_u64().unwrap_or(0),
        report["failed"].as_u64().unwrap_or(0),
        ms("p50"),
        ms("p99"),
    )
}

fn handshakes(setup: &ExhaustionWorld, lasts: Duration) -> (u64, Vec<String>) {
    let credential = setup.member("beta", "client");
    let gateway = GATEWAY.parse().expect("an address");
    let web = setup.web("beta");
    let tunnel = TunnelRequest::new(BETA, gateway, Some(&credential), &web);
    let load = load(&setup.mesh.world, &tunnel, 1, lasts.as_secs().max(1));
    (
        load.reached,
        load.failed
            .iter()
            .map(|failed| format!("{failed:?}"))
            .collect(),
    )
}

/// Alternates between a certificate request of beta's node and a read of beta's operator.
fn calls(setup: &ExhaustionWorld, lasts: Duration) -> (u64, Vec<String>) {
    let (began, mut calls, mut failed) = (Instant::now(), 0, Vec::new());
    let node = Caller::as_itself(&setup.mesh.world, "beta-n1");
    let operator = Caller::with_token(&setup.mesh.world, "beta-n1", BETA_OPERATOR);
    while began.elapsed() < lasts {
        let started = Instant::now();
        let answer = if calls % 2 == 0 {
            node.certificate(BETA_NODE, &request(&[BETA_NODE]), None)
                .map(drop)
        } else {
            operator.get("beta").map(drop)
        };
        calls += 1;
        match answer {
            Err(status) => failed.push(status.to_string()),
            Ok(()) if started.elapsed() > CALL_MAX => {
                failed.push(format!("took {:?}", started.elapsed()))
            }
            Ok(()) => {}
        }
        std::thread::sleep(CALL_INTERVAL);
    }
    (calls, failed)
}

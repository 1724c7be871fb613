//! Alpha exhausts the gateway's CPU and memory by requests and packets that its own members may
//! send.

use std::time::Duration;

use super::ExhaustionCase;
use super::exhaustion_world::{ALPHA, ALPHA_WEB, ExhaustionWorld};

/// Alpha's client sends as fast as it can over this many connections. Returns the number of
/// requests.
fn load(
    setup: &ExhaustionWorld,
    lasts: Duration,
    connections: usize,
    path: &str,
    more: &[&str],
) -> u64 {
    let url = format!("http://{ALPHA_WEB}{path}");
    let (connections, seconds) = (connections.to_string(), lasts.as_secs_f64().to_string());
    let argv = [
        "canal-samples",
        "load",
        &url,
        "-c",
        &connections,
        "--duration",
        &seconds,
        "--timeout-ms",
        "1500",
    ];
    let argv: Vec<&str> = argv.into_iter().chain(more.iter().copied()).collect();
    setup.mesh.run(ALPHA, &argv).json()["requests"]
        .as_u64()
        .unwrap_or(0)
}

fn flood(
    name: &'static str,
    tries_min: u64,
    connections: usize,
    path: &'static str,
    more: &'static [&'static str],
) -> ExhaustionCase {
    ExhaustionCase::new(name, tries_min, move |setup, lasts| {
        load(setup, lasts, connections, path, more)
    })
}

/// Sends half a request head on each of many captured connections, which their node's proxy and a
/// gateway hold.
fn half_heads(setup: &ExhaustionWorld, lasts: Duration) -> u64 {
    // The client runs in the pod's cgroup, so that its connections are captured; bash opens a
    // socket with /dev/tcp and holds it.
    let (ip, port) = ALPHA_WEB.split_once(':').expect("an address with a port");
    let script = format!(
        "n=0; for i in $(seq 3 250); do eval \"exec $i<>/dev/tcp/{ip}/{port}\" 2>/dev/null && printf 'GET / HTTP/1.1\\r\\nHost: x\\r\\n' >&$i \
         && n=$((n+1)); done; sleep {}; echo $n",
        (lasts.as_secs_f64() - 1.0).max(0.5)
    );
    setup
        .mesh
        .run(ALPHA, &["bash", "-c", &script])
        .stdout
        .trim()
        .parse()
        .unwrap_or(0)
}

pub(super) fn cases() -> Vec<ExhaustionCase> {
    // The first number is the minimum of requests for the attack to count, the second that of
    // connections. Nobody derived the numbers.
    vec![
        flood(
            "requests as fast as they are answered",
            200,
            64,
            "/blob?size=100",
            &[],
        ),
        flood(
            "requests with a connection each",
            50,
            64,
            "/blob?size=100",
            &["--no-keepalive"],
        ),
        flood(
            "requests of HTTP/2",
            100,
            32,
            "/blob?size=100",
            &["--protocol", "h2"],
        ),
        // 8 MB and 4 MB exceed all windows and buffers, so that the streams stay open.
        flood("large answers", 10, 16, "/blob?size=8000000", &[]),
        flood(
            "large bodies",
            10,
            16,
            "/blob?size=10",
            &["-X", "POST", "--body-size", "4000000"],
        ),
        ExhaustionCase::new("heads of 20 kB", 50, |setup, lasts| {
            // Below the 32 KiB that one field line may have, so that the gateway accepts it.
            let header = format!("x-large: {}", "x".repeat(20_000));
            load(setup, lasts, 32, "/blob?size=10", &["-H", &header])
        }),
        flood("paths that no server has", 100, 32, "/no/such/path", &[]),
        ExhaustionCase::new(
            "half a request head on each captured connection",
            100,
            half_heads,
        ),
    ]
}

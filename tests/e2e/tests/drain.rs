//! A replica of the cloud tier is drained under load from clients with persistent connections. No
//! request is lost, and the replica ends with no session, so that it can be stopped. The clients
//! count the losses; nothing here retries.

use std::time::Duration;

use canal_e2e::{Mesh, deadline_ms, load_while, until};
use canal_timing::{assert_time, deadline, is_timed};
use serde_json::Value;

/// A pod behind a node proxy, and one whose node runs no part of the mesh.
const MESHED: &str = "alpha/default/client-0";
const PROXYLESS: &str = "beta/default/client-0";
/// All replicas of the clients' AZ: some carry node proxies' tunnels, all carry plain connections.
const REPLICAS: [&str; 4] = ["gw-1", "gw-2", "gw-3", "gw-6"];
/// A change of the fleet is visible within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const SETTLED_WITHIN: Duration = Duration::from_secs(20);
/// A drained replica has no session within this time. The soft drain starts after 5 s at the latest
/// (`SOFT_DRAIN_DELAY`), and idle connections close 4 s later.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);
/// A request is answered within this time. The gate waits a minute for it.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// Minimum number of sessions that the drained replicas had together. Nobody derived the number: it
/// only has to show that the drains met the clients' sessions.
const SESSIONS_MIN: u64 = 17;

fn url(n: u32) -> String {
    format!("http://web-{n}.default.svc.cluster.local:80/blob?size=100")
}

fn replicas(mesh: &Mesh) -> Vec<Value> {
    mesh.canal(&["gateway", "list", "-o", "json"]).json()["replicas"]
        .as_array()
        .expect("replicas")
        .clone()
}

fn replica(mesh: &Mesh, name: &str) -> Value {
    replicas(mesh)
        .into_iter()
        .find(|r| r["name"] == name)
        .unwrap_or_else(|| panic!("{name} is not registered"))
}

fn number(of: &Value, field: &str) -> u64 {
    of[field]
        .as_f64()
        .unwrap_or_else(|| panic!("{field} is missing: {of}")) as u64
}

/// Returns the number of sessions of all replicas.
fn sessions(mesh: &Mesh) -> u64 {
    replicas(mesh).iter().map(|r| number(r, "sessions")).sum()
}

#[test]
fn a_drained_replica_ends_with_no_sessions() {
    let mesh = Mesh::up("tier.yaml", "e2e-drain");
    // Services become reachable one by one; a request to one that is not would count as lost.
    for client in [MESHED, PROXYLESS] {
        until(
            deadline(SETTLED_WITHIN),
            &format!("{client} reaches every service"),
            // Each tenant has four services of HTTP (`tier.yaml`).
            || (0..4).all(|n| mesh.code(client, &url(n), &[]) == 200),
        );
    }
    // The four services of HTTP of each tenant.
    let urls: Vec<String> = (0..4).map(url).collect();
    let timeout = deadline_ms(ANSWERED_WITHIN);
    let load = |more: &[&'static str]| -> Vec<&str> {
        let all = ["canal-samples", "load", "--timeout-ms", &timeout]
            .into_iter()
            .chain(urls.iter().map(String::as_str));
        all.chain(more.iter().copied()).collect()
    };
    // The timing tier measures losses at a steady rate. In the gate, whose machine may be busy, each
    // connection sends when it was answered.
    let persistent: &[&str] = if is_timed() {
        // A connection sends six times a second, so a loss shows.
        &["-r", "100", "-c", "16", "-d", "40"]
    } else {
        // The load is started again until the drains are over.
        &["-c", "8", "-d", "15"]
    };
    let new: &[&str] = if is_timed() {
        // Each request is a session of its own, so fewer suffice.
        &["-r", "50", "-c", "8", "-d", "20", "--no-keepalive"]
    } else {
        &["-c", "2", "-d", "2", "--no-keepalive"]
    };
    let clients = [(MESHED, load(persistent)), (PROXYLESS, load(persistent))];
    // A drain without sessions would prove nothing.
    let (new_sessions, reports) = load_while(&mesh, &clients, || {
        let had: u64 = REPLICAS
            .iter()
            .map(|name| drained_and_back(&mesh, name))
            .sum();
        assert!(
            had >= SESSIONS_MIN,
            "the clients' sessions were elsewhere: {had}"
        );
        let (name, accepted) = stays_empty(&mesh);
        // Only new connections can reach a replica whose drain was cancelled, so the load keeps
        // none alive.
        let (took, new_sessions) = load_while(&mesh, &[(PROXYLESS, load(new))], || {
            mesh.canal(&["gateway", "undrain", &name]).expect_success();
            until(
                deadline(SETTLED_WITHIN),
                &format!("{name} takes sessions again"),
                || number(&replica(&mesh, &name), "accepted") > accepted,
            )
        });
        assert_time(
            "time until a replica takes sessions after its drain was cancelled",
            took,
            SETTLED_WITHIN,
        );
        new_sessions
    });
    let names = [
        "requests lost behind a node proxy",
        "requests lost without a node proxy",
        "new sessions lost",
    ];
    for (name, reports) in names.into_iter().zip(reports.iter().chain(&new_sessions)) {
        println!(
            "{name}: {} of {}",
            reports.sum("failed"),
            reports.sum("requests")
        );
        reports.assert_none_lost(name);
    }
}

/// Waits until the clients have sessions again, drains a replica and cancels that. Returns the
/// number of its sessions before.
fn drained_and_back(mesh: &Mesh, name: &str) -> u64 {
    until(
        deadline(SETTLED_WITHIN),
        "the clients have sessions",
        || sessions(mesh) >= SESSIONS_MIN,
    );
    let had = drained(mesh, name);
    mesh.canal(&["gateway", "undrain", name]).expect_success();
    until(
        deadline(SETTLED_WITHIN),
        &format!("{name} serves again"),
        || replica(mesh, name)["state"] == "active",
    );
    had
}

/// Tests that a drained replica stays empty while others serve the clients' connections. Returns
/// the replica, which is still drained, and how many sessions it has accepted. It is the busiest
/// replica that receives new sessions without a node proxy: not every service is on every replica,
/// and node proxies keep their tunnels.
fn stays_empty(mesh: &Mesh) -> (String, u64) {
    let heads: Vec<String> = (0..4)
        .flat_map(|n| mesh.heads(&format!("beta/default/web-{n}"), "az1"))
        .collect();
    let busiest = || {
        let all = replicas(mesh)
            .into_iter()
            .filter(|r| heads.iter().any(|name| r["name"] == **name));
        all.max_by_key(|r| number(r, "sessions"))
            .expect("there is a replica")
    };
    until(
        deadline(SETTLED_WITHIN),
        "a replica of these has sessions",
        || number(&busiest(), "sessions") > 0,
    );
    let name = busiest()["name"].as_str().expect("a name").to_owned();
    drained(mesh, &name);
    let empty = replica(mesh, &name);
    std::thread::sleep(Duration::from_secs(3));
    let later = replica(mesh, &name);
    assert_eq!(
        (number(&later, "accepted"), number(&later, "sessions")),
        (number(&empty, "accepted"), 0),
        "{later}"
    );
    until(
        deadline(SETTLED_WITHIN),
        "the sessions are elsewhere",
        || sessions(mesh) >= SESSIONS_MIN,
    );
    (name, number(&later, "accepted"))
}

/// Drains a replica until it has no session, and returns the number of its sessions before.
fn drained(mesh: &Mesh, name: &str) -> u64 {
    let had = number(&replica(mesh, name), "sessions");
    mesh.canal(&["gateway", "drain", name, "--timeout", "0"])
        .expect_success();
    let none_left = || {
        let now = replica(mesh, name);
        now["state"] == "draining" && number(&now, "heads") == 0 && number(&now, "sessions") == 0
    };
    let took = until(
        deadline(SETTLED_WITHIN),
        &format!("{name} has no session"),
        none_left,
    );
    assert_time(
        "time until a drained replica has no session",
        took,
        EMPTY_WITHIN,
    );
    let seconds = deadline(SETTLED_WITHIN).as_secs().to_string();
    let output = mesh
        .canal(&["gateway", "drain", name, "--timeout", &seconds])
        .expect_success();
    println!(
        "{name} had {had} sessions; the last one had left {:.1} s after the order. {}",
        took.as_secs_f64(),
        output.trim()
    );
    had
}

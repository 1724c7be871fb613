//! A replica of the cloud tier is drained under load from clients with persistent connections. No request is lost, and the replica ends
//! with no session, so that it can be stopped. The clients count the losses; nothing here retries.

use std::time::Duration;

use canal_e2e::{Mesh, until};
use serde_json::Value;

/// A pod behind a node proxy, and one whose node runs no part of the mesh.
const MESHED: &str = "alpha/default/client-0";
const PROXYLESS: &str = "beta/default/client-0";
/// A change of the fleet is visible within this time.
const SETTLED_WITHIN: Duration = Duration::from_secs(20);
/// A drained replica has no session within this time.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);

fn url(n: u32) -> String {
    format!("http://web-{n}.default.svc.cluster.local:80/blob?size=100")
}

fn answers(mesh: &Mesh, client: &str, n: u32) -> bool {
    let output = mesh.run(client, &["curl", "-sS", "--max-time", "2", "-o", "/dev/null", "-w", "%{http_code}", &url(n)]);
    output.stdout.trim() == "200"
}

/// Starts a load over all services of the client's tenant.
fn load(mesh: &Mesh, client: &str, extra: &[&str]) -> std::process::Child {
    let urls: Vec<String> = (0..4).map(url).collect();
    let all = ["canal-samples", "load"].into_iter().chain(urls.iter().map(String::as_str)).chain(extra.iter().copied());
    mesh.spawn(client, &all.collect::<Vec<_>>())
}

fn replicas(mesh: &Mesh) -> Vec<Value> {
    mesh.canal(&["gateway", "list", "-o", "json"]).json()["replicas"].as_array().expect("replicas").clone()
}

fn replica(mesh: &Mesh, name: &str) -> Value {
    replicas(mesh).into_iter().find(|r| r["name"] == name).unwrap_or_else(|| panic!("{name} is not registered"))
}

fn number(of: &Value, field: &str) -> u64 {
    of[field].as_f64().unwrap_or_else(|| panic!("{field} is missing: {of}")) as u64
}

#[test]
fn a_drained_replica_ends_with_no_sessions() {
    let mesh = Mesh::up("tier.yaml", "e2e-drain");
    for client in [MESHED, PROXYLESS] {
        until(SETTLED_WITHIN, &format!("{client} reaches every service"), || (0..4).all(|n| answers(&mesh, client, n)));
    }
    // Together these are 200 requests per second over persistent connections.
    let loads = [MESHED, PROXYLESS].map(|client| (client, load(&mesh, client, &["-r", "100", "-c", "16", "-d", "40"])));
    std::thread::sleep(Duration::from_secs(4));
    let mut had = 0;
    // All replicas of the clients' AZ, one after the other: some carry node proxies' tunnels, all carry plain connections.
    for name in ["gw-1", "gw-2", "gw-3", "gw-6"] {
        had += drained(&mesh, name);
        mesh.canal(&["gateway", "undrain", name]).ok();
        until(SETTLED_WITHIN, &format!("{name} serves again"), || replica(&mesh, name)["state"] == "active");
    }
    assert!(had > 16, "the clients' sessions were elsewhere: {had}");
    // A drained replica stays empty, and other replicas serve the clients' connections. The test takes the busiest replica that receives
    // new sessions without a node proxy: not every service is on every replica, and node proxies keep their tunnels.
    let heads: Vec<String> = (0..4).flat_map(|n| mesh.heads(&format!("beta/default/web-{n}"), "az1")).collect();
    let all: Vec<Value> = replicas(&mesh).into_iter().filter(|r| heads.iter().any(|name| r["name"] == **name)).collect();
    let busiest = all.iter().max_by_key(|r| number(r, "sessions")).expect("there is a replica");
    let name = busiest["name"].as_str().expect("a name");
    drained(&mesh, name);
    let empty = replica(&mesh, name);
    std::thread::sleep(Duration::from_secs(3));
    let later = replica(&mesh, name);
    assert_eq!((number(&later, "accepted"), number(&later, "sessions")), (number(&empty, "accepted"), 0), "{later}");
    let elsewhere: u64 = replicas(&mesh).iter().map(|r| number(r, "sessions")).sum();
    assert!(elsewhere > 16, "the sessions are nowhere: {elsewhere}");
    mesh.canal(&["gateway", "undrain", name]).ok();
    let fresh = load(&mesh, PROXYLESS, &["-r", "50", "-c", "8", "-d", "20", "--no-keepalive"]);
    let took = until(SETTLED_WITHIN, &format!("{name} takes sessions again"), || {
        number(&replica(&mesh, name), "accepted") > number(&later, "accepted")
    });
    println!("{name} took sessions again {:.1} s after the order was taken back", took.as_secs_f64());
    for (what, child) in loads.into_iter().chain([("new sessions", fresh)]) {
        let report = mesh.end(what, child).json();
        println!("{what}: {} of {} failed, gap {} ms", report["failed"], report["requests"], report["gap_ms_max"]);
        assert_eq!(report["failed"], 0, "{what}: {report}\n{}", mesh.logs());
    }
}

/// Drains a replica until it has no session, and returns the number of its sessions before.
fn drained(mesh: &Mesh, name: &str) -> u64 {
    let had = number(&replica(mesh, name), "sessions");
    mesh.canal(&["gateway", "drain", name, "--timeout", "0"]).ok();
    let none_left = || {
        let now = replica(mesh, name);
        now["state"] == "draining" && number(&now, "heads") == 0 && number(&now, "sessions") == 0
    };
    let took = until(EMPTY_WITHIN, &format!("{name} has no session"), none_left);
    let output = mesh.canal(&["gateway", "drain", name, "--timeout", "20"]).ok();
    println!("{name} had {had} sessions; the last one had left {:.1} s after the order. {}", took.as_secs_f64(), output.trim());
    had
}

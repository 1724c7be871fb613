//! The cloud tier under change and failure: replicas that come and go, processes, backends and AZs that die, a query of death, tenants without a
//! node proxy. What is lost is counted by the clients; nothing here retries.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use canal_e2e::{Mesh, Said, until};
use canal_world::Signal;
use serde_json::Value;

/// A pod behind a node proxy, and one whose node runs nothing of ours.
const MESHED: &str = "alpha/default/client-0";
const PROXYLESS: &str = "beta/default/client-0";
/// With all its labels: a resolver that tries a search list first asks a dead server once for each of its entries.
const ECHO: &str = "tcp.default.svc.cluster.local:7000";
const GATEWAYS: [&str; 6] = ["gw-1", "gw-2", "gw-3", "gw-4", "gw-5", "gw-6"];
/// Between two changes of the fleet: some 70 of them in two minutes.
const PAUSE: Duration = Duration::from_millis(2500);
/// How long a change of the fleet may take to show.
const SETTLED_WITHIN: Duration = Duration::from_secs(20);

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        // The shipped gateway has no way to be ended by a request.
        let mesh = Mesh::up_in_place_of("tier.yaml", "e2e-tier", ("canal-gateway", "crashing-gateway"), |topology| {
            for gateway in &mut topology.gateways {
                let process = gateway.process.as_mut().expect("gateways run");
                process.args.extend(["--crash-on-path".to_string(), "/death".to_string()]);
            }
        });
        for client in [MESHED, PROXYLESS] {
            until(SETTLED_WITHIN, &format!("{client} reaches every service"), || (0..4).all(|n| answers(&mesh, client, n)));
        }
        mesh
    })
}

fn url(n: u32) -> String {
    format!("http://web-{n}.default.svc.cluster.local:80/blob?size=100")
}

fn answers(mesh: &Mesh, client: &str, n: u32) -> bool {
    let said = mesh.run(client, &["curl", "-sS", "--max-time", "2", "-o", "/dev/null", "-w", "%{http_code}", &url(n)]);
    said.stdout.trim() == "200"
}

fn load(client: &str, n: u32, extra: &[&str]) -> std::process::Child {
    let url = url(n);
    let all: Vec<&str> = ["canal-samples", "load", &url].into_iter().chain(extra.iter().copied()).collect();
    mesh().spawn(client, &all)
}

fn number(report: &Value, field: &str) -> u64 {
    report[field].as_f64().unwrap_or_else(|| panic!("{field} is missing: {report}")) as u64
}

fn fleet() -> Value {
    mesh().canal(&["gateway", "list", "-o", "json"]).json()
}

fn ok(said: Said) -> Said {
    assert_eq!(said.code, Some(0), "{said:?}");
    said
}

/// At least 50 changes within two minutes under 2,000 long-lived sessions and a stream of new ones; none breaks.
#[test]
fn planned_changes_break_no_session() {
    let mesh = mesh();
    let seconds = 130;
    let held = mesh.spawn(
        PROXYLESS,
        &["canal-samples", "sessions", ECHO, "-n", "2000", "--open-rate", "1000", "--interval-ms", "2000", "-d", &seconds.to_string()],
    );
    let fresh = load(PROXYLESS, 0, &["-r", "40", "-c", "8", "--no-keepalive", "-d", &(seconds - 4).to_string()]);
    let meshed = load(MESHED, 1, &["-r", "40", "-c", "8", "-d", &(seconds - 4).to_string()]);
    std::thread::sleep(Duration::from_secs(4));
    let (started, mut events) = (Instant::now(), 0);
    std::thread::scope(|removals| {
        while started.elapsed() < Duration::from_secs(116) {
            let round = events / 4;
            let (backend, old) = [("b1", "gw-1"), ("b2", "gw-2"), ("b3", "gw-3"), ("b6", "gw-6")][round % 4];
            let guest = format!("gw-guest-{round}");
            mesh.world.add_gateway(&guest, "az1", backend).unwrap_or_else(|e| panic!("{guest}: {e}"));
            mesh.world.wait_host_ready(&guest, SETTLED_WITHIN).unwrap();
            ok(mesh.canal(&["gateway", "drain", old, "--timeout", "0"]));
            std::thread::sleep(PAUSE);
            ok(mesh.canal(&["gateway", "undrain", old]));
            ok(mesh.canal(&["gateway", "drain", &guest, "--timeout", "0"]));
            std::thread::sleep(PAUSE);
            // Its process says goodbye first, which takes seconds; the next guest need not wait for it.
            removals.spawn(move || mesh.world.remove_gateway(&guest).unwrap_or_else(|e| panic!("{guest}: {e}")));
            events += 4;
        }
    });
    let took = started.elapsed().as_secs_f64();
    let held = mesh.end("2,000 long-lived sessions", held).json();
    let fresh = mesh.end("new sessions without a node proxy", fresh).json();
    let meshed = mesh.end("requests through node proxies", meshed).json();
    println!(
        "{events} changes of the fleet in {took:.0} s: {} sessions held, {} broken; {} new sessions, {} failed; {} meshed requests, {} failed",
        held["sessions"], held["broken"], fresh["requests"], fresh["failed"], meshed["requests"], meshed["failed"]
    );
    // By what way the sessions lived on: along chains, and by a segment that TCP sent again.
    let spread = |what: &str| -> u64 {
        let label = format!("what=\"{what}\"");
        ["gw-1", "gw-2", "gw-3", "gw-6"].iter().map(|host| mesh.counted(host, "canal_redirector_packets_total", &[&label])).sum()
    };
    println!("packets passed on: {}; sent again: {}; reset: {}", spread("forwarded"), spread("unsettled"), spread("unowned"));
    assert!(events >= 50, "{events} events only");
    for (what, report) in [("held", &held), ("fresh", &fresh), ("meshed", &meshed)] {
        assert_eq!(report["ok"], true, "{what}: {report}\n{}", fleet());
    }
}

/// A process dies, its host lives: the redirector goes on, the sessions of others are untouched, and each client's next try succeeds.
#[test]
fn a_killed_replica_costs_only_its_own_sessions() {
    let mesh = mesh();
    let held = mesh.spawn(PROXYLESS, &["canal-samples", "sessions", ECHO, "-n", "300", "--interval-ms", "100", "-d", "12"]);
    std::thread::sleep(Duration::from_secs(4));
    // Replicas report once a second.
    std::thread::sleep(Duration::from_secs(1));
    let (victim, own) = busiest();
    mesh.world.kill(&victim, Signal::Kill).unwrap();
    let held = mesh.end("sessions while a replica dies", held).json();
    println!(
        "{victim} killed: {} of 300 sessions broken (it had {own}), {} ms to the next answer at most",
        held["broken"], held["gap_ms_max"]
    );
    assert!((1..=own).contains(&number(&held, "broken")), "more broke than were its own ({own}), or none: {held}");
    assert!(number(&held, "gap_ms_max") < 1000, "{held}");
    mesh.world.wait_host_ready(&victim, SETTLED_WITHIN).unwrap();
}

/// The replica with the most sessions, and how many.
fn busiest() -> (String, u64) {
    let fleet = fleet();
    let all = fleet["replicas"].as_array().expect("replicas");
    let sessions = |r: &&Value| number(r, "sessions");
    let most = all.iter().max_by_key(sessions).expect("there is a replica");
    (most["name"].as_str().expect("a name").to_string(), sessions(&most))
}

/// The redirector and the edge forward without their processes, and adopt what they find when they are back.
#[test]
fn agents_restart_without_a_lost_session() {
    let mesh = mesh();
    let held = mesh.spawn(PROXYLESS, &["canal-samples", "sessions", ECHO, "-n", "300", "--interval-ms", "200", "-d", "15"]);
    let fresh = load(PROXYLESS, 0, &["-r", "50", "-c", "4", "--no-keepalive", "-d", "14"]);
    std::thread::sleep(Duration::from_secs(3));
    mesh.world.kill("edge-1", Signal::Kill).unwrap();
    mesh.world.wait_host_ready("edge-1", SETTLED_WITHIN).unwrap();
    mesh.world.restart("edge-1").unwrap();
    mesh.world.wait_host_ready("edge-1", SETTLED_WITHIN).unwrap();
    mesh.world.restart("controller").unwrap();
    for (what, child) in [("sessions", held), ("new sessions", fresh)] {
        let report = mesh.end(what, child).json();
        assert_eq!(report["ok"], true, "{what} while the edge's agent and the controller restart: {report}");
    }
    mesh.converge(SETTLED_WITHIN);
}

/// All replicas of a backend die and stay dead: its services go on by their other backends within a second.
#[test]
fn a_dead_backend_is_replaced_within_a_second() {
    let mesh = mesh();
    let loads: Vec<_> = [MESHED, PROXYLESS]
        .into_iter()
        .flat_map(|client| (0..4).map(move |n| (client, n)))
        .map(|(client, n)| (client, n, load(client, n, &["-r", "25", "-c", "4", "-d", "10", "--timeline"])))
        .collect();
    std::thread::sleep(Duration::from_secs(3));
    mesh.world.kill("gw-2", Signal::Kill).unwrap();
    mesh.world.stop("gw-2").unwrap();
    for (client, n, child) in loads {
        let report = mesh.end("load while a backend dies", child).json();
        println!(
            "backend b2 dead: {client} web-{n}: {} of {} failed, gap {} ms",
            report["failed"], report["requests"], report["gap_ms_max"]
        );
        assert!(number(&report, "gap_ms_max") < 1000, "{client} web-{n}: {report}");
        assert!(number(&report, "failed") <= 8, "{client} web-{n}: {report}");
    }
    mesh.world.start("gw-2").unwrap();
    mesh.world.wait_host_ready("gw-2", SETTLED_WITHIN).unwrap();
}

/// The tier of a whole AZ goes: edge and replicas. Its clients go to the other AZ within two seconds, by southbound and by DNS.
#[test]
fn a_dead_az_is_replaced_within_two_seconds() {
    let mesh = mesh();
    // As many at once as come in a second: a resolver asks the dead AZ's server first, and waits so long for it.
    let loads = [MESHED, PROXYLESS]
        .map(|client| (client, load(client, 0, &["-r", "50", "-c", "64", "-d", "14", "--timeout-ms", "1500", "--no-keepalive"])));
    std::thread::sleep(Duration::from_secs(3));
    for host in ["edge-1", "gw-1", "gw-2", "gw-3", "gw-6"] {
        mesh.world.link_down(host).unwrap();
    }
    for (client, child) in loads {
        let report = mesh.end("load while an AZ dies", child).json();
        println!("az1's tier dead: {client}: {} of {} failed, gap {} ms", report["failed"], report["requests"], report["gap_ms_max"]);
        assert!(number(&report, "gap_ms_max") < 2000, "{client}: {report}");
        assert!(number(&report, "succeeded") > 300, "{client}: {report}");
    }
    for host in ["edge-1", "gw-1", "gw-2", "gw-3", "gw-6"] {
        mesh.world.link_up(host).unwrap();
    }
    mesh.converge(SETTLED_WITHIN);
    until(SETTLED_WITHIN, "traffic is back", || [MESHED, PROXYLESS].into_iter().all(|client| answers(mesh, client, 0)));
}

/// Starts of each replica after the first.
fn restarts() -> Vec<(&'static str, u32)> {
    GATEWAYS.iter().map(|name| (*name, mesh().world.host(name).unwrap().pulse.restarts)).collect()
}

/// The replicas of the backends that a service is placed on.
fn shard(placed: &Value, service: &str) -> Vec<String> {
    let services = placed["services"].as_array().unwrap();
    let of = services.iter().find(|s| s["service"] == service).unwrap_or_else(|| panic!("{service}: {placed}"));
    // Named by AZ: `az1/b1`.
    let backends: Vec<&str> = of["backends"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let name = |r: &Value| format!("{}/{}", r["az"].as_str().unwrap_or_default(), r["backend"].as_str().unwrap_or_default());
    let replicas = placed["replicas"].as_array().unwrap().iter().filter(|r| backends.contains(&name(r).as_str()));
    replicas.map(|r| r["name"].as_str().unwrap().to_owned()).collect()
}

/// A request that crashes every replica it reaches ends replicas of its own service's shard and no others, and costs services that
/// share those replicas what was in flight there, all others nothing.
#[test]
fn a_query_of_death_takes_down_one_service_only() {
    let mesh = mesh();
    let placed = mesh.canal(&["gateway", "status", "-o", "json"]).json();
    let before = restarts();
    let others: Vec<_> = (1..4).map(|n| (n, load(MESHED, n, &["-r", "25", "-c", "4", "-d", "12"]))).collect();
    std::thread::sleep(Duration::from_secs(2));
    let death = "http://web-0.default.svc.cluster.local:80/death";
    for _ in 0..12 {
        mesh.run(MESHED, &["curl", "-sS", "--max-time", "1", "-o", "/dev/null", death]);
        std::thread::sleep(Duration::from_millis(200));
    }
    let reports: Vec<_> = others.into_iter().map(|(n, child)| (n, mesh.end("load beside a query of death", child).json())).collect();
    for gateway in GATEWAYS {
        mesh.world.wait_host_ready(gateway, Duration::from_secs(30)).unwrap();
    }
    // Placement may have changed while replicas were away, so the shards of both plans count.
    let after = mesh.canal(&["gateway", "status", "-o", "json"]).json();
    let own: Vec<String> = [&placed, &after].into_iter().flat_map(|plan| shard(plan, "alpha/default/web-0")).collect();
    let died: Vec<&str> = before.iter().zip(restarts()).filter(|(old, new)| new.1 > old.1).map(|(old, _)| old.0).collect();
    println!("query of death for web-0: {died:?} died, its shards: {own:?}");
    let deaths: u64 = before.iter().zip(restarts()).map(|(old, new)| u64::from(new.1.saturating_sub(old.1))).sum();
    for (n, report) in reports {
        let name = format!("alpha/default/web-{n}");
        let is_beside = [&placed, &after].into_iter().flat_map(|plan| shard(plan, &name)).any(|replica| died.contains(&replica.as_str()));
        // A process that dies takes along what was in flight in it, of services that share it too; of all others nothing.
        let losses_max = if is_beside { 2 * deaths } else { 0 };
        println!(
            "query of death for web-0: web-{n}: {} of {} failed (at most {losses_max}), gap {} ms",
            report["failed"], report["requests"], report["gap_ms_max"]
        );
        assert!(number(&report, "gap_ms_max") < 2000, "web-{n}: {report}\n{placed}");
        assert!(number(&report, "failed") <= losses_max, "web-{n}: {report}\n{placed}");
        assert!(number(&report, "succeeded") > 200, "web-{n}: {report}");
    }
    assert!(!died.is_empty(), "no replica died, so nothing was shown: {placed}");
    assert!(died.iter().all(|name| own.iter().any(|replica| replica == name)), "{died:?} died, its shards are {own:?}: {placed}");
    assert!(shard(&placed, "alpha/default/web-0").len() < GATEWAYS.len(), "a shard of all replicas shows nothing: {placed}");
}

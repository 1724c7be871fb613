//! Deliberate failures: replicas are killed, drained and restarted, pods come and go, certificates rotate under a stream.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use canal_e2e::Mesh;
use canal_world::Signal;

const CLIENT: &str = "alpha/default/client-0";
const REVIEWS: &str = "http://10.101.0.60:9080/reviews/0";

/// Certificates live for one minute here, so that they rotate about every 30 s.
fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        Mesh::up_with("mesh.yaml", "e2e-fail", |topology| {
            let controller = topology.controller.as_mut().and_then(|c| c.process.as_mut()).expect("the world has a controller");
            controller.args.extend(["--svid-ttl".to_string(), "60s".to_string()]);
        })
    })
}

fn load(seconds: &str) -> std::process::Child {
    mesh().spawn(CLIENT, &["canal-samples", "load", REVIEWS, "-r", "200", "-c", "8", "-d", seconds])
}

/// Streams stay open across two rotations of every certificate on the path, and no byte is lost. The certificates did change.
#[test]
fn certificates_rotate_under_a_stream() {
    let mesh = mesh();
    let serials = || mesh.canal(&["config", "dump", "alpha-n1", "-o", "json"]).json()["certificates"].to_string();
    let before = serials();
    let ws = mesh.spawn(
        CLIENT,
        &["canal-samples", "ws-client", "ws://10.101.0.30:8081/", "--count", "700", "--interval-ms", "100", "--size", "500"],
    );
    let bidi = mesh.spawn(
        CLIENT,
        &[
            "canal-samples",
            "grpc-client",
            "10.101.0.20:9000",
            "--mode",
            "bidi",
            "--count",
            "700",
            "--interval-ms",
            "100",
            "--timeout-ms",
            "120000",
        ],
    );
    for (what, child) in [("WebSocket over rotations", ws), ("gRPC stream over rotations", bidi)] {
        let output = mesh.end(what, child);
        assert_eq!(output.json()["ok"], true, "{output:?}");
    }
    let after = serials();
    assert_ne!(before, after, "the certificates did not change within 70 s at a life of 60 s");
}

#[test]
fn a_killed_replica_costs_only_its_own_requests() {
    let mesh = mesh();
    let load = load("10");
    std::thread::sleep(Duration::from_secs(3));
    mesh.world.kill("gw-1", Signal::Kill).unwrap();
    let report = mesh.end("load while a replica is killed", load).json();
    println!("replica killed: {} of {} requests lost, longest gap {} ms", report["failed"], report["requests"], report["gap_ms_max"]);
    assert!(report["failed"].as_u64().unwrap_or(u64::MAX) <= 8, "more were lost than were in flight: {report}");
    assert!(report["gap_ms_max"].as_u64().unwrap_or(u64::MAX) < 1000, "{report}");
    mesh.world.wait_host_ready("gw-1", Duration::from_secs(20)).unwrap();
}

/// Five planned restarts of a replica under load: clients get GOAWAY and `Connection: close`, and nothing is lost.
#[test]
fn planned_restarts_lose_nothing() {
    let mesh = mesh();
    let load = load("30");
    for _ in 0..5 {
        std::thread::sleep(Duration::from_secs(1));
        mesh.world.restart("gw-1").unwrap();
        mesh.world.wait_host_ready("gw-1", Duration::from_secs(20)).unwrap();
    }
    let report = mesh.end("load over planned restarts", load).json();
    assert_eq!(report["failed"], 0, "{report}");
}

/// Pods come and go without a restart; a new pod is in the mesh as soon as it runs.
#[test]
fn pods_come_and_go() {
    let mesh = mesh();
    let topology = canal_world::Topology::load(canal_e2e::root().join("tests/e2e/worlds/mesh.yaml")).unwrap();
    let alpha = topology.tenants.iter().find(|t| t.name.as_str() == "alpha").unwrap();
    let mut pod = alpha.pods.iter().find(|p| p.name == "client").unwrap().clone();
    for n in 0..5 {
        pod.name = format!("guest{n}");
        let names = mesh.world.add_pod("alpha", &pod).unwrap();
        let started = Instant::now();
        let output = loop {
            let output = mesh.run(&names[0], &["canal-samples", "blob-client", "http://10.101.0.10:80", "--size", "1000"]);
            if output.code == Some(0) || started.elapsed() > Duration::from_secs(10) {
                break output;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        assert_eq!(output.json()["ok"], true, "{output:?}\n{}", mesh.logs());
        mesh.world.remove_pod(&names[0]).unwrap();
    }
}

/// While a node proxy is dead, its pods' connections are refused and never pass unencrypted; afterwards everything works as before.
#[test]
fn a_dead_node_proxy_fails_closed() {
    let mesh = mesh();
    mesh.world.stop("alpha-n1").unwrap();
    for target in ["10.101.0.60:9080", "10.1.0.1:80"] {
        let output = mesh.run(CLIENT, &["curl", "-sS", "--max-time", "2", &format!("http://{target}/")]);
        assert!(output.code != Some(0) && output.stdout.is_empty(), "{target} answered without a proxy: {output:?}");
    }
    mesh.world.start("alpha-n1").unwrap();
    mesh.world.wait_host_ready("alpha-n1", Duration::from_secs(20)).unwrap();
    let started = Instant::now();
    while mesh.run(CLIENT, &["curl", "-sS", "--max-time", "2", "-o", "/dev/null", REVIEWS]).code != Some(0) {
        assert!(started.elapsed() < Duration::from_secs(10), "{}", mesh.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
}

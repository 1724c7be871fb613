//! Deliberate failures: replicas are killed, drained and restarted, pods come and go, certificates
//! rotate under a stream.

use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{Mesh, deadline_ms, load_while, until};
use canal_timing::{assert_losses, assert_time, deadline, is_timed};
use canal_world::Signal;

const CLIENT: &str = "alpha/default/client-0";
const REVIEWS: &str = "http://10.101.0.60:9080/reviews/0";
/// A process that was started serves within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// A pod, or the pods of a node, are served within this time. It only has to exceed what a quiet
/// machine needs: in the gate, `deadline` waits a minute or more.
const SERVED_WITHIN: Duration = Duration::from_secs(10);
/// A message or request is answered within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// Certificates live for one minute here, so that they rotate about every 30 s.
fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        Mesh::up_with("mesh.yaml", "e2e-fail", |topology| {
            let controller = topology
                .controller
                .as_mut()
                .and_then(|c| c.process.as_mut())
                .expect("the world has a controller");
            controller
                .args
                .extend(["--svid-ttl".to_string(), "60s".to_string()]);
        })
    })
}

/// Returns the command of a load: in the timing tier 200 requests per second, in the gate each
/// connection sends when it was answered.
fn load<'a>(seconds: &'a str, timeout: &'a str) -> Vec<&'a str> {
    let mut argv = vec![
        "canal-samples",
        "load",
        REVIEWS,
        "-c",
        "8",
        "-d",
        seconds,
        "--timeout-ms",
        timeout,
    ];
    if is_timed() {
        argv.extend(["-r", "200"]);
    }
    argv
}

/// Waits until the requests of a load are served.
fn until_served() {
    let served = || mesh().counted_at("gateway", "istio_requests_total", &["tenant=\"alpha\""]);
    let before = served();
    until(deadline(ANSWERED_WITHIN), "the load is served", || {
        served() > before
    });
}

/// Streams stay open across two rotations of every certificate on the path, and no byte is lost.
/// The certificates did change.
#[test]
fn certificates_rotate_under_a_stream() {
    let mesh = mesh();
    let serials = || {
        mesh.canal(&["config", "dump", "alpha-n1", "-o", "json"])
            .json()["certificates"]
            .to_string()
    };
    let before = serials();
    let (echoed, ended) = (
        deadline_ms(ANSWERED_WITHIN),
        // Both streams last 70 s (700 messages, 100 ms apart): longer than certificates live (60
        // s).
        deadline_ms(Duration::from_secs(120)),
    );
    let ws = mesh.spawn(
        CLIENT,
        &[
            "canal-samples",
            "ws-client",
            "ws://10.101.0.30:8081/",
            "--count",
            "700",
            "--interval-ms",
            "100",
            "--size",
            "500",
            "--timeout-ms",
            &echoed,
        ],
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
            &ended,
        ],
    );
    for (what, child) in [
        ("WebSocket over rotations", ws),
        ("gRPC stream over rotations", bidi),
    ] {
        let output = mesh.end(what, child);
        assert_eq!(output.json()["ok"], true, "{output:?}");
    }
    let after = serials();
    assert_ne!(
        before, after,
        "the certificates did not change within 70 s at a life of 60 s"
    );
}

/// A killed replica costs only requests in flight. Afterwards clients with long timeouts lose
/// nothing.
#[test]
fn a_killed_replica_loses_only_its_own_requests() {
    let mesh = mesh();
    let timeout = deadline_ms(ANSWERED_WITHIN);
    let watch = mesh.spawn(CLIENT, &load("10", &timeout));
    // The kill must meet requests in flight.
    until_served();
    if is_timed() {
        // The gap is measured from a steady state.
        std::thread::sleep(Duration::from_secs(3));
    }
    mesh.world.kill("gw-1", Signal::Kill).unwrap();
    let report = mesh.end("load while a replica is killed", watch).json();
    println!(
        "replica killed: {} of {} requests lost, longest gap {} ms",
        report["failed"], report["requests"], report["gap_ms_max"]
    );
    assert_losses(
        "requests lost by the kill of a replica",
        // A missing figure exceeds the bound.
        report["failed"].as_u64().unwrap_or(u64::MAX),
        // The load has eight connections, each with one request in flight.
        8,
    );
    // A missing figure exceeds the bound.
    let gap = Duration::from_secs_f64(
        report["gap_ms_max"].as_f64().unwrap_or(f64::from(u32::MAX)) / 1000.0,
    );
    assert_time(
        "gap after the kill of a replica",
        gap,
        // TCP repeats a lost SYN after a second, so no client waited for that.
        Duration::from_secs(1),
    );
    mesh.world
        .wait_host_ready("gw-1", deadline(READY_WITHIN))
        .unwrap();
    // Only a settled mesh must lose nothing: the restarted replica takes its services back first.
    mesh.converge(deadline(READY_WITHIN));
    until(deadline(SERVED_WITHIN), "the service answers", || {
        mesh.code(CLIENT, REVIEWS, &[]) == 200
    });
    let report = mesh
        .run(
            CLIENT,
            &[
                "canal-samples",
                "load",
                REVIEWS,
                // Nobody derived the number of requests.
                "-n",
                "500",
                "-c",
                "8",
                "--timeout-ms",
                &timeout,
            ],
        )
        .json();
    assert_eq!(
        (&report["requests"], &report["failed"]),
        (&500.into(), &0.into()),
        "the mesh is whole again: {report}"
    );
}

/// Planned restarts of a replica under load: clients get GOAWAY and `Connection: close`, and
/// nothing is lost.
#[test]
fn planned_restarts_lose_nothing() {
    let mesh = mesh();
    let timeout = deadline_ms(ANSWERED_WITHIN);
    let (restarts, seconds) = if is_timed() { (5, "30") } else { (1, "5") };
    let ((), reports) = load_while(mesh, &[(CLIENT, load(seconds, &timeout))], || {
        for _ in 0..restarts {
            until_served();
            mesh.world.restart("gw-1").unwrap();
            mesh.world
                .wait_host_ready("gw-1", deadline(READY_WITHIN))
                .unwrap();
        }
    });
    reports[0].assert_none_lost("requests lost by planned restarts");
}

/// Pods come and go without a restart; a new pod is in the mesh as soon as it runs.
#[test]
fn pods_come_and_go() {
    let mesh = mesh();
    let topology =
        canal_world::Topology::load(canal_e2e::root().join("tests/e2e/worlds/mesh.yaml")).unwrap();
    let alpha = topology
        .tenants
        .iter()
        .find(|t| t.name.as_str() == "alpha")
        .unwrap();
    let mut pod = alpha
        .pods
        .iter()
        .find(|p| p.name == "client")
        .unwrap()
        .clone();
    for n in 0..5 {
        pod.name = format!("guest{n}");
        let names = mesh.world.add_pod("alpha", &pod).unwrap();
        let transfer = [
            "canal-samples",
            "blob-client",
            "http://10.101.0.10:80",
            "--size",
            "1000",
        ];
        until(
            deadline(SERVED_WITHIN),
            &format!("{} is served", names[0]),
            || mesh.run(&names[0], &transfer).code == Some(0),
        );
        let output = mesh.run(&names[0], &transfer);
        assert_eq!(output.json()["ok"], true, "{output:?}\n{}", mesh.logs());
        mesh.world.remove_pod(&names[0]).unwrap();
    }
}

/// While a node proxy is dead, its pods' connections are refused and never pass unencrypted;
/// afterwards everything works as before.
#[test]
fn a_dead_node_proxy_fails_closed() {
    let mesh = mesh();
    mesh.world.stop("alpha-n1").unwrap();
    for target in ["10.101.0.60:9080", "10.1.0.1:80"] {
        let output = mesh.run(
            CLIENT,
            &[
                "curl",
                "-sS",
                "--max-time",
                "2",
                &format!("http://{target}/"),
            ],
        );
        assert!(
            output.code != Some(0) && output.stdout.is_empty(),
            "{target} answered without a proxy: {output:?}"
        );
    }
    mesh.world.start("alpha-n1").unwrap();
    mesh.world
        .wait_host_ready("alpha-n1", deadline(READY_WITHIN))
        .unwrap();
    until(
        deadline(SERVED_WITHIN),
        "pods of the node are served again",
        || mesh.code(CLIENT, REVIEWS, &[]) == 200,
    );
}

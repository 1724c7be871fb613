//! Configuration under load: a thousand changes without a lost request, refusals that change nothing, operation without the controller.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use canal_e2e::Mesh;
use canal_world::Signal;

const CLIENT: &str = "alpha/default/client-0";
const REVIEWS: &str = "http://10.101.0.60:9080/reviews/0";

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| Mesh::up("mesh.yaml", "e2e-config"))
}

/// The two halves of the application behind reviews, as separate services.
const HALVES: &str = "---\napiVersion: v1\nkind: Service\nmetadata: {name: reviews-a, namespace: default}\nspec:\n  \
    clusterIP: 10.101.0.61\n  selector: {app: reviews, version: v1}\n  ports: [{name: http, port: 9080, targetPort: 9080}]\n\
    ---\napiVersion: v1\nkind: Service\nmetadata: {name: reviews-b, namespace: default}\nspec:\n  \
    clusterIP: 10.101.0.62\n  selector: {app: reviews, version: v2}\n  ports: [{name: http, port: 9080, targetPort: 9080}]\n";

/// A route for reviews whose content depends on `n`. The rule that matches the load's requests changes its kind, its position and its
/// destination, and other rules come and go before it. Even numbers lead to one half of the application, odd ones to the other.
fn route(n: u32) -> String {
    let others: String = (0..n % 4)
        .map(|i| {
            format!("  - matches: [{{path: {{type: Exact, value: /never/{n}/{i}}}}}]\n    backendRefs: [{{name: nobody, port: 80}}]\n")
        })
        .collect();
    let (kind, value) = [("Exact", "/reviews/0"), ("PathPrefix", "/reviews"), ("PathPrefix", "/")][n as usize % 3];
    let half = if n.is_multiple_of(2) { "reviews-a" } else { "reviews-b" };
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: reviews, namespace: default}}\nspec:\n  \
         parentRefs: [{{group: \"\", kind: Service, name: reviews, port: 9080}}]\n  rules:\n{others}  \
         - matches: [{{path: {{type: {kind}, value: {value}}}}}]\n    backendRefs:\n    - {{name: {half}, port: 9080, weight: {}}}\n",
        1 + n % 100
    )
}

fn apply(mesh: &Mesh, text: &str) -> canal_e2e::ClientOutcome {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("route.yaml");
    std::fs::write(&file, text).unwrap();
    mesh.canal(&["apply", "--tenant", "alpha", "-f", file.to_str().unwrap()])
}

/// A thousand changes in `make soak`, of which `make test` makes the first. As many loads, one after another, as they take. None is made between
/// them. Each change sends what the load asks for elsewhere, which the load sees by who answers.
#[test]
fn a_thousand_changes_lose_no_request() {
    const SECONDS: u64 = 20;
    const ROUNDS_MAX: u32 = 12;
    let wanted = if std::env::var_os("CANAL_SOAK").is_some() { 1000 } else { 300 };
    let mesh = mesh();
    apply(mesh, &format!("{HALVES}---\n{}", route(0))).ok();
    mesh.converge(Duration::from_secs(10));
    let (mut changes, mut rounds, mut requests, mut took) = (0, 0, 0, Duration::ZERO);
    let mut answered = [0, 0];
    while changes < wanted {
        assert!(rounds < ROUNDS_MAX, "{changes} changes only in {rounds} loads of {SECONDS} s");
        rounds += 1;
        let load = mesh
            .spawn(CLIENT, &["canal-samples", "load", REVIEWS, "-r", "200", "-c", "8", "-d", &SECONDS.to_string(), "--served-by", "x-pod"]);
        let started = Instant::now();
        while changes < wanted && started.elapsed() < Duration::from_secs(SECONDS - 1) {
            apply(mesh, &route(changes)).ok();
            changes += 1;
        }
        took += started.elapsed();
        let report = mesh.end("load during changes", load).json();
        assert_eq!(report["failed"], 0, "{report}");
        let succeeded = report["succeeded"].as_u64().unwrap_or(0);
        assert!(succeeded > SECONDS * 200 * 2 / 3, "{report}");
        requests += succeeded;
        for (half, pod) in ["reviews-v1-0", "reviews-v2-0"].into_iter().enumerate() {
            answered[half] += report["served_by"][pod].as_u64().unwrap_or(0);
        }
    }
    let each = took.as_secs_f64() / f64::from(changes);
    println!("{changes} changes in {:.1} s; {requests} requests, none failed; by half: {answered:?}", took.as_secs_f64());
    // Each half responds half of the time, except after the last change of a round.
    assert!(
        answered.into_iter().all(|half| half >= requests / 5),
        "changes of {each:.3} s each did not move the load: {answered:?} of {requests}"
    );
    mesh.converge(Duration::from_secs(10));
    for (kind, name) in [("HTTPRoute", "reviews"), ("Service", "reviews-a"), ("Service", "reviews-b")] {
        mesh.canal(&["delete", "--tenant", "alpha", kind, name]).ok();
    }
}

/// The very next requests see a change, and a refused change has no effect.
#[test]
fn a_change_shows_and_a_broken_one_is_refused_whole() {
    let mesh = mesh();
    let to_nobody = route(0).replace("name: reviews-a, port: 9080, weight", "name: nobody, port: 80, weight");
    let status = || mesh.run(CLIENT, &["curl", "-sS", "--max-time", "5", "-o", "/dev/null", "-w", "%{http_code}", REVIEWS]).ok();
    assert_eq!(status().trim(), "200");
    apply(mesh, &to_nobody).ok();
    mesh.converge(Duration::from_secs(10));
    assert_eq!(status().trim(), "503", "the route points at a service without endpoints");
    let broken = format!(
        "{}---\n{}",
        route(5),
        route(6).replace("kind: HTTPRoute", "kind: HTTPRoute\nsurprise: 1").replace("port: 9080}", "port: 99999}")
    );
    let output = apply(mesh, &broken);
    assert_eq!(output.code, Some(1), "{output:?}");
    let text = format!("{}{}", output.stdout, output.stderr);
    assert!(text.contains("surprise") && text.contains("99999") && text.contains("route.yaml:"), "all errors, with their place: {text}");
    assert_eq!(status().trim(), "503", "the refused batch changed nothing");
    mesh.canal(&["delete", "--tenant", "alpha", "HTTPRoute", "reviews"]).ok();
    mesh.converge(Duration::from_secs(10));
    assert_eq!(status().trim(), "200");
}

/// The controller is killed; then a node proxy and a gateway replica restart without it, and traffic continues from their state files.
#[test]
fn life_goes_on_without_the_controller() {
    let mesh = mesh();
    mesh.world.stop("controller").unwrap();
    let load = mesh.spawn(CLIENT, &["canal-samples", "load", REVIEWS, "-r", "100", "-c", "4", "-d", "8"]);
    let report = mesh.end("load without a controller", load).json();
    assert_eq!(report["failed"], 0, "{report}");
    for host in ["gw-1", "alpha-n1"] {
        mesh.world.kill(host, Signal::Kill).unwrap();
        let started = Instant::now();
        loop {
            let output = mesh.run(CLIENT, &["curl", "-sS", "--max-time", "2", "-o", "/dev/null", "-w", "%{http_code}", REVIEWS]);
            if output.stdout.trim() == "200" && mesh.world.is_ready(host).unwrap_or(false) {
                break;
            }
            assert!(
                started.elapsed() < Duration::from_secs(20),
                "{host} does not serve without the controller: {output:?}\n{}",
                mesh.logs()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        println!(
            "{host} killed: traffic whole and the process ready again after {:.2} s, without a controller",
            started.elapsed().as_secs_f64()
        );
        let load = mesh.spawn(CLIENT, &["canal-samples", "load", REVIEWS, "-n", "500", "-c", "4"]);
        let report = mesh.end("load after a restart without a controller", load).json();
        assert_eq!(report["failed"], 0, "after {host} restarted: {report}");
    }
    mesh.world.start("controller").unwrap();
    mesh.converge(Duration::from_secs(30));
}

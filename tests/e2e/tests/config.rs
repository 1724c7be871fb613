//! Configuration under load: a thousand changes without a lost request, refusals that change
//! nothing, operation without the controller.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use canal_e2e::{Mesh, deadline_ms, load_while, until};
use canal_timing::{assert_time, deadline, is_timed, timed};
use canal_world::Signal;

const CLIENT: &str = "alpha/default/client-0";
const REVIEWS: &str = "http://10.101.0.60:9080/reviews/0";
/// A change is in force everywhere within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const IN_FORCE_WITHIN: Duration = Duration::from_secs(10);
/// A process that was killed serves again within this time. It only has to exceed what a quiet
/// machine needs: in the gate, `deadline` waits a minute or more.
const BACK_WITHIN: Duration = Duration::from_secs(20);
/// A request is answered within this time. It only has to exceed what a quiet machine needs: in the
/// gate, `deadline` waits a minute or more.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| Mesh::up("mesh.yaml", "e2e-config"))
}

/// The two halves of the application behind reviews, as separate services.
const HALVES: &str = "---\napiVersion: v1\nkind: Service\nmetadata: {name: reviews-a, namespace: default}\nspec:\n  \
    clusterIP: 10.101.0.61\n  selector: {app: reviews, version: v1}\n  ports: [{name: http, port: 9080, targetPort: 9080}]\n\
    ---\napiVersion: v1\nkind: Service\nmetadata: {name: reviews-b, namespace: default}\nspec:\n  \
    clusterIP: 10.101.0.62\n  selector: {app: reviews, version: v2}\n  ports: [{name: http, port: 9080, targetPort: 9080}]\n";

/// A route for reviews whose content depends on `n`. The rule that matches the load's requests
/// changes its kind, its position and its destination, and other rules come and go before it. Even
/// numbers lead to one half of the application, odd ones to the other.
fn route(n: u32) -> String {
    let others: String = (0..n % 4)
        .map(|i| {
            format!("  - matches: [{{path: {{type: Exact, value: /never/{n}/{i}}}}}]\n    backendRefs: [{{name: nobody, port: 80}}]\n")
        })
        .collect();
    let (kind, value) = [
        ("Exact", "/reviews/0"),
        ("PathPrefix", "/reviews"),
        ("PathPrefix", "/"),
    ][n as usize % 3];
    let half = if n.is_multiple_of(2) {
        "reviews-a"
    } else {
        "reviews-b"
    };
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

/// A thousand changes in the timing tier, of which the gate makes the first 40, under as many
/// loads, one after another, as they take. Each change moves the load's requests to the other half,
/// and the load counts which half answers.
#[test]
fn a_thousand_changes_lose_no_request() {
    // Of one load in the timing tier, which is started again until all changes are made.
    const SECONDS: u64 = 20;
    // At twenty changes a second (the 49 s below) ten requests fall between two of them.
    const RATE: u64 = 200;
    // A thousand changes take 49 s, unoptimized and beside other tests (docs/performance.md); about
    // five times that shows that something is wrong.
    const CHANGED_WITHIN: Duration = Duration::from_secs(240);
    let wanted = if is_timed() { 1000 } else { 40 };
    let mesh = mesh();
    apply(mesh, &format!("{HALVES}---\n{}", route(0))).expect_success();
    mesh.converge(deadline(IN_FORCE_WITHIN));
    let (rate, seconds, timeout) = (
        RATE.to_string(),
        SECONDS.to_string(),
        deadline_ms(ANSWERED_WITHIN),
    );
    let mut load = vec![
        "canal-samples",
        "load",
        REVIEWS,
        "--served-by",
        "x-pod",
        "--timeout-ms",
        &timeout,
    ];
    // In the gate each connection sends when it was answered. The timing tier sets a rate, to
    // notice if requests slow down. Nobody measured the numbers of connections.
    if is_timed() {
        load.extend(["-r", &rate, "-c", "8", "-d", &seconds]);
    } else {
        load.extend(["-c", "4", "-d", "5"]);
    }
    let started = Instant::now();
    let (took, reports) = load_while(mesh, &[(CLIENT, load)], || {
        (0..wanted).for_each(|n| drop(apply(mesh, &route(n)).expect_success()));
        started.elapsed()
    });
    let lasted = started.elapsed();
    let (reports, halves) = (&reports[0], ["reviews-v1-0", "reviews-v2-0"]);
    let (requests, answered) = (
        reports.sum("succeeded"),
        halves.map(|pod| reports.served_by(pod)),
    );
    println!(
        "{wanted} changes in {took:?}; {requests} requests in {lasted:?}; by half: {answered:?}"
    );
    reports.assert_none_lost("requests lost by changes");
    // Each response tells which half answered, so a change without effect is noticed here.
    assert!(
        answered.into_iter().all(|half| half >= 1),
        "changes did not move the load: {answered:?} of {requests}"
    );
    // Each half responds half of the time, except after the last change.
    timed!(
        answered.into_iter().all(|half| half >= requests / 5),
        "each half of the application answers a fifth of the requests"
    );
    // Nothing is sent between two runs of the load, so the bound is below its rate.
    timed!(
        requests >= lasted.as_secs() * RATE * 2 / 3,
        "rate of requests during changes"
    );
    assert_time("time of a thousand changes", took, CHANGED_WITHIN);
    mesh.converge(deadline(IN_FORCE_WITHIN));
    // Other tests of this mesh need the objects as they were.
    for (kind, name) in [
        ("HTTPRoute", "reviews"),
        ("Service", "reviews-a"),
        ("Service", "reviews-b"),
    ] {
        mesh.canal(&["delete", "--tenant", "alpha", kind, name])
            .expect_success();
    }
}

/// The very next requests see a change, and a refused change has no effect.
#[test]
fn a_change_shows_and_a_broken_one_is_refused_whole() {
    let mesh = mesh();
    let to_nobody = route(0).replace(
        "name: reviews-a, port: 9080, weight",
        "name: nobody, port: 80, weight",
    );
    let status = || mesh.code(CLIENT, REVIEWS, &[]);
    assert_eq!(status(), 200);
    apply(mesh, &to_nobody).expect_success();
    mesh.converge(deadline(IN_FORCE_WITHIN));
    assert_eq!(
        status(),
        503,
        "the route points at a service without endpoints"
    );
    let broken = format!(
        "{}---\n{}",
        route(5),
        route(6)
            .replace("kind: HTTPRoute", "kind: HTTPRoute\nsurprise: 1")
            .replace("port: 9080}", "port: 99999}")
    );
    let output = apply(mesh, &broken);
    assert_eq!(output.code, Some(1), "{output:?}");
    let text = format!("{}{}", output.stdout, output.stderr);
    assert!(
        text.contains("surprise") && text.contains("99999") && text.contains("route.yaml:"),
        "all errors, with their place: {text}"
    );
    assert_eq!(status(), 503, "the refused batch changed nothing");
    mesh.canal(&["delete", "--tenant", "alpha", "HTTPRoute", "reviews"])
        .expect_success();
    mesh.converge(deadline(IN_FORCE_WITHIN));
    assert_eq!(status(), 200);
}

/// The controller is killed; then a node proxy and a gateway replica restart without it, and
/// traffic continues from their state files.
#[test]
fn traffic_continues_without_the_controller() {
    let mesh = mesh();
    mesh.world.stop("controller").unwrap();
    let none_lost = |when: &str| {
        let timeout = deadline_ms(ANSWERED_WITHIN);
        let load = mesh.spawn(
            CLIENT,
            &[
                "canal-samples",
                "load",
                REVIEWS,
                "-n",
                "500",
                "-c",
                "4",
                "--timeout-ms",
                &timeout,
            ],
        );
        let report = mesh.end("load without a controller", load).json();
        assert_eq!(report["failed"], 0, "{when}: {report}");
    };
    none_lost("the controller is dead");
    for host in ["gw-1", "alpha-n1"] {
        mesh.world.kill(host, Signal::Kill).unwrap();
        let took = until(
            deadline(BACK_WITHIN),
            &format!("{host} serves without the controller"),
            || mesh.code(CLIENT, REVIEWS, &[]) == 200 && mesh.world.is_ready(host).unwrap_or(false),
        );
        println!(
            "{host} killed: traffic whole and the process ready again after {:.2} s, without a controller",
            took.as_secs_f64()
        );
        none_lost(&format!("after {host} restarted"));
    }
    mesh.world.start("controller").unwrap();
    mesh.converge(deadline(BACK_WITHIN));
}

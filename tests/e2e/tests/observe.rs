//! Operators outside the world's files observe it: `canal` with the controller's address and a
//! token, in a tier with a meshed tenant and one whose nodes run no part of the mesh. Each operator
//! sees its own tenant, wherever its traffic was observed.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{ClientOutcome, Mesh, bin, until};
use canal_timing::deadline;
use rustix::process::Signal;
use sha2::{Digest, Sha256};

/// Maximum time of a step on a quiet machine: a change is in force, or a process serves. It only
/// has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
/// A host of the provider's, which reaches the controller and is not captured.
const OPERATOR_HOST: &str = "edge-1";
const ALPHA: &str = "alpha/default/client-0";
/// A pod on a node that runs no part of the mesh.
const BETA: &str = "beta/default/client-0";

/// The world, and the operators' tokens.
struct ObserveWorld {
    mesh: Mesh,
    dir: tempfile::TempDir,
}

fn setup() -> &'static ObserveWorld {
    static SETUP: OnceLock<ObserveWorld> = OnceLock::new();
    SETUP.get_or_init(|| {
        let mesh = Mesh::up("tier.yaml", "e2e-observe");
        let setup = ObserveWorld {
            mesh,
            dir: tempfile::tempdir().expect("a directory"),
        };
        let principals = setup.mesh.world.dir().join("principals.yaml");
        let mut text = std::fs::read_to_string(&principals).expect("the principals");
        for (name, tenant) in [
            ("ann", "tenant: alpha"),
            ("bob", "tenant: beta"),
            ("root", ""),
        ] {
            let token = format!("token-of-{name}");
            let hash: String = Sha256::digest(token.as_bytes())
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect();
            text.push_str(&format!(
                "- {{tokenSha256: {hash}, kind: operator, name: {name}, {tenant}}}\n"
            ));
            std::fs::write(setup.dir.path().join(name), token).expect("a token");
        }
        let new = principals.with_extension("new");
        std::fs::write(&new, text).expect("the principals");
        std::fs::rename(new, principals).expect("the principals");
        until(deadline(STEP_TIMEOUT), "the operators are known", || {
            setup.canal("bob", "status").code == Some(0)
        });
        setup
    })
}

impl ObserveWorld {
    fn words(&self, operator: &str, words: &str) -> Vec<String> {
        let (root, token) = (
            self.mesh.world.root_ca().display().to_string(),
            self.dir.path().join(operator).display().to_string(),
        );
        let server = format!("https://{}:15012", self.mesh.address("controller"));
        // Hosts of a world have its name in their environment.
        let mut argv = ["env", "-u", "CANAL_WORLD"].map(str::to_owned).to_vec();
        argv.push(bin("canal").display().to_string());
        argv.extend(words.split(' ').map(str::to_owned));
        argv.extend([
            "--server".into(),
            server,
            "--root-ca".into(),
            root,
            "--token-file".into(),
            token,
        ]);
        argv
    }

    /// Runs a verb as an operator, with nothing of the world's but the controller's address and
    /// root.
    fn canal(&self, operator: &str, words: &str) -> ClientOutcome {
        let argv = self.words(operator, words);
        self.mesh.run(
            OPERATOR_HOST,
            &argv.iter().map(String::as_str).collect::<Vec<_>>(),
        )
    }

    fn spawn(&self, operator: &str, words: &str) -> Child {
        let argv = self.words(operator, words);
        self.mesh.spawn(
            OPERATOR_HOST,
            &argv.iter().map(String::as_str).collect::<Vec<_>>(),
        )
    }

    /// Returns the connected gateways that serve the operator's tenant now.
    fn gateways(&self, operator: &str) -> Vec<String> {
        let status = self.canal(operator, "status -o json").json();
        let all = status["subscribers"]
            .as_array()
            .expect("data planes")
            .clone();
        let gateways = all
            .iter()
            .filter(|s| s["kind"] == "gateway" && s["connected"] == true);
        gateways
            .map(|s| s["name"].as_str().expect("a name").to_owned())
            .collect()
    }

    fn wait_for_answer(&self, pod: &str, path: &str) {
        until(deadline(STEP_TIMEOUT), "the service answers", || {
            self.mesh.code(
                pod,
                &format!("http://web-0.default.svc.cluster.local{path}"),
                &[],
            ) == 200
        });
    }

    /// Sends requests until a client has ended.
    fn request_until_ended(&self, pod: &str, path: &str, child: &mut Child) {
        until(deadline(STEP_TIMEOUT), "the client has seen enough", || {
            self.wait_for_answer(pod, path);
            child.try_wait().expect("it is ours").is_some()
        });
    }
}

/// Waits until a tap reads from a gateway.
fn wait_for_tap(tap: &mut Child) {
    let errors = BufReader::new(tap.stderr.as_mut().expect("it was started with pipes"));
    let lines = errors.lines().map(|line| line.expect("text"));
    let listens = lines.take(20).any(|line| line.contains("listening on gw-"));
    assert!(listens, "the tap ended before it listened");
}

#[test]
fn each_operator_taps_its_own_tenant_and_proxyless_traffic_too() {
    let setup = setup();
    let (mut ann, mut bob) = (
        setup.spawn("ann", "tap -n 3 -o json"),
        setup.spawn("bob", "tap -n 3 -o json"),
    );
    let mut root = setup.spawn(
        "root",
        "tap -n 1 --tenant beta --path /blob?size=10&b -o json",
    );
    until(deadline(STEP_TIMEOUT), "all have seen their own", || {
        setup.wait_for_answer(ALPHA, "/blob?size=10&a");
        setup.wait_for_answer(BETA, "/blob?size=10&b");
        [&mut ann, &mut bob, &mut root]
            .into_iter()
            .all(|child| child.try_wait().expect("it is ours").is_some())
    });
    for (name, child, tenant, path) in [
        ("ann", ann, "alpha", "/blob?size=10&a"),
        ("bob", bob, "beta", "/blob?size=10&b"),
        ("root", root, "beta", "/blob?size=10&b"),
    ] {
        let output = setup.mesh.end(name, child);
        assert!(
            output.stderr.contains("listening on gw-"),
            "{name}: {}",
            output.stderr
        );
        let out = output.expect_success();
        assert!(!out.is_empty());
        for line in out.lines() {
            let request: serde_json::Value = serde_json::from_str(line).expect("JSON");
            assert!(
                request["tenant"] == tenant && request["path"] == path,
                "{name} sees {line}"
            );
        }
    }
}

#[test]
fn missing_and_foreign_objects_are_refused_with_a_fix() {
    let setup = setup();
    for (operator, words, code, want) in [
        (
            "root",
            "tap --tenant nosuch",
            5,
            "there is no tenant nosuch",
        ),
        (
            "ann",
            "tap --service default/nosuch",
            5,
            "tenant alpha has no service",
        ),
        ("root", "tap --gateway gw-9", 5, "no data plane \"gw-9\""),
        ("ann", "tap --tenant beta", 1, "for tenant alpha only"),
        ("bob", "logs alpha-n1", 5, "no data plane \"alpha-n1\""),
        (
            "bob",
            "config dump alpha-n1",
            5,
            "no data plane \"alpha-n1\"",
        ),
        ("bob", "config dump edge-1", 5, "no data plane \"edge-1\""),
        ("bob", "metrics --tenant alpha", 1, "for tenant beta only"),
        ("root", "logs edge-1", 1, "serves no logs"),
        ("root", "logs gw-1 --level debug", 2, "is for worlds"),
    ] {
        let output = setup.canal(operator, words);
        assert!(
            output.code == Some(code) && output.stderr.contains(want),
            "{operator} {words}: {output:?}"
        );
        assert!(
            code == 1 || output.stderr.contains("fix: "),
            "{operator} {words}: {output:?}"
        );
    }
}

/// Returns the logs of the gateways that an operator sees.
fn logs(setup: &ObserveWorld, operator: &str) -> String {
    let of = |name: &String| match setup.canal(operator, &format!("logs {name}")) {
        // The gateway has left meanwhile, or the tenant has left the gateway.
        output if output.code == Some(5) => String::new(),
        output => output.expect_success(),
    };
    setup.gateways(operator).iter().map(of).collect()
}

/// Checks that the logs, a dump and the metrics that an operator gets are of its own tenant alone.
fn check_views(setup: &ObserveWorld, operator: &str, own: &str, other: &str) {
    let lines = logs(setup, operator);
    let all_own = lines
        .lines()
        .all(|line| line.contains(&format!("\"tenant\":\"{own}\"")));
    assert!(
        all_own && !lines.contains(&format!("\"tenant\":\"{other}\"")),
        "{operator}: {lines}"
    );
    // As with logs: one that is listed may have left. Every other failure is one of the test.
    let dump_of = |name: &String| match setup.canal(operator, &format!("config dump {name}")) {
        output if output.code == Some(5) => None,
        output => Some(output.expect_success()),
    };
    let gateways = setup.gateways(operator);
    let dump = gateways.iter().find_map(dump_of);
    let dump = dump.expect("a gateway of its own");
    let dump: serde_json::Value = serde_json::from_str(&dump).expect("JSON");
    let tenants: Vec<_> = dump["engine"]["tenants"]
        .as_array()
        .expect("tenants")
        .iter()
        .map(|t| t["tenant"].clone())
        .collect();
    // Certificates and subscriptions belong to the provider's process, so tenants' operators see
    // neither.
    assert!(
        tenants == [own] && dump["certificates"].is_null() && dump["southbound"].is_null(),
        "{operator}: {dump}"
    );
    assert!(
        !dump.to_string().contains(&format!("{other}.example")),
        "{operator}: {dump}"
    );
    let metrics = setup.canal(operator, "metrics").expect_success();
    let series: Vec<_> = metrics
        .lines()
        .filter(|line| !line.starts_with('#'))
        .collect();
    assert!(
        // An empty result would pass the check below.
        series
            .iter()
            .any(|line| line.starts_with("istio_requests_total{instance=\"gw-")),
        "{operator}: {metrics}"
    );
    assert!(
        series
            .iter()
            .all(|line| line.contains(&format!("tenant=\"{own}\""))),
        "{operator}: {metrics}"
    );
}

#[test]
fn logs_dumps_and_metrics_are_of_the_own_tenant() {
    let setup = setup();
    // Each tenant has many lines, so that lines of both in one log would be noticed.
    for _ in 0..20 {
        setup.wait_for_answer(ALPHA, "/blob?size=10&log-a");
        setup.wait_for_answer(BETA, "/blob?size=10&log-b");
    }
    until(deadline(STEP_TIMEOUT), "the lines are written", || {
        logs(setup, "ann").contains("&log-a") && logs(setup, "bob").contains("&log-b")
    });
    for (operator, own, other) in [("ann", "alpha", "beta"), ("bob", "beta", "alpha")] {
        check_views(setup, operator, own, other);
    }
    assert!(
        setup
            .canal("ann", "logs alpha-n1 --tail 5")
            .expect_success()
            .lines()
            .count()
            <= 5
    );
    assert_eq!(
        setup
            .canal("ann", "config dump alpha-n1 --part node")
            .expect_success()
            .trim(),
        "\"alpha-n1\""
    );
    assert!(setup.canal("root", "config dump edge-1").json().is_object());
    // The planner decides which gateways serve both tenants, and an earlier test ends a gateway.
    let is_whole = |name: &String| {
        let dump = setup.canal("root", &format!("config dump {name}"));
        dump.code == Some(0) && dump.json()["engine"]["tenants"].as_array().map(Vec::len) == Some(2)
    };
    until(
        deadline(STEP_TIMEOUT),
        "the provider sees both tenants of a gateway",
        || setup.gateways("root").iter().any(is_whole),
    );
    // A name that does not exist ends with exit code 5 for the world's own access too.
    let tap = setup.mesh.canal(&["tap", "--tenant", "nosuch"]);
    assert!(
        tap.code == Some(5) && tap.stderr.contains("there is no tenant"),
        "{tap:?}"
    );
}

#[test]
fn a_stalled_reader_blocks_no_other_and_gets_the_drop_count() {
    let setup = setup();
    // Nothing reads the pipe of its output: it accepts 64 KiB, then the tap stops.
    let mut tap = setup.spawn("ann", "tap --path /blob?size=10&many -o json");
    let mut other = setup.spawn("ann", "tap -n 3 --path /blob?size=10&other");
    wait_for_tap(&mut tap);
    // Each line has the padded path, so that 3,000 lines exceed the pipe and the gateway's queue.
    let pad = "p".repeat(3000);
    let url =
        format!("http://web-0.default.svc.cluster.local/blob?size=10&many=[1-3000]&pad={pad}");
    let argv = [
        "curl",
        "-sS",
        // It only ends a hang.
        "--max-time",
        "600",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}\\n",
        &url,
    ];
    let codes = setup.mesh.run(ALPHA, &argv).expect_success();
    assert!(
        codes.lines().count() == 3000 && codes.lines().all(|code| code == "200"),
        "all requests are answered"
    );
    // Another reader gets its lines while this one is stalled.
    setup.request_until_ended(ALPHA, "/blob?size=10&other", &mut other);
    setup.mesh.end("other", other).expect_success();
    let dropped = || {
        setup.mesh.counted_at(
            "gateway",
            "canal_observations_lines_dropped_total",
            &["subject=\"tap\""],
        )
    };
    let output = setup.mesh.signal("tap", tap, Signal::INT);
    assert!(output.stdout.lines().count() < 3000, "it did not see all");
    // The next lines report what the queue dropped. The reader left before it read them; the
    // gateways counted them.
    until(
        deadline(STEP_TIMEOUT),
        "lines are counted as dropped",
        || dropped() > 0 || output.stderr.contains("lines dropped"),
    );
}

#[test]
fn a_tap_ends_with_its_signal_or_with_its_gateway() {
    let setup = setup();
    let mut tap = setup.spawn("ann", "tap");
    wait_for_tap(&mut tap);
    assert_eq!(setup.mesh.signal("tap", tap, Signal::INT).code, Some(130));
    let mut tap = setup.spawn("root", "tap --gateway gw-5");
    wait_for_tap(&mut tap);
    setup
        .mesh
        .world
        .kill("gw-5", canal_world::Signal::Kill)
        .expect("killed");
    let output = setup.mesh.end("tap", tap);
    assert!(
        output.code == Some(3) && output.stderr.contains("gw-5: disconnected"),
        "{output:?}"
    );
}

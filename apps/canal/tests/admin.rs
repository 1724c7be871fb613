//! Tests of the verbs that use a controller, with a real one in a world of its own: apply, get,
//! diff, delete, status, compile.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A world with a controller and one tenant, and the directory of its files.
struct AdminWorld {
    name: String,
    files: tempfile::TempDir,
}

impl AdminWorld {
    /// Returns `None`, with a message, if worlds cannot be built here. Each test has its own
    /// letter, because tests run in parallel.
    fn up(letter: char) -> Option<Self> {
        let beside = Path::new(env!("CARGO_BIN_EXE_canal")).parent().unwrap();
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: worlds need root (network namespaces); run the tests as root");
            return None;
        }
        if !beside.join("canal-controller").is_file() {
            eprintln!(
                "SKIPPED: {} has no canal-controller; build it with cargo build -p canal-controller",
                beside.display()
            );
            return None;
        }
        let run = std::env::var("CANAL_RUN_ID").unwrap_or_default();
        let name = format!("adm{letter}{run}-{}", std::process::id() % 1_000_000);
        let world = Self {
            name,
            files: tempfile::tempdir().unwrap(),
        };
        let services = demo("alpha/services.yaml");
        let topology = format!(
            "world: {}\nazs: [az1]\ncontroller: {{az: az1}}\ntenants:\n  - name: alpha\n    vni: 101\n    trustDomain: alpha.example\n    podCidrs: [10.1.0.0/16, 'fd00:1::/64']\n    serviceCidrs: [10.101.0.0/16, 'fd00:101::/64']\n    config: [{}]\n",
            world.name,
            services.display()
        );
        let path = world.write("world.yaml", &topology);
        world.check(&format!("world up {}", path.display()), 0, "is up");
        Some(world)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.files.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn canal(&self, words: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_canal"));
        command
            .env_remove("CANAL_TENANT")
            .env_remove("CANAL_SERVER")
            .env("CANAL_WORLD", &self.name);
        command.args(words.split_whitespace()).output().unwrap()
    }

    /// Runs a verb and returns its output. Its exit code must be `code` and its output must contain
    /// `want`.
    fn check(&self, words: &str, code: i32, want: &str) -> String {
        let output = self.canal(words);
        let all = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{words}: {all}");
        assert!(all.contains(want), "{words}: no {want:?} in {all}");
        all
    }
}

impl Drop for AdminWorld {
    fn drop(&mut self) {
        self.canal(&format!("world down {}", self.name));
    }
}

fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../demo")
        .join(name)
        .canonicalize()
        .unwrap()
}

#[test]
fn objects_live_from_apply_to_delete() {
    let Some(world) = AdminWorld::up('a') else {
        return;
    };
    let routes = demo("alpha/routes.yaml");
    let text = std::fs::read_to_string(&routes).unwrap();
    let other = world.write("other.yaml", &text.replace("weight: 90", "weight: 70"));
    let broken = world.write("broken.yaml", &text.replace("reviews-v2", "reviews-v9"));
    let (routes, other, broken) = (routes.display(), other.display(), broken.display());

    // Exit code 6 means differences, 5 an object that does not exist.
    world.check(&format!("diff -f {routes} --exit-code"), 6, "created");
    // A dry run must change nothing, as the next line shows.
    world.check(&format!("apply -f {routes} --dry-run"), 0, "(dry run)");
    world.check("get httproute reviews -n bookinfo", 5, "does not exist");
    // This world has no data planes, so `--wait` returns at once. The 5 s only bound a failure.
    world.check(
        &format!("apply -f {routes} --wait 5"),
        0,
        "HTTPRoute bookinfo/reviews created",
    );
    // The second apply of the same file must not be a change.
    world.check(
        &format!("apply -f {routes} --wait 5"),
        0,
        "HTTPRoute bookinfo/reviews unchanged",
    );
    world.check(&format!("diff -f {routes} --exit-code"), 0, "");
    world.check(
        &format!("diff -f {other}"),
        0,
        "+        - {name: reviews-v1, port: 9080, weight: 70}",
    );
    // A refused apply must leave the object as it was.
    world.check(
        &format!("apply -f {broken}"),
        1,
        // Line 16 of the demo's file names reviews-v2, at column 12.
        "broken.yaml:16:12: error[CANAL0408]: HTTPRoute bookinfo/reviews",
    );
    world.check("get httproutes -n bookinfo -o yaml", 0, "weight: 90");
    // The tenant does not exist, and the reason is on stderr.
    world.check(&format!("apply --tenant nobody -f {routes}"), 1, "");
    world.check(&format!("delete -f {routes} -o json"), 0, "\"deleted\"");
    // A delete that deletes nothing is a failure, unless the flag below says otherwise.
    world.check("delete httproute reviews -n bookinfo", 1, "no such object");
    world.check(
        "delete httproute reviews -n bookinfo --ignore-missing",
        0,
        "",
    );
}

#[test]
fn a_killed_supervisor_loses_no_applied_object() {
    let Some(world) = AdminWorld::up('d') else {
        return;
    };
    world.check(
        &format!("apply -f {} --wait 5", demo("alpha/routes.yaml").display()),
        0,
        "created",
    );
    let supervisor =
        std::fs::read_to_string(format!("/run/canal/worlds/{}/supervisor.pid", world.name))
            .unwrap();
    assert!(
        Command::new("kill")
            .args(["-9", supervisor.trim()])
            .status()
            .unwrap()
            .success()
    );
    let topology = world.files.path().join("world.yaml");
    world.check(
        &format!("world up {}", topology.display()),
        0,
        "rebuilt after a crash; objects applied before are still in force",
    );
    world.check("get httproute reviews -n bookinfo", 0, "reviews");
    world.check(&format!("world up {}", topology.display()), 0, "is up");
}

#[test]
fn status_and_lists_are_the_same_facts_in_every_format() {
    let Some(world) = AdminWorld::up('b') else {
        return;
    };
    world.check("status --check", 0, "no data plane");
    let status: serde_json::Value =
        serde_json::from_slice(&world.canal("status -o json").stdout).unwrap();
    assert_eq!(
        (
            &status["tenants"][0]["tenant"],
            &status["tenants"][0]["services"]
        ),
        (&"alpha".into(), &10.into())
    );
    world.check("status -o yaml", 0, "tenant: alpha");
    let list: serde_json::Value =
        serde_json::from_slice(&world.canal("get services -o json").stdout).unwrap();
    let objects = list["objects"].as_array().expect("a list of objects");
    assert_eq!(objects.len(), 10);
    assert!(
        objects
            .iter()
            .all(|object| object["object"]["spec"]["clusterIP"].is_string())
    );
    world.check("get --tenant alpha", 0, "Tenant");
    // The controller's configuration is compiled again without it.
    world.check(
        &format!("compile /run/canal/worlds/{}/config", world.name),
        0,
        "alpha   10",
    );
}

#[test]
fn policies_are_applied_refused_and_explained() {
    let Some(world) = AdminWorld::up('c') else {
        return;
    };
    let policy = |name: &str, rules: &str| {
        let head = "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: readers, namespace: bookinfo}\n";
        let spec =
            format!("spec: {{targetRefs: [{{kind: Service, name: reviews}}], rules: [{rules}]}}\n");
        world
            .write(name, &(head.to_owned() + &spec))
            .display()
            .to_string()
    };
    let good = policy("good.yaml", "{to: [{operation: {methods: [GET]}}]}");
    // As in Istio, a list that is written must not be empty.
    let bad = policy("bad.yaml", "{to: [{operation: {methods: []}}]}");
    let arguments = "explain --from bookinfo/productpage --to bookinfo/reviews:9080 --method";
    // Before the policy the answer must be a route, or its later refusal proves nothing.
    world.check(&format!("{arguments} POST"), 0, "route: ");
    world.check(
        &format!("apply -f {bad}"),
        1,
        // Column 81 of the fourth line is inside the rule with the empty list.
        "bad.yaml:4:81: error[CANAL0120]: AuthorizationPolicy bookinfo/readers",
    );
    world.check(
        &format!("apply -f {good} --wait 5"),
        0,
        "AuthorizationPolicy bookinfo/readers created",
    );
    world.check("get authorizationpolicies", 0, "readers");
    let shown = world.check(&format!("{arguments} POST"), 0, "route: ");
    // The demo's pods exist only while it runs; without them there is no workload to explain for.
    assert!(
        shown.contains("no pod is ready") || shown.contains("403: no ALLOW policy matches"),
        "{shown}"
    );
    world.check(
        &format!("compile /run/canal/worlds/{}/config", world.name),
        0,
        "POLICIES",
    );
    world.check(
        "delete authorizationpolicy readers -n bookinfo",
        0,
        "readers",
    );
}

//! Tests of the `canal` binary as scripts use it: exit codes, streams, and a small world from up to
//! down.

use std::process::{Command, Output};

fn canal(words: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_canal"));
    for name in [
        "CANAL_WORLD",
        "CANAL_TENANT",
        "CANAL_SERVER",
        "CANAL_ROOT_CA",
        "CANAL_TOKEN_FILE",
    ] {
        command.env_remove(name);
    }
    command.args(words.split_whitespace()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn exit_codes_are_stable() {
    // Scripts rely on these codes (`ExitStatus`), so that a change must be deliberate.
    for (name, words, code) in [
        ("help", "--help", 0),
        ("version", "--version", 0),
        ("completion", "completion bash", 0),
        ("check of the demo needs nothing", "world check demo", 0),
        ("no verb", "", 2),
        ("unknown verb", "frobnicate", 2),
        ("bad format", "status -o xml", 2),
        (
            "server without its CA",
            "status --server https://127.0.0.1:1",
            2,
        ),
        ("no such topology", "world check /nowhere.yaml", 5),
        (
            "no such file to apply",
            "apply --tenant a -f /nowhere.yaml",
            5,
        ),
        ("no such world", "status --world clinone", 5),
        ("no such directory", "compile /nowhere", 5),
    ] {
        let output = canal(words);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{name}: {}{}",
            text(&output.stdout),
            text(&output.stderr)
        );
        if code == 0 {
            assert!(
                output.stderr.is_empty(),
                "{name} is quiet on stderr: {}",
                text(&output.stderr)
            );
        } else {
            assert!(!output.stderr.is_empty(), "{name} says why");
        }
    }
}

#[test]
fn a_server_that_is_not_there_is_code_3() {
    let directory = tempfile::tempdir().unwrap();
    let (ca, token) = (
        directory.path().join("ca.pem"),
        directory.path().join("token"),
    );
    std::fs::write(&ca, "").unwrap();
    std::fs::write(&token, "t").unwrap();
    let words = format!(
        "status --server https://127.0.0.1:1 --root-ca {} --token-file {}",
        ca.display(),
        token.display()
    );
    let output = canal(&words);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("fix:"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn a_bad_topology_is_refused_with_its_line() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bad.yaml");
    std::fs::write(&file, "world: clibad\nazs: [az1]\ncolour: red\n").unwrap();
    let output = canal(&format!("world check {}", file.display()));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("bad.yaml:3:"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn the_demo_compiles_as_its_world_lays_it_out() {
    let directory = tempfile::tempdir().unwrap();
    let tenant = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\nspec: {vni: 101, trustDomain: alpha.example, podCidrs: [10.1.0.0/16, 'fd00:1::/64'], serviceCidrs: [10.101.0.0/16, 'fd00:101::/64']}\n";
    let alpha = directory.path().join("alpha");
    std::fs::create_dir(&alpha).unwrap();
    std::fs::write(alpha.join("_tenant.yaml"), tenant).unwrap();
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/alpha");
    for name in ["services.yaml", "routes.yaml"] {
        std::fs::copy(demo.join(name), alpha.join(name)).unwrap();
    }
    let output = canal(&format!("compile {} -o json", directory.path().display()));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["tenants"][0]["services"], 10, "{value:#}");
    assert!(
        value["tenants"][0]["routes"].as_u64() >= Some(2),
        "{value:#}"
    );
}

#[test]
fn compile_reports_a_policy_that_cannot_be_enforced() {
    let directory = tempfile::tempdir().unwrap();
    let alpha = directory.path().join("alpha");
    std::fs::create_dir(&alpha).unwrap();
    let golden =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/compiler");
    for name in ["_shop.yaml", "targets-unenforced.yaml"] {
        std::fs::copy(golden.join(name), alpha.join(name)).unwrap();
    }
    let output = canal(&format!("compile {}", directory.path().display()));
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    for want in [
        "AuthorizationPolicy shop/waypoint: spec.targetRefs[0].kind",
        "so this one denies all of namespace shop",
    ] {
        assert!(errors.contains(want), "{errors}");
    }
}

#[test]
fn analyze_shows_codes_and_tells_errors_from_warnings() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, spec: &str| {
        let text = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: web}}\nspec: {{clusterIP: 10.2.0.1, selector: {{app: web}}, ports: [{spec}]}}\n"
        );
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let good = file("good.yaml", "{name: http, port: 80}");
    // The port's name begins with no protocol, so the mesh must guess, which is a warning.
    let warned = file("warned.yaml", "{name: web, port: 80}");
    // No field of a port is called `speed`.
    let broken = file("broken.yaml", "{name: http, port: 80, speed: 1}");
    // Code 1 means errors, and with `--strict` warnings too; 2 is a wrong command line or an
    // unreadable file. Columns are those of the port.
    for (words, code, wanted) in [
        (
            format!("analyze {good} --strict"),
            0,
            "0 errors, 0 warnings in 1 object",
        ),
        (
            format!("analyze {warned}"),
            0,
            "warned.yaml:4:59: warning[CANAL0308]: ",
        ),
        (format!("analyze {warned} --strict"), 1, "\n  why: "),
        (
            format!("analyze {broken}"),
            1,
            "error[CANAL0102]: Service default/web: spec.ports[0].speed",
        ),
        (
            format!("analyze {broken} -o json"),
            1,
            "\"code\": \"CANAL0102\"",
        ),
        (
            format!("analyze {broken} -o sarif"),
            1,
            "\"ruleId\": \"CANAL0102\"",
        ),
        (format!("analyze {broken}.missing"), 2, ""),
        (
            "analyze --explain CANAL0102".to_owned(),
            0,
            "CANAL0102 UnknownField: ",
        ),
        ("analyze --explain CANAL9999".to_owned(), 2, ""),
        ("analyze".to_owned(), 2, ""),
    ] {
        let output = canal(&words);
        let shown = text(&output.stdout);
        assert_eq!(output.status.code(), Some(code), "{words}: {shown}");
        assert!(shown.contains(wanted), "{words}: {shown}");
    }
}

/// Checks that without root a world that is up appears neither as a leftover nor as absent, because
/// its lock is not readable.
fn others_are_told_to_be_root(world: &str) {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    // The build folder may be closed to other users.
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let copy = directory.path().join("canal");
    // Another process copies the file: a child of another test that has the file open for writing
    // would make running it fail.
    assert!(
        Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_canal"))
            .arg(&copy)
            .status()
            .unwrap()
            .success()
    );
    let as_unprivileged = |words: &[&str]| {
        let output = Command::new(&copy)
            .args(words)
            // These would name another mesh than the test's world.
            .env_remove("CANAL_WORLD")
            .env_remove("CANAL_SERVER")
            // 65534 is `nobody`.
            .uid(65534)
            .gid(65534)
            .output()
            .unwrap();
        (
            output.status.code(),
            text(&output.stdout) + &text(&output.stderr),
        )
    };
    let (code, listed) = as_unprivileged(&["world", "list"]);
    // Without a line the check below fails and shows the list.
    let line = listed
        .lines()
        .find(|line| line.starts_with(world))
        .unwrap_or_default();
    assert!(
        code == Some(0) && line.contains("needs root") && !listed.contains("leftover"),
        "{listed}"
    );
    for words in [&["status"][..], &["status", "--world", world]] {
        let (code, printed) = as_unprivileged(words);
        assert!(
            code == Some(1)
                && printed.contains("root")
                && printed.contains("sudo")
                && !printed.contains("no world is up"),
            "{code:?} {printed}"
        );
    }
}

/// Takes the world down even if an assertion fails.
struct DownOnDrop(String);

impl Drop for DownOnDrop {
    fn drop(&mut self) {
        canal(&format!("world down {}", self.0));
    }
}

#[test]
fn a_world_goes_up_is_used_and_goes_down() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: worlds need root (network namespaces); run the tests as root");
        return;
    }
    // The test runner gives each run an id; a run by hand has none.
    let run = std::env::var("CANAL_RUN_ID").unwrap_or_default();
    // World names are short, and two runs at once must not meet.
    let name = format!("cli{run}-{}", std::process::id() % 1_000_000);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("small.yaml");
    std::fs::write(
        &file,
        format!("world: {name}\nazs: [az1]\nhosts:\n  - {{name: h1, az: az1, command: [sleep, infinity]}}\n  - {{name: h2, az: az1}}\n"),
    )
    .unwrap();
    let _down = DownOnDrop(name.clone());
    let check = |words: String, code: i32, want: &str| {
        let output = canal(&words);
        let all = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{words}: {all}");
        assert!(all.contains(want), "{words}: {all}");
    };
    // The second `up` of the same file must accept the world that is up.
    check(format!("world up {}", file.display()), 0, "is up");
    check(format!("world up {}", file.display()), 0, "is up");
    check("world list -o json".into(), 0, &name);
    // 250.1.0.1 is the underlay address of the world's first host.
    check(format!("world list {name}"), 0, "250.1.0.1");
    check(format!("world exec --world {name} h2 -- hostname"), 0, "h2");
    // The shell's own exit code must be passed on.
    check(
        format!("world exec --world {name} h2 -- sh -c nosuchprogram"),
        127,
        "not found",
    );
    check(format!("world exec --world {name} h2 -- false"), 1, "");
    check(
        format!("world exec --world {name} h3 -- true"),
        5,
        "no host",
    );
    check(format!("logs --world {name} h1"), 0, "start: sleep");
    // 3 means that a process did not answer: this world has no controller.
    check(format!("status --world {name}"), 3, "fix:");
    check(format!("config dump --world {name} h1"), 3, "admin.sock");
    check(format!("tap --world {name}"), 5, "no gateway");
    others_are_told_to_be_root(&name);
    check(format!("world down {}", file.display()), 0, "was removed");
    check(format!("world down {name}"), 0, "was removed");
    check(format!("world list {name}"), 5, "no world");
}

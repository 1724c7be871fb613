//! One tenant's policies that no data plane could store, and their effect on others: what the
//! controller does with them, what a gateway that starts with nothing serves, and what a restarted
//! one serves. The numbers are those with which another tenant's DENY was once lost.

use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{ClientOutcome, Mesh, until};
use canal_timing::deadline;
use serde_json::Value;

const ALPHA: &str = "alpha/default/client-0";
const BETA: &str = "beta/default/client-0";
const GAMMA: &str = "gamma/default/client-0";
/// The only gateway of the world.
const GATEWAY: &str = "gw-1";
/// Number of policies that are too large, beside one that is not. A data plane that received them
/// used to refuse 256 responses and then all others. More than those 256.
const BAD_POLICIES: usize = 300;
/// Number of values and of negated values: each list is within the limit, both together are not.
/// The limit of a list is 1,024 entries for both together.
const VALUES: usize = 600;
/// Buckets of a service's table (`BUCKETS` of the model): the service is served completely only if
/// all of them have a head.
const HEADS: u64 = 128;
/// Maximum time of a step on a quiet machine: a change is in force, or a process serves. It only
/// has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns a mesh with three tenants that have the same addresses behind one gateway.
fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up_with("trust.yaml", "e2e-policies", |topology| {
            topology.gateways.retain(|gateway| gateway.name == GATEWAY);
            topology.edges.retain(|edge| edge.az == "az1");
            let mut gamma = topology
                .tenants
                .iter()
                .find(|tenant| tenant.name == "beta")
                .expect("beta")
                .clone();
            (gamma.name, gamma.vni, gamma.trust_domain) =
                ("gamma".into(), 103, "gamma.example".into());
            let renamed = |name: &str| name.replace("beta", "gamma");
            for node in &mut gamma.nodes {
                node.name = renamed(&node.name);
            }
            for pod in &mut gamma.pods {
                pod.nodes = pod.nodes.iter().map(|node| renamed(node)).collect();
            }
            topology.tenants.push(gamma);
        });
        for pod in [ALPHA, BETA, GAMMA] {
            until(deadline(STEP_TIMEOUT), &format!("{pod} is served"), || {
                code(&mesh, pod, "/headers") == 200
            });
        }
        mesh
    })
}

fn code(mesh: &Mesh, pod: &str, path: &str) -> u16 {
    mesh.code(pod, &format!("http://10.101.0.10{path}"), &[])
}

/// Returns a DENY policy for a path of the application behind `web`.
fn deny(name: &str, path: &str) -> String {
    format!(
        "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  \
         selector: {{matchLabels: {{app: web}}}}\n  action: DENY\n  rules: [{{to: [{{operation: {{paths: [{path}]}}}}]}}]\n"
    )
}

/// Returns a DENY policy with too many paths and negated paths, for the application `app`.
fn too_large(name: &str, app: &str) -> String {
    let list = |stem: &str| {
        (0..VALUES)
            .map(|n| format!("/{stem}{n}"))
            .collect::<Vec<_>>()
            .join(",")
    };
    format!(
        "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  \
         selector: {{matchLabels: {{app: {app}}}}}\n  action: DENY\n  rules: [{{to: [{{operation: {{paths: [{}], notPaths: [{}]}}}}]}}]\n",
        list("p"),
        list("n")
    )
}

fn apply(mesh: &Mesh, tenant: &str, yaml: &str) -> ClientOutcome {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("policies.yaml");
    std::fs::write(&file, yaml).expect("written");
    mesh.canal(&[
        "apply",
        "--tenant",
        tenant,
        "-o",
        "json",
        "-f",
        &file.to_string_lossy(),
    ])
}

/// Returns the number of heads of a service's table in az1, of all replicas.
fn heads(mesh: &Mesh, service: &str) -> u64 {
    let status = mesh.canal(&["gateway", "status", service, "-o", "json"]);
    let Ok(status) = serde_json::from_str::<Value>(&status.stdout) else {
        return 0;
    };
    let tables = status["tables"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|table| table["az"] == "az1");
    tables
        .filter_map(|table| table["members"].as_array())
        .flatten()
        .filter_map(|member| member["heads"].as_u64())
        .sum()
}

/// Removes a process's configuration from its data: everything except the filesystem with the
/// kernel's maps, which is mounted there.
fn forget(mesh: &Mesh, host: &str) -> usize {
    let data = mesh.world.data(host).expect("a host of the world");
    let entries = std::fs::read_dir(&data)
        .unwrap_or_else(|e| panic!("{}: {e}", data.display()))
        .filter_map(Result::ok);
    let mut gone = 0;
    for path in entries
        .map(|entry| entry.path())
        .filter(|path| !path.ends_with("bpffs"))
    {
        let removed = if path.is_dir() {
            std::fs::remove_dir_all(&path)
        } else {
            std::fs::remove_file(&path)
        };
        removed.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        gone += 1;
    }
    gone
}

/// Checks that beta's policy is in force, that beta and gamma are served, and that their services
/// have all heads.
fn check_others_are_served(mesh: &Mesh, when: &str) {
    for service in ["beta/default/web", "gamma/default/web"] {
        until(
            deadline(STEP_TIMEOUT),
            &format!("{when}: {service} has its heads"),
            || heads(mesh, service) == HEADS,
        );
    }
    for (pod, path, wanted) in [
        (BETA, "/headers", 200),
        (GAMMA, "/headers", 200),
        (BETA, "/secret", 403),
    ] {
        until(
            deadline(STEP_TIMEOUT),
            &format!("{when}: {pod} gets {wanted} for {path}"),
            || code(mesh, pod, path) == wanted,
        );
    }
    // The policy stays in force: no late change opens access.
    for _ in 0..20 {
        assert_eq!(
            code(mesh, BETA, "/secret"),
            403,
            "{when}: beta's policy does not hold\n{}",
            mesh.logs()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Checks alpha's diagnostics: for policies that it applies, which change nothing, and for those in
/// its files, which are in force as denials.
fn bad_policies(mesh: &Mesh) {
    // Each policy has 1,200 values, more than the 1,024 that a policy may have.
    let all: Vec<String> = (0..BAD_POLICIES)
        .map(|n| too_large(&format!("bad-{n}"), "web-l7"))
        .chain([too_large("bad-web", "web")])
        .collect();
    let problems = |diagnostics: &Value| {
        let problems = diagnostics
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|found| found["problem"].as_str());
        problems
            .filter(|problem| problem.contains("more than 1024"))
            .count()
    };
    // Any number of policies in one request will do.
    let answer = apply(mesh, "alpha", &all[..50].concat()).json();
    assert_eq!(
        (
            answer["accepted"].as_bool(),
            problems(&answer["diagnostics"])
        ),
        (Some(false), 50),
        "each is reported, none accepted: {answer}"
    );
    assert_eq!(
        code(mesh, ALPHA, "/secret"),
        404,
        "a refused request changes nothing"
    );
    // When another tenant's DENY was lost, alpha had one good policy beside its bad ones.
    apply(mesh, "alpha", &deny("a0", "/nothing")).expect_success();
    // Files are not refused as requests are: a policy in a file that does not compile denies.
    for (n, part) in all.chunks(50).enumerate() {
        std::fs::write(
            mesh.world.config_dir("alpha").join(format!("bad-{n}.yaml")),
            part.concat(),
        )
        .expect("written");
    }
    let known = || mesh.canal(&["status", "-o", "json"]).json()["diagnostics"].to_string();
    until(
        deadline(STEP_TIMEOUT),
        "alpha gets diagnostics about its files",
        || known().contains("more than 1024"),
    );
    println!(
        "{} policies of alpha's are in force as denials, {} reported in status",
        BAD_POLICIES + 1,
        problems(&mesh.canal(&["status", "-o", "json"]).json()["diagnostics"])
    );
}

/// Alpha has a good policy and 301 that are too large, and a gateway repeatedly starts from nothing
/// and from its disk. Beta's DENY is in force from the first request on. Other tenants' services
/// keep their heads. The targets of alpha's own policies are denied and reported.
#[test]
fn one_tenants_bad_policies_affect_no_other_tenant() {
    let mesh = mesh();
    apply(mesh, "beta", &deny("secret", "/secret")).expect_success();
    until(deadline(STEP_TIMEOUT), "beta's policy holds", || {
        code(mesh, BETA, "/secret") == 403
    });
    bad_policies(mesh);
    mesh.converge(deadline(STEP_TIMEOUT));
    check_others_are_served(mesh, "with the gateway that ran before");
    // The number is the last part of the address of the Service.
    let closed = |app: &str, number: u32| {
        let url = format!("http://10.101.0.{number}/headers");
        until(
            deadline(STEP_TIMEOUT),
            &format!("alpha's policies deny what is {app}'s"),
            || mesh.code(ALPHA, &url, &[]) == 403,
        );
    };
    closed("web", 10);
    closed("web-l7", 11);
    assert_eq!(
        mesh.code(ALPHA, "http://10.101.0.12/headers", &[]),
        200,
        "what alpha's policies do not name is served"
    );

    mesh.world.stop(GATEWAY).unwrap();
    // Without its state file the gateway must get everything from the controller again.
    let gone = forget(mesh, GATEWAY);
    mesh.world.start(GATEWAY).unwrap();
    // The gateway admits no client before it is ready; from then on the policy is in force.
    mesh.world
        .wait_host_ready(GATEWAY, deadline(STEP_TIMEOUT))
        .unwrap();
    let opened = until(
        deadline(STEP_TIMEOUT),
        "the cold gateway answers beta",
        || code(mesh, BETA, "/secret") != 0,
    );
    println!(
        "a cold gateway ({gone} files gone) answers beta {opened:?} after it was ready: {}",
        code(mesh, BETA, "/secret")
    );
    check_others_are_served(mesh, "with a cold gateway");
    closed("web", 10);

    // After a plain restart the gateway begins with its state file.
    mesh.world.restart(GATEWAY).unwrap();
    mesh.world
        .wait_host_ready(GATEWAY, deadline(STEP_TIMEOUT))
        .unwrap();
    check_others_are_served(mesh, "with a gateway from its disk");
    until(
        deadline(STEP_TIMEOUT),
        "alpha's service has its heads too",
        || heads(mesh, "alpha/default/web") == HEADS,
    );
    let status = mesh.canal(&["status", "-o", "json"]).json();
    assert!(
        status["diagnostics"].to_string().contains("more than 1024"),
        "status tells of it: {}",
        status["diagnostics"]
    );
    mesh.converge(deadline(STEP_TIMEOUT));
}

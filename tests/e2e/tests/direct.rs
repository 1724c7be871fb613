//! The direct path: connections to ports declared TCP go from node to node, and no gateway sees
//! them. A policy that only a gateway can evaluate, a Service that refuses the path, and a pod that
//! dies redirect new connections without a failure. A policy that a node can evaluate is evaluated
//! there.

use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{Mesh, until};
use canal_timing::deadline;
use canal_world::Signal;

const TENANTS: [&str; 2] = ["alpha", "beta"];
const CLIENT: &str = "alpha/default/client-0";
const FAR: &str = "alpha/default/client-far-0";
/// Maximum time of a step on a quiet machine: a change is in force, or a process serves. It only
/// has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(15);
const ECHO: &str = "10.101.0.50:7000";

/// Returns a mesh of two tenants with the same addresses; alpha's `tcp` has a pod on each node.
fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        Mesh::up_with("mesh.yaml", "e2e-direct", |topology| {
            for tenant in &mut topology.tenants {
                tenant.pods.retain(|pod| {
                    ["redis", "tcp", "client", "client-far"].contains(&pod.name.as_str())
                });
                let mut second = tenant
                    .pods
                    .iter()
                    .find(|pod| pod.name == "tcp")
                    .expect("tcp")
                    .clone();
                second.name = "tcp-b".into();
                second.nodes = vec![format!("{}-n1", tenant.name)];
                tenant.pods.push(second);
            }
        })
    })
}

/// Returns the bytes that gateways relayed to a service of alpha's.
fn carried_by_gateways(service: &str) -> u64 {
    let label = format!("destination_service_name=\"{service}\"");
    mesh().counted_at("gateway", "istio_tcp_connections_opened_total", &[&label])
}

fn path_of(to: &str) -> String {
    let argv = [
        "explain",
        "--tenant",
        "alpha",
        "--from",
        "default/client",
        "--to",
        to,
        "-o",
        "json",
    ];
    mesh().canal(&argv).json()["path"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

fn redis(pod: &str, argv: &[&str]) -> (Option<i32>, String) {
    let all: Vec<&str> = ["timeout", "60", "redis-cli", "-h", "10.101.0.40"]
        .into_iter()
        .chain(argv.iter().copied())
        .collect();
    let output = mesh().run(pod, &all);
    (output.code, output.stdout.trim().to_owned())
}

/// Returns an AuthorizationPolicy for the pods of one application.
fn policy(name: &str, app: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  \
         selector: {{matchLabels: {{app: {app}}}}}\n  action: DENY\n  rules: [{{from: [{{source: {{{spec}}}}}]}}]\n"
    )
}

/// Returns the connections of a client to the echo service that its pods' nodes have admitted.
fn admitted(client: &str) -> u64 {
    let labels = [
        "reporter=\"destination\"",
        "destination_service_name=\"tcp\"",
        &format!("source_workload=\"{client}\""),
    ];
    mesh().counted_at("node", "istio_tcp_connections_opened_total", &labels)
}

/// Starts sessions that run until the test stops them, and waits until all are open.
fn sessions() -> std::process::Child {
    let before = admitted("client");
    let timeout_ms = deadline(Duration::from_secs(3)).as_millis().to_string();
    let argv = [
        "canal-samples",
        "sessions",
        ECHO,
        "-n",
        "20",
        "--interval-ms",
        "100",
        "--patience-ms",
        &timeout_ms,
        "-d",
        "600",
    ];
    let running = mesh().spawn(CLIENT, &argv);
    until(deadline(STEP_TIMEOUT), "all sessions are open", || {
        admitted("client") >= before + 20
    });
    running
}

#[test]
fn redis_goes_node_to_node_for_each_tenant() {
    // Gateways count relayed connections, so an unchanged count shows that none was used.
    let before = carried_by_gateways("redis");
    for tenant in TENANTS {
        let client = format!("{tenant}/default/client-0");
        until(deadline(STEP_TIMEOUT), "redis answers", || {
            redis(&client, &["ping"]).1 == "PONG"
        });
        // Both tenants write the same key at the same address and must read their own value.
        assert_eq!(redis(&client, &["set", "k", tenant]).1, "OK");
    }
    for tenant in TENANTS {
        assert_eq!(
            redis(&format!("{tenant}/default/client-0"), &["get", "k"]).1,
            tenant
        );
    }
    assert_eq!(path_of("default/redis:6379"), "direct, node to node");
    assert_eq!(
        carried_by_gateways("redis"),
        before,
        "a gateway carried redis"
    );
    let labels = [
        "reporter=\"destination\"",
        "destination_service_name=\"redis\"",
        "source_workload=\"client\"",
    ];
    assert!(
        // A ping, a set and a get of each tenant.
        mesh().counted_at("node", "istio_tcp_connections_opened_total", &labels) >= 6,
        "the service is named at its pods' node"
    );
    // The node evaluates a policy that it can: the connection stays on the direct path, and so do
    // the others.
    mesh().apply(
        "alpha",
        &policy(
            "no-far",
            "redis",
            "principals: [alpha.example/ns/default/sa/client-far]",
        ),
    );
    until(
        deadline(STEP_TIMEOUT),
        "a denied client gets no answer",
        || redis(FAR, &["ping"]).1 != "PONG",
    );
    assert_eq!(
        (
            redis(CLIENT, &["ping"]).1.as_str(),
            path_of("default/redis:6379").as_str()
        ),
        ("PONG", "direct, node to node")
    );
    mesh()
        .canal(&[
            "delete",
            "--tenant",
            "alpha",
            "AuthorizationPolicy",
            "no-far",
        ])
        .expect_success();
    until(
        deadline(STEP_TIMEOUT),
        "the client is answered again without the policy",
        || redis(FAR, &["ping"]).1 == "PONG",
    );
}

/// Sessions run during the change. Nodes cannot decide the new policy, so they end the direct
/// sessions, which reconnect at once through a gateway.
#[test]
fn policy_for_gateways_moves_connections_and_fails_none() {
    until(deadline(STEP_TIMEOUT), "the path is direct", || {
        path_of("default/tcp:7000") == "direct, node to node"
    });
    let running = sessions();
    let before = carried_by_gateways("tcp");
    // Only a gateway can evaluate `remoteIpBlocks`, so the policy moves the connections there.
    mesh().apply(
        "alpha",
        &policy("remote", "tcp", "remoteIpBlocks: [192.0.2.0/24]"),
    );
    until(
        deadline(STEP_TIMEOUT),
        "gateways carry all sessions",
        // `sessions` runs 20 sessions.
        || carried_by_gateways("tcp") >= before + 20,
    );
    let report = mesh()
        .stop("sessions over a policy's coming", running)
        .json();
    assert_eq!(
        (report["unopened"].as_u64(), report["held"].as_u64()),
        (Some(0), Some(20)),
        "{report}\n{}",
        mesh().logs()
    );
    assert!(
        path_of("default/tcp:7000").starts_with("gateway: alpha/default/remote depends on"),
        "{}",
        path_of("default/tcp:7000")
    );
    mesh()
        .canal(&[
            "delete",
            "--tenant",
            "alpha",
            "AuthorizationPolicy",
            "remote",
        ])
        .expect_success();
    until(deadline(STEP_TIMEOUT), "the path is direct again", || {
        path_of("default/tcp:7000") == "direct, node to node"
    });
}

/// The Service refuses the direct path while sessions run: none of them ends, and new connections
/// use a gateway.
#[test]
fn service_that_refuses_the_direct_path_ends_nothing() {
    let file = mesh().world.config_dir("alpha").join("services.yaml");
    let text = std::fs::read_to_string(&file).expect("the tenant's services");
    let running = sessions();
    let refusing =
        "metadata: {name: tcp, namespace: default, annotations: {canal.mesh/direct: \"false\"}}";
    std::fs::write(
        &file,
        text.replace("metadata: {name: tcp, namespace: default}", refusing),
    )
    .expect("written");
    until(deadline(STEP_TIMEOUT), "the gateway's", || {
        path_of("default/tcp:7000").starts_with("gateway: the Service")
    });
    mesh().converge(deadline(STEP_TIMEOUT));
    let before = carried_by_gateways("tcp");
    let argv = [
        "canal-samples",
        "tcp-client",
        ECHO,
        "--mode",
        "echo",
        "--size",
        "100000",
        "--timeout-ms",
        "120000",
    ];
    for _ in 0..5 {
        mesh().run(CLIENT, &argv).expect_success();
    }
    assert_eq!(carried_by_gateways("tcp"), before + 5);
    let report = mesh().stop("sessions over the change", running).json();
    assert_eq!(report["broken"], 0, "{report}");
    std::fs::write(&file, text).expect("written");
    until(deadline(STEP_TIMEOUT), "the path is direct again", || {
        path_of("default/tcp:7000") == "direct, node to node"
    });
    mesh().converge(deadline(STEP_TIMEOUT));
}

/// One of two pods dies: its sessions reconnect at once, and new connections never fail, before and
/// after the controller knows.
#[test]
fn a_dead_pod_loses_only_its_own_sessions() {
    let running = sessions();
    let before = admitted("client");
    mesh()
        .world
        .kill("alpha/default/tcp-0", Signal::Kill)
        .unwrap();
    until(
        deadline(STEP_TIMEOUT),
        "the sessions of the killed pod have reconnected",
        || admitted("client") > before,
    );
    let report = mesh().stop("sessions over a pod's death", running).json();
    assert_eq!(
        (report["unopened"].as_u64(), report["held"].as_u64()),
        (Some(0), Some(20)),
        "{report}\n{}",
        mesh().logs()
    );
}

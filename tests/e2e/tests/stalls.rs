//! Clients that do not read. Meanwhile other clients of the same pod, other ports, other pods and
//! other tenants are served. The memory that the clients occupied is freed when they close. The
//! tests cover the path through a gateway and the direct path.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{Mesh, until};
use canal_timing::deadline;

const CLIENT: &str = "alpha/default/client-0";
const FAR: &str = "alpha/default/client-far-0";
const OTHER_TENANT: &str = "beta/default/client-0";
/// Maximum time of a step on a quiet machine: a change is in force, or a process serves. It only
/// has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(15);
/// Connections that share one HBONE connection.
const COUNT: &str = "100";
const PROGRAM: &str = include_str!("../programs/stalls.py");
/// The echo application, never reached directly.
const SERVICE: &str = "---\napiVersion: v1\nkind: Service\nmetadata: {name: relayed, namespace: default, annotations: {canal.mesh/direct: \
                       \"false\"}}\nspec:\n  clusterIP: 10.101.0.51\n  clusterIPs: [10.101.0.51]\n  selector: {app: tcp}\n  ports: [{name: \
                       tcp-echo, port: 7000, targetPort: 7000}, {name: tcp-source, port: 7003, targetPort: 7003}]\n";

/// A path, and clients that stall on it.
struct StallCase {
    path: &'static str,
    mode: &'static str,
    host: &'static str,
    port: &'static str,
}

const CASES: [StallCase; 6] = [
    StallCase {
        path: "responses through a gateway",
        mode: "get",
        host: "10.101.0.10",
        port: "80",
    },
    StallCase {
        path: "responses of an undeclared port",
        mode: "get",
        host: "10.101.0.10",
        port: "82",
    },
    StallCase {
        path: "bytes through a gateway",
        mode: "read",
        host: "10.101.0.51",
        port: "7003",
    },
    StallCase {
        path: "an echo through a gateway",
        mode: "write",
        host: "10.101.0.51",
        port: "7000",
    },
    StallCase {
        path: "bytes from node to node",
        mode: "read",
        host: "10.101.0.50",
        port: "7003",
    },
    StallCase {
        path: "an echo from node to node",
        mode: "write",
        host: "10.101.0.50",
        port: "7000",
    },
];

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up_with("mesh.yaml", "e2e-stalls", |topology| {
            for tenant in &mut topology.tenants {
                tenant.pods.retain(|pod| {
                    ["blob", "tcp", "client", "client-far"].contains(&pod.name.as_str())
                });
            }
        });
        mesh.apply("alpha", SERVICE);
        mesh
    })
}

/// Returns whether the pod gets its bytes back from an echo application.
fn echoes(pod: &str, host: &str) -> bool {
    let program = "import socket, sys\ns = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))\ns.sendall(b'question')\n\
                   got = b''\nwhile len(got) < 8: got += s.recv(8) or sys.exit(1)\nsys.exit(got != b'question')";
    let seconds = deadline(Duration::from_secs(2)).as_secs().to_string();
    mesh()
        .run(pod, &["python3", "-c", program, host, &seconds])
        .code
        == Some(0)
}

/// Asserts that every other client is served.
fn assert_others_are_served(when: &str) {
    for pod in [CLIENT, FAR, OTHER_TENANT] {
        for port in ["80", "82"] {
            let code = mesh().code(
                pod,
                &format!("http://10.101.0.10:{port}/blob?size=100000"),
                &[],
            );
            assert_eq!(code, 200, "{when}: {pod}, port {port}");
        }
        assert!(echoes(pod, "10.101.0.50"), "{when}: {pod}, direct");
    }
    for pod in [CLIENT, FAR] {
        assert!(
            echoes(pod, "10.101.0.51"),
            "{when}: {pod}, through a gateway"
        );
    }
}

/// Starts the clients of a case, and returns once they stall.
fn stall(case: &StallCase) -> Child {
    let argv = [
        "python3", "-c", PROGRAM, case.mode, case.host, case.port, COUNT,
    ];
    let mut child = mesh().spawn(CLIENT, &argv);
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().expect("a pipe"))
        .read_line(&mut line)
        .expect("the program's output");
    assert_eq!(line.trim(), "stalled", "{}", case.path);
    child
}

#[test]
fn clients_that_do_not_read_block_no_other_client() {
    // Buffered bytes count against the tenant's share, and both proxies have one.
    let charged_bytes = || {
        ["gateway", "node"]
            .map(|kind| {
                mesh().counted_at(
                    kind,
                    "canal_share_used",
                    &[
                        &format!("limit=\"{kind}_buffer_bytes\""),
                        "tenant=\"alpha\"",
                    ],
                )
            })
            .iter()
            .sum::<u64>()
    };
    let stalled = || {
        ["gateway", "node"]
            .iter()
            .map(|kind| mesh().counted_at(kind, "canal_hbone_stalled_streams", &[]))
            .sum::<u64>()
    };
    // The service was applied when the mesh came up; both nodes must have it.
    until(deadline(STEP_TIMEOUT), "the new service is known", || {
        [CLIENT, FAR].iter().all(|pod| echoes(pod, "10.101.0.51"))
    });
    assert_others_are_served("at first");
    for case in &CASES {
        let mut child = stall(case);
        assert_others_are_served(case.path);
        until(
            deadline(STEP_TIMEOUT),
            "buffered bytes are charged to the client's tenant",
            // Both must be above zero: bytes without a stalled stream would be a transfer in
            // progress.
            || charged_bytes() > 0 && stalled() > 0,
        );
        // `timeout`, under which every client of a mesh runs, forwards the signal.
        rustix::process::kill_process(
            rustix::process::Pid::from_child(&child),
            rustix::process::Signal::TERM,
        )
        .expect("it runs");
        child.wait().expect("the program ends");
        assert_others_are_served(&format!("{}, closed", case.path));
        // Buffers of a stalled client must be freed when it ends, or they would leak from the
        // share.
        until(
            deadline(STEP_TIMEOUT),
            "the permits of the stalled client are returned",
            || charged_bytes() == 0 && stalled() == 0,
        );
    }
}

//! h2spec, the HTTP/2 conformance suite, against the gateway's HTTP/2 port. The gateway runs alone,
//! from a compiled state file, in a network namespace that disappears with the test.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use canal_e2e::{bin, root, until};
use canal_timing::deadline;

/// Ports of loopback that no other test uses.
const ORIGIN: u16 = 18_180;
/// Port of the gateway's plain listener.
const GATEWAY: u16 = 18_181;
/// A program listens within this time. It only has to exceed what a quiet machine needs: in the
/// gate, `deadline` waits a minute or more.
const LISTENS_WITHIN: Duration = Duration::from_secs(20);
/// A case of h2spec is answered within this time. It only has to exceed what a quiet machine needs:
/// in the gate, `deadline` waits a minute or more.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);

struct H2specProcess(Child);

impl Drop for H2specProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A network namespace with one address on its loopback device, held by a process.
struct NetnsHandle(H2specProcess);

impl NetnsHandle {
    fn new() -> Self {
        let script =
            "ip link set lo up && ip address add 10.99.0.1/32 dev lo && echo up && exec sleep 300";
        let mut child = Command::new("unshare")
            .args(["--net", "sh", "-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare");
        let mut ready_bytes = [0; 2];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready_bytes)
            .expect("the namespace comes up (as root)");
        Self(H2specProcess(child))
    }

    fn command(&self, program: &str) -> Command {
        let mut c = Command::new("nsenter");
        c.args([
            "--net",
            "--target",
            &self.0.0.id().to_string(),
            "--",
            program,
        ]);
        c
    }

    fn start(&self, argv: &[String], port: u16) -> H2specProcess {
        let child = self
            .command(&argv[0])
            .args(&argv[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", argv[0]));
        let mut program = H2specProcess(child);
        let probe = format!("exec 3<>/dev/tcp/127.0.0.1/{port}");
        until(
            deadline(LISTENS_WITHIN),
            &format!("{} listens on {port}", argv[0]),
            || {
                assert!(
                    program.0.try_wait().unwrap().is_none(),
                    "{} ended at once",
                    argv[0]
                );
                self.command("bash")
                    .args(["-c", &probe])
                    .stderr(Stdio::null())
                    .status()
                    .unwrap()
                    .success()
            },
        );
        program
    }
}

const CONFIG: &str = r#"apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: spec}
spec: {vni: 1, trustDomain: spec.example, podCidrs: [10.99.0.0/24], serviceCidrs: [10.64.0.0/12]}
---
apiVersion: v1
kind: Pod
metadata: {name: origin, namespace: default, labels: {app: origin}, annotations: {canal.mesh/tunnel: none, canal.mesh/az: az1}}
spec: {nodeName: n1, serviceAccountName: origin, containers: [{name: c, ports: [{containerPort: 18180}]}]}
status: {podIP: 10.99.0.1, podIPs: [{ip: 10.99.0.1}], conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Service
metadata: {name: origin, namespace: default}
spec: {clusterIP: 10.64.0.1, selector: {app: origin}, ports: [{name: http2, port: 80, targetPort: 18180}]}
"#;

fn gateway(netns: &NetnsHandle, dir: &Path) -> H2specProcess {
    let config = dir.join("config/spec");
    std::fs::create_dir_all(&config).unwrap();
    std::fs::write(config.join("all.yaml"), CONFIG).unwrap();
    let text = |p: &Path| p.to_str().expect("a UTF-8 path").to_string();
    let snapshot = text(&dir.join("snapshot"));
    let done = Command::new(bin("canal"))
        .args([
            "compile",
            &text(&dir.join("config")),
            "--snapshot",
            &snapshot,
        ])
        .status()
        .unwrap();
    assert!(done.success(), "canal compile");
    let flags = format!(
        "--replica spec --az az1 --workers 1 --data-dir {} --snapshot {snapshot} --plain 127.0.0.1:{GATEWAY}=spec/default/origin:80 \
         --admin-addr 127.0.0.1:18182 --metrics-addr 127.0.0.1:18183 --readiness-addr 127.0.0.1:18184",
        text(&dir.join("data"))
    );
    let argv: Vec<String> = [text(&bin("canal-gateway"))]
        .into_iter()
        .chain(flags.split_whitespace().map(str::to_string))
        .collect();
    netns.start(&argv, GATEWAY)
}

#[test]
fn h2spec_passes_wholly() {
    let dir = tempfile::tempdir().unwrap();
    // The ports are fixed, so the programs run in a network namespace of their own.
    let netns = NetnsHandle::new();
    let _origin = netns.start(
        &[
            bin("canal-samples").to_str().unwrap().into(),
            "blob".into(),
            "--port".into(),
            ORIGIN.to_string(),
        ],
        ORIGIN,
    );
    let _gateway = gateway(&netns, dir.path());
    let seconds = deadline(ANSWERED_WITHIN).as_secs().to_string();
    let out = netns
        .command(root().join(".tools/bin/h2spec").to_str().unwrap())
        // The response to this path follows the whole body: an early response could come before a
        // body that differs from its content-length.
        .args([
            "-h",
            "127.0.0.1",
            "-p",
            &GATEWAY.to_string(),
            "--timeout",
            &seconds,
            "--path",
            "/blob?size=100",
        ])
        .output()
        .expect("h2spec: run setup/install test");
    let text = String::from_utf8_lossy(&out.stdout);
    let last = text
        .lines()
        .find(|l| l.contains("tests,"))
        .unwrap_or_default()
        .to_string();
    println!("h2spec: {last}");
    let failures = text.split("Failures:").nth(1).unwrap_or_default();
    assert!(
        out.status.success() && last.contains(" 0 failed"),
        "{last}\n{failures}"
    );
    let passed: u32 = last
        .split(", ")
        .find_map(|p| p.strip_suffix(" passed")?.trim().parse().ok())
        .unwrap_or(0);
    // h2spec exits with 0 when it skips cases, so the number that passed is checked too.
    assert!(passed >= 144, "only {passed} cases passed: {last}");
}

//! h2spec, the HTTP/2 conformance suite, against the gateway's HTTP/2 port. The gateway runs alone on loopback from a compiled snapshot.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use canal_e2e::{bin, root};

const ORIGIN: u16 = 18_180;
const GATEWAY: u16 = 18_181;

struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(argv: &[String], port: u16) -> Program {
    let child = Command::new(&argv[0]).args(&argv[1..]).stdin(Stdio::null()).spawn().unwrap_or_else(|e| panic!("{}: {e}", argv[0]));
    let mut program = Program(child);
    let started = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(program.0.try_wait().unwrap().is_none(), "{} ended at once", argv[0]);
        assert!(started.elapsed() < Duration::from_secs(20), "{} does not listen on {port}", argv[0]);
        std::thread::sleep(Duration::from_millis(50));
    }
    program
}

const CONFIG: &str = r#"apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: spec}
spec: {vni: 1, trustDomain: spec.example, podCidrs: [127.0.0.0/8], serviceCidrs: [10.96.0.0/12]}
---
apiVersion: v1
kind: Pod
metadata: {name: origin, namespace: default, labels: {app: origin}, annotations: {canal.mesh/tunnel: none, canal.mesh/az: az1}}
spec: {nodeName: n1, serviceAccountName: origin, containers: [{name: c, ports: [{containerPort: 18180}]}]}
status: {podIP: 127.0.0.1, podIPs: [{ip: 127.0.0.1}], conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Service
metadata: {name: origin, namespace: default}
spec: {clusterIP: 10.96.0.1, selector: {app: origin}, ports: [{name: http, port: 80, targetPort: 18180}]}
"#;

fn gateway(dir: &Path) -> Program {
    let config = dir.join("config/spec");
    std::fs::create_dir_all(&config).unwrap();
    std::fs::write(config.join("all.yaml"), CONFIG).unwrap();
    let text = |p: &Path| p.to_str().expect("a UTF-8 path").to_string();
    let snapshot = text(&dir.join("snapshot"));
    let done = Command::new(bin("canal")).args(["compile", &text(&dir.join("config")), "--snapshot", &snapshot]).status().unwrap();
    assert!(done.success(), "canal compile");
    let flags = format!(
        "--replica spec --az az1 --workers 1 --data-dir {} --snapshot {snapshot} --plain 127.0.0.1:{GATEWAY}=spec/default/origin:80 \
         --admin-addr 127.0.0.1:18182 --metrics-addr 127.0.0.1:18183 --readiness-addr 127.0.0.1:18184",
        text(&dir.join("data"))
    );
    let argv: Vec<String> = [text(&bin("canal-gateway"))].into_iter().chain(flags.split_whitespace().map(str::to_string)).collect();
    start(&argv, GATEWAY)
}

#[test]
fn h2spec_passes_wholly() {
    let dir = tempfile::tempdir().unwrap();
    let _origin = start(&[bin("canal-samples").to_str().unwrap().into(), "blob".into(), "--port".into(), ORIGIN.to_string()], ORIGIN);
    let _gateway = gateway(dir.path());
    let out = Command::new(root().join(".tools/bin/h2spec"))
        .args(["-h", "127.0.0.1", "-p", &GATEWAY.to_string(), "--timeout", "2"])
        .output()
        .expect("h2spec: run setup/install test");
    let text = String::from_utf8_lossy(&out.stdout);
    let last = text.lines().find(|l| l.contains("tests,")).unwrap_or_default().to_string();
    println!("h2spec: {last}");
    let failures = text.split("Failures:").nth(1).unwrap_or_default();
    assert!(out.status.success() && last.contains(" 0 failed"), "{last}\n{failures}");
    let passed: u32 = last.split(", ").find_map(|p| p.strip_suffix(" passed")?.trim().parse().ok()).unwrap_or(0);
    assert!(passed >= 144, "only {passed} cases passed: {last}");
}

//! Tests of the real process beside a real controller. Pods are added and removed by files, and
//! certificates are fetched. The node starts without a controller, and pods stay captured when the
//! node is killed.

#[path = "../../../dataplane/node-proxy/tests/fixture/gateway.rs"]
mod gateway;
#[path = "../../../dataplane/offload/tests/lab/mod.rs"]
mod lab;
#[allow(
    unreachable_pub,
    reason = "the lint also applies to items that are public inside the crate"
)]
#[path = "../../../testing/src/loopback.rs"]
mod loopback;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use canal_controller_core::{Controller, ControllerConfig};
use canal_identity::certs::{CertificateConfig, CertificateSource};
use canal_net::sys::Netns as OpenNetns;
use canal_runtime::drain;
use canal_runtime::metrics::Registry;
use canal_southbound_client::controller_client::ControllerEndpoint;
use canal_timing::{assert_time, deadline};
use gateway::{FakeGateway, GatewayBehavior};
use lab::{CaseProcess, Cgroup, LabNetns};
use sha2::{Digest, Sha256};
use tokio::runtime::Runtime;

const VIP: &str = "10.96.0.1:80";
const GATEWAY: &str = "10.77.255.1";
const CONFIG: &str = r#"
apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: alpha}
spec: {vni: 101, trustDomain: alpha.example, podCidrs: [10.77.0.0/24, "fd77::/64"], serviceCidrs: [10.96.0.0/16]}
---
apiVersion: canal.mesh/v1
kind: GatewayReplica
metadata: {name: g1}
spec: {az: az1, addresses: [10.77.255.1]}
---
apiVersion: v1
kind: Service
metadata: {name: shop, namespace: b}
spec: {clusterIP: 10.96.0.1, selector: {app: shop}, ports: [{name: tcp, port: 80}]}
---
apiVersion: v1
kind: Pod
metadata: {name: app-0, namespace: b, labels: {app: app}}
spec: {nodeName: n1, serviceAccountName: app, containers: [{name: c}]}
status: {podIP: 10.77.0.2, podIPs: [{ip: 10.77.0.2}, {ip: "fd77::2"}], conditions: [{type: Ready, status: "True"}]}
"#;

/// The entry point of the child process.
#[test]
fn the_client() {
    if let Some(case) = lab::case() {
        lab::client::run(&case);
    }
}

/// A machine: a controller, a pod's namespace and cgroup, an outside namespace, and directories for
/// a node.
struct NodeMachine {
    runtime: Runtime,
    live_controller: Mutex<Option<Controller>>,
    controller: ControllerEndpoint,
    ns: LabNetns,
    outside: LabNetns,
    cg: Cgroup,
    dir: tempfile::TempDir,
    /// The node's admin, metrics and readiness addresses.
    pages: [SocketAddr; 3],
    pins: PathBuf,
    capture: &'static str,
}

/// Maximum time of a step on a quiet machine.
/// A scan every 2 s, a tenth of it, finds what no event reports to the node.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum time of one answer on a quiet machine.
/// An answer takes milliseconds; it is far below [`STEP_TIMEOUT`], so that one that hangs is named.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

impl NodeMachine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for d in ["config/alpha", "pods", "tokens"] {
            fs::create_dir_all(at(d)).unwrap();
        }
        fs::write(at("config/alpha/mesh.yaml"), CONFIG).unwrap();
        // The node and the fake gateway have a token each. The controller's list has hashes of
        // them.
        let mut principals = String::new();
        for (token, kind) in [
            ("n1", "kind: node, name: n1, tenant: alpha, az: az1"),
            ("g1", "kind: gateway, name: g1, az: az1"),
        ] {
            let hash: String = Sha256::digest(token)
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect();
            principals.push_str(&format!("- {{tokenSha256: {hash}, {kind}}}\n"));
            fs::write(at("tokens").join(token), token).unwrap();
        }
        fs::write(at("principals.yaml"), principals).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let config = ControllerConfig {
            listen: "127.0.0.1:0".parse().unwrap(),
            admin: None,
            metrics: None,
            data_dir: at("controller"),
            config_dir: Some(at("config")),
            principals: at("principals.yaml"),
            infra_dir: at("infra"),
            // No certificate expires during a test.
            svid_seconds: 3600,
            trust: Default::default(),
            jwks: Default::default(),
            limits: canal_controller_core::ControllerLimits::default(),
        };
        let live_controller = runtime.block_on(Controller::start(config)).unwrap();
        let controller = ControllerEndpoint {
            addresses: vec![live_controller.address().to_string()],
            root: at("infra/root.pem"),
            token: at("tokens/n1"),
        };
        // `ns` is the pod's namespace, `outside` the network where the gateway and other clients
        // are.
        // `nowhere` is the far end of the pod's `pod0`, which `LabNetns::new` leaves unconnected.
        let (ns, outside, cg) = (LabNetns::new(), LabNetns::bare(), Cgroup::new());
        ns.ip(&format!(
            "link set nowhere netns {} name out0",
            outside.name()
        ));
        outside.ip("link set out0 up");
        outside.ip(&format!("addr add {GATEWAY}/32 dev out0"));
        outside.ip("route add 10.77.0.2/32 dev out0");
        ns.ip(&format!("route add {GATEWAY}/32 dev pod0"));
        let pages = [(); 3].map(|()| loopback::own_address());
        let (pins, capture) = (at("bpffs"), "bpf");
        Self {
            pins,
            capture,
            runtime,
            live_controller: Mutex::new(Some(live_controller)),
            controller,
            ns,
            outside,
            cg,
            dir,
            pages,
        }
    }

    fn node_command(&self) -> Command {
        let at = |name: &str| self.dir.path().join(name);
        let page = |i: usize| self.pages[i].to_string();
        let capture = self.capture;
        let mut c = Command::new(env!("CARGO_BIN_EXE_canal-node"));
        // Two workers are the fewest that share the pods. A short drain ends a test soon if a
        // connection stays open.
        c.args([
            "--node",
            "n1",
            "--az",
            "az1",
            "--workers",
            "2",
            "--capture",
            capture,
            "--drain-seconds",
            "5",
        ]);
        c.args([
            "--controller",
            &format!("https://{}", self.controller.addresses[0]),
        ]);
        for (flag, path) in [
            ("--root-ca", self.controller.root.clone()),
            ("--token-file", self.controller.token.clone()),
            ("--data-dir", at("node")),
            ("--pods-dir", at("pods")),
            ("--bpf-pin-dir", self.pins.clone()),
            ("--access-log", at("access.log")),
        ] {
            c.arg(flag).arg(path);
        }
        c.args([
            "--admin-addr",
            &page(0),
            "--metrics-addr",
            &page(1),
            "--readiness-addr",
            &page(2),
        ]);
        c
    }

    fn node(&self) -> NodeProcess<'_> {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir.path().join("node.log"))
            .unwrap();
        let child = self
            .node_command()
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        NodeProcess {
            child,
            machine: self,
        }
    }

    fn pod_file(&self) -> PathBuf {
        self.dir.path().join("pods/app-0.json")
    }

    fn add_pod(&self) {
        let text = serde_json::json!({
            "uid": "alpha/b/app-0", "namespace": "b", "name": "app-0", "serviceAccount": "app", "netns": self.ns.path(),
            "cgroup": self.cg.dir, "ips": ["10.77.0.2", "fd77::2"], "labels": {"app": "app"}, "workloadApi": true,
        });
        let new = self.dir.path().join("pods/.new");
        fs::write(&new, text.to_string()).unwrap();
        fs::rename(new, self.pod_file()).unwrap();
    }

    fn dial(&self) -> String {
        CaseProcess::start(&self.ns, Some(&self.cg), "dial", &[VIP]).line()
    }

    fn assert_served(&self, why: &str) {
        // A gateway that does not run for a moment is a failed one to the node.
        self.until(why, || {
            let outcome = self.dial();
            let is_served = outcome.ends_with(&format!("reply={VIP}"));
            if !is_served {
                eprintln!(
                    "{why}: {outcome}\n{}",
                    fs::read_to_string(self.dir.path().join("access.log")).unwrap_or_default()
                );
            }
            is_served
        });
    }

    /// Returns whether a process listens on the capture port in the pod.
    fn listens(&self) -> bool {
        let at: SocketAddr = "127.0.0.1:15001".parse().unwrap();
        self.ns.within(|| TcpStream::connect(at).is_ok())
    }

    /// Returns whether a client outside without mTLS reaches the application.
    fn plain(&self) -> bool {
        let at: SocketAddr = "10.77.0.2:8080".parse().unwrap();
        let dialled = self
            .outside
            .within(|| TcpStream::connect_timeout(&at, Duration::from_secs(5)));
        dialled.is_ok_and(|mut s| s.read(&mut [0]).is_ok_and(|n| n == 1))
    }

    /// Starts a gateway outside, with a certificate from the controller.
    fn gateway(&self) -> FakeGateway {
        let config = CertificateConfig {
            controller: ControllerEndpoint {
                token: self.dir.path().join("tokens/g1"),
                ..self.controller.clone()
            },
            folder: self.dir.path().join("gateway-certs"),
            validity: Duration::from_secs(3600),
        };
        let credential = self.runtime.block_on(async {
            let (_trigger, drain) = drain::tree();
            let source = CertificateSource::start(config, &Registry::new(), drain).unwrap();
            let credential = source.credential(&canal_model::identity::gateway_identity(
                "alpha.example".parse().unwrap(),
            ));
            tokio::time::timeout(deadline(STEP_TIMEOUT), credential.first())
                .await
                .expect("a certificate in time");
            credential
        });
        FakeGateway::listen(
            OpenNetns::open(self.outside.path()).unwrap(),
            GATEWAY,
            GatewayBehavior::SendAuthority,
            credential,
        )
    }

    fn stop_controller(&self) {
        if let Some(live_controller) = self.live_controller.lock().unwrap().take() {
            self.runtime.block_on(live_controller.stop());
        }
    }

    fn until(&self, what: &str, mut holds: impl FnMut() -> bool) -> Duration {
        let start = Instant::now();
        while !holds() {
            let log = || fs::read_to_string(self.dir.path().join("node.log")).unwrap_or_default();
            let waited = start.elapsed();
            assert!(
                waited < deadline(STEP_TIMEOUT),
                "not in time: {what}\n{}",
                log()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        start.elapsed()
    }

    /// Sends GET and returns `(status, body)`. The status is 0 if there is no answer.
    fn get(&self, page: usize, path: &str) -> (u16, String) {
        self.request("GET", page, path)
    }

    fn request(&self, method: &str, page: usize, path: &str) -> (u16, String) {
        let Ok(s) = TcpStream::connect(self.pages[page]) else {
            return (0, String::new());
        };
        s.set_read_timeout(Some(deadline(ANSWERS_WITHIN))).unwrap();
        exchange(s, method, path)
    }

    /// Works like [`NodeMachine::request`], on the proxy's admin socket.
    fn fetch_socket(&self, method: &str, path: &str) -> (u16, String) {
        let Ok(s) = UnixStream::connect(self.dir.path().join("node/admin.sock")) else {
            return (0, String::new());
        };
        s.set_read_timeout(Some(deadline(ANSWERS_WITHIN))).unwrap();
        exchange(s, method, path)
    }

    fn config_dump(&self) -> String {
        self.fetch_socket("GET", "/config_dump").1
    }
}

/// Sends one request and returns `(status, body)` of its answer.
fn exchange(mut io: impl Read + Write, method: &str, path: &str) -> (u16, String) {
    write!(io, "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
    let mut all = String::new();
    let _ = io.read_to_string(&mut all);
    let status = all
        .split(' ')
        .nth(1)
        .and_then(|c| c.parse().ok())
        .unwrap_or(0);
    (
        status,
        all.split_once("\r\n\r\n")
            .map(|(_, b)| b.to_string())
            .unwrap_or_default(),
    )
}

impl Drop for NodeMachine {
    fn drop(&mut self) {
        self.stop_controller();
        assert!(
            self.node_command()
                .arg("--release")
                .stderr(Stdio::inherit())
                .status()
                .unwrap()
                .success()
        );
    }
}

struct NodeProcess<'a> {
    child: Child,
    machine: &'a NodeMachine,
}

impl NodeProcess<'_> {
    fn ready(&self) -> Duration {
        self.machine
            .until("ready", || self.machine.get(2, "/healthz/ready").0 == 200)
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM and returns the exit status.
    fn terminate(mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for NodeProcess<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn pods_come_and_go_by_files() {
    let m = NodeMachine::new();
    let node = m.node();
    node.ready();
    let _gateway = m.gateway();
    m.add_pod();
    let took = m.until("served", || m.listens());
    // Shorter than the 2 s between two scans, so that only inotify can have reported the file.
    assert_time(
        "time from a pod's file to its listener",
        took,
        Duration::from_millis(1500),
    );
    m.assert_served("through the gateway, with a certificate from the controller");

    let dump = m.config_dump();
    let dump: serde_json::Value = serde_json::from_str(&dump).unwrap();
    assert_eq!(
        dump["pods"][0]["identity"], "spiffe://alpha.example/ns/b/sa/app",
        "{dump}"
    );
    assert_eq!(
        (
            dump["pods"][0]["capture"].as_str(),
            dump["tenants"][0]["services"].as_u64()
        ),
        (Some("bpf"), Some(1))
    );
    let metric = |line: &str| m.until(line, || m.get(1, "/metrics").1.lines().any(|l| l == line));
    metric("canal_node_pods{state=\"served\"} 1");
    // Exactly one mode is 1; the other is shown as 0, so that a change of modes is visible.
    metric("canal_node_capture_mode{mode=\"bpf\"} 1");
    metric("canal_node_capture_mode{mode=\"nft\"} 0");
    m.until("taken", || {
        m.get(1, "/metrics")
            .1
            .lines()
            .any(|l| l.starts_with("canal_capture_verdicts_total{verdict=\"taken_v4\"} "))
    });

    // The pod is deleted while one of its processes still runs: nothing listens, and no packet gets
    // out.
    // The pod's process waits between its two connects, and so keeps the pod's cgroup in use.
    let mut lives = CaseProcess::start(
        &m.ns,
        Some(&m.cg),
        "redial",
        // No service has this address; the process only has to wait.
        &["10.96.0.9:80", "10.96.0.9:80"],
    );
    lives.line();
    fs::remove_file(m.pod_file()).unwrap();
    m.until("closed", || !m.listens());
    // Captured, but nobody listens: the connect is refused inside the pod.
    assert_eq!(m.dial(), "error ConnectionRefused Some(111)");
    metric("canal_node_pods{state=\"leaving\"} 1");
    drop(lives);
    // The capture is removed with the last process, so the address has no route any more.
    m.until("let go", || {
        m.dial() == "error NetworkUnreachable Some(101)"
    });

    m.add_pod();
    m.until("served again", || m.listens());
    m.assert_served("through the gateway");
    assert_eq!(node.terminate(), Some(0), "nothing was open: a clean drain");
}

#[test]
fn a_killed_node_starts_again_without_the_controller_and_no_pod_was_ever_open() {
    let m = NodeMachine::new();
    m.add_pod();
    let gateway = m.gateway();
    let node = m.node();
    node.ready();
    m.until("served", || m.listens());
    m.assert_served("through the gateway");
    // The certificate and the snapshot are on disk by now, so the controller can stop.
    m.stop_controller();
    m.assert_served("the node continues");
    node.kill();
    // Several attempts, since each must be refused.
    for _ in 0..3 {
        assert_eq!(
            m.dial(),
            "error ConnectionRefused Some(111)",
            "captured, and refused"
        );
    }
    let node = m.node();
    node.ready();
    m.until("served", || m.listens());
    m.assert_served("from the snapshot, with the certificate from disk");
    let dump = m.config_dump();
    // JSON writers differ in blanks.
    assert!(
        dump.contains("\"live\":false") || dump.contains("\"live\": false"),
        "{dump}"
    );
    assert_eq!(node.terminate(), Some(0));
    assert_eq!(
        m.dial(),
        "error ConnectionRefused Some(111)",
        "stopped in order: still captured"
    );
    assert!(
        m.node_command()
            .arg("--release")
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(
        m.dial(),
        "error NetworkUnreachable Some(101)",
        "released by an operator's command"
    );
    // Held until here, so that the refusals above were the node's and not for lack of a gateway.
    drop(gateway);
}

#[test]
fn policies_apply_to_inbound_plaintext_and_outlive_the_node() {
    let m = NodeMachine::new();
    let app = m.ns.listen("10.77.0.2:8080");
    std::thread::spawn(move || {
        app.incoming()
            .flatten()
            .for_each(|mut s| drop(s.write_all(b"x")))
    });
    m.add_pod();
    let node = m.node();
    node.ready();
    m.until("served", || m.listens());
    // Without a policy, plaintext must reach the application, or its later refusal proves nothing.
    m.until("no policy exists", || m.plain());
    // The pod's file requests the Workload API (`workloadApi: true`).
    let api: SocketAddr = "127.0.0.1:15010".parse().unwrap();
    m.until("the Workload API", || {
        m.ns.within(|| TcpStream::connect(api).is_ok())
    });

    let policy = m.dir.path().join("config/alpha/policy.yaml");
    let strict = "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {name: mtls-please, namespace: b}\nspec: {mtls: {mode: STRICT}}\n";
    fs::write(&policy, strict).unwrap();
    m.until("strict", || !m.plain());
    m.until("named", || {
        m.get(1, "/metrics").1.contains(
            "canal_node_refused_total{direction=\"inbound\",reason=\"strict_plaintext\"} ",
        )
    });
    // JSON writers differ in blanks.
    assert!(
        m.config_dump()
            .contains("\"peerAuthentication\": \"Strict\"")
            || m.config_dump()
                .contains("\"peerAuthentication\":\"Strict\"")
    );
    // A killed node starts from this snapshot.
    let snapshot = m.dir.path().join("node/snapshot");
    m.until("kept", || {
        // 11 is the length of the searched name.
        fs::read(&snapshot).is_ok_and(|bytes| bytes.windows(11).any(|w| w == b"mtls-please"))
    });
    node.kill();
    // Several attempts, since each must be refused.
    assert!(
        (0..3).all(|_| !m.plain()),
        "the node has ended, and the program is still attached"
    );
    let node = m.node();
    let start = Instant::now();
    // Every moment of the start is checked, until the node is ready.
    while m.get(2, "/healthz/ready").0 != 200 {
        let waited = start.elapsed();
        assert!(
            !m.plain() && waited < deadline(STEP_TIMEOUT),
            "plaintext gets in, or the start takes too long"
        );
    }
    m.until("served", || m.listens());
    // Several attempts, since the change from the old listener to the new one must let none in.
    assert!((0..20).all(|_| !m.plain()));

    fs::remove_file(policy).unwrap();
    m.until("open again", || m.plain());
    m.until("left alone", || {
        m.get(1, "/metrics")
            .1
            .lines()
            .any(|l| l == "canal_node_plaintext_captured_pods 0")
    });
    node.kill();
    m.until("no guard is configured, so no part of it is left", || {
        m.plain()
    });
}

#[test]
fn nftables_captures_with_a_warning_when_bpf_is_refused() {
    let mut m = NodeMachine::new();
    // A datagram must have a route, or it would fail for that reason and not by the guard.
    m.ns.ip("route add default dev pod0");
    // A bpffs cannot be mounted on a file, and without a directory for the pins BPF counts as
    // refused.
    m.pins = m.dir.path().join("file");
    fs::write(&m.pins, "").unwrap();
    let refused = m.node_command().output().unwrap();
    assert!(
        !refused.status.success()
            && String::from_utf8_lossy(&refused.stderr).contains("--bpf-pin-dir"),
        "`--capture bpf` has no fallback"
    );
    m.capture = "auto";
    let node = m.node();
    node.ready();
    let _gateway = m.gateway();
    m.add_pod();
    m.until("served", || m.listens());
    m.assert_served("through the gateway");
    m.until("mode", || {
        m.get(1, "/metrics")
            .1
            .lines()
            .any(|l| l == "canal_node_capture_mode{mode=\"nft\"} 1")
    });
    assert!(m.config_dump().contains("captureFallback"));
    let outcome = fs::read_to_string(m.dir.path().join("node.log")).unwrap();
    assert!(
        outcome.contains("capture of this node falls back to nftables"),
        "{outcome}"
    );
    // An uncaptured protocol: with nftables too, no datagram may leave the pod.
    let datagram = || {
        let mut client = CaseProcess::start(
            &m.ns,
            Some(&m.cg),
            "send",
            // Protocol, destination, source, and no hardware address.
            &["udp", "10.77.255.1:99", "10.77.0.2", "-"],
        );
        assert_eq!(client.line(), "open");
        client.go_on();
        client.line()
    };
    // Error 1 is EPERM, by which a packet filter refuses a send.
    assert_eq!(
        datagram(),
        "error 1",
        "what the mesh does not carry is stopped, too"
    );
    let counted = "canal_pod_guard_packets_total{tenant=\"alpha\",verdict=\"stopped_udp\"} 1";
    m.until("counted", || {
        m.get(1, "/metrics").1.lines().any(|l| l == counted)
    });
    node.kill();
    assert_eq!(datagram(), "error 1", "the guard outlives the node");
    assert_eq!(
        m.dial(),
        "error ConnectionRefused Some(111)",
        "the table outlives the node, too"
    );
}

/// A tenant's UDPRoute opens a port of the pod to the tier and to no other source. Without the
/// route the port closes. Tested with BPF and with nftables.
#[test]
fn datagrams_of_the_tier_reach_the_ports_of_udp_routes_while_these_exist() {
    const OUTSIDE: &str = "10.77.254.1";
    const ROUTE: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: names, namespace: b}
spec: {clusterIP: 10.96.0.9, selector: {app: app}, ports: [{name: dns, port: 53, protocol: UDP, targetPort: 5353}]}
---
apiVersion: gateway.networking.k8s.io/v1alpha2
kind: UDPRoute
metadata: {name: names, namespace: b}
spec: {parentRefs: [{group: "", kind: Service, name: names}], rules: [{backendRefs: [{name: names, port: 53}]}]}
"#;
    // Both capture modes guard the pod by different means.
    for capture in ["bpf", "nft"] {
        let mut m = NodeMachine::new();
        m.capture = capture;
        m.outside.ip(&format!("addr add {OUTSIDE}/32 dev out0"));
        m.ns.ip(&format!("route add {OUTSIDE}/32 dev pod0"));
        m.add_pod();
        let node = m.node();
        node.ready();
        m.until("served", || m.listens());
        let mut app = CaseProcess::start(&m.ns, Some(&m.cg), "answer", &["0.0.0.0:5353"]);
        assert_eq!(app.line(), "open");
        let answers = |from: &str| {
            let socket = m.outside.within(|| UdpSocket::bind((from, 0)).unwrap());
            socket
                // Silence means a drop. The `until`s repeat the question, so a late answer does not
                // fail the test.
                .set_read_timeout(Some(Duration::from_millis(300)))
                .unwrap();
            socket.send_to(b"x", "10.77.0.2:5353").unwrap();
            socket.recv(&mut [0; 8]).is_ok()
        };
        assert!(!answers(GATEWAY), "{capture}: no route opens the port");
        let route = m.dir.path().join("config/alpha/udp.yaml");
        fs::write(&route, ROUTE).unwrap();
        m.until("the port opens", || answers(GATEWAY));
        // An address that is not the gateway's must not be let in by the same route.
        assert!(!answers(OUTSIDE), "{capture}: no address of the tier");
        let passed =
            "canal_pod_guard_packets_total{tenant=\"alpha\",verdict=\"passed_udp_route\"} ";
        m.until("counted", || m.get(1, "/metrics").1.contains(passed));
        m.until("shown", || {
            m.config_dump()
                .split_whitespace()
                .collect::<String>()
                .contains("\"udpPorts\":[5353]")
        });
        node.kill();
        m.until("the guard and its ports outlive the node", || {
            answers(GATEWAY)
        });
        let node = m.node();
        node.ready();
        fs::remove_file(route).unwrap();
        m.until("the port closes", || !answers(GATEWAY));
        drop(node);
    }
}

/// Runs in a namespace that stands for the host. The controller is not reachable there, and not
/// needed.
#[test]
fn containers_interfaces_are_guarded_until_the_node_releases_them() {
    let m = NodeMachine::new();
    let host = &m.outside;
    // The pair stands for a container's interface, of which the host sees `to-a`.
    host.ip("link add to-a type veth peer name in-a");
    ["to-a", "in-a"]
        .iter()
        .for_each(|device| host.ip(&format!("link set {device} up")));
    host.ip("addr add 10.99.0.9/24 dev in-a");
    // The configured MAC is not that of the container.
    let text = r#"{"containers": [{"interface": "to-a", "tenant": "alpha", "vni": 101, "mac": "02:00:00:00:00:0a", "addresses": ["10.99.0.9"]}]}"#;
    let bindings = m.dir.path().join("bindings.json");
    fs::write(&bindings, text).unwrap();
    let guarded = || {
        let shown = Command::new("tc")
            .args([
                "-n",
                host.name(),
                "filter",
                "show",
                "dev",
                "to-a",
                "ingress",
            ])
            .output()
            .unwrap();
        String::from_utf8_lossy(&shown.stdout).contains("canal_interface")
    };
    let metrics = || host.within(|| m.get(1, "/metrics")).1;
    let start = || {
        let child = host.within(|| {
            m.node_command()
                .arg("--interface-bindings")
                .arg(&bindings)
                .stdin(Stdio::null())
                .spawn()
                .unwrap()
        });
        NodeProcess { child, machine: &m }
    };
    let node = start();
    m.until("guarded", || {
        metrics()
            .lines()
            .any(|l| l == "canal_interface_guard_interfaces{state=\"guarded\"} 1")
    });
    assert!(guarded());
    let socket = host.within(|| UdpSocket::bind("10.99.0.9:0").unwrap());
    // The guard refuses the neighbor discovery that this send causes.
    let _ = socket.send_to(b"x", "10.99.0.10:9");
    let refused = "canal_interface_guard_refused_total{interface=\"to-a\",tenant=\"alpha\"} ";
    m.until("refused and counted", || {
        metrics()
            .lines()
            .filter_map(|l| l.strip_prefix(refused))
            .any(|n| n != "0")
    });
    node.kill();
    assert!(guarded(), "no node runs");
    let node = start();
    m.until("adopted", || {
        metrics()
            .lines()
            .any(|l| l == "canal_interface_guard_interfaces{state=\"guarded\"} 1")
    });
    assert_eq!(node.terminate(), Some(0));
    assert!(guarded(), "it ended in order");
    assert!(
        host.within(|| m.node_command().arg("--release").status().unwrap())
            .success()
    );
    assert!(!guarded(), "nothing stays");
}

#[test]
fn the_admin_page_sets_the_level_and_ends_the_node_in_order() {
    let m = NodeMachine::new();
    let mut node = m.node();
    node.ready();
    assert_eq!(
        m.fetch_socket("POST", "/logging?level=canal_node_proxy=debug")
            .0,
        200
    );
    assert!(m.get(0, "/logging").1.contains("canal_node_proxy=debug"));
    assert_eq!(m.get(0, "/version").1.trim(), env!("CARGO_PKG_VERSION"));
    assert_eq!(m.request("POST", 0, "/quitquitquit").0, 403);
    assert_eq!(m.fetch_socket("POST", "/quitquitquit").0, 200);
    assert_eq!(node.child.wait().unwrap().code(), Some(0));
}

#[test]
fn bad_flags_and_addresses_are_reported_in_one_line() {
    let m = NodeMachine::new();
    let run = |args: &[&str]| {
        let out = m.node_command().args(args).output().unwrap();
        assert!(!out.status.success());
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    assert!(run(&["--controller", "nowhere"]).contains("write https://HOST:PORT"));
    assert!(run(&["--log", "!!"]).contains("--log"));
    let _taken = TcpListener::bind(m.pages[0]).unwrap();
    let outcome = run(&[]);
    assert!(
        outcome.contains("fix: stop what listens there"),
        "{outcome}"
    );
}

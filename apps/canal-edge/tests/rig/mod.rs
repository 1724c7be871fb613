//! A namespace with an edge's device, replicas that answer health probes, and the folders of an edge. All is removed on drop; what a
//! killed run left behind is removed by the next one. Needs root.
#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod controller;

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use canal_model::ids::{ReplicaNumber, ServiceId, Vni};
use canal_model::program::{BUCKETS, BucketTable, GatewayAddress, Node, OutsideMesh, Replica, Resource, Tenant};
use controller::{Controller, Desk};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

static NEXT: AtomicU32 = AtomicU32::new(0);
const PREFIX: &str = "canal-edge-test-";

fn run(program: &str, args: &[&str]) -> String {
    let o = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}; these tests need root and iproute2"));
    assert!(o.status.success(), "{program} {args:?}: {}; these tests need root", String::from_utf8_lossy(&o.stderr));
    String::from_utf8_lossy(&o.stdout).into_owned()
}

/// A named network namespace with `eth0`, the edge's address and two replicas' addresses.
pub(crate) struct Netns(String);

impl Netns {
    fn new() -> Self {
        for e in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
            let name = e.file_name().to_string_lossy().into_owned();
            if let Some(pid) = name.strip_prefix(PREFIX).and_then(|n| n.split('-').next())
                && !Path::new("/proc").join(pid).exists()
            {
                let _ = Command::new("ip").args(["netns", "del", &name]).output();
            }
        }
        let n = Self(format!("{PREFIX}{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed)));
        run("ip", &["netns", "add", &n.0]);
        for args in [
            "link set lo up",
            "link add eth0 mtu 1500 type veth peer name wire",
            "link set eth0 up",
            "link set wire up",
            "addr add 250.1.0.1/32 dev lo",
            "addr add 250.1.0.11/32 dev lo",
            "addr add 250.1.0.12/32 dev lo",
        ] {
            n.ip(args);
        }
        n
    }

    pub(crate) fn ip(&self, args: &str) {
        run("ip", &["-n", &self.0].into_iter().chain(args.split(' ')).collect::<Vec<_>>());
    }

    pub(crate) fn tc(&self, args: &str) -> String {
        run("tc", &["-n", &self.0].into_iter().chain(args.split(' ')).collect::<Vec<_>>())
    }

    /// The ID of the program on the device, if it is an edge's.
    pub(crate) fn program(&self) -> Option<String> {
        let shown = self.tc("filter show dev eth0 ingress");
        let line = shown.lines().find(|l| l.contains("canal_edge"))?;
        let mut words = line.split_whitespace().skip_while(|w| *w != "id");
        words.nth(1).map(ToString::to_string)
    }

    /// Runs `f` on a thread inside the namespace.
    pub(crate) fn within<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        let ns = fs::File::open(Path::new("/run/netns").join(&self.0)).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| {
                move_into_link_name_space(ns.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                f()
            })
            .join()
            .unwrap()
        })
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).output();
    }
}

/// A replica's readiness page. Dropping it closes the port.
pub(crate) struct ReplicaPage {
    pub(crate) draining: Arc<AtomicBool>,
    end: Arc<AtomicBool>,
    address: Ipv4Addr,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ReplicaPage {
    pub(crate) fn open(ns: &Netns, address: [u8; 4]) -> Self {
        let address = Ipv4Addr::from(address);
        let listener = ns.within(|| TcpListener::bind((address, 15021)).unwrap());
        let (draining, end) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (is_draining, ends) = (draining.clone(), end.clone());
        let thread = std::thread::spawn(move || {
            while let Ok((mut tcp, _)) = listener.accept() {
                if ends.load(Relaxed) {
                    return;
                }
                let mut head = [0; 1024];
                let _ = tcp.read(&mut head);
                let answer = if is_draining.load(Relaxed) { "503 Service Unavailable\r\n\r\ndraining\n" } else { "200 OK\r\n\r\nready\n" };
                let _ = write!(tcp, "HTTP/1.0 {answer}");
            }
        });
        Self { draining, end, address, thread: Some(thread) }
    }

    pub(crate) fn close(mut self, ns: &Netns) {
        self.end.store(true, Relaxed);
        let address = self.address;
        // Wakes the accept.
        let _ = ns.within(move || TcpStream::connect((address, 15021)));
        if let Some(t) = self.thread.take() {
            t.join().unwrap();
        }
    }
}

/// Resources of one tenant with one service.
pub(crate) fn resources() -> Vec<Resource> {
    let (vni, id, az) = (Vni::new(101).unwrap(), ServiceId::new(5).unwrap(), || "az1".parse().unwrap());
    let number = |n| ReplicaNumber::new(n).unwrap();
    let replica = |n: u32, underlay: [u8; 4]| {
        Resource::Replica(Replica {
            name: format!("g{n}").parse().unwrap(),
            number: number(n),
            backend: "be-1".parse().unwrap(),
            az: az(),
            underlay: underlay.into(),
            up: true,
        })
    };
    vec![
        Resource::Tenant(Tenant {
            name: "alpha".parse().unwrap(),
            vni,
            trust_domain: "alpha.example".parse().unwrap(),
            pod_cidrs: vec!["10.1.0.0/16".parse().unwrap()],
            gateway_cidrs: vec!["10.255.0.0/16".parse().unwrap()],
            outside: OutsideMesh::Deny,
            resolvers: Vec::new(),
            keys: Default::default(),
            shares: Default::default(),
        }),
        Resource::Node(Node {
            tenant: "alpha".parse().unwrap(),
            name: "n1".parse().unwrap(),
            az: az(),
            underlay: Ipv4Addr::new(172, 16, 0, 1),
            mac: [2, 0, 0, 0, 0, 1],
            pod_cidrs: vec!["10.1.1.0/24".parse().unwrap(), "fd01:1::/64".parse().unwrap()],
        }),
        replica(1, [250, 1, 0, 11]),
        replica(2, [250, 1, 0, 12]),
        Resource::Address(GatewayAddress {
            service: "alpha/shop/web".parse().unwrap(),
            id,
            az: az(),
            addresses: vec!["10.255.32.1".parse().unwrap(), "fd02::1".parse().unwrap()],
            open: true,
        }),
        Resource::Table(BucketTable {
            service: "alpha/shop/web".parse().unwrap(),
            id,
            az: az(),
            vni,
            version: 3,
            chains: vec![vec![number(1), number(2)]; BUCKETS],
        }),
    ]
}

/// A machine for one edge.
pub(crate) struct Machine {
    pub(crate) ns: Netns,
    pub(crate) controller: Mutex<Option<Controller>>,
    pub(crate) dir: tempfile::TempDir,
    address: String,
}

impl Machine {
    /// Beside a controller that the test plays.
    pub(crate) fn new() -> Self {
        let mut controller = None;
        let mut machine = Self::beside(|ns, folder| {
            let listener = ns.within(|| TcpListener::bind("127.0.0.1:0").unwrap());
            let desk = Desk { resources: resources(), generation: 1, ..Desk::default() };
            controller.insert(Controller::start(listener, folder, Arc::new(Mutex::new(desk)))).address
        });
        machine.controller = Mutex::new(controller);
        machine
    }

    /// Beside the controller that `start` starts in the namespace; it writes `root.pem` and `token` to the folder.
    pub(crate) fn beside(start: impl FnOnce(&Netns, &Path) -> SocketAddr) -> Self {
        let (ns, dir) = (Netns::new(), tempfile::tempdir().unwrap());
        let address = format!("https://{}", start(&ns, dir.path()));
        Self { ns, controller: Mutex::new(None), dir, address }
    }

    pub(crate) fn pins(&self) -> PathBuf {
        self.dir.path().join("bpffs")
    }

    /// The file of interface bindings, which a test may write.
    pub(crate) fn bindings(&self) -> PathBuf {
        self.dir.path().join("interfaces.json")
    }

    pub(crate) fn command(&self) -> Command {
        let mut c = Command::new("nsenter");
        c.arg(format!("--net=/run/netns/{}", self.ns.0)).arg(env!("CARGO_BIN_EXE_canal-edge"));
        c.args(["--edge", "edge-1", "--az", "az1", "--address", "250.1.0.1", "--controller", &self.address]);
        for (flag, name) in [("--root-ca", "root.pem"), ("--token-file", "token"), ("--data-dir", "edge"), ("--pin-dir", "bpffs")] {
            c.arg(flag).arg(self.dir.path().join(name));
        }
        let bindings = self.bindings();
        if bindings.exists() {
            c.arg("--interface-bindings").arg(bindings);
        }
        // The replicas of this namespace have 15021 of their own addresses.
        c.args(["--metrics-addr", "127.0.0.1:15020", "--readiness-addr", "127.0.0.1:15021"]);
        c
    }

    pub(crate) fn edge(&self) -> Edge<'_> {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.dir.path().join("edge.log")).unwrap();
        let child = self.command().stdin(Stdio::null()).stderr(log).spawn().unwrap();
        Edge { child, machine: self }
    }

    pub(crate) fn output(&self, args: &[&str]) -> Output {
        self.command().args(args).output().unwrap()
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("edge.log")).unwrap_or_default()
    }

    pub(crate) fn until(&self, what: &str, mut holds: impl FnMut() -> bool) -> Duration {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < Duration::from_secs(20), "not in time: {what}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        start.elapsed()
    }

    /// `(status, body)`; status 0 if nobody answers.
    pub(crate) fn ask(&self, method: &str, port: u16, path: &str) -> (u16, String) {
        self.ns.within(|| {
            let Ok(s) = TcpStream::connect(("127.0.0.1", port)) else { return (0, String::new()) };
            s.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            exchange(s, method, path)
        })
    }

    /// As [`Machine::ask`], on the agent's admin socket.
    pub(crate) fn ask_socket(&self, method: &str, path: &str) -> (u16, String) {
        let Ok(s) = UnixStream::connect(self.dir.path().join("edge/admin.sock")) else { return (0, String::new()) };
        s.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        exchange(s, method, path)
    }

    pub(crate) fn dump(&self) -> serde_json::Value {
        serde_json::from_str(&self.ask_socket("GET", "/config_dump").1).unwrap_or_default()
    }

    pub(crate) fn metric(&self, line: &str) -> bool {
        self.ask("GET", 15020, "/metrics").1.lines().any(|l| l == line)
    }

    /// What the newest report says of the replicas, and when it came.
    pub(crate) fn seen(&self) -> Option<(Instant, Vec<(String, bool)>)> {
        let controller = self.controller.lock().unwrap();
        let desk = controller.as_ref()?.desk.lock().unwrap();
        let (at, report) = desk.reports.last()?;
        Some((*at, report.seen.iter().map(|s| (s.replica.clone(), s.up)).collect()))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let detached = self.output(&["--detach"]);
        if !std::thread::panicking() {
            assert!(detached.status.success(), "{}", String::from_utf8_lossy(&detached.stderr));
        }
    }
}

/// One request and its answer: `(status, body)`.
fn exchange(mut io: impl Read + Write, method: &str, path: &str) -> (u16, String) {
    write!(io, "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
    let mut all = String::new();
    let _ = io.read_to_string(&mut all);
    let status = all.split(' ').nth(1).and_then(|c| c.parse().ok()).unwrap_or(0);
    (status, all.split_once("\r\n\r\n").map(|(_, b)| b.to_string()).unwrap_or_default())
}

/// The process.
pub(crate) struct Edge<'a> {
    pub(crate) child: Child,
    machine: &'a Machine,
}

impl Edge<'_> {
    pub(crate) fn ready(&self) -> Duration {
        self.machine.until("ready", || self.machine.ask("GET", 15021, "/healthz/ready").0 == 200)
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM; its exit status.
    pub(crate) fn terminate(mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Edge<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

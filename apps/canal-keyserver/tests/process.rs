//! Tests of the real process beside a fake controller. It is confined, authenticates, signs and
//! does handshakes for entitled requesters, and stores no key on disk. It drains on SIGTERM, and
//! makes new keys after a restart.

#[path = "../../../dataplane/keyserver-engine/tests/fixture/mod.rs"]
mod fixture;

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use canal_model::program::{Resource, ResourceKind};
use canal_model::trust::KeyAlgorithm;
use canal_testing::loopback::own_address;
use canal_testing::{FakeController, FakeStream, TestCa, identity};
use canal_timing::deadline;
use canal_wire::citadel::IstioCertificateResponse;
use canal_wire::discovery::{DeltaDiscoveryResponse, Resource as Envelope};
use canal_wire::keyrpc::{HandshakeRole, KeyName, KeyRefusal, KeyRequest};
use canal_wire::southbound::encode;
use fixture::*;
use rustix::process::{Pid, Signal};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

struct KeyServerProcess {
    child: Child,
    keys: SocketAddr,
    admin: SocketAddr,
    readiness: SocketAddr,
}

impl KeyServerProcess {
    fn start(folder: &Path, controller: &str) -> Self {
        // Each process needs addresses that no other test uses.
        let (keys, admin, metrics, readiness) =
            (own_address(), own_address(), own_address(), own_address());
        let child = Command::new(env!("CARGO_BIN_EXE_canal-keyserver"))
            .args([
                "--name",
                "ks-1",
                "--az",
                "az1",
                // One worker is enough: the test measures nothing.
                "--workers",
                "1",
                "--controller",
                &format!("https://{controller}"),
            ])
            .args([
                "--listen",
                &keys.to_string(),
                "--admin-addr",
                &admin.to_string(),
            ])
            .args([
                "--metrics-addr",
                &metrics.to_string(),
                "--readiness-addr",
                &readiness.to_string(),
            ])
            .arg("--root-ca")
            .arg(folder.join("root.pem"))
            .arg("--token-file")
            .arg(folder.join("token"))
            .arg("--data-dir")
            .arg(folder.join("data"))
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        Self {
            child,
            keys,
            admin,
            readiness,
        }
    }

    async fn ready(&self) {
        let end = Instant::now() + deadline(SOON);
        while fetch(self.readiness, "/healthz/ready")
            .await
            .is_none_or(|(status, _)| status != 200)
        {
            assert!(
                Instant::now() < end,
                "not ready: {:?}",
                fetch(self.readiness, "/healthz/ready").await
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn proc(&self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).unwrap()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    async fn wait_for_exit(&mut self) -> ExitStatus {
        let end = Instant::now() + deadline(SOON);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "it does not end");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for KeyServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn fetch(address: SocketAddr, path: &str) -> Option<(u16, String)> {
    exchange(tokio::net::TcpStream::connect(address).await.ok()?, path).await
}

async fn exchange(
    mut io: impl AsyncReadExt + AsyncWriteExt + Unpin,
    path: &str,
) -> Option<(u16, String)> {
    io.write_all(
        format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").as_bytes(),
    )
    .await
    .ok()?;
    let mut all = String::new();
    io.read_to_string(&mut all).await.ok()?;
    let (head, body) = all.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_string()))
}

/// Issues certificates: for components by `infra`, for alpha by `alpha`. Returns the requests.
fn issue(
    controller: &FakeController,
    infra: Arc<TestCa>,
    alpha: Arc<TestCa>,
) -> Arc<Mutex<Vec<String>>> {
    let requested = Arc::new(Mutex::new(Vec::new()));
    let remembered = requested.clone();
    controller.issue(move |request| {
        remembered.lock().unwrap().push(request.csr.clone());
        let fields = request.metadata.unwrap_or_default().fields;
        let named = format!("{:?}", fields.get("ImpersonatedIdentity"));
        let ca = if named.contains("components.canal") {
            &infra
        } else {
            &alpha
        };
        Ok(IstioCertificateResponse {
            cert_chain: vec![ca.sign_request(&request.csr, |_| {}), ca.root_pem()],
        })
    });
    requested
}

async fn send(stream: &FakeStream, all: &[Arc<Resource>]) {
    let names: Vec<_> = all
        .iter()
        .filter(|r| r.kind().is_security())
        .map(|r| (r.kind(), r.name()))
        // The manifest lists all security resources, so that a subscriber knows when it has them
        // all.
        .collect();
    let sealed = names.iter().map(|(kind, name)| (*kind, name.as_str(), "1"));
    let manifest = Arc::new(Resource::Manifest(
        canal_wire::southbound::manifest::compute(&"alpha".parse().unwrap(), sealed),
    ));
    let all: Vec<Arc<Resource>> = all.iter().cloned().chain([manifest]).collect();
    // The manifest goes last, so that the subscriber then has all that it lists.
    for kind in [
        ResourceKind::Tenant,
        ResourceKind::Bundle,
        ResourceKind::Entitlement,
        ResourceKind::Manifest,
    ] {
        let envelope = |r: &Arc<Resource>| Envelope {
            name: r.name(),
            version: "1".into(),
            resource: Some(prost_types::Any {
                type_url: kind.type_url().into(),
                value: encode(r),
            }),
        };
        stream
            .send(DeltaDiscoveryResponse {
                system_version_info: "1".into(),
                type_url: kind.type_url().into(),
                resources: all
                    .iter()
                    .filter(|r| r.kind() == kind)
                    .map(envelope)
                    .collect(),
                removed_resources: vec![],
                nonce: format!("{kind:?}"),
                ..DeltaDiscoveryResponse::default()
            })
            .await;
    }
}

async fn signature(channel: &Channel) -> ServerReply {
    let key = KeyName::Identity(identity(WEB));
    channel
        .start_call(&KeyRequest::Sign {
            key,
            presented: None,
            scheme: 0x0403,
            deadline_ms: 0,
            input: &verify_input(),
        })
        .next()
        .await
}

/// Checks that neither core dumps nor swap can contain the process's memory.
fn is_confined(process: &KeyServerProcess) {
    let limits = process.proc("limits");
    let core = limits
        .lines()
        .find(|l| l.starts_with("Max core file size"))
        .unwrap()
        .split_whitespace()
        .collect::<Vec<_>>();
    assert_eq!(&core[4..6], ["0", "0"], "{limits}");
    assert_eq!(process.proc("coredump_filter").trim(), "00000000");
    let status = process.proc("status");
    let locked = status
        .lines()
        .find_map(|l| l.strip_prefix("VmLck:"))
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse::<u64>()
        .unwrap();
    let size = status
        .lines()
        .find_map(|l| l.strip_prefix("VmSize:"))
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse::<u64>()
        .unwrap();
    // The guard pages of stacks, and areas that the kernel itself maps, are not locked.
    assert!(locked > size / 2, "{locked} of {size} kB are locked");
}

/// Checks the files of a folder for keys. PKCS#8 of ECDSA begins with a version and the algorithm.
fn no_key_is_in(folder: &Path) {
    let files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_file())
        .collect();
    for file in files {
        let bytes = std::fs::read(&file).unwrap();
        let holds = |needle: &[u8]| bytes.windows(needle.len()).any(|w| w == needle);
        assert!(
            !holds(b"PRIVATE KEY") && !holds(&[0x02, 0x01, 0x00, 0x30, 0x13, 0x06, 0x07, 0x2a]),
            "{}",
            file.display()
        );
    }
}

/// Returns the number of private keys as PKCS#8 (P-256, without parameters) in the writable memory
/// of a process.
fn private_keys(pid: u32) -> usize {
    const BEGIN: [u8; 36] = [
        0x30, 0x81, 0x87, 0x02, 0x01, 0x00, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d,
        0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x04, 0x6d, 0x30,
        0x6b, 0x02, 0x01, 0x01, 0x04, 0x20,
    ];
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let (mut count, mut pages) = (0, 0);
    for line in maps
        .lines()
        .filter(|l| l.split(' ').nth(1).is_some_and(|p| p.starts_with("rw")))
    {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let (from, to) = (
            u64::from_str_radix(from, 16).unwrap(),
            u64::from_str_radix(to, 16).unwrap(),
        );
        let mut area = vec![0; usize::try_from(to - from).unwrap()];
        if std::os::unix::fs::FileExt::read_exact_at(&memory, &mut area, from).is_ok() {
            pages += area.len() / 4096;
            count += area
                .windows(BEGIN.len())
                .filter(|w| w[0] == 0x30 && *w == BEGIN)
                .count();
        }
    }
    assert!(pages > 100, "only {pages} pages could be read");
    count
}

/// Checks who reads the admin pages, and that they show no private key.
async fn admin_pages_show_no_secret(process: &KeyServerProcess, folder: &Path) {
    assert_eq!(fetch(process.admin, "/config_dump").await.unwrap().0, 403);
    let socket = tokio::net::UnixStream::connect(folder.join("data/admin.sock"))
        .await
        .unwrap();
    let (_, dump) = exchange(socket, "/config_dump").await.unwrap();
    assert!(
        dump.contains("avx512_ifma") && dump.contains(WEB) && !dump.contains("PRIVATE"),
        "{dump}"
    );
    let (_, metrics) = fetch(process.admin, "/metrics").await.unwrap();
    assert!(
        metrics.contains(
            "canal_key_operations_total{kind=\"sign\",algorithm=\"ecdsa\",tenant=\"alpha\"} 1"
        ),
        "{metrics}"
    );
}

/// Checks that a signal ends the process only after the handshake that is in flight.
async fn end_after_the_work_in_flight(
    process: &mut KeyServerProcess,
    channel: &Channel,
    alpha: &TestCa,
) {
    let peers = Peers::new(
        alpha,
        &alpha.issue_with(&identity(PEER), |_| {}),
        "alpha.example",
        &[WEB],
    );
    let mut call = channel.begin(WEB, HandshakeRole::Client, &[PEER], 0);
    let ServerReply::Send(hello) = call.next().await else {
        panic!("not a ClientHello")
    };
    process.signal(Signal::TERM);
    let mut refused = ServerReply::Pong;
    while !matches!(refused, ServerReply::Refused(KeyRefusal::Draining, _)) {
        refused = signature(channel).await;
    }
    let mut server = peers.server();
    feed_peer(&mut server, &hello);
    channel.send_request(
        call.id,
        &KeyRequest::More {
            bytes: &flight(&mut server),
        },
    );
    assert!(matches!(call.next().await, ServerReply::Done { .. }));
    assert_eq!(process.wait_for_exit().await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_server_lives_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    let mut controller = FakeController::start().await;
    let (infra, alpha) = (
        Arc::new(TestCa::new("infra")),
        Arc::new(TestCa::new("alpha")),
    );
    let requested = issue(&controller, infra.clone(), alpha.clone());
    let reached = controller.reached_through(folder.path(), controller.address);
    let expected = [
        tenant("alpha", KeyAlgorithm::EcdsaP256),
        alpha.bundle("alpha", "alpha.example", false, vec![]),
        entitlement("alpha", "node/n1", &[WEB]),
    ];
    let mut process = KeyServerProcess::start(folder.path(), &reached.addresses[0]);
    let mut stream = controller.stream().await;
    // The process has subscribed.
    assert!(stream.receive().await.is_some());
    send(&stream, &expected).await;
    process.ready().await;

    is_confined(&process);
    let channel = Channel::connect(process.keys, &infra, NODE).await.unwrap();
    assert!(matches!(
        signature(&channel).await,
        ServerReply::Signature(_)
    ));
    // A node of another tenant has a valid channel certificate and no entitlement.
    let foreign = Channel::connect(process.keys, &infra, BETA_NODE)
        .await
        .unwrap();
    assert!(matches!(
        signature(&foreign).await,
        ServerReply::Refused(KeyRefusal::NotEntitled, _)
    ));
    admin_pages_show_no_secret(&process, folder.path()).await;

    no_key_is_in(&folder.path().join("data"));
    // Between operations the memory contains no PKCS#8 of P-256, which is the form in which keys
    // are sealed and opened.
    assert_eq!(private_keys(process.child.id()), 0);

    end_after_the_work_in_flight(&mut process, &channel, &alpha).await;

    // After a restart the process reads the entitlements from its own disk. It never stored its
    // keys, so each is new.
    let before = requested.lock().unwrap().clone();
    let mut process = KeyServerProcess::start(folder.path(), &reached.addresses[0]);
    process.ready().await;
    let channel = Channel::connect(process.keys, &infra, NODE).await.unwrap();
    assert!(matches!(
        signature(&channel).await,
        ServerReply::Signature(_)
    ));
    let after = requested.lock().unwrap().clone();
    assert!(
        // The process has requested certificates for its own key and for that of WEB.
        after.len() >= before.len() + 2
            && after[before.len()..]
                .iter()
                .all(|csr| !before.contains(csr))
    );
    // A second signal ends the process at once, even with a handshake in flight.
    let _call = channel.begin(WEB, HandshakeRole::Client, &[PEER], 0);
    assert!(channel.lives().await);
    process.signal(Signal::TERM);
    // The first signal must have been handled, because the kernel merges two pending ones.
    while !matches!(
        signature(&channel).await,
        ServerReply::Refused(KeyRefusal::Draining, _)
    ) {}
    process.signal(Signal::TERM);
    assert_eq!(process.wait_for_exit().await.code(), Some(0));
}

#[test]
fn mistakes_are_reported_before_anything_starts() {
    let out = Command::new(env!("CARGO_BIN_EXE_canal-keyserver"))
        .arg("--help")
        .output()
        .unwrap();
    let help = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success()
            && [
                "--tls-dir",
                "--rsa-open-ms",
                "--allow-unlocked",
                "Examples:"
            ]
            .iter()
            .all(|f| help.contains(f)),
        "{help}"
    );
    // The folder cannot be created, so that the last case fails after the flags were accepted.
    let rest = [
        "--az",
        "az1",
        "--controller",
        "https://127.0.0.1:1",
        "--root-ca",
        "r",
        "--token-file",
        "t",
        "--data-dir",
        "/proc/none",
    ];
    // Code 2 is a wrong command line, 1 a failure of the start.
    for (more, code, text) in [
        (&["--name", "A_b"][..], 2, "name"),
        (&["--name", "ks-1", "--tls-dir", "x"], 2, "--tenant"),
        (&["--name", "ks-1"], 1, "--data-dir"),
    ] {
        let out = Command::new(env!("CARGO_BIN_EXE_canal-keyserver"))
            .args(rest)
            .args(more)
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(
            out.status.code() == Some(code) && stderr.contains(text),
            "{more:?}: {:?} {stderr}",
            out.status
        );
    }
}

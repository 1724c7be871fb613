//! Tests of the controller as a process: it starts quickly, ends in order, explains mistakes in its
//! flags, and loses nothing when it is killed.

#[path = "../../../control/controller-core/tests/fixture/mod.rs"]
mod fixture;
#[allow(
    unreachable_pub,
    reason = "the lint also applies to items that are public inside the crate"
)]
#[path = "../../../testing/src/loopback.rs"]
mod loopback;

use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use canal_timing::assert_time;
use canal_wire::api;
use canal_wire::api::admin_client::AdminClient;
use canal_wire::api::{ApplyRequest, GetRequest, StatusRequest};
use fixture::{PRINCIPALS, route, service, tenant, wait_limit, with_token};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::mpsc;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

const BINARY: &str = env!("CARGO_BIN_EXE_canal-controller");

/// Directories of one controller, and its port.
struct ControllerFolders {
    dir: tempfile::TempDir,
    listen: SocketAddr,
}

impl ControllerFolders {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("config/alpha")).unwrap();
        std::fs::write(
            dir.path().join("config/alpha/mesh.yaml"),
            tenant("alpha", 1),
        )
        .unwrap();
        fixture::write_principals(&dir.path().join("principals.yaml"), &PRINCIPALS);
        Self {
            dir,
            listen: loopback::own_address(),
        }
    }

    fn args(&self) -> Vec<String> {
        let at = |name: &str| self.dir.path().join(name).display().to_string();
        [
            ("--listen", self.listen.to_string()),
            ("--data-dir", at("data")),
            ("--config-dir", at("config")),
            ("--principals", at("principals.yaml")),
            ("--infra-dir", at("infra")),
            ("--admin-addr", "127.0.0.1:0".into()),
            ("--metrics-addr", "127.0.0.1:0".into()),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_string(), value])
        .collect()
    }

    fn start(&self) -> Running {
        let child = Command::new(BINARY)
            .args(self.args())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Running(child)
    }

    /// Connects once the controller serves, and returns how long that took.
    async fn client(&self) -> (AdminClient<Channel>, Duration) {
        let begun = Instant::now();
        let until = begun + wait_limit();
        loop {
            assert!(Instant::now() < until, "the controller does not serve");
            if let Ok(root) = std::fs::read_to_string(self.dir.path().join("infra/root.pem")) {
                let tls = ClientTlsConfig::new()
                    .ca_certificate(Certificate::from_pem(root))
                    .domain_name("canal-controller");
                let endpoint = Endpoint::from_shared(format!("https://{}", self.listen))
                    .unwrap()
                    .tls_config(tls)
                    .unwrap();
                if let Ok(channel) = endpoint.connect().await {
                    return (AdminClient::new(channel), begun.elapsed());
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A child process that does not outlive its test.
struct Running(Child);

impl Running {
    fn terminate(&self) {
        let pid = Pid::from_raw(i32::try_from(self.0.id()).unwrap()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
    }
    fn log(&mut self) -> String {
        let mut text = String::new();
        self.0
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        text
    }
}
impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn apply(yaml: String) -> tonic::Request<ApplyRequest> {
    let files = vec![canal_wire::api::File {
        path: "f.yaml".into(),
        yaml,
    }];
    with_token(
        ApplyRequest {
            tenant: "alpha".into(),
            files,
            dry_run: false,
        },
        "root",
    )
}

async fn applied(client: &mut AdminClient<Channel>) -> Vec<String> {
    let request = GetRequest {
        tenant: "alpha".into(),
        kind: "svc".into(),
        ..GetRequest::default()
    };
    let objects = client
        .get(with_token(request, "root"))
        .await
        .unwrap()
        .into_inner()
        .objects;
    objects
        .into_iter()
        .filter(|o| o.origin == "api")
        .map(|o| o.name)
        .collect()
}

#[tokio::test]
async fn a_kill_loses_no_acknowledged_apply_and_generations_never_go_back() {
    let folders = ControllerFolders::new();
    let mut acknowledged: Vec<String> = Vec::new();
    let (mut generation, mut quickest) = (0, Duration::MAX);
    // Rounds differ in the number of changes and in the pause, so that kills meet different states.
    // Eight rounds meet each count of answers and each pause below at least once.
    for round in 0..8u64 {
        let mut running = folders.start();
        let (mut client, took) = folders.client().await;
        quickest = quickest.min(took);
        let found = applied(&mut client).await;
        let lost: Vec<&String> = acknowledged.iter().filter(|n| !found.contains(n)).collect();
        assert!(lost.is_empty(), "round {round} lost {lost:?}");
        let now = client
            .status(with_token(StatusRequest {}, "root"))
            .await
            .unwrap()
            .into_inner()
            .generation;
        assert!(now >= generation, "round {round}: {now} after {generation}");
        generation = now;

        let (acknowledge, written) = mpsc::unbounded_channel();
        // The writer never stops by itself; the kill ends it in the middle of a change.
        let writer = tokio::spawn(async move {
            let mut acks = Vec::new();
            for i in 0.. {
                let name = format!("r{round}-{i}");
                // The fixture's addresses differ in one byte, and the rounds may need more.
                match client
                    .apply(apply(
                        service(1, &name, 0).replace("10.91.0.0", &address(round, i)),
                    ))
                    .await
                {
                    Ok(done) => {
                        let done = done.into_inner();
                        assert!(done.accepted, "{:?}", fixture::errors(&done.diagnostics));
                        acks.push((name, done.generation));
                        // `several` drops the receiver once it has its count; later answers need no
                        // report.
                        let _ = acknowledge.send(());
                    }
                    Err(_) => break,
                }
            }
            acks
        });
        // 3 to 9 answers, by a formula that needs no random numbers.
        several(written, 3 + round * 5 % 7).await;
        // Up to 7 ms more, within which a change may be anywhere between request and disk.
        tokio::time::sleep(Duration::from_millis(round * 3 % 8)).await;
        running.0.kill().unwrap();
        running.0.wait().unwrap();
        for (name, g) in writer.await.unwrap() {
            assert!(
                g > generation,
                "round {round}: generation {g} after {generation}"
            );
            generation = g;
            acknowledged.push(name);
        }
    }
    // Without many acknowledged changes nothing could have been lost. Two a round are far fewer
    // than the rounds wait for.
    assert!(
        acknowledged.len() > 16,
        "too little was written to prove anything: {}",
        acknowledged.len()
    );
    // The quickest start counts, because other work on the machine delays some of them.
    assert_time(
        "quickest of eight starts of a controller after a kill",
        quickest,
        // A quiet machine needs a hundredth of it (docs/timing.md).
        Duration::from_secs(1),
    );
    println!(
        "{} applies over 8 kills, the quickest start {quickest:?}",
        acknowledged.len()
    );
}

/// Waits until a task has reported this many answers.
async fn several(mut reports: mpsc::UnboundedReceiver<()>, answers: u64) {
    for _ in 0..answers {
        let report = tokio::time::timeout(wait_limit(), reports.recv())
            .await
            .expect("an answer in time");
        report.expect("the controller answers until it is killed");
    }
}

/// Rotation phase and roots of alpha's CA, the signing root first.
type Roots = (String, Vec<String>);

fn roots(answer: api::TrustResponse) -> Roots {
    let domain = answer.domains.into_iter().next().unwrap();
    (
        domain.phase,
        domain.roots.into_iter().map(|r| r.fingerprint).collect(),
    )
}

/// Returns whether one step of a root rotation leads from `a` to `b`.
fn is_next((phase, a): &Roots, (next, b): &Roots) -> bool {
    match (phase.as_str(), next.as_str()) {
        ("steady", "announced") => b.len() == 2 && a[0] == b[0],
        ("announced", "switched") => b.len() == 2 && a[0] == b[1] && a[1] == b[0],
        ("switched", "steady") => b.len() == 1 && a[0] == b[0],
        _ => false,
    }
}

#[tokio::test]
async fn a_kill_at_any_step_of_a_root_rotation_undoes_no_step() {
    let folders = ControllerFolders::new();
    let mut last: Option<Roots> = None;
    let mut steps = 0;
    // Eight rounds meet each pause below once.
    for round in 0..8u64 {
        let mut running = folders.start();
        let (mut client, _) = folders.client().await;
        let request = api::TrustRequest {
            tenant: "alpha".into(),
            certificates: false,
        };
        let now = roots(
            client
                .trust(with_token(request, "root"))
                .await
                .unwrap()
                .into_inner(),
        );
        if let Some(last) = &last {
            // The step that was in progress at the kill may have been completed, but no other.
            assert!(
                now == *last || is_next(last, &now),
                "round {round}: {now:?} after {last:?}"
            );
        }
        let (acknowledge, turned) = mpsc::unbounded_channel();
        let turner = tokio::spawn(async move {
            let mut seen = vec![now];
            // `force` takes the next step at once; otherwise it would wait for the settle time.
            let request = || api::RotateRequest {
                tenant: "alpha".into(),
                force: true,
            };
            while let Ok(done) = client.rotate_root(with_token(request(), "root")).await {
                seen.push(roots(done.into_inner()));
                // As above, `several` drops the receiver before the turner ends.
                let _ = acknowledge.send(());
            }
            seen
        });
        // One to three steps: every phase of a rotation is met by some kill.
        several(turned, 1 + round % 3).await;
        // Up to 7 ms more, within which a step may be anywhere between request and disk.
        tokio::time::sleep(Duration::from_millis(round * 3 % 8)).await;
        running.0.kill().unwrap();
        running.0.wait().unwrap();
        let seen = turner.await.unwrap();
        assert!(seen.windows(2).all(|w| is_next(&w[0], &w[1])), "{seen:?}");
        steps += seen.len() - 1;
        last = seen.into_iter().last();
    }
    // The rounds wait for 15 steps in sum; without more than one a round little was tested.
    assert!(steps > 8, "too little was done to prove anything: {steps}");
}

fn address(round: u64, i: u64) -> String {
    format!("10.{}.{}.{}", 100 + round, i / 250, 1 + i % 250)
}

#[tokio::test]
async fn sigterm_ends_the_process_in_order() {
    let folders = ControllerFolders::new();
    let running = folders.start();
    let (mut client, _) = folders.client().await;
    assert!(
        client
            .apply(apply(route("r", "a", &[("b", 1)])))
            .await
            .unwrap()
            .into_inner()
            .accepted
    );
    let generation = client
        .status(with_token(StatusRequest {}, "root"))
        .await
        .unwrap()
        .into_inner()
        .generation;
    let begun = Instant::now();
    running.terminate();
    // The client must be free to answer the GOAWAY in the meantime.
    let (mut running, status) = tokio::task::spawn_blocking(move || {
        let mut running = running;
        let status = running.0.wait().unwrap();
        (running, status)
    })
    .await
    .unwrap();
    assert!(status.success(), "{status}");
    assert_time(
        "time until a controller has ended in order",
        begun.elapsed(),
        // Open requests get as long (`STOP_GRACE`), and without any a quiet machine needs 20 ms.
        Duration::from_secs(2),
    );
    assert!(running.log().contains("stopped"));
    let _again = folders.start();
    let (mut client, _) = folders.client().await;
    // The restart itself publishes one generation. After a kill, unused reserved ones would be
    // skipped.
    let now = client
        .status(with_token(StatusRequest {}, "root"))
        .await
        .unwrap()
        .into_inner()
        .generation;
    assert_eq!(
        now,
        generation + 1,
        "an orderly end leaves no gap in the generations"
    );
}

fn refused(args: &[String]) -> Output {
    Command::new(BINARY).args(args).output().unwrap()
}

#[test]
fn wrong_flags_are_reported() {
    let folders = ControllerFolders::new();
    let file = folders.dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let with = |flag: &str, value: &str| {
        let mut args = folders.args();
        let at = args.iter().position(|a| a == flag).unwrap();
        args[at + 1] = value.into();
        args
    };
    let file = file.display().to_string();
    let no_dir = folders.dir.path().join("none").display().to_string();
    // These cases fail at the start (code 1), the ones below at the command line (code 2).
    let cases = [
        (
            "a port in use",
            with("--listen", &busy.local_addr().unwrap().to_string()),
            "--listen",
        ),
        (
            "a metrics port in use",
            with("--metrics-addr", &busy.local_addr().unwrap().to_string()),
            "--metrics-addr",
        ),
        (
            "a file as data folder",
            with("--data-dir", &file),
            "--data-dir",
        ),
        (
            "a file as infra folder",
            with("--infra-dir", &file),
            "--infra-dir",
        ),
        (
            "no configuration folder",
            with("--config-dir", &no_dir),
            "--config-dir",
        ),
        (
            "no principals",
            with("--principals", &no_dir),
            "--principals",
        ),
        (
            "principals that are none",
            with("--principals", &file),
            "principals",
        ),
        (
            "an invalid store key",
            [
                folders.args(),
                vec!["--store-key-file".into(), file.clone()],
            ]
            .concat(),
            "--store-key-file",
        ),
    ];
    for (what, args, part) in cases {
        let out = refused(&args);
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(
            out.status.code() == Some(1) && text.contains(part),
            "{what}: {:?} {text}",
            out.status
        );
        assert!(!text.contains("panicked"), "{what}: {text}");
    }
    for (flag, value, part) in [
        ("--svid-ttl", "25h", "60s to 24h"),
        ("--svid-ttl", "soon", "90m"), // The message gives this example.
        ("--log", "a=b=c", "--log"),
        ("--listen", "here", "--listen"),
        ("--jwks-refresh", "0s", "1s to 24h"),
        ("--jwks-hosts", "a b", "host:port"),
        ("--external-ca", "alpha.example", "TRUST_DOMAIN=URL"),
        ("--external-ca", "alpha.example=http://ca", "--ca-dir"), // The flag needs this one.
    ] {
        let out = refused(&[folders.args(), vec![flag.into(), value.into()]].concat());
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(
            out.status.code() == Some(2) && text.contains(part),
            "{flag} {value}: {:?} {text}",
            out.status
        );
    }
}

/// The store's file cannot grow (EFBIG, like ENOSPC of a full disk): applies are refused, and
/// everything else continues.
#[tokio::test]
async fn a_full_disk_refuses_applies_and_nothing_else() {
    let folders = ControllerFolders::new();
    // The shell ignores SIGXFSZ and its child inherits that, so that the write fails instead of
    // ending the process.
    // The file may have a few MB, which some applies of 600 kB fill.
    let script = "trap '' XFSZ; ulimit -f 8000; exec \"$0\" \"$@\"";
    let child = Command::new("sh")
        .args(["-c", script, BINARY])
        .args(folders.args())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let _running = Running(child);
    let (mut client, _) = folders.client().await;
    // Comments are stored with their object, so each apply adds 600 kB.
    let filler = "# nothing\n".repeat(60_000);
    let mut landed = 0;
    let refusal = loop {
        // 100 applies of 600 kB are many times what the file may hold.
        assert!(landed < 100, "the limit was never reached");
        let yaml = service(1, &format!("s{landed}"), 1).replace("10.91.0.1", &address(0, landed))
            + &filler;
        match client.apply(apply(yaml)).await {
            Ok(done) => assert!(done.into_inner().accepted),
            Err(status) => break status,
        }
        landed += 1;
    };
    assert!(
        refusal.code() == tonic::Code::Internal && refusal.message().contains("free some space"),
        "{refusal}"
    );
    assert_eq!(
        applied(&mut client).await.len() as u64,
        landed,
        "what was acknowledged is there, what was refused is not"
    );
    // Files come into force without a write to the store.
    let file = folders.dir.path().join("config/alpha/more.yaml");
    write_whole(&file, &service(1, "from-a-file", 200)); // No apply above has this address.
    let until = Instant::now() + wait_limit();
    let request = || GetRequest {
        tenant: "alpha".into(),
        kind: "svc".into(),
        name: "from-a-file".into(),
        ..GetRequest::default()
    };
    while client
        .get(with_token(request(), "root"))
        .await
        .unwrap()
        .into_inner()
        .objects
        .is_empty()
    {
        assert!(Instant::now() < until, "files no longer come into force");
        // Polls are cheap; the deadline bounds the wait.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn write_whole(path: &Path, text: &str) {
    let beside = path.with_extension("new");
    std::fs::write(&beside, text).unwrap();
    std::fs::rename(&beside, path).unwrap();
}

//! Tests of the admin server: requests over a socket and their responses.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use super::*;
use crate::drain;
use crate::metrics::MetricFamily;

async fn exchange(
    mut io: impl AsyncRead + AsyncWrite + Unpin,
    line: &str,
    headers: &str,
) -> (u16, String) {
    io.write_all(format!("{line} HTTP/1.1\r\n{headers}connection: close\r\n\r\n").as_bytes())
        .await
        .unwrap();
    let mut all = String::new();
    // A reset may follow a refusal, so the error is ignored.
    let _ = io.read_to_string(&mut all).await;
    let (head, body) = all.split_once("\r\n\r\n").unwrap_or((&all, ""));
    (
        head.split(' ')
            .nth(1)
            .and_then(|s| s.parse().ok())
            .unwrap_or(0),
        body.to_string(),
    )
}

async fn get(address: std::net::SocketAddr, line: &str) -> (u16, String) {
    exchange(
        TcpStream::connect(address).await.unwrap(),
        line,
        "host: localhost\r\n",
    )
    .await
}

/// Fixture of three TCP listeners and a socket, like those of a process.
struct Fixture {
    addresses: AdminAddresses,
    registry: Registry,
    trigger: Arc<DrainTrigger>,
    drain: drain::DrainWatcher,
    _folder: tempfile::TempDir,
}

fn free_address() -> std::net::SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // The folder's path is longer than the path of a socket may be.
        let data_dir = folder.path().join("d".repeat(120));
        let addresses = AdminAddresses {
            admin: free_address(),
            metrics: free_address(),
            readiness: free_address(),
            data_dir,
        };
        let (registry, (trigger, drain)) = (Registry::new(), drain::tree());
        let trigger = Arc::new(trigger);
        let admin = AdminRoutes::new()
            .config_dump(|| serde_json::json!({"secret": 7}))
            .metrics(registry.clone())
            .quit(trigger.clone(), Duration::from_secs(60))
            .version("1.2.3");
        let readiness = AdminRoutes::new().ready(|| Ok(()));
        serve_all(&addresses, (admin, readiness), &registry, &drain).unwrap();
        Self {
            addresses,
            registry,
            trigger,
            drain,
            _folder: folder,
        }
    }

    async fn get_by_socket(&self, line: &str) -> (u16, String) {
        let folder = std::fs::File::open(&self.addresses.data_dir).unwrap();
        let path = format!(
            "/proc/self/fd/{}/{SOCKET_NAME}",
            std::os::fd::AsRawFd::as_raw_fd(&folder)
        );
        exchange(
            UnixStream::connect(path).await.unwrap(),
            line,
            "host: localhost\r\n",
        )
        .await
    }

    fn refused(&self, listener: &str, reason: &str) -> bool {
        let line =
            format!("canal_admin_refused_total{{listener=\"{listener}\",reason=\"{reason}\"}} ");
        self.registry.render().contains(&line)
    }
}

#[tokio::test]
async fn sensitive_pages_are_on_the_socket_only() {
    let f = Fixture::new();
    for line in ["POST /quitquitquit", "GET /config_dump"] {
        let (status, why) = get(f.addresses.admin, line).await;
        assert!(
            status == 403 && why.contains("fix: ") && !why.contains("secret"),
            "{line}: {status} {why}"
        );
    }
    assert!(f.refused("admin", "socket_only"));
    assert_eq!(f.drain.phase(), drain::DrainPhase::Running);
    assert_eq!(get(f.addresses.admin, "GET /version").await.0, 200);
    let (status, dump) = f.get_by_socket("GET /config_dump").await;
    assert!(status == 200 && dump.contains("secret"), "{status} {dump}");
    let mode = std::fs::metadata(f.addresses.data_dir.join(SOCKET_NAME)).unwrap();
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777,
        0o600
    );
    assert_eq!(f.get_by_socket("POST /quitquitquit").await.0, 200);
    assert!(matches!(
        f.drain.phase(),
        drain::DrainPhase::Draining { .. }
    ));
    f.trigger.force();
}

#[tokio::test]
async fn a_web_page_in_a_browser_on_the_host_is_refused() {
    let f = Fixture::new();
    for headers in [
        "host: rebound.example:15000\r\n",
        "host: localhost\r\norigin: http://evil.example\r\n",
    ] {
        let (status, _) = exchange(
            TcpStream::connect(f.addresses.admin).await.unwrap(),
            "GET /metrics",
            headers,
        )
        .await;
        assert_eq!(status, 403, "{headers}");
    }
    assert!(f.refused("admin", "host") && f.refused("admin", "origin"));
}

#[tokio::test]
async fn readers_that_stall_take_neither_metrics_nor_readiness_away() {
    let f = Fixture::new();
    // The metrics exceed the buffers of any socket.
    let family = f
        .registry
        .counters(MetricFamily::new("large_total", "Large.", &["value"]));
    // 5,000 series of 4 KB are 20 MB.
    for i in 0..5000 {
        family.shared(&[&format!("{i}{}", "x".repeat(4000))]).inc();
    }
    let mut stalled = Vec::new();
    // 100 clients, fifty for each scrape that may run.
    for _ in 0..100 {
        let mut tcp = TcpStream::connect(f.addresses.metrics).await.unwrap();
        tcp.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .await
            .unwrap();
        stalled.push(tcp);
    }
    let start = std::time::Instant::now();
    assert_eq!(
        get(f.addresses.readiness, "GET /healthz/ready").await.0,
        200
    );
    canal_timing::assert_time(
        "time until readiness is answered beside stalled scrapes",
        start.elapsed(),
        // Kubernetes gives a readiness probe one second by default (`timeoutSeconds`).
        Duration::from_secs(1),
    );
    // Two scrapes run at the same time, however many are requested; the others are refused at once.
    let (status, why) = get(f.addresses.metrics, "GET /metrics").await;
    // A reset may overtake the 503.
    assert!(matches!(status, 503 | 0), "{status} {why}");
    canal_timing::assert_time(
        "time until a scrape beside stalled ones is refused",
        start.elapsed(),
        // Less than `WRITE_TIMEOUT`, so the refusal did not wait for a stalled scrape to be closed.
        Duration::from_secs(3),
    );
    assert!(
        f.registry
            .render()
            .contains("canal_metrics_scrapes_refused_total")
    );
    // Clients that do not read are closed, and others are served.
    // The five seconds beyond WRITE_TIMEOUT are a margin for the scrape that follows.
    let end =
        std::time::Instant::now() + canal_timing::deadline(WRITE_TIMEOUT + Duration::from_secs(5));
    while get(f.addresses.metrics, "GET /metrics").await.0 != 200 {
        assert!(std::time::Instant::now() < end);
        // Polls are cheap; the deadline bounds the wait.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(f.refused("metrics", "write_timeout"));
    drop(stalled);
}

#[tokio::test]
async fn every_path_answers() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (trigger, drain) = drain::tree();
    let trigger = Arc::new(trigger);
    let up = Arc::new(AtomicBool::new(false));
    let (registry, is_up) = (Registry::new(), up.clone());
    registry
        .counters(MetricFamily::new("things_total", "Things.", &[]))
        .shared(&[])
        .add(3);
    let routes = AdminRoutes::new()
        .config_dump(|| serde_json::json!({"generation": 7}))
        .metrics(registry)
        .ready(move || {
            if is_up.load(Relaxed) {
                Ok(())
            } else {
                Err("no configuration yet".into())
            }
        })
        // The time of the drain is long, since the test ends it by `force`.
        .quit(trigger.clone(), Duration::from_secs(60))
        .version("1.2.3")
        .route(Method::GET, "/echo", |r| {
            ready(text(StatusCode::OK, query(&r, "q").unwrap_or_default()))
        });
    tokio::spawn(serve(
        ("admin", listener),
        routes,
        Registry::new(),
        drain.clone(),
    ));
    for (line, status, part) in [
        ("GET /", 200, "POST /quitquitquit (unix socket)"),
        ("GET /config_dump", 403, "--unix-socket"),
        ("GET /metrics", 200, "things_total 3"),
        ("GET /stats/prometheus", 200, "# TYPE things_total counter"),
        ("GET /healthz/ready", 503, "no configuration yet"),
        ("GET /version", 200, "1.2.3"),
        ("GET /nothing", 404, "GET /version"),
        ("GET /quitquitquit", 405, "use POST"),
        // Invalid escapes, %zz and %4, stay as they are.
        ("GET /echo?x=1&q=a%20b%2Bc+d%zz%4", 200, "a b+c d%zz%4"),
    ] {
        let (got, body) = get(address, line).await;
        assert!(got == status && body.contains(part), "{line}: {got} {body}");
    }
    up.store(true, Relaxed);
    assert_eq!(get(address, "GET /healthz/ready").await.0, 200);
    assert_eq!(drain.phase(), drain::DrainPhase::Running);
    trigger.drain(Duration::from_secs(60));
    // The server stays available to operators during the drain.
    assert_eq!(get(address, "GET /version").await.0, 200);
    trigger.force();
    let closes = async {
        while TcpStream::connect(address).await.is_ok() {
            // Polls are cheap; the deadline below bounds the wait.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), closes)
        .await
        .expect("the listener closes");
}

#[tokio::test]
async fn a_stream_ends_when_the_client_leaves() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_trigger, drain) = drain::tree();
    // The channel holds the one message that the stream has ended.
    let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
    let routes = AdminRoutes::new().route(Method::GET, "/tap", move |_| {
        // Four lines are buffered; a client that leaves is noticed when a write fails.
        let (lines, body) = tokio::sync::mpsc::channel(4);
        let sender = sender.clone();
        tokio::spawn(async move {
            while lines
                .send(Bytes::from_static(b"{\"line\":1}\n"))
                .await
                .is_ok()
            {
                // The five lines that are read below come within some milliseconds.
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            sender.send(()).await.unwrap();
        });
        ready(stream(
            "application/x-ndjson",
            tokio_stream::wrappers::ReceiverStream::new(body),
        ))
    });
    tokio::spawn(serve(("admin", listener), routes, Registry::new(), drain));
    let mut tcp = TcpStream::connect(address).await.unwrap();
    tcp.write_all(b"GET /tap HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .await
        .unwrap();
    let mut seen = String::new();
    // Five lines prove that the stream goes on.
    while seen.matches("{\"line\":1}").count() < 5 {
        let mut b = [0; 256];
        let n = tcp.read(&mut b).await.unwrap();
        seen.push_str(std::str::from_utf8(&b[..n]).unwrap());
    }
    drop(tcp);
    tokio::time::timeout(
        canal_timing::deadline(Duration::from_secs(5)),
        receiver.recv(),
    )
    .await
    .unwrap()
    .unwrap();
}

/// Stops tokio's clock until the sender is dropped. A paused clock alone would advance by itself
/// while all tasks wait for sockets; it does not while a blocking task runs.
fn stop_clock() -> std::sync::mpsc::Sender<()> {
    tokio::time::pause();
    let (end, ended) = std::sync::mpsc::channel();
    tokio::task::spawn_blocking(move || ended.recv());
    end
}

#[tokio::test]
async fn a_new_connection_replaces_one_without_a_request() {
    let _stopped = stop_clock();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_trigger, drain) = drain::tree();
    let registry = Registry::new();
    tokio::spawn(serve(
        ("readiness", listener),
        AdminRoutes::new().version("1"),
        registry.clone(),
        drain,
    ));
    let mut silent = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    // All connections are new, so the request is refused at once and not queued.
    assert!(
        matches!(get(address, "GET /version").await.0, 503 | 0),
        "a reset may overtake the 503"
    );
    tokio::time::advance(Duration::from_millis(1100)).await;
    assert_eq!(get(address, "GET /version").await.0, 200);
    // The oldest connection was closed.
    assert_eq!(silent[0].read(&mut [0; 1]).await.unwrap_or(0), 0);
    let text = registry.render();
    for reason in ["full", "displaced"] {
        assert!(
            text.contains(&format!(
                "canal_admin_refused_total{{listener=\"readiness\",reason=\"{reason}\"}} 1"
            )),
            "{text}"
        );
    }
}

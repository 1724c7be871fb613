//! Tests of the prober with listeners that answer, refuse, stay silent or close the connection.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use canal_timing::deadline;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

#[test]
fn probe_results_follow_the_gateways_readiness() {
    for (status, body, want) in [
        (200, "ready\n", ProbeOutcome::Ready),
        (503, "draining\n", ProbeOutcome::Draining),
        (
            503,
            "draining: an operator's order\n",
            ProbeOutcome::Draining,
        ),
        (
            503,
            "worker_stuck: of 4 workers these stand still: 1\n",
            ProbeOutcome::Stuck,
        ),
        (
            503,
            "no certificate for spiffe://a/b yet\n",
            ProbeOutcome::Unready,
        ),
        (404, "", ProbeOutcome::Unready),
        (500, "draining", ProbeOutcome::Unready),
    ] {
        assert_eq!(
            decide_outcome(status, body.as_bytes()),
            want,
            "{status} {body}"
        );
    }
    assert_eq!(
        ProbeOutcome::Stuck.on_probe(),
        ProbeResult::Nothing,
        "no new session goes to a process with stuck workers"
    );
}

/// Starts a listener that answers each request with `answer`, or never with `None`. It counts
/// connections.
async fn replica(answer: Option<&'static str>, close: bool) -> (SocketAddr, Arc<Mutex<usize>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, seen) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(0)));
    let count = seen.clone();
    tokio::spawn(async move {
        loop {
            let (mut tcp, _) = listener.accept().await.unwrap();
            *count.lock().unwrap() += 1;
            tokio::spawn(async move {
                let mut head = [0; 1024];
                while tcp.read(&mut head).await.is_ok_and(|n| n > 0) {
                    let Some(answer) = answer else { continue };
                    tcp.write_all(answer.as_bytes()).await.unwrap();
                    if close {
                        return;
                    }
                }
            });
        }
    });
    (address, seen)
}

const READY: &str = "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nready\n";
const DRAINING: &str = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 9\r\n\r\ndraining\n";
/// Time for what must happen, on a quiet machine; `deadline` extends it.
const LONG: Duration = Duration::from_secs(5);

#[tokio::test]
async fn a_connection_is_reused_and_a_closed_one_is_no_failure() {
    for (answer, close, want, connections) in [
        (READY, false, ProbeOutcome::Ready, 1),
        (READY, true, ProbeOutcome::Ready, 3),
        (DRAINING, false, ProbeOutcome::Draining, 1),
        (
            "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
            false,
            ProbeOutcome::Unready,
            1,
        ),
        ("SSH-2.0-x\r\n", true, ProbeOutcome::Failed, 3),
    ] {
        let (address, seen) = replica(Some(answer), close).await;
        let mut client = ProbeClient {
            address,
            idle_connection: None,
        };
        for _ in 0..3 {
            assert_eq!(
                probe_once(&mut client, deadline(LONG)).await,
                want,
                "{answer:?}"
            );
        }
        assert_eq!(*seen.lock().unwrap(), connections, "{answer:?}");
    }
}

#[tokio::test]
async fn silence_and_refusal_have_their_names() {
    let (address, _) = replica(None, false).await;
    // A machine that wakes this thread half of the timeout too late would make it `Late`.
    let timeout = Duration::from_millis(500) * canal_timing::slack();
    assert_eq!(
        probe_once(
            &mut ProbeClient {
                address,
                idle_connection: None
            },
            timeout
        )
        .await,
        ProbeOutcome::Timeout
    );
    // The listener closes at the end of this statement, so nothing listens at its port.
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    assert_eq!(
        probe_once(
            &mut ProbeClient {
                address: free,
                idle_connection: None
            },
            deadline(LONG)
        )
        .await,
        ProbeOutcome::Refused
    );
    // The thread itself is blocked, so the deadline passes before the future is polled.
    let (address, _) = replica(None, false).await;
    let mut client = ProbeClient {
        address,
        idle_connection: None,
    };
    let held_up = async {
        // The probe begins its wait before the thread is blocked.
        tokio::time::sleep(Duration::from_millis(1)).await;
        // Three times the probe's timeout, so that it is over when the thread runs again.
        std::thread::sleep(Duration::from_millis(150));
    };
    let (outcome, ()) = tokio::join!(probe_once(&mut client, Duration::from_millis(50)), held_up);
    assert_eq!(outcome, ProbeOutcome::Late);
}

#[derive(Clone, Default)]
struct HealthChanges(Arc<Mutex<Vec<(String, bool)>>>);

impl ProbeListener for HealthChanges {
    fn on_probe(&self, target: &ProbeTarget, _: ProbeOutcome, changed: Option<bool>) {
        if let Some(up) = changed {
            self.0.lock().unwrap().push((target.name.to_string(), up));
        }
    }
}

#[tokio::test]
async fn a_replica_is_followed_down_and_up_and_left() {
    let until = |what: &'static str, changes: HealthChanges, n: usize| async move {
        let changed = async {
            while changes.0.lock().unwrap().len() < n {
                // Polls often enough that the test is not slower than the prober.
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(deadline(LONG), changed)
            .await
            .expect(what);
    };
    // No other test uses this address, so its free port stays free.
    let at: SocketAddr = "127.0.77.1:0".parse().unwrap();
    let listener = TcpListener::bind(at).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    // Nothing listens there now, so the first probes fail.
    drop(listener);
    let changes = HealthChanges::default();
    let rhythm = ProbeConfig {
        port,
        // Short, because each change of the health takes two probes.
        pause: Duration::from_millis(10),
        timeout: Duration::from_millis(500) * canal_timing::slack(),
    };
    let mut prober = Prober::new(rhythm, changes.clone());
    let target = ProbeTarget {
        name: "g1".parse().unwrap(),
        address: Ipv4Addr::new(127, 0, 77, 1),
    };
    let targets: BTreeMap<_, _> = [(target, true)].into();
    prober.follow(&targets);
    until("down", changes.clone(), 1).await;
    let listener = TcpListener::bind(("127.0.77.1", port)).await.unwrap();
    let serving = tokio::spawn(async move {
        loop {
            let (mut tcp, _) = listener.accept().await.unwrap();
            // A probe's head is shorter.
            let mut head = [0; 1024];
            if tcp.read(&mut head).await.is_ok() {
                // A prober that ends closes its connection.
                let _ = tcp
                    .write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nready")
                    .await;
            }
        }
    });
    prober.follow(&targets);
    until("up", changes.clone(), 2).await;
    prober.follow(&BTreeMap::new());
    serving.abort();
    // A prober that still ran would probe several times, and report the replica as down.
    // Ten times the interval of the probes.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(
        *changes.0.lock().unwrap(),
        [("g1".to_string(), false), ("g1".to_string(), true)],
        "a replica that is left is not reported"
    );
}

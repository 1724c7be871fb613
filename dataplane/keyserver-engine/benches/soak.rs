//! Soak test: a key server under a million signatures and a hundred thousand handshakes. It
//! measures their cost, and that they leave nothing behind.
//!
//! The status is 1 if memory or files grew. Run it with `cargo bench -p canal-keyserver-engine
//! --bench soak [-- SIGNATURES HANDSHAKES]`.

#[path = "../tests/fixture/mod.rs"]
mod fixture;

use std::fs;
use std::process::ExitCode;
use std::time::Instant;

use canal_testing::identity;
use canal_wire::keyrpc::{KeyName, KeyRequest};
use fixture::*;

/// Growth of memory that a soak permits, in MiB: allocators retain some.
const GROWTH_MAX: f64 = 16.0;
/// Requests in progress at once. It keeps the operation pool busy; any such number would do.
const CONCURRENCY: usize = 64;

#[derive(Debug)]
struct Footprint {
    memory: f64,
    files: usize,
}

fn footprint() -> Footprint {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line
        .and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok())
        .unwrap_or(0.0);
    Footprint {
        memory: kib / 1024.0,
        files: fs::read_dir("/proc/self/fd")
            .map(Iterator::count)
            .unwrap_or(0),
    }
}

/// Returns the CPU time of this process in seconds.
fn cpu() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<f64> = stat
        .rsplit(')')
        .next()
        .unwrap_or("")
        .split_whitespace()
        .map(|f| f.parse().unwrap_or(0.0))
        .collect();
    fields
        .get(11..13)
        .map_or(0.0, |t| t.iter().sum::<f64>() / 100.0)
}

async fn signatures(
    fixture: &KeyServerFixture,
    component: &str,
    id: &str,
    scheme: u16,
    count: usize,
) {
    let (begun, used) = (Instant::now(), cpu());
    let mut tasks = Vec::new();
    for _ in 0..CONCURRENCY {
        let (channel, key, input) = (
            fixture.channel(component).await,
            KeyName::Identity(identity(id)),
            verify_input(),
        );
        tasks.push(tokio::spawn(async move {
            for _ in 0..count / CONCURRENCY {
                let mut call = channel.start_call(&KeyRequest::Sign {
                    key: key.clone(),
                    presented: None,
                    scheme,
                    deadline_ms: 0,
                    input: &input,
                });
                assert!(
                    matches!(call.next().await, ServerReply::Signature(_)),
                    "a signature"
                );
                channel.forget(&call);
            }
        }));
    }
    for task in tasks {
        task.await.expect("all signatures");
    }
    print_rate(&format!("signatures of {id}"), count, begun, used);
}

async fn handshakes(
    fixture: &KeyServerFixture,
    component: &str,
    own: &str,
    tenant: &str,
    count: usize,
) {
    let (begun, used) = (Instant::now(), cpu());
    let mut tasks = Vec::new();
    let domain = format!("{tenant}.example");
    for _ in 0..CONCURRENCY {
        let channel = fixture.channel(component).await;
        let issued = fixture
            .ca(tenant)
            .issue_with(&identity(&PEER.replace("alpha.example", &domain)), |_| {});
        let peers = Peers::new(fixture.ca(tenant), &issued, &domain, &[own]);
        let own = own.to_string();
        tasks.push(tokio::spawn(async move {
            for _ in 0..count / CONCURRENCY {
                let reply = channel.run_handshake(&own, &mut peers.client()).await;
                assert!(matches!(reply, ServerReply::Done { .. }), "{reply:?}");
            }
        }));
    }
    for task in tasks {
        task.await.expect("all handshakes");
    }
    print_rate(
        &format!("handshakes of {own}, peers and requesters in the same process"),
        count,
        begun,
        used,
    );
}

fn print_rate(what: &str, count: usize, begun: Instant, used: f64) {
    let (wall, cpu) = (begun.elapsed().as_secs_f64(), cpu() - used);
    let each = cpu * 1e6 / count as f64;
    println!(
        "{count} {what}: {wall:.1} s, {:.0}/s, {each:.0} us of CPU each",
        count as f64 / wall
    );
}

#[tokio::main]
async fn main() -> ExitCode {
    let numbers: Vec<usize> = std::env::args()
        .skip(1)
        // `cargo bench` adds arguments that are no numbers.
        .filter_map(|a| a.parse().ok())
        .collect();
    let (signature_count, handshake_count) = (
        numbers.first().copied().unwrap_or(1_000_000),
        numbers.get(1).copied().unwrap_or(100_000),
    );
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let run = async |divisor: usize| {
        let (signature_part, handshake_part) =
            (signature_count / divisor, handshake_count / divisor);
        // The schemes are ecdsa_secp256r1_sha256 and rsa_pss_rsae_sha256 (RFC 8446 section
        // 4.2.3).
        // RSA operations take far longer, so they are a tenth.
        signatures(&fixture, NODE, WEB, 0x0403, signature_part * 9 / 10).await;
        signatures(&fixture, RSA_NODE, SLOW, 0x0804, signature_part / 10).await;
        handshakes(&fixture, NODE, WEB, "alpha", handshake_part * 9 / 10).await;
        handshakes(&fixture, RSA_NODE, SLOW, "rsa", handshake_part / 10).await;
    };
    // The first tenth fills caches and pools, so that growth afterwards is a leak.
    run(10).await;
    let before = footprint();
    run(1).await;
    until("nothing is in progress", || {
        fixture.value("canal_key_requests_in_flight") == 0.0
    })
    .await;
    until("channels are closed", || {
        fixture.value("canal_limit_used{limit=\"key_channels\"}") == 0.0
    })
    .await;
    let after = footprint();
    println!("before: {before:?}, after: {after:?}");
    for algorithm in ["ecdsa", "rsa"] {
        let of = |name: &str| {
            fixture.value(&format!(
                "canal_key_batch_{name}{{algorithm=\"{algorithm}\"}}"
            ))
        };
        println!(
            "{algorithm}: {:.2} operations in a batch, {} waited",
            of("size_sum") / of("size_count"),
            of("waited_total")
        );
    }
    // Files that leak do so once per channel or operation, which would be far more than two.
    if after.memory > before.memory + GROWTH_MAX || after.files > before.files + 2 {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

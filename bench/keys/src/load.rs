//! The load: short flows, each a TCP connection, a new mTLS session and (unless only handshakes are
//! requested) one HBONE tunnel with one HTTP request in it. No session is resumed or reused. It
//! prints one line of JSON, and does not assess it.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use canal_bench_peers::any_certificate::AnyCertificate;
use rustls::ClientConfig;
use rustls::client::Resumption;
use rustls::crypto::aws_lc_rs;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::task::LocalSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// A flow that takes longer has failed.
/// Nobody measured this value; a flow takes milliseconds, and this only ends one that hangs.
const FLOW_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of flows in progress in an open loop. Further ones count as failed, so that an
/// overload does not exhaust the machine.
/// At the highest rate of figure 23 (300 a second), so many are open only if flows take more than 6
/// s.
const OPEN_MAX: usize = 2000;

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// File with a certificate and its key, in the format in which a node stores them
    #[arg(long, value_name = "FILE")]
    identity: PathBuf,
    /// Address on which the node proxy listens for HBONE
    #[arg(long, value_name = "IP:PORT")]
    target: SocketAddr,
    /// Address of the application in the pod
    #[arg(long, value_name = "IP:PORT")]
    authority: String,
    /// Concurrent flows (closed loop), unless a rate is given
    // As many as the lanes of a batch, where batches wait for nothing.
    #[arg(long, default_value_t = 8)]
    concurrency: usize,
    /// Flows per second (open loop)
    #[arg(long)]
    rate: Option<f64>,
    // Hundreds of flows run in this time in the slowest mode.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// Make handshakes only: a session ends with the server's first frame, without tunnel and
    /// request
    #[arg(long)]
    handshakes: bool,
}

/// Parameters of one run of the load.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LoadRun {
    /// Number of simultaneous flows, or rate per second.
    pub(crate) pace: ConnectPace,
    pub(crate) seconds: f64,
    /// The node proxy's share of a core; `None`: a whole one.
    pub(crate) share: Option<f64>,
    pub(crate) handshakes: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum ConnectPace {
    Concurrency(usize),
    Rate(f64),
}

/// Returns the command of one run, on core 0.
pub(crate) fn command(
    identity: &Path,
    target: &str,
    authority: &str,
    run: &LoadRun,
) -> anyhow::Result<Command> {
    let mut command = Command::new("taskset");
    command
        .args(["-c", "0"])
        .arg(std::env::current_exe()?)
        .arg("load")
        .arg("--identity")
        .arg(identity);
    command.args([
        "--target",
        target,
        "--authority",
        authority,
        "--seconds",
        &run.seconds.to_string(),
    ]);
    match run.pace {
        ConnectPace::Concurrency(n) => command.args(["--concurrency", &n.to_string()]),
        ConnectPace::Rate(rate) => command.args(["--rate", &rate.to_string()]),
    };
    if run.handshakes {
        command.arg("--handshakes");
    }
    command.stdin(Stdio::null());
    Ok(command)
}

/// Reads the output of a run of [`command`].
pub(crate) fn read(out: &Output) -> anyhow::Result<Value> {
    let output = String::from_utf8_lossy(&out.stdout);
    serde_json::from_str(&output).with_context(|| {
        format!(
            "the load generator printed {output:?}, {}",
            String::from_utf8_lossy(&out.stderr)
        )
    })
}

/// Targets and settings of a run.
struct RunPlan {
    tls: TlsConnector,
    target: SocketAddr,
    authority: String,
    handshakes: bool,
    outcome: RefCell<FlowOutcome>,
}

#[derive(Default)]
struct FlowOutcome {
    latencies_us: Vec<u64>,
    failed: u64,
    why: Option<String>,
    under_way: usize,
}

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    let course = Rc::new(RunPlan {
        tls: TlsConnector::from(config(&flags.identity)?),
        target: flags.target,
        authority: flags.authority.clone(),
        handshakes: flags.handshakes,
        outcome: RefCell::default(),
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let started = std::time::Instant::now();
    let until = Duration::from_secs_f64(flags.seconds);
    runtime.block_on(LocalSet::new().run_until(async {
        match flags.rate {
            Some(rate) => open(&course, rate, until).await,
            None => closed(&course, flags.concurrency, until).await,
        }
    }));
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", report(&mut course.outcome.borrow_mut(), seconds));
    Ok(())
}

fn report(outcome: &mut FlowOutcome, seconds: f64) -> Value {
    outcome.latencies_us.sort_unstable();
    let all = &outcome.latencies_us;
    let at = |share: f64| {
        all.get(((all.len() as f64 * share) as usize).min(all.len().saturating_sub(1)))
            .copied()
            .unwrap_or(0)
    };
    json!({
        "done": all.len(), "failed": outcome.failed, "why": outcome.why, "seconds": seconds,
        "per_second": all.len() as f64 / seconds, "p50_us": at(0.5), "p90_us": at(0.9), "p99_us": at(0.99),
    })
}

async fn closed(course: &Rc<RunPlan>, concurrency: usize, until: Duration) {
    let end = Instant::now() + until;
    let each = |_| {
        let course = course.clone();
        tokio::task::spawn_local(async move {
            while Instant::now() < end {
                flow(&course, Instant::now()).await;
            }
        })
    };
    let all: Vec<_> = (0..concurrency).map(each).collect();
    for one in all {
        let _ = one.await;
    }
}

async fn open(course: &Rc<RunPlan>, rate: f64, until: Duration) {
    let end = Instant::now() + until;
    let mut ticks = interval(Duration::from_secs_f64(1.0 / rate));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    loop {
        // The flow starts at the tick, even if this loop is late.
        let due = ticks.tick().await;
        if due >= end {
            break;
        }
        if course.outcome.borrow().under_way >= OPEN_MAX {
            course.outcome.borrow_mut().failed += 1;
            continue;
        }
        let course = course.clone();
        tokio::task::spawn_local(async move { flow(&course, due).await });
    }
    let deadline = Instant::now() + FLOW_TIMEOUT;
    while course.outcome.borrow().under_way > 0 && Instant::now() < deadline {
        sleep_until(Instant::now() + Duration::from_millis(10)).await;
    }
}

async fn flow(course: &RunPlan, due: Instant) {
    course.outcome.borrow_mut().under_way += 1;
    let end = timeout(FLOW_TIMEOUT, carry(course))
        .await
        .unwrap_or_else(|_| Err(anyhow::anyhow!("no end in {FLOW_TIMEOUT:?}")));
    let mut outcome = course.outcome.borrow_mut();
    outcome.under_way -= 1;
    match end {
        Ok(()) => outcome
            .latencies_us
            .push(u64::try_from(due.elapsed().as_micros()).unwrap_or(u64::MAX)),
        Err(error) => {
            outcome.failed += 1;
            outcome.why.get_or_insert_with(|| format!("{error:#}"));
        }
    }
}

async fn carry(course: &RunPlan) -> anyhow::Result<()> {
    let tcp = TcpStream::connect(course.target).await.context("connect")?;
    tcp.set_nodelay(true)?;
    // The reset at the end prevents thousands of closed sessions from accumulating on either side.
    rustix::net::sockopt::set_socket_linger(&tcp, Some(Duration::ZERO))?;
    let name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
    let mut tls = course.tls.connect(name, tcp).await.context("TLS")?;
    if course.handshakes {
        settings(&mut tls).await
    } else {
        request(course, tls).await
    }
}

/// Waits for the server's first HTTP/2 frame, which comes only after the server has verified the
/// client.
async fn settings(tls: &mut TlsStream<TcpStream>) -> anyhow::Result<()> {
    let mut head = [0; 9];
    tls.read_exact(&mut head).await.context("no SETTINGS")?;
    ensure!(head[3] == 4, "the first frame is of type {}", head[3]);
    Ok(())
}

async fn request(course: &RunPlan, tls: TlsStream<TcpStream>) -> anyhow::Result<()> {
    let (mut client, connection) = h2::client::handshake(tls).await.context("HTTP/2")?;
    let driven = tokio::task::spawn_local(connection);
    let connect = http::Request::connect(course.authority.as_str()).body(())?;
    let (answer, mut body) = client.send_request(connect, false).context("CONNECT")?;
    let answer = answer.await.context("CONNECT")?;
    ensure!(answer.status() == 200, "CONNECT: {}", answer.status());
    let text = format!(
        "GET /health HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n",
        course.authority
    );
    body.send_data(Bytes::from(text), false)
        .context("request")?;
    let mut down = answer.into_body();
    let first = down.data().await.context("no answer")?.context("answer")?;
    ensure!(
        first.starts_with(b"HTTP/1.1 200"),
        "the application printed {:?}",
        String::from_utf8_lossy(&first[..first.len().min(60)])
    );
    driven.abort();
    Ok(())
}

fn config(file: &Path) -> anyhow::Result<Arc<ClientConfig>> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let stored: Value = serde_json::from_str(&text)?;
    let part = |name: &str| {
        stored[name]
            .as_str()
            .with_context(|| format!("{}: no {name}", file.display()))
    };
    let chain =
        CertificateDer::pem_slice_iter(part("chain")?.as_bytes()).collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_slice(part("key")?.as_bytes())?;
    if chain.is_empty() {
        bail!("{}: no certificate", file.display());
    }
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
        .with_client_auth_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.enable_sni = false;
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

//! The bench's own load, for requests that wrk and h2load cannot send: inside tunnels, behind
//! client certificates, to services drawn at random, or a connection per request at a stated rate.
//! It has one thread on the load's core. Connections exist before the measured window starts.

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use canal_bench_peers::answer::read_complete_answer;
use canal_bench_peers::generators::GeneratorReport;
use canal_bench_peers::process::pin_to_load;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::{Method, Request, Uri};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_rustls::TlsConnector;

/// Time between the last connection and the measured window.
/// Nobody measured this value; it lets work of the handshakes end.
const SETTLE: Duration = Duration::from_millis(200);
/// Maximum time of a visit of all services, and of the requests in progress at the end.
/// It only ends a run that hangs.
const VISIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time of the requests in progress at the end. They are not counted, so that it only
/// bounds the end.
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// Pause after a request that failed, so that a proxy that refuses does not get requests in a tight
/// loop.
/// A connection then sends at most 100 failing requests a second.
const AFTER_FAILURE: Duration = Duration::from_millis(10);

/// Way in which a request is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AskerManner {
    /// Plain HTTP/1.1, a connection per request.
    Connection,
    /// A stream of a persistent mTLS connection.
    Stream,
    /// HTTP/1.1 in a CONNECT tunnel that is reused.
    ReusedTunnel,
    /// HTTP/1.1 in a new CONNECT tunnel.
    Tunnel,
}

/// The requests that a load sends, and their rate.
#[derive(Clone)]
pub(crate) struct AskerPlan {
    pub(crate) manner: AskerManner,
    pub(crate) address: SocketAddr,
    pub(crate) tls: Option<Arc<ClientConfig>>,
    /// Number of connections, and of requests in progress on each.
    pub(crate) size: (usize, usize),
    /// `host:port` of each requested service; drawn at random if there are many.
    pub(crate) services: Vec<String>,
    /// Requests per second; `None`: each connection sends the next request after a response.
    pub(crate) rate: Option<f64>,
    pub(crate) seconds: f64,
}

/// Results of the measured window.
pub(crate) struct Window {
    pub(crate) answers: GeneratorReport,
    pub(crate) seconds: f64,
    /// User and system time of the proxy in the window, in µs.
    pub(crate) cpu: (f64, f64),
}

/// Reads the proxy's CPU time.
pub(crate) type Cpu<'a> = &'a (dyn Fn() -> anyhow::Result<(f64, f64)> + Sync);

/// Runs the load as planned, and measures.
pub(crate) fn run_load(plan: &AskerPlan, cpu: Cpu<'_>) -> anyhow::Result<Window> {
    in_thread(plan, |job| window(job, cpu))
}

/// Sends one request to each service, so that the connections to its endpoint exist afterwards.
pub(crate) fn visit(plan: &AskerPlan) -> anyhow::Result<()> {
    in_thread(
        &AskerPlan {
            rate: None,
            ..plan.clone()
        },
        |job| async move {
            job.unvisited.set(job.targets.len());
            let workers = start(&job).await?;
            timeout(VISIT_TIMEOUT, workers.join_all())
                .await
                .context("the services were not visited in time")?;
            match (job.failed.get(), job.why.take()) {
                (0, _) => Ok(()),
                (failed, why) => anyhow::bail!(
                    "{failed} services did not answer; the first: {}",
                    why.unwrap_or_default()
                ),
            }
        },
    )
}

fn in_thread<T: Send, F: Future<Output = anyhow::Result<T>>>(
    plan: &AskerPlan,
    run: impl FnOnce(Rc<AskerJob>) -> F + Send,
) -> anyhow::Result<T> {
    let work = || {
        pin_to_load()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let job = Rc::new(AskerJob::new(plan)?);
        LocalSet::new().block_on(&runtime, run(job))
    };
    std::thread::scope(|scope| {
        scope
            .spawn(work)
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the load's thread panicked")))
    })
}

/// A service as requests address it.
struct AskerTarget {
    connect: Uri,
    stream: Uri,
    /// The request in HTTP/1.1.
    text: Bytes,
}

impl AskerTarget {
    fn new(authority: &str, manner: AskerManner) -> anyhow::Result<Self> {
        let close = if manner == AskerManner::Connection {
            "connection: close\r\n"
        } else {
            ""
        };
        Ok(Self {
            connect: Uri::builder().authority(authority).build()?,
            stream: Uri::builder()
                .scheme("https")
                .authority(authority)
                .path_and_query("/")
                .build()?,
            text: Bytes::from(format!(
                "GET / HTTP/1.1\r\nhost: {authority}\r\n{close}\r\n"
            )),
        })
    }
}

struct AskerJob {
    plan: AskerPlan,
    targets: Vec<AskerTarget>,
    random: RefCell<StdRng>,
    /// Number of services that a visit has not reached yet.
    unvisited: Cell<usize>,
    is_over: Cell<bool>,
    answered: Cell<u64>,
    failed: Cell<u64>,
    why: Cell<Option<String>>,
}

impl AskerJob {
    fn new(plan: &AskerPlan) -> anyhow::Result<Self> {
        ensure!(!plan.services.is_empty(), "a load without a service");
        let targets = plan
            .services
            .iter()
            .map(|s| AskerTarget::new(s, plan.manner))
            .collect::<anyhow::Result<_>>()?;
        Ok(Self {
            plan: plan.clone(),
            targets,
            random: RefCell::new(StdRng::seed_from_u64(13)),
            unvisited: Cell::new(0),
            is_over: Cell::new(false),
            answered: Cell::new(0),
            failed: Cell::new(0),
            why: Cell::new(None),
        })
    }

    fn draw(&self) -> usize {
        match self.targets.len() {
            1 => 0,
            many => self.random.borrow_mut().random_range(0..many),
        }
    }

    fn answers(&self) -> GeneratorReport {
        GeneratorReport {
            ok: self.answered.get(),
            failed: self.failed.get(),
        }
    }
}

async fn window(job: Rc<AskerJob>, cpu: Cpu<'_>) -> anyhow::Result<Window> {
    let workers = start(&job).await?;
    sleep(SETTLE).await;
    let (begun, before, then) = (Instant::now(), cpu()?, job.answers());
    sleep(Duration::from_secs_f64(job.plan.seconds)).await;
    let (seconds, after, now) = (begun.elapsed().as_secs_f64(), cpu()?, job.answers());
    job.is_over.set(true);
    let _ = timeout(LAST_ANSWERS, workers.join_all()).await;
    if let Some(why) = job.why.take() {
        eprintln!("{} requests failed; the first: {why}", job.failed.get());
    }
    let answers = GeneratorReport {
        ok: now.ok - then.ok,
        failed: now.failed - then.failed,
    };
    Ok(Window {
        answers,
        seconds,
        cpu: (after.0 - before.0, after.1 - before.1),
    })
}

/// Opens the connections, and starts requests on each.
async fn start(job: &Rc<AskerJob>) -> anyhow::Result<tokio::task::JoinSet<()>> {
    let (connections, at_once) = job.plan.size;
    let mut workers = tokio::task::JoinSet::new();
    for connection in 0..connections {
        let client = match &job.plan.tls {
            Some(tls) => Some(connect(job.plan.address, tls).await?),
            None => None,
        };
        for number in 0..at_once {
            workers.spawn_local(work(
                job.clone(),
                client.clone(),
                connection * at_once + number,
            ));
        }
    }
    Ok(workers)
}

async fn connect(
    address: SocketAddr,
    tls: &Arc<ClientConfig>,
) -> anyhow::Result<SendRequest<Bytes>> {
    let tcp = TcpStream::connect(address)
        .await
        .with_context(|| format!("connecting to {address}"))?;
    tcp.set_nodelay(true)?;
    let name = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::LOCALHOST).into());
    let tls = TlsConnector::from(tls.clone())
        .connect(name, tcp)
        .await
        .context("TLS")?;
    let (client, connection) = h2::client::Builder::new()
        // Above every body of the bench, so that flow control delays nothing.
        .initial_window_size(1 << 20)
        .initial_connection_window_size(16 << 20)
        .handshake(tls)
        .await?;
    spawn_local(connection);
    Ok(client)
}

/// Sends one request after the other until the time is over.
async fn work(job: Rc<AskerJob>, client: Option<SendRequest<Bytes>>, number: usize) {
    let all = job.plan.size.0 * job.plan.size.1;
    let gap = job
        .plan
        .rate
        .map(|rate| Duration::from_secs_f64(all as f64 / rate));
    let mut due = Instant::now() + gap.unwrap_or_default().mul_f64(number as f64 / all as f64);
    let is_visit = job.unvisited.get() > 0;
    let mut reused = None;
    while !job.is_over.get() {
        if let Some(gap) = gap {
            sleep_until(due).await;
            due += gap;
        }
        let which = match (is_visit, job.unvisited.get()) {
            (true, 0) => return,
            (true, left) => {
                job.unvisited.set(left - 1);
                left - 1
            }
            (false, _) => job.draw(),
        };
        match request(&job, client.as_ref(), &mut reused, &job.targets[which]).await {
            Ok(()) => job.answered.set(job.answered.get() + 1),
            Err(error) => {
                reused = None;
                job.failed.set(job.failed.get() + 1);
                job.why
                    .set(job.why.take().or_else(|| Some(format!("{error:#}"))));
                sleep(AFTER_FAILURE).await;
            }
        }
    }
}

async fn request(
    job: &AskerJob,
    client: Option<&SendRequest<Bytes>>,
    reused: &mut Option<AskerTunnel>,
    target: &AskerTarget,
) -> anyhow::Result<()> {
    let Some(client) = client else {
        return alone(job.plan.address, &target.text).await;
    };
    match job.plan.manner {
        AskerManner::Connection | AskerManner::Stream => stream(client, &target.stream).await,
        AskerManner::Tunnel => {
            let mut tunnel = AskerTunnel::open(client, &target.connect).await?;
            tunnel.exchange(&target.text).await?;
            tunnel.end().await
        }
        AskerManner::ReusedTunnel => {
            let tunnel = match reused {
                Some(tunnel) => tunnel,
                None => reused.insert(AskerTunnel::open(client, &target.connect).await?),
            };
            tunnel.exchange(&target.text).await
        }
    }
}

/// Sends a request on its own connection, which the proxy closes.
async fn alone(address: SocketAddr, text: &[u8]) -> anyhow::Result<()> {
    let mut tcp = TcpStream::connect(address).await.context("connecting")?;
    tcp.write_all(text).await?;
    let mut answer = Vec::with_capacity(512);
    tcp.read_to_end(&mut answer).await?;
    let (status, _) = read_complete_answer(&answer)?.context("the answer is not whole")?;
    ensure!(status == 200, "answered {status}");
    Ok(())
}

async fn stream(client: &SendRequest<Bytes>, uri: &Uri) -> anyhow::Result<()> {
    let mut client = client.clone().ready().await?;
    let (answer, _) = client.send_request(Request::builder().uri(uri.clone()).body(())?, true)?;
    let answer = answer.await?;
    ensure!(answer.status() == 200, "answered {}", answer.status());
    let mut body = answer.into_body();
    while let Some(chunk) = body.data().await {
        let length = chunk?.len();
        body.flow_control().release_capacity(length)?;
    }
    Ok(())
}

/// An open CONNECT tunnel.
struct AskerTunnel {
    send: SendStream<Bytes>,
    read: RecvStream,
    buffer: Vec<u8>,
}

impl AskerTunnel {
    async fn open(client: &SendRequest<Bytes>, uri: &Uri) -> anyhow::Result<Self> {
        let mut client = client.clone().ready().await?;
        let (answer, send) = client.send_request(
            Request::builder()
                .method(Method::CONNECT)
                .uri(uri.clone())
                .body(())?,
            false,
        )?;
        let answer = answer.await.context("CONNECT")?;
        ensure!(
            answer.status() == 200,
            "CONNECT answered {}",
            answer.status()
        );
        Ok(Self {
            send,
            read: answer.into_body(),
            buffer: Vec::with_capacity(512),
        })
    }

    async fn next(&mut self) -> anyhow::Result<Option<Bytes>> {
        let chunk = self.read.data().await.transpose()?;
        if let Some(chunk) = &chunk {
            self.read.flow_control().release_capacity(chunk.len())?;
        }
        Ok(chunk)
    }

    async fn exchange(&mut self, text: &Bytes) -> anyhow::Result<()> {
        self.send.send_data(text.clone(), false)?;
        self.buffer.clear();
        loop {
            let chunk = self
                .next()
                .await?
                .context("the tunnel ended before the answer")?;
            self.buffer.extend_from_slice(&chunk);
            if let Some((status, _)) = read_complete_answer(&self.buffer)? {
                ensure!(status == 200, "answered {status}");
                return Ok(());
            }
        }
    }

    /// Ends the tunnel gracefully, so that neither side has to reset it.
    async fn end(mut self) -> anyhow::Result<()> {
        self.send.send_data(Bytes::new(), true)?;
        while self.next().await?.is_some() {}
        Ok(())
    }
}

//! A server whose handshakes a local key makes: each at once, or in batches as an accelerator with
//! eight lanes makes them. `batched` measures it in a separate process, because the processor's
//! features are read once per process.

use std::cell::RefCell;
use std::future::pending;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Signal, set_parent_process_death_signal};
use rustls::crypto::aws_lc_rs;
use rustls::server::{Acceptor, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot};
use tokio::task::LocalSet;
use tokio_rustls::LazyConfigAcceptor;

/// Number of operations in a batch: 512 bits are eight lanes.
pub(crate) const LANES: usize = 8;
/// Time that the first operation of a batch waits for others: the shortest setting of the paper's
/// accelerator.
pub(crate) const WAIT: Duration = Duration::from_millis(1);
/// An empty SETTINGS frame, which an HBONE server sends first.
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

#[derive(clap::Args)]
pub(crate) struct LanesFlags {
    /// A certificate chain and its key, PEM
    #[arg(long, value_name = "FILE")]
    chain: PathBuf,
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    /// Root certificate that clients' certificates chain to, PEM
    #[arg(long, value_name = "FILE")]
    root: PathBuf,
    /// Delay operations until there are eight, for 1 ms at most
    #[arg(long)]
    batched: bool,
}

/// Prints its address, then serves until it is killed or its parent ends.
pub(crate) fn run(flags: &LanesFlags) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let config = config(flags)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(LocalSet::new().run_until(async {
        let gate = if flags.batched {
            Some(Gate::open()?)
        } else {
            None
        };
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .context("127.0.0.1")?;
        println!("{}", listener.local_addr()?);
        loop {
            let (tcp, _) = listener.accept().await.context("accept")?;
            let (config, gate) = (config.clone(), gate.clone());
            tokio::task::spawn_local(async move {
                if let Err(error) = serve(tcp, config, gate).await {
                    eprintln!("a session failed: {error:#}");
                }
            });
        }
    }))
}

fn config(flags: &LanesFlags) -> anyhow::Result<Arc<ServerConfig>> {
    let read = |file: &PathBuf| CertificateDer::pem_file_iter(file)?.collect::<Result<Vec<_>, _>>();
    let mut roots = RootCertStore::empty();
    for root in read(&flags.root).context("--root")? {
        roots.add(root)?;
    }
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build()?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(
            read(&flags.chain).context("--chain")?,
            PrivateKeyDer::from_pem_file(&flags.key).context("--key")?,
        )?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

async fn serve(
    tcp: TcpStream,
    config: Arc<ServerConfig>,
    gate: Option<Gate>,
) -> anyhow::Result<()> {
    tcp.set_nodelay(true)?;
    let hello = LazyConfigAcceptor::new(Acceptor::default(), tcp)
        .await
        .context("not a ClientHello")?;
    if let Some(gate) = gate {
        gate.pass().await;
    }
    // The key exchange and the signature happen in this call.
    let mut tls = hello.into_stream(config).await.context("TLS")?;
    tls.write_all(&SETTINGS).await?;
    tls.flush().await?;
    // The session lasts until the client resets it.
    let _ = tls.read(&mut [0]).await;
    Ok(())
}

/// The queue in which operations wait for their batch.
#[derive(Clone)]
struct Gate {
    batch: Rc<RefCell<LaneBatch<oneshot::Sender<()>>>>,
    /// Times at which to check the queue, for a thread that sleeps until then: the runtime's timers
    /// are as coarse as the intervals here.
    wakeups: mpsc::Sender<Instant>,
}

impl Gate {
    fn open() -> anyhow::Result<Self> {
        let (wakeups, times) = mpsc::channel::<Instant>();
        let gate = Self {
            batch: Rc::default(),
            wakeups,
        };
        let due = Arc::new(Notify::new());
        let ring = due.clone();
        std::thread::Builder::new()
            .name("gate".into())
            .spawn(move || {
                for time in times {
                    std::thread::sleep(time.saturating_duration_since(Instant::now()));
                    ring.notify_one();
                }
            })?;
        let batch = gate.batch.clone();
        tokio::task::spawn_local(async move {
            loop {
                due.notified().await;
                let late = batch.borrow_mut().late(Instant::now());
                late.into_iter().for_each(let_go);
            }
        });
        Ok(gate)
    }

    /// Waits until this operation's batch starts.
    async fn pass(&self) {
        let (go, gone) = oneshot::channel();
        let now = Instant::now();
        let (is_first, full) = self.batch.borrow_mut().add(go, now);
        if is_first && self.wakeups.send(now + WAIT).is_err() {
            return pending().await;
        }
        full.into_iter().for_each(let_go);
        // This fails only when the process ends.
        let _ = gone.await;
    }
}

fn let_go(operation: oneshot::Sender<()>) {
    // This fails if the client has gone.
    let _ = operation.send(());
}

/// Operations that wait for others.
#[derive(Debug)]
struct LaneBatch<T> {
    waiting: Vec<T>,
    /// Arrival time of the first operation.
    since: Option<Instant>,
}

impl<T> Default for LaneBatch<T> {
    fn default() -> Self {
        Self {
            waiting: Vec::new(),
            since: None,
        }
    }
}

impl<T> LaneBatch<T> {
    /// Adds an operation. Returns whether it is the first, and the operations that start now.
    fn add(&mut self, one: T, now: Instant) -> (bool, Vec<T>) {
        let is_first = self.waiting.is_empty();
        if is_first {
            self.since = Some(now);
        }
        self.waiting.push(one);
        (
            is_first,
            if self.waiting.len() == LANES {
                self.take()
            } else {
                Vec::new()
            },
        )
    }

    /// Returns the operations whose waiting time is over.
    fn late(&mut self, now: Instant) -> Vec<T> {
        match self.since {
            Some(since) if now.duration_since(since) >= WAIT => self.take(),
            _ => Vec::new(),
        }
    }

    fn take(&mut self) -> Vec<T> {
        self.since = None;
        std::mem::take(&mut self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_go_at_once_and_fewer_when_the_first_has_waited() {
        let (mut batch, start) = (LaneBatch::default(), Instant::now());
        for n in 0..LANES - 1 {
            assert_eq!(batch.add(n, start), (n == 0, vec![]));
        }
        assert_eq!(batch.add(7, start), (false, (0..LANES).collect()));
        assert_eq!(
            batch.late(start + WAIT),
            Vec::<usize>::new(),
            "nothing waits"
        );
        let later = start + WAIT / 2;
        assert_eq!(batch.add(8, later), (true, vec![]));
        assert_eq!(
            batch.late(start + WAIT),
            Vec::<usize>::new(),
            "the time of the previous batch ends no later one"
        );
        assert_eq!(batch.add(9, later + WAIT / 2), (false, vec![]));
        assert_eq!(
            batch.late(later + WAIT),
            vec![8, 9],
            "by the first one's time"
        );
    }
}

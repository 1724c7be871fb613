//! Phase *accept*: opens a worker's listeners, accepts connections, and runs the worker until its
//! last connection closes.
//!
//! Does not read from a connection: [`crate::establish`] does. Start with [`run`].

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use canal_net::sys::{self, ListenOptions, ReservedAddress, SysError};
use canal_net::worker::WorkerHandle as Thread;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use crate::authorize;
use crate::config::{GatewayConfig, PlainListener};
use crate::establish;
use crate::permit::ConnectionPermit;
use crate::rebalance::{self, Moves};
use crate::soft_drain;
use crate::worker::{EngineShared, Worker};

/// Interval at which idle connections to endpoints are checked for age and for a close by the peer.
/// An idle connection to an endpoint may live 60 s, so a second more does not matter; a close by
/// the peer is also seen when the connection is taken.
const IDLE_SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after an accept fails because files or memory are exhausted. A late accept is better than
/// a busy loop. A client waits as long more at most once another connection has ended; the kernel's
/// queue keeps it.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Time in which connections react to a forced drain before the worker ends.
/// It is far below the 2 s that the process waits for its tasks after it has forced the drain.
const FINAL_DRAIN_TIMEOUT: Duration = Duration::from_millis(50);

/// Determines which protocol and which services a listener accepts.
#[derive(Debug, Clone)]
enum ListenerKind {
    /// Accepts HBONE: mTLS with CONNECT tunnels.
    Hbone,
    /// Accepts plaintext connections for one configured service.
    Plain(PlainListener),
    /// Accepts plaintext connections for all services of the cloud tier.
    Inside,
}

/// Duplicates of one worker's listening sockets, for socket steering in the kernel. Each represents
/// the sockets of all workers, because they share their ports (`SO_REUSEPORT`). Drop them before
/// the engine drains: a listener closes only when its last duplicate is closed.
#[derive(Debug, Default)]
pub struct ListenerFds {
    pub hbone: Option<OwnedFd>,
    pub plain: Option<OwnedFd>,
}

impl ListenerFds {
    fn of(opened: &[(TcpListener, ListenerKind)]) -> std::io::Result<Self> {
        let mut listeners = Self::default();
        for (listener, kind) in opened {
            let place = match kind {
                ListenerKind::Hbone => &mut listeners.hbone,
                ListenerKind::Inside => &mut listeners.plain,
                ListenerKind::Plain(_) => continue,
            };
            if place.is_none() {
                *place = Some(listener.as_fd().try_clone_to_owned()?);
            }
        }
        Ok(listeners)
    }
}

/// Opens one worker's listeners. Each worker has its own on the same addresses; the kernel
/// distributes connections over them.
fn open(config: &GatewayConfig) -> Result<Vec<(TcpListener, ListenerKind)>, SysError> {
    let options = ListenOptions {
        reuse_port: true,
        ..ListenOptions::default()
    };
    let hbone = config
        .hbone
        .iter()
        .map(|address| (*address, ListenerKind::Hbone));
    let plain = config
        .plain
        .iter()
        .map(|plain| (plain.address, ListenerKind::Plain(plain.clone())));
    let inside = config
        .tier
        .iter()
        .map(|tier| (tier.plain, ListenerKind::Inside));
    hbone
        .chain(plain)
        .chain(inside)
        .map(|(address, kind)| Ok((sys::listen(None, address, &options)?, kind)))
        .collect()
}

/// Reserves the addresses of all listeners before any worker starts. Writes the resolved addresses
/// into `config`, so that port 0 becomes the same port for all workers.
pub(crate) fn bind(config: &mut GatewayConfig) -> Result<Vec<ReservedAddress>, SysError> {
    let mut bound = Vec::new();
    let options = ListenOptions {
        reuse_port: true,
        ..ListenOptions::default()
    };
    let addresses = config
        .hbone
        .iter_mut()
        .chain(config.plain.iter_mut().map(|plain| &mut plain.address));
    let addresses = addresses.chain(config.tier.iter_mut().map(|tier| &mut tier.plain));
    for address in addresses {
        let taken = sys::reserve_address(*address, &options)?;
        *address = taken.address;
        bound.push(taken);
    }
    Ok(bound)
}

/// Runs a worker for its entire life. Returns when it is drained: all connections are closed, or
/// the drain was forced.
pub(crate) async fn run(
    shared: Arc<EngineShared>,
    thread: Thread,
    opened: std::sync::mpsc::Sender<ListenerFds>,
) {
    let heartbeat = shared.watchdog.register(thread.index);
    let worker = Worker::new(shared, thread.count, thread.drain);
    let listeners = match open(&worker.shared.config) {
        Ok(listeners) => listeners,
        Err(error) => {
            // Without a heartbeat from this worker the process never becomes ready.
            tracing::error!(%error, worker = thread.index, "gateway: a worker cannot listen, so the process does not become ready");
            // The engine's start waits for every worker, also for one that has nothing to pass.
            let _ = opened.send(ListenerFds::default());
            return;
        }
    };
    // A failed send means that the engine is gone and needs no listeners. One worker's sockets are
    // enough: they represent all workers' sockets.
    let copies = if worker.shared.config.tier.is_some() && thread.index == 0 {
        ListenerFds::of(&listeners)
    } else {
        Ok(ListenerFds::default())
    };
    let _ = opened.send(copies.unwrap_or_else(|error| {
        tracing::error!(%error, "gateway: cannot pass the listeners to the redirector, so no session can arrive");
        ListenerFds::default()
    }));
    // Once all workers have dropped theirs, the engine's start cannot wait for a dead worker.
    drop(opened);
    let (clock, beating) = (worker.clock.clone(), heartbeat.clone());
    tokio::task::spawn_local(async move { clock.run(|| beating.beat()).await });
    tokio::task::spawn_local(worker.scheduler.clone().rounds());
    // One worker shows the gauges that belong to the whole process.
    // The tasks from here on hold the worker weakly, so that they end with it.
    tokio::task::spawn_local(sweep(Rc::downgrade(&worker), thread.index == 0));
    tokio::task::spawn_local(authorize::reauthorize::watch(Rc::downgrade(&worker)));
    let drained = Rc::downgrade(&worker);
    let set_soft_drain = move |is_draining| {
        drained
            .upgrade()
            .map(|worker| worker.set_soft_drain(is_draining))
            .is_some()
    };
    tokio::task::spawn_local(soft_drain::run(
        worker.shared.soft_drain.subscribe(),
        set_soft_drain,
    ));
    let rebalanced = Rc::downgrade(&worker);
    let rebalance = move |moves: &Moves| rebalanced.upgrade().map(|worker| worker.rebalance(moves));
    tokio::task::spawn_local(rebalance::run(worker.shared.moves.subscribe(), rebalance));
    let accepting: Vec<_> = listeners
        .into_iter()
        .map(|(listener, kind)| tokio::task::spawn_local(accept(worker.clone(), listener, kind)))
        .collect();
    worker.drain.draining().await;
    worker.begin_drain();
    for task in accepting {
        // A panic in the task was counted and logged; the connections that it accepted go on.
        let _ = task.await;
    }
    tokio::select! {
        () = worker.until_closed() => {}
        () = worker.drain.forced() => {
            tracing::warn!(worker = thread.index, connections = worker.open(), "gateway: the drain timeout expired; the remaining connections are closed");
            tokio::time::sleep(FINAL_DRAIN_TIMEOUT).await;
        }
    }
    // The process may exit soon: write buffered log lines now.
    if let Some(log) = &worker.log {
        log.flush();
    }
    // Without it the watchdog would report the ended worker as stuck.
    heartbeat.end();
}

async fn sweep(worker: Weak<Worker>, is_first: bool) {
    loop {
        tokio::time::sleep(IDLE_SWEEP_INTERVAL).await;
        let Some(worker) = worker.upgrade() else {
            return;
        };
        // The gauge is process-wide; one worker refreshes it.
        if is_first {
            worker.shared.limits.show();
        }
        worker.upstreams.sweep(
            &worker.snapshot(),
            Instant::now(),
            worker.shared.config.times.upstream_idle,
        );
    }
}

async fn accept(worker: Rc<Worker>, listener: TcpListener, kind: ListenerKind) {
    let mut draining = pin!(worker.drain.draining());
    loop {
        tokio::select! {
            biased;
            accepted = listener.accept() => match accepted {
                Ok((stream, client)) => spawn_connection(&worker, stream, client, &kind),
                Err(error) => {
                    worker.counts.refused_connection("accept_failed");
                    tracing::warn!(%error, "gateway: accepting a connection failed; retrying");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            () = &mut draining => break,
        }
    }
    // Closing a listener resets the connections in its queue, so they are accepted first. The
    // socket is used directly, because tokio learns of new connections only when its reactor runs
    // again.
    let Ok(listener) = listener.into_std() else {
        return;
    };
    while let Ok((stream, client)) = listener.accept() {
        match stream
            .set_nonblocking(true)
            .and_then(|()| TcpStream::from_std(stream))
        {
            Ok(stream) => spawn_connection(&worker, stream, client, &kind),
            Err(_) => worker.counts.refused_connection("accept_failed"),
        }
    }
}

fn spawn_connection(
    worker: &Rc<Worker>,
    stream: TcpStream,
    client: SocketAddr,
    kind: &ListenerKind,
) {
    // The client may have reset the connection while it was queued.
    let Ok(local) = stream.local_addr() else {
        return worker.counts.refused_connection("gone");
    };
    let snapshot = worker.snapshot();
    // The local address alone determines the tenant, before a byte is read.
    let tenant = match &kind {
        ListenerKind::Hbone => {
            establish::decide_scope(&snapshot, local.ip()).map(|(tenant, _)| tenant)
        }
        ListenerKind::Inside => establish::decide_tenant_inside(&snapshot, local.ip()),
        ListenerKind::Plain(plain) => snapshot
            .tenant(plain.service.tenant.as_str())
            .ok_or("no_tenant"),
    };
    let taken = tenant.and_then(|tenant| {
        let permit = ConnectionPermit::take(&worker.shared.limits, &tenant.name)?;
        Ok((permit, worker.accounts.of(tenant, &worker.limits)))
    });
    let (permit, account) = match taken {
        Ok(taken) => taken,
        Err(why) => {
            worker.counts.refused_connection(why);
            // A plaintext client inside the tier could take an orderly close for an empty response.
            if matches!(kind, ListenerKind::Inside) {
                sys::reset_on_close(&stream);
            }
            return;
        }
    };
    worker.counts.accepted.inc();
    worker
        .shared
        .accepted
        .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let (open, counted) = (worker.count_connection(), worker.counts.connections.hold());
    let member = worker.rebalance.enter(client, local, &permit.drain);
    let (worker, kind) = (worker.clone(), kind.clone());
    // The state of a connection takes several KiB, which tokio would copy ten times.
    tokio::task::spawn_local(Box::pin(async move {
        let served = pin!(async {
            match &kind {
                ListenerKind::Hbone => {
                    Box::pin(establish::hbone(
                        &worker,
                        stream,
                        (client, local.ip()),
                        &permit,
                    ))
                    .await
                }
                ListenerKind::Inside => {
                    establish::accept_tier_plaintext(&worker, stream, (client, local), &permit)
                        .await
                }
                ListenerKind::Plain(plain) => {
                    establish::plain(&worker, stream, client, plain, &permit).await
                }
            }
        });
        if !permit.run(&account.queue, served).await {
            worker.counts.refused_connection("displaced");
        }
        // They were moved here, so that the connection is counted until its end.
        drop((open, counted, member));
    }));
}

#[cfg(test)]
mod tests {
    use canal_runtime::drain;
    use canal_runtime::metrics::Registry;

    use super::*;

    #[tokio::test]
    async fn a_worker_that_cannot_listen_holds_up_no_start() {
        let (_trigger, drain) = drain::tree();
        let config = GatewayConfig {
            // No address of this machine (RFC 5737).
            hbone: vec!["203.0.113.1:15008".parse().unwrap()],
            ..GatewayConfig::default()
        };
        let shared = Arc::new(EngineShared::new(config, Registry::new(), None, None));
        let thread = Thread {
            index: 0,
            count: 1,
            core: None,
            drain,
        };
        // As the engine, the test keeps a sender while it waits.
        let (opened, all) = std::sync::mpsc::channel();
        run(shared, thread, opened.clone()).await;
        let listeners = all.try_recv().expect("the worker reports that it has none");
        assert!(listeners.hbone.is_none() && listeners.plain.is_none());
        drop(opened);
    }
}

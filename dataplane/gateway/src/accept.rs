//! Phase *accept*: a worker's listeners and the connections that come in on them; the worker's life from its first accept to its last close.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use canal_kit::sys::{self, Held, ListenOptions, SysError};
use canal_kit::worker::Worker as Thread;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use crate::config::{EngineConfig, Plain};
use crate::greet;
use crate::judge;
use crate::parting;
use crate::permit::ConnectionPermit;
use crate::scheduler::Scheduler;
use crate::worker::{Shared, Worker};

/// How often kept connections to endpoints are looked at.
const SWEEP: Duration = Duration::from_secs(1);
/// After an accept failed for want of files or memory: better a late accept than a spinning one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// What connections get to notice that they must end now.
const LAST_TURN: Duration = Duration::from_millis(50);

/// What a listener is for.
#[derive(Debug, Clone)]
enum Door {
    Hbone,
    Plain(Plain),
    /// Plain, for all services of the tier.
    Inside,
}

/// One worker's listening sockets once more, for the kernel's redirector. Each stands for those of all workers, because they share
/// their ports. To be dropped before the engine drains: a listener is closed when its last copy is.
#[derive(Debug, Default)]
pub struct Doors {
    pub hbone: Option<OwnedFd>,
    pub plain: Option<OwnedFd>,
}

impl Doors {
    fn of(opened: &[(TcpListener, Door)]) -> std::io::Result<Self> {
        let mut doors = Self::default();
        for (listener, door) in opened {
            let place = match door {
                Door::Hbone => &mut doors.hbone,
                Door::Inside => &mut doors.plain,
                Door::Plain(_) => continue,
            };
            if place.is_none() {
                *place = Some(listener.as_fd().try_clone_to_owned()?);
            }
        }
        Ok(doors)
    }
}

/// Opens one worker's listeners: each worker has its own on the same addresses, the kernel spreads connections over them.
fn open(config: &EngineConfig) -> Result<Vec<(TcpListener, Door)>, SysError> {
    let options = ListenOptions { reuse_port: true, ..ListenOptions::default() };
    let hbone = config.hbone.iter().map(|address| (*address, Door::Hbone));
    let plain = config.plain.iter().map(|plain| (plain.address, Door::Plain(plain.clone())));
    let inside = config.tier.iter().map(|tier| (tier.plain, Door::Inside));
    hbone.chain(plain).chain(inside).map(|(address, door)| Ok((sys::listen(None, address, &options)?, door))).collect()
}

/// Takes the addresses of all listeners, before any worker runs; tells where they are (port 0 is resolved for all workers alike).
pub(crate) fn bind(config: &mut EngineConfig) -> Result<Vec<Held>, SysError> {
    let mut held = Vec::new();
    let options = ListenOptions { reuse_port: true, ..ListenOptions::default() };
    let addresses = config.hbone.iter_mut().chain(config.plain.iter_mut().map(|plain| &mut plain.address));
    let addresses = addresses.chain(config.tier.iter_mut().map(|tier| &mut tier.plain));
    for address in addresses {
        let taken = sys::hold(*address, &options)?;
        *address = taken.address;
        held.push(taken);
    }
    Ok(held)
}

/// A worker's whole life. Ends when it is drained: all connections closed, or forced.
pub(crate) async fn run(shared: Arc<Shared>, thread: Thread, opened: std::sync::mpsc::Sender<Doors>) {
    let heartbeat = shared.watchdog.register(thread.index);
    let worker = Worker::new(shared, thread.count, thread.drain);
    let doors = match open(&worker.shared.config) {
        Ok(doors) => doors,
        Err(error) => {
            // Its heartbeat never comes: the process does not get ready.
            tracing::error!(%error, worker = thread.index, "a worker cannot listen");
            return;
        }
    };
    // Received by the engine; if it is gone, so is the need.
    let copies = if worker.shared.config.tier.is_some() && thread.index == 0 { Doors::of(&doors) } else { Ok(Doors::default()) };
    let _ = opened.send(copies.unwrap_or_else(|error| {
        tracing::error!(%error, "the redirector cannot be given the listeners");
        Doors::default()
    }));
    drop(opened);
    let (clock, beating) = (worker.clock.clone(), heartbeat.clone());
    tokio::task::spawn_local(async move { clock.run(|| beating.beat()).await });
    tokio::task::spawn_local(worker.scheduler.clone().rounds());
    tokio::task::spawn_local(sweep(Rc::downgrade(&worker), thread.index == 0));
    tokio::task::spawn_local(judge::open::watch(Rc::downgrade(&worker)));
    let parted = Rc::downgrade(&worker);
    let part = move |ask| parted.upgrade().map(|worker| worker.part(ask)).is_some();
    tokio::task::spawn_local(parting::run(worker.shared.parting.subscribe(), part));
    let accepting: Vec<_> =
        doors.into_iter().map(|(listener, door)| tokio::task::spawn_local(accept(worker.clone(), listener, door))).collect();
    worker.drain.draining().await;
    worker.begin_drain();
    for task in accepting {
        // A panic in there was counted and logged; what it accepted lives on.
        let _ = task.await;
    }
    tokio::select! {
        () = worker.until_closed() => {}
        () = worker.drain.forced() => {
            tracing::warn!(worker = thread.index, connections = worker.open(), "drain ends by force");
            tokio::time::sleep(LAST_TURN).await;
        }
    }
    if let Some(log) = &worker.log {
        log.flush();
    }
    heartbeat.end();
}

async fn sweep(worker: Weak<Worker>, is_first: bool) {
    loop {
        tokio::time::sleep(SWEEP).await;
        let Some(worker) = worker.upgrade() else { return };
        if is_first {
            worker.shared.limits.show();
        }
        worker.upstreams.sweep(&worker.snapshot(), Instant::now(), worker.shared.config.times.upstream_idle);
    }
}

async fn accept(worker: Rc<Worker>, listener: TcpListener, door: Door) {
    let mut draining = pin!(worker.drain.draining());
    loop {
        tokio::select! {
            biased;
            accepted = listener.accept() => match accepted {
                Ok((stream, client)) => welcome(&worker, stream, client, &door),
                Err(error) => {
                    worker.counts.refused_connection("accept_failed");
                    tracing::warn!(%error, "accept");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            () = &mut draining => break,
        }
    }
    // Closing a listener resets what waits in its queue: serve that first. By the socket itself, because tokio knows of new
    // connections only after its next turn.
    let Ok(listener) = listener.into_std() else { return };
    while let Ok((stream, client)) = listener.accept() {
        match stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) {
            Ok(stream) => welcome(&worker, stream, client, &door),
            Err(_) => worker.counts.refused_connection("accept_failed"),
        }
    }
}

fn welcome(worker: &Rc<Worker>, stream: TcpStream, client: SocketAddr, door: &Door) {
    let Ok(local) = stream.local_addr() else {
        return worker.counts.refused_connection("gone");
    };
    let snapshot = worker.snapshot();
    // The local address alone says whose the connection is, before a byte of it is read.
    let tenant = match &door {
        Door::Hbone => greet::decide_scope(&snapshot, local.ip()).map(|(tenant, _)| tenant),
        Door::Inside => greet::decide_tenant_inside(&snapshot, local.ip()),
        Door::Plain(plain) => snapshot.tenant(plain.service.tenant.as_str()).ok_or("no_tenant"),
    };
    let taken = tenant.and_then(|tenant| {
        let permit = ConnectionPermit::take(&worker.shared, &tenant.name)?;
        Ok((permit, worker.accounts.of(tenant, &worker.limits)))
    });
    let (permit, account) = match taken {
        Ok(taken) => taken,
        Err(why) => {
            worker.counts.refused_connection(why);
            if matches!(door, Door::Inside) {
                sys::reset_on_close(&stream);
            }
            return;
        }
    };
    worker.counts.accepted.inc();
    worker.shared.accepted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let (open, counted) = (worker.opened(), worker.counts.connections.hold());
    let (worker, door) = (worker.clone(), door.clone());
    tokio::task::spawn_local(async move {
        let served = pin!(async {
            match &door {
                Door::Hbone => Box::pin(greet::hbone(&worker, stream, local.ip(), &permit)).await,
                Door::Inside => greet::inside(&worker, stream, (client, local), &permit).await,
                Door::Plain(plain) => greet::plain(&worker, stream, client, plain, &permit).await,
            }
        });
        if !Scheduler::run(&account.queue, pin!(permit.run(served))).await {
            worker.counts.refused_connection("gave_way");
        }
        drop((open, counted));
    });
}

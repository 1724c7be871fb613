//! The client: one pool per worker, never shared, never locked. Streams to one peer share connections; a crowd waits for one handshake.

mod connection;

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use canal_model::identity::Identity;
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use hashbrown::HashMap;
use http::{HeaderMap, Method, Request, StatusCode, Uri};
use tokio::sync::Notify;

use super::counts::{Ended, HboneCounters};
use super::error::{Again, decide_again, of_h2};
use super::{Authority, HboneError, HboneStream, WindowBudget};
use crate::sys::{Netns, NetnsId, Sources};
use crate::tls::{ClientIdentity, Proof};
use connection::Connection;

pub(super) use connection::Taken;

/// New connections one request opens before it gives up on a peer that leaves no room for its stream.
const OPENS_MAX: u32 = 3;

/// How a pool behaves. `Default` is ztunnel's.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Streams on one connection before another is opened.
    pub streams_max: u32,
    /// A connection without streams is closed after.
    pub idle: Duration,
    /// For TCP.
    pub connect_timeout: Duration,
    /// For the answer to CONNECT (the peer connects to the application in it).
    pub answer_timeout: Duration,
    /// PING interval and answer limit.
    pub ping: (Duration, Duration),
    /// Where connections are opened from.
    pub sources: Sources,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            streams_max: canal_wire::hbone::POOL_STREAMS_MAX,
            idle: Duration::from_secs(300),
            connect_timeout: crate::sys::CONNECT_TIMEOUT,
            answer_timeout: Duration::from_secs(20),
            ping: super::PING,
            sources: Sources::default(),
        }
    }
}

/// Where a tunnel goes and as whom. Connections are shared between targets that agree in all of it.
#[derive(Debug, Clone)]
pub struct Target {
    /// The own identity.
    pub source: ClientIdentity,
    /// The peer must be one of these.
    pub expected: Arc<[Identity]>,
    /// The peer's HBONE address.
    pub address: SocketAddr,
    /// The namespace the socket is made in (the source pod's); `None` is the worker's own.
    pub netns: Option<Arc<Netns>>,
    /// `SO_MARK` of the socket.
    pub mark: Option<u32>,
}

/// A tunnel that is up.
#[derive(Debug)]
pub struct Opened {
    pub stream: HboneStream,
    /// Of the 200, e.g. the peer's `baggage`.
    pub headers: HeaderMap,
    /// The identity the peer proved.
    pub peer: Identity,
    /// Whether an existing connection was used.
    pub reused: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    source: Identity,
    expected: Arc<[Identity]>,
    address: SocketAddr,
    netns: Option<NetnsId>,
    mark: Option<u32>,
}

impl Key {
    fn of(target: &Target) -> Self {
        Self {
            source: target.source.identity().clone(),
            expected: target.expected.clone(),
            address: target.address,
            netns: target.netns.as_ref().map(|n| n.id()),
            mark: target.mark,
        }
    }
}

/// All connections to one peer as one source.
#[derive(Default)]
struct Slot {
    connections: RefCell<Vec<Rc<Connection>>>,
    pending: RefCell<Option<Rc<Pending>>>,
}

/// A handshake that others wait for.
#[derive(Default)]
struct Pending {
    outcome: RefCell<Option<Result<(), HboneError>>>,
    done: Notify,
}

struct Inner {
    config: PoolConfig,
    counters: HboneCounters,
    /// A fast hash will do: keys come from verified configuration, not from strangers.
    slots: RefCell<HashMap<Key, Rc<Slot>, foldhash::fast::RandomState>>,
    /// Numbers connections in the order they came up.
    serial: Cell<u64>,
    host: Rc<dyn ConnectionHost>,
}

/// Where a pool's connections run and what their windows may grow to, by the identity that each is opened with: a process of many tenants
/// divides both among them.
pub trait ConnectionHost {
    /// Spawns, on this thread, what makes or drives a connection.
    fn spawn(&self, source: &Identity, driver: LocalBoxFuture<'static, ()>);
    /// What the connection's windows are paid from; `None`: they grow to the largest.
    fn window_budget(&self, source: &Identity) -> Option<WindowBudget>;
}

/// The host of a pool that is one tenant's.
struct SoleHost;

impl ConnectionHost for SoleHost {
    fn spawn(&self, _: &Identity, driver: LocalBoxFuture<'static, ()>) {
        tokio::task::spawn_local(driver);
    }
    fn window_budget(&self, _: &Identity) -> Option<WindowBudget> {
        None
    }
}

/// The pool of one worker. It holds at most one connection per open tunnel, and those idle for less than [`PoolConfig::idle`]; the
/// callers' own limits on connections bound both. Clones share it; it is `!Send` by design and needs a runtime that spawns local tasks (`LocalRuntime`, `LocalSet`).
#[derive(Clone)]
pub struct Pool {
    inner: Rc<Inner>,
}

/// What to do with a slot that is asked for a stream.
enum Choice {
    Take(Taken),
    Wait(Rc<Pending>),
    Open,
}

impl Pool {
    /// An empty pool.
    pub fn new(config: PoolConfig, counters: HboneCounters) -> Self {
        Self::with_host(config, counters, Rc::new(SoleHost))
    }

    /// An empty pool whose handshakes and connections run where `host` says.
    pub fn with_host(config: PoolConfig, counters: HboneCounters, host: Rc<dyn ConnectionHost>) -> Self {
        Self { inner: Rc::new(Inner { config, counters, slots: RefCell::default(), serial: Cell::new(0), host }) }
    }

    /// Opens a tunnel: CONNECT `authority` with `headers`. A pooled connection that turns out dead is replaced once; one that its peer
    /// closes in order (GOAWAY, RFC 9113 §6.8) is replaced though it be new. That is safe, because no payload is sent before the 200.
    pub async fn open(&self, target: &Target, authority: &Authority, headers: HeaderMap) -> Result<Opened, HboneError> {
        let authority = authority.to_string();
        let request = connect_request(&authority, headers)?;
        let (known, mut after) = (self.inner.serial.get(), 0);
        for tries_left in (0..OPENS_MAX).rev() {
            // Younger connections may have been replaced by a neighbour who met the same dead one: those will do.
            let taken = self.take(target, after).await?;
            after = taken.connection().serial;
            let reused = after <= known;
            match self.ask(target, taken, request.clone(), &authority, reused).await {
                Err((_, again)) if tries_left > 0 && (again == Again::Closing || (again == Again::Dead && reused)) => {
                    self.inner.counters.retries.inc();
                }
                other => return other.map_err(|(e, _)| e),
            }
        }
        Err(HboneError::Http2 { address: target.address, why: format!("{OPENS_MAX} connections in a row were closing") })
    }

    /// Sends the CONNECT and waits for its answer. The error says whether another connection may be asked.
    async fn ask(
        &self,
        target: &Target,
        taken: Taken,
        request: Request<()>,
        authority: &str,
        reused: bool,
    ) -> Result<Opened, (HboneError, Again)> {
        let (address, limit) = (target.address, self.inner.config.answer_timeout);
        let failed = |taken: &Taken, e: h2::Error| {
            let again = decide_again(&e);
            if again != Again::No {
                taken.connection().retire(Ended::Closed);
            }
            (of_h2(address, authority, &e), again)
        };
        let Some(send) = taken.connection().sender() else {
            return Err((HboneError::Http2 { address, why: "the connection is closing".into() }, Again::Closing));
        };
        let answered = tokio::time::timeout(limit, async {
            let (response, stream) = send.ready().await?.send_request(request, false)?;
            Ok::<_, h2::Error>((response.await?, stream))
        });
        let (response, send) = match answered.await {
            Ok(Ok(up)) => up,
            Ok(Err(e)) => return Err(failed(&taken, e)),
            Err(_) => return Err((HboneError::Timeout { address, authority: authority.into(), limit }, Again::No)),
        };
        let (head, recv) = response.into_parts();
        if head.status != StatusCode::OK {
            let status = head.status.as_u16();
            return Err((HboneError::Refused { address, authority: authority.into(), status }, Again::No));
        }
        let peer = taken.connection().peer.clone();
        Ok(Opened { stream: HboneStream::new(send, recv, Some(taken)), headers: head.headers, peer, reused })
    }

    /// A place on a connection younger than `after`, opened if need be; one handshake per key at a time.
    async fn take(&self, target: &Target, after: u64) -> Result<Taken, HboneError> {
        let key = Key::of(target);
        let slot = self.inner.slots.borrow_mut().entry(key.clone()).or_default().clone();
        let taken = self.take_from(&key, &slot, target, after).await;
        if taken.is_err() {
            self.forget(&key, &slot);
        }
        taken
    }

    async fn take_from(&self, key: &Key, slot: &Rc<Slot>, target: &Target, after: u64) -> Result<Taken, HboneError> {
        let mut opened = 0;
        target.source.begun().await;
        loop {
            let address = target.address;
            let proof = target.source.proof().map_err(|e| HboneError::Tls { address, source: Arc::new(e) })?;
            let pending = match slot.choose(&proof, after, self.inner.config.streams_max) {
                Choice::Take(t) => return Ok(t),
                Choice::Wait(p) => p,
                Choice::Open if opened == OPENS_MAX => {
                    let why = format!("{OPENS_MAX} new connections in a row had no room for a stream; does the peer allow any?");
                    return Err(HboneError::Http2 { address: target.address, why });
                }
                Choice::Open => {
                    opened += 1;
                    self.start(key, target, slot)
                }
            };
            let mut done = std::pin::pin!(pending.done.notified());
            done.as_mut().enable();
            if pending.outcome.borrow().is_none() {
                done.await;
            }
            // Always set when `done` fires; a missing one would only mean another turn.
            if let Some(Err(e)) = pending.outcome.borrow().clone() {
                return Err(e);
            }
        }
    }

    /// Starts a handshake in its own task, so that the first to wait may give up without failing the others.
    fn start(&self, key: &Key, target: &Target, slot: &Rc<Slot>) -> Rc<Pending> {
        let pending = Rc::new(Pending::default());
        *slot.pending.borrow_mut() = Some(pending.clone());
        let (pool, key, target, slot, mine) = (self.clone(), key.clone(), target.clone(), slot.clone(), pending.clone());
        let host = self.inner.host.clone();
        let source = target.source.identity().clone();
        let driver = async move {
            pool.inner.counters.handshakes.inc();
            let outcome =
                match connection::establish(&pool.inner.config, &target, pool.inner.host.window_budget(target.source.identity()).as_ref())
                    .await
                {
                    Ok(established) => {
                        let serial = pool.inner.serial.get() + 1;
                        pool.inner.serial.set(serial);
                        let (connection, driver) = established.start(serial, &pool.inner.config);
                        slot.connections.borrow_mut().push(connection.clone());
                        let attended = pool.clone().attend(key.clone(), slot.clone(), connection, driver);
                        pool.inner.host.spawn(target.source.identity(), attended.boxed_local());
                        Ok(())
                    }
                    Err(e) => {
                        pool.inner.counters.handshake_failures.inc();
                        Err(e)
                    }
                };
            *slot.pending.borrow_mut() = None;
            *mine.outcome.borrow_mut() = Some(outcome);
            mine.done.notify_waiters();
            pool.forget(&key, &slot);
        };
        host.spawn(&source, driver.boxed_local());
        pending
    }

    /// Runs a connection to its end and takes it out of its slot.
    async fn attend(self, key: Key, slot: Rc<Slot>, connection: Rc<Connection>, driver: impl Future<Output = Ended>) {
        let open = self.inner.counters.client_open.hold();
        let ended = driver.await;
        drop(open);
        self.inner.counters.closed("client", ended);
        connection.retire(ended);
        slot.connections.borrow_mut().retain(|c| !Rc::ptr_eq(c, &connection));
        self.forget(&key, &slot);
    }

    /// Removes the slot if the caller is its last user, so that the pool is as large as what is open.
    fn forget(&self, key: &Key, slot: &Rc<Slot>) {
        // Two: the map's and the caller's.
        if Rc::strong_count(slot) == 2 && slot.connections.borrow().is_empty() && slot.pending.borrow().is_none() {
            self.inner.slots.borrow_mut().remove(key);
        }
    }

    /// Open connections and streams on them, for `/config_dump`.
    pub fn size(&self) -> (usize, usize) {
        let slots = self.inner.slots.borrow();
        let streams = |s: &Rc<Slot>| s.connections.borrow().iter().map(|c| c.streams() as usize).sum::<usize>();
        (slots.values().map(|s| s.connections.borrow().len()).sum(), slots.values().map(streams).sum())
    }

    /// Closes connections of `netns` (a pod that is gone) or all: no new streams; open ones finish.
    pub fn retire(&self, netns: Option<NetnsId>) {
        for (key, slot) in self.inner.slots.borrow().iter() {
            if netns.is_none() || key.netns == netns {
                slot.connections.borrow().iter().for_each(|c| c.retire(Ended::Retired));
            }
        }
    }
}

impl Slot {
    /// Decides where the next stream goes. A connection made with an older certificate takes no new streams: so every identity proves its
    /// current certificate within the life of one, and nothing running is dropped.
    fn choose(&self, proof: &Proof, after: u64, streams_max: u32) -> Choice {
        for c in self.connections.borrow().iter() {
            if !c.proof.same(proof) {
                c.retire(Ended::Retired);
            } else if c.serial > after
                && let Some(taken) = c.take(streams_max)
            {
                return Choice::Take(taken);
            }
        }
        self.pending.borrow().clone().map_or(Choice::Open, Choice::Wait)
    }
}

fn connect_request(authority: &str, headers: HeaderMap) -> Result<Request<()>, HboneError> {
    let uri = Uri::builder().authority(authority).build().map_err(|e| HboneError::Request(format!("{authority}: {e}")))?;
    let mut request = Request::new(());
    *request.method_mut() = Method::CONNECT;
    *request.uri_mut() = uri;
    *request.version_mut() = http::Version::HTTP_2;
    *request.headers_mut() = headers;
    Ok(request)
}

//! Client side: one pool per worker, never shared and never locked. Streams to one peer share
//! connections, and concurrent requests wait for one handshake. Start with [`HbonePool::open`].

mod connection;
mod spread;

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use canal_identity::{ClientIdentity, CredentialId};
use canal_model::identity::Identity;
use canal_net::sys::{Netns, NetnsId, SourceAddresses};
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use hashbrown::HashMap;
use http::{HeaderMap, Method, Request, StatusCode, Uri};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::counts::{HboneCloseReason, HboneCounters};
use super::credit::WITHHELD_CONNECTIONS_MAX;
use super::error::{ReconnectDecision, decide_again, of_h2};
use super::{BufferBudget, ConnectAuthority, HboneError, HboneStream};
use connection::{PendingStream, PooledConnection};
use spread::SpreadLoad;

pub(super) use connection::StreamLease;
pub use spread::{SpreadConfig, Steering};

/// New connections that one request opens before it gives up on a peer that has no capacity for its
/// stream. Spread streams meet a stale connection, then another one; the last attempt uses a new
/// one, which cannot be stale.
const OPENS_MAX: u32 = 3;
/// Time during which a bucket whose connection could not be opened, or failed, is not selected
/// again. As long as a node ejects a gateway at most; the other buckets serve meanwhile.
const FAILED_BUCKET_PAUSE: Duration = Duration::from_secs(30);
/// Time after a failed connection before another one is opened next to those that are up. A node
/// ejects a gateway that failed for as long at first.
const GROWTH_PAUSE: Duration = Duration::from_secs(1);
/// Concurrent handshakes next to connections that are up. Four rounds of them make the 16
/// connections of a service.
const GROWTH_AT_ONCE: usize = 4;
/// Time that a stream waits, once, for new connections if those that are up have their share of
/// streams already. The limit of an attempt at a gateway, 600 ms at nodes, includes this wait, so
/// it has to be well below.
const GROWTH_WAIT: Duration = Duration::from_millis(200);

/// Configuration of a pool. `Default` has ztunnel's values.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Streams on one connection before another connection is opened.
    pub streams_max: u32,
    /// Time after which a connection without streams is closed.
    pub idle: Duration,
    /// Timeout of the TCP connect.
    pub connect_timeout: Duration,
    /// Timeout of the response to CONNECT, in which the peer connects to the application.
    pub answer_timeout: Duration,
    /// PING interval and PING timeout.
    pub ping: (Duration, Duration),
    /// Source addresses of the connections.
    pub sources: SourceAddresses,
    /// Spread of streams by [`HbonePool::open_spread`].
    pub spread: SpreadConfig,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            streams_max: canal_wire::hbone::POOL_STREAMS_MAX,
            idle: Duration::from_secs(300),
            connect_timeout: canal_net::sys::CONNECT_TIMEOUT,
            // Twice the peer's own connect timeout, 10 s, so that its answer with the cause
            // arrives.
            answer_timeout: Duration::from_secs(20),
            ping: super::KEEPALIVE_INTERVAL,
            sources: SourceAddresses::default(),
            spread: SpreadConfig::default(),
        }
    }
}

/// Destination and identities of a tunnel. Targets that are equal in all of it share connections.
#[derive(Debug, Clone)]
pub struct TunnelTarget {
    /// Identity that this side presents.
    pub source: ClientIdentity,
    /// Identities of which the peer must have one.
    pub expected: Arc<[Identity]>,
    /// HBONE address of the peer.
    pub address: SocketAddr,
    /// Namespace of the socket, which is the source pod's; `None` is the worker's own.
    pub netns: Option<Arc<Netns>>,
    /// Value of `SO_MARK` of the socket.
    pub mark: Option<u32>,
}

/// A tunnel that was accepted by the peer.
#[derive(Debug)]
pub struct OpenTunnel {
    pub stream: HboneStream,
    /// Headers of the 200 response, e.g. the peer's `baggage`.
    pub headers: HeaderMap,
    /// Verified identity of the peer.
    pub peer: Identity,
    /// True if the tunnel uses an existing connection.
    pub reused: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PoolKey {
    source: Identity,
    expected: Arc<[Identity]>,
    address: SocketAddr,
    netns: Option<NetnsId>,
    mark: Option<u32>,
}

impl PoolKey {
    fn of(target: &TunnelTarget) -> Self {
        Self {
            source: target.source.identity().clone(),
            expected: target.expected.clone(),
            address: target.address,
            netns: target.netns.as_ref().map(|n| n.id()),
            mark: target.mark,
        }
    }
}

/// Policy by which streams to one peer share connections.
#[derive(Debug, Clone, Copy)]
enum Sharing {
    /// The streams use as few connections as can carry them.
    Packed,
    /// The streams use as many connections as the load justifies, each to its own bucket where they
    /// can be steered.
    Spread(Option<Steering>),
}

/// All connections from one source to one peer.
#[derive(Default)]
struct PeerConnections {
    /// Connections in the order of their places.
    connections: RefCell<Vec<Rc<PooledConnection>>>,
    pending: RefCell<Option<Rc<PendingHandshake>>>,
    load: SpreadLoad,
    /// Number of streams that wait for a connection.
    seeking: Cell<u32>,
    /// Places whose connections are being established.
    opening: RefCell<Vec<u32>>,
    /// Places whose connections failed, and the time until which they stay empty.
    failed: RefCell<Vec<(u32, Instant)>>,
    grows_from: Cell<Option<Instant>>,
    /// The peer sent GOAWAY on a connection while others were being established.
    lost: Cell<bool>,
}

/// A handshake for which other streams wait.
#[derive(Default)]
struct PendingHandshake {
    outcome: RefCell<Option<Result<(), HboneError>>>,
    finished: Notify,
}

impl PendingHandshake {
    /// Waits until the handshake has ended, and returns its result.
    async fn wait(&self) -> Result<(), HboneError> {
        let mut done = std::pin::pin!(self.finished.notified());
        done.as_mut().enable();
        if self.outcome.borrow().is_none() {
            done.await;
        }
        // The outcome is always set when `finished` fires. If it were missing, the caller would
        // only repeat its loop.
        self.outcome.borrow().clone().unwrap_or(Ok(()))
    }
}

struct Inner {
    config: PoolConfig,
    counters: HboneCounters,
    /// A fast hash is sufficient: the keys come from verified configuration, not from
    /// unauthenticated peers.
    slots: RefCell<HashMap<PoolKey, Rc<PeerConnections>, foldhash::fast::RandomState>>,
    /// Number of the newest connection, in the order in which they were established.
    serial: Cell<u64>,
    host: Rc<dyn ConnectionHost>,
}

/// Runs a pool's connections and limits what they buffer, by the source identity of each
/// connection. A process with many tenants divides both among them.
pub trait ConnectionHost {
    /// Spawns, on this thread, a future that establishes or drives a connection.
    fn spawn(&self, source: &Identity, driver: LocalBoxFuture<'static, ()>);
    /// Returns the budget of the bytes that the connection's streams hold for their readers; with
    /// `None` only windows limit them.
    fn buffer_budget(&self, source: &Identity) -> Option<BufferBudget>;
}

/// Host of a pool that belongs to one tenant.
struct SoleHost;

impl ConnectionHost for SoleHost {
    fn spawn(&self, _: &Identity, driver: LocalBoxFuture<'static, ()>) {
        tokio::task::spawn_local(driver);
    }
    fn buffer_budget(&self, _: &Identity) -> Option<BufferBudget> {
        None
    }
}

/// The pool of one worker. It contains at most one connection per open tunnel, and connections idle
/// for less than [`PoolConfig::idle`]. The callers' own limits on connections bound both. Clones
/// share the pool. It is `!Send` by design, and needs a runtime that spawns local tasks
/// (`LocalRuntime`, `LocalSet`).
#[derive(Clone)]
pub struct HbonePool {
    inner: Rc<Inner>,
}

/// Decision for a stream whose connections are packed.
enum StreamChoice {
    Take(StreamLease),
    Wait(Rc<PendingHandshake>),
    Open,
}

/// Decision for a stream whose connections are spread.
struct SpreadChoice {
    /// `None` if no connection can take the stream.
    stream: Option<StreamLease>,
    /// Number of connections to open next to those that are up.
    growth: usize,
    /// The selected connection has its share of streams already, and more connections are coming
    /// up.
    is_crowded: bool,
}

/// Counts a stream that waits for a connection.
struct Seeking<'a>(&'a Cell<u32>);

impl<'a> Seeking<'a> {
    fn begin(count: &'a Cell<u32>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Seeking<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl HbonePool {
    /// Creates an empty pool that belongs to one tenant.
    pub fn new(config: PoolConfig, counters: HboneCounters) -> Self {
        Self::with_host(config, counters, Rc::new(SoleHost))
    }

    /// Creates an empty pool whose handshakes and connections run on `host`.
    pub fn with_host(
        config: PoolConfig,
        counters: HboneCounters,
        host: Rc<dyn ConnectionHost>,
    ) -> Self {
        Self {
            inner: Rc::new(Inner {
                config,
                counters,
                slots: RefCell::default(),
                serial: Cell::new(0),
                host,
            }),
        }
    }

    /// Opens a tunnel: CONNECT `authority` with `headers`. A pooled connection that turns out to be
    /// dead is replaced once. A connection that its peer closes in order (GOAWAY, RFC 9113 §6.8) is
    /// replaced even if it is new. That is safe, because no payload is sent before the 200.
    ///
    /// # Errors
    /// The peer cannot be reached or authenticated, refuses the CONNECT, or does not answer in
    /// time.
    pub async fn open(
        &self,
        target: &TunnelTarget,
        authority: &ConnectAuthority,
        headers: HeaderMap,
    ) -> Result<OpenTunnel, HboneError> {
        self.open_shared(target, Sharing::Packed, authority, headers, None)
            .await
    }

    /// Opens a tunnel like [`HbonePool::open`], and gives up after `limit` if the peer is dead: if
    /// no connection to it is established by then, or if it leaves a PING unanswered. A peer that
    /// is alive has the whole [`PoolConfig::answer_timeout`]. It may be dialing the application,
    /// and an attempt elsewhere would reach the application a second time.
    ///
    /// # Errors
    /// The errors are those of [`HbonePool::open`].
    pub async fn open_unless_dead(
        &self,
        target: &TunnelTarget,
        authority: &ConnectAuthority,
        headers: HeaderMap,
        limit: Duration,
    ) -> Result<OpenTunnel, HboneError> {
        self.open_shared(target, Sharing::Packed, authority, headers, Some(limit))
            .await
    }

    /// Opens a tunnel like [`HbonePool::open`], on one of several connections whose number follows
    /// the load ([`SpreadConfig`]). It is for a service with many replicas and workers behind it.
    /// With `steering`, each connection leads to its own bucket. A target must always be opened
    /// either by this function or by the others. With a limit, it gives up dead peers as
    /// [`HbonePool::open_unless_dead`] does.
    ///
    /// # Errors
    /// The errors are those of [`HbonePool::open`].
    pub async fn open_spread(
        &self,
        target: &TunnelTarget,
        steering: Option<Steering>,
        authority: &ConnectAuthority,
        headers: HeaderMap,
        limit: Option<Duration>,
    ) -> Result<OpenTunnel, HboneError> {
        self.open_shared(target, Sharing::Spread(steering), authority, headers, limit)
            .await
    }

    async fn open_shared(
        &self,
        target: &TunnelTarget,
        sharing: Sharing,
        authority: &ConnectAuthority,
        headers: HeaderMap,
        limit: Option<Duration>,
    ) -> Result<OpenTunnel, HboneError> {
        let authority = authority.to_string();
        let request = connect_request(&authority, headers)?;
        let connected_by = limit.map(|limit| (Instant::now() + limit, limit));
        let (known, mut after) = (self.inner.serial.get(), 0);
        for tries_left in (0..OPENS_MAX).rev() {
            let taking = self.take(target, sharing, after);
            // Without a limit there is no other peer to try, so the connection may take its full
            // timeout.
            let taken = match connected_by {
                None => taking.await?,
                Some((at, limit)) => tokio::time::timeout_at(at, taking)
                    .await
                    .map_err(|_| timed_out(target, &authority, limit))??,
            };
            let serial = taken.connection().serial;
            let reused = serial <= known;
            after = match sharing {
                // Younger connections may be replacements by another stream that met the same dead
                // connection: these are acceptable.
                Sharing::Packed => serial,
                // Other connections lead to other replicas, and the failed one is retired. But all
                // may be dead, so the last attempt uses a new one.
                Sharing::Spread(_) if tries_left == 1 => known,
                Sharing::Spread(_) => 0,
            };
            match self
                .send_connect(target, taken, request.clone(), reused, limit)
                .await
            {
                // A reused connection may be stale, but a dead new one shows a dead peer.
                Err((_, again))
                    if tries_left > 0
                        && (again == ReconnectDecision::Closing
                            || (again == ReconnectDecision::Dead && reused)) =>
                {
                    self.inner.counters.retries.inc();
                }
                other => return other.map_err(|(e, _)| e),
            }
        }
        Err(HboneError::Http2 {
            address: target.address,
            why: format!("{OPENS_MAX} connections in a row were closing"),
        })
    }

    /// Sends the CONNECT and waits for the response: no longer than `dead_limit` if the peer is
    /// dead. The error says whether another connection may be tried.
    async fn send_connect(
        &self,
        target: &TunnelTarget,
        taken: StreamLease,
        request: Request<()>,
        reused: bool,
        dead_limit: Option<Duration>,
    ) -> Result<OpenTunnel, (HboneError, ReconnectDecision)> {
        let (address, limit) = (target.address, self.inner.config.answer_timeout);
        // A CONNECT's URI is its authority (RFC 9113 §8.5). It becomes text only for an error.
        let authority = request.uri().clone();
        let failed = |taken: &StreamLease, e: h2::Error| {
            let again = decide_again(&e);
            // The connection is dead, closing or full: no further stream is opened on it.
            if again != ReconnectDecision::No {
                taken.connection().retire(HboneCloseReason::Closed);
            }
            (of_h2(address, &authority.to_string(), &e), again)
        };
        let Some(send) = taken.connection().sender() else {
            // A connection that is closing has taken no request, so another one may be tried.
            return Err((
                HboneError::Http2 {
                    address,
                    why: "the connection is closing".into(),
                },
                ReconnectDecision::Closing,
            ));
        };
        let waiting = PendingStream::begin(taken.connection());
        let answered = tokio::time::timeout(limit, async {
            let (response, stream) = send.ready().await?.send_request(request, false)?;
            Ok::<_, h2::Error>((response.await?, stream))
        });
        let died = async {
            match dead_limit {
                Some(limit) => {
                    taken.connection().unresponsive(limit).await;
                    limit
                }
                None => std::future::pending().await,
            }
        };
        let answered = tokio::select! {
            // A response that has arrived wins over the timer.
            biased;
            answered = answered => answered.map_err(|_| limit),
            limit = died => Err(limit),
        };
        let (response, send) = match answered {
            Ok(Ok(up)) => {
                waiting.answered();
                up
            }
            Ok(Err(e)) => return Err(failed(&taken, e)),
            Err(limit) => {
                // The peer may have acted on the CONNECT, so it is not repeated.
                return Err((
                    timed_out(target, &authority.to_string(), limit),
                    ReconnectDecision::No,
                ));
            }
        };
        let (head, recv) = response.into_parts();
        // The peer has decided, so another connection to it would get the same response.
        if head.status != StatusCode::OK {
            let status = head.status.as_u16();
            return Err((
                HboneError::Refused {
                    address,
                    authority: authority.to_string(),
                    status,
                },
                ReconnectDecision::No,
            ));
        }
        let peer = taken.connection().peer.clone();
        let account = taken.connection().account.clone();
        Ok(OpenTunnel {
            stream: HboneStream::new(send, recv, account, Some(taken)),
            headers: head.headers,
            peer,
            reused,
        })
    }

    /// Takes a stream slot on a connection younger than `after`, and opens one if necessary. There
    /// is one handshake per key at a time.
    async fn take(
        &self,
        target: &TunnelTarget,
        sharing: Sharing,
        after: u64,
    ) -> Result<StreamLease, HboneError> {
        let key = PoolKey::of(target);
        let slot = self
            .inner
            .slots
            .borrow_mut()
            .entry(key.clone())
            .or_default()
            .clone();
        let taken = self.take_from(&key, &slot, target, sharing, after).await;
        if taken.is_err() {
            self.forget(&key, &slot);
        }
        taken
    }

    async fn take_from(
        &self,
        key: &PoolKey,
        slot: &Rc<PeerConnections>,
        target: &TunnelTarget,
        sharing: Sharing,
        after: u64,
    ) -> Result<StreamLease, HboneError> {
        let mut opened = 0;
        // Waits until the source has its first certificate.
        target.source.wait_for_first_certificate().await;
        let _seeking = Seeking::begin(&slot.seeking);
        let is_spread = matches!(sharing, Sharing::Spread(_));
        if is_spread {
            slot.load.record(Instant::now());
        }
        let mut can_wait = true;
        loop {
            let address = target.address;
            // The certificate may have been renewed while this task waited. Connections with the
            // earlier one take no more streams.
            let proof = target.source.proof().map_err(|e| HboneError::Tls {
                address,
                source: Arc::new(e),
            })?;
            let choice = if !is_spread {
                slot.choose(&proof, after, self.inner.config.streams_max)
            } else {
                let SpreadChoice {
                    stream: taken,
                    growth,
                    is_crowded,
                } = slot.choose_spread(&proof, after, &self.inner.config, Instant::now());
                if growth > 0 {
                    self.start(key, target, sharing, slot, growth);
                }
                let pending = slot.pending.borrow().clone();
                match (taken, pending) {
                    (Some(taken), Some(pending)) if is_crowded && std::mem::take(&mut can_wait) => {
                        // All connections have their share: it waits once for new ones.
                        drop(taken);
                        // The outcome does not matter here, because the next iteration selects
                        // again.
                        let _ = tokio::time::timeout(GROWTH_WAIT, pending.wait()).await;
                        continue;
                    }
                    (Some(taken), _) => StreamChoice::Take(taken),
                    (None, Some(pending)) => StreamChoice::Wait(pending),
                    (None, None) => StreamChoice::Open,
                }
            };
            let pending = match choice {
                StreamChoice::Take(t) => {
                    // The stream may starve until its peer grants credit; the counter makes that
                    // visible.
                    if t.connection().is_withheld() {
                        self.inner.counters.placed_without_credit();
                    }
                    return Ok(t);
                }
                StreamChoice::Wait(p) => p,
                StreamChoice::Open if opened == OPENS_MAX => {
                    let why = format!(
                        "{OPENS_MAX} new connections in a row allowed no stream; the peer seems to allow none"
                    );
                    return Err(HboneError::Http2 {
                        address: target.address,
                        why,
                    });
                }
                StreamChoice::Open => {
                    opened += 1;
                    self.start(key, target, sharing, slot, 1)
                }
            };
            pending.wait().await?;
        }
    }

    /// Starts `count` handshakes in a task of their own, so that the first waiter may give up
    /// without failing the others.
    fn start(
        &self,
        key: &PoolKey,
        target: &TunnelTarget,
        sharing: Sharing,
        slot: &Rc<PeerConnections>,
        count: usize,
    ) -> Rc<PendingHandshake> {
        let pending = Rc::new(PendingHandshake::default());
        *slot.pending.borrow_mut() = Some(pending.clone());
        let (pool, key, target, slot, mine) = (
            self.clone(),
            key.clone(),
            target.clone(),
            slot.clone(),
            pending.clone(),
        );
        let source = target.source.identity().clone();
        let driver = async move {
            let all = (0..count).map(|_| pool.establish(&key, &target, sharing, &slot));
            let outcomes = futures::future::join_all(all).await;
            // One established connection is enough for the waiters.
            let outcome = outcomes
                .into_iter()
                .reduce(|a, b| if a.is_ok() { a } else { b })
                .unwrap_or(Ok(()));
            *slot.pending.borrow_mut() = None;
            *mine.outcome.borrow_mut() = Some(outcome);
            mine.finished.notify_waiters();
            if slot.lost.take() {
                pool.grow(&key, &target, sharing, &slot);
            }
            pool.forget(&key, &slot);
        };
        self.inner.host.spawn(&source, driver.boxed_local());
        pending
    }

    /// Opens the connections that the load justifies next to those that are up. They replace
    /// connections that got GOAWAY, before a stream that comes back from there has to wait.
    fn grow(
        &self,
        key: &PoolKey,
        target: &TunnelTarget,
        sharing: Sharing,
        slot: &Rc<PeerConnections>,
    ) {
        if slot.pending.borrow().is_some() {
            return slot.lost.set(true);
        }
        let streams = slot.streams();
        let growth = slot.growth(streams, &self.inner.config.spread, Instant::now());
        if streams > 0 && growth > 0 {
            self.start(key, target, sharing, slot, growth);
        }
    }

    /// Establishes one more connection to the peer.
    async fn establish(
        &self,
        key: &PoolKey,
        target: &TunnelTarget,
        sharing: Sharing,
        slot: &Rc<PeerConnections>,
    ) -> Result<(), HboneError> {
        let Inner {
            config,
            counters,
            host,
            serial,
            ..
        } = &*self.inner;
        let place = match sharing {
            // Only spread connections have numbered positions, which select their buckets.
            Sharing::Packed => 0,
            Sharing::Spread(_) => slot.take_place(Instant::now()),
        };
        let bucket = match sharing {
            Sharing::Spread(Some(steering)) => {
                Some((steering, steering.bucket(&config.spread, place)))
            }
            Sharing::Packed | Sharing::Spread(None) => None,
        };
        counters.handshakes.inc();
        let account = counters.account(host.buffer_budget(target.source.identity()));
        let established = connection::establish(config, target, bucket, account, counters).await;
        // Before the result is examined, so that a failed position is free again too.
        slot.opening
            .borrow_mut()
            .retain(|opening| *opening != place);
        match established {
            Ok(established) => {
                // Serials order the connections by age: retries skip those up to a failed one.
                serial.set(serial.get() + 1);
                let (connection, driver) = established.start(serial.get(), place, config);
                slot.insert(connection.clone());
                // A GOAWAY starts the replacement at once, before a stream has to wait for it.
                if let Sharing::Spread(_) = sharing {
                    let (pool, key, target, slot) = (
                        self.clone(),
                        key.clone(),
                        target.clone(),
                        Rc::downgrade(slot),
                    );
                    connection.on_goaway(move || {
                        slot.upgrade()
                            .into_iter()
                            .for_each(|slot| pool.grow(&key, &target, sharing, &slot))
                    });
                }
                let attended = self
                    .clone()
                    .attend(key.clone(), slot.clone(), connection, driver);
                host.spawn(target.source.identity(), attended.boxed_local());
                Ok(())
            }
            Err(e) => {
                counters.handshake_failures.inc();
                // The place stays empty for a while, so that the next connection leads to another
                // bucket.
                slot.fail(place, Instant::now());
                Err(e)
            }
        }
    }

    /// Drives a connection to its end and removes it from its peer's connections.
    async fn attend(
        self,
        key: PoolKey,
        slot: Rc<PeerConnections>,
        connection: Rc<PooledConnection>,
        driver: impl Future<Output = HboneCloseReason>,
    ) {
        let open = self.inner.counters.client_open.hold();
        let ended = driver.await;
        drop(open);
        self.inner.counters.closed("client", ended);
        connection.retire(ended);
        if matches!(ended, HboneCloseReason::Error | HboneCloseReason::Ping) {
            slot.fail(connection.index, Instant::now());
        }
        slot.connections
            .borrow_mut()
            .retain(|c| !Rc::ptr_eq(c, &connection));
        self.forget(&key, &slot);
    }

    /// Removes the peer's entry if the caller is its last user, so that the pool is no larger than
    /// its open connections.
    fn forget(&self, key: &PoolKey, slot: &Rc<PeerConnections>) {
        // The two references are the map's and the caller's.
        if Rc::strong_count(slot) == 2
            && slot.connections.borrow().is_empty()
            && slot.pending.borrow().is_none()
        {
            self.inner.slots.borrow_mut().remove(key);
        }
    }

    /// Returns the number of open connections and of streams on them, for `/config_dump`.
    pub fn size(&self) -> (usize, usize) {
        let slots = self.inner.slots.borrow();
        let streams = |s: &Rc<PeerConnections>| {
            s.connections
                .borrow()
                .iter()
                .map(|c| c.streams() as usize)
                .sum::<usize>()
        };
        (
            slots.values().map(|s| s.connections.borrow().len()).sum(),
            slots.values().map(streams).sum(),
        )
    }

    /// Closes all connections, or those of `netns` (a pod that is gone): they take no new streams,
    /// and open streams finish.
    pub fn retire(&self, netns: Option<NetnsId>) {
        for (key, slot) in self.inner.slots.borrow().iter() {
            if netns.is_none() || key.netns == netns {
                slot.connections
                    .borrow()
                    .iter()
                    .for_each(|c| c.retire(HboneCloseReason::Retired));
            }
        }
    }
}

impl PeerConnections {
    /// Selects the connection of the next stream. A connection made with an older certificate takes
    /// no new streams. So every identity presents its current certificate within the lifetime of
    /// one, and no open stream is dropped. A connection whose peer gives no credit is passed by,
    /// until there are too many of them.
    fn choose(&self, proof: &CredentialId, after: u64, streams_max: u32) -> StreamChoice {
        let connections = self.connections.borrow();
        let mut withheld = Vec::new();
        for c in connections.iter() {
            if !c.proof.same(proof) || is_useless(c) {
                c.retire(HboneCloseReason::Retired);
            } else if c.is_withheld() {
                if c.is_open() {
                    withheld.push(c);
                }
            } else if c.serial > after
                && let Some(taken) = c.take(streams_max)
            {
                return StreamChoice::Take(taken);
            }
        }
        // Another connection to this peer would not do better.
        if withheld.len() >= WITHHELD_CONNECTIONS_MAX
            && let Some(taken) = withheld
                .iter()
                .filter(|c| c.serial > after)
                .min_by_key(|c| c.streams())
                .and_then(|c| c.take(streams_max))
        {
            return StreamChoice::Take(taken);
        }
        self.pending
            .borrow()
            .clone()
            .map_or(StreamChoice::Open, StreamChoice::Wait)
    }

    /// Selects the connection of the next spread stream, and decides whether more connections
    /// should be opened in the meantime. The least busy of as many connections as the load
    /// justifies takes the stream, in turns. Connections beyond that number become idle and close.
    /// Aged connections serve until others have replaced them, and connections that do not answer
    /// are avoided while others do.
    fn choose_spread(
        &self,
        proof: &CredentialId,
        after: u64,
        config: &PoolConfig,
        now: Instant,
    ) -> SpreadChoice {
        let connections = self.connections.borrow();
        connections
            .iter()
            .filter(|c| !c.proof.same(proof) || is_useless(c))
            .for_each(|c| c.retire(HboneCloseReason::Retired));
        let open = || connections.iter().filter(|c| c.is_open());
        let good = || open().filter(|c| !c.is_avoided(true, now));
        let aged = || good().filter(|c| c.is_aged(now));
        let fresh = || good().filter(|c| !c.is_aged(now));
        let streams = self.streams() + self.seeking.get();
        let (target, count) = (
            self.load.target(streams, &config.spread) as usize,
            fresh().count(),
        );
        let least_busy = |among: &mut dyn Iterator<Item = &Rc<PooledConnection>>| {
            let available = among.filter(|c| c.serial > after && c.has_room(config.streams_max));
            available
                .min_by_key(|c| (c.streams(), c.turn.get()))?
                .take(config.streams_max)
        };
        let taken = least_busy(&mut fresh().take(target))
            .or_else(|| least_busy(&mut fresh()))
            .or_else(|| least_busy(&mut aged()));
        // Another connection to this peer would not do better than one of those without credit.
        let tolerated = || {
            let avoids_withheld = avoids_withheld(&connections);
            open().filter(move |c| !c.is_avoided(avoids_withheld, now))
        };
        let taken = taken.or_else(|| least_busy(&mut tolerated()));
        let Some(taken) = taken else {
            // No connection answers. Below the maximum the caller opens another one; at the maximum
            // the stream takes one of these.
            let is_full = open().count() >= config.spread.connections_max as usize;
            return SpreadChoice {
                stream: if is_full {
                    least_busy(&mut open())
                } else {
                    None
                },
                growth: 0,
                is_crowded: false,
            };
        };
        // Enough younger connections serve, so the aged ones are not needed any more.
        if count >= target && !taken.connection().is_aged(now) {
            aged().for_each(|c| c.retire(HboneCloseReason::Aged));
        }
        let growth = self.growth(streams, &config.spread, now);
        // The caller may then wait for one of the new connections, for a short time.
        let is_crowded =
            count < target && taken.connection().streams() > config.spread.streams_per_connection;
        SpreadChoice {
            stream: Some(taken),
            growth,
            is_crowded,
        }
    }

    /// Returns the number of open streams. Streams of connections that take no new ones count too:
    /// they will come back, because a peer that moves them closes them one by one.
    fn streams(&self) -> u32 {
        self.connections.borrow().iter().map(|c| c.streams()).sum()
    }

    /// Returns how many connections to open for this number of streams, in addition to those that
    /// are up. It is 0 while a handshake is pending or after a recent failure.
    fn growth(&self, streams: u32, spread: &SpreadConfig, now: Instant) -> usize {
        if self.pending.borrow().is_some() || self.grows_from.get().is_some_and(|from| now < from) {
            return 0;
        }
        let connections = self.connections.borrow();
        let open = connections.iter().filter(|c| c.is_open()).count();
        let avoids_withheld = avoids_withheld(&connections);
        let fresh = connections
            .iter()
            .filter(|c| c.is_open() && !c.is_aged(now) && !c.is_avoided(avoids_withheld, now))
            .count();
        let slots_left = (2 * spread.connections_max as usize).saturating_sub(open);
        (self.load.target(streams, spread) as usize)
            .saturating_sub(fresh)
            .min(GROWTH_AT_ONCE)
            .min(slots_left)
    }

    /// Takes the first place without a connection. Places that failed lately come last.
    fn take_place(&self, now: Instant) -> u32 {
        self.failed.borrow_mut().retain(|(_, until)| now < *until);
        let (connections, failed, mut opening) = (
            self.connections.borrow(),
            self.failed.borrow(),
            self.opening.borrow_mut(),
        );
        let is_free = |place: &u32| {
            !opening.contains(place)
                && !connections.iter().any(|c| c.index == *place && c.is_open())
        };
        let most = connections.len() + failed.len() + opening.len();
        let mut free = (0..=most as u32).filter(is_free);
        let sound = free
            .clone()
            .find(|place| !failed.iter().any(|(at, _)| at == place));
        let place = sound.or_else(|| free.next()).unwrap_or(0);
        opening.push(place);
        place
    }

    /// Records that the connection of this place failed.
    fn fail(&self, place: u32, now: Instant) {
        self.grows_from.set(Some(now + GROWTH_PAUSE));
        let mut failed = self.failed.borrow_mut();
        failed.retain(|(at, until)| now < *until && *at != place);
        failed.push((place, now + FAILED_BUCKET_PAUSE));
    }

    fn insert(&self, connection: Rc<PooledConnection>) {
        let mut connections = self.connections.borrow_mut();
        let at = connections.partition_point(|c| c.index <= connection.index);
        connections.insert(at, connection);
    }
}

/// Returns whether connections without credit are passed by: not if the peer has too many of them.
fn avoids_withheld(connections: &[Rc<PooledConnection>]) -> bool {
    connections
        .iter()
        .filter(|c| c.is_open() && c.is_withheld())
        .count()
        < WITHHELD_CONNECTIONS_MAX
}

/// Returns whether nothing would be lost with the connection: its peer gives no credit, and no
/// stream waits for it.
fn is_useless(connection: &PooledConnection) -> bool {
    connection.is_withheld() && connection.streams() == 0
}

fn timed_out(target: &TunnelTarget, authority: &str, limit: Duration) -> HboneError {
    HboneError::Timeout {
        address: target.address,
        authority: authority.into(),
        limit,
    }
}

fn connect_request(authority: &str, headers: HeaderMap) -> Result<Request<()>, HboneError> {
    let uri = Uri::builder()
        .authority(authority)
        .build()
        .map_err(|e| HboneError::Request(format!("{authority}: {e}")))?;
    let mut request = Request::new(());
    *request.method_mut() = Method::CONNECT;
    *request.uri_mut() = uri;
    *request.version_mut() = http::Version::HTTP_2;
    *request.headers_mut() = headers;
    Ok(request)
}

//! One pooled connection: how it is established, how many streams it carries, what keeps it alive
//! and what ends it. The pool selects the connection of a stream. Start with [`establish`].

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use canal_identity::CredentialId;
use canal_model::identity::Identity;
use canal_net::sys::{self, ConnectOptions, SysError};
use canal_tls::{MtlsStream, PeerTrustWatch, RotateHint, TrustLoss};
use canal_wire::hbone::{CLIENT_HEADER_LIST, CLIENT_SEND_BUFFER, FRAME_SIZE, STREAM_WINDOW_MAX};
use futures::future::LocalBoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use h2::client::SendRequest;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{PoolConfig, Steering, TunnelTarget};
use crate::counts::{HboneCloseReason, HboneCounters};
use crate::error::of_h2;
use crate::first_write::Counted;
use crate::{
    CONNECTION_WINDOW, DATA_FRAME_BUDGET, FlowAccount, HboneError, WindowGrowth, keep_alive,
};

/// Time that a connection has for an orderly close. Nobody waits for it: it only releases the
/// connection of a peer that does not close. Nobody measured this value.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Source ports that are tried for one bucket. A port is in use only if another connection to the
/// same address has it, so one nearly always suffices. Then the bucket pauses
/// (`FAILED_BUCKET_PAUSE`).
const PORT_TRIES: usize = 4;

/// A connection of the pool.
pub(crate) struct PooledConnection {
    /// Number of the connection, in the order in which the pool established them.
    pub(crate) serial: u64,
    /// Place among the connections to its peer, which determines its bucket.
    pub(super) index: u32,
    /// Time of its last stream, as a number in the order of the thread's streams.
    pub(super) turn: Cell<u64>,
    /// Time after which the connection is too old for new streams.
    age_end: Instant,
    /// Number of streams that it may still carry in its lifetime.
    streams_left: Cell<u32>,
    /// Time until which the connection is avoided, because a stream waited for too long on it.
    doubted_until: Cell<Option<Instant>>,
    /// Credential that this side presented.
    pub(crate) proof: CredentialId,
    /// Verified identity of the peer.
    pub(crate) peer: Identity,
    /// Account of the bytes that the streams buffer for their readers.
    pub(super) account: Rc<FlowAccount>,
    /// `None` once no new stream may start. Dropping the last sender closes the connection when its
    /// streams have ended.
    sender: RefCell<Option<SendRequest<Bytes>>>,
    streams: Cell<u32>,
    quiet_since: Cell<Instant>,
    /// Number of bytes that the peer has sent.
    received: Rc<Cell<u64>>,
    /// Notified to send a PING now.
    ping_requested: Notify,
    retired: Cell<Option<HboneCloseReason>>,
    retiring: Notify,
    /// Called when the peer sends GOAWAY, before a stream fails because of it.
    on_goaway: RefCell<Option<Box<dyn FnOnce()>>>,
}

/// Time after which a stream that is given up without a response marks its connection as doubtful.
/// It is below the 600 ms that a node gives an attempt at a gateway, so that each attempt that
/// fails for silence counts; a refusal or an answer comes sooner.
const DOUBT_AFTER: Duration = Duration::from_millis(400);
/// Maximum time for which a connection is doubtful. Its PINGs have been answered by then. A PING is
/// sent every 10 s, and its answer may take 20 s ([`crate::KEEPALIVE_INTERVAL`]).
const DOUBT_LASTS: Duration = Duration::from_secs(30);

thread_local! {
    /// Number of the next stream on this thread.
    static TURN: Cell<u64> = const { Cell::new(0) };
}

/// A stream that waits for its response. If it is given up without one, its drop may mark the
/// connection as doubtful.
pub(super) struct PendingStream {
    connection: Rc<PooledConnection>,
    since: Instant,
}

impl PendingStream {
    pub(super) fn begin(connection: &Rc<PooledConnection>) -> Self {
        Self {
            connection: connection.clone(),
            since: Instant::now(),
        }
    }

    pub(super) fn answered(mut self) {
        self.connection.doubted_until.set(None);
        self.since = Instant::now();
    }
}

impl Drop for PendingStream {
    fn drop(&mut self) {
        let now = Instant::now();
        if now.saturating_duration_since(self.since) >= DOUBT_AFTER {
            self.connection.doubted_until.set(Some(now + DOUBT_LASTS));
        }
    }
}

/// One stream's slot on a connection, returned when it is dropped.
pub(crate) struct StreamLease(Rc<PooledConnection>);

impl StreamLease {
    pub(crate) fn connection(&self) -> &Rc<PooledConnection> {
        &self.0
    }
}

impl Drop for StreamLease {
    fn drop(&mut self) {
        self.0.streams.set(self.0.streams.get() - 1);
        self.0.quiet_since.set(Instant::now());
    }
}

impl PooledConnection {
    /// Takes a slot for one more stream, if the limits of the pool and the peer permit it.
    pub(super) fn take(self: &Rc<Self>, streams_max: u32) -> Option<StreamLease> {
        if !self.has_room(streams_max) {
            return None;
        }
        self.streams.set(self.streams.get() + 1);
        self.streams_left
            .set(self.streams_left.get().saturating_sub(1));
        self.turn.set(TURN.replace(TURN.get() + 1));
        Some(StreamLease(self.clone()))
    }

    /// Returns whether one more stream may start.
    pub(super) fn has_room(&self, streams_max: u32) -> bool {
        let limit = self
            .sender
            .borrow()
            .as_ref()
            .map(|s| s.current_max_send_streams().min(streams_max as usize));
        limit.is_some_and(|limit| (self.streams.get() as usize) < limit)
    }

    /// Returns whether it accepts new streams, now or when others end.
    pub(super) fn is_open(&self) -> bool {
        self.sender.borrow().is_some()
    }

    pub(super) fn is_aged(&self, now: Instant) -> bool {
        now >= self.age_end || self.streams_left.get() == 0
    }

    fn is_doubted(&self, now: Instant) -> bool {
        self.doubted_until.get().is_some_and(|until| now < until)
    }

    /// Returns whether a new stream should use another connection: this one is doubtful, or its
    /// peer gives no credit and such connections are avoided.
    pub(super) fn is_avoided(&self, avoids_withheld: bool, now: Instant) -> bool {
        self.is_doubted(now) || (avoids_withheld && self.is_withheld())
    }

    /// Returns whether its peer gives new streams no credit to send.
    pub(super) fn is_withheld(&self) -> bool {
        self.account.credit().is_withheld()
    }

    pub(super) fn sender(&self) -> Option<SendRequest<Bytes>> {
        self.sender.borrow().clone()
    }

    pub(super) fn streams(&self) -> u32 {
        self.streams.get()
    }

    /// Stops new streams. The connection closes when its present streams have ended.
    pub(super) fn retire(&self, why: HboneCloseReason) {
        if self.sender.take().is_some() {
            self.retired.set(Some(why));
            self.retiring.notify_one();
        }
    }

    /// Calls `act` once, when the peer sends GOAWAY.
    pub(super) fn on_goaway(&self, act: impl FnOnce() + 'static) {
        *self.on_goaway.borrow_mut() = Some(Box::new(act));
    }

    /// Retires the connection if the peer sent GOAWAY. h2 reports that only to a sender.
    fn notice_goaway(&self) {
        let is_gone = {
            let mut sender = self.sender.borrow_mut();
            let mut none = Context::from_waker(Waker::noop());
            sender
                .as_mut()
                .is_some_and(|sender| matches!(sender.poll_ready(&mut none), Poll::Ready(Err(_))))
        };
        if is_gone {
            self.retire(HboneCloseReason::Closed);
            if let Some(act) = self.on_goaway.take() {
                act();
            }
        }
    }

    /// Resolves when the peer has sent nothing for half of `limit` or longer, although it had a
    /// PING to answer. A peer that answers PINGs is not dead, however long its response to a stream
    /// takes.
    pub(super) async fn unresponsive(&self, limit: Duration) {
        let pause = limit / 2;
        loop {
            tokio::time::sleep(pause).await;
            let before = self.received.get();
            self.ping_requested.notify_one();
            tokio::time::sleep(pause).await;
            // After a stall of this thread an answer may have arrived that the connection's task
            // has not read.
            tokio::task::yield_now().await;
            if self.received.get() == before {
                return;
            }
        }
    }

    /// Resolves when there was no stream for `limit`.
    async fn quiet(&self, limit: Duration) {
        loop {
            let until = if self.streams.get() > 0 {
                Instant::now() + limit
            } else {
                self.quiet_since.get() + limit
            };
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }
}

/// A connection on which TCP, TLS and HTTP/2 are established.
pub(super) struct NewConnection {
    send: SendRequest<Bytes>,
    h2: h2::client::Connection<Counted<MtlsStream<TcpStream>>, Bytes>,
    growth: WindowGrowth,
    account: Rc<FlowAccount>,
    received: Rc<Cell<u64>>,
    proof: CredentialId,
    peer: Identity,
    trust_watch: PeerTrustWatch,
    rotate_hint: Option<RotateHint>,
}

/// Connects to the target. With a bucket, it selects a source port that leads there, if possible.
async fn connect(
    config: &PoolConfig,
    target: &TunnelTarget,
    bucket: Option<(Steering, usize)>,
    counters: &HboneCounters,
) -> Result<TcpStream, SysError> {
    let (netns, address) = (target.netns.as_deref(), target.address);
    let bind = config.sources.source_for(address.ip());
    let any = ConnectOptions {
        bind,
        mark: target.mark,
        timeout: config.connect_timeout,
        ..ConnectOptions::default()
    };
    let Some((steering, bucket)) = bucket else {
        return sys::connect(netns, address, &any).await;
    };
    let source = SocketAddr::new(steering.source, 0);
    for port in steering
        .ports(bucket, address.port(), rand::random())
        .take(PORT_TRIES)
    {
        let options = ConnectOptions {
            bind: Some(source),
            source_port: Some(port),
            ..any
        };
        match sys::connect(netns, address, &options).await {
            Ok(tcp) => {
                // The kernel ignores a port outside its range.
                counters.unsteered.add(u64::from(
                    tcp.local_addr().is_ok_and(|own| own.port() != port),
                ));
                return Ok(tcp);
            }
            // The port is in use, or the kernel has no such option.
            Err(SysError::Socket { source, .. }) if !is_refused_by_peer(&source) => {}
            Err(e) => return Err(e),
        }
    }
    // Without steering the connection still works; it only leads to a random bucket.
    counters.unsteered.inc();
    sys::connect(netns, address, &any).await
}

/// Returns whether a connect failed because of the peer, and not because of its source port.
fn is_refused_by_peer(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{AddrInUse, AddrNotAvailable};
    !matches!(error.kind(), AddrInUse | AddrNotAvailable)
        && error.raw_os_error() != Some(libc::ENOPROTOOPT)
}

/// Establishes a connection: TCP, TLS and HTTP/2.
pub(super) async fn establish(
    config: &PoolConfig,
    target: &TunnelTarget,
    bucket: Option<(Steering, usize)>,
    account: Rc<FlowAccount>,
    counters: &HboneCounters,
) -> Result<NewConnection, HboneError> {
    let address = target.address;
    let tls_error = |e| HboneError::Tls {
        address,
        source: Arc::new(e),
    };
    let tcp = connect(config, target, bucket, counters)
        .await
        .map_err(|e| HboneError::Connect(Arc::new(e)))?;
    // The same certificate must be used for the handshake and recorded as the presented credential.
    let identity = target.source.pinned().map_err(tls_error)?;
    let (tls, peer) = identity
        .connect(tcp, &target.expected)
        .await
        .map_err(tls_error)?;
    let (trust_watch, rotate_hint) = (tls.peer_trust().clone(), tls.rotate_hint());
    let received = Rc::<Cell<u64>>::default();
    let growth = WindowGrowth::begin(STREAM_WINDOW_MAX, account.clone(), received.clone());
    let (send, h2) = h2::client::Builder::new()
        .initial_window_size(growth.stream_window())
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(CLIENT_HEADER_LIST)
        .max_concurrent_streams(config.streams_max)
        .max_send_buffer_size(CLIENT_SEND_BUFFER)
        .data_frame_budget(DATA_FRAME_BUDGET)
        // A tunnel peer answers CONNECTs and never pushes.
        .enable_push(false)
        .handshake(Counted {
            io: tls,
            read: received.clone(),
        })
        .await
        // No tunnel is requested yet, so the error names no authority.
        .map_err(|e| of_h2(address, "", &e))?;
    Ok(NewConnection {
        send,
        h2,
        growth,
        account,
        received,
        proof: identity.proof().clone(),
        peer,
        trust_watch,
        rotate_hint,
    })
}

impl NewConnection {
    /// Returns the pool's view of the connection, and the future that drives it.
    pub(super) fn start(
        self,
        serial: u64,
        place: u32,
        config: &PoolConfig,
    ) -> (
        Rc<PooledConnection>,
        impl Future<Output = HboneCloseReason> + use<>,
    ) {
        let Self {
            send,
            h2,
            growth,
            account,
            received,
            proof,
            peer,
            trust_watch,
            rotate_hint,
        } = self;
        let connection = Rc::new(PooledConnection {
            serial,
            index: place,
            turn: Cell::new(0),
            age_end: Instant::now() + config.spread.age_limit(rand::random()),
            streams_left: Cell::new(config.spread.lifetime_streams_max),
            doubted_until: Cell::new(None),
            proof,
            peer,
            account,
            sender: RefCell::new(Some(send)),
            streams: Cell::new(0),
            quiet_since: Cell::new(Instant::now()),
            received,
            ping_requested: Notify::new(),
            retired: Cell::new(None),
            retiring: Notify::new(),
            on_goaway: RefCell::default(),
        });
        // The first connection stays longest, so that a quiet peer keeps one.
        let idle = if place == 0 {
            config.idle
        } else {
            config.spread.idle
        };
        (
            connection.clone(),
            drive(
                connection,
                (h2, growth),
                trust_watch,
                rotate_hint,
                (config.ping, idle),
            ),
        )
    }
}

/// Waits until the keys of the connection are near their limit; for ever if they have none.
async fn worn_out(rotate_hint: Option<RotateHint>) {
    match rotate_hint {
        Some(rotate_hint) => rotate_hint.out().await,
        None => std::future::pending().await,
    }
}

/// Drives HTTP/2 until the connection ends, and returns the reason.
async fn drive(
    connection: Rc<PooledConnection>,
    (mut h2, mut growth): (
        h2::client::Connection<Counted<MtlsStream<TcpStream>>, Bytes>,
        WindowGrowth,
    ),
    mut trust_watch: PeerTrustWatch,
    rotate_hint: Option<RotateHint>,
    (ping, idle): ((Duration, Duration), Duration),
) -> HboneCloseReason {
    let h2_end = |r: Result<(), h2::Error>| {
        if r.is_ok() {
            HboneCloseReason::Closed
        } else {
            HboneCloseReason::Error
        }
    };
    let pings = h2.ping_pong();
    let (pinged, watched, expired) = (
        connection.clone(),
        connection.clone(),
        trust_watch.expired(),
    );
    // The events are collected, so that a poll that brings only frames polls none of them.
    let mut events: FuturesUnordered<LocalBoxFuture<'_, ConnectionEvent>> = [
        async move {
            keep_alive(pings, ping, &pinged.ping_requested).await;
            ConnectionEvent::PingTimeout
        }
        .boxed_local(),
        async move { ConnectionEvent::TrustLost(trust_watch.wait_for_loss().await) }.boxed_local(),
        async move {
            tokio::select! {
                () = watched.quiet(idle) => watched.retire(HboneCloseReason::Idle),
                () = worn_out(rotate_hint) => watched.retire(HboneCloseReason::Retired),
                // The next stream goes to a connection on which the peer presents its new
                // certificate.
                () = expired => watched.retire(HboneCloseReason::Expired),
                () = watched.retiring.notified() => {}
            }
            ConnectionEvent::Retired
        }
        .boxed_local(),
    ]
    .into_iter()
    .collect();
    let mut h2 = std::pin::pin!(std::future::poll_fn(|cx| {
        growth.apply_to_client(&mut h2);
        let end = h2.poll_unpin(cx);
        if end.is_pending() {
            connection.notice_goaway(); // A peer that sent GOAWAY may let its streams finish.
        }
        end
    }));
    tokio::select! {
        // First the events, so that no frame of a peer that lost trust is processed.
        biased;
        Some(event) = events.next() => match event {
            // Dropping h2 fails every stream at once.
            ConnectionEvent::PingTimeout => return HboneCloseReason::Ping,
            ConnectionEvent::TrustLost(why) => return why.into(),
            ConnectionEvent::Retired => {}
        },
        // If the pool retired the connection, its reason explains the end better than HTTP/2's.
        r = &mut h2 => return connection.retired.get().unwrap_or(h2_end(r)),
    }
    // A retired connection lets its streams finish without a limit, but still detects a dead peer.
    let why = connection
        .retired
        .get()
        .unwrap_or(HboneCloseReason::Retired);
    let emptied = async {
        // A slow poll suffices: it matters only for a peer that does not close in order.
        while connection.streams.get() > 0 {
            tokio::time::sleep(CLOSE_TIMEOUT).await;
        }
        // The peer may still send its own GOAWAY and close in order.
        tokio::time::sleep(CLOSE_TIMEOUT).await;
    };
    tokio::select! {
        _ = &mut h2 => why,
        Some(event) = events.next() => match event {
            ConnectionEvent::TrustLost(trust_loss) => trust_loss.into(),
            // The event of retirement has happened already, so only a dead peer is left.
            ConnectionEvent::PingTimeout | ConnectionEvent::Retired => HboneCloseReason::Ping,
        },
        () = emptied => why,
    }
}

enum ConnectionEvent {
    /// A PING was not answered.
    PingTimeout,
    /// The peer lost trust, for this reason.
    TrustLost(TrustLoss),
    /// No new streams may start.
    Retired,
}

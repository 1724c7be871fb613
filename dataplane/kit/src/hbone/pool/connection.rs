//! One pooled connection: how it comes up, how many streams it carries, what keeps it alive and what ends it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use canal_model::identity::Identity;
use canal_wire::hbone::{CLIENT_HEADER_LIST, CLIENT_SEND_BUFFER, FRAME_SIZE};
use futures::future::LocalBoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use h2::client::SendRequest;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{PoolConfig, Target};
use crate::hbone::counts::Ended;
use crate::hbone::error::of_h2;
use crate::hbone::opening::Counted;
use crate::hbone::{DATA_FRAME_BUDGET, HboneError, WindowBudget, WindowGrowth, WindowSizes, keep_alive};
use crate::sys::{self, ConnectOptions};
use crate::tls::{Fallen, Proof, Standing, Stream, Worn};

/// How long a connection may take to say goodbye.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection of the pool.
pub(in crate::hbone) struct Connection {
    /// Its place in the order of the pool's connections.
    pub(in crate::hbone) serial: u64,
    /// What it proved itself with.
    pub(in crate::hbone) proof: Proof,
    /// Who the peer proved to be.
    pub(in crate::hbone) peer: Identity,
    /// Gone once no new stream may start; dropping the last sender closes the connection when its streams are done.
    sender: RefCell<Option<SendRequest<Bytes>>>,
    streams: Cell<u32>,
    quiet_since: Cell<Instant>,
    retired: Cell<Option<Ended>>,
    retiring: Notify,
}

/// One stream's place on a connection, given back when dropped.
pub(in crate::hbone) struct Taken(Rc<Connection>);

impl Taken {
    pub(in crate::hbone) fn connection(&self) -> &Rc<Connection> {
        &self.0
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.streams.set(self.0.streams.get() - 1);
        self.0.quiet_since.set(Instant::now());
    }
}

impl Connection {
    /// A place for one more stream, if the pool's limit and the peer's allow it.
    pub(super) fn take(self: &Rc<Self>, streams_max: u32) -> Option<Taken> {
        let limit = match &*self.sender.borrow() {
            Some(s) => s.current_max_send_streams().min(streams_max as usize),
            None => return None,
        };
        if self.streams.get() as usize >= limit {
            return None;
        }
        self.streams.set(self.streams.get() + 1);
        Some(Taken(self.clone()))
    }

    pub(super) fn sender(&self) -> Option<SendRequest<Bytes>> {
        self.sender.borrow().clone()
    }

    pub(super) fn streams(&self) -> u32 {
        self.streams.get()
    }

    /// No new streams; it closes when those it has are done.
    pub(super) fn retire(&self, why: Ended) {
        if self.sender.take().is_some() {
            self.retired.set(Some(why));
            self.retiring.notify_one();
        }
    }

    /// Resolves when there was no stream for `limit`.
    async fn quiet(&self, limit: Duration) {
        loop {
            let until = if self.streams.get() > 0 { Instant::now() + limit } else { self.quiet_since.get() + limit };
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }
}

/// TCP, TLS and HTTP/2 are up.
pub(super) struct Established {
    send: SendRequest<Bytes>,
    h2: h2::client::Connection<Counted<Stream<TcpStream>>, Bytes>,
    growth: WindowGrowth,
    proof: Proof,
    peer: Identity,
    standing: Standing,
    worn: Option<Worn>,
}

/// Brings a connection up.
pub(super) async fn establish(config: &PoolConfig, target: &Target, budget: Option<&WindowBudget>) -> Result<Established, HboneError> {
    let address = target.address;
    let tls_error = |e| HboneError::Tls { address, source: Arc::new(e) };
    let bind = config.sources.towards(address.ip());
    let options = ConnectOptions { bind, mark: target.mark, timeout: config.connect_timeout, ..ConnectOptions::default() };
    let tcp = sys::connect(target.netns.as_deref(), address, &options).await.map_err(|e| HboneError::Connect(Arc::new(e)))?;
    // One certificate for the handshake and for the record of what was proved.
    let identity = target.source.pinned().map_err(tls_error)?;
    let (tls, peer) = identity.connect(tcp, &target.expected).await.map_err(tls_error)?;
    let (standing, worn) = (tls.standing().clone(), tls.worn());
    let read = Rc::<Cell<u64>>::default();
    let growth = WindowGrowth::begin(WindowSizes::HBONE_MAX, budget, read.clone());
    let (send, h2) = h2::client::Builder::new()
        .initial_window_size(growth.sizes().stream)
        .initial_connection_window_size(growth.sizes().connection)
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(CLIENT_HEADER_LIST)
        .max_concurrent_streams(config.streams_max)
        .max_send_buffer_size(CLIENT_SEND_BUFFER)
        .data_frame_budget(DATA_FRAME_BUDGET)
        .enable_push(false)
        .handshake(Counted { io: tls, read })
        .await
        .map_err(|e| of_h2(address, "", &e))?;
    Ok(Established { send, h2, growth, proof: identity.proof().clone(), peer, standing, worn })
}

impl Established {
    /// The pool's view of it, and the future that runs it.
    pub(super) fn start(self, serial: u64, config: &PoolConfig) -> (Rc<Connection>, impl Future<Output = Ended> + use<>) {
        let Self { send, h2, growth, proof, peer, standing, worn } = self;
        let connection = Rc::new(Connection {
            serial,
            proof,
            peer,
            sender: RefCell::new(Some(send)),
            streams: Cell::new(0),
            quiet_since: Cell::new(Instant::now()),
            retired: Cell::new(None),
            retiring: Notify::new(),
        });
        (connection.clone(), drive(connection, (h2, growth), standing, worn, (config.ping, config.idle)))
    }
}

/// Waits until the connection's time is over; for ever if it has none.
async fn worn_out(worn: Option<Worn>) {
    match worn {
        Some(worn) => worn.out().await,
        None => std::future::pending().await,
    }
}

/// Runs HTTP/2 until the connection ends, and says why it did.
async fn drive(
    connection: Rc<Connection>,
    (mut h2, mut growth): (h2::client::Connection<Counted<Stream<TcpStream>>, Bytes>, WindowGrowth),
    mut standing: Standing,
    worn: Option<Worn>,
    (ping, idle): ((Duration, Duration), Duration),
) -> Ended {
    let h2_end = |r: Result<(), h2::Error>| if r.is_ok() { Ended::Closed } else { Ended::Error };
    let dead = keep_alive(h2.ping_pong(), ping);
    let (watched, expired) = (connection.clone(), standing.expired());
    // Gathered, so that none of it is looked at on a turn that only brings frames.
    let mut events: FuturesUnordered<LocalBoxFuture<'_, Event>> = [
        async move {
            dead.await;
            Event::Mute
        }
        .boxed_local(),
        async move { Event::Fallen(standing.fallen().await) }.boxed_local(),
        async move {
            tokio::select! {
                () = watched.quiet(idle) => watched.retire(Ended::Idle),
                () = worn_out(worn) => watched.retire(Ended::Retired),
                // The next stream goes to a connection on which the peer shows its new certificate.
                () = expired => watched.retire(Ended::Expired),
                () = watched.retiring.notified() => {}
            }
            Event::Retired
        }
        .boxed_local(),
    ]
    .into_iter()
    .collect();
    let mut h2 = std::pin::pin!(std::future::poll_fn(|cx| {
        growth.apply_to_client(&mut h2);
        h2.poll_unpin(cx)
    }));
    tokio::select! {
        biased;
        Some(event) = events.next() => match event {
            // Dropping h2 fails every stream at once.
            Event::Mute => return Ended::Ping,
            Event::Fallen(why) => return why.into(),
            Event::Retired => {}
        },
        r = &mut h2 => return connection.retired.get().unwrap_or(h2_end(r)),
    }
    // Retired: its streams go on for as long as they like, but a dead peer is still noticed.
    let why = connection.retired.get().unwrap_or(Ended::Retired);
    let emptied = async {
        // Looked at now and then: this matters only for a peer that does not say goodbye.
        while connection.streams.get() > 0 {
            tokio::time::sleep(CLOSE_TIMEOUT).await;
        }
        tokio::time::sleep(CLOSE_TIMEOUT).await;
    };
    tokio::select! {
        _ = &mut h2 => why,
        Some(event) = events.next() => match event {
            Event::Fallen(fallen) => fallen.into(),
            Event::Mute | Event::Retired => Ended::Ping,
        },
        () = emptied => why,
    }
}

enum Event {
    /// A PING was not answered.
    Mute,
    /// The peer is believed no more.
    Fallen(Fallen),
    /// No new streams may start.
    Retired,
}

//! HTTP/2 connections to an endpoint as one worker knows them. Many requests share a connection,
//! each with a [`StreamPermit`].
//!
//! Connections are neither opened nor driven here: `upstream` does that. Start with
//! [`StreamPermit::take`].

use std::cell::{Cell, OnceCell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_limits::http2_settings;
use canal_hbone::{FlowAccount, WITHHELD_CONNECTIONS_MAX};
use h2::client::SendRequest;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{PoolClient, SelectedEndpoint};

/// Number of connections to one endpoint from which on idle connections of single clients are
/// closed. As many as an endpoint may have idle HTTP/1.1 connections
/// (`GatewayLimits::idle_per_endpoint`).
const SINGLE_CLIENT_CONNECTIONS_MAX: usize = 256;

/// One HTTP/2 connection to an endpoint.
#[derive(Debug)]
pub(crate) struct Http2Upstream {
    state: RefCell<Http2UpstreamState>,
    /// Number of requests on the connection.
    streams: Cell<usize>,
    used: Cell<Instant>,
    /// Account of the bytes that the streams buffer for their readers. It is set once the
    /// connection is open.
    account: OnceCell<Rc<FlowAccount>>,
    /// The endpoint's address to which the connection leads.
    address: SocketAddr,
    /// The client that alone uses the connection; `None` if any client may.
    client: Option<Rc<PoolClient>>,
}

#[derive(Debug)]
enum Http2UpstreamState {
    /// The connection is being opened; requests that need it wait for the notification.
    Opening(Rc<Notify>),
    /// The connection accepts requests.
    Open(SendRequest<Bytes>),
    /// The connection accepts no more requests, after GOAWAY, an error, or idleness.
    Closed(Option<ProxyError>),
}

/// Counts a request on a connection until dropped.
#[derive(Debug)]
pub(crate) struct StreamPermit {
    on: Rc<Http2Upstream>,
    /// True if the connection existed before.
    pub(crate) reused: bool,
}

impl StreamPermit {
    /// Counts a request on one of the client's connections to the selected address, or on one of
    /// those that any client may use. Prefers the least loaded connection with free streams, then a
    /// new one that the caller opens, then the least loaded of `connections_max`.
    pub(crate) fn take(chosen: &SelectedEndpoint, connections_max: usize, now: Instant) -> Self {
        let (on, fresh) = choose(chosen, connections_max, now);
        on.streams.set(on.streams.get() + 1);
        on.used.set(now);
        Self { on, reused: !fresh }
    }

    pub(crate) fn connection(&self) -> &Rc<Http2Upstream> {
        &self.on
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.on.streams.set(self.on.streams.get() - 1);
    }
}

impl Http2Upstream {
    fn opening(chosen: &SelectedEndpoint, now: Instant) -> Self {
        let state = RefCell::new(Http2UpstreamState::Opening(Rc::default()));
        let (streams, used, account) = (Cell::new(0), Cell::new(now), OnceCell::new());
        Self {
            state,
            streams,
            used,
            account,
            address: chosen.address,
            client: chosen.client.clone(),
        }
    }

    /// Returns whether to keep the connection. One that has had no requests for `idle` is closed.
    pub(super) fn keep(&self, now: Instant, idle: Duration) -> bool {
        if self.streams.get() == 0 && self.used.get() + idle <= now && self.is_usable() {
            // The driver task ends when the last `SendRequest` is dropped.
            *self.state.borrow_mut() = Http2UpstreamState::Closed(None);
        }
        self.is_usable()
    }

    fn is_usable(&self) -> bool {
        !matches!(*self.state.borrow(), Http2UpstreamState::Closed(_))
    }

    /// True if another stream can start at once. More streams than the peer allows would only wait.
    fn has_room(&self) -> bool {
        match &*self.state.borrow() {
            Http2UpstreamState::Open(send) => {
                self.streams.get()
                    < send
                        .current_max_send_streams()
                        .min(http2_settings::UPSTREAM_STREAMS_MAX)
            }
            Http2UpstreamState::Opening(_) => {
                self.streams.get() < http2_settings::UPSTREAM_STREAMS_MAX
            }
            Http2UpstreamState::Closed(_) => false,
        }
    }

    /// True if the endpoint gives new streams on it no credit to send.
    pub(crate) fn is_withheld(&self) -> bool {
        self.account
            .get()
            .is_some_and(|account| account.credit().is_withheld())
    }

    /// Makes the connection accept requests from now on.
    pub(crate) fn set_open(&self, send: SendRequest<Bytes>, account: Rc<FlowAccount>) {
        let _ = self.account.set(account);
        self.turn(Http2UpstreamState::Open(send));
    }

    /// Returns what the streams of the connection hold for their readers.
    pub(crate) fn account(&self) -> &Rc<FlowAccount> {
        self.account.get_or_init(|| FlowAccount::new(None))
    }

    /// Makes the connection accept no more requests. Requests that wait for it fail with `fault`.
    pub(crate) fn close(&self, fault: Option<ProxyError>) {
        self.turn(Http2UpstreamState::Closed(fault));
    }

    /// Sets the state and notifies the requests that wait for it.
    fn turn(&self, state: Http2UpstreamState) {
        if let Http2UpstreamState::Opening(waiting) = self.state.replace(state) {
            waiting.notify_waiters();
        }
    }

    /// Returns the connection's handle, once the connection is open.
    pub(crate) async fn handle(&self) -> Result<SendRequest<Bytes>, ProxyError> {
        loop {
            let waiting = match &*self.state.borrow() {
                Http2UpstreamState::Open(send) => return Ok(send.clone()),
                Http2UpstreamState::Closed(fault) => {
                    return Err(fault.clone().unwrap_or(ProxyError::UpstreamRefused));
                }
                Http2UpstreamState::Opening(waiting) => waiting.clone(),
            };
            let mut notified = std::pin::pin!(waiting.notified());
            // Registered before the state is read again, so that a notification in between is not
            // lost.
            notified.as_mut().enable();
            if matches!(*self.state.borrow(), Http2UpstreamState::Opening(_)) {
                notified.await;
            }
        }
    }
}

/// Returns the least loaded connection with free streams, else a new one, else the least loaded
/// one; true if it is new. A connection on which the endpoint gives no credit is passed by, until
/// there are too many of them. Idle connections of single clients are closed before there are too
/// many. The number of busy ones is bounded by the requests that a tenant may have in flight.
fn choose(
    chosen: &SelectedEndpoint,
    connections_max: usize,
    now: Instant,
) -> (Rc<Http2Upstream>, bool) {
    let mut all = chosen.state().http2.borrow_mut();
    all.retain(|m| m.is_usable());
    let own = |m: &&Rc<Http2Upstream>| m.address == chosen.address && m.client == chosen.client;
    // Nothing is lost with a connection that has no stream and no credit.
    all.iter()
        .filter(own)
        .filter(|m| m.is_withheld() && m.streams.get() == 0)
        .for_each(|m| m.close(None));
    all.retain(|m| m.is_usable());
    let available = all
        .iter()
        .filter(own)
        .filter(|m| m.has_room() && !m.is_withheld());
    if let Some(m) = available.min_by_key(|m| m.streams.get()) {
        return (m.clone(), false);
    }
    let withheld = all.iter().filter(own).filter(|m| m.is_withheld()).count();
    if (all.iter().filter(own).count() >= connections_max || withheld >= WITHHELD_CONNECTIONS_MAX)
        && let Some(m) = all
            .iter()
            .filter(own)
            .min_by_key(|m| (m.is_withheld(), m.streams.get()))
    {
        return (m.clone(), false);
    }
    if chosen.client.is_some() && all.len() >= SINGLE_CLIENT_CONNECTIONS_MAX {
        all.iter()
            .filter(|m| m.client.is_some() && m.streams.get() == 0)
            .for_each(|m| m.close(None));
        all.retain(|m| m.is_usable());
    }
    let m = Rc::new(Http2Upstream::opening(chosen, now));
    all.push(m.clone());
    (m, true)
}

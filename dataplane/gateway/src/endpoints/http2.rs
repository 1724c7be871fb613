//! HTTP/2 connections to an endpoint as a worker knows them: many requests share one, each with a [`Place`] on it. None is opened or driven
//! here.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::EndpointState;
use crate::fault::Fault;
use crate::limits;

/// One connection.
#[derive(Debug)]
pub(crate) struct Multiplexed {
    state: RefCell<State>,
    /// Requests on it.
    streams: Cell<usize>,
    used: Cell<Instant>,
}

#[derive(Debug)]
enum State {
    /// Being opened: those who want it wait.
    Opening(Rc<Notify>),
    Open(SendRequest<Bytes>),
    /// GOAWAY, an error or idleness: takes no more requests.
    Closed(Option<Fault>),
}

/// A request's place on a connection; keeps count until dropped.
#[derive(Debug)]
pub(crate) struct Place {
    on: Rc<Multiplexed>,
    /// The connection was there before.
    pub(crate) reused: bool,
}

impl Place {
    /// On the least loaded connection with room, else on a new one that the caller opens, else on the least loaded one of `connections_max`.
    pub(crate) fn take(state: &EndpointState, connections_max: usize, now: Instant) -> Self {
        let (on, fresh) = choose(state, connections_max, now);
        on.streams.set(on.streams.get() + 1);
        on.used.set(now);
        Self { on, reused: !fresh }
    }

    pub(crate) fn connection(&self) -> &Rc<Multiplexed> {
        &self.on
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.on.streams.set(self.on.streams.get() - 1);
    }
}

impl Multiplexed {
    fn opening(now: Instant) -> Self {
        Self { state: RefCell::new(State::Opening(Rc::default())), streams: Cell::new(0), used: Cell::new(now) }
    }

    /// Whether to keep it; one without requests for too long is closed.
    pub(super) fn keep(&self, now: Instant, idle: Duration) -> bool {
        if self.streams.get() == 0 && self.used.get() + idle <= now && self.is_usable() {
            // The driver ends once the last `SendRequest` is gone.
            *self.state.borrow_mut() = State::Closed(None);
        }
        self.is_usable()
    }

    fn is_usable(&self) -> bool {
        !matches!(*self.state.borrow(), State::Closed(_))
    }

    /// More streams than the peer allows would only wait.
    fn has_room(&self) -> bool {
        match &*self.state.borrow() {
            State::Open(send) => self.streams.get() < send.current_max_send_streams().min(limits::UPSTREAM_STREAMS_MAX),
            State::Opening(_) => self.streams.get() < limits::UPSTREAM_STREAMS_MAX,
            State::Closed(_) => false,
        }
    }

    /// It takes requests from now on.
    pub(crate) fn opened(&self, send: SendRequest<Bytes>) {
        self.turn(State::Open(send));
    }

    /// It takes no more requests; those that wait for it fail with `fault`.
    pub(crate) fn close(&self, fault: Option<Fault>) {
        self.turn(State::Closed(fault));
    }

    /// Those who waited for it are told.
    fn turn(&self, state: State) {
        if let State::Opening(waiting) = self.state.replace(state) {
            waiting.notify_waiters();
        }
    }

    /// The handle of the connection, once it is open.
    pub(crate) async fn handle(&self) -> Result<SendRequest<Bytes>, Fault> {
        loop {
            let waiting = match &*self.state.borrow() {
                State::Open(send) => return Ok(send.clone()),
                State::Closed(fault) => return Err(fault.clone().unwrap_or(Fault::UpstreamRefused)),
                State::Opening(waiting) => waiting.clone(),
            };
            let mut notified = std::pin::pin!(waiting.notified());
            notified.as_mut().enable();
            if matches!(*self.state.borrow(), State::Opening(_)) {
                notified.await;
            }
        }
    }
}

/// The least loaded connection with room, else a new one, else the least loaded one.
fn choose(state: &EndpointState, connections_max: usize, now: Instant) -> (Rc<Multiplexed>, bool) {
    let mut all = state.http2.borrow_mut();
    all.retain(|m| m.is_usable());
    if let Some(m) = all.iter().filter(|m| m.has_room()).min_by_key(|m| m.streams.get()) {
        return (m.clone(), false);
    }
    if all.len() >= connections_max
        && let Some(m) = all.iter().min_by_key(|m| m.streams.get())
    {
        return (m.clone(), false);
    }
    let m = Rc::new(Multiplexed::opening(now));
    all.push(m.clone());
    (m, true)
}

//! HTTP/2 connections to endpoints: many requests share one. A task drives each; requests take a place on the least loaded one.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{Chosen, EndpointState, Introduction, connect};
use crate::fault::Fault;
use crate::io::Rewound;
use crate::limits;
use crate::worker::Worker;

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
    pub(crate) reused: bool,
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

    fn close(&self, fault: Option<Fault>) {
        let before = std::mem::replace(&mut *self.state.borrow_mut(), State::Closed(fault));
        if let State::Opening(waiting) = before {
            waiting.notify_waiters();
        }
    }
}

/// A place on a connection to the endpoint, opened if all are full.
pub(crate) async fn place(
    worker: &Rc<Worker>,
    chosen: &Chosen,
    introduction: Introduction<'_>,
) -> Result<(Place, SendRequest<Bytes>), Fault> {
    let now = worker.clock.now();
    let (on, fresh) = choose(chosen.state(), worker.shared.config.limits.http2_per_endpoint, now);
    on.streams.set(on.streams.get() + 1);
    on.used.set(now);
    let place = Place { on, reused: !fresh };
    if fresh {
        open(worker, chosen, &place.on, introduction).await?;
    } else {
        worker.counts.reused.inc();
    }
    let send = wait(&place.on).await?;
    // Waits for a stream if the peer allows no more now.
    match send.ready().await {
        Ok(send) => Ok((place, send)),
        Err(_) => {
            place.on.close(None);
            Err(Fault::UpstreamRefused)
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

/// Connects and starts the driver. Runs in the request that came first; should that be dropped, those who wait fail with it and try again.
async fn open(worker: &Rc<Worker>, chosen: &Chosen, on: &Rc<Multiplexed>, introduction: Introduction<'_>) -> Result<(), Fault> {
    struct Abandoned<'a>(&'a Multiplexed, bool);
    impl Drop for Abandoned<'_> {
        fn drop(&mut self) {
            if self.1 {
                self.0.close(Some(Fault::UpstreamRefused));
            }
        }
    }
    let mut guard = Abandoned(on, true);
    let outcome = async {
        let io = connect(worker, chosen, introduction).await?;
        let rewound = Rewound { first: Bytes::new(), io };
        let failed = |e: h2::Error| Fault::Connect { why: format!("{}: HTTP/2: {e}", chosen.endpoint().address) };
        limits::http2_client().handshake::<_, Bytes>(rewound).await.map_err(failed)
    };
    let outcome = outcome.await;
    guard.1 = false;
    match outcome {
        Err(fault) => {
            on.close(Some(fault.clone()));
            Err(fault)
        }
        Ok((send, connection)) => {
            let before = std::mem::replace(&mut *on.state.borrow_mut(), State::Open(send));
            if let State::Opening(waiting) = before {
                waiting.notify_waiters();
            }
            // Weak: the connection lives as long as its endpoint and its requests, not the other way round.
            let (on, counts) = (Rc::downgrade(on), worker.counts.clone());
            tokio::task::spawn_local(async move {
                if let Err(e) = connection.await {
                    counts.http2_error("upstream", &e);
                }
                if let Some(on) = on.upgrade() {
                    on.close(None);
                }
            });
            Ok(())
        }
    }
}

/// The handle of a connection that is open or being opened.
async fn wait(on: &Multiplexed) -> Result<SendRequest<Bytes>, Fault> {
    loop {
        let waiting = match &*on.state.borrow() {
            State::Open(send) => return Ok(send.clone()),
            State::Closed(fault) => return Err(fault.clone().unwrap_or(Fault::UpstreamRefused)),
            State::Opening(waiting) => waiting.clone(),
        };
        let mut notified = std::pin::pin!(waiting.notified());
        notified.as_mut().enable();
        if matches!(*on.state.borrow(), State::Opening(_)) {
            notified.await;
        }
    }
}

//! HTTP/2 from a client: the connection's own life (handshake, GOAWAY, idleness, protocol errors); each request runs in a task of its own.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use bytes::Bytes;
use canal_kit::hbone::WindowGrowth;
use h2::server::{Connection, SendResponse};
use http::Request;

use crate::clock::{Late, Timer};
use crate::forward::http2 as forward;
use crate::io::{Io, Rewound};
use crate::limits;
use crate::scheduler::Scheduler;
use crate::session::Session;
use crate::worker::Worker;

#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack for one step of a request; a box would cost an allocation per request"
)]
enum Event {
    Request(Request<h2::RecvStream>, SendResponse<Bytes>),
    Failed(h2::Error),
    Ended,
    Drain,
    Late(Late),
}

/// Serves a connection until it ends.
pub(crate) async fn serve(worker: &Rc<Worker>, session: &Rc<Session>, io: Io, first: Bytes, timer: Timer) {
    let config = &worker.shared.config;
    timer.arm(Late::Head, config.times.head);
    let transport = Rewound::new(first, io);
    let budget = worker.window_budget(&session.account.tenant);
    let mut growth = WindowGrowth::begin(limits::WINDOWS_MAX, Some(&budget), transport.read.clone());
    let handshake = limits::http2_server(&config.limits, growth.sizes()).handshake::<_, Bytes>(transport);
    let mut connection = match timer.within(handshake).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(e)) => return worker.counts.http2_error("client", &e),
        Err(late) => return worker.counts.late(late),
    };
    let streams = Rc::new(Cell::new(0usize));
    let drain = worker.parting.drain();
    let mut draining = pin!(drain.draining());
    let mut leaving = false;
    loop {
        let event = std::future::poll_fn(|cx| {
            if !leaving && draining.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Event::Drain);
            }
            growth.apply_to_server(&mut connection);
            let polled = poll(&mut connection, cx);
            if polled.is_ready() {
                return polled;
            }
            watch(worker, &timer, streams.get(), leaving);
            timer.poll(cx).map(Event::Late)
        });
        match event.await {
            Event::Request(request, respond) => {
                timer.disarm();
                if let Some(served) = forward::serve(worker, session, request, respond) {
                    let guard = Stream::begin(&streams);
                    let account = session.account.clone();
                    tokio::task::spawn_local(async move {
                        Scheduler::run(&account.queue, pin!(served)).await;
                        drop(guard);
                    });
                }
            }
            Event::Failed(e) => return worker.counts.http2_error("client", &e),
            Event::Ended => return,
            Event::Late(late) if leaving => return worker.counts.late(late),
            Event::Late(late) => {
                worker.counts.late(late);
                leaving = true;
                timer.disarm();
                connection.graceful_shutdown();
            }
            // Streams that are open may finish; the client opens no more (RFC 9113 §6.8).
            Event::Drain => {
                leaving = true;
                connection.graceful_shutdown();
            }
        }
    }
}

fn poll(connection: &mut Connection<Rewound, Bytes>, cx: &mut std::task::Context<'_>) -> Poll<Event> {
    connection.poll_accept(cx).map(|accepted| match accepted {
        Some(Ok((request, respond))) => Event::Request(request, respond),
        Some(Err(e)) => Event::Failed(e),
        None => Event::Ended,
    })
}

/// Idleness counts while no stream is open; a connection that was told to go has the time that a slow client needs for what is on its way.
fn watch(worker: &Worker, timer: &Timer, streams: usize, leaving: bool) {
    let times = &worker.shared.config.times;
    match (streams, leaving) {
        (1.., _) => timer.disarm(),
        (0, _) if timer.is_armed() => {}
        (0, false) => timer.arm(Late::Idle, times.idle),
        (0, true) => timer.arm(Late::Linger, times.client),
    }
}

/// Counts a stream until dropped.
struct Stream(Rc<Cell<usize>>);

impl Stream {
    fn begin(streams: &Rc<Cell<usize>>) -> Self {
        streams.set(streams.get() + 1);
        Self(streams.clone())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

//! Serves an HTTP/2 client connection: handshake, GOAWAY, idle timeout, protocol errors. Each
//! request runs in a task of its own. It neither routes nor authorizes requests.
//!
//! Start with [`serve`].

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use bytes::Bytes;
use canal_gateway_io::clock::{TimeoutKind, Timer};
use canal_gateway_io::io::{Io, PrefixedIo};
use canal_gateway_io::scheduler::Scheduler;
use canal_gateway_limits::http2_settings;
use canal_hbone::WindowGrowth;
use h2::server::{Connection, SendResponse};
use http::Request;

use crate::forward::http2 as forward;
use crate::session::ClientSession;
use crate::worker::Worker;

#[expect(
    clippy::large_enum_variant,
    reason = "the value is on the stack for one step of a request; a box would cost an allocation per request"
)]
enum StreamEvent {
    Request(Request<h2::RecvStream>, SendResponse<Bytes>),
    Failed(h2::Error),
    Ended,
    Drain,
    Late(TimeoutKind),
}

/// Serves a connection until it ends.
pub(crate) async fn serve(
    worker: &Rc<Worker>,
    session: &Rc<ClientSession>,
    io: Io,
    first: Bytes,
    timer: Timer,
) {
    let config = &worker.shared.config;
    timer.arm(TimeoutKind::Head, config.times.head);
    let transport = PrefixedIo::new(first, io);
    let account = worker
        .hbone
        .account(Some(worker.buffer_budget(&session.account.tenant)));
    let mut growth = WindowGrowth::begin(
        http2_settings::STREAM_WINDOW_MAX,
        account.clone(),
        transport.read.clone(),
    );
    let handshake = http2_settings::http2_server(&config.limits, growth.stream_window())
        .handshake::<_, Bytes>(transport);
    let mut connection = match timer.within(handshake).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(e)) => return worker.counts.http2_error("client", &e),
        Err(late) => return worker.counts.late(late),
    };
    let streams = Rc::new(Cell::new(0usize));
    let drain = worker.soft_drain.drain();
    let mut draining = pin!(async {
        tokio::select! {
            () = drain.draining() => {}
            () = session.drain().draining() => {}
        }
    });
    let mut leaving = false;
    loop {
        let event = std::future::poll_fn(|cx| {
            if !leaving && draining.as_mut().poll(cx).is_ready() {
                return Poll::Ready(StreamEvent::Drain);
            }
            growth.apply_to_server(&mut connection);
            let polled = poll(&mut connection, cx);
            if polled.is_ready() {
                return polled;
            }
            watch(worker, &timer, streams.get(), leaving);
            timer.poll(cx).map(StreamEvent::Late)
        });
        match event.await {
            StreamEvent::Request(request, respond) => {
                timer.disarm();
                if let Some(mut served) =
                    forward::serve(worker, session, &account, request, respond)
                {
                    let guard = StreamCounter::begin(&streams);
                    let account = session.account.clone();
                    tokio::task::spawn_local(async move {
                        Scheduler::run(&account.queue, served.as_mut()).await;
                        // The stream counts until its request is over.
                        drop(guard);
                    });
                }
            }
            StreamEvent::Failed(e) => return worker.counts.http2_error("client", &e),
            StreamEvent::Ended => return,
            StreamEvent::Late(late) if leaving => return worker.counts.late(late),
            // The first timeout begins a graceful shutdown; the second one ends the connection.
            StreamEvent::Late(late) => {
                worker.counts.late(late);
                leaving = true;
                // `watch` arms it again, for the time in which the client must close.
                timer.disarm();
                connection.graceful_shutdown();
            }
            // Open streams may finish; the client opens no more (RFC 9113 §6.8). An idle client
            // keeps the deadline that already runs; `watch` gives others one after their last
            // stream.
            StreamEvent::Drain => {
                leaving = true;
                connection.graceful_shutdown();
            }
        }
    }
}

fn poll(
    connection: &mut Connection<PrefixedIo, Bytes>,
    cx: &mut std::task::Context<'_>,
) -> Poll<StreamEvent> {
    connection.poll_accept(cx).map(|accepted| match accepted {
        Some(Ok((request, respond))) => StreamEvent::Request(request, respond),
        Some(Err(e)) => StreamEvent::Failed(e),
        None => StreamEvent::Ended,
    })
}

/// Arms the timeout of a connection without open streams. After GOAWAY the client has the longer
/// time that a slow client needs for data in flight.
fn watch(worker: &Worker, timer: &Timer, streams: usize, leaving: bool) {
    let times = &worker.shared.config.times;
    match (streams, leaving) {
        (1.., _) => timer.disarm(),
        (0, _) if timer.is_armed() => {}
        (0, false) => timer.arm(TimeoutKind::Idle, times.idle),
        (0, true) => timer.arm(TimeoutKind::Linger, times.client),
    }
}

/// Counts an open stream until dropped.
struct StreamCounter(Rc<Cell<usize>>);

impl StreamCounter {
    fn begin(streams: &Rc<Cell<usize>>) -> Self {
        streams.set(streams.get() + 1);
        Self(streams.clone())
    }
}

impl Drop for StreamCounter {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

//! Relaying bytes: TCP ports, ports whose protocol turned out opaque, and upgraded HTTP/1.1 connections. Half-closes and resets are carried by
//! the kit's copy; this opens, counts and logs.

use std::rc::Rc;

use bytes::Bytes;
use canal_kit::copy::{self, End, Meter, Prefixed, Side};

use crate::buffer::Inbox;
use crate::fault::Fault;
use crate::finish::{Flag, Relayed};
use crate::greet::{Session, introduction};
use crate::io::Io;
use crate::permit::{self, Admission};
use crate::pick::{self, Tried};
use crate::upstream::{self, Chosen, Introduction, SetView};
use crate::worker::Worker;

/// Endpoints tried for one connection; no byte was sent before any of them.
const TRIES: usize = 3;

/// What the counters name: the set, and the endpoint in it.
pub(crate) type Target = Option<(Rc<SetView>, Option<usize>)>;

/// A connection to an endpoint that is up.
pub(crate) struct Opened {
    io: Io,
    chosen: Chosen,
    _admission: Admission,
}

/// Connects to one of the destination's endpoints.
pub(crate) async fn open(worker: &Rc<Worker>, session: &Session) -> Result<Opened, (Fault, Target)> {
    let (snapshot, resolved) = session.resolve(worker).map_err(|fault| (fault, None))?;
    let view = resolved.own(worker, &snapshot).ok_or((Fault::NoService, None))?;
    let tls = snapshot.tenant(session.account.tenant.as_str()).and_then(|t| t.tls.clone());
    drop(snapshot);
    let target = |at| Some((view.clone(), at));
    let admission = permit::request(worker, session, &resolved).map_err(|fault| (fault, target(None)))?;
    let mut tried = Tried::new();
    loop {
        let now = worker.clock.now();
        let chosen = pick::endpoint(&view, &tried, now, || worker.random()).map_err(|fault| (fault, target(None)))?;
        let headers = introduction(session, resolved.hostname());
        match upstream::connect(worker, &chosen, Introduction { tls: tls.as_ref(), headers }).await {
            Ok(io) => return Ok(Opened { io, chosen, _admission: admission }),
            Err(fault) => {
                tried.push(chosen.at);
                if tried.len() >= TRIES.min(view.states.len()) {
                    return Err((fault, target(Some(chosen.at))));
                }
                worker.counts.retried(fault.name());
            }
        }
    }
}

/// Relays a client's connection to an endpoint. What was read from it already goes first.
pub(crate) async fn tcp(worker: &Rc<Worker>, session: &Rc<Session>, mut client: Io, inbox: Inbox) {
    let relayed = Relayed::begin(worker, session);
    match open(worker, session).await {
        Ok(opened) => run(worker, session, relayed, client, inbox, opened).await,
        Err((fault, target)) => {
            worker.counts.refused_connection(fault.name());
            relayed.end(target, fault.flag(), (0, 0));
            client.abort();
        }
    }
}

/// Relays until both ends are done.
pub(crate) async fn run(worker: &Rc<Worker>, session: &Session, relayed: Relayed, client: Io, mut inbox: Inbox, mut opened: Opened) {
    let target = (opened.chosen.view.clone(), Some(opened.chosen.at));
    let series = worker.series.relay_opened(session, &target);
    let meter = Meter::with(series.received, series.sent);
    let mut client = Prefixed { prefix: inbox.take_all(), leg: client };
    drop(inbox);
    let end = copied(worker, &mut client, &mut opened.io, &meter).await;
    relayed.end(Some(target), end, (meter.a_to_b(), meter.b_to_a()));
}

/// Relays an upgraded connection; what either side sent behind its head goes first. Returns the bytes from the client and to it.
pub(crate) async fn upgraded(worker: &Worker, client: (Io, Bytes), up: (Io, Bytes)) -> (u64, u64) {
    let meter = Meter::default();
    let mut client = Prefixed { prefix: client.1, leg: client.0 };
    let mut up = Prefixed { prefix: up.1, leg: up.0 };
    copied(worker, &mut client, &mut up, &meter).await;
    (meter.a_to_b(), meter.b_to_a())
}

async fn copied<A: copy::Leg, B: copy::Leg>(worker: &Worker, a: &mut A, b: &mut B, meter: &Meter) -> Flag {
    let end = tokio::select! {
        end = copy::both(&mut *a, &mut *b, meter, Some(worker.shared.config.times.relay)) => Some(end),
        () = worker.drain.forced() => None,
    };
    if end.is_none() {
        // An orderly close would look like the end of the stream.
        a.abort();
        b.abort();
    }
    end.map_or(Flag::Overload, |end| decide_flag(&end))
}

fn decide_flag(end: &End) -> Flag {
    match end {
        End::Complete => Flag::None,
        End::Broken { side: Side::A, .. } => Flag::DownstreamGone,
        End::Broken { side: Side::B, .. } => Flag::UpstreamClosed,
        End::Idle(_) => Flag::StreamIdle,
    }
}

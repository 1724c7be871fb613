//! Relaying bytes: TCP ports, ports whose protocol turned out opaque, and upgraded HTTP/1.1 connections. Half-closes and resets are carried by
//! the kit's copy; this opens, counts and logs.

use std::pin::pin;
use std::rc::Rc;

use bytes::Bytes;
use canal_kit::copy::{self, End, Meter, Prefixed, Side};

use crate::account::Account;
use crate::buffer::Inbox;
use crate::endpoints::{Chosen, Target};
use crate::fault::{Fault, Flag};
use crate::finish::{Judged, Relayed};
use crate::io::Io;
use crate::judge::open::Open;
use crate::judge::{self, Consent, Guards, JudgingError, ask};
use crate::pick::{self, Tried};
use crate::place::{self, Placed};
use crate::session::Session;
use crate::token;
use crate::upstream::{self, Introduction};
use crate::worker::Worker;

/// Endpoints tried for one connection; no byte was sent before any of them.
const TRIES_MAX: usize = 3;

/// A connection to an endpoint that is up.
pub(crate) struct Opened {
    io: Io,
    chosen: Chosen,
    placed: Placed,
}

/// Connects to one of the destination's endpoints, if policies let the client.
pub(crate) async fn open(worker: &Rc<Worker>, session: &Session, judged: &mut Judged) -> Result<Opened, (Fault, Target)> {
    let placed = place::connection(worker, session)?;
    let view = &placed.view;
    let target = |at| Some((view.clone(), at));
    let mut tried = Tried::new();
    loop {
        let now = worker.clock.now();
        let chosen = pick::endpoint(view, &tried, now, || worker.random()).map_err(|fault| (fault, target(None)))?;
        let guards = Guards::of(&chosen, &placed.resolved);
        if let Err(fault) = judge(worker, session, &guards, &chosen, judged).await {
            return Err((fault, target(Some(chosen.at))));
        }
        let headers = session.introduction(placed.resolved.hostname());
        match upstream::connect(worker, &chosen, Introduction { tls: placed.tls.as_ref(), headers }).await {
            Ok(io) => return Ok(Opened { io, chosen, placed }),
            Err(fault) => {
                tried.push(chosen.at);
                if tried.len() >= TRIES_MAX.min(view.states.len()) {
                    return Err((fault, target(Some(chosen.at))));
                }
                worker.counts.retried(fault.name());
            }
        }
    }
}

/// Judges what is known of a client whose bytes are not looked at.
async fn judge(worker: &Rc<Worker>, session: &Session, guards: &Guards<'_>, chosen: &Chosen, judged: &mut Judged) -> Result<(), Fault> {
    let to = chosen.endpoint().address;
    let mut consent = Consent::default();
    while let judge::Next::Ask(question) = judge::connection(worker, session, guards, to, &consent, Some(judged))? {
        // Headers that it wants of a request have no place here.
        let _ = Box::pin(ask::ask(worker, session, &question, |_| ask::connection(session, to))).await?;
        consent = Consent::To(question);
    }
    Ok(())
}

/// Relays a client's connection to an endpoint. What was read from it already goes first.
pub(crate) async fn tcp(worker: &Rc<Worker>, session: &Rc<Session>, mut client: Io, inbox: Inbox) {
    let mut relayed = Relayed::begin(worker, session);
    match open(worker, session, &mut relayed.judged).await {
        Ok(opened) => run(worker, session, relayed, client, inbox, opened).await,
        Err((fault, target)) => {
            worker.counts.refused_connection(fault.name());
            relayed.detail = fault.detail().to_string();
            relayed.end(target, fault.flag(), (0, 0));
            client.abort();
        }
    }
}

/// Relays until both ends are done.
pub(crate) async fn run(worker: &Rc<Worker>, session: &Rc<Session>, mut relayed: Relayed, client: Io, mut inbox: Inbox, opened: Opened) {
    let Opened { mut io, chosen, placed } = opened;
    let target = Some((chosen.view.clone(), Some(chosen.at)));
    let series = relayed.opened(&target);
    let meter = Meter::with(series.received, series.sent);
    let mut client = Prefixed { prefix: inbox.take_all(), leg: client };
    drop(inbox);
    let again = || Open::unseen(session, &chosen).judge_unseen(worker);
    let watch = Watch { account: &session.account, version: placed.version, again: &again };
    let end = copied(worker, &watch, &mut client, &mut io, &meter).await;
    if let Err(fault) = &end {
        worker.counts.refused_connection(fault.name());
        relayed.detail = fault.detail().to_string();
    }
    relayed.end(target, end.unwrap_or_else(|fault| fault.flag()), (meter.a_to_b(), meter.b_to_a()));
}

/// Relays an upgraded connection; what either side sent behind its head goes first. Returns the bytes from the client and to it, and why
/// it was cut if policies did that.
pub(crate) async fn upgraded(worker: &Worker, watch: &Watch<'_>, client: (Io, Bytes), up: (Io, Bytes)) -> ((u64, u64), Option<Fault>) {
    let meter = Meter::default();
    let mut client = Prefixed { prefix: client.1, leg: client.0 };
    let mut up = Prefixed { prefix: up.1, leg: up.0 };
    let end = copied(worker, watch, &mut client, &mut up, &meter).await;
    ((meter.a_to_b(), meter.b_to_a()), end.err())
}

/// How a relay is judged again when its tenant's policies change.
pub(crate) struct Watch<'a> {
    pub(crate) account: &'a Account,
    pub(crate) version: u64,
    pub(crate) again: &'a dyn Fn() -> Result<(), JudgingError>,
}

impl Watch<'_> {
    /// Resolves once policies forbid it.
    async fn denied(&self, worker: &Worker) -> Fault {
        let mut judged = self.version;
        loop {
            let mut changed = pin!(self.account.changed.notified());
            changed.as_mut().enable();
            let newest = self.account.policy_version.get();
            if newest != judged {
                judged = newest;
                let work = token::VerificationBudget::default();
                while let Err(stop) = (self.again)() {
                    match stop {
                        JudgingError::Fault(fault) => return fault,
                        JudgingError::Verify(todo) => judge::verify(worker, self.account, &work, todo).await,
                    }
                }
                continue;
            }
            changed.await;
        }
    }
}

async fn copied<A: copy::Leg, B: copy::Leg>(
    worker: &Worker,
    watch: &Watch<'_>,
    a: &mut A,
    b: &mut B,
    meter: &Meter,
) -> Result<Flag, Fault> {
    let end = tokio::select! {
        end = copy::both(&mut *a, &mut *b, meter, Some(worker.shared.config.times.relay)) => return Ok(decide_flag(&end)),
        () = worker.drain.forced() => Ok(Flag::Overload),
        fault = watch.denied(worker) => Err(fault),
    };
    // An orderly close would look like the end of the stream.
    a.abort();
    b.abort();
    end
}

fn decide_flag(end: &End) -> Flag {
    match end {
        End::Complete => Flag::None,
        End::Broken { side: Side::A, .. } => Flag::DownstreamGone,
        End::Broken { side: Side::B, .. } => Flag::UpstreamClosed,
        End::Idle(_) => Flag::StreamIdle,
    }
}

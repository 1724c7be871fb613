//! HTTP/1.1 from a client: heads one by one, the connection kept between them, closed so that the client sees its last answer.

use std::future::poll_fn;
use std::rc::Rc;

use canal_h1::{OutHead, RequestHead};

use crate::answer;
use crate::body::Wire;
use crate::buffer::Inbox;
use crate::client::Client;
use crate::clock::{Late, Timer};
use crate::fault::Fault;
use crate::finish::Record;
use crate::forward::http1::{self as forward, Next, Relay};
use crate::head::Spoken;
use crate::io::{self, Io};
use crate::relay;
use crate::session::Session;
use crate::worker::Worker;

enum Read {
    /// A whole head of so many bytes.
    Head(usize),
    Refuse(Fault),
    /// The client is done, or was idle for too long.
    Over,
}

/// Serves requests until the connection ends.
pub(crate) async fn serve(worker: &Rc<Worker>, session: &Rc<Session>, io: Io, inbox: Inbox, timer: Timer) {
    let wire = Wire::new(io, inbox);
    let mut client = Client { wire, head: RequestHead::new(), out: OutHead::new(), timer, ended: false };
    loop {
        let next = match read_head(worker, &mut client).await {
            Read::Head(len) => forward::serve(worker, session, &mut client, len).await,
            Read::Refuse(fault) => {
                let mut record = Record::begin(worker, session, Spoken::Http11);
                record.fault(&fault);
                answer::http1(worker, &mut client, &fault, answer::Manner::last()).await;
                Next::Close
            }
            Read::Over => Next::Close,
        };
        match next {
            Next::Keep => {}
            Next::Close => return close(worker, &mut client).await,
            Next::Cut => return client.wire.io.abort(),
            Next::Relay(relay) => return Box::pin(upgraded(worker, session, client, *relay)).await,
        }
    }
}

/// Reads until a head is whole.
async fn read_head(worker: &Worker, client: &mut Client) -> Read {
    let Client { wire, head, timer, ended, .. } = client;
    let times = &worker.shared.config.times;
    let mut begun = false;
    loop {
        if !wire.inbox.is_empty() {
            match head.parse(wire.inbox.bytes(), worker.h1_limits()) {
                Ok(Some(len)) => {
                    timer.disarm();
                    return Read::Head(len);
                }
                Ok(None) => {}
                Err(refusal) => return Read::Refuse(Fault::BadRequest(refusal)),
            }
            if !begun {
                timer.arm(Late::Head, times.head);
                begun = true;
            }
        } else {
            timer.arm(Late::Idle, times.idle);
        }
        if *ended {
            return Read::Over;
        }
        match timer.within(poll_fn(|cx| wire.io.poll_fill(cx, &mut wire.inbox))).await {
            Ok(Ok(1..)) => {}
            Ok(Ok(0)) => {
                *ended = true;
                if !wire.inbox.is_empty() {
                    worker.counts.refused_connection("truncated_head");
                }
                return Read::Over;
            }
            Ok(Err(_)) => return Read::Over,
            Err(late) => {
                worker.counts.late(late);
                return if late == Late::Head { Read::Refuse(Fault::RequestTimeout) } else { Read::Over };
            }
        }
    }
}

/// Closes so that the client sees the last answer, and an end in order after it.
async fn close(worker: &Worker, client: &mut Client) {
    let Client { wire, timer, ended, .. } = client;
    if *ended && wire.inbox.is_empty() {
        return wire.io.end();
    }
    timer.arm(Late::Linger, worker.shared.config.times.linger);
    if timer.within(io::linger(&mut wire.io, &mut wire.inbox)).await.is_err() {
        worker.counts.late(Late::Linger);
    }
}

/// Relays what both sides say after the upgrade.
async fn upgraded(worker: &Worker, session: &Rc<Session>, client: Client, relay: Relay) {
    let Client { mut wire, timer, head: parsed, .. } = client;
    let Relay { mut up, mut record, head, chosen, version } = relay;
    drop(timer);
    let (from, to) = (wire.inbox.take_all(), up.inbox.take_all());
    let again = || forward::judge_upgraded(worker, session, &parsed, (head.as_deref(), &chosen));
    let watch = relay::Watch { account: &session.account, version, again: &again };
    let (bytes, denied) = relay::upgraded(worker, &watch, (wire.io, from), (up.io, to)).await;
    record.bytes_in += bytes.0;
    record.bytes_out += bytes.1;
    if let Some(fault) = denied {
        record.fault(&fault);
    }
}

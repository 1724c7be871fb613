//! Serves an HTTP/1.1 client connection: reads heads one by one, keeps the connection open between
//! them, and closes it without losing the last response.
//!
//! Start with [`serve`].

use std::future::poll_fn;
use std::rc::Rc;

use canal_gateway_http::head::ClientProtocol;
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_io::body::Http1Io;
use canal_gateway_io::buffer::Inbox;
use canal_gateway_io::clock::{TimeoutKind, Timer};
use canal_gateway_io::io::{self, Io};
use canal_h1::{OutHead, RequestHead};
use canal_net::copy;

use crate::downstream_state::Http1Downstream;
use crate::finish::RequestRecord;
use crate::forward::UpgradedUpstream;
use crate::forward::http1::{self as forward, ConnectionDisposition, UpgradedConnection};
use crate::local_reply;
use crate::relay;
use crate::session::ClientSession;
use crate::worker::Worker;

enum HeadRead {
    /// A complete head of this many bytes.
    Head(usize),
    Refuse(ProxyError),
    /// The client has finished, or was idle for too long.
    Over,
}

/// Serves requests until the connection ends.
pub(crate) async fn serve(
    worker: &Rc<Worker>,
    session: &Rc<ClientSession>,
    io: Io,
    inbox: Inbox,
    timer: Timer,
) {
    let wire = Http1Io::new(io, inbox);
    let mut client = Http1Downstream {
        wire,
        head: RequestHead::new(),
        out: OutHead::new(),
        timer,
        half_closed: false,
    };
    loop {
        let next = match read_head(worker, &mut client).await {
            HeadRead::Head(len) => forward::serve(worker, session, &mut client, len).await,
            HeadRead::Refuse(fault) => {
                let mut record = RequestRecord::begin(worker, session, ClientProtocol::Http11);
                record.fault(&fault);
                local_reply::http1(
                    worker,
                    &mut client,
                    &fault,
                    local_reply::LocalReplyOptions::last(),
                )
                .await;
                ConnectionDisposition::Close
            }
            HeadRead::Over => ConnectionDisposition::Close,
        };
        match next {
            ConnectionDisposition::Keep => {}
            ConnectionDisposition::Close => return close(worker, &mut client).await,
            ConnectionDisposition::Cut => {
                // The bytes that the endpoint sent before it failed belong to the client, so they
                // leave before the reset.
                copy::depart(&mut client.wire.io, worker.shared.config.times.linger).await;
                return client.wire.io.abort();
            }
            ConnectionDisposition::Relay(relay) => {
                return Box::pin(upgraded(worker, session, client, *relay)).await;
            }
        }
    }
}

/// Reads until a head is complete.
async fn read_head(worker: &Worker, client: &mut Http1Downstream) -> HeadRead {
    let Http1Downstream {
        wire,
        head,
        timer,
        half_closed: ended,
        ..
    } = client;
    let times = &worker.shared.config.times;
    let mut begun = false;
    loop {
        if !wire.inbox.is_empty() {
            match head.parse(wire.inbox.bytes(), worker.h1_limits()) {
                Ok(Some(len)) => {
                    timer.disarm();
                    return HeadRead::Head(len);
                }
                Ok(None) => {}
                Err(refusal) => return HeadRead::Refuse(ProxyError::BadRequest(refusal)),
            }
            // The head's timeout runs from its first byte and is not extended by later ones.
            if !begun {
                timer.arm(TimeoutKind::Head, times.head);
                begun = true;
            }
        } else {
            timer.arm(TimeoutKind::Idle, times.idle);
        }
        // What came before the half-close was parsed above.
        if *ended {
            return HeadRead::Over;
        }
        match timer
            .within(poll_fn(|cx| wire.io.poll_fill(cx, &mut wire.inbox)))
            .await
        {
            Ok(Ok(1..)) => {}
            // The client has half-closed. A partial head is counted, because it gets no response.
            Ok(Ok(0)) => {
                *ended = true;
                if !wire.inbox.is_empty() {
                    worker.counts.refused_connection("truncated_head");
                }
                return HeadRead::Over;
            }
            Ok(Err(_)) => return HeadRead::Over,
            Err(late) => {
                worker.counts.late(late);
                // A client that has sent nothing expects no response when its idle connection
                // closes.
                return if late == TimeoutKind::Head {
                    HeadRead::Refuse(ProxyError::RequestTimeout)
                } else {
                    HeadRead::Over
                };
            }
        }
    }
}

/// Closes so that the client receives the last response, and after it an orderly end.
async fn close(worker: &Worker, client: &mut Http1Downstream) {
    let Http1Downstream {
        wire,
        timer,
        half_closed: ended,
        ..
    } = client;
    if *ended && wire.inbox.is_empty() {
        return wire.io.end();
    }
    let silence = || timer.arm(TimeoutKind::Linger, worker.shared.config.times.linger);
    silence();
    if timer
        .within(io::linger(&mut wire.io, &mut wire.inbox, silence))
        .await
        .is_err()
    {
        worker.counts.late(TimeoutKind::Linger);
    }
}

/// Relays the bytes of both sides after the upgrade.
async fn upgraded(
    worker: &Worker,
    session: &Rc<ClientSession>,
    client: Http1Downstream,
    relay: UpgradedConnection,
) {
    let Http1Downstream {
        mut wire,
        timer,
        head: parsed,
        ..
    } = client;
    let UpgradedConnection {
        upstream,
        mut record,
        head,
    } = relay;
    let UpgradedUpstream {
        mut up,
        chosen,
        version,
    } = *upstream;
    drop(timer);
    let (from, to) = (wire.inbox.take_all(), up.inbox.take_all());
    let again =
        || forward::reauthorize_upgraded(worker, session, &parsed, (head.as_deref(), &chosen));
    let watch = relay::RelayReauthorization {
        account: &session.account,
        version,
        again: &again,
    };
    let (bytes, denied) = relay::upgraded(worker, &watch, (wire.io, from), (up.io, to)).await;
    record.bytes_in += bytes.0;
    record.bytes_out += bytes.1;
    if let Some(fault) = denied {
        record.fault(&fault);
    }
}

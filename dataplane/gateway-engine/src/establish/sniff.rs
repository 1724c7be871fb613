//! Protocol sniffing: detects the client protocol by its first bytes. On a port of undeclared
//! protocol, a client that sends nothing is relayed.
//!
//! Start with [`serve_sniffed`].

use std::rc::Rc;
use std::time::Duration;

use canal_gateway_io::buffer::Inbox;
use canal_gateway_io::clock::{TimeoutKind, Timer};
use canal_gateway_io::io::{self, Io};
use canal_h1::{Detected, detect};
use canal_model::program::AppProtocol;

use crate::decode;
use crate::relay;
use crate::session::ClientSession;
use crate::worker::Worker;

/// Result of sniffing: the protocol, or the reason why there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SniffResult {
    Http1,
    Http2,
    Relay,
    /// The bytes are neither HTTP version, on a port that requires one.
    Refuse,
    /// More bytes are needed for a decision.
    Wait,
    /// The client closed without sending anything.
    Gone,
}

/// Decides from the first bytes.
fn decide(first: &[u8], protocol: AppProtocol, limits: &canal_h1::MessageLimits) -> SniffResult {
    match (detect(first, limits), protocol) {
        (Detected::Http2, _) => SniffResult::Http2,
        (Detected::Http1, _) => SniffResult::Http1,
        (Detected::NeedInput, AppProtocol::Http1)
            if !first.is_empty() && !canal_h1::HTTP2_PREFACE.starts_with(first) =>
        {
            SniffResult::Http1
        }
        (Detected::NeedInput, _) => SniffResult::Wait,
        // The HTTP/1.1 codec reports the fault of a malformed request.
        (Detected::Opaque, AppProtocol::Http1) => SniffResult::Http1,
        (Detected::Opaque, AppProtocol::Http2 | AppProtocol::Grpc) => SniffResult::Refuse,
        (Detected::Opaque, AppProtocol::Detect | AppProtocol::Tcp) => SniffResult::Relay,
    }
}

/// Detects the protocol and serves the connection.
pub(crate) async fn serve_sniffed(
    worker: &Rc<Worker>,
    session: &Rc<ClientSession>,
    mut io: Io,
    mut inbox: Inbox,
    protocol: AppProtocol,
) {
    let timer = worker.clock.timer();
    match listen(worker, &mut io, &mut inbox, protocol, &timer).await {
        SniffResult::Http1 => decode::http1::serve(worker, session, io, inbox, timer).await,
        SniffResult::Http2 => {
            let first = inbox.take_all();
            drop(inbox);
            // Boxed like everything that few connections need: most wait in HTTP/1.1, and a task is
            // as large as its largest future.
            Box::pin(decode::http2::serve(worker, session, io, first, timer)).await;
        }
        SniffResult::Relay => {
            drop(timer);
            Box::pin(relay::tcp(worker, session, io, inbox)).await;
        }
        SniffResult::Refuse => {
            worker.counts.refused_connection("not_http");
            timer.arm(TimeoutKind::Linger, worker.shared.config.times.linger);
            // A client that exceeds the timeout is simply dropped.
            let on_read = || timer.arm(TimeoutKind::Linger, worker.shared.config.times.linger);
            let _ = Box::pin(timer.within(io::linger(&mut io, &mut inbox, on_read))).await;
        }
        SniffResult::Wait | SniffResult::Gone => {}
    }
}

/// Reads until the first bytes allow a decision, the client closes, or the timeout passes.
async fn listen(
    worker: &Worker,
    io: &mut Io,
    inbox: &mut Inbox,
    protocol: AppProtocol,
    timer: &Timer,
) -> SniffResult {
    let times = &worker.shared.config.times;
    let limits = worker.h1_limits();
    let unknown = protocol == AppProtocol::Detect;
    if unknown && inbox.is_empty() {
        // In a server-first protocol the client waits for the server. The coarse clock would add
        // its tick to every such connection.
        let first = std::future::poll_fn(|cx| io.poll_fill(cx, inbox));
        match tokio::time::timeout(times.sniff, first).await {
            Err(_) => {
                worker.counts.sniffed_server_first.inc();
                return SniffResult::Relay;
            }
            Ok(Err(_)) => return SniffResult::Gone,
            // Some protocols half-close before the first byte, to a server that sends first.
            Ok(Ok(0)) => return SniffResult::Relay,
            Ok(Ok(_)) => {}
        }
    }
    // Bytes that could begin a request get only as much time as a request's first line needs:
    // protocols other than HTTP may send no more.
    // Nobody measured the second; a first line in several segments needs more than `sniff`.
    let undecided = times.sniff.max(Duration::from_secs(1));
    if unknown && !inbox.is_empty() {
        timer.arm(TimeoutKind::Head, undecided);
    } else {
        timer.arm(TimeoutKind::Idle, times.idle);
    }
    loop {
        match decide(inbox.bytes(), protocol, limits) {
            SniffResult::Wait => {}
            decided => return decided,
        }
        let had = inbox.len();
        match timer
            .within(std::future::poll_fn(|cx| io.poll_fill(cx, inbox)))
            .await
        {
            // On a port of undeclared protocol, bytes that stay ambiguous are relayed unchanged.
            Ok(Ok(0) | Err(_)) | Err(_) if unknown => return SniffResult::Relay,
            Ok(Ok(0) | Err(_)) => return SniffResult::Gone,
            Err(late) => {
                worker.counts.late(late);
                return SniffResult::Gone;
            }
            Ok(Ok(_)) => {}
        }
        // The first byte starts the head's timeout. Later ones extend it only where the protocol is
        // undeclared.
        if had == 0 || unknown {
            timer.arm(
                TimeoutKind::Head,
                if unknown { undecided } else { times.head },
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_decide_among_the_ports_protocols() {
        use AppProtocol::{Detect, Grpc, Http1, Http2};
        let preface = canal_h1::HTTP2_PREFACE;
        let cases: &[(&[u8], AppProtocol, SniffResult)] = &[
            (b"", Detect, SniffResult::Wait),
            (b"", Http1, SniffResult::Wait),
            (b"GET / HTTP/1.1\r\n", Detect, SniffResult::Http1),
            (b"GET / HTTP/1.1\r\n", Grpc, SniffResult::Http1),
            (b"GET /", Http1, SniffResult::Http1),
            (b"GET /", Detect, SniffResult::Wait),
            (b"PRI", Http1, SniffResult::Wait),
            (preface, Http1, SniffResult::Http2),
            (preface, Detect, SniffResult::Http2),
            (b"\x00\x01", Http1, SniffResult::Http1),
            (
                b"INVALID CONNECTION PREFACE\r\n\r\n",
                Http2,
                SniffResult::Refuse,
            ),
            (b"*1\r\n$4\r\nPING\r\n", Detect, SniffResult::Relay),
        ];
        for (first, protocol, want) in cases {
            assert_eq!(
                decide(first, *protocol, &canal_h1::MessageLimits::DEFAULT),
                *want,
                "{:?} {protocol:?}",
                String::from_utf8_lossy(first)
            );
        }
    }
}

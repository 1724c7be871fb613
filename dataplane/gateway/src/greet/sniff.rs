//! What does the client speak? Told by its first bytes; on a port of unknown protocol also by its silence.

use std::rc::Rc;

use canal_h1::{Detected, detect};
use canal_model::program::AppProtocol;

use crate::buffer::Inbox;
use crate::clock::{Late, Timer};
use crate::io::{self, Io};
use crate::read;
use crate::relay;
use crate::session::Session;
use crate::worker::Worker;

/// What to do with the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Speech {
    Http1,
    Http2,
    Relay,
    /// Neither HTTP version, where one of them must be.
    Refuse,
    /// Not enough to tell.
    Wait,
    /// The client closed without a word.
    Gone,
}

/// Decides from the first bytes.
fn decide(first: &[u8], protocol: AppProtocol, limits: &canal_h1::Limits) -> Speech {
    match (detect(first, limits), protocol) {
        (Detected::Http2, _) => Speech::Http2,
        (Detected::Http1, _) => Speech::Http1,
        (Detected::NeedInput, AppProtocol::Http1) if !first.is_empty() && !canal_h1::HTTP2_PREFACE.starts_with(first) => Speech::Http1,
        (Detected::NeedInput, _) => Speech::Wait,
        // The codec names what is wrong with it.
        (Detected::Opaque, AppProtocol::Http1) => Speech::Http1,
        (Detected::Opaque, AppProtocol::Http2 | AppProtocol::Grpc) => Speech::Refuse,
        (Detected::Opaque, AppProtocol::Detect | AppProtocol::Tcp) => Speech::Relay,
    }
}

/// Finds out what is spoken and serves it.
pub(crate) async fn speak(worker: &Rc<Worker>, session: &Rc<Session>, mut io: Io, mut inbox: Inbox, protocol: AppProtocol) {
    let timer = worker.clock.timer();
    match listen(worker, &mut io, &mut inbox, protocol, &timer).await {
        Speech::Http1 => read::http1::serve(worker, session, io, inbox, timer).await,
        Speech::Http2 => {
            let first = inbox.take_all();
            drop(inbox);
            // On the heap, as all that not every connection needs: most wait in HTTP/1.1, and their task is as large as the largest of these.
            Box::pin(read::http2::serve(worker, session, io, first, timer)).await;
        }
        Speech::Relay => {
            drop(timer);
            Box::pin(relay::tcp(worker, session, io, inbox)).await;
        }
        Speech::Refuse => {
            worker.counts.refused_connection("not_http");
            timer.arm(Late::Linger, worker.shared.config.times.linger);
            // A late peer is simply dropped.
            let _ = Box::pin(timer.within(io::linger(&mut io, &mut inbox))).await;
        }
        Speech::Wait | Speech::Gone => {}
    }
}

/// Reads until the first bytes tell, the client closes, or its time is over.
async fn listen(worker: &Worker, io: &mut Io, inbox: &mut Inbox, protocol: AppProtocol, timer: &Timer) -> Speech {
    let times = &worker.shared.config.times;
    let limits = worker.h1_limits();
    let unknown = protocol == AppProtocol::Detect;
    if unknown && inbox.is_empty() {
        // A server-first protocol: the client waits for us. The coarse clock would add its tick to every such connection.
        let first = std::future::poll_fn(|cx| io.poll_fill(cx, inbox));
        match tokio::time::timeout(times.sniff, first).await {
            Err(_) => {
                worker.counts.sniffed_server_first.inc();
                return Speech::Relay;
            }
            Ok(Err(_)) => return Speech::Gone,
            // Half-closed before the first byte: some protocols do that to a server that speaks first.
            Ok(Ok(0)) => return Speech::Relay,
            Ok(Ok(_)) => {}
        }
    }
    timer.arm(Late::Idle, times.idle);
    loop {
        match decide(inbox.bytes(), protocol, limits) {
            Speech::Wait => {}
            told => return told,
        }
        let had = inbox.len();
        match timer.within(std::future::poll_fn(|cx| io.poll_fill(cx, inbox))).await {
            // What is there and will not grow is passed on as it is where that is allowed.
            Ok(Ok(0)) | Err(_) if unknown => return Speech::Relay,
            Ok(Ok(0) | Err(_)) => return Speech::Gone,
            Err(late) => {
                worker.counts.late(late);
                return Speech::Gone;
            }
            Ok(Ok(_)) => {}
        }
        if had == 0 || unknown {
            timer.arm(Late::Head, if unknown { times.sniff.max(std::time::Duration::from_secs(1)) } else { times.head });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_decide_by_what_the_port_may_speak() {
        use AppProtocol::{Detect, Grpc, Http1, Http2};
        let preface = canal_h1::HTTP2_PREFACE;
        let cases: &[(&[u8], AppProtocol, Speech)] = &[
            (b"", Detect, Speech::Wait),
            (b"", Http1, Speech::Wait),
            (b"GET / HTTP/1.1\r\n", Detect, Speech::Http1),
            (b"GET / HTTP/1.1\r\n", Grpc, Speech::Http1),
            (b"GET /", Http1, Speech::Http1),
            (b"GET /", Detect, Speech::Wait),
            (b"PRI", Http1, Speech::Wait),
            (preface, Http1, Speech::Http2),
            (preface, Detect, Speech::Http2),
            (b"\x00\x01", Http1, Speech::Http1),
            (b"INVALID CONNECTION PREFACE\r\n\r\n", Http2, Speech::Refuse),
            (b"*1\r\n$4\r\nPING\r\n", Detect, Speech::Relay),
        ];
        for (first, protocol, want) in cases {
            assert_eq!(decide(first, *protocol, &canal_h1::Limits::DEFAULT), *want, "{:?} {protocol:?}", String::from_utf8_lossy(first));
        }
    }
}

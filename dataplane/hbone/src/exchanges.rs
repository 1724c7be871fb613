//! The two legs of a tunnel that a gateway reuses for one HTTP/1.1 request after another. When the
//! application closes, the gateway needs to know how many bytes the application can have seen
//! ([`CloseReport`]). This module does not parse HTTP: a request begins where the application's
//! last response byte ended.
//!
//! If the application closes between requests, no later byte is written to it, so the gateway may
//! send the next request elsewhere. The check of the socket costs no system call before the end.
//! Bytes that the application's kernel had not acknowledged when it sent its FIN had not reached
//! the application. An HTTP server does not accept a request after its FIN (RFC 9112 §9.6).

use std::cell::Cell;
use std::io::{self, ErrorKind};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use canal_net::copy::Leg;
use canal_net::sys;
use tokio::net::TcpStream;

use crate::{CloseReport, HboneStream};

/// State that the two legs share.
#[derive(Debug, Default)]
struct ExchangeState {
    /// Bytes that the application's kernel accepted.
    written: Cell<u64>,
    /// Value of `written` when the application sent its last byte.
    answered: Cell<u64>,
    /// A write found that the application had reset the connection. A read does not report that
    /// again.
    reset: Cell<bool>,
    /// The application has closed, and it is known how much it can have seen. Nothing more is
    /// written to it.
    closed: Cell<Option<CloseReport>>,
}

/// The leg of the tunnel. It ends with the report.
#[derive(Debug)]
pub struct ReportingTunnel {
    stream: HboneStream,
    state: Rc<ExchangeState>,
}

/// The leg of the application's connection.
#[derive(Debug)]
pub struct ReportedApplication {
    tcp: TcpStream,
    state: Rc<ExchangeState>,
}

/// Creates the legs of a tunnel whose peer requested a report.
pub fn reporting(stream: HboneStream, tcp: TcpStream) -> (ReportingTunnel, ReportedApplication) {
    let state = Rc::<ExchangeState>::default();
    (
        ReportingTunnel {
            stream,
            state: state.clone(),
        },
        ReportedApplication { tcp, state },
    )
}

/// Decides the report on an application that has closed and that sent its last byte when `answered`
/// of the `written` bytes were written. `acknowledged` is the kernel's count after an orderly
/// close. After a reset it proves nothing: the application may have read bytes that its kernel
/// never acknowledged.
fn decide_report(
    written: u64,
    answered: u64,
    acknowledged: Option<u64>,
    reset: bool,
) -> Option<CloseReport> {
    let is_quiet = written == answered;
    let is_unseen = !reset && acknowledged.is_some_and(|n| n <= answered);
    (is_quiet || is_unseen).then_some(CloseReport {
        delivered: answered,
        reset,
    })
}

impl ReportedApplication {
    /// Decides and stores the report, after the last byte from the application.
    fn conclude(&self, reset: bool) -> Option<CloseReport> {
        let (written, answered) = (self.state.written.get(), self.state.answered.get());
        let acknowledged = if written == answered {
            None
        } else {
            sys::tcp_acknowledged(&self.tcp).ok()
        };
        let report = decide_report(written, answered, acknowledged, reset);
        self.state.closed.set(report);
        report
    }
}

impl Leg for ReportedApplication {
    fn poll_chunk(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
        limit: usize,
    ) -> Poll<io::Result<Option<Bytes>>> {
        match ready!(self.tcp.poll_chunk(cx, buffer, limit)) {
            Ok(Some(chunk)) => {
                self.state.answered.set(self.state.written.get());
                Poll::Ready(Ok(Some(chunk)))
            }
            Ok(None) if !self.state.reset.get() => {
                self.conclude(false);
                Poll::Ready(Ok(None))
            }
            Ok(None) if self.conclude(true).is_some() => Poll::Ready(Ok(None)),
            Ok(None) => Poll::Ready(Err(ErrorKind::ConnectionReset.into())),
            // The report carries the reset, so the leg itself ends in order.
            Err(_) if self.conclude(true).is_some() => Poll::Ready(Ok(None)),
            Err(e) => Poll::Ready(Err(e)),
        }
    }
    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        if self.state.closed.get().is_some() {
            return Poll::Ready(Err(io::Error::new(
                ErrorKind::BrokenPipe,
                "the application closed earlier",
            )));
        }
        match ready!(self.tcp.poll_send(cx, data)) {
            Ok(n) => {
                self.state.written.set(self.state.written.get() + n as u64);
                Poll::Ready(Ok(n))
            }
            Err(e) => {
                self.state.reset.set(e.kind() == ErrorKind::ConnectionReset);
                Poll::Ready(Err(e))
            }
        }
    }
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.tcp.poll_finish(cx)
    }
    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.tcp.poll_broken(cx)
    }
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.tcp.poll_stalled(cx)
    }
    fn is_reset(&self) -> bool {
        self.tcp.is_reset()
    }
    fn poll_departed(&mut self) -> Poll<()> {
        self.tcp.poll_departed()
    }
    fn abort(&mut self) {
        self.tcp.abort();
    }
}

impl Leg for ReportingTunnel {
    fn poll_chunk(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
        limit: usize,
    ) -> Poll<io::Result<Option<Bytes>>> {
        if self.state.closed.get().is_some() {
            return Poll::Ready(Ok(None));
        }
        Leg::poll_chunk(&mut self.stream, cx, buffer, limit)
    }
    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        Leg::poll_send(&mut self.stream, cx, data)
    }
    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(report) = self.state.closed.get() else {
            return Leg::poll_finish(&mut self.stream, cx);
        };
        self.stream.finish_with(report.trailers())?;
        // The other direction has nothing more to do and must be polled to end.
        cx.waker().wake_by_ref();
        Poll::Ready(Ok(()))
    }
    fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.stream.poll_reset(cx)
    }
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.stream.poll_stalled(cx)
    }
    fn is_reset(&self) -> bool {
        false
    }
    fn poll_departed(&mut self) -> Poll<()> {
        self.stream.poll_departed()
    }
    fn abort(&mut self) {
        // A reset would overtake the report. When the stream is dropped, it ends after the report.
        if self.state.closed.get().is_none() {
            Leg::abort(&mut self.stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delivered_bytes_are_never_reported_as_undelivered() {
        let report = |delivered, reset| Some(CloseReport { delivered, reset });
        for (written, answered, acknowledged, reset, want) in [
            // The application closed between requests.
            (0, 0, None, false, report(0, false)),
            (70, 70, None, false, report(70, false)),
            // The application reset the connection between requests; the bytes it sent before may
            // be incomplete.
            (70, 70, None, true, report(70, true)),
            // The request was written after the application sent its FIN, or was still in transit.
            (100, 70, Some(70), false, report(70, false)),
            (100, 70, Some(60), false, report(70, false)),
            // One byte of the request arrived before the FIN.
            (100, 70, Some(71), false, None),
            (100, 70, Some(100), false, None),
            // After a reset, missing acknowledgments prove nothing.
            (100, 70, Some(70), true, None),
            // The kernel reports no count.
            (100, 70, None, false, None),
        ] {
            assert_eq!(
                decide_report(written, answered, acknowledged, reset),
                want,
                "{written} {answered} {acknowledged:?} {reset}"
            );
        }
    }
}

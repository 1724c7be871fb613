//! The answer's head: awaited from the endpoint, interim answers passed on, the final one translated for the client.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use canal_h1::{BodyReader, Framing, Outgoing, Refusal, ResponseView};
use h2::Reason;
use http::{Response, StatusCode};

use super::{Back, Back1, Exchange, Front};
use crate::fault::Fault;
use crate::forward::heads;
use crate::head::Spoken;

impl Exchange<'_> {
    /// Until the final head has been handed to the client's side.
    pub(super) fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        match &self.back {
            Back::Http1(_) => {
                // Nothing more is read from the endpoint before the client has taken what is there: as for bodies.
                ready!(self.poll_taken(cx))?;
                self.poll_head_1(cx)
            }
            // The h2 crate queues what is not taken from it, without a bound: it is taken, counted, and refused beyond the limits.
            Back::Http2(_) => {
                let polled = self.poll_head_2(cx);
                if polled.is_pending()
                    && let Poll::Ready(Err(fault)) = self.poll_taken(cx)
                {
                    return Poll::Ready(Err(fault));
                }
                polled
            }
        }
    }

    /// Ready once an HTTP/1.1 client has taken all that was written for it.
    fn poll_taken(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        match &mut self.front {
            Front::Http1(client) if !client.wire.outbox.is_empty() => {
                client.wire.io.poll_flush(cx, &mut client.wire.outbox).map_err(|_| Fault::ClientGone)
            }
            _ => Poll::Ready(Ok(())),
        }
    }

    /// Counts an interim response of so many bytes; whether it is passed on. Each request may have so many, of so many bytes, and passes on
    /// `100` once, whoever said it.
    fn admit_interim(&mut self, status: u16, bytes: usize) -> Result<bool, Fault> {
        let repeated = self.record.interim.count(bytes, status == 100)?;
        // HTTP/1.0 has no interim responses.
        Ok(!repeated && self.ask.spoken != Spoken::Http10)
    }

    fn poll_head_1(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        loop {
            let Back::Http1(back) = &mut self.back else { return Poll::Ready(Ok(())) };
            if !back.wire.inbox.is_empty() {
                match back.head.parse(back.wire.inbox.bytes(), self.worker.h1_limits(), self.ask.asked) {
                    Err(refusal) => return Poll::Ready(Err(Fault::UpstreamProtocol(refusal.name()))),
                    Ok(None) => {}
                    Ok(Some(len)) => {
                        let interim = back.head.view(back.wire.inbox.bytes()).is_interim();
                        if interim {
                            self.interim_1(len)?
                        } else {
                            self.final_1()?
                        }
                        if let Back::Http1(back) = &mut self.back {
                            back.wire.inbox.advance(len);
                        }
                        if interim {
                            ready!(self.poll_taken(cx))?;
                            continue;
                        }
                        return Poll::Ready(Ok(()));
                    }
                }
            }
            let Back::Http1(back) = &mut self.back else { return Poll::Ready(Ok(())) };
            match ready!(back.wire.io.poll_fill(cx, &mut back.wire.inbox)) {
                Ok(1..) => back.heard = true,
                Ok(0) if back.heard => return Poll::Ready(Err(Fault::UpstreamProtocol("truncated_head"))),
                Ok(0) | Err(_) => return Poll::Ready(Err(Fault::UpstreamClosed { reused: back.reused && !back.heard })),
            }
        }
    }

    /// Hands an interim response of `len` bytes to the client's side.
    fn interim_1(&mut self, len: usize) -> Result<(), Fault> {
        let Back::Http1(back) = &self.back else { return Ok(()) };
        let status = back.head.view(back.wire.inbox.bytes()).status();
        if !self.admit_interim(status, len)? {
            return Ok(());
        }
        let Back::Http1(back) = &self.back else { return Ok(()) };
        let Back1 { head, wire, .. } = &**back;
        let view = head.view(wire.inbox.bytes());
        match &mut self.front {
            Front::Http1(client) => {
                let into = client.wire.outbox.head();
                heads::response_1_to_1(&mut client.out, wire.inbox.bytes(), &view, &Outgoing::default(), into)
                    .map_err(|refusal: Refusal| Fault::UpstreamProtocol(refusal.name()))
            }
            Front::Http2(stream) => {
                let response = heads::response_1_to_2(&view).ok_or(Fault::UpstreamProtocol("untranslatable_head"))?;
                stream.respond.send_informational(response).map_err(|_| Fault::ClientGone)
            }
        }
    }

    fn final_1(&mut self) -> Result<(), Fault> {
        let keep = self.keeps_client();
        let Back::Http1(back) = &mut self.back else { return Ok(()) };
        let Back1 { head, wire, keeps, .. } = &mut **back;
        let view = head.view(wire.inbox.bytes());
        let (status, framing) = (view.status(), view.framing());
        *keeps = view.keep_alive();
        self.upgrade = view.is_tunnel();
        let to = heads::framing_to_1(framing, self.ask.spoken);
        match &mut self.front {
            Front::Http1(client) => {
                let keep = keep && to != Framing::UntilClose && (status < 400 || self.up.done);
                self.kept = keep;
                let outgoing = Outgoing {
                    framing: to,
                    persistence: if self.upgrade { Default::default() } else { self.ask.spoken.persistence(keep) },
                    upgrade: view.upgrade(),
                    ..Outgoing::default()
                };
                let into = client.wire.outbox.head();
                heads::response_1_to_1(&mut client.out, wire.inbox.bytes(), &view, &outgoing, into)
                    .map_err(|refusal| Fault::UpstreamProtocol(refusal.name()))?;
            }
            Front::Http2(stream) => {
                if self.upgrade {
                    return Err(Fault::UpstreamProtocol("unexpected_upgrade"));
                }
                let response = heads::response_1_to_2(&view).ok_or(Fault::UpstreamProtocol("untranslatable_head"))?;
                let ended = matches!(framing, Framing::None | Framing::Length(0));
                let send = stream.respond.send_response(response, ended).map_err(|_| Fault::ClientGone)?;
                stream.answer = (!ended).then_some(send);
            }
        }
        self.down_reader = BodyReader::new(framing);
        self.down_framing = (framing, to);
        self.record.answered(status);
        self.record.grpc_status = grpc_status_1(&view);
        Ok(())
    }

    /// Whether the client's connection is kept, as far as it is known when the answer begins.
    fn keeps_client(&self) -> bool {
        self.ask.keep_alive && !self.worker.keeps_no_client()
    }

    fn poll_head_2(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        loop {
            let Back::Http2(back) = &mut self.back else { return Poll::Ready(Ok(())) };
            match back.response.poll_informational(cx) {
                Poll::Ready(Some(Ok(interim))) => self.interim_2(interim)?,
                _ => break,
            }
        }
        let Back::Http2(back) = &mut self.back else { return Poll::Ready(Ok(())) };
        match ready!(Pin::new(&mut back.response).poll(cx)) {
            Ok(response) => Poll::Ready(self.final_2(response)),
            Err(e) => Poll::Ready(Err(match http2_fault(&e) {
                Fault::UpstreamClosed { .. } => Fault::UpstreamClosed { reused: back.place.reused },
                fault => fault,
            })),
        }
    }

    fn interim_2(&mut self, interim: Response<()>) -> Result<(), Fault> {
        // RFC 9113 §8.6: HTTP/2 has no upgrade, and an HTTP/1.1 client would take what follows for another protocol.
        if interim.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Err(Fault::UpstreamProtocol("h2_switching_protocols"));
        }
        if !self.admit_interim(interim.status().as_u16(), heads::byte_len(interim.headers()))? {
            return Ok(());
        }
        match &mut self.front {
            // The only one that an HTTP/1.1 client asks for is 100, and the gateway has sent it itself.
            Front::Http1(_) if interim.status() == StatusCode::CONTINUE => Ok(()),
            Front::Http1(client) => {
                let (parts, ()) = interim.into_parts();
                let into = client.wire.outbox.head();
                let written = heads::response_2_to_1(&mut client.out, &parts, &Outgoing::default(), false, into);
                written.map_err(|refusal| Fault::UpstreamProtocol(refusal.name()))
            }
            Front::Http2(stream) => stream.respond.send_informational(interim).map_err(|_| Fault::ClientGone),
        }
    }

    fn final_2(&mut self, response: Response<h2::RecvStream>) -> Result<(), Fault> {
        let keep = self.keeps_client();
        let (parts, body) = response.into_parts();
        let ended = body.is_end_stream();
        let status = parts.status.as_u16();
        self.record.answered(status);
        self.record.grpc_status = parts.headers.get("grpc-status").and_then(|v| v.to_str().ok()?.parse().ok());
        match &mut self.front {
            Front::Http1(client) => {
                let framing = heads::framing_of_answer(self.ask, &parts, ended);
                let keep = keep && framing != Framing::UntilClose && (status < 400 || self.up.done);
                self.kept = keep;
                let outgoing = Outgoing { framing, persistence: self.ask.spoken.persistence(keep), ..Outgoing::default() };
                let into = client.wire.outbox.head();
                heads::response_2_to_1(&mut client.out, &parts, &outgoing, framing == Framing::None, into)
                    .map_err(|refusal| Fault::UpstreamProtocol(refusal.name()))?;
                self.down_framing = (Framing::None, framing);
            }
            Front::Http2(stream) => {
                let mut head = Response::new(());
                *head.status_mut() = parts.status;
                *head.headers_mut() = parts.headers;
                let send = stream.respond.send_response(head, ended).map_err(|_| Fault::ClientGone)?;
                stream.answer = (!ended).then_some(send);
            }
        }
        if let Back::Http2(back) = &mut self.back {
            back.body = Some(body);
        }
        Ok(())
    }
}

/// Why an endpoint's HTTP/2 gave no answer.
pub(in crate::forward) fn http2_fault(e: &h2::Error) -> Fault {
    match e.reason() {
        // RFC 9113 §8.7: not processed.
        Some(Reason::REFUSED_STREAM) => Fault::UpstreamRefused,
        // A stream above the last one of an orderly GOAWAY was not processed; lower ones get their answers.
        Some(Reason::NO_ERROR) if e.is_go_away() => Fault::UpstreamRefused,
        Some(_) if e.is_reset() => Fault::UpstreamReset,
        Some(_) => Fault::UpstreamProtocol("http2"),
        None => Fault::UpstreamClosed { reused: false },
    }
}

fn grpc_status_1(view: &ResponseView<'_>) -> Option<u8> {
    view.get(canal_h1::Name::GrpcStatus).and_then(|v| std::str::from_utf8(v).ok()?.parse().ok())
}

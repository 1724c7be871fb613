//! A handshake by a key server: the peer's bytes go to the server and its answers to the peer,
//! until both have the session's secrets. The key server verifies the peer. This side only checks
//! that the result matches the certificate that comes with it.

use std::sync::Arc;
use std::time::Duration;

use canal_model::identity::Identity;
use canal_net::sys::ReadWakeupGuard;
use canal_tls::{
    HANDSHAKE_TIMEOUT, KeyServerError, RemoteHandshakeResult, TlsError, Transport, leaf_of,
};
use canal_wire::keyrpc::{self, HandshakeRequest, KeyRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use super::channel::{KeyServerAnswer, KeyServerCall, OwnedHandshakeResult};
use super::key_client::{KeyClient, KeyServerState};

/// Maximum number of bytes from a peer before its handshake has ended. As many as the key server
/// accepts of a peer (`HANDSHAKE_BYTES_MAX` there): more would be refused later.
const HANDSHAKE_BYTES_MAX: usize = 64 << 10;
/// Buffer space for each read from a peer. A flight of a handshake without a long chain fits in.
const READ_BYTES: usize = 4 << 10;
/// Bytes of [`keyrpc::BEGIN_BYTES_MAX`] that are reserved for the headers of the records that carry
/// a ClientHello. A hundred headers of 5 bytes fit in.
const RECORD_HEADERS_RESERVE_BYTES: usize = 512;
/// A fatal `unexpected_message` alert (RFC 8446 §6.2), for a peer that does not speak TLS.
const NOT_TLS: [u8; 7] = [21, 3, 3, 0, 2, 2, 10];

/// Parameters of a remote handshake.
#[derive(Debug, Clone)]
pub struct RemoteHandshakeParams {
    pub identity: Identity,
    pub alpn: &'static [u8],
    /// Identities of which a server must have one.
    pub expected: Arc<[Identity]>,
}

/// Performs the handshake as the client.
pub async fn as_client<IO: Transport>(
    io: &mut IO,
    requester: &KeyClient,
    terms: &RemoteHandshakeParams,
) -> Result<RemoteHandshakeResult, TlsError> {
    run_handshake(
        io,
        requester,
        terms,
        keyrpc::HandshakeRole::Client,
        &mut Vec::new(),
        Instant::now(),
    )
    .await
}

/// Performs the handshake as the server. `received` gets the bytes read from the client. After
/// [`KeyServerError::NoKeyServer`], nothing was sent to the client yet, so a local handshake may
/// begin with them. `on_hello` is called when the ClientHello is complete.
pub async fn as_server<IO: Transport>(
    io: &mut IO,
    requester: &KeyClient,
    terms: &RemoteHandshakeParams,
    received: &mut Vec<u8>,
    on_hello: impl Fn(),
) -> Result<RemoteHandshakeResult, TlsError> {
    let start = Instant::now();
    while !hello_is_whole(received)? {
        read(io, received).await?;
    }
    on_hello();
    run_handshake(
        io,
        requester,
        terms,
        keyrpc::HandshakeRole::Server,
        received,
        start,
    )
    .await
}

async fn read<IO: Transport>(io: &mut IO, received: &mut Vec<u8>) -> Result<(), TlsError> {
    // A read usually takes a whole flight; without the reservation a vector starts with 64 bytes.
    received.reserve(READ_BYTES);
    if io.read_buf(received).await.map_err(TlsError::Io)? == 0 {
        return Err(TlsError::Io(std::io::Error::new(
            std::io::ErrorKind::UnexpectedEof,
            "the peer closed the connection during the handshake",
        )));
    }
    Ok(())
}

/// Returns whether the bytes contain records with a complete first message. The key server checks
/// its content.
fn hello_is_whole(bytes: &[u8]) -> Result<bool, TlsError> {
    let not = |what| Err(TlsError::KeyServer(KeyServerError::Peer(what)));
    let too_much = Err(TlsError::KeyServer(KeyServerError::TooMuch(
        "a ClientHello of more than 15 KiB",
    )));
    let (mut rest, mut message) = (bytes, 0usize);
    let mut wanted = None;
    loop {
        let [kind, major, _, high, low, body @ ..] = rest else {
            // A client may add tiny records without end, so their sum is limited too.
            return if bytes.len() > keyrpc::BEGIN_BYTES_MAX {
                too_much
            } else {
                Ok(false)
            };
        };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        // 22 is a handshake record; its length is limited by RFC 8446 §5.1.
        if *kind != 22 || *major != 3 || length == 0 || length > 1 << 14 {
            return not("bytes that are not a TLS handshake");
        }
        // Only the first record begins with the message's header.
        if wanted.is_none() && message == 0 {
            // 1 is the message type ClientHello; three bytes of length follow (RFC 8446 §4).
            match body {
                [1, a, b, c, ..] if length >= 4 => {
                    wanted =
                        Some(4 + (usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c)))
                }
                // The message's header of 4 bytes has not arrived completely.
                [] => {}
                [1, ..] if length >= 4 => {}
                // The record is shorter than the message's header. No client splits it, so it is
                // refused.
                [1, ..] => {
                    return not("a ClientHello whose message header is split across records");
                }
                _ => return not("bytes that are not a ClientHello"),
            }
        }
        // The key server gets the whole hello in one frame.
        if wanted.is_some_and(|w| w > keyrpc::BEGIN_BYTES_MAX - RECORD_HEADERS_RESERVE_BYTES)
            || bytes.len() > keyrpc::BEGIN_BYTES_MAX
        {
            return too_much;
        }
        let Some(after) = body.get(length..) else {
            return Ok(false);
        };
        // The message may span records, so their lengths are summed.
        message += length;
        if wanted.is_some_and(|w| message >= w) {
            return Ok(true);
        }
        rest = after;
    }
}

async fn run_handshake<IO: Transport>(
    io: &mut IO,
    requester: &KeyClient,
    terms: &RemoteHandshakeParams,
    role: keyrpc::HandshakeRole,
    received: &mut Vec<u8>,
    start: Instant,
) -> Result<RemoteHandshakeResult, TlsError> {
    let left = HANDSHAKE_TIMEOUT.saturating_sub(start.elapsed());
    let begin = KeyRequest::Begin(HandshakeRequest {
        identity: terms.identity.clone(),
        role,
        alpn: vec![terms.alpn],
        expected: terms
            .expected
            .iter()
            // A frame has no space for more. A peer with one of the others is refused, which is
            // safe.
            .take(keyrpc::EXPECTED_MAX)
            .cloned()
            .collect(),
        // The timeout has seconds, so it always fits.
        deadline_ms: u32::try_from(left.as_millis()).unwrap_or(u32::MAX),
        bytes: received,
    });
    let (known, mut exchange, mut answer) = requester
        .first(&requester.provider(), &begin)
        .await
        .map_err(TlsError::KeyServer)?;
    let server = &known.target.name;
    // The peer now gets its first bytes: from here on no other key server can continue the
    // handshake.
    let mut records = RecordTracker::default();
    loop {
        match answer {
            KeyServerAnswer::Send(bytes) => {
                if let Err(io_error) = write(io, &bytes).await {
                    // The peer has left. The key server may still say why the handshake failed.
                    answer =
                        last_word(&mut exchange, requester.round_trip_timeout(), io_error).await?;
                    continue;
                }
            }
            KeyServerAnswer::Done(done) => {
                known.record_handshake();
                write(io, &done.bytes).await?;
                return finished(*done, received, server, terms, role);
            }
            KeyServerAnswer::Refused(name, text) => {
                requester.counts().refused(server, name);
                return Err(TlsError::KeyServer(KeyServerError::Refused {
                    server: server.clone(),
                    name,
                    text,
                }));
            }
            KeyServerAnswer::Signature(_) | KeyServerAnswer::Certificates(_) => {
                // A key server that answers another request than this one is broken, so its bytes
                // are not used.
                return Err(TlsError::KeyServer(KeyServerError::Answer {
                    server: server.clone(),
                    what: "no handshake",
                }));
            }
        }
        answer = next(
            io,
            &mut exchange,
            (&mut *received, &mut records),
            requester.round_trip_timeout(),
            &known,
        )
        .await?;
    }
}

async fn write<IO: Transport>(io: &mut IO, bytes: &[u8]) -> Result<(), TlsError> {
    io.write_all(bytes).await.map_err(TlsError::Io)?;
    io.flush().await.map_err(TlsError::Io)
}

/// Returns the result of a handshake whose peer is gone. A peer that the key server refuses closes
/// as soon as it gets the alert. The key server's reason may not have arrived here by then.
async fn last_word(
    exchange: &mut KeyServerCall,
    trip: Duration,
    io_error: TlsError,
) -> Result<KeyServerAnswer, TlsError> {
    loop {
        match exchange.answer_within(trip).await {
            // The peer is gone, so these bytes have no receiver.
            Some(Some(KeyServerAnswer::Send(_))) => {}
            Some(Some(refused @ KeyServerAnswer::Refused(..))) => return Ok(refused),
            _ => return Err(io_error),
        }
    }
}

/// Position up to which the peer's records were parsed.
#[derive(Debug, Default)]
struct RecordTracker {
    at: usize,
}

impl RecordTracker {
    /// Returns whether all bytes are complete records. `bytes` must be those of the last call and
    /// more.
    fn are_whole(&mut self, bytes: &[u8]) -> bool {
        while let Some([_, _, _, high, low, body @ ..]) = bytes.get(self.at..) {
            let length = usize::from(u16::from_be_bytes([*high, *low]));
            if body.len() < length {
                break;
            }
            self.at += 5 + length;
        }
        self.at == bytes.len()
    }
}

/// Waits for the key server's answer to complete records, which are usually the peer's flight.
/// Later bytes of the peer are not for the key server, so they wake no task while it waits. Returns
/// `None` after the timeout.
async fn after_flight<IO: Transport>(
    io: &IO,
    exchange: &mut KeyServerCall,
    trip: Duration,
) -> Option<Option<KeyServerAnswer>> {
    let _deaf = io.tcp().and_then(ReadWakeupGuard::to);
    tokio::time::timeout(trip, exchange.answer()).await.ok()
}

/// Relays the peer's bytes until the key server answers. A server that is silent for long gets a
/// PING: the bytes it has may be a part of a record, to which there is no answer.
async fn next<IO: Transport>(
    io: &mut IO,
    exchange: &mut KeyServerCall,
    (received, records): (&mut Vec<u8>, &mut RecordTracker),
    trip: Duration,
    known: &KeyServerState,
) -> Result<KeyServerAnswer, TlsError> {
    let lost = || TlsError::KeyServer(KeyServerError::Lost(known.target.name.clone()));
    let mut due: Option<Instant> = None;
    loop {
        let before = received.len();
        let silent = async {
            match due {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // The answer comes first: if it refuses the peer, the peer's bytes do not matter any
            // more.
            biased;
            answer = exchange.answer() => return answer.ok_or_else(lost),
            got = read(io, received) => {
                // A peer that was refused leaves early, and the key server's reason may still be on
                // the way.
                if let Err(io_error) = got {
                    return last_word(exchange, trip, io_error).await;
                }
                // An unauthenticated peer must not fill this process's memory.
                if received.len() > HANDSHAKE_BYTES_MAX {
                    return Err(TlsError::KeyServer(KeyServerError::TooMuch("more than 64 KiB before the end of its handshake")));
                }
                exchange.more(&received[before..]).map_err(|_| lost())?;
                if !records.are_whole(received) {
                    due = Some(Instant::now() + trip);
                    continue;
                }
                // A complete flight gets an answer, so the peer's later bytes can wait in the
                // kernel.
                if let Some(answer) = after_flight(io, exchange, trip).await {
                    return answer.ok_or_else(lost);
                }
            }
            () = silent => {}
        }
        if !exchange.alive(trip).await {
            return Err(lost());
        }
        due = None;
    }
}

pub(super) fn finished(
    done: OwnedHandshakeResult,
    received: &[u8],
    server: &str,
    terms: &RemoteHandshakeParams,
    role: keyrpc::HandshakeRole,
) -> Result<RemoteHandshakeResult, TlsError> {
    let answer = |what| {
        TlsError::KeyServer(KeyServerError::Answer {
            server: server.into(),
            what,
        })
    };
    // The answer may have crossed bytes that were sent meanwhile, so `consumed` counts from the
    // first byte.
    let early = received
        .get(done.consumed..)
        .ok_or_else(|| answer("more bytes consumed than it was given"))?
        .to_vec();
    let leaf = leaf_of(done.leaf, done.above, &done.peer).map_err(answer)?;
    if role == keyrpc::HandshakeRole::Client && !terms.expected.contains(&done.peer) {
        return Err(answer("a peer with an unexpected identity"));
    }
    Ok(RemoteHandshakeResult {
        suite: done.suite,
        alpn: done.alpn,
        client_traffic: done.client_traffic,
        server_traffic: done.server_traffic,
        peer: done.peer,
        leaf,
        early,
    })
}

/// Sends an alert to a peer that does not speak TLS, best effort.
pub async fn turn_away<IO: Transport>(io: &mut IO) {
    let _ = io.write_all(&NOT_TLS).await;
    let _ = io.flush().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_whole_at_their_ends_only() {
        let flight = [
            &[20, 3, 3, 0, 1, 1][..],
            &[23, 3, 3, 0, 3, 7, 7, 7],
            &[23, 3, 3, 0, 0],
        ]
        .concat();
        let ends = [6, 14, 19];
        for step in 1..flight.len() {
            let mut records = RecordTracker::default();
            for end in (0..=flight.len()).step_by(step) {
                assert_eq!(
                    records.are_whole(&flight[..end]),
                    end == 0 || ends.contains(&end),
                    "{end} in steps of {step}"
                );
            }
        }
    }

    #[test]
    fn a_hello_is_whole_when_its_message_is() {
        let record =
            |body: &[u8]| [&[22, 3, 1][..], &(body.len() as u16).to_be_bytes(), body].concat();
        let hello = |n: usize| [&[1, 0, (n >> 8) as u8, n as u8][..], &vec![7; n]].concat();
        let whole = record(&hello(300));
        for end in 0..whole.len() {
            assert!(!hello_is_whole(&whole[..end]).unwrap(), "{end}");
        }
        assert!(hello_is_whole(&whole).unwrap());
        let parts = hello(300);
        let two = [record(&parts[..100]), record(&parts[100..])].concat();
        assert!(hello_is_whole(&two).unwrap() && !hello_is_whole(&two[..two.len() - 1]).unwrap());
        for (name, bytes) in [
            ("HTTP", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
            ("an alert", vec![21, 3, 3, 0, 2, 2, 10]),
            ("a record of nothing", vec![22, 3, 3, 0, 0, 22, 3, 3, 0, 0]),
            ("a record too long", vec![22, 3, 3, 0x41, 0]),
            ("a ServerHello", record(&[2, 0, 0, 1, 7])),
            ("a hello of 16 MiB", record(&[1, 0xff, 0xff, 0xff, 7])),
            ("crumbs", record(&[1, 0])),
        ] {
            assert!(hello_is_whole(&bytes).is_err(), "{name}");
        }
    }
}

//! A handshake by a key server: the peer's bytes go there, its answers go to the peer, until both have the session's secrets. Nothing is
//! decided about the peer but that the key server's word is of the certificate that it gives.

use std::sync::Arc;
use std::time::Duration;

use canal_model::identity::Identity;
use canal_wire::keyrpc::{self, Begin, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use super::KeyError;
use super::channel::{Answer, Done, Exchange};
use super::requester::{Known, Requester};
use crate::sys::Deaf;
use crate::tls::{HANDSHAKE_TIMEOUT, PeerLeaf, TlsError, Transport, leaf_of};

/// Most bytes of a peer before its handshake has ended.
const HANDSHAKE_BYTES_MAX: usize = 64 << 10;
/// Room for each read of a peer.
const READ_BYTES: usize = 4 << 10;
/// A fatal `unexpected_message` (RFC 8446 §6.2), for who speaks no TLS.
const NOT_TLS: [u8; 7] = [21, 3, 3, 0, 2, 2, 10];

/// Whose handshake.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) identity: Identity,
    pub(crate) alpn: &'static [u8],
    /// Of a server.
    pub(crate) expected: Arc<[Identity]>,
}

/// What came of it.
pub(crate) struct Shaken {
    pub(crate) suite: u16,
    pub(crate) alpn: Vec<u8>,
    pub(crate) client_traffic: zeroize::Zeroizing<Vec<u8>>,
    pub(crate) server_traffic: zeroize::Zeroizing<Vec<u8>>,
    pub(crate) peer: Identity,
    pub(crate) leaf: Arc<PeerLeaf>,
    /// Of the peer, behind the handshake.
    pub(crate) early: Vec<u8>,
}

/// As the client.
pub(crate) async fn as_client<IO: Transport>(io: &mut IO, requester: &Requester, terms: &Terms) -> Result<Shaken, TlsError> {
    shake(io, requester, terms, keyrpc::Role::Client, &mut Vec::new(), Instant::now()).await
}

/// As the server. `given` is filled with what was read of the client, so that after [`KeyError::NoKeyServer`], when nothing was said to it
/// yet, a local handshake may begin with it.
pub(crate) async fn as_server<IO: Transport>(
    io: &mut IO,
    requester: &Requester,
    terms: &Terms,
    given: &mut Vec<u8>,
) -> Result<Shaken, TlsError> {
    let start = Instant::now();
    while !hello_is_whole(given)? {
        read(io, given).await?;
    }
    shake(io, requester, terms, keyrpc::Role::Server, given, start).await
}

async fn read<IO: Transport>(io: &mut IO, given: &mut Vec<u8>) -> Result<(), TlsError> {
    // A whole flight at once, as a rule; without this a vector takes 64 bytes at first.
    given.reserve(READ_BYTES);
    if io.read_buf(given).await.map_err(TlsError::Io)? == 0 {
        return Err(TlsError::Io(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the peer closed in the middle of the handshake")));
    }
    Ok(())
}

/// Whether records with a whole first message are there. What is in it is the key server's to judge.
fn hello_is_whole(bytes: &[u8]) -> Result<bool, TlsError> {
    let not = |what| Err(TlsError::KeyServer(KeyError::Peer(what)));
    let too_much = Err(TlsError::KeyServer(KeyError::TooMuch("a ClientHello of more than 15 KiB")));
    let (mut rest, mut message) = (bytes, 0usize);
    let mut wanted = None;
    loop {
        let [kind, major, _, high, low, body @ ..] = rest else {
            return if bytes.len() > keyrpc::BEGIN_BYTES_MAX { too_much } else { Ok(false) };
        };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        if *kind != 22 || *major != 3 || length == 0 || length > 1 << 14 {
            return not("bytes that are no TLS handshake");
        }
        if wanted.is_none() && message == 0 {
            match body {
                [1, a, b, c, ..] if length >= 4 => wanted = Some(4 + (usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c))),
                [1, ..] if length >= 4 => {}
                [] => {}
                [1, ..] => return not("a ClientHello in crumbs"),
                _ => return not("bytes that are no ClientHello"),
            }
        }
        if wanted.is_some_and(|w| w > keyrpc::BEGIN_BYTES_MAX - 512) || bytes.len() > keyrpc::BEGIN_BYTES_MAX {
            return too_much;
        }
        let Some(after) = body.get(length..) else { return Ok(false) };
        message += length;
        if wanted.is_some_and(|w| message >= w) {
            return Ok(true);
        }
        rest = after;
    }
}

async fn shake<IO: Transport>(
    io: &mut IO,
    requester: &Requester,
    terms: &Terms,
    role: keyrpc::Role,
    given: &mut Vec<u8>,
    start: Instant,
) -> Result<Shaken, TlsError> {
    let left = HANDSHAKE_TIMEOUT.saturating_sub(start.elapsed());
    let begin = Request::Begin(Begin {
        identity: terms.identity.clone(),
        role,
        alpn: vec![terms.alpn],
        expected: terms.expected.iter().take(keyrpc::EXPECTED_MAX).cloned().collect(),
        deadline_ms: u32::try_from(left.as_millis()).unwrap_or(u32::MAX),
        bytes: given,
    });
    let (known, mut exchange, mut answer) = requester.first(&requester.provider(), &begin).await.map_err(TlsError::KeyServer)?;
    let server = &known.place.name;
    // A first word for the peer: from here on no other key server can go on with it.
    let mut records = Records::default();
    loop {
        match answer {
            Answer::Send(bytes) => {
                if let Err(gone) = write(io, &bytes).await {
                    answer = last_word(&mut exchange, requester.trip(), gone).await?;
                    continue;
                }
            }
            Answer::Done(done) => {
                known.shook();
                write(io, &done.bytes).await?;
                return finished(*done, given, server, terms, role);
            }
            Answer::Refused(name, text) => {
                requester.counts().refused(server, name);
                return Err(TlsError::KeyServer(KeyError::Refused { server: server.clone(), name, text }));
            }
            Answer::Signature(_) | Answer::Certificates(_) => {
                return Err(TlsError::KeyServer(KeyError::Answer { server: server.clone(), what: "no handshake" }));
            }
        }
        answer = next(io, &mut exchange, (&mut *given, &mut records), requester.trip(), &known).await?;
    }
}

async fn write<IO: Transport>(io: &mut IO, bytes: &[u8]) -> Result<(), TlsError> {
    io.write_all(bytes).await.map_err(TlsError::Io)?;
    io.flush().await.map_err(TlsError::Io)
}

/// What a handshake whose peer is gone came to. One that the key server refuses is gone as soon as it hears the alert, which may be before the
/// key server's word for why is here.
async fn last_word(exchange: &mut Exchange, trip: Duration, gone: TlsError) -> Result<Answer, TlsError> {
    loop {
        match exchange.answer_within(trip).await {
            // Nobody hears it.
            Some(Some(Answer::Send(_))) => {}
            Some(Some(refused @ Answer::Refused(..))) => return Ok(refused),
            _ => return Err(gone),
        }
    }
}

/// How far the peer's records were followed.
#[derive(Debug, Default)]
struct Records {
    at: usize,
}

impl Records {
    /// Whether all bytes are whole records. `bytes` are those of the last time and more.
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

/// The key server's answer to whole records, which are the peer's flight as a rule. What follows them is no business of the key server's, so
/// the peer is not listened to meanwhile. `None`: there is none in time.
async fn after_flight<IO: Transport>(io: &IO, exchange: &mut Exchange, trip: Duration) -> Option<Option<Answer>> {
    let _deaf = io.tcp().and_then(Deaf::to);
    tokio::time::timeout(trip, exchange.answer()).await.ok()
}

/// Relays the peer's bytes until the key server says something. One that is silent for long is asked whether it lives: what it was given may
/// be a part of a record, to which there is no answer.
async fn next<IO: Transport>(
    io: &mut IO,
    exchange: &mut Exchange,
    (given, records): (&mut Vec<u8>, &mut Records),
    trip: Duration,
    known: &Known,
) -> Result<Answer, TlsError> {
    let lost = || TlsError::KeyServer(KeyError::Lost(known.place.name.clone()));
    let mut due: Option<Instant> = None;
    loop {
        let before = given.len();
        let silent = async {
            match due {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            answer = exchange.answer() => return answer.ok_or_else(lost),
            got = read(io, given) => {
                if let Err(gone) = got {
                    return last_word(exchange, trip, gone).await;
                }
                if given.len() > HANDSHAKE_BYTES_MAX {
                    return Err(TlsError::KeyServer(KeyError::TooMuch("more than 64 KiB before its handshake ended")));
                }
                exchange.more(&given[before..]).map_err(|_| lost())?;
                if !records.are_whole(given) {
                    due = Some(Instant::now() + trip);
                    continue;
                }
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

pub(super) fn finished(done: Done, given: &[u8], server: &str, terms: &Terms, role: keyrpc::Role) -> Result<Shaken, TlsError> {
    let answer = |what| TlsError::KeyServer(KeyError::Answer { server: server.into(), what });
    // What it says by now may have crossed what was given meanwhile: it counts from the first byte.
    let early = given.get(done.consumed..).ok_or_else(|| answer("more bytes consumed than it was given"))?.to_vec();
    let leaf = leaf_of(done.leaf, done.above, &done.peer).map_err(answer)?;
    if role == keyrpc::Role::Client && !terms.expected.contains(&done.peer) {
        return Err(answer("a peer that was not expected"));
    }
    Ok(Shaken {
        suite: done.suite,
        alpn: done.alpn,
        client_traffic: done.client_traffic,
        server_traffic: done.server_traffic,
        peer: done.peer,
        leaf,
        early,
    })
}

/// Tells a peer that speaks no TLS that it does not; best effort.
pub(crate) async fn turn_away<IO: Transport>(io: &mut IO) {
    let _ = io.write_all(&NOT_TLS).await;
    let _ = io.flush().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_whole_at_their_ends_only() {
        let flight = [&[20, 3, 3, 0, 1, 1][..], &[23, 3, 3, 0, 3, 7, 7, 7], &[23, 3, 3, 0, 0]].concat();
        let ends = [6, 14, 19];
        for step in 1..flight.len() {
            let mut records = Records::default();
            for end in (0..=flight.len()).step_by(step) {
                assert_eq!(records.are_whole(&flight[..end]), end == 0 || ends.contains(&end), "{end} in steps of {step}");
            }
        }
    }

    #[test]
    fn a_hello_is_whole_when_its_message_is() {
        let record = |body: &[u8]| [&[22, 3, 1][..], &(body.len() as u16).to_be_bytes(), body].concat();
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

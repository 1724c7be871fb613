//! A man in the middle between two honest sides modifies their bytes: neither side may complete a
//! handshake that the other did not intend.

use std::sync::LazyLock;

use canal_identity::{ClientIdentity, ServerIdentity};
use canal_tls::HandshakeFailure;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::runtime::Runtime;

use super::craft::{ALERT, CCS, CHANGE, HANDSHAKE, record};
use super::fixture::{FIXTURE, expected, runtime};

/// Modification of the bytes of one direction.
#[derive(Debug, Clone)]
pub(crate) enum Tampering {
    /// XORs a byte with this value.
    Flip(u8),
    /// Ends the stream at this position.
    Cut,
    /// Omits this many bytes from the stream.
    Drop(usize),
    /// Sends this many bytes twice.
    Repeat(usize),
    /// Inserts these bytes at the position.
    Insert(Vec<u8>),
    /// Replaces as many bytes by these.
    Replace(Vec<u8>),
}

/// A modification, with its direction and position.
#[derive(Debug, Clone)]
pub(crate) struct ByteChange {
    of_client: bool,
    at: usize,
    tampering: Tampering,
}

impl ByteChange {
    pub(crate) fn cut(of_client: bool, at: usize) -> Self {
        Self {
            of_client,
            at,
            tampering: Tampering::Cut,
        }
    }

    /// Returns the stream after the modification.
    fn apply(&self, whole: &[u8]) -> Vec<u8> {
        let (head, tail) = whole.split_at(self.at.min(whole.len()));
        let skip = |n: usize| &tail[n.min(tail.len())..];
        match &self.tampering {
            Tampering::Flip(x) => match tail {
                [] => whole.to_vec(),
                [first, rest @ ..] => [head, &[first ^ x], rest].concat(),
            },
            Tampering::Cut => head.to_vec(),
            Tampering::Drop(n) => [head, skip(*n)].concat(),
            Tampering::Repeat(n) => [head, &tail[..(*n).min(tail.len())], tail].concat(),
            Tampering::Insert(bytes) => [head, bytes, tail].concat(),
            Tampering::Replace(bytes) => [head, bytes, skip(bytes.len())].concat(),
        }
    }

    /// Returns how many bytes of the stream must be known so that the modified stream is known up
    /// to them.
    fn reach(&self) -> usize {
        self.at
            + match &self.tampering {
                Tampering::Flip(_) => 1,
                Tampering::Cut => 0,
                Tampering::Drop(n) | Tampering::Repeat(n) => *n,
                Tampering::Insert(_) => 0,
                Tampering::Replace(bytes) => bytes.len(),
            }
    }
}

/// Forwards one direction to its end, with the modification. Returns the bytes received and the
/// bytes sent.
async fn carry(
    mut from: ReadHalf<DuplexStream>,
    mut to: WriteHalf<DuplexStream>,
    change: Option<ByteChange>,
) -> (Vec<u8>, Vec<u8>) {
    let (mut heard, mut said, mut buf) = (Vec::new(), Vec::new(), vec![0; 8192]);
    loop {
        let n = from.read(&mut buf).await.unwrap_or(0);
        heard.extend_from_slice(&buf[..n]);
        let known = match &change {
            None => heard.clone(),
            Some(c) if n > 0 && heard.len() < c.reach() => heard[..heard.len().min(c.at)].to_vec(),
            Some(c) => c.apply(&heard),
        };
        let cut = change
            .as_ref()
            .is_some_and(|c| matches!(c.tampering, Tampering::Cut) && heard.len() >= c.at);
        let sent = to.write_all(&known[said.len().min(known.len())..]).await;
        said = known;
        if n == 0 || cut || sent.is_err() {
            let _ = to.shutdown().await;
            return (heard, said);
        }
    }
}

/// A handshake of two honest sides with a man in the middle: the result of both sides, and both
/// directions as received and as sent.
struct TamperCase {
    server: Result<(), HandshakeFailure>,
    client: Result<(), HandshakeFailure>,
    of_client: (Vec<u8>, Vec<u8>),
    of_server: (Vec<u8>, Vec<u8>),
}

async fn meet(
    (server, client): (ServerIdentity, ClientIdentity),
    change: Option<ByteChange>,
) -> TamperCase {
    let ((a, b), (c, d)) = (tokio::io::duplex(64 << 10), tokio::io::duplex(64 << 10));
    // Each side closes without a message when it is done, so that the other side ends too.
    let client = tokio::spawn(async move {
        client
            .connect(a, &expected())
            .await
            .map(|(s, _)| s)
            .map_err(|e| e.refusal())
    });
    let server = tokio::spawn(async move {
        server
            .accept(d)
            .await
            .map(|(s, _)| s)
            .map_err(|e| e.refusal())
    });
    let ((from_client, to_client), (from_server, to_server)) =
        (tokio::io::split(b), tokio::io::split(c));
    let (of_client, of_server) = match change {
        Some(c) if c.of_client => (Some(c), None),
        change => (None, change),
    };
    let there = tokio::spawn(carry(from_client, to_server, of_client));
    let back = tokio::spawn(carry(from_server, to_client, of_server));
    let client = client.await.expect("no panic of the client").map(drop);
    let server = server.await.expect("no panic of the server").map(drop);
    let (of_client, of_server) = (there.await.unwrap(), back.await.unwrap());
    TamperCase {
        server,
        client,
        of_client,
        of_server,
    }
}

/// Returns the results of the server and of the client.
pub(crate) fn handshake_through(
    change: &ByteChange,
) -> (Result<(), HandshakeFailure>, Result<(), HandshakeFailure>) {
    let tale = runtime().block_on(meet(FIXTURE.pair(), Some(change.clone())));
    (tale.server, tale.client)
}

/// Returns all bytes of client and server in an honest handshake.
pub(crate) fn recorded() -> (Vec<u8>, Vec<u8>) {
    static RECORDED: LazyLock<(Vec<u8>, Vec<u8>)> = LazyLock::new(|| {
        let tale = runtime().block_on(meet(FIXTURE.pair(), None));
        assert_eq!(
            (tale.server, tale.client),
            (Ok(()), Ok(())),
            "an honest handshake"
        );
        (tale.of_client.0, tale.of_server.0)
    });
    RECORDED.clone()
}

/// Returns the relevant content of a stream (RFC 8446 §5). The record boundaries of a plaintext
/// hello and dummy change_cipher_spec records are not relevant. Neither are a plaintext warning
/// while no keys are in use, and the outer type and version of encrypted records. It ends at the
/// first incomplete record.
fn meaning(stream: &[u8]) -> Vec<u8> {
    let (mut hello, mut out, mut rest) = (Vec::new(), Vec::new(), stream);
    while rest.len() >= 5 {
        let end = 5 + usize::from(u16::from_be_bytes([rest[3], rest[4]]));
        if rest.len() < end {
            break;
        }
        let body = &rest[5..end];
        let greeted = hello.len() >= 4
            && hello.len() >= 4 + hello[1..4].iter().fold(0, |n, b| n << 8 | usize::from(*b));
        match (rest[0], body) {
            (CHANGE, [1]) | (ALERT, [1, _]) => {}
            (HANDSHAKE, _) if !greeted => hello.extend_from_slice(body),
            (kind, _) if !greeted => out.extend([&[kind], body].concat()),
            _ => out.extend_from_slice(&rest[3..end]),
        }
        rest = &rest[end..];
    }
    [hello, out].concat()
}

/// Checks that a side that completed the handshake received what the other side sent, up to the end
/// of its handshake.
fn check(change: &ByteChange, tale: &TamperCase) -> Result<(), String> {
    let said = |(heard, said): &(Vec<u8>, Vec<u8>)| (meaning(heard), meaning(said));
    let same = |stream: &(Vec<u8>, Vec<u8>)| {
        let (meant, got) = said(stream);
        got.starts_with(&meant)
    };
    // The server's verification covers everything: from its own flight through the client's
    // Finished.
    if tale.server.is_ok() && !(same(&tale.of_client) && same(&tale.of_server)) {
        return Err(format!(
            "{change:?}: the server took what nobody meant; the client: {:?}",
            tale.client
        ));
    }
    // The client finishes first, and until then only the server's flight is verified.
    if tale.client.is_ok() && !same(&tale.of_server) {
        return Err(format!(
            "{change:?}: the client took what the server did not say; the server: {:?}",
            tale.server
        ));
    }
    Ok(())
}

fn one(
    runtime: &Runtime,
    pair: &(ServerIdentity, ClientIdentity),
    change: ByteChange,
) -> Result<TamperCase, String> {
    let tale = runtime.block_on(meet(pair.clone(), Some(change.clone())));
    check(&change, &tale).map(|()| tale)
}

#[test]
fn a_flipped_bit_of_either_first_flight() {
    let (client, server) = recorded();
    let (runtime, pair) = (runtime(), FIXTURE.pair());
    let mut wrong = Vec::new();
    for (of_client, stream) in [(true, &client), (false, &server)] {
        for at in 0..stream.len() {
            // One bit of each byte is flipped, another one for each next byte.
            let change = ByteChange {
                of_client,
                at,
                tampering: Tampering::Flip(1 << (at * 3 % 8)),
            };
            match one(&runtime, &pair, change) {
                Err(text) => wrong.push(text),
                // Only the outer type and version of a record may be modified unnoticed.
                Ok(tale) if tale.server.is_ok() => {
                    let heard = if of_client {
                        tale.of_client.0
                    } else {
                        tale.of_server.0
                    };
                    // Signatures differ in length, so this stream may end before the recorded one.
                    if at < heard.len() && offset_in_record(&heard, at) > 2 {
                        wrong.push(format!("byte {at}, of the client: {of_client}"));
                    }
                }
                Ok(_) => {}
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns the position of a byte within its record.
fn offset_in_record(stream: &[u8], at: usize) -> usize {
    let mut start = 0;
    loop {
        let end =
            start + 5 + usize::from(u16::from_be_bytes([stream[start + 3], stream[start + 4]]));
        if at < end {
            return at - start;
        }
        start = end;
    }
}

fn tamperings() -> impl Strategy<Value = Tampering> {
    let bytes = || proptest::collection::vec(any::<u8>(), 1..40);
    prop_oneof![
        4 => (1..=255_u8).prop_map(Tampering::Flip),
        1 => Just(Tampering::Cut),
        2 => (1..200_usize).prop_map(Tampering::Drop),
        2 => (1..200_usize).prop_map(Tampering::Repeat),
        2 => bytes().prop_map(Tampering::Insert),
        2 => bytes().prop_map(Tampering::Replace),
        1 => Just(Tampering::Insert(CCS.to_vec())),
        1 => (any::<u8>(), any::<u8>()).prop_map(|(level, what)| Tampering::Insert(record(ALERT, &[level, what]))),
        1 => (0..3_u8).prop_map(|kind| Tampering::Insert(record(kind + 21, &[]))),
    ]
}

#[test]
fn any_change_of_a_whole_handshake() {
    let (client, server) = recorded();
    let (runtime, pair) = (runtime(), FIXTURE.pair());
    // Half of the changes are at a record's edge or in its header, where the state machines are.
    let edges = |stream: &[u8]| {
        (0..stream.len())
            // Five bytes are the record's header, four that of the first message, and byte 9 is the
            // first of its content.
            .filter(|at| offset_in_record(stream, *at) <= 9)
            .collect::<Vec<_>>()
    };
    let places = (edges(&client), edges(&server));
    let change = (
        any::<bool>(),
        any::<bool>(),
        any::<prop::sample::Index>(),
        tamperings(),
    )
        .prop_map(move |(of_client, edge, index, tampering)| {
            let (stream, edges) = if of_client {
                (&client, &places.0)
            } else {
                (&server, &places.1)
            };
            let at = if edge {
                edges[index.index(edges.len())]
            } else {
                index.index(stream.len())
            };
            ByteChange {
                of_client,
                at,
                tampering,
            }
        });
    let config = Config {
        // About ten times proptest's default. Nobody measured the value.
        cases: 2500,
        // A test run writes no files into the source tree.
        failure_persistence: None,
        ..Config::default()
    };
    let ran = TestRunner::new(config).run(&change, |change| {
        one(&runtime, &pair, change)
            .map(drop)
            .map_err(TestCaseError::fail)
    });
    if let Err(e) = ran {
        panic!("{e}");
    }
}

//! Properties over mutated and generated messages. No input panics. The result does not depend on
//! how the bytes arrive. Writing is the inverse of parsing. The codec accepts nothing that httparse
//! refuses.

use std::sync::LazyLock;

use crate::receive::{ReceiveOutcome, forward, receive};
use canal_h1::cases::requests;
use canal_h1::{
    BodyPart, BodyReader, CHUNK_END, ChunkStart, ForwardOptions, Framing, LAST_CHUNK,
    MessageLimits, OutHead, RequestHead, RequestKind, ResponseHead, detect, write_last_chunk,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

const LIMITS: MessageLimits = MessageLimits::DEFAULT;

static SEEDS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    requests()
        .into_iter()
        .map(|case| case.bytes.into_owned())
        .filter(|bytes| bytes.len() < 2000)
        .collect()
});

/// Bytes and words on which HTTP parsers have differed.
const FRAGMENTS: &[&[u8]] = &[
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b" ",
    b"\t",
    b":",
    b";",
    b",",
    b"\"",
    b"\\",
    b"\0",
    b"\x0b",
    b"\x7f",
    b"\xa0",
    b"0",
    b"5",
    b"f",
    b"x",
    b"0\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Host: a\r\n",
    b"Connection: close\r\n",
    b"chunked",
    b"HTTP/1.1",
    b"GET / HTTP/1.1\r\n",
];

#[derive(Debug, Clone)]
enum Mutation {
    Insert(Index, &'static [u8]),
    Remove(Index, usize),
    Replace(Index, u8),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    prop_oneof![
        (any::<Index>(), select(FRAGMENTS))
            .prop_map(|(at, fragment)| Mutation::Insert(at, fragment)),
        (any::<Index>(), 1..12usize).prop_map(|(at, len)| Mutation::Remove(at, len)),
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Mutation::Replace(at, byte)),
    ]
}

fn mutant() -> impl Strategy<Value = Vec<u8>> {
    (any::<Index>(), vec(mutation(), 0..4)).prop_map(|(seed, mutations)| {
        let mut bytes = seed.get(&SEEDS).clone();
        for mutation in mutations {
            match mutation {
                Mutation::Insert(at, fragment) => {
                    let at = at.index(bytes.len() + 1);
                    bytes.splice(at..at, fragment.iter().copied());
                }
                Mutation::Remove(at, len) => {
                    let at = at.index(bytes.len() + 1);
                    bytes.drain(at..(at + len).min(bytes.len()));
                }
                Mutation::Replace(at, byte) if !bytes.is_empty() => {
                    let at = at.index(bytes.len());
                    bytes[at] = byte;
                }
                Mutation::Replace(..) => {}
            }
        }
        bytes
    })
}

fn token() -> impl Strategy<Value = Vec<u8>> {
    "[!#$%&'*+.^_`|~0-9A-Za-z-]{1,20}".prop_map(String::into_bytes)
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    vec(
        prop_oneof![4 => 0x21..=0x7eu8, 1 => Just(b' '), 1 => Just(b'\t'), 1 => 0x80..=0xffu8],
        0..30,
    )
    .prop_map(|bytes| bytes.trim_ascii().to_vec())
}

/// Fields without a meaning to the codec, which it must forward unchanged.
fn pairs() -> impl Strategy<Value = Vec<(Vec<u8>, Vec<u8>)>> {
    vec(
        (
            token().prop_map(|name| [b"x-", &name[..]].concat()),
            value(),
        ),
        0..8,
    )
}

fn borrow(pairs: &[(Vec<u8>, Vec<u8>)]) -> impl Iterator<Item = (&[u8], &[u8])> + Clone {
    pairs.iter().map(|(name, value)| (&name[..], &value[..]))
}

fn framing() -> impl Strategy<Value = Framing> {
    prop_oneof![
        Just(Framing::None),
        (0..1_000_000u64).prop_map(Framing::Length),
        Just(Framing::Chunked)
    ]
}

/// Compares a reading in pieces with a reading of the whole. The pieces may end undecided where the
/// whole was refused; otherwise both must be equal.
fn agree(whole: &ReceiveOutcome, pieces: &ReceiveOutcome) -> bool {
    whole == pieces
        || (matches!(
            whole,
            ReceiveOutcome::RefusedHead(_) | ReceiveOutcome::RefusedBody(_)
        ) && *pieces == ReceiveOutcome::Unfinished)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_survived(bytes in vec(any::<u8>(), 0..300)) {
        receive(&bytes, &[]);
        detect(&bytes, &LIMITS);
        for asked in [RequestKind::Ordinary, RequestKind::Head, RequestKind::Connect, RequestKind::Upgrade] {
            let _ = ResponseHead::new().parse(&bytes, &LIMITS, asked);
        }
        let _ = BodyReader::new(Framing::Chunked).skim(&bytes, &LIMITS);
    }

    #[test]
    fn arrival_does_not_matter(bytes in mutant(), cuts in vec(any::<Index>(), 0..6)) {
        let whole = receive(&bytes, &[]);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).filter(|&cut| cut > 0).collect();
        cuts.sort_unstable();
        let pieces = receive(&bytes, &cuts);
        prop_assert!(agree(&whole, &pieces), "whole {whole:?}, in pieces {pieces:?}");
    }

    #[test]
    fn forwarding_is_accepted_and_idempotent(bytes in mutant()) {
        let mut head = RequestHead::new();
        if let Ok(Some(_)) = head.parse(&bytes, &LIMITS) {
            let once = forward(&head, &bytes);
            let mut again = RequestHead::new();
            prop_assert_eq!(again.parse(&once, &LIMITS), Ok(Some(once.len())));
            let (before, after) = (head.view(&bytes), again.view(&once));
            prop_assert_eq!(before.framing(), after.framing());
            prop_assert_eq!(before.path(), after.path());
            prop_assert_eq!(before.query(), after.query());
            prop_assert_eq!(forward(&again, &once), once);
        }
    }

    #[test]
    fn httparse_accepts_every_accepted_message(bytes in mutant()) {
        let mut head = RequestHead::new();
        if let Ok(Some(len)) = head.parse(&bytes, &LIMITS) {
            let mut slots = [httparse::EMPTY_HEADER; 128];
            let mut theirs = httparse::Request::new(&mut slots);
            prop_assert_eq!(theirs.parse(&bytes), Ok(httparse::Status::Complete(len)));
            let view = head.view(&bytes);
            prop_assert_eq!(theirs.method.map(str::as_bytes), Some(view.method()));
            prop_assert_eq!(theirs.path.map(str::as_bytes), Some(view.target()));
            let ours: Vec<_> = view.fields().iter().map(|field| (field.name, field.value)).collect();
            let theirs: Vec<_> = theirs.headers.iter().map(|header| (header.name.as_bytes(), header.value)).collect();
            prop_assert_eq!(ours, theirs);
        }
    }

    #[test]
    fn parsing_inverts_request_writing(
        method in token().prop_filter("may have no body or path", |m| !matches!(&m[..], b"CONNECT" | b"TRACE" | b"PRI")),
        target in "/[!-\"$-~]{0,40}",
        host in "[a-z0-9.-]{1,20}(:[1-9][0-9]{0,3})?",
        pairs in pairs(),
        framing in framing(),
    ) {
        let mut out = OutHead::new();
        let plan = ForwardOptions { framing, target: Some(target.as_bytes()), ..ForwardOptions::default() };
        out.encode_request(&method, host.as_bytes(), borrow(&pairs), &plan)?;
        let mut sent = Vec::new();
        out.write_to(&[], &mut sent);
        let mut head = RequestHead::new();
        prop_assert_eq!(head.parse(&sent, &LIMITS), Ok(Some(sent.len())));
        let view = head.view(&sent);
        prop_assert_eq!(view.method(), &method[..]);
        prop_assert_eq!(view.target(), target.as_bytes());
        prop_assert_eq!(view.authority(), host.as_bytes());
        prop_assert_eq!(view.framing(), framing);
        let got: Vec<_> = view.fields().iter().filter(|f| f.name.starts_with(b"x-")).map(|f| (f.name, f.value)).collect();
        prop_assert_eq!(got, borrow(&pairs).collect::<Vec<_>>());
    }

    #[test]
    fn parsing_inverts_response_writing(status in 200..600u16, pairs in pairs(), framing in framing()) {
        let bodiless = matches!(status, 204 | 304);
        let framing = if bodiless { Framing::None } else { framing };
        let mut out = OutHead::new();
        out.encode_response(status, false, borrow(&pairs), &ForwardOptions { framing, ..ForwardOptions::default() })?;
        let mut sent = Vec::new();
        out.write_to(&[], &mut sent);
        let mut head = ResponseHead::new();
        prop_assert_eq!(head.parse(&sent, &LIMITS, RequestKind::Ordinary), Ok(Some(sent.len())));
        let view = head.view(&sent);
        prop_assert_eq!(view.status(), status);
        let want = if framing == Framing::None && !bodiless { Framing::UntilClose } else { framing };
        prop_assert_eq!(view.framing(), want);
        let got: Vec<_> = view.fields().iter().filter(|f| f.name.starts_with(b"x-")).map(|f| (f.name, f.value)).collect();
        prop_assert_eq!(got, borrow(&pairs).collect::<Vec<_>>());
    }

    #[test]
    fn reading_inverts_chunking(chunks in vec(vec(any::<u8>(), 1..40), 0..6), trailers in pairs(), cut in any::<Index>()) {
        let mut wire = Vec::new();
        for chunk in &chunks {
            wire.extend_from_slice(ChunkStart::new(chunk.len()).expect("not empty").as_bytes());
            wire.extend_from_slice(chunk);
            wire.extend_from_slice(CHUNK_END);
        }
        if trailers.is_empty() { wire.extend_from_slice(LAST_CHUNK) } else { write_last_chunk(borrow(&trailers), &mut wire)? }
        let body_len = wire.len();
        wire.extend_from_slice(b"GET");

        let mut reader = BodyReader::new(Framing::Chunked);
        let (mut at, mut payload) = (0, Vec::new());
        let mut end = cut.index(wire.len() + 1);
        let read_trailers: Vec<(Vec<u8>, Vec<u8>)> = loop {
            let input = &wire[at..end];
            let step = reader.read(input, &LIMITS)?;
            at += step.consumed;
            match step.part {
                BodyPart::Data(span) => payload.extend_from_slice(&input[span]),
                BodyPart::NeedInput => end = wire.len(),
                BodyPart::End => break reader.trailers(input).iter().map(|f| (f.name.to_vec(), f.value.to_vec())).collect(),
            }
        };
        prop_assert_eq!(payload, chunks.concat());
        prop_assert_eq!(at, body_len);
        prop_assert_eq!(read_trailers, trailers.clone());

        let skim = BodyReader::new(Framing::Chunked).skim(&wire, &LIMITS)?;
        prop_assert_eq!((skim.consumed, skim.payload_bytes, skim.is_end), (body_len, chunks.concat().len() as u64, true));
    }
}

//! Tests of the key server protocol: round trips of frames, the error of each malformed frame, and
//! random bytes.

use proptest::prelude::*;

use super::*;

fn identity(account: &str) -> Identity {
    format!("spiffe://alpha.example/ns/shop/sa/{account}")
        .parse()
        .unwrap()
}

fn encoded(id: u64, request: &KeyRequest<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    request.encode(id, &mut out).unwrap();
    out
}

fn requests() -> Vec<KeyRequest<'static>> {
    let begin = |role, expected: &[&str], bytes| {
        let expected = expected.iter().map(|e| identity(e)).collect();
        KeyRequest::Begin(HandshakeRequest {
            identity: identity("web"),
            role,
            alpn: vec![b"h2", b"x"],
            expected,
            deadline_ms: 250,
            bytes,
        })
    };
    let sign = |key, shown, scheme, deadline_ms, input: &'static [u8]| KeyRequest::Sign {
        key,
        presented: shown,
        scheme,
        deadline_ms,
        input,
    };
    vec![
        begin(HandshakeRole::Client, &["a", "b"], b""),
        begin(HandshakeRole::Server, &[], b"\x16\x03\x01"),
        KeyRequest::More {
            bytes: &[7; MORE_BYTES_MAX],
        },
        sign(
            KeyName::Identity(identity("web")),
            None,
            // 0x0403 is ecdsa_secp256r1_sha256, and 0x0804 is rsa_pss_rsae_sha256 (RFC 8446
            // §4.2.3).
            0x0403,
            0,
            b"input",
        ),
        sign(
            KeyName::File("alpha/shop/web".parse().unwrap()),
            Some([9; 32]),
            0x0804,
            9,
            b"",
        ),
        sign(
            KeyName::Service("alpha/shop/web".parse().unwrap()),
            Some([0; 32]),
            0x0403,
            1,
            b"x",
        ),
        KeyRequest::Chain {
            key: KeyName::File("alpha/shop/api".parse().unwrap()),
        },
        KeyRequest::Abandon,
        KeyRequest::Ping,
    ]
}

fn responses() -> Vec<KeyResponse<'static>> {
    let mut all = vec![
        KeyResponse::Send { bytes: b"flight" },
        KeyResponse::Done(HandshakeResult {
            bytes: b"finished",
            consumed: 77,
            suite: 0x1302,
            alpn: b"h2",
            client_traffic: &[1; 92],
            server_traffic: &[2; 92],
            peer: identity("peer"),
            leaf: &[3; 700],
            above: IssuerChain::default(),
        }),
        KeyResponse::Signature { bytes: &[4; 256] },
        KeyResponse::Certificates {
            chain: vec![&[5; 900], &[6; 800]],
        },
        KeyResponse::Pong,
    ];
    all.extend(KeyRefusal::ALL.iter().map(|name| KeyResponse::Refused {
        name: *name,
        text: "why",
    }));
    all
}

#[test]
fn every_frame_round_trips() {
    let (requests, responses) = (requests(), responses());
    let mut out = Vec::new();
    for (id, r) in requests.iter().enumerate() {
        r.encode(id as u64, &mut out).unwrap();
    }
    for (id, r) in responses.iter().enumerate() {
        r.encode(u64::MAX - id as u64, &mut out).unwrap();
    }
    let mut rest = out.as_slice();
    for (id, r) in requests.iter().enumerate() {
        let (frame, length) = split(rest).unwrap().unwrap();
        assert_eq!((frame.id, frame.request().as_ref()), (id as u64, Ok(r)));
        assert!(frame.response().is_err());
        rest = &rest[length..];
    }
    for (id, r) in responses.iter().enumerate() {
        let (frame, length) = split(rest).unwrap().unwrap();
        assert_eq!(
            (frame.id, frame.response().as_ref()),
            (u64::MAX - id as u64, Ok(r))
        );
        assert!(frame.request().is_err());
        rest = &rest[length..];
    }
    assert_eq!(split(rest), Ok(None));
}

#[test]
fn issuer_chains_round_trip_and_an_empty_one_costs_nothing() {
    let links = [
        // A leading zero byte of a serial number is significant to DER and must survive.
        IssuerSerial {
            issuer: b"the intermediate's issuer",
            serial: &[0, 0x80, 1],
        },
        IssuerSerial {
            issuer: b"root",
            serial: &[5],
        },
    ];
    let mut bytes = Vec::new();
    links
        .iter()
        .for_each(|link| link.append(&mut bytes).unwrap());
    let KeyResponse::Done(bare) = responses().remove(1) else {
        panic!("the second is Done")
    };
    let encoded = |above| {
        let mut out = Vec::new();
        KeyResponse::Done(HandshakeResult {
            above,
            ..bare.clone()
        })
        .encode(7, &mut out)
        .unwrap();
        out
    };
    let (with, without) = (
        encoded(IssuerChain::read(&bytes).unwrap()),
        encoded(IssuerChain::default()),
    );
    assert_eq!(with.len(), without.len() + bytes.len());
    let Ok(KeyResponse::Done(done)) = split(&with).unwrap().unwrap().0.response() else {
        panic!("a Done")
    };
    assert_eq!(done.above.links().collect::<Vec<_>>(), links);
    let Ok(KeyResponse::Done(done)) = split(&without).unwrap().unwrap().0.response() else {
        panic!("a Done")
    };
    assert_eq!(done.above.links().count(), 0);
    // Lengths are 16 bits.
    let long = vec![0; 1 << 16];
    assert_eq!(
        IssuerSerial {
            issuer: &long,
            serial: &[1]
        }
        .append(&mut bytes)
        .unwrap_err()
        .count,
        1 << 16
    );
    // Nine links of two empty fields, each with a length of two bytes.
    assert_eq!(IssuerChain::read(&[0; 36]).unwrap().links().count(), 9);
}

#[test]
fn an_incomplete_frame_is_awaited() {
    let frame = encoded(9, &requests()[0]);
    for end in 0..frame.len() {
        assert_eq!(split(&frame[..end]), Ok(None), "{end}");
    }
    assert_eq!(split(&frame).unwrap().unwrap().1, frame.len());
}

/// A case's name, the bytes of a frame, and the reason why it is malformed.
type FrameCase = (&'static str, Vec<u8>, FrameError);

fn frame(length: u32, rest: &[u8]) -> Vec<u8> {
    [&length.to_be_bytes()[..], rest].concat()
}

fn frame_of_kind(kind: u8, body: &[u8]) -> Vec<u8> {
    frame(
        9 + body.len() as u32,
        &[&[0; 8][..], &[kind], body].concat(),
    )
}

fn name(s: &str) -> Vec<u8> {
    [&(s.len() as u16).to_be_bytes()[..], s.as_bytes()].concat()
}

fn encoded_identity() -> Vec<u8> {
    name("spiffe://a.example/ns/b/sa/c")
}

fn malformed_lengths_and_kinds() -> Vec<FrameCase> {
    vec![
        ("too long", frame(65_546, &[]), FrameError::Long(65_546)),
        (
            "absurdly long",
            frame(u32::MAX, &[]),
            FrameError::Long(u32::MAX),
        ),
        (
            "no room for a kind",
            frame(8, &[0; 8]),
            FrameError::Short(8),
        ),
        ("empty", frame(0, &[]), FrameError::Short(0)),
        (
            "no such kind",
            frame_of_kind(0x7f, b""),
            FrameError::Kind(0x7f, "request"),
        ),
        (
            "a response",
            frame_of_kind(PONG, b""),
            FrameError::Kind(PONG, "request"),
        ),
    ]
}

/// A Begin has at most 8 protocols of 255 bytes and 64 expected identities. A case beyond a limit
/// exceeds it by one.
fn malformed_begins() -> Vec<FrameCase> {
    // Counts and the lengths of names have two bytes, in network order.
    let id = encoded_identity();
    // The encoder refuses 256 bytes of a protocol, so the encoding is written by hand.
    let begin_frame = |body: &[&[u8]]| frame_of_kind(BEGIN, &body.concat());
    let long_protocol = [&[1, 0][..], &[0; 256]].concat();
    vec![
        (
            "nothing in it",
            begin_frame(&[]),
            FrameError::Truncated("identity"),
        ),
        (
            "a name's length lies",
            begin_frame(&[&[0, 9], b"spiffe"]),
            FrameError::Truncated("identity"),
        ),
        (
            "a name too long",
            // The length 0x0801, one more than 2,048.
            begin_frame(&[&[8, 1]]),
            FrameError::Oversized("identity", 2049, 2048),
        ),
        (
            "not UTF-8",
            begin_frame(&[&[0, 1, 0xff]]),
            FrameError::Text("identity"),
        ),
        (
            "no identity",
            begin_frame(&[&name("spiffe://a.example/x")]),
            FrameError::Name("identity"),
        ),
        (
            "no role",
            begin_frame(&[&id]),
            FrameError::Truncated("role"),
        ),
        (
            "no such role",
            begin_frame(&[&id, &[2]]),
            FrameError::Value("role", 2),
        ),
        (
            "nine protocols",
            begin_frame(&[&id, &[0], &[0, 9]]),
            FrameError::Oversized("ALPN", 9, 8),
        ),
        (
            "a protocol too long",
            begin_frame(&[&id, &[0], &[0, 1], &long_protocol]),
            FrameError::Oversized("ALPN", 256, 255),
        ),
        (
            "65 expected",
            begin_frame(&[&id, &[0], &[0, 0], &[0, 65]]),
            FrameError::Oversized("expected identities", 65, 64),
        ),
        (
            "one of two expected",
            begin_frame(&[&id, &[0], &[0, 0], &[0, 2], &id]),
            FrameError::Truncated("expected identity"),
        ),
        (
            "no deadline",
            begin_frame(&[&id, &[0], &[0, 0], &[0, 0], &[0, 0, 0]]),
            FrameError::Truncated("deadline"),
        ),
    ]
}

fn malformed_pings_chains_and_signs() -> Vec<FrameCase> {
    let id = encoded_identity();
    vec![
        (
            "a ping with a body",
            frame_of_kind(PING, b"xy"),
            FrameError::Trailing(2),
        ),
        (
            "a chain with more",
            frame_of_kind(CHAIN, &[&id[..], b"z"].concat()),
            FrameError::Trailing(1),
        ),
        (
            "a key's name is not valid",
            frame_of_kind(CHAIN, &name("../etc/passwd")),
            FrameError::Name("key"),
        ),
        (
            "a key's identity is not valid",
            frame_of_kind(CHAIN, &name("spiffe://a/b")),
            FrameError::Name("key"),
        ),
        (
            "a service without a namespace",
            frame_of_kind(CHAIN, &name("shop")),
            FrameError::Name("key"),
        ),
        (
            "a file without a namespace",
            frame_of_kind(CHAIN, &name("file:shop")),
            FrameError::Name("key"),
        ),
        (
            "a file without an owner",
            frame_of_kind(CHAIN, &name("file:shop/web")),
            FrameError::Name("key"),
        ),
        (
            "no word of which key",
            frame_of_kind(SIGN, &id),
            FrameError::Truncated("the key's hash"),
        ),
        (
            "a hash cut off",
            frame_of_kind(SIGN, &[&id[..], &[0, 31], &[7; 31]].concat()),
            FrameError::Truncated("the key's hash"),
        ),
        (
            "a hash too long",
            frame_of_kind(SIGN, &[&id[..], &[0, 33]].concat()),
            FrameError::Oversized("the key's hash", 33, 32),
        ),
        (
            "no scheme",
            frame_of_kind(SIGN, &[&id[..], &[0, 0]].concat()),
            FrameError::Truncated("scheme"),
        ),
    ]
}

/// A chain has at most 10 certificates, 9 of them above the leaf. A case beyond a limit exceeds it
/// by one.
fn malformed_responses() -> Vec<FrameCase> {
    let done = |above: &[u8]| {
        let mut out = Vec::new();
        responses()[1].encode(1, &mut out).unwrap();
        frame_of_kind(DONE, &[&out[HEADER..], above].concat())
    };
    vec![
        (
            "a request",
            frame_of_kind(PING, b""),
            FrameError::Kind(PING, "response"),
        ),
        (
            "no such refusal",
            frame_of_kind(REFUSED, &[0xff, 0xff, 0, 0]),
            FrameError::Value("refusal", 0xffff),
        ),
        (
            "a text too long",
            // The length 0x0401, one more than 1,024.
            frame_of_kind(REFUSED, &[0, 1, 4, 1]),
            FrameError::Oversized("text", 1025, 1024),
        ),
        (
            "eleven certificates",
            frame_of_kind(CERTIFICATES, &[0, 11]),
            FrameError::Oversized("chain", 11, 10),
        ),
        (
            "a certificate cut off",
            frame_of_kind(CERTIFICATES, &[0, 1, 0, 0, 0, 2, 9]),
            FrameError::Truncated("certificate"),
        ),
        (
            "a length beyond all",
            frame_of_kind(DONE, &[0xff; 4]),
            FrameError::Truncated("bytes"),
        ),
        (
            "a link cut off",
            done(&[0, 1, 9, 0, 2, 7]),
            FrameError::Truncated("serial number"),
        ),
        (
            "a link without a serial number",
            done(&[0, 1, 9]),
            FrameError::Truncated("serial number"),
        ),
        (
            // Ten links of four bytes.
            "ten above",
            done(&[0; 40]),
            FrameError::Oversized("certificates above the leaf", 10, 9),
        ),
        (
            "a secret too long",
            // One byte more than the largest secret with its key and IV, TRAFFIC_MAX.
            // Before it: no bytes, none consumed, the suite 0x1301 and no protocol of ALPN.
            frame_of_kind(DONE, &[0, 0, 0, 0, 0, 0, 0, 0, 0x13, 1, 0, 0, 0, 93]),
            FrameError::Oversized("client traffic", 93, 92),
        ),
    ]
}

#[test]
fn malformed_frames_have_a_reason() {
    let cases = [
        malformed_lengths_and_kinds(),
        malformed_begins(),
        malformed_pings_chains_and_signs(),
    ];
    for (what, bytes, want) in cases.into_iter().flatten() {
        let got = split(&bytes).and_then(|f| f.expect("a whole frame or an error").0.request());
        assert_eq!(got, Err(want), "{what}");
        assert_eq!(
            want.ends_channel(),
            matches!(want, FrameError::Long(_) | FrameError::Short(_))
        );
        assert!(!want.to_string().is_empty());
    }
    for (what, bytes, want) in malformed_responses() {
        assert_eq!(
            split(&bytes).and_then(|f| f.expect("a whole frame").0.response()),
            Err(want),
            "{what}"
        );
    }
}

/// Nine protocols, 256 bytes of a protocol, 65 identities and 11 certificates are one more than the
/// limits.
#[test]
fn oversize_frames_are_not_encoded() {
    let begin = |alpn, expected, bytes| HandshakeRequest {
        identity: identity("web"),
        role: HandshakeRole::Client,
        alpn,
        expected,
        deadline_ms: 0,
        bytes,
    };
    let big = vec![0; BODY_MAX + 1];
    let cases: Vec<(&str, KeyRequest<'_>, &str)> = vec![
        (
            "nine protocols",
            KeyRequest::Begin(begin(vec![b"x"; 9], vec![], b"")),
            "ALPN",
        ),
        (
            "a long protocol",
            KeyRequest::Begin(begin(vec![&big[..256]], vec![], b"")),
            "ALPN",
        ),
        (
            "65 expected",
            KeyRequest::Begin(begin(vec![], vec![identity("a"); 65], b"")),
            "expected identities",
        ),
        ("too many bytes", KeyRequest::More { bytes: &big }, "body"),
    ];
    for (name, request, what) in cases {
        // Bytes of an earlier frame must stay when a frame is refused.
        let mut out = vec![1, 2, 3];
        assert_eq!(
            request.encode(1, &mut out).unwrap_err().what,
            what,
            "{name}"
        );
        assert_eq!(out, [1, 2, 3], "{name}");
    }
    let mut out = Vec::new();
    assert_eq!(
        KeyResponse::Certificates {
            chain: vec![b"x"; 11]
        }
        .encode(1, &mut out)
        .unwrap_err()
        .what,
        "chain"
    );
    assert_eq!(
        KeyResponse::Certificates { chain: vec![&big] }
            .encode(1, &mut out)
            .unwrap_err()
            .what,
        "certificate"
    );
    // The largest possible Begin still has room for BEGIN_BYTES_MAX.
    // The labels of 63 bytes make the longest names that DNS allows, 253 bytes.
    let account = format!(
        "{}.{}.{}.{}",
        "a".repeat(63),
        "b".repeat(63),
        "c".repeat(63),
        "d".repeat(61)
    );
    let domain = account.clone();
    let widest: Identity = format!("spiffe://{domain}/ns/{}/sa/{account}", "n".repeat(63))
        .parse()
        .unwrap();
    let full = HandshakeRequest {
        identity: widest.clone(),
        role: HandshakeRole::Server,
        alpn: vec![&big[..255]; PROTOCOLS_MAX],
        expected: vec![widest; EXPECTED_MAX],
        deadline_ms: 0,
        bytes: &big[..BEGIN_BYTES_MAX],
    };
    assert_eq!(KeyRequest::Begin(full).encode(1, &mut out), Ok(()));
}

#[test]
fn a_refusals_text_is_cut_between_characters() {
    let mut out = Vec::new();
    let text = "ä".repeat(TEXT_MAX);
    KeyResponse::Refused {
        name: KeyRefusal::Failed,
        text: &text,
    }
    .encode(1, &mut out)
    .unwrap();
    let (frame, _) = split(&out).unwrap().unwrap();
    assert_eq!(
        frame.response(),
        Ok(KeyResponse::Refused {
            name: KeyRefusal::Failed,
            text: &text[..TEXT_MAX]
        })
    );
}

#[test]
fn refusals_have_names_and_codes_of_their_own() {
    let names: std::collections::BTreeSet<_> = KeyRefusal::ALL.iter().map(|r| r.name()).collect();
    assert_eq!(names.len(), KeyRefusal::ALL.len());
    for r in KeyRefusal::ALL {
        assert_eq!(KeyRefusal::of(r.code()), Some(*r));
    }
}

#[test]
fn secrets_are_not_shown() {
    let KeyResponse::Done(done) = &responses()[1] else {
        panic!("the second is Done")
    };
    let shown = format!("{done:?}");
    assert!(
        shown.contains("peer: spiffe://") && !shown.contains("secret") && !shown.contains("1, 1"),
        "{shown}"
    );
}

prop_compose! {
    fn begins()(
        account in "[a-z]{1,20}", server in any::<bool>(), alpn in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..8),
        expected in prop::collection::vec("[a-z]{1,9}", 0..9), deadline_ms in any::<u32>(), bytes in prop::collection::vec(any::<u8>(), 0..3000),
    ) -> (String, bool, Vec<Vec<u8>>, Vec<String>, u32, Vec<u8>) {
        (account, server, alpn, expected, deadline_ms, bytes)
    }
}

proptest! {
    #[test]
    fn any_begin_request_survives_encoding_and_decoding((account, server, alpn, expected, deadline_ms, bytes) in begins(), id in any::<u64>()) {
        let begin = KeyRequest::Begin(HandshakeRequest {
            identity: identity(&account),
            role: if server { HandshakeRole::Server } else { HandshakeRole::Client },
            alpn: alpn.iter().map(Vec::as_slice).collect(),
            expected: expected.iter().map(|e| identity(e)).collect(),
            deadline_ms,
            bytes: &bytes,
        });
        let out = encoded(id, &begin);
        let (frame, length) = split(&out).unwrap().unwrap();
        prop_assert_eq!((frame.id, length), (id, out.len()));
        prop_assert_eq!(frame.request(), Ok(begin));
    }

    #[test]
    fn bytes_without_meaning_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..300), kind in 0u8..0x90, framed in any::<bool>()) {
        if framed && bytes.len() >= HEADER {
            let length = bytes.len() as u32 - 4;
            bytes[..4].copy_from_slice(&length.to_be_bytes());
            bytes[12] = kind;
        }
        if let Ok(Some((frame, length))) = split(&bytes) {
            prop_assert!(length <= bytes.len());
            // A decoded request encodes to an equal one.
            if let Ok(request) = frame.request() {
                let out = encoded(frame.id, &request);
                prop_assert_eq!(split(&out).unwrap().unwrap().0.request(), Ok(request));
            }
            let _ = frame.response();
        }
    }
}

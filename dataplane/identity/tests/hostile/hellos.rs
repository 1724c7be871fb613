//! Hostile and unusual ClientHellos, and messages that are no ClientHello at all.

use canal_tls::HandshakeFailure::{Alpn, Io, NothingShared, Protocol, Timeout, Version};

use super::attacker::{MessageFlight, Opening};
use super::craft::*;
use super::fixture::{Expect, FIXTURE, HandshakeFixture, HostileCase, check, dropped, refused, up};

/// Sends the rest of an honest client's handshake.
pub(crate) fn honest(fixture: &'static HandshakeFixture, s: &mut MessageFlight) {
    s.certificate(&fixture.alice.chain);
    s.proof(&fixture.alice);
    s.finish();
    s.ping();
}

fn case(name: &'static str, opening: Opening, expect: Expect) -> HostileCase {
    HostileCase {
        name,
        opening,
        script: honest,
        expect,
    }
}

/// Returns a case with a ClientHello in one record that differs from the honest one by `change`.
pub(super) fn hello(
    name: &'static str,
    change: impl FnOnce(CraftedHello) -> CraftedHello,
    expect: Expect,
) -> HostileCase {
    case(name, Opening::of(&change(FIXTURE.hello())), expect)
}

/// Returns a case with the honest ClientHello in another encoding on the wire.
pub(super) fn wired(
    name: &'static str,
    wire: impl FnOnce(&[u8]) -> Vec<u8>,
    expect: Expect,
) -> HostileCase {
    case(name, Opening::wired(&FIXTURE.hello(), wire), expect)
}

pub(super) fn raw(name: &'static str, wire: impl Into<Vec<u8>>, expect: Expect) -> HostileCase {
    case(name, Opening::raw(wire), expect)
}

pub(super) fn one(m: &[u8]) -> Vec<u8> {
    record(HANDSHAKE, m)
}

#[test]
fn messages_other_than_a_client_hello() {
    let body = &FIXTURE.hello().message()[4..].to_vec(); // Without type and length.
    let typed = |kind| record(HANDSHAKE, &message(kind, body));
    // rustls decodes a message before it compares the type. A known type whose content is wrong is
    // thus not decodable; another message that is sound, or unknown, is unexpected.
    check(&[
        raw("nothing", [], dropped(Timeout)),
        case("nothing, closed", Opening::raw([]).closed(), dropped(Io)),
        raw(
            "SSLv2",
            // The record's length with its highest bit set, type 1, version 2.0: TLS reads the
            // length as a content type.
            [0x80, 0x2e, 1, 0, 2, 0, 5, 0, 0, 0, 16, 1, 0, 128, 7, 0, 192],
            refused(Protocol, DECODE),
        ),
        raw(
            "HTTP/1.1",
            &b"GET / HTTP/1.1\r\nHost: bob\r\n\r\n"[..],
            refused(Protocol, DECODE),
        ),
        raw(
            "HTTP/2",
            &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
            refused(Protocol, DECODE),
        ),
        raw(
            "SSH",
            &b"SSH-2.0-OpenSSH_9.6\r\n"[..],
            refused(Protocol, DECODE),
        ),
        raw(
            "PROXY protocol",
            &b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n"[..],
            refused(Protocol, DECODE),
        ),
        raw("zeros", [0; 4096], refused(Protocol, DECODE)),
        raw("ones", [0xff; 4096], refused(Protocol, DECODE)),
        raw(
            "hello request",
            record(HANDSHAKE, &message(0, &[])),
            refused(Protocol, UNEXPECTED),
        ),
        raw(
            "server hello",
            typed(SERVER_HELLO),
            refused(Protocol, DECODE),
        ),
        raw("a ticket", typed(TICKET), refused(Protocol, DECODE)),
        raw(
            "Finished",
            record(HANDSHAKE, &message(FINISHED, &[0; 32])),
            refused(Protocol, UNEXPECTED),
        ),
        raw(
            "Certificate",
            record(HANDSHAKE, &certificate(&FIXTURE.alice.chain)),
            refused(Protocol, DECODE),
        ),
        raw(
            "KeyUpdate",
            record(HANDSHAKE, &message(KEY_UPDATE, &[0])),
            refused(Protocol, UNEXPECTED),
        ),
        raw("message hash", typed(254), refused(Protocol, DECODE)),
        raw("unknown message", typed(99), refused(Protocol, UNEXPECTED)),
        raw(
            // The length alone is too large, so the server does not wait for the rest.
            "a message of 16 MiB begins",
            record(HANDSHAKE, &[1, 0xff, 0xff, 0xff, 3, 3]),
            dropped(Protocol),
        ),
        raw(
            "a message of 64 KiB begins",
            record(HANDSHAKE, &[1, 1, 0, 0, 3, 3]),
            dropped(Protocol),
        ),
        raw(
            "an empty hello",
            record(HANDSHAKE, &message(CLIENT_HELLO, &[])),
            refused(Protocol, DECODE),
        ),
    ]);
}

/// Returns cases with other versions.
fn versions() -> Vec<HostileCase> {
    // Suites of TLS 1.2.
    let old = vec![0xc02b, 0xc02f, 0x009c];
    vec![
        hello(
            // The extension is a length and versions of two bytes: 3.3 is TLS 1.2, 3.4 is TLS 1.3.
            "TLS 1.2 only",
            |h| h.set(VERSIONS, &[2, 3, 3]),
            refused(Version, VERSION),
        ),
        hello(
            "TLS 1.2 as it was",
            |h| {
                h.without(VERSIONS)
                    .without(KEY_SHARE)
                    .change(|h| h.suites = old)
            },
            refused(Version, VERSION),
        ),
        hello(
            // Without the extension a hello is of TLS 1.2 or older (RFC 8446 §4.2.1).
            "no versions",
            |h| h.without(VERSIONS),
            refused(Version, VERSION),
        ),
        hello(
            "TLS 1.0",
            |h| h.without(VERSIONS).change(|h| h.version = 0x0301),
            refused(Version, VERSION),
        ),
        hello(
            // With the extension the legacy version is ignored.
            "legacy version 1.0 with versions",
            |h| h.change(|h| h.version = 0x0301),
            up(),
        ),
        hello(
            "legacy version 1.3 with versions",
            |h| h.change(|h| h.version = 0x0304),
            up(),
        ),
        hello(
            "an empty list of versions",
            |h| h.set(VERSIONS, &[0]),
            refused(Protocol, DECODE),
        ),
        hello(
            "one and a half versions",
            |h| h.set(VERSIONS, &[3, 3, 4, 3]),
            refused(Protocol, DECODE),
        ),
        hello(
            // 0x7f1c and 0x7f17 are drafts 28 and 23 of TLS 1.3.
            "drafts only",
            |h| h.set(VERSIONS, &[4, 0x7f, 0x1c, 0x7f, 0x17]),
            refused(Version, VERSION),
        ),
        hello(
            // 0x7a7a is a value of GREASE, and 3.5 no version yet.
            "unknown versions and 1.3",
            |h| h.set(VERSIONS, &[6, 0x7a, 0x7a, 3, 5, 3, 4]),
            up(),
        ),
    ]
}

/// Returns cases with other cipher suites, compression methods and session ids.
fn suites_and_sessions() -> Vec<HostileCase> {
    // 0x13xx are suites of TLS 1.3: 02 is AES-256, 03 ChaCha20, 04 and 05 are CCM. 0xc02b and
    // 0xc02f are of TLS 1.2, and 0x7a7a is a value of GREASE.
    vec![
        hello(
            "ChaCha20 only",
            |h| h.change(|h| h.suites = vec![0x1303]),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "CCM only",
            |h| h.change(|h| h.suites = vec![0x1304, 0x1305]),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "unknown suites",
            |h| h.change(|h| h.suites = vec![0x7a7a, 0x13ff]),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "suites of TLS 1.2",
            |h| h.change(|h| h.suites = vec![0xc02b, 0xc02f]),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "the null suite",
            |h| h.change(|h| h.suites = vec![0]),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "no suites",
            |h| h.change(|h| h.suites = vec![]),
            refused(Protocol, DECODE),
        ),
        hello(
            // Unassigned numbers, before the one suite that the server shares.
            "thousands of suites",
            |h| h.change(|h| h.suites = (0x2000..0x4000).chain([AES128]).collect()),
            up(),
        ),
        hello(
            // Only the null method is allowed in TLS 1.3 (RFC 8446 §4.1.2).
            "compression only",
            |h| h.change(|h| h.compressions = vec![1]),
            refused(Protocol, ILLEGAL),
        ),
        hello(
            "compression too",
            |h| h.change(|h| h.compressions = vec![1, 0]),
            refused(Protocol, ILLEGAL),
        ),
        hello(
            "no compression methods",
            |h| h.change(|h| h.compressions = vec![]),
            refused(Protocol, DECODE),
        ),
        hello("no session id", |h| h.change(|h| h.session = vec![]), up()),
        hello(
            // A session id has 32 bytes at most (RFC 8446 §4.1.2).
            "a session id of 33 bytes",
            |h| h.change(|h| h.session = vec![1; 33]),
            refused(Protocol, DECODE),
        ),
    ]
}

/// Returns cases with other numbers and sizes of extensions, and of the hello itself.
fn sizes() -> Vec<HostileCase> {
    vec![
        hello(
            // rustls looks for signature algorithms before it looks for versions.
            "no extensions",
            |h| h.change(|h| h.extensions.clear()),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "a duplicate extension",
            |h| h.with(ALPN, &protocols(&[b"h2"])),
            refused(Protocol, ILLEGAL),
        ),
        hello(
            "a duplicate unknown extension",
            |h| h.with(GREASE, &[]).with(GREASE, &[]),
            refused(Protocol, ILLEGAL),
        ),
        hello(
            "a thousand unknown extensions",
            // IANA has assigned none of these numbers.
            |h| (0x4000..0x4400).fold(h, |h, kind| h.with(kind, &[1])),
            up(),
        ),
        hello(
            // Below the 16 KiB of one record; the next cases take several records.
            "padding of 10 KiB",
            |h| h.set(PADDING, &[0; 10 << 10]),
            up(),
        ),
        wired_as(
            "padding of 60 KiB",
            |h| h.set(PADDING, &vec![0; 60 << 10]),
            up(),
        ),
        wired_as(
            // Close to the 65,535 bytes of a message; the rest of the hello fits in as well.
            "padding of 65200 bytes",
            |h| h.set(PADDING, &[0; 65_200]),
            up(),
        ),
        wired_as(
            // rustls reads messages of up to 65,535 bytes.
            "a hello of 80 KiB",
            |h| {
                h.set(PADDING, &[0; 60_000])
                    .change(|h| h.suites = vec![AES128; 11_000])
            },
            dropped(Protocol),
        ),
        wired(
            "bytes after the hello",
            |m| one(&message(CLIENT_HELLO, &[&m[4..], &[0, 0]].concat())),
            refused(Protocol, DECODE),
        ),
        wired(
            "the hello lacks a byte",
            |m| one(&message(CLIENT_HELLO, &m[4..m.len() - 1])),
            refused(Protocol, DECODE),
        ),
        wired(
            "the hello claims a byte more",
            // The honest hello is short enough for one byte. With 255 instead, a longer one would
            // not wait, and the case would fail.
            |m| one(&[&[1, 0, 0, (m.len() - 3).try_into().unwrap_or(255)], &m[4..]].concat()),
            dropped(Timeout),
        ),
        case(
            // As a header, the ones announce 65,793 bytes of a ClientHello, more than rustls reads.
            "64 KiB of one hello, then the end",
            Opening::raw(records(HANDSHAKE, &vec![1; 64 << 10], 1 << 14)).closed(),
            dropped(Protocol),
        ),
    ]
}

#[test]
fn versions_suites_and_sizes() {
    check(&versions());
    check(&suites_and_sessions());
    check(&sizes());
}

/// Returns a case with a ClientHello of several full records.
fn wired_as(
    name: &'static str,
    change: impl FnOnce(CraftedHello) -> CraftedHello,
    expect: Expect,
) -> HostileCase {
    case(
        name,
        Opening::wired(&change(FIXTURE.hello()), |m| records(HANDSHAKE, m, 1 << 14)),
        expect,
    )
}

/// Points of small order on Curve25519: those of RFC 7748 §6.1, and multiples that implementations
/// forget.
const LOW_ORDER: [[u8; 32]; 5] = {
    let mut points = [[0; 32]; 5];
    points[1][0] = 1;
    points[2] = [
        0xe0, 0xeb, 0x7a, 0x7c, 0x3b, 0x41, 0xb8, 0xae, 0x16, 0x56, 0xe3, 0xfa, 0xf1, 0x9f, 0xc4,
        0x6a, 0xda, 0x09, 0x8d, 0xeb, 0x9c, 0x32, 0xb1, 0xfd, 0x86, 0x62, 0x05, 0x16, 0x5f, 0x49,
        0xb8, 0x00,
    ];
    points[3] = [0xff; 32];
    points[3][0] = 0xec;
    points[3][31] = 0x7f;
    points[4] = [0xff; 32];
    points[4][0] = 0xed;
    points[4][31] = 0x7f;
    points
};

/// Returns cases with other groups, and without shares of them.
fn groups() -> Vec<HostileCase> {
    let mine = |group| FIXTURE.keys.share(group);
    vec![
        hello("hybrid", |h| h.keys(&[HYBRID], &[mine(HYBRID)]), up()),
        hello("P-256", |h| h.keys(&[P256], &[mine(P256)]), up()),
        hello(
            // 0x7a7a is a value of GREASE (RFC 8701); 0x02xx are unassigned, and 0x0100 is
            // ffdhe2048.
            "unknown groups too",
            |h| {
                h.keys(
                    &[0x7a7a, 0x0200, X25519],
                    &[share(0x7a7a, &[0]), mine(X25519)],
                )
            },
            up(),
        ),
        hello(
            "no shares extension",
            |h| h.without(KEY_SHARE),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "no groups extension",
            |h| h.without(GROUPS),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "an empty list of groups",
            |h| h.set(GROUPS, &[0, 0]),
            refused(Protocol, DECODE),
        ),
        hello(
            "unknown groups only",
            |h| h.keys(&[0x7a7a, 0x0201], &[share(0x7a7a, &[0; 32])]),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "finite fields only",
            |h| h.keys(&[0x0100], &[share(0x0100, &[2; 256])]),
            refused(NothingShared, FAILURE),
        ),
    ]
}

/// Returns cases with shares that are no keys of their group.
fn shares() -> Vec<HostileCase> {
    let mine = |group| FIXTURE.keys.share(group);
    let x = |key: &[u8]| {
        let key = share(X25519, key);
        |h: CraftedHello| h.keys(&[X25519], &[key])
    };
    let low = |i: usize| x(&LOW_ORDER[i]);
    let p = |key: Vec<u8>| move |h: CraftedHello| h.keys(&[P256], &[share(P256, &key)]);
    let both = |key: Vec<u8>| move |h: CraftedHello| h.keys(&[HYBRID], &[share(HYBRID, &key)]);
    let hybrid = FIXTURE.keys.public(HYBRID);
    // A hybrid share is an ML-KEM-768 key, which has 1152 bytes of coefficients and a seed of 32,
    // and an X25519 key of 32: 1216 bytes. Coefficients of all ones are too large.
    let mut large = hybrid.clone();
    large[..1152].fill(0xff);
    let zero = [&hybrid[..1184], &[0; 32]].concat();
    let bad = || refused(Protocol, ILLEGAL);
    vec![
        hello("a share of 31 bytes", x(&[9; 31]), bad()),
        hello("a share of 33 bytes", x(&[9; 33]), bad()),
        hello("a share of 16 kB is too much", x(&[9; 16_000]), bad()),
        hello("an empty share", x(&[]), refused(Protocol, DECODE)),
        hello("zero", low(0), bad()),
        hello("one", low(1), bad()),
        hello("a point of order 8", low(2), bad()),
        hello("minus one", low(3), bad()),
        hello("zero, not reduced", low(4), bad()),
        hello(
            "P-256 off the curve",
            p([&[4][..], &[7; 64]].concat()),
            bad(),
        ),
        hello("P-256 at infinity", p(vec![0]), bad()),
        hello(
            "P-256 compressed",
            p([&[2][..], &FIXTURE.keys.public(P256)[1..33]].concat()), // 2, and X
            bad(),
        ),
        hello(
            "hybrid one byte short",
            both(hybrid[..1215].to_vec()),
            bad(),
        ),
        hello(
            "hybrid one byte long",
            both([&hybrid[..], &[0]].concat()),
            bad(),
        ),
        hello(
            "hybrid without X25519",
            both(hybrid[..1184].to_vec()),
            bad(),
        ),
        hello(
            "hybrid with coefficients above the modulus",
            both(large),
            bad(),
        ),
        hello("hybrid with X25519 zero", both(zero), bad()),
        hello(
            "duplicate shares",
            |h| h.keys(&[X25519], &[mine(X25519), mine(X25519)]),
            bad(),
        ),
        hello(
            // The list claims 40 bytes and has five.
            "shares overrun",
            |h| h.set(KEY_SHARE, &[0, 40, 0, 29, 0, 32, 1]),
            refused(Protocol, DECODE),
        ),
    ]
}

#[test]
fn groups_and_shares() {
    check(&groups());
    check(&shares());
}

#[test]
fn second_hellos() {
    let fixture = &*FIXTURE;
    // Without a share, so that the server sends a HelloRetryRequest.
    let base = || fixture.hello().keys(&[X25519], &[]);
    let again = |second: CraftedHello| Opening::of(&base()).again(&second);
    // The share is not of the group that the hello offers.
    let elsewhere = || fixture.hello().keys(&[P256], &[fixture.keys.share(X25519)]);
    let random = |h: CraftedHello| h.change(|h| h.random = [4; 32]);
    // The server selects 0x1302, TLS_AES_256_GCM_SHA384, before that of the second hello.
    let mixed = base().change(|h| h.suites = vec![0x1302, AES128]);
    check(&[
        case("a second hello as requested", again(fixture.hello()), up()),
        case(
            // A client must not change it (RFC 8446 §4.1.2), but rustls does not compare.
            "a second hello with another random",
            again(random(fixture.hello())),
            up(),
        ),
        case(
            "the share of another group, then the right one",
            Opening::of(&elsewhere())
                .again(&fixture.hello().keys(&[P256], &[fixture.keys.share(P256)])),
            up(),
        ),
        case("no second hello", Opening::of(&base()), dropped(Timeout)),
        case(
            "no second hello, closed",
            Opening::of(&base()).closed(),
            dropped(Io),
        ),
        case(
            "a second hello without a share",
            again(base()),
            refused(Protocol, ILLEGAL),
        ),
        case(
            "a second hello with the wrong share",
            Opening::of(&elsewhere()).again(&elsewhere()),
            refused(Protocol, ILLEGAL),
        ),
        case(
            "a second hello with another suite",
            Opening::of(&mixed).again(&fixture.hello()),
            refused(Protocol, ILLEGAL),
        ),
        case(
            "a second hello of TLS 1.2",
            again(fixture.hello().set(VERSIONS, &[2, 3, 3])),
            refused(Version, VERSION),
        ),
        case(
            "a second hello with early data",
            again(fixture.hello().with(EARLY_DATA, &[])),
            refused(Protocol, ILLEGAL),
        ),
        case(
            "a second hello without groups",
            again(fixture.hello().without(GROUPS)),
            refused(NothingShared, FAILURE),
        ),
        case(
            "a second hello with a bad share",
            again(fixture.hello().keys(&[X25519], &[share(X25519, &[0; 32])])),
            refused(Protocol, ILLEGAL),
        ),
        case(
            "Certificate for a second hello",
            {
                let mut o = again(fixture.hello());
                o.second.as_mut().unwrap().wire = one(&certificate(&fixture.alice.chain));
                o
            },
            refused(Protocol, DECODE),
        ),
    ]);
}

/// Returns a pre-shared key extension with an unknown identity and a binder of `binder` bytes.
fn psk(binder: usize) -> Vec<u8> {
    let identity = [vec16(&[0xab; 64]), vec![0, 0, 0, 9]].concat();
    [vec16(&identity), vec16(&vec8(&vec![1; binder]))].concat()
}

/// Returns cases with pre-shared keys and early data.
fn keys_and_early_data() -> Vec<HostileCase> {
    // PSK_MODES is a list's length and modes: 1 is with Diffie-Hellman, 0 is without it.
    let resumed = |h: CraftedHello| h.with(PSK_MODES, &[1, 1]).with(PSK, &psk(32));
    let early = |h: CraftedHello| {
        h.with(EARLY_DATA, &[])
            .with(PSK_MODES, &[1, 1])
            .with(PSK, &psk(32))
    };
    let skipped =
        |data: Vec<u8>| Opening::wired(&early(FIXTURE.hello()), |m| [one(m), data].concat());
    let junk = record(DATA, &[9; 1000]);
    vec![
        hello("an unknown pre-shared key", resumed, up()),
        hello(
            "a key without modes",
            |h| h.with(PSK, &psk(32)),
            refused(Protocol, MISSING),
        ),
        hello(
            "a key that is not last",
            |h| {
                h.with(PSK_MODES, &[1, 1])
                    .with(PSK, &psk(32))
                    .with(PADDING, &[])
            },
            refused(Protocol, ILLEGAL),
        ),
        hello(
            "a key without binders",
            |h| {
                h.with(PSK_MODES, &[1, 1])
                    .with(PSK, &[&vec16(&[0; 7])[..], &[0, 0]].concat())
            },
            refused(Protocol, DECODE),
        ),
        hello(
            // A server verifies only the binder of the key that it selects (RFC 8446 §4.2.11).
            "an unknown pre-shared key, with a short binder",
            |h| h.with(PSK_MODES, &[1, 1]).with(PSK, &psk(31)),
            up(),
        ),
        hello(
            "a key with two binders",
            |h| {
                let identity = [vec16(&[1; 8]), vec![0; 4]].concat();
                h.with(PSK_MODES, &[1, 1]).with(
                    PSK,
                    &[vec16(&identity), vec16(&vec8(&[1; 32]).repeat(2))].concat(),
                )
            },
            refused(Protocol, ILLEGAL),
        ),
        hello(
            // The server does not use the key, and performs a full handshake.
            "a key without Diffie-Hellman",
            |h| h.with(PSK_MODES, &[1, 0]).with(PSK, &psk(32)),
            up(),
        ),
        hello("early data announced", |h| h.with(EARLY_DATA, &[]), up()),
        case(
            "early data sent and passed over",
            skipped(junk.clone()),
            up(),
        ),
        // The server skips only a limited amount of early data.
        case(
            "early data without end",
            skipped(junk.repeat(1000)),
            refused(Protocol, BAD_MAC),
        ),
        wired(
            "early data not announced",
            |m| [one(m), junk.clone()].concat(),
            refused(Protocol, BAD_MAC),
        ),
    ]
}

/// Returns cases with other protocols and signature schemes.
fn protocols_and_signatures() -> Vec<HostileCase> {
    // Schemes of RFC 8446 §4.2.3: 0x02xx are with SHA-1, 0x0804 and 0x0401 with RSA. The server's
    // key is ECDSA.
    vec![
        // ALPN fails only if the client offers protocols and none is shared (RFC 7301 §3.2).
        hello("no protocols", |h| h.without(ALPN), up()),
        hello(
            "a foreign protocol",
            |h| h.set(ALPN, &protocols(&[b"http/1.1"])),
            refused(Alpn, NO_ALPN),
        ),
        hello(
            "a longer protocol",
            |h| h.set(ALPN, &protocols(&[b"h2c", b"h", b"H2"])),
            refused(Alpn, NO_ALPN),
        ),
        hello(
            "h2 after others",
            |h| h.set(ALPN, &protocols(&[b"http/1.1", b"canal-keys/1", b"h2"])),
            up(),
        ),
        hello(
            "an empty list of protocols",
            |h| h.set(ALPN, &protocols(&[])),
            refused(Protocol, DECODE),
        ),
        hello(
            "a protocol without name",
            |h| h.set(ALPN, &protocols(&[b"", b"h2"])),
            refused(Protocol, DECODE),
        ),
        hello(
            "no signatures",
            |h| h.without(SIGNATURES),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "an empty list of signatures",
            |h| h.set(SIGNATURES, &[0, 0]),
            refused(Protocol, DECODE),
        ),
        hello(
            "SHA-1 only",
            |h| h.set(SIGNATURES, &vec16(&list16(&[0x0201, 0x0203]))),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "RSA only",
            |h| h.set(SIGNATURES, &vec16(&list16(&[0x0804, 0x0401]))),
            refused(NothingShared, FAILURE),
        ),
        hello(
            "unknown signatures only",
            |h| h.set(SIGNATURES, &vec16(&list16(&[0x7a7a]))),
            refused(NothingShared, FAILURE),
        ),
    ]
}

/// Returns cases with server names, and with extensions that the server does not need.
fn names_and_other_extensions() -> Vec<HostileCase> {
    // Name type 0 is a host name (RFC 6066); compression algorithm 2 is brotli (RFC 8879).
    vec![
        hello(
            "a name",
            |h| {
                h.with(
                    SERVER_NAME,
                    &vec16(&[&[0][..], &vec16(b"bob.shop")].concat()),
                )
            },
            up(),
        ),
        hello(
            // RFC 6066 forbids it, but some clients send it. rustls then acts as without a name.
            "an address as a name",
            |h| {
                h.with(
                    SERVER_NAME,
                    &vec16(&[&[0][..], &vec16(b"127.0.0.1")].concat()),
                )
            },
            up(),
        ),
        hello(
            "two names",
            |h| {
                h.with(
                    SERVER_NAME,
                    &vec16(&[&[0][..], &vec16(b"a.b")].concat().repeat(2)),
                )
            },
            refused(Protocol, DECODE),
        ),
        hello(
            "a name with NUL",
            |h| {
                h.with(
                    SERVER_NAME,
                    &vec16(&[&[0][..], &vec16(b"bob\0.x")].concat()),
                )
            },
            refused(Protocol, ILLEGAL),
        ),
        hello(
            "an empty name",
            |h| h.with(SERVER_NAME, &vec16(&[&[0][..], &vec16(b"")].concat())),
            refused(Protocol, DECODE),
        ),
        hello(
            "an unknown cookie",
            |h| h.with(COOKIE, &vec16(&[1; 32])),
            up(),
        ),
        hello(
            // 2 is the certificate type RawPublicKey (RFC 7250).
            "raw public keys only",
            |h| h.with(SERVER_CERTIFICATE_TYPE, &[1, 2]),
            refused(Protocol, FAILURE),
        ),
        hello(
            "raw public keys of clients only",
            |h| h.with(CLIENT_CERTIFICATE_TYPE, &[1, 2]),
            refused(Protocol, FAILURE),
        ),
        hello("parameters of QUIC", |h| h.with(QUIC, &[1, 2, 3]), up()),
        hello("compression", |h| h.with(COMPRESSION, &[2, 0, 2]), up()),
        hello(
            "an encrypted hello that cannot be decrypted",
            |h| {
                h.with(
                    ENCRYPTED_HELLO, // Outer, KDF 1, AEAD 1, any ID; a key and a payload.
                    &[&[0, 0, 1, 0, 1, 9][..], &vec16(&[8; 32]), &vec16(&[7; 100])].concat(),
                )
            },
            up(),
        ),
        hello(
            "a malformed encrypted hello",
            |h| h.with(ENCRYPTED_HELLO, &[0; 120]),
            refused(Protocol, DECODE),
        ),
        hello(
            "an extension overruns",
            |h| h.with(POINT_FORMATS, &[200, 0]),
            refused(Protocol, DECODE),
        ),
    ]
}

#[test]
fn extensions_that_lie() {
    check(&keys_and_early_data());
    check(&protocols_and_signatures());
    check(&names_and_other_extensions());
}

#[test]
fn a_hello_cut_off_anywhere() {
    let whole = one(&FIXTURE
        .hello()
        .keys(
            &[HYBRID, X25519],
            &[FIXTURE.keys.share(HYBRID), FIXTURE.keys.share(X25519)],
        )
        .message());
    let cut = |n: usize| Opening::raw(&whole[..n]);
    let silent = (1..whole.len())
        .step_by(16)
        .map(|n| case("cut, then silence", cut(n), dropped(Timeout)));
    let closed = (1..whole.len())
        .step_by(16)
        .map(|n| case("cut, then the end", cut(n).closed(), dropped(Io)));
    check(&silent.chain(closed).collect::<Vec<_>>());
}

//! Hostile servers against the connecting side.

use canal_testing::identity;
use canal_tls::HandshakeFailure::{
    Alert, BadAlgorithm, BadEncoding, BadSignature, ChainTooLarge, ChainTooLong, Expired, Io,
    NoCertificate, NotYetValid, NothingShared, Protocol, Revoked, UnknownIssuer, Version,
    WrongIdentity, WrongUsage,
};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, SanType, date_time_ymd};

use super::attacker::{AttackScript, MessageFlight, Side};
use super::craft::*;
use super::fixture::{
    ALICE, BOB, Expect, FIXTURE, Flight, HandshakeFixture, MALLORY, REVOKED_SERIAL, TestCredential,
    check_traps, dropped, refused, up, up_then,
};

const fn trap(name: &'static str, script: AttackScript, expect: Expect) -> Flight {
    Flight {
        name,
        script,
        expect,
    }
}

fn add_certificate_request(s: &mut MessageFlight) {
    s.request(&[(SIGNATURES, vec16(&list16(&[ECDSA])))]);
}

/// Sends ServerHello, EncryptedExtensions and CertificateRequest of an honest server.
fn add_opening_messages(s: &mut MessageFlight) {
    s.send_server_hello(&s.reply());
    s.extend(&[(ALPN, protocols(&[b"h2"]))]);
    add_certificate_request(s);
}

fn shows(s: &mut MessageFlight, credential: &TestCredential) {
    add_opening_messages(s);
    s.certificate(&credential.chain);
    s.proof(credential);
    s.finish();
    s.ping();
}

fn proven(r: &'static HandshakeFixture, s: &mut MessageFlight) {
    s.certificate(&r.bob.chain);
    s.proof(&r.bob);
    s.finish();
}

fn honest(r: &'static HandshakeFixture, s: &mut MessageFlight) {
    shows(s, &r.bob);
}

/// Acts as an honest server, except for its ServerHello.
fn greets(
    r: &'static HandshakeFixture,
    s: &mut MessageFlight,
    change: impl FnOnce(CraftedHello) -> CraftedHello,
) {
    let hello = change(s.reply());
    s.send_server_hello(&hello);
    s.extend(&[(ALPN, protocols(&[b"h2"]))]);
    add_certificate_request(s);
    proven(r, s);
    s.ping();
}

/// Acts as an honest server, except for its EncryptedExtensions.
fn extends(r: &'static HandshakeFixture, s: &mut MessageFlight, list: &[(u16, Vec<u8>)]) {
    s.send_server_hello(&s.reply());
    s.extend(list);
    add_certificate_request(s);
    proven(r, s);
    s.ping();
}

/// Sends a HelloRetryRequest with these extensions.
fn retries(s: &mut MessageFlight, list: &[(u16, Vec<u8>)]) {
    let hello = s
        .reply()
        .change(|h| (h.random, h.extensions) = (RETRY, [&[(VERSIONS, vec![3, 4])], list].concat()));
    s.add_handshake_message(&hello.message());
}

fn wants(group: u16) -> (u16, Vec<u8>) {
    (KEY_SHARE, group.to_be_bytes().to_vec())
}

const SERVER_HELLOS: &[Flight] = &[
    trap("as it should be", honest, up()),
    trap("nothing", |_, _| {}, dropped(Io)),
    trap(
        "garbage",
        |_, s| s.raw(&[0x5a; 4096]),
        refused(Protocol, DECODE),
    ),
    trap(
        "HTTP/1.1",
        |_, s| s.raw(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        refused(Protocol, DECODE),
    ),
    trap("a fatal alert", |_, s| s.alert(2, FAILURE), dropped(Alert)),
    trap("a close", |_, s| s.alert(1, 0), dropped(Io)),
    trap(
        "application data",
        |_, s| s.put(DATA, b"hello"),
        refused(Protocol, UNEXPECTED),
    ),
    trap(
        "a client hello",
        |r, s| s.add_handshake_message(&r.hello().message()),
        refused(Protocol, UNEXPECTED),
    ),
    trap(
        "half a hello, then the end",
        |_, s| {
            s.add_handshake_message(&s.reply().message());
            s.out.truncate(40);
        },
        dropped(Io),
    ),
    trap(
        "one byte per record",
        |r, s| {
            let hello = s.reply().message();
            s.transcript.extend_from_slice(&hello);
            s.raw(&records(HANDSHAKE, &hello, 1));
            s.protect();
            s.extend(&[(ALPN, protocols(&[b"h2"]))]);
            proven(r, s);
            s.ping();
        },
        up(),
    ),
    trap(
        "TLS 1.2",
        |_, s| {
            let hello = s
                .reply()
                .without(VERSIONS)
                .without(KEY_SHARE)
                .change(|h| h.suites = vec![0xc02b]);
            s.add_handshake_message(&hello.message());
        },
        refused(Version, VERSION),
    ),
    trap(
        "TLS 1.2 by extension",
        |r, s| greets(r, s, |h| h.set(VERSIONS, &[3, 3])),
        refused(Version, VERSION),
    ),
    trap(
        "TLS 1.4 by extension",
        |r, s| greets(r, s, |h| h.set(VERSIONS, &[3, 5])),
        refused(Version, VERSION),
    ),
    trap(
        "TLS 1.1",
        |_, s| {
            let hello = s.reply().without(VERSIONS).change(|h| h.version = 0x0302);
            s.add_handshake_message(&hello.message());
        },
        refused(Version, VERSION),
    ),
    trap(
        "the mark of a downgrade",
        |_, s| {
            let hello = s
                .reply()
                .without(VERSIONS)
                .change(|h| h.random[24..].copy_from_slice(b"DOWNGRD\x01"));
            s.add_handshake_message(&hello.message());
        },
        refused(Version, VERSION),
    ),
    trap(
        "ChaCha20",
        |r, s| greets(r, s, |h| h.change(|h| h.suites = vec![0x1303])),
        refused(Protocol, FAILURE),
    ),
    trap(
        "an unknown suite",
        |r, s| greets(r, s, |h| h.change(|h| h.suites = vec![0x7a7a])),
        refused(Protocol, FAILURE),
    ),
    trap(
        "a suite of TLS 1.2",
        |r, s| greets(r, s, |h| h.change(|h| h.suites = vec![0xc02b])),
        refused(Protocol, FAILURE),
    ),
    trap(
        "compression",
        |r, s| greets(r, s, |h| h.change(|h| h.compressions = vec![1])),
        refused(Protocol, ILLEGAL),
    ),
    // RFC 8446 §4.1.3 requires the client to abort here. The transcript makes the difference
    // harmless.
    trap(
        "another session id",
        |r, s| greets(r, s, |h| h.change(|h| h.session = vec![1; 32])),
        up(),
    ),
    trap(
        "a session id of 33 bytes",
        |r, s| greets(r, s, |h| h.change(|h| h.session = vec![1; 33])),
        refused(Protocol, DECODE),
    ),
    trap(
        "no share",
        |r, s| greets(r, s, |h| h.without(KEY_SHARE)),
        refused(Protocol, MISSING),
    ),
    trap(
        "a share of a group not offered",
        |r, s| {
            let other = r.keys.share(P256);
            greets(r, s, |h| h.set(KEY_SHARE, &other));
        },
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "a share of an unknown group",
        |r, s| greets(r, s, |h| h.set(KEY_SHARE, &share(0x7a7a, &[1; 32]))),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "a share of zero",
        |r, s| greets(r, s, |h| h.set(KEY_SHARE, &share(X25519, &[0; 32]))),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "a share of 31 bytes",
        |r, s| greets(r, s, |h| h.set(KEY_SHARE, &share(X25519, &[9; 31]))),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "a hybrid share too short",
        |r, s| greets(r, s, |h| h.set(KEY_SHARE, &share(HYBRID, &[9; 1119]))),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "a hybrid share of zeros",
        |r, s| greets(r, s, |h| h.set(KEY_SHARE, &share(HYBRID, &[0; 1120]))),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "another's key",
        |r, s| {
            let other = super::keys::Keys::new().share(X25519);
            greets(r, s, |h| h.set(KEY_SHARE, &other));
        },
        dropped(Protocol),
    ),
    trap(
        "a pre-shared key that was not offered",
        |r, s| greets(r, s, |h| h.with(PSK, &[0, 0])),
        refused(Protocol, UNSUPPORTED_EXTENSION),
    ),
    trap(
        "ALPN in clear",
        |r, s| greets(r, s, |h| h.with(ALPN, &protocols(&[b"h2"]))),
        refused(Protocol, UNSUPPORTED_EXTENSION),
    ),
    trap(
        "an unknown extension in clear",
        |r, s| greets(r, s, |h| h.with(GREASE, &[])),
        refused(Protocol, UNSUPPORTED_EXTENSION),
    ),
    trap(
        "a duplicate extension",
        |r, s| greets(r, s, |h| h.with(VERSIONS, &[3, 4])),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "bytes after the hello",
        |_, s| {
            let m = s.reply().message();
            s.add_handshake_message(&message(SERVER_HELLO, &[&m[4..], &[0]].concat()));
        },
        refused(Protocol, DECODE),
    ),
    trap(
        "extensions in the hello's record",
        |_, s| {
            let both = [s.reply().message(), message(EXTENSIONS, &[0, 0])].concat();
            s.put(HANDSHAKE, &both);
        },
        refused(Protocol, UNEXPECTED),
    ),
    trap(
        "extensions in clear",
        |_, s| {
            s.add_handshake_message(&s.reply().message());
            s.extend(&[]);
        },
        dropped(Protocol),
    ),
    trap(
        "a hello of 1 MiB",
        |_, s| s.add_handshake_message(&message(SERVER_HELLO, &vec![3; 1 << 20])),
        dropped(Protocol),
    ),
];

#[test]
fn server_hellos() {
    check_traps(SERVER_HELLOS);
}

const RETRY_REQUESTS: &[Flight] = &[
    trap(
        "another group, then nothing",
        |_, s| retries(s, &[wants(P256)]),
        dropped(Io),
    ),
    trap(
        "again and again",
        |_, s| (0..50).for_each(|_| retries(s, &[wants(P256)])),
        refused(Protocol, UNEXPECTED),
    ),
    trap(
        "a group that has a share",
        |_, s| retries(s, &[wants(X25519)]),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "a group not offered",
        |_, s| retries(s, &[wants(0x0018)]),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "nothing to change",
        |_, s| retries(s, &[]),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "an empty cookie",
        |_, s| retries(s, &[(COOKIE, vec![0, 0])]),
        refused(Protocol, DECODE),
    ),
    trap(
        "a cookie, then nothing",
        |_, s| retries(s, &[(COOKIE, vec16(&[1; 900]))]),
        dropped(Io),
    ),
    trap(
        "an unknown extension",
        |_, s| retries(s, &[wants(P256), (GREASE, vec![])]),
        refused(Protocol, UNSUPPORTED_EXTENSION),
    ),
    trap(
        "the group twice",
        |_, s| retries(s, &[wants(P256), wants(P256)]),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "then another suite",
        |_, s| {
            retries(s, &[wants(P256)]);
            s.add_handshake_message(&s.reply().change(|h| h.suites = vec![0x1302]).message());
        },
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "then a group that it did not request",
        |_, s| {
            retries(s, &[wants(P256)]);
            s.add_handshake_message(&s.reply().message());
        },
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "of an unknown suite",
        |_, s| {
            let hello = s.reply().change(|h| {
                (h.random, h.extensions, h.suites) = (
                    RETRY,
                    vec![(VERSIONS, vec![3, 4]), wants(P256)],
                    vec![0x1303],
                )
            });
            s.add_handshake_message(&hello.message());
        },
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "of TLS 1.2",
        |_, s| {
            let hello = s.reply().change(|h| {
                (h.random, h.extensions) = (RETRY, vec![(VERSIONS, vec![3, 3]), wants(P256)])
            });
            s.add_handshake_message(&hello.message());
        },
        refused(Protocol, ILLEGAL),
    ),
];

#[test]
fn retry_requests() {
    check_traps(RETRY_REQUESTS);
}

const ENCRYPTED_FLIGHTS: &[Flight] = &[
    trap(
        "no request",
        |r, s| {
            s.send_server_hello(&s.reply());
            s.extend(&[]);
            proven(r, s);
            s.ping();
        },
        up(),
    ),
    trap("no protocol", |r, s| extends(r, s, &[]), up()),
    trap(
        "another protocol",
        |r, s| extends(r, s, &[(ALPN, protocols(&[b"http/1.1"]))]),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "two protocols",
        |r, s| extends(r, s, &[(ALPN, protocols(&[b"h2", b"h2"]))]),
        refused(Protocol, DECODE),
    ),
    trap(
        "an extension that was not requested",
        |r, s| extends(r, s, &[(SERVER_NAME, vec![])]),
        refused(Protocol, UNSUPPORTED_EXTENSION),
    ),
    trap(
        "an unknown extension",
        |r, s| extends(r, s, &[(GREASE, vec![1])]),
        refused(Protocol, UNSUPPORTED_EXTENSION),
    ),
    trap(
        "early data accepted",
        |r, s| extends(r, s, &[(EARLY_DATA, vec![])]),
        refused(Protocol, UNSUPPORTED_EXTENSION),
    ),
    trap(
        "a share among the encrypted",
        |r, s| extends(r, s, &[wants(X25519)]),
        refused(Protocol, DECODE),
    ),
    trap(
        "a duplicate extension",
        |r, s| {
            let one = (ALPN, protocols(&[b"h2"]));
            extends(r, s, &[one.clone(), one]);
        },
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "no extensions message",
        |r, s| {
            s.send_server_hello(&s.reply());
            proven(r, s);
        },
        refused(Protocol, UNEXPECTED),
    ),
    trap(
        "only Finished",
        |_, s| {
            add_opening_messages(s);
            s.finish();
        },
        refused(Protocol, UNEXPECTED),
    ),
    trap(
        "two requests",
        |r, s| {
            add_opening_messages(s);
            add_certificate_request(s);
            proven(r, s);
        },
        refused(Protocol, UNEXPECTED),
    ),
    trap(
        "a request without signatures",
        |_, s| {
            s.send_server_hello(&s.reply());
            s.extend(&[]);
            s.request(&[]);
        },
        refused(NothingShared, FAILURE),
    ),
    trap(
        "a certificate request with unknown signature schemes",
        |r, s| {
            s.send_server_hello(&s.reply());
            s.extend(&[]);
            s.request(&[(SIGNATURES, vec16(&list16(&[0x0203])))]);
            proven(r, s);
            s.ping();
        },
        refused(NothingShared, FAILURE),
    ),
    trap(
        "a request with a context",
        |_, s| {
            s.send_server_hello(&s.reply());
            s.extend(&[]);
            s.add_handshake_message(&message(
                REQUEST,
                &[
                    vec8(&[1]),
                    extensions(&[(SIGNATURES, vec16(&list16(&[ECDSA])))]),
                ]
                .concat(),
            ));
        },
        refused(Protocol, DECODE),
    ),
    trap(
        "the end in the middle",
        |r, s| {
            add_opening_messages(s);
            s.certificate(&r.bob.chain);
        },
        dropped(Io),
    ),
    trap(
        "application data before Finished",
        |r, s| {
            add_opening_messages(s);
            s.certificate(&r.bob.chain);
            s.put(DATA, b"ping");
        },
        refused(Protocol, UNEXPECTED),
    ),
    trap(
        "a ticket before Finished",
        |_, s| {
            add_opening_messages(s);
            s.put(HANDSHAKE, &ticket());
        },
        refused(Protocol, UNEXPECTED),
    ),
    trap(
        "a bad tag",
        |r, s| {
            add_opening_messages(s);
            proven(r, s);
            s.wait();
            s.ping();
            *s.out.last_mut().unwrap() ^= 1;
        },
        up_then(Protocol, BAD_MAC),
    ),
    trap(
        "a bad tag in the flight",
        |_, s| {
            add_opening_messages(s);
            *s.out.last_mut().unwrap() ^= 1;
        },
        refused(Protocol, BAD_MAC),
    ),
    trap(
        "changes of cipher without end",
        |_, s| s.raw(&CCS.repeat(5000)),
        refused(Protocol, UNEXPECTED),
    ),
    trap(
        "changes of cipher without end, after the hello",
        |_, s| {
            add_opening_messages(s);
            s.raw(&CCS.repeat(5000));
        },
        dropped(Protocol),
    ),
    trap(
        "empty records without end",
        |_, s| {
            add_opening_messages(s);
            (0..5000).for_each(|_| s.put(HANDSHAKE, &[]));
        },
        dropped(Protocol),
    ),
    trap(
        "a proof with a flipped bit",
        |r, s| {
            add_opening_messages(s);
            s.certificate(&r.bob.chain);
            let mut signature = r.bob.sign(&s.to_sign(Side::Server));
            *signature.last_mut().unwrap() ^= 1;
            s.verify(ECDSA, &signature);
        },
        refused(BadSignature, DECRYPT),
    ),
    trap(
        "a proof as a client",
        |r, s| {
            add_opening_messages(s);
            s.certificate(&r.bob.chain);
            let signature = r.bob.sign(&s.to_sign(Side::Client));
            s.verify(ECDSA, &signature);
        },
        refused(BadSignature, DECRYPT),
    ),
    trap(
        "a proof by another",
        |r, s| {
            add_opening_messages(s);
            s.certificate(&r.bob.chain);
            s.proof(&r.alice);
        },
        refused(BadSignature, DECRYPT),
    ),
    trap(
        "a proof with SHA-1",
        |r, s| labelled(r, s, 0x0203),
        refused(Protocol, ILLEGAL),
    ),
    trap(
        "a proof labelled RSA-PSS",
        |r, s| labelled(r, s, 0x0804),
        refused(BadAlgorithm, DECRYPT),
    ),
    trap(
        "Certificate without proof",
        |r, s| {
            add_opening_messages(s);
            s.certificate(&r.bob.chain);
            s.finish();
        },
        refused(Protocol, UNEXPECTED),
    ),
    trap(
        "Finished with a flipped bit",
        |r, s| {
            add_opening_messages(s);
            s.certificate(&r.bob.chain);
            s.proof(&r.bob);
            let mut verdict = s.verdict();
            verdict[31] ^= 1;
            s.finish_with(&verdict);
        },
        refused(Protocol, DECRYPT),
    ),
    trap(
        "Finished of no bytes",
        |r, s| {
            add_opening_messages(s);
            s.certificate(&r.bob.chain);
            s.proof(&r.bob);
            s.finish_with(&[]);
        },
        refused(Protocol, DECRYPT),
    ),
];

#[test]
fn encrypted_flights() {
    check_traps(ENCRYPTED_FLIGHTS);
}

fn labelled(r: &'static HandshakeFixture, s: &mut MessageFlight, scheme: u16) {
    add_opening_messages(s);
    s.certificate(&r.bob.chain);
    let signature = r.bob.sign(&s.to_sign(Side::Server));
    s.verify(scheme, &signature);
}

fn issued(s: &mut MessageFlight, who: &str, change: impl FnOnce(&mut CertificateParams)) {
    shows(s, &FIXTURE.credential(who, change));
}

const CERTIFICATES: &[Flight] = &[
    trap(
        "of another workload",
        |_, s| issued(s, ALICE, |_| {}),
        refused(WrongIdentity, UNKNOWN_CERTIFICATE),
    ),
    trap(
        "of another trust domain",
        |r, s| {
            shows(
                s,
                &TestCredential::of(&r.foreign.issue_with(&identity(MALLORY), |_| {})),
            );
        },
        refused(WrongIdentity, UNKNOWN_CERTIFICATE),
    ),
    trap(
        "by another CA",
        |r, s| {
            shows(
                s,
                &TestCredential::of(&r.foreign.issue_with(&identity(BOB), |_| {})),
            );
        },
        refused(UnknownIssuer, UNKNOWN_CA),
    ),
    trap(
        "of no one",
        |_, s| issued(s, BOB, |p| p.subject_alt_names.clear()),
        refused(WrongIdentity, UNKNOWN_CERTIFICATE),
    ),
    trap(
        "of several, one of them expected",
        |_, s| {
            issued(s, BOB, |p| {
                p.subject_alt_names
                    .push(SanType::URI(ALICE.try_into().unwrap()))
            });
        },
        up(),
    ),
    trap(
        "expired",
        |_, s| issued(s, BOB, |p| p.not_after = date_time_ymd(2021, 1, 1)),
        refused(Expired, EXPIRED),
    ),
    trap(
        "not valid yet",
        |_, s| issued(s, BOB, |p| p.not_before = date_time_ymd(2110, 1, 1)),
        refused(NotYetValid, EXPIRED),
    ),
    trap(
        "revoked",
        |_, s| issued(s, BOB, |p| p.serial_number = Some(REVOKED_SERIAL.into())),
        refused(Revoked, REVOKED),
    ),
    trap(
        "for clients only",
        |_, s| {
            issued(s, BOB, |p| {
                p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth]
            });
        },
        refused(WrongUsage, UNSUPPORTED_CERTIFICATE),
    ),
    trap(
        "none",
        |_, s| {
            add_opening_messages(s);
            s.certificate(&[]);
            s.proof(&FIXTURE.bob);
        },
        dropped(NoCertificate),
    ),
    trap(
        "garbage",
        |_, s| {
            add_opening_messages(s);
            s.certificate(&[vec![0x5a; 800]]);
            s.proof(&FIXTURE.bob);
        },
        refused(BadEncoding, BAD_CERTIFICATE),
    ),
    trap(
        "cut off",
        |r, s| {
            add_opening_messages(s);
            s.certificate(&[r.bob.chain[0][..200].to_vec()]);
            s.proof(&FIXTURE.bob);
        },
        refused(BadEncoding, BAD_CERTIFICATE),
    ),
    trap(
        "a hundred",
        |r, s| {
            add_opening_messages(s);
            s.certificate(&vec![r.bob.chain[0].clone(); 100]);
            s.proof(&FIXTURE.bob);
        },
        refused(ChainTooLong, UNKNOWN_CERTIFICATE),
    ),
    trap(
        "more than 32 KiB",
        |r, s| {
            add_opening_messages(s);
            s.certificate(&[r.bob.chain[0].clone(), vec![0x30; 33 << 10]]);
            s.proof(&FIXTURE.bob);
        },
        refused(ChainTooLarge, UNKNOWN_CERTIFICATE),
    ),
    trap(
        "a mebibyte",
        |_, s| {
            add_opening_messages(s);
            s.certificate(&[vec![0x30; 1 << 20]]);
        },
        dropped(Protocol),
    ),
    trap(
        "a list that overruns",
        |_, s| {
            add_opening_messages(s);
            s.add_handshake_message(&message(CERTIFICATE, &[0, 0, 9, 9, 0, 0, 1, 7]));
        },
        refused(Protocol, DECODE),
    ),
    trap(
        "an extension that was not requested",
        |r, s| {
            add_opening_messages(s);
            let entry = [vec24(&r.bob.chain[0]), extensions(&[(GREASE, vec![1])])].concat();
            s.add_handshake_message(&message(CERTIFICATE, &[vec8(&[]), vec24(&entry)].concat()));
        },
        refused(Protocol, DECODE),
    ),
];

#[test]
fn certificates() {
    check_traps(CERTIFICATES);
}

/// Returns a ticket that is never used.
fn ticket() -> Vec<u8> {
    let lifetime = 7200_u32.to_be_bytes();
    message(
        TICKET,
        &[
            &lifetime[..],
            &[1; 4],
            &vec8(&[1]),
            &vec16(&[9; 180]),
            &[0, 0],
        ]
        .concat(),
    )
}

macro_rules! after {
    ($name:literal, $s:ident => $what:expr, $expect:expr) => {
        trap(
            $name,
            |r, $s| {
                add_opening_messages($s);
                proven(r, $s);
                $s.wait();
                $what;
            },
            $expect,
        )
    };
}

const AFTER_THE_HANDSHAKE: &[Flight] = &[
    after!("the end without a close", s => s.put(DATA, b"ping"), Expect::Up(Err(Io), None)),
    after!("a ticket", s => { s.put(HANDSHAKE, &ticket()); s.ping() }, up()),
    after!("tickets without end", s => { (0..10_000).for_each(|_| s.put(HANDSHAKE, &ticket())); s.ping() }, up()),
    after!("a ticket of 60 KiB", s => {
        let m = message(TICKET, &[&[0, 0, 1, 0][..], &[1; 4], &vec8(&[1]), &vec16(&[9; 60_000]), &[0, 0]].concat());
        m.chunks(1 << 14).for_each(|c| s.put(HANDSHAKE, c));
        s.ping();
    }, up()),
    after!("an empty ticket", s => {
        s.put(HANDSHAKE, &message(TICKET, &[&[0; 9][..], &[0, 0, 0, 0]].concat()));
    }, up_then(Protocol, DECODE)),
    after!("half a ticket, then data", s => { s.put(HANDSHAKE, &ticket()[..50]); s.ping() }, Expect::Up(Err(Protocol), None)),
    after!("a KeyUpdate", s => { s.key_update(0); s.ping() }, up()),
    after!("a flood of KeyUpdates", s => (0..2000).for_each(|_| s.key_update(1)), Expect::Up(Err(Protocol), None)),
    after!("another request", s => s.put(HANDSHAKE, &message(REQUEST, &[vec8(&[1]), extensions(&[(SIGNATURES, vec16(&[4, 3]))])].concat())), up_then(Protocol, UNEXPECTED)),
    after!("another hello", s => { let m = s.reply().message(); s.put(HANDSHAKE, &m) }, up_then(Protocol, UNEXPECTED)),
    after!("hello request", s => s.put(HANDSHAKE, &message(0, &[])), up_then(Protocol, UNEXPECTED)),
    after!("a record in clear", s => s.raw(&record(DATA, b"ping")), up_then(Protocol, BAD_MAC)),
    after!("a change of cipher", s => s.raw(&CCS), up_then(Protocol, UNEXPECTED)),
    after!("a fatal alert", s => s.alert(2, 80), Expect::Up(Err(Alert), None)),
    after!("data after the close", s => { s.ping(); s.put(DATA, b"more") }, up()),
    after!("a flood of empty data", s => { (0..5000).for_each(|_| s.put(DATA, &[])); s.ping() }, Expect::Up(Err(Protocol), None)),
];

#[test]
fn after_the_handshake() {
    check_traps(AFTER_THE_HANDSHAKE);
}

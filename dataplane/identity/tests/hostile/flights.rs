//! Hostile clients after the key agreement: the flight that authenticates them, and what they send
//! after it.

use canal_testing::identity;
use canal_tls::HandshakeFailure::{
    Alert, Ambiguous, BadAlgorithm, BadChain, BadEncoding, BadSignature, ChainTooLarge,
    ChainTooLong, Expired, Io, NoCertificate, NotYetValid, Protocol, Revoked, UnknownIssuer,
    WrongTrustDomain, WrongUsage,
};
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, SanType, date_time_ymd,
};

use super::attacker::{AttackScript, MessageFlight, Side};
use super::craft::*;
use super::fixture::{
    ALICE, Expect, FIXTURE, Flight, HandshakeFixture, MALLORY, REVOKED_SERIAL, TestCredential,
    check_flights, dropped, refused, up, up_then,
};
use super::hellos::honest;
use super::keys::RecordDirection;

const fn flight(name: &'static str, script: AttackScript, expect: Expect) -> Flight {
    Flight {
        name,
        script,
        expect,
    }
}

const UNKNOWN: Expect = refused(WrongTrustDomain, UNKNOWN_CERTIFICATE);
const CUT: Expect = Expect::Up(Err(Io), None);

/// Sends a correct flight that authenticates with the certificate `credential`.
fn shows(s: &mut MessageFlight, credential: &TestCredential) {
    s.certificate(&credential.chain);
    s.proof(credential);
    s.finish();
    s.ping();
}

fn issued(
    s: &mut MessageFlight,
    fixture: &'static HandshakeFixture,
    who: &str,
    change: impl FnOnce(&mut CertificateParams),
) {
    shows(s, &fixture.credential(who, change));
}

fn uris(list: &[&str]) -> Vec<SanType> {
    list.iter()
        .map(|u| SanType::URI((*u).try_into().unwrap()))
        .collect()
}

const MESSAGES_OUT_OF_ORDER: &[Flight] = &[
    flight("as it should be", honest, up()),
    flight("nothing", |_, _| {}, dropped(Io)),
    flight(
        "Certificate, then the end",
        |r, s| s.certificate(&r.alice.chain),
        dropped(Io),
    ),
    flight(
        "no Finished",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.proof(&r.alice);
        },
        dropped(Io),
    ),
    flight(
        "half a record, then the end",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.out.truncate(s.out.len() / 2);
        },
        dropped(Io),
    ),
    flight(
        "Finished only",
        |_, s| s.finish(),
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "no certificates",
        |_, s| {
            s.certificate(&[]);
            s.finish();
            s.ping();
        },
        refused(NoCertificate, CERTIFICATE_REQUIRED),
    ),
    flight(
        "Certificate without proof",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.finish();
            s.ping();
        },
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "proof without Certificate",
        |r, s| {
            s.proof(&r.alice);
            s.finish();
        },
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "two Certificates",
        |r, s| {
            s.certificate(&r.alice.chain);
            honest(r, s);
        },
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "two proofs",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.proof(&r.alice);
            s.proof(&r.alice);
            s.finish();
        },
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "KeyUpdate within the handshake",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.key_update(0);
            s.proof(&r.alice);
            s.finish();
        },
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "application data within the handshake",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.put(DATA, b"ping");
            s.proof(&r.alice);
            s.finish();
        },
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "application data instead of a flight",
        |_, s| {
            s.advance();
            s.ping();
        },
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "a hello instead of a flight",
        |r, s| s.add_handshake_message(&r.hello().message()),
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "a ticket instead of a flight",
        |_, s| s.add_handshake_message(&message(TICKET, &[0; 20])),
        refused(Protocol, DECODE),
    ),
    flight(
        "an unexpected EndOfEarlyData",
        |_, s| s.add_handshake_message(&message(5, &[])),
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "CertificateRequest by a client",
        |r, s| {
            s.request(&[(SIGNATURES, vec16(&list16(&[ECDSA])))]);
            honest(r, s);
        },
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "a compressed Certificate",
        |_, s| {
            s.add_handshake_message(&message(
                25,
                &[&[0, 1][..], &vec24(&[1; 9])[..], &[0; 9]].concat(),
            ))
        },
        refused(Protocol, DECODE),
    ),
    flight(
        "unknown message",
        |_, s| s.add_handshake_message(&message(99, &[0; 9])),
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "a fatal alert",
        |_, s| s.alert(2, BAD_CERTIFICATE),
        dropped(Alert),
    ),
    flight("a close", |_, s| s.alert(1, 0), refused(Alert, DECODE)),
    flight(
        "a flood of warnings",
        |_, s| (0..1000).for_each(|_| s.alert(1, 90)),
        dropped(Protocol),
    ),
    flight(
        "data after Finished in the same record",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.proof(&r.alice);
            let both = [message(FINISHED, &s.verdict()), message(KEY_UPDATE, &[0])].concat();
            s.put(HANDSHAKE, &both);
        },
        refused(Protocol, UNEXPECTED),
    ),
];

#[test]
fn messages_out_of_order() {
    check_flights(MESSAGES_OUT_OF_ORDER);
}

const PROOFS_THAT_PROVE_NOTHING: &[Flight] = &[
    flight(
        "a flipped bit",
        |r, s| {
            s.certificate(&r.alice.chain);
            let mut signature = r.alice.sign(&s.to_sign(Side::Client));
            *signature.last_mut().unwrap() ^= 1;
            s.verify(ECDSA, &signature);
            s.finish();
        },
        refused(BadSignature, DECRYPT),
    ),
    flight(
        "another's key",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.proof(&r.bob);
            s.finish();
        },
        refused(BadSignature, DECRYPT),
    ),
    flight(
        "signed as a server",
        |r, s| {
            s.certificate(&r.alice.chain);
            let signature = r.alice.sign(&s.to_sign(Side::Server));
            s.verify(ECDSA, &signature);
            s.finish();
        },
        refused(BadSignature, DECRYPT),
    ),
    flight(
        "signed before the certificate",
        |r, s| {
            let signature = r.alice.sign(&s.to_sign(Side::Client));
            s.certificate(&r.alice.chain);
            s.verify(ECDSA, &signature);
            s.finish();
        },
        refused(BadSignature, DECRYPT),
    ),
    flight(
        "labelled ECDSA with SHA-1",
        |r, s| labelled(r, s, 0x0203),
        refused(Protocol, ILLEGAL),
    ),
    flight(
        "labelled P-384",
        |r, s| labelled(r, s, 0x0503),
        refused(BadAlgorithm, DECRYPT),
    ),
    flight(
        "labelled RSA-PSS",
        |r, s| labelled(r, s, 0x0804),
        refused(BadAlgorithm, DECRYPT),
    ),
    flight(
        "labelled RSA of TLS 1.2",
        |r, s| labelled(r, s, 0x0401),
        refused(Protocol, ILLEGAL),
    ),
    flight(
        "labelled with nothing known",
        |r, s| labelled(r, s, 0x7a7a),
        refused(Protocol, ILLEGAL),
    ),
    flight(
        "an empty signature",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.verify(ECDSA, &[]);
        },
        refused(BadSignature, DECRYPT),
    ),
    flight(
        "a signature of 60 KiB",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.verify(ECDSA, &[0x30; 60 << 10]);
        },
        refused(BadSignature, DECRYPT),
    ),
    flight(
        "bytes after the signature",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.add_handshake_message(&message(VERIFY, &[4, 3, 0, 1, 1, 0]));
        },
        refused(Protocol, DECODE),
    ),
    flight(
        "Finished with a flipped bit",
        |r, s| {
            wrong_finished(r, s, |v| v[0] ^= 1);
        },
        refused(Protocol, DECRYPT),
    ),
    flight(
        "Finished of 31 bytes",
        |r, s| wrong_finished(r, s, |v| v.truncate(31)),
        refused(Protocol, DECRYPT),
    ),
    flight(
        "Finished of 33 bytes",
        |r, s| wrong_finished(r, s, |v| v.push(0)),
        refused(Protocol, DECRYPT),
    ),
    flight(
        "Finished empty",
        |r, s| wrong_finished(r, s, Vec::clear),
        refused(Protocol, DECRYPT),
    ),
    flight(
        "Finished of 16 KiB",
        |r, s| wrong_finished(r, s, |v| v.resize(16_000, 0)),
        refused(Protocol, DECRYPT),
    ),
];

#[test]
fn proofs_that_prove_nothing() {
    check_flights(PROOFS_THAT_PROVE_NOTHING);
}

/// Sends a valid signature under the wrong signature scheme.
fn labelled(r: &'static HandshakeFixture, s: &mut MessageFlight, scheme: u16) {
    s.certificate(&r.alice.chain);
    let signature = r.alice.sign(&s.to_sign(Side::Client));
    s.verify(scheme, &signature);
    s.finish();
}

fn wrong_finished(
    r: &'static HandshakeFixture,
    s: &mut MessageFlight,
    change: impl FnOnce(&mut Vec<u8>),
) {
    s.certificate(&r.alice.chain);
    s.proof(&r.alice);
    let mut verdict = s.verdict();
    change(&mut verdict);
    s.finish_with(&verdict);
    s.ping();
}

const CERTIFICATES_OF_STRANGERS: &[Flight] = &[
    flight(
        "expired",
        |r, s| issued(s, r, ALICE, |p| p.not_after = date_time_ymd(2021, 1, 1)),
        refused(Expired, EXPIRED),
    ),
    flight(
        "not valid yet",
        |r, s| issued(s, r, ALICE, |p| p.not_before = date_time_ymd(2110, 1, 1)),
        refused(NotYetValid, EXPIRED),
    ),
    flight(
        "revoked",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.serial_number = Some(REVOKED_SERIAL.into())
            })
        },
        refused(Revoked, REVOKED),
    ),
    flight(
        "for servers only",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]
            });
        },
        refused(WrongUsage, UNSUPPORTED_CERTIFICATE),
    ),
    flight(
        "for signing code",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.extended_key_usages = vec![ExtendedKeyUsagePurpose::CodeSigning]
            });
        },
        refused(WrongUsage, UNSUPPORTED_CERTIFICATE),
    ),
    flight(
        "another trust domain, by the right CA",
        |r, s| issued(s, r, MALLORY, |_| {}),
        UNKNOWN,
    ),
    flight(
        "another trust domain, by its own CA",
        |r, s| {
            shows(
                s,
                &TestCredential::of(&r.foreign.issue_with(&identity(MALLORY), |_| {})),
            );
        },
        UNKNOWN,
    ),
    flight(
        "the right name by another CA",
        |r, s| {
            shows(
                s,
                &TestCredential::of(&r.foreign.issue_with(&identity(ALICE), |_| {})),
            );
        },
        refused(UnknownIssuer, UNKNOWN_CA),
    ),
    flight(
        "no names",
        |r, s| issued(s, r, ALICE, |p| p.subject_alt_names.clear()),
        refused(Ambiguous, UNKNOWN_CERTIFICATE),
    ),
    flight(
        "a DNS name only",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.subject_alt_names =
                    vec![SanType::DnsName("alice.alpha.example".try_into().unwrap())]
            });
        },
        refused(Ambiguous, UNKNOWN_CERTIFICATE),
    ),
    flight(
        "two identities",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.subject_alt_names
                    .push(SanType::URI(MALLORY.try_into().unwrap()))
            });
        },
        refused(Ambiguous, UNKNOWN_CERTIFICATE),
    ),
    flight(
        "the same identity twice",
        |r, s| {
            issued(s, r, ALICE, |p| p.subject_alt_names = uris(&[ALICE, ALICE]));
        },
        refused(Ambiguous, UNKNOWN_CERTIFICATE),
    ),
    flight(
        "an identity over https",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.subject_alt_names = uris(&["https://alpha.example/ns/shop/sa/alice"])
            });
        },
        UNKNOWN,
    ),
    flight(
        "an identity with a port",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.subject_alt_names = uris(&["spiffe://alpha.example:1/ns/shop/sa/alice"])
            });
        },
        UNKNOWN,
    ),
    flight(
        "an identity with a query",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.subject_alt_names = uris(&["spiffe://alpha.example/ns/shop/sa/alice?x"])
            });
        },
        UNKNOWN,
    ),
    flight(
        "an identity with dots",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.subject_alt_names = uris(&["spiffe://alpha.example/ns/../ns/shop/sa/alice"])
            });
        },
        UNKNOWN,
    ),
    flight(
        "a trust domain alone",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.subject_alt_names = uris(&["spiffe://alpha.example"])
            });
        },
        UNKNOWN,
    ),
    flight(
        "a trust domain in front",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.subject_alt_names =
                    uris(&["spiffe://beta.example/alpha.example/ns/shop/sa/alice"])
            });
        },
        UNKNOWN,
    ),
    flight(
        "a CA as a leaf",
        |r, s| {
            issued(s, r, ALICE, |p| {
                p.is_ca = IsCa::Ca(BasicConstraints::Unconstrained)
            });
        },
        refused(BadChain, UNKNOWN_CERTIFICATE),
    ),
    flight(
        "signed by a leaf",
        |r, s| {
            let mut credential =
                TestCredential::of(&r.foreign.issue_with(&identity(ALICE), |_| {}));
            credential.chain.extend(r.alice.chain.clone());
            shows(s, &credential);
        },
        refused(UnknownIssuer, UNKNOWN_CA),
    ),
];

#[test]
fn certificates_of_foreign_domains() {
    check_flights(CERTIFICATES_OF_STRANGERS);
}

const CERTIFICATES_IN_BAD_SHAPE: &[Flight] = &[
    flight(
        "garbage",
        |r, s| {
            s.certificate(&[vec![0x5a; 700]]);
            s.proof(&r.alice);
        },
        refused(BadEncoding, BAD_CERTIFICATE),
    ),
    flight(
        "an empty certificate",
        |_, s| s.certificate(&[vec![]]),
        refused(BadEncoding, BAD_CERTIFICATE),
    ),
    flight(
        "cut off",
        |r, s| s.certificate(&[r.alice.chain[0][..200].to_vec()]),
        refused(BadEncoding, BAD_CERTIFICATE),
    ),
    flight(
        "a byte too many",
        |r, s| s.certificate(&[[&r.alice.chain[0][..], &[0]].concat()]),
        refused(BadEncoding, BAD_CERTIFICATE),
    ),
    flight(
        "a flipped bit",
        |r, s| {
            let mut der = r.alice.chain[0].clone();
            *der.last_mut().unwrap() ^= 1;
            s.certificate(&[der]);
        },
        refused(BadSignature, DECRYPT),
    ),
    flight(
        "garbage above",
        |r, s| {
            s.certificate(&[r.alice.chain[0].clone(), vec![0x5a; 700]]);
            s.proof(&r.alice);
            s.finish();
            s.ping();
        },
        refused(BadEncoding, BAD_CERTIFICATE),
    ),
    flight(
        "nine certificates",
        |r, s| s.certificate(&vec![r.alice.chain[0].clone(); 9]),
        refused(ChainTooLong, UNKNOWN_CERTIFICATE),
    ),
    flight(
        "a hundred certificates",
        |r, s| s.certificate(&vec![r.alice.chain[0].clone(); 100]),
        refused(ChainTooLong, UNKNOWN_CERTIFICATE),
    ),
    flight(
        "thousands of empty certificates",
        |_, s| s.certificate(&vec![vec![]; 10_000]),
        refused(ChainTooLong, UNKNOWN_CERTIFICATE),
    ),
    flight(
        "more than 32 KiB",
        |r, s| {
            s.certificate(&[r.alice.chain[0].clone(), vec![0x30; 33 << 10]]);
        },
        refused(ChainTooLarge, UNKNOWN_CERTIFICATE),
    ),
    flight(
        "more than 64 KiB",
        |_, s| s.certificate(&[vec![0x30; 66 << 10]]),
        dropped(Protocol),
    ),
    flight(
        "a mebibyte",
        |_, s| s.certificate(&[vec![0x30; 1 << 20]]),
        dropped(Protocol),
    ),
    flight(
        "a list that overruns",
        |_, s| s.add_handshake_message(&message(CERTIFICATE, &[0, 0, 9, 9, 0, 0, 1, 7])),
        refused(Protocol, DECODE),
    ),
    flight(
        "bytes after the list",
        |r, s| {
            let m = certificate(&r.alice.chain);
            s.add_handshake_message(&message(CERTIFICATE, &[&m[4..], &[0]].concat()));
        },
        refused(Protocol, DECODE),
    ),
    flight(
        "a context",
        |r, s| {
            let m = certificate(&r.alice.chain);
            s.add_handshake_message(&message(CERTIFICATE, &[&[1, 9], &m[5..]].concat()));
        },
        refused(Protocol, DECODE),
    ),
    flight(
        "an extension that was not requested",
        |r, s| {
            let entry = [vec24(&r.alice.chain[0]), extensions(&[(GREASE, vec![1])])].concat();
            s.add_handshake_message(&message(CERTIFICATE, &[vec8(&[]), vec24(&entry)].concat()));
        },
        refused(Protocol, DECODE),
    ),
    flight(
        "a stapled OCSP answer that was not requested",
        |r, s| {
            let entry = [
                vec24(&r.alice.chain[0]),
                extensions(&[(5, vec![1, 0, 0, 1, 7])]),
            ]
            .concat();
            s.add_handshake_message(&message(CERTIFICATE, &[vec8(&[]), vec24(&entry)].concat()));
        },
        dropped(Protocol),
    ),
];

#[test]
fn certificates_in_bad_shape() {
    check_flights(CERTIFICATES_IN_BAD_SHAPE);
}

/// Sends the honest flight through `put`, which lays out its messages in records.
fn laid_out(
    r: &'static HandshakeFixture,
    s: &mut MessageFlight,
    put: impl Fn(&mut MessageFlight, &[u8]),
) {
    let mut plain = Vec::new();
    let direction = s.direction.take();
    for step in [
        |r: &HandshakeFixture, s: &mut MessageFlight| s.certificate(&r.alice.chain),
        |r: &HandshakeFixture, s: &mut MessageFlight| s.proof(&r.alice),
    ] {
        step(r, s);
        plain.push(s.out.split_off(0)[5..].to_vec());
    }
    plain.push(message(FINISHED, &s.verdict()));
    s.direction = direction;
    put(s, &plain.concat());
    s.advance();
    s.ping();
}

/// Encrypts `inner` as it is, with type and padding.
fn inner(s: &mut MessageFlight, inner: &[u8]) {
    let bytes = s
        .direction
        .as_mut()
        .map(|l| l.seal(inner))
        .unwrap_or_default();
    s.raw(&bytes);
}

const RECORDS_THAT_ARE_PROTECTED_BADLY: &[Flight] = &[
    flight(
        "one record for all",
        |r, s| laid_out(r, s, |s, m| s.put(HANDSHAKE, m)),
        up(),
    ),
    flight(
        "one byte per record",
        |r, s| laid_out(r, s, |s, m| m.chunks(1).for_each(|c| s.put(HANDSHAKE, c))),
        up(),
    ),
    flight(
        "padded to the full",
        |r, s| {
            laid_out(r, s, |s, m| {
                inner(
                    s,
                    &[m, &[HANDSHAKE], &vec![0; (1 << 14) - m.len()]].concat(),
                )
            });
        },
        up(),
    ),
    flight(
        "changes of cipher between",
        |r, s| {
            s.raw(&CCS);
            honest(r, s);
        },
        up(),
    ),
    flight(
        "a flood of changes of cipher",
        |r, s| {
            s.raw(&CCS.repeat(5000));
            honest(r, s);
        },
        dropped(Protocol),
    ),
    flight(
        "a change of cipher within a message",
        |r, s| {
            laid_out(r, s, |s, m| {
                s.put(HANDSHAKE, &m[..99]);
                s.raw(&CCS);
                s.put(HANDSHAKE, &m[99..]);
            })
        },
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "a protected change of cipher",
        |r, s| {
            s.put(CHANGE, &[1]);
            honest(r, s);
        },
        refused(Protocol, UNEXPECTED),
    ),
    flight(
        "a bad tag",
        |r, s| {
            honest(r, s);
            s.out[40] ^= 1;
        },
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "a bad header",
        |r, s| {
            honest(r, s);
            s.out[1] = 2;
        },
        refused(Protocol, DECODE),
    ),
    flight(
        "a record left out",
        |r, s| {
            s.put(HANDSHAKE, &[]);
            s.out.clear();
            honest(r, s);
        },
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "a repeated record",
        |r, s| {
            s.certificate(&r.alice.chain);
            let again = s.out.clone();
            s.raw(&again);
        },
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "records in another order",
        |r, s| {
            s.certificate(&r.alice.chain);
            let first = s.out.split_off(0);
            s.proof(&r.alice);
            s.raw(&first);
        },
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "keys of application data too early",
        |r, s| {
            s.advance();
            honest(r, s);
        },
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "another's keys",
        |r, s| {
            s.direction = Some(RecordDirection::new(&[1; 32]));
            honest(r, s);
        },
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "Certificate in clear",
        |r, s| s.raw(&record(HANDSHAKE, &certificate(&r.alice.chain))),
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "an alert in clear, before any protected record",
        |_, s| s.raw(&record(ALERT, &[2, 80])),
        dropped(Alert),
    ),
    flight(
        "an alert in clear, later",
        |r, s| {
            s.certificate(&r.alice.chain);
            s.raw(&record(ALERT, &[2, 80]));
        },
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "a record without a type",
        |_, s| inner(s, &[0; 64]),
        dropped(Protocol),
    ),
    flight(
        "an empty protected record",
        |_, s| inner(s, &[]),
        dropped(Protocol),
    ),
    flight(
        "a record shorter than its tag",
        |_, s| s.raw(&record(DATA, &[1; 15])),
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "an empty record",
        |_, s| s.raw(&record(DATA, &[])),
        refused(Protocol, BAD_MAC),
    ),
    flight(
        "content of 2^14+1 bytes",
        |_, s| inner(s, &[1; (1 << 14) + 2]),
        refused(Protocol, OVERFLOW),
    ),
    flight(
        "a record of 2^14+2049 bytes",
        |_, s| s.raw(&record(DATA, &[1; (1 << 14) + 2049])),
        refused(Protocol, DECODE),
    ),
    flight(
        "empty handshake content",
        |r, s| {
            s.put(HANDSHAKE, &[]);
            honest(r, s);
        },
        up(),
    ),
    flight(
        "a flood of empty handshake content",
        |_, s| (0..5000).for_each(|_| s.put(HANDSHAKE, &[])),
        dropped(Protocol),
    ),
    flight(
        "garbage instead of records",
        |_, s| s.raw(&[0x5a; 500]),
        refused(Protocol, DECODE),
    ),
];

#[test]
fn records_that_are_protected_badly() {
    check_flights(RECORDS_THAT_ARE_PROTECTED_BADLY);
}

/// Sends the honest flight; the bytes under test follow.
fn then(r: &'static HandshakeFixture, s: &mut MessageFlight) {
    s.certificate(&r.alice.chain);
    s.proof(&r.alice);
    s.finish();
    s.wait();
}

macro_rules! after {
    ($name:literal, $s:ident => $what:expr, $expect:expr) => {
        flight(
            $name,
            |r, $s| {
                then(r, $s);
                $what;
            },
            $expect,
        )
    };
}

const AFTER_THE_HANDSHAKE: &[Flight] = &[
    after!("the end without a close", s => s.put(DATA, b"ping"), CUT),
    after!("half a record, then the end", s => { s.ping(); s.out.truncate(s.out.len() - 30) }, CUT),
    after!("data after the close", s => { s.ping(); s.put(DATA, b"more") }, up()),
    after!("garbage after the close", s => { s.ping(); s.raw(&[0x5a; 100]) }, up()),
    after!("a bad tag", s => { s.put(DATA, b"ping"); *s.out.last_mut().unwrap() ^= 1 }, up_then(Protocol, BAD_MAC)),
    after!("a record in clear", s => s.raw(&record(DATA, b"ping")), up_then(Protocol, BAD_MAC)),
    after!("an alert in clear", s => s.raw(&record(ALERT, &[1, 0])), up_then(Protocol, BAD_MAC)),
    after!("a change of cipher", s => { s.raw(&CCS); s.ping() }, up_then(Protocol, UNEXPECTED)),
    after!("another hello", s => s.put(HANDSHAKE, &FIXTURE.hello().message()), up_then(Protocol, UNEXPECTED)),
    after!("another hello in clear", s => s.raw(&record(HANDSHAKE, &FIXTURE.hello().message())), up_then(Protocol, BAD_MAC)),
    after!("hello request", s => s.put(HANDSHAKE, &message(0, &[])), up_then(Protocol, UNEXPECTED)),
    after!("another Certificate", s => s.put(HANDSHAKE, &certificate(&FIXTURE.alice.chain)), up_then(Protocol, UNEXPECTED)),
    after!("another Finished", s => s.put(HANDSHAKE, &message(FINISHED, &[0; 32])), up_then(Protocol, UNEXPECTED)),
    after!("a ticket by a client", s => s.put(HANDSHAKE, &message(TICKET, &[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0])), up_then(Protocol, UNEXPECTED)),
    after!("a KeyUpdate", s => { s.key_update(0); s.ping() }, up()),
    after!("a KeyUpdate with update_requested", s => { s.put(DATA, b"pi"); s.key_update(1); s.put(DATA, b"ng"); s.alert(1, 0) }, up()),
    after!("a KeyUpdate of 2", s => s.key_update(2), up_then(Protocol, ILLEGAL)),
    after!("a KeyUpdate of two bytes", s => s.put(HANDSHAKE, &message(KEY_UPDATE, &[0, 0])), up_then(Protocol, DECODE)),
    after!("a KeyUpdate without new keys", s => { s.put(HANDSHAKE, &message(KEY_UPDATE, &[0])); s.ping() }, up_then(Protocol, BAD_MAC)),
    after!("two KeyUpdates in one record", s => s.put(HANDSHAKE, &message(KEY_UPDATE, &[0]).repeat(2)), up_then(Protocol, UNEXPECTED)),
    after!("a flood of KeyUpdates", s => (0..2000).for_each(|_| s.key_update(1)), Expect::Up(Err(Protocol), None)),
    after!("half a KeyUpdate, then data", s => { s.put(HANDSHAKE, &[KEY_UPDATE, 0]); s.ping() }, Expect::Up(Err(Protocol), None)),
    after!("a fatal alert", s => s.alert(2, 80), Expect::Up(Err(Alert), None)),
    after!("a flood of warnings", s => (0..1000).for_each(|_| s.alert(1, 90)), Expect::Up(Err(Protocol), None)),
    after!("a flood of empty data", s => { (0..5000).for_each(|_| s.put(DATA, &[])); s.ping() }, Expect::Up(Err(Protocol), None)),
    after!("a word in many records", s => { b"ping".iter().for_each(|b| s.put(DATA, &[*b])); s.alert(1, 0) }, up()),
    after!("a start of a 16 MiB message", s => s.put(HANDSHAKE, &[KEY_UPDATE, 0xff, 0xff, 0xff]), Expect::Up(Err(Protocol), None)),
];

#[test]
fn after_the_handshake() {
    check_flights(AFTER_THE_HANDSHAKE);
}

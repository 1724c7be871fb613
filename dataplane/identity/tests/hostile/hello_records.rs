//! Records before, around and within a ClientHello: their sizes, types and borders.

use canal_tls::HandshakeFailure::{Alert, Protocol, Timeout};

use super::craft::*;
use super::fixture::{Expect, FIXTURE, HostileCase, check, dropped, refused, up};
use super::hellos::{hello, one, raw, wired};

/// Returns a case with the honest ClientHello, padded to one record of 2^14 bytes and `more`.
fn padded(name: &'static str, more: usize, expect: Expect) -> HostileCase {
    let bare = FIXTURE.hello().with(PADDING, &[]).message().len();
    hello(
        name,
        |h| h.with(PADDING, &vec![0; (1 << 14) + more - bare]),
        expect,
    )
}

/// Returns cases with other records than the one of the hello.
fn records_around_the_hello() -> Vec<HostileCase> {
    vec![
        wired("as it should be", one, up()),
        wired("one byte per record", |m| records(HANDSHAKE, m, 1), up()),
        wired(
            "sixteen bytes per record",
            |m| records(HANDSHAKE, m, 16),
            up(),
        ),
        wired(
            // A receiver ignores a record's version (RFC 8446 §5.1). rustls checks only its first
            // byte.
            "the record says TLS 1.0",
            |m| [&[22, 3, 1], &one(m)[3..]].concat(),
            up(),
        ),
        wired(
            "the record says SSL 3",
            |m| [&[22, 3, 0], &one(m)[3..]].concat(),
            up(),
        ),
        wired(
            "the record says version 5.5",
            |m| [&[22, 5, 5], &one(m)[3..]].concat(),
            refused(Protocol, DECODE),
        ),
        // rustls treats content types that it does not know as undecodable.
        wired(
            "unknown content type",
            |m| record(99, m),
            refused(Protocol, DECODE),
        ),
        wired(
            "hello as application data",
            |m| record(DATA, m),
            refused(Protocol, UNEXPECTED),
        ),
        wired(
            "application data first",
            |m| [record(DATA, b"GET / HTTP/1.1\r\n\r\n"), one(m)].concat(),
            refused(Protocol, UNEXPECTED),
        ),
        wired(
            // An alert has a level (1 warns, 2 is fatal) and a description: 0 closes, 40 and 90 are
            // failures, 200 is unassigned.
            "a fatal alert first",
            |m| [record(ALERT, &[2, 40]), one(m)].concat(),
            dropped(Alert),
        ),
        // A close is only a warning here, so the server goes on to wait for the hello.
        wired("a close only", |_| record(ALERT, &[1, 0]), dropped(Timeout)),
        // The alert is not encrypted, so an attacker on the path may have sent it. Only the
        // following bytes count.
        wired(
            "a close first",
            |m| [record(ALERT, &[1, 0]), one(m)].concat(),
            up(),
        ),
        wired(
            "an alert of one byte",
            |m| [record(ALERT, &[2]), one(m)].concat(),
            refused(Protocol, DECODE),
        ),
        wired(
            "an empty alert",
            |m| [record(ALERT, &[]), one(m)].concat(),
            refused(Protocol, DECODE),
        ),
        wired(
            "an unknown alert",
            |m| [record(ALERT, &[2, 200]), one(m)].concat(),
            dropped(Alert),
        ),
        wired(
            // rustls tolerates four warnings.
            "a flood of warnings",
            |m| [record(ALERT, &[1, 90]).repeat(10_000), one(m)].concat(),
            dropped(Protocol),
        ),
    ]
}

/// Returns cases with a change of cipher or an empty record around the hello.
fn changes_of_cipher() -> Vec<HostileCase> {
    vec![
        wired(
            // RFC 8446 §5 permits it only between the first hello and Finished.
            "a change of cipher before",
            |m| [&CCS[..], &one(m)].concat(),
            refused(Protocol, UNEXPECTED),
        ),
        wired(
            "a change of cipher after",
            |m| [&one(m)[..], &CCS].concat(),
            up(),
        ),
        wired(
            // rustls tolerates one for each of two hellos.
            "a flood of changes of cipher after",
            |m| [one(m), CCS.repeat(10_000)].concat(),
            dropped(Protocol),
        ),
        wired(
            // Its only value is 1; another one is an unexpected message (RFC 8446 §5).
            "a change of cipher to 2",
            |m| [one(m), record(CHANGE, &[2])].concat(),
            refused(Protocol, UNEXPECTED),
        ),
        wired(
            "a change of cipher of two bytes",
            |m| [one(m), record(CHANGE, &[1, 1])].concat(),
            refused(Protocol, UNEXPECTED),
        ),
        wired(
            // RFC 8446 §5.1 forbids fragments of no length, except of application data.
            "an empty handshake record",
            |m| [one(&[]), one(m)].concat(),
            refused(Protocol, DECODE),
        ),
        wired(
            "a flood of empty handshake records",
            // The first is refused; the others show that they cost nothing more.
            |_| one(&[]).repeat(20_000),
            refused(Protocol, DECODE),
        ),
        wired(
            "a flood of empty application data",
            |_| record(DATA, &[]).repeat(20_000),
            refused(Protocol, UNEXPECTED),
        ),
        wired(
            // 24 is the content type of heartbeats (RFC 6520), which this stack does not have.
            "heartbeat",
            |m| [record(24, &[1, 0x40, 0]), one(m)].concat(),
            refused(Protocol, DECODE),
        ),
    ]
}

/// Returns cases with long records, and with records or messages within the hello.
fn records_within_the_hello() -> Vec<HostileCase> {
    vec![
        // rustls reads records of up to 2^14+2048 bytes, the limit of TLS 1.2 for ciphertext.
        padded("a record of 2^14+257 bytes", 257, up()),
        padded(
            "a record of 2^14+2049 bytes",
            2049,
            refused(Protocol, DECODE),
        ),
        raw(
            "a record of 65535 bytes",
            record(HANDSHAKE, &[1; 65_535]),
            refused(Protocol, DECODE),
        ),
        // Byte 50 is anywhere within the hello. No other record may come between those of one message
        // (RFC 8446 §5.1).
        wired(
            "an alert within the hello",
            |m| [one(&m[..50]), record(ALERT, &[1, 90]), one(&m[50..])].concat(),
            dropped(Protocol),
        ),
        wired(
            "a change of cipher within",
            |m| [&one(&m[..50])[..], &CCS, &one(&m[50..])].concat(),
            dropped(Protocol),
        ),
        wired(
            "data within the hello",
            |m| [one(&m[..50]), record(DATA, b"x"), one(&m[50..])].concat(),
            dropped(Protocol),
        ),
        wired(
            // The keys change behind a ClientHello, so no message may follow it in its record (RFC
            // 8446 §5.1).
            "two hellos in one record",
            |m| one(&m.repeat(2)),
            refused(Protocol, UNEXPECTED),
        ),
        // After a whole hello the server expects only protected records.
        wired(
            "two hellos in two records",
            |m| one(m).repeat(2),
            refused(Protocol, BAD_MAC),
        ),
        wired(
            "the start of a second message",
            |m| one(&[m, &[11]].concat()),
            refused(Protocol, UNEXPECTED),
        ),
    ]
}

#[test]
fn records_before_and_around_the_hello() {
    check(&records_around_the_hello());
    check(&changes_of_cipher());
    check(&records_within_the_hello());
}

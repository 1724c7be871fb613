//! Alpha exhausts the gateway's connections, handshakes, streams and windows, with connections in
//! every state in which a connection can be left.

use std::time::Duration;

use canal_e2e::flood::{ConnectionFlood, Hold, churn};

use super::ExhaustionCase;
use super::exhaustion_world::{ALPHA, ExhaustionWorld};

/// Connections of one flood. The world's gateways accept about 9,000 each, and a test process may
/// open 20,000 files.
const MANY: usize = 3000;
/// Connections of a flood in which each costs a handshake, on two cores that all processes share.
/// Nobody derived the number: it ends within the duration of a case.
const SOME: usize = 200;

fn flood<'f>(
    hold: Hold<'f>,
    connections: usize,
    setup: &'f ExhaustionWorld,
    lasts: Duration,
) -> ConnectionFlood<'f> {
    ConnectionFlood {
        host: ALPHA,
        to: setup.gateway(),
        connections,
        hold,
        lasts,
    }
}

fn open_connections(
    name: &'static str,
    connections: usize,
    hold: fn() -> Hold<'static>,
) -> ExhaustionCase {
    let tries_min = connections as u64 / 2;
    ExhaustionCase::new(name, tries_min, move |setup, lasts| {
        let report = flood(hold(), connections, setup, lasts).run(&setup.mesh.world);
        report.connections_opened + report.refused
    })
}

/// Returns the incomplete first flight of a TLS 1.3 client: it announces a record of 512 bytes and
/// has 5.
pub(super) fn half_hello() -> Vec<u8> {
    vec![0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc, 0x03]
}

pub(super) fn cases() -> Vec<ExhaustionCase> {
    let mut cases = vec![
        open_connections("TCP connections without a byte", MANY, || Hold::Silent),
        open_connections("half a TLS hello on each connection", MANY, || {
            Hold::Bytes(half_hello())
        }),
        // Fewer, because each of these sends until the end, or is closed and opened again.
        open_connections("a TLS hello byte by byte", MANY / 3, || {
            // One byte in 300 ms makes a hello of ten bytes last three seconds.
            Hold::Drip(half_hello(), Duration::from_millis(300))
        }),
        open_connections("bytes that are no TLS", MANY / 3, || {
            Hold::Bytes(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec())
        }),
        // Few connections are enough here, since each sends without an end.
        open_connections("endless bytes that are no TLS", 50, || {
            Hold::Flood(vec![0x16; 16 << 10])
        }),
        open_connections("TLS without a certificate", SOME, || Hold::Tls(None)),
    ];
    // The second argument is the minimum for the attack to count: a quarter of the connections.
    cases.push(ExhaustionCase::new(
        "TLS with a certificate and no tunnel",
        SOME as u64 / 4,
        |setup, lasts| {
            let credential = setup.member("alpha", "client");
            flood(Hold::Tls(Some(&credential)), SOME, setup, lasts)
                .run(&setup.mesh.world)
                .connections_opened
        },
    ));
    // Each connection costs the attacker a handshake, so the numbers of connections are small.
    let streams = |name, connections: usize, streams: usize, payload: usize| {
        ExhaustionCase::new(
            name,
            connections as u64 / 4,
            move |setup: &ExhaustionWorld, lasts| {
                let credential = setup.member("alpha", "client");
                let web = setup.web("alpha");
                let hold = Hold::Streams {
                    credential: &credential,
                    authority: &web,
                    streams,
                    payload,
                };
                flood(hold, connections, setup, lasts)
                    .run(&setup.mesh.world)
                    .connections_opened
            },
        )
    };
    // The numbers are connections, streams on each, and bytes sent on each stream.
    cases.push(streams("silent tunnels", 20, 100, 0));
    cases.push(streams("tunnels with half a request", 20, 100, 20));
    // 4 MiB exceed a stream's window, so that it stays full.
    cases.push(streams("tunnels whose windows are full", 20, 50, 4 << 20));
    // The same over fewer connections. Nobody derived their number.
    cases.push(streams(
        "tunnels to an application that does not read",
        8,
        50,
        4 << 20,
    ));
    cases.push(ExhaustionCase::new(
        // The minimum is half of the connections, as in `open_connections`.
        "tunnels that are opened and reset",
        10,
        |setup, lasts| {
            let credential = setup.member("alpha", "client");
            let web = setup.web("alpha");
            let hold = Hold::Resets {
                credential: &credential,
                authority: &web,
            };
            flood(hold, 20, setup, lasts)
                .run(&setup.mesh.world)
                .connections_opened
        },
    ));
    // Nothing is left open, so the attempts per second are the load. Nobody derived their minimum.
    cases.push(ExhaustionCase::new(
        "connections that are opened and reset",
        1000,
        |setup, lasts| {
            let report = churn(&setup.mesh.world, ALPHA, setup.gateway(), lasts);
            report.connections_opened + report.refused
        },
    ));
    cases
}

//! Alpha's node exhausts the key server's connections and handshakes.

use std::net::SocketAddr;
use std::time::Duration;

use canal_e2e::flood::{ConnectionFlood, Hold, churn};
use canal_wire::keyrpc::PORT;

use super::ExhaustionCase;
use super::exhaustion_world::{ALPHA_NODE, ExhaustionWorld};

/// The key server of the victim's AZ, which its gateways use too.
const NEAR: &str = "ks-1";

fn server(setup: &ExhaustionWorld) -> SocketAddr {
    SocketAddr::from((setup.mesh.address(NEAR), PORT))
}

fn open_connections(
    name: &'static str,
    connections: usize,
    hold: fn() -> Hold<'static>,
) -> ExhaustionCase {
    ExhaustionCase::new(name, connections as u64 / 4, move |setup, lasts| {
        let flood = ConnectionFlood {
            host: ALPHA_NODE,
            to: server(setup),
            connections,
            hold: hold(),
            lasts,
        };
        let report = flood.run(&setup.mesh.world);
        report.connections_opened + report.refused
    })
}

pub(super) fn cases() -> Vec<ExhaustionCase> {
    vec![
        open_connections("channels without a byte", 1500, || Hold::Silent),
        open_connections("channels with half a TLS hello", 1500, || {
            Hold::Bytes(vec![0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc])
        }),
        open_connections("channels with a TLS hello byte by byte", 500, || {
            Hold::Drip(
                vec![0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc],
                Duration::from_millis(300),
            )
        }),
        open_connections("channels with TLS and no certificate", 200, || {
            Hold::Tls(None)
        }),
        open_connections("channels with endless garbage", 50, || {
            Hold::Flood(vec![0xff; 16 << 10])
        }),
        ExhaustionCase::new(
            "channels that are opened and reset",
            1000,
            |setup, lasts| {
                let report = churn(&setup.mesh.world, ALPHA_NODE, server(setup), lasts);
                report.connections_opened + report.refused
            },
        ),
    ]
}

//! Alpha takes the gateway's connections, handshakes, streams and windows: connections in every state in which one can be left.

use std::time::Duration;

use canal_e2e::flood::{Flood, Hold, churn};

use super::Case;
use super::stage::{ALPHA, Stage};

/// Connections of one flood; the world's gateways have room for about 9,000 each, and a test process for 20,000 files.
const MANY: usize = 3000;
/// Where each connection costs a handshake, on two cores that everybody shares.
const SOME: usize = 200;

fn flood<'f>(hold: Hold<'f>, connections: usize, stage: &'f Stage, lasts: Duration) -> Flood<'f> {
    Flood { host: ALPHA, to: stage.gateway(), connections, hold, lasts }
}

fn held(name: &'static str, connections: usize, hold: fn() -> Hold<'static>) -> Case {
    let tries_min = connections as u64 / 2;
    Case::new(name, tries_min, move |stage, lasts| {
        let report = flood(hold(), connections, stage, lasts).run(&stage.mesh.world);
        report.opened + report.refused
    })
}

/// The first flight of a TLS 1.3 client without its end: a record of 512 bytes is announced and 5 come.
fn half_hello() -> Vec<u8> {
    vec![0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc, 0x03]
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![
        held("TCP connections without a byte", MANY, || Hold::Silent),
        held("half a TLS hello on each connection", MANY, || Hold::Bytes(half_hello())),
        held("a TLS hello byte by byte", MANY / 3, || Hold::Drip(half_hello(), Duration::from_millis(300))),
        held("bytes that are no TLS", MANY / 3, || Hold::Bytes(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec())),
        held("endless bytes that are no TLS", 50, || Hold::Flood(vec![0x16; 16 << 10])),
        held("TLS without a certificate", SOME, || Hold::Tls(None)),
    ];
    cases.push(Case::new("TLS with a certificate and no tunnel", SOME as u64 / 4, |stage, lasts| {
        let credential = stage.member("alpha", "client");
        flood(Hold::Tls(Some(&credential)), SOME, stage, lasts).run(&stage.mesh.world).opened
    }));
    let streams = |name, connections: usize, streams: usize, payload: usize| {
        Case::new(name, connections as u64 / 4, move |stage: &Stage, lasts| {
            let credential = stage.member("alpha", "client");
            let web = stage.web("alpha");
            let hold = Hold::Streams { credential: &credential, authority: &web, streams, payload };
            flood(hold, connections, stage, lasts).run(&stage.mesh.world).opened
        })
    };
    cases.push(streams("tunnels that say nothing", 20, 100, 0));
    cases.push(streams("tunnels with half a request", 20, 100, 20));
    cases.push(streams("tunnels whose windows are full", 20, 50, 4 << 20));
    cases.push(streams("tunnels to an application that does not read", 8, 50, 4 << 20));
    cases.push(Case::new("tunnels that are opened and reset", 10, |stage, lasts| {
        let credential = stage.member("alpha", "client");
        let web = stage.web("alpha");
        let hold = Hold::Resets { credential: &credential, authority: &web };
        flood(hold, 20, stage, lasts).run(&stage.mesh.world).opened
    }));
    cases.push(Case::new("connections that are opened and reset", 1000, |stage, lasts| {
        let report = churn(&stage.mesh.world, ALPHA, stage.gateway(), lasts);
        report.opened + report.refused
    }));
    cases
}

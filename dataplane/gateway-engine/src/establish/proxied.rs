//! Reads the header of the PROXY protocol, with which connections of a load balancer begin at ports of
//! Gateways that ask for it. Start with [`proxied_client`].

use std::net::SocketAddr;

use canal_gateway_io::clock::TimeoutKind;
use canal_gateway_io::proxy_header::{ProxiedClient, ProxyHeaderError, parse};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use crate::worker::Worker;

/// Maximum number of bytes that are looked at together. Most headers are shorter than it.
const PEEK_BYTES: usize = 256;

/// Reads the header, and no byte behind it. Returns the address of the client: that of the load
/// balancer if the header names none.
///
/// # Errors
/// The reason for the refusal, as a counter label.
pub(super) async fn proxied_client(
    worker: &Worker,
    stream: &mut TcpStream,
    balancer: SocketAddr,
) -> Result<SocketAddr, &'static str> {
    let timer = worker.clock.timer();
    timer.arm(TimeoutKind::Head, worker.shared.config.times.head);
    let mut read: Vec<u8> = Vec::new();
    loop {
        let mut next = [0; PEEK_BYTES];
        let count = match timer.within(stream.peek(&mut next)).await {
            Ok(Ok(count @ 1..)) => count,
            Ok(_) => return Err("gone"),
            Err(late) => {
                worker.counts.late(late);
                return Err("proxy_header_timeout");
            }
        };
        let before = read.len();
        read.extend_from_slice(&next[..count]);
        let parsed = parse(&read).map_err(|error| match error {
            ProxyHeaderError::Malformed => "proxy_header",
            ProxyHeaderError::TooLong => "proxy_header_bytes",
        })?;
        // Bytes of an incomplete header belong to it. They are taken, so that the next peek waits for
        // further ones.
        let taken = parsed.map_or(count, |(_, length)| length - before);
        // They have arrived already.
        if stream.read_exact(&mut next[..taken]).await.is_err() {
            return Err("gone");
        }
        match parsed {
            Some((ProxiedClient::Address(client), _)) => return Ok(client),
            Some((ProxiedClient::Unknown, _)) => return Ok(balancer),
            None => {}
        }
    }
}

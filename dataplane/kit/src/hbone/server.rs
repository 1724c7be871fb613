//! The server: HTTP/2 on an accepted mTLS connection, CONNECT requests handed out one by one. It connects to nothing itself.

use std::rc::Rc;
use std::time::Duration;

use canal_model::identity::Peer;
use http::HeaderMap;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Authority, HboneError, HboneStream};
use crate::drain::Drain;

/// How the server behaves. `Default` is ztunnel's.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Concurrent streams per connection.
    pub streams_max: u32,
    /// PING interval and answer limit.
    pub ping: (Duration, Duration),
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self { streams_max: canal_wire::hbone::SERVER_STREAMS_MAX, ping: super::PING }
    }
}

/// One CONNECT, to be accepted or refused. Dropping it resets the stream.
#[derive(Debug)]
pub struct Incoming {
    /// Where to.
    pub authority: Authority,
    pub headers: HeaderMap,
    /// Who asks.
    pub peer: Rc<Peer>,
}

impl Incoming {
    /// Answers 200 with `headers` (e.g. the own `baggage`); only after the destination is connected.
    pub fn accept(self, headers: HeaderMap) -> Result<HboneStream, HboneError> {
        let _ = headers;
        unreachable!("body lands in the next commit")
    }
    /// Answers `status` and ends the stream.
    pub fn refuse(self, status: u16) {
        let _ = status;
        unreachable!("body lands in the next commit")
    }
}

/// What became of a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Served {
    /// CONNECTs handed out.
    pub streams: u64,
    /// Requests answered 400 here: not CONNECT, or a bad authority.
    pub refused: u64,
}

/// Serves one connection until it ends. `on_connect` must not block; it spawns what it does. When `drain` starts, GOAWAY is sent and open
/// streams may finish; when it is forced the connection is dropped. Every connection runs on the caller's `LocalSet`.
pub async fn serve<IO: AsyncRead + AsyncWrite + Unpin>(
    io: IO,
    peer: Peer,
    config: &ServerConfig,
    drain: Drain,
    on_connect: impl FnMut(Incoming),
) -> Result<Served, HboneError> {
    let _ = (io, peer, config, drain, on_connect);
    unreachable!("body lands in the next commit")
}

//! The client: one pool per worker, never shared, never locked. Streams to one peer share connections; a crowd waits for one handshake.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use canal_model::identity::Identity;
use http::HeaderMap;

use super::{Authority, HboneError, HboneStream};
use crate::sys::Netns;
use crate::tls::ClientIdentity;

/// How a pool behaves. `Default` is ztunnel's.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Streams on one connection before another is opened.
    pub streams_max: u32,
    /// A connection without streams is closed after.
    pub idle: Duration,
    /// For TCP.
    pub connect_timeout: Duration,
    /// For the answer to CONNECT (the peer connects to the application in it).
    pub answer_timeout: Duration,
    /// PING interval and answer limit.
    pub ping: (Duration, Duration),
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            streams_max: canal_wire::hbone::POOL_STREAMS_MAX,
            idle: Duration::from_secs(300),
            connect_timeout: crate::sys::CONNECT_TIMEOUT,
            answer_timeout: Duration::from_secs(20),
            ping: super::PING,
        }
    }
}

/// Where a tunnel goes and as whom. Connections are shared between targets that agree in all of it.
#[derive(Debug, Clone)]
pub struct Target {
    /// The own identity.
    pub source: ClientIdentity,
    /// The peer must be one of these.
    pub expected: Arc<[Identity]>,
    /// The peer's HBONE address.
    pub address: SocketAddr,
    /// The namespace the socket is made in (the source pod's); `None` is the worker's own.
    pub netns: Option<Arc<Netns>>,
    /// `SO_MARK` of the socket.
    pub mark: Option<u32>,
}

/// A tunnel that is up.
#[derive(Debug)]
pub struct Opened {
    pub stream: HboneStream,
    /// Of the 200, e.g. the peer's `baggage`.
    pub headers: HeaderMap,
    /// The identity the peer proved.
    pub peer: Identity,
    /// Whether an existing connection was used.
    pub reused: bool,
}

/// The pool of one worker. Clones share it; it is `!Send` by design and needs a `LocalSet`.
#[derive(Clone)]
pub struct Pool {
    _inner: Rc<()>,
}

impl Pool {
    /// An empty pool.
    pub fn new(config: PoolConfig) -> Self {
        let _ = config;
        unreachable!("body lands in the next commit")
    }

    /// Opens a tunnel: CONNECT `authority` with `headers`. A pooled connection that turns out dead, full or closing is replaced
    /// once; that is safe, because no payload is sent before the 200.
    pub async fn open(&self, target: &Target, authority: &Authority, headers: HeaderMap) -> Result<Opened, HboneError> {
        let _ = (target, authority, headers);
        unreachable!("body lands in the next commit")
    }

    /// Open connections and streams on them, for `/config_dump`.
    pub fn size(&self) -> (usize, usize) {
        unreachable!("body lands in the next commit")
    }

    /// Closes connections of `netns` (a pod that is gone) or all: no new streams; open ones finish.
    pub fn retire(&self, netns: Option<crate::sys::NetnsId>) {
        let _ = netns;
        unreachable!("body lands in the next commit")
    }
}

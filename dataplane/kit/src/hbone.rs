//! HBONE: HTTP/2 CONNECT tunnels over mTLS, client pool and server, wire-compatible with Istio's ztunnel (features.md A.3).
//! What is tunnelled, and whether it may be, is the callers' business. Read [`pool`], then [`server`], then [`stream`].

mod counts;
mod error;
mod opening;
pub mod pool;
pub mod server;
pub mod stream;
pub mod windows;

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

pub use counts::{Ended, HboneCounters};
pub use error::HboneError;
pub use pool::{ConnectionHost, Opened, Pool, PoolConfig, Target};
pub use server::{Asked, Incoming, ServerConfig, serve};
pub use stream::HboneStream;
pub use windows::{WindowBudget, WindowGrowth, WindowSizes};

/// PING interval and the time its answer may take before the connection is dropped, both sides.
pub const PING: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(20));

/// What small unread DATA frames may cost a connection, bytes of bookkeeping as h2 estimates it: about 1,000 for a frame of 50, which really
/// takes some 200. h2's own value (half the window) would end a whole connection when one application stops reading while its peer writes
/// in pieces of some 50 bytes, which is no attack: a stream's largest window of such pieces fits.
const DATA_FRAME_BUDGET: usize = 20 * canal_wire::hbone::STREAM_WINDOW_MAX as usize;

/// Pings at each interval; resolves when an answer is late. Pending for good once the connection is gone.
async fn keep_alive(pings: Option<h2::PingPong>, (interval, limit): (Duration, Duration)) {
    let Some(mut pings) = pings else { return std::future::pending().await };
    loop {
        tokio::time::sleep(interval).await;
        match tokio::time::timeout(limit, pings.ping(h2::Ping::opaque())).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => return std::future::pending().await,
            Err(_) => return,
        }
    }
}

/// The `:authority` of a CONNECT.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Authority {
    /// `ip:port` / `[ip]:port`.
    Address(SocketAddr),
    /// `hostname:port`, lower case.
    Name(String, u16),
}

/// The authority is neither `ip:port` nor `hostname:port`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("CONNECT authority {0:?} is not ip:port or hostname:port")]
pub struct BadAuthority(pub String);

impl Authority {
    /// The port.
    pub fn port(&self) -> u16 {
        match self {
            Authority::Address(a) => a.port(),
            Authority::Name(_, p) => *p,
        }
    }
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Authority::Address(a) => a.fmt(f),
            Authority::Name(n, p) => write!(f, "{n}:{p}"),
        }
    }
}

impl FromStr for Authority {
    type Err = BadAuthority;
    fn from_str(s: &str) -> Result<Self, BadAuthority> {
        let bad = || BadAuthority(s.chars().take(120).collect());
        if let Ok(a) = s.parse::<SocketAddr>() {
            return if a.port() > 0 { Ok(Authority::Address(a)) } else { Err(bad()) };
        }
        let (name, port) = s.rsplit_once(':').ok_or_else(bad)?;
        let label = |l: &str| !l.is_empty() && l.len() <= 63 && l.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'-' || c == b'_');
        let digits = !port.is_empty() && port.bytes().all(|c| c.is_ascii_digit());
        match port.parse::<u16>() {
            Ok(p) if p > 0 && digits && name.len() <= 253 && name.split('.').all(label) => {
                Ok(Authority::Name(name.to_ascii_lowercase(), p))
            }
            _ => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests;

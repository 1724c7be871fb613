//! HBONE: HTTP/2 CONNECT tunnels over mTLS, with a client pool and a server, wire-compatible with
//! Istio's ztunnel. The callers decide what is tunneled and whether it is permitted. Read [`pool`],
//! then [`server`], then [`stream`].

#![forbid(unsafe_code)]

pub mod close_report;
mod counts;
pub mod credit;
mod error;
pub mod exchanges;
mod first_write;
pub mod flow;
pub mod pool;
pub mod server;
pub mod stream;
pub mod windows;

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use tokio::sync::Notify;

pub use close_report::CloseReport;
pub use counts::{HboneCloseReason, HboneCounters};
pub use credit::{CreditWait, SendCredit, WITHHELD_CONNECTIONS_MAX};
pub use error::HboneError;
pub use flow::{BUFFER_BYTES_MIN, BufferBudget, FlowAccount, StalledBytes};
pub use pool::{
    ConnectionHost, HbonePool, OpenTunnel, PoolConfig, SpreadConfig, Steering, TunnelTarget,
};
pub use server::{ConnectResult, IncomingConnect, ServerConfig, serve};
pub use stream::{HboneStream, REPLAY_BYTES_MAX};
pub use windows::{CONNECTION_WINDOW, WindowGrowth};

/// PING interval, and the time that the answer may take before the connection is closed, on both
/// sides. Both values are ztunnel's.
pub const KEEPALIVE_INTERVAL: (Duration, Duration) =
    (Duration::from_secs(10), Duration::from_secs(20));

/// Budget of small unread DATA frames per connection, in bytes of bookkeeping as h2 estimates it:
/// 256 less its length for each frame. Peers that write pieces of about 50 bytes to applications
/// that stop reading are no attack. A smaller budget would end the connection of all of them. This
/// budget fits the first windows of as many streams as a connection has. The stream of a reader
/// that stalls merges its frames, which uses none of the budget.
pub const DATA_FRAME_BUDGET: usize =
    5 * (canal_wire::hbone::SERVER_STREAMS_MAX * canal_wire::hbone::STREAM_WINDOW) as usize;

/// Sends a PING at each interval, and whenever `requested` is notified. Resolves when an answer is
/// late, and stays pending once the connection is gone.
async fn keep_alive(
    pings: Option<h2::PingPong>,
    (interval, limit): (Duration, Duration),
    requested: &Notify,
) {
    let Some(mut pings) = pings else {
        return std::future::pending().await;
    };
    loop {
        let _ = tokio::time::timeout(interval, requested.notified()).await;
        match tokio::time::timeout(limit, pings.ping(h2::Ping::opaque())).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => return std::future::pending().await,
            Err(_) => return,
        }
    }
}

/// The `:authority` of a CONNECT request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ConnectAuthority {
    /// IP address and port: `ip:port` or `[ip]:port`.
    Address(SocketAddr),
    /// Host name and port: `hostname:port`, in lower case.
    Name(String, u16),
}

/// The authority is neither `ip:port` nor `hostname:port`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("CONNECT authority {0:?} is not ip:port or hostname:port")]
pub struct InvalidAuthority(pub String);

impl ConnectAuthority {
    /// Returns the port of the authority.
    pub fn port(&self) -> u16 {
        match self {
            ConnectAuthority::Address(a) => a.port(),
            ConnectAuthority::Name(_, p) => *p,
        }
    }
}

impl fmt::Display for ConnectAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectAuthority::Address(a) => a.fmt(f),
            ConnectAuthority::Name(n, p) => write!(f, "{n}:{p}"),
        }
    }
}

impl FromStr for ConnectAuthority {
    type Err = InvalidAuthority;
    fn from_str(s: &str) -> Result<Self, InvalidAuthority> {
        let bad = || InvalidAuthority(s.chars().take(120).collect());
        if let Ok(a) = s.parse::<SocketAddr>() {
            return if a.port() > 0 {
                Ok(ConnectAuthority::Address(a))
            } else {
                Err(bad())
            };
        }
        let (name, port) = s.rsplit_once(':').ok_or_else(bad)?;
        let label = |l: &str| {
            !l.is_empty()
                && l.len() <= 63
                && l.bytes()
                    .all(|c| c.is_ascii_alphanumeric() || c == b'-' || c == b'_')
        };
        let digits = !port.is_empty() && port.bytes().all(|c| c.is_ascii_digit());
        match port.parse::<u16>() {
            Ok(p) if p > 0 && digits && name.len() <= 253 && name.split('.').all(label) => {
                Ok(ConnectAuthority::Name(name.to_ascii_lowercase(), p))
            }
            _ => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests;

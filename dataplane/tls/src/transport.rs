//! The transport of a TLS connection, and the hint by which a record layer requests a new
//! connection. No bytes are read or written here. Start at [`Transport`].

use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Transport of an mTLS connection.
pub trait Transport: AsyncRead + AsyncWrite + Unpin {
    /// Returns the socket for kernel TLS, or `None` if there is none. The result is always the
    /// same.
    fn tcp(&self) -> Option<&TcpStream>;
}

impl Transport for TcpStream {
    fn tcp(&self) -> Option<&TcpStream> {
        Some(self)
    }
}

/// A pipe in memory has no socket.
impl Transport for DuplexStream {
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }
}

/// Hint that a connection should soon be replaced by another one.
#[derive(Debug, Clone)]
pub struct RotateHint(Arc<Notify>);

impl RotateHint {
    pub(super) fn new() -> Self {
        Self(Arc::default())
    }

    /// Sets the hint; repeated calls have no effect.
    pub(super) fn set(&self) {
        self.0.notify_one();
    }

    /// Resolves when the hint is set.
    pub async fn out(self) {
        self.0.notified().await;
    }
}

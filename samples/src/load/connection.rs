//! One client connection, HTTP/1.1 or HTTP/2 without TLS. It sends each request once, without
//! retries, and names the kind of a failure. Start at [`dial`].

use std::time::Duration;

use clap::ValueEnum;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

use crate::answer::SampleBody;

/// Timeout for the TCP connect. It only ends a hang: the load's own timeout for a request includes
/// the connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// HTTP version of the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Protocol {
    /// HTTP/1.1
    H1,
    /// HTTP/2 by prior knowledge
    H2,
}

/// A connection that is ready for requests.
#[derive(Debug)]
pub enum Dialed {
    H1(http1::SendRequest<SampleBody>),
    H2(http2::SendRequest<SampleBody>),
}

/// Reason why a connection could not be established.
#[derive(Debug)]
pub enum DialError {
    Timeout,
    Tcp(std::io::Error),
    Http(hyper::Error),
}

impl std::fmt::Display for DialError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Timeout => write!(f, "no connection in {} s", CONNECT_TIMEOUT.as_secs()),
            Self::Tcp(problem) => write!(f, "{problem}"),
            Self::Http(problem) => write!(f, "{}", chain(problem)),
        }
    }
}

/// Connects to `host:port`. The default port is 80.
///
/// # Errors
///
/// The connect timed out or failed, or the HTTP handshake failed.
pub async fn dial(authority: &str, protocol: Protocol) -> Result<Dialed, DialError> {
    let ported = http::uri::Authority::try_from(authority).is_ok_and(|a| a.port_u16().is_some());
    let address = if ported {
        authority.to_owned()
    } else {
        format!("{authority}:80")
    };
    let stream = match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
        Ok(stream) => stream.map_err(DialError::Tcp)?,
        Err(_) => return Err(DialError::Timeout),
    };
    // With Nagle's algorithm small requests wait for acknowledgements. If it cannot be turned off,
    // the connection still works.
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(stream);
    // The connection tasks end with the connection. Their errors reach the pending request.
    match protocol {
        Protocol::H1 => {
            let (sender, connection) = http1::handshake(io).await.map_err(DialError::Http)?;
            tokio::spawn(connection);
            Ok(Dialed::H1(sender))
        }
        Protocol::H2 => {
            let (sender, connection) = http2::handshake(TokioExecutor::new(), io)
                .await
                .map_err(DialError::Http)?;
            tokio::spawn(connection);
            Ok(Dialed::H2(sender))
        }
    }
}

impl Dialed {
    /// Returns false if the server has closed the connection.
    pub async fn ready(&mut self) -> bool {
        match self {
            Self::H1(sender) => sender.ready().await.is_ok(),
            Self::H2(sender) => sender.ready().await.is_ok(),
        }
    }

    /// Sends one request on the connection.
    ///
    /// # Errors
    ///
    /// The connection failed before the response head arrived.
    pub async fn send(
        &mut self,
        request: Request<SampleBody>,
    ) -> Result<Response<Incoming>, hyper::Error> {
        match self {
            Self::H1(sender) => sender.send_request(request).await,
            Self::H2(sender) => sender.send_request(request).await,
        }
    }
}

/// Returns a short name for the reason why no response arrived.
pub fn kind_of(problem: &hyper::Error) -> &'static str {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(problem);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return match io.kind() {
                std::io::ErrorKind::ConnectionReset => "reset",
                std::io::ErrorKind::BrokenPipe => "closed",
                _ => "io",
            };
        }
        cause = error.source();
    }
    if problem.is_incomplete_message() || problem.is_canceled() || problem.is_closed() {
        "closed"
    } else {
        "protocol"
    }
}

/// Returns an error with its causes on one line.
pub fn chain(problem: &dyn std::error::Error) -> String {
    let mut text = problem.to_string();
    let mut cause = problem.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

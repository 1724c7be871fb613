//! The client's side of a request in either HTTP version: the state that decode, authorize and
//! local replies share while one is served.
//!
//! Nothing is read or written here.

use std::rc::Rc;

use bytes::Bytes;
use canal_gateway_io::body::Http1Io;
use canal_gateway_io::clock::Timer;
use canal_h1::{OutHead, RequestHead};
use canal_hbone::FlowAccount;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};

/// A client's HTTP/1.1 connection, with memory that its requests reuse one after another.
pub(crate) struct Http1Downstream {
    pub(crate) wire: Http1Io,
    pub(crate) head: RequestHead,
    pub(crate) out: OutHead,
    pub(crate) timer: Timer,
    /// True once the client has half-closed the connection.
    pub(crate) half_closed: bool,
}

/// A client's HTTP/2 stream, with the state of its request and response.
pub(crate) struct Http2Downstream {
    pub(crate) body: RecvStream,
    /// Account of the bytes that streams of the client's connection buffer for their readers.
    pub(crate) account: Rc<FlowAccount>,
    pub(crate) respond: SendResponse<Bytes>,
    /// Set once the response's head was sent and a body follows.
    pub(crate) answer: Option<SendStream<Bytes>>,
    pub(crate) timer: Timer,
    /// Bytes of the request's body that were already read.
    pub(crate) first: Bytes,
}

//! A client's side of requests, in either HTTP version: what reading, judging and answering have in their hands while one is served. Nothing
//! is read or written here.

use bytes::Bytes;
use canal_h1::{OutHead, RequestHead};
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};

use crate::body::Wire;
use crate::clock::Timer;

/// A client's HTTP/1.1 connection with the memory that its requests use in turn.
pub(crate) struct Client {
    pub(crate) wire: Wire,
    pub(crate) head: RequestHead,
    pub(crate) out: OutHead,
    pub(crate) timer: Timer,
    /// The client has said that it sends no more.
    pub(crate) ended: bool,
}

/// A client's HTTP/2 stream.
pub(crate) struct Stream {
    pub(crate) body: RecvStream,
    pub(crate) respond: SendResponse<Bytes>,
    /// Once the answer's head was sent and a body follows.
    pub(crate) answer: Option<SendStream<Bytes>>,
    pub(crate) timer: Timer,
    /// Of the body, read already.
    pub(crate) first: Bytes,
}

//! Phase *decode*: parses requests from a client's bytes, one after another on HTTP/1.1,
//! concurrently on HTTP/2. It does not route them.

pub(crate) mod http1;
pub(crate) mod http2;

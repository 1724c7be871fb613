//! Phase *read*: requests out of a client's bytes, one after the other on HTTP/1.1, many at once on HTTP/2. Where they go is not decided here.

pub(crate) mod http1;
pub(crate) mod http2;

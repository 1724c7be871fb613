//! What the router may ask a request. The gateway implements it once per protocol.

/// A request head as the router sees it. All bytes are as sent, but for a path that had to be normalised.
pub trait Request {
    /// The host asked for, without port and brackets, in any case; empty if none.
    fn host(&self) -> &[u8];
    /// The method.
    fn method(&self) -> &[u8];
    /// The path without query.
    fn path(&self) -> &[u8];
    /// The query without `?`.
    fn query(&self) -> Option<&[u8]>;
    /// Calls `visit` with each value of a header, in order. `name` is lower case.
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8]));
}

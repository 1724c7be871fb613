//! The form of the responses that the gateway makes because a rule asks for them.

/// A response that the gateway makes, without the headers that frame it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteReply {
    pub status: u16,
    pub headers: Vec<(String, Vec<u8>)>,
    pub body: Vec<u8>,
    /// Detail that the access log shows.
    pub detail: &'static str,
}

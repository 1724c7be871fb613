//! Limits of interim (1xx) responses. It reads no response itself; the reader of each calls
//! [`InterimResponses::count`].

use crate::proxy_error::ProxyError;

/// Most interim (1xx) responses that an endpoint may send for one request. Servers send one or two
/// (100, 103); nobody measured more.
pub const INTERIM_RESPONSES_MAX: u32 = 16;
/// Most bytes of the heads of all interim responses. As many as one final head may have
/// (`HEAD_BYTES_CAP`).
pub const INTERIM_BYTES_MAX: usize = 64 << 10;

/// Interim responses of one request, over all its attempts.
#[derive(Debug, Default, Clone, Copy)]
pub struct InterimResponses {
    responses: u32,
    bytes: usize,
    /// True once the client was sent `100 Continue`.
    pub continued: bool,
}

impl InterimResponses {
    /// Counts a response of `bytes`. Returns true if it is a `100` after the first. HTTP/2 has no
    /// flow control for them and a client need not read them, so their number is limited.
    ///
    /// # Errors
    /// The endpoint sent more interim responses, or more bytes of them, than allowed.
    pub fn count(&mut self, bytes: usize, is_continue: bool) -> Result<bool, ProxyError> {
        self.responses += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        if self.responses > INTERIM_RESPONSES_MAX {
            return Err(ProxyError::InterimResponses("too_many_interim_responses"));
        }
        if self.bytes > INTERIM_BYTES_MAX {
            return Err(ProxyError::InterimResponses("interim_responses_too_large"));
        }
        Ok(is_continue && std::mem::replace(&mut self.continued, true))
    }
}

//! The table of malformed and ambiguous messages, each named, with what must become of it. Data only: the codec's tests and the
//! end-to-end tests of the gateway send the same bytes.

mod oversized;
mod requests;
mod responses;

use std::borrow::Cow;

use crate::{Asked, Framing, Refusal};

pub use oversized::oversized_requests;
pub use responses::{ResponseCase, ResponseWant, responses};

/// One request, its body included, as a client would send it.
#[derive(Debug, Clone)]
pub struct RequestCase {
    pub name: &'static str,
    pub bytes: Cow<'static, [u8]>,
    pub want: RequestWant,
}

/// What must become of a request.
#[derive(Debug, Clone, Copy)]
pub enum RequestWant {
    /// The head is refused.
    Refuse(Refusal),
    /// The head is fine, the body is refused.
    RefuseBody(Refusal),
    /// Both are fine.
    Accept(Accepted),
}

/// An accepted request, and how it looks on the next hop.
#[derive(Debug, Clone, Copy)]
pub struct Accepted {
    pub framing: Framing,
    /// The head as forwarded without edits.
    pub forwarded: &'static str,
    /// The body without its framing.
    pub payload: &'static str,
    /// What follows the request.
    pub rest: &'static str,
}

/// All request cases.
pub fn requests() -> Vec<RequestCase> {
    let mut all: Vec<RequestCase> = requests::GROUPS.iter().flat_map(|group| group.iter().cloned()).collect();
    all.extend(oversized_requests());
    all
}

const fn refuse(name: &'static str, bytes: &'static [u8], refusal: Refusal) -> RequestCase {
    RequestCase { name, bytes: Cow::Borrowed(bytes), want: RequestWant::Refuse(refusal) }
}

const fn refuse_body(name: &'static str, bytes: &'static [u8], refusal: Refusal) -> RequestCase {
    RequestCase { name, bytes: Cow::Borrowed(bytes), want: RequestWant::RefuseBody(refusal) }
}

const fn accept(name: &'static str, bytes: &'static [u8], framing: Framing, forwarded: &'static str, payload: &'static str) -> RequestCase {
    accept_with_rest(name, bytes, framing, forwarded, [payload, ""])
}

const fn accept_with_rest(
    name: &'static str,
    bytes: &'static [u8],
    framing: Framing,
    forwarded: &'static str,
    [payload, rest]: [&'static str; 2],
) -> RequestCase {
    let accepted = Accepted { framing, forwarded, payload, rest };
    RequestCase { name, bytes: Cow::Borrowed(bytes), want: RequestWant::Accept(accepted) }
}

/// What the request must have been for a response case.
pub(crate) const ORDINARY: Asked = Asked::Ordinary;

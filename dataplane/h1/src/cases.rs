//! Table of malformed and ambiguous messages. Each has a name and an expected result. The module
//! contains data only: the codec's tests and the gateway's end-to-end tests send the same bytes.

mod oversized;
mod requests;
mod responses;

use std::borrow::Cow;

use crate::{Framing, MessageRefusal, RequestKind};

pub use oversized::oversized_requests;
pub use responses::{ResponseCase, ResponseWant, responses};

/// One request, including its body, as a client would send it.
#[derive(Debug, Clone)]
pub struct RequestCase {
    pub name: &'static str,
    pub bytes: Cow<'static, [u8]>,
    pub want: RequestWant,
}

/// Expected result of parsing a request.
#[derive(Debug, Clone, Copy)]
pub enum RequestWant {
    /// The codec refuses the head for this reason.
    Refuse(MessageRefusal),
    /// The codec accepts the head and refuses the body for this reason.
    RefuseBody(MessageRefusal),
    /// The codec accepts head and body.
    Accept(AcceptedRequest),
}

/// Expected properties of an accepted request and its form on the next hop.
#[derive(Debug, Clone, Copy)]
pub struct AcceptedRequest {
    pub framing: Framing,
    /// Head as it is forwarded without edits; empty if the tests do not compare it.
    pub forwarded: &'static str,
    /// The body's bytes, without its framing.
    pub payload: &'static str,
    /// Bytes that follow the request.
    pub rest: &'static str,
}

/// Returns all request cases, those of [`oversized_requests`] included.
pub fn requests() -> Vec<RequestCase> {
    let mut all: Vec<RequestCase> = requests::GROUPS
        .iter()
        .flat_map(|group| group.iter().cloned())
        .collect();
    all.extend(oversized_requests());
    all
}

const fn refuse(name: &'static str, bytes: &'static [u8], refusal: MessageRefusal) -> RequestCase {
    RequestCase {
        name,
        bytes: Cow::Borrowed(bytes),
        want: RequestWant::Refuse(refusal),
    }
}

const fn refuse_body(
    name: &'static str,
    bytes: &'static [u8],
    refusal: MessageRefusal,
) -> RequestCase {
    RequestCase {
        name,
        bytes: Cow::Borrowed(bytes),
        want: RequestWant::RefuseBody(refusal),
    }
}

const fn accept(
    name: &'static str,
    bytes: &'static [u8],
    framing: Framing,
    forwarded: &'static str,
    payload: &'static str,
) -> RequestCase {
    accept_with_rest(name, bytes, framing, forwarded, [payload, ""])
}

const fn accept_with_rest(
    name: &'static str,
    bytes: &'static [u8],
    framing: Framing,
    forwarded: &'static str,
    [payload, rest]: [&'static str; 2],
) -> RequestCase {
    let accepted = AcceptedRequest {
        framing,
        forwarded,
        payload,
        rest,
    };
    RequestCase {
        name,
        bytes: Cow::Borrowed(bytes),
        want: RequestWant::Accept(accepted),
    }
}

/// Kind of the request for those response cases that do not depend on it.
pub(crate) const ORDINARY: RequestKind = RequestKind::Ordinary;

//! The content of responses that the gateway makes because of an error, or because a rule says so:
//! header fields and body. It sends nothing. Start with [`changed_fields`].

use canal_model::route_filters::HeaderModifier;

use crate::proxy_error::ProxyError;

/// Content type of the gateway's own texts.
const TEXT: &str = "text/plain; charset=utf-8";
/// Content type of an aborted request's response, as Envoy writes it.
const ABORT_TEXT_TYPE: &str = "text/plain";
/// Methods that the gateway serves, for 405 (RFC 9110 §15.5.6).
const ALLOWED: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE";
/// Challenge that asks a client for a valid token (RFC 6750 §3).
const CHALLENGE: &str = "Bearer error=\"invalid_token\"";

/// Returns the fields of the reply, without those for its framing.
fn fields(fault: &ProxyError) -> impl Iterator<Item = (&[u8], &[u8])> + Clone {
    let status = fault.status();
    let (extra, own) = match fault {
        // The authorizer determines its own response; the gateway adds none of its fields.
        ProxyError::Rejected(rejection) => (rejection.headers.as_slice(), false),
        ProxyError::Answered(reply) => (reply.headers.as_slice(), false),
        // As Envoy's, the reply has no further fields.
        ProxyError::Aborted { .. } => (&[][..], false),
        _ => (&[][..], true),
    };
    // The rule determines all headers of its answer.
    let has_content_type = matches!(fault, ProxyError::Answered(_))
        || extra.iter().any(|(name, _)| name == "content-type");
    let text = match fault {
        ProxyError::Aborted { .. } => ABORT_TEXT_TYPE,
        _ => TEXT,
    };
    let text = (!has_content_type).then_some((&b"content-type"[..], text.as_bytes()));
    let allow = (own && status == 405).then_some((&b"allow"[..], ALLOWED.as_bytes()));
    let retry = (own && matches!(status, 429 | 503)).then_some((&b"retry-after"[..], &b"1"[..]));
    let challenge =
        (own && status == 401).then_some((&b"www-authenticate"[..], CHALLENGE.as_bytes()));
    let extra = extra
        .iter()
        .map(|(name, value)| (name.as_bytes(), value.as_slice()));
    [text, allow, retry, challenge]
        .into_iter()
        .flatten()
        .chain(extra)
}

/// Returns the fields of the reply after the changes that the request's rule makes of response headers.
pub fn changed_fields<'a>(
    fault: &'a ProxyError,
    changes: Option<&'a HeaderModifier>,
) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + Clone {
    // An answer of the rule was changed when it was made.
    let changes = changes.filter(|_| !matches!(fault, ProxyError::Answered(_)));
    // What an authorizer sends to the client stays as it is.
    let determined = match fault {
        ProxyError::Rejected(rejection) => rejection.headers.as_slice(),
        _ => &[],
    };
    let is_determined = move |name: &[u8]| determined.iter().any(|(own, _)| own.as_bytes() == name);
    let is_kept = move |(name, _): &(&[u8], &[u8])| {
        let Some(HeaderModifier { set, remove, .. }) = changes else {
            return true;
        };
        let is_set = || set.iter().any(|(own, _)| own.as_bytes() == *name);
        // The body is a text of the gateway, which clients must not take for something else.
        let is_removed =
            || *name != b"content-type" && remove.iter().any(|own| own.as_bytes() == *name);
        is_determined(name) || !(is_set() || is_removed())
    };
    let written = changes
        .into_iter()
        .flat_map(|changes| changes.set.iter().chain(&changes.add))
        .map(|(name, value)| (name.as_bytes(), value.as_bytes()));
    let written = written.filter(move |(name, _)| !is_determined(name));
    fields(fault).filter(is_kept).chain(written)
}

/// Returns the body of the reply.
pub fn body_of(fault: &ProxyError) -> Vec<u8> {
    match fault {
        ProxyError::Rejected(rejection) => rejection.body.clone().into_bytes(),
        ProxyError::Answered(reply) => reply.body.clone(),
        ProxyError::Aborted { .. } => fault.text().as_bytes().to_vec(),
        _ => format!("{}\n", fault.text()).into_bytes(),
    }
}

/// True for a reply with a status that has neither a body nor a length (RFC 9110 §8.6, §15.4.5).
pub fn has_no_length(fault: &ProxyError) -> bool {
    matches!(fault.status(), 204 | 304)
}

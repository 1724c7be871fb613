//! Defines the HTTP request by which a gateway checks a request at a rule's authorizer, and what the
//! response means (GEP-1494). It is slow and simple, and shares no code with data planes.
//!
//! The rules, which every faster implementation must follow:
//! - The check has the request's method, host, path and query, as policies left them. The prefix
//!   of the filter stands before the path; a slash at its end has no meaning.
//! - The check has the header `authorization` and those that the filter lists, each with all its
//!   lines, and no other header of the request.
//! - Status 200 allows. The endpoint receives the headers of the answer that the filter lists, or
//!   all but those that describe the answer's body.
//! - A status of 500 or more is no decision, so the request is refused. Any other denies, and the
//!   client receives it with its headers.

use canal_model::route_filters::PROTECTED_RESPONSE_HEADERS;

use crate::filters::ForwardedRequest;

/// What an answer means for the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OracleCheckResult {
    /// The request passes, and the endpoint receives these headers too.
    Allow(Vec<(String, String)>),
    /// The client receives this status, with these headers.
    Deny(u16, Vec<(String, String)>),
    /// The request is refused with 403.
    Undecided,
}

/// Returns the check about a request. `listed` are the headers of the filter.
pub fn check(path_prefix: &str, listed: &[String], request: &ForwardedRequest) -> ForwardedRequest {
    let path = path_prefix.strip_suffix('/').unwrap_or(path_prefix);
    let target = if request.target.starts_with('/') {
        format!("{path}{}", request.target)
    } else if path_prefix.is_empty() {
        request.target.clone()
    } else {
        path_prefix.to_owned()
    };
    let mut headers: Vec<(String, String)> = Vec::new();
    for (name, value) in &request.headers {
        let name = name.to_ascii_lowercase();
        let is_of_check = name == "host" || name == "content-length";
        if !is_of_check && (name == "authorization" || listed.contains(&name)) {
            headers.push((name, value.clone()));
        }
    }
    ForwardedRequest {
        host: request.host.clone(),
        target,
        headers,
    }
}

/// Returns the decision in an answer. `listed` are the headers that the endpoint receives; an empty
/// list means all.
pub fn decision(listed: &[String], status: u16, headers: &[(String, String)]) -> OracleCheckResult {
    if status == 200 {
        let mut passed = headers.to_vec();
        if listed.is_empty() {
            passed.retain(|(name, _)| !name.starts_with("content-"));
        } else {
            passed.retain(|(name, _)| listed.contains(name));
        }
        return OracleCheckResult::Allow(passed);
    }
    if status >= 500 {
        return OracleCheckResult::Undecided;
    }
    let mut sent = headers.to_vec();
    sent.retain(|(name, _)| {
        let is_protected = PROTECTED_RESPONSE_HEADERS.iter().any(|own| own == name);
        name != "date" && !is_protected
    });
    // RFC 9110 §6.4.1: such a response has no body, and the denial has one.
    let is_without_body = status < 200 || [204, 205, 304].contains(&status);
    OracleCheckResult::Deny(if is_without_body { 403 } else { status }, sent)
}

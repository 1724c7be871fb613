//! Request targets (RFC 9112 §3.2) and authorities (RFC 3986 §3.2): which form, which parts, valid or not. No routing, no decoding.

use std::net::Ipv6Addr;

use crate::bytes::{is_host_byte, is_target};
use crate::refusal::Refusal;
use crate::table::Span;

/// The four forms of a request target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TargetForm {
    /// `/path?query`.
    #[default]
    Origin,
    /// `http://host/path?query`.
    Absolute,
    /// `host:port`, for CONNECT only.
    Authority,
    /// `*`, for OPTIONS only.
    Asterisk,
}

/// The parts of a target, as spans of the target itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Parts {
    pub(crate) form: TargetForm,
    /// Empty in absolute form without path, and in authority form.
    pub(crate) path: Span,
    pub(crate) query: Option<Span>,
    pub(crate) authority: Option<Span>,
    /// The port that an absolute target means when it names none.
    pub(crate) default_port: u16,
}

/// Splits a target. `Err` names why it is none.
pub(crate) fn decide_parts(method: &[u8], target: &[u8]) -> Result<Parts, Refusal> {
    if !is_target(target) {
        return Err(Refusal::BadTarget);
    }
    if method == b"CONNECT" {
        return match split_authority(target) {
            Some((_, Some(_))) => {
                Ok(Parts { form: TargetForm::Authority, authority: Some(Span::new(0, target.len())), ..Parts::default() })
            }
            _ => Err(Refusal::BadConnectTarget),
        };
    }
    match target {
        [b'/', ..] => Ok(split_path(target, 0, Parts::default())),
        b"*" if method == b"OPTIONS" => Ok(Parts { form: TargetForm::Asterisk, path: Span::new(0, 1), ..Parts::default() }),
        b"*" => Err(Refusal::AsteriskFormTarget),
        _ => decide_absolute(target),
    }
}

fn decide_absolute(target: &[u8]) -> Result<Parts, Refusal> {
    let Some(colon) = target.iter().position(|&b| b == b':') else {
        return Err(Refusal::BadTarget);
    };
    let (scheme, rest) = (&target[..colon], &target[colon + 1..]);
    if !rest.starts_with(b"//") {
        let authority = split_authority(target).is_some();
        return Err(if authority { Refusal::AuthorityFormTarget } else { Refusal::BadTarget });
    }
    let default_port = if scheme.eq_ignore_ascii_case(b"http") {
        80
    } else if scheme.eq_ignore_ascii_case(b"https") {
        443
    } else {
        return Err(Refusal::UnsupportedScheme);
    };
    let start = colon + 3;
    let len = target[start..].iter().position(|&b| b == b'/' || b == b'?').unwrap_or(target.len() - start);
    if split_authority(&target[start..start + len]).is_none() {
        return Err(Refusal::BadHost);
    }
    let parts = Parts { form: TargetForm::Absolute, authority: Some(Span::new(start, len)), default_port, ..Parts::default() };
    Ok(split_path(target, start + len, parts))
}

fn split_path(target: &[u8], from: usize, parts: Parts) -> Parts {
    match memchr::memchr(b'?', &target[from..]) {
        Some(n) => Parts { path: Span::new(from, n), query: Some(Span::new(from + n + 1, target.len() - from - n - 1)), ..parts },
        None => Parts { path: Span::new(from, target.len() - from), ..parts },
    }
}

/// Splits `host[:port]`; `None` if it is not one. The host keeps its brackets if it is an IPv6 literal.
///
/// Stricter than RFC 3986: no user info, no percent escapes, no sub-delimiters.
pub fn split_authority(authority: &[u8]) -> Option<(&[u8], Option<u16>)> {
    let host_len = if authority.first() == Some(&b'[') {
        let close = memchr::memchr(b']', authority)?;
        std::str::from_utf8(&authority[1..close]).ok()?.parse::<Ipv6Addr>().ok()?;
        close + 1
    } else {
        match authority.iter().position(|&b| !is_host_byte(b)).unwrap_or(authority.len()) {
            0 => return None,
            len => len,
        }
    };
    let (host, rest) = authority.split_at(host_len);
    match rest {
        // `host:` is valid and means the default port (RFC 3986 §6.2.3).
        [] | [b':'] => Some((host, None)),
        [b':', digits @ ..] if digits.len() <= 5 && digits.iter().all(u8::is_ascii_digit) => {
            let port = digits.iter().fold(0u32, |n, d| n * 10 + u32::from(d - b'0'));
            u16::try_from(port).ok().filter(|&p| p != 0).map(|p| (host, Some(p)))
        }
        _ => None,
    }
}

/// True if both authorities mean the same host and port; hosts are compared without case.
pub(crate) fn same_authority(a: &[u8], b: &[u8], default_port: u16) -> bool {
    match (split_authority(a), split_authority(b)) {
        (Some((host_a, port_a)), Some((host_b, port_b))) => {
            host_a.eq_ignore_ascii_case(host_b) && port_a.unwrap_or(default_port) == port_b.unwrap_or(default_port)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities() {
        type Split = Option<(&'static str, Option<u16>)>;
        let cases: &[(&str, Split)] = &[
            ("a", Some(("a", None))),
            ("a.b-c_d:80", Some(("a.b-c_d", Some(80)))),
            ("a:", Some(("a", None))),
            ("1.2.3.4:65535", Some(("1.2.3.4", Some(65535)))),
            ("[::1]", Some(("[::1]", None))),
            ("[2001:db8::1]:8080", Some(("[2001:db8::1]", Some(8080)))),
            ("", None),
            (":80", None),
            ("a:0", None),
            ("a:65536", None),
            ("a:080808", None),
            ("a:8x", None),
            ("a:80:80", None),
            ("u@a", None),
            ("u:p@a", None),
            ("a b", None),
            ("a,b", None),
            ("a/b", None),
            ("a%41", None),
            ("::1", None),
            ("[::1", None),
            ("[::g]", None),
            ("[::1]x", None),
            ("[]", None),
        ];
        for (text, want) in cases {
            let want = want.map(|(h, p)| (h.as_bytes(), p));
            assert_eq!(split_authority(text.as_bytes()), want, "{text:?}");
        }
    }
}

//! Request targets (RFC 9112 §3.2) and authorities (RFC 3986 §3.2): determines the form and the
//! parts, and checks them. It neither routes nor decodes.

use std::net::Ipv6Addr;

use crate::bytes::{is_host_byte, is_target};
use crate::field_table::Span;
use crate::refusal::MessageRefusal;

/// Form of a request target (RFC 9112 §3.2).
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

/// Parts of a request target, as spans of the target itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct TargetParts {
    pub(crate) form: TargetForm,
    /// Path without query. Empty in authority form, and in absolute form without a path.
    pub(crate) path: Span,
    pub(crate) query: Option<Span>,
    pub(crate) authority: Option<Span>,
    /// Port that an absolute target implies if it names none.
    pub(crate) default_port: u16,
}

/// Splits a target into its parts. The refusal says why it is not a valid target.
pub(crate) fn decide_parts(method: &[u8], target: &[u8]) -> Result<TargetParts, MessageRefusal> {
    if !is_target(target) {
        return Err(MessageRefusal::BadTarget);
    }
    if method == b"CONNECT" {
        return match split_authority(target) {
            Some((_, Some(_))) => Ok(TargetParts {
                form: TargetForm::Authority,
                authority: Some(Span::new(0, target.len())),
                ..TargetParts::default()
            }),
            _ => Err(MessageRefusal::BadConnectTarget),
        };
    }
    match target {
        [b'/', ..] => Ok(split_path(target, 0, TargetParts::default())),
        b"*" if method == b"OPTIONS" => Ok(TargetParts {
            form: TargetForm::Asterisk,
            path: Span::new(0, 1),
            ..TargetParts::default()
        }),
        b"*" => Err(MessageRefusal::AsteriskFormTarget),
        _ => decide_absolute(target),
    }
}

fn decide_absolute(target: &[u8]) -> Result<TargetParts, MessageRefusal> {
    let Some(colon) = target.iter().position(|&b| b == b':') else {
        return Err(MessageRefusal::BadTarget);
    };
    let (scheme, rest) = (&target[..colon], &target[colon + 1..]);
    // `host:80` has a colon as well, but it is a target for CONNECT only.
    if !rest.starts_with(b"//") {
        let authority = split_authority(target).is_some();
        return Err(if authority {
            MessageRefusal::AuthorityFormTarget
        } else {
            MessageRefusal::BadTarget
        });
    }
    let default_port = if scheme.eq_ignore_ascii_case(b"http") {
        80
    } else if scheme.eq_ignore_ascii_case(b"https") {
        443
    } else {
        return Err(MessageRefusal::UnsupportedScheme);
    };
    let start = colon + 3;
    let len = target[start..]
        .iter()
        .position(|&b| b == b'/' || b == b'?')
        .unwrap_or(target.len() - start);
    if split_authority(&target[start..start + len]).is_none() {
        return Err(MessageRefusal::BadHost);
    }
    let parts = TargetParts {
        form: TargetForm::Absolute,
        authority: Some(Span::new(start, len)),
        default_port,
        ..TargetParts::default()
    };
    Ok(split_path(target, start + len, parts))
}

fn split_path(target: &[u8], from: usize, parts: TargetParts) -> TargetParts {
    match memchr::memchr(b'?', &target[from..]) {
        Some(n) => TargetParts {
            path: Span::new(from, n),
            query: Some(Span::new(from + n + 1, target.len() - from - n - 1)),
            ..parts
        },
        None => TargetParts {
            path: Span::new(from, target.len() - from),
            ..parts
        },
    }
}

/// Maximum number of bytes of a host name (RFC 1035 §2.3.4). Tables of wildcards look up each suffix
/// of a host, so that a longer one would cost the gateway much time.
const HOST_BYTES_MAX: usize = 255;

/// Splits `host[:port]`. Returns `None` if the text is not one. The host keeps its brackets if it
/// is an IPv6 literal.
///
/// It is stricter than RFC 3986: it accepts no user info, no percent escapes and no sub-delimiters.
pub fn split_authority(authority: &[u8]) -> Option<(&[u8], Option<u16>)> {
    let host_len = if authority.first() == Some(&b'[') {
        let close = memchr::memchr(b']', authority)?;
        std::str::from_utf8(&authority[1..close])
            .ok()?
            .parse::<Ipv6Addr>()
            .ok()?;
        close + 1
    } else {
        match authority
            .iter()
            .position(|&b| !is_host_byte(b))
            .unwrap_or(authority.len())
        {
            0 => return None,
            len if len > HOST_BYTES_MAX => return None,
            len => len,
        }
    };
    let (host, rest) = authority.split_at(host_len);
    match rest {
        // `host:` is valid and means the default port (RFC 3986 §6.2.3).
        [] | [b':'] => Some((host, None)),
        [b':', digits @ ..] if digits.len() <= 5 && digits.iter().all(u8::is_ascii_digit) => {
            let port = digits
                .iter()
                .fold(0u32, |n, d| n * 10 + u32::from(d - b'0'));
            u16::try_from(port)
                .ok()
                .filter(|&p| p != 0)
                .map(|p| (host, Some(p)))
        }
        _ => None,
    }
}

/// Returns true if both authorities mean the same host and port. Hosts are compared without case.
pub(crate) fn same_authority(a: &[u8], b: &[u8], default_port: u16) -> bool {
    match (split_authority(a), split_authority(b)) {
        (Some((host_a, port_a)), Some((host_b, port_b))) => {
            host_a.eq_ignore_ascii_case(host_b)
                && port_a.unwrap_or(default_port) == port_b.unwrap_or(default_port)
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
        let longest = "a.".repeat(HOST_BYTES_MAX / 2) + "a";
        assert_eq!(longest.len(), HOST_BYTES_MAX);
        assert!(split_authority(longest.as_bytes()).is_some());
        assert!(split_authority(format!("{longest}:80").as_bytes()).is_some());
        assert_eq!(split_authority(format!("{longest}a").as_bytes()), None);
    }
}

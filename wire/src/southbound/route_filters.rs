//! Wire form of a rule's filters. The decoder accepts no header that delimits a message, and no
//! value that could end a header line.

use canal_model::route_filters as m;
use canal_model::route_filters::{PROTECTED_REQUEST_HEADERS, PROTECTED_RESPONSE_HEADERS};

use super::ResourceDecodeError;
use super::decode::DecodeContext;
use crate::program as w;

impl From<&m::RouteFilters> for w::RouteFilters {
    fn from(filters: &m::RouteFilters) -> Self {
        use w::route_filters::RewritePath;
        Self {
            request_headers: encode(&filters.request_headers),
            response_headers: encode(&filters.response_headers),
            rewrite_host: filters.rewrite.host.clone().unwrap_or_default(),
            rewrite_path: match (&filters.rewrite.path, &filters.rewrite.path_regex) {
                (Some(m::PathRewrite::Full(path)), _) => Some(RewritePath::FullPath(path.clone())),
                (Some(m::PathRewrite::Prefix(text)), _) => {
                    Some(RewritePath::PathPrefix(text.clone()))
                }
                (None, Some(regex)) => Some(RewritePath::PathRegex(w::RegexSubstitution {
                    pattern: regex.pattern.clone(),
                    substitution: regex.substitution.clone(),
                })),
                (None, None) => None,
            },
        }
    }
}

/// Returns `None` if no header is changed.
pub(super) fn encode(headers: &m::HeaderModifier) -> Option<w::HeaderModifier> {
    let pairs = |pairs: &[(String, String)]| {
        let pairs = pairs.iter().map(|(name, value)| w::Header {
            name: name.clone(),
            value: value.clone(),
        });
        pairs.collect()
    };
    (!headers.is_empty()).then(|| w::HeaderModifier {
        set: pairs(&headers.set),
        add: pairs(&headers.add),
        remove: headers.remove.clone(),
    })
}

pub(super) fn decode(
    at: &DecodeContext<'_>,
    filters: w::RouteFilters,
) -> Result<m::RouteFilters, ResourceDecodeError> {
    use w::route_filters::RewritePath;
    let mut path_regex = None;
    let path = filters.rewrite_path.and_then(|path| match path {
        RewritePath::PathRegex(received) => {
            path_regex = Some(substitution(at, received));
            None
        }
        RewritePath::FullPath(path) => Some(full_path(at, path)),
        RewritePath::PathPrefix(text) => {
            let text = path_text(at, "filters.path_prefix", text);
            Some(text.map(m::PathRewrite::Prefix))
        }
    });
    // Any other byte could end the header or add another one.
    if !filters.rewrite_host.bytes().all(is_host_byte) {
        return at.err(
            "filters.rewrite_host",
            format!("{:?} is not a host", filters.rewrite_host),
        );
    }
    Ok(m::RouteFilters {
        request_headers: headers(
            at,
            "filters.request_headers",
            filters.request_headers,
            &PROTECTED_REQUEST_HEADERS,
        )?,
        response_headers: headers(
            at,
            "filters.response_headers",
            filters.response_headers,
            &PROTECTED_RESPONSE_HEADERS,
        )?,
        rewrite: m::UrlRewrite {
            host: (!filters.rewrite_host.is_empty()).then_some(filters.rewrite_host),
            path: path.transpose()?,
            path_regex: path_regex.transpose()?,
        },
    })
}

fn full_path(at: &DecodeContext<'_>, path: String) -> Result<m::PathRewrite, ResourceDecodeError> {
    const FIELD: &str = "filters.full_path";
    if !path.starts_with('/') {
        return at.err(FIELD, format!("{path:?} does not begin with a slash"));
    }
    path_text(at, FIELD, path).map(m::PathRewrite::Full)
}

/// The gateway compiles the pattern, and refuses requests if it cannot.
fn substitution(
    at: &DecodeContext<'_>,
    received: w::RegexSubstitution,
) -> Result<m::RegexSubstitution, ResourceDecodeError> {
    Ok(m::RegexSubstitution {
        pattern: received.pattern,
        substitution: path_text(at, "filters.path_regex.substitution", received.substitution)?,
    })
}

pub(super) fn headers(
    at: &DecodeContext<'_>,
    field: &'static str,
    received: Option<w::HeaderModifier>,
    protected: &[&str],
) -> Result<m::HeaderModifier, ResourceDecodeError> {
    let received = received.unwrap_or_default();
    let name = |name: String| {
        let is_name = !name.is_empty() && name.bytes().all(is_lower_token_byte);
        // Headers that hops set or that delimit the message must not come from a route.
        if is_name && !protected.contains(&name.as_str()) {
            Ok(name)
        } else {
            at.err(
                field,
                format!("{name:?} is not a header that a route may change"),
            )
        }
    };
    let pair = |header: w::Header| {
        // A control character, such as a line feed, could end the header line.
        let is_value = header
            .value
            .bytes()
            .all(|byte| byte >= b' ' && byte != 0x7f);
        if is_value {
            Ok((name(header.name)?, header.value))
        } else {
            at.err(
                field,
                format!("the value of {} has a control character", header.name),
            )
        }
    };
    Ok(m::HeaderModifier {
        set: received
            .set
            .into_iter()
            .map(pair)
            .collect::<Result<_, _>>()?,
        add: received
            .add
            .into_iter()
            .map(pair)
            .collect::<Result<_, _>>()?,
        remove: received
            .remove
            .into_iter()
            .map(name)
            .collect::<Result<_, _>>()?,
    })
}

pub(super) fn path_text(
    at: &DecodeContext<'_>,
    field: &'static str,
    text: String,
) -> Result<String, ResourceDecodeError> {
    let is_path = text
        .bytes()
        .all(|byte| byte > b' ' && byte < 0x7f && !b"?#".contains(&byte));
    if is_path {
        Ok(text)
    } else {
        at.err(field, format!("{text:?} is not a path"))
    }
}

/// True for the bytes of a token (RFC 9110 §5.6.2) in lower case.
fn is_lower_token_byte(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// True for the bytes of a host with an optional port.
pub(super) fn is_host_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte)
}

/// Returns filters with every field set.
#[cfg(test)]
pub(super) fn sample() -> m::RouteFilters {
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let modifier = |name: &str| m::HeaderModifier {
        set: vec![pair(name, "a b")],
        add: vec![pair("x-list", "")],
        remove: vec!["x-gone".to_owned()],
    };
    m::RouteFilters {
        request_headers: modifier("x-request"),
        response_headers: modifier("x-response"),
        rewrite: m::UrlRewrite {
            host: Some("a.example:80".to_owned()),
            path: Some(m::PathRewrite::Prefix("/b".to_owned())),
            path_regex: None,
        },
    }
}

/// Returns filters with a regular expression that rewrites paths.
#[cfg(test)]
fn sample_with_regex() -> m::RouteFilters {
    let mut filters = sample();
    filters.rewrite.path = None;
    filters.rewrite.path_regex = Some(m::RegexSubstitution {
        pattern: "/a(.*)".to_owned(),
        substitution: r"/b\1".to_owned(),
    });
    filters
}

/// Returns filters with each way to rewrite a path, for the tests of all resources.
#[cfg(test)]
pub(super) fn samples() -> [m::RouteFilters; 2] {
    [sample(), sample_with_regex()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_that_could_change_the_framing_are_refused() {
        type Change = fn(&mut m::RouteFilters);
        let cases: [(Change, &str); 11] = [
            (|f| f.request_headers.set[0].0 = "host".into(), "host"),
            (
                |f| f.request_headers.add[0].0 = "transfer-encoding".into(),
                "transfer-encoding",
            ),
            (
                |f| f.request_headers.remove[0] = "x-forwarded-for".into(),
                "x-forwarded-for",
            ),
            (
                |f| f.response_headers.set[0].0 = "content-length".into(),
                "content-length",
            ),
            // Names of headers are lower case on the wire.
            (|f| f.request_headers.set[0].0 = "X-A".into(), "X-A"),
            (|f| f.request_headers.set[0].0 = "a: b".into(), "a: b"),
            (
                |f| f.response_headers.add[0].1 = "a\r\nb: c".into(),
                "control character",
            ),
            (|f| f.rewrite.host = Some("a b".into()), "not a host"),
            (
                |f| f.rewrite.path = Some(m::PathRewrite::Full("a".into())),
                "slash",
            ),
            (
                |f| f.rewrite.path = Some(m::PathRewrite::Prefix("/a b".into())),
                "not a path",
            ),
            (
                |f| {
                    *f = sample_with_regex();
                    f.rewrite.path_regex.as_mut().unwrap().substitution = "/b?c=1".into();
                },
                "not a path",
            ),
        ];
        let at = DecodeContext("a rule");
        assert_eq!(decode(&at, (&sample()).into()), Ok(sample()));
        for (change, text) in cases {
            let mut filters = sample();
            change(&mut filters);
            let refused = decode(&at, (&filters).into()).unwrap_err().to_string();
            assert!(refused.contains(text), "{text}: {refused}");
        }
    }

    #[test]
    fn absent_filters_stay_absent() {
        let none = m::RouteFilters {
            rewrite: m::UrlRewrite {
                host: None,
                path: Some(m::PathRewrite::Full("/".to_owned())),
                path_regex: None,
            },
            ..m::RouteFilters::default()
        };
        assert_eq!(decode(&DecodeContext("a rule"), (&none).into()), Ok(none));
    }
}

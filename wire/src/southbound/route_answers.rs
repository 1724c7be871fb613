//! Wire form of the answers that a gateway gives itself. The decoder accepts no text that could end
//! a header line.

use canal_model::route_filters as m;
use canal_model::route_filters::PROTECTED_RESPONSE_HEADERS;

use super::decode::DecodeContext;
use super::{ResourceDecodeError, route_filters};
use crate::program as w;

pub(super) fn encode(answer: &m::RouteAnswer, filters: Option<&m::RouteFilters>) -> w::Answer {
    use w::answer::Answer;
    use w::redirect::{Path, Port};
    let answer = match answer {
        m::RouteAnswer::Redirect(redirect) => Answer::Redirect(w::Redirect {
            status: redirect.status.into(),
            scheme: redirect
                .scheme
                .map(|scheme| scheme.text().to_owned())
                .unwrap_or_default(),
            host: redirect.host.clone().unwrap_or_default(),
            port: Some(match redirect.port {
                m::RedirectPort::OfHost => Port::OfHost(true),
                m::RedirectPort::Dialled => Port::Dialled(true),
                m::RedirectPort::OfScheme => Port::OfScheme(true),
                m::RedirectPort::Number(port) => Port::Number(port.into()),
            }),
            path: redirect.path.as_ref().map(|path| match path {
                m::PathRewrite::Full(path) => Path::FullPath(path.clone()),
                m::PathRewrite::Prefix(text) => Path::PathPrefix(text.clone()),
            }),
            query: redirect.query.clone(),
        }),
        m::RouteAnswer::Direct(direct) => Answer::Direct(w::DirectResponse {
            status: direct.status.into(),
            body: direct.body.clone(),
        }),
    };
    w::Answer {
        answer: Some(answer),
        response_headers: filters
            .and_then(|filters| route_filters::encode(&filters.response_headers)),
    }
}

/// Returns the answer, and the filters that change its headers.
pub(super) fn decode(
    at: &DecodeContext<'_>,
    received: w::Answer,
) -> Result<(m::RouteAnswer, Option<m::RouteFilters>), ResourceDecodeError> {
    use w::answer::Answer;
    let answer = match at.need("answer.answer", received.answer)? {
        Answer::Redirect(received) => m::RouteAnswer::Redirect(redirect(at, received)?),
        Answer::Direct(received) => {
            let status = received.status;
            if !(200..600).contains(&status) {
                return at.err("answer.direct.status", format!("{status} ends no request"));
            }
            if m::DirectResponse::has_no_body(status as u16) && !received.body.is_empty() {
                return at.err("answer.direct.body", format!("{status} has no body"));
            }
            m::RouteAnswer::Direct(m::DirectResponse {
                status: status as u16,
                body: received.body,
            })
        }
    };
    let response_headers = route_filters::headers(
        at,
        "answer.response_headers",
        received.response_headers,
        &PROTECTED_RESPONSE_HEADERS,
    )?;
    let filters = m::RouteFilters {
        response_headers,
        ..m::RouteFilters::default()
    };
    Ok((answer, (!filters.is_empty()).then_some(filters)))
}

fn redirect(
    at: &DecodeContext<'_>,
    received: w::Redirect,
) -> Result<m::UrlRedirect, ResourceDecodeError> {
    use w::redirect::{Path, Port};
    let Some(status) = m::REDIRECT_STATUSES
        .into_iter()
        .find(|status| u32::from(*status) == received.status)
    else {
        return at.err(
            "answer.redirect.status",
            format!("{} is not a redirect", received.status),
        );
    };
    // The wire form writes an absent scheme or host as empty text: the redirect keeps that of the
    // request.
    let scheme = match received.scheme.as_str() {
        "" => None,
        text => match m::UrlScheme::of(text) {
            Some(scheme) => Some(scheme),
            None => return at.err("answer.redirect.scheme", format!("{text:?} is not HTTP")),
        },
    };
    // Any other byte could end the header `location` or add another one.
    if !received.host.bytes().all(route_filters::is_host_byte) {
        return at.err(
            "answer.redirect.host",
            format!("{:?} is not a host", received.host),
        );
    }
    let port = match at.need("answer.redirect.port", received.port)? {
        Port::OfHost(_) => m::RedirectPort::OfHost,
        Port::Dialled(_) => m::RedirectPort::Dialled,
        Port::OfScheme(_) => m::RedirectPort::OfScheme,
        Port::Number(port) => m::RedirectPort::Number(at.port("answer.redirect.port", port)?),
    };
    let path = match received.path {
        None => None,
        Some(Path::FullPath(path)) => Some(m::PathRewrite::Full(route_filters::path_text(
            at,
            "answer.redirect.full_path",
            path,
        )?)),
        Some(Path::PathPrefix(text)) => Some(m::PathRewrite::Prefix(route_filters::path_text(
            at,
            "answer.redirect.path_prefix",
            text,
        )?)),
    };
    // A URI has no other bytes (RFC 3986 §2), and `#` would begin a fragment.
    let is_sent = |byte: u8| byte > b' ' && byte < 0x7f && byte != b'#';
    if let Some(query) = received
        .query
        .as_ref()
        .filter(|it| !it.bytes().all(is_sent))
    {
        return at.err("answer.redirect.query", format!("{query:?} is not a query"));
    }
    Ok(m::UrlRedirect {
        status,
        scheme,
        host: (!received.host.is_empty()).then_some(received.host),
        port,
        path,
        query: received.query,
    })
}

/// Returns answers with every field set, for the tests of all resources.
#[cfg(test)]
pub(super) fn samples() -> Vec<m::RouteAnswer> {
    let redirect = |port, path| {
        m::RouteAnswer::Redirect(m::UrlRedirect {
            status: 307,
            scheme: Some(m::UrlScheme::Https),
            host: Some("other.example".to_owned()),
            port,
            path,
            query: (port == m::RedirectPort::Dialled).then(|| "q=/?".to_owned()),
        })
    };
    let path = |text: &str| text.to_owned();
    vec![
        redirect(
            m::RedirectPort::Number(8443),
            Some(m::PathRewrite::Full(path("/all"))),
        ),
        redirect(
            m::RedirectPort::Dialled,
            Some(m::PathRewrite::Prefix(path("/new"))),
        ),
        redirect(m::RedirectPort::OfScheme, None),
        redirect(m::RedirectPort::OfHost, None),
        m::RouteAnswer::Direct(m::DirectResponse {
            status: 503,
            body: b"closed\n\xff".to_vec(),
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes an answer after `change`; returns the text of the error.
    fn refusal(change: impl FnOnce(&mut w::Answer)) -> String {
        let mut answer = encode(&samples()[0], None);
        change(&mut answer);
        decode(&DecodeContext("r"), answer).unwrap_err().to_string()
    }

    fn redirect(answer: &mut w::Answer) -> &mut w::Redirect {
        match &mut answer.answer {
            Some(w::answer::Answer::Redirect(redirect)) => redirect,
            _ => panic!("no redirect"),
        }
    }

    #[test]
    fn an_answer_that_no_gateway_may_give_is_refused() {
        type Change = fn(&mut w::Answer);
        let cases: [(Change, &str); 8] = [
            (
                |a| redirect(a).query = Some("a\r\nb".into()),
                "is not a query",
            ),
            (|a| a.answer = None, "answer.answer"),
            (|a| redirect(a).status = 200, "is not a redirect"),
            (|a| redirect(a).scheme = "ftp".into(), "is not HTTP"),
            (|a| redirect(a).host = "a\r\nb".into(), "is not a host"),
            (|a| redirect(a).port = None, "answer.redirect.port"),
            (
                |a| redirect(a).path = Some(w::redirect::Path::FullPath("/a b".into())),
                "is not a path",
            ),
            (
                |a| {
                    let direct = w::DirectResponse {
                        status: 101,
                        body: Vec::new(),
                    };
                    a.answer = Some(w::answer::Answer::Direct(direct));
                },
                "ends no request",
            ),
        ];
        for (change, want) in cases {
            let text = refusal(change);
            assert!(text.contains(want), "{want}: {text}");
        }
    }
}

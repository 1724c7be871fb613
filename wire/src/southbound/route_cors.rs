//! Wire form of a rule's cross-origin resource sharing. It validates what arrives: nothing could end
//! a header line.

use canal_model::limits::CORS_LIST_BYTES_MAX;
use canal_model::program::HostMatch;
use canal_model::route_cors as m;
use canal_model::route_filters::UrlScheme;

use super::decode::DecodeContext;
use super::{ResourceDecodeError, encode};
use crate::program as w;

impl From<&m::CorsPolicy> for w::CorsPolicy {
    fn from(policy: &m::CorsPolicy) -> Self {
        let m::CorsPolicy {
            origins,
            methods,
            headers,
            exposed,
            max_age,
            credentials,
            dialect,
        } = policy;
        Self {
            origins: origins.iter().map(encode_origin).collect(),
            methods: encode_list(methods),
            headers: encode_list(headers),
            exposed: exposed.clone().unwrap_or_default(),
            max_age_seconds: *max_age,
            credentials: *credentials,
            dialect: *dialect as i32,
        }
    }
}

// Dialects have the same numbers in both enums.
const _: () = assert!(w::CorsDialect::IstioIgnore as i32 == m::CorsDialect::IstioIgnore as i32);

fn encode_origin(origin: &m::OriginMatch) -> w::OriginMatch {
    use w::origin_match::Origin;
    let origin = match origin {
        m::OriginMatch::Any => Origin::Any(true),
        m::OriginMatch::Exact(text) => Origin::Exact(text.clone()),
        m::OriginMatch::Prefix(text) => Origin::Prefix(text.clone()),
        m::OriginMatch::Regex(text) => Origin::Regex(text.clone()),
        m::OriginMatch::Host { scheme, host, port } => Origin::Host(w::OriginHost {
            scheme: scheme.text().to_owned(),
            host: encode_host(host),
            port: (*port).into(),
        }),
    };
    w::OriginMatch {
        origin: Some(origin),
    }
}

/// Returns `None` for every host.
fn encode_host(host: &m::OriginHost) -> Option<w::HostMatch> {
    let host = match host {
        m::OriginHost::Any => return None,
        m::OriginHost::Exact(name) => HostMatch::Exact(name.clone()),
        m::OriginHost::Suffix(end) => HostMatch::Suffix(end.clone()),
    };
    Some(encode::host(&host))
}

fn encode_list(list: &m::CorsList) -> Option<w::CorsList> {
    use w::cors_list::List;
    let list = match list {
        m::CorsList::Unnamed => return None,
        m::CorsList::Requested => List::Requested(true),
        m::CorsList::Listed(names) => List::Listed(names.clone()),
    };
    Some(w::CorsList { list: Some(list) })
}

pub(super) fn decode(
    at: &DecodeContext<'_>,
    received: w::CorsPolicy,
) -> Result<m::CorsPolicy, ResourceDecodeError> {
    let mut dialects = m::CorsDialect::ALL.into_iter();
    let Some(dialect) = dialects.find(|dialect| *dialect as i32 == received.dialect) else {
        return at.err("cors.dialect", format!("{} is unknown", received.dialect));
    };
    let origins = received.origins.into_iter();
    let exposed = (!received.exposed.is_empty()).then_some(received.exposed);
    Ok(m::CorsPolicy {
        origins: origins
            .map(|origin| decode_origin(at, origin))
            .collect::<Result<_, _>>()?,
        methods: decode_list(at, "cors.methods", received.methods)?,
        headers: decode_list(at, "cors.headers", received.headers)?,
        exposed: exposed
            .map(|names| list_text(at, "cors.exposed", names))
            .transpose()?,
        max_age: received.max_age_seconds,
        credentials: received.credentials,
        dialect,
    })
}

fn decode_origin(
    at: &DecodeContext<'_>,
    received: w::OriginMatch,
) -> Result<m::OriginMatch, ResourceDecodeError> {
    use w::origin_match::Origin;
    Ok(match at.need("cors.origins", received.origin)? {
        Origin::Any(_) => m::OriginMatch::Any,
        Origin::Exact(text) => m::OriginMatch::Exact(text),
        Origin::Prefix(text) => m::OriginMatch::Prefix(text),
        Origin::Regex(text) => m::OriginMatch::Regex(text),
        Origin::Host(received) => {
            let Some(scheme) = UrlScheme::of(&received.scheme) else {
                let problem = format!("{:?} is no scheme", received.scheme);
                return at.err("cors.origins.scheme", problem);
            };
            m::OriginMatch::Host {
                scheme,
                host: match received.host {
                    None => m::OriginHost::Any,
                    Some(host) => match super::decode::host(at, host)? {
                        HostMatch::Exact(name) => m::OriginHost::Exact(name),
                        HostMatch::Suffix(end) => m::OriginHost::Suffix(end),
                    },
                },
                port: at.port("cors.origins.port", received.port)?,
            }
        }
    })
}

fn decode_list(
    at: &DecodeContext<'_>,
    field: &'static str,
    received: Option<w::CorsList>,
) -> Result<m::CorsList, ResourceDecodeError> {
    use w::cors_list::List;
    let Some(received) = received else {
        return Ok(m::CorsList::Unnamed);
    };
    match at.need(field, received.list)? {
        List::Requested(_) => Ok(m::CorsList::Requested),
        List::Listed(names) => list_text(at, field, names).map(m::CorsList::Listed),
    }
}

fn list_text(
    at: &DecodeContext<'_>,
    field: &'static str,
    names: String,
) -> Result<String, ResourceDecodeError> {
    if names.len() > CORS_LIST_BYTES_MAX {
        let problem = format!("has {} bytes, more than {CORS_LIST_BYTES_MAX}", names.len());
        return at.err(field, problem);
    }
    if names.bytes().all(|byte| byte > b' ' && byte < 0x7f) {
        return Ok(names);
    }
    at.err(field, format!("{names:?} is no list of names"))
}

/// Returns policies with every field set, for the tests of all resources.
#[cfg(test)]
pub(super) fn samples() -> Vec<m::CorsPolicy> {
    let host = |host| m::OriginMatch::Host {
        scheme: UrlScheme::Https,
        host,
        port: 8443,
    };
    let full = m::CorsPolicy {
        origins: vec![
            m::OriginMatch::Any,
            m::OriginMatch::Exact("https://a.b".into()),
            m::OriginMatch::Prefix("https://a".into()),
            m::OriginMatch::Regex("https://.*".into()),
            host(m::OriginHost::Exact("a.b".into())),
            host(m::OriginHost::Suffix(".c".into())),
            host(m::OriginHost::Any),
        ],
        methods: m::CorsList::Listed("GET,PUT".into()),
        headers: m::CorsList::Requested,
        exposed: Some("x-a,x-b".into()),
        max_age: Some(0),
        credentials: true,
        dialect: m::CorsDialect::IstioForward,
    };
    let ignoring = m::CorsPolicy {
        dialect: m::CorsDialect::IstioIgnore,
        ..full.clone()
    };
    vec![full, ignoring, m::CorsPolicy::default()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_that_no_response_can_have_are_refused() {
        use w::cors_list::List;
        use w::origin_match::Origin;
        type Change = fn(&mut w::CorsPolicy);
        let cases: [(Change, &str); 5] = [
            (|c| c.dialect = 9, "cors.dialect"),
            (|c| c.exposed = "a\r\nb: c".into(), "cors.exposed"),
            (
                |c| {
                    let list = Some(List::Listed("GET\n".into()));
                    c.methods = Some(w::CorsList { list });
                },
                "cors.methods",
            ),
            (|c| c.origins[0].origin = None, "cors.origins"),
            (
                |c| {
                    c.origins[0].origin = Some(Origin::Host(w::OriginHost {
                        scheme: "ftp".into(),
                        ..w::OriginHost::default()
                    }));
                },
                "cors.origins.scheme",
            ),
        ];
        for (change, want) in cases {
            let mut received = w::CorsPolicy::from(&samples()[0]);
            change(&mut received);
            let text = decode(&DecodeContext("r"), received)
                .unwrap_err()
                .to_string();
            assert!(text.contains(want), "{want}: {text}");
        }
    }

    #[test]
    fn lists_have_a_limit_of_bytes() {
        use w::cors_list::List;
        for (bytes, is_accepted) in [
            (CORS_LIST_BYTES_MAX, true),
            (CORS_LIST_BYTES_MAX + 1, false),
        ] {
            let list = Some(w::CorsList {
                list: Some(List::Listed("x".repeat(bytes))),
            });
            for received in [
                w::CorsPolicy {
                    methods: list.clone(),
                    ..w::CorsPolicy::from(&samples()[0])
                },
                w::CorsPolicy {
                    headers: list.clone(),
                    ..w::CorsPolicy::from(&samples()[0])
                },
                w::CorsPolicy {
                    exposed: "x".repeat(bytes),
                    ..w::CorsPolicy::from(&samples()[0])
                },
            ] {
                let decoded = decode(&DecodeContext("r"), received);
                assert_eq!(decoded.is_ok(), is_accepted, "{bytes}: {decoded:?}");
            }
        }
    }
}

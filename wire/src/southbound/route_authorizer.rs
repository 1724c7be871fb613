//! Wire form of the authorizer that a rule names. It is in an extended action, so that
//! a data plane that does not know it refuses the rule.

use canal_model::authorization::AUTHORIZER_BODY_BYTES_MAX;
use canal_model::route_authorizer as m;

use super::decode::DecodeContext;
use super::{ResourceDecodeError, encode, route_filters};
use crate::program as w;

impl From<&m::RouteAuthorizer> for w::RouteAuthorizer {
    fn from(authorizer: &m::RouteAuthorizer) -> Self {
        use w::route_authorizer::Protocol;
        let m::RouteAuthorizer {
            service,
            port,
            protocol,
            headers,
            body_bytes,
        } = authorizer;
        Self {
            service: encode::key(service),
            port: (*port).into(),
            headers: headers.clone(),
            body_bytes: *body_bytes,
            protocol: Some(match protocol {
                m::RouteAuthorizerProtocol::Grpc => Protocol::Grpc(true),
                m::RouteAuthorizerProtocol::Http {
                    path_prefix,
                    response_headers,
                } => Protocol::Http(w::HttpAuthorization {
                    path_prefix: path_prefix.clone(),
                    response_headers: response_headers.clone(),
                }),
            }),
        }
    }
}

pub(super) fn decode(
    at: &DecodeContext<'_>,
    received: w::RouteAuthorizer,
) -> Result<m::RouteAuthorizer, ResourceDecodeError> {
    use w::route_authorizer::Protocol;
    let names = |names: Vec<String>| match names.len() {
        ..=m::ROUTE_AUTHORIZER_HEADERS_MAX => Ok(names),
        count => at.err("authorizer.headers", format!("there are {count} headers")),
    };
    if received.body_bytes > AUTHORIZER_BODY_BYTES_MAX {
        return at.err(
            "authorizer.body_bytes",
            format!("{} bytes are too many", received.body_bytes),
        );
    }
    let protocol = match at.need("authorizer.protocol", received.protocol)? {
        Protocol::Grpc(_) => m::RouteAuthorizerProtocol::Grpc,
        Protocol::Http(http) => m::RouteAuthorizerProtocol::Http {
            path_prefix: route_filters::path_text(
                at,
                "authorizer.http.path_prefix",
                http.path_prefix,
            )?,
            response_headers: names(http.response_headers)?,
        },
    };
    Ok(m::RouteAuthorizer {
        service: at.key("authorizer.service", received.service)?,
        port: at.port("authorizer.port", received.port)?,
        protocol,
        headers: names(received.headers)?,
        body_bytes: received.body_bytes,
    })
}

/// Returns an authorizer of each protocol, for the tests of all resources.
#[cfg(test)]
pub(super) fn samples() -> [m::RouteAuthorizer; 2] {
    let of = |protocol| m::RouteAuthorizer {
        service: "alpha/b/auth".parse().unwrap(),
        port: 80,
        protocol,
        headers: vec!["x-a".to_owned()],
        body_bytes: AUTHORIZER_BODY_BYTES_MAX,
    };
    [
        of(m::RouteAuthorizerProtocol::Grpc),
        of(m::RouteAuthorizerProtocol::Http {
            path_prefix: "/auth".to_owned(),
            response_headers: vec!["x-user".to_owned()],
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authorizer_beyond_the_limits_is_refused() {
        type Change = fn(&mut w::RouteAuthorizer);
        let cases: [(Change, &str); 4] = [
            (|it| it.protocol = None, "authorizer.protocol"),
            (|it| it.port = 0, "authorizer.port"),
            (|it| it.body_bytes += 1, "too many"),
            (
                |it| it.headers = vec!["x".into(); m::ROUTE_AUTHORIZER_HEADERS_MAX + 1],
                "65 headers",
            ),
        ];
        let at = DecodeContext("a rule");
        for known in samples() {
            assert_eq!(decode(&at, (&known).into()), Ok(known.clone()));
            for (change, text) in cases {
                let mut received = w::RouteAuthorizer::from(&known);
                change(&mut received);
                let refused = decode(&at, received).unwrap_err().to_string();
                assert!(refused.contains(text), "{text}: {refused}");
            }
        }
    }
}

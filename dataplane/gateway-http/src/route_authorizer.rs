//! The HTTP request by which the gateway checks a request at a rule's authorizer, and what the
//! response means (GEP-1494). It sends nothing. Start with [`HttpAuthzCheck`].

use bytes::Bytes;
use canal_gateway_config::RequestMutations;
use canal_h1::{ForwardOptions, Framing, OutHead};
use canal_model::route_filters::PROTECTED_RESPONSE_HEADERS;
use http::header::{CONTENT_LENGTH, EXPECT};
use http::{HeaderName, HeaderValue, Method, Uri};

use crate::head::FullRequest;
use crate::heads::{X_FORWARDED_FOR, forwarded_for};
use crate::proxy_error::ExtAuthzDenial;

/// Most header lines of an authorizer's answer.
pub const ANSWER_HEADERS_MAX: usize = 64;

/// Returns the path and query of a request in the form in which it will be forwarded.
pub fn forwarded_target<R: FullRequest>(request: &R, changes: &RequestMutations) -> Vec<u8> {
    let changed = changes.target(request.path(), request.query());
    changed.unwrap_or_else(|| {
        let mut target = request.path().to_vec();
        if let Some(query) = request.query() {
            target.push(b'?');
            target.extend_from_slice(query);
        }
        target
    })
}

/// Passes the headers of a request to `visit`, as they will be forwarded, with names in lower case.
/// `client_ip` is the address of the client.
pub fn each_forwarded_header<R: FullRequest>(
    request: &R,
    changes: &RequestMutations,
    client_ip: &str,
    mut visit: impl FnMut(&str, &[u8]),
) {
    let mut addresses: Vec<Vec<u8>> = Vec::new();
    request.each_header(&mut |name, value| {
        let name = String::from_utf8_lossy(name).to_ascii_lowercase();
        if name == X_FORWARDED_FOR.as_str() {
            addresses.push(value.to_vec());
        } else if !changes.determines(&name) {
            visit(&name, value);
        }
    });
    // No mutation changes it. Without the client's own address, an authorizer would take the last one
    // that the client wrote for that of the client.
    let addresses = addresses.iter().map(Vec::as_slice);
    visit(
        X_FORWARDED_FOR.as_str(),
        &forwarded_for(addresses, client_ip),
    );
    for (name, value) in changes.headers() {
        if let Some(value) = value {
            visit(name, value);
        }
    }
}

/// The check about a request: a request of the same method and host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpAuthzCheck {
    pub method: Vec<u8>,
    pub authority: Vec<u8>,
    pub target: Vec<u8>,
    /// Headers without `host` and `content-length`.
    pub headers: Vec<(Vec<u8>, Vec<u8>)>,
    pub body: Bytes,
}

impl HttpAuthzCheck {
    /// Makes the check about a request of the client at `client_ip` that `changes` will change.
    /// `listed` are the headers that the server receives beside `authorization`.
    pub fn new<R: FullRequest>(
        (request, authority, client_ip): (&R, &[u8], &str),
        changes: &RequestMutations,
        (path_prefix, listed): (&str, &[String]),
        body: Bytes,
    ) -> Self {
        let target = forwarded_target(request, changes);
        let target = match target.first() {
            Some(b'/') => [path_prefix.trim_end_matches('/').as_bytes(), &target].concat(),
            // `OPTIONS *` is about the server, and has no path.
            _ if path_prefix.is_empty() => target,
            _ => path_prefix.as_bytes().to_vec(),
        };
        let mut headers = Vec::new();
        each_forwarded_header(request, changes, client_ip, |name, value| {
            let is_shown = name == "authorization" || listed.iter().any(|listed| listed == name);
            // The check has a host and a length of its own.
            if is_shown && !matches!(name, "host" | "content-length") {
                headers.push((name.as_bytes().to_vec(), value.to_vec()));
            }
        });
        Self {
            method: request.method().to_vec(),
            authority: authority.to_vec(),
            target,
            headers,
            body,
        }
    }

    /// Returns the head in HTTP/1.1; `None` if it has no such form.
    pub fn http1(&self) -> Option<Vec<u8>> {
        let pairs = self.headers.iter();
        let pairs = pairs.map(|(name, value)| (name.as_slice(), value.as_slice()));
        let options = ForwardOptions {
            framing: Framing::Length(self.body.len() as u64),
            target: Some(&self.target),
            ..ForwardOptions::default()
        };
        let (mut out, mut head) = (OutHead::new(), Vec::new());
        out.encode_request(&self.method, &self.authority, pairs, &options)
            .ok()?;
        out.write_to(&[], &mut head);
        Some(head)
    }

    /// Returns the head in HTTP/2; `None` if it has no such form.
    pub fn http2(&self) -> Option<http::Request<()>> {
        let mut request = http::Request::new(());
        *request.method_mut() = Method::from_bytes(&self.method).ok()?;
        *request.version_mut() = http::Version::HTTP_2;
        *request.uri_mut() = Uri::builder()
            .scheme("http")
            .authority(self.authority.as_slice())
            .path_and_query(self.target.as_slice())
            .build()
            .ok()?;
        for (name, value) in &self.headers {
            let parsed = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value));
            // Those of a connection end at this hop, as in HTTP/1.1, and the body does not wait.
            if let (Ok(name), Ok(value)) = parsed
                && !PROTECTED_RESPONSE_HEADERS.contains(&name.as_str())
                && name != EXPECT
            {
                request.headers_mut().append(name, value);
            }
        }
        let length = HeaderValue::from(self.body.len());
        request.headers_mut().insert(CONTENT_LENGTH, length);
        Some(request)
    }
}

/// Header lines that the endpoint receives, or the denial that the client receives.
pub type HttpAuthzDecision = Result<Vec<(String, Vec<u8>)>, ExtAuthzDenial>;

/// The response of an authorizer to a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpAuthzResponse {
    pub status: u16,
    /// Headers of the answer, with names in lower case.
    pub headers: Vec<(String, Vec<u8>)>,
    pub body: Bytes,
}

impl HttpAuthzResponse {
    /// Returns the decision: header lines that the endpoint receives, or the denial that the client
    /// receives. `listed` are the headers for the endpoint; an empty list means all.
    ///
    /// # Errors
    /// The answer is no decision.
    pub fn read(self, listed: &[String]) -> Result<HttpAuthzDecision, &'static str> {
        if self.headers.len() > ANSWER_HEADERS_MAX {
            return Err("authorizer_too_many_headers");
        }
        let headers = self.headers.into_iter();
        match self.status {
            200 => {
                let is_wanted = |name: &str| match listed {
                    // Those of the answer's body would describe the request's.
                    [] => !name.starts_with("content-"),
                    listed => listed.iter().any(|listed| listed == name),
                };
                Ok(Ok(headers.filter(|(name, _)| is_wanted(name)).collect()))
            }
            // The server itself failed.
            500.. => Err("authorizer_status"),
            status => {
                let is_sent =
                    |name: &str| name != "date" && !PROTECTED_RESPONSE_HEADERS.contains(&name);
                // The gateway gives the response a body, which these statuses cannot have.
                let status = match status {
                    ..200 | 204 | 205 | 304 => 403,
                    status => status,
                };
                let body = String::from_utf8(self.body.into());
                Ok(Err(ExtAuthzDenial {
                    status,
                    headers: headers.filter(|(name, _)| is_sent(name)).collect(),
                    body: body.map_err(|_| "authorizer_malformed")?,
                }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(names: &[&str]) -> Vec<(String, Vec<u8>)> {
        let names = names.iter();
        names
            .map(|name| ((*name).to_owned(), b"1".to_vec()))
            .collect()
    }

    fn answer(status: u16, names: &[&str]) -> HttpAuthzResponse {
        HttpAuthzResponse {
            status,
            headers: lines(names),
            body: Bytes::from_static(b"no"),
        }
    }

    #[test]
    fn only_status_200_allows() {
        let names = ["x-user", "x-user", "content-type", "x-other"];
        let all = lines(&["x-user", "x-user", "x-other"]);
        assert_eq!(answer(200, &names).read(&[]), Ok(Ok(all)));
        let listed = ["x-user".to_owned()];
        let some = lines(&["x-user", "x-user"]);
        assert_eq!(answer(200, &names).read(&listed), Ok(Ok(some)));
        let sent = ["location", "set-cookie", "set-cookie"];
        let names = [&sent[..], &["connection", "content-length", "date"]].concat();
        for (status, want) in [(302, 302), (401, 401), (201, 201), (204, 403), (304, 403)] {
            let denial = ExtAuthzDenial {
                status: want,
                headers: lines(&sent),
                body: "no".to_owned(),
            };
            assert_eq!(
                answer(status, &names).read(&[]),
                Ok(Err(denial)),
                "{status}"
            );
        }
        assert_eq!(answer(503, &[]).read(&[]), Err("authorizer_status"));
        let many = vec!["x"; ANSWER_HEADERS_MAX + 1];
        let refused = answer(200, &many).read(&[]);
        assert_eq!(refused, Err("authorizer_too_many_headers"));
        let binary = HttpAuthzResponse {
            body: Bytes::from_static(b"\xff"),
            ..answer(403, &[])
        };
        assert_eq!(binary.read(&[]), Err("authorizer_malformed"));
    }

    #[test]
    fn a_check_has_its_own_length_in_both_versions() {
        let check = HttpAuthzCheck {
            method: b"POST".to_vec(),
            authority: b"web".to_vec(),
            target: b"/auth/x?q".to_vec(),
            headers: [
                ("authorization", "Bearer a"),
                ("x-forwarded-for", "192.0.2.1"),
                ("transfer-encoding", "chunked"),
                ("te", "trailers"),
            ]
            .map(|(name, value)| (name.into(), value.into()))
            .to_vec(),
            body: Bytes::from_static(b"abc"),
        };
        let head = String::from_utf8(check.http1().unwrap()).unwrap();
        assert!(
            head.starts_with("POST /auth/x?q HTTP/1.1\r\nhost: web\r\n"),
            "{head}"
        );
        assert!(head.contains("authorization: Bearer a\r\n"), "{head}");
        assert!(head.contains("x-forwarded-for: 192.0.2.1\r\n"), "{head}");
        assert!(head.contains("content-length: 3\r\n"), "{head}");
        assert!(!head.contains("chunked") && !head.contains("te:"), "{head}");
        let request = check.http2().unwrap();
        assert_eq!(request.uri(), "http://web/auth/x?q");
        assert_eq!(request.headers()["content-length"], "3");
        assert_eq!(request.headers()["authorization"], "Bearer a");
        assert_eq!(request.headers()["x-forwarded-for"], "192.0.2.1");
        assert_eq!(request.headers().len(), 3);
    }
}

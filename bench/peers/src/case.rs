//! The cases: the requests to a proxy, the number of connections, and the load that sends them.
//! Nothing is started or measured here.

/// Number of services in the cases that spread requests.
/// The target of docs/performance.md is for as many.
pub(crate) const SERVICES: usize = 10_000;
/// Number of routes of each service.
/// The target of docs/performance.md is for as many.
pub(crate) const ROUTES: usize = 10;

/// Kind of the requests to a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProxyCase {
    /// 64 persistent connections, one request at a time on each, 23-byte responses.
    Http1,
    /// 64 clients, each of which opens a connection for a request and reads it to its end.
    Close,
    /// 16 connections x 16 streams, HTTP/2 without TLS in, HTTP/1.1 out.
    H2c,
    /// mTLS and HTTP/2 in, 10,000 services configured, all requests to one: a CONNECT for each, or
    /// a stream where there is no HBONE.
    OneService,
    /// Like [`ProxyCase::OneService`], with the service drawn at random for each request.
    ManyServices,
    /// mTLS and HTTP/2 in and out: HBONE tunnels that are reused, or streams.
    Mtls,
    /// Like [`ProxyCase::Http1`], with a token that is validated, policies and an access log.
    Policies,
}

impl ProxyCase {
    pub(crate) const ALL: [ProxyCase; 7] = [
        ProxyCase::Http1,
        ProxyCase::Close,
        ProxyCase::H2c,
        ProxyCase::OneService,
        ProxyCase::ManyServices,
        ProxyCase::Mtls,
        ProxyCase::Policies,
    ];

    /// Returns the name of the case for `--cases`.
    pub(crate) fn word(self) -> &'static str {
        match self {
            ProxyCase::Http1 => "http1",
            ProxyCase::Close => "close",
            ProxyCase::H2c => "h2c",
            ProxyCase::OneService => "one",
            ProxyCase::ManyServices => "spread",
            ProxyCase::Mtls => "mtls",
            ProxyCase::Policies => "policies",
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            ProxyCase::Http1 => "HTTP/1.1 keep-alive",
            ProxyCase::Close => "HTTP/1.1, a connection per request",
            ProxyCase::H2c => "h2c to HTTP/1.1",
            ProxyCase::OneService => "mTLS in, one of 10,000 services",
            ProxyCase::ManyServices => "mTLS in, spread over 10,000 services",
            ProxyCase::Mtls => "mTLS in and out, HTTP/2",
            ProxyCase::Policies => "HTTP/1.1, token, policies, access log",
        }
    }

    /// Returns the path of the requests.
    pub(crate) fn path(self) -> &'static str {
        if self == ProxyCase::Policies {
            "/items/7"
        } else {
            "/"
        }
    }

    /// Returns the number of connections, and of requests in progress on each.
    pub(crate) fn size(self) -> (usize, usize) {
        match self {
            ProxyCase::Http1 | ProxyCase::Close | ProxyCase::Policies => (64, 1),
            ProxyCase::H2c | ProxyCase::OneService | ProxyCase::ManyServices | ProxyCase::Mtls => {
                (16, 16)
            }
        }
    }

    /// Returns whether clients, and the origin of [`ProxyCase::Mtls`], use TLS.
    pub(crate) fn is_tls(self) -> bool {
        matches!(
            self,
            ProxyCase::OneService | ProxyCase::ManyServices | ProxyCase::Mtls
        )
    }

    /// Returns whether 10,000 services are configured.
    pub(crate) fn is_large(self) -> bool {
        matches!(self, ProxyCase::OneService | ProxyCase::ManyServices)
    }
}

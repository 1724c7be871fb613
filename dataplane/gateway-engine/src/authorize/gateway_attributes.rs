//! Attributes that the gateway provides to policies: everything of a request, or only the
//! connection's attributes for other bytes.
//!
//! It decides nothing. Start with [`GatewayAttributes`].

use std::net::{IpAddr, SocketAddr};

use canal_authorization::{AttributeValue, AttributeVisibility, Attributes};
use canal_gateway_config::RequestMutations;
use canal_gateway_config::jwt::Token;
use canal_gateway_http::forwarded_client::{ForwardedClient, forwarded_client};
use canal_h1::FieldName;
use canal_model::authorization::Attribute;
use canal_router::{RoutableRequest, line_separator};

use crate::session::{ClientPrincipal, ClientSession};

/// A request together with the mutations that authorization has made so far.
pub(crate) struct MutatedRequest<'a> {
    pub(crate) request: &'a dyn RequestAttributes,
    /// Authority of the request, port included.
    pub(crate) authority: &'a [u8],
    pub(crate) changes: &'a RequestMutations,
    pub(crate) token: Option<&'a Token>,
}

/// The object-safe subset of [`RoutableRequest`] that policies read.
pub(crate) trait RequestAttributes {
    fn method(&self) -> &[u8];
    fn path(&self) -> &[u8];
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8]));
}

impl<R: RoutableRequest> RequestAttributes for R {
    fn method(&self) -> &[u8] {
        RoutableRequest::method(self)
    }
    fn path(&self) -> &[u8] {
        RoutableRequest::path(self)
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        RoutableRequest::header(self, name, visit);
    }
}

/// Implements [`Attributes`] for one request or connection.
#[derive(Clone, Copy)]
pub(crate) struct GatewayAttributes<'a> {
    principal: &'a ClientPrincipal,
    client: IpAddr,
    /// Address of the peer that sent the packets: a load balancer's, if the connection began with a
    /// header of the PROXY protocol, else the client's.
    peer: IpAddr,
    /// Address of the endpoint; `None` for a request that reaches none.
    to: Option<SocketAddr>,
    /// `None` if there is no request, or if its head is no longer available.
    subject: Option<&'a MutatedRequest<'a>>,
    foreign: bool,
    /// Number of proxies between the client and the Gateway.
    trusted_proxies: u8,
}

impl<'a> GatewayAttributes<'a> {
    /// Attributes of a request on a connection.
    pub(crate) fn request(
        session: &'a ClientSession,
        to: Option<SocketAddr>,
        subject: &'a MutatedRequest<'a>,
    ) -> Self {
        Self {
            subject: Some(subject),
            to,
            ..Self::of_client(session)
        }
    }

    /// Attributes of a connection to an endpoint.
    pub(crate) fn connection(session: &'a ClientSession, to: SocketAddr) -> Self {
        Self {
            to: Some(to),
            ..Self::of_client(session)
        }
    }

    fn of_client(session: &'a ClientSession) -> Self {
        let client = session.client.ip().to_canonical();
        Self {
            principal: &session.principal,
            client,
            peer: session.balancer.unwrap_or(client),
            to: None,
            subject: None,
            foreign: session.principal.foreign,
            trusted_proxies: 0,
        }
    }

    pub(super) fn behind(mut self, trusted_proxies: u8) -> Self {
        self.trusted_proxies = trusted_proxies;
        self
    }

    /// Returns the address of the client before the proxies that are trusted (Istio's
    /// `numTrustedProxies`); `None` if it is not known.
    fn remote_address(&self) -> Option<IpAddr> {
        if self.trusted_proxies == 0 {
            return Some(self.client);
        }
        let request = self.subject?.request;
        let lines = |each: &mut dyn FnMut(&[u8])| {
            request.header(FieldName::XForwardedFor.text(), each);
        };
        match forwarded_client(&lines, self.trusted_proxies.into()) {
            ForwardedClient::Address(address) => Some(address),
            ForwardedClient::Direct => Some(self.client),
            ForwardedClient::Invalid => None,
        }
    }

    pub(super) fn foreign(mut self, foreign: bool) -> Self {
        self.foreign = foreign;
        self
    }

    fn of_request(
        subject: &MutatedRequest<'_>,
        attribute: &Attribute,
        each: &mut dyn FnMut(AttributeValue<'_>) -> bool,
    ) {
        if let Attribute::Header(name) = attribute
            && !subject.changes.determines(name)
        {
            return header(subject.request, name, each);
        }
        // Once a value suffices for the policy, no further values are passed.
        let mut enough = false;
        let mut text = |bytes: &[u8]| {
            enough = enough || each(AttributeValue::Text(bytes));
            enough
        };
        let token = subject.token;
        let one = match attribute {
            Attribute::Method => Some(subject.request.method()),
            Attribute::Path => Some(
                subject
                    .changes
                    .path
                    .as_ref()
                    .map_or(subject.request.path(), |path| path.as_bytes()),
            ),
            Attribute::Host => Some(subject.authority),
            Attribute::Header(name) if subject.changes.sets_or_removes(name) => {
                subject.changes.value(name)
            }
            Attribute::RequestPrincipal => token
                .and_then(|t| t.principal.as_deref())
                .map(str::as_bytes),
            Attribute::RequestPresenter => token.and_then(Token::presenter).map(str::as_bytes),
            // Attributes with several values follow below; those of the connection do not get here.
            _ => None,
        };
        match (one, attribute, token) {
            (Some(one), ..) => {
                text(one);
            }
            (None, Attribute::RequestAudience, Some(token)) => {
                token
                    .audiences()
                    .into_iter()
                    .any(|audience| text(audience.as_bytes()));
            }
            (None, Attribute::RequestClaim(path), Some(token)) => {
                token.visit_claim(path, &mut text)
            }
            // A header that is removed, or that spells such a one otherwise, is not forwarded, so that
            // it has no value. Without a token there is no audience or claim.
            _ => {}
        }
    }
}

/// Passes a header's value to `each`. Several lines are joined to one value (RFC 9110 §5.3), and each
/// is passed beside it, because a second line must not hide the first one from a policy that denies
/// (GHSA-ghc4-35x6-crw5 in Envoy).
fn header(
    request: &dyn RequestAttributes,
    name: &str,
    each: &mut dyn FnMut(AttributeValue<'_>) -> bool,
) {
    let mut lines = 0;
    request.header(name, &mut |_| lines += 1);
    if lines <= 1 {
        request.header(name, &mut |value| {
            each(AttributeValue::Text(value));
        });
        return;
    }
    let (mut joined, mut is_first, mut is_decided) = (Vec::new(), true, false);
    request.header(name, &mut |value| {
        // An empty first line has a separator behind it too: `["", "x"]` is `,x` and not `x`, which
        // an ALLOW of exactly `x` would let through.
        if !is_first {
            joined.extend_from_slice(line_separator(name));
        }
        is_first = false;
        joined.extend_from_slice(value);
        is_decided = is_decided || each(AttributeValue::Line(value));
    });
    if !is_decided {
        each(AttributeValue::Text(&joined));
    }
}

/// An attribute with a single value is known, whether or not that value sufficed.
fn always_known(_: bool) -> AttributeVisibility {
    AttributeVisibility::Known
}

impl Attributes for GatewayAttributes<'_> {
    fn visit_attribute(
        &self,
        attribute: &Attribute,
        each: &mut dyn FnMut(AttributeValue<'_>) -> bool,
    ) -> AttributeVisibility {
        let mut text = |value: &str| {
            each(AttributeValue::Text(value.as_bytes()));
        };
        match attribute {
            Attribute::SourcePrincipal => self.principal.principal.as_deref().map_or((), text),
            Attribute::SourceNamespace if self.principal.principal.is_some() => {
                text(&self.principal.namespace)
            }
            Attribute::SourceServiceAccount if self.principal.principal.is_some() => {
                text(&self.principal.account)
            }
            // A plaintext client has no identity: both are known to be absent.
            Attribute::SourceNamespace | Attribute::SourceServiceAccount => {}
            // A client address that the first hop did not report is unknown, not absent.
            Attribute::SourceAddress | Attribute::RemoteAddress if self.client.is_unspecified() => {
                return AttributeVisibility::Unknown;
            }
            Attribute::SourceAddress => {
                return always_known(each(AttributeValue::Address(self.peer)));
            }
            // A client's own `x-forwarded-for` is trusted only as far as proxies appended to it.
            Attribute::RemoteAddress => {
                return match self.remote_address() {
                    Some(remote) => always_known(each(AttributeValue::Address(remote))),
                    None => AttributeVisibility::Unknown,
                };
            }
            Attribute::DestinationPort | Attribute::DestinationAddress => {
                let value = match (self.to, attribute) {
                    // Without an endpoint, a policy that depends on its address denies.
                    (None, _) => return AttributeVisibility::Unknown,
                    (Some(to), Attribute::DestinationPort) => AttributeValue::Port(to.port()),
                    (Some(to), _) => AttributeValue::Address(to.ip()),
                };
                return always_known(each(value));
            }
            Attribute::ServerName => self.principal.server_name.as_deref().map_or((), text),
            // All others are attributes of a request, which a relayed connection does not have.
            _ => match self.subject {
                None => return AttributeVisibility::Unknown,
                Some(subject) => Self::of_request(subject, attribute, each),
            },
        }
        AttributeVisibility::Known
    }

    fn is_foreign(&self) -> bool {
        self.foreign
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of the only header of a request.
    struct HeaderLines(&'static [&'static str]);

    impl RequestAttributes for HeaderLines {
        fn method(&self) -> &[u8] {
            b"GET"
        }
        fn path(&self) -> &[u8] {
            b"/"
        }
        fn header(&self, _: &str, visit: &mut dyn FnMut(&[u8])) {
            self.0.iter().for_each(|line| visit(line.as_bytes()));
        }
    }

    /// Checks which values a policy compares for a header with the given lines.
    #[track_caller]
    fn check(lines: &'static [&'static str], expected: &[&str]) {
        let mut values = Vec::new();
        header(&HeaderLines(lines), "x-a", &mut |value| {
            values.push(match value {
                AttributeValue::Text(text) => String::from_utf8_lossy(text).into_owned(),
                AttributeValue::Line(line) => format!("line {}", String::from_utf8_lossy(line)),
                other => unreachable!("a header has only text, and not {other:?}"),
            });
            false
        });
        assert_eq!(values, expected, "{lines:?}");
    }

    #[test]
    fn lines_of_a_header_are_joined_and_an_empty_one_keeps_its_separator() {
        check(&[], &[]);
        check(&["x"], &["x"]);
        check(&["x", "y"], &["line x", "line y", "x,y"]);
        check(&["", "x"], &["line ", "line x", ",x"]);
        check(&["x", ""], &["line x", "line ", "x,"]);
        check(&["", "", "x"], &["line ", "line ", "line x", ",,x"]);
    }
}

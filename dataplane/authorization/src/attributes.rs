//! Attributes of a request or connection, as far as a hop knows them. A hop that cannot observe an
//! attribute reports [`AttributeVisibility::Unknown`], which is different from an attribute without
//! a value. Start with [`Attributes`].

use std::fmt;
use std::net::IpAddr;

use canal_model::authorization::Attribute;

/// One value of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttributeValue<'a> {
    Text(&'a [u8]),
    /// One of several lines of a header, of which [`AttributeValue::Text`] has all joined. It counts
    /// only against the request: a server may read that line alone.
    Line(&'a [u8]),
    Address(IpAddr),
    Port(u16),
}

/// Result of reading an attribute: the hop can observe it, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttributeVisibility {
    /// The hop has given all values of the attribute. If it gave none, the attribute is absent.
    Known,
    /// The hop cannot observe the attribute.
    Unknown,
}

/// Source of attributes for policies. [`Attribute::Host`] is given as the client wrote it, with its
/// port; [`Attribute::SourcePrincipal`] is given without `spiffe://`.
pub trait Attributes {
    /// Passes the values of an attribute to `each` until it returns true.
    fn visit_attribute(
        &self,
        attribute: &Attribute,
        each: &mut dyn FnMut(AttributeValue<'_>) -> bool,
    ) -> AttributeVisibility;

    /// Returns true if the peer's identity belongs to another tenant, with which this one
    /// federates.
    fn is_foreign(&self) -> bool {
        false
    }
}

/// Source of a hop that knows no attribute.
#[derive(Debug, Clone, Copy)]
pub struct NoAttributes;

impl Attributes for NoAttributes {
    fn visit_attribute(
        &self,
        _: &Attribute,
        _: &mut dyn FnMut(AttributeValue<'_>) -> bool,
    ) -> AttributeVisibility {
        AttributeVisibility::Unknown
    }
}

/// Returns an attribute's name as users write it in `when`, for logs.
pub fn name(attribute: &Attribute) -> impl fmt::Display + '_ {
    Name(attribute)
}

struct Name<'a>(&'a Attribute);

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Attribute::SourcePrincipal => "source.principal",
            Attribute::SourceNamespace => "source.namespace",
            Attribute::SourceServiceAccount => "source.serviceAccount",
            Attribute::SourceAddress => "source.ip",
            Attribute::RemoteAddress => "remote.ip",
            Attribute::RequestPrincipal => "request.auth.principal",
            Attribute::RequestAudience => "request.auth.audiences",
            Attribute::RequestPresenter => "request.auth.presenter",
            Attribute::Host => "request.host",
            Attribute::Method => "request.method",
            Attribute::Path => "request.path",
            Attribute::DestinationPort => "destination.port",
            Attribute::DestinationAddress => "destination.ip",
            Attribute::ServerName => "connection.sni",
            Attribute::Header(header) => return write!(f, "request.headers[{header}]"),
            Attribute::RequestClaim(path) => {
                f.write_str("request.auth.claims")?;
                return path.iter().try_for_each(|part| write!(f, "[{part}]"));
            }
        })
    }
}

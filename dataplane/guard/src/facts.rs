//! What a hop knows of a request or connection. A hop that cannot see an attribute says so; that is not the same as the attribute having
//! no value.

use std::fmt;
use std::net::IpAddr;

use canal_model::authorization::Attribute;

/// One value of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    Text(&'a [u8]),
    Address(IpAddr),
    Port(u16),
}

/// Whether a hop can see an attribute at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight {
    /// All its values were given; none is a value too: it is absent.
    Known,
    /// This hop cannot tell.
    Unknown,
}

/// What is known. [`Attribute::Host`] is given as the client wrote it, port included; [`Attribute::SourcePrincipal`] without `spiffe://`.
pub trait Facts {
    /// Gives the values of an attribute to `each` until it returns true.
    fn look(&self, attribute: &Attribute, each: &mut dyn FnMut(Value<'_>) -> bool) -> Sight;

    /// The peer's identity is of another tenant, with which this one federates.
    fn is_foreign(&self) -> bool {
        false
    }
}

/// Nothing is known.
#[derive(Debug, Clone, Copy)]
pub struct Unknown;

impl Facts for Unknown {
    fn look(&self, _: &Attribute, _: &mut dyn FnMut(Value<'_>) -> bool) -> Sight {
        Sight::Unknown
    }
}

/// An attribute as users write it in `when`, for logs.
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

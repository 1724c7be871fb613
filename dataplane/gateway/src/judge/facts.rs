//! What the gateway knows, as policies ask it: of requests everything, of other bytes what their connection shows. It decides nothing.

use std::net::{IpAddr, SocketAddr};

use canal_guard::{Facts, Sight, Value};
use canal_model::authorization::Attribute;
use canal_router::Request;

use crate::changes::Changes;
use crate::session::{Session, Who};
use crate::token::Token;

/// A request with what judging made of it.
pub(crate) struct Subject<'a> {
    pub(crate) request: &'a dyn Asked,
    /// With the port.
    pub(crate) authority: &'a [u8],
    pub(crate) changes: &'a Changes,
    pub(crate) token: Option<&'a Token>,
}

/// [`Request`] where its type does not matter.
pub(crate) trait Asked {
    fn method(&self) -> &[u8];
    fn path(&self) -> &[u8];
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8]));
}

impl<R: Request> Asked for R {
    fn method(&self) -> &[u8] {
        Request::method(self)
    }
    fn path(&self) -> &[u8] {
        Request::path(self)
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        Request::header(self, name, visit);
    }
}

/// See the module.
#[derive(Clone, Copy)]
pub(crate) struct Known<'a> {
    who: &'a Who,
    client: IpAddr,
    to: SocketAddr,
    /// `None`: no request, or one that cannot be looked at any more.
    subject: Option<&'a Subject<'a>>,
    foreign: bool,
}

impl<'a> Known<'a> {
    /// A request on a connection.
    pub(crate) fn request(session: &'a Session, to: SocketAddr, subject: &'a Subject<'a>) -> Self {
        Self { subject: Some(subject), ..Self::connection(session, to) }
    }

    pub(crate) fn connection(session: &'a Session, to: SocketAddr) -> Self {
        let client = session.client.ip().to_canonical();
        Self { who: &session.who, client, to, subject: None, foreign: session.who.foreign }
    }

    pub(super) fn foreign(mut self, foreign: bool) -> Self {
        self.foreign = foreign;
        self
    }

    fn of_request(subject: &Subject<'_>, attribute: &Attribute, each: &mut dyn FnMut(Value<'_>) -> bool) {
        // Once a value was enough, no more are given.
        let mut enough = false;
        let mut text = |bytes: &[u8]| {
            enough = enough || each(Value::Text(bytes));
            enough
        };
        let token = subject.token;
        let one = match attribute {
            Attribute::Method => Some(subject.request.method()),
            Attribute::Path => Some(subject.changes.path.as_ref().map_or(subject.request.path(), |path| path.as_bytes())),
            Attribute::Host => Some(subject.authority),
            Attribute::Header(name) if subject.changes.says(name) => subject.changes.value(name),
            Attribute::RequestPrincipal => token.map(|t| t.principal.as_bytes()),
            Attribute::RequestPresenter => token.and_then(Token::presenter).map(str::as_bytes),
            _ => None,
        };
        match (one, attribute, token) {
            (Some(one), ..) => {
                text(one);
            }
            (None, Attribute::Header(name), _) if !subject.changes.says(name) => header(subject.request, name, &mut text),
            (None, Attribute::RequestAudience, Some(token)) => {
                token.audiences().into_iter().any(|audience| text(audience.as_bytes()));
            }
            (None, Attribute::RequestClaim(path), Some(token)) => token.look(path, &mut text),
            _ => {}
        }
    }
}

/// A header's value. Several lines are one value with commas between (RFC 9110 §5.3), as Envoy has it.
fn header(request: &dyn Asked, name: &str, text: &mut dyn FnMut(&[u8]) -> bool) {
    let mut lines = 0;
    request.header(name, &mut |_| lines += 1);
    if lines == 1 {
        request.header(name, &mut |value| {
            text(value);
        });
    } else if lines > 1 {
        let mut joined = Vec::new();
        request.header(name, &mut |value| {
            if !joined.is_empty() {
                joined.push(b',');
            }
            joined.extend_from_slice(value);
        });
        text(&joined);
    }
}

/// Whether the value was enough does not matter where there is only one.
fn known(_: bool) -> Sight {
    Sight::Known
}

impl Facts for Known<'_> {
    fn look(&self, attribute: &Attribute, each: &mut dyn FnMut(Value<'_>) -> bool) -> Sight {
        let mut text = |value: &str| {
            each(Value::Text(value.as_bytes()));
        };
        match attribute {
            Attribute::SourcePrincipal => self.who.principal.as_deref().map_or((), text),
            Attribute::SourceNamespace if self.who.principal.is_some() => text(&self.who.namespace),
            Attribute::SourceServiceAccount if self.who.principal.is_some() => text(&self.who.account),
            Attribute::SourceNamespace | Attribute::SourceServiceAccount => {}
            // The first hop did not say where it is: that is not known, rather than nowhere.
            Attribute::SourceAddress | Attribute::RemoteAddress if self.client.is_unspecified() => return Sight::Unknown,
            // What a client says in `x-forwarded-for` is not believed.
            Attribute::SourceAddress | Attribute::RemoteAddress => return known(each(Value::Address(self.client))),
            Attribute::DestinationPort => return known(each(Value::Port(self.to.port()))),
            Attribute::DestinationAddress => return known(each(Value::Address(self.to.ip()))),
            Attribute::ServerName => self.who.server_name.as_deref().map_or((), text),
            _ => match self.subject {
                None => return Sight::Unknown,
                Some(subject) => Self::of_request(subject, attribute, each),
            },
        }
        Sight::Known
    }

    fn is_foreign(&self) -> bool {
        self.foreign
    }
}

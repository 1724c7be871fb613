//! The key server protocol: frames between requesters (nodes, gateways) and key servers, and their checks. A pure codec: the mTLS channel
//! that carries them is `dataplane/kit`'s, what key servers do is `dataplane/keyserver`'s.
//!
//! Frame: u32 BE length of all that follows it, u64 BE request id, u8 kind, body. In bodies, numbers are big-endian, names have a u16 and
//! bytes a u32 length before them. The requester chooses ids, unique among its requests under way on one channel; many may be, and answers
//! come in any order. Handshake mode is `Begin`, `Send` and `More` in turn, then `Done` or `Refused`; every other request has one answer.

mod above;
mod fields;
mod refusal;

use std::fmt;

use canal_model::identity::Identity;
use canal_model::ids::ServiceKey;

pub use above::{Above, Link};
use fields::{Reader, Writer};
pub use refusal::{Blame, Refusal};

/// TCP port of key servers.
pub const PORT: u16 = 15013;
/// ALPN of the channel.
pub const ALPN: &[u8] = b"canal-keys/1";
/// Bytes before a body: length, request id, kind.
pub const HEADER: usize = 13;
/// Longest body, bytes.
pub const BODY_MAX: usize = 64 << 10;
/// Longest frame, its length included, bytes.
pub const FRAME_MAX: usize = HEADER + BODY_MAX;
/// Most of a peer's bytes in one [`Request::More`]; a [`Begin`] has room for [`BEGIN_BYTES_MAX`].
pub const MORE_BYTES_MAX: usize = BODY_MAX - 4;
/// Most of a peer's bytes in one [`Begin`], whatever else it names.
pub const BEGIN_BYTES_MAX: usize = 16 << 10;
/// Most protocols offered or accepted by ALPN, each at most 255 bytes (RFC 7301 §3.1).
pub const PROTOCOLS_MAX: usize = 8;
/// Most identities that a client may expect of its server.
pub const EXPECTED_MAX: usize = 64;
/// Most certificates of a chain.
pub const CHAIN_MAX: usize = 10;
/// Longest traffic secret with its key and IV, bytes: of AES-256-GCM with SHA-384.
pub const TRAFFIC_MAX: usize = 48 + 32 + 12;
/// Longest text of a refusal, bytes; longer ones are cut.
pub const TEXT_MAX: usize = 1024;
/// The length that a frame without a body says.
const LENGTH_MIN: usize = HEADER - 4;

/// Which of the keys that a name has had, and has elsewhere: SHA-256 of the certificate's SubjectPublicKeyInfo, DER (as in RFC 7469 §2.4).
pub type SpkiHash = [u8; 32];

/// Which side of the handshake the key server takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    Client,
    Server,
}

/// Whose key: one that the key server made for an identity, or one from a tenant's own files.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum KeyName {
    /// Written as the SPIFFE ID.
    Identity(Identity),
    /// TLS termination with the tenant's own authority: the gateway identity's certificate that also holds the service's DNS names. Written
    /// `tenant/namespace/name`; for gateways that serve the tenant.
    Service(ServiceKey),
    /// Keyless: the tenant's own key for this service, from `NAMESPACE.NAME.crt` and `NAMESPACE.NAME.key`. Written
    /// `file:tenant/namespace/name`.
    File(ServiceKey),
}

/// The field in errors.
const SPKI_HASH: &str = "the key's hash";
/// Before the service of a [`KeyName::File`].
const FILE: &str = "file:";

impl fmt::Display for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyName::Identity(identity) => identity.fmt(f),
            KeyName::Service(service) => service.fmt(f),
            KeyName::File(service) => write!(f, "{FILE}{service}"),
        }
    }
}

/// Asks for a whole TLS 1.3 handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begin<'a> {
    /// Whose key and certificate.
    pub identity: Identity,
    pub role: Role,
    /// Offered (client) or accepted in this order (server); empty: no ALPN.
    pub alpn: Vec<&'a [u8]>,
    /// Client: the server must be one of these. Server: not looked at, any member of the trust domain or of a federated one may come.
    pub expected: Vec<Identity>,
    /// After so many milliseconds the answer is of no use; 0: the key server's own limit.
    pub deadline_ms: u32,
    /// The peer's first bytes; empty for a client.
    pub bytes: &'a [u8],
}

/// What a requester says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request<'a> {
    Begin(Begin<'a>),
    /// The peer's next bytes, for a handshake under way.
    More {
        bytes: &'a [u8],
    },
    /// A signature over `input`, which is hashed by the key server. `scheme` is TLS' SignatureScheme (RFC 8446 §4.2.3).
    Sign {
        key: KeyName,
        /// The key's of the certificate that the peer is shown: another's signature would be of no use. `None`: whichever the name has now.
        shown: Option<SpkiHash>,
        scheme: u16,
        /// As in [`Begin`].
        deadline_ms: u32,
        input: &'a [u8],
    },
    /// The key's certificates.
    Chain {
        key: KeyName,
    },
    /// The request with this id is of no interest any more. Not answered, and nothing else is for that id.
    Abandon,
    /// Asks whether the key server lives.
    Ping,
}

/// What a handshake came to. Sequence numbers start at 0.
#[derive(Clone, PartialEq, Eq)]
pub struct Done<'a> {
    /// To be sent to the peer before all else.
    pub bytes: &'a [u8],
    /// So many of the peer's bytes, from the first of `Begin` on, were the handshake. What was given beyond them, or is on its way still,
    /// are records under the application keys.
    pub consumed: u32,
    /// TLS' CipherSuite (RFC 8446 §B.4).
    pub suite: u16,
    /// The protocol agreed on; empty: none.
    pub alpn: &'a [u8],
    /// CLIENT_TRAFFIC_SECRET_0, and behind it the key and the IV that come of it (RFC 8446 §7.3): the requester is the one to be spared.
    pub client_traffic: &'a [u8],
    /// The same of SERVER_TRAFFIC_SECRET_0.
    pub server_traffic: &'a [u8],
    /// Who the peer proved to be.
    pub peer: Identity,
    /// The peer's certificate, DER.
    pub leaf: &'a [u8],
    /// What else the peer showed: a list that revokes one of these revokes the leaf.
    pub above: Above<'a>,
}

/// Without the secrets.
impl fmt::Debug for Done<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let alpn = String::from_utf8_lossy(self.alpn);
        write!(f, "Done {{ bytes: {}, consumed: {}, suite: {:#06x}, alpn: {alpn:?}, ", self.bytes.len(), self.consumed, self.suite)?;
        write!(f, "peer: {}, leaf: {} }}", self.peer, self.leaf.len())
    }
}

/// What a key server answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Response<'a> {
    /// To be sent to the peer; the handshake goes on with the peer's next bytes, or a refusal follows and this is the alert for the peer.
    /// Empty: what was given so far are whole records, and not all of the peer's flight. A part of a record is not answered.
    Send {
        bytes: &'a [u8],
    },
    Done(Done<'a>),
    Signature {
        bytes: &'a [u8],
    },
    /// DER, leaf first.
    Certificates {
        chain: Vec<&'a [u8]>,
    },
    Refused {
        name: Refusal,
        /// For operators.
        text: &'a str,
    },
    Pong,
}

/// A frame whose body was not looked into yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    pub id: u64,
    kind: u8,
    body: &'a [u8],
}

/// Why bytes are not of this protocol. After a [`Malformed::Long`] or [`Malformed::Short`] the next frame cannot be found: the channel must
/// be closed. Any other concerns one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("a frame says {0} bytes follow; at most {max} may", max = FRAME_MAX - 4)]
    Long(u32),
    #[error("a frame says {0} bytes follow; at least {LENGTH_MIN} must")]
    Short(u32),
    #[error("{0:#04x} is no kind of {1}")]
    Kind(u8, &'static str),
    #[error("the body ends inside {0}")]
    Truncated(&'static str),
    #[error("{0} bytes follow the last field")]
    Trailing(usize),
    #[error("{0} has {1} entries or bytes; at most {2} may be")]
    Oversized(&'static str, usize, usize),
    #[error("{0} is {1:#06x}, which means nothing")]
    Value(&'static str, u16),
    #[error("{0} is not valid UTF-8")]
    Text(&'static str),
    #[error("{0} is not a valid name")]
    Name(&'static str),
}

impl Malformed {
    /// Whether the channel cannot go on.
    pub fn ends_channel(self) -> bool {
        matches!(self, Malformed::Long(_) | Malformed::Short(_))
    }
}

/// Why something cannot be said: it is longer than what the protocol allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} has {given} entries or bytes; the key server protocol allows {max}")]
pub struct Unsendable {
    pub what: &'static str,
    pub given: usize,
    pub max: usize,
}

/// The first frame in `buffer` and its length in bytes; `None` while it is not whole. `buffer` never needs to hold more than [`FRAME_MAX`].
pub fn split(buffer: &[u8]) -> Result<Option<(Frame<'_>, usize)>, Malformed> {
    let Some((length, rest)) = buffer.split_first_chunk::<4>() else { return Ok(None) };
    let said = u32::from_be_bytes(*length);
    let length = said as usize;
    if length > FRAME_MAX - 4 {
        return Err(Malformed::Long(said));
    }
    if length < LENGTH_MIN {
        return Err(Malformed::Short(said));
    }
    let Some(rest) = rest.get(..length) else { return Ok(None) };
    match rest.split_first_chunk::<8>() {
        Some((id, [kind, body @ ..])) => Ok(Some((Frame { id: u64::from_be_bytes(*id), kind: *kind, body }, 4 + length))),
        _ => Err(Malformed::Short(said)),
    }
}

const BEGIN: u8 = 0x01;
const MORE: u8 = 0x02;
const SIGN: u8 = 0x03;
const CHAIN: u8 = 0x04;
const ABANDON: u8 = 0x05;
const PING: u8 = 0x06;
const SEND: u8 = 0x81;
const DONE: u8 = 0x82;
const SIGNATURE: u8 = 0x83;
const CERTIFICATES: u8 = 0x84;
const REFUSED: u8 = 0x85;
const PONG: u8 = 0x86;

impl<'a> Frame<'a> {
    /// Reads it as a requester's.
    pub fn request(self) -> Result<Request<'a>, Malformed> {
        let mut r = Reader(self.body);
        let request = match self.kind {
            BEGIN => Request::Begin(read_begin(&mut r)?),
            MORE => Request::More { bytes: r.rest() },
            SIGN => Request::Sign {
                key: r.key()?,
                shown: r.spki_hash()?,
                scheme: r.u16("scheme")?,
                deadline_ms: r.u32("deadline")?,
                input: r.rest(),
            },
            CHAIN => Request::Chain { key: r.key()? },
            ABANDON => Request::Abandon,
            PING => Request::Ping,
            kind => return Err(Malformed::Kind(kind, "request")),
        };
        r.end()?;
        Ok(request)
    }

    /// Reads it as a key server's.
    pub fn response(self) -> Result<Response<'a>, Malformed> {
        let mut r = Reader(self.body);
        let response = match self.kind {
            SEND => Response::Send { bytes: r.rest() },
            DONE => Response::Done(Done {
                bytes: r.long("bytes")?,
                consumed: r.u32("consumed")?,
                suite: r.u16("suite")?,
                alpn: r.short("ALPN", 255)?,
                client_traffic: r.short("client traffic", TRAFFIC_MAX)?,
                server_traffic: r.short("server traffic", TRAFFIC_MAX)?,
                peer: r.identity("peer")?,
                leaf: r.long("leaf")?,
                above: Above::read(r.rest())?,
            }),
            SIGNATURE => Response::Signature { bytes: r.rest() },
            CERTIFICATES => Response::Certificates { chain: r.list("chain", CHAIN_MAX, |r| r.long("certificate"))? },
            REFUSED => {
                let code = r.u16("refusal")?;
                let name = Refusal::of(code).ok_or(Malformed::Value("refusal", code))?;
                Response::Refused { name, text: r.text("text", TEXT_MAX)? }
            }
            PONG => Response::Pong,
            kind => return Err(Malformed::Kind(kind, "response")),
        };
        r.end()?;
        Ok(response)
    }
}

fn read_begin<'a>(r: &mut Reader<'a>) -> Result<Begin<'a>, Malformed> {
    let identity = r.identity("identity")?;
    let role = match r.u8("role")? {
        0 => Role::Client,
        1 => Role::Server,
        n => return Err(Malformed::Value("role", n.into())),
    };
    Ok(Begin {
        identity,
        role,
        alpn: r.list("ALPN", PROTOCOLS_MAX, |r| r.short("ALPN", 255))?,
        expected: r.list("expected identities", EXPECTED_MAX, |r| r.identity("expected identity"))?,
        deadline_ms: r.u32("deadline")?,
        bytes: r.rest(),
    })
}

impl Request<'_> {
    /// Appends the frame to `out`; on an error `out` is as before.
    pub fn encode(&self, id: u64, out: &mut Vec<u8>) -> Result<(), Unsendable> {
        let kind = match self {
            Request::Begin(_) => BEGIN,
            Request::More { .. } => MORE,
            Request::Sign { .. } => SIGN,
            Request::Chain { .. } => CHAIN,
            Request::Abandon => ABANDON,
            Request::Ping => PING,
        };
        Writer::frame(out, id, kind, |w| match self {
            Request::Begin(b) => {
                w.name("identity", &b.identity)?;
                w.0.push(matches!(b.role, Role::Server).into());
                w.list("ALPN", PROTOCOLS_MAX, &b.alpn, |w, p| w.short("ALPN", p, 255))?;
                w.list("expected identities", EXPECTED_MAX, &b.expected, |w, e| w.name("expected identity", e))?;
                w.0.extend_from_slice(&b.deadline_ms.to_be_bytes());
                w.rest(b.bytes)
            }
            Request::More { bytes } => w.rest(bytes),
            Request::Sign { key, shown, scheme, deadline_ms, input } => {
                w.name("key", key)?;
                w.short(SPKI_HASH, shown.as_ref().map_or(&[], |hash| hash), size_of::<SpkiHash>())?;
                w.0.extend_from_slice(&scheme.to_be_bytes());
                w.0.extend_from_slice(&deadline_ms.to_be_bytes());
                w.rest(input)
            }
            Request::Chain { key } => w.name("key", key),
            Request::Abandon | Request::Ping => Ok(()),
        })
    }
}

impl Response<'_> {
    /// Appends the frame to `out`; on an error `out` is as before.
    pub fn encode(&self, id: u64, out: &mut Vec<u8>) -> Result<(), Unsendable> {
        let kind = match self {
            Response::Send { .. } => SEND,
            Response::Done(_) => DONE,
            Response::Signature { .. } => SIGNATURE,
            Response::Certificates { .. } => CERTIFICATES,
            Response::Refused { .. } => REFUSED,
            Response::Pong => PONG,
        };
        Writer::frame(out, id, kind, |w| match self {
            Response::Send { bytes } | Response::Signature { bytes } => w.rest(bytes),
            Response::Done(d) => {
                w.long("bytes", d.bytes)?;
                w.0.extend_from_slice(&d.consumed.to_be_bytes());
                w.0.extend_from_slice(&d.suite.to_be_bytes());
                w.short("ALPN", d.alpn, 255)?;
                w.short("client traffic", d.client_traffic, TRAFFIC_MAX)?;
                w.short("server traffic", d.server_traffic, TRAFFIC_MAX)?;
                w.name("peer", &d.peer)?;
                w.long("leaf", d.leaf)?;
                w.rest(d.above.bytes())
            }
            Response::Certificates { chain } => w.list("chain", CHAIN_MAX, chain, |w, c| w.long("certificate", c)),
            Response::Refused { name, text } => {
                w.0.extend_from_slice(&name.code().to_be_bytes());
                w.short("text", &text.as_bytes()[..text.floor_char_boundary(TEXT_MAX)], TEXT_MAX)
            }
            Response::Pong => Ok(()),
        })
    }
}

#[cfg(test)]
mod tests;

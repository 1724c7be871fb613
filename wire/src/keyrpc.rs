//! The key server protocol: frames between requesters (nodes, gateways) and key servers, and their
//! validation. This is a pure codec. `dataplane/keyserver-client` has the mTLS channel that carries
//! the frames. `dataplane/keyserver-engine` serves the requests. Start at [`KeyRequest`] and
//! [`KeyResponse`].
//!
//! A frame is a big-endian u32 with the length of the rest, a big-endian u64 request id, a u8 kind,
//! and a body. In bodies, numbers are big-endian, names are preceded by a u16 length, and bytes by
//! a u32 length.
//!
//! The requester chooses ids that are unique among its requests in progress on one channel. Many
//! requests may be in progress, and responses arrive in any order. A handshake is
//! [`KeyRequest::Begin`], then [`KeyResponse::Send`] and [`KeyRequest::More`] in turn, then
//! [`KeyResponse::Done`] or [`KeyResponse::Refused`]. Every other request has at most one response.

mod fields;
mod issuer_chain;
mod refusal;

use std::fmt;
use std::time::Duration;

use canal_model::identity::Identity;
use canal_model::ids::ServiceKey;

use fields::{FieldReader, FieldWriter};
pub use issuer_chain::{IssuerChain, IssuerSerial};
pub use refusal::{KeyRefusal, RefusalAttribution};

/// TCP port of key servers.
/// The next after the controller's (`CONTROLLER_PORT`); Istio uses no such port.
pub const PORT: u16 = 15013;
/// ALPN protocol of the channel between requesters and key servers.
pub const ALPN: &[u8] = b"canal-keys/1";
/// Size of the frame header before a body, in bytes: length, request id, kind.
pub const HEADER: usize = 13;
/// Maximum size of a body, in bytes.
/// A peer's flight has at most 64 KiB too before the server refuses it. Larger frames would delay
/// other requests of the channel.
pub const BODY_MAX: usize = 64 << 10;
/// Maximum size of a frame including its length field, in bytes.
pub const FRAME_MAX: usize = HEADER + BODY_MAX;
/// Maximum number of peer bytes in one [`KeyRequest::More`]; a [`HandshakeRequest`] has room for
/// [`BEGIN_BYTES_MAX`].
pub const MORE_BYTES_MAX: usize = BODY_MAX - 4;
/// Maximum number of peer bytes in one [`HandshakeRequest`], regardless of its other fields.
/// A ClientHello in one TLS record has no more (2^14, RFC 8446 §5.1).
pub const BEGIN_BYTES_MAX: usize = 16 << 10;
/// Maximum number of protocols offered or accepted by ALPN, each at most 255 bytes long (RFC 7301
/// §3.1).
/// Canal itself offers one or two.
pub const PROTOCOLS_MAX: usize = 8;
/// Maximum number of identities that a client may expect of its server.
/// Canal's nodes expect one, a pod's or a gateway's. Nobody measured this value; a frame with more is
/// refused.
pub const EXPECTED_MAX: usize = 64;
/// Maximum number of certificates in a chain.
/// A peer accepts eight (`CHAIN_CERTIFICATES_MAX`), so no chain in use is longer.
pub const CHAIN_MAX: usize = 10;
/// Maximum size of a traffic secret with its key and IV, in bytes: that of AES-256-GCM with
/// SHA-384.
pub const TRAFFIC_MAX: usize = 48 + 32 + 12;
/// Maximum size of a refusal's text, in bytes; a longer text is truncated.
/// It bounds a line of the log. Nobody measured this value.
pub const TEXT_MAX: usize = 1024;
/// Time after which the certificates of a remote key are requested again. They are presented until
/// then, so a key server must retain a key that long after it has made or read the next one.
/// Nobody measured a shorter time, which would cost more requests.
pub const CHAIN_LIFE: Duration = Duration::from_secs(60);
/// Smallest valid value of the length field: that of a frame without a body.
const LENGTH_MIN: usize = HEADER - 4;

/// Identifies one of the keys that a name has or had: SHA-256 of the certificate's
/// SubjectPublicKeyInfo in DER (as in RFC 7469 §2.4).
pub type SpkiHash = [u8; 32];

/// The side of the handshake that the key server takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HandshakeRole {
    Client,
    Server,
}

/// Name of a key: one that the key server generated for an identity, or one from a tenant's own
/// files.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum KeyName {
    /// The key of an identity. Written as the SPIFFE ID.
    Identity(Identity),
    /// The key for TLS termination with the tenant's own CA. Its certificate is the gateway
    /// identity's, with the service's DNS names. Gateways that serve the tenant may use it. Written
    /// `tenant/namespace/name`.
    Service(ServiceKey),
    /// The tenant's own key for this service (keyless), from `NAMESPACE.NAME.crt` and
    /// `NAMESPACE.NAME.key`. Written `file:tenant/namespace/name`.
    File(ServiceKey),
}

/// Name of the hash field in errors.
const SPKI_HASH: &str = "the key's hash";
/// Prefix of the service in the text form of [`KeyName::File`].
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

/// A request for a complete TLS 1.3 handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandshakeRequest<'a> {
    /// Identity whose key and certificate the key server uses.
    pub identity: Identity,
    pub role: HandshakeRole,
    /// Protocols that are offered (client) or accepted in this order (server); an empty list means
    /// no ALPN.
    pub alpn: Vec<&'a [u8]>,
    /// Client: the server must have one of these identities. Server: ignored; any member of the
    /// trust domain or of a federated one is accepted.
    pub expected: Vec<Identity>,
    /// Milliseconds after which the response is useless; 0 means the key server's own limit.
    pub deadline_ms: u32,
    /// First bytes from the peer; empty for a client.
    pub bytes: &'a [u8],
}

/// A message from a requester to a key server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyRequest<'a> {
    Begin(HandshakeRequest<'a>),
    /// Carries the peer's next bytes for a handshake in progress.
    More {
        bytes: &'a [u8],
    },
    /// Requests a signature over `input`, which the key server hashes. `scheme` is TLS'
    /// SignatureScheme (RFC 8446 §4.2.3).
    Sign {
        key: KeyName,
        /// Hash of the key in the certificate that the peer receives; a signature by another key
        /// would be useless. `None` means the present key.
        presented: Option<SpkiHash>,
        scheme: u16,
        /// Milliseconds after which the response is useless, as in [`HandshakeRequest`].
        deadline_ms: u32,
        input: &'a [u8],
    },
    /// Requests the certificates of a key.
    Chain {
        key: KeyName,
    },
    /// Cancels the request with this id. Neither this message nor the canceled request gets a
    /// response.
    Abandon,
    /// Checks whether the key server is alive.
    Ping,
}

/// The result of a handshake. TLS record sequence numbers start at 0.
#[derive(Clone, PartialEq, Eq)]
pub struct HandshakeResult<'a> {
    /// Bytes to send to the peer before anything else.
    pub bytes: &'a [u8],
    /// Number of the peer's bytes, counted from the first of the [`HandshakeRequest`], that
    /// belonged to the handshake. All bytes after them are records under the application keys.
    pub consumed: u32,
    /// Cipher suite of the connection: TLS' CipherSuite (RFC 8446 §B.4).
    pub suite: u16,
    /// Negotiated protocol; empty means none.
    pub alpn: &'a [u8],
    /// CLIENT_TRAFFIC_SECRET_0, followed by the key and the IV derived from it (RFC 8446 §7.3). The
    /// key server derives them to relieve the requester.
    pub client_traffic: &'a [u8],
    /// SERVER_TRAFFIC_SECRET_0, followed by the key and the IV derived from it.
    pub server_traffic: &'a [u8],
    /// Identity of the verified peer.
    pub peer: Identity,
    /// Certificate of the peer in DER.
    pub leaf: &'a [u8],
    /// Other certificates of the peer: a list that revokes one of them revokes the leaf.
    pub above: IssuerChain<'a>,
}

/// Prints everything except the secrets.
impl fmt::Debug for HandshakeResult<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let alpn = String::from_utf8_lossy(self.alpn);
        write!(
            f,
            "Done {{ bytes: {}, consumed: {}, suite: {:#06x}, alpn: {alpn:?}, ",
            self.bytes.len(),
            self.consumed,
            self.suite
        )?;
        write!(f, "peer: {}, leaf: {} }}", self.peer, self.leaf.len())
    }
}

/// A message from a key server to a requester.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyResponse<'a> {
    /// Bytes to send to the peer. The handshake continues with the peer's next bytes, or a refusal
    /// follows and the bytes are an alert.
    ///
    /// Empty bytes mean that the bytes received so far are complete records, but not the peer's
    /// complete flight. A partial record gets no response.
    Send {
        bytes: &'a [u8],
    },
    Done(HandshakeResult<'a>),
    Signature {
        bytes: &'a [u8],
    },
    /// The key's certificates in DER, leaf first.
    Certificates {
        chain: Vec<&'a [u8]>,
    },
    Refused {
        name: KeyRefusal,
        /// Explanation of the refusal for operators.
        text: &'a str,
    },
    Pong,
}

/// A frame whose body has not been decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    pub id: u64,
    kind: u8,
    body: &'a [u8],
}

/// The reason why bytes are not valid in this protocol.
///
/// After [`FrameError::Long`] or [`FrameError::Short`] the start of the next frame is unknown, so
/// the channel must be closed. Any other error affects only one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame announces {0} bytes; at most {max} are allowed; {FRAME_FIX}", max = FRAME_MAX - 4)]
    Long(u32),
    #[error("a frame announces {0} bytes; at least {LENGTH_MIN} are required; {FRAME_FIX}")]
    Short(u32),
    #[error("{0:#04x} is not a known kind of {1}; {FRAME_FIX}")]
    Kind(u8, &'static str),
    #[error("the body ends inside {0}; {FRAME_FIX}")]
    Truncated(&'static str),
    #[error("{0} bytes follow the last field; {FRAME_FIX}")]
    Trailing(usize),
    #[error("{0} has {1} entries or bytes; at most {2} are allowed; {FRAME_FIX}")]
    Oversized(&'static str, usize, usize),
    #[error("{0} is {1:#06x}, which is not a known value; {FRAME_FIX}")]
    Value(&'static str, u16),
    #[error("{0} is not valid UTF-8; {FRAME_FIX}")]
    Text(&'static str),
    #[error("{0} is not a valid name; {FRAME_FIX}")]
    Name(&'static str),
}

/// Fix of every [`FrameError`]: builds of one release send each other only valid frames.
const FRAME_FIX: &str = "fix: run key servers, nodes and gateways of one release";

impl FrameError {
    /// Returns whether the channel has to be closed.
    pub fn ends_channel(self) -> bool {
        matches!(self, FrameError::Long(_) | FrameError::Short(_))
    }
}

/// The reason why a message cannot be encoded: a field is larger than the protocol allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} has {count} entries or bytes; the key server protocol allows {max}; fix: shorten it, for example leave the root out of a chain"
)]
pub struct EncodeError {
    pub what: &'static str,
    pub count: usize,
    pub max: usize,
}

/// Splits the first frame from `buffer` and returns it with its length in bytes; `None` if the
/// frame is incomplete. `buffer` never needs to hold more than [`FRAME_MAX`].
///
/// # Errors
/// Fails with [`FrameError::Long`] or [`FrameError::Short`] if the length field is out of range.
pub fn split(buffer: &[u8]) -> Result<Option<(Frame<'_>, usize)>, FrameError> {
    let Some((length, rest)) = buffer.split_first_chunk::<4>() else {
        return Ok(None);
    };
    let announced = u32::from_be_bytes(*length);
    let length = announced as usize;
    // The length is checked before the body arrives, so that a peer cannot make the receiver buffer
    // more than one frame.
    if length > FRAME_MAX - 4 {
        return Err(FrameError::Long(announced));
    }
    if length < LENGTH_MIN {
        return Err(FrameError::Short(announced));
    }
    let Some(rest) = rest.get(..length) else {
        return Ok(None);
    };
    match rest.split_first_chunk::<8>() {
        Some((id, [kind, body @ ..])) => Ok(Some((
            Frame {
                id: u64::from_be_bytes(*id),
                kind: *kind,
                body,
            },
            4 + length,
        ))),
        _ => Err(FrameError::Short(announced)),
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
    /// Decodes the frame as a request.
    ///
    /// # Errors
    /// Fails with a [`FrameError`] if the kind is not a request's or the body is malformed.
    pub fn request(self) -> Result<KeyRequest<'a>, FrameError> {
        let mut r = FieldReader(self.body);
        let request = match self.kind {
            BEGIN => KeyRequest::Begin(read_begin(&mut r)?),
            MORE => KeyRequest::More { bytes: r.rest() },
            SIGN => KeyRequest::Sign {
                key: r.key()?,
                presented: r.spki_hash()?,
                scheme: r.u16("scheme")?,
                deadline_ms: r.u32("deadline")?,
                input: r.rest(),
            },
            CHAIN => KeyRequest::Chain { key: r.key()? },
            ABANDON => KeyRequest::Abandon,
            PING => KeyRequest::Ping,
            kind => return Err(FrameError::Kind(kind, "request")),
        };
        r.end()?;
        Ok(request)
    }

    /// Decodes the frame as a response.
    ///
    /// # Errors
    /// Fails with a [`FrameError`] if the kind is not a response's or the body is malformed.
    pub fn response(self) -> Result<KeyResponse<'a>, FrameError> {
        let mut r = FieldReader(self.body);
        let response = match self.kind {
            SEND => KeyResponse::Send { bytes: r.rest() },
            DONE => KeyResponse::Done(HandshakeResult {
                bytes: r.long("bytes")?,
                consumed: r.u32("consumed")?,
                suite: r.u16("suite")?,
                alpn: r.short("ALPN", 255)?,
                client_traffic: r.short("client traffic", TRAFFIC_MAX)?,
                server_traffic: r.short("server traffic", TRAFFIC_MAX)?,
                peer: r.identity("peer")?,
                leaf: r.long("leaf")?,
                above: IssuerChain::read(r.rest())?,
            }),
            SIGNATURE => KeyResponse::Signature { bytes: r.rest() },
            CERTIFICATES => KeyResponse::Certificates {
                chain: r.list("chain", CHAIN_MAX, |r| r.long("certificate"))?,
            },
            REFUSED => {
                let code = r.u16("refusal")?;
                let name = KeyRefusal::of(code).ok_or(FrameError::Value("refusal", code))?;
                KeyResponse::Refused {
                    name,
                    text: r.text("text", TEXT_MAX)?,
                }
            }
            PONG => KeyResponse::Pong,
            kind => return Err(FrameError::Kind(kind, "response")),
        };
        r.end()?;
        Ok(response)
    }
}

fn read_begin<'a>(r: &mut FieldReader<'a>) -> Result<HandshakeRequest<'a>, FrameError> {
    let identity = r.identity("identity")?;
    let role = match r.u8("role")? {
        0 => HandshakeRole::Client,
        1 => HandshakeRole::Server,
        n => return Err(FrameError::Value("role", n.into())),
    };
    Ok(HandshakeRequest {
        identity,
        role,
        alpn: r.list("ALPN", PROTOCOLS_MAX, |r| r.short("ALPN", 255))?,
        expected: r.list("expected identities", EXPECTED_MAX, |r| {
            r.identity("expected identity")
        })?,
        deadline_ms: r.u32("deadline")?,
        bytes: r.rest(),
    })
}

impl KeyRequest<'_> {
    /// Appends the frame to `out`; after an error `out` is unchanged.
    ///
    /// # Errors
    /// Fails if a field or the whole body is larger than the protocol allows.
    pub fn encode(&self, id: u64, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let kind = match self {
            KeyRequest::Begin(_) => BEGIN,
            KeyRequest::More { .. } => MORE,
            KeyRequest::Sign { .. } => SIGN,
            KeyRequest::Chain { .. } => CHAIN,
            KeyRequest::Abandon => ABANDON,
            KeyRequest::Ping => PING,
        };
        FieldWriter::frame(out, id, kind, |w| match self {
            KeyRequest::Begin(b) => {
                w.name("identity", &b.identity)?;
                w.0.push(matches!(b.role, HandshakeRole::Server).into());
                w.list("ALPN", PROTOCOLS_MAX, &b.alpn, |w, p| {
                    // A protocol's name has a length of one byte (RFC 7301 §3.1).
                    w.short("ALPN", p, 255)
                })?;
                w.list("expected identities", EXPECTED_MAX, &b.expected, |w, e| {
                    w.name("expected identity", e)
                })?;
                w.0.extend_from_slice(&b.deadline_ms.to_be_bytes());
                w.rest(b.bytes)
            }
            KeyRequest::More { bytes } => w.rest(bytes),
            KeyRequest::Sign {
                key,
                presented,
                scheme,
                deadline_ms,
                input,
            } => {
                w.name("key", key)?;
                w.short(
                    SPKI_HASH,
                    // An empty hash stands for the present key.
                    presented.as_ref().map_or(&[], |hash| hash),
                    size_of::<SpkiHash>(),
                )?;
                w.0.extend_from_slice(&scheme.to_be_bytes());
                w.0.extend_from_slice(&deadline_ms.to_be_bytes());
                w.rest(input)
            }
            KeyRequest::Chain { key } => w.name("key", key),
            KeyRequest::Abandon | KeyRequest::Ping => Ok(()),
        })
    }
}

impl KeyResponse<'_> {
    /// Appends the frame to `out`; after an error `out` is unchanged.
    ///
    /// # Errors
    /// Fails if a field or the whole body is larger than the protocol allows.
    pub fn encode(&self, id: u64, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let kind = match self {
            KeyResponse::Send { .. } => SEND,
            KeyResponse::Done(_) => DONE,
            KeyResponse::Signature { .. } => SIGNATURE,
            KeyResponse::Certificates { .. } => CERTIFICATES,
            KeyResponse::Refused { .. } => REFUSED,
            KeyResponse::Pong => PONG,
        };
        FieldWriter::frame(out, id, kind, |w| match self {
            KeyResponse::Send { bytes } | KeyResponse::Signature { bytes } => w.rest(bytes),
            KeyResponse::Done(d) => {
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
            KeyResponse::Certificates { chain } => {
                w.list("chain", CHAIN_MAX, chain, |w, c| w.long("certificate", c))
            }
            KeyResponse::Refused { name, text } => {
                // A refusal must always arrive, so its text is truncated instead of failing.
                w.0.extend_from_slice(&name.code().to_be_bytes());
                w.short(
                    "text",
                    &text.as_bytes()[..text.floor_char_boundary(TEXT_MAX)],
                    TEXT_MAX,
                )
            }
            KeyResponse::Pong => Ok(()),
        })
    }
}

#[cfg(test)]
mod tests;

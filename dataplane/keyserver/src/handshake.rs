//! One TLS 1.3 handshake over relayed bytes: record by record, and not one byte beyond its end. It yields the traffic secrets and who the peer is.
//! It has no IO, no clock but the verifier's, and knows no requester.

use std::fmt;
use std::sync::Arc;

use canal_kit::tls::{self, PeerLeaf};
use canal_model::identity::Identity;
use canal_wire::keyrpc::{KeyName, Refusal, Role};
use rustls::{ClientConnection, Connection, Error, ServerConnection};
use rustls_pki_types::{CertificateDer, ServerName};

use crate::certified::Certified;
use crate::limits::HANDSHAKE_BYTES_MAX;
use crate::secrets::{self, Secret};

/// A record's header (RFC 8446 §5.1).
const RECORD_HEADER: usize = 5;
/// Longest record of a peer that keeps to the protocol.
const RECORD_MAX: usize = RECORD_HEADER + (16 << 10) + 256;

/// What a handshake is to be.
#[derive(Debug, Clone)]
pub struct Terms {
    pub certified: Arc<Certified>,
    pub role: Role,
    /// Offered or accepted, in this order.
    pub alpn: Vec<Vec<u8>>,
    /// Client: whom to take.
    pub expected: Arc<[Identity]>,
}

/// What the peer's last bytes led to.
#[derive(Debug)]
pub enum Step {
    /// It goes on when the peer has answered. `send` may be empty: more of a message is to come.
    Wait {
        send: Vec<u8>,
    },
    Done(Box<Finished>),
    /// `alert` is for the peer, and may be empty.
    Failed {
        alert: Vec<u8>,
        refusal: Refusal,
        text: String,
    },
}

/// What a handshake came to; see [`canal_wire::keyrpc::Done`].
pub struct Finished {
    pub send: Vec<u8>,
    /// Bytes of the peer's that were the handshake.
    pub consumed: usize,
    pub suite: u16,
    pub alpn: Vec<u8>,
    /// As [`tls::traffic`] makes it.
    pub client_traffic: Secret,
    pub server_traffic: Secret,
    pub peer: Identity,
    pub leaf: CertificateDer<'static>,
    /// What is known of the leaf, and of what was above it.
    pub shown: Arc<PeerLeaf>,
}

/// Without the secrets.
impl fmt::Debug for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Finished({}, {:#06x}, {} consumed)", self.peer, self.suite, self.consumed)
    }
}

/// A handshake under way.
pub struct Handshake {
    terms: Terms,
    connection: Connection,
    /// Of the peer, not yet consumed: a part of a record.
    input: Vec<u8>,
    received: usize,
    secrets: (Option<Secret>, Option<Secret>),
}

impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handshake({}, {:?})", self.terms.certified.name, self.terms.role)
    }
}

impl Handshake {
    /// Begins it; nothing is said before [`Handshake::step`].
    pub fn begin(terms: Terms) -> Result<Self, Error> {
        let connection = match terms.role {
            Role::Server => ServerConnection::new(terms.certified.server_config(&terms.alpn)?)?.into(),
            Role::Client => {
                // Never sent (SNI is off) nor compared (DNS is ignored), as in the kit.
                let no_name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
                ClientConnection::new(terms.certified.client_config(&terms.alpn, &terms.expected)?, no_name)?.into()
            }
        };
        Ok(Self { terms, connection, input: Vec::new(), received: 0, secrets: (None, None) })
    }

    /// What it is to be.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Whether what it was given are whole records, so that whoever gave them may wait to hear that they are not enough.
    pub fn wants_more(&self) -> bool {
        self.received > 0 && self.input.is_empty()
    }

    /// Takes the peer's next bytes. After anything but [`Step::Wait`] it is over.
    pub fn step(&mut self, bytes: &[u8]) -> Step {
        self.received += bytes.len();
        self.input.extend_from_slice(bytes);
        let consumed = self.consume();
        let mut send = Vec::new();
        while self.connection.wants_write() {
            // Writing to memory does not fail.
            if self.connection.write_tls(&mut send).is_err() {
                break;
            }
        }
        match consumed {
            Err(error) => failed(&error, send),
            Ok(used) if self.connection.is_handshaking() => {
                self.input.drain(..used);
                if self.received > HANDSHAKE_BYTES_MAX {
                    let text = format!("the peer sent {} bytes, and the handshake has not ended", self.received);
                    return Step::Failed { alert: Vec::new(), refusal: Refusal::HandshakeBytes, text };
                }
                Step::Wait { send }
            }
            Ok(used) => self.finish(send, used),
        }
    }

    /// Gives whole records to TLS until the handshake ends; returns how many bytes it took.
    fn consume(&mut self) -> Result<usize, Error> {
        let mut at = 0;
        while self.connection.is_handshaking() {
            let Some(length) = record(&self.input[at..]) else { break };
            let mut rest = &self.input[at..at + length];
            at += length;
            while !rest.is_empty() {
                let before = rest.len();
                let taken = self.connection.read_tls(&mut rest);
                secrets::forget();
                let processed = self.connection.process_new_packets();
                let (client, server) = secrets::take();
                self.secrets.0 = client.or(self.secrets.0.take());
                self.secrets.1 = server.or(self.secrets.1.take());
                processed?;
                if taken.is_err() || rest.len() == before {
                    return Err(Error::PeerSentOversizedRecord);
                }
            }
        }
        Ok(at)
    }

    fn finish(&mut self, send: Vec<u8>, used: usize) -> Step {
        let terms = &self.terms;
        let (role, expected) = match terms.role {
            Role::Server => (tls::Role::Client, None),
            Role::Client => (tls::Role::Server, Some(&terms.expected)),
        };
        let chain = self.connection.peer_certificates();
        let (peer, shown) = match terms.certified.judge().map(|j| j.peer(role, expected, chain)) {
            Some(Ok(known)) => known,
            Some(Err(error)) => return failed(&error, Vec::new()),
            None => return failed(&Error::NoCertificatesPresented, Vec::new()),
        };
        let suite = self.connection.negotiated_cipher_suite().map(|s| u16::from(s.suite()));
        let secrets = (self.secrets.0.take(), self.secrets.1.take());
        let traffic = |secret: Option<Secret>| tls::traffic(suite?, &secret?);
        let traffics = (traffic(secrets.0), traffic(secrets.1));
        let (Some(suite), (Some(client_traffic), Some(server_traffic)), Some(leaf)) = (suite, traffics, chain.and_then(<[_]>::first))
        else {
            return failed(&Error::HandshakeNotComplete, Vec::new());
        };
        Step::Done(Box::new(Finished {
            send,
            consumed: self.received - (self.input.len() - used),
            suite,
            alpn: self.connection.alpn_protocol().unwrap_or_default().to_vec(),
            client_traffic,
            server_traffic,
            peer,
            leaf: leaf.clone().into_owned(),
            shown,
        }))
    }
}

/// The length of the first record, or of all that there is if it cannot be one: then TLS says what is wrong. `None`: it is not whole.
fn record(bytes: &[u8]) -> Option<usize> {
    let [kind, major, _, high, low, ..] = bytes else { return None };
    let length = RECORD_HEADER + usize::from(u16::from_be_bytes([*high, *low]));
    if !(20..=24).contains(kind) || *major != 3 || length > RECORD_MAX {
        return Some(bytes.len());
    }
    (bytes.len() >= length).then_some(length)
}

fn failed(error: &Error, alert: Vec<u8>) -> Step {
    Step::Failed { alert, refusal: refusal(error), text: text(error) }
}

/// What was expected and seen, where the verifier says so.
fn text(error: &Error) -> String {
    tls::TlsError::from(error.clone()).to_string()
}

/// The protocol's word for what TLS found.
pub fn refusal(error: &Error) -> Refusal {
    use tls::Refusal as Kit;
    match tls::of_rustls(error) {
        Kit::NoCertificate => Refusal::PeerAnonymous,
        Kit::Expired => Refusal::PeerExpired,
        Kit::NotYetValid => Refusal::PeerNotYetValid,
        Kit::Revoked => Refusal::PeerRevoked,
        Kit::UnknownIssuer => Refusal::PeerUnknownIssuer,
        Kit::WrongTrustDomain => Refusal::PeerTrustDomain,
        Kit::WrongIdentity => Refusal::PeerIdentity,
        Kit::Ambiguous => Refusal::PeerAmbiguous,
        Kit::WrongUsage => Refusal::PeerPurpose,
        Kit::ChainTooLong | Kit::ChainTooLarge => Refusal::PeerChain,
        Kit::BadEncoding | Kit::BadSignature | Kit::BadAlgorithm | Kit::BadRevocationList | Kit::BadChain => Refusal::PeerCertificate,
        Kit::Alert => Refusal::PeerAlert,
        Kit::HandshakeBytes => Refusal::HandshakeBytes,
        _ if matches!(error, Error::General(_) | Error::FailedToGetRandomBytes | Error::FailedToGetCurrentTime) => Refusal::Failed,
        _ => Refusal::PeerProtocol,
    }
}

/// Whether `input` is what a TLS handshake with the key of `name` signs, and so nothing else: a CertificateVerify of TLS 1.3 (RFC 8446 §4.4.3),
/// or, for a tenant's own key, which also serves clients of TLS 1.2, the parameters of an ECDHE key exchange (RFC 8422 §5.4). Keys of services
/// only serve: what they sign can never make anybody a client.
pub fn signable(input: &[u8], name: &KeyName) -> bool {
    const SERVER: &[u8] = b"TLS 1.3, server CertificateVerify\0";
    const CLIENT: &[u8] = b"TLS 1.3, client CertificateVerify\0";
    let (contexts, tls12): (&[&[u8]], bool) = match name {
        KeyName::Identity(_) => (&[SERVER, CLIENT], false),
        KeyName::Service(_) => (&[SERVER], false),
        KeyName::File(_) => (&[SERVER], true),
    };
    let tls13 = input.strip_prefix(&[0x20; 64]).is_some_and(|rest| {
        let hash = contexts.iter().find_map(|c| rest.strip_prefix(*c));
        hash.is_some_and(|h| matches!(h.len(), 32 | 48))
    });
    // Two randoms, named_curve, the curve, and a point with its length.
    let ecdhe =
        || matches!(input.get(64..), Some([3, _, _, length, point @ ..]) if point.len() == usize::from(*length) && !point.is_empty());
    tls13 || tls12 && ecdhe()
}

#[cfg(test)]
mod tests;

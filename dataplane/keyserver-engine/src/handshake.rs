//! [`RelayedHandshake`]: one TLS 1.3 handshake over relayed bytes, record by record, and not one byte beyond its end.
//!
//! It yields the traffic secrets and the peer's identity. It has no IO and no clock but the
//! verifier's, and does not know the requester.

use std::fmt;
use std::sync::Arc;

use canal_model::identity::Identity;
use canal_tls::PeerLeaf;
use canal_wire::keyrpc::{HandshakeRole, KeyName, KeyRefusal};
use rustls::{ClientConnection, Connection, Error, ServerConnection};
use rustls_pki_types::{CertificateDer, ServerName};

use crate::certified_key::CertifiedPrivateKey;
use crate::limits::HANDSHAKE_BYTES_MAX;
use crate::secret_capture::{self, WipedSecret};

/// Length of a record's header in bytes (RFC 8446 §5.1).
const RECORD_HEADER: usize = 5;
/// Longest record of a peer that follows the protocol, in bytes. RFC 8446 §5.2 permits 256 bytes
/// beside the content.
const RECORD_MAX: usize = RECORD_HEADER + (16 << 10) + 256;

/// Parameters of one handshake for a requester.
#[derive(Debug, Clone)]
pub struct HandshakeParams {
    pub certified: Arc<CertifiedPrivateKey>,
    pub role: HandshakeRole,
    /// Protocols that are offered or accepted, in this order.
    pub alpn: Vec<Vec<u8>>,
    /// Identities of servers that a client accepts.
    pub expected: Arc<[Identity]>,
}

/// Result of processing the peer's bytes.
#[derive(Debug)]
pub enum HandshakeStep {
    /// The handshake continues with the peer's next bytes. `send` may be empty, if more of a
    /// message must come.
    Wait {
        send: Vec<u8>,
    },
    Done(Box<HandshakeOutcome>),
    /// The handshake failed. `alert` is for the peer, and may be empty.
    Failed {
        alert: Vec<u8>,
        refusal: KeyRefusal,
        text: String,
    },
}

/// Result of a handshake that ended well; see [`canal_wire::keyrpc::HandshakeResult`].
pub struct HandshakeOutcome {
    pub send: Vec<u8>,
    /// Number of the peer's bytes that belong to the handshake.
    pub consumed: usize,
    pub suite: u16,
    pub alpn: Vec<u8>,
    /// Traffic secret of the client, in the form of [`canal_tls::traffic`].
    pub client_traffic: WipedSecret,
    pub server_traffic: WipedSecret,
    pub peer: Identity,
    pub leaf: CertificateDer<'static>,
    /// Facts about the leaf, and about the certificates above it.
    pub peer_leaf: Arc<PeerLeaf>,
}

/// Prints the outcome without its secrets.
impl fmt::Debug for HandshakeOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Finished({}, {:#06x}, {} consumed)",
            self.peer, self.suite, self.consumed
        )
    }
}

/// A handshake in progress, with its peer's bytes.
pub struct RelayedHandshake {
    terms: HandshakeParams,
    connection: Connection,
    /// Bytes of the peer that are not consumed yet: a part of a record.
    input: Vec<u8>,
    received: usize,
    secrets: (Option<WipedSecret>, Option<WipedSecret>),
}

impl fmt::Debug for RelayedHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Handshake({}, {:?})",
            self.terms.certified.name, self.terms.role
        )
    }
}

impl RelayedHandshake {
    /// Creates the handshake. It sends nothing before [`RelayedHandshake::step`].
    ///
    /// # Errors
    /// The key performs no handshakes, or rustls refuses the parameters.
    pub fn begin(terms: HandshakeParams) -> Result<Self, Error> {
        let connection = match terms.role {
            HandshakeRole::Server => {
                ServerConnection::new(terms.certified.server_config(&terms.alpn)?)?.into()
            }
            HandshakeRole::Client => {
                // The name is never sent (SNI is off) nor compared (DNS names are ignored), as in
                // the runtime.
                let no_name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
                ClientConnection::new(
                    terms
                        .certified
                        .client_config(&terms.alpn, &terms.expected)?,
                    no_name,
                )?
                .into()
            }
        };
        Ok(Self {
            terms,
            connection,
            input: Vec::new(),
            received: 0,
            secrets: (None, None),
        })
    }

    /// Returns the parameters of the handshake.
    pub fn terms(&self) -> &HandshakeParams {
        &self.terms
    }

    /// Returns whether the peer's bytes so far are whole records. Then the requester may wait for
    /// the response that more is needed.
    pub fn wants_more(&self) -> bool {
        self.received > 0 && self.input.is_empty()
    }

    /// Processes the peer's next bytes. After any result but [`HandshakeStep::Wait`] the handshake
    /// is over.
    pub fn step(&mut self, bytes: &[u8]) -> HandshakeStep {
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
                    let text = format!(
                        "the peer sent {} bytes, and the handshake has not ended",
                        self.received
                    );
                    return HandshakeStep::Failed {
                        alert: Vec::new(),
                        refusal: KeyRefusal::HandshakeBytes,
                        text,
                    };
                }
                HandshakeStep::Wait { send }
            }
            Ok(used) => self.finish(send, used),
        }
    }

    /// Passes whole records to rustls until the handshake ends. Returns the number of bytes that it
    /// consumed.
    fn consume(&mut self) -> Result<usize, Error> {
        let mut at = 0;
        while self.connection.is_handshaking() {
            let Some(length) = record(&self.input[at..]) else {
                break;
            };
            let mut rest = &self.input[at..at + length];
            at += length;
            while !rest.is_empty() {
                let before = rest.len();
                let taken = self.connection.read_tls(&mut rest);
                // Secrets are captured per thread, so that those of another handshake must be wiped
                // first.
                secret_capture::forget();
                let processed = self.connection.process_new_packets();
                let (client, server) = secret_capture::take();
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

    fn finish(&mut self, send: Vec<u8>, used: usize) -> HandshakeStep {
        let terms = &self.terms;
        let (role, expected) = match terms.role {
            HandshakeRole::Server => (canal_tls::PeerRole::Client, None),
            HandshakeRole::Client => (canal_tls::PeerRole::Server, Some(&terms.expected)),
        };
        let chain = self.connection.peer_certificates();
        let (peer, shown) = match terms
            .certified
            .peer_verifier()
            .map(|j| j.peer(role, expected, chain))
        {
            Some(Ok(known)) => known,
            Some(Err(error)) => return failed(&error, Vec::new()),
            None => return failed(&Error::NoCertificatesPresented, Vec::new()),
        };
        let suite = self
            .connection
            .negotiated_cipher_suite()
            .map(|s| u16::from(s.suite()));
        let secrets = (self.secrets.0.take(), self.secrets.1.take());
        let traffic = |secret: Option<WipedSecret>| canal_tls::traffic(suite?, &secret?);
        let traffics = (traffic(secrets.0), traffic(secrets.1));
        let (Some(suite), (Some(client_traffic), Some(server_traffic)), Some(leaf)) =
            (suite, traffics, chain.and_then(<[_]>::first))
        else {
            return failed(&Error::HandshakeNotComplete, Vec::new());
        };
        HandshakeStep::Done(Box::new(HandshakeOutcome {
            send,
            consumed: self.received - (self.input.len() - used),
            suite,
            alpn: self.connection.alpn_protocol().unwrap_or_default().to_vec(),
            client_traffic,
            server_traffic,
            peer,
            leaf: leaf.clone().into_owned(),
            peer_leaf: shown,
        }))
    }
}

/// Returns the length of the first record, or of all bytes if they cannot be a record: rustls then
/// reports what is wrong. `None`: the record is incomplete.
fn record(bytes: &[u8]) -> Option<usize> {
    let [kind, major, _, high, low, ..] = bytes else {
        return None;
    };
    let length = RECORD_HEADER + usize::from(u16::from_be_bytes([*high, *low]));
    if !(20..=24).contains(kind) || *major != 3 || length > RECORD_MAX {
        return Some(bytes.len());
    }
    (bytes.len() >= length).then_some(length)
}

fn failed(error: &Error, alert: Vec<u8>) -> HandshakeStep {
    HandshakeStep::Failed {
        alert,
        refusal: refusal(error),
        text: text(error),
    }
}

/// Returns the error's text, with the expected and the actual value if the verifier provides them.
fn text(error: &Error) -> String {
    canal_tls::TlsError::from(error.clone()).to_string()
}

/// Maps an error of TLS to a refusal of the key protocol.
pub fn refusal(error: &Error) -> KeyRefusal {
    use canal_tls::HandshakeFailure as Kit;
    match canal_tls::of_rustls(error) {
        Kit::NoCertificate => KeyRefusal::PeerAnonymous,
        Kit::Expired => KeyRefusal::PeerExpired,
        Kit::NotYetValid => KeyRefusal::PeerNotYetValid,
        Kit::Revoked => KeyRefusal::PeerRevoked,
        Kit::UnknownIssuer => KeyRefusal::PeerUnknownIssuer,
        Kit::WrongTrustDomain => KeyRefusal::PeerTrustDomain,
        Kit::WrongIdentity => KeyRefusal::PeerIdentity,
        Kit::Ambiguous => KeyRefusal::PeerAmbiguous,
        Kit::WrongUsage => KeyRefusal::PeerPurpose,
        Kit::ChainTooLong | Kit::ChainTooLarge => KeyRefusal::PeerChain,
        Kit::BadEncoding
        | Kit::BadSignature
        | Kit::BadAlgorithm
        | Kit::BadRevocationList
        | Kit::BadChain => KeyRefusal::PeerCertificate,
        Kit::Alert => KeyRefusal::PeerAlert,
        Kit::HandshakeBytes => KeyRefusal::HandshakeBytes,
        _ if matches!(
            error,
            Error::General(_) | Error::FailedToGetRandomBytes | Error::FailedToGetCurrentTime
        ) =>
        {
            KeyRefusal::Failed
        }
        _ => KeyRefusal::PeerProtocol,
    }
}

/// Returns whether `input` is something that only a TLS handshake with the key of `name` signs.
/// That is a CertificateVerify of TLS 1.3 (RFC 8446 §4.4.3). For a tenant's own key, which also
/// serves clients of TLS 1.2, it is also the parameters of an ECDHE key exchange (RFC 8422 §5.4).
/// Keys of services sign as servers only, so that no signature authenticates a client.
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
    // The parameters are two randoms, named_curve, the curve, and a point with its length.
    let ecdhe = || matches!(input.get(64..), Some([3, _, _, length, point @ ..]) if point.len() == usize::from(*length) && !point.is_empty());
    tls13 || tls12 && ecdhe()
}

#[cfg(test)]
mod tests;

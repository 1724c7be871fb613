//! TLS 1.3 records after a handshake, encrypted and decrypted, and the content other than data that
//! a peer may send: alerts, key updates, tickets (RFC 8446 §4.6, §5, §6). The code is pure: it maps
//! bytes to bytes and performs no IO. Start with [`pair`].

use aws_lc_rs::aead::{Aad, NONCE_LEN, Nonce};

use super::schedule::{MeshCipherSuite, RecordKeys, TrafficSecret, apart};

/// Maximum plaintext of a record (RFC 8446 §5.1).
pub(super) const PLAINTEXT_MAX: usize = 1 << 14;
/// Size of content type, version and length.
pub(super) const HEADER: usize = 5;
/// Maximum value of a record's length field (RFC 8446 §5.2).
const CIPHERTEXT_MAX: usize = PLAINTEXT_MAX + 256;
/// Size of the longest record.
pub(super) const RECORD_MAX: usize = HEADER + CIPHERTEXT_MAX;
/// Of every suite of the mesh (RFC 8446 §5.2, AES-GCM).
pub(super) const TAG: usize = 16;
/// Maximum number of records under one key. AES-GCM's safety margin ends at 2^24.5 (RFC 8446 §5.5).
pub(super) const RECORDS_MAX: u64 = 1 << 24;
/// Maximum number of consecutive records without application data. A correct peer sends a ticket or
/// two, or a key update; a peer that only sends such records costs CPU and delivers nothing.
const IDLE_RECORDS_MAX: u32 = 64;
/// Maximum length of a handshake message, which can only be a ticket. As long as one record.
const MESSAGE_MAX: usize = 16 << 10;

pub(super) const ALERT: u8 = 21;
pub(super) const HANDSHAKE: u8 = 22;
pub(super) const APPLICATION_DATA: u8 = 23;
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;
/// A key update that does not request one in return.
pub(super) const UPDATE: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 0];
/// Level and description of the alert that ends a direction in order.
pub(super) const CLOSING: [u8; 2] = [1, CLOSE_NOTIFY];
const CLOSE_NOTIFY: u8 = 0;
const USER_CANCELED: u8 = 90;

/// Side of TLS of this end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointRole {
    Client,
    Server,
}

/// Reasons why a connection broke after its handshake. Each name is a counter's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("TLS: a record cannot be decrypted; it was damaged or forged in transit")]
    BadRecord,
    #[error("TLS: a record is longer than {PLAINTEXT_MAX} bytes")]
    Overflow,
    #[error("TLS: the peer sent a message that is illegal after a handshake")]
    Unexpected,
    #[error("TLS: the peer sent a message that cannot be read")]
    Decode,
    #[error("TLS: {IDLE_RECORDS_MAX} records in a row carried no data")]
    Idle,
    #[error("TLS: the peer closed the connection with alert {0} (RFC 8446 §6)")]
    Alert(u8),
    #[error("TLS: the connection ended without close_notify; its data may be truncated")]
    Truncated,
    #[error("TLS: no keys can be derived")]
    Keys,
    #[error(
        "TLS: the keys reached their limit, and this kernel cannot replace them (Linux can from 6.14 on); the next connection has new keys"
    )]
    Rekey,
}

impl RecordError {
    /// Returns the name as a label value.
    pub fn name(self) -> &'static str {
        match self {
            RecordError::BadRecord => "bad_record",
            RecordError::Overflow => "record_overflow",
            RecordError::Unexpected => "unexpected_message",
            RecordError::Decode => "decode_error",
            RecordError::Idle => "idle_records",
            RecordError::Alert(_) => "alert",
            RecordError::Truncated => "truncated",
            RecordError::Keys => "keys",
            RecordError::Rekey => "rekey",
        }
    }

    /// Returns the alert that informs the peer, if one is sent.
    pub(super) fn alert(self) -> Option<u8> {
        match self {
            RecordError::BadRecord => Some(20),
            RecordError::Overflow => Some(22),
            RecordError::Unexpected | RecordError::Idle => Some(10),
            RecordError::Decode => Some(50),
            RecordError::Keys | RecordError::Rekey => Some(80),
            RecordError::Alert(_) | RecordError::Truncated => None,
        }
    }
}

/// Keys of one direction, and the number of records that they protected.
struct DirectionKeys {
    secret: TrafficSecret,
    keys: RecordKeys,
    sequence: u64,
}

impl DirectionKeys {
    fn new(suite: MeshCipherSuite, traffic: &[u8]) -> Result<Self, RecordError> {
        let (secret, keys) = apart(suite, traffic).ok_or(RecordError::Keys)?;
        Ok(Self {
            secret,
            keys,
            sequence: 0,
        })
    }

    fn update(&mut self) -> Result<(), RecordError> {
        let secret = self.secret.next().ok_or(RecordError::Keys)?;
        let keys = secret.keys().ok_or(RecordError::Keys)?;
        *self = Self {
            secret,
            keys,
            sequence: 0,
        };
        Ok(())
    }

    /// Returns the nonce of the next record (RFC 8446 §5.3).
    fn nonce(&mut self) -> Nonce {
        let mut nonce: [u8; NONCE_LEN] = self.keys.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..]
            .iter_mut()
            .zip(self.sequence.to_be_bytes())
        {
            *byte ^= number;
        }
        // The sequence cannot overflow, because keys are updated long before 2^64 records.
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Encrypts the outgoing records of a connection.
pub(super) struct Sealer {
    direction: DirectionKeys,
    /// Number of records after which the keys are renewed.
    limit: u64,
}

/// Decrypts the incoming records of a connection.
pub(super) struct Opener {
    direction: DirectionKeys,
    post_handshake: PostHandshakeReader,
}

/// Reader of a peer's content other than data, independent of where records are decrypted.
pub(super) struct PostHandshakeReader {
    side: EndpointRole,
    /// A handshake message that continues in a later record.
    message: Vec<u8>,
    idle: u32,
}

/// Meaning of a record's content.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RecordContent {
    Data,
    /// The record has no data for the application.
    Nothing,
    /// The peer uses its next keys from here on. If `is_requested` is true, it requests the same of
    /// this side.
    Update {
        is_requested: bool,
    },
    /// The record was a close_notify alert.
    Closed,
}

/// Result of the decryption of a record.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DecryptedRecord {
    /// Number of bytes of application data, which start at [`HEADER`].
    Data(usize),
    /// The record has no data for the application. `update` requests a key update in return.
    Control { update: bool },
    /// The record was a close_notify alert.
    Closed,
}

/// Content of the front of a buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RecordPrefix {
    /// A complete record of this many bytes.
    Whole(usize),
    /// The record is incomplete; as far as is known, this many bytes complete it.
    Partial(usize),
}

/// Measures the record at the front of `buffer`.
pub(super) fn front(buffer: &[u8]) -> Result<RecordPrefix, RecordError> {
    let [kind, _, _, high, low, ..] = buffer else {
        return Ok(RecordPrefix::Partial(HEADER));
    };
    if *kind != APPLICATION_DATA {
        // This includes ChangeCipherSpec, which is not permitted after the handshake (RFC 8446 §5).
        return Err(RecordError::Unexpected);
    }
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    if length > CIPHERTEXT_MAX {
        return Err(RecordError::Overflow);
    }
    let whole = HEADER + length;
    Ok(if buffer.len() < whole {
        RecordPrefix::Partial(whole)
    } else {
        RecordPrefix::Whole(whole)
    })
}

/// Creates both directions of a connection whose handshake yielded these secrets.
pub(super) fn pair(
    suite: u16,
    side: EndpointRole,
    client: &[u8],
    server: &[u8],
) -> Result<(Sealer, Opener), RecordError> {
    let suite = MeshCipherSuite::of(suite).ok_or(RecordError::Keys)?;
    let (client, server) = (
        DirectionKeys::new(suite, client)?,
        DirectionKeys::new(suite, server)?,
    );
    let (own, peers) = match side {
        EndpointRole::Client => (client, server),
        EndpointRole::Server => (server, client),
    };
    Ok((
        Sealer {
            direction: own,
            limit: RECORDS_MAX,
        },
        Opener {
            direction: peers,
            post_handshake: PostHandshakeReader::new(side),
        },
    ))
}

impl Sealer {
    /// Appends one record with application data from the front of `bufs` to `out`. Returns the
    /// number of bytes taken, at most [`PLAINTEXT_MAX`]. It renews the keys when they reach their
    /// limit.
    pub(super) fn data<'a>(
        &mut self,
        bufs: impl Iterator<Item = &'a [u8]>,
        out: &mut Vec<u8>,
    ) -> Result<usize, RecordError> {
        if self.direction.sequence >= self.limit {
            self.update(out)?;
        }
        let at = begin(out);
        let mut taken = 0;
        for buf in bufs {
            let part = &buf[..buf.len().min(PLAINTEXT_MAX - taken)];
            out.extend_from_slice(part);
            taken += part.len();
            if taken == PLAINTEXT_MAX {
                break;
            }
        }
        self.seal(APPLICATION_DATA, at, out)?;
        Ok(taken)
    }

    /// Appends a key update, and uses the next keys from here on (RFC 8446 §4.6.3).
    pub(super) fn update(&mut self, out: &mut Vec<u8>) -> Result<(), RecordError> {
        let at = begin(out);
        out.extend_from_slice(&UPDATE);
        self.seal(HANDSHAKE, at, out)?;
        self.direction.update()
    }

    pub(super) fn close_notify(&mut self, out: &mut Vec<u8>) -> Result<(), RecordError> {
        self.alert(1, CLOSE_NOTIFY, out)
    }

    pub(super) fn fatal(&mut self, description: u8, out: &mut Vec<u8>) -> Result<(), RecordError> {
        self.alert(2, description, out)
    }

    fn alert(&mut self, level: u8, description: u8, out: &mut Vec<u8>) -> Result<(), RecordError> {
        let at = begin(out);
        out.extend_from_slice(&[level, description]);
        self.seal(ALERT, at, out)
    }

    /// Encrypts the plaintext behind the header at `at` into a record.
    fn seal(&mut self, kind: u8, at: usize, out: &mut Vec<u8>) -> Result<(), RecordError> {
        out.push(kind);
        let length =
            u16::try_from(out.len() - at - HEADER + TAG).map_err(|_| RecordError::Overflow)?;
        out[at + 3..at + HEADER].copy_from_slice(&length.to_be_bytes());
        let (head, body) = out[at..].split_at_mut(HEADER);
        let nonce = self.direction.nonce();
        let sealed =
            self.direction
                .keys
                .key
                .seal_in_place_separate_tag(nonce, Aad::from(&*head), body);
        let tag = sealed.map_err(|_| RecordError::Keys)?;
        out.extend_from_slice(tag.as_ref());
        Ok(())
    }
}

/// Appends a record's header without its length, and returns its position.
fn begin(out: &mut Vec<u8>) -> usize {
    let at = out.len();
    out.extend_from_slice(&[APPLICATION_DATA, 3, 3, 0, 0]);
    at
}

impl Opener {
    /// Decrypts a complete record in place, and handles its control content.
    pub(super) fn open(&mut self, record: &mut [u8]) -> Result<DecryptedRecord, RecordError> {
        let (head, body) = record
            .split_at_mut_checked(HEADER)
            .ok_or(RecordError::Decode)?;
        let nonce = self.direction.nonce();
        let key = &self.direction.keys.key;
        let plain = key
            .open_in_place(nonce, Aad::from(&*head), body)
            .map_err(|_| RecordError::BadRecord)?;
        if plain.len() > PLAINTEXT_MAX + 1 {
            return Err(RecordError::Overflow);
        }
        // Zeros after the content type are padding (RFC 8446 §5.4).
        let end = plain
            .iter()
            .rposition(|byte| *byte != 0)
            .ok_or(RecordError::Unexpected)?;
        let (kind, content) = (plain[end], &plain[..end]);
        match self.post_handshake.process_content(kind, content)? {
            RecordContent::Data => Ok(DecryptedRecord::Data(end)),
            RecordContent::Nothing => Ok(DecryptedRecord::Control { update: false }),
            RecordContent::Update { is_requested } => {
                self.direction.update()?;
                Ok(DecryptedRecord::Control {
                    update: is_requested,
                })
            }
            RecordContent::Closed => Ok(DecryptedRecord::Closed),
        }
    }

    /// Returns the state with which another reader can continue after `records` records. `None` if
    /// a key update was among them, or if a message is incomplete.
    pub(super) fn into_talk(self, records: u64) -> Option<PostHandshakeReader> {
        (self.direction.sequence == records && self.post_handshake.message.is_empty())
            .then_some(self.post_handshake)
    }
}

impl PostHandshakeReader {
    pub(super) fn new(side: EndpointRole) -> Self {
        Self {
            side,
            message: Vec::new(),
            idle: 0,
        }
    }

    /// Processes the content of a decrypted record of type `kind`.
    pub(super) fn process_content(
        &mut self,
        kind: u8,
        content: &[u8],
    ) -> Result<RecordContent, RecordError> {
        // Handshake messages must not be interleaved with other content (RFC 8446 §5.1).
        if kind != HANDSHAKE && !self.message.is_empty() {
            return Err(RecordError::Unexpected);
        }
        self.idle = if kind == APPLICATION_DATA && !content.is_empty() {
            0
        } else {
            self.idle + 1
        };
        if self.idle > IDLE_RECORDS_MAX {
            return Err(RecordError::Idle);
        }
        match kind {
            APPLICATION_DATA => Ok(RecordContent::Data),
            ALERT => alert(content),
            HANDSHAKE if !content.is_empty() => self.handshake(content),
            _ => Err(RecordError::Unexpected),
        }
    }

    /// Processes the handshake messages that may follow the handshake.
    fn handshake(&mut self, content: &[u8]) -> Result<RecordContent, RecordError> {
        self.message.extend_from_slice(content);
        let mut content = RecordContent::Nothing;
        while let [kind, a, b, c, rest @ ..] = self.message.as_slice() {
            let length = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
            if length > MESSAGE_MAX {
                return Err(RecordError::Decode);
            }
            let Some(body) = rest.get(..length) else {
                break;
            };
            match (*kind, self.side) {
                // The ticket is ignored, because sessions are not resumed.
                (NEW_SESSION_TICKET, EndpointRole::Client) => {}
                (KEY_UPDATE, _) => {
                    let [asked @ (0 | 1)] = *body else {
                        return Err(RecordError::Decode);
                    };
                    // No message may follow it under the old keys (RFC 8446 §5.1).
                    if rest.len() > length {
                        return Err(RecordError::Unexpected);
                    }
                    content = RecordContent::Update {
                        is_requested: asked == 1,
                    };
                }
                _ => return Err(RecordError::Unexpected),
            }
            self.message.drain(..4 + length);
        }
        Ok(content)
    }
}

fn alert(content: &[u8]) -> Result<RecordContent, RecordError> {
    match content {
        [_, CLOSE_NOTIFY] => Ok(RecordContent::Closed),
        [_, USER_CANCELED] => Ok(RecordContent::Nothing),
        [_, description] => Err(RecordError::Alert(*description)),
        _ => Err(RecordError::Decode),
    }
}

/// Operations that only tests need.
#[cfg(test)]
impl Sealer {
    /// Sets the key limit to 0, so that each record renews the keys.
    pub(super) fn exhaust(&mut self) {
        self.limit = 0;
    }
    /// Appends a record with any content.
    pub(super) fn any(&mut self, content: &[u8], kind: u8, zeros: usize, out: &mut Vec<u8>) {
        let at = begin(out);
        out.extend_from_slice(content);
        out.push(kind);
        out.resize(out.len() + zeros, 0);
        let last = out.pop().unwrap();
        self.seal(last, at, out).unwrap();
    }
    /// Appends a key update that requests one in return.
    pub(super) fn asking_update(&mut self, out: &mut Vec<u8>) {
        let at = begin(out);
        out.extend_from_slice(&[KEY_UPDATE, 0, 0, 1, 1]);
        self.seal(HANDSHAKE, at, out).unwrap();
        self.direction.update().unwrap();
    }
}

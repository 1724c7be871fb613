//! TLS 1.3 records after a handshake, sealed and opened, and what a peer may still say besides application data: alerts, key updates, tickets
//! (RFC 8446 §4.6, §5, §6). Pure: bytes in, bytes out; no IO.

use aws_lc_rs::aead::{Aad, NONCE_LEN, Nonce};

use super::schedule::{Keys, Secret, Suite, apart};

/// Most plaintext of a record (§5.1).
pub(super) const PLAINTEXT_MAX: usize = 1 << 14;
/// Content type, version, length.
pub(super) const HEADER: usize = 5;
/// Most that a record's length may say (§5.2).
const CIPHERTEXT_MAX: usize = PLAINTEXT_MAX + 256;
/// The longest record.
pub(super) const RECORD_MAX: usize = HEADER + CIPHERTEXT_MAX;
pub(super) const TAG: usize = 16;
/// Records under one key; AES-GCM's margin ends at 2^24.5 (§5.5).
pub(super) const RECORDS_MAX: u64 = 1 << 24;
/// Records in a row without application data that are put up with.
const IDLE_RECORDS_MAX: u32 = 64;
/// Longest message of a handshake that is put up with: a ticket.
const MESSAGE_MAX: usize = 16 << 10;

pub(super) const ALERT: u8 = 21;
pub(super) const HANDSHAKE: u8 = 22;
pub(super) const APPLICATION_DATA: u8 = 23;
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;
/// A key update that asks for none in return.
pub(super) const UPDATE: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 0];
/// Level and description of the alert that ends a direction in order.
pub(super) const CLOSING: [u8; 2] = [1, CLOSE_NOTIFY];
const CLOSE_NOTIFY: u8 = 0;
const USER_CANCELED: u8 = 90;

/// Which side this end is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Client,
    Server,
}

/// Why a connection broke after its handshake. The name is a counter's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("TLS: a record does not decrypt; it was damaged or forged on its way")]
    BadRecord,
    #[error("TLS: a record is longer than {PLAINTEXT_MAX} bytes")]
    Overflow,
    #[error("TLS: the peer sent what nobody may send after a handshake")]
    Unexpected,
    #[error("TLS: the peer sent a message that cannot be read")]
    Decode,
    #[error("TLS: {IDLE_RECORDS_MAX} records in a row carried no data")]
    Idle,
    #[error("TLS: the peer gave up with alert {0} (RFC 8446 §6)")]
    Alert(u8),
    #[error("TLS: the connection ended without close_notify; what it carried may be cut short")]
    Truncated,
    #[error("TLS: no keys can be made")]
    Keys,
    #[error("TLS: the keys' time is over, and this kernel cannot take others (Linux can from 6.14 on); the next connection has new ones")]
    Rekey,
}

impl RecordError {
    /// As counters say it.
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

    /// The alert that tells the peer, if it is told.
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

/// The keys of one direction and the records they protected.
struct Direction {
    secret: Secret,
    keys: Keys,
    sequence: u64,
}

impl Direction {
    fn new(suite: Suite, traffic: &[u8]) -> Result<Self, RecordError> {
        let (secret, keys) = apart(suite, traffic).ok_or(RecordError::Keys)?;
        Ok(Self { secret, keys, sequence: 0 })
    }

    fn update(&mut self) -> Result<(), RecordError> {
        let secret = self.secret.next().ok_or(RecordError::Keys)?;
        let keys = secret.keys().ok_or(RecordError::Keys)?;
        *self = Self { secret, keys, sequence: 0 };
        Ok(())
    }

    /// §5.3.
    fn nonce(&mut self) -> Nonce {
        let mut nonce: [u8; NONCE_LEN] = self.keys.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        // 2^64 records do not happen: keys are updated long before.
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Seals what goes out.
pub(super) struct Sealer {
    direction: Direction,
    /// Records before its keys are renewed.
    limit: u64,
}

/// Opens what comes in.
pub(super) struct Opener {
    direction: Direction,
    talk: Talk,
}

/// What was heard of a peer besides data, whoever opens its records.
pub(super) struct Talk {
    side: Side,
    /// A handshake message whose end is in a later record.
    message: Vec<u8>,
    idle: u32,
}

/// What a record's content says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    Data,
    /// Nothing for the application.
    Nothing,
    /// The peer uses its next keys from here on; `asked`: it wants the same of this end.
    Update {
        asked: bool,
    },
    /// close_notify.
    Closed,
}

/// What a record was.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// So many bytes of application data, from [`HEADER`] on.
    Data(usize),
    /// Nothing for the application. `update` asks for a key update in return.
    Control { update: bool },
    /// close_notify.
    Closed,
}

/// What stands at the front of a buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Front {
    /// A record of so many bytes.
    Whole(usize),
    /// So many bytes are there once it is whole, as far as one can tell.
    Partial(usize),
}

/// Measures the record at the front of `buffer`.
pub(super) fn front(buffer: &[u8]) -> Result<Front, RecordError> {
    let [kind, _, _, high, low, ..] = buffer else { return Ok(Front::Partial(HEADER)) };
    if *kind != APPLICATION_DATA {
        // Also a ChangeCipherSpec: its time is over with the handshake (§5).
        return Err(RecordError::Unexpected);
    }
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    if length > CIPHERTEXT_MAX {
        return Err(RecordError::Overflow);
    }
    let whole = HEADER + length;
    Ok(if buffer.len() < whole { Front::Partial(whole) } else { Front::Whole(whole) })
}

/// Both directions of a connection whose handshake gave these secrets.
pub(super) fn pair(suite: u16, side: Side, client: &[u8], server: &[u8]) -> Result<(Sealer, Opener), RecordError> {
    let suite = Suite::of(suite).ok_or(RecordError::Keys)?;
    let (client, server) = (Direction::new(suite, client)?, Direction::new(suite, server)?);
    let (own, peers) = match side {
        Side::Client => (client, server),
        Side::Server => (server, client),
    };
    Ok((Sealer { direction: own, limit: RECORDS_MAX }, Opener { direction: peers, talk: Talk::new(side) }))
}

impl Sealer {
    /// Appends one record with application data, taken from the front of `bufs`, to `out`; how many bytes it took: at most
    /// [`PLAINTEXT_MAX`]. Renews its keys where their time is over.
    pub(super) fn data<'a>(&mut self, bufs: impl Iterator<Item = &'a [u8]>, out: &mut Vec<u8>) -> Result<usize, RecordError> {
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

    /// Appends a key update, and uses the next keys from here on (§4.6.3).
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

    /// Makes a record of the plaintext behind the header at `at`.
    fn seal(&mut self, kind: u8, at: usize, out: &mut Vec<u8>) -> Result<(), RecordError> {
        out.push(kind);
        let length = u16::try_from(out.len() - at - HEADER + TAG).map_err(|_| RecordError::Overflow)?;
        out[at + 3..at + HEADER].copy_from_slice(&length.to_be_bytes());
        let (head, body) = out[at..].split_at_mut(HEADER);
        let nonce = self.direction.nonce();
        let sealed = self.direction.keys.key.seal_in_place_separate_tag(nonce, Aad::from(&*head), body);
        let tag = sealed.map_err(|_| RecordError::Keys)?;
        out.extend_from_slice(tag.as_ref());
        Ok(())
    }
}

/// Appends a record's header without its length; where it stands.
fn begin(out: &mut Vec<u8>) -> usize {
    let at = out.len();
    out.extend_from_slice(&[APPLICATION_DATA, 3, 3, 0, 0]);
    at
}

impl Opener {
    /// Opens the whole record in place, and acts on what it says about the connection itself.
    pub(super) fn open(&mut self, record: &mut [u8]) -> Result<Opened, RecordError> {
        let (head, body) = record.split_at_mut_checked(HEADER).ok_or(RecordError::Decode)?;
        let nonce = self.direction.nonce();
        let key = &self.direction.keys.key;
        let plain = key.open_in_place(nonce, Aad::from(&*head), body).map_err(|_| RecordError::BadRecord)?;
        if plain.len() > PLAINTEXT_MAX + 1 {
            return Err(RecordError::Overflow);
        }
        // Zeros behind the content type are padding (§5.4).
        let end = plain.iter().rposition(|byte| *byte != 0).ok_or(RecordError::Unexpected)?;
        let (kind, content) = (plain[end], &plain[..end]);
        match self.talk.heard(kind, content)? {
            Said::Data => Ok(Opened::Data(end)),
            Said::Nothing => Ok(Opened::Control { update: false }),
            Said::Update { asked } => {
                self.direction.update()?;
                Ok(Opened::Control { update: asked })
            }
            Said::Closed => Ok(Opened::Closed),
        }
    }

    /// What somebody else needs to go on after so many records: `None` if a key update was among them, or a message is half there.
    pub(super) fn into_talk(self, records: u64) -> Option<Talk> {
        (self.direction.sequence == records && self.talk.message.is_empty()).then_some(self.talk)
    }
}

impl Talk {
    pub(super) fn new(side: Side) -> Self {
        Self { side, message: Vec::new(), idle: 0 }
    }

    /// Of a record of `kind` that was opened.
    pub(super) fn heard(&mut self, kind: u8, content: &[u8]) -> Result<Said, RecordError> {
        if kind != HANDSHAKE && !self.message.is_empty() {
            return Err(RecordError::Unexpected);
        }
        self.idle = if kind == APPLICATION_DATA && !content.is_empty() { 0 } else { self.idle + 1 };
        if self.idle > IDLE_RECORDS_MAX {
            return Err(RecordError::Idle);
        }
        match kind {
            APPLICATION_DATA => Ok(Said::Data),
            ALERT => alert(content),
            HANDSHAKE if !content.is_empty() => self.handshake(content),
            _ => Err(RecordError::Unexpected),
        }
    }

    /// Messages of a handshake that may come after it.
    fn handshake(&mut self, content: &[u8]) -> Result<Said, RecordError> {
        self.message.extend_from_slice(content);
        let mut said = Said::Nothing;
        while let [kind, a, b, c, rest @ ..] = self.message.as_slice() {
            let length = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
            if length > MESSAGE_MAX {
                return Err(RecordError::Decode);
            }
            let Some(body) = rest.get(..length) else { break };
            match (*kind, self.side) {
                // Sessions are not resumed.
                (NEW_SESSION_TICKET, Side::Client) => {}
                (KEY_UPDATE, _) => {
                    let [asked @ (0 | 1)] = *body else { return Err(RecordError::Decode) };
                    // Nothing may stand behind it under the old keys (§5.1).
                    if rest.len() > length {
                        return Err(RecordError::Unexpected);
                    }
                    said = Said::Update { asked: asked == 1 };
                }
                _ => return Err(RecordError::Unexpected),
            }
            self.message.drain(..4 + length);
        }
        Ok(said)
    }
}

fn alert(content: &[u8]) -> Result<Said, RecordError> {
    match content {
        [_, CLOSE_NOTIFY] => Ok(Said::Closed),
        [_, USER_CANCELED] => Ok(Said::Nothing),
        [_, description] => Err(RecordError::Alert(*description)),
        _ => Err(RecordError::Decode),
    }
}

/// What only tests say.
#[cfg(test)]
impl Sealer {
    /// Its keys' time is over with every record.
    pub(super) fn exhaust(&mut self) {
        self.limit = 0;
    }
    /// Any content.
    pub(super) fn any(&mut self, content: &[u8], kind: u8, zeros: usize, out: &mut Vec<u8>) {
        let at = begin(out);
        out.extend_from_slice(content);
        out.push(kind);
        out.resize(out.len() + zeros, 0);
        let last = out.pop().unwrap();
        self.seal(last, at, out).unwrap();
    }
    /// A key update that asks for one in return.
    pub(super) fn asking_update(&mut self, out: &mut Vec<u8>) {
        let at = begin(out);
        out.extend_from_slice(&[KEY_UPDATE, 0, 0, 1, 1]);
        self.seal(HANDSHAKE, at, out).unwrap();
        self.direction.update().unwrap();
    }
}

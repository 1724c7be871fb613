//! Bytes of TLS 1.3 as a peer may write them, valid or not: records, messages, hellos (RFC 8446 §4,
//! §5). This module encrypts nothing.

/// Content types of records (RFC 8446 §5.1).
pub(crate) const CHANGE: u8 = 20;
pub(crate) const ALERT: u8 = 21;
pub(crate) const HANDSHAKE: u8 = 22;
pub(crate) const DATA: u8 = 23;

/// Types of handshake messages (RFC 8446 §4).
pub(crate) const CLIENT_HELLO: u8 = 1;
pub(crate) const SERVER_HELLO: u8 = 2;
pub(crate) const TICKET: u8 = 4;
pub(crate) const EXTENSIONS: u8 = 8;
pub(crate) const CERTIFICATE: u8 = 11;
pub(crate) const REQUEST: u8 = 13;
pub(crate) const VERIFY: u8 = 15;
pub(crate) const FINISHED: u8 = 20;
pub(crate) const KEY_UPDATE: u8 = 24;

/// Types of extensions (RFC 8446 §4.2).
pub(crate) const SERVER_NAME: u16 = 0;
pub(crate) const GROUPS: u16 = 10;
pub(crate) const POINT_FORMATS: u16 = 11;
pub(crate) const SIGNATURES: u16 = 13;
pub(crate) const ALPN: u16 = 16;
pub(crate) const CLIENT_CERTIFICATE_TYPE: u16 = 19;
pub(crate) const SERVER_CERTIFICATE_TYPE: u16 = 20;
pub(crate) const PADDING: u16 = 21;
pub(crate) const COMPRESSION: u16 = 27;
pub(crate) const PSK: u16 = 41;
pub(crate) const EARLY_DATA: u16 = 42;
pub(crate) const VERSIONS: u16 = 43;
pub(crate) const COOKIE: u16 = 44;
pub(crate) const PSK_MODES: u16 = 45;
pub(crate) const KEY_SHARE: u16 = 51;
pub(crate) const QUIC: u16 = 57;
pub(crate) const ENCRYPTED_HELLO: u16 = 0xfe0d;
/// A value that no extension ever gets (RFC 8701).
pub(crate) const GREASE: u16 = 0xfafa;

/// Named groups (RFC 8446 §4.2.7).
pub(crate) const P256: u16 = 0x0017;
pub(crate) const X25519: u16 = 0x001d;
pub(crate) const HYBRID: u16 = 0x11ec;

/// The only suite that the attacker implements: TLS_AES_128_GCM_SHA256.
pub(crate) const AES128: u16 = 0x1301;
/// Signature scheme ecdsa_secp256r1_sha256 (RFC 8446 §4.2.3).
pub(crate) const ECDSA: u16 = 0x0403;

/// Descriptions of alerts (RFC 8446 §6).
pub(crate) const UNEXPECTED: u8 = 10;
pub(crate) const BAD_MAC: u8 = 20;
pub(crate) const OVERFLOW: u8 = 22;
pub(crate) const FAILURE: u8 = 40;
pub(crate) const BAD_CERTIFICATE: u8 = 42;
pub(crate) const UNSUPPORTED_CERTIFICATE: u8 = 43;
pub(crate) const REVOKED: u8 = 44;
pub(crate) const EXPIRED: u8 = 45;
pub(crate) const UNKNOWN_CERTIFICATE: u8 = 46;
pub(crate) const ILLEGAL: u8 = 47;
pub(crate) const UNKNOWN_CA: u8 = 48;
pub(crate) const DECODE: u8 = 50;
pub(crate) const DECRYPT: u8 = 51;
pub(crate) const VERSION: u8 = 70;
pub(crate) const MISSING: u8 = 109;
pub(crate) const UNSUPPORTED_EXTENSION: u8 = 110;
pub(crate) const CERTIFICATE_REQUIRED: u8 = 116;
pub(crate) const NO_ALPN: u8 = 120;

/// A dummy change_cipher_spec record (RFC 8446 §D.4).
pub(crate) const CCS: [u8; 6] = [CHANGE, 3, 3, 0, 1, 1];
/// Random of a HelloRetryRequest (RFC 8446 §4.1.3).
pub(crate) const RETRY: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
    0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];

/// Returns `body` behind its length in `width` bytes. If it is too long, only the length is
/// truncated.
fn sized(width: usize, body: &[u8]) -> Vec<u8> {
    let mut out = body.len().to_be_bytes()[8 - width..].to_vec();
    out.extend_from_slice(body);
    out
}

pub(crate) fn vec8(body: &[u8]) -> Vec<u8> {
    sized(1, body)
}

pub(crate) fn vec16(body: &[u8]) -> Vec<u8> {
    sized(2, body)
}

pub(crate) fn vec24(body: &[u8]) -> Vec<u8> {
    sized(3, body)
}

/// Encodes the items in big-endian order.
pub(crate) fn list16(items: &[u16]) -> Vec<u8> {
    items.iter().flat_map(|i| i.to_be_bytes()).collect()
}

/// Returns one plaintext record, whatever its length.
pub(crate) fn record(kind: u8, body: &[u8]) -> Vec<u8> {
    [&[kind, 3, 3], &sized(2, body)[..]].concat()
}

/// Splits `body` into records of at most `size` bytes.
pub(crate) fn records(kind: u8, body: &[u8], size: usize) -> Vec<u8> {
    body.chunks(size).flat_map(|c| record(kind, c)).collect()
}

/// Returns a handshake message with its header.
pub(crate) fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    [&[kind][..], &vec24(body)].concat()
}

/// Returns a Certificate message without context and extensions.
pub(crate) fn certificate(chain: &[Vec<u8>]) -> Vec<u8> {
    let entries: Vec<u8> = chain
        .iter()
        .flat_map(|c| [vec24(c), vec16(&[])].concat())
        .collect();
    message(CERTIFICATE, &[vec8(&[]), vec24(&entries)].concat())
}

pub(crate) fn extensions(list: &[(u16, Vec<u8>)]) -> Vec<u8> {
    vec16(
        &list
            .iter()
            .flat_map(|(kind, body)| [kind.to_be_bytes().to_vec(), vec16(body)].concat())
            .collect::<Vec<u8>>(),
    )
}

pub(crate) fn share(group: u16, key: &[u8]) -> Vec<u8> {
    [group.to_be_bytes().to_vec(), vec16(key)].concat()
}

pub(crate) fn protocols(names: &[&[u8]]) -> Vec<u8> {
    vec16(&names.iter().flat_map(|n| vec8(n)).collect::<Vec<u8>>())
}

/// A ClientHello or, with one suite and one compression method, a ServerHello.
#[derive(Clone)]
pub(crate) struct CraftedHello {
    pub(crate) kind: u8,
    pub(crate) version: u16,
    pub(crate) random: [u8; 32],
    pub(crate) session: Vec<u8>,
    pub(crate) suites: Vec<u16>,
    pub(crate) compressions: Vec<u8>,
    pub(crate) extensions: Vec<(u16, Vec<u8>)>,
}

impl CraftedHello {
    /// Adds an extension, even if there is one of its type already.
    pub(crate) fn with(mut self, kind: u16, body: &[u8]) -> Self {
        self.extensions.push((kind, body.to_vec()));
        self
    }

    pub(crate) fn without(mut self, kind: u16) -> Self {
        self.extensions.retain(|(k, _)| *k != kind);
        self
    }

    /// Replaces the extension of this type, or adds it.
    pub(crate) fn set(self, kind: u16, body: &[u8]) -> Self {
        self.without(kind).with(kind, body)
    }

    /// Offers exactly these groups and these key shares.
    pub(crate) fn keys(self, groups: &[u16], shares: &[Vec<u8>]) -> Self {
        self.set(GROUPS, &vec16(&list16(groups)))
            .set(KEY_SHARE, &vec16(&shares.concat()))
    }

    pub(crate) fn change(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub(crate) fn message(&self) -> Vec<u8> {
        let (suites, compressions) = match self.kind {
            CLIENT_HELLO => (vec16(&list16(&self.suites)), vec8(&self.compressions)),
            _ => (list16(&self.suites), self.compressions.clone()),
        };
        let extensions = if self.extensions.is_empty() {
            Vec::new()
        } else {
            extensions(&self.extensions)
        };
        let version = self.version.to_be_bytes();
        message(
            self.kind,
            &[
                &version,
                &self.random[..],
                &vec8(&self.session),
                &suites,
                &compressions,
                &extensions,
            ]
            .concat(),
        )
    }
}

/// The parts of the other side's hello that the attacker needs.
#[derive(Default, Debug)]
pub(crate) struct ReceivedRecords {
    pub(crate) session: Vec<u8>,
    pub(crate) extensions: Vec<(u16, Vec<u8>)>,
}

impl ReceivedRecords {
    /// Parses the hello of an honest peer.
    pub(crate) fn read(message: &[u8]) -> Self {
        let mut rest = &message[4..];
        take(&mut rest, 2);
        take(&mut rest, 32);
        let session = take_sized(&mut rest, 1).to_vec();
        if message[0] == CLIENT_HELLO {
            take_sized(&mut rest, 2);
            take_sized(&mut rest, 1);
        } else {
            take(&mut rest, 3);
        }
        let mut rest = take_sized(&mut rest, 2);
        let mut extensions = Vec::new();
        while !rest.is_empty() {
            let kind = take(&mut rest, 2);
            extensions.push((
                u16::from_be_bytes([kind[0], kind[1]]),
                take_sized(&mut rest, 2).to_vec(),
            ));
        }
        Self {
            session,
            extensions,
        }
    }

    /// Returns the key shares: a client's list, or a server's only one.
    pub(crate) fn shares(&self) -> Vec<(u16, Vec<u8>)> {
        let Some((_, body)) = self.extensions.iter().find(|(kind, _)| *kind == KEY_SHARE) else {
            return Vec::new();
        };
        let mut rest = &body[..];
        if usize::from(u16::from_be_bytes([body[0], body[1]])) == body.len() - 2 {
            take(&mut rest, 2);
        }
        let mut shares = Vec::new();
        while rest.len() >= 4 {
            let group = take(&mut rest, 2);
            shares.push((
                u16::from_be_bytes([group[0], group[1]]),
                take_sized(&mut rest, 2).to_vec(),
            ));
        }
        shares
    }
}

pub(crate) fn take<'a>(rest: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (head, tail) = rest.split_at(n);
    *rest = tail;
    head
}

pub(crate) fn take_sized<'a>(rest: &mut &'a [u8], width: usize) -> &'a [u8] {
    let n = take(rest, width)
        .iter()
        .fold(0, |n, b| n << 8 | usize::from(*b));
    take(rest, n)
}

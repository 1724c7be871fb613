//! Key schedule: from traffic secrets to record keys, and from one secret to the next (RFC 8446
//! §7). The code is pure and handles no records.

use aws_lc_rs::aead::{self, AES_128_GCM, AES_256_GCM, LessSafeKey, NONCE_LEN, UnboundKey};
use aws_lc_rs::hkdf::{self, HKDF_SHA256, HKDF_SHA384};
use zeroize::Zeroizing;

/// Cipher suites of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MeshCipherSuite {
    Aes128GcmSha256,
    Aes256GcmSha384,
}

impl MeshCipherSuite {
    /// Returns the suite with this TLS number (RFC 8446 §B.4).
    pub(super) fn of(number: u16) -> Option<Self> {
        match number {
            0x1301 => Some(MeshCipherSuite::Aes128GcmSha256),
            0x1302 => Some(MeshCipherSuite::Aes256GcmSha384),
            _ => None,
        }
    }

    fn aead(self) -> &'static aead::Algorithm {
        match self {
            MeshCipherSuite::Aes128GcmSha256 => &AES_128_GCM,
            MeshCipherSuite::Aes256GcmSha384 => &AES_256_GCM,
        }
    }

    fn hkdf(self) -> hkdf::Algorithm {
        match self {
            MeshCipherSuite::Aes128GcmSha256 => HKDF_SHA256,
            MeshCipherSuite::Aes256GcmSha384 => HKDF_SHA384,
        }
    }

    /// Returns the length of a traffic secret in bytes, which is that of the suite's hash.
    pub(super) fn secret_len(self) -> usize {
        match self {
            MeshCipherSuite::Aes128GcmSha256 => 32,
            MeshCipherSuite::Aes256GcmSha384 => 48,
        }
    }
}

/// A traffic secret of one direction. It is erased when dropped, and never printed.
pub(super) struct TrafficSecret {
    suite: MeshCipherSuite,
    bytes: Zeroizing<Vec<u8>>,
}

/// Returns a traffic secret, and behind it the key and the IV derived from it (RFC 8446 §7.3), for
/// a [`RecordStream`](super::RecordStream). The side that performs the handshake derives them, so
/// that the record layer need not. `None` for a suite that the mesh does not use, or for a secret
/// that does not fit the suite.
pub fn traffic(suite: u16, secret: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    TrafficSecret::new(MeshCipherSuite::of(suite)?, secret)?.traffic()
}

/// The parts of a result of [`traffic`].
pub(super) struct TrafficKeyParts<'a> {
    pub(super) secret: &'a [u8],
    pub(super) key: &'a [u8],
    pub(super) iv: [u8; NONCE_LEN],
}

impl<'a> TrafficKeyParts<'a> {
    /// Splits the bytes. `None` if the length does not fit the suite.
    pub(super) fn of(suite: MeshCipherSuite, traffic: &'a [u8]) -> Option<Self> {
        let (secret, keys) = traffic.split_at_checked(suite.secret_len())?;
        let (key, iv) = keys.split_at_checked(suite.aead().key_len())?;
        Some(Self {
            secret,
            key,
            iv: iv.try_into().ok()?,
        })
    }
}

/// Converts a result of [`traffic`] into secret and keys. `None` if its length does not fit the
/// suite.
pub(super) fn apart(suite: MeshCipherSuite, traffic: &[u8]) -> Option<(TrafficSecret, RecordKeys)> {
    let TrafficKeyParts { secret, key, iv } = TrafficKeyParts::of(suite, traffic)?;
    let key = LessSafeKey::new(UnboundKey::new(suite.aead(), key).ok()?);
    Some((TrafficSecret::new(suite, secret)?, RecordKeys { key, iv }))
}

/// Maximum length of a result of [`traffic`].
const TRAFFIC_MAX: usize = 48 + 32 + NONCE_LEN;

/// Keys that protect the records of one direction until the next key update.
pub(super) struct RecordKeys {
    pub(super) key: LessSafeKey,
    pub(super) iv: [u8; NONCE_LEN],
}

struct OutputLength(usize);

impl hkdf::KeyType for OutputLength {
    fn len(&self) -> usize {
        self.0
    }
}

impl TrafficSecret {
    /// Creates a secret. `None` if the length does not fit the suite.
    pub(super) fn new(suite: MeshCipherSuite, bytes: &[u8]) -> Option<Self> {
        (bytes.len() == suite.secret_len()).then(|| Self {
            suite,
            bytes: Zeroizing::new(bytes.to_vec()),
        })
    }

    pub(super) fn suite(&self) -> MeshCipherSuite {
        self.suite
    }

    /// Computes HKDF-Expand-Label(secret, label, "", length) (RFC 8446 §7.1).
    fn expand(&self, label: &[u8], length: usize) -> Option<Zeroizing<Vec<u8>>> {
        let length16 = u16::try_from(length).ok()?.to_be_bytes();
        let name_len = [u8::try_from(PREFIX.len() + label.len()).ok()?];
        // The pieces must outlive the expansion, which borrows them.
        let info: [&[u8]; 5] = [&length16, &name_len, PREFIX, label, &[0]];
        let secret = hkdf::Prk::new_less_safe(self.suite.hkdf(), &self.bytes);
        let mut out = Zeroizing::new(vec![0; length]);
        secret
            .expand(&info, OutputLength(length))
            .ok()?
            .fill(&mut out)
            .ok()?;
        Some(out)
    }

    /// Returns the secret, its key and its IV, one behind the other.
    pub(super) fn traffic(&self) -> Option<Zeroizing<Vec<u8>>> {
        let mut all = Zeroizing::new(Vec::with_capacity(TRAFFIC_MAX));
        all.extend_from_slice(&self.bytes);
        all.extend_from_slice(&self.expand(b"key", self.suite.aead().key_len())?);
        all.extend_from_slice(&self.expand(b"iv", NONCE_LEN)?);
        Some(all)
    }

    /// Derives the record keys (RFC 8446 §7.3). `None` cannot occur for a secret of the right
    /// length; callers then fail the connection.
    pub(super) fn keys(&self) -> Option<RecordKeys> {
        let key = self.expand(b"key", self.suite.aead().key_len())?;
        let key = LessSafeKey::new(UnboundKey::new(self.suite.aead(), &key).ok()?);
        let iv = self.expand(b"iv", NONCE_LEN)?;
        Some(RecordKeys {
            key,
            iv: iv.as_slice().try_into().ok()?,
        })
    }

    /// Returns the secret after a key update (RFC 8446 §7.2).
    pub(super) fn next(&self) -> Option<Self> {
        let bytes = self.expand(b"traffic upd", self.suite.secret_len())?;
        Some(Self {
            suite: self.suite,
            bytes,
        })
    }
}

const PREFIX: &[u8] = b"tls13 ";

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits
            .chunks(2)
            .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
            .collect()
    }

    /// Checks the server's application traffic keys of RFC 8448 §3, the simple 1-RTT handshake.
    #[test]
    fn keys_are_those_of_rfc_8448() {
        let secret = hex(
            "a1 1a f9 f0 55 31 f8 56 ad 47 11 6b 45 a9 50 32 82 04 b4 f4 4b fb 6b 3a 4b 4f 1f 3f cb 63 16 43",
        );
        let secret = TrafficSecret::new(MeshCipherSuite::Aes128GcmSha256, &secret).unwrap();
        assert_eq!(
            *secret.expand(b"key", 16).unwrap(),
            hex("9f 02 28 3b 6c 9c 07 ef c2 6b b9 f2 ac 92 e3 56")
        );
        assert_eq!(
            *secret.expand(b"iv", 12).unwrap(),
            hex("cf 78 2b 88 dd 83 54 9a ad f1 e9 84")
        );
        let client = hex(
            "9e 40 64 6c e7 9a 7f 9d c0 5a f8 88 9b ce 65 52 87 5a fa 0b 06 df 00 87 f7 92 eb b7 c1 75 04 a5",
        );
        let client = TrafficSecret::new(MeshCipherSuite::Aes128GcmSha256, &client).unwrap();
        assert_eq!(
            *client.expand(b"key", 16).unwrap(),
            hex("17 42 2d da 59 6e d5 d9 ac d8 90 e3 c6 3f 50 51")
        );
        assert_eq!(
            *client.expand(b"iv", 12).unwrap(),
            hex("5b 78 92 3d ee 08 57 90 33 e5 23 d9")
        );
    }

    #[test]
    fn parsing_reverses_building() {
        for (number, length) in [(0x1301, 32), (0x1302, 48)] {
            let suite = MeshCipherSuite::of(number).unwrap();
            let all = traffic(number, &vec![7; length]).unwrap();
            let (secret, keys) = apart(suite, &all).unwrap();
            let own = TrafficSecret::new(suite, &vec![7; length])
                .unwrap()
                .keys()
                .unwrap();
            assert_eq!(
                (keys.iv, secret.next().unwrap().bytes),
                (
                    own.iv,
                    TrafficSecret::new(suite, &vec![7; length])
                        .unwrap()
                        .next()
                        .unwrap()
                        .bytes
                )
            );
            let sealed = |keys: &RecordKeys| {
                let mut text = b"text".to_vec();
                let nonce = aead::Nonce::assume_unique_for_key([1; NONCE_LEN]);
                keys.key
                    .seal_in_place_append_tag(nonce, aead::Aad::empty(), &mut text)
                    .unwrap();
                text
            };
            assert_eq!(sealed(&keys), sealed(&own));
            for cut in [0, length, all.len() - 1] {
                assert!(apart(suite, &all[..cut]).is_none(), "{number:#x} {cut}");
            }
            assert!(apart(suite, &[&all[..], &[0]].concat()).is_none());
            assert!(traffic(number, &all).is_none() && traffic(0x1303, &vec![7; length]).is_none());
        }
    }

    #[test]
    fn lengths_and_numbers_are_checked() {
        for (number, length, fits) in [
            (0x1301, 32, true),
            (0x1301, 48, false),
            (0x1302, 48, true),
            (0x1302, 32, false),
            (0x1302, 0, false),
        ] {
            assert_eq!(
                TrafficSecret::new(MeshCipherSuite::of(number).unwrap(), &vec![7; length])
                    .is_some(),
                fits,
                "{number:#x} {length}"
            );
        }
        assert_eq!(
            MeshCipherSuite::of(0x1303),
            None,
            "ChaCha20 is not of the mesh"
        );
        let first = TrafficSecret::new(MeshCipherSuite::Aes256GcmSha384, &[7; 48]).unwrap();
        let second = first.next().unwrap();
        assert_ne!(*first.bytes, *second.bytes);
        assert_eq!(second.bytes.len(), 48);
    }
}

//! Encryption of private keys at rest: AES-256-GCM under a key from the operator. Without that key
//! they are stored unsealed, in a file with mode 0600.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};

use zeroize::Zeroizing;

use crate::error::StoreError;

/// The first bytes of a sealed key. PKCS#8 DER begins with 0x30, so the two cannot be confused.
const MAGIC: &[u8] = b"CANAL1";
/// Length of a store key, in bytes.
/// AES-256 has keys of 256 bits.
const KEY_BYTES: usize = 32;
/// Bytes read from a key file. A file with more than 64 hexadecimal digits and white space is not a
/// key.
const KEY_FILE_BYTES_MAX: u64 = 256;

/// The key under which the store's private keys are sealed.
pub struct StoreKey {
    key: RandomizedNonceKey,
}

impl std::fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StoreKey(secret)")
    }
}

impl StoreKey {
    /// Creates a key from 32 bytes.
    ///
    /// # Errors
    /// Returns [`StoreError::Key`] if there are not exactly 32 bytes.
    pub fn new(bytes: &[u8]) -> Result<Self, StoreError> {
        let key = RandomizedNonceKey::new(&AES_256_GCM, bytes);
        key.map(|key| Self { key }).map_err(|_| StoreError::Key {
            why: format!("{} bytes, not {KEY_BYTES}", bytes.len()),
        })
    }

    /// Reads a key from a file of 32 bytes or of 64 hexadecimal digits.
    ///
    /// # Errors
    /// Returns [`StoreError::Key`] if the file cannot be read or contains neither.
    pub fn read(path: &Path) -> Result<Self, StoreError> {
        let refused = |why: String| StoreError::Key {
            why: format!("{}: {why}", path.display()),
        };
        let mut bytes = Zeroizing::new(Vec::with_capacity(KEY_FILE_BYTES_MAX as usize));
        let file = File::open(path).map_err(|e| refused(e.to_string()))?;
        file.take(KEY_FILE_BYTES_MAX)
            .read_to_end(&mut bytes)
            .map_err(|e| refused(e.to_string()))?;
        if bytes.len() == KEY_BYTES {
            return Self::new(&bytes);
        }
        let text = std::str::from_utf8(&bytes)
            .map(str::trim)
            .unwrap_or_default();
        let digit = |at: usize| {
            text.get(2 * at..2 * at + 2)
                .and_then(|d| u8::from_str_radix(d, 16).ok())
        };
        let read: Option<Vec<u8>> = (0..KEY_BYTES).map(digit).collect();
        match read
            .map(Zeroizing::new)
            .filter(|_| text.len() == 2 * KEY_BYTES)
        {
            Some(bytes) => Self::new(&bytes),
            None => Err(refused(
                "it contains neither 32 bytes nor 64 hexadecimal digits".into(),
            )),
        }
    }

    /// Seals `plain` for the context `place`. It can only be unsealed with the same context.
    ///
    /// # Errors
    /// Returns [`StoreError::Key`] if the encryption fails.
    pub fn seal(&self, plain: &[u8], place: &str) -> Result<Vec<u8>, StoreError> {
        let mut body = plain.to_vec();
        let sealed = self
            .key
            .seal_in_place_append_tag(Aad::from(place.as_bytes()), &mut body);
        let nonce = sealed.map_err(|_| StoreError::Key {
            why: "a key could not be sealed".into(),
        })?;
        Ok([MAGIC, nonce.as_ref(), &body].concat())
    }

    fn open(&self, sealed: &[u8], place: &str) -> Result<Zeroizing<Vec<u8>>, StoreError> {
        let refused = || StoreError::Key {
            why: format!(
                "it is not the one under which {place} was sealed, or the store is damaged"
            ),
        };
        let (nonce, body) = sealed.split_at_checked(NONCE_LEN).ok_or_else(refused)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| refused())?;
        let mut body = Zeroizing::new(body.to_vec());
        let plain = self
            .key
            .open_in_place(nonce, Aad::from(place.as_bytes()), &mut body)
            .map_err(|_| refused())?;
        Ok(Zeroizing::new(plain.to_vec()))
    }
}

impl StoreKey {
    /// Unseals bytes that [`StoreKey::seal`] sealed for the context `place`. Bytes that are not
    /// sealed are returned unchanged.
    ///
    /// # Errors
    /// Returns [`StoreError::Key`] if the key or the context differs, or the bytes are damaged.
    pub fn unseal(&self, bytes: &[u8], place: &str) -> Result<Zeroizing<Vec<u8>>, StoreError> {
        plaintext_key(Some(self), bytes, place)
    }
}

/// Returns true if `bytes` are sealed.
pub fn is_sealed(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// Returns a private key in the form in which it is stored: sealed if the store has a key,
/// unchanged otherwise.
pub(crate) fn sealed(
    key: Option<&StoreKey>,
    plain: &[u8],
    place: &str,
) -> Result<Vec<u8>, StoreError> {
    match key {
        Some(key) => key.seal(plain, place),
        None => Ok(plain.to_vec()),
    }
}

/// Returns the plaintext of a stored private key.
pub(crate) fn plaintext_key(
    key: Option<&StoreKey>,
    bytes: &[u8],
    place: &str,
) -> Result<Zeroizing<Vec<u8>>, StoreError> {
    match (bytes.strip_prefix(MAGIC), key) {
        (None, _) => Ok(Zeroizing::new(bytes.to_vec())),
        (Some(body), Some(key)) => key.open(body, place),
        (Some(_), None) => Err(StoreError::Key {
            why: "the store's keys are sealed, but no key was given".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_value_opens_only_in_its_row_with_its_key() {
        let (a, b) = (
            StoreKey::new(&[1; 32]).unwrap(),
            StoreKey::new(&[2; 32]).unwrap(),
        );
        let lying = sealed(Some(&a), b"secret", "alpha/x").unwrap();
        assert!(is_sealed(&lying) && !lying.windows(6).any(|w| w == b"secret"));
        // The last byte belongs to the authentication tag of AES-GCM.
        let mut torn = lying.clone();
        *torn.last_mut().unwrap() ^= 1;
        for (what, key, bytes, place, want) in [
            (
                "its key and place",
                Some(&a),
                &lying[..],
                "alpha/x",
                Some(&b"secret"[..]),
            ),
            ("another key", Some(&b), &lying, "alpha/x", None),
            ("no key", None, &lying, "alpha/x", None),
            ("another place", Some(&a), &lying, "beta/x", None),
            ("a changed bit", Some(&a), &torn, "alpha/x", None),
            // Nine bytes are MAGIC and a part of the nonce.
            ("cut off", Some(&a), &lying[..9], "alpha/x", None),
            (
                "never sealed",
                Some(&a),
                b"secret",
                "alpha/x",
                Some(b"secret"),
            ),
        ] {
            assert_eq!(
                plaintext_key(key, bytes, place)
                    .ok()
                    .as_ref()
                    .map(|plain| plain.as_slice()),
                want,
                "{what}"
            );
        }
        assert_ne!(
            sealed(Some(&a), b"secret", "p").unwrap(),
            sealed(Some(&a), b"secret", "p").unwrap(),
            "a nonce of its own"
        );
    }

    #[test]
    fn key_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        for (content, ok) in [
            (vec![7; 32], true),
            (format!("{}\n", "ab".repeat(32)).into_bytes(), true),
            (vec![7; 31], false),
            ("zz".repeat(32).into_bytes(), false),
            (Vec::new(), false),
            (vec![b'a'; 4096], false),
        ] {
            std::fs::write(&path, &content).unwrap();
            assert_eq!(StoreKey::read(&path).is_ok(), ok, "{} bytes", content.len());
        }
        assert!(StoreKey::read(&dir.path().join("none")).is_err());
    }
}

//! Secrets at rest in memory: AES-256-GCM under a key of this process's life. What is opened is wiped by who opened it; who may open what is
//! not decided here, and nothing here ever reaches a disk.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use zeroize::Zeroizing;

/// Something cannot be sealed or opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VaultError {
    #[error("the kernel gave no random bytes for the key of this boot")]
    Random,
    #[error("a secret could not be sealed")]
    Seal,
    #[error("a sealed secret does not open: it was sealed by another vault, for another key, or memory is broken")]
    Open,
}

/// The key of this boot. Its memory is locked with all of the process's (`confine`); the key is made here and never leaves.
pub struct Vault {
    key: LessSafeKey,
    /// Of nonces: each is used once in the life of the key.
    sealed: AtomicU64,
}

impl std::fmt::Debug for Vault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vault({} sealed)", self.sealed.load(Relaxed))
    }
}

/// A secret that only its vault can open.
pub struct Sealed {
    nonce: [u8; NONCE_LEN],
    bytes: Box<[u8]>,
}

impl std::fmt::Debug for Sealed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sealed({} bytes)", self.bytes.len())
    }
}

impl Vault {
    /// A vault with a key of its own.
    pub fn new() -> Result<Self, VaultError> {
        let mut key = Zeroizing::new([0; 32]);
        aws_lc_rs::rand::fill(&mut *key).map_err(|_| VaultError::Random)?;
        let key = UnboundKey::new(&AES_256_GCM, &*key).map_err(|_| VaultError::Random)?;
        Ok(Self { key: LessSafeKey::new(key), sealed: AtomicU64::new(0) })
    }

    /// Seals a copy of `secret`; the caller wipes its own. It opens only with the same `label`, which is not secret.
    pub fn seal(&self, secret: &[u8], label: &[u8]) -> Result<Sealed, VaultError> {
        let mut nonce = [0; NONCE_LEN];
        nonce[4..].copy_from_slice(&self.sealed.fetch_add(1, Relaxed).to_be_bytes());
        // With room for the tag, so that the buffer is never moved while it holds the secret.
        let mut bytes = Zeroizing::new(Vec::with_capacity(secret.len() + AES_256_GCM.tag_len()));
        bytes.extend_from_slice(secret);
        let tag = self
            .key
            .seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), Aad::from(label), &mut bytes)
            .map_err(|_| VaultError::Seal)?;
        bytes.extend_from_slice(tag.as_ref());
        Ok(Sealed { nonce, bytes: bytes.as_slice().into() })
    }

    /// The secret, in memory that is wiped when it is dropped.
    pub fn open(&self, sealed: &Sealed, label: &[u8]) -> Result<Zeroizing<Vec<u8>>, VaultError> {
        let mut bytes = Zeroizing::new(sealed.bytes.to_vec());
        let nonce = Nonce::assume_unique_for_key(sealed.nonce);
        let length = self.key.open_in_place(nonce, Aad::from(label), &mut bytes).map_err(|_| VaultError::Open)?.len();
        bytes.truncate(length);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_opens_in_its_vault_under_its_label_and_nowhere_else() {
        let (vault, other) = (Vault::new().unwrap(), Vault::new().unwrap());
        let sealed = vault.seal(b"secret", b"label").unwrap();
        assert_eq!(&**vault.open(&sealed, b"label").unwrap(), b"secret");
        assert_eq!(vault.open(&sealed, b"other"), Err(VaultError::Open));
        assert_eq!(other.open(&sealed, b"label"), Err(VaultError::Open));
        let broken = Sealed { nonce: sealed.nonce, bytes: sealed.bytes.iter().map(|b| b ^ 1).collect() };
        assert_eq!(vault.open(&broken, b"label"), Err(VaultError::Open));
        assert!(!format!("{vault:?} {sealed:?}").contains("secret"));
    }

    #[test]
    fn no_nonce_is_used_twice() {
        let vault = Vault::new().unwrap();
        let (a, b) = (vault.seal(b"same", b"").unwrap(), vault.seal(b"same", b"").unwrap());
        assert!(a.nonce != b.nonce && a.bytes != b.bytes);
    }
}

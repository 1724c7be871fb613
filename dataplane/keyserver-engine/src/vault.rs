//! Secrets at rest in memory: AES-256-GCM under a key that lives as long as the process. Nothing
//! here ever reaches a disk.
//!
//! The caller decides what to open, and wipes it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use zeroize::Zeroizing;

/// Reason why a secret cannot be sealed or opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VaultError {
    #[error("the kernel returned no random bytes for the key of this boot")]
    Random,
    #[error("a secret could not be sealed")]
    Seal,
    #[error(
        "a sealed secret cannot be opened: it was sealed by another vault, for another key, or memory is corrupt"
    )]
    Open,
}

/// The key of this process. It is generated here and never leaves; its memory is locked with all of
/// the process's (`confine`).
pub struct Vault {
    key: LessSafeKey,
    /// Counter of nonces, each of which is used once in the life of the key.
    sealed: AtomicU64,
}

impl std::fmt::Debug for Vault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vault({} sealed)", self.sealed.load(Relaxed))
    }
}

/// A secret that only its vault can open.
pub struct SealedSecret {
    nonce: [u8; NONCE_LEN],
    bytes: Box<[u8]>,
}

impl std::fmt::Debug for SealedSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sealed({} bytes)", self.bytes.len())
    }
}

impl Vault {
    /// Creates a vault with a key of its own.
    ///
    /// # Errors
    /// The kernel provides no random bytes.
    pub fn new() -> Result<Self, VaultError> {
        let mut key = Zeroizing::new([0; 32]);
        aws_lc_rs::rand::fill(&mut *key).map_err(|_| VaultError::Random)?;
        let key = UnboundKey::new(&AES_256_GCM, &*key).map_err(|_| VaultError::Random)?;
        Ok(Self {
            key: LessSafeKey::new(key),
            sealed: AtomicU64::new(0),
        })
    }

    /// Seals a copy of `secret`; the caller wipes the original. The copy opens only with the same
    /// `label`, which is not secret.
    ///
    /// # Errors
    /// The crypto library cannot seal the secret.
    pub fn seal(&self, secret: &[u8], label: &[u8]) -> Result<SealedSecret, VaultError> {
        let mut nonce = [0; NONCE_LEN];
        nonce[4..].copy_from_slice(&self.sealed.fetch_add(1, Relaxed).to_be_bytes());
        // With capacity for the tag, so that the buffer is never moved while it contains the
        // secret.
        let mut bytes = Zeroizing::new(Vec::with_capacity(secret.len() + AES_256_GCM.tag_len()));
        bytes.extend_from_slice(secret);
        let tag = self
            .key
            .seal_in_place_separate_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(label),
                &mut bytes,
            )
            .map_err(|_| VaultError::Seal)?;
        bytes.extend_from_slice(tag.as_ref());
        Ok(SealedSecret {
            nonce,
            bytes: bytes.as_slice().into(),
        })
    }

    /// Opens a secret into memory that is wiped when it is dropped.
    ///
    /// # Errors
    /// The secret is from another vault or has another label, or memory is corrupt.
    pub fn open(
        &self,
        sealed: &SealedSecret,
        label: &[u8],
    ) -> Result<Zeroizing<Vec<u8>>, VaultError> {
        let mut bytes = Zeroizing::new(sealed.bytes.to_vec());
        let nonce = Nonce::assume_unique_for_key(sealed.nonce);
        let length = self
            .key
            .open_in_place(nonce, Aad::from(label), &mut bytes)
            .map_err(|_| VaultError::Open)?
            .len();
        bytes.truncate(length);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_key_opens_only_in_its_vault_under_its_label() {
        let (vault, other) = (Vault::new().unwrap(), Vault::new().unwrap());
        let sealed = vault.seal(b"secret", b"label").unwrap();
        assert_eq!(&**vault.open(&sealed, b"label").unwrap(), b"secret");
        assert_eq!(vault.open(&sealed, b"other"), Err(VaultError::Open));
        assert_eq!(other.open(&sealed, b"label"), Err(VaultError::Open));
        let broken = SealedSecret {
            nonce: sealed.nonce,
            bytes: sealed.bytes.iter().map(|b| b ^ 1).collect(),
        };
        assert_eq!(vault.open(&broken, b"label"), Err(VaultError::Open));
        assert!(!format!("{vault:?} {sealed:?}").contains("secret"));
    }

    #[test]
    fn no_nonce_is_used_twice() {
        let vault = Vault::new().unwrap();
        let (a, b) = (
            vault.seal(b"same", b"").unwrap(),
            vault.seal(b"same", b"").unwrap(),
        );
        assert!(a.nonce != b.nonce && a.bytes != b.bytes);
    }
}

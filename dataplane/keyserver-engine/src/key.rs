//! [`PrivateKey`]: generated or read once, sealed, and in plaintext only while it signs. Certificates and entitlements are in other
//! modules.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    self, ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair,
    EcdsaSigningAlgorithm, KeyPair, RsaEncoding, RsaKeyPair,
};
use canal_model::trust::KeyAlgorithm;
use rustls::sign::{Signer, SigningKey};
use rustls::{SignatureAlgorithm, SignatureScheme};
use rustls_pki_types::{AlgorithmIdentifier, PrivateKeyDer, SubjectPublicKeyInfoDer, alg_id};

use crate::vault::{SealedSecret, Vault, VaultError};

/// Longest private key that is read, in bytes of DER; an RSA-8192 key is shorter. Such a key has
/// about 4.7 kB.
const KEY_BYTES_MAX: usize = 8 << 10;

/// Plaintext keys of one thread at once, at most. A process that is read at a random instant shows
/// no more keys than that for each thread. Nobody measured how many a gateway's traffic uses at
/// once.
pub const OPEN_MAX: usize = 32;
/// Longest time for which a key stays in plaintext, however often it is used. Decrypting it again
/// costs far less than a second of signatures.
pub const OPEN_TIME_MAX: Duration = Duration::from_secs(1);

/// Reason why a key cannot be created or used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PrivateKeyError {
    #[error(transparent)]
    Vault(#[from] VaultError),
    #[error("no key could be created")]
    Generate,
    #[error("not an accepted private key; fix: use RSA of 2048 to 8192 bits, ECDSA P-256 or P-384")]
    Form,
    #[error("the key cannot sign with this scheme")]
    Scheme,
    #[error("the crypto library refused to sign")]
    Sign,
}

/// Queue in which a key's operations wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OperationQueue {
    Ecdsa,
    Rsa,
}

impl OperationQueue {
    /// Both queues, in the order of their indices.
    pub const ALL: [OperationQueue; 2] = [OperationQueue::Ecdsa, OperationQueue::Rsa];

    /// Returns the value of the label `algorithm`.
    pub fn name(self) -> &'static str {
        match self {
            OperationQueue::Ecdsa => "ecdsa",
            OperationQueue::Rsa => "rsa",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyType {
    P256,
    P384,
    Rsa,
}

/// A sealed private key. Its public half is the label of the seal.
pub struct PrivateKey {
    /// Number of the key, unique in the process.
    number: u64,
    form: KeyType,
    public: Box<[u8]>,
    sealed: SealedSecret,
    vault: Arc<Vault>,
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivateKey({:?}, sealed)", self.form)
    }
}

/// A key in plaintext. The crypto library wipes its memory when it is dropped.
enum PlaintextKey {
    Ecdsa(EcdsaKeyPair),
    Rsa(RsaKeyPair),
}

impl PrivateKey {
    /// Generates a key. An RSA key takes a tenth of a second of CPU.
    ///
    /// # Errors
    /// The crypto library cannot generate the key, or the vault cannot seal it.
    pub fn generate(vault: &Arc<Vault>, algorithm: KeyAlgorithm) -> Result<Self, PrivateKeyError> {
        match algorithm {
            KeyAlgorithm::EcdsaP256 => {
                let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING)
                    .map_err(|_| PrivateKeyError::Generate)?;
                Self::ecdsa(vault, KeyType::P256, &pair)
            }
            KeyAlgorithm::Rsa2048 => Self::rsa(
                vault,
                &RsaKeyPair::generate(KeySize::Rsa2048).map_err(|_| PrivateKeyError::Generate)?,
            ),
        }
    }

    /// Seals a key that was read from a file: PKCS#8, PKCS#1 or SEC1. The caller wipes its own
    /// copy.
    ///
    /// # Errors
    /// The bytes are no key of a supported type and size, or the vault cannot seal the key.
    pub fn read(vault: &Arc<Vault>, der: &PrivateKeyDer<'_>) -> Result<Self, PrivateKeyError> {
        let bytes = der.secret_der();
        if bytes.len() > KEY_BYTES_MAX {
            return Err(PrivateKeyError::Form);
        }
        if let Ok(pair) = EcdsaKeyPair::from_private_key_der(&ECDSA_P256_SHA256_ASN1_SIGNING, bytes)
        {
            return Self::ecdsa(vault, KeyType::P256, &pair);
        }
        if let Ok(pair) = EcdsaKeyPair::from_private_key_der(&ECDSA_P384_SHA384_ASN1_SIGNING, bytes)
        {
            return Self::ecdsa(vault, KeyType::P384, &pair);
        }
        let pair = RsaKeyPair::from_pkcs8(bytes)
            .or_else(|_| RsaKeyPair::from_der(bytes))
            .map_err(|_| PrivateKeyError::Form)?;
        Self::rsa(vault, &pair)
    }

    fn ecdsa(
        vault: &Arc<Vault>,
        form: KeyType,
        pair: &EcdsaKeyPair,
    ) -> Result<Self, PrivateKeyError> {
        // The document wipes itself when it is dropped.
        let secret = pair.to_pkcs8v1().map_err(|_| PrivateKeyError::Generate)?;
        Self::sealed(vault, form, pair.public_key().as_ref(), secret.as_ref())
    }

    fn rsa(vault: &Arc<Vault>, pair: &RsaKeyPair) -> Result<Self, PrivateKeyError> {
        let secret = pair.as_der().map_err(|_| PrivateKeyError::Generate)?;
        Self::sealed(
            vault,
            KeyType::Rsa,
            pair.public_key().as_ref(),
            secret.as_ref(),
        )
    }

    fn sealed(
        vault: &Arc<Vault>,
        form: KeyType,
        public: &[u8],
        secret: &[u8],
    ) -> Result<Self, PrivateKeyError> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let sealed = vault.seal(secret, public)?;
        Ok(Self {
            number: LAST.fetch_add(1, Relaxed),
            form,
            public: public.into(),
            sealed,
            vault: vault.clone(),
        })
    }

    /// Returns the queue of the key's operations.
    pub fn queue(&self) -> OperationQueue {
        match self.form {
            KeyType::P256 | KeyType::P384 => OperationQueue::Ecdsa,
            KeyType::Rsa => OperationQueue::Rsa,
        }
    }

    /// Returns whether the key has the algorithm that a tenant's policy requires.
    pub fn is(&self, algorithm: KeyAlgorithm) -> bool {
        matches!(
            (self.form, algorithm),
            (KeyType::P256, KeyAlgorithm::EcdsaP256) | (KeyType::Rsa, KeyAlgorithm::Rsa2048)
        )
    }

    /// Returns the public key in the encoding of X.509.
    pub fn public(&self) -> SubjectPublicKeyInfoDer<'static> {
        rustls::sign::public_key_to_spki(&self.identifier(), &*self.public)
    }

    fn identifier(&self) -> AlgorithmIdentifier {
        match self.form {
            KeyType::P256 => alg_id::ECDSA_P256,
            KeyType::P384 => alg_id::ECDSA_P384,
            KeyType::Rsa => alg_id::RSA_ENCRYPTION,
        }
    }

    /// Returns the schemes with which the key signs, best first.
    pub fn schemes(&self) -> &'static [SignatureScheme] {
        match self.form {
            KeyType::P256 => &[SignatureScheme::ECDSA_NISTP256_SHA256],
            KeyType::P384 => &[SignatureScheme::ECDSA_NISTP384_SHA384],
            KeyType::Rsa => &[
                SignatureScheme::RSA_PSS_SHA256,
                SignatureScheme::RSA_PSS_SHA384,
                SignatureScheme::RSA_PSS_SHA512,
                SignatureScheme::RSA_PKCS1_SHA256,
                SignatureScheme::RSA_PKCS1_SHA384,
                SignatureScheme::RSA_PKCS1_SHA512,
            ],
        }
    }

    /// Signs `message`, which is hashed here. The key is opened, or taken from the [`SigningBatch`]
    /// in progress on this thread. Outside of a batch nothing stays open.
    ///
    /// # Errors
    /// The key does not sign with `scheme`, does not open, or the crypto library refuses to sign.
    pub fn sign(
        &self,
        scheme: SignatureScheme,
        message: &[u8],
    ) -> Result<Vec<u8>, PrivateKeyError> {
        if !self.schemes().contains(&scheme) {
            return Err(PrivateKeyError::Scheme);
        }
        self.plaintext()?.sign(scheme, message)
    }

    fn plaintext(&self) -> Result<Rc<PlaintextKey>, PrivateKeyError> {
        if let Some(known) = OPENED.with_borrow_mut(|o| o.find(self.number)) {
            return Ok(known);
        }
        let open = Rc::new(self.open()?);
        OPENED.with_borrow_mut(|o| o.keep(self, &open));
        Ok(open)
    }

    fn open(&self) -> Result<PlaintextKey, PrivateKeyError> {
        let secret = self.vault.open(&self.sealed, &self.public)?;
        let ecdsa = |algorithm: &'static EcdsaSigningAlgorithm| {
            EcdsaKeyPair::from_pkcs8(algorithm, &secret).map(PlaintextKey::Ecdsa)
        };
        let open = match self.form {
            KeyType::P256 => ecdsa(&ECDSA_P256_SHA256_ASN1_SIGNING),
            KeyType::P384 => ecdsa(&ECDSA_P384_SHA384_ASN1_SIGNING),
            KeyType::Rsa => RsaKeyPair::from_pkcs8(&secret).map(PlaintextKey::Rsa),
        };
        open.map_err(|_| PrivateKeyError::Form)
    }
}

impl PlaintextKey {
    fn sign(&self, scheme: SignatureScheme, message: &[u8]) -> Result<Vec<u8>, PrivateKeyError> {
        let random = SystemRandom::new();
        match self {
            PlaintextKey::Ecdsa(pair) => pair
                .sign(&random, message)
                .map(|s| s.as_ref().to_vec())
                .map_err(|_| PrivateKeyError::Sign),
            PlaintextKey::Rsa(pair) => {
                let mut signature = vec![0; pair.public_modulus_len()];
                pair.sign(padding(scheme)?, &random, message, &mut signature)
                    .map_err(|_| PrivateKeyError::Sign)?;
                Ok(signature)
            }
        }
    }
}

fn padding(scheme: SignatureScheme) -> Result<&'static dyn RsaEncoding, PrivateKeyError> {
    Ok(match scheme {
        SignatureScheme::RSA_PSS_SHA256 => &signature::RSA_PSS_SHA256,
        SignatureScheme::RSA_PSS_SHA384 => &signature::RSA_PSS_SHA384,
        SignatureScheme::RSA_PSS_SHA512 => &signature::RSA_PSS_SHA512,
        SignatureScheme::RSA_PKCS1_SHA256 => &signature::RSA_PKCS1_SHA256,
        SignatureScheme::RSA_PKCS1_SHA384 => &signature::RSA_PKCS1_SHA384,
        SignatureScheme::RSA_PKCS1_SHA512 => &signature::RSA_PKCS1_SHA512,
        _ => return Err(PrivateKeyError::Scheme),
    })
}

/// A plaintext key in the cache of this thread.
struct CachedPlaintextKey {
    number: u64,
    queue: OperationQueue,
    open: Rc<PlaintextKey>,
    since: Instant,
    used: Instant,
}

#[derive(Default)]
struct PlaintextKeyCache {
    batch: bool,
    linger: Duration,
    keys: Vec<CachedPlaintextKey>,
}

thread_local! {
    static OPENED: RefCell<PlaintextKeyCache> = RefCell::default();
}

impl PlaintextKeyCache {
    fn find(&mut self, number: u64) -> Option<Rc<PlaintextKey>> {
        let key = self.keys.iter_mut().find(|h| h.number == number)?;
        key.used = Instant::now();
        Some(key.open.clone())
    }

    fn keep(&mut self, key: &PrivateKey, open: &Rc<PlaintextKey>) {
        if !self.batch {
            return;
        }
        if self.keys.len() >= OPEN_MAX {
            self.keys.remove(0);
        }
        let now = Instant::now();
        self.keys.push(CachedPlaintextKey {
            number: key.number,
            queue: key.queue(),
            open: open.clone(),
            since: now,
            used: now,
        });
    }

    /// Wipes keys that may not stay open: between batches everything but RSA keys that were used a
    /// moment ago.
    fn wipe(&mut self) {
        let linger = self.linger;
        self.keys.retain(|h| {
            h.queue == OperationQueue::Rsa
                && h.used.elapsed() < linger
                && h.since.elapsed() < OPEN_TIME_MAX
        });
    }
}

/// A batch of operations of this thread: a key that several of them use is opened once. At the end
/// of the batch keys are wiped.
///
/// Opening an RSA-2048 key costs four times as much as its signature: the crypto library always
/// checks the key and computes Montgomery constants and blinding. An RSA key therefore stays open
/// for `linger` after a batch; zero: it does not. ECDSA keys never do.
#[derive(Debug)]
pub struct SigningBatch(std::marker::PhantomData<Rc<()>>);

impl SigningBatch {
    /// Begins a batch; a thread has one at a time.
    pub fn begin(linger: Duration) -> Self {
        OPENED.with_borrow_mut(|o| (o.batch, o.linger) = (true, linger));
        Self(std::marker::PhantomData)
    }
}

impl Drop for SigningBatch {
    fn drop(&mut self) {
        OPENED.with_borrow_mut(|o| {
            o.batch = false;
            o.wipe();
        });
    }
}

/// Wipes plaintext keys that this thread has not used for longer than their idle time. Returns
/// whether it still has some.
pub fn wipe_idle() -> bool {
    OPENED.with_borrow_mut(|o| {
        o.wipe();
        !o.keys.is_empty()
    })
}

/// Adapts a key to the signing interface of rustls.
#[derive(Debug, Clone)]
pub struct TlsKey(pub Arc<PrivateKey>);

#[derive(Debug)]
struct TlsSigner {
    key: Arc<PrivateKey>,
    scheme: SignatureScheme,
}

impl SigningKey for TlsKey {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        let scheme = *self.0.schemes().iter().find(|s| offered.contains(s))?;
        Some(Box::new(TlsSigner {
            key: self.0.clone(),
            scheme,
        }))
    }
    fn public_key(&self) -> Option<SubjectPublicKeyInfoDer<'_>> {
        Some(self.0.public())
    }
    fn algorithm(&self) -> SignatureAlgorithm {
        match self.0.queue() {
            OperationQueue::Ecdsa => SignatureAlgorithm::ECDSA,
            OperationQueue::Rsa => SignatureAlgorithm::RSA,
        }
    }
}

impl Signer for TlsSigner {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        self.key
            .sign(self.scheme, message)
            .map_err(|e| rustls::Error::General(e.to_string()))
    }
    fn scheme(&self) -> SignatureScheme {
        self.scheme
    }
}

/// Adapts a key to the signing of certificate requests (PKCS#10).
pub struct RequestKey<'a>(pub &'a PrivateKey);

impl rcgen::PublicKeyData for RequestKey<'_> {
    fn der_bytes(&self) -> &[u8] {
        &self.0.public
    }
    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        match self.0.form {
            KeyType::P256 => &rcgen::PKCS_ECDSA_P256_SHA256,
            KeyType::P384 => &rcgen::PKCS_ECDSA_P384_SHA384,
            KeyType::Rsa => &rcgen::PKCS_RSA_SHA256,
        }
    }
}

impl rcgen::SigningKey for RequestKey<'_> {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let scheme = match self.0.form {
            KeyType::P256 => SignatureScheme::ECDSA_NISTP256_SHA256,
            KeyType::P384 => SignatureScheme::ECDSA_NISTP384_SHA384,
            KeyType::Rsa => SignatureScheme::RSA_PKCS1_SHA256,
        };
        self.0
            .sign(scheme, message)
            .map_err(|_| rcgen::Error::RingUnspecified)
    }
}

#[cfg(test)]
mod tests;

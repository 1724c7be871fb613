//! Private keys: made or read once, sealed, and open only while they sign. Certificates and who may use a key are elsewhere.

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
    self, ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair, EcdsaSigningAlgorithm, KeyPair, RsaEncoding,
    RsaKeyPair,
};
use canal_model::trust::KeyAlgorithm;
use rustls::sign::{Signer, SigningKey};
use rustls::{SignatureAlgorithm, SignatureScheme};
use rustls_pki_types::{AlgorithmIdentifier, PrivateKeyDer, SubjectPublicKeyInfoDer, alg_id};

use crate::vault::{Sealed, Vault, VaultError};

/// Longest private key that is read, bytes of DER: RSA-8192's is less.
const KEY_BYTES_MAX: usize = 8 << 10;

/// Keys open at once on one thread, at most.
pub const OPEN_MAX: usize = 32;
/// No key stays open longer, however busy it is.
pub const OPEN_TIME_MAX: Duration = Duration::from_secs(1);

/// Why a key cannot be had or used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error(transparent)]
    Vault(#[from] VaultError),
    #[error("no key could be made")]
    Generate,
    #[error("not a private key that is taken: RSA of 2048 to 8192 bits, ECDSA P-256 or P-384")]
    Form,
    #[error("the key cannot sign with this scheme")]
    Scheme,
    #[error("the crypto library refused to sign")]
    Sign,
}

/// Which queue a key's operations wait in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    Ecdsa,
    Rsa,
}

impl Lane {
    /// Both.
    pub const ALL: [Lane; 2] = [Lane::Ecdsa, Lane::Rsa];

    /// The label `algorithm`.
    pub fn name(self) -> &'static str {
        match self {
            Lane::Ecdsa => "ecdsa",
            Lane::Rsa => "rsa",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    P256,
    P384,
    Rsa,
}

/// A private key at rest. Its public half is the seal's label.
pub struct PrivateKey {
    /// Unique in the process.
    number: u64,
    form: Form,
    public: Box<[u8]>,
    sealed: Sealed,
    vault: Arc<Vault>,
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivateKey({:?}, sealed)", self.form)
    }
}

/// A key in the clear. The crypto library wipes its memory when it is dropped.
enum Open {
    Ecdsa(EcdsaKeyPair),
    Rsa(RsaKeyPair),
}

impl PrivateKey {
    /// A new key. RSA takes a tenth of a second of CPU.
    pub fn generate(vault: &Arc<Vault>, algorithm: KeyAlgorithm) -> Result<Self, KeyError> {
        match algorithm {
            KeyAlgorithm::EcdsaP256 => {
                let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING).map_err(|_| KeyError::Generate)?;
                Self::ecdsa(vault, Form::P256, &pair)
            }
            KeyAlgorithm::Rsa2048 => Self::rsa(vault, &RsaKeyPair::generate(KeySize::Rsa2048).map_err(|_| KeyError::Generate)?),
        }
    }

    /// Seals a key that was read from a file: PKCS#8, PKCS#1 or SEC1. The caller's copy is the caller's to wipe.
    pub fn read(vault: &Arc<Vault>, der: &PrivateKeyDer<'_>) -> Result<Self, KeyError> {
        let bytes = der.secret_der();
        if bytes.len() > KEY_BYTES_MAX {
            return Err(KeyError::Form);
        }
        if let Ok(pair) = EcdsaKeyPair::from_private_key_der(&ECDSA_P256_SHA256_ASN1_SIGNING, bytes) {
            return Self::ecdsa(vault, Form::P256, &pair);
        }
        if let Ok(pair) = EcdsaKeyPair::from_private_key_der(&ECDSA_P384_SHA384_ASN1_SIGNING, bytes) {
            return Self::ecdsa(vault, Form::P384, &pair);
        }
        let pair = RsaKeyPair::from_pkcs8(bytes).or_else(|_| RsaKeyPair::from_der(bytes)).map_err(|_| KeyError::Form)?;
        Self::rsa(vault, &pair)
    }

    fn ecdsa(vault: &Arc<Vault>, form: Form, pair: &EcdsaKeyPair) -> Result<Self, KeyError> {
        // The document wipes itself.
        let secret = pair.to_pkcs8v1().map_err(|_| KeyError::Generate)?;
        Self::sealed(vault, form, pair.public_key().as_ref(), secret.as_ref())
    }

    fn rsa(vault: &Arc<Vault>, pair: &RsaKeyPair) -> Result<Self, KeyError> {
        let secret = pair.as_der().map_err(|_| KeyError::Generate)?;
        Self::sealed(vault, Form::Rsa, pair.public_key().as_ref(), secret.as_ref())
    }

    fn sealed(vault: &Arc<Vault>, form: Form, public: &[u8], secret: &[u8]) -> Result<Self, KeyError> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let sealed = vault.seal(secret, public)?;
        Ok(Self { number: LAST.fetch_add(1, Relaxed), form, public: public.into(), sealed, vault: vault.clone() })
    }

    /// The queue of its operations.
    pub fn lane(&self) -> Lane {
        match self.form {
            Form::P256 | Form::P384 => Lane::Ecdsa,
            Form::Rsa => Lane::Rsa,
        }
    }

    /// Whether it is of the kind that a tenant's policy asks for.
    pub fn is(&self, algorithm: KeyAlgorithm) -> bool {
        matches!((self.form, algorithm), (Form::P256, KeyAlgorithm::EcdsaP256) | (Form::Rsa, KeyAlgorithm::Rsa2048))
    }

    /// As X.509 writes it.
    pub fn public(&self) -> SubjectPublicKeyInfoDer<'static> {
        rustls::sign::public_key_to_spki(&self.identifier(), &*self.public)
    }

    fn identifier(&self) -> AlgorithmIdentifier {
        match self.form {
            Form::P256 => alg_id::ECDSA_P256,
            Form::P384 => alg_id::ECDSA_P384,
            Form::Rsa => alg_id::RSA_ENCRYPTION,
        }
    }

    /// The schemes it signs with, best first.
    pub fn schemes(&self) -> &'static [SignatureScheme] {
        match self.form {
            Form::P256 => &[SignatureScheme::ECDSA_NISTP256_SHA256],
            Form::P384 => &[SignatureScheme::ECDSA_NISTP384_SHA384],
            Form::Rsa => &[
                SignatureScheme::RSA_PSS_SHA256,
                SignatureScheme::RSA_PSS_SHA384,
                SignatureScheme::RSA_PSS_SHA512,
                SignatureScheme::RSA_PKCS1_SHA256,
                SignatureScheme::RSA_PKCS1_SHA384,
                SignatureScheme::RSA_PKCS1_SHA512,
            ],
        }
    }

    /// Signs `message`, which is hashed here: opens the key, or takes it from the [`Batch`] under way on this thread, and outside of one leaves nothing open.
    pub fn sign(&self, scheme: SignatureScheme, message: &[u8]) -> Result<Vec<u8>, KeyError> {
        if !self.schemes().contains(&scheme) {
            return Err(KeyError::Scheme);
        }
        self.opened()?.sign(scheme, message)
    }

    fn opened(&self) -> Result<Rc<Open>, KeyError> {
        if let Some(known) = OPENED.with_borrow_mut(|o| o.find(self.number)) {
            return Ok(known);
        }
        let open = Rc::new(self.open()?);
        OPENED.with_borrow_mut(|o| o.keep(self, &open));
        Ok(open)
    }

    fn open(&self) -> Result<Open, KeyError> {
        let secret = self.vault.open(&self.sealed, &self.public)?;
        let ecdsa = |algorithm: &'static EcdsaSigningAlgorithm| EcdsaKeyPair::from_pkcs8(algorithm, &secret).map(Open::Ecdsa);
        let open = match self.form {
            Form::P256 => ecdsa(&ECDSA_P256_SHA256_ASN1_SIGNING),
            Form::P384 => ecdsa(&ECDSA_P384_SHA384_ASN1_SIGNING),
            Form::Rsa => RsaKeyPair::from_pkcs8(&secret).map(Open::Rsa),
        };
        open.map_err(|_| KeyError::Form)
    }
}

impl Open {
    fn sign(&self, scheme: SignatureScheme, message: &[u8]) -> Result<Vec<u8>, KeyError> {
        let random = SystemRandom::new();
        match self {
            Open::Ecdsa(pair) => pair.sign(&random, message).map(|s| s.as_ref().to_vec()).map_err(|_| KeyError::Sign),
            Open::Rsa(pair) => {
                let mut signature = vec![0; pair.public_modulus_len()];
                pair.sign(padding(scheme)?, &random, message, &mut signature).map_err(|_| KeyError::Sign)?;
                Ok(signature)
            }
        }
    }
}

fn padding(scheme: SignatureScheme) -> Result<&'static dyn RsaEncoding, KeyError> {
    Ok(match scheme {
        SignatureScheme::RSA_PSS_SHA256 => &signature::RSA_PSS_SHA256,
        SignatureScheme::RSA_PSS_SHA384 => &signature::RSA_PSS_SHA384,
        SignatureScheme::RSA_PSS_SHA512 => &signature::RSA_PSS_SHA512,
        SignatureScheme::RSA_PKCS1_SHA256 => &signature::RSA_PKCS1_SHA256,
        SignatureScheme::RSA_PKCS1_SHA384 => &signature::RSA_PKCS1_SHA384,
        SignatureScheme::RSA_PKCS1_SHA512 => &signature::RSA_PKCS1_SHA512,
        _ => return Err(KeyError::Scheme),
    })
}

/// A key in the clear on this thread.
struct Held {
    number: u64,
    lane: Lane,
    open: Rc<Open>,
    since: Instant,
    used: Instant,
}

#[derive(Default)]
struct Opened {
    batch: bool,
    linger: Duration,
    held: Vec<Held>,
}

thread_local! {
    static OPENED: RefCell<Opened> = RefCell::default();
}

impl Opened {
    fn find(&mut self, number: u64) -> Option<Rc<Open>> {
        let held = self.held.iter_mut().find(|h| h.number == number)?;
        held.used = Instant::now();
        Some(held.open.clone())
    }

    fn keep(&mut self, key: &PrivateKey, open: &Rc<Open>) {
        if !self.batch {
            return;
        }
        if self.held.len() >= OPEN_MAX {
            self.held.remove(0);
        }
        let now = Instant::now();
        self.held.push(Held { number: key.number, lane: key.lane(), open: open.clone(), since: now, used: now });
    }

    /// Wipes what may not stay open: between batches everything but RSA keys that were used a moment ago.
    fn wipe(&mut self) {
        let linger = self.linger;
        self.held.retain(|h| h.lane == Lane::Rsa && h.used.elapsed() < linger && h.since.elapsed() < OPEN_TIME_MAX);
    }
}

/// While it lives, a key that several operations of this thread use is opened once. At its end keys are wiped.
///
/// To open an RSA-2048 key costs four times what its signature does: the crypto library checks the key, computes Montgomery constants and
/// blinding anew, and has no way to leave that out. So an RSA key stays open after a batch for `linger`; zero: it does not. ECDSA keys never do.
#[derive(Debug)]
pub struct Batch(std::marker::PhantomData<Rc<()>>);

impl Batch {
    /// One per thread at a time.
    pub fn begin(linger: Duration) -> Self {
        OPENED.with_borrow_mut(|o| (o.batch, o.linger) = (true, linger));
        Self(std::marker::PhantomData)
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        OPENED.with_borrow_mut(|o| {
            o.batch = false;
            o.wipe();
        });
    }
}

/// Wipes keys that this thread has not used for their time; true: some are open still.
pub fn wipe_idle() -> bool {
    OPENED.with_borrow_mut(|o| {
        o.wipe();
        !o.held.is_empty()
    })
}

/// As rustls asks for signatures.
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
        Some(Box::new(TlsSigner { key: self.0.clone(), scheme }))
    }
    fn public_key(&self) -> Option<SubjectPublicKeyInfoDer<'_>> {
        Some(self.0.public())
    }
    fn algorithm(&self) -> SignatureAlgorithm {
        match self.0.lane() {
            Lane::Ecdsa => SignatureAlgorithm::ECDSA,
            Lane::Rsa => SignatureAlgorithm::RSA,
        }
    }
}

impl Signer for TlsSigner {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        self.key.sign(self.scheme, message).map_err(|e| rustls::Error::General(e.to_string()))
    }
    fn scheme(&self) -> SignatureScheme {
        self.scheme
    }
}

/// As certificate requests are signed (PKCS#10).
pub struct RequestKey<'a>(pub &'a PrivateKey);

impl rcgen::PublicKeyData for RequestKey<'_> {
    fn der_bytes(&self) -> &[u8] {
        &self.0.public
    }
    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        match self.0.form {
            Form::P256 => &rcgen::PKCS_ECDSA_P256_SHA256,
            Form::P384 => &rcgen::PKCS_ECDSA_P384_SHA384,
            Form::Rsa => &rcgen::PKCS_RSA_SHA256,
        }
    }
}

impl rcgen::SigningKey for RequestKey<'_> {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let scheme = match self.0.form {
            Form::P256 => SignatureScheme::ECDSA_NISTP256_SHA256,
            Form::P384 => SignatureScheme::ECDSA_NISTP384_SHA384,
            Form::Rsa => SignatureScheme::RSA_PKCS1_SHA256,
        };
        self.0.sign(scheme, message).map_err(|_| rcgen::Error::RingUnspecified)
    }
}

#[cfg(test)]
mod tests;

//! Public keys of a JSON Web Key Set (RFC 7517), and signature verification with them (RFC 7518
//! §3).
//!
//! Symmetric keys are ignored: a public key must never be taken for a shared secret. Start with
//! [`KeySet::check`]; it verifies nothing itself, but names the key to verify with next.

use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA256};
use aws_lc_rs::signature::RsaPublicKeyComponents as PublicKeyComponents;
use aws_lc_rs::signature::{self, UnparsedPublicKey};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;

/// Most keys of one key set; further ones are ignored. A set has a key or two for each algorithm,
/// and twice as many during a rotation; nobody measured more.
pub(crate) const KEYS_MAX: usize = 64;
/// Most keys that are tried for a token that names none of them. Only keys of the token's kind
/// count: an old and a new one during a rotation. Each costs a verification of the signature.
pub(crate) const UNNAMED_KEYS_MAX: usize = 4;
/// Permitted sizes of an RSA modulus in bytes: 2048 to 8192 bits, as the verification requires.
const MODULUS_BYTES: std::ops::RangeInclusive<usize> = 256..=1024;

/// Signature algorithm of a token. Neither `none` nor HMAC is supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JwsAlgorithm {
    Rs256,
    Rs384,
    Rs512,
    Ps256,
    Ps384,
    Ps512,
    Es256,
    Es384,
    EdDsa,
}

impl JwsAlgorithm {
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "RS256" => Self::Rs256,
            "RS384" => Self::Rs384,
            "RS512" => Self::Rs512,
            "PS256" => Self::Ps256,
            "PS384" => Self::Ps384,
            "PS512" => Self::Ps512,
            "ES256" => Self::Es256,
            "ES384" => Self::Es384,
            "EdDSA" => Self::EdDsa,
            _ => return None,
        })
    }
}

#[derive(Debug)]
enum Material {
    Rsa {
        n: Vec<u8>,
        e: Vec<u8>,
    },
    /// Public key as an uncompressed point.
    P256(Vec<u8>),
    P384(Vec<u8>),
    Ed25519(Vec<u8>),
}

impl Material {
    fn digest(&self) -> KeyDigest {
        let (kind, parts): (u8, [&[u8]; 2]) = match self {
            Material::Rsa { n, e } => (0, [n, e]),
            Material::P256(key) => (1, [key, &[]]),
            Material::P384(key) => (2, [key, &[]]),
            Material::Ed25519(key) => (3, [key, &[]]),
        };
        let mut context = Context::new(&SHA256);
        context.update(&[kind]);
        for part in parts {
            context.update(&(part.len() as u64).to_be_bytes());
            context.update(part);
        }
        let mut digest = [0; 16];
        digest.copy_from_slice(&context.finish().as_ref()[..16]);
        digest
    }
}

/// Hash of a key's material, so that equal keys of several key sets are one key.
pub(crate) type KeyDigest = [u8; 16];

/// One public key of a set.
#[derive(Debug)]
pub(crate) struct JwkKey {
    pub(crate) digest: KeyDigest,
    id: Option<String>,
    /// The only algorithm that the key may be used with, if the key names one.
    algorithm: Option<JwsAlgorithm>,
    material: Material,
}

/// Usable keys of one JSON Web Key Set.
#[derive(Debug, Default)]
pub(crate) struct KeySet {
    keys: Vec<Arc<JwkKey>>,
    ignored: usize,
}

#[derive(Deserialize)]
struct SetJson {
    #[serde(default)]
    keys: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
struct KeyJson {
    kty: String,
    kid: Option<String>,
    #[serde(rename = "use")]
    purpose: Option<String>,
    alg: Option<String>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

/// Result of comparing a token with a key set, as far as it is known.
#[derive(Debug)]
pub(crate) enum SignatureCheck {
    Signed,
    NotSigned,
    /// No key matches the key ID and the algorithm.
    NoKey,
    /// The token names no key, [`UNNAMED_KEYS_MAX`] keys were tried, and there are more.
    TooMany,
    /// The signature must be verified with this key next.
    Try(Arc<JwkKey>),
}

impl KeySet {
    /// Parses a key set. Unusable keys are ignored; text that is not a key set yields no keys.
    pub(crate) fn parse(json: &str) -> Self {
        let Ok(set) = serde_json::from_str::<SetJson>(json) else {
            return Self {
                keys: Vec::new(),
                ignored: 1,
            };
        };
        let all = set.keys.len();
        let keys: Vec<Arc<JwkKey>> = set
            .keys
            .into_iter()
            .filter_map(JwkKey::read)
            .take(KEYS_MAX)
            .map(Arc::new)
            .collect();
        Self {
            ignored: all - keys.len(),
            keys,
        }
    }

    pub(crate) fn ignored(&self) -> usize {
        self.ignored
    }

    /// Checks the candidate keys: those with this key ID (several while keys are rotated), then a
    /// few without an ID. `known` returns the result of an earlier verification with a key, if
    /// there was one.
    pub(crate) fn check(
        &self,
        kid: Option<&str>,
        algorithm: JwsAlgorithm,
        known: impl Fn(&JwkKey) -> Option<bool>,
    ) -> SignatureCheck {
        let fitting = || self.keys.iter().filter(|key| key.is_for(algorithm));
        let is_named = |key: &JwkKey| kid.is_some() && key.id.as_deref() == kid;
        let named = fitting().filter(|key| is_named(key));
        let mut unnamed = fitting().filter(|key| kid.is_none() || key.id.is_none());
        let mut checked = SignatureCheck::NoKey;
        for key in named.chain(unnamed.by_ref().take(UNNAMED_KEYS_MAX)) {
            match known(key) {
                Some(true) => return SignatureCheck::Signed,
                Some(false) => checked = SignatureCheck::NotSigned,
                None => return SignatureCheck::Try(key.clone()),
            }
        }
        if unnamed.next().is_some() {
            SignatureCheck::TooMany
        } else {
            checked
        }
    }
}

fn bytes(text: Option<&String>) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text?.trim_end_matches('=')).ok()
}

impl JwkKey {
    fn read(json: serde_json::Value) -> Option<Self> {
        let json: KeyJson = serde_json::from_value(json).ok()?;
        // A key for encryption must not verify signatures (RFC 7517 §4.2).
        if json
            .purpose
            .as_deref()
            .is_some_and(|purpose| purpose != "sig")
        {
            return None;
        }
        // A key for an unsupported algorithm must not be used with another one.
        let algorithm = match &json.alg {
            Some(name) => Some(JwsAlgorithm::named(name)?),
            None => None,
        };
        let point = |coordinate: usize| {
            let (x, y) = (bytes(json.x.as_ref())?, bytes(json.y.as_ref())?);
            // The prefix 4 marks an uncompressed point (SEC 1 §2.3.3).
            (x.len() == coordinate && y.len() == coordinate).then(|| [&[4u8][..], &x, &y].concat())
        };
        let material = match (json.kty.as_str(), json.crv.as_deref()) {
            ("RSA", _) => {
                // Some issuers prefix the integers with zeros, against RFC 7518 §6.3.1.1.
                let n: Vec<u8> = bytes(json.n.as_ref())?
                    .into_iter()
                    .skip_while(|b| *b == 0)
                    .collect();
                MODULUS_BYTES.contains(&n.len()).then_some(())?;
                Material::Rsa {
                    n,
                    // As with `n`.
                    e: bytes(json.e.as_ref())?
                        .into_iter()
                        .skip_while(|b| *b == 0)
                        .collect(),
                }
            }
            // Sizes of a coordinate (RFC 7518 §6.2.1.2), and of an Ed25519 key (RFC 8032 §5.1.5).
            ("EC", Some("P-256")) => Material::P256(point(32)?),
            ("EC", Some("P-384")) => Material::P384(point(48)?),
            ("OKP", Some("Ed25519")) => {
                Material::Ed25519(bytes(json.x.as_ref()).filter(|x| x.len() == 32)?)
            }
            // Keys of other types fit none of the supported algorithms.
            _ => return None,
        };
        Some(Self {
            digest: material.digest(),
            id: json.kid,
            algorithm,
            material,
        })
    }

    fn is_for(&self, algorithm: JwsAlgorithm) -> bool {
        use JwsAlgorithm::{EdDsa, Es256, Es384};
        let is_of_kind = match self.material {
            Material::Rsa { .. } => !matches!(algorithm, Es256 | Es384 | EdDsa),
            Material::P256(_) => algorithm == Es256,
            Material::P384(_) => algorithm == Es384,
            Material::Ed25519(_) => algorithm == EdDsa,
        };
        is_of_kind && self.algorithm.is_none_or(|only| only == algorithm)
    }

    /// True if the key made the signature. This work must be bounded, because it blocks the worker
    /// for all other connections.
    pub(crate) fn verify(&self, algorithm: JwsAlgorithm, message: &[u8], signed: &[u8]) -> bool {
        let rsa = |n: &[u8], e: &[u8], parameters: &signature::RsaParameters| {
            PublicKeyComponents { n, e }
                .verify(parameters, message, signed)
                .is_ok()
        };
        let point = |of: &dyn signature::VerificationAlgorithm, key: &[u8]| {
            of.verify_sig(key, message, signed).is_ok()
        };
        match (&self.material, algorithm) {
            (Material::Rsa { n, e }, JwsAlgorithm::Rs256) => {
                rsa(n, e, &signature::RSA_PKCS1_2048_8192_SHA256)
            }
            (Material::Rsa { n, e }, JwsAlgorithm::Rs384) => {
                rsa(n, e, &signature::RSA_PKCS1_2048_8192_SHA384)
            }
            (Material::Rsa { n, e }, JwsAlgorithm::Rs512) => {
                rsa(n, e, &signature::RSA_PKCS1_2048_8192_SHA512)
            }
            (Material::Rsa { n, e }, JwsAlgorithm::Ps256) => {
                rsa(n, e, &signature::RSA_PSS_2048_8192_SHA256)
            }
            (Material::Rsa { n, e }, JwsAlgorithm::Ps384) => {
                rsa(n, e, &signature::RSA_PSS_2048_8192_SHA384)
            }
            (Material::Rsa { n, e }, JwsAlgorithm::Ps512) => {
                rsa(n, e, &signature::RSA_PSS_2048_8192_SHA512)
            }
            (Material::P256(key), JwsAlgorithm::Es256) => {
                point(&signature::ECDSA_P256_SHA256_FIXED, key)
            }
            (Material::P384(key), JwsAlgorithm::Es384) => {
                point(&signature::ECDSA_P384_SHA384_FIXED, key)
            }
            (Material::Ed25519(key), JwsAlgorithm::EdDsa) => {
                UnparsedPublicKey::new(&signature::ED25519, key)
                    .verify(message, signed)
                    .is_ok()
            }
            // The token names the algorithm; it must not decide how a key of another type is used.
            _ => false,
        }
    }
}

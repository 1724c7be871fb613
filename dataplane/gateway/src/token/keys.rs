//! Public keys out of a JSON Web Key Set (RFC 7517), and signatures verified with them (RFC 7518 §3). Symmetric keys are not keys here: a
//! public key must never be taken for a shared secret. Start with [`KeySet::check`], which verifies nothing itself: it says with which key
//! to verify next.

use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA256};
use aws_lc_rs::signature::RsaPublicKeyComponents as PublicKeyComponents;
use aws_lc_rs::signature::{self, UnparsedPublicKey};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;

/// Keys of one key set at most; further ones are left out.
pub(crate) const KEYS_MAX: usize = 64;
/// Keys tried for a token that does not name one of them.
pub(crate) const UNNAMED_KEYS_MAX: usize = 4;
/// Bytes of a modulus: 2048 to 8192 bits, as the verification demands.
const MODULUS_BYTES: std::ops::RangeInclusive<usize> = 256..=1024;

/// What a signature was made with. Neither `none` nor HMAC is among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
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

impl Algorithm {
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
    /// Uncompressed points.
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

/// Names a key by what it is: equal keys of several key sets are one.
pub(crate) type KeyDigest = [u8; 16];

/// One public key.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) digest: KeyDigest,
    id: Option<String>,
    /// The only one that the key is for, if it says so.
    algorithm: Option<Algorithm>,
    material: Material,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct KeySet {
    keys: Vec<Arc<Key>>,
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

/// Whether a token is signed by a key of a set, as far as it is known.
#[derive(Debug)]
pub(crate) enum Checked {
    Signed,
    NotSigned,
    /// None of the keys is for this kid and algorithm.
    NoKey,
    /// The token names no key, [`UNNAMED_KEYS_MAX`] were tried, and there are more.
    TooMany,
    /// This key has to be tried next.
    Try(Arc<Key>),
}

impl KeySet {
    /// What is not a usable key is left out; of a text that is no key set all.
    pub(crate) fn parse(json: &str) -> Self {
        let Ok(set) = serde_json::from_str::<SetJson>(json) else {
            return Self { keys: Vec::new(), ignored: 1 };
        };
        let all = set.keys.len();
        let keys: Vec<Arc<Key>> = set.keys.into_iter().filter_map(Key::read).take(KEYS_MAX).map(Arc::new).collect();
        Self { ignored: all - keys.len(), keys }
    }

    pub(crate) fn ignored(&self) -> usize {
        self.ignored
    }

    /// Looks at each key that may be meant: those of that kid (while keys are exchanged there may be several), then a few without one.
    /// `known` says what a verification with a key has found, if there was one.
    pub(crate) fn check(&self, kid: Option<&str>, algorithm: Algorithm, known: impl Fn(&Key) -> Option<bool>) -> Checked {
        let fitting = || self.keys.iter().filter(|key| key.is_for(algorithm));
        let is_named = |key: &Key| kid.is_some() && key.id.as_deref() == kid;
        let named = fitting().filter(|key| is_named(key));
        let mut unnamed = fitting().filter(|key| kid.is_none() || key.id.is_none());
        let mut checked = Checked::NoKey;
        for key in named.chain(unnamed.by_ref().take(UNNAMED_KEYS_MAX)) {
            match known(key) {
                Some(true) => return Checked::Signed,
                Some(false) => checked = Checked::NotSigned,
                None => return Checked::Try(key.clone()),
            }
        }
        if unnamed.next().is_some() { Checked::TooMany } else { checked }
    }
}

fn bytes(text: Option<&String>) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text?.trim_end_matches('=')).ok()
}

impl Key {
    fn read(json: serde_json::Value) -> Option<Self> {
        let json: KeyJson = serde_json::from_value(json).ok()?;
        if json.purpose.as_deref().is_some_and(|purpose| purpose != "sig") {
            return None;
        }
        // A key for an algorithm that is not served here is no key for another one.
        let algorithm = match &json.alg {
            Some(name) => Some(Algorithm::named(name)?),
            None => None,
        };
        let point = |coordinate: usize| {
            let (x, y) = (bytes(json.x.as_ref())?, bytes(json.y.as_ref())?);
            (x.len() == coordinate && y.len() == coordinate).then(|| [&[4u8][..], &x, &y].concat())
        };
        let material = match (json.kty.as_str(), json.crv.as_deref()) {
            ("RSA", _) => {
                let n: Vec<u8> = bytes(json.n.as_ref())?.into_iter().skip_while(|b| *b == 0).collect();
                MODULUS_BYTES.contains(&n.len()).then_some(())?;
                Material::Rsa { n, e: bytes(json.e.as_ref())?.into_iter().skip_while(|b| *b == 0).collect() }
            }
            ("EC", Some("P-256")) => Material::P256(point(32)?),
            ("EC", Some("P-384")) => Material::P384(point(48)?),
            ("OKP", Some("Ed25519")) => Material::Ed25519(bytes(json.x.as_ref()).filter(|x| x.len() == 32)?),
            _ => return None,
        };
        Some(Self { digest: material.digest(), id: json.kid, algorithm, material })
    }

    fn is_for(&self, algorithm: Algorithm) -> bool {
        use Algorithm::{EdDsa, Es256, Es384};
        let is_of_kind = match self.material {
            Material::Rsa { .. } => !matches!(algorithm, Es256 | Es384 | EdDsa),
            Material::P256(_) => algorithm == Es256,
            Material::P384(_) => algorithm == Es384,
            Material::Ed25519(_) => algorithm == EdDsa,
        };
        is_of_kind && self.algorithm.is_none_or(|only| only == algorithm)
    }

    /// Whether the key made the signature. This is the work that has to be bounded: it takes the worker from all others.
    pub(crate) fn verify(&self, algorithm: Algorithm, message: &[u8], signed: &[u8]) -> bool {
        let rsa = |n: &[u8], e: &[u8], parameters: &signature::RsaParameters| {
            PublicKeyComponents { n, e }.verify(parameters, message, signed).is_ok()
        };
        let point = |of: &dyn signature::VerificationAlgorithm, key: &[u8]| of.verify_sig(key, message, signed).is_ok();
        match (&self.material, algorithm) {
            (Material::Rsa { n, e }, Algorithm::Rs256) => rsa(n, e, &signature::RSA_PKCS1_2048_8192_SHA256),
            (Material::Rsa { n, e }, Algorithm::Rs384) => rsa(n, e, &signature::RSA_PKCS1_2048_8192_SHA384),
            (Material::Rsa { n, e }, Algorithm::Rs512) => rsa(n, e, &signature::RSA_PKCS1_2048_8192_SHA512),
            (Material::Rsa { n, e }, Algorithm::Ps256) => rsa(n, e, &signature::RSA_PSS_2048_8192_SHA256),
            (Material::Rsa { n, e }, Algorithm::Ps384) => rsa(n, e, &signature::RSA_PSS_2048_8192_SHA384),
            (Material::Rsa { n, e }, Algorithm::Ps512) => rsa(n, e, &signature::RSA_PSS_2048_8192_SHA512),
            (Material::P256(key), Algorithm::Es256) => point(&signature::ECDSA_P256_SHA256_FIXED, key),
            (Material::P384(key), Algorithm::Es384) => point(&signature::ECDSA_P384_SHA384_FIXED, key),
            (Material::Ed25519(key), Algorithm::EdDsa) => UnparsedPublicKey::new(&signature::ED25519, key).verify(message, signed).is_ok(),
            _ => false,
        }
    }
}

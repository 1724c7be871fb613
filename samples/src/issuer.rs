//! A small identity provider for tests. It creates RSA and EC keys, serves their JWKS (RFC 7517),
//! signs tokens (RFC 7519), and forges tokens in the known manners. It stores everything in memory
//! and trusts every client that can reach it.
//!
//! `GET /jwks`; `POST /keys?kid=K&alg=RS256|ES256` creates a key; `DELETE /keys?kid=K` deletes one;
//! `POST /token?kid=K[&forge=none|hmac|bits]` with the claims as JSON. Missing `iss`, `iat` and
//! `exp` are filled in.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::hmac;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair as RsaKeyPair, KeySize};
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair, RSA_PKCS1_SHA256,
};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use clap::Args;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::{Value, json};

use crate::answer::{self, SampleResponse};

/// Maximum size of the claims in a request. Four times the longest token that a gateway accepts (16
/// KiB), so that tests can make one that is too long.
const CLAIMS_BYTES_MAX: usize = 64 << 10;
/// Lifetime of tokens without `exp`, in seconds. Longer than any test.
const LIFE: u64 = 3600;

/// Port, issuer name and initial keys.
#[derive(Debug, Clone, Args)]
pub struct IssuerArgs {
    /// Port to listen on, IPv4 and IPv6
    #[arg(long, env = "PORT", default_value_t = 8090)]
    pub port: u16,
    /// `iss` of tokens whose claims have none
    #[arg(long, default_value = "https://issuer.example")]
    pub issuer: String,
    /// Initial keys, each KID=RS256 or KID=ES256
    #[arg(long = "key", default_values_t = ["first=RS256".to_owned()])]
    pub keys: Vec<String>,
}

/// A signing key of either algorithm.
enum IssuerKey {
    Rsa(RsaKeyPair),
    Ec(EcdsaKeyPair),
}

impl IssuerKey {
    fn make(algorithm: &str) -> anyhow::Result<Self> {
        match algorithm {
            "RS256" => Ok(Self::Rsa(
                RsaKeyPair::generate(KeySize::Rsa2048).context("no RSA key could be created")?,
            )),
            "ES256" => Ok(Self::Ec(
                EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING)
                    .context("no EC key could be created")?,
            )),
            other => bail!("{other:?} is no algorithm; fix: use RS256 or ES256"),
        }
    }

    fn algorithm(&self) -> &'static str {
        match self {
            Self::Rsa(_) => "RS256",
            Self::Ec(_) => "ES256",
        }
    }

    /// Returns the public key as a JWK (RFC 7518 §6).
    fn jwk(&self, kid: &str) -> Value {
        let text = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let mut jwk = match self {
            Self::Rsa(key) => {
                let (modulus, exponent) = rsa_numbers(key.public_key().as_ref());
                json!({ "kty": "RSA", "n": text(modulus), "e": text(exponent) })
            }
            // The point is encoded as 04, x, y (SEC 1 §2.3.3).
            Self::Ec(key) => {
                let point = key.public_key().as_ref();
                json!({ "kty": "EC", "crv": "P-256", "x": text(&point[1..33]), "y": text(&point[33..]) })
            }
        };
        for (name, value) in [("kid", kid), ("alg", self.algorithm()), ("use", "sig")] {
            jwk[name] = value.into();
        }
        jwk
    }

    fn sign(&self, message: &[u8]) -> anyhow::Result<Vec<u8>> {
        match self {
            Self::Rsa(key) => {
                let mut signature = vec![0; key.public_modulus_len()];
                key.sign(
                    &RSA_PKCS1_SHA256,
                    &SystemRandom::new(),
                    message,
                    &mut signature,
                )
                .context("RSA does not sign")?;
                Ok(signature)
            }
            Self::Ec(key) => Ok(key
                .sign(&SystemRandom::new(), message)
                .context("ECDSA does not sign")?
                .as_ref()
                .to_vec()),
        }
    }

    /// Returns the public key as PEM. A verifier that confuses RS256 with HS256 uses it as its
    /// "secret".
    fn public_pem(&self) -> anyhow::Result<String> {
        let der = match self {
            Self::Rsa(key) => key.public_key().as_der().map(|der| der.as_ref().to_vec()),
            Self::Ec(key) => key.public_key().as_der().map(|der| der.as_ref().to_vec()),
        };
        let text = base64::engine::general_purpose::STANDARD.encode(der.context("no public key")?);
        let lines: Vec<String> = text
            .as_bytes()
            .chunks(64)
            .map(|line| String::from_utf8_lossy(line).into_owned())
            .collect();
        Ok(format!(
            "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n",
            lines.join("\n")
        ))
    }
}

/// Returns modulus and exponent of an RSAPublicKey (RFC 8017 A.1.1), without leading zeros.
fn rsa_numbers(der: &[u8]) -> (&[u8], &[u8]) {
    let inside = value(der).0;
    let (modulus, rest) = value(inside);
    let exponent = value(rest).0;
    let bare = |number: &'_ [u8]| number.iter().position(|byte| *byte != 0).unwrap_or(0);
    (&modulus[bare(modulus)..], &exponent[bare(exponent)..])
}

/// Returns the first value of some DER, and the bytes after it. It is only safe for DER that the
/// crypto library wrote.
fn value(der: &[u8]) -> (&[u8], &[u8]) {
    let (length, header) = match der[1] {
        short @ 0..=127 => (usize::from(short), 2),
        long => {
            let count = usize::from(long & 0x7f);
            (
                der[2..2 + count]
                    .iter()
                    .fold(0, |sum, byte| sum << 8 | usize::from(*byte)),
                2 + count,
            )
        }
    };
    der[header..].split_at(length)
}

/// Signing keys by their ids, and the name of the issuer.
#[derive(Clone)]
pub struct SampleIssuer {
    name: Arc<str>,
    keys: Arc<Mutex<BTreeMap<String, IssuerKey>>>,
}

impl SampleIssuer {
    /// Creates an issuer with the keys of the command line.
    ///
    /// # Errors
    ///
    /// A key is not written KID=ALGORITHM, or the algorithm is unknown.
    pub fn new(args: &IssuerArgs) -> anyhow::Result<Self> {
        let issuer = Self {
            name: args.issuer.as_str().into(),
            keys: Arc::default(),
        };
        for key in &args.keys {
            let (kid, algorithm) = key.split_once('=').with_context(|| {
                format!("{key:?} is not a key; fix: write KID=RS256 or KID=ES256")
            })?;
            issuer.add(kid, algorithm)?;
        }
        Ok(issuer)
    }

    fn keys(&self) -> MutexGuard<'_, BTreeMap<String, IssuerKey>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, kid: &str, algorithm: &str) -> anyhow::Result<()> {
        let key = IssuerKey::make(algorithm)?;
        self.keys().insert(kid.to_owned(), key);
        Ok(())
    }

    fn jwks(&self) -> Value {
        json!({ "keys": self.keys().iter().map(|(kid, key)| key.jwk(kid)).collect::<Vec<_>>() })
    }

    /// Returns a token, or a forged one.
    fn token(&self, kid: &str, forge: Option<&str>, mut claims: Value) -> anyhow::Result<String> {
        let keys = self.keys();
        let key = keys
            .get(kid)
            .with_context(|| format!("there is no key {kid:?}"))?;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .context("a clock before 1970")?
            .as_secs();
        let filled = claims
            .as_object_mut()
            .context("the claims are not a JSON object")?;
        // Callers may set any claim, so only missing ones are filled.
        for (name, value) in [
            ("iss", json!(&*self.name)),
            ("iat", json!(now)),
            ("exp", json!(now + LIFE)),
        ] {
            filled.entry(name).or_insert(value);
        }
        let algorithm = match forge {
            Some("none") => "none",
            Some("hmac") => "HS256",
            // `bits` is applied to a valid signature below; other words forge nothing.
            _ => key.algorithm(),
        };
        let head = json!({ "alg": algorithm, "typ": "JWT", "kid": kid });
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let message = format!("{}.{}", encode(&head), encode(&claims));
        let mut signature = match forge {
            Some("none") => Vec::new(),
            Some("hmac") => {
                // A verifier that confuses RS256 with HS256 uses the public key as the secret.
                let secret = hmac::Key::new(hmac::HMAC_SHA256, key.public_pem()?.as_bytes());
                hmac::sign(&secret, message.as_bytes()).as_ref().to_vec()
            }
            _ => key.sign(message.as_bytes())?,
        };
        // One changed bit keeps the signature's form.
        if let (Some("bits"), Some(first)) = (forge, signature.first_mut()) {
            *first ^= 1;
        }
        Ok(format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }

    /// Answers one HTTP request; see the module's documentation.
    pub async fn answer(self, request: Request<Incoming>) -> SampleResponse {
        let (head, body) = request.into_parts();
        let word = |name: &str| answer::query(&head.uri, name);
        let kid = word("kid").unwrap_or("first");
        let done = match (&head.method, head.uri.path()) {
            (&Method::GET, "/health" | "/jwks") => Ok(self.jwks().to_string()),
            (&Method::POST, "/keys") => self
                .add(kid, word("alg").unwrap_or("RS256"))
                .map(|()| String::new()),
            (&Method::DELETE, "/keys") => Ok(self
                .keys()
                .remove(kid)
                .map_or("no such key", |_| "gone")
                .to_owned()),
            (&Method::POST, "/token") => match Limited::new(body, CLAIMS_BYTES_MAX).collect().await
            {
                Ok(claims) => serde_json::from_slice(&claims.to_bytes())
                    .context("the claims are not JSON")
                    .and_then(|claims| self.token(kid, word("forge"), claims)),
                Err(problem) => Err(anyhow::anyhow!("the claims: {problem}")),
            },
            _ => return answer::refuse(StatusCode::NOT_FOUND, "there is /jwks, /keys and /token"),
        };
        match done {
            Ok(text) => answer::build_response(StatusCode::OK, "application/json", text),
            Err(problem) => answer::refuse(StatusCode::BAD_REQUEST, &format!("{problem:#}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{
        ECDSA_P256_SHA256_FIXED, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents,
        UnparsedPublicKey,
    };

    use super::*;

    fn decoded(text: &Value) -> Vec<u8> {
        URL_SAFE_NO_PAD
            .decode(text.as_str().expect("a text"))
            .expect("base64url")
    }

    #[test]
    fn tokens_verify_with_the_published_jwks() {
        let keys = vec!["r=RS256".to_owned(), "e=ES256".to_owned()];
        let issuer = SampleIssuer::new(&IssuerArgs {
            port: 0,
            issuer: "https://i".into(),
            keys,
        })
        .expect("an issuer");
        for (kid, forge, good) in [
            ("r", None, true),
            ("e", None, true),
            ("r", Some("bits"), false),
            ("e", Some("bits"), false),
        ] {
            let token = issuer
                .token(kid, forge, json!({"sub": "me"}))
                .expect("a token");
            let (message, signature) = token.rsplit_once('.').expect("three parts");
            let signature = URL_SAFE_NO_PAD.decode(signature).expect("base64url");
            let jwks = issuer.jwks();
            let jwk = jwks["keys"]
                .as_array()
                .expect("keys")
                .iter()
                .find(|jwk| jwk["kid"] == kid)
                .expect("the key");
            let verified = if jwk["kty"] == "RSA" {
                let key = RsaPublicKeyComponents {
                    n: decoded(&jwk["n"]),
                    e: decoded(&jwk["e"]),
                };
                key.verify(&RSA_PKCS1_2048_8192_SHA256, message.as_bytes(), &signature)
            } else {
                // An uncompressed point begins with 4 (SEC 1).
                let point = [vec![4], decoded(&jwk["x"]), decoded(&jwk["y"])].concat();
                UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point)
                    .verify(message.as_bytes(), &signature)
            };
            assert_eq!(verified.is_ok(), good, "{kid} {forge:?}");
        }
        let bare = issuer
            .token("r", Some("none"), json!({}))
            .expect("a forgery");
        // An unsigned token ends with the dot before its empty signature.
        assert!(bare.ends_with('.'));
        assert!(
            issuer
                .token("r", Some("hmac"), json!({}))
                .expect("a forgery")
                .split('.')
                .count()
                == 3
        );
        assert!(issuer.token("x", None, json!({})).is_err());
    }
}

//! Parses and validates one token in compact form (RFC 7515 §7.1). It neither searches requests nor
//! caches results.
//!
//! Start with [`ParsedToken::read`].

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::cache::TokenMemory;
use super::keys::{JwkKey, JwsAlgorithm, KeySet, SignatureCheck};

/// Largest accepted token, in bytes. A quarter of a request's head (`HEAD_BYTES_CAP`, 64 KiB), in
/// which four tokens (`TOKENS_MAX`) of this length would just fit.
pub(crate) const TOKEN_BYTES_MAX: usize = 16 << 10;
/// Permitted difference between clocks, seconds.
/// As Envoy's default of `clock_skew_seconds`.
pub(crate) const LEEWAY: u64 = 60;
/// Claims that are lists in one string, separated by spaces (RFC 8693 §4.2, Istio).
const SPACED: [&str; 2] = ["scope", "permission"];

/// Reason why a token is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenError {
    TooLong,
    TooMany,
    Malformed,
    Algorithm,
    Critical,
    Issuer,
    NoKeys,
    NoKey,
    /// More keys would have to be tried than a request may try.
    TooManyKeys,
    Signature,
    Expired,
    NotYet,
    Audience,
    /// The RequestAuthentication is broken, so no token can be valid.
    Broken,
}

impl TokenError {
    /// Returns the counter's label, which logs show too.
    pub fn name(self) -> &'static str {
        match self {
            Self::TooLong => "token_too_long",
            Self::TooMany => "too_many_tokens",
            Self::Malformed => "token_malformed",
            Self::Algorithm => "token_algorithm",
            Self::Critical => "token_critical",
            Self::Issuer => "token_issuer",
            Self::NoKeys => "token_no_keys",
            Self::NoKey => "token_no_key",
            Self::TooManyKeys => "token_too_many_keys",
            Self::Signature => "token_signature",
            Self::Expired => "token_expired",
            Self::NotYet => "token_not_yet_valid",
            Self::Audience => "token_audience",
            Self::Broken => "authentication_broken",
        }
    }

    /// Returns the message to the client, in Envoy's words where Envoy has one.
    pub fn text(self) -> &'static str {
        match self {
            Self::TooLong => "Jwt is too long",
            Self::TooMany => "Jwts are too many",
            Self::Malformed => {
                "Jwt is not in the form of Header.Payload.Signature with two dots and 3 sections"
            }
            Self::Algorithm => "Jwt header [alg] is not supported",
            Self::Critical => "Jwt header [crit] is not supported",
            Self::Issuer => "Jwt issuer is not configured",
            Self::NoKeys => "Jwks remote fetch is failed",
            Self::NoKey | Self::TooManyKeys => "Jwks doesn't have key to match kid or alg from Jwt",
            Self::Signature | Self::Broken => "Jwt verification fails",
            Self::Expired => "Jwt is expired",
            Self::NotYet => "Jwt not yet valid",
            Self::Audience => "Audiences in Jwt are not allowed",
        }
    }
}

/// Hash of a token's text alone.
pub(crate) type TokenDigest = [u8; 32];

/// A signature verification on which the validation of a token depends.
#[derive(Debug)]
pub(crate) struct SignatureVerification {
    pub(crate) key: Arc<JwkKey>,
    pub(crate) token: TokenDigest,
    algorithm: JwsAlgorithm,
    message: Box<[u8]>,
    signed: Vec<u8>,
}

impl SignatureVerification {
    /// Verifies the signature. This is the expensive part.
    pub(crate) fn run(&self) -> bool {
        self.key.verify(self.algorithm, &self.message, &self.signed)
    }
}

/// Reason why the validation of a token stopped.
#[derive(Debug)]
pub(crate) enum SignatureError {
    Bad(TokenError),
    /// The result of this verification is needed; then the check is repeated.
    Verify(Box<SignatureVerification>),
}

impl From<TokenError> for SignatureError {
    fn from(bad: TokenError) -> Self {
        Self::Bad(bad)
    }
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    crit: Option<Value>,
}

/// A token that was parsed but not validated.
pub(crate) struct ParsedToken<'a> {
    header: Header,
    payload: &'a str,
    claims: Map<String, Value>,
    message: &'a [u8],
    signed: Vec<u8>,
}

/// A token that was found valid.
#[derive(Debug)]
pub struct Token {
    /// Issuer and subject, as `issuer/subject`.
    pub principal: Option<String>,
    /// Seconds since 1970 at which the token stops being valid, leeway included.
    pub until: Option<u64>,
    /// Payload as it was sent, base64url.
    pub payload: String,
    claims: Map<String, Value>,
}

fn decoded<T: for<'de> Deserialize<'de>>(part: &str) -> Result<T, TokenError> {
    let bytes = URL_SAFE_NO_PAD
        .decode(part)
        .map_err(|_| TokenError::Malformed)?;
    serde_json::from_slice(&bytes).map_err(|_| TokenError::Malformed)
}

impl<'a> ParsedToken<'a> {
    pub(crate) fn read(token: &'a [u8]) -> Result<Self, TokenError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(TokenError::TooLong);
        }
        let token = std::str::from_utf8(token).map_err(|_| TokenError::Malformed)?;
        let (message, signed) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let (header, payload) = message.split_once('.').ok_or(TokenError::Malformed)?;
        if payload.contains('.') {
            return Err(TokenError::Malformed);
        }
        let claims = decoded(payload)?;
        let signed = URL_SAFE_NO_PAD
            .decode(signed)
            .map_err(|_| TokenError::Malformed)?;
        Ok(Self {
            header: decoded(header)?,
            payload,
            claims,
            message: message.as_bytes(),
            signed,
        })
    }

    fn text(&self, claim: &str) -> Option<&str> {
        self.claims.get(claim).and_then(Value::as_str)
    }

    pub(crate) fn issuer(&self) -> &str {
        self.text("iss").unwrap_or("")
    }

    /// Reads a time claim.
    ///
    /// # Errors
    /// The claim exists but is not a time; the token is malformed.
    fn time(&self, claim: &str) -> Result<Option<u64>, TokenError> {
        match self.claims.get(claim) {
            None => Ok(None),
            Some(Value::Number(n)) => {
                let whole = n.as_u64().or_else(|| {
                    n.as_f64()
                        .filter(|f| (0.0..1e15).contains(f))
                        .map(|f| f as u64)
                });
                whole.map(Some).ok_or(TokenError::Malformed)
            }
            Some(_) => Err(TokenError::Malformed),
        }
    }

    /// Validates the token: signed by one of `keys`, valid now, and for one of `audiences` (any if
    /// there are none). `memory` has the results of earlier verifications.
    ///
    /// # Errors
    /// The token is invalid, or a signature must be verified first.
    pub(crate) fn check(
        &self,
        keys: Option<&KeySet>,
        audiences: &[String],
        now: u64,
        (digest, memory): (&TokenDigest, &TokenMemory),
    ) -> Result<(), SignatureError> {
        let algorithm = JwsAlgorithm::named(&self.header.alg).ok_or(TokenError::Algorithm)?;
        // RFC 7515 §4.1.11: extensions that are not understood make the token invalid.
        if self.header.crit.is_some() {
            return Err(TokenError::Critical.into());
        }
        // Without the issuer's keys no token of it can be valid.
        let keys = keys.ok_or(TokenError::NoKeys)?;
        // The signature precedes the claims: those of a forged token mean nothing.
        match keys.check(self.header.kid.as_deref(), algorithm, |key| {
            memory.is_signed(digest, &key.digest, now)
        }) {
            SignatureCheck::Signed => {}
            SignatureCheck::NotSigned => return Err(TokenError::Signature.into()),
            SignatureCheck::NoKey => return Err(TokenError::NoKey.into()),
            SignatureCheck::TooMany => return Err(TokenError::TooManyKeys.into()),
            SignatureCheck::Try(key) => {
                let (message, signed) = (self.message.into(), self.signed.clone());
                return Err(SignatureError::Verify(Box::new(SignatureVerification {
                    key,
                    token: *digest,
                    algorithm,
                    message,
                    signed,
                })));
            }
        }
        if self
            .time("exp")?
            // Whoever made the token chose `exp`, which may be as large as an integer can be.
            .is_some_and(|exp| exp.saturating_add(LEEWAY) <= now)
        {
            return Err(TokenError::Expired.into());
        }
        for claim in ["nbf", "iat"] {
            if self.time(claim)?.is_some_and(|from| from > now + LEEWAY) {
                return Err(TokenError::NotYet.into());
            }
        }
        // As in Envoy, a trailing slash makes no difference between audiences.
        let bare = |audience: &str| audience.trim_end_matches('/').to_string();
        let given = texts(self.claims.get("aud"));
        if !audiences.is_empty()
            && !given
                .iter()
                .any(|g| audiences.iter().any(|wanted| bare(wanted) == bare(g)))
        {
            return Err(TokenError::Audience.into());
        }
        Ok(())
    }

    /// Converts a token that [`ParsedToken::check`] found valid.
    pub(crate) fn into_token(self) -> Token {
        // As in Istio: a token without an issuer or a subject proves no principal, whatever else it
        // proves.
        let subject = self
            .text("sub")
            .filter(|subject| !subject.is_empty() && !self.issuer().is_empty());
        let principal = subject.map(|subject| format!("{}/{subject}", self.issuer()));
        let until = self
            .time("exp")
            .ok()
            .flatten()
            .map(|exp| exp.saturating_add(LEEWAY));
        Token {
            principal,
            until,
            payload: self.payload.to_string(),
            claims: self.claims,
        }
    }
}

/// Returns the strings of a claim: one, or those of a list.
fn texts(claim: Option<&Value>) -> Vec<&str> {
    match claim {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

impl Token {
    fn claim(&self, path: &[String]) -> Option<&Value> {
        let (first, rest) = path.split_first()?;
        rest.iter()
            .try_fold(self.claims.get(first)?, |value, name| {
                value.as_object()?.get(name)
            })
    }

    /// Passes the values of a claim to `each` until it returns true.
    pub fn visit_claim(&self, path: &[String], each: &mut dyn FnMut(&[u8]) -> bool) {
        let Some(value) = self.claim(path) else {
            return;
        };
        let one = |value: &Value, each: &mut dyn FnMut(&[u8]) -> bool| match value {
            Value::String(text) => each(text.as_bytes()),
            Value::Bool(yes) => each(if *yes { b"true" } else { b"false" }),
            Value::Number(n) => each(n.to_string().as_bytes()),
            _ => false,
        };
        let spaced = path.len() == 1 && SPACED.contains(&path[0].as_str());
        let items = value
            .as_array()
            .map_or(std::slice::from_ref(value), Vec::as_slice);
        for item in items {
            let enough = match item {
                Value::String(text) if spaced => text
                    .split(' ')
                    .filter(|part| !part.is_empty())
                    .any(|part| each(part.as_bytes())),
                item => one(item, each),
            };
            if enough {
                return;
            }
        }
    }

    pub fn audiences(&self) -> Vec<&str> {
        texts(self.claims.get("aud"))
    }

    /// Returns the party to which the token was issued (`azp`).
    pub fn presenter(&self) -> Option<&str> {
        self.claims.get("azp").and_then(Value::as_str)
    }

    /// Returns a claim as one string for a header; lists are joined with commas. `None` if it
    /// contains no string, number or boolean.
    pub fn claim_text(&self, path: &[String]) -> Option<String> {
        let mut parts: Vec<String> = Vec::new();
        match self.claim(path)? {
            Value::String(text) => return Some(text.clone()),
            _ => self.visit_claim(path, &mut |part| {
                parts.push(String::from_utf8_lossy(part).into_owned());
                false
            }),
        }
        (!parts.is_empty()).then(|| parts.join(","))
    }
}

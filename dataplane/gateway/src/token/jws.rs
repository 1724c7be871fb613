//! One token in the compact form (RFC 7515 §7.1): read, then checked. It looks for none and remembers none.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::cache::TokenMemory;
use super::keys::{Algorithm, Checked, Key, KeySet};

/// Bytes of a token at most.
pub(crate) const TOKEN_BYTES_MAX: usize = 16 << 10;
/// How far clocks may differ, seconds.
pub(crate) const LEEWAY: u64 = 60;
/// Claims that are lists written as one text, with spaces between (RFC 8693 §4.2, Istio).
const SPACED: [&str; 2] = ["scope", "permission"];

/// Why a token is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadToken {
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
    /// The RequestAuthentication is broken, so that none can be valid.
    Broken,
}

impl BadToken {
    /// The counter's label, and the log's word.
    pub(crate) fn name(self) -> &'static str {
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

    /// What the client is told, in Envoy's words where it has some.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::TooLong => "Jwt is too long",
            Self::TooMany => "Jwts are too many",
            Self::Malformed => "Jwt is not in the form of Header.Payload.Signature with two dots and 3 sections",
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

/// Names a token by its text alone.
pub(crate) type TokenDigest = [u8; 32];

/// A signature that has to be verified before more can be said of a token.
#[derive(Debug)]
pub(crate) struct SignatureVerification {
    pub(crate) key: Arc<Key>,
    pub(crate) token: TokenDigest,
    algorithm: Algorithm,
    message: Box<[u8]>,
    signed: Vec<u8>,
}

impl SignatureVerification {
    /// Does the work.
    pub(crate) fn run(&self) -> bool {
        self.key.verify(self.algorithm, &self.message, &self.signed)
    }
}

/// Why no more is said of a token.
#[derive(Debug)]
pub(crate) enum SignatureError {
    Bad(BadToken),
    /// To be asked again once this is known.
    Verify(Box<SignatureVerification>),
}

impl From<BadToken> for SignatureError {
    fn from(bad: BadToken) -> Self {
        Self::Bad(bad)
    }
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    crit: Option<Value>,
}

/// A token that says something; whether it is true is not known.
pub(crate) struct Parsed<'a> {
    header: Header,
    payload: &'a str,
    claims: Map<String, Value>,
    message: &'a [u8],
    signed: Vec<u8>,
}

/// A valid token.
#[derive(Debug)]
pub(crate) struct Token {
    /// `issuer/subject`.
    pub(crate) principal: String,
    /// Seconds since 1970 after which it is not valid any more.
    pub(crate) until: Option<u64>,
    /// As it was sent, base64url.
    pub(crate) payload: String,
    claims: Map<String, Value>,
}

fn decoded<T: for<'de> Deserialize<'de>>(part: &str) -> Result<T, BadToken> {
    let bytes = URL_SAFE_NO_PAD.decode(part).map_err(|_| BadToken::Malformed)?;
    serde_json::from_slice(&bytes).map_err(|_| BadToken::Malformed)
}

impl<'a> Parsed<'a> {
    pub(crate) fn read(token: &'a [u8]) -> Result<Self, BadToken> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(BadToken::TooLong);
        }
        let token = std::str::from_utf8(token).map_err(|_| BadToken::Malformed)?;
        let (message, signed) = token.rsplit_once('.').ok_or(BadToken::Malformed)?;
        let (header, payload) = message.split_once('.').ok_or(BadToken::Malformed)?;
        if payload.contains('.') {
            return Err(BadToken::Malformed);
        }
        let claims = decoded(payload)?;
        let signed = URL_SAFE_NO_PAD.decode(signed).map_err(|_| BadToken::Malformed)?;
        Ok(Self { header: decoded(header)?, payload, claims, message: message.as_bytes(), signed })
    }

    fn text(&self, claim: &str) -> Option<&str> {
        self.claims.get(claim).and_then(Value::as_str)
    }

    pub(crate) fn issuer(&self) -> &str {
        self.text("iss").unwrap_or("")
    }

    /// A time claim; one that is there and is no time makes the token malformed.
    fn time(&self, claim: &str) -> Result<Option<u64>, BadToken> {
        match self.claims.get(claim) {
            None => Ok(None),
            Some(Value::Number(n)) => {
                let whole = n.as_u64().or_else(|| n.as_f64().filter(|f| (0.0..1e15).contains(f)).map(|f| f as u64));
                whole.map(Some).ok_or(BadToken::Malformed)
            }
            Some(_) => Err(BadToken::Malformed),
        }
    }

    /// Whether it is signed by one of `keys`, valid now and for one of `audiences` (none: any). `memory` has what verifications found.
    pub(crate) fn check(
        &self,
        keys: Option<&KeySet>,
        audiences: &[String],
        now: u64,
        (digest, memory): (&TokenDigest, &TokenMemory),
    ) -> Result<(), SignatureError> {
        let algorithm = Algorithm::named(&self.header.alg).ok_or(BadToken::Algorithm)?;
        if self.header.crit.is_some() {
            return Err(BadToken::Critical.into());
        }
        let keys = keys.ok_or(BadToken::NoKeys)?;
        match keys.check(self.header.kid.as_deref(), algorithm, |key| memory.is_signed(digest, &key.digest, now)) {
            Checked::Signed => {}
            Checked::NotSigned => return Err(BadToken::Signature.into()),
            Checked::NoKey => return Err(BadToken::NoKey.into()),
            Checked::TooMany => return Err(BadToken::TooManyKeys.into()),
            Checked::Try(key) => {
                let (message, signed) = (self.message.into(), self.signed.clone());
                return Err(SignatureError::Verify(Box::new(SignatureVerification { key, token: *digest, algorithm, message, signed })));
            }
        }
        if self.time("exp")?.is_some_and(|exp| exp.saturating_add(LEEWAY) <= now) {
            return Err(BadToken::Expired.into());
        }
        for claim in ["nbf", "iat"] {
            if self.time(claim)?.is_some_and(|from| from > now + LEEWAY) {
                return Err(BadToken::NotYet.into());
            }
        }
        // A trailing slash is no other audience (Envoy).
        let bare = |audience: &str| audience.trim_end_matches('/').to_string();
        let given = texts(self.claims.get("aud"));
        if !audiences.is_empty() && !given.iter().any(|g| audiences.iter().any(|wanted| bare(wanted) == bare(g))) {
            return Err(BadToken::Audience.into());
        }
        Ok(())
    }

    /// To be called on what [`Parsed::check`] found valid.
    pub(crate) fn into_token(self) -> Token {
        let principal = format!("{}/{}", self.issuer(), self.text("sub").unwrap_or(""));
        let until = self.time("exp").ok().flatten().map(|exp| exp.saturating_add(LEEWAY));
        Token { principal, until, payload: self.payload.to_string(), claims: self.claims }
    }
}

/// A claim's texts: one, or those of a list.
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
        rest.iter().try_fold(self.claims.get(first)?, |value, name| value.as_object()?.get(name))
    }

    /// Gives the values of a claim to `each` until it returns true.
    pub(crate) fn look(&self, path: &[String], each: &mut dyn FnMut(&[u8]) -> bool) {
        let Some(value) = self.claim(path) else { return };
        let one = |value: &Value, each: &mut dyn FnMut(&[u8]) -> bool| match value {
            Value::String(text) => each(text.as_bytes()),
            Value::Bool(yes) => each(if *yes { b"true" } else { b"false" }),
            Value::Number(n) => each(n.to_string().as_bytes()),
            _ => false,
        };
        let spaced = path.len() == 1 && SPACED.contains(&path[0].as_str());
        let items = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        for item in items {
            let enough = match item {
                Value::String(text) if spaced => text.split(' ').filter(|part| !part.is_empty()).any(|part| each(part.as_bytes())),
                item => one(item, each),
            };
            if enough {
                return;
            }
        }
    }

    pub(crate) fn audiences(&self) -> Vec<&str> {
        texts(self.claims.get("aud"))
    }

    /// Who the token was issued to (`azp`).
    pub(crate) fn presenter(&self) -> Option<&str> {
        self.claims.get("azp").and_then(Value::as_str)
    }

    /// A claim as one text, for a header; lists with commas between. What is neither text nor number nor truth has none.
    pub(crate) fn claim_text(&self, path: &[String]) -> Option<String> {
        let mut parts: Vec<String> = Vec::new();
        match self.claim(path)? {
            Value::String(text) => return Some(text.clone()),
            _ => self.look(path, &mut |part| {
                parts.push(String::from_utf8_lossy(part).into_owned());
                false
            }),
        }
        (!parts.is_empty()).then(|| parts.join(","))
    }
}

//! JSON Web Tokens (RFC 7519) in requests, as RequestAuthentications require them: finds and
//! validates tokens, and applies their effects on the forwarded request.
//!
//! What a valid token permits is not decided here: `authorize` does that. Start with
//! [`JwtRequirements::check`].

mod cache;
mod jws;
mod keys;
mod location;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use canal_model::authorization::{Authentication, JwtRule};
use canal_router::RoutableRequest;

pub(crate) use cache::TokenCacheKey;
pub use cache::{TokenCache, TokenMemory};
pub(crate) use jws::{SignatureError, SignatureVerification};
pub use jws::{Token, TokenError};
use keys::KeySet;
pub use location::TokenNames;
use location::{ExtractedToken, TokenLocations};

use crate::mutations::RequestMutations;

/// Most tokens of one request. Each needs at least one verification of its signature, so the number
/// bounds what one request costs. Nobody measured how many clients send; most send one.
pub(crate) const TOKENS_MAX: usize = 4;
/// Most signatures verified for one request, over all its tokens, rules and attempts.
/// As many as [`TOKENS_MAX`] tokens need that name no key, with `UNNAMED_KEYS_MAX` keys to try
/// each.
pub(crate) const VERIFICATIONS_PER_REQUEST_MAX: u32 = 16;

/// Number of signature verifications that one request has used.
#[derive(Debug, Default)]
pub struct VerificationBudget {
    used: Cell<u32>,
}

impl VerificationBudget {
    fn take(&self) -> bool {
        let done = self.used.get();
        self.used.set(done + 1);
        done < VERIFICATIONS_PER_REQUEST_MAX
    }
}

/// Performs one verification when it is the tenant's turn, and stores the result. The worker's
/// other connections run before the tenant's next verification starts.
///
/// Returns `None` if the result was known by then, or if the request has used up its verifications.
/// In the latter case its token is refused at the next check.
pub async fn verify(
    memory: &TokenMemory,
    work: &VerificationBudget,
    todo: PendingVerification,
    now: u64,
) -> Option<bool> {
    let PendingVerification { name, verification } = todo;
    if !work.take() {
        memory.refuse(name, TokenError::TooManyKeys, now);
        return None;
    }
    // The semaphore is never closed.
    let _turn = memory.turn.clone().acquire_owned().await;
    if memory
        .is_signed(&verification.token, &verification.key.digest, now)
        .is_some()
    {
        return None;
    }
    let signed = verification.run();
    memory.remember(verification.token, verification.key.digest, signed, now);
    tokio::task::yield_now().await;
    Some(signed)
}

/// A signature verification that a request waits for.
#[derive(Debug)]
pub struct PendingVerification {
    /// Cache key of the token and the requirements.
    name: TokenCacheKey,
    verification: Box<SignatureVerification>,
}

/// Reason why [`JwtRequirements::check`] returns no token.
#[derive(Debug)]
pub enum TokenCheckError {
    Bad(TokenError),
    /// A signature must be verified with [`verify`]; then the check is repeated.
    Verify(PendingVerification),
}

/// A RequestAuthentication with parsed keys.
#[derive(Debug)]
pub(crate) struct JwtIssuers {
    broken: bool,
    rules: Vec<JwtIssuer>,
}

/// A [`JwtRule`] with parsed keys.
#[derive(Debug)]
pub(crate) struct JwtIssuer {
    name: String,
    audiences: Vec<String>,
    /// `None` if the keys could not be fetched yet.
    keys: Option<KeySet>,
    places: TokenLocations,
    forward: bool,
    payload_header: Option<String>,
    claim_headers: Vec<(String, Vec<String>)>,
}

impl JwtIssuers {
    pub(crate) fn new(authentication: &Authentication) -> Self {
        Self {
            broken: authentication.broken.is_some(),
            rules: authentication.rules.iter().map(JwtIssuer::new).collect(),
        }
    }
}

impl JwtIssuers {
    /// Adds the locations of its tokens to `names`.
    pub(crate) fn name_places(&self, names: &mut TokenNames) {
        self.rules.iter().for_each(|rule| names.add(&rule.places));
    }
}

impl JwtIssuer {
    fn new(rule: &JwtRule) -> Self {
        let keys = rule.keys.as_ref().map(|json| KeySet::parse(json));
        if let Some(ignored) = keys.as_ref().map(KeySet::ignored).filter(|n| *n > 0) {
            tracing::warn!(
                issuer = rule.issuer,
                ignored,
                "gateway: ignored keys of a key set, because they are too many, too weak or of an unknown kind; tokens signed with them are refused"
            );
        }
        Self {
            name: rule.issuer.clone(),
            audiences: rule.audiences.clone(),
            keys,
            places: TokenLocations::of(rule),
            forward: rule.forward,
            payload_header: rule.payload_header.clone(),
            claim_headers: rule.claim_headers.clone(),
        }
    }
}

/// All RequestAuthentications of one destination.
#[derive(Debug)]
pub struct JwtRequirements {
    /// Changes whenever any of the keys or rules change, so that results of the previous ones no
    /// longer apply.
    id: u64,
    all: Vec<Arc<JwtIssuers>>,
}

impl JwtRequirements {
    pub(crate) fn new(all: Vec<Arc<JwtIssuers>>) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self {
            id: LAST.fetch_add(1, Relaxed),
            all,
        }
    }

    fn rules(&self) -> impl Iterator<Item = &JwtIssuer> {
        self.all.iter().flat_map(|issuers| &issuers.rules)
    }

    /// Finds the request's tokens, validates them, and adds their effects on the request to
    /// `changes`. Every token found must be valid; the first one provides the identity. `now` is in
    /// seconds since 1970.
    ///
    /// # Errors
    /// A token is invalid, or a signature must be verified first. The method verifies none itself;
    /// the caller verifies it and repeats the check.
    pub fn check<R: RoutableRequest>(
        &self,
        request: &R,
        (cache, memory): (&TokenCache, &TokenMemory),
        now: u64,
        changes: &mut RequestMutations,
    ) -> Result<Option<Arc<Token>>, TokenCheckError> {
        if self.all.iter().any(|issuers| issuers.broken) {
            return Err(TokenCheckError::Bad(TokenError::Broken));
        }
        // Only the gateway may set these headers, so a client's own values are removed even without
        // a token.
        for rule in self.rules() {
            let forwarded = rule
                .payload_header
                .iter()
                .chain(rule.claim_headers.iter().map(|(name, _)| name));
            forwarded.for_each(|name| changes.remove(name));
        }
        let found = location::find(self.rules().map(|rule| &rule.places), request)
            .ok_or(TokenCheckError::Bad(TokenError::TooMany))?;
        let mut first = None;
        for one in &found {
            let (token, rule) = self.accept(one, (cache, memory), now)?;
            if !rule.forward {
                one.location.strip(request, changes);
            }
            if first.is_none() {
                rule.set_claim_headers(&token, changes);
                first = Some(token);
            }
        }
        Ok(first)
    }

    /// Validates a token, and returns it with the rule that names its location and accepts it.
    fn accept(
        &self,
        found: &ExtractedToken<'_>,
        (cache, memory): (&TokenCache, &TokenMemory),
        now: u64,
    ) -> Result<(Arc<Token>, &JwtIssuer), TokenCheckError> {
        let name = cache.name(self.id, &found.text);
        // A token that is cached counts only in the places that its issuer permits.
        if let Some((token, rule)) = cache.get(&name, now)
            && let Some(issuer) = self
                .rules()
                .nth(rule)
                .filter(|issuer| issuer.places.hold(found.location))
        {
            return Ok((token, issuer));
        }
        if let Some(bad) = memory.refusal(&name, now) {
            return Err(TokenCheckError::Bad(bad));
        }
        let parsed = jws::ParsedToken::read(&found.text).map_err(TokenCheckError::Bad)?;
        let digest = cache.digest(&found.text);
        // Stays if no rule names the token's issuer and permits its location.
        let mut why = TokenError::Issuer;
        // Several rules may name one issuer; a token needs to satisfy one of them.
        for (n, rule) in self.rules().enumerate() {
            if rule.name != parsed.issuer() || !rule.places.hold(found.location) {
                continue;
            }
            match parsed.check(rule.keys.as_ref(), &rule.audiences, now, (&digest, memory)) {
                Ok(()) => {
                    let token = Arc::new(parsed.into_token());
                    cache.put(name, token.clone(), n, now);
                    return Ok((token, rule));
                }
                // The caller verifies the signature, which takes long, and then calls this function
                // again.
                Err(SignatureError::Verify(verification)) => {
                    return Err(TokenCheckError::Verify(PendingVerification {
                        name,
                        verification,
                    }));
                }
                Err(SignatureError::Bad(bad)) => why = bad,
            }
        }
        // A refusal that cost signature verifications is remembered, so that the work is not
        // repeated immediately.
        if matches!(why, TokenError::Signature | TokenError::TooManyKeys) {
            memory.refuse(name, why, now);
        }
        Err(TokenCheckError::Bad(why))
    }
}

impl JwtIssuer {
    /// Sets the headers that describe a valid token to the application.
    fn set_claim_headers(&self, token: &Token, changes: &mut RequestMutations) {
        if let Some(name) = &self.payload_header {
            changes.set(name, token.payload.as_bytes());
        }
        for (name, path) in &self.claim_headers {
            if let Some(text) = token.claim_text(path) {
                changes.set(name, text.as_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests;

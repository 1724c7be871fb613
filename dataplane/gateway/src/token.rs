//! JSON Web Tokens (RFC 7519) in requests, as RequestAuthentications want them: where they are looked for, whether one is valid, what becomes
//! of it in the request that is passed on. Who may do what with a valid one is `judge`'s business.

mod cache;
mod jws;
mod keys;
mod place;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use canal_model::authorization::{Authentication, JwtRule};
use canal_router::Request;

pub(crate) use cache::{Cache, Name, TokenMemory};
pub(crate) use jws::{BadToken, SignatureError, SignatureVerification, Token};
use keys::KeySet;
pub(crate) use place::TokenNames;
use place::{Found, Places};

use crate::changes::Changes;

/// Tokens of one request at most.
pub(crate) const TOKENS_MAX: usize = 4;
/// Signatures verified for one request at most, over all its tokens, rules and attempts.
pub(crate) const VERIFICATIONS_PER_REQUEST_MAX: u32 = 16;

/// What a request may still have verified.
#[derive(Debug, Default)]
pub(crate) struct VerificationBudget {
    done: Cell<u32>,
}

impl VerificationBudget {
    fn take(&self) -> bool {
        let done = self.done.get();
        self.done.set(done + 1);
        done < VERIFICATIONS_PER_REQUEST_MAX
    }
}

/// Does one verification in the tenant's turn and remembers the result; `None` if it was known by then, or if the request has had as many
/// as it may: then its token is refused when it is asked again. A worker's other connections have their turn before the tenant's next
/// verification begins.
pub(crate) async fn verify(memory: &TokenMemory, work: &VerificationBudget, todo: PendingVerification, now: u64) -> Option<bool> {
    let PendingVerification { name, verification } = todo;
    if !work.take() {
        memory.refuse(name, BadToken::TooManyKeys, now);
        return None;
    }
    // It is never closed.
    let _turn = memory.turn.clone().acquire_owned().await;
    if memory.is_signed(&verification.token, &verification.key.digest, now).is_some() {
        return None;
    }
    let signed = verification.run();
    memory.remember(verification.token, verification.key.digest, signed, now);
    tokio::task::yield_now().await;
    Some(signed)
}

/// A verification that a request waits for.
#[derive(Debug)]
pub(crate) struct PendingVerification {
    /// Of the token, with what it is checked with.
    name: Name,
    verification: Box<SignatureVerification>,
}

/// Why [`Tokens::check`] gives no token.
#[derive(Debug)]
pub(crate) enum TokenError {
    Bad(BadToken),
    /// Ask again after [`verify`].
    Verify(PendingVerification),
}

/// A RequestAuthentication made ready: its keys are parsed.
#[derive(Debug)]
pub(crate) struct Issuers {
    broken: bool,
    rules: Vec<Issuer>,
}

/// A [`JwtRule`] made ready.
#[derive(Debug)]
pub(crate) struct Issuer {
    name: String,
    audiences: Vec<String>,
    /// `None`: they could not be had yet.
    keys: Option<KeySet>,
    places: Places,
    forward: bool,
    payload_header: Option<String>,
    claim_headers: Vec<(String, Vec<String>)>,
}

impl Issuers {
    pub(crate) fn new(authentication: &Authentication) -> Self {
        Self { broken: authentication.broken.is_some(), rules: authentication.rules.iter().map(Issuer::new).collect() }
    }
}

impl Issuers {
    /// Adds where its tokens may be.
    pub(crate) fn name_places(&self, names: &mut TokenNames) {
        self.rules.iter().for_each(|rule| names.add(&rule.places));
    }
}

impl Issuer {
    fn new(rule: &JwtRule) -> Self {
        let keys = rule.keys.as_ref().map(|json| KeySet::parse(json));
        if let Some(ignored) = keys.as_ref().map(KeySet::ignored).filter(|n| *n > 0) {
            tracing::warn!(issuer = rule.issuer, ignored, "keys of a key set cannot be used: of an unknown kind, too weak, or too many");
        }
        Self {
            name: rule.issuer.clone(),
            audiences: rule.audiences.clone(),
            keys,
            places: Places::of(rule),
            forward: rule.forward,
            payload_header: rule.payload_header.clone(),
            claim_headers: rule.claim_headers.clone(),
        }
    }
}

/// All RequestAuthentications of one destination.
#[derive(Debug)]
pub(crate) struct Tokens {
    /// Another one when any of the keys or rules changed, so that nothing verified with the old ones counts.
    id: u64,
    all: Vec<Arc<Issuers>>,
}

impl Tokens {
    pub(crate) fn new(all: Vec<Arc<Issuers>>) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self { id: LAST.fetch_add(1, Relaxed), all }
    }

    fn rules(&self) -> impl Iterator<Item = &Issuer> {
        self.all.iter().flat_map(|issuers| &issuers.rules)
    }

    /// Looks for tokens, checks them, and writes into `changes` what becomes of them in the request. Every token that is found must be
    /// valid; the first one speaks. `now`: seconds since 1970. It verifies no signature itself: it stops, and is asked again.
    pub(crate) fn check<R: Request>(
        &self,
        request: &R,
        (cache, memory): (&Cache, &TokenMemory),
        now: u64,
        changes: &mut Changes,
    ) -> Result<Option<Arc<Token>>, TokenError> {
        if self.all.iter().any(|issuers| issuers.broken) {
            return Err(TokenError::Bad(BadToken::Broken));
        }
        // What only this gateway may say: a client's own copies go, token or not.
        for rule in self.rules() {
            let said = rule.payload_header.iter().chain(rule.claim_headers.iter().map(|(name, _)| name));
            said.for_each(|name| changes.remove(name));
        }
        let found = place::find(self.rules().map(|rule| &rule.places), request).ok_or(TokenError::Bad(BadToken::TooMany))?;
        let mut first = None;
        for one in &found {
            let (token, rule) = self.accept(one, (cache, memory), now)?;
            if !rule.forward {
                one.place.strip(request, changes);
            }
            if first.is_none() {
                rule.tell(&token, changes);
                first = Some(token);
            }
        }
        Ok(first)
    }

    /// The rule that looks at the token's place and accepts it.
    fn accept(&self, found: &Found<'_>, (cache, memory): (&Cache, &TokenMemory), now: u64) -> Result<(Arc<Token>, &Issuer), TokenError> {
        let name = cache.name(self.id, &found.text);
        if let Some((token, rule)) = cache.get(&name, now)
            && let Some(issuer) = self.rules().nth(rule).filter(|issuer| issuer.places.hold(found.place))
        {
            return Ok((token, issuer));
        }
        if let Some(bad) = memory.refusal(&name, now) {
            return Err(TokenError::Bad(bad));
        }
        let parsed = jws::Parsed::read(&found.text).map_err(TokenError::Bad)?;
        let digest = cache.digest(&found.text);
        let mut why = BadToken::Issuer;
        for (n, rule) in self.rules().enumerate() {
            if rule.name != parsed.issuer() || !rule.places.hold(found.place) {
                continue;
            }
            match parsed.check(rule.keys.as_ref(), &rule.audiences, now, (&digest, memory)) {
                Ok(()) => {
                    let token = Arc::new(parsed.into_token());
                    cache.put(name, token.clone(), n, now);
                    return Ok((token, rule));
                }
                Err(SignatureError::Verify(verification)) => return Err(TokenError::Verify(PendingVerification { name, verification })),
                Err(SignatureError::Bad(bad)) => why = bad,
            }
        }
        // What took work is not worked on again at once.
        if matches!(why, BadToken::Signature | BadToken::TooManyKeys) {
            memory.refuse(name, why, now);
        }
        Err(TokenError::Bad(why))
    }
}

impl Issuer {
    /// What the application is told of a valid token.
    fn tell(&self, token: &Token, changes: &mut Changes) {
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

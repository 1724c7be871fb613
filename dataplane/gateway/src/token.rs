//! JSON Web Tokens (RFC 7519) in requests, as RequestAuthentications want them: where they are looked for, whether one is valid, what becomes
//! of it in the request that is passed on. Who may do what with a valid one is `judge`'s business.

mod cache;
mod jws;
mod keys;
mod place;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use canal_model::authorization::{Authentication, JwtRule};
use canal_router::Request;

pub(crate) use cache::Cache;
pub(crate) use jws::{BadToken, Token};
use keys::KeySet;
use place::{Found, Places};

use crate::changes::Changes;

/// Tokens of one request at most.
pub(crate) const TOKENS_MAX: usize = 4;

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
    /// valid; the first one speaks. `now`: seconds since 1970.
    pub(crate) fn check<R: Request>(
        &self,
        request: &R,
        cache: &Cache,
        now: u64,
        changes: &mut Changes,
    ) -> Result<Option<Arc<Token>>, BadToken> {
        if self.all.iter().any(|issuers| issuers.broken) {
            return Err(BadToken::Broken);
        }
        // What only this gateway may say: a client's own copies go, token or not.
        for rule in self.rules() {
            let said = rule.payload_header.iter().chain(rule.claim_headers.iter().map(|(name, _)| name));
            said.for_each(|name| changes.remove(name));
        }
        let found = place::find(self.rules().map(|rule| &rule.places), request).ok_or(BadToken::TooMany)?;
        let mut first = None;
        for one in &found {
            let (token, rule) = self.accept(one, cache, now)?;
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
    fn accept(&self, found: &Found<'_>, cache: &Cache, now: u64) -> Result<(Arc<Token>, &Issuer), BadToken> {
        let name = cache.name(self.id, &found.text);
        if let Some((token, rule)) = cache.get(&name, now)
            && let Some(issuer) = self.rules().nth(rule).filter(|issuer| issuer.places.hold(found.place))
        {
            return Ok((token, issuer));
        }
        let parsed = jws::Parsed::read(&found.text)?;
        let mut why = BadToken::Issuer;
        for (n, rule) in self.rules().enumerate() {
            if rule.name != parsed.issuer() || !rule.places.hold(found.place) {
                continue;
            }
            match parsed.check(rule.keys.as_ref(), &rule.audiences, now) {
                Ok(()) => {
                    let token = Arc::new(parsed.into_token());
                    cache.put(name, token.clone(), n, now);
                    return Ok((token, rule));
                }
                Err(bad) => why = bad,
            }
        }
        Err(why)
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

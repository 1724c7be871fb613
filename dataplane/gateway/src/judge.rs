//! Phase *judge*: may this client do this at the endpoint that was picked? Tokens are checked, the path is normalised, the destination's
//! policies decide, authorizers are asked. What is judged is the request as it will be forwarded; its [`Changes`] come out of here.
//!
//! Nothing here runs for a destination that nobody said anything of.

pub(crate) mod ask;
pub(crate) mod body;
mod facts;
pub(crate) mod open;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use canal_guard::{Asked, PolicySet, Verdict};
use canal_model::authorization::PolicyKey;
use canal_router::{Request, normalize_path};

use crate::account::Account;
use crate::changes::Changes;
use crate::destination::Resolved;
use crate::endpoints::Chosen;
use crate::fault::{Denial, Fault};
use crate::finish::Judged;
use crate::session::Session;
use crate::snapshot::Guard;
use crate::token::{self, Token};
use crate::worker::Worker;

use facts::{Known, Subject};

/// What a destination's guards are: the endpoint's, and that of the service that was dialled where routes led elsewhere.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Guards<'a> {
    pub(crate) endpoint: Option<&'a Guard>,
    pub(crate) dialled: Option<&'a Guard>,
}

/// Names guards; 0 is none.
type Names = (u64, u64);

impl<'a> Guards<'a> {
    /// Of what goes to an endpoint and was dialled as `resolved`.
    #[inline]
    pub(crate) fn of(chosen: &'a Chosen, resolved: &'a Resolved) -> Self {
        Self { endpoint: chosen.endpoint().guard.as_deref(), dialled: resolved.guard_beside(&chosen.view) }
    }

    /// Nobody said anything.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.endpoint.is_none() && self.dialled.is_none()
    }

    fn names(&self) -> Names {
        (self.endpoint.map_or(0, |guard| guard.id), self.dialled.map_or(0, |guard| guard.id))
    }

    fn all(&self) -> impl Iterator<Item = &'a Guard> + use<'a> {
        self.endpoint.into_iter().chain(self.dialled)
    }
}

/// An authorizer that has to be asked.
#[derive(Debug, Clone)]
pub(crate) struct Question {
    pub(crate) authorizer: PolicyKey,
    pub(crate) policy: PolicyKey,
    /// Which of the guards asks, and what follows its consent.
    guard: usize,
    then: Asked,
}

/// What authorizers have agreed to already.
#[derive(Debug, Clone, Default)]
pub(crate) enum Consent {
    #[default]
    None,
    /// The last question that was answered with yes.
    To(Question),
    /// All that these guards ask.
    Whole(Names),
    /// Whatever is asked: the request was let through before, and authorizers are not asked twice.
    Standing,
}

impl Consent {
    /// Whether these guards have nothing left to ask.
    pub(crate) fn is_of(&self, guards: &Guards<'_>) -> bool {
        matches!(self, Consent::Whole(names) if *names == guards.names())
    }

    /// How far the `n`th of these guards has asked.
    fn asked(&self, guards: &Guards<'_>, n: usize) -> Asked {
        match self {
            Consent::Standing => Asked::ALL,
            Consent::Whole(names) if *names == guards.names() => Asked::ALL,
            Consent::To(question) if n < question.guard => Asked::ALL,
            Consent::To(question) if n == question.guard => question.then,
            _ => Asked::default(),
        }
    }
}

/// A request while it is judged.
#[derive(Debug, Default)]
pub(crate) struct Trial {
    pub(crate) changes: Changes,
    pub(crate) token: Option<Arc<Token>>,
    pub(crate) consent: Consent,
}

/// Why judging came to no end.
#[derive(Debug)]
pub(crate) enum JudgingError {
    Fault(Fault),
    /// A signature has to be verified first: then it is to be judged again.
    Verify(token::PendingVerification),
}

impl From<Fault> for JudgingError {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

/// Verifies one signature. The worker's other connections have their turn before the tenant's next verification.
pub(crate) async fn verify(worker: &Worker, account: &Account, work: &token::VerificationBudget, todo: token::PendingVerification) {
    let memory = worker.tokens.of(account.number);
    if let Some(signed) = token::verify(&memory, work, todo, now()).await {
        worker.counts.verified(if signed { "signed" } else { "not_signed" });
    }
}

/// How far it came.
#[derive(Debug)]
pub(crate) enum Next {
    Pass,
    Ask(Question),
}

impl Trial {
    /// Checks tokens and the path: what the policies will look at. To be done again from the start after each verification.
    pub(crate) fn prepare<R: Request>(
        &mut self,
        worker: &Worker,
        account: &Account,
        guards: &Guards<'_>,
        request: &R,
    ) -> Result<(), JudgingError> {
        let mut valid = 0;
        for guard in guards.all() {
            if guard.policies.looks_at_path() && self.changes.path.is_none() {
                self.changes.path = normalize_path(request.path()).map_err(|why| Fault::UnsafePath(why.name()))?;
            }
            let Some(tokens) = &guard.tokens else { continue };
            let memory = worker.tokens.of(account.number);
            let token = match tokens.check(request, (&worker.tokens, &memory), now(), &mut self.changes) {
                Ok(token) => token,
                Err(token::TokenError::Verify(todo)) => return Err(JudgingError::Verify(todo)),
                Err(token::TokenError::Bad(bad)) => {
                    worker.counts.token(bad.name());
                    return Err(Fault::Unauthenticated(bad).into());
                }
            };
            if token.is_some() {
                valid += 1;
                self.token = token;
            }
        }
        for _ in 0..valid {
            worker.counts.token("valid");
        }
        Ok(())
    }

    /// Lets the policies decide.
    pub(crate) fn decide<'a, R: Request>(
        &'a self,
        worker: &Worker,
        session: &'a Session,
        guards: &Guards<'_>,
        to: SocketAddr,
        (request, authority): (&'a R, &'a [u8]),
        judged: Option<&mut Judged>,
    ) -> Result<Next, Fault> {
        let subject = Subject { request, authority, changes: &self.changes, token: self.token.as_deref() };
        decide(worker, session, guards, &Known::request(session, to, &subject), &self.consent, judged)
    }

    /// Nothing is left to ask for these guards.
    pub(crate) fn settle(&mut self, guards: &Guards<'_>) {
        self.consent = Consent::Whole(guards.names());
    }
}

fn decide(
    worker: &Worker,
    session: &Session,
    guards: &Guards<'_>,
    known: &Known<'_>,
    consent: &Consent,
    mut judged: Option<&mut Judged>,
) -> Result<Next, Fault> {
    if guards.is_empty() && session.who.foreign {
        return Err(denied(worker, session, &Verdict::Deny { policy: None, rule: None }, judged));
    }
    for (n, guard) in guards.all().enumerate() {
        // Federated peers need a policy that names them; that the first guard has one is enough.
        let known = known.foreign(n == 0 && session.who.foreign);
        if guard.policies.observes() && matches!(consent, Consent::None) {
            observe(worker, session, &guard.policies, &known, judged.as_deref_mut());
        }
        match guard.policies.decide_after(&known, consent.asked(guards, n)) {
            Verdict::Allow => {}
            Verdict::Ask { authorizer, policy, then } => {
                return Ok(Next::Ask(Question { authorizer: authorizer.clone(), policy: policy.clone(), guard: n, then }));
            }
            verdict => return Err(denied(worker, session, &verdict, judged)),
        }
    }
    session.account.allowed(|| worker.counts.allowed(&session.account.tenant));
    Ok(Next::Pass)
}

fn observe(worker: &Worker, session: &Session, policies: &PolicySet, known: &Known<'_>, judged: Option<&mut Judged>) {
    let mut hits = Vec::new();
    policies.observe(known, &mut |hit| hits.push(hit));
    for hit in &hits {
        worker.counts.authorized(&session.account.tenant, hit.kind.name(), &policy_name(hit.policy));
    }
    if let Some(judged) = judged {
        judged.hits.extend(hits.iter().map(|hit| format!("{} {}", hit.kind.name(), policy_name(hit.policy))));
    }
}

/// A policy as logs and counters name it, inside its tenant.
pub(crate) fn policy_name(key: &PolicyKey) -> String {
    format!("{}/{}", key.namespace, key.name)
}

fn denied(worker: &Worker, session: &Session, verdict: &Verdict<'_>, judged: Option<&mut Judged>) -> Fault {
    let denial = Denial::of(verdict);
    worker.counts.authorized(&session.account.tenant, denial.action(), &denial.policy);
    if let Some(judged) = judged {
        judged.policy.clone_from(&denial.policy);
    }
    Fault::Denied(Box::new(denial))
}

/// Judges bytes that are not requests: only what a connection shows is known.
pub(crate) fn connection(
    worker: &Worker,
    session: &Session,
    guards: &Guards<'_>,
    to: SocketAddr,
    consent: &Consent,
    judged: Option<&mut Judged>,
) -> Result<Next, Fault> {
    if guards.is_empty() && !session.who.foreign {
        return Ok(Next::Pass);
    }
    decide(worker, session, guards, &Known::connection(session, to), consent, judged)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

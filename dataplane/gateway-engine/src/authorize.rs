//! Phase *authorize*: decides whether the client may send this request to the selected endpoint.
//!
//! It validates JWTs, normalizes the path, evaluates the destination's policies, and calls external
//! authorizers. It authorizes the request in the form in which it is forwarded; the resulting
//! [`RequestMutations`] are its output. It does nothing for a destination without policies, unless
//! the client is federated.
//!
//! Start with [`AuthorizationState`] for requests and [`connection`] for bytes that are not
//! requests.

pub(crate) mod buffered_body;
pub(crate) mod ext_authz;
mod gateway_attributes;
pub(crate) mod reauthorize;
pub(crate) mod route_authorizer;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use canal_authorization::{AuthorizationDecision, ExtAuthzProgress, PolicySet};
use canal_gateway_config::DestinationPolicy;
use canal_gateway_config::RequestMutations;
use canal_gateway_config::jwt::{self, Token};
use canal_gateway_http::head::FullRequest;
use canal_gateway_http::proxy_error::{PolicyDenial, ProxyError};
use canal_gateway_limits::tenant_usage::TenantUsage;
use canal_model::authorization::PolicyKey;
use canal_model::program::PolicyPaths;
use canal_router::{RoutableRequest, normalize_path};

use crate::destination::ResolvedDestination;
use crate::endpoints::{EndpointSetState, SelectedEndpoint};
use crate::finish::AuthzRecord;
use crate::route::RoutedRequest;
use crate::session::ClientSession;
use crate::worker::Worker;

use gateway_attributes::{GatewayAttributes, MutatedRequest};

/// The policies that apply to one request: those of the endpoint, and those of the dialled service
/// where routes led to another service.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DestinationPolicies<'a> {
    pub(crate) endpoint: Option<&'a DestinationPolicy>,
    pub(crate) dialled: Option<&'a DestinationPolicy>,
    /// Number of proxies before the Gateway that was dialled.
    pub(crate) trusted_proxies: u8,
}

/// IDs of the endpoint's and the dialled service's [`DestinationPolicy`]; 0 means that there is
/// none.
type PolicyIds = (u64, u64);

impl<'a> DestinationPolicies<'a> {
    /// Selects the policies for traffic that goes to endpoint `chosen` and was dialled as
    /// `resolved`.
    #[inline]
    pub(crate) fn of(chosen: &'a SelectedEndpoint, resolved: &'a ResolvedDestination) -> Self {
        Self {
            endpoint: chosen.endpoint().guard.as_deref(),
            dialled: resolved.guard_beside(&chosen.view),
            trusted_proxies: resolved.trusted_proxies(),
        }
    }

    /// Selects the policies for a request that the gateway answers itself. `policies` are those of
    /// the endpoints together.
    pub(crate) fn of_answer(
        policies: Option<&'a DestinationPolicy>,
        routed: &'a RoutedRequest,
    ) -> Self {
        Self {
            endpoint: policies,
            dialled: routed.resolved.guard_beside(&routed.view),
            trusted_proxies: routed.resolved.trusted_proxies(),
        }
    }

    /// True if no policy applies.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.endpoint.is_none() && self.dialled.is_none()
    }

    fn names(&self) -> PolicyIds {
        (
            self.endpoint.map_or(0, |guard| guard.id),
            self.dialled.map_or(0, |guard| guard.id),
        )
    }

    fn all(&self) -> impl Iterator<Item = &'a DestinationPolicy> + use<'a> {
        self.endpoint.into_iter().chain(self.dialled)
    }
}

/// A call to an external authorizer that has to be made before the request may pass.
#[derive(Debug, Clone)]
pub(crate) struct ExtAuthzCheck {
    pub(crate) authorizer: PolicyKey,
    pub(crate) policy: PolicyKey,
    /// Position among the [`DestinationPolicies`] of the policy set that requires the check.
    guard: usize,
    /// Progress of that policy set once the authorizer has allowed the request.
    then: ExtAuthzProgress,
}

/// Extent to which external authorizers have already allowed a request.
#[derive(Debug, Clone, Default)]
pub(crate) enum ExtAuthzGrant {
    #[default]
    None,
    /// Authorizers allowed the request up to and including this check.
    To(ExtAuthzCheck),
    /// Authorizers allowed the request for all checks of these policies.
    Whole(PolicyIds),
    /// No check is made: the request was admitted before, and authorizers are not called a second
    /// time.
    Standing,
}

impl ExtAuthzGrant {
    /// True if these policies require no further ext_authz check.
    pub(crate) fn is_of(&self, guards: &DestinationPolicies<'_>) -> bool {
        matches!(self, ExtAuthzGrant::Whole(names) if *names == guards.names())
    }

    /// Progress of the ext_authz checks in the policy set at position `n`.
    fn progress_of(&self, guards: &DestinationPolicies<'_>, n: usize) -> ExtAuthzProgress {
        match self {
            ExtAuthzGrant::Standing => ExtAuthzProgress::ALL,
            ExtAuthzGrant::Whole(names) if *names == guards.names() => ExtAuthzProgress::ALL,
            ExtAuthzGrant::To(check) if n < check.guard => ExtAuthzProgress::ALL,
            ExtAuthzGrant::To(check) if n == check.guard => check.then,
            _ => ExtAuthzProgress::default(),
        }
    }
}

/// State of one request while it is authorized.
#[derive(Debug, Default)]
pub(crate) struct AuthorizationState {
    pub(crate) changes: RequestMutations,
    pub(crate) token: Option<Arc<Token>>,
    pub(crate) consent: ExtAuthzGrant,
    /// True once the server that the rule names has allowed the request.
    pub(crate) is_allowed_by_rule: bool,
    /// True for a copy of a request. Its decisions and tokens are not counted: the counters are
    /// about requests.
    pub(crate) is_of_copy: bool,
}

/// Reason why authorization stopped before a decision.
#[derive(Debug)]
pub(crate) enum AuthorizationInterrupt {
    Fault(ProxyError),
    /// A signature must be verified first; then the caller authorizes again.
    Verify(jwt::PendingVerification),
}

impl From<ProxyError> for AuthorizationInterrupt {
    fn from(fault: ProxyError) -> Self {
        Self::Fault(fault)
    }
}

/// Verifies one signature. The worker's other connections run before the tenant's next verification
/// starts.
pub(crate) async fn verify(
    worker: &Worker,
    account: &TenantUsage,
    work: &jwt::VerificationBudget,
    todo: jwt::PendingVerification,
) {
    let memory = worker.tokens.of(account.number);
    if let Some(signed) = jwt::verify(&memory, work, todo, now()).await {
        worker
            .counts
            .verified(if signed { "signed" } else { "not_signed" });
    }
}

/// Where a decision is recorded.
enum DecisionRecord<'a> {
    /// The decision is recorded nowhere.
    None,
    /// It is counted, and written to the request's record if there is one.
    Counted(Option<&'a mut AuthzRecord>),
}

/// Result of one evaluation of the policies.
#[derive(Debug)]
pub(crate) enum AuthorizationStep {
    Pass,
    CallAuthorizer(ExtAuthzCheck),
}

impl AuthorizationState {
    /// Validates the tokens and normalizes the path, as far as the policies read them. The caller
    /// repeats it from the start after each verification.
    pub(crate) fn prepare<R: RoutableRequest>(
        &mut self,
        worker: &Worker,
        account: &TenantUsage,
        (guards, paths): (&DestinationPolicies<'_>, PolicyPaths),
        request: &R,
    ) -> Result<(), AuthorizationInterrupt> {
        // Counted only after all policies are done: a repeated call must not count a token twice.
        let mut valid = 0;
        for guard in guards.all() {
            if guard.policies.needs_path() {
                self.normalize_path(request, paths)?;
            }
            let Some(tokens) = &guard.tokens else {
                continue;
            };
            let memory = worker.tokens.of(account.number);
            let token =
                match tokens.check(request, (&worker.tokens, &memory), now(), &mut self.changes) {
                    Ok(token) => token,
                    Err(jwt::TokenCheckError::Verify(todo)) => {
                        return Err(AuthorizationInterrupt::Verify(todo));
                    }
                    Err(jwt::TokenCheckError::Bad(bad)) => {
                        // The token of a mirror's copy was counted with the request.
                        if !self.is_of_copy {
                            worker.counts.token(bad.name());
                        }
                        return Err(ProxyError::Unauthenticated(bad).into());
                    }
                };
            if token.is_some() {
                // A mirror's copy is the same request, whose token was counted already.
                valid += usize::from(!self.is_of_copy);
                self.token = token;
            }
        }
        for _ in 0..valid {
            worker.counts.token("valid");
        }
        Ok(())
    }

    /// Gives the path its only form, in which it is judged and forwarded.
    ///
    /// # Errors
    /// Servers could interpret the path in different ways.
    pub(crate) fn normalize_path<R: RoutableRequest>(
        &mut self,
        request: &R,
        paths: PolicyPaths,
    ) -> Result<(), ProxyError> {
        if self.changes.path.is_none() {
            self.changes.path = normalize_path(request.path(), paths)
                .map_err(|why| ProxyError::UnsafePath(why.name()))?;
        }
        Ok(())
    }

    /// Evaluates the policies of the endpoint and of the dialled service.
    pub(crate) fn decide<'a, R: RoutableRequest>(
        &'a self,
        worker: &Worker,
        session: &'a ClientSession,
        guards: &DestinationPolicies<'_>,
        to: Option<SocketAddr>,
        (request, authority): (&'a R, &'a [u8]),
        record: Option<&mut AuthzRecord>,
    ) -> Result<AuthorizationStep, ProxyError> {
        let subject = MutatedRequest {
            request,
            authority,
            changes: &self.changes,
            token: self.token.as_deref(),
        };
        decide(
            worker,
            session,
            guards,
            &GatewayAttributes::request(session, to, &subject).behind(guards.trusted_proxies),
            &self.consent,
            if self.is_of_copy {
                DecisionRecord::None
            } else {
                DecisionRecord::Counted(record)
            },
        )
    }

    /// True if the authorizer of the request's rule must be called. A preflight is not: browsers send it
    /// without credentials.
    pub(crate) fn needs_rule_check(&self, routed: &RoutedRequest) -> bool {
        let filters = routed.filters;
        filters.calls_authorizer() && !filters.answers_preflight() && !self.is_allowed_by_rule
    }

    /// Records that the server of the rule has allowed the request with these mutations. They leave
    /// headers that policies determine as they are.
    pub(crate) fn allow_by_rule<R: FullRequest>(
        &mut self,
        request: &R,
        agreed: ext_authz::ExtAuthzMutations,
    ) {
        let agreed = agreed.without_determined(&self.changes);
        agreed.apply(request, &mut self.changes);
        self.is_allowed_by_rule = true;
    }

    /// Records that these policies require no further ext_authz check.
    pub(crate) fn settle(&mut self, guards: &DestinationPolicies<'_>) {
        self.consent = ExtAuthzGrant::Whole(guards.names());
    }
}

/// Returns the policies of a request that the gateway answers itself: those of the endpoints of its
/// set together.
///
/// # Errors
/// The tenant or the service no longer exists.
pub(crate) fn policies_of_answer(
    worker: &Worker,
    session: &ClientSession,
    view: &EndpointSetState,
) -> Result<Option<Arc<DestinationPolicy>>, ProxyError> {
    let snapshot = worker.snapshot();
    let tenant = snapshot
        .tenant(session.account.tenant.as_str())
        .ok_or(ProxyError::NoService)?;
    let service = view.set.service.as_ref().ok_or(ProxyError::NoService)?;
    // Endpoints of one set mostly share a policy set, so each set of policies is read once.
    let mut seen = HashSet::new();
    let endpoints = view.set.endpoints.iter();
    let labels: Vec<_> = endpoints
        .filter(|endpoint| seen.insert(endpoint.guard.as_ref().map(|guard| guard.id)))
        .map(|endpoint| &endpoint.workload.labels)
        .collect();
    Ok(tenant.policies.guard_of_answers(&service.key, &labels))
}

fn decide(
    worker: &Worker,
    session: &ClientSession,
    guards: &DestinationPolicies<'_>,
    known: &GatewayAttributes<'_>,
    consent: &ExtAuthzGrant,
    mut record: DecisionRecord<'_>,
) -> Result<AuthorizationStep, ProxyError> {
    // A federated client needs a policy that allows it, so without policies it is denied.
    if guards.is_empty() && session.principal.foreign {
        return Err(denied(
            worker,
            session,
            &AuthorizationDecision::Deny {
                policy: None,
                rule: None,
            },
            record,
        ));
    }
    for (n, guard) in guards.all().enumerate() {
        // A federated client needs a policy that names it; a match in the first policy set is
        // enough.
        let known = known.foreign(n == 0 && session.principal.foreign);
        // Shadow matches are recorded on the first evaluation only, not again after each ext_authz
        // grant.
        if guard.policies.observes()
            && matches!(consent, ExtAuthzGrant::None)
            && let DecisionRecord::Counted(record) = &mut record
        {
            observe(
                worker,
                session,
                &guard.policies,
                &known,
                record.as_deref_mut(),
            );
        }
        match guard
            .policies
            .decide_after(&known, consent.progress_of(guards, n))
        {
            AuthorizationDecision::Allow => {}
            AuthorizationDecision::CallAuthorizer {
                authorizer,
                policy,
                then,
            } => {
                return Ok(AuthorizationStep::CallAuthorizer(ExtAuthzCheck {
                    authorizer: authorizer.clone(),
                    policy: policy.clone(),
                    guard: n,
                    then,
                }));
            }
            // An undecided policy denies too, because no later hop evaluates it.
            verdict => return Err(denied(worker, session, &verdict, record)),
        }
    }
    if let DecisionRecord::Counted(_) = record {
        let account = &session.account;
        account.allowed(|| worker.counts.allowed(&account.tenant));
    }
    Ok(AuthorizationStep::Pass)
}

fn observe(
    worker: &Worker,
    session: &ClientSession,
    policies: &PolicySet,
    known: &GatewayAttributes<'_>,
    record: Option<&mut AuthzRecord>,
) {
    let mut hits = Vec::new();
    policies.observe(known, &mut |hit| hits.push(hit));
    for hit in &hits {
        worker.counts.authorized(
            &session.account.tenant,
            hit.kind.name(),
            &policy_name(hit.policy),
        );
    }
    if let Some(record) = record {
        record.hits.extend(
            hits.iter()
                .map(|hit| format!("{} {}", hit.kind.name(), policy_name(hit.policy))),
        );
    }
}

/// Name of a policy inside its tenant, as logs and counters show it: `namespace/name`.
pub(crate) fn policy_name(key: &PolicyKey) -> String {
    format!("{}/{}", key.namespace, key.name)
}

fn denied(
    worker: &Worker,
    session: &ClientSession,
    verdict: &AuthorizationDecision<'_>,
    record: DecisionRecord<'_>,
) -> ProxyError {
    let denial = PolicyDenial::of(verdict);
    if let DecisionRecord::Counted(record) = record {
        worker
            .counts
            .authorized(&session.account.tenant, denial.action(), &denial.policy);
        if let Some(record) = record {
            record.policy.clone_from(&denial.policy);
        }
    }
    ProxyError::Denied(Box::new(denial))
}

/// Authorizes bytes that are not requests. Only attributes of the connection are known.
pub(crate) fn connection(
    worker: &Worker,
    session: &ClientSession,
    guards: &DestinationPolicies<'_>,
    to: SocketAddr,
    consent: &ExtAuthzGrant,
    record: Option<&mut AuthzRecord>,
) -> Result<AuthorizationStep, ProxyError> {
    if guards.is_empty() && !session.principal.foreign {
        return Ok(AuthorizationStep::Pass);
    }
    decide(
        worker,
        session,
        guards,
        &GatewayAttributes::connection(session, to).behind(guards.trusted_proxies),
        consent,
        DecisionRecord::Counted(record),
    )
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

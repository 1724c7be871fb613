//! Evaluates the policies of one destination in Istio's order: CUSTOM, then DENY, then ALLOW. AUDIT
//! policies and dry runs are reported as shadow matches and decide nothing. Start with
//! [`PolicySet::decide`].

use std::sync::Arc;

use canal_model::authorization::{Attribute, Authorization, AuthorizationAction, PolicyKey};

use crate::attributes::Attributes;
use crate::matching::CompiledRule;
use crate::ternary::Truth;

/// Decision on a request or a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthorizationDecision<'a> {
    Allow,
    /// The request is denied. `policy` is `None` if no ALLOW policy matched, although there are
    /// some or the peer is foreign. `rule` is the index of the rule in the policy; it is `None` for
    /// a broken policy too.
    Deny {
        policy: Option<&'a PolicyKey>,
        rule: Option<usize>,
    },
    /// Call this authorizer. If it grants the request, continue with [`PolicySet::decide_after`].
    CallAuthorizer {
        authorizer: &'a PolicyKey,
        policy: &'a PolicyKey,
        then: ExtAuthzProgress,
    },
    /// The decision depends on an attribute that this hop cannot observe. If no later hop can
    /// observe it either, the hop must deny.
    Undecided {
        policy: &'a PolicyKey,
        attribute: &'a Attribute,
    },
}

impl AuthorizationDecision<'_> {
    pub fn is_allow(&self) -> bool {
        matches!(self, AuthorizationDecision::Allow)
    }
}

/// Progress through the external authorizers of a destination, in their order: those before it need
/// not be called any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct ExtAuthzProgress {
    /// Number of authorizers, from the first one on, that have granted the request.
    granted: usize,
}

impl ExtAuthzProgress {
    /// All authorizers have granted the request, because an earlier hop has called them.
    pub const ALL: ExtAuthzProgress = ExtAuthzProgress {
        granted: usize::MAX,
    };
}

/// A policy that matched without an effect on the decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShadowMatch<'a> {
    pub policy: &'a PolicyKey,
    pub rule: Option<usize>,
    pub kind: ShadowKind,
}

/// Effect that a [`ShadowMatch`] would have had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ShadowKind {
    /// An AUDIT policy matched.
    Audit,
    /// A dry run of a DENY or broken policy matched and would have denied.
    WouldDeny,
    /// A dry run of an ALLOW policy matched.
    WouldAllow,
    /// A dry run of a CUSTOM policy matched.
    WouldCallAuthorizer,
}

impl ShadowKind {
    /// Returns the name of the kind in counters and logs.
    pub fn name(self) -> &'static str {
        match self {
            ShadowKind::Audit => "audit",
            ShadowKind::WouldDeny => "dry_run_deny",
            ShadowKind::WouldAllow => "dry_run_allow",
            ShadowKind::WouldCallAuthorizer => "dry_run_custom",
        }
    }
}

#[derive(Debug)]
struct CompiledPolicy {
    key: PolicyKey,
    rules: Box<[CompiledRule]>,
}

impl CompiledPolicy {
    fn new(policy: &Authorization) -> Self {
        let compiled = |rule| CompiledRule::new(rule, &policy.action);
        Self {
            key: policy.key.clone(),
            rules: policy.rules.iter().map(compiled).collect(),
        }
    }

    /// Returns the first rule that matches, or else the first one that may match.
    fn test<F: Attributes + ?Sized>(&self, facts: &F, named: bool) -> (Truth<'_>, Option<usize>) {
        let (mut so_far, mut at) = (Truth::No, None);
        for (n, rule) in self.rules.iter().enumerate() {
            match rule.test(facts, named) {
                Truth::Yes => return (Truth::Yes, Some(n)),
                maybe @ Truth::Maybe(_) if so_far == Truth::No => (so_far, at) = (maybe, Some(n)),
                _ => {}
            }
        }
        (so_far, at)
    }
}

#[derive(Debug)]
struct Custom {
    authorizer: PolicyKey,
    policies: Vec<CompiledPolicy>,
}

/// All policies of one destination, compiled.
#[derive(Debug, Default)]
pub struct PolicySet {
    /// Key of a broken policy, because of which everything is denied.
    broken: Option<PolicyKey>,
    custom_policies: Vec<Custom>,
    denies: Vec<CompiledPolicy>,
    allows: Vec<CompiledPolicy>,
    /// Audits and dry runs. The flag is true for a broken policy, which always matches.
    watched: Vec<(CompiledPolicy, ShadowKind, bool)>,
    needs_path: bool,
    needs_http: bool,
    enforces: bool,
}

impl PolicySet {
    /// Compiles the policies that apply to the destination according to [`crate::applies`]. Their
    /// order matters only for which of several matching policies is named.
    pub fn new(policies: &[Arc<Authorization>]) -> Self {
        let mut set = Self::default();
        for policy in policies {
            set.add(policy);
        }
        let enforced = || {
            set.custom_policies
                .iter()
                .flat_map(|c| &c.policies)
                .chain(&set.denies)
                .chain(&set.allows)
        };
        let attributes =
            || enforced().flat_map(|p| p.rules.iter().flat_map(CompiledRule::attributes));
        let audited = set
            .watched
            .iter()
            .filter(|(_, kind, _)| *kind == ShadowKind::Audit);
        let audited =
            audited.flat_map(|(policy, ..)| policy.rules.iter().flat_map(CompiledRule::attributes));
        // An authorizer receives the path, and how it decides is not known here.
        set.needs_path = attributes().chain(audited).any(|a| *a == Attribute::Path)
            || !set.custom_policies.is_empty();
        set.needs_http = attributes().any(|a| !a.is_l4()) || !set.custom_policies.is_empty();
        set.enforces = set.broken.is_some() || enforced().next().is_some();
        set
    }

    fn add(&mut self, policy: &Authorization) {
        let ready = CompiledPolicy::new(policy);
        match (&policy.action, policy.dry_run, policy.broken.is_some()) {
            (_, false, true) => drop(self.broken.get_or_insert(ready.key)),
            (_, true, true) => self.watched.push((ready, ShadowKind::WouldDeny, true)),
            (AuthorizationAction::Audit, ..) => {
                self.watched.push((ready, ShadowKind::Audit, false))
            }
            (AuthorizationAction::Allow, true, _) => {
                self.watched.push((ready, ShadowKind::WouldAllow, false))
            }
            (AuthorizationAction::Deny, true, _) => {
                self.watched.push((ready, ShadowKind::WouldDeny, false))
            }
            (AuthorizationAction::Custom(_), true, _) => {
                self.watched
                    .push((ready, ShadowKind::WouldCallAuthorizer, false))
            }
            (AuthorizationAction::Allow, ..) => self.allows.push(ready),
            (AuthorizationAction::Deny, ..) => self.denies.push(ready),
            (AuthorizationAction::Custom(authorizer), ..) => match self
                .custom_policies
                .iter_mut()
                .find(|c| c.authorizer == *authorizer)
            {
                Some(custom) => custom.policies.push(ready),
                None => self.custom_policies.push(Custom {
                    authorizer: authorizer.clone(),
                    policies: vec![ready],
                }),
            },
        }
    }

    /// Returns true if there are no policies: every peer that is not foreign is allowed.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.enforces && self.watched.is_empty()
    }

    /// Returns true if there are audits or dry runs.
    #[inline]
    pub fn observes(&self) -> bool {
        !self.watched.is_empty()
    }

    /// Returns true if an enforced or AUDIT policy tests the path, or an authorizer receives it:
    /// then the caller must normalize the path. A dry run alone changes no request.
    pub fn needs_path(&self) -> bool {
        self.needs_path
    }

    /// Returns true if an enforced policy depends on more than a hop without HTTP can observe.
    pub fn needs_http(&self) -> bool {
        self.needs_http
    }

    /// Iterates over the authorizers that may have to be called.
    pub fn authorizers(&self) -> impl Iterator<Item = &PolicyKey> {
        self.custom_policies.iter().map(|custom| &custom.authorizer)
    }

    /// Decides on a request or connection. It does not allocate, except for a host with a trailing
    /// dot.
    #[inline]
    pub fn decide<F: Attributes + ?Sized>(&self, facts: &F) -> AuthorizationDecision<'_> {
        if !self.enforces && !facts.is_foreign() {
            return AuthorizationDecision::Allow;
        }
        self.evaluate(facts, ExtAuthzProgress::default())
    }

    /// Continues a decision after authorizers have granted the request; `progress` counts them.
    pub fn decide_after<F: Attributes + ?Sized>(
        &self,
        facts: &F,
        progress: ExtAuthzProgress,
    ) -> AuthorizationDecision<'_> {
        self.evaluate(facts, progress)
    }

    fn evaluate<F: Attributes + ?Sized>(
        &self,
        facts: &F,
        progress: ExtAuthzProgress,
    ) -> AuthorizationDecision<'_> {
        // A broken policy fails closed, even if others would allow.
        if let Some(policy) = &self.broken {
            return AuthorizationDecision::Deny {
                policy: Some(policy),
                rule: None,
            };
        }
        // An undecided policy does not end the search; a later one may decide regardless of the
        // unknown attribute.
        // The first undecided policy is reported, as the first match is.
        let mut undecided = None;
        // The order is Istio's: CUSTOM, then DENY, then ALLOW.
        for (n, custom) in self.custom_policies.iter().enumerate() {
            match first(&custom.policies, facts, false) {
                // An authorizer that has granted the request is not called a second time.
                (Truth::Yes, Some((policy, _))) if n >= progress.granted => {
                    return AuthorizationDecision::CallAuthorizer {
                        authorizer: &custom.authorizer,
                        policy,
                        then: ExtAuthzProgress { granted: n + 1 },
                    };
                }
                // The hop that called the authorizers has observed all attributes.
                (Truth::Maybe(attribute), Some((policy, _)))
                    if progress != ExtAuthzProgress::ALL =>
                {
                    undecided =
                        undecided.or(Some(AuthorizationDecision::Undecided { policy, attribute }));
                }
                // No policy matches, an authorizer has granted the request already, or an earlier
                // hop has called it.
                _ => {}
            }
        }
        match first(&self.denies, facts, false) {
            (Truth::Yes, Some((policy, rule))) => {
                return AuthorizationDecision::Deny {
                    policy: Some(policy),
                    rule: Some(rule),
                };
            }
            (Truth::Maybe(attribute), Some((policy, _))) => {
                undecided =
                    undecided.or(Some(AuthorizationDecision::Undecided { policy, attribute }))
            }
            // No DENY policy matches.
            _ => {}
        }
        // A foreign peer needs a rule that names it, even at a destination without ALLOW policies.
        let foreign = facts.is_foreign();
        if !self.allows.is_empty() || foreign {
            match first(&self.allows, facts, foreign) {
                (Truth::Yes, _) => {}
                (Truth::Maybe(attribute), Some((policy, _))) => {
                    undecided =
                        undecided.or(Some(AuthorizationDecision::Undecided { policy, attribute }))
                }
                // As in Istio: if there are ALLOW policies, a request that none of them matches is
                // denied.
                _ => {
                    return AuthorizationDecision::Deny {
                        policy: None,
                        rule: None,
                    };
                }
            }
        }
        undecided.unwrap_or(AuthorizationDecision::Allow)
    }

    /// Passes each audit and dry run that certainly matches to `each`. It does not allocate, except
    /// for a host with a trailing dot.
    pub fn observe<'a, F: Attributes + ?Sized>(
        &'a self,
        facts: &F,
        each: &mut dyn FnMut(ShadowMatch<'a>),
    ) {
        for (ready, kind, broken) in &self.watched {
            let (truth, rule) = if *broken {
                (Truth::Yes, None)
            } else {
                ready.test(facts, false)
            };
            if truth == Truth::Yes {
                each(ShadowMatch {
                    policy: &ready.key,
                    rule,
                    kind: *kind,
                });
            }
        }
    }
}

/// Returns the first policy that matches, or else the first one that may match.
fn first<'a, F: Attributes + ?Sized>(
    policies: &'a [CompiledPolicy],
    facts: &F,
    named: bool,
) -> (Truth<'a>, Option<(&'a PolicyKey, usize)>) {
    let mut so_far = (Truth::No, None);
    for policy in policies {
        match policy.test(facts, named) {
            (Truth::Yes, rule) => return (Truth::Yes, rule.map(|rule| (&policy.key, rule))),
            (maybe @ Truth::Maybe(_), rule) if so_far.0 == Truth::No => {
                so_far = (maybe, rule.map(|rule| (&policy.key, rule)))
            }
            _ => {}
        }
    }
    so_far
}

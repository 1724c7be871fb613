//! The policies of one destination and what they say together: CUSTOM, then DENY, then ALLOW, as Istio has it; AUDIT and dry runs are told
//! apart and decide nothing.

use std::sync::Arc;

use canal_model::authorization::{Action, Attribute, Authorization, PolicyKey};

use crate::facts::Facts;
use crate::matching::ReadyRule;
use crate::truth::Truth;

/// What follows for a request or a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict<'a> {
    Allow,
    /// `policy` is `None` where no ALLOW policy matched (and there are some, or the peer is foreign). `rule` is the rule's place in it;
    /// `None` too for a broken policy.
    Deny {
        policy: Option<&'a PolicyKey>,
        rule: Option<usize>,
    },
    /// Ask this authorizer; if it agrees, go on with [`PolicySet::decide_after`].
    Ask {
        authorizer: &'a PolicyKey,
        policy: &'a PolicyKey,
        then: Asked,
    },
    /// It depends on an attribute that this hop cannot see. Whoever is the last to know must deny.
    Undecided {
        policy: &'a PolicyKey,
        attribute: &'a Attribute,
    },
}

impl Verdict<'_> {
    pub fn is_allow(&self) -> bool {
        matches!(self, Verdict::Allow)
    }
}

/// How many authorizers have agreed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Asked(usize);

impl Asked {
    /// All of them, whoever they are: an earlier hop asked.
    pub const ALL: Asked = Asked(usize::MAX);
}

/// A policy that matched and decides nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hit<'a> {
    pub policy: &'a PolicyKey,
    pub rule: Option<usize>,
    pub kind: HitKind,
}

/// What a [`Hit`] would have done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HitKind {
    /// An AUDIT policy matched.
    Audit,
    /// A dry run would have denied: a DENY (or broken) policy matched.
    WouldDeny,
    /// A dry run of an ALLOW policy matched.
    WouldAllow,
    /// A dry run of a CUSTOM policy matched.
    WouldAsk,
}

impl HitKind {
    /// As counters and logs say it.
    pub fn name(self) -> &'static str {
        match self {
            HitKind::Audit => "audit",
            HitKind::WouldDeny => "dry_run_deny",
            HitKind::WouldAllow => "dry_run_allow",
            HitKind::WouldAsk => "dry_run_custom",
        }
    }
}

#[derive(Debug)]
struct Ready {
    key: PolicyKey,
    rules: Box<[ReadyRule]>,
}

impl Ready {
    fn new(policy: &Authorization) -> Self {
        Self { key: policy.key.clone(), rules: policy.rules.iter().map(ReadyRule::new).collect() }
    }

    /// The first rule that matches, or that may.
    fn test<F: Facts + ?Sized>(&self, facts: &F, named: bool) -> (Truth<'_>, Option<usize>) {
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
    policies: Vec<Ready>,
}

/// All policies of one destination.
#[derive(Debug, Default)]
pub struct PolicySet {
    /// Denies whatever comes.
    broken: Option<PolicyKey>,
    customs: Vec<Custom>,
    denies: Vec<Ready>,
    allows: Vec<Ready>,
    /// Audits and dry runs.
    watched: Vec<(Ready, HitKind, bool)>,
    looks_at_path: bool,
    looks_beyond_l4: bool,
    enforces: bool,
}

impl PolicySet {
    /// Of the policies that [`crate::applies`] says are the destination's. Their order decides only which of several is named.
    pub fn new(policies: &[Arc<Authorization>]) -> Self {
        let mut set = Self::default();
        for policy in policies {
            set.add(policy);
        }
        let enforced = || set.customs.iter().flat_map(|c| &c.policies).chain(&set.denies).chain(&set.allows);
        let attributes = || enforced().flat_map(|p| p.rules.iter().flat_map(ReadyRule::attributes));
        let audited = set.watched.iter().filter(|(_, kind, _)| *kind == HitKind::Audit);
        let audited = audited.flat_map(|(policy, ..)| policy.rules.iter().flat_map(ReadyRule::attributes));
        // An authorizer is shown the path, and what it decides by is not known here.
        set.looks_at_path = attributes().chain(audited).any(|a| *a == Attribute::Path) || !set.customs.is_empty();
        set.looks_beyond_l4 = attributes().any(|a| !a.is_l4()) || !set.customs.is_empty();
        set.enforces = set.broken.is_some() || enforced().next().is_some();
        set
    }

    fn add(&mut self, policy: &Authorization) {
        let ready = Ready::new(policy);
        match (&policy.action, policy.dry_run, policy.broken.is_some()) {
            (_, false, true) => drop(self.broken.get_or_insert(ready.key)),
            (_, true, true) => self.watched.push((ready, HitKind::WouldDeny, true)),
            (Action::Audit, ..) => self.watched.push((ready, HitKind::Audit, false)),
            (Action::Allow, true, _) => self.watched.push((ready, HitKind::WouldAllow, false)),
            (Action::Deny, true, _) => self.watched.push((ready, HitKind::WouldDeny, false)),
            (Action::Custom(_), true, _) => self.watched.push((ready, HitKind::WouldAsk, false)),
            (Action::Allow, ..) => self.allows.push(ready),
            (Action::Deny, ..) => self.denies.push(ready),
            (Action::Custom(authorizer), ..) => match self.customs.iter_mut().find(|c| c.authorizer == *authorizer) {
                Some(custom) => custom.policies.push(ready),
                None => self.customs.push(Custom { authorizer: authorizer.clone(), policies: vec![ready] }),
            },
        }
    }

    /// Nobody said anything: all but foreign peers may do all.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.enforces && self.watched.is_empty()
    }

    /// There are audits or dry runs.
    #[inline]
    pub fn observes(&self) -> bool {
        !self.watched.is_empty()
    }

    /// Whether the path decides, or an authorizer is shown it: then it must be normalised. A dry run alone changes no request.
    pub fn looks_at_path(&self) -> bool {
        self.looks_at_path
    }

    /// What is enforced depends on more than a hop without HTTP can know.
    pub fn looks_beyond_l4(&self) -> bool {
        self.looks_beyond_l4
    }

    /// The authorizers that may have to be asked.
    pub fn authorizers(&self) -> impl Iterator<Item = &PolicyKey> {
        self.customs.iter().map(|custom| &custom.authorizer)
    }

    /// Judges. Allocates nothing.
    #[inline]
    pub fn decide<F: Facts + ?Sized>(&self, facts: &F) -> Verdict<'_> {
        if !self.enforces && !facts.is_foreign() {
            return Verdict::Allow;
        }
        self.judge(facts, Asked::default())
    }

    /// The same once authorizers have agreed.
    pub fn decide_after<F: Facts + ?Sized>(&self, facts: &F, asked: Asked) -> Verdict<'_> {
        self.judge(facts, asked)
    }

    fn judge<F: Facts + ?Sized>(&self, facts: &F, asked: Asked) -> Verdict<'_> {
        if let Some(policy) = &self.broken {
            return Verdict::Deny { policy: Some(policy), rule: None };
        }
        let mut undecided = None;
        for (n, custom) in self.customs.iter().enumerate() {
            match first(&custom.policies, facts, false) {
                (Truth::Yes, Some((policy, _))) if n >= asked.0 => {
                    return Verdict::Ask { authorizer: &custom.authorizer, policy, then: Asked(n + 1) };
                }
                // Who asked before has seen all that there is to see.
                (Truth::Maybe(attribute), Some((policy, _))) if asked != Asked::ALL => {
                    undecided = undecided.or(Some(Verdict::Undecided { policy, attribute }));
                }
                _ => {}
            }
        }
        match first(&self.denies, facts, false) {
            (Truth::Yes, Some((policy, rule))) => return Verdict::Deny { policy: Some(policy), rule: Some(rule) },
            (Truth::Maybe(attribute), Some((policy, _))) => undecided = undecided.or(Some(Verdict::Undecided { policy, attribute })),
            _ => {}
        }
        let foreign = facts.is_foreign();
        if !self.allows.is_empty() || foreign {
            match first(&self.allows, facts, foreign) {
                (Truth::Yes, _) => {}
                (Truth::Maybe(attribute), Some((policy, _))) => undecided = undecided.or(Some(Verdict::Undecided { policy, attribute })),
                _ => return Verdict::Deny { policy: None, rule: None },
            }
        }
        undecided.unwrap_or(Verdict::Allow)
    }

    /// Gives each audit and dry run that matched (surely) to `each`. Allocates nothing.
    pub fn observe<'a, F: Facts + ?Sized>(&'a self, facts: &F, each: &mut dyn FnMut(Hit<'a>)) {
        for (ready, kind, broken) in &self.watched {
            let (truth, rule) = if *broken { (Truth::Yes, None) } else { ready.test(facts, false) };
            if truth == Truth::Yes {
                each(Hit { policy: &ready.key, rule, kind: *kind });
            }
        }
    }
}

/// The first policy that matches, else the first that may.
fn first<'a, F: Facts + ?Sized>(policies: &'a [Ready], facts: &F, named: bool) -> (Truth<'a>, Option<(&'a PolicyKey, usize)>) {
    let mut so_far = (Truth::No, None);
    for policy in policies {
        match policy.test(facts, named) {
            (Truth::Yes, rule) => return (Truth::Yes, rule.map(|rule| (&policy.key, rule))),
            (maybe @ Truth::Maybe(_), rule) if so_far.0 == Truth::No => so_far = (maybe, rule.map(|rule| (&policy.key, rule))),
            _ => {}
        }
    }
    so_far
}

//! A tenant's policies as data planes judge them (`canal-guard`), from resources that went over the wire form, against the oracle. Facts are
//! given: what each hop sees of a request is for the data planes' own tests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_compiler::oracle_authorization::{self as oracle, Destination, Facts, Hit, Verdict};
use canal_compiler::{Input, compile};
use canal_guard::{self as guard, Asked, HitKind, Place, PolicySet, Sight};
use canal_model::authorization::{Attribute, Authorization, PeerAuthentication, PeerMode, PolicyKey};
use canal_model::ids::ServiceKey;
use canal_model::program::{Resource, Workload};

use crate::target::received;

/// See the module.
pub struct Guarded {
    authorizations: Vec<Arc<Authorization>>,
    peers: Vec<PeerAuthentication>,
    workloads: Vec<Workload>,
}

/// How much was compared.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    pub comparisons: usize,
    /// The oracle's verdicts, by kind.
    pub verdicts: BTreeMap<&'static str, usize>,
    /// Audits and dry runs that matched.
    pub hits: usize,
    /// Modes of ports.
    pub modes: BTreeMap<&'static str, usize>,
}

impl Guarded {
    pub fn of(input: &Input<'_>) -> Self {
        let mut made = Self { authorizations: Vec::new(), peers: Vec::new(), workloads: Vec::new() };
        for resource in received(&compile(input).resources) {
            match resource {
                Resource::Authorization(policy) => made.authorizations.push(Arc::new(policy)),
                Resource::PeerAuthentication(policy) => made.peers.push(policy),
                Resource::Workload(workload) => made.workloads.push(workload),
                _ => {}
            }
        }
        made
    }

    /// Compares all that is asked about each destination.
    pub fn compare(&self, facts: &[Facts], tally: &mut Tally) -> Result<(), String> {
        for workload in &self.workloads {
            let services: BTreeSet<Option<&ServiceKey>> =
                workload.endpoints.iter().map(|endpoint| Some(&endpoint.service)).chain([None]).collect();
            for service in services {
                self.compare_at(workload, service, facts, tally)?;
            }
            self.compare_modes(workload, tally)?;
        }
        Ok(())
    }

    fn compare_at(&self, workload: &Workload, service: Option<&ServiceKey>, facts: &[Facts], tally: &mut Tally) -> Result<(), String> {
        let destination = Destination { workload: Some((&workload.namespace, &workload.labels)), service };
        let place = Place::workload(&workload.namespace, &workload.labels).serving(service);
        let mut own = Vec::new();
        for policy in &self.authorizations {
            let is_for = oracle::is_for(&policy.target, &destination);
            if guard::applies(&policy.target, &place) != is_for {
                return Err(format!("{} for {destination:?}: the oracle says {is_for}, the guard otherwise", policy.key));
            }
            own.extend(is_for.then(|| policy.clone()));
        }
        let set = PolicySet::new(&own);
        let plain: Vec<&Authorization> = own.iter().map(AsRef::as_ref).collect();
        for facts in facts {
            one(&set, &plain, facts, tally).map_err(|why| format!("{why}\n{facts:#?}\n{plain:#?}"))?;
        }
        Ok(())
    }

    fn compare_modes(&self, workload: &Workload, tally: &mut Tally) -> Result<(), String> {
        let destination = Destination { workload: Some((&workload.namespace, &workload.labels)), service: None };
        let place = Place::workload(&workload.namespace, &workload.labels);
        for port in [1, 80, 81, 8080] {
            let expected = oracle::peer_mode(&self.peers, &destination, port);
            let mode = guard::peer_mode(&self.peers, &place, port);
            if mode != expected {
                return Err(format!("{} port {port}: the guard says {mode:?}, the oracle {expected:?}\n{:#?}", workload.name, self.peers));
            }
            let word = match mode {
                PeerMode::Strict => "strict",
                PeerMode::Permissive => "permissive",
                PeerMode::Disable => "disable",
            };
            *tally.modes.entry(word).or_default() += 1;
        }
        Ok(())
    }
}

/// One judgement with all that follows while authorizers agree.
fn one(set: &PolicySet, plain: &[&Authorization], facts: &Facts, tally: &mut Tally) -> Result<(), String> {
    let known = Known(facts);
    let (mut asked, mut agreed) = (Asked::default(), BTreeSet::<PolicyKey>::new());
    let mut verdict = set.decide(&known);
    loop {
        let expected = oracle::decide(plain, facts, &agreed);
        tally.comparisons += 1;
        *tally.verdicts.entry(kind(&expected)).or_default() += 1;
        let said = same(&verdict);
        if said != expected {
            return Err(format!("the guard says {said:?} after {asked:?}, the oracle {expected:?}"));
        }
        let guard::Verdict::Ask { authorizer, then, .. } = verdict else { break };
        agreed.insert(authorizer.clone());
        asked = then;
        verdict = set.decide_after(&known, asked);
    }
    let mut seen = Vec::new();
    set.observe(&known, &mut |hit| {
        let kind = match hit.kind {
            HitKind::Audit => Hit::Audit,
            HitKind::WouldDeny => Hit::WouldDeny,
            HitKind::WouldAllow => Hit::WouldAllow,
            HitKind::WouldAsk => Hit::WouldAsk,
        };
        seen.push((hit.policy.clone(), hit.rule, kind));
    });
    let expected = oracle::hits(plain, facts);
    tally.hits += expected.len();
    if seen == expected { Ok(()) } else { Err(format!("the guard observes {seen:?}, the oracle {expected:?}")) }
}

/// The guard's verdict in the oracle's words.
fn same(verdict: &guard::Verdict<'_>) -> Verdict {
    match *verdict {
        guard::Verdict::Allow => Verdict::Allow,
        guard::Verdict::Deny { policy, rule } => Verdict::Deny { policy: policy.cloned(), rule },
        guard::Verdict::Ask { authorizer, policy, .. } => Verdict::Ask { authorizer: authorizer.clone(), policy: policy.clone() },
        guard::Verdict::Undecided { policy, attribute } => Verdict::Undecided { policy: policy.clone(), attribute: attribute.clone() },
    }
}

fn kind(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Allow => "allow",
        Verdict::Deny { policy: None, .. } => "deny, for no ALLOW",
        Verdict::Deny { rule: None, .. } => "deny, for it is broken",
        Verdict::Deny { .. } => "deny",
        Verdict::Ask { .. } => "ask",
        Verdict::Undecided { .. } => "undecided",
    }
}

/// The oracle's facts as the guard looks at them.
struct Known<'a>(&'a Facts);

impl guard::Facts for Known<'_> {
    fn look(&self, attribute: &Attribute, each: &mut dyn FnMut(guard::Value<'_>) -> bool) -> Sight {
        if self.0.unseen.contains(attribute) {
            return Sight::Unknown;
        }
        let Some(values) = self.0.seen.get(attribute) else {
            return if self.0.is_complete { Sight::Known } else { Sight::Unknown };
        };
        for value in values {
            let done = match value {
                oracle::Value::Text(text) => each(guard::Value::Text(text.as_bytes())),
                oracle::Value::Address(address) => each(guard::Value::Address(*address)),
                oracle::Value::Port(port) => each(guard::Value::Port(*port)),
            };
            if done {
                break;
            }
        }
        Sight::Known
    }

    fn is_foreign(&self) -> bool {
        self.0.is_foreign
    }
}

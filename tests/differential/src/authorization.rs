//! Compares the decisions of `canal-authorization`, which data planes use, with the oracle's. The policies of a tenant pass through the
//! wire format. The attributes are given; the data planes' own tests check which attributes a hop knows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_authorization::{self as guard, AttributeVisibility, ExtAuthzProgress, PolicyDestination, PolicySet, ShadowKind};
use canal_compiler::oracle_authorization::{self as oracle, OracleDecision, OracleDestination, OracleFacts, OracleShadowMatch};
use canal_compiler::{CompileInput, compile};
use canal_model::authorization::{Attribute, Authorization, PeerAuthentication, PeerMode, PolicyKey};
use canal_model::ids::ServiceKey;
use canal_model::program::{Resource, Workload};

use crate::target::received;

/// One tenant's policies in both implementations.
pub struct PolicyComparison {
    authorizations: Vec<Arc<Authorization>>,
    peers: Vec<PeerAuthentication>,
    workloads: Vec<Workload>,
}

/// Numbers of comparisons.
#[derive(Debug, Clone, Default)]
pub struct AuthorizationTally {
    pub comparisons: usize,
    /// Number of the oracle's decisions by kind.
    pub verdicts: BTreeMap<&'static str, usize>,
    /// Number of audits and dry runs that matched.
    pub hits: usize,
    /// Number of ports by mode.
    pub modes: BTreeMap<&'static str, usize>,
}

impl PolicyComparison {
    pub fn of(input: &CompileInput<'_>) -> Self {
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

    /// Compares all decisions about each destination.
    pub fn compare(&self, facts: &[OracleFacts], tally: &mut AuthorizationTally) -> Result<(), String> {
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

    fn compare_at(
        &self,
        workload: &Workload,
        service: Option<&ServiceKey>,
        facts: &[OracleFacts],
        tally: &mut AuthorizationTally,
    ) -> Result<(), String> {
        let destination = OracleDestination { workload: Some((&workload.namespace, &workload.labels)), service };
        let place = PolicyDestination::workload(&workload.namespace, &workload.labels).serving(service);
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

    fn compare_modes(&self, workload: &Workload, tally: &mut AuthorizationTally) -> Result<(), String> {
        let destination = OracleDestination { workload: Some((&workload.namespace, &workload.labels)), service: None };
        let place = PolicyDestination::workload(&workload.namespace, &workload.labels);
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

/// Compares one decision, and those that follow it while authorizers allow.
fn one(set: &PolicySet, plain: &[&Authorization], facts: &OracleFacts, tally: &mut AuthorizationTally) -> Result<(), String> {
    let known = OracleAttributes(facts);
    let (mut asked, mut agreed) = (ExtAuthzProgress::default(), BTreeSet::<PolicyKey>::new());
    let mut verdict = set.decide(&known);
    loop {
        let expected = oracle::decide(plain, facts, &agreed);
        tally.comparisons += 1;
        *tally.verdicts.entry(kind(&expected)).or_default() += 1;
        let said = same(&verdict);
        if said != expected {
            return Err(format!("the guard says {said:?} after {asked:?}, the oracle {expected:?}"));
        }
        let guard::AuthorizationDecision::CallAuthorizer { authorizer, then, .. } = verdict else { break };
        agreed.insert(authorizer.clone());
        asked = then;
        verdict = set.decide_after(&known, asked);
    }
    let mut seen = Vec::new();
    set.observe(&known, &mut |hit| {
        let kind = match hit.kind {
            ShadowKind::Audit => OracleShadowMatch::Audit,
            ShadowKind::WouldDeny => OracleShadowMatch::WouldDeny,
            ShadowKind::WouldAllow => OracleShadowMatch::WouldAllow,
            ShadowKind::WouldCallAuthorizer => OracleShadowMatch::WouldCallAuthorizer,
        };
        seen.push((hit.policy.clone(), hit.rule, kind));
    });
    let expected = oracle::hits(plain, facts);
    tally.hits += expected.len();
    if seen == expected { Ok(()) } else { Err(format!("the guard observes {seen:?}, the oracle {expected:?}")) }
}

/// Converts a decision of the policy set into the oracle's form.
fn same(verdict: &guard::AuthorizationDecision<'_>) -> OracleDecision {
    match *verdict {
        guard::AuthorizationDecision::Allow => OracleDecision::Allow,
        guard::AuthorizationDecision::Deny { policy, rule } => OracleDecision::Deny { policy: policy.cloned(), rule },
        guard::AuthorizationDecision::CallAuthorizer { authorizer, policy, .. } => {
            OracleDecision::CallAuthorizer { authorizer: authorizer.clone(), policy: policy.clone() }
        }
        guard::AuthorizationDecision::Undecided { policy, attribute } => {
            OracleDecision::Undecided { policy: policy.clone(), attribute: attribute.clone() }
        }
    }
}

fn kind(verdict: &OracleDecision) -> &'static str {
    match verdict {
        OracleDecision::Allow => "allow",
        OracleDecision::Deny { policy: None, .. } => "deny, for no ALLOW",
        OracleDecision::Deny { rule: None, .. } => "deny, for it is broken",
        OracleDecision::Deny { .. } => "deny",
        OracleDecision::CallAuthorizer { .. } => "ask",
        OracleDecision::Undecided { .. } => "undecided",
    }
}

/// Presents the oracle's facts as attributes.
struct OracleAttributes<'a>(&'a OracleFacts);

impl guard::Attributes for OracleAttributes<'_> {
    fn visit_attribute(&self, attribute: &Attribute, each: &mut dyn FnMut(guard::AttributeValue<'_>) -> bool) -> AttributeVisibility {
        if self.0.unseen.contains(attribute) {
            return AttributeVisibility::Unknown;
        }
        let Some(values) = self.0.seen.get(attribute) else {
            return if self.0.is_complete { AttributeVisibility::Known } else { AttributeVisibility::Unknown };
        };
        for value in values {
            let done = match value {
                oracle::OracleValue::Text(text) => each(guard::AttributeValue::Text(text.as_bytes())),
                oracle::OracleValue::Address(address) => each(guard::AttributeValue::Address(*address)),
                oracle::OracleValue::Port(port) => each(guard::AttributeValue::Port(*port)),
            };
            if done {
                break;
            }
        }
        AttributeVisibility::Known
    }

    fn is_foreign(&self) -> bool {
        self.0.is_foreign
    }
}

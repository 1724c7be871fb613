//! Compares the decisions of `canal-authorization`, which data planes use, with the oracle's. The
//! gateway and each node decide by the policies that they are sent, after the wire format. The
//! attributes are given; the data planes' own tests check which attributes a hop knows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_authorization::{
    self as guard, AttributeVisibility, ExtAuthzProgress, PolicyDestination, PolicySet, ShadowKind,
};
use canal_compiler::{CompileInput, build_ir, compile, lower};
use canal_model::authorization::{
    Attribute, Authorization, PeerAuthentication, PeerMode, PolicyKey,
};
use canal_model::ids::{AzName, NodeName, ReplicaName, ServiceKey};
use canal_model::program::{Resource, Workload};
use canal_oracle::authorization::{
    self as oracle, OracleDecision, OracleDestination, OracleFacts, OracleShadowMatch,
};

use crate::target::received;

/// The policies of which one data plane decides.
struct PolicyProgram {
    /// Name of the data plane in reports.
    name: String,
    /// The node that this is; `None` for a gateway, which decides for the workloads of all nodes.
    node: Option<NodeName>,
    authorizations: Vec<Arc<Authorization>>,
    peers: Vec<PeerAuthentication>,
}

/// One tenant's policies as the oracle reads them, and as each data plane receives them.
pub struct PolicyComparison {
    tenant: PolicyProgram,
    programs: Vec<PolicyProgram>,
    workloads: Vec<Workload>,
}

/// Numbers of comparisons, by kind.
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

impl PolicyProgram {
    fn of(name: String, node: Option<NodeName>, resources: &[Resource]) -> Self {
        let mut program = Self {
            name,
            node,
            authorizations: Vec::new(),
            peers: Vec::new(),
        };
        for resource in resources {
            match resource {
                Resource::Authorization(policy) => {
                    program.authorizations.push(Arc::new(policy.clone()))
                }
                Resource::PeerAuthentication(policy) => program.peers.push(policy.clone()),
                _ => {}
            }
        }
        program
    }

    /// Returns whether connections to the workload pass this data plane.
    fn decides_for(&self, workload: &Workload) -> bool {
        self.node.as_ref().is_none_or(|node| *node == workload.node)
    }
}

impl PolicyComparison {
    pub fn of(input: &CompileInput<'_>) -> Self {
        let all = compile(input).resources;
        let workloads = all.iter().filter_map(|resource| match resource {
            Resource::Workload(workload) => Some(workload.clone()),
            _ => None,
        });
        let made = Self {
            tenant: PolicyProgram::of("the tenant".into(), None, &all),
            programs: Vec::new(),
            workloads: workloads.collect(),
        };
        let Some(ir) = build_ir(input).0 else {
            return made;
        };
        let az: AzName = "az1".parse().expect("a name");
        let replica: ReplicaName = "gw-all".parse().expect("a name");
        let placement = lower::placement_on(&ir, &replica, &"b1".parse().expect("a name"));
        let gateway = received(&lower::gateway(&ir, &replica, &az, &placement));
        let nodes: BTreeSet<&NodeName> = made
            .workloads
            .iter()
            .map(|workload| &workload.node)
            .collect();
        let node = |name: &NodeName| {
            let resources = received(&lower::node(&ir, name, &az, &placement));
            PolicyProgram::of(format!("node {name}"), Some(name.clone()), &resources)
        };
        let nodes = nodes.into_iter().map(node);
        Self {
            programs: [PolicyProgram::of("the gateway".into(), None, &gateway)]
                .into_iter()
                .chain(nodes)
                .collect(),
            ..made
        }
    }

    /// Compares all decisions of each data plane about each destination.
    pub fn compare(
        &self,
        facts: &[OracleFacts],
        tally: &mut AuthorizationTally,
    ) -> Result<(), String> {
        for workload in &self.workloads {
            for program in self
                .programs
                .iter()
                .filter(|program| program.decides_for(workload))
            {
                let services: BTreeSet<Option<&ServiceKey>> = workload
                    .endpoints
                    .iter()
                    .map(|endpoint| Some(&endpoint.service))
                    .chain([None])
                    .collect();
                let compared = services.into_iter().try_for_each(|service| {
                    self.compare_at(program, workload, service, facts, tally)
                });
                compared
                    .and_then(|()| self.compare_modes(program, workload, tally))
                    .map_err(|why| format!("{}: {why}", program.name))?;
            }
        }
        Ok(())
    }

    fn compare_at(
        &self,
        program: &PolicyProgram,
        workload: &Workload,
        service: Option<&ServiceKey>,
        facts: &[OracleFacts],
        tally: &mut AuthorizationTally,
    ) -> Result<(), String> {
        let destination = OracleDestination {
            workload: Some((&workload.namespace, &workload.labels)),
            service,
        };
        let policy_destination =
            PolicyDestination::workload(&workload.namespace, &workload.labels).serving(service);
        let expected: Vec<&Authorization> = self
            .tenant
            .authorizations
            .iter()
            .map(AsRef::as_ref)
            .filter(|policy| oracle::is_for(&policy.target, &destination))
            .collect();
        let own: Vec<_> = program
            .authorizations
            .iter()
            .filter(|policy| guard::applies(&policy.target, &policy_destination))
            .cloned()
            .collect();
        // The order is compared too, because decisions name the policy that decided.
        if !own
            .iter()
            .map(|policy| &policy.key)
            .eq(expected.iter().map(|policy| &policy.key))
        {
            let keys = |all: &mut dyn Iterator<Item = &PolicyKey>| {
                all.map(ToString::to_string).collect::<Vec<_>>().join(", ")
            };
            let (own, expected) = (
                keys(&mut own.iter().map(|p| &p.key)),
                keys(&mut expected.iter().map(|p| &p.key)),
            );
            return Err(format!(
                "the policies of {destination:?} are [{own}], by the oracle [{expected}]"
            ));
        }
        let set = PolicySet::new(&own);
        for facts in facts {
            compare_decision(&set, &expected, facts, tally)
                .map_err(|why| format!("{why}\n{facts:#?}\n{expected:#?}"))?;
        }
        Ok(())
    }

    fn compare_modes(
        &self,
        program: &PolicyProgram,
        workload: &Workload,
        tally: &mut AuthorizationTally,
    ) -> Result<(), String> {
        let destination = OracleDestination {
            workload: Some((&workload.namespace, &workload.labels)),
            service: None,
        };
        let policy_destination = PolicyDestination::workload(&workload.namespace, &workload.labels);
        for port in [1, 80, 81, 8080] {
            let expected = oracle::peer_mode(&self.tenant.peers, &destination, port);
            let mode = guard::peer_mode(&program.peers, &policy_destination, port);
            if mode != expected {
                return Err(format!(
                    "{} port {port}: the guard says {mode:?}, the oracle {expected:?}\n{:#?}",
                    workload.name, program.peers
                ));
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
fn compare_decision(
    set: &PolicySet,
    plain: &[&Authorization],
    facts: &OracleFacts,
    tally: &mut AuthorizationTally,
) -> Result<(), String> {
    let attributes = OracleAttributes(facts);
    let (mut progress, mut granted) = (ExtAuthzProgress::default(), BTreeSet::<PolicyKey>::new());
    let mut verdict = set.decide(&attributes);
    loop {
        let expected = oracle::decide(plain, facts, &granted);
        tally.comparisons += 1;
        *tally.verdicts.entry(kind(&expected)).or_default() += 1;
        let actual = same(&verdict);
        if actual != expected {
            return Err(format!(
                "the guard says {actual:?} after {progress:?}, the oracle {expected:?}"
            ));
        }
        let guard::AuthorizationDecision::CallAuthorizer {
            authorizer, then, ..
        } = verdict
        else {
            // Any other verdict is final.
            break;
        };
        // Each authorizer allows the request here, so that every later decision is compared as
        // well.
        granted.insert(authorizer.clone());
        progress = then;
        verdict = set.decide_after(&attributes, progress);
    }
    let mut observed = Vec::new();
    set.observe(&attributes, &mut |hit| {
        let kind = match hit.kind {
            ShadowKind::Audit => OracleShadowMatch::Audit,
            ShadowKind::WouldDeny => OracleShadowMatch::WouldDeny,
            ShadowKind::WouldAllow => OracleShadowMatch::WouldAllow,
            ShadowKind::WouldCallAuthorizer => OracleShadowMatch::WouldCallAuthorizer,
        };
        observed.push((hit.policy.clone(), hit.rule, kind));
    });
    let expected = oracle::hits(plain, facts);
    tally.hits += expected.len();
    if observed == expected {
        Ok(())
    } else {
        Err(format!(
            "the guard observes {observed:?}, the oracle {expected:?}"
        ))
    }
}

/// Converts a decision of the policy set into the oracle's form.
fn same(verdict: &guard::AuthorizationDecision<'_>) -> OracleDecision {
    match *verdict {
        guard::AuthorizationDecision::Allow => OracleDecision::Allow,
        guard::AuthorizationDecision::Deny { policy, rule } => OracleDecision::Deny {
            policy: policy.cloned(),
            rule,
        },
        guard::AuthorizationDecision::CallAuthorizer {
            authorizer, policy, ..
        } => OracleDecision::CallAuthorizer {
            authorizer: authorizer.clone(),
            policy: policy.clone(),
        },
        guard::AuthorizationDecision::Undecided { policy, attribute } => {
            OracleDecision::Undecided {
                policy: policy.clone(),
                attribute: attribute.clone(),
            }
        }
    }
}

fn kind(verdict: &OracleDecision) -> &'static str {
    match verdict {
        OracleDecision::Allow => "allow",
        OracleDecision::Deny { policy: None, .. } => "deny, for no ALLOW",
        OracleDecision::Deny { rule: None, .. } => "deny, because it is broken",
        OracleDecision::Deny { .. } => "deny",
        OracleDecision::CallAuthorizer { .. } => "ask",
        OracleDecision::Undecided { .. } => "undecided",
    }
}

/// Presents the oracle's facts as attributes.
struct OracleAttributes<'a>(&'a OracleFacts);

impl guard::Attributes for OracleAttributes<'_> {
    fn visit_attribute(
        &self,
        attribute: &Attribute,
        each: &mut dyn FnMut(guard::AttributeValue<'_>) -> bool,
    ) -> AttributeVisibility {
        if self.0.unseen.contains(attribute) {
            return AttributeVisibility::Unknown;
        }
        let Some(values) = self.0.values.get(attribute) else {
            return if self.0.is_complete {
                AttributeVisibility::Known
            } else {
                AttributeVisibility::Unknown
            };
        };
        for value in values {
            let done = match value {
                oracle::OracleValue::Text(text) => {
                    each(guard::AttributeValue::Text(text.as_bytes()))
                }
                oracle::OracleValue::Address(address) => {
                    each(guard::AttributeValue::Address(*address))
                }
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

//! Explains what happens to a request on its whole path, according to the oracles. The explanation
//! has the route, and at each hop the policy that decides and why the others do not. It serves
//! `canal explain` and golden tests. It sends nothing, and assumes that tokens are valid. Start at
//! [`explain`].

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use canal_model::authorization::{
    Attribute, Authentication, Authorization, AuthorizationAction, JwtRule, PeerMode, PolicyKey,
    PolicyTarget,
};
use canal_model::identity::Identity;
use canal_model::ids::ServiceKey;
use canal_model::program::{AppProtocol, BackendTarget, DirectEndpoint, TunnelProtocol, Workload};
use canal_model::trust::ClientCertificates;
use serde_json::Value as Json;

use canal_compiler::direct::{self, PathReason, PortPath};
use canal_compiler::ir::Ir;
use canal_compiler::lower::{RefusalReason, TargetName, last_target};
use canal_compiler::oracle::{self, OracleRequest, RoutingVerdict as Route};
use canal_compiler::{text, text_security};
use canal_oracle::answers::OracleAnswer;
use canal_oracle::authorization::{
    OracleDecision, OracleDestination, OracleFacts, OracleShadowMatch, OracleTruth, OracleValue,
    decide, hits, is_for, is_for_answers, peer_mode, policy_path,
};

mod balancing;
mod policy_trace;
mod token_facts;
use policy_trace::explain_policies;
use token_facts::{claimed, texts};

/// Maximum number of refusals in an explanation. Nobody measured it; a person reads the first few.
pub const REFUSALS_MAX: usize = 8;

/// A request as an operator describes it.
#[derive(Debug, Clone)]
pub struct RequestDescription {
    /// Verified identity of the client; `None` for a client without one.
    pub identity: Option<Identity>,
    /// Address of the client; `None` means the address of a workload with the identity, if there is
    /// one.
    pub address: Option<IpAddr>,
    /// True if the client connects directly to the pod, bypassing all gateways.
    pub direct: bool,
    /// The request itself. On an opaque port only its service and port are used.
    pub request: OracleRequest,
    /// Claims of a token with a valid signature of some issuer.
    pub claims: Option<Json>,
    /// Server name of TLS that the gateway terminates; `None` if the client comes through its node,
    /// or in plaintext.
    pub server_name: Option<String>,
}

/// The component that authorized the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnforcementPoint {
    Gateway,
    Node,
}

/// The decision of one hop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HopDecision {
    Passes(String),
    Denies(String),
    /// The request passes if the authorizer allows it.
    CallsAuthorizer(String),
}

/// The authorization at one hop for one workload.
#[derive(Debug, Clone)]
pub struct HopExplanation {
    pub hop: EnforcementPoint,
    /// Name of the workload, as `namespace/name`.
    pub workload: String,
    pub outcome: HopDecision,
    /// All policies that apply to this destination, sorted by name.
    pub policies: Vec<PolicyTrace>,
    /// Matches of audit policies and dry runs.
    pub hits: Vec<String>,
}

/// One policy and the reason why it matched or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyTrace {
    pub policy: PolicyKey,
    /// Action and target of the policy.
    pub what: String,
    /// Result of each rule, and the reason unless it certainly matches.
    pub rules: Vec<(OracleTruth, String)>,
}

/// The explanation of a request on its whole path.
#[derive(Debug, Clone)]
pub struct Explanation {
    /// The route that the request takes, as text.
    pub route: String,
    /// Path from the client's node, with or without a gateway, and the reason. `None` if the
    /// description fixes it, or if there is no such port.
    pub path: Option<PortPath>,
    /// Reasons why targets that are nearer than that of the path cannot run the port's rules; at
    /// most [`REFUSALS_MAX`].
    pub refusals: Vec<(TargetName, RefusalReason)>,
    /// Decisions of the hops; empty if the request ends at the route.
    pub steps: Vec<HopExplanation>,
}

impl Explanation {
    /// Returns whether at least one workload may receive the request.
    pub fn passes(&self) -> bool {
        let workloads: BTreeSet<&str> = self
            .steps
            .iter()
            .map(|step| step.workload.as_str())
            .collect();
        let denies = |step: &&HopExplanation| matches!(step.outcome, HopDecision::Denies(_));
        workloads.iter().any(|workload| {
            !self
                .steps
                .iter()
                .filter(|step| step.workload == *workload)
                .any(|step| denies(&step))
        })
    }
}

impl fmt::Display for Explanation {
    /// Workloads with equal results are printed together.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "route: {}", self.route)?;
        self.path
            .iter()
            .try_for_each(|path| writeln!(f, "path: {path}"))?;
        // The line of the path has the first reason.
        self.refusals
            .iter()
            .skip(1)
            .try_for_each(|(target, reason)| {
                writeln!(f, "  {target} is not possible either: {reason}")
            })?;
        let mut by_workload: Vec<(Vec<&str>, Vec<&HopExplanation>)> = Vec::new();
        for step in &self.steps {
            match by_workload
                .iter_mut()
                .find(|(workloads, _)| workloads == &[step.workload.as_str()])
            {
                Some((_, steps)) => steps.push(step),
                None => by_workload.push((vec![&step.workload], vec![step])),
            }
        }
        let mut groups: Vec<(Vec<&str>, Vec<&HopExplanation>)> = Vec::new();
        for (workloads, steps) in by_workload {
            let same = |(_, other): &&mut (Vec<&str>, Vec<&HopExplanation>)| {
                other.len() == steps.len() && other.iter().zip(&steps).all(|(a, b)| a.is_like(b))
            };
            match groups.iter_mut().find(same) {
                Some((others, _)) => others.extend(workloads),
                None => groups.push((workloads, steps)),
            }
        }
        for (workloads, steps) in groups {
            writeln!(f, "to {}", workloads.join(", "))?;
            steps.into_iter().try_for_each(|step| step.write(f))?;
        }
        writeln!(f, "=> {}", if self.passes() { "passes" } else { "denied" })
    }
}

impl HopExplanation {
    fn is_like(&self, other: &HopExplanation) -> bool {
        self.hop == other.hop
            && self.outcome == other.outcome
            && self.policies == other.policies
            && self.hits == other.hits
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hop = match self.hop {
            EnforcementPoint::Gateway => "gateway",
            EnforcementPoint::Node => "node",
        };
        let (word, why) = self.outcome.words();
        writeln!(f, "  {hop} {word}: {why}")?;
        for policy in &self.policies {
            writeln!(f, "    {} ({})", policy.policy, policy.what)?;
            if policy.rules.is_empty() {
                writeln!(f, "      no rules: never matches")?;
            }
            for (number, (truth, why)) in policy.rules.iter().enumerate() {
                let word = match truth {
                    OracleTruth::Yes => "matches",
                    OracleTruth::No => "does not match",
                    OracleTruth::Maybe(_) => "is undecided",
                };
                let why = if why.is_empty() {
                    String::new()
                } else {
                    format!(": {why}")
                };
                writeln!(f, "      rule {number} {word}{why}")?;
            }
        }
        self.hits
            .iter()
            .try_for_each(|hit| writeln!(f, "    counted only: {hit}"))
    }
}

impl HopDecision {
    /// Returns the decision as one word, and the reason.
    pub fn words(&self) -> (&'static str, &str) {
        match self {
            HopDecision::Passes(why) => ("passes", why),
            HopDecision::Denies(why) => ("denies", why),
            HopDecision::CallsAuthorizer(why) => ("calls", why),
        }
    }
}

/// Formats the action of the rule that decides, with its filters.
fn rule_text(ir: &Ir, request: &OracleRequest) -> String {
    let rule = oracle::deciding_rule(ir, request);
    rule.map(|rule| {
        let (action, effects) = (text::action(&rule.action), text::effects(rule));
        format!("{} => {action}{effects}", rule.key)
    })
    .unwrap_or_default()
}

/// Formats the answer of a gateway.
fn answer_text(answer: Option<&OracleAnswer>) -> String {
    let Some(answer) = answer else {
        return "400: the redirect's path has a dot segment".to_owned();
    };
    let headers = answer.headers.iter();
    let headers: String = headers
        .map(|(name, value)| format!(" {name}: {value}"))
        .collect();
    format!("the gateway answers {}{headers}", answer.status)
}

/// Returns the route of a request as text, the targets to which it leads, and whether the gateway
/// answers.
fn decide_route(ir: &Ir, journey: &RequestDescription) -> (String, Vec<BackendTarget>, bool) {
    // A request to a pod's own address is not routed.
    let route = if journey.direct {
        Route::Service {
            service: journey.request.service.clone(),
            port: journey.request.port,
        }
    } else {
        oracle::decide(ir, &journey.request)
    };
    let mut is_answered = false;
    let (text, targets): (String, Vec<BackendTarget>) = match route {
        Route::NoService => ("there is no such service or port".into(), Vec::new()),
        Route::NoRule => (
            "the port has rules and none matches: 404".into(),
            Vec::new(),
        ),
        Route::Refuse {
            rule,
            status,
            reason,
        } => (format!("{rule} refuses: {status} ({reason})"), Vec::new()),
        Route::Service { service, port } => {
            let text = format!("{}/{}:{port}", service.namespace, service.name);
            (
                text,
                vec![BackendTarget::Service {
                    service,
                    port,
                    subset: Default::default(),
                }],
            )
        }
        Route::Answer { answer, .. } => {
            // `None` is a redirect that the gateway refuses with 400.
            is_answered = answer.is_some();
            let answer = answer_text(answer.as_deref());
            (
                format!("{}; {answer}", rule_text(ir, &journey.request)),
                Vec::new(),
            )
        }
        Route::Split { backends, .. } => (
            rule_text(ir, &journey.request),
            backends.into_iter().map(|backend| backend.target).collect(),
        ),
    };
    (text, targets, is_answered)
}

/// Explains a request to a tenant's service.
pub fn explain(ir: &Ir, journey: &RequestDescription) -> Explanation {
    let (mut route, targets, is_answered) = decide_route(ir, journey);
    if !journey.direct {
        route += &balancing::text(ir, &targets);
    }
    let path = path(ir, journey);
    let is_direct = journey.direct || path.as_ref().is_some_and(PortPath::is_direct);
    // Only a path that an earlier target refused has refusals to show.
    let refusals = match &path {
        Some(PortPath {
            reason: Some(PathReason::Refusal(_)),
            ..
        }) => direct::refusals(
            ir,
            &journey.request.service,
            journey.request.port,
            REFUSALS_MAX,
        ),
        _ => Vec::new(),
    };
    let mut steps = Vec::new();
    for target in &targets {
        // A broken reference has no endpoints: the gateway refuses the request.
        let BackendTarget::Service { service, port, .. } = target else {
            continue;
        };
        for (workload, target_port) in oracle::endpoints(ir, target) {
            steps.extend(
                WorkloadPath {
                    ir,
                    journey,
                    service,
                    port: *port,
                    workload: Some((workload, target_port)),
                    is_direct,
                }
                .steps(),
            );
        }
    }
    // No pod receives the request, but the policies of the dialled service apply to it.
    if is_answered {
        let gateway = WorkloadPath {
            ir,
            journey,
            service: &journey.request.service,
            port: journey.request.port,
            workload: None,
            is_direct: false,
        };
        steps.extend(gateway.steps());
    }
    let no_pod_is_ready = steps.is_empty() && !targets.is_empty();
    Explanation {
        route: if no_pod_is_ready {
            format!("{route}, where no pod is ready")
        } else {
            route
        },
        path,
        refusals,
        steps,
    }
}

/// Returns the path for a workload of the tenant that comes through its node; all other clients use
/// a gateway.
fn path(ir: &Ir, journey: &RequestDescription) -> Option<PortPath> {
    let is_member = journey
        .identity
        .as_ref()
        .is_some_and(|identity| identity.trust_domain == ir.tenant.trust_domain);
    if journey.direct || !is_member || journey.server_name.is_some() {
        return None;
    }
    let request = &journey.request;
    let all = direct::paths(ir);
    let (.., path) = all
        .into_iter()
        .find(|(service, port, _)| *service == request.service && *port == request.port)?;
    match path {
        path if path.is_direct() && !is_published(ir, journey) => Some(PortPath {
            target: last_target(),
            reason: Some(PathReason::NotAdmitted),
        }),
        path => Some(path),
    }
}

/// Returns whether a node of the client receives a direct endpoint of the port.
///
/// Also returns true if the client has no node, or if no workload is ready and so no endpoint
/// exists. Then only the port decides.
fn is_published(ir: &Ir, journey: &RequestDescription) -> bool {
    let (request, identity) = (&journey.request, journey.identity.as_ref());
    let runs = |w: &&Workload| {
        identity.is_some_and(|id| {
            w.namespace == id.namespace && w.service_account == id.service_account
        })
    };
    let nodes: BTreeSet<_> = ir
        .workloads
        .iter()
        .filter(runs)
        .map(|workload| &workload.node)
        .collect();
    let serves = |e: &DirectEndpoint| {
        e.serves
            .iter()
            .any(|s| s.service == request.service && s.port == request.port)
    };
    let behind: Vec<DirectEndpoint> = direct::endpoints(ir).into_iter().filter(serves).collect();
    nodes.is_empty()
        || behind.is_empty()
        || behind
            .iter()
            .any(|e| nodes.iter().any(|node| e.audience.has(node)))
}

/// The path of a request to one workload, or to the gateway that answers it.
struct WorkloadPath<'a> {
    ir: &'a Ir,
    journey: &'a RequestDescription,
    service: &'a ServiceKey,
    port: u16,
    /// The workload and its target port; `None` if the gateway answers.
    workload: Option<(&'a Workload, u16)>,
    /// True if the workload's node is reached without a gateway.
    is_direct: bool,
}

impl<'a> WorkloadPath<'a> {
    fn steps(&self) -> Vec<HopExplanation> {
        if self.is_direct {
            return vec![self.node_direct()];
        }
        let gateway = self.gateway();
        match (
            &gateway.outcome,
            self.workload.map(|(workload, _)| workload.tunnel),
        ) {
            (HopDecision::Denies(_), _) | (_, None | Some(TunnelProtocol::None)) => vec![gateway],
            _ => vec![gateway, self.node_behind_gateway()],
        }
    }

    fn step(
        &self,
        hop: EnforcementPoint,
        outcome: HopDecision,
        facts: &OracleFacts,
        evaluated: bool,
    ) -> HopExplanation {
        // Only a gateway sees which service was dialled, so only it applies that service's
        // policies.
        let policies = if hop == EnforcementPoint::Gateway {
            self.all_policies()
        } else {
            self.policies()
        };
        let shown = |hit: (PolicyKey, Option<usize>, OracleShadowMatch)| {
            let what = match hit.2 {
                OracleShadowMatch::Audit => "audit",
                OracleShadowMatch::WouldDeny => "dry run would deny",
                OracleShadowMatch::WouldAllow => "dry run would allow",
                OracleShadowMatch::WouldCallAuthorizer => "dry run would call",
            };
            let rule = hit
                .1
                .map(|rule| format!(" rule {rule}"))
                .unwrap_or_default();
            format!("{}{rule}: {what}", hit.0)
        };
        HopExplanation {
            hop,
            workload: match self.workload {
                Some((workload, _)) => format!("{}/{}", workload.namespace, workload.name),
                None => "the gateway's answer".to_owned(),
            },
            outcome,
            // A hop that refused the connection before its policies has nothing to show of them.
            hits: if evaluated {
                hits(&policies, facts).into_iter().map(shown).collect()
            } else {
                Vec::new()
            },
            policies: if evaluated {
                policies
                    .iter()
                    .map(|policy| explain_policies(policy, facts))
                    .collect()
            } else {
                Vec::new()
            },
        }
    }

    fn destination(&self) -> OracleDestination<'a> {
        let service = (!self.journey.direct).then_some(self.service);
        OracleDestination {
            workload: self
                .workload
                .map(|(workload, _)| (&workload.namespace, &workload.labels)),
            service,
        }
    }

    fn policies(&self) -> Vec<&'a Authorization> {
        self.ir
            .security
            .authorizations
            .iter()
            .filter(|policy| self.is_covered_by(&policy.target))
            .collect()
    }

    /// Returns whether a policy with this target applies to the endpoint, or to the answer.
    fn is_covered_by(&self, target: &PolicyTarget) -> bool {
        if self.workload.is_some() {
            return is_for(target, &self.destination());
        }
        let own = BackendTarget::Service {
            service: self.service.clone(),
            port: self.port,
            subset: Default::default(),
        };
        let endpoints = oracle::endpoints(self.ir, &own).into_iter();
        let labels: Vec<_> = endpoints.map(|(workload, _)| &workload.labels).collect();
        is_for_answers(target, self.service, &labels)
    }

    /// Returns the service that was dialled, if routes lead to a different one.
    fn dialled(&self) -> Option<OracleDestination<'a>> {
        let dialled = &self.journey.request.service;
        (!self.journey.direct && dialled != self.service).then_some(OracleDestination {
            workload: None,
            service: Some(dialled),
        })
    }

    /// Returns the policies of the dialled service, if it is not the endpoint's service.
    fn policies_of_dialled(&self) -> Vec<&'a Authorization> {
        let Some(dialled) = self.dialled() else {
            return Vec::new();
        };
        self.ir
            .security
            .authorizations
            .iter()
            .filter(|policy| is_for(&policy.target, &dialled))
            .collect()
    }

    fn all_policies(&self) -> Vec<&'a Authorization> {
        [self.policies(), self.policies_of_dialled()].concat()
    }

    fn is_opaque(&self) -> bool {
        let port = self
            .ir
            .services
            .get(self.service)
            .and_then(|s| s.service.ports.iter().find(|p| p.port == self.port));
        port.is_none_or(|port| port.protocol == AppProtocol::Tcp)
    }

    fn gateway(&self) -> HopExplanation {
        let mut facts = self.l4_facts();
        // A gateway is the first hop, so it observes the client's address, and it terminates TLS.
        facts.values.insert(Attribute::ServerName, Vec::new());
        match facts.values.get(&Attribute::SourceAddress).cloned() {
            Some(address) => drop(facts.values.insert(Attribute::RemoteAddress, address)),
            None => drop(facts.unseen.insert(Attribute::RemoteAddress)),
        }
        let deny = |why: &str| HopDecision::Denies(why.to_owned());
        if let Err(why) = self.enters(&mut facts) {
            return self.step(EnforcementPoint::Gateway, deny(&why), &facts, false);
        }
        // A gateway reads neither tokens nor headers of opaque connections, so these attributes
        // stay unknown.
        if !self.is_opaque() {
            match self.token() {
                Err(why) => return self.step(EnforcementPoint::Gateway, deny(&why), &facts, false),
                Ok(claims) => facts.values.extend(claims),
            }
            if let Err(why) = self.http_facts(&mut facts) {
                return self.step(EnforcementPoint::Gateway, deny(&why), &facts, false);
            }
        }
        let (mut own, mut dialled) = (self.policies(), self.policies_of_dialled());
        // Without policies of its own, the endpoint is protected by the dialled service's policies
        // alone.
        if own.is_empty() {
            (own, dialled) = (dialled, own);
        }
        let mut verdict = decide(&own, &facts, &BTreeSet::new());
        if matches!(
            verdict,
            OracleDecision::Allow | OracleDecision::CallAuthorizer { .. }
        ) && !dialled.is_empty()
        {
            // Both policy sets must allow. For a foreign client it is enough that one of them names
            // it.
            let also = decide(
                &dialled,
                &OracleFacts {
                    is_foreign: false,
                    ..facts.clone()
                },
                &BTreeSet::new(),
            );
            // A denial outranks a call to an authorizer. Of two calls the endpoint's own is named.
            if also != OracleDecision::Allow
                && (verdict == OracleDecision::Allow
                    || !matches!(also, OracleDecision::CallAuthorizer { .. }))
            {
                verdict = also;
            }
        }
        let status = if self.is_opaque() {
            "the connection is closed"
        } else {
            "403"
        };
        let outcome = match verdict {
            OracleDecision::Undecided { policy, attribute } => {
                let attribute = text_security::attribute(&attribute);
                HopDecision::Denies(format!(
                    "{status}: {policy} depends on {attribute}, which is not known here"
                ))
            }
            verdict => hop_decision(verdict, status),
        };
        self.step(EnforcementPoint::Gateway, outcome, &facts, true)
    }

    /// Checks whether the gateway accepts the client at all, before policies are evaluated.
    fn enters(&self, facts: &mut OracleFacts) -> Result<(), String> {
        let request = &self.journey.request;
        let ends = self
            .ir
            .security
            .terminations
            .iter()
            .find(|t| t.service == request.service && t.port == request.port);
        self.is_trusted()?;
        let is_tls = self.journey.server_name.is_some();
        if self.journey.identity.is_some() && !is_tls {
            // The client comes through its node, over HBONE.
            return Ok(());
        }
        let Some(ends) = ends else {
            return Err("refused: a client outside the mesh needs a Termination, and no Termination covers this port".into());
        };
        match &ends.broken {
            Some(why) => Err(format!("refused: the Termination is broken ({why})")),
            None if !is_tls && ends.required => Err(
                "refused: the Termination accepts only TLS (give a server name to test TLS)".into(),
            ),
            None if is_tls
                && self.journey.identity.is_none()
                && ends.clients == ClientCertificates::Required =>
            {
                Err("refused: the Termination requires a client certificate".into())
            }
            None => {
                let name = self
                    .journey
                    .server_name
                    .iter()
                    .map(|name| OracleValue::Text(name.clone()));
                facts.values.insert(Attribute::ServerName, name.collect());
                Ok(())
            }
        }
    }

    /// Checks whether the client's trust domain is the tenant's, or federated with it.
    fn is_trusted(&self) -> Result<(), String> {
        let own = &self.ir.tenant.trust_domain;
        let foreign = self
            .journey
            .identity
            .as_ref()
            .map(|id| &id.trust_domain)
            .filter(|of| *of != own);
        match foreign.filter(|of| {
            !self
                .ir
                .security
                .federations
                .iter()
                .any(|(_, federated)| federated == *of)
        }) {
            Some(of) => Err(format!(
                "refused: trust domain {of} is neither {own} nor federated with it"
            )),
            None => Ok(()),
        }
    }

    /// Returns the decision of the workload's node behind a gateway.
    fn node_behind_gateway(&self) -> HopExplanation {
        if !self.is_opaque() {
            let outcome = HopDecision::Passes("the gateway has authorized the request".into());
            return self.step(
                EnforcementPoint::Node,
                outcome,
                &OracleFacts::default(),
                false,
            );
        }
        let facts = self.l4_facts();
        // The gateway has already called all authorizers.
        let agreed = self
            .ir
            .security
            .authorizers
            .iter()
            .map(|authorizer| authorizer.key.clone())
            .collect();
        let outcome = match decide(&self.policies(), &facts, &agreed) {
            OracleDecision::Undecided { .. } => HopDecision::Passes(
                "the gateway evaluated the attributes that this node cannot observe".into(),
            ),
            verdict => hop_decision(verdict, "refused"),
        };
        self.step(EnforcementPoint::Node, outcome, &facts, true)
    }

    /// Returns the decision of the workload's node on a path without a gateway.
    fn node_direct(&self) -> HopExplanation {
        let facts = self.l4_facts();
        // The trust domain is checked before any policy.
        if let Err(why) = self.is_trusted() {
            return self.step(
                EnforcementPoint::Node,
                HopDecision::Denies(why),
                &facts,
                false,
            );
        }
        // A client without an identity arrives in plaintext.
        if let (None, Some((_, port))) = (&self.journey.identity, self.workload) {
            let mode = peer_mode(
                &self.ir.security.peer_authentications,
                &self.destination(),
                port,
            );
            if mode == PeerMode::Strict {
                let why =
                    format!("refused: port {port} accepts only mTLS (PeerAuthentication STRICT)");
                return self.step(
                    EnforcementPoint::Node,
                    HopDecision::Denies(why),
                    &facts,
                    false,
                );
            }
        }
        let outcome = match decide(&self.policies(), &facts, &BTreeSet::new()) {
            OracleDecision::Undecided { policy, attribute } => {
                let attribute = text_security::attribute(&attribute);
                HopDecision::Denies(format!(
                    "refused: {policy} depends on {attribute}, which a node cannot observe; go through a gateway"
                ))
            }
            OracleDecision::CallAuthorizer { policy, .. } => HopDecision::Denies(format!(
                "refused: {policy} calls an authorizer, which a node cannot do; go through a gateway"
            )),
            verdict => hop_decision(verdict, "refused"),
        };
        self.step(EnforcementPoint::Node, outcome, &facts, true)
    }

    /// Returns the facts that every hop observes.
    fn l4_facts(&self) -> OracleFacts {
        let text = |text: String| vec![OracleValue::Text(text)];
        let mut facts = OracleFacts::default();
        let identity = self.journey.identity.as_ref();
        facts.is_foreign =
            identity.is_some_and(|id| id.trust_domain != self.ir.tenant.trust_domain);
        let of =
            |show: fn(&Identity) -> String| identity.map(|id| text(show(id))).unwrap_or_default();
        facts.values.insert(
            Attribute::SourcePrincipal,
            of(|id| id.to_string().replacen("spiffe://", "", 1)),
        );
        facts.values.insert(
            Attribute::SourceNamespace,
            of(|id| id.namespace.to_string()),
        );
        facts.values.insert(
            Attribute::SourceServiceAccount,
            of(|id| format!("{}/{}", id.namespace, id.service_account)),
        );
        // Without an address of the client, clauses on it stay undecided.
        match self.address() {
            Some(address) => drop(facts.values.insert(
                Attribute::SourceAddress,
                vec![OracleValue::Address(address)],
            )),
            None => drop(facts.unseen.insert(Attribute::SourceAddress)),
        }
        let Some((workload, port)) = self.workload else {
            // The gateway answers, so clauses on the address and port of a pod stay undecided.
            let unseen = [Attribute::DestinationPort, Attribute::DestinationAddress];
            facts.unseen.extend(unseen);
            return facts;
        };
        facts
            .values
            .insert(Attribute::DestinationPort, vec![OracleValue::Port(port)]);
        let addresses = workload.addresses.iter();
        let addresses = addresses.map(|address| OracleValue::Address(*address));
        facts
            .values
            .insert(Attribute::DestinationAddress, addresses.collect());
        facts
    }

    fn address(&self) -> Option<IpAddr> {
        let identity = self.journey.identity.as_ref();
        let runs = |w: &&Workload| {
            identity.is_some_and(|id| {
                w.namespace == id.namespace && w.service_account == id.service_account
            })
        };
        let known = || {
            self.ir
                .workloads
                .iter()
                .find(runs)
                .and_then(|workload| workload.addresses.first().copied())
        };
        self.journey.address.or_else(known)
    }

    /// Adds the facts that only a hop that parses HTTP observes.
    fn http_facts(&self, facts: &mut OracleFacts) -> Result<(), String> {
        let request = &self.journey.request;
        let mut headers: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for (name, value) in &request.headers {
            headers.entry(name.to_lowercase()).or_default().push(value);
        }
        for (name, values) in headers {
            // The gateway removes such headers of clients before policies are evaluated.
            if is_set_by_gateway(&name) {
                continue;
            }
            // Repeated headers are one list (RFC 9110 §5.3), except cookies (RFC 9113 §8.2.3).
            let separator = if name == "cookie" { "; " } else { "," };
            facts.values.insert(
                Attribute::Header(name),
                vec![OracleValue::Text(values.join(separator))],
            );
        }
        facts.is_complete = true;
        facts.values.insert(
            Attribute::Method,
            vec![OracleValue::Text(request.method.clone())],
        );
        facts.values.insert(
            Attribute::Host,
            vec![OracleValue::Text(request.host.clone())],
        );
        let paths = self
            .ir
            .services
            .get(&request.service)
            .map(|known| known.service.policy_paths)
            .unwrap_or_default();
        match policy_path(&request.target, paths) {
            Some(path) => drop(
                facts
                    .values
                    .insert(Attribute::Path, vec![OracleValue::Text(path)]),
            ),
            None if self.all_policies().iter().any(|policy| reads_path(policy)) => {
                return Err(
                    "400: the path can be interpreted in several ways, and a policy matches on it"
                        .into(),
                );
            }
            // No policy matches on paths, so the gateway forwards an ambiguous path as it is.
            None => drop(facts.values.insert(
                Attribute::Path,
                vec![OracleValue::Text(request.target.clone())],
            )),
        }
        Ok(())
    }

    /// Returns the facts that a token adds, or the reason why the token is refused.
    fn token(&self) -> Result<BTreeMap<Attribute, Vec<OracleValue>>, String> {
        let dialled = self.dialled();
        let is_own = |policy: &&Authentication| {
            self.is_covered_by(&policy.target)
                || dialled
                    .as_ref()
                    .is_some_and(|dialled| is_for(&policy.target, dialled))
        };
        let own: Vec<&Authentication> = self
            .ir
            .security
            .authentications
            .iter()
            .filter(is_own)
            .collect();
        // A broken policy refuses requests with and without a token.
        if let Some((policy, why)) = own
            .iter()
            .find_map(|policy| Some((&policy.key, policy.broken.as_ref()?)))
        {
            return Err(format!(
                "401: RequestAuthentication {policy} is broken ({why})"
            ));
        }
        let Some(claims) = &self.journey.claims else {
            return Ok(BTreeMap::new());
        };
        if own.iter().all(|policy| policy.rules.is_empty()) {
            // No RequestAuthentication with rules applies here, so tokens are ignored.
            return Ok(BTreeMap::new());
        }
        let audiences = texts(claims.get("aud"));
        let accepts = |rule: &&JwtRule| {
            claims.get("iss").and_then(Json::as_str) == Some(rule.issuer.as_str())
                // Without audiences a rule accepts tokens for anyone (Istio).
                && (rule.audiences.is_empty()
                    || rule
                        .audiences
                        .iter()
                        .any(|audience| audiences.contains(audience)))
        };
        let Some(rule) = own.iter().flat_map(|policy| &policy.rules).find(accepts) else {
            return Err(
                "401: no RequestAuthentication accepts a token of this issuer and audience".into(),
            );
        };
        if rule.keys.is_none() {
            return Err(format!(
                "401: the keys of issuer {} are not known",
                rule.issuer
            ));
        }
        Ok(claimed(rule, claims, audiences, &self.all_policies()))
    }
}

/// Returns whether the gateway removes a header of clients before policies look at it: only proxies
/// set it, or its name is that of such a header with `_`, which many servers read as `-`.
fn is_set_by_gateway(name: &str) -> bool {
    let plain = name.replace('_', "-");
    let is_proxys = plain.starts_with("x-envoy-")
        || plain == "x-forwarded-client-cert"
        || plain == "canal-source";
    is_proxys
        || (plain != name
            && ["x-forwarded-for", "x-forwarded-proto", "x-request-id"].contains(&plain.as_str()))
}

/// Returns whether an enforced policy depends on the path, or sends it to an authorizer.
fn reads_path(policy: &Authorization) -> bool {
    let lists = policy
        .rules
        .iter()
        .flat_map(|rule| rule.from.iter().chain(&rule.to).chain([&rule.when]));
    let matches_path = || {
        lists
            .flatten()
            .any(|clause| clause.attribute == Attribute::Path)
    };
    !policy.dry_run && (matches!(policy.action, AuthorizationAction::Custom(_)) || matches_path())
}

fn hop_decision(verdict: OracleDecision, refused: &str) -> HopDecision {
    match verdict {
        OracleDecision::Allow => HopDecision::Passes("allowed".into()),
        OracleDecision::Deny { policy: None, .. } => {
            HopDecision::Denies(format!("{refused}: no ALLOW policy matches"))
        }
        OracleDecision::Deny {
            policy: Some(policy),
            rule: None,
        } => HopDecision::Denies(format!("{refused}: {policy} is broken")),
        OracleDecision::Deny {
            policy: Some(policy),
            rule: Some(rule),
        } => HopDecision::Denies(format!("{refused}: {policy} rule {rule} denies")),
        OracleDecision::CallAuthorizer { authorizer, policy } => {
            HopDecision::CallsAuthorizer(format!("{policy} calls {authorizer}"))
        }
        OracleDecision::Undecided { policy, attribute } => HopDecision::Denies(format!(
            "{refused}: {policy} depends on {}",
            text_security::attribute(&attribute)
        )),
    }
}

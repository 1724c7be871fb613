//! Explains what happens to a request on its whole path, according to the oracles. The explanation
//! has the route, and at each hop the policy that decides and why the others do not. It serves
//! `canal explain` and golden tests. It sends nothing, and assumes that tokens are valid. Start at
//! [`explain`] for requests to services, and at [`explain_arrival`] for those that arrive at a Gateway.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use canal_model::authorization::PolicyKey;
use canal_model::identity::Identity;
use canal_model::ids::Namespace;
use canal_model::program::{AppProtocol, BackendTarget, DirectEndpoint, Labels, Workload};
use serde_json::Value as Json;

use canal_compiler::direct::{self, PathReason, PortPath};
use canal_compiler::ir::Ir;
use canal_compiler::lower::{RefusalReason, TargetName, last_target};
use canal_compiler::oracle::{self, OracleClient, OracleRequest, RoutingVerdict as Route};
use canal_compiler::text;
use canal_oracle::answers::OracleAnswer;
use canal_oracle::authorization::OracleTruth;
use canal_oracle::cors::OracleCors;

mod arrival;
mod arrival_description;
mod arrival_text;
mod balancing;
mod listener_trace;
mod policy_trace;
mod route_trace;
mod token_facts;
mod workload_path;

pub use arrival::{ArrivalExplanation, ArrivalOutcome, BackendTrace, explain_arrival};
pub use arrival_description::ArrivalDescription;
use arrival_text::write_matches;
pub use listener_trace::ListenerTrace;
use route_trace::trace_matches;
pub use route_trace::{MatchStanding, MatchTrace};
use workload_path::WorkloadPath;

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
    /// The request itself, whose client is that of the identity. On an opaque port only its service
    /// and port are used.
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
    /// Namespace of the client, if its routes for its own clients replace all others of the port.
    pub consumer: Option<Namespace>,
    /// The matches of the port's rules, in match order; empty if the request is not routed.
    pub matches: Vec<MatchTrace>,
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
        is_passed(&self.steps)
    }
}

/// Returns whether at least one workload of the hops, or the gateway that answers, gets the request.
fn is_passed(steps: &[HopExplanation]) -> bool {
    let workloads: BTreeSet<&str> = steps.iter().map(|step| step.workload.as_str()).collect();
    let denies = |step: &&HopExplanation| matches!(step.outcome, HopDecision::Denies(_));
    workloads.iter().any(|workload| {
        let mut own = steps.iter().filter(|step| step.workload == *workload);
        !own.any(|step| denies(&step))
    })
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "route: {}", self.route)?;
        if let Some(consumer) = &self.consumer {
            writeln!(
                f,
                "only routes of namespace {consumer} are asked: for its own clients they replace those of the Service"
            )?;
        }
        // The line of the route has the only match.
        if self.matches.len() > 1
            || self
                .matches
                .iter()
                .any(|it| it.standing != MatchStanding::Decides)
        {
            write_matches(f, &self.matches)?;
        }
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
        write_hops(f, &self.steps)?;
        writeln!(f, "=> {}", if self.passes() { "passes" } else { "denied" })
    }
}

/// Writes the decisions of the hops. Workloads with equal results are printed together.
fn write_hops(f: &mut fmt::Formatter<'_>, steps: &[HopExplanation]) -> fmt::Result {
    let mut by_workload: Vec<(Vec<&str>, Vec<&HopExplanation>)> = Vec::new();
    for step in steps {
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
    Ok(())
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

/// Returns what the gateway knows of the client of a request.
fn client_of(ir: &Ir, journey: &RequestDescription) -> OracleClient {
    let identity = journey.identity.as_ref();
    let own = identity.filter(|identity| identity.trust_domain == ir.tenant.trust_domain);
    let workload = own.and_then(|identity| {
        let mut workloads = ir.workloads.iter().filter(|it| {
            (&it.namespace, &it.service_account) == (&identity.namespace, &identity.service_account)
        });
        match journey.address {
            Some(address) => workloads.find(|it| it.addresses.contains(&address)),
            None => workloads.next(),
        }
    });
    OracleClient {
        is_tls: journey.server_name.is_some(),
        namespace: own.map(|identity| identity.namespace.clone()),
        labels: workload.map_or_else(Labels::new, |workload| workload.labels.clone()),
    }
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
    // A gateway answers a preflight itself, before it uses the rule's backends or answer.
    if let (Route::Split { .. } | Route::Answer { .. }, Some(OracleCors::Preflight(answer))) =
        (&route, oracle::cors(ir, &journey.request))
    {
        let answer = answer_text(Some(&answer));
        let text = format!("{}; {answer}", rule_text(ir, &journey.request));
        return (text, Vec::new(), true);
    }
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
    let mut journey = journey.clone();
    journey.request.client = client_of(ir, &journey);
    let journey = &journey;
    let (mut route, targets, is_answered) = decide_route(ir, journey);
    // A request to a pod's own address has no endpoint to choose.
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
                    entry: None,
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
            entry: None,
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
        matches: trace_service_matches(ir, journey),
        consumer: consumer(ir, journey),
    }
}

/// Returns the client's namespace if it has routes of its own for the port.
fn consumer(ir: &Ir, journey: &RequestDescription) -> Option<Namespace> {
    let request = &journey.request;
    let service = ir.services.get(&request.service)?;
    let mut ports = service.service.ports.iter();
    let port = ports.find(|port| port.port == request.port)?;
    // An opaque port and a pod's own address have no routes.
    if journey.direct || port.protocol == AppProtocol::Tcp {
        return None;
    }
    let client = request.client.namespace.as_ref()?;
    let routes = service.consumers.get(client)?;
    routes.concerns(request.port).then(|| client.clone())
}

/// Returns the traces of the matches of the port that the client dialled.
fn trace_service_matches(ir: &Ir, journey: &RequestDescription) -> Vec<MatchTrace> {
    let request = &journey.request;
    let Some(service) = ir.services.get(&request.service) else {
        return Vec::new();
    };
    let mut ports = service.service.ports.iter();
    let port = ports.find(|port| port.port == request.port);
    if journey.direct || port.is_none_or(|port| port.protocol == AppProtocol::Tcp) {
        return Vec::new();
    }
    let routes = service.routes_for(request.client.namespace.as_ref(), request.port);
    let matches = routes.on_port(request.port);
    let matches = matches.map(|(rule, http)| (&**rule, http));
    let request = oracle::compared(matches.clone(), request);
    trace_matches(matches.map(|(rule, http)| (None, rule, http)), &request)
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

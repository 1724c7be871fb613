//! What becomes of a request on its whole way, as the oracles say: its route, and at each hop which policy decides and why the others do not.
//! For `canal explain` and golden tests; nothing is sent, and tokens are taken as valid.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use canal_model::authorization::{Action, Attribute, Authentication, Authorization, JwtRule, PeerMode, PolicyKey};
use canal_model::identity::Identity;
use canal_model::ids::ServiceKey;
use canal_model::program::{AppProtocol, BackendTarget, Tunnel, Workload};
use canal_model::trust::ClientCertificates;
use serde_json::Value as Json;

use crate::ir::Ir;
use crate::oracle::{self, Request, Verdict as Route};
use crate::oracle_authorization::{
    Destination, Facts, Hit, Truth, Value, Verdict, decide, hits, is_for, normal_path, peer_mode, rule_holds,
};
use crate::text_security;

/// A request, as a person describes it.
#[derive(Debug, Clone)]
pub struct Journey {
    /// The caller's verified identity; `None`: it proves none.
    pub identity: Option<Identity>,
    /// The caller's address; `None`: that of a workload with the identity, if there is one.
    pub address: Option<IpAddr>,
    /// Straight to the pod, past all gateways.
    pub direct: bool,
    /// What is asked for. On an opaque port only its service and port count.
    pub request: Request,
    /// The claims of a token that some issuer signed well.
    pub claims: Option<Json>,
    /// The server name of its TLS that ends at the gateway; `None`: it comes by its node, or in plain.
    pub server_name: Option<String>,
}

/// Where it was judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hop {
    Gateway,
    Node,
}

/// What a hop does with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Passes(String),
    Denies(String),
    /// Passes if the authorizer agrees.
    Asks(String),
}

/// One hop's judgement for one workload.
#[derive(Debug, Clone)]
pub struct Step {
    pub hop: Hop,
    /// `namespace/name`.
    pub workload: String,
    pub outcome: Outcome,
    /// All policies that are for this destination, in order of their names.
    pub policies: Vec<Judged>,
    /// Audits and dry runs.
    pub hits: Vec<String>,
}

/// One policy and why it matched or did not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    pub policy: PolicyKey,
    /// What it does and for whom.
    pub what: String,
    /// For each rule whether it matches, and if not surely, why not.
    pub rules: Vec<(Truth, String)>,
}

/// The whole way.
#[derive(Debug, Clone)]
pub struct Explained {
    /// What routing says.
    pub route: String,
    /// Empty: it ends at the route.
    pub steps: Vec<Step>,
}

impl Explained {
    /// Whether some workload may get it.
    pub fn passes(&self) -> bool {
        let ways: BTreeSet<&str> = self.steps.iter().map(|step| step.workload.as_str()).collect();
        let denies = |step: &&Step| matches!(step.outcome, Outcome::Denies(_));
        ways.iter().any(|workload| !self.steps.iter().filter(|step| step.workload == *workload).any(|step| denies(&step)))
    }
}

impl fmt::Display for Explained {
    /// Workloads to which the same happens are told together.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "route: {}", self.route)?;
        let mut ways: Vec<(Vec<&str>, Vec<&Step>)> = Vec::new();
        for step in &self.steps {
            match ways.iter_mut().find(|(workloads, _)| workloads == &[step.workload.as_str()]) {
                Some((_, steps)) => steps.push(step),
                None => ways.push((vec![&step.workload], vec![step])),
            }
        }
        let mut told: Vec<(Vec<&str>, Vec<&Step>)> = Vec::new();
        for (workloads, steps) in ways {
            let same = |(_, other): &&mut (Vec<&str>, Vec<&Step>)| {
                other.len() == steps.len() && other.iter().zip(&steps).all(|(a, b)| a.is_like(b))
            };
            match told.iter_mut().find(same) {
                Some((others, _)) => others.extend(workloads),
                None => told.push((workloads, steps)),
            }
        }
        for (workloads, steps) in told {
            writeln!(f, "to {}", workloads.join(", "))?;
            steps.into_iter().try_for_each(|step| step.write(f))?;
        }
        writeln!(f, "=> {}", if self.passes() { "passes" } else { "denied" })
    }
}

impl Step {
    fn is_like(&self, other: &Step) -> bool {
        self.hop == other.hop && self.outcome == other.outcome && self.policies == other.policies && self.hits == other.hits
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hop = match self.hop {
            Hop::Gateway => "gateway",
            Hop::Node => "node",
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
                    Truth::Yes => "matches",
                    Truth::No => "does not match",
                    Truth::Maybe(_) => "cannot be told",
                };
                let why = if why.is_empty() { String::new() } else { format!(": {why}") };
                writeln!(f, "      rule {number} {word}{why}")?;
            }
        }
        self.hits.iter().try_for_each(|hit| writeln!(f, "    counted only: {hit}"))
    }
}

impl Outcome {
    /// What happens, in a word, and why.
    pub fn words(&self) -> (&'static str, &str) {
        match self {
            Outcome::Passes(why) => ("passes", why),
            Outcome::Denies(why) => ("denies", why),
            Outcome::Asks(why) => ("asks", why),
        }
    }
}

/// Explains a request to a tenant's service.
pub fn explain(ir: &Ir, journey: &Journey) -> Explained {
    let route = if journey.direct {
        Route::Service { service: journey.request.service.clone(), port: journey.request.port }
    } else {
        oracle::decide(ir, &journey.request)
    };
    let (route, targets): (String, Vec<BackendTarget>) = match route {
        Route::NoService => ("there is no such service or port".into(), Vec::new()),
        Route::NoRule => ("the port has rules and none matches: 404".into(), Vec::new()),
        Route::AmbiguousPath => ("the path can be read in several ways, and a rule of the port looks at it: 400".into(), Vec::new()),
        Route::Refuse { rule, status, reason } => (format!("{rule} refuses: {status} ({reason})"), Vec::new()),
        Route::Service { service, port } => {
            let text = format!("{}/{}:{port}", service.namespace, service.name);
            (text, vec![BackendTarget::Service { service, port, subset: Default::default() }])
        }
        Route::Split { rule, backends } => {
            let shown = crate::text::action(&canal_model::program::RouteAction::Split(backends.clone()));
            (format!("{rule} => {shown}"), backends.into_iter().map(|backend| backend.target).collect())
        }
    };
    let mut steps = Vec::new();
    for target in &targets {
        let BackendTarget::Service { service, port, .. } = target else { continue };
        for (workload, target_port) in oracle::endpoints(ir, target) {
            steps.extend(Way { ir, journey, service, port: *port, workload, target_port }.steps());
        }
    }
    let nobody = steps.is_empty() && !targets.is_empty();
    Explained { route: if nobody { format!("{route}, where nobody is ready") } else { route }, steps }
}

/// The way to one workload.
struct Way<'a> {
    ir: &'a Ir,
    journey: &'a Journey,
    service: &'a ServiceKey,
    port: u16,
    workload: &'a Workload,
    target_port: u16,
}

impl<'a> Way<'a> {
    fn steps(&self) -> Vec<Step> {
        if self.journey.direct {
            return vec![self.node_direct()];
        }
        let gateway = self.gateway();
        match (&gateway.outcome, self.workload.tunnel) {
            (Outcome::Denies(_), _) | (_, Tunnel::None) => vec![gateway],
            _ => vec![gateway, self.node_behind_gateway()],
        }
    }

    fn step(&self, hop: Hop, outcome: Outcome, facts: &Facts, judged: bool) -> Step {
        let policies = if hop == Hop::Gateway { self.all_policies() } else { self.policies() };
        let shown = |hit: (PolicyKey, Option<usize>, Hit)| {
            let what = match hit.2 {
                Hit::Audit => "audit",
                Hit::WouldDeny => "dry run would deny",
                Hit::WouldAllow => "dry run would allow",
                Hit::WouldAsk => "dry run would ask",
            };
            let rule = hit.1.map(|rule| format!(" rule {rule}")).unwrap_or_default();
            format!("{}{rule}: {what}", hit.0)
        };
        Step {
            hop,
            workload: format!("{}/{}", self.workload.namespace, self.workload.name),
            outcome,
            hits: if judged { hits(&policies, facts).into_iter().map(shown).collect() } else { Vec::new() },
            policies: if judged { policies.iter().map(|policy| judge(policy, facts)).collect() } else { Vec::new() },
        }
    }

    fn destination(&self) -> Destination<'a> {
        let service = (!self.journey.direct).then_some(self.service);
        Destination { workload: Some((&self.workload.namespace, &self.workload.labels)), service }
    }

    fn policies(&self) -> Vec<&'a Authorization> {
        let destination = self.destination();
        self.ir.security.authorizations.iter().filter(|policy| is_for(&policy.target, &destination)).collect()
    }

    /// The service that was dialled, where routes lead to another.
    fn dialled(&self) -> Option<Destination<'a>> {
        let dialled = &self.journey.request.service;
        (!self.journey.direct && dialled != self.service).then_some(Destination { workload: None, service: Some(dialled) })
    }

    /// The policies of the dialled service that are not the endpoint's too.
    fn policies_of_dialled(&self) -> Vec<&'a Authorization> {
        let Some(dialled) = self.dialled() else { return Vec::new() };
        self.ir.security.authorizations.iter().filter(|policy| is_for(&policy.target, &dialled)).collect()
    }

    fn all_policies(&self) -> Vec<&'a Authorization> {
        [self.policies(), self.policies_of_dialled()].concat()
    }

    fn is_opaque(&self) -> bool {
        let port = self.ir.services.get(self.service).and_then(|s| s.service.ports.iter().find(|p| p.port == self.port));
        port.is_none_or(|port| port.protocol == AppProtocol::Tcp)
    }

    fn gateway(&self) -> Step {
        let mut facts = self.l4_facts();
        // A gateway is the first that sees the client, and where its TLS ends.
        facts.seen.insert(Attribute::ServerName, Vec::new());
        match facts.seen.get(&Attribute::SourceAddress).cloned() {
            Some(address) => drop(facts.seen.insert(Attribute::RemoteAddress, address)),
            None => drop(facts.unseen.insert(Attribute::RemoteAddress)),
        }
        let deny = |why: &str| Outcome::Denies(why.to_owned());
        if let Err(why) = self.enters(&mut facts) {
            return self.step(Hop::Gateway, deny(&why), &facts, false);
        }
        if !self.is_opaque() {
            match self.token() {
                Err(why) => return self.step(Hop::Gateway, deny(&why), &facts, false),
                Ok(claims) => facts.seen.extend(claims),
            }
            if let Err(why) = self.http_facts(&mut facts) {
                return self.step(Hop::Gateway, deny(&why), &facts, false);
            }
        }
        let (mut own, mut dialled) = (self.policies(), self.policies_of_dialled());
        if own.is_empty() {
            (own, dialled) = (dialled, own);
        }
        let mut verdict = decide(&own, &facts, &BTreeSet::new());
        if matches!(verdict, Verdict::Allow | Verdict::Ask { .. }) && !dialled.is_empty() {
            // Both must allow. That one of them names a foreign caller is enough.
            let also = decide(&dialled, &Facts { is_foreign: false, ..facts.clone() }, &BTreeSet::new());
            if also != Verdict::Allow && (verdict == Verdict::Allow || !matches!(also, Verdict::Ask { .. })) {
                verdict = also;
            }
        }
        let status = if self.is_opaque() { "the connection is closed" } else { "403" };
        let outcome = match verdict {
            Verdict::Undecided { policy, attribute } => {
                let attribute = text_security::attribute(&attribute);
                Outcome::Denies(format!("{status}: {policy} depends on {attribute}, which is not known here"))
            }
            verdict => shown(verdict, status),
        };
        self.step(Hop::Gateway, outcome, &facts, true)
    }

    /// Whether the client is let in at all, before anything is asked.
    fn enters(&self, facts: &mut Facts) -> Result<(), String> {
        let request = &self.journey.request;
        let ends = self.ir.security.terminations.iter().find(|t| t.service == request.service && t.port == request.port);
        self.is_trusted()?;
        let is_tls = self.journey.server_name.is_some();
        if self.journey.identity.is_some() && !is_tls {
            // By its node, over HBONE.
            return Ok(());
        }
        let Some(ends) = ends else {
            return Err("refused: only members of the mesh come to a gateway, since no Termination is for this port".into());
        };
        match &ends.broken {
            Some(why) => Err(format!("refused: the Termination is broken ({why})")),
            None if !is_tls && ends.required => Err("refused: the Termination takes TLS only (give a server name for TLS)".into()),
            None if is_tls && self.journey.identity.is_none() && ends.clients == ClientCertificates::Required => {
                Err("refused: the Termination requires a client certificate".into())
            }
            None => {
                let name = self.journey.server_name.iter().map(|name| Value::Text(name.clone()));
                facts.seen.insert(Attribute::ServerName, name.collect());
                Ok(())
            }
        }
    }

    /// Whether the caller's trust domain is the tenant's, or federated with it.
    fn is_trusted(&self) -> Result<(), String> {
        let own = &self.ir.tenant.trust_domain;
        let foreign = self.journey.identity.as_ref().map(|id| &id.trust_domain).filter(|of| *of != own);
        match foreign.filter(|of| !self.ir.security.federations.iter().any(|(_, federated)| federated == *of)) {
            Some(of) => Err(format!("refused: trust domain {of} is neither {own} nor federated with it")),
            None => Ok(()),
        }
    }

    /// The node of a workload that a gateway forwards to.
    fn node_behind_gateway(&self) -> Step {
        if !self.is_opaque() {
            let outcome = Outcome::Passes("the gateway has decided".into());
            return self.step(Hop::Node, outcome, &Facts::default(), false);
        }
        let facts = self.l4_facts();
        // The gateway has asked whomever there was to ask.
        let agreed = self.ir.security.authorizers.iter().map(|authorizer| authorizer.key.clone()).collect();
        let outcome = match decide(&self.policies(), &facts, &agreed) {
            Verdict::Undecided { .. } => Outcome::Passes("the gateway has decided what is not seen here".into()),
            verdict => shown(verdict, "refused"),
        };
        self.step(Hop::Node, outcome, &facts, true)
    }

    /// The node of a workload that is dialled past the gateways.
    fn node_direct(&self) -> Step {
        let facts = self.l4_facts();
        if let Err(why) = self.is_trusted() {
            return self.step(Hop::Node, Outcome::Denies(why), &facts, false);
        }
        if self.journey.identity.is_none() {
            let mode = peer_mode(&self.ir.security.peer_authentications, &self.destination(), self.target_port);
            if mode == PeerMode::Strict {
                let why = format!("refused: port {} takes mTLS only (PeerAuthentication STRICT)", self.target_port);
                return self.step(Hop::Node, Outcome::Denies(why), &facts, false);
            }
        }
        let outcome = match decide(&self.policies(), &facts, &BTreeSet::new()) {
            Verdict::Undecided { policy, attribute } => {
                let attribute = text_security::attribute(&attribute);
                Outcome::Denies(format!("refused: {policy} depends on {attribute}, which a node does not see; go through a gateway"))
            }
            Verdict::Ask { policy, .. } => {
                Outcome::Denies(format!("refused: {policy} asks an authorizer, which a node does not; go through a gateway"))
            }
            verdict => shown(verdict, "refused"),
        };
        self.step(Hop::Node, outcome, &facts, true)
    }

    /// What every hop sees.
    fn l4_facts(&self) -> Facts {
        let text = |text: String| vec![Value::Text(text)];
        let mut facts = Facts::default();
        let identity = self.journey.identity.as_ref();
        facts.is_foreign = identity.is_some_and(|id| id.trust_domain != self.ir.tenant.trust_domain);
        let of = |show: fn(&Identity) -> String| identity.map(|id| text(show(id))).unwrap_or_default();
        facts.seen.insert(Attribute::SourcePrincipal, of(|id| id.to_string().replacen("spiffe://", "", 1)));
        facts.seen.insert(Attribute::SourceNamespace, of(|id| id.namespace.to_string()));
        facts.seen.insert(Attribute::SourceServiceAccount, of(|id| format!("{}/{}", id.namespace, id.service_account)));
        match self.address() {
            Some(address) => drop(facts.seen.insert(Attribute::SourceAddress, vec![Value::Address(address)])),
            None => drop(facts.unseen.insert(Attribute::SourceAddress)),
        }
        facts.seen.insert(Attribute::DestinationPort, vec![Value::Port(self.target_port)]);
        let addresses = self.workload.addresses.iter().map(|address| Value::Address(*address));
        facts.seen.insert(Attribute::DestinationAddress, addresses.collect());
        facts
    }

    fn address(&self) -> Option<IpAddr> {
        let identity = self.journey.identity.as_ref();
        let runs = |w: &&Workload| identity.is_some_and(|id| w.namespace == id.namespace && w.service_account == id.service_account);
        let known = || self.ir.workloads.iter().find(runs).and_then(|workload| workload.addresses.first().copied());
        self.journey.address.or_else(known)
    }

    /// What a hop that reads HTTP sees too.
    fn http_facts(&self, facts: &mut Facts) -> Result<(), String> {
        let request = &self.journey.request;
        let mut headers: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for (name, value) in &request.headers {
            headers.entry(name.to_lowercase()).or_default().push(value);
        }
        for (name, values) in headers {
            facts.seen.insert(Attribute::Header(name), vec![Value::Text(values.join(","))]);
        }
        facts.is_complete = true;
        facts.seen.insert(Attribute::Method, vec![Value::Text(request.method.clone())]);
        facts.seen.insert(Attribute::Host, vec![Value::Text(request.host.clone())]);
        match normal_path(&request.target) {
            Some(path) => drop(facts.seen.insert(Attribute::Path, vec![Value::Text(path)])),
            None if self.all_policies().iter().any(|policy| reads_path(policy)) => {
                return Err("400: the path can be read in several ways, and a policy asks for it".into());
            }
            None => drop(facts.seen.insert(Attribute::Path, vec![Value::Text(request.target.clone())])),
        }
        Ok(())
    }

    /// What a token adds to the facts, or why it is refused.
    fn token(&self) -> Result<BTreeMap<Attribute, Vec<Value>>, String> {
        let destination = self.destination();
        let dialled = self.dialled();
        let is_own = |policy: &&Authentication| {
            is_for(&policy.target, &destination) || dialled.as_ref().is_some_and(|dialled| is_for(&policy.target, dialled))
        };
        let own: Vec<&Authentication> = self.ir.security.authentications.iter().filter(is_own).collect();
        if let Some((policy, why)) = own.iter().find_map(|policy| Some((&policy.key, policy.broken.as_ref()?))) {
            return Err(format!("401: RequestAuthentication {policy} is broken ({why})"));
        }
        let Some(claims) = &self.journey.claims else { return Ok(BTreeMap::new()) };
        if own.iter().all(|policy| policy.rules.is_empty()) {
            // Nobody looks at tokens here.
            return Ok(BTreeMap::new());
        }
        let audiences = texts(claims.get("aud"));
        let accepts = |rule: &&JwtRule| {
            claims.get("iss").and_then(Json::as_str) == Some(rule.issuer.as_str())
                && (rule.audiences.is_empty() || rule.audiences.iter().any(|audience| audiences.contains(audience)))
        };
        let Some(rule) = own.iter().flat_map(|policy| &policy.rules).find(accepts) else {
            return Err("401: no RequestAuthentication accepts a token of this issuer and audience".into());
        };
        if rule.keys.is_none() {
            return Err(format!("401: the keys of issuer {} are not known", rule.issuer));
        }
        Ok(claimed(rule, claims, audiences, &self.all_policies()))
    }
}

/// What a valid token says.
fn claimed(rule: &JwtRule, claims: &Json, audiences: Vec<String>, policies: &[&Authorization]) -> BTreeMap<Attribute, Vec<Value>> {
    let values = |texts: Vec<String>| texts.into_iter().map(Value::Text).collect::<Vec<Value>>();
    let subject = claims.get("sub").and_then(Json::as_str).unwrap_or_default();
    let mut seen = BTreeMap::from([
        (Attribute::RequestPrincipal, values(vec![format!("{}/{subject}", rule.issuer)])),
        (Attribute::RequestAudience, values(audiences)),
        (Attribute::RequestPresenter, values(texts(claims.get("azp")))),
    ]);
    let clauses = policies.iter().flat_map(|policy| &policy.rules).flat_map(|rule| rule.from.iter().chain(&rule.to).chain([&rule.when]));
    for attribute in clauses.flatten().map(|clause| &clause.attribute) {
        if let Attribute::RequestClaim(path) = attribute {
            let claim = path.iter().try_fold(claims, |claims, name| claims.get(name));
            let mut found = texts(claim);
            if matches!(path.as_slice(), [name] if name == "scope" || name == "permission") {
                found = found.iter().flat_map(|text| text.split(' ')).filter(|text| !text.is_empty()).map(str::to_owned).collect();
            }
            seen.insert(attribute.clone(), values(found));
        }
    }
    seen
}

/// A claim's texts: itself, or the items of its list.
fn texts(claim: Option<&Json>) -> Vec<String> {
    let one = |value: &Json| match value {
        Json::String(text) => Some(text.clone()),
        Json::Bool(_) | Json::Number(_) => Some(value.to_string()),
        _ => None,
    };
    match claim {
        Some(Json::Array(items)) => items.iter().filter_map(one).collect(),
        Some(value) => one(value).into_iter().collect(),
        None => Vec::new(),
    }
}

/// Whether a policy that is enforced looks at the path, or shows it to an authorizer.
fn reads_path(policy: &Authorization) -> bool {
    let lists = policy.rules.iter().flat_map(|rule| rule.from.iter().chain(&rule.to).chain([&rule.when]));
    let asks = || lists.flatten().any(|clause| clause.attribute == Attribute::Path);
    !policy.dry_run && (matches!(policy.action, Action::Custom(_)) || asks())
}

fn shown(verdict: Verdict, refused: &str) -> Outcome {
    match verdict {
        Verdict::Allow => Outcome::Passes("allowed".into()),
        Verdict::Deny { policy: None, .. } => Outcome::Denies(format!("{refused}: no ALLOW policy matches")),
        Verdict::Deny { policy: Some(policy), rule: None } => Outcome::Denies(format!("{refused}: {policy} is broken")),
        Verdict::Deny { policy: Some(policy), rule: Some(rule) } => Outcome::Denies(format!("{refused}: {policy} rule {rule} denies")),
        Verdict::Ask { authorizer, policy } => Outcome::Asks(format!("{policy} asks {authorizer}")),
        Verdict::Undecided { policy, attribute } => {
            Outcome::Denies(format!("{refused}: {policy} depends on {}", text_security::attribute(&attribute)))
        }
    }
}

fn judge(policy: &Authorization, facts: &Facts) -> Judged {
    let dry = if policy.dry_run { ", dry run" } else { "" };
    let what = format!("{} for {}{dry}", text_security::action(&policy.action), text_security::target(&policy.target));
    let named = facts.is_foreign && policy.action == Action::Allow;
    let rules = policy.rules.iter().map(|rule| {
        let truth = rule_holds(rule, facts, named);
        let why = match &truth {
            Truth::Yes => String::new(),
            Truth::Maybe(attribute) => format!("{} is not known", text_security::attribute(attribute)),
            Truth::No if named && rule_holds(rule, facts, false) == Truth::Yes => "it does not name the foreign caller".into(),
            Truth::No => failing(rule, facts),
        };
        (truth, why)
    });
    let rules = match &policy.broken {
        Some(why) => vec![(Truth::Yes, format!("broken: {why}"))],
        None => rules.collect(),
    };
    Judged { policy: policy.key.clone(), what, rules }
}

/// The first condition of each alternative that does not hold.
fn failing(rule: &canal_model::authorization::Rule, facts: &Facts) -> String {
    use crate::oracle_authorization::{all_hold, clause_holds};
    let fails = |all: &canal_model::authorization::All| {
        all.iter().find(|clause| clause_holds(clause, facts) == Truth::No).map(|clause| {
            let own = match facts.seen.get(&clause.attribute).map(Vec::as_slice) {
                None | Some([]) => "there is none".to_owned(),
                Some(values) => format!("it is {}", values.iter().map(value).collect::<Vec<_>>().join(", ")),
            };
            format!("not so: {} ({own})", text_security::clause(clause))
        })
    };
    for alternatives in [&rule.from, &rule.to] {
        let fail: Vec<String> = alternatives.iter().filter_map(fails).collect();
        if !alternatives.is_empty() && fail.len() == alternatives.len() {
            return fail.join("; ");
        }
    }
    if all_hold(&rule.when, facts) == Truth::No { fails(&rule.when).unwrap_or_default() } else { String::new() }
}

fn value(value: &Value) -> String {
    match value {
        Value::Text(text) => format!("{text:?}"),
        Value::Address(address) => address.to_string(),
        Value::Port(port) => port.to_string(),
    }
}

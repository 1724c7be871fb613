//! The hops of a request to one workload, or to the gateway that answers it: the attributes that each
//! hop observes, the policies that apply there, and its decision by the oracle. Start at
//! [`WorkloadPath::steps`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use canal_compiler::ir::Ir;
use canal_compiler::ir_ingress::GatewayIr;
use canal_compiler::{oracle, text_security};
use canal_model::authorization::{
    Attribute, Authentication, Authorization, AuthorizationAction, JwtRule, PeerMode, PolicyKey,
    PolicyTarget,
};
use canal_model::identity::Identity;
use canal_model::ids::ServiceKey;
use canal_model::program::{AppProtocol, BackendTarget, TunnelProtocol, Workload};
use canal_model::trust::ClientCertificates;
use canal_oracle::authorization::{
    OracleDecision, OracleDestination, OracleFacts, OracleShadowMatch, OracleValue, decide, hits,
    is_for, is_for_answers, is_for_gateway, peer_mode, policy_path,
};
use canal_oracle::forwarded_client::remote_address;
use serde_json::Value as Json;

use super::policy_trace::explain_policies;
use super::token_facts::{claimed, texts};
use super::{EnforcementPoint, HopDecision, HopExplanation, RequestDescription};

/// A Gateway through which a client outside the mesh comes.
#[derive(Debug, Clone, Copy)]
pub(super) struct GatewayEntry<'a> {
    pub(super) gateway: &'a GatewayIr,
    /// True if the gateway relays the connection and reads no request.
    pub(super) is_relayed: bool,
}

/// The path of a request to one workload, or to the gateway that answers it.
pub(super) struct WorkloadPath<'a> {
    pub(super) ir: &'a Ir,
    pub(super) journey: &'a RequestDescription,
    pub(super) service: &'a ServiceKey,
    pub(super) port: u16,
    /// The workload and its target port; `None` if the gateway answers.
    pub(super) workload: Option<(&'a Workload, u16)>,
    /// True if the workload's node is reached without a gateway.
    pub(super) is_direct: bool,
    /// The Gateway that the client dialled; `None` for a client of a service.
    pub(super) entry: Option<GatewayEntry<'a>>,
}

impl<'a> WorkloadPath<'a> {
    pub(super) fn steps(&self) -> Vec<HopExplanation> {
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
        // A Gateway has no endpoints, so its own policies decide.
        if self.entry.is_some() {
            return is_for_gateway(target, self.service);
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

    /// Returns whether a policy with this target applies to the service that was dialled, if routes
    /// lead to a different one.
    fn is_for_dialled(&self, target: &PolicyTarget) -> bool {
        let dialled = &self.journey.request.service;
        if self.journey.direct || dialled == self.service {
            return false;
        }
        if self.entry.is_some() {
            return is_for_gateway(target, dialled);
        }
        let destination = OracleDestination {
            workload: None,
            service: Some(dialled),
        };
        is_for(target, &destination)
    }

    /// Returns the policies of the dialled service, if it is not the endpoint's service.
    fn policies_of_dialled(&self) -> Vec<&'a Authorization> {
        let all = self.ir.security.authorizations.iter();
        all.filter(|policy| self.is_for_dialled(&policy.target))
            .collect()
    }

    fn all_policies(&self) -> Vec<&'a Authorization> {
        [self.policies(), self.policies_of_dialled()].concat()
    }

    /// Returns whether the gateway reads no requests of the connection. What the client dialled
    /// decides, and not the service to which routes lead.
    fn is_opaque(&self) -> bool {
        if let Some(entry) = self.entry {
            return entry.is_relayed;
        }
        let (service, port) = match self.journey.direct {
            true => (self.service, self.port),
            false => (&self.journey.request.service, self.journey.request.port),
        };
        let dialled = self.ir.services.get(service);
        let port = dialled.and_then(|s| s.service.ports.iter().find(|p| p.port == port));
        port.is_none_or(|port| port.protocol == AppProtocol::Tcp)
    }

    fn gateway(&self) -> HopExplanation {
        let mut facts = self.l4_facts();
        // A gateway is the first hop, so it observes the client's address, and it terminates TLS.
        facts.values.insert(Attribute::ServerName, Vec::new());
        match self.remote_address() {
            Some(address) => {
                let address = vec![OracleValue::Address(address)];
                facts.values.insert(Attribute::RemoteAddress, address);
            }
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
        // No authorizer is called here, so none has agreed.
        let mut verdict = decide(&own, &facts, &BTreeSet::new());
        if matches!(
            verdict,
            OracleDecision::Allow | OracleDecision::CallAuthorizer { .. }
        ) && !dialled.is_empty()
        {
            // Both policy sets must allow. That a foreign client is named by the first is enough.
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
        // A gateway answers requests with a status; an opaque connection has none.
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
        let server_name = || {
            let name = self.journey.server_name.iter();
            name.map(|name| OracleValue::Text(name.clone())).collect()
        };
        // The listener has accepted the connection.
        if self.entry.is_some() {
            facts.values.insert(Attribute::ServerName, server_name());
            return Ok(());
        }
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
                facts.values.insert(Attribute::ServerName, server_name());
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
        let mut facts = self.l4_facts();
        // The gateway opens the tunnel for a client outside the mesh, and the node does not see that
        // the client has no identity.
        if self.entry.is_some() {
            facts.values.remove(&Attribute::SourcePrincipal);
            facts.values.remove(&Attribute::SourceNamespace);
            facts.values.remove(&Attribute::SourceServiceAccount);
        }
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
        // As at a gateway, no authorizer is called here.
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
        // A client without an identity has empty values, so a clause on them is decided.
        let of =
            |show: fn(&Identity) -> String| identity.map(|id| text(show(id))).unwrap_or_default();
        facts.values.insert(
            Attribute::SourcePrincipal,
            // Istio writes principals without the scheme.
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

    /// Returns the address of the client before the trusted proxies of its Gateway, if it is known.
    fn remote_address(&self) -> Option<IpAddr> {
        let address = self.address()?;
        let Some(entry) = self.entry else {
            return Some(address);
        };
        let proxies = entry.gateway.trusted_proxies;
        // The proxies write into requests, which the gateway does not read of a relayed connection.
        if entry.is_relayed && proxies > 0 {
            return None;
        }
        remote_address(&self.journey.request.headers, address, proxies)
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
        // Headers that are not in `facts` are now known to be absent.
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
            .get(self.service)
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

    /// Returns the facts that a token adds, or the reason why the token is refused. The endpoint and
    /// the dialled service each accept the token by their own RequestAuthentications.
    fn token(&self) -> Result<BTreeMap<Attribute, Vec<OracleValue>>, String> {
        let all = &self.ir.security.authentications;
        let of_endpoint: Vec<&Authentication> = all
            .iter()
            .filter(|policy| self.is_covered_by(&policy.target))
            .collect();
        let of_dialled: Vec<&Authentication> = all
            .iter()
            .filter(|policy| self.is_for_dialled(&policy.target))
            .collect();
        let mut facts = BTreeMap::new();
        for policies in [of_endpoint, of_dialled] {
            facts.extend(self.token_of(&policies)?);
        }
        Ok(facts)
    }

    /// Returns the facts that a token adds by the RequestAuthentications of one destination.
    fn token_of(
        &self,
        own: &[&Authentication],
    ) -> Result<BTreeMap<Attribute, Vec<OracleValue>>, String> {
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
            // As in Istio, a request without a token is valid; only policies can require one.
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

//! Authorization of connections into a pod: the compiled policies of one pod, and their decision on
//! one connection. Without IO.
//!
//! `canal-authorization` evaluates the policies. This module provides the attributes that a node
//! knows, and defines which hop decides.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

use canal_authorization::{
    AttributeValue, AttributeVisibility, Attributes, AuthorizationDecision, ExtAuthzProgress,
    PolicyDestination, PolicySet, ShadowKind, applies, name, peer_mode,
};
use canal_model::authorization::{
    Attribute, Authorization, PeerAuthentication, PeerMode, PolicyKey, PolicyTarget,
};
use canal_model::identity::{Identity, gateway_identity};
use canal_model::ids::{ServiceKey, TrustDomain};
use canal_model::program::Labels;

use crate::pod::LocalPod;
use crate::refusal::NodeRefusal;
use crate::snapshot::{NodeTenantView, TenantAuthorization};

/// An identity in the forms that policies compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrincipalNames {
    pub identity: Identity,
    principal: String,
    account: String,
}

impl PrincipalNames {
    pub fn new(identity: Identity) -> Self {
        let principal = identity
            .to_string()
            .trim_start_matches("spiffe://")
            .to_string();
        let account = format!("{}/{}", identity.namespace, identity.service_account);
        Self {
            identity,
            principal,
            account,
        }
    }
}

/// Source of a connection, and the party that vouches for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectionSource {
    /// The peer proved this identity in its handshake with this node.
    Proven(Rc<PrincipalNames>),
    /// A gateway of the own tenant, which has authorized the connection, opened this tunnel for one
    /// connection of this source.
    Forwarded(Rc<PrincipalNames>),
    /// A gateway of the own tenant, which has authorized the connections, opened this tunnel for
    /// many sources.
    Gateway,
    /// The connection came without mTLS, so nothing vouches for its source.
    Plain,
    /// A process of the node itself connects without mTLS, such as a kubelet's probe. It could
    /// enter the pod's namespace as well.
    Node,
}

/// Input of an authorization decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthorizationQuery {
    pub source: ConnectionSource,
    /// Address of the source; `None`: this hop does not know it.
    pub address: Option<IpAddr>,
    /// Address and port of the application.
    pub destination: SocketAddr,
    /// The service, if the tunnel names one instead of an address.
    pub service: Option<ServiceKey>,
}

impl AuthorizationQuery {
    fn named(&self) -> Option<&PrincipalNames> {
        match &self.source {
            ConnectionSource::Proven(named) | ConnectionSource::Forwarded(named) => Some(named),
            ConnectionSource::Gateway | ConnectionSource::Plain | ConnectionSource::Node => None,
        }
    }
}

/// Attributes of a query, as policies read them.
struct QueryAttributes<'a> {
    query: &'a AuthorizationQuery,
    foreign: bool,
}

impl Attributes for QueryAttributes<'_> {
    fn visit_attribute(
        &self,
        attribute: &Attribute,
        each: &mut dyn FnMut(AttributeValue<'_>) -> bool,
    ) -> AttributeVisibility {
        let q = self.query;
        let mut text = |of: fn(&PrincipalNames) -> &str| match (q.named(), &q.source) {
            (Some(named), _) => {
                each(AttributeValue::Text(of(named).as_bytes()));
                AttributeVisibility::Known
            }
            // Plaintext certainly has no principal; a gateway's tunnel has one that this hop does
            // not see.
            (None, ConnectionSource::Plain) => AttributeVisibility::Known,
            (None, _) => AttributeVisibility::Unknown,
        };
        match attribute {
            Attribute::SourcePrincipal => text(|n| &n.principal),
            Attribute::SourceNamespace => text(|n| n.identity.namespace.as_str()),
            Attribute::SourceServiceAccount => text(|n| &n.account),
            Attribute::SourceAddress => match q.address {
                Some(address) => {
                    each(AttributeValue::Address(address.to_canonical()));
                    AttributeVisibility::Known
                }
                None => AttributeVisibility::Unknown,
            },
            Attribute::DestinationPort => {
                each(AttributeValue::Port(q.destination.port()));
                AttributeVisibility::Known
            }
            Attribute::DestinationAddress => {
                each(AttributeValue::Address(q.destination.ip().to_canonical()));
                AttributeVisibility::Known
            }
            // HTTP attributes, and others that only a gateway knows.
            _ => AttributeVisibility::Unknown,
        }
    }

    fn is_foreign(&self) -> bool {
        self.foreign
    }
}

/// Reason why a connection was refused, with the text for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthorizationRefusal {
    pub refusal: NodeRefusal,
    /// The policy that refused it, if one did.
    pub policy: Option<PolicyKey>,
    pub why: String,
}

impl AuthorizationRefusal {
    fn new(refusal: NodeRefusal, policy: Option<&PolicyKey>, why: impl fmt::Display) -> Self {
        Self {
            refusal,
            policy: policy.cloned(),
            why: why.to_string(),
        }
    }
}

/// Inputs of a pod's policies. Equal inputs make equal policies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct PolicyInputs {
    /// Trust domain of the tenant; `None`: the tenant is unknown.
    trust_domain: Option<TrustDomain>,
    /// True if a security resource of the tenant is refused or missing, so that the policies are
    /// incomplete.
    closed: bool,
    /// Trust domains of other tenants whose members may connect.
    federated: BTreeSet<TrustDomain>,
    /// Policies of the workload, sorted by key.
    workload: Vec<Arc<Authorization>>,
    /// Policies of the services that the pod serves.
    services: BTreeMap<ServiceKey, Vec<Arc<Authorization>>>,
    /// Mode at all ports that are not in `modes`.
    mode: PeerMode,
    modes: BTreeMap<u16, PeerMode>,
}

/// Compiled policies of one pod. The default belongs to a pod whose tenant is unknown: it admits
/// only the node's own processes.
#[derive(Debug, Default)]
pub struct PodPolicy {
    inputs: PolicyInputs,
    /// Identity of the tenant's gateways.
    gateway: Option<Identity>,
    workload: PolicySet,
    /// Policies of the workload and of the service together.
    services: HashMap<ServiceKey, PolicySet>,
}

/// Sources from which a pod's policies are compiled. While they are the same, so are the policies.
#[derive(Debug)]
pub struct PolicySources {
    rules: Arc<TenantAuthorization>,
    labels: Labels,
    services: BTreeSet<ServiceKey>,
}

impl PolicySources {
    pub fn new(tenant: &NodeTenantView, pod: &LocalPod) -> Self {
        let services = tenant.served(&pod.uid).into_iter().cloned().collect();
        Self {
            rules: tenant.rules.clone(),
            labels: pod.labels.clone(),
            services,
        }
    }

    /// Compares rules by pointer, which is fast: equal rules in two allocations count as different.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.rules, &other.rules)
            && self.labels == other.labels
            && self.services == other.services
    }
}

impl PolicyInputs {
    fn new(tenant: &NodeTenantView, pod: &LocalPod) -> Self {
        let (rules, served) = (&tenant.rules, tenant.served(&pod.uid));
        let place = PolicyDestination::workload(&pod.namespace, &pod.labels);
        let workload = rules
            .authorizations
            .iter()
            .filter(|a| applies(&a.target, &place))
            .cloned()
            .collect();
        let mut services = BTreeMap::<ServiceKey, Vec<_>>::new();
        for one in &rules.authorizations {
            // A policy of a Service can only match on the pods behind it.
            if let PolicyTarget::Service(key) = &one.target
                && served.contains(key)
            {
                services.entry(key.clone()).or_default().push(one.clone());
            }
        }
        let mine = |p: &&Arc<PeerAuthentication>| applies(&p.target, &place);
        let mode = |port| {
            peer_mode(
                rules.peer_authentications.iter().map(AsRef::as_ref),
                &place,
                port,
            )
        };
        // No workload has port 0, so no object configures it: its mode is that of all ports without
        // an entry.
        let usual = mode(0);
        let ports: BTreeSet<u16> = rules
            .peer_authentications
            .iter()
            .filter(mine)
            .flat_map(|p| p.ports.keys().copied())
            .collect();
        Self {
            trust_domain: Some(rules.trust_domain.clone()),
            closed: rules.closed,
            federated: rules.federated.clone(),
            workload,
            services,
            mode: usual,
            modes: ports
                .into_iter()
                .map(|port| (port, mode(port)))
                // A port without an entry has the usual mode, so entries that only repeat it are
                // not stored.
                .filter(|(_, mode)| *mode != usual)
                .collect(),
        }
    }
}

impl PodPolicy {
    /// Compiles the policies of `pod` from its tenant's view; `None`: `current` is still right.
    /// Policies outlive their tenant, so that its removal admits nothing.
    pub fn renew(
        current: &PodPolicy,
        tenant: Option<&NodeTenantView>,
        pod: &LocalPod,
    ) -> Option<Self> {
        let inputs = PolicyInputs::new(tenant?, pod);
        (inputs != current.inputs).then(|| Self::of(inputs))
    }

    fn of(inputs: PolicyInputs) -> Self {
        let with = |of: &Vec<Arc<Authorization>>| {
            PolicySet::new(&[inputs.workload.as_slice(), of].concat())
        };
        Self {
            workload: PolicySet::new(&inputs.workload),
            services: inputs
                .services
                .iter()
                .map(|(key, of)| (key.clone(), with(of)))
                .collect(),
            gateway: inputs.trust_domain.clone().map(gateway_identity),
            inputs,
        }
    }

    /// Returns the source of a tunnel whose peer proved `peer`. `forwarded` is the source that the
    /// peer names; only the tenant's own gateway is trusted with it. `None`: `forwarded` is not an
    /// identity.
    pub fn source(&self, peer: &Identity, forwarded: Option<&str>) -> Option<ConnectionSource> {
        if self.gateway.as_ref() != Some(peer) {
            return Some(ConnectionSource::Proven(Rc::new(PrincipalNames::new(
                peer.clone(),
            ))));
        }
        match forwarded {
            None => Some(ConnectionSource::Gateway),
            Some(forwarded) => forwarded.parse().ok().map(|identity| {
                ConnectionSource::Forwarded(Rc::new(PrincipalNames::new(identity)))
            }),
        }
    }

    /// Returns whether the identity belongs to another tenant than the pod.
    pub fn is_foreign(&self, named: &PrincipalNames) -> bool {
        self.inputs.trust_domain.as_ref() != Some(&named.identity.trust_domain)
    }

    /// Returns whether connections without mTLS must pass through the proxy: some may be refused,
    /// or a policy observes them.
    pub fn guards_plaintext(&self) -> bool {
        let strict = |mode: &PeerMode| *mode == PeerMode::Strict;
        self.inputs.trust_domain.is_none()
            || self.inputs.closed
            || strict(&self.inputs.mode)
            || self.inputs.modes.values().any(strict)
            || !self.workload.is_empty()
    }

    /// Returns whether no policy applies to this pod.
    pub fn is_empty(&self) -> bool {
        self.workload.is_empty() && self.services.values().all(PolicySet::is_empty)
    }

    /// Returns the mode that applies at a port.
    pub fn mode(&self, port: u16) -> PeerMode {
        self.inputs
            .modes
            .get(&port)
            .copied()
            .unwrap_or(self.inputs.mode)
    }

    /// Iterates over the names of the policies, for operators.
    pub fn names(&self) -> impl Iterator<Item = &PolicyKey> {
        self.inputs
            .workload
            .iter()
            .chain(self.inputs.services.values().flatten())
            .map(|a| &a.key)
    }

    fn set(&self, service: Option<&ServiceKey>) -> &PolicySet {
        service
            .and_then(|key| self.services.get(key))
            .unwrap_or(&self.workload)
    }

    /// Returns the trust domain of the pod's tenant, unless the tenant is unknown or closed.
    fn own_trust_domain(&self) -> Result<&TrustDomain, AuthorizationRefusal> {
        let Some(own) = &self.inputs.trust_domain else {
            return Err(AuthorizationRefusal::new(
                NodeRefusal::TenantUnknown,
                None,
                "the pod's tenant is unknown",
            ));
        };
        if self.inputs.closed {
            return Err(AuthorizationRefusal::new(
                NodeRefusal::TenantClosed,
                None,
                "a security resource of the pod's tenant is refused or missing",
            ));
        }
        Ok(own)
    }

    /// Decides whether a connection may enter the pod. The trust domain is checked first,
    /// regardless of policy; then the mode; then the policies.
    ///
    /// If a gateway has authorized the connection, its decision counts for what this hop cannot
    /// see. Otherwise this is the last hop, so an undecided policy refuses.
    ///
    /// # Errors
    /// Returns the reason for the refusal, with the policy if one caused it.
    pub fn decide(&self, q: &AuthorizationQuery) -> Result<(), AuthorizationRefusal> {
        // A process of the node could enter the pod's namespace as well, so refusing it would
        // protect nothing.
        if q.source == ConnectionSource::Node {
            return Ok(());
        }
        let own = self.own_trust_domain()?;
        let foreign = q
            .named()
            .map(|n| &n.identity.trust_domain)
            .filter(|of| *of != own);
        if let Some(of) = foreign.filter(|of| !self.inputs.federated.contains(*of)) {
            return Err(AuthorizationRefusal::new(
                NodeRefusal::Denied,
                None,
                format_args!("trust domain {of} is neither {own} nor federated with it"),
            ));
        }
        if q.source == ConnectionSource::Plain
            && self.mode(q.destination.port()) == PeerMode::Strict
        {
            return Err(AuthorizationRefusal::new(
                NodeRefusal::StrictPlaintext,
                None,
                "PeerAuthentication is STRICT",
            ));
        }
        // A gateway of the own tenant has evaluated all policies, and has called the external
        // authorizers.
        let is_evaluated = matches!(
            q.source,
            ConnectionSource::Forwarded(_) | ConnectionSource::Gateway
        );
        let facts = QueryAttributes {
            query: q,
            foreign: foreign.is_some(),
        };
        let progress = if is_evaluated {
            ExtAuthzProgress::ALL
        } else {
            ExtAuthzProgress::default()
        };
        let decision = self.set(q.service.as_ref()).decide_after(&facts, progress);
        admit(decision, is_evaluated)
    }

    /// Passes matching audit policies and dry runs to `each`, except for connections that a gateway
    /// has authorized: it has reported them.
    pub fn observe(&self, q: &AuthorizationQuery, each: &mut dyn FnMut(&PolicyKey, ShadowKind)) {
        let set = self.set(q.service.as_ref());
        if set.observes()
            && matches!(
                q.source,
                ConnectionSource::Proven(_) | ConnectionSource::Plain
            )
        {
            let own = self.inputs.trust_domain.as_ref();
            let foreign = q
                .named()
                .is_some_and(|n| Some(&n.identity.trust_domain) != own);
            set.observe(&QueryAttributes { query: q, foreign }, &mut |hit| {
                each(hit.policy, hit.kind)
            });
        }
    }
}

/// Admits a connection by the decision of its policies, or names the reason for the refusal.
/// `is_evaluated` says that a gateway of the own tenant has evaluated the policies, so that what
/// this hop cannot see does not refuse.
fn admit(
    decision: AuthorizationDecision<'_>,
    is_evaluated: bool,
) -> Result<(), AuthorizationRefusal> {
    match decision {
        AuthorizationDecision::Allow => Ok(()),
        AuthorizationDecision::Undecided { .. } if is_evaluated => Ok(()),
        AuthorizationDecision::Undecided { policy, attribute } => {
            let why = format_args!(
                "{policy} depends on {}, which only a gateway can observe",
                name(attribute)
            );
            Err(AuthorizationRefusal::new(
                NodeRefusal::Undecided,
                Some(policy),
                why,
            ))
        }
        // A gateway has called the authorizers, so only this hop's own decision is left here.
        AuthorizationDecision::CallAuthorizer {
            policy, authorizer, ..
        } => {
            let why = format_args!("{policy} calls {authorizer}, which only a gateway can do");
            Err(AuthorizationRefusal::new(
                NodeRefusal::Undecided,
                Some(policy),
                why,
            ))
        }
        AuthorizationDecision::Deny {
            policy: Some(policy),
            rule: Some(rule),
        } => Err(AuthorizationRefusal::new(
            NodeRefusal::Denied,
            Some(policy),
            format_args!("matched policy {policy}, rule {rule}"),
        )),
        AuthorizationDecision::Deny {
            policy: Some(policy),
            rule: None,
        } => Err(AuthorizationRefusal::new(
            NodeRefusal::Denied,
            Some(policy),
            format_args!("policy {policy} is broken"),
        )),
        AuthorizationDecision::Deny { policy: None, .. } => Err(AuthorizationRefusal::new(
            NodeRefusal::Denied,
            None,
            "no ALLOW policy matches",
        )),
    }
}

#[cfg(test)]
mod tests;

//! Who may connect to a pod: the policies of one pod made ready, and the answer to one question. Without IO; `canal-guard` judges, this
//! says what a node knows, and which hop has the last word.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

use canal_guard::{Asked, Facts, HitKind, Place, PolicySet, Sight, Value, Verdict, applies, name, peer_mode};
use canal_model::authorization::{Attribute, Authorization, PeerAuthentication, PeerMode, PolicyKey, PolicyTarget};
use canal_model::identity::{Identity, gateway_identity};
use canal_model::ids::{ServiceKey, TrustDomain};
use canal_model::program::Labels;

use crate::pod::Pod;
use crate::refusal::Refusal;
use crate::view::{Rules, TenantView};

/// An identity in the forms that policies compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    pub identity: Identity,
    principal: String,
    account: String,
}

impl Named {
    pub fn new(identity: Identity) -> Self {
        let principal = identity.to_string().trim_start_matches("spiffe://").to_string();
        let account = format!("{}/{}", identity.namespace, identity.service_account);
        Self { identity, principal, account }
    }
}

/// Who stands behind a connection, and who vouches for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// It proved its identity here.
    Proven(Rc<Named>),
    /// A gateway of the own tenant, which has judged already, opened this tunnel for one connection of this source.
    Told(Rc<Named>),
    /// A gateway of the own tenant, which has judged already, for many sources.
    Gateway,
    /// Nobody: it came without mTLS.
    Plain,
    /// A process of the node itself, without mTLS: a kubelet's probes. It could enter the pod's namespace as well.
    Node,
}

/// What is asked of a pod's policies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    pub source: Source,
    /// The source's; `None`: this hop cannot tell.
    pub address: Option<IpAddr>,
    /// The application's address.
    pub destination: SocketAddr,
    /// If it was asked for by name.
    pub service: Option<ServiceKey>,
}

impl Question {
    fn named(&self) -> Option<&Named> {
        match &self.source {
            Source::Proven(named) | Source::Told(named) => Some(named),
            Source::Gateway | Source::Plain | Source::Node => None,
        }
    }
}

/// The question as policies look at it.
struct Known<'a> {
    question: &'a Question,
    foreign: bool,
}

impl Facts for Known<'_> {
    fn look(&self, attribute: &Attribute, each: &mut dyn FnMut(Value<'_>) -> bool) -> Sight {
        let q = self.question;
        let mut text = |of: fn(&Named) -> &str| match (q.named(), &q.source) {
            (Some(named), _) => {
                each(Value::Text(of(named).as_bytes()));
                Sight::Known
            }
            (None, Source::Plain) => Sight::Known,
            (None, _) => Sight::Unknown,
        };
        match attribute {
            Attribute::SourcePrincipal => text(|n| &n.principal),
            Attribute::SourceNamespace => text(|n| n.identity.namespace.as_str()),
            Attribute::SourceServiceAccount => text(|n| &n.account),
            Attribute::SourceAddress => match q.address {
                Some(address) => {
                    each(Value::Address(address.to_canonical()));
                    Sight::Known
                }
                None => Sight::Unknown,
            },
            Attribute::DestinationPort => {
                each(Value::Port(q.destination.port()));
                Sight::Known
            }
            Attribute::DestinationAddress => {
                each(Value::Address(q.destination.ip().to_canonical()));
                Sight::Known
            }
            // HTTP and what only a gateway knows.
            _ => Sight::Unknown,
        }
    }

    fn is_foreign(&self) -> bool {
        self.foreign
    }
}

/// Why not, and in what words for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub refusal: Refusal,
    /// The policy that said so, if one did.
    pub policy: Option<PolicyKey>,
    pub why: String,
}

impl Refused {
    fn new(refusal: Refusal, policy: Option<&PolicyKey>, why: impl fmt::Display) -> Self {
        Self { refusal, policy: policy.cloned(), why: why.to_string() }
    }
}

/// What a pod's policies are made of. Equal inputs make equal policies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Inputs {
    /// `None`: the tenant was never heard of.
    trust_domain: Option<TrustDomain>,
    /// A security resource of the tenant is refused or missing: who may come in is not known.
    closed: bool,
    /// Trust domains of other tenants whose members may ask.
    federated: BTreeSet<TrustDomain>,
    /// Of the workload, sorted by key.
    workload: Vec<Arc<Authorization>>,
    /// Of services that the pod serves.
    services: BTreeMap<ServiceKey, Vec<Arc<Authorization>>>,
    /// What is accepted at most ports, and at those that differ.
    mode: PeerMode,
    modes: BTreeMap<u16, PeerMode>,
}

/// The policies of one pod. The default is that of a pod whose tenant is not known: nobody may connect.
#[derive(Debug, Default)]
pub struct PodPolicy {
    inputs: Inputs,
    /// Of the tenant's gateways.
    gateway: Option<Identity>,
    workload: PolicySet,
    /// The workload's and the service's together.
    services: HashMap<ServiceKey, PolicySet>,
}

/// What a pod's policies were looked for in. While it is the same, they are.
#[derive(Debug)]
pub struct Basis {
    rules: Arc<Rules>,
    labels: Labels,
    services: BTreeSet<ServiceKey>,
}

impl Basis {
    pub fn new(tenant: &TenantView, pod: &Pod) -> Self {
        let services = tenant.served(&pod.uid).into_iter().cloned().collect();
        Self { rules: tenant.rules.clone(), labels: pod.labels.clone(), services }
    }

    /// Compares in no time: equal rules in two places count as others.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.rules, &other.rules) && self.labels == other.labels && self.services == other.services
    }
}

impl Inputs {
    fn new(tenant: &TenantView, pod: &Pod) -> Self {
        let (rules, served) = (&tenant.rules, tenant.served(&pod.uid));
        let place = Place::workload(&pod.namespace, &pod.labels);
        let workload = rules.authorizations.iter().filter(|a| applies(&a.target, &place)).cloned().collect();
        let mut services = BTreeMap::<ServiceKey, Vec<_>>::new();
        for one in &rules.authorizations {
            if let PolicyTarget::Service(key) = &one.target
                && served.contains(key)
            {
                services.entry(key.clone()).or_default().push(one.clone());
            }
        }
        let mine = |p: &&Arc<PeerAuthentication>| applies(&p.target, &place);
        let mode = |port| peer_mode(rules.peer_authentications.iter().map(AsRef::as_ref), &place, port);
        // No workload has port 0, so that no object can say anything of it alone.
        let usual = mode(0);
        let ports: BTreeSet<u16> = rules.peer_authentications.iter().filter(mine).flat_map(|p| p.ports.keys().copied()).collect();
        Self {
            trust_domain: Some(rules.trust_domain.clone()),
            closed: rules.closed,
            federated: rules.federated.clone(),
            workload,
            services,
            mode: usual,
            modes: ports.into_iter().map(|port| (port, mode(port))).filter(|(_, mode)| *mode != usual).collect(),
        }
    }
}

impl PodPolicy {
    /// The policies of `pod` as its tenant's view has them; `None`: `held` is still right. They outlive their tenant, whose going opens
    /// nothing.
    pub fn renew(held: &PodPolicy, tenant: Option<&TenantView>, pod: &Pod) -> Option<Self> {
        let inputs = Inputs::new(tenant?, pod);
        (inputs != held.inputs).then(|| Self::of(inputs))
    }

    fn of(inputs: Inputs) -> Self {
        let with = |of: &Vec<Arc<Authorization>>| PolicySet::new(&[inputs.workload.as_slice(), of].concat());
        Self {
            workload: PolicySet::new(&inputs.workload),
            services: inputs.services.iter().map(|(key, of)| (key.clone(), with(of))).collect(),
            gateway: inputs.trust_domain.clone().map(gateway_identity),
            inputs,
        }
    }

    /// Who stands behind a tunnel whose peer proved `peer`. `told` is what it says of the source: only the word of the own tenant's gateway
    /// counts. `None`: that word is no identity.
    pub fn source(&self, peer: &Identity, told: Option<&str>) -> Option<Source> {
        if self.gateway.as_ref() != Some(peer) {
            return Some(Source::Proven(Rc::new(Named::new(peer.clone()))));
        }
        match told {
            None => Some(Source::Gateway),
            Some(told) => told.parse().ok().map(|identity| Source::Told(Rc::new(Named::new(identity)))),
        }
    }

    /// Whether connections without mTLS must be looked at: not all of them may come in, or somebody watches them.
    pub fn guards_plaintext(&self) -> bool {
        let strict = |mode: &PeerMode| *mode == PeerMode::Strict;
        self.inputs.trust_domain.is_none()
            || self.inputs.closed
            || strict(&self.inputs.mode)
            || self.inputs.modes.values().any(strict)
            || !self.workload.is_empty()
    }

    /// Whether anybody said anything of this pod.
    pub fn is_empty(&self) -> bool {
        self.workload.is_empty() && self.services.values().all(PolicySet::is_empty)
    }

    /// What is accepted at a port.
    pub fn mode(&self, port: u16) -> PeerMode {
        self.inputs.modes.get(&port).copied().unwrap_or(self.inputs.mode)
    }

    /// Names of the policies, for operators.
    pub fn names(&self) -> impl Iterator<Item = &PolicyKey> {
        self.inputs.workload.iter().chain(self.inputs.services.values().flatten()).map(|a| &a.key)
    }

    fn set(&self, service: Option<&ServiceKey>) -> &PolicySet {
        service.and_then(|key| self.services.get(key)).unwrap_or(&self.workload)
    }

    /// Decides. The trust domain comes first, whatever policies say; then the mode; then policies. For what a gateway has judged already,
    /// what cannot be seen here is the gateway's word; for everything else this is the last hop, so that it is a no.
    pub fn decide(&self, q: &Question) -> Result<(), Refused> {
        if q.source == Source::Node {
            return Ok(());
        }
        let Some(own) = &self.inputs.trust_domain else {
            return Err(Refused::new(Refusal::TenantUnknown, None, "the pod's tenant was never heard of"));
        };
        if self.inputs.closed {
            return Err(Refused::new(Refusal::TenantClosed, None, "a security resource of the pod's tenant is refused or missing"));
        }
        let foreign = q.named().map(|n| &n.identity.trust_domain).filter(|of| *of != own);
        if let Some(of) = foreign.filter(|of| !self.inputs.federated.contains(*of)) {
            return Err(Refused::new(Refusal::Denied, None, format_args!("trust domain {of} is neither {own} nor federated with it")));
        }
        if q.source == Source::Plain && self.mode(q.destination.port()) == PeerMode::Strict {
            return Err(Refused::new(Refusal::StrictPlaintext, None, "PeerAuthentication says STRICT"));
        }
        let judged = matches!(q.source, Source::Told(_) | Source::Gateway);
        let facts = Known { question: q, foreign: foreign.is_some() };
        let asked = if judged { Asked::ALL } else { Asked::default() };
        match self.set(q.service.as_ref()).decide_after(&facts, asked) {
            Verdict::Allow => Ok(()),
            Verdict::Undecided { .. } if judged => Ok(()),
            Verdict::Undecided { policy, attribute } => {
                let why = format_args!("{policy} depends on {}, which only a gateway sees", name(attribute));
                Err(Refused::new(Refusal::Undecided, Some(policy), why))
            }
            Verdict::Ask { policy, authorizer, .. } => {
                let why = format_args!("{policy} asks {authorizer}, which only a gateway does");
                Err(Refused::new(Refusal::Undecided, Some(policy), why))
            }
            Verdict::Deny { policy: Some(policy), rule: Some(rule) } => {
                Err(Refused::new(Refusal::Denied, Some(policy), format_args!("matched policy {policy}, rule {rule}")))
            }
            Verdict::Deny { policy: Some(policy), rule: None } => {
                Err(Refused::new(Refusal::Denied, Some(policy), format_args!("policy {policy} is broken")))
            }
            Verdict::Deny { policy: None, .. } => Err(Refused::new(Refusal::Denied, None, "no ALLOW policy matches")),
        }
    }

    /// Gives audits and dry runs that match to `each`. What a gateway has judged it has watched as well.
    pub fn observe(&self, q: &Question, each: &mut dyn FnMut(&PolicyKey, HitKind)) {
        let set = self.set(q.service.as_ref());
        if set.observes() && matches!(q.source, Source::Proven(_) | Source::Plain) {
            let own = self.inputs.trust_domain.as_ref();
            let foreign = q.named().is_some_and(|n| Some(&n.identity.trust_domain) != own);
            set.observe(&Known { question: q, foreign }, &mut |hit| each(hit.policy, hit.kind));
        }
    }
}

#[cfg(test)]
mod tests;

//! A tenant's policies, and what they come to for one destination: a [`Guard`]. Which policies are whose is `canal_guard`'s to say; nothing is
//! judged here.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use canal_guard::{Place, PolicySet, applies};
use canal_model::authorization::{Authentication, Authorization, Authorizer, PolicyKey, PolicyTarget};
use canal_model::ids::{Namespace, ServiceKey};

use crate::token::{Issuers, TokenNames, Tokens};

/// What guards one destination; there is none where nobody said anything.
#[derive(Debug)]
pub(crate) struct Guard {
    /// Unique in the process.
    pub(crate) id: u64,
    pub(crate) policies: PolicySet,
    /// `None`: tokens mean nothing to this destination.
    pub(crate) tokens: Option<Tokens>,
    /// What it was made of: held, so that their addresses name them for as long as the guard lives.
    _made_of: (Vec<Arc<Authorization>>, Vec<Arc<Issuers>>),
}

impl Guard {
    fn new(policies: Vec<Arc<Authorization>>, issuers: Vec<Arc<Issuers>>) -> Self {
        let tokens = (!issuers.is_empty()).then(|| Tokens::new(issuers.clone()));
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = LAST.fetch_add(1, Relaxed) + 1;
        Self { id, policies: PolicySet::new(&policies), tokens, _made_of: (policies, issuers) }
    }
}

/// Objects that have targets, by their names.
#[derive(Debug)]
struct Targeted<T> {
    /// For more than one namespace.
    wide: BTreeMap<String, (PolicyTarget, Arc<T>)>,
    namespaces: HashMap<Namespace, BTreeMap<String, (PolicyTarget, Arc<T>)>>,
    services: HashMap<ServiceKey, BTreeMap<String, (PolicyTarget, Arc<T>)>>,
    targets: HashMap<String, PolicyTarget>,
}

impl<T> Default for Targeted<T> {
    fn default() -> Self {
        Self { wide: BTreeMap::default(), namespaces: HashMap::default(), services: HashMap::default(), targets: HashMap::default() }
    }
}

impl<T> Clone for Targeted<T> {
    fn clone(&self) -> Self {
        let Self { wide, namespaces, services, targets } = self;
        Self { wide: wide.clone(), namespaces: namespaces.clone(), services: services.clone(), targets: targets.clone() }
    }
}

impl<T> Targeted<T> {
    fn home(&mut self, target: &PolicyTarget) -> &mut BTreeMap<String, (PolicyTarget, Arc<T>)> {
        match target {
            PolicyTarget::Tenant | PolicyTarget::Workloads { namespace: None, .. } => &mut self.wide,
            PolicyTarget::Namespace(namespace) | PolicyTarget::Workloads { namespace: Some(namespace), .. } => {
                self.namespaces.entry(namespace.clone()).or_default()
            }
            PolicyTarget::Service(service) => self.services.entry(service.clone()).or_default(),
        }
    }

    fn insert(&mut self, name: String, target: PolicyTarget, object: T) -> Option<PolicyTarget> {
        let before = self.remove(&name);
        self.home(&target).insert(name.clone(), (target.clone(), Arc::new(object)));
        self.targets.insert(name, target);
        before
    }

    fn remove(&mut self, name: &str) -> Option<PolicyTarget> {
        let target = self.targets.remove(name)?;
        self.home(&target).remove(name);
        self.namespaces.retain(|_, of| !of.is_empty());
        self.services.retain(|_, of| !of.is_empty());
        Some(target)
    }

    fn all(&self) -> impl Iterator<Item = &Arc<T>> {
        let homes = self.namespaces.values().chain(self.services.values()).chain([&self.wide]);
        homes.flat_map(BTreeMap::values).map(|(_, object)| object)
    }

    fn of(&self, place: &Place<'_>) -> Vec<Arc<T>> {
        let namespaced = place.workload.and_then(|(namespace, _)| self.namespaces.get(namespace));
        let serviced = place.service.and_then(|service| self.services.get(service));
        let all = self.wide.values().chain(namespaced.into_iter().flat_map(BTreeMap::values));
        let all = all.chain(serviced.into_iter().flat_map(BTreeMap::values));
        all.filter(|(target, _)| applies(target, place)).map(|(_, object)| object.clone()).collect()
    }
}

/// Guards that exist, by the addresses of what they are made of.
type Made = Mutex<HashMap<Vec<usize>, Weak<Guard>>>;

/// See the module.
#[derive(Clone, Default)]
pub(crate) struct Policies {
    authorizations: Targeted<Authorization>,
    authentications: Targeted<Issuers>,
    authorizers: HashMap<PolicyKey, Arc<Authorizer>>,
    made: Arc<Made>,
    /// Collected when a log first asks a published copy; the builder's own copy never does.
    token_names: OnceLock<Arc<TokenNames>>,
}

impl fmt::Debug for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = (self.authorizations.targets.len(), self.authentications.targets.len(), self.authorizers.len());
        write!(f, "Policies{counts:?}")
    }
}

impl Policies {
    /// Takes a policy; gives the target that it had before.
    pub(super) fn authorize(&mut self, policy: &Authorization) -> Option<PolicyTarget> {
        self.authorizations.insert(policy.key.to_string(), policy.target.clone(), policy.clone())
    }

    pub(super) fn authenticate(&mut self, one: &Authentication) -> Option<PolicyTarget> {
        self.authentications.insert(one.key.to_string(), one.target.clone(), Issuers::new(one))
    }

    pub(super) fn forget_authorization(&mut self, name: &str) -> Option<PolicyTarget> {
        self.authorizations.remove(name)
    }

    pub(super) fn forget_authentication(&mut self, name: &str) -> Option<PolicyTarget> {
        self.authentications.remove(name)
    }

    pub(super) fn name_authorizer(&mut self, authorizer: &Authorizer) {
        self.authorizers.insert(authorizer.key.clone(), Arc::new(authorizer.clone()));
    }

    pub(super) fn forget_authorizer(&mut self, name: &str) {
        self.authorizers.retain(|key, _| key.to_string() != name);
    }

    pub(crate) fn authorizer(&self, key: &PolicyKey) -> Option<&Arc<Authorizer>> {
        self.authorizers.get(key)
    }

    /// Nobody said anything about anyone.
    pub(crate) fn is_empty(&self) -> bool {
        self.authorizations.targets.is_empty() && self.authentications.targets.is_empty()
    }

    /// Where tokens may be, of all RequestAuthentications.
    pub(crate) fn token_names(&self) -> &TokenNames {
        self.token_names.get_or_init(|| {
            let mut names = TokenNames::default();
            self.authentications.all().for_each(|issuers| issuers.name_places(&mut names));
            Arc::new(names)
        })
    }

    /// Names of all that was said: authorizations, authentications, authorizers.
    pub(super) fn names(&self) -> [Vec<String>; 3] {
        let authorizers = self.authorizers.keys().map(ToString::to_string).collect();
        [self.authorizations.targets.keys().cloned().collect(), self.authentications.targets.keys().cloned().collect(), authorizers]
    }

    /// The names of all policies, sorted, for `/config_dump`.
    pub(crate) fn list(&self) -> Vec<String> {
        const KINDS: [&str; 3] = ["AuthorizationPolicy", "RequestAuthentication", "ExternalAuthorizer"];
        let named = KINDS.iter().zip(self.names()).flat_map(|(kind, names)| names.into_iter().map(move |name| format!("{kind} {name}")));
        let mut all: Vec<String> = named.collect();
        all.sort();
        all
    }

    /// What guards a destination: the same guard for all destinations with the same policies.
    pub(crate) fn guard(&self, place: &Place<'_>) -> Option<Arc<Guard>> {
        if self.is_empty() {
            return None;
        }
        let (policies, issuers) = (self.authorizations.of(place), self.authentications.of(place));
        if policies.is_empty() && issuers.is_empty() {
            return None;
        }
        let addresses = policies.iter().map(|p| Arc::as_ptr(p) as usize).chain(issuers.iter().map(|i| Arc::as_ptr(i) as usize));
        let addresses: Vec<usize> = addresses.collect();
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = made.get(&addresses).and_then(Weak::upgrade) {
            return Some(known);
        }
        made.retain(|_, guard| guard.strong_count() > 0);
        let guard = Arc::new(Guard::new(policies, issuers));
        made.insert(addresses, Arc::downgrade(&guard));
        Some(guard)
    }
}

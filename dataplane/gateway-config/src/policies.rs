//! A tenant's policies, and the combined [`DestinationPolicy`] of each destination.
//!
//! `canal_authorization` decides which policies apply to a destination. Nothing is authorized here.
//! Start with [`TenantPolicies::guard`].

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use canal_authorization::{PolicyDestination, PolicySet, applies, applies_to_answers};
use canal_model::authorization::{
    Authentication, Authorization, Authorizer, PolicyKey, PolicyTarget,
};
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::ingress::gateway_labels;
use canal_model::program::Labels;

use crate::jwt::{JwtIssuers, JwtRequirements, TokenNames};

/// Policies of one destination. A destination without policies has none.
#[derive(Debug)]
pub struct DestinationPolicy {
    /// Unique ID of this value in the process.
    pub id: u64,
    pub policies: PolicySet,
    /// `None` if tokens have no meaning for this destination.
    pub tokens: Option<JwtRequirements>,
    /// Inputs of this value. The addresses of these `Arc`s are the key by which a later build finds
    /// this value, so they must not be freed and used for others before.
    _made_of: (Vec<Arc<Authorization>>, Vec<Arc<JwtIssuers>>),
}

impl DestinationPolicy {
    fn new(policies: Vec<Arc<Authorization>>, issuers: Vec<Arc<JwtIssuers>>) -> Self {
        let tokens = (!issuers.is_empty()).then(|| JwtRequirements::new(issuers.clone()));
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = LAST.fetch_add(1, Relaxed) + 1;
        Self {
            id,
            policies: PolicySet::new(&policies),
            tokens,
            _made_of: (policies, issuers),
        }
    }
}

/// Objects with targets, by name.
#[derive(Debug)]
struct TargetedPolicies<T> {
    /// Objects whose target is not limited to one namespace or service.
    wide: BTreeMap<String, (PolicyTarget, Arc<T>)>,
    namespaces: HashMap<Namespace, BTreeMap<String, (PolicyTarget, Arc<T>)>>,
    services: HashMap<ServiceKey, BTreeMap<String, (PolicyTarget, Arc<T>)>>,
    // A hash map would keep its size when a tenant removes its policies, and each copy would have
    // it.
    targets: BTreeMap<String, PolicyTarget>,
}

impl<T> Default for TargetedPolicies<T> {
    fn default() -> Self {
        Self {
            wide: BTreeMap::default(),
            namespaces: HashMap::default(),
            services: HashMap::default(),
            targets: BTreeMap::default(),
        }
    }
}

impl<T> Clone for TargetedPolicies<T> {
    fn clone(&self) -> Self {
        let Self {
            wide,
            namespaces,
            services,
            targets,
        } = self;
        Self {
            wide: wide.clone(),
            namespaces: namespaces.clone(),
            services: services.clone(),
            targets: targets.clone(),
        }
    }
}

impl<T> TargetedPolicies<T> {
    fn home(&mut self, target: &PolicyTarget) -> &mut BTreeMap<String, (PolicyTarget, Arc<T>)> {
        match target {
            PolicyTarget::Tenant
            | PolicyTarget::Workloads {
                namespace: None, ..
            } => &mut self.wide,
            PolicyTarget::Namespace(namespace)
            | PolicyTarget::Workloads {
                namespace: Some(namespace),
                ..
            } => self.namespaces.entry(namespace.clone()).or_default(),
            PolicyTarget::Service(service) => self.services.entry(service.clone()).or_default(),
        }
    }

    fn insert(&mut self, name: String, target: PolicyTarget, object: T) -> Option<PolicyTarget> {
        let before = self.remove(&name);
        self.home(&target)
            .insert(name.clone(), (target.clone(), Arc::new(object)));
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
        let homes = self
            .namespaces
            .values()
            .chain(self.services.values())
            .chain([&self.wide]);
        homes.flat_map(BTreeMap::values).map(|(_, object)| object)
    }

    fn of(&self, place: &PolicyDestination<'_>) -> Vec<Arc<T>> {
        let namespace = place.workload.map(|(namespace, _)| namespace);
        self.select(namespace, place.service, |target| applies(target, place))
    }

    fn of_answers(&self, service: &ServiceKey, endpoints: &[&Labels]) -> Vec<Arc<T>> {
        self.select(Some(&service.namespace), Some(service), |target| {
            applies_to_answers(target, service, endpoints)
        })
    }

    fn select(
        &self,
        namespace: Option<&Namespace>,
        service: Option<&ServiceKey>,
        is_for: impl Fn(&PolicyTarget) -> bool,
    ) -> Vec<Arc<T>> {
        let namespaced = namespace.and_then(|namespace| self.namespaces.get(namespace));
        let serviced = service.and_then(|service| self.services.get(service));
        let all = self
            .wide
            .values()
            .chain(namespaced.into_iter().flat_map(BTreeMap::values));
        let all = all.chain(serviced.into_iter().flat_map(BTreeMap::values));
        all.filter(|(target, _)| is_for(target))
            .map(|(_, object)| object.clone())
            .collect()
    }
}

/// Existing policies by the addresses of their inputs.
type PolicyCache = Mutex<HashMap<Vec<usize>, Weak<DestinationPolicy>>>;

/// Policies of one tenant, with a cache of the combined policies of destinations.
#[derive(Clone, Default)]
pub struct TenantPolicies {
    authorizations: TargetedPolicies<Authorization>,
    authentications: TargetedPolicies<JwtIssuers>,
    authorizers: HashMap<PolicyKey, Arc<Authorizer>>,
    cache: Arc<PolicyCache>,
    /// Locations of tokens. Collected when a log first reads a published copy; the builder's own
    /// copy never collects them.
    token_names: OnceLock<Arc<TokenNames>>,
}

impl fmt::Debug for TenantPolicies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = (
            self.authorizations.targets.len(),
            self.authentications.targets.len(),
            self.authorizers.len(),
        );
        write!(f, "Policies{counts:?}")
    }
}

impl TenantPolicies {
    /// Stores a policy and returns the target that it had before.
    pub(super) fn authorize(&mut self, policy: &Authorization) -> Option<PolicyTarget> {
        self.authorizations.insert(
            policy.key.to_string(),
            policy.target.clone(),
            policy.clone(),
        )
    }

    pub(super) fn authenticate(&mut self, one: &Authentication) -> Option<PolicyTarget> {
        self.authentications.insert(
            one.key.to_string(),
            one.target.clone(),
            JwtIssuers::new(one),
        )
    }

    pub(super) fn forget_authorization(&mut self, name: &str) -> Option<PolicyTarget> {
        self.authorizations.remove(name)
    }

    pub(super) fn forget_authentication(&mut self, name: &str) -> Option<PolicyTarget> {
        self.authentications.remove(name)
    }

    pub(super) fn name_authorizer(&mut self, authorizer: &Authorizer) {
        self.authorizers
            .insert(authorizer.key.clone(), Arc::new(authorizer.clone()));
    }

    pub(super) fn forget_authorizer(&mut self, name: &str) {
        self.authorizers.retain(|key, _| key.to_string() != name);
    }

    pub fn authorizer(&self, key: &PolicyKey) -> Option<&Arc<Authorizer>> {
        self.authorizers.get(key)
    }

    /// True if the tenant has no policies and no RequestAuthentications.
    pub fn is_empty(&self) -> bool {
        self.authorizations.targets.is_empty() && self.authentications.targets.is_empty()
    }

    /// Returns the locations of tokens in all RequestAuthentications.
    pub fn token_names(&self) -> &TokenNames {
        self.token_names.get_or_init(|| {
            let mut names = TokenNames::default();
            self.authentications
                .all()
                .for_each(|issuers| issuers.name_places(&mut names));
            Arc::new(names)
        })
    }

    /// Returns the names of all objects: authorizations, authentications, authorizers.
    pub(super) fn names(&self) -> [Vec<String>; 3] {
        let authorizers = self.authorizers.keys().map(ToString::to_string).collect();
        [
            self.authorizations.targets.keys().cloned().collect(),
            self.authentications.targets.keys().cloned().collect(),
            authorizers,
        ]
    }

    /// Returns the names of all policies, sorted, for `/config_dump`.
    pub fn list(&self) -> Vec<String> {
        const KINDS: [&str; 3] = [
            "AuthorizationPolicy",
            "RequestAuthentication",
            "ExternalAuthorizer",
        ];
        let named = KINDS
            .iter()
            .zip(self.names())
            .flat_map(|(kind, names)| names.into_iter().map(move |name| format!("{kind} {name}")));
        let mut all: Vec<String> = named.collect();
        all.sort();
        all
    }

    /// Returns the policies of a destination. All destinations with the same policies share one
    /// value.
    pub fn guard(&self, place: &PolicyDestination<'_>) -> Option<Arc<DestinationPolicy>> {
        if self.is_empty() {
            return None;
        }
        let (policies, issuers) = (
            self.authorizations.of(place),
            self.authentications.of(place),
        );
        if policies.is_empty() && issuers.is_empty() {
            return None;
        }
        Some(self.combined(policies, issuers))
    }

    /// Returns the policies of a service itself. A Gateway is in its namespace, as a workload is: it
    /// also has the policies of its tenant and its namespace, and those that select it by its label.
    pub fn guard_of_service(&self, service: &ServiceKey) -> Option<Arc<DestinationPolicy>> {
        match gateway_labels(service) {
            Some(labels) => {
                let workload = PolicyDestination::workload(&service.namespace, &labels);
                self.guard(&workload.serving(Some(service)))
            }
            None => self.guard(&PolicyDestination::service(service)),
        }
    }

    /// Returns the policies for the requests to a service that the gateway answers itself.
    /// `endpoints` are the labels of its endpoints (see [`applies_to_answers`]).
    pub fn guard_of_answers(
        &self,
        service: &ServiceKey,
        endpoints: &[&Labels],
    ) -> Option<Arc<DestinationPolicy>> {
        // A Gateway has no endpoints: its own policies decide, and not those of all workloads of its
        // namespace.
        if gateway_labels(service).is_some() {
            return self.guard_of_service(service);
        }
        let (policies, issuers) = (
            self.authorizations.of_answers(service, endpoints),
            self.authentications.of_answers(service, endpoints),
        );
        if policies.is_empty() && issuers.is_empty() {
            return None;
        }
        Some(self.combined(policies, issuers))
    }

    fn combined(
        &self,
        policies: Vec<Arc<Authorization>>,
        issuers: Vec<Arc<JwtIssuers>>,
    ) -> Arc<DestinationPolicy> {
        let addresses = policies
            .iter()
            .map(|p| Arc::as_ptr(p) as usize)
            .chain(issuers.iter().map(|i| Arc::as_ptr(i) as usize));
        let addresses: Vec<usize> = addresses.collect();
        let mut made = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = made.get(&addresses).and_then(Weak::upgrade) {
            return known;
        }
        made.retain(|_, guard| guard.strong_count() > 0);
        let guard = Arc::new(DestinationPolicy::new(policies, issuers));
        made.insert(addresses, Arc::downgrade(&guard));
        guard
    }
}

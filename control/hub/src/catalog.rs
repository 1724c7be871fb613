//! What the controller currently says, as immutable values: one [`Catalog`] at a time, made by the one writer, read by every stream.
//! Each change leaves a [`Delta`], so that a subscriber that keeps up never looks at what did not change. No IO.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use canal_compiler::claims::Claims;
use canal_compiler::scope::{self, Whereabouts};
use canal_model::diagnostic::Diagnostic;
use canal_model::identity::Identity;
use canal_model::ids::{AzName, Generation, Namespace, NodeName, ServiceAccount, ServiceKey, TenantName, TrustDomain};
use canal_model::policy::Document;
use canal_model::principal::Principal;
use canal_model::program::{BucketTable, GatewayAddress, Kind, Resource};
use canal_model::trust::Requester;
use canal_wire::southbound;
use sha2::{Digest, Sha256};

/// Deltas a tenant keeps. A subscriber further behind is compared with the whole tenant, which costs time and changes nothing else.
pub(crate) const LOG_DELTAS_MAX: usize = 1024;
/// Touched resources in all deltas a tenant keeps.
pub(crate) const LOG_TOUCHES_MAX: usize = 100_000;

/// A resource's version: the first 128 bits of the SHA-256 of its bytes. Equal content has equal versions, also across restarts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Version([u8; 16]);

impl Version {
    /// What a subscriber holds that this controller never sent: unlike every real version.
    pub(crate) const FOREIGN: Version = Version([0; 16]);

    fn of(bytes: &[u8]) -> Self {
        let digest = Sha256::digest(bytes);
        let mut v = [0; 16];
        v.copy_from_slice(&digest[..16]);
        Self(v)
    }

    /// Reads the wire form; anything else is [`Version::FOREIGN`].
    pub(crate) fn read(s: &str) -> Self {
        let mut v = [0; 16];
        if s.len() != 32 || !s.is_ascii() {
            return Self::FOREIGN;
        }
        for (i, byte) in v.iter_mut().enumerate() {
            match u8::from_str_radix(&s[2 * i..2 * i + 2], 16) {
                Ok(b) => *byte = b,
                Err(_) => return Self::FOREIGN,
            }
        }
        Self(v)
    }
}
impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}
impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Names one resource: its kind and its name on the wire.
pub(crate) type Key = (Kind, Arc<str>);

/// One resource, encoded once for all who get it.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) resource: Resource,
    pub(crate) name: Arc<str>,
    pub(crate) version: Version,
    pub(crate) body: Vec<u8>,
    /// The generation that made it as it is.
    pub(crate) changed: Generation,
}

impl Entry {
    pub(crate) fn new(resource: Resource, changed: Generation) -> Self {
        let body = southbound::encode(&resource);
        Self { name: resource.name().into(), version: Version::of(&body), body, resource, changed }
    }

    pub(crate) fn key(&self) -> Key {
        (self.resource.kind(), self.name.clone())
    }
}

/// What one change did to one resource.
#[derive(Debug)]
pub(crate) struct Touch {
    pub(crate) key: Key,
    pub(crate) before: Option<Arc<Entry>>,
    pub(crate) after: Option<Arc<Entry>>,
}

/// What one change did to one tenant.
#[derive(Debug)]
pub(crate) struct Delta {
    pub(crate) generation: Generation,
    pub(crate) touches: Vec<Touch>,
}

/// Where an object came from, and what the compiler says of it.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    pub(crate) document: Arc<Document>,
    /// `None`: applied by the API.
    pub(crate) file: Option<Arc<str>>,
}

/// What a tenant's sources came to, beside its resources.
#[derive(Debug, Clone)]
pub(crate) struct Compiled {
    pub(crate) resources: Vec<Resource>,
    pub(crate) claims: Claims,
    /// The AZs in which services want to live.
    pub(crate) homes: BTreeMap<ServiceKey, AzName>,
    /// With whom the tenant says that it federates.
    pub(crate) federations: BTreeSet<(TenantName, TrustDomain)>,
    /// The URIs of key sets that it needs.
    pub(crate) jwks: BTreeSet<String>,
    pub(crate) diagnostics: Vec<Diagnostic>,
    pub(crate) objects: Vec<Listed>,
    /// False while a source could not be read and nothing was known before: what subscribers hold is then left alone.
    pub(crate) complete: bool,
}

impl Compiled {
    /// What belongs to no tenant. Its claims are nobody's and are never looked at.
    pub(crate) fn of_provider(resources: Vec<Resource>) -> Self {
        let claims = Claims { tenant: nobody(), isolation: None, gateways: Vec::new() };
        Self { resources, ..Self::nothing(claims) }
    }

    /// Claims, and nothing else.
    pub(crate) fn nothing(claims: Claims) -> Self {
        let (homes, federations, jwks) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Self { resources: Vec::new(), claims, homes, federations, jwks, diagnostics: Vec::new(), objects: Vec::new(), complete: true }
    }
}

fn nobody() -> TenantName {
    match TenantName::new("0") {
        Ok(name) => name,
        Err(_) => unreachable!("the constant is a valid name; the tests of the fleet reach it"),
    }
}

/// One tenant as it stands.
#[derive(Debug, Clone)]
pub(crate) struct TenantView {
    pub(crate) claims: Claims,
    pub(crate) homes: BTreeMap<ServiceKey, AzName>,
    pub(crate) federations: BTreeSet<(TenantName, TrustDomain)>,
    pub(crate) jwks: Arc<BTreeSet<String>>,
    pub(crate) entries: BTreeMap<Key, Arc<Entry>>,
    pub(crate) diagnostics: Arc<[Diagnostic]>,
    pub(crate) objects: Arc<[Listed]>,
    pub(crate) complete: bool,
    /// The newest generation that changed a resource.
    pub(crate) changed: Generation,
    log: VecDeque<Arc<Delta>>,
    /// The log holds every delta with a larger generation.
    floor: Generation,
    identities: Arc<HashSet<(NodeName, Namespace, ServiceAccount)>>,
}

impl TenantView {
    /// The view after `before` once its sources came to `compiled`.
    pub(crate) fn next(before: Option<&TenantView>, compiled: Compiled, generation: Generation) -> Self {
        let (entries, touches) = compare(before.map(|b| &b.entries), compiled.resources, generation);
        let was_complete = before.is_none_or(|b| b.complete);
        let identities = match before {
            Some(b) if !touches.iter().any(|t| t.key.0 == Kind::Workload) => b.identities.clone(),
            _ => Arc::new(identities(&entries)),
        };
        let mut view = Self {
            claims: compiled.claims,
            homes: compiled.homes,
            federations: compiled.federations,
            jwks: Arc::new(compiled.jwks),
            entries,
            diagnostics: compiled.diagnostics.into(),
            objects: compiled.objects.into(),
            complete: compiled.complete,
            changed: before.map_or(generation, |b| b.changed),
            log: before.map(|b| b.log.clone()).unwrap_or_default(),
            floor: before.map_or(generation, |b| b.floor),
            identities,
        };
        if !touches.is_empty() {
            view.changed = generation;
            view.log.push_back(Arc::new(Delta { generation, touches }));
            view.trim();
        }
        if was_complete != view.complete {
            // Whether removals are told has changed: everyone must look at the whole tenant again.
            view.log.clear();
            view.floor = generation;
        }
        view
    }

    /// The same view with `planned` in place of what the planner gave the tenant before, which is `was` if that is known. `None`: nothing
    /// differs. What did not change costs a comparison, and nothing at all if a whole list is the same.
    pub(crate) fn with_tier(&self, planned: &Planned, was: Option<&Planned>, generation: Generation) -> Option<Self> {
        let mut touches = Vec::new();
        if was.is_none_or(|was| !Arc::ptr_eq(&was.addresses, &planned.addresses)) {
            let name = |a: &GatewayAddress| tier_name(&a.service, &a.az);
            let is_same = |a: &GatewayAddress, r: &Resource| matches!(r, Resource::Address(old) if old == a);
            self.touch(Kind::Address, &planned.addresses, generation, (name, is_same, |a| Resource::Address(a.clone())), &mut touches);
        }
        if was.is_none_or(|was| !Arc::ptr_eq(&was.tables, &planned.tables)) {
            let name = |t: &Arc<BucketTable>| tier_name(&t.service, &t.az);
            let is_same = |t: &Arc<BucketTable>, r: &Resource| matches!(r, Resource::Table(old) if *old == **t);
            let resource = |t: &Arc<BucketTable>| Resource::Table(t.as_ref().clone());
            self.touch(Kind::Table, &planned.tables, generation, (name, is_same, resource), &mut touches);
        }
        (!touches.is_empty()).then(|| self.touched(touches, generation))
    }

    /// What differs between this view's resources of a kind and what is said now: by name, by whether they are the same, as resources.
    fn touch<T>(
        &self,
        kind: Kind,
        said: &[T],
        generation: Generation,
        (name, is_same, resource): (impl Fn(&T) -> Arc<str>, impl Fn(&T, &Resource) -> bool, impl Fn(&T) -> Resource),
        touches: &mut Vec<Touch>,
    ) {
        let mut gone: BTreeMap<&Arc<str>, &Arc<Entry>> = self.of(kind).map(|entry| (&entry.name, entry)).collect();
        for item in said {
            let name = name(item);
            let old = gone.remove(&name);
            if old.is_some_and(|old| is_same(item, &old.resource)) {
                continue;
            }
            let after = Some(Arc::new(Entry::new(resource(item), generation)));
            touches.push(Touch { key: (kind, name), before: old.cloned(), after });
        }
        let gone = gone.into_iter().map(|(name, old)| Touch { key: (kind, name.clone()), before: Some(old.clone()), after: None });
        touches.extend(gone);
    }

    /// The same view with `told` in place of what the hub itself said of the tenant's trust before. `None`: nothing differs.
    pub(crate) fn with_trust(&self, told: &[Resource], generation: Generation) -> Option<Self> {
        let mut gone: BTreeMap<Key, &Arc<Entry>> = self.of_hub().map(|e| (e.key(), e)).collect();
        let mut touches = Vec::new();
        for resource in told {
            let key: Key = (resource.kind(), resource.name().into());
            let before = gone.remove(&key);
            if before.is_some_and(|old| old.resource == *resource) {
                continue;
            }
            let after = Some(Arc::new(Entry::new(resource.clone(), generation)));
            touches.push(Touch { key, before: before.cloned(), after });
        }
        touches.extend(gone.into_iter().map(|(key, old)| Touch { key, before: Some(old.clone()), after: None }));
        (!touches.is_empty()).then(|| self.touched(touches, generation))
    }

    /// What the hub itself said.
    pub(crate) fn of_hub(&self) -> impl Iterator<Item = &Arc<Entry>> {
        self.of(Kind::Bundle).chain(self.of(Kind::Entitlement)).filter(|e| is_of_hub(&e.resource))
    }

    fn touched(&self, touches: Vec<Touch>, generation: Generation) -> Self {
        let mut view = self.clone();
        for touch in &touches {
            match &touch.after {
                Some(entry) => _ = view.entries.insert(touch.key.clone(), entry.clone()),
                None => _ = view.entries.remove(&touch.key),
            }
        }
        view.changed = generation;
        view.log.push_back(Arc::new(Delta { generation, touches }));
        view.trim();
        view
    }

    fn trim(&mut self) {
        let mut touches: usize = self.log.iter().map(|d| d.touches.len()).sum();
        while self.log.len() > LOG_DELTAS_MAX || touches > LOG_TOUCHES_MAX {
            let Some(oldest) = self.log.pop_front() else { return };
            touches -= oldest.touches.len();
            self.floor = oldest.generation;
        }
    }

    /// The deltas after `since`, newest first; `None` when they are not all kept.
    pub(crate) fn deltas_after(&self, since: Generation) -> Option<impl Iterator<Item = &Arc<Delta>>> {
        (since >= self.floor).then(|| self.log.iter().rev().take_while(move |d| d.generation > since))
    }

    /// True where a workload with this identity runs on `node`.
    pub(crate) fn runs(&self, node: &NodeName, identity: &Identity) -> bool {
        self.identities.contains(&(node.clone(), identity.namespace.clone(), identity.service_account.clone()))
    }

    /// How many resources of a kind there are.
    pub(crate) fn count(&self, kind: Kind) -> usize {
        self.of(kind).count()
    }

    /// All resources of a kind, by name.
    pub(crate) fn of(&self, kind: Kind) -> impl Iterator<Item = &Arc<Entry>> {
        let from: Key = (kind, "".into());
        self.entries.range(from..).take_while(move |((k, _), _)| *k == kind).map(|(_, e)| e)
    }
}

/// Keeps the entries that did not change, so that versions and bytes are computed once per change and not once per look.
fn compare(
    before: Option<&BTreeMap<Key, Arc<Entry>>>,
    resources: Vec<Resource>,
    generation: Generation,
) -> (BTreeMap<Key, Arc<Entry>>, Vec<Touch>) {
    let mut touches = Vec::new();
    let mut entries = BTreeMap::new();
    for resource in resources {
        let key: Key = (resource.kind(), resource.name().into());
        let old = before.and_then(|b| b.get(&key));
        if let Some(old) = old
            && old.resource == resource
        {
            entries.insert(key, old.clone());
            continue;
        }
        let new = Arc::new(Entry::new(resource, generation));
        touches.push(Touch { key: key.clone(), before: old.cloned(), after: Some(new.clone()) });
        entries.insert(key, new);
    }
    for (key, old) in before.into_iter().flatten() {
        if !entries.contains_key(key) {
            touches.push(Touch { key: key.clone(), before: Some(old.clone()), after: None });
        }
    }
    (entries, touches)
}

fn identities(entries: &BTreeMap<Key, Arc<Entry>>) -> HashSet<(NodeName, Namespace, ServiceAccount)> {
    entries
        .values()
        .filter_map(|e| match &e.resource {
            Resource::Workload(w) => Some((w.node.clone(), w.namespace.clone(), w.service_account.clone())),
            _ => None,
        })
        .collect()
}

/// As [`Resource::name`] has it; a test holds them together.
fn tier_name(service: &ServiceKey, az: &AzName) -> Arc<str> {
    format!("{service}@{az}").into()
}

/// What the planner gives one tenant. Lists that are one in memory are the same.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Planned {
    pub(crate) addresses: Arc<Vec<GatewayAddress>>,
    pub(crate) tables: Arc<Vec<Arc<BucketTable>>>,
}

impl Planned {
    pub(crate) fn resources(&self) -> impl Iterator<Item = Resource> {
        let addresses = self.addresses.iter().cloned().map(Resource::Address);
        addresses.chain(self.tables.iter().map(|t| Resource::Table(t.as_ref().clone())))
    }
}

/// The kinds that come from the planner, not from what the tenant said.
pub(crate) fn is_planned(kind: Kind) -> bool {
    matches!(kind, Kind::Address | Kind::Table)
}

/// What comes from neither the planner nor the tenant: the hub says who vouches for the tenant, and which gateways may use its keys.
pub(crate) fn is_of_hub(resource: &Resource) -> bool {
    match resource {
        Resource::Bundle(_) => true,
        Resource::Entitlement(entitlement) => matches!(entitlement.requester, Requester::Gateway(_)),
        _ => false,
    }
}

/// Whose a resource is; `None`: the provider's.
pub(crate) type Owner = Option<TenantName>;

/// All tenants, and the tier, at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Catalog {
    pub(crate) generation: Generation,
    pub(crate) tenants: BTreeMap<TenantName, Arc<TenantView>>,
    /// What belongs to no tenant; `None` until something was said.
    pub(crate) provider: Option<Arc<TenantView>>,
    /// Where services live.
    pub(crate) whereabouts: Arc<Whereabouts>,
}

impl Catalog {
    /// The tenants that `principal` is told of.
    pub(crate) fn admitted<'a>(&'a self, principal: &'a Principal) -> impl Iterator<Item = (&'a TenantName, &'a Arc<TenantView>)> {
        self.tenants.iter().filter(move |(_, view)| scope::admits(&view.claims, principal, &self.whereabouts))
    }

    /// All that `principal` is told of: of tenants, and of the provider.
    pub(crate) fn concerning<'a>(&'a self, principal: &'a Principal) -> impl Iterator<Item = (Owner, &'a Arc<TenantView>)> {
        let provider = self.provider.iter().filter(|_| scope::admits_provider(principal));
        self.admitted(principal).map(|(name, view)| (Some(name.clone()), view)).chain(provider.map(|view| (None, view)))
    }

    /// What an owner says.
    pub(crate) fn view(&self, owner: &Owner) -> Option<&Arc<TenantView>> {
        match owner {
            Some(tenant) => self.tenants.get(tenant),
            None => self.provider.as_ref(),
        }
    }

    /// The newest generation after `since` that changed something of `kinds` which `principal` is told of.
    pub(crate) fn newest_in_scope(&self, principal: &Principal, kinds: &[bool; Kind::ALL.len()], since: Generation) -> Option<Generation> {
        let concerns = |t: &Touch| {
            kinds[t.key.0 as usize]
                && [&t.before, &t.after].into_iter().flatten().any(|e| scope::visible(&e.resource, principal, &self.whereabouts))
        };
        let mut newest = None;
        for (_, view) in self.concerning(principal).filter(|(_, v)| v.changed > since) {
            let of_tenant = match view.deltas_after(since) {
                Some(mut deltas) => deltas.find(|d| d.touches.iter().any(&concerns)).map(|d| d.generation),
                // Too far back to tell: the tenant's newest change stands for all of them.
                None => Some(view.changed),
            };
            newest = newest.max(of_tenant);
        }
        newest
    }
}

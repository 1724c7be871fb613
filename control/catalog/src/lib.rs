//! The state that the controller publishes, as immutable values. There is one [`Catalog`] at a
//! time: the catalog writer creates it, and every subscriber stream reads it. Each change is logged
//! as a [`CatalogDelta`], so a subscriber that keeps up compares only what changed. No IO. Start at
//! [`Catalog`]. [`wire_check`] decides which compiled resources may be published as they are.

#![forbid(unsafe_code)]

mod origin;
mod resource_table;
pub mod wire_check;

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use canal_compiler::claims::TenantClaims;
use canal_compiler::scope::{self, TierPlacement};
use canal_model::diagnostic::Diagnostic;
use canal_model::identity::Identity;
use canal_model::ids::{
    AzName, Generation, Namespace, NodeName, ServiceAccount, ServiceKey, TenantName, TrustDomain,
};
use canal_model::ingress::IngressRequests;
use canal_model::policy::{Document, ObjectKey};
use canal_model::principal::Principal;
use canal_model::program::{BucketTable, GatewayAddress, Resource, ResourceKind};
use canal_model::trust::KeyRequester;
use canal_wire::southbound;
use sha2::{Digest, Sha256};

pub use origin::PolicyOrigin;
pub use resource_table::ResourceTable;

/// Maximum number of deltas in a tenant's log. A subscriber that is further behind is compared with
/// the whole tenant, which takes longer and has the same result.
/// Nobody measured this value. It bounds the log of a tenant whose small changes never fill
/// [`LOG_BYTES_MAX`].
pub const LOG_DELTAS_MAX: usize = 1024;
/// Maximum bytes of memory of what only a tenant's log keeps: its records, and replaced and removed
/// resources.
/// A replaced resource counts at least `RESOURCE_BYTES`, so that at most 4,096 of them are kept. The
/// log stays after a tenant became small, so it is small beside the default share of 24 MiB.
pub const LOG_BYTES_MAX: usize = 2 << 20;
/// Bytes of memory of a resource beside its body and its decoded value, which is about as large as
/// the body.
/// Nobody measured it alone; too much only shortens the log.
const RESOURCE_BYTES: usize = 512;

/// Version of a resource: the first 128 bits of the SHA-256 of its bytes. Equal content has equal
/// versions, also across restarts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ResourceVersion([u8; 16]);

impl ResourceVersion {
    /// Version of a resource that a subscriber holds and that this controller never sent. It
    /// differs from every real version.
    pub const FOREIGN: ResourceVersion = ResourceVersion([0; 16]);

    fn of(bytes: &[u8]) -> Self {
        let digest = Sha256::digest(bytes);
        let mut v = [0; 16];
        v.copy_from_slice(&digest[..16]);
        Self(v)
    }

    /// Parses the wire form; anything else becomes [`ResourceVersion::FOREIGN`].
    pub fn read(s: &str) -> Self {
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
impl fmt::Display for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}
impl fmt::Debug for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Identifies one resource by its kind and its name on the wire.
pub type ResourceId = (ResourceKind, Arc<str>);

/// A resource that is encoded once for all its subscribers.
#[derive(Debug)]
pub struct EncodedResource {
    pub resource: Arc<Resource>,
    pub name: Arc<str>,
    pub version: ResourceVersion,
    pub body: Vec<u8>,
    /// Generation that last changed the resource.
    pub changed: Generation,
}

impl EncodedResource {
    pub fn new(resource: impl Into<Arc<Resource>>, changed: Generation) -> Self {
        let resource = resource.into();
        let body = southbound::encode(&resource);
        Self {
            name: resource.name().into(),
            version: ResourceVersion::of(&body),
            body,
            resource,
            changed,
        }
    }

    pub fn key(&self) -> ResourceId {
        (self.resource.kind(), self.name.clone())
    }

    /// Returns about how many bytes of memory the resource takes.
    fn memory(&self) -> usize {
        2 * self.body.len() + self.name.len() + RESOURCE_BYTES
    }
}

/// The change of one resource in one generation.
#[derive(Debug)]
pub struct ResourceChange {
    pub key: ResourceId,
    /// Resource before the change; `None` if it is new.
    pub before: Option<Arc<EncodedResource>>,
    /// Resource after the change; `None` if it was removed.
    pub after: Option<Arc<EncodedResource>>,
}

/// All changed resources of one tenant in one generation.
#[derive(Debug)]
pub struct CatalogDelta {
    pub generation: Generation,
    pub touches: Vec<ResourceChange>,
    /// Memory of what only the log keeps. Resources after a change are the catalog's, or those
    /// before a later change.
    bytes: usize,
}

impl CatalogDelta {
    fn new(generation: Generation, touches: Vec<ResourceChange>) -> Self {
        let replaced = touches.iter().filter_map(|touch| touch.before.as_ref());
        let bytes =
            size_of_val(touches.as_slice()) + replaced.map(|before| before.memory()).sum::<usize>();
        Self {
            generation,
            touches,
            bytes,
        }
    }
}

/// A configuration object of a tenant and its source.
#[derive(Debug, Clone)]
pub struct CatalogObject {
    pub document: Arc<Document>,
    /// Source that the object comes from.
    pub origin: PolicyOrigin,
}

impl CatalogObject {
    /// Returns where an operator finds the object: its file, or the name of its source.
    pub fn location(&self) -> &str {
        match self.origin {
            PolicyOrigin::Files => &self.document.origin.file,
            PolicyOrigin::Api => self.origin.label(),
        }
    }
}

/// Why the newest state of a tenant is not in force, and what is in force instead.
#[derive(Debug)]
pub struct WithheldChange {
    /// Objects of the state in force; empty if there is none, or if the controller started since and
    /// does not know it.
    pub objects_in_force: Arc<[CatalogObject]>,
    /// The objections to the newest state. They are among its diagnostics too.
    pub reasons: Vec<Diagnostic>,
}

/// The compiled result of one tenant's sources.
#[derive(Debug, Clone)]
pub struct CompiledTenant {
    /// Resources in a stable order. One that did not change should be the same allocation as before:
    /// then its content is not compared.
    pub resources: Vec<Arc<Resource>>,
    pub claims: TenantClaims,
    /// Home AZ that the tenant requested for a service.
    pub home_azs: BTreeMap<ServiceKey, AzName>,
    /// What the tenant asks of the tier's ingress.
    pub ingress: IngressRequests,
    /// Tenants and trust domains with which the tenant declares a federation.
    pub federations: BTreeSet<(TenantName, TrustDomain)>,
    /// URIs of the JWT key sets that the tenant needs.
    pub jwks: BTreeSet<String>,
    pub diagnostics: Vec<Diagnostic>,
    /// Objects of the newest state, also while it is withheld.
    pub objects: Vec<CatalogObject>,
    /// What is in force instead of the objects, and why; `None` if they are in force themselves.
    pub withheld: Option<Arc<WithheldChange>>,
    /// False while a source cannot be read and its content was not known before. Subscribers then
    /// keep what they hold.
    pub complete: bool,
}

impl CompiledTenant {
    /// Returns a result for resources that belong to no tenant. Its claims are a placeholder and
    /// are never read.
    pub fn of_provider(resources: Vec<Resource>) -> Self {
        let claims = TenantClaims {
            tenant: provider_placeholder(),
            isolation: None,
            gateways: Vec::new(),
        };
        Self {
            resources: resources.into_iter().map(Arc::new).collect(),
            ..Self::nothing(claims)
        }
    }

    /// Returns a result that contains only claims.
    pub fn nothing(claims: TenantClaims) -> Self {
        let (homes, federations, jwks) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Self {
            resources: Vec::new(),
            claims,
            home_azs: homes,
            ingress: IngressRequests::default(),
            federations,
            jwks,
            diagnostics: Vec::new(),
            objects: Vec::new(),
            withheld: None,
            complete: true,
        }
    }
}

/// Returns the placeholder tenant of resources that belong to no tenant.
fn provider_placeholder() -> TenantName {
    match TenantName::new("0") {
        Ok(name) => name,
        Err(_) => unreachable!("the constant is a valid name; the tests of the fleet reach it"),
    }
}

/// The published state of one tenant.
#[derive(Debug, Clone)]
pub struct TenantCatalog {
    pub claims: TenantClaims,
    pub homes: BTreeMap<ServiceKey, AzName>,
    pub ingress: IngressRequests,
    pub federations: BTreeSet<(TenantName, TrustDomain)>,
    pub jwks: Arc<BTreeSet<String>>,
    pub entries: ResourceTable,
    pub diagnostics: Arc<[Diagnostic]>,
    /// Objects of the newest state, also while it is withheld.
    pub objects: Arc<[CatalogObject]>,
    /// What is in force instead of the objects, and why; `None` if they are in force themselves.
    pub withheld: Option<Arc<WithheldChange>>,
    pub complete: bool,
    /// Newest generation that changed one of the resources.
    pub changed: Generation,
    log: VecDeque<Arc<CatalogDelta>>,
    /// The log contains every delta with a larger generation than this one.
    floor: Generation,
    identities: Arc<HashSet<(NodeName, Namespace, ServiceAccount)>>,
    /// The list of which `entries` were made; empty if they changed since.
    compiled: Arc<Vec<Arc<Resource>>>,
}

impl TenantCatalog {
    /// Returns the state that follows `before` when the tenant's sources compiled to `compiled`.
    pub fn next(
        before: Option<&TenantCatalog>,
        compiled: CompiledTenant,
        generation: Generation,
    ) -> Self {
        // A state with the compiler's list is compared by allocation, which is faster; the result
        // is the same.
        let (entries, touches) = match before {
            Some(before) if !before.compiled.is_empty() => {
                before.with_differences(&compiled.resources, generation)
            }
            _ => compare(before.map(|b| &b.entries), &compiled.resources, generation),
        };
        let was_complete = before.is_none_or(|b| b.complete);
        // Identities depend on workloads only.
        let identities = match before {
            Some(b) if !touches.iter().any(|t| t.key.0 == ResourceKind::Workload) => {
                b.identities.clone()
            }
            _ => Arc::new(identities(&entries)),
        };
        let mut view = Self {
            claims: compiled.claims,
            homes: compiled.home_azs,
            ingress: compiled.ingress,
            federations: compiled.federations,
            jwks: Arc::new(compiled.jwks),
            entries,
            diagnostics: compiled.diagnostics.into(),
            objects: compiled.objects.into(),
            withheld: compiled.withheld,
            complete: compiled.complete,
            // Without a predecessor, the state itself is the first change.
            changed: before.map_or(generation, |b| b.changed),
            log: before.map(|b| b.log.clone()).unwrap_or_default(),
            floor: before.map_or(generation, |b| b.floor),
            identities,
            compiled: Arc::new(compiled.resources),
        };
        if !touches.is_empty() {
            view.changed = generation;
            view.log
                .push_back(Arc::new(CatalogDelta::new(generation, touches)));
            view.trim();
        }
        if was_complete != view.complete {
            // Completeness decides whether removals are sent, so every subscriber must be compared
            // with the whole tenant again.
            view.log.clear();
            view.floor = generation;
        }
        view
    }

    /// Returns the objects from which the resources were compiled; see
    /// [`WithheldChange::objects_in_force`].
    pub fn objects_in_force(&self) -> &Arc<[CatalogObject]> {
        match &self.withheld {
            Some(withheld) => &withheld.objects_in_force,
            None => &self.objects,
        }
    }

    /// Returns this state with the planner's resources replaced by `planned`; `None` if nothing
    /// differs. `was` is what the planner assigned before, if that is known. A list that is the
    /// same allocation in both is skipped; any other unchanged resource costs one comparison.
    pub fn with_tier(
        &self,
        planned: &TenantPlacement,
        was: Option<&TenantPlacement>,
        generation: Generation,
    ) -> Option<Self> {
        let mut touches = Vec::new();
        if was.is_none_or(|was| !Arc::ptr_eq(&was.addresses, &planned.addresses)) {
            let name = |a: &GatewayAddress| tier_name(&a.service, &a.az);
            let is_same =
                |a: &GatewayAddress, r: &Resource| matches!(r, Resource::Address(old) if old == a);
            self.touch(
                ResourceKind::Address,
                &planned.addresses,
                generation,
                (name, is_same, |a| Resource::Address(a.clone())),
                &mut touches,
            );
        }
        if was.is_none_or(|was| !Arc::ptr_eq(&was.tables, &planned.tables)) {
            let name = |t: &Arc<BucketTable>| tier_name(&t.service, &t.az);
            let is_same = |t: &Arc<BucketTable>, r: &Resource| matches!(r, Resource::Table(old) if *old == **t);
            let resource = |t: &Arc<BucketTable>| Resource::Table(t.as_ref().clone());
            self.touch(
                ResourceKind::Table,
                &planned.tables,
                generation,
                (name, is_same, resource),
                &mut touches,
            );
        }
        (!touches.is_empty()).then(|| self.touched(touches, generation))
    }

    /// Adds the differences between this state's resources of `kind` and the desired list
    /// `declared`. The closures return an item's name, whether an item equals a resource, and the
    /// item as a resource.
    fn touch<T>(
        &self,
        kind: ResourceKind,
        declared: &[T],
        generation: Generation,
        (name, is_same, resource): (
            impl Fn(&T) -> Arc<str>,
            impl Fn(&T, &Resource) -> bool,
            impl Fn(&T) -> Resource,
        ),
        touches: &mut Vec<ResourceChange>,
    ) {
        let mut gone: BTreeMap<&Arc<str>, &Arc<EncodedResource>> =
            self.of(kind).map(|entry| (&entry.name, entry)).collect();
        for item in declared {
            let name = name(item);
            let old = gone.remove(&name);
            if old.is_some_and(|old| is_same(item, &old.resource)) {
                continue;
            }
            let after = Some(Arc::new(EncodedResource::new(resource(item), generation)));
            touches.push(ResourceChange {
                key: (kind, name),
                before: old.cloned(),
                after,
            });
        }
        let gone = gone.into_iter().map(|(name, old)| ResourceChange {
            key: (kind, name.clone()),
            before: Some(old.clone()),
            after: None,
        });
        touches.extend(gone);
    }

    /// Returns this state with the controller's own resources replaced by `resources`; `None` if
    /// nothing differs.
    pub fn with_trust(&self, resources: &[Resource], generation: Generation) -> Option<Self> {
        let mut gone: BTreeMap<ResourceId, &Arc<EncodedResource>> =
            self.of_controller().map(|e| (e.key(), e)).collect();
        let mut touches = Vec::new();
        for resource in resources {
            let key: ResourceId = (resource.kind(), resource.name().into());
            let before = gone.remove(&key);
            if before.is_some_and(|old| *old.resource == *resource) {
                continue;
            }
            let after = Some(Arc::new(EncodedResource::new(resource.clone(), generation)));
            touches.push(ResourceChange {
                key,
                before: before.cloned(),
                after,
            });
        }
        touches.extend(gone.into_iter().map(|(key, old)| ResourceChange {
            key,
            before: Some(old.clone()),
            after: None,
        }));
        (!touches.is_empty()).then(|| self.touched(touches, generation))
    }

    /// Returns the resources that the controller itself generates; see [`is_of_controller`].
    pub fn of_controller(&self) -> impl Iterator<Item = &Arc<EncodedResource>> {
        self.of(ResourceKind::Bundle)
            .chain(self.of(ResourceKind::Entitlement))
            .filter(|e| is_of_controller(&e.resource))
    }

    /// Compares compiled resources with those of which this state was made, as [`compare`] does. Only
    /// resources that are not the same allocation in both lists are named and compared.
    fn with_differences(
        &self,
        resources: &[Arc<Resource>],
        generation: Generation,
    ) -> (ResourceTable, Vec<ResourceChange>) {
        let (gone, new) = differences(&self.compiled, resources);
        let key =
            |resource: &Arc<Resource>| -> ResourceId { (resource.kind(), resource.name().into()) };
        let mut gone: BTreeSet<ResourceId> = gone.into_iter().map(key).collect();
        let mut entries = self.entries.clone();
        let mut touches = Vec::new();
        for resource in new {
            let key = key(resource);
            gone.remove(&key);
            let before = self.entries.get(&key);
            if before.is_some_and(|old| old.resource == *resource) {
                continue;
            }
            let after = Arc::new(EncodedResource::new(resource.clone(), generation));
            entries.insert(key.clone(), after.clone());
            touches.push(ResourceChange {
                key,
                before: before.cloned(),
                after: Some(after),
            });
        }
        for key in gone {
            if let Some(before) = entries.remove(&key) {
                touches.push(ResourceChange {
                    key,
                    before: Some(before),
                    after: None,
                });
            }
        }
        (entries, touches)
    }

    /// Returns this state with the changes applied and logged.
    fn touched(&self, touches: Vec<ResourceChange>, generation: Generation) -> Self {
        let mut view = self.clone();
        view.compiled = Arc::default();
        for touch in &touches {
            match &touch.after {
                Some(entry) => view.entries.insert(touch.key.clone(), entry.clone()),
                None => drop(view.entries.remove(&touch.key)),
            }
        }
        view.changed = generation;
        view.log
            .push_back(Arc::new(CatalogDelta::new(generation, touches)));
        view.trim();
        view
    }

    /// Removes the oldest deltas until the log is within its limits.
    fn trim(&mut self) {
        let mut bytes: usize = self.log.iter().map(|d| d.bytes).sum();
        while self.log.len() > LOG_DELTAS_MAX || bytes > LOG_BYTES_MAX {
            let Some(oldest) = self.log.pop_front() else {
                return;
            };
            bytes -= oldest.bytes;
            self.floor = oldest.generation;
        }
    }

    /// Returns the deltas after `since`, newest first; `None` if the log does not reach back that
    /// far.
    pub fn deltas_after(
        &self,
        since: Generation,
    ) -> Option<impl Iterator<Item = &Arc<CatalogDelta>>> {
        (since >= self.floor).then(|| {
            self.log
                .iter()
                .rev()
                .take_while(move |d| d.generation > since)
        })
    }

    /// True if a workload with this identity runs on `node`.
    pub fn runs(&self, node: &NodeName, identity: &Identity) -> bool {
        self.identities.contains(&(
            node.clone(),
            identity.namespace.clone(),
            identity.service_account.clone(),
        ))
    }

    /// Returns the diagnostics about one of the tenant's objects. If one of them is an error, the
    /// object is not in force as written. Sources report them back to the author of the object.
    pub fn status_of<'a>(&'a self, key: &'a ObjectKey) -> impl Iterator<Item = &'a Diagnostic> {
        self.diagnostics
            .iter()
            .filter(move |d| d.object.as_ref() == Some(key))
    }

    /// Returns the number of resources of a kind.
    pub fn count(&self, kind: ResourceKind) -> usize {
        self.of(kind).count()
    }

    /// Returns all resources of a kind, sorted by name.
    pub fn of(&self, kind: ResourceKind) -> impl Iterator<Item = &Arc<EncodedResource>> {
        self.entries.of(kind)
    }
}

/// Compares compiled resources with those of `before`, and returns the new entries and the changes.
/// Unchanged entries are reused, so versions and bytes are computed once per change.
fn compare(
    before: Option<&ResourceTable>,
    resources: &[Arc<Resource>],
    generation: Generation,
) -> (ResourceTable, Vec<ResourceChange>) {
    let mut touches = Vec::new();
    let mut entries: BTreeMap<ResourceId, Arc<EncodedResource>> = BTreeMap::new();
    for resource in resources {
        let key: ResourceId = (resource.kind(), resource.name().into());
        let old = before.and_then(|b| b.get(&key));
        if let Some(old) = old
            && old.resource == *resource
        {
            entries.insert(key, old.clone());
            continue;
        }
        let new = Arc::new(EncodedResource::new(resource.clone(), generation));
        touches.push(ResourceChange {
            key: key.clone(),
            before: old.cloned(),
            after: Some(new.clone()),
        });
        entries.insert(key, new);
    }
    for old in before.into_iter().flat_map(ResourceTable::values) {
        let key = old.key();
        if !entries.contains_key(&key) {
            touches.push(ResourceChange {
                key,
                before: Some(old.clone()),
                after: None,
            });
        }
    }
    (entries.into_iter().collect(), touches)
}

/// Returns the items of two lists that are not the same allocation in both: those of `old` and those
/// of `new`. Both lists have each item once.
fn differences<'l, T>(old: &'l [Arc<T>], new: &'l [Arc<T>]) -> (Vec<&'l Arc<T>>, Vec<&'l Arc<T>>) {
    let is_same = |(a, b): &(&Arc<T>, &Arc<T>)| Arc::ptr_eq(a, b);
    let begin = old.iter().zip(new).take_while(is_same).count();
    let (old, new) = (&old[begin..], &new[begin..]);
    let end = old.iter().rev().zip(new.iter().rev());
    let end = end.take_while(is_same).count();
    let (old, new) = (&old[..old.len() - end], &new[..new.len() - end]);
    let mut gone: HashSet<*const T> = old.iter().map(Arc::as_ptr).collect();
    let new = new.iter().filter(|it| !gone.remove(&Arc::as_ptr(it)));
    let new: Vec<&Arc<T>> = new.collect();
    let old = old.iter().filter(|it| gone.contains(&Arc::as_ptr(it)));
    (old.collect(), new)
}

fn identities(entries: &ResourceTable) -> HashSet<(NodeName, Namespace, ServiceAccount)> {
    entries
        .values()
        .filter_map(|e| match e.resource.as_ref() {
            Resource::Workload(w) => Some((
                w.node.clone(),
                w.namespace.clone(),
                w.service_account.clone(),
            )),
            _ => None,
        })
        .collect()
}

/// Returns the name that [`Resource::name`] gives a gateway address or a bucket table; a test
/// compares the two.
fn tier_name(service: &ServiceKey, az: &AzName) -> Arc<str> {
    format!("{service}@{az}").into()
}

/// Gateway addresses and bucket tables that the planner assigns to one tenant. Lists that are the
/// same allocation are equal.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TenantPlacement {
    pub addresses: Arc<Vec<GatewayAddress>>,
    pub tables: Arc<Vec<Arc<BucketTable>>>,
}

impl TenantPlacement {
    pub fn resources(&self) -> impl Iterator<Item = Resource> {
        let addresses = self.addresses.iter().cloned().map(Resource::Address);
        addresses.chain(
            self.tables
                .iter()
                .map(|t| Resource::Table(t.as_ref().clone())),
        )
    }
}

/// True for kinds that the planner produces, not the tenant's configuration.
pub fn is_planned(kind: ResourceKind) -> bool {
    matches!(kind, ResourceKind::Address | ResourceKind::Table)
}

/// True for resources that come from neither the planner nor the tenant's configuration. The
/// controller itself generates the trust bundles, and the entitlements that allow gateways to use
/// the tenant's keys.
pub fn is_of_controller(resource: &Resource) -> bool {
    match resource {
        Resource::Bundle(_) => true,
        Resource::Entitlement(entitlement) => {
            matches!(entitlement.requester, KeyRequester::Gateway(_))
        }
        _ => false,
    }
}

/// Owner of a resource; `None` for the provider.
pub type ResourceOwner = Option<TenantName>;

/// The published state of all tenants and of the cloud tier at one moment.
#[derive(Debug, Clone, Default)]
pub struct Catalog {
    pub generation: Generation,
    pub tenants: BTreeMap<TenantName, Arc<TenantCatalog>>,
    /// Resources that belong to no tenant; `None` until the first of them is published.
    pub provider: Option<Arc<TenantCatalog>>,
    /// Placement of services in the cloud tier.
    pub placement: Arc<TierPlacement>,
}

impl Catalog {
    /// Returns the tenants in the scope of `principal`.
    pub fn admitted<'a>(
        &'a self,
        principal: &'a Principal,
    ) -> impl Iterator<Item = (&'a TenantName, &'a Arc<TenantCatalog>)> {
        self.tenants
            .iter()
            .filter(move |(_, view)| scope::admits(&view.claims, principal, &self.placement))
    }

    /// Returns everything in the scope of `principal`: of tenants and of the provider.
    pub fn concerning<'a>(
        &'a self,
        principal: &'a Principal,
    ) -> impl Iterator<Item = (ResourceOwner, &'a Arc<TenantCatalog>)> {
        let provider = self
            .provider
            .iter()
            .filter(|_| scope::admits_provider(principal));
        self.admitted(principal)
            .map(|(name, view)| (Some(name.clone()), view))
            .chain(provider.map(|view| (None, view)))
    }

    /// Returns the published state of an owner.
    pub fn view(&self, owner: &ResourceOwner) -> Option<&Arc<TenantCatalog>> {
        match owner {
            Some(tenant) => self.tenants.get(tenant),
            None => self.provider.as_ref(),
        }
    }

    /// Returns the newest generation after `since` that changed a resource of `kinds` in the scope
    /// of `principal`.
    pub fn newest_in_scope(
        &self,
        principal: &Principal,
        kinds: &[bool; ResourceKind::ALL.len()],
        since: Generation,
    ) -> Option<Generation> {
        let concerns = |t: &ResourceChange| {
            kinds[t.key.0 as usize]
                && [&t.before, &t.after]
                    .into_iter()
                    .flatten()
                    .any(|e| scope::visible(&e.resource, principal, &self.placement))
        };
        let mut newest = None;
        for (_, view) in self
            .concerning(principal)
            .filter(|(_, v)| v.changed > since)
        {
            let of_tenant = match view.deltas_after(since) {
                Some(mut deltas) => deltas
                    .find(|d| d.touches.iter().any(&concerns))
                    .map(|d| d.generation),
                // The log does not reach back to `since`: assume that the tenant's newest change is
                // in scope.
                None => Some(view.changed),
            };
            newest = newest.max(of_tenant);
        }
        newest
    }
}

#[cfg(test)]
mod tests {
    use canal_model::program::{AppProtocol, Service, ServicePort, UpstreamPool};

    use super::*;

    /// Returns a Service of which the port has this number.
    pub(crate) fn service(name: u8, port: u16) -> Arc<Resource> {
        let key: ServiceKey = format!("alpha/shop/s{name}").parse().unwrap();
        Arc::new(Resource::Service(Service {
            id: canal_model::ids::ServiceId::new(u32::from(name) + 1).unwrap(),
            hostname: key.to_string(),
            key,
            vips: Vec::new(),
            ports: vec![ServicePort {
                name: "http".to_owned(),
                port,
                protocol: AppProtocol::Http1,
            }],
            upstream_pool: UpstreamPool::default(),
            policy_paths: Default::default(),
            load_balancers: Vec::new(),
        }))
    }

    fn compiled(resources: Vec<Arc<Resource>>) -> CompiledTenant {
        let claims = TenantClaims {
            tenant: "alpha".parse().unwrap(),
            isolation: None,
            gateways: Vec::new(),
        };
        CompiledTenant {
            resources,
            ..CompiledTenant::nothing(claims)
        }
    }

    /// Returns what subscribers see of a state: its entries, and the newest delta.
    fn describe(view: &TenantCatalog) -> (Vec<String>, Vec<String>) {
        let entry =
            |it: &Arc<EncodedResource>| format!("{} {} {}", it.name, it.version, it.changed);
        let touch = |it: &ResourceChange| {
            let [before, after] = [&it.before, &it.after].map(|it| it.as_ref().map(entry));
            format!("{:?} {before:?} {after:?}", it.key)
        };
        let newest = view.log.back().map(|delta| &delta.touches);
        (
            view.entries.values().map(entry).collect(),
            newest.into_iter().flatten().map(touch).collect(),
        )
    }

    /// Resources that are the same allocation as before are not compared, and the result is that of
    /// comparing all.
    #[test]
    fn shared_resources_give_the_state_that_copies_give() {
        let mut list: Vec<Arc<Resource>> = (0..8).map(|name| service(name, 80)).collect();
        let mut shared = TenantCatalog::next(None, compiled(list.clone()), Generation(1));
        let mut copied = shared.clone();
        // A reproducible sequence of replaced, removed, added and copied resources.
        let mut random = 7_u32;
        for generation in 2..400 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let [at, name, port, what] = random.to_be_bytes().map(usize::from);
            let name = u8::try_from(name % 12).unwrap();
            let new = service(name, 80 + u16::try_from(port % 3).unwrap());
            let known = list.iter().position(|it| it.name() == new.name());
            match (what % 8, known) {
                (0, _) if !list.is_empty() => drop(list.remove(at % list.len())),
                (1, _) if !list.is_empty() => {
                    let at = at % list.len();
                    list[at] = Arc::new((*list[at]).clone());
                }
                (2, _) => list.reverse(),
                (_, Some(known)) => list[known] = new,
                (_, None) => list.insert(at % (list.len() + 1), new),
            }
            let generation = Generation(generation);
            shared = TenantCatalog::next(Some(&shared), compiled(list.clone()), generation);
            copied.compiled = Arc::default();
            let copies = list.iter().map(|it| Arc::new((**it).clone())).collect();
            copied = TenantCatalog::next(Some(&copied), compiled(copies), generation);
            assert_eq!(describe(&shared), describe(&copied), "{generation}");
        }
    }

    /// What the planner and the controller add is not in the list that was compiled.
    #[test]
    fn entries_of_the_controller_outlive_the_comparison_of_lists() {
        let list: Vec<Arc<Resource>> = (0..3).map(|name| service(name, 80)).collect();
        let first = TenantCatalog::next(None, compiled(list.clone()), Generation(1));
        let touched = first.touched(
            vec![ResourceChange {
                key: (ResourceKind::Service, list[1].name().into()),
                before: None,
                after: None,
            }],
            Generation(2),
        );
        assert_eq!(touched.entries.len(), 2);
        let next = TenantCatalog::next(Some(&touched), compiled(list), Generation(3));
        assert_eq!(
            next.entries.len(),
            3,
            "the list is compared with the entries"
        );
    }
}

//! The state, and the decision whether a response may change it. The code is pure. A response is
//! validated resource by resource before anything changes, and what the callback refuses is rolled
//! back.

mod closure;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use canal_model::ids::{Generation, StoreId, TenantName};
use canal_model::program::{Resource, ResourceKind};
use canal_wire::discovery::{DeltaDiscoveryResponse, Resource as Envelope};
use canal_wire::southbound as wire;

use super::{RefusedResource, Update, UpdateSource};

pub use closure::{ClosedTenants, Closure, ClosureCause};

/// All resources by kind and name, with their versions. A clone copies the tables and not the
/// resources.
#[derive(Debug, Clone, Default)]
pub struct ResourceState {
    /// Store of the controller to which the state belongs; `None` if no controller has named one
    /// yet.
    pub(super) store: Option<StoreId>,
    pub(super) generation: Generation,
    // Trees, because a hash map would keep its size when a tenant is deleted.
    pub(super) kinds: BTreeMap<ResourceKind, BTreeMap<Arc<str>, VersionedResource>>,
    pub(super) closed: Arc<ClosedTenants>,
    /// Tenants whose security resources changed since their last manifest.
    pub(super) unsealed: BTreeSet<TenantName>,
}

/// A resource with its version.
#[derive(Debug, Clone)]
pub struct VersionedResource {
    pub version: Arc<str>,
    pub resource: Arc<Resource>,
}

impl ResourceState {
    /// Returns the newest accepted generation.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns the store of the controller to which the state belongs.
    pub fn store(&self) -> Option<StoreId> {
        self.store
    }

    /// Returns the names that are in this state and not in `other`.
    pub(super) fn missing_in(&self, other: &ResourceState) -> Vec<(ResourceKind, String)> {
        let all = self
            .kinds
            .iter()
            .flat_map(|(kind, resources)| resources.keys().map(|name| (*kind, name)));
        all.filter(|(kind, name)| other.get(*kind, name).is_none())
            .map(|(kind, name)| (kind, name.to_string()))
            .collect()
    }

    /// Returns all resources of a kind, sorted by name.
    pub fn of(&self, kind: ResourceKind) -> impl Iterator<Item = &Arc<Resource>> {
        self.kinds
            .get(&kind)
            .into_iter()
            .flat_map(|m| m.values().map(|h| &h.resource))
    }

    /// Returns one resource by its wire name.
    pub fn get(&self, kind: ResourceKind, name: &str) -> Option<&Arc<Resource>> {
        self.kinds.get(&kind)?.get(name).map(|h| &h.resource)
    }

    /// Returns the number of resources of a kind.
    pub fn count(&self, kind: ResourceKind) -> usize {
        self.kinds.get(&kind).map_or(0, BTreeMap::len)
    }

    /// Builds a state of these resources, for tests of code that uses one.
    #[cfg(any(test, feature = "testing"))]
    pub fn of_resources(resources: Vec<Arc<Resource>>, generation: Generation) -> Self {
        let mut state = Self {
            generation,
            ..Self::default()
        };
        for resource in resources {
            let name = Arc::from(resource.name());
            state.kinds.entry(resource.kind()).or_default().insert(
                name,
                VersionedResource {
                    version: Arc::from("1"),
                    resource,
                },
            );
        }
        state
    }

    /// Closes these tenants, for tests of code that uses a state.
    #[cfg(any(test, feature = "testing"))]
    pub fn closing(mut self, closed: ClosedTenants) -> Self {
        self.closed = Arc::new(closed);
        self
    }

    /// Returns all resources of a kind with their names and versions, sorted by name.
    pub fn resources_of(
        &self,
        kind: ResourceKind,
    ) -> impl Iterator<Item = (&Arc<str>, &VersionedResource)> {
        self.kinds.get(&kind).into_iter().flatten()
    }

    /// Applies a change and returns its rollback.
    pub(super) fn apply(&mut self, change: &ValidatedChange) -> Rollback {
        let (closed, unsealed) = (self.closed.clone(), self.unsealed.clone());
        let mut undo = Rollback {
            generation: self.generation,
            closed,
            unsealed,
            replaced: Vec::new(),
        };
        self.generation = change.update.generation;
        match change.kind {
            // A manifest seals its tenants; a change of security resources unseals them until the
            // next manifest.
            ResourceKind::Manifest => self
                .unsealed
                .retain(|tenant| !change.tenants.contains(tenant)),
            kind if kind.is_security() && !change.is_empty() => {
                self.unsealed.extend(change.tenants.iter().cloned())
            }
            _ => {}
        }
        for (name, resource) in &change.upserts {
            let kind = resource.resource.kind();
            let old = self
                .kinds
                .entry(kind)
                .or_default()
                .insert(name.clone(), resource.clone());
            undo.replaced.push((kind, name.clone(), old));
        }
        for (kind, name) in &change.update.removals {
            if let Some((name, old)) = self
                .kinds
                .get_mut(kind)
                .and_then(|m| m.remove_entry(name.as_str()))
            {
                undo.replaced.push((*kind, name, Some(old)));
            }
        }
        undo
    }

    /// Rolls back a refused change.
    pub(super) fn undo(&mut self, undo: Rollback) {
        self.generation = undo.generation;
        self.closed = undo.closed;
        self.unsealed = undo.unsealed;
        for (kind, name, old) in undo.replaced {
            self.put(kind, name, old);
        }
    }

    /// Rolls back the effect of a change on one resource.
    pub(super) fn restore(&mut self, undo: &Rollback, kind: ResourceKind, name: &str) {
        if let Some((_, name, old)) = undo
            .replaced
            .iter()
            .find(|(k, n, _)| *k == kind && &**n == name)
        {
            self.put(kind, name.clone(), old.clone());
        }
    }

    fn put(&mut self, kind: ResourceKind, name: Arc<str>, resource: Option<VersionedResource>) {
        let map = self.kinds.entry(kind).or_default();
        match resource {
            Some(resource) => map.insert(name, resource),
            None => map.remove(&name),
        };
    }

    /// Removes one resource if it exists.
    pub(super) fn remove(&mut self, kind: ResourceKind, name: &str) {
        self.put(kind, name.into(), None);
    }

    /// Copies one resource from another state.
    pub(super) fn copy(&mut self, from: &ResourceState, kind: ResourceKind, name: &str) {
        if let Some((name, resource)) = from.kinds.get(&kind).and_then(|m| m.get_key_value(name)) {
            self.put(kind, name.clone(), Some(resource.clone()));
        }
    }
}

/// Values that roll back a change.
pub(super) struct Rollback {
    generation: Generation,
    closed: Arc<ClosedTenants>,
    unsealed: BTreeSet<TenantName>,
    replaced: Vec<(ResourceKind, Arc<str>, Option<VersionedResource>)>,
}

/// A response that passed validation.
#[derive(Debug)]
pub(super) struct ValidatedChange {
    pub(super) kind: ResourceKind,
    pub(super) update: Update,
    pub(super) upserts: Vec<(Arc<str>, VersionedResource)>,
    /// Tenants that the response names, with or without new versions. The provider is not a tenant.
    pub(super) tenants: BTreeSet<TenantName>,
}

impl ValidatedChange {
    /// Splits the change into two parts that share no tenant. Returns `None` if it belongs to one
    /// tenant or to the provider.
    pub(super) fn split(&self) -> Option<[ValidatedChange; 2]> {
        let owner = |name: &str| self.kind.owner_of(name);
        let names = self
            .upserts
            .iter()
            .map(|(name, _)| &**name)
            .chain(self.update.removals.iter().map(|(_, name)| name.as_str()));
        let owners: BTreeSet<Option<TenantName>> = names.map(owner).collect();
        // A cut between owners, because one tenant's resources must be accepted together.
        let middle = owners
            .iter()
            .nth(owners.len() / 2)
            .filter(|_| owners.len() > 1)?;
        let part = |is_mine: &dyn Fn(&Option<TenantName>) -> bool| {
            let upserts: Vec<_> = self
                .upserts
                .iter()
                .filter(|(name, _)| is_mine(&owner(name)))
                .cloned()
                .collect();
            let removals = self
                .update
                .removals
                .iter()
                .filter(|(_, name)| is_mine(&owner(name)))
                .cloned()
                .collect();
            let list = upserts
                .iter()
                .map(|(_, resource)| resource.resource.clone())
                .collect();
            let tenants = self
                .tenants
                .iter()
                .filter(|tenant| is_mine(&Some((*tenant).clone())))
                .cloned()
                .collect();
            ValidatedChange {
                kind: self.kind,
                update: Update {
                    upserts: list,
                    removals,
                    ..self.update.clone()
                },
                upserts,
                tenants,
            }
        };
        Some([
            part(&|owner| owner < middle),
            part(&|owner| owner >= middle),
        ])
    }

    /// Returns the names that the change affects.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        self.upserts
            .iter()
            .map(|(name, _)| name.to_string())
            .chain(self.update.removals.iter().map(|(_, name)| name.clone()))
    }

    /// Returns whether the change has no news for the callback: an ACK, a repeated version, or an
    /// empty first response.
    pub(super) fn is_empty(&self) -> bool {
        self.update.upserts.is_empty() && self.update.removals.is_empty()
    }
}

/// Reasons to refuse a response, or an entry of a state file. Each has a value of the label
/// `reason`; its text is that of the NACK.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NackReason {
    #[error("{0}")]
    Resource(#[from] wire::ResourceDecodeError),
    #[error(
        "this data plane does not subscribe to resources of type {0}; fix: run a controller of this data plane's version"
    )]
    NotSubscribed(String),
    #[error("{0:?} is not a generation; fix: write a decimal number in system_version_info")]
    Generation(String),
    #[error(
        "generation {offered} is older than {current}, which this data plane holds of the same store; fix: remove this data plane's state file and restart it, if the controller's store was restored on purpose"
    )]
    Stale { offered: u64, current: u64 },
    #[error("{name}: {why}")]
    Envelope { name: String, why: &'static str },
    #[error("{0}")]
    Caller(String),
}

impl NackReason {
    pub(super) fn reason(&self) -> &'static str {
        match self {
            NackReason::Resource(wire::ResourceDecodeError::Type(_)) => "unknown_type",
            NackReason::Resource(_) => "bad_resource",
            NackReason::NotSubscribed(_) => "not_subscribed",
            NackReason::Generation(_) => "bad_generation",
            NackReason::Stale { .. } => "stale_generation",
            NackReason::Envelope { .. } => "bad_envelope",
            NackReason::Caller(_) => "refused",
        }
    }
}

/// Validates a response against the state, without changing anything. Bad resources are returned by
/// name, and the others form the change. `Err` means that the response itself is invalid.
pub(super) fn examine(
    state: &ResourceState,
    subscribed: &[ResourceKind],
    response: &DeltaDiscoveryResponse,
) -> Result<(ValidatedChange, Vec<RefusedResource>), NackReason> {
    let (kind, generation) = examine_header(state, subscribed, response)?;
    let mut named: HashMap<&str, usize> =
        HashMap::with_capacity(response.resources.len() + response.removed_resources.len());
    let names = response
        .resources
        .iter()
        .map(|r| &r.name)
        .chain(&response.removed_resources);
    names.for_each(|name| *named.entry(name).or_insert(0) += 1);
    let resources = state.kinds.get(&kind);
    let mut refused = Vec::new();
    let mut upserts = Vec::with_capacity(response.resources.len());
    for r in response
        .resources
        .iter()
        // Of a name that occurs twice, neither occurrence can be trusted.
        .filter(|r| named[r.name.as_str()] == 1)
    {
        match read(kind, r) {
            Err(refusal) => refused.push(RefusedResource {
                kind,
                name: r.name.clone(),
                label: refusal.reason(),
                why: refusal.to_string(),
            }),
            // A version that is in the state already is no change.
            Ok(_)
                if resources
                    .and_then(|m| m.get(r.name.as_str()))
                    .is_some_and(|h| *h.version == r.version) => {}
            Ok(resource) => {
                let resources = VersionedResource {
                    version: Arc::from(r.version.as_str()),
                    resource: Arc::new(resource),
                };
                upserts.push((Arc::from(r.name.as_str()), resources));
            }
        }
    }
    let removals: Vec<_> = response
        .removed_resources
        .iter()
        .filter(|name| named[name.as_str()] == 1)
        // A name that is not in the state needs no removal.
        .filter(|name| resources.is_some_and(|m| m.contains_key(name.as_str())))
        .map(|name| (kind, name.clone()))
        .collect();
    refuse_repeated(kind, &named, &mut refused);
    let tenants = named
        .keys()
        .filter_map(|name| kind.owner_of(name))
        .collect();
    let list = upserts.iter().map(|(_, h)| h.resource.clone()).collect();
    let update = Update {
        origin: UpdateSource::Controller,
        generation,
        upserts: list,
        removals,
    };
    Ok((
        ValidatedChange {
            kind,
            update,
            upserts,
            tenants,
        },
        refused,
    ))
}

/// Validates what a response says of itself, and returns its kind and its generation.
fn examine_header(
    state: &ResourceState,
    subscribed: &[ResourceKind],
    response: &DeltaDiscoveryResponse,
) -> Result<(ResourceKind, Generation), NackReason> {
    let kind = wire::kind_of(&response.type_url)?;
    if !subscribed.contains(&kind) {
        return Err(NackReason::NotSubscribed(response.type_url.clone()));
    }
    let generation = response.system_version_info.parse().map(Generation);
    let generation = generation.map_err(|_| {
        NackReason::Generation(response.system_version_info.chars().take(80).collect())
    })?;
    // Accepting an older generation would roll back security resources.
    if generation < state.generation {
        return Err(NackReason::Stale {
            offered: generation.0,
            current: state.generation.0,
        });
    }
    Ok((kind, generation))
}

/// Refuses the names that one response has more than once, in their order.
fn refuse_repeated(
    kind: ResourceKind,
    named: &HashMap<&str, usize>,
    refused: &mut Vec<RefusedResource>,
) {
    let mut twice: Vec<&str> = named
        .iter()
        .filter(|(_, count)| **count > 1)
        .map(|(name, _)| *name)
        .collect();
    twice.sort_unstable();
    for name in twice {
        let refusal = envelope(name, "is named twice in one response");
        refused.push(RefusedResource {
            kind,
            name: name.into(),
            label: refusal.reason(),
            why: refusal.to_string(),
        });
    }
}

fn envelope(name: &str, why: &'static str) -> NackReason {
    NackReason::Envelope {
        name: name.chars().take(200).collect(),
        why,
    }
}

/// Decodes one resource, even if its version is in the state already.
fn read(kind: ResourceKind, r: &Envelope) -> Result<Resource, NackReason> {
    let body = r
        .resource
        .as_ref()
        .ok_or_else(|| envelope(&r.name, "contains no resource"))?;
    if body.type_url != kind.type_url() {
        return Err(envelope(&r.name, "contains another type than the response"));
    }
    Ok(wire::decode(kind, &r.name, &body.value)?)
}

//! What is held, and whether a response may change it. Pure: a response is examined resource by resource before anything changes, and what
//! the caller refuses is undone.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use canal_model::ids::{Generation, StoreId, TenantName};
use canal_model::program::{Kind, Resource};
use canal_wire::discovery::{DeltaDiscoveryResponse, Resource as Envelope};
use canal_wire::southbound as wire;

use super::closure::{ClosedTenants, tenant_of};
use super::{Origin, RefusedResource, Update};

/// The full view: every resource held, by kind and name, with its version. Cloning it copies the tables, not the resources.
#[derive(Debug, Clone, Default)]
pub struct State {
    /// The controller's store that all of it is of; `None`: no controller named one yet.
    pub(super) store: Option<StoreId>,
    pub(super) generation: Generation,
    pub(super) kinds: BTreeMap<Kind, HashMap<Arc<str>, Held>>,
    pub(super) closed: Arc<ClosedTenants>,
    /// Tenants whose security resources changed since their last manifest.
    pub(super) unsealed: BTreeSet<TenantName>,
}

/// A resource with its version.
#[derive(Debug, Clone)]
pub struct Held {
    pub version: Arc<str>,
    pub resource: Arc<Resource>,
}

impl State {
    /// The newest generation accepted.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The controller's store that all of it is of.
    pub fn store(&self) -> Option<StoreId> {
        self.store
    }

    /// Names that are held here and not in `other`.
    pub(super) fn missing_in(&self, other: &State) -> Vec<(Kind, String)> {
        let all = self.kinds.iter().flat_map(|(kind, held)| held.keys().map(|name| (*kind, name)));
        all.filter(|(kind, name)| other.get(*kind, name).is_none()).map(|(kind, name)| (kind, name.to_string())).collect()
    }

    /// All of a kind, in no order.
    pub fn of(&self, kind: Kind) -> impl Iterator<Item = &Arc<Resource>> {
        self.kinds.get(&kind).into_iter().flat_map(|m| m.values().map(|h| &h.resource))
    }

    /// One by its wire name.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        self.kinds.get(&kind)?.get(name).map(|h| &h.resource)
    }

    /// How many of a kind.
    pub fn count(&self, kind: Kind) -> usize {
        self.kinds.get(&kind).map_or(0, HashMap::len)
    }

    /// A state of these, for tests of what is done with one.
    #[cfg(any(test, feature = "testing"))]
    pub fn of_resources(resources: Vec<Arc<Resource>>, generation: Generation) -> Self {
        let mut state = Self { generation, ..Self::default() };
        for resource in resources {
            let name = Arc::from(resource.name());
            state.kinds.entry(resource.kind()).or_default().insert(name, Held { version: Arc::from("1"), resource });
        }
        state
    }

    /// The same state with these tenants closed, for tests of what is done with one.
    #[cfg(any(test, feature = "testing"))]
    pub fn closing(mut self, closed: ClosedTenants) -> Self {
        self.closed = Arc::new(closed);
        self
    }

    /// Everything of a kind with its name and version, in no order.
    pub fn held(&self, kind: Kind) -> impl Iterator<Item = (&Arc<str>, &Held)> {
        self.kinds.get(&kind).into_iter().flatten()
    }

    /// Applies a change; what it returns undoes it.
    pub(super) fn apply(&mut self, change: &Change) -> Undo {
        let (closed, unsealed) = (self.closed.clone(), self.unsealed.clone());
        let mut undo = Undo { generation: self.generation, closed, unsealed, replaced: Vec::new() };
        self.generation = change.update.generation;
        match change.kind {
            Kind::Manifest => self.unsealed.retain(|tenant| !change.tenants.contains(tenant)),
            kind if kind.is_security() && !change.is_empty() => self.unsealed.extend(change.tenants.iter().cloned()),
            _ => {}
        }
        for (name, held) in &change.upserts {
            let kind = held.resource.kind();
            let old = self.kinds.entry(kind).or_default().insert(name.clone(), held.clone());
            undo.replaced.push((kind, name.clone(), old));
        }
        for (kind, name) in &change.update.removals {
            if let Some((name, old)) = self.kinds.get_mut(kind).and_then(|m| m.remove_entry(name.as_str())) {
                undo.replaced.push((*kind, name, Some(old)));
            }
        }
        undo
    }

    /// Takes a refused change back.
    pub(super) fn undo(&mut self, undo: Undo) {
        self.generation = undo.generation;
        self.closed = undo.closed;
        self.unsealed = undo.unsealed;
        for (kind, name, old) in undo.replaced {
            self.put(kind, name, old);
        }
    }

    /// Takes back what a change did to one resource.
    pub(super) fn restore(&mut self, undo: &Undo, kind: Kind, name: &str) {
        if let Some((_, name, old)) = undo.replaced.iter().find(|(k, n, _)| *k == kind && &**n == name) {
            self.put(kind, name.clone(), old.clone());
        }
    }

    fn put(&mut self, kind: Kind, name: Arc<str>, held: Option<Held>) {
        let map = self.kinds.entry(kind).or_default();
        match held {
            Some(held) => map.insert(name, held),
            None => map.remove(&name),
        };
    }

    /// Drops one resource.
    pub(super) fn remove(&mut self, kind: Kind, name: &str) {
        self.put(kind, name.into(), None);
    }

    /// Takes one resource over from another state.
    pub(super) fn copy(&mut self, from: &State, kind: Kind, name: &str) {
        if let Some((name, held)) = from.kinds.get(&kind).and_then(|m| m.get_key_value(name)) {
            self.put(kind, name.clone(), Some(held.clone()));
        }
    }
}

/// How to go back.
pub(super) struct Undo {
    generation: Generation,
    closed: Arc<ClosedTenants>,
    unsealed: BTreeSet<TenantName>,
    replaced: Vec<(Kind, Arc<str>, Option<Held>)>,
}

/// A response that was examined and found good.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) kind: Kind,
    pub(super) update: Update,
    pub(super) upserts: Vec<(Arc<str>, Held)>,
    /// Tenants that the response names, with new versions or not; the provider is none.
    pub(super) tenants: BTreeSet<TenantName>,
}

impl Change {
    /// The same change in two parts that share no tenant; `None`: it is one tenant's, or the provider's.
    pub(super) fn split(&self) -> Option<[Change; 2]> {
        let owner = |name: &str| if self.kind == Kind::Replica { None } else { tenant_of(name) };
        let names = self.upserts.iter().map(|(name, _)| &**name).chain(self.update.removals.iter().map(|(_, name)| name.as_str()));
        let owners: BTreeSet<Option<TenantName>> = names.map(owner).collect();
        let middle = owners.iter().nth(owners.len() / 2).filter(|_| owners.len() > 1)?;
        let part = |is_mine: &dyn Fn(&Option<TenantName>) -> bool| {
            let upserts: Vec<_> = self.upserts.iter().filter(|(name, _)| is_mine(&owner(name))).cloned().collect();
            let removals = self.update.removals.iter().filter(|(_, name)| is_mine(&owner(name))).cloned().collect();
            let list = upserts.iter().map(|(_, held)| held.resource.clone()).collect();
            let tenants = self.tenants.iter().filter(|tenant| is_mine(&Some((*tenant).clone()))).cloned().collect();
            Change { kind: self.kind, update: Update { upserts: list, removals, ..self.update.clone() }, upserts, tenants }
        };
        Some([part(&|owner| owner < middle), part(&|owner| owner >= middle)])
    }

    /// Names that the change touches.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        self.upserts.iter().map(|(name, _)| name.to_string()).chain(self.update.removals.iter().map(|(_, name)| name.clone()))
    }

    /// Nothing that the caller needs to hear of: an ack, a repeated version, an empty first response.
    pub(super) fn is_empty(&self) -> bool {
        self.update.upserts.is_empty() && self.update.removals.is_empty()
    }
}

/// Why a response (or a snapshot's entry) is refused. The name is the label `reason`; the text is the nack's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("{0}")]
    Resource(#[from] wire::WireError),
    #[error("{0} was not subscribed to")]
    NotSubscribed(String),
    #[error("{0:?} is not a generation: write a decimal number in system_version_info")]
    Generation(String),
    #[error(
        "generation {offered} is older than {held}, which this data plane holds of the same store; if the controller's store was set back on \
         purpose, remove this data plane's snapshot file and restart it"
    )]
    Stale { offered: u64, held: u64 },
    #[error("{name}: {why}")]
    Envelope { name: String, why: &'static str },
    #[error("{0}")]
    Caller(String),
}

impl Refusal {
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Refusal::Resource(wire::WireError::Type(_)) => "unknown_type",
            Refusal::Resource(_) => "bad_resource",
            Refusal::NotSubscribed(_) => "not_subscribed",
            Refusal::Generation(_) => "bad_generation",
            Refusal::Stale { .. } => "stale_generation",
            Refusal::Envelope { .. } => "bad_envelope",
            Refusal::Caller(_) => "refused",
        }
    }
}

/// Examines a response against what is held; changes nothing. Resources that are not good are given back by name, the others make the
/// change; `Err`: the response itself cannot be taken.
pub(super) fn examine(
    state: &State,
    subscribed: &[Kind],
    response: &DeltaDiscoveryResponse,
) -> Result<(Change, Vec<RefusedResource>), Refusal> {
    let kind = wire::kind_of(&response.type_url)?;
    if !subscribed.contains(&kind) {
        return Err(Refusal::NotSubscribed(response.type_url.clone()));
    }
    let generation = response.system_version_info.parse().map(Generation);
    let generation = generation.map_err(|_| Refusal::Generation(response.system_version_info.chars().take(80).collect()))?;
    if generation < state.generation {
        return Err(Refusal::Stale { offered: generation.0, held: state.generation.0 });
    }
    let mut named: HashMap<&str, usize> = HashMap::with_capacity(response.resources.len() + response.removed_resources.len());
    let names = response.resources.iter().map(|r| &r.name).chain(&response.removed_resources);
    names.for_each(|name| *named.entry(name).or_insert(0) += 1);
    let held = state.kinds.get(&kind);
    let mut refused = Vec::new();
    let mut upserts = Vec::with_capacity(response.resources.len());
    for r in response.resources.iter().filter(|r| named[r.name.as_str()] == 1) {
        match read(kind, r) {
            Err(refusal) => refused.push(RefusedResource { kind, name: r.name.clone(), label: refusal.reason(), why: refusal.to_string() }),
            // A version that is held already is no change.
            Ok(_) if held.and_then(|m| m.get(r.name.as_str())).is_some_and(|h| *h.version == r.version) => {}
            Ok(resource) => {
                let held = Held { version: Arc::from(r.version.as_str()), resource: Arc::new(resource) };
                upserts.push((Arc::from(r.name.as_str()), held));
            }
        }
    }
    let mut removals = Vec::with_capacity(response.removed_resources.len());
    for name in response.removed_resources.iter().filter(|name| named[name.as_str()] == 1) {
        if held.is_some_and(|m| m.contains_key(name.as_str())) {
            removals.push((kind, name.clone()));
        }
    }
    let mut twice: Vec<&str> = named.iter().filter(|(_, count)| **count > 1).map(|(name, _)| *name).collect();
    twice.sort_unstable();
    for name in twice {
        let refusal = envelope(name, "is named twice in one response");
        refused.push(RefusedResource { kind, name: name.into(), label: refusal.reason(), why: refusal.to_string() });
    }
    let tenants = if kind == Kind::Replica { BTreeSet::new() } else { named.keys().filter_map(|name| tenant_of(name)).collect() };
    let list = upserts.iter().map(|(_, h)| h.resource.clone()).collect();
    let update = Update { origin: Origin::Controller, generation, upserts: list, removals };
    Ok((Change { kind, update, upserts, tenants }, refused))
}

fn envelope(name: &str, why: &'static str) -> Refusal {
    Refusal::Envelope { name: name.chars().take(200).collect(), why }
}

/// Decodes one resource, even if its version is held.
fn read(kind: Kind, r: &Envelope) -> Result<Resource, Refusal> {
    let body = r.resource.as_ref().ok_or_else(|| envelope(&r.name, "holds no resource"))?;
    if body.type_url != wire::type_url(kind) {
        return Err(envelope(&r.name, "holds another type than the response"));
    }
    Ok(wire::decode(kind, &r.name, &body.value)?)
}

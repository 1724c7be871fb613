//! What is held, and whether a response may change it. Pure: a response is examined whole before anything changes, and a change that
//! the caller refuses is undone whole.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use canal_model::ids::Generation;
use canal_model::program::{Kind, Resource};
use canal_wire::discovery::DeltaDiscoveryResponse;
use canal_wire::southbound as wire;

use super::{Origin, Update};

/// The full view: every resource held, by kind and name, with its version. Cloning it copies the tables, not the resources.
#[derive(Debug, Clone, Default)]
pub struct State {
    pub(super) generation: Generation,
    pub(super) kinds: BTreeMap<Kind, HashMap<Arc<str>, Held>>,
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
        let mut state = Self { generation, kinds: BTreeMap::new() };
        for resource in resources {
            let name = Arc::from(resource.name());
            state.kinds.entry(resource.kind()).or_default().insert(name, Held { version: Arc::from("1"), resource });
        }
        state
    }

    /// Everything of a kind with its name and version, in no order.
    pub fn held(&self, kind: Kind) -> impl Iterator<Item = (&Arc<str>, &Held)> {
        self.kinds.get(&kind).into_iter().flatten()
    }

    /// Applies a change; what it returns undoes it.
    pub(super) fn apply(&mut self, change: &Change) -> Undo {
        let mut undo = Undo { generation: self.generation, replaced: Vec::new() };
        self.generation = change.update.generation;
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
        for (kind, name, old) in undo.replaced {
            let map = self.kinds.entry(kind).or_default();
            match old {
                Some(old) => map.insert(name, old),
                None => map.remove(&name),
            };
        }
    }
}

/// How to go back.
pub(super) struct Undo {
    generation: Generation,
    replaced: Vec<(Kind, Arc<str>, Option<Held>)>,
}

/// A response that was examined and found good.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) kind: Kind,
    pub(super) update: Update,
    pub(super) upserts: Vec<(Arc<str>, Held)>,
}

impl Change {
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
        "generation {offered} is older than {held}, which this data plane holds; if the controller's store was replaced on purpose, \
         remove this data plane's snapshot file and restart it"
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

/// Examines a whole response against what is held; changes nothing.
pub(super) fn examine(state: &State, subscribed: &[Kind], response: &DeltaDiscoveryResponse) -> Result<Change, Refusal> {
    let kind = wire::kind_of(&response.type_url)?;
    if !subscribed.contains(&kind) {
        return Err(Refusal::NotSubscribed(response.type_url.clone()));
    }
    let generation = response.system_version_info.parse().map(Generation);
    let generation = generation.map_err(|_| Refusal::Generation(response.system_version_info.chars().take(80).collect()))?;
    if generation < state.generation {
        return Err(Refusal::Stale { offered: generation.0, held: state.generation.0 });
    }
    let envelope = |name: &str, why| Refusal::Envelope { name: name.chars().take(200).collect(), why };
    let held = state.kinds.get(&kind);
    let mut named = HashSet::with_capacity(response.resources.len() + response.removed_resources.len());
    let mut upserts = Vec::with_capacity(response.resources.len());
    for r in &response.resources {
        if !named.insert(r.name.as_str()) {
            return Err(envelope(&r.name, "is named twice in one response"));
        }
        let body = r.resource.as_ref().ok_or_else(|| envelope(&r.name, "holds no resource"))?;
        if body.type_url != response.type_url {
            return Err(envelope(&r.name, "holds another type than the response"));
        }
        // Decoded even if the version is held: a response is judged as a whole.
        let resource = Arc::new(wire::decode(kind, &r.name, &body.value)?);
        if held.and_then(|m| m.get(r.name.as_str())).is_some_and(|h| *h.version == r.version) {
            continue;
        }
        upserts.push((Arc::from(r.name.as_str()), Held { version: Arc::from(r.version.as_str()), resource }));
    }
    let mut removals = Vec::with_capacity(response.removed_resources.len());
    for name in &response.removed_resources {
        if !named.insert(name) {
            return Err(envelope(name, "is named twice in one response"));
        }
        if held.is_some_and(|m| m.contains_key(name.as_str())) {
            removals.push((kind, name.clone()));
        }
    }
    let list = upserts.iter().map(|(_, h)| h.resource.clone()).collect();
    Ok(Change { kind, update: Update { origin: Origin::Controller, generation, upserts: list, removals }, upserts })
}

//! One subscriber's stream as a state machine: what it asked for, holds, was sent and refused, and what it is to be sent next. Pure.
//!
//! One batch at a time: a batch is everything that differs between what the subscriber holds and the catalog, parents before
//! children for what is new and children before parents for what goes, so that nothing ever refers to what is not there. The next
//! batch is formed once the last was answered; until then changes gather and cost nothing. Start reading at [`Session::hear`]
//! and [`Session::next_response`].

mod limits;
mod manifests;
mod refusals;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use canal_compiler::scope::{self, Whereabouts};
use canal_model::identity::PROVIDER;
use canal_model::ids::{Generation, TenantName};
use canal_model::principal::Principal;
use canal_model::program::Kind;
use canal_wire::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as WireResource};
use canal_wire::southbound::{kind_of, type_url};

use crate::catalog::{Catalog, Entry, Key, Owner, TenantView, Version};

use refusals::{Nack, SetAside};

pub use limits::{NACK_SPLITS_MAX, NAME_BYTES_MAX, NAMES_MAX, PENDING_MAX, RESPONSE_BYTES_MAX, STREAM_NAME_BYTES_MAX};
pub(crate) use limits::{SessionError, SessionLimits};
pub(crate) use refusals::{Refusals, TenantRefusals};

/// What a message from the subscriber was.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// A subscription was opened or changed.
    Subscription,
    Ack,
    Nack {
        reason: String,
    },
    /// An answer to a response that is not outstanding.
    Stale,
    /// A type that this build does not have; it is answered with nothing, so that a newer subscriber can go on.
    UnknownType,
}

/// How a subscriber stands, for `canal status`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) kinds: [bool; Kind::ALL.len()],
    /// Everything up to this generation was looked at.
    pub(crate) seen: Generation,
    pub(crate) wanted: Generation,
    pub(crate) sent: Generation,
    pub(crate) acked: Generation,
    /// The newest generation of which something was sent; other responses only say that nothing differs.
    pub(crate) content: Generation,
    /// The newest refusal that still stands.
    pub(crate) nack: String,
    /// What was refused and not changed since, by owner. [`Progress::acked`] holds for all other tenants.
    pub(crate) refusals: Arc<Refusals>,
    pub(crate) resources: usize,
}

#[derive(Debug, Default)]
struct Subscription {
    /// A first request was heard.
    open: bool,
    /// No response was planned since it opened; even an empty one tells the subscriber that it has everything.
    unanswered: bool,
    wildcard: bool,
    names: BTreeSet<Arc<str>>,
    /// Names to be answered even if nothing changed.
    asked: BTreeSet<Arc<str>>,
}

impl Subscription {
    fn covers(&self, name: &str) -> bool {
        self.open && (self.wildcard || self.names.contains(name))
    }
}

/// One line of a response.
#[derive(Debug, Clone)]
enum Item {
    Put(Arc<Entry>),
    Remove(Key),
}

impl Item {
    fn key(&self) -> Key {
        match self {
            Item::Put(e) => e.key(),
            Item::Remove(k) => k.clone(),
        }
    }
    fn version(&self) -> Option<Version> {
        match self {
            Item::Put(e) => Some(e.version),
            Item::Remove(_) => None,
        }
    }
    fn bytes(&self) -> usize {
        match self {
            // Name, version, type URL and framing.
            Item::Put(e) => e.body.len() + e.name.len() + 128,
            Item::Remove((_, name)) => name.len() + 8,
        }
    }
}

/// A response decided on and not sent yet.
#[derive(Debug)]
struct Planned {
    url: String,
    generation: Generation,
    items: Vec<Item>,
}

/// One subscriber's stream.
pub(crate) struct Session {
    principal: Principal,
    limits: SessionLimits,
    kinds: [Subscription; Kind::ALL.len()],
    held: HashMap<Owner, BTreeMap<Key, Version>>,
    held_count: usize,
    /// What was refused and not changed since.
    refused: HashMap<Key, SetAside>,
    refusals: Arc<Refusals>,
    refusals_changed: bool,
    queue: VecDeque<Planned>,
    in_flight: VecDeque<(u64, Planned)>,
    nonce: u64,
    /// Refused responses that were cut in this batch, by tenant.
    splits: HashMap<Owner, usize>,
    /// No batch was formed yet: all manifests are sent with the first.
    manifests_due: bool,
    /// Bytes of names that this subscriber brought and the catalog did not have. Never given back: what comes and goes in the catalog
    /// would make the sum wrong.
    name_bytes: usize,
    /// Answers to unknown types that were not sent yet.
    unknown_pending: usize,
    /// Compare with the whole catalog, not only with what changed.
    resync: bool,
    admitted: BTreeSet<Owner>,
    /// Where services were when the catalog was last looked at.
    whereabouts: Arc<Whereabouts>,
    seen: Generation,
    wanted: Generation,
    sent: Generation,
    acked: Generation,
    content: Generation,
    last_nack: String,
}

impl Session {
    pub(crate) fn new(principal: Principal, limits: SessionLimits) -> Self {
        Self {
            principal,
            limits,
            kinds: Default::default(),
            held: HashMap::new(),
            held_count: 0,
            refused: HashMap::new(),
            refusals: Arc::default(),
            refusals_changed: false,
            queue: VecDeque::new(),
            in_flight: VecDeque::new(),
            nonce: 0,
            splits: HashMap::new(),
            manifests_due: true,
            name_bytes: 0,
            unknown_pending: 0,
            resync: true,
            admitted: BTreeSet::new(),
            whereabouts: Arc::default(),
            seen: Generation(0),
            wanted: Generation(0),
            sent: Generation(0),
            acked: Generation(0),
            content: Generation(0),
            last_nack: String::new(),
        }
    }

    /// Bytes of names that this subscriber brought and the catalog did not have.
    pub(crate) fn name_bytes(&self) -> usize {
        self.name_bytes
    }

    /// True once every kind was subscribed to: nothing more is to be expected before the first batch.
    pub(crate) fn is_fully_subscribed(&self) -> bool {
        self.kinds.iter().all(|k| k.open)
    }

    /// True while the subscriber owes an answer.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// [`Session::hear`] of a subscriber whose names nobody knows.
    #[cfg(test)]
    pub(crate) fn hear_alone(&mut self, request: DeltaDiscoveryRequest) -> Result<Heard, SessionError> {
        self.hear(request, &Catalog::default())
    }

    /// Takes one message in. Names that `catalog` has are kept as it has them, and cost nothing.
    pub(crate) fn hear(&mut self, request: DeltaDiscoveryRequest, catalog: &Catalog) -> Result<Heard, SessionError> {
        let Ok(kind) = kind_of(&request.type_url) else {
            if request.response_nonce.is_empty() {
                self.unknown_pending += 1;
                if self.unknown_pending > self.limits.pending {
                    return Err(SessionError::TooManyUnknownTypes { limit: self.limits.pending });
                }
                let url = request.type_url.chars().take(200).collect();
                self.queue.push_back(Planned { url, generation: self.seen, items: Vec::new() });
            } else {
                self.settle_nonce(&request.response_nonce, None);
            }
            return Ok(Heard::UnknownType);
        };
        let changed = self.subscribe(kind, &request, catalog)?;
        if request.response_nonce.is_empty() {
            return Ok(Heard::Subscription);
        }
        let nack = request.error_detail.as_ref().map(Nack::read);
        Ok(match self.settle_nonce(&request.response_nonce, nack.as_ref()) {
            false if changed => Heard::Subscription,
            false => Heard::Stale,
            true => nack.map_or(Heard::Ack, |nack| Heard::Nack { reason: nack.text }),
        })
    }

    /// Opens or changes the subscription to a kind. True when something changed.
    fn subscribe(&mut self, kind: Kind, request: &DeltaDiscoveryRequest, catalog: &Catalog) -> Result<bool, SessionError> {
        let names = self.admit_names(kind, request, catalog)?;
        let subscription = &mut self.kinds[kind as usize];
        let first = !subscription.open;
        if first {
            subscription.open = true;
            subscription.unanswered = true;
            // Naming nothing in the first request asks for everything (the xDS protocol's legacy wildcard).
            subscription.wildcard = request.resource_names_subscribe.is_empty();
        }
        for name in &request.resource_names_subscribe {
            if name == "*" {
                subscription.wildcard = true;
            } else {
                let name = names.get(name.as_str()).cloned().unwrap_or_else(|| name.as_str().into());
                subscription.names.insert(name.clone());
                subscription.asked.insert(name);
            }
        }
        for name in &request.resource_names_unsubscribe {
            if name == "*" {
                subscription.wildcard = false;
            } else {
                subscription.names.remove(name.as_str());
                subscription.asked.remove(name.as_str());
            }
        }
        let changed = first || !request.resource_names_subscribe.is_empty() || !request.resource_names_unsubscribe.is_empty();
        if first {
            for (name, version) in &request.initial_resource_versions {
                let name = names.get(name.as_str()).cloned().unwrap_or_else(|| name.as_str().into());
                self.hold((kind, name), Version::read(version));
            }
        }
        if changed {
            self.resync = true;
            self.manifests_due = true;
            self.forget_uncovered(kind);
        }
        let named = self.held_count + self.kinds.iter().map(|k| k.names.len()).sum::<usize>();
        if named > self.limits.names { Err(SessionError::TooManyNames { named, limit: self.limits.names }) } else { Ok(changed) }
    }

    /// Checks the names of a request before any is kept; gives those that the catalog has.
    fn admit_names<'r>(
        &mut self,
        kind: Kind,
        request: &'r DeltaDiscoveryRequest,
        catalog: &Catalog,
    ) -> Result<HashMap<&'r str, Arc<str>>, SessionError> {
        let first = !self.kinds[kind as usize].open;
        let versions = request.initial_resource_versions.keys().filter(|_| first);
        let all = || request.resource_names_subscribe.iter().chain(&request.resource_names_unsubscribe);
        let longest = versions.clone().chain(all()).map(String::len).max().unwrap_or(0);
        if longest > self.limits.name_bytes {
            return Err(SessionError::NameTooLong { bytes: longest, limit: self.limits.name_bytes });
        }
        let mut known = HashMap::new();
        let mut foreign = 0;
        for name in request.resource_names_subscribe.iter().chain(versions) {
            let key: Key = (kind, name.as_str().into());
            match catalog.view(&owner_of(&key)).and_then(|view| view.entries.get_key_value(&key)) {
                Some(((_, name_there), _)) => _ = known.insert(name.as_str(), name_there.clone()),
                None if self.kinds[kind as usize].names.contains(name.as_str()) => {}
                None => foreign += name.len(),
            }
        }
        self.name_bytes += foreign;
        if self.name_bytes > self.limits.stream_name_bytes {
            return Err(SessionError::TooManyNameBytes { bytes: self.name_bytes, limit: self.limits.stream_name_bytes });
        }
        Ok(known)
    }

    /// A subscriber drops what it unsubscribed from by itself; it is not told again.
    fn forget_uncovered(&mut self, kind: Kind) {
        let subscription = &self.kinds[kind as usize];
        if subscription.wildcard {
            return;
        }
        for held in self.held.values_mut() {
            held.retain(|(k, name), _| *k != kind || subscription.names.contains(name));
        }
        self.held_count = self.held.values().map(BTreeMap::len).sum();
    }

    /// Applies an answer to the response it names. False: no such response is outstanding.
    fn settle_nonce(&mut self, nonce: &str, nack: Option<&Nack>) -> bool {
        let Some(at) = nonce.parse::<u64>().ok().and_then(|n| self.in_flight.iter().position(|(x, _)| *x == n)) else {
            return false;
        };
        let Some((_, planned)) = self.in_flight.remove(at) else { return false };
        match nack {
            None => self.accept(planned.items),
            Some(nack) => self.refuse(planned, nack),
        }
        if self.in_flight.is_empty() && self.queue.is_empty() {
            self.settle(self.sent);
        }
        true
    }

    fn accept(&mut self, items: Vec<Item>) {
        for item in items {
            let key = item.key();
            self.forget_refusal(&key);
            match item.version() {
                Some(version) => self.hold(key, version),
                None => self.drop_held(&key),
            }
        }
    }

    fn hold(&mut self, key: Key, version: Version) {
        let held = self.held.entry(owner_of(&key)).or_default();
        if held.insert(key, version).is_none() {
            self.held_count += 1;
        }
    }

    fn drop_held(&mut self, key: &Key) {
        let owner = owner_of(key);
        if let Some(held) = self.held.get_mut(&owner) {
            if held.remove(key).is_some() {
                self.held_count -= 1;
            }
            if held.is_empty() {
                self.held.remove(&owner);
            }
        }
    }

    /// The next response to send, if there is one now.
    pub(crate) fn next_response(&mut self, catalog: &Catalog) -> Option<DeltaDiscoveryResponse> {
        if self.queue.is_empty() && self.in_flight.is_empty() {
            self.form_batch(catalog);
        }
        if self.in_flight.len() >= self.limits.pending {
            return None;
        }
        let mut planned = self.queue.pop_front()?;
        if kind_of(&planned.url).is_err() {
            self.unknown_pending -= 1;
        }
        if self.seen == Generation(0) {
            // Only the answer to an unknown type comes before the first batch; a receiver never goes back, so it must not say 0.
            planned.generation = catalog.generation;
        }
        self.nonce += 1;
        self.sent = self.sent.max(planned.generation);
        if !planned.items.is_empty() {
            self.content = self.content.max(planned.generation);
        }
        let response = encode(&planned, self.nonce);
        self.in_flight.push_back((self.nonce, planned));
        Some(response)
    }

    fn form_batch(&mut self, catalog: &Catalog) {
        let unanswered = self.kinds.iter().any(|k| k.unanswered);
        if self.seen == catalog.generation && !self.resync && !unanswered {
            return;
        }
        // Services that moved change what a gateway sees of resources that did not change.
        self.resync |= self.whereabouts != catalog.whereabouts && matches!(self.principal, Principal::Gateway { .. });
        self.whereabouts = catalog.whereabouts.clone();
        let items = self.differences(catalog);
        self.seen = catalog.generation;
        self.resync = false;
        self.plan(items, catalog.generation);
        for k in &mut self.kinds {
            k.asked.clear();
            k.unanswered &= !k.open;
        }
        if self.queue.is_empty() {
            // Nothing differs: what concerned this subscriber is what it holds already, but for what it refuses.
            self.sent = self.sent.max(self.wanted);
            self.settle(self.wanted);
        }
    }

    /// Every line that must be sent so that the subscriber holds what the catalog says.
    fn differences(&mut self, catalog: &Catalog) -> Vec<Item> {
        let admitted: BTreeSet<Owner> = catalog.concerning(&self.principal).map(|(owner, _)| owner).collect();
        let owners: BTreeSet<Owner> = admitted.iter().chain(self.admitted.iter()).chain(self.held.keys()).cloned().collect();
        let mut items = Vec::new();
        // Also of tenants of which nothing differs: a resource that was refused and is gone is no longer sealed.
        let mut resealed = BTreeSet::new();
        for owner in &owners {
            let view = catalog.view(owner);
            let is_admitted = admitted.contains(owner);
            let whole = self.resync || is_admitted != self.admitted.contains(owner);
            let keys = match view.filter(|_| is_admitted && !whole).and_then(|v| v.deltas_after(self.seen)) {
                Some(deltas) => deltas.flat_map(|d| d.touches.iter().map(|t| t.key.clone())).collect(),
                None => self.all_keys(owner, view.filter(|_| is_admitted)),
            };
            for key in keys {
                if key.0.is_security() {
                    resealed.extend(owner.clone());
                }
                items.extend(self.difference(key, owner, view.map(Arc::as_ref), is_admitted, catalog.generation));
            }
        }
        items.extend(self.unknown_names(&items));
        items.extend(self.manifests(&items, resealed, &admitted, catalog));
        self.admitted = admitted;
        items
    }

    fn all_keys(&self, owner: &Owner, view: Option<&Arc<TenantView>>) -> BTreeSet<Key> {
        // Manifests are in no catalog; they are compared on their own.
        let held = self.held.get(owner).into_iter().flat_map(|h| h.keys()).filter(|(kind, _)| *kind != Kind::Manifest);
        let offered = view.into_iter().flat_map(|v| v.entries.keys());
        held.chain(offered).filter(|(kind, name)| self.kinds[*kind as usize].covers(name)).cloned().collect()
    }

    fn difference(
        &mut self,
        key: Key,
        owner: &Owner,
        view: Option<&TenantView>,
        is_admitted: bool,
        generation: Generation,
    ) -> Option<Item> {
        let subscription = &self.kinds[key.0 as usize];
        if !subscription.covers(&key.1) {
            return None;
        }
        let asked = subscription.asked.contains(&key.1);
        let is_visible = |e: &&Arc<Entry>| scope::visible(&e.resource, &self.principal, &self.whereabouts);
        let offered = view.filter(|_| is_admitted).and_then(|v| v.entries.get(&key)).filter(is_visible);
        let held = self.held.get(owner).and_then(|h| h.get(&key));
        let refused = self.refused.get(&key).map(|aside| aside.version);
        match (offered, held) {
            (Some(entry), held) => {
                self.wanted = self.wanted.max(entry.changed);
                if held == Some(&entry.version) && !asked {
                    self.forget_refusal(&key);
                    return None;
                }
                (refused != Some(Some(entry.version)) || asked).then(|| Item::Put(entry.clone()))
            }
            (None, Some(_)) => {
                // What could not be read is not gone.
                if view.is_some_and(|v| !v.complete) {
                    return None;
                }
                self.wanted = self.wanted.max(generation);
                (refused != Some(None) || asked).then_some(Item::Remove(key))
            }
            (None, None) => {
                self.forget_refusal(&key);
                asked.then_some(Item::Remove(key))
            }
        }
    }

    /// Names asked for that nothing carries are answered as removed, so that the subscriber need not wait.
    fn unknown_names(&self, found: &[Item]) -> Vec<Item> {
        let answered: BTreeSet<Key> = found.iter().map(Item::key).collect();
        let is_held = |key: &Key| self.held.get(&owner_of(key)).is_some_and(|h| h.contains_key(key));
        let asked = Kind::ALL.into_iter().flat_map(|kind| self.kinds[kind as usize].asked.iter().map(move |n| (kind, n.clone())));
        asked.filter(|key| key.0 != Kind::Manifest && !answered.contains(key) && !is_held(key)).map(Item::Remove).collect()
    }

    /// Puts the lines into responses: new and changed ones parents first, then removals children first.
    fn plan(&mut self, items: Vec<Item>, generation: Generation) {
        // Manifests stand after everything that they seal, removals too.
        let (manifests, items): (Vec<Item>, Vec<Item>) = items.into_iter().partition(|i| i.key().0 == Kind::Manifest);
        let kinds: BTreeSet<Kind> = items.iter().map(|i| i.key().0).collect();
        let one_kind = kinds.len() == 1;
        let mut puts: BTreeMap<Kind, Vec<Item>> = BTreeMap::new();
        let mut removals: BTreeMap<Kind, Vec<Item>> = BTreeMap::new();
        for item in items {
            let kind = item.key().0;
            // With a single kind there is no order to keep between responses.
            let side = if one_kind || matches!(item, Item::Put(_)) { &mut puts } else { &mut removals };
            side.entry(kind).or_default().push(item);
        }
        let unanswered = |kind: Kind| self.kinds[kind as usize].open && self.kinds[kind as usize].unanswered;
        for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Manifest && unanswered(*kind)) {
            puts.entry(kind).or_default();
        }
        let with_manifests = !manifests.is_empty() || unanswered(Kind::Manifest);
        for (kind, items) in puts {
            self.enqueue(kind, items, generation);
        }
        for (kind, items) in removals.into_iter().rev() {
            self.enqueue(kind, items, generation);
        }
        if with_manifests {
            self.enqueue(Kind::Manifest, manifests, generation);
        }
    }

    fn enqueue(&mut self, kind: Kind, items: Vec<Item>, generation: Generation) {
        let mut items = items.into_iter().peekable();
        loop {
            let mut bytes = 0;
            let mut part = Vec::new();
            while let Some(item) = items.next_if(|i| part.is_empty() || bytes + i.bytes() <= self.limits.response_bytes) {
                bytes += item.bytes();
                part.push(item);
            }
            self.queue.push_back(Planned { url: type_url(kind).into(), generation, items: part });
            if items.peek().is_none() {
                return;
            }
        }
    }

    pub(crate) fn progress(&self) -> Progress {
        let kinds = std::array::from_fn(|i| self.kinds[i].open);
        Progress {
            kinds,
            seen: self.seen,
            wanted: self.wanted,
            sent: self.sent,
            acked: self.acked,
            content: self.content,
            refusals: self.refusals.clone(),
            nack: if self.refused.is_empty() && self.queue.is_empty() { String::new() } else { self.last_nack.clone() },
            resources: self.held_count,
        }
    }
}

/// Names begin with their tenant, those of replicas do not; where the provider stands for a tenant, it is the provider's. A name that is not
/// one of ours is nobody's, and nobody offers it.
fn owner_of((kind, name): &Key) -> Owner {
    match kind {
        Kind::Replica => None,
        _ => name.split('/').next().filter(|first| *first != PROVIDER).and_then(|first| TenantName::new(first).ok()),
    }
}

fn encode(planned: &Planned, nonce: u64) -> DeltaDiscoveryResponse {
    let mut resources = Vec::new();
    let mut removed_resources = Vec::new();
    for item in &planned.items {
        match item {
            Item::Put(e) => resources.push(WireResource {
                name: e.name.to_string(),
                version: e.version.to_string(),
                resource: Some(prost_types::Any { type_url: planned.url.clone(), value: e.body.clone() }),
            }),
            Item::Remove((_, name)) => removed_resources.push(name.to_string()),
        }
    }
    DeltaDiscoveryResponse {
        system_version_info: planned.generation.to_string(),
        resources,
        type_url: planned.url.clone(),
        removed_resources,
        nonce: nonce.to_string(),
        control_plane: None,
    }
}

#[cfg(test)]
mod tests;

//! One subscriber's stream as a state machine: what it subscribed to, holds, was sent and refused,
//! and what it is sent next. Pure.
//!
//! There is one batch at a time. A batch is everything that differs between what the subscriber
//! holds and the catalog. New resources come parents before children, and removals children before
//! parents, so that no resource ever refers to a missing one. The next batch is formed when the
//! last one has been answered; until then changes gather and cost nothing.
//!
//! Start at [`SubscriberStream::handle_request`] and [`SubscriberStream::next_response`].

mod limits;
mod manifests;
mod names;
mod refusals;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use canal_catalog::{
    Catalog, EncodedResource, ResourceId, ResourceOwner, ResourceVersion, TenantCatalog,
};
use canal_compiler::scope::{self, TierPlacement};
use canal_model::ids::Generation;
use canal_model::principal::Principal;
use canal_model::program::ResourceKind;
use canal_wire::discovery::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as WireResource,
};
use canal_wire::southbound::{RESPONSE_PARTS_FEATURE, kind_of};

use names::{HeldResource, HeldResources};
use refusals::{ReceivedNack, SetAside};

pub use limits::SessionLimits;
pub(crate) use limits::StreamLimitError;
pub use limits::{
    NACK_SPLITS_MAX, NAME_BYTES_MAX, NAMES_MAX, PART_BYTES_MAX, PENDING_MAX, RESPONSE_BYTES_MAX,
    STREAM_NAME_BYTES_MAX,
};
use limits::{NAME_OVERHEAD_BYTES, OUT_OF_SCOPE_BYTES_MAX};
pub(crate) use refusals::{Refusals, TenantRefusals};

/// The meaning of a message from the subscriber.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SubscriberMessage {
    /// A subscription was opened or changed.
    Subscription,
    Ack,
    Nack {
        reason: String,
    },
    /// An ACK or NACK of a response that is not outstanding.
    Stale,
    /// A request for a type that this build does not have. It gets an empty response, so that a
    /// newer subscriber can go on.
    UnknownType,
}

/// Progress of a subscriber, for `canal status`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SubscriberProgress {
    pub(crate) kinds: [bool; ResourceKind::ALL.len()],
    /// The catalog was compared up to this generation.
    pub(crate) compared: Generation,
    /// Newest generation with a change that concerns the subscriber. It has converged once it
    /// acknowledged that one.
    pub(crate) target: Generation,
    pub(crate) sent: Generation,
    pub(crate) acked: Generation,
    /// Newest generation of which a resource was sent; other responses only confirm that nothing
    /// differs.
    pub(crate) content: Generation,
    /// Text of the newest NACK that still stands.
    pub(crate) nack: String,
    /// Refused resources that have not changed since, by owner. [`SubscriberProgress::acked`] holds
    /// for all other tenants.
    pub(crate) refusals: Arc<Refusals>,
    pub(crate) resources: usize,
}

/// The subscription to one kind of resource.
#[derive(Debug, Default)]
struct Subscription {
    /// True once a first request was received.
    open: bool,
    /// True until a response is planned: even an empty one shows the subscriber that it has
    /// everything.
    unanswered: bool,
    wildcard: bool,
    /// Names that the subscriber asked for, each with the bytes that it is charged for it.
    names: BTreeMap<Arc<str>, usize>,
    /// Names that get an answer even if nothing changed.
    requested: BTreeSet<Arc<str>>,
}

impl Subscription {
    fn covers(&self, name: &str) -> bool {
        self.open && (self.wildcard || self.names.contains_key(name))
    }
}

/// One resource or one removal in a response.
#[derive(Debug, Clone)]
enum Item {
    Put(Arc<EncodedResource>),
    Remove(ResourceId),
}

impl Item {
    fn key(&self) -> ResourceId {
        match self {
            Item::Put(e) => e.key(),
            Item::Remove(k) => k.clone(),
        }
    }
    fn version(&self) -> Option<ResourceVersion> {
        match self {
            Item::Put(e) => Some(e.version),
            Item::Remove(_) => None,
        }
    }
    fn bytes(&self) -> usize {
        match self {
            // The constant stands for version, type URL and framing.
            Item::Put(e) => e.body.len() + e.name.len() + 128,
            // Tag and length of a repeated field; the sum is approximate.
            Item::Remove((_, name)) => name.len() + 8,
        }
    }
}

/// A planned response that the subscriber has not answered yet.
#[derive(Debug)]
struct PendingResponse {
    url: String,
    generation: Generation,
    items: Vec<Item>,
}

/// The state of one subscriber's stream.
pub(crate) struct SubscriberStream {
    principal: Principal,
    limits: SessionLimits,
    kinds: [Subscription; ResourceKind::ALL.len()],
    /// Resources that the subscriber holds.
    held_resources: HeldResources,
    /// Names outside the principal's scope that the subscriber listed as held. The next batch
    /// removes them.
    out_of_scope: BTreeSet<ResourceId>,
    /// Number of listed names outside the scope that were not counted yet.
    names_out_of_scope: u64,
    /// Refused resources that have not changed since.
    refused: HashMap<ResourceId, SetAside>,
    refusals: Arc<Refusals>,
    refusals_changed: bool,
    queue: VecDeque<PendingResponse>,
    in_flight: VecDeque<(u64, PendingResponse)>,
    /// Number of items of the newest response in flight that were sent, while parts of it are left.
    part_begin: Option<usize>,
    /// True if the subscriber joins the parts of a response.
    joins_parts: bool,
    nonce: u64,
    /// Number of refused responses that were split in this batch, by tenant.
    splits: HashMap<ResourceOwner, usize>,
    /// All manifests are sent with the next batch: it is the first, or a subscription changed.
    manifests_due: bool,
    /// Bytes that are charged for the names in all subscriptions.
    subscribed_bytes: usize,
    /// Number of responses to unknown types that were not sent yet.
    unknown_pending: usize,
    /// True if the next batch is compared with the whole catalog, not only with what changed.
    resync: bool,
    /// Number of tenants that were compared as a whole because their log begins too late, and that
    /// were not counted yet.
    behind_log: u64,
    /// Owners in scope when the catalog was last compared.
    admitted: BTreeSet<ResourceOwner>,
    /// Placement of services when the catalog was last compared.
    placement: Arc<TierPlacement>,
    compared: Generation,
    target: Generation,
    sent: Generation,
    acked: Generation,
    content: Generation,
    last_nack: String,
}

impl SubscriberStream {
    pub(crate) fn new(principal: Principal, limits: SessionLimits) -> Self {
        Self {
            principal,
            limits,
            kinds: Default::default(),
            held_resources: HeldResources::default(),
            out_of_scope: BTreeSet::new(),
            names_out_of_scope: 0,
            refused: HashMap::new(),
            refusals: Arc::default(),
            refusals_changed: false,
            queue: VecDeque::new(),
            in_flight: VecDeque::new(),
            part_begin: None,
            joins_parts: false,
            nonce: 0,
            splits: HashMap::new(),
            manifests_due: true,
            subscribed_bytes: 0,
            unknown_pending: 0,
            resync: true,
            behind_log: 0,
            admitted: BTreeSet::new(),
            placement: Arc::default(),
            compared: Generation(0),
            target: Generation(0),
            sent: Generation(0),
            acked: Generation(0),
            content: Generation(0),
            last_nack: String::new(),
        }
    }

    /// True once the subscriber has subscribed to every kind, so that no further request is
    /// expected before the first batch.
    pub(crate) fn is_fully_subscribed(&self) -> bool {
        self.kinds.iter().all(|k| k.open)
    }

    /// True while the subscriber owes an ACK or NACK.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Calls [`SubscriberStream::handle_request`] with an empty catalog, which has none of the
    /// names.
    #[cfg(test)]
    pub(crate) fn handle_request_alone(
        &mut self,
        request: DeltaDiscoveryRequest,
    ) -> Result<SubscriberMessage, StreamLimitError> {
        self.handle_request(request, &Catalog::default())
    }

    /// Applies one message of the subscriber. Names that `catalog` has are shared with it, and cost
    /// nothing.
    ///
    /// # Errors
    /// The stream exceeded a limit, and must be ended.
    pub(crate) fn handle_request(
        &mut self,
        request: DeltaDiscoveryRequest,
        catalog: &Catalog,
    ) -> Result<SubscriberMessage, StreamLimitError> {
        if let Some(node) = &request.node {
            self.joins_parts = node
                .client_features
                .iter()
                .any(|feature| feature == RESPONSE_PARTS_FEATURE);
        }
        let Ok(kind) = kind_of(&request.type_url) else {
            if request.response_nonce.is_empty() {
                // The peer chooses how many types it requests, so the waiting responses are
                // bounded.
                self.unknown_pending += 1;
                if self.unknown_pending > self.limits.pending {
                    return Err(StreamLimitError::TooManyUnknownTypes {
                        limit: self.limits.pending,
                    });
                }
                // Type URLs of Canal and Envoy have fewer than 100 characters.
                // The subscriber chose this text; its length is bounded.
                let url = request.type_url.chars().take(200).collect();
                self.queue.push_back(PendingResponse {
                    url,
                    generation: self.compared,
                    items: Vec::new(),
                });
            } else {
                // The empty response for the unknown type is acknowledged like any other.
                self.settle_nonce(&request.response_nonce, None);
            }
            return Ok(SubscriberMessage::UnknownType);
        };
        let changed = self.subscribe(kind, &request, catalog)?;
        if request.response_nonce.is_empty() {
            return Ok(SubscriberMessage::Subscription);
        }
        let nack = request.error_detail.as_ref().map(ReceivedNack::read);
        Ok(
            match self.settle_nonce(&request.response_nonce, nack.as_ref()) {
                // The nonce is of no response in flight, but the request's subscription was applied
                // above.
                false if changed => SubscriberMessage::Subscription,
                false => SubscriberMessage::Stale,
                true => nack.map_or(SubscriberMessage::Ack, |nack| SubscriberMessage::Nack {
                    reason: nack.text,
                }),
            },
        )
    }

    /// Applies an ACK or NACK to the response with this nonce. Returns false if no such response is
    /// outstanding.
    fn settle_nonce(&mut self, nonce: &str, nack: Option<&ReceivedNack>) -> bool {
        let Some(at) = nonce
            .parse::<u64>()
            .ok()
            .and_then(|n| self.in_flight.iter().position(|(x, _)| *x == n))
        else {
            return false;
        };
        // A subscriber cannot have applied a response before it has the last part.
        if self.part_begin.is_some() && at + 1 == self.in_flight.len() {
            return false;
        }
        let Some((_, planned)) = self.in_flight.remove(at) else {
            return false;
        };
        match nack {
            None => self.accept(planned.items),
            Some(nack) => self.refuse(planned, nack),
        }
        // The whole batch has been answered.
        if self.in_flight.is_empty() && self.queue.is_empty() {
            self.settle(self.sent);
        }
        true
    }

    /// Records that the subscriber has applied these items.
    fn accept(&mut self, items: Vec<Item>) {
        for item in items {
            let key = item.key();
            self.forget_refusal(&key);
            match item.version() {
                Some(version) => self.held_resources.put(
                    key,
                    HeldResource {
                        version,
                        charged: 0,
                    },
                ),
                None => self.held_resources.remove(&key),
            }
        }
    }

    /// Returns the next response to send, or the next part of one, if there is one now.
    pub(crate) fn next_response(&mut self, catalog: &Catalog) -> Option<DeltaDiscoveryResponse> {
        if let Some(begin) = self.part_begin {
            return self.next_part(begin);
        }
        if self.queue.is_empty() && self.in_flight.is_empty() {
            self.form_batch(catalog);
        }
        // A subscriber that does not answer is not sent more than a limited number of responses.
        if self.in_flight.len() >= self.limits.pending {
            return None;
        }
        let mut planned = self.queue.pop_front()?;
        if kind_of(&planned.url).is_err() {
            self.unknown_pending -= 1;
        }
        if self.compared == Generation(0) {
            // Only a response to an unknown type precedes the first batch. It must not have
            // generation 0: a receiver never goes back.
            planned.generation = catalog.generation;
        }
        self.nonce += 1;
        self.sent = self.sent.max(planned.generation);
        if !planned.items.is_empty() {
            self.content = self.content.max(planned.generation);
        }
        self.in_flight.push_back((self.nonce, planned));
        self.next_part(0)
    }

    /// Returns the part of the newest response in flight that begins with item `begin`. It is the
    /// whole response if the subscriber does not join parts.
    fn next_part(&mut self, begin: usize) -> Option<DeltaDiscoveryResponse> {
        let (nonce, planned) = self.in_flight.back()?;
        let rest = planned.items.get(begin..)?;
        let count = if self.joins_parts {
            fitting_count(rest, self.limits.part_bytes)
        } else {
            rest.len()
        };
        let mut part = encode(planned, &rest[..count], *nonce);
        part.more_parts = count < rest.len();
        self.part_begin = part.more_parts.then_some(begin + count);
        Some(part)
    }

    /// Forms the next batch, if the catalog or a subscription changed.
    fn form_batch(&mut self, catalog: &Catalog) {
        let unanswered = self.kinds.iter().any(|k| k.unanswered);
        if self.compared == catalog.generation && !self.resync && !unanswered {
            return;
        }
        // Services that moved change the scope of a gateway, though no resource changed.
        self.resync |= self.placement != catalog.placement
            && matches!(self.principal, Principal::Gateway { .. });
        self.placement = catalog.placement.clone();
        let items = self.differences(catalog);
        self.compared = catalog.generation;
        self.resync = false;
        self.plan(items, catalog.generation);
        for k in &mut self.kinds {
            k.requested.clear();
            k.unanswered &= !k.open;
        }
        if self.queue.is_empty() {
            // Nothing differs: the subscriber already holds everything in its scope, except what it
            // refuses.
            self.sent = self.sent.max(self.target);
            self.settle(self.target);
        }
    }

    /// Returns every item that must be sent so that the subscriber holds what the catalog contains.
    fn differences(&mut self, catalog: &Catalog) -> Vec<Item> {
        let admitted: BTreeSet<ResourceOwner> = catalog
            .concerning(&self.principal)
            .map(|(owner, _)| owner)
            .collect();
        let owners: BTreeSet<ResourceOwner> = admitted
            .iter()
            .chain(self.admitted.iter())
            .chain(self.held_resources.owners())
            .cloned()
            .collect();
        let mut items = Vec::new();
        // This includes tenants without differences: a refused resource that was removed is no
        // longer sealed.
        let mut resealed = BTreeSet::new();
        for owner in &owners {
            let view = catalog.view(owner);
            let is_admitted = admitted.contains(owner);
            // Deltas are not enough if the scope or a subscription changed.
            let is_full_comparison = self.resync || is_admitted != self.admitted.contains(owner);
            let logged = view.filter(|_| is_admitted && !is_full_comparison);
            let keys = match logged.and_then(|v| v.deltas_after(self.compared)) {
                Some(deltas) => deltas
                    .flat_map(|d| d.touches.iter().map(|t| t.key.clone()))
                    .collect(),
                None => {
                    self.behind_log += u64::from(logged.is_some());
                    self.all_keys(owner, view.filter(|_| is_admitted))
                }
            };
            for key in keys {
                // Manifests list the security resources only.
                if key.0.is_security() {
                    resealed.extend(owner.clone());
                }
                items.extend(self.difference(
                    key,
                    owner,
                    view.map(Arc::as_ref),
                    is_admitted,
                    catalog.generation,
                ));
            }
        }
        items.extend(self.unknown_names(&items));
        items.extend(self.remove_out_of_scope());
        items.extend(self.manifests(&items, resealed, &admitted, catalog));
        self.admitted = admitted;
        items
    }

    /// Returns the number of tenants that were compared as a whole since the last call because
    /// their log begins too late.
    pub(crate) fn take_behind_log(&mut self) -> u64 {
        std::mem::take(&mut self.behind_log)
    }

    /// Returns the keys that the subscriber holds or the catalog offers, as far as they are
    /// subscribed to.
    fn all_keys(
        &self,
        owner: &ResourceOwner,
        view: Option<&Arc<TenantCatalog>>,
    ) -> BTreeSet<ResourceId> {
        // Manifests are in no catalog; they are compared separately.
        let held_names = self
            .held_resources
            .of(owner)
            .filter(|(kind, _)| *kind != ResourceKind::Manifest);
        let offered = view.into_iter().flat_map(|v| v.entries.keys());
        held_names
            .chain(offered)
            .filter(|(kind, name)| self.kinds[*kind as usize].covers(name))
            .cloned()
            .collect()
    }

    /// Returns the item that must be sent for one key, if any.
    fn difference(
        &mut self,
        key: ResourceId,
        owner: &ResourceOwner,
        view: Option<&TenantCatalog>,
        is_admitted: bool,
        generation: Generation,
    ) -> Option<Item> {
        let subscription = &self.kinds[key.0 as usize];
        // A delta names every resource that changed, also those that this subscriber did not
        // subscribe to.
        if !subscription.covers(&key.1) {
            return None;
        }
        let is_requested = subscription.requested.contains(&key.1);
        let is_visible = |e: &&Arc<EncodedResource>| {
            scope::visible(&e.resource, &self.principal, &self.placement)
        };
        let offered = view
            .filter(|_| is_admitted)
            .and_then(|v| v.entries.get(&key))
            .filter(is_visible);
        let held_version = self.held_resources.version(owner, &key);
        let refused = self.refused.get(&key).map(|aside| aside.version);
        match (offered, held_version) {
            (Some(entry), held_version) => {
                self.target = self.target.max(entry.changed);
                // The subscriber holds this version, so a refusal of an earlier one is over.
                if held_version == Some(entry.version) && !is_requested {
                    self.forget_refusal(&key);
                    return None;
                }
                // A refused version is not sent again until it changes or the subscriber names it.
                (refused != Some(Some(entry.version)) || is_requested)
                    .then(|| Item::Put(entry.clone()))
            }
            (None, Some(_)) => {
                // A resource whose source could not be read is not removed.
                if view.is_some_and(|v| !v.complete) {
                    return None;
                }
                self.target = self.target.max(generation);
                // A removal that the subscriber refused is repeated only if it names the resource
                // again.
                (refused != Some(None) || is_requested).then_some(Item::Remove(key))
            }
            // Delta xDS answers a subscription to a missing name with a removal.
            (None, None) => {
                self.forget_refusal(&key);
                is_requested.then_some(Item::Remove(key))
            }
        }
    }

    /// Returns removals for subscribed names that do not exist, so that the subscriber need not
    /// wait for them.
    fn unknown_names(&self, found: &[Item]) -> Vec<Item> {
        let answered: BTreeSet<ResourceId> = found.iter().map(Item::key).collect();
        let is_held = |key: &ResourceId| self.held_resources.version(&owner_of(key), key).is_some();
        let requested = ResourceKind::ALL.into_iter().flat_map(|kind| {
            self.kinds[kind as usize]
                .requested
                .iter()
                .map(move |n| (kind, n.clone()))
        });
        requested
            .filter(|key| {
                key.0 != ResourceKind::Manifest && !answered.contains(key) && !is_held(key)
            })
            .map(Item::Remove)
            .collect()
    }

    /// Distributes the items over responses: new and changed ones parents first, then removals
    /// children first.
    fn plan(&mut self, items: Vec<Item>, generation: Generation) {
        // Manifests come after everything that they seal, including removals.
        let (manifests, items): (Vec<Item>, Vec<Item>) = items
            .into_iter()
            .partition(|i| i.key().0 == ResourceKind::Manifest);
        let kinds: BTreeSet<ResourceKind> = items.iter().map(|i| i.key().0).collect();
        // The resources and removals of one response take effect together, and need no order.
        let bytes: usize = items.iter().map(Item::bytes).sum();
        let is_one_response = kinds.len() == 1 && bytes <= self.limits.response_bytes;
        let mut puts: BTreeMap<ResourceKind, Vec<Item>> = BTreeMap::new();
        let mut removals: BTreeMap<ResourceKind, Vec<Item>> = BTreeMap::new();
        for item in items {
            let kind = item.key().0;
            let side = if is_one_response || matches!(item, Item::Put(_)) {
                &mut puts
            } else {
                &mut removals
            };
            side.entry(kind).or_default().push(item);
        }
        let unanswered = |kind: ResourceKind| {
            self.kinds[kind as usize].open && self.kinds[kind as usize].unanswered
        };
        // A new subscription gets a response even if it is empty.
        for kind in ResourceKind::ALL
            .into_iter()
            .filter(|kind| *kind != ResourceKind::Manifest && unanswered(*kind))
        {
            puts.entry(kind).or_default();
        }
        let with_manifests = !manifests.is_empty() || unanswered(ResourceKind::Manifest);
        for (kind, items) in puts {
            self.enqueue(kind, items, generation);
        }
        for (kind, items) in removals.into_iter().rev() {
            self.enqueue(kind, items, generation);
        }
        if with_manifests {
            self.enqueue(ResourceKind::Manifest, manifests, generation);
        }
    }

    /// Queues the items of one kind in responses of limited size; at least one response. Items of
    /// one owner that fit into one response are not split, so that a data plane applies them
    /// together.
    fn enqueue(&mut self, kind: ResourceKind, items: Vec<Item>, generation: Generation) {
        let max = self.limits.response_bytes;
        let mut responses = vec![Vec::new()];
        let mut bytes = 0;
        for of_owner in items.chunk_by(|a, b| owner_of(&a.key()) == owner_of(&b.key())) {
            let mut unsplit = of_owner.iter().map(Item::bytes).sum::<usize>().min(max);
            for item in of_owner {
                if bytes > 0 && bytes + unsplit.max(item.bytes()) > max {
                    responses.push(Vec::new());
                    bytes = 0;
                }
                // Only the first item of an owner begins a response for the sake of those after it.
                unsplit = 0;
                bytes += item.bytes();
                if let Some(response) = responses.last_mut() {
                    response.push(item.clone());
                }
            }
        }
        for items in responses {
            self.queue.push_back(PendingResponse {
                url: kind.type_url().into(),
                generation,
                items,
            });
        }
    }

    /// Returns the progress of the stream for the registry of subscribers.
    pub(crate) fn progress(&self) -> SubscriberProgress {
        let kinds = std::array::from_fn(|i| self.kinds[i].open);
        SubscriberProgress {
            kinds,
            compared: self.compared,
            target: self.target,
            sent: self.sent,
            acked: self.acked,
            content: self.content,
            refusals: self.refusals.clone(),
            nack: if self.refused.is_empty() && self.queue.is_empty() {
                String::new()
            } else {
                self.last_nack.clone()
            },
            resources: self.held_resources.count(),
        }
    }
}

/// Returns the owner of a resource by its name; see [`ResourceKind::owner_of`].
fn owner_of((kind, name): &ResourceId) -> ResourceOwner {
    kind.owner_of(name)
}

/// Returns how many of the first items have at most `max` bytes together; at least one if there is
/// one.
fn fitting_count(items: &[Item], max: usize) -> usize {
    let mut bytes = 0;
    items
        .iter()
        .take_while(|item| {
            let is_first = bytes == 0;
            bytes += item.bytes();
            is_first || bytes <= max
        })
        .count()
}

/// Encodes items of a planned response as a delta xDS response.
fn encode(planned: &PendingResponse, items: &[Item], nonce: u64) -> DeltaDiscoveryResponse {
    let mut resources = Vec::new();
    let mut removed_resources = Vec::new();
    for item in items {
        match item {
            Item::Put(e) => resources.push(WireResource {
                name: e.name.to_string(),
                version: e.version.to_string(),
                resource: Some(prost_types::Any {
                    type_url: planned.url.clone(),
                    value: e.body.clone(),
                }),
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
        more_parts: false,
    }
}

#[cfg(test)]
mod tests;

//! Names that a subscriber sends: those that it subscribes to, and those of the resources that it
//! holds already. A name that the catalog has in the subscriber's scope is shared with the catalog
//! and free; every other name is charged until it is forgotten. A resource that a subscriber holds
//! and the catalog does not contain is removed from the subscriber. Such a resource never ends the
//! stream of a provider's data plane.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use canal_access::holder_of;
use canal_catalog::{Catalog, ResourceId, ResourceOwner, ResourceVersion, TenantCatalog};
use canal_compiler::scope;
use canal_model::principal::Principal;
use canal_model::program::ResourceKind;
use canal_runtime::ShareHolder;
use canal_wire::discovery::DeltaDiscoveryRequest;

use super::{
    Item, NAME_OVERHEAD_BYTES, OUT_OF_SCOPE_BYTES_MAX, StreamLimitError, SubscriberStream, owner_of,
};

/// A resource that the subscriber holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldResource {
    pub(super) version: ResourceVersion,
    /// Bytes that are charged for the name; 0 if the name is the catalog's.
    pub(super) charged: usize,
}

/// All resources that the subscriber holds, by owner.
#[derive(Debug, Default)]
pub(super) struct HeldResources {
    by_owner: HashMap<ResourceOwner, BTreeMap<ResourceId, HeldResource>>,
    count: usize,
    charged: usize,
}

impl HeldResources {
    /// Returns the number of resources.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Returns the owners of the resources.
    pub(super) fn owners(&self) -> impl Iterator<Item = &ResourceOwner> {
        self.by_owner.keys()
    }

    /// Returns the keys of one owner's resources.
    pub(super) fn of(&self, owner: &ResourceOwner) -> impl Iterator<Item = &ResourceId> {
        self.by_owner
            .get(owner)
            .into_iter()
            .flat_map(BTreeMap::keys)
    }

    /// Returns the version of one resource, if the subscriber holds it.
    pub(super) fn version(
        &self,
        owner: &ResourceOwner,
        key: &ResourceId,
    ) -> Option<ResourceVersion> {
        self.by_owner
            .get(owner)?
            .get(key)
            .map(|resource| resource.version)
    }

    /// Records a resource, in place of an earlier version.
    pub(super) fn put(&mut self, key: ResourceId, resource: HeldResource) {
        let of_owner = self.by_owner.entry(owner_of(&key)).or_default();
        match of_owner.get_mut(&key) {
            // The name of the first record stays in memory, so its charge stays too.
            Some(old) => old.version = resource.version,
            None => {
                of_owner.insert(key, resource);
                self.count += 1;
                self.charged += resource.charged;
            }
        }
    }

    /// Forgets that the subscriber has a resource.
    pub(super) fn remove(&mut self, key: &ResourceId) {
        let owner = owner_of(key);
        let Some(of_owner) = self.by_owner.get_mut(&owner) else {
            return;
        };
        if let Some(resource) = of_owner.remove(key) {
            self.count -= 1;
            self.charged -= resource.charged;
        }
        if of_owner.is_empty() {
            self.by_owner.remove(&owner);
        }
    }

    /// Forgets the resources whose keys `keep` refuses.
    fn retain(&mut self, keep: impl Fn(&ResourceId) -> bool) {
        self.by_owner
            .values_mut()
            .for_each(|of_owner| of_owner.retain(|key, _| keep(key)));
        self.by_owner.retain(|_, of_owner| !of_owner.is_empty());
        self.count = self.by_owner.values().map(BTreeMap::len).sum();
        self.charged = self
            .by_owner
            .values()
            .flat_map(BTreeMap::values)
            .map(|resource| resource.charged)
            .sum();
    }
}

/// A name of a request, as the stream would store it.
struct PricedName {
    name: Arc<str>,
    /// Bytes that the stream would be charged for it.
    price: usize,
}

/// The names and versions in a request with their prices, before any of them is stored.
#[derive(Default)]
struct PricedRequest {
    subscribed: Vec<PricedName>,
    held_versions: Vec<(PricedName, ResourceVersion)>,
    /// Listed names that the principal cannot hold.
    out_of_scope: Vec<Arc<str>>,
    /// Number of listed names that are longer than any name.
    too_long: u64,
}

/// The part of a catalog that one principal receives, to look up many names.
struct NameScope<'a> {
    principal: &'a Principal,
    catalog: &'a Catalog,
    /// The catalogs of the owners that were looked up; `None` outside the scope.
    views: HashMap<ResourceOwner, Option<&'a TenantCatalog>>,
}

impl<'a> NameScope<'a> {
    fn view(&mut self, owner: ResourceOwner) -> Option<&'a TenantCatalog> {
        let (principal, catalog) = (self.principal, self.catalog);
        *self.views.entry(owner).or_insert_with_key(|owner| {
            let view = catalog.view(owner)?;
            let is_admitted = match owner {
                Some(_) => scope::admits(&view.claims, principal, &catalog.placement),
                None => scope::admits_provider(principal),
            };
            is_admitted.then_some(&**view)
        })
    }

    /// Prices a name. It is free if the catalog has it in the principal's scope, and then shared
    /// with the catalog.
    fn price(&mut self, kind: ResourceKind, owner: ResourceOwner, name: &str) -> PricedName {
        let key: ResourceId = (kind, name.into());
        let view = self.view(owner);
        let known = view.and_then(|view| view.entries.get_key_value(&key));
        match known {
            Some(((_, shared), entry))
                if scope::visible(&entry.resource, self.principal, &self.catalog.placement) =>
            {
                PricedName {
                    name: shared.clone(),
                    price: 0,
                }
            }
            // A manifest is in no catalog; there is one for each tenant in scope.
            _ if kind == ResourceKind::Manifest && view.is_some() => PricedName {
                name: key.1,
                price: 0,
            },
            _ => PricedName {
                name: key.1,
                price: name.len() + NAME_OVERHEAD_BYTES,
            },
        }
    }
}

impl SubscriberStream {
    /// Returns the bytes that the principal's holder is charged for names. Of a provider's stream,
    /// these are only the names that it subscribes to.
    pub(crate) fn name_bytes(&self) -> usize {
        if self.is_of_provider() {
            self.subscribed_bytes
        } else {
            self.subscribed_bytes + self.held_resources.charged
        }
    }

    /// Returns the number of listed names, since the last call, that are outside the principal's
    /// scope.
    pub(crate) fn take_names_out_of_scope(&mut self) -> u64 {
        std::mem::take(&mut self.names_out_of_scope)
    }

    fn is_of_provider(&self) -> bool {
        matches!(holder_of(&self.principal), ShareHolder::Provider)
    }

    /// Opens or changes the subscription to a kind. Returns true if something changed.
    ///
    /// A subscriber that reconnects lists what it holds in `initial_resource_versions`. Canal's
    /// data planes may spread a long list over several requests without a nonce, so that no list is
    /// too long for a message.
    pub(super) fn subscribe(
        &mut self,
        kind: ResourceKind,
        request: &DeltaDiscoveryRequest,
        catalog: &Catalog,
    ) -> Result<bool, StreamLimitError> {
        let priced = self.price_request(kind, request, catalog)?;
        // A request that exceeds a limit changes nothing, as it is admitted first.
        self.admit(&priced)?;
        let subscription = &mut self.kinds[kind as usize];
        let first = !subscription.open;
        if first {
            subscription.open = true;
            subscription.unanswered = true;
            // A first request without names subscribes to everything (the xDS protocol's legacy
            // wildcard).
            subscription.wildcard = request.resource_names_subscribe.is_empty();
        }
        subscription.wildcard |= request
            .resource_names_subscribe
            .iter()
            .any(|name| name == "*");
        for PricedName { name, price } in priced.subscribed {
            // A name that is requested again is sent again (delta xDS).
            subscription.requested.insert(name.clone());
            if let Entry::Vacant(new) = subscription.names.entry(name) {
                self.subscribed_bytes += price;
                new.insert(price);
            }
        }
        for name in &request.resource_names_unsubscribe {
            if name == "*" {
                subscription.wildcard = false;
            } else {
                // A name that was not subscribed to was not charged.
                self.subscribed_bytes -= subscription.names.remove(name.as_str()).unwrap_or(0);
                subscription.requested.remove(name.as_str());
            }
        }
        // Only requests without a nonce continue a list that is too long for one message.
        let is_listing = !request.initial_resource_versions.is_empty()
            && (first || request.response_nonce.is_empty());
        let names_changed = !request.resource_names_subscribe.is_empty()
            || !request.resource_names_unsubscribe.is_empty();
        for (PricedName { name, price }, version) in priced.held_versions {
            self.held_resources.put(
                (kind, name),
                HeldResource {
                    version,
                    charged: price,
                },
            );
        }
        self.names_out_of_scope += priced.too_long + priced.out_of_scope.len() as u64;
        self.keep_out_of_scope(kind, priced.out_of_scope);
        let changed = first || names_changed || is_listing;
        if changed {
            self.resync = true;
            self.manifests_due = true;
            self.forget_uncovered(kind);
        }
        Ok(changed)
    }

    /// Prices the names of a request.
    fn price_request(
        &self,
        kind: ResourceKind,
        request: &DeltaDiscoveryRequest,
        catalog: &Catalog,
    ) -> Result<PricedRequest, StreamLimitError> {
        let subscription = &self.kinds[kind as usize];
        let requested = || {
            request
                .resource_names_subscribe
                .iter()
                .chain(&request.resource_names_unsubscribe)
        };
        // An acknowledgement has no names.
        let longest = requested().map(String::len).max().unwrap_or(0);
        if longest > self.limits.name_bytes {
            return Err(StreamLimitError::NameTooLong {
                bytes: longest,
                limit: self.limits.name_bytes,
            });
        }
        let mut priced = PricedRequest::default();
        let mut names = NameScope {
            principal: &self.principal,
            catalog,
            views: HashMap::new(),
        };
        for name in request
            .resource_names_subscribe
            .iter()
            .filter(|name| *name != "*")
        {
            // A name that was subscribed to before was charged then.
            let before = subscription.names.get_key_value(name.as_str());
            priced.subscribed.push(match before {
                Some((name, _)) => PricedName {
                    name: name.clone(),
                    price: 0,
                },
                None => names.price(kind, kind.owner_of(name), name),
            });
        }
        // A data plane may spread its list over several requests without a nonce. A request with a
        // nonce is an answer, so the subscription ignores a list in it.
        if subscription.open && !request.response_nonce.is_empty() {
            return Ok(priced);
        }
        for (name, version) in &request.initial_resource_versions {
            let owner = kind.owner_of(name);
            // No resource has such a long name. It is only counted, because no data plane is refused
            // for what it holds.
            if name.len() > self.limits.name_bytes {
                priced.too_long += 1;
            } else if !scope::may_hold_of(owner.as_ref(), &self.principal) {
                // Never stored: the name would disclose whether another tenant has it.
                priced.out_of_scope.push(name.as_str().into());
            } else {
                priced.held_versions.push((
                    names.price(kind, owner, name),
                    ResourceVersion::read(version),
                ));
            }
        }
        Ok(priced)
    }

    /// Checks that the stream may store what a request brings.
    fn admit(&self, priced: &PricedRequest) -> Result<(), StreamLimitError> {
        let named =
            self.kinds.iter().map(|k| k.names.len()).sum::<usize>() + priced.subscribed.len();
        if named > self.limits.names {
            return Err(StreamLimitError::TooManyNames {
                named,
                limit: self.limits.names,
            });
        }
        let subscribed: usize = priced.subscribed.iter().map(|name| name.price).sum();
        // A data plane of the provider is not refused for the resources that it lists, because it
        // serves other tenants too.
        let held_bytes: usize = if self.is_of_provider() {
            0
        } else {
            priced
                .held_versions
                .iter()
                .map(|(name, _)| name.price)
                .sum()
        };
        let bytes = self.name_bytes() + subscribed + held_bytes;
        if bytes > self.limits.stream_name_bytes {
            return Err(StreamLimitError::TooManyNameBytes {
                bytes,
                limit: self.limits.stream_name_bytes,
            });
        }
        Ok(())
    }

    /// Keeps names outside the scope until the next batch removes them from the subscriber, as far
    /// as [`OUT_OF_SCOPE_BYTES_MAX`] allows. The subscriber lists the rest again at its next
    /// stream.
    fn keep_out_of_scope(&mut self, kind: ResourceKind, names: Vec<Arc<str>>) {
        let mut bytes: usize = self
            .out_of_scope
            .iter()
            .map(|(_, name)| name.len() + NAME_OVERHEAD_BYTES)
            .sum();
        for name in names {
            bytes += name.len() + NAME_OVERHEAD_BYTES;
            if bytes > OUT_OF_SCOPE_BYTES_MAX {
                return;
            }
            self.out_of_scope.insert((kind, name));
        }
    }

    /// Returns removals for the names outside the scope, and forgets them.
    pub(super) fn remove_out_of_scope(&mut self) -> Vec<Item> {
        let listed = std::mem::take(&mut self.out_of_scope);
        // A name that was requested explicitly has been answered already.
        let is_due = |key: &ResourceId| {
            let subscription = &self.kinds[key.0 as usize];
            subscription.covers(&key.1) && !subscription.requested.contains(&key.1)
        };
        listed
            .into_iter()
            .filter(is_due)
            .map(Item::Remove)
            .collect()
    }

    /// Returns whether the stream still has to do with this name: the subscriber holds it or
    /// subscribed to it by name.
    pub(super) fn has_name(&self, key: &ResourceId) -> bool {
        self.kinds[key.0 as usize].names.contains_key(&key.1)
            || self.held_resources.version(&owner_of(key), key).is_some()
    }

    /// Forgets held resources that are no longer subscribed to. The subscriber drops them by
    /// itself, so no removal is sent.
    fn forget_uncovered(&mut self, kind: ResourceKind) {
        let subscription = &self.kinds[kind as usize];
        if !subscription.wildcard {
            self.held_resources
                .retain(|(k, name)| *k != kind || subscription.names.contains_key(name));
        }
    }
}

//! NACKs and their effects: which resources are set aside, and which tenants are behind because of
//! them. A tenant's refused resource never sets another tenant's resource aside. Start at
//! [`SubscriberStream::refuse`].

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use canal_catalog::{ResourceId, ResourceOwner, ResourceVersion};
use canal_model::ids::{Generation, TenantName};
use canal_wire::discovery::Status;
use canal_wire::southbound::refused;

use super::{Item, PendingResponse, SubscriberStream, owner_of};

/// Maximum number of refused resources of one tenant that are shown by name.
/// With their reasons (`REASON_BYTES_MAX`) they are at most 4 KiB, beside the names, for each
/// tenant that a data plane refuses. Operators need a few to find the cause.
pub(crate) const REFUSED_SHOWN_MAX: usize = 16;
/// Maximum length of a NACK text that is stored, in characters.
/// Reasons of named resources are kept beside it, so that it needs no more. Nobody measured this
/// value.
const NACK_TEXT_MAX: usize = 2000;

/// A NACK as it was received.
#[derive(Debug)]
pub(super) struct ReceivedNack {
    pub(super) text: String,
    /// Names of the refused resources, with reasons. If it is empty, the NACK names none, and
    /// nothing of the response was applied.
    named: Vec<(String, String)>,
}

impl ReceivedNack {
    pub(super) fn read(status: &Status) -> Self {
        // Canal's data planes cut reasons as well; another client may not.
        let cut = |(name, reason): (String, String)| {
            (
                name,
                reason[..reason.floor_char_boundary(refused::REASON_BYTES_MAX)].to_string(),
            )
        };
        let named = refused::unpack(status).into_iter().map(cut).collect();
        Self {
            text: status.message.chars().take(NACK_TEXT_MAX).collect(),
            named,
        }
    }

    #[cfg(test)]
    pub(super) fn named_reasons(&self) -> Vec<(&str, usize)> {
        self.named
            .iter()
            .map(|(name, reason)| (name.as_str(), reason.len()))
            .collect()
    }
}

/// A refused resource that has not changed since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SetAside {
    /// Refused version; `None` if the removal was refused.
    pub(super) version: Option<ResourceVersion>,
    reason: String,
}

/// Standing refusals of one tenant's resources on one data plane.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TenantRefusals {
    /// Every resource of the tenant up to this generation was acknowledged.
    pub(crate) acked: Generation,
    pub(crate) count: usize,
    /// Kind, name and reason of the first [`REFUSED_SHOWN_MAX`] refused resources.
    pub(crate) examples: Vec<(ResourceId, String)>,
}

/// Standing refusals by owner. Those of the provider's resources hold back the acknowledged
/// generation of the whole data plane.
pub(crate) type Refusals = BTreeMap<ResourceOwner, TenantRefusals>;

impl SubscriberStream {
    /// Applies a NACK of `planned`. Only what the NACK names is set aside. If it names nothing, the
    /// response is sent again in parts: first one per tenant, then in halves within each tenant.
    /// That ends when the faulty resource is alone, or the tenant's splits are used up.
    pub(super) fn refuse(&mut self, planned: PendingResponse, nack: &ReceivedNack) {
        self.last_nack.clone_from(&nack.text);
        let PendingResponse {
            url,
            generation,
            mut items,
        } = planned;
        let reasons: BTreeMap<&str, &str> = nack
            .named
            .iter()
            .map(|(name, reason)| (name.as_str(), reason.as_str()))
            .collect();
        if items
            .iter()
            .any(|item| reasons.contains_key(&*item.key().1))
        {
            let (refused, taken): (Vec<_>, Vec<_>) = items
                .into_iter()
                .partition(|item| reasons.contains_key(&*item.key().1));
            // The data plane has applied what the NACK does not name.
            self.accept(taken);
            for item in refused {
                // Only items that have a reason are among those refused.
                let reason = reasons
                    .get(&*item.key().1)
                    .copied()
                    .unwrap_or_default()
                    .to_string();
                self.set_aside(&item, reason);
            }
            return;
        }
        // Sorting puts a tenant's resources together, so that the response can be split between
        // tenants.
        items.sort_by_cached_key(|item| owner_of(&item.key()));
        let owners: Vec<ResourceOwner> = items.iter().map(|item| owner_of(&item.key())).collect();
        // The faulty resource is alone, or the tenant's splits are used up.
        let Some(at) = self.split_at(&owners) else {
            for item in &items {
                self.set_aside(item, nack.text.clone());
            }
            return;
        };
        // The parts go in front of what waits, the first one last, so that parents still come
        // first.
        let second = items.split_off(at);
        self.queue.push_front(PendingResponse {
            url: url.clone(),
            generation,
            items: second,
        });
        self.queue.push_front(PendingResponse {
            url,
            generation,
            items,
        });
    }

    /// Returns where to split a refused response whose resources have these owners, sorted. `None`
    /// if it is one resource, or its tenant's splits are used up.
    fn split_at(&mut self, owners: &[ResourceOwner]) -> Option<usize> {
        let (first, last) = (owners.first()?, owners.last()?);
        if first != last {
            // Split at the border between tenants that is nearest to the middle. That uses up no
            // tenant's splits.
            let borders = (1..owners.len()).filter(|at| owners[at - 1] != owners[*at]);
            return borders.min_by_key(|at| at.abs_diff(owners.len() / 2));
        }
        let used = self.splits.entry(first.clone()).or_insert(0);
        if owners.len() == 1 || *used >= self.limits.nack_splits {
            return None;
        }
        *used += 1;
        Some(owners.len() / 2)
    }

    fn set_aside(&mut self, item: &Item, reason: String) {
        // The refused removal of a name that is in no catalog and no longer listed means nothing,
        // and must not be stored without a charge.
        if item.version().is_none() && !self.has_name(&item.key()) {
            return;
        }
        self.refused.insert(
            item.key(),
            SetAside {
                version: item.version(),
                reason,
            },
        );
        self.refusals_changed = true;
    }

    pub(super) fn forget_refusal(&mut self, key: &ResourceId) {
        self.refusals_changed |= self.refused.remove(key).is_some();
    }

    /// Records that everything up to `generation` was answered. Owners without refusals have all of
    /// it; the others stay at their generation.
    pub(super) fn settle(&mut self, generation: Generation) {
        self.splits.clear();
        let owners: BTreeSet<ResourceOwner> = self.refused.keys().map(owner_of).collect();
        let before = self.acked;
        if !owners.contains(&None) {
            self.acked = self.acked.max(generation);
        }
        if self.refused.is_empty() {
            self.last_nack.clear();
        }
        if !std::mem::take(&mut self.refusals_changed) {
            return;
        }
        let mut refusals = Refusals::new();
        for owner in owners {
            // A new refusal holds its owner at the generation from before this batch.
            let acked = self.refusals.get(&owner).map_or(before, |r| r.acked);
            refusals.insert(
                owner,
                TenantRefusals {
                    acked,
                    ..TenantRefusals::default()
                },
            );
        }
        for (key, aside) in &self.refused {
            let Some(of_owner) = refusals.get_mut(&owner_of(key)) else {
                continue;
            };
            of_owner.count += 1;
            if of_owner.examples.len() < REFUSED_SHOWN_MAX {
                of_owner.examples.push((key.clone(), aside.reason.clone()));
            }
        }
        refusals.values_mut().for_each(|r| r.examples.sort());
        self.refusals = Arc::new(refusals);
    }

    /// Returns the tenants of which a resource was refused.
    pub(super) fn refused_tenants(&self) -> HashSet<TenantName> {
        self.refused.keys().filter_map(owner_of).collect()
    }
}

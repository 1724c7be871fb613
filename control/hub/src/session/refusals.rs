//! What a subscriber refused and what follows from it: which resources are set aside, and which tenants are behind because of it. A tenant's
//! refused resource never sets another tenant's aside. Start reading at [`Session::refuse`].

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use canal_model::ids::{Generation, TenantName};
use canal_wire::discovery::Status;
use canal_wire::southbound::refused;

use super::{Item, Planned, Session, owner_of};
use crate::catalog::{Key, Owner, Version};

/// Refused resources of one tenant that are shown by name.
pub(crate) const REFUSED_SHOWN_MAX: usize = 16;
/// Longest text of a nack that is kept, in characters.
const NACK_TEXT_MAX: usize = 2000;

/// A nack as it was received.
#[derive(Debug)]
pub(super) struct Nack {
    pub(super) text: String,
    /// The resources that it refuses; empty: it names none, and nothing of the response was taken.
    named: Vec<(String, String)>,
}

impl Nack {
    pub(super) fn read(status: &Status) -> Self {
        // A data plane of Canal's cuts reasons as well; another client may not.
        let cut = |(name, reason): (String, String)| (name, reason[..reason.floor_char_boundary(refused::REASON_BYTES_MAX)].to_string());
        let named = refused::unpack(status).into_iter().map(cut).collect();
        Self { text: status.message.chars().take(NACK_TEXT_MAX).collect(), named }
    }

    #[cfg(test)]
    pub(super) fn named_reasons(&self) -> Vec<(&str, usize)> {
        self.named.iter().map(|(name, reason)| (name.as_str(), reason.len())).collect()
    }
}

/// A resource that was refused and has not changed since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SetAside {
    /// `None`: its removal was refused.
    pub(super) version: Option<Version>,
    reason: String,
}

/// One tenant's standing refusals on one data plane.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TenantRefusals {
    /// Everything of the tenant up to this generation was acknowledged.
    pub(crate) acked: Generation,
    pub(crate) count: usize,
    /// Kind and name, and why; the first [`REFUSED_SHOWN_MAX`].
    pub(crate) shown: Vec<(Key, String)>,
}

/// Standing refusals by owner; the provider's hold up all that the data plane has acknowledged.
pub(crate) type Refusals = BTreeMap<Owner, TenantRefusals>;

impl Session {
    /// Takes a nack of `planned`. Only what the nack names is set aside. One that names nothing is sent again in parts: first one per
    /// tenant, then in halves within each tenant, until the resource at fault is alone or the tenant's splits are used up.
    pub(super) fn refuse(&mut self, planned: Planned, nack: &Nack) {
        self.last_nack.clone_from(&nack.text);
        let Planned { url, generation, mut items } = planned;
        let reasons: BTreeMap<&str, &str> = nack.named.iter().map(|(name, reason)| (name.as_str(), reason.as_str())).collect();
        if items.iter().any(|item| reasons.contains_key(&*item.key().1)) {
            let (refused, taken): (Vec<_>, Vec<_>) = items.into_iter().partition(|item| reasons.contains_key(&*item.key().1));
            self.accept(taken);
            for item in refused {
                let reason = reasons.get(&*item.key().1).copied().unwrap_or_default().to_string();
                self.set_aside(&item, reason);
            }
            return;
        }
        // Sorted, so that a tenant's resources stand together and halves of whole tenants can be cut.
        items.sort_by_cached_key(|item| owner_of(&item.key()));
        let owners: Vec<Owner> = items.iter().map(|item| owner_of(&item.key())).collect();
        let Some(at) = self.split_at(&owners) else {
            for item in &items {
                self.set_aside(item, nack.text.clone());
            }
            return;
        };
        let second = items.split_off(at);
        self.queue.push_front(Planned { url: url.clone(), generation, items: second });
        self.queue.push_front(Planned { url, generation, items });
    }

    /// Where to cut a refused response whose resources have these owners, sorted. `None`: it is one resource, or its tenant's splits are
    /// used up.
    fn split_at(&mut self, owners: &[Owner]) -> Option<usize> {
        let (first, last) = (owners.first()?, owners.last()?);
        if first != last {
            // At the border between tenants that is nearest to the middle. It costs no tenant's splits.
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
        self.refused.insert(item.key(), SetAside { version: item.version(), reason });
        self.refusals_changed = true;
    }

    pub(super) fn forget_refusal(&mut self, key: &Key) {
        self.refusals_changed |= self.refused.remove(key).is_some();
    }

    /// Everything up to `generation` was answered. Owners without refusals have all of it; the others stay where they were.
    pub(super) fn settle(&mut self, generation: Generation) {
        self.splits.clear();
        let owners: BTreeSet<Owner> = self.refused.keys().map(owner_of).collect();
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
            let acked = self.refusals.get(&owner).map_or(before, |r| r.acked);
            refusals.insert(owner, TenantRefusals { acked, ..TenantRefusals::default() });
        }
        for (key, aside) in &self.refused {
            let Some(of_owner) = refusals.get_mut(&owner_of(key)) else { continue };
            of_owner.count += 1;
            if of_owner.shown.len() < REFUSED_SHOWN_MAX {
                of_owner.shown.push((key.clone(), aside.reason.clone()));
            }
        }
        refusals.values_mut().for_each(|r| r.shown.sort());
        self.refusals = Arc::new(refusals);
    }

    /// Tenants of which a resource was refused.
    pub(super) fn refused_tenants(&self) -> HashSet<TenantName> {
        self.refused.keys().filter_map(owner_of).collect()
    }
}

//! Who has how much: of requests under way, or of channels. One count per tenant and one per requester, each with its share. What waits for whom is
//! the queues' business.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use canal_model::ids::TenantName;
use canal_model::trust::Requester;
use canal_wire::keyrpc::Refusal;

use crate::limits::{REQUESTER_CHANNELS_MAX, Shares, TENANT_CHANNELS_PART};

#[derive(Debug, Default)]
struct Counts {
    tenants: HashMap<TenantName, usize>,
    requesters: HashMap<Requester, usize>,
}

/// All that is under way. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    shares: Shares,
    counts: Arc<Mutex<Counts>>,
}

/// One operation under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    ledger: Ledger,
    tenant: TenantName,
    requester: Requester,
}

impl Ledger {
    /// Empty.
    pub(crate) fn new(shares: Shares) -> Self {
        Self { shares, counts: Arc::default() }
    }

    /// Takes one for both, or says whose share is used up: a tenant's first, for then nobody else is concerned.
    pub(crate) fn take(&self, tenant: &TenantName, requester: &Requester) -> Result<Place, Refusal> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.tenants.get(tenant).is_some_and(|n| *n >= self.shares.tenant) {
            return Err(Refusal::TenantBusy);
        }
        if counts.requesters.get(requester).is_some_and(|n| *n >= self.shares.requester) {
            return Err(Refusal::RequesterBusy);
        }
        *counts.tenants.entry(tenant.clone()).or_default() += 1;
        *counts.requesters.entry(requester.clone()).or_default() += 1;
        Ok(Place { ledger: self.clone(), tenant: tenant.clone(), requester: requester.clone() })
    }

    /// Of channels, whose shares are parts of all that may be.
    pub(crate) fn of_channels(all: u64) -> Self {
        let tenant = (usize::try_from(all).unwrap_or(usize::MAX) / TENANT_CHANNELS_PART).max(1);
        Self::new(Shares { requester: REQUESTER_CHANNELS_MAX, tenant, channels: all })
    }

    /// Under way in all.
    pub(crate) fn total(&self) -> usize {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).tenants.values().sum()
    }
}

fn less<K: Hash + Eq>(map: &mut HashMap<K, usize>, key: &K) {
    if let Some(n) = map.get_mut(key) {
        *n -= 1;
        if *n == 0 {
            map.remove(key);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.ledger.counts.lock().unwrap_or_else(PoisonError::into_inner);
        less(&mut counts.tenants, &self.tenant);
        less(&mut counts.requesters, &self.requester);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_reached_named_and_given_back() {
        let ledger = Ledger::new(Shares { requester: 3, tenant: 2, channels: 1 });
        let (node, gateway) = (Requester::Node("n1".parse().unwrap()), Requester::Gateway("g1".parse().unwrap()));
        let (alpha, beta): (TenantName, TenantName) = ("alpha".parse().unwrap(), "beta".parse().unwrap());
        let held = [ledger.take(&alpha, &gateway).unwrap(), ledger.take(&alpha, &gateway).unwrap()];
        assert_eq!(ledger.take(&alpha, &gateway).unwrap_err(), Refusal::TenantBusy);
        assert_eq!(ledger.take(&alpha, &node).unwrap_err(), Refusal::TenantBusy);
        let third = ledger.take(&beta, &gateway).unwrap();
        assert_eq!(ledger.take(&beta, &gateway).unwrap_err(), Refusal::RequesterBusy);
        let other = ledger.take(&beta, &node).unwrap();
        assert_eq!(ledger.total(), 4);
        drop((held, third, other));
        let counts = ledger.counts.lock().unwrap();
        assert!(counts.tenants.is_empty() && counts.requesters.is_empty());
    }
}

//! Who has how much: of requests under way, or of channels. One count per tenant and one per requester, each with its share. What waits for whom is
//! the queues' business.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use canal_model::ids::TenantName;
use canal_model::share::{Share, ShareKind};
use canal_model::trust::Requester;
use canal_runtime::{GiveWay, ShareHolder, ShareRefusal, TenantLimit, TenantLimitConfig, TenantPermit};
use canal_wire::keyrpc::Refusal;

use crate::limits::{GATEWAY_TENANT_PART, REQUESTER_CHANNELS_MAX, Shares, TENANT_CHANNELS_PART};

/// What one requester has under way, shared by the tenants it serves.
#[derive(Debug)]
struct RequesterAccount {
    limit: TenantLimit,
    taken: usize,
}

#[derive(Debug, Default)]
struct Counts {
    tenants: HashMap<TenantName, usize>,
    requesters: HashMap<Requester, RequesterAccount>,
}

/// All that is under way. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    shares: Shares,
    /// A tenant's part of what a gateway may have under way: one in so many.
    gateway_part: Option<usize>,
    counts: Arc<Mutex<Counts>>,
}

/// One operation under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    ledger: Ledger,
    tenant: TenantName,
    requester: Requester,
    permit: TenantPermit,
}

impl Place {
    /// Another tenant has what this stood for.
    pub(crate) fn is_revoked(&self) -> bool {
        self.permit.is_revoked()
    }
}

impl Ledger {
    /// Empty.
    pub(crate) fn new(shares: Shares) -> Self {
        Self { shares, gateway_part: Some(GATEWAY_TENANT_PART), counts: Arc::default() }
    }

    /// A gateway serves many tenants, each of which has a part of what it may have under way. A node's is its own tenant's.
    fn part(&self, requester: &Requester) -> Option<usize> {
        self.gateway_part.filter(|_| matches!(requester, Requester::Gateway(_)))
    }

    fn open(&self, requester: &Requester) -> RequesterAccount {
        let capacity = self.shares.requester as u64;
        let config = TenantLimitConfig { kind: ShareKind::KeyServerRequests, capacity, reserve: 0, give_way: GiveWay::Oldest };
        let limit = TenantLimit::new(config);
        limit.set_default_share(Share::Amount(self.part(requester).map_or(capacity, |part| (capacity / part as u64).max(1))));
        RequesterAccount { limit, taken: 0 }
    }

    /// Takes one for both, or says whose share is used up: a tenant's first, for then nobody else is concerned. What `gives_way` may be revoked
    /// when the requester has all that it may and another tenant has less: see [`Place::is_revoked`].
    pub(crate) fn take(&self, tenant: &TenantName, requester: &Requester, gives_way: bool) -> Result<Place, Refusal> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.tenants.get(tenant).is_some_and(|n| *n >= self.shares.tenant) {
            return Err(Refusal::TenantBusy);
        }
        let holder = ShareHolder::Tenant(tenant.clone());
        let account = counts.requesters.entry(requester.clone()).or_insert_with(|| self.open(requester));
        let taken = if gives_way { account.limit.take_revocable(&holder, 1) } else { account.limit.take(&holder, 1) };
        let permit = match taken {
            Ok(permit) => permit,
            Err(ShareRefusal::Share) if self.part(requester).is_some() => return Err(Refusal::TenantBusy),
            Err(_) => return Err(Refusal::RequesterBusy),
        };
        account.taken += 1;
        *counts.tenants.entry(tenant.clone()).or_default() += 1;
        Ok(Place { ledger: self.clone(), tenant: tenant.clone(), requester: requester.clone(), permit })
    }

    /// Of channels, whose shares are parts of all that may be.
    pub(crate) fn of_channels(all: u64) -> Self {
        let tenant = (usize::try_from(all).unwrap_or(usize::MAX) / TENANT_CHANNELS_PART).max(1);
        // Channels of gateways are the provider's, as one.
        Self { gateway_part: None, ..Self::new(Shares { requester: REQUESTER_CHANNELS_MAX, tenant, channels: all }) }
    }

    /// Under way in all.
    pub(crate) fn total(&self) -> usize {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).tenants.values().sum()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.ledger.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(n) = counts.tenants.get_mut(&self.tenant) {
            *n -= 1;
            if *n == 0 {
                counts.tenants.remove(&self.tenant);
            }
        }
        if let Some(account) = counts.requesters.get_mut(&self.requester) {
            account.taken -= 1;
            // The permit keeps the limit for as long as it needs it.
            if account.taken == 0 {
                counts.requesters.remove(&self.requester);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> TenantName {
        name.parse().unwrap()
    }

    fn gateway() -> Requester {
        Requester::Gateway("g1".parse().unwrap())
    }

    #[test]
    fn shares_are_reached_named_and_given_back() {
        let ledger = Ledger::new(Shares { requester: 24, tenant: 4, channels: 1 });
        let node = Requester::Node("n1".parse().unwrap());
        let (alpha, beta) = (tenant("alpha"), tenant("beta"));
        // An eighth of the gateway's, for each tenant; a node's are its tenant's.
        let held: Vec<_> = (0..3).map(|_| ledger.take(&alpha, &gateway(), true).unwrap()).collect();
        assert_eq!(ledger.take(&alpha, &gateway(), true).unwrap_err(), Refusal::TenantBusy);
        let fourth = ledger.take(&alpha, &node, true).unwrap();
        assert_eq!(ledger.take(&alpha, &node, true).unwrap_err(), Refusal::TenantBusy);
        let other = ledger.take(&beta, &gateway(), false).unwrap();
        assert_eq!(ledger.total(), 5);
        drop((held, fourth, other));
        let counts = ledger.counts.lock().unwrap();
        assert!(counts.tenants.is_empty() && counts.requesters.is_empty());
    }

    #[test]
    fn eight_tenants_with_silent_peers_leave_a_gateway_to_a_ninth() {
        let ledger = Ledger::new(Shares { requester: 64, tenant: 64, channels: 1 });
        let held: Vec<_> = (0..64).map(|n| ledger.take(&tenant(&format!("t{}", n % 8)), &gateway(), true).unwrap()).collect();
        let ninth: Vec<_> = (0..7).map(|_| ledger.take(&tenant("ninth"), &gateway(), true).unwrap()).collect();
        // Of each of the others its oldest, at most.
        let revoked: Vec<_> = held.iter().enumerate().filter(|(_, p)| p.is_revoked()).map(|(n, _)| n).collect();
        assert_eq!(revoked.len(), 7);
        assert!(revoked.iter().all(|n| *n < 8), "{revoked:?}");
        assert!(ninth.iter().all(|p| !p.is_revoked()));
        // All have as many now: nobody gives way to one that has as much.
        assert_eq!(ledger.take(&tenant("t1"), &gateway(), true).unwrap_err(), Refusal::RequesterBusy);
        drop((held, ninth));
        assert_eq!(ledger.total(), 0);
    }

    #[test]
    fn what_is_over_in_a_moment_does_not_give_way() {
        let ledger = Ledger::new(Shares { requester: 8, tenant: 8, channels: 1 });
        let held: Vec<_> = (0..8).map(|n| ledger.take(&tenant(&format!("t{n}")), &gateway(), false).unwrap()).collect();
        assert_eq!(ledger.take(&tenant("ninth"), &gateway(), true).unwrap_err(), Refusal::RequesterBusy);
        assert!(held.iter().all(|p| !p.is_revoked()));
    }
}

//! Who has how much: of requests under way, or of channels. One count per tenant and one per requester, each with its share. What waits for whom is
//! the queues' business.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use canal_model::ids::TenantName;
use canal_model::share::{Share, ShareKind, Shares as TenantShares};
use canal_model::trust::Requester;
use canal_runtime::share::TenantLimitUsage;
use canal_runtime::{GiveWay, ShareHolder, ShareRefusal, TenantLimit, TenantLimitConfig, TenantPermit};
use canal_wire::keyrpc::Refusal;

use crate::limits::{REQUESTER_CHANNELS_MAX, Shares, TENANT_CHANNELS_PART};

/// Gateways that are remembered while they have nothing under way, for what their tenants were refused; of more, that is summed.
const IDLE_GATEWAYS_MAX: usize = 256;

/// What one requester has under way, shared by the tenants it serves.
#[derive(Debug)]
struct RequesterAccount {
    limit: TenantLimit,
    taken: usize,
}

/// A requester, and the tenant of a node: two tenants may each have a node of one name.
type Account = (Option<TenantName>, Requester);

#[derive(Debug, Default)]
struct Counts {
    tenants: HashMap<TenantName, usize>,
    requesters: HashMap<Account, RequesterAccount>,
    /// Gateways among them that have nothing under way.
    idle: usize,
    /// What was refused, and what gave way, at gateways that are no longer remembered.
    before: (u64, u64),
    /// What the provider wrote for tenants: of those alone for whom it wrote something.
    written: Vec<(TenantName, TenantShares)>,
}

impl Counts {
    /// Forgets gateways without anything under way.
    fn forget_idle(&mut self) {
        self.idle = 0;
        for (_, gone) in self.requesters.extract_if(|_, account| account.taken == 0) {
            let usage = gone.limit.usage();
            self.before.0 += usage.refused_before + usage.holders.iter().map(|h| h.refused).sum::<u64>();
            self.before.1 += usage.revoked_before + usage.holders.iter().map(|h| h.revoked).sum::<u64>();
        }
    }
}

/// All that is under way. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    shares: Shares,
    /// A gateway serves many tenants, each of which has its share of what the gateway may have. A node's are its own tenant's.
    divides_gateways: bool,
    counts: Arc<Mutex<Counts>>,
}

/// One operation under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    ledger: Ledger,
    tenant: TenantName,
    account: Account,
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
        Self { shares, divides_gateways: true, counts: Arc::default() }
    }

    fn is_divided(&self, requester: &Requester) -> bool {
        self.divides_gateways && matches!(requester, Requester::Gateway(_))
    }

    fn open(&self, requester: &Requester, written: &[(TenantName, TenantShares)]) -> RequesterAccount {
        let capacity = self.shares.requester as u64;
        let config = TenantLimitConfig { kind: ShareKind::KeyServerRequests, capacity, reserve: 0, give_way: GiveWay::Oldest };
        let limit = TenantLimit::new(config);
        if self.is_divided(requester) {
            limit.set_shares(written.iter().map(|(tenant, shares)| (tenant, shares)));
        } else {
            limit.set_default_share(Share::Percent(100));
        }
        RequesterAccount { limit, taken: 0 }
    }

    /// Takes over what the provider wrote for tenants; what is under way stays so.
    pub(crate) fn set_shares<'a>(&self, tenants: impl IntoIterator<Item = (&'a TenantName, &'a TenantShares)>) {
        let is_written = |shares: &TenantShares| shares.iter().any(|(kind, _)| kind == ShareKind::KeyServerRequests);
        let written = tenants.into_iter().filter(|(_, shares)| is_written(shares));
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let Counts { requesters, written: before, .. } = &mut *counts;
        *before = written.map(|(tenant, shares)| (tenant.clone(), shares.clone())).collect();
        for (_, account) in requesters.iter().filter(|((_, requester), _)| self.is_divided(requester)) {
            account.limit.set_shares(before.iter().map(|(tenant, shares)| (tenant, shares)));
        }
    }

    /// Takes one for both, or says whose share is used up: a tenant's first, for then nobody else is concerned. What `gives_way` may be revoked
    /// when the requester has all that it may and another tenant has less: see [`Place::is_revoked`].
    pub(crate) fn take(&self, tenant: &TenantName, requester: &Requester, gives_way: bool) -> Result<Place, Refusal> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.tenants.get(tenant).is_some_and(|n| *n >= self.shares.tenant) {
            return Err(Refusal::TenantBusy);
        }
        let holder = ShareHolder::Tenant(tenant.clone());
        let key = (matches!(requester, Requester::Node(_)).then(|| tenant.clone()), requester.clone());
        let was_idle = counts.requesters.get(&key).is_some_and(|account| account.taken == 0);
        if counts.idle >= IDLE_GATEWAYS_MAX && !was_idle {
            counts.forget_idle();
        }
        let Counts { tenants, requesters, written, idle, .. } = &mut *counts;
        let account = requesters.entry(key.clone()).or_insert_with(|| self.open(requester, written));
        let taken = if gives_way { account.limit.take_revocable(&holder, 1) } else { account.limit.take(&holder, 1) };
        let permit = match taken {
            Ok(permit) => permit,
            Err(ShareRefusal::Share) if self.is_divided(requester) => return Err(Refusal::TenantBusy),
            Err(_) => return Err(Refusal::RequesterBusy),
        };
        account.taken += 1;
        *idle = idle.saturating_sub(usize::from(was_idle));
        *tenants.entry(tenant.clone()).or_default() += 1;
        Ok(Place { ledger: self.clone(), tenant: tenant.clone(), account: key, permit })
    }

    /// What tenants have under way at each gateway.
    pub(crate) fn usage(&self) -> Vec<TenantLimitUsage> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let gateways: Vec<_> = counts.requesters.iter().filter(|((_, r), _)| self.is_divided(r)).map(|(_, a)| a.limit.clone()).collect();
        let (refused_before, revoked_before) = counts.before;
        drop(counts);
        let (kind, capacity) = (ShareKind::KeyServerRequests, self.shares.requester as u64);
        let rest = TenantLimitUsage { kind, capacity, used: 0, refused_before, revoked_before, holders: Vec::new() };
        gateways.iter().map(TenantLimit::usage).chain([rest]).collect()
    }

    /// Of channels, whose shares are parts of all that may be.
    pub(crate) fn of_channels(all: u64) -> Self {
        let tenant = (usize::try_from(all).unwrap_or(usize::MAX) / TENANT_CHANNELS_PART).max(1);
        // Channels of gateways are the provider's, as one.
        Self { divides_gateways: false, ..Self::new(Shares { requester: REQUESTER_CHANNELS_MAX, tenant, channels: all }) }
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
        if let Some(account) = counts.requesters.get_mut(&self.account) {
            account.taken -= 1;
            match (account.taken, self.ledger.is_divided(&self.account.1)) {
                // It shows what was refused; see `Counts::forget_idle`.
                (0, true) => counts.idle += 1,
                // The permit keeps the limit for as long as it needs it.
                (0, false) => _ = counts.requesters.remove(&self.account),
                _ => {}
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
        // 13 % of the gateway's, for each tenant; a node's are its tenant's.
        let held: Vec<_> = (0..3).map(|_| ledger.take(&alpha, &gateway(), true).unwrap()).collect();
        assert_eq!(ledger.take(&alpha, &gateway(), true).unwrap_err(), Refusal::TenantBusy);
        let fourth = ledger.take(&alpha, &node, true).unwrap();
        assert_eq!(ledger.take(&alpha, &node, true).unwrap_err(), Refusal::TenantBusy);
        let other = ledger.take(&beta, &gateway(), false).unwrap();
        assert_eq!(ledger.total(), 5);
        drop((held, fourth, other));
        let counts = ledger.counts.lock().unwrap();
        assert!(counts.tenants.is_empty());
        assert_eq!(counts.requesters.keys().map(|(_, r)| r.clone()).collect::<Vec<_>>(), [gateway()], "for what was refused");
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
    fn what_gateways_were_refused_is_shown_also_of_those_that_are_gone() {
        let ledger = Ledger::new(Shares { requester: 8, tenant: 64, channels: 1 });
        let alpha = tenant("alpha");
        let sums = || {
            let usage = ledger.usage();
            let named: u64 = usage.iter().flat_map(|u| &u.holders).map(|h| h.refused).sum();
            (named + usage.iter().map(|u| u.refused_before).sum::<u64>(), usage.iter().map(|u| u.used).sum::<u64>(), usage[0].capacity)
        };
        assert_eq!(sums(), (0, 0, 8), "the limit is there before anybody took of it");
        for n in 0..3 * IDLE_GATEWAYS_MAX {
            let gateway = Requester::Gateway(format!("g{n}").parse().unwrap());
            let place = ledger.take(&alpha, &gateway, false).unwrap();
            assert_eq!(ledger.take(&alpha, &gateway, false).unwrap_err(), Refusal::TenantBusy);
            assert_eq!(sums(), (n as u64 + 1, 1, 8));
            drop(place);
        }
        assert!(ledger.counts.lock().unwrap().requesters.len() <= IDLE_GATEWAYS_MAX);
    }

    #[test]
    fn nodes_of_one_name_of_two_tenants_have_a_count_each() {
        let ledger = Ledger::new(Shares { requester: 2, tenant: 64, channels: 1 });
        let node = Requester::Node("n1".parse().unwrap());
        let _alpha = [(); 2].map(|()| ledger.take(&tenant("alpha"), &node, false).unwrap());
        assert_eq!(ledger.take(&tenant("alpha"), &node, false).unwrap_err(), Refusal::RequesterBusy);
        assert!(ledger.take(&tenant("beta"), &node, false).is_ok());
    }

    #[test]
    fn a_share_that_the_provider_wrote_holds_at_gateways_open_and_new() {
        let ledger = Ledger::new(Shares { requester: 100, tenant: 100, channels: 1 });
        let own = |share: &str| {
            let mut shares = TenantShares::default();
            shares.set(ShareKind::KeyServerRequests, share.parse().unwrap());
            shares
        };
        let most = |name: &str, requester: &Requester| {
            let held: Vec<_> = (0..100).map_while(|_| ledger.take(&tenant(name), requester, false).ok()).collect();
            held.len()
        };
        let (alpha, node) = (tenant("alpha"), Requester::Node("n1".parse().unwrap()));
        let first = ledger.take(&alpha, &gateway(), false).unwrap();
        ledger.set_shares([(&alpha, &own("3"))]);
        assert_eq!((most("alpha", &gateway()), most("beta", &gateway())), (2, 13));
        drop(first);
        assert_eq!((most("alpha", &gateway()), most("beta", &gateway())), (3, 13));
        assert_eq!(most("alpha", &node), 100, "a node's are its tenant's own");
        ledger.set_shares([(&alpha, &own("40%"))]);
        assert_eq!(most("alpha", &gateway()), 40);
        ledger.set_shares([(&alpha, &TenantShares::default())]);
        assert_eq!(most("alpha", &gateway()), 13);
    }

    #[test]
    fn what_is_over_in_a_moment_does_not_give_way() {
        let ledger = Ledger::new(Shares { requester: 8, tenant: 8, channels: 1 });
        let held: Vec<_> = (0..8).map(|n| ledger.take(&tenant(&format!("t{n}")), &gateway(), false).unwrap()).collect();
        assert_eq!(ledger.take(&tenant("ninth"), &gateway(), true).unwrap_err(), Refusal::RequesterBusy);
        assert!(held.iter().all(|p| !p.is_revoked()));
    }
}

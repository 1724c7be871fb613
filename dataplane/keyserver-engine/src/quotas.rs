//! [`Quotas`]: counts requests in progress, or channels, per tenant and per requester, each against its share.
//!
//! The queues decide in which order requests are served.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use canal_model::ids::TenantName;
use canal_model::share::{Share, ShareKind, Shares as TenantShares};
use canal_model::trust::KeyRequester;
use canal_runtime::share::TenantLimitUsage;
use canal_runtime::{
    RevocationOrder, ShareHolder, ShareRefusal, TenantLimit, TenantLimitConfig, TenantPermit,
};
use canal_wire::keyrpc::KeyRefusal;

use crate::limits::{QuotaShares, REQUESTER_CHANNELS_MAX, TENANT_CHANNELS_PART};

/// Idle gateways whose accounts are stored for their counts of refusals; above this number the
/// counts are summed. Each is a few rows of metrics. Nobody measured the number.
const IDLE_GATEWAYS_MAX: usize = 256;

/// Operations in progress of one requester, shared by the tenants that it serves.
#[derive(Debug)]
struct RequesterAccount {
    limit: TenantLimit,
    in_use: usize,
}

/// Key of an account: the requester, and for a node its tenant, because two tenants may each have a
/// node of the same name.
type QuotaKey = (Option<TenantName>, KeyRequester);

#[derive(Debug, Default)]
struct QuotaCounts {
    tenants: HashMap<TenantName, usize>,
    requesters: HashMap<QuotaKey, RequesterAccount>,
    /// Number of gateways in `requesters` with nothing in progress.
    idle: usize,
    /// Refused and revoked operations at gateways whose accounts were dropped.
    before: (u64, u64),
    /// Shares that the provider configured, for those tenants only that have any.
    written: Vec<(TenantName, TenantShares)>,
}

impl QuotaCounts {
    /// Drops the accounts of gateways with nothing in progress, and sums their counts.
    fn forget_idle(&mut self) {
        self.idle = 0;
        for (_, gone) in self.requesters.extract_if(|_, account| account.in_use == 0) {
            let usage = gone.limit.usage();
            self.before.0 +=
                usage.refused_before + usage.holders.iter().map(|h| h.refused).sum::<u64>();
            self.before.1 +=
                usage.revoked_before + usage.holders.iter().map(|h| h.revoked).sum::<u64>();
        }
    }
}

/// Counts of all operations in progress. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Quotas {
    shares: QuotaShares,
    /// True if a gateway's quota is divided among the tenants that it serves. A node's quota is its
    /// own tenant's.
    divides_gateways: bool,
    counts: Arc<Mutex<QuotaCounts>>,
}

/// Counts one operation in progress until it is dropped.
#[derive(Debug)]
pub(crate) struct QuotaPermit {
    quotas: Quotas,
    tenant: TenantName,
    account: QuotaKey,
    permit: TenantPermit,
}

impl QuotaPermit {
    /// Returns whether another tenant has been given this operation's share.
    pub(crate) fn is_revoked(&self) -> bool {
        self.permit.is_revoked()
    }
}

impl Quotas {
    /// Creates quotas with nothing in progress.
    pub(crate) fn new(shares: QuotaShares) -> Self {
        Self {
            shares,
            divides_gateways: true,
            counts: Arc::default(),
        }
    }

    fn is_divided(&self, requester: &KeyRequester) -> bool {
        self.divides_gateways && matches!(requester, KeyRequester::Gateway(_))
    }

    fn open(
        &self,
        requester: &KeyRequester,
        written: &[(TenantName, TenantShares)],
    ) -> RequesterAccount {
        let capacity = self.shares.requester as u64;
        let config = TenantLimitConfig {
            kind: ShareKind::KeyServerRequests,
            capacity,
            reserve: 0,
            revocation_order: RevocationOrder::OldestFirst,
        };
        let limit = TenantLimit::new(config);
        if self.is_divided(requester) {
            limit.set_shares(written.iter().map(|(tenant, shares)| (tenant, shares)));
        } else {
            limit.set_default_share(Share::Percent(100));
        }
        RequesterAccount { limit, in_use: 0 }
    }

    /// Applies the provider's shares. Operations in progress continue.
    pub(crate) fn set_shares<'a>(
        &self,
        tenants: impl IntoIterator<Item = (&'a TenantName, &'a TenantShares)>,
    ) {
        let is_written = |shares: &TenantShares| {
            shares
                .iter()
                .any(|(kind, _)| kind == ShareKind::KeyServerRequests)
        };
        let written = tenants.into_iter().filter(|(_, shares)| is_written(shares));
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let QuotaCounts {
            requesters,
            written: before,
            ..
        } = &mut *counts;
        *before = written
            .map(|(tenant, shares)| (tenant.clone(), shares.clone()))
            .collect();
        for (_, account) in requesters
            .iter()
            .filter(|((_, requester), _)| self.is_divided(requester))
        {
            account
                .limit
                .set_shares(before.iter().map(|(tenant, shares)| (tenant, shares)));
        }
    }

    /// Counts an operation for the tenant and the requester. If the requester's quota is used up,
    /// an operation with `gives_way` may be revoked later for a tenant that uses less: see
    /// [`QuotaPermit::is_revoked`].
    ///
    /// # Errors
    /// Returns which share is used up. The tenant's is checked first, because it concerns no other
    /// tenant.
    pub(crate) fn take(
        &self,
        tenant: &TenantName,
        requester: &KeyRequester,
        gives_way: bool,
    ) -> Result<QuotaPermit, KeyRefusal> {
        // A thread that panicked with the lock must not stop all others.
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts
            .tenants
            .get(tenant)
            .is_some_and(|n| *n >= self.shares.tenant)
        {
            return Err(KeyRefusal::TenantBusy);
        }
        let holder = ShareHolder::Tenant(tenant.clone());
        let key = (
            // A node belongs to one tenant. A gateway has one account for all tenants that it
            // serves.
            matches!(requester, KeyRequester::Node(_)).then(|| tenant.clone()),
            requester.clone(),
        );
        let is_divided = self.is_divided(requester);
        let known = counts.requesters.get(&key).map(|account| account.in_use);
        let (is_new, was_idle) = (known.is_none(), known == Some(0));
        // An account without requests in progress is kept for its counts, so their number is
        // limited.
        if counts.idle >= IDLE_GATEWAYS_MAX && !was_idle {
            counts.forget_idle();
        }
        let QuotaCounts {
            tenants,
            requesters,
            written,
            idle,
            ..
        } = &mut *counts;
        let account = requesters
            .entry(key.clone())
            .or_insert_with(|| self.open(requester, written));
        let taken = if gives_way {
            account.limit.take_revocable(&holder, 1)
        } else {
            account.limit.take(&holder, 1)
        };
        let permit = match taken {
            Ok(permit) => permit,
            Err(refusal) => {
                // A new account has nothing in progress. It is bounded as the idle ones are: a
                // gateway's stays for its counts, a node's is not stored.
                match (is_new, is_divided) {
                    (true, true) => *idle += 1,
                    (true, false) => _ = requesters.remove(&key),
                    (false, _) => {}
                }
                // A gateway's quota is divided among tenants, so this one's part is used up.
                let is_own = matches!(refusal, ShareRefusal::Share | ShareRefusal::Threshold);
                return Err(if is_divided && is_own {
                    KeyRefusal::TenantBusy
                } else {
                    KeyRefusal::RequesterBusy
                });
            }
        };
        account.in_use += 1;
        // An account that was idle is in use from here on.
        *idle = idle.saturating_sub(usize::from(was_idle));
        *tenants.entry(tenant.clone()).or_default() += 1;
        Ok(QuotaPermit {
            quotas: self.clone(),
            tenant: tenant.clone(),
            account: key,
            permit,
        })
    }

    /// Returns the tenants' operations in progress at each gateway.
    pub(crate) fn usage(&self) -> Vec<TenantLimitUsage> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let gateways: Vec<_> = counts
            .requesters
            .iter()
            .filter(|((_, r), _)| self.is_divided(r))
            .map(|(_, a)| a.limit.clone())
            .collect();
        let (refused_before, revoked_before) = counts.before;
        drop(counts);
        let (kind, capacity) = (ShareKind::KeyServerRequests, self.shares.requester as u64);
        let rest = TenantLimitUsage {
            kind,
            capacity,
            used: 0,
            refused_before,
            revoked_before,
            holders: Vec::new(),
        };
        gateways
            .iter()
            .map(TenantLimit::usage)
            .chain([rest])
            .collect()
    }

    /// Creates quotas of channels, whose shares are parts of all channels.
    pub(crate) fn of_channels(all: u64) -> Self {
        let tenant = (usize::try_from(all).unwrap_or(usize::MAX) / TENANT_CHANNELS_PART).max(1);
        // All gateways together count as one tenant, the provider.
        Self {
            divides_gateways: false,
            ..Self::new(QuotaShares {
                requester: REQUESTER_CHANNELS_MAX,
                tenant,
                channels: all,
            })
        }
    }

    /// Returns the number of operations in progress.
    pub(crate) fn total(&self) -> usize {
        self.counts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .tenants
            .values()
            .sum()
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        let mut counts = self
            .quotas
            .counts
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(n) = counts.tenants.get_mut(&self.tenant) {
            *n -= 1;
            if *n == 0 {
                counts.tenants.remove(&self.tenant);
            }
        }
        if let Some(account) = counts.requesters.get_mut(&self.account) {
            account.in_use -= 1;
            match (account.in_use, self.quotas.is_divided(&self.account.1)) {
                // The account stays for its counts of refusals; see `QuotaCounts::forget_idle`.
                (0, true) => counts.idle += 1,
                // The permit itself retains the limit as long as it needs it.
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

    fn gateway() -> KeyRequester {
        KeyRequester::Gateway("g1".parse().unwrap())
    }

    #[test]
    fn shares_are_reached_named_and_given_back() {
        let quotas = Quotas::new(QuotaShares {
            requester: 24,
            tenant: 4,
            channels: 1,
        });
        let node = KeyRequester::Node("n1".parse().unwrap());
        let (alpha, beta) = (tenant("alpha"), tenant("beta"));
        // 13 % of the gateway's quota for each tenant; a node's quota is its tenant's.
        let permits: Vec<_> = (0..3)
            .map(|_| quotas.take(&alpha, &gateway(), true).unwrap())
            .collect();
        assert_eq!(
            quotas.take(&alpha, &gateway(), true).unwrap_err(),
            KeyRefusal::TenantBusy
        );
        let fourth = quotas.take(&alpha, &node, true).unwrap();
        assert_eq!(
            quotas.take(&alpha, &node, true).unwrap_err(),
            KeyRefusal::TenantBusy
        );
        let other = quotas.take(&beta, &gateway(), false).unwrap();
        assert_eq!(quotas.total(), 5);
        drop((permits, fourth, other));
        let counts = quotas.counts.lock().unwrap();
        assert!(counts.tenants.is_empty());
        assert_eq!(
            counts
                .requesters
                .keys()
                .map(|(_, r)| r.clone())
                .collect::<Vec<_>>(),
            [gateway()],
            "for what was refused"
        );
    }

    #[test]
    fn eight_tenants_with_silent_peers_leave_a_gateway_to_a_ninth() {
        let quotas = Quotas::new(QuotaShares {
            requester: 64,
            tenant: 64,
            channels: 1,
        });
        let permits: Vec<_> = (0..64)
            .map(|n| {
                quotas
                    .take(&tenant(&format!("t{}", n % 8)), &gateway(), true)
                    .unwrap()
            })
            .collect();
        let ninth: Vec<_> = (0..7)
            .map(|_| quotas.take(&tenant("ninth"), &gateway(), true).unwrap())
            .collect();
        // Each of the others loses its oldest, at most.
        let revoked: Vec<_> = permits
            .iter()
            .enumerate()
            .filter(|(_, p)| p.is_revoked())
            .map(|(n, _)| n)
            .collect();
        assert_eq!(revoked.len(), 7);
        assert!(revoked.iter().all(|n| *n < 8), "{revoked:?}");
        assert!(ninth.iter().all(|p| !p.is_revoked()));
        // All tenants have the same number now, and no tenant gives way to one with the same
        // number.
        assert_eq!(
            quotas.take(&tenant("t1"), &gateway(), true).unwrap_err(),
            KeyRefusal::RequesterBusy
        );
        drop((permits, ninth));
        assert_eq!(quotas.total(), 0);
    }

    #[test]
    fn signatures_of_ten_tenants_leave_a_gateway_to_an_eleventh() {
        let quotas = Quotas::new(QuotaShares {
            requester: 128,
            tenant: 128,
            channels: 1,
        });
        let mut permits = Vec::new();
        for n in 0..10 {
            permits.extend(std::iter::from_fn(|| {
                quotas
                    .take(&tenant(&format!("t{n}")), &gateway(), false)
                    .ok()
            }));
        }
        assert_eq!(
            quotas.take(&tenant("t0"), &gateway(), false).unwrap_err(),
            KeyRefusal::TenantBusy
        );
        permits.push(quotas.take(&tenant("eleventh"), &gateway(), false).unwrap());
    }

    #[test]
    fn refusals_of_disconnected_gateways_stay_visible() {
        let quotas = Quotas::new(QuotaShares {
            requester: 8,
            tenant: 64,
            channels: 1,
        });
        let alpha = tenant("alpha");
        let sums = || {
            let usage = quotas.usage();
            let named: u64 = usage
                .iter()
                .flat_map(|u| &u.holders)
                .map(|h| h.refused)
                .sum();
            (
                named + usage.iter().map(|u| u.refused_before).sum::<u64>(),
                usage.iter().map(|u| u.used).sum::<u64>(),
                usage[0].capacity,
            )
        };
        assert_eq!(
            sums(),
            (0, 0, 8),
            "the limit exists before its first permit"
        );
        for n in 0..3 * IDLE_GATEWAYS_MAX {
            let gateway = KeyRequester::Gateway(format!("g{n}").parse().unwrap());
            let place = quotas.take(&alpha, &gateway, false).unwrap();
            assert_eq!(
                quotas.take(&alpha, &gateway, false).unwrap_err(),
                KeyRefusal::TenantBusy
            );
            assert_eq!(sums(), (n as u64 + 1, 1, 8));
            drop(place);
        }
        assert!(quotas.counts.lock().unwrap().requesters.len() <= IDLE_GATEWAYS_MAX);
    }

    /// A refused first request leaves an account with nothing in progress.
    #[test]
    fn accounts_of_requesters_that_are_only_refused_are_bounded() {
        let quotas = Quotas::new(QuotaShares {
            // A quota of nothing refuses the first request too.
            requester: 0,
            tenant: 64,
            channels: 1,
        });
        let alpha = tenant("alpha");
        for n in 0..3 * IDLE_GATEWAYS_MAX {
            let gateway = KeyRequester::Gateway(format!("g{n}").parse().unwrap());
            assert!(quotas.take(&alpha, &gateway, false).is_err());
            let counts = quotas.counts.lock().unwrap();
            assert_eq!(counts.idle, counts.requesters.len());
            assert!(counts.idle <= IDLE_GATEWAYS_MAX);
        }
        let node = KeyRequester::Node("n1".parse().unwrap());
        assert!(quotas.take(&alpha, &node, false).is_err());
        let key = (Some(alpha), node);
        assert!(!quotas.counts.lock().unwrap().requesters.contains_key(&key));
    }

    #[test]
    fn nodes_of_one_name_of_two_tenants_have_a_count_each() {
        let quotas = Quotas::new(QuotaShares {
            requester: 2,
            tenant: 64,
            channels: 1,
        });
        let node = KeyRequester::Node("n1".parse().unwrap());
        let _alpha = [(); 2].map(|()| quotas.take(&tenant("alpha"), &node, false).unwrap());
        assert_eq!(
            quotas.take(&tenant("alpha"), &node, false).unwrap_err(),
            KeyRefusal::RequesterBusy
        );
        assert!(quotas.take(&tenant("beta"), &node, false).is_ok());
    }

    #[test]
    fn a_share_that_the_provider_wrote_holds_at_gateways_open_and_new() {
        let quotas = Quotas::new(QuotaShares {
            requester: 100,
            tenant: 100,
            channels: 1,
        });
        let own = |share: &str| {
            let mut shares = TenantShares::default();
            shares.set(ShareKind::KeyServerRequests, share.parse().unwrap());
            shares
        };
        let most = |name: &str, requester: &KeyRequester| {
            let permits: Vec<_> = (0..100)
                .map_while(|_| quotas.take(&tenant(name), requester, false).ok())
                .collect();
            permits.len()
        };
        let (alpha, node) = (tenant("alpha"), KeyRequester::Node("n1".parse().unwrap()));
        let first = quotas.take(&alpha, &gateway(), false).unwrap();
        quotas.set_shares([(&alpha, &own("3"))]);
        assert_eq!(
            (most("alpha", &gateway()), most("beta", &gateway())),
            (2, 13)
        );
        drop(first);
        assert_eq!(
            (most("alpha", &gateway()), most("beta", &gateway())),
            (3, 13)
        );
        assert_eq!(most("alpha", &node), 100, "a node's are its tenant's own");
        quotas.set_shares([(&alpha, &own("40%"))]);
        assert_eq!(most("alpha", &gateway()), 40);
        quotas.set_shares([(&alpha, &TenantShares::default())]);
        assert_eq!(most("alpha", &gateway()), 13);
    }

    #[test]
    fn short_operations_are_not_displaced() {
        let quotas = Quotas::new(QuotaShares {
            requester: 8,
            tenant: 8,
            channels: 1,
        });
        let permits: Vec<_> = (0..8)
            .map(|n| {
                quotas
                    .take(&tenant(&format!("t{n}")), &gateway(), false)
                    .unwrap()
            })
            .collect();
        assert_eq!(
            quotas.take(&tenant("ninth"), &gateway(), true).unwrap_err(),
            KeyRefusal::RequesterBusy
        );
        assert!(permits.iter().all(|p| !p.is_revoked()));
    }
}

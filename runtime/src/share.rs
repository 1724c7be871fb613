//! A limit divided among tenants. Each takes at most its share, the provider has a reserve, and
//! when the limit is full the largest holder gives way. Irrevocable permits have a threshold that
//! falls as the limit fills. The module counts and decides. The owner of a permit defines what the
//! permit stands for, and ends it. Start at [`TenantLimit::take`].

mod ledger;
mod threshold;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_model::ids::TenantName;
use canal_model::share::{Share, ShareKind, Shares};
use ipnet::IpNet;
use tokio::sync::watch;

use ledger::Ledger;
pub use threshold::decide_free_needed;

/// A party that takes from a limit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ShareHolder {
    /// A component of the provider: it may use the reserve, and no tenant's share limits it.
    Provider,
    /// A tenant.
    Tenant(TenantName),
    /// A range of source addresses whose tenant is not known (yet). It has a tenant's default
    /// share.
    Network(IpNet),
}

impl fmt::Display for ShareHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Provider => f.write_str("provider"),
            Self::Tenant(name) => name.fmt(f),
            Self::Network(range) => range.fmt(f),
        }
    }
}

/// The order in which the largest holder's revocable permits end when it has to give way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RevocationOrder {
    /// The oldest permit ends first. This suits connections that should have authenticated long
    /// ago.
    OldestFirst,
    /// The newest permit ends first. This suits sessions that earn trust with age.
    NewestFirst,
}

/// The configuration of a limit.
#[derive(Debug, Clone)]
pub struct TenantLimitConfig {
    /// Kind of the limit; it determines the name and the default share.
    pub kind: ShareKind,
    /// Maximum that all holders together may take.
    pub capacity: u64,
    /// Part of the capacity that only the provider may take.
    pub reserve: u64,
    /// The permits that end first.
    pub revocation_order: RevocationOrder,
}

/// The reason why a limit refused a permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShareRefusal {
    /// The holder has used its whole share.
    Share,
    /// The limit is full, and no holder that has more than the requester can give way.
    Full,
    /// Other holders are present, and too little would stay free for the amount that the holder
    /// would have.
    Threshold,
}

impl ShareRefusal {
    /// Returns the value of the metric label `reason`.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Share => "share",
            Self::Full => "full",
            Self::Threshold => "threshold",
        }
    }
}

/// One holder's use of a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareUsage {
    pub holder: ShareHolder,
    /// Amount that the tenant has taken at present.
    pub used: u64,
    /// Maximum that the holder may take.
    pub max: u64,
    /// Number of times that the tenant was refused.
    pub refused: u64,
    /// Number of permits that were revoked because this holder was the largest.
    pub revoked: u64,
}

/// The use of a whole limit by all holders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantLimitUsage {
    pub kind: ShareKind,
    pub capacity: u64,
    pub used: u64,
    /// Number of refusals of holders that are no longer listed individually.
    pub refused_before: u64,
    /// Number of permits revoked from holders that are no longer listed individually.
    pub revoked_before: u64,
    /// Usage per holder, sorted by holder: those that have permits, and those that were refused or
    /// revoked recently.
    pub holders: Vec<ShareUsage>,
}

/// A limit that tenants share; clones refer to the same limit.
///
/// Taking and giving back lock it for less than a microsecond. It is meant for connections,
/// streams, entries and bytes, not for operations that happen several times per request.
#[derive(Debug, Clone)]
pub struct TenantLimit {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    kind: ShareKind,
    ledger: Mutex<Ledger>,
}

/// An amount taken from a limit; it is given back when the permit is dropped.
#[derive(Debug)]
pub struct TenantPermit {
    limit: TenantLimit,
    /// Number of this permit in the ledger.
    id: u64,
    revoked: Option<watch::Receiver<bool>>,
}

impl TenantLimit {
    /// Creates a limit of which nothing is taken.
    pub fn new(config: TenantLimitConfig) -> Self {
        Self {
            inner: Arc::new(Inner {
                kind: config.kind,
                ledger: Mutex::new(Ledger::new(&config)),
            }),
        }
    }

    /// Returns the kind of the limit.
    pub fn kind(&self) -> ShareKind {
        self.inner.kind
    }

    /// Returns the maximum that all holders together may take.
    pub fn capacity(&self) -> u64 {
        self.ledger().capacity()
    }

    /// Returns the maximum that `holder` may take.
    pub fn max(&self, holder: &ShareHolder) -> u64 {
        self.ledger().max(holder)
    }

    /// Sets the shares that the provider wrote for tenants; a tenant that is not listed has the
    /// default. Permits in use are not affected.
    pub fn set_shares<'a>(&self, tenants: impl IntoIterator<Item = (&'a TenantName, &'a Shares)>) {
        let kind = self.inner.kind;
        // Only written shares: one that equals the table's default still overrides a different
        // default of this process.
        let written = |shares: &Shares| {
            shares
                .iter()
                .find(|(k, _)| *k == kind)
                .map(|(_, share)| share)
        };
        let own = tenants.into_iter().filter_map(|(name, shares)| {
            Some((ShareHolder::Tenant(name.clone()), written(shares)?))
        });
        self.ledger().set_shares(own.collect());
    }

    /// Sets the share of tenants for which the provider wrote none. It comes from a flag of the
    /// process.
    pub fn set_default_share(&self, share: Share) {
        self.ledger().set_default_share(share);
    }

    /// Takes `amount` for the lifetime of the permit. The permit cannot be revoked.
    ///
    /// # Errors
    /// Fails if the holder has used its share, or if the limit is full and no larger holder can
    /// give way. Also fails if the holder would have more than [`decide_free_needed`] allows. All
    /// are counted.
    pub fn take(&self, holder: &ShareHolder, amount: u64) -> Result<TenantPermit, ShareRefusal> {
        let id = self.ledger().take(holder, amount, None)?;
        Ok(TenantPermit {
            limit: self.clone(),
            id,
            revoked: None,
        })
    }

    /// Takes `amount` with a permit that is revoked when the limit is full and this holder is the
    /// largest.
    ///
    /// It is revoked only if the holder that needs the capacity then gets all that it requested.
    /// The owner has to await [`TenantPermit::revoked`] and then drop what the permit stands for.
    ///
    /// # Errors
    /// Fails like [`TenantLimit::take`].
    pub fn take_revocable(
        &self,
        holder: &ShareHolder,
        amount: u64,
    ) -> Result<TenantPermit, ShareRefusal> {
        let (sender, receiver) = watch::channel(false);
        let id = self.ledger().take(holder, amount, Some(sender))?;
        Ok(TenantPermit {
            limit: self.clone(),
            id,
            revoked: Some(receiver),
        })
    }

    /// Takes `amount` like [`TenantLimit::take_revocable`], but the holder may give way to itself.
    ///
    /// A holder that has used its whole share, or is the largest of a full limit, loses its own
    /// first or last revocable permit. This is for connections that have not authenticated, where
    /// the newest is the most relevant.
    ///
    /// # Errors
    /// Fails like [`TenantLimit::take`] if the holder has no permit that can be revoked.
    pub fn take_replacing(
        &self,
        holder: &ShareHolder,
        amount: u64,
    ) -> Result<TenantPermit, ShareRefusal> {
        let (sender, receiver) = watch::channel(false);
        let id = self.ledger().take_replacing(holder, amount, sender)?;
        Ok(TenantPermit {
            limit: self.clone(),
            id,
            revoked: Some(receiver),
        })
    }

    /// Returns the amount that all holders together have taken.
    pub fn used(&self) -> u64 {
        self.ledger().used()
    }

    /// Returns the amount that `holder` has taken, and the maximum that it may take.
    pub fn used_of(&self, holder: &ShareHolder) -> (u64, u64) {
        let ledger = self.ledger();
        (ledger.used_of(holder), ledger.max(holder))
    }

    /// Returns the holder that gives way first when the limit is full: the one with the largest
    /// amount in revocable permits. It is never the provider.
    pub fn first_to_give_way(&self) -> Option<ShareHolder> {
        self.ledger().first_to_give_way().cloned()
    }

    /// Returns the use of the limit by each holder, for metrics and `canal status`.
    pub fn usage(&self) -> TenantLimitUsage {
        self.ledger().usage(self.inner.kind)
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // The ledger is consistent after a panic, because nothing in it panics between two writes.
        self.inner
            .ledger
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl TenantPermit {
    /// Takes `more` for the same holder.
    ///
    /// # Errors
    /// Fails like [`TenantLimit::take`]; the permit then keeps its amount.
    pub fn grow(&mut self, more: u64) -> Result<(), ShareRefusal> {
        self.limit.ledger().grow(self.id, more)
    }

    /// Gives `less` of the amount back, at most all of it.
    pub fn shrink(&mut self, less: u64) {
        self.limit.ledger().shrink(self.id, less);
    }

    /// Makes the permit irrevocable, for example once its connection is authenticated.
    pub fn keep(&mut self) {
        self.revoked = None;
        self.limit.ledger().keep(self.id);
    }

    /// Makes an irrevocable permit revocable, for example while its connection is idle. The owner
    /// has to call [`TenantPermit::revoked`] again.
    pub fn offer(&mut self) {
        if self.revoked.is_none() {
            let (sender, receiver) = watch::channel(false);
            self.revoked = Some(receiver);
            self.limit.ledger().offer(self.id, sender);
        }
    }

    /// Returns true once the permit was revoked.
    pub fn is_revoked(&self) -> bool {
        self.revoked
            .as_ref()
            .is_some_and(|revoked| *revoked.borrow())
    }

    /// Waits until the permit is revoked. It never returns if the permit cannot be revoked.
    pub fn revoked(&self) -> impl Future<Output = ()> + use<> {
        let revoked = self.revoked.clone();
        async move {
            if let Some(mut revoked) = revoked
                && revoked.wait_for(|r| *r).await.is_ok()
            {
                return;
            }
            // The sender is gone: the permit is, or became, irrevocable.
            std::future::pending().await
        }
    }
}

impl Drop for TenantPermit {
    fn drop(&mut self) {
        self.limit.ledger().give_back(self.id);
    }
}

#[cfg(test)]
mod tests;

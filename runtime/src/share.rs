//! A limit divided among tenants: each takes at most its share, the provider has a reserve, and when the limit is full the largest holder
//! gives way. It counts and decides; what a permit stands for, and how it ends, is its owner's business. Start at [`TenantLimit::take`].

mod ledger;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_model::ids::TenantName;
use canal_model::share::{Share, ShareKind, Shares};
use ipnet::IpNet;
use tokio::sync::watch;

use ledger::Ledger;

/// Who takes from a limit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ShareHolder {
    /// A component of the provider: it may use the reserve, and no tenant's share limits it.
    Provider,
    /// A tenant.
    Tenant(TenantName),
    /// A range of source addresses whose tenant is not known (yet). It has a tenant's default share.
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

/// Which of the largest holder's revocable permits ends first when it has to give way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GiveWay {
    /// The permit that was taken first, as for connections that should long have proved themselves.
    Oldest,
    /// The permit that was taken last, as for sessions whose age speaks for them.
    Newest,
}

/// How a limit is set up.
#[derive(Debug, Clone)]
pub struct TenantLimitConfig {
    /// Which limit this is; gives the name and the default share.
    pub kind: ShareKind,
    /// The most that all holders take together.
    pub capacity: u64,
    /// What of the capacity only the provider may take.
    pub reserve: u64,
    /// Which permits end first.
    pub give_way: GiveWay,
}

/// Why a limit refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShareRefusal {
    /// The holder has its whole share.
    Share,
    /// The limit is full, and nobody who holds more than the caller can give way.
    Full,
}

impl ShareRefusal {
    /// The value of the metric label `reason`.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Share => "share",
            Self::Full => "full",
        }
    }
}

/// One holder's use of a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareUsage {
    pub holder: ShareHolder,
    /// Taken now.
    pub used: u64,
    /// The most it may take.
    pub max: u64,
    /// Takes that were refused.
    pub refused: u64,
    /// Permits that were revoked because this holder was the largest.
    pub revoked: u64,
}

/// The use of a whole limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantLimitUsage {
    pub kind: ShareKind,
    pub capacity: u64,
    pub used: u64,
    /// Refusals of holders that are no longer listed by themselves.
    pub refused_before: u64,
    /// Permits that were revoked of such holders.
    pub revoked_before: u64,
    /// In the order of the holders' names: whoever holds something, and whoever was refused something lately.
    pub holders: Vec<ShareUsage>,
}

/// A limit that tenants share; clones are the same limit. Taking and giving back lock it for less than a microsecond: it is for connections,
/// streams, entries and bytes, not for what happens several times per request.
#[derive(Debug, Clone)]
pub struct TenantLimit {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    kind: ShareKind,
    ledger: Mutex<Ledger>,
}

/// Something taken from a limit; given back when it is dropped.
#[derive(Debug)]
pub struct TenantPermit {
    limit: TenantLimit,
    /// The ledger's number of this permit.
    id: u64,
    revoked: Option<watch::Receiver<bool>>,
}

impl TenantLimit {
    /// A limit of which nothing is taken.
    pub fn new(config: TenantLimitConfig) -> Self {
        Self { inner: Arc::new(Inner { kind: config.kind, ledger: Mutex::new(Ledger::new(&config)) }) }
    }

    /// Which limit this is.
    pub fn kind(&self) -> ShareKind {
        self.inner.kind
    }

    /// The most that all holders take together.
    pub fn capacity(&self) -> u64 {
        self.ledger().capacity()
    }

    /// The most that `holder` may take of it.
    pub fn max(&self, holder: &ShareHolder) -> u64 {
        self.ledger().max(holder)
    }

    /// Sets what the provider wrote for tenants; whoever is not named has the default. What is taken already stays taken.
    pub fn set_shares<'a>(&self, tenants: impl IntoIterator<Item = (&'a TenantName, &'a Shares)>) {
        let kind = self.inner.kind;
        // Only what is written: a share equal to the table's default overrides a process's other default too.
        let written = |shares: &Shares| shares.iter().find(|(k, _)| *k == kind).map(|(_, share)| share);
        let own = tenants.into_iter().filter_map(|(name, shares)| Some((ShareHolder::Tenant(name.clone()), written(shares)?)));
        self.ledger().set_shares(own.collect());
    }

    /// Sets the share of tenants that the provider wrote nothing for: a flag of the process.
    pub fn set_default_share(&self, share: Share) {
        self.ledger().set_default_share(share);
    }

    /// Takes `amount` for as long as the permit lives. The permit can not be revoked.
    ///
    /// # Errors
    /// The holder has its share, or the limit is full and nobody larger can give way; either is counted.
    pub fn take(&self, holder: &ShareHolder, amount: u64) -> Result<TenantPermit, ShareRefusal> {
        let id = self.ledger().take(holder, amount, None)?;
        Ok(TenantPermit { limit: self.clone(), id, revoked: None })
    }

    /// Takes `amount` by a permit that is revoked when the limit is full and this holder the largest, and only if the taker gets what it asked
    /// for by that. The owner has to watch
    /// [`TenantPermit::revoked`] and to drop what the permit stands for.
    ///
    /// # Errors
    /// As [`TenantLimit::take`].
    pub fn take_revocable(&self, holder: &ShareHolder, amount: u64) -> Result<TenantPermit, ShareRefusal> {
        let (sender, receiver) = watch::channel(false);
        let id = self.ledger().take(holder, amount, Some(sender))?;
        Ok(TenantPermit { limit: self.clone(), id, revoked: Some(receiver) })
    }

    /// As [`TenantLimit::take_revocable`], but a holder that has its whole share, or is the largest of a full limit, gives way to itself: its
    /// first or last permit that can be revoked ends. For connections that have proved nothing, of which the newest says most.
    ///
    /// # Errors
    /// As [`TenantLimit::take`], if the holder has nothing that can be revoked.
    pub fn take_replacing(&self, holder: &ShareHolder, amount: u64) -> Result<TenantPermit, ShareRefusal> {
        let (sender, receiver) = watch::channel(false);
        let id = self.ledger().take_replacing(holder, amount, sender)?;
        Ok(TenantPermit { limit: self.clone(), id, revoked: Some(receiver) })
    }

    /// How much all holders have taken.
    pub fn used(&self) -> u64 {
        self.ledger().used()
    }

    /// Who gives way first when the limit is full: whoever holds the most by permits that can be revoked. Never the provider.
    pub fn first_to_give_way(&self) -> Option<ShareHolder> {
        self.ledger().first_to_give_way().cloned()
    }

    /// What each holder uses, for metrics and `canal status`.
    pub fn usage(&self) -> TenantLimitUsage {
        self.ledger().usage(self.inner.kind)
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Nothing in there panics between two writes.
        self.inner.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TenantPermit {
    /// Takes `more` for the same holder.
    ///
    /// # Errors
    /// As [`TenantLimit::take`]; the permit keeps what it has.
    pub fn grow(&mut self, more: u64) -> Result<(), ShareRefusal> {
        self.limit.ledger().grow(self.id, more)
    }

    /// Gives `less` of it back, at most all.
    pub fn shrink(&mut self, less: u64) {
        self.limit.ledger().shrink(self.id, less);
    }

    /// Makes the permit one that is never revoked, for example once a connection proved itself.
    pub fn keep(&mut self) {
        self.revoked = None;
        self.limit.ledger().keep(self.id);
    }

    /// Makes a permit that is kept one that can be revoked, for example while its connection is idle. [`TenantPermit::revoked`] has to be
    /// called anew.
    pub fn offer(&mut self) {
        if self.revoked.is_none() {
            let (sender, receiver) = watch::channel(false);
            self.revoked = Some(receiver);
            self.limit.ledger().offer(self.id, sender);
        }
    }

    /// True once the permit was revoked.
    pub fn is_revoked(&self) -> bool {
        self.revoked.as_ref().is_some_and(|revoked| *revoked.borrow())
    }

    /// Waits until the permit is revoked; for ever if it cannot be.
    pub fn revoked(&self) -> impl Future<Output = ()> + use<> {
        let revoked = self.revoked.clone();
        async move {
            if let Some(mut revoked) = revoked
                && revoked.wait_for(|r| *r).await.is_ok()
            {
                return;
            }
            // The permit is, or became, one that is kept.
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

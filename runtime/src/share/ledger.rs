//! The book of a limit: who holds how much, by which permits, and the decision whether more may be taken and who gives way. No locks, no IO.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use canal_model::share::{Share, ShareKind};
use tokio::sync::watch;

use super::{GiveWay, ShareHolder, ShareRefusal, ShareUsage, TenantLimitConfig, TenantLimitUsage};

/// Holders that hold nothing and are listed only for what was refused to them; when there are more, all of them are dropped.
const IDLE_HOLDERS_MAX: usize = 4096;

/// What one holder has.
#[derive(Debug, Default)]
struct Account {
    used: u64,
    refused: u64,
    revoked: u64,
    permits: u64,
    /// Its permits that can be revoked, in the order in which they were taken.
    revocable: BTreeMap<u64, watch::Sender<bool>>,
    /// How much of `used` the revocable permits hold.
    revocable_amount: u64,
}

#[derive(Debug)]
struct Permit {
    holder: ShareHolder,
    amount: u64,
    /// Revoked: not counted any more, although its owner has not dropped it yet.
    is_revoked: bool,
}

/// What there is to do for a take.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Grant,
    /// The permits of this holder have to go, as many as it takes.
    Revoke(ShareHolder),
    Refuse(ShareRefusal),
}

#[derive(Debug)]
pub(super) struct Ledger {
    capacity: u64,
    reserve: u64,
    give_way: GiveWay,
    default_share: Share,
    shares: BTreeMap<ShareHolder, Share>,
    accounts: HashMap<ShareHolder, Account>,
    /// Tenants and networks by what their revocable permits hold: whoever can give way, the largest last.
    by_size: BTreeSet<(u64, ShareHolder)>,
    permits: HashMap<u64, Permit>,
    next: u64,
    used: u64,
    refused_before: u64,
    /// Accounts with at least one permit.
    active: usize,
}

impl Ledger {
    pub(super) fn new(config: &TenantLimitConfig) -> Self {
        Self {
            capacity: config.capacity,
            reserve: config.reserve.min(config.capacity),
            give_way: config.give_way,
            default_share: config.kind.default_share(),
            shares: BTreeMap::new(),
            accounts: HashMap::new(),
            by_size: BTreeSet::new(),
            permits: HashMap::new(),
            next: 0,
            used: 0,
            refused_before: 0,
            active: 0,
        }
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn used(&self) -> u64 {
        self.used
    }

    pub(super) fn set_shares(&mut self, shares: BTreeMap<ShareHolder, Share>) {
        self.shares = shares;
    }

    pub(super) fn set_default_share(&mut self, share: Share) {
        self.default_share = share;
    }

    /// The most that a holder may take.
    pub(super) fn max(&self, holder: &ShareHolder) -> u64 {
        match holder {
            ShareHolder::Provider => self.capacity,
            // A tenant's share is a part of what tenants may take at all.
            _ => self.shares.get(holder).unwrap_or(&self.default_share).of(self.capacity - self.reserve),
        }
    }

    /// Whether `holder` may take `amount` more, and who gives way for it.
    fn decide(&self, holder: &ShareHolder, amount: u64) -> Decision {
        let own = self.accounts.get(holder).map_or(0, |a| a.used);
        if own.saturating_add(amount) > self.max(holder) {
            return Decision::Refuse(ShareRefusal::Share);
        }
        let provider = self.accounts.get(&ShareHolder::Provider).map_or(0, |a| a.used);
        let has_room = match holder {
            ShareHolder::Provider => self.used.saturating_add(amount) <= self.capacity,
            // What the provider holds counts against its reserve first.
            _ => (self.used - provider).saturating_add(amount).saturating_add(provider.max(self.reserve)) <= self.capacity,
        };
        if has_room {
            return Decision::Grant;
        }
        // The largest of those who can give way; it must hold more than the caller will, or two would throw each other out for ever.
        match self.by_size.last() {
            Some((size, largest)) if *size > 0 && (*holder == ShareHolder::Provider || *size > own.saturating_add(amount)) => {
                Decision::Revoke(largest.clone())
            }
            _ => Decision::Refuse(ShareRefusal::Full),
        }
    }

    /// Makes room for `amount`, or counts the refusal.
    fn make_room(&mut self, holder: &ShareHolder, amount: u64) -> Result<(), ShareRefusal> {
        loop {
            match self.decide(holder, amount) {
                Decision::Grant => return Ok(()),
                // Each turn revokes a permit, so this ends.
                Decision::Revoke(largest) => self.revoke_one(&largest),
                Decision::Refuse(refusal) => {
                    self.open(holder).refused += 1;
                    return Err(refusal);
                }
            }
        }
    }

    pub(super) fn take(&mut self, holder: &ShareHolder, amount: u64, revoke: Option<watch::Sender<bool>>) -> Result<u64, ShareRefusal> {
        self.make_room(holder, amount)?;
        let id = self.next;
        self.next += 1;
        self.used += amount;
        self.attach(holder, id, amount, revoke);
        self.permits.insert(id, Permit { holder: holder.clone(), amount, is_revoked: false });
        Ok(id)
    }

    /// [`Ledger::take`], for which the holder's own revocable permits go where nobody else's do.
    pub(super) fn take_replacing(&mut self, holder: &ShareHolder, amount: u64, revoke: watch::Sender<bool>) -> Result<u64, ShareRefusal> {
        // Each turn revokes a permit, so this ends.
        while let Decision::Refuse(_) = self.decide(holder, amount)
            && self.accounts.get(holder).is_some_and(|a| !a.revocable.is_empty())
        {
            self.revoke_one(&holder.clone());
        }
        self.take(holder, amount, Some(revoke))
    }

    pub(super) fn grow(&mut self, id: u64, more: u64) -> Result<(), ShareRefusal> {
        let Some(holder) = self.permits.get(&id).filter(|p| !p.is_revoked).map(|p| p.holder.clone()) else {
            return Err(ShareRefusal::Full);
        };
        self.make_room(&holder, more)?;
        // Making room may have revoked this very permit.
        let Some(permit) = self.permits.get_mut(&id).filter(|p| !p.is_revoked) else { return Err(ShareRefusal::Full) };
        permit.amount += more;
        self.used += more;
        self.change(&holder, id, |amount| amount + more);
        Ok(())
    }

    pub(super) fn shrink(&mut self, id: u64, less: u64) {
        let Some(permit) = self.permits.get_mut(&id).filter(|p| !p.is_revoked) else { return };
        let less = less.min(permit.amount);
        permit.amount -= less;
        self.used -= less;
        let holder = permit.holder.clone();
        self.change(&holder, id, |amount| amount - less);
    }

    pub(super) fn move_to(&mut self, id: u64, holder: &ShareHolder) -> Result<(), ShareRefusal> {
        let Some(permit) = self.permits.get(&id).filter(|p| !p.is_revoked) else { return Err(ShareRefusal::Full) };
        if permit.holder == *holder {
            return Ok(());
        }
        let (amount, old) = (permit.amount, permit.holder.clone());
        let own = self.accounts.get(holder).map_or(0, |a| a.used);
        // The whole does not change, so only the new holder's share can stand against it.
        if own.saturating_add(amount) > self.max(holder) {
            self.open(holder).refused += 1;
            return Err(ShareRefusal::Share);
        }
        let revoke = self.detach(&old, id, amount);
        self.attach(holder, id, amount, revoke);
        if let Some(permit) = self.permits.get_mut(&id) {
            permit.holder = holder.clone();
        }
        Ok(())
    }

    pub(super) fn keep(&mut self, id: u64) {
        let Some(permit) = self.permits.get(&id).filter(|p| !p.is_revoked) else { return };
        let (holder, amount) = (permit.holder.clone(), permit.amount);
        let Some(account) = self.accounts.get_mut(&holder) else { return };
        let before = account.revocable_amount;
        if account.revocable.remove(&id).is_some() {
            account.revocable_amount -= amount;
            self.resize(&holder, before);
        }
    }

    pub(super) fn offer(&mut self, id: u64, revoke: watch::Sender<bool>) {
        let Some(permit) = self.permits.get(&id).filter(|p| !p.is_revoked) else {
            // It was revoked before it was kept: whoever looks now must hear of it.
            revoke.send_replace(true);
            return;
        };
        let (holder, amount) = (permit.holder.clone(), permit.amount);
        let Some(account) = self.accounts.get_mut(&holder) else { return };
        let before = account.revocable_amount;
        if account.revocable.insert(id, revoke).is_none() {
            account.revocable_amount += amount;
            self.resize(&holder, before);
        }
    }

    pub(super) fn give_back(&mut self, id: u64) {
        let Some(permit) = self.permits.remove(&id) else { return };
        if !permit.is_revoked {
            self.used -= permit.amount;
            self.detach(&permit.holder, id, permit.amount);
        }
    }

    /// Revokes the first or last revocable permit of a holder.
    fn revoke_one(&mut self, holder: &ShareHolder) {
        let Some(account) = self.accounts.get_mut(holder) else { return };
        let ids = &account.revocable;
        let chosen = if self.give_way == GiveWay::Oldest { ids.keys().next() } else { ids.keys().next_back() };
        let Some(id) = chosen.copied() else { return };
        account.revoked += 1;
        let Some(permit) = self.permits.get_mut(&id) else { return };
        permit.is_revoked = true;
        let amount = permit.amount;
        self.used -= amount;
        if let Some(revoke) = self.detach(holder, id, amount) {
            // Nobody waits for it: then its owner looks by itself.
            revoke.send_replace(true);
        }
    }

    /// Puts a permit into its holder's account.
    fn attach(&mut self, holder: &ShareHolder, id: u64, amount: u64, revoke: Option<watch::Sender<bool>>) {
        let account = self.open(holder);
        let is_first = account.permits == 0;
        let before = account.revocable_amount;
        account.permits += 1;
        account.used += amount;
        if let Some(revoke) = revoke {
            account.revocable.insert(id, revoke);
            account.revocable_amount += amount;
        }
        self.active += usize::from(is_first);
        self.resize(holder, before);
    }

    /// Takes a permit out of its holder's account.
    fn detach(&mut self, holder: &ShareHolder, id: u64, amount: u64) -> Option<watch::Sender<bool>> {
        let account = self.accounts.get_mut(holder)?;
        let before = account.revocable_amount;
        account.used -= amount;
        account.permits -= 1;
        let revoke = account.revocable.remove(&id);
        if revoke.is_some() {
            account.revocable_amount -= amount;
        }
        let is_idle = account.permits == 0;
        let has_history = account.refused > 0 || account.revoked > 0;
        self.active -= usize::from(is_idle);
        self.resize(holder, before);
        if is_idle && !has_history {
            self.accounts.remove(holder);
        }
        revoke
    }

    /// Changes the amount of one permit in its holder's account.
    fn change(&mut self, holder: &ShareHolder, id: u64, new: impl Fn(u64) -> u64) {
        let Some(account) = self.accounts.get_mut(holder) else { return };
        let before = account.revocable_amount;
        account.used = new(account.used);
        if account.revocable.contains_key(&id) {
            account.revocable_amount = new(account.revocable_amount);
        }
        self.resize(holder, before);
    }

    /// Keeps `by_size` true after an account changed.
    fn resize(&mut self, holder: &ShareHolder, before: u64) {
        let now = self.accounts.get(holder).map_or(0, |a| a.revocable_amount);
        // The provider's own never give way.
        if now == before || *holder == ShareHolder::Provider {
            return;
        }
        if before > 0 {
            self.by_size.remove(&(before, holder.clone()));
        }
        if now > 0 {
            self.by_size.insert((now, holder.clone()));
        }
    }

    fn open(&mut self, holder: &ShareHolder) -> &mut Account {
        if !self.accounts.contains_key(holder) {
            self.forget_idle();
        }
        self.accounts.entry(holder.clone()).or_default()
    }

    /// Keeps the accounts of those who hold nothing bounded: refusals of endless source addresses must not fill the memory.
    fn forget_idle(&mut self) {
        if self.accounts.len() - self.active < IDLE_HOLDERS_MAX {
            return;
        }
        // All at once, so that the scan is paid once in thousands of refusals.
        let mut refused = 0;
        self.accounts.retain(|_, account| {
            let stays = account.permits > 0;
            refused += if stays { 0 } else { account.refused };
            stays
        });
        self.refused_before += refused;
    }

    pub(super) fn usage(&self, kind: ShareKind) -> TenantLimitUsage {
        let of = |(holder, account): (&ShareHolder, &Account)| ShareUsage {
            holder: holder.clone(),
            used: account.used,
            max: self.max(holder),
            refused: account.refused,
            revoked: account.revoked,
        };
        let mut holders: Vec<_> = self.accounts.iter().map(of).collect();
        holders.sort_by(|a, b| a.holder.cmp(&b.holder));
        TenantLimitUsage { kind, capacity: self.capacity, used: self.used, refused_before: self.refused_before, holders }
    }
}

//! The book of a limit: who holds how much, by which permits, and the decision whether more may be taken and who gives way. No locks, no IO.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use canal_model::share::{Share, ShareKind};
use tokio::sync::watch;

use super::{GiveWay, ShareHolder, ShareRefusal, ShareUsage, TenantLimitConfig, TenantLimitUsage};

/// Holders that hold nothing and are listed only for what was refused to them; when there are more, the networks among them are dropped, and
/// if those are less than half of them, the others as well.
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

/// A holder's permits that can be revoked, the first to go first.
type Revocable<'a> = Box<dyn Iterator<Item = &'a u64> + 'a>;

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
    revoked_before: u64,
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
            revoked_before: 0,
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

    /// Whose permit goes first when the limit is full.
    pub(super) fn first_to_give_way(&self) -> Option<&ShareHolder> {
        self.by_size.last().map(|(_, holder)| holder)
    }

    /// The permits that have to go so that `holder`, without `gone` of what it has, may take `amount`. Nothing is revoked here: a take that is
    /// refused costs nobody anything.
    fn decide(&self, holder: &ShareHolder, amount: u64, gone: u64) -> Result<Vec<u64>, ShareRefusal> {
        let own = self.accounts.get(holder).map_or(0, |a| a.used) - gone;
        let wanted = own.saturating_add(amount);
        if wanted > self.max(holder) {
            return Err(ShareRefusal::Share);
        }
        let provider = self.accounts.get(&ShareHolder::Provider).map_or(0, |a| a.used);
        let total = match holder {
            ShareHolder::Provider => self.used.saturating_add(amount) - gone,
            // What the provider holds counts against its reserve first.
            _ => (self.used - provider).saturating_add(amount).saturating_add(provider.max(self.reserve)) - gone,
        };
        let mut missing = total.saturating_sub(self.capacity);
        let mut chosen = Vec::new();
        if missing == 0 {
            return Ok(chosen);
        }
        // Who gives way must hold more than the caller will, or two would throw each other out for ever.
        let least = if *holder == ShareHolder::Provider { 0 } else { wanted };
        let mut rest = self.by_size.iter().rev().filter(|(_, other)| other != holder).peekable();
        // Those of whom a permit was chosen, by what is left to them, with their further permits.
        let mut begun: BTreeMap<(u64, &ShareHolder), Revocable<'_>> = BTreeMap::new();
        while missing > 0 {
            let next = rest.peek().map(|entry| (entry.0, &entry.1));
            let largest = next.max(begun.last_key_value().map(|(entry, _)| *entry));
            let Some((size, other)) = largest.filter(|(size, _)| *size > least) else { return Err(ShareRefusal::Full) };
            let permits = if next == largest {
                rest.next();
                self.revocable(other)
            } else {
                begun.remove(&(size, other))
            };
            // A holder without a further permit is out.
            let Some((id, permits)) = permits.and_then(|mut permits| Some((permits.next()?, permits))) else { continue };
            let amount = self.permits.get(id).map_or(0, |permit| permit.amount);
            chosen.push(*id);
            missing = missing.saturating_sub(amount);
            begun.insert((size - amount, other), permits);
        }
        Ok(chosen)
    }

    fn revocable(&self, holder: &ShareHolder) -> Option<Revocable<'_>> {
        let ids = self.accounts.get(holder)?.revocable.keys();
        Some(if self.give_way == GiveWay::Oldest { Box::new(ids) } else { Box::new(ids.rev()) })
    }

    /// Makes room for `amount`, or counts the refusal; then nobody has lost anything.
    fn make_room(&mut self, holder: &ShareHolder, amount: u64) -> Result<(), ShareRefusal> {
        let decided = self.decide(holder, amount, 0);
        self.revoke(holder, decided)
    }

    /// Revokes what was chosen, or counts the refusal of `holder`.
    fn revoke(&mut self, holder: &ShareHolder, decided: Result<Vec<u64>, ShareRefusal>) -> Result<(), ShareRefusal> {
        match decided {
            Ok(chosen) => {
                chosen.into_iter().for_each(|id| self.revoke_one(id));
                Ok(())
            }
            Err(refusal) => {
                self.open(holder).refused += 1;
                Err(refusal)
            }
        }
    }

    pub(super) fn take(&mut self, holder: &ShareHolder, amount: u64, revoke: Option<watch::Sender<bool>>) -> Result<u64, ShareRefusal> {
        self.make_room(holder, amount)?;
        Ok(self.grant(holder, amount, revoke))
    }

    /// A new permit, for which there is room.
    fn grant(&mut self, holder: &ShareHolder, amount: u64, revoke: Option<watch::Sender<bool>>) -> u64 {
        let id = self.next;
        self.next += 1;
        self.used += amount;
        self.attach(holder, id, amount, revoke);
        self.permits.insert(id, Permit { holder: holder.clone(), amount, is_revoked: false });
        id
    }

    /// [`Ledger::take`], for which the holder's own revocable permits go where nobody else's do.
    pub(super) fn take_replacing(&mut self, holder: &ShareHolder, amount: u64, revoke: watch::Sender<bool>) -> Result<u64, ShareRefusal> {
        let decided = self.decide_replacing(holder, amount);
        self.revoke(holder, decided)?;
        Ok(self.grant(holder, amount, Some(revoke)))
    }

    /// [`Ledger::decide`], with as few of the holder's own permits as it takes.
    fn decide_replacing(&self, holder: &ShareHolder, amount: u64) -> Result<Vec<u64>, ShareRefusal> {
        let mut decided = self.decide(holder, amount, 0);
        let (mut chosen, mut gone) = (Vec::new(), 0);
        for id in self.revocable(holder).into_iter().flatten() {
            if decided.is_ok() {
                break;
            }
            chosen.push(*id);
            gone += self.permits.get(id).map_or(0, |permit| permit.amount);
            decided = self.decide(holder, amount, gone);
        }
        chosen.extend(decided?);
        Ok(chosen)
    }

    pub(super) fn grow(&mut self, id: u64, more: u64) -> Result<(), ShareRefusal> {
        let Some(holder) = self.permits.get(&id).filter(|p| !p.is_revoked).map(|p| p.holder.clone()) else {
            return Err(ShareRefusal::Full);
        };
        // Nobody's own permits go for this, so the permit stays.
        self.make_room(&holder, more)?;
        let Some(permit) = self.permits.get_mut(&id) else { return Err(ShareRefusal::Full) };
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

    /// Takes a permit from its holder, and tells its owner.
    fn revoke_one(&mut self, id: u64) {
        let Some(permit) = self.permits.get_mut(&id) else { return };
        permit.is_revoked = true;
        let (holder, amount) = (permit.holder.clone(), permit.amount);
        self.used -= amount;
        self.open(&holder).revoked += 1;
        if let Some(revoke) = self.detach(&holder, id, amount) {
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
        // Addresses have no end and tenants do: whoever has many of the first must not set the second's counters back. So many go at once that
        // the scan is paid once in thousands of refusals.
        self.forget(|holder| matches!(holder, ShareHolder::Network(_)));
        if self.accounts.len() - self.active > IDLE_HOLDERS_MAX / 2 {
            self.forget(|_| true);
        }
    }

    /// Drops accounts that hold nothing; what was counted in them is kept as a sum.
    fn forget(&mut self, concerns: impl Fn(&ShareHolder) -> bool) {
        let (mut refused, mut revoked) = (0, 0);
        self.accounts.retain(|holder, account| {
            let stays = account.permits > 0 || !concerns(holder);
            if !stays {
                refused += account.refused;
                revoked += account.revoked;
            }
            stays
        });
        self.refused_before += refused;
        self.revoked_before += revoked;
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
        let (refused_before, revoked_before) = (self.refused_before, self.revoked_before);
        TenantLimitUsage { kind, capacity: self.capacity, used: self.used, refused_before, revoked_before, holders }
    }
}

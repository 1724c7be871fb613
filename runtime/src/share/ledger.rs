//! Bookkeeping of a limit: which holder has how much, by which permits. It decides whether more may
//! be taken and which permits are revoked. No locks, no IO. Start at [`Ledger::decide`].

use std::collections::{BTreeMap, BTreeSet, HashMap};

use canal_model::share::{Share, ShareKind};
use tokio::sync::watch;

use super::threshold::{decide_applies, decide_free_needed};
use super::{
    RevocationOrder, ShareHolder, ShareRefusal, ShareUsage, TenantLimitConfig, TenantLimitUsage,
};

/// Maximum number of holders that have no permits and are listed only for their refusals. When
/// there are more, the networks among them are dropped, and the others too if networks are less
/// than half.
/// An account takes a few hundred bytes, so that they take about a megabyte. Nobody measured this
/// value.
const IDLE_HOLDERS_MAX: usize = 4096;

/// The permits and counters of one holder.
#[derive(Debug, Default)]
struct Account {
    used: u64,
    refused: u64,
    revoked: u64,
    permits: u64,
    /// The holder's revocable permits, in the order in which they were taken.
    revocable: BTreeMap<u64, watch::Sender<bool>>,
    /// Part of `used` that is in revocable permits.
    revocable_amount: u64,
}

#[derive(Debug)]
struct LedgerPermit {
    holder: ShareHolder,
    amount: u64,
    /// A revoked permit is no longer counted, although its owner has not dropped it yet.
    is_revoked: bool,
}

/// Revocable permits of a holder, in the order in which they would be revoked.
type Revocable<'a> = Box<dyn Iterator<Item = &'a u64> + 'a>;

/// A holder's request for a permit.
#[derive(Debug, Clone, Copy)]
struct LedgerRequest<'a> {
    holder: &'a ShareHolder,
    amount: u64,
    /// Amount of the holder's own permits that are revoked for this request.
    freed: u64,
    is_revocable: bool,
}

#[derive(Debug)]
pub(super) struct Ledger {
    kind: ShareKind,
    capacity: u64,
    reserve: u64,
    revocation_order: RevocationOrder,
    default_share: Share,
    shares: BTreeMap<ShareHolder, Share>,
    accounts: HashMap<ShareHolder, Account>,
    /// Tenants and networks that can give way, sorted by the amount of their revocable permits; the
    /// largest is last.
    by_size: BTreeSet<(u64, ShareHolder)>,
    permits: HashMap<u64, LedgerPermit>,
    next: u64,
    used: u64,
    refused_before: u64,
    revoked_before: u64,
    /// Number of accounts with at least one permit.
    active: usize,
}

impl Ledger {
    pub(super) fn new(config: &TenantLimitConfig) -> Self {
        Self {
            kind: config.kind,
            capacity: config.capacity,
            reserve: config.reserve.min(config.capacity),
            revocation_order: config.revocation_order,
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

    /// Returns the maximum that a holder may take.
    pub(super) fn max(&self, holder: &ShareHolder) -> u64 {
        match holder {
            ShareHolder::Provider => self.capacity,
            // A tenant's share is a part of what all tenants together may take.
            _ => self
                .shares
                .get(holder)
                .unwrap_or(&self.default_share)
                .of(self.capacity - self.reserve),
        }
    }

    /// Returns the amount that a holder has taken.
    pub(super) fn used_of(&self, holder: &ShareHolder) -> u64 {
        self.accounts.get(holder).map_or(0, |account| account.used)
    }

    /// Returns the holder whose permit is revoked first when the limit is full.
    pub(super) fn first_to_give_way(&self) -> Option<&ShareHolder> {
        self.by_size.last().map(|(_, holder)| holder)
    }

    /// Returns how much must stay free beside the request, so that further tenants get something.
    fn free_needed(&self, request: LedgerRequest<'_>, provider: u64) -> u64 {
        let LedgerRequest {
            holder,
            amount,
            freed,
            is_revocable,
        } = request;
        let own = self.used_of(holder);
        // A holder that is alone may take its share. One that replaces its own permits takes
        // nothing from others.
        let is_alone = self.used - provider == own;
        if *holder == ShareHolder::Provider
            || is_alone
            || freed >= amount
            || !decide_applies(self.kind, is_revocable)
        {
            return 0;
        }
        decide_free_needed(
            (own - freed).saturating_add(amount),
            self.capacity - self.reserve,
        )
    }

    /// Decides which permits have to be revoked to grant the request.
    ///
    /// Nothing is revoked here: a take that is refused must not cost any holder a permit.
    fn decide(&self, request: LedgerRequest<'_>) -> Result<Vec<u64>, ShareRefusal> {
        let LedgerRequest {
            holder,
            amount,
            freed,
            ..
        } = request;
        let wanted = (self.used_of(holder) - freed).saturating_add(amount);
        if wanted > self.max(holder) {
            return Err(ShareRefusal::Share);
        }
        let provider = self.used_of(&ShareHolder::Provider);
        let total = match holder {
            ShareHolder::Provider => self.used.saturating_add(amount) - freed,
            // The provider uses its reserve before it uses shared capacity.
            _ => {
                (self.used - provider)
                    .saturating_add(amount)
                    .saturating_add(provider.max(self.reserve))
                    - freed
            }
        };
        // Within the capacity, only the part that stays free for further tenants is missing.
        let refusal = if total > self.capacity {
            ShareRefusal::Full
        } else {
            ShareRefusal::Threshold
        };
        let mut missing = total
            .saturating_add(self.free_needed(request, provider))
            .saturating_sub(self.capacity);
        let mut chosen = Vec::new();
        if missing == 0 {
            return Ok(chosen);
        }
        // A holder that gives way must have more than the requester would get; else two holders
        // would revoke each other endlessly. The provider never gives way, so every holder gives
        // way to it.
        let least = if *holder == ShareHolder::Provider {
            0
        } else {
            wanted
        };
        let mut rest = self
            .by_size
            .iter()
            .rev()
            .filter(|(_, other)| other != holder)
            .peekable();
        // Holders of which a permit was chosen, sorted by what remains to them, with their further
        // permits.
        let mut begun: BTreeMap<(u64, &ShareHolder), Revocable<'_>> = BTreeMap::new();
        while missing > 0 {
            let next = rest.peek().map(|entry| (entry.0, &entry.1));
            // The largest is either an untouched holder or one that has already lost a permit in
            // this decision.
            let largest = next.max(begun.last_key_value().map(|(entry, _)| *entry));
            let Some((size, other)) = largest.filter(|(size, _)| *size > least) else {
                return Err(refusal);
            };
            let permits = if next == largest {
                rest.next();
                self.revocable(other)
            } else {
                begun.remove(&(size, other))
            };
            // A holder without another revocable permit cannot give way further.
            let Some((id, permits)) =
                permits.and_then(|mut permits| Some((permits.next()?, permits)))
            else {
                continue;
            };
            // Each listed permit exists; one that counted as 0 would only cost a further one.
            let amount = self.permits.get(id).map_or(0, |permit| permit.amount);
            chosen.push(*id);
            missing = missing.saturating_sub(amount);
            begun.insert((size - amount, other), permits);
        }
        Ok(chosen)
    }

    fn revocable(&self, holder: &ShareHolder) -> Option<Revocable<'_>> {
        let ids = self.accounts.get(holder)?.revocable.keys();
        Some(if self.revocation_order == RevocationOrder::OldestFirst {
            Box::new(ids)
        } else {
            Box::new(ids.rev())
        })
    }

    /// Revokes the permits that are needed for `amount`, or counts the refusal; a refusal revokes
    /// nothing.
    fn free_capacity(
        &mut self,
        holder: &ShareHolder,
        amount: u64,
        is_revocable: bool,
    ) -> Result<(), ShareRefusal> {
        let decided = self.decide(LedgerRequest {
            holder,
            amount,
            freed: 0,
            is_revocable,
        });
        self.revoke(holder, decided)
    }

    /// Revokes the chosen permits, or counts the refusal of `holder`.
    fn revoke(
        &mut self,
        holder: &ShareHolder,
        decided: Result<Vec<u64>, ShareRefusal>,
    ) -> Result<(), ShareRefusal> {
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

    pub(super) fn take(
        &mut self,
        holder: &ShareHolder,
        amount: u64,
        revoke: Option<watch::Sender<bool>>,
    ) -> Result<u64, ShareRefusal> {
        self.free_capacity(holder, amount, revoke.is_some())?;
        Ok(self.grant(holder, amount, revoke))
    }

    /// Records a new permit. The caller has checked that the limit allows it.
    fn grant(
        &mut self,
        holder: &ShareHolder,
        amount: u64,
        revoke: Option<watch::Sender<bool>>,
    ) -> u64 {
        let id = self.next;
        self.next += 1;
        self.used += amount;
        self.attach(holder, id, amount, revoke);
        self.permits.insert(
            id,
            LedgerPermit {
                holder: holder.clone(),
                amount,
                is_revoked: false,
            },
        );
        id
    }

    /// Takes like [`Ledger::take`], but revokes the holder's own permits if no other holder gives
    /// way.
    pub(super) fn take_replacing(
        &mut self,
        holder: &ShareHolder,
        amount: u64,
        revoke: watch::Sender<bool>,
    ) -> Result<u64, ShareRefusal> {
        let decided = self.decide_replacing(holder, amount);
        self.revoke(holder, decided)?;
        Ok(self.grant(holder, amount, Some(revoke)))
    }

    /// Decides like [`Ledger::decide`], with as few of the holder's own permits revoked as
    /// necessary.
    fn decide_replacing(
        &self,
        holder: &ShareHolder,
        amount: u64,
    ) -> Result<Vec<u64>, ShareRefusal> {
        let mut request = LedgerRequest {
            holder,
            amount,
            freed: 0,
            is_revocable: true,
        };
        let mut decided = self.decide(request);
        let mut chosen = Vec::new();
        for id in self.revocable(holder).into_iter().flatten() {
            if decided.is_ok() {
                break;
            }
            chosen.push(*id);
            request.freed += self.permits.get(id).map_or(0, |permit| permit.amount);
            decided = self.decide(request);
        }
        chosen.extend(decided?);
        Ok(chosen)
    }

    pub(super) fn grow(&mut self, id: u64, more: u64) -> Result<(), ShareRefusal> {
        let Some(holder) = self
            .permits
            .get(&id)
            .filter(|p| !p.is_revoked)
            .map(|p| p.holder.clone())
        else {
            return Err(ShareRefusal::Full);
        };
        let is_revocable = self
            .accounts
            .get(&holder)
            .is_some_and(|account| account.revocable.contains_key(&id));
        // Growing never revokes the holder's own permits, so this permit stays valid.
        self.free_capacity(&holder, more, is_revocable)?;
        let Some(permit) = self.permits.get_mut(&id) else {
            return Err(ShareRefusal::Full);
        };
        permit.amount += more;
        self.used += more;
        self.change(&holder, id, |amount| amount + more);
        Ok(())
    }

    pub(super) fn shrink(&mut self, id: u64, less: u64) {
        let Some(permit) = self.permits.get_mut(&id).filter(|p| !p.is_revoked) else {
            return;
        };
        let less = less.min(permit.amount);
        permit.amount -= less;
        self.used -= less;
        let holder = permit.holder.clone();
        self.change(&holder, id, |amount| amount - less);
    }

    pub(super) fn keep(&mut self, id: u64) {
        let Some(permit) = self.permits.get(&id).filter(|p| !p.is_revoked) else {
            return;
        };
        let (holder, amount) = (permit.holder.clone(), permit.amount);
        let Some(account) = self.accounts.get_mut(&holder) else {
            return;
        };
        let before = account.revocable_amount;
        if account.revocable.remove(&id).is_some() {
            account.revocable_amount -= amount;
            self.resize(&holder, before);
        }
    }

    pub(super) fn offer(&mut self, id: u64, revoke: watch::Sender<bool>) {
        let Some(permit) = self.permits.get(&id).filter(|p| !p.is_revoked) else {
            // The permit was revoked while it was irrevocable to its owner: report it to the new
            // receiver.
            revoke.send_replace(true);
            return;
        };
        let (holder, amount) = (permit.holder.clone(), permit.amount);
        let Some(account) = self.accounts.get_mut(&holder) else {
            return;
        };
        let before = account.revocable_amount;
        if account.revocable.insert(id, revoke).is_none() {
            account.revocable_amount += amount;
            self.resize(&holder, before);
        }
    }

    pub(super) fn give_back(&mut self, id: u64) {
        let Some(permit) = self.permits.remove(&id) else {
            return;
        };
        if !permit.is_revoked {
            self.used -= permit.amount;
            self.detach(&permit.holder, id, permit.amount);
        }
    }

    /// Revokes a permit and notifies its owner.
    fn revoke_one(&mut self, id: u64) {
        let Some(permit) = self.permits.get_mut(&id) else {
            return;
        };
        permit.is_revoked = true;
        let (holder, amount) = (permit.holder.clone(), permit.amount);
        self.used -= amount;
        self.open(&holder).revoked += 1;
        if let Some(revoke) = self.detach(&holder, id, amount) {
            // `send_replace` also works without a waiting receiver; such an owner polls the value.
            revoke.send_replace(true);
        }
    }

    /// Adds a permit to its holder's account.
    fn attach(
        &mut self,
        holder: &ShareHolder,
        id: u64,
        amount: u64,
        revoke: Option<watch::Sender<bool>>,
    ) {
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

    /// Removes a permit from its holder's account.
    fn detach(
        &mut self,
        holder: &ShareHolder,
        id: u64,
        amount: u64,
    ) -> Option<watch::Sender<bool>> {
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
        let Some(account) = self.accounts.get_mut(holder) else {
            return;
        };
        let before = account.revocable_amount;
        account.used = new(account.used);
        if account.revocable.contains_key(&id) {
            account.revocable_amount = new(account.revocable_amount);
        }
        self.resize(holder, before);
    }

    /// Updates `by_size` after an account changed; `before` is the account's previous revocable
    /// amount.
    fn resize(&mut self, holder: &ShareHolder, before: u64) {
        let now = self.accounts.get(holder).map_or(0, |a| a.revocable_amount);
        // The provider's permits are never revoked.
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

    /// Bounds the number of accounts without permits: refusals of endless source addresses must not
    /// fill the memory.
    fn forget_idle(&mut self) {
        if self.accounts.len() - self.active < IDLE_HOLDERS_MAX {
            return;
        }
        // Addresses are unlimited and tenants are not: a client with many addresses must not reset
        // the counters of tenants. Many accounts are dropped at once, so that the scan happens only
        // once in thousands of refusals.
        self.forget(|holder| matches!(holder, ShareHolder::Network(_)));
        if self.accounts.len() - self.active > IDLE_HOLDERS_MAX / 2 {
            self.forget(|_| true);
        }
    }

    /// Drops accounts that have no permits, and adds their counters to the totals.
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
        TenantLimitUsage {
            kind,
            capacity: self.capacity,
            used: self.used,
            refused_before,
            revoked_before,
            holders,
        }
    }
}

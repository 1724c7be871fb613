//! Label sets and where their numbers are: one table per family, locked for registration and, in short turns, for scrapes. It decides who
//! gets a series, and which series end. What workers look up without a lock is in `shard`.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use canal_model::ids::TenantName;
use canal_model::share::ShareKind;
use canal_runtime::{GiveWay, ShareHolder, TenantLimit, TenantLimitConfig, TenantPermit};
use tokio::time::Instant;

use super::cells::{Arena, Slots};
use super::{Family, SERIES_IDLE_TIMEOUT, Shape, lock};

/// The label value of what no longer fits a family.
pub(super) const OTHER: &str = "other";
/// The label that names the owner of a series.
const OWNER_LABEL: &str = "tenant";
/// A series that has not changed for this long gives way when its owner, or the family, needs the room.
const PRESSED_IDLE_TIMEOUT: Duration = Duration::from_secs(300);
/// A full family is searched for idle series at most this often: registrations must not make it a loop over all series.
pub(super) const SEARCH_INTERVAL: Duration = Duration::from_secs(1);

/// Runs of the rest of an owner above which those that nobody can write are summed.
const RUNS_OF_REST_MAX: usize = 64;

pub(super) type Labels = Arc<[Box<str>]>;

#[derive(Debug, Default)]
struct Table {
    places: HashMap<Labels, usize>,
    /// A place stays where it is, so that a scrape can go on where it stopped.
    list: Vec<Option<Series>>,
    free: Vec<usize>,
    /// Series other than those for the rest of an owner.
    live: usize,
    /// Per owner, the series for what no longer fits.
    others: HashMap<Option<ShareHolder>, usize>,
    /// Places of series with a permit, by owner and by age: of those who give way the oldest does.
    ages: BTreeSet<(ShareHolder, u64, usize)>,
    /// The age of the next series.
    next_age: u64,
    searched: Option<Instant>,
    /// Series that walks over all of them have passed.
    #[cfg(test)]
    walked: usize,
}

#[derive(Debug)]
struct Series {
    labels: Labels,
    owner: Option<ShareHolder>,
    /// `None` for families without owners, and for the rest of an owner.
    permit: Option<TenantPermit>,
    /// A greater one was made later.
    age: u64,
    is_other: bool,
    parts: Vec<Slots>,
    shared: Option<Slots>,
    /// What ended runs have left.
    base: Vec<u64>,
    /// To see whether anything has changed since the last look.
    digest: u64,
    changed: Instant,
}

/// A family with its series.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) family: Family,
    pub(super) shape: Shape,
    /// Look-ups that went to [`OTHER`].
    pub(super) folded: AtomicU64,
    /// Series that ended because nothing counted in them.
    pub(super) expired: AtomicU64,
    /// Series in use that gave way, and are counted in their owner's [`OTHER`] since.
    pub(super) gave_way: AtomicU64,
    /// Where the owner's name stands among the labels, and the limit that owners share.
    owned: Option<(usize, TenantLimit)>,
    table: Mutex<Table>,
}

/// A series that was found or made for labels.
pub(super) struct Found {
    pub(super) slots: Slots,
    pub(super) labels: Labels,
    /// It is the series that the labels name, not the rest of their owner.
    pub(super) is_own: bool,
    /// A series in use gave way for it.
    pub(super) moved_one: bool,
}

impl Core {
    pub(super) fn new(family: Family, shape: Shape) -> Self {
        let owner = family.labels.iter().position(|l| *l == OWNER_LABEL);
        let limit = || {
            let capacity = family.series_max as u64;
            TenantLimit::new(TenantLimitConfig { kind: ShareKind::MetricSeries, capacity, reserve: 0, give_way: GiveWay::Oldest })
        };
        Self {
            family,
            shape,
            folded: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            gave_way: AtomicU64::new(0),
            owned: owner.map(|at| (at, limit())),
            table: Mutex::default(),
        }
    }

    /// The limit that the tenants of a family with the label `tenant` share.
    pub(super) fn limit(&self) -> Option<&TenantLimit> {
        self.owned.as_ref().map(|(_, limit)| limit)
    }

    /// The owner's name among `labels`; empty where series have no owner.
    pub(super) fn owner_name<'a>(&self, labels: &[&'a str]) -> &'a str {
        self.owned.as_ref().and_then(|(at, _)| labels.get(*at).copied()).unwrap_or_default()
    }

    fn owner(&self, labels: &[&str]) -> Option<ShareHolder> {
        self.owned.as_ref()?;
        // What is no tenant's name is the provider's own word, such as "unknown".
        Some(TenantName::new(self.owner_name(labels)).map_or(ShareHolder::Provider, ShareHolder::Tenant))
    }

    /// A run of numbers of one worker for the series that `labels` name; for the rest of their owner, `rest` if the worker has one already.
    pub(super) fn add_part(&self, labels: &[&str], rest: Option<Slots>, arena: &mut Arena) -> Found {
        let mut table = lock(&self.table);
        let (at, moved_one) = self.place(&mut table, labels);
        let Some(series) = table.list.get_mut(at).and_then(Option::as_mut) else {
            unreachable!("a place that was just found is taken");
        };
        let slots = rest.filter(|_| series.is_other).unwrap_or_else(|| {
            let new = arena.take(self.shape.slots());
            series.parts.push(new.clone());
            new
        });
        Found { slots, labels: series.labels.clone(), is_own: !series.is_other, moved_one }
    }

    /// The series' part that every thread may write.
    pub(super) fn shared(&self, labels: &[&str], arena: &mut Arena) -> (Slots, bool) {
        let mut table = lock(&self.table);
        let (at, moved_one) = self.place(&mut table, labels);
        let Some(series) = table.list.get_mut(at).and_then(Option::as_mut) else {
            unreachable!("a place that was just found is taken");
        };
        (series.shared.get_or_insert_with(|| arena.take(self.shape.slots())).clone(), moved_one)
    }

    /// Where the series of `labels` is, and whether one in use gave way for it.
    fn place(&self, table: &mut Table, labels: &[&str]) -> (usize, bool) {
        debug_assert_eq!(labels.len(), self.family.labels.len(), "metric {}: wrong number of labels", self.family.name);
        let wanted: Labels = labels.iter().map(|l| Box::from(*l)).collect();
        if let Some(at) = table.places.get(&wanted) {
            return (*at, false);
        }
        let owner = self.owner(labels);
        let Some((permit, moved_one)) = self.admit(table, owner.as_ref()) else {
            self.folded.fetch_add(1, Relaxed);
            return (self.other(table, owner, labels), false);
        };
        table.live += 1;
        (table.insert(Series::new(wanted, owner, permit)), moved_one)
    }

    /// Room for one more series, and whether one in use gave way for it: `None` if there is none. The permit is `None` where series have no
    /// owners.
    fn admit(&self, table: &mut Table, owner: Option<&ShareHolder>) -> Option<(Option<TenantPermit>, bool)> {
        let is_full = table.live >= self.family.series_max;
        let Some((_, limit)) = &self.owned else {
            let has_room = !is_full || self.search(table, |_| true);
            return has_room.then_some((None, false));
        };
        if is_full {
            // What is idle goes before what is in use: of the largest tenant, and of the provider, whose series never give way.
            let largest = limit.first_to_give_way();
            self.search(table, |o| o == largest.as_ref() || o == Some(&ShareHolder::Provider));
        }
        let owner = owner?;
        let taken = self.take(table, limit, owner);
        if taken.is_some() || !self.search(table, |o| o == Some(owner)) {
            return taken;
        }
        self.take(table, limit, owner)
    }

    /// A permit of `owner`; the series that gives way for it ends.
    fn take(&self, table: &mut Table, limit: &TenantLimit, owner: &ShareHolder) -> Option<(Option<TenantPermit>, bool)> {
        let first = limit.first_to_give_way();
        let permit = limit.take_revocable(owner, 1).ok()?;
        let moved_one = first.is_some_and(|first| self.end_revoked(table, &first));
        Some((Some(permit), moved_one))
    }

    /// Ends the series of some owners in which nothing counted lately. False: there were none, or it was done a moment ago.
    fn search(&self, table: &mut Table, concerns: impl Fn(Option<&ShareHolder>) -> bool) -> bool {
        let now = Instant::now();
        if table.searched.is_some_and(|at| now < at + SEARCH_INTERVAL) {
            return false;
        }
        table.searched = Some(now);
        let mut sum = vec![0; self.shape.slots()];
        let mut has_ended = false;
        #[cfg(test)]
        {
            table.walked += table.list.len();
        }
        for at in 0..table.list.len() {
            let Some(series) = table.list[at].as_mut() else { continue };
            series.look(&mut sum, now);
            let is_concerned = !series.is_other && concerns(series.owner.as_ref());
            if is_concerned && series.is_idle(self.shape, &sum, PRESSED_IDLE_TIMEOUT, now) {
                has_ended |= self.expire(table, at);
            }
        }
        has_ended
    }

    /// Ends an idle series, unless somebody took it up at this moment.
    fn expire(&self, table: &mut Table, at: usize) -> bool {
        let Some(series) = table.list[at].as_mut() else { return false };
        let mut left = vec![0; self.shape.slots()];
        let parts = std::mem::take(&mut series.parts);
        series.parts = parts.into_iter().filter_map(|part| part.release(&mut left).err()).collect();
        series.shared = series.shared.take().and_then(|part| part.release(&mut left).err());
        if !series.parts.is_empty() || series.shared.is_some() {
            series.keep(&left);
            return false;
        }
        table.remove(at);
        self.expired.fetch_add(1, Relaxed);
        true
    }

    /// Takes the revoked series of an owner out of the table; what counted in them counts in their owner's rest from now on. The oldest are
    /// revoked first, so that nobody else's are looked at.
    fn end_revoked(&self, table: &mut Table, owner: &ShareHolder) -> bool {
        let mut has_ended = false;
        while let Some(series) = table.oldest_of(owner).filter(|at| table.is_revoked(*at)).and_then(|at| table.remove(at)) {
            let names: Vec<&str> = series.labels.iter().map(|l| &**l).collect();
            let other = self.other(table, series.owner.clone(), &names);
            let Some(other) = table.list[other].as_mut() else { break };
            let mut left = series.base;
            left.resize(self.shape.slots(), 0);
            for part in series.parts.into_iter().chain(series.shared) {
                if let Err(part) = part.release(&mut left) {
                    part.mark_moved();
                    other.parts.push(part);
                }
            }
            other.keep(&left);
            self.gave_way.fetch_add(1, Relaxed);
            has_ended = true;
        }
        has_ended
    }

    /// The series for the rest of an owner: its labels say `other`, all but the owner's.
    fn other(&self, table: &mut Table, owner: Option<ShareHolder>, labels: &[&str]) -> usize {
        if let Some(at) = table.others.get(&owner) {
            return *at;
        }
        let named = self.owned.as_ref().map(|(at, _)| *at);
        let labels: Labels = labels.iter().enumerate().map(|(i, l)| Box::from(if Some(i) == named { *l } else { OTHER })).collect();
        let series = Series { is_other: true, ..Series::new(labels, owner.clone(), None) };
        let at = table.insert(series);
        table.others.insert(owner, at);
        at
    }

    /// Calls `each` with labels and summed numbers, from the place `from` on, until `each` says that it is enough. Gives the place to go on
    /// from. Series of tenants in which nothing counted for [`SERIES_IDLE_TIMEOUT`] end here.
    pub(super) fn visit(&self, from: usize, now: Instant, mut each: impl FnMut(&[Box<str>], &[u64]) -> bool) -> Option<usize> {
        let mut table = lock(&self.table);
        let mut sum = vec![0u64; self.shape.slots()];
        for at in from..table.list.len() {
            let Some(series) = table.list[at].as_mut() else { continue };
            series.look(&mut sum, now);
            let is_over = self.owned.is_some() && series.is_idle(self.shape, &sum, SERIES_IDLE_TIMEOUT, now);
            if is_over && self.expire(&mut table, at) {
                continue;
            }
            // Runs of series that gave way gather here until their handles are gone.
            if let Some(series) = table.list[at].as_mut().filter(|s| s.is_other && s.parts.len() > RUNS_OF_REST_MAX) {
                series.compact(self.shape);
            }
            let Some(series) = &table.list[at] else { continue };
            if !each(&series.labels, &sum) {
                return Some(at + 1);
            }
        }
        None
    }
}

impl Table {
    fn insert(&mut self, series: Series) -> usize {
        let labels = series.labels.clone();
        let at = match self.free.pop() {
            Some(at) => {
                self.list[at] = Some(series);
                at
            }
            None => {
                self.list.push(Some(series));
                self.list.len() - 1
            }
        };
        self.places.insert(labels, at);
        if let Some(series) = self.list[at].as_mut().filter(|series| series.permit.is_some()) {
            series.age = self.next_age;
            self.next_age += 1;
            self.ages.extend(series.owner.clone().map(|owner| (owner, series.age, at)));
        }
        at
    }

    fn remove(&mut self, at: usize) -> Option<Series> {
        let series = self.list[at].take()?;
        self.free.push(at);
        self.places.remove(&series.labels);
        if let Some(owner) = series.owner.clone().filter(|_| series.permit.is_some()) {
            self.ages.remove(&(owner, series.age, at));
        }
        if series.is_other {
            self.others.remove(&series.owner);
        } else {
            self.live -= 1;
        }
        Some(series)
    }

    /// The place of an owner's oldest series.
    fn oldest_of(&self, owner: &ShareHolder) -> Option<usize> {
        let (oldest, _, at) = self.ages.range((owner.clone(), 0, 0)..).next()?;
        (oldest == owner).then_some(*at)
    }

    fn is_revoked(&self, at: usize) -> bool {
        self.list[at].as_ref().and_then(|series| series.permit.as_ref()).is_some_and(TenantPermit::is_revoked)
    }
}

impl Series {
    fn new(labels: Labels, owner: Option<ShareHolder>, permit: Option<TenantPermit>) -> Self {
        let (parts, base) = (Vec::new(), Vec::new());
        Self { labels, owner, permit, age: 0, is_other: false, parts, shared: None, base, digest: 0, changed: Instant::now() }
    }

    /// Sums the numbers, and notes whether they have changed.
    fn look(&mut self, sum: &mut [u64], now: Instant) {
        sum.fill(0);
        for (total, n) in sum.iter_mut().zip(&self.base) {
            *total = *n;
        }
        for part in self.parts.iter().chain(&self.shared) {
            for (i, total) in sum.iter_mut().enumerate() {
                *total = total.wrapping_add(part.get(i));
            }
        }
        // Counts only rise, so their sum tells; a gauge may return to its old value and lose nothing but an hour.
        let digest = sum.iter().fold(0u64, |all, n| all.rotate_left(7).wrapping_add(*n));
        if digest != self.digest {
            self.digest = digest;
            self.changed = now;
        }
    }

    /// Nothing counted for `timeout`, and nobody can count. A gauge that is not zero says something for as long as it stands.
    fn is_idle(&self, shape: Shape, sum: &[u64], timeout: Duration, now: Instant) -> bool {
        let is_standing = shape == Shape::Gauge && sum.iter().any(|n| *n != 0);
        !is_standing && now >= self.changed + timeout && self.parts.iter().chain(&self.shared).all(Slots::is_unused)
    }

    /// Ends the runs that nobody can write, and keeps their numbers.
    fn compact(&mut self, shape: Shape) {
        let mut left = vec![0; shape.slots()];
        self.parts = std::mem::take(&mut self.parts).into_iter().filter_map(|part| part.release(&mut left).err()).collect();
        self.keep(&left);
    }

    /// Keeps what ended runs have left.
    fn keep(&mut self, left: &[u64]) {
        self.base.resize(left.len(), 0);
        for (total, n) in self.base.iter_mut().zip(left) {
            *total = total.wrapping_add(*n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registrations_in_a_full_family_do_not_walk_over_its_series() {
        let family = Family { series_max: 400, ..Family::new("requests_total", "Requests.", &["tenant", "code"]) };
        let core = Core::new(family, Shape::Counter);
        let mut arena = Arena::default();
        // Ten tenants have their shares, which are all there is; then others come, each of whom a series of the largest gives way to.
        for (count, tenants) in [(40, "abcdefghij"), (20, "klmno")] {
            for (tenant, code) in tenants.chars().flat_map(|tenant| (0..count).map(move |code| (tenant, code))) {
                core.add_part(&[&tenant.to_string(), &code.to_string()], None, &mut arena);
            }
        }
        assert_eq!(core.gave_way.load(Relaxed), 100);
        // All are in use, and nobody has more than the next one would: what comes now is counted in the rest.
        let before = lock(&core.table).walked;
        let began = Instant::now();
        for code in 0..1000 {
            core.add_part(&["a", &format!("more{code}")], None, &mut arena);
        }
        let searches = 1 + began.elapsed().as_secs() as usize;
        let walked = lock(&core.table).walked - before;
        assert!(walked <= 2 * searches * 450, "{walked} series passed by in 1000 registrations");
        assert_eq!(core.folded.load(Relaxed), 1000);
    }
}

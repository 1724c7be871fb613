//! Table of one family: label sets and the cells with their numbers. It is locked for registration
//! and, for short times, by scrapes. It decides which owner gets a series and which series end. The
//! lock-free look-up of workers is in `shard`.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::{RevocationOrder, ShareHolder, TenantLimit, TenantLimitConfig, TenantPermit};
use canal_model::ids::TenantName;
use canal_model::share::ShareKind;
use tokio::time::Instant;

use super::cells::{Arena, CellRange};
use super::{MetricFamily, MetricShape, SERIES_IDLE_TIMEOUT, lock};

/// Label value of the series that counts label sets which do not fit into a family.
pub(super) const OVERFLOW_LABEL: &str = "other";
/// Name of the label that names the owner of a series.
const OWNER_LABEL: &str = "tenant";
/// A series without a change for this long gives way when its owner or the family needs capacity.
/// Prometheus treats a series as gone after the same time without a sample.
const PRESSED_IDLE_TIMEOUT: Duration = Duration::from_secs(300);
/// Minimum interval between searches for idle series in a full family. Without it, each
/// registration would walk over all series.
/// With it, a full family of 10,000 series is walked over once a second at most. Nobody measured
/// this value.
pub(super) const SEARCH_INTERVAL: Duration = Duration::from_secs(1);

/// Runs of an owner's `other` series above which the runs without a writer are summed.
/// Nobody measured this value; more runs make each scrape slower.
const RUNS_OF_REST_MAX: usize = 64;

pub(super) type LabelValues = Arc<[Box<str>]>;

#[derive(Debug, Default)]
struct SeriesTable {
    places: HashMap<LabelValues, usize>,
    /// Series by index. An index never moves, so that a scrape can continue where it stopped.
    list: Vec<Option<Series>>,
    free: Vec<usize>,
    /// Number of series other than the `other` series of owners.
    live: usize,
    /// Index of the `other` series of each owner.
    others: HashMap<Option<ShareHolder>, usize>,
    /// Indexes of series with a permit, by owner and by age. The oldest series of an owner gives
    /// way first.
    ages: BTreeSet<(ShareHolder, u64, usize)>,
    /// Age number of the next series.
    next_age: u64,
    searched: Option<Instant>,
    /// Number of series that walks over all of them have visited.
    #[cfg(test)]
    walked: usize,
}

#[derive(Debug)]
struct Series {
    labels: LabelValues,
    owner: Option<ShareHolder>,
    /// `None` for families without owners, and for `other` series.
    permit: Option<TenantPermit>,
    /// Age number; a later series has a greater one.
    age: u64,
    is_other: bool,
    parts: Vec<CellRange>,
    shared: Option<CellRange>,
    /// Sums of the workers' parts that have ended.
    base: Vec<u64>,
    /// Digest of the numbers, which shows whether they have changed since the last check.
    digest: u64,
    changed: Instant,
}

/// A metric family with its series.
#[derive(Debug)]
pub(super) struct FamilyCore {
    pub(super) family: MetricFamily,
    pub(super) shape: MetricShape,
    /// Look-ups that were counted in an [`OVERFLOW_LABEL`] series.
    pub(super) folded: AtomicU64,
    /// Series that ended because their numbers did not change.
    pub(super) expired: AtomicU64,
    /// Series in use that gave way. They are counted in the [`OVERFLOW_LABEL`] series of their
    /// owner since.
    pub(super) displaced: AtomicU64,
    /// Index of the owner label, and the limit that owners share.
    owned: Option<(usize, TenantLimit)>,
    table: Mutex<SeriesTable>,
}

/// A series that was found or created for a label set.
pub(super) struct FoundSeries {
    pub(super) slots: CellRange,
    pub(super) labels: LabelValues,
    /// True for the series of these labels, false for the `other` series of their owner.
    pub(super) is_own: bool,
    /// A series in use gave way to it.
    pub(super) moved_one: bool,
}

impl FamilyCore {
    pub(super) fn new(family: MetricFamily, shape: MetricShape) -> Self {
        let owner = family.labels.iter().position(|l| *l == OWNER_LABEL);
        let limit = || {
            let capacity = family.series_max as u64;
            TenantLimit::new(TenantLimitConfig {
                kind: ShareKind::MetricSeries,
                capacity,
                reserve: 0,
                revocation_order: RevocationOrder::OldestFirst,
            })
        };
        Self {
            family,
            shape,
            folded: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            displaced: AtomicU64::new(0),
            owned: owner.map(|at| (at, limit())),
            table: Mutex::default(),
        }
    }

    /// Returns the limit that the tenants share in a family with the label `tenant`.
    pub(super) fn limit(&self) -> Option<&TenantLimit> {
        self.owned.as_ref().map(|(_, limit)| limit)
    }

    /// Returns the index of the owner label, if the series have owners.
    pub(super) fn owner_place(&self) -> Option<usize> {
        self.owned.as_ref().map(|(at, _)| *at)
    }

    /// Returns the owner's name in `labels`, or an empty string if series have no owner.
    pub(super) fn owner_name<'a>(&self, labels: &[&'a str]) -> &'a str {
        self.owned
            .as_ref()
            .and_then(|(at, _)| labels.get(*at).copied())
            .unwrap_or_default()
    }

    fn owner(&self, labels: &[&str]) -> Option<ShareHolder> {
        self.owned.as_ref()?;
        // A value that is not a tenant name comes from the provider, such as "unknown".
        Some(
            TenantName::new(self.owner_name(labels))
                .map_or(ShareHolder::Provider, ShareHolder::Tenant),
        )
    }

    /// Creates a run of numbers of one worker for the series of `labels`. If they go to the owner's
    /// `other` series, the worker's existing run `rest` is returned.
    pub(super) fn add_part(
        &self,
        labels: &[&str],
        rest: Option<CellRange>,
        arena: &mut Arena,
    ) -> FoundSeries {
        let mut table = lock(&self.table);
        let (at, moved_one) = self.find_or_insert(&mut table, labels);
        let Some(series) = table.list.get_mut(at).and_then(Option::as_mut) else {
            unreachable!("the slot found above exists");
        };
        let slots = rest.filter(|_| series.is_other).unwrap_or_else(|| {
            let new = arena.take(self.shape.slots());
            series.parts.push(new.clone());
            new
        });
        FoundSeries {
            slots,
            labels: series.labels.clone(),
            is_own: !series.is_other,
            moved_one,
        }
    }

    /// Returns the part of the series that every thread may write.
    pub(super) fn shared(&self, labels: &[&str], arena: &mut Arena) -> (CellRange, bool) {
        let mut table = lock(&self.table);
        let (at, moved_one) = self.find_or_insert(&mut table, labels);
        let Some(series) = table.list.get_mut(at).and_then(Option::as_mut) else {
            unreachable!("the slot found above exists");
        };
        (
            series
                .shared
                .get_or_insert_with(|| arena.take(self.shape.slots()))
                .clone(),
            moved_one,
        )
    }

    /// Returns the index of the series for `labels`, and whether a series in use gave way to it.
    fn find_or_insert(&self, table: &mut SeriesTable, labels: &[&str]) -> (usize, bool) {
        debug_assert_eq!(
            labels.len(),
            self.family.labels.len(),
            "metric {}: wrong number of labels",
            self.family.name
        );
        let wanted: LabelValues = labels.iter().map(|l| Box::from(*l)).collect();
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

    /// Admits one more series. Returns its permit, which is `None` where series have no owners, and
    /// whether a series in use gave way. Returns `None` if there is no capacity.
    fn admit(
        &self,
        table: &mut SeriesTable,
        owner: Option<&ShareHolder>,
    ) -> Option<(Option<TenantPermit>, bool)> {
        let is_full = table.live >= self.family.series_max;
        let Some((_, limit)) = &self.owned else {
            let has_room = !is_full || self.search(table, |_| true);
            return has_room.then_some((None, false));
        };
        if is_full {
            // Idle series end before series in use: those of the largest tenant, and those of the
            // provider, whose series never give way.
            let largest = limit.first_to_give_way();
            self.search(table, |o| {
                o == largest.as_ref() || o == Some(&ShareHolder::Provider)
            });
        }
        let owner = owner?;
        let taken = self.take(table, limit, owner);
        // The owner's own idle series may free its share.
        if taken.is_some() || !self.search(table, |o| o == Some(owner)) {
            return taken;
        }
        self.take(table, limit, owner)
    }

    /// Takes a permit for `owner`, and ends the series that gives way to it.
    fn take(
        &self,
        table: &mut SeriesTable,
        limit: &TenantLimit,
        owner: &ShareHolder,
    ) -> Option<(Option<TenantPermit>, bool)> {
        let first = limit.first_to_give_way();
        let permit = limit.take_revocable(owner, 1).ok()?;
        let moved_one = first.is_some_and(|first| self.end_revoked(table, &first));
        Some((Some(permit), moved_one))
    }

    /// Ends the idle series of the selected owners. Returns `false` if there were none, or if the
    /// last search was less than [`SEARCH_INTERVAL`] ago.
    fn search(
        &self,
        table: &mut SeriesTable,
        concerns: impl Fn(Option<&ShareHolder>) -> bool,
    ) -> bool {
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
            let Some(series) = table.list[at].as_mut() else {
                continue;
            };
            series.sum_parts(&mut sum, now);
            let is_concerned = !series.is_other && concerns(series.owner.as_ref());
            if is_concerned && series.is_idle(self.shape, &sum, PRESSED_IDLE_TIMEOUT, now) {
                has_ended |= self.expire(table, at);
            }
        }
        has_ended
    }

    /// Ends an idle series, unless a worker has just taken a handle of it.
    fn expire(&self, table: &mut SeriesTable, at: usize) -> bool {
        let Some(series) = table.list[at].as_mut() else {
            return false;
        };
        let mut left = vec![0; self.shape.slots()];
        let parts = std::mem::take(&mut series.parts);
        series.parts = parts
            .into_iter()
            .filter_map(|part| part.release(&mut left).err())
            .collect();
        series.shared = series
            .shared
            .take()
            .and_then(|part| part.release(&mut left).err());
        // A worker still has a handle: the series stays, with the numbers of the runs that ended.
        if !series.parts.is_empty() || series.shared.is_some() {
            series.keep(&left);
            return false;
        }
        table.remove(at);
        self.expired.fetch_add(1, Relaxed);
        true
    }

    /// Removes the revoked series of an owner from the table. Their counts go to the owner's
    /// `other` series from now on. The oldest are revoked first, so that series of other owners are
    /// not visited.
    fn end_revoked(&self, table: &mut SeriesTable, owner: &ShareHolder) -> bool {
        let mut has_ended = false;
        while let Some(series) = table
            .oldest_of(owner)
            .filter(|at| table.is_revoked(*at))
            .and_then(|at| table.remove(at))
        {
            let names: Vec<&str> = series.labels.iter().map(|l| &**l).collect();
            let other = self.other(table, series.owner.clone(), &names);
            let Some(other) = table.list[other].as_mut() else {
                break;
            };
            let mut left = series.base;
            left.resize(self.shape.slots(), 0);
            for part in series.parts.into_iter().chain(series.shared) {
                // A run that a worker may still write continues in the `other` series.
                if let Err(part) = part.release(&mut left) {
                    part.mark_moved();
                    other.parts.push(part);
                }
            }
            other.keep(&left);
            self.displaced.fetch_add(1, Relaxed);
            has_ended = true;
        }
        has_ended
    }

    /// Returns the `other` series of an owner. All its labels except the owner's are `other`.
    fn other(&self, table: &mut SeriesTable, owner: Option<ShareHolder>, labels: &[&str]) -> usize {
        if let Some(at) = table.others.get(&owner) {
            return *at;
        }
        let named = self.owned.as_ref().map(|(at, _)| *at);
        let labels: LabelValues = labels
            .iter()
            .enumerate()
            .map(|(i, l)| Box::from(if Some(i) == named { *l } else { OVERFLOW_LABEL }))
            .collect();
        let series = Series {
            is_other: true,
            ..Series::new(labels, owner.clone(), None)
        };
        let at = table.insert(series);
        table.others.insert(owner, at);
        at
    }

    /// Calls `each` with labels and summed numbers, from index `from` on, until `each` returns
    /// false. Returns the index to continue from. Tenants' series without a change for
    /// [`SERIES_IDLE_TIMEOUT`] end here.
    pub(super) fn visit(
        &self,
        from: usize,
        now: Instant,
        mut each: impl FnMut(&[Box<str>], &[u64]) -> bool,
    ) -> Option<usize> {
        let mut table = lock(&self.table);
        let mut sum = vec![0u64; self.shape.slots()];
        for at in from..table.list.len() {
            let Some(series) = table.list[at].as_mut() else {
                continue;
            };
            series.sum_parts(&mut sum, now);
            let is_over =
                self.owned.is_some() && series.is_idle(self.shape, &sum, SERIES_IDLE_TIMEOUT, now);
            if is_over && self.expire(&mut table, at) {
                continue;
            }
            // Runs of series that gave way collect here until their handles are dropped.
            if let Some(series) = table.list[at]
                .as_mut()
                .filter(|s| s.is_other && s.parts.len() > RUNS_OF_REST_MAX)
            {
                series.compact(self.shape);
            }
            let Some(series) = &table.list[at] else {
                continue;
            };
            if !each(&series.labels, &sum) {
                return Some(at + 1);
            }
        }
        None
    }
}

impl SeriesTable {
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
        if let Some(series) = self.list[at]
            .as_mut()
            .filter(|series| series.permit.is_some())
        {
            series.age = self.next_age;
            self.next_age += 1;
            self.ages
                .extend(series.owner.clone().map(|owner| (owner, series.age, at)));
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

    /// Returns the index of an owner's oldest series.
    fn oldest_of(&self, owner: &ShareHolder) -> Option<usize> {
        let (oldest, _, at) = self.ages.range((owner.clone(), 0, 0)..).next()?;
        (oldest == owner).then_some(*at)
    }

    fn is_revoked(&self, at: usize) -> bool {
        self.list[at]
            .as_ref()
            .and_then(|series| series.permit.as_ref())
            .is_some_and(TenantPermit::is_revoked)
    }
}

impl Series {
    fn new(labels: LabelValues, owner: Option<ShareHolder>, permit: Option<TenantPermit>) -> Self {
        let (parts, base) = (Vec::new(), Vec::new());
        Self {
            labels,
            owner,
            permit,
            age: 0,
            is_other: false,
            parts,
            shared: None,
            base,
            digest: 0,
            changed: Instant::now(),
        }
    }

    /// Sums the numbers, and records the time if they have changed.
    fn sum_parts(&mut self, sum: &mut [u64], now: Instant) {
        sum.fill(0);
        for (total, n) in sum.iter_mut().zip(&self.base) {
            *total = *n;
        }
        for part in self.parts.iter().chain(&self.shared) {
            for (i, total) in sum.iter_mut().enumerate() {
                *total = total.wrapping_add(part.get(i));
            }
        }
        // Counters only rise, so the digest detects every change. A gauge may return to its old
        // value, and loses nothing but an hour.
        let digest = sum
            .iter()
            .fold(0u64, |all, n| all.rotate_left(7).wrapping_add(*n));
        if digest != self.digest {
            self.digest = digest;
            self.changed = now;
        }
    }

    /// Returns whether nothing counted for `timeout` and no handle exists. A gauge that is not zero
    /// never counts as idle, because its value is information.
    fn is_idle(&self, shape: MetricShape, sum: &[u64], timeout: Duration, now: Instant) -> bool {
        let is_standing = shape == MetricShape::Gauge && sum.iter().any(|n| *n != 0);
        !is_standing
            && now >= self.changed + timeout
            && self
                .parts
                .iter()
                .chain(&self.shared)
                .all(CellRange::is_unused)
    }

    /// Ends the runs that no thread can write, and adds up their numbers.
    fn compact(&mut self, shape: MetricShape) {
        let mut left = vec![0; shape.slots()];
        self.parts = std::mem::take(&mut self.parts)
            .into_iter()
            .filter_map(|part| part.release(&mut left).err())
            .collect();
        self.keep(&left);
    }

    /// Adds the numbers of ended runs to `base`.
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
        let family = MetricFamily {
            series_max: 400,
            ..MetricFamily::new("requests_total", "Requests.", &["tenant", "code"])
        };
        let core = FamilyCore::new(family, MetricShape::Counter);
        let mut arena = Arena::default();
        // Ten tenants use all shares. Then five more tenants register, and a series of the largest
        // tenant gives way to each of theirs.
        for (count, tenants) in [(40, "abcdefghij"), (20, "klmno")] {
            for (tenant, code) in tenants
                .chars()
                .flat_map(|tenant| (0..count).map(move |code| (tenant, code)))
            {
                core.add_part(&[&tenant.to_string(), &code.to_string()], None, &mut arena);
            }
        }
        assert_eq!(core.displaced.load(Relaxed), 100);
        // All series are in use, and no owner has more than the next one would have: new label sets
        // are counted under `other`.
        let before = lock(&core.table).walked;
        let began = Instant::now();
        for code in 0..1000 {
            core.add_part(&["a", &format!("more{code}")], None, &mut arena);
        }
        let searches = 1 + began.elapsed().as_secs() as usize;
        let walked = lock(&core.table).walked - before;
        assert!(
            walked <= 2 * searches * 450,
            "{walked} series passed by in 1000 registrations"
        );
        assert_eq!(core.folded.load(Relaxed), 1000);
    }
}

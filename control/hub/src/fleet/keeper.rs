//! The fleet's one task: looks when something changed, has the planner decide, keeps the plan on disk, and only then tells data planes.
//! Changes gather for a moment, and a long computation is followed by a rest, so that reports never turn into a storm of plans.

use std::sync::Arc;
use std::time::Duration;

use canal_model::fleet::{Demands, Fleet as Ships, Ownership, Rules};
use canal_model::ids::Generation;
use canal_model::plan::{Note, Plan};
use tokio::sync::oneshot;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::tier::{self, Tables, Telling};
use super::{Counts, locked};
use crate::catalog::Catalog;
use crate::metrics;
use crate::shared::Shared;
use crate::writer::{Command, Tier};

/// Changes gather for so long.
const GATHER: Duration = Duration::from_millis(20);
/// How often silence is looked for.
const TICK: Duration = Duration::from_millis(100);
/// After the store refused, it is tried again so much later.
const AFTER_REFUSAL: Duration = Duration::from_millis(500);
/// The planner rests so many times as long as it worked.
const REST: u32 = 3;

pub(crate) struct Keeper {
    shared: Arc<Shared>,
    /// The plan that is on disk for certain.
    kept: Option<Arc<Plan>>,
    /// The tables that data planes were last told.
    told: Arc<Tables>,
    /// What the writer was last given.
    given: Option<Tier>,
    /// What was demanded when a plan was last told.
    demands: Arc<Demands>,
    generation: Generation,
    tick: Interval,
    /// Something was seen while something else was done.
    again: bool,
}

impl Keeper {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let plan = shared.fleet.plan();
        let told = Arc::new(tier::tables(&plan, &Tables::new()));
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (demands, generation) = (Arc::default(), Generation(0));
        Self { shared, kept: Some(plan), told, given: None, demands, generation, tick, again: false }
    }

    /// The first look, before anybody can connect: what the store says is in force from the first moment on.
    pub(crate) async fn begin(&mut self) -> bool {
        let catalog = self.shared.catalog.borrow().clone();
        self.step(&catalog).await
    }

    /// Runs until the controller ends.
    pub(crate) async fn run(mut self) {
        let mut catalogs = self.shared.catalog.subscribe();
        let mut due = true;
        loop {
            if due {
                tokio::time::sleep(GATHER).await;
                let begun = Instant::now();
                let catalog = catalogs.borrow_and_update().clone();
                due = !self.step(&catalog).await;
                // What this step itself published is no reason for another one.
                let newest = catalogs.borrow_and_update().generation;
                let is_own = newest == self.generation && newest.0 == catalog.generation.0 + 1;
                due |= newest != catalog.generation && !is_own;
                self.meanwhile(tokio::time::sleep(begun.elapsed() * REST)).await;
                due |= std::mem::take(&mut self.again);
                if due {
                    continue;
                }
            }
            tokio::select! {
                _ = self.tick.tick() => due = self.look().await,
                () = self.shared.fleet.wake.notified() => due = true,
                changed = catalogs.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    due = true;
                }
            }
        }
    }

    /// Waits for something, with an eye on edges: an AZ is closed at once, by the plan in force, however long a plan or a rest takes.
    async fn meanwhile<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                _ = self.tick.tick() => {
                    let changed = Box::pin(self.look()).await;
                    self.again |= changed;
                }
            }
        }
    }

    /// Looks for silence, and closes AZs. True: there is something to plan.
    async fn look(&mut self) -> bool {
        let seen = self.observe().await;
        if seen.closed && !self.close().await {
            self.again = true;
        }
        seen.changed
    }

    /// Tells the plan in force as it stands now. False: it must be repeated.
    async fn close(&mut self) -> bool {
        if self.given.is_none() {
            return true;
        }
        let telling = self.telling(self.shared.fleet.plan(), self.demands.clone(), Instant::now()).await;
        match telling {
            Some(telling) => self.tell(telling).await,
            None => false,
        }
    }

    /// Draws conclusions from silence.
    async fn observe(&self) -> Seen {
        let seen = self.shared.fleet.roster().observe(Instant::now());
        for az in &seen.closed {
            tracing::error!(%az, "the AZ's edge is silent; the AZ is closed");
            self.shared.metrics.count(metrics::FLEET_AZS_CLOSED, &[]);
        }
        for replica in &seen.gone {
            tracing::warn!(%replica, "nobody has seen the replica for long; it is gone");
        }
        for name in seen.rows {
            let shared = self.shared.clone();
            tracing::info!(replica = %name, state = ?shared.fleet.roster().members().get(&name).map(|m| m.row.state), "the replica's state changed");
            let kept = tokio::task::spawn_blocking(move || shared.fleet.keep_row(&shared.store, &name)).await;
            if let Ok(Err(e)) = kept {
                // The state follows from reports; after a restart it is found again.
                self.store_refused(&e);
            }
        }
        Seen { changed: seen.changed, closed: !seen.closed.is_empty() }
    }

    fn store_refused(&self, e: &canal_store::StoreError) {
        self.shared.metrics.count(metrics::STORE_ERRORS, &[("reason", e.name())]);
        tracing::error!(error = %e, "the fleet's state could not be kept; it is tried again");
    }

    /// One look at everything. False: it must be repeated.
    async fn step(&mut self, catalog: &Arc<Catalog>) -> bool {
        self.look().await;
        let shared = self.shared.clone();
        let now = Instant::now();
        let fleet = &shared.fleet;
        let demands = Arc::new(tier::demands(catalog, Rules::default()));
        let parent = fleet.plan();
        let (ships, ownership, is_idle) = {
            let roster = fleet.roster();
            let is_idle = roster.is_empty() && parent.number == 0;
            // Nobody is heard: the plan stands as it is, whatever the clock says.
            let ships = (!roster.is_blind(now)).then(|| (roster.fleet(now), roster.ownership().clone()));
            let (ships, ownership) = ships.unzip();
            (ships, ownership, is_idle)
        };
        if is_idle {
            // A world without a tier pays nothing for it.
            return true;
        }
        let plan = match (ships, ownership) {
            (Some(ships), Some(ownership)) => self.plan(parent, ships, demands.clone(), ownership).await,
            _ if self.given.is_some() => return true,
            _ => Some(parent),
        };
        let Some(plan) = plan else {
            self.meanwhile(tokio::time::sleep(AFTER_REFUSAL)).await;
            return false;
        };
        fleet.roster().note_motion(&plan);
        self.demands = demands.clone();
        let Some(telling) = self.telling(plan.clone(), demands, now).await else { return false };
        let is_waiting = telling.waiting > 0;
        let done = self.tell(telling).await;
        done && (is_waiting || self.forget(&plan).await)
    }

    /// What is to be told of a plan. `None`: it must be repeated.
    async fn telling(&mut self, plan: Arc<Plan>, demands: Arc<Demands>, now: Instant) -> Option<Telling> {
        let shared = self.shared.clone();
        let (told, given) = (self.told.clone(), self.given.as_ref().map(|given| given.tenants.clone()));
        let work = move || {
            let roster = shared.fleet.roster();
            let ships = roster.fleet(now);
            tier::telling(&plan, &ships, &demands, &roster, (&told, &given.unwrap_or_default()))
        };
        let telling = tokio::task::spawn_blocking(work).await;
        telling
            .inspect_err(|_| tracing::error!("what to tell could not be decided, which is a fault of the controller; it is tried again"))
            .ok()
    }

    /// The next plan, on disk and in force. `None`: the store refused.
    async fn plan(&mut self, parent: Arc<Plan>, ships: Ships, demands: Arc<Demands>, ownership: Ownership) -> Option<Arc<Plan>> {
        let before = parent.clone();
        let work = move || canal_planner::plan(&ships, &demands, &ownership, Some(&tier::seeded(&before, &demands)));
        let begun = Instant::now();
        let work = tokio::task::spawn_blocking(work);
        let Ok(next) = self.meanwhile(work).await else {
            tracing::error!("the planner failed, which is a fault of the controller; the last plan stands");
            return Some(parent);
        };
        self.shared.metrics.add(metrics::FLEET_PLAN_SECONDS, &[], begun.elapsed().as_secs_f64());
        self.shared.metrics.count(metrics::FLEET_PLANS, &[]);
        if next == *parent && self.kept.is_some() {
            return Some(parent);
        }
        let next = Arc::new(next);
        let (store, before, after) = (self.shared.store.clone(), self.kept.take(), next.clone());
        let keeping = tokio::task::spawn_blocking(move || store.put_plan(before.as_deref(), &after));
        match self.meanwhile(keeping).await {
            Ok(Ok(())) => self.kept = Some(next.clone()),
            Ok(Err(e)) => {
                // Which of the two plans is on disk is not known, so the next one is written whole.
                self.store_refused(&e);
                return None;
            }
            Err(_) => return None,
        }
        self.count_changes(&parent, &next);
        for note in next.notes.iter().filter(|n| !parent.notes.contains(n)) {
            tracing::warn!(plan = next.number, %note, "the plan leaves something to be wished for");
        }
        *locked(&self.shared.fleet.plan) = next.clone();
        Some(next)
    }

    fn count_changes(&self, parent: &Plan, next: &Plan) {
        let changes = Changes::between(parent, next);
        #[allow(clippy::cast_precision_loss, reason = "all of these are far below 2^52")]
        for (metric, n) in [
            (metrics::FLEET_BUCKETS_MOVED, changes.moved),
            (metrics::FLEET_BUCKETS_HELD, changes.held),
            (metrics::FLEET_OWNERS_KEPT, changes.owners),
        ] {
            self.shared.metrics.add(metric, &[], n as f64);
        }
    }

    /// Has the writer publish what differs from what it said last. False: it must be repeated.
    async fn tell(&mut self, telling: Telling) -> bool {
        let Telling { tier, tables, plan, waiting, closed } = telling;
        *locked(&self.shared.fleet.counts) = Counts { closed, waiting };
        if self.given.as_ref() == Some(&tier) {
            self.shared.fleet.roster().note_plan(self.generation, plan);
            return true;
        }
        let (reply, answer) = oneshot::channel();
        if self.shared.commands.send(Command::Tier { tier: tier.clone(), reply }).await.is_err() {
            return true;
        }
        let generation = match answer.await {
            Ok(Ok(generation)) => generation,
            Ok(Err(e)) => {
                self.store_refused(&e);
                return false;
            }
            // The writer has ended, and so does the controller.
            Err(_) => return true,
        };
        self.shared.fleet.roster().published(generation, plan, &tier.whereabouts, Instant::now());
        self.shared.metrics.count(metrics::FLEET_PUBLICATIONS, &[]);
        self.generation = generation;
        self.told = Arc::new(tables);
        self.given = Some(tier);
        true
    }

    /// Frees the numbers of replicas that are gone from all tables. False: something was freed, so that there is more to tell.
    async fn forget(&self, plan: &Plan) -> bool {
        let names = self.shared.fleet.roster().forgettable(plan, self.generation);
        let mut done = true;
        for name in names {
            let (shared, gone) = (self.shared.clone(), name.clone());
            let forget = move || {
                let _alone = locked(&shared.fleet.rows);
                shared.store.forget_replica(&gone)
            };
            match tokio::task::spawn_blocking(forget).await {
                Ok(Ok(())) => {
                    self.shared.fleet.roster().forget(&name);
                    self.shared.metrics.count(metrics::FLEET_FORGOTTEN, &[]);
                    tracing::info!(target: "audit", replica = %name, "forgot the replica; its number is free");
                    done = false;
                }
                Ok(Err(e)) => self.store_refused(&e),
                Err(_) => {}
            }
        }
        done
    }
}

/// What became of silence.
struct Seen {
    /// There is something to plan.
    changed: bool,
    /// An AZ's edge fell silent just now.
    closed: bool,
}

/// What one plan changed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    /// Buckets with another head.
    moved: usize,
    /// Buckets that newly keep their head because their chain is full.
    held: usize,
    /// Former heads that newly stay for their sessions.
    owners: usize,
}

impl Changes {
    fn between(parent: &Plan, next: &Plan) -> Self {
        let mut out = Self::default();
        for (id, service) in &next.services {
            let Some(before) = parent.services.get(id) else { continue };
            for (az, table) in &service.tables {
                let Some(old) = before.tables.get(az).filter(|old| !Arc::ptr_eq(old, table)) else { continue };
                for (was, is) in old.chains.iter().zip(&table.chains) {
                    out.moved += usize::from(was.first().map(|s| s.replica) != is.first().map(|s| s.replica));
                    out.owners += is.iter().filter(|s| s.is_owner() && !was.contains(s)).count();
                }
            }
        }
        let held = |plan: &Plan| -> usize {
            let of = |n: &Note| if let Note::Held { buckets, .. } = n { buckets.len() } else { 0 };
            plan.notes.iter().map(of).sum()
        };
        out.held = held(next).saturating_sub(held(parent));
        out
    }
}

//! The fleet's reconciler: when something changed, it has the planner decide, and applies the plan.
//! Changes gather for a moment, and a long computation is followed by a pause. Frequent reports
//! therefore do not cause continuous planning. Start at [`FleetReconciler::run`];
//! [`FleetReconciler::apply_plan`] is the only way by which a plan comes into force.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use canal_catalog::Catalog;
use canal_controller_metrics::{self as metrics, ControllerMetrics};
use canal_model::fleet::{Demands, Fleet, Ownership, ShardingRules};
use canal_model::ids::Generation;
use canal_model::plan::Plan;
use canal_store::Store;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use crate::applied_plan::{AppliedPlan, PlanDelta, PlanRefusal};
use crate::handle::{FleetCounts, FleetHandle, locked};
use crate::publication::{self, PublishedTables, TierPublication};
use crate::tier::{TierState, TierUpdate};

/// Time for which changes gather before a pass.
/// It is a tenth of the interval of an edge's reports (`REPORT_MOVING_MS`), so that reports that
/// arrive together cost one pass and a change is hardly delayed. Nobody measured this value.
const DEBOUNCE: Duration = Duration::from_millis(20);
/// Interval between checks for members that fell silent.
/// A member's silence is noticed this much late, which is a fifteenth of the shortest timeout
/// (`edge_silent`).
const RECONCILE_INTERVAL: Duration = Duration::from_millis(100);
/// Delay before a retry after the store refused.
/// Five intervals between passes, so that a store that refuses is not tried in each pass.
const STORE_RETRY_DELAY: Duration = Duration::from_millis(500);
/// The pause after a pass lasts this many times as long as the pass.
/// So planning takes at most a quarter of one core, however fast changes come.
const PLANNING_REST_FACTOR: u32 = 3;

/// Handles of the controller that the reconciler uses.
#[derive(Clone)]
pub struct ReconcilerContext {
    pub fleet: Arc<FleetHandle>,
    pub catalog: watch::Receiver<Arc<Catalog>>,
    pub store: Arc<Store>,
    pub metrics: Arc<ControllerMetrics>,
    /// Queue to the catalog writer, which publishes the states of the tier.
    pub updates: mpsc::Sender<TierUpdate>,
}

/// State of the reconciler task.
pub struct FleetReconciler {
    shared: ReconcilerContext,
    /// Plan that is on disk for certain; `None` after a write that failed.
    persisted_plan: Option<Arc<Plan>>,
    /// Tables that were last published to data planes.
    published_tables: Arc<PublishedTables>,
    /// State that the catalog writer was last given.
    last_tier: Option<TierState>,
    /// Demands of the plan that was last published.
    demands: Arc<Demands>,
    /// Generation of the last publication.
    generation: Generation,
    tick: Interval,
    /// True if something changed while the task waited for something else.
    rerun: bool,
}

impl FleetReconciler {
    /// Creates a reconciler that starts from the plan in the store.
    pub fn new(shared: ReconcilerContext) -> Self {
        let plan = shared.fleet.plan();
        let tables = Arc::new(publication::tables(&plan, &PublishedTables::new()));
        let mut tick = tokio::time::interval(RECONCILE_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (demands, generation) = (Arc::default(), Generation(0));
        Self {
            shared,
            persisted_plan: Some(plan),
            published_tables: tables,
            last_tier: None,
            demands,
            generation,
            tick,
            rerun: false,
        }
    }

    /// Runs the first pass, before any client can connect: what the store has is in force from the
    /// first moment on.
    pub async fn begin(&mut self) -> bool {
        let catalog = self.shared.catalog.borrow().clone();
        self.step(&catalog).await
    }

    /// Runs until the controller stops.
    pub async fn run(mut self) {
        let mut catalogs = self.shared.catalog.clone();
        let mut due = true;
        loop {
            if due {
                tokio::time::sleep(DEBOUNCE).await;
                let begun = Instant::now();
                let catalog = catalogs.borrow_and_update().clone();
                due = !self.step(&catalog).await;
                // The generation that this pass itself published does not require another pass.
                let newest = catalogs.borrow_and_update().generation;
                let is_own = newest == self.generation && newest.0 == catalog.generation.0 + 1;
                due |= newest != catalog.generation && !is_own;
                self.while_serving_urgent(tokio::time::sleep(
                    begun.elapsed() * PLANNING_REST_FACTOR,
                ))
                .await;
                due |= std::mem::take(&mut self.rerun);
                if due {
                    continue;
                }
            }
            tokio::select! {
                _ = self.tick.tick() => due = self.reconcile_once().await,
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

    /// Waits for `work`, and reacts to silent edges meanwhile. It closes an AZ at once, by the plan
    /// in force, even during long planning or a pause.
    async fn while_serving_urgent<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                _ = self.tick.tick() => {
                    let changed = Box::pin(self.reconcile_once()).await;
                    self.rerun |= changed;
                }
            }
        }
    }

    /// Applies the timeouts, and closes AZs. Returns true if there is something to plan.
    async fn reconcile_once(&mut self) -> bool {
        let seen = self.observe().await;
        if seen.closed && !self.close().await {
            self.rerun = true;
        }
        seen.changed
    }

    /// Publishes the plan in force for the current state of the fleet. Returns false if that must
    /// be repeated.
    async fn close(&mut self) -> bool {
        // Nothing is published yet, so there is nothing to close.
        if self.last_tier.is_none() {
            return true;
        }
        let published = self
            .publish_plan(self.shared.fleet.plan(), self.demands.clone())
            .await;
        matches!(published, Ok(_) | Err(PlanRefusal::Stopping))
    }

    /// Applies the timeouts, and logs and stores their effects.
    async fn observe(&self) -> SilenceCheck {
        let seen = self.shared.fleet.membership().observe(Instant::now());
        for az in &seen.closed {
            tracing::error!(%az, "fleet: no edge of the AZ reports, so the AZ is closed");
            self.shared.metrics.count(metrics::FLEET_AZS_CLOSED, &[]);
        }
        for replica in &seen.gone {
            tracing::warn!(%replica, "fleet: a replica stopped reporting and is removed from the fleet");
        }
        for edge in seen.gone_edges {
            let shared = self.shared.clone();
            tracing::warn!(%edge, "fleet: an edge stopped reporting and was removed; the other edges of its AZ continue");
            if let Ok(Err(e)) =
                tokio::task::spawn_blocking(move || shared.store.forget_edge(&edge)).await
            {
                // The edge counts as silent again after a restart.
                self.store_refused(&e);
            }
        }
        for name in seen.rows {
            let shared = self.shared.clone();
            tracing::info!(replica = %name, state = ?shared.fleet.membership().members().get(&name).map(|m| m.row.state), "fleet: the state of a replica changed");
            let stored =
                tokio::task::spawn_blocking(move || shared.fleet.keep_row(&shared.store, &name))
                    .await;
            if let Ok(Err(e)) = stored {
                // The state follows from reports, so it is determined again after a restart.
                self.store_refused(&e);
            }
        }
        SilenceCheck {
            changed: seen.changed,
            closed: !seen.closed.is_empty(),
        }
    }

    /// Counts and logs an error of the store.
    fn store_refused(&self, e: &canal_store::StoreError) {
        self.shared
            .metrics
            .count(metrics::STORE_ERRORS, &[("reason", e.name())]);
        tracing::error!(error = %e, "fleet: could not store the fleet's state; retrying");
    }

    /// Runs one pass over everything. Returns false if it must be repeated.
    async fn step(&mut self, catalog: &Arc<Catalog>) -> bool {
        self.reconcile_once().await;
        let shared = self.shared.clone();
        let now = Instant::now();
        let fleet = &shared.fleet;
        let parent = fleet.plan();
        let demands = publication::demands(catalog, ShardingRules::default(), &parent);
        let demands = Arc::new(demands);
        let (fleet_now, ownership, is_idle) = {
            let membership = fleet.membership();
            let is_idle = membership.is_empty() && parent.number == 0;
            // While no member reports, the plan stands as it is, however much time passes.
            let fleet_now = (!membership.is_cut_off(now))
                .then(|| (membership.fleet(now), membership.ownership().clone()));
            let (fleet_now, ownership) = fleet_now.unzip();
            (fleet_now, ownership, is_idle)
        };
        if is_idle {
            // A mesh without a cloud tier pays nothing for it.
            return true;
        }
        let plan = match (fleet_now, ownership) {
            (Some(fleet_now), Some(ownership)) => {
                self.plan(parent, fleet_now, demands.clone(), ownership)
                    .await
            }
            // Without reports, the published state stays; after a start, the stored plan is
            // published.
            _ if self.last_tier.is_some() => return true,
            _ => parent,
        };
        match self.apply_plan(plan.clone(), demands).await {
            // Waiting tables are published as before, and may name replicas that the plan dropped.
            Ok(applied) => !applied.waiting.is_empty() || self.forget(&plan).await,
            // The receiver of updates has ended with the controller, so a repetition would fail
            // too.
            Err(PlanRefusal::Stopping) => true,
            Err(PlanRefusal::NotStored(_) | PlanRefusal::Panic) => {
                self.while_serving_urgent(tokio::time::sleep(STORE_RETRY_DELAY))
                    .await;
                false
            }
            // A new pass begins at once, from the newest state.
            Err(PlanRefusal::Outdated { .. } | PlanRefusal::NotPublished(_)) => false,
        }
    }

    /// Applies a plan for these demands: stores it on disk, puts it into force, and has the catalog
    /// writer publish it. A table whose new replicas do not have its tenant yet stays as it was
    /// published before, and a later pass of the reconciler publishes it. The plan in force may be
    /// applied again; that publishes what is still unpublished.
    ///
    /// # Errors
    /// The plan was not computed from the plan in force, or a part of the controller refused it;
    /// see [`PlanRefusal`]. Each refusal is counted by its reason.
    pub async fn apply_plan(
        &mut self,
        plan: Arc<Plan>,
        demands: Arc<Demands>,
    ) -> Result<AppliedPlan, PlanRefusal> {
        let applied = match self.bring_into_force(&plan).await {
            Ok(()) => {
                self.shared.fleet.membership().note_motion(&plan);
                self.demands = demands.clone();
                self.publish_plan(plan, demands).await
            }
            Err(refusal) => Err(refusal),
        };
        if let Err(refusal) = &applied {
            self.shared
                .metrics
                .count(metrics::FLEET_PLANS_REFUSED, &[("reason", refusal.name())]);
            tracing::warn!(why = %refusal, "fleet: the plan was not applied; the previous plan stays in force");
        }
        applied
    }

    /// Stores a plan on disk and then puts it into force, unless it is in force already.
    async fn bring_into_force(&mut self, plan: &Arc<Plan>) -> Result<(), PlanRefusal> {
        let before = self.shared.fleet.plan();
        let is_same = *plan == before;
        if is_same && self.persisted_plan.is_some() {
            return Ok(());
        }
        if !is_same && plan.parent != before.number {
            return Err(PlanRefusal::Outdated {
                parent: plan.parent,
                in_force: before.number,
            });
        }
        let (store, known, next) = (
            self.shared.store.clone(),
            self.persisted_plan.take(),
            plan.clone(),
        );
        let keeping = tokio::task::spawn_blocking(move || store.put_plan(known.as_deref(), &next));
        match self.while_serving_urgent(keeping).await {
            Ok(Ok(())) => self.persisted_plan = Some(plan.clone()),
            Ok(Err(e)) => {
                // It is unknown which of the two plans is on disk, so the next one is written
                // whole.
                self.store_refused(&e);
                return Err(PlanRefusal::NotStored(e));
            }
            Err(_) => return Err(PlanRefusal::Panic),
        }
        self.count_changes(&before, plan);
        for note in plan.notes.iter().filter(|n| !before.notes.contains(n)) {
            tracing::warn!(plan = plan.number, %note, "fleet: the plan does not satisfy a soft constraint");
        }
        log_lost_addresses(&before, plan);
        *locked(&self.shared.fleet.plan) = plan.clone();
        Ok(())
    }

    /// Publishes a plan in force for the current state of the fleet.
    async fn publish_plan(
        &mut self,
        plan: Arc<Plan>,
        demands: Arc<Demands>,
    ) -> Result<AppliedPlan, PlanRefusal> {
        let mut publication = self.prepare_publication(plan, demands).await?;
        let waiting = std::mem::take(&mut publication.waiting);
        *locked(&self.shared.fleet.counts) = FleetCounts {
            closed: publication.closed,
            waiting: waiting.len(),
        };
        self.publish(publication).await?;
        Ok(AppliedPlan {
            generation: self.generation,
            waiting,
        })
    }

    /// Computes what to publish of a plan.
    async fn prepare_publication(
        &self,
        plan: Arc<Plan>,
        demands: Arc<Demands>,
    ) -> Result<TierPublication, PlanRefusal> {
        let (shared, now) = (self.shared.clone(), Instant::now());
        let (tables, given) = (
            self.published_tables.clone(),
            self.last_tier.as_ref().map(|given| given.tenants.clone()),
        );
        let work = move || {
            let membership = shared.fleet.membership();
            let fleet_now = membership.fleet(now);
            publication::build_publication(
                &plan,
                &fleet_now,
                &demands,
                &membership,
                (&tables, &given.unwrap_or_default()),
            )
        };
        let publication = tokio::task::spawn_blocking(work).await;
        publication.map_err(|_| {
            tracing::error!(
                "fleet: could not decide which part of the plan to publish, which is a bug in the controller; retrying"
            );
            PlanRefusal::Panic
        })
    }

    /// Computes the next plan. It is `parent` if nothing changes, or if the planner failed.
    async fn plan(
        &mut self,
        parent: Arc<Plan>,
        fleet_now: Fleet,
        demands: Arc<Demands>,
        ownership: Ownership,
    ) -> Arc<Plan> {
        let before = parent.clone();
        let work = move || {
            canal_planner::plan(
                &fleet_now,
                &demands,
                &ownership,
                Some(&publication::with_initial_placement(&before, &demands)),
            )
        };
        let begun = Instant::now();
        let work = tokio::task::spawn_blocking(work);
        let Ok(next) = self.while_serving_urgent(work).await else {
            tracing::error!(
                "fleet: the planner failed, which is a bug in the controller; the last plan stays in force"
            );
            return parent;
        };
        self.shared.metrics.add(
            metrics::FLEET_PLAN_SECONDS,
            &[],
            begun.elapsed().as_secs_f64(),
        );
        self.shared.metrics.count(metrics::FLEET_PLANS, &[]);
        Arc::new(next)
    }

    /// Counts what the next plan changes in the tables.
    fn count_changes(&self, parent: &Plan, next: &Plan) {
        let changes = PlanDelta::diff(parent, next);
        #[allow(
            clippy::cast_precision_loss,
            reason = "all of these are far below 2^52"
        )]
        for (metric, n) in [
            (metrics::FLEET_BUCKETS_MOVED, changes.moved),
            (metrics::FLEET_BUCKETS_HELD, changes.heads_retained),
            (metrics::FLEET_OWNERS_KEPT, changes.owners),
        ] {
            self.shared.metrics.add(metric, &[], n as f64);
        }
    }

    /// Has the catalog writer publish the state, if it differs from the last one.
    async fn publish(&mut self, publication: TierPublication) -> Result<(), PlanRefusal> {
        let TierPublication {
            tier, tables, plan, ..
        } = publication;
        if self.last_tier.as_ref() == Some(&tier) {
            // The last generation has the tables of this plan too.
            self.shared
                .fleet
                .membership()
                .note_plan(self.generation, plan);
            return Ok(());
        }
        let (reply, answer) = oneshot::channel();
        let update = TierUpdate {
            tier: tier.clone(),
            reply,
        };
        if self.shared.updates.send(update).await.is_err() {
            return Err(PlanRefusal::Stopping);
        }
        let generation = match answer.await {
            Ok(Ok(generation)) => generation,
            Ok(Err(e)) => {
                self.store_refused(&e);
                return Err(PlanRefusal::NotPublished(e));
            }
            Err(_) => return Err(PlanRefusal::Stopping),
        };
        self.shared
            .fleet
            .membership()
            .published(generation, plan, &tier.placement, Instant::now());
        self.shared.metrics.count(metrics::FLEET_PUBLICATIONS, &[]);
        self.generation = generation;
        self.published_tables = Arc::new(tables);
        self.last_tier = Some(tier);
        Ok(())
    }

    /// Frees the numbers of replicas that are gone from all tables. Returns false if a number was
    /// freed, so that there is more to publish.
    async fn forget(&self, plan: &Plan) -> bool {
        let names = self
            .shared
            .fleet
            .membership()
            .forgettable(plan, self.generation);
        let mut done = true;
        for name in names {
            let (shared, gone) = (self.shared.clone(), name.clone());
            let forget = move || {
                let _alone = locked(&shared.fleet.rows);
                shared.store.forget_replica(&gone)
            };
            match tokio::task::spawn_blocking(forget).await {
                Ok(Ok(())) => {
                    self.shared.fleet.membership().forget(&name);
                    self.shared.metrics.count(metrics::FLEET_FORGOTTEN, &[]);
                    tracing::info!(target: "audit", replica = %name, "fleet: removed the replica; its number is free");
                    done = false;
                }
                Ok(Err(e)) => self.store_refused(&e),
                Err(_) => {}
            }
        }
        done
    }
}

/// Logs which Gateways lose addresses by a plan.
fn log_lost_addresses(before: &Plan, plan: &Plan) {
    for (id, service) in &plan.services {
        let old = before.services.get(id).filter(|old| old.key == service.key);
        let old = old.iter().flat_map(|old| &old.network);
        let is_kept = |address: &IpAddr| {
            let mut networks = service.network.iter();
            networks.any(|network| network.addresses.contains(address))
        };
        let lost: Vec<&IpAddr> = old
            .flat_map(|network| &network.addresses)
            .filter(|address| !is_kept(address))
            .collect();
        if !lost.is_empty() {
            tracing::warn!(plan = plan.number, service = %service.key, ?lost, "fleet: a Gateway has lost addresses, because it requests others or the pool no longer has them");
        }
    }
}

/// The result of applying the timeouts.
struct SilenceCheck {
    /// True if there is something to plan.
    changed: bool,
    /// True if the last edge of an AZ has just fallen silent.
    closed: bool,
}

#[cfg(test)]
mod tests;

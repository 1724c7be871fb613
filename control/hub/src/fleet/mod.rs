//! The cloud tier's fleet: hears edges and replicas, has the planner decide where sessions go, and sees to it that data planes are told.
//!
//! `report` (what they say) → `roster` (who is there, and how) → `tier` (what the planner is asked, what its plan means) → `keeper`
//! (the task that does it all, one step after the other). `service` is the door of reports, `overview` the operators' view.

mod keeper;
mod overview;
mod report;
mod roster;
mod service;
mod share_report;
mod tier;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_model::ids::ReplicaName;
use canal_model::plan::Plan;
use canal_store::{Store, StoreError};
use tokio::sync::Notify;
use tokio::time::Instant;

pub(crate) use keeper::Keeper;
pub(crate) use overview::Overview;
pub use report::{OWNED_MAX, SEEN_MAX};
pub use roster::FleetTimes;
pub(crate) use roster::{Known, Roster};
pub(crate) use service::FleetService;
pub(crate) use share_report::ShareReport;
#[cfg(test)]
pub(crate) use share_report::{ReportedOmission, ReportedShare};

/// The fleet as all services of the controller share it. Locks are held for a moment, never across a wait.
pub(crate) struct Fleet {
    roster: Mutex<Roster>,
    /// The plan in force, with what could not be satisfied.
    plan: Mutex<Arc<Plan>>,
    /// The keeper is to look.
    wake: Notify,
    /// Held while a row is written.
    rows: Mutex<()>,
    /// How many (service, AZ) pairs are closed, and how many tables wait.
    counts: Mutex<Counts>,
}

/// Numbers for the metrics.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    pub(crate) closed: usize,
    pub(crate) waiting: usize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change leaves the value whole, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fleet {
    /// Takes up what the store knows.
    pub(crate) fn open(store: &Store, times: FleetTimes) -> Result<Self, StoreError> {
        let plan = store.plan()?;
        let roster = Roster::new(store.fleet()?, &plan, times, Instant::now());
        Ok(Self {
            roster: Mutex::new(roster),
            plan: Mutex::new(Arc::new(plan)),
            wake: Notify::new(),
            rows: Mutex::default(),
            counts: Mutex::default(),
        })
    }

    pub(crate) fn roster(&self) -> MutexGuard<'_, Roster> {
        locked(&self.roster)
    }

    pub(crate) fn plan(&self) -> Arc<Plan> {
        locked(&self.plan).clone()
    }

    pub(crate) fn counts(&self) -> Counts {
        *locked(&self.counts)
    }

    /// Keeps an operator's order. False: there is no such replica.
    pub(crate) fn order_drain(&self, store: &Store, name: &ReplicaName, drain: bool) -> Result<bool, StoreError> {
        if !self.roster().order_drain(name, drain) {
            return Ok(false);
        }
        self.keep_row(store, name)?;
        self.wake.notify_one();
        Ok(true)
    }

    /// Keeps a replica's row as it is now. Blocks for a disk write; rows are written one after the other, so that the newest stays.
    fn keep_row(&self, store: &Store, name: &ReplicaName) -> Result<(), StoreError> {
        let _alone = locked(&self.rows);
        let row = self.roster().members().get(name).map(|m| m.row.clone());
        row.map_or(Ok(()), |row| store.put_replica(&row))
    }

    /// Declares a replica gone; see [`Roster::declare_gone`].
    pub(crate) fn declare_gone(&self, name: &ReplicaName) -> Option<bool> {
        let done = self.roster().declare_gone(name, Instant::now());
        self.wake.notify_one();
        done
    }
}

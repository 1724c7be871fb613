//! The handle by which the other parts of the controller access the fleet: its members, the plan in
//! force, and operators' orders. It decides nothing about placement. Start at [`FleetHandle`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_model::ids::ReplicaName;
use canal_model::plan::Plan;
use canal_store::{Store, StoreError};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::membership::{Membership, SilenceTimeouts};
use crate::session_query::SessionQueries;

/// The state of the fleet, which all services of the controller share. No lock is held across an
/// await point.
pub struct FleetHandle {
    membership: Mutex<Membership>,
    /// Plan in force, with its unmet constraints.
    pub(crate) plan: Mutex<Arc<Plan>>,
    /// Wakes the reconciler for another pass.
    pub(crate) wake: Notify,
    /// Lock that is held while a replica's row is written.
    pub(crate) rows: Mutex<()>,
    /// Lock that is held from the check of an unregistered member until its registration.
    pub(crate) registration: tokio::sync::Mutex<()>,
    /// Numbers of closed (service, AZ) pairs and of waiting tables.
    pub(crate) counts: Mutex<FleetCounts>,
    /// Open queries of operators for sessions.
    pub(crate) queries: SessionQueries,
}

/// Numbers of the last publication, for the metrics.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FleetCounts {
    /// Closed pairs of a service and an AZ.
    pub(crate) closed: usize,
    /// Bucket tables that wait until their new replicas know the tenant.
    pub(crate) waiting: usize,
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change leaves the value consistent, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FleetHandle {
    /// Loads the members and the plan from the store.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn open(store: &Store, times: SilenceTimeouts) -> Result<Self, StoreError> {
        let plan = store.plan()?;
        let membership = Membership::new(store.fleet()?, &plan, times, Instant::now());
        Ok(Self {
            membership: Mutex::new(membership),
            plan: Mutex::new(Arc::new(plan)),
            wake: Notify::new(),
            rows: Mutex::default(),
            registration: tokio::sync::Mutex::default(),
            counts: Mutex::default(),
            queries: SessionQueries::default(),
        })
    }

    /// Locks the members for a moment.
    pub(crate) fn membership(&self) -> MutexGuard<'_, Membership> {
        locked(&self.membership)
    }

    /// Returns the plan in force.
    pub(crate) fn plan(&self) -> Arc<Plan> {
        locked(&self.plan).clone()
    }

    /// Returns the numbers of the last publication.
    pub(crate) fn counts(&self) -> FleetCounts {
        *locked(&self.counts)
    }

    /// Stores an operator's order to drain, or to stop draining. Returns false if there is no such
    /// replica.
    ///
    /// # Errors
    /// The store refused the write.
    pub fn order_drain(
        &self,
        store: &Store,
        name: &ReplicaName,
        drain: bool,
    ) -> Result<bool, StoreError> {
        if !self.membership().order_drain(name, drain) {
            return Ok(false);
        }
        self.keep_row(store, name)?;
        self.wake.notify_one();
        Ok(true)
    }

    /// Stores a replica's row as it is now. Blocks for a disk write. Rows are written one after the
    /// other, so that the newest stays.
    pub(crate) fn keep_row(&self, store: &Store, name: &ReplicaName) -> Result<(), StoreError> {
        let _alone = locked(&self.rows);
        let row = self.membership().members().get(name).map(|m| m.row.clone());
        row.map_or(Ok(()), |row| store.put_replica(&row))
    }

    /// Declares a replica gone; see [`Membership::declare_gone`].
    pub fn mark_gone(&self, name: &ReplicaName) -> Option<bool> {
        let done = self.membership().declare_gone(name, Instant::now());
        self.wake.notify_one();
        done
    }
}

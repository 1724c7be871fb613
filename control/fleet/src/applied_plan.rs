//! The result of applying a plan, and the differences between two plans. Pure. Start at
//! [`AppliedPlan`].

use std::collections::BTreeSet;
use std::sync::Arc;

use canal_model::ids::{AzName, Generation, ServiceId};
use canal_model::plan::{Plan, UnmetConstraint};
use canal_store::StoreError;

/// A plan that is on disk, in force, and published as far as the replicas are ready for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppliedPlan {
    /// Generation in which data planes receive the published part of the plan.
    pub generation: Generation,
    /// Tables that stay as they were published before, because a new replica in them does not have
    /// the tenant yet. A later pass of the reconciler publishes them.
    pub waiting: BTreeSet<(ServiceId, AzName)>,
}

/// The reason for which a plan was not applied, or only in part.
#[derive(Debug, thiserror::Error)]
pub enum PlanRefusal {
    /// The plan was computed from another plan than the one in force, which stays in force.
    #[error(
        "the plan was computed from plan {parent}, but plan {in_force} is in force; fix: compute it again from that one"
    )]
    Outdated { parent: u32, in_force: u32 },
    /// The store refused the plan. The plan before stays in force, and either of them may be on
    /// disk.
    #[error("the plan is not in force: {0}")]
    NotStored(StoreError),
    /// The plan is in force, but the store refused the generation that would publish it. Data
    /// planes keep the state that was published before.
    #[error("the plan is in force and not published: {0}")]
    NotPublished(StoreError),
    /// A computation panicked. The plan may be applied again.
    #[error("applying the plan panicked, which is a bug in the controller; fix: apply it again")]
    Panic,
    /// The catalog writer has ended, and the controller ends too.
    #[error("the controller is stopping; fix: apply the plan after its start")]
    Stopping,
}

impl PlanRefusal {
    /// Returns the reason as the value of a metric's label.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Outdated { .. } => "outdated",
            Self::NotStored(_) => "not_stored",
            Self::NotPublished(_) => "not_published",
            Self::Panic => "panic",
            Self::Stopping => "stopping",
        }
    }
}

/// Changes that one plan made in the tables.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PlanDelta {
    /// Number of buckets that have another head.
    pub(crate) moved: usize,
    /// Number of buckets that newly keep their head because their chain is full.
    pub(crate) heads_retained: usize,
    /// Number of former heads that newly stay in a chain for their sessions.
    pub(crate) owners: usize,
}

impl PlanDelta {
    /// Compares a plan with the one before it.
    pub(crate) fn diff(parent: &Plan, next: &Plan) -> Self {
        let mut out = Self::default();
        for (id, service) in &next.services {
            let Some(before) = parent.services.get(id) else {
                continue;
            };
            for (az, table) in &service.tables {
                let Some(old) = before.tables.get(az).filter(|old| !Arc::ptr_eq(old, table)) else {
                    continue;
                };
                for (was, is) in old.chains.iter().zip(&table.chains) {
                    out.moved += usize::from(
                        was.first().map(|s| s.replica) != is.first().map(|s| s.replica),
                    );
                    out.owners += is
                        .iter()
                        .filter(|s| s.is_owner() && !was.contains(s))
                        .count();
                }
            }
        }
        let retained = |plan: &Plan| -> usize {
            let of = |n: &UnmetConstraint| {
                if let UnmetConstraint::Held { buckets, .. } = n {
                    buckets.len()
                } else {
                    0
                }
            };
            plan.notes.iter().map(of).sum()
        };
        out.heads_retained = retained(next).saturating_sub(retained(parent));
        out
    }
}

//! The cloud tier's fleet: receives reports of edges and replicas, has the planner decide where
//! sessions go, and hands the plan to the catalog writer. It does not write the catalog, and knows
//! no certificates.
//!
//! `report` parses reports, and `service` is the gRPC service that receives them. `membership` and
//! `edges` track the members and their liveness. `publication` builds the planner's input, and what
//! its plan publishes. `reconciler` is the task that runs these steps one after the other; start
//! there. Its `apply_plan` is the only way by which a plan comes into force, and `applied_plan` is
//! the result. `overview` is the operators' view; `session_query` holds their open session queries,
//! and `session_finder` answers them.

#![forbid(unsafe_code)]

mod applied_plan;
mod edges;
mod handle;
mod membership;
mod overview;
mod publication;
mod reconciler;
mod report;
mod service;
mod session_finder;
mod session_query;
mod tier;

pub use applied_plan::{AppliedPlan, PlanRefusal};
pub use handle::FleetHandle;
pub use membership::SilenceTimeouts;
pub use overview::FleetOverview;
pub use reconciler::{FleetReconciler, ReconcilerContext};
pub use report::{OWNED_MAX, SEEN_MAX};
pub use service::FleetService;
pub use session_finder::find_sessions;
pub use tier::{TierState, TierUpdate};

//! The desired state of the cloud tier, which the fleet passes to the catalog writer for data
//! planes. It decides nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_catalog::TenantPlacement;
use canal_compiler::scope::TierPlacement;
use canal_model::ids::{Generation, TenantName};
use canal_model::program::Resource;
use canal_store::StoreError;
use tokio::sync::oneshot;

/// The complete state of the cloud tier that is published to data planes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TierState {
    /// Gateway addresses and bucket tables of each tenant.
    pub tenants: BTreeMap<TenantName, TenantPlacement>,
    /// Replicas, which belong to no tenant.
    pub provider: Vec<Resource>,
    /// Placement of services and tenants on backends, which decides the scope of replicas.
    pub placement: Arc<TierPlacement>,
}

/// A state to publish, and the channel for the result.
pub struct TierUpdate {
    /// State that replaces the published one.
    pub tier: TierState,
    /// Receives the generation in which the state was published, or the error of the store.
    pub reply: oneshot::Sender<Result<Generation, StoreError>>,
}

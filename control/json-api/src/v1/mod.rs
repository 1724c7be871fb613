//! Views of version 1. A field is never renamed, removed or given another meaning within a version;
//! new fields may appear. Each view has a golden file in `control/json-api/golden`.
//!
//! Every response is a [`VersionedView`] of one of the views here.

mod fleet;
mod objects;
mod sessions;
mod status;
mod trust;

use serde::Serialize;

pub use fleet::{
    BlastRadiusView, BucketTableView, EdgeView, FleetView, PlacedServiceView, ReplicaListView,
    ReplicaOrderView, ReplicaView, ServicePlacementView, TableMemberView,
};
pub use objects::{
    ApplyBody, ChangeKindView, ChangeView, DeleteBody, DiagnosticView, DiffView, FileBody,
    ObjectListView, ObjectRefBody, ObjectView, SeverityView, WriteResultView,
};
pub use sessions::{ClientSessionView, EdgePathView, SessionListView};
pub use status::{ShareUseView, StatusView, SubscriberView, TenantStatusView};
pub use trust::{
    CertificateView, RevokeBody, RootView, RotateRootBody, TrustDomainListView, TrustDomainView,
};

/// Name of this version, which paths and responses contain.
pub const VERSION: &str = "v1";

/// A view with the name of its version.
#[derive(Debug, Clone, Serialize)]
pub struct VersionedView<T> {
    api_version: &'static str,
    #[serde(flatten)]
    view: T,
}

impl<T: Serialize> VersionedView<T> {
    /// Marks a view as one of this version.
    pub fn new(view: T) -> Self {
        Self {
            api_version: VERSION,
            view,
        }
    }
}

#[cfg(test)]
mod tests;

//! Trust bundles of a data plane's southbound state: the trust store gets them, and those that it
//! cannot use are refused.

use canal_model::program::ResourceKind;
use canal_southbound_client::{RefusedResource, ResourceState};
use canal_tls::TrustStore;

/// Applies the Bundles of a whole state to `trust`, and returns those that cannot be used. The
/// trust of their tenants stays unchanged, and that of all others is updated.
pub fn apply_bundles(trust: &TrustStore, state: &ResourceState) -> Vec<RefusedResource> {
    let unusable = trust.apply(state.of(ResourceKind::Bundle).cloned());
    unusable
        .into_iter()
        .map(|bundle| RefusedResource::by_caller(ResourceKind::Bundle, bundle.name, &bundle.why))
        .collect()
}

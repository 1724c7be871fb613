//! Selects the PeerAuthentication and the RequestAuthentications of a destination. Verifying tokens
//! and peers is not done here.

use std::sync::Arc;

use canal_model::authorization::{Authentication, PeerAuthentication, PeerMode, PolicyTarget};

use crate::policy_destination::{PolicyDestination, applies};

/// Returns the mode of a workload at one of its ports, by Istio's rules. Of each scope (workload,
/// namespace, tenant) only the oldest object counts. The narrowest scope that sets a mode decides,
/// and within it the port's own mode precedes the general one.
pub fn peer_mode<'a>(
    all: impl IntoIterator<Item = &'a PeerAuthentication>,
    place: &PolicyDestination<'_>,
    port: u16,
) -> PeerMode {
    let mut oldest: [Option<&PeerAuthentication>; 3] = [None; 3];
    for one in all.into_iter().filter(|one| applies(&one.target, place)) {
        // The index grows with the scope, so that the first object below is the narrowest.
        let width = match one.target {
            PolicyTarget::Workloads { .. } | PolicyTarget::Service(_) => 0,
            PolicyTarget::Namespace(_) => 1,
            PolicyTarget::Tenant => 2,
        };
        let age = |p: &PeerAuthentication| (p.created, p.key.clone());
        if oldest[width].is_none_or(|oldest_so_far| age(one) < age(oldest_so_far)) {
            oldest[width] = Some(one);
        }
    }
    oldest
        .into_iter()
        .flatten()
        .find_map(|one| one.ports.get(&port).copied().or(one.mode))
        .unwrap_or_default()
}

/// Returns all RequestAuthentications of a destination. A token is valid if one rule of any of them
/// accepts it.
pub fn authentications(
    all: &[Arc<Authentication>],
    place: &PolicyDestination<'_>,
) -> Vec<Arc<Authentication>> {
    all.iter()
        .filter(|one| applies(&one.target, place))
        .cloned()
        .collect()
}

//! Which PeerAuthentication and which RequestAuthentications are a destination's.

use std::sync::Arc;

use canal_model::authorization::{Authentication, PeerAuthentication, PeerMode, PolicyTarget};

use crate::place::{Place, applies};

/// What a workload accepts at one of its ports. Of each width (workload, namespace, tenant) only the oldest object counts; the narrowest
/// that says something decides, and in it a port's own mode before the whole (Istio's rules).
pub fn peer_mode<'a>(all: impl IntoIterator<Item = &'a PeerAuthentication>, place: &Place<'_>, port: u16) -> PeerMode {
    let mut oldest: [Option<&PeerAuthentication>; 3] = [None; 3];
    for one in all.into_iter().filter(|one| applies(&one.target, place)) {
        let width = match one.target {
            PolicyTarget::Workloads { .. } | PolicyTarget::Service(_) => 0,
            PolicyTarget::Namespace(_) => 1,
            PolicyTarget::Tenant => 2,
        };
        let age = |p: &PeerAuthentication| (p.created, p.key.clone());
        if oldest[width].is_none_or(|held| age(one) < age(held)) {
            oldest[width] = Some(one);
        }
    }
    oldest.into_iter().flatten().find_map(|one| one.ports.get(&port).copied().or(one.mode)).unwrap_or_default()
}

/// All RequestAuthentications of a destination: a token is valid if one rule of any of them accepts it.
pub fn authentications(all: &[Arc<Authentication>], place: &Place<'_>) -> Vec<Arc<Authentication>> {
    all.iter().filter(|one| applies(&one.target, place)).cloned().collect()
}

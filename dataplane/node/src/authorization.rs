//! Who may open a tunnel to a pod. The hook is here; today it holds one rule. Policies from the controller become further variants.

use std::net::SocketAddr;

use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Of the destination's tenant.
    pub trust_domain: &'a TrustDomain,
    /// Who asks, as its certificate proved.
    pub source: &'a Identity,
    /// The application's address.
    pub destination: SocketAddr,
}

/// The rules of one pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Authorization {
    /// Every identity of the destination's own trust domain. The handshake has checked it already; it is checked again here, so that no
    /// change to the handshake can open a tenant.
    #[default]
    SameTenant,
}

impl Authorization {
    /// The answer.
    pub fn allows(&self, q: &Question<'_>) -> bool {
        match self {
            Authorization::SameTenant => q.source.trust_domain == *q.trust_domain,
        }
    }
}

//! Whose key is where, as a tenant's policy says: gives both sides of mesh mTLS for an identity. It holds no key itself.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_model::identity::Identity;
use canal_model::ids::{TenantName, TrustDomain};
use canal_model::trust::{KeyAlgorithm, KeyPlace, KeyPolicy};

use super::Requester;
use crate::certs::CertificateSource;
use crate::tls::{ClientIdentity, Credential, ServerIdentity, TrustStore};

type Want = Arc<dyn Fn(&Identity, KeyAlgorithm) -> Credential + Send + Sync>;
type Forget = Arc<dyn Fn(&TrustDomain) + Send + Sync>;

/// Gives identities their proofs. Clones share it.
#[derive(Clone)]
pub struct Keyring {
    want: Want,
    forget: Forget,
    requester: Option<Requester>,
    trust: TrustStore,
    /// Trust domains whose keys were removed from this machine's disk.
    removed: Arc<Mutex<HashSet<TrustDomain>>>,
}

impl std::fmt::Debug for Keyring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keyring({:?})", self.requester)
    }
}

impl Keyring {
    /// Local keys are `certificates`', others those of `requester`'s key servers; without one, tenants whose keys are in key servers are
    /// refused by name. From now on `certificates` renews early what another root signs by now.
    pub fn new(certificates: CertificateSource, requester: Option<Requester>, trust: TrustStore) -> Self {
        certificates.follow(trust.clone());
        let source = certificates.clone();
        Self {
            want: Arc::new(move |identity, algorithm| certificates.want_with(identity, algorithm)),
            forget: Arc::new(move |domain| source.forget_domain(domain)),
            requester,
            trust,
            removed: Arc::default(),
        }
    }

    /// Local keys from anywhere.
    pub fn of(want: Arc<dyn Fn(&Identity) -> Credential + Send + Sync>, requester: Option<Requester>, trust: TrustStore) -> Self {
        Self { want: Arc::new(move |identity, _| want(identity)), forget: Arc::new(|_| {}), requester, trust, removed: Arc::default() }
    }

    /// What peers are verified by.
    pub fn trust(&self) -> &TrustStore {
        &self.trust
    }

    /// Who asks key servers.
    pub fn requester(&self) -> Option<&Requester> {
        self.requester.as_ref()
    }

    /// Both sides for `identity` of `tenant`. To be asked again when the tenant's policy changes: what is kept on disk of an identity whose key
    /// is in key servers by now is removed, with all of its trust domain.
    pub fn pair(&self, tenant: &TenantName, policy: &KeyPolicy, identity: &Identity) -> (ServerIdentity, ClientIdentity) {
        let view = self.trust.view(tenant);
        let (server, client) = match policy.place {
            KeyPlace::Local => {
                self.removed().remove(&identity.trust_domain);
                let credential = (self.want)(identity, policy.algorithm);
                (ServerIdentity::new(tenant.clone(), credential.clone()), ClientIdentity::new(credential))
            }
            KeyPlace::KeyServer => {
                let fallback = policy.local_fallback.then(|| (self.want)(identity, policy.algorithm));
                if fallback.is_some() {
                    self.removed().remove(&identity.trust_domain);
                } else if self.removed().insert(identity.trust_domain.clone()) {
                    (self.forget)(&identity.trust_domain);
                }
                let requester = self.requester.clone();
                (
                    ServerIdentity::remote(tenant.clone(), identity.clone(), requester.clone(), fallback.clone()),
                    ClientIdentity::remote(identity.clone(), requester, fallback),
                )
            }
        };
        (server.trusting(view.clone()), client.trusting(view))
    }

    fn removed(&self) -> MutexGuard<'_, HashSet<TrustDomain>> {
        self.removed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Location of keys by a tenant's policy: returns both sides of mesh mTLS for an identity. The
//! module contains no keys.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_keyserver_client::KeyClient;
use canal_model::identity::Identity;
use canal_model::ids::{TenantName, TrustDomain};
use canal_model::trust::{KeyAlgorithm, KeyLocation, KeyPolicy};
use canal_tls::{Credential, TrustStore};

use crate::certs::CertificateSource;
use crate::{ClientIdentity, ServerIdentity};

type RequestCredentialFn = Arc<dyn Fn(&Identity, KeyAlgorithm) -> Credential + Send + Sync>;
type DropCredentialFn = Arc<dyn Fn(&TrustDomain) + Send + Sync>;

/// Creates the server and client sides of identities. Clones share its state.
#[derive(Clone)]
pub struct ClientIdentityFactory {
    want: RequestCredentialFn,
    forget: DropCredentialFn,
    requester: Option<KeyClient>,
    trust: TrustStore,
    /// Trust domains whose keys were removed from this host's disk.
    removed: Arc<Mutex<HashSet<TrustDomain>>>,
}

impl std::fmt::Debug for ClientIdentityFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keyring({:?})", self.requester)
    }
}

impl ClientIdentityFactory {
    /// Creates a factory. Local keys come from `certificates`, remote keys from `requester`'s key
    /// servers. Without a requester, tenants whose keys are in key servers are refused by name.
    /// From now on `certificates` renews certificates early when another root signs.
    pub fn new(
        certificates: CertificateSource,
        requester: Option<KeyClient>,
        trust: TrustStore,
    ) -> Self {
        certificates.follow(trust.clone());
        let source = certificates.clone();
        Self {
            want: Arc::new(move |identity, algorithm| {
                certificates.credential_with_algorithm(identity, algorithm)
            }),
            forget: Arc::new(move |domain| source.forget_domain(domain)),
            requester,
            trust,
            removed: Arc::default(),
        }
    }

    /// Creates a factory with another source of local keys.
    pub fn of(
        want: Arc<dyn Fn(&Identity) -> Credential + Send + Sync>,
        requester: Option<KeyClient>,
        trust: TrustStore,
    ) -> Self {
        Self {
            want: Arc::new(move |identity, _| want(identity)),
            forget: Arc::new(|_| {}),
            requester,
            trust,
            removed: Arc::default(),
        }
    }

    /// Returns the trust store that verifies peers.
    pub fn trust(&self) -> &TrustStore {
        &self.trust
    }

    /// Returns the client of the key servers.
    pub fn requester(&self) -> Option<&KeyClient> {
        self.requester.as_ref()
    }

    /// Returns both sides for `identity` of `tenant`. The caller must call it again when the
    /// tenant's policy changes. If the keys are in key servers now, all keys of the identity's
    /// trust domain are removed from disk.
    pub fn pair(
        &self,
        tenant: &TenantName,
        policy: &KeyPolicy,
        identity: &Identity,
    ) -> (ServerIdentity, ClientIdentity) {
        let view = self.trust.view(tenant);
        let (server, client) = match policy.location {
            KeyLocation::Local => {
                self.removed().remove(&identity.trust_domain);
                let credential = (self.want)(identity, policy.algorithm);
                (
                    ServerIdentity::new(tenant.clone(), credential.clone()),
                    ClientIdentity::new(credential),
                )
            }
            KeyLocation::KeyServer => {
                let fallback = policy
                    .local_fallback
                    .then(|| (self.want)(identity, policy.algorithm));
                if fallback.is_some() {
                    self.removed().remove(&identity.trust_domain);
                // The removal covers the whole trust domain, so it is done once.
                } else if self.removed().insert(identity.trust_domain.clone()) {
                    (self.forget)(&identity.trust_domain);
                }
                let requester = self.requester.clone();
                (
                    ServerIdentity::remote(
                        tenant.clone(),
                        identity.clone(),
                        requester.clone(),
                        fallback.clone(),
                    ),
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

//! Creates the credentials of pods. The tenant's policy decides whether a pod's key is on this node
//! or in key servers.
//!
//! The runtime crate obtains certificates and performs handshakes.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use canal_identity::ClientIdentityFactory;
use canal_identity::certs::CertificateSource;
use canal_keyserver_client::{ANSWER_TIMEOUT, KeyClient, KeyClientConfig, ServerAddress};
use canal_model::identity::component_identity;
use canal_model::ids::{AzName, NodeName, TenantName};
use canal_model::principal::Principal;
use canal_model::program::Tenant;
use canal_model::trust::{KeyLocation, KeyPolicy};
use canal_runtime::metrics::Registry;
use canal_tls::TrustStore;

use crate::pod::LocalPod;
use crate::pod_context::PodIdentity;

/// Creates the credentials of this node's pods.
pub struct PodIdentityFactory {
    node: NodeName,
    az: AzName,
    key_servers: Vec<ServerAddress>,
    certificates: CertificateSource,
    trust: TrustStore,
    registry: Registry,
    /// Factories by tenant, because a node authenticates to key servers as a node of the tenant.
    keyrings: Mutex<HashMap<TenantName, ClientIdentityFactory>>,
}

impl PodIdentityFactory {
    pub fn new(
        node: NodeName,
        az: AzName,
        key_servers: Vec<ServerAddress>,
        certificates: CertificateSource,
        trust: TrustStore,
        registry: Registry,
    ) -> Self {
        certificates.follow(trust.clone());
        Self {
            node,
            az,
            key_servers,
            certificates,
            trust,
            registry,
            keyrings: Mutex::default(),
        }
    }

    /// Creates the credentials of `pod` as its tenant's present configuration requires.
    pub fn of(&self, pod: &LocalPod, tenant: &Tenant) -> PodIdentity {
        let identity = pod.identity(tenant.trust_domain.clone());
        let (server, client) =
            self.keyring(&tenant.name)
                .pair(&tenant.name, &tenant.keys, &identity);
        let credential = waits_for_certificate(&tenant.keys).then(|| {
            self.certificates
                .credential_with_algorithm(&identity, tenant.keys.algorithm)
        });
        PodIdentity {
            trust_domain: tenant.trust_domain.clone(),
            keys: tenant.keys,
            identity,
            credential,
            client,
            server,
        }
    }

    fn keyring(&self, tenant: &TenantName) -> ClientIdentityFactory {
        let mut keyrings = self.keyrings.lock().unwrap_or_else(PoisonError::into_inner);
        keyrings
            .entry(tenant.clone())
            .or_insert_with(|| self.make_keyring(tenant))
            .clone()
    }

    fn make_keyring(&self, tenant: &TenantName) -> ClientIdentityFactory {
        let me = Principal::Node {
            name: self.node.clone(),
            tenant: tenant.clone(),
            az: self.az.clone(),
        };
        let requester = component_identity(&me)
            .filter(|_| !self.key_servers.is_empty())
            .map(|me| {
                let config = KeyClientConfig {
                    az: self.az.clone(),
                    servers: self.key_servers.clone(),
                    me,
                    trip: ANSWER_TIMEOUT,
                };
                KeyClient::start(
                    config.clone(),
                    self.certificates.credential_in_memory(&config.me),
                    &self.trust,
                    &self.registry,
                )
            });
        ClientIdentityFactory::new(self.certificates.clone(), requester, self.trust.clone())
    }
}

/// Returns whether a pod's first connections should wait for its certificate, because its key is on
/// this node.
fn waits_for_certificate(keys: &KeyPolicy) -> bool {
    keys.location == KeyLocation::Local
}

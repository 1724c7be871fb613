//! Gives pods the proofs of who they are: where a pod's key is, here or in key servers, is its tenant's policy. Certificates are obtained and
//! handshakes made by the kit.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use canal_kit::certs::CertificateSource;
use canal_kit::keys::{Keyring, Requester, RequesterConfig, ServerAddress, TRIP};
use canal_kit::metrics::Registry;
use canal_kit::tls::TrustStore;
use canal_model::identity::component_identity;
use canal_model::ids::{AzName, NodeName, TenantName};
use canal_model::principal::Principal;
use canal_model::program::Tenant;
use canal_model::trust::{KeyPlace, KeyPolicy};

use crate::pod::Pod;
use crate::room::RoomIdentity;

/// What identities of this node are made of.
pub struct Identities {
    node: NodeName,
    az: AzName,
    key_servers: Vec<ServerAddress>,
    certificates: CertificateSource,
    trust: TrustStore,
    registry: Registry,
    /// A node proves itself to key servers as its tenant's.
    keyrings: Mutex<HashMap<TenantName, Keyring>>,
}

impl Identities {
    pub fn new(
        node: NodeName,
        az: AzName,
        key_servers: Vec<ServerAddress>,
        certificates: CertificateSource,
        trust: TrustStore,
        registry: Registry,
    ) -> Self {
        certificates.follow(trust.clone());
        Self { node, az, key_servers, certificates, trust, registry, keyrings: Mutex::default() }
    }

    /// Who `pod` is to the mesh, by what its tenant says now.
    pub fn of(&self, pod: &Pod, tenant: &Tenant) -> RoomIdentity {
        let identity = pod.identity(tenant.trust_domain.clone());
        let (server, client) = self.keyring(&tenant.name).pair(&tenant.name, &tenant.keys, &identity);
        let credential = waits_for_certificate(&tenant.keys).then(|| self.certificates.want_with(&identity, tenant.keys.algorithm));
        RoomIdentity { trust_domain: tenant.trust_domain.clone(), keys: tenant.keys, identity, credential, client, server }
    }

    fn keyring(&self, tenant: &TenantName) -> Keyring {
        let mut keyrings = self.keyrings.lock().unwrap_or_else(PoisonError::into_inner);
        keyrings.entry(tenant.clone()).or_insert_with(|| self.make_keyring(tenant)).clone()
    }

    fn make_keyring(&self, tenant: &TenantName) -> Keyring {
        let me = Principal::Node { name: self.node.clone(), tenant: tenant.clone(), az: self.az.clone() };
        let requester = component_identity(&me).filter(|_| !self.key_servers.is_empty()).map(|me| {
            let config = RequesterConfig { az: self.az.clone(), servers: self.key_servers.clone(), me, trip: TRIP };
            Requester::start(config, &self.certificates, &self.trust, &self.registry)
        });
        Keyring::new(self.certificates.clone(), requester, self.trust.clone())
    }
}

/// Whether a pod's first connections should wait for its certificate: there will be one here.
fn waits_for_certificate(keys: &KeyPolicy) -> bool {
    keys.place == KeyPlace::Local
}

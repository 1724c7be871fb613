//! Terminations and tenants' key servers in the builder.
//!
//! A port's TLS is rebuilt only when one of its inputs changed, so that session tickets and data
//! fetched from key servers survive. Start with [`SnapshotBuilder::termination`].

use std::sync::Arc;

use canal_identity::{ClientIdentityFactory, TerminationTerms, Terminator};
use canal_keyserver_client::{KeyClient, RemoteKey};
use canal_model::identity::gateway_identity;
use canal_model::ids::{ServiceKey, TenantName, TrustDomain};
use canal_model::program::{AppProtocol, ResourceKind, ServicePort};
use canal_model::trust::{KeyLocation, KeyPolicy, KeyServer, Termination, TerminationCertificate};
use canal_wire::keyrpc::KeyName;

use super::{ServiceCertificateFn, SnapshotBuilder};
use crate::termination::{PortTermination, TerminationView};

/// Inputs from which a port's TLS is built.
#[derive(Debug, Clone, PartialEq)]
struct TerminationInputs {
    termination: Termination,
    trust_domain: Option<TrustDomain>,
    keys: KeyPolicy,
    /// Key server of the tenant, if the termination names one.
    server: Option<KeyServer>,
    alpn: Vec<Vec<u8>>,
    hostname: String,
}

/// TLS of a port, with the inputs from which it was built.
pub(super) struct BuiltTermination {
    parts: TerminationInputs,
    view: Arc<PortTermination>,
}

fn alpn(protocol: AppProtocol) -> Vec<Vec<u8>> {
    match protocol {
        AppProtocol::Tcp => Vec::new(),
        _ => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
    }
}

/// Returns the names that the service's certificate contains and that clients may use.
fn names(hostname: &str, key: &ServiceKey) -> Vec<String> {
    vec![
        hostname.to_string(),
        format!("{}.{}.svc", key.name, key.namespace),
        format!("{}.{}", key.name, key.namespace),
        key.name.to_string(),
    ]
}

impl TerminationInputs {
    /// Returns `None` while a part is missing that the terminator needs; until then, TLS is
    /// refused.
    fn terminator(
        &self,
        keyring: &ClientIdentityFactory,
        certificates: Option<&ServiceCertificateFn>,
    ) -> Option<Terminator> {
        let service = &self.termination.service;
        let trust_domain = self.trust_domain.clone()?;
        let trust = keyring.trust().view(&service.tenant);
        let requester = keyring.requester();
        let by_mesh_elsewhere = self.termination.certificate == TerminationCertificate::Mesh
            && self.keys.location == KeyLocation::KeyServer;
        let terms = TerminationTerms {
            tenant: service.tenant.clone(),
            trust_domain: trust_domain.clone(),
            clients: self.termination.clients,
            alpn: self.alpn.clone(),
            // A mesh key in a key server signs TLS 1.3 only.
            tls12: !by_mesh_elsewhere,
        };
        match &self.termination.certificate {
            TerminationCertificate::KeyServer(_) => {
                let signed = RemoteKey::by_tenant(
                    requester?,
                    self.server.as_ref()?,
                    KeyName::File(service.clone()),
                );
                Some(Terminator::signed(terms, signed, trust))
            }
            TerminationCertificate::Mesh if by_mesh_elsewhere => {
                let signed = |requester: &KeyClient| {
                    RemoteKey::by_provider(requester, KeyName::Service(service.clone()))
                };
                Some(Terminator::signed(terms, signed(requester?), trust))
            }
            TerminationCertificate::Mesh => {
                let credential = certificates?(
                    &gateway_identity(trust_domain),
                    service,
                    self.keys.algorithm,
                );
                Some(Terminator::new(terms, credential, trust))
            }
        }
    }
}

impl SnapshotBuilder {
    pub(super) fn upsert_termination(&mut self, termination: &Termination) {
        self.touched.views.insert(termination.service.clone());
        let before = self.terminations.insert(
            (termination.service.clone(), termination.port),
            termination.clone(),
        );
        if before.as_ref() != Some(termination) {
            // Open connections may be refused by now.
            self.touch_policies(&termination.service.tenant, []);
        }
    }

    pub(super) fn remove_termination(&mut self, name: &str) {
        let Some((service, port)) = name.rsplit_once(':') else {
            return;
        };
        if let (Ok(service), Ok(port)) = (service.parse::<ServiceKey>(), port.parse()) {
            let at = (service.clone(), port);
            self.terminations.remove(&at);
            // The service may be gone; then no view of it drops what was built.
            self.terminated.remove(&at);
            self.touched.views.insert(service);
        }
    }

    pub(super) fn upsert_key_server(&mut self, server: &KeyServer) {
        self.key_servers
            .insert(format!("{}/{}", server.tenant, server.name), server.clone());
        self.touch_terminations(&server.tenant);
    }

    pub(super) fn remove_key_server(&mut self, name: &str) {
        if let Some(gone) = self.key_servers.remove(name) {
            self.touch_terminations(&gone.tenant);
        }
    }

    /// Marks all terminations of a tenant as changed.
    pub(super) fn touch_terminations(&mut self, tenant: &TenantName) {
        let of_tenant = self
            .terminations
            .keys()
            .filter(|(service, _)| service.tenant == *tenant);
        self.touched
            .views
            .extend(of_tenant.map(|(service, _)| service.clone()));
        let gateways = self.listener_certificates.gateways_of(tenant);
        self.touched.views.extend(gateways.cloned());
    }

    /// Returns the TLS termination of a port, if it has one.
    pub(super) fn termination(
        &mut self,
        key: &ServiceKey,
        port: &ServicePort,
        hostname: &str,
    ) -> Option<Arc<PortTermination>> {
        let at = (key.clone(), port.port);
        let Some(termination) = self.terminations.get(&at).cloned() else {
            self.terminated.remove(&at);
            return None;
        };
        let server = match &termination.certificate {
            TerminationCertificate::KeyServer(name) => self
                .key_servers
                .get(&format!("{}/{name}", key.tenant))
                .cloned(),
            TerminationCertificate::Mesh => None,
        };
        let tenant = self.tenants.get(&key.tenant);
        let parts = TerminationInputs {
            trust_domain: tenant.and_then(|t| t.trust_domain.clone()),
            // Without its tenant there is no trust domain, so no terminator is built from this
            // default.
            keys: tenant.and_then(|t| t.keys).unwrap_or_default(),
            alpn: alpn(port.protocol),
            hostname: hostname.to_string(),
            termination,
            server,
        };
        // The inputs are unchanged, so the existing terminator stays in use.
        if let Some(made) = self.terminated.get(&at).filter(|made| made.parts == parts) {
            return Some(made.view.clone());
        }
        let broken = parts.termination.broken.is_some();
        // A broken termination refuses every connection, so it needs no terminator.
        let terminator = self
            .keyring
            .as_ref()
            .filter(|_| !broken)
            .and_then(|keyring| parts.terminator(keyring, self.certificates.as_ref()));
        let own = parts.termination.certificate == TerminationCertificate::Mesh;
        // A certificate of the tenant's own determines its names itself.
        let known = own.then(|| names(hostname, key));
        let view = Arc::new(PortTermination::Service(TerminationView::new(
            terminator,
            parts.termination.required,
            broken,
            parts.termination.clients,
            known,
        )));
        self.terminated.insert(
            at,
            BuiltTermination {
                parts,
                view: view.clone(),
            },
        );
        Some(view)
    }

    /// Returns the stored terminations and key servers by kind and name.
    pub(super) fn termination_names(&self) -> impl Iterator<Item = (ResourceKind, String)> {
        let terminations = self
            .terminations
            .keys()
            .map(|(service, port)| (ResourceKind::Termination, format!("{service}:{port}")));
        terminations.chain(
            self.key_servers
                .keys()
                .map(|name| (ResourceKind::KeyServer, name.clone())),
        )
    }
}

//! Terminations and tenants' key servers in the builder: a port's TLS is made anew only when something of it changed, so that tickets and what
//! was fetched from key servers live on.

use std::sync::Arc;

use canal_kit::keys::{Keyring, Requester, Signed};
use canal_kit::tls::{TerminationTerms, Terminator};
use canal_model::identity::gateway_identity;
use canal_model::ids::{ServiceKey, TenantName, TrustDomain};
use canal_model::program::{AppProtocol, Kind, ServicePort};
use canal_model::trust::{KeyPlace, KeyPolicy, KeyServer, Termination, TerminationCertificate};
use canal_wire::keyrpc::KeyName;

use super::{Builder, WantService};
use crate::snapshot::termination::TerminationView;

/// All that a port's TLS is made of.
#[derive(Debug, Clone, PartialEq)]
struct Parts {
    termination: Termination,
    trust_domain: Option<TrustDomain>,
    keys: KeyPolicy,
    /// The tenant's own, if it is one of those.
    server: Option<KeyServer>,
    alpn: Vec<Vec<u8>>,
    hostname: String,
}

/// A port's TLS and what it was made of.
pub(super) struct Made {
    parts: Parts,
    view: Arc<TerminationView>,
}

fn alpn(protocol: AppProtocol) -> Vec<Vec<u8>> {
    match protocol {
        AppProtocol::Tcp => Vec::new(),
        _ => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
    }
}

/// Names that the service's certificate has, and clients may use.
fn names(hostname: &str, key: &ServiceKey) -> Vec<String> {
    vec![
        hostname.to_string(),
        format!("{}.{}.svc", key.name, key.namespace),
        format!("{}.{}", key.name, key.namespace),
        key.name.to_string(),
    ]
}

impl Parts {
    fn terminator(&self, keyring: &Keyring, certificates: Option<&WantService>) -> Option<Terminator> {
        let service = &self.termination.service;
        let trust_domain = self.trust_domain.clone()?;
        let trust = keyring.trust().view(&service.tenant);
        let requester = keyring.requester();
        let by_mesh_elsewhere = self.termination.certificate == TerminationCertificate::Mesh && self.keys.place == KeyPlace::KeyServer;
        let terms = TerminationTerms {
            tenant: service.tenant.clone(),
            trust_domain: trust_domain.clone(),
            clients: self.termination.clients,
            alpn: self.alpn.clone(),
            tls12: !by_mesh_elsewhere,
        };
        match &self.termination.certificate {
            TerminationCertificate::KeyServer(_) => {
                let signed = Signed::by_tenant(requester?, self.server.as_ref()?, KeyName::File(service.clone()));
                Some(Terminator::signed(terms, signed, trust))
            }
            TerminationCertificate::Mesh if by_mesh_elsewhere => {
                let signed = |requester: &Requester| Signed::by_provider(requester, KeyName::Service(service.clone()));
                Some(Terminator::signed(terms, signed(requester?), trust))
            }
            TerminationCertificate::Mesh => {
                let credential = certificates?(&gateway_identity(trust_domain), service, self.keys.algorithm);
                Some(Terminator::new(terms, credential, trust))
            }
        }
    }
}

impl Builder {
    pub(super) fn upsert_termination(&mut self, termination: &Termination) {
        self.touched.views.insert(termination.service.clone());
        self.terminations.insert((termination.service.clone(), termination.port), termination.clone());
    }

    pub(super) fn remove_termination(&mut self, name: &str) {
        let Some((service, port)) = name.rsplit_once(':') else { return };
        if let (Ok(service), Ok(port)) = (service.parse::<ServiceKey>(), port.parse()) {
            self.terminations.remove(&(service.clone(), port));
            self.touched.views.insert(service);
        }
    }

    pub(super) fn upsert_key_server(&mut self, server: &KeyServer) {
        self.key_servers.insert(format!("{}/{}", server.tenant, server.name), server.clone());
        self.touch_terminations(&server.tenant);
    }

    pub(super) fn remove_key_server(&mut self, name: &str) {
        if let Some(gone) = self.key_servers.remove(name) {
            self.touch_terminations(&gone.tenant);
        }
    }

    /// Something that all of a tenant's terminations may depend on has changed.
    pub(super) fn touch_terminations(&mut self, tenant: &TenantName) {
        let of_tenant = self.terminations.keys().filter(|(service, _)| service.tenant == *tenant);
        self.touched.views.extend(of_tenant.map(|(service, _)| service.clone()));
    }

    /// How TLS ends at a port, if it does.
    pub(super) fn termination(&mut self, key: &ServiceKey, port: &ServicePort, hostname: &str) -> Option<Arc<TerminationView>> {
        let at = (key.clone(), port.port);
        let Some(termination) = self.terminations.get(&at).cloned() else {
            self.terminated.remove(&at);
            return None;
        };
        let server = match &termination.certificate {
            TerminationCertificate::KeyServer(name) => self.key_servers.get(&format!("{}/{name}", key.tenant)).cloned(),
            TerminationCertificate::Mesh => None,
        };
        let tenant = self.tenants.get(&key.tenant);
        let parts = Parts {
            trust_domain: tenant.and_then(|t| t.trust_domain.clone()),
            keys: tenant.and_then(|t| t.keys).unwrap_or_default(),
            alpn: alpn(port.protocol),
            hostname: hostname.to_string(),
            termination,
            server,
        };
        if let Some(made) = self.terminated.get(&at).filter(|made| made.parts == parts) {
            return Some(made.view.clone());
        }
        let broken = parts.termination.broken.is_some();
        let terminator =
            self.keyring.as_ref().filter(|_| !broken).and_then(|keyring| parts.terminator(keyring, self.certificates.as_ref()));
        let own = parts.termination.certificate == TerminationCertificate::Mesh;
        let known = own.then(|| names(hostname, key));
        let view = Arc::new(TerminationView::new(terminator, parts.termination.required, broken, known));
        self.terminated.insert(at, Made { parts, view: view.clone() });
        Some(view)
    }

    /// What is known of terminations and key servers, by kind and name.
    pub(super) fn termination_names(&self) -> impl Iterator<Item = (Kind, String)> {
        let terminations = self.terminations.keys().map(|(service, port)| (Kind::Termination, format!("{service}:{port}")));
        terminations.chain(self.key_servers.keys().map(|name| (Kind::KeyServer, name.clone())))
    }
}

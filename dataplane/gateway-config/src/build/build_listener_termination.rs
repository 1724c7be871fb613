//! Certificates of Gateways' listeners in the builder.
//!
//! A certificate is parsed once, when it arrives. A listener's TLS is rebuilt only when its
//! certificates changed, so that session tickets survive other changes. Start with
//! [`SnapshotBuilder::port_termination`].

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_identity::{
    CertificateSelector, ListenerClientVerifier, ListenerKeyPair, TerminationTerms, Terminator,
};
use canal_model::certificate::ServingCertificate;
use canal_model::client_validation::ClientValidation;
use canal_model::ids::{SecretKey, ServiceKey, TenantName};
use canal_model::program::{
    IngressListener, ListenerCertificate, RelayProtocol, ResourceKind, ServicePort,
};
use canal_model::trust::ClientCertificates;
use canal_router::HostTable;
use canal_tls::TrustView;

use super::SnapshotBuilder;
use crate::listeners::{host_text, in_order_of_precedence};
use crate::termination::{ListenerClients, ListenerTermination, ListenerTlsMode, PortTermination};

/// The certificates of all Gateways, and the TLS of the listeners that was built from them.
#[derive(Default)]
pub(super) struct ListenerCertificates {
    /// Certificates by the names of their resources.
    stored: BTreeMap<String, NamedKeyPair>,
    /// TLS of each listener by its Gateway and its name.
    built: BTreeMap<(ServiceKey, String), BuiltListener>,
    /// The validations of clients of each Gateway, with what was built from them.
    clients: BTreeMap<ServiceKey, Vec<(ClientValidation, ListenerClients)>>,
}

/// The certificate of a Secret, with its key and the Gateway that names it.
struct NamedKeyPair {
    gateway: ServiceKey,
    source: Arc<ServingCertificate>,
    /// `None` if it cannot be used.
    pair: Option<Arc<ListenerKeyPair>>,
}

/// TLS of a listener, with the certificates and the verifier of clients from which it was built.
struct BuiltListener {
    pairs: Vec<Arc<ListenerKeyPair>>,
    clients: Option<Arc<ListenerClientVerifier>>,
    is_relaying: bool,
    terminator: Arc<Terminator>,
}

impl ListenerCertificates {
    /// Iterates over the stored certificates by kind and name.
    pub(super) fn names(&self) -> impl Iterator<Item = (ResourceKind, String)> {
        let names = self.stored.keys();
        names.map(|name| (ResourceKind::ListenerCertificate, name.clone()))
    }

    /// Iterates over the Gateways of a tenant, once for each of their certificates.
    pub(super) fn gateways_of<'a>(
        &'a self,
        tenant: &'a TenantName,
    ) -> impl Iterator<Item = &'a ServiceKey> {
        let gateways = self.stored.values().map(|it| &it.gateway);
        gateways.filter(|gateway| gateway.tenant == *tenant)
    }

    fn pair(
        &self,
        gateway: &ServiceKey,
        (namespace, name): &SecretKey,
    ) -> Option<Arc<ListenerKeyPair>> {
        let stored = self.stored.get(&format!("{gateway}/{namespace}/{name}"))?;
        stored.pair.clone()
    }
}

/// Returns whether two validations accept the same clients, whatever the listeners are.
fn is_same(one: &ClientValidation, other: &ClientValidation) -> bool {
    one.mode == other.mode && one.authorities == other.authorities
}

impl SnapshotBuilder {
    pub(super) fn upsert_listener_certificate(&mut self, name: String, it: &ListenerCertificate) {
        let stored = &mut self.listener_certificates.stored;
        if stored
            .get(&name)
            .is_some_and(|old| old.source == it.certificate)
        {
            return;
        }
        let pair = ListenerKeyPair::parse(&it.certificate)
            .inspect_err(|error| {
                tracing::error!(certificate = %name, %error, "gateway: a certificate of a listener cannot be used, its listeners refuse the clients that need it");
            })
            .ok()
            .map(Arc::new);
        let certificate = NamedKeyPair {
            gateway: it.gateway.clone(),
            source: it.certificate.clone(),
            pair,
        };
        stored.insert(name, certificate);
        self.touched.views.insert(it.gateway.clone());
    }

    pub(super) fn remove_listener_certificate(&mut self, name: &str) {
        if let Some(gone) = self.listener_certificates.stored.remove(name) {
            self.touched.views.insert(gone.gateway);
        }
    }

    /// Returns the termination of TLS on a port: that of the Gateway for which the service stands,
    /// or that of the service.
    pub(super) fn port_termination(
        &mut self,
        key: &ServiceKey,
        port: &ServicePort,
        hostname: &str,
    ) -> Option<Arc<PortTermination>> {
        let Some(gateway) = self.gateway_of(key) else {
            return self.termination(key, port, hostname);
        };
        let listeners = gateway.listeners.iter();
        let of_port = listeners.filter(|it| it.port == port.port);
        // The listeners of a port are all of one protocol.
        let is_relaying = of_port.clone().any(|it| it.relay.is_some());
        // No listener terminates TLS: either TLS is passed on as it is, or the port is for HTTP or TCP.
        if of_port.clone().all(|it| it.certificates.is_none()) {
            let mut passed = of_port.filter(|it| it.relay == Some(RelayProtocol::TlsPassthrough));
            let passed = passed.next();
            return passed.map(|_| Arc::new(PortTermination::Passthrough));
        }
        let mut hosts = HostTable::new();
        for listener in in_order_of_precedence(of_port) {
            let tls = match listener.certificates {
                // A port for TLS may have listeners that terminate it beside those that do not.
                None => ListenerTlsMode::Passed,
                Some(_) => {
                    let mut validations = gateway.client_validations.iter();
                    let validation = validations.find(|it| it.is_for(port.port, &listener.name));
                    let clients = self.listener_clients(key, validation);
                    let terminator = self.listener_terminator(key, listener, &clients);
                    ListenerTlsMode::Terminated(terminator, clients)
                }
            };
            hosts.insert(&host_text(listener.host.as_ref()), tls);
        }
        // Without a keyring no host has a terminator. The port is for TLS all the same: without a
        // termination, it would be served in plaintext.
        let trust = match &self.keyring {
            Some(keyring) => keyring.trust().view(&key.tenant),
            None => TrustView::without_bundles(),
        };
        let listeners = ListenerTermination { hosts, trust };
        Some(Arc::new(match is_relaying {
            true => PortTermination::Relay(listeners),
            false => PortTermination::Gateway(listeners),
        }))
    }

    /// Returns how a listener validates clients. A verifier is built only if no listener of the
    /// Gateway has the validation yet.
    fn listener_clients(
        &mut self,
        key: &ServiceKey,
        validation: Option<&ClientValidation>,
    ) -> ListenerClients {
        let Some(validation) = validation else {
            return ListenerClients::Unasked;
        };
        let known = &mut self.listener_certificates.clients;
        let known = known.entry(key.clone()).or_default();
        if let Some((_, same)) = known.iter().find(|(old, _)| is_same(old, validation)) {
            return same.clone();
        }
        let clients = match ListenerClientVerifier::new(validation) {
            Ok(verifier) => ListenerClients::Validated(Arc::new(verifier)),
            Err(error) => {
                tracing::error!(gateway = %key, %error, "gateway: the clients of listeners cannot be validated, the listeners refuse all of them");
                ListenerClients::Refused
            }
        };
        known.push((validation.clone(), clients.clone()));
        clients
    }

    /// Drops the TLS of listeners that a Gateway no longer has.
    pub(super) fn forget_listeners(&mut self, key: &ServiceKey) {
        let gateway = self.gateway_of(key);
        let is_listed = |name: &String| {
            let mut listeners = gateway.iter().flat_map(|it| &it.listeners);
            listeners.any(|it| it.name == *name)
        };
        let is_validation = |old: &ClientValidation| {
            let mut all = gateway.iter().flat_map(|it| &it.client_validations);
            all.any(|it| is_same(old, it))
        };
        let ListenerCertificates { built, clients, .. } = &mut self.listener_certificates;
        // The range has the listeners of this Gateway alone, and not those of all tenants.
        let own = built.range((key.clone(), String::new())..);
        let own = own.map(|(at, _)| at).take_while(|(of, _)| of == key);
        let gone: Vec<_> = own.filter(|(_, name)| !is_listed(name)).cloned().collect();
        for at in &gone {
            built.remove(at);
        }
        if let Some(known) = clients.get_mut(key) {
            known.retain(|(old, _)| is_validation(old));
            if known.is_empty() {
                clients.remove(key);
            }
        }
    }

    /// Returns the TLS of a listener; `None` if it is closed, if none of its certificates has
    /// arrived, or if its clients cannot be validated.
    fn listener_terminator(
        &mut self,
        key: &ServiceKey,
        listener: &IngressListener,
        clients: &ListenerClients,
    ) -> Option<Arc<Terminator>> {
        let named = listener.certificates.iter().flatten();
        let of_gateway = named.filter_map(|secret| self.listener_certificates.pair(key, secret));
        let pairs: Vec<_> = of_gateway.filter(|_| listener.is_open).collect();
        let at = (key.clone(), listener.name.clone());
        let built = &mut self.listener_certificates.built;
        // A terminator of certificates that do not count any more must not be used again.
        if pairs.is_empty() {
            built.remove(&at);
            return None;
        }
        let clients = match clients {
            ListenerClients::Unasked => None,
            ListenerClients::Validated(verifier) => Some(verifier.clone()),
            ListenerClients::Refused => {
                built.remove(&at);
                return None;
            }
        };
        let is_same = |old: &&BuiltListener| {
            old.clients.as_ref().map(Arc::as_ptr) == clients.as_ref().map(Arc::as_ptr)
                && old.is_relaying == listener.relay.is_some()
                && old.pairs.len() == pairs.len()
                && old.pairs.iter().zip(&pairs).all(|(a, b)| Arc::ptr_eq(a, b))
        };
        // Each change of the Gateway comes here, and most change neither certificates nor
        // validation.
        if let Some(same) = built.get(&at).filter(is_same) {
            return Some(same.terminator.clone());
        }
        // Until the tenant has arrived, its trust domain is unknown and the listener has no
        // terminator.
        let terms = TerminationTerms {
            tenant: key.tenant.clone(),
            trust_domain: self.tenants.get(&key.tenant)?.trust_domain.clone()?,
            // A listener's clients are validated by `clients` below, with the Gateway's own CAs.
            clients: ClientCertificates::None,
            // What is inside a relayed connection is not known.
            alpn: match listener.relay {
                Some(_) => Vec::new(),
                // In the order of preference.
                None => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
            },
            // Clients outside the mesh may be too old for TLS 1.3.
            tls12: true,
        };
        // A builder without a keyring terminates no TLS.
        let trust = self.keyring.as_ref()?.trust().view(&key.tenant);
        let certificates = CertificateSelector::new(pairs.clone());
        let terminator = Arc::new(Terminator::with_certificates(
            terms,
            certificates,
            clients.clone(),
            trust,
        ));
        let listener = BuiltListener {
            pairs,
            clients,
            is_relaying: listener.relay.is_some(),
            terminator: terminator.clone(),
        };
        built.insert(at, listener);
        Some(terminator)
    }
}

//! TLS termination of one port: that of a service with the names that clients may use, or that of a
//! Gateway with the certificates of its listeners. `canal_identity` does the handshakes.

use std::sync::Arc;

use canal_identity::{ListenerChoice, ListenerClientVerifier, Terminator};
use canal_model::trust::ClientCertificates;
use canal_router::HostTable;
use canal_tls::TrustView;

/// Termination of TLS on one port.
#[derive(Debug)]
pub enum PortTermination {
    /// The port of a service that has a Termination.
    Service(TerminationView),
    /// The port of a Gateway that is for HTTPS: plaintext is refused.
    Gateway(ListenerTermination),
    /// The port of a Gateway that passes TLS through: the server name of the ClientHello is read, and
    /// nothing is terminated. Plaintext is refused.
    Passthrough,
    /// The port of a Gateway that relays connections with TLS: the server name decides whether TLS is
    /// terminated or passed through. Plaintext is refused.
    Relay(ListenerTermination),
}

/// What happens to the TLS of one listener's clients.
#[derive(Debug)]
pub(crate) enum ListenerTlsMode {
    /// The listener terminates it. One that is closed has no terminator.
    Terminated(Option<Arc<Terminator>>, ListenerClients),
    /// The listener relays it as it is.
    Passed,
}

/// The listeners of a Gateway's port for TLS, by the server names that clients send.
#[derive(Debug)]
pub struct ListenerTermination {
    /// What each listener does, by its host.
    pub(crate) hosts: HostTable<ListenerTlsMode>,
    /// Trust of the tenant, by which failed handshakes are counted.
    pub trust: TrustView,
}

/// The clients of a listener that terminates TLS.
#[derive(Debug, Clone, Default)]
pub enum ListenerClients {
    /// They are not asked for a certificate.
    #[default]
    Unasked,
    Validated(Arc<ListenerClientVerifier>),
    /// Their certificates cannot be validated, so there are none.
    Refused,
}

impl ListenerTermination {
    /// Returns the terminator of the most specific listener for a server name in lower case. Without
    /// a name, only a listener for any host is one.
    pub fn choose(&self, server_name: Option<&str>) -> ListenerChoice<'_> {
        match self.hosts.get(server_name.unwrap_or_default().as_bytes()) {
            Some(ListenerTlsMode::Terminated(Some(terminator), _)) => {
                ListenerChoice::Terminator(terminator)
            }
            Some(ListenerTlsMode::Terminated(None, _) | ListenerTlsMode::Passed) => {
                ListenerChoice::NoCertificate
            }
            None => ListenerChoice::NoListener,
        }
    }

    /// Returns how the listener that [`Self::choose`] chooses validates clients.
    pub fn clients(&self, server_name: Option<&str>) -> &ListenerClients {
        match self.hosts.get(server_name.unwrap_or_default().as_bytes()) {
            Some(ListenerTlsMode::Terminated(_, clients)) => clients,
            Some(ListenerTlsMode::Passed) | None => &ListenerClients::Unasked,
        }
    }

    /// True if the most specific listener for a server name passes TLS through. The routes decide
    /// then, which a closed listener has none of.
    pub fn passes_through(&self, server_name: Option<&str>) -> bool {
        let listener = self.hosts.get(server_name.unwrap_or_default().as_bytes());
        matches!(listener, Some(ListenerTlsMode::Passed))
    }
}

/// Termination of one port as the gateway serves it.
#[derive(Debug)]
pub struct TerminationView {
    /// `None` if no certificate for the service is available.
    pub terminator: Option<Terminator>,
    /// True if plaintext is refused.
    pub required: bool,
    broken: bool,
    /// Certificates that clients with TLS must present.
    clients: ClientCertificates,
    /// Names that clients may use; `None` if the tenant's own certificate determines them.
    names: Option<Vec<String>>,
}

impl TerminationView {
    pub(super) fn new(
        terminator: Option<Terminator>,
        required: bool,
        broken: bool,
        clients: ClientCertificates,
        names: Option<Vec<String>>,
    ) -> Self {
        Self {
            terminator,
            required,
            broken,
            clients,
            names,
        }
    }

    /// Returns whether a client may stay that connected before the Termination was as it is now.
    /// `tls` is whether the client uses TLS, and `has_certificate` whether it proved an identity.
    pub fn keeps(&self, tls: bool, has_certificate: bool) -> bool {
        let is_refused = if tls {
            self.clients == ClientCertificates::Required && !has_certificate
        } else {
            self.required
        };
        !self.broken && !is_refused
    }

    /// True if the Termination is broken; then every connection is refused.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// True if a client may use this server name for the service.
    pub fn is_named(&self, name: Option<&str>) -> bool {
        match &self.names {
            None => true,
            Some(names) => name.is_some_and(|name| names.iter().any(|known| known == name)),
        }
    }

    #[cfg(any(test, feature = "testing"))]
    pub fn of(required: bool, broken: bool, names: &[&str]) -> Self {
        Self::new(
            None,
            required,
            broken,
            ClientCertificates::None,
            Some(names.iter().map(ToString::to_string).collect()),
        )
    }
}

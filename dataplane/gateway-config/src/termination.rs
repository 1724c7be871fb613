//! TLS termination of one service port: the certificate and the names that clients may use.
//! `canal_identity` does the handshakes.

use canal_identity::Terminator;

/// Termination of one port as the gateway serves it.
#[derive(Debug)]
pub struct TerminationView {
    /// `None` if no certificate for the service is available.
    pub terminator: Option<Terminator>,
    /// True if plaintext is refused.
    pub required: bool,
    broken: bool,
    /// Names that clients may use; `None` if the tenant's own certificate determines them.
    names: Option<Vec<String>>,
}

impl TerminationView {
    pub(super) fn new(
        terminator: Option<Terminator>,
        required: bool,
        broken: bool,
        names: Option<Vec<String>>,
    ) -> Self {
        Self {
            terminator,
            required,
            broken,
            names,
        }
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
            Some(names.iter().map(ToString::to_string).collect()),
        )
    }
}

//! TLS that ends at one service port, as it is served: with which certificate, under which names. Handshakes are the kit's.

use canal_kit::tls::Terminator;

/// See the module.
#[derive(Debug)]
pub(crate) struct TerminationView {
    /// `None`: there is nothing to prove the service's identity with.
    pub(crate) terminator: Option<Terminator>,
    /// Plaintext is refused.
    pub(crate) required: bool,
    broken: bool,
    /// `None`: the names are the certificate's own business, which is the tenant's.
    names: Option<Vec<String>>,
}

impl TerminationView {
    pub(super) fn new(terminator: Option<Terminator>, required: bool, broken: bool, names: Option<Vec<String>>) -> Self {
        Self { terminator, required, broken, names }
    }

    /// Its source was broken: nobody gets in.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether a client may call the service so.
    pub(crate) fn is_named(&self, name: Option<&str>) -> bool {
        match &self.names {
            None => true,
            Some(names) => name.is_some_and(|name| names.iter().any(|known| known == name)),
        }
    }

    #[cfg(test)]
    pub(crate) fn of(required: bool, broken: bool, names: &[&str]) -> Self {
        Self::new(None, required, broken, Some(names.iter().map(ToString::to_string).collect()))
    }
}

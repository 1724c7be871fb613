//! Validation of the certificates of a Gateway's clients, who are outside the mesh. Start at
//! [`ClientValidation`].

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::certificate::CaCertificates;

/// Validation of clients' certificates by listeners of a Gateway that terminate TLS. A listener has
/// at most one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientValidation {
    pub ports: BTreeSet<u16>,
    /// Names of the listeners of these ports that validate clients so. If there are none, all
    /// listeners of these ports do.
    pub listeners: BTreeSet<String>,
    pub mode: ClientValidationMode,
    /// A certificate is valid if one of these authorities issued it for clients.
    pub authorities: Arc<CaCertificates>,
}

impl ClientValidation {
    /// Returns whether a listener of a port validates clients so.
    pub fn is_for(&self, port: u16, listener: &str) -> bool {
        self.ports.contains(&port)
            && (self.listeners.is_empty() || self.listeners.contains(listener))
    }
}

/// The clients that a validation accepts (Gateway API's FrontendValidationModeType, and the modes
/// `MUTUAL` and `OPTIONAL_MUTUAL` of Istio's servers).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ClientValidationMode {
    /// Only clients with a valid certificate.
    AllowValidOnly,
    /// All clients, also those without a certificate and with one that is not valid.
    AllowInsecureFallback,
    /// Clients with a valid certificate, and those without any.
    AllowValidOrNone,
}

impl ClientValidationMode {
    /// Returns the mode as YAML of Gateway API spells it, if it has the mode.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AllowValidOnly => "AllowValidOnly",
            Self::AllowInsecureFallback => "AllowInsecureFallback",
            Self::AllowValidOrNone => "AllowValidOrNone",
        }
    }
}
